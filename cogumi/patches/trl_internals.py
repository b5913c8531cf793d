"""Private names of TRL, transformers and PEFT that cogumi uses, each once."""

import dataclasses
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import date, datetime, time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from cogumi.patches import replaced

# Methods of transformers' Trainer that cogumi replaces on one trainer.
SAVE_CHECKPOINT = "_save_checkpoint"
LOAD_BEST_MODEL = "_load_best_model"
LOAD_CHECKPOINT = "_load_from_checkpoint"
LOAD_OPTIMIZER = "_load_optimizer_and_scheduler"
LOAD_RNG_STATE = "_load_rng_state"
SAVE_RNG_STATE = "_save_rng_state"
RUN_EPOCH = "_run_epoch"
LOG_EVALUATE_SAVE = "_maybe_log_save_evaluate"
OUTPUT_DIRECTORY = "_get_output_dir"
PUSH_CHECKPOINT = "_push_from_checkpoint"
TRAIN_SAMPLER = "_get_train_sampler"
MOVE_MODEL = "_move_model_to_device"
GRAD_NORM = "_get_grad_norm"
# Methods of TRL's GRPOTrainer, and of unsloth's.
PREPARE_INPUTS = "_prepare_inputs"
MAKE_ROLLOUT = "_generate_and_score_completions"
GENERATE = "_generate"
GENERATE_TURN = "_generate_single_turn"
CALCULATE_REWARDS = "_calculate_rewards"
TOKEN_LOGPS = "_get_per_token_logps_and_entropies"
INNER_LOSS = "_compute_loss"
# The method of TRL's DPOTrainer that tokenizes.
PREPARE_DATASET = "_prepare_dataset"
# The method of transformers' models by which `generate` makes its stopping criteria.
STOPPING_CRITERIA = "_get_stopping_criteria"
# TRL's head in trl.trainer.utils, through which every SFT, DPO and GRPO loss is computed; the function of its module
# (trl/kernels/chunked_logprob.py) that multiplies two tiles; and, since 1.16, whether Triton or torch runs it.
HEAD = "_ChunkedLogProbFunction"
KERNEL_PRODUCT = "_addmm_fp32"
HEAD_USES_TRITON = "_use_triton"


# What a model's forward and its output call the key-value cache: in transformers 5.24, and before.
CACHE_NAMES = ("cache", "past_key_values")


def cache_argument(arguments: Mapping[str, Any]) -> Any:
    """Return the key-value cache among a forward pass's keyword arguments; None where there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def cache_name(model: Any) -> str:
    """Return what the model's forward calls its key-value cache."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[-1])


def losses_need_triton() -> bool:
    """Return whether TRL's losses would fail here: before 1.16 its head is a Triton kernel, which needs a GPU."""
    from trl.trainer import utils

    head: Any = getattr(utils, HEAD)
    if hasattr(utils, HEAD_USES_TRITON) or (head is not None and not head.__module__.startswith("trl.")):
        return False
    return head is None or not (torch.cuda.is_available() or torch.xpu.is_available())


