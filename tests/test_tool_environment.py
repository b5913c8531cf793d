"""The tool environment of notebook 09: tools are called, rewards paid, and what a tool says is outside of the loss.

The notebook's own cells write the environment, teach the call, and write the config of the run.
"""

import io
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jupytext
import pytest
from filelock import FileLock
from finished_runs import shared_by_workers
from gspo_batches import gradient_of_logps

import cogumi
from cogumi.core.run_directory import read_jsonl
from cogumi.environments.episodes import Episodes
from cogumi.environments.loading import Task
from cogumi.health.rules import BUDGETS
from cogumi.rl.loss_check import TOLERANCE
from cogumi.rl.sampling import use_rollout_logps

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "09_reward_and_tools.py"
SHORT = {"CALL_STEPS": 120, "TOOL_STEPS": 4}


def cells() -> list[str]:
    return [cell.source for cell in jupytext.read(NOTEBOOK).cells if cell.cell_type == "code"]


def run_cell(source: str) -> tuple[dict[str, Any], str]:
    """The names a cell leaves, and what it prints."""
    names: dict[str, Any] = {}
    exec(cells()[0], names)
    names |= SHORT
    with redirect_stdout(io.StringIO()) as said:
        exec(source, names)
    return names, said.getvalue()


def cell_with(mark: str) -> str:
    return next(source for source in cells() if mark in source)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the environment's module and the model that was taught the call, once for all workers."""
    place = shared_by_workers(tmp_path_factory) / "tool-environment"
    with FileLock(f"{place}.lock"), pytest.MonkeyPatch.context() as patch:
        if not place.exists():
            place.mkdir()
            patch.chdir(place)
            patch.syspath_prepend(str(place))
            run_cell(cell_with('Path("boxes.py")'))
            run_cell(cell_with("calls.jsonl"))
            sys.modules.pop("boxes", None)
    return place


