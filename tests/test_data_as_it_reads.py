"""No row is learned otherwise than it reads: the truth is rendered here with the tokenizer's own template."""

import bz2
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tokenizers.processors import TemplateProcessing

from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.data import sources
from cogumi.methods.examples import Examples, prepare_examples
from cogumi.methods.gspo import try_rewards
from tests.builders import run_config
from tests.chat_tokenizers import ask, chat_tokenizer, chunk_of, say, turn
from tests.test_data_leaks import write_lines

Row = dict[str, Any]
CHAT = [ask("2 + 3?"), say("5.")]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
PAIR = {"chosen": [say("good")], "rejected": [say("bad")]}


def examples(source: Path | str, format: Any = "chat", method: Any = "sft", **data: Any) -> Examples:
    section = {"format": format, "eval_rows": 0} | data
    ours = {"rewards": ["final_number"]} if method == "gspo" else {}
    home = Path(source).parent
    config = run_config(method, home, source, home / "run", data_section=section, cogumi=ours)
    return prepare_examples(load_config(config), chat_tokenizer("qwen3"))


def rows_of(home: Path, rows: list[Row], format: Any = "chat", method: Any = "sft", **data: Any) -> Examples:
    return examples(write_lines(home / "rows.jsonl", rows), format, method, **data)


def rendered(messages: list[Row], tools: Any = None) -> list[int]:
    ids = chat_tokenizer("qwen3").apply_chat_template(messages, tools=tools, return_dict=False)
    return list(ids)


def ids_of(found: Examples) -> list[list[int]]:
    return [list(row["input_ids"]) for row in found.train.dataset]


