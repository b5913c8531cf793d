"""Models and tokenizers: where they are, how they are loaded, and models of shapes alone."""

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
from cogumi.core.formatting import pip_command
from cogumi.merge.adapter_files import quantization_of
from cogumi.merge.parameter_map import meta_model as meta_model
from cogumi.models.small_base import KINDS, PREFIX, random_base_path, small_base_path

log = logging.getLogger(__name__)

SMALL_BASE = "cogumi:small-base"
RANDOM_BASES = tuple(PREFIX + kind for kind in KINDS)
TULU = Path(__file__).parents[1] / "data" / "tulu.jinja"
# What QLoRA is (https://arxiv.org/abs/2305.14314, section 3). transformers' own defaults are fp4, quantized once.
QLORA = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def resolve_model(name: str, revision: str | None = None) -> str:
    """A directory or hub id that transformers can load. Raises UsageError when there is no such model."""
    if name == SMALL_BASE:
        return str(small_base_path())
    if name in RANDOM_BASES:
        return str(random_base_path(name))
    if name.startswith("cogumi:"):
        fix = f"there are {', '.join((SMALL_BASE, *RANDOM_BASES))}"
        raise UsageError(f"{name} is not known", key="model.name", fix=fix)
    if Path(name).is_dir() and not (Path(name) / "config.json").exists():
        fix = "an adapter goes into its base by `cogumi merge`"
        raise UsageError(f"{name} holds no config.json, so it is no model", key="model.name", fix=fix)
    try:
        AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        what, fix = f"no model at {name!r}", f"give a directory that is there, a hub id or {SMALL_BASE}"
        if Path(name).is_dir():
            what, fix = f"transformers {version('transformers')} cannot read {name}/config.json", ""
        raise UsageError(f"{what}: {first_line(error)}", key="model.name", fix=fix) from None
    return name


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer, with a padding token. Raises UsageError when the model has none that could end a text."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        what = f"{name!r} has no tokenizer that can be loaded: {first_line(error)}"
        raise UsageError(what, key="model.name") from None
    if tokenizer.eos_token is None:
        what = f"the tokenizer of {name!r} has no eos_token, so no completion could end"
        raise UsageError(what, key="model.name", fix="set one in its config")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        log.info("padding with the end token %r: the tokenizer has no pad token", tokenizer.eos_token)
    return tokenizer


def first_line(error: Exception) -> str:
    """Of transformers' errors, which list all that they know below."""
    return str(error).strip().partition("\n")[0]


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
    loading: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if quantization is not None:
        refuse_quantized_already(name, AutoConfig.from_pretrained(name, revision=revision))
        if importlib.util.find_spec("bitsandbytes") is None:
            install = pip_command("install bitsandbytes")
            raise UsageError("bitsandbytes is not installed", key="model.quantization_config", fix=f"run: {install}")
        # Only then: None would take away what the config of a quantized checkpoint says.
        loading["quantization_config"] = quantization_settings(quantization, dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        name,
        revision=revision,
        dtype=resolve_dtype(dtype),
        device_map={"": 0} if torch.cuda.is_available() else None,
        **loading,
    )
    if quantization is not None:
        refuse_wrong_layers(model)
    if getattr(model, "is_loaded_in_4bit", False):
        refuse_misread(model)
        keep_4bit_unpacked(model)
    return model


def quantization_settings(quantization: dict[str, Any], dtype: str) -> BitsAndBytesConfig:
    """transformers' object for `model.quantization_config` over QLoRA's defaults; `dtype` is `model.dtype`."""
    defaults = {**QLORA, "bnb_4bit_compute_dtype": resolve_dtype(dtype)} if quantization.get("load_in_4bit") else {}
    return BitsAndBytesConfig(**defaults | quantization)


def refuse_quantized_already(name: str, config: PreTrainedConfig) -> None:
    """Raise UsageError for a base whose weights on disk are quantized: transformers keeps them as they are."""
    found = quantization_of(config)
    if found is not None:
        fix = "drop model.quantization_config to train on that, or set model.name to the full-precision model"
        what = f"{name} is quantized already ({found})"
        raise UsageError(what, key="model.quantization_config", fix=fix)


