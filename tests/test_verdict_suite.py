"""The verdict on real runs: each broken in one way, or whole. All of them in the slow lane; a few of each kind here."""

from pathlib import Path

import pytest

from benchmarks.verdict_runs import BROKEN, HELD_OUT, WHOLE, Case, judged

QUICK = {
    "sft, a third of the rows masked",
    "sft, NaN in the base",
    "sft, adapter frozen",
    "sft, padded with the end token",
    "sft, learning rate x 100",
    "gspo, dead reward",
    "sft",
}


def cases(all_of_them: tuple[Case, ...]) -> list[object]:
    slow = pytest.mark.slow
    return [pytest.param(each, id=each.name, marks=[] if each.name in QUICK else slow) for each in all_of_them]


@pytest.mark.parametrize("case", cases((*BROKEN, *(case for case in HELD_OUT if case.broken))))
def test_a_broken_run_is_stopped_for_its_own_cause(case: Case, tmp_path: Path) -> None:
    found = judged(case, tmp_path, "stop")
    assert found.reds, f"{case.name}: nothing was red, yellow was {found.yellow}"
    step, flag = found.reds[0]
    assert (flag.name, case.cause in flag.cause) == (case.flag, True), str(flag)
    assert flag.knob
    assert step <= found.steps <= 100


@pytest.mark.parametrize("case", cases((*WHOLE, *(case for case in HELD_OUT if not case.broken))))
def test_a_whole_run_is_not_stopped(case: Case, tmp_path: Path) -> None:
    found = judged(case, tmp_path, "warn")
    # How fast it goes is up to whoever else uses this machine; that rule is held to clocks of its own in test_flags.py.
    reds = [flag for _, flag in found.reds if flag.name != "tokens per second"]
    assert not reds, "; ".join(map(str, reds))
    assert found.steps == 100


def test_the_suite_is_as_large_as_it_has_to_be() -> None:
    assert len(BROKEN) >= 12
    assert len(WHOLE) >= 8
    names = [case.name for case in (*BROKEN, *WHOLE, *HELD_OUT)]
    assert len(set(names)) == len(names)
