"""What a run trains on and is evaluated on: from `data:` of its config, through the formats, to prepared examples."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.redact import redact_text
from cogumi.core.run_directory import DECISIONS, read_section, write_section
from cogumi.data.cache import SAMPLE_ROWS, Data, Prepared, Source, prepare
from cogumi.data.cache_files import tokenizer_identity
from cogumi.data.chat_templates import prints_date, read_template
from cogumi.data.encoding import FormatOptions
from cogumi.data.formats import (
    column_kinds,
    columns_for,
    holds_messages,
    layout_note,
    learned_parts,
    tokenize_for,
)
from cogumi.data.selection import Selection
from cogumi.data.source_files import Entry, entries_of
from cogumi.data.sources import batches, column_names
from cogumi.methods.gspo import prompt_ids, setting
from cogumi.methods.sft import MAX_LENGTH
from cogumi.rl.guards import POSITIONS, context_of

log = logging.getLogger("cogumi")
DATA = "data"  # of decisions.json: the key of its prepared data, what became of its rows, how long they are
BARS = 24  # of the histogram of lengths, at most


@dataclass(frozen=True)
class Examples:
    """What a run trains on, is evaluated on, and completes for samples.jsonl; the last two None without held-out rows.

    prompts: `prompt` (text, as the model sees it), `prompt_ids`, and what would be the answer. max_length: in tokens, None
    of prompts, which the trainer tokenizes.
    """

    train: Data
    held_out: Data | None
    prompts: Dataset | None
    key: str
    today: str | None
    sources: tuple[str, ...] = ()
    max_length: int | None = None

    def reports(self) -> list[str]:
        parts = [data for data in (self.train, self.held_out) if data is not None]
        dropped = [line for data in parts for line in data.examples_dropped()]
        return [*self.sources, *(data.report() for data in parts), *dropped]

    def record(self, run_dir: Path) -> None:
        """Keep what a run resumes with, the key and the date its chat template was told; the rest is for people."""
        found = {
            "key": self.key,
            "today": self.today,
            "max_length": self.max_length,
            "train": account_for(self.train),
            "held_out": None if self.held_out is None else account_for(self.held_out),
        }
        write_section(run_dir / DECISIONS, DATA, found)


def account_for(data: Data) -> dict[str, Any]:
    """What became of every row, as JSON. `lengths`: (first, last, examples) in tokens, [] of prompts."""
    return {
        "name": redact_text(data.name),
        "rows": data.total,
        "examples": len(data.dataset),
        "dropped": {reason: each.count for reason, each in data.dropped.items()},
        "truncated": data.truncated,
        "duplicated": data.duplicates,
        "tokens": data.lengths.tokens,
        "learned": data.learned,
        "lengths": data.lengths.buckets(BARS),
    }


def prepare_examples(
    run: RunConfig, tokenizer: PreTrainedTokenizerBase, of_base: PretrainedConfig | None = None
) -> Examples:
    """The examples of a run, prepared now or found in the cache. Raises UsageError as the formats and sources do.

    of_base: the model's config, by which gspo's prompts are held to the context; None holds them to nothing.
    """
    today = date_of(run, tokenizer)
    entries = entries_of(run.data)
    room = room_for_prompts(run, of_base)
    options = [options_of(run, entry, today, room) for entry in entries]
    sources = [source_of(entry, each, tokenizer) for entry, each in zip(entries, options, strict=True)]
    data = run.data
    selection = Selection(data.eval_rows, data.max_rows, data.fraction, data.deduplicate, data.fim.seed)
    parts = {"tokenizer": tokenizer_identity(tokenizer)}
    prepared = prepare(sources, selection, parts, bad_rows=data.bad_rows)
    notes = [note for each in options if (note := layout_note(each, tokenizer))]
    return Examples(
        prepared.train,
        prepared.held_out,
        held_out_prompts(run, prepared, options[0], tokenizer),
        prepared.key,
        today,
        (*prepared.sources, *notes),
        options[0].max_length,
    )


def date_of(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The date for chat templates that print one: today's, or the one on which the run began, None for other formats."""
    if run.data.format == "fim" or not prints_date(tokenizer):
        return None
    known: str | None = read_section(run.run_dir / DECISIONS, DATA).get("today")
    return known or date.today().isoformat()


def options_of(run: RunConfig, entry: Entry, today: str | None, room: int | None = None) -> FormatOptions:
    """room: tokens that a prompt of gspo may have (`room_for_prompts`)."""
    fim = run.data.fim
    if room is not None:
        fim = fim.model_copy(update={"max_length": min(fim.max_length, room)})
    return FormatOptions(
        method=run.cogumi.method,
        format=entry.format,
        columns=entry.columns,
        column=entry.column,
        learn=learned_parts(entry.format, run.train),
        max_length=room if run.cogumi.method == "gspo" else longest_example(run),
        overlong=run.data.overlong,
        truncation_mode=run.train.get("truncation_mode") or "keep_start",
        thinking=run.cogumi.thinking,
        today=today,
        fim=fim,
    )


