"""Watch a GRPO trainer: check it before the first rollout, measure every step, and prove the loss in the first ones.

A run does so, and `cogumi.patch()` for every trainer whose config says `loss_type="gspo"`. Two things about the training
change. A reward function is given prompts and completions in the shape that its annotations name. unsloth's old
log-probabilities are scored as its new ones are.
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

from cogumi.core.errors import UsageError
from cogumi.core.random_state import kept_random_state
from cogumi.core.run_directory import write_json
from cogumi.patches import replaced
from cogumi.patches import trl_internals as internals
from cogumi.patches.gspo_loss import loss_name
from cogumi.rewards.named_rewards import as_annotated
from cogumi.rl import loss_check
from cogumi.rl.guards import OWN_OBJECTIVE, accepted_by, format_accept_call, guard_trainer, is_run_trainer
from cogumi.rl.sampling import check_sampler

log = logging.getLogger("cogumi")
RECORD = "loss.json"
PREFIX = "policy/"
FP32_HEAD = "Take an fp32 head on both sides"
EXACT_TRL = "With cogumi.backend: trl they were 1 to the bit where this was measured (docs/measured.md); take it"
LIBRARIES = ("trl.", "transformers.", "unsloth", "cogumi.")  # modules whose functions are not the user's
EXTREMES = {f"{PREFIX}max_ratio": max, f"{PREFIX}min_ratio": min}
ADVANTAGES = {f"{PREFIX}max_advantage": max, f"{PREFIX}min_advantage": min}


def watch(trainer: Any, record: str | Path | None = None) -> "LossWatch":
    """Guard, measure and prove a `trl.GRPOTrainer`; a second call returns the first one's watch.

    record: where the loss that ran is described, by default `loss.json` in the trainer's output directory. The guards raise
    UsageError when training begins, or when `.guard()` is called.
    """
    watches = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, LossWatch)]
    if not watches:
        watches = [LossWatch(trainer, Path(trainer.args.output_dir) / RECORD)]
        trainer.add_callback(watches[0])
    if record is not None:
        watches[0].record = Path(record)
    return watches[0]


class LossWatch(TrainerCallback):
    """Wrap two methods of one trainer, and follow it as a callback."""

    def __init__(self, trainer: Any, record: Path) -> None:
        self.trainer, self.record = trainer, record
        self.metrics = PolicyMetrics()
        self.proof: loss_check.LossCheck | None = None
        self.guarded, self.first_step = False, True
        self.rollout_step = 0
        trainer.reward_funcs = [as_annotated(reward) for reward in trainer.reward_funcs]
        self.compute_loss, trainer.compute_loss = trainer.compute_loss, self.compute_watched_loss
        check_sampler(trainer)
        internals.observe_rollouts(trainer, self.on_rollout)
        internals.wrap_method(trainer, "log", self.log_clip_coefficient)
        if loss_check.backend_of(trainer) == "unsloth":
            score_old_by_training_pass(trainer, self.compute_loss)

    def guard(self) -> None:
        """Refuse, or warn about, what the settings would make of the run; once, unless it was refused."""
        if self.guarded:
            return
        for warning in guard_trainer(self.trainer):
            log.warning("%s", warning)
        user_function = self.find_user_function()
        if OWN_OBJECTIVE in accepted_by(self.trainer):
            objective = user_function or getattr(type(self.trainer), internals.INNER_LOSS)
            self.proof = loss_check.LossCheck({}, [OWN_OBJECTIVE], objective, own_objective=True)
            log.warning("accepted (%s): %s.%s computes the loss, and is compared with no formula",
                        OWN_OBJECTIVE, objective.__module__, objective.__qualname__)  # fmt: skip
        else:
            args = self.trainer.args
            high = args.epsilon if args.epsilon_high is None else args.epsilon_high
            names = ("loss_type", "importance_sampling_level", "delta", "beta")
            expected = {name: getattr(args, name) for name in names}
            expected |= {"epsilon_low": args.epsilon, "epsilon_high": high}
            self.proof = loss_check.LossCheck(expected, loss_check.list_unchecked_terms(self.trainer), user_function)
        self.guarded = True

    def find_user_function(self) -> Any:
        """Return the user's function that the loss comes out of, the outer one of two; None where there is none."""
        inner = getattr(self.trainer, internals.INNER_LOSS, None)
        candidates = [self.trainer.compute_loss, self.compute_loss, inner]  # the first may be set over the watch's own
        for method in candidates:
            function = inspect.unwrap(getattr(method, "__func__", method)) if method is not None else None
            # unsloth's trainers are in modules that are named after them.
            if function is None or function.__module__.lower().startswith(LIBRARIES):
                continue
            if method is not inner or loss_check.backend_of(self.trainer) == "trl":
                return function
            if OWN_OBJECTIVE in accepted_by(self.trainer):
                fix = "override compute_loss instead"
                raise UsageError("unsloth never calls _compute_loss", place=function.__qualname__, fix=fix)
        return None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.guard()
        # One that is resumed inside a rollout has its completions from the checkpoint: they were made some steps ago.
        rollout = args.steps_per_generation * self.trainer.num_iterations
        micro_batches = internals.rollout_position(self.trainer)[0] % rollout
        self.rollout_step = state.global_step - micro_batches // args.gradient_accumulation_steps

    def log_clip_coefficient(self, log_row: Callable[..., None], logs: dict[str, Any], *more: Any) -> None:
        """Add the factor that train.max_grad_norm scaled the logged gradient by, as `clip_grad_norm_` computes it."""
        if (norm := logs.get("grad_norm")) is not None:
            longest = self.trainer.args.max_grad_norm or math.inf  # 0 and None do not clip
            logs[f"{PREFIX}clip_coefficient"] = min(1.0, longest / norm) if norm > 0 else 1.0
        log_row(logs, *more)

    def on_rollout(self, make: Callable[[Any], Any], inputs: Any) -> Any:
        self.guard()  # an evaluation before training is a rollout too
        if self.trainer.model.training:
            self.rollout_step = self.trainer.state.global_step
        batch = make(inputs)
        if self.trainer.model.training:
            advantages = list(internals.logged_completions(self.trainer).get("advantages", ()))  # of all processes
            logged = internals.logged_metrics(self.trainer, "train")
            for name in ADVANTAGES if advantages else ():  # a trainer with rollouts of its own may log none
                logged[name] = [ADVANTAGES[name]([*logged[name], *advantages])]
        return batch

    def compute_watched_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        if not self.trainer.model.training:
            return self.compute_loss(model, inputs, *args, **kwargs)
        with loss_check.capture_loss_inputs(self.trainer, inputs) as calls:
            loss: Tensor = self.compute_loss(model, inputs, *args, **kwargs)
        config = self.trainer.args
        documents = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
        staleness = float((self.trainer.state.global_step - self.rollout_step) * documents)
        for call in calls:
            if call.new.requires_grad:  # a subclass may score without a graph, for a figure of its own
                self.metrics.add(call, staleness)
                if self.proof is not None:
                    self.proof.add(call, loss)
        return loss

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.proof is None:
            return
        scaler = self.trainer.accelerator.scaler
        try:
            record = self.proof.check(scale=scaler.get_scale() if scaler is not None else 1.0)
        except loss_check.WrongLossError as error:
            self.guarded = False  # a training that is begun again is checked again
            if is_run_trainer(self.trainer):
                raise
            accept = format_accept_call(OWN_OBJECTIVE, accepted_by(self.trainer))
            raise loss_check.WrongLossError(
                f"{error}; where the objective, or a term of it, is your own: {accept}"
            ) from None
        self.proof = None if self.proof.is_complete else self.proof
        if self.trainer.accelerator.is_main_process:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            about = {"loss": loss_name(self.trainer.args), "backend": loss_check.backend_of(self.trainer)}
            write_json(self.record, about | {"accepted": sorted(accepted_by(self.trainer))} | record)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        logged, metrics = internals.logged_metrics(self.trainer, "train"), self.metrics.take(self.trainer.accelerator)
        on_policy = self.rollout_step == self.trainer.state.global_step - 1
        if self.first_step and on_policy and metrics.get(f"{PREFIX}clipped_ratio_fraction", 0.0) > 0:
            log.warning(
                "step 1: the ratios are up to %.2g away from 1 and %.0f%% of them outside the clip, before anything was "
                "learned: sampler's and trainer's numerics differ. %s, or widen the clip",
                max(metrics[f"{PREFIX}max_ratio"] - 1, 1 - metrics[f"{PREFIX}min_ratio"]),
                100 * metrics[f"{PREFIX}clipped_ratio_fraction"],
                EXACT_TRL if loss_check.backend_of(self.trainer) == "unsloth" else FP32_HEAD,
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
    """Sums of one optimizer step, kept on the device: one transfer per step, none per micro-batch."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.extremes: Tensor | None = None  # (2,): the largest ratio, and the smallest times -1

    def add(self, call: loss_check.LossInputs, staleness: float) -> None:
        """Add one micro-batch. staleness: documents trained on since the policy that wrote it."""
        with torch.no_grad():
            sums, extremes = reduce_micro_batch(call, staleness)
        self.sums = {name: self.sums[name] + value if self.sums else value for name, value in sums.items()}
        self.extremes = extremes if self.extremes is None else torch.maximum(self.extremes, extremes)

    def take(self, accelerator: Any) -> dict[str, float]:
        """Return the step's metrics over all processes, named `policy/...`, {} without a micro-batch; and start anew."""
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


def reduce_micro_batch(call: loss_check.LossInputs, staleness: float) -> tuple[dict[str, Tensor], Tensor]:
    """Return sums by name, and the largest ratio and the largest negative one (2,), of one micro-batch, float64."""
    keep = call.mask > 0
    mask = keep.double()
    lengths = mask.sum(-1)
    nonempty = lengths > 0
    weight = mask / lengths.clamp(min=1)[:, None]  # sums to 1 over a document
    documents = nonempty.double()

    def per_document(tokens: Tensor) -> Tensor:
        # A masked position may hold anything, infinities included.
        return (torch.where(keep, tokens.detach().double(), 0.0) * weight).sum()

    if loss_check.is_per_sequence(call):
        log_ratio = torch.where(nonempty, loss_check.sequence_log_ratio(call).double(), 0.0)
        share = ratio_weight = documents
    else:
        log_ratio = torch.where(keep, (call.new.detach() - call.old_logps()).double(), 0.0)
        share, ratio_weight = weight, mask
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
        "ratios": (ratio * ratio_weight).sum(),
        "squared_ratios": (ratio.square() * ratio_weight).sum(),
        "num_ratios": ratio_weight.sum(),
        "num_tokens": mask.sum(),
        "num_segments": documents.sum(),
        "staleness": documents.sum() * staleness,
    }
    nothing = torch.full((2, 1), -math.inf, dtype=torch.float64, device=mask.device)
    signed = torch.where(ratio_weight.flatten() > 0, torch.stack([ratio.flatten(), -ratio.flatten()]), -math.inf)
    return sums, torch.cat([signed, nothing], dim=1).amax(1)


