"""The verdict on real runs: each broken in one way, or whole. Three of them are in the fast tier."""

from dataclasses import replace
from pathlib import Path

import pytest
from verdict_cases import BROKEN, HELD_OUT, OWN, WHOLE, YELLOW
from verdict_runs import Case, judged

from cogumi.health.flags import Flag

QUICK = {"sft, NaN in the base", "sft, adapter frozen", "sft"}
# Whole runs that differ from others in a rate, a seed or a batch.
VARIANTS = {
    "sft, a fifth of the rate", "sft, constant rate, batch of 8", "gspo, another reward", "grpo, token level",
    "dpo, a third of the rate", "held out: sft, another seed", "held out: gspo, another seed", "own chat, batch of 4",
    "own chat, small rate", "own code, small rate", "own pairs, small rate", "own rewards, small rate",
    "own code, large rate", "own pairs, large rate", "held out: sft, a rate too low",
    "sft, a base that was never trained", "dpo, a base that cannot tell them yet",
}  # fmt: skip


def cases(all_of_them: tuple[Case, ...]) -> list[object]:
    slow = pytest.mark.slow("a training of a hundred steps")
    marks = dict.fromkeys(QUICK, ()) | dict.fromkeys(VARIANTS, (slow, pytest.mark.sweep))
    return [pytest.param(each, id=each.name, marks=marks.get(each.name, slow)) for each in all_of_them]


@pytest.mark.parametrize("case", cases((*BROKEN, *(case for case in HELD_OUT if case.broken))))
def test_a_broken_run_is_stopped_for_its_own_cause(case: Case, tmp_path: Path) -> None:
    actual = judged(case, tmp_path, "stop")
    assert actual.reds, f"{case.name}: nothing was red, yellow was {actual.was_yellow}"
    step, flag = actual.reds[0]
    assert case.explained_by(flag), str(flag)
    assert flag.knob
    assert step <= actual.steps <= 100
    assert actual.safe.startswith("no: "), actual.safe


@pytest.mark.slow("trainings of 8 to 40 steps")
@pytest.mark.parametrize(("case", "latest"), [pytest.param(*item, id=item[0].name) for item in YELLOW])
def test_a_weak_run_has_a_yellow_flag_by_its_step(case: Case, latest: int, tmp_path: Path) -> None:
    actual = judged(case, tmp_path, "warn")
    steps = [step for step, flag in actual.yellows if case.explained_by(flag)]
    assert steps, actual.was_yellow
    assert steps[0] <= latest


@pytest.mark.parametrize("case", cases((*WHOLE, *(case for case in HELD_OUT if not case.broken))))
def test_a_whole_run_is_not_stopped(case: Case, tmp_path: Path) -> None:
    actual = judged(case, tmp_path, "warn")
    assert not actual.alarms, "; ".join(map(str, actual.alarms))
    assert actual.steps == 100
    if case.name == "sft":
        assert actual.safe.startswith("yes: the loss fell"), actual.safe


@pytest.mark.parametrize("case", cases(OWN))
def test_a_whole_run_on_ones_own_data_raises_no_flag(case: Case, tmp_path: Path) -> None:
    actual = judged(case, tmp_path, "warn")
    assert actual.right, "; ".join([*map(str, actual.alarms), *actual.was_yellow.values()])
    assert actual.steps == 100
    if case.method != "gspo":
        assert actual.safe.startswith("yes: the loss fell"), actual.safe


def test_a_case_without_a_flags_name_is_held_to_its_cause_and_key() -> None:
    case = Case("too fast", "sft", cause="rate is too high", knob="train.learning_rate")
    right = Flag("loss trend", "red", "", "the learning rate is too high", "train.learning_rate, to a tenth")
    assert case.broken
    assert case.explained_by(right)
    assert case.explained_by(replace(right, name="token frequencies"))
    assert not case.explained_by(replace(right, knob="the trainer's data_collator"))
    assert not case.explained_by(replace(right, cause="the labels are in another order"))
    assert not replace(case, flag="token frequencies").explained_by(right)
