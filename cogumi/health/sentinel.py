"""Watches one training: sees what the trainer does not log, judges it at each log, and does what the run asks for on red.

`cogumi.on_red`: warn says so; stop ends the training after the step, with a checkpoint; pause writes a checkpoint, and waits.
`cogumi.sanity` ends it after so many steps, with a checkpoint and an answer.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from cogumi.checkpoints.manifest import read_manifest, versions
from cogumi.config.subsections import Thresholds
from cogumi.core.run_directory import read_json, write_json
from cogumi.health.data_checks import examine_batches, measure_pairs, shared_words_of, shared_words_of_answers
from cogumi.health.flags import BatchStatistics, Flag, RunHistory, RunSettings, read_samples, red_flags
from cogumi.health.flags_common import SETTLED_STEPS, is_not_finite
from cogumi.health.flags_sft import TELLS, is_at_frequencies
from cogumi.health.verdict import Check, Scale, judge, safe_to_scale
from cogumi.telemetry.status import SANITY_CHECKED, STOPPED

log = logging.getLogger("cogumi")

FLAGS = "flags.json"
FIRST_ROWS, LATEST_ROWS = 10, 100
EVERY, EARLY = 5, 25  # optimizer steps between two judgements, at least; twice as many after the early ones
WRITE_SECONDS = 30.0
ASK_AGAIN = 80  # the step at which prompts and completions are compared once more, by the model as it is then
SAMPLED = 256  # elements of each trained tensor that are remembered, to see whether it moves


@dataclass(frozen=True)
class EarlyEnd:
    """Why a training ended before its last step: the state of the run, and the reason."""

    state: str
    reason: str


class Sentinel(TrainerCallback):
    """Judges a trainer's training while it runs. directory: of flags.json. excused: in whose block the training may be silent.
    pause: what on_red "pause" does, with the reason. `begin()` checks the data, before `trainer.train()`."""

    def __init__(
        self,
        trainer: Any,
        directory: Path,
        method: str,
        thresholds: Thresholds | None = None,
        on_red: Literal["warn", "pause", "stop"] = "warn",
        sanity: int | None = None,
        excused: Callable[[], AbstractContextManager[None]] = nullcontext,
        pause: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.trainer, self.directory, self.method = trainer, directory, method
        self.thresholds = thresholds or Thresholds()
        self.on_red, self.sanity = on_red, sanity
        self.excused, self.pause = excused, pause
        self.setting = setting_of(trainer, method)
        self.batches: BatchStatistics | None = None
        self.first: list[dict[str, Any]] = []
        self.latest: deque[dict[str, Any]] = deque(maxlen=LATEST_ROWS)
        self.flags: list[Flag] = []
        self.was_red: dict[str, tuple[int, Flag]] = {}
        self.acted_on: set[str] = set()
        self.earlier: list[dict[str, Any]] = []
        self.ended: EarlyEnd | None = None
        self.judged_at = 0
        self.written_at = 0.0
        self.start_of: dict[str, Tensor] | None = None
        self.moved = False
        self.forget_seen()
        self.began = time.perf_counter()
        self.get_batch_samples = trainer.get_batch_samples
        trainer.get_batch_samples = self.time_batches

    def forget_seen(self) -> None:
        """As after a logged row."""
        self.seen: Counter[str] = Counter()
        self.learned: list[Tensor | int] = []

    def begin(self) -> list[Flag]:
        path = self.directory / FLAGS  # of the part before, which the first look writes over
        self.earlier = read_json(path)["was_red"] if path.exists() else []
        with self.excused():
            if self.method != "gspo":
                self.batches = examine_batches(self.trainer)
            if self.method == "sft" and self.batches is not None and self.batches.learned:
                pairs, words = measure_pairs(self.trainer), shared_words_of(self.trainer)
                self.batches = replace(self.batches, pairs=pairs, words=words)
            if self.method == "dpo" and self.batches is not None:
                self.batches = replace(self.batches, answers=shared_words_of_answers(self.trainer))
        self.look(0)
        return self.flags

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        warmup_steps = args.get_warmup_steps(state.max_steps)
        self.setting = replace(self.setting, max_steps=state.max_steps, warmup_steps=warmup_steps)
        if other := other_versions(args.output_dir, state.global_step):
            log.warning("the run resumes with other versions, so its curves may jump: %s", other)
        self.first, self.moved, self.ended = [], False, None
        self.latest.clear()
        for row in state.log_history:  # of the part before, where the run resumes
            if "loss" in row:
                self.remember(dict(row))
        for each in self.earlier:  # what was red before the step that the run resumes from stays known
            if each["step"] <= state.global_step:
                self.was_red[each["name"]] = each["step"], Flag(**{key: each[key] for key in each if key != "step"})
        self.start_of = sample_weights(self.trainer.model)
        self.forget_seen()
        self.judged_at = state.global_step

    def time_batches(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the trainer's `get_batch_samples`: the batches of one optimizer step, and how long they took."""
        began = time.perf_counter()
        found = self.get_batch_samples(*args, **kwargs)
        waited = time.perf_counter() - began
        self.seen.update({"seen/wait": waited, "seen/seconds": waited})
        if found[1] is not None:  # learned tokens, on the device: read when a row is logged
            self.learned.append(found[1])
        return found

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()  # after a pause, if there was one

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seen["seen/skipped"] += bool(self.trainer.accelerator.optimizer_step_was_skipped)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.seen.update({"seen/steps": 1, "seen/seconds": time.perf_counter() - self.began})
        if self.sanity is not None and state.global_step >= self.sanity and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            self.ended = self.ended or EarlyEnd(SANITY_CHECKED, f"the first {self.sanity} steps are done")

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in logs:  # of an evaluation, or the summary
            return
        row = self.extend_row(logs, state.global_step)
        self.remember(row)
        step, every = state.global_step, EVERY if state.global_step <= EARLY else 2 * EVERY
        due = step - self.judged_at >= every or step in (1, self.sanity, state.max_steps)
        if not (due or "seen/broken" in row):
            return
        self.judged_at = step
        if not self.moved and self.start_of is not None:
            row["seen/moved"] = max(changes_since(self.trainer.model, self.start_of).values(), default=0.0)
            self.moved = row["seen/moved"] > 0
        row["seen/memory"] = memory_in_use(args.device)
        if self.batches is not None and self.should_measure_pairs(self.batches, step):
            with self.excused():
                self.batches = replace(self.batches, pairs_now=measure_pairs(self.trainer))
        self.look(step)
        self.act_on_red(control)

    def extend_row(self, logs: dict[str, Any], step: int) -> dict[str, Any]:
        """A logged row with what was seen of its steps."""
        row = {**logs, "step": step, **self.seen}
        if self.learned:  # the trainer has just waited for the loss, so this waits for nothing
            row["seen/empty"] = sum(int(each) == 0 for each in self.learned)
        self.forget_seen()
        if any(is_not_finite(logs.get(key)) for key in ("loss", "grad_norm")) and "finite numbers" not in self.was_red:
            row["seen/broken"] = find_broken_weight(self.trainer.model)
        return row

    def remember(self, row: dict[str, Any]) -> None:
        """Among the first rows, the latest, or both: where every tenth step is logged a sanity check has ten rows in all."""
        if len(self.first) < FIRST_ROWS:
            self.first.append(row)
        if row["step"] > SETTLED_STEPS:
            self.latest.append(row)

    def should_measure_pairs(self, batches: BatchStatistics, step: int) -> bool:
        """Whether it is time to ask the model as it is now. Where the base cannot tell prompts apart, it is asked once.
        Where the base can, it is asked when its loss comes to rest at the tokens' frequencies."""
        if batches.pairs is None:
            return False
        asked = None if batches.pairs_now is None else batches.pairs_now.step
        if batches.pairs.t < TELLS:
            return asked is None and step >= min(ASK_AGAIN, self.sanity or ASK_AGAIN, self.setting.max_steps)
        return is_at_frequencies(self.run()) and (asked is None or step - asked >= ASK_AGAIN)

    def look(self, step: int) -> None:
        """Judge, say which flags are red for the first time, and keep flags.json."""
        before = non_green(self.flags)
        self.flags = judge(self.run())
        for flag in red_flags(self.flags):
            if flag.name not in self.was_red:
                self.was_red[flag.name] = step, flag
                log.error("step %d: %s", step, flag)
        if before != non_green(self.flags) or time.monotonic() - self.written_at > WRITE_SECONDS:
            self.write(step)

    def run(self) -> RunHistory:
        written = read_samples(self.directory) if self.start_of is not None else []  # none before there are rows
        return RunHistory(self.setting, self.first, list(self.latest), self.batches, self.thresholds, written)

    def write(self, step: int) -> None:
        was_red = [{"step": at, **asdict(flag)} for at, flag in self.was_red.values()]
        flags = [asdict(flag) for flag in self.flags]
        write_json(self.directory / FLAGS, {"step": step, "time": time.time(), "flags": flags, "was_red": was_red})
        self.written_at = time.monotonic()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.conclude()

    def conclude(self) -> None:
        """Judge what there is at the end: of the steps, and then of the samples that are written after them."""
        step = self.trainer.state.global_step
        self.look(step)
        self.write(step)

    def answer(self) -> tuple[Scale, str]:
        """Safe to scale: yes, no or not shown, and why."""
        return safe_to_scale(self.run(), self.flags, (flag for _, flag in self.was_red.values()))

    def act_on_red(self, control: TrainerControl) -> None:
        """Do what `on_red` says, once for each flag: a user who unpauses the training has seen it."""
        new = [flag for flag in red_flags(self.flags) if flag.name not in self.acted_on]
        if not new or self.on_red == "warn":
            return
        self.acted_on |= {flag.name for flag in new}
        control.should_save = True
        if self.on_red == "pause":
            self.pause(str(new[0]))
        else:
            control.should_training_stop = True
            self.ended = EarlyEnd(STOPPED, str(new[0]))


