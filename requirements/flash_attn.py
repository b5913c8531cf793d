"""Try flash-attn's wheel for a lane and this Python, and take it out again where it does not load. Exit status 0 either way.

    .venv/bin/python requirements/flash_attn.py stable

Which wheel: [[flash_attn]] in lanes.toml. Nothing needs flash-attn; without it runs use the kernel of the Hugging Face hub or
torch's sdpa, whichever works (cogumi/stack/probes.py).
"""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

from cogumi.stack.probes import HUB_FLASH_ATTN

TABLE = Path(__file__).with_name("lanes.toml")
SECONDS = 300.0  # for the import, from a disk that may be slow
# With a GPU also a forward and a backward pass: a build may load and have no code for this card.
LOADS = """
import flash_attn, torch
from cogumi.stack.probes import PROBES
if torch.cuda.is_available():
    PROBES["flash_attn"]("cuda")
"""


def main(lane: str, table: Path = TABLE) -> str:
    """What happened, in one line."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if is_installed() and not why_not():
        return f"flash-attn {importlib.metadata.version('flash-attn')}: installed, and it loads"
    entries = tomllib.loads(table.read_text())["flash_attn"]
    wheel = next((each for each in entries if (each["lane"], each["python"]) == (lane, python)), None)
    if wheel is None:
        return without(f"no wheel with a known hash for lane {lane} and Python {python}")
    # A URL with its hash: pip refuses another file.
    said = pip("install", "--no-deps", "--retries", "1", f"flash-attn @ {wheel['url']}#sha256={wheel['sha256']}")
    if said:
        return without(f"pip could not install {wheel['url']}: {said}")
    wrong = why_not()
    if not wrong:
        return f"flash-attn: installed, and it loads ({wheel['url']})"
    left = pip("uninstall", "--yes", "flash-attn")
    if left:
        sys.exit(f"flash-attn does not load ({wrong}), and pip cannot take it out: {left}")
    return without(f"its wheel does not load, and was taken out again: {wrong}")


def without(why: str) -> str:
    return f"flash-attn: not installed ({why}). Runs use {HUB_FLASH_ATTN} or torch's sdpa instead, whichever works."


def is_installed() -> bool:
    return any(importlib.metadata.distributions(name="flash-attn"))


def why_not() -> str:
    """The last line of what importing flash-attn printed, in a process of its own; "" where it loads."""
    command = [sys.executable, "-c", LOADS]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {SECONDS:.0f} s"
    return "" if ended.returncode == 0 else last_line(ended.stderr) or f"exit status {ended.returncode}"


def pip(*words: str) -> str:
    """The line of pip's error; "" where there is none."""
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    errors = "\n".join(line for line in done.stderr.splitlines() if line.startswith("ERROR:"))
    return "" if done.returncode == 0 else last_line(errors or done.stderr) or f"exit status {done.returncode}"


def last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


if __name__ == "__main__":
    print(main(*sys.argv[1:2], *map(Path, sys.argv[2:])))
