"""What TRL's online trainers need to go on where they were, and do not save: the rollouts in use and the order of prompts.

GRPOTrainer trains on one batch of completions for steps_per_generation x num_iterations steps (trl/trainer/grpo_trainer.py,
`_prepare_inputs`), counted by `_step`; its RepeatSampler draws a new order each epoch from a generator of its own.
A resumed one counts from 0, generates anew in the middle of a batch, and repeats the first epoch's order.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cogumi.patches.trl_internals import (
    TRAIN_SAMPLER,
    keeps_rollouts,
    methods_replaced,
    rollout_position,
    set_rollout_position,
)

STATE_NAME = "cogumi-rollouts.pt"


def generates(trainer: Any) -> bool:
    """Whether a trainer keeps rollouts between steps."""
    return keeps_rollouts(trainer)


def save_rollouts(trainer: Any, directory: Path) -> None:
    """Write what is missing into a checkpoint. The rollouts only where the next step still uses them."""
    if not generates(trainer):
        return
    step, rollouts = rollout_position(trainer)
    used_up = step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0
    torch.save({"step": step, "rollouts": None if used_up else rollouts}, directory / STATE_NAME)


def load_rollouts(trainer: Any, directory: Path) -> None:
    """Take it up again, before `trainer.train` begins. A checkpoint of another tool has none: then TRL generates anew."""
    path = directory / STATE_NAME
    if not (generates(trainer) and path.is_file()):
        return
    values = torch.load(path, map_location=trainer.args.device, weights_only=True)
    set_rollout_position(trainer, values["step"], values["rollouts"])


@contextmanager
def order_continued(trainer: Any, directory: Path | None) -> Iterator[None]:
    """While in the block, a new sampler of prompts begins with the epoch in which the checkpoint was written."""
    if directory is None or not generates(trainer):
        yield
        return
    epochs = int(round(json.loads((directory / "trainer_state.json").read_text(encoding="utf-8"))["epoch"], 6))
    original = getattr(trainer, TRAIN_SAMPLER)

    def continued(*args: Any) -> Any:
        sampler = original(*args)
        for _ in range(epochs if getattr(sampler, "shuffle", False) else 0):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    with methods_replaced(trainer, {TRAIN_SAMPLER: continued}):
        yield
