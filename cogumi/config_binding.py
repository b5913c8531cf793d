"""Sections of a config, bound to the signatures of the libraries: an unknown key or a wrong type is one line with its place."""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Annotated, Any, Literal, get_origin, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from cogumi.config_source import Origins
from cogumi.errors import UsageError

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
        raise UsageError(f"{origins.get(section, label)}: `{section}:` must be a mapping of keys, not {value!r}")
    return value


def reject_unknown(
    values: Iterable[str], known: Iterable[str], prefix: str, origins: Origins, label: str, where: str = ""
) -> None:
    known = list(known)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"valid: {', '.join(known[:12])}"
            raise UsageError(f"{origins.get(f'{prefix}{key}', label)}: unknown key `{prefix}{key}`{where}; {hint}")


def bind_signature(
    values: dict[str, Any], section: str, signature: type, library: str, origins: Origins, label: str
) -> dict[str, Any]:
    """The section's values, coerced to the types of a library's config dataclass."""
    hints = get_type_hints(signature)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(signature) if f.init}
    return bind_values(values, section, fields, f"{signature.__name__}, {library} {version(library)}", origins, label)


def bind_quantization(values: dict[str, Any], origins: Origins, label: str) -> dict[str, Any]:
    """`model.quantization_config:`, coerced to what the arguments of BitsAndBytesConfig are."""
    from transformers import BitsAndBytesConfig

    section = "model.quantization_config"
    owner = f"BitsAndBytesConfig, transformers {version('transformers')}"
    bound = bind_values(values, section, quantization_hints(BitsAndBytesConfig), owner, origins, label)
    chosen = [key for key in ("load_in_4bit", "load_in_8bit") if bound.get(key)]
    if len(chosen) != 1:
        what = "are both true; drop one" if chosen else "are both false; set one, or drop the section"
        raise UsageError(f"{origins.get(section, label)}: {section}: load_in_4bit and load_in_8bit {what}")
    for key in bound:
        if key.startswith(OF_OTHER_BITS[chosen[0]]):
            place = origins.get(f"{section}.{key}", label)
            raise UsageError(f"{place}: {section}.{key} would be ignored with {chosen[0]}: true; drop it")
    return bound


def quantization_hints(signature: type) -> dict[str, Any]:
    """BitsAndBytesConfig has no annotations: a default says its type, and what is None by default says it here, or is not
    checked."""
    return {
        each.name: QUANTIZATION_TYPES.get(each.name, Any if each.default is None else type(each.default))
        for each in inspect.signature(signature).parameters.values()
        if each.kind is not each.VAR_KEYWORD
    }


def bind_values(
    values: dict[str, Any], section: str, hints: Mapping[str, Any], owner: str, origins: Origins, label: str
) -> dict[str, Any]:
    reject_unknown(values, hints, f"{section}.", origins, label, f" ({owner})")
    bound = {}
    for key, value in values.items():
        try:
            if isinstance(value, bool) and hints[key] in (int, float):  # pydantic would read `yes` as 1
                raise UsageError(f"{origins.get(f'{section}.{key}', label)}: {section}.{key} = {value}: not a number")
            if value is False and key in STRATEGIES:
                value = "no"  # YAML 1.1 reads a bare `no` as False
            # Lax mode: YAML 1.1 reads `5e-7` as a string, which is a float to everybody else.
            bound[key] = TypeAdapter(hints[key], config=None).validate_python(value)
        except ValidationError as error:
            if value is None:  # not a value of this key: `train.beta=null` takes what the file says away
                continue
            wanted = (
                getattr(hints[key], "__name__", str(hints[key])) if isinstance(hints[key], type) else str(hints[key])
            )
            said = error.errors()[0]["msg"]
            if get_origin(hints[key]) is not Annotated:  # what those allow is in the message
                said += f" ({wanted})"
            place = origins.get(f"{section}.{key}", label)
            raise UsageError(f"{place}: {section}.{key} = {value!r}: {said}") from None
    return bound
