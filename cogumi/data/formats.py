"""Formats of `data.format` for each method: the columns they need, and the examples made of their rows.

| method | fim | chat | prompt_completion | text | preference |
|---|---|---|---|---|---|
| sft | middle learned | every turn, the last, or all | completion learned, or all | all, in pieces | |
| dpo | | | | | prompt, chosen, rejected |
| gspo | prompt, prefix, suffix, middle | messages to the last question | prompt | | |

*The last turn, or a completion*, is what follows the tokens that prompt and whole share, as in TRL's SFTTrainer (trl 1.15,
sft_trainer.py, tokenize_fn). *Every turn* is the tokens of the spans of `ChatTemplate.turns`; a token that begins before a
span or ends behind it is learned.

For gspo the original record as `record`, every other column that `data.columns` names, and the gold answer as `answer` go
to the rewards.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError
from cogumi.data.chat import (
    Conversation,
    Message,
    Question,
    Side,
    is_missing_reasoning,
    read_completion,
    read_conversation,
    read_document,
    read_pair,
    read_prompt,
    read_question,
)
from cogumi.data.encoding import (
    ID_LISTS,
    MASK_LISTS,
    FormatOptions,
    Ids,
    batches,
    keep_end,
    refuse_slow,
    reset_backend,
    shared_prefix,
)
from cogumi.data.fim import detect_fim_tokens, fim_prompts_chunk, fim_sft_chunk, read_controls
from cogumi.data.literal import HIDDEN, HIDDEN_FIRST, OWN_FIRST, RESERVED, LiteralText, map_strings
from cogumi.data.rows import (
    MEDIA,
    RECORD_COLUMN,
    TABLE_PREFIX,
    BadRow,
    Chunk,
    Dropped,
    KindsDiffer,
    Tokenize,
    iter_strings,
    record_columns,
    row_dicts,
    try_each,
)
from cogumi.data.selection import Read, question_of
from cogumi.data.templates import ChatTemplate, Spans, read_template

Mask = npt.NDArray[np.int8]
FORMATS = {
    "sft": ("fim", "chat", "prompt_completion", "text"),
    "dpo": ("preference",),
    "gspo": ("fim", "chat", "prompt_completion"),
}
FIELDS = {
    "fim": ("prefix", "suffix", "middle"),
    "chat": ("messages", "conversations", "instruction", "input", "output", "system", "history", "tools", *MEDIA),
    "prompt_completion": ("prompt", "completion", "system", "tools", *MEDIA),
    "text": ("text",),
    "preference": ("prompt", "chosen", "rejected", "system", "tools", *MEDIA),
}
# The fields that make an example: the first of these that are all present.
SHAPES: dict[str, list[tuple[str, ...]]] = {
    "fim": [("source",), ("prefix", "suffix", "middle")],
    "chat": [("messages",), ("conversations",), ("instruction", "output")],
    "prompt_completion": [("prompt", "completion")],
    "text": [("text",)],
    "preference": [("chosen", "rejected")],
}
OPTIONAL = {
    "messages": ("system",),
    "conversations": ("system",),
    "instruction": ("input", "system", "history"),
    "chosen": ("prompt", "system"),
    "prompt": ("completion", "system"),
}
PROMPT_NAMES = ("question", "instruction", "query", "problem", "input")
REWARD_ARGUMENTS = (
    RECORD_COLUMN,
    *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"),
)
"""Arguments of every reward, which no column of the data can have as its name."""


def columns_for(options: FormatOptions, names: Sequence[str]) -> dict[str, str]:
    """Return {field: column} that this format needs of a source with the columns `names`.

    Raises UsageError if the method does not train on the format, a named column is missing, or no shape is complete.
    """
    method, format = options.method, options.format
    if format not in FORMATS[method]:
        message, fix = f"{format} is not for cogumi.method: {method}", f"one of {', '.join(FORMATS[method])}"
        raise UsageError(message, key="data.format", fix=fix)

    def suggest(name: str, known: Sequence[str]) -> str:
        near = nearest(name, known)
        return f"did you mean {near}?" if near else f"there is {', '.join(known) or 'none'}"

    for name, column in options.columns.items():
        key = f"data.columns.{name}"
        if column not in names:
            raise UsageError(f"no column {column!r}", key=key, fix=suggest(column, names))
        if name not in FIELDS[format] and method != "gspo":
            raise UsageError(f"{key} is no field of data.format: {format}", fix=suggest(name, FIELDS[format]))
        if name in REWARD_ARGUMENTS:
            fix = f"give it another name; in the original row it is record[{column!r}]"
            raise UsageError(f"rewards are given `{name}` whatever the data has", key=key, fix=fix)
    named = [column for name, column in options.columns.items() if name in FIELDS[format]]  # `input` as the instruction
    available = {name: name for name in FIELDS[format] if name in names and name not in named} | dict(options.columns)
    if format == "chat" and "functions" in names:  # OpenAI's name before `tools`
        available.setdefault("tools", "functions")
    if format == "fim" and options.column in names:
        available["source"] = options.column
    shapes = [("prompt",)] if format == "prompt_completion" and method == "gspo" else SHAPES[format]
    # A column that is named decides the shape, whatever else the file has.
    shapes = sorted(shapes, key=lambda shape: not any(name in options.columns for name in shape))
    shape = next((shape for shape in shapes if all(name in available for name in shape)), None)
    if shape is None:
        needed = options.column if format == "fim" else " or ".join(" and ".join(shape) for shape in shapes)
        how = "set data.column to one of them" if format == "fim" else "data.columns says which column is which"
        others = (other for other in FORMATS[method] for needs in SHAPES[other] if set(needs) <= set(names))
        if (other := next(others, "text")) != "text":  # of which a .txt file has the column
            how = f"data.format: {other} reads them"
        fix = f"the data has {', '.join(names) or 'none'}: {how}"
        raise UsageError(f"{format} needs the columns {needed}", key="data.format", fix=fix)
    prompt_name = next((name for name in PROMPT_NAMES if name in names), None)  # else a shared start is the prompt
    if prompt_name and format == "preference" and "prompt" not in available:
        fix = f"set data.columns.prompt: {prompt_name} (or rename that column if both answers repeat the prompt)"
        raise UsageError(f"{prompt_name!r} would be ignored, and there is no `prompt`", key="data.columns", fix=fix)
    beside = () if format in ("fim", "text") else ("tools", *MEDIA)
    used = [*shape, *OPTIONAL.get(shape[0], ()), *beside, *rewarded_columns(options)]
    for name in options.columns:
        if name not in used:
            parts = ", ".join(shape)
            raise UsageError(f"would be ignored: rows are made of {parts}", key=f"data.columns.{name}", fix="drop it")
    return {name: available[name] for name in dict.fromkeys(used) if name in available}


def rewarded_columns(options: FormatOptions) -> dict[str, str]:
    """Return {name: column} of `data.columns` beside the format's fields, which gspo's rewards get by name."""
    return {name: column for name, column in options.columns.items() if name not in FIELDS[options.format]}


def learned_parts(format: str, train: Mapping[str, Any]) -> Literal["turns", "completion", "all"]:
    """Resolve `train.completion_only_loss` and `train.assistant_only_loss` for a format.

    Neither: every turn of a conversation, the completion of a prompt. Both: the completion. Both false: everything.
    """
    completion, assistant = (train.get(f"{part}_only_loss") for part in ("completion", "assistant"))
    if format == "prompt_completion":
        return "all" if completion is False and not assistant else "turns" if assistant else "completion"
    if completion:
        return "completion"
    return "all" if completion is False and assistant is False else "turns"


def tokenize_for(options: FormatOptions, tokenizer: Any) -> Tokenize:
    """Return the function that makes examples of rows with the fields of `columns_for`.

    Raises UsageError, now or for the first rows, for a tokenizer or chat template that cannot be used for it.
    """
    if tokenizer.eos_token is None:
        raise UsageError("the tokenizer has no end token, so a completion could not end", fix="set tokenizer.eos_token")
    if options.format == "fim":
        of_code: dict[str, Any] = {"controls": read_controls(tokenizer), "config": options.fim}
        if options.method == "gspo":
            return partial(fim_prompts_chunk, rewarded=rewarded_columns(options), **of_code)
        return partial(fim_sft_chunk, **of_code)
    make_chunk = {
        "sft": text_chunk if options.format == "text" else supervised_chunk,
        "dpo": preference_chunk,
        "gspo": prompts_chunk,
    }[options.method]
    return partial(make_chunk, using=Rendering(options, tokenizer, LiteralText(tokenizer)))


def reader_for(options: FormatOptions, tokenizer: Any) -> Read | None:
    """Return the function that reads a row's question, and its example as the model sees it; None for fim."""
    format, using = options.format, Rendering(options, tokenizer, LiteralText(tokenizer))
    if format == "fim":
        return None

    def shown(side: Side) -> Any:
        return side if isinstance(side, str) else using.template.shown_parts(side)

    def read(row: dict[str, Any]) -> tuple[str, Any]:
        parsed = using.read(row)
        if isinstance(parsed, str):
            return question_of(parsed), parsed
        if isinstance(parsed, Conversation):
            return question_of(parsed.messages), [shown(parsed.messages), parsed.tools]
        if isinstance(parsed, tuple):
            return question_of(parsed[0]), "".join(parsed)
        if isinstance(parsed, dict):
            prompt, *sides, tools = parsed.values()
            # The shared beginning of two texts may end inside the first line of the answers.
            is_shared = isinstance(prompt, str) and row.get("prompt") is None
            question = (prompt.rpartition("\n")[0] or prompt) if is_shared else prompt
            return question_of(question), [*(shown(prompt + side) for side in sides), tools]
        rewarded = {name: value for name, value in row.items() if name not in FIELDS[format]}
        return question_of(parsed.prompt), [shown(parsed.prompt), parsed.answer, parsed.tools, rewarded]

    return read


