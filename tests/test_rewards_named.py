"""Rewards by name, of the user's own, and for tasks with a known answer."""

import inspect
from pathlib import Path

import pytest

from cogumi.errors import UsageError
from cogumi.rewards.answers import answer_similarity, final_number
from cogumi.rewards.fim import edit_similarity
from cogumi.rewards.named import own_reward, refuse_missing_columns, rewards_of


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
    ],
)
def test_the_last_number_counts(completion: str, answer: object, right: bool) -> None:
    assert final_number([completion], answer=[answer]) == [float(right)]


def test_neither_has_a_number_is_no_match() -> None:
    assert final_number(["words"], answer=["words"]) == [0.0]


def test_chat_completions_count_by_their_last_message() -> None:
    said = [{"role": "assistant", "content": "wait: 3"}, {"role": "assistant", "content": "4"}]
    assert final_number([said], answer=["4"]) == [1.0]
    assert answer_similarity([said, "  x\n"], answer=["4", "y"]) == [1.0, 0.0]


def test_a_reward_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def shout(completions, **kwargs):\n    return [float(c.isupper()) for c in completions]\n")
    (mine,) = rewards_of([f"{file}:shout"])
    assert mine(completions=["A", "a"]) == [1.0, 0.0]
    theirs = own_reward("cogumi.rewards.fim:edit_similarity")
    assert inspect.signature(theirs) == inspect.signature(edit_similarity)
    assert theirs.__name__ == "edit_similarity"


def test_an_error_in_a_reward_names_it_and_the_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def boom(completions, **_):\n    raise ValueError('kaput')\n")
    with pytest.raises(RuntimeError, match=r"cogumi.rewards: .*mine.py:boom raised ValueError: kaput \(.*mine.py:2\)"):
        own_reward(f"{file}:boom")(completions=["a"])


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


def test_no_reward_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cogumi\.rewards is empty"):
        rewards_of([])


def test_a_reward_whose_column_is_missing_is_refused_before_the_first_rollout() -> None:
    refuse_missing_columns([edit_similarity], ["prompt", "prefix", "suffix", "middle"])
    with pytest.raises(UsageError, match="final_number takes `answer`, and the prompts come with gold, prompt"):
        refuse_missing_columns([final_number], ["prompt", "gold"])
