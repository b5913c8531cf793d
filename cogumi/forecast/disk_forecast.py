"""Forecast how much disk a run needs, and whether its disks have it: download, checkpoints, adapter and merged model.

Sizes are products of shapes, without a table of bytes per parameter: PEFT or the model gives the weights, the trainer's
optimizer takes a step on fake tensors, and torch.save writes its state with the data left out. A config.json is enough.

A run is fullest at one of two moments: at a save, when the new checkpoint lies beside those that stay, or at its end, when
it writes adapter and merged model.
"""

import copy
import math
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, Trainer

from cogumi.checkpoints.commit import STAGING_NAME
from cogumi.checkpoints.manifest import MANIFEST_NAME, step_of
from cogumi.checkpoints.protection import DEFAULT_KEEP, keep_limit
from cogumi.checkpoints.snapshots import MAX_SNAPSHOTS
from cogumi.checkpoints.verify import PIN_NAME, bytes_of, list_checkpoints
from cogumi.config.schema import RunConfig
from cogumi.core.disk_space import Disk, Need, format_bytes, group_needs, hub_cache
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.core.safetensors_file import make_header
from cogumi.disk.usage import disk_bytes
from cogumi.forecast.preflight_report import Line
from cogumi.forecast.training_step import keep_on_meta, without_machine
from cogumi.hub.downloads import find_commit, plan_download
from cogumi.merge.preflight import find_original
from cogumi.merge.witness import witness_bytes
from cogumi.methods.adapter_source import find_adapter
from cogumi.methods.auto_settings import dtype_of_weights
from cogumi.methods.building import trl_arguments
from cogumi.methods.warm_start import lora_of
from cogumi.models.adapters import keep_float32, lora_config
from cogumi.models.base import meta_model, named_class
from cogumi.models.loading import BUILD_REFUSALS, load_tokenizer, read_base, resolve_dtype
from cogumi.models.quantization import refuse_quantized_already
from cogumi.patches import gspo_loss
from cogumi.patches.torch_internals import FakeTensorMode
from cogumi.patches.trl_internals import commit_of

CHECKPOINTS, ADAPTER, MERGED, DOWNLOAD = "checkpoints", "adapter", "merged model", "model download"
NOTED_BYTES = 1e9  # of adapters of earlier steps
NO_SAVES = "save_strategy is no: one checkpoint is written where a signal ends the training, and no other"
BY_TIME = "saves are by time, for train.save_steps is not set: how many there will be is found from the first steps"
# Configs, model card, arguments, random states, scheduler and trainer state together, whatever the model: 26 to 34 kB.
SMALL_FILES_BYTES = 30_000
SCRATCH = "cogumi-forecast-"


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes of the checkpoint that a trainer writes next, by part."""

    weights: int
    optimizer: int
    tokenizer: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.tokenizer + SMALL_FILES_BYTES


def checkpoint_bytes(trainer: Any) -> CheckpointBytes:
    """Forecast the checkpoints of a trainer, within 5 %. Nothing of the trainer changes."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if isinstance(model, PeftModel):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about resized embeddings: PEFT repeats it when it saves them
            # All adapters, DPO's frozen "ref" too.
            states = [get_peft_model_state_dict(model, adapter_name=name) for name in model.peft_config]
    else:
        states = [without_aliases(model.state_dict(keep_vars=True))]
    optimizer = 0
    if not trainer.args.save_only_model:
        with tempfile.TemporaryFile(prefix=SCRATCH) as file:  # no data is written, zip and pickle overhead is
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(optimizer_states(trainer), file)
            optimizer = file.seek(0, os.SEEK_END)
    tokenizer = tokenizer_bytes(trainer.processing_class)
    return CheckpointBytes(sum(map(safetensors_bytes, states)), optimizer, tokenizer)


