"""`cogumi.compile` of one run: compile the layers, for good or as long as measured steps repay it, and report what came of it.

auto trains a few steps as they are, then compiles the layers and times a few more. It stays compiled where those are
shorter. A rest of a training that is too short to repay compiling is left as it is.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.utils.dataclasses import DynamoBackend
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.compile.compile_report import (
    describe_process,
    keep_compiled_code,
    list_variables,
    read_counts,
    try_compiler,
)
from cogumi.compile.layers import REENTRANT, compile_layers, find_obstacle, prepare_four_bit, uncompile_layers
from cogumi.core.durability import NO_SPACE
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_section, write_section
from cogumi.patches import graph_break, unsloth_rl
from cogumi.patches.torch_internals import first_line

log = logging.getLogger("cogumi")

MEASURED_STEPS = 3  # the first is slower, and is left out
# Seconds of training that must be left. Compiling takes one to three minutes where nothing is cached.
WORTH_COMPILING = 600.0
AS_BEFORE = "as in the part of this run before"
# counts: of Dynamo, since the compiling began.
NOT_MEASURED = ("counts", "seconds_per_step_eager", "seconds_per_step")


class CompileCallback(TrainerCallback):
    """Compiles a trainer's model as the run asks for, and keeps the report in `path`.

    mode: "auto", "layers" or "off". excused: in whose block the training waits and may be silent. ending: whether the
    training is to end after the step under way. A machine that is taken back then does not compile in its last seconds.
    """

    def __init__(
        self,
        trainer: Any,
        mode: str,
        path: Path,
        excused: Callable[[], AbstractContextManager[None]],
        ending: Callable[[], bool],
    ) -> None:
        self.model, self.args, self.accelerate = trainer.model, trainer.args, trainer.accelerator.state
        self.mode, self.path, self.excused, self.ending = mode, path, excused, ending
        self.report: dict[str, Any] = {"mode": mode, "decision": "", **dict.fromkeys(NOT_MEASURED)}
        self.counts = read_counts()
        self.on = False
        self.began = self.compiled_before = 0.0
        self.steps: list[float] = []
        self.failures: list[Exception] = []

    def begin(self) -> None:
        """Before training. Raises UsageError where layers are to be compiled and cannot be; auto says so and trains."""
        self.report["prepared"] = prepare_four_bit(self.model)
        for line in self.report["prepared"]:
            log.info("compile: %s", line)
        before = read_section(self.path, "compile")
        earlier = before if self.mode == "auto" else {}
        reason = self.find_obstacle()
        if reason and self.mode == "layers":
            raise UsageError(f"cogumi.compile=layers: {reason}")
        if reason:
            self.decide("off", reason)
        elif earlier.get("decision") == "off":
            self.decide("off", f"{AS_BEFORE}: {earlier['reason'].removeprefix(f'{AS_BEFORE}: ')}")
        elif self.mode == "layers" or earlier.get("decision") == "layers":
            self.compile(f"from the first step, {AS_BEFORE if earlier else 'as cogumi.compile says'}")
        if before.get("decision") not in (None, "", self.report["decision"]):
            was = "compiled" if before["decision"] == "layers" else "not compiled"
            log.warning("compile: the part of this run before was %s; from here on results differ in rounding", was)

    def find_obstacle(self) -> str:
        if self.mode == "off":
            return "cogumi.compile=off"
        if self.args.torch_compile or self.accelerate.dynamo_plugin.backend is not DynamoBackend.NO:
            return "train.torch_compile or ACCELERATE_DYNAMO_BACKEND compiles the whole model, which captures less; leave it out"
        if self.args.gradient_checkpointing and (self.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            return REENTRANT  # set up when training begins, so that the layers do not show it yet
        if unsloth_rl.status().applied:
            return "unsloth's own layers run here, and it compiles parts of them itself"
        return find_obstacle(self.model)

    def compile(self, reason: str) -> None:
        """Patch what 4-bit layers need, try the compiler, and have the layers run compiled. Raises UsageError under layers."""
        place = keep_compiled_code()
        with self.excused():
            graph_break.apply("auto", self.model)
            error = try_compiler(next(self.model.parameters()).device).error
        self.counts = read_counts()  # from now: dropping compiled code sets some of Dynamo's counts to zero
        self.report |= describe_process()
        for variable in list_variables():
            log.info("compile: %s", variable)
        log.info("compile: 4-bit layers: %s", self.report["strategy_reason"])
        if error and self.mode == "layers":
            raise UsageError(f"nothing can be compiled here: {error}", fix="use cogumi.compile=off")
        if error:
            self.decide("off", f"nothing can be compiled here: {error}")
            return
        if self.ending():  # asked for while the compiler was tried, which may take a minute
            return
        self.decide("layers", reason)
        layers = compile_layers(self.model, failures=self.failures if self.mode == "auto" else None)
        self.on = True
        log.info("compile: %d layers; the next step compiles them and takes longer (kept in %s)", len(layers), place)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began, self.compiled_before = time.perf_counter(), read_counts().seconds

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.failures and self.on:  # a run that can train must not end by the compiler
            self.uncompile(f"a layer does not compile: {first_line(self.failures[0])}", logging.ERROR)
        if read_counts().seconds == self.compiled_before:  # a step that compiled something says nothing of the others
            self.steps.append(time.perf_counter() - self.began)
        if len(self.steps) != MEASURED_STEPS:
            return
        if self.mode == "auto" and not self.report["decision"]:
            if not (control.should_training_stop or self.ending()):
                step, left = shortest(self.steps), state.max_steps - state.global_step
                self.report["seconds_per_step_eager"] = step
                if step * left < WORTH_COMPILING:
                    rest = f"{step * left:.0f} s of training are left ({left} steps of {step:.2f} s)"
                    self.decide("off", f"{rest}, and less than {WORTH_COMPILING:.0f} s do not repay compiling")
                else:
                    self.compile(f"to be compared with {step:.2f} s a step as they are")
            self.steps.clear()
        else:
            self.compare()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.compare()

    def compare(self) -> None:
        """A few steps later, once: what Dynamo did, and whether the steps became shorter."""
        if not self.on or self.report["counts"] is not None:
            return
        found = read_counts().since(self.counts)
        step = self.report["seconds_per_step"] = shortest(self.steps) if self.steps else None
        self.report["counts"] = asdict(found)
        eager = self.report["seconds_per_step_eager"]
        if step is not None and eager is not None:
            took = f"steps took {step:.2f} s compiled and {eager:.2f} s as they are"
            if step > eager:
                self.uncompile(took)
                return
            self.decide("layers", took)
        breaks, seconds = sum(found.breaks.values()), f"{found.seconds:.1f} s compiling"
        did = f"{found.graphs} graphs of {found.operations} operations, {breaks} breaks, {found.recompiles} recompiles"
        log.info("compile: %s, %s", did, seconds)
        for why, times in found.breaks.items():
            log.info("compile: %d breaks: %s", times, " ".join(why.split())[:200])
        self.write()

    def uncompile(self, reason: str, level: int = logging.INFO) -> None:
        self.on = False
        uncompile_layers(self.model)
        self.decide("off", reason, level)

    def decide(self, decision: str, reason: str, level: int = logging.INFO) -> None:
        self.report |= {"decision": decision, "reason": reason}
        log.log(level, "compile: %s: %s", decision, reason)
        self.write()

    def write(self) -> None:
        """As JSON; a disk that is full is said, and ends nothing."""
        try:
            write_section(self.path, "compile", self.report)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            log.warning("%s is not written: %s", self.path, error.strerror)


def shortest(steps: list[float]) -> float:
    """Of steps that were timed, the first left out where there are others: what makes one longer is not of the model."""
    return min(steps[1:] or steps)