def layout_note(options: FormatOptions, tokenizer: Any) -> str:
    """Explain why a layout is not the one asked for; empty if it is."""
    return read_controls(tokenizer).order_note(options.fim.spm_rate) if options.format == "fim" else ""


@dataclass(frozen=True)
class Rendering:
    """Options, tokenizer and chat template of rows that are conversations, prompts or pairs."""

    options: FormatOptions
    tokenizer: Any
    literal: LiteralText

    @cached_property
    def special(self) -> list[str]:
        """Texts that drop a row of text, and are kept as text in messages."""
        spellings = self.literal.spellings
        reserved = [chr(first + index) for first in (HIDDEN_FIRST, OWN_FIRST) for index in range(len(spellings))]
        return list(dict.fromkeys([*spellings, *reserved]))

    @cached_property
    def fim_tokens(self) -> list[str]:
        tokens = detect_fim_tokens(self.tokenizer)
        return tokens.texts() if tokens is not None else []

    @cached_property
    def read(self) -> Callable[[dict[str, Any]], Any]:
        """The function that reads a row as {field: value}."""
        format, repeats = self.options.format, self.options.repeats_prompt
        if self.options.method == "gspo":
            return read_question if format == "chat" else partial(read_prompt, repeats=repeats)
        readers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "chat": partial(read_conversation, learn=self.options.learn),
            "prompt_completion": partial(read_completion, repeats=repeats),
            "preference": partial(read_pair, repeats=repeats),
        }
        return readers.get(format, read_document)

    def parse(self, rows: pl.DataFrame, first_row: int, dropped: dict[str, Dropped]) -> tuple[list[Any], list[int]]:
        """Apply `read` to each row, and `keep_as_text` to the results: (results, their rows)."""
        indices = range(first_row, first_row + rows.height)
        parsed, at = try_each(row_dicts(rows), indices, self.read, dropped, lambda row: tuple(row.values()))
        texts = pl.Series(["\0".join(iter_strings(value)) for value in parsed], dtype=pl.String)
        has_special = texts.str.contains_any(self.special)

        def keep(index: int) -> Any:
            return self.keep_as_text(parsed[index]) if has_special[index] else parsed[index]

        def show(index: int) -> Any:
            return getattr(parsed[index], "messages", getattr(parsed[index], "prompt", parsed[index]))

        return try_each(range(len(parsed)), at, keep, dropped, show)

    def keep_as_text(self, row: Any) -> Any:
        """Hide control tokens that a row's messages spell; of plain text, tags alone are no control tokens.

        Raises BadRow for text with a control token, and for a prompt in a fill-in-the-middle layout.
        """
        texts = list(iter_strings(row))
        if self.fim_tokens and any(all(token in text for token in self.fim_tokens) for text in texts):
            pieces = "whose pieces data.format: fim takes as prefix, middle, suffix"
            raise BadRow(f"with a fill-in-the-middle prompt, {pieces}")
        prompt = row["prompt"] if isinstance(row, dict) else row.prompt if isinstance(row, Question) else row
        if isinstance(prompt, str | tuple):
            shown = self.literal.without_tags(*texts)
            for token in self.literal.controls:
                if any(token in text for text in shown):
                    raise BadRow(f"containing a special token ({token})")
            return row
        if any(RESERVED.search(text) for text in texts):
            raise BadRow("with characters of the last private-use plane, which stand for control tokens here")
        hide, tools = self.literal.hide_messages, partial(map_strings, change=self.literal.hide)
        if isinstance(row, Conversation):
            return replace(row, messages=hide(row.messages), tools=row.tools and tools(row.tools))
        if isinstance(row, Question):
            return replace(row, prompt=hide(prompt), tools=row.tools and tools(row.tools))
        return {key: value and (tools if key == "tools" else hide)(value) for key, value in row.items()}

    @cached_property
    def template(self) -> ChatTemplate:
        """Read for the first row that holds messages: text needs none."""
        template = read_template(self.tokenizer, self.options.thinking, self.options.today)
        if self.options.method == "gspo" and template.thinking.flag and template.thinking.style == "none":
            message = "true, and this template marks thoughts in its own way: rewards would score them as answers"
            fix = "drop the key, or take a model that thinks in <think> tags or in gpt-oss's channels"
            raise UsageError(message, key="cogumi.thinking", fix=fix)
        return template

    def refuse_thinking(self) -> None:
        """Raise UsageError for a flag that a row of text would ignore."""
        if self.options.thinking is not None:
            reason = f"text in data.format: {self.options.format} is not rendered with a chat template"
            raise UsageError(f"cogumi.thinking would be ignored: {reason}", fix="drop it, or give messages")


