"""What a GSPO run says of its settings and prompts before a model is fetched, and not in its first rollout."""

import inspect
import logging
import math
import urllib.request
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset
from transformers import GenerationConfig

from cogumi.config.binding import nearest
from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.rewards.named_rewards import ALWAYS_THERE
from cogumi.rl.guards import check_distribution, check_loss_settings
from cogumi.rl.sampling import refuse_double_correction

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


def refuse_engine(args: Any, by_rollout: bool) -> None:
    """Raise UsageError for vLLM where it is not installed, or corrects for what `behaviour_logps: rollout` has already."""
    if find_spec("vllm") is None:
        fix = "install the lane stable+vllm (docs/stack.md), or drop the key and sample with transformers"
        raise UsageError("vLLM is not installed", key="train.use_vllm", fix=fix)
    if by_rollout and args.vllm_importance_sampling_correction:
        refuse_double_correction()
    if args.vllm_mode == "server":
        warn_of_missing_server(args)
    elif args.vllm_enable_sleep_mode and not torch.cuda.is_available():
        raise UsageError("vLLM sleeps on a GPU alone", key="train.vllm_enable_sleep_mode", fix="drop it")


def refuse_unknown_sampling(args: Any) -> None:
    """Raise UsageError for `train.generation_kwargs` that the sampler does not know, or that are another key's to set.

    transformers ignores a name that it does not know, and vLLM fails in the first rollout.
    """
    if not args.generation_kwargs:
        return
    if args.use_vllm:
        from vllm import SamplingParams  # seconds

        known, sampler = set(SamplingParams.__struct_fields__), "vLLM's SamplingParams"
        others = {"max_tokens": "train.max_completion_length", "n": "train.num_generations"}
    else:
        known, sampler = set(vars(GenerationConfig())), "transformers' GenerationConfig"
        others = {"max_new_tokens": "train.max_completion_length", "num_return_sequences": "train.num_generations"}
    for name in args.generation_kwargs:
        key = f"train.generation_kwargs.{name}"
        if name in others:
            raise UsageError(f"it contradicts {others[name]}", key=key, fix=f"set {others[name]} alone")
        if name in ("stop", "stop_strings"):
            raise UsageError("texts at which a completion ends are the run's", key=key, fix="set cogumi.stop instead")
        if name not in known:
            near = nearest(name, known)
            fix = f"did you mean {near}?" if near else "drop it"
            raise UsageError(f"{sampler} has no such setting", key=key, fix=fix)


def warn_of_missing_server(args: Any) -> None:
    """Say where no server answers yet; TRL waits for it once the model is loaded."""
    address = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    try:
        urllib.request.urlopen(f"{address}/health", timeout=3).close()
    except OSError as error:
        log.warning("no vLLM server answers at %s (%s): start it as docs/rollouts.md says, or name another with "
                    "train.vllm_server_base_url; the run waits for %g s (train.vllm_server_timeout)",
                    address, one_line(error), args.vllm_server_timeout)  # fmt: skip


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
