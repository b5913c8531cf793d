"""The Modelfile with which Ollama takes a GGUF file, and the chat template in Ollama's language.

Ollama does not run the chat template in a GGUF file. It compares the template with its own list. If none is near,
Ollama prompts the model without any template (ollama#6823). So this module writes the template into the Modelfile. It
derives the template from conversations that the tokenizer renders. It then compares both on other conversations, and
writes no template that renders differently.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from cogumi.data.fim_tokens import PSM, SPM, detect_fim_tokens
from cogumi.merge.gguf_check import chat_template

Turn = tuple[str, str]  # role and content
# What the template is read off, and what it is then compared on. A content that has nothing to do with any template.
SYSTEM, FIRST, ANSWER, SECOND = "Sys7em", "Fir5t", "An5wer", "Sec0nd"
CONVERSATIONS: tuple[tuple[Turn, ...], ...] = (
    (("user", "Hello."),),
    (("user", "One\ntwo?"), ("assistant", "Three."), ("user", "Four")),
    (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d e"), ("user", "f")),
)


@dataclass(frozen=True)
class TurnTemplate:
    """A chat template that puts fixed texts around each content.

    default: before the first turn where there is no system message; system: around one, None where the template takes none.
    """

    default: str
    system: tuple[str, str] | None
    user: tuple[str, str]  # the second text opens the answer
    answer_end: str

    def render(self, turns: Sequence[Turn]) -> str:
        text = self.default
        if self.system is not None and turns[0][0] == "system":
            text = self.system[0] + turns[0][1] + self.system[1]
        for role, content in turns:
            if role == "user":
                text += self.user[0] + content + self.user[1]
            elif role == "assistant":
                text += content + self.answer_end
        return text

    def as_go(self) -> str:
        """In the language of Go's text/template, over Ollama's `.System` and `.Messages`."""
        before, after = self.user
        first = self.default
        if self.system is not None:
            opens, closes = self.system
            otherwise = self.default and f"{{{{ else }}}}{self.default}"
            first = f"{{{{ if .System }}}}{opens}{{{{ .System }}}}{closes}{otherwise}{{{{ end }}}}"
        return (
            f'{first}{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{before}{{{{ .Content }}}}{after}'
            f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{self.answer_end}{{{{ end }}}}{{{{ end }}}}'
        )


def read_turns(tokenizer: Any, bos: str) -> TurnTemplate | None:
    """The tokenizer's chat template as fixed texts around each content, None where it is no such one. bos: what llama.cpp
    puts before a prompt by itself, which is left out here."""
    if "strftime_now" in (chat_template(tokenizer) or ""):  # today's date would stay in it for ever
        return None
    chat = [("user", FIRST), ("assistant", ANSWER), ("user", SECOND)]
    whole = render(tokenizer, chat, bos)
    answered = render(tokenizer, chat[:2], bos, opens_answer=False)
    if whole is None or answered is None or any(whole.count(text) != 1 for _, text in chat):
        return None
    head, rest = whole.split(FIRST)
    opens_answer, rest = rest.split(ANSWER)
    between, end = rest.split(SECOND)
    # Some templates (Phi-3's) put the end of sequence behind a whole conversation.
    answer_end = answered.removesuffix(tokenizer.eos_token).rpartition(ANSWER)[2] or tokenizer.eos_token
    if end != opens_answer or not between.startswith(answer_end):
        return None
    before = between.removeprefix(answer_end)
    with_system = render(tokenizer, [("system", SYSTEM), *chat], bos)
    system = None
    if with_system is not None and with_system.count(SYSTEM) == 1:
        opens, _, rest = with_system.partition(SYSTEM)
        system = (opens, rest.partition(before + FIRST)[0])
    found = TurnTemplate(head.removesuffix(before), system, (before, end), answer_end)
    asked = [*CONVERSATIONS, *([("system", "Be brief."), *each] for each in CONVERSATIONS if system is not None)]
    texts = "".join((found.default, *(system or ()), before, end, answer_end))
    same = head.endswith(before) and all(found.render(turns) == render(tokenizer, turns, bos) for turns in asked)
    return found if same and "{{" not in texts and '"""' not in texts else None


def render(tokenizer: Any, turns: Sequence[Turn], bos: str, opens_answer: bool = True) -> str | None:
    """What the tokenizer makes of a conversation; None where its template refuses it."""
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens_answer)
    except TemplateError:
        return None
    return str(text).removeprefix(bos)


def fim_template(tokenizer: Any) -> str:
    """For a tokenizer without a chat template: the prompt as it is, or around a hole where it knows fill-in-the-middle."""
    tokens = detect_fim_tokens(tokenizer)
    if tokens is None:
        return "{{ .Prompt }}"
    filled = tokens.prompt("{{ .Prompt }}", "{{ .Suffix }}", SPM if tokens.psm is None else PSM)
    return f"{{{{ if .Suffix }}}}{filled}{{{{ else }}}}{{{{ .Prompt }}}}{{{{ end }}}}"


def modelfile(gguf_name: str, tokenizer: Any, adds_bos: bool) -> tuple[str, str]:
    """(the Modelfile, what it says of the template in one sentence)."""
    bos = tokenizer.bos_token or "" if adds_bos else ""
    stops = [tokenizer.eos_token]
    if chat_template(tokenizer) is None:
        template: str | None = fim_template(tokenizer)
        said = "The tokenizer has no chat template: Ollama gives the model the prompt as it is"
        said += ", or around the hole that a suffix leaves." if template != "{{ .Prompt }}" else "."
    elif turns := read_turns(tokenizer, bos):
        template = turns.as_go()
        count = len(CONVERSATIONS) * (1 if turns.system is None else 2)
        said = f"TEMPLATE gives the text of the tokenizer's chat template, compared on {count} conversations."
        stops.append(turns.answer_end.strip())
    else:
        template = None
        said = "No TEMPLATE: the chat template is more than fixed texts around each turn. Write one, or use llama.cpp."
    lines = [f"# {said}", f"FROM ./{gguf_name}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    lines += [f"PARAMETER stop {stop}" for stop in dict.fromkeys(stops) if stop in special]
    lines.append("PARAMETER repeat_penalty 1")  # as in training; Ollama's own default has been 1.1
    return "\n".join(lines) + "\n", said
