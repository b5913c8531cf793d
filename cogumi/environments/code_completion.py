"""Fill in the middle with unit tests, in turns: a middle that fails is tried again after the tests have said why."""

import math
from typing import Any

from cogumi.rewards.unit_tests import run_tests

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
QUESTION = "Write what belongs at <middle>, and nothing else.\n\n{prefix}<middle>{suffix}"


class CodeCompletion:
    turns = 3  # at most; each further one costs a third of the reward

    @classmethod
    def rows(cls) -> list[dict[str, Any]]:
        rows = []
        for code, tests in FUNCTIONS.items():
            prefix, _, suffix = code.split("|")
            question = {"role": "user", "content": QUESTION.format(prefix=prefix, suffix=suffix)}
            text = "\n".join(f"assert {test}" for test in tests)
            rows.append({"prompt": [question], "prefix": prefix, "suffix": suffix, "tests": text})
        return rows

    def reset(self, prefix: str, suffix: str, tests: str, **record: Any) -> None:
        self.prefix, self.suffix, self.tests = prefix, suffix, tests
        self.tried, self.reward = 0, 0.0

    def respond(self, text: str) -> str | None:
        """What the tests say of this middle; None where they pass, or the last try is over."""
        self.tried += 1
        [(passed, result)] = run_tests([(self.prefix + text + self.suffix, self.tests)])
        self.reward = passed * (1 - (self.tried - 1) / self.turns)  # NaN, not scored, where the program was ended
        if passed or math.isnan(passed) or self.tried == self.turns:
            return None
        said = result.output.strip().splitlines()
        return f"The tests fail: {said[-1] if said else 'no error was printed'}\nTry again."

    def get_reward(self) -> float:
        return self.reward
