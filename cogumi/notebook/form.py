"""A config as a form: its keys bound to the real signatures, checked as a run checks them, and written as a YAML.

Here is the form without its widgets, which scripts can use as well; `cogumi.notebook.form_panel` shows it. trl is never
imported into the kernel: that takes seconds, and a later `cogumi.train` has to import unsloth first. One other process
answers for all forms of a kernel and ends with it.
"""

import dataclasses
import inspect
import os
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, PydanticUndefined, to_jsonable_python

from cogumi.config import schema
from cogumi.config.binding import STRATEGIES, bind_mapping, config_class, reject_unknown
from cogumi.config.limits import FIXED_LORA_KEYS
from cogumi.config.source import PACKAGE, SECTIONS, Origins, parse_scalar, read_source, set_value
from cogumi.config.yaml_text import dump_flow, dump_sections, edit_yaml
from cogumi.core.errors import UsageError
from cogumi.core.notices import is_notebook
from cogumi.core.redact import redact_text
from cogumi.core.run_directory import write_atomic
from cogumi.core.worker import Worker

if TYPE_CHECKING:
    from cogumi.notebook.form_panel import FormPanel

Config = str | os.PathLike[str] | Mapping[str, Any]
Values = dict[str, Any]
Checked = tuple[schema.RunConfig | None, UsageError | None]


def configure(config: Config, save_as: str | os.PathLike[str] | None = None) -> "Form":
    """A form for a config, which a notebook shows: every key with what it is for, what is wrong with it, and the YAML.

    config: a file, a name that `cogumi cp` knows ("smoke/sft"), or a mapping. save_as: the file that the form offers to
    write. The first form of a kernel waits for trl, in another process. Raises UsageError for what is no config.
    """
    return Form(config, save_as)


