"""The end of a run: saving, merging, comparing, the checks and the verdict."""

import logging
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerBase

from cogumi.checkpoints.commit import remove_if_there, write_aside
from cogumi.checkpoints.saving import RETRY_SECONDS
from cogumi.checkpoints.snapshots import thin_out
from cogumi.config.schema import RunConfig
from cogumi.core.disk_space import space_of
from cogumi.core.errors import DiskFull, NothingToMerge, UsageError, best_effort
from cogumi.core.formatting import format_bytes, one_line
from cogumi.core.liveness import beat
from cogumi.core.run_directory import DECISIONS, read_json, read_section, write_atomic, write_json, write_section
from cogumi.evaluation.held_out_reward import NAME as HELD_OUT_REWARD
from cogumi.health.flags import red_flags
from cogumi.health.verdict import (
    RAISED,
    Check,
    Scale,
    Verdict,
    attempt,
    check_completions,
    check_reward,
    failed_check,
    safe_to_scale,
)
from cogumi.hub.downloads import Download, fetch
from cogumi.merge import logits
from cogumi.merge.adapter_files import write_base_record
from cogumi.merge.arithmetic import DeltaStats
from cogumi.merge.bases import cached_snapshot
from cogumi.merge.logits import LogitCheck
from cogumi.merge.merging import WELL_RETAINED, MergeReport, merge_adapter
from cogumi.merge.preflight import Original
from cogumi.merge.tokenizer_files import settle_tokenizer
from cogumi.merge.witness import write_witness
from cogumi.models.adapters import TRAINED, differing_tensors
from cogumi.models.base import auto_class, meta_model
from cogumi.models.loading import resolve_dtype
from cogumi.models.quantized_bases import quantization_of
from cogumi.models.unsloth_models import Backend
from cogumi.patches import unsloth_rl
from cogumi.patches.trl_internals import commit_of
from cogumi.telemetry.mirrored_run import MIRRORED_ADAPTER, RunMirror
from cogumi.telemetry.recorder import set_status, terminal_loggers
from cogumi.telemetry.status import SANITY_CHECKED
from cogumi.training.loop import TrainingOutcome
from cogumi.training.resume import RESUME_HINTS

log = logging.getLogger("cogumi")
Result = TypeVar("Result")
# No failure: this share of the update stays, of the next tokens are equal, and of the adapter's movement is the largest distance.
MOSTLY_RETAINED, EQUAL_TOKENS, SMALL_MOVEMENT = 0.9, 0.98, 0.25
SAMPLED_ELEMENTS = 1 << 16  # of each tensor of which rounding is measured
LOGIT_TOKENS = 64  # of each example on which logits are compared: 2 x 64 x 150 000 logits in bfloat16 are 38 MB
SAFE_TO_SCALE = "safe to scale"  # the check that answers a sanity check


def record_backend(run_dir: Path, backend: Backend) -> None:
    """Log what trains, and keep it in decisions.json; a run that resumes with another is told."""
    before = read_section(run_dir / DECISIONS, "backend").get("name", backend.name)
    log.info("backend: %s (%s)", backend.name, backend.reason)
    if before != backend.name:
        log.warning("the run began with %s, and resumes with %s: the two differ in rounding", before, backend.name)
    write_section(run_dir / DECISIONS, "backend", {"name": backend.name, "reason": backend.reason})


def fetch_into(run_dir: Path, download: Download) -> None:
    """Download a model, with its progress in the run's status."""
    with logging_redirect_tqdm(terminal_loggers()):
        fetch(download, lambda here, total: set_status(run_dir, "running", stage="download", bytes=here, of=total))


def save_adapter(model: Any, tokenizer: PreTrainedTokenizerBase, run_dir: Path, revision: str | None) -> Path:
    """Adapter, tokenizer and the records of its merge, written aside and renamed: `adapter/` is whole or not there."""
    unfinished, adapter = run_dir / ".adapter", run_dir / "adapter"
    with write_aside(unfinished):
        model.save_pretrained(unfinished, selected_adapters=[TRAINED])  # and not the frozen reference of a warm start
        tokenizer.save_pretrained(unfinished)
        write_base_record(unfinished, model, revision)
        if read_section(run_dir / DECISIONS, "backend").get("name") != "unsloth":  # its kernels return no logits
            write_witness(unfinished, model, tokenizer)
        with best_effort("compare the tokenizer with the base's", UsageError):
            settle_tokenizer(unfinished, directory_of(model.config.name_or_path, commit_of(model.config)))
    remove_if_there(adapter)  # the same one: the run had come as far as this, and ended before its end
    return unfinished.rename(adapter)


