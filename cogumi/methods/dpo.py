"""Direct preference optimization (arXiv:2305.18290): TRL's DPOTrainer on tokenized pairs."""

import copy
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.health.verdict import Check
from cogumi.telemetry.heartbeat import Heartbeat, Progress
from cogumi.telemetry.recorder import set_status

log = logging.getLogger("cogumi")

# TRL 1.15, dpo_trainer.py, _compute_loss: what these losses are where policy and reference are one, at beta.
AT_THE_START = {
    "sigmoid": lambda beta: math.log(2),
    "sigmoid_norm": lambda beta: math.log(2),
    "hinge": lambda beta: 1.0,
    "ipo": lambda beta: (1 / (2 * beta)) ** 2,
}
NO_DISTANCE = 1e-3  # nats times beta: rounding of two passes through one model


def arguments(run: RunConfig) -> dict[str, Any]:
    """DPOConfig arguments. Raises UsageError for settings that would train on something else."""
    if run.train.get("truncation_mode") == "keep_end":
        fix = "drop it (data.overlong says what becomes of long pairs)"
        raise UsageError("keep_end cuts prompts off their beginning", key="train.truncation_mode", fix=fix)
    return dict(run.train)


class ReferencePass:
    """TRL's pass for the reference's log-probabilities (`train.precompute_ref_log_probs`) as a stage of the run, in which the
    heartbeat counts batches as steps. It is made while the trainer is built, unless TRL has them from its cache."""

    STAGE = "reference"

    def __init__(self, heart: Heartbeat, batches: int) -> None:
        self.heart, self.batches, self.done = heart, batches, 0
        self.before, self.began, self.over = heart.meter.stage, 0.0, False

    @contextmanager
    def batch(self) -> Iterator[None]:
        if not self.done:
            self.began = time.monotonic()
            self.enter(self.STAGE)
            log.info("log-probabilities of the reference: %d batches before the first step", self.batches)
        yield
        self.done += 1
        seconds = (time.monotonic() - self.began) / self.done * (self.batches - self.done)
        self.heart.progress = Progress(self.done, self.batches, time.time(), seconds, of_a_stage=True)

    def end(self) -> None:
        self.over = True
        if self.done:
            self.heart.progress = Progress()
            self.enter(self.before)

    def enter(self, stage: str) -> None:
        self.heart.meter.enter(stage)
        set_status(self.heart.run_dir, "running", stage=stage)


def build_trainer(run: RunConfig, *, train_dataset: Any, heart: Heartbeat, **common: Any) -> Any:
    import trl  # looked up here: unsloth may have put its own trainer on the module

    # The batches that TRL takes through the reference (trl 1.15, dpo_trainer.py).
    args, held_out = common["args"], common["eval_dataset"]
    batches = math.ceil(len(train_dataset) / (args.precompute_ref_batch_size or args.per_device_train_batch_size))
    if held_out is not None:
        batches += math.ceil(len(held_out) / (args.precompute_ref_batch_size or args.per_device_eval_batch_size))
    reference_pass = ReferencePass(heart, batches)

    class OnTokenizedPairs(trl.DPOTrainer):  # type: ignore[misc, name-defined]
        """Takes pairs that are tokenized already, and cached, where TRL would tokenize rows of text one at a time."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def compute_ref_log_probs(self, *args: Any, **kwargs: Any) -> Any:
            # An evaluation computes those of its own rows.
            with nullcontext() if reference_pass.over else reference_pass.batch():
                return super().compute_ref_log_probs(*args, **kwargs)

    reference = None
    if run.cogumi.tuning == "full" and not run.train.get("precompute_ref_log_probs"):
        reference = copy.deepcopy(common["model"])  # TRL would load it again, in whatever dtype that gives
    trainer = OnTokenizedPairs(train_dataset=train_dataset, ref_model=reference, **common)
    reference_pass.end()
    refuse_other_tokens(trainer, train_dataset)
    return trainer


def refuse_other_tokens(trainer: Any, dataset: Any) -> None:
    """Raise RuntimeError unless the trainer compares exactly the tokens that the data says. The trainer may be any DPOTrainer."""
    first = [dataset[i] for i in range(min(4, len(dataset)))]
    wanted = [len(pair[side]) for side in ("chosen_ids", "rejected_ids") for pair in first]
    limit = trainer.args.max_length or math.inf
    if any(len(pair["prompt_ids"]) + n > limit for n, pair in zip(wanted, first * 2, strict=True)):
        raise RuntimeError(f"a pair is longer than train.max_length {limit}, which would cut it")
    compared = trainer.data_collator(first)["completion_mask"].sum(-1).tolist()
    if compared != wanted:
        what = f"compare {compared} tokens of the first pairs, whose completions have {wanted}"
        raise RuntimeError(f"{type(trainer).__name__} would {what}")


def judge_dpo(metrics: list[dict[str, Any]], args: Any) -> list[Check]:
    """What DPO adds: before the first update the policy is its own reference, and the loss is what it then must be."""
    first = next((row for row in metrics if "rewards/chosen" in row), None)
    if first is None:
        return [Check("reference", "no pair was compared", "the policy as it starts", False, "raise train.max_steps")]
    apart = max(abs(first["rewards/chosen"]), abs(first["rewards/rejected"]))
    figure = f"the policy's rewards are {apart:.1e} before the first update"
    required = f"<= {NO_DISTANCE:g}: it starts as its own reference"
    margins = [row["rewards/margins"] for row in metrics if "rewards/margins" in row]
    finite = sum(map(math.isfinite, margins))
    of_all = f"{finite} of {len(margins)} finite"
    return [
        Check("reference", figure, required, apart <= NO_DISTANCE, "leave out the trainer's ref_model"),
        judge_first_loss(first["loss"], args),
        Check("margins", of_all, "all", finite == len(margins), "lower train.learning_rate"),
    ]


def judge_first_loss(loss: float, args: Any) -> Check:
    """The first step's loss beside the formula's value at rewards of 0."""
    names, required = "+".join(args.loss_type), "the formula's value where nothing is learned yet"
    if names not in AT_THE_START or args.loss_weights or args.use_weighting:
        return Check("first loss", f"{names}: {loss:.4f}, not compared: it depends on the data", required, True)
    expected = AT_THE_START[names](args.beta)
    figure = f"{names}: {loss:.5f}, {expected:.5f} by the formula"
    fix = "set train.loss_type and train.beta to those of the loss that you meant"
    return Check("first loss", figure, required, abs(loss - expected) < 1e-2, fix)
