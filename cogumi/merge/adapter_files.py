"""Files of an adapter: weights that are fit for an exact merge, and a record of the base it was trained on.

The record, cogumi-base.json, is written while the model is in memory: afterwards the commit can only be guessed.
"""

import hashlib
import json
import logging
import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, FiniteFloat, PositiveInt, TypeAdapter, ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cogumi.core.errors import UsageError
from cogumi.core.run_directory import write_json
from cogumi.core.safetensors_file import FLOAT_DTYPES, Span, read_shard
from cogumi.models.quantized_bases import Quantization, is_hub_id, quantization_of
from cogumi.patches.trl_internals import commit_of, record_commit

log = logging.getLogger(__name__)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS_INDEX = f"{ADAPTER_WEIGHTS}.index.json"
PREFIX = "base_model.model."
WITH_PEFT = "load it with PEFT on the base instead"
# When PEFT loads these, it changes the base again as it did before the training. Chance, gradients and data it cannot repeat.
REBUILT_INITS = ("pissa", "olora", "mica")
WHERE_TRAINED = (
    "PEFT cannot rebuild the base that this changed; where it was trained, merge_and_unload() makes a model of it, and "
    "save_pretrained(..., path_initial_model_for_weight_conversion=<the adapter before training>) plain LoRA"
)
BOTH_SIDES = (
    "pass base=<the model of that vocabulary, saved before it got the adapter>; where PEFT then saves both embedding and "
    "head, save_pretrained(..., save_embedding_layers=True) does, too"
)
# Weights trained whole beside an adapter, which PEFT does not load: of LLaVA, ms-swift and LongLoRA, vLLM's rows of new tokens.
TRAINED_BESIDE = (
    "non_lora_trainables.bin", "non_lora_state_dict.bin", "mm_projector.bin", "vit.safetensors", "trainable_params.bin",
    "new_embeddings.safetensors", "new_embeddings.bin",
)  # fmt: skip
# Names of factors and files in other formats than PEFT's.
OTHER_NAMES = re.compile(r"\.lora_[ab](\.|$)|lora[._](down|up)\.|\.linear_(in|out)\.weight$")
OTHER_FILES = re.compile(r"adapters?\.safetensors|.*\.(gguf|pt|pth|nemo)")
OTHER_FORMAT = (
    "it may be of MLX, torchtune, llama.cpp, Kohya or NeMo: convert it to PEFT's format with the tool that wrote it"
)
VLLM_RANK = 16  # the default of --max-lora-rank
OTHER_BASE = "is this the base the adapter was trained on?"
FACTOR = re.compile(r"(?P<module>.*)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?")
# Initialisations that leave the base weights as they are and train an ordinary LoRA pair. EVA's A comes from the layers'
# inputs, its B is zero, and the ranks that it shares out are in rank_pattern.
PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")
# adapter_config.json entries of the kinds that are merged, or that do not change what a trained adapter computes. Any other
# entry that is set is refused: a LoRA variant that is unknown here must not merge as plain LoRA.
# fmt: off
KNOWN_ENTRIES = frozenset([
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "lora_bias", "lora_dropout", "megatron_core", "modules_to_save", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters", "task_type",
    "trainable_token_indices", "use_dora", "use_rslora",
    # How the factors began, which init_lora_weights decides.
    "corda_config", "loftq_config", "lora_ga_config",
    # Of unsloth and its Studio, about the training or, the last two, about the order of factors (expert_layout reads them).
    "unsloth_training_method", "unsloth_load_in_4bit", "nvfp4_merge_aware", "lora_B_layout", "unsloth_fused_expert_lora",
])
# fmt: on


class Entries(BaseModel, strict=True):
    """Types of the adapter_config.json entries that decide what an adapter computes. "false" would be true to PEFT."""

    r: PositiveInt
    lora_alpha: FiniteFloat
    rank_pattern: dict[str, PositiveInt] | None = None
    alpha_pattern: dict[str, FiniteFloat] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    lora_bias: bool | None = None
    fan_in_fan_out: bool | None = None
    lora_dropout: FiniteFloat = 0
    bias: Literal["none", "all", "lora_only"] = "none"
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    base_model_name_or_path: str | None = None
    task_type: (
        Literal["CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"] | None
    ) = None


