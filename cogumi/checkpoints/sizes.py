"""How much disk a run will want: its next checkpoint, the run at its fullest, the merged model.

There is no table of bytes per parameter here. Whoever writes a part of a checkpoint is asked what it will write: PEFT or
the model for the names and shapes of the weights, the optimizer for its state (before the first step it takes one on
stand-ins that have shapes and no memory), torch.save for its file, with the data left out, and the tokenizer, the
configs and the random states for files so small that they are simply written once, to a temporary directory.

What a checkpoint consists of: transformers' Trainer._save_checkpoint (5.17). Sizes are those of the files (st_size); a
filesystem adds up to a block to each of some fifteen.
"""

import copy
import json
import logging
import math
import os
import tempfile
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from cogumi.core.errors import UsageError
from cogumi.models.loading import meta_model
from cogumi.patches.trl_internals import holds_adapter, save_rng_and_scaler

log = logging.getLogger(__name__)

# What a scheduler saves of itself, measured over transformers' kinds (1.4 to 1.6 kB), until there is one.
SCHEDULER_BYTES = 1500
# What one entry of the log history takes in trainer_state.json, until there is one: TRL's trainers log more than the
# plain one. Measured with the default columns; a reward function adds some 160 bytes.
LOG_ENTRY_BYTES = {"GRPOConfig": 1800, "DPOConfig": 650, "SFTConfig": 350, "TrainingArguments": 170}
# These set up hooks on the model when they are made, and making a second one to look at would leave two sets.
HOOKED_OPTIMIZERS = ("layerwise", "lomo")
TOKENIZER_BYTES: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Forecast:
    """Bytes of the checkpoint that the trainer writes next, by part.

    files: tokenizer, configs, model card and training arguments. trainer_state is at `step` and grows by
    `log_bytes_per_step`. measured: the optimizer has taken a step, and its bytes are those of its state; before, they
    are those of a state made on stand-ins.
    """

    weights: int
    optimizer: int
    scheduler_and_rng: int
    files: int
    trainer_state: int
    step: int
    log_bytes_per_step: float
    measured: bool

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.scheduler_and_rng + self.files + self.trainer_state

    def at(self, step: int) -> "Forecast":
        """The checkpoint of another step: the same but for the log history."""
        grown = self.trainer_state + round((step - self.step) * self.log_bytes_per_step)
        return replace(self, trainer_state=max(grown, 0), step=step)


def checkpoint_bytes(trainer: Any) -> Forecast:
    """Forecast the next checkpoint of any transformers or TRL trainer, before training or during it.

    Within 5 % of what is written before the first step and within 2 % after it. Nothing of the trainer changes; the
    random states do not either. Raises UsageError before the first step for an optimizer that hooks into the model
    (LOMO, layerwise GaLore), and OSError where the temporary directory takes no tokenizer.
    """
    resumable = not trainer.args.save_only_model
    live = trainer.optimizer is not None and trainer.state.global_step > 0
    step = next_save_step(trainer)
    per_step = log_bytes_per_step(trainer)
    with tempfile.TemporaryDirectory(prefix="cogumi-forecast-") as scratch:
        return Forecast(
            weights=weights_bytes(trainer),
            optimizer=torch_save_bytes(optimizer_state(trainer, live)) if resumable else 0,
            scheduler_and_rng=scheduler_and_rng_bytes(trainer, Path(scratch, "rng")) if resumable else 0,
            files=small_files_bytes(trainer, Path(scratch, "files")),
            trainer_state=trainer_state_bytes(trainer) + round((step - trainer.state.global_step) * per_step),
            step=step,
            log_bytes_per_step=per_step,
            measured=live,
        )


