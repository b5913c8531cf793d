"""The GSPO benchmarks measure what they say: real steps on a tiny shape, and known series; no time is asserted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gspo_clip, gspo_learning, gspo_step, harness, rollouts
from benchmarks.models import Shape

pytestmark = pytest.mark.slow("of the benchmarks, not of the package")

TINY = Shape("tiny", 32, 64, 2, 4, 2, 97, True)
BATCH = gspo_step.Batch(sequences=4, prompt=5, completion=7)


@pytest.fixture
def trainers(tmp_path: Path) -> dict[str, Any]:
    """New ones for each test, since most of the tests train them."""
    return gspo_step.both_trainers(TINY, BATCH, "cpu", torch.float32, tmp_path / "trainers")


def test_only_one_side_is_watched_and_both_train_the_same_loss_on_the_same_rollout(trainers: dict[str, Any]) -> None:
    from cogumi.rl.watch import LossWatch

    watched = {
        name: any(isinstance(c, LossWatch) for c in t.callback_handler.callbacks) for name, t in trainers.items()
    }
    assert watched == {"cogumi": True, "stock": False}
    before = {name: gspo_step.trained_weights(trainer) for name, trainer in trainers.items()}
    assert torch.equal(before["cogumi"], before["stock"])
    for trainer in trainers.values():
        assert gspo_step.Clock(trainer).seconds() > 0
    after = {name: gspo_step.trained_weights(trainer) for name, trainer in trainers.items()}
    assert not torch.equal(before["cogumi"], after["cogumi"])
    assert torch.equal(after["cogumi"], after["stock"])
    rows = {name: [row for row in t.state.log_history if "loss" in row] for name, t in trainers.items()}
    assert [row["loss"] for row in rows["cogumi"]] == [row["loss"] for row in rows["stock"]]
    assert len(rows["cogumi"]) == gspo_step.STEPS
    assert all("policy/ratio_new_old" in row for row in rows["cogumi"])
    # The second step of a rollout is the off-policy one.
    assert [row["policy/staleness"] for row in rows["cogumi"]] == [0, BATCH.sequences]


def test_a_loss_spelled_otherwise_would_show(
    trainers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The row that compares the weights can fail: with another level they are apart."""
    monkeypatch.setattr(gspo_step, "BY_HAND", gspo_step.BY_HAND | {"importance_sampling_level": "token"})
    other = gspo_step.both_trainers(TINY, BATCH, "cpu", torch.float32, tmp_path)
    for trainer in other.values():
        trainer.train()
    assert not torch.equal(*(gspo_step.trained_weights(value) for value in other.values()))


