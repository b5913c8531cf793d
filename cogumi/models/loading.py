"""Models and tokenizers: where they are, how they are loaded, and models of shapes alone."""

import copy
import functools
import importlib.util
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cogumi.core.errors import UsageError
from cogumi.core.formatting import pip
from cogumi.merge.provenance import quantization_of
from cogumi.models.small_base import KINDS, PREFIX, random_base_path, small_base_path


def meta_model(config: Any) -> Any:
    """The unquantized model of a config, of the class it names, on the meta device: names and shapes, no memory."""
    import torch
    import transformers

    config = copy.deepcopy(config)  # building one writes into it
    known = getattr(transformers, (config.architectures or [""])[0], None)
    try:
        with torch.device("meta"):
            return known(config) if known is not None else transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:  # AutoModel has no class for it
        raise UsageError(f"the merged size of a {config.model_type!r} model is not known: {error}") from error


# -------------------------------------------------------------------------------------------------------------- loading


log = logging.getLogger(__name__)

SMALL_BASE = "cogumi:small-base"
# What QLoRA is (https://arxiv.org/abs/2305.14314, section 3). transformers' own defaults are fp4, quantized once.
QLORA = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def resolve_model(name: str, revision: str | None = None) -> str:
    """A directory or hub id that transformers can load. Raises UsageError when there is no such model."""
    if name == SMALL_BASE:
        return str(small_base_path())
    if name.startswith(PREFIX):
        kind = name.removeprefix(PREFIX)
        if kind not in KINDS:
            raise UsageError(
                f"{name} is not known", key="model.name", fix=f"there are {', '.join(PREFIX + each for each in KINDS)}"
            )
        return str(random_base_path(name))
    if name.startswith(("/", "./", "../", "~")) and not Path(name).is_dir():
        raise UsageError(
            f"{name}: no such directory", key="model.name", fix=f"give one that is there, a hub id or {SMALL_BASE}"
        )
    if Path(name).is_dir() and not (Path(name) / "config.json").exists():
        raise UsageError(
            f"{name} holds no config.json, so it is no model",
            key="model.name",
            fix="an adapter goes into its base by `cogumi merge`",
        )
    try:
        AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise UsageError(why_not(name, str(error).splitlines()[0]), key="model.name") from None
    return name