def without_aliases(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return each storage once, and each tensor without storage: tied weights are saved under one of their names."""
    by_storage: dict[tuple[Any, ...], tuple[str, Any]] = {}
    for name, tensor in tensors.items():
        storage = (tensor.device, tensor.data_ptr() or id(tensor), tuple(tensor.shape))
        by_storage.setdefault(storage, (name, tensor))
    return dict(by_storage.values())


def safetensors_bytes(tensors: Mapping[str, Any]) -> int:
    """Return the size of the file that safetensors writes: the header, and the data back to back."""
    entries = [(name, "BF16", tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()]
    return len(make_header({"format": "pt"}, entries)) + sum(entry[3] for entry in entries)


def optimizer_states(trainer: Any) -> list[dict[str, Any]]:
    """Return the states that the trainer's optimizer has after its first step, as state dicts of fake tensors.

    One of its class takes the step, on fake parameters of the same shapes. Optimizers other than torch's, transformers'
    and bitsandbytes' may do more in a step than arithmetic, so each of them is forecast as an AdamW.
    """
    kind, settings = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    if kind.__module__.partition(".")[0] not in ("torch", "transformers", "bitsandbytes"):
        kind, settings = torch.optim.AdamW, {}
    in_32_bits: set[int] = set()  # transformers has bitsandbytes keep the states of embeddings in 32 bits
    if settings.get("optim_bits") == 8:
        modules = trainer.model.modules()
        in_32_bits = {id(module.weight) for module in modules if isinstance(module, torch.nn.Embedding)}
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    parts = [(settings, [parameter for parameter in trained if id(parameter) not in in_32_bits])]
    if in_32_bits:
        parts.append((settings | {"optim_bits": 32}, [weight for weight in trained if id(weight) in in_32_bits]))
    states = []
    for options, parameters in parts:
        optimizer = kind([torch.nn.Parameter(torch.empty(0))], **options)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = [torch.nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype)) for weight in parameters]
            for fake in fakes:
                fake.grad = torch.empty_like(fake)
            optimizer.param_groups[0]["params"] = fakes  # on the CPU, where nothing is paged
            if kind.__module__.startswith("bitsandbytes"):  # its update of an existing state needs no kernel here
                optimizer.update_step, optimizer.initialized = lambda *_: None, True
                optimizer.mng = SimpleNamespace(index2config={}, pid2config={})  # the process's has other trainers' too
            optimizer.step()
            states.append(dict(optimizer.state_dict()))
    return states


def tokenizer_bytes(tokenizer: Any) -> int:
    """Return the bytes that a tokenizer or processor saves; 0 for None."""
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as scratch:
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        return bytes_of(Path(scratch))


def merged_bytes(config: Any, merge_dtype: str = "keep") -> int:
    """Return the bytes of the merged model's safetensors files: every weight once, in the dtype that the config names.

    They follow from the config: the base on disk may be quantized to 4 bits, and what is merged is not. merge_dtype: "float32"
    converts; "auto" does if there is room, and is no reason to refuse a run.
    """
    dtype = "float32" if merge_dtype == "float32" else config.dtype or torch.float32
    stored = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tensors = without_aliases(meta_model(config, named_class(config)).state_dict(keep_vars=True))
    return safetensors_bytes({name: t.to(stored) if t.is_floating_point() else t for name, t in tensors.items()})


@dataclass(frozen=True)
class DiskForecast:
    """Disk space that a run needs, by filesystem: two paths on one share its space.

    checkpoint: bytes of one. keep: how many stay. held: the most there are at once, with the one being written. saves: how
    many are to come, None where that is not known. notes: what is not known, or not counted.
    """

    checkpoint: int
    keep: int
    held: int
    saves: int | None
    disks: tuple[Disk, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not any(disk.refusal for disk in self.disks)

    @property
    def lines(self) -> list[str]:
        """A few lines for a log: what is needed, what there is, and what helps where it does not fit."""
        checkpoints = f"one checkpoint is {format_bytes(self.checkpoint)}; at most there are {self.held}"
        short = [disk for disk in self.disks if disk.short]
        helps = [f"{disk.filesystem.mount}: what helps: {'; '.join(self.advice(disk))}" for disk in short]
        return [checkpoints, *map(str, self.disks), *helps, *self.notes]

    def advice(self, disk: Disk) -> list[str]:
        """Return what to do about a disk that is too small."""
        free, sizes, helps = disk.filesystem.space.free, {need.what: need for need in disk.needs}, []
        if disk.training > free and CHECKPOINTS in sizes and self.keep > 2:
            helps.append(f"save_total_limit: 2 takes {format_bytes((self.keep - 2) * self.checkpoint)} less")
        if disk.end > free and MERGED in sizes:
            helps.append(f"cogumi.merge=false takes {format_bytes(sizes[MERGED].end)} less")
        return [*helps, f"{format_bytes(disk.short)} more space, or another disk (cogumi.run_dir, HF_HOME)"]


def forecast_trainer(
    trainer: Any,
    *,
    keep: int,
    by_time: bool = False,
    adapter_into: Path | None = None,
    merged_into: Path | None = None,
    merge_dtype: str = "keep",
    more: Iterable[Need] = (),
    notes: Iterable[str] = (),
) -> DiskForecast:
    """Forecast what a protected trainer's run needs of its disks from now on. Changes nothing.

    keep: how many checkpoints `protect` keeps. by_time: saves are not in steps. adapter_into, merged_into: where those will
    be written, if they will. merge_dtype: of `merged_bytes`. more, notes: other needs and notes. Raises OSError for a disk that
    does not answer.
    """
    args, checkpoint = trainer.args, checkpoint_bytes(trainer)
    directory = Path(args.output_dir)
    ours = [path for path in list_checkpoints(directory) if (path / MANIFEST_NAME).is_file()]
    saves_regularly = args.save_strategy.value != "no"
    saves = count_saves(trainer, step_of(ours[0]) if ours else 0, by_time) if saves_regularly else 1
    # Beside the newest stay those that are pinned, the one resumed from, and the best.
    beside = sum((path / PIN_NAME).exists() for path in ours) + bool(ours) + (args.metric_for_best_model is not None)
    need, held = checkpoints_need(directory, ours, checkpoint.total, keep + beside, saves)
    needs = [need, *more]
    if adapter_into is not None:
        beside = checkpoint.tokenizer + (witness_bytes(trainer.model) if hasattr(trainer.model, "peft_config") else 0)
        needs.append(Need(ADAPTER, adapter_into, 0, checkpoint.weights + beside))
    if merged_into is not None:
        config = trainer.model.config
        if config.name_or_path:  # a merge keeps the dtype on disk; a loaded model's config has the one it was loaded in
            config = AutoConfig.from_pretrained(config.name_or_path, revision=commit_of(config))
        size = merged_bytes(config, merge_dtype) + tokenizer_bytes(trainer.processing_class)
        needs.append(Need(MERGED, merged_into, 0, size))
    snapshots = min(MAX_SNAPSHOTS, MAX_SNAPSHOTS if saves is None else saves)
    if adapter_into is not None and saves_regularly and snapshots * checkpoint.weights > NOTED_BYTES:
        most = f"{snapshots} adapters of earlier steps ({format_bytes(snapshots * checkpoint.weights)})"
        notes = (*notes, f"at most {most} stay where there is room; where there is none, they go first")
    notes = (*(() if saves_regularly else (NO_SAVES,)), *((BY_TIME,) if by_time else ()), *notes)
    return DiskForecast(checkpoint.total, keep, held, saves, tuple(group_needs(needs)), notes)


def checkpoints_need(directory: Path, ours: list[Path], size: int, staying: int, saves: int | None) -> tuple[Need, int]:
    """Return what checkpoints of `size` bytes take beyond those that are there, and how many there are at most.

    staying: how many stay at once. saves: how many are to come, None where that is not known.
    """
    if saves == 0:  # nothing is needed, however unequal those are that are there
        return Need(CHECKPOINTS, directory, 0, 0), len(ours)
    taken = 0
    for path in (*ours, directory / STAGING_NAME):
        with suppress(FileNotFoundError):  # a save or a removal has just renamed it
            taken += disk_bytes(path)
    total = math.inf if saves is None else len(ours) + saves
    at_end = max(staying, len(ours))  # checkpoints beyond `keep` have their reason
    held = int(min(total, at_end + 1))
    end = int(min(total, at_end)) * size - taken
    return Need(CHECKPOINTS, directory, max(0, held * size - taken), max(0, end)), held


def count_saves(trainer: Any, step: int, by_time: bool = False) -> int | None:
    """Count the checkpoints that the trainer writes after a step; None where time or an epoch's length decides."""
    args, strategy = trainer.args, trainer.args.save_strategy.value
    last = max(trainer.state.max_steps, args.max_steps, 0)
    if by_time and (step < last or not last):
        return None
    if strategy == "epoch" and args.max_steps <= 0:
        return math.ceil(args.num_train_epochs)
    if strategy != "steps" or not last:  # until training begins only max_steps names the last one
        return None
    every = max(1, math.ceil(args.save_steps if args.save_steps >= 1 else args.save_steps * last))
    return math.ceil(last / every) - step // every if step < last else 0


def forecast_disks(run: RunConfig) -> DiskForecast:
    """Forecast what a run has yet to write and download, from its config alone.

    Raises UsageError for settings that PEFT, TRL or transformers refuse.
    """
    gspo_loss.apply()  # without it TRL takes no gspo; unsloth, which must be imported first, is of no use to shapes
    args = trl_arguments(without_machine(run))
    find_adapter(run)
    if run.model.adapter_dir is not None:
        run.lora = lora_of(run.model.adapter_dir, run.lora)
    base = read_base(run.model.name, run.model.revision)
    config = base.config
    if run.model.quantization_config is not None:  # which changes nothing of what is written
        refuse_quantized_already(base.name, config)
    tokenizer, notes = None, []
    try:
        tokenizer = load_tokenizer(base)
    except UsageError:  # a run would not start without one; the rest is worth knowing
        notes.append(f"{run.model.name} has no tokenizer that can be loaded, and none is counted")
    train_all = run.cogumi.tuning == "full"  # then the trained model is saved as `merged/`, and there is no adapter
    try:
        dtype = resolve_dtype(dtype_of_weights(run))
        lora = None if train_all else lora_config(run.lora, model=meta_model(base.config))
        trainer = saving_trainer(config, dtype, args, lora, tokenizer)
    except BUILD_REFUSALS as error:
        raise UsageError(f"model, lora or train: {one_line(error)}") from error
    downloads, unknown = download_need(run)
    adapter, merged = run.run_dir / "adapter", run.run_dir / "merged"
    return forecast_trainer(
        trainer,
        keep=keep_limit(trainer.args.save_total_limit) or DEFAULT_KEEP,
        by_time=run.saves_by_time,
        adapter_into=None if train_all or adapter.exists() else adapter,
        merged_into=merged if (run.cogumi.merge or train_all) and not merged.exists() else None,
        merge_dtype=run.merge_dtype,
        more=downloads,
        notes=(*notes, *unknown),
    )


def saving_trainer(config: Any, dtype: torch.dtype, args: Any, lora: Any = None, tokenizer: Any = None) -> Any:
    """Build a trainer for `forecast_trainer` without weights. 8 billion parameters take seconds and no memory.

    As any Trainer this one sets the seeds. It is not TRL's: adapters that start from the weights (PiSSA) are made without
    any here. config: the base's, quantized or not. args: TrainingArguments, or TRL's; nothing is written to their output_dir.
    lora: a PEFT config, or None where every weight is trained.
    """
    model = meta_model(config).to(dtype)
    if lora is not None:
        model = get_peft_model(model, copy.copy(lora), low_cpu_mem_usage=True)  # which completes its config
        keep_float32(model)
    args = copy.copy(args)
    output_dir, args.push_to_hub, args.report_to = args.output_dir, False, []  # no repository is made, no run announced
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as scratch:
        args.output_dir = scratch  # a Trainer makes it
        trainer = keep_on_meta(Trainer)(model, args, eval_dataset=[], processing_class=tokenizer)
    args.output_dir = output_dir
    return trainer


def download_need(run: RunConfig) -> tuple[list[Need], list[str]]:
    """Return what the model's files will take in the hub's cache, and a note where it is not known."""
    name = run.model.name
    if name.startswith("cogumi:"):
        return [], []
    try:
        downloads = [plan_download(name, find_commit(name, run.model.revision))]
        if run.cogumi.merge and run.cogumi.tuning == "lora":
            config = AutoConfig.from_pretrained(name, revision=run.model.revision)
            original = find_original(name, config, run.cogumi.merge_base, run.cogumi.base_mode)
            downloads.append(original.download if original is not None else None)
    except UsageError as error:
        return [], [f"what the download of {name} takes in {hub_cache()} is not known: {error}"]
    size = sum(download.to_fetch for download in downloads if download is not None)
    return [Need(DOWNLOAD, hub_cache(), size, size)] if size else [], []


def describe_disks(run: RunConfig) -> list[Line]:
    """Return a line for each filesystem, with what would make it large enough, and what is not known."""
    try:
        forecast = forecast_disks(run)
    except (ValueError, ImportError) as error:  # of a setting that the libraries read when it is first used
        raise UsageError(one_line(error), key="train") from error
    lines = []
    for disk in forecast.disks:
        fix = "name a directory on another disk (cogumi.run_dir, HF_HOME)"
        if disk.short:
            fix = "; ".join(forecast.advice(disk))
        lines.append(Line("disk", str(disk), "red", fix) if disk.refusal else Line("disk", str(disk)))
    return [*lines, *(Line("disk", note, "unknown") for note in forecast.notes)]
