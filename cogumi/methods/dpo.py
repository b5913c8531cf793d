"""Direct preference optimization (arXiv:2305.18290): TRL's DPOTrainer on tokenized pairs."""

import copy
import math
from typing import Any

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.health.verdict import Check, count_finite
from cogumi.patches.trl_internals import PREPARE_DATASET
from cogumi.telemetry.recorder import set_status
from cogumi.telemetry.throughput import Meter

REFERENCE = "reference"  # the stage in which the reference's log-probabilities are computed ahead
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


def build_trainer(run: RunConfig, *, train_dataset: Any, meter: Meter, **common: Any) -> Any:
    import trl  # looked up here: unsloth may have put its own trainer on the module

    # The pairs are tokenized already, and cached; TRL would tokenize rows of text one at a time.
    methods = {PREPARE_DATASET: lambda self, dataset, *_, **__: dataset}
    trainer_class = type("OnTokenizedPairs", (trl.DPOTrainer,), methods)
    reference = None
    if common["args"].precompute_ref_log_probs:  # TRL does so while it builds the trainer, and shows how far it is
        meter.enter(REFERENCE)
        set_status(run.run_dir, "running", stage=REFERENCE)
    elif run.cogumi.tuning == "full":
        reference = copy.deepcopy(common["model"])  # TRL would load it again, in whatever dtype that gives
    trainer: Any = trainer_class(train_dataset=train_dataset, ref_model=reference, **common)
    refuse_other_tokens(trainer, train_dataset)
    return trainer


def refuse_other_tokens(trainer: Any, dataset: Any) -> None:
    """Raise RuntimeError unless the trainer compares exactly the tokens that the data says. The trainer may be any DPOTrainer."""
    first = [dataset[i] for i in range(min(4, len(dataset)))]
    expected = [len(pair[side]) for side in ("chosen_ids", "rejected_ids") for pair in first]
    limit = trainer.args.max_length or math.inf
    if any(len(pair["prompt_ids"]) + n > limit for n, pair in zip(expected, first * 2, strict=True)):
        raise RuntimeError(f"a pair is longer than train.max_length {limit}, which would cut it")
    compared = trainer.data_collator(first)["completion_mask"].sum(-1).tolist()
    if compared != expected:
        difference = f"compare {compared} tokens of the first pairs, whose completions have {expected}"
        raise RuntimeError(f"{type(trainer).__name__} would {difference}")


def judge_dpo(metrics: list[dict[str, Any]], args: Any) -> list[Check]:
    """Judge the first step: before an update the policy is its own reference, which decides the loss."""
    first = next((row for row in metrics if "rewards/chosen" in row), None)
    if first is None:
        return [Check("reference", "no pair was compared", "the policy as it starts", False, "raise train.max_steps")]
    apart = max(abs(float(first["rewards/chosen"])), abs(float(first["rewards/rejected"])))  # NaN is read back as text
    figure = f"the policy's rewards are {apart:.1e} before the first update"
    required = f"<= {NO_DISTANCE:g}: it starts as its own reference"
    margins = [row["rewards/margins"] for row in metrics if "rewards/margins" in row]
    finite = count_finite(margins)
    of_all = f"{finite} of {len(margins)} finite"
    loss, names = float(first["loss"]), "+".join(args.loss_type)
    formula = "the formula's value where nothing is learned yet"
    if names not in AT_THE_START or args.loss_weights or args.use_weighting:
        first_loss = Check("first loss", f"{names}: {loss:.4f}, not compared: it depends on the data", formula, True)
    else:
        expected = AT_THE_START[names](args.beta)
        fix = "set train.loss_type and train.beta to those of the loss that you meant"
        compared = f"{names}: {loss:.5f}, {expected:.5f} by the formula"
        first_loss = Check("first loss", compared, formula, abs(loss - expected) < 1e-2, fix)
    return [
        Check("reference", figure, required, apart <= NO_DISTANCE, "leave out the trainer's ref_model"),
        first_loss,
        Check("margins", of_all, "all", finite == len(margins), "lower train.learning_rate"),
    ]
