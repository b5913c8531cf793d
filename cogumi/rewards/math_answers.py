"""Maths answers, compared as expressions by the library math-verify in a separate process.

A completion can hold what takes sympy hours and all memory, such as 9^{9^9}. math-verify's own timeouts are signals, which
fail outside the main thread, and count unfinished comparisons as wrong. Here the process is killed and the completion is
not scored. `trl.rewards.accuracy_reward` uses the same library with these signals, and reads answers in LaTeX only.
"""

import atexit
import math
import os
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from threading import Lock
from typing import Annotated, Any

from pydantic import Field

from cogumi.core.errors import require_extra
from cogumi.core.worker import Worker
from cogumi.data.chat import text_of
from cogumi.rewards.functions import Completion, spellings_of

# An answer with one of these marks its expression; another one is an expression as a whole.
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
BEFORE_ANSWER = "####"  # GSM8K
MEMORY_BYTES = 4 << 30  # of address space of the worker
START_SECONDS = 60.0
EXTRAS = {"math_verify": "rewards", "reasoning_gym": "reasoning-gym"}
UNREADABLE, LATE = "unreadable", "late"
NOT_SCORED = {UNREADABLE: None, LATE: math.nan}
_lock = Lock()
_workers: dict[str, Worker] = {}  # by the module that each has imported


def math_answer(
    completions: Sequence[Completion],
    answer: Sequence[Any],
    seconds: Annotated[float, Field(gt=0, le=3600)] = 5.0,
    log_metric: Any = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""Score 1.0 if the completion's answer equals `answer` as an expression, else 0.0; NaN or None if unknown.

    A completion's answer is its \boxed{}, else its last formula or number. `answer` is an expression (1/2, \frac12), or text
    with one in \boxed{}, in $...$ or after ####. None: `answer` holds no expression. NaN, so that the whole completion is not
    scored: the comparison takes longer than `seconds`. Their shares are the metrics `math_answer/unreadable` and
    `math_answer/late`.
    """
    pairs = zip(completions, map(spellings_of, answer), strict=True)
    compared = partial(call_apart, "math_verify", seconds, compare)
    results = [compared(golds[0], text_of(text)) if golds else UNREADABLE for text, golds in pairs]
    if log_metric is not None:
        for why in (UNREADABLE, LATE):
            log_metric(f"math_answer/{why}", results.count(why) / max(len(results), 1))
    return [float(result) if isinstance(result, bool) else NOT_SCORED[result] for result in results]


def call_apart(module: str, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in the worker of a module, which is started if there is none; LATE if it had to be killed."""
    with _lock:
        if module not in _workers:
            require_extra(module, EXTRAS.get(module, module), key="cogumi.rewards")
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
            _workers[module] = Worker(module, environment)
            _workers[module].send(prepare, module)
            _workers[module].receive(START_SECONDS)
        try:
            _workers[module].send(limited, seconds, function, *arguments)
            return _workers[module].receive(seconds)
        except RuntimeError:  # too slow, or killed by the kernel for its memory or processor time
            _workers.pop(module).close()
            return LATE


@atexit.register
def close() -> None:
    while _workers:
        _workers.popitem()[1].close()


# ------------------------------------------------------------------------------------------------------- in the worker


def prepare(module: str) -> None:
    """Import the library and limit the memory: an expression can be arbitrarily large."""
    import_module(module)
    with suppress(ValueError):  # a smaller limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def limited(seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with a limit of processor time, which ends the worker even if its parent is gone."""
    used, hard = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 2, hard))
    return function(*arguments)


def compare(gold: str, text: str) -> bool | str:
    """Tell whether the expression in a text equals the one in `gold`; UNREADABLE if gold has none."""
    from math_verify import parse, verify

    gold = gold.rpartition(BEFORE_ANSWER)[2].strip()
    if gold and text.strip() == gold:  # math-verify reads a letter or a pair in \boxed{} alone
        return True
    # Without a delimiter math-verify reads numbers only.
    is_delimited = not gold or any(mark in gold for mark in DELIMITERS)
    expected = parse(gold if is_delimited else f"\\boxed{{{gold}}}", parsing_timeout=None)
    if not expected:
        return UNREADABLE
    return bool(verify(expected, parse(text, parsing_timeout=None), timeout_seconds=None))
