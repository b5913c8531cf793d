"""Talking to what a run trained: which models its directory holds, and a conversation in a terminal or in a notebook.

Reading a directory loads no torch, so that a wrong one is refused at once. `cogumi.notebook.conversation` makes the answers.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cogumi.checkpoints.retention import last_good_checkpoint
from cogumi.core.errors import UsageError, require_extra
from cogumi.core.notices import is_notebook, show_import
from cogumi.core.output import print_text, show_waiting
from cogumi.core.run_directory import DECISIONS, SAMPLES_FILE, read_jsonl, read_section
from cogumi.notebook.completions import render_completion
from cogumi.notebook.conversation import (
    ADAPTER,
    BASE,
    MERGED,
    MODEL,
    NEW_TOKENS,
    Answer,
    Chat,
    ChatSetup,
    LoadedModels,
    ModelFiles,
)
from cogumi.notebook.html_components import (
    add_style,
    describe_blank,
    escape_text,
    inline_styles,
    table,
    verbatim,
    wrap_piece,
)
from cogumi.notebook.panel import WIDGET, render_message
from cogumi.notebook.report import config_of
from cogumi.stack.gpus import use_one_gpu
from cogumi.telemetry.status import hint_of_runs, is_run, runs_below, status_of

# How GRPOConfig reshapes what is sampled, with TRL's defaults.
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
DRAWN_SECONDS = 0.1  # between two pictures of an answer in a notebook
COMMANDS = "/reset forgets what was said; /exit or Ctrl-D ends; a line that ends in \\ continues on the next one"
loaded: list[LoadedModels] = []
"""The models of this process's last chat, which the next one takes if they are of the same files."""


# ------------------------------------------------------------------------------------------------ what a directory holds


def read_setup(
    place: Path, only: Sequence[str] = (), temperature: float | None = None, max_new_tokens: int | None = None
) -> ChatSetup:
    """What there is to talk to in the directory of a run, an adapter or a model.

    only: the columns, by default the base and what was trained, merged if it is there. temperature: 0 is greedy; None, like
    max_new_tokens, is the run's own. Raises UsageError where there is nothing, or not what `only` names.
    """
    if not place.is_dir():
        what = "it is a file, not a directory" if place.exists() else "there is no such directory"
        raise UsageError(f"{what}{hint_of_runs(place)}", place=place)
    if is_run(place):
        setup = setup_of_run(place)
    elif (place / "adapter_config.json").is_file():
        setup = setup_of_adapter(place)
    elif (place / "config.json").is_file():
        setup = ChatSetup(place, ModelFiles(merged=place, stamp=stamp_of(place)), (MODEL,), str(place))
    else:
        what = f"it holds no run, no model (config.json) and no adapter (adapter_config.json){hint_of_runs(place)}"
        raise UsageError(what, place=place)
    there = setup.columns
    if unknown := [each for each in only if each not in there]:
        fix = f"there is {', '.join(there)}"
        raise UsageError(f"there is no {unknown[0]!r} here", place=place, key="--only", fix=fix)
    sampling = setup.sampling
    if temperature is not None:
        sampling = {"do_sample": True, **SAMPLING, **sampling, "temperature": temperature} if temperature else {}
    columns = tuple(each for each in there if each in (only or (there[0], there[-1])))
    return replace(setup, columns=columns, sampling=sampling, max_new_tokens=max_new_tokens or setup.max_new_tokens)


def saved_in(run: Path) -> tuple[Path | None, Path | None, str]:
    """(adapter, merged model, note) of a run; of one that has not ended, from its last good checkpoint, which the note says.

    Raises UsageError where it has saved nothing yet.
    """
    adapter = run / "adapter" if (run / "adapter" / "adapter_config.json").is_file() else None
    merged = run / "merged" if (run / "merged" / "config.json").is_file() else None
    if adapter or merged:
        return adapter, merged, ""
    status, point = status_of(run), last_good_checkpoint(run / "checkpoints")
    state = status.state + (f", step {status.step}" if status.step else "")
    if point is None:
        fix = "`cogumi status` says how it stands" if status.ended else f"`cogumi checkpoint {run}` has it save one"
        below = "".join(f"; below it there is {each}" for each in runs_below(run)[:1])
        raise UsageError(f"the run has saved nothing yet ({state}){below}", place=run, fix=fix)
    note = f"the run is {state}: this is {point.name}, its last good checkpoint"
    return (point, None, note) if (point / "adapter_config.json").is_file() else (None, point, note)


