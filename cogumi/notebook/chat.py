"""Chat with the base and with what a run trained, side by side: in a terminal, or with widgets in a notebook.

Prompts are made as in the training: by the chat template with the run's thinking setting and date, or as text. Reading a
directory loads no torch, so a wrong one is refused at once; each model is loaded when it first answers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cogumi.core.errors import UsageError, require_extra
from cogumi.core.notices import is_notebook, show_import
from cogumi.core.output import print_text, show_waiting
from cogumi.data.chat import visible_text
from cogumi.data.fim import INSTRUCTION, PSM, SPM, FimTokens, detect_fim_tokens
from cogumi.data.rows import BadRow
from cogumi.data.templates import ChatTemplate, read_template
from cogumi.evaluation.saved_models import BASE, ChatSetup, LoadedModels
from cogumi.notebook import html_components as html
from cogumi.notebook.completions import render_completion
from cogumi.notebook.panel import WIDGET
from cogumi.stack.gpus import use_one_gpu

FILL = "<FILL_ME>"  # marks the missing piece, as in Code Llama's tokenizer
QUESTION = [{"role": "user", "content": "a question"}]
COMMANDS = "/reset forgets what was said; /exit or Ctrl-D ends"


# ---------------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Answer:
    """text: without the end token or stop sequence. ended: whether it came to one within the tokens that it had."""

    text: str
    ended: bool


last_models: list[LoadedModels] = []
"""The models of this process's last chat; the next one takes them if they are of the same files."""


def open_chat(setup: ChatSetup) -> "Chat":
    """Return a chat; models of the same files that are in memory are reused, others of an earlier chat are released."""
    if not last_models or last_models[0].files != setup.files:
        last_models[:] = [LoadedModels(setup.files)]
    with show_import():
        use_one_gpu()
        return Chat(setup, last_models[0])