def choose_saved_dtype(run: RunConfig, model: Any, dtype: torch.dtype) -> tuple[torch.dtype, Check]:
    """Return the dtype to save a model in whose every weight was trained, and the check of what it keeps of the update.

    dtype: the base's. `cogumi.merge_dtype: auto` takes float32 where that would round too much away, if the disk has room.
    """
    name, required = "saved update", f">= {WELL_RETAINED:.0%}"
    if dtype == torch.float32 or run.merge_dtype == "float32":
        return torch.float32, Check(name, "float32 keeps all of it", required, True)
    retained, short, size = None, str(dtype).removeprefix("torch."), 4 * model.num_parameters()
    with best_effort("compare the trained weights with the base's"):
        retained = retained_share(model, directory_of(model.config.name_or_path, commit_of(model.config)), dtype)
    if retained is None:
        fix = "set cogumi.merge_dtype: float32 to save all of it"
        return dtype, Check(name, f"{short}, not compared with the base", required, True, fix, warning=True)
    if run.merge_dtype == "auto" and retained < WELL_RETAINED and size < space_of(run.run_dir).free:
        reason = f"would keep {retained:.0%} of the update, which is small beside its spacing"
        log.warning("%s %s: written in float32 (%s)", short, reason, format_bytes(size))
        return torch.float32, Check(name, "float32 keeps all of it", required, True)
    fix = "set cogumi.merge_dtype: float32 and another cogumi.run_dir; the last checkpoint has the weights as trained"
    is_kept, is_lost = retained >= MOSTLY_RETAINED, retained < WELL_RETAINED
    return dtype, Check(name, f"{short} keeps {retained:.1%} of it", required, is_kept, fix, warning=is_lost)


