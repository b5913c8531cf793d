"""Every format of `data.format` for every method: which columns it needs, and what makes its rows examples.

| method | fim | chat | prompt_completion | preference |
|---|---|---|---|---|
| sft | middle learned | every turn, the last, or all | completion learned, or all | |
| dpo | | | | prompt, chosen, rejected |
| gspo | prompt, prefix, suffix, middle | messages to the last question | prompt | |

For gspo every other column that `data.columns` names, and the gold answer as `answer`, go to the rewards.
"""

import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import polars as pl
import pyarrow as pa

from cogumi.core.errors import UsageError
from cogumi.data.chat import (
    Conversation,
    Message,
    alpaca_messages,
    last_turn,
    read_messages,
    read_text,
    read_tools,
    refuse_empty_answers,
)
from cogumi.data.chat_templates import adapt_thought, read_template, split_thought
from cogumi.data.encoding import (
    FormatOptions,
    Rendering,
    encode,
    learn_completions,
    learn_spans,
    masked_chunk,
    special_texts,
)
from cogumi.data.fim import fim_prompts_chunk, fim_sft_chunk
from cogumi.data.fim_tokens import order_note, read_controls
from cogumi.data.preference import preference_chunk
from cogumi.data.rows import BadRow, Chunk, Dropped, Tokenize, count_dropped, parse_rows, try_each
from cogumi.data.sources import Alike

FORMATS = {
    "sft": ("fim", "chat", "prompt_completion"),
    "dpo": ("preference",),
    "gspo": ("fim", "chat", "prompt_completion"),
}
FIELDS = {
    "fim": ("prefix", "suffix", "middle"),
    "chat": ("messages", "conversations", "instruction", "input", "output", "system", "tools"),
    "prompt_completion": ("prompt", "completion", "tools"),
    "preference": ("prompt", "chosen", "rejected", "tools"),
}
# The fields that make an example: the first of these that are all there.
SHAPES: dict[str, list[tuple[str, ...]]] = {
    "fim": [("source",), ("prefix", "suffix", "middle")],
    "chat": [("messages",), ("conversations",), ("instruction", "output")],
    "prompt_completion": [("prompt", "completion")],
    "preference": [("chosen", "rejected")],
}
OPTIONAL = {"instruction": ("input", "system"), "chosen": ("prompt",), "prompt": ("completion",)}
SIDES = ("prompt", "completion", "chosen", "rejected")
PROMPT_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


def columns_for(options: FormatOptions, names: Sequence[str]) -> dict[str, str]:
    """{field: column} that this format needs of a source with these columns.

    Raises UsageError where the method does not train on the format, a named column is missing, or no shape is found.
    """
    method, format = options.method, options.format
    if format not in FORMATS[method]:
        fix = f"one of {', '.join(FORMATS[method])}"
        raise UsageError(f"{format} is not for cogumi.method: {method}", key="data.format", fix=fix)
    for its_field, column in options.columns.items():
        key = f"data.columns.{its_field}"
        if column not in names:
            raise UsageError(f"no column {column!r}", key=key, fix=_near(column, names))
        if its_field not in FIELDS[format] and method != "gspo":
            raise UsageError(f"{key} is no field of data.format: {format}", fix=_near(its_field, FIELDS[format]))
    found = {each: each for each in FIELDS[format] if each in names} | dict(options.columns)
    if format == "fim" and options.column in names:
        found["source"] = options.column
    shapes = [("prompt",)] if format == "prompt_completion" and method == "gspo" else SHAPES[format]
    # A column that is named decides the shape, whatever else the file has.
    shapes = sorted(shapes, key=lambda shape: not any(each in options.columns for each in shape))
    shape = next((each for each in shapes if all(needed in found for needed in each)), None)
    if shape is None:
        wanted = options.column if format == "fim" else " or ".join(" and ".join(each) for each in shapes)
        how = "set data.column to one of them" if format == "fim" else "data.columns says which column is which"
        fix = f"the data has {', '.join(names) or 'none'}: {how}"
        raise UsageError(f"{format} needs the columns {wanted}", key="data.format", fix=fix)
    others = [each for each in options.columns if each not in FIELDS[format]]
    tools = () if format == "fim" else ("tools",)
    wanted_fields = [*shape, *OPTIONAL.get(shape[0], ()), *tools, *others]
    return {each: found[each] for each in dict.fromkeys(wanted_fields) if each in found}


