"""How much disk a run will want, and whether its disks have it: its checkpoints, the adapter, the merged model.

There is no table of bytes per parameter here. Each writer of a part of a checkpoint is asked what it will write. PEFT
or the model gives the weights, and the optimizer its state. Before the first step a copy of the optimizer takes one on
stand-ins without memory. torch.save writes its file with the data left out. The tokenizer, the configs and the random
states are saved once, to a temporary directory. transformers' Trainer._save_checkpoint (5.17) says what belongs to one.

A run takes most disk at one of two moments. One is a save: the new checkpoint lies beside those that stay and the
reserve for one more (cogumi.protect). The other is its end, when it writes adapter and merged model without a reserve.
"""

import copy
import json
import logging
import math
import os
import tempfile
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoConfig, PreTrainedConfig

from cogumi.checkpoints.manifest import MANIFEST_NAME, step_of
from cogumi.checkpoints.retention import PIN_NAME, list_checkpoints
from cogumi.checkpoints.verify import bytes_of
from cogumi.core.disk_space import Disk, Need, format_bytes, group_needs
from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import make_header
from cogumi.disk import LEFTOVERS, RESERVE, STAGING, disk_bytes, kind_of
from cogumi.models.loading import meta_model
from cogumi.patches.torch_internals import FakeTensorMode
from cogumi.patches.trl_internals import commit_of, holds_adapter, save_rng_and_scaler

log = logging.getLogger(__name__)

# What a scheduler saves of itself, measured over transformers' kinds (1.4 to 1.6 kB), until there is one.
SCHEDULER_BYTES = 1500
# These set up hooks on the model when they are made, and making a second one to look at would leave two sets.
HOOKED_OPTIMIZERS = ("layerwise", "lomo")


@dataclass(frozen=True)
class Forecast:
    """Bytes of the checkpoint that the trainer writes next, by part.

    files: tokenizer, configs, model card and training arguments. state: of the trainer, its scheduler and random numbers.
    measured: the optimizer has taken a step, and its bytes are those of its state; before, those of one on stand-ins.
    """

    weights: int
    optimizer: int
    files: int
    state: int
    measured: bool

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.files + self.state


def checkpoint_bytes(trainer: Any) -> Forecast:
    """Forecast the next checkpoint of any transformers or TRL trainer, before training or during it.

    Within 5 % of what is written before the first step and within 2 % after it. Nothing of the trainer changes. Raises
    UsageError before the first step for an optimizer that hooks into the model (LOMO, layerwise GaLore).
    """
    live, optimizer = trainer.optimizer is not None and trainer.state.global_step > 0, 0
    if not trainer.args.save_only_model:
        state = trainer.optimizer.state_dict() if live else optimizer_state(planned_optimizer(trainer))
        optimizer = torch_save_bytes(state)
    return Forecast(weights_bytes(trainer), optimizer, small_files_bytes(trainer), state_bytes(trainer), live)


def merged_bytes(model_or_config: Any) -> int:
    """Bytes of the merged model's safetensors files: every weight once, in the dtype that the config names.

    From the shapes that the config implies: the base on disk may be quantized to 4 bits, and what is merged is not.
    The tokenizer comes on top. Raises UsageError for a config that transformers cannot build.
    """
    config = model_or_config if isinstance(model_or_config, PreTrainedConfig) else model_or_config.config
    dtype = config.dtype or torch.float32
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tensors = without_aliases(meta_model(config).state_dict(keep_vars=True))
    return safetensors_bytes({name: t.to(wanted) if t.is_floating_point() else t for name, t in tensors.items()})


def weights_bytes(trainer: Any) -> int:
    """The safetensors files that save_model writes: for a PEFT model each adapter, with modules_to_save, and no base."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if isinstance(model, PeftModel) or holds_adapter(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about resized embeddings: PEFT says it again when it saves them
            adapters = [get_peft_model_state_dict(model, adapter_name=name) for name in saved_adapters(model)]
        return sum(safetensors_bytes(adapter) for adapter in adapters)
    return safetensors_bytes(without_aliases(model.state_dict(keep_vars=True)))


def saved_adapters(model: Any) -> list[str]:
    """PEFT's own save writes all adapters (DPO's frozen "ref" too), transformers' the active one."""
    return list(model.peft_config) if isinstance(model, PeftModel) else model.active_adapters()[:1]


