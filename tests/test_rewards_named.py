"""Rewards by name, of the user's own, for tasks with a known answer, and for a middle."""

import asyncio
import copy
import inspect
import math
import typing
import warnings
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden import Golden

from cogumi.core.errors import UsageError
from cogumi.evaluation.reward_scores import call_reward
from cogumi.rewards.functions import (
    Completion,
    answer_similarity,
    edit_similarity,
    exact_answer,
    exact_match,
    final_number,
    parses,
)
from cogumi.rewards.math_answers import math_answer
from cogumi.rewards.named_rewards import (
    BUILTIN_REWARDS,
    RewardError,
    as_annotated,
    load_reward,
    refuse_missing_columns,
    rewards_of,
    try_reward,
)
from cogumi.rl.sampling import note_unscored


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("So 3 + 4 = 7", "#### 7", True),
        ("it is 1,234.50 dollars", 1234.5, True),
        ("7 of them, not 8", "7", False),
        (r"thus \boxed{12} (of 30)", "12", True),
        (r"\boxed{1} or \boxed{-2}", "-2", True),
        ("0.1", "0.10", True),
        ("0.30000000000000004", "0.3", False),  # exact, not as binary fractions
        ("version 1.2.3", "3", False),
        ("12,34", "34", True),  # no thousands: two numbers
        ("none at all", "5", False),
        ("", "5", False),
        ("-.5", "-0.5", True),
        ("2", "1/2", False),  # the answer is a half
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{2}", r"\frac{1}{2}", False),
        ("it was 10/12/2024", "2024", True),
        ("0.00001", 1e-05, True),
        ("-5", 1e-05, False),
        ("100000", "1e5", True),
        (r"\boxed{1{,}234}", "1234", True),
        ("234", r"1,\!234", False),
        ("\u22125", "5", False),  # a minus sign
        (r"a loss of -\$5", "-5", True),
        ("from 2019-2020", "2020", True),
        ("1/0", "0", False),
        ("9" * 5000, "5", False),
    ],
)
def test_the_last_number_counts(completion: str, answer: object, right: bool) -> None:
    assert final_number([completion], answer=[answer]) == [float(right)]


@pytest.mark.parametrize(
    ("gold", "part"),
    [
        ("3,5", "5"), ("1.234,56", "56"), ("1.000.000", "000"), ("1 234", "234"), ("1\u202f234", "234"), ("3, 5", "5"),
        ("1 1/2", "1/2"), (r"1\frac{1}{2}", "2"), ("2^3", "3"), ("5 x 10^{3}", "3"), (r"\sqrt{2}", "2"), (r"3\pi", "3"),
        (r"\frac{x+1}{2}", "2"), ("10:30", "30"), ("2024-01-05", "05"), ("12/5/2024", "2024"),
        ("3\u00bd", "3"), ("5\u00b2", "5"), ("1.5\u00d710\u207b\u00b3", "10"), ("5 m2", "2"), (r"\frac12", "12"),
        ("3 and 5", "5"), ("x = 3 or x = 5", "5"), ("x=3, y=5", "5"), ("5 hours 30 minutes", "30"), ("5 \u00b1 2", "2"),
        ("2n+1", "1"), ("n - 1", "1"), ("5 + x", "5"), ("3x", "3"), ("4i", "4"), ("x > 5", "5"), (r"5\,000", "000"),
        ("0x1F", "1"), (r"\log 2", "2"), ("5 (mod 7)", "7"), ("5h30", "30"),
    ],
)  # fmt: skip
def test_a_part_of_a_gold_answer_is_not_its_number(gold: str, part: str) -> None:
    assert final_number([part], answer=[gold]) == [0.0]
    assert final_number([part], answer=[f"{gold}, so #### {part}"]) == [1.0]


