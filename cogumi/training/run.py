"""One run: resolve the config, prepare the data, look ahead, load, train, save, judge, merge, check the merge."""

import gc
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from cogumi.checkpoints.interruption import exit_on_signals
from cogumi.checkpoints.mirror import Mirror
from cogumi.config.schema import RunConfig, dump_config, load_config
from cogumi.core.errors import RefusedAtSetup, UsageError, best_effort
from cogumi.core.formatting import one_line
from cogumi.core.notices import show_seconds
from cogumi.core.output import survive_closed_terminal
from cogumi.core.run_directory import DECISIONS, SAMPLES_FILE, create_run_dir, read_jsonl, write_atomic, write_section
from cogumi.forecast.run_forecast import describe_weights
from cogumi.health.verdict import Verdict, attempt
from cogumi.hub.downloads import plan_download, refuse_no_room
from cogumi.merge.adapter_files import quantization_of, read_json, serving_limits
from cogumi.merge.arithmetic import restore_matmul_precision
from cogumi.merge.preflight import check_loadable, find_original, prove_original
from cogumi.methods import auto_settings, building, gspo
from cogumi.methods.examples import describe_empty_thoughts, describe_overlong, first_tokens, prepare_examples
from cogumi.methods.gspo import describe_sandbox, try_task
from cogumi.methods.sampler import refuse_quantized, refuse_settings
from cogumi.methods.step_split import describe_split, split_step
from cogumi.models.adapters import check_base, check_targets, lora_of
from cogumi.models.loading import resolve_dtype, resolve_model
from cogumi.models.quantization import refuse_quantized_already, refuse_untrainable
from cogumi.models.unsloth_models import Backend, choose_backend
from cogumi.notebook.panel import write_report
from cogumi.rl.patching import patch
from cogumi.stack.gpus import VARIABLE, disable_cudnn_attention, refuse_several_gpus, use_one_gpu
from cogumi.stack.ranks import Ranks
from cogumi.telemetry.heartbeat import measure_run
from cogumi.telemetry.recorder import record_run, set_status, write_samples
from cogumi.telemetry.status import NON_FINITE, SANITY_CHECKED
from cogumi.telemetry.throughput import EXPERTS, Meter
from cogumi.telemetry.trackers import refuse_unreachable
from cogumi.training import stages
from cogumi.training.loop import fit, forget_requests, judge_fit
from cogumi.training.parallel import Followers, follow, gather_trained, processes_here, set_accelerate

log = logging.getLogger("cogumi")
LOGIT_ROWS = 8  # examples on which the merged model's logits are compared


