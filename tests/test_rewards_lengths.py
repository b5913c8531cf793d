"""Overlong completions, the price of a thought, and formats; on texts and ids of real chat templates."""

from pathlib import Path
from typing import Any

import pytest
from golden import Golden

from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.methods.gspo import graded_as_seen, read_rewards
from cogumi.rewards import rewards_of
from cogumi.rewards.functions import count_thought_tokens, edit_similarity, format_match, overlong, thought_spans
from tests.chat_tokenizers import chat_tokenizer

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


def test_overlong_is_daposs_equation() -> None:
    """arXiv:2503.14476, eq. 13, by hand for L = 100 and B = 20."""
    ids = [[0] * tokens for tokens in (0, 80, 81, 90, 100, 101, 500)]
    assert overlong(ids, max_completion_length=100, buffer=20) == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]
    assert overlong(ids, max_completion_length=100) == overlong(ids, max_completion_length=100, buffer=20)  # a fifth
    assert overlong([[0], [0] * 2], max_completion_length=2) == [0.0, -1.0]
    with pytest.raises(UsageError, match="buffer 3 is more than max_completion_length 2"):
        overlong([[0]], max_completion_length=2, buffer=3)


@pytest.mark.parametrize(
    ("reply", "style", "opened", "thoughts"),
    [
        ("5.", "tags", False, []),
        ("<think>ab</think>5.", "tags", False, ["ab"]),
        ("<think>ab</think>5.<think>c", "tags", False, ["ab", "c"]),
        ("<think>ab", "tags", False, ["ab"]),
        ("ab</think>5.", "tags", True, ["ab"]),
        ("ab</think>5.", "tags", False, ["ab"]),  # the first mark was left out
        ("ab", "tags", True, ["ab"]),
        ("", "tags", True, [""]),
        (f"{ANALYSIS}ab<|end|><|start|>assistant{FINAL}5.<|return|>", "harmony", False, ["ab"]),
        (f"{ANALYSIS}ab", "harmony", False, ["ab"]),
        (f"{ANALYSIS}ab<|end|>{ANALYSIS}c", "harmony", False, ["ab", "c"]),
        (f"{FINAL}5.<|return|>", "harmony", False, []),
    ],
)
def test_where_thoughts_lie(reply: str, style: str, opened: bool, thoughts: list[str]) -> None:
    assert [reply[start:end] for start, end in thought_spans(reply, style, opened)] == thoughts


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qwen3", ("<think>", "\n2 and 3, é日本 \n", "</think>", "\n\n5.<|im_end|>")),
        ("gptoss", (ANALYSIS, "2 and 3, é日本", "<|end|><|start|>assistant", f"{FINAL}5.<|return|>")),
    ],
)
def test_tokens_of_a_thought_are_counted_where_the_model_wrote_them(name: str, parts: tuple[str, ...]) -> None:
    """Against the ids of each part: the marks cost nothing, and an open thought costs all that follows its mark."""
    tokenizer, style = chat_tokenizer(name), "tags" if name == "qwen3" else "harmony"
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
    before, thought, *rest = ids
    assert len(thought) > 3
    assert count_thought_tokens([*before, *thought, *rest[0], *rest[1]], tokenizer, style) == len(thought)
    assert count_thought_tokens(before + thought, tokenizer, style) == len(thought)
    assert count_thought_tokens(rest[-1], tokenizer, style) == 0
    assert count_thought_tokens([], tokenizer, style) == 0
    if style == "tags":
        assert count_thought_tokens(thought + rest[0], tokenizer, style, prompt_opens_thought=True) == len(thought)
        assert count_thought_tokens(thought, tokenizer, style, prompt_opens_thought=True) == len(thought)


