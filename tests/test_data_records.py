"""The original record of each row in the rewards: every type of JSON, through the whole path of the data, and of tables."""

import json
import math
import pickle
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from golden import Golden

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.data import sources as reading
from cogumi.data.rows import Dropped
from cogumi.data.sources import ORIGINALS, batches
from cogumi.methods.examples import Examples, prepare_examples
from cogumi.models.loading import load_tokenizer
from cogumi.rl.memory_plan import repeat_to_rollout
from tests.builders import run_config
from tests.chat_tokenizers import ask, chat_tokenizer, say, tiny_for, turn

Config = dict[str, Any]

# The text of a value of JSON, as a line may have it.
VALUES = [
    "null", "true", "false", "0", "1", "-1", "1.0", "-0.0", "0.1", "1e2", "1E-7", "1e400", "-1e400", "5e-324",
    "3.141592653589793238462643", "123456789012345678", "9007199254740993", "9223372036854775808", "-18446744073709551617",
    "1" + "0" * 80, '"1"', '"1e400"', '"null"', '""', '" \\n\\t"', '"é漢😀"', r'"\u00e9\ud83d\ude00"', r'"\ud800"', r'"\u0000"',
    '"table {}"', "[]", "{}", "[[]]", "[{}]", '{"": {}}', "[null]", '{"a": null}', '{"a": {"b": null, "c": 1}}',
    '[1, 1.0, "1", true, null, [1], {"1": 1}]', '{"role": "user", "content": "hi", "tool_calls": null}', '{"b": 1, "a": 2}',
    r'{"\u0000bytes": "ff"}', r'{"\u0000decimal": 1}', '{"a": 1, "a": 2}', "[" * 200 + "]" * 200, '[{"a": 1}, {"b": [1.5]}, "x"]',
]  # fmt: skip
REWARD = """
import pickle
from pathlib import Path

def seen(prompts, record, value, completions, **columns):
    with Path(__file__).with_suffix(".pickle").open("ab") as file:
        pickle.dump(list(zip(prompts, record, value)), file)
    return [float(len(each)) for each in completions]
"""


