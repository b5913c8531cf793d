"""What would make a GRPO run something else than it says, found before the first rollout is paid for.

Each rule is a function of plain values that returns what it found or None; `before_the_first_rollout` feeds them from a
trainer. Settings are named as in a run's YAML (`train.` is TRL's GRPOConfig, `lora.` peft's LoraConfig).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from datasets import Dataset
from torch import nn
from transformers.trainer_utils import SaveStrategy

from cogumi.config.presets import PRESETS
from cogumi.core.errors import UsageError
from cogumi.patches.gspo_loss import loss_name
from cogumi.rewards.named_rewards import what_is_wrong
from cogumi.rl.findings import Finding, how_to_accept, is_a_runs, worded_for
from cogumi.rl.memory_plan import nearest_multiples
from cogumi.rl.reference_loss import CLIPPED

SUMMED_OVER_TOKENS = ("bnpo", "dr_grpo", "dapo", "cispo")  # a sequence weighs as much as it is long
LARGEST_SEQUENCE_EPSILON = 0.05
SMALLEST_TOKEN_EPSILON = 0.01
TOKENIZED_AT_ONCE = 1024
POSITIONS = "the model's max_position_embeddings"


def guard(
    trainer: Any,
    *,
    backend: Literal["trl", "unsloth"],
    behaviour_logps: Literal["trainer", "rollout"] = "trainer",
    accepted: frozenset[str] = frozenset(),
) -> list[str]:
    """The warnings about a constructed `trl.GRPOTrainer`, accepted findings among them.

    Raises UsageError with every refusal, one line each; to a script of the user's own a line says how to accept it.
    """
    refusals, warnings = [], []
    for finding in before_the_first_rollout(trainer, backend=backend, behaviour_logps=behaviour_logps):
        message = worded_for(trainer, finding.message)
        if finding.name in accepted:
            warnings.append(f"accepted ({finding.name}): {message}")
        elif finding.refused:
            on_purpose = (
                "" if is_a_runs(trainer) else f"; to train so on purpose: {how_to_accept(finding.name, accepted)}"
            )
            refusals.append(f"{message}{on_purpose}")
        else:
            warnings.append(message)
    if refusals:
        raise UsageError("\n".join(refusals))
    return warnings


def before_the_first_rollout(
    trainer: Any,
    *,
    backend: Literal["trl", "unsloth"],
    behaviour_logps: Literal["trainer", "rollout"] = "trainer",
) -> list[Finding]:
    """Every rule applied to a constructed `trl.GRPOTrainer`, in the order in which they are written below.

    `behaviour_logps`: whose log-probabilities the ratio is taken against. Prompts are tokenized once, by the trainer's own
    method; those of a streamed data set, of environments and of images are not known before the rollout and pass.
    """
    args = trainer.args
    per_sequence = ratio_is_per_sequence(args)
    clips_sequences = per_sequence and args.loss_type in CLIPPED
    generate_every = args.steps_per_generation * args.num_iterations
    found = [
        dropout(active_dropout(trainer.model), clips_sequences),
        pad_is_eos(trainer._tokenizer.pad_token_id, trainer._tokenizer.eos_token_id, trainer.eos_token_ids, backend),
        token_aggregation(args.loss_type, args.importance_sampling_level),
        two_temperatures(args.temperature, args.generation_kwargs),
    ]
    found += clip_numbers(
        {key: getattr(args, key) for key in ("loss_type", "epsilon", "epsilon_high", "delta", "beta")}
    )
    if not per_sequence:
        found.append(narrow_clip(args.loss_type, args.epsilon, args.epsilon_high))
    if clips_sequences:
        found.append(wide_clip(args.epsilon, args.epsilon_high))
        corrected = args.use_vllm and args.vllm_importance_sampling_correction
        if behaviour_logps == "trainer" and not corrected:
            found.append(ratio_always_one(args.gradient_accumulation_steps, generate_every, args.num_iterations))
    if args.importance_sampling_level == "sequence" and backend == "trl" and args.use_bias_correction_kl:
        found.append(kl_correction(args.beta, args.max_completion_length))
    # cogumi.protect saves what TRL does not, and a run is protected before its first step.
    keeps_rollouts = is_a_runs(trainer) or hasattr(trainer, "cogumi_protection")
    if not keeps_rollouts and (every := steps_between_checkpoints(trainer)):
        found.append(checkpoint_inside_a_rollout(*every, args.gradient_accumulation_steps, generate_every))
    if not keeps_rollouts and SaveStrategy(args.save_strategy) == SaveStrategy.STEPS and not args.save_only_model:
        found.append(last_checkpoint_inside_a_rollout(args.max_steps, args.gradient_accumulation_steps, generate_every))
    if isinstance(trainer.train_dataset, Dataset):
        found.append(less_than_a_rollout(len(trainer.train_dataset), args.generation_batch_size, args.num_generations))
        if (
            not is_a_runs(trainer) and len(trainer.train_dataset) and prompts_are_text(trainer)
        ):  # a run tried them before
            found += rewards_tried(trainer)
        context = context_length(trainer)
        if context is not None and prompts_are_text(trainer):
            found.append(too_long(prompt_lengths(trainer), args.max_completion_length or 0, *context))
    return [finding for finding in found if finding is not None]


def ratio_is_per_sequence(args: Any) -> bool:
    """Whether one ratio stands for a whole completion. GSPO-token's does, though TRL computes it token by token."""
    name = loss_name(args)
    return args.importance_sampling_level == "sequence" or (name in PRESETS and PRESETS[name].token_ratio)


