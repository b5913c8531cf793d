"""The text of a YAML with other values in it: a key that is changed is written on its line, comments and order stay."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

ABSENT = object()  # the value of a key that is taken out
Entry = tuple[yaml.Node, yaml.Node]


def edit_yaml(text: str, values: Mapping[str, Any]) -> str:
    """The text with `values`, by section and key, instead of its own.

    A text that cannot be edited in its place, such as one with anchors, is written anew from the values.
    """
    new, before = text, parse_sections(text)
    try:
        for section, keys in values.items():
            old = before.get(section, {})
            for name in {**keys, **old}:
                value = keys.get(name, ABSENT)
                if not equal_values(old.get(name, ABSENT), value):
                    new = set_key(new, section, name, value, keys)
        if equal_values(drop_empty(parse_sections(new)), drop_empty(values)):
            return new
    except yaml.YAMLError:
        pass
    return dump_sections(values)


def parse_sections(text: str) -> dict[str, Any]:
    """The values of a text, `lora:` with nothing in it being an empty mapping."""
    return {section: {} if keys is None else keys for section, keys in (yaml.safe_load(text) or {}).items()}


def dump_sections(values: Mapping[str, Any]) -> str:
    """A YAML of the values, a line for each key of a section."""
    lines = []
    for section, keys in values.items():
        lines += [f"{section}:\n"] if keys else []
        lines += [f"  {dump_flow(name)}: {dump_flow(value)}\n" for name, value in keys.items()]
    return "".join(lines)


def dump_flow(value: Any) -> str:
    """A value as it stands on one line."""
    text = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf"))
    return json.dumps(value, ensure_ascii=False) if "\n" in text.strip() else text.strip()[1:-1]


def equal_values(a: Any, b: Any) -> bool:
    """Equal, and of one type all the way down: 1 is neither 1.0 nor true."""
    one, other = (json.dumps(value, sort_keys=True, default=repr) for value in (a, b))
    return one == other


def drop_empty(value: Any) -> Any:
    """Without mappings that hold nothing: a section without keys is no section."""
    if not isinstance(value, Mapping):
        return value
    inner = {key: drop_empty(each) for key, each in value.items()}
    return {key: each for key, each in inner.items() if each != {}}


# ------------------------------------------------------------------------------------------------- one change in a text


def set_key(text: str, section: str, name: str, value: Any, keys: Mapping[str, Any]) -> str:
    """keys: all that the section then holds, for one that stands on a line of its own or holds nothing yet."""
    lines, at = text.split("\n"), find_entry(yaml.compose(text, Loader=yaml.SafeLoader), section)
    if at is None:
        return f"{text.rstrip()}\n{dump_sections({section: {name: value}})}"
    node = at[1]
    if not isinstance(node, yaml.MappingNode) or node.flow_style:
        value = keys
    else:
        at = find_entry(node, name)
        if at is None:
            end = find_lines(lines, node.value[-1])[1]
            lines[end:end] = [f"{' ' * node.start_mark.column}{dump_flow(name)}: {dump_flow(value)}"]
            return "\n".join(lines)
    first, end = find_lines(lines, at)
    lines[first:end] = [] if value is ABSENT else [replace_value(lines[first:end], at, value)]
    return "\n".join(lines)


def find_entry(mapping: Any, name: str) -> Entry | None:
    return next((entry for entry in mapping.value if entry[0].value == name), None) if mapping else None


def find_lines(lines: list[str], entry: Entry) -> tuple[int, int]:
    """The first line of a key and the one after its last: PyYAML has a block end where the next key begins."""
    key, value = entry
    is_block = getattr(value, "flow_style", None) is False or getattr(value, "style", None) in ("|", ">")
    first, end = key.start_mark.line, value.end_mark.line + (not is_block)
    while end > first + 1 and lines[end - 1].strip()[:1] in ("", "#"):
        end -= 1
    return first, end


def replace_value(lines: list[str], entry: Entry, new: Any) -> str:
    """The line of a key with another value. A comment behind it stays in its column where there is room."""
    key, value = entry
    line = f"{lines[0][: key.end_mark.column]}: {dump_flow(new)}"
    comment = lines[0][value.end_mark.column :].strip() if len(lines) == 1 else ""
    return f"{line} ".ljust(lines[0].rfind(comment)) + comment if comment else line