# A factor's name with the adapter's name left in it, or without `.weight`, as state_dict() and some exporters have it.
FACTOR_NAME = re.compile(r"(?P<factor>.*\.lora_(?:[AB]|embedding_[AB]|magnitude_vector))(?:\.(?P<rest>.*))?")
# Biases of a module trained whole that bias="all" saves a second and third time: of its copy, and the untrained ones.
SAVED_AGAIN = re.compile(r"(.*\.)(?:modules_to_save|original_module)\.(?:default\.)?(.*\bbias)")
# torch.compile, FSDP and activation checkpointing put these before the names of the modules that they wrap.
WRAPPERS = re.compile(
    r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^module\.|(?<=^base_model\.model\.)module\."
)


@dataclass(frozen=True)
class Adapter:
    """A PEFT LoRA adapter whose configuration is of a kind that can be merged.

    path: as the user has it. config: its adapter_config.json. directory: where PEFT reads it: `path`, or a temporary copy
    that has other names or another order of factors than the file, and that lives as long as `copy`. spans: the tensors in
    there. reading: how the factors of expert stacks are read, and why; "" without such.
    """

    path: Path
    config: dict[str, Any]
    spans: tuple[Span, ...]
    directory: Path
    copy: TemporaryDirectory[str] | None = None
    reading: str = ""

    @property
    def weights(self) -> Path:
        return self.directory / ADAPTER_WEIGHTS

    def rewritten(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], reading: str = "") -> "Adapter":
        """Return the same adapter with these tensors and this configuration for PEFT, in a temporary directory."""
        copy = TemporaryDirectory(prefix="cogumi-adapter-")
        directory = Path(copy.name)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / ADAPTER_WEIGHTS)
        write_json(directory / "adapter_config.json", config)
        spans = read_shard(directory / ADAPTER_WEIGHTS).spans
        reading = reading or self.reading
        return replace(self, config=config, spans=spans, directory=directory, copy=copy, reading=reading)

    def refused(self, problem: str, fix: str | None = None) -> UsageError:
        """Return the error, by default with the advice to use PEFT, which reads the adapter where it is not rewritten here."""
        fix = (WITH_PEFT if self.copy is None else as_written(self.config)) if fix is None else fix
        return UsageError(f"adapter {self.path}: {problem}", fix=fix)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UsageError for anything else."""
    again = "save or download it again"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one too
        raise UsageError(f"{path} is not valid JSON: {error}", fix=again) from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} should hold a JSON object, not a {type(value).__name__}", fix=again)
    return value


def find_adapter(path: Path) -> Path:
    """Return `path`, or the only adapter's directory in it (PEFT's of a named adapter, a run's). Raises UsageError."""
    if (path / "adapter_config.json").is_file():
        return path
    inside = sorted(config.parent for config in path.glob("*/adapter_config.json"))
    if len(inside) > 1:
        problem = f"adapter {path} holds several adapters: {', '.join(directory.name for directory in inside)}"
        raise UsageError(problem, fix=f"pass one of them, such as {inside[0]}")
    if inside:
        log.info("%s has no adapter_config.json; taking the adapter in %s", path, inside[0])
    return inside[0] if inside else path