def column_kinds(options: FormatOptions, columns: Mapping[str, str]) -> dict[str, Alike]:
    """Which of these columns ({field: column}) have to hold values of one kind, and how alike they have to be.

    What the rewards are given becomes an arrow column. Prompts are texts or messages, and so are completions.
    """
    kinds: dict[str, Alike] = {}
    if options.format != "fim":  # which is text, and nothing else is let in
        for name, column in columns.items():
            if name in SIDES:
                kinds[column] = "text or messages"
            elif name not in FIELDS[options.format]:
                kinds[column] = "throughout"
    return kinds


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(names) or 'none'}"


def learned_parts(format: str, train: Mapping[str, Any]) -> Literal["turns", "completion", "all"]:
    """What `train.completion_only_loss` and `train.assistant_only_loss` mean for a format.

    Neither: every turn of a conversation, the completion of a prompt. Both: the same as the completion alone, since
    what it answers with is the assistant's. Both false: everything.
    """
    completion, assistant = (train.get(f"{each}_only_loss") for each in ("completion", "assistant"))
    if format == "prompt_completion":
        return "all" if completion is False and not assistant else "turns" if assistant else "completion"
    if completion:
        return "completion"
    return "all" if completion is False and assistant is False else "turns"


def tokenize_for(
    options: FormatOptions, tokenizer: Any, columns: Mapping[str, str], has_messages: bool = True
) -> Tokenize:
    """What makes examples of rows that have these columns (see `columns_for`).

    `has_messages`: false where the columns hold text alone, so that no chat template is needed. Raises UsageError for a
    tokenizer that cannot be used for it.
    """
    if options.format == "fim":
        make = fim_prompts_chunk if options.method == "gspo" else fim_sft_chunk
        controls = read_controls(tokenizer)
        return partial(make, tokenizer=tokenizer, controls=controls, config=options.fim, columns=dict(columns))
    if tokenizer.eos_token is None:
        raise UsageError("the tokenizer has no end token, so a completion could not end", fix="set tokenizer.eos_token")
    template = None
    if options.format == "chat" or has_messages:
        template = read_template(tokenizer, options.thinking, options.today)
    elif options.thinking is not None and options.method != "gspo":
        reason = f"text in data.format: {options.format} is not rendered with a chat template"
        raise UsageError(f"cogumi.thinking would be ignored: {reason}", fix="drop it, or give messages")
    using = Rendering(options, dict(columns), tokenizer, template, special_texts(tokenizer))
    make_chunk = {"sft": supervised_chunk, "dpo": preference_chunk, "gspo": prompts_chunk}[options.method]
    return partial(make_chunk, using=using)


def layout_note(options: FormatOptions, tokenizer: Any) -> str:
    """What a report of the data should add: why a layout is not the one asked for; mostly nothing."""
    return order_note(read_controls(tokenizer), options.fim.spm_rate) if options.format == "fim" else ""


def holds_messages(columns: Mapping[str, str], schema: Mapping[str, Any]) -> bool:
    """Whether a column of prompts or completions holds lists, hence messages."""
    kinds = [schema[columns[each]] for each in SIDES if each in columns]
    return any(isinstance(kind, pl.List) or kind == pl.Object for kind in kinds)  # Object: of nested JSON lines


# ---------------------------------------------------------------------------------------------------------- supervised


def supervised_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """`input_ids` and `completion_mask` of conversations, or of prompts and completions."""
    dropped: dict[str, Dropped] = {}
    learn = using.options.learn
    make = read_completion if "prompt" in using.columns else partial(read_conversation, learn=learn)
    made, at = parse_rows(rows, first_row, using.columns, make, dropped, using.special)
    plain = any(isinstance(each, tuple) for each in made)
    by_turns = learn == "turns" and not plain

    def render(each: Conversation | tuple[str, str]) -> tuple[str, Any]:
        """(text, its prompt, or the spans of its turns)."""
        if isinstance(each, tuple):
            return each[0] + each[1] + using.tokenizer.eos_token, each[0]
        assert using.template is not None
        if by_turns:
            return using.template.turns(each)
        asked = each.messages[: each.prompt_length]
        prompt = "" if learn == "all" else using.template.prompt(asked, each.tools)
        return using.template.whole(each.messages, each.tools), prompt

    rendered, kept = try_each(made, at, render, dropped, lambda each: getattr(each, "messages", each))
    texts, learned = [text for text, _ in rendered], [prompt for _, prompt in rendered]
    if by_turns:
        examples = learn_spans(using.tokenizer, texts, learned)
    else:
        examples = learn_completions(using.tokenizer, learned, texts, plain, everything=learn == "all")
    return masked_chunk(examples, using.options, kept, texts, dropped)