def quantized_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """bitsandbytes' linear layers by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and type(module).__module__.startswith("bitsandbytes")
    }


def refuse_wrong_layers(model: PreTrainedModel) -> None:
    """Raise UsageError where nothing was quantized, or the LM head was."""
    layers = quantized_layers(model)
    if not layers:
        what = f"{type(model).__name__} has no linear layers that bitsandbytes could quantize (stacked experts are not)"
        raise UsageError(what, key="model.quantization_config", fix="drop it")
    for name, module in layers.items():
        if module is model.get_output_embeddings():
            what = f"it replaces transformers' own list, so {name} would be quantized, which TRL's losses read as it is"
            key = "model.quantization_config.llm_int8_skip_modules"
            raise UsageError(what, key=key, fix=f"add {name} to the list")


def refuse_misread(model: PreTrainedModel) -> None:
    """Raise UsageError for 4-bit weights that bitsandbytes misreads on this CPU."""
    layers = quantized_layers(model) if model.device.type == "cpu" else {}
    misread = [name for name, module in layers.items() if not reads_4bit_rows(module.in_features)]
    if misread:
        leaves = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in misread))
        what = f"bitsandbytes {version('bitsandbytes')} misreads the 4-bit weights of {misread[0]} on this CPU"
        skip = f"model.quantization_config.llm_int8_skip_modules: [lm_head, {leaves}]"
        fix = f"run on a GPU, or set model.name to the full-precision model with {skip}"
        raise UsageError(f"{what} ({len(misread)} layers in all)", key="model", fix=fix)


@functools.cache
def reads_4bit_rows(columns: int) -> bool:
    """Whether bitsandbytes gets back, on this CPU, 4-bit weights of so many columns. 0.50.2 counts whole blocks of 64
    to a row where a CPU has AVX512, and scales the others by a neighbour's. Here each block is one number, which it
    would get back exactly."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = (torch.arange(4 * columns) // 64 + 1.0).view(4, columns)
    return torch.equal(dequantize_4bit(*quantize_4bit(weights, blocksize=64, quant_type="nf4")), weights)


def keep_4bit_unpacked(model: torch.nn.Module) -> int:
    """Keep bitsandbytes from repacking 4-bit weights at the first forward without gradients, on CPUs with AVX512-BF16.
    Repacked, they pass no gradient to what came before the layer. Returns how many layers it changed."""
    repacking = [module for module in model.modules() if getattr(module, "support_avx512bf16_for_cpu", False)]
    for module in repacking:
        vars(module)["support_avx512bf16_for_cpu"] = False
    return len(repacking)


def resolve_dtype(dtype: str) -> torch.dtype:
    """What `model.dtype` means on this machine."""
    if dtype == "auto":  # without a GPU float32 is as fast, and small updates do not drown in rounding
        on_gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        dtype = "bfloat16" if on_gpu else "float32"
    found: torch.dtype = getattr(torch, dtype)
    return found


def use_chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Set the template of `train.chat_template_path`: a .jinja file, another model's, or `cogumi:tulu`.
    The other model is a directory or a hub id. Raises UsageError where there is no template, or where another model's
    writes control tokens that this vocabulary lacks. An adapter does not train new rows of embeddings."""
    tokens: list[str] = []
    path = TULU if name == "cogumi:tulu" else Path(name)
    if path.is_file():
        template = path.read_text(encoding="utf-8")
    else:
        try:
            other: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            what = f"{name} is no .jinja file, and no model with a tokenizer: {first_line(error)}"
            raise UsageError(what, key="train.chat_template_path", fix="there is cogumi:tulu") from None
        template, tokens = other.chat_template, list(other.get_added_vocab())
        if not isinstance(template, str):
            raise UsageError(f"the tokenizer of {name} has no chat template", key="train.chat_template_path")
    missing = [token for token in tokens if token in template and token not in tokenizer.get_vocab()]
    if missing:
        raise UsageError(
            f"the template of {name} writes {', '.join(missing)}, which {tokenizer.name_or_path} has no tokens for",
            key="train.chat_template_path",
            fix="take one without control tokens, such as cogumi:tulu, or that model itself",
        )
    tokenizer.chat_template = template


def use_end_token(tokenizer: PreTrainedTokenizerBase, token: str) -> None:
    """Let `train.eos_token` end a turn. Raises UsageError where the vocabulary has no such token."""
    if token not in tokenizer.get_vocab():
        what = f"{token!r} is not in the vocabulary of {tokenizer.name_or_path}"
        raise UsageError(what, key="train.eos_token", fix="name one that is")
    tokenizer.eos_token = token
