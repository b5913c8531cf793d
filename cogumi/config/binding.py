"""Bind sections of a config to the signatures of the libraries: a wrong key, type or value is one line with its place.

Importing trl takes seconds, and a misspelt key should not wait for them. Keys and types are therefore read from the
installed sources, which refuses only what is certain to be wrong. The classes are imported where the source does not say it.
"""

import ast
import builtins
import dataclasses
import difflib
import importlib.util
import re
import typing
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from cogumi.config.source import Origins, not_a_section
from cogumi.core.formatting import join_names

STRATEGIES = ("save_strategy", "eval_strategy", "logging_strategy")
# A dtype by name, which is what a written config has; code may pass torch's own object.
PLAIN_NAME = BeforeValidator(lambda dtype: str(dtype).removeprefix("torch."))
KEYS_OF_OTHER_BITS = {"load_in_4bit": ("llm_int8_threshold", "llm_int8_has"), "load_in_8bit": ("bnb_4bit",)}
MANY_CHOICES = 8  # more are not listed in a message where one is near
Hints = Mapping[str, Any]
# BitsAndBytesConfig has no annotations. tests/test_config_signatures.py compares this with its signature.
QUANTIZATION: Hints = {
    "load_in_8bit": bool, "load_in_4bit": bool, "llm_int8_threshold": float, "llm_int8_skip_modules": list[str],
    "llm_int8_enable_fp32_cpu_offload": bool, "llm_int8_has_fp16_weight": bool,
    "bnb_4bit_compute_dtype": Annotated[Literal["float32", "bfloat16", "float16"], PLAIN_NAME],
    "bnb_4bit_quant_type": Literal["nf4", "fp4"], "bnb_4bit_use_double_quant": bool,
    "bnb_4bit_quant_storage": Annotated[Literal["uint8", "int8", "float16", "bfloat16", "float32", "float64"], PLAIN_NAME],
}  # fmt: skip
# Where the classes are defined: the packages import their names lazily, which no source says in a general way.
HOMES = {
    "SFTConfig": "trl.trainer.sft_config", "DPOConfig": "trl.trainer.dpo_config", "GRPOConfig": "trl.trainer.grpo_config",
    "TrainingArguments": "transformers.training_args", "LoraConfig": "peft.tuners.lora.config", "PeftConfig": "peft.config",
    "BitsAndBytesConfig": "transformers.utils.quantization_config",
}  # fmt: skip
REPORTERS = ("transformers.integrations.integration_utils", "INTEGRATION_TO_CALLBACK")
# Keys whose type is plain text, and whose help names, in quotes, the values there are.
NAMED_IN_HELP = (
    "packing_strategy", "truncation_mode", "train_sampling_strategy", "loss_type", "f_divergence_type", "scale_rewards",
    "importance_sampling_level", "multi_objective_aggregation", "vllm_mode", "vllm_model_impl", "vllm_importance_sampling_mode",
)  # fmt: skip
MORE_NAMES = {("GRPOConfig", "loss_type")}  # cogumi has losses of its own (cogumi.config.presets)
QUOTED = re.compile(r"""[`'"]([a-z][a-z0-9_]*)[`'"]""")
# unsloth replaces TRL's config classes with its own, which have more keys; this is where it writes them.
UNSLOTH_CONFIG_MODULE = "unsloth.models.rl"
# Names of settings elsewhere that no spelling leads from to the library's own.
ALIASES = {
    "lora.rank": "r", "train.lr": "learning_rate", "train.epochs": "num_train_epochs", "train.max_seq_length": "max_length",
    "train.batch_size": "per_device_train_batch_size",
}  # fmt: skip
# New names of keys of `train:`, and the old ones: transformers 5.17 knows the old alone, 5.24 warns of them.
RENAMED_TRAIN_KEYS = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
# Keys of LoraConfig that a run cannot choose, and the reason.
FIXED_LORA_KEYS = {
    "peft_type": "cogumi trains LoRA and no other kind of adapter",
    "task_type": "the model is a causal language model",
    "inference_mode": "a frozen adapter does not train",
    "base_model_name_or_path": "the base is model.name",
    "revision": "the base's is model.revision",
    "auto_mapping": "PEFT writes it",
    "peft_version": "PEFT writes it",
}
# Values of lora.init_lora_weights that need a pass over the data or gradients before training.
PREPARED_INITS = ("eva", "corda")
# Limits that the types do not express: {rule in words: (predicate, keys)}.
RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "must be at least 1": (
        lambda n: n >= 1,
        ("train.per_device_train_batch_size", "train.per_device_eval_batch_size", "train.gradient_accumulation_steps",
         "train.save_total_limit", "train.max_completion_length", "train.steps_per_generation", "train.num_iterations",
         "train.vllm_max_model_length", "lora.r"),
    ),
    "must be 1, as a run is one process; a server may have more": (lambda n: n == 1, ("train.vllm_tensor_parallel_size",)),
    "must be at least 1, or -1 for train.num_train_epochs": (lambda n: n >= 1 or n == -1, ("train.max_steps",)),
    "must be at least 1 step, or a share of all steps below 1":
        (lambda n: n > 0, ("train.save_steps", "train.logging_steps", "train.eval_steps")),
    "must be more than 0": (lambda n: 0 < n < inf, ("train.num_train_epochs", "train.repetition_penalty")),
    "must be more than 0, because GRPO samples; 1.0 samples from the model as it is":
        (lambda n: 0 < n < inf, ("train.temperature",)),
    "must be more than 0 and at most 1": (lambda n: 0 < n <= 1, ("train.top_p", "train.vllm_gpu_memory_utilization")),
    "must be at least 0 and at most 1": (lambda n: 0 <= n <= 1, ("train.min_p",)),
    "must be at least 1, or 0 for all tokens": (lambda n: n >= 0, ("train.top_k",)),
    "must be 0 or more": (lambda n: 0 <= n < inf, ("train.learning_rate", "train.weight_decay", "train.warmup_steps")),
    "must be at least 0 and below 1":
        (lambda n: 0 <= n < 1, ("train.adam_beta1", "train.adam_beta2", "lora.lora_dropout")),
}  # fmt: skip