@dataclass(frozen=True)
class ActiveDropout:
    """One place where the model drops activations, and with which probability."""

    place: str
    p: float
    kind: Literal["lora", "module", "functional"]


def active_dropout(model: nn.Module) -> list[ActiveDropout]:
    """Every place, LoRA's first, then other modules, then functional calls.

    A functional call shows only as the number its module keeps for it, such as Llama's `attention_dropout`.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p > 0:
                found.append(ActiveDropout(name, module.p, "lora" if "lora_dropout" in name else "module"))
            continue
        for attribute, value in vars(module).items():
            if "dropout" in attribute and isinstance(value, float) and value > 0:
                found.append(ActiveDropout(f"{name}.{attribute}", value, "functional"))
    order = ("lora", "module", "functional")
    return sorted(found, key=lambda each: order.index(each.kind))


def dropout(active: Sequence[ActiveDropout], clips_sequences: bool) -> Finding | None:
    """Dropout draws another mask for the old log-probabilities than for the new ones.

    At LoRA's start B is 0 and nothing is dropped yet; on the tiny model of the tests 62 % of the sequences were outside
    the clip at the first step of the second rollout, and all of them with a random B. Without dropout none were.
    """
    if not active:
        return None
    fixes = {
        "lora": "lora.lora_dropout: 0",
        "module": "train.disable_dropout: true",
        # TRL's switch sets the p of nn.Dropout modules, and nothing else.
        "functional": "0.0 for it in the model's config.json (train.disable_dropout does not reach it)",
    }
    first = active[0]
    names = {"lora": "lora.lora_dropout", "module": "dropout", "functional": "dropout"}
    others = f" and {len(active) - 1} more" if len(active) > 1 else ""
    fix = " and ".join(fixes[kind] for kind in dict.fromkeys(each.kind for each in active))
    if first.kind == "lora":
        fix += " (train.disable_dropout: true does the same)"
    start = (
        f"{names[first.kind]} is {first.p:g} ({first.place}{others}): old and new log-probabilities see different masks"
    )
    if clips_sequences:
        return Finding(
            "dropout",
            True,
            f"{start}, so the ratio leaves a clip of 3e-4 by itself (measured at 0.05: 75 % of the sequences clipped "
            f"at step 1, for any adapter but one that is still zero); set {fix}",
        )
    return Finding("dropout", False, f"{start}, which adds noise to every ratio; set {fix}")


def pad_is_eos(pad: int, eos: int, all_eos: Sequence[int], backend: Literal["trl", "unsloth"]) -> Finding | None:
    """unsloth's text path finds padding by its id; nothing is wrong under TRL, whose masks are made from lengths.

    TRL 1.15 cuts a completion at its first EOS and builds prompt_mask and completion_mask as ones of each row's length,
    padded with zeros; a test trains the same run with either pad token, to the same weights.
    """
    if backend == "trl" or pad not in (eos, *all_eos):
        return None
    if pad == eos:
        return Finding(
            "pad-is-eos",
            True,
            f"the pad token is the EOS token (id {pad}): unsloth masks every token with the pad token's id, so the end of a "
            "completion is never learned; give the tokenizer a pad token of its own",
        )
    return Finding(
        "pad-is-eos",
        False,
        f"the pad token (id {pad}) is one of the model's EOS tokens ({', '.join(map(str, all_eos))}): unsloth masks it where "
        "a completion ends with it; give the tokenizer a pad token of its own",
    )


def token_aggregation(loss_type: str, level: str) -> Finding | None:
    """A ratio per sequence with a loss summed over tokens, or the reverse."""
    if level == "sequence" and loss_type in SUMMED_OVER_TOKENS:
        return Finding(
            "token-aggregation",
            True,
            f"train.loss_type {loss_type} sums over tokens, so with train.importance_sampling_level sequence each sequence "
            "weighs as much as it is long; set train.loss_type: gspo (the paper's mean) or gspo-length (its sum, on purpose)",
        )
    if level == "token" and loss_type == "luspo":
        return Finding(
            "token-aggregation",
            True,
            "train.loss_type luspo is a sequence-level loss, and train.importance_sampling_level is token; set "
            "train.loss_type: gspo-length, or train.importance_sampling_level: sequence",
        )
    return None


def two_temperatures(scored: float, generation_kwargs: Mapping[str, Any] | None) -> Finding | None:
    """TRL 1.15 samples with generation_kwargs' temperature and scores with its own, so the ratio would not start at 1."""
    sampled = (generation_kwargs or {}).get("temperature", scored)
    if sampled == scored:
        return None
    return Finding(
        "two-temperatures",
        True,
        f"train.generation_kwargs.temperature {sampled} is what completions are sampled at, and TRL scores at "
        f"train.temperature {scored}: two policies; set train.temperature alone",
    )