def non_green(flags: list[Flag]) -> set[tuple[str, str]]:
    """The flags that are not green: a file that only gains green ones is written later, since that waits for the disk."""
    return {(flag.name, flag.level) for flag in flags if flag.level != "green"}


def setting_of(trainer: Any, method: str) -> RunSettings:
    args, model = trainer.args, trainer.model
    adapter: Any = (getattr(model, "peft_config", None) or {}).get(getattr(model, "active_adapter", None))
    rank = getattr(adapter, "r", 0) or 0
    loss = getattr(args, "loss_type", "")
    return RunSettings(
        method=method,
        learning_rate=args.learning_rate,
        max_steps=args.max_steps,
        examples_per_step=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
        max_grad_norm=args.max_grad_norm or 0.0,
        beta=getattr(args, "beta", 0.0) or 0.0,
        vocabulary=model.get_input_embeddings().num_embeddings,
        loss=",".join(loss) if isinstance(loss, list) else str(loss),
        fp16=args.fp16,
        optimizer=str(getattr(args.optim, "value", args.optim)),
        hidden_size=getattr(model.config.get_text_config(), "hidden_size", 0) or 0,
        lora_rank=rank,
        lora_scale=adapter.lora_alpha / (rank**0.5 if adapter.use_rslora else rank) if rank else 0.0,
        rollout=getattr(args, "generation_batch_size", 0) or 0,
    )


