"""`cogumi.configure`: a form for the main settings of a config, which writes a short YAML.

The form loads neither torch nor trl: values are checked as `cogumi.start` checks them before it launches a run.
"""

import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from cogumi.config import schema
from cogumi.config.binding import bind_mapping, reject_unknown
from cogumi.config.source import PACKAGE, SECTIONS, Origins, parse_scalar, read_source, set_value
from cogumi.core.errors import UsageError, require_extra
from cogumi.core.notices import is_notebook
from cogumi.core.redact import redact_text
from cogumi.core.run_directory import write_atomic
from cogumi.notebook.html_components import add_style

RL_KEYS = ("train.num_generations", "train.max_completion_length", "cogumi.rewards")
MAIN_KEYS = (
    "model.name", "model.dtype", "model.quantization_config", "data.source", "data.format", "data.max_rows",
    "data.eval_rows", "lora.r", "lora.lora_alpha", "train.max_steps", "train.num_train_epochs", "train.learning_rate",
    "train.per_device_train_batch_size", "train.gradient_accumulation_steps", "train.max_length", "cogumi.method",
    "cogumi.tuning", "cogumi.run_dir", "cogumi.merge", "cogumi.on_red", "cogumi.price_per_hour", *RL_KEYS,
)  # fmt: skip
MESSAGE = '<p role="status">{}</p>'


@dataclass(frozen=True)
class Field:
    """A key of the `model:`, `data:` or `cogumi:` section, dotted below it. choices: () where a value is typed."""

    key: str
    choices: tuple[Any, ...] = ()
    default: Any = None
    doc: str = ""

    def shown(self, value: Any) -> str:
        """Format a value as a YAML has it, or a choice as its word."""
        text = value if isinstance(value, str) else format_value(value)
        return text if self.choices or parse_scalar(text) == value else format_value(value)


