"""The models of a chat and what they answer: each answer streamed as it is written. torch is loaded when one is asked.

A prompt is made as the training made its own: by the chat template with the run's thinking setting and date, or as text.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.data.chat_templates import ChatTemplate, read_template, visible_text
from cogumi.data.fim import INSTRUCTION, PSM, SPM, FimTokens, detect_fim_tokens
from cogumi.data.rows import BadRow

BASE, ADAPTER, MERGED, MODEL = "base", "adapter", "merged", "model"
NEW_TOKENS = 256  # TRL's default for completions, and for the runs that have no setting for it
FILL = "<FILL_ME>"  # the marker of Code Llama's tokenizer for a missing piece
BROKEN = "\ufffd"  # how a tokenizer decodes a part of a character
QUESTION = [{"role": "user", "content": "a question"}]


@dataclass(frozen=True)
class ModelFiles:
    """Where the models of a chat are, and how the run loaded its base. merged: any whole model, also one that no run made.

    stamp: when the files of the adapter and of the merged model were last written.
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
    """What is talked to, and how. columns: of BASE, ADAPTER, MERGED and MODEL those that answer, in this order.

    place: what was named. tokenizer: a directory or hub id. format: of the run's data (`data.format`), None where there is
    no run. sample: a prompt of the run. sampling: arguments of `generate`; {} is greedy. note: what a person is to know.
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
    max_new_tokens: int = NEW_TOKENS
    sampling: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """text: without the end token or stop sequence. ended: it came to one within the tokens that it had."""

    text: str
    ended: bool


class LoadedModels:
    """The models of a chat, each loaded when it first answers. Base and adapter share one base in memory."""

    def __init__(self, files: ModelFiles) -> None:
        self.files, self.found = files, dict[str, Any]()

    @contextmanager
    def of(self, column: str) -> Iterator[Any]:
        """The model of a column, for the length of the block."""
        from peft import PeftModel

        from cogumi.models.adapters import check_base

        name = BASE if column == ADAPTER else column
        model = self.found[name] = self.found.get(name) or self.load(name)
        if column == ADAPTER and not isinstance(model, PeftModel):
            assert self.files.adapter is not None
            check_base(self.files.adapter, model.config, self.files.revision)
            model = self.found[BASE] = PeftModel.from_pretrained(model, str(self.files.adapter)).eval()
        without_adapter = column == BASE and isinstance(model, PeftModel)
        with model.disable_adapter() if without_adapter else nullcontext():
            yield model

    def load(self, name: str) -> Any:
        """The base as the run loaded it, or a whole model."""
        from cogumi.models.loading import load_model, resolve_model

        files = self.files
        how: dict[str, Any] = {"dtype": files.dtype, "attention": files.attention}
        if name != BASE:
            return load_model(str(files.merged), **how).eval()
        base = resolve_model(str(files.base), files.revision)
        return load_model(base, files.revision, quantization=files.quantization, **how).eval()


class Chat:
    """A conversation with the models of a setup; each column has its own, with its own answers in it."""

    def __init__(self, setup: ChatSetup, models: LoadedModels | None = None) -> None:
        """Raises UsageError where the tokenizer cannot be loaded, or its template refuses the run's thinking setting."""
        from cogumi.models.loading import load_tokenizer

        self.setup, self.models = setup, models or LoadedModels(setup.files)
        self.tokenizer: Any = load_tokenizer(setup.tokenizer)
        self.template = template_of(setup, self.tokenizer)
        self.fim: FimTokens | None = None if self.template else detect_fim_tokens(self.tokenizer)
        self.fills = self.template is None and (setup.format == "fim" or (not setup.format and self.fim is not None))
        self.turns: dict[str, list[dict[str, str]]] = {column: [] for column in setup.columns}

    def reset(self) -> None:
        """Forget what was said."""
        for turns in self.turns.values():
            turns.clear()

    def load(self) -> None:
        """Load all that answer, which otherwise happens when they first do."""
        for column in self.setup.columns:
            with self.models.of(column):
                pass

    def remember(self, message: str, answers: Mapping[str, Answer]) -> None:
        """Let what was said be part of the conversation; completions of text have none."""
        if self.template is None:
            return
        for column, answer in answers.items():
            # Without its thoughts, which templates leave out of earlier turns.
            seen = visible_text(answer.text, self.template.thinking.style, self.template.prompt_opens_thought)
            said = [{"role": "user", "content": message}, {"role": "assistant", "content": seen or ""}]
            self.turns[column] += said

    def answer(self, column: str, message: str, write: Callable[[str], None]) -> Answer:
        """One column's answer to the conversation and the message. write: takes its words as they are written; what it
        raises, like an interrupt, ends the answer. Raises UsageError where the context has no room for one."""
        from cogumi.models.completion import complete_with_ends, end_ids

        setup, tokenizer, ids = self.setup, self.tokenizer, self.prompt_ids(column, message)
        # Of harmony's channels the tokens that part them are control tokens.
        plain = self.template is None or self.template.thinking.style != "harmony"
        with self.models.of(column) as model:
            positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            room = setup.max_new_tokens if positions is None else min(setup.max_new_tokens, positions - len(ids))
            if room < 1:
                what = f"{len(ids):,} tokens were said, and the context of the model has {positions:,}"
                raise UsageError(what, fix="/reset begins anew" if self.template else "make it shorter")
            streamer = Streamer(tokenizer, write, setup.stops, plain)
            generation = {**setup.sampling, "eos_token_id": sorted(end_ids(model, tokenizer)), "streamer": streamer}
            ((text, ended),) = complete_with_ends(model, tokenizer, [ids], room, setup.stops, plain, **generation)
        return Answer(text, ended)

    def prompt_ids(self, column: str, message: str) -> list[int]:
        return list(self.tokenizer(self.prompt(column, message), add_special_tokens=self.template is None)["input_ids"])

    def prompt(self, column: str, message: str) -> str:
        """What the model of a column is shown, as text."""
        if self.template is not None:
            try:
                return self.template.prompt([*self.turns[column], {"role": "user", "content": message}])
            except BadRow as error:
                what = f"the chat template refuses this conversation: {error.excerpt}"
                raise UsageError(what, fix="/reset begins anew") from error
        prefix, marker, suffix = message.partition(FILL)
        if not marker or not self.fills:
            return message
        if self.fim is None:
            return INSTRUCTION.format(prefix=prefix, suffix=suffix)
        return self.fim.prompt(prefix, suffix, PSM if self.fim.psm else SPM)

    def describe(self) -> str:
        """One line: how messages are taken and answers made."""
        setup, thinking = self.setup, {True: ", thinking on", False: ", thinking off", None: ""}[self.setup.thinking]
        how = f"chat, by the model's template{thinking}"
        if self.template is None:
            why = "as the model has no chat template" if self.tokenizer.chat_template is None else "as in its training"
            how = f"each message is completed as text, {why}" + (f"; {FILL} in it is filled in" if self.fills else "")
        ways = f"temperature {setup.sampling['temperature']:g}" if setup.sampling else "greedy"
        stops = f", stops at {', '.join(map(repr, setup.stops))}" if setup.stops else ""
        columns = " and ".join(f"{BASE} ({setup.files.base})" if each == BASE else each for each in setup.columns)
        return f"{setup.place}: {how}; {columns}; {ways}, up to {setup.max_new_tokens} tokens{stops}"


