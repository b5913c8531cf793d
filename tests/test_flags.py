"""Flags are pure: rows in, flags out. Series with closed forms, one fault each."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cogumi.config.schema import Thresholds
from cogumi.core.errors import UsageError
from cogumi.health.data_checks import shared_by_answers, shared_words
from cogumi.health.flags import (
    AnswerOverlap,
    BatchStatistics,
    Flag,
    PairLosses,
    RunHistory,
    RunSettings,
    SampleCounts,
    WordOverlap,
    noise,
    red_flags,
    resolve_consequences,
    smooth,
    trend,
)
from cogumi.health.rules import are_mixed_up
from cogumi.health.sentinel import Sentinel
from cogumi.health.verdict import judge, safe_to_scale

SFT = RunSettings("sft", 1e-3, max_steps=200, examples_per_step=16, vocabulary=1024)
GSPO = replace(SFT, method="gspo")
DPO = replace(SFT, method="dpo", loss="sigmoid")
BATCHES = BatchStatistics(examples=64, masked=0, learned=640, pads_learned=0, ends=64, pad_is_end=False, entropy=5.0)


def rows_of(losses: list[float], **more: Any) -> list[dict[str, Any]]:
    """A row a step; `more` are values for every row, or a list with one a row."""
    rows = []
    for i, loss in enumerate(losses):
        row = {"step": i + 1, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3}
        row |= {key: value[i] if isinstance(value, list) else value for key, value in more.items()}
        rows.append(row)
    return rows


def run_of(
    losses: list[float], setting: RunSettings = SFT, batches: BatchStatistics | None = BATCHES, **more: Any
) -> RunHistory:
    rows = rows_of(losses, **more)
    return RunHistory(setting, rows[:10], rows[10:][-100:], batches)


def levels(run: RunHistory) -> dict[str, str]:
    return {flag.name: flag.level for flag in judge(run)}


def red(run: RunHistory) -> Flag:
    (flag,) = red_flags(judge(run))
    assert flag.cause
    assert flag.knob
    assert flag.evidence
    return flag


def falling(
    steps: int = 100, start: float = 3.0, end: float = 2.0, scatter: float = 0.05, seed: int = 0
) -> list[float]:
    draw = random.Random(seed)
    return [end + (start - end) * math.exp(-i / 20) + draw.gauss(0, scatter) for i in range(steps)]


# ---------------------------------------------------------------------------------------------------------------- the slope


def test_theil_sens_slope_is_the_median_over_all_pairs_and_knows_no_outlier() -> None:
    x, y = [1, 2, 4, 8, 16], [3.0, 5.0, 9.0, 17.0, 33.0]
    assert trend(x, y).slope == 2.0
    y[3] = 1e9
    pairs = sorted((y[j] - y[i]) / (x[j] - x[i]) for i in range(5) for j in range(i + 1, 5))
    assert trend(x, y).slope == pytest.approx((pairs[4] + pairs[5]) / 2)
    assert trend(x, y).change(x) == pytest.approx(15 * (pairs[4] + pairs[5]) / 2)


@pytest.mark.parametrize("n", [3, 10, 60])
def test_mann_and_kendalls_z_of_a_rising_series_is_the_closed_form(n: int) -> None:
    s = n * (n - 1) / 2
    z = (s - 1) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    assert trend(list(range(n)), [float(i) for i in range(n)]).z == pytest.approx(z)
    assert trend(list(range(n)), [-float(i) for i in range(n)]).z == pytest.approx(-z)
    assert trend(list(range(n)), [7.0] * n).z == 0


def test_z_of_chance_is_a_standard_normal() -> None:
    draw = np.random.default_rng(0)
    z = [trend(range(40), draw.standard_cauchy(40)).z for _ in range(400)]  # no mean, no variance: ranks do not care
    assert abs(np.mean(z)) < 0.15
    assert np.std(z) == pytest.approx(1, abs=0.1)


def test_ties_take_from_the_variance() -> None:
    y = [1.0, 1.0, 2.0, 2.0, 2.0, 3.0]
    variance = (6 * 5 * 17 - 2 * 1 * 9 - 3 * 2 * 11) / 18
    assert trend(range(6), y).z == pytest.approx((11 - 1) / math.sqrt(variance))


def test_noise_is_the_scatter_about_a_curve_and_not_the_curve() -> None:
    draw = np.random.default_rng(0)
    curve = np.exp(-np.arange(4000) / 500) * 100
    assert noise(curve + draw.normal(0, 0.3, 4000)) == pytest.approx(0.3, rel=0.15)


def test_smoothing_takes_a_spike_away_and_leaves_a_step() -> None:
    assert max(smooth([1.0, 1.0, 9.0, 1.0, 1.0])) == 1.0
    assert smooth([1.0, 1.0, 9.0, 9.0, 9.0]) == [1.0, 9.0, 9.0]


# ---------------------------------------------------------------------------------------------------- what is as it should be


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_that_falls_in_noise_is_green(seed: int) -> None:
    assert red_flags(judge(run_of(falling(seed=seed, scatter=0.1)))) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_noisy_reward_is_never_red(seed: int) -> None:
    draw = random.Random(seed)
    rewards = [min(1.0, max(0.0, draw.gauss(0.3 + 0.001 * i, 0.15))) for i in range(100)]
    more = {"reward": rewards, "reward_std": 0.3, "frac_reward_zero_std": 0.2, "completions/clipped_ratio": 0.1}
    run = run_of([draw.gauss(0, 0.1) for _ in range(100)], GSPO, None, entropy=0.4, **more)
    assert red_flags(judge(run)) == []


def test_a_sanity_check_of_ten_rows_is_judged_by_every_rule() -> None:
    """TRL logs every tenth step unless told otherwise: a hundred steps are ten rows, the first ones and the latest."""
    kept = SimpleNamespace(first=[], latest=[])
    steps = dict(zip(range(10, 110, 10), falling(10), strict=True))
    for step, loss in steps.items():
        row = {"step": step, "loss": loss, "grad_norm": 1e4, "seen/seconds": 10.0, "seen/wait": 9.0}
        Sentinel.remember(kept, row)  # type: ignore[arg-type]
    run = RunHistory(SFT, kept.first, kept.latest, None)
    assert [row["step"] for row in run.rows] == list(steps)
    actual = levels(run)
    assert (actual["gradient norm"], actual["waiting for data"]) == ("red", "red")


def test_too_few_rows_are_no_evidence() -> None:
    assert red_flags(judge(run_of([3.0, 9.0, 27.0]))) == []


# ------------------------------------------------------------------------------------------------------- one fault each, sft


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_climbs_and_stays_up_is_the_learning_rates(seed: int) -> None:
    draw = random.Random(seed)
    climbs = [3.0 + 4 * (1 - math.exp(-i / 5)) + draw.gauss(0, 0.1) for i in range(30)]
    assert red(run_of(climbs)).name == "loss trend"
    assert "rate is too high" in red(run_of(climbs)).cause


def test_a_loss_that_climbs_late_is_seen_in_the_latest_rows() -> None:
    draw = random.Random(0)
    late = falling(200) + [2.0 + 0.008 * i + draw.gauss(0, 0.05) for i in range(100)]
    assert "up by" in red(run_of(late)).evidence


def test_a_spike_that_heals_is_yellow() -> None:
    losses = falling()
    losses[40:46] = [7.0] * 6
    assert levels(run_of(losses))["loss trend"] == "yellow"


def test_a_loss_that_does_not_fall_in_a_hundred_steps_is_yellow() -> None:
    draw = random.Random(0)
    flags = levels(run_of([3.0 + draw.gauss(0, 0.05) for _ in range(120)]))
    assert flags["loss trend"] == "yellow"


@pytest.mark.parametrize(("key", "name"), [("loss", "the loss"), ("grad_norm", "the gradient norm")])
def test_the_first_value_that_is_no_number_is_named(key: str, name: str) -> None:
    losses = falling(30)
    rows = rows_of(losses)
    rows[20] |= {key: math.nan, "seen/broken": "trained lora_A"}
    flag = red(RunHistory(SFT, rows[:10], rows[10:], BATCHES))
    assert flag.name == "finite numbers"
    assert f"step 21: {name} is not finite; so is trained lora_A" in flag.evidence


def test_numbers_break_for_one_of_some_reasons() -> None:
    calm, wild = [3.0] * 20, [3.0, 3.1, 3.0, 9.0, 30.0, 90.0] * 2
    rows = rows_of([*calm, math.nan])
    flag = red(RunHistory(SFT, rows[:10], rows[10:], None))
    assert ("overflowed" in flag.cause, flag.knob) == (True, "train.learning_rate")
    assert red(RunHistory(replace(SFT, fp16=True), rows[:10], rows[10:], None)).knob.startswith("train.bf16: true")
    assert "too high, at 0.5" in red(RunHistory(replace(SFT, learning_rate=0.5), rows[:10], rows[10:], None)).cause
    rows[-1]["seen/broken"] = "frozen lm_head.weight"
    assert red(RunHistory(SFT, rows[:10], rows[10:], None)).knob == "model.name"
    rows = rows_of([3.0, 3.1, 3.0, 3.1, 3.0, 3.1, 9.0, 90.0, math.inf])
    assert "rate is too high" in red(RunHistory(SFT, rows[:10], rows[10:], None)).cause
    assert wild


def test_what_follows_from_a_red_flag_says_so() -> None:
    flags = judge(run_of([math.nan] * 20, batches=replace(BATCHES, masked=40)))
    assert [flag.name for flag in red_flags(flags)] == ["finite numbers"]
    (other,) = [flag for flag in flags if flag.name == "learned tokens"]
    assert (other.level, other.cause) == ("yellow", "follows from finite numbers")
    assert flags[0].level == "red"


def test_labels_in_another_order_rest_at_the_entropy_of_their_frequencies() -> None:
    draw = random.Random(0)
    losses = [5.0 + 3 * math.exp(-i / 8) + draw.gauss(0, 0.05) for i in range(100)]
    assert "another order" in red(run_of(losses)).cause


def test_a_loss_at_rest_at_the_frequencies_is_the_rates_where_the_base_knew_more() -> None:
    draw = random.Random(0)
    rests = [4.95 + draw.gauss(0, 0.05) for _ in range(100)]
    assert levels(run_of(rests))["token frequencies"] == "yellow"  # the text may have no more to it
    told = replace(BATCHES, pairs=PairLosses(4.9, 5.2, 3.5))
    still, gone = PairLosses(4.9, 5.1, 4.0, step=60), PairLosses(5.0, 5.0, 0.4, step=60)
    assert levels(run_of(rests, batches=replace(told, pairs_now=still)))["token frequencies"] == "yellow"
    assert "rate is too high" in red(run_of(rests, batches=replace(told, pairs_now=gone))).cause
    rose = [4.95 - 0.3 * math.exp(-i / 8) + draw.gauss(0, 0.05) for i in range(100)]
    assert "rate is too high" in red(run_of(rose)).cause


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_on_its_way_down_is_not_at_rest(seed: int) -> None:
    draw = random.Random(seed)
    told = replace(BATCHES, pairs=PairLosses(4.9, 5.2, 3.5))
    gone = replace(told, pairs_now=PairLosses(5.0, 5.0, 0.4, step=50))
    for fall in (0.002, 0.004, 0.008):
        slow = [5.4 - fall * i + draw.gauss(0, 0.25) for i in range(100)]
        steady = [5.4 - fall * i + draw.gauss(0, 0.005) for i in range(100)]
        for step in range(50, 101, 5):
            assert red_flags(judge(run_of(slow[:step], batches=told))) == []  # nothing was lost
            assert red_flags(judge(run_of(steady[:step], batches=gone))) == []  # whatever was lost, it is learned


@pytest.mark.parametrize(
    ("batches", "name", "cause"),
    [
        (replace(BATCHES, masked=20), "learned tokens", "masked"),
        (replace(BATCHES, pads_learned=100), "padding", "labels padding"),
        (replace(BATCHES, pad_is_end=True, ends=0), "padding", "end tokens are masked"),
        (replace(BATCHES, pairs=PairLosses(2.0, 2.01, 0.4)), "prompt and completion", "shuffled"),
    ],
)
def test_what_is_wrong_with_the_batches_is_red_before_the_first_step(
    batches: BatchStatistics, name: str, cause: str
) -> None:
    flag = red(RunHistory(SFT, [], [], batches))
    assert flag.name == name
    assert cause in flag.cause


@pytest.mark.parametrize(
    ("pairs", "level"),
    [
        (PairLosses(2.0, 2.3, 6.0), "green"),
        (PairLosses(2.0, 2.02, 5.0), "green"),
        (PairLosses(2.0, 2.2, 1.0), "green"),
        (PairLosses(2.0, 2.0, 0.0), "red"),
        (PairLosses(3.6, 3.6, 0.0), "green"),  # a base that cannot tell them yet says nothing of the data
    ],
)
def test_pairs_that_help_or_cannot_tell_are_not_red(pairs: PairLosses, level: str) -> None:
    assert levels(RunHistory(SFT, [], [], replace(BATCHES, pairs=pairs)))["prompt and completion"] == level


@pytest.mark.parametrize(
    ("words", "level", "cause"),
    [
        (WordOverlap(19.0, 5.4, 0.6), "green", ""),  # a small model, and whole rows
        (WordOverlap(0.4, 12.0, 0.5), "red", "shuffled"),
        (WordOverlap(2.5, 12.0, 0.5), "yellow", "does not use the prompts"),
        (
            WordOverlap(0.4, 12.0, 0.02),
            "yellow",
            "does not use the prompts",
        ),  # labels share no words, whole or not
        (WordOverlap(0.4, 1.0, 0.5), "yellow", "does not use the prompts"),  # nor does this text with itself
    ],
)
def test_words_tell_shuffled_rows_from_a_weak_model(words: WordOverlap, level: str, cause: str) -> None:
    asked = PairLosses(3.61, 3.62, 1.8)
    weak = replace(BATCHES, pairs=asked, pairs_now=replace(asked, step=80), words=words)
    (flag,) = (flag for flag in judge(RunHistory(SFT, [], [], weak)) if flag.name == "prompt and completion")
    assert (flag.level, cause in flag.cause) == (level, True)
    if level == "yellow":  # before the first step it is only known that the base is weak
        assert levels(RunHistory(SFT, [], [], replace(weak, pairs_now=None)))["prompt and completion"] == "green"
    strong = replace(weak, pairs=PairLosses(3.2, 3.6, 9.0))
    assert levels(RunHistory(SFT, [], [], strong))["prompt and completion"] == "green"


def made_up(kind: str, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Prompts about some topic each, and completions: about the same ("whole"), another ("shuffled"), or a label."""
    draw = random.Random(0)
    topics = [draw.sample(range(100, 1100), 12) for _ in range(128)]
    draw = random.Random(seed)

    def text(i: int, length: int) -> list[int]:
        return [draw.choice(topics[i]) if draw.random() < 0.5 else draw.randrange(100) for _ in range(length)]

    about = {
        "whole": lambda i: text(i, 8),
        "shuffled": lambda i: text((i * 37 + 5) % 128, 8),
        "label": lambda i: [i % 2],
    }
    return [(text(i, 40), about[kind](i)) for i in range(128)]


