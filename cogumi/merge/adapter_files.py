"""Which adapter: found, read and judged fit for an exact merge before anything else happens."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import FLOAT_DTYPES, Shard, Span, read_shard
from cogumi.merge.base_proof import BaseProof
from cogumi.merge.quantized import Bnb4bit, Bnb8bit

ADAPTER_WEIGHTS = "adapter_model.safetensors"

# adapter_config.json entries of the kinds that are merged, or that do not change what a trained adapter computes. Any other
# entry that is set to something is refused: a LoRA variant this module has never heard of must not merge as plain LoRA.
KNOWN_ENTRIES = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "target_parameters",
    "task_type",
    "trainable_token_indices",
    "use_dora",
    "use_rslora",
}
# Initialisations that leave the base weights as they are and train an ordinary LoRA pair.
PLAIN_INITS = (True, False, "gaussian", "orthogonal")
REFUSED_ENTRIES = {
    "alora_invocation_tokens": "activated LoRA applies to some positions only, which no merged weight can express",
    "layer_replication": "layer_replication changes the number of layers",
}


@dataclass(frozen=True)
class Adapter:
    """A PEFT LoRA adapter whose configuration is of a kind that can be merged; `spans` are its tensors on disk."""

    path: Path
    config: dict[str, Any]
    spans: tuple[Span, ...]

    @property
    def weights(self) -> Path:
        return self.path / ADAPTER_WEIGHTS


@dataclass(frozen=True)
class Base:
    """A model on disk. `name` is what it was asked for as; `indexed` says if it has an index.

    quantized: stored tensors that are decoded before the update (base_mode="dequant"); empty otherwise. original: what
    such a model was quantized from, where that is at hand. trained_on: the
    quantized model that the adapter was trained on, where it is another one and at hand; proof: that this is what it was
    quantized from. trained_in: how the base was quantized in memory while the adapter was trained ("nf4").
    """

    name: str
    path: Path
    commit: str | None
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    indexed: bool
    quantized: dict[str, Bnb4bit | Bnb8bit] = field(default_factory=dict)
    original: "Base | None" = None
    trained_on: "Base | None" = None
    proof: BaseProof | None = None
    trained_in: str | None = None

    @property
    def tensors(self) -> dict[str, Span]:
        """The tensors of the model by name; quantized ones with the shape and dtype that they decode to."""
        auxiliary = {name for tensor in self.quantized.values() for name in tensor.auxiliary}
        spans = {span.name: span for shard in self.shards for span in shard.spans if span.name not in auxiliary}
        for name, tensor in self.quantized.items():
            dtype = next(label for label, known in FLOAT_DTYPES.items() if known == tensor.dtype)
            spans[name] = replace(spans[name], shape=tensor.shape, dtype=dtype)
        return spans


def read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} ({what}) is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} ({what}) should hold a JSON object, not a {type(value).__name__}")
    return value


def resolve_adapter(path: Path) -> Adapter:
    """Read an adapter directory. Raises UsageError when it is missing, damaged, untrained, or of a refused kind."""
    if not path.is_dir():
        raise UsageError(
            f"adapter {path} is not a directory", fix="pass the directory that PEFT's save_pretrained wrote"
        )
    if not (path / "adapter_config.json").is_file():
        raise UsageError(
            f"adapter {path} has no adapter_config.json", fix="pass the directory PEFT's save_pretrained wrote"
        )
    config = read_json(path / "adapter_config.json", "adapter config")
    refuse_unsupported(path, config)
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise UsageError(
            f"adapter {path} has no {ADAPTER_WEIGHTS}", fix="save it again with save_pretrained (safetensors)"
        )
    spans = read_shard(path / ADAPTER_WEIGHTS).spans
    refuse_broken_names(path, spans)
    refuse_empty_or_broken(path, spans)
    return Adapter(path, config, spans)


def refuse_unsupported(path: Path, config: dict[str, Any]) -> None:
    """Raise UsageError unless the config describes LoRA of a kind that is known here: anything else would merge wrongly."""

    def refuse(reason: str) -> UsageError:
        return UsageError(f"adapter {path} cannot be merged yet: {reason}", fix="load it with PEFT on the base instead")

    if config.get("peft_type") != "LORA":
        raise refuse(f"it is a {config.get('peft_type')} adapter and only LORA is supported")
    init = config.get("init_lora_weights", True)
    if init not in PLAIN_INITS:
        raise refuse(
            f"init_lora_weights={init!r}: only adapters started from {PLAIN_INITS} are proven to belong to an "
            "unaltered base (PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it when training starts)"
        )
    for entry, reason in REFUSED_ENTRIES.items():
        if config.get(entry):
            raise refuse(reason)
    for entry in sorted(config.keys() - KNOWN_ENTRIES):
        if config[entry]:
            raise refuse(f"adapter_config.json sets {entry}={config[entry]!r}, which this merge does not know")


PREFIX = "base_model.model."
FACTOR_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


def refuse_broken_names(path: Path, spans: tuple[Span, ...]) -> None:
    """Raise UsageError for keys that PEFT does not write, and for one factor without its other half."""
    keys = {span.name for span in spans}
    if not keys:
        raise UsageError(f"adapter {path}: {ADAPTER_WEIGHTS} holds no tensors")
    for key in sorted(keys):
        if not key.startswith(PREFIX):
            raise UsageError(
                f"adapter {path}: {key} is not a name that PEFT writes", fix="save it again with save_pretrained"
            )
        for one, other in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            for side, missing in ((one, other), (other, one)):
                if (f".{side}." in f"{key}." and not key.endswith(".bias")) and key.replace(side, missing) not in keys:
                    raise UsageError(f"adapter {path}: {key} is alone", fix="the other half of its update is gone")


def refuse_empty_or_broken(path: Path, spans: tuple[Span, ...]) -> None:
    """Raise UsageError for NaN or infinite values, and for an adapter whose every update is zero.

    A single zero module is allowed: a layer that never receives gradient keeps its B at zero, and merges exactly.
    """
    factor = re.compile(r".*\.lora_(embedding_)?[AB](\.weight)?")
    zero: set[str] = set()
    with safe_open(path / ADAPTER_WEIGHTS, framework="pt") as weights:
        for span in spans:
            if span.dtype not in FLOAT_DTYPES:
                raise UsageError(
                    f"adapter {path}: {span.name} is stored as {span.dtype}, which no adapter is trained in"
                )
            tensor = weights.get_tensor(span.name)
            if not bool(torch.isfinite(tensor).all()):
                raise UsageError(f"adapter {path}: {span.name} holds NaN or infinity", fix="take an earlier checkpoint")
            if factor.fullmatch(span.name) and not bool(tensor.any()):
                zero.add(re.sub(r"lora_(embedding_)?[AB]", "", span.name))
    pairs = {re.sub(r"lora_(embedding_)?[AB]", "", span.name) for span in spans if factor.fullmatch(span.name)}
    if pairs == zero and len(spans) == 2 * len(pairs):
        raise UsageError(
            f"adapter {path} changes nothing: every lora_A or lora_B is zero, as right after initialisation",
            fix="was this adapter saved before training?",
        )
