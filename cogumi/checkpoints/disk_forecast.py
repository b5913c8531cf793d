"""How much disk a run will want, and whether its disks have it: its checkpoints, the adapter, the merged model.

There is no table of bytes per parameter here. Each writer of a part of a checkpoint is asked what it will write: PEFT or
the model for the names and shapes of the weights, the optimizer for its state (before the first step it takes one on
stand-ins that have shapes and no memory), torch.save for its file, with the data left out, and the tokenizer, the
configs and the random states for files so small that they are simply written once, to a temporary directory. What a
checkpoint consists of: transformers' Trainer._save_checkpoint (5.17).

A run takes most at one of two moments: while it saves a checkpoint beside those that stay and the reserve for one more
(cogumi.protect), or at its end, when adapter and merged model are written and the reserve is gone.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from cogumi.checkpoints.manifest import MANIFEST_NAME, step_of
from cogumi.checkpoints.retention import PIN_NAME, checkpoints_in
from cogumi.core.disk_space import Disk, Need, disks_of, spoken
from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import header_for
from cogumi.disk.usage_by_owner import LEFTOVERS, RESERVE, STAGING, kind_of, taken_by
from cogumi.models.loading import meta_model

log = logging.getLogger(__name__)

# What a scheduler saves of itself, measured over transformers' kinds (1.4 to 1.6 kB), until there is one.
SCHEDULER_BYTES = 1500
# These set up hooks on the model when they are made, and making a second one to look at would leave two sets.
HOOKED_OPTIMIZERS = ("layerwise", "lomo")
TOKENIZER_BYTES: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Forecast:
    """Bytes of the checkpoint that the trainer writes next, by part.

    files: tokenizer, configs, model card, training arguments and trainer state, whose log history grows. measured: the
    optimizer has taken a step, and its bytes are those of its state; before, they are those of a state made on stand-ins.
    """

    weights: int
    optimizer: int
    scheduler_and_rng: int
    files: int
    measured: bool

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.scheduler_and_rng + self.files


def checkpoint_bytes(trainer: Any) -> Forecast:
    """Forecast the next checkpoint of any transformers or TRL trainer, before training or during it.

    Within 5 % of what is written before the first step and within 2 % after it. Nothing of the trainer changes; the
    random states do not either. Raises UsageError before the first step for an optimizer that hooks into the model
    (LOMO, layerwise GaLore), and OSError where the temporary directory takes no tokenizer.
    """
    resumable = not trainer.args.save_only_model
    live = trainer.optimizer is not None and trainer.state.global_step > 0
    state = len(json.dumps(asdict(trainer.state), indent=2))
    with tempfile.TemporaryDirectory(prefix="cogumi-forecast-") as scratch:
        return Forecast(
            weights=weights_bytes(trainer),
            optimizer=torch_save_bytes(
                trainer.optimizer.state_dict() if live else state_after_a_step(coming_optimizer(trainer))
            )
            if resumable
            else 0,
            scheduler_and_rng=scheduler_and_rng_bytes(trainer, Path(scratch, "rng")) if resumable else 0,
            files=small_files_bytes(trainer, Path(scratch, "files")) + state,
            measured=live,
        )


def merged_bytes(model_or_config: Any, dtype: Any = "keep") -> int:
    """Bytes of the merged model's safetensors files: every weight once, in `dtype`.

    "keep": the config's, which for a model is the dtype that it was loaded in, and a merge keeps the base's on disk.

    From the shapes that the config implies, built on the meta device: the base on disk may be quantized to 4 bits, and
    what is merged is not. A model may be quantized, wrapped by PEFT or both. The tokenizer comes on top (Forecast.files).
    Raises UsageError for a config that transformers cannot build.
    """
    import torch
    from transformers import PreTrainedConfig

    config = model_or_config if isinstance(model_or_config, PreTrainedConfig) else model_or_config.config
    if dtype == "keep":
        dtype = config.dtype or torch.float32
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tensors = without_aliases(meta_model(config).state_dict(keep_vars=True))
    return safetensors_bytes({name: t.to(wanted) if t.is_floating_point() else t for name, t in tensors.items()})


def weights_bytes(trainer: Any) -> int:
    """The safetensors files that save_model writes: for a PEFT model each adapter, with modules_to_save, and no base."""
    from peft import PeftModel, get_peft_model_state_dict

    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if isinstance(model, PeftModel) or getattr(model, "_hf_peft_config_loaded", False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about resized embeddings: PEFT says it again when it saves them
            adapters = [get_peft_model_state_dict(model, adapter_name=name) for name in saved_adapters(model)]
        return sum(safetensors_bytes(adapter) for adapter in adapters)
    return safetensors_bytes(without_aliases(model.state_dict(keep_vars=True)))


def saved_adapters(model: Any) -> list[str]:
    """PEFT's own save writes all adapters (DPO's frozen "ref" too), transformers' the active one."""
    from peft import PeftModel

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
    return len(header_for({"format": "pt"}, entries)) + sum(entry[3] for entry in entries)


