"""Every format of `data.format` for every method: which columns it needs, and what makes its rows examples.

| method | fim | chat | prompt_completion | preference |
|---|---|---|---|---|
| sft | middle learned | every turn, the last, or all | completion learned, or all | |
| dpo | | | | prompt, chosen, rejected |
| gspo | prompt, prefix, suffix, middle | messages to the last question | prompt | |

For gspo every other column that `data.columns` names, and the gold answer as `answer`, go to the rewards.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError
from cogumi.data.chat import (
    Conversation,
    read_completion,
    read_conversation,
    read_pair,
    read_prompt,
    read_question,
)
from cogumi.data.chat_templates import adapt_thought
from cogumi.data.encoding import (
    FormatOptions,
    Ids,
    Rendering,
    encode,
    learn_completions,
    learn_spans,
    list_array,
    masked_chunk,
    shared_prefix,
    special_texts,
)
from cogumi.data.fim import fim_prompts_chunk, fim_sft_chunk, read_controls
from cogumi.data.rows import BadRow, Chunk, Dropped, Tokenize, parse_rows, rewarded_columns, try_each

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
PROMPT_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


def columns_for(options: FormatOptions, names: Sequence[str]) -> dict[str, str]:
    """{field: column} that this format needs of a source with these columns.

    Raises UsageError where the method does not train on the format, a named column is missing, or no shape is found.
    """
    method, format = options.method, options.format
    if format not in FORMATS[method]:
        what, fix = f"{format} is not for cogumi.method: {method}", f"one of {', '.join(FORMATS[method])}"
        raise UsageError(what, key="data.format", fix=fix)
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
    tools = () if format == "fim" else ("tools",)
    others = [each for each in options.columns if each not in FIELDS[format]]
    wanted_fields = [*shape, *OPTIONAL.get(shape[0], ()), *tools, *others]
    return {each: found[each] for each in dict.fromkeys(wanted_fields) if each in found}


def _near(name: str, names: Sequence[str]) -> str:
    near = nearest(name, names)
    return f"did you mean {near}?" if near else f"there is {', '.join(names) or 'none'}"


def learned_parts(format: str, train: Mapping[str, Any]) -> Literal["turns", "completion", "all"]:
    """What `train.completion_only_loss` and `train.assistant_only_loss` mean for a format.

    Neither: every turn of a conversation, the completion of a prompt. Both: the completion. Both false: everything.
    """
    completion, assistant = (train.get(f"{each}_only_loss") for each in ("completion", "assistant"))
    if format == "prompt_completion":
        return "all" if completion is False and not assistant else "turns" if assistant else "completion"
    if completion:
        return "completion"
    return "all" if completion is False and assistant is False else "turns"


def tokenize_for(options: FormatOptions, tokenizer: Any) -> Tokenize:
    """What makes examples of rows that have the fields of `columns_for`.

    Raises UsageError, now or for the first rows, for a tokenizer or chat template that cannot be used for it.
    """
    if tokenizer.eos_token is None:
        raise UsageError("the tokenizer has no end token, so a completion could not end", fix="set tokenizer.eos_token")
    if options.format == "fim":
        make = fim_prompts_chunk if options.method == "gspo" else fim_sft_chunk
        return partial(make, controls=read_controls(tokenizer), config=options.fim)
    make_chunk = {"sft": supervised_chunk, "dpo": preference_chunk, "gspo": prompts_chunk}[options.method]
    return partial(make_chunk, using=Rendering(options, tokenizer, special_texts(tokenizer)))


def layout_note(options: FormatOptions, tokenizer: Any) -> str:
    """What a report of the data should add: why a layout is not the one asked for; mostly nothing."""
    return read_controls(tokenizer).order_note(options.fim.spm_rate) if options.format == "fim" else ""


def are_text(kinds: Sequence[bool], rows: Sequence[int]) -> bool:
    """Whether rows are text, not messages. Raises UsageError where some are: those two are not tokenized alike."""
    if any(kinds) and not all(kinds):
        text, other = rows[kinds.index(True)], rows[kinds.index(False)]
        raise UsageError(f"row {text} is text and row {other} is messages", key="data.source", fix="write them alike")
    return all(kinds)


# ---------------------------------------------------------------------------------------------------------- supervised


def supervised_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """`input_ids` and `completion_mask` of conversations, or of prompts and completions."""
    dropped: dict[str, Dropped] = {}
    learn = using.options.learn
    make = read_completion if "prompt" in rows.columns else partial(read_conversation, learn=learn)
    made, at = parse_rows(rows, first_row, make, dropped, using.special)
    plain = are_text([isinstance(each, tuple) for each in made], at)
    by_turns = learn == "turns" and not plain

    def render(each: Conversation | tuple[str, str]) -> tuple[str, Any]:
        """(text, its prompt, or the spans of its turns)."""
        if isinstance(each, tuple):
            using.refuse_thinking()
            return each[0] + each[1] + using.tokenizer.eos_token, each[0]
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


# --------------------------------------------------------------------------------------------------------------- pairs


def preference_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """`prompt_ids`, `chosen_ids`, `rejected_ids`, as TRL's DPOTrainer tokenizes them (trl 1.15, dpo_trainer.py, tokenize_fn)."""
    dropped: dict[str, Dropped] = {}
    pairs, at = parse_rows(rows, first_row, read_pair, dropped, using.special)
    plain = are_text([isinstance(pair["prompt"], str) for pair in pairs], at)
    texts, at = try_each(pairs, at, partial(render_pair, using=using), dropped, lambda pair: tuple(pair.values()))
    ids = [encode(using.tokenizer, [each[side] for each in texts], plain) for side in range(3)]
    fit = partial(fit_pair, options=using.options)
    fitting, _ = try_each(zip(*ids, texts, strict=True), at, fit, dropped, lambda each: each[3][0])
    columns = {}
    for side, name in enumerate(("prompt_ids", "chosen_ids", "rejected_ids")):
        ids_of = [pair[side] for pair, _ in fitting]
        columns[name] = list_array(ids_of, map(len, ids_of), pa.int32())
    return Chunk(pa.table(columns), dropped, sum(cut for _, cut in fitting))


