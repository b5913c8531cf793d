"""Settings of the sampler, vLLM or transformers, and checks of settings and prompts before a model is downloaded."""

import logging
import math
import urllib.request
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset
from transformers import GenerationConfig

from cogumi.config.binding import nearest
from cogumi.config.presets import CORRECTION, CORRECTIONS
from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import install_command, one_line
from cogumi.merge.adapter_files import PLAIN_INITS
from cogumi.methods.warm_start import NOT_OF_THE_LORA
from cogumi.models.adapters import lora_config
from cogumi.models.quantized_bases import quantization_of
from cogumi.patches.vllm_engine import adapter_options
from cogumi.rewards.functions import last_number, spellings_of
from cogumi.rewards.named_rewards import needed_columns
from cogumi.rl.guards import check_distribution, check_loss_settings

log = logging.getLogger("cogumi")
ROWS_AT_ONCE = 1000
ANSWER_REWARDS = {"final_number", "exact_answer", "answer_similarity", "math_answer"}
# A value of a sampling setting -> with it the most likely token is sampled, and no other.
GREEDY: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda value: value == 0,
    "top_k": lambda value: value == 1,
    "min_p": lambda value: value >= 1,
    "do_sample": lambda value: value is False,
}
LARGEST_RANK = 512  # of an adapter in vLLM 0.26 to 0.31 (vllm/config/lora.py, MaxLoRARanks)
# Entries of LoraConfig that vLLM serves as PEFT trains them. It reads a rank, an alpha and use_rslora, for all modules alike,
# and ignores every other entry (vllm/lora/peft_helper.py). These others say where the adapter's pairs are, and not what they do.
SERVED = (
    *("r", "lora_alpha", "use_rslora", "lora_dropout", "init_lora_weights", "fan_in_fan_out", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", *NOT_OF_THE_LORA),
)


def sampler_settings(run: RunConfig) -> dict[str, Any]:
    """TRL's settings of `cogumi.sampler_correction`, none where it is null.

    Raises UsageError where this, or `cogumi.sampler_weights`, contradicts others.
    """
    refuse_adapter(run)
    correction, key = run.cogumi.sampler_correction, "cogumi.sampler_correction"
    if correction is None:
        return {}
    if not run.train.get("use_vllm"):
        message = "it would be ignored: transformers' sampler is the trainer itself"
        raise UsageError(message, key=key, fix="drop it, or set train.use_vllm: true")
    values = {"correction": True} | CORRECTIONS[correction]
    if conflicting := [name for name in run.train if name.startswith(CORRECTION)]:
        message = f"{key}: {correction} and train.{conflicting[0]} both decide what is corrected"
        raise UsageError(message, fix="drop one")
    return {CORRECTION + name: value for name, value in values.items()}


def refuse_adapter(run: RunConfig) -> None:
    """Raise UsageError where vLLM cannot be given the run's adapter apart from its base."""
    if run.cogumi.sampler_weights == "merged":
        return
    key, is_colocated = "cogumi.sampler_weights", run.train.get("vllm_mode", "colocate") == "colocate"
    rank = adapter_rank(run)
    obstacles = [
        (not run.train.get("use_vllm") or not is_colocated, "adapter is for vLLM in the trainer's process",
         "drop it, or set train.use_vllm: true with train.vllm_mode: colocate"),
        (run.cogumi.tuning == "full", "adapter, and there is none with cogumi.tuning: full", "drop it"),
        (run.train.get("vllm_enable_sleep_mode"), "adapter, and an engine that sleeps loses the base's weights",
         "set merged, or drop train.vllm_enable_sleep_mode"),
        (rank > LARGEST_RANK, f"adapter, and vLLM serves ranks up to {LARGEST_RANK}, not {rank}",
         "set merged, or lower lora.r"),
    ]  # fmt: skip
    for applies, message, fix in obstacles:
        if applies:
            raise UsageError(message, key=key, fix=fix)
    settings, plain = vars(lora_config(run.lora)), vars(lora_config({}))
    unserved = [name for name, value in settings.items() if name not in SERVED and value != plain[name]]
    if settings["init_lora_weights"] not in PLAIN_INITS:
        unserved.append("init_lora_weights")
    if any(name in str(settings["target_modules"]) for name in ("lm_head", "embed_tokens")):
        unserved.append("target_modules")
    if unserved:
        message = f"adapter, and vLLM would serve another one than is trained with lora.{unserved[0]}: {settings[unserved[0]]}"
        raise UsageError(message, key=key, fix="set merged, or drop it")


def refuse_quantized(run: RunConfig, base_config: Any) -> None:
    """Raise UsageError for a quantized base, whose packed bytes TRL would send to vLLM (trl#4973). base_config: its config."""
    settings, quantization = run.model.quantization_config or {}, quantization_of(base_config)
    alone = run.cogumi.sampler_weights == "adapter" and not settings.get("load_in_8bit")  # which TRL refuses
    if not run.train.get("use_vllm") or alone or not (settings or quantization):
        return
    quantized, fix = "model.quantization_config is set", "drop one of the two"
    if quantization:
        quantized = f"{run.model.name} is quantized ({quantization})"
        fix = "name the full-precision model, or drop the key"
    message = f"{quantized}, and vLLM cannot be given quantized weights at each rollout"
    raise UsageError(message, key="train.use_vllm", fix=fix)


def engine_of(run: RunConfig) -> dict[str, Any]:
    """Arguments of the vLLM engine that TRL does not give it; a server has its own."""
    options: dict[str, Any] = {}
    if run.cogumi.fp32_lm_head:
        options["hf_overrides"] = {"head_dtype": "float32"}  # vLLM 0.26 and newer read it from the model's config
    if run.cogumi.sampler_weights == "adapter":
        options |= adapter_options(adapter_rank(run))
    return options


def adapter_rank(run: RunConfig) -> int:
    return int(lora_config(run.lora).r)


def refuse_engine(args: Any, by_rollout: bool) -> None:
    """Raise UsageError for vLLM where it is not installed, or corrects for what `behaviour_logps: rollout` has already."""
    if find_spec("vllm") is None:
        fix = f"install the lane stable+vllm (docs/stack.md) or run: {install_command('vllm')}, or drop the key"
        raise UsageError("vLLM is not installed", key="train.use_vllm", fix=fix)
    if by_rollout and args.vllm_importance_sampling_correction:
        reason = "rollout divides by vLLM's log-probabilities already, and TRL's correction would do so again"
        fix = "set cogumi.sampler_correction: none (in a script vllm_importance_sampling_correction=False)"
        raise UsageError(reason, key="cogumi.behaviour_logps", fix=fix)
    if args.vllm_mode == "server":
        address = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        try:
            urllib.request.urlopen(f"{address}/health", timeout=3).close()
        except OSError as error:  # TRL waits for it once the model is loaded
            log.warning("no vLLM server answers at %s (%s): start it as docs/rollouts.md says, or name another with "
                        "train.vllm_server_base_url; the run waits for %g s (train.vllm_server_timeout)",
                        address, one_line(error), args.vllm_server_timeout)  # fmt: skip
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


# ---------------------------------------------------------------------------------------------- settings, and the prompts


def refuse_settings(run: RunConfig, args: Any) -> None:
    """Raise UsageError for settings by which nothing is learned, or with another loss than the one named. args: a GRPOConfig."""
    of_config = {f"train.{key}": getattr(args, key, None) for key in GREEDY}
    of_sampler = {f"train.generation_kwargs.{key}": value for key, value in (args.generation_kwargs or {}).items()}
    for key, value in (of_config | of_sampler).items():
        is_greedy = GREEDY.get(key.rpartition(".")[2])
        if value is not None and is_greedy is not None and is_greedy(value):
            effect = "samples the most likely token: completions of a group, and their rewards, do not differ"
            raise UsageError(f"{key} {value} {effect}", key=key, fix="drop the key")
    key, weights, rewards = "train.reward_weights", args.reward_weights, len(run.cogumi.rewards)
    if weights is not None and len(weights) != rewards:
        reason = f"{key} has {len(weights)} and cogumi.rewards {rewards}"
        raise UsageError(reason, key=key, fix="give one for each reward")
    if weights is not None and (not all(map(math.isfinite, weights)) or not any(weights)):
        reason = f"{key} {list(weights)}: no reward would count"
        raise UsageError(reason, key=key, fix="give at least one that is not 0")
    by_rollout = run.cogumi.behaviour_logps == "rollout"
    if args.use_vllm:
        refuse_engine(args, by_rollout)
    refuse_unknown_sampling(args)
    for finding in (*check_loss_settings(args, "trl"), *check_distribution(args, by_rollout)):
        if finding.refused:
            raise UsageError(finding.message)


def check_prompts(rewards: Sequence[Any], prompts: Dataset) -> None:
    """Warn of prompts that do not differ, and of rows without a value that a reward takes.

    Raises UsageError where no row has such a value: every completion would earn the same.
    """
    if len(prompts) > 1 and pc.count_distinct(prompts.data.column("prompt")).as_py() == 1:
        log.warning("the %s prompts do not differ: what the run learns is about this one prompt", f"{len(prompts):,}")
    counted: dict[str, int] = {}
    for reward in rewards:
        for name in needed_columns(reward):
            if name not in counted:
                batches = prompts.select_columns([name]).iter(ROWS_AT_ONCE)
                counted[name] = sum(value is None for batch in batches for value in batch[name])
            message = f"{reward.__name__} takes `{name}`, which is null in {counted[name]:,} of {len(prompts):,} rows"
            if counted[name] == len(prompts):
                fix = f"say which column of the file it is: data.columns: {{{name}: ...}}"
                raise UsageError(message, key="cogumi.rewards", fix=fix)
            if counted[name]:
                log.warning("cogumi.rewards: %s", message)


def check_answers(rewards: Collection[str], prompts: Dataset) -> None:
    """Warn of answers that end with no number for `final_number`. Raises UsageError if all do, and for lists."""
    is_compared = "answer" in prompts.column_names and not ANSWER_REWARDS.isdisjoint(rewards)
    batches = prompts.select_columns(["answer"]).iter(ROWS_AT_ONCE) if is_compared else ()
    golds = [gold for batch in batches for gold in batch["answer"] if spellings_of(gold)]
    unread = [gold for gold in golds if last_number(spellings_of(gold)[0], alone=True) is None]
    if unread and "final_number" in rewards:
        count = f"{len(unread):,} of {len(golds):,} answers end with no number that stands alone ({unread[0]!r:.40})"
        message, fix = f"final_number: {count}: no completion is right", "write 3.5 for 3,5, or take math_answer"
        if len(unread) == len(golds):
            raise UsageError(message, key="cogumi.rewards", fix=fix)
        log.warning("cogumi.rewards: %s there; %s", message, fix)
