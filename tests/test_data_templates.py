"""What is learned of a conversation: against TRL's own preparation, and against the text itself."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from datasets import Dataset
from tokenizers import normalizers

from cogumi.core.errors import UsageError
from cogumi.data.encoding import FormatOptions
from cogumi.data.formats import columns_for, tokenize_for
from cogumi.data.rows import Chunk
from cogumi.data.templates import read_template
from tests.chat_tokenizers import (
    ask,
    chat_tokenizer,
    chunk_of,
    dropped_rows,
    learned_texts,
    say,
    texts,
    texts_of,
    trl_prepared,
    turn,
)

Rows = list[dict[str, Any]]


def conversations(count: int = 24, system: bool = True) -> Rows:
    """One to three turns of real text, with leading and trailing spaces, blank lines and characters of up to four bytes."""
    pool = [
        *(text[:120] for text in texts()[:60]), "naïve 日本語 🎉🎉 x", "\n\n a\n", "1 < 2 && 'q'", " \tends in space ",
    ]  # fmt: skip
    rows = []
    for at in range(count):
        messages = [turn("system", "Be brief.")] if system and at % 3 == 0 else []
        for number in range(1 + at % 3):
            messages.append(ask(pool[(7 * at + number) % len(pool)]))
            messages.append(say(pool[(11 * at + 3 * number + 5) % len(pool)]))
        rows.append({"messages": messages})
    return rows


def labels_of(chunk: Chunk) -> list[list[int]]:
    return [
        [token if learned else -100 for token, learned in zip(row["input_ids"], row["completion_mask"], strict=True)]
        for row in chunk.table.to_pylist()
    ]


def assert_equal(ours: Chunk, theirs: Dataset) -> None:
    assert ours.table["input_ids"].to_pylist() == theirs["input_ids"][:]
    assert labels_of(ours) == theirs["labels"][:]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3_instruct_2507", "phi3"])
def test_every_turn_is_what_trl_learns_of_the_assistant(name: str, tmp_path: Path) -> None:
    rows = conversations()[:: 3 if name == "qwen3" else 1]  # Qwen3: rows of one answer
    ours = chunk_of(rows, chat_tokenizer(name))
    theirs = trl_prepared(rows, chat_tokenizer(name), tmp_path, assistant_only_loss=True)
    assert_equal(ours, theirs)


@pytest.mark.parametrize(("name", "header"), [("gptoss", "<|start|>assistant"), ("qwen2_5", "\n")])
def test_a_header_that_trl_marks_is_not_learned(name: str, header: str, tmp_path: Path) -> None:
    rows = conversations()[:: 3 if name == "gptoss" else 1]  # gpt-oss: rows of one answer
    tokenizer = chat_tokenizer(name)
    ours = chunk_of(rows, tokenizer)
    theirs = trl_prepared(rows, tokenizer, tmp_path, assistant_only_loss=True)
    assert ours.table["input_ids"].to_pylist() == theirs["input_ids"][:]
    for ids, turns, labels in zip(theirs["input_ids"], texts_of(ours, tokenizer)[1], theirs["labels"], strict=True):
        assert [header + text for text in turns] == learned_texts(tokenizer, ids, [label != -100 for label in labels])


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "qwen3", "gptoss", "qwen2_5", "phi3", "gemma"])
def test_completions_are_what_trl_learns_of_them(name: str, tmp_path: Path) -> None:
    rows = conversations(12, system=name != "gemma")
    split = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    ours = chunk_of(split, chat_tokenizer(name), format="prompt_completion", learn="completion")
    theirs = trl_prepared(split, chat_tokenizer(name), tmp_path)
    assert_equal(ours, theirs)
    # The last turn of a conversation is the same thing.
    assert chunk_of(rows, chat_tokenizer(name), learn="completion").table.equals(ours.table)


def test_text_completions_are_what_trl_learns_of_them(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen3")
    rows = [{"prompt": text[:40], "completion": text[40:90]} for text in texts()[:40] if text[40:90].strip()]
    ours = chunk_of(rows, tokenizer, format="prompt_completion", learn="completion")
    theirs = trl_prepared(rows, tokenizer, tmp_path)
    assert_equal(ours, theirs)
    everything = chunk_of(rows, tokenizer, format="prompt_completion", learn="all")
    assert labels_of(everything) == everything.table["input_ids"].to_pylist() == theirs["input_ids"][:]


def test_everything_is_what_trl_learns_without_masks(tmp_path: Path) -> None:
    rows = conversations(6)
    ours = chunk_of(rows, chat_tokenizer("qwen3"), learn="all")
    theirs = trl_prepared(rows, chat_tokenizer("qwen3"), tmp_path)
    assert labels_of(ours) == ours.table["input_ids"].to_pylist() == theirs["labels"][:]


@pytest.mark.parametrize("thinking", [None, False])
@pytest.mark.parametrize("name", ["gptoss", "qwen3"])
def test_turns_that_a_template_shows_differently_are_examples_of_their_own(name: str, thinking: bool | None) -> None:
    """gpt-oss ends earlier turns with a token at which no generation stops; Qwen3 shows an empty thought in the last alone."""
    tokenizer, rows = chat_tokenizer(name), conversations()
    chunk = chunk_of(rows, tokenizer, thinking=thinking)
    switch: dict[str, Any] = {"qwen3": {"enable_thinking": False}, "gptoss": {"reasoning_effort": "low"}}[name]
    options = switch if thinking is False else {}
    expected = []
    for messages in (row["messages"] for row in rows):
        for index in (at for at, message in enumerate(messages) if message["role"] == "assistant"):
            before = tokenizer.apply_chat_template(
                messages[:index], add_generation_prompt=True, tokenize=False, **options
            )
            through = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False, **options)
            expected.append((through, [through.removeprefix(before)]))
    assert chunk.extra_examples == len(expected) - len(rows) > 10
    assert [*zip(*texts_of(chunk, tokenizer), strict=True)] == expected


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1", "gptoss"])
def test_two_answers_in_a_row_are_both_learned(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    _, learned = texts_of(chunk_of([{"messages": [ask("1?"), say("One."), say("Two.")]}], tokenizer), tokenizer)
    assert [str(learned).count(text) for text in ("One.", "Two.")] == [1, 1]


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "phi3", "gptoss", "llama3", "llama3_1"])
def test_a_greeting_is_context(name: str, system: bool) -> None:
    """With marks, without, and where turns are rendered as at inference; it answers nothing, so it is not learned."""
    tokenizer = chat_tokenizer(name)
    start = [turn("system", "Be brief."), say("Welcome!")] if system else [say("Welcome!")]
    for turns in (1, 2):
        rows = [{"messages": [*start, *[ask("2?"), say("Two.")] * turns]}]
        whole, learned = texts_of(chunk_of(rows, tokenizer), tokenizer)
        assert "Welcome!" not in str(learned)
        assert str(learned).count("Two.") == turns
        assert all("Welcome!" in text for text in whole)
    assert all(chunk_of(rows, tokenizer, learn="all").table["completion_mask"][0].as_py())


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "qwen2_5", "qwen3_instruct_2507", "phi3", "gemma"])
def test_every_turn_reads_as_its_message_and_its_end(name: str) -> None:
    """Also for templates without marks (llama3_1), which TRL refuses."""
    tokenizer = chat_tokenizer(name)
    rows = conversations(system=name != "gemma")
    end = "<|end|>" if name == "phi3" else tokenizer.eos_token
    made = chunk_of(rows, tokenizer)
    for row, turns, ids in zip(rows, texts_of(made, tokenizer)[1], made.table["input_ids"].to_pylist(), strict=True):
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        if name in ("llama3", "llama3_1", "gemma"):
            said = [text.strip() for text in said]
        assert [text.removesuffix("<|endoftext|>").removesuffix("\n") for text in turns] == [
            text + end for text in said
        ]
        assert ids.count(tokenizer.bos_token_id) == int(tokenizer.bos_token is not None)


def test_marks_that_leave_out_the_end_of_a_turn_are_not_used() -> None:
    """A model trained on them would never learn to stop."""
    tokenizer = chat_tokenizer("qwen3_instruct_2507")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    *_, turns = texts_of(chunk_of(conversations(3), tokenizer), tokenizer)[1]
    assert len(turns) == 3
    assert all(text.endswith("<|im_end|>") for text in turns)


def test_a_template_that_rewrites_earlier_turns_drops_the_rows_it_rewrites() -> None:
    tokenizer = chat_tokenizer("qwen3_instruct_2507")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if not loop.last and m.content|length > 3 %}!{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chunk = chunk_of([{"messages": [ask(text), say("an answer")]} for text in ("abc", "a question")], tokenizer)
    ((reason, dropped),) = dropped_rows(chunk).items()
    assert reason == "whose prompt the chat template rewrites once it is answered"
    assert (dropped, len(chunk.table)) == ((1, 1), 1)
    row = {"messages": [ask("a question"), say("an answer"), ask("abc"), say("b")]}
    (reason,) = dropped_rows(chunk_of([row], tokenizer))
    assert (
        reason
        == "whose earlier turns the chat template rewrites (train.completion_only_loss: true learns the last alone)"
    )
    assert len(chunk_of([row], tokenizer, learn="completion").table) == 1


def test_a_later_instruction_is_not_shown_before_earlier_turns() -> None:
    tokenizer = chat_tokenizer("qwen2_5")
    turns = "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
        f"{{% for m in messages if m.role != 'system' %}}{turns}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [ask("q"), say("a"), turn("system", "Later."), ask("r"), say("b")]
    shown, learned = texts_of(chunk_of([{"messages": messages}], tokenizer), tokenizer)
    assert shown == [tokenizer.apply_chat_template(messages[:end], tokenize=False) for end in (2, 5)]
    assert learned == [["a<|im_end|>"], ["b<|im_end|>"]]


def test_a_token_across_the_border_of_a_turn_is_learned() -> None:
    """Space and word are one token; the space is the header's."""
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ ' ' }}"
        "{% generation %}{{ m.content if m.role == 'assistant' }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
        "{% endgeneration %}{{ m.content if m.role != 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    made = chunk_of([{"messages": [ask("a"), say("return")]}], tokenizer)
    assert texts_of(made, tokenizer)[1] == [[" return<|im_end|>"]]


