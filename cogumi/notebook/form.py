"""A config as a form: its values bound to the real signatures, checked as a run checks them, and written as a YAML.

Here is the form without its widgets, which scripts can use as well; `cogumi.notebook.form_panel` shows it.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogumi.config.binding import bind_mapping, reject_unknown
from cogumi.config.schema import RunConfig, redact
from cogumi.config.source import PACKAGE, SECTIONS, read_source
from cogumi.config.yaml_text import dump_sections, edit_yaml
from cogumi.core.errors import UsageError
from cogumi.core.notices import is_notebook
from cogumi.core.redact import redact_text
from cogumi.core.run_directory import write_atomic
from cogumi.forecast.preflight_report import PreflightReport
from cogumi.notebook.form_fields import Field, Values, begin_preflight, check_values, read_fields, to_yaml_value

if TYPE_CHECKING:
    from cogumi.notebook.form_panel import FormPanel

METHODS = ("sft", "dpo", "gspo")


def configure(
    config: str | os.PathLike[str] | Mapping[str, Any], save_as: str | os.PathLike[str] | None = None
) -> "Form":
    """A form for a config, which a notebook shows: every key with what it is for, what is wrong with it, and the YAML.

    config: a file, a name that `cogumi cp` knows ("smoke/sft"), or a mapping. save_as: the file that the form offers to
    write. The first form of a kernel waits for trl, in another process. Raises UsageError for what is no config.
    """
    form = Form(config, save_as)
    if missing := explain_missing_widgets():
        by_hand = f"edit {form.save_as} by hand (`cogumi cp` hands one out)"
        print(f"{missing}: {by_hand}, or use form.set, form.problem, form.write")
    return form


def explain_missing_widgets() -> str:
    """Why nothing but text can be shown here; "" in a notebook."""
    if find_spec("ipywidgets") is None:
        return "ipywidgets is not installed, so there is no form to see"
    return "" if is_notebook() else "a form is seen in a notebook, and this is none"


class Form:
    """A config that is being edited. `values` are those of its YAML, by section, `yaml` is its text; change them by `set`
    and `remove`."""

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any], save_as: str | os.PathLike[str] | None = None
    ) -> None:
        values, origins = read_source(config)
        reject_unknown(values, SECTIONS, "", origins)
        label = origins.label
        self.text = None if isinstance(config, Mapping) else Path(label).read_text(encoding="utf-8")
        self.source = "a mapping" if self.text is None else str(config)
        self.values: Values = {name: to_yaml_value(bind_mapping(keys, name, origins)) for name, keys in values.items()}
        own = Path("run.yaml" if self.text is None else label)  # over its own file, or here if that is the package's
        self.save_as = Path(save_as or (own.name if own.resolve().is_relative_to(PACKAGE) else own))
        self.watchers: list[Callable[[str], None]] = []  # told the key that was set or removed
        self._panel: FormPanel | None = None
        self.fields = read_fields(self.method)

    @property
    def method(self) -> str:
        """What decides the keys of `train:`; that of a config that says nothing known is sft."""
        said = self.values.get("cogumi", {}).get("method")
        return said if said in METHODS else "sft"

    def field(self, key: str) -> Field:
        """What a key is. One that its section does not have is text of YAML, so that it can be seen and taken out."""
        section, _, name = key.partition(".")
        unknown = Field(name, "yaml", "no key of this section", doc="Not a key that a run knows here.")
        return next((each for each in self.fields[section] if each.key == name), unknown)

    def shown(self, section: str) -> Iterator[tuple[str, Any]]:
        """The keys that the YAML sets in a section, dotted, with their values, in its order."""
        groups = {each.key.rpartition(".")[0] for each in self.fields[section]}
        for name, value in self.values.get(section, {}).items():
            if isinstance(value, dict) and name in groups:
                for inner, each in value.items():
                    yield f"{section}.{name}.{inner}", each
            else:
                yield f"{section}.{name}", value

    def can_be_added(self, section: str) -> list[Field]:
        there = {key for key, _ in self.shown(section)}
        return [each for each in self.fields[section] if f"{section}.{each.key}" not in there]

    def get(self, key: str) -> Any:
        return reduce(lambda inner, name: inner[name], key.split("."), self.values)

    def set(self, key: str, value: Any) -> None:
        """Give a key (`train.max_steps`) a value, and add it if it is not there. It is not checked before `problem` is read."""
        *above, name = key.split(".")
        if not above or above[0] not in SECTIONS:
            fix = f"the sections are {', '.join(SECTIONS)}, as in train.max_steps"
            raise UsageError(f"{key} names no key", fix=fix)
        inner = self.values
        for each in above:
            if not isinstance(inner.get(each), dict):
                inner[each] = {}
            inner = inner[each]
        inner[name] = to_yaml_value(value)
        self.tell(key)

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
        self.tell(key)

    def tell(self, key: str) -> None:
        if key == "cogumi.method":
            self.fields = read_fields(self.method)
        for watcher in self.watchers:
            watcher(key)

    @property
    def config(self) -> RunConfig | None:
        """The run that this is, as `cogumi.train` would read it; None while there is a problem."""
        return self.check()[0]

    @property
    def problem(self) -> str:
        """What is wrong, in one line that names the key; "" when nothing is."""
        return self.check()[1]

    def check(self) -> tuple[RunConfig | None, str]:
        try:
            return check_values(self.run_values()), ""
        except UsageError as error:
            return None, str(error).removeprefix("config: ")

    def run_values(self) -> Values:
        """The values as a run of the file would have them: its directory is called after the file."""
        values = deepcopy(self.values)
        for name in ("model", "data", "cogumi"):
            values.setdefault(name, {})
        if values["cogumi"].get("run_dir") is None:
            values["cogumi"]["run_dir"] = f"runs/{self.save_as.stem}"
        return values

    def preflight(self, card: str | None = None) -> PreflightReport:
        """`cogumi.preflight` of these values, for this machine or a card. Raises UsageError where there is a problem."""
        if problem := self.problem:
            raise UsageError(problem)
        worker = begin_preflight(self.run_values(), card)
        try:
            report: PreflightReport = worker.receive()
        finally:
            worker.close()
        return report

    @property
    def yaml(self) -> str:
        """The text that `write` writes: that of the source with the changed values, its comments kept."""
        return self.render(self.values)

    @property
    def yaml_to_see(self) -> str:
        """`yaml` without the secrets in it."""
        return redact_text(self.render(redact(self.values)))

    def render(self, values: Values) -> str:
        return dump_sections(values) if self.text is None else edit_yaml(self.text, values)[0]

    def write(self, path: str | os.PathLike[str] | None = None, replace: bool = False) -> Path:
        """Write the YAML, whole or not at all. Raises UsageError for a problem in it, and rather than replace a file."""
        path = Path(path or self.save_as)
        if problem := self.problem:
            raise UsageError(f"{path} is not written: {problem}")
        if path.is_dir():
            raise UsageError(f"{path} is a directory", fix=f"name a file in it, such as {path / 'run.yaml'}")
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
        keys = sum(1 for name in self.values for _ in self.shown(name))
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
        if explain_missing_widgets():
            return {"text/plain": repr(self)}
        return {**self.panel.box._repr_mimebundle_(), "text/plain": repr(self)}