def why_not(name: str, said: str) -> str:
    """What is wrong with a model that transformers finds none at, or cannot read, in one line."""
    if Path(name).is_dir():
        return f"{name}: transformers {version('transformers')} cannot read its config.json: {said}"
    if name.count("/") > 1 or name.startswith("runs/"):
        return (
            f"no model at {name!r}: no such directory; is it what an earlier run is to leave? Then train that one first"
        )
    return f"no model at {name!r}: {said} Give a directory, a hub id or {SMALL_BASE}"


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer, with a padding token. Raises UsageError when the model has none that could end a text."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0].removesuffix(" from one of: ")
        raise UsageError(f"{name!r} has no tokenizer that can be loaded: {first}", key="model.name") from None
    if tokenizer.eos_token is None:
        raise UsageError(
            f"the tokenizer of {name!r} has no eos_token, so no completion could end",
            key="model.name",
            fix="set one in its config",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        log.info("padding with the end token %r: the tokenizer has no pad token", tokenizer.eos_token)
    return tokenizer


def load_model(
    name: str,
    revision: str | None = None,
    dtype: str = "auto",
    quantization: dict[str, Any] | None = None,
    attention: str | None = None,
) -> PreTrainedModel:
    """The base model, on the GPU where there is one. `dtype`, `quantization` and `attention` as in `model:` of a config.

    Raises UsageError for a base that cannot be quantized, or that would not train on what was quantized.
    """
    loading: dict[str, Any] = {"dtype": loaded_in(dtype), "device_map": {"": 0} if torch.cuda.is_available() else None}
    if attention is not None:
        loading["attn_implementation"] = attention
    if quantization is not None:
        refuse_quantized_already(name, AutoConfig.from_pretrained(name, revision=revision))
        if importlib.util.find_spec("bitsandbytes") is None:
            install = pip("install bitsandbytes")
            raise UsageError("bitsandbytes is not installed", key="model.quantization_config", fix=f"run: {install}")
        # Only then: None would take away what the config of a quantized checkpoint says.
        loading["quantization_config"] = quantization_settings(quantization, dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, revision=revision, **loading)
    if quantization is not None:
        refuse_wrong_layers(model)
    if getattr(model, "is_loaded_in_4bit", False):
        refuse_misread(model)
        train_on_what_was_loaded(model)
    return model


def quantization_settings(quantization: dict[str, Any], dtype: str) -> BitsAndBytesConfig:
    """transformers' object for `model.quantization_config` over QLoRA's defaults; `dtype` is `model.dtype`."""
    defaults = {**QLORA, "bnb_4bit_compute_dtype": loaded_in(dtype)} if quantization.get("load_in_4bit") else {}
    return BitsAndBytesConfig(**defaults | quantization)


def refuse_quantized_already(name: str, config: PreTrainedConfig) -> None:
    """Raise UsageError for a base whose weights on disk are quantized: transformers keeps them as they are."""
    found = quantization_of(config)
    if found is not None:
        raise UsageError(
            f"{name} is quantized already ({found.type or found.method})",
            key="model.quantization_config",
            fix=("drop model.quantization_config to train on that, or set model.name to the full-precision model"),
        )


def quantized_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """bitsandbytes' linear layers, which are subclasses of torch's, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and type(module).__module__.startswith("bitsandbytes")
    }


def refuse_wrong_layers(model: PreTrainedModel) -> None:
    """Raise UsageError where nothing was quantized, or the LM head was."""
    layers = quantized_layers(model)
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no linear layers that bitsandbytes could quantize "
            "(transformers' experts are none)",
            key="model.quantization_config",
            fix="drop it",
        )
    head = next((name for name, module in layers.items() if module is model.get_output_embeddings()), None)
    if head is not None:
        raise UsageError(
            "model.quantization_config.llm_int8_skip_modules replaces transformers' own list, so "
            f"{head} would be quantized, which TRL's losses read as it is",
            fix=f"add {head} to the list",
        )


def refuse_misread(model: PreTrainedModel) -> None:
    """Raise UsageError for 4-bit weights that bitsandbytes misreads on this CPU."""
    layers = quantized_layers(model) if model.device.type == "cpu" else {}
    misread = [name for name, module in layers.items() if not reads_rows(module.in_features)]
    if not misread:
        return
    quantizer: Any = model.hf_quantizer
    if quantizer.pre_quantized:
        fix = "run on a GPU, or set model.name to the full-precision model"
    else:
        skipped = model.config.quantization_config.llm_int8_skip_modules or ["lm_head"]
        skip = ", ".join(dict.fromkeys([*skipped, *(name.rpartition(".")[2] for name in misread)]))
        fix = f"set model.quantization_config.llm_int8_skip_modules: [{skip}], or run on a GPU"
    raise UsageError(
        f"bitsandbytes {version('bitsandbytes')} misreads 4-bit weights of "
        f"{layers[misread[0]].in_features} columns on this CPU, as {misread[0]} has ({len(misread)} "
        "layers in all)",
        key="model",
        fix=fix,
    )


@functools.cache
def reads_rows(columns: int) -> bool:
    """Whether bitsandbytes gets back, on this CPU, 4-bit weights of so many columns.

    0.50.2 counts whole blocks of 64 to a row where a CPU has AVX512, and scales what is in the others by a neighbour's:
    an error of 0.25 of the weights where 4 bits make 0.09. Here each block is one number, which it would get back exactly.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = (torch.arange(4 * columns) // 64 + 1.0).view(4, columns)
    return torch.equal(dequantize_4bit(*quantize_4bit(weights, blocksize=64, quant_type="nf4")), weights)


def train_on_what_was_loaded(model: torch.nn.Module) -> int:
    """Keep bitsandbytes from repacking 4-bit weights at the first forward without gradients, as a rollout is.

    It does on CPUs with AVX512-BF16, and the backward pass then finds no gradient for what came before the layer. Returns
    of how many layers it was kept.
    """
    repacking = [module for module in model.modules() if getattr(module, "support_avx512bf16_for_cpu", False)]
    for module in repacking:
        vars(module)["support_avx512bf16_for_cpu"] = False
    return len(repacking)


def loaded_in(dtype: str) -> torch.dtype:
    """What `model.dtype` means on this machine."""
    if dtype == "auto":  # without a GPU float32 is as fast, and small updates do not drown in rounding
        on_gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        dtype = "bfloat16" if on_gpu else "float32"
    found: torch.dtype = getattr(torch, dtype)
    return found
