"""The forgetting panel: its checks by answers written here, the models' answers by transformers, the likelihood in float64."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import run_config
from finished_runs import FinishedRun
from transformers import AutoModelForCausalLM, AutoTokenizer

import cogumi
from cogumi.config.schema import load_config
from cogumi.evaluation.forgetting import (
    PanelComparison,
    Task,
    check_forgetting,
    compare_panel,
    read_tasks,
    run_panel,
    sample_from,
)
from cogumi.evaluation.saved_models import BASE, read_run
from cogumi.models.completion import mean_log_likelihood

CommandLine = Callable[..., tuple[int, str, str]]
TASKS = read_tasks()
# Right in the required format, of the first instruction of each kind; then right without it, and wrong.
ANSWERS = {
    "sums": ("12", "7 + 5 = 12", "13"),
    "word problems": ("7", "He has 7 apples.", "17"),
    "repetition": ("Lantern.", "The word is lantern, as you said", "light"),
    "capitals": ("RIVER", "The word is RIVER", "river"),
    "reversed lists": ("apple, plum, pear", "apple\nplum\npear", "pear, plum, apple"),
    "sorted lists": ("3, 5, 8", "They are 3, 5, 8", "8, 3, 5"),
    "counting": ("4", "There are four items.", "5"),
    "yes or no": ("YES.", "Yes, it is a star.", "No"),
    "extraction": ("Vienna", "They met in Vienna.", "Monday"),
    "json objects": ('```json\n{"age": 31, "name": "Anna"}\n```', 'It is {"name": "Anna", "age": 31}.', '{"name": "Ann"}'),
    "translation": ("casa", "House is 'casa' in Spanish, as in mi casa", "perro"),
    "first letters": ("G", "It is the letter g.", "a"),
    "opposites": ("Cold.", "It is cold outside", "warm"),
    "what comes next": ("Wednesday", "After it comes Wednesday.", "Monday"),
    "roman numerals": ("4", "IV is four", "6"),
    "output of code": ("5", "It prints the number 5", "2 + 3"),
    "short sentences": ("The horse runs.", "A horse is one of the animals that people ride on in the fields", "A cow eats."),
    "lists of three": ("1. dog\n2. cat\n3. owl", "dog, cat, owl", "red\nblue\ngreen"),
    "facts": ("Paris", "The capital of France is Paris.", "Lyon"),
    "plain questions": ("Boil water and add leaves.", "First:\nboil water", "I cannot help with that."),
}  # fmt: skip


def test_the_panel_has_three_instructions_of_each_of_twenty_kinds() -> None:
    kinds = [task.kind for task in TASKS]
    assert {kinds.count(kind) for kind in kinds} == {3}
    assert len(set(kinds)) == 20
    assert len({task.prompt for task in TASKS}) == 60


@pytest.mark.parametrize("kind", ANSWERS)
def test_right_answers_are_told_from_wrong_ones_with_and_without_the_format(kind: str) -> None:
    task = next(task for task in TASKS if task.kind == kind)
    kept, free, wrong = ANSWERS[kind]
    assert task.grade(kept) == (1, 1)
    assert task.grade(free) == (1, 0)
    assert task.grade(wrong)[0] == 0


@pytest.mark.parametrize("task", TASKS, ids=[task.prompt for task in TASKS])
def test_an_echo_a_refusal_and_nothing_are_right_for_no_instruction(task: Task) -> None:
    for answer in ("", "I am sorry, but that is beyond me.", task.prompt, "maybe " * 20):
        assert task.grade(answer)[0] == 0, answer
    assert all(map(math.isnan, task.grade(None)))


def test_a_run_is_compared_with_its_base_by_greedy_answers_and_by_the_likelihood_of_the_bases_samples(
    finished_chat: FinishedRun,
) -> None:
    setup = read_run(finished_chat.home)
    result = run_panel({name: replace(setup, columns=(name,)) for name in setup.columns})
    assert list(result.written) == ["base", "adapter", "merged"]
    merged = AutoModelForCausalLM.from_pretrained(finished_chat.home / "merged", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(finished_chat.home / "merged")
    message = [{"role": "user", "content": TASKS[7].prompt}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = merged.generate(**ids, do_sample=False, max_new_tokens=40)[0, ids["input_ids"].shape[1] :]
    text = tokenizer.decode(written, skip_special_tokens=True)
    assert result.written["merged"][7] == text.partition("; done")[0]
    assert result.scores["stopping"]["merged"][7] == ("; done" in text or tokenizer.eos_token_id in written)
    # A run that learned to answer two letters has left its base; its adapter and its merged model are one model.
    assert result.paired("own_samples", "base", "merged").verdict == "worse"
    assert result.paired("own_samples", "adapter", "merged").verdict == "equal"
    # One row by hand, in float64, of the base: no other code of the package than what samples it.
    base = AutoModelForCausalLM.from_pretrained(setup.files.base, dtype=torch.float32).eval()
    prompt = ids["input_ids"][0].tolist()
    (sample,) = sample_from(base, tokenizer, [prompt])
    logits = base.double()(input_ids=torch.tensor([prompt + sample])).logits[0]
    steps = [logits[len(prompt) - 1 + at].log_softmax(-1)[token].item() for at, token in enumerate(sample)]
    assert mean_log_likelihood(base.float(), prompt, sample) == pytest.approx(np.mean(steps), abs=1e-5)


def test_samples_are_the_same_each_time_end_with_their_token_and_leave_the_random_state() -> None:
    from cogumi.models.loading import load_model, load_tokenizer, read_base

    path = read_base("cogumi:small-base").name
    model, tokenizer = load_model(path), load_tokenizer(path)
    prompts = [tokenizer(text)["input_ids"] for text in ("def add(a, b):", "import os")]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    samples = sample_from(model, tokenizer, prompts)
    assert torch.equal(torch.get_rng_state(), before)
    assert sample_from(model, tokenizer, prompts) == samples
    for sample in samples:
        assert tokenizer.eos_token_id not in sample[:-1]
        assert len(sample) == 40 or sample[-1] == tokenizer.eos_token_id


def test_a_model_equals_itself_and_one_without_a_template_has_two_scores(
    tiny_model: Path, command_line: CommandLine
) -> None:
    status, output, beside = command_line("compare", tiny_model, tiny_model, "--panel", "--json")
    assert status == 0, beside
    report = json.loads(output)
    assert [(pair["score"], pair["verdict"]) for pair in report["pairs"]] == [
        ("stopping", "equal"),
        ("own_samples", "equal"),
    ]
    assert "instructions and format are not measured: no chat template" in report["notes"]
    assert all(math.isfinite(pair["mean"]) for pair in report["pairs"])


def test_a_thought_that_does_not_end_is_no_wrong_answer(tiny_model: Path, tmp_path: Path) -> None:
    """The template opens a thought in every prompt and has no switch: the random model never closes one."""
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    opening = "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(turns + opening)
    result = compare_panel({"a": str(tmp_path), "b": str(tmp_path)})
    assert list(result.scores) == ["stopping", "own_samples"]
    assert result.notes == (
        "greedy, at most 256 tokens",
        "instructions and format are not measured: no end of a thought of a",
    )
    assert len(result.lines("a", "b")) == 3


def judged(right: tuple[int, int], likelihood: float) -> PanelComparison:
    """Models that answered so many of 60 instructions, the second with that likelihood of the first one's samples."""
    answers = {name: [1.0] * count + [0.0] * (60 - count) for name, count in zip("ab", right, strict=True)}
    own = {"a": [-1.0] * 60, "b": [-1.0 + likelihood + 0.01 * (row % 3 - 1) for row in range(60)]}
    scores = {"instructions": answers, "own_samples": own}
    return PanelComparison(["?"] * 60, None, {"a": [], "b": []}, scores, (), ["sums"] * 60)