def refusal(*args: Any, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        rows_of(*args, **options)
    return caught.value


def test_keys_that_only_late_rows_have_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_ROWS", 2)
    plain = [{"messages": [ask(f"{number}?"), say("a")]} for number in range(4)]
    found = rows_of(tmp_path, [*plain, {"messages": CHAT, "system": "Be brief.", "tools": [TOOL]}])
    assert rendered([turn("system", "Be brief."), *CHAT], [TOOL]) in ids_of(found)
    alpaca = [{"instruction": f"{number}?", "output": "a"} for number in range(4)]
    found = rows_of(tmp_path, [*alpaca, {"instruction": "Add.", "input": "2 3", "output": "5."}])
    assert rendered([ask("Add.\n\n2 3"), say("5.")]) in ids_of(found)
    assert "(KTO)" in refusal(tmp_path, [*plain, {"messages": CHAT, "label": False}]).message
    no_row: Any = [1]
    assert "(KTO)" in refusal(tmp_path, [*plain, no_row, {"messages": CHAT, "label": False}]).message


def test_the_keys_of_a_long_file_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "BATCH_BYTES", 10)
    file = Path(write_lines(tmp_path / "rows.jsonl", [{"a": 1}, {"b": 2}]))
    assert sources.column_names([file]) == ["a", "b"]
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_record_blocks", None)  # it is not read again
        assert sources.column_names([file]) == ["a", "b"]
    (kept,) = (tmp_path / "cache/cogumi/columns").iterdir()
    kept.write_text("damaged")
    assert sources.column_names([file]) == ["a", "b"]
    assert sources.column_names([Path(write_lines(file, [{"a": 1}, {"c": 22}]))]) == ["a", "c"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_a_file_without_a_column_that_no_row_needs(tmp_path: Path, suffix: str) -> None:
    for name, row in (
        ("a", {"instruction": "q", "output": "a", "system": "S"}),
        ("b", {"instruction": "r", "output": "b"}),
    ):
        frame, file = pl.DataFrame([row]), tmp_path / f"{name}.{suffix}"
        {"jsonl": frame.write_ndjson, "parquet": frame.write_parquet, "csv": frame.write_csv}[suffix](file)
    shown = [turn("system", "S"), ask("q"), say("a")], [ask("r"), say("b")]
    assert sorted(ids_of(examples(f"{tmp_path}/*.{suffix}"))) == sorted(map(rendered, shown))
    pl.DataFrame([{"output": "b"}]).write_parquet(tmp_path / "c.parquet")
    if suffix == "parquet":
        with pytest.raises(UsageError, match=r"c\.parquet: no column 'instruction'"):
            examples(f"{tmp_path}/*.parquet")


def test_earlier_turns_of_an_alpaca_row(tmp_path: Path) -> None:
    row = {"instruction": "And 1 more?", "output": "6.", "history": [["2 + 3?", "5."]]}
    expected = rendered([*CHAT, ask("And 1 more?"), say("6.")])
    for history in (row["history"], json.dumps(row["history"])):
        assert expected in ids_of(rows_of(tmp_path, [row | {"history": history}]))
    found = rows_of(tmp_path, [row | {"history": empty} for empty in ([], None, "", "[]")])
    assert ids_of(found) == [rendered([ask("And 1 more?"), say("6.")])] * 4
    for history in ([["2 + 3?"]], ["2 + 3?", "5."], {"a": "b"}, [[1, 2]]):
        assert "whose `history` is no list of pairs" in refusal(tmp_path, [row | {"history": history}]).message


@pytest.mark.parametrize(
    ("format", "method", "row"),
    [
        ("chat", "sft", {"messages": CHAT}),
        ("chat", "gspo", {"messages": CHAT}),
        ("prompt_completion", "sft", {"prompt": "q", "completion": "a"}),
        ("prompt_completion", "gspo", {"prompt": CHAT[:1]}),
        ("preference", "dpo", {"prompt": CHAT[:1], **PAIR}),
    ],
)
def test_pictures_beside_the_messages_drop_a_row(tmp_path: Path, format: Any, method: Any, row: Row) -> None:
    found = rows_of(tmp_path, [row | {"images": ["cat.png"]}, row | {"images": []}, row], format, method)
    assert len(found.train.dataset) == 2
    (reason,) = found.train.dropped
    assert reason.startswith("with `images`, which are not read")


@pytest.mark.parametrize("shape", ["completion", "pair", "rollout"])
def test_a_system_column_beside_a_prompt(tmp_path: Path, shape: str) -> None:
    told, question = {"system": "Be brief."}, [turn("system", "Be brief."), ask("q")]
    if shape == "completion":
        (ids,) = ids_of(rows_of(tmp_path, [told | {"prompt": [ask("q")], "completion": "a"}], "prompt_completion"))
        assert ids == rendered([*question, say("a")])
        text: tuple[Any, ...] = ([told | {"prompt": "q", "completion": "a"}], "prompt_completion")
    elif shape == "pair":
        (pair,) = rows_of(tmp_path, [told | {"prompt": [ask("q")], **PAIR}], "preference", "dpo").train.dataset
        assert pair["prompt_ids"] + pair["chosen_ids"] == rendered([*question, say("good")])
        assert pair["prompt_ids"] + pair["rejected_ids"] == rendered([*question, say("bad")])
        text = ([told | {"prompt": "q", "chosen": "a", "rejected": "b"}], "preference", "dpo")
    else:
        (row,) = rows_of(tmp_path, [told | {"prompt": [ask("q")]}], "prompt_completion", "gspo").train.dataset
        assert row["prompt"] == question
        text = ([told | {"prompt": "q"}], "prompt_completion", "gspo")
    said = "with `system`, for which a prompt of text has no place: write it as messages (row 1: Be brief.)"
    assert said in refusal(tmp_path, *text).message


@pytest.mark.parametrize(("format", "row"), [("chat", {"messages": CHAT}), ("prompt_completion", {"prompt": "q"})])
def test_a_column_answer_is_what_the_rewards_get(tmp_path: Path, format: Any, row: Row) -> None:
    (found,) = rows_of(tmp_path, [row | {"answer": 5}], format, "gspo").train.dataset
    assert found["answer"] == 5
    row |= {"completion": "by hand"} if format == "prompt_completion" else {}
    (found,) = rows_of(
        tmp_path, [row | {"answer": "x", "gold": 7}], format, "gspo", columns={"answer": "gold"}
    ).train.dataset
    assert found["answer"] == 7


def test_a_column_that_a_reward_would_take_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = "def score(completions, gold=None, size=3, **_):\n    return [float(gold is None)] * len(completions)\n"
    (tmp_path / "r.py").write_text(code)
    ours = {"rewards": [f"{tmp_path}/r.py:score"]}
    for columns in ({}, {"gold": "gold"}):
        found = rows_of(tmp_path, [{"prompt": "q", "gold": "5"}], "prompt_completion", "gspo", columns=columns)
        config = run_config("gspo", tmp_path, tmp_path / "rows.jsonl", tmp_path / "run", cogumi=ours)
        caplog.clear()
        try_rewards(load_config(config), found.train.dataset)
        message = "reward score takes `gold`, a column that data.columns does not name"
        assert (message in caplog.text) is not bool(columns)
        assert "`size`" not in caplog.text


def test_sides_that_repeat_a_prompt_of_messages(tmp_path: Path) -> None:
    prompt = [*CHAT, ask("And 1 more?")]
    whole = {"prompt": prompt, **{side: [*prompt, *answer] for side, answer in PAIR.items()}}
    (pair,) = rows_of(tmp_path, [whole], "preference", "dpo").train.dataset
    for side, answer in PAIR.items():
        assert pair["prompt_ids"] + pair[f"{side}_ids"] == rendered([*prompt, *answer])
    found = rows_of(tmp_path, [{"prompt": prompt, "completion": [*prompt, say("6.")]}], "prompt_completion")
    assert ids_of(found) == [rendered([*prompt, say("6.")])]


def test_a_prompt_that_is_not_in_the_conversation_drops_the_row(tmp_path: Path) -> None:
    sides = {side: [turn("system", "S"), *CHAT, ask("And?"), *answer] for side, answer in PAIR.items()}
    for prompt in ("2 + 3?", " And?\n", "S 2 + 3?"):
        assert len(rows_of(tmp_path, [{"prompt": prompt, **sides}], "preference", "dpo").train.dataset) == 1
    message = refusal(tmp_path, [{"prompt": "Read this first. 2 + 3?", **sides}], "preference", "dpo").message
    assert "`prompt` is not in the conversation in `chosen` (row 1: Read this first. 2 + 3?)" in message


HUMAN = "\n\nHuman: 2 + 3?\n\nAssistant:"


def test_sides_that_repeat_a_prompt_of_text(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen3")

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text + tokenizer.eos_token)["input_ids"])

    def pairs_of(prompt: str, chosen: str, rejected: str) -> list[list[int]]:
        row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        (pair,) = rows_of(tmp_path, [row], "preference", "dpo").train.dataset
        return [pair["prompt_ids"] + pair[f"{side}_ids"] for side in PAIR]

    assert pairs_of(HUMAN, HUMAN + " 5.", HUMAN + " 6.") == [tokens(HUMAN + " 5."), tokens(HUMAN + " 6.")]
    # A bad answer is one that repeats the question; one that begins with a greeting is an answer.
    assert pairs_of(HUMAN, " 5.", HUMAN + " 6.") == [tokens(HUMAN + " 5."), tokens(HUMAN + HUMAN + " 6.")]
    assert pairs_of("Hi", "Hi! So?", "Hi.") == [tokens("HiHi! So?"), tokens("HiHi.")]
    (row,) = rows_of(tmp_path, [{"prompt": HUMAN, "completion": HUMAN + " 5."}], "prompt_completion").train.dataset
    assert row["input_ids"] == tokens(HUMAN + " 5.")
    assert row["completion_mask"] == [0] * len(tokenizer(HUMAN)["input_ids"]) + [1] * (sum(row["completion_mask"]))
    repeated = {"prompt": HUMAN, "completion": HUMAN + " 5."}
    assert rows_of(tmp_path, [repeated], "prompt_completion", "gspo").train.dataset[0]["answer"] == " 5."


