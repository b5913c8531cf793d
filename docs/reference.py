"""Write docs/reference.md from the signatures and docstrings of what cogumi offers: `make reference`."""

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

import cogumi
from cogumi.cli.app import app
from cogumi.config import schema
from cogumi.notebook import completions, figures
from cogumi.notebook.form import format_value

PAGE = Path(__file__).with_name("reference.md")


@dataclass(frozen=True)
class Field:
    """A key of the `model:`, `data:` or `cogumi:` section, dotted below it. choices: () where a value is typed."""

    key: str
    choices: tuple[Any, ...] = ()
    default: Any = None
    doc: str = ""

    def shown(self, value: Any) -> str:
        """Format a value as a YAML has it, or a choice as its word."""
        return value if self.choices and isinstance(value, str) else format_value(value)


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


def page() -> str:
    return "\n".join(
        [
            "# Reference",
            "",
            "Every name, command and key, from its own signature and docstring (`make reference`). The files of a run are in",
            "[architecture.md](architecture.md#a-run-directory); `train:` and `lora:` are TRL's configs and peft's LoraConfig.",
            "",
            "## Python",
            "",
            *table("name", [(f"cogumi.{name}", value) for name, value in public() if callable(value)]),
            "",
            "A run, as `cogumi.start` and `cogumi.attach` return it:",
            "",
            *table("method", [(f"run.{name}", value) for name, value in methods(cogumi.Run)]),
            "",
            "Figures for a notebook:",
            "",
            *table("function", [(f"cogumi.notebook.{name}", value) for name, value in drawn()]),
            "",
            "## Command line",
            "",
            "| command | what it does |",
            "|---|---|",
            *(f"| `cogumi {name}` | {text} |" for name, text in sorted(commands(typer.main.get_command(app)))),
            "",
            "## Configuration",
            "",
            *keys("model", section_fields(schema.ModelSection)),
            *keys("data", section_fields(schema.DataSection)),
            *keys("cogumi", section_fields(schema.CogumiSection)),
        ]
    )


def public() -> Iterator[tuple[str, Any]]:
    for name in sorted(cogumi.__all__, key=str.lower):
        yield name, getattr(cogumi, name)


def methods(of: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(of).items():
        if not name.startswith("_") and inspect.isfunction(value) and value.__doc__:
            yield name, value


def drawn() -> Iterator[tuple[str, Any]]:
    for module in (figures, completions):
        short = module.__name__.removeprefix("cogumi.notebook.")
        for name, value in vars(module).items():
            made = inspect.isfunction(value) and value.__module__ == module.__name__
            if made and value.__annotations__.get("return") is figures.HtmlFigure:
                yield f"{short}.{name}", value


def table(head: str, rows: list[tuple[str, Any]]) -> list[str]:
    return [
        f"| {head} | what it does |",
        "|---|---|",
        *(f"| `{name}{call(value)}` | {sentence(value)} |" for name, value in rows),
    ]


def call(value: Any) -> str:
    """How it is called, without types."""
    if inspect.isclass(value):
        return ""
    parameters = [each for each in inspect.signature(value).parameters.values() if each.name != "self"]
    shown = [str(each.replace(annotation=inspect.Parameter.empty)) for each in parameters]
    stars = next((n for n, each in enumerate(parameters) if each.kind is inspect.Parameter.KEYWORD_ONLY), None)
    if stars is not None:
        shown.insert(stars, "*")
    return f"({', '.join(shown)})".replace("|", "\\|")


def sentence(value: Any) -> str:
    """The first sentence of a docstring."""
    text = " ".join((inspect.getdoc(value) or "").split())
    return text.partition(". ")[0].removesuffix(".").replace("|", "\\|")


def commands(of: Any, before: str = "") -> Iterator[tuple[str, str]]:
    for name, each in of.commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, f"{name} ")
        elif not each.hidden:
            yield f"{before}{name}", " ".join((each.help or "").split()).replace("|", "\\|")


def keys(section: str, fields: Iterator[Field]) -> Iterator[str]:
    yield from (f"`{section}:`", "", "| key | default | what it is |", "|---|---|---|")
    for field in fields:
        is_named = field.choices and field.choices != (True, False)
        choices = " (" + ", ".join(map(field.shown, field.choices)) + ")" if is_named else ""
        words = " ".join(field.doc.split()) + choices
        yield f"| `{field.key}` | `{field.shown(field.default)}` | {words} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
