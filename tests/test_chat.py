"""`cogumi chat` and `run.chat()`: what a run trained answers as its training saw it, streamed, beside its base."""

import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from chat_tokenizers import chat_tokenizer
from finished_runs import FinishedRun
from golden import Golden
from transformers import AutoModelForCausalLM, AutoTokenizer

import cogumi
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_jsonl, this_process, write_json
from cogumi.data.fim import PSM, detect_fim_tokens
from cogumi.evaluation.saved_models import LoadedModels, read_setup
from cogumi.models.quantization import quantized_layers
from cogumi.notebook import chat as chats
from cogumi.notebook.chat import FILL, Answer, Chat, ChatPanel, open_chat, template_of

QUESTION = "add d to w"
COLUMNS = ("base", "adapter", "merged")
CommandLine = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def chat_of(finished_chat: FinishedRun) -> Callable[..., Chat]:
    """A new conversation with the models of the run, which are loaded once."""
    setup = read_setup(finished_chat.home, COLUMNS, max_new_tokens=16)
    models = LoadedModels(setup.files)
    return lambda **changes: Chat(replace(setup, **changes), models)


@pytest.fixture(autouse=True)
def _none_loaded() -> Iterator[None]:
    yield
    chats.last_models.clear()


def generated(model: Path, tokenizer: Any, messages: list[dict[str, str]], tokens: int) -> str:
    """What transformers itself makes of a conversation."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = loaded.generate(**inputs, do_sample=False, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id)
    text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.partition("; done")[0]


def test_base_adapter_and_merged_answer_what_transformers_generates(
    finished_chat: FinishedRun, command_line: CommandLine
) -> None:
    home, only = finished_chat.home, [word for column in reversed(COLUMNS) for word in ("--only", column)]
    status, output, beside = command_line(
        "chat", home, "--prompt", f"{QUESTION}\\n", "--json", "--max-new-tokens", 12, *only
    )
    assert status == 0, beside
    parsed = json.loads(output)
    assert (parsed["mode"], parsed["prompt"], list(parsed["answers"])) == ("chat", f"{QUESTION}\n", list(COLUMNS))
    texts = {column: answer["text"] for column, answer in parsed["answers"].items()}
    tokenizer = AutoTokenizer.from_pretrained(home / "adapter")
    messages = [{"role": "user", "content": f"{QUESTION}\n"}]
    assert texts["merged"] == generated(home / "merged", tokenizer, messages, 12)
    assert texts["base"] == generated(Path(finished_chat.result.base), tokenizer, messages, 12)
    assert texts["adapter"] == texts["merged"] != texts["base"]
    first = beside.splitlines()[0]
    for word in (str(home), "chat", "/base) and adapter and merged", "greedy", "12 tokens", "'; done'"):
        assert word in first, word


def test_a_chat_sees_what_the_training_saw(finished_chat: FinishedRun, chat_of: Callable[..., Chat]) -> None:
    """Its answer to a held-out prompt is the run's own sample of it, and so is the prompt."""
    sample = read_jsonl(finished_chat.home / "samples.jsonl")[-1]
    message = next(line for line in sample["prompt"].splitlines() if line.startswith("add"))
    chat = chat_of(max_new_tokens=64)
    assert chat.prompt("adapter", message) == sample["prompt"]
    assert chat.answer("adapter", message, lambda _: None) == Answer(sample["completion"], sample["ended"])


def test_a_conversation_holds_each_columns_own_answers(chat_of: Callable[..., Chat]) -> None:
    chat = chat_of()
    first = {column: Answer(f"{column} says", True) for column in COLUMNS}
    chat.remember("one", first)
    for column in COLUMNS:
        turns = [("user", "one"), ("assistant", f"{column} says"), ("user", "two")]
        messages = [{"role": role, "content": content} for role, content in turns]
        whole = chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert chat.prompt(column, "two") == whole
        assert chat.prompt_ids(column, "two") == chat.tokenizer(whole, add_special_tokens=False)["input_ids"]
    chat.reset()
    assert "says" not in chat.prompt("base", "two")