def clip_numbers(values: Mapping[str, Any]) -> list[Finding]:
    """Numbers with which a clip or a KL term does something else than its name says; `values` may lack any of them."""
    found = []
    for key in ("epsilon", "epsilon_high"):
        if (value := values.get(key)) is not None and not value > 0:
            wrong = f"train.{key} is {value}; the clip needs a positive number, such as 3e-4"
            found.append(Finding("epsilon", True, wrong))
    if (beta := values.get("beta")) is not None and beta < 0:
        wrong = f"train.beta is {beta}: a negative KL term drives the policy away; set 0 or more"
        found.append(Finding("beta", True, wrong))
    if (delta := values.get("delta")) is not None and values.get("loss_type") in CLIPPED and delta <= 1:
        found.append(
            Finding(
                "delta",
                True,
                f"train.delta {delta:g} caps every ratio at or below 1, so rewarded completions get no gradient; set more than "
                "1 + train.epsilon_high, or leave it out",
            )
        )
    return found


def narrow_clip(loss_type: str, epsilon: float, epsilon_high: float | None) -> Finding | None:
    """A sequence loss's epsilon on ratios of single tokens."""
    high = epsilon if epsilon_high is None else epsilon_high
    if loss_type == "cispo" and high < 1:
        return Finding(
            "narrow-clip",
            False,
            f"train.epsilon_high {high:g} is cispo's cap of the ratio itself, and below 1 it scales every gradient down; the "
            "papers use 4 to 8",
        )
    if loss_type in CLIPPED and min(epsilon, high) < SMALLEST_TOKEN_EPSILON:
        return Finding(
            "narrow-clip",
            False,
            f"train.epsilon {epsilon:g} / train.epsilon_high {high:g} are a sequence loss's, and the ratio of train.loss_type "
            f"{loss_type} is per token: almost every token is clipped after one step; leave them out for the preset's",
        )
    return None


