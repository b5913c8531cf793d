"""Watching a GRPO trainer: refused before its first rollout, measured at every step, its loss proven at the first.

`watch(trainer)` is what a run does, and what `cogumi.patch()` does for every trainer whose config says
`loss_type="gspo"`. It changes nothing about the training but GSPO-token's ratio, which no TRL setting expresses, and the
shape in which rewards get completions, where they are annotated with one.
"""

import inspect
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import TrainerCallback

from cogumi.config.presets import PRESETS
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import write_json
from cogumi.patches.gspo_loss import loss_name
from cogumi.rewards.named_rewards import as_annotated
from cogumi.rl.findings import OWN_OBJECTIVE, accepted, how_to_accept, is_a_runs, known, worded_for
from cogumi.rl.guards import guard
from cogumi.rl.loss_capture import Backend, backend_of, overheard
from cogumi.rl.loss_check import LossProof, WrongLossError, unproven_terms
from cogumi.rl.rollout_logprobs import takes_rollout_logps
from cogumi.rl.runtime_warnings import DuringTheRun
from cogumi.rl.step_metrics import PREFIX, PolicyMetrics

log = logging.getLogger("cogumi")
RECORD = "loss.json"
EXTREMES = (f"{PREFIX}max_", f"{PREFIX}min_")
ASSERTED = ("loss_type", "importance_sampling_level", "delta", "beta")


def watch(trainer: Any, record: str | Path | None = None, accept: Iterable[str] | None = None) -> "Watch":
    """Guard, measure and prove a `trl.GRPOTrainer`; watching it twice is watching it once.

    `record` is where the description of the loss that ran goes (`loss.json` in the trainer's output directory). The
    guards speak when training begins, or when `.guard()` is called: UsageError names every setting with which the run
    would not be what it says. `accept`: names of `cogumi.rl.findings.NAMES` that pass in this trainer; by default those
    that `cogumi.patch(accept=...)` was told.
    """
    watching = next((each for each in trainer.callback_handler.callbacks if isinstance(each, Watch)), None)
    if watching is None:
        watching = Watch(trainer, Path(trainer.args.output_dir) / RECORD)
        trainer.add_callback(watching)
    if record is not None:
        watching.record = Path(record)
    if accept is not None:
        watching.accept = known(accept)
    return watching