def template_of(setup: ChatSetup, tokenizer: Any) -> ChatTemplate | None:
    """The template that prompts are rendered by; None where they are text, as the run's own were."""
    if tokenizer.chat_template is None or setup.format == "fim":
        return None
    template = read_template(tokenizer, setup.thinking, setup.today)
    template = replace(template, variables=template.variables | setup.template_kwargs)
    if setup.format in (None, "chat") or setup.sample is None:
        return template
    # Prompts with completions are messages or text. Those that were rendered end in the generation prompt.
    ends_in = template.prompt(QUESTION).rpartition(QUESTION[0]["content"])[2]
    return template if setup.sample.endswith(ends_in) else None


class Streamer:
    """What `generate` hands tokens to. It writes an answer up to its stop sequence. As much as may begin one is held back,
    and so is a part of a character."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None], stops: tuple[str, ...], plain: bool) -> None:
        self.tokenizer, self.write, self.stops, self.plain = tokenizer, write, stops, plain
        self.ids: list[int] | None = None
        self.shown = 0

    def put(self, tokens: Any) -> None:
        if self.ids is None:  # the prompt
            self.ids = []
        else:
            self.ids += tokens.tolist()
            self.show(held=max(map(len, self.stops), default=1) - 1)

    def end(self) -> None:
        self.show(held=None)

    def show(self, held: int | None) -> None:
        """held: characters that are not shown yet; None of a whole answer."""
        from cogumi.models.completion import cut_at_stop

        text = self.tokenizer.decode(self.ids or [], skip_special_tokens=self.plain)
        end = len(cut_at_stop(text, self.stops))
        if held is not None:
            end = min(end, len(text) - held, len(text.rstrip(BROKEN)))
        self.write(text[self.shown : end])
        self.shown = max(self.shown, end)