def wide_clip(epsilon: float, epsilon_high: float | None) -> Finding | None:
    """A token loss's epsilon on a ratio that is a mean over the sequence."""
    bounds = {"epsilon": epsilon, "epsilon_high": epsilon if epsilon_high is None else epsilon_high}
    wide = {name: value for name, value in bounds.items() if value > LARGEST_SEQUENCE_EPSILON}
    if not wide:
        return None
    named = " and ".join(f"train.{name} {value:g}" for name, value in wide.items())
    return Finding(
        "wide-clip",
        True,
        f"{named}: a token loss's clip. A sequence's ratio is a mean over its tokens and rarely leaves 1 +- 0.01, so nothing "
        "would be clipped; set train.epsilon: 3e-4 and train.epsilon_high: 4e-4 (GSPO's paper; summed over tokens, as in "
        "gspo-length: 3e-3 and 4e-3)",
    )


def kl_correction(beta: float, longest: int | None) -> Finding | None:
    """TRL 1.15 multiplies each token's KL term by the ratio: unbiased for a token's ratio, and not for a sequence's.

    With d = log p_ref - log p and k = e^d - d - 1 a token's gradient is 1 - e^d without the correction (in expectation
    that of KL(ref || policy)) and 1 - e^d + k = -d with a token's ratio (KL(policy || ref)). A sequence's ratio is the
    N-th root of the likelihood ratio: every token gets the mean of k in place of its own, of which 1/N is its own.
    """
    if not beta > 0:
        return None
    share = "1/N" if longest is None else f"1/{longest}"
    return Finding(
        "kl-correction",
        False,
        f"train.beta {beta:g} with train.use_bias_correction_kl, TRL's default: the KL term is multiplied by the sequence's "
        f"ratio, the N-th root of a likelihood ratio. Of the correction 1/N is left for N tokens ({share} for the longest), so "
        "the KL gradient stays that of KL(ref || policy); set train.use_bias_correction_kl: false, which says so, or "
        "train.loss_type: gspo-token, whose KL gradient is corrected token by token",
    )


def ratio_always_one(accumulation: int, generate_every: int, num_iterations: int) -> Finding | None:
    """Every rollout is used up by one optimizer step; TRL 1.15 then takes `new.detach()` as the old log-probabilities."""
    if accumulation % generate_every:
        return None
    return Finding(
        "ratio-always-one",
        False,
        f"train.steps_per_generation {generate_every // num_iterations} x train.num_iterations {num_iterations} is not more "
        f"than train.gradient_accumulation_steps {accumulation}: no rollout is used for a second step, the ratio is exactly 1 "
        "and GSPO's clip can never act (what trains is REINFORCE divided by the length); set "
        f"train.steps_per_generation: {4 * accumulation} for the paper's 4 steps a rollout",
    )


def steps_between_checkpoints(trainer: Any) -> tuple[str, int] | None:
    """The key that sets them and its value in optimizer steps; None where no checkpoint is taken before the last step.

    At the end of an epoch the rollout is used up; what `save_only_model` leaves cannot be resumed.
    """
    args = trainer.args
    key = {SaveStrategy.STEPS: "save_steps", SaveStrategy.BEST: "eval_steps"}.get(SaveStrategy(args.save_strategy))
    if key is None or args.save_only_model or (key == "eval_steps" and args.eval_strategy != "steps"):
        return None
    total = max(args.max_steps, trainer.state.max_steps)  # the state knows it once training has begun
    every = getattr(args, key)
    if every < 1:  # a share of the run
        if total <= 0:
            return None
        every = math.ceil(every * total)
    return None if 0 < total <= every else (key, int(every))


def checkpoint_inside_a_rollout(key: str, steps: int, accumulation: int, generate_every: int) -> Finding | None:
    """TRL 1.15 saves neither its position in a rollout nor the rollout, and a resumed run starts with a new one.

    A script may never resume, and TRL's own default of 500 steps is no multiple of most rollouts: there it is a warning.
    """
    if steps * accumulation % generate_every == 0:
        return None
    aligned = generate_every // math.gcd(generate_every, accumulation)
    return Finding(
        "checkpoint-inside-rollout",
        False,
        f"train.{key} {steps}: a checkpoint would fall inside a rollout, which TRL does not save, so a resumed run would "
        f"train on other rollouts than this one; a rollout lasts {aligned} steps "
        "(train.steps_per_generation x train.num_iterations micro-batches, "
        "train.gradient_accumulation_steps of them a step): use cogumi.protect(trainer), which saves it, or set "
        f"train.{key}: {nearest_multiples(steps, aligned)}",
    )


