"""The shape in which a reward function gets completions: text, or chat messages where the prompts are messages.

TRL 1.15 gives a function what the data is: strings for prompts that are strings, and for conversations a list of messages
each, of which the last is the model's. A function annotated `completions: list[str]` is given the text of either, and one
annotated `completions: list[list[dict]]` messages of either. Without such an annotation it gets what TRL gives.
"""

import functools
import inspect
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from cogumi.rewards.fim import text_of

# As `str` shows them: list[str], typing.List[str], collections.abc.Sequence[str]; an annotation may be a string itself.
OF_TEXT = re.compile(r"(?:\w+\.)*(?:list|List|Sequence|Iterable)\[str\]")
OF_MESSAGES = re.compile(r"(?:\w+\.)*(?:list|List|Sequence|Iterable)\[(?:\w+\.)*(?:list|List|Sequence)\[.*\]\]")
SHAPED = ("prompts", "completions")
# What a wrong shape raises in a function that reads it.
OF_SHAPE = (TypeError, AttributeError, KeyError)
SAMPLE = "The answer is 42."


def as_annotated(reward: Any) -> Any:
    """A reward function that is given its prompts and completions in the shape that it is annotated with."""
    wanted = {name: shape for name in SHAPED if (shape := annotated_shape(reward, name)) is not None}
    if not wanted:
        return reward

    def shaped(given: Mapping[str, Any]) -> dict[str, Any]:
        return {**given, **{name: [wanted[name](each) for each in given[name]] for name in wanted if name in given}}

    if inspect.iscoroutinefunction(reward):

        @functools.wraps(reward)
        async def awaited(**columns: Any) -> Any:
            return await reward(**shaped(columns))

        return awaited

    @functools.wraps(reward)
    def scored(**columns: Any) -> Any:
        return reward(**shaped(columns))

    return scored


def annotated_shape(reward: Any, name: str) -> Callable[[Any], Any] | None:
    """What turns a prompt or completion into the shape of a parameter's annotation; None where that asks for neither."""
    annotation = getattr(reward, "__annotations__", {}).get(name)
    said = annotation if isinstance(annotation, str) else str(annotation)
    if OF_TEXT.fullmatch(said):
        return text_of
    role = "user" if name == "prompts" else "assistant"
    return functools.partial(messages_of, role=role) if OF_MESSAGES.fullmatch(said) else None


def messages_of(completion: Any, role: str) -> Any:
    """A completion as messages: text becomes one."""
    return [{"role": role, "content": completion}] if isinstance(completion, str) else completion


def what_is_wrong(reward: Any, row: Mapping[str, Any], group: int, **given: Any) -> tuple[bool, str] | None:
    """(whether it is the shape, one line) about a function that does not score completions of this data; None if it does.

    It is called once, for `group` completions of a made-up text, in the shape that TRL will give it. `row`: the first of
    the data. `given`: what TRL passes besides, such as `trainer_state`. An asynchronous one, such as a judge behind a paid
    API, is not called.
    """
    conversational = not isinstance(row["prompt"], str)
    error = raised_by(reward, row, group, conversational, given)
    if error is None:
        return None
    at = traceback.extract_tb(error.__traceback__)[-1]
    name = getattr(reward, "__name__", type(reward).__name__)
    said = f"reward {name} raised {type(error).__name__}: {error} ({at.filename}:{at.lineno}) on a trial completion"
    if not isinstance(error, OF_SHAPE) or raised_by(reward, row, group, not conversational, given) is not None:
        return False, f"{said}; a function that cannot score every text ends the training in its first rollout"
    if conversational:
        got = "messages, so each completion is a list such as [{'role': 'assistant', 'content': '...'}]"
        fix = "takes strings; annotate it `completions: list[str]` to be given the text, or read completion[-1]['content']"
    else:
        got = "text, so each completion is a string"
        fix = "takes messages; annotate it `completions: list[list[dict]]` to be given them, or read the string"
    return True, f"{said}: the prompts are {got}, and the function {fix}"


def raised_by(reward: Any, row: Mapping[str, Any], group: int, messages: bool, given: Mapping[str, Any]) -> Any:
    """What a reward function raises on made-up completions of one prompt; None where it scores them."""
    if inspect.iscoroutinefunction(reward):
        return None
    text = text_of(row["prompt"])
    prompt, completion = (
        (messages_of(row["prompt"], "user"), messages_of(SAMPLE, "assistant")) if messages else (text, SAMPLE)
    )
    columns = {name: [value] * group for name, value in row.items() if name not in ("prompt", "completion")}
    columns |= {"prompts": [prompt] * group, "completions": [completion] * group, "completion_ids": [[0]] * group}
    logs = dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)
    try:
        list(as_annotated(reward)(**columns, **logs, **given))
    except Exception as error:  # noqa: BLE001  the user's own code may raise anything; it is reported
        # What is in a file is wrapped by `cogumi.rewards.named`, which says where.
        return error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error
    return None
