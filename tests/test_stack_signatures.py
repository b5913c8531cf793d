"""Failure signatures: each against its real message in tests/signatures/NAME.txt, whose first line says where it is from."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from textwrap import indent, wrap
from typing import Any

import pytest

from cogumi.core import signatures as module
from cogumi.core.signatures import explain, explain_text, signatures

HERE = Path(__file__).parent
FIXTURES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "signatures").glob("*.txt"))}
MESSAGES = tomllib.loads((HERE / "signatures" / "messages.toml").read_text(encoding="utf-8"))
# The same failures in other words, for the patterns that no fixture is for.
OTHER_WORDS = [(entry["name"], entry["text"]) for entry in MESSAGES["other_words"]]
UNRELATED = MESSAGES["unrelated"]
WRITTEN = tomllib.loads(Path(module.__file__).with_name("signatures.toml").read_text(encoding="utf-8"))
EVERY_PATTERN = [(name, pattern) for name, entry in WRITTEN.items() for pattern in entry["patterns"]]


def message(name: str) -> str:
    return FIXTURES[name].split("\n", 1)[1]


def names(text: str) -> list[str]:
    return [diagnosis.name for diagnosis in explain(text)]


def misread(messages: Iterable[tuple[str, str]]) -> list[tuple[str, list[str], str]]:
    """Which of the messages are not known by the signature given with them, and by no other."""
    return [(name, names(text), text[:100]) for name, text in messages if names(text) != [name]]


# --- the table --------------------------------------------------------------------------------------------------------


def test_there_is_a_real_message_for_every_signature_and_none_too_many() -> None:
    assert set(FIXTURES) == {signature.name for signature in signatures()}


def test_a_real_message_is_known_by_its_own_signature_and_by_no_other() -> None:
    assert misread((name, message(name)) for name in FIXTURES) == []


def test_a_fixture_says_where_it_is_from() -> None:
    origins = {name: text.split("\n", 1)[0] for name, text in FIXTURES.items()}
    known = re.compile(r"# (https://github\.com/\S+/(issues|pull)/\d+|produced here with \S)")
    assert [name for name, origin in origins.items() if not known.match(origin)] == []


def test_the_table_is_complete_and_repeats_nothing() -> None:
    assert len({pattern for _, pattern in EVERY_PATTERN}) == len(EVERY_PATTERN)
    for signature in signatures():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", signature.name)
        assert signature.cause.endswith(".")
        assert signature.fix
        assert signature.source
        assert set(signature.follows) <= set(FIXTURES) - {signature.name}
    assert len({signature.fix for signature in signatures()}) == len(signatures())


def test_every_command_of_ours_that_a_fix_names_exists() -> None:
    from typer.main import get_command

    from cogumi.cli.app import app

    root: Any = get_command(app)
    named = re.findall(r"`cogumi ([a-z-]+)(?: ([a-z-]+))?", " ".join(signature.fix for signature in signatures()))
    assert named
    for command, below in named:
        assert command in root.commands
        assert not below or below in root.commands[command].commands
    assert (HERE.parent / "requirements" / "install.sh").is_file()
    assert (HERE.parent / "docs" / "stack.md").is_file()


def test_every_setting_that_a_fix_names_is_one() -> None:
    from cogumi.config.schema import load_config

    fixes = " ".join(signature.fix for signature in signatures())
    settings = set(re.findall(r"`?(model|train)((?:\.(?!resize)[a-z_0-9]+)+)(?:=([\w./@-]+))?", fixes))
    assert settings
    for section, rest, value in settings:
        # One refused by TRL or transformers raises; what the fix only names is set to a number.
        smoke = "smoke/gspo" if "vllm" in rest else "smoke/sft"
        name = f"{section}{rest}".replace(".", "__")
        typed = {"true": True, "false": False, "0": 0, "": 1}.get(value, value)
        load_config(HERE.parent / "cogumi" / "configs" / f"{smoke}.yaml", **{name: typed})


def test_importing_and_explaining_loads_no_torch() -> None:
    code = (
        "import sys; from cogumi.core.signatures import explain_text; print(explain_text('CUDA error: out of memory')); "
        "print([name for name in ('torch', 'numpy', 'transformers', 'pydantic') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.splitlines()[-1] == "[]"


def test_other_words_for_a_failure_are_known_too() -> None:
    assert misread(OTHER_WORDS) == []


def test_there_is_a_message_for_every_pattern() -> None:
    def is_met(name: str, pattern: str) -> bool:
        compiled = re.compile(pattern.replace(" ", module.GAP))
        return any(compiled.search(text) for known, text in [*OTHER_WORDS, (name, message(name))] if known == name)

    assert [each for each in EVERY_PATTERN if not is_met(*each)] == []


def paragraphs(name: str) -> list[str]:
    return re.split(r"\n{2,}", message(name).strip())


def test_a_part_of_a_message_is_enough() -> None:
    parts = [("pip-conflict", part) for part in paragraphs("pip-conflict") if not part.startswith("To fix")]
    for word in ("conflicts", "incompatible"):
        parts += [("pip-broke-others", line) for line in message("pip-broke-others").splitlines() if word in line]
    parts += [(name, paragraphs(name)[0]) for name in ("gated-not-logged-in", "gated-no-access")]
    parts += [("gated-no-access", "\n\n".join(paragraphs("gated-no-access")).rsplit("\n", 1)[0])]
    assert misread(parts) == []


@pytest.mark.parametrize(
    "package", ["trl", "transformers", "peft", "accelerate", "datasets", "bitsandbytes", "unsloth"]
)
def test_a_missing_package_of_the_stack_is_known(package: str) -> None:
    code = f"import sys; sys.path.clear(); import {package}"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert names(done.stderr) == ["stack-package-missing"]


# --- patterns that cannot be slow -------------------------------------------------------------------------------------


def slow(pattern: str) -> str | None:
    """Why a search with this pattern could take longer than the text is long, times a constant; None if it cannot."""
    if not re.match(r"(?:[A-Za-z0-9 _`'/:=]|\\[.()\[\]]){3}(?![?{])", pattern):
        return "does not begin with three plain characters"
    if re.search(r"(?<!\\)[*+]", re.sub(r"\[[^]]*\]", "", pattern)):
        return "repeats without a bound"
    bounds = re.findall(r"\{(\d*),(\d+)\}", pattern)
    if prod(int(most) - int(least or 0) + 1 for least, most in bounds) > 2000:
        return "can be matched at one place in too many ways"
    # A space becomes module.GAP, which takes up to 200 characters of white space: beside it nothing else may take them.
    if re.search(r" (?:\.|\\S|\\D|\\W|\[\^)[^ ]*?\{\d*,\d{2,}\}|(?:\.|\\D|\\W|\[\^[^]]*\])\{\d*,\d{2,}\} ", pattern):
        return "repeats something beside a space that may be a space"
    return None


def test_no_pattern_can_be_slow() -> None:
    assert [(name, pattern, why) for name, pattern in EVERY_PATTERN if (why := slow(pattern))] == []


# --- what is not known ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", UNRELATED.values(), ids=UNRELATED)
def test_what_is_not_known_is_called_unknown(text: str) -> None:
    explanation = explain_text(text)
    assert explain(text) == ()
    assert explanation.last_line == text.splitlines()[-1]
    first, following = str(explanation).split("\n")
    assert (
        first == f"unknown: none of the {len(signatures())} known failures; the last line is: {explanation.last_line}"
    )
    assert following.startswith("  next: `cogumi doctor` checks this environment")
    assert explanation.as_dict()["known"] is False


@pytest.mark.parametrize("text", ["", "\n\n", " \r\n\t"])
def test_no_text_is_said_to_be_none(text: str) -> None:
    assert str(explain_text(text)) == "unknown: there is no text to explain"


# --- order ------------------------------------------------------------------------------------------------------------


# The messages of these signatures in a text, and the order in which they are named.
ORDERS = [
    ("glibc-too-old disk-full", "glibc-too-old disk-full"),  # two causes, as the text has them
    ("disk-full glibc-too-old", "disk-full glibc-too-old"),
    ("driver-too-old bf16-unsupported triton-no-driver", "driver-too-old bf16-unsupported triton-no-driver"),
    ("triton-no-driver driver-too-old", "driver-too-old triton-no-driver"),  # two streams that were collected apart
    (
        "cublas-not-created device-side-assert token-outside-vocabulary",
        "token-outside-vocabulary cublas-not-created device-side-assert",
    ),
    ("xformers-build cuda-out-of-memory", "cuda-out-of-memory xformers-build"),  # a warning comes last
]


@pytest.mark.parametrize(("text", "named"), ORDERS)
def test_the_root_cause_stands_first(text: str, named: str) -> None:
    assert names("".join(map(message, text.split()))) == named.split()


def test_a_cause_is_named_once_with_its_first_line() -> None:
    text = "step 1\n" + message("cuda-out-of-memory") * 3
    (diagnosis,) = explain(text)
    assert diagnosis.line_number == 2
    assert diagnosis.line.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 150.00 MiB.")


def test_a_cause_deep_in_a_chain_of_exceptions_stands_first() -> None:
    # produced with XFORMERS_MORE_DETAILS=1, xformers==0.0.35 and torch==2.13.0+cpu: the warning is printed before its cause
    text = """WARNING[XFORMERS]: xFormers can't load C++/CUDA extensions. xFormers was built for:
    PyTorch 2.10.0+cu128 with CUDA 1208 (you have 2.13.0+cpu)