def test_thinking_and_the_date_are_those_of_the_run(chat_of: Callable[..., Chat]) -> None:
    setup, qwen = replace(chat_of().setup, format="chat", thinking=False), chat_tokenizer("qwen3")
    template = template_of(setup, qwen)
    assert template is not None
    messages = [{"role": "user", "content": "a"}]
    with_flag = qwen.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert template.prompt(messages) == with_flag
    dated = template_of(replace(setup, thinking=None, today="2031-02-03"), chat_tokenizer("gptoss"))
    assert dated is not None
    assert "2031-02-03" in dated.prompt(messages)


# -------------------------------------------------------------------------------------------------------------- streaming


def test_words_are_handed_on_in_order_until_an_interrupt(chat_of: Callable[..., Chat]) -> None:
    pieces: list[str] = []
    answer = chat_of(stops=()).answer("adapter", QUESTION, pieces.append)
    assert len([piece for piece in pieces if piece]) > 3
    assert "".join(pieces) == answer.text

    seen: list[str] = []

    def interrupt(piece: str) -> None:
        seen.append(piece)
        if len([word for word in seen if word]) == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        chat_of(stops=()).answer("adapter", QUESTION, interrupt)
    written = "".join(seen)
    assert answer.text.startswith(written)
    assert len(written) < len(answer.text)  # it came while the answer was being written


def test_an_answer_ends_before_a_stop_string(chat_of: Callable[..., Chat]) -> None:
    whole = chat_of().answer("merged", QUESTION, lambda _: None).text
    middle = whole.index(" ", 3)
    stop = whole[middle - 3 : middle + 2]  # across two words
    cut = chat_of(stops=(stop,)).answer("merged", QUESTION, lambda _: None)
    assert cut == Answer(whole[: whole.index(stop)], True)


def test_an_answer_has_the_room_that_the_context_leaves(chat_of: Callable[..., Chat]) -> None:
    chat = chat_of(max_new_tokens=4000)
    long = "add " * 480
    room = 512 - len(chat.prompt_ids("merged", long))
    assert 0 < room < 40
    text = chat.answer("merged", long, lambda _: None).text
    # A word may be written in fewer tokens than it is read in.
    assert 0 < len(chat.tokenizer(text)["input_ids"]) <= room + 1
    with pytest.raises(UsageError, match="context of the model has 512; /reset"):
        chat.answer("merged", "add " * 600, lambda _: None)