def render_pair(pair: dict[str, Any], using: Rendering) -> tuple[str, str, str]:
    """(prompt, prompt and chosen, prompt and rejected). Raises BadRow."""
    prompt, chosen, rejected, tools = pair.values()
    if isinstance(prompt, str):
        using.refuse_thinking()
        eos = using.tokenizer.eos_token
        return prompt, prompt + chosen + eos, prompt + rejected + eos
    template = using.template
    return (
        template.prompt(prompt, tools),
        template.whole(prompt + chosen, tools),
        template.whole(prompt + rejected, tools),
    )


def fit_pair(pair: tuple[Ids, Ids, Ids, Any], options: FormatOptions) -> tuple[tuple[Ids, Ids, Ids], bool]:
    """((prompt, chosen, rejected), whether something was cut) of the ids of a prompt and of both wholes.

    The prompt ends where its own tokens part from either whole's. Cut is what TRL's collator cuts at `max_length`, but from
    the start (keep_end), where it cuts unlike lengths of one prompt. Raises BadRow where nothing is left to compare.
    """
    prompt, chosen, rejected, _ = pair
    start = min(shared_prefix(prompt, chosen), shared_prefix(prompt, rejected))
    prompt, chosen, rejected = prompt[:start], chosen[start:], rejected[start:]
    most = options.max_length
    cut = most is not None and start + max(len(chosen), len(rejected)) > most
    if cut and options.overlong == "drop":
        raise BadRow(options.too_long)
    if most is not None and cut and options.truncation_mode == "keep_start":
        room = max(0, most - start)
        chosen, rejected = chosen[:room], rejected[:room]
        if np.array_equal(chosen, rejected):
            raise BadRow(f"with nothing to compare within {most} tokens")
    if not len(chosen) or not len(rejected):
        raise BadRow("with nothing to compare")
    return (prompt, chosen, rejected), cut


# ------------------------------------------------------------------------------------------------------------- prompts


def prompts_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """`prompt`, and for the rewards `answer` (null where a row has none) and the other columns.

    A prompt carries roles and contents only: GRPOTrainer renders it with its own tools. One over the budget is dropped.
    """
    options, columns = using.options, rows.columns
    dropped: dict[str, Dropped] = {}
    chat = "prompt" not in columns
    made, at = parse_rows(rows, first_row, read_question if chat else read_prompt, dropped, using.special)
    text = are_text([isinstance(prompt, str) for prompt, _ in made], at)

    def render(each: tuple[Any, str | None]) -> tuple[Any, str, str | None]:
        """(prompt, as the model sees it, answer)."""
        prompt, answer = each
        if text:
            return prompt, prompt, answer
        adapted = [adapt_thought(message, using.template.thinking) for message in prompt]
        if any("tool_calls" in message for message in adapted):
            raise BadRow("with tool calls in the prompt")
        prompt = [{"role": message["role"], "content": message["content"]} for message in adapted]
        return prompt, using.template.prompt(prompt), answer

    usable, at = try_each(made, at, render, dropped, lambda each: each[0])
    if (most := options.max_length) is not None:
        ids = encode(using.tokenizer, [shown for _, shown, _ in usable], special_tokens=text)

        def fit(each: tuple[tuple[Any, str, str | None], Ids]) -> tuple[Any, str, str | None]:
            if len(each[1]) > most:
                raise BadRow(options.too_long)
            return each[0]

        usable, at = try_each(zip(usable, ids, strict=True), at, fit, dropped, lambda each: each[0][0])
    others = [name for name in columns if name not in (*FIELDS["chat"], *FIELDS["prompt_completion"])]
    table = {"prompt": pa.array([each[0] for each in usable], pa.string() if text else PROMPT_MESSAGES)}
    if "answer" not in others and (chat or "completion" in columns):
        table["answer"] = pa.array([each[2] for each in usable], pa.string())
    table |= rewarded_columns(rows[[row - first_row for row in at]], others, at)
    return Chunk(pa.table(table), dropped)
