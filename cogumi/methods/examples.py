"""Examples to train on and to evaluate: from `data:` of a config, through the formats, to prepared rows."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from cogumi.config.binding import defaults_in_source
from cogumi.config.schema import DataSection, MixEntry, RunConfig, package_of
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_share
from cogumi.core.redact import redact_text
from cogumi.core.run_directory import DECISIONS, read_section, write_section
from cogumi.data.cache import EXTRA_EXAMPLES, Data, Source, prepare, tokenizer_identity
from cogumi.data.chat import LEARN_KEYS, unused_keys
from cogumi.data.encoding import FormatOptions
from cogumi.data.formats import columns_for, layout_note, learned_parts, reader_for, tokenize_for
from cogumi.data.literal import LiteralText
from cogumi.data.rows import RECORD_COLUMN, cells_of, decode_rows
from cogumi.data.selection import Selection
from cogumi.data.source_files import describe_left_out, is_hub_id, locate
from cogumi.data.sources import batches, column_names, rows_below
from cogumi.data.templates import ends_of_turn, prints_date, read_template
from cogumi.environments.loading import own_rows, write_rows
from cogumi.methods.gspo import prompt_ids, task_of
from cogumi.rewards.task_packages import ANSWER_RULE, task_rows
from cogumi.rl.guards import POSITIONS, context_of

log = logging.getLogger("cogumi")
CHANGED = "changed_since_start"  # of the section below: the held-out rows are others than when the run began
DATA = "data"  # of decisions.json: the key of its prepared data, what became of its rows, how long they are
BARS = 24  # of the histogram of lengths, at most
SAMPLE_ROWS = 32  # held-out examples that are prompts for samples.jsonl, at most
SIDES = ("chosen", "rejected")
CHATS = ("messages", "conversations")
MESSAGE_FIELDS = (*CHATS, "prompt", "completion", *SIDES)
LEFT_OUT = dict.fromkeys((*LEARN_KEYS, "kto_tag"), ("false", "0", "0.0")) | {"label": ("false",)}
"""Cells that say that a row's answer is not to be learned; kto_tag and label are those of KTO (LLaMA-Factory, TRL)."""
TRUTHS = {"true", "false", "none", "", "0", "1", "0.0", "1.0"}
LOOKED_AT = 1000  # first rows of a source whose messages are looked at for unused keys


