"""GGUF export: found or not, whole or absent; and the real converter where it is installed."""

import os
import re
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch
from golden import Golden
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from cogumi.core.errors import UsageError
from cogumi.core.formatting import pip_command, python_command
from cogumi.merge.gguf import export_gguf, find_converter, gguf_arguments, gguf_path, install_hint

INSTALLED = find_converter()

# Stands in for the converter to record what it is called with; what the real one makes of it is tested below.
RECORDER = """\
import json, os, sys
from pathlib import Path

arguments = sys.argv[1:]
out = Path(arguments[arguments.index("--outfile") + 1])
Path(os.environ["RECORD"]).write_text(json.dumps([arguments, [path.name for path in out.parent.glob("*.gguf")]]))
out.write_bytes(os.environ.get("CONTENT", "GGUF and so on").encode())
print("INFO: exporting")
sys.exit(os.environ.get("COMPLAINT"))
"""


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    path = tmp_path / "merged"
    path.mkdir()
    return path


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH without a converter, and an environment without one; the directory that PATH consists of."""
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "convert_hf_to_gguf", None)
    return path


@pytest.fixture
def recorder(nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in converter on PATH; the file it records into."""
    script = nowhere / "convert_hf_to_gguf.py"
    script.write_text(f"#!{sys.executable}\n{RECORDER}")
    script.chmod(0o755)
    monkeypatch.setenv("RECORD", str(tmp_path / "record.json"))
    return tmp_path / "record.json"


def test_without_a_converter_nothing_is_written_and_the_command_is_known(merged: Path, nowhere: Path) -> None:
    assert find_converter() is None
    assert export_gguf(merged) is None
    assert sorted(path.name for path in merged.parent.iterdir()) == ["bin", "merged"]
    hint = install_hint(merged, gguf_path(merged))
    assert "\n" not in hint
    _, install, last_words = hint.split(" && ")
    assert install == pip_command("install -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt")
    assert last_words.startswith(f"{python_command()} ")
    last = shlex.split(last_words)[1:]
    out = f"{merged.parent}/merged-bf16.gguf"
    assert last == ["llama.cpp/convert_hf_to_gguf.py", str(merged), "--outfile", out, "--outtype", "bf16"]


def test_the_file_appears_under_its_name_when_it_is_whole(merged: Path, recorder: Path) -> None:
    out = export_gguf(merged)
    assert out == merged.parent / "merged-bf16.gguf"
    assert out.read_bytes() == b"GGUF and so on"
    text = recorder.read_text()
    assert f'[["{merged}", "--outfile", "{merged.parent}/merged-bf16.partial-' in text
    assert text.endswith('"--outtype", "bf16"], []]')  # and no .gguf lay there while it ran
    assert list(merged.parent.glob("*.gguf")) == [out]


def test_the_converters_file_is_closed(merged: Path, recorder: Path, recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    assert export_gguf(merged) is not None
    assert not [each for each in recwarn if each.category is ResourceWarning]


def test_paths_with_spaces_and_relative_ones(tmp_path: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert export_gguf(Path("my model")) == tmp_path / "my model-bf16.gguf"
    command = gguf_arguments(Path("my model"), Path("o.gguf"))
    assert shlex.split(shlex.join(command)) == command
    assert str(tmp_path / "my model") in command


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("COMPLAINT", "BPE pre-tokenizer was not recognized", r"exit status 1: BPE pre-tokenizer was not recognized\)"),
        ("CONTENT", "something else", r"exit status 0: INFO: exporting\)"),
    ],
)
def test_a_failed_conversion_leaves_no_file_and_says_why(
    name: str, value: str, says: str, merged: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=says) as error:
        export_gguf(merged)
    assert recorder.exists()
    assert "\n" not in str(error.value)
    again = shlex.split(str(error.value).split("to see all: ")[1])
    assert again[-3:] == [str(gguf_path(merged)), "--outtype", "bf16"]
    assert not list(merged.parent.glob("*.gguf"))


def test_an_existing_file_is_refused(merged: Path, recorder: Path, golden: Golden) -> None:
    gguf_path(merged).write_bytes(b"mine")
    with golden.raises("merge", message="merged-bf16.gguf exists"):
        export_gguf(merged)
    assert gguf_path(merged).read_bytes() == b"mine"
    assert not recorder.exists()


def test_a_checkout_comes_first_and_must_hold_the_converter(
    tmp_path: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    on_path = find_converter()
    assert on_path == [str(tmp_path / "bin" / "convert_hf_to_gguf.py")]
    checkout = tmp_path / "llama.cpp"
    checkout.mkdir()
    monkeypatch.setenv("LLAMA_CPP_DIR", str(checkout))
    with golden.raises("merge", message="LLAMA_CPP_DIR="):
        find_converter()
    (checkout / "convert_hf_to_gguf.py").write_text(RECORDER)  # not executable: run by this Python
    assert find_converter() == [sys.executable, str(checkout / "convert_hf_to_gguf.py")]


def test_the_command_of_a_pip_package_is_found(nowhere: Path) -> None:
    script = nowhere / "convert-hf-to-gguf"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert find_converter() == [str(script)]


@pytest.mark.skipif(INSTALLED is None, reason="llama.cpp's converter is not installed (PATH or LLAMA_CPP_DIR)")
def test_the_real_converter_keeps_every_bit(tmp_path: Path) -> None:
    """A SentencePiece vocabulary, as the converter knows other tokenizers by the hash of published ones only."""
    sentencepiece = pytest.importorskip("sentencepiece")
    merged = tmp_path / "merged"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(merged)
    (tmp_path / "text").write_text("\n".join(re.findall(r".{1,60}", Path(__file__).read_text())))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(merged / "tokenizer"),
        vocab_size=512,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    os.remove(merged / "tokenizer.vocab")
    out = export_gguf(merged)
    assert out is not None
    content, weights = out.read_bytes(), load_file(merged / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"):
        assert weights[name].contiguous().view(torch.uint8).numpy().tobytes() in content, name
