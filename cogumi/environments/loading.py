"""From the names in a YAML to an environment's class and to tools. They are examined and tried before a model is loaded."""

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
    "calculator": "cogumi.environments.calculator:Calculator",
    "code_completion": "cogumi.environments.code_completion:CodeCompletion",
    "repository": "cogumi.environments.repository:Repository",
}
"""What a YAML may name, beside `file.py:Class` and `package.module:Class`."""
ENVIRONMENT, TOOLS = "cogumi.environment", "cogumi.tools"
SAMPLE = "The answer is 42."  # what a policy says in the trial
NO_TOOLS = ("reset", "respond", "get_reward")


@dataclass(frozen=True)
class Task:
    """What a run's policy acts in. environment: a class, of which each episode gets an instance. tools: functions."""

    name: str = ""
    environment: Any = None
    tools: list[Callable[..., Any]] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    """Of every tool, as the chat template shows it to the model."""

    @property
    def takes_turns(self) -> bool:
        return hasattr(self.environment, "respond")

    @property
    def pays(self) -> bool:
        """Whether the environment has a reward of its own."""
        return hasattr(self.environment, "get_reward")

    def __bool__(self) -> bool:
        return self.environment is not None or bool(self.tools)


def load_task(environment: str | None, tools: Sequence[str]) -> Task:
    """The environment and the tools of these names. Raises UsageError for what is none, or what no model could call."""
    functions = [load_object(name, TOOLS, inspect.isroutine, "function") for name in tools]
    names = [function.__name__ for function in functions]
    if twice := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise UsageError(f"two tools are called {twice!r}", key=TOOLS, fix="name each once")
    schemas = [schema_of(function, name, TOOLS) for function, name in zip(functions, tools, strict=True)]
    if environment is None:
        return Task("", None, functions, schemas)
    if ":" not in environment and environment not in SHIPPED:
        near = nearest(environment, SHIPPED)
        hint = f"did you mean {near!r}? " if near else ""
        fix = f"{hint}there are: {', '.join(SHIPPED)}, and your own as file.py:Class"
        raise UsageError(f"no environment {environment!r}", key=ENVIRONMENT, fix=fix)
    found = load_object(SHIPPED.get(environment, environment), ENVIRONMENT, inspect.isclass, "class")
    methods = tool_names(found)
    if not callable(getattr(found, "reset", None)):
        fix = "give it `def reset(self, **record)`, which gets a row of the data"
        raise UsageError(f"{environment} has no method reset", key=ENVIRONMENT, fix=fix)
    if hasattr(found, "respond") and (methods or tools):
        named = ", ".join((*methods, *tools))
        fix = "begin the names of its helpers with _, or leave out respond"
        raise UsageError(f"{environment} has `respond` and also tools ({named})", key=ENVIRONMENT, fix=fix)
    if not hasattr(found, "respond") and not methods and not tools:
        what = f"{environment} has neither `respond` nor a public method to be called as a tool"
        raise UsageError(what, key=ENVIRONMENT, fix="give it one of them")
    for name in ("reset", "respond"):
        if inspect.iscoroutinefunction(getattr(found, name, None)):
            fix = "write it as a plain function; tools and get_reward may be asynchronous"
            raise UsageError(f"{environment}: {name} is asynchronous", key=ENVIRONMENT, fix=fix)
    if twice := next((name for name in methods if name in [each.__name__ for each in functions]), None):
        fix = "rename the function, or the method"
        raise UsageError(f"{environment} and cogumi.tools both have a tool {twice!r}", key=ENVIRONMENT, fix=fix)
    of_class = [schema_of(getattr(found, name), f"{environment}.{name}", ENVIRONMENT, method=True) for name in methods]
    return Task(environment, found, functions, [*schemas, *of_class])


def tool_names(environment: Any) -> list[str]:
    """The methods of an environment's class that TRL 1.15 lists as tools."""
    members = inspect.getmembers(environment, predicate=inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in NO_TOOLS]


def schema_of(function: Any, name: str, key: str, method: bool = False) -> dict[str, Any]:
    """A tool's JSON schema, from its types and its docstring. Raises UsageError where those do not say enough."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    shown = function.__get__(object()) if method else function  # a bound method: without `self`
    for parameter in inspect.signature(shown).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            what = f"{name} takes `{parameter}`, and a model gives arguments by their names"
            raise UsageError(what, key=key, fix="name each argument")
    try:
        return dict(get_json_schema(shown))
    except (DocstringParsingException, TypeHintParsingException) as error:
        said = " ".join(str(error).split())
        fix = "give each argument a type, and a line under `Args:` in the docstring"
        raise UsageError(f"{name} cannot be shown to the model: {said}", key=key, fix=fix) from None


def own_rows(task: Task) -> list[dict[str, Any]]:
    """The data that the environment brings. Raises UsageError where it brings none."""
    rows = getattr(task.environment, "rows", None)
    try:
        rows = list((rows() if callable(rows) else rows) or [])
    except Exception as error:  # the user's own code, which may raise anything
        raise UsageError(f"{task.name}: {describe_error(error, 'rows')}", key=ENVIRONMENT) from error
    if odd := [row for row in rows if not isinstance(row, dict)]:
        raise UsageError(f"{task.name}: a row is a dict, and `rows` has {odd[0]!r:.60}", key=ENVIRONMENT)
    if not rows:
        what = f"`data.source` is missing, and {task.name or 'no environment'} brings no `rows`, or none in it"
        raise UsageError(what, key="data.source", fix="name a file of prompts, or give the class a list `rows`")
    try:
        return [json.loads(json.dumps(row)) for row in rows]
    except (TypeError, ValueError) as error:
        raise UsageError(f"{task.name}: `rows` holds what JSON does not: {error}", key=ENVIRONMENT) from None


def try_environment(task: Task, record: Mapping[str, Any]) -> None:
    """Begin one episode on a row, take a turn where turns are taken, and ask for the reward.

    Raises UsageError for what the user's code raises there. Without it the training would end in its first rollout.
    An asynchronous reward, such as a paid judge, is not asked.
    """

    def attempt(stage: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
            if ends_by_signal(error):
                raise
            said = f"{task.name}: {describe_error(error, stage)} on a trial episode"
            raise UsageError(said, key=ENVIRONMENT) from error

    def refuse(what: str) -> None:
        raise UsageError(f"{task.name}: {what}", key=ENVIRONMENT, fix="return that, or None")

    environment = attempt("__init__", task.environment)
    said = attempt("reset", lambda: environment.reset(**record))
    if not isinstance(said, str | list | None):
        refuse(f"reset returned {type(said).__name__}, and what it returns is added to the prompt as text")
    if task.takes_turns:
        answer = attempt("respond", lambda: environment.respond(SAMPLE))
        if not isinstance(answer, str | None):
            refuse(f"respond returned {type(answer).__name__}, and an answer is text")
    if task.pays and not inspect.iscoroutinefunction(environment.get_reward):
        reward = attempt("get_reward", environment.get_reward)
        if not isinstance(reward, Real | None):
            refuse(f"get_reward returned {type(reward).__name__}, and a reward is a number")


def write_rows(rows: list[dict[str, Any]], name: str) -> Path:
    """The rows that an environment brings as a file of the user's cache, of the same name for the same rows."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    stem = f"{name.rpartition(':')[2] or name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    path = Path(platformdirs.user_cache_dir("cogumi")) / "environments" / f"{stem}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    return path