def without_aliases(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Each piece of memory once, and each tensor that has none: tied weights are saved under one of their names."""
    seen: dict[tuple[Any, ...], tuple[str, Any]] = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "data_ptr"):  # bitsandbytes puts strings into state dicts
            where = (tensor.device, tensor.data_ptr() or id(tensor), tuple(tensor.shape))
            seen.setdefault(where, (name, tensor))
    return dict(seen.values())


def safetensors_bytes(tensors: Mapping[str, Any]) -> int:
    """The file that safetensors writes: the header, and the data back to back."""
    entries = [(name, "BF16", tuple(each.shape), each.numel() * each.element_size()) for name, each in tensors.items()]
    return len(make_header({"format": "pt"}, entries)) + sum(entry[3] for entry in entries)


def planned_optimizer(trainer: Any) -> Any:
    """The trainer's optimizer, or one like the one it will make, which is deleted after its size is read."""
    if trainer.optimizer is not None:
        return getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # out of accelerate's wrapper
    name = trainer.args.optim.value
    if any(word in name for word in HOOKED_OPTIMIZERS):
        raise UsageError(f"optim {name}: its checkpoint can be forecast from the first step on, not before")
    try:
        return trainer.create_optimizer()
    finally:
        trainer.optimizer = None


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """The state dict that an optimizer would have after its first step, as fake tensors.

    A copy of it takes the step, on fake parameters of the same shapes. The copy itself decides which states it keeps,
    for which parameters, in which precision. Optimizers other than torch's, transformers' and bitsandbytes' may do more
    in a step than arithmetic, so each of them is forecast as an AdamW.
    """
    family = type(optimizer).__module__.partition(".")[0]
    groups = optimizer.param_groups
    with FakeTensorMode(allow_non_fake_inputs=True):
        stand_ins = [{**group, "params": [fake_parameter(p) for p in group["params"]]} for group in groups]
        if family not in ("torch", "transformers", "bitsandbytes"):
            log.info("%s is not known: forecast as an AdamW until its first step", type(optimizer).__name__)
            double = torch.optim.AdamW([{"params": group["params"]} for group in stand_ins])
        else:
            double = copy_optimizer(optimizer, stand_ins)
            if family == "bitsandbytes":
                # Which parameters are overridden is looked up by the identity of the real ones. What it does with the
                # state, once made, needs no rehearsal, nor a kernel.
                optimizer.check_overrides()
                double.get_config = optimizer.get_config
                double.update_step = lambda *_: None
                double.initialized = True
        type(double).step(double)  # not double.step, which schedulers bind to the real one
        return double.state_dict()


def fake_parameter(parameter: Any) -> Any:
    """A parameter of the same shape and dtype, with a gradient if it is trained. On the CPU, where nothing is paged."""
    fake = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
    fake.grad = torch.empty_like(fake) if parameter.requires_grad else None
    return fake


def copy_optimizer(optimizer: Any, groups: list[dict[str, Any]]) -> Any:
    """A copy of an optimizer with other parameters and nothing in common that a step writes to."""
    double = object.__new__(type(optimizer))
    # Neither __init__ nor __getstate__, which leaves out what subclasses add.
    for name, value in vars(optimizer).items():
        double.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list)) else value
    hooks: dict[str, Any] = {"_optimizer_step_pre_hooks": OrderedDict(), "_optimizer_step_post_hooks": OrderedDict()}
    double.__dict__.update(state=defaultdict(dict), param_groups=groups, _cpu_paged_warned=True, **hooks)
    return double


def torch_save_bytes(value: Any) -> int:
    """The length of the file that torch.save would write, with its zip and pickle overhead; no data is written."""
    with tempfile.TemporaryFile(prefix="cogumi-forecast-") as file:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(value, file)
        return file.seek(0, os.SEEK_END)


