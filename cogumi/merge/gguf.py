"""GGUF for llama.cpp and what is built on it, through llama.cpp's own converter."""

import os
import secrets
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cogumi.core.errors import UsageError
from cogumi.core.formatting import pip, python_here

SCRIPT = "convert_hf_to_gguf.py"
# What the converter calls a type that keeps a merged model as it is, or nearly (q8_0). Smaller ones are llama-quantize's.
OUT_TYPES = ("bf16", "f16", "f32", "q8_0", "auto")


def find_converter() -> list[str] | None:
    """The words that start llama.cpp's converter, or None when it is not installed.

    LLAMA_CPP_DIR, a checkout of llama.cpp, comes first, run by this Python; then the script on PATH, then the command
    that pip packages of it bring, each run by whatever it names itself. Raises UsageError when LLAMA_CPP_DIR holds no
    converter.
    """
    checkout = os.environ.get("LLAMA_CPP_DIR")
    if checkout:
        script = Path(checkout) / SCRIPT
        if not script.is_file():
            raise UsageError(f"LLAMA_CPP_DIR={checkout} holds no {SCRIPT}", fix="set it to a checkout of llama.cpp")
        return [sys.executable, str(script)]
    for name in (SCRIPT, "convert-hf-to-gguf"):
        found = shutil.which(name)
        if found:
            return [found]
    return None


def gguf_path(merged: Path, outtype: str = "bf16") -> Path:
    """Where the export of a merged directory goes: beside it, as the directory itself is sealed by its manifest."""
    absolute = merged.absolute()
    return absolute.with_name(f"{absolute.name}-{outtype}.gguf")


def gguf_command(merged: Path, out: Path, outtype: str = "bf16", converter: list[str] | None = None) -> list[str]:
    """The words of the conversion; without a converter, as they would be in a fresh checkout of llama.cpp."""
    start = converter or ["python", f"llama.cpp/{SCRIPT}"]
    return [*start, str(merged.absolute()), "--outfile", str(out.absolute()), "--outtype", outtype]


def install_hint(merged: Path, out: Path, outtype: str = "bf16") -> str:
    """What to type where the converter is not installed: three shell commands in one line."""
    return (
        "git clone --depth 1 https://github.com/ggml-org/llama.cpp && "
        f"{pip('install -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt')} && "
        f"{python_here()} {shlex.join(gguf_command(merged, out, outtype)[1:])}"
    )


def export_gguf(merged: Path, outtype: str = "bf16") -> Path | None:
    """Convert a merged directory into one GGUF file beside it and return its path; None without a converter.

    outtype is one of OUT_TYPES. The file is written under another name and renamed when the converter has finished, so
    it is whole or absent. With None, install_hint has what to tell the user.

    Raises UsageError when outtype is unknown, the file exists, or the converter fails, with its last words.
    """
    if outtype not in OUT_TYPES:
        raise UsageError(f"export outtype={outtype!r} is not one of {', '.join(OUT_TYPES)}")
    out = gguf_path(merged, outtype)
    if os.path.lexists(out):
        raise UsageError(f"{out} exists", fix="remove it or move it away (an export never overwrites)")
    converter = find_converter()
    if converter is None:
        return None
    partial = out.with_name(f"{out.stem}.partial-{secrets.token_hex(4)}.gguf")
    command = gguf_command(merged, partial, outtype, converter)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode != 0 or not is_gguf(partial):
            last = next((line.strip() for line in reversed(done.stdout.splitlines()) if line.strip()), "no output")
            raise UsageError(
                f"the converter made no GGUF (exit status {done.returncode}: {last}); {merged} itself is whole",
                fix=f"to see all: {shlex.join(gguf_command(merged, out, outtype, converter))}",
            )
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return out


def is_gguf(path: Path) -> bool:
    """Whether the file begins as https://github.com/ggml-org/ggml/blob/master/docs/gguf.md says."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
