"""Starting from an adapter (`model.adapter`): DPO or GSPO on what SFT learned, or never a step.

A LoRA that is loaded onto another base, or whose keys find no place, trains all the same: PEFT warns, and what is missing
stays as it was drawn. Here the adapter has to record the base that is loaded, every tensor of its file has to be in the
live model bit for bit, and nothing else may be trained. A reference policy is a frozen copy of the same adapter, proven
in the same way.
"""

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file

from cogumi.core.errors import UsageError
from cogumi.merge.adapter_files import (
    ADAPTER_WEIGHTS,
    PREFIX,
    BaseRecord,
    Quantization,
    quantization_of,
    read_base_record,
    read_json,
    resolve_adapter,
    weights_sample,
)
from cogumi.models.adapters import DEFAULTS, TRAINED
from cogumi.patches.trl_internals import commit_of

log = logging.getLogger("cogumi")

REFERENCE = "ref"  # TRL's name for the frozen copy of the adapter that is trained
# Entries of adapter_config.json that say where an adapter is from, and not what it is.
# fmt: off
NOT_OF_THE_LORA = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision", "task_type",
}
# fmt: on
HASH = re.compile(r"[0-9a-f]{40}")
NAMED = 3  # tensors that an error names
MERGE_FIRST = "merge it (cogumi merge) and set model.name to the result"


# --------------------------------------------------------------------------------------------------- before the model


