"""Check a GRPO trainer, before the first rollout is paid for, for settings that make another run than they say.

Settings are named as in a run's YAML: `train.` is TRL's GRPOConfig, `lora.` peft's LoraConfig.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torch import nn

from cogumi.config.presets import CORRECTION
from cogumi.core.errors import UsageError
from cogumi.patches.trl_internals import tokenized_prompts
from cogumi.rewards.named_rewards import try_reward
from cogumi.rl.loss_check import CLIPPED, Backend, backend_of
from cogumi.rl.sampling import reshaping_settings

SUMMED_OVER_TOKENS = ("bnpo", "dr_grpo", "dapo", "cispo")  # a sequence weighs as much as it is long
LARGEST_SEQUENCE_EPSILON = 0.05
SMALLEST_TOKEN_EPSILON = 0.01
TOKENIZED_AT_ONCE = 1024
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Where a model drops activations -> what switches it off, in the order in which it is named.
DROPOUT_FIXES = {
    "lora": "lora.lora_dropout: 0 (train.disable_dropout: true does the same)",
    "module": "train.disable_dropout: true",
    # TRL's switch sets the p of nn.Dropout modules, and nothing else.
    "functional": "0.0 for it in the model's config.json (train.disable_dropout does not reach it)",
}
POSITIONS = "the model's max_position_embeddings"
IN_SCRIPTS = "(train. is trl.GRPOConfig, lora. is peft.LoraConfig)"
OWN_OBJECTIVE = "own-objective"  # the trainer's loss is the user's own, and is compared with no formula
# Names of findings, which a script may accept.
NAMES = (
    *("dropout", "pad-is-eos", "token-aggregation", "two-temperatures", "epsilon", "beta", "delta", "wide-clip"),
    *("narrow-clip", "kl-correction", "ratio-always-one", "less-than-a-rollout", "cut-distribution"),
    *("reward", "long-prompts", OWN_OBJECTIVE),
)
_accepted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GuardFinding:
    """A rule that applies. `name`: one of NAMES. `message`: one line: setting, value, why, what to set instead."""

    name: str
    refused: bool
    message: str


def accept_findings(names: Iterable[str]) -> None:
    """Have this process's guards let these findings pass, and no others. Raises UsageError for an unknown name."""
    global _accepted
    accepted = [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in accepted if name not in NAMES]:
        raise UsageError(f"accept={accepted!r}: {unknown[0]!r} is no finding", fix=f"there are: {', '.join(NAMES)}")
    _accepted = frozenset(accepted)


def accepted_by(trainer: Any) -> frozenset[str]:
    """Return the names given to `accept_findings` last; a run from YAML accepts nothing."""
    return frozenset() if is_run_trainer(trainer) else _accepted


def format_accept_call(name: str, beside: frozenset[str]) -> str:
    return f"cogumi.patch(accept={sorted({name, *beside})})"


def is_run_trainer(trainer: Any) -> bool:
    """Return whether `cogumi train` or `cogumi.train` built the trainer, from a YAML."""
    return getattr(trainer, "cogumi_run", False)


def guard_trainer(trainer: Any) -> list[str]:
    """Return the warnings about a constructed `trl.GRPOTrainer`, accepted findings among them.

    Raises UsageError with every refusal, one line each; in a script of the user's own a line says how to accept it.
    """
    refusals, warnings, accepted = [], [], accepted_by(trainer)
    for finding in find_problems(trainer):
        message = finding.message if is_run_trainer(trainer) else f"{finding.message} {IN_SCRIPTS}"
        if finding.name in accepted:
            warnings.append(f"accepted ({finding.name}): {message}")
        elif not finding.refused:
            warnings.append(message)
        elif is_run_trainer(trainer):
            refusals.append(message)
        else:
            accept = format_accept_call(finding.name, accepted)
            refusals.append(f"{message}; to train so on purpose: {accept}")
    if refusals:
        raise UsageError("\n".join(refusals))
    return warnings


