"""The text of a YAML with other values in it: what is changed is changed in its place, comments and order stay."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import yaml

ABSENT = object()  # the value of a key that is taken out
Way = tuple[str, ...]


def edit_yaml(text: str, values: Mapping[str, Any]) -> tuple[str, bool]:
    """(the text with `values` instead of its own, whether its comments are still there).

    A text that cannot be edited in its place, such as one with anchors, is written anew from the values.
    """
    new = text
    try:
        for path, value in diff_values(parse_sections(text), values):
            new = apply_change(new, path, value, values)
        kept = equal_values(drop_empty(parse_sections(new)), drop_empty(values))
    except yaml.YAMLError:
        kept = False
    return (new, True) if kept else (dump_sections(values), False)


def parse_sections(text: str) -> dict[str, Any]:
    """The values of a text, `lora:` with nothing in it being an empty mapping."""
    return {section: {} if keys is None else keys for section, keys in (yaml.safe_load(text) or {}).items()}


def dump_sections(values: Mapping[str, Any]) -> str:
    """A YAML of the values, a line for each key of a section."""
    return "".join(f"{section}:\n{dump_keys(keys, '  ')}\n" for section, keys in values.items() if keys)


def dump_keys(keys: Mapping[str, Any], indent: str) -> str:
    return "\n".join(f"{indent}{dump_flow(key)}: {dump_flow(value)}" for key, value in keys.items())


def dump_flow(value: Any) -> str:
    """A value as it stands on one line."""
    text = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf"))
    return json.dumps(value, ensure_ascii=False) if "\n" in text.strip() else text.strip()[1:-1]


def diff_values(old: Mapping[str, Any], new: Mapping[str, Any], above: Way = ()) -> Iterator[tuple[Way, Any]]:
    """What makes `new` of `old`: (path, value), with ABSENT for what is taken out."""
    for key in [*new, *(key for key in old if key not in new)]:
        before, after = old.get(key, ABSENT), new.get(key, ABSENT)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from diff_values(before, after, (*above, key))
        elif not equal_values(before, after):
            yield (*above, key), after


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


def apply_change(text: str, path: Way, value: Any, values: Mapping[str, Any]) -> str:
    root = node = yaml.compose(text, Loader=yaml.SafeLoader)
    way: list[tuple[yaml.Node, yaml.Node]] = []  # the entries that lead there, as far as there are any
    for depth, name in enumerate(path, 1):
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        found = next((entry for entry in entries if entry[0].value == name), None)
        if found is None:
            break
        way.append(found)
        node = found[1]
        if depth < len(path) and isinstance(node, yaml.MappingNode) and node.flow_style:  # written anew, on its line
            whole = reduce(lambda inner, key: inner[key], path[:depth], values)
            return replace_value(text, *way[-1], dump_flow(whole))
    if value is ABSENT:
        while len(way) > 1 and len(way[-2][1].value) == 1:  # the last key takes its mapping along
            way.pop()
        key, node = way[-1]
        end = max(end_of(text, node), key.end_mark.index + 1)
        return text[: text.rfind("\n", 0, key.start_mark.index) + 1] + text[line_end(text, end) + 1 :]
    rest = path[len(way) :]
    if not rest:
        return replace_value(text, *way[-1], dump_flow(value))
    for name in reversed(rest[1:]):
        value = {name: value}
    above = way[-1][1] if way else root
    if isinstance(above, yaml.MappingNode):
        return insert_key(text, above, rest[0], value)
    return replace_value(text, *way[-1], dump_flow({rest[0]: value}))  # `lora:` with nothing in it


def end_of(text: str, node: yaml.Node) -> int:
    """Where a value ends: PyYAML has a block end where the next key begins, beyond comments."""
    end: int = node.end_mark.index
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        if not isinstance(last, tuple):
            return end_of(text, last)
        return max(end_of(text, last[1]), last[0].end_mark.index + 1)  # a key without a value ends at its colon
    return len(text[:end].rstrip()) if getattr(node, "style", None) in ("|", ">") else end


def line_end(text: str, position: int) -> int:
    found = text.find("\n", position)
    return len(text) if found < 0 else found


def replace_value(text: str, key: yaml.Node, value: yaml.Node, new: str) -> str:
    """`new` in the place of a value, on the line of its key. A comment behind it stays in its column where there is room."""
    start, end = value.start_mark.index, end_of(text, value)
    on_a_line = "\n" not in text[key.end_mark.index : end]
    if start == end or not on_a_line:
        start, new = text.index(":", key.end_mark.index) + 1, f" {new}"
        end = max(start, end)
    behind = text[end:]
    if spaces := re.match(" +(?=#)", behind):
        column = len(spaces[0]) + (end - start if on_a_line else 0)
        behind = " " * max(1, column - len(new)) + behind[len(spaces[0]) :]
    return text[:start] + new + behind


def insert_key(text: str, mapping: yaml.MappingNode, key: str, value: Any) -> str:
    """A key on a line of its own at the end of a mapping."""
    at = line_end(text, end_of(text, mapping))
    indent = " " * mapping.start_mark.column
    section = not indent and value
    below = f"\n{dump_keys(value, indent + '  ')}" if section else f" {dump_flow(value)}"
    return f"{text[:at].rstrip(chr(10))}\n{indent}{dump_flow(key)}:{below}{text[at:] or chr(10)}"
