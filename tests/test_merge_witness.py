"""What a model answered where it was trained refuses a merge that reads its adapter in another way."""

import json
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import FUSED, LINEARS, edit_tensors
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from cogumi.core.errors import UsageError
from cogumi.merge import MergeError, merge_adapter
from cogumi.merge.witness import WITNESS_NAME, read_witness, write_witness

CONFIGS = {
    "llama": LlamaConfig(**builders.SIZES | {"intermediate_size": 128}, architectures=["LlamaForCausalLM"]),
    "experts": Qwen3MoeConfig(**builders.SIZES, **builders.EXPERTS, architectures=["Qwen3MoeForCausalLM"]),
}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": LINEARS},
    "experts": {"target_modules": ["q_proj"], "target_parameters": FUSED},
}


def letters(path: Path) -> Any:
    """A tokenizer of single characters, with a chat template, saved to `path`."""
    vocabulary = {chr(code): code for code in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="~")
    fast.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    fast.save_pretrained(path)
    return fast


def trained(tmp_path: Path, kind: str, **options: Any) -> tuple[Path, Path, Any]:
    """A base, an adapter with its witness, and the live model, as a run leaves them."""
    base = builders.save_base(tmp_path / "base", CONFIGS[kind])
    tokenizer = letters(base)
    adapter = builders.train_adapter(base, tmp_path / "adapter", **TARGETS[kind])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, **options)
    live = PeftModel.from_pretrained(model, str(adapter))
    write_witness(adapter, live, tokenizer)
    return base, adapter, live


def group_experts(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The columns of lora_B of a stack of four experts, slowest first, as unsloth wrote them."""
    if "experts" not in name or "lora_B" not in name:
        return tensor
    return tensor.unflatten(1, (-1, 4)).transpose(1, 2).flatten(1)


def reversed_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0) if "lora_B" in name else tensor


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_right_merge_agrees(kind: str, tmp_path: Path) -> None:
    base, adapter, _ = trained(tmp_path, kind)
    report = merge_adapter(adapter, tmp_path / "merged", base=base, progress=False)
    assert report.witness is not None
    assert report.witness.passed
    assert report.witness.followed == pytest.approx(1, abs=0.05)
    assert "witness agrees with the trained model (cogumi" in str(report)
    manifest = json.loads((tmp_path / "merged" / "cogumi-merge.json").read_text())
    assert manifest["witness"]["measured"] == report.witness.measured


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", lambda adapter: builders.edit_config(adapter, lora_alpha=16)),
        ("llama", lambda adapter: edit_tensors(adapter, reversed_rows)),
        ("experts", lambda adapter: edit_tensors(adapter, group_experts)),
    ],
    ids=["alpha", "rows", "unsloth's columns"],
)
def test_an_adapter_read_in_another_way_is_refused(kind: str, change: Any, tmp_path: Path) -> None:
    base, adapter, _ = trained(tmp_path, kind)
    change(adapter)
    with pytest.raises(MergeError, match="witness DIFFERS FROM the trained model") as error:
        merge_adapter(adapter, tmp_path / "merged", base=base, progress=False)
    assert f"delete {WITNESS_NAME}" in str(error.value)
    assert not (tmp_path / "merged").exists()
    (adapter / WITNESS_NAME).unlink()
    assert merge_adapter(adapter, tmp_path / "merged", base=base, progress=False).witness is None


def test_a_base_quantized_in_training_shows_the_direction(tmp_path: Path) -> None:
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base, adapter, _ = trained(tmp_path, "llama", quantization_config=four_bits)
    report = merge_adapter(adapter, tmp_path / "merged", base=base, progress=False)
    assert report.witness is not None
    assert report.witness.bound is None
    assert "nf4" in report.witness.trained_with
    edit_tensors(adapter, lambda name, t: -t if "lora_B" in name else t)
    with pytest.raises(MergeError, match="witness DIFFERS"):
        merge_adapter(adapter, tmp_path / "other", base=base, progress=False)


@pytest.mark.parametrize("size", [0.03, 0.1, 0.6])
def test_a_small_update_is_judged_beside_its_rounding(size: float, tmp_path: Path) -> None:
    """In training it ran in float32, and its merge in bfloat16: a shift by rounding is no error of the update's size."""
    base = builders.save_base(tmp_path / "base", CONFIGS["llama"])
    adapter = builders.train_adapter(base, tmp_path / "adapter", **TARGETS["llama"])
    edit_tensors(adapter, lambda name, t: t * size if "lora_B" in name else t)
    live = PeftModel.from_pretrained(builders.load(base), str(adapter))
    write_witness(adapter, live, letters(tmp_path / "letters"))
    witness = merge_adapter(adapter, tmp_path / "merged", base=base, progress=False).witness
    assert witness is not None
    assert witness.scale_bound is not None
    record = load_file(adapter / WITNESS_NAME)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    with torch.no_grad():
        in_bfloat16 = merged(record["input_ids"]).logits[..., record["columns"]]
    # It is run in the dtype of the training, which differs less.
    assert witness.measured < (in_bfloat16 - record["live"]).double().square().mean().sqrt().item() / 2
    edit_tensors(adapter, lambda name, t: t * 1.1 if "lora_B" in name else t)
    with pytest.raises(MergeError, match="witness DIFFERS"):
        merge_adapter(adapter, tmp_path / "other", base=base, progress=False)


def test_a_sum_of_adapters_has_no_witness(tmp_path: Path) -> None:
    base, adapter, _ = trained(tmp_path, "llama")
    assert merge_adapter([(adapter, 0.5)], tmp_path / "merged", base=base, progress=False).witness is None


def test_a_damaged_witness_is_named(tmp_path: Path) -> None:
    base, adapter, _ = trained(tmp_path, "llama")
    path = adapter / WITNESS_NAME
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="is damaged") as error:
        merge_adapter(adapter, tmp_path / "merged", base=base, progress=False)
    assert str(path) in str(error.value)