def lines_of_every_type(count: int) -> list[str]:
    """Lines whose columns hold all kinds of values: one in eleven has no `value`, and many keys are in a few rows only."""
    lines = []
    for n in range(count):
        value, other = VALUES[n % len(VALUES)], VALUES[(7 * n + 3) % len(VALUES)]
        mine = "" if n % 11 == 5 else f', "value": {value}'
        lines.append(f'{{"id": {n}, "prompt": "row {n}:"{mine}, "key {n % 5}": {other}, "record": [{value}, {n}.0]}}')
    return lines


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types all the way down, and with the keys in the same order: 1, 1.0 and true are three values."""
    return bool(one == other) and repr(one) == repr(other)


def config_of(model: Path, source: Path | None, home: Path, **data: Any) -> Config:
    rows = {"format": "prompt_completion", "columns": {"value": "value"}, "eval_rows": 0, **data}
    train = {
        "max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 100, "steps_per_generation": 2,
        "max_completion_length": 2, "save_strategy": "no",
    }  # fmt: skip
    rewards = {"rewards": [f"{home}/own.py:seen"]}
    return run_config("gspo", model, source, home / "run", data_section=rows, train=train, cogumi=rewards)


def unpickled(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while file.peek(1):
            yield from pickle.load(file)


def examples_of(config: Config, tokenizer: Any = None, **overrides: Any) -> Examples:
    run = load_config(config, **overrides)
    return prepare_examples(run, tokenizer or load_tokenizer(run.model.name))


def test_a_hundred_records_arrive_in_the_reward_as_their_lines_say(tiny_model: Path, tmp_path: Path) -> None:
    """A run of one rollout over all prompts: what the reward is given equals `json.loads` of the line, types included."""
    lines = lines_of_every_type(100)
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "own.py").write_text(REWARD)
    cogumi.train(config_of(tiny_model, tmp_path / "rows.jsonl", tmp_path))

    expected = [json.loads(line) for line in lines]
    results = list(unpickled(tmp_path / "own.pickle"))
    assert {record["id"] for _, record, _ in results} == set(range(100))
    assert len(results) >= 200
    for prompt, record, value in results:
        wanted = expected[record["id"]]
        assert same(record, wanted)
        assert same(value, wanted.get("value"))
        assert prompt == wanted["prompt"]
    assert any(math.isinf(record["value"]) for _, record, _ in results if isinstance(record.get("value"), float))


def test_messages_with_calls_of_tools_go_through_a_run_as_they_are(tiny_model: Path, tmp_path: Path) -> None:
    """The reward gets the prompts that TRL renders: their messages have the keys and arguments of the row, and no others."""
    tokenizer, home = chat_tokenizer("qwen3"), tmp_path / "model"
    tiny_for(tokenizer).save_pretrained(home)
    tokenizer.save_pretrained(home)
    arguments = {"a": 2, "b": [0.30000000000000004, 10**20, None], "c": {}}
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    told = [say("", tool_calls=[call]), turn("tool", "5", name="add")]
    messages = [[ask(f"row {n}"), *(told if n % 2 else [])] for n in range(16)]
    rows = [{"id": n, "value": n, "prompt": prompt} for n, prompt in enumerate(messages)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own.py").write_text(REWARD)
    config = config_of(home, tmp_path / "rows.jsonl", tmp_path, eval_rows=2)
    result = cogumi.train(config, train__per_device_train_batch_size=14)
    results = list(unpickled(tmp_path / "own.pickle"))
    assert {record["id"] % 2 for _, record, _ in results} == {0, 1}
    assert all(same(prompt, rows[record["id"]]["prompt"]) for prompt, record, _ in results)
    assert "row" in (result.run_dir / "samples.jsonl").read_text()


def test_a_record_stays_with_its_prompt_whatever_is_chosen(tiny_model: Path, tmp_path: Path) -> None:
    """Mixing, copies, held-out rows, a share and a maximum of rows, repetition, and a file that is gone afterwards."""
    lines = lines_of_every_type(120)
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:80] + lines[:20]))
    (tmp_path / "b.jsonl").write_text("\n".join(line.replace("value", "gold") for line in lines[80:]))
    mix = [
        {"source": str(tmp_path / "a.jsonl"), "weight": 2},
        {"source": str(tmp_path / "b.jsonl"), "columns": {"value": "gold"}},
    ]
    config = config_of(tiny_model, None, tmp_path, mix=mix, eval_rows=9, deduplicate=True, fraction=0.9, max_rows=60)
    examples = examples_of(config)
    for file in ("a.jsonl", "b.jsonl"):
        (tmp_path / file).unlink()

    expected = [json.loads(line if n < 80 else line.replace("value", "gold")) for n, line in enumerate(lines)]
    repeated, _ = repeat_to_rollout(examples.train.dataset, 90)
    assert examples.held_out is not None
    for rows, count in ((repeated, len(repeated)), (examples.held_out.dataset, 9)):
        assert len(rows) == count
        for row in rows:
            wanted = expected[row["record"]["id"]]
            assert same(row["record"], wanted)
            assert same(row["value"], wanted.get("value", wanted.get("gold")))
            assert row["prompt"] == wanted["prompt"]
    ids = [each["id"] for each in repeated["record"]]
    assert len(set(ids)) == len(examples.train.dataset) == 60
    assert {each["id"] for each in examples.held_out.dataset["record"]}.isdisjoint(ids)
    assert examples.prompts is not None
    assert "record" not in examples.prompts.column_names


def test_sources_need_not_have_the_same_columns(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "x"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "b", "gold": [1], "more": 2}\n')
    mix = [{"source": str(tmp_path / f"{name}.jsonl"), "columns": columns} for name, columns in
           (("a", {}), ("b", {"answer": "gold", "more": "more"}))]  # fmt: skip
    dataset = examples_of(config_of(tiny_model, None, tmp_path, mix=mix)).train.dataset
    collected = {row["prompt"]: (row["answer"], row["more"]) for row in dataset}
    assert collected == {"a": ("x", None), "b": ([1], 2)}


def test_a_row_of_a_table_is_its_cells_as_they_were_read(tiny_model: Path, tmp_path: Path) -> None:
    row = {
        "prompt": "p", "bytes": b"\xff\x00", "text": "\0bytes", "when": datetime(2026, 1, 2, 3, 4, 5, 678901),
        "zoned": datetime(2026, 1, 2, tzinfo=UTC), "day": date(2026, 1, 2), "hour": time(3, 4, 5, 6),
        "length": timedelta(days=-3, microseconds=7), "money": Decimal("12345678901234567890.10"),
        "value": {"a": [1.0, None], "b": {"c": b"x"}}, "none": None, "number": 2**63 - 1, "half": 1.0, "yes": True,
    }  # fmt: skip
    pl.DataFrame([row, row | {"prompt": "q", "value": None}]).write_parquet(tmp_path / "rows.parquet")
    config = config_of(tiny_model, tmp_path / "rows.parquet", tmp_path, eval_rows=1)
    examples = examples_of(config)
    assert examples.held_out is not None
    for part in (examples.train, examples.held_out):
        (found,) = part.dataset
        expected = row if found["prompt"] == "p" else row | {"prompt": "q", "value": None}
        assert found["record"] == expected
        assert [type(value) for value in found["record"].values()] == [type(value) for value in expected.values()]
        assert found["value"] == expected["value"]
    assert examples.prompts is not None
    json.dumps(examples.prompts[0])

    (tmp_path / "rows.csv").write_bytes(b"prompt,n,value\np,007,\xff\nq,,z\n")
    config = config_of(tiny_model, tmp_path / "rows.csv", tmp_path)
    rows = {row["prompt"]: row["record"] for row in examples_of(config).train.dataset}
    assert rows == {"p": {"prompt": "p", "n": "007", "value": b"\xff"}, "q": {"prompt": "q", "n": "", "value": "z"}}


def test_code_has_its_record_too(tiny_model: Path, tmp_path: Path, sources: list[str]) -> None:
    rows = [{"source": code, "level": level} for level, code in enumerate(sources[:12])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = config_of(tiny_model, tmp_path / "rows.jsonl", tmp_path, format="fim", columns={"level": "level"})
    dataset = examples_of(config, data__fim__max_length=400).train.dataset
    assert len(dataset) > 5
    for row in dataset:
        assert row["record"] == rows[row["level"]]
        assert row["prefix"] + row["middle"] + row["suffix"] == row["record"]["source"]


def test_records_are_read_for_rewards_alone(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "x", "b": 1}\n')
    (frame,) = batches([tmp_path / "a.jsonl"], ["a"], originals=True)
    assert frame.to_dicts() == [{"a": "x", ORIGINALS: '{"a": "x", "b": 1}'}]
    (frame,) = batches([tmp_path / "a.jsonl"], ["a"])
    assert frame.columns == ["a"]


def test_text_and_messages_in_one_data_set_are_refused_in_any_batch(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr(reading, "MOST_ROWS", 1)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "b"}]}\n')
    config = config_of(tiny_model, tmp_path / "rows.jsonl", tmp_path, columns={})
    with golden.raises("data", key="data.source", message="messages from there on"):
        examples_of(config, chat_tokenizer("qwen3"))


def test_a_row_of_another_kind_is_named_by_its_place_in_the_file(tiny_model: Path, tmp_path: Path) -> None:
    """Not among the rows that were chosen: half of them are held out here."""
    rows: list[Any] = [{"prompt": f"row {n}"} for n in range(60)]
    rows[47] = {"prompt": [ask("b")]}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = config_of(tiny_model, tmp_path / "rows.jsonl", tmp_path, columns={}, eval_rows=30)
    with pytest.raises(UsageError, match="row 48 is messages"):
        examples_of(config, chat_tokenizer("qwen3"))


def test_code_that_is_no_text_in_some_rows_is_dropped_and_counted(
    tiny_model: Path, tmp_path: Path, sources: list[str]
) -> None:
    rows: list[Any] = [*sources[:12], 5, ["x"], {"a": 1}, None, sources[12], 1.5, True]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"source": row}) + "\n" for row in rows))
    config = config_of(tiny_model, tmp_path / "rows.jsonl", tmp_path, format="fim", columns={})
    actual = examples_of(config, data__fim__max_length=400).train
    assert actual.dropped["with a field that is no text"] == Dropped(5, 13, "5")
    assert actual.dropped["null"].row == 16
    (tmp_path / "rows.jsonl").write_text('{"source": 5}\n{"source": [5]}\n')
    with pytest.raises(UsageError, match=r"data\.column: fim needs a column of text, and this one holds no text"):
        examples_of(config)
