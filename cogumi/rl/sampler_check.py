"""Does vLLM sample from the weights that are trained? Its log-probabilities are compared with the trainer's.

Two engines never agree exactly, so one comparison cannot tell an old copy of the weights from other arithmetic. Some
texts of the first rollout are scored by both at each rollout instead. What the trainer's log-probabilities moved by
since the last agreement, the sampler's must have moved by too. An engine whose weights were not replaced gives the same
values again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from cogumi.patches.trl_internals import logged_metrics, observe_rollouts, rollout_mode
from cogumi.patches.vllm_engine import computing_dtype, observe_generation, score
from cogumi.rl.sampling import compute_trainer_logps

TEXTS, LONGEST = 4, 128  # how many texts are scored, and how many tokens of each
FIRST_ROLLOUTS = 3  # whose tokens are scored by the trainer too where TRL does not do so
# Mean difference between engines of the same weights, in nats: below it nothing is told before they
# have agreed once. Measured on the small base: 1e-6 in float32, 0.02 to 0.03 in bfloat16 (docs/rollouts.md).
USUAL = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
# Two agreeing engines differ by sqrt(2) times that in how far they moved. So a movement of 8 times that tells, and what they
# lack of it is counted from 3 times on.
TELLING, ALLOWED = 8.0, 3.0
AGREES = 0.05  # share of a movement that engines which agree may lack
STIRRED = 0.1  # of it, from which a change of the trainer's would have changed some of the sampler's values too
PREFIX = "sampling/probe/"


@dataclass(frozen=True)
class Scores:
    """Log-probabilities (N,) of the texts' tokens, in nats, by both."""

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
    observe_rollouts(trainer, check.on_rollout)


class SamplerCheck:
    """What was seen of one trainer and its engine."""

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
            self.sampled = torch.tensor([value for each in scores for value in each], dtype=torch.float64)

    def on_rollout(self, make: Callable[[Any], dict[str, Any]], inputs: Any) -> dict[str, Any]:
        batch = make(inputs)
        if rollout_mode(self.trainer) == "train":
            logged = logged_metrics(self.trainer, "train")
            self.rollouts += 1
            if not self.trainer.vllm_importance_sampling_correction:
                for name, value in self.compare_rollout(batch).items():
                    logged[f"sampling/sampling_logp_difference/{name}"].append(value)
            for name, value in weigh_correction(self.trainer.args, batch).items():
                logged[f"sampling/{name}"].append(value)
            for name, value in self.compare_texts().items():
                logged[PREFIX + name].append(value)
        return batch

    def compare_rollout(self, batch: dict[str, Any]) -> dict[str, float]:
        """TRL's figures of the rollout's own tokens, which it has only where it corrects for them."""
        sampled = batch.get("sampling_per_token_logps")
        if sampled is None or (self.rollouts > FIRST_ROLLOUTS and batch.get("old_per_token_logps") is None):
            return {}
        counted = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool() & torch.isfinite(sampled)
        away = (compute_trainer_logps(self.trainer, batch, "train") - sampled)[counted].abs()
        return {"mean": float(away.mean()), "max": float(away.max())} if len(away) else {}

    def compare_texts(self) -> dict[str, float]:
        """The metrics of the texts, and what is remembered of them for the next rollout."""
        if self.sampled is None:
            return {}
        now, self.sampled = Scores(self.sampled, score_by_trainer(self.trainer.model, self.texts)), None
        if self.last is None:
            base = score_by_base(self.trainer.model, self.texts)
            # An engine that was never given the adapter is at the base, and so is an adapter of zeros.
            self.since = [now if base is None else Scores(base, base)]
        changes = [(now.trainer - each.trainer, now.sampler - each.sampler) for each in self.since]
        lags = [
            max(0.0, mean_absolute(sampler - trainer) - ALLOWED * self.noise) / mean_absolute(trainer)
            for trainer, sampler in changes
            if mean_absolute(trainer) > TELLING * self.noise
        ]
        found = {"difference": now.difference, "moved": mean_absolute(changes[-1][0])}
        if self.last is not None and is_unchanged(self.last, now, STIRRED * self.noise):
            found["lag"] = 1.0
        elif lags:
            found["lag"] = max(lags)
        if self.last is None and not lags:
            self.since, self.noise = [now], max(now.difference, 1e-7)
        elif found.get("lag", 1.0) < AGREES:
            self.since = [self.since[0], now]
        self.last = now
        return found


def weigh_correction(args: Any, batch: dict[str, Any]) -> dict[str, float]:
    """What the bounds of the correction have changed of its weights, of tokens or of completions; {} where there is none."""
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


def is_unchanged(before: Scores, now: Scores, least: float) -> bool:
    """Whether the sampler gave the very same values although the trainer's moved, by at least so many nats."""
    return torch.equal(now.sampler, before.sampler) and mean_absolute(now.trainer - before.trainer) > least


def pick_texts(sequences: list[list[int]]) -> list[list[int]]:
    """The beginnings of some of a rollout's prompts and completions, each once. Without the last token, for which the engine
    has to have room behind a text; scoring takes two."""
    different = dict.fromkeys(tuple(each[:-1][:LONGEST]) for each in sequences if len(each) > 2)
    return [list(each) for each in different][:TEXTS]


@torch.no_grad()
def score_by_trainer(model: Any, texts: list[list[int]]) -> Tensor:
    """(N,) log-probabilities of every token but the first of each text, in nats, at temperature 1; on the CPU."""
    found = []
    for each in texts:  # one by one: the logits of a large vocabulary are large
        ids = torch.tensor([each], device=model.device)
        logps = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(logps.gather(1, ids[0, 1:, None])[:, 0].double().cpu())
    return torch.cat(found)


def score_by_base(model: Any, texts: list[list[int]]) -> Tensor | None:
    """The same without the adapter; None for a model that has none."""
    if not isinstance(model, PeftModel):
        return None
    with model.disable_adapter():
        return score_by_trainer(model, texts)
