"""What becomes of an adapter that was trained on quantized weights: its merge, and the checks that it has to pass."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import FinishedRun
from qlora_runs import Config, check, four_bit_copy, four_bit_layers, qlora, watch_trainers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, MixtralConfig, Qwen3MoeConfig

import cogumi
from cogumi.core.run_directory import read_json
from cogumi.models.quantization import expert_states
from cogumi.training import finish

BF16 = torch.bfloat16


@pytest.fixture
def sft(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Config:
    return qlora(tiny_model, code_parquet, run_dir=str(tmp_path / "run"))


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return watch_trainers(monkeypatch)


# ------------------------------------------------------------------------------------------------- the merge's checks


def replace_tensor(path: Path, name: str, value: torch.Tensor) -> None:
    save_file(load_file(path) | {name: value}, path, metadata={"format": "pt"})


def test_a_merge_passes_and_says_what_it_was_compared_with(finished_qlora: FinishedRun) -> None:
    result = finished_qlora.result
    assert result.passed, str(result.verdict)
    figure = check(result, "merged logits").figure
    assert "those of the adapter on the full-precision base (it was trained on nf4)" in figure
    assert result.merged is not None
    assert "quantization_config" not in read_json(result.merged / "config.json")


@pytest.mark.slow("4-bit trainings on a CPU; one merge is in the fast tier")
def test_an_adapter_on_a_base_that_is_quantized_on_disk_is_merged_into_the_original(
    sft: Config, tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "tiny")
    sft["model"] = {"name": str(four_bit_copy(tiny_model, tmp_path / "tiny-bnb-4bit"))}
    result = cogumi.train(sft)
    assert result.passed, str(result.verdict)
    assert f"{result.merged}: {tmp_path / 'tiny'} with" in (result.run_dir / "run.log").read_text()
    assert "it was trained on nf4" in check(result, "merged logits").figure


def test_a_merge_that_lost_the_update_of_one_layer_fails(
    sft: Config, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge = finish.merge_adapter

    def wrongly(adapter: Path, out: Path, **more: Any) -> Any:
        report = merge(adapter, out, **more)
        name = "model.layers.1.mlp.down_proj.weight"
        replace_tensor(out / "model.safetensors", name, load_file(tiny_model / "model.safetensors")[name])
        return report

    monkeypatch.setattr(finish, "merge_adapter", wrongly)
    result = cogumi.train(sft, train__learning_rate=1e-2)
    (failed,) = (found for found in result.verdict.checks if not found.passed)
    assert failed.name == "merged logits"
    assert "rounds" not in failed.fix  # the update is larger than that, so the merge itself is at fault
    assert failed.fix.startswith("merge again: cogumi merge ")


@pytest.mark.slow("4-bit trainings on a CPU; one merge is in the fast tier")
def test_a_merge_of_another_adapter_than_the_live_one_fails(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    save = finish.save_adapter
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"

    def wrongly(*arguments: Any) -> Path:
        adapter = save(*arguments)
        file = adapter / "adapter_model.safetensors"
        replace_tensor(file, name, load_file(file)[name] * 1.001)
        return adapter

    monkeypatch.setattr(finish, "save_adapter", wrongly)
    result = cogumi.train(sft)
    failed = [found for found in result.verdict.checks if not found.passed]
    assert [found.name for found in failed] == ["saved adapter"]
    assert failed[0].figure == f"1 tensors differ from the live adapter's, the first is {name}"


@pytest.mark.slow("4-bit trainings on a CPU; one merge is in the fast tier")
def test_a_merge_too_large_to_compare_says_so(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cogumi.merge.logits.free_memory", lambda device: 1 << 20)
    result = cogumi.train(sft)
    assert result.passed  # every element was proven
    assert check(result, "merged logits").figure.startswith(
        "not compared: 1.0 GiB needed, 1.0 MiB free on cpu; to compare"
    )
    assert result.merged is not None
    assert (result.merged / "model.safetensors").exists()


# -------------------------------------------------------------------------------------------------- mixtures of experts

MIXTURES: dict[str, Callable[..., Any]] = {
    "mixtral": lambda **shape: MixtralConfig(**shape, num_local_experts=4),
    "qwen3_moe": lambda **shape: Qwen3MoeConfig(**shape, num_experts=4, moe_intermediate_size=64, head_dim=16),
    "gpt_oss": lambda **shape: GptOssConfig(**shape, num_local_experts=4, head_dim=16, original_max_position_embeddings=16),
}  # fmt: skip


@pytest.mark.slow("4-bit trainings on a CPU; one merge is in the fast tier")
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_trains_its_attention_and_its_experts_in_four_bits(
    kind: str, sft: Config, tiny_model: Path, tmp_path: Path, trainers: list[Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = MIXTURES[kind](
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=512, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(BF16).save_pretrained(tmp_path / kind)
    tokenizer.save_pretrained(tmp_path / kind)
    sft["model"] |= {"name": str(tmp_path / kind), "dtype": "bfloat16"}
    sft["lora"] = {
        "r": 4,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    result = cogumi.train(sft)
    assert result.passed, str(result.verdict)
    model = trainers[0].model
    assert {name.split(".")[-2] for name in four_bit_layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(expert_states(model)) == 2 * 2
    assert {state.dtype for state in expert_states(model).values()} == {BF16}
    assert not any(parameter.dim() == 3 for parameter in model.parameters())
    learned = {name: p for name, p in model.named_parameters() if "experts" in name and "lora_B" in name}
    assert len(learned) == 2 * 2
    assert all(p.abs().max() > 0 for p in learned.values())
    assert result.merged is not None
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=BF16).state_dict() for path in (tmp_path / kind, result.merged)
    )
    changed = {name for name in before if not before[name].equal(after[name])}
    assert {name.partition(".layers.0.")[2] for name in changed if ".layers.0." in name} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
