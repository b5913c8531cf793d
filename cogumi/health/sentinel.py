"""Watches a training: measures what the trainer does not log, judges the run, and does what `cogumi.on_red` says."""

import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from cogumi.checkpoints.callbacks import find_broken_weight
from cogumi.checkpoints.manifest import read_manifest, versions
from cogumi.config.schema import Thresholds
from cogumi.core.run_directory import read_json, read_jsonl, write_json
from cogumi.health.data_checks import examine_batches, measure_pairs
from cogumi.health.flags import BatchStatistics, Flag, RunHistory, RunSettings, number, read_samples, red_flags
from cogumi.health.rules import FIRST_FIGURES, PAIR_T, SETTLED_STEP, is_not_finite, token_frequencies
from cogumi.health.verdict import Check, judge
from cogumi.patches.trl_internals import wrap_method
from cogumi.stack.ranks import Ranks, whole_tensor
from cogumi.telemetry.status import SANITY_CHECKED, STOPPED

log = logging.getLogger("cogumi")

FIRST_ROWS, LATEST_ROWS = 10, 100
EARLY_STEPS, JUDGE_EVERY = 25, 5  # optimizer steps between judgements; twice as many after the early ones
WRITE_SECONDS = 30.0
PAIRS_AGAIN_STEPS = 80  # after which prompts and completions are compared with the model as it is then
LARGEST_CHANGE = 3.0  # of a trained weight; most are hundredths, and Adam moves one by the rate in a step
SAMPLED_ELEMENTS = 256  # of each trained tensor, to see whether it moves


@dataclass(frozen=True)
class EarlyEnd:
    """Why a training ended before its last step: the state of the run, and the reason."""

    state: str
    reason: str