def test_what_follows_the_last_answer_is_cut_off_unless_all_is_learned() -> None:
    tokenizer = chat_tokenizer("qwen3")
    rows = conversations(4)
    longer = [{"messages": [*row["messages"], ask("And then?")]} for row in rows]
    for learn in ("turns", "completion"):
        assert chunk_of(longer, tokenizer, learn=learn).table.equals(chunk_of(rows, tokenizer, learn=learn).table)
    assert all("And then?" in text for text in texts_of(chunk_of(longer, tokenizer, learn="all"), tokenizer)[0])


@pytest.mark.parametrize("learn", ["turns", "completion"])
def test_texts_that_the_tokenizer_normalizes(learn: str, tmp_path: Path) -> None:
    """Their bytes are not the tokens', so the tokenizer's offsets say where the turns are."""
    decomposed = [ask("e\u0301?"), say("caf\u0065\u0301 \u0065\u0301\u0065\u0301")]
    rows = [*conversations(4)[::3], {"messages": decomposed}]
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    ours = chunk_of(rows, tokenizer, learn=learn)
    assert texts_of(ours, tokenizer)[1][-1] == ["<think>\n\n</think>\n\ncafé éé<|im_end|>\n"]
    if learn == "turns":
        theirs = trl_prepared(rows, tokenizer, tmp_path, assistant_only_loss=True)
        assert_equal(ours, theirs)


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_truncation_is_trls_and_counted(mode: str, tmp_path: Path) -> None:
    rows, tokenizer = conversations(), chat_tokenizer("llama3")
    whole = chunk_of(rows, tokenizer)
    lengths = [len(ids) for ids in whole.table["input_ids"].to_pylist()]
    limit = 45
    ours = chunk_of(rows, tokenizer, max_length=limit, overlong="truncate", truncation_mode=mode)
    theirs = trl_prepared(rows, tokenizer, tmp_path, assistant_only_loss=True, max_length=limit, truncation_mode=mode)
    assert_equal(ours, theirs)
    unlearned = ours.dropped.get(f"with nothing to learn within {limit} tokens")
    assert (unlearned is not None) == (mode == "keep_start")
    assert ours.truncated + (unlearned.count if unlearned else 0) == sum(length > limit for length in lengths)

    dropping = chunk_of(rows, tokenizer, max_length=limit)
    long = [at for at, length in enumerate(lengths) if length > limit]
    assert (dropping.truncated, dropped_rows(dropping)) == (0, {f"longer than {limit} tokens": (len(long), long[0])})
    fitting = [ids for ids in whole.table["input_ids"].to_pylist() if len(ids) <= limit]
    assert dropping.table["input_ids"].to_pylist() == fitting


