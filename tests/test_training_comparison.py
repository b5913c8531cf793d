"""`cogumi.compare_with` and `cogumi.gate`: the result of a run against another model, and what follows from it."""

import gc
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from finished_runs import FinishedRun
from golden import Golden

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json, read_jsonl, this_process, write_json
from cogumi.evaluation import comparison, held_out_reward
from cogumi.evaluation.paired import Comparison
from cogumi.evaluation.saved_models import read_setup
from cogumi.health.verdict import Check
from cogumi.methods.preparation import check_settings

CommandLine = Callable[..., tuple[int, str, str]]


def check_of(run_dir: Path) -> dict[str, Any]:
    (check,) = [check for check in read_json(run_dir / "verdict.json")["checks"] if check["name"] == "comparison"]
    return dict(check)


@pytest.fixture
def chat(finished_chat: FinishedRun, tmp_path: Path) -> dict[str, Any]:
    """The configuration of the finished chat, with a comparison, eight rows held out and a checkpoint at its last step."""
    values = yaml.safe_load((finished_chat.home / "config.yaml").read_text())
    values["data"]["eval_rows"] = 8
    values["train"] |= {"max_steps": 10, "save_strategy": "steps", "save_steps": 10}
    values["cogumi"] |= {"run_dir": str(tmp_path / "run"), "compare_with": "base", "gate": "better"}
    return dict(values)


def judged(differences: list[float], gate: str | None = None, **others: list[float]) -> Check:
    zeros = [0.0] * len(differences)
    scores = {
        name: {"base": zeros, "this run": after} for name, after in {"log_likelihood": differences, **others}.items()
    }
    run = load_config("smoke/chat-sft", cogumi__compare_with="base", **({"cogumi__gate": gate} if gate else {}))
    texts = ["?"] * len(differences)
    made = Comparison(texts, None, {"base": texts, "this run": texts}, scores)
    return comparison.judge_result(made, "base", run)


@pytest.mark.parametrize(
    ("differences", "gate", "passed", "warning"),
    [
        ([0.5, 0.4, 0.6] * 20, None, True, False),
        ([-0.5, -0.4, -0.6] * 20, None, False, False),
        ([0.5, -0.5] * 30, None, True, True),
        ([0.0] * 60, None, True, True),
        ([math.nan] * 60, None, False, False),
        ([-0.5, -0.4], None, True, True),  # two rows say nothing, though their interval excludes 0
        ([-0.5, -0.4] * 4, None, False, False),
        ([0.5, 0.4, 0.6] * 20, "better", True, False),
        ([0.5, -0.5] * 30, "better", False, False),
        ([0.5, 0.4], "better", False, False),
        ([0.5, -0.5] * 30, "not_worse", True, True),
        ([-0.5, -0.4, -0.6] * 20, "not_worse", False, False),
    ],
)
def test_worse_fails_not_told_apart_warns_and_a_gate_asks_for_more(
    differences: list[float], gate: str | None, passed: bool, warning: bool
) -> None:
    check = judged(differences, gate)
    assert (check.passed, check.warning) == (passed, warning)
    assert ("cogumi.gate" in check.requirement) == (gate is not None)


def test_other_scores_are_listed_and_fail_nothing() -> None:
    check = judged([0.5, 0.4] * 30, exact_answer=[-1.0] * 60)
    assert check.passed
    assert "log_likelihood 0.0000 before, 0.4500 after, better, +0.4500, 95 % interval" in check.figure
    assert "60 rows; exact_answer worse (-1.0000)" in check.figure


@pytest.mark.parametrize("merge", [True, False])
def test_a_run_is_compared_with_its_base_when_its_own_model_has_left_memory(
    merge: bool, chat: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat["cogumi"]["merge"] = merge
    load = comparison.LoadedModels

    def parameters() -> set[int]:
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.nn.Parameter)]
        return {id(tensor) for tensor in tensors if not tensor.is_meta}

    def count_first(files: Any) -> Any:
        in_memory.append(len(parameters() - before))
        return load(files)

    gc.collect()
    before, in_memory = parameters(), list[int]()
    monkeypatch.setattr(comparison, "LoadedModels", count_first)
    result = cogumi.train(chat)
    assert in_memory == [0, 0]
    check, recorded = check_of(result.run_dir), read_json(result.run_dir / "comparison.json")
    assert (check["passed"], check["requirement"]) == (True, "better (cogumi.gate)"), check
    losses = [row["eval_loss"] for row in read_jsonl(result.run_dir / "metrics.jsonl") if "eval_loss" in row]
    means = recorded["means"]["log_likelihood"]
    assert list(means) == ["base", "this run"]
    assert [-means["base"], -means["this run"]] == pytest.approx([losses[0], losses[-1]], rel=0.05)
    report = (result.run_dir / "report.html").read_text()
    section = report[report.index('<h2 id="comparison">') :].split("</section>")[0]
    assert "wins/ties/losses 8/0/0" in section
    assert section.count("add ") >= 5  # rows side by side


