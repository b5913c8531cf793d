"""Which columns a format takes, prompts for reinforcement learning, FIM from columns, and the tokens that are learned."""

import json
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from datasets import Dataset
from golden import Golden

from cogumi.data.chat import read_question
from cogumi.data.encoding import FormatOptions, keep_end
from cogumi.data.fim import FAMILIES, FimConfig
from cogumi.data.formats import columns_for, layout_note, learned_parts, tokenize_for
from cogumi.data.rows import RECORD_COLUMN, BadRow, Chunk, decode_rows
from tests.chat_tokenizers import ask, chat_tokenizer, dropped_rows, say, texts, turn
from tests.fim_examples import prompts_for_rl, tokenize_for_sft


def options(method: str, format: str, **more: Any) -> FormatOptions:
    return FormatOptions(method, format, **more)  # type: ignore[arg-type]


def chunk_of(rows: dict[str, list[Any]], name: str, chosen: FormatOptions, **of_tokenizer: Any) -> Chunk:
    frame = pl.DataFrame(rows)
    fields = frame.select(**columns_for(chosen, frame.columns))
    if chosen.method == "gspo":
        texts = [json.dumps(row) for row in frame.iter_rows(named=True)]
        fields = fields.with_columns(pl.Series(RECORD_COLUMN, texts))
    tokenizer = chat_tokenizer(name)
    for key, value in of_tokenizer.items():
        setattr(tokenizer, key, value)
    return tokenize_for(chosen, tokenizer)(fields, 0)


def examples_of(chunk: Chunk) -> list[dict[str, Any]]:
    """What a data set of the chunk gives, less the original records."""
    return [*decode_rows(Dataset(chunk.table), chunk.encoded).remove_columns(RECORD_COLUMN)]


@pytest.mark.parametrize(
    ("method", "format", "more", "names", "expected"),
    [
        ("sft", "chat", {}, ["id", "messages", "tools"], ["messages", "tools"]),
        ("sft", "chat", {}, ["conversations", "instruction", "output"], ["conversations"]),
        ("sft", "chat", {}, ["instruction", "input", "output", "text"], ["instruction", "output", "input"]),
        ("sft", "chat", {"columns": {"instruction": "q", "output": "a"}}, ["messages", "q", "a"], ["q", "a"]),
        ("sft", "prompt_completion", {}, ["prompt", "completion"], ["prompt", "completion"]),
        ("sft", "prompt_completion", {"columns": {"prompt": "question", "completion": "answer"}}, ["question", "answer"],
         ["question", "answer"]),
        ("gspo", "prompt_completion", {}, ["prompt"], ["prompt"]),
        ("gspo", "prompt_completion", {"columns": {"tests": "asserts"}}, ["prompt", "asserts"], ["prompt", "asserts"]),
        ("gspo", "chat", {"columns": {"answer": "gold"}}, ["messages", "gold", "x"], ["messages", "gold"]),
        ("dpo", "preference", {}, ["chosen", "rejected", "score"], ["chosen", "rejected"]),
        ("dpo", "preference", {}, ["prompt", "chosen", "rejected"], ["chosen", "rejected", "prompt"]),
        ("sft", "fim", {}, ["source", "prefix", "middle", "suffix"], ["source"]),
        ("sft", "fim", {}, ["prefix", "middle", "suffix"], ["prefix", "suffix", "middle"]),
        ("sft", "fim", {"columns": {"prefix": "a", "middle": "b", "suffix": "c"}}, ["source", "a", "b", "c"], ["a", "c", "b"]),
        ("gspo", "fim", {"column": "code"}, ["code"], ["code"]),
    ],
)  # fmt: skip
def test_a_format_takes_the_columns_it_needs(
    method: str, format: str, more: dict[str, Any], names: list[str], expected: list[str]
) -> None:
    assert list(columns_for(options(method, format, **more), names).values()) == expected


