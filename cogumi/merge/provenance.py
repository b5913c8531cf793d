"""Which base an adapter was trained on, at which commit, and whether it was quantized: written beside the adapter.

adapter_config.json has the base's name and a `revision` that is null unless somebody sets it, and says nothing of
quantization. What was not written down while the model was in memory can only be guessed at afterwards.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.run_directory import write_json
from cogumi.patches.trl_internals import commit_of

BASE_RECORD_NAME = "cogumi-base.json"
FORMAT = 1
SAMPLED_BLOCKS, BLOCK_BYTES = 16, 1 << 16  # of each file, spread from its first byte to its last


@dataclass(frozen=True)
class Quantization:
    """How the base was quantized while the adapter was trained.

    method: transformers' word for it (bitsandbytes, gptq, fp8). bits: None where the method does not say. type: nf4 or
    fp4 for bitsandbytes' 4 bit. double: whether its block scales were quantized too.
    """

    method: str
    bits: int | None = None
    type: str | None = None
    double: bool | None = None


@dataclass(frozen=True)
class BaseRecord:
    """The base as it was loaded.

    name: directory or hub id. commit: of the hub's repository, None for a directory outside the hub's cache. revision:
    what was asked for. dtype: of the weights that were not quantized, as in "bfloat16". weights: `weights_sample` of a
    directory without a commit; None for others, and in records of earlier versions.
    """

    name: str
    commit: str | None
    revision: str | None
    quantization: Quantization | None
    dtype: str
    weights: str | None = None


def record_base(adapter: Path, model: Any, revision: str | None = None) -> BaseRecord:
    """Write cogumi-base.json into the adapter's directory, from the model that was trained (PEFT's or the base itself).

    revision: what the model was loaded with, a branch or tag; the commit it was then is in the model's config. Raises
    ValueError when the model does not know what it was loaded from, as one that was built from a config does not.
    """
    config = model.config
    if not config.name_or_path:
        raise ValueError("the model does not know its base: it was not loaded with from_pretrained")
    dtype = str(config.dtype or model.dtype).removeprefix("torch.")
    name, commit = config.name_or_path, commit_of(config)
    weights = weights_sample(name) if commit is None else None
    record = BaseRecord(name, commit, revision, quantization_of(config), dtype, weights)
    write_json(adapter / BASE_RECORD_NAME, {"format": FORMAT, **asdict(record)})
    return record


def weights_sample(name: str) -> str | None:
    """SHA-256 of what tells one model's safetensors files from another's; None where there are none in a directory.

    Of each file: name, size, header, and 16 blocks of 64 KiB spread over it, so that the largest model takes a moment.
    A model that was trained further differs everywhere and has another sample; a few altered elements can be missed.
    """
    files = sorted(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            length = file.read(8)
            digest.update(length + file.read(int.from_bytes(length, "little")))
            last = max(0, size - BLOCK_BYTES)
            for block in range(SAMPLED_BLOCKS):
                file.seek(last * block // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest() if files else None


def quantization_of(config: Any) -> Quantization | None:
    """From a loaded model's config, where transformers leaves the quantization that it applied or found."""
    found = getattr(config, "quantization_config", None)  # the attribute is absent, not None, on a plain model
    if found is None:
        return None
    entries = found if isinstance(found, dict) else found.to_dict()
    method = entries["quant_method"]
    name = str(getattr(method, "value", method))
    if entries.get("load_in_4bit"):
        return Quantization(name, 4, entries["bnb_4bit_quant_type"], entries["bnb_4bit_use_double_quant"])
    return Quantization(name, 8 if entries.get("load_in_8bit") else entries.get("bits"))


def read_base(adapter: Path) -> BaseRecord | None:
    """The record beside an adapter, or None when there is none, as for adapters that cogumi did not train.

    Raises UsageError when the record is damaged or of a format that this version does not know.
    """
    path = adapter / BASE_RECORD_NAME
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(path, f"is not valid JSON ({error})") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise damaged(path, f"has format {found!r} where this version knows {FORMAT}")
    name, commit, revision, dtype = (entry(path, value, key, str) for key in ("name", "commit", "revision", "dtype"))
    if not name or not dtype:
        raise damaged(path, f"has no {'dtype' if name else 'name'}")
    weights = entry(path, value, "weights", str)
    return BaseRecord(name, commit, revision, read_quantization(path, value.get("quantization")), dtype, weights)


def read_quantization(path: Path, value: Any) -> Quantization | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("method"), str):
        raise damaged(path, "has a quantization without a method")
    kinds = {"bits": int, "type": str, "double": bool}
    return Quantization(value["method"], **{key: entry(path, value, key, kind) for key, kind in kinds.items()})


def entry(path: Path, value: dict[str, Any], key: str, kind: type) -> Any:
    """One entry, of the kind given or null."""
    found = value.get(key)
    if found is not None and type(found) is not kind:
        raise damaged(path, f"has {key}={found!r}, which is no {kind.__name__}")
    return found


def damaged(path: Path, what: str) -> UsageError:
    return UsageError(f"{path} {what}", fix="delete it and pass base=<the model this adapter was trained on>")
