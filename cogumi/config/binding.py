"""Sections of a config, bound to the signatures of the libraries: an unknown key or a wrong type is one line with its place.

Importing trl takes seconds, and a misspelt key should not wait for them. So keys and types are first read from the
installed sources. This refuses only what is certain to be wrong. Afterwards a run is bound to the imported classes.
"""

import ast
import builtins
import dataclasses
import difflib
import importlib.util
import re
import typing
from collections.abc import Container, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from cogumi.config.source import Origins, list_names, not_a_section

STRATEGIES = ("save_strategy", "eval_strategy", "logging_strategy")
# A dtype by name, which is what a written config has; code may pass torch's own object.
PLAIN_NAME = BeforeValidator(lambda dtype: str(dtype).removeprefix("torch."))
KEYS_OF_OTHER_BITS = {"load_in_4bit": ("llm_int8_threshold", "llm_int8_has"), "load_in_8bit": ("bnb_4bit",)}
MANY_CHOICES = 8  # more are not listed in a message where one is near
Hints = Mapping[str, Any]
# BitsAndBytesConfig has no annotations. tests/test_config_signatures.py compares this with its signature.
QUANTIZATION: Hints = {
    "load_in_8bit": bool,
    "load_in_4bit": bool,
    "llm_int8_threshold": float,
    "llm_int8_skip_modules": list[str],
    "llm_int8_enable_fp32_cpu_offload": bool,
    "llm_int8_has_fp16_weight": bool,
    "bnb_4bit_compute_dtype": Annotated[Literal["float32", "bfloat16", "float16"], PLAIN_NAME],
    "bnb_4bit_quant_type": Literal["nf4", "fp4"],
    "bnb_4bit_use_double_quant": bool,
    "bnb_4bit_quant_storage": Annotated[
        Literal["uint8", "int8", "float16", "bfloat16", "float32", "float64"], PLAIN_NAME
    ],
}
# Where the classes are defined: the packages import their names lazily, which no source says in a general way.
HOMES = {
    "SFTConfig": "trl.trainer.sft_config",
    "DPOConfig": "trl.trainer.dpo_config",
    "GRPOConfig": "trl.trainer.grpo_config",
    "TrainingArguments": "transformers.training_args",
    "LoraConfig": "peft.tuners.lora.config",
    "PeftConfig": "peft.config",
    "BitsAndBytesConfig": "transformers.utils.quantization_config",
}
REPORTERS = ("transformers.integrations.integration_utils", "INTEGRATION_TO_CALLBACK")
# Keys whose type is plain text, and whose help names, in quotes, the values there are.
NAMED_IN_HELP = (
    "packing_strategy", "truncation_mode", "train_sampling_strategy", "loss_type", "f_divergence_type", "scale_rewards",
    "importance_sampling_level", "multi_objective_aggregation", "vllm_mode", "vllm_model_impl", "vllm_importance_sampling_mode",
)  # fmt: skip
MORE_NAMES = {("GRPOConfig", "loss_type")}  # cogumi has losses of its own (cogumi.config.presets)
QUOTED = re.compile(r"""[`'"]([a-z][a-z0-9_]*)[`'"]""")
# unsloth replaces TRL's config classes with its own, which have more keys; this is where it writes them.
UNSLOTH = "unsloth.models.rl"


def bind_mapping(value: Any, section: str, origins: Origins) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise origins.error(not_a_section(section, value), section)
    return value


def nearest(word: Any, known: Iterable[Any]) -> str | None:
    """The known word that was meant, most likely."""
    return next(iter(difflib.get_close_matches(str(word), map(str, known), n=1)), None)


def reject_unknown(values: Iterable[str], known: Iterable[str], prefix: str, origins: Origins, where: str = "") -> None:
    known = list(known)
    for key in values:
        if key not in known:
            near = nearest(key, known)
            hint = f"did you mean {prefix}{near}?" if near else f"valid: {list_names(known)}"
            raise origins.error(f"unknown key `{prefix}{key}`{where}", f"{prefix}{key}", hint)


