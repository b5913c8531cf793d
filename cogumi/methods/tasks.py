"""A run's environment and tools: what is refused of them before a model is fetched, and how a trainer gets them."""

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.data.chat_templates import read_template, visible_text
from cogumi.data.records import RECORD_COLUMN
from cogumi.environments.dialogue import Dialogue
from cogumi.environments.episodes import Episodes
from cogumi.environments.loading import ENVIRONMENT, TOOLS, Task, load_task, try_environment
from cogumi.rewards.unit_tests import run_tests, unit_tests
from cogumi.sandbox import Sandbox, default_sandbox


def task_of(run: RunConfig) -> Task:
    """What the policy of a run acts in, which is often nothing. Raises UsageError as `load_task` does."""
    task = load_task(run.cogumi.environment, run.cogumi.tools)
    if not run.cogumi.rewards and not task.pays:
        fix = "name one in cogumi.rewards" + (", or give the environment get_reward()" if task.environment else "")
        raise UsageError("it is empty, and no environment pays", key="cogumi.rewards", fix=fix)
    if run.cogumi.episode_seconds is not None and not task:
        what = "it would be ignored: there is no environment and no tool"
        raise UsageError(what, key="cogumi.episode_seconds", fix="drop it")
    if run.cogumi.stop and task and not task.takes_turns:
        what = f"it contradicts {task.name or TOOLS}: a stop sequence would cut a call of a tool"
        raise UsageError(what, key="cogumi.stop", fix="drop it")
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
            what = f"TRL cannot read tool calls in this model's chat template ({one_line(error)})"
            raise UsageError(what, key=key, fix=fix) from None


def record_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What an environment's `reset` is given of a row: its record as the data file has it, and the prompt."""
    return {**row[RECORD_COLUMN], "prompt": row["prompt"]} if RECORD_COLUMN in row else dict(row)


def describe_sandbox(run: RunConfig, rewards: Sequence[Any]) -> str:
    """What isolates the programs of a model, where the environment's or a reward's module uses the sandbox; else "".

    The sandbox is started for it, and raises UsageError where it cannot be.
    """
    environment, own = task_of(run).environment, (Sandbox, default_sandbox, run_tests, unit_tests)
    functions = [*rewards, *([environment.reset] if environment is not None else [])]
    modules = [getattr(inspect.unwrap(each), "__globals__", {}) for each in functions]
    used = any(value in own for module in modules for value in module.values() if callable(value))
    return default_sandbox().describe() if used else ""


def begin_episodes(run: RunConfig, tokenizer: PreTrainedTokenizerBase, context: int | None) -> Episodes | None:
    """What follows the episodes of a run; None where it has no environment and no tools. context: of the model, in tokens."""
    task = task_of(run)
    if task.takes_turns:
        visible = what_is_visible(run, tokenizer)
        return Dialogue(task, run.cogumi.episode_seconds, record_of, visible, context)
    return Episodes(task, run.cogumi.episode_seconds, record_of) if task else None


def what_is_visible(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Callable[[str], str]:
    """What of a message an environment is given: all of it, or what follows a thought where the run says which there is."""
    if run.cogumi.thinking is None:
        return lambda text: text
    template = read_template(tokenizer, run.cogumi.thinking)
    style, opened = template.thinking.style, template.prompt_opens_thought
    return lambda text: visible_text(text, style, opened) or ""


def make_trainer(episodes: Episodes | None, rewards: list[Any], args: Any, **given: Any) -> Any:
    """A `trl.GRPOTrainer` with these rewards, and with the environment's own behind them at weight 1."""
    import trl  # looked up here: unsloth puts its own trainer on the module

    more = episodes.trainer_arguments() if episodes is not None else {}
    if isinstance(episodes, Dialogue) and episodes.task.pays:
        rewards = [*rewards, episodes.own_reward()]
        if args.reward_weights is not None:
            args.reward_weights = [*args.reward_weights, 1.0]
    if unknown := more.keys() - inspect.signature(trl.GRPOTrainer.__init__).parameters.keys():
        what = f"this GRPOTrainer takes no {', '.join(sorted(unknown))}"
        raise UsageError(what, key=ENVIRONMENT, fix="set cogumi.backend: trl")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using 'environment_factory'")
        return trl.GRPOTrainer(reward_funcs=rewards, args=args, **given, **more)
