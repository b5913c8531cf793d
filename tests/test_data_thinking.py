"""One flag for thinking: what is rendered, what is learned, what a reader sees, and what a reward is given."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import Golden

from cogumi.core.errors import UsageError
from cogumi.data.chat import read_thinking, visible_text
from cogumi.data.rows import decode_rows
from cogumi.data.templates import read_template
from cogumi.rewards.functions import on_visible
from tests.chat_tokenizers import TEMPLATES, ask, chat_tokenizer, chunk_of, say, texts, texts_of, tiny_for

QUESTION, PLAIN = ask("2 + 3?"), say("5.")
INLINE, APART = say("<think>\n2 and 3.\n</think>\n\n5."), say("5.", reasoning_content="2 and 3.")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
UNCLOSED = say("<think>\n2 and 3, or")


def learned(
    name: str, answer: dict[str, str], thinking: bool | None, learn: str = "turns"
) -> tuple[list[str], str, Any]:
    """(learned texts, the whole text, drops) of one question and its answer."""
    tokenizer = chat_tokenizer(name)
    chunk = chunk_of([{"messages": [QUESTION, answer]}], tokenizer, learn=learn, thinking=thinking)
    whole, turns = texts_of(chunk, tokenizer)
    return [*chain.from_iterable(turns)], "".join(whole), list(chunk.dropped)


@pytest.mark.parametrize("learn", ["turns", "completion"])
@pytest.mark.parametrize("answer", [INLINE, APART], ids=["inline", "apart"])
@pytest.mark.parametrize(
    ("name", "thinking", "expected"),
    [
        ("qwen3", True, "<think>\n2 and 3.\n</think>\n\n5.<|im_end|>\n"),
        ("qwen3", None, "<think>\n2 and 3.\n</think>\n\n5.<|im_end|>\n"),
        # Without thinking the prompt has the empty thought in it, and the model has to write the answer alone.
        ("qwen3", False, "5.<|im_end|>\n"),
        ("gptoss", True, f"{ANALYSIS}2 and 3.<|end|><|start|>assistant{FINAL}5.<|return|>"),
        ("gptoss", False, "<|channel|>final<|message|>5.<|return|>"),
        ("llama3", False, "5.<|eot_id|>"),
        ("llama3_1", False, "5.<|eot_id|>"),
    ],
)  # fmt: skip
def test_thoughts_are_learned_or_left_out(
    name: str, thinking: bool | None, expected: str, answer: dict[str, str], learn: str
) -> None:
    turns, whole, _ = learned(name, answer, thinking, learn)
    assert turns == [expected]
    assert ("2 and 3." in whole) == ("2 and 3." in expected)


def test_without_the_flag_the_data_is_left_as_it_is() -> None:
    assert learned("llama3", INLINE, None)[0] == [INLINE["content"] + "<|eot_id|>"]
    assert learned("llama3", UNCLOSED, None)[0] == [UNCLOSED["content"] + "<|eot_id|>"]
    (reason,) = learned("llama3", APART, None)[2]
    assert "no place for" in reason
    assert "cogumi.thinking: false" in reason


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
def test_a_thought_that_never_closes_is_not_learned(name: str, thinking: bool) -> None:
    assert learned(name, UNCLOSED, thinking)[2] == ["with a thought that never closes"]


def test_tags_that_an_answer_talks_about_stay() -> None:
    talk = say("Models write <think> and </think> around it.")
    assert learned("llama3", talk, False)[0] == [talk["content"] + "<|eot_id|>"]


def test_a_thought_that_the_prompt_opened() -> None:
    closed_only = say("2 and 3.\n</think>\n\n5.")
    assert learned("qwen3", closed_only, False)[0] == ["5.<|im_end|>\n"]
    assert learned("gptoss", closed_only, True)[0] == learned("gptoss", APART, True)[0]


@pytest.mark.parametrize(
    ("template", "flag", "kwargs"),
    [
        ("qwen3", True, {"enable_thinking": True}),
        ("qwen3", False, {"enable_thinking": False}),
        ("qwen3", None, {}),
        ("gptoss", True, {}),
        ("gptoss", False, {"reasoning_effort": "low"}),
        ("llama3", False, {}),
        ("deepseek_r1_distill", True, {}),
        ("glm4moe", False, {"enable_thinking": False}),
    ],
)
def test_the_switch_of_a_template(template: str, flag: bool | None, kwargs: dict[str, Any]) -> None:
    assert read_thinking((TEMPLATES / f"{template}.jinja").read_text(), flag).template_kwargs == kwargs


def test_a_flag_that_the_template_cannot_follow_is_refused(golden: Golden) -> None:
    with golden.raises("data", key="cogumi.thinking", message="true"):
        read_template(chat_tokenizer("llama3"), True)
    always = chat_tokenizer("qwen3")
    always.chat_template = (TEMPLATES / "deepseek_r1_distill.jinja").read_text()
    assert read_template(always, True).prompt_opens_thought
    with golden.raises("data", key="cogumi.thinking", message="false"):
        read_template(always, False)


def test_rendering_follows_the_flag_as_rollouts_do() -> None:
    tokenizer = chat_tokenizer("qwen3")
    for flag in (True, False, None):
        template = read_template(tokenizer, flag)
        rollout = tokenizer.apply_chat_template(
            [QUESTION], tokenize=False, add_generation_prompt=True, **template.thinking.template_kwargs
        )
        assert template.prompt([QUESTION]) == rollout
        assert rollout.endswith("</think>\n\n") == (flag is False)


@pytest.mark.parametrize(
    ("reply", "style", "opened", "seen"),
    [
        ("5.", "tags", False, "5."),
        ("  5.", "none", False, "  5."),
        ("<think>a</think>\n\n5.", "tags", False, "5."),
        ("<think>a <think> b</think>\n5.", "tags", False, "5."),
        ("<think>a</think>b<think>c</think>d", "tags", False, "bd"),
        ("<think>a", "tags", False, None),
        ("<think>a</think>b<think>c", "tags", False, None),
        ("a</think>\n\n5.", "tags", True, "5."),
        ("a</think>\n\n5.", "tags", False, "5."),
        ("a, so 5.", "tags", True, None),
        ("<think></think>", "tags", False, ""),
        (f"{ANALYSIS}a<|end|><|start|>assistant{FINAL}5.<|return|>", "harmony", False, "5."),
        ("<|channel|>final<|message|>5.<|return|>", "harmony", False, "5."),
        ("<|channel|>final<|message|>5. and", "harmony", False, "5. and"),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "harmony", False, "{}"),
        ("<|channel|>analysis<|message|>a", "harmony", False, None),
        ("<|channel|>analysis<|message|>a<|end|>", "harmony", False, None),
        ("5.", "harmony", False, None),
    ],
)  # fmt: skip
def test_what_a_reader_sees(reply: str, style: str, opened: bool, seen: str | None) -> None:
    assert visible_text(reply, style, opened) == seen


def is_five(prompts: Any, completions: Any, **_: Any) -> list[float]:
    """1 for the visible answer alone, and 2 for anything else, so that a 0 is nobody's but the wrapper's."""
    said = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [1.0 if text == "5." else 2.0 for text in said]


@pytest.mark.parametrize("conversational", [False, True])
@pytest.mark.parametrize(
    ("name", "replies"),
    [
        ("qwen3", ["<think>\na\n</think>\n\n5.<|im_end|>", "5.<|im_end|>", "<think>\n5.", "6.<|im_end|>"]),
        ("gptoss", [f"{ANALYSIS}a<|end|><|start|>assistant{FINAL}5.<|return|>", f"{FINAL}5.<|return|>", f"{ANALYSIS}5.",
                    f"{FINAL}6."]),
    ],
)  # fmt: skip
def test_rewards_see_the_answer_and_unfinished_is_zero(name: str, replies: list[str], conversational: bool) -> None:
    tokenizer = chat_tokenizer(name)
    style = read_template(tokenizer, True).thinking.style
    ids = [tokenizer(reply, add_special_tokens=False)["input_ids"] for reply in replies]
    decoded = tokenizer.batch_decode(ids, skip_special_tokens=True)
    completions = [[say(text)] for text in decoded] if conversational else decoded
    logged = {}
    reward = on_visible(is_five, tokenizer, style)
    assert reward.__name__ == "is_five"
    scores = reward(
        prompts=["p"] * 4, completions=completions, completion_ids=ids, log_metric=lambda *pair: logged.update([pair])
    )
    assert scores == [1.0, 1.0, 0.0, 2.0]
    assert logged == {"unfinished": 0.25}
    assert completions[0] == ([say(decoded[0])] if conversational else decoded[0])


def test_an_asynchronous_reward_is_refused() -> None:
    async def later(**_: Any) -> list[float]:
        return []

    with pytest.raises(TypeError, match="later is asynchronous"):
        on_visible(later, None, "tags")  # type: ignore[arg-type]


def test_a_real_trainer_rolls_out_and_grades_by_the_flag(tmp_path: Path) -> None:
    """GRPOTrainer on messages: the prompt it samples from has the switch in it, and thoughts are not graded."""
    import trl
    from datasets import Dataset

    import cogumi
    from cogumi.methods.gspo import apply_thinking
    from cogumi.rewards.functions import on_visible

    cogumi.patch()
    tokenizer = chat_tokenizer("qwen3")
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.extend(zip(completions, columns["answer"], strict=True))
        return [float(len(completion[-1]["content"])) for completion in completions]

    args = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=6, max_steps=1,
        use_cpu=True, bf16=False, report_to="none", logging_steps=1, gradient_checkpointing=False,
    )  # fmt: skip
    apply_thinking(False, args, tokenizer)
    rewards = [on_visible(reward, tokenizer, "tags", False)]
    assert args.chat_template_kwargs == {"enable_thinking": False}
    rows = [{"messages": [ask(text[:20]), PLAIN]} for text in texts()[:4]]
    chunk = chunk_of(rows, tokenizer, "gspo", thinking=False)
    prompts_and_answers = decode_rows(Dataset(chunk.table), chunk.encoded)
    torch.manual_seed(0)
    trainer = trl.GRPOTrainer(
        model=tiny_for(tokenizer), reward_funcs=rewards, args=args, train_dataset=prompts_and_answers, processing_class=tokenizer
    )  # fmt: skip
    prompts = trainer._tokenize_prompts(list(prompts_and_answers["prompt"]))[0]
    assert all(tokenizer.decode(ids).endswith("</think>\n\n") for ids in prompts)
    trainer.train()
    assert len(seen) == 4
    assert {answer for _, answer in seen} == {"5."}
    assert trainer.state.log_history[0]["unfinished"] == 0.0
    with pytest.raises(UsageError, match=r"kwargs.enable_thinking is False and cogumi.thinking is True"):
        apply_thinking(True, args, tokenizer)
