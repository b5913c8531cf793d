"""One run from a resolved configuration to a checked, merged model.

`train_leader` is the sequence. What a stage does is in the module that it names: `methods/preparation.py` (base, refusals),
`methods/examples.py` (data), `training/estimate.py` (settings, preflight), `methods/building.py` (the trainer),
`training/loop.py` (training), `training/finish.py` (saving, merging, the verdict).
"""

import ctypes
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from cogumi.checkpoints.interruption import exit_on_signals
from cogumi.checkpoints.mirror import Mirror
from cogumi.config.schema import RunConfig, dump_config
from cogumi.core.errors import RefusedAtSetup, UsageError, best_effort
from cogumi.core.formatting import one_line
from cogumi.core.notices import quiet_libraries, show_seconds
from cogumi.core.output import survive_closed_terminal
from cogumi.core.run_directory import DECISIONS, SAMPLES_FILE, create_run_dir, read_jsonl, write_atomic, write_section
from cogumi.evaluation import held_out_reward
from cogumi.evaluation.comparison import COMPARED, compare_result, refuse_incomparable
from cogumi.evaluation.forgetting import check_forgetting
from cogumi.forecast.preflight_report import Line
from cogumi.forecast.run_forecast import describe_weights
from cogumi.health.verdict import Verdict, attempt
from cogumi.hub.downloads import Download, refuse_no_room
from cogumi.merge.adapter_files import read_json, serving_limits, weights_sample
from cogumi.merge.arithmetic import restore_matmul_precision
from cogumi.merge.preflight import Original, check_loadable, prove_original, refuse_missing_weights
from cogumi.methods import auto_settings, building, gspo
from cogumi.methods.adapter_source import record_adapter
from cogumi.methods.examples import Examples, describe_empty_thoughts, describe_overlong, first_tokens, prepare_examples
from cogumi.methods.preparation import (
    check_base,
    check_merge,
    check_settings,
    describe_unjudged,
    find_merge_base,
    load_run_tokenizer,
    prepare_base,
)
from cogumi.methods.sampler import refuse_settings
from cogumi.methods.step_split import describe_split, split_step
from cogumi.models.base import RunBase
from cogumi.models.loading import BUILD_REFUSALS, resolve_dtype
from cogumi.models.quantized_bases import quantization_of
from cogumi.models.unsloth_models import Backend, choose_backend
from cogumi.notebook.panel import write_report
from cogumi.rl.patching import patch
from cogumi.stack.gpu_health import wait_for_gpus
from cogumi.stack.gpus import VARIABLE, disable_cudnn_attention, refuse_several_gpus, use_one_gpu
from cogumi.stack.ranks import Ranks
from cogumi.telemetry.heartbeat import Heartbeat, measure_run
from cogumi.telemetry.mirrored_run import mirror_run
from cogumi.telemetry.recorder import enter_stage, record_run, write_samples
from cogumi.telemetry.status import NON_FINITE, SANITY_CHECKED
from cogumi.telemetry.throughput import EXPERTS, Meter
from cogumi.telemetry.trackers import finish_trackers, refuse_unreachable
from cogumi.training import finish
from cogumi.training.estimate import make_choices, run_preflight, wants_preflight
from cogumi.training.loop import TrainingOutcome, fit, forget_requests, judge_fit, sample_options
from cogumi.training.parallel import Followers, follow, gather_trained, processes_here, set_accelerate
from cogumi.training.resume import bring_back, is_resuming, lock_run, refuse_mirror_of_itself, refuse_spent
from cogumi.training.watch import RunWatch

log = logging.getLogger("cogumi")
MAX_HALVINGS = 2  # of the micro-batch, where memory runs out at a step
LOGIT_ROWS = 2  # examples on which the merged model's logits are compared


