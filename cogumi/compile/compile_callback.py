"""`cogumi.compile` of one run: compile the layers, or measure first whether it is worth it, and report what came of it.

auto trains a few steps as they are, then compiles one layer and times it both ways on what it was called with. It goes on
compiled where that saves more of the steps that are left than compiling takes once more, as another shape will ask for.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils.dataclasses import DynamoBackend
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.compile.compile_report import CompileReport
from cogumi.compile.compiler import keep_compiled_code, try_compiler
from cogumi.compile.layers import (
    REENTRANT,
    but_for_generation,
    compile_layers,
    decoder_layers,
    decoder_of,
    prepare,
    uncompile_layers,
    why_not,
)
from cogumi.compile.measurement import Seen, Trial, count_as_written, count_next_forward, counts, try_layer, watched
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_section
from cogumi.patches import graph_break, unsloth_rl
from cogumi.patches.graph_break_probes import first_line

log = logging.getLogger("cogumi")

MEASURED_STEPS = 3  # the first is slower, and is left out
# Trying one layer takes some ten seconds to a minute where nothing is cached; in a shorter rest no gain makes up for that.
WORTH_TRYING = 300.0

AS_BEFORE = "as in the part of this run before"


class Compiling(TrainerCallback):
    """Compiles a trainer's model as the run asks for, and keeps the report in `path`.

    mode: "auto", "layers" or "off". excused: in whose block the training waits and may be silent. ending: whether the
    training is to end after the step under way, so that a machine that is taken back does not compile in its last seconds.
    """

    def __init__(
        self,
        trainer: Any,
        mode: str,
        path: Path,
        excused: Callable[[], AbstractContextManager[None]],
        ending: Callable[[], bool],
    ) -> None:
        self.model = trainer.model
        self.args = trainer.args
        self.accelerate = trainer.accelerator.state
        self.mode = mode
        self.path = path
        self.excused = excused
        self.ending = ending
        self.report = CompileReport.of_process(mode)
        self.on = False
        self.began = self.compiled_before = 0.0
        self.steps: list[float] = []
        self.watching = ExitStack()
        self.seen = Seen()

    def begin(self) -> None:
        """Before training. Raises UsageError where layers are to be compiled and cannot be; auto says so and goes on."""
        self.report = replace(self.report, prepared=tuple(prepare(self.model)))
        for line in self.report.prepared:
            log.info("compile: %s", line)
        before = read_section(self.path, "compile")
        earlier = before if self.mode == "auto" else {}
        reason = self.why_not()
        if reason and self.mode == "layers":
            raise UsageError(f"cogumi.compile=layers: {reason}")
        if reason:
            self.decide("off", reason)
        elif earlier.get("decision") == "off":
            self.decide("off", f"{AS_BEFORE}: {earlier['reason'].removeprefix(f'{AS_BEFORE}: ')}")
        elif self.mode == "layers" or earlier.get("decision") == "layers":
            self.compile_from_the_start(AS_BEFORE if earlier else "as cogumi.compile says")
        if before.get("decision") not in (None, "", self.report.decision):
            was = "compiled" if before["decision"] == "layers" else "not compiled"
            log.warning("compile: the part of this run before was %s; from here on results differ in rounding", was)

    def compile_from_the_start(self, reason: str) -> None:
        if error := self.make_ready():
            if self.mode == "layers":
                raise UsageError(f"nothing can be compiled here: {error}", fix="use cogumi.compile=off")
            self.decide("off", f"nothing can be compiled here: {error}")
            return
        count_as_written(self.model, self.count_all_and_then_outside)
        self.switch_on(f"from the first step, {reason}")

    def why_not(self) -> str:
        if self.mode == "off":
            return "cogumi.compile=off"
        if self.args.torch_compile:
            return "train.torch_compile is on and compiles the whole model, which captures less of it; leave that out"
        if (backend := self.accelerate.dynamo_plugin.backend) is not DynamoBackend.NO:
            return (
                f"accelerate compiles the whole model with {backend.value.lower()}; leave ACCELERATE_DYNAMO_BACKEND out"
            )
        if self.args.gradient_checkpointing and (self.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            return REENTRANT  # set up when training begins, so that the layers do not show it yet
        if unsloth_rl.status().applied:
            return "unsloth's own layers run here, and it compiles parts of them itself"
        return why_not(self.model)

    def make_ready(self) -> str:
        """Patch what 4-bit layers need and try the compiler; why nothing can be compiled here, or ""."""
        keep_compiled_code()
        with self.excused():
            graph_break.apply("auto", self.model)
            found = try_compiler(next(self.model.parameters()).device)
        self.report = self.report.anew()
        for line in self.report.of_the_process():
            log.info("compile: %s", line)
        return found.error

    # ------------------------------------------------------------------------------------------------------------ the steps

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.began, self.compiled_before = time.perf_counter(), counts().seconds
        if self.undecided and len(self.steps) == MEASURED_STEPS - 1:
            self.seen = self.watching.enter_context(watched(self.layer_to_try))
            count_next_forward(decoder_of(self.model), self.count_all)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if counts().seconds == self.compiled_before:  # a step that compiled something says nothing of the others
            self.steps.append(time.perf_counter() - self.began)
        if self.undecided and len(self.steps) == MEASURED_STEPS:
            self.watching.close()
            if not (control.should_training_stop or self.ending()):
                self.find_out(state.max_steps - state.global_step)
            self.steps.clear()
            self.seen = Seen()  # which held a layer's inputs
        elif self.on and len(self.steps) == MEASURED_STEPS and self.report.counts is None:
            self.look_back()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.on and self.report.counts is None:
            self.look_back()

    @property
    def undecided(self) -> bool:
        return self.mode == "auto" and not self.report.decision

    def find_out(self, steps_left: int) -> None:
        """Decide for the rest of the run, from what this model's steps and one of its layers took."""
        step = shortest(self.steps)
        self.report = replace(self.report, seconds_per_step_eager=step)
        if step * steps_left < WORTH_TRYING:
            left = f"{step * steps_left:.0f} s of training are left ({steps_left} steps of {step:.2f} s)"
            self.decide("off", f"{left}, and less than {WORTH_TRYING:.0f} s do not repay compiling")
            return
        if not self.seen.calls:
            self.decide("off", f"no layer was trained in step {MEASURED_STEPS}, so none could be tried")
            return
        if error := self.make_ready():
            self.decide("off", f"nothing can be compiled here: {error}")
            return
        if self.ending():  # asked for while the compiler was made ready, which may take a minute
            return
        log.info("compile: trying one layer; training waits for it")
        with self.excused():
            trial = self.try_one()
        if trial is None or self.ending():
            return
        layers = len(decoder_layers(self.model))
        passes = self.seen.calls // (2 if decoder_layers(self.model)[0].gradient_checkpointing else 1)
        # What layers take in a step is no more than the step, whatever else ran on the machine while one was timed.
        gain = min(trial.gain * layers * passes, step * (1 - trial.compiled / trial.eager))
        saved = gain * steps_left
        measured = (
            f"a layer takes {trial.compiled * 1e3:.1f} ms instead of {trial.eager * 1e3:.1f} ms, "
            f"{saved:.0f} s in the {steps_left} steps that are left, and compiling took {trial.compile:.0f} s"
        )
        if saved > trial.compile:
            count_next_forward(decoder_of(self.model), self.count_outside)
            self.switch_on(measured)
        else:
            self.decide("off", f"not repaid: {measured}")

    @property
    def layer_to_try(self) -> Any:
        """The first that is trained: an adapter may be on the later ones only."""
        layers = decoder_layers(self.model)
        return next((each for each in layers if any(p.requires_grad for p in each.parameters())), layers[0])

    def try_one(self) -> Trial | None:
        """One layer both ways; None where it does not compile, which is said."""
        layer = self.layer_to_try
        try:
            return try_layer(layer, but_for_generation(layer, "inductor"), self.seen.args, self.seen.kwargs)
        except RuntimeError as error:  # Dynamo's and inductor's errors are; a run that can train must not end by one
            self.decide("off", f"a layer does not compile: {first_line(error)}", logging.ERROR)
            return None

    def look_back(self) -> None:
        """A few steps later: what Dynamo did, and whether the steps became shorter."""
        step = shortest(self.steps) if self.steps else None
        self.report = replace(self.report, counts=counts().since(self.report.before), seconds_per_step=step)
        eager = self.report.seconds_per_step_eager
        if step is not None and eager is not None and step > eager:
            self.on = False
            uncompile_layers(self.model)
            self.decide("off", f"steps took {step:.2f} s compiled and {eager:.2f} s as they are")
            return
        for line in self.report.of_the_model():
            log.info("compile: %s", line)
        self.report.write(self.path)

    # ---------------------------------------------------------------------------------------------------------- what follows

    def switch_on(self, reason: str) -> None:
        self.decide("layers", reason)
        layers = compile_layers(self.model, rescue=self.mode == "auto")
        self.on = True
        log.info(
            "compile: %d layers; the next step compiles them and takes longer (kept in %s)",
            len(layers),
            keep_compiled_code(),
        )

    def decide(self, decision: str, reason: str, level: int = logging.INFO) -> None:
        self.report = replace(self.report, decision=decision, reason=reason)
        log.log(level, "compile: %s: %s", decision, reason)
        self.report.write(self.path)

    def count_all(self, operations: int) -> None:
        self.report = replace(self.report, operations=operations)

    def count_all_and_then_outside(self, operations: int) -> None:
        self.count_all(operations)
        count_next_forward(decoder_of(self.model), self.count_outside)

    def count_outside(self, operations: int) -> None:
        self.report = replace(self.report, operations_outside=operations)


def shortest(steps: list[float]) -> float:
    """Of steps that were timed, the first left out where there are others: what makes one longer is not of the model."""
    return min(steps[1:] or steps)
