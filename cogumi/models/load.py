"""Loading a base model and its tokenizer, with the mistakes people make turned into one line."""

import logging
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from cogumi.errors import UsageError
from cogumi.models.small_base import small_base_path

log = logging.getLogger(__name__)

SMALL_BASE = "cogumi:small-base"


def resolve_model(name: str, revision: str | None = None) -> str:
    """A directory or hub id that transformers can load. Raises UsageError when there is no such model."""
    if name == SMALL_BASE:
        return str(small_base_path())
    if Path(name).is_dir() and not (Path(name) / "config.json").exists():
        raise UsageError(
            f"model.name: {name} holds no config.json, so it is no model; an adapter goes into its base by `cogumi merge`"
        )
    try:
        AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(
            f"model.name: no model at {name!r}: {first} Give a directory, a hub id or {SMALL_BASE}"
        ) from None
    return name


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer, with a padding token. Raises UsageError when the model has none that could end a text."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(f"model.name: {name!r} has no tokenizer that can be loaded: {first}") from None
    if tokenizer.eos_token is None:
        raise UsageError(
            f"model.name: the tokenizer of {name!r} has no eos_token, so no completion could end; set one in its config"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        log.info("padding with the end token %r: the tokenizer has no pad token", tokenizer.eos_token)
    return tokenizer


def load_model(name: str, revision: str | None = None, dtype: str = "auto") -> PreTrainedModel:
    """The base model, on the GPU where there is one. `dtype` as in `model.dtype` of a config."""
    device = {"": 0} if torch.cuda.is_available() else None
    return AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=loaded_in(dtype), device_map=device)


def loaded_in(dtype: str) -> torch.dtype:
    """What `model.dtype` means on this machine."""
    if dtype == "auto":  # without a GPU float32 is as fast, and small updates do not drown in rounding
        on_gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        dtype = "bfloat16" if on_gpu else "float32"
    found: torch.dtype = getattr(torch, dtype)
    return found