def are_text(kinds: Sequence[bool], rows: Sequence[int]) -> bool:
    """Tell whether rows are text, not messages. Raises KindsDiffer, a UsageError, if only some are."""
    if any(kinds) and not all(kinds):
        raise KindsDiffer(rows[kinds.index(True)], rows[kinds.index(False)])
    return all(kinds)


# ---------------------------------------------------------------------------------------------------------- supervised


def supervised_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """Make `input_ids` and `completion_mask` of conversations, or of prompts and completions."""
    dropped: dict[str, Dropped] = {}
    options, learn, tokenizer = using.options, using.options.learn, using.tokenizer
    parsed, at = using.parse(rows, first_row, dropped)
    plain = are_text([isinstance(row, tuple) for row in parsed], at)

    def render(row: Conversation | tuple[str, str]) -> list[tuple[str, Spans]]:
        """Return (text, its learned spans) of each example."""
        if isinstance(row, tuple):
            using.refuse_thinking()
            text = row[0] + row[1] + tokenizer.eos_token
            return [(text, [(len(row[0]), len(text))])]
        messages, first, start = join_prefill(row.messages, row.prompt_length if "prompt" in rows.columns else 0)
        first = first or row.prompt_length
        if learn == "all":
            text = using.template.whole(messages, row.tools)
            using.template.refuse_lost_words("", text, messages[first:])
            return [(text, [(0, len(text))])]
        examples = using.template.turns(Conversation(messages, row.tools, first))
        text, spans = examples[0]
        spans[:1] = [(skip_prefill(text, spans[0][0], start), spans[0][1])]
        return examples

    def show(row: Conversation | tuple[str, str]) -> Any:
        return using.literal.reveal(getattr(row, "messages", row))

    by_row, rows_at = try_each(parsed, at, render, dropped, show)
    rows_at = [row for row, of_row in zip(rows_at, by_row, strict=True) for _ in of_row]
    rendered, extra = list(chain.from_iterable(by_row)), sum(map(len, by_row)) - len(by_row)
    texts, spans = [text for text, _ in rendered], [spans for _, spans in rendered]
    if (learn != "turns" and all([end for _, end in spans] == [len(text)] for text, spans in rendered)) or plain:
        prompts = [text[: spans[0][0]] for text, spans in rendered]
        examples = learn_completions(using.literal, prompts, texts, plain, learn)
    else:
        examples = learn_spans(using.literal, texts, spans)
    conversations = dict(zip(at, parsed, strict=True))

    def fit(example: tuple[tuple[Ids, Mask], str]) -> tuple[Ids, Mask, bool]:
        (ids, mask), limit = example[0], options.max_length
        is_long = limit is not None and len(ids) > limit
        if is_long and options.overlong == "drop":
            raise BadRow(options.too_long)
        if limit is not None and is_long:
            end = slice(-limit, None) if options.truncation_mode == "keep_end" else slice(limit)
            ids, mask = ids[end], mask[end]
        if not mask.any():
            raise BadRow(f"with nothing to learn within {limit} tokens" if is_long else "with nothing to learn")
        return ids, mask, is_long

    pairs = zip(examples, texts, strict=True)
    fitting, example_rows = try_each(pairs, rows_at, fit, dropped, lambda example: using.literal.reveal(example[1]))
    table = {
        "input_ids": pa.array([ids for ids, _, _ in fitting], ID_LISTS),
        "completion_mask": pa.array([mask for _, mask, _ in fitting], MASK_LISTS),
    }
    truncated = sum(is_long for _, _, is_long in fitting)
    without = sum(is_missing_reasoning(conversations[row]) for row in example_rows) if options.thinking else 0
    return Chunk(pa.table(table), dropped, truncated, without, extra, text_rows=plain * len(fitting))


