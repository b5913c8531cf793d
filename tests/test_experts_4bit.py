"""Stacked experts in 4 bits with real bitsandbytes, PEFT and TRL on a CPU: load, forecast, train, compile, resume, merge."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit
from builders import NF4, all_tensors, load, save_quantized
from peft import PeftModel, get_peft_model
from qlora_runs import logged_weights, qlora, train_until_failure, watch_trainers
from test_preflight import line_of, preflight
from test_training_unfinished import logged, the_same
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GptOssConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

import cogumi
from cogumi.compile.layers import compile_layers, left_out, prepare_four_bit
from cogumi.core.errors import UsageError
from cogumi.forecast.training_step import forecast_weights
from cogumi.methods.preparation import refuse_without_decoder
from cogumi.models.adapters import lora_config
from cogumi.models.base import RunBase
from cogumi.models.loading import TULU, load_model
from cogumi.models.quantization import count_weights, expert_states
from cogumi.patches import expert_quantizer, parametrized_lora
from cogumi.telemetry.throughput import flops_of

FOUR, EIGHT = {"load_in_4bit": True}, {"load_in_8bit": True}
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
KINDS: dict[str, Any] = {
    "gpt-oss": GptOssConfig(**SIZES, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, vocab_size=256),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, intermediate_size=128, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, vocab_size=256
    ),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=128, num_local_experts=4, vocab_size=256),
    "llama-4": Llama4TextConfig(
        **SIZES, intermediate_size=128, intermediate_size_mlp=128, num_local_experts=4, vocab_size=256
    ),
}
IDS = torch.arange(3, 67)[None] % 250


@pytest.fixture(autouse=True)
def unpatched_after() -> Iterator[None]:
    yield
    parametrized_lora.undo()
    expert_quantizer.undo()


@pytest.fixture(params=sorted(KINDS))
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_base(request.param, tmp_path / "base")


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    return save_base("gpt-oss", tmp_path / "base")


def save_base(kind: str, path: Path) -> Path:
    torch.manual_seed(0)
    build = Llama4ForCausalLM if kind == "llama-4" else AutoModelForCausalLM.from_config
    model = build(KINDS[kind])
    with torch.no_grad():
        for parameter in model.parameters():  # Llama 4 starts its experts at zero
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
    model.save_pretrained(path)
    return path


def dequantized(four: Any, base: Path) -> Any:
    """The oracle: the plain model in float64, each weight as it is read out of the 4 bits."""
    plain = load_model(str(base), dtype="float32").double()
    plain.config._experts_implementation = "eager"
    weights = dict(plain.named_parameters())
    with torch.no_grad():
        for path, module in four.named_modules():
            path = path.removeprefix("base_model.model.").replace(".base_layer", "")
            if isinstance(module, Linear4bit):
                weights[f"{path}.weight"].copy_(dequantize_4bit(module.weight.data, module.weight.quant_state))
            for name in getattr(module, "parametrizations", ()):
                held = module.parametrizations[name]
                weights[f"{path}.{name}"].copy_(dequantize_4bit(held.original, held[0].quant_state))
    return plain


def with_lora(model: Any, stacks: list[str]) -> Any:
    torch.manual_seed(1)
    adapted = get_peft_model(model, lora_config({"r": 4, "target_parameters": stacks or None}, model=model))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted


def gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    collected = {name: each.grad.double() for name, each in model.named_parameters() if each.grad is not None}
    return loss.detach(), collected


# ------------------------------------------------------------------------------------------------------------ loading


def test_each_stack_holds_what_bitsandbytes_makes_of_it(base: Path) -> None:
    four, plain = load_model(str(base), dtype="float32", quantization=FOUR), load_model(str(base), dtype="float32")
    states = expert_states(four)
    assert len(states) == 4
    for name in states:
        path, _, leaf = name.rpartition(".")
        stack = getattr(plain.get_submodule(path), leaf)
        packed, state = quantize_4bit(stack.data, compress_statistics=True, quant_type="nf4")
        assert torch.equal(getattr(four.get_submodule(path), leaf), dequantize_4bit(packed, state))
        held = four.get_submodule(path).parametrizations[leaf].original
        assert held.dtype == torch.uint8
        assert held.numel() == stack.numel() / 2


@pytest.mark.parametrize(
    "settings",
    [FOUR, EIGHT, FOUR | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}],
    ids=["nf4", "8-bit", "fp4"],
)
def test_the_forecast_of_the_weights_is_what_is_held_to_the_byte(base: Path, settings: dict[str, Any]) -> None:
    forecast = forecast_weights(AutoConfig.from_pretrained(base), torch.float32, settings)
    loaded = load_model(str(base), dtype="float32", quantization=settings)
    held = {parameter.untyped_storage().data_ptr(): parameter for parameter in loaded.parameters()}
    bare = sum(value.untyped_storage().nbytes() for value in held.values())
    assert count_weights(loaded) == forecast
    assert bare < forecast.bytes < 1.2 * bare  # the scales beside the weights


@pytest.mark.parametrize("on_disk", ["nf4", "fp4", "8-bit"])
def test_a_base_that_is_quantized_on_disk_is_forecast_to_the_byte(
    on_disk: str, tiny_model: Path, tmp_path: Path
) -> None:
    settings = {
        "nf4": NF4,
        "fp4": BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "down_proj"]),
        "8-bit": BitsAndBytesConfig(load_in_8bit=True),
    }[on_disk]
    save_quantized(tiny_model, tmp_path / "base", settings, dtype=torch.float32)
    forecast = forecast_weights(AutoConfig.from_pretrained(tmp_path / "base"), torch.float32, None)
    assert count_weights(load_model(str(tmp_path / "base"), dtype="float32")) == forecast
    assert forecast.quantized > 0.25


def test_skipped_modules_and_routers_stay_as_they_are(gpt_oss: Path) -> None:
    skipped = FOUR | {"llm_int8_skip_modules": ["lm_head", "layers.1.mlp.experts"]}
    four = load_model(str(gpt_oss), dtype="float32", quantization=skipped)
    assert {name.split(".")[2] for name in expert_states(four)} == {"0"}
    assert four.model.layers[0].mlp.router.weight.dtype == torch.float32


def test_most_of_gpt_oss_20b_is_in_four_bits_and_little_of_it_in_eight() -> None:
    """Its shapes alone. 24 layers of 32 experts are 19.1 of its 20.9 billion elements."""
    shapes = GptOssConfig(num_hidden_layers=24, num_local_experts=32)
    four = forecast_weights(shapes, torch.bfloat16, FOUR)
    assert 20.9e9 < sum(four.elements.values()) < 21e9
    assert four.quantized > 0.94
    assert four.bytes < 12 * 2**30
    assert forecast_weights(shapes, torch.bfloat16, EIGHT).quantized < 0.05


def test_the_flops_are_those_of_the_full_precision_model(gpt_oss: Path) -> None:
    four, plain = load_model(str(gpt_oss), quantization=FOUR), load_model(str(gpt_oss))
    assert flops_of(four).weights == flops_of(plain).weights


def test_unsloths_own_quantizer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    def theirs(*_: Any, **__: Any) -> bool:
        return False

    monkeypatch.setattr(theirs, "__module__", "unsloth_zoo.temporary_patches")
    monkeypatch.setattr(Bnb4BitHfQuantizer, "param_needs_quantization", theirs)
    assert not expert_quantizer.apply().applied
    monkeypatch.undo()
    assert expert_quantizer.apply().applied
    assert not expert_quantizer.undo().applied


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_model_whose_decoder_trl_does_not_find_is_refused_at_once(kind: str) -> None:
    """Llama 4: without the refusal TRL 1.15 fails at the first step, after the download."""
    config = copy.deepcopy(KINDS[kind])
    if kind != "llama-4":
        refuse_without_decoder(RunBase("base", None, config))
        return
    with pytest.raises(UsageError, match="finds no decoder") as caught:
        refuse_without_decoder(RunBase("base", None, config))
    assert caught.value.key == "model.name"


# --------------------------------------------------------------------------------------------------------------- LoRA


@pytest.mark.parametrize("stacks", [[], STACKS], ids=["beside the experts", "on the experts"])
def test_loss_and_gradients_are_those_of_the_dequantized_weights(base: Path, stacks: list[str], tmp_path: Path) -> None:
    four = with_lora(load_model(str(base), dtype="float32", quantization=FOUR), stacks)
    four.save_pretrained(tmp_path / "adapter")
    parametrized_lora.undo()  # the oracle is PEFT alone, which finds every tensor of the adapter in its place
    oracle: Any = PeftModel.from_pretrained(dequantized(four, base), str(tmp_path / "adapter"), is_trainable=True)
    expected_loss, expected = gradients(oracle.double())
    parametrized_lora.apply()
    loss, found = gradients(four)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    assert found.keys() == expected.keys()
    assert any("experts" in name for name in found) >= bool(stacks)  # of some models PEFT takes them by itself
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_a_second_adapter_goes_into_the_same_wrappers(gpt_oss: Path) -> None:
    """As TRL's reference policy does."""
    four = with_lora(load_model(str(gpt_oss), dtype="float32", quantization=FOUR), STACKS)
    four.add_adapter("ref", four.peft_config["default"])
    layer = four.get_base_model().model.layers[0].mlp.experts
    assert [layer.parameter_name, layer.base_layer.parameter_name] == ["down_proj", "gate_up_proj"]
    assert set(layer.lora_A) == set(layer.base_layer.lora_A) == {"default", "ref"}
    of_default, _ = gradients(four)
    four.set_adapter("ref")
    of_ref, _ = gradients(four)
    assert of_default != of_ref