def last_checkpoint_inside_a_rollout(max_steps: int, accumulation: int, generate_every: int) -> Finding | None:
    """transformers saves after the last step too; only a run that is to be continued from there minds."""
    if max_steps <= 0 or max_steps * accumulation % generate_every == 0:
        return None
    aligned = generate_every // math.gcd(generate_every, accumulation)
    return Finding(
        "last-checkpoint-inside-rollout",
        False,
        f"train.max_steps {max_steps} ends inside a rollout of {aligned} steps: its last checkpoint is good to use, and a run "
        "continued from it would train on other rollouts; to continue, set train.max_steps: "
        f"{nearest_multiples(max_steps, aligned)}",
    )


def less_than_a_rollout(prompts: int, completions_per_rollout: int, group: int) -> Finding | None:
    """TRL 1.15's RepeatSampler drops a rollout that is not whole."""
    needed = completions_per_rollout // group
    if prompts >= needed:
        return None
    return Finding(
        "less-than-a-rollout",
        True,
        f"{prompts} prompts, and one rollout takes {needed} (train.generation_batch_size {completions_per_rollout} / "
        f"train.num_generations {group}): TRL drops what does not fill a rollout, so not one step would be made; repeat the "
        f"data (cogumi.rl.memory_plan.whole_rollout) or take at most {prompts * group} completions a rollout",
    )


def rewards_tried(trainer: Any) -> list[Finding]:
    """Every reward function called once on the first prompt: what it raises there, it raises after the first rollout."""
    functions = [each for each in trainer.reward_funcs if not isinstance(each, nn.Module)]
    row, group = trainer.train_dataset[0], trainer.num_generations
    wrong = [what_is_wrong(each, row, group, trainer_state=trainer.state) for each in functions]
    return [Finding("reward", *each) for each in wrong if each is not None]


def context_length(trainer: Any) -> tuple[int, str] | None:
    """(tokens, setting) that prompt and completion must fit into; None where the model names no limit."""
    if trainer.use_vllm and trainer.args.vllm_max_model_length is not None:
        return trainer.args.vllm_max_model_length, "train.vllm_max_model_length"
    limit = positions_of(trainer.model.config)
    return None if limit is None else (limit, POSITIONS)


def positions_of(config: Any) -> int | None:
    """The context a model was made for, in tokens, with what its RoPE scaling adds; None where its config has no word."""
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if limit is None or rope.get("rope_type") not in ("linear", "dynamic", "yarn"):  # the others' is the scaled model's
        return limit
    original = rope.get("original_max_position_embeddings") or limit
    return max(limit, int(original * rope.get("factor", 1.0)))


def prompts_are_text(trainer: Any) -> bool:
    """Whether the rollout's prompts are those of the data set, without images."""
    columns = trainer.train_dataset.column_names
    return trainer.environment_factories is None and "prompt" in columns and not {"image", "images"} & set(columns)


def prompt_lengths(trainer: Any) -> list[int]:
    """Tokens of every prompt as the trainer will render it, chat template and all."""
    prompts = trainer.train_dataset["prompt"]
    lengths: list[int] = []
    for start in range(0, len(prompts), TOKENIZED_AT_ONCE):
        ids, _, _ = trainer._tokenize_prompts(prompts[start : start + TOKENIZED_AT_ONCE])
        lengths += map(len, ids)
    return lengths


def too_long(lengths: Sequence[int], completion: int, limit: int, setting: str) -> Finding | None:
    """Prompts that leave less room in the context than a completion may take. All in tokens."""
    over = sum(length + completion > limit for length in lengths)
    if not over:
        return None
    longest, room = max(lengths), limit - completion
    fits = f"set train.max_completion_length: {limit - longest}" if longest < limit else "shorten them"
    drop = f", or leave out prompts of more than {room} tokens" if room > 0 else ""
    return Finding(
        "long-prompts",
        True,
        f"{over} of {len(lengths)} prompts are too long: the longest has {longest} tokens, with "
        f"train.max_completion_length {completion} that is {longest + completion}, and {setting} is {limit}; {fits}{drop}",
    )