@pytest.mark.parametrize(
    ("method", "format", "sides"),
    [
        ("sft", "prompt_completion", ["completion"]),
        ("dpo", "preference", [*PAIR]),
        ("gspo", "prompt_completion", ["completion"]),
    ],
)
def test_some_answers_that_begin_with_their_prompt_are_answers(
    tmp_path: Path, method: Any, format: Any, sides: list[str]
) -> None:
    def texts(*rows: tuple[str, str]) -> tuple[list[str], str]:
        """Return the text of each example, with the gold answer behind a prompt, and the notes."""
        read = [{"prompt": prompt, **{side: text + f" {side}" for side in sides}} for prompt, text in rows]
        found, decode = rows_of(tmp_path, read, format, method), chat_tokenizer("qwen3").decode
        if method == "gspo":
            return [row["prompt"] + row["answer"] for row in found.train.dataset], str(found.sources)
        ids = [
            row["input_ids"] if method == "sft" else row["prompt_ids"] + row["chosen_ids"]
            for row in found.train.dataset
        ]
        return [decode(row).removesuffix("<|im_end|>") for row in ids], str(found.sources)

    side, repeated = sides[0], [("He go home.", "He go home."), ("Hi", "Hi")]
    shown, notes = texts(*repeated)
    assert shown == [f"He go home. {side}", f"Hi {side}"]
    assert "answers begin with their prompts, which are learned once" in notes
    shown, notes = texts(*repeated, ("He go away.", "He goes away."))
    assert shown == [f"He go home.He go home. {side}", f"HiHi {side}", f"He go away.He goes away. {side}"]
    assert "learned once" not in notes