@pytest.mark.parametrize(
    ("kind", "t", "alike"), [("whole", 10, True), ("shuffled", None, True), ("label", None, False)]
)
def test_shared_words(kind: str, t: float | None, alike: bool) -> None:
    words = shared_words(made_up(kind))
    assert words is not None
    assert words.t > t if t is not None else abs(words.t) < 2.5
    assert words.t_within > 7
    assert (words.alike >= 0.25) is alike


def test_too_few_examples_have_no_words() -> None:
    assert shared_words(made_up("whole")[:20]) is None


def test_shared_words_are_the_closed_form_where_each_example_has_its_own() -> None:
    n = 40
    actual = shared_words([([1, i, i, 100 + i], [1, i]) for i in range(2, n + 2)])  # 1 is in all: log(n / n) = 0
    assert actual is not None
    assert actual.t == 0  # every gain is log(n): no scatter, and no t
    half = shared_words([([1, i, i, 100 + i], [1, i if i % 2 else 0]) for i in range(2, n + 2)])
    gains = [math.log(n) * (i % 2) for i in range(n)]
    assert half is not None
    assert half.t == pytest.approx(np.mean(gains) / (np.std(gains, ddof=1) / math.sqrt(n)))


def test_scatter_is_the_batchs_only_where_it_is_small() -> None:
    noisy = falling(start=2.2, scatter=0.8, seed=3)
    assert levels(run_of(noisy))["loss noise"] == "yellow"
    assert red(run_of(noisy, replace(SFT, examples_per_step=1))).name == "loss noise"


