"""Preference pairs for DPO: one prompt, a chosen and a rejected completion, as TRL's DPOTrainer tokenizes them.

(trl 1.15, dpo_trainer.py, tokenize_fn.) Text or messages; without a prompt, what chosen and rejected begin with alike is
the prompt. A pair whose two sides are, or become by truncation, the same says nothing and is dropped.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from cogumi.data.chat import Message, read_messages, read_text, read_tools, refuse_empty_answers
from cogumi.data.encoding import FormatOptions, Ids, Rendering, batches, encode, shared_prefixes
from cogumi.data.rows import BadRow, Chunk, Dropped, parse_rows, try_each

Side = str | list[Message]


def preference_chunk(rows: pl.DataFrame, first_row: int, using: Rendering) -> Chunk:
    """`prompt_ids`, `chosen_ids`, `rejected_ids`. The template may be None where no row holds messages."""
    dropped: dict[str, Dropped] = {}
    pairs, at = parse_rows(rows, first_row, using.columns, read_pair, dropped, using.special)
    plain = bool(pairs) and isinstance(pairs[0]["prompt"], str)
    texts, at = try_each(pairs, at, partial(render_pair, using=using), dropped, lambda pair: tuple(pair.values()))
    kept: list[tuple[Ids, Ids, Ids]] = []
    truncated = 0
    for start, end in batches([chosen for _, chosen, _ in texts]):
        ids = zip(tokenize_pairs(texts[start:end], using.tokenizer, plain), texts[start:end], strict=True)
        fitting, _ = try_each(
            ids, at[start:end], lambda pair: fit_budget(using.options, *pair[0]), dropped, lambda pair: pair[1][0]
        )
        kept += [sides for sides, _ in fitting]
        truncated += sum(cut for _, cut in fitting)
    columns = {
        name: pa.array([sides[at] for sides in kept], pa.list_(pa.int32()))
        for at, name in enumerate(("prompt_ids", "chosen_ids", "rejected_ids"))
    }
    return Chunk(pa.table(columns), dropped, truncated)


def read_pair(row: dict[str, Any]) -> dict[str, Any]:
    """{"prompt", "chosen", "rejected"}, all text or all messages, and "tools". Raises BadRow."""
    sides: dict[str, Side] = {side: text_or_messages(row[side]) for side in ("chosen", "rejected")}
    chosen, rejected = sides["chosen"], sides["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("whose chosen and rejected are of two kinds")
    if chosen == rejected:
        raise BadRow("whose chosen and rejected are the same")
    prompt: Side | None = text_or_messages(row["prompt"]) if row.get("prompt") is not None else None
    if isinstance(chosen, str) and isinstance(prompt, list):
        chosen, rejected = ([{"role": "assistant", "content": each}] for each in (chosen, rejected))
    elif isinstance(chosen, list) and isinstance(prompt, str):
        # Both sides often repeat the prompt; the text is then the first question of the conversation.
        opens = chosen[0]["role"] != "assistant"
        prompt = None if opens else [{"role": "user", "content": prompt}]
    if prompt is None:
        length = implicit_prompt(chosen, rejected)
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
    if not prompt:
        raise BadRow("without a prompt")
    for side in (chosen, rejected):
        if isinstance(side, str) and not side.strip():
            raise BadRow("with an empty answer")
        if not isinstance(side, str):
            if not side or side[-1]["role"] != "assistant":
                raise BadRow("with a side that does not end with the assistant")
            if any(message["role"] == "user" for message in side):  # its question would be learned with the answers
                raise BadRow("with a question inside a side")
            refuse_empty_answers(side)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": read_tools(row.get("tools"))}


def text_or_messages(value: Any) -> Side:
    return read_messages(value) if isinstance(value, list) else read_text(value)


def implicit_prompt(chosen: Side, rejected: Side) -> int:
    """The length of what both begin with: turns, or characters less a space before the first that differs.

    (trl 1.15, data_utils.py, extract_prompt.) Where one side is the beginning of the other, the prompt leaves it one turn.
    """
    shorter = min(len(chosen), len(rejected))
    length = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
    if isinstance(chosen, str):
        return length - 1 if length and chosen[length - 1] == " " else length
    while length and (length == shorter or chosen[length]["role"] != "assistant"):
        length -= 1
    return length


def render_pair(pair: dict[str, Any], using: Rendering) -> tuple[str, str, str]:
    """(prompt, prompt and chosen, prompt and rejected). Raises BadRow."""
    prompt, chosen, rejected, tools = (pair[key] for key in ("prompt", "chosen", "rejected", "tools"))
    if isinstance(prompt, str):
        eos = using.tokenizer.eos_token
        return prompt, prompt + chosen + eos, prompt + rejected + eos
    template = using.template
    assert template is not None
    asked = template.prompt(prompt, tools)
    return asked, template.whole(prompt + chosen, tools), template.whole(prompt + rejected, tools)


def tokenize_pairs(texts: list[tuple[str, str, str]], tokenizer: Any, plain: bool) -> Iterator[tuple[Ids, Ids, Ids]]:
    """(prompt, chosen, rejected) in ids: the prompt ends where its own tokens part from either whole's."""
    prompts, chosen, rejected = (encode(tokenizer, side, plain) for side in zip(*texts, strict=True))
    length = np.minimum(shared_prefixes(*prompts, *chosen), shared_prefixes(*prompts, *rejected))
    starts = [np.cumsum(lengths) - lengths for _, lengths in (prompts, chosen, rejected)]
    for at, n in enumerate(length):
        p, c, r = (start[at] for start in starts)
        yield (
            prompts[0][p : p + n],
            chosen[0][c + n : c + chosen[1][at]],
            rejected[0][r + n : r + rejected[1][at]],
        )


def fit_budget(options: FormatOptions, prompt: Ids, chosen: Ids, rejected: Ids) -> tuple[tuple[Ids, Ids, Ids], bool]:
    """((prompt, chosen, rejected), whether something was cut). Raises BadRow where nothing is left to compare.

    What is cut is what TRL's collator cuts at `max_length`. From the start (keep_end) it cuts unlike lengths of one
    prompt, so that is left to it.
    """
    longest, most = len(prompt) + max(len(chosen), len(rejected)), options.max_length
    cut = most is not None and longest > most
    if cut and options.overlong == "drop":
        raise BadRow(options.too_long)
    if most is not None and cut and options.truncation_mode == "keep_start":
        room = max(0, most - len(prompt))
        chosen, rejected = chosen[:room], rejected[:room]
        if np.array_equal(chosen, rejected):
            raise BadRow(f"with nothing to compare within {most} tokens")
    if not len(chosen) or not len(rejected):
        raise BadRow("with nothing to compare")
    return (prompt, chosen, rejected), cut
