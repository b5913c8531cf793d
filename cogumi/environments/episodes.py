"""Measure the episodes of each rollout: turns, tokens outside of the loss, and why an episode ends.

The budgets of an episode are `train.max_tool_calling_iterations` (turns of the environment), `train.max_completion_length`
(tokens of the transcript, the environment's included) and `cogumi.episode_seconds` (since the rollout began).
"""

import asyncio
import copy
import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cogumi.core.errors import ends_by_signal
from cogumi.core.user_code import describe_error
from cogumi.environments.loading import Task, tool_names
from cogumi.patches.trl_internals import GENERATE, logged_metrics, observe_rollouts, rollout_mode, wrap_method

PREFIX = "episodes/"
TURNS, TOKENS, SECONDS = "turns", "tokens", "seconds"  # budgets of an episode
OVER = "the seconds of this episode are over"  # the model reads it instead of a tool's result
Ids = Sequence[int]


class Episodes:
    """The episodes of one trainer. seconds: budget of an episode, or None. record_of: arguments of `reset` from a row."""

    def __init__(self, task: Task, seconds: float | None, record_of: Callable[[Mapping[str, Any]], dict[str, Any]]):
        self.task, self.budget, self.record_of = task, seconds, record_of
        self.began = 0.0
        self.inside = 0.0  # seconds of this rollout in the user's code
        self.turns: int | None = None

    def trainer_arguments(self) -> dict[str, Any]:
        """Return arguments of TRL's GRPOTrainer: tools and a factory of environments, all of them timed."""
        tools = [self.timed(tool, budget=True) for tool in self.task.tools]
        arguments: dict[str, Any] = {"tools": tools} if tools else {}
        if self.task.environment is not None:
            arguments["environment_factory"] = self.timed_class(self.task.environment)
        return arguments

    def attach(self, trainer: Any) -> None:
        """Log the counts of each rollout of a trainer."""
        self.trainer, self.turns = trainer, trainer.args.max_tool_calling_iterations
        observe_rollouts(trainer, self.measure_rollout)
        wrap_method(trainer, GENERATE, self.count_generated)

    def measure_rollout(self, make: Callable[[Any], Any], inputs: Any) -> Any:
        self.began, self.inside = time.monotonic(), 0.0
        batch = make(inputs)
        logged = logged_metrics(self.trainer, rollout_mode(self.trainer))
        logged[f"{PREFIX}environment_seconds"].append(self.inside)
        logged[f"{PREFIX}environment_share"].append(self.inside / max(time.monotonic() - self.began, 1e-9))
        return batch

    def count_generated(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        completion_ids, masks, completions = output[1:4]
        self.log(completion_ids, masks, list(map(self.reason_of, completion_ids, completions)))
        return output

    def reason_of(self, ids: Ids, completion: Any) -> str:
        """Return the budget that cut an episode with tools, or "" if it ended: an end token after a message without a call."""
        calls = sum(1 for message in completion if message.get("tool_calls"))
        if any(message["role"] == "tool" and OVER in str(message["content"]) for message in completion):
            return SECONDS
        if not completion or not completion[-1].get("tool_calls"):
            return "" if ids and ids[-1] in self.trainer.eos_token_ids else TOKENS
        return TURNS if self.turns is not None and calls > self.turns else TOKENS

    def log(self, completion_ids: Sequence[Ids], masks: Sequence[Ids] | None, reasons: Sequence[str]) -> None:
        """Log, over all processes, the shares of tokens outside of the loss and of episodes that each budget cut."""
        outside = sum(len(mask) - sum(mask) for mask in masks or ())
        counts = Counter(reasons)
        cut = [counts[budget] for budget in (TURNS, TOKENS, SECONDS)]
        figures = torch.tensor([[outside, sum(map(len, completion_ids)), len(reasons), *cut]], dtype=torch.float64)
        gathered = self.trainer.accelerator.gather(figures.to(self.trainer.accelerator.device)).sum(0).tolist()
        logged = logged_metrics(self.trainer, rollout_mode(self.trainer))
        logged[f"{PREFIX}masked_share"].append(gathered[0] / max(gathered[1], 1.0))
        logged[f"{PREFIX}without_end"].append(sum(gathered[3:]) / max(gathered[2], 1.0))
        for name, value in zip((TURNS, TOKENS, SECONDS), gathered[3:], strict=True):
            logged[f"{PREFIX}cut_by_{name}"].append(value / max(gathered[2], 1.0))

    # ------------------------------------------------------------------------------------------- the user's code

    @contextmanager
    def clock(self, name: str, tool: bool = False) -> Iterator[None]:
        """Count the seconds of the user's code. Its errors name file and line; a tool's error goes to the model."""
        before = time.monotonic()
        if tool and self.is_over():
            raise TimeoutError(f"{OVER} ({self.budget:g})")
        try:
            yield
        except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
            if ends_by_signal(error) or (tool and isinstance(error, Exception)):
                raise
            if tool:  # which TRL would not send to the model
                raise RuntimeError(f"the tool called exit ({error})") from error
            raise RuntimeError(f"cogumi.environment: {self.task.name}: {describe_error(error, name)}") from error
        finally:
            self.inside += time.monotonic() - before

    def is_over(self) -> bool:
        return self.budget is not None and time.monotonic() - self.began > self.budget

    def timed(self, function: Callable[..., Any], budget: bool = False) -> Callable[..., Any]:
        """Wrap a function or method to count its seconds."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self.clock(function.__name__, budget):
                    left = None if self.budget is None or not budget else self.began + self.budget - time.monotonic()
                    try:
                        return await asyncio.wait_for(function(*args, **kwargs), left)
                    except TimeoutError:
                        if budget and self.is_over():  # else it is the tool's own
                            raise TimeoutError(f"{OVER} ({self.budget:g})") from None
                        raise

            return awaited

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.clock(function.__name__, budget):
                return function(*args, **kwargs)

        return called

    def timed_class(self, environment: Any) -> Any:
        """Return a subclass of the same name whose methods are timed and whose `reset` gets the original record."""
        members: dict[str, Any] = {}
        for name in tool_names(environment):
            tool = self.timed(getattr(environment, name), budget=True)
            is_static = isinstance(inspect.getattr_static(environment, name), staticmethod)
            members[name] = staticmethod(tool) if is_static else tool
        if self.task.has_reward:
            members["get_reward"] = self.timed(environment.get_reward)
        if self.task.takes_turns:
            members["respond"] = self.timed(environment.respond)
        reset = self.timed(environment.reset)
        # A copy: `reset` may change its arguments, but not the data.
        members["reset"] = lambda instance, **row: reset(instance, **copy.deepcopy(self.record_of(row)))
        return type(environment.__name__, (environment,), members)
