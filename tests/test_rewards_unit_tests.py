"""The reward for unit tests that pass: what scores, what fails, what is not scored, and what earns nothing by a trick."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.methods import gspo
from cogumi.rewards import rewards_of
from cogumi.rewards.named_rewards import try_reward
from cogumi.rewards.unit_tests import source_of, unit_tests
from cogumi.sandbox import Limits, Sandbox

ASSERTS = "assert double(2) == 4\nassert double(-1) == -2\n"
CLASS = """
import unittest
class Doubles(unittest.TestCase):
    def test_two(self):
        self.assertEqual(double(2), 4)
    def test_text(self):
        self.assertEqual(double("a"), "aa")
unittest.main()
"""
FUNCTIONS = "import math\ndef test_two(): assert math.isclose(double(2), 4)\n"
GOOD, BAD = "def double(x): return 2 * x\n", "def double(x): return x\n"


@pytest.fixture(autouse=True)
def one_sandbox(monkeypatch: pytest.MonkeyPatch, shared: Sandbox) -> None:
    monkeypatch.setattr("cogumi.rewards.unit_tests.default_sandbox", lambda: shared)


@pytest.fixture(scope="module")
def shared():
    with Sandbox(2, Limits(seconds=3, cpu_seconds=1)) as sandbox:
        yield sandbox


def scores(programs: list[str], tests: str = ASSERTS, **columns: Any) -> list[float | None]:
    return unit_tests(completions=programs, tests=[tests] * len(programs), **columns)


@pytest.mark.parametrize("tests", [ASSERTS, CLASS, FUNCTIONS])
def test_a_completion_that_passes_and_one_that_fails(tests: str):
    programs = [GOOD, BAD, "def double(x:", "raise KeyError", "", GOOD + "print('x' * 100_000)"]
    assert scores(programs, tests) == [1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "tests",
    [
        '["assert double(2) == 4"]',  # MBPP's list, as JSON text
        '{"inputs": ["2"], "outputs": ["4"]}',  # APPS
        {"input": ["2"], "output": ["4"]},
        [{"input": "2", "output": "4"}],
        4,
        "# none",
        "def helper():\n    assert double(2) == 4",
        "class TestDouble:\n    def test_two(self): assert double(2) == 4",
        "async def test_two(): assert double(2) == 4",
        "print(double(2) == 4)",
        "assert (double(2) == 4, 'twice')",
        "def test_two(): return double(2) == 4",
        "import unittest\nclass Doubles(unittest.TestCase):\n    def two(self): self.assertEqual(double(2), 4)",
        '"""\nassert double(2) == 4\n"""',
        "def test_two(tmp_path): assert double(2) == 4",  # pytest's
    ],
)
def test_tests_that_every_program_passes_are_refused(tests: Any):
    with pytest.raises(UsageError, match="every program would pass `tests` without an assert"):
        unit_tests(completions=[BAD], tests=[tests])


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("double(2) == 4", "every program would pass `tests` that compare without an assert: double(2) == 4"),
        (["assert double(2) == 4", "double(3) in (6,)"], "compare without an assert: double(3) in (6,)"),
        ("assert double(2) === 4", "no program could pass `tests` that are no Python (invalid syntax"),
        ("```python\nassert double(2) == 4\n```", "no program could pass `tests` that are no Python (invalid syntax"),
    ],
)
def test_tests_that_are_no_asserts_are_refused(tests: Any, message: str):
    with pytest.raises(UsageError, match=re.escape(message)):
        unit_tests(completions=[BAD], tests=[tests])


@pytest.mark.parametrize(
    "tests",
    [
        "for x in (1, 2):\n    assert double(x) == x + x",
        "import math\nmath.sqrt(double(2) - 4)\nassert double(2) == 4",
        "import math; assert double(2) == 4",
        "import unittest\nclass Base(unittest.TestCase):\n    def two(self): self.assertEqual(double(2), 4)\n"
        "class Doubles(Base):\n    def test_two(self): self.two()",
        "from solution import double as twice\ndef test_two():\n    assert twice(2) == 4",
        "def check(candidate):\n    assert candidate(2) == 4\nif True:\n    check(double)",
        "result = list(map(double, [2, 4]))\nif result != [4, 8]: raise ValueError",
        "from unittest import TestCase\nclass Doubles(TestCase):\n    def test_two(self): self.assertEqual(double(2), 4)",
    ],
)
def test_tests_of_other_forms_are_run(tests: str):
    assert scores([GOOD, BAD], tests) == [1, 0]


def test_each_row_is_read_before_the_run(tiny_model: Path):
    config = {"model": {"name": str(tiny_model)}, "data": {"source": "unused.jsonl", "format": "chat"}}
    run = load_config(config | {"cogumi": {"method": "gspo", "rewards": ["unit_tests"], "run_dir": "unused"}})
    prompts = Dataset.from_dict({"prompt": ["one", "two"], "tests": [ASSERTS, "[1, 2]"]})
    with pytest.raises(UsageError, match="every program would pass `tests`"):
        gspo.try_rewards(run, prompts)


def test_a_completion_between_a_prefix_and_a_suffix():
    middle = unit_tests(
        completions=["2 * x", "x", "```python\n2 * x\n```"],
        tests=[ASSERTS] * 3,
        prefix=["def double(x):\n    return "] * 3,
        suffix=["\n\nSIZE = double(1)\n"] * 3,
    )
    assert middle == [1.0, 0.0, 0.0]


def test_the_code_of_an_answer():
    draft = "I would write\n```python\nx\n```\nor rather\n```python\ny\n```\nwhich is right."
    assert source_of(draft, None, None) == "y\n"
    assert source_of("```\nz\n```", None, None) == "z\n"
    assert source_of("```py\nopen ended\n", None, None) == "open ended\n"
    assert source_of("plain", None, None) == "plain"
    assert source_of("1. Do\n   ```python\n   for a in b:\n       c\n   ```", None, None) == "for a in b:\n    c\n"
    assert source_of("```python\r\nz\r\n```", None, None) == "z\r\n"
    assert source_of("```js\nno\n```", None, None) == "```js\nno\n```"
    message = [{"role": "assistant", "content": f"Here:\n```python\n{GOOD}```"}]
    assert unit_tests(completions=[message], tests=[ASSERTS]) == [1.0]


def test_a_program_that_was_ended_is_not_scored_and_is_counted():
    logged: dict[str, float] = {}
    actual = scores(
        [GOOD, "while True: pass", "import os; os.kill(os.getpid(), 9)", BAD], log_metric=logged.__setitem__
    )
    assert actual[0] == 1
    assert actual[3] == 0
    assert all(math.isnan(each) for each in actual[1:3])
    assert logged == {"unit_tests/timed_out": 0.25, "unit_tests/crashed": 0.25}


def test_tests_may_be_a_list():
    tests = ["assert double(2) == 4", "assert double(3) == 6"]
    assert unit_tests(completions=[GOOD, BAD], tests=[tests, tests]) == [1, 0]


def test_a_row_without_tests_does_not_apply():
    assert unit_tests(completions=[GOOD, GOOD, GOOD], tests=[None, ASSERTS, "  \n"]) == [None, 1.0, None]


TRICKS = {
    "leaving with 0": "import os\nos._exit(0)",
    "leaving politely": "raise SystemExit(0)",
    "leaving when called": "def double(x):\n    import os\n    os._exit(0)",
    "leaving politely when called": "def double(x): raise SystemExit(0)",
    "a function for the end": "import atexit\natexit.register(print, 'ok')\nraise SystemExit",
    "a verdict of its own": "open('verdict', 'w').write('passed')\nimport os\nos._exit(0)",
    "any key": "import glob, os\nopen('verdict', 'w').write(''.join(open(f).read() for f in glob.glob('*')))\nos._exit(0)",
    "skipping": "import unittest\ndef double(x): raise unittest.SkipTest",
    "other asserts": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n" + BAD,
    "other asserts by their code": "import unittest\nunittest.TestCase.assertEqual.__code__ = (lambda *a: None).__code__\n" + BAD,
    "another TestCase": "import unittest\nclass T(unittest.TestCase):\n def run(self, r=0): 0\nunittest.TestCase = T\n" + BAD,
    "another result": "import unittest\nunittest.TestResult.addFailure = lambda *a: None\n" + BAD,
    "another loader": "import unittest\nunittest.TestLoader.loadTestsFromTestCase = lambda *a: []\n" + BAD,
    "another unittest": "import sys, types\nm = types.ModuleType('x'); m.TestCase = object; m.main = print\n"
    "sys.modules['unittest'] = m\n" + BAD,
    "another isclose": "import math\nmath.isclose = lambda *a, **k: True\n" + BAD,
    "another runner": "import __main__\n__main__.run_tests = lambda namespace: None\n" + BAD,
    "another runner's code": "import __main__\n__main__.run_tests.__code__ = (lambda namespace: None).__code__\n" + BAD,
    "other builtins": "import builtins\nbuiltins.compile = lambda *a, **k: ''\nbuiltins.exec = lambda *a: None\n" + BAD,
    "another exit": "import os, sys\nsys.exit = os._exit = lambda *a: None\n" + BAD,
    "a handler": "import sys\nsys.excepthook = lambda *a: None\n" + BAD,
    "a trace": "import sys\nsys.settrace(lambda *a: sys.exit(0))\n" + BAD,
    "another AssertionError": "class AssertionError(Exception): pass\n" + BAD,
}  # fmt: skip


@pytest.mark.parametrize("tests", [CLASS, FUNCTIONS], ids=["classes", "functions"])
def test_a_trick_earns_nothing(tests: str):
    actual = dict(zip(TRICKS, scores(list(TRICKS.values()), tests), strict=True))
    assert {name: score for name, score in actual.items() if score != 0} == {}


def test_what_cannot_be_prevented_earns_a_point():
    """docs/rewards.md lists these: completion and tests are one process, in one namespace."""
    equal = (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef double(x): return Any()"
    )
    key = "import sys\nf = sys._getframe(1)\nf.f_locals['write']()\nf.f_locals['leave'](0)"
    assert scores([equal, key]) == [1.0, 1.0]
    assert scores(["def abs(x): return 0\n" + BAD], "assert abs(double(2) - 4) < 1e-6") == [1.0]


def test_it_has_a_name_and_passes_the_trial_before_a_run():
    (reward,) = rewards_of(["unit_tests"])
    assert reward is unit_tests
    assert try_reward(reward, {"prompt": "Write double.", "tests": ASSERTS}, 2) is None