class Chat:
    """A conversation with the models of a setup; each column has its own, with its own answers in it.

    Raises UsageError where the tokenizer cannot be loaded, or its template refuses the run's thinking setting.
    """

    def __init__(self, setup: ChatSetup, models: LoadedModels | None = None) -> None:
        from cogumi.models.loading import load_tokenizer

        self.setup, self.models = setup, models or LoadedModels(setup.files)
        self.tokenizer: Any = load_tokenizer(setup.tokenizer)
        self.template = template_of(setup, self.tokenizer)
        self.fim: FimTokens | None = None if self.template else detect_fim_tokens(self.tokenizer)
        self.fills = self.template is None and (setup.format == "fim" or (not setup.format and self.fim is not None))
        self.reset()

    def reset(self) -> None:
        self.turns: dict[str, list[dict[str, str]]] = {column: [] for column in self.setup.columns}

    def load(self) -> None:
        """Load every model now instead of at its first answer."""
        for column in self.setup.columns:
            with self.models.model_of(column):
                pass

    def remember(self, message: str, answers: Mapping[str, Answer]) -> None:
        """Add a message and its answers to the conversation; completions of text have none."""
        if self.template is None:
            return
        for column, answer in answers.items():
            # Without its thoughts, which templates leave out of earlier turns.
            reply = visible_text(answer.text, self.template.thinking.style, self.template.prompt_opens_thought)
            self.turns[column] += [{"role": "user", "content": message}, {"role": "assistant", "content": reply or ""}]

    def answer(self, column: str, message: str, write: Callable[[str], None]) -> Answer:
        """Return one column's answer to a message. Raises UsageError if the context has no room for one.

        write: receives the text piece by piece, a stop sequence included; what it raises, such as an interrupt, ends the answer.
        """
        from transformers import TextStreamer

        from cogumi.models.completion import complete_with_ends, end_ids

        setup, tokenizer, ids = self.setup, self.tokenizer, self.prompt_ids(column, message)
        # The tokens that separate harmony's channels are control tokens.
        plain = self.template is None or self.template.thinking.style != "harmony"
        with self.models.model_of(column) as model:
            context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            room = setup.max_new_tokens if context is None else min(setup.max_new_tokens, context - len(ids))
            if room < 1:
                problem = f"{len(ids):,} tokens were said, and the context of the model has {context:,}"
                raise UsageError(problem, fix="/reset begins anew" if self.template else "make it shorter")
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=plain)
            streamer.on_finalized_text = lambda text, stream_end=False: write(text)  # type: ignore[method-assign]
            generation: dict[str, Any] = {"eos_token_id": sorted(end_ids(model, tokenizer)), "streamer": streamer}
            if setup.temperature:
                generation |= {"do_sample": True, "temperature": setup.temperature, "top_p": 1.0, "top_k": 0}
            ((text, ended),) = complete_with_ends(model, tokenizer, [ids], room, setup.stops, plain, **generation)
        return Answer(text, ended)

    def prompt_ids(self, column: str, message: str) -> list[int]:
        return list(self.tokenizer(self.prompt(column, message), add_special_tokens=self.template is None)["input_ids"])

    def prompt(self, column: str, message: str) -> str:
        if self.template is not None:
            try:
                return self.template.prompt([*self.turns[column], {"role": "user", "content": message}])
            except BadRow as error:
                problem = f"the chat template refuses this conversation: {error.excerpt}"
                raise UsageError(problem, fix="/reset begins anew") from error
        prefix, marker, suffix = message.partition(FILL)
        if not marker or not self.fills:
            return message
        if self.fim is None:
            return INSTRUCTION.format(prefix=prefix, suffix=suffix)
        return self.fim.prompt(prefix, suffix, PSM if self.fim.psm else SPM)

    def describe(self) -> str:
        setup, thinking = self.setup, {True: ", thinking on", False: ", thinking off", None: ""}[self.setup.thinking]
        mode = f"chat, by the model's template{thinking}"
        if self.template is None:
            why = "as the model has no chat template" if self.tokenizer.chat_template is None else "as in its training"
            mode = f"each message is completed as text, {why}" + (f"; {FILL} in it is filled in" if self.fills else "")
        sampling = f"temperature {setup.temperature:g}" if setup.temperature else "greedy"
        stops = f", stops at {', '.join(map(repr, setup.stops))}" if setup.stops else ""
        columns = " and ".join(f"{BASE} ({setup.files.base})" if name == BASE else name for name in setup.columns)
        return f"{setup.place}: {mode}; {columns}; {sampling}, up to {setup.max_new_tokens} tokens{stops}"


def template_of(setup: ChatSetup, tokenizer: Any) -> ChatTemplate | None:
    """Return the template that renders prompts; None where they are text, as the run's own were."""
    if tokenizer.chat_template is None or setup.format == "fim":
        return None
    template = read_template(tokenizer, setup.thinking, setup.today)
    template = replace(template, variables=template.variables | setup.template_kwargs)
    if setup.format in (None, "chat") or setup.sample is None:
        return template
    # Prompts with completions are messages or text. Those that were rendered end in the generation prompt.
    generation_prompt = template.prompt(QUESTION).rpartition(QUESTION[0]["content"])[2]
    return template if setup.sample.endswith(generation_prompt) else None


@dataclass(frozen=True)
class Answers:
    """The answers to one message by column; a notebook shows them side by side."""

    message: str
    answers: dict[str, Answer]

    @property
    def texts(self) -> dict[str, str]:
        return {column: answer.text for column, answer in self.answers.items()}

    def __repr__(self) -> str:
        shown = {column: text if text.strip() else html.describe_blank(text) for column, text in self.texts.items()}
        return "\n".join(f"{column}:\n{text}" for column, text in shown.items())

    def _repr_html_(self) -> str:
        return html.add_style(render_talk([*self.texts], [(self.message, self.texts)]))


def render_talk(columns: Sequence[str], turns: Iterable[tuple[str, dict[str, str]]]) -> str:
    """Render a table: each message, and beside it what every column answered."""
    rows = [[html.verbatim(message), *map(render_completion, texts.values())] for message, texts in turns]
    return html.table(["message", *columns], rows, kind="wide even")


