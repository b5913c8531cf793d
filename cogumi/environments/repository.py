"""A small repository whose tests fail: the policy reads and edits files until they pass. Tests run in the sandbox."""

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
BUGS = [
    ("prices.py", "100 - discount", "100 + discount"),
    ("prices.py", "/ 100", "/ 10"),
    ("stock.py", "+ count", "- count"),
    ("stock.py", ".get(name, 0) + count", "[name] + count"),
]
LOAD = "import prices, stock"  # before the tests, so that nothing that a module replaces is left when they run


class Repository:
    @classmethod
    def rows(cls) -> list[dict[str, Any]]:
        question = "The tests of this repository fail. Find the bug, correct it, and run the tests until they pass."
        prompt = [{"role": "user", "content": question}]
        return [{"prompt": prompt, "file": file, "right": right, "wrong": wrong} for file, right, wrong in BUGS]

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
        [(self.reward, result)] = run_tests([(LOAD, TESTS)], [self.files])  # NaN, not scored, where it was ended
        return "All tests pass." if self.reward == 1 else result.output[-400:] or f"The tests fail ({result.status})."

    def get_reward(self) -> float:
        return self.reward