@dataclass(frozen=True)
class Examples:
    """Data to train on, to evaluate, and to complete for samples.jsonl; the last two None without held-out rows.

    prompts: `prompt` (text, as the model sees it), `prompt_ids`, what would be the answer, and its `answer_ids` with the
    end token where it is learned (sft, dpo). max_length: in tokens, None
    of prompts, which the trainer tokenizes.
    """

    train: Data
    held_out: Data | None
    prompts: Dataset | None
    key: str
    split: str
    today: str | None
    sources: tuple[str, ...] = ()
    max_length: int | None = None
    unused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Columns, and keys of messages (`messages[].images`), that nothing is made of, by source."""

    def parts(self) -> list[Data]:
        return [self.train] if self.held_out is None else [self.train, self.held_out]

    def reports(self) -> list[str]:
        dropped = [line for data in self.parts() for line in data.examples_dropped()]
        return [*self.sources, *describe_unused(self.unused), *(data.report() for data in self.parts()), *dropped]

    def record(self, run_dir: Path) -> None:
        """Keep what a run resumes with, the key and the date its chat template was told; the rest is for people.

        `lengths`: (first, last, examples) in tokens, [] of prompts.
        """
        before = read_section(run_dir / DECISIONS, DATA)
        is_changed = bool(before) and before.get("split") != self.split
        if is_changed:
            log.warning("the held-out rows may be others than when the run began, which may have trained on some of them: the "
                        "data or the version of cogumi changed. For a comparable eval_loss begin a new run")  # fmt: skip
        section = {name: getattr(self, name) for name in ("key", "split", "today", "max_length")} | {"held_out": None}
        if is_changed or before.get(CHANGED):
            section[CHANGED] = True
        accounts = [asdict(account_for(data)) | {"lengths": data.lengths.buckets(BARS)} for data in self.parts()]
        write_section(run_dir / DECISIONS, DATA, section | dict(zip(("train", "held_out"), accounts, strict=False)))


def describe_unused(columns: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{source}: columns that are not used: {', '.join(names)}" for source, names in columns.items()]


@dataclass(frozen=True)
class Shares:
    """Numbers of chosen rows that became examples, were dropped or cut. Tokens are those of the examples."""

    name: str
    rows: int
    examples: int
    dropped: dict[str, int]
    truncated: int
    duplicated: int
    tokens: int
    learned: int
    sharing: int = 0
    extra_examples: int = 0

    def __str__(self) -> str:
        examples = self.rows + self.extra_examples  # which may be dropped one by one
        of_rows = {**self.dropped, "truncated": self.truncated, "equal to an earlier row": self.duplicated}
        left_out = ", ".join(f"{format_share(count, examples)} {reason}" for reason, count in of_rows.items())
        learned = f"; {self.learned / self.tokens:.1%} of {self.tokens:,} tokens are learned" if self.learned else ""
        sharing = f"; {self.sharing:,} rows share their question with another row" if self.sharing else ""
        extra = f"; {self.extra_examples:,} {EXTRA_EXAMPLES}" if self.extra_examples else ""
        return f"{self.name}: {self.rows:,} rows, {self.examples:,} examples; {left_out}{learned}{sharing}{extra}"


def account_for(data: Data) -> Shares:
    dropped = {reason: drop.count for reason, drop in data.dropped.items()}
    counts = (data.truncated, data.duplicates, data.lengths.tokens, data.learned, data.sharing, data.extra_examples)
    return Shares(redact_text(data.name), data.total, len(data.dataset), dropped, *counts)


def prepare_examples(
    run: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    base_config: PretrainedConfig | None = None,
    prompt_rows: int = SAMPLE_ROWS,
) -> Examples:
    """Prepare the examples of a run, or find them in the cache. Raises UsageError as the formats and sources do.

    base_config: the model's config, by which gspo's prompts are held to the context; None holds them to nothing.
    prompt_rows: held-out examples that become `prompts`, at most.
    """
    sources = sources_of(run, tokenizer, base_config)
    data, options = run.data, sources[0][1]
    selection = Selection(data.eval_rows, data.max_rows, data.fraction, data.deduplicate, data.fim.seed)
    parts = {"tokenizer": tokenizer_identity(tokenizer)}
    prepared = prepare([source for source, _ in sources], selection, parts, bad_rows=data.bad_rows)
    if base_config is not None:
        refuse_other_end(run, tokenizer, base_config, prepared.train)
    notes = [line for source, _ in sources for line in source.notes]
    notes += [note for _, options_of_source in sources if (note := layout_note(options_of_source, tokenizer))]
    if prepared.train.text_rows and tokenizer.chat_template:
        log.warning("data.format: %s has text, which is learned without this model's chat template; as conversations: give "
                    "lists of messages, [{\"role\": \"user\", \"content\": ...}]", data.format)  # fmt: skip
    return Examples(
        prepared.train,
        prepared.held_out,
        held_out_prompts(prepared.held_out.dataset, options, tokenizer, prompt_rows) if prepared.held_out else None,
        prepared.key,
        prepared.split,
        options.today,
        (*prepared.sources, *notes),
        options.max_length,
        {source.name: source.unused for source, _ in sources if source.unused},
    )


def sources_of(
    run: RunConfig, tokenizer: PreTrainedTokenizerBase, base_config: PretrainedConfig | None
) -> list[tuple[Source, FormatOptions]]:
    """List the sources of a run with the format of their rows. base_config: see `prepare_examples`."""
    today = None
    if run.data.format != "fim" and prints_date(tokenizer):  # today, or the day on which the run began
        today = read_section(run.run_dir / DECISIONS, DATA).get("today") or date.today().isoformat()
    room, fim = room_for_prompts(run, base_config), run.data.fim
    if room is not None:
        fim = fim.model_copy(update={"max_length": min(fim.max_length, room)})
    entries: list[MixEntry | DataSection] = list(run.data.mix) or [run.data]
    trained = len(entries)
    if run.data.eval_source is not None:
        no_hub = dict.fromkeys(("revision", "split", "subset"))
        entries.append(run.data.model_copy(update={"source": run.data.eval_source, "mix": [], **no_hub}))
    sources = []
    for number, item in enumerate(entries):
        is_eval, format = number == trained, item.format or run.data.format
        task, source = None if item.source else task_of(run), item.source or ""
        package, name = package_of(source), source
        if is_eval and (package or Path(source).is_dir() or (is_hub_id(source) and not Path(source).exists())):
            raise UsageError(f"{source} is no file", key="data.eval_source", fix="name the file, or a pattern")
        if task or package:
            name = f"cogumi.environment {task.name}" if task else source
            source = str(write_rows(own_rows(task) if task else task_rows(source, item.options), name))
        found, files, identity = locate(source, revision=item.revision, split=item.split, subset=item.subset)
        name = name if task or package else found
        options = FormatOptions(
            method=run.cogumi.method,
            format=format,
            columns=run.data.columns if item.columns is None else item.columns,
            column=item.column or run.data.column,
            learn=learned_parts(format, run.train),
            max_length=room if run.cogumi.method == "gspo" else longest_example(run),
            overlong=run.data.overlong,
            truncation_mode=run.train.get("truncation_mode") or "keep_start",
            thinking=run.cogumi.thinking,
            today=today,
            tools=task_of(run).schemas if run.cogumi.method == "gspo" else (),
            fim=fim,
        )
        names = column_names(files)  # whose errors name the file
        is_asked = run.cogumi.method == "gspo" and format != "fim"
        if is_asked and "answer" in set(names).difference(options.columns.values()):
            options = replace(options, columns={"answer": "answer", **options.columns})
        try:
            columns = columns_for(options, names)
        except UsageError as error:
            if key := rows_below(files[0]):
                message = f"one object, whose rows are below {key!r}"
                raise UsageError(message, place=name, fix=f"write that list alone (jq .{key} FILE)") from None
            raise UsageError(f"{error}", place=name) from None
        notes = [f"{name}: {ANSWER_RULE}"] if package == "reasoning_gym" else describe_left_out(source, files)
        if repeats_prompt(files, columns):
            options = replace(options, repeats_prompt=True)
            notes.append(f"{name}: answers begin with their prompts, which are learned once")
        entry = Source(
            name=name,
            files=files,
            columns=columns,
            tokenize=tokenize_for(options, tokenizer),
            identity=identity,
            options=options.as_json(),
            weight=0.0 if is_eval else getattr(item, "weight", 1.0),
            keeps_records=run.cogumi.method == "gspo",
            read=reader_for(options, tokenizer),
            notes=notes,
        )
        # The samples have columns for every method; rewards get all columns.
        unused = [] if package or source.startswith("cogumi:") else unused_parts(entry, names, tokenizer)
        sources.append((replace(entry, unused=[] if run.cogumi.method == "gspo" else unused), options))
    return sources


def repeats_prompt(files: Sequence[Path], columns: Mapping[str, str]) -> bool:
    """Tell whether all answers of text in the first rows begin with their whole prompt, where that has three words or more.

    Where only some do, or nothing follows, they are answers: a sentence that is to be corrected may be right.
    """
    fields = {name: columns[name] for name in ("prompt", "completion", *SIDES) if name in columns}
    names, pairs = list(dict.fromkeys(fields.values())), []
    for rows in islice(batches(files, names), int("prompt" in fields and len(fields) > 1)):
        texts = zip(*(rows[name].head(LOOKED_AT).to_list() for name in fields.values()), strict=True)
        pairs = [row for row in texts if all(isinstance(text, str) for text in row) and len(row[0].split()) > 2]
    return bool(pairs) and all(text.startswith(prompt) and text != prompt for prompt, *sides in pairs for text in sides)


def unused_parts(source: Source, names: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List the columns of a source, and the keys of the messages in its first rows, of which nothing is made.

    Raises UsageError if one of the columns says that answers are bad.
    """
    unused = [name for name in names if name not in source.columns.values()]
    has_answers = "answer" not in source.columns and {"output", "completion", *CHATS} & source.columns.keys()
    for name in sorted(LEFT_OUT.keys() & unused) if has_answers else ():
        frames = batches(source.files, [name], optional=[name])
        cells = ({str(cell).lower() for cell in rows[name] if not isinstance(cell, dict)} for rows in frames)
        marks = {*chain.from_iterable(takewhile(TRUTHS.issuperset, cells))}.intersection(LEFT_OUT[name])
        if marks:
            message = f"answers whose column {name!r} is {min(marks)} are bad ones (KTO) or left out, and would be used"
            fix = "leave these rows out, pair good and bad ones as chosen and rejected, or give the column another name"
            raise UsageError(message, place=source.name, fix=fix)
    parts = [name or "(unnamed)" for name in unused]
    fields = [name for name in MESSAGE_FIELDS if name in source.columns]
    for rows in islice(source.batches(), bool(fields)):
        for name in fields:
            keys = unused_keys(cells_of(rows[name].head(LOOKED_AT)))
            if "name" in keys and read_template(tokenizer).shows_names:
                keys.remove("name")
            parts += [f"{source.columns[name]}[].{key}" for key in sorted(keys)]
    return parts