def coming_optimizer(trainer: Any) -> Any:
    """The optimizer that the trainer has, or one like that which it will make: it is made, looked at and let go."""
    if trainer.optimizer is not None:
        return getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # out of accelerate's wrapper
    name = trainer.args.optim.value
    if any(word in name for word in HOOKED_OPTIMIZERS):
        raise UsageError(f"optim {name}: its checkpoint can be forecast from the first step on, not before")
    try:
        return trainer.create_optimizer()
    finally:
        trainer.optimizer = None


def state_after_a_step(optimizer: Any) -> dict[str, Any]:
    """The state dict that an optimizer would have after its first step, as fake tensors.

    A copy of it takes the step, on fake parameters of the same shapes: so it decides itself which states it keeps, for
    which parameters, in which precision (bitsandbytes: no 8 bits for fewer than 4096 elements, nor for embeddings).
    Optimizers other than torch's, transformers' and bitsandbytes' may do more in a step than arithmetic: those are not
    copied but taken for an AdamW.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    family = type(optimizer).__module__.partition(".")[0]
    groups = optimizer.param_groups
    with FakeTensorMode(allow_non_fake_inputs=True):
        stand_ins = [{**group, "params": [stand_in(p) for p in group["params"]]} for group in groups]
        if family not in ("torch", "transformers", "bitsandbytes"):
            log.info("%s is not known: forecast as an AdamW until its first step", type(optimizer).__name__)
            double = torch.optim.AdamW([{"params": group["params"]} for group in stand_ins])
        else:
            double = double_of(optimizer, stand_ins)
            if family == "bitsandbytes":
                # Which parameters are overridden is looked up by the identity of the real ones. What it does with the
                # state, once made, needs no rehearsal, nor a kernel.
                optimizer.check_overrides()
                double.get_config = optimizer.get_config
                double.update_step = lambda *_: None
                double.initialized = True
        type(double).step(double)  # not double.step, which schedulers bind to the real one
        return double.state_dict()


def stand_in(parameter: Any) -> Any:
    """A parameter of the same shape and dtype, with a gradient if it is trained. On the CPU, where nothing is paged."""
    import torch

    fake = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
    if parameter.requires_grad:
        fake.grad = torch.empty_like(fake)
    return fake


def double_of(optimizer: Any, groups: list[dict[str, Any]]) -> Any:
    """A copy of an optimizer with other parameters and nothing in common that a step writes to."""
    double = object.__new__(type(optimizer))
    # Neither __init__ nor __getstate__, which leaves out what subclasses add.
    for name, value in vars(optimizer).items():
        double.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list)) else value
    double.__dict__.update(
        state=defaultdict(dict),
        param_groups=groups,
        _cpu_paged_warned=True,
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    return double


class Counter:
    """A file that holds nothing and knows how long it is."""

    def __init__(self) -> None:
        self.position = 0

    def write(self, data: bytes) -> int:
        self.position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_CUR) -> int:
        """torch.save passes over the data that it leaves out."""
        assert whence == os.SEEK_CUR
        self.position += offset
        return self.position

    def flush(self) -> None:
        pass


def torch_save_bytes(value: Any) -> int:
    """The length of the file that torch.save would write, with its zip and pickle overhead; no data is copied."""
    import torch

    counter = Counter()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(value, counter)  # type: ignore[arg-type]
    return counter.position


def scheduler_and_rng_bytes(trainer: Any, scratch: Path) -> int:
    scheduler = trainer.lr_scheduler
    scratch.mkdir()
    trainer._save_rng_state(os.fspath(scratch))
    trainer._save_scaler(os.fspath(scratch))
    return (SCHEDULER_BYTES if scheduler is None else torch_save_bytes(scheduler.state_dict())) + size_of(scratch)


def small_files_bytes(trainer: Any, scratch: Path) -> int:
    """Configs, model card, tokenizer and training_args.bin: written to `scratch` by those who write them in a save."""
    from peft import PeftModel

    scratch.mkdir()
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if isinstance(model, PeftModel):
        model.create_or_update_model_card(os.fspath(scratch))
    elif hasattr(model, "config"):
        model.config.save_pretrained(scratch)
        if model.can_generate():
            model.generation_config.save_pretrained(scratch)
    if hasattr(model, "peft_config"):
        for name in saved_adapters(model):
            model.peft_config[name].save_pretrained(scratch / name)
    tokenizer = trainer.processing_class
    if tokenizer is None:
        tokenizer = getattr(trainer.data_collator, "tokenizer", None)
    return size_of(scratch) + tokenizer_bytes(tokenizer) + torch_save_bytes(trainer.args)


def tokenizer_bytes(tokenizer: Any) -> int:
    """What a tokenizer or processor saves. Measured once for each: a vocabulary of 150 000 takes half a second."""
    if tokenizer is None:
        return 0
    if tokenizer not in TOKENIZER_BYTES:
        with tempfile.TemporaryDirectory(prefix="cogumi-forecast-") as scratch:
            tokenizer.save_pretrained(scratch)
            TOKENIZER_BYTES[tokenizer] = size_of(Path(scratch))
    return TOKENIZER_BYTES[tokenizer]


def size_of(directory: Path) -> int:
    """The bytes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def last_step_known(trainer: Any) -> int:
    """The run's last step, or 0: until training begins only max_steps says it."""
    return max(trainer.state.max_steps, trainer.args.max_steps, 0)


