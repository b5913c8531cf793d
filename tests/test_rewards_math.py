"""Maths answers compared as expressions, in a process of their own."""

import math
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

import pytest
from golden import Golden

from cogumi.rewards import math_answers
from cogumi.rewards.math_answers import math_answer
from cogumi.rewards.named_rewards import try_reward


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (r"so it is \boxed{\frac12}", "0.5", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        ("The answer is 42.", 42, 1.0),
        ("$x^2-1$", "(x-1)(x+1)", 1.0),
        (r"\boxed{2\sqrt{2}}", r"$\sqrt{8}$", 1.0),
        (r"\boxed{(1,2)}", "(1, 2)", 1.0),
        (r"\boxed{(2,1)}", "(1, 2)", 0.0),
        ("3 times 4 is 12, and 12 - 1 = 11", "a long way\n#### 11", 1.0),
        ("1,234", "1234", 1.0),
        (r"I thought 5, and it is \boxed{6}", "5", 0.0),
        (r"$x = 3$", "3", 1.0),
        ("0.333", "1/3", 0.0),
        (r"\boxed{0.00001}", "1e-05", 1.0),  # as CSV has a float
        (r"\boxed{1500}", " 1.5E3", 1.0),
        (r"\boxed{e-5}", "1e-05", 0.0),
        ("no answer", "3", 0.0),
        ("", "3", 0.0),
        ("B", "B", 1.0),
        ("3,5\n", "3,5", 1.0),
        ("", "a way\n#### ", None),
        ("7", "", None),
        ("7", None, None),
    ],
)
def test_an_answer_is_an_expression(completion: str, answer: Any, right: float | None) -> None:
    assert math_answer([completion], answer=[answer]) == [right]
    assert math_answer([[{"role": "assistant", "content": completion}]], answer=[answer]) == [right]


def test_what_takes_too_long_is_not_scored_and_the_next_one_is() -> None:
    """Outside the main thread, where math-verify's own time-outs raise."""
    logged: dict[str, float] = {}
    collected: list[Any] = []
    math_answer(["1"], answer=["1"])  # the process is there

    def score() -> None:
        inputs = [r"\boxed{9^{9^{9}}}", r"\boxed{3}", "4", "5"]
        answers = ["3", "3", None, "6"]
        collected.extend(
            math_answer(inputs, answer=answers, seconds=0.5, log_metric=lambda *pair: logged.update([pair]))
        )

    began = time.monotonic()
    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert time.monotonic() - began < 30
    assert math.isnan(collected[0])
    assert collected[1:] == [1.0, None, 0.0]
    assert logged == {"math_answer/late": 0.25, "math_answer/unreadable": 0.25}


def test_a_process_that_was_killed_is_another_one_next_time() -> None:
    assert math_answer(["1"], answer=["1"]) == [1.0]
    worker = math_answers._workers["math_verify"]
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    lost, scored = math_answer(["1", "1"], answer=["1", "1"])
    assert math.isnan(lost or 0.0)
    assert scored == 1.0
    assert math_answers._workers["math_verify"].process.pid != worker.process.pid


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    math_answers.close()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with golden.raises("rewards", key="cogumi.rewards", message="math_verify"):
        try_reward(math_answer, {"prompt": "2 + 2 = ", "answer": "4"}, 2)


def test_the_process_ends_by_itself_where_the_asking_one_is_gone() -> None:
    math_answer(["1"], answer=["1"])
    worker = math_answers._workers["math_verify"]
    worker.send(resource.getrlimit, resource.RLIMIT_AS)
    assert worker.receive(60)[0] <= math_answers.MEMORY_BYTES
    worker.send(math_answers.limited, 0.2, math_answers.compare, "3", r"\boxed{9^{9^{9}}}")
    assert worker.process.wait(timeout=60) == -signal.SIGXCPU
    math_answers.close()
