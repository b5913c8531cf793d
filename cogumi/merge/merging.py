"""Merging LoRA adapters into their full-precision base, exactly and checked.

The steps are resolve -> plan -> allocate -> write and verify -> manifest -> commit. The first two refuse wrong inputs.
The others write and check a directory beside the output, which the last one renames: it is absent or complete.
"""

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogumi.core.disk_space import space_of
from cogumi.core.errors import MergeError, UsageError
from cogumi.core.formatting import format_bytes
from cogumi.core.notices import show_seconds, show_stage
from cogumi.merge.adapter_files import Adapter, find_adapter, read_json, resolve_adapter
from cogumi.merge.bases import Base, check_further_base, read_model_config, resolve_base
from cogumi.merge.completeness import describe_missing
from cogumi.merge.expert_layout import EXPERT_LAYOUTS
from cogumi.merge.foreign_adapters import as_installed
from cogumi.merge.inspection import refuse_raw_factors
from cogumi.merge.logits import LogitCheck, NotCompared, check_directory
from cogumi.merge.merge_manifest import build_manifest, refuse_second_merge, totals, write_manifest, write_side_files
from cogumi.merge.output_directory import check_target, has_tokenizer, partial_directory
from cogumi.merge.plan import OUTPUT_DTYPES, MergePlan, build_plan
from cogumi.merge.stream import Outcome, progress_bar, write_and_verify
from cogumi.merge.witness import Answer, AnswerCheck, WitnessCheck, check_answers, check_witness, read_answers

log = logging.getLogger(__name__)
FORWARD_KEYS = ("rope_parameters", "sliding_window", "layer_types", "num_experts_per_tok")

AdapterPath = str | os.PathLike[str]
CHOICES = {
    "base_mode": ("full", "dequant"),
    "dtype": ("auto", "keep", *OUTPUT_DTYPES),
    "verify": ("elements", "logits"),
}
# Of an update. Measured with the small base in bfloat16: 0.82 after two steps of GSPO, 0.96 after six, 0.998 after 36.
WELL_RETAINED = 0.98


class RoundedAway(Exception):
    """The dtype of the base rounds too much of the update away; the message says how much."""


@dataclass(frozen=True)
class WriteSettings:
    """Settings of `write_model`. options: recorded in the manifest, "auto" as the dtype that it becomes."""

    target: Path
    options: dict[str, str | None]
    answers: list[Answer] | None
    workers: int | None
    progress: bool


@dataclass(frozen=True)
class MergeReport:
    """Result of a merge.

    tensors_replaced: those taken from the adapter (trained whole, or resized). tensors_converted: dequantized, or stored in
    another dtype, without an update. bytes: of all output shards. max_delta: the largest change of an element before
    rounding. max_delta_ratio: the largest Frobenius |delta| / |W| of a tensor, on a sample. delta_retained: the share of
    all updates that rounding kept, on a sample; None where all updates are zero. elements: how many were computed, each
    the nearest value to W + delta, and read back. readings: how factors of stacked experts were read, and why, by adapter.
    notes: the share of the parameters under the adapter, names without effect, tensors that base and output lack, and
    what rounding took of the update, or would have. dtype: "keep" or the one that everything was converted to.
    """

    out: Path
    base: str
    tensors_merged: int
    tensors_replaced: int
    tensors_copied: int
    tensors_converted: int
    bytes: int
    max_delta: float
    max_delta_ratio: float
    delta_retained: float | None
    elements: int
    logits: LogitCheck | None
    witness: WitnessCheck | None
    answers: AnswerCheck | None
    readings: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    dtype: str = "keep"

    def __str__(self) -> str:
        counts = {"replaced": self.tensors_replaced, "converted": self.tensors_converted, "copied": self.tensors_copied}
        rest = "".join(f", {count} {name}" for name, count in counts.items() if count)
        lines = (
            f"{self.out}: {self.base} with {self.tensors_merged} tensors merged{rest} "
            f"({format_bytes(self.bytes)}, {self.seconds:.1f} s)",
            f"{self.elements:,} computed elements read back and checked, each the nearest value; "
            f"largest change of an element {self.max_delta:.3g}, of a tensor {self.max_delta_ratio:.2%}",
            *(*self.readings, *self.notes, self.logits, self.witness, self.answers),
        )
        return "\n".join(str(line) for line in lines if line)


