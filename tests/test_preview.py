"""What a run would train on, shown before it does: the same ids and masks that the trainer gets, and an honest count."""

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

import cogumi
from cogumi.config.schema import load_config
from cogumi.data.rows import describe_value
from cogumi.data.stdlib_sample import sample_path
from cogumi.methods.examples import Shares, prepare_examples
from cogumi.methods.preparation import load_run_tokenizer
from cogumi.methods.preview import Preview
from cogumi.models.loading import load_tokenizer, read_base
from tests.builders import run_config
from tests.chat_tokenizers import ask, say

Config = dict[str, Any]


@pytest.fixture
def chat(tiny_model: Path, tmp_path: Path) -> Config:
    rows = pl.read_parquet(sample_path("cogumi:stdlib-chat")).select("messages").head(40).to_dicts()
    rows += [rows[3], {"messages": []}, {"messages": [ask("only a question")]}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"name": str(tiny_model)},
        "data": {"source": str(tmp_path / "chats.jsonl"), "format": "chat", "overlong": "truncate"},
        "train": {"chat_template_path": "cogumi:tulu", "max_length": 60},
        "cogumi": {"method": "sft", "run_dir": str(tmp_path / "run")},
    }


def test_it_shows_what_the_trainer_gets(chat: Config) -> None:
    shown = cogumi.preview(chat, examples=5)
    run = load_config(chat)
    dataset = prepare_examples(run, load_run_tokenizer(run, read_base(run.model.name))).train.dataset
    tokenizer = load_tokenizer(run.model.name)
    for marked, row in zip(shown.examples, dataset, strict=False):
        pieces = [(kind, text.replace("⟦", "").replace("⟧", "")) for kind, text in marked]
        assert "".join(text for _, text in pieces) == tokenizer.decode(row["input_ids"])
        learned = [i for i, mask in zip(row["input_ids"], row["completion_mask"], strict=True) if mask]
        assert "".join(text for kind, text in pieces if kind == "learned") == tokenizer.decode(learned)
    assert len(shown.examples) == 5
    assert not Path(chat["cogumi"]["run_dir"]).exists()


def test_every_row_is_accounted_for(chat: Config) -> None:
    actual = cogumi.preview(chat, examples=0)
    train = actual.train
    assert train.rows == train.examples + sum(train.dropped.values()) == 43
    assert sum(train.dropped.values()) >= 2  # no messages at all, and no answer
    assert train.duplicated == 1
    assert train.truncated > 0
    assert 0 < train.learned < train.tokens
    assert sum(count for *_, count in actual.lengths) == train.examples
    assert all("the first is row 4" in line for line in actual.reports)


MESSAGES = [ask("2 + 2?"), say("4")]
BROKEN = {
    "chat": ({"messages": MESSAGES}, {"messages": [*MESSAGES[:1], {"role": "assistant"}]}, '"content": "2 + 2?"'),
    "prompt_completion": (
        {"prompt": "2+2=", "completion": " 4"},
        {"prompt": "2+3=", "completion": None},
        "2+3= | null",
    ),
}


@pytest.mark.parametrize("shape", BROKEN)
def test_a_bad_row_is_shown_as_text(shape: str, chat: Config, tmp_path: Path) -> None:
    good, bad, said = BROKEN[shape]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (good, bad)))
    chat["data"] = {"source": str(path), "format": shape, "eval_rows": 0}
    (line,) = cogumi.preview(chat, examples=0).reports
    assert line.partition(": ")[2].startswith("1 ")
    assert said in line
    assert not re.search(r"None|\{'|\('|: '", line)


def test_what_the_rewards_get_is_shown_as_json(tmp_path: Path) -> None:
    assert describe_value(["a", None, {"é": True}]) == '["a", null, {"é": true}]'
    assert describe_value(MESSAGES) == "user: 2 + 2? assistant: 4"
    assert describe_value(("2+3=", "", None)) == "2+3= | (empty) | null"


def test_a_broken_file_is_named_once(chat: Config, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    chat["data"] = {"source": str(path), "format": "prompt_completion", "eval_rows": 0}
    with pytest.raises(cogumi.UsageError) as caught:
        cogumi.preview(chat)
    assert str(caught.value).startswith(f"{path}:2: not JSON, or cut short (Expecting value); ")
    assert str(caught.value).count("rows.jsonl") == 1


def test_pairs_and_prompts_are_shown_too(chat: Config, tmp_path: Path) -> None:
    pair = {"prompt": [ask("2 + 2?")], "chosen": [say("4")], "rejected": [say("5")]}
    pl.DataFrame([pair] * 2).write_parquet(tmp_path / "pairs.parquet")
    source = {"source": str(tmp_path / "pairs.parquet"), "format": "preference"}
    model = cogumi.train(chat, train__max_steps=1, train__max_length=256, train__gradient_checkpointing=False).merged
    shown = cogumi.preview({**chat, "model": {"name": str(model)}, "data": source, "train": {}}, cogumi__method="dpo")
    assert [kind for kind, _ in shown.examples[0]] == ["context", "learned", "rejected"]
    assert "4⟦<|endoftext|>⟧" in shown.examples[0][1][1]


def test_what_is_learned_stands_between_marks() -> None:
    shares = Shares("rows", 2, 1, {"null [x]": 1}, 0, 0, 4, 2)
    shown = Preview(shares, None, (), ((0, 4, 1),), ((("context", "a[b]"), ("learned", "ü")),))
    assert "a[b]«ü»" in str(shown)
    assert "50.0% null [x]" in str(shown)


def test_the_command(chat: Config, tmp_path: Path, command_line: Any) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(chat))
    assert command_line("preview", tmp_path / "run.yaml", "-n", "1")[0] == 0
    code, output, _ = command_line("preview", tmp_path / "run.yaml", "--json")
    assert (code, json.loads(output)["train"]["rows"]) == (0, 43)
    code, _, errors = command_line("preview", tmp_path / "run.yaml", "data.source=gone.jsonl")
    assert code == 2
    assert "gone.jsonl: no such file" in errors


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_rows": 10}, "10 of 43 rows kept (data.max_rows)"),
        ({"fraction": 0.5}, "22 of 43 rows kept (data.fraction)"),
        ({"fraction": 0.5, "max_rows": 10}, "10 of 43 rows kept (data.fraction, data.max_rows)"),
        ({"max_rows": 1000}, None),
    ],
)
def test_rows_that_are_left_alone_are_said_with_the_key_that_does_it(
    chat: Config, limits: Config, said: str | None
) -> None:
    shown = cogumi.preview(chat | {"data": chat["data"] | {"eval_rows": 0} | limits})
    assert [line for line in shown.reports if " kept (" in line] == ([said] if said else [])
    assert said is None or said in str(shown)


def test_prompts_alone_are_data_for_gspo(tiny_model: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"def add_{number}(a, b):"}) for number in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    rows = {"format": "prompt_completion", "eval_rows": 8}
    config = run_config("gspo", tiny_model, tmp_path / "prompts.jsonl", tmp_path / "run", data_section=rows)
    shown = cogumi.preview(config, examples=2, train__max_completion_length=8, cogumi__rewards=["parses"])
    assert "def add_" in str(shown)
