"""GSPO as TRL executes it, against closed forms in float64 (Zheng et al. 2025, arXiv:2507.18071, equations 5 to 7).

The trainer is a real GRPOTrainer built by cogumi; only the model's log-probabilities are replaced, by a float64 leaf, so
that the loss under test is the one that trains.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from gspo_batches import batch, grpo_trainer, loss_of

import cogumi
from cogumi.config.binding import losses_in_source
from cogumi.config.schema import RunConfig, load_config
from cogumi.core.errors import UsageError
from cogumi.methods import gspo
from cogumi.patches import gspo_loss
from cogumi.rl import PRESETS
from cogumi.rl.loss_check import WITH_FORMULA

LOW, HIGH = 3e-4, 4e-4


@pytest.fixture(scope="module")
def trainer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("gspo")
    trainer = grpo_trainer(tiny_model, directory, ["x"] * 8, loss_type="gspo", per_device_train_batch_size=4)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    cogumi.patch()


def grpo_config(**values: Any) -> Any:
    return trl.GRPOConfig(output_dir="unused", bf16=False, report_to="none", **values)


def closed_form(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss -(1/B) sum min(R A, clip(R) A) and its gradient -(1/B) A R / N on tokens of rows that are not clipped."""
    count = mask.sum(-1).clamp(min=1)
    ratio = torch.exp(((new - old) * mask).sum(-1) / count).detach()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
    live = torch.where(advantages > 0, ratio <= 1 + HIGH, ratio >= 1 - LOW)
    row = -advantages * ratio / count * live / len(new)
    # TRL's grpo loss weighs a row by the share of it that is not masked out, so an empty row counts as zero.
    nonempty = mask.sum(-1) > 0
    return -(objective * nonempty).sum() / len(new), row[:, None] * mask


def test_loss_and_gradient_equal_the_closed_form(trainer: Any) -> None:  # reference 1
    new, old, mask = batch([7, 3, 5, 1, 6, 2], [0.0, 2e-4, -2e-4, 1e-3, -1e-3, 3e-4])
    advantages = torch.tensor([1.0, -0.5, 0.7, 1.3, -1.1, 0.2], dtype=torch.float64)
    value = loss_of(trainer, new, old, mask, advantages=advantages)
    value.backward()
    expected, gradient = closed_form(new, old, advantages, mask)
    torch.testing.assert_close(value, expected, atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(new.grad, gradient, atol=1e-14, rtol=1e-12)


def test_on_policy_the_gradient_is_reinforce_over_the_length(trainer: Any) -> None:  # reference 4
    new, _, mask = batch([4, 2, 6], [0.0, 0.0, 0.0])
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    loss_of(trainer, new, new.detach(), mask, advantages=advantages).backward()
    reinforce = -(advantages[:, None] * mask) / len(new)
    torch.testing.assert_close(new.grad, reinforce / mask.sum(-1, keepdim=True), atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "moves"),
    [
        (+5e-4, +1.0, False),  # above the clip, rewarded: no further
        (+5e-4, -1.0, True),  # above the clip, punished: comes back
        (-5e-4, +1.0, True),
        (-5e-4, -1.0, False),
        (+3.9e-4, +1.0, True),  # just inside either bound; they are not symmetric
        (+4.1e-4, +1.0, False),
        (-2.9e-4, -1.0, True),
        (-3.1e-4, -1.0, False),
    ],
)  # fmt: skip
def test_the_four_quadrants_of_the_clip(
    trainer: Any, log_ratio: float, advantage: float, moves: bool
) -> None:  # reference 5
    new, old, mask = batch([3], [log_ratio])
    loss_of(trainer, new, old, mask, advantages=torch.tensor([advantage], dtype=torch.float64)).backward()
    assert bool((new.grad[mask > 0] != 0).all()) is moves
    assert bool((new.grad == 0).all()) is not moves


