"""The noise of GSPO's ratios is measured without a trace on the training, and settles the clip that a config leaves open."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from cogumi.config.schema import RunConfig, load_config
from cogumi.methods.auto_settings import (
    PADDING,
    ROUNDING,
    WIDTH,
    apply_choices,
    choose_clip,
    measure_log_ratios,
    settle_clip,
)
from cogumi.models.loading import read_base
from cogumi.patches.trl_internals import observe_rollouts

PAPER = {"epsilon": 3e-4, "epsilon_high": 4e-4}


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**train: Any) -> RunConfig:
        data = {"source": "cogumi:stdlib", "fim": {}}
        of_run = {"method": "gspo", "rewards": ["parses"], "run_dir": str(tmp_path / "run")}
        sections = {"model": {"name": str(tiny_model)}, "lora": {"r": 4}, "data": data, "cogumi": of_run}
        (tmp_path / "run").mkdir(exist_ok=True)
        return load_config(sections | {"train": {"max_steps": 4, **train}})

    return make


def in_bfloat16(trainer: Any) -> Any:
    trainer.model.to(torch.bfloat16)
    return trainer


def by_hand(model: Any, rollout: dict[str, Tensor], padding: int) -> Tensor:
    """(B, T) log-probabilities from the decoder's hidden states; logits have the model's dtype, as TRL's head makes them."""
    ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], 1)
    mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], 1)
    base = model.get_base_model()
    with torch.no_grad():
        hidden = base.model(input_ids=pad(ids, (padding, 0)), attention_mask=pad(mask, (padding, 0))).last_hidden_state
        logps = (hidden @ base.lm_head.weight.T).double().log_softmax(-1)[:, padding:-1]
    return logps.gather(-1, ids[:, 1:, None])[..., 0][:, -rollout["completion_ids"].size(1) :]


def test_the_noise_is_the_difference_of_two_forward_passes(make_trainer: Callable[..., Any]) -> None:
    trainer = in_bfloat16(make_trainer(max_steps=1, steps_per_generation=4))
    collected = []

    def measured(make: Any, inputs: Any) -> Any:
        rollout = make(inputs)
        difference = by_hand(trainer.model, rollout, PADDING) - by_hand(trainer.model, rollout, 0)
        mask = rollout["completion_mask"]
        collected.extend([(difference * mask).sum(1) / mask.sum(1), measure_log_ratios(trainer, rollout)])
        return rollout

    observe_rollouts(trainer, measured)
    trainer.train()
    expected, log_ratios = collected
    assert len(log_ratios) == 16
    assert expected.abs().max() > 1e-4  # rounding, far above what the head's float32 leaves
    torch.testing.assert_close(log_ratios, expected, rtol=0, atol=2e-6)


def trained(trainer: Any) -> tuple[dict[str, Tensor], list[dict[str, Any]], Tensor]:
    trainer.train()
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    timed = ("runtime", "time", "per_second", "flos")
    rows = [
        {key: row[key] for key in row if not any(word in key for word in timed)} for row in trainer.state.log_history
    ]
    return weights, rows, torch.get_rng_state()


def test_measuring_leaves_the_training_as_it_is(
    make_trainer: Callable[..., Any], config: Callable[..., RunConfig]
) -> None:
    """An explicit epsilon is kept, and the run with a measurement equals the one without to the bit."""
    run = config(**PAPER)
    weights, rows, state = trained(in_bfloat16(make_trainer(max_steps=3)))
    measured = in_bfloat16(make_trainer(max_steps=3))
    settle_clip(run, measured)
    again, logged, state_again = trained(measured)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert torch.equal(state, state_again)
    shares = {row.pop(ROUNDING) for row in logged if ROUNDING in row}  # at each rollout
    assert logged == rows
    noise = json.loads((run.run_dir / "decisions.json").read_text())["ratio_noise"]
    assert shares == {noise["outside"]}
    assert noise["epsilon"] == 3e-4
    assert noise["sd"] > 5e-5


def test_an_open_epsilon_follows_from_the_noise_and_stays_when_the_run_resumes(
    make_trainer: Callable[..., Any], config: Callable[..., RunConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="cogumi")
    run = config()
    trainer = in_bfloat16(make_trainer())
    settle_clip(run, trainer)
    trainer.train()
    decisions = json.loads((run.run_dir / "decisions.json").read_text())
    noise = decisions["ratio_noise"]
    assert noise["epsilon"] == pytest.approx(WIDTH * noise["sd"], rel=0.05)
    ran = json.loads((tmp_path / "trainer" / "loss.json").read_text())["arguments"]  # compared with the formula
    assert ran["epsilon_low"] == noise["epsilon"] == trainer.epsilon_low
    digit = 10.0 ** (math.floor(math.log10(noise["epsilon"])) - 1)  # the second, to which both are rounded
    assert ran["epsilon_high"] == pytest.approx(4 / 3 * noise["epsilon"], abs=(4 / 3 + 1) * digit / 2)
    assert "noise of the ratios: sd" in caplog.text
    assert "chosen: train.epsilon:" in caplog.text
    assert noise["outside"] == 0
    resumed = apply_choices(run, read_base(run.model.name))
    assert resumed.train["epsilon"] == noise["epsilon"]
    assert apply_choices(config(epsilon=1e-3), read_base(run.model.name)).train["epsilon"] == 1e-3
    later = make_trainer()  # in float32, whose noise would be another
    settle_clip(resumed, later)
    later.train()
    assert json.loads((run.run_dir / "decisions.json").read_text()) == decisions


@pytest.mark.parametrize("more", [{"steps_per_generation": 1}, {"loss_type": "dapo"}], ids=["one step", "token ratios"])
def test_ratios_that_rounding_cannot_clip_are_not_measured(
    make_trainer: Callable[..., Any], config: Callable[..., RunConfig], more: dict[str, Any]
) -> None:
    run, trainer = config(), in_bfloat16(make_trainer(max_steps=1, **more))
    settle_clip(run, trainer)
    trainer.train()
    assert not (run.run_dir / "decisions.json").exists()


@pytest.mark.parametrize(
    ("train", "noise", "epsilons"),
    [
        ({}, 6e-3, [0.024, 0.032]),
        ({}, 1e-6, None),  # float32: the paper's are wide enough
        ({}, math.nan, None),
        ({}, 1.0, [0.037, 0.05]),  # the widest that is taken for a sequence's
        ({"epsilon": 3e-4}, 6e-3, None),
        ({"epsilon_high": 4e-4}, 6e-3, None),
        ({"epsilon": None, "epsilon_high": None}, 6e-3, [0.024, 0.032]),
    ],
)
def test_the_clip_that_is_chosen(
    config: Callable[..., RunConfig], train: dict[str, Any], noise: float, epsilons: list[float] | None
) -> None:
    chosen = choose_clip(config(**train), noise, 3e-4, 4e-4)
    assert [choice.value for choice in chosen] == (epsilons or [])
