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
from dataclasses import asdict, dataclass, field
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
    Rendering,
    TokenBudget,
    encode,
    learn_completions,
    learn_spans,
    masked_chunk,
    special_texts,
)
from cogumi.data.fim import FimConfig, fim_prompts_chunk, fim_sft_chunk
from cogumi.data.fim_tokens import order_note, read_controls
from cogumi.data.preference import preference_chunk
from cogumi.data.rows import BadRow, Chunk, Dropped, Tokenize, count_dropped, parse_rows
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
PROMPT_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


@dataclass(frozen=True)
class FormatOptions:
    """All that shapes examples besides the rows and the tokenizer; `as_json` is for a cache key."""

    method: Literal["sft", "dpo", "gspo"]
    format: Literal["fim", "chat", "prompt_completion", "preference"]
    columns: Mapping[str, str] = field(default_factory=dict)
    """{field: column of the file}, where they are called otherwise."""
    column: str = "source"
    """fim: the column of code."""
    learn: Literal["turns", "completion", "all"] = "turns"
    """sft: every turn of the assistant (of a completion: its turns), the last turn or the completion, or everything."""
    max_length: int | None = None
    """In tokens; gspo: of a prompt, where its completion is to have room as well."""
    overlong: Literal["drop", "truncate"] = "drop"
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    thinking: bool | None = None
    today: str | None = None
    """The date (2025-12-31) that templates which print one are told; None is the clock's."""
    fim: FimConfig = field(default_factory=FimConfig)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"columns": dict(self.columns), "fim": self.fim.model_dump(mode="json")}

    @property
    def budget(self) -> TokenBudget:
        return TokenBudget(self.max_length, self.overlong, self.truncation_mode)


def columns_for(options: FormatOptions, names: Sequence[str]) -> dict[str, str]:
    """{field: column} that this format needs of a source with these columns.

    Raises UsageError where the method does not train on the format, a named column is missing, or no shape is found.
    """
    method, format = options.method, options.format
    if format not in FORMATS[method]:
        raise UsageError(
            f"{format} is not for cogumi.method: {method}",
            key="data.format",
            fix=f"one of {', '.join(FORMATS[method])}",
        )
    for its_field, column in options.columns.items():
        if column not in names:
            raise UsageError(f"no column {column!r}", key=f"data.columns.{its_field}", fix=_near(column, names))
        if its_field not in FIELDS[format] and method != "gspo":
            raise UsageError(
                f"data.columns.{its_field} is no field of data.format: {format}", fix=_near(its_field, FIELDS[format])
            )
    found = {each: each for each in FIELDS[format] if each in names} | dict(options.columns)
    if format == "fim" and options.column in names:
        found["source"] = options.column
    shapes = _shapes(options, names)
    shape = next((each for each in shapes if all(needed in found for needed in each)), None)
    if shape is None:
        wanted = options.column if format == "fim" else " or ".join(" and ".join(each) for each in shapes)
        how = "set data.column to one of them" if format == "fim" else "data.columns says which column is which"
        fix = f"the data has {', '.join(names) or 'none'}: {how}"
        raise UsageError(f"{format} needs the columns {wanted}", key="data.format", fix=fix)
    optional = {"instruction": ("input", "system"), "chosen": ("prompt",), "prompt": ("completion",)}.get(shape[0], ())
    others = [each for each in options.columns if each not in FIELDS[format]]
    wanted_fields = [*shape, *optional, *(("tools",) if format != "fim" else ()), *others]
    return {each: found[each] for each in dict.fromkeys(wanted_fields) if each in found}


def column_kinds(options: FormatOptions, columns: Mapping[str, str]) -> dict[str, Alike]:
    """Which of these columns ({field: column}) have to hold values of one kind, and how alike they have to be.

    What the rewards are given becomes an arrow column. Prompts are texts or messages, and so are completions.
    """
    kinds: dict[str, Alike] = {}
    if options.format == "fim":
        return kinds  # text, and nothing else is let in
    for name, column in columns.items():
        if name in ("prompt", "completion", "chosen", "rejected"):
            kinds[column] = "text or messages"
        elif name not in FIELDS[options.format]:
            kinds[column] = "throughout"
    return kinds


