"""The models of a directory: a run's base, adapter and merged model, an adapter's, or a model without a run.

Reading a directory loads no torch, so a wrong one is refused at once; each model is loaded when it is first used.
"""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cogumi.checkpoints.verify import last_good_checkpoint
from cogumi.core import run_directory
from cogumi.core.errors import UsageError
from cogumi.core.notices import show_import
from cogumi.stack.gpus import use_one_gpu
from cogumi.telemetry.status import hint_of_runs, is_run, runs_below, status_of

BASE, ADAPTER, MERGED, MODEL = "base", "adapter", "merged", "model"
MAX_NEW_TOKENS = 256  # TRL's default for completions, and for runs that have no setting for it


@dataclass(frozen=True)
class ModelFiles:
    """Where the models of a chat are, and how the run loaded its base.

    merged: any whole model, also one that no run made. stamp: when the files of adapter and merged model were written.
    """

    base: str | None = None
    revision: str | None = None
    adapter: Path | None = None
    merged: Path | None = None
    dtype: str = "auto"
    quantization: dict[str, Any] | None = None
    attention: str | None = None
    stamp: int = 0


@dataclass(frozen=True)
class ChatSetup:
    """Models that answer in a chat, and the settings of their answers.

    columns: those of BASE, ADAPTER, MERGED and MODEL that answer. tokenizer: a directory or hub id. format: `data.format` of
    the run, None without a run. sample: a prompt of the run. temperature: 0 is greedy.
    """

    place: Path
    files: ModelFiles
    columns: tuple[str, ...]
    tokenizer: str
    format: str | None = None
    sample: str | None = None
    thinking: bool | None = None
    today: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    max_new_tokens: int = MAX_NEW_TOKENS
    temperature: float = 0.0
    note: str = ""


def read_setup(
    place: Path, only: Sequence[str] = (), temperature: float = 0.0, max_new_tokens: int | None = None
) -> ChatSetup:
    """Find out what can be talked to in the directory of a run, an adapter or a model; raises UsageError if there is nothing.

    only: the columns; by default the base and what was trained, merged if it is there. max_new_tokens: None is the run's own.
    """
    if not place.is_dir():
        problem = "it is a file, not a directory" if place.exists() else "there is no such directory"
        raise UsageError(f"{problem}{hint_of_runs(place)}", place=place)
    if is_run(place):
        setup = read_run(place)
    elif (place / "adapter_config.json").is_file():
        setup = read_adapter(place)
    elif (place / "config.json").is_file():
        setup = ChatSetup(place, ModelFiles(merged=place, stamp=stamp_of(place)), (MODEL,), str(place))
    else:
        problem = f"it holds no run, no model (config.json) and no adapter (adapter_config.json){hint_of_runs(place)}"
        raise UsageError(problem, place=place)
    available = setup.columns
    if unknown := [column for column in only if column not in available]:
        fix = f"there is {', '.join(available)}"
        raise UsageError(f"there is no {unknown[0]!r} here", place=place, key="--only", fix=fix)
    columns = tuple(column for column in available if column in (only or (available[0], available[-1])))
    max_new_tokens = max_new_tokens or setup.max_new_tokens
    return replace(setup, columns=columns, temperature=temperature, max_new_tokens=max_new_tokens)


def read_run(run: Path) -> ChatSetup:
    adapter, merged, note = find_saved(run)
    config = run_directory.config_of(run)
    with show_import():
        use_one_gpu()
        import torch
    status = status_of(run)
    # The run's own process compares its result, and has freed the GPU's memory.
    is_own = run_directory.same_process(status.process, run_directory.this_process())
    if torch.cuda.is_available() and not status.ended and not is_own:
        fix = "ask when it has ended"
        raise UsageError("the run has the GPU, and the memory of a second model could end it", place=run, fix=fix)
    model, data, train, ours = (config.get(section) or {} for section in ("model", "data", "train", "cogumi"))
    base = run_directory.read_section(run / run_directory.DECISIONS, "base")
    files = ModelFiles(
        base=model.get("name"),
        revision=base["commit"] if base.get("name") == model.get("name") else model.get("revision"),
        adapter=adapter,
        merged=merged,
        dtype=model.get("dtype") or "auto",
        quantization=model.get("quantization_config"),
        attention=model.get("attn_implementation"),
        stamp=stamp_of(adapter, merged),
    )
    mix = data.get("mix") or [{}]
    samples = run_directory.read_jsonl(run / run_directory.SAMPLES_FILE)
    return ChatSetup(
        place=run,
        files=files,
        columns=tuple(column for column in (BASE, ADAPTER, MERGED) if getattr(files, column)),
        tokenizer=str(next((path for path in (adapter, merged) if has_tokenizer(path)), model.get("name"))),
        format=mix[0].get("format") or data.get("format") or "fim",
        sample=samples[0]["prompt"] if samples else None,
        thinking=ours.get("thinking"),
        today=run_directory.read_section(run / run_directory.DECISIONS, "data").get("today"),
        template_kwargs=(train.get("chat_template_kwargs") if ours.get("method") == "gspo" else None) or {},
        stops=tuple(ours.get("stop") or ()),
        max_new_tokens=train.get("max_completion_length") or MAX_NEW_TOKENS,
        note=note,
    )


