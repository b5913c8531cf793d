"""Going on from an adapter (`model.adapter`): DPO or GSPO on what SFT learned, or never a step.

A LoRA that is loaded onto another base, or whose keys find no place, trains all the same: PEFT warns, what is missing stays as
it was drawn, and the run starts from something nobody chose. Here the adapter has to record the base that is loaded, every
tensor of its file has to be in the live model bit for bit, and nothing else may be trained. Where the method compares with
a reference policy, that is a frozen copy of the same adapter, proven in the same way.
"""

import logging
import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import read_shard
from cogumi.merge.adapter_files import (
    ADAPTER_WEIGHTS,
    PLAIN_INITS,
    PREFIX,
    read_json,
    refuse_broken_names,
    refuse_empty_or_broken,
)
from cogumi.merge.provenance import BaseRecord, Quantization, quantization_of, read_base, weights_sample
from cogumi.models.adapters import DEFAULTS, TRAINED
from cogumi.patches.trl_internals import commit_of

log = logging.getLogger("cogumi")

REFERENCE = "ref"  # TRL's name for the frozen copy of the adapter that is trained
# Entries of adapter_config.json that say where an adapter is from, and not what it is.
NOT_OF_THE_LORA = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_type",
    "peft_version",
    "revision",
    "task_type",
}
HASH = re.compile(r"[0-9a-f]{40}")
NAMED = 3  # tensors that an error names


# --------------------------------------------------------------------------------------------------- before the model


def lora_of(adapter: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The `lora:` section of a run that goes on from an adapter: the adapter's own, complete.

    given: what the configuration says; every key of it has to agree. Raises UsageError where one does not, and for a
    directory that holds no LoRA, a damaged or untrained one, or one of a kind that cannot be gone on from.
    """
    config = read_adapter_config(adapter)
    own = {key: value for key, value in config.items() if key not in NOT_OF_THE_LORA}
    theirs = complete(own, adapter)
    ours = complete(given, Path("lora:"))
    for key in given:
        expands = (
            key == "target_modules" and given[key] == "all-linear"
        )  # compared when the model is there to expand it
        if not expands and ours[key] != theirs[key]:
            raise UsageError(
                f"lora.{key} is {shown(ours[key])}, and model.adapter {adapter} was trained with {shown(theirs[key])}",
                fix=f"drop lora.{key}: the run takes it from the adapter",
            )
    plain = complete({}, adapter)
    kept = {key: jsonable(value) for key, value in theirs.items() if value != plain[key] or key in DEFAULTS}
    return kept | ({"target_modules": "all-linear"} if given.get("target_modules") == "all-linear" else {})


def read_adapter_config(adapter: Path) -> dict[str, Any]:
    """adapter_config.json of an adapter that can be gone on from; its weights are looked through for NaN and zeros."""
    if not (adapter / "adapter_config.json").is_file():
        inside = adapter / "adapter"
        hint = f"; did you mean {inside}?" if (inside / "adapter_config.json").is_file() else ""
        what = "holds no adapter_config.json" if adapter.is_dir() else "is not a directory"
        raise UsageError(f"{adapter} {what}{hint or '; give the adapter/ of an earlier run'}", key="model.adapter")
    config = read_json(adapter / "adapter_config.json", "adapter config")
    refuse_kind(adapter, config)
    if not (adapter / ADAPTER_WEIGHTS).is_file():
        raise UsageError(
            f"{adapter} has no {ADAPTER_WEIGHTS}", key="model.adapter", fix="save it again with save_pretrained"
        )
    spans = read_shard(adapter / ADAPTER_WEIGHTS).spans
    refuse_broken_names(adapter, spans)
    refuse_empty_or_broken(adapter, spans)
    refuse_unchanging(adapter)
    return config


def refuse_kind(adapter: Path, config: dict[str, Any]) -> None:
    """Raise UsageError, which names the kind, for adapters that change the base, or are no LoRA."""
    init = config.get("init_lora_weights", True)
    if config.get("peft_type") != "LORA":
        what = f"is a {config.get('peft_type')} adapter, and a run trains LoRA"
    elif init not in PLAIN_INITS:
        what = f"was started with init_lora_weights={init!r}, which takes a part out of the base's weights"
    elif config.get("bias", "none") != "none":
        what = f"was trained with bias={config['bias']!r}, which changes the base's own biases"
    elif config.get("layer_replication"):
        what = "was trained with layer_replication, on more layers than the base has"
    elif config.get("alora_invocation_tokens"):
        what = "is an activated LoRA, which is on for some positions only"
    elif unknown := sorted(config.keys() - NOT_OF_THE_LORA - {each.name for each in fields(LoraConfig)}):
        what = f"sets {unknown[0]}, which the installed PEFT does not know"
    else:
        return
    raise UsageError(
        f"{adapter} {what}", key="model.adapter", fix="merge it (cogumi merge) and set model.name to the result"
    )


def refuse_unchanging(adapter: Path) -> None:
    """Raise UsageError where every product B A is zero: nothing was learned there, whatever else is in the file."""
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    pairs = {key: key.replace("lora_B", "lora_A").replace("embedding_B", "embedding_A") for key in tensors}
    pairs = {up: down for up, down in pairs.items() if up != down and not up.endswith(".bias")}
    if not any(bool(tensors[up].any()) and bool(tensors[down].any()) for up, down in pairs.items()):
        what = "every lora_A or lora_B is zero" if pairs else "it holds no lora_A and lora_B"
        raise UsageError(
            f"{adapter} changes nothing ({what})", key="model.adapter", fix="was it saved before training?"
        )


def complete(lora: dict[str, Any], where: Path) -> dict[str, Any]:
    """A `lora:` section with PEFT's defaults for the rest, in values that compare. Raises UsageError for what PEFT refuses."""
    try:
        found = LoraConfig(**lora).to_dict()
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} {' '.join(str(error).split())}") from error
    return {key: comparable(value) for key, value in found.items() if key not in NOT_OF_THE_LORA}


