"""The widgets of a form. What is entered goes to the form, and what changes in the form is shown: the panel knows no values."""

import html
import os
import re
import shlex
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from cogumi.config.schema import ENVIRONMENT_PREFIX
from cogumi.config.source import SECTIONS
from cogumi.config.yaml_text import dump_flow, equal_values
from cogumi.core.errors import UsageError
from cogumi.core.redact import SECRETS
from cogumi.core.worker import Worker
from cogumi.forecast.preflight_report import PreflightReport
from cogumi.notebook.form_fields import Field, begin_preflight
from cogumi.notebook.html_components import render_html
from cogumi.stack.gpus import CARDS

HERE = "this machine"
WHAT_IT_HOLDS = {
    "model": "what is trained",
    "data": "what it is trained on",
    "lora": "the adapter: peft.LoraConfig",
    "train": "the training",
    "cogumi": "the run: what is done around the training",
}
TRAINERS = {"sft": "trl.SFTConfig", "dpo": "trl.DPOConfig", "gspo": "trl.GRPOConfig"}


class FormPanel:
    """`box` is what a notebook shows. `entries` are the widgets of the keys that the YAML sets, `removers` their buttons."""

    def __init__(self, form: Any) -> None:
        self.form = form
        self.entries: dict[str, widgets.DOMWidget] = {}
        self.removers: dict[str, widgets.Button] = {}
        self.wrong: dict[str, widgets.HTML] = {}
        self.rows: dict[str, widgets.VBox] = {}
        self.keys = {section: widgets.VBox() for section in SECTIONS}
        self.adders = {section: self.adder(section) for section in SECTIONS}
        self.adding = {section: widgets.HTML() for section in SECTIONS}
        self.heads = {section: widgets.HTML() for section in SECTIONS}
        self.state, self.yaml, self.said, self.ahead = (widgets.HTML() for _ in range(4))
        narrow = {"description_width": "3em"}
        self.file = widgets.Text(str(form.save_as), description="file", layout={"width": "100%"}, style=narrow)
        self.write = widgets.Button(description="write", tooltip="Write the YAML into this file")
        hidden = {"display": "none", "width": "auto", "flex": "none"}
        self.replace = widgets.Button(layout=hidden, button_style="warning")
        cards = [HERE, *(card.name for card in CARDS)]
        self.card = widgets.Dropdown(options=cards, description="for", layout={"width": "15em"}, style=narrow)
        self.look = widgets.Button(description="preflight", tooltip="Whether this fits: memory, time, cost, disk")
        self.looking: Worker | None = None  # the process of a preflight
        self.report: PreflightReport | None = None
        self.tabs = widgets.Tab([self.page(section) for section in SECTIONS], titles=list(SECTIONS))
        self.box = self.build_layout()
        for section in SECTIONS:
            self.show_keys(section)
        self.show_yaml()
        self.check()
        wrong = (number for number, title in enumerate(self.tabs.titles) if title not in SECTIONS)
        self.tabs.selected_index = next(wrong, 0)  # where there is something to be done
        self.file.observe(self.on_file, "value")
        self.write.on_click(lambda _: self.on_write(replace=False))
        self.replace.on_click(lambda _: self.on_write(replace=True))
        self.look.on_click(lambda _: self.preflight())
        self.card.observe(lambda _: self.mark_stale(), "value")
        form.watchers.append(self.on_change)

    def build_layout(self) -> widgets.VBox:
        writing = widgets.HBox([self.file, self.write, self.replace])
        looking = widgets.HBox([self.card, self.look], layout={"flex_flow": "row wrap"})
        titles = [widgets.HTML(f"<h3>{title}</h3>") for title in ("The YAML", "Does it fit?")]
        parts = [titles[0], self.yaml, writing, self.said, titles[1], looking, self.ahead]
        left = widgets.VBox([self.tabs], layout={"flex": "3 1 460px", "min_width": "0", "width": "auto"})
        right = widgets.VBox(parts, layout={"flex": "2 1 380px", "min_width": "0", "width": "auto"})
        columns = widgets.Box([left, right])
        columns.add_class("cogumi-columns")
        css = files("cogumi.notebook").joinpath("form.css").read_text(encoding="utf-8")
        box = widgets.VBox([widgets.HTML(f"<style>{css}</style>"), self.state, columns])
        box.add_class("cogumi-form")
        return box

    def page(self, section: str) -> widgets.VBox:
        button = widgets.Button(description="add", tooltip=f"Put this key into {section}:", layout={"width": "5em"})
        button.on_click(lambda _: self.on_add(section))
        self.keys[section].add_class("cogumi-keys")
        adding = widgets.HBox([self.adders[section], button])
        return widgets.VBox([self.heads[section], self.keys[section], adding, self.adding[section]])

    def adder(self, section: str) -> widgets.Combobox:
        box = widgets.Combobox(
            description="add a key",
            placeholder="type a part of its name",
            continuous_update=False,
            style={"description_width": "6em"},
            layout={"width": "26em"},
        )
        box.observe(lambda _: self.on_add(section), "value")
        return box

    def row(self, key: str, value: Any) -> widgets.VBox:
        field = self.form.field(key)
        entry, wrong = self.entry(key, field, value), widgets.HTML()
        remove = widgets.Button(description="remove", tooltip=f"Take {key} out of the YAML", layout={"width": "6em"})
        remove.on_click(lambda _: self.form.remove(key))
        self.entries[key], self.removers[key], self.wrong[key] = entry, remove, wrong
        return widgets.VBox([widgets.HBox([entry, remove]), wrong, widgets.HTML(describe_field(field))])

    def entry(self, key: str, field: Field, value: Any) -> widgets.DOMWidget:
        layout = {"flex": "1 1 auto", "width": "auto", "min_width": "0"}
        common = {"description": field.key, "layout": layout}
        if field.kind == "choice":
            words = {format_choice(each): each for each in (*field.choices, field.find_choice(value))}
            choices = widgets.Dropdown(options=list(words), value=format_choice(field.find_choice(value)), **common)
            choices.observe(lambda change: self.form.set(key, words[change.new]), "value")
            return choices
        if field.kind == "check" and isinstance(value, bool):
            check = widgets.Checkbox(value, indent=False, **common)
            check.observe(lambda change: self.form.set(key, change.new), "value")
            return check
        text = (widgets.Password if key.lower().endswith(SECRETS) else widgets.Text)(field.shown(value), **common)
        text.observe(lambda change: self.form.set(key, field.parse(change.new)), "value")
        return text

    def on_change(self, key: str) -> None:
        if key == "cogumi.method":  # the same keys may be others
            for each in [each for each in self.rows if each.startswith("train.")]:
                self.forget(each)
            self.show_keys("train")
        self.show_keys(key.partition(".")[0])
        self.show_yaml()
        self.hide_replace()  # and what was said of a file that was written
        self.mark_stale()
        self.check()

    def on_add(self, section: str) -> None:
        box, wrong = self.adders[section], self.adding[section]
        name = box.value.strip()
        if not name:
            return
        if f"{section}.{name}" in self.entries:
            wrong.value = render_message(f"{section}.{name} is there already", wrong=False)
        elif name not in box.options:
            near = [each for each in box.options if name in each][:5]
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            wrong.value = render_message(f"{section}: has no key `{name}` that could be added{hint}")
        else:
            wrong.value = box.value = ""
            self.form.add(f"{section}.{name}")

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
        if path.is_file() and not replace:
            offer = f"replace {path.name}"
            self.replace.description, self.replace.tooltip = offer, f"Write over {path}"
            self.replace.layout.display = ""
            self.said.value = render_message(f"{path} exists: press “{offer}” to write over it, or name another file")
            return
        try:
            self.form.write(path, replace)
        except (UsageError, RuntimeError) as error:
            self.said.value = render_message(str(error))
            return
        self.hide_replace()
        calls = f"cogumi.start({str(path)!r}) or cogumi start {shlex.quote(str(path))}"
        self.said.value = render_message(f"written: {path}. Next: {calls}", wrong=False)

    def show_keys(self, section: str) -> None:
        shown = dict(self.form.shown(section))
        for key in [key for key in self.rows if key.startswith(f"{section}.")]:
            if key not in shown or not self.is_shown(key, shown[key]):
                self.forget(key)
        for key, value in shown.items():
            if key not in self.rows:
                self.rows[key] = self.row(key, value)
        self.keys[section].children = [self.rows[key] for key in shown]
        can_be_added = self.form.can_be_added(section)
        self.adders[section].options = [field.key for field in can_be_added]
        of = f": {TRAINERS[self.form.method]}" if section == "train" else ""
        count = f"{len(shown)} set, {len(can_be_added)} more can be added"
        self.heads[section].value = f"<p>{WHAT_IT_HOLDS[section]}{of}; {count}</p>"

    def is_shown(self, key: str, value: Any) -> bool:
        """Whether its widget shows this value; one that a script has set is shown by another widget."""
        field, entry = self.form.field(key), self.entries[key]
        if isinstance(entry, widgets.Checkbox):
            return entry.value is value
        if isinstance(entry, widgets.Dropdown):
            return bool(entry.value == format_choice(field.find_choice(value)))
        return equal_values(field.parse(entry.value), value)

    def forget(self, key: str) -> None:
        for kept in (self.entries, self.removers, self.wrong):
            del kept[key]
        self.rows.pop(key).close()

    def show_yaml(self) -> None:
        text = html.escape(self.form.yaml_to_see)
        self.yaml.value = f"<pre tabindex='0' aria-label='the YAML as it would be written'>{text}</pre>"

    def check(self) -> None:
        """Show what is wrong: above, beside the key that a problem names first, and in the title of its section."""
        try:
            problem = self.form.problem
        except RuntimeError as error:
            problem = str(error)
        keys = "|".join(re.escape(each) for each in sorted(self.entries, key=len, reverse=True))
        named = re.search(rf"(?<![\w.])({keys})(?!\w)", problem)
        key = named[1] if named else ""
        for each, wrong in list(self.wrong.items()):
            wrong.value = f"<div class='cogumi-wrong'>wrong: {html.escape(problem)}</div>" if each == key else ""
        at = re.search(rf"\b({'|'.join(SECTIONS)})[.:]", key or problem)
        self.tabs.titles = [f"{each} (problem)" if at and each == at[1] else each for each in SECTIONS]
        fine = f"ok: {self.form.source} is a config for {self.form.method} as it stands here"
        self.state.value = render_message(f"problem: {problem}" if problem else fine, wrong=bool(problem))
        if above := [name for name in sorted(os.environ) if name.startswith(ENVIRONMENT_PREFIX)]:
            note = f"note: a run takes {', '.join(above)} of the environment over what stands here"
            self.state.value += render_message(note, wrong=False)

    def preflight(self) -> None:
        self.stop_preflight()
        try:
            if problem := self.form.problem:
                raise UsageError(problem)
            card = None if self.card.value == HERE else self.card.value
            self.looking = begin_preflight(self.form.run_values(), card)
        except (UsageError, RuntimeError) as error:
            self.ahead.value = render_message(f"no preflight: {error}")
            return
        self.ahead.value = render_message("preflight: looking; it takes some ten seconds", wrong=False)
        threading.Thread(target=self.show_preflight, args=(self.looking,), daemon=True).start()

    def show_preflight(self, worker: Worker) -> None:
        report, words = None, ""
        try:
            report = worker.receive()
        except (UsageError, RuntimeError) as error:
            words = render_message(f"no preflight: {error}")
        worker.close()
        if worker is self.looking:  # and it was not stopped for a newer one
            self.looking, self.report = None, report
            self.ahead.value = words + render_preflight(report)

    def stop_preflight(self) -> None:
        looking, self.looking = self.looking, None
        if looking is not None:
            looking.stop()

    def mark_stale(self) -> None:
        """What the preflight said is of other values, or of another card."""
        if self.report is not None or self.looking is not None:
            self.stop_preflight()
            changed = render_message("changed since: press preflight again", wrong=False)
            self.ahead.value = changed + render_preflight(self.report)


def format_choice(value: Any) -> str:
    """A choice by its word: `null`, `true`, cosine."""
    return value if isinstance(value, str) else dump_flow(value)


def describe_field(field: Field) -> str:
    doc = html.escape(re.sub(r"</?a\b[^>]*>", "", field.doc))
    doc = re.sub(r"`([^`]+)`", r"<code>\1</code>", doc)
    default = "" if field.default in (None, "", [], {}) else f"{dump_flow(field.default)} by default"
    of = ", ".join(each for each in (field.of, default) if each)
    start = html.escape(f"{of}. ") if of else ""
    return f"<div class='cogumi-doc' title='{html.escape(field.doc)}'>{start}{doc}</div>"


def render_message(text: str, wrong: bool = True) -> str:
    return f"<div class='cogumi-said{' wrong' if wrong else ''}' role='status'>{html.escape(text)}</div>"


def render_preflight(report: PreflightReport | None) -> str:
    return render_html(report) if report is not None else ""
