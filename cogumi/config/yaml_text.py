"""The text of a YAML with other values in it: what is changed is changed in its place, comments and order stay."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

ABSENT = object()  # the value of a key that is taken out
Way = tuple[str, ...]


def with_values(text: str, values: Mapping[str, Any]) -> tuple[str, bool]:
    """(the text with `values` instead of its own, whether its comments are still there).

    A text that cannot be edited in its place, such as one with anchors, is written anew from the values.
    """
    new = text
    try:
        for path, value in changes(sections(text), values):
            new = changed(new, path, value)
        kept = same(pruned(sections(new)), pruned(values))
    except yaml.YAMLError:
        kept = False
    return (new, True) if kept else (written(values), False)


def sections(text: str) -> dict[str, Any]:
    """The values of a text, `lora:` with nothing in it being an empty mapping."""
    return {section: {} if keys is None else keys for section, keys in (yaml.safe_load(text) or {}).items()}


def written(values: Mapping[str, Any]) -> str:
    """A YAML of the values, a line for each key of a section."""
    return "".join(f"{section}:\n{lines(keys, '  ')}\n" for section, keys in values.items() if keys)


def lines(keys: Mapping[str, Any], indent: str) -> str:
    return "\n".join(f"{indent}{flow(key)}: {flow(value)}" for key, value in keys.items())


def flow(value: Any) -> str:
    """A value as it stands on one line."""
    text = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf"))
    return json.dumps(value, ensure_ascii=False) if "\n" in text.strip() else text.strip()[1:-1]


def changes(old: Mapping[str, Any], new: Mapping[str, Any], above: Way = ()) -> Iterator[tuple[Way, Any]]:
    """What makes `new` of `old`: (path, value). What is taken out comes last, so that a section is not emptied between."""
    for key in new:
        if isinstance(old.get(key), dict) and isinstance(new[key], dict):
            yield from (
                (path, value) for path, value in changes(old[key], new[key], (*above, key)) if value is not ABSENT
            )
        elif key not in old or not same(old[key], new[key]):
            yield (*above, key), new[key]
    for key in old:
        if key not in new:
            yield (*above, key), ABSENT
        elif isinstance(old[key], dict) and isinstance(new[key], dict):
            yield from ((path, value) for path, value in changes(old[key], new[key], (*above, key)) if value is ABSENT)


def same(a: Any, b: Any) -> bool:
    """Equal, and of one type all the way down: 1 is neither 1.0 nor true."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)  # nan


def pruned(value: Any) -> Any:
    """Without mappings that hold nothing: a section without keys is no section."""
    if not isinstance(value, Mapping):
        return value
    inner = {key: pruned(each) for key, each in value.items()}
    return {key: each for key, each in inner.items() if each != {}}


# ------------------------------------------------------------------------------------------------- one change in a text


def changed(text: str, path: Way, value: Any) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    way = entries_on(root, path)
    if value is ABSENT:
        while len(way) > 1 and len(way[-2][1].value) == 1:  # the last key takes its mapping along
            way.pop()
        mapping = way[-2][1] if len(way) > 1 else root
        assert isinstance(mapping, yaml.MappingNode)
        return without(text, mapping, way[-1])
    rest = path[len(way) :]
    if not rest:
        return replaced(text, *way[-1], flow(value))
    above = way[-1][1] if way else root
    for key in reversed(rest[1:]):
        value = {key: value}
    if isinstance(above, yaml.MappingNode):
        return added(text, above, rest[0], value)
    return replaced(text, *way[-1], flow({rest[0]: value}))  # `lora:` with nothing in it


Entry = tuple[yaml.Node, yaml.Node]


def entries_on(root: yaml.Node, path: Way) -> list[Entry]:
    """The entries that lead to `path`, as far as there are any."""
    way: list[Entry] = []
    node = root
    for key in path:
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        found = next((entry for entry in entries if entry[0].value == key), None)
        if found is None:
            break
        way.append(found)
        node = found[1]
    return way


def end_of(text: str, node: yaml.Node) -> int:
    """Where a value ends: PyYAML has a block end where the next key begins, beyond comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        if not isinstance(last, tuple):
            return end_of(text, last)
        return max(end_of(text, last[1]), last[0].end_mark.index + 1)  # a key without a value ends at its colon
    return (
        len(text[: node.end_mark.index].rstrip()) if getattr(node, "style", None) in ("|", ">") else node.end_mark.index
    )


def line_end(text: str, position: int) -> int:
    found = text.find("\n", position)
    return len(text) if found < 0 else found


def replaced(text: str, key: yaml.Node, value: yaml.Node, new: str) -> str:
    """`new` in the place of a value. A comment behind it stays in its column where there is room."""
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


def added(text: str, mapping: yaml.MappingNode, key: str, value: Any) -> str:
    """A key at the end of a mapping, on a line of its own unless the mapping stands on one."""
    if mapping.flow_style:
        at = end_of(text, mapping.value[-1][1]) if mapping.value else mapping.start_mark.index + 1
        return f"{text[:at]}{', ' if mapping.value else ''}{flow(key)}: {flow(value)}{text[at:]}"
    at = line_end(text, end_of(text, mapping))
    indent = " " * mapping.start_mark.column
    below = (
        f"{indent}{flow(key)}:\n{lines(value, indent + '  ')}"
        if not indent and value
        else f"{indent}{flow(key)}: {flow(value)}"
    )
    return f"{text[:at].rstrip(chr(10))}\n{below}{text[at:] or chr(10)}"


def without(text: str, mapping: yaml.MappingNode, entry: Entry) -> str:
    start, end = entry[0].start_mark.index, max(end_of(text, entry[1]), entry[0].end_mark.index + 1)
    if not mapping.flow_style:
        return text[: text.rfind("\n", 0, start) + 1] + text[line_end(text, end) + 1 :]
    number = mapping.value.index(entry)
    if number:
        return text[: end_of(text, mapping.value[number - 1][1])] + text[end:]
    after = mapping.value[1][0].start_mark.index if len(mapping.value) > 1 else end
    return text[:start] + text[after:]