def find_problems(trainer: Any) -> list[GuardFinding]:
    """Apply every rule to a constructed `trl.GRPOTrainer`, in the order in which they are written below.

    Prompts of a streamed data set, of environments and of images are not known before the rollout and pass.
    """
    args, dataset = trainer.args, trainer.train_dataset
    backend, rollout_logps = backend_of(trainer), getattr(trainer, "cogumi_behaviour_logps", "") == "rollout"
    findings = [*check_dropout(trainer.model, clips_sequences(args)), *check_pad_token(trainer, backend)]
    findings += check_loss_settings(args, backend)
    corrected = args.use_vllm and args.vllm_importance_sampling_correction
    findings += check_distribution(args, rollout_logps)
    if clips_sequences(args) and not rollout_logps and not corrected:
        findings += check_ratio(args)
    if not isinstance(dataset, Dataset):
        return findings
    findings += check_rollout_size(len(dataset), args)
    images = {"image", "images"} & set(dataset.column_names)
    if trainer.environment_factories is None and "prompt" in dataset.column_names and not images:
        if not is_run_trainer(trainer) and len(dataset):  # a run tried its rewards before
            # An error on the first prompt would be raised after the first rollout otherwise.
            for function in trainer.reward_funcs:
                if not isinstance(function, nn.Module):
                    wrong = try_reward(function, dataset[0], trainer.num_generations, trainer_state=trainer.state)
                    findings += [GuardFinding("reward", *wrong)] if wrong is not None else []
        findings += check_prompt_lengths(trainer)
    return findings


def clips_sequences(args: Any) -> bool:
    """Return whether one clipped ratio stands for a whole completion."""
    return args.importance_sampling_level == "sequence" and args.loss_type in CLIPPED


def check_dropout(model: nn.Module, clips_sequences: bool) -> Iterator[GuardFinding]:
    """Find dropout, which draws another mask for the old log-probabilities than for the new ones.

    On the tests' tiny model 40 to 60 % of the sequences were outside the clip when the second rollout began. Without
    dropout none were, nor in the first one, in which LoRA's B is 0.
    """
    active: list[tuple[str, str, float]] = []  # (key of DROPOUT_FIXES, place, probability)
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS):
            if module.p > 0:
                active.append(("lora" if "lora_dropout" in name else "module", name, module.p))
            continue
        for attribute, value in vars(module).items():
            if "dropout" in attribute and isinstance(value, float) and value > 0:
                active.append(("functional", f"{name}.{attribute}", value))
    if not active:
        return
    active.sort(key=lambda place: list(DROPOUT_FIXES).index(place[0]))
    kind, place, p = active[0]
    others = f" and {len(active) - 1} more" if len(active) > 1 else ""
    fix = " and ".join(DROPOUT_FIXES[kind] for kind in dict.fromkeys(kind for kind, *_ in active))
    name = "lora.lora_dropout" if kind == "lora" else "dropout"
    message = (
        f"{name} is {p:g} ({place}{others}): old and new log-probabilities see different masks. At 0.05 that took 75 % of "
        f"the sequences out of a clip of 3e-4. Set {fix}"
    )
    yield GuardFinding("dropout", clips_sequences, message)


def check_pad_token(trainer: Any, backend: Backend) -> Iterator[GuardFinding]:
    """Find a pad token that unsloth's text path, which finds padding by its id, would confuse with an EOS token.

    TRL's masks are made from lengths: either pad token trains the same.
    """
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)  # out of a processor of images
    pad, eos, every_eos = tokenizer.pad_token_id, tokenizer.eos_token_id, trainer.eos_token_ids
    if backend == "trl" or pad not in (eos, *every_eos):
        return
    role = "the EOS token" if pad == eos else "one of the model's EOS tokens"
    message = f"the pad token is {role} (id {pad}): unsloth masks the end of a completion; give the tokenizer its own pad token"
    yield GuardFinding("pad-is-eos", pad == eos, message)


