"""The tokenizer of a merge or a run loads in transformers 4 and 5: the base's bytes, or the base's settings with the changes.

tokenizer_truths/make.py wrote the bases with transformers 4. What needs that version runs where TRANSFORMERS_4 names the
directory of its unpacked wheels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import SIZES, run_config, save_base, train_adapter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import cogumi
from cogumi.merge import merge_adapter
from cogumi.merge.tokenizer_files import settle_tokenizer

MAKE = Path(__file__).parent / "tokenizer_truths/make.py"
TRUTHS = json.loads((MAKE.parent / "transformers-4.57.6.json").read_text(encoding="utf-8"))
NAMES = sorted(TRUTHS.keys() - {"transformers"})
OWN_TEMPLATE = "own: {{ messages[0]['content'] }}"


def write_base(path: Path, name: str) -> dict[str, bytes]:
    """Write a tokenizer of transformers 4 with the config that names its family, and return its own files."""
    path.mkdir(exist_ok=True)
    for file, text in TRUTHS[name]["files"].items():
        if not (path / file).exists():
            (path / file).write_text(text, encoding="utf-8")
    return {file: text.encode() for file, text in TRUTHS[name]["files"].items() if file != "config.json"}


def saved_files(path: Path) -> dict[str, bytes]:
    kinds = ("token", "special", "vocab", "merges", "chat", "added")
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name.startswith(kinds)}


def as_training(tokenizer: Any) -> Any:
    """Set what training sets for itself: padding, its side, lengths, and the truncation of a call."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side, tokenizer.model_max_length = "left", 77
    tokenizer(["a b c"], truncation=True, max_length=2, padding="max_length")
    return tokenizer


def described_by_4(directory: Path) -> dict[str, Any]:
    older = os.environ.get("TRANSFORMERS_4")
    if older is None:
        pytest.skip("TRANSFORMERS_4 names no directory of transformers 4")
    environment = os.environ | {"PYTHONPATH": older}
    command = [sys.executable, MAKE, "--load", directory]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def settled(name: str, place: Path, change: Any = None) -> tuple[Path, dict[str, bytes]]:
    """Load a base's tokenizer, change it, save it with this transformers, and settle it."""
    expected = write_base(place / "base", name)
    tokenizer = as_training(AutoTokenizer.from_pretrained(place / "base"))
    if change is not None:
        change(tokenizer)
    tokenizer.save_pretrained(place / "own")
    settle_tokenizer(place / "own", place / "base")
    return place / "own", expected


@pytest.mark.parametrize("name", NAMES)
def test_an_unchanged_tokenizer_is_the_bases_byte_for_byte(name: str, tmp_path: Path) -> None:
    own, expected = settled(name, tmp_path)
    assert saved_files(own) == expected


@pytest.mark.parametrize("name", NAMES)
def test_another_template_changes_nothing_else(name: str, tmp_path: Path) -> None:
    def change(tokenizer: Any) -> None:
        tokenizer.chat_template = OWN_TEMPLATE

    own, expected = settled(name, tmp_path, change)
    settings = json.loads((own / "tokenizer_config.json").read_text())
    before = json.loads(expected["tokenizer_config.json"])
    assert (own / "tokenizer.json").read_bytes() == expected["tokenizer.json"]
    assert (own / "chat_template.jinja").read_text() == OWN_TEMPLATE
    moved = {"chat_template", "added_tokens_decoder", "extra_special_tokens"}  # the last is empty
    for values in (settings, before):
        values.pop("pad_token", None)
    assert settings == {key: value for key, value in before.items() if key not in moved}


@pytest.mark.parametrize("name", NAMES)
def test_transformers_4_reads_a_changed_tokenizer(name: str, tmp_path: Path) -> None:
    def change(tokenizer: Any) -> None:
        tokenizer.chat_template = OWN_TEMPLATE
        if name == "qwen2":
            tokenizer.add_special_tokens({"extra_special_tokens": ["<tool>"]}, replace_extra_special_tokens=False)

    own, _ = settled(name, tmp_path, change)
    actual, truth = described_by_4(own), TRUTHS[name]["truth"]
    more = ["<tool>"] if name == "qwen2" else []
    assert actual == truth | {"chat": "own: hello", "special": sorted([*truth["special"], *more])}