@pytest.mark.parametrize(
    ("right", "likelihood", "mark"),
    [
        ((30, 30), 0.0, "pass"),
        ((30, 28), -0.05, "pass"),
        ((30, 30), -0.3, "warn"),
        ((30, 15), 0.0, "warn"),
        ((30, 0), -0.5, "FAIL"),
        ((26, 1), -0.5, "FAIL"),  # each answer is the same word
        ((30, 10), -4.0, "FAIL"),
        ((3, 0), -0.05, "pass"),
    ],
)
def test_what_is_told_worse_is_a_warning_and_only_a_destroyed_model_fails(
    right: tuple[int, int], likelihood: float, mark: str
) -> None:
    check = judged(right, likelihood).judge("a", "b")
    assert str(check).startswith(mark)
    assert ("lower train.learning_rate" in check.fix) == (mark != "pass")


def test_a_model_that_answers_nearly_nothing_is_said_to_have_little_to_lose() -> None:
    assert judged((3, 0), 0.0).lines("a", "b")[1].endswith("lost: sums 3; so few are right that little can be lost")
    assert "little" not in judged((30, 0), 0.0).lines("a", "b")[1]


def test_a_run_with_the_key_reports_what_broke(tmp_path: Path, finished_chat: FinishedRun) -> None:
    base = Path(str(read_run(finished_chat.home).files.base))
    values = run_config(
        "sft", base, base.parent / "rows.jsonl", tmp_path / "run", lora={"r": 16},
        data_section={"format": "prompt_completion", "eval_rows": 4},
        train={"max_steps": 2, "learning_rate": 1e-2, "save_strategy": "no", "chat_template_path": "cogumi:tulu"},
        cogumi={"merge": False, "compile": "off", "forgetting": True},
    )  # fmt: skip
    result = cogumi.train(values)
    record = json.loads((tmp_path / "run" / "forgetting.json").read_text())
    assert len(record["lines"]) == 5
    assert [line.partition(" ")[0] for line in record["lines"][1:]] == [*record["scores"]]
    (check,) = (check for check in result.verdict.checks if check.name == "forgetting")
    assert check.passed
    log, report = ((tmp_path / "run" / name).read_text() for name in ("run.log", "report.html"))
    assert all(line in log for line in record["lines"])
    assert "What broke" in report
    assert record["lines"][2][:20] in report
    again = compare_panel({BASE: BASE, "run": str(tmp_path / "run")})
    assert again.scores["own_samples"]["run"] == record["scores"]["own_samples"]["adapter"]


def test_a_run_whose_models_cannot_be_read_has_a_warning_that_says_so(tmp_path: Path) -> None:
    check = check_forgetting(load_config(run_config("sft", "cogumi:small-base", "cogumi:stdlib", tmp_path)))
    assert (check.passed, check.warning) == (True, True)
    assert "no run there" in check.figure


REFUSED = {
    "base TINY --panel": "base: no run or adapter is named whose base it could be; name its directory or hub id",
    "TINY TINY --panel --config smoke/chat-gspo": "--panel: it has its own prompts and scores; drop --config and --score",
    "TINY cogumi:small-base --panel": "has another vocabulary",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_the_panel_cannot_compare_is_refused_in_one_line(
    words: str, tiny_model: Path, command_line: CommandLine
) -> None:
    status, output, beside = command_line(
        "compare", *(tiny_model if word == "TINY" else word for word in words.split())
    )
    assert (status, output) == (2, "")
    assert REFUSED[words] in beside.splitlines()[-1]