def other_versions(output_dir: str | None, step: int) -> str:
    """What differs between the packages that the checkpoint of a step was saved with and those here; "" of no checkpoint."""
    manifest = read_manifest(Path(output_dir or ".") / f"checkpoint-{step}")
    there, here = (manifest.versions if manifest else {}), versions()
    return ", ".join(f"{name} {there[name]} -> {here.get(name)}" for name in there if there[name] != here.get(name))


def sample_weights(model: Any) -> dict[str, Tensor]:
    """Some elements of each tensor that is trained, spread over it, copied."""
    return {
        name: weight.detach().flatten()[:: max(1, weight.numel() // SAMPLED)].clone()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


def changes_since(model: Any, start: dict[str, Tensor]) -> dict[str, float]:
    """The largest change of a remembered element of each tensor."""
    now = sample_weights(model)
    if not start:
        return {}
    apart = torch.stack([(now[name] - start[name]).abs().amax().float() for name in start]).nan_to_num(nan=1.0)
    return dict(zip(start, apart.tolist(), strict=True))


def judge_moved(model: Any, start: dict[str, Tensor], tuning: str) -> Check:
    """Whether training changed the weights. start: as they were before it, and before a checkpoint was loaded.

    Of an adapter B counts: A starts from chance, and weight decay moves it without a gradient.
    """
    changes = changes_since(model, start)
    if tuning == "full":
        moved = sum(each > 0 for each in changes.values())
        figure = f"{moved} of {len(changes)} tensors moved, by {max(changes.values(), default=0.0):.2e} at most"
        return Check("weights", figure, "most of them", moved > len(changes) / 2, "raise train.learning_rate")
    ups = [change for name, change in changes.items() if "lora_B" in name or "lora_embedding_B" in name]
    largest = max(ups or changes.values(), default=0.0)
    fix = "raise train.learning_rate, or change lora.target_modules"
    return Check("adapter", f"largest change {largest:.2e}", "> 0", largest > 0, fix)


def find_broken_weight(model: Any) -> str:
    """The first weight that is not finite, "frozen ..." before "trained ...", or "". Reads every weight: asked once."""
    for name, weight in sorted(model.named_parameters(), key=lambda named: named[1].requires_grad):
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            return f"{'trained' if weight.requires_grad else 'frozen'} {name}"
    return ""


def memory_in_use(device: torch.device) -> float:
    """Of the accelerator's memory, what is held by others or was allocated here at the highest; else of the machine's."""
    if device.type != "cuda":
        return psutil.virtual_memory().percent / 100
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return 1 - (free + max(0, cached)) / total