def setup_of_run(run: Path) -> ChatSetup:
    """A chat as the run's own files have it: its base, template, thinking setting, sampling, stops and length."""
    adapter, merged, note = saved_in(run)
    config = config_of(run)
    with show_import():
        use_one_gpu()
        import torch
    model, data, train, ours = (config.get(each) or {} for each in ("model", "data", "train", "cogumi"))
    known = read_section(run / DECISIONS, "base")
    if torch.cuda.is_available() and not status_of(run).ended:
        fix = "ask when it has ended"
        raise UsageError("the run has the GPU, and the memory of a second model could end it", place=run, fix=fix)
    files = ModelFiles(
        base=model.get("name"),
        revision=known["commit"] if known.get("name") == model.get("name") else model.get("revision"),
        adapter=adapter,
        merged=merged,
        dtype=model.get("dtype") or "auto",
        quantization=model.get("quantization_config"),
        attention=model.get("attn_implementation"),
        stamp=stamp_of(adapter, merged),
    )
    is_rl, mix = ours.get("method") == "gspo", data.get("mix") or [{}]
    given = train | (train.get("generation_kwargs") or {})
    sampled = SAMPLING | {key: given[key] for key in SAMPLING if given.get(key) is not None}
    samples = read_jsonl(run / SAMPLES_FILE)
    return ChatSetup(
        place=run,
        files=files,
        columns=tuple(each for each in (BASE, ADAPTER, MERGED) if getattr(files, each)),
        tokenizer=str(next((each for each in (adapter, merged) if has_tokenizer(each)), model.get("name"))),
        format=mix[0].get("format") or data.get("format") or "fim",
        sample=samples[0]["prompt"] if samples else None,
        thinking=ours.get("thinking"),
        today=read_section(run / DECISIONS, "data").get("today"),
        template_kwargs=(train.get("chat_template_kwargs") if is_rl else None) or {},
        stops=tuple(ours.get("stop") or ()),
        max_new_tokens=train.get("max_completion_length") or NEW_TOKENS,
        sampling={"do_sample": True, **sampled} if is_rl else {},
        note=note,
    )


def setup_of_adapter(place: Path) -> ChatSetup:
    """A chat with an adapter and the base that it names."""
    from cogumi.merge.adapter_files import read_base_record, read_json

    record, peft = read_base_record(place), read_json(place / "adapter_config.json")
    base = record.name if record else peft.get("base_model_name_or_path")
    if not base:
        fix = "write it into its adapter_config.json as base_model_name_or_path"
        raise UsageError("the adapter does not record its base", place=place, fix=fix)
    revision = (record.commit or record.revision) if record else peft.get("revision")
    files = ModelFiles(base, revision, adapter=place, stamp=stamp_of(place))
    return ChatSetup(place, files, (BASE, ADAPTER), str(place) if has_tokenizer(place) else base)


def stamp_of(*directories: Path | None) -> int:
    weights = (path for each in directories if each for path in each.glob("*.safetensors"))
    return max((path.stat().st_mtime_ns for path in weights), default=0)


def has_tokenizer(directory: Path | None) -> bool:
    return directory is not None and (directory / "tokenizer_config.json").is_file()


def open_chat(setup: ChatSetup) -> Chat:
    """A chat of a setup; models that are in memory already are taken, others of an earlier chat are let go."""
    if not loaded or loaded[0].files != setup.files:
        loaded[:] = [LoadedModels(setup.files)]
    with show_import():
        use_one_gpu()
        return Chat(setup, loaded[0])


# -------------------------------------------------------------------------------------------- one message; many


@dataclass(frozen=True)
class Answers:
    """What the columns of a chat answered to one message: `texts` by column. A notebook shows them side by side."""

    message: str
    answers: dict[str, Answer]

    @property
    def texts(self) -> dict[str, str]:
        return {column: answer.text for column, answer in self.answers.items()}

    def __repr__(self) -> str:  # as the last word of a cell, or at a prompt
        said = {column: text if text.strip() else describe_blank(text) for column, text in self.texts.items()}
        return "\n".join(f"{column}:\n{text}" for column, text in said.items())

    def _repr_html_(self) -> str:
        return inline_styles(render_talk([*self.texts], [(self.message, self.texts)]))


def answer_once(chat: Chat, message: str) -> Answers:
    """Raises UsageError for a message of nothing, and as `Chat.answer` does."""
    if not message.strip():
        raise UsageError("the message is empty")
    return Answers(message, {column: chat.answer(column, message, lambda _: None) for column in chat.setup.columns})


def print_answers(chat: Chat, message: str, labelled: bool = True) -> None:
    """Print every column's name, and its answer while it is written. An interrupt ends it, and the message is forgotten."""
    answers = {}
    for column in chat.setup.columns:
        if labelled:
            print_text(f"{column}:")
        answer = answers[column] = chat.answer(column, message, lambda piece: print_text(piece, end=""))
        print_text("" if answer.text.strip() else describe_blank(answer.text))
        if not answer.ended:
            print_text(f"[{describe_cut(chat)}]", to_error=not labelled)
    chat.remember(message, answers)


def describe_cut(chat: Chat) -> str:
    return f"cut before its end: {chat.setup.max_new_tokens} tokens, or what the context left"


