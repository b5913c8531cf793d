"""GSPO and its relatives: TRL's GRPOTrainer, or unsloth's, with a policy loss from `cogumi.config.presets`, watched."""

import copy
import inspect
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerState

from cogumi.config.presets import OURS
from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.core.run_directory import DECISIONS, read_section, write_section
from cogumi.data.chat import visible_text
from cogumi.data.literal import keep_data_as_text
from cogumi.data.rows import RECORD_COLUMN
from cogumi.data.templates import read_template
from cogumi.environments.dialogue import Dialogue
from cogumi.environments.episodes import Episodes
from cogumi.environments.loading import ENVIRONMENT, TOOLS, Task, load_task, try_environment
from cogumi.methods.sampler import ROWS_AT_ONCE, check_answers, check_prompts, engine_of, sampler_settings
from cogumi.methods.step_split import is_planned
from cogumi.models.adapters import lora_config
from cogumi.patches.gspo_loss import fill_defaults, loss_values
from cogumi.patches.vllm_engine import engine_options
from cogumi.rewards import named_rewards
from cogumi.rewards.functions import (
    THOUGHT_COLUMNS,
    on_visible,
    parameters_of,
    reads_thoughts,
    with_columns,
    with_thoughts,
)
from cogumi.rewards.unit_tests import join_tests, run_tests, unit_tests
from cogumi.rl import memory_plan, sampling
from cogumi.rl.fp32_head import fp32_lm_head
from cogumi.rl.generation import share_prefill_and_drop_finished
from cogumi.rl.guards import check_clip_numbers, rollout_context
from cogumi.rl.watch import RECORD, watch
from cogumi.sandbox import Sandbox, default_sandbox

log = logging.getLogger("cogumi")
PLANNED = ("gradient_accumulation_steps", "steps_per_generation")  # what a number of documents per step decides
STEPS_PER_ROLLOUT = 4  # arXiv:2507.18071, section 5.1: four mini-batches
BATCH = "batch"  # of decisions.json: the batch that a run planned, and keeps when it resumes
TRAINABLE_BYTES = 16  # per LoRA parameter: fp32 weight, gradient and two AdamW moments


def arguments(run: RunConfig) -> dict[str, Any]:
    """GRPOConfig arguments with the preset spelled out. Raises UsageError for what would not be the run it says."""
    train = {"loss_type": "gspo", **run.train}
    read_rewards(run)
    entries = run.cogumi.rewards
    if entries and (weights := named_rewards.weights_of(entries, train.get("reward_weights"))) is not None:
        train["reward_weights"] = weights
    name = train["loss_type"]
    train |= sampler_settings(run)
    values = loss_values(name)
    for finding in check_clip_numbers(values | train | {"loss_type": values["loss_type"]}):
        raise UsageError(finding.message)
    key = "importance_sampling_level"
    if name in OURS and train.get(key, values[key]) != values[key]:
        raise UsageError(f"{train[key]} contradicts train.loss_type: {name}", key=f"train.{key}", fix="drop one")
    if train.get("cast_lm_head_to_fp32"):
        reason, fix = "TRL's switch fails on tied embeddings with PEFT", "set cogumi.fp32_lm_head: true instead"
        raise UsageError(reason, key="train.cast_lm_head_to_fp32", fix=fix)
    if is_planned(run):
        train |= provisional_batch(run)
    elif name in OURS and all(train.get(key) is None for key in ("steps_per_generation", "generation_batch_size")):
        train["steps_per_generation"] = STEPS_PER_ROLLOUT * run.setting("gradient_accumulation_steps")
    memory_plan.check_groups(train)
    # Metrics are for every step. The names of ours stay in the config, which spells them out by itself.
    return {"logging_steps": 1} | (train if name in OURS else fill_defaults(name, train))