@show_seconds("merge: the adapter goes into its base")
def merge_adapter(
    adapter: AdapterPath | Sequence[tuple[AdapterPath, float]],
    out: AdapterPath,
    base: AdapterPath | None = None,
    base_revision: str | None = None,
    base_mode: str = "full",
    dtype: str = "keep",
    verify: str = "elements",
    *,
    expert_layout: str | None = None,
    witness: AdapterPath | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> MergeReport:
    """Merge PEFT LoRA adapters into their full-precision base and write the model to `out`.

    Every element is computed in float64 and rounded once, to the nearest value to W + scaling * B @ A (or DoRA's formula),
    and every byte is read back. Shards, names and (unless `dtype` converts) dtypes are the base's. A head that no longer equals
    the embedding it was tied to gets its own tensor. Memory holds one layer's factors and a few megabytes of blocks.

    Args:
        adapter: A directory from PEFT's save_pretrained, or one around it, such as a run's; or (directory, weight) pairs,
            whose updates are added.
        out: The directory to write, which must not exist.
        base: A directory, or a hub id in the local cache. By default the base and the commit that the adapter records.
        base_revision: Revision of a hub id.
        base_mode: "full" merges into full-precision weights. Where the base is quantized, it finds the full-precision
            model by name and proves that it is the original. "dequant" merges into the dequantized weights.
        dtype: "keep" (the base's), "bfloat16", "float16", "float32", or "auto": the base's, or float32 where rounding to
            that loses more than 2 % of the update and the disk has room.
        verify: "elements", or "logits", which also runs base + adapter and the merged model, one at a time.
        expert_layout: How lora_A and lora_B of expert stacks are read ("axis1", "axis2", "axis1-grouped", "axis2-grouped"),
            where the adapter's versions and shapes leave several ways.
        witness: A file of JSON lines {"prompt": text or messages, "answer": text} with the trained model's greedy answers.
            The logits that a run of cogumi left beside its adapter are compared without being asked for.
        workers: Threads that compute, by default one, or with DoRA one for each core.
        progress: Show a bar in a terminal.

    Raises:
        UsageError: The adapter or base cannot be merged exactly, they do not fit together, `out` exists or is not
            writable, or (DiskFull) the disk is too small.
        MergeError: The verification failed.
        OSError: The disk failed.

    After any error or interruption, `out` is complete or absent.
    """
    started = time.monotonic()
    options: dict[str, str | None] = {"dtype": dtype, "base_mode": base_mode, "verify": verify}
    if expert_layout not in (None, *EXPERT_LAYOUTS):
        raise UsageError(f"expert_layout={expert_layout!r} is not one of {', '.join(EXPERT_LAYOUTS)}")
    for name, choices in CHOICES.items():
        if options[name] not in choices:
            raise UsageError(f"{name}={options[name]!r} is not one of {', '.join(choices)}")
    if base_mode == "dequant" and verify == "logits":
        fix = "with base_mode='dequant' use verify='elements'"
        raise UsageError("verify='logits' runs the full-precision base", fix=fix)
    target = Path(out)
    check_target(target)
    answers = None if witness is None else read_answers(Path(witness))
    show_stage(progress, "reading the adapter and its base")
    pairs = weighted(adapter)
    adapters = [(resolve_adapter(path), weight) for path, weight in pairs]
    base_name = None if base is None else os.fspath(base)
    source_base = resolve_base(adapters[0][0], base_name, base_revision, base_mode)
    for part, _ in adapters[1:]:
        check_further_base(part, source_base, base_name, base_revision, base_mode)
    adapters = [(as_installed(part, source_base, expert_layout), weight) for part, weight in adapters]
    if expert_layout is not None and not any(part.reading for part, _ in adapters):
        raise UsageError("no adapter changes stacked experts", key="--expert-layout", fix="leave it out")
    plan = build_plan(adapters, source_base, "keep" if dtype == "auto" else dtype)
    if plan.missing and (verify == "logits" or answers is not None):
        option = "witness" if answers is not None else "verify='logits'"
        fix = f"leave {option} out, or complete the base"
        raise UsageError(f"{option} loads base {source_base.name}, and {plan.missing[0]}", fix=fix)
    refuse_second_merge(plan)
    refuse_raw_factors(plan)
    settings = WriteSettings(target, options | {"expert_layout": expert_layout}, answers, workers, progress)
    try:
        outcome, figures, checks = write_model(plan, settings)
        reason = describe_loss(plan, figures["delta_retained"], "kept")
        reason += ": merge with --dtype float32 to keep all of it" if reason else ""
    except RoundedAway as loss:
        smaller, dtype, plan = plan.shard_bytes, "float32", build_plan(adapters, source_base, "float32")
        reason = f"{loss}: written in float32 ({format_bytes(plan.shard_bytes)} instead of {format_bytes(smaller)})"
        settings.options["dtype"] = dtype
        outcome, figures, checks = write_model(plan, settings)
    if reason:
        log.warning("%s", reason)
    if not has_tokenizer(plan.side_files):
        log.warning("neither %s nor the base has a tokenizer, so the merged model has none", pairs[0][0])
    config, file = json.loads(plan.config), target / "tokenizer.json"
    rows = (config.get("text_config") or config).get("vocab_size") or math.inf  # null where a model reads sound
    tokens = read_json(file).get("added_tokens", []) if file.is_file() else []
    if (last := max((token["id"] for token in tokens), default=0)) >= rows:
        message = "the tokenizer has token %d and the model %d rows: one trained on more should bring its embedding"
        log.warning(message, last, rows)
    for part, _ in plan.adapters:
        if (part.path / "config.json").is_file():
            warn_of_other_settings(part, plan.base)
    if unchanged := [name for name, stat in outcome.stats.items() if stat.max_abs_delta == 0]:
        message = "%d of %d updates are zero (never trained?), the first is %s"
        log.warning(message, len(unchanged), len(outcome.stats), unchanged[0])
    if plan.missing:
        log.warning("%s", describe_missing(plan.missing))
    return MergeReport(
        out=target,
        base=source_base.name,
        readings=tuple(part.reading for part, _ in adapters if part.reading),
        notes=(*plan.notes, reason) if reason else plan.notes,
        seconds=time.monotonic() - started,
        dtype="keep" if dtype == "auto" else dtype,
        **checks,
        **figures,
    )


def warn_of_other_settings(adapter: Adapter, base: Base) -> None:
    """Warn where the model's config beside an adapter, as axolotl saves it, computes otherwise than the base's."""
    with suppress(UsageError):  # a config.json of another kind
        configs = [read_model_config(base, adapter.path).get_text_config(), base.model_config.get_text_config()]
        for key in FORWARD_KEYS:
            trained, stored = (getattr(config, key, None) for config in configs)
            if trained != stored:
                message = "%s has %s %s, the base %s, which the merged model keeps: change its config.json if the training did"
                log.warning(message, adapter.path / "config.json", key, trained, stored)


def write_model(plan: MergePlan, settings: WriteSettings) -> tuple[Outcome, dict[str, Any], dict[str, Any]]:
    """Write, verify and commit one merged model. Returns the outcome, and MergeReport's figures and checks.

    Raises RoundedAway, with nothing committed, where "auto" asks for float32 and the disk has room for it.
    """
    shards = {shard.name: shard.bytes for shard in plan.shards}
    with partial_directory(settings.target, shards, plan.small_bytes) as partial:
        with progress_bar(settings.progress, "merging", plan.shard_bytes) as advance:
            outcome = write_and_verify(plan, partial, settings.workers, advance)
        figures = totals(plan, outcome)
        loss = describe_loss(plan, figures["delta_retained"], "would keep")
        elements = sum(math.prod(tensor.target.shape) for shard in plan.shards for tensor in shard.tensors)
        needed = 4 * elements + plan.small_bytes + (len(shards) << 16)  # headers; the first output is removed before
        if settings.options["dtype"] == "auto":
            if loss and needed < space_of(partial).free + plan.shard_bytes:
                raise RoundedAway(loss)
            settings.options["dtype"] = "keep"
        write_side_files(plan, partial)
        show_stage(settings.progress, "running the merged model")
        verify = str(settings.options["verify"])
        checks = run_models(plan, partial, verify, settings.answers, figures["delta_retained"])
        if differing := next((check for check in checks.values() if check and not check.passed), None):
            raise MergeError(f"{differing}; nothing was committed")
        write_manifest(partial, build_manifest(plan, outcome, settings.options, checks))
    return outcome, figures, checks


def describe_loss(plan: MergePlan, retained: float | None, verb: str) -> str:
    """Return what rounding takes of the update; "" where it is little, or where float32 would keep no more."""
    dtypes = {tensor.target.dtype for tensor in plan.tensors if tensor.updated} - {"F32", "F64"}
    if retained is None or retained >= WELL_RETAINED or not dtypes:
        return ""
    names = [name for name, dtype in OUTPUT_DTYPES.items() if dtype in dtypes]
    return f"{' and '.join(names)} {verb} {retained:.0%} of the update, which is small beside its spacing"


def run_models(
    plan: MergePlan, merged: Path, verify: str, answers: list[Answer] | None, retained: float | None
) -> dict[str, Any]:
    """Compare a merged directory with base + adapter, with what was recorded in training, and with an owner's answers.

    Returns MergeReport's logits, witness and answers. Raises NotCompared for a comparison that was asked for.
    """
    base, parts = plan.base.path, [(part.directory, weight) for part, weight in plan.adapters]
    checks: dict[str, Any] = dict.fromkeys(("logits", "witness", "answers"))
    if verify == "logits":
        checks["logits"] = check_directory(parts, merged, base, retained=retained)
    (first, weight), *others = plan.adapters
    if weight == 1 and not others and not plan.missing:  # else the loaded model has random tensors
        try:
            checks["witness"] = check_witness(first, plan.base, merged, retained)
        except NotCompared as error:
            log.warning("the record of the trained model's logits was not compared: %s", error)
    if answers is not None:
        checks["answers"] = check_answers(answers, [path for path, _ in parts], base, merged)
    return checks


def weighted(adapter: AdapterPath | Sequence[tuple[AdapterPath, float]]) -> list[tuple[Path, float]]:
    """Return (directory, weight) of each adapter. Raises UsageError for a weight that is zero or not a number."""
    if isinstance(adapter, str | os.PathLike):
        return [(find_adapter(Path(adapter)), 1.0)]
    pairs = [(Path(path), float(weight)) for path, weight in adapter]
    for path, weight in pairs:
        if not math.isfinite(weight) or weight == 0:
            raise UsageError(f"adapter {path} has weight {weight}", fix="give it a number other than 0")
    if not pairs:
        raise UsageError("no adapter was given", fix="pass a directory or (directory, weight) pairs")
    return [(find_adapter(path), weight) for path, weight in pairs]