def talk(chat: Chat) -> None:
    """Show widgets in a notebook. Elsewhere print what is talked to, and hold a conversation."""
    if is_notebook():
        from IPython.display import display

        widgets = ChatPanel(chat).box._repr_mimebundle_()[WIDGET]
        display({WIDGET: widgets, "text/plain": chat.describe()}, raw=True)
    else:
        print_head(chat)
        talk_in_terminal(chat)


def talk_in_terminal(chat: Chat) -> None:
    """Answer line after line until /exit, the end of the input, or an interrupt; one during an answer ends the answer."""
    with suppress(ImportError):  # for input: editing a line, and the lines before it
        import readline  # noqa: F401
    try:
        with show_waiting("loading the models"):
            chat.load()
        print_text(COMMANDS)
        while (message := read_message().strip()) != "/exit":
            try:
                if message == "/reset":
                    chat.reset()
                    print_text("what was said is forgotten")
                elif message:
                    print_answers(chat, message)
            except KeyboardInterrupt:
                print_text("\n[interrupted; Ctrl-C again ends the chat]")
            except UsageError as error:
                print_text(f"cogumi: {error}", to_error=True)
    except (EOFError, KeyboardInterrupt):
        print_text()


def read_message() -> str:
    """A line that is typed, and those on which it continues."""
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(". "))
    return "\n".join(lines)


def print_head(chat: Chat, to_error: bool = False) -> None:
    for line in filter(None, (chat.describe(), chat.setup.note)):
        print_text(line, to_error=to_error)


# ------------------------------------------------------------------------------------------------------------- a notebook


class ChatPanel:
    """The widgets of a conversation. Answers are made in a thread of their own, so that the kernel is free meanwhile."""

    def __init__(self, chat: Chat) -> None:
        require_extra("ipywidgets", "notebook")
        from ipywidgets import HTML, Button, HBox, Textarea, VBox

        self.chat, self.said = chat, list[tuple[str, dict[str, str]]]()
        self.drawn, self.thread = 0.0, threading.Thread()
        lines = "<br>".join(map(escape_text, filter(None, (chat.describe(), chat.setup.note))))
        self.talk, self.state = HTML(), HTML()
        self.message = Textarea(placeholder="a message", rows=3, layout={"width": "100%"})
        self.send, self.stop = Button(description="Send"), Button(description="Stop", disabled=True)
        self.send.on_click(self.on_send)
        self.stop.on_click(lambda _: self.show_state("stopping", busy=False))
        buttons = HBox([self.send, self.stop, self.state])
        self.box = VBox([HTML(add_style(lines)), self.talk, self.message, buttons])
        self.box.add_class("cogumi-panel")

    def on_send(self, _: Any) -> None:
        message = self.message.value.strip()
        if message and not self.thread.is_alive():
            self.message.value = ""
            self.show_state("loading the models, when they first answer", busy=True)
            self.thread = threading.Thread(target=self.reply, args=(message,), name="cogumi chat", daemon=True)
            self.thread.start()

    def reply(self, message: str) -> None:
        """Answer in every column. What goes wrong is said below the conversation, and a mistake of the code is raised too."""
        texts, word = dict.fromkeys(self.chat.setup.columns, ""), ""
        self.said.append((message, texts))
        self.draw()
        try:
            self.chat.load()
            answers = {}
            for column in texts:
                answer = answers[column] = self.chat.answer(column, message, partial(self.take, texts, column))
                texts[column] = answer.text
                word = word if answer.ended else f"{column} is {describe_cut(self.chat)}"
            self.chat.remember(message, answers)
        except KeyboardInterrupt:
            word = "stopped; what was said is not part of the conversation"
        except UsageError as error:
            word = str(error)
        except BaseException as error:
            word = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.draw()
            self.show_state(word, busy=False)
            self.send.disabled = False

    def take(self, texts: dict[str, str], column: str, piece: str) -> None:
        """A piece of an answer; each token makes one, which may be empty."""
        if self.stop.disabled:
            raise KeyboardInterrupt
        texts[column] += piece
        if time.monotonic() - self.drawn >= DRAWN_SECONDS:
            self.draw()

    def draw(self) -> None:
        self.talk.value = wrap_piece(render_talk(self.chat.setup.columns, self.said))
        self.drawn = time.monotonic()

    def show_state(self, word: str, busy: bool) -> None:
        """busy: an answer can be stopped, and no message sent until it has ended."""
        self.send.disabled, self.stop.disabled = True, not busy
        self.state.value = render_message(word)


def render_talk(columns: Sequence[str], said: Iterable[tuple[str, dict[str, str]]]) -> str:
    """A table: each message, and beside it what every column answered."""
    rows = [[verbatim(message), *(render_completion(texts[each]) for each in columns)] for message, texts in said]
    return table(["message", *columns], rows, kind="wide even")