# A template that ends every prompt in the mark of a thought, as DeepSeek-R1's does.
OPENING = (
    "{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def run_of(rewards: list[Any], **ours: Any) -> Any:
    return load_config(
        {
            "model": {"name": "cogumi:small-base"},
            "data": {"source": "cogumi:stdlib-tasks", "format": "chat"},
            "cogumi": {"method": "gspo", "rewards": rewards, **ours},
        }
    )


REPLIES = ("<think>\nabcd\n</think>\n\n5.<|im_end|>", "5.<|im_end|>", "<think>\nabcd and more of it")


@pytest.mark.parametrize("flag", [True, None])
def test_in_a_run_the_whole_is_priced_and_the_visible_part_is_graded(flag: bool | None) -> None:
    """A thought that never closes earns nothing for its answer, and is charged: it is not free."""
    tokenizer = chat_tokenizer("qwen3")
    run = run_of(
        [{"name": "thought_price", "price": 0.5}, "format_match", "edit_similarity", "overlong"], thinking=flag
    )
    rewards = graded_as_seen(run, rewards_of(run.cogumi.rewards, {"max_completion_length": 4}), tokenizer)
    assert [reward.__name__ for reward in rewards] == ["thought_price", "format_match", "edit_similarity", "overlong"]
    ids = [tokenizer(reply, add_special_tokens=False)["input_ids"] for reply in REPLIES]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    options = {"prompts": ["p"] * 3, "completions": completions, "completion_ids": ids, "middle": ["5."] * 3}
    price, form, similarity, length = (reward(**options) for reward in rewards)
    inside = [
        len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("\nabcd\n", "\nabcd and more of it")
    ]
    assert price == [-0.5 * inside[0], 0.0, -0.5 * inside[1]]
    assert form == [1.0, 0.0, 0.0]
    # The visible part is the answer, and a thought that is open has none.
    assert similarity == ([1.0, 1.0, 0.0] if flag else edit_similarity(completions, ["5."] * 3))
    assert length[2] == -1.0  # 0 would be the most that it gives


def test_an_asynchronous_reward_of_the_visible_part_is_refused_before_the_model(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "mine.py").write_text(
        "async def judged(completions, **_):\n    return []\nasync def long(completion_ids, **_):\n    return []\n"
    )
    read_rewards(run_of([f"{tmp_path}/mine.py:long"], thinking=True))
    read_rewards(run_of([f"{tmp_path}/mine.py:judged"]))
    with golden.raises("rewards", key="cogumi.rewards", message="judged is asynchronous"):
        read_rewards(run_of([f"{tmp_path}/mine.py:judged"], thinking=False))


def test_a_format_is_matched_to_the_end_and_up_to_a_stop() -> None:
    said = ["<answer>4</answer>", "x <answer>4</answer>", "<answer>4</answer>\n", "<answer>4\n5</answer>"]
    (reward,) = rewards_of([{"name": "format_match", "pattern": "<answer>.*</answer>"}])
    assert reward(completions=said) == [1.0, 0.0, 1.0, 1.0]
    assert format_match(["<think>a</think>b", "b", "<think>a"]) == [1.0, 0.0, 0.0]
    run = run_of([{"name": "format_match", "pattern": "a+"}], stop=["END"])
    (stopped,) = graded_as_seen(run, rewards_of(run.cogumi.rewards), chat_tokenizer("qwen3"))
    assert stopped(prompts=["p"] * 2, completions=["aaEND", "aab"]) == [1.0, 0.0]


def test_a_prompt_that_opens_the_thought_counts_as_its_mark() -> None:
    """Such a template ends every prompt in the mark, which the reply then lacks; text is not rendered by it."""
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.chat_template = OPENING
    rewards = rewards_of(["format_match", {"name": "thought_price", "price": 1.0}])
    form, price = graded_as_seen(run_of(["format_match", "thought_price"]), rewards, tokenizer)
    text = "2 and 3\n</think>\n\n5."
    inside = len(tokenizer("2 and 3\n", add_special_tokens=False)["input_ids"])
    said = [[{"role": "assistant", "content": each}] for each in (text, "2 and 3\n")]
    assert form(prompts=["p"] * 2, completions=said) == [1.0, 0.0]
    assert price(prompts=["p"] * 2, completions=said) == [-inside, -inside]
    assert price(prompts=["p"], completions=["2 and 3\n"]) == [0.0]