def small_files_bytes(trainer: Any) -> int:
    """Configs, model card, tokenizer and training_args.bin: written once, by those who write them in a save."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    with tempfile.TemporaryDirectory(prefix="cogumi-forecast-") as scratch:
        if isinstance(model, PeftModel):
            model.create_or_update_model_card(scratch)
        elif hasattr(model, "config"):
            model.config.save_pretrained(scratch)
            if model.can_generate():
                model.generation_config.save_pretrained(scratch)
        if hasattr(model, "peft_config"):
            for name in saved_adapters(model):
                model.peft_config[name].save_pretrained(Path(scratch, name))
        return bytes_of(Path(scratch)) + torch_save_bytes(trainer.args) + tokenizer_bytes(tokenizer)


def tokenizer_bytes(tokenizer: Any) -> int:
    """What a tokenizer or processor saves."""
    with tempfile.TemporaryDirectory(prefix="cogumi-forecast-") as scratch:
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        return bytes_of(Path(scratch))


def state_bytes(trainer: Any) -> int:
    """Trainer state, scheduler and random states, measured as they are now; the log history grows."""
    size, scheduler = len(json.dumps(asdict(trainer.state), indent=2)), trainer.lr_scheduler
    if trainer.args.save_only_model:
        return size
    size += SCHEDULER_BYTES if scheduler is None else torch_save_bytes(scheduler.state_dict())
    with tempfile.TemporaryDirectory(prefix="cogumi-forecast-") as scratch:
        save_rng_and_scaler(trainer, scratch)
        return size + bytes_of(Path(scratch))


# ----------------------------------------------------------------------------------------------------- a run's disks

SHARD_BYTES = 5_000_000_000
CHECKPOINTS, ADAPTER, MERGED, DOWNLOAD = "checkpoints", "adapter", "merged model", "model download"
NO_SAVES = "save_strategy is no: one checkpoint is written where a signal ends the training, and no other"
# Files and directories: a checkpoint has 12 to 17, an adapter or a model without its shards fewer.
ENTRIES = 20


@dataclass(frozen=True)
class Outlook:
    """What a run wants of its disks, by filesystem: two paths on one share its space.

    checkpoint: bytes of one. keep: how many stay (None: all). held: the most there are at once, the one being written
    included; reserve: the bytes held for one more. saves: how many are to come, None where that is not known. notes: what
    is not known, or not counted.
    """

    checkpoint: int
    keep: int | None
    held: int
    reserve: int
    saves: int | None
    disks: tuple[Disk, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return all(disk.fits for disk in self.disks)

    @property
    def lines(self) -> list[str]:
        """A few lines for a log: what is wanted, what there is, and what helps where it does not fit."""
        first, *others = self.about_saves
        return [first, *map(str, self.disks), *others]

    @property
    def about_saves(self) -> list[str]:
        """The same without what is said of each disk."""
        reserve = f" and a reserve of {format_bytes(self.reserve)}" if self.reserve else ""
        most = f"one checkpoint is {format_bytes(self.checkpoint)}; at most there are {self.held}{reserve}"
        short = [disk for disk in self.disks if disk.short]
        helps = [f"{disk.filesystem.mount}: what helps: {'; '.join(self.advice(disk))}" for disk in short]
        asked = [disk.allocation for disk in self.disks if disk.allocation is not None]
        return [most, *helps, *(answer.message for answer in asked if answer.fits is None), *self.notes]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def advice(self, disk: Disk) -> list[str]:
        """What to do about a disk that is too small."""
        free, sizes = disk.filesystem.space.free, {need.what: need for need in disk.needs}
        helps = []
        kept = self.held - 1 if self.keep is None else self.keep
        if disk.training > free and CHECKPOINTS in sizes and kept > 2:
            helps.append(f"save_total_limit: 2 takes {format_bytes((kept - 2) * self.checkpoint)} less")
        if disk.training > free and CHECKPOINTS in sizes:
            helps.append("cogumi.fallback, or protect(fallback=...), names a directory on another disk")
        if disk.end > free and MERGED in sizes:
            helps.append(f"cogumi.merge=false takes {format_bytes(sizes[MERGED].end)} less")
        if DOWNLOAD in sizes and sizes[DOWNLOAD].training:
            helps.append("HF_HOME on another disk")
        return [*helps, f"{format_bytes(disk.short)} more space"]


def outlook(
    trainer: Any,
    *,
    keep: int | None,
    adapter_into: Path | None = None,
    merged_into: Path | None = None,
    more: Iterable[Need] = (),
    notes: Iterable[str] = (),
) -> Outlook:
    """What a protected trainer's run will want of its disks, from now on. Changes nothing.

    keep: as `protect` keeps them (None: all). adapter_into, merged_into: where those will be written, if they will. more:
    what else is to be counted; notes: what else is to be said. Raises what `checkpoint_bytes` raises, and OSError for a
    disk that does not answer.
    """
    args, forecast = trainer.args, checkpoint_bytes(trainer)
    regular = args.save_strategy.value != "no"
    found = ExistingCheckpoints.below(Path(args.output_dir))
    # The newest there is resumed from, and stays.
    resumed = bool(found.ours) and trainer.state.global_step == 0
    step = step_of(found.ours[0]) if resumed else trainer.state.global_step
    beside = found.pinned + resumed + (args.metric_for_best_model is not None)
    needs = list(more)
    if adapter_into is not None:
        needs.append(Need(ADAPTER, adapter_into, 0, forecast.weights + forecast.files, ENTRIES))
    if merged_into is not None:
        size = merged_bytes(base_config(trainer.model)) + tokenizer_bytes(trainer.processing_class)
        needs.append(Need(MERGED, merged_into, 0, size, ENTRIES + size // SHARD_BYTES))
    return compose_outlook(
        each=forecast.total,
        keep=keep,
        staying=None if keep is None else keep + beside,
        reserve=forecast.total if regular else 0,
        saves=count_saves(trainer, step) if regular else 1,
        found=found,
        needs=needs,
        notes=(*(() if regular else (NO_SAVES,)), *notes),
    )


def compose_outlook(
    *,
    each: int,
    keep: int | None,
    staying: int | None,
    reserve: int,
    saves: int | None,
    found: "ExistingCheckpoints",
    needs: list[Need],
    notes: tuple[str, ...] = (),
) -> Outlook:
    """The outlook of a run: `staying` of its checkpoints stay at once (None: all), `saves` are to come (None: not known)."""
    present, training, end, held = len(found.ours), 0, 0, len(found.ours)
    if saves != 0:  # with nothing to come nothing is wanted, however unequal those are that are there
        at_end = math.inf if staying is None else max(staying, present)  # what is there beyond `keep` has its reason
        total = math.inf if saves is None else present + saves
        if math.isinf(total) and math.isinf(at_end):
            total = present + 1
            notes = (*notes, "every checkpoint stays, and how many are to come is not known: only the next is counted")
        held = int(min(total, at_end + 1))
        training = max(0, held * each + reserve - found.bytes)
        end = max(0, int(min(total, at_end)) * each - found.bytes)
    needs = [Need(CHECKPOINTS, found.directory, training, end, max(0, held - present) * ENTRIES), *needs]
    return Outlook(each, keep, held, reserve if saves != 0 else 0, saves, tuple(group_needs(needs, ask=True)), notes)


@dataclass(frozen=True)
class ExistingCheckpoints:
    """What is in a directory of checkpoints already."""

    directory: Path
    ours: tuple[Path, ...]
    pinned: int
    bytes: int

    @classmethod
    def below(cls, directory: Path) -> "ExistingCheckpoints":
        ours = [path for path in list_checkpoints(directory) if (path / MANIFEST_NAME).is_file()]
        others = directory.iterdir() if directory.is_dir() else []
        replaced = [path for path in others if kind_of(path.name, LEFTOVERS) in (RESERVE, STAGING)]
        taken = 0
        for path in (*ours, *replaced):
            with suppress(FileNotFoundError):  # a save or a removal has just given it another name
                taken += disk_bytes(path)
        return cls(directory, tuple(ours), sum((path / PIN_NAME).exists() for path in ours), taken)


def count_saves(trainer: Any, step: int) -> int | None:
    """How many checkpoints the trainer writes after a step; None where that is not known, as before an epoch's length is."""
    args, state = trainer.args, trainer.state
    last, strategy = max(state.max_steps, args.max_steps, 0), args.save_strategy.value
    if strategy == "epoch" and args.max_steps <= 0:
        return max(0, math.ceil(args.num_train_epochs) - math.floor(state.epoch or 0))
    if strategy != "steps" or not last:  # until training begins only max_steps says the last one
        return None
    every = max(1, math.ceil(args.save_steps if args.save_steps >= 1 else args.save_steps * last))
    return math.ceil(last / every) - step // every if step < last else 0


def base_config(model: Any) -> Any:
    """The config that the base has on disk, whose dtype a merge keeps: a loaded model's says what it was loaded in."""
    name = model.config.name_or_path
    return AutoConfig.from_pretrained(name, revision=commit_of(model.config)) if name else model.config
