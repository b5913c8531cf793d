"""One run: resolve the config, read the data, patch, load, train, save, judge, merge, check the merge."""

import gc
import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import torch
from datasets import Dataset
from safetensors import SafetensorError
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from cogumi.checkpoints import protect
from cogumi.checkpoints.mirror import Mirror
from cogumi.compiling.callback import Compiling
from cogumi.config import RunConfig, dump_config, load_config, trl_config_class
from cogumi.data.fim import FimData
from cogumi.data.prepare import load_rows
from cogumi.disk.callback import DiskMonitorCallback
from cogumi.disk.outlook import outlook
from cogumi.errors import RefusedAtSetup, UsageError
from cogumi.merge import LogitCheck, MergeError, MergeReport, check_logits, merge_adapter
from cogumi.merge.logits_disk import check_directory
from cogumi.merge.resolve import refuse_unsupported
from cogumi.models.adapters import keep_float32, largest_change, lora_config, unlike_saved
from cogumi.models.complete import complete
from cogumi.models.load import load_model, load_tokenizer, resolve_model
from cogumi.models.provenance import quantization_of, record_base
from cogumi.patches import patch, unsloth_rl
from cogumi.rundir import append_jsonl, create_run_dir, read_jsonl, write_atomic, write_json
from cogumi.training import gspo, sft
from cogumi.training.telemetry import Telemetry, on_screen, recorded, set_status
from cogumi.training.unfinished import alone_in, goes_on, take_up_metrics, was_evaluated
from cogumi.training.verdict import Check, Verdict, judge_gspo, judge_training

log = logging.getLogger("cogumi")
METHODS = {"sft": sft, "gspo": gspo}
# What transformers, peft and TRL raise for a setting they refuse, a package that is not installed, or broken weights.
BUILD_REFUSALS = (ValueError, ImportError, OSError, RuntimeError, ArithmeticError, SafetensorError)
NOT_PASSED_ON = {
    "resume_from_checkpoint": "a run goes on from the last good checkpoint in its own directory",
    "model_init_kwargs": "the model is loaded as `model:` says",
}
HELD_OUT = "held out (data.eval_rows)"
SAMPLES = 4  # held-out prompts completed for samples.jsonl
LOGIT_ROWS = 8  # examples on which the merged model's logits are compared


@dataclass(frozen=True)
class RunResult:
    """What a run left behind. `metrics` are the logged rows, in order; `merged` is None where `cogumi.merge` is false."""

    run_dir: Path
    base: str
    adapter: Path
    merged: Path | None
    verdict: Verdict
    metrics: list[dict[str, Any]] = field(repr=False)

    @property
    def passed(self) -> bool:
        return self.verdict.passed

    def series(self, key: str) -> list[float]:
        """The logged values of one metric, in order: `result.series("reward")`."""
        return [row[key] for row in self.metrics if row.get(key) is not None]