@pytest.mark.parametrize(("name", "score"), [("finished_dpo", "preference_margin"), ("finished_gspo", "rewards")])
def test_pairs_are_judged_by_their_margin_and_gspo_by_the_held_out_reward(
    name: str, score: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    values = yaml.safe_load((request.getfixturevalue(name).home / "config.yaml").read_text())
    values["cogumi"] |= {"run_dir": str(tmp_path / "run"), "compare_with": "base"}
    check = check_of(cogumi.train(values).run_dir)
    assert check["figure"].startswith(f"{score} ")
    assert check["requirement"] == "not worse"


def test_a_result_that_is_worse_is_a_failed_check_and_its_gate_stops_push_and_the_next_stage(
    chat: dict[str, Any], finished_chat: FinishedRun, command_line: CommandLine
) -> None:
    """Ten steps against forty on the same data."""
    result = cogumi.train(chat, cogumi__compare_with=str(finished_chat.home / "merged"), train__learning_rate=1e-4)
    check = check_of(result.run_dir)
    assert not check["passed"]
    assert ", worse, " in check["figure"]
    assert not (result.run_dir / "DONE").exists()
    status, _, beside = command_line("push", result.run_dir, "someone/tuned")
    assert status == 2
    (line,) = beside.splitlines()
    assert line.startswith(f"cogumi: {result.run_dir}: cogumi.gate: better is not met: log_likelihood ")
    assert line.endswith("; train again, or push it --anyway: the card says so")
    for key, place in (("model__adapter", "adapter"), ("model__name", "merged")):
        later = load_config(chat, **{key: str(result.run_dir / place), "cogumi__run_dir": str(result.run_dir) + "2"})
        with pytest.raises(
            UsageError, match=r"cogumi\.gate: better is not met: log_likelihood .*cogumi\.from_failed: true"
        ):
            check_settings(later)
        later.cogumi.from_failed = True
        check_settings(later)


@pytest.mark.parametrize(
    ("gate", "passed", "stops"),
    [
        ("not_worse", True, ""),
        ("better", False, "better is not met: a figure"),
        (None, False, "failed checks: comparison"),
    ],
)
def test_a_gate_goes_by_the_check_of_the_comparison_alone(
    gate: str | None, passed: bool, stops: str, finished_sft: FinishedRun, tmp_path: Path
) -> None:
    before = Path(shutil.copytree(finished_sft.home, tmp_path / "before"))
    values, verdict = yaml.safe_load((before / "config.yaml").read_text()), read_json(before / "verdict.json")
    values["cogumi"] |= {"compare_with": "base", "gate": gate}
    (before / "config.yaml").write_text(yaml.safe_dump(values))
    run = load_config("smoke/chat-sft", model__name=str(before / "merged"))
    if gate:  # its verdict has no comparison yet
        with pytest.raises(UsageError, match=f"cogumi.gate: {gate} is not met: the run has no comparison"):
            check_settings(run)
    verdict["checks"].append({"name": "comparison", "figure": "a figure", "passed": passed})
    write_json(before / "verdict.json", verdict)
    if stops:
        with pytest.raises(UsageError, match=stops):
            check_settings(run)
    else:
        check_settings(run)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gate alone": ({"cogumi__compare_with": None}, "cogumi.gate without cogumi.compare_with"),
    "no rows": (
        {"data__eval_rows": 0},
        "cogumi.compare_with: data.eval_rows: no rows are held out; set it to 100 or more; or drop it",
    ),
    "documents": (
        {
            "data__source": "cogumi:stdlib",
            "data__format": "text",
            "data__columns": {"text": "source"},
            "data__eval_rows": 0,
        },
        "cogumi.compare_with: data.format: all of a held-out example is learned, so there is no prompt to complete",
    ),
    "few rows": (
        {"data__eval_rows": 5, "cogumi__gate": "not_worse"},
        "by 5 held-out rows no model is told better or worse, so cogumi.gate decides nothing; set it to 100, to 6",
    ),
    "no model": (
        {"cogumi__compare_with": "no/where/at"},
        "cogumi.compare_with: no/where/at: no model at 'no/where/at'",
    ),
    "other words": ({"cogumi__compare_with": "cogumi:small-base"}, "cogumi:small-base has another vocabulary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_before_there_is_a_run(case: str, chat: dict[str, Any]) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        cogumi.train(chat, **overrides)
    assert not Path(chat["cogumi"]["run_dir"]).exists()


def test_an_environment_that_scores_its_own_episodes_is_refused() -> None:
    values = {
        "model": {"name": "cogumi:small-base"},
        "data": {},
        "cogumi": {"method": "gspo", "environment": "calculator"},
    }
    run, nothing = load_config(values, cogumi__compare_with="base"), cast(Any, None)  # refused before they are read
    with pytest.raises(UsageError, match=r"cogumi\.compare_with: cogumi\.environment: it scores its own episodes"):
        comparison.refuse_incomparable(run, nothing, nothing, nothing)


def test_a_comparison_that_fails_is_a_failed_check_and_one_that_is_killed_is_made_when_the_run_is_repeated(
    chat: dict[str, Any],
) -> None:
    def fail(error: BaseException) -> Callable[..., Any]:
        def complete(*_: Any) -> Any:
            raise error

        return complete

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(comparison, "complete", fail(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            cogumi.train(chat)
    run_dir = Path(chat["cogumi"]["run_dir"])
    assert not (run_dir / "verdict.json").exists()
    steps = [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl") if "loss" in row]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(comparison, "complete", fail(torch.OutOfMemoryError("no memory")))
        failed = cogumi.train(chat)
    assert failed.merged is not None
    check = check_of(run_dir)
    assert (check["passed"], check["figure"]) == (False, "it raised OutOfMemoryError: no memory")
    assert json.loads((run_dir / "status.json").read_text())["state"] == "finished, checks failed"
    shutil.copytree(run_dir, kept := run_dir.with_name("kept"))
    # Killed there: what a run leaves that was ended in its comparison.
    (kept / "verdict.json").unlink()
    write_json(kept / "status.json", read_json(kept / "status.json") | {"state": "interrupted"})
    chat["cogumi"] |= {"run_dir": str(kept), "gate": "not_worse"}
    result = cogumi.train(chat)
    assert result.passed, str(result.verdict)
    assert [row["step"] for row in read_jsonl(kept / "metrics.jsonl") if "loss" in row] == steps


def test_beside_a_gpu_a_run_may_load_its_own_result_(
    finished_chat: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = Path(shutil.copytree(finished_chat.home, tmp_path / "run"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    status = {**read_json(run_dir / "status.json"), "state": "running", **this_process()}
    write_json(run_dir / "status.json", status)
    assert read_setup(run_dir).columns[-1] == "merged"  # tests/test_chat.py has what another process is told


@pytest.mark.sweep  # tests/test_smoke.py has the same order, by exact answers
def test_base_sft_and_gspo_are_told_in_this_order(tmp_path: Path) -> None:
    """The held-out likelihood before and after SFT, then the held-out reward before and after GSPO."""
    options = {"cogumi__compare_with": "base", "cogumi__gate": "better", "train__seed": 3, "cogumi__samples_every": 0}
    sft = cogumi.train("smoke/chat-sft", cogumi__run_dir=tmp_path / "sft", **options)
    gspo = cogumi.train("smoke/chat-gspo", model__name=str(sft.merged), cogumi__run_dir=tmp_path / "gspo", **options)
    for result, score in ((sft, "log_likelihood"), (gspo, "rewards")):
        check = check_of(result.run_dir)
        assert check["passed"], check
        assert check["figure"].startswith(score)


def test_the_margin_of_pairs_is_what_trl_measures(finished_dpo: FinishedRun, command_line: CommandLine) -> None:
    """TRL's rewards/margins is beta times the margin less that of the reference, which is the base."""
    home = finished_dpo.home
    status, output, beside = command_line("compare", "base", home, "--json")
    assert status == 0, beside
    report = json.loads(output)
    assert list(report["means"])[:2] == ["preference_margin", "log_likelihood"]
    (pair,) = [pair for pair in report["pairs"] if pair["score"] == "preference_margin"]
    margins = [
        row["eval_rewards/margins"] for row in read_jsonl(home / "metrics.jsonl") if "eval_rewards/margins" in row
    ]
    assert 0.1 * pair["mean"] == pytest.approx(margins[-1], rel=0.02)
    assert margins[-1] > 0


PARTS = {"merged": "model__name", "adapter": "model__adapter", "checkpoints/adapters/step-2": "model__adapter",
         "checkpoints/checkpoint-2": "model__adapter"}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_the_next_stage_asks_for_the_checks_of_the_run_it_starts_from(
    part: str, finished_sft: FinishedRun, tmp_path: Path, golden: Golden
) -> None:
    """A merge that failed is of no concern to the next stage of the adapter."""
    before = Path(shutil.copytree(finished_sft.home, tmp_path / "before"))
    if not (before / part).exists():
        shutil.copytree(before / "adapter", before / part)
    values = yaml.safe_load((finished_sft.home / "config.yaml").read_text()) | {"lora": {}}
    overrides = {PARTS[part]: str(before / part), "cogumi__run_dir": str(tmp_path / "run")}
    check_settings(load_config(values, **overrides))
    verdict = read_json(before / "verdict.json")
    for name, refused in (("merge", part == "merged"), ("trained tokens", True)):
        failed = {"name": name, "figure": "a figure", "passed": False}
        write_json(before / "verdict.json", verdict | {"checks": [*verdict["checks"], failed]})
        if refused:
            with golden.raises("stage", message=f"failed checks: {name}", key=PARTS[part].replace("__", ".")):
                check_settings(load_config(values, **overrides))
        else:
            check_settings(load_config(values, **overrides))
    check_settings(load_config(values, **overrides, cogumi__from_failed=True))


def test_a_run_without_a_verdict_is_started_from_with_a_warning(
    chat: dict[str, Any], finished_chat: FinishedRun, tmp_path: Path
) -> None:
    before = Path(shutil.copytree(finished_chat.home, tmp_path / "before"))
    (before / "verdict.json").unlink()
    chat["cogumi"] |= {"compare_with": None, "gate": None}
    result = cogumi.train(chat, model__adapter=str(before / "adapter"), train__max_steps=1)
    (line,) = [line for line in (result.run_dir / "run.log").read_text().splitlines() if "no verdict" in line]
    assert "WARNING" in line
    assert str(before) in line


def test_gspo_says_whether_held_out_prompts_are_answered_better(
    finished_gspo: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out_reward, "PAID_SHARE", 2.0)
    values = yaml.safe_load((finished_gspo.home / "config.yaml").read_text())
    values["data"]["eval_rows"] = 60
    values["cogumi"] |= {"run_dir": str(tmp_path / "run"), "merge": False}
    run_dir = cogumi.train(values).run_dir
    (check,) = [check for check in read_json(run_dir / "verdict.json")["checks"] if check["name"] == "held-out reward"]
    models = {"base": "base", "run": str(run_dir)}
    compared = comparison.compare_models(models, load_config(run_dir / "config.yaml"), 200, ["rewards"])
    assert read_json(run_dir / "decisions.json")["held_out_reward"]["before"] == compared.scores["rewards"]["base"]
    before, after = (compared.mean("rewards", name) for name in models)
    assert check["figure"].startswith(f"{before:.4g} before, {after:.4g} after, ")


@pytest.mark.parametrize(("change", "mark"), [(0.5, "pass"), (-0.5, "FAIL"), (0.0, "warn")])
def test_a_held_out_reward_that_fell_fails(
    change: float, mark: str, finished_gspo: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [0.1 * (row % 5) for row in range(40)]
    write_json(tmp_path / "decisions.json", {"held_out_reward": {"before": [*before, "nan"]}})
    after = [reward + change * (row % 3) for row, reward in enumerate(before)]
    monkeypatch.setattr(held_out_reward, "score_prompts", lambda *_: [*after, 1.0])
    run = load_config(finished_gspo.home / "config.yaml", cogumi__run_dir=tmp_path)
    (check,) = held_out_reward.check_after(run, None, None, cast(Any, None))
    assert str(check).startswith(mark)
    assert "greedy answers to 40 prompts" in check.figure
    write_json(
        tmp_path / "decisions.json", read_json(tmp_path / "decisions.json") | {"data": {"changed_since_start": True}}
    )
    assert held_out_reward.check_after(run, None, None, cast(Any, None)) == []  # other prompts


def test_completions_of_rows_without_columns_are_scored() -> None:
    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    run = load_config("smoke/chat-gspo")
    assert comparison.score_written(run, ([length], [0.5]), ["ab", "c"], ["p", "q"], {}) == [1.0, 0.5]


def test_a_run_of_few_completions_or_with_another_comparison_scores_no_prompts(finished_gspo: FinishedRun) -> None:
    run = load_config(finished_gspo.home / "config.yaml")
    dataset = SimpleNamespace(dataset=range(100))
    args = SimpleNamespace(per_device_train_batch_size=64, gradient_accumulation_steps=1, max_steps=20)
    trainer = SimpleNamespace(args=args, accelerator=SimpleNamespace(num_processes=1))
    examples = cast(Any, SimpleNamespace(held_out=dataset))
    assert held_out_reward.count_prompts(run, trainer, examples) == 64
    other = load_config(finished_gspo.home / "config.yaml", cogumi__compare_with="base")
    assert held_out_reward.count_prompts(other, trainer, examples) == 0
    args.max_steps = 9  # 28 prompts
    assert held_out_reward.count_prompts(run, trainer, examples) == 0