@dataclass(frozen=True)
class RunResult:
    """What a run left behind. `metrics` are the logged rows, in order.

    `merged` is None where `cogumi.merge` is false or the run ended early (`cogumi.sanity`, `on_red`, a budget). Where every
    weight was trained (`cogumi.tuning: full`) it is the saved model, and `adapter` is None.
    """

    run_dir: Path
    base: str
    adapter: Path | None
    merged: Path | None
    verdict: Verdict
    metrics: list[dict[str, Any]] = field(repr=False)

    @property
    def passed(self) -> bool:
        return self.verdict.passed

    def series(self, key: str) -> list[float]:
        """The logged values of one metric, in order: `result.series("reward")`."""
        return [row[key] for row in self.metrics if row.get(key) is not None]


@show_seconds("train: this cell trains")
@quiet_libraries()
@restore_matmul_precision()
def train(run: RunConfig) -> RunResult:
    """Train a resolved configuration in this process, as the only one, as rank 0 or as one that follows it."""
    run, meter = run.model_copy(deep=True), Meter(run.cogumi.price_per_hour)
    process = set_up_process(run)
    if not process.ranks.leads:
        return follow(process.ranks)
    watch = RunWatch(run, meter)
    with Followers(process.ranks) as followers, watch.running():
        return followers.finish(train_leader(run, watch, process, followers))


def train_leader(run: RunConfig, watch: RunWatch, process: "Process", followers: Followers) -> RunResult:
    """Make one run. Bad input is refused before its directory exists."""
    if run.cogumi.mirror is not None:
        refuse_mirror_of_itself(run.run_dir, run.cogumi.mirror)
        if bring_back(run, Mirror(run.cogumi.mirror)):
            return read_finished(run)
    check_settings(run)
    refuse_unreachable(run.train)
    resuming = is_resuming(run)
    if resuming:
        refuse_spent(run.run_dir, run.cogumi)
    config_text, requested_revision = dump_config(run), run.model.revision
    run = process.share_step(run)
    run, base = prepare_base(run)
    prepared = prepare(run, base)

    run_dir = run.run_dir if resuming else create_run_dir(run.run_dir)
    mirroring = mirror_run(run_dir, run.cogumi.mirror, watch)
    with mirroring as mirror, open_run(run_dir, resuming, watch) as heart:
        write_atomic(run_dir / "config.yaml", config_text)
        record_start(run, resuming, process, prepared)
        run = make_choices(run, base, prepared.examples.train, prepared.tokenizer)
        if wants_preflight(run):
            enter_stage(heart, "preflight", "forecasting memory and time")
            run_preflight(run, base, prepared.examples.train, prepared.tokenizer)
        for download in prepared.downloads:
            enter_stage(heart, "download")
            finish.fetch_into(run_dir, download)
        if prepared.original is not None:
            prove_original(base.name, base.revision, prepared.original)
        trained = train_in_memory(run, requested_revision, prepared, followers, heart)
        free_memory()  # the merge needs it
        merged = trained.merged
        if mirror is not None and trained.fitted.ended is None:
            mirror.adapter = trained.adapter
        if trained.adapter is not None and trained.live is not None:
            merged, merge_checks = finish.try_merge(run, trained.adapter, base.name, trained.live, prepared.original)
            trained.fitted.checks.extend(merge_checks)
        if run.cogumi.compare_with is not None and trained.fitted.ended is None:
            enter_stage(heart, "compare", f"comparing the result with {run.cogumi.compare_with} on held-out rows")
            trained.fitted.checks.extend(attempt(COMPARED, compare_result, run, base))
        if run.cogumi.forgetting and trained.fitted.ended is None:
            enter_stage(heart, "forgetting", "base and trained model answer the instructions of the forgetting panel")
            trained.fitted.checks.append(check_forgetting(run))
        if mirror is not None and trained.adapter is not None and trained.fitted.ended is None:
            enter_stage(heart, "mirror")
            trained.fitted.checks.append(finish.judge_mirrored(mirror))
        verdict = finish.record_verdict(run_dir, trained.fitted)
        watch.finish(verdict.passed)
        if trained.adapter is not None and (
            limits := serving_limits(read_json(trained.adapter / "adapter_config.json"))
        ):
            log.info("%s", limits)
    return RunResult(run_dir, base.name, trained.adapter, merged, verdict, read_jsonl(run_dir / "metrics.jsonl"))


