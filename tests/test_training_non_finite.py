"""Runs with a NaN put in at one step: they end with a verdict, and the last finite checkpoint is the one to resume from."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

import cogumi
from cogumi.checkpoints.callbacks import FiniteGuard
from cogumi.checkpoints.verify import last_good_checkpoint
from cogumi.core.run_directory import read_json
from cogumi.stack.ranks import Ranks
from cogumi.training import run as training

BROKEN_STEP = 4  # the second of a rollout
WORDS = {
    "gradient": "the gradient norm",
    "output": "the loss and the gradient norm",
    "weight": "the loss and the gradient norm",
}


class Poison(TrainerCallback):
    """Put NaN into one gradient, one module's output, or one weight, at one step of a real training."""

    def __init__(self, trainer: Any, place: str) -> None:
        self.place, self.handle = place, None
        self.module = next(module for name, module in trainer.model.named_modules() if name.endswith("norm"))
        self.weight = next(weight for weight in trainer.model.parameters() if weight.requires_grad)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 != BROKEN_STEP:
            return
        if self.place == "weight":
            self.weight.data[0] = math.nan
        elif self.place == "gradient":
            self.handle = self.weight.register_hook(lambda gradient: gradient * math.nan)
        else:
            self.handle = self.module.register_forward_hook(
                lambda module, inputs, output: output * math.nan if torch.is_grad_enabled() else output
            )

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.handle is not None:
            self.handle.remove()


@pytest.fixture
def config(sft: dict[str, Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(method: str, **train: Any) -> dict[str, Any]:
        sft["cogumi"] |= {"method": method, "compile": "off", "preflight": "off"}
        sft["train"] |= {"max_steps": 7, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3, **train}
        if method == "dpo":
            pairs = [{"prompt": f"def f{n}(x):", "chosen": f" return x + {n}", "rejected": " pass"} for n in range(24)]
            source = tmp_path / "pairs.jsonl"
            source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
            sft["data"] = {"source": str(source), "format": "preference"}
        elif method == "gspo":
            sft["train"] |= {"num_generations": 4, "steps_per_generation": 2, "max_completion_length": 8}
            sft["cogumi"]["rewards"] = ["edit_similarity", "parses"]
        return sft

    return make


def variants() -> list[Any]:
    crossed = list(itertools.product(("sft", "dpo", "gspo"), ("gradient", "output", "weight")))
    # Each method and place with each `on_red` once; every step is logged, so that a flag is red before the end.
    cases = [(*case, ("warn", "pause", "stop")[(n + n // 3) % 3], 1) for n, case in enumerate(crossed)]
    slow = pytest.mark.slow("two runs each; the first tier has one for each place, with each method")
    fast = [("sft", "gradient", "pause", 10), cases[4], cases[8]]
    return [*fast, *(pytest.param(*case, marks=slow) for case in cases if case not in fast)]


@pytest.mark.parametrize(("method", "place", "on_red", "logging_steps"), variants())
def test_a_run_that_is_not_finite_ends_and_resumes_from_its_last_finite_checkpoint(
    method: str, place: str, on_red: str, logging_steps: int, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, fit = config(method, logging_steps=logging_steps), training.fit

    def poisoned(run: Any, trainer: Any, *others: Any) -> Any:
        trainer.add_callback(Poison(trainer, place))
        return fit(run, trainer, *others)

    with monkeypatch.context() as patched:
        patched.setattr(training, "fit", poisoned)
        result = cogumi.train(asked, cogumi__on_red=on_red)
    home = result.run_dir
    status, verdict = read_json(home / "status.json"), read_json(home / "verdict.json")
    assert status["state"] == "stopped by non-finite numbers"
    assert (
        f"not finite since step {BROKEN_STEP}: {WORDS[place]}; the last finite checkpoint is checkpoint-3"
        in status["reason"]
    )
    assert not verdict["passed"]
    assert "loss and gradient norm" in {check["name"] for check in verdict["checks"] if not check["passed"]}
    assert [flag["name"] for flag in verdict["flags"] if flag["level"] == "red"] == ["finite numbers"]
    assert result.adapter is result.merged is None
    assert not (home / "adapter").exists()
    assert max(row["step"] for row in result.metrics) < BROKEN_STEP + 3
    good = last_good_checkpoint(home / "checkpoints")
    assert good is not None
    assert good.name == "checkpoint-3"
    for path in (home / "checkpoints").glob("checkpoint-*/adapter_model.safetensors"):
        assert all(weight.isfinite().all() for weight in load_file(path).values())
    resumed = cogumi.train(asked)
    assert read_json(home / "status.json")["state"].startswith("finished")
    assert f"resuming from {good}" in (home / "run.log").read_text()
    assert (home / "checkpoints" / "checkpoint-7").is_dir()
    assert all(math.isfinite(row["grad_norm"]) for row in resumed.metrics if "grad_norm" in row)


@pytest.mark.parametrize(
    ("fp16", "steps", "ends"), [(False, 2, False), (False, 3, True), (True, 19, False), (True, 20, True)]
)
def test_a_streak_ends_a_training_and_a_skipped_step_does_not(
    fp16: bool, steps: int, ends: bool, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    guard, args, control, state = FiniteGuard(trainer, Ranks()), trainer.args, trainer.control, trainer.state
    monkeypatch.setattr(args, "fp16", fp16)
    for step, loss in enumerate([1.0, math.nan, 1.0, *[math.nan] * steps]):  # one that is not finite alone ends nothing
        guard.values, state.global_step = [torch.tensor(1.0), torch.tensor(loss), 1.0], step + 1
        guard.on_step_end(args, state, control)
    assert control.should_training_stop is ends
    assert not guard.find_fault()  # each weight is finite
    assert guard.ended == ("not finite since step 4: the loss" if ends else "")
    guard.values = [torch.tensor(1.0), 1.0]
    guard.on_step_end(args, state, control)
    assert not guard.find_fault()
    next(weight for weight in trainer.model.parameters() if weight.requires_grad).data[0] = math.inf
    assert guard.find_fault().startswith("not finite: trained ")
