"""No held-out question is trained on, in whatever spelling, file or method it occurs."""

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from jinja2 import TemplateError

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.run_directory import DECISIONS, read_section, write_section
from cogumi.data.encoding import FormatOptions
from cogumi.data.formats import reader_for
from cogumi.data.rows import decode_cell
from cogumi.data.selection import example_hashes, question_of
from cogumi.methods.examples import DATA, Examples, prepare_examples
from tests.builders import run_config
from tests.chat_tokenizers import ask, chat_tokenizer, say, turn
from tests.test_data_matrix import TEMPLATES, tokenizer_of

Row = dict[str, Any]
QUESTIONS, HELD_OUT = 1_500, 3_100
"""Numbers of questions and of held-out rows, which have more than 1,000 questions."""
CODE = re.compile(r"of code (\d+)")
NULLS = {"name": None, "tool_calls": None}


def sharegpt(*turns: str) -> list[Row]:
    return [{"from": name, "value": text} for name, text in zip(("human", "gpt") * len(turns), turns, strict=False)]


def chat_spellings(number: int) -> tuple[list[Any], list[Any]]:
    """Ten spellings of one question: five cells of `messages`, five of `conversations`."""
    question, answer = f"What is the café\nof code {number}?", f"It is {number * 7}."
    plain = [ask(question), say(answer)]
    nulls = [message | NULLS for message in plain]
    parts = [turn(message["role"], [{"type": "text", "text": message["content"]}]) for message in plain]
    spaced = [ask(f"  {question.replace(chr(10), chr(13) + chr(10))} \n"), say(answer)]
    system = [turn("system", "Be brief."), *plain]
    longer = sharegpt(question, "Seven times it.", "How much is that?", answer)
    greeted = [{"from": "gpt", "value": "Hello!"}, *sharegpt(question, answer)]
    decomposed = sharegpt(question.replace("é", "e\u0301"), "Another answer.")
    return [plain, json.dumps(plain), nulls, parts, spaced], [
        sharegpt(question, answer),
        json.dumps(sharegpt(question, answer)),
        longer,
        greeted if number % 2 else decomposed,
        sharegpt(question, "I do not know.") if number % 3 else system,
    ]