def join_prefill(messages: list[Message], first: int) -> tuple[list[Message], int, str]:
    """Join an answer, `messages[first]`, to its beginning if the prompt ends with that: (messages, first, the beginning)."""
    pair = messages[first - 1 : first + 1]
    if first < 2 or any(message["role"] != "assistant" for message in pair) or "tool_calls" in pair[0]:
        return messages, first, ""
    start = pair[0]["content"]
    joined = pair[0] | pair[1] | {"content": start + pair[1]["content"]}
    return [*messages[: first - 1], joined, *messages[first + 1 :]], first - 1, start


def skip_prefill(text: str, start: int, prefill: str) -> int:
    """Return where the prefill ends in a text from `start` on."""
    at = text.find(prefill.lstrip(), start)
    if at < 0:
        reason = "whose prompt ends with a part of the answer that the chat template rewrites"
        raise BadRow(f"{reason} (move it to the answer)")
    return at + len(prefill.lstrip())


def learn_spans(literal: LiteralText, texts: Sequence[str], spans: Sequence[Spans]) -> list[tuple[Ids, Mask]]:
    """Tokenize each text with its spans learned. Raises UsageError for a tokenizer without offsets."""
    tokenizer = literal.tokenizer
    refuse_slow(tokenizer)
    encode_batch = reset_backend(tokenizer).encode_batch
    encodings = chain.from_iterable(encode_batch(part, add_special_tokens=False) for part in batches(texts))

    def first_token(encoding: Any, character: int, length: int) -> int:
        """Return the first token of this character, or of the next one that has any (some tokenizers drop spaces)."""
        tokens = (encoding.char_to_token(index) for index in range(character, length))
        return next((int(token) for token in tokens if token is not None), len(encoding.ids))

    examples = []
    for encoding, text, text_spans in zip(encodings, texts, spans, strict=True):
        ids = encoding.ids
        if HIDDEN.search(text):
            text_spans = [(len(literal.restore(text[:a])), len(literal.restore(text[:b]))) for a, b in text_spans]
            text = literal.restore(text)
            encoding, ids = literal.encoding(text)
        mask = np.zeros(len(encoding.ids), np.int8)
        for start, end in text_spans:
            if start < end:
                # If several tokens hold one character, all of them are learned.
                last = encoding.char_to_token(end - 1)
                stop = max(first_token(encoding, end, len(text)), 0 if last is None else last + 1)
                mask[first_token(encoding, start, len(text)) : stop] = 1
        examples.append((np.array(ids, np.int32), mask))
    return examples


