"""What a GRPO trainer's sampler does beyond TRL's: it ends at stop sequences, and reports what it sampled with.

`cogumi.stop`: TRL 1.15 knows only tokens that end a sequence. The sampler searches for any other string, and cogumi
removes what `generate` pads behind it, because TRL would train on it.

`cogumi.behaviour_logps: rollout`: the ratio is taken against the log-probabilities the sampler itself had, as in
Fast-LLM. TRL takes `new.detach()`, or a second forward pass of the trainer. Its ratio then misses what the sampler
computed differently: its kernels, its dtype, older weights.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from cogumi.core.errors import UsageError
from cogumi.models.completion import cut_at_stop
from cogumi.patches import replaced
from cogumi.patches.trl_internals import (
    GENERATE,
    GENERATE_TURN,
    TOKEN_LOGPS,
    logged_metrics,
    observe_rollouts,
    rollout_mode,
    wrap_method,
)
from cogumi.rewards.functions import Reward, with_columns
from cogumi.rl.loss_capture import backend_of

log = logging.getLogger(__name__)


def stop_rollouts_at(trainer: Any, stops: Sequence[str]) -> None:
    """Let the rollouts of a `trl.GRPOTrainer` end at any of `stops`. Raises UsageError for settings that contradict it."""
    added = trainer.processing_class.get_added_vocab()  # control tokens, which no text can contain by chance
    tokens = {stop: added[stop] for stop in stops if stop in added}
    trainer.eos_token_ids = list(dict.fromkeys([*trainer.eos_token_ids, *tokens.values()]))
    strings = [stop for stop in stops if stop not in tokens]
    if strings and trainer.args.mask_truncated_completions:
        raise UsageError(
            f"TRL would mask completions that end at {strings[0]!r} too",
            key="train.mask_truncated_completions",
            fix="drop one of the two, or stop at tokens of the vocabulary only",
        )
    for key in ("stop", "stop_token_ids") if trainer.use_vllm else ("stop_strings", "eos_token_id"):
        if key in (trainer.args.generation_kwargs or {}):
            raise UsageError(f"train.generation_kwargs.{key} and cogumi.stop say the same", fix="drop one")
    if trainer.use_vllm:
        # vLLM searches its own text, out of which it leaves control tokens otherwise; TRL reads ids alone.
        more = {"stop": strings, "include_stop_str_in_output": True, "skip_special_tokens": False} if strings else {}
        trainer.vllm_generation.generation_kwargs = {**trainer.vllm_generation.generation_kwargs, **more}
        end_at_end_tokens(trainer)
    else:
        trainer.generation_config.eos_token_id = trainer.eos_token_ids
        trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids
        if strings:
            trainer.generation_config.stop_strings = strings
            stop_generation_at(trainer, strings)
    if strings:
        correct_length_metrics(trainer, strings)


def end_at_end_tokens(trainer: Any) -> None:
    """Let vLLM end completions at every end token that the trainer knows.

    vLLM reads end tokens from the base's files. The run's tokenizer may name another one, as that of an adapter does.
    vLLM would write on behind it, and TRL would train on that.
    """
    generation = trainer.vllm_generation
    given = generation.generation_kwargs.get("stop_token_ids") or ()
    ends = list(dict.fromkeys([*given, *trainer.eos_token_ids]))
    # A new one: it may be the config's.
    generation.generation_kwargs = {**generation.generation_kwargs, "stop_token_ids": ends}


def stop_generation_at(trainer: Any, strings: Sequence[str]) -> None:
    """Hand the tokenizer to `generate`, which searches for the strings, and take away the padding behind them."""
    model = trainer.model

    def generate_and_cut(generate_turn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        generate = functools.partial(model.generate, tokenizer=trainer.processing_class)
        with replaced(model, {"generate": generate}):
            completions, *more = generate_turn(*args, **kwargs)
        return [strip_padding(trainer, ids, strings) for ids in completions], *more

    wrap_method(trainer, GENERATE_TURN, generate_and_cut)


def strip_padding(trainer: Any, ids: list[int], strings: Sequence[str]) -> list[int]:
    """A completion up to its stop sequence; one that ended otherwise, or did not, as it is."""
    end = len(ids)
    while end and ids[end - 1] in (trainer.processing_class.pad_token_id, *trainer.eos_token_ids):
        end -= 1
    return ids[:end] if ends_in_stop(trainer, ids[:end], strings) else ids


def ends_in_stop(trainer: Any, ids: list[int], strings: Sequence[str]) -> bool:
    """Whether a completion ends in a stop sequence, or in a token that holds the end of one."""
    tail = trainer.processing_class.decode(ids[-max(map(len, strings)) - 1 :])
    return any(string in tail for string in strings)


def correct_length_metrics(trainer: Any, strings: Sequence[str]) -> None:
    """Correct what TRL logs of a rollout: a completion that stopped was not cut off."""

    def generate_and_correct(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = generate(*args, **kwargs)
        completions = found[1]
        ends = (*trainer.eos_token_ids, trainer.processing_class.pad_token_id)
        lengths = [len(ids) for ids in completions if ids[-1] in ends or ends_in_stop(trainer, ids, strings)]
        logged = logged_metrics(trainer, rollout_mode(trainer))
        logged["completions/clipped_ratio"][-1] = 1 - len(lengths) / len(completions)
        logged["completions/mean_terminated_length"][-1] = sum(lengths) / max(1, len(lengths))
        logged["completions/min_terminated_length"][-1] = float(min(lengths, default=0))
        logged["completions/max_terminated_length"][-1] = float(max(lengths, default=0))
        return found

    wrap_method(trainer, GENERATE, generate_and_correct)


def strip_stops(reward: Reward, stops: Sequence[str]) -> Reward:
    """The reward function, given completions up to their stop sequence: that is what a user of the model sees."""

    def cut(columns: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in ("completions", "replies") if name in columns]
        return columns | {name: [cut_at_stop(each, stops) for each in columns[name]] for name in names}

    return with_columns(reward, cut)


# ----------------------------------------------------------------------------------- the sampler's log-probabilities

# Settings that change the distribution that is sampled from, and the value at which they do not; nor does None, or -1.
RESHAPING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "typical_p": 1.0}
RESHAPING |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": 0.0}
# The same among vLLM's own, where anything that is set does.
RESHAPING_VLLM = (
    *("logit_bias", "allowed_token_ids", "bad_words", "presence_penalty", "frequency_penalty", "min_tokens"),
    "structured_outputs",
)


def reshaping_settings(args: Any) -> dict[str, Any]:
    """The settings of a GRPOConfig, generation_kwargs among them, that cut or bend the distribution that is sampled from."""
    settings = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    settings |= args.generation_kwargs or {}
    found = {
        name: settings[name] for name, neutral in RESHAPING.items() if settings.get(name) not in (None, -1, neutral)
    }
    if args.use_vllm:
        settings["vllm_structured_outputs_regex"] = args.vllm_structured_outputs_regex
        names = (*RESHAPING_VLLM, "vllm_structured_outputs_regex")
        found |= {name: settings[name] for name in names if settings.get(name)}
    return found


def use_rollout_logps(trainer: Any) -> None:
    """From the next rollout on, this GRPO trainer's old log-probabilities are the sampler's own.

    Call it once, on a built trainer, TRL's or unsloth's. vLLM and a `rollout_func` report log-probabilities, and this
    makes transformers' `generate` report them too: at the sampling temperature and over the whole vocabulary. Tokens
    the sampler could not score get the trainer's own; the metric "sampling/unscored_tokens" counts them per rollout.

    Raises UsageError for vLLM with its importance correction, which would correct for the sampler's numerics twice. It
    does so, too, where the sampler reports none (continuous batching, beam search).
    """
    asked = "cogumi.behaviour_logps"
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        refuse_double_correction()
    samples_here = not trainer.use_vllm and trainer.rollout_func is None
    if samples_here and trainer.args.use_transformers_continuous_batching:
        reason = "rollout needs log-probabilities, which continuous batching does not report"
        raise UsageError(reason, key=asked, fix="remove train.use_transformers_continuous_batching")
    if samples_here and (trainer.generation_config.num_beams or 1) > 1:
        reason = "rollout needs sampling, and train.generation_kwargs.num_beams asks for beam search"
        raise UsageError(reason, key=asked, fix="remove num_beams")
    if not trainer.use_vllm and (reshaped := reshaping_settings(trainer.args)):
        named = ", ".join(f"{name} {value}" for name, value in reshaped.items())
        log.warning("%s: rollout, and the sampler draws from another distribution than is scored: %s", asked, named)
    if samples_here:
        record_sampled_logps(trainer)
    use_sampled_as_old(trainer)
    trainer.cogumi_behaviour_logps = "rollout"


def refuse_double_correction() -> NoReturn:
    """Raise UsageError for `behaviour_logps: rollout` beside vLLM's correction."""
    reason = "rollout divides by vLLM's log-probabilities already, and TRL's correction would do so again"
    fix = "set cogumi.sampler_correction: none (in a script vllm_importance_sampling_correction=False)"
    raise UsageError(reason, key="cogumi.behaviour_logps", fix=fix)


