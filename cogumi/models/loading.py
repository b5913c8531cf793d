"""Models and tokenizers: where they are, and how they are loaded."""

import copy
import logging
import os
import re
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from cogumi.core.checkpoint_faults import Fault, incomplete
from cogumi.core.errors import UsageError
from cogumi.core.formatting import first_line
from cogumi.models.base import RunBase, auto_class
from cogumi.models.quantization import (
    cast_unquantized,
    keep_4bit_unpacked,
    quantization_settings,
    quantizing_experts,
    refuse_misread,
    refuse_quantized_already,
    refuse_wrong_layers,
)
from cogumi.models.small_base import KINDS, PREFIX, random_base_path, small_base_path
from cogumi.patches import recurrent_kernels
from cogumi.patches.trl_internals import record_commit

log = logging.getLogger(__name__)

# What transformers, peft and TRL raise for a setting they refuse, a package that is not installed, or broken weights.
BUILD_REFUSALS = (ValueError, ImportError, OSError, RuntimeError, ArithmeticError, SafetensorError)
SMALL_BASE = "cogumi:small-base"
RANDOM_BASES = tuple(PREFIX + kind for kind in KINDS)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
TULU = Path(__file__).parents[1] / "data" / "tulu.jinja"


def read_base(name: str, revision: str | None = None) -> RunBase:
    """Find a model by its name and read its configuration. Raises UsageError if there is no such model."""
    if name == SMALL_BASE:
        name = str(small_base_path())
    elif name in RANDOM_BASES:
        name = str(random_base_path(name))
    elif name.startswith("cogumi:"):
        fix = f"there are {', '.join((SMALL_BASE, *RANDOM_BASES))}"
        raise UsageError(f"{name} is not known", key="model.name", fix=fix)
    if Path(name).is_dir() and not (Path(name) / "config.json").exists():
        fix = "an adapter goes into its base by `cogumi merge`"
        raise UsageError(f"{name} holds no config.json, so it is no model", key="model.name", fix=fix)
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        message, fix = f"no model at {name!r}", f"give a directory that is there, a hub id or {SMALL_BASE}"
        if Path(name).is_dir():
            message, fix = f"transformers {version('transformers')} cannot read {name}/config.json", ""
        raise UsageError(f"{message}: {first_line(error)}", key="model.name", fix=fix) from None
    record_commit(config, name, revision)
    return RunBase(name, revision, config)


def load_tokenizer(model: RunBase | str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a base or a directory, with a padding token. Raises UsageError where none could end a text."""
    name, options = str(model), {}
    if isinstance(model, RunBase):
        name, options = model.name, {"revision": model.revision, "config": model.config}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        message, fix = f"{name!r} has no tokenizer that can be loaded: {first_line(error)}", ""
        if Path(name).is_dir() and not any((Path(name) / file).exists() for file in TOKENIZER_FILES):
            message = f"{name} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}"
            fix = f"copy the tokenizer's files of the model there, or tokenizer.save_pretrained({name!r})"
        raise UsageError(message, key="model.name", fix=fix) from None
    if tokenizer.eos_token is None:
        message = f"the tokenizer of {name!r} has no eos_token, so no completion could end"
        raise UsageError(message, key="model.name", fix="set one in its config")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        log.info("padding with the end token %r: the tokenizer has no pad token", tokenizer.eos_token)
    return tokenizer


def load_model(
    base: RunBase | str, dtype: str = "auto", quantization: dict[str, Any] | None = None, attention: str | None = None
) -> PreTrainedModel:
    """Load the base model, on the GPU if there is one. `dtype`, `quantization` and `attention` are those of `model:`.

    Raises UsageError for a base that cannot be quantized, that would not train on what was quantized, or of which a part
    would be random.
    """
    loading: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    base = base if isinstance(base, RunBase) else read_base(base)
    name, config = base.name, base.config
    if quantization is not None:
        refuse_quantized_already(name, config)
        # Only then: None would take away what the config of a quantized checkpoint says.
        loading["quantization_config"] = quantization_settings(quantization, resolve_dtype(dtype))
    # FSDP: the first process reads the model, in main memory, and sends it to the others.
    is_sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    with quantizing_experts(quantization) if quantization is not None else nullcontext():
        model, report = auto_class(config).from_pretrained(
            name,
            config=copy.deepcopy(config),
            revision=base.revision,
            dtype=resolve_dtype(dtype),
            device_map=None if is_sharded or not torch.cuda.is_available() else {"": torch.cuda.current_device()},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, in one line
            **loading,
        )
    faults = [Fault(key, "", "of the model") for key in sorted(report["missing_keys"])]
    faults += [Fault(key, str(list(stored)), str(list(other))) for key, stored, other in report["mismatched_keys"]]
    if faults:
        raise incomplete(name, type(model).__name__, faults, key="model.name")
    loaded = model.state_dict().keys() if report["unexpected_keys"] else ()
    cut = [key for key in sorted(report["unexpected_keys"]) if re.sub(r"\.\d+\.", ".0.", key, count=1) in loaded]
    if cut:
        message = "%d tensors of %s are not loaded, such as %s: has its config.json fewer layers than it?"
        log.warning(message, len(cut), name, cut[0])
    if type(model.config) is not type(config):
        message = "%s is loaded as %s, the language model alone; a merge keeps the rest of the checkpoint as it is"
        log.info(message, name, type(model).__name__)
    cast_unquantized(model, resolve_dtype(dtype))
    recurrent_kernels.apply(model)
    if quantization is not None:
        refuse_wrong_layers(model)
    if getattr(model, "is_loaded_in_4bit", False):
        refuse_misread(model)
        keep_4bit_unpacked(model)
    return model


def resolve_dtype(dtype: str) -> torch.dtype:
    if dtype == "auto":  # without a GPU float32 is as fast, and small updates do not drown in rounding
        on_gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        dtype = "bfloat16" if on_gpu else "float32"
    return getattr(torch, dtype)


def use_chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Set the template of `train.chat_template_path`: a .jinja file, another model's, or `cogumi:tulu`.

    The other model is a directory or a hub id. Raises UsageError where there is no template, or where another model's
    writes control tokens that this vocabulary lacks. An adapter does not train new rows of embeddings.
    """
    tokens: list[str] = []
    path = TULU if name == "cogumi:tulu" else Path(name)
    if path.is_file():
        template = path.read_text(encoding="utf-8")
    else:
        try:
            other: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            message = f"{name} is no .jinja file, and no model with a tokenizer: {first_line(error)}"
            raise UsageError(message, key="train.chat_template_path", fix="there is cogumi:tulu") from None
        template, tokens = other.chat_template, list(other.get_added_vocab())
        if not isinstance(template, str):
            raise UsageError(f"the tokenizer of {name} has no chat template", key="train.chat_template_path")
    missing = [token for token in tokens if token in template and token not in tokenizer.get_vocab()]
    if missing:
        lacking = f"which {tokenizer.name_or_path} has no tokens for"
        message = f"the template of {name} writes {', '.join(missing)}, {lacking}"
        fix = "take one without control tokens, such as cogumi:tulu, or that model itself"
        raise UsageError(message, key="train.chat_template_path", fix=fix)
    tokenizer.chat_template = template


def use_end_token(tokenizer: PreTrainedTokenizerBase, token: str) -> None:
    """Let `train.eos_token` end a turn. Raises UsageError where the vocabulary has no such token."""
    if token not in tokenizer.get_vocab():
        message = f"{token!r} is not in the vocabulary of {tokenizer.name_or_path}"
        raise UsageError(message, key="train.eos_token", fix="name one that is")
    tokenizer.eos_token = token