def learn_completions(
    literal: LiteralText, prompts: Sequence[str], wholes: Sequence[str], special_tokens: bool, learn: str
) -> list[tuple[Ids, Mask]]:
    """Tokenize each whole text; learned is all behind the tokens it shares with its prompt, or everything.

    special_tokens: the tokenizer adds its own (a beginning of sequence), which a chat template does by itself.
    """
    ids_of_whole = literal.encode(wholes, special_tokens)
    starts = [0] * len(ids_of_whole)
    if learn != "all":
        starts = list(map(shared_prefix, literal.encode(prompts, special_tokens), ids_of_whole))
    pairs = zip(ids_of_whole, starts, strict=True)
    return [(ids, (np.arange(len(ids)) >= start).astype(np.int8)) for ids, start in pairs]


def text_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """Make `input_ids` and `completion_mask` of documents and their end tokens: all of it is learned, in pieces.

    A piece that continues a document begins with the last token of the one before, as context: each token is predicted once.
    """
    dropped: dict[str, Dropped] = {}
    documents, _ = using.parse(rows, first_row, dropped)
    table: dict[str, list[Any]] = {"input_ids": [], "completion_mask": []}
    for ids in using.literal.encode([text + using.tokenizer.eos_token for text in documents], special_tokens=True):
        limit = max(2, using.options.max_length or len(ids))
        for start in range(0, max(1, len(ids) - 1), limit - 1):
            table["input_ids"].append(ids[start : start + limit])
            table["completion_mask"].append((np.arange(len(ids[start : start + limit])) >= (start > 0)).astype(np.int8))
    arrays = {
        name: pa.array(values, kind) for (name, values), kind in zip(table.items(), (ID_LISTS, MASK_LISTS), strict=True)
    }
    return Chunk(pa.table(arrays), dropped, extra_examples=len(table["input_ids"]) - len(documents))