def test_an_answer_that_is_its_prompt_is_learned(tmp_path: Path) -> None:
    rows = [{"prompt": "She goes home daily.", "completion": "She goes home daily."}] * 2
    assert [sum(row["completion_mask"]) > 2 for row in rows_of(tmp_path, rows, "prompt_completion").train.dataset] == [
        True
    ] * 2


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ([ask(" 2 + 3?\n")], [ask("2 + 3?")]),
        ([ask("2 + 3?")], [turn("system", "S"), ask("2 + 3?")]),
        ([ask("And?")], [*CHAT, ask("And?")]),
        ([ask("2 + 3?")], [*CHAT, ask("And?")]),
    ],
)
def test_sides_with_other_turns_around_the_prompt(tmp_path: Path, prompt: list[Row], before: list[Row]) -> None:
    sides = {side: [*before, *answer] for side, answer in PAIR.items()}
    (pair,) = rows_of(tmp_path, [{"prompt": prompt, **sides}], "preference", "dpo").train.dataset
    for side in PAIR:
        assert pair["prompt_ids"] + pair[f"{side}_ids"] == rendered(sides[side])
    other = refusal(
        tmp_path, [{"prompt": [turn("system", "S"), ask("2 + 3?")], **PAIR | {"chosen": CHAT}}], "preference", "dpo"
    )
    assert "`prompt` is not in the conversation in `chosen` (row 1: system: S user: 2 + 3?)" in other.message


@pytest.mark.parametrize("name", ["question", "instruction", "input"])
def test_a_question_under_another_name_is_not_left_out_of_a_pair(tmp_path: Path, name: str) -> None:
    row = {name: "2 + 3?", "chosen": "It is 5.", "rejected": "It is 6."}  # both begin with "It is"
    error = refusal(tmp_path, [row], "preference", "dpo")
    assert f"'{name}' would be ignored, and there is no `prompt`; set data.columns.prompt: {name}" in str(error)
    (pair,) = rows_of(tmp_path, [row], "preference", "dpo", columns={"prompt": name}).train.dataset
    assert chat_tokenizer("qwen3").decode(pair["prompt_ids"]).startswith("2 + 3?")


def test_a_result_of_a_tool_is_no_part_of_a_preference(tmp_path: Path) -> None:
    called = say("", tool_calls=[{"function": {"name": "find", "arguments": {}}}])
    row = {"prompt": CHAT[:1], **PAIR, "tools": [TOOL]}
    wrong = row | {"chosen": [called, turn("tool", "5"), say("good")]}
    found = rows_of(tmp_path, [row | {"prompt": [CHAT[0], called, turn("tool", "5")]}, wrong], "preference", "dpo")
    assert list(found.train.dropped) == ["with a tool's turn among the answers of chosen or rejected"]
    assert len(found.train.dataset) == 1