def section_fields(section: type[BaseModel], prefix: str = "") -> Iterator[Field]:
    """Yield the keys of a section, those of its groups (`fim.seed`) included."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from section_fields(info.annotation, f"{prefix}{name}.")
            continue
        parts = type_parts(info.annotation)
        words = [word for part in parts for word in ((True, False) if part is bool else get_args(part))]
        is_choice = all(get_origin(part) is Literal or part in (bool, type(None)) for part in parts)
        default = None if info.default is PydanticUndefined else to_jsonable_python(info.default)
        choices = (*([None] if type(None) in parts else []), *words) if is_choice else ()
        yield Field(f"{prefix}{name}", choices, default, info.description or "")


def type_parts(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return type_parts(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [part for each in get_args(hint) for part in type_parts(each)]
    return [hint]


def format_value(value: Any) -> str:
    """Format a value as one line of YAML."""
    text = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf"))
    return text.strip()[1:-1]


def configure(
    config: str | os.PathLike[str] | Mapping[str, Any], save_as: str | os.PathLike[str] | None = None
) -> "Form":
    """A form for the main settings of a config, which a notebook shows; it checks them and writes a short YAML.

    config: a file, a name that `cogumi cp` knows ("smoke/sft"), or a mapping. save_as: the file that the form offers to
    write. Raises UsageError for what is no config.
    """
    return Form(config, save_as)


class Form:
    """A config that is being edited: `values` by section, changed by `set`. Keys that the form does not show stay."""

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any], save_as: str | os.PathLike[str] | None = None
    ) -> None:
        values, origins = read_source(config)
        reject_unknown(values, SECTIONS, "", origins)
        self.values: dict[str, Any] = {name: bind_mapping(keys, name, origins) for name, keys in values.items()}
        is_mapping = isinstance(config, Mapping)
        self.source, file = ("a mapping", Path("run.yaml")) if is_mapping else (str(config), Path(origins.label))
        # A config of the package is written to the working directory.
        self.save_as = Path(save_as or (file.name if file.resolve().is_relative_to(PACKAGE) else file))
        self.fields = {
            f"{section}.{field.key}": field
            for section, model in (
                ("model", schema.ModelSection),
                ("data", schema.DataSection),
                ("cogumi", schema.CogumiSection),
            )
            for field in section_fields(model)
        }
        self._panel: FormPanel | None = None

    @property
    def method(self) -> str:
        return str(self.values.get("cogumi", {}).get("method"))

    def main_keys(self) -> list[str]:
        """Return the settings that the form shows for the method, by section."""
        hidden = ("train.max_length",) if self.method == "gspo" else RL_KEYS
        shown = [key for key in MAIN_KEYS if key not in hidden]
        return sorted(shown, key=lambda key: SECTIONS.index(key.partition(".")[0]))

    def get(self, key: str) -> Any:
        """Return the value of a key (`train.max_steps`); None if the config does not set it."""
        section, _, name = key.partition(".")
        return self.values.get(section, {}).get(name)

    def set(self, key: str, value: Any) -> None:
        """Give a key a value; None removes it, so that its default holds. It is checked when `problem` is read."""
        section, _, name = key.partition(".")
        if value is None and name in self.values.get(section, {}):
            del self.values[section][name]
        elif value is not None:
            set_value(self.values, Origins("form"), key, to_jsonable_python(value), f"form.set({key!r})")
        if self._panel is not None:
            self._panel.show()

    @property
    def config(self) -> schema.RunConfig:
        """The run that this is. Raises UsageError for a value that a run refuses."""
        values = {section: dict(keys) for section, keys in self.values.items() if keys}
        if "cogumi" in values and values["cogumi"].get("run_dir") is None:
            values["cogumi"]["run_dir"] = f"runs/{self.save_as.stem}"
        return schema.read_config(values, {})[0]

    @property
    def problem(self) -> str:
        """What a run would refuse, in one line that names the key; "" if nothing."""
        try:
            self.config  # noqa: B018
        except UsageError as error:
            return str(error).removeprefix("config: ")
        return ""

    @property
    def yaml(self) -> str:
        """The text that `write` writes."""
        values = {section: self.values[section] for section in SECTIONS if self.values.get(section)}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)

    def write(self, path: str | os.PathLike[str] | None = None, replace: bool = False) -> Path:
        """Write the YAML, whole or not at all. Raises UsageError for a problem in it, and rather than replace a file."""
        path = Path(path or self.save_as)
        if problem := self.problem:
            raise UsageError(f"{path} is not written: {problem}")
        if path.exists() and not replace:
            raise UsageError(f"{path} exists", fix=f"name another file, or: form.write({str(path)!r}, replace=True)")
        try:
            write_atomic(path, self.yaml)
        except OSError as error:
            raise UsageError(f"cannot be written ({error.strerror})", place=path, fix="name another place") from None
        return path

    def __repr__(self) -> str:  # without values: a notebook keeps this text
        state = redact_text(self.problem) or f"a config for {self.method}; form.write({str(self.save_as)!r}) writes it"
        return f"<form of {self.source}: {state}>"

    @property
    def panel(self) -> "FormPanel":
        if self._panel is None:
            self._panel = FormPanel(self)
        return self._panel

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        widgets = self.panel.box._repr_mimebundle_() if is_notebook() else {}
        return {**widgets, "text/plain": repr(self)}


class FormPanel:
    """The widgets of a form: an entry for each main setting by key, the YAML, and a button that writes it."""

    def __init__(self, form: Form) -> None:
        require_extra("ipywidgets", "notebook")
        import ipywidgets

        self.form, self.is_filling = form, False
        self.entries: dict[str, Any] = {}
        self.state, self.yaml, self.note = (ipywidgets.HTML() for _ in range(3))
        for key in dict.fromkeys(MAIN_KEYS):
            field = form.fields.get(key, Field(key))
            look = {"description": key, "tooltip": field.doc, "style": {"description_width": "18em"}}
            look["layout"] = {"width": "40em"}
            if field.choices:
                words = {field.shown(choice): choice for choice in field.choices}
                self.entries[key] = ipywidgets.Dropdown(options={"": None} | words, **look)
            else:
                default = field.shown(field.default) if key in form.fields else ""
                self.entries[key] = ipywidgets.Text(placeholder=default, continuous_update=False, **look)
            self.entries[key].observe(self.on_entry, "value")
        self.file = ipywidgets.Text(str(form.save_as), description="file")
        self.replace = ipywidgets.Checkbox(description="replace an existing file", indent=False)
        self.write = ipywidgets.Button(description="write", tooltip="Write the YAML into this file")
        self.write.on_click(self.on_write)
        writing = ipywidgets.HBox([self.file, self.write, self.replace])
        self.rows = ipywidgets.VBox()
        self.box = ipywidgets.VBox([self.state, self.rows, self.yaml, writing, self.note])
        self.box.add_class("cogumi-form")
        self.show()

    def show(self) -> None:
        """Show the form's values, what is wrong with them, and the YAML."""
        self.is_filling = True
        for key, entry in self.entries.items():
            value, field = self.form.get(key), self.form.fields.get(key, Field(key))
            if field.choices:
                value = value if value in field.choices else {True: "on", False: "off"}.get(value)
            entry.value = value if field.choices else "" if value is None else field.shown(value)
        self.is_filling = False
        self.rows.children = [self.entries[key] for key in self.form.main_keys()]
        problem = self.form.problem
        state = f"problem: {problem}" if problem else f"ok: {self.form.source} is a config for {self.form.method}"
        self.state.value = add_style(MESSAGE.format(escape(redact_text(state))))
        text = yaml.safe_dump(schema.redact(yaml.safe_load(self.form.yaml)), sort_keys=False, allow_unicode=True)
        self.yaml.value = add_style(f"<pre>{escape(text)}</pre>")

    def on_entry(self, change: Any) -> None:
        if not self.is_filling:
            value, field = change.new, self.form.fields.get(change.owner.description)
            if not (field and field.choices):
                value = parse_scalar(value) if value.strip() else None
            self.form.set(change.owner.description, value)

    def on_write(self, _: Any) -> None:
        try:
            path = self.form.write(self.file.value.strip() or None, self.replace.value)
            note = f"written: {path}. Next: cogumi.preflight({str(path)!r}), then cogumi.start({str(path)!r})"
        except UsageError as error:
            note = str(error)
        self.note.value = add_style(MESSAGE.format(escape(redact_text(note))))