def read_finished(run: RunConfig) -> RunResult:
    """Read a run that was finished on another machine, and fetched from its mirror."""
    adapter, rows = run.run_dir / "adapter", read_jsonl(run.run_dir / "metrics.jsonl")
    verdict = Verdict.from_dict(read_json(run.run_dir / "verdict.json"))
    return RunResult(run.run_dir, str(run.model.name), adapter if adapter.is_dir() else None, None, verdict, rows)


# ------------------------------------------------------------------------------------------------------- before the run


@dataclass(frozen=True)
class Process:
    """This process of a run: its rank, what trains, and what was decided before CUDA started, as lines for the log."""

    ranks: Ranks
    backend: Backend
    notes: list[str]

    def share_step(self, run: RunConfig) -> RunConfig:
        """Return the run as each process trains it: all together make the step that the configuration names."""
        rank_run = split_step(run, self.ranks.count)
        if self.ranks.count > 1:
            self.notes.append(describe_split(run, rank_run, self.ranks.count))
        return rank_run


def set_up_process(run: RunConfig) -> Process:
    """Choose the GPU, the allocator and the backend, patch the libraries, and join the other processes of the run."""
    count, one_gpu = processes_here(), use_one_gpu()
    if count == 1:
        refuse_several_gpus(torch.cuda.device_count())
    os.environ |= set_accelerate(run, os.environ)
    choices = [auto_settings.Choice(VARIABLE, *one_gpu)] if one_gpu else []
    choices += auto_settings.set_allocator(run)
    backend = choose_backend(run)
    patches = patch(graph_break="off", backend=backend.name)  # 4-bit layers are seen to when the model is there
    rank_run = split_step(run, count)
    arguments = building.trl_arguments(rank_run)  # refuses what TRL would, and joins the other processes
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if reason := disable_cudnn_attention(capability):
        choices.append(auto_settings.Choice("torch.backends.cuda.enable_cudnn_sdp", False, reason))
    if run.cogumi.method == "gspo":
        refuse_settings(rank_run, arguments)
    if arguments.world_size != count:
        raise RuntimeError(f"transformers trains in {arguments.world_size} processes here, and {count} were started")
    if count > 1 and arguments.accelerator_config.split_batches:
        problem = "split_batches cuts each process's batch, which has been cut already"
        raise UsageError(problem, key="train.accelerator_config", fix="drop it")
    notes = [*str(patches).splitlines(), *(f"chosen: {choice}" for choice in choices)]
    if run.cogumi.processes == "all":
        notes.append(f"cogumi.processes: all is {count} here")
    return Process(Ranks(arguments.process_index, count), backend, notes)


@dataclass(frozen=True)
class Prepared:
    """Parts of a run, checked before its directory exists.

    original: the full-precision model of a quantized base, for the merge. notes: lines for the log. weights: how much of
    a quantized base is quantized. sandbox: how programs of the model are isolated, "" without them.
    """

    base: RunBase
    original: Original | None
    downloads: list[Download]
    tokenizer: PreTrainedTokenizerBase
    examples: Examples
    notes: list[str]
    weights: Line | None
    sandbox: str


def prepare(run: RunConfig, base: RunBase) -> Prepared:
    """Check the base, then make the examples and try the rewards. Raises UsageError for all that the run refuses."""
    refuse_missing_weights(base)
    coverage = check_base(run, base)
    original = find_merge_base(run, base)
    check_merge(run, base, original)
    needed = (base.download, original.download if original is not None else None)
    downloads = [download for download in needed if download is not None]
    refuse_no_room(downloads)
    tokenizer, weights, sandbox = load_run_tokenizer(run, base), None, ""
    if run.model.quantization_config is not None or quantization_of(base.config) is not None:
        weights = describe_weights(base.config, resolve_dtype(run.model.dtype), run.model.quantization_config)
    examples = prepare_examples(run, tokenizer, base.config)
    refuse_incomparable(run, base, examples, tokenizer)
    if run.cogumi.method == "gspo":
        gspo.try_rewards(run, examples.train.dataset)
        gspo.try_task(run, examples.train.dataset, tokenizer)
        sandbox = gspo.describe_sandbox(run, gspo.read_rewards(run))
    notes = [f"lora: {coverage}"] if coverage else []
    return Prepared(base, original, downloads, tokenizer, examples, notes, weights, sandbox)