def read_conversation(row: dict[str, Any], learn: str = "turns") -> Conversation:
    """A chat row's conversation, with at least one answer. Unless all is learned, it ends with the last answer."""
    messages = row_messages(row)
    last = last_turn(messages, "assistant")
    if learn != "all":
        messages = messages[: last + 1]
    prompt_length = last if learn == "completion" else 0
    if last == 0:
        raise BadRow("with nothing before the answer")
    refuse_empty_answers(messages, prompt_length)
    return Conversation(messages, read_tools(row.get("tools")), prompt_length)


def row_messages(row: dict[str, Any]) -> list[Message]:
    """The messages of a chat row of any shape."""
    for name in ("messages", "conversations"):
        if name in row:
            return read_messages(row[name])
    return alpaca_messages(row["instruction"], row.get("input"), row["output"], row.get("system"))


def read_completion(row: dict[str, Any]) -> Conversation | tuple[str, str]:
    """(prompt, completion) where both are text; else one conversation, the prompt's messages first."""
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, list) and not isinstance(completion, list):
        texts = read_text(prompt), read_text(completion)
        if not texts[1].strip():
            raise BadRow("with an empty answer")
        return texts
    asked, answered = (
        read_messages(side) if isinstance(side, list) else [{"role": role, "content": read_text(side)}]
        for side, role in ((prompt, "user"), (completion, "assistant"))
    )
    last_turn(answered, "assistant")
    refuse_empty_answers(answered)
    return Conversation(asked + answered, read_tools(row.get("tools")), len(asked))


# ------------------------------------------------------------------------------------------------------------- prompts


def prompts_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """`prompt`, and for the rewards `answer` (the gold answer, null where a row has none) and the other columns.

    A prompt carries roles and contents only: GRPOTrainer renders it with its own tools. One over the budget is dropped.
    """
    columns, options = using.columns, using.options
    dropped: dict[str, Dropped] = {}
    chat = "prompt" not in columns
    made, at = parse_rows(rows, first_row, columns, read_question if chat else read_prompt, dropped, using.special)
    text = not any(isinstance(prompt, list) for prompt, _ in made)

    def render(each: tuple[Any, str | None]) -> tuple[Any, str, str | None]:
        """(prompt, as the model sees it, answer)."""
        prompt, answer = each
        if text:
            return prompt, prompt, answer
        assert using.template is not None
        adapted = [adapt_thought(message, using.template.thinking) for message in prompt]
        if any("tool_calls" in message for message in adapted):
            raise BadRow("with tool calls in the prompt")
        prompt = [{"role": message["role"], "content": message["content"]} for message in adapted]
        return prompt, using.template.prompt(prompt), answer

    usable, at = try_each(made, at, render, dropped, lambda each: each[0])
    if options.max_length is not None:
        _, lengths = encode(using.tokenizer, [shown for _, shown, _ in usable], special_tokens=text)
        for (prompt, _, _), row, length in zip(usable, at, lengths, strict=True):
            if length > options.max_length:
                count_dropped(dropped, options.too_long, row, prompt)
        fits = lengths <= options.max_length
        usable = [each for each, fit in zip(usable, fits, strict=True) if fit]
        at = [row for row, fit in zip(at, fits, strict=True) if fit]
    others = [name for name in columns if name not in (*FIELDS["chat"], *FIELDS["prompt_completion"])]
    table = {"prompt": pa.array([each[0] for each in usable], pa.string() if text else PROMPT_MESSAGES)}
    if "answer" not in others and (chat or "completion" in columns):
        table["answer"] = pa.array([each[2] for each in usable], pa.string())
    for name in others:
        values = rows[columns[name]][[row - first_row for row in at]]
        table[name] = pa.array(values.to_list()) if values.dtype == pl.Object else values.to_arrow()
    return Chunk(pa.table(table), dropped)


def read_question(row: dict[str, Any]) -> tuple[list[Message], str | None]:
    """(messages up to the last turn of the user, what the assistant says after it)."""
    messages = row_messages(row)
    asked = last_turn(messages, "user") + 1
    answers = [each["content"] for each in messages[asked:] if each["role"] == "assistant"]
    return messages[:asked], split_thought(answers[-1])[1] if answers else None


def read_prompt(row: dict[str, Any]) -> tuple[str | list[Message], str | None]:
    """(text or messages, the completion's text or its last message's)."""
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(completion, list):
        completion = read_messages(completion)[-1]["content"]
    answer = None if completion is None else split_thought(read_text(completion))[1]
    if isinstance(prompt, list):
        return read_messages(prompt), answer
    if not read_text(prompt):
        raise BadRow("with an empty prompt")
    return read_text(prompt), answer