@pytest.mark.parametrize(
    ("method", "format", "more", "names", "key", "message", "fix"),
    [
        ("sft", "preference", {}, ["chosen", "rejected"], "data.format", "preference", "fim, chat"),
        ("dpo", "chat", {}, ["messages"], "data.format", "chat", "preference"),
        ("sft", "chat", {}, ["text"], "data.format", "messages or conversations or instruction and output", "text"),
        ("dpo", "preference", {}, ["chosen"], "data.format", "chosen and rejected", "chosen"),
        ("sft", "prompt_completion", {}, ["prompt"], "data.format", "prompt and completion", "prompt"),
        ("sft", "chat", {"columns": {"messages": "dialogs"}}, ["dialog"], "data.columns.messages", "'dialogs'", "dialog"),
        ("sft", "chat", {"columns": {"mesages": "dialog"}}, ["dialog"], None, "data.columns.mesages", "messages"),
        ("sft", "fim", {}, ["text"], "data.format", "source", "text"),
    ],
)  # fmt: skip
def test_columns_that_make_no_example_are_a_usage_error(
    method: str, format: str, more: Any, names: list[str], key: str | None, message: str, fix: str, golden: Golden
) -> None:
    with golden.raises("data", key=key, message=message, fix=fix):
        columns_for(options(method, format, **more), names)


@pytest.mark.parametrize(
    ("format", "train", "expected"),
    [
        ("chat", {}, "turns"),
        ("chat", {"assistant_only_loss": True}, "turns"),
        ("chat", {"completion_only_loss": True}, "completion"),
        ("chat", {"completion_only_loss": True, "assistant_only_loss": True}, "completion"),
        ("chat", {"completion_only_loss": False}, "turns"),
        ("chat", {"completion_only_loss": False, "assistant_only_loss": False}, "all"),
        ("prompt_completion", {}, "completion"),
        ("prompt_completion", {"completion_only_loss": False}, "all"),
        ("prompt_completion", {"assistant_only_loss": True}, "turns"),
    ],
)
def test_which_tokens_the_switches_of_trl_mean(format: str, train: dict[str, Any], expected: str) -> None:
    assert learned_parts(format, train) == expected


def test_options_are_json_and_every_one_shows() -> None:
    changes: dict[str, Any] = {
        "columns": {"messages": "x"}, "column": "x", "learn": "all", "max_length": 9, "overlong": "truncate", "thinking": False,
        "truncation_mode": "keep_end", "today": "2025-01-01", "fim": FimConfig(seed=3), "tools": [{"type": "function"}],
        "repeats_prompt": True,
    }  # fmt: skip
    plain = options("sft", "chat")
    others = [options("gspo", "chat"), options("sft", "fim"), *(replace(plain, **{k: v}) for k, v in changes.items())]
    assert len({json.dumps(each.as_json(), sort_keys=True) for each in (plain, *others)}) == 14
    assert len(plain.as_json()) == len(others)


@pytest.mark.parametrize(
    ("method", "format", "rows"),
    [
        ("sft", "prompt_completion", {"prompt": ["2 + 3?", [ask("?")]], "completion": ["5", "6"]}),
        ("gspo", "prompt_completion", {"prompt": ["2 + 3?", [ask("?")]]}),
        ("dpo", "preference", {"prompt": ["2 + 3?", [ask("?")]], "chosen": ["5", "6"], "rejected": ["7", "8"]}),
    ],
)
def test_text_in_some_rows_and_messages_in_others_are_refused(
    method: str, format: str, rows: Any, golden: Golden
) -> None:
    columns = {name: pl.Series(values, dtype=pl.Object) for name, values in rows.items()}
    with golden.raises("data", key="data.source", message="row 0 is text and row 1 is messages"):
        chunk_of(columns, "qwen3", options(method, format))


