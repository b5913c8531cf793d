"""Which files end up beside the merged weights, judged by what transformers makes of them; and config.json."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SIZES
from golden import Golden
from multimodal_models import TOWER
from test_merge_witness import letters, trained
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Gemma3Config, LlamaConfig
from transformers import Gemma3ForConditionalGeneration as Gemma3

from cogumi.merge import merge_adapter
from cogumi.merge.output_directory import add_end_token, has_tokenizer, output_config, side_files

BASE_TEMPLATE = "base: {{ messages[0]['content'] }}"
OWN_TEMPLATE = "own: {{ messages[0]['content'] }}"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def base(tiny_model: Path, tmp_path: Path) -> Path:
    """A base as publishers make them: a chat template, a SentencePiece file, licences, and a README."""
    path = tmp_path / "base"
    shutil.copytree(tiny_model, path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = BASE_TEMPLATE
    tokenizer.save_pretrained(path)
    for name in ("tokenizer.model", "special_tokens_map.json", "generation_config.json", "README.md"):
        (path / name).write_text("{}")
    for name in ("LICENSE.txt", "LLAMA_LICENSE", "USE_POLICY.md", "Notice"):
        (path / name).write_text("terms")
    return path


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    for name in ("README.md", "adapter_config.json", "adapter_model.safetensors", "training_args.bin"):
        (path / name).write_text("the adapter's")
    return path


def save_tokenizer(base: Path, out: Path, template: str | None, token: str | None = None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = template
    if token:
        tokenizer.add_tokens([token])
    tokenizer.save_pretrained(out)
    return tokenizer


def copied(files: dict[str, Path], out: Path) -> Path:
    for name, source in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(source.read_bytes())
    return out


def owners(files: dict[str, Path], base: Path) -> dict[str, str]:
    return {name: "base" if path.is_relative_to(base) else "adapter" for name, path in files.items()}


def test_a_tokenizer_with_another_vocabulary_is_taken_whole(base: Path, adapter: Path, tmp_path: Path) -> None:
    trained = save_tokenizer(base, adapter, OWN_TEMPLATE, token="<|think|>")
    files = side_files(adapter, base)
    assert owners(files, base) == {
        "LICENSE.txt": "base",
        "LLAMA_LICENSE": "base",
        "Notice": "base",
        "USE_POLICY.md": "base",
        "chat_template.jinja": "adapter",
        "generation_config.json": "base",
        "tokenizer.json": "adapter",
        "tokenizer_config.json": "adapter",
    }
    merged = AutoTokenizer.from_pretrained(copied(files, tmp_path / "merged"))
    assert merged("a <|think|> b")["input_ids"] == trained("a <|think|> b")["input_ids"]
    assert len(merged) == len(trained) == len(AutoTokenizer.from_pretrained(base)) + 1
    assert merged.apply_chat_template(HELLO, tokenize=False) == "own: hello"


@pytest.mark.parametrize("older", [False, True])
def test_the_same_vocabulary_brings_the_bases_other_encodings(base: Path, adapter: Path, older: bool) -> None:
    save_tokenizer(base, adapter, OWN_TEMPLATE)
    if older:  # merges as "a b", which files of 2023 have, and a truncation that a trainer set
        content = json.loads((base / "tokenizer.json").read_text())
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
        content["truncation"] = {"max_length": 8, "strategy": "LongestFirst", "direction": "Right", "stride": 0}
        (base / "tokenizer.json").write_text(json.dumps(content))
    actual = owners(side_files(adapter, base), base)
    assert actual["tokenizer.model"] == "base"
    assert actual["tokenizer.json"] == actual["tokenizer_config.json"] == actual["chat_template.jinja"] == "adapter"
    assert "special_tokens_map.json" not in actual


@pytest.mark.parametrize("change", ["id", "merge", "added"])
def test_one_different_token_or_merge_is_another_vocabulary(base: Path, adapter: Path, change: str) -> None:
    save_tokenizer(base, adapter, None)
    content = json.loads((adapter / "tokenizer.json").read_text())
    if change == "id":
        one, other = list(content["model"]["vocab"])[-2:]
        vocabulary = content["model"]["vocab"]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    elif change == "merge":
        content["model"]["merges"].reverse()
    else:
        content["added_tokens"][-1]["content"] = "<|other|>"
    (adapter / "tokenizer.json").write_text(json.dumps(content))
    actual = side_files(adapter, base)
    assert "tokenizer.model" not in actual
    assert "chat_template.jinja" not in actual


@pytest.mark.parametrize("place", ["base", "settings"])
def test_the_bases_template_serves_a_tokenizer_of_its_vocabulary_that_has_none(
    base: Path, adapter: Path, place: str, tmp_path: Path
) -> None:
    """transformers reads chat_template.jinja before tokenizer_config.json, so the base's stays out where that has one."""
    save_tokenizer(base, adapter, None)
    if place == "settings":
        settings = json.loads((adapter / "tokenizer_config.json").read_text())
        (adapter / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": OWN_TEMPLATE}))
    merged = AutoTokenizer.from_pretrained(copied(side_files(adapter, base), tmp_path / "merged"))
    owner = "own" if place == "settings" else "base"
    assert merged.apply_chat_template(HELLO, tokenize=False) == f"{owner}: hello"


@pytest.mark.parametrize("template", [None, OWN_TEMPLATE])
def test_without_a_tokenizer_the_bases_and_still_the_adapters_template(
    base: Path, adapter: Path, template: str | None
) -> None:
    if template:
        (adapter / "chat_template.jinja").write_text(template)
    (adapter / "tokenizer_config.json").write_text("{}")  # no vocabulary, so no tokenizer
    files = side_files(adapter, base)
    assert owners(files, base)["tokenizer_config.json"] == owners(files, base)["special_tokens_map.json"] == "base"
    assert files["chat_template.jinja"].read_text() == (template or BASE_TEMPLATE)


def test_a_checkpoint_uses_the_tokenizer_of_the_run_around_it(base: Path, adapter: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_tokenizer(base, run, OWN_TEMPLATE, token="<|think|>")
    checkpoint, stranger = run / "checkpoint-40", run / "base-of-someone"
    shutil.copytree(adapter, checkpoint)
    shutil.copytree(adapter, stranger)
    assert side_files(checkpoint, base)["tokenizer.json"] == run / "tokenizer.json"
    assert side_files(stranger, base)["tokenizer.json"] == base / "tokenizer.json"
    (run / "training_args.bin").write_text("")
    assert side_files(stranger, base)["tokenizer.json"] == run / "tokenizer.json"
    save_tokenizer(base, checkpoint, OWN_TEMPLATE)
    assert side_files(checkpoint, base)["tokenizer.json"] == checkpoint / "tokenizer.json"


def test_a_text_tokenizer_at_the_adapter_does_not_lose_the_image_processor(base: Path, adapter: Path) -> None:
    save_tokenizer(base, adapter, None)
    (base / "preprocessor_config.json").write_text("{}")
    assert owners(side_files(adapter, base), base)["preprocessor_config.json"] == "base"
    (adapter / "processor_config.json").write_text("{}")
    actual = owners(side_files(adapter, base), base)
    assert actual["processor_config.json"] == "adapter"
    assert "preprocessor_config.json" not in actual


def test_remote_code_is_the_bases(base: Path, adapter: Path) -> None:
    for name in ("modeling_own.py", "custom_generate/generate.py"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text("the base's")
    save_tokenizer(base, adapter, None)
    for name in ("modeling_own.py", "tokenization_own.py"):
        (adapter / name).write_text("the adapter's")

    def code() -> dict[str, str]:
        return {name: owner for name, owner in owners(side_files(adapter, base), base).items() if name.endswith(".py")}

    plain = {"modeling_own.py": "base", "custom_generate/generate.py": "base"}
    assert code() == plain
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (adapter / "tokenizer_config.json").write_text(json.dumps(settings))
    assert code() == plain | {"tokenization_own.py": "adapter"}


def test_links_of_the_hubs_cache_are_followed_and_dangling_ones_refused(
    base: Path, adapter: Path, tmp_path: Path, golden: Golden
) -> None:
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    shutil.copytree(base, blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    merged = copied(side_files(adapter, snapshot), tmp_path / "merged")
    assert not [path for path in merged.iterdir() if path.is_symlink()]
    assert AutoTokenizer.from_pretrained(merged)("x = 1") == AutoTokenizer.from_pretrained(base)("x = 1")
    (blobs / "README.md").unlink()
    side_files(adapter, snapshot)  # not a file that is needed
    (blobs / "tokenizer.json").unlink()
    with golden.raises("merge", message="snapshot/tokenizer.json", fix="download"):
        side_files(adapter, snapshot)


def test_without_any_tokenizer(tmp_path: Path, adapter: Path, base: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert side_files(adapter, empty) == {}
    assert not has_tokenizer(side_files(adapter, empty))
    assert has_tokenizer(side_files(adapter, base))


def test_damaged_json_is_one_line(base: Path, adapter: Path, golden: Golden) -> None:
    save_tokenizer(base, adapter, None)
    (adapter / "tokenizer.json").write_text('{"model": ')
    with golden.raises("merge", message="adapter/tokenizer.json") as error:
        side_files(adapter, base)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------- config.json


def saved_config(config: Any, path: Path) -> dict[str, Any]:
    config.save_pretrained(path)
    return json.loads((path / "config.json").read_text())


def on_meta(kind: Any, config: dict[str, Any], path: Path) -> Any:
    """Build the model of a config.json as transformers reads it."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        return kind(AutoConfig.from_pretrained(path))


def test_quantization_goes_and_nothing_else(tmp_path: Path) -> None:
    quantized = LlamaConfig(**SIZES, dtype="bfloat16", eos_token_id=[1, 2])
    plain = saved_config(quantized, tmp_path / "plain")
    quantized.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    config = saved_config(quantized, tmp_path / "quantized")
    config["text_config"] = {"quantization_config": {"bits": 4}, "rope_scaling": {"factor": 2.0}}
    before = json.loads(json.dumps(config))
    out = output_config(config, dtype=None, is_untied=False, vocab_size=None)
    assert out == plain | {"text_config": {"rope_scaling": {"factor": 2.0}}}
    out["text_config"]["rope_scaling"]["factor"] = 4.0
    out["eos_token_id"].append(7)
    assert config == before  # a deep copy


def test_untied_and_resized_as_transformers_reads_it(tmp_path: Path) -> None:
    config = saved_config(LlamaConfig(**SIZES, tie_word_embeddings=True, dtype="float32"), tmp_path / "base")
    out = output_config(config, dtype="bfloat16", is_untied=True, vocab_size=264)
    model = on_meta(AutoModelForCausalLM.from_config, out, tmp_path / "out")
    config = model.config
    assert (config.tie_word_embeddings, config.vocab_size, config.dtype) == (False, 264, torch.bfloat16)
    assert not model.all_tied_weights_keys
    assert model.lm_head.weight.shape == model.model.embed_tokens.weight.shape == (264, SIZES["hidden_size"])


@pytest.mark.parametrize("recorded", [True, False])
def test_a_multimodal_config_changes_in_its_language_model(recorded: bool, tmp_path: Path) -> None:
    """Not recorded: Gemma 3 is tied by its class's default, which a file that says nothing has to be told."""
    full = Gemma3Config(text_config=SIZES, vision_config=TOWER, dtype="float32", mm_tokens_per_image=1)
    config = saved_config(full, tmp_path / "base")
    config["text_config"] |= {"torch_dtype": "float32", "dtype": "float32"}
    config["vision_config"] |= {"vocab_size": 9, "tie_word_embeddings": True}
    if not recorded:
        del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
        del config["text_config"]["vocab_size"]
    out = output_config(config, dtype="bfloat16", is_untied=True, vocab_size=264)
    assert out["vision_config"]["vocab_size"] == 9
    assert out["vision_config"]["tie_word_embeddings"] is True
    assert "vocab_size" not in out
    assert out["dtype"] == out["text_config"]["torch_dtype"] == out["text_config"]["dtype"] == "bfloat16"
    model = on_meta(Gemma3, out, tmp_path / "out")
    assert not model.all_tied_weights_keys
    assert model.lm_head.weight.shape == (264, SIZES["hidden_size"])


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_the_end_token_of_training_ends_what_the_merged_model_writes(base: Path, place: str) -> None:
    (base / "generation_config.json").unlink()
    before = json.loads((base / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(base)
    end, other = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")
    (base / place).write_text(json.dumps({**before, "eos_token_id": other}))
    add_end_token(base)
    assert AutoModelForCausalLM.from_pretrained(base).generation_config.eos_token_id == [end, other]
    written = (base / place).read_bytes()
    add_end_token(base)
    assert (base / place).read_bytes() == written


def test_a_merge_stops_at_the_end_token_of_the_adapters_tokenizer(tmp_path: Path) -> None:
    base, adapter, _ = trained(tmp_path, "llama")
    letters(adapter)
    report = merge_adapter(adapter, tmp_path / "merged", base=base, progress=False)
    before = AutoModelForCausalLM.from_pretrained(base).generation_config.eos_token_id
    assert AutoModelForCausalLM.from_pretrained(report.out).generation_config.eos_token_id == [ord("~"), before]
