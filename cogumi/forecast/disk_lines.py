"""What a run will want of its disks, before anything is downloaded or loaded."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import Trainer

from cogumi.checkpoints.disk_forecast import CHECKPOINTS, MERGED, Outlook
from cogumi.config.schema import RunConfig
from cogumi.core.disk_space import Need
from cogumi.core.errors import UsageError
from cogumi.forecast.preflight_report import Line
from cogumi.models.loading import meta_model


class PlannedTrainer(Trainer):
    """A Trainer whose model stays on the meta device. It forecasts, and cannot train."""

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        pass


def planned_trainer(config: Any, dtype: torch.dtype, args: Any, lora: Any = None, tokenizer: Any = None) -> Any:
    """A trainer for the model of a config, for `checkpoint_bytes` and `outlook`. 8 billion parameters take seconds and no memory.

    config: the base's, quantized or not. dtype: what the base is loaded in. args: TrainingArguments, or TRL's; nothing
    is written to their output_dir. lora: a PEFT config, or None where every weight is trained. As any Trainer this one
    sets the seeds. Raises what PEFT and transformers raise for a setting that they refuse, and UsageError for a model
    that transformers cannot build.
    """
    model = meta_model(config).to(dtype)
    if lora is not None:
        model = get_peft_model(model, copy.copy(lora), low_cpu_mem_usage=True)  # which completes what it is given
    if is_bitsandbytes(config):
        # TRL's trainers do so (sft_trainer.py and grpo_trainer.py, 1.15), after QLoRA.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    args = copy.copy(args)
    output_dir, args.push_to_hub, args.report_to = args.output_dir, False, []  # no repository is made, no run announced
    with tempfile.TemporaryDirectory(prefix="cogumi-forecast-") as scratch:
        args.output_dir = scratch  # a Trainer makes it
        trainer = PlannedTrainer(model, args, eval_dataset=[], processing_class=tokenizer)  # type: ignore[arg-type]
    args.output_dir = output_dir
    return trainer


def is_bitsandbytes(config: Any) -> bool:
    found = getattr(config, "quantization_config", None)
    entries = found if isinstance(found, dict) or found is None else found.to_dict()
    return entries is not None and bool(entries.get("load_in_4bit") or entries.get("load_in_8bit"))


# ----------------------------------------------------------------------------------------------------------- disk lines


MADE_HERE = "cogumi:"  # models that are made on this machine


def outlook_of(run: RunConfig) -> Outlook:
    """Of a run that is to start. Raises UsageError for settings that PEFT, TRL or transformers refuse."""
    from cogumi.checkpoints.disk_forecast import outlook
    from cogumi.checkpoints.protection import kept_by_runs

    trainer, notes = planned(run)
    download, unknown = download_of(run)
    return outlook(
        trainer,
        keep=kept_by_runs(trainer.args.save_total_limit),
        adapter_into=None if is_whole(run) else run.run_dir / "adapter",
        merged_into=run.run_dir / "merged" if run.cogumi.merge or is_whole(run) else None,
        more=download,
        notes=(*notes, *unknown),
    )


def is_whole(run: RunConfig) -> bool:
    """Whether every weight is trained: then each checkpoint holds them all, and the trained model is saved as `merged/`."""
    return run.cogumi.tuning == "full"


def planned(run: RunConfig) -> tuple[Any, list[str]]:
    """The trainer that the run will have, without weights, and what is not known of it."""
    from transformers import AutoConfig

    from cogumi.core.formatting import one_line
    from cogumi.forecast.disk_lines import planned_trainer
    from cogumi.methods.auto_settings import dtype_of_weights
    from cogumi.methods.building import BUILD_REFUSALS, trl_arguments
    from cogumi.models.adapters import keep_float32, lora_config
    from cogumi.models.loading import load_tokenizer, loaded_in, refuse_quantized_already, resolve_model
    from cogumi.models.warm_start import lora_of
    from cogumi.patches import gspo_loss

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
    try:
        dtype = loaded_in(dtype_of_weights(run) if is_whole(run) else run.model.dtype)
        lora = None if is_whole(run) else lora_config(run.lora)
        trainer = planned_trainer(config, dtype, args, lora, tokenizer)
        keep_float32(trainer.model)
        return trainer, notes
    except UsageError:
        raise
    except BUILD_REFUSALS as error:
        raise UsageError(f"model, lora or train: {one_line(error)}") from error


def download_of(run: RunConfig) -> tuple[list[Need], list[str]]:
    """What the weights will take in the hub's cache, 0 where they are here, and a line where it is not known."""
    from cogumi.checkpoints.disk_forecast import DOWNLOAD, ENTRIES
    from cogumi.core.disk_space import Need, hub_cache

    name, revision = run.model.name, run.model.revision
    if name.startswith(MADE_HERE) or Path(name).is_dir() or in_cache(name, revision):
        return [Need(DOWNLOAD, hub_cache(), 0, 0, 0)], []
    size = download_bytes(name, revision)
    if size is None:
        return [], [f"what the download of {name} takes in {hub_cache()} is not known: the hub cannot be asked"]
    return [Need(DOWNLOAD, hub_cache(), size, size, ENTRIES)], []


def in_cache(name: str, revision: str | None) -> bool:
    """Whether a model's weights are in the hub's cache, all of them."""
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(name, "model.safetensors.index.json", revision=revision)
    files = {"model.safetensors"}
    if isinstance(index, str):
        files = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
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


def lines_of(found: Outlook) -> list[Line]:
    """A line for each filesystem, and what is not known."""
    lines = []
    for disk in found.disks:
        if disk.fits:
            lines.append(Line("disk", str(disk)))
        else:
            another = "name a directory on another disk (cogumi.run_dir, HF_HOME)"
            fix = "; ".join(found.advice(disk)) if disk.short else another
            lines.append(Line("disk", str(disk), "red", fix, changes_for(found, disk)))
    return [*lines, *(Line("disk", note, "unknown") for note in found.notes)]


def changes_for(found: Outlook, disk: Any) -> dict[str, Any]:
    """Keys of the config that make a disk large enough: fewer checkpoints kept, the merge left for another disk."""
    free, changes = disk.filesystem.space.free, {}
    sizes = {need.what: need for need in disk.needs}
    if disk.training > free and CHECKPOINTS in sizes and found.keep is not None and found.keep > 2:
        changes["train.save_total_limit"] = 2
    if disk.end > free and MERGED in sizes and disk.end - sizes[MERGED].end <= free:
        changes["cogumi.merge"] = False
    return changes