@pytest.mark.parametrize("values", [[1, "7"], [{"x": [1]}, {"x": ["7"], "y": None}], [1, 2.5, True], [None, 3, [], {}]])
def test_what_the_rewards_are_given_is_of_any_kind(values: list[Any]) -> None:
    rows = {"prompt": ["a"] * len(values), "answer": pl.Series(values, dtype=pl.Object)}
    chosen = options("gspo", "prompt_completion", columns={"answer": "answer"})
    answers = [each["answer"] for each in examples_of(chunk_of(rows, "qwen3", chosen))]
    assert answers == values
    assert [type(answer) for answer in answers] == [type(value) for value in values]


@pytest.mark.parametrize("name", ["record", "completions", "trainer_state"])
def test_a_name_that_rewards_are_given_anyway_is_no_column(name: str, golden: Golden) -> None:
    with golden.raises("data", key=f"data.columns.{name}", message=f"`{name}`", fix="record['mine']"):
        columns_for(options("gspo", "prompt_completion", columns={name: "mine"}), ["prompt", "mine"])


def test_a_prompt_over_the_budget_is_dropped_and_one_that_is_no_text_too() -> None:
    rows = {"prompt": ["short", "long " * 50, 5, "also short"], "completion": ["a", "b", "c", "d"]}
    rows["prompt"] = pl.Series(rows["prompt"], dtype=pl.Object)
    chunk = chunk_of(rows, "qwen3", options("gspo", "prompt_completion", max_length=20))
    assert [row["prompt"] for row in chunk.table.to_pylist()] == ["short", "also short"]
    assert dropped_rows(chunk) == {"whose `prompt` is no text but int": (1, 2), "longer than 20 tokens": (1, 1)}
    talks = [[ask(text)] for text in ("hi", "long " * 50)]
    chunk = chunk_of({"messages": talks}, "qwen3", options("gspo", "chat", max_length=20))
    assert len(chunk.table) == 1
    assert chunk.dropped["longer than 20 tokens"].row == 1


def test_prompts_of_conversations_end_with_the_last_question() -> None:
    first, answer, again = ask("2 + 3?"), say("<think>\nhm\n</think>\n\n5."), ask("And 4?")
    rows = {"messages": [[first, answer, again, say("9.")], [first, answer], [first], [answer]], "level": [1, 2, 3, 4]}
    chunk = chunk_of(rows, "qwen3", options("gspo", "chat", thinking=False, columns={"level": "level"}))
    assert examples_of(chunk) == [
        {"prompt": [first, say("5."), again], "answer": "9.", "level": 1},
        {"prompt": [first], "answer": "5.", "level": 2},
        {"prompt": [first], "answer": None, "level": 3},
    ]
    assert chunk.dropped["without any user turn"].row == 3
    assert read_question({"messages": [first, say("bad", weight=0)]}).answer is None  # context, not the gold answer


def test_prompts_of_text_and_their_gold_answers() -> None:
    rows = {"question": ["2 + 3?", "", None, "a <|im_end|>"], "gold": ["5", "x", "y", "z"]}
    chosen = options("gspo", "prompt_completion", columns={"prompt": "question", "answer": "gold"})
    chunk = chunk_of(rows, "qwen3", chosen, chat_template=None)
    assert examples_of(chunk) == [{"prompt": "2 + 3?", "answer": "5"}]
    assert list(chunk.dropped) == ["with an empty prompt", "null", "containing a special token (<|im_end|>)"]
    completed = chunk_of({"prompt": ["p"], "completion": ["5"]}, "qwen3", options("gspo", "prompt_completion"))
    assert examples_of(completed) == [{"prompt": "p", "answer": "5"}]


def test_a_flag_for_thinking_that_text_would_ignore_is_refused(golden: Golden) -> None:
    text = {"prompt": ["a"], "completion": ["b"], "chosen": ["b"], "rejected": ["c"]}
    for method, format in (("sft", "prompt_completion"), ("dpo", "preference")):
        with golden.raises("data", message="cogumi.thinking", fix="drop it"):
            chunk_of(text, "qwen3", options(method, format, thinking=False))


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [0.1, None, {"c": 10**30}]}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds. " * 9, "parameters": {"type": "object"}}}