class Seconds:
    """A clock that only moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(gspo_step, "now", lambda: self.now)

    def taking(self, seconds: float, work: Callable[..., Any] = lambda: None) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return work(*args, **kwargs)

        return slow


def test_own_time_is_what_is_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Seconds(monkeypatch)
    own = harness.OwnTime(lambda: clock.now)
    inside = own.theirs(clock.taking(100, own.ours(clock.taking(1))))
    own.ours(clock.taking(10, inside))()
    assert own.wall == 11
    with pytest.raises(ZeroDivisionError):
        own.ours(clock.taking(1, lambda: 1 / 0))()
    assert own.wall == 12


def test_all_of_the_watch_is_timed_and_nothing_else(trainers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from cogumi.rl import loss_check
    from cogumi.rl.watch import watch

    trainer = gspo_step.make_trainer(
        gspo_step.BY_NAME, [], TINY, BATCH, "cpu", torch.float32, trainers["cogumi"].args.output_dir
    )
    clock, watching = Seconds(monkeypatch), watch(trainer)
    watching.guard()  # makes the proof
    proof = watching.proof
    watching.compute_loss = clock.taking(100, watching.compute_loss)  # TRL's
    trainer._generate_and_score_completions = clock.taking(1000, trainer._generate_and_score_completions)
    monkeypatch.setattr(loss_check, "read_trl_inputs", clock.taking(0.5, loss_check.read_trl_inputs))  # the watch's
    for owner, name, seconds in (
        (watching.metrics, "add", 1.0),
        (watching.metrics, "take", 2.0),
        (watching.proof, "check", 4.0),
    ):
        monkeypatch.setattr(owner, name, clock.taking(seconds, getattr(owner, name)))
    (share,) = gspo_step.metrics_shares(trainer, 1)
    steps, micro_batches = gspo_step.STEPS, gspo_step.STEPS * gspo_step.MICRO_BATCHES
    ours = 1.5 * micro_batches + 2 * steps + 4 * proof.step
    theirs = 100 * micro_batches + 1000
    assert share == pytest.approx(ours / (ours + theirs))


def test_peak_bytes_counts_what_a_step_allocates(trainers: dict[str, Any]) -> None:
    trainer = trainers["stock"]
    weights = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    peak = gspo_step.peak_bytes(trainer, "cpu")
    compute = trainer.compute_loss
    kept = []
    trainer.compute_loss = lambda *args, **kwargs: (kept.append(torch.zeros(2**18)), compute(*args, **kwargs))[1]
    try:
        # Kept from micro-batch to micro-batch, so that by the last one they are all there.
        micro_batches = gspo_step.STEPS * gspo_step.MICRO_BATCHES
        assert peak > 4 * weights  # at least the gradients
        assert gspo_step.peak_bytes(trainer, "cpu") - peak == pytest.approx(micro_batches * 2**20, rel=0.05)
    finally:
        del trainer.compute_loss


def test_step_rows() -> None:
    rows = list(gspo_step.step_rows(TINY, BATCH, "cpu", torch.float32, repeats=2))
    json.dumps(rows, allow_nan=False)
    values = {row["metric"]: row for row in rows}
    assert values["weights after training, max |cogumi - stock TRL|"]["ok"]
    targets = {metric: each["target"] for metric, each in values.items() if each["target"]}
    assert targets == {
        "step, cogumi / stock TRL": "<= 1.02",
        "peak memory of a step, cogumi / stock TRL": "<= 1.0",
        "weights after training, max |cogumi - stock TRL|": "<= 0",
        "metrics, share of a step": "<= 1",
    }
    assert {row["case"] for row in rows} == {"tiny, 4 x 5+7 tokens"}


# ------------------------------------------------------------------------------------------------------- the learning


def series(rewards: list[list[float]]) -> gspo_learning.Series:
    by_seed = {str(seed): values for seed, values in enumerate(rewards)}
    flat = {seed: [0.25] * len(values) for seed, values in by_seed.items()}
    return {gspo_learning.REWARD: by_seed, gspo_learning.CLIPPED: flat, gspo_learning.EFFECTIVE: flat}


def test_a_value_per_rollout_is_taken_from_its_first_and_last_step() -> None:
    def step(clipped: float, **more: float) -> dict[str, float]:
        return {"loss": 0.0, gspo_learning.CLIPPED: clipped, gspo_learning.EFFECTIVE: 1 - clipped, **more}

    logged = [step(0.0, reward=0.1), step(0.5), step(0.0, reward=0.3), step(0.25), {"train_runtime": 1.0}]
    assert gspo_learning.rollout_series(logged) == {
        "reward": [0.1, 0.3],
        gspo_learning.CLIPPED: [0.5, 0.25],
        gspo_learning.EFFECTIVE: [0.5, 0.75],
    }
    with pytest.raises(KeyError, match="policy/clipped_ratio_fraction"):
        gspo_learning.rollout_series([{"loss": 0.0, "reward": 0.1}])


def test_method_rows_are_means_over_seeds_and_every_seed_must_rise() -> None:
    # Quarters of two rollouts: 0.1 -> 0.5, and 0.3 -> 0.2.
    both = series([[0.0, 0.2, 9, 9, 9, 9, 0.4, 0.6], [0.3, 0.3, 9, 9, 9, 9, 0.1, 0.3]])
    rows = {row["metric"]: row for row in gspo_learning.method_rows("GSPO", both, must_rise=True)}
    first, last = rows["reward, first quarter"], rows["reward, last quarter"]
    assert (first["value"], first["spread"]) == (pytest.approx(0.2), pytest.approx([0.1, 0.3]))
    assert (last["value"], last["spread"]) == (pytest.approx(0.35), pytest.approx([0.2, 0.5]))
    assert rows["reward, last quarter - first"]["value"] == pytest.approx(0.15)
    rose = rows["seeds with last quarter above first"]
    assert (rose["value"], rose["target"], rose["ok"]) == (1, ">= 2", False)
    assert rose["series"] == both
    assert rows[gspo_learning.OUTSIDE]["value"] == 0.25
    assert first["note"] == "0.1, 0.3; standard deviation 0.141"
    free = {row["metric"]: row for row in gspo_learning.method_rows("GRPO", both, must_rise=False)}
    assert free["seeds with last quarter above first"]["ok"] is None


def test_both_methods_really_train_from_one_sft_model(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of one seed share everything but the loss: the first rollouts are the same."""
    monkeypatch.setenv("COGUMI_DATA__SOURCE", str(code_parquet))
    monkeypatch.setenv("COGUMI_DATA__COLUMN", "source")
    monkeypatch.setenv("COGUMI_MODEL__NAME", str(tiny_model))
    monkeypatch.setattr(gspo_learning, "QUICK", {"sft": 2, "rl": 4})
    actual = gspo_learning.trained(tmp_path, (3,), quick=True, train__max_completion_length=4)
    gspo, grpo = actual.values()
    for each in (gspo, grpo):
        assert {metric: len(values["3"]) for metric, values in each.items()} == dict.fromkeys(each, 2)
    assert gspo["reward"]["3"][0] == grpo["reward"]["3"][0]
    # At a ratio of about the same size, 3e-4 clips and 0.2 does not.
    assert gspo[gspo_learning.CLIPPED]["3"][0] > grpo[gspo_learning.CLIPPED]["3"][0]


def test_engines_write_the_same_rollouts(tmp_path: Path) -> None:
    short = {"train__max_steps": 2, "train__max_completion_length": 6, "data__max_rows": 16}
    compared = rollouts.compare("cogumi:small-base", tmp_path / "run", **short)
    assert len(compared.speeds[rollouts.CHOSEN]) == 2
    assert compared.equal == compared.written >= 64
    rates = [row["value"] for row in rollouts.engine_rows("-", compared) if row["unit"] == "tokens/s"]
    assert min(rates) > 0


def test_arms_of_the_clip_are_means_over_their_seeds() -> None:
    arm, rate = next(iter(gspo_clip.ARMS)), gspo_clip.RATES[0]
    records = [
        {"seed": seed, "rate": rate, "arm": arm, "last": seed, "held_out": 0.5, "clipped": 0.1} for seed in (1, 2)
    ]
    rows = list(gspo_clip.summarize(records))
    assert [row["metric"] for row in rows] == list(gspo_clip.FIGURES.values())
    assert rows[0]["case"] == f"{arm}, rate {rate:g}, seeds 1, 2"
    assert (rows[0]["value"], rows[0]["spread"]) == (1.5, [1, 2])