def bind_mapping(value: Any, section: str, origins: Origins) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise origins.error(not_a_section(section, value), section)
    return value


def nearest(word: Any, known: Iterable[Any]) -> str | None:
    return next(iter(difflib.get_close_matches(str(word), map(str, known), n=1)), None)


def reject_unknown(values: Iterable[str], known: Iterable[str], prefix: str, origins: Origins, where: str = "") -> None:
    known = list(known)
    for key in values:
        if key not in known:
            near = ALIASES.get(f"{prefix}{key}") or nearest(key, known)
            hint = f"did you mean {prefix}{near}?" if near else f"valid: {join_names(known)}"
            raise origins.error(f"unknown key `{prefix}{key}`{where}", f"{prefix}{key}", hint)


def bind_values(values: dict[str, Any], section: str, name: str, origins: Origins) -> dict[str, Any]:
    """Coerce the section's values to the types of the library's config class `name`."""
    hints = hints_in_source(name, values)
    reject_unknown(values, hints, f"{section}.", origins, f" ({name}, {owner_of(name)} {version(owner_of(name))})")
    bound = {}
    for key, value in values.items():
        hint = hints[key]
        is_class = hint is Any or (Any in get_args(hint) and get_origin(hint) is not dict)
        if isinstance(value, dict) and is_class:  # of the library, which the source does not resolve
            hint = hints_imported(name).get(key, hint)
        try:
            if isinstance(value, bool) and hint in (int, float):  # pydantic would read `yes` as 1
                raise origins.error(f"{section}.{key} = {value}: not a number", f"{section}.{key}")
            if value is False and key in STRATEGIES:
                value = "no"  # YAML 1.1 reads a bare `no` as False
            elif isinstance(value, Enum):
                value = value.value  # as a YAML holds it
            # Lax mode: YAML 1.1 reads `5e-7` as a string, which is a float to everybody else.
            bound[key] = TypeAdapter(hint).validate_python(value)
        except ValidationError as error:
            if value is None:  # no value of this key: `train.beta=null` removes the one of the file
                continue
            problem = error.errors()[0]["msg"]
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            if len(choices) > MANY_CHOICES and (near := nearest(value, choices)):
                problem = f"did you mean {near}?"
            elif get_origin(hint) not in (Annotated, Literal):  # their message lists the allowed values
                problem += f" ({hint.__name__ if isinstance(hint, type) else hint})"
            raise origins.error(f"{section}.{key} = {value!r}: {problem}", f"{section}.{key}") from None
    return bound