def test_prompts_keep_calls_of_tools_and_what_those_returned() -> None:
    """Every message has its own keys and no others, as templates ask for them; arguments are as the row has them."""
    called = [ask("x"), say("", tool_calls=[CALL]), turn("tool", "5", name="add")]
    talks = [[*called, say("5."), ask("And 4?"), say("5.")], called, [*called, say("5.")], called[:1]]
    tools = [None, "[]", None, None]
    rows = {name: pl.Series(cells, dtype=pl.Object) for name, cells in (("messages", talks), ("tools", tools))}
    actual = examples_of(chunk_of(rows, "qwen3", options("gspo", "chat")))
    assert [each["prompt"] for each in actual] == [talks[0][:5], called, called[:1], called[:1]]
    assert [each["answer"] for each in actual] == ["5.", None, "5.", None]
    given = chunk_of({"prompt": rows["messages"]}, "qwen3", options("gspo", "prompt_completion"))
    assert [each["prompt"] for each in examples_of(given)] == [talks[1], talks[3]]
    (reason,) = given.dropped  # a rollout would follow the gold answer
    assert reason.startswith("whose prompt ends with the assistant's turn")


def test_the_tools_of_the_run_count_in_the_length_of_a_prompt() -> None:
    tokenizer = chat_tokenizer("qwen3")
    long, short = (
        len(tokenizer.apply_chat_template([ask("x")], tools=tools, add_generation_prompt=True, return_dict=False))
        for tools in ([TOOL], None)
    )
    assert long > short + 20
    rows = {"prompt": pl.Series([[ask("x")]] * 2, dtype=pl.Object), "tools": [json.dumps([TOOL]), None]}
    for tools, most, kept in (([TOOL], long, 2), ([TOOL], long - 1, 0), ([], short, 1), ([], short - 1, 0)):
        chunk = chunk_of(rows, "qwen3", options("gspo", "prompt_completion", max_length=most, tools=tools))
        assert len(chunk.table) == kept
        assert sum(drop.count for drop in chunk.dropped.values()) == 2 - kept
    # TRL shows a rollout the tools of the run alone.
    (reason, _) = chunk.dropped
    assert reason == "with `tools` that are not the run's (cogumi.tools), which alone a rollout is shown"


def test_text_that_is_too_long_loses_its_beginning() -> None:
    """The end is kept: as many tokens as fit, counted as GRPOTrainer tokenizes it."""
    long = " ".join(f"wörd{n} = {n} * {n}" for n in range(60))
    chosen = options("gspo", "prompt_completion", max_length=20, overlong="truncate")
    chunk = chunk_of({"prompt": ["short", long, "\n" * 300]}, "qwen3", chosen)
    tokenizer = chat_tokenizer("qwen3")
    short, cut = (each["prompt"] for each in examples_of(chunk))
    assert short == "short"
    assert long.endswith(cut)
    assert 15 < len(tokenizer(cut)["input_ids"]) <= 20 < len(tokenizer(long[-len(cut) - 12 :])["input_ids"])
    assert (chunk.truncated, dropped_rows(chunk)) == (1, {"with an empty prompt": (1, 2)})


def test_what_the_tokenizer_puts_around_a_text_counts_when_it_is_cut() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer, long = chat_tokenizer("qwen3"), "".join(f"{n} + 😀é\n" for n in range(90))
    around = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{around[0]} $A", special_tokens=[around])
    for most in (8, 17, 18, 19, 20):
        cut = keep_end(tokenizer, long, most)
        assert long.endswith(cut)
        ids = tokenizer(cut)["input_ids"]
        assert ids[0] == tokenizer.eos_token_id
        assert most - 8 < len(ids) <= most  # a character of several tokens is kept whole, or left out
    with pytest.raises(BadRow, match="no end fits into 1 tokens"):
        keep_end(tokenizer, long, 1)


def test_messages_are_not_cut(golden: Golden) -> None:
    chosen = options("gspo", "prompt_completion", max_length=20, overlong="truncate")
    rows = {"prompt": pl.Series([[ask("hi")]], dtype=pl.Object)}
    with golden.raises("data", key="data.overlong", message="messages", fix="drop the key"):
        chunk_of(rows, "qwen3", chosen)


