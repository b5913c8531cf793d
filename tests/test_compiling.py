"""Layers compiled one by one in real 4-bit models with LoRA and checkpointing.

aot_eager computes what eager does, so losses and gradients are to be equal. With inductor: test_compiling_inductor.py.
"""

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from four_bit_models import gpt_oss, gradients, step, straight_line, tiny_llama
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.profiler import ProfilerActivity, profile
from transformers import GptOssConfig, GptOssForCausalLM

from cogumi.compile import compile_report
from cogumi.compile.compile_report import keep_compiled_code, read_counts, try_compiler
from cogumi.compile.layers import (
    compile_for_training,
    compile_layers,
    decoder_layers,
    decoder_of,
    parts_of,
    prepare_four_bit,
    uncompile_layers,
)
from cogumi.core.errors import UsageError
from cogumi.patches import graph_break
from cogumi.patches.torch_internals import first_line

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
    return read_counts().graphs, sum(read_counts().breaks.values())


def trained(model: Any, steps: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of SGD steps."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
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
    assert read_counts().recompiles == 0


@pytest.mark.slow("minutes of Dynamo on a slow machine")
@pytest.mark.usefixtures("from_nothing")
def test_experts_without_rows_too() -> None:
    written = trained(gpt_oss(layers=1, experts=3), 2)
    model = gpt_oss(layers=1, experts=3)
    graph_break.apply("branchless", model)
    compile_layers(model, backend="aot_eager")
    assert the_same(trained(model, 2), written)
    assert read_counts().breaks == {}
    assert read_counts().graphs == len(parts_of(model))


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
    # rotary embedding and the last norm.
    assert graphs_and_breaks() == (6, 2)
    uncompile_layers(model)
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
        written = [each for each in events if not each.name.startswith("Torch-Compiled Region")]
        return sum(1 if "::" in each.name else outermost(each.cpu_children) for each in written)

    decoder, ids = decoder_of(model), torch.tensor([[1, 2, 3]])
    decoder(ids, use_cache=False)  # compiles: the compiler's own operations are not to be among them
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        decoder(ids, use_cache=False)
    return outermost(each for each in profiler.events() if each.cpu_parent is None)


@pytest.mark.slow("minutes of Dynamo on a slow machine")
def test_nearly_all_operations_are_compiled() -> None:
    model = tiny_llama(layers=6)
    loss, plain = step(model), operations_of(model)
    compile_layers(model, backend="aot_eager")
    assert step(model) == loss
    assert read_counts().recompiles == 0
    assert operations_of(model) / plain <= 0.05
    assert plain > 100


@pytest.mark.usefixtures("from_nothing")
def test_uncompiling_and_copying() -> None:
    model = tiny_llama(layers=1)
    compile_layers(model, backend="eager")
    loss = step(model)
    found = read_counts().graphs
    copied = copy.deepcopy(model)
    assert all(part._compiled_call_impl is None for part in parts_of(copied))
    assert step(copied) == loss
    uncompile_layers(model)
    assert all(part._compiled_call_impl is None for part in parts_of(model))
    assert step(model) == loss
    assert read_counts().graphs == found
    compile_layers(model, backend="eager")
    assert step(model) == loss
    assert read_counts().graphs == 2 * found, "what had been compiled was kept"


@pytest.mark.usefixtures("from_nothing")
def test_recompiles_are_counted_however_many_compilations_there_are() -> None:
    """Dynamo keeps a list of its last 64 compilations only."""
    before = read_counts()
    grown = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    grown(torch.ones(2))
    grown(torch.ones(3))
    torch._dynamo.utils.clear_compilation_metrics()
    found = read_counts().since(before)
    assert (found.graphs, found.recompiles) == (2, 1)
    assert found.seconds > 0


# ------------------------------------------------------------------------------------------------------- what is refused


def test_reentrant_checkpointing_is_refused() -> None:
    model = tiny_llama(layers=1)
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(
        UsageError, match=r"compile: gradient checkpointing is reentrant.*gradient_checkpointing_kwargs"
    ):
        compile_layers(model)
    assert all(part._compiled_call_impl is None for part in parts_of(model))
    model.get_base_model().gradient_checkpointing_disable()
    compile_layers(model)


@pytest.mark.parametrize("way", ["in place", "a layer in place", "wrapped", "by cogumi"])
def test_a_compiled_model_stays_as_it_is(way: str) -> None:
    model = tiny_llama(layers=1)
    if way == "in place":
        model.compile(backend="eager")
    elif way == "a layer in place":
        decoder_layers(model)[0].compile(backend="eager")
    elif way == "by cogumi":
        compile_layers(model, backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with pytest.raises(UsageError, match="compile: the model is compiled already, and stays as it is"):
        compile_layers(model)


def test_a_model_without_layers_and_a_disabled_dynamo_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="Sequential has no layers that transformers checkpoints"):
        compile_layers(straight_line(64))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(UsageError, match="compile: Dynamo is switched off by TORCHDYNAMO_DISABLE=1; unset it"):
        compile_layers(tiny_llama(layers=1))


@pytest.mark.usefixtures("from_nothing")
@pytest.mark.parametrize("rescue", [False, True])
@pytest.mark.parametrize("silent", [False, True])
def test_a_failure_is_loud_also_where_unsloth_silences_it(silent: bool, rescue: bool) -> None:
    part, x = Failing(), torch.ones(2)
    errors: list[Exception] = []
    part._compiled_call_impl = compile_for_training(part, no_backend, errors if rescue else None)  # type: ignore[arg-type]
    with torch._dynamo.config.patch(suppress_errors=silent):
        for _ in range(2):
            if rescue:
                assert torch.equal(part(x), x.sin())
            else:
                with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="this machine has no such backend"):
                    part(x)
        assert torch._dynamo.config.suppress_errors is silent
    assert [first_line(error) for error in errors] == rescue * [
        "BackendCompilerFailed: backend='no_backend' raised: NotImplementedError: this machine has no such backend"
    ]


