"""Maths answers, compared as expressions by the library math-verify in a process of its own.

Completions can hold what takes sympy hours and all memory, such as 9^{9^9}. math-verify's own time-outs are signals, which
fail outside the main thread, and what it did not finish is wrong. Here the other process is killed, and the completion is not
scored. `trl.rewards.accuracy_reward` is the same library with these signals. It reads answers in LaTeX alone.
"""

import atexit
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Annotated, Any

from pydantic import Field

from cogumi.core.errors import require_extra
from cogumi.core.worker import Worker
from cogumi.data.chat import text_of
from cogumi.rewards.functions import Completion

# An answer with one of these says itself where its expression is; another one is an expression as a whole.
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
BEFORE_ANSWER = "####"  # GSM8K
MEMORY_BYTES = 4 << 30  # of address space, of the other process
START_SECONDS = 60.0
UNREADABLE, LATE = "unreadable", "late"
NOT_SCORED = {UNREADABLE: None, LATE: math.nan}
_lock = Lock()
_workers: list[Worker] = []  # none or one


def math_answer(
    completions: Sequence[Completion],
    answer: Sequence[Any],
    seconds: Annotated[float, Field(gt=0, le=3600)] = 5.0,
    log_metric: Any = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""1.0 where the completion's answer equals `answer` as an expression, else 0.0; NaN or None where that is not known.

    A completion's answer is its \boxed{}, else its last formula or number. `answer` is an expression (1/2, \frac12), or text
    with one in \boxed{}, in $...$ or after ####. None: `answer` holds no expression. NaN, so that the whole completion is not
    scored: the comparison takes longer than `seconds`. Their shares are the metrics `math_answer/unreadable` and
    `math_answer/late`.
    """
    pairs = zip(completions, answer, strict=True)
    found = [UNREADABLE if gold is None else compare_apart(str(gold), text_of(each), seconds) for each, gold in pairs]
    if log_metric is not None:
        for why in (UNREADABLE, LATE):
            log_metric(f"math_answer/{why}", found.count(why) / max(len(found), 1))
    return [float(each) if isinstance(each, bool) else NOT_SCORED[each] for each in found]


def compare_apart(gold: str, text: str, seconds: float) -> bool | str:
    """`compare` in the other process, which is started where there is none; LATE where it had to be ended."""
    with _lock:
        if not _workers:
            _workers.append(start_worker())
        try:
            _workers[0].send(compare, gold, text, seconds)
            answer: bool | str = _workers[0].receive(seconds)
        except RuntimeError:  # it took too long, or the kernel ended it for its memory or its processor time
            close()
            return LATE
        return answer


def start_worker() -> Worker:
    require_extra("math_verify", "rewards", key="cogumi.rewards")
    worker = Worker("math-verify", {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    worker.send(prepare)
    worker.receive(START_SECONDS)
    return worker


@atexit.register
def close() -> None:
    while _workers:
        _workers.pop().close()


# ------------------------------------------------------------------------------------------------- of the other process


def prepare() -> None:
    """Import the library and limit the memory: an expression may be as large as one likes."""
    import resource

    import math_verify  # noqa: F401

    with suppress(ValueError):  # a smaller limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def compare(gold: str, text: str, seconds: float) -> bool | str:
    """Whether the expression in a text equals the one in `gold`; UNREADABLE where gold has none."""
    import resource

    from math_verify import parse, verify

    # The process ends by itself even if the one that asks is gone.
    used, hard = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 2, hard))
    expected = parse(delimited(gold), parsing_timeout=None)
    if not expected:
        return UNREADABLE
    return bool(verify(expected, parse(text, parsing_timeout=None), timeout_seconds=None))


def delimited(gold: str) -> str:
    """The answer in a form in which math-verify reads all of it: without a delimiter it reads numbers alone."""
    gold = gold.rpartition(BEFORE_ANSWER)[2].strip()
    return gold if not gold or any(mark in gold for mark in DELIMITERS) else f"\\boxed{{{gold}}}"