def test_a_completion_that_repeats_the_question(tmp_path: Path) -> None:
    found = rows_of(tmp_path, [{"prompt": "2 + 3?\n", "completion": CHAT}], "prompt_completion")
    assert ids_of(found) == [rendered([ask("2 + 3?\n"), *CHAT[1:]])]
    for role in ("system", "user"):
        row = {"prompt": "2 + 3?", "completion": [turn(role, "S"), *CHAT]}
        message = refusal(tmp_path, [row], "prompt_completion").message
        assert f"whose completion begins with a {role} turn that is not the prompt's" in message
    message_text = json.dumps(say("5."))
    found = rows_of(tmp_path, [{"prompt": CHAT[:1], "completion": message_text}], "prompt_completion")
    assert ids_of(found) == [rendered(CHAT)]


@pytest.mark.parametrize("tagged", ["count", "", "\n"])
def test_a_thought_beside_and_inside_the_content_is_one(tmp_path: Path, tagged: str) -> None:
    answer = say(f"<think>\n{tagged}\n</think>\n\n5.", reasoning_content="count")
    found = rows_of(tmp_path, [{"messages": [CHAT[0], answer]}])
    assert ids_of(found) == [rendered([CHAT[0], say("5.", reasoning_content="count")])]
    answer["reasoning_content"] = "guess"
    if tagged == "count":
        assert "with two thoughts" in refusal(tmp_path, [{"messages": [CHAT[0], answer]}]).message


@pytest.mark.parametrize("names", [("content", "value"), ("reasoning_content", "thinking")])
def test_two_names_of_one_thing_agree(tmp_path: Path, names: tuple[str, str]) -> None:
    def answers(first: str, second: str) -> list[Row]:
        return [{"messages": [CHAT[0], {"role": "assistant", "content": "5."} | dict(zip(names, values, strict=True))]}
                for values in ((first, second), (second, first))]  # fmt: skip

    expected = rendered([CHAT[0], say("5.") | {names[0]: "a"}])
    assert ids_of(rows_of(tmp_path, [*answers("a", "a"), *answers("a", "")])) == [expected] * 4
    assert (
        f"2 with a message that has two values of {names[0]} or {names[1]}"
        in refusal(tmp_path, answers("a", "b")).message
    )


@pytest.mark.parametrize(
    "answer", [say("<think>\nT\n</think>\n\n"), say("T</think>\n"), say("", reasoning_content="T"), say(" \n")]
)
def test_a_thought_alone_is_no_answer(tmp_path: Path, answer: Row) -> None:
    found = rows_of(tmp_path, [{"messages": [CHAT[0], answer]}, {"messages": [CHAT[0], say("The tag </think>")]}])
    assert (list(found.train.dropped), len(found.train.dataset)) == (["with an empty answer"], 1)


def test_sides_that_ask_differently_drop_a_pair(tmp_path: Path) -> None:
    pair = {"chosen": [ask("q"), say("good")], "rejected": [ask("r"), say("bad")]}
    for row in (pair, pair | {"prompt": "q"}, pair | {"rejected": [turn("system", "S"), ask("q"), say("bad")]}):
        message = refusal(tmp_path, [row], "preference", "dpo").message
        assert "whose chosen and rejected begin with different turns" in message


def test_an_alpaca_row_with_an_input_alone(tmp_path: Path) -> None:
    found = rows_of(tmp_path, [{"instruction": "", "input": "2 + 3?", "output": "5."}])
    assert ids_of(found) == [rendered(CHAT)]