# ------------------------------------------------------------------------------------------------------------ the run


@contextmanager
def open_run(run_dir: Path, resuming: bool, watch: RunWatch) -> Iterator[Heartbeat]:
    """Hold the run directory, record what happens in it, and write the report however the run ends."""
    with (
        survive_closed_terminal(),
        exit_on_signals(),
        lock_run(run_dir),
        write_report_at_end(run_dir),
        finish_trackers(run_dir),
        record_run(run_dir, resuming),
        measure_run(run_dir, watch.meter) as heart,
        watch.in_directory(),
    ):
        heart.watch = watch
        forget_requests(run_dir)  # left over from an earlier part of the run
        yield heart


@contextmanager
def write_report_at_end(run_dir: Path) -> Iterator[None]:
    """Write the report however a run ends, if it has trained. A full disk that does not take it costs nothing else."""
    try:
        yield
    finally:
        with best_effort("write the report"):
            if (run_dir / "metrics.jsonl").exists():
                write_report(run_dir)


def record_start(run: RunConfig, resuming: bool, process: Process, prepared: Prepared) -> None:
    """Log what the run begins with, and keep in decisions.json what a resumed one needs."""
    run_dir, examples, weights = run.run_dir, prepared.examples, prepared.weights
    examples.record(run_dir)
    record_adapter(run)
    if resuming:
        log.info("%s resumes where it stopped; with cogumi.resume: never it would be refused", run_dir)
    finish.record_backend(run_dir, process.backend)
    for line in process.notes:
        log.log(logging.INFO if line.startswith("chosen: ") else logging.DEBUG, "%s", line)
    for line in (*prepared.notes, *examples.reports()):
        log.info(line)
    overlong = describe_overlong(run, examples, prepared.base.config)
    for warning in (overlong, describe_empty_thoughts(run, examples), describe_unjudged(run), wait_for_gpus(0)):
        if warning:
            log.warning(warning)
    if prepared.original is not None:
        log.info("merge: %s", prepared.original)
    if run.cogumi.method == "gspo":
        rollout = gspo.rollout_size(run)
        log.info("rollout: %s", rollout)
        write_section(run_dir / DECISIONS, "rollout", asdict(rollout))
    if prepared.sandbox:
        log.info("%s", prepared.sandbox)
        write_section(run_dir / DECISIONS, "sandbox", {"what": prepared.sandbox})
    if weights is not None:
        log.log(logging.INFO if weights.state == "green" else logging.WARNING, "weights: %s", weights.figure)
    if (download := prepared.base.download) is not None:
        write_section(run_dir / DECISIONS, "base", {"name": download.name, "commit": download.commit})
    elif sample := weights_sample(run.model.name):
        write_section(run_dir / DECISIONS, "base", {"name": run.model.name, "commit": None, "weights": sample})


@dataclass(frozen=True)
class Trained:
    """Result of a training. live: the record of its model for the checks of the merge, None where nothing is merged."""

    fitted: TrainingOutcome
    adapter: Path | None
    merged: Path | None
    live: finish.LiveModel | None


def train_in_memory(
    run: RunConfig, revision: str | None, prepared: Prepared, followers: Followers, heart: Heartbeat
) -> Trained:
    """`train_and_save`; where memory runs out at a step, up to MAX_HALVINGS times more with half the micro-batch."""
    for _ in range(MAX_HALVINGS if followers.ranks.count == 1 else 0):
        try:
            return train_and_save(run, revision, prepared, followers, heart)
        except torch.OutOfMemoryError:
            step, steps = heart.progress.step, heart.progress.steps
            at_step = steps is not None and step < steps
            if not at_step or (halved := auto_settings.halve_micro_batch(run, prepared.base.config)) is None:
                raise
            run = halved
        free_memory()
    return train_and_save(run, revision, prepared, followers, heart)