def lora_of(adapter: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The `lora:` section of a run that starts from an adapter: the adapter's own, complete.

    given: what the configuration says; every key of it has to agree. Raises UsageError where one does not, and for a
    directory that holds no LoRA that a run can start from.
    """
    own = {key: value for key, value in read_adapter_config(adapter).items() if key not in NOT_OF_THE_LORA}
    theirs, ours, plain = parse(own, str(adapter)), parse(given, "lora:"), LoraConfig()
    for key in given:
        if key == "target_modules" and given[key] == "all-linear":
            own[key] = given[key]  # compared when the model is there to expand it
        elif getattr(ours, key) != getattr(theirs, key):
            what = (
                f"it is {getattr(ours, key)!r}, and model.adapter {adapter} was trained with {getattr(theirs, key)!r}"
            )
            raise UsageError(what, key=f"lora.{key}", fix=f"drop lora.{key}: the run takes it from the adapter")
    return {key: value for key, value in own.items() if key in DEFAULTS or getattr(theirs, key) != getattr(plain, key)}


def read_adapter_config(adapter: Path) -> dict[str, Any]:
    """adapter_config.json of an adapter that a run can start from; its weights are searched for NaN and zeros."""
    inside = adapter / "adapter"
    if not (adapter / "adapter_config.json").is_file() and (inside / "adapter_config.json").is_file():
        raise UsageError(f"{adapter} holds no adapter_config.json", key="model.adapter", fix=f"did you mean {inside}?")
    try:
        config = resolve_adapter(adapter, factors_alone=True).config
    except UsageError as error:
        raise UsageError(error.message, place=error.place, key="model.adapter", fix=error.fix) from error
    if config.get("bias", "none") != "none":
        what = f"{adapter} was trained with bias={config['bias']!r}, which changes the base's own biases"
        raise UsageError(what, key="model.adapter", fix=MERGE_FIRST)
    return config


def parse(lora: dict[str, Any], where: str) -> LoraConfig:
    """A `lora:` section as PEFT reads it. Raises UsageError for what it refuses."""
    try:
        return LoraConfig(**lora)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} {' '.join(str(error).split())}") from error


# ------------------------------------------------------------------------------------------------------------ the base


def check_base(adapter: Path, config: Any, revision: str | None) -> str:
    """Raise UsageError unless the adapter records the base whose transformers config this is; say how that is known.

    The base is known by name and commit, or, outside the hub's cache, by directory and a sample of its weights.
    """

    def refused(what: str, fix: str) -> UsageError:
        return UsageError(f"{adapter} {what}", key="model.adapter", fix=fix)

    peft = read_json(adapter / "adapter_config.json")  # of adapters that cogumi did not train
    recorded = peft.get("base_model_name_or_path")
    record = read_base_record(adapter) or (recorded and BaseRecord(recorded, None, peft.get("revision"), None, ""))
    name, commit = config.name_or_path, commit_of(config)
    if not record:
        fix = f"if it is {name}, write that into its adapter_config.json as base_model_name_or_path"
        raise refused("does not record its base", fix)
    sample = weights_sample(name)
    if None not in (record.weights, sample):
        if record.weights != sample:
            fix = f"set model.name to the model it was trained on (then at {record.name})"
            raise refused(f"was trained on other weights than {name} holds now", fix)
        return f"the weights of {name} are those that it was trained on"
    if record.name != name and not (Path(name).is_dir() and Path(record.name).resolve() == Path(name).resolve()):
        raise refused(f"was trained on {record.name}, and model.name is {name}", f"set model.name: {record.name}")
    known = record.commit or (record.revision if HASH.fullmatch(record.revision or "") else None)
    if known is not None and known == commit:
        return f"it was trained on {name} at commit {known}"
    if None not in (known, commit):
        raise refused(f"was trained on commit {known} of {name}, and this is {commit}", f"set model.revision: {known}")
    asked = f" (revision {record.revision} then, {revision} now)" if record.revision or revision else ""
    return f"it was trained on {name}; not known is whether at this commit{asked}"


# ----------------------------------------------------------------------------------------------------------- the model


def load_adapter(model: Any, adapter: Path, lora: dict[str, Any], revision: str | None) -> PeftModel:
    """The base with the adapter on it, to be trained. lora: what `lora_of` returned. revision: of the base.

    Raises UsageError where the adapter does not fit the model, or trains fewer layers than `lora:` says.
    """
    log.info("starting from adapter %s: %s", adapter, check_base(adapter, model.config, revision))
    record, now = read_base_record(adapter), quantization_of(model.config)
    if record is not None and record.quantization != now:
        log.warning(
            "it was trained on the base in %s; this run has it in %s",
            *map(describe_quantization, (record.quantization, now)),
        )
    refuse_other_base_weights(model, adapter)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing keys: `load_exact_values` raises
            adapted = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    except RuntimeError as error:  # torch's, where shapes differ
        what = f"{adapter} does not fit {model.config.name_or_path}: {' '.join(str(error).split())[:300]}"
        raise UsageError(what, key="model.adapter") from error
    if lora.get("target_modules") == "all-linear":
        refuse_left_out(adapted, adapter)
    config: Any = adapted.peft_config[TRAINED]
    config.base_model_name_or_path = model.config.name_or_path
    config.revision = commit_of(model.config) or revision
    return adapted


def describe_quantization(found: Quantization | None) -> str:
    return "full precision" if found is None else f"{found.type or found.method} {found.bits}-bit"


def refuse_other_base_weights(model: Any, adapter: Path) -> None:
    """Raise UsageError where the file holds weights of the base itself, and others than the base has.

    PEFT saves the embeddings along where an adapter is on them or the vocabulary was resized, and loads them over the
    base's.
    """
    base = model.state_dict()
    trained_whole = read_json(adapter / "adapter_config.json").get("modules_to_save") or ()
    for key, saved in load_file(adapter / ADAPTER_WEIGHTS).items():
        name = key.removeprefix(PREFIX)
        if name not in base or any(f".{module}." in f".{name}" for module in trained_whole):
            continue
        if base[name].shape != saved.shape or not torch.equal(base[name].cpu(), saved.to(base[name].dtype)):
            ours, theirs = list(base[name].shape), list(saved.shape)
            what = (
                f"{adapter} brings a {name} {theirs} that is not the base's {ours}: a resized or retrained vocabulary"
            )
            raise UsageError(what, key="model.adapter", fix=MERGE_FIRST)


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
        what = f"is all-linear, and model.adapter {adapter} leaves out {left[0]} ({len(left)} layers in all)"
        raise UsageError(what, key="lora.target_modules", fix="drop it: the run takes it from the adapter")


def load_exact_values(trainer: Any, adapter: Path, compares: bool) -> None:
    """Put the file's own bits into the trainer's model, and prove that they are there. Before there is an optimizer.

    TRL 1.15 rounds the adapter of a quantized base to bfloat16, and its copy for the reference misses adapters on
    embeddings and trained tokens. unsloth's GRPO makes no copy. compares: whether the loss has a reference policy. Raises
    UsageError where that would not be this adapter, RuntimeError for a tensor that found no place, or one that is trained
    and is not from the file.
    """
    model, saved = trainer.model, load_file(adapter / ADAPTER_WEIGHTS)
    if compares and trainer.ref_model is not None:
        what = (
            f"{type(trainer).__name__} compares with a model of its own, where the reference is the policy in {adapter}"
        )
        raise UsageError(what, key="model.adapter", fix=MERGE_FIRST)
    if compares and REFERENCE not in model.peft_config:
        model.add_adapter(REFERENCE, model.peft_config[TRAINED])
    names = [TRAINED, REFERENCE] if REFERENCE in model.peft_config else [TRAINED]
    copied = [write_values(model, saved, name) for name in names]
    if copied[1:] != [True] * len(copied[1:]) and trainer.args.to_dict().get("precompute_ref_log_probs"):
        raise UsageError(
            "TRL computed them before the reference was whole, as it does with adapters on embeddings",
            key="train.precompute_ref_log_probs",
            fix="drop it",
        )
    for name in names:
        verify_adapter(model, saved, name, adapter)
    elements = sum(tensor.numel() for tensor in saved.values())
    reference = "; the reference policy is a frozen copy of it" if compares else ""
    log.info("%d tensors of %s, %d elements, are in the model bit for bit%s", len(saved), adapter, elements, reference)


def write_values(model: Any, saved: dict[str, torch.Tensor], name: str) -> bool:
    """Write the file's values into the live adapter; whether they were there already."""
    live = get_peft_model_state_dict(model, adapter_name=name)
    there = live.keys() == saved.keys() and all(equal_bits(live[key], saved[key]) for key in saved)
    for key in saved.keys() & live.keys():
        live[key].copy_(saved[key])  # a state dict's tensors are the parameters' own memory
    return there


def verify_adapter(model: Any, saved: dict[str, torch.Tensor], name: str, adapter: Path) -> None:
    """Raise RuntimeError unless the file and the live adapter are the same tensors, and nothing beside them is trained."""
    live = get_peft_model_state_dict(model, adapter_name=name)
    ours = {tensor.data_ptr() for tensor in live.values()}
    trained = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    beside = [key for key in trained if model.get_parameter(key).data_ptr() not in ours] if name == TRAINED else []
    kept = [key for key in trained if f".{REFERENCE}." in f"{key}."]
    other = [key for key in saved.keys() & live.keys() if not equal_bits(live[key], saved[key])]
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


def equal_bits(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Bit for bit, the saved one in the precision of the live one."""
    return live.shape == saved.shape and torch.equal(live.detach().cpu(), saved.to(live.dtype))
