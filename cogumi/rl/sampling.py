"""Extend the rollouts of a GRPO trainer: stop sequences, the sampler's log-probabilities, unscored completions.

`cogumi.stop`: TRL 1.15 knows only tokens that end a sequence. The sampler searches for any other string, and cogumi
removes the padding that `generate` adds behind it, because TRL would train on it.

`cogumi.behaviour_logps: rollout`: the ratio is taken against the log-probabilities the sampler itself had, as in
Fast-LLM. TRL takes `new.detach()`, or a second forward pass of the trainer. Its ratio then misses what the sampler
computed differently: its kernels, its dtype, older weights.

`check_sampler`: does vLLM sample from the weights that are trained? Two engines never agree exactly, so one comparison
cannot tell an old copy of the weights from other arithmetic. Both score some texts of the first rollout at each rollout.
What the trainer's log-probabilities moved by since the last agreement, the sampler's must have moved by too. An engine
whose weights were not replaced gives the same values again.
"""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from cogumi.core.errors import UsageError
from cogumi.models.completion import cut_at_stop
from cogumi.patches import replaced
from cogumi.patches import trl_internals as internals
from cogumi.patches.vllm_engine import computing_dtype, observe_generation, score
from cogumi.rewards.functions import Reward, read_scores, with_columns
from cogumi.rl.loss_check import backend_of

log = logging.getLogger(__name__)
NOT_SCORED = "rewards/not_scored"


def stop_rollouts_at(trainer: Any, stops: Sequence[str]) -> None:
    """End the rollouts of a `trl.GRPOTrainer` at any of `stops`. Raises UsageError for settings that contradict it."""
    added = trainer.processing_class.get_added_vocab()  # control tokens, which no text can contain by chance
    tokens = {stop: added[stop] for stop in stops if stop in added}
    trainer.eos_token_ids = list(dict.fromkeys([*trainer.eos_token_ids, *tokens.values()]))
    strings = [stop for stop in stops if stop not in tokens]
    if strings and trainer.args.mask_truncated_completions:
        message = f"TRL would mask completions that end at {strings[0]!r} too"
        fix = "drop one of the two, or stop at tokens of the vocabulary only"
        raise UsageError(message, key="train.mask_truncated_completions", fix=fix)
    key = "stop_token_ids" if trainer.use_vllm else "eos_token_id"
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
    """Have vLLM end completions at every end token that the trainer knows.

    vLLM reads end tokens from the base's files. The run's tokenizer may name another one, as that of an adapter does.
    vLLM would write on behind it, and TRL would train on that.
    """
    generation = trainer.vllm_generation
    configured = generation.generation_kwargs.get("stop_token_ids") or ()
    ends = list(dict.fromkeys([*configured, *trainer.eos_token_ids]))
    # A new one: it may be the config's.
    generation.generation_kwargs = {**generation.generation_kwargs, "stop_token_ids": ends}


