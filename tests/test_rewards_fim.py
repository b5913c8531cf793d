"""FIM rewards against values worked out by hand."""

import warnings

import pytest

from cogumi.rewards.functions import edit_similarity, exact_match, parses


def score(reward, completions, middle=None, prefix=None, suffix=None):
    n = len(completions)
    return reward(
        prompts=["p"] * n,
        completions=completions,
        middle=middle or [""] * n,
        prefix=prefix or [""] * n,
        suffix=suffix or [""] * n,
        completion_ids=[[1]] * n,  # trl passes more than we name
        trainer_state=None,
    )


def test_exact_match():
    assert score(exact_match, ["a", "a ", "", "é"], ["a", "a", "", "é"]) == [1.0, 0.0, 1.0, 1.0]


def test_edit_similarity():
    # kitten -> sitting: 3 edits over 7 characters. Indel would say 1 - 5 / 13.
    completions, middle = ["sitting", "abc", "", "", "axc"], ["kitten", "abc", "abcd", "", "abc"]
    assert score(edit_similarity, completions, middle) == pytest.approx([4 / 7, 1.0, 0.0, 1.0, 2 / 3])


def test_chat_completions_count_by_their_last_message():
    chat = [
        [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "ab"}],
        [{"role": "assistant", "content": None}],
        [],
    ]
    assert score(exact_match, chat, ["ab", "", ""]) == [1.0, 1.0, 1.0]
    assert score(edit_similarity, chat, ["abcd", "ab", ""]) == [0.5, 0.0, 1.0]


def test_parses():
    completions = [" + 1", " +", "\x00", "\ud800", "(" * 100_000, "\n    return 2", "\n  return 2"]
    n = len(completions)
    scores = score(parses, completions, prefix=["def f(x):\n    return x"] * n, suffix=["\n"] * n)
    assert scores == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_parses_survives_deep_but_flat_looking_source():
    """Too deep for Python itself, which raises RecursionError or MemoryError, by its version."""
    assert score(parses, ["x" + ".a" * 50_000, "-" * 50_000 + "1"]) == [0.0, 0.0]


def test_parses_is_silent_here_and_changes_no_filter():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert score(parses, ["x = '\\d' is 3\n"]) == [1.0]
        assert caught == []
        warnings.warn("still heard", stacklevel=1)
        assert len(caught) == 1


def test_lists_of_unequal_length_are_an_error():
    with pytest.raises(ValueError, match="zip"):
        exact_match(prompts=[], completions=["a"], middle=[], prefix=[], suffix=[])