def peak_bytes(
    forecast: Forecast, keep: int | None, *, save_every: int, last_step: int, best: bool = False, pinned: int = 0
) -> int:
    """What the checkpoints hold at the run's fullest: while the last is written, the `keep` before it are still there.

    keep: how many stay (None: all). best: the best one is kept beside them; pinned: how many more are. Both are taken to
    be others than the newest, which is the most that it can be. save_every, last_step: in optimizer steps.
    """
    if save_every < 1 or last_step < 1:
        raise UsageError(f"a run of {last_step} steps that saves every {save_every}: both must be at least 1")
    saves = [*range(save_every, last_step, save_every), last_step]
    held = len(saves) if keep is None else min(keep + 1 + best + pinned, len(saves))
    return sum(forecast.at(step).total for step in saves[-held:])


def saves_until_full(free: int, each: int, keep: int | None = None, present: int = 0) -> int | None:
    """How many more checkpoints of `each` bytes `free` bytes take, or None where they never run out.

    keep: how many stay (None: all), of which `present` are there now. The one being written comes on top.
    """
    if keep is not None and free >= (keep + 1 - min(present, keep)) * each:
        return None
    return free // each


def hours_until_full(
    free: int,
    each: int,
    hours_between_saves: float,
    *,
    keep: int | None = None,
    present: int = 0,
    other_bytes_per_hour: float = 0.0,
) -> float | None:
    """Hours until a save finds no room, or None where none ever does.

    other_bytes_per_hour: what else fills the disk (logs, caches, other runs); see saves_until_full for the rest.
    """
    fits = math.floor(free / (each + other_bytes_per_hour * hours_between_saves))
    if keep is not None and fits >= (growing := keep + 1 - min(present, keep)):
        # Retention has what it keeps and room for one more in turn: from then on only the others grow.
        if other_bytes_per_hour <= 0:
            return None
        fits = math.floor((free - growing * each) / (other_bytes_per_hour * hours_between_saves))
    return (fits + 1) * hours_between_saves


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
    if isinstance(model, PeftModel) or holds_adapter(model):
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
    """The file that safetensors writes: 8 bytes, a JSON header padded to 8, and the data back to back."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    length = len(json.dumps(header, separators=(",", ":")).encode())
    return 8 + length + -length % 8 + end


def optimizer_state(trainer: Any, live: bool) -> dict[str, Any]:
    return trainer.optimizer.state_dict() if live else state_after_a_step(coming_optimizer(trainer))


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

    from cogumi.patches.torch_internals import FakeTensorMode

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
    save_rng_and_scaler(trainer, os.fspath(scratch))
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


def trainer_state_bytes(trainer: Any) -> int:
    """trainer_state.json if it were written now."""
    return len(json.dumps(asdict(trainer.state), indent=2)) + 1


def log_bytes_per_step(trainer: Any) -> float:
    """How fast the log history grows: entries like those that are there, or like those that such a trainer makes."""
    history = trainer.state.log_history
    if history:
        entry = len(json.dumps({"log_history": history}, indent=2)) / len(history)
    else:
        kinds = [kind.__name__ for kind in type(trainer.args).__mro__]
        entry = next(size for kind, size in LOG_ENTRY_BYTES.items() if kind in kinds)
    return sum(entry / interval for interval in log_intervals(trainer))


def log_intervals(trainer: Any) -> list[float]:
    """Steps from one entry to the next, of the training logs and of the evaluations, as far as those go by steps."""
    args = trainer.args
    last = max(last_step_known(trainer), 1)
    kinds = ((args.logging_strategy, args.logging_steps), (args.eval_strategy, args.eval_steps))
    # Below 1 it is a share of the run.
    return [every if every >= 1 else max(every * last, 1) for strategy, every in kinds if strategy == "steps" and every]


def next_save_step(trainer: Any) -> int:
    """The step of the next save where saves go by steps; else that of the run's last, as far as it is known."""
    args, state = trainer.args, trainer.state
    last = last_step_known(trainer)
    every = math.ceil(args.save_steps if args.save_steps >= 1 else args.save_steps * last)
    if args.save_strategy != "steps" or every == 0:
        return max(last, state.global_step)
    following = (state.global_step // every + 1) * every
    return min(following, last) if last else following


def last_step_known(trainer: Any) -> int:
    """The run's last step, or 0: until training begins only max_steps says it."""
    return max(trainer.state.max_steps, trainer.args.max_steps, 0)