def test_too_little_memory_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base, adapter, _ = trained(tmp_path, "llama")
    monkeypatch.setattr("cogumi.merge.logits.free_memory", lambda device: 1 << 20)
    assert merge_adapter(adapter, tmp_path / "merged", base=base, progress=False).witness is None
    assert "was not compared" in caplog.text


def test_a_model_that_does_not_run_costs_the_witness_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, adapter, live = trained(tmp_path, "llama")
    (adapter / WITNESS_NAME).unlink()
    live.base_model.model.model.layers[1] = torch.nn.Identity()  # returns no hidden states for keywords
    write_witness(adapter, live, letters(tmp_path / "letters"))
    assert "cannot record the logits of the trained model" in caplog.text
    assert not (adapter / WITNESS_NAME).exists()


def test_the_record_is_small(tmp_path: Path) -> None:
    _, adapter, live = trained(tmp_path, "llama")
    reference, _ = read_witness(adapter) or pytest.fail("no witness")
    assert reference.input_ids.shape == (1, 128)
    assert (adapter / WITNESS_NAME).stat().st_size < 100_000
    full = live(input_ids=reference.input_ids).logits[..., reference.columns]
    assert torch.allclose(full.float(), reference.live.float(), atol=0.05)


def speaking(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A base of 128 characters, a foreign adapter, and its owner's answers."""
    config = LlamaConfig(**builders.SIZES | {"vocab_size": 128}, architectures=["LlamaForCausalLM"])
    base = builders.save_base(tmp_path / "base", config)
    tokenizer = letters(base)
    adapter = builders.train_adapter(base, tmp_path / "adapter", target_modules=[*LINEARS, "lm_head"], lora_alpha=64)
    live = PeftModel.from_pretrained(builders.load(base), str(adapter))
    rows = []
    for prompt, text in (("def f(", "def f("), ([{"role": "user", "content": "sum"}], "<sum>")):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = live.generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
        rows.append({"prompt": prompt, "answer": tokenizer.decode(out[0, ids.shape[1] :])})
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base, adapter, tmp_path / "answers.jsonl"


def test_answers_of_the_owner(tmp_path: Path) -> None:
    base, adapter, answers = speaking(tmp_path)
    report = merge_adapter(adapter, tmp_path / "merged", base=base, witness=answers, progress=False)
    assert report.answers is not None
    assert (report.answers.answers, report.answers.by_base) == (2, 0)
    edit_tensors(adapter, reversed_rows)
    with pytest.raises(MergeError, match=r"witness DIFFERS: answer 1: after .* it says .*, not "):
        merge_adapter(adapter, tmp_path / "other", base=base, witness=answers, progress=False)
    assert not (tmp_path / "other").exists()


def test_answers_of_the_base_prove_nothing(tmp_path: Path) -> None:
    base, adapter, answers = speaking(tmp_path)
    tokenizer = letters(tmp_path / "tokenizer")
    ids = tokenizer("def", return_tensors="pt")["input_ids"]
    out = builders.load(base).generate(input_ids=ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    answers.write_text(json.dumps({"prompt": "def", "answer": tokenizer.decode(out[0, 3:])}))
    with pytest.raises(UsageError, match="the base alone gives all of these answers"):
        merge_adapter(adapter, tmp_path / "merged", base=base, witness=answers, progress=False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}', "line 1: KeyError"),
        ('{"prompt": "a", "answer": "b"}\nnot JSON', "line 2: JSONDecodeError"),
        ('{"prompt": "a", "answer": ""}', "line 1: prompt or answer is empty"),
        ('["a", "b"]', "line 1: TypeError"),
    ],
)
def test_a_file_of_answers_that_cannot_be_read(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text(text)
    with pytest.raises(UsageError, match=problem) as error:
        merge_adapter(tmp_path / "a", tmp_path / "merged", witness=tmp_path / "answers.jsonl", progress=False)
    assert error.value.key == "--witness"


def test_a_base_that_quantization_moved_further_than_the_adapter_tells_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = builders.save_base(tmp_path / "base", CONFIGS["llama"])
    adapter = builders.train_adapter(base, tmp_path / "adapter", **TARGETS["llama"])
    edit_tensors(adapter, lambda name, t: t * 0.01 if "lora_B" in name else t)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=four_bits)
    write_witness(adapter, PeftModel.from_pretrained(model, str(adapter)), letters(tmp_path / "letters"))
    assert merge_adapter(adapter, tmp_path / "merged", base=base, progress=False).witness is None
    assert "was not compared: quantization moved the base's logits by" in caplog.text
