"""Load, check and try the environment and the tools that a YAML names, before a model is loaded."""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import platformdirs

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError, ends_by_signal
from cogumi.core.run_directory import write_atomic
from cogumi.core.user_code import describe_error, load_object

SHIPPED = {
    "calculator": "cogumi.environments.examples:Calculator",
    "code_completion": "cogumi.environments.examples:CodeCompletion",
    "repository": "cogumi.environments.examples:Repository",
}
"""Names for a YAML, besides `file.py:Class` and `package.module:Class`."""
ENVIRONMENT, TOOLS = "cogumi.environment", "cogumi.tools"
SAMPLE = "The answer is 42."  # the policy's text in the trial
NO_TOOLS = ("reset", "respond", "get_reward")


@dataclass(frozen=True)
class Task:
    """The environment of a run, a class of which each episode gets an instance, and its tools, which are functions."""

    name: str = ""
    environment: Any = None
    tools: list[Callable[..., Any]] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of all tools, as the chat template shows them to the model."""

    @property
    def takes_turns(self) -> bool:
        return hasattr(self.environment, "respond")

    @property
    def has_reward(self) -> bool:
        return hasattr(self.environment, "get_reward")

    def __bool__(self) -> bool:
        return self.environment is not None or bool(self.tools)


def load_task(environment: str | None, tools: Sequence[str]) -> Task:
    """Load the environment and the tools. Raises UsageError for unknown names and for tools that no model could call."""
    functions = [load_object(name, TOOLS, inspect.isroutine, "function") for name in tools]
    names = [function.__name__ for function in functions]
    if duplicate := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise UsageError(f"two tools are called {duplicate!r}", key=TOOLS, fix="name each once")
    schemas = [schema_of(function, name, TOOLS) for function, name in zip(functions, tools, strict=True)]
    if environment is None:
        return Task("", None, functions, schemas)
    if ":" not in environment and environment not in SHIPPED:
        near = nearest(environment, SHIPPED)
        hint = f"did you mean {near!r}? " if near else ""
        fix = f"{hint}there are: {', '.join(SHIPPED)}, and your own as file.py:Class"
        raise UsageError(f"no environment {environment!r}", key=ENVIRONMENT, fix=fix)
    loaded = load_object(SHIPPED.get(environment, environment), ENVIRONMENT, inspect.isclass, "class")
    methods = tool_names(loaded)
    if not callable(getattr(loaded, "reset", None)):
        fix = "give it `def reset(self, **record)`, which gets a row of the data"
        raise UsageError(f"{environment} has no method reset", key=ENVIRONMENT, fix=fix)
    if hasattr(loaded, "respond") and (methods or tools):
        named = ", ".join((*methods, *tools))
        fix = "begin the names of its helpers with _, or leave out respond"
        raise UsageError(f"{environment} has `respond` and also tools ({named})", key=ENVIRONMENT, fix=fix)
    if not hasattr(loaded, "respond") and not methods and not tools:
        message = f"{environment} has neither `respond` nor a public method to be called as a tool"
        raise UsageError(message, key=ENVIRONMENT, fix="give it one of them")
    for name in ("reset", "respond"):
        if inspect.iscoroutinefunction(getattr(loaded, name, None)):
            fix = "write it as a plain function; tools and get_reward may be asynchronous"
            raise UsageError(f"{environment}: {name} is asynchronous", key=ENVIRONMENT, fix=fix)
    if duplicate := next((name for name in methods if name in names), None):
        message = f"{environment} and cogumi.tools both have a tool {duplicate!r}"
        raise UsageError(message, key=ENVIRONMENT, fix="rename the function, or the method")
    for name in methods:
        tool = inspect.getattr_static(loaded, name).__get__(object())  # without `self`
        schemas.append(schema_of(tool, f"{environment}.{name}", ENVIRONMENT))
    return Task(environment, loaded, functions, schemas)


def tool_names(environment: Any) -> list[str]:
    """Return the methods of an environment's class that TRL 1.15 lists as tools."""
    members = inspect.getmembers(environment, predicate=inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in NO_TOOLS]


def schema_of(tool: Any, name: str, key: str) -> dict[str, Any]:
    """Return a tool's JSON schema from its types and docstring. Raises UsageError if they are incomplete."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            message = f"{name} takes `{parameter}`, and a model gives arguments by their names"
            raise UsageError(message, key=key, fix="name each argument")
    try:
        return dict(get_json_schema(tool))
    except (DocstringParsingException, TypeHintParsingException, TypeError) as error:
        message = f"{name} cannot be shown to the model: {' '.join(str(error).split())}"
        fix = "give each argument a type, and a line under `Args:` in the docstring"
        raise UsageError(message, key=key, fix=fix) from None


def own_rows(task: Task) -> list[dict[str, Any]]:
    """Return the rows that the environment brings. Raises UsageError if it brings none."""
    rows = getattr(task.environment, "rows", None)
    try:
        rows = list((rows() if callable(rows) else rows) or [])
    except Exception as error:  # the user's own code, which may raise anything
        raise UsageError(f"{task.name}: {describe_error(error, 'rows')}", key=ENVIRONMENT) from error
    if invalid := [row for row in rows if not isinstance(row, dict)]:
        raise UsageError(f"{task.name}: a row is a dict, and `rows` has {invalid[0]!r:.60}", key=ENVIRONMENT)
    if not rows:
        message = f"`data.source` is missing, and {task.name or 'no environment'} brings no `rows`, or none in it"
        raise UsageError(message, key="data.source", fix="name a file of prompts, or give the class a list `rows`")
    try:
        return [json.loads(json.dumps(row)) for row in rows]
    except (TypeError, ValueError) as error:
        raise UsageError(f"{task.name}: `rows` holds what JSON does not: {error}", key=ENVIRONMENT) from None


def try_environment(task: Task, record: Mapping[str, Any]) -> None:
    """Start one episode on a row, take a turn if there are turns, and compute the reward.

    Raises UsageError for an error of the user's code, which would end the training in its first rollout. An asynchronous
    reward, such as a paid judge, is not called.
    """

    def attempt(stage: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
            if ends_by_signal(error):
                raise
            message = f"{task.name}: {describe_error(error, stage)} on a trial episode"
            raise UsageError(message, key=ENVIRONMENT) from error

    def check(stage: str, value: Any, kinds: Any, problem: str) -> None:
        if not isinstance(value, kinds):
            message = f"{task.name}: {stage} returned {type(value).__name__}, and {problem}"
            raise UsageError(message, key=ENVIRONMENT, fix="return that, or None")

    environment = attempt("__init__", task.environment)
    text = attempt("reset", lambda: environment.reset(**record))
    check("reset", text, str | list | None, "what it returns is added to the prompt as text")
    if task.takes_turns:
        check("respond", attempt("respond", lambda: environment.respond(SAMPLE)), str | None, "an answer is text")
    if task.has_reward and not inspect.iscoroutinefunction(environment.get_reward):
        check("get_reward", attempt("get_reward", environment.get_reward), Real | None, "a reward is a number")


def write_rows(rows: list[dict[str, Any]], name: str) -> Path:
    """Write an environment's rows to the user's cache; equal rows give the same file name."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    stem = f"{name.rpartition(':')[2] or name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    path = Path(platformdirs.user_cache_dir("cogumi")) / "environments" / f"{stem}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    return path