def train(config: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> RunResult:
    """Run one configuration in this process and return what it left behind.

    `config` is a YAML path or a mapping; `overrides` are dotted names with `__` for the dot (`train__max_steps=5`).
    A run directory that holds this run, unfinished, goes on from its last good checkpoint. Raises UsageError, before
    anything is written, for a mistake in the configuration, the data or the run directory.
    """
    run = load_config(config, **overrides)
    patches = patch(graph_break="off")  # 4-bit layers are seen to when the model is there, if they are to be compiled
    args = trl_arguments(run)
    again = goes_on(run)
    if run.cogumi.mirror is not None:
        Mirror(run.cogumi.mirror)  # refuses, before there is anything to lose, a place that cannot be written to
    if run.cogumi.merge:
        refuse_unmergeable(run)
    rows, held_out_rows = load_rows(run.data)
    base = resolve_model(run.model.name, run.model.revision)
    tokenizer = load_tokenizer(base, run.model.revision)
    examples = prepare_examples(run, rows, held_out_rows, tokenizer)

    run_dir = run.run_dir if again else create_run_dir(run.run_dir)
    with alone_in(run_dir), recorded(run_dir, again):
        write_atomic(run_dir / "config.yaml", dump_config(run))
        if again:
            log.info("%s goes on where it stopped (cogumi.resume: never refuses that)", run_dir)
        for line in (*str(patches).splitlines(), *examples.reports()):
            log.info(line)
        set_status(run_dir, "running", stage="load")
        try:
            trainer = build_trainer(run, base, tokenizer, args, examples)
        except UsageError as error:
            raise RefusedAtSetup(str(error)) from error
        except BUILD_REFUSALS as error:
            raise RefusedAtSetup(f"model, lora or train: {one_line(error)}") from error
        set_status(run_dir, "running", stage="train")
        checks = fit(run, trainer, examples)
        adapter = save_adapter(trainer.model, tokenizer, run_dir, run.model.revision)
        if examples.prompts is not None:
            set_status(run_dir, "running", stage="samples")
            write_samples(run_dir, trainer.model, tokenizer, examples.prompts)
        merged = None
        if run.cogumi.merge:
            set_status(run_dir, "running", stage="merge")
            try:
                merged, merge_checks = merge_and_check(run, run_dir, adapter, base, trainer.model, examples, tokenizer)
            except (UsageError, MergeError) as error:  # the adapter was paid for; the verdict must say the rest
                later = f"{one_line(error)} (later: cogumi merge {adapter} OUT)"
                merge_checks = [Check("merge", later, "the adapter goes into its base", False)]
            checks += merge_checks
        verdict = conclude(run_dir, checks)
    del trainer  # model, trainer and optimizer refer to each other; the next run needs their memory
    gc.collect()
    return RunResult(run_dir, base, adapter, merged, verdict, read_jsonl(run_dir / "metrics.jsonl"))


def refuse_unmergeable(run: RunConfig) -> None:
    """Refuse, before it is trained, an adapter that `cogumi.merge` could not merge afterwards."""
    try:
        config = lora_config(run.lora).to_dict()
    except BUILD_REFUSALS as error:
        raise UsageError(f"lora: {one_line(error)}") from error
    try:
        refuse_unsupported(Path("lora:"), json.loads(json.dumps(config, default=list)))
    except UsageError as error:
        raise UsageError(f"{error} (cogumi.merge=false trains it without merging)") from None


@dataclass(frozen=True)
class Examples:
    """What a run trains on, is evaluated on, and completes for samples.jsonl; the last two None without held-out rows."""

    train: FimData
    held_out: FimData | None
    prompts: Dataset | None

    def reports(self) -> list[str]:
        return [data.report() for data in (self.train, self.held_out) if data is not None]


def prepare_examples(
    run: RunConfig, rows: pl.DataFrame, held_out_rows: pl.DataFrame, tokenizer: PreTrainedTokenizerBase
) -> Examples:
    prepare = METHODS[run.cogumi.method].prepare
    train = prepare(run, rows, tokenizer, run.data.source)
    if held_out_rows.is_empty():
        return Examples(train, None, None)
    held_out = prepare(run, held_out_rows, tokenizer, HELD_OUT)
    same = prepare is gspo.prepare
    prompts = held_out if same else gspo.prepare(run, held_out_rows, tokenizer, HELD_OUT)
    return Examples(train, held_out, prompts.dataset)


def build_trainer(run: RunConfig, base: str, tokenizer: PreTrainedTokenizerBase, args: Any, examples: Examples) -> Any:
    model = load_model(base, run.model.revision, run.model.dtype, run.model.quantization_config)
    log.info("%s loaded in %s on %s", base, loaded_as(model), model.device)
    if run.cogumi.method == "gspo" and gspo.is_planned(run):
        run = gspo.plan(run, model, tokenizer, examples.train)
        args = trl_arguments(run)
    lora: Any = lora_config(run.lora, getattr(model.config, "_commit_hash", None) or run.model.revision)
    if unsloth_rl.status().applied:
        model, lora = unsloth_rl.with_adapter(model, lora), None
    trainer = METHODS[run.cogumi.method].build_trainer(
        run,
        model=model,
        args=args,
        train_dataset=examples.train.dataset,
        eval_dataset=examples.held_out.dataset if examples.held_out else None,
        processing_class=tokenizer,
        peft_config=lora,
    )
    keep_float32(trainer.model)
    return trainer


def loaded_as(model: PreTrainedModel) -> str:
    """What a model is loaded in, in words: its dtype, and how its linear layers are quantized."""
    found, dtype = quantization_of(model.config), str(model.dtype).removeprefix("torch.")
    if found is None:
        return dtype
    return f"{found.type or found.method} {found.bits}-bit{' (twice quantized)' if found.double else ''} and {dtype}"


def fit(run: RunConfig, trainer: Any, examples: Examples) -> list[Check]:
    """Train, with the held-out loss before and after where the method has one, and judge what was logged."""
    run_dir, options = run.run_dir, run.cogumi
    telemetry = Telemetry(run_dir, options.method)
    telemetry.attach(trainer)
    trainer.add_callback(DiskMonitorCallback(log_path=run_dir / "disk.jsonl"))
    protect(
        trainer,
        on_full=options.on_full,
        fallback=options.fallback,
        mirror=options.mirror,
        on_hung=options.on_hung,
        log_path=run_dir / "run.log",
    )
    compiling = Compiling(
        trainer, options.compile, run_dir / "compile.json", trainer.cogumi_protection.watchdog.excused
    )
    trainer.add_callback(compiling)
    try:
        compiling.begin()
    except UsageError as error:
        raise RefusedAtSetup(str(error)) from error
    measure_loss = examples.held_out is not None and options.method == "sft"
    if measure_loss and not was_evaluated(run_dir, 0):
        trainer.evaluate()
    with closing(telemetry), logging_redirect_tqdm(on_screen()):  # lines above the bar, not in it
        try:
            say_what_the_disks_get(run, trainer)
            trainer.train()
        except (ValueError, ImportError) as error:
            if trainer.state.global_step > 0:
                raise
            # Libraries look at some settings only when they are first used: a learning rate, a loss's name.
            raise RefusedAtSetup(f"train: refused before the first step: {one_line(error)}") from error
    state = trainer.state
    if measure_loss and not was_evaluated(run_dir, state.global_step):
        trainer.evaluate()
    metrics = read_jsonl(run_dir / "metrics.jsonl")
    if not any("loss" in row for row in metrics):  # its end was fetched from a mirror
        take_up_metrics(run_dir, state)
        metrics = read_jsonl(run_dir / "metrics.jsonl")
    checks = judge_training(metrics, state.global_step, state.max_steps, largest_change(trainer.model))
    return checks + (judge_gspo(metrics, run_dir) if options.method == "gspo" else [])


def say_what_the_disks_get(run: RunConfig, trainer: Any) -> None:
    """Before the first step: how large checkpoints and the merged model will be, and whether there is room for them."""
    merged = run.run_dir / "merged" if run.cogumi.merge else None
    try:
        found = outlook(
            trainer,
            keep=trainer.cogumi_protection.saver.keep,
            adapter_into=run.run_dir / "adapter",
            merged_into=merged,
        )
    except UsageError as error:  # an optimizer that tells its size only after a step
        log.warning("disk: %s", error)
        return
    for line in found.lines:
        log.log(logging.INFO if found.fits else logging.WARNING, "disk: %s", line)


def conclude(run_dir: Path, checks: list[Check]) -> Verdict:
    verdict = Verdict(tuple(checks))
    write_json(run_dir / "verdict.json", verdict.as_dict())
    for check in checks:
        log.info("%s", check)
    set_status(run_dir, "finished" if verdict.passed else "finished, checks failed")
    if verdict.passed:
        write_atomic(run_dir / "DONE", "")
    return verdict


def trl_arguments(run: RunConfig) -> Any:
    """TRL's config object for the run. Raises UsageError with TRL's own words where it refuses a combination."""
    for key, reason in NOT_PASSED_ON.items():
        if run.train.get(key) is not None:
            raise UsageError(f"train.{key} would be ignored: {reason}")
    if run.train.get("gradient_accumulation_steps", 1) < 1:
        raise UsageError(f"train.gradient_accumulation_steps is {run.train['gradient_accumulation_steps']}; at least 1")
    # TRL turns bf16 autocast on wherever fp16 is off; without a GPU that is slow and blurs a GSPO ratio of 1 +- 3e-4.
    on_gpu = torch.cuda.is_available()
    bf16 = on_gpu and torch.cuda.is_bf16_supported()
    defaults = {
        "output_dir": str(run.run_dir / "checkpoints"),
        "report_to": "none",
        "logging_first_step": True,  # so that the shortest run has a loss to judge
        "bf16": bf16,
        "dataloader_pin_memory": on_gpu,
    }
    try:
        return trl_config_class(run.cogumi.method)(**{**defaults, **METHODS[run.cogumi.method].arguments(run)})
    except ValueError as error:
        raise UsageError(f"train: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__


def save_adapter(model: Any, tokenizer: PreTrainedTokenizerBase, run_dir: Path, revision: str | None) -> Path:
    """Adapter, tokenizer and a record of the base, written aside and renamed: `adapter/` is whole or not there."""
    unfinished, adapter = run_dir / ".adapter", run_dir / "adapter"
    remove_if_there(unfinished)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    record_base(unfinished, model, revision)
    remove_if_there(adapter)  # the same one: the run had come as far as this, and ended before its end
    unfinished.rename(adapter)
    return adapter


def remove_if_there(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def write_samples(run_dir: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Dataset) -> None:
    """Greedy completions of the first held-out prompts, beside what was cut out."""
    examples = prompts.select(range(min(SAMPLES, len(prompts))))
    (run_dir / "samples.jsonl").unlink(missing_ok=True)
    for example, completion in zip(examples, complete(model, tokenizer, list(examples["prompt"])), strict=True):
        append_jsonl(run_dir / "samples.jsonl", {**example, "completion": completion})


def merge_and_check(
    run: RunConfig,
    run_dir: Path,
    adapter: Path,
    base: str,
    live: Any,
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Path, list[Check]]:
    """Merge into the full-precision base, load the result, and compare its logits with the live adapter's."""
    remove_if_there(run_dir / "merged")
    report = merge_adapter(adapter, run_dir / "merged", base=base, base_revision=run.model.revision)
    assert report.largest_error is not None  # the merge above verifies
    log.info("%s", report)
    weights = Check(
        "merged weights",
        f"{report.elements:,} elements in {report.tensors_merged} tensors, {report.not_nearest:,} of them next to a tie, "
        f"the worst at {report.largest_error:.2f} of what rounding allows",
        "<= 1",
        report.largest_error <= 1,
    )
    texts = examples.train.dataset.select(range(min(LOGIT_ROWS, len(examples.train.dataset))))
    ids = [t["input_ids"] if "input_ids" in t else tokenizer(t["prompt"] + t["middle"])["input_ids"] for t in texts]
    tokens = torch.tensor([i[: min(map(len, ids))] for i in ids])
    if quantization_of(live.config) is not None:
        revision = run.model.revision if report.base == base else None
        return report.out, [weights, *compare_unquantized(live, adapter, report, revision, tokens)]
    merged = AutoModelForCausalLM.from_pretrained(report.out, dtype="auto", device_map={"": live.device})
    return report.out, [weights, *judge_logits(check_logits(live, merged, tokens), "the live adapter's")]


def compare_unquantized(
    live: Any, adapter: Path, report: MergeReport, revision: str | None, tokens: torch.Tensor
) -> list[Check]:
    """Compare the merged model with the adapter on the full-precision base, and that adapter with the live one.

    The live model's own logits are of quantized weights, which the merged model is to be rid of.
    """
    other = unlike_saved(live, adapter)
    saved = Check(
        "saved adapter",
        f"{len(other)} tensors differ from the live adapter's" + (f", the first is {other[0]}" if other else ""),
        "0, bit for bit",
        not other,
    )
    try:
        logits = check_directory(adapter, report.out, report.base, revision, tokens)
    except UsageError as error:  # too little memory, say; the merge is there all the same
        return [saved, Check("merged logits", one_line(error), "compared with the adapter on the base", False)]
    trained_on = quantization_of(live.config)
    assert trained_on is not None
    return [
        saved,
        *judge_logits(
            logits,
            f"those of the adapter on the full-precision base (it was trained on {trained_on.type or trained_on.method}"
            + (f", q/delta {report.q_over_delta:.2f})" if report.q_over_delta is not None else ")"),
        ),
    ]


def judge_logits(logits: LogitCheck, beside: str) -> list[Check]:
    return [
        Check(
            "merged differs from the base",
            f"logits rms {logits.base_distance:.2e} apart",
            f"> {logits.bound:.2e}, what rounding explains",
            logits.base_distance > logits.bound,
        ),
        Check(
            "merged logits",
            f"rms {logits.measured:.2e}, KL {logits.kl:.1e} from {beside}",
            f"<= {logits.bound:.2e}, {logits.kl_bound:.1e}",
            logits.passed,
        ),
    ]