def refuse_out_of_range(section: str, values: dict[str, Any], origins: Origins) -> None:
    """Raise UsageError for numbers out of range, which libraries replace by a default or reject late."""
    for rule, (is_valid, keys) in RANGES.items():
        for key in keys:
            name = key.removeprefix(f"{section}.")
            value = values.get(name) if name != key else None
            if isinstance(value, int | float) and not is_valid(value):
                raise origins.error(f"{key} = {value:g}: {rule}", key)


# ---------------------------------------------------------------------------------------------------- imported classes


def owner_of(name: str) -> str:
    return HOMES[name].partition(".")[0]


def config_class(name: str) -> Any:
    """Import a library's config class; trl imports torch and transformers."""
    return getattr(importlib.import_module(owner_of(name)), name)


def hints_imported(name: str) -> Hints:
    """Return the type of each key of a library's config class."""
    owner = config_class(name)
    hints = get_type_hints(owner)
    return {field.name: hints[field.name] for field in dataclasses.fields(owner) if field.init}


# ------------------------------------------------------------------------------------------------------------- sources


def hints_in_source(name: str, keys: Iterable[str] = ()) -> Hints:
    """Read the type of each key from the library's source; `Any` if only the library can tell.

    keys: those of the config, which unsloth may have added to TRL's.
    """
    if name == "BitsAndBytesConfig":
        return QUANTIZATION
    try:
        module, definition = find_class(HOMES[name], name)
    except LookupError:
        return hints_imported(name)
    fields = {key: hint for key, hint, _ in fields_of_class(module, definition)}
    if owner_of(name) == "trl" and (unsloth := file_of(UNSLOTH_CONFIG_MODULE)) is not None:
        text = unsloth.read_text(encoding="utf-8")
        fields |= {key: Any for key in keys if key not in fields and key in text}
    return fields


@cache
def defaults_in_source(name: str) -> Mapping[str, Any]:
    """Read the default of each key from the library's source; keys whose default is computed are left out."""
    fields = fields_of_class(*find_class(HOMES[name], name))
    return {key: default for key, _, default in fields if default is not dataclasses.MISSING}


def reporters_in_source() -> list[str]:
    """Return the values of `train.report_to` besides none and all."""
    module, table = REPORTERS
    for node in module_of(module).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == table:
            return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    raise LookupError(f"{module} has no {table}")


