"""The forecast of a step's memory beside what PyTorch's profiler sees allocated when the same trainer really takes it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import peak_growth
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from cogumi.config.schema import load_config
from cogumi.forecast.memory_forecast import MemoryForecast, peaks_of_depth
from cogumi.forecast.training_step import (
    BLOCK,
    StepShape,
    StorageCounter,
    attention,
    inputs_of,
    planned_trainer,
    run_step,
)
from cogumi.rl.patching import patch

SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
WORKS = {
    "sft": StepShape("sft", 4, 128, padded=False),
    "dpo": StepShape("dpo", 2, 128, padded=False),
    "gspo": StepShape("gspo", 4, 64, 64, padded=False),
}


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    patch(graph_break="off")


def llama(layers: int = 4) -> LlamaConfig:
    kind = {"architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "pad_token_id": 2}
    return LlamaConfig(**SHAPE, **kind, num_hidden_layers=layers)


def config_of(method: str, **words: Any) -> Any:
    train = {"max_steps": 1} | ({"num_generations": 2} if method == "gspo" else {})
    sections = {"model": {"name": "x"}, "data": {"source": "cogumi:stdlib"}, "train": train}
    if words.get("cogumi__tuning") != "full":
        sections["lora"] = {"r": 8, "lora_alpha": 16}
    return load_config({**sections, "cogumi": {"method": method, "merge": False}}, **words)


def real_trainer(run: Any) -> Any:
    """The same trainer with real weights: that of the forecast, its model taken from the meta device to memory."""
    trainer = planned_trainer(run, llama(), torch.float32)
    trainer.model = trainer.model.to_empty(device="cpu")
    for parameter in trainer.model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for name, buffer in trainer.model.named_buffers():
        buffer.copy_(torch.ones_like(buffer) / (1 + len(name)))
    return trainer


def step_for_real(trainer: Any, work: StepShape) -> int:
    """Most bytes held in the second step, weights, gradients and optimizer included."""
    model = trainer.model
    resident = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in
                    (*model.parameters(), *model.buffers())}.values())  # fmt: skip
    optimizer = trainer.create_optimizer()
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    if trainer.args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def step() -> None:
        trainer.compute_loss(model, inputs_of(work)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return resident + states + peak_growth(step)


@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("method", ["sft", "dpo", "gspo"])
def test_the_peak_of_a_step_is_what_is_allocated(method: str, checkpointing: bool) -> None:
    run = config_of(method, train__gradient_checkpointing=checkpointing)
    work = WORKS[method]
    moments = run_step(planned_trainer(run, llama(), torch.float32), work, None, on_card=False)
    real = step_for_real(real_trainer(run), work)
    forecast = max(moments, key=lambda moment: moment.total).total
    assert forecast == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_weights_gradients_and_optimizer_are_exact(tuning: str) -> None:
    run = config_of("sft", cogumi__tuning=tuning)
    moments = run_step(planned_trainer(run, llama(), torch.bfloat16), WORKS["sft"], torch.bfloat16, on_card=False)
    update = next(moment for moment in moments if moment.stage == "update")
    trainer = planned_trainer(run, llama(), torch.bfloat16)
    model = trainer.model.to_empty(device="cpu")
    optimizer = trainer.create_optimizer()
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]

    def in_blocks(tensors: Any) -> int:
        return sum(-(-tensor.nbytes // BLOCK) * BLOCK for tensor in {id(t): t for t in tensors}.values())

    frozen = [p for p in model.parameters() if not p.requires_grad]
    whole = tuning == "full"
    assert update.by_kind["weights"] == in_blocks([*(trained if whole else frozen), *model.buffers()])
    assert update.by_kind.get("adapter", 0) == (0 if whole else in_blocks(trained))
    assert update.by_kind["gradients"] == in_blocks(p.grad for p in trained)
    assert update.by_kind["optimizer"] >= in_blocks(states)
    assert next(m for m in moments if m.stage == "backward").by_kind["optimizer"] == in_blocks(states)


def test_four_bits_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    """Packed weights and scales of the forecast beside those of a model that bitsandbytes really quantized."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    run = config_of("sft", model__quantization_config={"load_in_4bit": True})
    moments = run_step(planned_trainer(run, llama(), torch.bfloat16), WORKS["sft"], torch.bfloat16, on_card=True)
    LlamaForCausalLM(llama()).save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings, dtype=torch.bfloat16)
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in all_of(model)}
    load = next(moment for moment in moments if moment.stage == "load")
    tables = 4 * 7 * 4096  # bitsandbytes' layers share the two tables of values, of 64 and 1024 bytes
    real = sum(-(-n // BLOCK) * BLOCK for n in tensors.values())
    assert real <= load.by_kind["weights"] <= real + tables


def all_of(model: Any) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        for each in filter(None, (state, getattr(state, "state2", None))):
            yield from (each.absmax, each.code)
        if state is not None:
            yield state.offset


@pytest.mark.slow("forecasts of deep models beside what they then take")
@pytest.mark.parametrize(("method", "accumulated"), [pytest.param("sft", 4, marks=pytest.mark.sweep), ("gspo", 1)])
def test_a_deep_model_is_told_by_two_short_ones(method: str, accumulated: int) -> None:
    """Extrapolated from models of one and two layers, and held to whole runs of ten."""
    run, config = config_of(method), llama(10)
    work = replace(WORKS[method], micro_batches=accumulated)

    def measure(layers: int | None) -> Any:
        trainer = planned_trainer(run, config, torch.bfloat16, layers)
        return run_step(trainer, work, torch.bfloat16, on_card=True)

    forecast, whole = (MemoryForecast(moments, work, 0) for moments in (peaks_of_depth(measure, 10, 1), measure(None)))
    assert forecast.peak == pytest.approx(whole.peak, rel=2e-3)
    assert {m.stage: m.total for m in forecast.moments} == pytest.approx(
        {m.stage: m.total for m in whole.moments}, rel=2e-3
    )


# ------------------------------------------------------------------------------------------------------------- the counting


def test_a_storage_counts_once_and_until_nobody_holds_it() -> None:
    live = StorageCounter()
    with FakeTensorMode(), live, live.in_stage("one"):
        whole = torch.empty(1000, dtype=torch.float32)
        view = whole[10:20]
        assert live.total == 4096  # 4000 bytes in blocks of 512
        del whole
        assert live.total == 4096
        del view
        assert live.total == 0
        with live.counting_as("weights"):
            kept = torch.empty(4, 128)
        live.count(kept, "gradients")
        assert live.by_kind["weights"] == 0
        assert live.by_kind["gradients"] == 2048
    assert live.moments["one"].total == 4096


def test_attention_of_a_card_keeps_no_scores() -> None:
    query = torch.empty(2, 8, 512, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    key = torch.empty(2, 2, 512, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    output = attention(query, key, key)
    assert output.shape == query.shape
    output.sum().backward()
    assert key.grad.shape == key.shape
    live = StorageCounter()
    with FakeTensorMode(), live, live.in_stage("attention"):
        inputs = [torch.empty(2, heads, 512, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)]
        before = live.total
        kept = attention(*inputs)
        scores = 2 * 8 * 512 * 512 * 2
        assert live.total - before < scores / 4
        with live.in_stage("backward"):
            kept.sum().backward()
    # Three gradients come, and what the kernel holds beside them: a float32 accumulator as large as the query, and keys
    # and values of every head.
    large, small = 2 * 8 * 512 * 64, 2 * 2 * 512 * 64
    made = 2 * (large + 2 * small) + 4 * large + 2 * 2 * large
    assert live.moments["backward"].total - live.moments["attention"].total == pytest.approx(made, rel=0.15)


def test_gradients_are_there_from_the_second_micro_batch_on() -> None:
    run, config = config_of("sft"), llama()
    held = {}
    for micro_batches in (1, 2):
        trainer = planned_trainer(run, config, torch.float32)
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        moments = run_step(trainer, replace(WORKS["sft"], micro_batches=micro_batches), None, on_card=False)
        held[micro_batches] = next(m for m in moments if m.stage == "forward").by_kind.get("gradients", 0)
    assert held[1] == 0
    assert held[2] == pytest.approx(4 * trained, rel=0.05)  # in blocks of 512 bytes