def test_a_named_column_is_one_field(tmp_path: Path) -> None:
    rows = [{"input": "2 + 3?", "output": "5."}]
    assert ids_of(rows_of(tmp_path, rows, columns={"instruction": "input"})) == [rendered(CHAT)]
    message = str(
        refusal(tmp_path, [{"prompt": "q", "completion": "a"}], "prompt_completion", columns={"prompt": "completion"})
    )
    assert "prompt_completion needs the columns prompt and completion" in message


def test_rows_without_the_column_answer_keep_their_own(tmp_path: Path) -> None:
    found = rows_of(tmp_path, [{"messages": CHAT}, {"messages": [ask("q"), say("a")], "answer": 7}], method="gspo")
    assert sorted(map(str, found.train.dataset["answer"])) == ["5.", "7"]
    pl.DataFrame({"prompt": ["a", "b"], "completion": ["c", "d"], "answer": [None, "e"]}).write_parquet(
        tmp_path / "a.parquet"
    )
    found = examples(tmp_path / "a.parquet", "prompt_completion", "gspo")
    assert sorted(found.train.dataset["answer"]) == ["c", "e"]
    write_lines(tmp_path / "1.jsonl", [{"prompt": "a", "answer": 7}])
    write_lines(tmp_path / "2.jsonl", [{"prompt": "b"}])
    assert list(examples(f"{tmp_path}/[12].jsonl", "prompt_completion", "gspo").train.dataset["answer"]) == [7, None]


@pytest.mark.parametrize(
    ("format", "method", "row"),
    [
        ("prompt_completion", "sft", {"prompt": "q", "completion": "a"}),
        ("prompt_completion", "gspo", {"prompt": "q"}),
        ("preference", "dpo", {"prompt": "q", "chosen": "a", "rejected": "b"}),
    ],
)
def test_tools_beside_a_prompt_of_text(tmp_path: Path, format: Any, method: Any, row: Row) -> None:
    assert len(rows_of(tmp_path, [row | {"tools": []}, row], format, method).train.dataset) == 2
    message = refusal(tmp_path, [row | {"tools": [TOOL]}], format, method).message
    assert "with `tools`, for which a prompt of text has no place: write it as messages (row 1: q)" in message


def test_a_text_has_one_end_token_where_the_tokenizer_adds_its_own() -> None:
    tokenizer = chat_tokenizer("llama3")
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    ids = tokenizer("a b")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(begin, tokenizer.bos_token_id), (end, tokenizer.eos_token_id)]
    )
    truth = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
    assert tokenizer("a b")["input_ids"] == truth
    (document,) = chunk_of([{"text": "a b"}], tokenizer, format="text").table["input_ids"].to_pylist()
    (answer,) = chunk_of([{"prompt": "a", "completion": " b"}], tokenizer, format="prompt_completion").table.to_pylist()
    (pair,) = chunk_of(
        [{"prompt": "a", "chosen": " b", "rejected": " c"}], tokenizer, "dpo", "preference"
    ).table.to_pylist()
    assert document == answer["input_ids"] == pair["prompt_ids"] + pair["chosen_ids"] == truth
    with pytest.raises(UsageError, match="adds its end token to prompts of text"):
        chunk_of([{"prompt": "a"}], tokenizer, "gspo", "prompt_completion", max_length=9)


def test_another_format_is_named_where_it_reads_the_columns(tmp_path: Path) -> None:
    assert "data.format: chat reads them" in str(refusal(tmp_path, [{"messages": CHAT}], "fim"))
    row = {"prompt": "q", "completion": "a"}
    assert "data.format: prompt_completion reads them" in str(refusal(tmp_path, [row], "chat"))
    assert "data.columns says which column is which" in str(refusal(tmp_path, [{"text": "t"}], "chat"))


