"""A GGUF file read back and compared with the model and tokenizer that it was made of, and the Modelfile for Ollama.

What chat programs get wrong most is not in the weights: another chat template, another end of sequence. Both are compared with
the tokenizer's, and so are all tokens of a BPE vocabulary. Tensors in bf16, f16 and f32 are compared bit by bit with the
stored ones, quantized ones by their distance.

Ollama does not run the chat template in a GGUF file. If its own list has none that is near, it prompts the model without
one (ollama#6823). So the Modelfile has the template, derived from conversations that the tokenizer renders. It is compared
on other conversations, and one that renders differently is not written.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import safe_open

from cogumi.core.errors import MergeError
from cogumi.data.fim import PSM, SPM, detect_fim_tokens

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Of these the converter copies every tensor, or changes the order of rows (llama's queries and keys). Of others it changes
# some (Gemma's norms, stacked experts), which are named in the report.
COPIED = ("llama", "qwen2", "qwen3")
MADE = ("rope_freqs.weight",)  # by the converter, from rope_scaling
# The largest |stored - tensor| / |tensor| that is taken. Q8_0: half a step of 1/127 of the largest of 32 values, and half a
# unit of a float16 scale. Others: a file of another model is 1.4 away, the coarsest format here about 0.1.
Q8_0_LIMIT, LIMIT = 0.0235, 0.5


@dataclass(frozen=True)
class GgufCheck:
    """What was compared. exact: tensors that are equal bit for bit. changed: names of those that the converter stores in
    another form. largest_error: of a tensor, the Frobenius |stored - tensor| / |tensor|. tokens: those compared. template:
    whether there is a chat template. adds_bos: whether llama.cpp puts the beginning of sequence before a prompt itself."""

    architecture: str
    tensors: int
    exact: int
    largest_error: float
    changed: tuple[str, ...]
    tokens: int
    template: bool
    adds_bos: bool

    def __str__(self) -> str:
        found = f"{self.tensors} tensors read back: {self.exact} bit for bit"
        if rest := self.tensors - self.exact - len(self.changed):
            found += f", {rest} quantized, at most {self.largest_error:.1%} away"
        if self.changed:
            found += f", {len(self.changed)} not compared (llama.cpp stores them in another form: {self.changed[0]})"
        template = "chat template" if self.template else "no chat template"
        return f"{found}; end of sequence and {template} as in the tokenizer"


def check_gguf(path: Path, merged: Path, tokenizer: Any) -> GgufCheck:
    """Compare a GGUF file with the merged directory and the tokenizer it was made of. Raises MergeError where they differ."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    stored = {name: field.contents() for name, field in reader.fields.items() if name.startswith(("tok", "gen"))}
    tokens, template = check_tokenizer(stored, tokenizer)
    architecture = stored["general.architecture"]
    config = json.loads((merged / "config.json").read_text(encoding="utf-8"))
    there = {tensor.name: tensor for tensor in reader.tensors}
    exact, worst, changed = 0, 0.0, []
    for name, gguf_name, tensor in stored_tensors(merged, architecture, config):
        found = there.pop(gguf_name, None)
        error = None if found is None else difference(found, to_llama_order(gguf_name, tensor, architecture, config))
        if found is None or error is None or error > (Q8_0_LIMIT if found.tensor_type.name == "Q8_0" else LIMIT):
            if architecture in COPIED:
                what = "is missing" if found is None else f"is not {name}"
                raise MergeError(f"{path}: {gguf_name} {what} of {merged}; nothing was written")
            changed.append(name)
        elif found.tensor_type.name in DTYPES:
            exact += 1
        else:
            worst = max(worst, error)
    left = [name for name in there if name not in MADE]
    if left and architecture in COPIED:
        raise MergeError(f"{path}: {left[0]} is no tensor of {merged}; nothing was written")
    adds_bos = bool(stored.get("tokenizer.ggml.add_bos_token", stored["tokenizer.ggml.model"] == "llama"))
    return GgufCheck(architecture, len(reader.tensors), exact, worst, (*changed, *left), tokens, template, adds_bos)


def check_tokenizer(stored: dict[str, Any], tokenizer: Any) -> tuple[int, bool]:
    """(tokens compared, whether there is a chat template). Raises MergeError where the file is for another tokenizer."""
    template, pieces = chat_template(tokenizer), stored["tokenizer.ggml.tokens"]
    pairs = {"the chat template": (stored.get("tokenizer.chat_template"), template)}
    for name in ("eos_token_id", "bos_token_id"):
        own = getattr(tokenizer, name)
        if name == "eos_token_id" or own is not None:
            pairs[name] = (stored.get(f"tokenizer.ggml.{name}"), own)
    bpe = stored["tokenizer.ggml.model"] == "gpt2"  # SentencePiece spells some tokens in another way
    for token, index in tokenizer.get_vocab().items() if bpe else ():
        pairs[f"token {index}"] = (pieces[index] if index < len(pieces) else None, token)
    for what, (there, own) in pairs.items():
        if there != own:
            said = f"{what} in the GGUF file is not the tokenizer's ({there!r:.60}, not {own!r:.60})"
            raise MergeError(f"{said}; nothing was written")
    return len(tokenizer) if bpe else 0, template is not None


def chat_template(tokenizer: Any) -> str | None:
    """The default one, where the tokenizer has several."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def stored_tensors(merged: Path, architecture: str, config: dict[str, Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name, name in GGUF, tensor) of each tensor of a merged directory; of an unknown one its own name twice."""
    import gguf

    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    layers = config.get("num_hidden_layers") or config.get("text_config", {}).get("num_hidden_layers", 0)
    names = gguf.get_tensor_name_map(kind, layers)
    for shard in sorted(merged.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, names.get_name(name, try_suffixes=(".weight", ".bias")) or name, file.get_tensor(name)


def to_llama_order(name: str, tensor: torch.Tensor, architecture: str, config: dict[str, Any]) -> torch.Tensor:
    """A tensor with its rows where llama.cpp has them: of a llama, rotary pairs lie beside each other, and not in halves."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if architecture != "llama" or heads is None:
        return tensor
    count = config.get(heads) or config["num_attention_heads"]
    return tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def difference(found: Any, tensor: torch.Tensor) -> float | None:
    """The Frobenius |found - tensor| / |tensor|; None for another shape, or other bits in bf16, f16 or f32."""
    from gguf.quants import dequantize

    values = torch.from_numpy(dequantize(found.data, found.tensor_type).copy())
    if values.shape != tensor.shape:
        return None
    if (dtype := DTYPES.get(found.tensor_type.name)) is not None:
        return 0.0 if torch.equal(values, tensor.to(dtype).float()) else None
    return float((values - tensor.float()).norm() / tensor.float().norm().clamp_min(1e-30))


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
    """A chat template that puts fixed texts around each content. default: before the first turn without a system message.
    system: around one, None where the template takes none."""

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
    """Without a chat template: the prompt as it is, or around a hole where the tokenizer knows fill-in-the-middle."""
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
