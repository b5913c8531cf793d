"""Watching a GRPO trainer: refused before its first rollout, measured at every step, its loss proven at the first.

`watch(trainer)` is what a run does, and what `cogumi.patch()` does for every trainer whose config says
`loss_type="gspo"`. It changes nothing about the training but GSPO-token's ratio, which no TRL setting expresses.
"""

import logging
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import TrainerCallback

from cogumi.errors import UsageError
from cogumi.patches.gspo import loss_name
from cogumi.rl.alarms import DuringTheRun
from cogumi.rl.behaviour import takes_rollout_logps
from cogumi.rl.guards import guard
from cogumi.rl.metrics import PREFIX, PolicyMetrics
from cogumi.rl.presets import PRESETS
from cogumi.rl.proof import LossProof, unproven_terms
from cogumi.rl.seam import backend_of, overheard
from cogumi.rundir import write_json

log = logging.getLogger("cogumi")
RECORD = "loss.json"
EXTREMES = (f"{PREFIX}max_", f"{PREFIX}min_")
ASSERTED = ("loss_type", "importance_sampling_level", "delta", "beta")


def watch(trainer: Any, record: str | Path | None = None) -> "Watch":
    """Guard, measure and prove a `trl.GRPOTrainer`; watching it twice is watching it once.

    `record` is where the description of the loss that ran goes (`loss.json` in the trainer's output directory). The
    guards speak when training begins, or when `.guard()` is called: UsageError names every setting with which the run
    would not be what it says.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, Watch):
            callback.record = Path(record) if record else callback.record
            return callback
    watching = Watch(trainer, Path(record) if record else Path(trainer.args.output_dir) / RECORD)
    trainer.add_callback(watching)
    return watching


def asked_for(args: Any) -> dict[str, Any]:
    """The settings a loss must run with, by the names it takes them under."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return {name: getattr(args, name) for name in ASSERTED} | {"epsilon_low": args.epsilon, "epsilon_high": high}


class Watch(TrainerCallback):
    """Wraps two methods of one trainer, and follows it as a callback."""

    def __init__(self, trainer: Any, record: Path) -> None:
        self.trainer, self.record = trainer, record
        name = loss_name(trainer.args)
        self.token_ratio = name in PRESETS and PRESETS[name].token_ratio
        self.metrics = PolicyMetrics()
        self.proof: LossProof | None = None
        self.during = DuringTheRun(trainer.args.max_grad_norm or 0.0)
        self.guarded = False
        self.rollout_step = 0
        self.compute_loss, self.generate = trainer.compute_loss, trainer._generate_and_score_completions
        trainer.compute_loss, trainer._generate_and_score_completions = self.overhear, self.note_rollout

    def guard(self) -> None:
        """Refuse, or warn about, what the settings would make of the run; once."""
        if not self.guarded:
            self.guarded = True
            backend = backend_of(self.trainer)
            if self.token_ratio and backend == "unsloth":
                raise UsageError("train.loss_type gspo-token: unsloth's loss cannot form its ratio; set gspo, which is "
                                 "the same where advantages do not vary along a completion")  # fmt: skip
            behaviour_logps: Literal["trainer", "rollout"] = (
                "rollout" if takes_rollout_logps(self.trainer) else "trainer"
            )
            for warning in guard(self.trainer, backend=backend, behaviour_logps=behaviour_logps):
                log.warning("%s", warning)
            self.proof = LossProof(asked_for(self.trainer.args), self.token_ratio, unproven_terms(self.trainer))

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
            found = self.proof.check(scale=scaler.get_scale() if scaler is not None else 1.0)
            if self.proof.step == 1 and self.rollout_step == self.trainer.state.global_step:
                self.during.first_step(found)
            self.proof = None if self.proof.complete else self.proof
            if self.trainer.accelerator.is_main_process:
                self.record.parent.mkdir(parents=True, exist_ok=True)
                asked = {"loss": loss_name(self.trainer.args), "backend": backend_of(self.trainer)}
                write_json(self.record, asked | found)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        logged = self.trainer._metrics["train"]
        for name, value in self.metrics.take(self.trainer.accelerator).items():
            if name.startswith(EXTREMES):  # TRL logs the mean over the steps since it last did
                logged[name] = [(max if "max_" in name else min)([*logged[name], value])]
            else:
                logged[name].append(value)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        for warning in self.during.warnings(logs or {}):
            log.warning("step %d: %s", state.global_step, warning)