# --------------------------------------------------------------------------------------------------------------- pairs


def preference_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """Make `prompt_ids`, `chosen_ids`, `rejected_ids`, as TRL's DPOTrainer (trl 1.15, dpo_trainer.py, tokenize_fn)."""
    dropped: dict[str, Dropped] = {}
    pairs, at = using.parse(rows, first_row, dropped)
    plain = are_text([isinstance(pair["prompt"], str) for pair in pairs], at)

    def render(pair: dict[str, Any]) -> tuple[str, str, str]:
        """Return (prompt, prompt and chosen, prompt and rejected)."""
        prompt, chosen, rejected, tools = pair.values()
        if isinstance(prompt, str):
            using.refuse_thinking()
            end = using.tokenizer.eos_token
            return prompt, prompt + chosen + end, prompt + rejected + end
        texts = []
        for side in (chosen, rejected):
            # The prompt that two conversations share may end with a turn of its own.
            messages, first, start = join_prefill(prompt + side, len(prompt) if "prompt" in rows.columns else 0)
            before, text = using.template.answered(messages, first or len(prompt), tools)
            texts += [text[: skip_prefill(text, len(before), start)] if start else before, text]
        return texts[0], texts[1], texts[3]

    texts, at = try_each(pairs, at, render, dropped, lambda pair: using.literal.reveal(tuple(pair.values())))
    ids = [using.literal.encode([text[side] for text in texts], plain) for side in range(3)]
    fit = partial(fit_pair, options=using.options)
    examples = zip(*ids, texts, strict=True)
    fitting, _ = try_each(examples, at, fit, dropped, lambda example: using.literal.reveal(example[3][0]))
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    table = {name: pa.array([pair[side] for pair, _ in fitting], ID_LISTS) for side, name in enumerate(names)}
    return Chunk(pa.table(table), dropped, sum(is_cut for _, is_cut in fitting), text_rows=plain * len(fitting))


def fit_pair(pair: tuple[Ids, Ids, Ids, Any], options: FormatOptions) -> tuple[tuple[Ids, Ids, Ids], bool]:
    """Return ((prompt, chosen, rejected), whether something was cut) of the ids of a prompt and of both wholes.

    The prompt ends where its tokens part from those of either whole. Sides are cut as TRL's collator cuts at `max_length`,
    but not from the start (keep_end): with sides of unequal length it would cut one prompt differently. Raises BadRow if
    nothing is left to compare.
    """
    prompt, chosen, rejected, _ = pair
    start = min(shared_prefix(prompt, chosen), shared_prefix(prompt, rejected))
    prompt, chosen, rejected = prompt[:start], chosen[start:], rejected[start:]
    if np.array_equal(chosen, rejected):  # a chat template may strip what sides differ by
        raise BadRow("whose chosen and rejected are the same")
    limit = options.max_length
    is_cut = limit is not None and start + max(len(chosen), len(rejected)) > limit
    if is_cut and options.overlong == "drop":
        raise BadRow(options.too_long)
    if limit is not None and is_cut and options.truncation_mode == "keep_start":
        room = max(0, limit - start)
        chosen, rejected = chosen[:room], rejected[:room]
        if np.array_equal(chosen, rejected):
            raise BadRow(f"with nothing to compare within {limit} tokens")
    if not len(chosen) or not len(rejected):
        raise BadRow("with nothing to compare")
    return (prompt, chosen, rejected), is_cut