class Sentinel(TrainerCallback):
    """Judges a trainer's training while it runs. `begin()` checks the data; call it before `trainer.train()`.

    A sharded model is examined when the training begins, as its shards exist only then.

    Args:
        trainer: The trainer.
        directory: Where flags.json is written.
        method: sft, dpo or gspo.
        thresholds: The limits that the run may move.
        on_red: What a red flag does.
        sanity: The step after which the run stops, for a sanity check.
        excused: A context manager in whose block the training may be silent.
        pause: What on_red "pause" does, with the reason.
        ranks: The processes of the training, of which the first judges.
    """

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
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.trainer, self.path, self.method = trainer, directory / "flags.json", method
        self.thresholds, self.on_red, self.sanity = thresholds or Thresholds(), on_red, sanity
        self.excused, self.pause = excused, pause
        self.setting = setting_of(trainer, method)
        self.batches: BatchStatistics | None = None
        self.first: list[dict[str, Any]] = []
        self.held_out: list[float] = []  # the first and the last loss
        self.latest: deque[dict[str, Any]] = deque(maxlen=LATEST_ROWS)
        self.flags: list[Flag] = []
        self.saved_flags: list[Flag] = []  # of the run that this one resumes
        self.was_red: dict[str, tuple[int, Flag]] = {}
        self.acted_on: set[str] = set()
        self.ended: EarlyEnd | None = None
        self.judged_at, self.written_at = 0, 0.0
        self.start, self.moved = sample_weights(trainer.model), False
        self.seen: Counter[str] = Counter()  # since the last logged row
        self.began = time.perf_counter()
        wrap_method(trainer, "get_batch_samples", self.time_batches)

    def begin(self) -> None:
        if self.path.exists():  # of the run that this one resumes
            saved = read_json(self.path)
            self.saved_flags = [Flag(**flag) for flag in saved["flags"]]
            for record in saved["was_red"]:
                self.was_red[record["name"]] = record.pop("step"), Flag(**record)
        with self.excused():
            if self.method != "gspo":
                self.batches = examine_batches(self.trainer, self.method, self.ranks)
        self.look(0)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.trainer.is_fsdp_enabled:
            self.begin()
        warmup_steps = args.get_warmup_steps(state.max_steps)
        self.setting = replace(self.setting, max_steps=state.max_steps, warmup_steps=warmup_steps)
        if other := other_versions(args.output_dir, state.global_step):
            log.warning("the run resumes with other versions, so its curves may jump: %s", other)
        # What was red before the step that the run resumes from stays known.
        self.was_red = {name: red for name, red in self.was_red.items() if red[0] <= state.global_step}
        for row in state.log_history:  # of the part before a resume
            if "loss" in row:
                self.remember(dict(row))
        if not self.held_out:  # of the part before a resume; the trainer forgets the one before its first step
            for row in read_jsonl(self.path.with_name("metrics.jsonl")):
                if row["step"] <= state.global_step:
                    self.remember_held_out(row)
        self.judged_at = state.global_step

    def time_batches(self, get_batch_samples: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        batches = get_batch_samples(*args, **kwargs)
        waited = time.perf_counter() - began
        self.seen.update({"seen/wait": waited, "seen/seconds": waited})
        return batches

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()  # after a pause, if there was one

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.seen.update({"seen/steps": 1, "seen/seconds": time.perf_counter() - self.began})
        if self.sanity is not None and state.global_step >= self.sanity and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            self.ended = self.ended or EarlyEnd(SANITY_CHECKED, f"the first {self.sanity} steps are done")

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        self.remember_held_out(logs)
        if "loss" not in logs:  # an evaluation, or the summary
            return
        row = {**logs, "step": state.global_step, **self.seen}
        self.seen.clear()
        if any(is_not_finite(logs.get(key)) for key in ("loss", "grad_norm")) and "finite numbers" not in self.was_red:
            row["seen/broken"] = find_broken_weight(self.trainer.model)
        self.remember(row)
        step, every = state.global_step, JUDGE_EVERY if state.global_step <= EARLY_STEPS else 2 * JUDGE_EVERY
        due = step - self.judged_at >= every or step in (1, FIRST_FIGURES, self.sanity, state.max_steps)
        if not (due or "seen/broken" in row):
            return
        self.judged_at = step if step != FIRST_FIGURES else self.judged_at
        if not self.moved:
            moved = max(changes_since(self.trainer.model, self.start).values(), default=0.0)
            row["seen/moved"] = self.ranks.tell(moved)
            self.moved = row["seen/moved"] > 0
        batches = self.batches
        # All processes compute the loss together.
        if batches is not None and self.ranks.tell(self.should_measure_pairs(batches, step)):
            with self.excused():
                self.batches = replace(batches, pairs_now=measure_pairs(self.trainer, self.ranks))
        self.look(step)
        self.act_on_red(control)

    def remember(self, row: dict[str, Any]) -> None:
        """Keep a row among the first, the latest, or both: with logging_steps 10 a sanity check has ten rows in all."""
        if len(self.first) < FIRST_ROWS:
            self.first.append(row)
        if row["step"] > SETTLED_STEP:
            self.latest.append(row)

    def remember_held_out(self, row: Mapping[str, Any]) -> None:
        if (loss := number(row, "eval_loss")) is not None:
            self.held_out = [*self.held_out[:1], loss]

    def should_measure_pairs(self, batches: BatchStatistics, step: int) -> bool:
        """Return whether to measure pairs again: once if the base cannot tell prompts apart, else when its loss rests."""
        if batches.pairs is None:
            return False
        measured = None if batches.pairs_now is None else batches.pairs_now.step
        if batches.pairs.t < PAIR_T:
            return measured is None and step >= min(
                PAIRS_AGAIN_STEPS, self.sanity or PAIRS_AGAIN_STEPS, self.setting.max_steps
            )
        flag = token_frequencies(self.run())
        return flag is not None and flag.level != "green" and (measured is None or step - measured >= PAIRS_AGAIN_STEPS)

    def look(self, step: int, write: bool = False) -> None:
        """Judge, log flags that are red for the first time, and write flags.json if a flag changed, else every WRITE_SECONDS."""
        before = {(flag.name, flag.level) for flag in self.flags if flag.level != "green"}
        # Resumed after its last step, it has no rows: what those of the earlier process showed still holds.
        self.flags = judge(self.run(), [] if self.first else self.saved_flags)
        for flag in red_flags(self.flags):
            if flag.name not in self.was_red:
                self.was_red[flag.name] = step, flag
                log.error("step %d: %s", step, flag)
        changed = before != {(flag.name, flag.level) for flag in self.flags if flag.level != "green"}
        if write or changed or time.monotonic() - self.written_at > WRITE_SECONDS:
            was_red = [{"step": at, **asdict(flag)} for at, flag in self.was_red.values()]
            flags = [asdict(flag) for flag in self.flags]
            write_json(self.path, {"step": step, "time": time.time(), "flags": flags, "was_red": was_red})
            self.written_at = time.monotonic()

    def run(self) -> RunHistory:
        written = read_samples(self.path.parent) if self.first else []
        latest = list(self.latest)
        return RunHistory(self.setting, self.first, latest, self.batches, self.thresholds, written, self.held_out)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Judge at the last step; a run looks again after the samples that follow."""
        self.look(self.trainer.state.global_step, write=True)

    def release(self) -> None:
        """Drop every reference to the trainer; the flags and `run` stay for the verdict."""
        self.trainer, self.excused, self.pause = None, nullcontext, lambda reason: None

    def act_on_red(self, control: TrainerControl) -> None:
        """Do what `on_red` says, once for each flag: a user who unpauses the training has seen it."""
        new = [flag for flag in red_flags(self.flags) if flag.name not in self.acted_on]
        if self.on_red == "pause":  # a training that is not finite ends by itself (cogumi.checkpoints.callbacks)
            new = [flag for flag in new if flag.name != "finite numbers"]
        if not new or self.on_red == "warn":
            return
        self.acted_on |= {flag.name for flag in new}
        control.should_save = True
        if self.on_red == "pause":
            self.pause(str(new[0]))
        else:
            control.should_training_stop = True
            self.ended = EarlyEnd(STOPPED, str(new[0]))


def setting_of(trainer: Any, method: str) -> RunSettings:
    args = trainer.args
    loss, rows = getattr(args, "loss_type", ""), args.per_device_train_batch_size * args.gradient_accumulation_steps
    return RunSettings(
        method=method,
        learning_rate=args.learning_rate,
        max_steps=args.max_steps,
        examples_per_step=getattr(trainer, "examples_per_step", rows) * args.world_size,
        vocabulary=trainer.model.config.get_text_config().vocab_size,
        loss=",".join(loss) if isinstance(loss, list) else str(loss),
        fp16=args.fp16,
        rollout=getattr(args, "generation_batch_size", 0) or 0,
        spacings_per_rate=spacings_per_rate(trainer.model),
    )


def spacings_per_rate(model: Any) -> float:
    """Return the median over trained matrices of a weight's movement where each trained number moves by 1, in spacings.

    A spacing is that of bfloat16 at the matrix's root mean square. Of LoRA B moves, from 0: the product's entries then are
    `scaling * sqrt(r) * rms(A)`, as the signs of its r terms differ. 0 where no weight can be read, as a quantized one.
    """
    ratios = []
    for name, module in model.named_modules():
        factors, base = getattr(module, "lora_A", {}), getattr(module, "base_layer", None)
        weight = getattr(base if factors else module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point() or ".lora_" in name:
            continue
        if weight.is_meta:  # not loaded by this process, which is not the one that judges
            continue
        moves = [1.0] if weight.requires_grad else []
        moves += [module.scaling[key] * len(a.weight) ** 0.5 * root_mean_square(a.weight) for key, a in factors.items()]
        spacing = root_mean_square(weight) * torch.finfo(torch.bfloat16).eps
        if moves and spacing > 0:
            ratios.append(max(moves) / spacing)
    return statistics.median(ratios) if ratios else 0.0


def root_mean_square(weight: Tensor) -> float:
    sample = weight.detach().flatten()[:: max(1, weight.numel() // SAMPLED_ELEMENTS)]
    return float(sample.float().square().mean().sqrt())


def other_versions(output_dir: str | None, step: int) -> str:
    """Describe packages whose versions differ from those that the checkpoint of a step was saved with; "" if none do."""
    manifest = read_manifest(Path(output_dir or ".") / f"checkpoint-{step}")
    saved, here = (manifest.versions if manifest else {}), versions()
    return ", ".join(f"{name} {saved[name]} -> {here.get(name)}" for name in saved if saved[name] != here.get(name))


def sample_weights(model: Any) -> dict[str, Tensor]:
    return {
        name: whole_tensor(weight.detach()).flatten()[:: max(1, weight.numel() // SAMPLED_ELEMENTS)].clone()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


def changes_since(model: Any, start: dict[str, Tensor]) -> dict[str, float]:
    now = sample_weights(model)
    if not start:
        return {}
    changes = torch.stack(
        [(now[name] - start[name].to(now[name].device)).abs().amax().float() for name in start]
    ).nan_to_num(nan=1.0)
    return dict(zip(start, changes.tolist(), strict=True))


def judge_moved(model: Any, start: dict[str, Tensor], tuning: str, has_gradient: bool = True) -> Check:
    """Check that training changed the weights. Only B of an adapter counts: weight decay moves A without a gradient."""
    changes = changes_since(model, start)
    if (largest := max(changes.values(), default=0.0)) > LARGEST_CHANGE:
        figure, required = f"largest change {largest:.2e}", f"at most {LARGEST_CHANGE:g}"
        fix = "lower train.learning_rate: weights moved far more than a training moves them"
        return Check("weights", figure, required, False, fix)
    if tuning == "full":
        moved = sum(change > 0 for change in changes.values())
        figure = f"{moved} of {len(changes)} tensors moved, by {max(changes.values(), default=0.0):.2e} at most"
        return Check("weights", figure, "most of them", moved > len(changes) / 2, "raise train.learning_rate")
    ups = [change for name, change in changes.items() if "lora_B" in name or "lora_embedding_B" in name]
    largest = max(ups or changes.values(), default=0.0)
    fix = "raise train.learning_rate, or change lora.target_modules"
    if not has_gradient:
        fix = "no step had a gradient: change the data or cogumi.rewards, so that there is something to learn"
    return Check("adapter", f"largest change {largest:.2e}", "> 0", largest > 0, fix)