def refuse_other_end(
    run: RunConfig, tokenizer: PreTrainedTokenizerBase, base_config: PretrainedConfig, data: Data
) -> None:
    """Raise UsageError where the chat template ends answers with no token at which generation stops."""
    formats = ({entry.format or run.data.format for entry in run.data.mix} or {run.data.format}) - {"fim", "text"}
    if not tokenizer.chat_template or not formats or (data.text_rows and "chat" not in formats):
        return  # text, which is not rendered with the template
    ends, name = ends_of_turn(tokenizer), str(base_config.name_or_path)
    if not ends and run.cogumi.method != "gspo":
        message = "the chat template ends an answer with no token: the trained model would not stop"
        fix = f"name a copy that writes {tokenizer.eos_token} behind each answer"
        raise UsageError(message, key="train.chat_template_path", fix=fix)
    try:
        generation = GenerationConfig.from_pretrained(name, revision=run.model.revision or "main")
    except (OSError, ValueError):
        generation = GenerationConfig.from_model_config(base_config)
    known = generation.eos_token_id
    stops = known if isinstance(known, list) else [] if known is None else [known]
    stopping = [tokenizer.eos_token, *map(str, tokenizer.convert_ids_to_tokens(stops))]
    if ends and not set(ends).intersection(stopping):
        others = f"{', '.join(dict.fromkeys(stopping))} (of the tokenizer and generation_config.json)"
        message = f"the chat template ends an answer with {ends[0]}, and generation stops at {others}"
        fix = f"set train.eos_token: '{ends[0]}'"
        raise UsageError(f"{message}: the trained model would not stop", key="train.eos_token", fix=fix)