class Form:
    """A config that is being edited. `values` are those of its YAML, by section, `yaml` is its text; change them by `set`
    and `remove`."""

    def __init__(self, config: Config, save_as: str | os.PathLike[str] | None = None) -> None:
        values, origins = read_source(config)
        reject_unknown(values, SECTIONS, "", origins)
        label = origins.label
        self.text = None if isinstance(config, Mapping) else Path(label).read_text(encoding="utf-8")
        self.source = "a mapping" if self.text is None else str(config)
        self.values: Values = {name: to_yaml_value(bind_mapping(keys, name, origins)) for name, keys in values.items()}
        own = Path("run.yaml" if self.text is None else label)  # over its own file, or here if that is the package's
        self.save_as = Path(save_as or (own.name if own.resolve().is_relative_to(PACKAGE) else own))
        self._panel: FormPanel | None = None
        self.fields: dict[str, list[Field]] = ask_worker(fields_of, self.method)

    @property
    def method(self) -> str:
        """What decides the keys of `train:`; that of a config that says nothing known is sft."""
        said = self.values.get("cogumi", {}).get("method")
        return said if said in schema.TRL_CONFIGS else "sft"

    def field(self, key: str) -> "Field":
        """What a key is. One that its section does not have is text of YAML, so that it can be seen and taken out."""
        section, _, name = key.partition(".")
        unknown = Field(name, "no key of this section", doc="Not a key that a run knows here.")
        return next((each for each in self.fields[section] if each.key == name), unknown)

    def shown(self, section: str) -> dict[str, Any]:
        """The keys that the YAML sets in a section, dotted, with their values, in its order."""
        groups = {each.key.rpartition(".")[0] for each in self.fields[section]}
        found: dict[str, Any] = {}
        for name, value in self.values.get(section, {}).items():
            is_group = isinstance(value, dict) and name in groups
            inner = {f".{key}": each for key, each in value.items()} if is_group else {"": value}
            found |= {f"{section}.{name}{key}": each for key, each in inner.items()}
        return found

    def can_be_added(self, section: str) -> list[str]:
        there = self.shown(section)
        return [each.key for each in self.fields[section] if f"{section}.{each.key}" not in there]

    def get(self, key: str) -> Any:
        return reduce(lambda inner, name: inner[name], key.split("."), self.values)

    def set(self, key: str, value: Any) -> None:
        """Give a key (`train.max_steps`) a value, and add it if it is not there. It is not checked before `problem` is read."""
        set_value(self.values, Origins("form"), key, to_yaml_value(value), f"form.set({key!r})")
        self.show_change(key)

    def add(self, key: str) -> None:
        """Put a key into the YAML, with its default."""
        self.set(key, deepcopy(self.field(key).default))

    def remove(self, key: str) -> None:
        """Take a key out of the YAML. Raises UsageError for one that is not in it."""
        above, _, name = key.rpartition(".")
        try:
            del self.get(above)[name]
        except (KeyError, TypeError):
            raise UsageError(f"{key} is not set in this config, so it cannot be removed") from None
        section, _, group = above.partition(".")
        if group and not self.get(above):  # `fim:` goes with its last key
            del self.values[section][group]
        self.show_change(key)

    def show_change(self, key: str) -> None:
        if key == "cogumi.method":
            self.fields = ask_worker(fields_of, self.method)
        if self._panel is not None:
            self._panel.on_change(key)

    @property
    def config(self) -> schema.RunConfig | None:
        """The run that this is, as `cogumi.train` would read it; None while there is a problem."""
        return self.check()[0]

    @property
    def problem(self) -> str:
        """What is wrong, in one line that names the key; "" when nothing is."""
        error = self.check()[1]
        return "" if error is None else str(error).removeprefix("config: ")

    def check(self) -> Checked:
        found: Checked = ask_worker(check_in_environment, self.run_values(), dict(os.environ))
        return found

    def run_values(self) -> Values:
        """The values as a run of the file would have them: its directory is called after the file."""
        values: Values = {"model": {}, "data": {}, "cogumi": {}} | deepcopy(self.values)
        if values["cogumi"].get("run_dir") is None:
            values["cogumi"]["run_dir"] = f"runs/{self.save_as.stem}"
        return values

    @property
    def yaml(self) -> str:
        """The text that `write` writes: that of the source with the changed values, its comments kept."""
        return self.render(self.values)

    def render(self, values: Values) -> str:
        return dump_sections(values) if self.text is None else edit_yaml(self.text, values)

    def write(self, path: str | os.PathLike[str] | None = None, replace: bool = False) -> Path:
        """Write the YAML, whole or not at all. Raises UsageError for a problem in it, and rather than replace a file."""
        path = Path(path or self.save_as)
        if problem := self.problem:
            raise UsageError(f"{path} is not written: {problem}")
        if path.exists() and not replace:
            fix = f"name another file, or replace it: form.write({str(path)!r}, replace=True)"
            raise UsageError(f"{path} exists", fix=fix)
        try:
            write_atomic(path, self.yaml)
        except OSError as error:
            raise UsageError(f"cannot be written ({error.strerror})", place=path, fix="name another place") from None
        return path

    def __repr__(self) -> str:
        # A notebook keeps this text, so it holds no value.
        keys = sum(len(self.shown(name)) for name in self.values)
        said = redact_text(self.problem) or f"a config for {self.method}; form.write({str(self.save_as)!r}) writes it"
        return f"<form of {self.source}, {keys} keys: {said}>"

    @property
    def panel(self) -> "FormPanel":
        """The widgets, made when they are first asked for."""
        if self._panel is None:
            from cogumi.notebook.form_panel import FormPanel

            self._panel = FormPanel(self)
        return self._panel

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        if not is_notebook():
            return {"text/plain": repr(self)}
        return {**self.panel.box._repr_mimebundle_(), "text/plain": repr(self)}


# ---------------------------------------------------------------------------------------------- keys, of the signatures


@dataclass(frozen=True)
class Field:
    """A key, dotted below its section (`fim.seed`). of: its type, in words. choices: () where a value is typed. default: as
    a YAML holds it."""

    key: str
    of: str = ""
    choices: tuple[Any, ...] = ()
    default: Any = None
    doc: str = ""

    def shown(self, value: Any) -> str:
        """A value as a YAML has it, or as a choice by its word."""
        if self.choices and isinstance(value, bool) and value not in self.choices:
            # YAML reads a bare `no` or `on` as a truth value.
            value = next((word for word in (("on",) if value else ("off", "no")) if word in self.choices), value)
        text = value if isinstance(value, str) else dump_flow(value)
        return text if self.choices or parse_scalar(text) == value else dump_flow(value)