# -------------------------------------------------------------------------------------------------------------- a terminal


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.parametrize("last", ["/exit\nnever asked\n", ""])  # "": the end of the input, as Ctrl-D
def test_lines_are_answered_until_exit_or_the_end(
    finished_chat: FinishedRun, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    typed(monkeypatch, f"add a to u\n\nadd b\n/reset\n{last}")
    status, output, wrong = command_line("chat", finished_chat.home, "--max-new-tokens", 4)
    assert status == 0, wrong
    assert output.splitlines()[0].startswith(f"{finished_chat.home}: chat")
    assert output.count("base:\n") == output.count("merged:\n") == 2
    assert output.count("[cut before its end: 4 tokens") == 4
    assert output.count("forgotten") == 1


def test_an_interrupt_ends_the_answer_and_a_second_one_the_chat(
    chat_of: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_of(max_new_tokens=8, columns=("base", "merged"))
    answer, asked = chat.answer, iter([QUESTION, QUESTION])

    def interrupted(column: str, message: str, write: Callable[[str], None]) -> Answer:
        monkeypatch.setattr(chat, "answer", answer)
        return answer(column, message, lambda _: signal.raise_signal(signal.SIGINT))

    monkeypatch.setattr(chat, "answer", interrupted)
    monkeypatch.setattr("builtins.input", lambda _: next(asked, None) or signal.raise_signal(signal.SIGINT))
    chats.converse(chat)
    first, _, second = capsys.readouterr().out.partition("[interrupted")
    assert "merged:" not in first
    assert "merged:" in second
    assert [len(turns) for turns in chat.turns.values()] == [2, 2]  # of the second alone


# ------------------------------------------------------------------------------------------- other runs, other directories


def test_a_run_on_code_completes_text_as_its_samples_were_completed(finished_sft: FinishedRun) -> None:
    chat = open_chat(read_setup(finished_sft.home, ("adapter",), max_new_tokens=64))
    assert "each message is completed as text" in chat.describe().splitlines()[0]
    for sample in read_jsonl(finished_sft.home / "samples.jsonl")[-4:]:
        answer = chat.answer("adapter", sample["prompt"], lambda _: None)
        assert answer == Answer(sample["completion"], sample["ended"])
    chat.remember("x", {"adapter": Answer("y", True)})
    assert chat.prompt("adapter", "def f(x):") == "def f(x):"  # nothing of what was said before
    tokens = detect_fim_tokens(chat.tokenizer)
    assert tokens is not None
    assert chat.prompt("adapter", f"def f(x):{FILL} x") == tokens.prompt("def f(x):", " x", PSM)
    assert FILL in chat.describe()


def test_answers_are_greedy_unless_a_temperature_is_given(finished_gspo: FinishedRun) -> None:
    setup = read_setup(finished_gspo.home)
    assert (setup.columns, setup.max_new_tokens, setup.temperature) == (("base", "merged"), 8, 0.0)
    torch.manual_seed(0)
    for temperature, is_random in ((0.0, False), (1.0, True)):
        chat = open_chat(read_setup(finished_gspo.home, temperature=temperature))
        texts = {chat.answer("merged", "def f(x):", lambda _: None).text for _ in range(4)}
        assert (len(texts) > 1) is is_random


def test_a_run_without_its_end_answers_from_its_last_good_checkpoint(
    finished_sft: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    home = tmp_path / "run"
    shutil.copytree(finished_sft.home, home)
    for name in ("adapter", "merged"):
        shutil.rmtree(home / name)
    other = psutil.Process(os.getppid())
    trains = this_process() | {"pid": other.pid, "began": other.create_time()}
    write_json(home / "status.json", {"state": "running", "stage": "train", **trains})
    setup = read_setup(home)
    assert (setup.columns, setup.files.adapter) == (("base", "adapter"), home / "checkpoints" / "checkpoint-6")
    assert "checkpoint-6, its last good checkpoint" in setup.note
    sample = read_jsonl(home / "samples.jsonl")[-1]
    chat = open_chat(replace(setup, columns=("adapter",), max_new_tokens=64))
    assert chat.answer("adapter", sample["prompt"], lambda _: None).text == sample["completion"]

    (home / "checkpoints" / "checkpoint-6" / "adapter_model.safetensors").write_bytes(b"half")
    assert read_setup(home).files.adapter == home / "checkpoints" / "checkpoint-3"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with golden.raises("chat", place=home, message="the run has the GPU", fix="ask when it has ended"):
        read_setup(home)
    monkeypatch.undo()
    shutil.rmtree(home / "checkpoints")
    with golden.raises("chat", place=home, message="nothing yet", fix=f"cogumi checkpoint {home}"):
        read_setup(home)


def test_a_directory_that_only_holds_runs_names_one(finished_chat: FinishedRun, tmp_path: Path) -> None:
    """As the smoke run's has it, with a status of its own."""
    shutil.copytree(finished_chat.result.run_dir, tmp_path / "gspo")
    write_json(tmp_path / "status.json", {"state": "finished"})
    with pytest.raises(UsageError, match=f"saved nothing yet .finished.; below it there is {tmp_path}/gspo; "):
        read_setup(tmp_path)
    assert read_setup(tmp_path / "gspo").columns


@pytest.mark.parametrize("part", ["adapter", "merged"])
def test_an_adapter_or_a_model_alone_answers(
    part: str, finished_chat: FinishedRun, chat_of: Callable[..., Chat]
) -> None:
    alone = Chat(read_setup(finished_chat.home / part, max_new_tokens=16))
    assert alone.setup.columns == (("base", "adapter") if part == "adapter" else ("model",))
    for column in alone.setup.columns:
        theirs = chat_of(stops=()).answer("merged" if column == "model" else column, QUESTION, lambda _: None)
        assert alone.answer(column, QUESTION, lambda _: None) == theirs


@pytest.mark.usefixtures("reads_4bit")
def test_a_base_of_four_bits_is_loaded_as_in_the_training(finished_qlora: FinishedRun) -> None:
    setup = read_setup(finished_qlora.home, max_new_tokens=4)
    with LoadedModels(setup.files).model_of("base") as model:
        assert quantized_layers(model)


@pytest.mark.parametrize(
    "words",
    [
        ["<tmp>/missing"], ["<tmp>/empty"], ["<tmp>/file"], ["<runs>/rum"], ["<runs>/run", "--only", "trained"],
        ["<runs>/run", "--json"], ["<runs>/run", "--prompt", " "],
    ],
    ids=["missing", "empty", "file", "misspelled", "only", "json", "blank"],
)  # fmt: skip
def test_what_cannot_be_talked_to_is_one_line(
    finished_chat: FinishedRun, tmp_path: Path, words: list[str], command_line: CommandLine, golden: Golden
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    runs = str(finished_chat.home.parent)
    directory, *options = [word.replace("<tmp>", str(tmp_path)).replace("<runs>", runs) for word in words]
    status, output, wrong = command_line("chat", directory, *options)
    assert (status, output, wrong.count("\n")) == (2, "", 1)
    golden("chat", wrong.replace(runs, "<runs>"))


# -------------------------------------------------------------------------------------------------------------- a notebook


def test_a_run_answers_a_message_side_by_side_and_keeps_its_models(finished_chat: FinishedRun) -> None:
    run = cogumi.attach(finished_chat.home)
    actual = run.chat("<b>add</b>", max_new_tokens=6)
    assert actual is not None
    assert list(actual.texts) == ["base", "merged"]
    assert str(actual).startswith("base:\n")
    shown = actual._repr_html_()
    assert "&lt;b&gt;add" in shown
    assert "<b>add" not in shown
    kept = chats.last_models[0].models["base"]
    assert run.chat(QUESTION, only="base", temperature=0.7, max_new_tokens=2) is not None
    assert chats.last_models[0].models["base"] is kept


def test_models_that_were_written_since_are_loaded_anew(finished_chat: FinishedRun, tmp_path: Path) -> None:
    shutil.copytree(finished_chat.home / "merged", tmp_path / "model")
    first = open_chat(read_setup(tmp_path / "model")).models
    assert open_chat(read_setup(tmp_path / "model")).models is first
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert open_chat(read_setup(tmp_path / "model")).models is not first


def test_the_panel_answers_in_columns_until_an_interrupt(
    chat_of: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = ChatPanel(chat_of(columns=("base", "merged"), max_new_tokens=6))
    panel.message.value = "</pre><script>alert(1)</script>"
    panel.send.click()
    assert "<script" not in panel.talk.value
    assert "&lt;script&gt;" in panel.talk.value
    heads = panel.talk.value.partition("</thead>")[0]
    assert heads.index("base") < heads.index("merged")
    assert "merged is cut before its end: 6 tokens" in panel.talk.value
    assert (panel.message.value, panel.send.disabled, len(panel.chat.turns["merged"])) == ("", False, 2)
    monkeypatch.setattr(panel, "take", lambda *_: signal.raise_signal(signal.SIGINT))
    panel.message.value = QUESTION
    panel.send.click()
    assert "stopped" in panel.talk.value
    assert (panel.send.disabled, len(panel.chat.turns["merged"])) == (False, 2)