def config_defaults(config: type) -> dict[str, Any]:
    """TRL's default of each field of its config class, or of one that unsloth generated, which derives from it."""
    original = next(base for base in config.__mro__ if base.__module__.startswith("trl."))
    made = {}
    for field in filter(lambda field: field.init, dataclasses.fields(original)):
        if field.default_factory is not dataclasses.MISSING:
            made[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            made[field.name] = field.default
    return made


def shard_without_gpu() -> None:
    """Have accelerate shard by FSDP2 over gloo on a CPU, where it ignores an FSDP config without a word (1.15)."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


def forget_evaluation(trainer: Any) -> None:
    """Before a training of several processes: have its model wrapped by DDP, though it was evaluated before.

    An evaluation marks the model as prepared (transformers 5.17, `evaluation_loop`; accelerate 1.15, `prepare_model`). `train`
    then leaves it as it is. Each process would take its own gradient, and nothing would say so.
    """
    accelerator, model = trainer.accelerator, trainer.model
    if trainer.model_wrapped is model and getattr(model, "_is_accelerate_prepared", False):
        model._is_accelerate_prepared = False
        accelerator._models = [prepared for prepared in accelerator._models if prepared is not model]


def wrap_method(trainer: Any, name: str, around: Callable[..., Any]) -> None:
    """From now on `around(original, *args, **kwargs)` answers the calls of one trainer's method."""
    original = getattr(trainer, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(trainer, name, wrapped)


def makes_rollouts(trainer: Any) -> bool:
    """Return whether it is a GRPOTrainer, TRL's or unsloth's."""
    return hasattr(trainer, MAKE_ROLLOUT)


def observe_rollouts(trainer: Any, subscriber: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Have `subscriber(make, inputs)` answer each rollout: `make(inputs)`, or its own. The last comes first."""
    wrap_method(trainer, MAKE_ROLLOUT, subscriber)


def rollout_mode(trainer: Any) -> str:
    """Under which of "train" and "eval" the trainer logs what it does now."""
    return "train" if trainer.model.training else "eval"


def logged_metrics(trainer: Any, mode: str) -> dict[str, list[float]]:
    """Return the values by name since the trainer last logged; TRL logs their means."""
    return trainer._metrics[mode]


def discard_metrics(trainer: Any) -> AbstractContextManager[None]:
    """Drop what the trainer logs within the block."""
    return replaced(trainer, {"_metrics": {mode: defaultdict(list) for mode in ("train", "eval")}})


def logged_completions(trainer: Any) -> dict[str, Any]:
    """prompt, completion and rewards by function of the last rollout, which TRL keeps for its table of completions."""
    return trainer._logs


def rollout_position(trainer: Any) -> tuple[int, Any]:
    """(micro-batches so far, the rollout in use, cut into micro-batches)."""
    return trainer._step, trainer._buffered_inputs


def set_rollout_position(trainer: Any, micro_batches: int, rollout: Any) -> None:
    trainer._step, trainer._buffered_inputs = micro_batches, rollout


def unlogged(trainer: Any) -> dict[str, Any]:
    """Return the step of the last logged row, the sum of the losses since, and TRL's metrics since."""
    metrics = {name: list(values) for name, values in getattr(trainer, "_metrics", {}).get("train", {}).items()}
    return {"step": trainer._globalstep_last_logged, "loss": trainer._tr_loss.clone(), "metrics": metrics}


def set_unlogged(trainer: Any, values: dict[str, Any]) -> None:
    trainer._globalstep_last_logged = values["step"]
    trainer._tr_loss.fill_(values["loss"])
    if hasattr(trainer, "_metrics"):
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update(values["metrics"])


def drop_gradients(trainer: Any) -> None:
    """Forget the micro-batches of a step that is not finished, also in the state that all Accelerators of a process share."""
    trainer.model_wrapped.zero_grad()
    trainer.accelerator.gradient_state._set_sync_gradients(True)


def tokenized_prompts(trainer: Any, prompts: list[Any]) -> list[list[int]]:
    """Return the ids of prompts as the trainer renders them, chat template and all."""
    return trainer._tokenize_prompts(prompts)[0]


def prepared_inputs(trainer: Any, inputs: Any) -> Any:
    """Return a collated batch on the trainer's device."""
    return trainer._prepare_inputs(inputs)


def record_commit(config: Any, name: str, revision: str | None) -> None:
    """Note in a config the hub's commit that it was read from, which transformers 5.24 does no longer."""
    if commit_of(config) is None and not Path(name).is_dir():
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        config._commit_hash = Path(cached).parent.name if isinstance(cached, str) else None


def commit_of(config: Any) -> str | None:
    """Return the commit of the hub that a model was loaded from; None for a directory."""
    return getattr(config, "_commit_hash", None)


def attention_of(config: Any) -> str:
    """Return the attention implementation that a model was loaded with; "" where it has none."""
    return getattr(config, "_attn_implementation", None) or ""


def experts_of(config: Any) -> str | None:
    """Return how a model that was loaded multiplies its stacked experts."""
    return getattr(config, "_experts_implementation", None)


def supported_attention(model: Any) -> tuple[frozenset[str], tuple[str, ...]]:
    """("sdpa", "flash" and "flex" where the model's class can, the hub's kernels that it names as compatible)."""
    names = {"sdpa": "_supports_sdpa", "flash": "_supports_flash_attn", "flex": "_supports_flex_attn"}
    kinds = frozenset(name for name, attribute in names.items() if getattr(model, attribute, False))
    return kinds, tuple(getattr(model, "_compatible_flash_implementations", None) or ())


def float32_modules(model: Any, dtype: torch.dtype) -> set[str]:
    """Return names of modules whose weights transformers keeps in float32 where it loads a model in `dtype`."""
    strict = model._keep_in_fp32_modules_strict or () if dtype != torch.float32 else ()
    return {*strict, *(model._keep_in_fp32_modules or () if dtype == torch.float16 else ())}


def template_day(day: date | None) -> AbstractContextManager[None]:
    """Have chat templates that print the day (`strftime_now`) print this one in the block; None for today."""
    from transformers.utils import chat_template_utils

    clock = SimpleNamespace(now=lambda: datetime.combine(day or date.today(), time()))
    return replaced(chat_template_utils, {} if day is None else {"datetime": clock})


def place_quantized_layers(quantizer: Any, model: Any) -> None:
    """Put the quantizer's layers where transformers would, before any weight is loaded."""
    quantizer._process_model_before_weight_loading(model, device_map=None)


def swaps_features(layer: Any) -> bool:
    """Return whether PEFT took a wrapped parameter's first axis for the inputs."""
    return bool(layer._did_swap_in_out_features)


@contextmanager
def targets_as_named() -> Iterator[None]:
    """Have PEFT take the names of an adapter as they are.

    It puts stacks of experts in the place of dense layers whose names transformers 4 had in its experts, too, and renames
    modules that have the names of now: those of Laguna's shared experts or UnlimitedOCR then load as nothing (0.21).
    """
    from peft.utils import transformers_weight_conversion as conversion

    names = {
        "convert_peft_config_for_transformers": lambda *_, **__: None,
        "convert_peft_adapter_state_dict_for_transformers": lambda adapter_state_dict, **_: adapter_state_dict,
    }
    with replaced(conversion, names):
        yield


def drop_ignored_keys(model: Any, loading_info: Any) -> None:
    """Take out of what transformers' loader found missing or unexpected what the model's class allows to be so."""
    model._adjust_missing_and_unexpected_keys(loading_info)


def load_gguf(path: Path, dtype: torch.dtype) -> Any:
    """Load a GGUF file into its transformers class, dequantized. Raises ValueError for an architecture that is not known there.

    transformers asks for the version of the package gguf, which llama.cpp's converter brings without one.
    """
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

    with replaced(modeling_gguf_pytorch_utils, {"is_gguf_available": lambda: find_spec("gguf") is not None}):
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
