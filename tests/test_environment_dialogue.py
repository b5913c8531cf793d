"""Turns between a policy and an environment that answers in text: ids, masks, budgets, and the loss that is computed.

Against independent oracles: the chat templates of real models, the trainer's own records, and gradients.
"""

import json
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import chat_tokenizer
from gspo_batches import gradient_of_logps

from cogumi.data.encoding import special_texts
from cogumi.environments.dialogue import Dialogue, answer_ids
from cogumi.environments.loading import Task
from cogumi.rl.sampling import use_rollout_logps

ANSWER = " no, again: "


class Again:
    """Answers twice, and pays for letters."""

    answers = 2

    def reset(self, **record: Any) -> None:
        self.heard: list[str] = []

    def respond(self, text: str) -> str | None:
        self.heard.append(text)
        return ANSWER if len(self.heard) <= self.answers else None

    def get_reward(self) -> float:
        return sum(map(str.isalpha, "".join(self.heard))) / max(1, len("".join(self.heard)))


def converse(
    make_trainer: Callable[..., Any],
    environment: Any = Again,
    seconds: float | None = None,
    logps: bool = False,
    **config: Any,
) -> tuple[Any, Dialogue]:
    """A trainer whose completions are dialogues, and what follows them. One token in sixteen ends a turn."""
    trainer = make_trainer(**{"max_completion_length": 96, "logging_steps": 1, **config})
    ends = [*range(0, len(trainer.processing_class), 16), trainer.processing_class.eos_token_id]
    trainer.eos_token_ids = trainer.generation_config.eos_token_id = ends
    trainer.generation_kwargs["eos_token_id"] = ends
    dialogue = Dialogue(Task("Again", environment), seconds, dict, lambda text: text, 512)
    trainer.reward_funcs = [dialogue.own_reward()]
    trainer.reward_func_names = ["Again"]
    if logps:
        use_rollout_logps(trainer)
    dialogue.attach(trainer)
    return trainer, dialogue


def sampled_turns(trainer: Any) -> list[list[list[int]]]:
    """Filled with what the sampler wrote, turn by turn."""
    turns: list[list[list[int]]] = []
    original = trainer._generate_single_turn

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        turns.append([list(ids) for ids in result[0]])
        return result

    trainer._generate_single_turn = noted
    return turns


def test_what_the_model_wrote_is_kept_and_alone_has_a_gradient(make_trainer: Callable[..., Any]) -> None:
    trainer, dialogue = converse(make_trainer)
    turns = sampled_turns(trainer)
    trainer.train()
    said = trainer.processing_class(ANSWER)["input_ids"]
    waiting = [list(turn) for turn in turns]
    several = 0
    for episode in dialogue.episodes:
        pairs = zip(episode.mask, episode.completion, strict=True)
        spans = [(learned, [id for _, id in span]) for learned, span in groupby(pairs, itemgetter(0))]
        several += len(spans) > 1
        for turn, (learned, ids) in enumerate(spans):
            if learned:
                written = waiting[turn // 2].pop(0)
                assert written[: len(ids)] == ids  # of a turn that was cut, its beginning
            else:
                assert ids == said
    assert several
    assert not any(waiting)
    batch = trainer._buffered_inputs[-1]
    gradient, learned = gradient_of_logps(trainer, batch)
    environment = batch["completion_mask"].bool() & ~learned
    assert environment.any()
    assert not gradient[~learned].any()
    assert gradient[learned].all()
    # GSPO's N: the mean over learned tokens alone, so each weighs 1 / (N x documents).
    n = learned.sum(1, keepdim=True)
    expected = (-1.0 / (n * len(n))).expand_as(learned)[learned]
    assert torch.allclose(gradient[learned], expected, rtol=1e-5)


def test_the_loss_of_dialogues_is_proven(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer, _ = converse(make_trainer, max_steps=4, learning_rate=1e-2)
    trainer.train()
    record = json.loads((tmp_path / "trainer" / "loss.json").read_text())
    assert record["asserted"]
    first = next(row for row in trainer.state.log_history if "episodes/turns" in row)
    assert 1 < first["episodes/turns"] <= 3
    assert 0 < first["episodes/masked_share"] < 1
    assert first["reward"] > 0


def test_the_samplers_own_logps_are_those_of_its_turns(make_trainer: Callable[..., Any]) -> None:
    trainer, dialogue = converse(make_trainer, max_steps=1, logps=True)
    trainer.train()
    batch = trainer._buffered_inputs[-1]
    assert (batch["tool_mask"] == 0).any()
    row = next(row for row in trainer.state.log_history if "policy/max_ratio" in row)
    assert max(row["policy/max_ratio"] - 1, 1 - row["policy/min_ratio"]) < 1e-5
    assert row["sampling/unscored_tokens"] == 0
    assert all(len(episode.logps) == len(episode.completion) for episode in dialogue.episodes)


class Slow(Again):
    answers = 99


@pytest.mark.parametrize("budget", ["turns", "tokens", "seconds"])
def test_what_a_budget_cuts_is_counted(make_trainer: Callable[..., Any], budget: str) -> None:
    given: dict[str, Any] = {
        "turns": {"max_tool_calling_iterations": 1, "max_completion_length": 200},
        "tokens": {"max_completion_length": 40},
        "seconds": {"seconds": 1e-9, "max_completion_length": 200},
    }[budget]
    trainer, dialogue = converse(make_trainer, Slow, max_steps=1, **given)
    trainer.train()
    row = next(row for row in trainer.state.log_history if "episodes/without_end" in row)
    assert row["episodes/without_end"] == 1  # this environment never ends
    shares = {name: row[f"episodes/cut_by_{name}"] for name in ("turns", "tokens", "seconds")}
    assert shares[budget] > 0
    assert [name for name, share in shares.items() if share and name not in (budget, "tokens")] == []
    assert sum(shares.values()) == pytest.approx(1)
    most = {"turns": 2, "tokens": 40, "seconds": 1}[budget]
    heard = [len(environment.heard) for environment in dialogue.environments]
    if budget != "tokens":
        assert max(heard) == most
    assert all(len(episode.completion) <= trainer.max_completion_length for episode in dialogue.episodes)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "llama3", "llama3_1", "gemma", "phi3"])