def test_rows_of_many_steps_scatter_less_and_are_held_to_the_same() -> None:
    averaged = falling(start=2.05, scatter=0.8 / math.sqrt(10), seed=3)
    few = replace(SFT, examples_per_step=1)
    assert "loss noise" not in [flag.name for flag in red_flags(judge(run_of(averaged, few)))]
    assert red(run_of(averaged, few, **{"seen/steps": 10})).name == "loss noise"


# ------------------------------------------------------------------------------------------------------------- every method


def test_a_weight_that_does_not_move_is_told_from_one_that_gets_no_gradient() -> None:
    still = {"seen/moved": 0.0}
    assert "optimizer" in red(run_of([3.0] * 20, **still)).cause
    assert "no gradient" in red(run_of([3.0] * 20, grad_norm=0.0, **still)).cause
    assert levels(run_of(falling(20), **{"seen/moved": 1e-6}))["adapter moves"] == "green"
    assert "adapter moves" not in levels(run_of([3.0] * 20, learning_rate=0.0, **still))


def test_a_loader_that_is_waited_for() -> None:
    slow = {"seen/seconds": 0.1, "seen/wait": 0.06, "seen/steps": 1}
    assert red(run_of(falling(30), **slow)).name == "waiting for data"
    assert levels(run_of(falling(30), **(slow | {"seen/wait": 0.03})))["waiting for data"] == "yellow"
    first = [5.0, 5.0, *[0.0] * 28]  # workers that start
    assert levels(run_of(falling(30), **(slow | {"seen/wait": first})))["waiting for data"] == "green"