def find_saved(run: Path) -> tuple[Path | None, Path | None, str]:
    """Return (adapter, merged model, note) of a run; before its end of its last good checkpoint, which the note names."""
    adapter = run / "adapter" if (run / "adapter" / "adapter_config.json").is_file() else None
    merged = run / "merged" if (run / "merged" / "config.json").is_file() else None
    if adapter or merged:
        return adapter, merged, ""
    status, checkpoint = status_of(run), last_good_checkpoint(run / "checkpoints")
    state = status.state + (f", step {status.step}" if status.step else "")
    if checkpoint is None:
        save = f"`cogumi checkpoint {shlex.quote(str(run))}` has it save one"
        fix = "`cogumi status` says how it stands" if status.ended else save
        below = "".join(f"; below it there is {path}" for path in runs_below(run)[:1])
        raise UsageError(f"the run has saved nothing yet ({state}){below}", place=run, fix=fix)
    note = f"the run is {state}: this is {checkpoint.name}, its last good checkpoint"
    is_adapter = (checkpoint / "adapter_config.json").is_file()
    return (checkpoint, None, note) if is_adapter else (None, checkpoint, note)


def read_adapter(place: Path) -> ChatSetup:
    from cogumi.merge.adapter_files import read_base_record, read_json

    record, config = read_base_record(place), read_json(place / "adapter_config.json")
    base = record.name if record else config.get("base_model_name_or_path")
    if not base:
        fix = "write it into its adapter_config.json as base_model_name_or_path"
        raise UsageError("the adapter does not record its base", place=place, fix=fix)
    revision = (record.commit or record.revision) if record else config.get("revision")
    files = ModelFiles(base, revision, adapter=place, stamp=stamp_of(place))
    return ChatSetup(place, files, (BASE, ADAPTER), str(place) if has_tokenizer(place) else base)


def stamp_of(*directories: Path | None) -> int:
    weights = (path for directory in directories if directory for path in directory.glob("*.safetensors"))
    return max((path.stat().st_mtime_ns for path in weights), default=0)


def has_tokenizer(directory: Path | None) -> bool:
    return directory is not None and (directory / "tokenizer_config.json").is_file()


class LoadedModels:
    """The models of a chat, each loaded when it first answers. Base and adapter share one base in memory."""

    def __init__(self, files: ModelFiles) -> None:
        self.files, self.models = files, dict[str, Any]()

    @contextmanager
    def model_of(self, column: str) -> Iterator[Any]:
        from peft import PeftModel

        from cogumi.methods.warm_start import check_recorded_base
        from cogumi.models.loading import load_model, read_base

        files, name = self.files, BASE if column == ADAPTER else column
        if name not in self.models:
            path, revision, quantization = str(files.merged), None, None
            if name == BASE:
                path, revision, quantization = str(files.base), files.revision, files.quantization
            loaded = load_model(read_base(path, revision), files.dtype, quantization, files.attention)
            self.models[name] = loaded.eval()
        model = self.models[name]
        if column == ADAPTER and not isinstance(model, PeftModel):
            assert files.adapter is not None
            check_recorded_base(files.adapter, model.config, files.revision)
            model = self.models[BASE] = PeftModel.from_pretrained(model, str(files.adapter)).eval()
        with model.disable_adapter() if column == BASE and isinstance(model, PeftModel) else nullcontext():
            yield model