Traceback (most recent call last):
  File ".venv/lib/python3.11/site-packages/torch/_ops.py", line 1516, in load_library
    ctypes.CDLL(path)
OSError: libcudart.so.12: cannot open shared object file: No such file or directory

The above exception was the direct cause of the following exception:

xformers._cpp_lib.xFormersInvalidLibException: xFormers can't load C++/CUDA extensions. xFormers was built for:
"""
    assert names(text) == ["cuda12-library-missing", "xformers-build"]


# --- noise ------------------------------------------------------------------------------------------------------------


def coloured(text: str) -> str:
    return re.sub(r"(\w+)(Error|: )", "\x1b[0;31m\\1\\2\x1b[0m", text)


def boxed(text: str) -> str:
    """As rich prints a traceback: wrapped at 96 columns, between borders."""
    options = {"drop_whitespace": False, "break_long_words": False, "break_on_hyphens": False}
    lines = [row for line in text.splitlines() for row in wrap(line, 96, **options) or [""]]
    return "\n".join(f"│ {line:<100} │" for line in lines)


def prefixed(prefix: str) -> Callable[[str], str]:
    return lambda text: indent(text, prefix, lambda line: True)


NOISE = {
    "colours": coloured,
    "colours as a notebook file spells them": lambda text: coloured(text).replace("\x1b", "\\u001b"),
    "ranks": prefixed("[rank0]: "),
    "processes": prefixed("(EngineCore pid=169) "),
    "timestamps": prefixed("2026-11-22 12:00:01,234 ERROR "),
    "times of a collector": prefixed("2026-11-22T12:00:01.123456789Z "),
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "a progress bar": lambda text: "  0%|          | 0/63 [00:00<?, ?it/s]\r  2%|▏  | 1/63 [00:07<07:41]\r" + text,
    "quoted as a reply": prefixed("> "),
    "a box": boxed,
    "ranks in a box": lambda text: prefixed("[rank0]: ")(boxed(text)),
    "a thousand lines around it": lambda text: "step\n" * 1000 + text + "bye\n" * 1000,
}


@pytest.mark.parametrize("noise", NOISE)
def test_noise_hides_no_message(noise: str) -> None:
    assert misread((name, NOISE[noise](message(name))) for name in FIXTURES) == []


def test_a_wrapped_message_is_known_and_shown_in_one_line() -> None:
    (diagnosis,) = explain("RuntimeError: CUDA out of\n    memory. Tried to\r\n    allocate 2.00 GiB\n")
    assert (diagnosis.name, diagnosis.line_number) == ("cuda-out-of-memory", 1)
    assert diagnosis.line == "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_a_line_of_source_code_around_a_frame_says_nothing() -> None:
    text = """File site-packages/torch/cuda/__init__.py:319, in _lazy_init()
    308 if not hasattr(torch._C, "_cuda_getDeviceCount"):
    309     raise AssertionError("Torch not compiled with CUDA enabled")
    310 if _cudart is None:
