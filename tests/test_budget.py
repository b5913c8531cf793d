"""A run ends when its hours or its money are spent, with a checkpoint, and a larger budget goes on to the same weights."""

from pathlib import Path
from typing import Any

import pytest
from finished_runs import FinishedRun
from safetensors.torch import load_file

import cogumi
from cogumi.config.schema import CogumiSection
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json
from cogumi.telemetry.recorder import Telemetry
from cogumi.training.resume import budget_reached

Config = dict[str, Any]


@pytest.fixture
def sft(sft: Config) -> Config:
    sft["cogumi"] |= {"merge": True, "price_per_hour": 3600.0}
    return sft


@pytest.fixture
def late_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets an hour pass, as the run's meter has it, in the step of that number."""

    def late(step: int) -> None:
        on_step_end = Telemetry.on_step_end

        def passing(self: Telemetry, args: Any, state: Any, control: Any, **more: Any) -> None:
            on_step_end(self, args, state, control, **more)
            if state.global_step == step:
                self.meter.began -= 3600

        monkeypatch.setattr(Telemetry, "on_step_end", passing)

    return late


def test_a_spent_budget_ends_the_run_with_a_checkpoint_and_a_larger_one_goes_on(
    sft: Config, finished_sft: FinishedRun, late_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finished_sft.result  # its samples, checkpoints and held-out losses change nothing that is learned
    del sft["data"]["max_rows"]  # as it has them
    with monkeypatch.context():
        late_at(3)
        result = cogumi.train(sft, cogumi__max_hours=1.0)
    run_dir = result.run_dir
    status = read_json(run_dir / "status.json")
    assert status["state"] == "budget spent"
    assert "of cogumi.max_hours 1 after step 3 of 6" in status["reason"]
    assert not result.passed
    assert not (run_dir / "DONE").exists()
    assert not (run_dir / "merged").exists()
    assert (run_dir / "checkpoints" / "checkpoint-3").is_dir()
    assert (run_dir / "adapter").is_dir()
    spent = read_json(run_dir / "metrics.json")
    assert (spent["steps"], spent["max_steps"]) == (3, 6)
    assert 3600 < spent["elapsed_seconds"] < 3720
    assert spent["cost"] == pytest.approx(spent["elapsed_seconds"], rel=1e-3)  # a dollar a second

    with pytest.raises(UsageError, match=r"the budget of this run is spent \(1\.0\d h of cogumi.max_hours 1\)"):
        cogumi.train(sft, cogumi__max_hours=1.0)
    with pytest.raises(UsageError, match=r"cogumi.max_cost 3600\); raise it"):
        cogumi.train(sft, cogumi__max_cost=3600.0)

    monkeypatch.undo()
    result = cogumi.train(sft, cogumi__max_hours=1.5)
    assert result.passed, str(result.verdict)
    assert result.merged is not None
    done = read_json(run_dir / "metrics.json")
    assert done["steps"] == 6
    assert done["elapsed_seconds"] > spent["elapsed_seconds"]  # the first part's hour is counted on
    assert done["tokens"] > spent["tokens"] > 0
    ours, theirs = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (run_dir, whole.run_dir))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert result.series("loss") == whole.series("loss")


def test_a_budget_of_money_ends_a_run_too(sft: Config, late_at: Any) -> None:
    late_at(2)
    result = cogumi.train(sft, cogumi__max_cost=1800.0)
    assert "$3" in read_json(result.run_dir / "status.json")["reason"]
    assert "of cogumi.max_cost 1800 after step 2" in read_json(result.run_dir / "status.json")["reason"]


def test_a_budget_that_is_spent_in_the_last_step_ends_nothing(sft: Config, late_at: Any) -> None:
    late_at(2)
    assert cogumi.train(sft, train__max_steps=2, cogumi__max_hours=1.0).passed


def test_money_without_a_price_is_refused(sft: Config) -> None:
    del sft["cogumi"]["price_per_hour"]
    with pytest.raises(UsageError, match=r"cogumi.max_cost 5: no hourly price to count by; set cogumi.price_per_hour"):
        cogumi.train(sft, cogumi__max_cost=5.0)
    assert not Path(sft["cogumi"]["run_dir"]).exists()


def test_limits_are_reached_at_what_they_say() -> None:
    hours, money = (
        CogumiSection(method="sft", max_hours=1.0),
        CogumiSection(method="sft", max_cost=5.0, price_per_hour=3.6),
    )
    assert budget_reached(hours, 3599) is None
    assert budget_reached(hours, 3600) == "1.00 h of cogumi.max_hours 1"
    brief = CogumiSection(method="sft", max_hours=0.002)
    assert budget_reached(brief, 9) == "0.0025 h of cogumi.max_hours 0.002"
    assert budget_reached(money, 4990) is None
    assert budget_reached(money, 5000) == "$5.00 of cogumi.max_cost 5"
    a_dollar, half = (CogumiSection(method="sft", max_cost=cost, price_per_hour=1.0) for cost in (1.0, 0.5))
    assert budget_reached(a_dollar, 3600) == "$1.00 of cogumi.max_cost 1"
    assert budget_reached(half, 1800) == "$0.5000 of cogumi.max_cost 0.5"
