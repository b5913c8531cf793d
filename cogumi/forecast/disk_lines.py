"""What a run will want of its disks, from its config: before anything is downloaded, or when some of it is written."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoConfig, Trainer

from cogumi.checkpoints.disk_forecast import CHECKPOINTS, DOWNLOAD, ENTRIES, MERGED, Outlook, outlook
from cogumi.checkpoints.protection import run_keep_limit
from cogumi.config.schema import RunConfig
from cogumi.core.disk_space import Need, hub_cache
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.core.run_directory import read_json
from cogumi.forecast.preflight_report import Line
from cogumi.forecast.training_step import keep_on_meta
from cogumi.methods.auto_settings import dtype_of_weights
from cogumi.methods.building import BUILD_REFUSALS, trl_arguments
from cogumi.models.adapters import keep_float32, lora_config
from cogumi.models.loading import load_tokenizer, meta_model, refuse_quantized_already, resolve_dtype, resolve_model
from cogumi.models.warm_start import lora_of
from cogumi.patches import gspo_loss


def forecast_disks(run: RunConfig) -> Outlook:
    """What a run has yet to write, and download. Raises UsageError for settings that PEFT, TRL or transformers refuse."""
    trainer, notes = plan_trainer(run)
    download, unknown = download_need(run)
    whole = run.cogumi.tuning == "full"  # then the trained model is saved as `merged/`, and there is no adapter
    adapter, merged = run.run_dir / "adapter", run.run_dir / "merged"
    return outlook(
        trainer,
        keep=run_keep_limit(trainer.args.save_total_limit),
        adapter_into=None if whole or adapter.exists() else adapter,
        merged_into=merged if (run.cogumi.merge or whole) and not merged.exists() else None,
        more=download,
        notes=(*notes, *unknown),
    )


def plan_trainer(run: RunConfig) -> tuple[Any, list[str]]:
    """A trainer that writes what the run's will write, without weights, and what is not known of it."""
    gspo_loss.apply()  # without it TRL takes no gspo; unsloth, which must be imported first, is of no use to shapes
    args = trl_arguments(run)
    if run.model.adapter is not None:
        run.lora = lora_of(run.model.adapter, run.lora)
    base = resolve_model(run.model.name, run.model.revision)
    config = AutoConfig.from_pretrained(base, revision=run.model.revision)
    if run.model.quantization_config is not None:  # which changes nothing of what is written
        refuse_quantized_already(base, config)
    tokenizer, notes = None, []
    try:
        tokenizer = load_tokenizer(base, run.model.revision)
    except UsageError:  # a run would not start without one; the rest is worth knowing
        notes.append(f"{run.model.name} has no tokenizer that can be loaded, and none is counted")
    whole = run.cogumi.tuning == "full"
    try:
        dtype = resolve_dtype(dtype_of_weights(run) if whole else run.model.dtype)
        return saving_trainer(config, dtype, args, None if whole else lora_config(run.lora), tokenizer), notes
    except BUILD_REFUSALS as error:
        raise UsageError(f"model, lora or train: {one_line(error)}") from error


def saving_trainer(config: Any, dtype: torch.dtype, args: Any, lora: Any = None, tokenizer: Any = None) -> Any:
    """A trainer for `checkpoint_bytes` and `outlook`. 8 billion parameters take seconds and no memory.

    config: the base's, quantized or not. dtype: what the base is loaded in. args: TrainingArguments, or TRL's; nothing
    is written to their output_dir. lora: a PEFT config, or None where every weight is trained. As any Trainer this one
    sets the seeds. Not TRL's: adapters that start from the weights (PiSSA) are made without any here.
    """
    model = meta_model(config).to(dtype)
    if lora is not None:
        model = get_peft_model(model, copy.copy(lora), low_cpu_mem_usage=True)  # which completes what it is given
        keep_float32(model)
    args = copy.copy(args)
    output_dir, args.push_to_hub, args.report_to = args.output_dir, False, []  # no repository is made, no run announced
    with tempfile.TemporaryDirectory(prefix="cogumi-forecast-") as scratch:
        args.output_dir = scratch  # a Trainer makes it
        trainer = keep_on_meta(Trainer)(model, args, eval_dataset=[], processing_class=tokenizer)
    args.output_dir = output_dir
    return trainer


def download_need(run: RunConfig) -> tuple[list[Need], list[str]]:
    """What the weights will take in the hub's cache, and a line where it is not known."""
    name, revision = run.model.name, run.model.revision
    if name.startswith("cogumi:") or Path(name).is_dir() or is_cached(name, revision):
        return [Need(DOWNLOAD, hub_cache(), 0, 0, 0)], []
    size = download_bytes(name, revision)
    if size is None:
        return [], [f"what the download of {name} takes in {hub_cache()} is not known: the hub cannot be asked"]
    return [Need(DOWNLOAD, hub_cache(), size, size, ENTRIES)], []


def is_cached(name: str, revision: str | None) -> bool:
    """Whether a model's weights are in the hub's cache, all of them."""
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(name, "model.safetensors.index.json", revision=revision)
    files = {"model.safetensors"}
    if isinstance(index, str):
        files = set(read_json(Path(index))["weight_map"].values())
    return all(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)


def download_bytes(name: str, revision: str | None) -> int | None:
    """Bytes of the weights that are not in the cache yet, as the hub says; None where it cannot be asked."""
    import httpx
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        files = HfApi().model_info(name, revision=revision, timeout=10, files_metadata=True).siblings or []
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx.HTTPError):
        return None
    for kind in (".safetensors", ".bin"):  # transformers takes the second where there is none of the first
        weights = [file for file in files if file.rfilename.endswith(kind) and "/" not in file.rfilename]
        if weights:
            missing = [w for w in weights if try_to_load_from_cache(name, w.rfilename, revision=revision) is None]
            return sum(file.size or 0 for file in missing)
    return None


def describe_disks(found: Outlook) -> list[Line]:
    """A line for each filesystem, with the keys of the config that make it large enough, and what is not known."""
    lines = []
    for disk in found.disks:
        free, changes = disk.filesystem.space.free, {}
        sizes = {need.what: need for need in disk.needs}
        if disk.training > free and CHECKPOINTS in sizes and found.keep is not None and found.keep > 2:
            changes["train.save_total_limit"] = 2
        if disk.end > free and MERGED in sizes and disk.end - sizes[MERGED].end <= free:
            changes["cogumi.merge"] = False
        fix = "name a directory on another disk (cogumi.run_dir, HF_HOME)"
        if disk.short:
            fix = "; ".join(found.advice(disk))
        lines.append(Line("disk", str(disk)) if disk.fits else Line("disk", str(disk), "red", fix, changes))
    return [*lines, *(Line("disk", note, "unknown") for note in found.notes)]
