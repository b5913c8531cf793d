"""Models side by side: the statistics by simulation and by hand, completions by transformers' own generate, refusals."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import add_tensors, edit_tensors
from finished_runs import FinishedRun
from safetensors.torch import load_file

from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import config_of, read_jsonl
from cogumi.evaluation import judge_command
from cogumi.evaluation.comparison import Comparison, compare_models
from cogumi.evaluation.paired import compare_paired, sign_test
from cogumi.methods.examples import prepare_examples
from cogumi.models.loading import load_model, load_tokenizer, read_base
from cogumi.notebook import completions

CommandLine = Callable[..., tuple[int, str, str]]
SIMULATIONS = 1000


def exact_scores(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Scores of 0 and 1 of two models on 200 prompts; the second is better by 0.05 in the mean."""
    chance = generator.random(200)
    return (chance < 0.3).astype(float), (chance + generator.normal(0, 0.15, 200) < 0.35).astype(float)


def skewed_scores(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(60), generator.gamma(4.0, 0.25, 60).round(1)


@pytest.mark.parametrize(("draw", "rows"), [(exact_scores, 200), (skewed_scores, 60)])
def test_the_interval_covers_the_true_difference_in_95_of_100_simulations(draw: Callable, rows: int) -> None:
    generator = np.random.default_rng(1)
    truth = np.mean([np.subtract(*draw(generator)[::-1]).mean() for _ in range(40_000)])
    pairs = [compare_paired(*draw(generator)) for _ in range(SIMULATIONS)]
    assert {pair.rows for pair in pairs} == {rows}
    assert 0.93 <= np.mean([pair.low <= truth <= pair.high for pair in pairs]) <= 0.97


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [(0, 0, 1.0), (3, 0, 0.25), (0, 6, 0.03125), (5, 1, 0.21875), (4, 4, 1.0), (600, 400, 2.7e-10)],
)
def test_the_sign_test_is_that_of_the_binomial_distribution(wins: int, losses: int, p_value: float) -> None:
    assert sign_test(wins, losses) == pytest.approx(p_value, rel=0.02)


def test_pairs_are_counted_by_row_and_rows_without_a_score_are_left_out() -> None:
    pair = compare_paired([0, 1, 0.5, math.nan, 1], [1, 0.5, 0.5, 1, math.nan])
    assert (pair.rows, pair.wins, pair.ties, pair.losses) == (3, 1, 1, 1)
    assert pair.mean == pytest.approx(1 / 6)
    assert compare_paired([0.1] * 9, [0.1] * 9).verdict == "equal"
    assert compare_paired([0.0] * 9, [1.0] * 9).verdict == "better"
    assert compare_paired([1.0] * 9, [0.0] * 9).verdict == "worse"
    assert compare_paired([0.0, 1.0], [1.0, 0.0]).verdict == "not told apart"
    assert compare_paired([math.nan], [1.0]).rows == 0


def test_the_rows_that_are_shown_are_spread_and_never_chosen_by_what_was_written() -> None:
    def rows(prompts: int, count: int) -> list[int]:
        return list(Comparison(["?"] * prompts, ["!"] * prompts, {}, {}).shown(count))

    assert rows(200, 5) == [0, 40, 80, 120, 160]
    assert rows(9, 4) == [0, 2, 4, 6]
    assert rows(3, 5) == [0, 1, 2]


def test_a_model_completes_greedily_what_its_chat_template_makes_of_a_prompt() -> None:
    """The config's own model is not there: the prompts are rendered as for the model that is compared."""
    actual = compare_models({"small": "cogumi:small-base"}, load_config("smoke/chat-gspo"), rows=3)
    path = read_base("cogumi:small-base").name
    model, tokenizer = load_model(path), load_tokenizer(path)
    for asked, written in zip(actual.prompts, actual.written["small"], strict=True):
        message = [{"role": "user", "content": asked}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids.to(model.device), do_sample=False, max_new_tokens=24)
        assert tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == written
    exact, similarity = actual.scores["exact_answer"]["small"], actual.scores["answer_similarity"]["small"]
    assert actual.scores["rewards"]["small"] == pytest.approx(np.add(exact, similarity))
    assert "below 30 prompts the sign test has to tell them apart as well" in actual.notes