def check_loss_settings(args: Any, backend: Backend) -> Iterator[GuardFinding]:
    """Find settings of the loss and of the sampler that contradict each other. `args`: a GRPOConfig."""
    loss_type, level = args.loss_type, args.importance_sampling_level
    if level == "sequence" and loss_type in SUMMED_OVER_TOKENS:
        message = (
            f"train.loss_type {loss_type} sums over tokens, so at train.importance_sampling_level sequence a sequence weighs "
            "as much as it is long; set train.loss_type: gspo, or gspo-length for the sum"
        )
        yield GuardFinding("token-aggregation", True, message)
    if level == "token" and loss_type == "luspo":
        message = (
            "train.loss_type luspo needs train.importance_sampling_level: sequence; or set train.loss_type: gspo-length"
        )
        yield GuardFinding("token-aggregation", True, message)
    # TRL 1.15 samples with generation_kwargs' temperature and scores with its own, so the ratio would not start at 1.
    sampled = (args.generation_kwargs or {}).get("temperature", args.temperature)
    if sampled != args.temperature:
        message = (
            f"train.generation_kwargs.temperature {sampled} is sampled at, and TRL scores at train.temperature "
            f"{args.temperature}: two policies; set train.temperature alone"
        )
        yield GuardFinding("two-temperatures", True, message)
    yield from check_clip_numbers(vars(args))
    bounds = {"epsilon": args.epsilon, "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high}
    smallest = min(bounds.values())
    if level == "token" and loss_type == "cispo" and bounds["epsilon_high"] < 1:
        message = (
            f"train.epsilon_high {bounds['epsilon_high']:g} is cispo's cap of the ratio itself; the papers use 4 to 8"
        )
        yield GuardFinding("narrow-clip", False, message)
    elif level == "token" and loss_type in CLIPPED and smallest < SMALLEST_TOKEN_EPSILON:
        message = (
            f"train.epsilon {bounds['epsilon']:g} / train.epsilon_high {bounds['epsilon_high']:g} are a sequence loss's, and "
            f"train.loss_type {loss_type} would clip almost every token after one step; leave them out for the preset's"
        )
        yield GuardFinding("narrow-clip", False, message)
    wide = {name: value for name, value in bounds.items() if value > LARGEST_SEQUENCE_EPSILON}
    if clips_sequences(args) and wide:
        named = " and ".join(f"train.{name} {value:g}" for name, value in wide.items())
        message = (
            f"{named}: a token loss's clip. A sequence's ratio rarely leaves 1 +- 0.01, so nothing would be clipped; set "
            "train.epsilon: 3e-4 and train.epsilon_high: 4e-4 (gspo-length: 3e-3 and 4e-3)"
        )
        yield GuardFinding("wide-clip", True, message)
    if level == "sequence" and backend == "trl" and args.use_bias_correction_kl and args.beta > 0:
        # TRL 1.15 multiplies each token's KL term by the ratio, which is unbiased for a token's ratio (docs/gspo.md).
        message = (
            f"train.beta {args.beta:g}: a sequence's ratio corrects a token's KL gradient by 1/N only, so it stays that of "
            "KL(ref || policy); set train.use_bias_correction_kl: false, or train.loss_type: grpo"
        )
        yield GuardFinding("kl-correction", False, message)


def check_distribution(args: Any, rollout_logps: bool) -> Iterator[GuardFinding]:
    """Find a sampled distribution that vLLM scores and the trainer does not: their ratio corrects for the cut.

    vLLM scores a token among those that top-p and its like leave, and the trainer among all.

    With top_p 0.8 half of the ratios were outside 0.9 to 1.1 in https://github.com/huggingface/trl/issues/6789.
    """
    compares = args.use_vllm and (args.vllm_importance_sampling_correction or rollout_logps)
    if not compares or not (cut := reshaping_settings(args)):
        return
    prefixes = dict.fromkeys(args.generation_kwargs or {}, "generation_kwargs.")
    named = ", ".join(f"train.{prefixes.get(name, '')}{name} {value}" for name, value in cut.items())
    other = "cogumi.behaviour_logps: trainer" if rollout_logps else f"train.{CORRECTION}correction: false"
    message = (
        f"{named}: vLLM's log-probabilities are of the distribution that this leaves, and the trainer's of the whole one, "
        f"so the ratio of both corrects for the cut; remove it, or set {other}"
    )
    yield GuardFinding("cut-distribution", True, message)


def check_clip_numbers(values: Mapping[str, Any]) -> Iterator[GuardFinding]:
    """Find numbers that make no clip or no KL penalty. `values`: by key, any may be missing."""
    for key in ("epsilon", "epsilon_high"):
        if (value := values.get(key)) is not None and not value > 0:
            message = f"train.{key} is {value}; the clip needs a positive number, such as 3e-4"
            yield GuardFinding("epsilon", True, message)
    if (beta := values.get("beta")) is not None and beta < 0:
        message = f"train.beta is {beta}: a negative KL term drives the policy away; set 0 or more"
        yield GuardFinding("beta", True, message)
    if (delta := values.get("delta")) is not None and values.get("loss_type") in CLIPPED and delta <= 1:
        message = (
            f"train.delta {delta:g} caps every ratio at or below 1, so rewarded completions get no gradient; leave it out, or "
            "set more than 1 + train.epsilon_high"
        )
        yield GuardFinding("delta", True, message)


def check_ratio(args: Any) -> Iterator[GuardFinding]:
    """Find rollouts of one optimizer step, for which TRL 1.15 takes `new.detach()` as the old log-probabilities."""
    accumulation = args.gradient_accumulation_steps
    if accumulation % (args.steps_per_generation * args.num_iterations) == 0:
        message = (
            f"each rollout is used for one step (train.steps_per_generation {args.steps_per_generation}, "
            f"train.num_iterations {args.num_iterations}, train.gradient_accumulation_steps {accumulation}). The ratio is then "
            "exactly 1 and the clip never acts, so this is a plain policy gradient. That is right for a short run. For the "
            f"paper's four steps a rollout set train.steps_per_generation: {4 * accumulation}"
        )
        yield GuardFinding("ratio-always-one", False, message)


def check_rollout_size(prompts: int, args: Any) -> Iterator[GuardFinding]:
    """Find fewer prompts than a rollout takes: TRL 1.15's RepeatSampler drops a rollout that is not whole."""
    needed = args.generation_batch_size // args.num_generations
    if prompts < needed:
        message = (
            f"{prompts} prompts, and one rollout takes {needed} (train.generation_batch_size {args.generation_batch_size} / "
            f"train.num_generations {args.num_generations}): TRL would make no step; repeat the data "
            f"(cogumi.rl.memory_plan.repeat_to_rollout) or take at most {prompts * args.num_generations} completions a rollout"
        )
        yield GuardFinding("less-than-a-rollout", True, message)


def check_prompt_lengths(trainer: Any) -> Iterator[GuardFinding]:
    """Find prompts, as the trainer renders them, that leave less room in the context than a completion may take."""
    completion = trainer.args.max_completion_length or 0
    limit, setting = rollout_context(trainer.model.config, trainer.args)
    if limit is None:
        return
    prompts = trainer.train_dataset["prompt"]
    lengths: list[int] = []
    for start in range(0, len(prompts), TOKENIZED_AT_ONCE):
        lengths += map(len, tokenized_prompts(trainer, prompts[start : start + TOKENIZED_AT_ONCE]))
    if over := sum(length + completion > limit for length in lengths):
        longest = max(lengths)
        fits = f"set train.max_completion_length: {limit - longest}" if longest < limit else "shorten them"
        message = (
            f"{over} of {len(lengths)} prompts are too long: the longest has {longest} tokens, with "
            f"train.max_completion_length {completion} that is {longest + completion}, and {setting} is {limit}; {fits}"
        )
        yield GuardFinding("long-prompts", True, message)


def rollout_context(config: Any, args: Any) -> tuple[int | None, str]:
    """Return how many tokens a prompt and its completion may have together, and what limits them. `args`: a GRPOConfig."""
    if args.use_vllm and args.vllm_max_model_length is not None:
        return args.vllm_max_model_length, "train.vllm_max_model_length"
    return context_of(config), POSITIONS


def context_of(config: Any) -> int | None:
    """Return a model's context in tokens, with what its RoPE scaling adds; None where its config does not say."""
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if limit is None or rope.get("rope_type") not in ("linear", "dynamic", "yarn"):  # the others' is the scaled model's
        return limit
    original = rope.get("original_max_position_embeddings") or limit
    return max(limit, int(original * rope.get("factor", 1.0)))