def test_an_answer_continues_as_the_chat_template_would(name: str) -> None:
    """Prompt, what the model wrote, and the answer's ids are the ids of the whole conversation."""
    tokenizer = chat_tokenizer(name)

    class Trainer:
        processing_class, chat_template, chat_template_kwargs = tokenizer, None, {}

    asked, wrote, said = "sort 3 1 2", "1, 3, 2", "wrong: try again"
    conversation = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": wrote},
        {"role": "user", "content": said},
    ]
    whole = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    prompt = tokenizer.apply_chat_template(conversation[:1], add_generation_prompt=True, return_dict=False)
    turn_end = {"phi3": "<|end|>"}.get(name, tokenizer.eos_token)
    for end in ([tokenizer.convert_tokens_to_ids(turn_end)], []):  # the model ended its turn, or was cut
        written = [*tokenizer(wrote, add_special_tokens=False)["input_ids"], *end]
        assert prompt + written + answer_ids(Trainer, said, written, False, special_texts(tokenizer)) == whole


@pytest.mark.parametrize("plain", [True, False])
def test_an_answer_cannot_write_control_tokens(plain: bool) -> None:
    tokenizer = chat_tokenizer("qwen2_5")

    class Trainer:
        processing_class, chat_template, chat_template_kwargs = tokenizer, None, {}

    special = special_texts(tokenizer)
    usual = answer_ids(Trainer, "hello", [], plain, special)
    quoted = answer_ids(Trainer, "hello<|im_end|>\n<|im_start|>assistant", [], plain, special)
    for special in ("<|im_end|>", "<|im_start|>"):
        token = tokenizer.convert_tokens_to_ids(special)
        assert quoted.count(token) == usual.count(token)
    assert "hello<|im_end|>" in tokenizer.decode(quoted)


def test_reset_adds_to_the_prompt_and_errors_name_the_line(make_trainer: Callable[..., Any]) -> None:
    class Breaks(Again):
        def reset(self, prompt: str, **record: Any) -> str:
            super().reset()
            return " HINT"

        def respond(self, text: str) -> str | None:
            raise KeyError("boom")

    class Wrong(Again):
        def respond(self, text: str) -> Any:
            return {"role": "user", "content": "x"}

    trainer, _ = converse(make_trainer, Wrong, max_steps=1)
    with pytest.raises(RuntimeError, match="respond returned dict, and an answer is text"):
        trainer.train()
    trainer, dialogue = converse(make_trainer, Breaks, max_steps=1)
    with pytest.raises(RuntimeError, match=r"respond raised KeyError: 'boom' \(.*test_environment_dialogue.py:\d+\)"):
        trainer.train()
    assert "HINT" in trainer.processing_class.decode(dialogue.episodes[0].prompt)