@pytest.mark.parametrize(
    ("gold", "number"),
    [
        ("1,234", "1234"), ("-5", "-5"), ("\u20135", "-5"), ("Step 3\n42", "42"), ("$5.00", "5"), ("50%", "50"),
        (r"\boxed{\frac{1}{2}}", "0.5"), ("5 cm", "5"), ("x = 3", "3"),
        ("3 * 6 = 18", "18"), ("5kg", "5"), ("**5**", "5"), ("<b>5</b>", "5"), ("Total: 5 m\u00b2", "5"), ("(B) 7", "7"),
        (r"We get 3 of 4, so \boxed{5\text{ cm}}", "5"),
    ],
)  # fmt: skip
def test_a_gold_number_that_stands_alone(gold: str, number: str) -> None:
    assert final_number([f"it is {number}."], answer=[gold]) == [1.0]


def test_neither_has_a_number_is_no_match() -> None:
    assert final_number(["words"], answer=["words"]) == [0.0]


OF_ANSWERS = (final_number, exact_answer, answer_similarity)


@pytest.mark.parametrize(("completion", "missing"), [("None", None), ("", ""), ("", " \n"), ("nan", math.nan)])
def test_a_row_without_an_answer_rewards_nothing(completion: str, missing: Any) -> None:
    for reward in OF_ANSWERS:
        assert reward([completion], answer=[missing]) == [0.0]
    assert math_answer([completion], answer=[missing]) == [None]


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("5", 5.0, 1),
        ("5.0", 5.0, 1),
        ("5", 5.5, 0),
        ("-7", -7, 1),
        ("true", True, 1),
        ("True", True, 1),
        ("true", False, 0),
        ("0.00001", 1e-05, 1),
        ("\u00e9", "e\u0301", 1),
        ("a\nb", "a\r\nb", 1),
    ],
)
def test_an_answer_of_a_table_is_text(completion: str, answer: Any, right: int) -> None:
    assert exact_answer([completion], answer=[answer]) == [right]
    assert (answer_similarity([completion], answer=[answer]) == [1.0]) is bool(right)


@pytest.mark.parametrize("reward", [*OF_ANSWERS, math_answer])
def test_answers_that_are_lists_are_refused(reward: Any) -> None:
    for answer in (["5", "6"], {"5": 6}):
        with pytest.raises(UsageError, match=r"`answer` is (a list of 2|an object with 5), and rewards compare text"):
            reward(["5"], answer=[answer])


def test_a_reward_changes_its_own_lists_alone() -> None:
    def untidy(completions: list[Any], answer: list[str], record: list[Any], **_: Any) -> list[float]:
        completions[0][0]["content"] = "changed"
        record[0]["a"].append(2)
        completions.reverse()
        answer.clear()
        return [0.0] * len(completions)

    given = {"completions": [SAID, []], "answer": ["1", "2"], "record": [{"a": [1]}, {}], "environments": [object()]}
    before = copy.deepcopy({**given, "environments": None}) | {"environments": [*given["environments"]]}
    assert as_annotated(untidy)(**given) == [0.0, 0.0]
    assert given == before


