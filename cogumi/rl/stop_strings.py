"""Stop sequences of a rollout (`cogumi.stop`): where a completion ends besides the end of sequence.

TRL 1.15 knows only tokens that end a sequence. With `generation_kwargs: {stop_strings: ...}` transformers asks for a
tokenizer that TRL does not pass; the padding behind a completion that stopped would be trained on, and counted as cut off
at `max_completion_length`. Here a stop sequence that is one token of its own ends the sequence, as far as TRL is
concerned; any other string is looked for while text is written, and what follows it is taken away again.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from cogumi.core.errors import UsageError
from cogumi.models.completion import cut

Reward = Callable[..., list[float]]


def stop_tokens(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> dict[str, int]:
    """Those stop sequences that are control tokens, which no text can contain by chance."""
    added = tokenizer.get_added_vocab()
    return {stop: added[stop] for stop in stops if stop in added}


def stop_at(trainer: Any, stops: Sequence[str]) -> None:
    """Let the rollouts of a `trl.GRPOTrainer` end at any of `stops`.

    Raises UsageError for settings under which a stopped completion would be taken for one that was cut off.
    """
    tokenizer = trainer.processing_class
    tokens = stop_tokens(tokenizer, stops)
    trainer.eos_token_ids = list(dict.fromkeys([*trainer.eos_token_ids, *tokens.values()]))
    strings = [stop for stop in stops if stop not in tokens]
    if strings and trainer.args.mask_truncated_completions:
        raise UsageError(
            f"TRL would mask completions that end at {strings[0]!r} too",
            key="train.mask_truncated_completions",
            fix="drop one of the two, or stop at tokens of the vocabulary only",
        )
    if trainer.use_vllm:
        refuse_set_twice(trainer, ("stop", "stop_token_ids"))
        trainer.vllm_generation.generation_kwargs = {
            **(trainer.vllm_generation.generation_kwargs or {}),
            "stop": strings,
            "stop_token_ids": list(tokens.values()),
            "include_stop_str_in_output": True,
        }
    else:
        refuse_set_twice(trainer, ("stop_strings", "eos_token_id"))
        trainer.generation_config.eos_token_id = trainer.eos_token_ids
        trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids
        if strings:
            trainer.generation_config.stop_strings = strings
            end_rollouts_at(trainer, strings)
    if strings:
        count_as_ended(trainer, strings)


def refuse_set_twice(trainer: Any, keys: Sequence[str]) -> None:
    for key in keys:
        if key in (trainer.args.generation_kwargs or {}):
            raise UsageError(f"train.generation_kwargs.{key} and cogumi.stop say the same", fix="drop one")


def end_rollouts_at(trainer: Any, strings: Sequence[str]) -> None:
    """Hand the tokenizer to `generate`, which looks for the strings, and take away the padding behind them."""
    generate_turn, tokenizer, model = trainer._generate_single_turn, trainer.processing_class, trainer.model

    def generate_and_cut(*args: Any, **kwargs: Any) -> Any:
        model.generate = functools.partial(type(model).generate, model, tokenizer=tokenizer)
        try:
            completions, *more = generate_turn(*args, **kwargs)
        finally:
            del model.generate
        return [without_padding(trainer, ids, strings) for ids in completions], *more

    trainer._generate_single_turn = generate_and_cut


def without_padding(trainer: Any, ids: list[int], strings: Sequence[str]) -> list[int]:
    """A completion up to its stop sequence; one that ended otherwise, or did not, as it is."""
    end = len(ids)
    while end and ids[end - 1] in (trainer.processing_class.pad_token_id, *trainer.eos_token_ids):
        end -= 1
    return ids[:end] if stopped(trainer, ids[:end], strings) else ids


def stopped(trainer: Any, ids: list[int], strings: Sequence[str]) -> bool:
    """Whether a completion ends in a stop sequence, or in a token that holds the end of one."""
    longest = max(map(len, strings))
    tail = trainer.processing_class.decode(ids[-longest - 1 :])
    return any(string in tail for string in strings)


def count_as_ended(trainer: Any, strings: Sequence[str]) -> None:
    """Correct what TRL logs of a rollout: a completion that stopped was not cut off."""
    generate = trainer._generate

    def generate_and_correct(*args: Any, **kwargs: Any) -> Any:
        found = generate(*args, **kwargs)
        completions = found[1]
        ends = (*trainer.eos_token_ids, trainer.processing_class.pad_token_id)
        lengths = [len(ids) for ids in completions if ids[-1] in ends or stopped(trainer, ids, strings)] or [0]
        cut_off = 1 - len(lengths) / len(completions) if lengths != [0] else 1.0
        logged = trainer._metrics["train" if trainer.model.training else "eval"]
        logged["completions/clipped_ratio"][-1] = cut_off
        logged["completions/mean_terminated_length"][-1] = sum(lengths) / len(lengths)
        logged["completions/min_terminated_length"][-1] = float(min(lengths))
        logged["completions/max_terminated_length"][-1] = float(max(lengths))
        return found

    trainer._generate = generate_and_correct


def graded_without(reward: Reward, stops: Sequence[str]) -> Reward:
    """The reward function, given completions up to their stop sequence: that is what a user of the model sees."""

    @functools.wraps(reward)
    def graded(*args: Any, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        return reward(*args, completions=[cut(completion, stops) for completion in completions], **kwargs)

    return graded