def test_a_trained_run_is_better_than_its_base_equal_to_itself_and_better_than_a_damaged_merge(
    finished_chat: FinishedRun, tmp_path: Path, command_line: CommandLine
) -> None:
    run, last = finished_chat.home, "model.layers.1.mlp.down_proj.weight"
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in (run / "merged").iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    edit_tensors(damaged, lambda name, tensor: tensor.roll(1, 0) if name == last else tensor)
    status, output, beside = command_line("compare", "base", run, run, run / "adapter", damaged, "--json")
    assert status == 0, beside
    report = json.loads(output)
    names = ["base", str(run), f"{run} (3)", str(run / "adapter"), str(damaged)]
    assert list(report["written"]) == names
    verdicts = {
        (pair["before"], pair["after"]): (pair["verdict"], pair["mean"])
        for pair in report["pairs"]
        if pair["score"] == "answer_similarity"
    }
    assert verdicts[names[0], names[1]][1] > 0
    assert verdicts[names[1], names[2]] == ("equal", 0.0)
    assert verdicts[names[1], names[3]] == ("equal", 0.0)
    assert verdicts[names[1], names[4]][0] != "equal"
    # What the run held out, as its samples show it, and no row that it trained on.
    samples = read_jsonl(run / "samples.jsonl")
    assert sorted(report["prompts"]) == sorted({sample["prompt"] for sample in samples})
    assert not any("trained with other data" in note for note in report["notes"])


def test_the_likelihood_of_the_answers_is_the_held_out_loss(
    finished_chat: FinishedRun, command_line: CommandLine
) -> None:
    """Of the run itself, whose last `eval_loss` TRL's trainer measured; the base has the one before the first step."""
    home = finished_chat.home
    status, output, beside = command_line("compare", "base", home, "--score", "log_likelihood", "--json")
    assert status == 0, beside
    report, run = json.loads(output), load_config(home / "config.yaml")
    prompts = prepare_examples(run, load_tokenizer(home / "merged"), None, 200).prompts
    assert prompts is not None
    lengths = np.array([len(ids) for ids in prompts["answer_ids"]])
    losses = [row["eval_loss"] for row in read_jsonl(home / "metrics.jsonl") if "eval_loss" in row]
    for model, loss in (("base", losses[0]), (str(home), losses[-1])):
        likelihoods = np.array(report["scores"]["log_likelihood"][model])
        assert -(likelihoods * lengths).sum() / lengths.sum() == pytest.approx(loss, abs=2e-3)
    (pair,) = report["pairs"]
    assert pair["low"] > 0
    assert (pair["verdict"], pair["rows"]) == ("not told apart", len(lengths))  # so few that the sign test cannot


def test_prompts_without_a_learned_answer_have_no_likelihood(command_line: CommandLine) -> None:
    models = ("cogumi:small-base", "cogumi:small-base", "--config", "smoke/chat-gspo", "--score", "log_likelihood")
    status, _, beside = command_line("compare", *models)
    assert status == 2
    assert "--score log_likelihood" in beside


def test_other_held_out_rows_are_noted_and_other_vocabularies_refused(
    finished_chat: FinishedRun, tmp_path: Path
) -> None:
    run = load_config(finished_chat.home / "config.yaml", data__eval_rows=5, cogumi__run_dir=str(tmp_path / "other"))
    notes = compare_models({"merged": str(finished_chat.home / "merged")}, run).notes
    assert any(note.startswith("merged was trained with other data or held-out rows") for note in notes)
    with pytest.raises(UsageError, match="small has another vocabulary than the model whose tokenizer renders"):
        compare_models({"small": "cogumi:small-base"}, run)


def test_a_function_of_the_user_scores_and_its_error_is_one_line(
    finished_chat: FinishedRun, tmp_path: Path, command_line: CommandLine
) -> None:
    scores = tmp_path / "scores.py"
    scores.write_text(
        "def length(completions: list[str], answer, **_):\n"
        "    return [float(len(text)) for text in completions]\n\n"
        "def broken(completions, **_):\n    return [1 / 0 for _ in completions]\n"
    )
    words = ("compare", "base", finished_chat.home, "--rows", 2, "--score")
    status, output, beside = command_line(*words, f"{scores}:length", "--json")
    assert status == 0, beside
    report = json.loads(output)
    (values,) = report["scores"].values()
    assert values == {name: [float(len(text)) for text in texts] for name, texts in report["written"].items()}
    status, output, beside = command_line(*words, f"{scores}:broken")
    assert (status, output) == (1, "")
    assert "ZeroDivisionError" in beside.splitlines()[-1]