def asked_for(args: Any) -> dict[str, Any]:
    """The settings a loss must run with, by the names it takes them under."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return {name: getattr(args, name) for name in ASSERTED} | {"epsilon_low": args.epsilon, "epsilon_high": high}


def is_the_librarys(function: Any) -> bool:
    """Whether TRL, transformers or unsloth (whose trainers are in modules named after them) wrote a loss."""
    return function.__module__.lower().startswith(("trl.", "transformers.", "unsloth"))


class Watch(TrainerCallback):
    """Wraps two methods of one trainer, and follows it as a callback."""

    def __init__(self, trainer: Any, record: Path) -> None:
        self.trainer, self.record = trainer, record
        self.accept: frozenset[str] | None = None
        name = loss_name(trainer.args)
        self.token_ratio = name in PRESETS and PRESETS[name].token_ratio
        self.metrics = PolicyMetrics()
        self.proof: LossProof | None = None
        self.during = DuringTheRun(trainer.args.max_grad_norm or 0.0)
        self.guarded = False
        self.rollout_step = 0
        trainer.reward_funcs = [as_annotated(each) for each in trainer.reward_funcs]
        self.compute_loss, self.generate = trainer.compute_loss, trainer._generate_and_score_completions
        trainer.compute_loss, trainer._generate_and_score_completions = self.overhear, self.note_rollout

    @property
    def accepted(self) -> frozenset[str]:
        """Names of findings that pass: a run from YAML accepts none."""
        if is_a_runs(self.trainer):
            return frozenset()
        return accepted() if self.accept is None else self.accept

    def guard(self) -> None:
        """Refuse, or warn about, what the settings would make of the run; once, unless it was refused."""
        if self.guarded:
            return
        backend = backend_of(self.trainer)
        if self.token_ratio and backend == "unsloth":
            refusal = ("train.loss_type gspo-token: unsloth's loss cannot form its ratio; set train.loss_type: gspo, which "
                       "is the same where advantages do not vary along a completion")  # fmt: skip
            raise UsageError(worded_for(self.trainer, refusal))
        behaviour_logps: Literal["trainer", "rollout"] = "rollout" if takes_rollout_logps(self.trainer) else "trainer"
        accepted = self.accepted
        for warning in guard(self.trainer, backend=backend, behaviour_logps=behaviour_logps, accepted=accepted):
            log.warning("%s", warning)
        self.proof = LossProof(
            asked_for(self.trainer.args), self.token_ratio, unproven_terms(self.trainer), written=self.written(backend)
        )
        if OWN_OBJECTIVE in accepted:
            own = self.objective(backend)
            self.proof = LossProof({}, self.token_ratio, [OWN_OBJECTIVE], own)
            log.warning("accepted (%s): %s.%s computes the loss, and is compared with no formula",
                        OWN_OBJECTIVE, own.__module__, own.__qualname__)  # fmt: skip
        self.guarded = True

    def written(self, backend: Backend) -> Any:
        """The user's function that the loss comes out of, the outer one of two; None where there is none."""
        inner = getattr(self.trainer, "_compute_loss", None) if backend == "trl" else None  # unsloth never calls it
        for each in (self.trainer.compute_loss, self.compute_loss, inner):  # the first may be set over the watch's own
            if each is None:
                continue
            function = inspect.unwrap(getattr(each, "__func__", each))
            if not is_the_librarys(function) and not function.__module__.startswith("cogumi."):
                return function
        return None

    def objective(self, backend: Backend) -> Any:
        """The function that makes this trainer's loss the user's own; the library's where there is none on the trainer."""
        compute_loss = getattr(self.compute_loss, "__func__", self.compute_loss)
        inner = type(self.trainer)._compute_loss
        if not is_the_librarys(compute_loss):
            return compute_loss
        if backend == "unsloth" and not is_the_librarys(inner):
            raise UsageError(
                "unsloth never calls _compute_loss", place=inner.__qualname__, fix="override compute_loss instead"
            )
        return inner

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.guard()
        # One that goes on inside a rollout has its completions from the checkpoint: they were made some steps ago.
        rollout = args.steps_per_generation * self.trainer.num_iterations
        self.rollout_step = state.global_step - self.trainer._step % rollout // args.gradient_accumulation_steps

    def note_rollout(self, inputs: Any) -> Any:
        self.guard()  # an evaluation before training is a rollout too
        if self.trainer.model.training:
            self.rollout_step = self.trainer.state.global_step
        return self.generate(inputs)

    def overhear(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        training = self.trainer.model.training
        if not training and not self.token_ratio:
            return self.compute_loss(model, inputs, *args, **kwargs)
        inputs = dict(inputs)  # the trainer keeps the rollout for later steps
        with overheard(self.trainer, inputs, self.token_ratio) as calls:
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
                if is_a_runs(self.trainer):
                    raise
                own = how_to_accept(OWN_OBJECTIVE, self.accepted)
                raise WrongLossError(f"{error}; where the objective, or a term of it, is your own: {own}") from None
            on_policy = self.rollout_step == self.trainer.state.global_step
            if self.proof.step == 1 and on_policy and "ratio_outside_clip" in found:
                self.during.first_step(found)
            self.proof = None if self.proof.complete else self.proof
            if self.trainer.accelerator.is_main_process:
                self.record.parent.mkdir(parents=True, exist_ok=True)
                asked = {"loss": loss_name(self.trainer.args), "backend": backend_of(self.trainer)}
                write_json(self.record, asked | {"accepted": sorted(self.accepted)} | found)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        logged = self.trainer._metrics["train"]
        for name, value in self.metrics.take(self.trainer.accelerator).items():
            if name.startswith(EXTREMES):  # TRL logs the mean over the steps since it last did
                logged[name] = [(max if "max_" in name else min)([*logged[name], value])]
            else:
                logged[name].append(value)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        for warning in self.during.warnings(logs or {}):
            log.warning("step %d: %s", state.global_step, worded_for(self.trainer, warning))
