"""A GGUF file read back and compared with the model and tokenizer that it was made of, and the Modelfile for Ollama.

What chat programs get wrong most is not in the weights: another chat template, another end of sequence. Both are compared with
the tokenizer's, and so are all tokens of a BPE vocabulary. Tensors in bf16, f16 and f32 are compared bit by bit with the
stored ones, quantized ones by their distance.

Ollama does not run the chat template in a GGUF file. If its own list has none that is near, it prompts the model without
one (ollama#6823), which the Modelfile says.
"""

import json
from collections.abc import Iterator
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
    another form. largest_error: of a tensor, the Frobenius |stored - tensor| / |tensor|. template: whether there is
    a chat template."""

    architecture: str
    tensors: int
    exact: int
    largest_error: float
    changed: tuple[str, ...]
    template: bool

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
    check_tokenizer(stored, tokenizer)
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
    return GgufCheck(
        architecture, len(reader.tensors), exact, worst, (*changed, *left), chat_template(tokenizer) is not None
    )


def check_tokenizer(stored: dict[str, Any], tokenizer: Any) -> None:
    """Raise MergeError where the file is for another tokenizer: chat template, end and beginning, tokens of a BPE."""
    pieces = stored["tokenizer.ggml.tokens"]
    pairs = {"the chat template": (stored.get("tokenizer.chat_template"), chat_template(tokenizer))}
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


def modelfile(gguf_name: str, tokenizer: Any) -> tuple[str, str]:
    """(the Modelfile, what it says of the template in one sentence)."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    stops, lines = [tokenizer.eos_token], [f"FROM ./{gguf_name}"]
    if chat_template(tokenizer) is None:
        template = fim_template(tokenizer)
        lines.append(f'TEMPLATE """{template}"""')
        said = "The tokenizer has no chat template: Ollama gives the model the prompt as it is"
        said += ", or around the hole that a suffix leaves." if template != "{{ .Prompt }}" else "."
    else:
        said = "No TEMPLATE: Ollama takes one of its own that is near the chat template, or none; llama.cpp runs the model's."
        end = text_after_answer(tokenizer)
        stops += sorted((token for token in special if token in end), key=end.index)[:1]
    lines += [f"PARAMETER stop {stop}" for stop in dict.fromkeys(stops) if stop in special]
    lines.append("PARAMETER repeat_penalty 1")  # as in training; Ollama's own default has been 1.1
    return "\n".join([f"# {said}", *lines]) + "\n", said


def fim_template(tokenizer: Any) -> str:
    """Without a chat template: the prompt as it is, or around a hole where the tokenizer knows fill-in-the-middle."""
    tokens = detect_fim_tokens(tokenizer)
    if tokens is None:
        return "{{ .Prompt }}"
    filled = tokens.prompt("{{ .Prompt }}", "{{ .Suffix }}", SPM if tokens.psm is None else PSM)
    return f"{{{{ if .Suffix }}}}{filled}{{{{ else }}}}{{{{ .Prompt }}}}{{{{ end }}}}"


def text_after_answer(tokenizer: Any) -> str:
    """What the chat template puts behind an answer; empty where it refuses the conversation."""
    turns = [{"role": "user", "content": "Fir5t"}, {"role": "assistant", "content": "An5wer"}]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition("An5wer")[2]
    except TemplateError:
        return ""