def refuse_bits(bound: dict[str, Any], section: str, origins: Origins) -> None:
    """Raise UsageError unless a quantization is to 4 bits or to 8, with nothing beside it that is for the other."""
    chosen = [key for key in ("load_in_4bit", "load_in_8bit") if bound.get(key)]
    if len(chosen) != 1:
        what = "are both true; drop one" if chosen else "are both false; set one, or drop the section"
        raise origins.error(f"{section}: load_in_4bit and load_in_8bit {what}", section)
    for key in bound:
        if key.startswith(KEYS_OF_OTHER_BITS[chosen[0]]):
            ignored = f"{section}.{key} would be ignored with {chosen[0]}: true"
            raise origins.error(ignored, f"{section}.{key}", "drop it")


def bind_values(values: dict[str, Any], section: str, name: str, hints: Hints, origins: Origins) -> dict[str, Any]:
    """The section's values, coerced to the types (`hints`) of the library's config class of this name."""
    reject_unknown(values, hints, f"{section}.", origins, f" ({name}, {owner_of(name)} {version(owner_of(name))})")
    bound = {}
    for key, value in values.items():
        hint = hints[key]
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
            if value is None:  # not a value of this key: `train.beta=null` takes what the file says away
                continue
            said = error.errors()[0]["msg"]
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            if len(choices) > MANY_CHOICES and (near := nearest(value, choices)):
                said = f"did you mean {near}?"
            elif get_origin(hint) not in (Annotated, Literal):  # what those allow is in the message
                said += f" ({hint.__name__ if isinstance(hint, type) else hint})"
            raise origins.error(f"{section}.{key} = {value!r}: {said}", f"{section}.{key}") from None
    return bound


# ------------------------------------------------------------------------------------------------- of imported classes


def owner_of(name: str) -> str:
    """The package of a library's config class."""
    return HOMES[name].partition(".")[0]


def config_class(name: str) -> Any:
    """A library's config class. Imported here: trl brings torch and transformers, and a missing file should not wait."""
    return getattr(importlib.import_module(owner_of(name)), name)


def hints_imported(name: str, asked: Iterable[str] = ()) -> Hints:
    """Type by key of a library's config class, as the class itself says."""
    if name == "BitsAndBytesConfig":
        return QUANTIZATION
    owner = config_class(name)
    hints = get_type_hints(owner)
    return {field.name: hints[field.name] for field in dataclasses.fields(owner) if field.init}


# ------------------------------------------------------------------------------------------------- read from the source


def hints_in_source(name: str, asked: Iterable[str] = ()) -> Hints:
    """Type by key from the library's source, `Any` where only the library can tell. asked: keys unsloth may add."""
    if name == "BitsAndBytesConfig":
        return QUANTIZATION
    try:
        module, definition = find_class(HOMES[name], name)
    except LookupError:
        return hints_imported(name)
    fields = dict(fields_of_class(module, definition))
    if owner_of(name) == "trl" and (unsloth := file_of(UNSLOTH)) is not None:
        text = unsloth.read_text(encoding="utf-8")
        fields |= {key: Any for key in asked if key not in fields and key in text}
    return fields


def reporters_in_source() -> list[str]:
    """What `train.report_to` may name, besides none and all."""
    module, table = REPORTERS
    for each in module_of(module).body:
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Dict) and ast.unparse(each.targets[0]) == table:
            return [str(key.value) for key in each.value.keys if isinstance(key, ast.Constant)]
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
    """The syntax tree of an installed module."""
    path = file_of(name)
    if path is None:
        raise LookupError(f"there is no module {name}")
    return ast.parse(path.read_bytes())