def test_a_judge_command_scores_with_a_number_for_each_line(
    finished_chat: FinishedRun, tmp_path: Path, command_line: CommandLine
) -> None:
    judge = tmp_path / "judge.sh"
    judge.write_text(
        f'#!/bin/sh\nwhile read -r line; do printf "%s\\n" "$line" >> {tmp_path}/seen; echo "${{#line}}"; done\n'
    )
    judge.chmod(0o755)
    words = ("compare", "base", finished_chat.home, "--score", f"command:{judge} strictly", "--json")
    status, output, beside = command_line(*words)
    assert status == 0, beside
    report, seen = json.loads(output), (tmp_path / "seen").read_text().splitlines()
    (scores,) = report["scores"].values()
    assert [scores["base"], scores[str(finished_chat.home)]] == [[*map(len, seen[:4])], [*map(len, seen[4:])]]
    rows = [json.loads(line) for line in seen]
    assert [row["completion"] for row in rows] == [text for texts in report["written"].values() for text in texts]
    assert {row["answer"] for row in rows} == set(report["answers"])
    assert set(rows[0]) == {"prompt", "completion", "answer"}


@pytest.mark.parametrize("ci", ["", "true"])  # with it, transformers propagates its warnings to the root logger
def test_standard_output_has_the_table_alone_and_standard_error_a_line_a_stage(
    ci: str, finished_chat: FinishedRun, tmp_path: Path
) -> None:
    more = Path(shutil.copytree(finished_chat.home / "merged", tmp_path / "more"))
    add_tensors(more, {"not_of_the_model.weight": torch.zeros(3)})  # of which transformers prints a table
    words = [
        sys.executable,
        "-m",
        "cogumi",
        "compare",
        "base",
        str(more),
        "--config",
        finished_chat.home / "config.yaml",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env={**os.environ, "CI": ci})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 held-out prompts; ")
    stages = [line for line in done.stderr.splitlines() if "completes and scores 4 held-out prompts" in line]
    others = set(done.stderr.splitlines()) - set(stages)
    assert len(stages) == 2
    assert not [line for line in others if not line.startswith(("prepared data", "Failed to load CPU gemm"))], others


BROKEN_JUDGES = {
    "./nowhere": "there is no program './nowhere' that can be run",
    "": "there is no program '' that can be run",
    "sh 'unclosed": "No closing quotation",
    "false": "it ended with status 1",
    "sh -c 'cat; echo 1; echo 2; echo 3'": "it printed more than 2 lines for 2 rows",
    "yes": "it printed more than 2 lines for 2 rows",
    "cat /dev/zero": "it printed more than 2 lines for 2 rows",
    "echo 1": "it printed 1 lines for 2 rows",
    "sh -c 'echo 1; echo good'": "line 2 of its output is 'good', and no number",
    "sh -c 'echo nan; echo 1'": "line 1 of its output is 'nan', and no number",
    "sh -c 'echo 1; echo 2; exec >&-; sleep 60 & wait'": "it was killed, after its limit of 1 s for 2 rows",
    "sh -c 'kill -TERM $$'": "it ended with status -15",
}


@pytest.mark.parametrize("command", BROKEN_JUDGES)
def test_a_judge_that_does_not_score_is_refused_in_one_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_command, "START_SECONDS", 1)
    monkeypatch.setattr(judge_command, "ROW_SECONDS", 0)
    began = time.monotonic()
    with pytest.raises(UsageError) as refused:
        judge_command.judge_of(f"command:{command}")(["?"] * 2, ["!"] * 2)
    assert time.monotonic() - began < 20
    assert str(refused.value).startswith(f"--score command:{command}: {BROKEN_JUDGES[command]}"), refused.value


DAMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeroed": torch.zeros_like,
    "four times": lambda tensor: tensor * 4,  # 1.5 times is not told apart here
    "permuted rows": lambda tensor: tensor.roll(1, 0),
    "permuted columns": lambda tensor: tensor.flip(1),
}


