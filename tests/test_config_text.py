"""A YAML with other values: in their places, with the comments, and never a text that says something else."""

import random
from typing import Any

import pytest
import yaml

from cogumi.config.source import PACKAGE
from cogumi.config.yaml_text import drop_empty, dump_sections, edit_yaml, equal_values, parse_sections

TEXT = """\
# head
model:
  name: a   # the name
  quantization_config:           # transformers
    load_in_4bit: true
    llm_int8_skip_modules: [lm_head, down_proj]  # 682
lora:
data:
  fim: {max_length: 192, middle_chars: [4, 24], overlong: trim}
  mix:
    - source: x   # one
      weight: 2
    - source: y
  stop: |
    a
    b

train:                             # trl
  learning_rate: 1e-3     # high
  beta:       # not set
# tail
"""
TEXTS = [TEXT, *(path.read_text() for path in sorted((PACKAGE / "configs").rglob("*.yaml")))]


def test_values_are_changed_where_they_stand() -> None:
    values = parse_sections(TEXT)
    assert edit_yaml(TEXT, values) == TEXT
    values["train"] |= {"learning_rate": "5e-7", "beta": "no", "packing": True}
    values["data"]["fim"] |= {"seed": 3}
    del values["data"]["fim"]["max_length"]
    values["data"]["mix"] = [{"source": "z"}]
    del values["data"]["stop"]
    values["lora"] = {"r": 8}
    values["cogumi"] = {"method": "sft", "stop": ["a, b", "#"]}
    del values["model"]["quantization_config"]
    assert edit_yaml(TEXT, values) == (
        "# head\n"
        "model:\n"
        "  name: a   # the name\n"
        "lora: {r: 8}\n"
        "data:\n"
        "  fim: {middle_chars: [4, 24], overlong: trim, seed: 3}\n"
        "  mix: [{source: z}]\n"
        "\n"
        "train:                             # trl\n"
        "  learning_rate: 5e-7     # high\n"
        "  beta: 'no'  # not set\n"
        "  packing: true\n"
        "# tail\n"
        "cogumi:\n"
        "  method: sft\n"
        "  stop: ['a, b', '#']\n"
    )


VALUES: list[Any] = [
    "no", True, None, 3, 1.0, "5e-7", 1e-8, float("inf"), [1, "a, b"], {"k": [1]}, "x\ny", "#x", "", ": ", "{", "'", '"', "1", [],
    {"a": {"b": 1}}, "-", "?", "é😀\x1b", "a" * 300 + " b",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_the_text_says_what_was_asked_for_and_keeps_the_comments(seed: int) -> None:
    draw = random.Random(seed)
    text = draw.choice(TEXTS)
    values = parse_sections(text)
    for _ in range(6):
        section = values[draw.choice(list(values))]
        if isinstance(section.get("fim"), dict) and draw.random() < 0.3:
            section = section["fim"]
        keys = [*section, "new", "on", "x y"]
        if section and draw.random() < 0.4:
            del section[draw.choice(list(section))]
        else:
            section[draw.choice(keys)] = draw.choice(VALUES)
    new = edit_yaml(text, values)
    assert equal_values(drop_empty(parse_sections(new)), drop_empty(values))
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert [line for line in new.splitlines() if line.startswith("#")] == comments


@pytest.mark.parametrize(
    "text", ["a: &x {k: 1}\nb: *x\n", "a: {k: !!str 1}\n", "a:\n  <<: {k: 1}\n  l: 2\n", "? a\n: {k: 1}\n"]
)
def test_what_cannot_be_edited_is_written_anew(text: str) -> None:
    values = parse_sections(text)
    values[list(values)[-1]]["k"] = "changed"
    new = edit_yaml(text, values)
    assert equal_values(parse_sections(new), values)


def test_values_alone_are_a_line_for_each_key() -> None:
    values = {"model": {"name": "x"}, "lora": {}, "data": {"fim": {"seed": 1}, "mix": [{"source": "a"}]}}
    assert dump_sections(values) == "model:\n  name: x\ndata:\n  fim: {seed: 1}\n  mix: [{source: a}]\n"
    assert yaml.safe_load(dump_sections(values)) == drop_empty(values)