def fields_of(method: str) -> dict[str, list[Field]]:
    """Of every section, for a method. Imports trl, and with it torch."""
    return {
        "model": list(section_fields(schema.ModelSection)),
        "data": list(section_fields(schema.DataSection)),
        "lora": list(dataclass_fields(config_class("LoraConfig"), FIXED_LORA_KEYS)),
        "train": list(dataclass_fields(config_class(schema.TRL_CONFIGS[method]), schema.NOT_ASKED)),
        "cogumi": list(section_fields(schema.CogumiSection)),
    }


def section_fields(section: type[BaseModel], prefix: str = "") -> Iterator[Field]:
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from section_fields(info.annotation, f"{prefix}{name}.")
        else:
            default = None if info.default is PydanticUndefined else info.default
            yield make_field(f"{prefix}{name}", info.annotation, default, info.description or "")


def dataclass_fields(signature: type, left_out: Iterable[str]) -> Iterator[Field]:
    hints = get_type_hints(signature)
    for each in dataclasses.fields(signature):
        if each.init and each.name not in left_out:
            default = None if each.default is dataclasses.MISSING else each.default
            if each.default_factory is not dataclasses.MISSING:
                default = each.default_factory()
            doc = str(each.metadata.get("help", "")).replace("%%", "%")
            yield make_field(each.name, hints[each.name], default, doc)


def make_field(key: str, hint: Any, default: Any, doc: str) -> Field:
    parts = type_parts(hint)
    typed = [part for part in parts if part is not type(None)]
    null: list[Any] = [None] if len(typed) < len(parts) else []
    enums = [part for part in typed if isinstance(part, type) and issubclass(part, Enum)]
    words: list[Any] = []
    if enums and all(part in (str, *enums) for part in typed):  # by what its members are called in a YAML
        words = [*null, *(each.value for each in enums[0])]
    elif all(get_origin(part) is Literal or part is bool for part in typed):
        words = [*null, *(word for part in typed for word in ((True, False) if part is bool else get_args(part)))]
    if key in STRATEGIES and default is None:
        default = "no"
    of = "" if words else " or ".join(map(inspect.formatannotation, [*typed, *null])).replace("None", "null")
    return Field(key, of, tuple(words), to_yaml_value(default), " ".join(doc.split()))


def type_parts(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return type_parts(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return list(dict.fromkeys(part for each in get_args(hint) for part in type_parts(each)))
    return [hint]


def to_yaml_value(value: Any) -> Any:
    """A value as a YAML holds it. Raises UsageError for one that it cannot hold."""
    if dataclasses.is_dataclass(value):
        return {}  # a part of LoraConfig's that has defaults of its own
    try:
        return to_jsonable_python(value, inf_nan_mode="constants")
    except PydanticSerializationError:
        raise UsageError(f"{value!r} is nothing that a YAML can hold", fix="write it as text or numbers") from None


# ---------------------------------------------------------------------------------------------------- the other process

_worker: Worker | None = None
_lock = threading.Lock()


def ask_worker(function: Callable[..., Any], *arguments: Any) -> Any:
    global _worker
    with _lock:
        worker, _worker = _worker, None  # one that is interrupted half-way is not asked again
        if worker is None or worker.process.poll() is not None:
            # The memory of a GPU is for the training.
            worker = Worker("the process that checks configs", {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        worker.send(function, *arguments)
        found = worker.receive()
        _worker = worker
        return found


def check_in_environment(values: Values, environment: Mapping[str, str]) -> Checked:
    os.environ.clear()
    os.environ.update({**environment, "CUDA_VISIBLE_DEVICES": ""})
    try:
        return schema.load_config(values), None
    except UsageError as error:
        return None, error