def losses_in_source() -> list[str]:
    """Return TRL's own values of GRPOConfig's `loss_type`, which its help lists as supported."""
    _, definition = find_class(HOMES["GRPOConfig"], "GRPOConfig")
    fields = (node for node in definition.body if isinstance(node, ast.AnnAssign))
    field = next(node for node in fields if ast.unparse(node.target) == "loss_type")
    texts = [node.value for node in ast.walk(field) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return QUOTED.findall(" ".join(texts).partition("Supported values are")[2].partition(". ")[0])


@cache
def module_of(name: str) -> ast.Module:
    """Parse an installed module without importing it."""
    path = file_of(name)
    if path is None:
        raise LookupError(f"there is no module {name}")
    return ast.parse(path.read_bytes())


def file_of(name: str) -> Path | None:
    """Return the file of a module, without importing its package."""
    package, *inside = name.split(".")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder, *inside)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def find_class(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """Find (module, definition) of a class that a module defines or imports from its own package, or LookupError."""
    for node in module_of(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            if name in HOMES:
                return find_class(HOMES[name], name)
            relative = "." * node.level + (node.module or "")
            origin = importlib.util.resolve_name(relative, module.rpartition(".")[0])
            if origin.partition(".")[0] == module.partition(".")[0]:
                return find_class(origin, name)
    raise LookupError(f"{module} has no {name}")


def fields_of_class(module: str, definition: ast.ClassDef) -> Iterator[tuple[str, Any, Any]]:
    """Iterate over (key, type, default) of a dataclass's arguments, those of its bases first.

    The default is dataclasses.MISSING where it is no literal.
    """
    for base in map(ast.unparse, definition.bases):
        try:
            base_definition = find_class(module, base)
        except LookupError:  # of another package
            continue
        yield from fields_of_class(*base_definition)
    if not any("dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list):
        return
    fields = {ast.unparse(node.target): node for node in definition.body if isinstance(node, ast.AnnAssign)}
    for key, node in fields.items():
        options = node.value.keywords if isinstance(node.value, ast.Call) else []
        is_fixed = any(option.arg == "init" and plain_value(option.value) is False for option in options)
        if is_fixed or "ClassVar" in ast.unparse(node.annotation):
            continue
        hint = type_of(module, node.annotation)
        if key in NAMED_IN_HELP and (definition.name, key) not in MORE_NAMES:
            hint = named_in_help(hint, node, fields)
        default = next((option.value for option in options if option.arg == "default"), None if options else node.value)
        try:
            yield key, hint, dataclasses.MISSING if default is None else ast.literal_eval(default)
        except ValueError:
            yield key, hint, dataclasses.MISSING


def named_in_help(hint: Any, field: ast.AnnAssign, keys: Container[str]) -> Any:
    """Narrow a type of text to the words that the field's help quotes, if it quotes at least two.

    keys: of the class, which a help may quote too ("when `use_vllm` is set").
    """
    texts = (node.value for node in ast.walk(field) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    quoted = dict.fromkeys(QUOTED.findall(" ".join(texts)))
    words: Any = Literal[tuple(word for word in quoted if word not in keys)]
    if len(get_args(words)) < 2 or hint not in (str, list[str]):
        return hint
    return words if hint is str else list[words]


def type_of(module: str, annotation: ast.expr) -> Any:
    """Evaluate an annotation without importing its classes: `Any` for a class that is no enumeration."""
    if isinstance(annotation, ast.Constant) or any(isinstance(node, ast.Attribute) for node in ast.walk(annotation)):
        return Any  # a type in quotes, or a dotted name
    known = vars(builtins) | {name: getattr(typing, name) for name in typing.__all__}
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} - known.keys()
    classes = {name: enumeration(module, name) for name in names}
    try:
        hint = eval(ast.unparse(annotation), {"__builtins__": {}}, known | classes)
    except TypeError:  # a part in quotes, or an unresolved class with a subscript
        return Any
    parts = get_args(hint)
    if set(parts) & {choices for choices in classes.values() if choices is not Any}:
        # `OptimizerNames | str`: the library converts the text, or raises
        return Union[tuple(part for part in parts if part is not str)]  # noqa: UP007
    return hint


@cache
def enumeration(module: str, name: str) -> Any:
    """Return the values of an enumeration as a Literal; Any for another class."""
    try:
        _, definition = find_class(module, name)
    except LookupError:
        return Any
    if not any("Enum" in ast.unparse(base) for base in definition.bases):
        return Any
    values = [plain_value(node.value) for node in definition.body if isinstance(node, ast.Assign)]
    return Literal[tuple(values)] if all(isinstance(value, str) for value in values) else Any


def plain_value(node: ast.expr) -> Any:
    return node.value if isinstance(node, ast.Constant) else Any