# ----------------------------------------------------------------------------------------------------- a run's disks

SHARD_BYTES = 5_000_000_000
CHECKPOINTS, ADAPTER, MERGED, DOWNLOAD = "checkpoints", "adapter", "merged model", "model download"
NO_SAVES = "save_strategy is no: one checkpoint is written where a signal ends the training, and no other"
# Files and directories: a checkpoint has 12 to 17, an adapter or a model without its shards fewer.
ENTRIES = 20


@dataclass(frozen=True)
class Outlook:
    """What a run wants of its disks, by filesystem: two paths on one share its space.

    checkpoint: bytes of one, at its largest. made_of: its largest parts in words, "" where it was only measured. keep:
    how many stay (None: all). held: the most there are at once, the one being written included; reserve: the bytes held
    for one more. saves: how many are to come, None where that is not known. notes: what is not known, or not counted.
    """

    checkpoint: int
    made_of: str
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
        reserve = f" and a reserve of {spoken(self.reserve)}" if self.reserve else ""
        made_of = f" ({self.made_of})" if self.made_of else ""
        said = [f"one checkpoint is {spoken(self.checkpoint)}{made_of}; at the fullest there are {self.held}{reserve}"]
        short = [disk for disk in self.disks if disk.short]
        said += [f"{disk.filesystem.mount}: what helps: {'; '.join(self.advice(disk))}" for disk in short]
        asked = [disk.allocation for disk in self.disks if disk.allocation is not None]
        said += [answer.message for answer in asked if answer.fits is None]
        return said + list(self.notes)

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def advice(self, disk: Disk) -> list[str]:
        """What to do about a disk that is too small."""
        free = disk.filesystem.space.free
        sizes = {need.what: need for need in disk.needs}
        said = []
        if disk.training > free and CHECKPOINTS in sizes:
            kept = self.held - 1 if self.keep is None else self.keep
            if kept > 2:
                saved = spoken((kept - 2) * self.checkpoint)
                instead = "all" if self.keep is None else kept
                said.append(f"2 checkpoints kept instead of {instead} (save_total_limit) are {saved} less")
            if disk.training - self.reserve <= free:
                said.append("it goes without the reserve, which is taken only where there is room")
            said.append("a directory on another disk for what does not fit, if none is named yet "
                        "(cogumi.fallback, or protect(fallback=...) in a script)")  # fmt: skip
            less = "saves less often" if self.keep is None else ""
            said.append(less or "saving less often does not help: the fullest moment stays the same")
        if disk.end > free and MERGED in sizes:
            said.append(f"cogumi.merge=false leaves {spoken(sizes[MERGED].end)} for `cogumi merge` to write elsewhere")
        if DOWNLOAD in sizes and sizes[DOWNLOAD].training:
            said.append("HF_HOME on another disk")
        return [*said, f"{spoken(disk.short)} more space, or the run on another disk"]


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
    args, output_dir = trainer.args, Path(trainer.args.output_dir)
    forecast = checkpoint_bytes(trainer)
    each = forecast.total
    regular = args.save_strategy.value != "no"
    found = Found.below(output_dir)
    # The newest there is resumed from, and stays.
    resumed = bool(found.ours) and trainer.state.global_step == 0
    step = step_of(found.ours[0]) if resumed else trainer.state.global_step
    beside = found.pinned + resumed + (args.metric_for_best_model is not None)
    needs = list(more)
    if adapter_into is not None:
        needs.append(Need(ADAPTER, adapter_into, 0, forecast.weights + forecast.files, ENTRIES))
    if merged_into is not None:
        needs.append(merged_need(base_on_disk(trainer.model), merged_into, trainer.processing_class))
    return composed(
        each=each,
        made_of=f"weights {spoken(forecast.weights)}, optimizer {spoken(forecast.optimizer)}",
        keep=keep,
        staying=None if keep is None else keep + beside,
        reserve=each if regular else 0,
        saves=saves_to_come(trainer, step) if regular else 1,
        found=found,
        needs=needs,
        notes=(*(() if regular else (NO_SAVES,)), *notes),
    )