def room_for_prompts(run: RunConfig, base_config: PretrainedConfig | None) -> int | None:
    """Tokens of the context that a completion leaves to gspo's prompts; None for other methods, or without a limit."""
    if run.cogumi.method != "gspo" or base_config is None:
        return None
    context, key = context_of(base_config), POSITIONS
    if run.train.get("use_vllm") and run.train.get("vllm_max_model_length") is not None:
        context, key = run.train["vllm_max_model_length"], "train.vllm_max_model_length"
    completion = run.setting("max_completion_length") or 0
    if context is not None and completion >= context:
        reason = f"train.max_completion_length {completion} leaves no room for a prompt: {key} is {context}"
        raise UsageError(reason, fix="lower the first" + ("" if key == POSITIONS else ", or raise the second"))
    return None if context is None else int(context - completion)


def longest_example(run: RunConfig) -> int:
    """Return the budget of an example in tokens: `data.fim.max_length`, else `train.max_length` or TRL's default."""
    if run.data.format == "fim":
        return run.data.fim.max_length
    return int(run.train.get("max_length") or defaults_in_source("SFTConfig")["max_length"])


def describe_overlong(run: RunConfig, examples: Examples, base_config: PretrainedConfig) -> str:
    """Describe examples that are longer than the model's positions; "" if none is."""
    positions, longest = context_of(base_config), examples.train.lengths.quantile(1.0)
    if positions is None or longest <= positions:
        return ""
    key = "data.fim.max_length" if run.data.format == "fim" else "train.max_length"
    return (
        f"the longest example has {longest:,} tokens; the model was made for {positions:,} (max_position_embeddings), and "
        f"positions beyond are new to it: {key}={positions} takes no longer ones"
    )