def test_length_one_an_empty_row_and_nothing_at_all(trainer: Any) -> None:  # reference 6
    new, old, mask = batch([1, 0, 3], [1e-4, 0.5, 0.0])
    advantages = torch.tensor([1.0, 9.0, -1.0], dtype=torch.float64)
    value = loss_of(trainer, new, old, mask, advantages=advantages)
    value.backward()
    expected, gradient = closed_form(new, old, advantages, mask)
    torch.testing.assert_close(value, expected, atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(new.grad, gradient, atol=1e-14, rtol=1e-12)

    new, old, mask = batch([0, 0], [0.1, 0.2])
    value = loss_of(trainer, new, old, mask, advantages=torch.tensor([1.0, -1.0], dtype=torch.float64))
    value.backward()
    assert value.item() == 0
    assert (new.grad == 0).all()


def test_gspo_is_spelled_out_before_trl_sees_it() -> None:
    config = grpo_config(loss_type="gspo")
    assert (config.loss_type, config.importance_sampling_level) == ("grpo", "sequence")
    assert (config.beta, config.epsilon, config.epsilon_high) == (0.0, 3e-4, 4e-4)
    assert grpo_config(loss_type="dapo").epsilon == 0.2


def test_what_the_user_sets_wins_and_a_contradiction_is_refused() -> None:
    said = gspo_loss.gspo_arguments({"loss_type": "gspo", "beta": 0.1, "epsilon": 1e-3})
    assert (said["beta"], said["epsilon"], said["epsilon_high"]) == (0.1, 1e-3, 1e-3)
    assert gspo_loss.gspo_arguments({"loss_type": "gspo", "epsilon_high": 1e-3})["epsilon"] == 3e-4
    assert gspo_loss.gspo_arguments({"loss_type": "dapo"}) == {"loss_type": "dapo"}
    with pytest.raises(UsageError, match="contradicts loss_type='gspo'"):
        gspo_loss.gspo_arguments({"loss_type": "gspo", "importance_sampling_level": "token"})


def test_trls_own_parser_gets_gspo_too() -> None:
    """It passes every default explicitly, a token-level ratio and epsilon 0.2 among them."""
    words = ["--output_dir", "unused", "--loss_type", "gspo", "--bf16", "False"]
    (config,) = trl.TrlParser(trl.GRPOConfig).parse_args_and_config(words)
    assert (config.importance_sampling_level, config.epsilon, config.epsilon_high) == ("sequence", 3e-4, 4e-4)


def test_the_name_survives_repr_save_and_load(tmp_path: Path) -> None:  # reference 20
    config = grpo_config(loss_type="gspo")
    assert "loss_type='gspo'" in repr(config)
    assert "loss_type=gspo," in str(config)
    assert config.to_dict()["loss_type"] == json.loads(config.to_json_string())["loss_type"] == "gspo"
    assert config.loss_type == "grpo"  # showing it did not change it

    torch.save(config, tmp_path / "training_args.bin")  # as transformers' Trainer saves it
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert gspo_loss.loss_name(loaded) == "gspo"
    assert repr(loaded) == repr(config)
    saved = json.loads(config.to_json_string())
    del saved["generation_batch_size"], saved["hub_token"]  # TRL refuses its own config for having both; a placeholder
    again = trl.GRPOConfig(**saved)
    assert repr(again) == repr(config)
    assert "loss_type='dapo'" in repr(grpo_config())


@pytest.mark.parametrize("name", ["gspo", "gspo-length"])
def test_what_decides_the_update_is_passed_explicitly(name: str) -> None:
    """unsloth's generated config takes a KL term, learning rate 5e-5, 8-bit AdamW and no vLLM correction as defaults."""
    said = gspo_loss.gspo_arguments({"loss_type": name})
    assert (said["beta"], said["learning_rate"], said["optim"]) == (0.0, 1e-6, "adamw_torch_fused")
    assert said["vllm_importance_sampling_correction"] is True
    assert {"epsilon", "epsilon_high", "importance_sampling_level", "steps_per_generation", "seed"} <= said.keys()
    ours = gspo_loss.gspo_arguments({"loss_type": name, "learning_rate": 1e-4, "gradient_accumulation_steps": 3})
    assert (ours["learning_rate"], ours["steps_per_generation"]) == (1e-4, 3)


def test_none_stays_a_value_where_it_is_one() -> None:
    open_values = {"max_grad_norm": None, "vllm_importance_sampling_clip_max": None, "epsilon_high": None}
    config = grpo_config(loss_type="gspo", **open_values)
    assert config.max_grad_norm is None
    assert config.vllm_importance_sampling_clip_max is None
    assert config.epsilon_high == 4e-4  # as in TRL, None is "not given" here


def test_every_preset_is_a_valid_config() -> None:
    for name, each in PRESETS.items():
        config = grpo_config(**each)
        assert config.loss_type == each["loss_type"], name


@pytest.mark.parametrize("name", ["bnpo", "sapo", "vespo"])
def test_a_loss_of_trls_own_has_trls_own_settings(name: str) -> None:
    said = gspo.arguments(config_with(name))
    own = grpo_config(loss_type=name)
    assert {key: said[key] for key in PRESETS["grpo"]} == {key: getattr(own, key) for key in PRESETS["grpo"]}


def config_with(loss_type: str) -> RunConfig:
    sections = {"model": {"name": "x"}, "data": {"source": "x"}, "train": {"loss_type": loss_type}}
    return load_config(sections | {"cogumi": {"method": "gspo", "rewards": ["parses"]}})


def test_every_loss_that_trl_lists_has_a_formula() -> None:
    """Fails when TRL has a new loss: until it has a formula, loss.json says that it is not proven."""
    assert set(losses_in_source()) == set(WITH_FORMULA)


@pytest.mark.parametrize("use", [config_with, lambda name: gspo_loss.gspo_arguments({"loss_type": name})])
def test_a_removed_name_is_refused_with_what_to_write(use: Callable[[str], Any]) -> None:
    with pytest.raises(UsageError, match=r"loss_type.*'gspo-token'.*write gspo, which is the same where advantages"):
        use("gspo-token")


def test_a_subclass_of_the_config_understands_the_name() -> None:
    """A dataclass subclass has an `__init__` of its own that calls no other."""

    @dataclasses.dataclass
    class Mine(trl.GRPOConfig):
        extra: int = 0

    mine = Mine(output_dir="unused", loss_type="gspo", bf16=False, report_to="none", extra=3, epsilon_high=1e-3)
    assert (mine.loss_type, mine.importance_sampling_level, mine.epsilon) == ("grpo", "sequence", 3e-4)
    assert (mine.epsilon_high, mine.extra, gspo_loss.loss_name(mine)) == (1e-3, 3, "gspo")


def test_a_name_that_was_changed_since_is_not_shown() -> None:
    config = grpo_config(loss_type="gspo")
    config.importance_sampling_level = "token"
    assert gspo_loss.loss_name(config) == config.to_dict()["loss_type"] == "grpo"


@pytest.mark.parametrize("name", ["gspo", "GSPO"])
def test_a_name_set_too_late_is_refused_before_anything_is_loaded(name: str, make_trainer: Callable[..., Any]) -> None:
    class Late(trl.GRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["args"].loss_type = name
            super().__init__(*args, **kwargs)

    with pytest.raises(UsageError, match=f"loss_type is '{name}', set after the config was built"):
        make_trainer("dapo", cls=Late)


def test_the_patch_can_be_repeated_and_undone() -> None:
    gspo_loss.undo()
    names = ("__init__", "to_dict", "__repr__", "__str__")
    upstream = [getattr(trl.GRPOConfig, name) for name in names] + [trl.GRPOTrainer.__init__]
    inherited = [name in vars(trl.GRPOConfig) for name in names]
    try:
        for _ in range(2):
            assert not gspo_loss.status().applied
            gspo_loss.apply()
            assert gspo_loss.apply().applied
            assert "written for trl 1.15" in gspo_loss.status().reason
            assert grpo_config(loss_type="gspo").loss_type == "grpo"
            gspo_loss.undo()
            assert [getattr(trl.GRPOConfig, name) for name in names] + [trl.GRPOTrainer.__init__] == upstream
            assert [name in vars(trl.GRPOConfig) for name in names] == inherited
    finally:
        gspo_loss.apply()


def test_trl_still_needs_the_patch(trainer: Any) -> None:
    """Fails when TRL learns the name itself: then the patch should go."""
    assert '"gspo"' not in inspect.getsource(trl.GRPOTrainer._compute_loss)