def composed(
    *,
    each: int,
    made_of: str,
    keep: int | None,
    staying: int | None,
    reserve: int,
    saves: int | None,
    found: "Found",
    needs: list[Need],
    notes: tuple[str, ...] = (),
    ask: bool = True,
) -> Outlook:
    """The outlook of a run: `staying` of its checkpoints stay at once (None: all), `saves` are to come (None: not known)."""
    present = len(found.ours)
    at_end = math.inf if staying is None else max(staying, present)  # what is there beyond `keep` has its reason
    total = math.inf if saves is None else present + saves
    if math.isinf(total) and math.isinf(at_end):
        total = present + 1
        notes = (*notes, "every checkpoint stays, and how many are to come is not known: only the next is counted")
    held = int(min(total, at_end + 1)) if saves != 0 else present
    reserve = reserve if saves != 0 else 0
    # With nothing to come nothing is wanted, however unequal those are that are there.
    training = max(0, held * each + reserve - found.bytes) if saves != 0 else 0
    end = max(0, int(min(total, at_end)) * each - found.bytes) if saves != 0 else 0
    entries = max(0, held - present) * ENTRIES
    needs = [Need(CHECKPOINTS, found.directory, training, end, entries), *needs]
    disks = tuple(disks_of(needs, ask))
    return Outlook(each, made_of, keep, held, reserve, saves, disks, notes)


@dataclass(frozen=True)
class Found:
    """What is in a directory of checkpoints already.

    ours: those that count toward what is kept. bytes: what they, the reserve and a save under way take on the disk.
    """

    directory: Path
    ours: tuple[Path, ...]
    pinned: int
    bytes: int
    reserve: int

    @classmethod
    def below(cls, directory: Path) -> "Found":
        ours = tuple(path for path in checkpoints_in(directory) if (path / MANIFEST_NAME).is_file())
        return cls.of(directory, ours)

    @classmethod
    def of(cls, directory: Path, ours: tuple[Path, ...]) -> "Found":
        others = list(directory.iterdir()) if directory.is_dir() else []
        reserve, staged = (
            sum(taken_now(path) for path in others if kind_of(path.name, LEFTOVERS) == kind)
            for kind in (RESERVE, STAGING)
        )
        pinned = sum((path / PIN_NAME).exists() for path in ours)
        return cls(directory, ours, pinned, sum(map(taken_now, ours)) + reserve + staged, reserve)


def taken_now(path: Path) -> int:
    """What a file or directory takes on the disk; 0 where a save or a removal has just given it another name."""
    try:
        return taken_by(path)
    except FileNotFoundError:
        return 0


def saves_to_come(trainer: Any, step: int) -> int | None:
    """How many checkpoints the trainer writes after a step; None where that is not known, as before an epoch's length is."""
    args, state = trainer.args, trainer.state
    last, strategy = last_step_known(trainer), args.save_strategy.value
    if strategy == "epoch" and args.max_steps <= 0:
        return max(0, math.ceil(args.num_train_epochs) - math.floor(state.epoch or 0))
    if strategy != "steps" or not last:
        return None
    every = max(1, math.ceil(args.save_steps if args.save_steps >= 1 else args.save_steps * last))
    return math.ceil(last / every) - step // every if step < last else 0


def merged_need(config: Any, path: Path, tokenizer: Any = None) -> Need:
    size = merged_bytes(config) + tokenizer_bytes(tokenizer)
    return Need(MERGED, path, 0, size, ENTRIES + size // SHARD_BYTES)


def base_on_disk(model: Any) -> Any:
    """The config that the base has on disk, whose dtype a merge keeps: a loaded model's says what it was loaded in."""
    from transformers import AutoConfig

    name = model.config._name_or_path
    return AutoConfig.from_pretrained(name, revision=model.config._commit_hash) if name else model.config
