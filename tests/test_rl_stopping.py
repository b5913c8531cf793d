"""Stop sequences in real rollouts: what is trained on ends there, what is graded ends before, and nobody calls it cut off."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cogumi.core.errors import UsageError
from cogumi.models.completion import cut_at_stop
from cogumi.rl.sampling import stop_rollouts_at, strip_stops

MakeTrainer = Callable[..., Any]


def rollout(trainer: Any) -> tuple[list[list[int]], list[str]]:
    """Completion ids and texts of one rollout of every prompt."""
    prompts = [row["prompt"] for row in trainer.train_dataset.select(range(8))]
    torch.manual_seed(0)
    trainer.model.train()
    ids = trainer._generate(prompts)[1]
    return ids, [trainer.processing_class.decode(token_ids) for token_ids in ids]


def test_a_completion_ends_at_the_first_stop_string(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_completion_length=48)
    stop_rollouts_at(trainer, ["e", "\n\n"])
    ids, texts = rollout(trainer)
    pad = trainer.processing_class.pad_token_id
    ended = [text for text in texts if "e" in text or "\n\n" in text]
    assert len(ended) > 4  # of eight: it is a common letter
    for each in ids:  # nothing after the token that holds it
        assert not any(stop in trainer.processing_class.decode(each[:-1]) for stop in ("e", "\n\n"))
    assert not any(pad in token_ids[:-1] for token_ids in ids)
    logged = trainer._metrics["train"]
    cut_off = [each for each, text in zip(ids, texts, strict=True) if text not in ended and each[-1] != pad]
    assert logged["completions/clipped_ratio"][-1] == pytest.approx(len(cut_off) / 8)
    assert logged["completions/max_terminated_length"][-1] < 48


def test_without_stops_the_same_prompts_run_on(make_trainer: MakeTrainer) -> None:
    _, texts = rollout(make_trainer(max_completion_length=48))
    assert any("e" in text[:-8] for text in texts)


def test_a_token_of_the_vocabulary_ends_the_sequence_for_trl(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_completion_length=48)
    token = trainer.processing_class.added_tokens_decoder[max(trainer.processing_class.added_tokens_decoder)].content
    stop_rollouts_at(trainer, [token])
    expected = trainer.processing_class.convert_tokens_to_ids(token)
    assert expected in trainer.eos_token_ids
    assert expected in trainer.generation_config.eos_token_id
    assert trainer.generation_config.stop_strings is None
    trainer.generation_config.sequence_bias = [[[expected], 4.0]]
    ids, _ = rollout(trainer)
    assert any(token_ids[-1] == expected for token_ids in ids)
    assert not any(expected in token_ids[:-1] for token_ids in ids)


def test_training_with_stops_learns_only_up_to_them(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_completion_length=32, max_steps=2, logging_steps=1)
    seen: list[dict[str, Any]] = []
    score = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: seen.append(score(inputs)) or seen[-1]
    stop_rollouts_at(trainer, ["e"])
    trainer.train()
    decode = trainer.processing_class.decode
    for batch in seen:
        for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True):
            assert "e" not in decode(ids[mask.bool()][:-1])
    assert any("completions/clipped_ratio" in row for row in trainer.state.log_history)


def test_two_masters_are_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UsageError, match="mask_truncated_completions"):
        stop_rollouts_at(make_trainer(mask_truncated_completions=True), ["e"])
    with pytest.raises(UsageError, match=r"generation_kwargs\.eos_token_id and cogumi\.stop"):
        stop_rollouts_at(make_trainer(generation_kwargs={"eos_token_id": 1}), ["e"])


def test_rewards_see_what_stands_before_the_stop() -> None:
    def length(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(text if isinstance(text, str) else text[-1]["content"])) for text in completions]

    graded = strip_stops(length, ["</answer>", "\n\n"])
    assert graded.__name__ == "length"  # what TRL logs it as
    chat = [{"role": "assistant", "content": "four</answer>"}]
    assert graded(prompts=[], completions=["ab\n\ncd", "abc", chat]) == [2, 3, 4]
    assert chat[0]["content"] == "four</answer>"  # the completion itself is left alone
    assert cut_at_stop([{"role": "assistant", "content": None, "tool_calls": []}], ["x"])[0]["content"] == ""