def test_a_merge_with_one_damaged_tensor_is_told_worse(finished_chat: FinishedRun, tmp_path: Path) -> None:
    right, name = finished_chat.home / "merged", "model.layers.{}.mlp.down_proj.weight"
    weights = load_file(right / "model.safetensors")
    models = {"right": str(right)}
    for kind, damage in DAMAGES.items():
        models[kind] = shutil.copytree(right, tmp_path / kind)
        edit_tensors(tmp_path / kind, lambda key, tensor, do=damage: do(tensor) if key == name.format(1) else tensor)
    models["swapped layers"] = shutil.copytree(right, tmp_path / "swapped")
    swapped = {name.format(at): weights[name.format(1 - at)] for at in (0, 1)}
    edit_tensors(tmp_path / "swapped", lambda key, tensor: swapped.get(key, tensor))
    run = load_config(finished_chat.home / "config.yaml", data__eval_rows=30, cogumi__run_dir=str(tmp_path / "other"))
    actual = compare_models({kind: str(place) for kind, place in models.items()}, run, 30, ["log_likelihood"])
    verdicts = {kind: actual.paired("log_likelihood", "right", kind).verdict for kind in models}
    assert verdicts == {"right": "equal"} | dict.fromkeys([*DAMAGES, "swapped layers"], "worse")


REFUSED = {
    "base": "base is compared with nothing; name a second model",
    "base nowhere": "--config: none of base, nowhere is a run",
    "base RUN --score rewards": "--score rewards: the configuration has no cogumi.rewards",
    "base RUN --score fluency": "no reward 'fluency'",
    "base RUN --score final_number --config CONFIG": "no rows are held out",
    "base RUNx": "held out; there is RUN; name a YAML",
    "no/where/at RUN": "no model at 'no/where/at'",
    "EMPTY RUN": "it holds no run, no model (config.json) and no adapter",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_compared_is_refused_in_one_line(
    words: str, finished_chat: FinishedRun, tmp_path: Path, command_line: CommandLine
) -> None:
    values = config_of(finished_chat.home)
    values["data"]["eval_rows"] = 0
    (tmp_path / "config.yaml").write_text(json.dumps(values))
    (tmp_path / "empty").mkdir()
    places = {"RUN": finished_chat.home, "CONFIG": tmp_path / "config.yaml", "EMPTY": tmp_path / "empty"}
    places["RUNx"] = Path(f"{finished_chat.home}x")
    status, output, beside = command_line("compare", *(places.get(word, word) for word in words.split()))
    assert (status, output) == (2, "")
    assert REFUSED[words].replace("RUN", str(finished_chat.home)) in beside.splitlines()[-1]


def test_a_model_is_looked_for_at_the_hub_without_the_libraries_retries(
    finished_chat: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_commit(name: str) -> str:
        raise UsageError(f"no model at {name!r}", key="model.name")

    monkeypatch.setattr("cogumi.evaluation.comparison.find_commit", find_commit)
    run = load_config(finished_chat.home / "config.yaml", cogumi__run_dir="elsewhere")
    with pytest.raises(UsageError, match=r"^bas: no model at 'bas'"):
        compare_models({"a": "bas"}, run, 4)


def test_the_notebooks_table_marks_each_answer_right_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    written = {"SFT": ["b = 1", "a < c"], "GSPO": ["b = 1", "b < c\n"]}
    scores = {"exact_answer": {"SFT": [1.0, 0.0], "GSPO": [1.0, 1.0]}}
    actual = Comparison(["Rename a to b:", "the second"], ["b = 1", "b < c"], written, scores, ("a note",))
    monkeypatch.setattr("cogumi.evaluation.comparison.compare_models", lambda *_: actual)
    html = completions.compare(dict.fromkeys(written, "anywhere"), "smoke/chat-gspo")._repr_html_()
    rows = [
        [
            unescape(" ".join(re.sub("<[^>]*>", " ", cell).split()))
            for cell in re.findall("<t[dh].*?</t[dh]>", row, re.DOTALL)
        ]
        for row in re.findall("<tr.*?</tr>", html, re.DOTALL)
    ]
    difference = "+0.500 (+0.000 to +1.000), not told apart; wins/ties/losses 1/1/0"
    assert rows == [
        ["asked", "SFT", "GSPO", "right"],
        ["exactly right, mean", "0.500", "1.000", ""],
        ["exactly right, difference to SFT (95 % interval)", "", difference, ""],
        ["Rename a to b:", "b = 1 right", "b = 1 right", "b = 1"],
        ["the second", "a < c wrong", "b < c right", "b < c"],
    ]
    assert "2 held-out prompts, of which 2 are shown, evenly spaced; a note" in html


def test_a_config_that_holds_nothing_out_is_refused() -> None:
    with pytest.raises(UsageError, match="no rows are held out"):
        compare_models({"base": "cogumi:small-base"}, load_config("smoke/chat-gspo", data__eval_rows=0))
