"""Which LoRA a run trains: the defaults, DoRA and rsLoRA, NEFTune beside it, and what is no LoRA."""

from pathlib import Path
from typing import Any

import pytest
import torch
from golden import Golden
from peft import LoraConfig, get_peft_model
from qlora_runs import Config, as_gspo, short_sft, watch_trainers
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, TrainerCallback

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.run_directory import read_json
from cogumi.models.adapters import drop_casts, lora_config
from cogumi.training import run as training_run


@pytest.fixture
def sft(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Config:
    return short_sft(tiny_model, code_parquet, tmp_path / "run")


@pytest.fixture
def gspo(sft: Config) -> Config:
    return as_gspo(sft)


# ------------------------------------------------------------------------------------------------------------ defaults


def test_the_default_is_rank_16_on_every_linear_layer(sft: Config) -> None:
    assert load_config(sft).lora == {}
    config = lora_config({})
    assert (config.r, config.lora_alpha, config.lora_dropout, config.target_modules) == (16, 32, 0.0, "all-linear")


# --------------------------------------------------------------------------------------------------------- kinds of LoRA


def test_embeddings_are_a_target_like_others(sft: Config) -> None:
    result = cogumi.train(sft, lora__target_modules=["embed_tokens", "q_proj"], cogumi__merge=True)
    assert result.passed, str(result.verdict)


@pytest.mark.parametrize(
    ("method", "overrides", "scale"),
    [
        pytest.param(
            method, overrides, scale, id=f"{method}-{kind}", marks=[pytest.mark.sweep] if kind != "both" else []
        )
        for method in ("sft", "gspo")
        for kind, overrides, scale in [
            ("dora", {"lora__r": 4, "lora__use_dora": True}, 8.0),
            ("rslora", {"lora__r": 64, "lora__lora_alpha": 16, "lora__use_rslora": True}, 2.0),
            ("both", {"lora__r": 4, "lora__lora_alpha": 8, "lora__use_dora": True, "lora__use_rslora": True}, 4.0),
        ]
    ],
)
def test_its_kinds_are_trained_and_merged(
    method: str, overrides: Config, scale: float, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own checks hold the merge to the live adapter's logits and every element to what rounding allows."""
    trainers = watch_trainers(monkeypatch)
    result = cogumi.train(request.getfixturevalue(method), **overrides)
    assert result.passed, str(result.verdict)
    config = read_json(result.adapter / "adapter_config.json")
    expected = load_config(request.getfixturevalue(method), **overrides).lora
    assert {key: config[key] for key in expected} == expected
    layers = [module for module in trainers[0].model.modules() if hasattr(module, "lora_A")]
    assert len(layers) == 2 * 7
    assert {layer.scaling["default"] for layer in layers} == {scale}
    magnitudes = [p for name, p in trainers[0].model.named_parameters() if "magnitude" in name and p.requires_grad]
    assert len(magnitudes) == (14 if "lora__use_dora" in overrides else 0)


class Embedded(TrainerCallback):
    """What the input embeddings return while a model trains and while it is evaluated."""

    def __init__(self, trainer: Any) -> None:
        self.off: list[float] = []
        embeddings = trainer.model.get_input_embeddings()
        tokens = torch.arange(32).view(2, 16)

        def look(*_: Any, **__: Any) -> None:
            with torch.no_grad():
                self.off.append((embeddings(tokens) - embeddings.weight[tokens]).abs().max().item())

        self.on_pre_optimizer_step = self.on_evaluate = look  # type: ignore[method-assign, assignment]


def test_neftune_adds_its_noise_to_a_lora_run_and_takes_it_off(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha / sqrt(tokens x width), uniform (arXiv:2310.05914); none in evaluation, none in what is saved and merged."""
    seen: list[Embedded] = []
    fit = training_run.fit

    def watched(run: Any, trainer: Any, *rest: Any) -> Any:
        seen.append(Embedded(trainer))
        trainer.add_callback(seen[-1])
        return fit(run, trainer, *rest)

    monkeypatch.setattr(training_run, "fit", watched)
    trainers = watch_trainers(monkeypatch)
    sft["data"]["eval_rows"] = 4
    result = cogumi.train(sft, train__neftune_noise_alpha=5.0, lora__r=4)
    assert result.passed, str(result.verdict)
    before, *steps, after = seen[0].off
    bound = 5.0 / (16 * 64) ** 0.5
    assert all(bound * 0.9 < noise <= bound * 1.01 for noise in steps)
    assert len(steps) == 3
    assert (before, after) == (0, 0)
    embeddings = trainers[0].model.get_input_embeddings()
    assert not embeddings._forward_hooks
    plain = cogumi.train(sft, lora__r=4, cogumi__run_dir=f"{result.run_dir}-plain", cogumi__merge=False)
    assert seen[1].off == [0] * 5
    assert plain.series("loss") != result.series("loss")


# ------------------------------------------------------------------------------------------------------- input casts


def saved_step(model: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Logits and gradients of a step under bf16 autocast, and the bytes that autograd keeps for its backward."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    model.zero_grad()
    ids = torch.arange(96).reshape(2, 48) % 50
    torch.manual_seed(4)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return grads | {"logits": out.logits.detach()}, sum(value.nbytes() for value in kept.values())


@pytest.mark.parametrize(
    ("kind", "lora", "layers", "saves"),
    [
        ("llama", {"target_modules": "all-linear"}, 14, True),
        ("llama", {"target_modules": ["embed_tokens", "q_proj", "v_proj"]}, 4, True),
        ("four bit", {"target_modules": "all-linear"}, 0, False),  # bitsandbytes' layers cast only outside autocast
        ("mixtral", {"target_modules": ["q_proj", "v_proj"], "target_parameters": ["experts.gate_up_proj"]}, 4, True),
        ("llama", {"target_modules": "all-linear", "lora_dropout": 0.5}, 0, False),
        ("llama", {"target_modules": "all-linear", "use_dora": True}, 0, False),
    ],
)
def test_casts_are_left_to_autocast_where_no_bit_changes(
    kind: str, lora: dict[str, Any], layers: int, saves: bool
) -> None:
    from four_bit_models import quantize

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(**shape, num_local_experts=4) if kind == "mixtral" else LlamaConfig(**shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if kind == "four bit":
        model = quantize(model)
        model.is_loaded_in_4bit = True  # by which PEFT takes its layers for bitsandbytes
    model = get_peft_model(model, LoraConfig(r=4, **lora)).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32) / 8
    before, bytes_before = saved_step(model)
    assert drop_casts(model) == layers
    after, bytes_after = saved_step(model)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    print(f"{kind}, {lora}: {bytes_before:,} and {bytes_after:,} bytes are kept")
    assert bytes_after < bytes_before if saves else bytes_after == bytes_before
    model.eval()(input_ids=torch.tensor([[1, 2, 3]]))  # without autocast the inputs of float32 weights are cast again


def test_a_compiled_layer_follows_autocast() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    model = get_peft_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), lora_config({}))
    assert drop_casts(model) == 7
    part = model.get_base_model().model.layers[0].mlp
    compiled, inputs = torch.compile(part, backend="aot_eager", fullgraph=True), torch.randn(2, 8, 64).bfloat16()
    for within in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            assert torch.equal(compiled(inputs), part(inputs))


# -------------------------------------------------------------------------------------------------------- what is no LoRA


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "FOO"),
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("inference_mode", True),
        ("base_model_name_or_path", "someone/else"),
        ("revision", "main"),
        ("peft_version", "0.1"),
        ("init_lora_weights", "eva"),
        ("init_lora_weights", "corda"),
    ],
)
def test_what_makes_it_no_lora_or_has_no_effect_is_refused(key: str, value: Any, sft: Config, golden: Golden) -> None:
    with golden.raises("models", fix="drop it") as caught:
        load_config(sft, **{f"lora__{key}": value})
    assert f"lora.{key}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert key in LoraConfig.__dataclass_fields__
