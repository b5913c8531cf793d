"""The loss that ran is held against the formula, and what a step did is logged, on real trainers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

import cogumi
from cogumi.core.errors import UsageError
from cogumi.patches.trl_internals import observe_rollouts
from cogumi.rl import PRESETS, loss_check, preset
from cogumi.rl.guards import accepted_by
from cogumi.rl.loss_check import LossInputs, WrongLossError, has_clipped_gradient
from cogumi.rl.watch import LossWatch, watch


def trained(trainer: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(loss.json, the logged steps) of a trainer that has trained."""
    watch(trainer)
    trainer.train()
    record = json.loads((Path(trainer.args.output_dir) / "loss.json").read_text())
    return record, [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("name", [*PRESETS, "bnpo", "sapo", "vespo"])
def test_the_first_loss_of_every_name_is_the_formulas(name: str, make_trainer: Callable[..., Any]) -> None:
    values = (preset(name) if name in PRESETS else {"loss_type": name}) | {"mask_truncated_completions": False}
    record, rows = trained(make_trainer(**values, gradient_accumulation_steps=2, steps_per_generation=4))
    assert record["loss"] == name
    assert record["asserted"]
    assert record["backend"] == "trl"
    assert record["micro_batches"] == 2
    assert record["function"].endswith("GRPOTrainer._compute_loss")
    assert record["arguments"]["loss_type"] == PRESETS.get(name, {"loss_type": name})["loss_type"]
    assert record["relative_difference"]["loss"] < 1e-6
    assert record["relative_difference"]["gradient"] < 1e-5
    assert len(rows) == 2


def test_a_ratio_away_from_one_is_proven_too(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With other old log-probabilities, as a sampler with numerics of its own gives them, both sides of the clip."""
    trainer = make_trainer(gradient_accumulation_steps=2, steps_per_generation=4)
    watch(trainer)

    def drifted(make: Any, inputs: Any) -> Any:
        output = make(inputs)
        rows = torch.linspace(-1e-3, 1e-3, len(output["old_per_token_logps"]))[:, None]
        return output | {"old_per_token_logps": output["old_per_token_logps"] + rows}

    observe_rollouts(trainer, drifted)
    record, rows = trained(trainer)
    assert rows[0]["policy/max_ratio"] - 1 == pytest.approx(1e-3, rel=0.3)
    assert 0 < rows[0]["policy/clipped_ratio_fraction"] <= 1
    assert "step 1: the ratios are up to 0.00" in caplog.text
    assert record["relative_difference"]["gradient"] < 1e-4


def scaled(loss_factor: float, gradient_factor: float) -> Any:
    class Scaled(trl.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            return loss_factor * loss.detach() + gradient_factor * (loss - loss.detach())

    return Scaled


@pytest.mark.parametrize(
    ("factors", "wrong"), [((2.0, 2.0), "loss"), ((1.0, 0.5), "gradient"), ((1.0, 1024.0), "gradient")]
)
def test_a_loss_with_another_divisor_is_stopped_before_the_weights_move(
    factors: tuple[float, float], wrong: str, make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer(cls=scaled(*factors))
    before = {name: p.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    with pytest.raises(
        WrongLossError, match=rf"the {wrong} of step 1 is not.*Scaled\._compute_loss \({__file__}:\d+\) ran with"
    ):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("epsilon_low", 0.2, r"epsilon_low=0\.2, and 0\.0003 was asked for"),
        ("importance_sampling_level", "token", "importance_sampling_level='token', and 'sequence' was asked for"),
    ],
)
def test_somebody_elses_settings_are_stopped(
    name: str, value: Any, said: str, make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer()
    setattr(trainer, name, value)
    with pytest.raises(WrongLossError, match=said) as stopped:
        trainer.train()
    assert __file__ not in str(stopped.value)  # the loss is TRL's own


def test_a_loss_on_other_log_probabilities_is_stopped(make_trainer: Callable[..., Any]) -> None:
    """The trap of overriding `_compute_loss`: something else computes the loss, and the override is dead."""

    class Bypassed(trl.GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            super().compute_loss(model, inputs)
            return sum(p.square().sum() for p in model.parameters() if p.requires_grad)

    with pytest.raises(WrongLossError) as stopped:
        make_trainer(cls=Bypassed).train()
    assert f"Bypassed.compute_loss ({__file__}:{Bypassed.compute_loss.__code__.co_firstlineno}) ran with" in str(
        stopped.value
    )
    assert "GRPOTrainer._compute_loss" not in str(stopped.value)  # TRL's ran as well, and is not what is wrong


@pytest.mark.parametrize("asks", [True, False])
def test_a_loss_that_is_set_on_the_trainer_is_named_where_it_is_written(
    asks: bool, make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer()
    original = trainer.compute_loss

    def mine(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return 3 * original(model, inputs) if asks else sum(p.sum() for p in model.parameters() if p.requires_grad)

    trainer.compute_loss = mine
    with pytest.raises(
        WrongLossError, match=rf"<locals>\.mine \({__file__}:{mine.__code__.co_firstlineno}\) "
    ) as stopped:
        trainer.train()
    assert ("without asking for the new log-probabilities" in str(stopped.value)) is not asks


def test_another_clip_is_stopped_at_the_first_step_where_it_shows(make_trainer: Callable[..., Any]) -> None:
    """On-policy a token ratio clipped at 0.2 has GSPO's value and gradient; the second step of the rollout tells."""

    class TokenLevel(trl.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            settings = self.importance_sampling_level, self.epsilon_low, self.epsilon_high
            self.importance_sampling_level, self.epsilon_low, self.epsilon_high = "token", 0.2, 0.2
            given = self._get_per_token_logps_and_entropies

            def as_asked(*args: Any, **kwargs: Any) -> Any:  # what is read beside the call says nothing
                asked = self.importance_sampling_level, self.epsilon_low, self.epsilon_high
                self.importance_sampling_level, self.epsilon_low, self.epsilon_high = settings
                result = given(*args, **kwargs)
                self.importance_sampling_level, self.epsilon_low, self.epsilon_high = asked
                return result

            self._get_per_token_logps_and_entropies = as_asked
            try:
                return super()._compute_loss(model, inputs)
            finally:
                self._get_per_token_logps_and_entropies = given
                self.importance_sampling_level, self.epsilon_low, self.epsilon_high = settings

    with pytest.raises(WrongLossError, match="of step 2 is not"):
        make_trainer(cls=TokenLevel, max_steps=4, learning_rate=1e-2).train()


def test_a_step_without_a_gradient_proves_nothing_and_the_next_one_is_looked_at(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = make_trainer(cls=scaled(1024.0, 1024.0), max_steps=4)
    score, rollouts = trainer._calculate_rewards, []

    def alike_at_first(*args: Any) -> Any:
        rewards = score(*args)
        rollouts.append(rewards)
        return torch.zeros_like(rewards) if len(rollouts) == 1 else rewards

    trainer._calculate_rewards = alike_at_first
    with pytest.raises(WrongLossError, match="of step 3 is not"):
        trainer.train()
    record = json.loads((Path(trainer.args.output_dir) / "loss.json").read_text())
    assert record["asserted"] is False


def test_the_record_says_when_the_clip_was_seen_to_act(make_trainer: Callable[..., Any]) -> None:
    record, _ = trained(make_trainer(max_steps=4, learning_rate=1e-2))
    assert record["clip_seen_at_step"] == 2
    assert record["relative_difference"]["steps"] == 2
    never, _ = trained(make_trainer(max_steps=3, steps_per_generation=1))
    assert never["clip_seen_at_step"] is None
    assert never["relative_difference"]["steps"] == 3


def test_a_kl_term_does_not_hide_the_clip(make_trainer: Callable[..., Any]) -> None:
    """The KL term has a gradient where the clip takes the policy's away, so none is exactly zero."""
    without, _ = trained(make_trainer(max_steps=4, learning_rate=1e-2))
    for corrected in (True, False):
        torch.manual_seed(0)
        record, _ = trained(make_trainer(max_steps=4, learning_rate=1e-2, beta=0.04, use_bias_correction_kl=corrected))
        assert record["clip_seen_at_step"] == without["clip_seen_at_step"] == 2
        assert record["asserted"]
        assert record["relative_difference"]["steps"] == 2


def test_a_token_without_weight_is_not_taken_for_a_clipped_one() -> None:
    arguments = {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    }
    ones = torch.ones(2, 3, dtype=torch.float64)

    def cut(drift: float, advantage: float) -> bool:
        old = -ones
        call = LossInputs(new=old + drift, old=old, ref=None, mask=ones, advantages=torch.full((2,), advantage),
                        function=None, arguments=arguments, weight=torch.zeros(2, 1))  # fmt: skip
        return has_clipped_gradient(call)

    assert not cut(0.0, 1.0)
    assert cut(1e-3, 1.0)
    assert not cut(1e-3, -1.0)
    assert cut(-1e-3, -1.0)
    assert not cut(-1e-3, 1.0)
    assert not cut(-1e-3, 0.0)  # an advantage of 0 gives no gradient that the clip could take
    assert not cut(1e-3, 0.0)


def test_evaluation_before_training_is_left_to_the_trainer(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(eval_strategy="steps", eval_steps=2, eval_on_start=True, per_device_eval_batch_size=4)
    record, rows = trained(trainer)
    assert record["asserted"]
    assert len(rows) == 2
    assert any("eval_loss" in row for row in trainer.state.log_history)


def test_a_subclass_that_scores_twice_is_not_stopped(make_trainer: Callable[..., Any]) -> None:
    class Diagnosed(trl.GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            with torch.no_grad():
                self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
            return super().compute_loss(model, inputs, *args, **kwargs)

    assert trained(make_trainer(cls=Diagnosed))[0]["asserted"]


def test_extremes_are_those_of_the_steps_between_two_logs(make_trainer: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    _, every = trained(make_trainer(max_steps=4))
    torch.manual_seed(0)
    _, (once,) = trained(make_trainer(max_steps=4, logging_steps=4))
    assert once["policy/max_ratio"] == max(row["policy/max_ratio"] for row in every)
    assert once["policy/min_ratio"] == min(row["policy/min_ratio"] for row in every)
    mean = sum(row["policy/ratio_new_old"] for row in every) / 4
    assert once["policy/ratio_new_old"] == pytest.approx(mean, rel=1e-12)


def test_a_term_without_a_formula_is_said_and_not_called_proven(make_trainer: Callable[..., Any]) -> None:
    record, _ = trained(make_trainer(entropy_coef=0.01))
    assert record["unproven"] == ["entropy_coef"]
    assert not record["asserted"]


def test_a_loss_without_a_formula_is_not_called_proven(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_check, "WITH_FORMULA", ("grpo",))
    record, _ = trained(make_trainer("dapo"))
    assert record["unproven"] == ["loss_type dapo"]
    assert not record["asserted"]


# ---------------------------------------------------------------------------------------------- an objective of one's own


def with_auxiliary_loss() -> Any:
    class Auxiliary(trl.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            weights = [p for p in model.parameters() if p.requires_grad]
            return super()._compute_loss(model, inputs) + 1e-3 * sum(p.square().sum() for p in weights)

    return Auxiliary


@pytest.fixture
def nothing_accepted() -> Iterator[None]:
    yield
    cogumi.patch(accept=[])


@pytest.mark.usefixtures("nothing_accepted")
def test_an_auxiliary_loss_is_named_accepted_and_said(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(cls=with_auxiliary_loss())
    with pytest.raises(WrongLossError) as stopped:
        trainer.train()
    assert "cogumi.patch(accept=['own-objective'])" in str(stopped.value)
    with pytest.raises(WrongLossError):  # and stopped it stays when it is tried again
        trainer.train()
    cogumi.patch(accept=["own-objective"])
    record, rows = trained(trainer)
    assert len(rows) == 2
    assert record["accepted"] == record["unproven"] == ["own-objective"]
    assert not record["asserted"]
    assert "relative_difference" not in record
    assert record["function"].endswith("Auxiliary._compute_loss")
    assert record["source"]["file"] == __file__
    (message,) = [record.getMessage() for record in caplog.records if "own-objective" in record.getMessage()]
    assert "compared with no formula" in message
    assert "Auxiliary._compute_loss" in message
    cogumi.patch()  # as every cell that needs it calls it: what was accepted stays so
    assert accepted_by(trainer) == {"own-objective"}


@pytest.mark.usefixtures("nothing_accepted")
def test_an_objective_that_never_asks_for_log_probabilities_can_be_ones_own(make_trainer: Callable[..., Any]) -> None:
    class Own(trl.GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return sum(p.square().sum() for p in model.parameters() if p.requires_grad)

    trainer = make_trainer(cls=Own)
    with pytest.raises(WrongLossError, match="own-objective"):
        make_trainer(cls=Own).train()
    cogumi.patch(accept=["own-objective"])
    record, _ = trained(trainer)
    assert record["function"].endswith("Own.compute_loss")
    assert "arguments" not in record


@pytest.mark.usefixtures("nothing_accepted")
def test_a_run_accepts_nothing(make_trainer: Callable[..., Any]) -> None:
    cogumi.patch(accept=["own-objective"])
    trainer = make_trainer(cls=with_auxiliary_loss())
    trainer.cogumi_run = True
    with pytest.raises(WrongLossError) as stopped:
        trainer.train()
    assert "accept" not in str(stopped.value)


def test_a_finding_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'own-loss' is no finding; there are: .*own-objective"):
        cogumi.patch(accept=["own-loss"])
    with pytest.raises(UsageError, match="'dropuot' is no finding"):
        cogumi.patch(accept="dropuot")


def test_a_refused_training_is_refused_again(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(epsilon=0.2, epsilon_high=0.2)
    for _ in range(2):  # as a cell that is run twice
        with pytest.raises(UsageError, match="wide-clip"):
            trainer.train()


def test_an_objective_that_was_typed_has_a_place(make_trainer: Callable[..., Any]) -> None:
    """Without a file there is no source to hash, and the record says where it was compiled."""
    typed: dict[str, Any] = {"trl": trl, "__name__": "__main__"}
    code = "class Typed(trl.GRPOTrainer):\n    def _compute_loss(self, *args):\n        return super()._compute_loss(*args)"
    exec(compile(code, "<stdin>", "exec"), typed)
    record, _ = trained(make_trainer(cls=typed["Typed"]))
    assert record["asserted"]
    assert record["source"] == {"file": "<stdin>", "line": 2, "sha256": None}


def test_a_script_is_watched_because_of_the_name_alone(make_trainer: Callable[..., Any]) -> None:
    ours, trls = make_trainer("gspo"), make_trainer("dapo")
    assert [type(c) for c in ours.callback_handler.callbacks].count(LossWatch) == 1
    assert not any(isinstance(c, LossWatch) for c in trls.callback_handler.callbacks)
    assert watch(ours) is watch(ours)
    assert [type(c) for c in ours.callback_handler.callbacks].count(LossWatch) == 1


def test_every_step_logs_the_metrics(make_trainer: Callable[..., Any]) -> None:
    """On-policy step, then one that is 4 documents late."""
    _, rows = trained(make_trainer(max_steps=4))
    names = (
        "new_logprobs", "old_logprobs", "ratio_new_old", "min_ratio", "max_ratio", "kl_new_old",
        "clipped_ratio_fraction", "num_tokens", "num_segments", "staleness", "effective_sample_size",
    )  # fmt: skip
    assert all(f"policy/{name}" in row for row in rows for name in names)
    assert [row["policy/staleness"] for row in rows] == [0, 4, 0, 4]
    assert [row["policy/num_segments"] for row in rows] == [4, 4, 4, 4]
    assert rows[0]["policy/ratio_new_old"] == pytest.approx(1, abs=1e-6)
    assert rows[1]["policy/ratio_new_old"] != pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("longest", [1e-3, 0.0])
def test_the_clip_coefficient_and_the_range_of_advantages_are_logged(
    longest: float, make_trainer: Callable[..., Any]
) -> None:
    _, rows = trained(make_trainer(max_steps=4, max_grad_norm=longest))
    assert [row["policy/clip_coefficient"] for row in rows] == [
        min(1.0, longest / row["grad_norm"]) if longest and row["grad_norm"] else 1.0 for row in rows
    ]
    assert ["policy/max_advantage" in row for row in rows] == ["reward" in row for row in rows] == [True, False] * 2
    assert rows[0]["policy/min_advantage"] < 0 < rows[0]["policy/max_advantage"]


def test_watching_does_not_change_the_run(make_trainer: Callable[..., Any]) -> None:
    def weights(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        trainer = make_trainer(**PRESETS["gspo"], max_steps=3)
        if watched:
            watch(trainer)
        trainer.train()
        return [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]

    assert all(torch.equal(a, b) for a, b in zip(weights(True), weights(False), strict=True))


def test_the_rollout_that_the_trainer_keeps_is_not_touched(make_trainer: Callable[..., Any]) -> None:
    """num_iterations=2 uses every rollout twice: what the watch reads of it must stay as it was."""
    trainer = make_trainer("gspo", num_iterations=2, max_steps=4)
    watch(trainer)
    sampled: list[float] = []

    def noted(make: Any, inputs: Any) -> Any:
        output = make(inputs)
        sampled.extend(output["old_per_token_logps"].sum(-1).tolist())
        return output

    observe_rollouts(trainer, noted)
    _, rows = trained(trainer)
    assert [row["policy/staleness"] for row in rows] == [0, 4, 8, 12]
    kept = torch.cat([batch["old_per_token_logps"] for batch in trainer._buffered_inputs]).sum(-1).tolist()
    assert sorted(kept) == pytest.approx(sorted(sampled))  # TRL shuffles them
