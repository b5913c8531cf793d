"""Rewards that see what a reader sees: the answer, without the thinking before it.

A reply whose thinking never closes has no answer. It is unfinished: its reward is 0 whatever the reward function would
say, and the share of such replies is logged as `unfinished`.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from cogumi.data.encode import special_texts
from cogumi.data.thinking import CLOSE, OPEN, visible
from cogumi.rewards.fim import Completion, text_of

Reward = Callable[..., list[float | None]]


def on_visible(rewards: Sequence[Reward], tokenizer: Any, style: str, opened: bool = False) -> list[Any]:
    """The same reward functions, under their names, given the visible part of every completion.

    `style` is that of `cogumi.data.thinking.Thinking`; `opened`: prompts end inside a thought. Text is read from
    `completion_ids`, which TRL passes, since a completion's own text has lost the control tokens that separate thinking
    from answer. Raises TypeError for a reward function that is asynchronous.
    """
    return [_on_visible(reward, tokenizer, style, opened) for reward in rewards]


def _on_visible(reward: Reward, tokenizer: Any, style: str, opened: bool) -> Reward:
    if inspect.iscoroutinefunction(reward):
        raise TypeError(f"{reward.__name__} is asynchronous; rewards are wrapped as plain functions")

    @functools.wraps(reward)
    def on_visible_part(
        prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any
    ) -> list[float | None]:
        replies = _replies(completions, columns.get("completion_ids"), tokenizer, style)
        answers = [visible(reply, style, opened) for reply in replies]
        finished = [answer is not None for answer in answers]
        shown = [_with_text(old, answer or "") for old, answer in zip(completions, answers, strict=True)]
        scores = reward(prompts=prompts, completions=shown, **columns)
        if log_metric := columns.get("log_metric"):
            log_metric("unfinished", 1 - sum(finished) / max(len(finished), 1))
        return [score if done else 0.0 for score, done in zip(scores, finished, strict=True)]

    return on_visible_part


def _replies(
    completions: Sequence[Completion], ids: Sequence[Sequence[int]] | None, tokenizer: Any, style: str
) -> list[str]:
    """What the model wrote, with the marks of its thinking. Of several messages (calls of tools between) the last one."""
    if ids is None or any(not isinstance(each, str) and len(each) != 1 for each in completions):
        return [text_of(each) for each in completions]
    texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=False)
    if style == "harmony":
        return texts
    for control in special_texts(tokenizer):
        if control not in (OPEN, CLOSE):
            texts = [text.replace(control, "") for text in texts]
    return texts


def _with_text(completion: Completion, text: str) -> Completion:
    if isinstance(completion, str):
        return text
    return [*completion[:-1], {**completion[-1], "content": text}] if completion else completion
