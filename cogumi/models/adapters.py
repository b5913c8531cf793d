"""The LoRA that a run trains, what it did, and starting from one (`model.adapter`)."""

import copy
import difflib
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import Linear
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.merge.adapter_files import (
    ADAPTER_WEIGHTS,
    OTHER_BASE,
    PREFIX,
    BaseRecord,
    quantization_of,
    read_base_record,
    read_json,
    resolve_adapter,
    weights_sample,
)
from cogumi.merge.bases import read_model
from cogumi.merge.foreign_adapters import as_installed
from cogumi.merge.parameter_map import meta_model
from cogumi.merge.targets import measure_coverage, unmatched_names
from cogumi.patches.trl_internals import commit_of

log = logging.getLogger("cogumi")
# Rank 16 on every linear layer with alpha = 2r; dropout 0, because GSPO's ratio must be 1 before the first update.
DEFAULTS: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
TRAINED = "default"  # PEFT's name for the adapter that is trained
REFERENCE = "ref"  # TRL's name for the frozen copy of the adapter that is trained
# Entries of adapter_config.json that say where an adapter is from, and not what it is.
NOT_OF_THE_LORA = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
    "task_type",
)
MERGE_FIRST = "merge it (cogumi merge) and set model.name to the result"


def lora_config(lora: dict[str, Any], revision: str | None = None, model: Any = None) -> LoraConfig:
    """Return the LoraConfig of a run: `lora:` over the defaults.

    `revision` is the base's, recorded for the merge. model: the base, of which all-linear leaves out, by
    `exclude_modules`, towers beside the language model and routers.
    """
    try:
        config = LoraConfig(**{**DEFAULTS, "task_type": "CAUSAL_LM", "revision": revision, **lora})
    except (ValueError, TypeError) as error:
        raise UsageError(one_line(error), key="lora") from error
    if (
        model is not None
        and config.target_modules == "all-linear"
        and (towers := [*find_towers(model), *find_routers(model)])
    ):
        excluded = config.exclude_modules or []
        patterns = (
            [excluded] if isinstance(excluded, str) else [rf"(.*\.)?{re.escape(name)}" for name in sorted(excluded)]
        )
        config.exclude_modules = "|".join([*patterns, *(rf"{re.escape(name)}(\..*)?" for name in towers)])
    return config