def score_old_by_training_pass(trainer: Any, compute_loss: Callable[..., Tensor]) -> None:
    """Have unsloth's new rollouts scored by the trainer's own `compute_loss`, one micro-batch at a time with a gradient.

    unsloth scores a whole rollout at once without a gradient (prompts shared, rows packed, other attention kernels), and
    trains on shuffled micro-batches. On an H200 its ratios were up to 0.018 away from 1 before the first step
    (docs/measured.md). Scored so, every ratio is exactly 1 until the first update. A rollout that is restored from a
    checkpoint keeps its scores.
    """

    def placeholder(model: Any, ids: Tensor, mask: Tensor, columns: int, **more: Any) -> tuple[Any, ...]:
        # Zeros (B, T). From T unsloth's loss takes the widest left padding, which it counts by token where all is text.
        padding = (ids[:, :-columns] == trainer.processing_class.pad_token_id).sum(-1).max()
        width = columns + int(padding) * (more.get("pixel_values") is None)
        return torch.zeros(len(ids), width, device=ids.device), None, None

    def make_unscored(make: Callable[[Any], Any], inputs: Any) -> Any:
        skip = trainer.model.training and trainer.beta == 0  # else the same method scores the reference as well
        with replaced(trainer, {internals.TOKEN_LOGPS: placeholder} if skip else {}):
            return make(inputs)

    def prepare(prepare_inputs: Callable[[Any], Any], batch: Any) -> Any:
        before = internals.rollout_position(trainer)[1]
        inputs = prepare_inputs(batch)
        rollout = internals.rollout_position(trainer)[1]
        for micro_batch in rollout if rollout is not before else ():
            if "old_per_token_logps" not in micro_batch:  # the loss takes `new.detach()`
                continue
            context = trainer.compute_loss_context_manager()
            with (
                internals.discard_metrics(trainer),
                kept_random_state(),
                loss_check.capture_unsloth_loss(trainer) as calls,
                context,
            ):
                compute_loss(trainer.model, dict(micro_batch))
            micro_batch["old_per_token_logps"] = calls[0].new.detach().clone()
        return inputs

    internals.observe_rollouts(trainer, make_unscored)
    internals.wrap_method(trainer, internals.PREPARE_INPUTS, prepare)