def step_sizes(run: RunConfig) -> tuple[int, int, int, int | None]:
    """(num_generations, a process's documents of a step, optimizer steps of a rollout, the micro-batch that the config asks for).

    Raises UsageError where they do not divide each other.
    """
    group, fixed = run.setting("num_generations"), run.train.get("per_device_train_batch_size")
    memory_plan.refuse_small_group(group)
    documents = memory_plan.count_documents(run.cogumi.docs_per_step, run.cogumi.prompts_per_step, group)
    rollout = run.train.get("generation_batch_size") or STEPS_PER_ROLLOUT * documents
    processes = run.cogumi.process_count
    if rollout % documents:
        reason = f"is no whole number of optimizer steps of {documents} documents"
        fix = f"set {memory_plan.nearest_multiples(rollout, documents)}"
        raise UsageError(f"train.generation_batch_size {rollout} {reason}", fix=fix)
    memory_plan.refuse_uneven(documents, run.cogumi.prompts_per_step, group, rollout // documents, fixed)
    if processes > 1:
        if documents % processes:
            message = f"a step of {documents} completions cannot be shared by {processes} processes"
            fix = f"take {memory_plan.nearest_multiples(documents, processes)} a step"
            raise UsageError(message, key="cogumi.processes", fix=fix)
        memory_plan.refuse_uneven(documents // processes, None, group, rollout // documents, fixed)
    return group, documents // processes, rollout // documents, fixed


def rollout_rows(run: RunConfig) -> int:
    """Return the completions of a rollout in each process, which TRL gives vLLM as `max_num_seqs`."""
    if is_planned(run):
        _, documents, mini_batches, _ = step_sizes(run)
        return documents * mini_batches
    if size := run.train.get("generation_batch_size"):
        return int(size) // run.cogumi.process_count
    steps = run.train.get("steps_per_generation")
    if steps is None:
        steps = run.setting("gradient_accumulation_steps")
        steps *= STEPS_PER_ROLLOUT if run.train.get("loss_type", "gspo") in OURS else 1
    return int(run.setting("per_device_train_batch_size") * steps)


@dataclass(frozen=True)
class RolloutSize:
    """Completions and prompts that all processes sample at a time, and the optimizer steps that train on them."""

    completions: int
    prompts: int
    steps: int

    def __str__(self) -> str:
        used = f"used in {self.steps} optimizer step" + "s" * (self.steps > 1)
        return f"{self.completions} completions of {self.prompts} prompts, {used}"


def rollout_size(run: RunConfig) -> RolloutSize:
    """Return the size of a run's rollouts. run: as one process trains it (`split_step`)."""
    rows, group = rollout_rows(run), run.setting("num_generations")
    if is_planned(run):
        step = step_sizes(run)[1]
    else:
        step = run.setting("per_device_train_batch_size") * run.setting("gradient_accumulation_steps")
    completions = rows * run.cogumi.process_count
    steps = max(1, rows * run.setting("num_iterations") // step)
    return RolloutSize(completions, completions // group, steps)


def provisional_batch(run: RunConfig) -> dict[str, Any]:
    """Check the size of a step, and make a batch of that size for TRL's checks until the model is loaded."""
    for key in (key for key in PLANNED if run.train.get(key) is not None):
        message = f"train.{key} and cogumi.docs_per_step or prompts_per_step decide the same"
        raise UsageError(message, fix="drop one (documents per rollout are train.generation_batch_size)")
    _, documents, mini_batches, fixed = step_sizes(run)
    accumulation = documents // (fixed or 1)
    return {
        "per_device_train_batch_size": fixed or 1,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * mini_batches,
        "generation_batch_size": None,
    }


def plan(run: RunConfig, model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Dataset) -> dict[str, Any]:
    """Plan the batch for the loaded model and the memory beside it; a resumed run keeps its batch."""
    planned: dict[str, Any] = read_section(run.run_dir / DECISIONS, BATCH)
    if not planned:
        tools = task_of(run).schemas
        longest = max(len(prompt_ids(prompt, tokenizer, tools)) for prompt in prompts["prompt"])
        # The engine is not started yet, and will be beside every step.
        free = memory_plan.free_memory_bytes() - memory_plan.engine_bytes(run.train, memory_plan.total_memory_bytes())
        free -= TRAINABLE_BYTES * lora_parameters(model, lora_config(run.lora).r)
        planned, line = batch_for(run, model.config, model.dtype.itemsize, longest, free)
        log.info("%s", line)
        write_section(run.run_dir / DECISIONS, BATCH, planned)
    return planned


def batch_for(
    run: RunConfig, config: Any, itemsize: int, longest_prompt: int, free_bytes: int
) -> tuple[dict[str, int], str]:
    """`plan_batch` for a run with a model of this config."""
    group, documents, mini_batches, fixed = step_sizes(run)
    return memory_plan.plan_batch(
        documents,
        num_generations=group,
        per_device_train_batch_size=fixed,
        mini_batches_per_rollout=mini_batches,
        shape=memory_plan.ModelShape.of(config),
        longest_prompt=longest_prompt,
        max_completion_length=run.setting("max_completion_length"),
        free_bytes=free_bytes,
        bytes_per_element=4 if run.train.get("bf16") is False else itemsize,  # PEFT then copies inputs to float32
        gradient_checkpointing=run.setting("gradient_checkpointing"),
    )


def prompt_ids(
    prompt: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """Tokenize a prompt as TRL does: text as it is, messages and schemas of tools through the chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(
        tokenizer.apply_chat_template(prompt, list(tools) or None, add_generation_prompt=True, return_dict=False)
    )


def with_batch(run: RunConfig, arguments: dict[str, Any]) -> RunConfig:
    """Put a planned batch in the place of documents per step."""
    decided = run.model_copy(deep=True)
    decided.cogumi.docs_per_step = decided.cogumi.prompts_per_step = None
    decided.train |= arguments
    decided.train.pop("generation_batch_size", None)
    return decided


def lora_parameters(model: nn.Module, rank: int) -> int:
    """Count the parameters of an adapter of this rank on every linear layer, an upper bound."""
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    return sum(rank * (module.in_features + module.out_features) for module in linear)


def build_trainer(run: RunConfig, args: Any, train_dataset: Any, **common: Any) -> Any:
    dataset, repeated = memory_plan.repeat_to_rollout(train_dataset, args.generation_batch_size // args.num_generations)
    if repeated:
        log.warning("%s", repeated)
    rewards, stops = read_rewards(run), run.cogumi.stop
    named_rewards.refuse_missing_columns(rewards, dataset.column_names)
    graded_texts: list[Any] = []  # of this process, as the first reward got them

    def remember_graded(columns: dict[str, Any]) -> dict[str, Any]:
        graded_texts[:] = columns.get("completions", [])
        return columns

    rewards = [with_columns(reward, remember_graded) if not i else reward for i, reward in enumerate(rewards)]
    rewards = graded_as_seen(run, rewards, common["processing_class"])
    if run.cogumi.thinking is not None:
        apply_thinking(run.cogumi.thinking, args, common["processing_class"])
    context, _ = rollout_context(common["model"].config, args)
    episodes = begin_episodes(run, common["processing_class"], context)
    keep_data_as_text(common["processing_class"])
    with engine_options(**engine_of(run)):
        trainer = make_trainer(episodes, rewards, args, train_dataset=dataset, **common)
    trainer.cogumi_run = True  # its messages name settings as the YAML does
    trainer.cogumi_graded = graded_texts
    sampling.check_sampler(trainer)
    if getattr(trainer, "vllm_generation", None) is not None:
        sampling.end_at_end_tokens(trainer)
    if stops:
        sampling.stop_rollouts_at(trainer, stops)
    if run.cogumi.fp32_lm_head:
        fp32_lm_head(trainer)
    if run.cogumi.behaviour_logps == "rollout":
        sampling.use_rollout_logps(trainer)
    if episodes is not None:
        episodes.attach(trainer)
    share_prefill_and_drop_finished(trainer)
    sampling.leave_out_unscored(trainer)
    watch(trainer, record=run.run_dir / RECORD).guard()
    return trainer


def read_rewards(run: RunConfig) -> list[Any]:
    """Return the reward functions of a run, with their arguments: none where only its environment has one.

    Raises UsageError for one that cannot be given what is visible.
    """
    task_of(run)
    settings = {key: run.setting(key) for key in named_rewards.RUN_SETTINGS}
    rewards = named_rewards.rewards_of(run.cogumi.rewards, settings) if run.cogumi.rewards else []
    for reward in rewards:
        if run.cogumi.thinking is not None and scores_visible(reward) and iscoroutinefunction(reward):
            message = f"{reward.__name__} is asynchronous, and with cogumi.thinking a reward is given the visible part"
            raise UsageError(message, key="cogumi.rewards", fix="write it as a plain function, or drop cogumi.thinking")
    return rewards


def try_rewards(run: RunConfig, prompts: Dataset) -> None:
    """Call each reward once, before a model is fetched or loaded. Raises UsageError where it cannot score this data."""
    rewards, group = read_rewards(run), run.setting("num_generations")
    named_rewards.refuse_missing_columns(rewards, prompts.column_names)
    check_prompts(rewards, prompts)
    names = {entry.name for entry in named_rewards.read_entries(run.cogumi.rewards)} if rewards else set()
    check_answers(names, prompts)
    if "unit_tests" in names:
        taken = prompts.select_columns(sorted({"tests", "entry_point"} & set(prompts.column_names)))
        for rows in taken.iter(ROWS_AT_ONCE):
            join_tests(rows["tests"], rows.get("entry_point"))
    for reward in rewards:
        for name in parameters_of(reward).keys() & prompts[0].get(RECORD_COLUMN, {}).keys() - set(prompts.column_names):
            log.warning("reward %s takes `%s`, a column that data.columns does not name", reward.__name__, name)
        thoughts = dict(zip(THOUGHT_COLUMNS, ([0] * group, [named_rewards.SAMPLE] * group), strict=True))
        taken = {key: thoughts[key] for key in thoughts.keys() & parameters_of(reward)}
        wrong = named_rewards.try_reward(reward, prompts[0], group, trainer_state=TrainerState(), **taken)
        refused, message = wrong or (False, "")
        if refused:
            raise UsageError(message, key="cogumi.rewards")
        if message:
            log.warning("cogumi.rewards: %s", message)


def graded_as_seen(run: RunConfig, rewards: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Wrap the rewards: they see completions up to a stop sequence and, with `cogumi.thinking`, the visible part.

    A reward that takes the thought is given it, and one that takes token ids alone is given all of them.
    """
    stops, flag = run.cogumi.stop, run.cogumi.thinking
    rewards = [sampling.strip_stops(reward, stops) if stops else reward for reward in rewards]
    if flag is None and not any(map(reads_thoughts, rewards)):
        return rewards
    style, prompt_opens_thought = "tags", False  # of text, which no template renders
    if flag is not None or tokenizer.chat_template is not None:
        template = read_template(tokenizer, flag)
        style, prompt_opens_thought = template.thinking.style, template.prompt_opens_thought
    for index, reward in enumerate(rewards):
        if reads_thoughts(reward):
            rewards[index] = with_thoughts(reward, tokenizer, style, prompt_opens_thought)
        elif flag is not None and scores_visible(reward):
            rewards[index] = on_visible(reward, tokenizer, style, prompt_opens_thought)
    return rewards


def scores_visible(reward: Any) -> bool:
    """Return whether a reward scores the visible text: it takes no thought, and no token ids without the text."""
    taken = parameters_of(reward)
    return not reads_thoughts(reward) and not ("completion_ids" in taken and "completions" not in taken)


def apply_thinking(flag: bool, args: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have rollouts rendered as `cogumi.thinking` says."""
    required, requested = read_template(tokenizer, flag).thinking.template_kwargs, args.chat_template_kwargs or {}
    for key in required.keys() & requested.keys():
        if required[key] != requested[key]:
            message = f"train.chat_template_kwargs.{key} is {requested[key]!r} and cogumi.thinking is {flag}"
            raise UsageError(message, fix="drop one")
    args.chat_template_kwargs = {**requested, **required}


# ----------------------------------------------------------------------------------------- the environment, and its tools


def task_of(run: RunConfig) -> Task:
    """Load the environment and tools of a run, often none. Raises UsageError as `load_task` does."""
    task = load_task(run.cogumi.environment, run.cogumi.tools)
    if not run.cogumi.rewards and not task.has_reward:
        fix = "name one in cogumi.rewards" + (", or give the environment get_reward()" if task.environment else "")
        raise UsageError("it is empty, and no environment has a reward", key="cogumi.rewards", fix=fix)
    if run.cogumi.episode_seconds is not None and not task:
        message = "it would be ignored: there is no environment and no tool"
        raise UsageError(message, key="cogumi.episode_seconds", fix="drop it")
    if run.cogumi.stop and task and not task.takes_turns:
        message = f"it contradicts {task.name or TOOLS}: a stop sequence would cut a call of a tool"
        raise UsageError(message, key="cogumi.stop", fix="drop it")
    return task


def try_task(run: RunConfig, prompts: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UsageError where the environment cannot begin on the first row, or the chat template cannot show its tools."""
    task = task_of(run)
    if task.schemas:
        refuse_without_tools(task, prompts, tokenizer)
    if task.environment is not None:
        try_environment(task, record_of(prompts[0]))


def refuse_without_tools(task: Task, prompts: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UsageError where prompts are text, or TRL 1.15 cannot render or read calls with this chat template."""
    from trl.chat_template_utils import add_response_schema, supports_tool_calling

    key = ENVIRONMENT if task.environment is not None else TOOLS
    if isinstance(prompts[0]["prompt"], str):
        fix = "give prompts that are lists of messages"
        raise UsageError("tools are called in conversations, and the prompts are text", key=key, fix=fix)
    fix = "take a model whose template has them, or save such a template as chat_template.jinja beside its tokenizer"
    if not tokenizer.chat_template or not supports_tool_calling(tokenizer):
        raise UsageError("this model's chat template has no tool calls", key=key, fix=fix)
    if getattr(tokenizer, "response_template", None) is None and getattr(tokenizer, "response_schema", None) is None:
        try:
            add_response_schema(copy.deepcopy(tokenizer))
        except ValueError as error:
            message = f"TRL cannot read tool calls in this model's chat template ({one_line(error)})"
            raise UsageError(message, key=key, fix=fix) from None


def record_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an environment's `reset` is given of a row: its record as the data file has it, and the prompt."""
    return {**row[RECORD_COLUMN], "prompt": row["prompt"]} if RECORD_COLUMN in row else dict(row)


def describe_sandbox(run: RunConfig, rewards: Sequence[Any]) -> str:
    """Describe the isolation of a model's programs if the environment's or a reward's module uses the sandbox; else "".

    The sandbox is started for it, and raises UsageError where it cannot be.
    """
    environment, sandbox_objects = task_of(run).environment, (Sandbox, default_sandbox, run_tests, unit_tests)
    functions = [*rewards, *([environment.reset] if environment is not None else [])]
    modules = [getattr(inspect.unwrap(function), "__globals__", {}) for function in functions]
    used = any(value in sandbox_objects for module in modules for value in module.values() if callable(value))
    return default_sandbox().describe() if used else ""


def begin_episodes(run: RunConfig, tokenizer: PreTrainedTokenizerBase, context: int | None) -> Episodes | None:
    """Follow the episodes of a run; None if it has no environment and no tools. context: of the model, in tokens."""
    task = task_of(run)
    if task.takes_turns:
        template = None if run.cogumi.thinking is None else read_template(tokenizer, run.cogumi.thinking)

        def visible(text: str) -> str:
            """Cut off the thought, if the run says which there is."""
            if template is None:
                return text
            return visible_text(text, template.thinking.style, template.prompt_opens_thought) or ""

        return Dialogue(task, run.cogumi.episode_seconds, record_of, visible, context)
    return Episodes(task, run.cogumi.episode_seconds, record_of) if task else None


def make_trainer(episodes: Episodes | None, rewards: list[Any], args: Any, **options: Any) -> Any:
    """Build a `trl.GRPOTrainer` with these rewards, followed by the environment's own at weight 1."""
    import trl  # looked up here: unsloth puts its own trainer on the module

    more = episodes.trainer_arguments() if episodes is not None else {}
    if isinstance(episodes, Dialogue) and episodes.task.has_reward:
        rewards = [*rewards, episodes.own_reward()]
        if args.reward_weights is not None:
            args.reward_weights = [*args.reward_weights, 1.0]
    if unknown := more.keys() - inspect.signature(trl.GRPOTrainer.__init__).parameters.keys():
        message = f"this GRPOTrainer takes no {', '.join(sorted(unknown))}"
        raise UsageError(message, key=ENVIRONMENT, fix="set cogumi.backend: trl")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using 'environment_factory'")
        return trl.GRPOTrainer(reward_funcs=rewards, args=args, **options, **more)