def uses_rollout_logps(trainer: Any) -> bool:
    """Whether `use_rollout_logps` has been here."""
    return getattr(trainer, "cogumi_behaviour_logps", "trainer") == "rollout"


class SampledLogps(LogitsProcessor):
    """Remembers the log-probability of each token that `generate` samples; the scores pass through unchanged.

    Custom processors run after the penalties and before temperature and cuts (transformers 5.17, generation/utils.py,
    `_get_logits_processor`). Which token was drawn shows one step later, so one (B, V) tensor is held, never (B, T, V).
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.waiting: Tensor | None = None  # (B, V), of the step whose token is not drawn yet
        self.steps: list[Tensor] = []  # (B,) each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`input_ids` (B, so far), `scores` (B, V): returned as they are."""
        self.score_drawn(input_ids)
        self.waiting = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        return scores

    def score_drawn(self, sequences: Tensor) -> None:
        """Take the last column of `sequences` as what was drawn from the scores that wait."""
        if self.waiting is not None:
            self.steps.append(self.waiting.gather(1, sequences[:, -1:]).squeeze(1))
            self.waiting = None

    def per_completion(self, completions: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of each completion's tokens, in nats; what was drawn after its end is dropped."""
        rows = torch.stack(self.steps, dim=1).tolist()
        return [row[: len(ids)] for row, ids in zip(rows, completions, strict=True)]


def record_sampled_logps(trainer: Any) -> None:
    """Have each turn return the sampler's log-probabilities where TRL returns None."""

    def turn_with_logps(generate_turn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[list[float]]]:
        # What transformers divides the logits by: `generation_kwargs` may have replaced the trainer's temperature.
        temperature = trainer.generation_config.temperature
        sampled = SampledLogps(1.0 if temperature is None else float(temperature))
        with record_logps(trainer.accelerator.unwrap_model(trainer.model_wrapped), sampled):
            completions, _ = generate_turn(*args, **kwargs)
        return completions, sampled.per_completion(completions)

    wrap_method(trainer, GENERATE_TURN, turn_with_logps)


def record_logps(model: Any, sampled: SampledLogps) -> AbstractContextManager[None]:
    """While it is entered, `model.generate` runs with `sampled` among its processors."""
    generate = model.generate

    def generate_recorded(*args: Any, logits_processor: Any = None, **kwargs: Any) -> Any:
        processors = LogitsProcessorList([*(logits_processor or ()), sampled])
        sequences = generate(*args, logits_processor=processors, **kwargs)
        sampled.score_drawn(sequences)
        return sequences

    return replaced(model, {"generate": generate_recorded})


def use_sampled_as_old(trainer: Any) -> None:
    """Make each rollout's batch carry the sampler's log-probabilities as the old ones."""
    backend = backend_of(trainer)
    if backend == "unsloth" and trainer.args.delta is None:
        # With sampled log-probabilities as the old ones unsloth would cap the ratio at 3 where no delta is set.
        trainer.args.delta = float("inf")

    def score_with_rollout_logps(make: Callable[[Any], dict[str, Any]], inputs: Any) -> dict[str, Any]:
        mode = rollout_mode(trainer)
        batch = make(inputs)
        sampled = batch.get("sampling_per_token_logps")
        if sampled is None:
            missing = "cogumi.behaviour_logps: rollout, and the rollout came without log-probabilities"
            raise UsageError(missing, fix='let the rollout_func return them under "logprobs", one list per completion')
        unscored = ~torch.isfinite(sampled)
        counted = unscored & (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
        # Gathered, so that the processes agree on whether there is a forward pass: under FSDP it needs all of them.
        total = int(trainer.accelerator.gather(counted.sum()).sum())
        logged_metrics(trainer, mode)["sampling/unscored_tokens"].append(total)
        if backend == "unsloth":
            # unsloth packs rows to the left before its loss; only what it knows as sampled is packed with them. It
            # gives unscored tokens the new log-probability itself.
            batch.pop("old_per_token_logps", None)
            batch["unsloth_rollout_logps_as_old"] = torch.ones(len(sampled), dtype=torch.bool, device=sampled.device)
            return batch
        if total:
            sampled = torch.where(counted, compute_trainer_logps(trainer, batch, mode), sampled)
        # Outside the mask too: in the loss NaN times 0 would be NaN.
        batch["sampling_per_token_logps"] = sampled.masked_fill(unscored & ~counted, 0.0)
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        return batch

    observe_rollouts(trainer, score_with_rollout_logps)


def compute_trainer_logps(trainer: Any, batch: dict[str, Any], mode: str) -> Tensor:
    """(B, T) log-probabilities of a rollout's completions under the weights that are trained, without a graph."""
    if (computed := batch.get("old_per_token_logps")) is not None:
        return computed
    args, score = trainer.args, getattr(trainer, TOKEN_LOGPS)
    images = inspect.signature(getattr(type(trainer), TOKEN_LOGPS)).parameters  # named as the rollout's entries
    with torch.no_grad():
        result = score(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=args.per_device_train_batch_size if mode == "train" else args.per_device_eval_batch_size,
            **{name: batch[name] for name in images if name in batch},
        )
    return result[0]
