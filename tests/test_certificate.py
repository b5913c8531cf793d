"""Certificates: the chain from a trained adapter to its merge and its GGUF file, each link broken once."""

import json
import shutil
from pathlib import Path
from typing import Any

import builders
import pytest
from chat_tokenizers import chat_tokenizer
from peft import PeftModel
from test_export import real
from test_merge_witness import reversed_rows, speaking, trained
from transformers import GptOssConfig, LlamaConfig

from cogumi.core.errors import UsageError
from cogumi.hub.upload import describe_certificate
from cogumi.merge import merge_adapter
from cogumi.merge.certificate import CERTIFICATE_NAME, certify
from cogumi.merge.export import export_model
from cogumi.merge.merge_manifest import check_merged
from cogumi.merge.witness import WITNESS_NAME, write_witness

Chain = tuple[Path, Path, Path]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """Return a base, an adapter with its witness, and their merge."""
    base, adapter, _ = trained(tmp_path, "llama")
    return base, adapter, merge_adapter(adapter, tmp_path / "merged", base=base, progress=False).out


def passed_of(certificate: Any) -> list[bool | None]:
    return [step.passed for step in certificate.steps]


def test_a_whole_chain(chain: Chain, tmp_path: Path) -> None:
    base, adapter, merged = chain
    certificate = certify(adapter, merged, base=str(base))
    assert passed_of(certificate) == [True, True, True]
    written = json.loads((merged / CERTIFICATE_NAME).read_text())
    assert written["passed"]
    assert set(written["subjects"]) == {"adapter", "merged"}
    assert str(tmp_path) not in json.dumps(written["steps"])
    check_merged(merged, progress=False)  # the certificate is no foreign file
    assert "| trained model, merged model |" in describe_certificate(merged)[0]
    builders.edit_tensors(merged, lambda name, tensor: tensor * 2)
    assert describe_certificate(merged) == []  # it is about other weights


def test_answers_are_run_too(tmp_path: Path) -> None:
    base, adapter, answers = speaking(tmp_path)
    merged = merge_adapter(adapter, tmp_path / "merged", base=base, progress=False).out
    certificate = certify(adapter, merged, prompts=answers, base=str(base))
    assert passed_of(certificate) == [True, None, True, True]
    assert "2 prompts of answers.jsonl" in str(certificate)


def test_weights_that_were_changed(chain: Chain) -> None:
    base, adapter, merged = chain
    builders.edit_tensors(merged, lambda name, t: -t if name == "model.layers.0.mlp.up_proj.weight" else t)
    certificate = certify(adapter, merged, base=str(base))
    assert passed_of(certificate) == [False, False, False]
    assert certificate.file is None
    assert not (merged / CERTIFICATE_NAME).exists()


def test_a_merge_of_another_adapter(chain: Chain) -> None:
    base, adapter, merged = chain
    builders.edit_tensors(adapter, reversed_rows)
    certificate = certify(adapter, merged, base=str(base))
    assert passed_of(certificate) == [False, True, False]
    assert "was merged from another adapter" in str(certificate)


def test_what_the_merge_was_told_is_read_from_its_manifest(tmp_path: Path) -> None:
    """A square stack of gpt-oss by PEFT 0.18 has two readings: the certificate takes the one that the merge was given."""
    sizes = builders.SIZES | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    base = builders.save_base(tmp_path / "base", GptOssConfig(**sizes, architectures=["GptOssForCausalLM"]))
    adapter = builders.train_adapter(base, tmp_path / "adapter", target_modules=[], target_parameters=["down_proj"])
    builders.edit_config(adapter, peft_version="0.19.1")
    with pytest.raises(UsageError, match="is square"):
        merge_adapter(adapter, tmp_path / "merged", base=base, progress=False)
    options: dict[str, Any] = {"expert_layout": "axis2", "dtype": "float32", "progress": False}
    merged = merge_adapter(adapter, tmp_path / "merged", base=base, **options).out
    assert passed_of(certify(adapter, merged, base=str(base))) == [True, None, True]


def test_a_weighted_merge_is_not_the_adapters(tmp_path: Path) -> None:
    base, adapter, _ = trained(tmp_path, "llama")
    merged = merge_adapter([(adapter, 0.5)], tmp_path / "merged", base=base, progress=False).out
    (merged / CERTIFICATE_NAME).write_text("{}")
    certificate = certify(adapter, merged, base=str(base))
    assert passed_of(certificate) == [False, False, False]
    assert "a weighted sum of 1 adapters" in str(certificate)
    assert not (merged / CERTIFICATE_NAME).exists(), "an earlier one does not stay"


def test_too_little_memory_leaves_links_unknown(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter, merged = chain
    monkeypatch.setattr("cogumi.merge.logits.free_memory", lambda device: 1 << 20)
    assert passed_of(certify(adapter, merged, base=str(base))) == [True, None, None]


def test_a_merge_by_peft(tmp_path: Path) -> None:
    base, adapter, live = trained(tmp_path, "llama")
    live.merge_and_unload().save_pretrained(tmp_path / "merged")
    shutil.copy(base / "tokenizer.json", tmp_path / "merged")
    assert passed_of(certify(adapter, tmp_path / "merged", base=str(base))) == [None, True, True]
    (adapter / WITNESS_NAME).unlink()
    assert passed_of(certify(adapter, tmp_path / "merged", base=str(base))) == [None, None, True]


@real
def test_a_gguf_file_is_the_last_link(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen2_5")
    sizes = builders.SIZES | {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 128}
    config = LlamaConfig(
        **sizes, architectures=["LlamaForCausalLM"], bos_token_id=None, eos_token_id=tokenizer.eos_token_id
    )
    base = builders.save_base(tmp_path / "base", config)
    tokenizer.save_pretrained(base)
    adapter = builders.train_adapter(base, tmp_path / "adapter", target_modules=builders.LINEARS)
    write_witness(adapter, PeftModel.from_pretrained(builders.load(base), str(adapter)), tokenizer)
    merged = merge_adapter(adapter, tmp_path / "merged", base=base, progress=False).out
    for source, passed in ((merged, True), (base, False)):
        gguf = export_model(source, tmp_path / f"{source.name}-gguf", "q8_0").out
        certificate = certify(adapter, merged, gguf, base=str(base))
        assert passed_of(certificate)[3:] == ([True, True] if passed else [False])
        assert set(certificate.subjects["gguf"]) == {f"{source.name}-gguf-q8_0.gguf"}


@pytest.mark.parametrize(
    ("options", "key"),
    [({"merged": "nothing"}, "--merged"), ({"gguf": "no.gguf"}, "--gguf"), ({"prompts": "no.jsonl"}, "--prompts")],
)
def test_a_wrong_path_names_its_option(options: dict[str, str], key: str, tmp_path: Path) -> None:
    base, adapter, _ = trained(tmp_path, "llama")
    places: dict[str, Path] = {"merged": base} | {name: tmp_path / place for name, place in options.items()}
    with pytest.raises(UsageError) as error:
        certify(adapter, **places, base=str(base))  # type: ignore[arg-type]
    assert error.value.key == key
