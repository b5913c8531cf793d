"""Read the values of a run with the place of each, and list the templates that come with the package."""

import difflib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from cogumi.core.errors import UsageError
from cogumi.core.formatting import join_names

Config = str | os.PathLike[str] | Mapping[str, Any]  # a YAML file, a template's name, or the values
SECTIONS = ("model", "lora", "data", "train", "cogumi")
PACKAGE = Path(__file__).parents[1]
FOLDERS = {
    "configs": "**/*.yaml", "accelerate": "*.yaml", "recipes": "*.py", "notebooks": "[0-9]*.ipynb", "templates": "*.md",
}  # fmt: skip


class Origins(dict[str, str]):
    """Origin of each value by dotted key ("file.yaml:12", "environment COGUMI_X"); the label for any other key."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def error(self, message: str, key: str, fix: str = "", at: str = "") -> UsageError:
        return UsageError(message, key=key, place=self.get(at or key, self.label), fix=fix)


def read_source(config: Config) -> tuple[dict[str, Any], Origins]:
    if isinstance(config, Mapping):
        return copy_mapping(config), Origins("config")
    if not isinstance(config, str | os.PathLike):
        raise UsageError(f"{config!r} is no config", fix="give a YAML file, a name of `cogumi cp`, or a dict")
    path = find_config(Path(config))
    if path.is_dir():
        fix = f"name a YAML file in it; {suggest_yaml(path / 'x.yaml')}"
        raise UsageError(f"{path} is a directory", fix=fix)
    if not path.exists():
        raise UsageError("no such config file", place=path, fix=suggest_yaml(path))
    origins = Origins(str(path))
    try:
        text = path.read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()  # with line numbers
        if isinstance(node, yaml.MappingNode):
            record_lines(node, "", origins)  # before merge keys (<<) are expanded
        values: Any = loader.construct_document(node) if node else None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read as UTF-8 text: {error}", place=path) from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or f"{error}"
        place = f"{path}:{mark.line + 1}" if mark else path
        raise UsageError(f"not valid YAML: {' '.join(problem.split())}", place=place) from None
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"a config is a mapping with the sections {', '.join(SECTIONS)}", place=f"{path}:1")
    return values, origins


def find_config(path: Path) -> Path:
    """Return an existing path as it is; else the package's own config of that name (`smoke/sft`) or path (`configs/...`).

    `configs` is a link to the package's folder, which is missing in other directories and in archives without links.
    """
    if path.exists():
        return path
    if path.parts[:1] == ("configs",) and (PACKAGE / path).is_file():
        return PACKAGE / path
    return path if is_yaml(path) else list_templates().get(path.as_posix(), path)


def is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")  # a name may have a point in it, as llama-3.1 has


def record_lines(node: yaml.MappingNode, prefix: str, origins: Origins) -> None:
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        place = f"{origins.label}:{key.start_mark.line + 1}"
        if dotted in origins:
            raise UsageError(f"`{dotted}` is set twice (first at {origins[dotted]})", key=dotted, place=place)
        origins[dotted] = place
        if isinstance(value, yaml.MappingNode):
            record_lines(value, f"{dotted}.", origins)


def suggest_yaml(path: Path) -> str:
    """Suggest a YAML beside a missing path, or one of the package's own for a name without a suffix."""
    names = {file.name: file for file in path.parent.glob("*.yaml")} if path.parent.is_dir() else {}
    if not is_yaml(path):
        names |= {name: Path(name) for name in list_templates() if not name.endswith((".py", ".ipynb"))}
    near = difflib.get_close_matches(path.name if is_yaml(path) else str(path), names, n=1)
    if near:
        return f"did you mean {names[near[0]]}?"
    return f"there are {join_names(sorted(names))}" if names else "`cogumi cp` lists the configs that come with cogumi"


def parse_scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # `name: [a` from a shell is a string; the type check has the last word


def copy_mapping(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {k: copy_mapping(v) if isinstance(v, Mapping) else v for k, v in mapping.items()}


def not_a_section(key: str, value: Any) -> str:
    return f"{key}: must be a section (keys and values), is {value!r}"


def set_value(values: dict[str, Any], origins: Origins, key: str, value: Any, origin: str) -> None:
    *sections, name = key.split(".")
    if not sections and name in SECTIONS and not isinstance(value, Mapping):
        raise UsageError(not_a_section(name, value), key=name, place=origin)
    first = key.split(".")[0]
    if not sections or first not in SECTIONS or not all((*sections, name)):
        example = "COGUMI_TRAIN__MAX_STEPS" if origin.startswith("environment") else "train.max_steps"
        near = difflib.get_close_matches(first, SECTIONS, n=1) or ["train"]
        hint = "" if first in SECTIONS else f" (did you mean {near[0]}?)"
        known = ", ".join(SECTIONS)
        raise UsageError(f"{origin}: names no config key; sections are {known}, as in {example}{hint}")
    for part in sections:
        if values.get(part) is None:
            values[part] = {}
        if not isinstance(values[part], dict):
            raise UsageError(not_a_section(part, values[part]), key=part, place=origin)
        values = values[part]
    values[name] = value
    origins[key] = origin


# ----------------------------------------------------------------------------------------------------------- templates


def list_templates() -> dict[str, Path]:
    """Return every file of the package that can be copied by name: configs without their suffix, the others with it."""
    templates = {}
    for folder, pattern in FOLDERS.items():
        for path in sorted((PACKAGE / folder).glob(pattern)):
            relative = path.relative_to(PACKAGE / folder)
            if relative.name != "__init__.py":
                name = relative.with_suffix("") if path.suffix == ".yaml" else relative
                templates[str(name if folder in ("configs", "templates") else Path(folder) / name)] = path
    return templates


def describe_template(path: Path) -> str:
    """Return a file's own description: a config's second comment line, the first line or cell of the others."""
    text = path.read_text(encoding="utf-8")
    lines = ("".join(json.loads(text)["cells"][0]["source"]) if path.suffix == ".ipynb" else text).splitlines()
    return lines[1].removeprefix("# ") if path.suffix == ".yaml" else lines[0].strip('"# ')


def copy_template(name: str, destination: Path | None = None) -> Path:
    """Copy a template (or a path of the README) to a new file or into a directory, and return the copy."""
    known = list_templates()
    plain = name.removeprefix("configs/").removesuffix(".yaml")
    if plain not in known:
        near = difflib.get_close_matches(plain, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise UsageError(f"no config, recipe, notebook or template is called {name}", fix=hint)
    copy = Path(destination or ".")
    copy = copy / known[plain].name if copy.is_dir() else copy
    if not copy.parent.is_dir():
        raise UsageError(f"there is no directory {copy.parent}", place=copy, fix="make it, or name another place")
    if copy.exists():
        raise UsageError(f"{copy} exists", fix=f"name another file: cogumi cp {name} FILE")
    try:
        shutil.copyfile(known[plain], copy)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", place=copy, fix="name a place that can") from None
    return copy


def parse_overrides(words: Iterable[str] | None) -> dict[str, Any]:
    """Parse command-line words such as `train.max_steps=5` to keyword overrides of `load_config`."""
    overrides = {}
    for word in words or ():
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageError(f"`{word}` is not an override", fix="write key=value, such as train.max_steps=5")
        overrides[key.replace(".", "__")] = parse_scalar(text)
    return overrides
