"""Start a run from an adapter (`model.adapter`).

A LoRA that is loaded onto another base, or whose keys find no place, still trains. Here the adapter has to record the
base that is loaded, every tensor of its file has to be in the live model bit for bit, and nothing else is trained. A
reference policy is a frozen copy of the same adapter, proven in the same way.
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
from cogumi.core.formatting import one_line
from cogumi.merge.adapter_files import (
    ADAPTER_WEIGHTS,
    OTHER_BASE,
    PREFIX,
    BaseRecord,
    read_base_record,
    read_json,
    resolve_adapter,
    weights_sample,
)
from cogumi.merge.bases import read_model
from cogumi.merge.foreign_adapters import as_installed
from cogumi.models.adapters import DEFAULTS, TRAINED, lora_config
from cogumi.models.quantized_bases import quantization_of
from cogumi.patches.trl_internals import commit_of

log = logging.getLogger("cogumi")
REFERENCE = "ref"  # TRL's name for the frozen copy of the adapter that is trained
# Entries of adapter_config.json that say where an adapter is from, and not what it is.
NOT_OF_THE_LORA = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision",
                   "task_type")  # fmt: skip
MERGE_FIRST = "merge it (cogumi merge) and set model.name to the result"


def lora_of(adapter: Path, requested: dict[str, Any]) -> dict[str, Any]:
    """Return the `lora:` section of a run that starts from an adapter: the adapter's own, complete.

    requested: `lora:` of the configuration. Raises UsageError where a key of it does not agree, and for a directory that
    holds no LoRA that a run can start from.
    """
    inside = adapter / "adapter"
    if not (adapter / "adapter_config.json").is_file() and (inside / "adapter_config.json").is_file():
        raise UsageError(f"{adapter} holds no adapter_config.json", key="model.adapter", fix=f"did you mean {inside}?")
    try:
        resolved = resolve_adapter(adapter)
        if resolved.copy is not None:
            problem = f"{adapter} has names or shards that PEFT's save_pretrained does not write"
            raise UsageError(problem, key="model.adapter", fix=MERGE_FIRST)
        tensors = load_file(resolved.weights).items()
        if not any(bool(tensor.any()) for name, tensor in tensors if ".lora_B" in name or ".lora_embedding_B" in name):
            raise resolved.refused("it changes nothing: every lora_B is zero", fix="was it saved before training?")
        config = resolved.config
    except UsageError as error:
        raise UsageError(error.message, place=error.place, key="model.adapter", fix=error.fix) from error
    if config.get("bias", "none") != "none":
        message = f"{adapter} was trained with bias={config['bias']!r}, which changes the base's own biases"
        raise UsageError(message, key="model.adapter", fix=MERGE_FIRST)
    saved = {key: value for key, value in config.items() if key not in NOT_OF_THE_LORA}
    theirs, ours, plain = lora_config(saved), lora_config(requested), LoraConfig()
    for key in requested:
        mine, trained = getattr(ours, key), getattr(theirs, key)
        if mine != trained:
            message = f"it is {mine!r}, and model.adapter {adapter} was trained with {trained!r}"
            raise UsageError(message, key=f"lora.{key}", fix=f"drop lora.{key}: the run takes it from the adapter")
    return {key: saved[key] for key in saved if key in DEFAULTS or getattr(theirs, key) != getattr(plain, key)}


def check_recorded_base(adapter: Path, config: Any, revision: str | None) -> str:
    """Raise UsageError unless the adapter records the base whose transformers config this is; say how that is known.

    The base is known by name and commit, or, outside the hub's cache, by directory and a sample of its weights.
    """

    def refused(problem: str, fix: str) -> UsageError:
        return UsageError(f"{adapter} {problem}", key="model.adapter", fix=fix)

    name, commit = config.name_or_path, commit_of(config)
    record = read_base_record(adapter)
    if record is None:  # an adapter that cogumi did not train
        peft = read_json(adapter / "adapter_config.json")
        record = BaseRecord(peft.get("base_model_name_or_path") or "", None, peft.get("revision"), None, "")
    if not record.name:
        fix = f"if it is {name}, write that into its adapter_config.json as base_model_name_or_path"
        raise refused("does not record its base", fix)
    sample = weights_sample(name)
    if record.weights and sample:
        if record.weights != sample:
            fix = f"set model.name to the model it was trained on (then at {record.name})"
            raise refused(f"was trained on other weights than {name} holds now", fix)
        return f"the weights of {name} are those that it was trained on"
    if record.name != name and not (Path(name).is_dir() and Path(record.name).resolve() == Path(name).resolve()):
        raise refused(f"was trained on {record.name}, and model.name is {name}", f"set model.name: {record.name}")
    is_commit = re.fullmatch(r"[0-9a-f]{40}", record.revision or "")
    known = record.commit or (record.revision if is_commit else None)
    if known and known == commit:
        return f"it was trained on {name} at commit {known}"
    if known and commit:
        raise refused(f"was trained on commit {known} of {name}, and this is {commit}", f"set model.revision: {known}")
    revisions = f" (revision {record.revision} then, {revision} now)" if record.revision or revision else ""
    return f"it was trained on {name}; not known is whether at this commit{revisions}"


def load_adapter(model: Any, adapter: Path, revision: str | None) -> PeftModel:
    """Load the adapter onto the base, of this revision, to be trained. Raises UsageError if it does not fit."""
    log.info("starting from adapter %s: %s", adapter, check_recorded_base(adapter, model.config, revision))
    record, now = read_base_record(adapter), quantization_of(model.config)
    if record is not None and record.quantization != now:
        then, here = (str(quantization or "full precision") for quantization in (record.quantization, now))
        log.warning("it was trained on the base in %s; this run has it in %s", then, here)
    refuse_other_base_weights(model, adapter)
    refuse_other_reading(model.config, adapter, revision)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing keys: `load_exact_values` raises
            adapted = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    except RuntimeError as error:  # torch's, where shapes differ
        message = f"{adapter} does not fit {model.config.name_or_path}: {one_line(error)[:300]}"
        raise UsageError(message, key="model.adapter") from error
    config: Any = adapted.peft_config[TRAINED]
    config.base_model_name_or_path = model.config.name_or_path
    config.revision = commit_of(model.config) or revision
    return adapted


def refuse_other_reading(config: Any, adapter: Path, revision: str | None) -> None:
    """Raise UsageError where the version that wrote stacked experts read their factors otherwise than the installed PEFT."""
    trained = resolve_adapter(adapter)
    if not trained.config.get("target_parameters"):
        return
    try:
        read = as_installed(trained, read_model(config.name_or_path, commit_of(config) or revision))
    except UsageError as error:
        fix = f"{error.fix}; for that merge it (cogumi merge --expert-layout) and set model.name to the result"
        raise UsageError(error.message, key="model.adapter", fix=fix) from error
    if read.copy is not None:
        message = f"{adapter} has another order of factors than the installed PEFT ({read.reading})"
        raise UsageError(message, key="model.adapter", fix=MERGE_FIRST)


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
            message = f"{adapter} brings a {name} {theirs} that is not the base's {ours}"
            raise UsageError(message, key="model.adapter", fix=OTHER_BASE if ours == theirs else MERGE_FIRST)


def load_exact_values(trainer: Any, adapter: Path, compares: bool) -> None:
    """Put the file's own bits into the trainer's model, and prove that they are there. Before there is an optimizer.

    TRL 1.15 rounds the adapter of a quantized base to bfloat16, and its copy for the reference misses adapters on
    embeddings and trained tokens. compares: whether the loss has a reference policy, else UsageError where it would be
    another. Raises RuntimeError for a tensor that found no place, and for a trained one that is not from the file.
    """
    model, saved = trainer.model, load_file(adapter / ADAPTER_WEIGHTS)
    if compares and trainer.ref_model is not None:
        message = f"{type(trainer).__name__} compares with a model of its own, and not with the policy in {adapter}"
        raise UsageError(message, key="model.adapter", fix=MERGE_FIRST)
    if compares and REFERENCE not in model.peft_config:
        model.add_adapter(REFERENCE, model.peft_config[TRAINED])
    write_values(model, saved, TRAINED, adapter)
    if REFERENCE in model.peft_config:
        was_complete = write_values(model, saved, REFERENCE, adapter)
        if not was_complete and trainer.args.to_dict().get("precompute_ref_log_probs"):
            message = "TRL computed them before the reference was whole, as it does with adapters on embeddings"
            raise UsageError(message, key="train.precompute_ref_log_probs", fix="drop it")
    trained = {tensor.data_ptr() for tensor in get_peft_model_state_dict(model, adapter_name=TRAINED).values()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.data_ptr() not in trained:
            raise RuntimeError(f"model.adapter: {name} would be trained beside {adapter}")
    elements = sum(tensor.numel() for tensor in saved.values())
    reference = "; the reference policy is a frozen copy of it" if compares else ""
    log.info("%d tensors of %s, %d elements, are in the model bit for bit%s", len(saved), adapter, elements, reference)


def write_values(model: Any, saved: dict[str, torch.Tensor], name: str, adapter: Path) -> bool:
    """Write the file's values into the live adapter, and prove that they are there; whether they were there already."""
    live = get_peft_model_state_dict(model, adapter_name=name)
    if other := sorted(live.keys() ^ saved.keys()):
        message = f"{len(other)} tensors are in the file or in the model ({name}) alone, the first is {other[0]}"
        raise RuntimeError(f"model.adapter: {adapter}: {message}")
    was_equal = all(equal_bits(live[key], saved[key]) for key in saved)
    for key, tensor in saved.items():
        live[key].copy_(tensor)  # a state dict's tensors are the parameters' own memory
    now = get_peft_model_state_dict(model, adapter_name=name)
    if differing := sorted(key for key in saved if not equal_bits(now[key], saved[key])):
        message = f"{len(differing)} tensors differ in the model ({name}): {differing[0]}"
        raise RuntimeError(f"model.adapter: {adapter}: {message}")
    return was_equal


def equal_bits(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Bit for bit, the saved one in the precision of the live one."""
    return live.shape == saved.shape and torch.equal(live.detach().cpu(), saved.to(live.dtype))