def find_routers(model: Any) -> list[str]:
    """Linear layers whose forward pass gives more than their product, by name, as Llama 4's routers do: PEFT's fails there."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and type(module).__module__.startswith("transformers.models."):
            with torch.no_grad():
                made = module(module.weight.new_zeros(1, module.in_features))
            if not isinstance(made, torch.Tensor):
                names.append(name)
    return names


def find_towers(model: Any) -> list[str]:
    """List the modules with linear layers beside the language model of a multimodal model.

    They are towers for images or sound and their projections. Text does not pass through them, so they learn nothing.
    """
    if model.config.get_text_config() is model.config or (language := model.get_decoder()) is model:
        return []
    towers, parent, head = [], "", model.get_output_embeddings()
    for part in next(name for name, module in model.named_modules() if module is language).split("."):
        for name, child in model.get_submodule(parent).named_children():
            learns = any(isinstance(module, torch.nn.Linear | Conv1D) for module in child.modules())
            if name != part and child is not head and learns:
                towers.append(f"{parent}.{name}".lstrip("."))
        parent = f"{parent}.{part}".lstrip(".")
    return towers


def check_targets(lora: dict[str, Any], base_config: Any, is_own: bool = True) -> str:
    """Raise UsageError for a name in `lora:` that matches nothing in the base, before anything is loaded or prepared.

    is_own: whether `lora:` is the run's own, and not that of the adapter that it starts from, whose tensors decide.

    Returns:
        The share of the parameters under the adapter, in words; "" for a base that cannot be built of its config alone,
        which is left for PEFT to refuse.
    """
    try:
        model = meta_model(base_config)
    except (ValueError, ImportError, RuntimeError):
        return ""
    config = lora_config(lora, model=model)
    config.init_lora_weights = True  # others read weights
    entries = config.to_dict() | {"exclude_modules": lora.get("exclude_modules")}  # without towers of all-linear
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    # gpt-oss in 4 bits by unsloth has a module for each expert of a stack.
    split = [
        f"{name}s{end}" for name, parameter in model.named_parameters() if parameter.ndim == 3 for end in ("", ".0")
    ]
    modules, adapted, failure = [*(name for name, _ in model.named_modules()), *split], set(), None
    with warnings.catch_warnings(action="ignore"):
        try:
            if not isinstance(config.target_modules, str):
                # PEFT targets stacks of experts by the names that their single experts had.
                renamed = copy.deepcopy(config)
                convert_peft_config_for_transformers(renamed, model=model, conversions=None)
                entries |= {"target_modules": renamed.target_modules, "target_parameters": renamed.target_parameters}
        except ValueError as error:  # one of two targets that have become one
            raise UsageError(one_line(error), key="lora.target_modules") from error
        try:
            tuner: Any = get_peft_model(model, config, low_cpu_mem_usage=True).base_model
            adapted = {*tuner.targeted_parameter_names, *(f"{name}.weight" for name in tuner.targeted_module_names)}
        except (ValueError, TypeError, re.error) as error:
            failure = error
    targeted = {*adapted, *(name.rpartition(".")[0] for name in adapted)}
    unmatched = unmatched_names(entries, modules, sizes, targeted) if is_own else {}
    # Without any target the patterns match nothing either.
    if keys := [key for key in unmatched if adapted or key.startswith("target_")]:
        raise no_match(keys[0], unmatched[keys[0]], meta_model(base_config))
    if failure is not None:
        raise UsageError(one_line(failure), key="lora") from failure
    saved = tuple(config.modules_to_save or ())
    adapted |= {name for name in sizes if name.rpartition(".")[0].endswith(saved)}
    return str(measure_coverage(sizes, adapted))


def no_match(key: str, names: list[str], base: Any) -> UsageError:
    """Return the error for names in `lora:` that match nothing in the base, with those that are near them."""
    head = base.get_output_embeddings()
    modules = [(name.rpartition(".")[2], module) for name, module in base.named_modules() if name]
    linear = [name for name, module in modules if isinstance(module, torch.nn.Linear | Conv1D) and module is not head]
    known = dict.fromkeys(name for name, _ in modules)
    noun, fix = "module", f"its linear modules are {', '.join(dict.fromkeys(linear))} (all-linear takes them all)"
    if key == "target_parameters":
        stacks = (".".join(name.split(".")[-3:]) for name, tensor in base.named_parameters() if tensor.ndim == 3)
        noun, known = "parameter", dict.fromkeys(stacks)
        fix = f"its stacks of experts are {', '.join(known) or 'none'}"
    elif key == "layers_to_transform":
        noun, fix = "layer", f"its layers are 0 to {base.config.get_text_config().num_hidden_layers - 1}"
    elif key.endswith("_pattern"):
        noun, fix = "module under the adapter", "drop it, or add its module to the targets"
    near = [
        match for name in names for match in difflib.get_close_matches(name, known, n=1, cutoff=0.75) if match != name
    ]
    message = f"{', '.join(names)}: no {noun} of {type(base).__name__} matches"
    return UsageError(message, key=f"lora.{key}", fix=f"did you mean {', '.join(near)}? {fix}" if near else fix)


def keep_float32(model: Any) -> None:
    """Give the adapter on a quantized base the float32 back that PEFT made it in.

    Before there is an optimizer. TRL 1.15 casts it to bfloat16, where an update below 2^-9 of a weight is lost. What is
    trained whole (modules_to_save) gets the base's dtype.
    """
    if quantization_of(model.config) is None:
        return
    base = model.get_base_model().dtype
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32 if "lora_" in name else base)


class CastOutsideAutocast:
    """True outside autocast, where PEFT has to cast an input to the adapter's dtype; autocast casts inputs by itself."""

    def __bool__(self) -> bool:
        return not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


def drop_casts(model: Any) -> int:
    """Under autocast, spare plain LoRA layers PEFT's cast to float32, which autocast takes back. Returns their number.

    No bit changes. Left out are dropout, which draws another mask in another dtype, and variants such as DoRA.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) is Linear and not module.lora_variant]
    exact = [layer for layer in layers if not any(isinstance(part, torch.nn.Dropout) for part in layer.modules())]
    for layer in exact:
        layer.cast_input_dtype_enabled = CastOutsideAutocast()
    return len(exact)


def differing_tensors(model: Any, adapter: Path) -> list[str]:
    """List the tensors that differ, in any bit, between the model's adapter and the one saved from it."""
    live, saved = get_peft_model_state_dict(model), load_file(adapter / ADAPTER_WEIGHTS)
    same = {name for name in live.keys() & saved.keys() if torch.equal(live[name].cpu(), saved[name])}
    return sorted((live.keys() | saved.keys()) - same)


# ----------------------------------------------------------------------------------------------- starting from an adapter

# A LoRA that is loaded onto another base, or whose keys find no place, still trains. Here the adapter has to record the
# base that is loaded, every tensor of its file has to be in the live model bit for bit, and nothing else is trained. A
# reference policy is a frozen copy of the same adapter, proven in the same way.


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
    return {
        key: value for key, value in saved.items() if key in DEFAULTS or getattr(theirs, key) != getattr(plain, key)
    }


def check_base(adapter: Path, config: Any, revision: str | None) -> str:
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
    log.info("starting from adapter %s: %s", adapter, check_base(adapter, model.config, revision))
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
        raise RuntimeError(
            f"model.adapter: {adapter}: {len(differing)} tensors differ in the model ({name}): {differing[0]}"
        )
    return was_equal


def equal_bits(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Bit for bit, the saved one in the precision of the live one."""
    return live.shape == saved.shape and torch.equal(live.detach().cpu(), saved.to(live.dtype))