@pytest.fixture(scope="module")
def played(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """TRL's own trainer after its training, and the directory."""
    place = tmp_path_factory.mktemp("notebook")
    shutil.copy(taught / "boxes.py", place)
    shutil.copytree(taught / "runs/own/calls/merged", place / "runs/own/calls/merged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(str(place))
        cogumi.patch()
        trainer = trainer_in(place / "tools", place, steps=4, learning_rate=3e-4, logging_steps=1)
        trainer.train()
        yield trainer, place
    sys.modules.pop("boxes", None)


def test_tools_are_called_and_the_environment_pays(played: tuple[Any, Path]) -> None:
    trainer, _ = played
    rollouts = [row for row in trainer.state.log_history if "reward" in row]
    assert len(rollouts) == 2
    assert all(row["tools/call_frequency"] > 0.3 for row in rollouts)  # 1.5 when it was written
    assert max(row["reward"] for row in rollouts) > 0
    # What TRL was paid is what each environment says of its own rollout.
    assert list(trainer._logs["rewards"]["Boxes"])[-16:] == [
        environment.get_reward() for environment in trainer.environments
    ]
    assert {environment.prize for environment in trainer.environments} == {4}


def test_what_a_tool_says_is_outside_of_the_loss(played: tuple[Any, Path]) -> None:
    trainer, _ = played
    last = trainer._buffered_inputs[-1]
    tool = last["tool_mask"] == 0
    heard = [trainer.processing_class.decode(ids[row]) for ids, row in zip(last["completion_ids"], tool, strict=True)]
    answered = [text for text in heard if text]
    assert answered
    for text in answered:
        assert "tool_response_start" in text
        assert "open(box" not in text  # the call is the model's own and is learned
    # cogumi's metric, TRL's mask and the loss count the same tokens; the metric is what was handed to the proof.
    counted = int((last["completion_mask"] * last["tool_mask"]).sum())
    assert counted < int(last["completion_mask"].sum())
    assert [row["policy/num_tokens"] for row in trainer.state.log_history if "policy/num_tokens" in row][-1] == counted


def test_no_gradient_reaches_what_a_tool_says(played: tuple[Any, Path]) -> None:
    trainer, _ = played
    gradient, learned = gradient_of_logps(trainer, trainer._buffered_inputs[-1])
    assert not gradient[~learned].any()
    assert gradient[learned].all()


def test_the_loss_was_proven_with_the_mask_of_several_turns(played: tuple[Any, Path]) -> None:
    _, place = played
    record = json.loads((place / "tools/loss.json").read_text())
    assert record["loss"] == "gspo"
    assert record["asserted"]
    assert record["unproven"] == []
    assert record["clip_seen_at_step"] == 2
    assert max(record["relative_difference"][name] for name in ("loss", "gradient")) < TOLERANCE


def test_a_run_from_yaml_is_what_trls_own_trainer_makes(
    played: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notebook's config against TRL's GRPOTrainer with the same environment: the same episodes and the same rewards."""
    trainer, _ = played
    source = cell_with('Path("boxes.yaml")').replace("print(cogumi.start", "#")
    run_cell(source)
    more = {"per_device_train_batch_size": 8, "max_completion_length": 176}
    run = cogumi.train("boxes.yaml", **{f"train__{key}": value for key, value in more.items()})
    assert run.verdict.passed, str(run.verdict)
    names = ("reward", "tools/call_frequency", "loss", "completions/mean_length")
    ours, theirs = (
        [[row[name] for name in names] for row in rows if "reward" in row]
        for rows in (run.metrics, trainer.state.log_history)
    )
    assert len(ours) == 2
    assert ours == theirs
    first = next(row for row in run.metrics if "reward" in row)
    batch = trainer._buffered_inputs
    masked = sum(int(((part["tool_mask"] == 0) & (part["completion_mask"] == 1)).sum()) for part in batch)
    last = [row for row in run.metrics if "reward" in row][-1]
    tokens = sum(int(part["completion_mask"].sum()) for part in batch)
    assert last["episodes/masked_share"] == pytest.approx(masked / tokens)
    assert 0 < first["episodes/environment_share"] < 0.05
    shown = read_jsonl(Path(run.run_dir) / "rollouts.jsonl")[-1]["shown"]
    assert any("tool: " in each["completion"] for each in shown)


@pytest.mark.slow("a training of each; budgets of turns are in the first tier")
@pytest.mark.parametrize("budget", ["turns", "tokens", "seconds"])
def test_what_a_budget_cuts_is_counted(played: tuple[Any, Path], tmp_path: Path, budget: str) -> None:
    from boxes import Boxes  # type: ignore[import-not-found]

    given: dict[str, Any] = {
        "turns": {"max_tool_calling_iterations": 1},
        "tokens": {"max_completion_length": 40, "max_tool_calling_iterations": None},
        "seconds": {},
    }[budget]
    episodes = Episodes(Task("Boxes", Boxes), 1e-9 if budget == "seconds" else None, dict)
    trainer = trainer_in(tmp_path, played[1], steps=1, logging_steps=1, episodes=episodes, **given)
    episodes.attach(trainer)
    trainer.train()
    row = next(row for row in trainer.state.log_history if "episodes/without_end" in row)
    assert row[f"episodes/cut_by_{budget}"] > 0
    assert row["episodes/without_end"] == pytest.approx(sum(row[f"episodes/cut_by_{budget}"] for budget in BUDGETS))
    if budget == "seconds":  # every call is refused, which the model reads
        assert row["tools/failure_frequency"] == 1
        assert row["reward"] == 0
        assert any("the seconds of this episode are over (1e-09)" in str(each) for each in trainer._logs["completion"])


def opened(box: int) -> str:
    """Open a box.

    Args:
        box: from 1 to 5
    """
    return "prize" if box == 4 else "empty"


def found(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    return [float(any(message.get("content") == "prize" for message in messages)) for messages in completions]


def trainer_in(
    out: Path, place: Path, steps: int = 2, tools: bool = False, episodes: Episodes | None = None, **values: Any
) -> Any:
    """Another trainer of the model that was taught the call; with `tools`, of a function without an environment."""
    import trl
    from boxes import Boxes  # type: ignore[import-not-found]
    from datasets import Dataset

    common = {
        "loss_type": "gspo", "num_generations": 8, "per_device_train_batch_size": 8, "steps_per_generation": 2,
        "max_completion_length": 176, "max_tool_calling_iterations": 2, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "gradient_checkpointing": False, "bf16": False, "save_strategy": "no",
        "report_to": "none",
    }  # fmt: skip
    opened.__name__ = "open"
    uses = {"tools": [opened], "reward_funcs": found} if tools else {"environment_factory": Boxes}
    uses = episodes.trainer_arguments() if episodes is not None else uses
    args = trl.GRPOConfig(str(out), max_steps=steps, **common | values)
    model = str(place / "runs/own/calls/merged")
    return trl.GRPOTrainer(model, args=args, train_dataset=Dataset.from_list(Boxes.rows), **uses)


@pytest.mark.slow("a training of each; the proof of a loss with a mask is in the first tier, too")
@pytest.mark.parametrize("name", ["sampler's own log-probabilities", "accumulated", "plain tools"])
def test_other_trainers_with_tools_are_proven_too(played: tuple[Any, Path], tmp_path: Path, name: str) -> None:
    values: dict[str, Any] = {
        "accumulated": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
        "plain tools": {"tools": True},
    }.get(name, {})
    trainer = trainer_in(tmp_path, played[1], logging_steps=1, **values)
    if name.startswith("sampler"):
        use_rollout_logps(trainer)
    trainer.train()
    record = json.loads((tmp_path / "loss.json").read_text())
    assert (trainer._buffered_inputs[-1]["tool_mask"] == 0).any()
    assert record["asserted"]
    first = next(row for row in trainer.state.log_history if "policy/max_ratio" in row)
    # A tool's token, which the sampler has no log-probability of, is in no ratio.
    assert max(first["policy/max_ratio"] - 1, 1 - first["policy/min_ratio"]) < 1e-5
    assert max(record["relative_difference"][key] for key in ("loss", "gradient")) < TOLERANCE