def free_memory() -> None:
    gc.collect()  # model, trainer and optimizer refer to each other
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what the training freed, and the merge would add to it
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train_and_save(
    run: RunConfig, revision: str | None, prepared: Prepared, followers: Followers, heart: Heartbeat
) -> Trained:
    """Build the trainer, train, save, judge. Its model is out of memory once this has returned.

    run: with its choices made. revision: the one that the configuration names, which an adapter records.
    """
    base, examples, tokenizer = prepared.base, prepared.examples, prepared.tokenizer
    run_dir, prompts, ranks = run.run_dir, prepared.examples.prompts, followers.ranks
    enter_stage(heart, "load", f"loading {base.name}")
    if ranks.count > 1:
        # A weight without a gradient in a step is an expert that no token came to. To look for one costs time.
        mixture = any(getattr(base.config, key, None) for key in EXPERTS)
        run.train.setdefault("ddp_find_unused_parameters", mixture)
    followers.start(run, base, run_dir)
    try:
        if prepared.weights is not None and base.download is not None:
            check_loadable(base)  # with the scales, which are in no header
        trainer = building.build_trainer(run, base, tokenizer, examples, heart.meter, ranks)
    except UsageError as error:
        raise RefusedAtSetup.like(error) from error
    except BUILD_REFUSALS as error:
        raise RefusedAtSetup(f"model, lora or train: {one_line(error)}") from error
    shared = trainer.is_fsdp_enabled
    if prompts is not None and not shared and not (run_dir / SAMPLES_FILE).exists():
        enter_stage(heart, "samples", "completions of held-out prompts before the first step")
        write_samples(run_dir, trainer.model, tokenizer, prompts, 0, sample_options(run, trainer))
        held_out_reward.record_before(run, trainer, tokenizer, examples)
    enter_stage(heart, "train")
    fitted = fit(run, trainer, tokenizer, examples, heart, ranks)
    model = trainer.model
    if shared:
        enter_stage(heart, "save")
        model = building.rebuild_model(run, base, gather_trained(trainer.model))
    ended, adapter, merged = fitted.ended, None, None
    if run.cogumi.tuning == "lora" and (ended is None or ended.state != NON_FINITE):
        adapter = finish.retry_when_full(run, "save", finish.save_adapter, model, tokenizer, run_dir, revision)
    judge_fit(run, trainer, fitted, ranks)
    followers.wait()
    if run.cogumi.tuning == "full" and ended is None:  # after its checks: saving rounds the model's weights
        dtype, rounding = finish.choose_saved_dtype(run, model, base.config.dtype or torch.float32)
        fitted.checks.append(rounding)
        merged = finish.retry_when_full(run, "save", finish.save_model, model, tokenizer, run_dir, dtype)
        fitted.checks.extend(attempt("saved model", finish.judge_saved, model, merged))
    if prompts is not None and (ended is None or ended.state == SANITY_CHECKED):
        enter_stage(heart, "samples", "completions of held-out prompts after the last step")
        step = trainer.state.global_step
        arguments = run_dir, model, tokenizer, prompts, step, sample_options(run, trainer)
        fitted.checks.extend(attempt("samples", write_samples, *arguments))
        fitted.checks.extend(
            attempt(held_out_reward.NAME, held_out_reward.check_after, run, model, tokenizer, examples)
        )
    fitted.checks.extend(attempt("flags", fitted.sentinel.on_train_end))  # with the last held-out loss and samples
    live = None
    if adapter is not None and run.cogumi.merge and ended is None:
        enter_stage(heart, "merge", f"merging into {base.name}, and comparing the result with the trained model")
        tokens = first_tokens(examples.train.dataset, tokenizer, LOGIT_ROWS)
        live = finish.record_live(run, model, adapter, tokens, prepared.original)
    fitted.sentinel.release()
    return Trained(fitted, adapter, merged, live)