def stop_generation_at(trainer: Any, strings: Sequence[str]) -> None:
    """Hand the tokenizer to `generate`, which searches for the strings, and remove the padding behind them."""
    model = trainer.model

    def without_padding(ids: list[int]) -> list[int]:
        end = len(ids)
        while end and ids[end - 1] in (trainer.processing_class.pad_token_id, *trainer.eos_token_ids):
            end -= 1
        return ids[:end] if ends_in_stop(trainer, ids[:end], strings) else ids

    def generate_and_cut(generate_turn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        generate = functools.partial(model.generate, tokenizer=trainer.processing_class)
        with replaced(model, {"generate": generate}):
            completions, *more = generate_turn(*args, **kwargs)
        return [without_padding(ids) for ids in completions], *more

    internals.wrap_method(trainer, internals.GENERATE_TURN, generate_and_cut)


def ends_in_stop(trainer: Any, ids: list[int], strings: Sequence[str]) -> bool:
    """Return whether a completion ends in a stop sequence, or in a token that holds the end of one."""
    tail = trainer.processing_class.decode(ids[-max(map(len, strings)) - 1 :])
    return any(string in tail for string in strings)


def correct_length_metrics(trainer: Any, strings: Sequence[str]) -> None:
    """Correct the lengths that TRL logs of a rollout: a completion that stopped was not cut off."""

    def generate_and_correct(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        completions = result[1]
        ends = (*trainer.eos_token_ids, trainer.processing_class.pad_token_id)
        lengths = [len(ids) for ids in completions if ids[-1] in ends or ends_in_stop(trainer, ids, strings)]
        logged = internals.logged_metrics(trainer, internals.rollout_mode(trainer))
        logged["completions/clipped_ratio"][-1] = 1 - len(lengths) / len(completions)
        logged["completions/mean_terminated_length"][-1] = sum(lengths) / max(1, len(lengths))
        logged["completions/min_terminated_length"][-1] = float(min(lengths, default=0))
        logged["completions/max_terminated_length"][-1] = float(max(lengths, default=0))
        return result

    internals.wrap_method(trainer, internals.GENERATE, generate_and_correct)


def strip_stops(reward: Reward, stops: Sequence[str]) -> Reward:
    """Return the reward function, given completions up to their stop sequence, as a user of the model sees them."""

    def cut(columns: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in ("completions", "replies") if name in columns]
        return columns | {name: [cut_at_stop(text, stops) for text in columns[name]] for name in names}

    return with_columns(reward, cut)


# ----------------------------------------------------------------------------------- the sampler's log-probabilities

# Settings that change the distribution that is sampled from, and their neutral value; None and -1 are neutral too.
RESHAPING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "typical_p": 1.0}
RESHAPING |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": 0.0}
# vLLM's own, of which any value changes it.
RESHAPING_VLLM = (
    *("logit_bias", "allowed_token_ids", "bad_words", "presence_penalty", "frequency_penalty", "min_tokens"),
    "structured_outputs",
)


def reshaping_settings(args: Any) -> dict[str, Any]:
    """Return the settings of a GRPOConfig and its generation_kwargs that change the distribution that is sampled from."""
    settings = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    settings |= args.generation_kwargs or {}
    changed = {
        name: settings[name] for name, neutral in RESHAPING.items() if settings.get(name) not in (None, -1, neutral)
    }
    if args.use_vllm:
        settings["vllm_structured_outputs_regex"] = args.vllm_structured_outputs_regex
        names = (*RESHAPING_VLLM, "vllm_structured_outputs_regex")
        changed |= {name: settings[name] for name in names if settings.get(name)}
    return changed


def use_rollout_logps(trainer: Any) -> None:
    """Use the sampler's own log-probabilities as this GRPO trainer's old ones from the next rollout on.

    Call it once, on a built trainer, TRL's or unsloth's. vLLM and a `rollout_func` report log-probabilities, and this
    makes transformers' `generate` report them too: at the sampling temperature and over the whole vocabulary. Tokens
    the sampler could not score get the trainer's own; the metric "sampling/unscored_tokens" counts them per rollout.

    Raises UsageError where the sampler reports none (continuous batching, beam search).
    """
    if not trainer.use_vllm:
        key = "cogumi.behaviour_logps"
        if trainer.args.use_transformers_continuous_batching:
            reason = "rollout needs log-probabilities, which continuous batching does not report"
            raise UsageError(reason, key=key, fix="remove train.use_transformers_continuous_batching")
        if (trainer.generation_config.num_beams or 1) > 1:
            reason = "rollout needs sampling, and train.generation_kwargs.num_beams asks for beam search"
            raise UsageError(reason, key=key, fix="remove num_beams")
        if reshaped := reshaping_settings(trainer.args):
            named = ", ".join(f"{name} {value}" for name, value in reshaped.items())
            log.warning("%s: rollout, and the sampler draws from another distribution than is scored: %s", key, named)
        record_sampled_logps(trainer)
    use_sampled_as_old(trainer)
    trainer.cogumi_behaviour_logps = "rollout"


class SampledLogps(LogitsProcessor):
    """Record the log-probability of each token that `generate` samples; the scores pass through unchanged.

    Custom processors run after the penalties and before temperature and cuts (transformers 5.17, generation/utils.py,
    `_get_logits_processor`). Which token was drawn shows one step later, so one (B, V) tensor is held, never (B, T, V).
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.waiting: Tensor | None = None  # (B, V), of the step whose token is not drawn yet
        self.steps: list[Tensor] = []  # (B,) each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` (B, V) unchanged. `input_ids`: (B, so far)."""
        self.score_drawn(input_ids)
        self.waiting = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        return scores

    def score_drawn(self, sequences: Tensor) -> None:
        """Take the last column of `sequences` as what was drawn from the scores that wait."""
        if self.waiting is not None:
            self.steps.append(self.waiting.gather(1, sequences[:, -1:]).squeeze(1))
            self.waiting = None


def record_sampled_logps(trainer: Any) -> None:
    """Have each turn return the sampler's log-probabilities where TRL returns None."""

    def turn_with_logps(generate_turn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[list[float]]]:
        # What transformers divides the logits by: `generation_kwargs` may have replaced the trainer's temperature.
        temperature = trainer.generation_config.temperature
        sampled = SampledLogps(1.0 if temperature is None else float(temperature))
        with record_logps(trainer.accelerator.unwrap_model(trainer.model_wrapped), sampled):
            completions, _ = generate_turn(*args, **kwargs)
        rows = torch.stack(sampled.steps, dim=1).tolist()  # with those drawn after a completion's end
        return completions, [row[: len(ids)] for row, ids in zip(rows, completions, strict=True)]

    internals.wrap_method(trainer, internals.GENERATE_TURN, turn_with_logps)


def record_logps(model: Any, sampled: SampledLogps) -> AbstractContextManager[None]:
    """Have `model.generate` run with `sampled` among its processors in the block."""
    generate = model.generate

    def generate_recorded(*args: Any, logits_processor: Any = None, **kwargs: Any) -> Any:
        processors = LogitsProcessorList([*(logits_processor or ()), sampled])
        sequences = generate(*args, logits_processor=processors, **kwargs)
        sampled.score_drawn(sequences)
        return sequences

    return replaced(model, {"generate": generate_recorded})


def use_sampled_as_old(trainer: Any) -> None:
    """Have each rollout's batch carry the sampler's log-probabilities as the old ones."""
    backend = backend_of(trainer)
    if backend == "unsloth" and trainer.args.delta is None:
        # With sampled log-probabilities as the old ones unsloth would cap the ratio at 3 where no delta is set.
        trainer.args.delta = float("inf")

    def score_with_rollout_logps(make: Callable[[Any], dict[str, Any]], inputs: Any) -> dict[str, Any]:
        mode = internals.rollout_mode(trainer)
        batch = make(inputs)
        sampled = batch.get("sampling_per_token_logps")
        if sampled is None:
            missing = "cogumi.behaviour_logps: rollout, and the rollout came without log-probabilities"
            raise UsageError(missing, fix='let the rollout_func return them under "logprobs", one list per completion')
        unscored = ~torch.isfinite(sampled)
        counted = unscored & (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
        # Gathered, so that the processes agree on whether there is a forward pass: under FSDP it needs all of them.
        total = int(trainer.accelerator.gather(counted.sum()).sum())
        internals.logged_metrics(trainer, mode)["sampling/unscored_tokens"].append(total)
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

    internals.observe_rollouts(trainer, score_with_rollout_logps)


def compute_trainer_logps(trainer: Any, batch: dict[str, Any], mode: str) -> Tensor:
    """Return (B, T) log-probabilities of a rollout's completions under the trained weights, without a graph."""
    if (computed := batch.get("old_per_token_logps")) is not None:
        return computed
    args, compute = trainer.args, getattr(trainer, internals.TOKEN_LOGPS)
    # Images are named as the rollout's entries.
    images = inspect.signature(getattr(type(trainer), internals.TOKEN_LOGPS)).parameters
    with torch.no_grad():
        result = compute(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=args.per_device_train_batch_size if mode == "train" else args.per_device_eval_batch_size,
            **{name: batch[name] for name in images if name in batch},
        )
    return result[0]


# ------------------------------------------------------------------------------------------- completions without a score


def leave_out_unscored(trainer: Any) -> None:
    """Have a GRPO trainer take NaN from a reward function for a completion without any reward. Call it once.

    A reward function returns None where it does not apply to a row, as in TRL 1.15, which adds up the others. It returns
    NaN where a score could not be had: the program crashed, or ran out of time. A sum would take that for 0. So the whole
    completion has no reward then, its advantage is 0, and `rewards/not_scored` logs the share of a rollout with any.
    """
    unscored: set[int] = set()  # of this process's completions, in one rollout
    trainer.reward_funcs = [note_unscored(reward, unscored) for reward in trainer.reward_funcs]

    def calculate(original: Callable[..., Tensor], inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Tensor:
        unscored.clear()
        scores = original(inputs, *args, **kwargs)  # (completions of all processes, reward functions)
        here = torch.tensor([number in unscored for number in range(len(inputs))], device=scores.device)
        everywhere = trainer.accelerator.gather(here)
        scores[everywhere] = math.nan
        if everywhere.any():
            internals.logged_metrics(trainer, internals.rollout_mode(trainer))[NOT_SCORED].append(
                float(everywhere.float().mean())
            )
        return scores

    internals.wrap_method(trainer, internals.CALCULATE_REWARDS, calculate)


def note_unscored(reward: Reward, unscored: set[int]) -> Reward:
    """Wrap a reward function: the positions of NaN in what it returns are added to `unscored`."""

    def note(scores: Any, columns: Mapping[str, Any]) -> list[float | None]:
        numbers = read_scores(reward, scores, len(columns["completions"]))
        unscored.update(n for n, value in enumerate(numbers) if value is not None and math.isnan(value))
        return numbers

    return with_columns(reward, dict, note)


# ---------------------------------------------------------------------------------------------- vLLM beside the trainer

TEXTS, LONGEST = 4, 128  # how many texts both score, and how many tokens of each
FIRST_ROLLOUTS = 3  # whose tokens are scored by the trainer too where TRL does not do so
# Mean difference between engines of the same weights, in nats; smaller ones say nothing before they
# have agreed once. Measured on the small base: 1e-6 in float32, 0.02 to 0.03 in bfloat16 (docs/rollouts.md).
USUAL = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
# Two agreeing engines differ by sqrt(2) times that in how far they moved. So a movement of 8 times that is compared, and
# the lag beyond 3 times that is counted.
MIN_MOVEMENT, ALLOWED_LAG = 8.0, 3.0
MAX_AGREEING_LAG = 0.05  # share of a movement that engines which agree may lack
MIN_VISIBLE_MOVEMENT = 0.1  # from which a change of the trainer would have changed some of the sampler's values too
PROBE_PREFIX = "sampling/probe/"


@dataclass(frozen=True)
class Scores:
    """Log-probabilities (N,) of the texts' tokens, in nats, by both engines."""

    sampler: Tensor
    trainer: Tensor

    @property
    def difference(self) -> float:
        return mean_absolute(self.sampler - self.trainer)


def mean_absolute(values: Tensor) -> float:
    return float(values.abs().mean())  # a few improbable tokens would decide a mean of squares


def check_sampler(trainer: Any) -> None:
    """Compare vLLM with this GRPO trainer at each rollout, and log it. A trainer without TRL's vLLM has nothing to compare.

    Call it before `use_rollout_logps`, which puts the sampler's values in the place of the trainer's.

    The metrics are means of absolute values, in nats:

    - `sampling/sampling_logp_difference/mean` and `/max`: of the rollout's own tokens. TRL logs them where its correction
      is on; elsewhere they are of the first three rollouts.
    - `sampling/probe/difference`: of the tokens of four texts.
    - `sampling/probe/moved`: by how much the trainer's values of these moved since both last agreed.
    - `sampling/probe/lag`: the share of it that the sampler lacks beyond the difference of arithmetic, once it can be told.
    - `sampling/corrected_share`: of the weights of TRL's correction, those that were masked or truncated.
    - `sampling/effective_share`: the share of its weights that is in effect, (sum w)^2 / (n sum w^2), Kish 1965.
    """
    if getattr(trainer, "vllm_generation", None) is None or getattr(trainer, "cogumi_checks_sampler", False):
        return
    trainer.cogumi_checks_sampler = True
    check = SamplerCheck(trainer)
    observe_generation(trainer.vllm_generation, check.score_texts)
    internals.observe_rollouts(trainer, check.on_rollout)


class SamplerCheck:
    """The comparison of one trainer and its engine over the rollouts."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.texts: list[list[int]] = []
        self.sampled: Tensor | None = None  # (N,), of this rollout
        self.step = -1  # whose rollout was scored last
        self.since: list[Scores] = []  # of the first rollout, and of the last at which both agreed
        self.noise = USUAL.get(computing_dtype(trainer.model, trainer.accelerator), 0.05)
        self.last: Scores | None = None
        self.rollouts = 0

    def score_texts(self, sequences: list[list[int]]) -> None:
        """Have the engine score the texts, once a step: a rollout of several turns asks it more often."""
        if not self.trainer.model.training or self.trainer.state.global_step == self.step:
            return
        self.step = self.trainer.state.global_step
        self.texts = self.texts or pick_texts(sequences)
        if self.texts:
            scores = score(self.trainer.vllm_generation, self.texts)
            self.sampled = torch.tensor([value for text in scores for value in text], dtype=torch.float64)

    def on_rollout(self, make: Callable[[Any], dict[str, Any]], inputs: Any) -> dict[str, Any]:
        batch = make(inputs)
        if internals.rollout_mode(self.trainer) == "train":
            logged = internals.logged_metrics(self.trainer, "train")
            self.rollouts += 1
            if not self.trainer.vllm_importance_sampling_correction:
                for name, value in self.compare_rollout(batch).items():
                    logged[f"sampling/sampling_logp_difference/{name}"].append(value)
            for name, value in correction_metrics(self.trainer.args, batch).items():
                logged[f"sampling/{name}"].append(value)
            for name, value in self.compare_texts().items():
                logged[PROBE_PREFIX + name].append(value)
        return batch

    def compare_rollout(self, batch: dict[str, Any]) -> dict[str, float]:
        """Return TRL's figures of the rollout's own tokens, which it logs only where it corrects for them."""
        sampled = batch.get("sampling_per_token_logps")
        if sampled is None or (self.rollouts > FIRST_ROLLOUTS and batch.get("old_per_token_logps") is None):
            return {}
        counted = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool() & torch.isfinite(sampled)
        away = (compute_trainer_logps(self.trainer, batch, "train") - sampled)[counted].abs()
        return {"mean": float(away.mean()), "max": float(away.max())} if len(away) else {}

    def compare_texts(self) -> dict[str, float]:
        """Return the metrics of the texts, and remember their scores for the next rollout."""
        if self.sampled is None:
            return {}
        now, self.sampled = Scores(self.sampled, score_by_trainer(self.trainer.model, self.texts)), None
        if self.last is None:
            self.since = [now]
            if isinstance(self.trainer.model, PeftModel):
                # An engine that was never given the adapter is at the base, and so is an adapter of zeros.
                with self.trainer.model.disable_adapter():
                    base = score_by_trainer(self.trainer.model, self.texts)
                self.since = [Scores(base, base)]
        changes = [(now.trainer - scores.trainer, now.sampler - scores.sampler) for scores in self.since]
        lags = [
            max(0.0, mean_absolute(sampler - trainer) - ALLOWED_LAG * self.noise) / mean_absolute(trainer)
            for trainer, sampler in changes
            if mean_absolute(trainer) > MIN_MOVEMENT * self.noise
        ]
        metrics = {"difference": now.difference, "moved": mean_absolute(changes[-1][0])}
        # The sampler gave the very same values although the trainer's moved.
        if (
            self.last is not None
            and torch.equal(now.sampler, self.last.sampler)
            and mean_absolute(now.trainer - self.last.trainer) > MIN_VISIBLE_MOVEMENT * self.noise
        ):
            metrics["lag"] = 1.0
        elif lags:
            metrics["lag"] = max(lags)
        if self.last is None and not lags:
            self.since, self.noise = [now], max(now.difference, 1e-7)
        elif metrics.get("lag", 1.0) < MAX_AGREEING_LAG:
            self.since = [self.since[0], now]
        self.last = now
        return metrics


def correction_metrics(args: Any, batch: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of the correction's weights, of tokens or of completions; {} without a correction."""
    weights = batch.get("importance_sampling_ratio")
    if weights is None:
        return {}
    if weights.shape[1] > 1:
        weights = weights[(batch["completion_mask"] * batch.get("tool_mask", 1)).bool()]
    if not weights.numel():
        return {}
    changed = weights == 0
    for bound in (args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max):
        if bound is not None and args.vllm_importance_sampling_mode.endswith("truncate"):
            changed |= weights == bound
    weights = weights.double()  # only now: a bound is one of the dtype of the weights
    squares = float(weights.square().sum())
    effective = float(weights.sum()) ** 2 / (weights.numel() * squares) if squares else 0.0
    return {"corrected_share": float(changed.double().mean()), "effective_share": effective}


def pick_texts(sequences: list[list[int]]) -> list[list[int]]:
    """Return the beginnings of some of a rollout's prompts and completions, each once.

    Without the last token, for which the engine needs room behind a text. Scoring takes at least two tokens.
    """
    different = dict.fromkeys(tuple(ids[:-1][:LONGEST]) for ids in sequences if len(ids) > 2)
    return [list(ids) for ids in different][:TEXTS]


@torch.no_grad()
def score_by_trainer(model: Any, texts: list[list[int]]) -> Tensor:
    """Return (N,) log-probabilities of every token but the first of each text, in nats, at temperature 1; on the CPU."""
    scores = []
    for text in texts:  # one by one: the logits of a large vocabulary are large
        ids = torch.tensor([text], device=model.device)
        logps = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        scores.append(logps.gather(1, ids[0, 1:, None])[:, 0].double().cpu())
    return torch.cat(scores)