def test_a_reward_that_cannot_be_given_all_columns_is_refused() -> None:
    def bare(prompts: Any, completions: Any) -> list[float]:
        return [0.0] * len(completions)

    def by_place(completions: Any, /, **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(UsageError, match=r"bare is given every column, .* takes no \*\*kwargs; add"):
        refuse_missing_columns([bare], ["prompt"])
    with pytest.raises(UsageError, match="by_place takes `completions` by its place, and is given arguments by their"):
        refuse_missing_columns([by_place], ["prompt"])


def test_chat_completions_count_by_their_last_message() -> None:
    said = [{"role": "assistant", "content": "wait: 3"}, {"role": "assistant", "content": "4"}]
    assert final_number([said], answer=["4"]) == [1.0]
    assert answer_similarity([said, "  x\n"], answer=["4", "y"]) == [1.0, 0.0]
    chat = [said, [{"role": "assistant", "content": None}], []]
    assert exact_match(chat, ["4", "", ""]) == [1.0, 1.0, 1.0]
    assert edit_similarity(chat, ["42", "ab", ""]) == [0.5, 0.0, 1.0]


# --------------------------------------------------------------- fill-in-the-middle, against values worked out by hand

PASSED: dict[str, Any] = {"prompts": ["p"], "completion_ids": [[1]], "trainer_state": None}  # more than a reward names


def test_exact_match() -> None:
    assert exact_match(["a", "a ", "", "é"], ["a", "a", "", "é"], **PASSED) == [1.0, 0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="zip"):
        exact_match(["a"], [])


def test_edit_similarity() -> None:
    # kitten -> sitting: 3 edits over 7 characters. Indel would say 1 - 5 / 13.
    completions, middle = ["sitting", "abc", "", "", "axc"], ["kitten", "abc", "abcd", "", "abc"]
    assert edit_similarity(completions, middle, **PASSED) == pytest.approx([4 / 7, 1.0, 0.0, 1.0, 2 / 3])


def test_parses() -> None:
    completions = [" + 1", " +", "\x00", "\ud800", "(" * 100_000, "\n    return 2", "\n  return 2"]
    scores = parses(completions, ["def f(x):\n    return x"] * 7, ["\n"] * 7, **PASSED)
    assert scores == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    # Too deep for Python itself, which raises RecursionError or MemoryError, by its version.
    assert parses(["x" + ".a" * 50_000, "-" * 50_000 + "1"], ["", ""], ["", ""]) == [0.0, 0.0]


def test_parses_is_silent_here_and_changes_no_filter() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert parses(["x = '\\d' is 3\n"], [""], [""]) == [1.0]
        assert caught == []
        warnings.warn("still heard", stacklevel=1)
        assert len(caught) == 1


# -------------------------------------------------------------------------------------------------- of the user's own


def test_a_reward_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def shout(completions, **kwargs):\n    return [float(c.isupper()) for c in completions]\n")
    (mine,) = rewards_of([f"{file}:shout"])
    assert mine(completions=["A", "a"]) == [1.0, 0.0]
    theirs = load_reward("cogumi.rewards.functions:edit_similarity")
    assert inspect.signature(theirs) == inspect.signature(edit_similarity)
    assert theirs.__name__ == "edit_similarity"


def test_the_page_lists_what_comes_with_the_package() -> None:
    page = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = page.partition("## Rewards by name")[2].partition("\n## ")[0]
    listed = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(listed) == sorted(BUILTIN_REWARDS)


def test_an_error_in_a_reward_names_it_and_the_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def boom(completions, **_):\n    raise ValueError('kaput')\n")
    with pytest.raises(RuntimeError, match=r"cogumi.rewards: .*mine.py:boom raised ValueError: kaput \(.*mine.py:2\)"):
        load_reward(f"{file}:boom")(completions=["a"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{file}:shuot", "has no function 'shuot'; it has: shout"),
        ("{dir}/other.py:shout", "no such file"),
        ("not.a.module:f", "No module named 'not'"),
        ("{broken}:f", "raises ZeroDivisionError: division by zero"),
        ("final_nmber", "did you mean 'final_number'"),
    ],
)
def test_what_cannot_be_found_is_one_line(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "mine.py").write_text("def shout(completions, **kwargs): ...\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    full = name.format(file=tmp_path / "mine.py", dir=tmp_path, broken=tmp_path / "broken.py")
    with pytest.raises(UsageError, match=said) as caught:
        rewards_of([full])
    assert "\n" not in str(caught.value)


def test_no_reward_at_all_is_refused(golden: Golden) -> None:
    with golden.raises("rewards", message="cogumi.rewards"):
        rewards_of([])


def test_a_reward_whose_column_is_missing_is_refused_before_the_first_rollout(golden: Golden) -> None:
    refuse_missing_columns([edit_similarity], ["prompt", "prefix", "suffix", "middle"])
    with golden.raises("rewards", key="cogumi.rewards", message="`answer`"):
        refuse_missing_columns([final_number], ["prompt", "gold"])


# --------------------------------------------------------------------------------------------------- text or messages

CHAT = {"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "6 * 7?"}], "answer": "42"}
TEXT = {"prompt": "6 * 7 = ", "answer": "42"}


def of_text(completions: list[str], **_: Any) -> list[float]:
    return [float("42" in completion.strip()) for completion in completions]


def of_messages(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    return [float("42" in completion[-1]["content"]) for completion in completions]


def of_typings_text(prompts: typing.List[str], completions: typing.Sequence[str], **_: Any) -> list[float]:  # noqa: UP006
    assert all(prompt.endswith("6 * 7?") for prompt in prompts)
    return of_text(list(completions))


def of_quoted_text(completions: "list[str]", **_: Any) -> list[float]:
    return of_text(completions)


Texts = list[str]


def of_optional_text(completions: "Texts | None", prompts: typing.Optional[list[str]] = None, **_: Any) -> list[float]:  # noqa: UP045
    assert all(isinstance(prompt, str) for prompt in prompts or [])
    return of_text(completions or [])


async def of_awaited_text(completions: list[str], **_: Any) -> list[float]:
    return of_text(completions)


def of_either(completions: Sequence[Completion], **_: Any) -> list[float]:
    assert isinstance(completions[0], list)  # what TRL gives
    return [1.0 for _ in completions]


def text_unsaid(completions, **_):  # type: ignore[no-untyped-def]  # as most are written
    return [float(completion.strip() == "42") for completion in completions]


def messages_unsaid(completions, **_):  # type: ignore[no-untyped-def]
    return [float(completion[0]["content"] == "42") for completion in completions]


SAID = [{"role": "assistant", "content": " 42\n"}]


@pytest.mark.parametrize("reward", [of_text, of_messages, of_typings_text, of_quoted_text, of_optional_text, of_either])
def test_a_reward_gets_chat_as_it_is_annotated(reward: Any) -> None:
    assert as_annotated(reward)(prompts=[CHAT["prompt"]], completions=[SAID], answer=["42"]) == [1.0]
    assert as_annotated(reward).__name__ == reward.__name__
    assert try_reward(reward, CHAT, 4) is None


def test_a_reward_gets_text_as_it_is_annotated() -> None:
    for reward in (of_text, of_messages):
        assert as_annotated(reward)(prompts=["6 * 7 = "], completions=["42"]) == [1.0]
        assert try_reward(reward, TEXT, 4) is None
    assert asyncio.run(as_annotated(of_awaited_text)(prompts=[[]], completions=[SAID])) == [1.0]
    assert as_annotated(text_unsaid)(completions=[" 42\n"]) == [1.0]


@pytest.mark.parametrize(
    ("reward", "row", "words"),
    [
        (text_unsaid, CHAT, ("AttributeError", "prompts are messages", "takes strings", "`completions: list[str]`")),
        (messages_unsaid, TEXT, ("TypeError", "prompts are text", "takes messages", "list[list[dict]]")),
    ],
)
def test_a_reward_that_fails_on_the_shape_says_so_in_one_line(reward: Any, row: Any, words: tuple[str, ...]) -> None:
    refused, said = try_reward(reward, row, 4)  # type: ignore[misc]
    assert refused
    assert "\n" not in said
    assert all(word in said for word in (f"reward {reward.__name__} raised", "test_rewards_named.py:", *words))


def test_a_reward_that_fails_otherwise_is_said_and_not_refused() -> None:
    def strict(completions: list[str], **_: Any) -> list[float]:
        return [float(completion.split("<answer>")[1]) for completion in completions]

    refused, said = try_reward(strict, TEXT, 4)  # type: ignore[misc]
    assert not refused
    assert "reward strict raised IndexError" in said


def test_an_answer_that_is_an_object_has_no_mathematical_value() -> None:
    """As in data of verl, whose `reward_model` holds `ground_truth`: no completion would score."""
    with pytest.raises(UsageError, match="`answer` is an object with ground_truth, style"):
        try_reward(math_answer, {**TEXT, "answer": {"ground_truth": "0", "style": "rule"}}, 4)


# ------------------------------------------------------------------------------------- what stands behind the colon

CALLABLES = """
import functools

def count(completions, scale=1.0, **_):
    return [scale * len(text) for text in completions]

async def judged(completions: list[str], **_):
    return [1.0] * len(completions)

class Length:
    def __call__(self, completions: list[str], least: int = 1, **_):
        return [float(len(text) >= least) for text in completions]

class Judge:
    async def __call__(self, completions: list[str], **_):
        return [2.0] * len(completions)

    def score(self, completions, **_):
        raise ValueError("kaput")

half = functools.partial(count, scale=0.5)
judged_later = functools.partial(judged)
length, judge = Length(), Judge()
judge_twice, score, nested = functools.partial(judge), judge.score, functools.partial(functools.partial(length), least=9)
"""


def test_anything_callable_is_a_reward_by_the_name_behind_the_colon(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CALLABLES)
    names = ["half", "judged_later", "length", "judge", "judge_twice", "nested", "score"]
    rewards = rewards_of([{"name": f"{file}:{name}", **({"least": 4} if name == "length" else {})} for name in names])
    assert [reward.__name__ for reward in rewards] == names
    said = [[{"role": "assistant", "content": "abc"}]]
    scores = [call_reward(as_annotated(reward), {"completions": said}, 1) for reward in rewards[1:-1]]
    assert scores == [[1.0], [0.0], [2.0], [2.0], [0.0]]
    assert rewards[0](completions=["abc"]) == [1.5]
    with pytest.raises(RewardError, match=r"mine.py:score raised ValueError: kaput"):
        rewards[-1](completions=["a"])
    for name in ("Length", "Judge"):
        with pytest.raises(UsageError, match=rf"{name} is a class") as caught:
            rewards_of([f"{file}:{name}"])
        assert "\n" not in str(caught.value)


WRONG = [1.0, None, "high", ["1.0"] * 4, [[1.0]] * 4, [1.0] * 3, {"a": 1}, {1.0, 2.0, 3.0, 4.0}, np.float64(1)]


@pytest.mark.parametrize("answer", [*WRONG, np.ones((4, 1)), torch.ones(4, 1), torch.tensor(1.0), np.array(["1"] * 4)])
def test_a_wrong_result_is_refused_alike_by_trial_command_rollout(answer: Any) -> None:
    def mine(completions: list[str], **_: Any) -> Any:
        return answer

    refusals = set()
    for score in (
        lambda: try_reward(mine, TEXT, 4),
        lambda: call_reward(mine, {"completions": ["a"] * 4}, 4),
        lambda: note_unscored(mine, set())(completions=["a"] * 4),
    ):
        with pytest.raises(UsageError, match="mine returned") as caught:
            score()
        refusals.add(str(caught.value))
    assert len(refusals) == 1
    assert "\n" not in refusals.pop()


def test_a_score_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match=r"<lambda> returned str '1\.0' in its list, and a score is a number"):
        note_unscored(lambda **_: ["1.0"], set())(completions=["a"])


@pytest.mark.parametrize("answer", [-(10**400), 1e39, math.inf, Decimal("1e400"), Decimal("nan")])
def test_a_score_beyond_the_range_of_the_trainer_is_not_scored(answer: Any) -> None:
    (score,) = note_unscored(lambda **_: [answer], set())(completions=["a"])
    assert math.isnan(score)


@pytest.mark.parametrize(
    "answer",
    [np.ones(4), np.array([1, 1, 1, 1]), torch.ones(4, dtype=torch.bfloat16), (True, 1, np.float32(1), Decimal(1))],
)
def test_numbers_of_any_library_are_scores(answer: Any) -> None:
    def mine(completions: list[str], **_: Any) -> Any:
        return answer

    assert try_reward(mine, TEXT, 4) is None
    assert note_unscored(mine, set())(completions=["a"] * 4) == [1.0] * 4