@dataclass(frozen=True)
class RunResult:
    """What a run left behind. `metrics` are the logged rows, in order.

    `merged` is None where `cogumi.merge` is false or the run ended early (`cogumi.sanity`, `on_red`, a budget), `adapter`
    where every weight was trained (`cogumi.tuning: full`).
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
@restore_matmul_precision()
def train(config: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> RunResult:
    """`cogumi.train`, where torch may be imported (`cogumi.runs`)."""
    run = load_config(config, **overrides)
    meter = Meter(run.cogumi.price_per_hour)
    count = processes_here()
    one_gpu = use_one_gpu()
    if count == 1:
        refuse_several_gpus(torch.cuda.device_count())
    os.environ |= set_accelerate(run, os.environ)
    before_start = [auto_settings.Choice(VARIABLE, *one_gpu)] if one_gpu else []
    before_start += auto_settings.set_allocator(run)
    backend = choose_backend(run)
    patches = patch(graph_break="off", backend=backend.name)  # 4-bit layers are seen to when the model is there
    rank_run = split_step(run, count)
    arguments = building.trl_arguments(rank_run)  # refuses what TRL would, and joins the other processes
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if reason := disable_cudnn_attention(capability):
        before_start.append(auto_settings.Choice("torch.backends.cuda.enable_cudnn_sdp", False, reason))
    if run.cogumi.method == "gspo":
        refuse_settings(rank_run, arguments)
    if arguments.world_size != count:
        raise RuntimeError(f"transformers trains in {arguments.world_size} processes here, and {count} were started")
    if count > 1 and arguments.accelerator_config.split_batches:
        problem = "split_batches cuts each process's batch, which has been cut already"
        raise UsageError(problem, key="train.accelerator_config", fix="drop it")
    ranks = Ranks(arguments.process_index, count)
    if not ranks.leads:
        return follow(ranks)
    startup_notes = [*str(patches).splitlines(), *(f"chosen: {choice}" for choice in before_start)]
    if run.cogumi.processes == "all":
        startup_notes.append(f"cogumi.processes: all is {count} here")
    with Followers(ranks) as followers:
        return followers.finish(train_leader(run, meter, backend, startup_notes, followers))


def train_leader(
    run: RunConfig, meter: Meter, backend: Backend, startup_notes: list[str], followers: Followers
) -> RunResult:
    """Train as the only process, or as rank 0. startup_notes: patches, and choices made before CUDA started."""
    building.refuse_impossible(run.cogumi)
    if run.cogumi.mirror is not None:
        Mirror(run.cogumi.mirror)  # refuses a place that cannot be written to
    if run.cogumi.tuning == "full":
        auto_settings.refuse_adapter_settings(run)
    auto_settings.refuse_segments(run)
    refuse_unreachable(run.train)
    if run.model.adapter is not None:
        run.lora = lora_of(run.model.adapter, run.lora)
    resuming = stages.is_resuming(run)
    if resuming:
        building.refuse_spent(run.run_dir, run.cogumi)
    config_text, requested_revision = dump_config(run), run.model.revision
    ranks = followers.ranks
    rank_run = split_step(run, ranks.count)
    if ranks.count > 1:
        startup_notes.append(describe_split(run, rank_run, ranks.count))
    run = rank_run
    run = building.pin_revision(run)  # from here on a model of the hub is one commit, whatever happens to its branch
    base = resolve_model(run.model.name, run.model.revision)
    base_config = AutoConfig.from_pretrained(base, revision=run.model.revision)
    if run.cogumi.tuning == "lora":
        coverage = check_targets(run.lora, base_config, is_own=run.model.adapter is None)
        startup_notes += [f"lora: {coverage}"] if coverage else []
    building.refuse_without_decoder(base_config)
    if run.model.adapter is not None:
        check_base(run.model.adapter, base_config, run.model.revision)
    refuse_quantized(run, base_config)
    refuse_untrainable(base, base_config, run.cogumi.tuning)
    if run.model.quantization_config is not None:
        refuse_quantized_already(base, base_config)
    original, cogumi_settings = None, run.cogumi
    if cogumi_settings.merge and cogumi_settings.tuning == "lora":
        original = find_original(base, base_config, cogumi_settings.merge_base, cogumi_settings.base_mode)
    download = plan_download(base, run.model.revision)
    check_loadable(base, base_config, download)
    building.refuse_unmergeable(run, base, base_config, download, original)
    original_download = original.download if original is not None else None
    downloads = [needed for needed in (download, original_download) if needed is not None]
    refuse_no_room(downloads)
    tokenizer = building.load_run_tokenizer(run, base)
    weights = None
    if run.model.quantization_config is not None or quantization_of(base_config) is not None:
        weights = describe_weights(base_config, resolve_dtype(run.model.dtype), run.model.quantization_config)
    examples = prepare_examples(run, tokenizer, base_config)
    sandbox = ""
    if run.cogumi.method == "gspo":
        gspo.try_rewards(run, examples.train.dataset)
        try_task(run, examples.train.dataset, tokenizer)
        sandbox = describe_sandbox(run, gspo.read_rewards(run))

    run_dir = run.run_dir if resuming else create_run_dir(run.run_dir)
    with (
        survive_closed_terminal(),
        exit_on_signals(),
        stages.lock_run(run_dir),
        write_report_at_end(run_dir),
        record_run(run_dir, resuming),
        measure_run(run_dir, meter) as heart,
    ):

        def enter(stage: str, **more: Any) -> None:
            meter.enter(stage)
            set_status(run_dir, "running", stage=stage, **more)

        forget_requests(run_dir)  # left over from an earlier part of the run
        write_atomic(run_dir / "config.yaml", config_text)
        examples.record(run_dir)
        if resuming:
            log.info("%s resumes where it stopped; with cogumi.resume: never it would be refused", run_dir)
        stages.record_backend(run_dir, backend)
        for line in (*startup_notes, *examples.reports()):
            log.info(line)
        for warning in (describe_overlong(run, examples, base_config), describe_empty_thoughts(run, examples)):
            if warning:
                log.warning(warning)
        if original is not None:
            log.info("merge: %s", original)
        if sandbox:
            log.info("%s", sandbox)
            write_section(run_dir / DECISIONS, "sandbox", {"what": sandbox})
        if weights is not None:
            log.log(logging.INFO if weights.state == "green" else logging.WARNING, "weights: %s", weights.figure)
        chosen = stages.make_choices(run, base, base_config, examples.train, tokenizer)
        if stages.wants_preflight(run):
            enter("preflight")
            stages.run_preflight(chosen, base, base_config, examples.train, tokenizer)
        if download is not None:
            write_section(run_dir / DECISIONS, "base", {"name": download.name, "commit": download.commit})
        for needed in downloads:
            enter("download")
            stages.fetch_into(run_dir, needed)
        if original is not None:
            prove_original(base, run.model.revision, original)
        enter("load")
        if ranks.count > 1:
            # A weight without a gradient in a step is an expert that no token came to. To look for one costs time.
            mixture = any(getattr(base_config, key, None) for key in EXPERTS)
            chosen.train.setdefault("ddp_find_unused_parameters", mixture)
        followers.start(chosen, base, run_dir)
        try:
            if download is not None and weights is not None:
                check_loadable(base, base_config, download)  # with the scales, which are in no header
            trainer = building.build_trainer(chosen, base, tokenizer, examples, meter, ranks)
        except UsageError as error:
            raise RefusedAtSetup.like(error) from error
        except building.BUILD_REFUSALS as error:
            raise RefusedAtSetup(f"model, lora or train: {one_line(error)}") from error
        shared = trainer.is_fsdp_enabled
        if examples.prompts is not None and not shared and not (run_dir / SAMPLES_FILE).exists():
            enter("samples")  # to be read beside those at the end
            write_samples(run_dir, trainer.model, tokenizer, examples.prompts, 0, run.cogumi.stop)
        enter("train")
        fitted = fit(run, trainer, tokenizer, examples, heart, ranks)
        model = trainer.model
        if shared:
            enter("save")
            model = building.rebuild_model(chosen, base, gather_trained(trainer.model))
        checks, adapter, merged = fitted.checks, None, None
        if run.cogumi.tuning == "lora" and getattr(fitted.ended, "state", "") != NON_FINITE:
            adapter = stages.retry_when_full(
                run, "save", stages.save_adapter, model, tokenizer, run_dir, requested_revision
            )
        judge_fit(run, trainer, fitted, ranks)
        followers.wait()
        if run.cogumi.tuning == "full" and fitted.ended is None:  # after its checks: saving rounds the model's weights
            dtype = base_config.dtype or torch.float32
            merged = stages.retry_when_full(run, "save", stages.save_model, model, tokenizer, run_dir, dtype)
            checks += attempt("saved model", stages.judge_saved, model, merged)
        if examples.prompts is not None and (fitted.ended is None or fitted.ended.state == SANITY_CHECKED):
            enter("samples")
            step = trainer.state.global_step
            checks += attempt(
                "samples", write_samples, run_dir, model, tokenizer, examples.prompts, step, run.cogumi.stop
            )
            checks += attempt("flags", fitted.sentinel.on_train_end)
        live = None
        if adapter is not None and run.cogumi.merge and fitted.ended is None:
            enter("merge")
            tokens = first_tokens(examples.train.dataset, tokenizer, LOGIT_ROWS)
            live = stages.record_live(run, model, adapter, tokens, original)
        fitted.sentinel.release()
        del trainer, model  # the merge and its check need their memory
        gc.collect()  # model, trainer and optimizer refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if adapter is not None and live is not None:
            merged, merge_checks = stages.try_merge(run, adapter, base, live, original)
            checks += merge_checks
        verdict = stages.record_verdict(run_dir, fitted)
        if adapter is not None and (limits := serving_limits(read_json(adapter / "adapter_config.json"))):
            log.info("%s", limits)
    return RunResult(run_dir, base, adapter, merged, verdict, read_jsonl(run_dir / "metrics.jsonl"))


@contextmanager
def write_report_at_end(run_dir: Path) -> Iterator[None]:
    """Write the report however a run ends, if it has trained. A full disk that does not take it costs nothing else."""
    try:
        yield
    finally:
        with best_effort("write the report"):
            if (run_dir / "metrics.jsonl").exists():
                write_report(run_dir)