def comparable(value: Any) -> Any:
    return frozenset(value) if isinstance(value, (list, set, tuple)) and all(type(v) is str for v in value) else value


def jsonable(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def shown(value: Any) -> str:
    return f"[{', '.join(sorted(value))}]" if isinstance(value, frozenset) else repr(value)


# ------------------------------------------------------------------------------------------------------------ the base


def refuse_other_base(adapter: Path, config: Any, revision: str | None) -> str:
    """Raise UsageError unless the adapter records the base whose transformers config this is; say how that is known.

    The base is known by name and commit, or, outside the hub's cache, by directory and a sample of its weights.
    """
    record = read_base(adapter) or recorded_by_peft(adapter)
    name, commit = config.name_or_path, commit_of(config)
    if record is None:
        raise UsageError(
            f"{adapter} does not record its base",
            key="model.adapter",
            fix=(f"if it is {name}, write that into its adapter_config.json as base_model_name_or_path"),
        )
    sample = weights_sample(name)
    if None not in (record.weights, sample):
        if record.weights != sample:
            raise UsageError(
                f"{adapter} was trained on other weights than {name} holds now",
                key="model.adapter",
                fix=f"set model.name to the model it was trained on (then at {record.name})",
            )
        return f"the weights of {name} are those that it was trained on"
    if not same_place(record.name, name):
        raise UsageError(
            f"{adapter} was trained on {record.name}, and model.name is {name}",
            key="model.adapter",
            fix=f"set model.name: {record.name}",
        )
    known = record.commit or (record.revision if HASH.fullmatch(record.revision or "") else None)
    if None not in (known, commit) and known != commit:
        raise UsageError(
            f"{adapter} was trained on commit {known} of {name}, and this is {commit}",
            key="model.adapter",
            fix=f"set model.revision: {known}",
        )
    if known is not None and known == commit:
        return f"it was trained on {name} at commit {known}"
    asked = f" (revision {record.revision} then, {revision} now)" if record.revision or revision else ""
    return f"it was trained on {name}; not known is whether at this commit{asked}"


def recorded_by_peft(adapter: Path) -> BaseRecord | None:
    """What adapter_config.json says of the base, for adapters that cogumi did not train."""
    config = read_json(adapter / "adapter_config.json", "adapter config")
    name = config.get("base_model_name_or_path")
    return BaseRecord(name, None, config.get("revision"), None, "") if name else None


def same_place(one: str, other: str) -> bool:
    """Whether two names are of one hub repository, or of one directory."""
    return one == other or (Path(other).is_dir() and Path(one).resolve() == Path(other).resolve())


# ----------------------------------------------------------------------------------------------------------- the model


def load_adapter(model: Any, adapter: Path, lora: dict[str, Any], revision: str | None) -> PeftModel:
    """The base with the adapter on it, to be trained. lora: what `lora_of` returned. revision: of the base.

    Raises UsageError where the adapter does not fit the model, or trains fewer layers than `lora:` says.
    """
    log.info("going on from %s: %s", adapter, refuse_other_base(adapter, model.config, revision))
    record, now = read_base(adapter), quantization_of(model.config)
    if record is not None and record.quantization != now:
        log.warning("it was trained on the base in %s, and goes on in %s", *map(in_words, (record.quantization, now)))
    refuse_other_base_weights(model, adapter)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing keys: `settle` raises
            adapted = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    except RuntimeError as error:  # torch's, where shapes differ
        first = " ".join(str(error).split())[:300]
        raise UsageError(f"{adapter} does not fit {model.config.name_or_path}: {first}", key="model.adapter") from error
    if lora.get("target_modules") == "all-linear":
        refuse_left_out(adapted, adapter)
    config: Any = adapted.peft_config[TRAINED]
    config.base_model_name_or_path = model.config.name_or_path
    config.revision = commit_of(model.config) or revision
    return adapted


def in_words(found: Quantization | None) -> str:
    return "full precision" if found is None else f"{found.type or found.method} {found.bits}-bit"


def refuse_other_base_weights(model: Any, adapter: Path) -> None:
    """Raise UsageError where the file holds weights of the base itself, and others than the base has.

    PEFT saves the embeddings along where an adapter is on them or the vocabulary was resized, and writes them over the
    base's when it loads.
    """
    base = model.state_dict()
    trained_whole = read_json(adapter / "adapter_config.json", "adapter config").get("modules_to_save") or ()
    for key, saved in load_file(adapter / ADAPTER_WEIGHTS).items():
        name = key.removeprefix(PREFIX)
        if name not in base or any(f".{module}." in f".{name}" for module in trained_whole):
            continue
        if base[name].shape != saved.shape or not torch.equal(base[name].cpu(), saved.to(base[name].dtype)):
            raise UsageError(
                f"{adapter} brings a {name} {list(saved.shape)} that is not the base's "
                f"{list(base[name].shape)}: a resized or retrained vocabulary",
                key="model.adapter",
                fix="merge it and set model.name to the result",
            )


def refuse_left_out(model: Any, adapter: Path) -> None:
    """Raise UsageError where a linear layer other than the LM head has no adapter: it was not trained as all-linear."""
    head = model.get_output_embeddings()
    inside = (".base_layer", ".lora_", ".modules_to_save", ".original_module")
    left = [
        name.removeprefix(PREFIX)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and not any(part in name for part in inside)
    ]
    if left:
        raise UsageError(
            f"lora.target_modules is all-linear, and model.adapter {adapter} leaves out {left[0]} "
            f"({len(left)} layers in all)",
            fix="drop lora.target_modules: the run takes it from the adapter",
        )


def settle(trainer: Any, adapter: Path, compares: bool) -> None:
    """Put the file's own bits into the trainer's model, and prove that they are there. Before there is an optimizer.

    TRL 1.15 rounds the adapter of a quantized base to bfloat16, and its copy for the reference misses what PEFT keeps in
    dictionaries (adapters on embeddings, trained tokens). unsloth's GRPO makes no copy, to compare with the bare base.
    compares: whether the loss has a reference policy. Raises UsageError where that would not be this adapter, RuntimeError
    for a tensor that found no place, or one that is trained and is not from the file.
    """
    model, saved = trainer.model, load_file(adapter / ADAPTER_WEIGHTS)
    if compares and trainer.ref_model is not None:
        raise UsageError(
            f"{type(trainer).__name__} compares with a model of its own, where the reference is the "
            f"policy in {adapter}",
            key="model.adapter",
            fix="merge that and set model.name to the result",
        )
    if compares and REFERENCE not in model.peft_config:
        model.add_adapter(REFERENCE, model.peft_config[TRAINED])
    names = [TRAINED, REFERENCE] if REFERENCE in model.peft_config else [TRAINED]
    copied = [place(model, saved, name) for name in names]
    if copied[1:] != [True] * len(copied[1:]) and trainer.args.to_dict().get("precompute_ref_log_probs"):
        raise UsageError(
            "TRL computed them before the reference was whole, as it does with adapters on embeddings",
            key="train.precompute_ref_log_probs",
            fix="drop it",
        )
    for name in names:
        prove(model, saved, name, adapter)
    elements = sum(tensor.numel() for tensor in saved.values())
    reference = "; the reference policy is a frozen copy of it" if compares else ""
    log.info("%d tensors of %s, %d elements, are in the model bit for bit%s", len(saved), adapter, elements, reference)


def place(model: Any, saved: dict[str, torch.Tensor], name: str) -> bool:
    """Write the file's values into the live adapter; whether they were there already."""
    live = get_peft_model_state_dict(model, adapter_name=name)
    there = live.keys() == saved.keys() and all(same(live[key], saved[key]) for key in saved)
    for key in saved.keys() & live.keys():
        live[key].copy_(saved[key])  # a state dict's tensors are the parameters' own memory
    return there


def prove(model: Any, saved: dict[str, torch.Tensor], name: str, adapter: Path) -> None:
    """Raise RuntimeError unless the file and the live adapter are the same tensors, and nothing beside them is trained."""
    live = get_peft_model_state_dict(model, adapter_name=name)
    ours = {tensor.data_ptr() for tensor in live.values()}
    trained = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    beside = [key for key in trained if model.get_parameter(key).data_ptr() not in ours] if name == TRAINED else []
    kept = [key for key in trained if f".{REFERENCE}." in f"{key}."]
    other = [key for key in saved.keys() & live.keys() if not same(live[key], saved[key])]
    for keys, what in (
        (saved.keys() - live.keys(), "of the file found no place in the model"),
        (live.keys() - saved.keys(), "of the model are not in the file"),
        (other, "differ from the file's"),
        (beside, "would be trained beside it"),
        (kept, "of the reference would be trained"),
    ):
        if keys:
            named = ", ".join(sorted(keys)[:NAMED])
            raise RuntimeError(f"model.adapter: {adapter}: {len(keys)} tensors {what} ({name}): {named}")


def same(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Bit for bit, the saved one in the precision of the live one."""
    return live.shape == saved.shape and torch.equal(live.detach().cpu(), saved.to(live.dtype))
