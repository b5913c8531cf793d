"""Environments that come with the package: a calculator, a repository with a bug, and code completion in turns."""

import math
import random
import re
from typing import Any

from cogumi.rewards.unit_tests import run_tests

TESTS = (
    "import unittest\n\nfrom prices import total\nfrom stock import Stock\n\n\nclass Tests(unittest.TestCase):\n"
    "    def test_total(self):\n        self.assertEqual(total([10, 20]), 30)\n        self.assertEqual(total([10], 50), 5)\n\n"
    "    def test_add(self):\n        stock = Stock()\n        stock.add('pen', 2)\n        stock.add('pen', 3)\n"
    "        self.assertEqual(stock.items, {'pen': 5})\n"
)
SOUND = {
    "prices.py": "def total(prices, discount=0):\n    return sum(prices) * (100 - discount) / 100\n",
    "stock.py": "class Stock:\n    def __init__(self):\n        self.items = {}\n\n    def add(self, name, count):\n"
    "        self.items[name] = self.items.get(name, 0) + count\n",
}
BUGS = [("prices.py", "100 - discount", "100 + discount"), ("prices.py", "/ 100", "/ 10")]
BUGS += [("stock.py", "+ count", "- count"), ("stock.py", ".get(name, 0) + count", "[name] + count")]
FUNCTIONS = {
    "def clamp(x, low, high):\n    return |max(low, min(x, high))|\n": ["clamp(5, 0, 3) == 3", "clamp(-1, 0, 3) == 0"],
    "def is_even(n):\n    return |n % 2 == 0|\n": ["is_even(4)", "not is_even(7)", "is_even(0)"],
    "def initials(name):\n    return |''.join(w[0] for w in name.split())|\n": ["initials('ada king') == 'ak'"],
    "def mean(values):\n    return |sum(values) / len(values)|\n": ["mean([1, 2, 3]) == 2", "mean([4]) == 4"],
    "def reverse(text):\n    return |text[::-1]|\n": ["reverse('abc') == 'cba'", "reverse('') == ''"],
    "def largest(values):\n    return |max(values)|\n": ["largest([3, 9, 2]) == 9", "largest([-5, -2]) == -2"],
    "def square(x):\n    return |x * x|\n": ["square(3) == 9", "square(-2) == 4"],
    "def last(items):\n    return |items[-1]|\n": ["last([1, 2]) == 2", "last('xyz') == 'z'"],
}
"""{function with its middle between bars: its tests}."""


def user_message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Calculator:
    """Arithmetic: the policy learns to call the tool and to give its result as the answer."""

    @classmethod
    def rows(cls, count: int = 256, seed: int = 0) -> list[dict[str, Any]]:
        draw, rows = random.Random(seed), []
        for _ in range(count):
            a, b, c = (draw.randint(2, 99) for _ in range(3))
            problem = f"{a} {draw.choice('+-*')} {b} {draw.choice('+-')} {c}"
            question = f"What is {problem}? Use the calculator, and end with the number."
            rows.append({"prompt": user_message(question), "answer": evaluate(problem)})
        return rows

    def reset(self, answer: int, **record: Any) -> None:
        self.answer = answer
        self.result: int | None = None

    def calculate(self, expression: str) -> str:
        """Calculate whole numbers.

        Args:
            expression: with + - * and parentheses, such as (12 + 3) * 4
        """
        self.result = evaluate(expression)
        return str(self.result)

    def get_reward(self) -> float:
        """Return 1 for a call that gave the answer, whatever is written behind it."""
        return float(self.result == self.answer)


def evaluate(expression: str) -> int:
    """Evaluate + - * of whole numbers. Raises ValueError for anything else."""
    if len(expression) > 100 or "**" in expression or re.search(r"[^\d+\-*() ]", expression):
        raise ValueError("write whole numbers with + - * and parentheses")
    try:
        return int(eval(expression.strip(), {"__builtins__": {}}))  # nothing but digits and operators
    except (SyntaxError, TypeError):
        raise ValueError(f"{expression!r} is no expression") from None


class Repository:
    """A small repository with a bug: the policy reads and edits files until the tests pass in the sandbox."""

    @classmethod
    def rows(cls) -> list[dict[str, Any]]:
        question = "The tests of this repository fail. Find the bug, correct it, and run the tests until they pass."
        rows = [{"file": file, "right": right, "wrong": wrong} for file, right, wrong in BUGS]
        return [{"prompt": user_message(question), **row} for row in rows]

    def reset(self, file: str, right: str, wrong: str, **record: Any) -> str:
        self.files = {**SOUND, file: SOUND[file].replace(right, wrong)}
        self.reward = 0.0
        return f"\nFiles: {', '.join(self.files)}, tests.py"

    def read_file(self, path: str) -> str:
        """Read a file.

        Args:
            path: its name
        """
        return TESTS if path == "tests.py" else self.files[path]

    def replace(self, path: str, old: str, new: str) -> str:
        """Replace text in a file.

        Args:
            path: its name; tests.py cannot be changed
            old: text that stands in it once
            new: what takes its place
        """
        if self.files[path].count(old) != 1:
            raise ValueError(f"{old!r} does not stand in {path} once")
        self.files[path] = self.files[path].replace(old, new)
        return "done"

    def run_tests(self) -> str:
        """Run the tests."""
        # Modules are loaded before the tests, so that the sandbox restores what they replace.
        [(self.reward, result)] = run_tests([("import prices, stock", TESTS)], [self.files])  # NaN if it was ended
        return "All tests pass." if self.reward == 1 else result.output[-400:] or f"The tests fail ({result.status})."

    def get_reward(self) -> float:
        return self.reward


class CodeCompletion:
    """Fill in the middle in turns: the tests' message is the answer to a middle that fails."""

    turns = 3  # at most; each further one costs a third of the reward

    @classmethod
    def rows(cls) -> list[dict[str, Any]]:
        rows = []
        for code, tests in FUNCTIONS.items():
            prefix, _, suffix = code.split("|")
            question = f"Write what belongs at <middle>, and nothing else.\n\n{prefix}<middle>{suffix}"
            text = "\n".join(f"assert {test}" for test in tests)
            rows.append({"prompt": user_message(question), "prefix": prefix, "suffix": suffix, "tests": text})
        return rows

    def reset(self, prefix: str, suffix: str, tests: str, **record: Any) -> None:
        self.prefix, self.suffix, self.tests = prefix, suffix, tests
        self.attempts, self.reward = 0, 0.0

    def respond(self, text: str) -> str | None:
        """Return the tests' message for this middle; None if they pass, or after the last attempt."""
        self.attempts += 1
        [(passed, result)] = run_tests([(self.prefix + text + self.suffix, self.tests)])
        self.reward = passed * (1 - (self.attempts - 1) / self.turns)  # NaN, not scored, if the program was ended
        if passed or math.isnan(passed) or self.attempts == self.turns:
            return None
        output = result.output.strip().splitlines()
        return f"The tests fail: {output[-1] if output else 'no error was printed'}\nTry again."

    def get_reward(self) -> float:
        return self.reward
