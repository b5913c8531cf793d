"""Where the values of a run come from: a YAML or a mapping, then the environment and the command line, each with its place."""

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cogumi.core.errors import UsageError

SECTIONS = ("model", "lora", "data", "train", "cogumi")
# Where each value came from, for messages: dotted key -> "file.yaml:12", "environment COGUMI_X", "override".
Origins = dict[str, str]


def read_source(config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], Origins, str]:
    if isinstance(config, Mapping):
        return copy_mapping(config), {}, "config"
    path = named(Path(config))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError("no such config file", place=path, fix=suggest_yaml(path)) from None
    except IsADirectoryError:
        raise UsageError(
            f"{path} is a directory", fix=f"name a YAML file in it; {suggest_yaml(path / 'x.yaml')}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read as UTF-8 text: {error}", place=path) from None
    try:
        node, values = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = " ".join((error.problem or error.context or "").split())
        raise UsageError(f"not valid YAML: {problem}", place=f"{path}:{line}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"not valid YAML: {' '.join(str(error).split())}", place=path) from None
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"a config is a mapping with the sections {', '.join(SECTIONS)}", place=f"{path}:1")
    origins: Origins = {}
    record_lines(node, "", str(path), origins)
    return values, origins, str(path)


def named(path: Path) -> Path:
    """A config that comes with the package where `path` is its name, as in `cogumi cp`: `smoke/sft`; else the path."""
    if is_yaml(path) or path.exists():
        return path
    from cogumi.config.catalog import there_are

    return there_are().get(path.as_posix(), path)


def is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")  # a name may have a point in it, as llama-3.1 has


def record_lines(node: yaml.MappingNode, prefix: str, path: str, origins: Origins) -> None:
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        place = f"{path}:{key.start_mark.line + 1}"
        if dotted in origins:
            raise UsageError(f"`{dotted}` is set twice (first at {origins[dotted]})", key=dotted, place=place)
        origins[dotted] = place
        if isinstance(value, yaml.MappingNode):
            record_lines(value, f"{dotted}.", path, origins)


def suggest_yaml(path: Path) -> str:
    """The nearest YAML beside a path that is none; of a name without an ending the nearest of the package's own."""
    names = {each.name: path.parent / each.name for each in path.parent.glob("*.yaml")} if path.parent.is_dir() else {}
    if not is_yaml(path):
        from cogumi.config.catalog import there_are

        names |= {name: Path(name) for name in there_are() if not name.endswith(".py")}
    near = difflib.get_close_matches(path.name if is_yaml(path) else str(path), names, n=1)
    if near:
        return f"did you mean {names[near[0]]}?"
    return f"there are {listed(sorted(names))}" if names else "`cogumi cp` lists the configs that come with cogumi"


def listed(names: Sequence[str]) -> str:
    """The first dozen of the names, and how many more there are."""
    return ", ".join(names[:12]) + f" and {len(names) - 12} more" * (len(names) > 12)


def parse_scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # `name: [a` from a shell is a string; the type check has the last word


def copy_mapping(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {k: copy_mapping(v) if isinstance(v, Mapping) else v for k, v in mapping.items()}


def no_section(key: str, value: Any) -> str:
    return f"{key}: must be a section (keys and values), is {value!r}"


def set_value(values: dict[str, Any], origins: Origins, key: str, value: Any, origin: str) -> None:
    section, *rest = key.split(".")
    if section in SECTIONS and not rest and not isinstance(value, Mapping):
        raise UsageError(no_section(section, value), key=section, place=origin)
    if section not in SECTIONS or not rest or not all(rest):
        example = (origin.split()[0] == "environment" and "COGUMI_TRAIN__MAX_STEPS") or "train.max_steps"
        near = difflib.get_close_matches(section, SECTIONS, n=1) or ["train"]
        raise UsageError(f"{origin}: names no config key; sections are {', '.join(SECTIONS)}, as in {example}"
                         + (f" (did you mean {near[0]}?)" if section not in SECTIONS else ""))  # fmt: skip
    here = values
    for part in (section, *rest[:-1]):
        inner = here.setdefault(part, {})
        if inner is None:
            inner = here[part] = {}
        if not isinstance(inner, dict):
            raise UsageError(no_section(part, inner), key=part, place=origin)
        here = inner
    here[rest[-1]] = value
    origins[key] = origin