def retained_share(model: Any, base: Path, dtype: torch.dtype) -> float:
    """Return the share of the update of the base's weights that rounding to dtype keeps, on a sample of each tensor."""
    stats, before = DeltaStats(), auto_class(model.config).from_pretrained(base, dtype="auto").state_dict()
    for name, weight in model.named_parameters():
        if name in before and before[name].shape == weight.shape:  # rows of new tokens resize a tensor
            sampled = slice(None, None, max(1, weight.numel() // SAMPLED_ELEMENTS))
            live = weight.detach().flatten()[sampled].cpu()
            delta = live.double() - before[name].flatten()[sampled].double()
            rounding = live.to(dtype).double() - live.double()
            stats.add(DeltaStats(delta_squares=float(delta @ delta), along_delta=float(rounding @ delta)))
    return 1.0 if stats.retained is None else stats.retained


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase, run_dir: Path, dtype: torch.dtype) -> Path:
    """Save the trained model, written aside and renamed to `merged/`.

    The model itself is converted to that dtype: what is compared afterwards is what was saved.
    """
    unfinished, merged = run_dir / ".merged", run_dir / "merged"
    remove_if_there(merged)
    with write_aside(unfinished):
        model.to(dtype).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        with best_effort("compare the tokenizer with the base's", UsageError):
            settle_tokenizer(unfinished, directory_of(model.config.name_or_path, commit_of(model.config)))
    return unfinished.rename(merged)


def directory_of(base: str, commit: str | None) -> Path:
    return Path(base) if Path(base).is_dir() else cached_snapshot(base, commit)


def judge_saved(model: Any, saved: Path) -> Check:
    """Load what was saved and compare every tensor with the live one, bit for bit."""
    live = model.state_dict()
    stored = auto_class(AutoConfig.from_pretrained(saved)).from_pretrained(saved, dtype="auto").state_dict()
    other = [name for name in live if name not in stored or not torch.equal(live[name].cpu(), stored[name])]
    first = f", the first is {other[0]}" if other else ""
    figure = f"{len(other)} of {len(live)} tensors differ from the live model's{first}"
    return Check("saved model", figure, "0, bit for bit", not other, "load the last checkpoint instead of merged/")


def retry_when_full(run: RunConfig, stage: str, act: Callable[..., Result], *arguments: Any) -> Result:
    """Do what writes a result.

    On a full disk it waits for space where `cogumi.on_full` is "pause"; otherwise DiskFull. Where the disk's own
    numbers say that there is room, as with a quota, it tries again after a while.
    """
    while True:
        try:
            return act(*arguments)
        except DiskFull as full:
            if thin_out(run.run_dir / "checkpoints", 0):  # adapters of earlier steps give way
                continue
            if run.cogumi.on_full != "pause":
                raise
            log.error("%s waits: %s", stage, full)
            set_status(run.run_dir, "running", stage=stage, reason=f"{stage} waits for space: {full}")
            time.sleep(RETRY_SECONDS)
            while full.needed and space_of(Path(full.place)).free < full.needed:
                beat()
                time.sleep(RETRY_SECONDS)
        set_status(run.run_dir, "running", stage=stage)


@dataclass(frozen=True)
class LiveModel:
    """Record of the live model for the checks of a merge, once it has left memory.

    again: the command that merges the adapter as the run does. reference: None where the merged model is compared with the
    adapter on the full-precision base, because the live model ran on quantized weights or by unsloth's kernels, as
    `trained_on` says. missing: why they could not be recorded.
    """

    device: torch.device
    dtype: torch.dtype
    tokens: torch.Tensor
    again: str
    checks: tuple[Check, ...] = ()
    reference: logits.Reference | None = None
    trained_on: str = ""
    missing: str = ""


def record_live(
    run: RunConfig, model: Any, adapter: Path, tokens: torch.Tensor, original: Original | None
) -> LiveModel:
    """Record what the merged model will be compared with, on tokens (int64, [batch, sequence]).

    original: of a base that is quantized on disk.
    """
    words = ["cogumi", "merge", str(adapter), "OUT"]
    if original is not None:
        words += ["--base", original.name, *(["--revision", original.revision] if original.revision else [])]
    words += ["--base-mode", "dequant"] if run.cogumi.base_mode == "dequant" else []
    live = LiveModel(model.device, resolve_dtype(run.model.dtype), tokens[:, :LOGIT_TOKENS], shlex.join(words))
    unsloths = unsloth_rl.restore_classes(model.config.model_type)  # the merged model cannot run with unsloth's methods
    quantized = quantization_of(model.config)
    try:
        # original alone: where transformers dequantized what it loaded.
        if quantized is None and original is None and not unsloths:
            return replace(live, reference=logits.record_logits(model, live.tokens))
        other = differing_tensors(model, adapter)
    except logits.OUT_OF_MEMORY as error:
        return replace(live, missing=f"memory ran out while the live model's logits were recorded: {one_line(error)}")
    except Exception as error:  # noqa: BLE001  the merge needs none of it
        return replace(live, checks=(failed_check("live model", error),), missing="its logits were not recorded")
    trained_on = quantized.type or quantized.method if quantized else original.kind if original else "unsloth's kernels"
    figure = f"{len(other)} tensors differ from the live adapter's" + (f", the first is {other[0]}" if other else "")
    saved = Check("saved adapter", figure, "0, bit for bit", not other, "merge the adapter of the last checkpoint")
    return replace(live, checks=(saved,), trained_on=trained_on)


def try_merge(
    run: RunConfig, adapter: Path, base: str, live: LiveModel, original: Original | None
) -> tuple[Path | None, list[Check]]:
    """Return the merged model and its checks; a refused merge is a failed check, because the adapter was paid for."""
    try:
        return retry_when_full(run, "merge", merge_and_check, run, adapter, base, live, original)
    except Exception as error:  # noqa: BLE001
        repair = f"the adapter is saved: repair what the message names, then run: {live.again}"
        train_again = "see the failed check of the adapter: train again in another cogumi.run_dir"
        fix = train_again if isinstance(error, NothingToMerge) else repair
        return None, [*live.checks, Check("merge", one_line(error), "the adapter goes into its base", False, fix)]


def merge_and_check(
    run: RunConfig, adapter: Path, base: str, live: LiveModel, original: Original | None
) -> tuple[Path, list[Check]]:
    """Merge into the full-precision base, load the result, and compare its logits with those that were recorded."""
    remove_if_there(run.run_dir / "merged")
    merge_base = original.name if original else base
    revision = original.revision if original else run.model.revision
    merged, mode, dtype = run.run_dir / "merged", run.cogumi.base_mode, run.merge_dtype
    report = merge_adapter(adapter, merged, base=merge_base, base_revision=revision, base_mode=mode, dtype=dtype)
    for line in str(report).splitlines():
        log.info("%s", line)
    figure = (
        f"{report.elements:,} elements in {report.tensors_merged} tensors read back, each base + adapter, rounded once"
    )
    checks = [Check("merged weights", figure, "each", True), *live.checks]  # else it has raised MergeError
    if live.trained_on and run.cogumi.base_mode == "dequant":
        log.info("the merged logits are not compared: the base is its own 4-bit weights (cogumi.base_mode: dequant)")
        return report.out, checks
    try:
        checks += compare_merged(live, adapter, report, revision if report.base == merge_base else None)
    except logits.NotCompared as error:  # the elements are proven; this check would confirm their names and meaning
        figure = f"not compared: {error}; to compare, on a larger machine: {live.again} --verify logits"
        checks.append(Check("merged logits", figure, "compared where memory allows", True))
    except Exception as error:  # noqa: BLE001  the merged model is there
        required, fix = "compared with the adapter on the base", f"merge again: {live.again} --verify logits"
        checks.append(Check("merged logits", one_line(error), required, False, fix))
    return report.out, checks


def compare_merged(live: LiveModel, adapter: Path, report: MergeReport, revision: str | None) -> list[Check]:
    """Check the merged model's logits, also with all towers if the run loads the language model alone."""
    if live.missing:
        raise logits.NotCompared(live.missing)
    config = AutoConfig.from_pretrained(report.out)
    dtype = torch.float32 if report.dtype == "float32" else live.dtype  # 16 bits would round it after all
    loader = logits.Loader(auto_class(config), dtype, live.device)
    base, checks = directory_of(report.base, revision), []
    reference, beside = live.reference, "the live adapter's"
    if reference is not None and dtype != live.dtype:
        # Computing in 16 bits moves the update's scale by more than SCALE_ERROR: what was saved is compared with the live
        # model in the live model's dtype, and the merge with what was saved in its own.
        saved = logits.compare_adapters(
            reference, [(adapter, 1.0)], base, report.out, replace(loader, dtype=live.dtype)
        )
        figure, bounds = describe_distance(saved, "the live model's logits")
        checks = [Check("saved adapter", figure, bounds, saved.passed, "merge the adapter of the last checkpoint")]
        reference = None
    if reference is None:
        on = live.trained_on or str(live.dtype).removeprefix("torch.")
        reference = logits.record_directory([(adapter, 1.0)], base, report.out, live.tokens, loader)
        beside = f"those of the adapter on the full-precision base (it was trained on {on})"
    check = logits.compare_directory(reference, report.out, loader, report.delta_retained)
    checks += judge_logits(check, f"{beside}, on {live.tokens.numel()} tokens", report, live.again)
    if type(meta_model(config).config) is type(config):
        return checks
    tower_loader = replace(loader, kind=AutoModelForImageTextToText)
    towers = logits.compare_directory(reference, report.out, tower_loader, report.delta_retained)
    figure = f"rms {towers.measured:.2e} between {config.architectures[0]} and {beside}"
    fix = "load the merged model with AutoModelForCausalLM"
    return [*checks, Check("merged logits with the towers", figure, f"<= {towers.bound:.2e}", towers.passed, fix)]


def describe_distance(check: LogitCheck, beside: str) -> tuple[str, str]:
    figure, bounds = f"rms {check.measured:.2e} from {beside}", f"<= {check.bound:.2e}"
    if check.scale_bound is not None:
        figure += f", {check.base_distance / check.live_distance:.3f} times as far from the base"
        bounds += f", 1 +- {check.scale_bound:.3f}"
    return figure, bounds


def judge_logits(check: LogitCheck, beside: str, report: MergeReport, again: str) -> list[Check]:
    """Two checks of the merged model's logits.

    Where rounding took a part of the update, a failed check says so. An update smaller than half the spacing of the stored
    dtype leaves an element as it was. A small part without effect on the next tokens is a warning.
    """
    fix, retained = f"merge again: {again} --verify logits", report.delta_retained
    is_lost, is_small = retained is not None and retained < WELL_RETAINED, False
    if retained is not None and is_lost:
        stored = read_json(report.out / "config.json")
        dtype = str(stored.get("dtype") or stored.get("torch_dtype") or "float32").removeprefix("torch.")
        lost = f"{dtype} kept {retained:.0%} of the update and rounded the rest away"
        fix = f"merge again: {again} --dtype float32 ({lost}; or train longer, or raise train.learning_rate)"
        near = check.measured <= max(check.bound, SMALL_MOVEMENT * check.live_distance)
        is_small = retained >= MOSTLY_RETAINED and check.same_tokens >= EQUAL_TOKENS and near
    apart = f"logits rms {check.base_distance:.2e} apart"
    nearer = f"> {check.measured:.2e}, as far as from the adapter"
    figure, bounds = describe_distance(check, beside)
    if is_lost:
        figure += f", {check.same_tokens:.1%} of the next tokens are equal"
    differs = is_small or check.base_distance > check.measured
    return [
        Check("merged differs from the base", apart, nearer, differs, fix),
        Check("merged logits", figure, bounds, is_small or check.passed, fix, warning=is_lost),
    ]


def judge_mirrored(mirror: RunMirror) -> Check:
    missing, fix = mirror.wait_for_adapter(), f"copy adapter/ to {mirror.place.name} before this machine is destroyed"
    figure = f"it has not arrived: {missing}" if missing else "it was sent, and read back"
    return Check(MIRRORED_ADAPTER, figure, f"whole in {mirror.place.name}", not missing, fix)


def record_verdict(run_dir: Path, fitted: TrainingOutcome) -> Verdict:
    """Write and log the verdict, and set the run's status: finished, or to be resumed later."""
    verdict, ended = make_verdict(fitted), fitted.ended
    write_json(run_dir / "verdict.json", verdict.as_dict())
    for line in (*verdict.checks, *(flag for flag in verdict.flags if flag.level != "green")):
        log.info("%s", line)
    log.info("flags: %d of %d green", sum(flag.level == "green" for flag in verdict.flags), len(verdict.flags))
    still = {flag.name for flag in red_flags(verdict.flags)}
    for step, flag in verdict.was_red:
        if flag.name not in still:
            log.warning("was red at step %d: %s", step, flag)
    if ended is None:
        set_status(run_dir, "finished" if verdict.passed else "finished, checks failed")
        if verdict.passed:
            write_atomic(run_dir / "DONE", "")
        return verdict
    answer = [f"{check.name}: {check.figure}" for check in verdict.checks if check.name == SAFE_TO_SCALE]
    then = RESUME_HINTS[ended.state]
    if verdict.safe_to_scale is Scale.NO:
        then = "change what failed, and start again in another cogumi.run_dir"
    reason = "; ".join([ended.reason, *answer, then])
    log.info("%s: %s", ended.state, reason)
    set_status(run_dir, ended.state, reason=reason)
    return verdict


def make_verdict(fitted: TrainingOutcome) -> Verdict:
    sentinel, ended, checks = fitted.sentinel, fitted.ended, list(fitted.checks)
    safe: Scale | None = None
    raised = (flag for flag in sentinel.flags if flag.evidence.startswith(RAISED))
    checks += [Check(flag.name, flag.evidence, "judged", False, "read run.log") for flag in raised]
    checks += attempt("held-out completions", check_completions, sentinel.run(), sentinel.flags)
    if sentinel.method == "gspo" and ended is None:
        is_measured = any(check.name == HELD_OUT_REWARD for check in checks)  # which tells more than rollouts
        rollouts = attempt("reward", check_reward, sentinel.run())
        checks += [check for check in rollouts if not (check.warning and is_measured)]
    if ended is not None and ended.state != SANITY_CHECKED:
        checks.append(Check(ended.state, ended.reason, "the training to its end", False, RESUME_HINTS[ended.state]))
    if sentinel.sanity is not None:
        try:
            safe, why = safe_to_scale(sentinel.run(), sentinel.flags, (flag for _, flag in sentinel.was_red.values()))
        except Exception as error:  # noqa: BLE001  the answer is no, then
            safe, why = Scale.NO, failed_check(SAFE_TO_SCALE, error).figure
        missed = [check.name for check in checks if not check.passed]
        if safe and missed:
            safe, why = Scale.NO, f"{' and '.join(missed)} failed"
        goal = "the reward rose" if sentinel.method == "gspo" else "the loss fell"
        required = f"{goal} beyond its noise, and no flag of what is learned is red or yellow"
        checks.append(Check(SAFE_TO_SCALE, f"{safe}: {why}", required, bool(safe)))
    return Verdict(tuple(checks), tuple(sentinel.flags), tuple(sentinel.was_red.values()), safe)