@pytest.mark.parametrize(
    ("method", "fails"),
    [
        ("_inject_parameters", "finds no parameter"),
        ("_activate_lora", "leaves its parametrization"),
        ("get_param", "dequantizes"),
    ],
)
def test_peft_alone_needs_each_of_the_three_methods(
    method: str, fails: str, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fails without its patch. One that no longer does can go."""
    model: Any = load_model(str(gpt_oss), dtype="float32", quantization=FOUR)
    owner, original = parametrized_lora._originals[method]
    monkeypatch.setattr(owner, method, original)
    if fails == "finds no parameter":
        with pytest.warns(RuntimeWarning, match="no parameter was matched"):
            with_lora(model, STACKS)
        return
    adapted = with_lora(model, STACKS)
    layer = adapted.get_base_model().model.layers[0].mlp.experts
    if fails == "dequantizes":
        assert layer.get_param().untyped_storage().nbytes() > 4
        monkeypatch.undo()
        assert layer.get_param().untyped_storage().nbytes() == 4
        return
    with pytest.warns(UserWarning, match="Could not find any LoRA parametrization"):
        gradients(adapted)
    assert len(layer.get_base_layer().parametrizations["down_proj"]) > 1


def test_compiled_layers_give_the_same_losses(gpt_oss: Path) -> None:
    four = with_lora(load_model(str(gpt_oss), dtype="float32", quantization=FOUR), STACKS)
    plain, expected = gradients(four)
    torch._dynamo.reset()
    prepare_four_bit(four)
    assert len(left_out(four)) == 2
    compile_layers(four, backend="aot_eager")
    compiled, found = gradients(four)
    assert compiled.item() == pytest.approx(plain.item(), rel=1e-6)
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-7), name


# --------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture
def moe(gpt_oss: Path, tiny_model: Path) -> Path:
    """A gpt-oss with a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TULU.read_text()
    torch.manual_seed(0)
    config = GptOssConfig(**KINDS["gpt-oss"].to_dict() | {"vocab_size": len(tokenizer)})
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(gpt_oss)
    tokenizer.save_pretrained(gpt_oss)
    return gpt_oss


def run_of(moe: Path, code: Path, path: Path, method: str = "sft", **train: Any) -> dict[str, Any]:
    config = qlora(moe, code, method=method, run_dir=str(path))
    config["lora"] = {"r": 8, "target_parameters": STACKS}
    config["train"] |= {"learning_rate": 1e-2} | train
    if method == "gspo":
        config["train"] |= {"num_generations": 2, "max_completion_length": 6, "router_aux_loss_coef": 0.0}
        config["cogumi"] |= {"rewards": ["edit_similarity"]}
    if method == "dpo":
        pairs = [{"prompt": f"say {n}", "chosen": f"it is {n}", "rejected": "no"} for n in range(8)]
        path.parent.joinpath("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        config["data"] = {"source": str(path.parent / "pairs.jsonl"), "format": "preference"}
    return config


def test_sft_resumes_bit_for_bit_and_merges_into_full_precision(
    moe: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = watch_trainers(monkeypatch)
    config = run_of(moe, code_parquet, tmp_path / "run", save_strategy="steps", save_steps=2)
    whole = cogumi.train(config, cogumi__run_dir=str(tmp_path / "whole"))
    assert whole.passed, str(whole.verdict)
    assert len(expert_states(trainers[0].model)) == 4
    assert "in nf4 4-bit" in logged_weights(whole.run_dir)
    train_until_failure(config, 3)
    resumed = cogumi.train(config)
    assert logged(resumed.run_dir) == logged(whole.run_dir)
    assert the_same(resumed.run_dir, whole.run_dir)
    parametrized_lora.undo()  # PEFT alone, in float64, on the base that is on the disk
    oracle: Any = PeftModel.from_pretrained(load(moe, torch.float64), str(resumed.adapter)).double().merge_and_unload()
    merged, stored = all_tensors(resumed.merged), all_tensors(moe)
    changed = {name for name in stored if not torch.equal(merged[name], stored[name])}
    assert sum("experts" in name for name in changed) == 4
    for name, exact in oracle.named_parameters():
        half_a_unit = torch.exp2(torch.frexp(exact).exponent.double() - 9)  # in the last place of bfloat16
        in_float32 = 2**-22 * (stored[name].double().abs() + exact.abs())  # where base and update nearly cancel
        assert ((merged[name].double() - exact).abs() <= half_a_unit + in_float32).all(), name


@pytest.mark.slow("bitsandbytes on a CPU takes seconds a step")
@pytest.mark.parametrize("method", ["dpo", "gspo"])
def test_dpo_and_gspo_train_and_merge(method: str, moe: Path, code_parquet: Path, tmp_path: Path) -> None:
    result = cogumi.train(run_of(moe, code_parquet, tmp_path / "run", method, max_steps=2))
    assert result.passed, str(result.verdict)
    assert result.merged is not None


@pytest.mark.slow("a rollout and a step of experts, fourteen times")
def test_the_recipe_of_gpt_oss_20b_in_four_bits_fits_an_a100_of_40_gb(tmp_path: Path) -> None:
    shapes = GptOssConfig(
        num_hidden_layers=24, num_local_experts=32, architectures=["GptOssForCausalLM"], dtype="bfloat16"
    )
    shapes.save_pretrained(tmp_path)
    words = {"model__name": str(tmp_path), "cogumi__run_dir": str(tmp_path / "run")}
    report = preflight("gpt-oss-20b-4bit-gspo-fim", "a100 40gb", **words)
    assert line_of(report, "memory").state == "green", str(report)
    assert report.figures["memory"]["peak"] < 30 * 2**30
    assert "94.4% in nf4 4-bit" in line_of(report, "weights").figure
    eight = preflight("gpt-oss-20b-4bit-gspo-fim", "a100 40gb", **words, model__quantization_config=EIGHT)
    assert line_of(eight, "weights").state == "yellow"
    assert "load_in_4bit" in line_of(eight, "weights").fix
