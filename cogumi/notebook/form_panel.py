"""The widgets of a form. What is entered goes to the form, and what changes in the form is shown: the panel knows no values."""

import html
import os
import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from cogumi.config.schema import ENVIRONMENT_PREFIX, TRL_CONFIGS, redact
from cogumi.config.source import SECTIONS, parse_scalar
from cogumi.config.yaml_text import dump_flow
from cogumi.core.errors import UsageError
from cogumi.core.redact import SECRETS, redact_text
from cogumi.core.worker import call
from cogumi.forecast.preflight_report import PreflightReport
from cogumi.notebook.html_components import render_html
from cogumi.stack.gpus import CARDS, use_one_gpu

HERE = "this machine"
PREFLIGHT_SECONDS = 600.0
WHAT_IT_HOLDS = {
    "model": "what is trained",
    "data": "what it is trained on",
    "lora": "the adapter: peft.LoraConfig",
    "train": "the training: trl.",
    "cogumi": "the run: what is done around the training",
}


class FormPanel:
    """`box` is what a notebook shows. `entries` are the widgets of the keys that the YAML sets, `removers` their buttons."""

    def __init__(self, form: Any) -> None:
        self.form, self.is_typed = form, False
        self.entries: dict[str, widgets.DOMWidget] = {}
        self.removers: dict[str, widgets.Button] = {}
        self.wrong: dict[str, widgets.HTML] = {}
        self.heads = {section: widgets.HTML() for section in SECTIONS}
        self.keys = {section: widgets.VBox() for section in SECTIONS}
        self.adders = {section: widgets.Combobox() for section in SECTIONS}
        self.state, self.yaml, self.said, self.ahead = (widgets.HTML() for _ in range(4))
        self.file = widgets.Text(str(form.save_as), description="file")
        self.write = widgets.Button(description="write", tooltip="Write the YAML into this file")
        self.replace = widgets.Button(layout={"display": "none"}, button_style="warning")
        self.card = widgets.Dropdown(options=[HERE, *(card.name for card in CARDS)], description="for")
        self.look = widgets.Button(description="preflight", tooltip="Whether this fits: memory, time, cost, disk")
        self.tabs = widgets.Tab([self.page(section) for section in SECTIONS], titles=list(SECTIONS))
        writing, looking = widgets.HBox([self.file, self.write, self.replace]), widgets.HBox([self.card, self.look])
        titles = [widgets.HTML(f"<h3>{title}</h3>") for title in ("The YAML", "Does it fit?")]
        right = widgets.VBox([titles[0], self.yaml, writing, self.said, titles[1], looking, self.ahead])
        columns = widgets.Box([widgets.VBox([self.tabs]), right])
        columns.add_class("cogumi-columns")
        css = files("cogumi.notebook").joinpath("form.css").read_text(encoding="utf-8")
        self.box = widgets.VBox([widgets.HTML(f"<style>{css}</style>"), self.state, columns])
        self.box.add_class("cogumi-form")
        self.show_yaml()
        self.check()
        wrong = (number for number, title in enumerate(self.tabs.titles) if title not in SECTIONS)
        self.tabs.selected_index = next(wrong, 0)  # where there is something to be done
        self.file.observe(self.on_file, "value")
        self.write.on_click(lambda _: self.on_write(replace=False))
        self.replace.on_click(lambda _: self.on_write(replace=True))
        self.look.on_click(lambda _: self.preflight())
        self.card.observe(lambda _: self.forget_preflight(), "value")

    def page(self, section: str) -> widgets.VBox:
        keys, adder = self.keys[section], self.adders[section]
        keys.add_class("cogumi-keys")
        adder.description, adder.placeholder = "add a key", "type a part of its name"
        adder.ensure_option, adder.continuous_update = True, False
        button = widgets.Button(description="add", tooltip=f"Put this key into {section}:")
        button.on_click(lambda _: self.on_add(section))
        adder.observe(lambda _: self.on_add(section), "value")
        adding = widgets.HBox([adder, button])
        adding.add_class("cogumi-adding")
        self.show_keys(section)
        return widgets.VBox([self.heads[section], keys, adding])

    def on_add(self, section: str) -> None:
        name = self.adders[section].value
        if name in self.form.can_be_added(section):  # the page marks a name that is not
            self.adders[section].value = ""
            self.form.add(f"{section}.{name}")

    def show_keys(self, section: str) -> None:
        """Make the rows of a section anew, with what its other keys are."""
        for kept in (self.entries, self.removers, self.wrong):
            for key in [key for key in kept if key.startswith(f"{section}.")]:
                kept.pop(key).close()
        shown, more = self.form.shown(section), self.form.can_be_added(section)
        self.keys[section].children = [self.row(key, self.form.field(key), value) for key, value in shown.items()]
        self.adders[section].options = ["", *more]
        of = TRL_CONFIGS[self.form.method] if section == "train" else ""
        count = f"{len(shown)} set, {len(more)} more can be added"
        self.heads[section].value = f"<p>{WHAT_IT_HOLDS[section]}{of}; {count}</p>"

    def row(self, key: str, field: Any, value: Any) -> widgets.VBox:
        shown, words = field.shown(value), {field.shown(each): each for each in field.choices}
        if field.choices == (True, False) and isinstance(value, bool):
            entry = widgets.Checkbox(value, indent=False)
        elif field.choices:
            entry = widgets.Dropdown(options=list({**words, shown: value}), value=shown)
        else:
            entry = (widgets.Password if key.lower().endswith(SECRETS) else widgets.Text)(shown)

        def enter(change: Any) -> None:
            self.is_typed = True
            is_word = isinstance(change.new, bool) or change.new in words
            try:
                self.form.set(key, words.get(change.new, change.new) if is_word else parse_scalar(change.new))
            finally:
                self.is_typed = False

        entry.description = field.key
        entry.observe(enter, "value")
        remove, wrong = widgets.Button(description="remove", tooltip=f"Take {key} out of the YAML"), widgets.HTML()
        remove.on_click(lambda _: self.form.remove(key))
        self.entries[key], self.removers[key], self.wrong[key] = entry, remove, wrong
        return widgets.VBox([widgets.HBox([entry, remove]), wrong, widgets.HTML(describe_field(field))])

    def on_change(self, key: str) -> None:
        if not self.is_typed:  # else its widget shows it already
            self.show_keys(key.partition(".")[0])
        if key == "cogumi.method":  # the same keys may be others
            self.show_keys("train")
        self.show_yaml()
        self.hide_replace()  # and what was said of a file that was written
        self.forget_preflight()
        self.check()

    def hide_replace(self) -> None:
        self.replace.layout.display = "none"
        self.said.value = ""

    def on_file(self, change: Any) -> None:
        self.hide_replace()
        if change.new.strip():
            self.form.save_as = Path(change.new.strip())
            self.check()

    def on_write(self, replace: bool) -> None:
        path = Path(self.file.value.strip() or ".")
        self.hide_replace()
        if path.is_file() and not replace:
            self.replace.description, self.replace.layout.display = f"replace {path.name}", ""
            offer = f"press “{self.replace.description}” to write over it, or name another file"
            self.said.value = render_message(f"{path} exists: {offer}")
            return
        try:
            self.form.write(path, replace)
            calls = f"cogumi.start({str(path)!r}) or cogumi start {shlex.quote(str(path))}"
            self.said.value = render_message(f"written: {path}. Next: {calls}", wrong=False)
        except UsageError as error:
            self.said.value = render_message(str(error))

    def show_yaml(self) -> None:
        text = html.escape(redact_text(self.form.render(redact(self.form.values))))
        self.yaml.value = f"<pre tabindex='0' aria-label='the YAML as it would be written'>{text}</pre>"

    def check(self) -> None:
        """Show what is wrong: above, beside its key, and in the title of its section."""
        error = self.form.check()[1]
        key = error.key if error else ""
        problem = str(error or "").removeprefix("config: ")
        for each, wrong in self.wrong.items():
            wrong.value = f"<div class='cogumi-wrong'>wrong: {html.escape(problem)}</div>" if each == key else ""
        self.tabs.titles = [f"{each} (problem)" if each == key.partition(".")[0] else each for each in SECTIONS]
        fine = f"ok: {self.form.source} is a config for {self.form.method} as it stands here"
        self.state.value = render_message(f"problem: {problem}" if problem else fine, wrong=bool(problem))
        if above := [name for name in sorted(os.environ) if name.startswith(ENVIRONMENT_PREFIX)]:
            note = f"note: a run takes {', '.join(above)} of the environment over what stands here"
            self.state.value += render_message(note, wrong=False)

    def preflight(self) -> None:
        self.ahead.value = render_message("preflight: looking; it takes some ten seconds", wrong=False)
        card = None if self.card.value == HERE else self.card.value
        try:
            if problem := self.form.problem:
                raise UsageError(problem)
            values = self.form.run_values()
            found = call("the preflight", preflight, values, card, environment=os.environ, timeout=PREFLIGHT_SECONDS)
            self.ahead.value = render_html(found)
        except (UsageError, RuntimeError) as error:
            self.ahead.value = render_message(f"no preflight: {error}")

    def forget_preflight(self) -> None:
        """What the preflight said is of other values, or of another card."""
        if self.ahead.value:
            self.ahead.value = render_message("changed since: press preflight again", wrong=False)


def preflight(values: dict[str, Any], card: str | None) -> PreflightReport:
    """Of the process of a preflight."""
    use_one_gpu()
    from cogumi.forecast.run_forecast import forecast_run

    return forecast_run(values, card, None, {}, apart=False)


def describe_field(field: Any) -> str:
    doc = html.escape(re.sub(r"</?a\b[^>]*>", "", field.doc))
    doc = re.sub(r"`([^`]+)`", r"<code>\1</code>", doc)
    default = "" if field.default in (None, "", [], {}) else f"{dump_flow(field.default)} by default"
    said = html.escape(", ".join(filter(None, (field.of, default))))
    return f"<div class='cogumi-doc' title='{html.escape(field.doc)}'>{f'{said}. ' if said else ''}{doc}</div>"


def render_message(text: str, wrong: bool = True) -> str:
    return f"<div class='cogumi-said{' wrong' if wrong else ''}' role='status'>{html.escape(text)}</div>"
