"""The keys and types of the libraries' config classes, read from their installed sources: nothing is imported.

Importing trl takes seconds, and a misspelt key should not wait for them. What is read here only refuses what is certain to
be wrong; a run is bound to the real signatures afterwards (`cogumi.config.binding`), and a test compares the two.
"""

import ast
import importlib.util
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args

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
# Keys whose type is plain text, and whose help names, in quotes, the values there are. Some are looked at after a rollout.
NAMED_IN_HELP = (
    "packing_strategy", "truncation_mode", "train_sampling_strategy", "loss_type", "f_divergence_type", "scale_rewards",
    "importance_sampling_level", "multi_objective_aggregation", "vllm_mode", "vllm_model_impl", "vllm_importance_sampling_mode",
)  # fmt: skip
MORE_NAMES = {("GRPOConfig", "loss_type")}  # cogumi has losses of its own (cogumi.config.loss_presets)
QUOTED = re.compile(r"""[`'"]([a-z][a-z0-9_]*)[`'"]""")
# unsloth replaces TRL's config classes with its own, which have more keys; this is where it writes them.
UNSLOTH = "unsloth.models.rl"


def fields_in_source(name: str, asked: Iterable[str] = ()) -> dict[str, Any] | None:
    """Type by key of a config dataclass, by its name in HOMES. `Any` stands for what only the library itself can tell.

    asked: keys that are wanted; those that unsloth may add to a class of TRL are among the result. None where the installed
    version has the class in another place.
    """
    found = find_class(HOMES[name], name)
    if found is None:
        return None
    fields = dict(fields_of_class(*found))
    if HOMES[name].startswith("trl.") and (path := file_of(UNSLOTH)) is not None:
        text = path.read_text(encoding="utf-8")
        fields |= {key: Any for key in asked if key not in fields and key in text}
    return fields


def parameters_in_source(name: str) -> dict[str, Any] | None:
    """Default by argument of a class's `__init__`; `Any` for a default that is no plain value."""
    found = find_class(HOMES[name], name)
    inits = (each for each in found[1].body if isinstance(each, ast.FunctionDef)) if found is not None else ()
    for init in inits:
        if init.name == "__init__":
            names = [each.arg for each in init.args.args]
            defaults = dict(zip(reversed(names), map(plain_value, reversed(init.args.defaults)), strict=False))
            return {each: defaults.get(each, Any) for each in names[1:]}
    return None


def reporters_in_source() -> list[str] | None:
    """What `train.report_to` may name, besides none and all."""
    tree = module_of(REPORTERS[0])
    for each in tree.body if tree is not None else ():
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Dict):
            names = [target.id for target in each.targets if isinstance(target, ast.Name)]
            if REPORTERS[1] in names:
                return [str(key.value) for key in each.value.keys if isinstance(key, ast.Constant)]
    return None


@cache
def module_of(name: str) -> ast.Module | None:
    """The syntax tree of an installed module; None where there is none."""
    path = file_of(name)
    return None if path is None else ast.parse(path.read_bytes())


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


def find_class(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """(module, definition) of a class that a module defines or imports from its own package."""
    tree = module_of(module)
    for each in tree.body if tree is not None else ():
        if isinstance(each, ast.ClassDef) and each.name == name:
            return module, each
        if isinstance(each, ast.ImportFrom) and any((as_.asname or as_.name) == name for as_ in each.names):
            if name in HOMES:
                return find_class(HOMES[name], name)
            parents = module.split(".")[: -each.level] if each.level else []
            origin = ".".join([*parents, *([each.module] if each.module else [])])
            return find_class(origin, name) if origin.split(".")[0] == module.split(".")[0] else None
    return None


def fields_of_class(module: str, definition: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """(key, type) of what a dataclass is built with, its bases' first."""
    for base in definition.bases:
        if isinstance(base, ast.Name) and (found := find_class(module, base.id)) is not None:
            yield from fields_of_class(*found)
    if not any("dataclass" in ast.unparse(each) for each in definition.decorator_list):
        return
    for each in definition.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and is_argument(each):
            key, hint = each.target.id, type_of(module, each.annotation)
            if key in NAMED_IN_HELP and (definition.name, key) not in MORE_NAMES:
                hint = named_in_help(hint, each)
            yield key, hint


def named_in_help(hint: Any, field: ast.AnnAssign) -> Any:
    """A type of text as a Literal of the words that the field's help has in quotes; as it is where those are fewer than two."""
    texts = (each.value for each in ast.walk(field) if isinstance(each, ast.Constant) and isinstance(each.value, str))
    words: Any = Literal[tuple(dict.fromkeys(QUOTED.findall(" ".join(texts))))]
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

    def __init__(self, enumeration: Callable[[str], Any]) -> None:
        super().__init__({each.__name__: each for each in (str, int, float, bool, list, dict, tuple, set)})
        self.update({name: getattr(typing, name) for name in typing.__all__})
        self.enumeration, self.choices = enumeration, set[Any]()

    def __missing__(self, name: str) -> Any:
        choices = self.enumeration(name)
        if choices is not Any:
            self.choices.add(choices)
        return choices


def type_of(module: str, annotation: ast.expr) -> Any:
    """The type that an annotation means, without importing what it names: `Any` for a class that is no enumeration."""
    names = Names(lambda name: enumeration(module, name))
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
    found = find_class(module, name)
    if found is None or not any("Enum" in ast.unparse(base) for base in found[1].bases):
        return Any
    values = [plain_value(each.value) for each in found[1].body if isinstance(each, ast.Assign)]
    return Literal[tuple(values)] if all(isinstance(each, str) for each in values) else Any


def plain_value(node: ast.expr) -> Any:
    return node.value if isinstance(node, ast.Constant) else Any
