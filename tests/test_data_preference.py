"""Preference pairs are tokenized as TRL's DPOTrainer does it, and pairs that say nothing are dropped."""

from pathlib import Path
from typing import Any

import pytest
import trl

from cogumi.data.rows import Chunk
from tests import chat_tokenizers
from tests.chat_tokenizers import ask, chat_tokenizer, dropped_rows, say, texts, turn

Rows = list[dict[str, Any]]
COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


def text_pairs() -> Rows:
    cut = [(text[:50], text[50:90], text[60:75]) for text in texts()[:30]]
    return [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in cut if b.strip() and c.strip() and b != c]


def chat_pairs(system: bool = True) -> Rows:
    rows = []
    for at, row in enumerate(text_pairs()):
        prompt = [turn("system", "Be brief.")] if system and at % 2 else []
        if at % 3 == 0:
            prompt += [ask("hi"), say("hello")]
        sides = {side: [say(row[side])] for side in ("chosen", "rejected")}
        rows.append({"prompt": [*prompt, ask(row["prompt"])], **sides})
    return rows


def chunk_of(rows: Rows, tokenizer: Any, **options: Any) -> Chunk:
    return chat_tokenizers.chunk_of(rows, tokenizer, "dpo", "preference", **options)


def trl_prepared(rows: Rows, tokenizer: Any, tmp_path: Path) -> Rows:
    prepared = chat_tokenizers.trl_prepared(rows, tokenizer, tmp_path, "DPO")
    return [{name: row[name] for name in COLUMNS} for row in prepared]


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "qwen3", "gptoss", "gemma"])
def test_messages_are_tokenized_as_trl_does(name: str, tmp_path: Path) -> None:
    rows = chat_pairs(system=name != "gemma")
    assert chunk_of(rows, chat_tokenizer(name)).table.to_pylist() == trl_prepared(rows, chat_tokenizer(name), tmp_path)


def test_text_is_tokenized_as_trl_does(tmp_path: Path) -> None:
    rows, tokenizer = text_pairs(), chat_tokenizer("llama3")
    tokenizer.chat_template = None
    assert chunk_of(rows, tokenizer).table.to_pylist() == trl_prepared(rows, tokenizer, tmp_path)


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_an_implicit_prompt_is_what_trl_extracts(kind: str, tmp_path: Path) -> None:
    rows = text_pairs() if kind == "text" else chat_pairs()
    joined = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in rows]
    ours = chunk_of(joined, chat_tokenizer("llama3")).table.to_pylist()
    assert ours == trl_prepared(joined, chat_tokenizer("llama3"), tmp_path)
    if kind == "messages":
        assert ours == chunk_of(rows, chat_tokenizer("llama3")).table.to_pylist()


def test_a_text_prompt_with_conversations_that_repeat_it() -> None:
    question, good, bad = ask("2 + 3?"), say("5"), say("6")
    rows = [
        {"prompt": [question], "chosen": [good], "rejected": [bad]},
        {"prompt": "2 + 3?", "chosen": [question, good], "rejected": [question, bad]},
        {"prompt": "2 + 3?", "chosen": [good], "rejected": [bad]},
        {"prompt": [question], "chosen": "5", "rejected": "6"},
    ]
    expected, *others = (chunk_of([row], chat_tokenizer("qwen3")).table for row in rows)
    assert len(expected) == 1
    assert all(other.equals(expected) for other in others)


def test_overlong_pairs_are_dropped_or_cut_as_trls_collator_cuts_them(tmp_path: Path) -> None:
    rows, tokenizer = text_pairs(), chat_tokenizer("llama3")
    whole = chunk_of(rows, tokenizer).table.to_pylist()
    lengths = [len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in whole]
    limit = sorted(lengths)[len(lengths) // 2]
    dropping = chunk_of(rows, tokenizer, max_length=limit)
    assert dropping.table.to_pylist() == [row for row, n in zip(whole, lengths, strict=True) if n <= limit]
    assert dropping.dropped[f"longer than {limit} tokens"].count == sum(n > limit for n in lengths)

    cutting = chunk_of(rows, tokenizer, max_length=limit, overlong="truncate")
    assert cutting.truncated > 3
    collator = trl.trainer.dpo_trainer.DataCollatorForPreference(pad_token_id=0, max_length=limit)
    kept_rows = [row for row in whole if row["prompt_ids"] in cutting.table["prompt_ids"].to_pylist()]
    uncut = trl.trainer.dpo_trainer.DataCollatorForPreference(pad_token_id=0)
    assert collator(kept_rows)["input_ids"].tolist() == uncut(cutting.table.to_pylist())["input_ids"].tolist()


def test_pairs_that_say_nothing_are_dropped() -> None:
    pairs = [
        ("p", "same", "same"), ("p", "a", " "), (None, "abc", "xyz"), ("p", "good", None),
        ("p", "a <|eot_id|>", "b"), ("p" * 300, "a", "b"), ("p", "a" + " b" * 200 + " c", "a" + " b" * 200 + " d"),
        ("p", "fine", "bad"),
    ]  # fmt: skip
    rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    chunk = chunk_of(rows, chat_tokenizer("llama3"), max_length=100, overlong="truncate")
    assert dropped_rows(chunk) == {
        "whose chosen and rejected are the same": (1, 0),
        "with an empty answer": (1, 1),
        "without a prompt (data.columns.prompt names its column)": (1, 2),
        "null": (1, 3),
        "containing a special token (<|eot_id|>)": (1, 4),
        "with nothing to compare within 100 tokens": (2, 5),
    }
    assert len(chunk.table) == 1


def test_sides_that_part_before_the_last_question_are_dropped() -> None:
    """The question of a turn would be learned as if the model had asked it."""
    chosen, rejected = ([ask("hi"), say(first), ask("and?"), say("x")] for first in ("a", "b"))
    chunk = chunk_of([{"chosen": chosen, "rejected": rejected}], chat_tokenizer("llama3"))
    assert list(chunk.dropped) == ["with a user's turn among the answers of chosen or rejected"]


def test_a_side_may_be_one_message() -> None:
    """As LLaMA-Factory writes it, beside the conversation."""
    said = {"from": "human", "value": "p"}
    sides = {name: {"from": "gpt", "value": name} for name in ("chosen", "rejected")}
    (row,) = chunk_of([{"prompt": [said], **sides}], chat_tokenizer("llama3")).table.to_pylist()
    lists = {name: [side] for name, side in sides.items()}
    assert [row] == chunk_of([{"prompt": [said], **lists}], chat_tokenizer("llama3")).table.to_pylist()


def test_sides_that_the_template_renders_alike_are_the_same() -> None:
    row = {"prompt": [ask("p")], "chosen": [say("x")], "rejected": [say("x \n")]}
    assert list(chunk_of([row], chat_tokenizer("gemma")).dropped) == ["whose chosen and rejected are the same"]