def write_lines(path: Path, rows: list[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat_files(home: Path) -> list[str]:
    cells = [chat_spellings(number) for number in range(QUESTIONS)]
    return [
        write_lines(home / f"{column}.jsonl", [{column: cell} for spelled in cells for cell in spelled[part]])
        for part, column in enumerate(("messages", "conversations"))
    ]


def pair_files(home: Path) -> list[str]:
    """Pairs with and without a prompt of their own, three of each question in each file."""
    rows: tuple[list[Row], list[Row]] = ([], [])
    for number in range(QUESTIONS):
        question = ask(f"What is the café of code {number}?")
        for attempt in range(3):
            good, bad = ([say(f"{word} {attempt}")] for word in ("right", "wrong"))
            rows[0].append({"prompt": [question], "chosen": good, "rejected": bad})
            rows[1].append({"chosen": [question, *good], "rejected": [question, *bad]})
    return [write_lines(home / f"{part}.jsonl", pairs) for part, pairs in enumerate(rows)]


def prepared(method: str, files: list[str], home: Path, tokenizer: Any = None, **data: Any) -> tuple[Examples, Any]:
    tokenizer = tokenizer or chat_tokenizer("qwen3")
    data = {"format": "preference" if method == "dpo" else "chat", "mix": [{"source": file} for file in files], **data}
    more = {"rewards": ["exact_answer"]} if method == "gspo" else {}
    config = run_config(method, home, None, home / "run", data_section=data, cogumi=more)
    return prepare_examples(load_config(config), tokenizer), tokenizer


def codes(dataset: Any, tokenizer: Any) -> set[str]:
    texts = (
        json.dumps(row["prompt"]) if "prompt" in row else tokenizer.decode(row.get("input_ids") or row["prompt_ids"])
        for row in dataset
    )
    return {code for text in texts for code in CODE.findall(text)}


@pytest.mark.parametrize("method", ["sft", "dpo", "gspo"])
def test_ten_spellings_of_a_question_over_two_files(method: str, tmp_path: Path) -> None:
    files = pair_files(tmp_path) if method == "dpo" else chat_files(tmp_path)
    examples, tokenizer = prepared(method, files, tmp_path, eval_rows=HELD_OUT)
    assert examples.held_out is not None
    held_out, trained = (codes(part.dataset, tokenizer) for part in (examples.held_out, examples.train))
    assert len(held_out) >= 1_000
    assert len(trained) > 100
    assert not held_out & trained
    assert examples.train.sharing > QUESTIONS
    assert examples.train.total + examples.held_out.total == QUESTIONS * (6 if method == "dpo" else 10)
    assert "share their question with another row" in examples.train.report()


def test_two_methods_hold_out_the_same_questions(tmp_path: Path) -> None:
    """SFT on one file of questions, then DPO on another: the second trains on nothing that the first held out."""
    questions = [ask(f"What is the café of code {number}?") for number in range(300)]
    right, wrong = [say("yes")], [say("no")]
    chats = write_lines(tmp_path / "a.jsonl", [{"messages": [question, *right]} for question in questions])
    pairs = [{"prompt": [question], "chosen": right, "rejected": wrong} for question in questions[::-1]]
    pair_file = write_lines(tmp_path / "b.jsonl", pairs)
    first, tokenizer = prepared("sft", [chats], tmp_path, eval_rows=60)
    second, _ = prepared("dpo", [pair_file], tmp_path, eval_rows=60)
    assert first.held_out is not None
    assert second.held_out is not None
    assert codes(first.held_out.dataset, tokenizer) == codes(second.held_out.dataset, tokenizer)


def test_spellings_of_one_conversation_are_one_example(tmp_path: Path) -> None:
    rows = [{"messages": cell} for number in range(60) for cell in chat_spellings(number)[0][:4]]
    examples, _ = prepared("sft", [write_lines(tmp_path / "a.jsonl", rows)], tmp_path, eval_rows=0, deduplicate=True)
    assert len(examples.train.dataset) == 60
    assert examples.train.duplicates == 180
    assert examples.train.sharing == 0


DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SMOLLM2_INSTRUCT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n" + DEFAULT
    + "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
SYSTEMS = {
    "smollm2 instruct": DEFAULT,
    "qwen2_5": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
}


def matrix_tokenizer(name: str) -> Any:
    if name in ("qwen2_5", "llama3"):
        return chat_tokenizer(name)
    tokenizer = tokenizer_of(name.split()[0])
    if name == "smollm2 instruct":
        tokenizer.chat_template = SMOLLM2_INSTRUCT
    return tokenizer


def same_prompts(name: str) -> list[list[Row]]:
    """Spellings of a question and its answer that some templates render alike."""
    asked, answer = "Write a line.", "This is\n one."
    plain, system = [ask(asked), say(answer)], SYSTEMS.get(name, "")
    return [
        plain,
        [ask(f" {asked}\n"), say(answer)],
        [ask(asked), say(f"\n\n{answer} \t\n")],
        [turn("system", system), *plain],
        [turn("system", f" {system}\n"), *plain],
        [turn("user", asked, name="x"), say(answer, **NULLS, refusal=None)],
        [ask(asked), say(f"<think>\n\n</think>\n\n{answer}")],
        [ask(asked), say(answer, reasoning_content="")],
        [turn("system", "Be brief."), *plain],
        [ask(f"Be brief.\n\n{asked}"), plain[1]],
    ]


@pytest.mark.parametrize("name", [*TEMPLATES, "qwen2_5", "llama3", "smollm2 instruct"])
def test_rows_that_a_template_renders_alike_are_one_example(name: str, tmp_path: Path) -> None:
    """Rows of a question that all share are held out one by one; none of their token ids is trained on."""
    tokenizer = matrix_tokenizer(name)
    conversations = [
        [*asked, answer | {"content": answer["content"].replace("one", f"line {n}")}]
        for n in range(40)
        for *asked, answer in same_prompts(name)
    ]
    others = [[ask("Write a line."), say(f"{n}")] for n in range(20)]
    conversations += [[turn("system", "Be brief."), *messages] for messages in others] + others
    rows = [{"messages": messages} for messages in conversations]
    read = reader_for(FormatOptions("sft", "chat"), tokenizer)
    hashes = example_hashes(pl.DataFrame([{"messages": json.dumps(row["messages"])} for row in rows]), read, 0)
    examples, _ = prepared("sft", [write_lines(tmp_path / "a.jsonl", rows)], tmp_path, tokenizer, eval_rows=40)
    assert examples.held_out is not None
    held_out, trained = ({tuple(row["input_ids"]) for row in part.dataset} for part in examples.parts()[::-1])
    assert len(held_out) > 10
    assert len(trained) > 10
    assert not held_out & trained
    by_text: dict[str, set[int]] = {}
    for row, number in zip(rows, hashes.examples.tolist(), strict=True):
        try:
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        except (TemplateError, TypeError):  # Llama 3.1 asks for the length of calls that are null
            continue
        by_text.setdefault(text, set()).add(number)
    assert all(len(numbers) == 1 for numbers in by_text.values())
    assert len(set(hashes.examples.tolist())) >= 60  # of other answers, and with another system message


@pytest.mark.parametrize("texts", [("Q: 2 + 3? A:", " 5"), ("Q: 2 + 3?", " A: 5"), ("", "Q: 2 + 3? A: 5")])
def test_text_is_one_example_wherever_its_prompt_ends(texts: tuple[str, str]) -> None:
    read = reader_for(FormatOptions("sft", "prompt_completion"), chat_tokenizer("qwen3"))
    assert read is not None
    assert read({"prompt": texts[0], "completion": texts[1]})[1] == "Q: 2 + 3? A: 5"


def test_pairs_of_text_without_a_prompt_share_the_lines_before_their_answers() -> None:
    read = reader_for(FormatOptions("dpo", "preference"), chat_tokenizer("qwen3"))
    assert read is not None
    start = "\n\nHuman: 2 + 3?\n\nAssistant:"
    pairs = [(" It is 5", " It is 6"), (" Five", " Six"), (" I do", " I did")]
    rows = [{"chosen": start + chosen, "rejected": start + rejected} for chosen, rejected in pairs]
    assert {read(row)[0] for row in rows} == {"Human: 2 + 3?"}
    assert read({"prompt": start, "chosen": " It is 5", "rejected": " It is 6"})[1] == read(rows[0])[1]


def test_an_instruction_that_all_rows_share_is_no_question(tmp_path: Path) -> None:
    """Only the answers differ: rows are held out one by one, as whole examples."""
    rows = [{"messages": [ask("Write a line."), say(f"line {n}")]} for n in range(200)]
    examples, tokenizer = prepared("sft", [write_lines(tmp_path / "a.jsonl", rows)], tmp_path, eval_rows=20)
    assert examples.held_out is not None
    assert (len(examples.train.dataset), len(examples.held_out.dataset)) == (180, 20)
    assert examples.train.sharing == 200
    texts = [{tokenizer.decode(row["input_ids"]) for row in part.dataset} for part in examples.parts()]
    assert not texts[0] & texts[1]


def test_pieces_of_code_with_one_hole_stay_together(tmp_path: Path) -> None:
    rows = [{"prefix": f"a{n // 4} = ", "middle": f"{n}", "suffix": "\n"} for n in range(200)]
    pl.DataFrame(rows).write_parquet(tmp_path / "code.parquet")
    data = {"format": "fim", "eval_rows": 16}
    config = run_config("sft", tmp_path, tmp_path / "code.parquet", tmp_path / "run", data_section=data)
    tokenizer = chat_tokenizer("qwen3")
    examples = prepare_examples(load_config(config), tokenizer)
    assert examples.held_out is not None
    texts = ([tokenizer.decode(row["input_ids"]) for row in part.dataset] for part in examples.parts())
    trained, held_out = ({match for text in part for match in re.findall(r"a\d+ =", text)} for part in texts)
    assert trained
    assert held_out
    assert not trained & held_out
    assert len(examples.held_out.dataset) == 16


def test_a_question_is_what_precedes_the_first_answer() -> None:
    asked = [ask("a"), say("b"), ask("c")]
    assert question_of(asked) == question_of([turn("system", "s"), *asked]) == question_of("a \n") == "a"
    assert question_of([say("hi"), *asked]) == "a"
    assert question_of([turn("system", "s")]) == "s"
    assert decode_cell(b"a") == question_of("a")


def test_the_held_out_loss_does_not_depend_on_the_batch(tiny_model: Path, tmp_path: Path) -> None:
    """Answers of very different lengths; transformers' mean of batch means differs by percents."""
    rows = [{"prompt": f"{n} ", "completion": "x " + "def f(x): return x + 1\n" * (n % 9)} for n in range(40)]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    losses = []
    for size in (1, 4, 17):
        data = {"format": "prompt_completion", "eval_rows": 17}
        train = {"max_steps": 1, "learning_rate": 1e-4, "per_device_eval_batch_size": size, "bf16": False}
        config = run_config("sft", tiny_model, file, tmp_path / f"run-{size}", data_section=data, train=train)
        losses.append(cogumi.train(config).series("eval_loss")[-1])
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)


def test_a_resumed_run_with_another_choice_of_rows_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": [ask(f"{n}?"), say("x")]} for n in range(60)]
    examples, _ = prepared("sft", [write_lines(tmp_path / "a.jsonl", rows)], tmp_path, eval_rows=9)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for _ in range(2):
        examples.record(run_dir)
    assert "held-out rows" not in caplog.text
    write_section(run_dir / DECISIONS, DATA, read_section(run_dir / DECISIONS, DATA) | {"split": "another"})
    examples.record(run_dir)
    assert "the held-out rows may be others than when the run began" in caplog.text
    examples.record(run_dir)
    assert read_section(run_dir / DECISIONS, DATA)["changed_since_start"]  # also after a second resume


def test_the_verdict_says_that_the_rows_have_changed(sft: dict[str, Any], tmp_path: Path) -> None:
    rows = pl.read_parquet(sft["data"]["source"])
    sft["data"]["source"] = str(tmp_path / "rows.parquet")
    for part, values in ((rows.head(200), {"cogumi__sanity": 3}), (rows.tail(200), {})):
        part.write_parquet(tmp_path / "rows.parquet")
        result = cogumi.train(sft, **values)
    warned = [check for check in result.verdict.checks if check.warning and check.name == "held-out rows"]
    assert [check.figure for check in warned] == ["changed since the run began"]