def test_prompts_of_white_space_ask_nothing() -> None:
    blank = [[turn("system", " "), ask("\n")]]
    for rows, format in (({"prompt": [" \n\t"]}, "prompt_completion"), ({"messages": blank}, "chat")):
        assert list(chunk_of(rows, "qwen3", options("gspo", format)).dropped) == ["with an empty prompt"]


def test_pieces_are_laid_out_as_the_same_cut_is() -> None:
    """What FIM cuts out of code, given back to it as three columns, makes the same examples."""
    tokenizer = chat_tokenizer("qwen3")  # the small vocabulary has StarCoder's FIM tokens
    config = FimConfig(max_length=200)
    code = pl.DataFrame({"source": texts()[:60]})
    pieces = prompts_for_rl(code, tokenizer, config).dataset
    rows = pl.DataFrame({name: pieces[name][:] for name in ("prefix", "middle", "suffix")})
    # The order of the pieces is drawn by the row's index, which dropped rows have shifted: compare where it is not.
    in_order = FimConfig(max_length=200, spm_rate=0)
    for method, whole in (("sft", tokenize_for_sft), ("gspo", prompts_for_rl)):
        for frame, of_run in ((code, config), (rows, in_order)):
            chosen = options(method, "fim", fim=of_run)
            made = tokenize_for(chosen, tokenizer)(frame.select(**columns_for(chosen, frame.columns)), 0)
            assert made.table.to_pylist() == whole(code, tokenizer, of_run).dataset.to_list()
    assert not made.dropped


def test_pieces_that_make_no_example_are_counted() -> None:
    rows = {
        "prefix": ["a = ", "b = ", None, "", "<fim_middle>", "d"],
        "middle": ["1", "", "3", "4", "5", "<fim_suffix>"],
        "suffix": ["\n", "\n", "\n", "", "\n", "\n"],
        "level": [1, 2, 3, 4, 5, 6],
    }
    chunk = chunk_of(rows, "qwen3", options("gspo", "fim", columns={"level": "level"}))
    assert dropped_rows(chunk) == {
        "null": (1, 2),
        "with an empty middle": (1, 1),
        "without context": (1, 3),
        "containing a special token (<fim_middle>)": (1, 4),
        "containing a special token (<fim_suffix>)": (1, 5),
    }
    (row,) = examples_of(chunk)
    assert (row["prefix"], row["middle"], row["suffix"], row["level"]) == ("a = ", "1", "\n", 1)


def test_a_chunk_of_code_with_nothing_usable_is_no_error() -> None:
    rows = {"source": [None, "x", "if '<fim_middle>' in x: pass", "word " * 900]}
    for method in ("sft", "gspo"):
        chunk = chunk_of(rows, "qwen3", options(method, "fim"))
        assert len(chunk.table) == 0
        assert dropped_rows(chunk) == {
            "null": (1, 0),
            "too short to split": (1, 1),
            "containing a special token (<fim_middle>)": (1, 2),
            "longer than 512 tokens": (1, 3),
        }
        good = chunk_of({"source": texts()[:3]}, "qwen3", options(method, "fim"))
        assert chunk.table.schema == good.table.schema


def test_trimmed_examples_are_counted_and_the_note_says_what_is_not_as_asked() -> None:
    rows = {"source": texts()[:40]}
    config = FimConfig(max_length=80, overlong="trim", fim_rate=1)
    chunk = chunk_of(rows, "qwen3", options("sft", "fim", fim=config))
    dropping = chunk_of(rows, "qwen3", options("sft", "fim", fim=FimConfig(max_length=80)))
    assert chunk.truncated == len(chunk.table) - len(dropping.table) > 5
    assert layout_note(options("sft", "fim"), chat_tokenizer("qwen3")) == ""
    assert FAMILIES[0].family == "StarCoder"
    assert layout_note(options("sft", "chat"), None) == ""