# ------------------------------------------------------------------------------------------------------------- prompts


def prompts_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """Make `prompt` and the rewards' `answer` (null without one), `record` and named columns, where rows have them.

    Messages are what the chat template takes, with tool calls, and GRPOTrainer renders them, with the run's tools. Text over
    the budget loses its beginning or its row, as `data.overlong` says; messages are dropped.
    """
    options = using.options
    dropped: dict[str, Dropped] = {}
    fields = rows.drop(RECORD_COLUMN, strict=False)
    chat = "prompt" not in fields.columns
    parsed, at = using.parse(fields, first_row, dropped)
    text = are_text([isinstance(question.prompt, str) for question in parsed], at)
    if parsed and not text and options.overlong == "truncate":
        message = "truncate cuts the beginning of text, and these prompts are messages"
        raise UsageError(message, key="data.overlong", fix="drop the key: conversations that are too long are left out")

    def render(question: Question) -> tuple[Question, str]:
        """Return (the question, its prompt as the model sees it)."""
        if isinstance(question.prompt, str):
            return question, question.prompt
        adapted, tools = using.template.adapt(question.prompt), list(options.tools)
        row_tools, run_tools = (
            {tool.get("function", tool).get("name") for tool in some} for some in (question.tools or (), tools)
        )
        if not row_tools <= run_tools:
            raise BadRow("with `tools` that are not the run's (cogumi.tools), which alone a rollout is shown")
        # The trainer renders the messages, as `keep_data_as_text` has it do.
        return replace(question, prompt=using.literal.reveal(adapted)), using.template.prompt(adapted, tools or None)

    def fit(example: tuple[Question, Ids]) -> tuple[Question, bool]:
        """Return (the question, whether its beginning was cut away)."""
        question, ids = example
        if options.max_length is None or len(ids) <= options.max_length:
            return question, False
        if options.overlong == "drop" or not isinstance(question.prompt, str):
            raise BadRow(options.too_long)
        return replace(question, prompt=keep_end(using.tokenizer, question.prompt, options.max_length)), True

    rendered, at = try_each(parsed, at, render, dropped, lambda question: question.prompt)
    questions, truncated = [question for question, _ in rendered], 0
    if options.max_length is not None:
        ids = using.literal.encode([prompt for _, prompt in rendered], special_tokens=text)
        if text and any(prompt[-1] == using.tokenizer.eos_token_id for prompt in ids):
            message = "the tokenizer adds its end token to prompts of text, which a rollout would begin behind"
            raise UsageError(message, key="data.source", fix="write the prompts as lists of messages")
        pairs = zip(questions, ids, strict=True)
        fitting, at = try_each(pairs, at, fit, dropped, lambda example: example[0].prompt)
        questions, truncated = [question for question, _ in fitting], sum(is_cut for _, is_cut in fitting)
    rewarded = rewarded_columns(options)
    prompts = [question.prompt if text else json.dumps(question.prompt) for question in questions]
    table = {"prompt": pa.array(prompts, pa.string())}
    encoded = [*rewarded, RECORD_COLUMN, *([] if text else ["prompt"])]
    answers = pa.array([json.dumps(question.answer) for question in questions], pa.string())
    if "answer" not in rewarded and (chat or "completion" in fields.columns):
        table["answer"] = answers
        encoded.append("answer")
    if RECORD_COLUMN in rows.columns:
        table |= record_columns(rows[RECORD_COLUMN].gather([row - first_row for row in at]).to_list(), rewarded)
        if "answer" in rewarded:  # a row without it may have the answer as a turn or a completion
            is_null = pc.is_in(table["answer"], pa.array(["null", f"{TABLE_PREFIX}null"]))
            table["answer"] = pc.if_else(is_null, answers, table["answer"])
    return Chunk(pa.table(table), dropped, truncated, encoded=tuple(encoded), text_rows=text * len(questions))