def test_a_warm_up_longer_than_the_run_is_named() -> None:
    assert red(run_of(falling(20), replace(SFT, warmup_steps=500))).knob == "train.warmup_steps"


@pytest.mark.parametrize(
    ("setting", "norm", "level"),
    [
        (SFT, 1.0, "green"),
        (SFT, 20.0, "yellow"),
        (SFT, 200.0, "red"),
        (SFT, 0.0, "red"),
        (GSPO, 0.01, "green"),
        (GSPO, 1.1, "green"),  # as in a run that learns, in which most gradients are not clipped
        (GSPO, 5.0, "yellow"),
        (GSPO, 500.0, "red"),
        (DPO, 5.0, "green"),
    ],
)
def test_gradient_norms_are_held_to_their_methods_limit(setting: RunSettings, norm: float, level: str) -> None:
    assert levels(run_of([3.0] * 40, setting, None, grad_norm=norm))["gradient norm"] == level


# ---------------------------------------------------------------------------------------------------------- one fault each, rl


def rl(**more: Any) -> RunHistory:
    usual: dict[str, Any] = {"reward": 0.3, "reward_std": 0.2, "frac_reward_zero_std": 0.1, "entropy": 0.4}
    usual |= {"completions/clipped_ratio": 0.1, "policy/kl_new_old": 1e-4, "policy/clipped_ratio_fraction": 0.3}
    return run_of([0.01] * 60, GSPO, None, **(usual | {"grad_norm": 0.1} | more))


