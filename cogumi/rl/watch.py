"""Watches a GRPO trainer: checks it before the first rollout, measures every step, proves the loss in the first ones.

A run does so, and `cogumi.patch()` for every trainer whose config says `loss_type="gspo"`. It changes three things about
the training. It forms GSPO-token's ratio, which no TRL setting expresses. It gives prompts and completions to a reward
function in the shape that its annotations name. It has unsloth's old log-probabilities scored as its new ones are.
"""

import inspect
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from cogumi.config.presets import WITH_TOKEN_RATIO
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import write_json
from cogumi.patches.gspo_loss import loss_name
from cogumi.patches.trl_internals import INNER_LOSS, logged_metrics, observe_rollouts, rollout_position
from cogumi.rewards.named_rewards import as_annotated
from cogumi.rl.guards import OWN_OBJECTIVE, accepted_by, format_accept_call, guard_trainer, is_run_trainer
from cogumi.rl.loss_capture import (
    Backend,
    LossInputs,
    backend_of,
    capture_loss_inputs,
    is_per_sequence,
    sequence_log_ratio,
)
from cogumi.rl.loss_check import LossCheck, WrongLossError, list_unchecked_terms
from cogumi.rl.rescoring import score_old_by_training_pass
from cogumi.rl.sampler_check import check_sampler
from cogumi.rl.sampling import uses_rollout_logps

log = logging.getLogger("cogumi")
RECORD = "loss.json"
PREFIX = "policy/"
FP32_HEAD = "Take an fp32 head on both sides"
EXACT_TRL = "With cogumi.backend: trl they were 1 to the bit where this was measured (docs/measured.md); take it"
NOT_THE_USERS = ("trl.", "transformers.", "unsloth", "cogumi.")
EXTREMES = {f"{PREFIX}max_ratio": max, f"{PREFIX}min_ratio": min}


def watch(trainer: Any, record: str | Path | None = None) -> "LossWatch":
    """Guard, measure and prove a `trl.GRPOTrainer`; watching it twice is watching it once.

    `record`: where the description of the loss that ran goes, by default `loss.json` in the trainer's output directory.
    The guards raise UsageError when training begins, or when `.guard()` is called.
    """
    watching = next((each for each in trainer.callback_handler.callbacks if isinstance(each, LossWatch)), None)
    if watching is None:
        watching = LossWatch(trainer, Path(trainer.args.output_dir) / RECORD)
        trainer.add_callback(watching)
    if record is not None:
        watching.record = Path(record)
    return watching