def answer_once(chat: Chat, message: str) -> Answers:
    """Answer one message in every column. Raises UsageError for an empty message, and as `Chat.answer` does."""
    if not message.strip():
        raise UsageError("the message is empty")
    return Answers(message, {column: chat.answer(column, message, lambda _: None) for column in chat.setup.columns})


# ----------------------------------------------------------------------------------------------------------- conversation


def talk(chat: Chat) -> None:
    """Converse with widgets in a notebook, else line by line."""
    if is_notebook():
        from IPython.display import display

        widgets = ChatPanel(chat).box._repr_mimebundle_()[WIDGET]
        display({WIDGET: widgets, "text/plain": chat.describe()}, raw=True)
    else:
        converse(chat)


class ChatPanel:
    """The widgets of a conversation. The kernel is busy while it answers; interrupting it ends the answer."""

    def __init__(self, chat: Chat) -> None:
        require_extra("ipywidgets", "notebook")
        from ipywidgets import HTML, Button, Textarea, VBox

        self.chat, self.turns = chat, list[tuple[str, dict[str, str]]]()
        head = "<br>".join(map(html.escape_text, filter(None, (chat.describe(), chat.setup.note))))
        self.talk = HTML()
        self.message = Textarea(placeholder="a message", rows=3, layout={"width": "100%"})
        self.send = Button(description="Send")
        self.send.on_click(self.on_send)
        self.box = VBox([HTML(html.add_style(head)), self.talk, self.message, self.send])
        self.box.add_class("cogumi-panel")

    def on_send(self, _: Any) -> None:
        """Answer in every column; a message that is refused or interrupted is no part of the conversation."""
        message, texts, note = self.message.value.strip(), dict.fromkeys(self.chat.setup.columns, ""), ""
        if not message:
            return
        self.message.value, self.send.disabled = "", True
        self.turns.append((message, texts))
        try:
            answers = {}
            for column in texts:
                answers[column] = answer = self.chat.answer(column, message, partial(self.take, texts, column))
                texts[column] = answer.text
                note = note if answer.ended else f"{column} is {describe_cut(self.chat)}"
            self.chat.remember(message, answers)
        except KeyboardInterrupt:
            note = "stopped; this message is no part of the conversation"
        except UsageError as error:
            note = str(error)
        finally:
            self.draw(note)
            self.send.disabled = False

    def take(self, texts: dict[str, str], column: str, piece: str) -> None:
        texts[column] += piece
        if piece:
            self.draw()

    def draw(self, note: str = "") -> None:
        content = render_talk(self.chat.setup.columns, self.turns)
        self.talk.value = html.wrap_piece(content, f'<p role="status">{html.escape_text(note)}</p>' if note else "")


def print_head(chat: Chat, to_error: bool = False) -> None:
    for line in filter(None, (chat.describe(), chat.setup.note)):
        print_text(line, to_error=to_error)


def print_answers(chat: Chat, message: str, labelled: bool = True) -> None:
    """Print every column's answer while it is written. An interrupt ends it, and the message is forgotten."""
    answers = {}
    for column in chat.setup.columns:
        if labelled:
            print_text(f"{column}:")
        answer = answers[column] = chat.answer(column, message, lambda piece: print_text(piece, end=""))
        print_text("" if answer.text.strip() else html.describe_blank(answer.text))
        if not answer.ended:
            print_text(f"[{describe_cut(chat)}]", to_error=not labelled)
    chat.remember(message, answers)


def describe_cut(chat: Chat) -> str:
    return f"cut before its end: {chat.setup.max_new_tokens} tokens, or what the context left"


def converse(chat: Chat) -> None:
    """Answer line after line until /exit, the end of the input, or an interrupt; one during an answer ends the answer."""
    print_head(chat)
    with suppress(ImportError):  # lets `input` edit a line and recall earlier ones
        import readline  # noqa: F401
    try:
        with show_waiting("loading the models"):
            chat.load()
        print_text(COMMANDS)
        while (message := input("> ").strip()) != "/exit":
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
