"""Layers compiled one by one in real 4-bit models with LoRA and checkpointing.

aot_eager computes what eager does, so losses and gradients are to be equal. With inductor: test_compiling_inductor.py.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import transformers
from four_bit_models import gpt_oss, gradients, step, straight_line, tiny_llama
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import GptOssConfig, GptOssForCausalLM

from cogumi.compile.compile_report import try_compiler
from cogumi.compile.layers import (
    compile_for_training,
    compile_layers,
    decoder_layers,
    left_out,
    parts_of,
    prepare_four_bit,
)
from cogumi.patches import graph_break
from cogumi.patches.torch_internals import dynamo_counts, set_call

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def as_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(CACHE, str(tmp_path / "inductor"))
    yield
    graph_break.undo()


@pytest.fixture
def from_nothing() -> None:
    """Nothing was compiled in this process, and nothing counted. Others use what the tests before them compiled."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def graphs_and_breaks() -> tuple[int, int]:
    return dynamo_counts()["graphs"], sum(dynamo_counts()["breaks"].values())


def uncompile(model: nn.Module) -> None:
    for part in [*parts_of(model), *left_out(model)]:
        set_call(part, None)
    torch.compiler.reset()


def trained(model: Any, steps: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of SGD steps."""
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    said = []
    for number in range(steps):
        said.append((step(model, number), gradients(model)))
        optimizer.step()
    return said


def the_same(one: list[tuple[float, dict[str, Tensor]]], other: list[tuple[float, dict[str, Tensor]]]) -> bool:
    return all(
        a == b and g.keys() == h.keys() and all(torch.equal(g[name], h[name]) for name in g)
        for (a, g), (b, h) in zip(one, other, strict=True)
    )


def no_backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    raise NotImplementedError("this machine has no such backend\nand a second line")


class Failing(nn.Module):
    """A layer without parameters that fails by itself, unlike a backend that cannot compile it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("of the model's own")
        return x.sin()


# ------------------------------------------------------------------------------------------------------------- the layers


@pytest.mark.usefixtures("from_nothing")
def test_twenty_steps_are_those_of_eager_execution() -> None:
    written = trained(tiny_llama(layers=2), 20)
    model = tiny_llama(layers=2)
    compiled = compile_layers(model, backend="aot_eager")
    assert compiled == decoder_layers(model)
    assert len(compiled) == 2
    assert graphs_and_breaks() == (0, 0), "nothing is compiled yet"
    assert the_same(trained(model, 20), written)
    assert len({loss for loss, _ in written}) == 20
    # The layers share one graph; the rotary embedding and the last norm stand beside them.
    assert graphs_and_breaks() == (1 + len(parts_of(model)) - len(compiled), 0)
    assert dynamo_counts()["recompiles"] == 0


@pytest.mark.slow("minutes of Dynamo on a slow machine")
@pytest.mark.usefixtures("from_nothing")
def test_experts_without_rows_too() -> None:
    written = trained(gpt_oss(layers=1, experts=3), 2)
    model = gpt_oss(layers=1, experts=3)
    graph_break.apply("branchless", model)
    compile_layers(model, backend="aot_eager")
    assert the_same(trained(model, 2), written)
    assert dynamo_counts()["breaks"] == {}
    assert dynamo_counts()["graphs"] == len(parts_of(model))


@pytest.mark.usefixtures("from_nothing")
def test_adapters_of_experts_stay_out_of_the_graphs() -> None:
    config = GptOssConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_local_experts=3, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    experts = [f"mlp.experts.{name}_proj" for name in ("gate_up", "down")]

    def build() -> Any:
        torch.manual_seed(0)
        return get_peft_model(
            GptOssForCausalLM(config), LoraConfig(target_modules=["q_proj"], target_parameters=experts)
        )

    written = trained(build().train(), 2)
    model = build().train()
    compile_layers(model, "aot_eager")
    assert the_same(trained(model, 2), written)
    # Before and after the experts in the layer and in its MLP, for a break in a call is one of the caller's too; the
    # rotary embedding and the last norm. transformers 5.24 has two more calls on the way.
    assert graphs_and_breaks() == (6, 4 if Version(transformers.__version__) >= Version("5.24") else 2)
    uncompile(model)
    assert not any(module._compiled_call_impl for module in model.modules())


def test_generation_runs_as_written() -> None:
    model = tiny_llama(layers=2)
    generate = partial(
        model.generate, torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0
    )
    model.eval()
    text = generate()
    compile_layers(model, backend=no_backend)  # type: ignore[arg-type]
    assert torch.equal(generate(), text)


def operations_of(model: Any) -> int:
    """Operations of a forward pass through the decoder that no other operation makes, those in compiled code left out."""

    def outermost(events: Any) -> int:
        written = [event for event in events if not event.name.startswith("Torch-Compiled Region")]
        return sum(1 if "::" in each.name else outermost(each.cpu_children) for each in written)

    decoder, ids = model.get_base_model().model, torch.tensor([[1, 2, 3]])
    decoder(ids, use_cache=False)  # compiles: the compiler's own operations are not to be among them
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        decoder(ids, use_cache=False)
    return outermost(event for event in profiler.events() if event.cpu_parent is None)


@pytest.mark.slow("minutes of Dynamo on a slow machine")
def test_nearly_all_operations_are_compiled() -> None:
    model = tiny_llama(layers=6)
    loss, plain = step(model), operations_of(model)
    compile_layers(model, backend="aot_eager")
    assert step(model) == loss
    assert dynamo_counts()["recompiles"] == 0
    assert operations_of(model) / plain <= 0.05
    assert plain > 100


@pytest.mark.usefixtures("from_nothing")
def test_uncompiling_and_copying() -> None:
    model = tiny_llama(layers=1)
    compile_layers(model, backend="eager")
    loss = step(model)
    actual = dynamo_counts()["graphs"]
    copied = copy.deepcopy(model)
    assert all(part._compiled_call_impl is None for part in parts_of(copied))
    assert step(copied) == loss
    uncompile(model)
    assert all(part._compiled_call_impl is None for part in parts_of(model))
    assert step(model) == loss
    assert dynamo_counts()["graphs"] == actual
    compile_layers(model, backend="eager")
    assert step(model) == loss
    assert dynamo_counts()["graphs"] == 2 * actual, "what had been compiled was kept"


@pytest.mark.usefixtures("from_nothing")
def test_recompiles_are_counted_however_many_compilations_there_are() -> None:
    """Dynamo keeps a list of its last 64 compilations only."""
    before = dynamo_counts()
    grown = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    grown(torch.ones(2))
    grown(torch.ones(3))
    torch._dynamo.utils.clear_compilation_metrics()
    actual = dynamo_counts()
    assert (actual["graphs"] - before["graphs"], actual["recompiles"] - before["recompiles"]) == (2, 1)
    assert actual["seconds"] > before["seconds"]


@pytest.mark.usefixtures("from_nothing")
def test_the_models_own_errors_are_not_the_compilers() -> None:
    part = Failing()
    part._compiled_call_impl = compile_for_training(part, "eager")
    with pytest.raises(ValueError, match="of the model's own"):
        part(torch.ones(3))
    assert torch.equal(part(torch.ones(2)), torch.ones(2).sin())


# --------------------------------------------------------------------------------------------- what stands in the way


def four_bit(model: nn.Module) -> list[Any]:
    from bitsandbytes.nn import Linear4bit

    return [module for module in model.modules() if isinstance(module, Linear4bit)]


def in_bfloat16(model: nn.Module) -> nn.Module:
    for layer in four_bit(model):
        layer.compute_dtype, layer.compute_type_is_set = torch.bfloat16, True
    return model


def test_preparing_mends_biases_and_repacking() -> None:
    model = straight_line(64, layers=3)
    layers = four_bit(in_bfloat16(model))
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
    layers[0].support_avx512bf16_for_cpu = True
    layers[1].bias.data = layers[1].bias.data.to(torch.bfloat16)
    prepare_four_bit(model)
    assert {layer.bias.dtype for layer in layers} == {torch.bfloat16}
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2, 64, dtype=torch.bfloat16))


# --------------------------------------------------------------------------------------------------------- a compiler


@pytest.mark.sweep
def test_a_box_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = graphs_and_breaks()
    assert try_compiler(torch.device("cpu")) == ""
    assert graphs_and_breaks() == before
    monkeypatch.setenv(CACHE, str(tmp_path / "empty"))
    with torch._inductor.config.patch({"cpp.cxx": (None, str(tmp_path / "no-such-compiler"))}):
        actual = try_compiler(torch.device("cpu"))
    assert actual
    assert "\n" not in actual
