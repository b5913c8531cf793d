"""Read the quantization of a base from its configuration, and name its full-precision model."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import constants

# What publishers append to the name of a quantized copy, as seen in real names: Qwen2.5-7B-Instruct-GPTQ-Int4,
# Meta-Llama-3.1-8B-Instruct-AWQ-INT4, Llama-3.2-1B-Instruct-FP8-Dynamic, Qwen3-4B-Instruct-2507-FP8,
# Meta-Llama-3.1-8B-Instruct-quantized.w4a16, Qwen3-8B-unsloth-bnb-4bit.
QUANTIZED_SUFFIX = re.compile(
    r"((-unsloth)?-bnb-[48]bit|-bnb-nf4|-(gptq|awq|fp8|nvfp4|mxfp4)([-_.](int|w)?\d+(bit|a\d+)?|-block|-dynamic)*"
    r"|[-.](quantized\.)?w\d+a\d+|-int[48]|-[48]bit)+$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Quantization:
    """Quantization of a base. method: transformers' quant_method, such as bitsandbytes, gptq or fp8.

    type (nf4, fp4) and double are for bitsandbytes' 4 bits only. double: the block scales were quantized, too.
    """

    method: str
    bits: int | None = None
    type: str | None = None
    double: bool | None = None

    def __str__(self) -> str:
        return self.type or (f"{self.method} {self.bits}-bit" if self.bits else self.method)


def quantization_of(config: Any) -> Quantization | None:
    """Read the quantization that transformers applied or found from a loaded model's config."""
    settings = getattr(config, "quantization_config", None)  # the attribute is absent, not None, on a plain model
    if settings is None:
        return None
    entries = settings if isinstance(settings, dict) else settings.to_dict()
    method = entries["quant_method"]
    name = str(getattr(method, "value", method))
    if entries.get("load_in_4bit"):
        return Quantization(name, 4, entries["bnb_4bit_quant_type"], entries["bnb_4bit_use_double_quant"])
    return Quantization(name, 8 if entries.get("load_in_8bit") else entries.get("bits"))


def is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def full_precision_names(name: str, quant_method: str | None) -> tuple[str, ...]:
    """Return likely names of the full-precision model of a quantized base, likeliest first.

    They follow the usual names of quantized copies, and include models of that name by any owner in the hub's cache.
    quant_method: result of `quantization`.
    """
    directory = PurePath(name)
    stem = QUANTIZED_SUFFIX.sub("", directory.name)
    names: list[str] = []
    # Published in 4 or 8 bits only: the 16-bit weights are a conversion by others, by custom named -BF16.
    if stem.lower().startswith("gpt-oss") or (stem == directory.name and quant_method in ("fp8", "mxfp4")):
        names += [f"unsloth/{stem}-BF16", str(directory.with_name(f"{stem}-BF16"))]
    if stem != directory.name:
        cached = sorted(Path(constants.HF_HUB_CACHE).glob(f"models--*--{stem}"))
        owners = [path.name.split("--", 2)[1] for path in cached]
        names += [str(directory.with_name(stem)), *(f"{owner}/{stem}" for owner in owners)]
    return tuple(dict.fromkeys(names))