def test_chunks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, tokenizer = conversations(), chat_tokenizer("llama3_1")
    rows[5]["messages"] = [ask("x")]
    frame = pl.DataFrame(rows)
    options = FormatOptions("sft", "chat", max_length=200)
    make, frame = tokenize_for(options, tokenizer), frame.select(**columns_for(options, frame.columns))
    whole = make(frame, 0)
    parts = [make(frame[at : at + 5], at) for at in range(0, len(frame), 5)]
    assert [row for part in parts for row in part.table.to_pylist()] == whole.table.to_pylist()
    assert parts[1].dropped["without any assistant turn"] == whole.dropped["without any assistant turn"]
    assert whole.dropped["without any assistant turn"].row == 5
    monkeypatch.setattr("cogumi.data.encoding.CHUNK_CHARACTERS", 100)
    assert make(frame, 0).table.equals(whole.table)


def test_nothing_usable_is_an_empty_chunk_of_the_same_columns() -> None:
    tokenizer = chat_tokenizer("llama3")
    for learn in ("turns", "completion", "all"):
        empty = chunk_of([{"messages": [ask("x")]}], tokenizer, learn=learn)
        assert empty.table.schema == chunk_of(conversations(2), tokenizer, learn=learn).table.schema
        assert len(empty.table) == 0


def test_the_date_a_template_prints_is_the_one_given() -> None:
    tokenizer = chat_tokenizer("gptoss")
    (text,), _ = texts_of(chunk_of(conversations(1), tokenizer, today="2025-02-03"), tokenizer)
    assert "Current date: 2025-02-03" in text


def test_tokenizers_that_cannot_be_used_are_refused() -> None:
    tokenizer = chat_tokenizer("llama3")
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="has no chat template"):
        read_template(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('not like this') }}"
    with pytest.raises(UsageError, match="not like this"):
        read_template(tokenizer)


def test_what_a_template_refuses_is_dropped_with_its_words() -> None:
    tokenizer = chat_tokenizer("gemma")
    rows = [{"messages": [ask("a"), ask("b"), say("c")]}]
    dropped = chunk_of(rows, tokenizer).dropped["that the chat template refuses"]
    assert dropped.excerpt.startswith("Conversation roles must alternate")
    assert len(chunk_of(rows, chat_tokenizer("llama3")).table) == 1, "another template takes two turns of one role"