class LossWatch(TrainerCallback):
    """Wraps two methods of one trainer, and follows it as a callback."""

    def __init__(self, trainer: Any, record: Path) -> None:
        self.trainer, self.record = trainer, record
        name = loss_name(trainer.args)
        self.token_ratio = name == WITH_TOKEN_RATIO
        self.metrics = PolicyMetrics()
        self.proof: LossCheck | None = None
        self.guarded, self.first_step = False, True
        self.rollout_step = 0
        trainer.reward_funcs = [as_annotated(each) for each in trainer.reward_funcs]
        self.compute_loss, trainer.compute_loss = trainer.compute_loss, self.compute_watched_loss
        check_sampler(trainer)
        observe_rollouts(trainer, self.on_rollout)
        if backend_of(trainer) == "unsloth":
            score_old_by_training_pass(trainer, self.compute_loss)

    def guard(self) -> None:
        """Refuse, or warn about, what the settings would make of the run; once, unless it was refused."""
        if self.guarded:
            return
        backend = backend_of(self.trainer)
        if self.token_ratio and backend == "unsloth":
            raise UsageError(
                "train.loss_type gspo-token: unsloth's loss cannot form its ratio",
                fix="set train.loss_type: gspo, which is the same where advantages do not vary along a completion",
            )
        sampler, accepted = uses_rollout_logps(self.trainer), accepted_by(self.trainer)
        for warning in guard_trainer(self.trainer, backend=backend, rollout_logps=sampler, accepted=accepted):
            log.warning("%s", warning)
        written = self.written(backend)
        if OWN_OBJECTIVE in accepted:
            own = written or getattr(type(self.trainer), INNER_LOSS)
            self.proof = LossCheck({}, self.token_ratio, [OWN_OBJECTIVE], own, own=True)
            log.warning("accepted (%s): %s.%s computes the loss, and is compared with no formula",
                        OWN_OBJECTIVE, own.__module__, own.__qualname__)  # fmt: skip
        else:
            args = self.trainer.args
            high = args.epsilon if args.epsilon_high is None else args.epsilon_high
            asked = {name: getattr(args, name) for name in ("loss_type", "importance_sampling_level", "delta", "beta")}
            asked |= {"epsilon_low": args.epsilon, "epsilon_high": high}
            self.proof = LossCheck(asked, self.token_ratio, list_unchecked_terms(self.trainer), written=written)
        self.guarded = True

    def written(self, backend: Backend) -> Any:
        """The user's function that the loss comes out of, the outer one of two; None where there is none."""
        inner = getattr(self.trainer, INNER_LOSS, None)
        candidates = [self.trainer.compute_loss, self.compute_loss, inner]  # the first may be set over the watch's own
        for each in candidates:
            function = inspect.unwrap(getattr(each, "__func__", each)) if each is not None else None
            # unsloth's trainers are in modules that are named after them.
            if function is None or function.__module__.lower().startswith(NOT_THE_USERS):
                continue
            if each is not inner or backend == "trl":
                return function
            if OWN_OBJECTIVE in accepted_by(self.trainer):
                fix = "override compute_loss instead"
                raise UsageError("unsloth never calls _compute_loss", place=function.__qualname__, fix=fix)
        return None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.guard()
        # One that is resumed inside a rollout has its completions from the checkpoint: they were made some steps ago.
        rollout = args.steps_per_generation * self.trainer.num_iterations
        micro_batches = rollout_position(self.trainer)[0] % rollout
        self.rollout_step = state.global_step - micro_batches // args.gradient_accumulation_steps

    def on_rollout(self, make: Callable[[Any], Any], inputs: Any) -> Any:
        self.guard()  # an evaluation before training is a rollout too
        if self.trainer.model.training:
            self.rollout_step = self.trainer.state.global_step
        return make(inputs)

    def compute_watched_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        training = self.trainer.model.training
        if not training and not self.token_ratio:
            return self.compute_loss(model, inputs, *args, **kwargs)
        inputs = dict(inputs)  # the trainer keeps the rollout for later steps
        with capture_loss_inputs(self.trainer, inputs, self.token_ratio) as calls:
            loss: Tensor = self.compute_loss(model, inputs, *args, **kwargs)
        for call in calls:
            if training and call.new.requires_grad:  # a subclass may score without a graph, for a figure of its own
                self.metrics.add(call, self.staleness(), self.token_ratio)
                if self.proof is not None:
                    self.proof.add(call, loss)
        return loss

    def staleness(self) -> float:
        """Documents trained on since the policy that wrote this rollout."""
        args = self.trainer.args
        documents = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return float((self.trainer.state.global_step - self.rollout_step) * documents)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.proof is not None:
            scaler = self.trainer.accelerator.scaler
            try:
                found = self.proof.check(scale=scaler.get_scale() if scaler is not None else 1.0)
            except WrongLossError as error:
                self.guarded = False  # a training that is begun again is checked again
                if is_run_trainer(self.trainer):
                    raise
                own = format_accept_call(OWN_OBJECTIVE, accepted_by(self.trainer))
                raise WrongLossError(f"{error}; where the objective, or a term of it, is your own: {own}") from None
            self.proof = None if self.proof.is_complete else self.proof
            if self.trainer.accelerator.is_main_process:
                self.record.parent.mkdir(parents=True, exist_ok=True)
                asked = {"loss": loss_name(self.trainer.args), "backend": backend_of(self.trainer)}
                write_json(self.record, asked | {"accepted": sorted(accepted_by(self.trainer))} | found)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        logged, metrics = logged_metrics(self.trainer, "train"), self.metrics.take(self.trainer.accelerator)
        on_policy = self.rollout_step == self.trainer.state.global_step - 1
        if self.first_step and on_policy and metrics.get(f"{PREFIX}clipped_ratio_fraction", 0.0) > 0:
            log.warning(
                "step 1: the ratios are up to %.2g away from 1 and %.0f%% of them outside the clip, before anything was "
                "learned: sampler's and trainer's numerics differ. %s, or widen the clip",
                max(metrics[f"{PREFIX}max_ratio"] - 1, 1 - metrics[f"{PREFIX}min_ratio"]),
                100 * metrics[f"{PREFIX}clipped_ratio_fraction"],
                EXACT_TRL if backend_of(self.trainer) == "unsloth" else FP32_HEAD,
            )
        self.first_step = False
        for name, value in metrics.items():
            if name in EXTREMES:  # TRL logs the mean over the steps since it last did
                logged[name] = [EXTREMES[name]([*logged[name], value])]
            else:
                logged[name].append(value)