def resolve_adapter(path: Path) -> Adapter:
    """Read an adapter. Raises UsageError if it is damaged or of a refused kind."""
    if not (path / "adapter_config.json").is_file():
        problem = "has no adapter_config.json" if path.is_dir() else "is not a directory"
        is_other = any(OTHER_FILES.fullmatch(file.name) for file in (path, *path.glob("*")))
        fix = OTHER_FORMAT if is_other else "pass the directory that PEFT's save_pretrained wrote"
        if not path.exists() and is_hub_id(str(path)):
            fix += f"; one of the hub comes by: hf download {path} --local-dir {path.name}"
        raise UsageError(f"adapter {path} {problem}", fix=fix)
    stored = {"peft_type": "LORA"} | read_json(path / "adapter_config.json")  # Tinker leaves it out
    refuse_unsupported(path, stored)
    patterns: Any = {key: stored[key] or {} for key in ("rank_pattern", "alpha_pattern") if key in stored}
    if len(patterns) == 2 and all(patterns.values()) and "layers_pattern" in stored and "lora_bias" not in stored:
        # PEFT up to 0.13, without lora_bias, took a module's rank and alpha by one key: the first of both that matches.
        defaults = {"rank_pattern": stored["r"], "alpha_pattern": stored["lora_alpha"]}
        keys = [*patterns["rank_pattern"], *patterns["alpha_pattern"]]
        patterns = {name: {key: patterns[name].get(key, default) for key in keys} for name, default in defaults.items()}
    config = stored | patterns
    if stored.get("layers_pattern") and stored.get("layers_to_transform") is None:
        config["layers_pattern"] = None  # without effect then; today's PEFT refuses it
    if beside := next((name for name in TRAINED_BESIDE if (path / name).is_file()), None):
        fix = "put them into the base, save that, move the file elsewhere, and pass base=<that>"
        raise UsageError(f"adapter {path}: {beside} holds more weights, which the training changed, too", fix=fix)
    files = weight_files(path)
    spans = [span for file in files for span in read_shard(file).spans]
    names = {span.name for span in spans}
    names -= {name for name in names if (match := SAVED_AGAIN.fullmatch(name)) and match[1] + match[2] in names}
    standard = {name: standard_name(name) for name in names}
    if twice := [name for name, count in Counter(standard.values()).items() if count > 1]:
        problem = f"adapter {path} holds several tensors that are {twice[0]}"
        raise UsageError(problem, fix="save one adapter in a directory of its own")
    if config.get("ensure_weight_tying") and not isinstance(config.get("target_modules"), str):
        # PEFT leaves the tied head out of the names that it saves, and finds it again beside an `embed_tokens` alone.
        for key, tensor_name in (("target_modules", "lm_head.lora_A.weight"), ("modules_to_save", "lm_head.weight")):
            if f"{PREFIX}{tensor_name}" in standard.values() and "lm_head" not in (config.get(key) or ()):
                config[key] = [*(config.get(key) or ()), "lm_head"]
    adapter = Adapter(path, config, (), directory=path)
    stacks = [span.name for span in spans if len(span.shape) == 3 and ".experts." in span.name]
    is_stacked = any(FACTOR.fullmatch(standard_name(name)) for name in stacks)
    is_other = len(standard) < len(spans) or any(name != other for name, other in standard.items())
    if len(files) > 1 or is_stacked or config != stored or is_other:
        loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
        tensors = {other: loaded[name] for name, other in standard.items()}
        adapter = adapter.rewritten(split_experts(tensors), config)
    return replace(adapter, spans=read_factors(adapter))


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of an adapter: one, or those of its index. Raises UsageError where one is missing."""
    weights, index = path / ADAPTER_WEIGHTS, path / WEIGHTS_INDEX
    if weights.is_file():
        return [weights]
    names = sorted(set(read_json(index).get("weight_map", {}).values())) if index.is_file() else []
    if missing := [name for name in names if not (path / name).is_file()]:
        raise UsageError(f"adapter {path} has no {missing[0]}, which its index names", fix="download it again")
    if names:
        return [path / name for name in names]
    is_other = any(OTHER_FILES.fullmatch(file.name) for file in path.iterdir())
    fix = OTHER_FORMAT if is_other else "download it again, or save it again with save_pretrained"
    if (path / "adapter_model.bin").is_file():
        # save_pretrained would record its own version, by which experts are read.
        load = "torch.load('adapter_model.bin', map_location='cpu')"
        fix = f"run there: python -c \"import torch, safetensors.torch as s; s.save_file({load}, '{ADAPTER_WEIGHTS}')\""
    raise UsageError(f"adapter {path} has no {ADAPTER_WEIGHTS}", fix=fix)


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split `experts.w1.lora_A` [experts, r, in] (Tinker) into one for each expert; [1, r, in] is for all (Megatron-Bridge)."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        root, is_expert, rest = name.partition(".experts.")
        if tensor.ndim != 3 or not is_expert or not FACTOR.fullmatch(name):
            out[name] = tensor
            continue
        other = rest.replace(".lora_A", ".lora_*").replace(".lora_B", ".lora_A").replace(".lora_*", ".lora_B")
        single = re.compile(rf"{re.escape(root)}\.experts\.\d+\.{re.escape(other)}")
        stacked = tensors.get(f"{root}.experts.{other}")
        others = len(stacked) if stacked is not None else sum(1 for key in tensors if single.fullmatch(key))
        parts = tensor.expand(max(len(tensor), others), -1, -1)
        out |= {f"{root}.experts.{number}.{rest}": part.clone() for number, part in enumerate(parts)}
    return out


def standard_name(name: str) -> str:
    """Return the name under which PEFT's save_pretrained stores a tensor of an adapter that has another form of it."""
    name = WRAPPERS.sub("", name).replace(".modules_to_save.default.", ".").replace(PREFIX + PREFIX, PREFIX)
    match = FACTOR_NAME.fullmatch(name)
    if match is None:
        return name
    factor, last = match["factor"], (match["rest"] or "").rpartition(".")[2]
    factor = factor if factor.startswith(PREFIX) else PREFIX + factor
    if last == "bias":
        return f"{factor}.bias"
    return f"{factor}.weight" if factor.endswith(("lora_A", "lora_B")) else factor


