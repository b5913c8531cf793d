"""What a GSPO run says of its settings and prompts before a model is fetched, and not in its first rollout."""

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.methods.sampler import refuse_engine, refuse_unknown_sampling
from cogumi.rewards.named_rewards import ALWAYS_THERE
from cogumi.rl.guards import check_distribution, check_loss_settings

log = logging.getLogger("cogumi")
ROWS_AT_ONCE = 1000
# A value of a sampling setting -> with it the most likely token is sampled, and no other.
GREEDY: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda value: value == 0,
    "top_k": lambda value: value == 1,
    "min_p": lambda value: value >= 1,
    "do_sample": lambda value: value is False,
}


def refuse_settings(run: RunConfig, args: Any) -> None:
    """Raise UsageError for settings by which nothing is learned, or with another loss than the one named. args: a GRPOConfig."""
    of_config = {f"train.{key}": getattr(args, key, None) for key in GREEDY}
    of_sampler = {f"train.generation_kwargs.{key}": value for key, value in (args.generation_kwargs or {}).items()}
    for key, value in (of_config | of_sampler).items():
        is_greedy = GREEDY.get(key.rpartition(".")[2])
        if value is not None and is_greedy is not None and is_greedy(value):
            what = (
                f"{key} {value} samples the most likely token: completions of a group, and their rewards, do not differ"
            )
            raise UsageError(what, key=key, fix="drop the key")
    refuse_reward_weights(args.reward_weights, len(run.cogumi.rewards))
    by_rollout = run.cogumi.behaviour_logps == "rollout"
    if args.use_vllm:
        refuse_engine(args, by_rollout)
    refuse_unknown_sampling(args)
    for finding in (*check_loss_settings(args, "trl"), *check_distribution(args, by_rollout)):
        if finding.refused:
            raise UsageError(finding.message)


def refuse_reward_weights(weights: Sequence[float] | None, rewards: int) -> None:
    """Raise UsageError for weights that are not one for each reward, or that leave nothing of them."""
    if weights is None:
        return
    key = "train.reward_weights"
    if len(weights) != rewards:
        raise UsageError(
            f"{key} has {len(weights)} and cogumi.rewards {rewards}", key=key, fix="give one for each reward"
        )
    if not all(map(math.isfinite, weights)) or not any(weights):
        raise UsageError(
            f"{key} {list(weights)}: no reward would count", key=key, fix="give at least one that is not 0"
        )


def check_prompts(rewards: Sequence[Any], prompts: Dataset) -> None:
    """Warn of prompts that do not differ, and of rows without a value that a reward takes.

    Raises UsageError where no row has such a value: every completion would earn the same.
    """
    if len(prompts) > 1 and pc.count_distinct(prompts.data.column("prompt")).as_py() == 1:
        log.warning("the %s prompts do not differ: what the run learns is about this one prompt", f"{len(prompts):,}")
    counted: dict[str, int] = {}
    for reward in rewards:
        for name in needed_columns(reward, prompts.column_names):
            if name not in counted:
                counted[name] = count_nulls(prompts, name)
            what = f"{reward.__name__} takes `{name}`, which is null in {counted[name]:,} of {len(prompts):,} rows"
            if counted[name] == len(prompts):
                fix = f"say which column of the file it is: data.columns: {{{name}: ...}}"
                raise UsageError(what, key="cogumi.rewards", fix=fix)
            if counted[name]:
                log.warning("cogumi.rewards: %s", what)


def needed_columns(reward: Any, columns: Sequence[str]) -> list[str]:
    """The columns of the data that a reward has a parameter without a default for."""
    parameters = inspect.signature(reward).parameters.values()
    names = [each.name for each in parameters if each.default is each.empty]
    return [name for name in names if name in columns and name not in ALWAYS_THERE]


def count_nulls(prompts: Dataset, name: str) -> int:
    parts = prompts.select_columns([name]).iter(ROWS_AT_ONCE)
    return sum(value is None for part in parts for value in part[name])