# A step's metrics, under Fast-LLM's names (`fast_llm/layers/language_model/loss/policy_gradient.py`), over the whole
# optimizer step. The KL estimate R - log R - 1 is Schulman's k3 (http://joschu.net/blog/kl-approx.html). Means are over
# documents (completions with at least one token that counts), each token weighing 1 / its document's length.
# Micro-batches are summed before anything is divided, so that a metric does not depend on how a step was cut up.
MEANS = ("new_logprobs", "old_logprobs", "ratio_new_old", "kl_new_old", "clipped_ratio_fraction", "staleness")


class PolicyMetrics:
    """Sums of one optimizer step, kept on the device: one transfer a step, none per micro-batch."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.extremes: Tensor | None = None  # (2,): the largest ratio, and the smallest times -1

    def add(self, call: LossInputs, staleness: float, token_ratio: bool = False) -> None:
        """One micro-batch; `staleness`: documents trained on since the policy that wrote it."""
        with torch.no_grad():
            sums, extremes = reduce_micro_batch(call, staleness, token_ratio)
        self.sums = {name: self.sums[name] + value if self.sums else value for name, value in sums.items()}
        self.extremes = extremes if self.extremes is None else torch.maximum(self.extremes, extremes)

    def take(self, accelerator: Any) -> dict[str, float]:
        """The step's metrics over all processes, named `policy/...`; empty if no micro-batch was added. Starts anew."""
        if self.extremes is None:
            return {}
        gathered = accelerator.gather(torch.cat([torch.stack(list(self.sums.values())), self.extremes])[None]).cpu()
        summed = dict(zip(self.sums, gathered[:, :-2].sum(0).tolist(), strict=True))
        largest, smallest = gathered[:, -2:].amax(0).tolist()
        self.sums, self.extremes = {}, None
        metrics = {name: summed[name] / max(summed["num_segments"], 1.0) for name in MEANS}
        metrics |= {name: summed[name] for name in ("num_tokens", "num_segments")}
        if summed["num_segments"] > 0:
            metrics |= {"max_ratio": largest, "min_ratio": -smallest}
        # (sum R)^2 / (n sum R^2), the share of n samples that importance weights leave in effect, in (0, 1]. Kish 1965.
        squares = summed["num_ratios"] * summed["squared_ratios"]
        metrics["effective_sample_size"] = summed["ratios"] ** 2 / squares if squares > 0 else math.nan
        return {PREFIX + name: value for name, value in metrics.items()}


def reduce_micro_batch(call: LossInputs, staleness: float, token_ratio: bool) -> tuple[dict[str, Tensor], Tensor]:
    """(sums by name, the largest ratio and the largest negative one (2,)) of one micro-batch, float64."""
    keep = call.mask > 0
    mask = keep.double()
    lengths = mask.sum(-1)
    nonempty = lengths > 0
    weight = mask / lengths.clamp(min=1)[:, None]  # sums to 1 over a document
    documents = nonempty.double()

    def per_document(tokens: Tensor) -> Tensor:
        # A masked position may hold anything, infinities included.
        return (torch.where(keep, tokens.detach().double(), 0.0) * weight).sum()

    if is_per_sequence(call, token_ratio):
        log_ratio = torch.where(nonempty, sequence_log_ratio(call).double(), 0.0)
        share = own = documents
    else:
        log_ratio = torch.where(keep, (call.new.detach() - call.old_logps()).double(), 0.0)
        share, own = weight, mask
    ratio = torch.exp(log_ratio)
    low, high = call.arguments["epsilon_low"], call.arguments["epsilon_high"]
    clipped = ((ratio < 1 - low) | (ratio > 1 + high)).double()
    sums = {
        "new_logprobs": per_document(call.new),
        "old_logprobs": per_document(call.old_logps()),
        "ratio_new_old": (ratio * share).sum(),
        "kl_new_old": ((ratio - log_ratio - 1) * share).sum(),
        "clipped_ratio_fraction": (clipped * share).sum(),
        # Over what has a ratio of its own: documents at sequence level, tokens at token level.
        "ratios": (ratio * own).sum(),
        "squared_ratios": (ratio.square() * own).sum(),
        "num_ratios": own.sum(),
        "num_tokens": mask.sum(),
        "num_segments": documents.sum(),
        "staleness": documents.sum() * staleness,
    }
    nothing = torch.full((2, 1), -math.inf, dtype=torch.float64, device=mask.device)
    signed = torch.where(own.flatten() > 0, torch.stack([ratio.flatten(), -ratio.flatten()]), -math.inf)
    return sums, torch.cat([signed, nothing], dim=1).amax(1)