@pytest.mark.parametrize("text", ["", "[]", "\n\n"])
def test_a_file_without_rows_is_named_as_that(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(UsageError, match=r"rows\.json: it (is empty|has no rows)"):
        examples(tmp_path / "rows.json")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"data": [{"messages": CHAT}]},
            "rows.json: one object, whose rows are below 'data'; write that list alone (jq .data",
        ),
        ({"version": "1", "train": [{"messages": CHAT}], "test": []}, "one object, whose rows are below 'train'"),
        (
            {"instruction": {"0": "a", "1": "b"}, "output": {"0": "x", "1": "y"}},
            "of a table by columns (pandas writes rows",
        ),
        (
            {"messages": {"0": CHAT, "1": CHAT}},
            "of a table by columns (pandas writes rows with to_json(FILE, orient='records'",
        ),
        ({"score": 1, "other": []}, "the data has score, other: data.columns says which column is which"),
    ],
)
def test_one_object_that_holds_all_rows_is_named_as_that(tmp_path: Path, value: Row, message: str) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(value, indent=1))
    with pytest.raises(UsageError) as caught:
        examples(tmp_path / "rows.json")
    assert message in str(caught.value)


HEADER = "prompt,completion\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (HEADER + "a,b\n" + 'c,"d\ne,f\ng,h\n', 3),  # not closed: what follows would be the cell
        (HEADER + '"say \\"hi\\"",ok\n', 2),  # as Spark writes it
        (HEADER + '"Hello" he said,ok\n', 2),
        (HEADER + "a,b\nc\n", 3),
        ("prompt,completion,prompt\na,b,c\n", 1),
        (HEADER + "a,b\n" + HEADER + "c,d\n", 3),  # joined files
        ("prompt;completion\na;b\n", 1),
        ("sep=;\nprompt;completion\na;b\n", 1),  # as Excel reads it
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "TSV", "csv.bz2"])
def test_csv_that_reads_in_two_ways_is_named_by_its_line(tmp_path: Path, text: str, line: int, suffix: str) -> None:
    file = tmp_path / f"rows.{suffix}"
    content = text.replace(",", "\t" if suffix == "TSV" else ",").encode()
    file.write_bytes(bz2.compress(content) if suffix.endswith("bz2") else content)
    with pytest.raises(UsageError) as caught:
        examples(file, "prompt_completion")
    assert caught.value.place == f"{file}:{line}"
    assert caught.value.fix


def test_a_short_float_is_the_number_that_was_written(tmp_path: Path) -> None:
    short = pl.Series([0.1, None, float("nan"), 5.0], dtype=pl.Float32)
    pl.DataFrame({"prompt": [[ask(f"{n}?")] for n in range(4)], "answer": short}).write_parquet(tmp_path / "a.parquet")
    found = examples(tmp_path / "a.parquet", "prompt_completion", "gspo").train.dataset
    assert {row["prompt"][0]["content"]: repr(row["answer"]) for row in found} == dict(
        zip(("0?", "1?", "2?", "3?"), ("0.1", "None", "nan", "5.0"), strict=True)
    )
    assert {row["record"]["answer"] for row in found} >= {0.1, 5.0}


def test_quotes_and_lines_of_csv_are_those_of_the_file(tmp_path: Path) -> None:
    rows = [{"prompt": 'a "b", c\r\nd', "completion": ' 5" e'}, {"prompt": "\ufeffx\x00", "completion": "é\u2028"}]
    pl.DataFrame(rows).write_csv(tmp_path / "rows.csv")
    frame = pl.concat(sources.batches([tmp_path / "rows.csv"], ["prompt", "completion"]))
    assert frame.to_dicts() == rows


def test_files_of_other_kinds_and_encodings(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    with pytest.raises(UsageError, match=r"rows\.xlsx is of a kind that is not read \(\.parquet, .*convert it"):
        examples(tmp_path / "rows.xlsx")
    (tmp_path / "cut.csv").write_bytes((HEADER + "a,b\n").encode("utf-16")[:-1])
    with pytest.raises(UsageError, match=r"cut\.csv: not a CSV file, or a damaged one"):
        examples(tmp_path / "cut.csv", "prompt_completion")
    tokenizer = chat_tokenizer("qwen3")
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"):
        (tmp_path / "note.txt").write_bytes("hello wörld".encode(encoding))
        (row,) = examples(tmp_path / "note.txt", "text").train.dataset
        assert row["input_ids"] == tokenizer("hello wörld" + tokenizer.eos_token)["input_ids"]