def file_of(name: str) -> Path | None:
    """The file of a module. Its package is found, not imported."""
    package, *inside = name.split(".")
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place, *inside)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def find_class(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """(module, definition) of a class that a module defines or imports from its own package. Raises LookupError."""
    for each in module_of(module).body:
        if isinstance(each, ast.ClassDef) and each.name == name:
            return module, each
        if isinstance(each, ast.ImportFrom) and any((as_.asname or as_.name) == name for as_ in each.names):
            if name in HOMES:
                return find_class(HOMES[name], name)
            relative = "." * each.level + (each.module or "")
            origin = importlib.util.resolve_name(relative, module.rpartition(".")[0])
            if origin.partition(".")[0] == module.partition(".")[0]:
                return find_class(origin, name)
    raise LookupError(f"{module} has no {name}")


def fields_of_class(module: str, definition: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """(key, type) of what a dataclass is built with, its bases' first."""
    for base in map(ast.unparse, definition.bases):
        try:
            found = find_class(module, base)
        except LookupError:  # of another package
            continue
        yield from fields_of_class(*found)
    if not any("dataclass" in ast.unparse(each) for each in definition.decorator_list):
        return
    keys = {
        each.target.id
        for each in definition.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in definition.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and is_argument(each):
            key, hint = each.target.id, type_of(module, each.annotation)
            if key in NAMED_IN_HELP and (definition.name, key) not in MORE_NAMES:
                hint = named_in_help(hint, each, keys)
            yield key, hint


def named_in_help(hint: Any, field: ast.AnnAssign, keys: Container[str]) -> Any:
    """A type of text as a Literal of the words that the field's help quotes; as it is for fewer than two words.
    keys: of the class, which a help may quote too ("when `use_vllm` is set")."""
    texts = (each.value for each in ast.walk(field) if isinstance(each, ast.Constant) and isinstance(each.value, str))
    quoted = dict.fromkeys(QUOTED.findall(" ".join(texts)))
    words: Any = Literal[tuple(word for word in quoted if word not in keys)]
    if len(get_args(words)) < 2 or hint not in (str, list[str]):
        return hint
    return words if hint is str else list[words]


def is_argument(field: ast.AnnAssign) -> bool:
    if "ClassVar" in ast.unparse(field.annotation):
        return False
    options = field.value.keywords if isinstance(field.value, ast.Call) else []
    return not any(each.arg == "init" and plain_value(each.value) is False for each in options)


class Names(dict[str, Any]):
    """What the names of an annotation mean: builtins, `typing`'s, and enumerations as Literals of their values."""

    def __init__(self, module: str) -> None:
        super().__init__(vars(builtins) | {name: getattr(typing, name) for name in typing.__all__})
        self.module, self.choices = module, set[Any]()

    def __missing__(self, name: str) -> Any:
        choices = enumeration(self.module, name)
        if choices is not Any:
            self.choices.add(choices)
        return choices


def type_of(module: str, annotation: ast.expr) -> Any:
    """The type that an annotation means, without importing what it names: `Any` for a class that is no enumeration."""
    names = Names(module)
    if isinstance(annotation, ast.Constant) or any(isinstance(each, ast.Attribute) for each in ast.walk(annotation)):
        return Any  # a type in quotes, or a dotted name
    try:
        hint = eval(ast.unparse(annotation), {"__builtins__": {}}, names)
    except TypeError:  # a part in quotes, or a class that is not followed with something in brackets
        return Any
    parts = get_args(hint)
    if names.choices & set(parts):  # `OptimizerNames | str`: the library makes a member of the text, or raises
        return Union[tuple(part for part in parts if part is not str)]  # noqa: UP007
    return hint


@cache
def enumeration(module: str, name: str) -> Any:
    """The values of an enumeration as a Literal; Any for another class."""
    try:
        _, definition = find_class(module, name)
    except LookupError:
        return Any
    if not any("Enum" in ast.unparse(base) for base in definition.bases):
        return Any
    values = [plain_value(each.value) for each in definition.body if isinstance(each, ast.Assign)]
    return Literal[tuple(values)] if all(isinstance(each, str) for each in values) else Any


def plain_value(node: ast.expr) -> Any:
    return node.value if isinstance(node, ast.Constant) else Any