def test_a_rescued_model_trains() -> None:
    written = trained(tiny_llama(layers=1), 2)
    model = tiny_llama(layers=1)
    errors: list[Exception] = []
    compile_layers(model, backend=no_backend, failures=errors)  # type: ignore[arg-type]
    with torch._dynamo.config.patch(suppress_errors=True):
        assert the_same(trained(model, 2), written)
    assert len(errors) == 1, "the parts that follow are not tried"


def test_a_layer_that_ran_compiled_does_so_again_in_the_backward() -> None:
    """Also where a later one fails to compile: checkpointing compares what both passes save."""
    written = trained(tiny_llama(layers=2), 2)
    model = tiny_llama(layers=2)
    errors: list[Exception] = []
    layers = compile_layers(model, backend="aot_eager", failures=errors)
    layers[0].register_forward_hook(lambda *_: errors.append(RuntimeError("the next one fails")))
    assert the_same(trained(model, 2), written)
    assert read_counts().graphs > 0


@pytest.mark.usefixtures("from_nothing")
def test_a_backward_that_does_not_compile_fails_with_its_forward() -> None:
    """Where it can be caught: autograd would call the compiler again in the middle of a backward pass."""

    def no_backward(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        raise NotImplementedError("no backward here")

    backend = aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=no_backward)
    part, x = Failing(), torch.ones(2, requires_grad=True)
    errors: list[Exception] = []
    part._compiled_call_impl = compile_for_training(part, backend, errors)  # type: ignore[arg-type]
    y = part(x)
    assert [first_line(error).endswith("NotImplementedError: no backward here") for error in errors] == [True]
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2).cos())  # type: ignore[arg-type]


@pytest.mark.usefixtures("from_nothing")
@pytest.mark.parametrize("rescue", [False, True])
def test_the_models_own_errors_are_not_the_compilers(rescue: bool) -> None:
    part = Failing()
    errors: list[Exception] = []
    part._compiled_call_impl = compile_for_training(part, "eager", errors if rescue else None)
    with pytest.raises(ValueError, match="of the model's own"):
        part(torch.ones(3))
    assert torch.equal(part(torch.ones(2)), torch.ones(2).sin())
    assert errors == []


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
    casts, repacking = prepare_four_bit(model)
    assert casts == "2 biases of 4-bit layers cast to the dtype they compute in"
    assert repacking.startswith("1 4-bit layers keep their weights as they are")
    assert {layer.bias.dtype for layer in layers} == {torch.bfloat16}
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    assert prepare_four_bit(model) == []
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2, 64, dtype=torch.bfloat16))


def test_a_model_without_4_bit_layers_is_not_touched() -> None:
    assert prepare_four_bit(nn.Linear(2, 2)) == []


# --------------------------------------------------------------------------------------------------------- a compiler


@pytest.mark.slow("minutes of Dynamo on a slow machine")
def test_a_box_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = graphs_and_breaks()
    assert try_compiler(torch.device("cpu")).error == ""
    assert graphs_and_breaks() == before
    monkeypatch.setenv(CACHE, str(tmp_path / "empty"))
    with torch._inductor.config.patch({"cpp.cxx": (None, str(tmp_path / "no-such-compiler"))}):
        found = try_compiler(torch.device("cpu"))
    assert found.error
    assert "\n" not in found.error


def test_compiled_code_is_kept_where_the_user_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(CACHE, str(tmp_path / "mine"))
    assert keep_compiled_code() == tmp_path / "mine"
    assert os.environ[CACHE] == str(tmp_path / "mine")
    monkeypatch.setattr(compile_report.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    for told in (None, default_cache_dir()):  # inductor, imported, says its default
        if told is None:
            monkeypatch.delenv(CACHE)
        else:
            monkeypatch.setenv(CACHE, told)
        assert keep_compiled_code() == tmp_path / "cache" / "cogumi" / "compiled"
        assert os.environ[CACHE] == str(tmp_path / "cache" / "cogumi" / "compiled")
    assert (tmp_path / "cache" / "cogumi" / "compiled").is_dir()


def test_a_cache_that_cannot_be_made_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    keep_compiled_code()
    assert "compiled code is not kept between runs" in caplog.text