def describe_empty_thoughts(run: RunConfig, examples: Examples) -> str:
    """Describe examples of a run with thinking whose answer has no thought; "" if there are none."""
    count, rows = examples.train.rows_without_reasoning, len(examples.train.dataset)
    if not run.cogumi.thinking or not count:
        return ""
    return (
        f"cogumi.thinking: true, and in {count:,} of {rows:,} examples the last answer has no thought, or an empty one: they "
        "teach to answer at once. cogumi.thinking: false says so to the chat template, or leave these rows out"
    )


# ----------------------------------------------------------------------------------------------- prompts, and rows of ids


def held_out_prompts(
    held_out: Dataset, options: FormatOptions, tokenizer: PreTrainedTokenizerBase, count: int
) -> Dataset | None:
    """Make prompts of the first `count` held-out examples, with their answers."""
    rows = held_out.select(range(min(count, len(held_out))))

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    if options.method == "gspo":
        prompts, ids = render_prompts(list(rows["prompt"]), tokenizer, options.thinking, options.today, options.tools)

        def encode(value: Any) -> str:
            """Return JSON for a text file: dates and bytes as Python writes them, no half surrogate pairs."""
            return json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace").decode()

        names = [name for name in rows.column_names if name not in ("prompt", RECORD_COLUMN)]
        texts = {name: list(map(encode, rows[name])) for name in names}
        return decode_rows(Dataset.from_dict({**texts, "prompt": prompts, "prompt_ids": ids}), names)
    if options.method == "dpo":
        triples = [
            (row["prompt_ids"], row["chosen_ids"], {side: decode(row[f"{side}_ids"]) for side in SIDES}) for row in rows
        ]
    else:
        triples, answer = [], "middle" if options.format == "fim" else "answer"
        for row in rows:
            ids, end = row["input_ids"], len(row["completion_mask"]) - row["completion_mask"][::-1].index(1)
            start = next((at for at in range(end, 0, -1) if not row["completion_mask"][at - 1]), 0)
            if start > 1:  # else all of it is learned, and nothing is asked
                triples.append((ids[:start], ids[start:end], {answer: decode(ids[start:end])}))
    records = [
        {"prompt": tokenizer.decode(ids), **answers, "prompt_ids": ids, "answer_ids": answer_ids}
        for ids, answer_ids, answers in triples
    ]
    return Dataset.from_list(records) if records else None


def render_prompts(
    prompts: list[Any],
    tokenizer: PreTrainedTokenizerBase,
    thinking: bool | None,
    today: str | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[list[str], list[list[int]]]:
    """Prompts, all text or all messages, as the model sees them: (texts, their ids)."""
    if isinstance(prompts[0], str):
        return prompts, tokenizer(prompts)["input_ids"]
    template, literal = read_template(tokenizer, thinking, today), LiteralText(tokenizer)
    texts = [template.prompt(literal.hide_messages(prompt), list(tools) or None) for prompt in prompts]
    return [literal.reveal(text) for text in texts], [ids.tolist() for ids in literal.encode(texts)]


def first_tokens(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, rows: int) -> torch.Tensor:
    """Token ids of the first examples, prompt and answer, cut to the shortest: (rows, tokens)."""

    def ids_of(row: dict[str, Any]) -> list[int]:
        if "input_ids" in row:
            return list(row["input_ids"])
        if "prompt_ids" in row:
            return [*row["prompt_ids"], *row["chosen_ids"]]
        return prompt_ids(row["prompt"] + row["middle"] if "middle" in row else row["prompt"], tokenizer)

    ids = [ids_of(row) for row in dataset.select(range(min(rows, len(dataset))))]
    return torch.tensor([row_ids[: min(map(len, ids))] for row_ids in ids])