def refuse_unsupported(path: Path, config: dict[str, Any]) -> None:
    """Raise UsageError unless the config describes LoRA of a kind that is known here: anything else would merge wrongly."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    kind: Any = str(config["peft_type"])
    if kind == "LORA":
        check_entries(path, config)
    init, fix = config.get("init_lora_weights", True), WITH_PEFT
    unknown = sorted(entry for entry in config.keys() - KNOWN_ENTRIES if config[entry])
    if kind != "LORA":
        reason = f"it is a {kind} adapter and only LORA is supported"
    elif init not in PLAIN_INITS:
        reason = f"init_lora_weights={init!r}: only {PLAIN_INITS} are proven to leave the base as it is"
        fix = WITH_PEFT if init in REBUILT_INITS else WHERE_TRAINED
    elif unknown:
        reason = f"adapter_config.json sets {unknown[0]}={config[unknown[0]]!r}, which this merge does not know"
    else:
        return
    fields, file = getattr(PEFT_TYPE_TO_CONFIG_MAPPING.get(kind), "__dataclass_fields__", {}), path / ADAPTER_WEIGHTS
    names = [span.name for span in read_shard(file).spans] if file.is_file() else []
    is_renamed = kind == "LORA" and any(standard_name(name) != name.replace(".default.", ".") for name in names)
    is_other = bool(config.get("target_parameters")) and config.get("peft_version") != version("peft")
    if not fields or is_other or any(entry not in fields for entry in unknown):
        fix = f"PEFT {version('peft')} ignores or misreads a part of that, so {as_written(config)}"
    elif is_renamed or (path / WEIGHTS_INDEX).is_file():
        fix = "PEFT finds no tensors under these names, or in shards, either"
    raise UsageError(f"adapter {path} cannot be merged yet: {reason}", fix=converted_adapter(path) or fix)


def check_entries(path: Path, config: dict[str, Any]) -> None:
    """Raise UsageError for a LoRA configuration without rank or alpha, or with an entry of another type than PEFT writes."""
    try:
        Entries.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        entry = str(first["loc"][0])
        place, problem = path / "adapter_config.json", f"{config.get(entry)!r}: {first['msg']}"
        fix = "set it to the value that it was trained with"
        if entry not in config:
            problem = "missing, and PEFT always writes it"
            fix += "; an adapter of another format (MLX) is converted or fused by the tool that trained it"
        raise UsageError(problem, place=place, key=entry, fix=fix) from error


def as_written(config: dict[str, Any]) -> str:
    """Return the advice for an adapter that the installed versions would misread."""
    return f"load it with the versions that wrote it (PEFT {config.get('peft_version') or 'up to 0.17'})"


def serving_limits(config: dict[str, Any]) -> str:
    """Return what vLLM refuses or ignores of an adapter, by its adapter_config.json; "" if it serves all of it."""
    refused = [key for key in ("modules_to_save", "use_dora", "lora_bias") if config.get(key)]
    refused += ["bias"] if config.get("bias", "none") != "none" else []
    # Versions differ in tokens and stacks of experts. Patterns are never read: one rank and one alpha scale every layer.
    partly = ("target_parameters", "trainable_token_indices", "rank_pattern", "alpha_pattern")
    limits = [f"refuses {', '.join(refused)}"] if refused else []
    if ignored := [key for key in partly if config.get(key)]:
        limits.append(f"may ignore {', '.join(ignored)}")
    if (rank := max([config["r"], *(config.get("rank_pattern") or {}).values()])) > VLLM_RANK:
        limits.append(f"needs --max-lora-rank {rank} or more")
    return f"served as an adapter, vLLM {' and '.join(limits)}: serve the merged model" if limits else ""


def converted_adapter(path: Path) -> str:
    """Return advice to merge the converted adapter that LLaMA-Factory writes beside raw PiSSA factors; "" without one."""
    homes = (path, path.parent) if path.name in ("pissa_backup", "pissa_init") else (path,)
    converted = next((home / "pissa_converted" for home in homes if (home / "pissa_converted").is_dir()), None)
    return f"merge {converted}, which is the same adapter converted to plain LoRA" if converted else ""


def read_factors(adapter: Adapter) -> tuple[Span, ...]:
    """Read the tensors of an adapter's file. Raises UsageError for one that PEFT does not write, or without its other half."""
    path, spans = adapter.path, read_shard(adapter.weights).spans
    names = {span.name for span in spans}
    with safe_open(adapter.weights, framework="pt") as weights:
        for name in sorted(names):
            if not name.startswith(PREFIX) or OTHER_NAMES.search(name):
                fix = OTHER_FORMAT if OTHER_NAMES.search(name) else "save it with save_pretrained"
                raise UsageError(f"adapter {path}: {name} is not a name that PEFT writes", fix=fix)
            tensor = weights.get_tensor(name)
            if tensor.dtype not in FLOAT_DTYPES.values():
                raise UsageError(f"adapter {path}: {name} is {tensor.dtype}", fix="convert it to float32")
            if tensor.shape == (0,):
                fix = "save with stage3_gather_16bit_weights_on_model_save, or run the checkpoint's zero_to_fp32.py"
                raise UsageError(f"adapter {path}: {name} is empty, as ZeRO-3 leaves what is not gathered", fix=fix)
            if not bool(torch.isfinite(tensor).all()):
                raise UsageError(f"adapter {path}: {name} holds NaN or infinity", fix="take an earlier checkpoint")
            if factor := FACTOR.fullmatch(name):
                other = "B" if factor["side"] == "A" else "A"
                if name[: factor.start("side")] + other + name[factor.end("side") :] not in names:
                    raise UsageError(f"adapter {path}: {name} is alone", fix="the other half of its update is gone")
    return spans