def test_a_whole_policy_run_is_green() -> None:
    assert set(levels(rl()).values()) == {"green"}


@pytest.mark.parametrize(
    ("more", "name", "cause"),
    [
        ({"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, "reward varies", "dead"),
        ({"reward": 0.7, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, "reward varies", "constant"),
        # TRL 1.15: the deviation of equal float32 values need not be 0, and then no group counts as one without variance.
        ({"reward": 0.7, "reward_std": 6e-8, "frac_reward_zero_std": 0.0}, "reward varies", "constant"),
        ({"reward": None, "reward_std": None, "frac_reward_zero_std": 0.0}, "reward varies", "None or NaN"),
        ({"frac_reward_zero_std": 0.9}, "reward varies", "always or never"),
        ({"completions/clipped_ratio": 1.0}, "completions end", "no completion ends"),
        ({"completions/clipped_ratio": 0.9}, "completions end", "cut before they end"),
        ({"entropy": [2.0 * 0.9**i for i in range(60)]}, "entropy", "collapses"),
        ({"policy/kl_new_old": 3.0}, "KL to the sampler", "rate is too high"),
    ],
)
def test_what_is_wrong_with_a_policy(more: dict[str, Any], name: str, cause: str) -> None:
    flag = red(rl(**more))
    assert flag.name == name
    assert cause in flag.cause


@pytest.mark.parametrize(
    ("shares", "cause", "knob"),
    [
        ((0.8, 0.78), "rounding moves the ratios", "train.epsilon, left out"),
        ((0.8, 0.02), "updates move the ratios", "train.learning_rate, lower"),
        ((0.8, None), "updates move the ratios", "train.learning_rate, lower"),  # not measured, as under unsloth
    ],
)
def test_causes_of_ratios_outside_the_clip(shares: tuple[float, float | None], cause: str, knob: str) -> None:
    clipped, by_rounding = shares
    rows = rows_of([0.01] * 40, **{"policy/clipped_ratio_fraction": clipped, "policy/staleness": 64.0})
    for row in rows[::4]:  # on the policy's own rollout no ratio is outside
        row |= {"policy/clipped_ratio_fraction": 0.0, "policy/staleness": 0.0}
    rows[0] |= {} if by_rounding is None else {"policy/clipped_by_rounding": by_rounding}
    flag = next(flag for flag in judge(RunHistory(GSPO, rows[:10], rows[10:])) if flag.name == "clip fraction")
    assert flag.level == "yellow"
    assert flag.cause.startswith(cause)
    assert flag.knob.startswith(knob)
    assert flag.evidence.startswith("80% of the ratios of steps")


def test_a_rate_that_is_too_small_is_not_to_be_lower_for_the_clip() -> None:
    rows = rows_of([0.01] * 40, **{"policy/clipped_ratio_fraction": 0.8, "policy/staleness": 64.0})
    setting = replace(GSPO, learning_rate=1e-7, max_steps=40, spacings_per_rate=100.0)
    knobs = {flag.name: flag.knob for flag in judge(RunHistory(setting, rows[:10], rows[10:]))}
    assert knobs["clip fraction"] == "train.epsilon, higher"
    assert knobs["update size"] == "train.learning_rate, higher"


def test_completions_that_grow_until_they_are_cut_have_another_cause_and_more_time() -> None:
    grows = [0.1] * 20 + [0.95] * 40
    assert "without an end" in red(rl(**{"completions/clipped_ratio": grows})).cause
    assert levels(rl(**{"completions/clipped_ratio": [0.1] * 48 + [0.95] * 12}))["completions end"] == "yellow"


@pytest.mark.parametrize(
    ("shares", "cause"),
    [
        ([0.55] * 10 + [0.40] * 50, "fewer than at first"),
        ([0.55] * 60, "are cut before they end"),
        ([0.20] * 10 + [0.45] * 50, "without an end"),
    ],
)
def test_a_cause_of_cut_completions_follows_their_change(shares: list[float], cause: str) -> None:
    run = rl(**{"completions/clipped_ratio": shares})
    flags = judge(replace(run, setting=replace(run.setting, rollout=64)))
    (flag,) = (flag for flag in flags if flag.name == "completions end")
    assert (flag.level, cause in flag.cause) == ("yellow", True), flag


@pytest.mark.parametrize("losses", [[3.0] * 8, falling(8, scatter=0)])
@pytest.mark.parametrize(("rate", "is_small"), [(1e-7, True), (1e-3, False)])
def test_a_small_update_is_yellow_until_the_loss_falls(losses: list[float], rate: float, is_small: bool) -> None:
    setting = replace(SFT, learning_rate=rate, max_steps=20, spacings_per_rate=100.0)
    expected = "yellow" if is_small and losses[-1] == losses[0] else "green"
    assert levels(run_of(losses, setting))["update size"] == expected
    assert "update size" not in levels(run_of(losses[:3], setting))


@pytest.mark.parametrize(("after", "level"), [(1.959, "green"), (2.326, "yellow")])
def test_a_held_out_loss_that_fell_says_that_a_small_update_is_enough(after: float, level: str) -> None:
    setting = replace(SFT, learning_rate=1e-7, max_steps=20, spacings_per_rate=100.0)
    run = replace(run_of([3.0, 2.0] * 10, setting), held_out=[2.371, after])  # too noisy to see a fall
    assert levels(run)["update size"] == level


def test_scatter_is_no_fault_where_the_held_out_loss_fell() -> None:
    noisy = run_of([2.2, 1.1, 1.9, 0.9] * 5, replace(SFT, examples_per_step=4))
    assert levels(noisy)["loss noise"] == "red"
    assert levels(replace(noisy, held_out=[2.371, 0.86]))["loss noise"] == "green"


def test_a_loss_that_swings_far_above_its_start_has_the_rate_as_its_one_cause() -> None:
    swings = [2.242, 2.206, 7.899, 6.978, 3.073, 8.091, 13.281, 6.429, 4.53, 6.676, 4.835, 2.97, 9.801, 5.725]
    run = run_of([*swings, 5.266, 4.583, 8.9, 5.403, 3.767, 3.111], replace(SFT, learning_rate=1e-2))
    blank = [SampleCounts(0, 4), SampleCounts(20, 4, blank=4)]
    flags = judge(replace(run, written=blank))
    assert [flag.name for flag in flags if flag.level == "red"] == ["loss trend"]
    assert "rate is too high" in flags[0].cause


def test_rewards_are_read_at_the_steps_that_sampled() -> None:
    rows = rows_of([0.01] * 40, entropy=0.4)
    for row in rows[::4]:
        row |= {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    assert "steps 9 to 37" in red(RunHistory(GSPO, rows[:10], rows[10:])).evidence


# ---------------------------------------------------------------------------------------------------------------------- dpo


def dpo(right: float, loss: float, answers: AnswerOverlap | None = None) -> RunHistory:
    draw = random.Random(0)
    accuracies = [sum(draw.random() < right for _ in range(16)) / 16 for _ in range(100)]
    losses = [loss + draw.gauss(0, 0.01) for _ in range(100)]
    return run_of(losses, DPO, replace(BATCHES, answers=answers), **{"rewards/accuracies": accuracies})


def test_preferences() -> None:
    assert levels(dpo(0.8, 0.5))["preferences"] == "green"
    assert levels(dpo(0.5, 0.69))["preferences"] == "yellow"
    assert "mixed up" in red(dpo(0.5, 0.71)).cause
    assert "rate is too high" in red(dpo(0.5, 1.0)).cause


@pytest.mark.parametrize(
    ("answers", "level"),
    [
        (AnswerOverlap(512, 12.0, 20.0, 0.1), "yellow"),  # whole, and not learned yet
        (AnswerOverlap(512, -0.8, 20.0, 0.1), "red"),
        (AnswerOverlap(512, -0.8, 20.0, 0.7), "yellow"),  # both answers are about their prompt: words cannot tell them
        (AnswerOverlap(512, -0.8, 1.0, 0.1), "yellow"),  # none is
    ],
)
def test_words_tell_pairs_that_are_mixed_up_from_a_model_that_cannot_tell_them(
    answers: AnswerOverlap, level: str
) -> None:
    assert levels(dpo(0.5, 0.693, answers))["preferences"] == level
    assert levels(dpo(0.8, 0.5, answers))["preferences"] == "green"


@pytest.mark.parametrize(("kind", "mixed"), [("whole", False), ("mixed", True), ("both", False)])
def test_words_shared_by_answers(kind: str, mixed: bool) -> None:
    draw = random.Random(1)
    whole, other, again = made_up("whole"), made_up("shuffled"), made_up("whole", seed=2)
    rows = []
    for (prompt, right), (_, wrong), (_, second) in zip(whole, other, again, strict=True):
        both = [right, second if kind == "both" else wrong]
        if kind != "whole" and draw.random() < 0.5:
            both.reverse()
        rows.append((prompt, both[0], both[1]))
    actual = shared_by_answers(rows)
    assert actual is not None
    assert are_mixed_up(actual) is mixed
    assert (actual.t > 3) is (kind == "whole")


# ------------------------------------------------------------------------------------------------------- settling, thresholds


def test_a_follower_keeps_its_own_level_where_its_cause_is_not_red() -> None:
    yellow, own = Flag("loss trend", "yellow", "", "a", "b"), Flag("gradient norm", "red", "", "c", "d")
    assert resolve_consequences([yellow, own])[0] is own


def test_the_answer_names_every_reason() -> None:
    known = [Flag(name, "red", "", f"the cause of {name}", f"the.knob.{name}") for name in "xy"]
    safe, why = safe_to_scale(run_of(falling()), known[:1], known[1:])
    assert (safe, bool(safe)) == ("no", False)
    assert all(f"{name}: the cause of {name} (the.knob.{name})" in why for name in "xy")


def test_thresholds_are_overridden_by_name_and_a_wrong_name_is_told() -> None:
    from cogumi.config.schema import load_config

    values = {"model": {"name": "x"}, "data": {"source": "x"}, "cogumi": {"method": "sft"}}
    run = load_config(values, cogumi__flags__grad_norm_high=20)
    assert run.cogumi.flags.grad_norm_high == 20
    with pytest.raises(UsageError, match=r"cogumi\.flags\.grad_norm_hi.*did you mean cogumi\.flags\.grad_norm_high"):
        load_config(values, cogumi__flags__grad_norm_hi=20)
    with pytest.raises(UsageError, match=r"unknown key `cogumi\.flags\.loss_rise`; valid: grad_norm_high"):
        load_config(values, cogumi__flags__loss_rise=0.2)
    high = run_of(falling(40), grad_norm=150.0)
    assert levels(high)["gradient norm"] == "red"
    assert levels(replace(high, thresholds=Thresholds(grad_norm_high=200)))["gradient norm"] == "green"


def sampled(**figures: Any) -> dict[str, str]:
    """Levels of a GSPO run of twelve steps that sample, with these figures of the sampler."""
    keys = {"sampling/" + name.replace("__", "/"): value for name, value in figures.items()}
    return levels(run_of([0.1] * 12, GSPO, None, reward=0.5, **keys))


def test_a_sampler_that_does_not_follow_is_red_and_explains_the_difference() -> None:
    follows = sampled(probe__lag=0.01, probe__moved=0.2, probe__difference=0.02)
    assert follows["sampler's weights"] == follows["sampler and trainer"] == "green"
    lags = {"sampling/probe/lag": [0.1] * 11 + [1.0], "sampling/probe/moved": 0.2, "sampling/probe/difference": 0.9}
    stale = run_of([0.1] * 12, GSPO, None, reward=0.5, **lags)
    collected = {flag.name: flag for flag in judge(stale)}
    assert collected["sampler's weights"].level == "red"
    assert "at step 12 it lacks 100% of the 0.2 nats" in collected["sampler's weights"].evidence
    assert collected["sampler and trainer"].cause == "follows from sampler's weights"
    assert sampled(probe__lag=0.03, probe__moved=0.2)["sampler's weights"] == "yellow"


def test_a_run_without_another_sampler_has_none_of_its_flags() -> None:
    actual = levels(run_of([0.1] * 12, GSPO, None, reward=0.5))
    assert not {"sampler's weights", "sampler and trainer"} & actual.keys()


def test_the_difference_of_two_engines_has_limits() -> None:
    assert sampled(sampling_logp_difference__mean=0.02, probe__difference=9.0)["sampler and trainer"] == "green"
    assert sampled(sampling_logp_difference__mean=0.2)["sampler and trainer"] == "yellow"
    assert sampled(sampling_logp_difference__mean=0.6)["sampler and trainer"] == "red"
