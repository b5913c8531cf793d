"""Sections of a config, bound to the signatures of the libraries: an unknown key or a wrong type is one line with its place."""

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from enum import Enum
from importlib.metadata import version
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from cogumi.config.source import Origins, listed, no_section
from cogumi.config.trl_keys import fields_in_source, parameters_in_source
from cogumi.core.errors import UsageError

STRATEGIES = ("save_strategy", "eval_strategy", "logging_strategy")
# A dtype by name, which is what a written config has; code may pass torch's own object.
PLAIN_NAME = BeforeValidator(lambda dtype: str(dtype).removeprefix("torch."))
# Of BitsAndBytesConfig: the arguments whose default does not say what they are.
QUANTIZATION_TYPES = {
    "llm_int8_skip_modules": list[str],
    "bnb_4bit_compute_dtype": Annotated[Literal["float32", "bfloat16", "float16"], PLAIN_NAME],
    "bnb_4bit_quant_type": Literal["nf4", "fp4"],
    "bnb_4bit_quant_storage": Annotated[
        Literal["uint8", "int8", "float16", "bfloat16", "float32", "float64"], PLAIN_NAME
    ],
}
OF_OTHER_BITS = {"load_in_4bit": ("llm_int8_threshold", "llm_int8_has"), "load_in_8bit": ("bnb_4bit",)}


def bind_mapping(value: Any, section: str, origins: Origins, label: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(no_section(section, value), key=section, place=origins.get(section, label))
    return value


def nearest(word: Any, known: Iterable[Any]) -> str | None:
    """The known word that was meant, most likely."""
    return next(iter(difflib.get_close_matches(str(word), map(str, known), n=1)), None)


def reject_unknown(
    values: Iterable[str], known: Iterable[str], prefix: str, origins: Origins, label: str, where: str = ""
) -> None:
    known = list(known)
    for key in values:
        if key not in known:
            near = nearest(key, known)
            hint = f"did you mean {prefix}{near}?" if near else f"valid: {listed(known)}"
            raise UsageError(
                f"unknown key `{prefix}{key}`{where}",
                key=f"{prefix}{key}",
                place=origins.get(f"{prefix}{key}", label),
                fix=hint,
            )


# The library and the class of each section, and how its keys are found: imported, or read from its source.
OWNERS = {
    "SFTConfig": "trl",
    "DPOConfig": "trl",
    "GRPOConfig": "trl",
    "LoraConfig": "peft",
    "BitsAndBytesConfig": "transformers",
}
WITHOUT_ANNOTATIONS = ("BitsAndBytesConfig",)
MANY_CHOICES = 8  # more are not listed in a message where one is near
Hints = Mapping[str, Any]


def config_class(name: str) -> Any:
    """A library's config class. Imported here: trl brings torch and transformers, and a missing file should not wait."""
    return getattr(importlib.import_module(OWNERS[name]), name)


def hints_imported(name: str, asked: Iterable[str] = ()) -> Hints:
    """Type by key of a library's config class, as the class itself says."""
    signature = config_class(name)
    if name in WITHOUT_ANNOTATIONS:
        parameters = inspect.signature(signature).parameters.values()
        return hints_of_defaults({each.name: each.default for each in parameters if each.kind is not each.VAR_KEYWORD})
    hints = get_type_hints(signature)
    return {field.name: hints[field.name] for field in dataclasses.fields(signature) if field.init}


def hints_in_source(name: str, asked: Iterable[str] = ()) -> Hints | None:
    """The same without importing the library; None where its source does not tell."""
    if name in WITHOUT_ANNOTATIONS:
        defaults = parameters_in_source(name)
        return None if defaults is None else hints_of_defaults(defaults)
    return fields_in_source(name, asked)


def hints_of_defaults(defaults: Mapping[str, Any]) -> Hints:
    """BitsAndBytesConfig has no annotations: a default says its type, and what is None by default says it here, or is not
    checked."""
    return {
        name: QUANTIZATION_TYPES.get(name, Any if default in (None, Any) else type(default))
        for name, default in defaults.items()
    }


def bind_class(
    values: dict[str, Any], section: str, name: str, hints: Hints, origins: Origins, label: str
) -> dict[str, Any]:
    """The section's values, coerced to the types of a library's config class."""
    owner = f"{name}, {OWNERS[name]} {version(OWNERS[name])}"
    return bind_values(values, section, hints, owner, origins, label)


def refuse_bits(bound: dict[str, Any], section: str, origins: Origins, label: str) -> None:
    """Raise UsageError unless a quantization is to 4 bits or to 8, with nothing beside it that is for the other."""
    chosen = [key for key in ("load_in_4bit", "load_in_8bit") if bound.get(key)]
    if len(chosen) != 1:
        what = "are both true; drop one" if chosen else "are both false; set one, or drop the section"
        raise UsageError(
            f"{section}: load_in_4bit and load_in_8bit {what}", key=section, place=origins.get(section, label)
        )
    for key in bound:
        if key.startswith(OF_OTHER_BITS[chosen[0]]):
            place = origins.get(f"{section}.{key}", label)
            raise UsageError(
                f"{section}.{key} would be ignored with {chosen[0]}: true",
                key=f"{section}.{key}",
                place=place,
                fix="drop it",
            )


def bind_values(
    values: dict[str, Any], section: str, hints: Mapping[str, Any], owner: str, origins: Origins, label: str
) -> dict[str, Any]:
    reject_unknown(values, hints, f"{section}.", origins, label, f" ({owner})")
    bound = {}
    for key, value in values.items():
        try:
            if isinstance(value, bool) and hints[key] in (int, float):  # pydantic would read `yes` as 1
                raise UsageError(
                    f"{section}.{key} = {value}: not a number",
                    key=f"{section}.{key}",
                    place=origins.get(f"{section}.{key}", label),
                )
            if value is False and key in STRATEGIES:
                value = "no"  # YAML 1.1 reads a bare `no` as False
            elif isinstance(value, Enum):
                value = value.value  # as a YAML holds it
            # Lax mode: YAML 1.1 reads `5e-7` as a string, which is a float to everybody else.
            bound[key] = TypeAdapter(hints[key], config=None).validate_python(value)
        except ValidationError as error:
            if value is None:  # not a value of this key: `train.beta=null` takes what the file says away
                continue
            wanted = (
                getattr(hints[key], "__name__", str(hints[key])) if isinstance(hints[key], type) else str(hints[key])
            )
            said = error.errors()[0]["msg"]
            choices = get_args(hints[key]) if get_origin(hints[key]) is Literal else ()
            if len(choices) > MANY_CHOICES and (near := nearest(value, choices)):
                said = f"did you mean {near}?"
            elif get_origin(hints[key]) not in (Annotated, Literal):  # what those allow is in the message
                said += f" ({wanted})"
            place = origins.get(f"{section}.{key}", label)
            raise UsageError(f"{section}.{key} = {value!r}: {said}", key=f"{section}.{key}", place=place) from None
    return bound
