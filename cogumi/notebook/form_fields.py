"""The keys of each section, read from the signatures that a run binds them to: type, default, and what they are for.

trl is never imported into the kernel: that takes seconds, and where there is a GPU a later `cogumi.train` has to import unsloth
first. One process answers the questions of all forms of a kernel, and ends with it; each preflight has one of its own.
"""

import dataclasses
import inspect
import os
import re
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, PydanticUndefined, to_jsonable_python

from cogumi.config.binding import STRATEGIES, config_class, hints_imported
from cogumi.config.schema import (
    FIXED_LORA_KEYS,
    TRL_CONFIGS,
    CogumiSection,
    DataSection,
    ModelSection,
    RunConfig,
    load_config,
)
from cogumi.config.yaml_text import dump_flow
from cogumi.core.errors import UsageError
from cogumi.core.worker import Worker
from cogumi.forecast.preflight_report import PreflightReport

Kind = Literal["choice", "check", "number", "text", "yaml"]
Values = dict[str, Any]
WORD_OF: dict[Any, str] = {type(None): "null", Any: "any value", Path: "a path"}


@dataclass(frozen=True)
class Field:
    """A key, dotted below its section (`fim.seed`). default: as a YAML holds it. of: its type, in words."""

    key: str
    kind: Kind
    of: str
    choices: tuple[Any, ...] = ()
    default: Any = None
    doc: str = ""

    def parse(self, text: str) -> Any:
        """The value that was typed, as a YAML would hold it; what is no YAML is the text, which the binding then refuses."""
        if self.kind == "text":
            return None if not text and "null" in self.of else text
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text

    def shown(self, value: Any) -> str:
        """A value as it is typed."""
        if self.kind == "text":
            return "" if value is None else str(value)
        text = value if isinstance(value, str) else dump_flow(value)
        return text if self.parse(text) == value else dump_flow(value)

    def find_choice(self, value: Any) -> Any:
        """The choice that a value is: YAML reads a bare `no` or `on` as a truth value."""
        if not isinstance(value, bool) or value in self.choices:
            return value
        return next((word for word in (("on",) if value else ("off", "no")) if word in self.choices), value)


def fields_of(method: str) -> dict[str, list[Field]]:
    """Of every section, for a method. Imports trl, and with it torch."""
    return {
        "model": list(section_fields(ModelSection)),
        "data": list(section_fields(DataSection)),
        "lora": list(dataclass_fields(config_class("LoraConfig"), FIXED_LORA_KEYS)),
        "train": list(dataclass_fields(config_class(TRL_CONFIGS[method]), ("output_dir",))),
        "cogumi": list(section_fields(CogumiSection)),
    }


def section_fields(section: type[BaseModel], prefix: str = "") -> Iterator[Field]:
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from section_fields(info.annotation, f"{prefix}{name}.")
        elif name == "quantization_config":
            yield from quantization_fields(f"{prefix}{name}.")
        else:
            default = None if info.default is PydanticUndefined else info.default
            yield make_field(f"{prefix}{name}", info.annotation, default, info.description or "")


def quantization_fields(prefix: str) -> Iterator[Field]:
    signature = config_class("BitsAndBytesConfig")
    parameters = inspect.signature(signature).parameters
    for name, hint in hints_imported("BitsAndBytesConfig").items():
        # Its documentation is one text: `name (type): words` until the next name.
        said = re.search(rf"^ +{name} \(.*?\):\n(.*?)(?=^ +\w+ \(|\Z)", signature.__doc__ or "", re.M | re.S)
        yield make_field(f"{prefix}{name}", hint, parameters[name].default, said[1] if said else "")


def dataclass_fields(signature: type, left_out: Iterable[str]) -> Iterator[Field]:
    hints = get_type_hints(signature)
    for each in dataclasses.fields(signature):
        if not each.init or each.name in left_out:
            continue
        default = None if each.default is dataclasses.MISSING else each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        yield make_field(each.name, hints[each.name], default, str(each.metadata.get("help", "")).replace("%%", "%"))