def _shapes(options: FormatOptions, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The fields that make an example, the first that are all there."""
    if options.format == "chat":
        named = [("messages",), ("conversations",), ("instruction", "output")]
        # A column that is named decides the shape, whatever else the file has.
        return sorted(named, key=lambda shape: not any(each in options.columns for each in shape))
    if options.format == "prompt_completion":
        return [("prompt",)] if options.method == "gspo" else [("prompt", "completion")]
    if options.format == "preference":
        return [("chosen", "rejected")]
    pieces = ("prefix", "suffix", "middle")
    code = options.column in names and not any(each in options.columns for each in pieces)
    return [("source",)] if code or not all(each in names or each in options.columns for each in pieces) else [pieces]


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
        raise UsageError(
            f"cogumi.thinking would be ignored: text in data.format: {options.format} is not "
            "rendered with a chat template",
            fix="drop it, or give messages",
        )
    using = Rendering(dict(columns), tokenizer, template, special_texts(tokenizer), options.budget, options.learn)
    make_chunk = {"sft": supervised_chunk, "dpo": preference_chunk, "gspo": prompts_chunk}[options.method]
    return partial(make_chunk, using=using)


def layout_note(options: FormatOptions, tokenizer: Any) -> str:
    """What a report of the data should add: why a layout is not the one asked for; mostly nothing."""
    return order_note(read_controls(tokenizer), options.fim.spm_rate) if options.format == "fim" else ""


def holds_messages(columns: Mapping[str, str], schema: Mapping[str, Any]) -> bool:
    """Whether a column of prompts or completions holds lists, hence messages."""
    kinds = [schema[columns[each]] for each in ("prompt", "completion", "chosen", "rejected") if each in columns]
    return any(isinstance(kind, pl.List) or kind == pl.Object for kind in kinds)  # Object: of nested JSON lines


def supervised_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """`input_ids` and `completion_mask` of conversations, or of prompts and completions."""
    dropped: dict[str, Dropped] = {}
    make = read_completion if "prompt" in using.columns else partial(read_conversation, learn=using.learn)
    made, at = parse_rows(rows, first_row, using.columns, make, dropped, using.special)
    plain = any(isinstance(each, tuple) for each in made)
    by_turns = using.learn == "turns" and not plain
    texts: list[str] = []
    learned_of: list[Any] = []  # of each text its prompt, or the spans of its turns
    kept: list[int] = []
    for each, row in zip(made, at, strict=True):
        try:
            if isinstance(each, tuple):
                prompt: Any = each[0]
                text = each[0] + each[1] + using.tokenizer.eos_token
            else:
                assert using.template is not None
                if by_turns:
                    text, prompt = using.template.turns(each)
                else:
                    asked = each.messages[: each.prompt_length]
                    prompt = "" if using.learn == "all" else using.template.prompt(asked, each.tools)
                    text = using.template.whole(each.messages, each.tools)
        except BadRow as error:
            count_dropped(
                dropped, error.reason, row, error.excerpt or (each if isinstance(each, tuple) else each.messages)
            )
            continue
        texts.append(text)
        learned_of.append(prompt)
        kept.append(row)
    if by_turns:
        examples = learn_spans(using.tokenizer, texts, learned_of)
    else:
        examples = learn_completions(using.tokenizer, learned_of, texts, plain, everything=using.learn == "all")
    return masked_chunk(examples, using.budget, kept, texts, dropped)


def read_conversation(row: dict[str, Any], learn: str = "turns") -> Conversation:
    """A chat row's conversation, with at least one answer in it; what comes after the last one is cut off, since nothing
    is learned from it (unless all is learned)."""
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
    asked = read_messages(prompt) if isinstance(prompt, list) else [{"role": "user", "content": read_text(prompt)}]
    if isinstance(completion, list):
        answered = read_messages(completion)
    else:
        answered = [{"role": "assistant", "content": read_text(completion)}]
    last_turn(answered, "assistant")
    refuse_empty_answers(answered)
    return Conversation(asked + answered, read_tools(row.get("tools")), len(asked))


def prompts_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """`prompt`, and for the rewards `answer` (the gold answer, null where a row has none) and the other columns.

    A prompt carries roles and contents only: GRPOTrainer renders it with its own tools. One over the budget is dropped.
    """
    columns, template, most = using.columns, using.template, using.budget.max_length
    dropped: dict[str, Dropped] = {}
    chat = "prompt" not in columns
    made, at = parse_rows(rows, first_row, columns, read_question if chat else read_prompt, dropped, using.special)
    text = not any(isinstance(each["prompt"], list) for each in made)
    usable: list[tuple[Any, str, str | None, int]] = []
    for each, row in zip(made, at, strict=True):
        prompt = shown = each["prompt"]
        try:
            if not text:
                assert template is not None
                prompt = strip_messages([adapt_thought(message, template.thinking) for message in prompt])
                shown = template.prompt(prompt)
        except BadRow as error:
            count_dropped(dropped, error.reason, row, error.excerpt or each["prompt"])
            continue
        usable.append((prompt, shown, each["answer"], row))
    if most is not None:
        _, lengths = encode(using.tokenizer, [shown for _, shown, _, _ in usable], special_tokens=text)
        for (prompt, _, _, row), length in zip(usable, lengths, strict=True):
            if length > most:
                count_dropped(dropped, using.budget.too_long, row, prompt)
        usable = [each for each, length in zip(usable, lengths, strict=True) if length <= most]
    others = [name for name in columns if name not in (*FIELDS["chat"], *FIELDS["prompt_completion"])]
    made_of = {"prompt": pa.array([each[0] for each in usable], pa.string() if text else PROMPT_MESSAGES)}
    if "answer" not in others and (chat or "completion" in columns):
        made_of["answer"] = pa.array([each[2] for each in usable], pa.string())
    for name in others:
        values = rows[columns[name]][[each[3] - first_row for each in usable]]
        made_of[name] = pa.array(values.to_list()) if values.dtype == pl.Object else values.to_arrow()
    return Chunk(pa.table(made_of), dropped)


def read_question(row: dict[str, Any]) -> dict[str, Any]:
    """{"prompt": messages up to the last turn of the user, "answer": what the assistant says after it}."""
    messages = row_messages(row)
    asked = last_turn(messages, "user") + 1
    answers = [each["content"] for each in messages[asked:] if each["role"] == "assistant"]
    return {"prompt": messages[:asked], "answer": strip_thought(answers[-1]) if answers else None}


def read_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """{"prompt": text or messages, "answer": the completion's text or its last message's}."""
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(completion, list):
        completion = read_messages(completion)[-1]["content"]
    answer = None if completion is None else strip_thought(read_text(completion))
    if isinstance(prompt, list):
        return {"prompt": read_messages(prompt), "answer": answer}
    if not read_text(prompt):
        raise BadRow("with an empty prompt")
    return {"prompt": read_text(prompt), "answer": answer}


def strip_messages(messages: list[Message]) -> list[Message]:
    """Roles and contents. Raises BadRow where a message has more that its template would show."""
    if any("tool_calls" in message for message in messages):
        raise BadRow("with tool calls in the prompt")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def strip_thought(answer: str) -> str:
    """The answer that is to be compared with the visible part of a completion."""
    return split_thought(answer)[1]