BASE_RECORD_NAME = "cogumi-base.json"
SAMPLED_BLOCKS, BLOCK_BYTES = 16, 1 << 16  # of each file, spread from its first byte to its last
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class BaseRecord:
    """The base as it was loaded: a directory, or a hub id with its commit and the requested revision.

    dtype: of the weights that were not quantized. weights: `weights_sample` of a directory without a commit. transformers:
    the version that trained the adapter.
    """

    name: Text
    commit: str | None
    revision: str | None
    quantization: Quantization | None
    dtype: Text
    weights: str | None = None
    transformers: str | None = None
    format: Literal[1] = 1


def write_base_record(adapter: Path, model: Any, revision: str | None = None) -> BaseRecord:
    """Write cogumi-base.json from the trained model. Raises ValueError if it was not loaded with from_pretrained."""
    config = model.config
    if not config.name_or_path:
        raise ValueError("the model does not know its base: it was not loaded with from_pretrained")
    dtype = str(config.dtype or model.dtype).removeprefix("torch.")
    if revision is not None:  # without one, transformers 5.24 leaves open which of the cache's snapshots was loaded
        record_commit(config, config.name_or_path, revision)
    name, commit = config.name_or_path, commit_of(config)
    weights = weights_sample(name) if commit is None else None
    record = BaseRecord(name, commit, revision, quantization_of(config), dtype, weights, version("transformers"))
    write_json(adapter / BASE_RECORD_NAME, asdict(record))
    return record


def weights_sample(name: str) -> str | None:
    """Return the SHA-256 of a sample of a directory's safetensors files; None where there are none.

    Of each file: name, size, header, and 16 blocks of 64 KiB. A few altered elements can be missed.
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


def read_base_record(adapter: Path) -> BaseRecord | None:
    """Read the record beside an adapter, None where cogumi did not train it. Raises UsageError when it is damaged."""
    path = adapter / BASE_RECORD_NAME
    if not path.is_file():
        return None
    try:
        return TypeAdapter(BaseRecord).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        entry = ".".join(map(str, first["loc"]))
        fix = "delete it and pass base=<the model this adapter was trained on>"
        raise UsageError(f"no record of a base: {first['msg']}", place=path, key=entry, fix=fix) from error