--> 319 torch._C._cuda_init()

RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU
"""
    assert names(text) == ["no-driver"]
    rich = '│   309 │   │   raise AssertionError("Torch not compiled with CUDA enabled")             │\n'
    assert names(rich) == []
    assert names(rich + "AssertionError: Torch not compiled with CUDA enabled\n") == ["torch-without-cuda"]


def test_a_very_long_line_is_shown_around_what_matched_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-the-environment")
    said = " token=a-secret-of-the-environment CUDA out of memory. Tried to allocate "
    text = "x" * 2_000_000 + said + "y " * 1_000_000
    (diagnosis,) = explain(text)
    assert "CUDA out of memory" in diagnosis.line
    assert "token=<redacted>" in diagnosis.line
    assert len(diagnosis.line) <= module.MAX_LINE_CHARS
    assert "a-secret-of" not in json.dumps(explain_text("hf: a-secret-of-the-environment").as_dict())


# --- what is printed --------------------------------------------------------------------------------------------------


def test_an_explanation_names_cause_line_and_fix() -> None:
    explanation = explain_text(message("torchvision-pair"))
    said = str(explanation).splitlines()
    assert said[0].startswith("torchvision-pair: torchvision is of another release than torch")
    assert said[1].endswith(": RuntimeError: operator torchvision::nms does not exist")
    assert said[2].startswith("  fix: Put the lane's pair back: `sh requirements/install.sh`")
    as_dict = json.loads(json.dumps(explanation.as_dict()))
    assert as_dict["known"] is True
    assert as_dict["diagnoses"][0]["name"] == "torchvision-pair"
    assert as_dict["diagnoses"][0]["line_number"] == int(re.findall(r"line (\d+):", said[1])[0])
    line = message("torchvision-pair").splitlines()[as_dict["diagnoses"][0]["line_number"] - 1]
    assert line == "RuntimeError: operator torchvision::nms does not exist"
