"""`cogumi.configure`: a form for the main settings of a config, which writes a short YAML.

The form loads neither torch nor trl: values are checked as `cogumi.start` checks them before it launches a run.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from cogumi.config import schema
from cogumi.config.binding import bind_mapping, reject_unknown
from cogumi.config.source import PACKAGE, SECTIONS, Config, Origins, parse_scalar, read_source, set_value
from cogumi.core.errors import UsageError, require_extra
from cogumi.core.notices import is_notebook
from cogumi.core.redact import redact_text
from cogumi.core.run_directory import write_atomic
from cogumi.notebook.html_components import add_style, escape_text

RL_KEYS = ("train.num_generations", "train.max_completion_length", "cogumi.rewards")
MAIN_KEYS = (
    "model.name", "model.dtype", "model.quantization_config", "lora.r", "lora.lora_alpha", "data.source", "data.format",
    "data.max_rows", "data.eval_rows", "train.max_steps", "train.num_train_epochs", "train.learning_rate",
    "train.per_device_train_batch_size", "train.gradient_accumulation_steps", "train.max_length", "train.num_generations",
    "train.max_completion_length", "cogumi.method", "cogumi.tuning", "cogumi.run_dir", "cogumi.merge", "cogumi.on_red",
    "cogumi.price_per_hour", "cogumi.rewards",
)  # fmt: skip
SCHEMA: dict[str, type[BaseModel]] = {
    "model": schema.ModelSection,
    "data": schema.DataSection,
    "cogumi": schema.CogumiSection,
}
MESSAGE = '<p role="status">{}</p>'


def configure(config: Config, save_as: str | os.PathLike[str] | None = None) -> "Form":
    """A form for the main settings of a config, which a notebook shows; it checks them and writes a short YAML.

    config: a file, a name that `cogumi cp` knows ("smoke/sft"), or a mapping. save_as: the file that the form offers to
    write. Raises UsageError for what is no config.
    """
    return Form(config, save_as)


class Form:
    """A config that is being edited: `values` by section, changed by `set`. Keys that the form does not show stay."""

    def __init__(self, config: Config, save_as: str | os.PathLike[str] | None = None) -> None:
        values, origins = read_source(config)
        reject_unknown(values, SECTIONS, "", origins)
        self.values: dict[str, Any] = {name: bind_mapping(keys, name, origins) for name, keys in values.items()}
        is_mapping = isinstance(config, Mapping)
        self.source, file = ("a mapping", Path("run.yaml")) if is_mapping else (str(config), Path(origins.label))
        # A config of the package is written to the working directory.
        self.save_as = Path(save_as or (file.name if file.resolve().is_relative_to(PACKAGE) else file))
        self._panel: FormPanel | None = None

    @property
    def method(self) -> str:
        return str(self.values.get("cogumi", {}).get("method"))

    def main_keys(self) -> list[str]:
        hidden = ("train.max_length",) if self.method == "gspo" else RL_KEYS
        return [key for key in MAIN_KEYS if key not in hidden]

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
        """Error that a run would raise, in one line that names the key; "" if none."""
        try:
            self.config  # noqa: B018
        except UsageError as error:
            return str(error).removeprefix("config: ")
        return ""

    @property
    def yaml(self) -> str:
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
        self.state, self.yaml, self.note = (ipywidgets.HTML() for _ in range(3))
        self.entries: dict[str, Any] = {}
        for key in MAIN_KEYS:
            section, _, name = key.partition(".")
            info = SCHEMA[section].model_fields[name] if section in SCHEMA else None
            look = {"description": key, "style": {"description_width": "18em"}, "layout": {"width": "40em"}}
            look["tooltip"] = (info and info.description) or ""
            words = (True, False) if info and info.annotation is bool else info and get_args(info.annotation)
            if words and all(isinstance(word, str | bool) for word in words):
                self.entries[key] = ipywidgets.Dropdown(
                    options={"": None} | {str(word): word for word in words}, **look
                )
            else:
                self.entries[key] = ipywidgets.Text(continuous_update=False, **look)
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
        self.is_filling = True
        for key, entry in self.entries.items():
            value = self.form.get(key)
            if hasattr(entry, "options"):
                entry.value = value if value in dict(entry.options).values() else None
            else:
                entry.value = "" if value is None else format_value(value)
        self.is_filling = False
        self.rows.children = [self.entries[key] for key in self.form.main_keys()]
        problem = self.form.problem
        state = f"problem: {problem}" if problem else f"ok: {self.form.source} is a config for {self.form.method}"
        self.state.value = add_style(MESSAGE.format(escape_text(state)))
        text = yaml.safe_dump(schema.redact(yaml.safe_load(self.form.yaml)), sort_keys=False, allow_unicode=True)
        self.yaml.value = add_style(f"<pre>{escape_text(text)}</pre>")

    def on_entry(self, change: Any) -> None:
        if not self.is_filling:
            value = change.new
            if not hasattr(change.owner, "options"):
                value = parse_scalar(value) if value.strip() else None
            self.form.set(change.owner.description, value)

    def on_write(self, _: Any) -> None:
        try:
            path = self.form.write(self.file.value.strip() or None, self.replace.value)
            note = f"written: {path}. Next: cogumi.preflight({str(path)!r}), then cogumi.start({str(path)!r})"
        except UsageError as error:
            note = str(error)
        self.note.value = add_style(MESSAGE.format(escape_text(note)))


def format_value(value: Any) -> str:
    if isinstance(value, str) and parse_scalar(value) == value:
        return value
    text = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf"))
    return text.strip()[1:-1]
