"""Every format of `data.format` for every method: which columns it needs, and what makes its rows examples.

| method | fim | chat | prompt_completion | preference |
|---|---|---|---|---|
| sft | middle learned | every turn, the last, or all | completion learned, or all | |
| dpo | | | | prompt, chosen, rejected |
| gspo | prompt, prefix, suffix, middle | messages to the last question | prompt | |

For gspo the original record as `record`, every other column of it that `data.columns` names, and the gold answer as
`answer` go to the rewards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError
from cogumi.data.chat import (
    Conversation,
    Question,
    lacks_thought,
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
    keep_end,
    learn_completions,
    learn_spans,
    list_array,
    masked_chunk,
    shared_prefix,
    special_texts,
)
from cogumi.data.fim import fim_prompts_chunk, fim_sft_chunk, read_controls
from cogumi.data.records import RECORD_COLUMN, encode_record, record_columns
from cogumi.data.rows import BadRow, Chunk, Dropped, KindsDiffer, Tokenize, parse_rows, try_each

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
RESERVED = (
    RECORD_COLUMN,
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)
"""What rewards are given whatever the data has, so that no column of it can have the name."""


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
        if its_field in RESERVED:
            fix = f"give it another name; in the original row it is record[{column!r}]"
            raise UsageError(f"rewards are given `{its_field}` whatever the data has", key=key, fix=fix)
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
    wanted_fields = [*shape, *OPTIONAL.get(shape[0], ()), *tools, *rewarded_columns(options)]
    return {each: found[each] for each in dict.fromkeys(wanted_fields) if each in found}


def rewarded_columns(options: FormatOptions) -> dict[str, str]:
    """{name: column} of what goes to gspo's rewards under a name of its own: what `data.columns` names beside the fields."""
    return {name: column for name, column in options.columns.items() if name not in FIELDS[options.format]}


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
        controls = read_controls(tokenizer)
        if options.method == "gspo":
            return partial(fim_prompts_chunk, controls=controls, config=options.fim, rewarded=rewarded_columns(options))
        return partial(fim_sft_chunk, controls=controls, config=options.fim)
    make_chunk = {"sft": supervised_chunk, "dpo": preference_chunk, "gspo": prompts_chunk}[options.method]
    return partial(make_chunk, using=Rendering(options, tokenizer, special_texts(tokenizer)))


def layout_note(options: FormatOptions, tokenizer: Any) -> str:
    """What a report of the data should add: why a layout is not the one asked for; mostly nothing."""
    return read_controls(tokenizer).order_note(options.fim.spm_rate) if options.format == "fim" else ""


def are_text(kinds: Sequence[bool], rows: Sequence[int]) -> bool:
    """Whether rows are text, not messages. Raises KindsDiffer, a UsageError, where some are."""
    if any(kinds) and not all(kinds):
        raise KindsDiffer(rows[kinds.index(True)], rows[kinds.index(False)])
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
    thoughtless = rows_without_thought(dict(zip(at, made, strict=True)), kept) if using.options.thinking else set()
    return masked_chunk(examples, using.options, kept, texts, dropped, thoughtless)


def rows_without_thought(made: Mapping[int, Any], rows: Sequence[int]) -> set[int]:
    """Which of these rows are conversations whose last answer has no thought, or an empty one."""
    return {row for row in rows if isinstance(made[row], Conversation) and lacks_thought(made[row].messages)}


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
    """`prompt`, and for the rewards `answer` (null where a row has none), `record` and columns of it, where rows have theirs.

    Messages are what the chat template takes, with calls of tools, and GRPOTrainer renders them. A row's `tools` count in the
    length. Over the budget text loses its beginning or its row, as `data.overlong` says, and messages are dropped.
    """
    options = using.options
    dropped: dict[str, Dropped] = {}
    fields = rows.drop(RECORD_COLUMN, strict=False)
    chat = "prompt" not in fields.columns
    made, at = parse_rows(fields, first_row, read_question if chat else read_prompt, dropped, using.special)
    text = are_text([isinstance(each.prompt, str) for each in made], at)
    if made and not text and options.overlong == "truncate":
        what = "truncate cuts the beginning of text, and these prompts are messages"
        raise UsageError(what, key="data.overlong", fix="drop the key: conversations that are too long are left out")

    def render(each: Question) -> tuple[Question, str]:
        """(the question, as the model sees it)."""
        if isinstance(each.prompt, str):
            return each, each.prompt
        adapted = [adapt_thought(message, using.template.thinking) for message in each.prompt]
        tools = [*(each.tools or []), *options.tools]
        return replace(each, prompt=adapted), using.template.prompt(adapted, tools or None)

    usable, at = try_each(made, at, render, dropped, lambda each: each.prompt)
    truncated = 0
    if options.max_length is not None:
        ids = encode(using.tokenizer, [shown for _, shown in usable], special_tokens=text)
        fit = partial(fit_prompt, using=using)
        fitting, at = try_each(zip(usable, ids, strict=True), at, fit, dropped, lambda each: each[0][0].prompt)
        usable, truncated = [(each, "") for each, _ in fitting], sum(cut for _, cut in fitting)
    rewarded = rewarded_columns(options)
    prompts = [each.prompt if isinstance(each.prompt, str) else encode_record(each.prompt) for each, _ in usable]
    table = {"prompt": pa.array(prompts, pa.string())}
    encoded = [*rewarded, RECORD_COLUMN] if text else [*rewarded, RECORD_COLUMN, "prompt"]
    if "answer" not in rewarded and (chat or "completion" in fields.columns):
        table["answer"] = pa.array([encode_record(each.answer) for each, _ in usable], pa.string())
        encoded.append("answer")
    if RECORD_COLUMN in rows.columns:
        table |= record_columns(rows[RECORD_COLUMN].gather([row - first_row for row in at]).to_list(), rewarded)
    return Chunk(pa.table(table), dropped, truncated, encoded=tuple(encoded))


def fit_prompt(example: tuple[tuple[Question, str], Ids], using: Rendering) -> tuple[Question, bool]:
    """(the question, whether its beginning was cut away). Raises BadRow for one over the budget that is not to be cut."""
    (question, _), ids = example
    most = using.options.max_length
    if most is None or len(ids) <= most:
        return question, False
    if using.options.overlong == "drop" or not isinstance(question.prompt, str):
        raise BadRow(using.options.too_long)
    return replace(question, prompt=keep_end(using.tokenizer, question.prompt, most)), True