def make_field(key: str, hint: Any, default: Any, doc: str) -> Field:
    kind, choices = kind_of(hint)
    if key in STRATEGIES and default is None:
        default = "no"
    of = "" if kind in ("choice", "check") else describe_type(hint)  # the widget shows what there is
    return Field(key, kind, of, choices, to_yaml_value(default), " ".join(doc.split()))


def kind_of(hint: Any) -> tuple[Kind, tuple[Any, ...]]:
    """What a key of this type is entered with, and what there is to choose from."""
    parts = [part for part in type_parts(hint) if part is not type(None)]
    chosen: list[Any] = [None] if type(None) in type_parts(hint) else []
    enums = [part for part in parts if isinstance(part, type) and issubclass(part, Enum)]
    if enums and all(part in (str, *enums) for part in parts):  # by what its members are called in a YAML
        return "choice", (*chosen, *(each.value for each in enums[0]))
    if parts == [bool] and not chosen:
        return "check", ()
    if all(get_origin(part) is Literal or part is bool for part in parts):
        words = [word for part in parts for word in ((True, False) if part is bool else get_args(part))]
        return "choice", (*chosen, *words)
    if all(part in (int, float) for part in parts):
        return "number", ()
    return ("text" if all(part in (str, Path) for part in parts) else "yaml"), ()


def type_parts(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return type_parts(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [part for each in get_args(hint) for part in type_parts(each)]
    return [hint]


def describe_type(hint: Any) -> str:
    """A type as one says it: `int or null`."""
    said = []
    for part in type_parts(hint):
        if get_origin(part) is Literal:
            said += [dump_flow(each) for each in get_args(part)]
        else:
            name = part.__name__ if isinstance(part, type) and not get_args(part) else str(part)
            said.append(WORD_OF.get(part, name.replace("typing.", "").replace("cogumi.config.schema.", "")))
    return " or ".join(sorted(dict.fromkeys(said), key="null".__eq__))


def to_yaml_value(value: Any) -> Any:
    """A value as a YAML holds it. Raises UsageError for one that it cannot hold."""
    if dataclasses.is_dataclass(value):
        return {}  # a part of LoraConfig's that has defaults of its own
    try:
        return to_jsonable_python(value, inf_nan_mode="constants")
    except PydanticSerializationError:
        raise UsageError(f"{value!r} is nothing that a YAML can hold", fix="write it as text or numbers") from None


# -------------------------------------------------------------------------------------------------- the other processes

_worker: Worker | None = None
_lock = threading.Lock()


def read_fields(method: str) -> dict[str, list[Field]]:
    """`fields_of`, from the other process."""
    found: dict[str, list[Field]] = ask_worker(fields_of, method)
    return found


def check_values(values: Values) -> RunConfig:
    """`load_config` of the values and this environment, from the other process. Raises its UsageError."""
    run: RunConfig = ask_worker(load_in_environment, values, dict(os.environ))
    return run


def ask_worker(function: Callable[..., Any], *arguments: Any) -> Any:
    global _worker
    with _lock:
        worker, _worker = _worker, None  # one that is interrupted half-way is not asked again
        if worker is None or worker.process.poll() is not None:
            # The memory of a GPU is for the training.
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            worker = Worker("the process that checks configs", environment)
        worker.send(function, *arguments)
        try:
            found = worker.receive()
        except UsageError:
            _worker = worker
            raise
        _worker = worker
        return found


def load_in_environment(values: Values, environment: Mapping[str, str]) -> RunConfig:
    os.environ.clear()
    os.environ.update({**environment, "CUDA_VISIBLE_DEVICES": ""})
    return load_config(values)


def begin_preflight(values: Values, card: str | None) -> Worker:
    """The process of a preflight, whose `receive` gives its report."""
    worker = Worker("the preflight", os.environ)
    worker.send(preflight, values, card)
    return worker


def preflight(values: Values, card: str | None) -> PreflightReport:
    from cogumi.stack.gpus import use_one_gpu

    use_one_gpu()
    from cogumi.forecast.run_forecast import forecast_in_process, forecast_run

    return forecast_run(values, card, None, {}, forecast_in_process)