def test_added_tokens_join_those_of_the_base(tmp_path: Path) -> None:
    def change(tokenizer: Any) -> None:
        tokenizer.add_special_tokens({"extra_special_tokens": ["<tool>"]}, replace_extra_special_tokens=False)
        tokenizer.eos_token = "<end_of_turn>"

    own, _ = settled("gemma", tmp_path, change)
    settings = json.loads((own / "tokenizer_config.json").read_text())
    assert settings["additional_special_tokens"] == ["<start_of_turn>", "<end_of_turn>", "<tool>"]
    assert (settings["tokenizer_class"], settings["eos_token"]) == ("GemmaTokenizerFast", "<end_of_turn>")
    assert not settings.keys() & {"backend", "is_local", "local_files_only", "extra_special_tokens", "mask_token"}
    content = json.loads((own / "tokenizer.json").read_text())
    assert content["truncation"] is content["padding"] is None
    assert AutoTokenizer.from_pretrained(own)("<tool>", add_special_tokens=False)["input_ids"][0] > 300


def test_a_tokenizer_without_its_base_gets_names_of_transformers_4(tiny_model: Path, tmp_path: Path) -> None:
    """As where the base has none, or one of another class: everything is the adapter's own."""
    (tmp_path / "base").mkdir()
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "own")
    settle_tokenizer(tmp_path / "own", tmp_path / "base")
    settings = json.loads((tmp_path / "own/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "<fim_prefix>" in settings["additional_special_tokens"]
    assert not settings.keys() & {"backend", "is_local", "local_files_only", "extra_special_tokens"}


def test_a_tokenizer_that_cannot_be_loaded_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_base(tmp_path / "base", "llama3")
    AutoTokenizer.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "own")
    settings = json.loads((tmp_path / "own/tokenizer_config.json").read_text())
    remote = settings | {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "own/tokenizer_config.json").write_text(json.dumps(remote))
    before = (tmp_path / "own/tokenizer.json").read_bytes()
    settle_tokenizer(tmp_path / "own", tmp_path / "base")
    assert "cannot compare the tokenizers" in caplog.text
    assert (tmp_path / "own/tokenizer.json").read_bytes() == before
    assert json.loads((tmp_path / "own/tokenizer_config.json").read_text())["tokenizer_class"] == "OwnTokenizer"


def test_a_classifier_keeps_its_padding(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "llama3")
    tokenizer = as_training(AutoTokenizer.from_pretrained(tmp_path / "base"))
    tokenizer.save_pretrained(tmp_path / "own")
    (tmp_path / "own/config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    settle_tokenizer(tmp_path / "own", tmp_path / "base")
    settings = json.loads((tmp_path / "own/tokenizer_config.json").read_text())
    assert (settings["pad_token"], settings["tokenizer_class"]) == ("<|endoftext|>", "PreTrainedTokenizerFast")


@pytest.fixture
def llama3(tmp_path: Path) -> Path:
    """A whole Llama whose tokenizer transformers 4 wrote."""
    base = save_base(tmp_path / "llama3", LlamaConfig(**SIZES | {"vocab_size": 260}))
    write_base(base, "llama3")
    return base


def test_a_merge_takes_the_bases_tokenizer_for_one_that_transformers_5_wrote(llama3: Path, tmp_path: Path) -> None:
    adapter = train_adapter(llama3, tmp_path / "adapter", target_modules=["q_proj"])
    as_training(AutoTokenizer.from_pretrained(llama3)).save_pretrained(adapter)
    assert "TokenizersBackend" in (adapter / "tokenizer_config.json").read_text()
    merge_adapter(adapter, tmp_path / "out", progress=False)
    assert saved_files(tmp_path / "out") == saved_files(llama3)
    assert cogumi.merge.check_merged(tmp_path / "out").elements


@pytest.mark.slow("two runs")
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_run_keeps_the_bases_tokenizer(tuning: str, llama3: Path, code_parquet: Path, tmp_path: Path) -> None:
    sections = {"tuning": tuning, "merge": tuning == "lora"}
    config = run_config("sft", llama3, code_parquet, tmp_path / "run", cogumi=sections)
    if tuning == "full":
        del config["lora"]
    result = cogumi.train(config)
    assert result.merged
    for place in filter(None, (result.merged, result.adapter)):
        assert saved_files(place) == saved_files(llama3)


@pytest.mark.parametrize(("rows", "is_warned"), [(256, True), (320, False)])
def test_tokens_without_a_row_are_said(
    rows: int, is_warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT leaves a resized embedding out where it does not find the base's config, as without a network."""
    base = save_base(tmp_path / "base", LlamaConfig(**SIZES | {"vocab_size": rows}))
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    words = Tokenizer(WordLevel({str(number): number for number in range(256)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0")
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(adapter)
    merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    assert ("the tokenizer has token 256 and the model 256 rows" in caplog.text) == is_warned