def room_for_prompts(run: RunConfig, of_base: PretrainedConfig | None) -> int | None:
    """Tokens of the context that a completion leaves to gspo's prompts; None for other methods, or without a limit."""
    if run.cogumi.method != "gspo" or of_base is None:
        return None
    context, key = context_of(of_base), POSITIONS
    if run.train.get("use_vllm") and run.train.get("vllm_max_model_length") is not None:
        context, key = run.train["vllm_max_model_length"], "train.vllm_max_model_length"
    if context is None:
        return None
    completion = setting(run, "max_completion_length") or 0
    if completion >= context:
        reason = f"train.max_completion_length {completion} leaves no room for a prompt: {key} is {context}"
        raise UsageError(reason, fix="lower it")
    return int(context - completion)


def longest_example(run: RunConfig) -> int:
    """The budget of an example in tokens: `train.max_length`, or TRL's own; fill in the middle has one of its own."""
    if run.data.format == "fim":
        return run.data.fim.max_length
    return int(run.train.get("max_length") or MAX_LENGTH)


def describe_overlong(run: RunConfig, examples: Examples, of_base: PretrainedConfig) -> str:
    """What to say where examples are longer than what the model was made for; "" where none is."""
    positions, longest = context_of(of_base), examples.train.lengths.quantile(1.0)
    if positions is None or longest <= positions:
        return ""
    key = "data.fim.max_length" if run.data.format == "fim" else "train.max_length"
    return (
        f"the longest example has {longest:,} tokens; the model was made for {positions:,} (max_position_embeddings), and "
        f"positions beyond are new to it: {key}={positions} takes no longer ones"
    )


def source_of(entry: Entry, options: FormatOptions, tokenizer: PreTrainedTokenizerBase) -> Source:
    name, files = entry.located.name, entry.located.files
    names = column_names(files)  # whose errors name the file
    try:
        columns = columns_for(options, names)
    except UsageError as error:
        raise UsageError(f"{error}", place=name) from None
    frames = batches(files, list(dict.fromkeys(columns.values())))
    schema: Mapping[str, Any] = next((rows.schema for rows in frames if rows.height), {})
    return Source(
        name=name,
        files=files,
        columns=columns,
        tokenize=tokenize_for(options, tokenizer, {name: name for name in columns}, holds_messages(columns, schema)),
        identity=entry.located.identity,
        options=options.as_json(),
        weight=entry.weight,
        text_only=options.format == "fim",
        alike=column_kinds(options, columns),
    )


# ----------------------------------------------------------------------------------------------- prompts, and rows of ids


def held_out_prompts(
    run: RunConfig, prepared: Prepared, options: FormatOptions, tokenizer: PreTrainedTokenizerBase
) -> Dataset | None:
    """The first held-out rows as prompts, with what would be the answer, for samples.jsonl."""
    if prepared.held_out is None:
        return None
    dataset = prepared.held_out.dataset
    rows = dataset.select(range(min(SAMPLE_ROWS, len(dataset))))
    if run.cogumi.method == "dpo":
        texts = {
            side: [tokenizer.decode(ids, skip_special_tokens=side != "prompt") for ids in rows[f"{side}_ids"]]
            for side in ("prompt", "chosen", "rejected")
        }
        return Dataset.from_dict({**texts, "prompt_ids": list(rows["prompt_ids"])})
    if run.cogumi.method == "sft":
        held_out = prepared.sample_rows()
        columns = {name: name for name in held_out.columns}
        as_prompts = replace(options, method="gspo")
        tokenize = tokenize_for(as_prompts, tokenizer, columns, holds_messages(columns, held_out.schema))
        rows = Dataset(tokenize(held_out, 0).table)
    if not len(rows):
        return None
    prompts, plain = list(rows["prompt"]), isinstance(rows[0]["prompt"], str)
    if not plain:
        template = read_template(tokenizer, options.thinking, options.today)
        prompts = [template.prompt(prompt) for prompt in prompts]
    ids = tokenizer(prompts, add_special_tokens=plain)["input_ids"]
    return rows.remove_columns("prompt").add_column("prompt", prompts).add_column("prompt_ids", ids)


def first_tokens(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, rows: int) -> torch.Tensor:
    """Token ids of the first examples, prompt and answer, cut to the shortest: (rows, tokens)."""

    def ids_of(row: dict[str, Any]) -> list[int]:
        if "input_ids" in row:
            return list(row["input_ids"])
        if "prompt_ids" in row:
            return [*row["prompt_ids"], *row["chosen_ids"]]
        return prompt_ids(row["prompt"] + row["middle"] if "middle" in row else row["prompt"], tokenizer)

    ids = [ids_of(row) for row in dataset.select(range(min(rows, len(dataset))))]
    return torch.tensor([each[: min(map(len, ids))] for each in ids])
