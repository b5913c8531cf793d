"""4-bit layers under Dynamo: real bitsandbytes, real torch.compile (aot_eager, which says exactly what eager says)."""

import contextvars
import copy
import math
import subprocess
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes
import prepared_process
import pytest
import torch
import torch._dynamo
from bitsandbytes.autograd._functions import MatMul4Bit
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from four_bit_models import gpt_oss_base, hidden_rows, straight_line, tiny_llama, tiny_moe
from golden import Golden
from torch import Tensor, nn

import cogumi
from cogumi.core.errors import UsageError
from cogumi.patches import graph_break
from cogumi.patches.graph_break import Branchless4bit, CompileProbe, probe_linear, probe_zero_rows

CPU = torch.device("cpu")
ORIGINAL_MATMUL, ORIGINAL_FORWARD = bitsandbytes.matmul_4bit, Linear4bit.forward
CAPTURE = "capture_dynamic_output_shape_ops"


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    graph_break.undo()  # a test of another file may have called cogumi.patch() in this process
    yield
    graph_break.undo()
    torch.compiler.reset()
    assert bitsandbytes.matmul_4bit is ORIGINAL_MATMUL
    assert Linear4bit.forward is ORIGINAL_FORWARD
    assert not getattr(torch._dynamo.config, CAPTURE)


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the probes say what leads to a strategy."""

    def choose(strategy: str) -> None:
        rows = {"none": [True], "branchless": [False, True], "break_linear": [False, False]}
        answers = iter(rows[strategy])
        monkeypatch.setattr(graph_break, "probe_linear", lambda _: answer("a 4-bit layer", True))
        monkeypatch.setattr(graph_break, "probe_zero_rows", lambda _: answer("no rows", next(answers)))

    return choose


def answer(name: str, passed: bool) -> CompileProbe:
    return CompileProbe(name, "" if passed else f"Unsupported: {name}", 0.0)


def patched() -> list[str]:
    return [str(each) for each in graph_break._replaced]


class Counting:
    """A backend that runs graphs as they are and counts them: how often something was compiled."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def ran(model: Any, number: int) -> list[Tensor]:
    """Output, and the gradients of the input and of what is trained."""
    x = hidden_rows(64, 6, number)
    output = model(x)
    output = output[0] if isinstance(output, tuple) else output
    expected = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    return [output.detach(), *torch.autograd.grad(output.square().sum(), expected)]


def compared(model: Any, fullgraph: bool = False) -> tuple[int, int]:
    """(graphs, breaks) of a model compiled, whose outputs and gradients are those of eager execution."""
    written = [ran(model, number) for number in range(3)]
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager", fullgraph=fullgraph)
    torch._dynamo.utils.counters.clear()
    for number, expected in enumerate(written):
        assert all(torch.equal(a, b) for a, b in zip(expected, ran(compiled, number), strict=True))
    counted = torch._dynamo.utils.counters
    return counted["stats"]["unique_graphs"], sum(counted["graph_break"].values())


# ------------------------------------------------------------------------------------------------------- what is decided


def test_the_pinned_versions_get_the_branchless_form() -> None:
    """When an upstream release changes this, the docs' tables are to be measured again."""
    status = graph_break.apply()
    verdict = graph_break.verdict()
    assert verdict.strategy == "branchless"
    straight, experts, again = verdict.probes
    assert (straight.name, straight.error) == ("a 4-bit layer", "")
    assert experts.name == "an expert without rows"
    assert "data-dependent expression" in experts.error
    assert "\n" not in experts.error
    assert (again.name, again.error) == ("an expert without rows, branchless", "")
    assert all(probe.seconds > 0 for probe in verdict.probes)
    assert verdict.reason.startswith("an expert without rows ends the graph")
    assert patched() == PATCHED["branchless"]
    assert status == graph_break.status()
    assert status.applied
    assert status.reason.startswith("branchless on bitsandbytes.matmul_4bit")
    assert graph_break.foreign_patches() == []


def test_cogumi_patch_applies_it_and_reports() -> None:
    report = cogumi.patch(rl=False, graph_break="branchless")
    assert bitsandbytes.matmul_4bit is not ORIGINAL_MATMUL
    assert "patched graph_break: branchless on bitsandbytes.matmul_4bit" in str(report)
    assert report.patches[-1] == graph_break.status()


EXPECTED = {  # (graphs, breaks) of a straight line and of a layer of experts
    "branchless": ((1, 0), (1, 0)),
    "break_linear": ((0, 0), (2, 1)),
}
PATCHED = {
    "none": [],
    "branchless": ["bitsandbytes.matmul_4bit", f"torch._dynamo.config.{CAPTURE}"],
    "break_linear": ["Linear4bit.forward"],
}


@pytest.mark.parametrize("choice", ["auto", "by name"])
@pytest.mark.parametrize("strategy", graph_break.STRATEGIES)
def test_every_rung_compiles_as_it_says(strategy: str, choice: str, force: Callable[[str], None]) -> None:
    """The last expert of the layer gets no row."""
    force(strategy)
    moe = tiny_moe(experts=3)
    status = graph_break.apply("auto" if choice == "auto" else strategy, moe)
    verdict = graph_break.verdict()
    assert verdict.strategy == strategy
    assert patched() == PATCHED[strategy]
    assert status.applied == bool(PATCHED[strategy])
    assert len(verdict.probes) == (0 if choice == "by name" else 2 if strategy == "none" else 3)
    if choice == "by name":
        assert verdict.reason == "chosen by name, untried"
        return
    straight, experts = compared(straight_line(64)), compared(moe, fullgraph=strategy == "branchless")
    if strategy == "none":  # what there is without a patch: the loop ends the graph
        assert straight == (1, 0)
        assert experts[1] == 1
        assert experts[0] > 2
    else:
        assert (straight, experts) == EXPECTED[strategy]


def test_a_model_without_experts_wants_nothing(force: Callable[[str], None]) -> None:
    force("branchless")
    status = graph_break.apply("auto", straight_line(64))
    assert not status.applied
    assert status.reason == "none: 4-bit layers compile as they are, and the model has no 4-bit experts"


def test_experts_are_told_from_the_layers_of_a_transformer() -> None:
    model = gpt_oss_base(layers=2)
    assert graph_break.holds_4bit_experts(model)
    assert not graph_break.holds_4bit_experts(straight_line(64))
    assert not graph_break.holds_4bit_experts(tiny_llama(layers=1))


# --------------------------------------------------------------------------------------------------- again, and back again


def test_applying_twice_is_applying_once(force: Callable[[str], None], golden: Golden) -> None:
    force("branchless")
    first = graph_break.apply()
    patched, backend = bitsandbytes.matmul_4bit, Counting()
    layers = torch.compile(straight_line(64), backend=backend)
    layers(torch.zeros(2, 64))
    assert graph_break.apply() == first  # a probe too many would be told so by `force`
    assert graph_break.apply("branchless") == first
    assert graph_break.apply("off").reason == f"{first.reason}; it stays until cogumi.patches.graph_break.undo()"
    assert bitsandbytes.matmul_4bit is patched
    layers(torch.zeros(2, 64))
    assert backend.graphs == 1
    with golden.raises("train", message="branchless"):
        graph_break.apply("break_linear")
    assert Linear4bit.forward is ORIGINAL_FORWARD


@pytest.mark.parametrize("strategy", ["branchless", "break_linear"])
def test_undo_puts_back_what_was_there_and_drops_compiled_code(strategy: str) -> None:
    backend = Counting()
    layers, x = straight_line(64), torch.zeros(2, 64)
    compiled = torch.compile(lambda x: layers(x) + 1, backend=backend)
    compiled(x)
    assert backend.graphs == 1
    graph_break.apply(strategy)
    compiled(x)
    patched = backend.graphs
    assert patched > 1, "the graph of before went on running"
    status = graph_break.undo()
    assert not status.applied
    assert status.reason.startswith("not applied")
    assert graph_break.verdict() is None
    compiled(x)
    assert backend.graphs == patched + 1, "the patched graph went on running"
    assert graph_break.undo() == status
    compiled(x)
    assert backend.graphs == patched + 1, "undoing nothing drops nothing"


def test_undo_refuses_where_somebody_patched_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    graph_break.apply("branchless")
    ours, before = bitsandbytes.matmul_4bit, graph_break.status()

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(bitsandbytes, "matmul_4bit", theirs)
        with pytest.raises(
            RuntimeError, match=r"bitsandbytes.matmul_4bit was since replaced by .*theirs; take that away first"
        ):
            graph_break.undo()
        assert bitsandbytes.matmul_4bit is theirs
        assert graph_break.status().reason.startswith(before.reason)  # and says whose patch is there now
        assert getattr(torch._dynamo.config, CAPTURE)
        (found,) = graph_break.foreign_patches()
        assert found.startswith(f"bitsandbytes.matmul_4bit is {__name__}.")


def test_a_capture_flag_that_was_set_stays_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """unsloth sets it."""
    with torch._dynamo.config.patch({CAPTURE: True}):
        graph_break.apply("branchless")
        graph_break.undo()
        assert getattr(torch._dynamo.config, CAPTURE)


def test_another_thread_or_notebook_cell_is_captured_and_undone_too() -> None:
    """Dynamo's configuration belongs to a context, and two cells of a notebook may have two; the rest is the process's."""
    graph_break.apply("branchless")

    def another() -> tuple[bool, bool, bool]:
        before = getattr(torch._dynamo.config, CAPTURE)
        graph_break.apply("auto")
        applied = getattr(torch._dynamo.config, CAPTURE)
        graph_break.undo()
        return before, applied, getattr(torch._dynamo.config, CAPTURE)

    before, applied, after = contextvars.Context().run(another)
    if before:
        pytest.skip("this torch has one configuration for all threads")
    assert applied
    assert not after
    assert bitsandbytes.matmul_4bit is ORIGINAL_MATMUL
    setattr(torch._dynamo.config, CAPTURE, False)  # of this context


# --------------------------------------------------------------------------------------------------- what probing leaves


def test_probing_leaves_everything_as_it_was() -> None:
    backend, layers = Counting(), straight_line(64)
    x = torch.ones(2, 64, requires_grad=True)
    compiled = torch.compile(lambda x: layers(x) + 1, backend=backend)
    compiled(x).sum().backward()
    torch._dynamo.utils.counters["graph_break"]["of the user's"] += 3

    def state() -> list[Any]:
        config = {name: str(value) for name, value in torch._dynamo.config.get_config_copy().items()}
        counted = {name: dict(counts) for name, counts in torch._dynamo.utils.counters.items() if counts}
        return [config, counted, torch.get_rng_state().tolist(), torch.is_grad_enabled(), x.grad.tolist()]

    with torch._dynamo.config.patch(suppress_errors=True), torch.no_grad():
        before = state()
        assert not probe_linear(CPU).error
        assert probe_zero_rows(CPU).error
        assert graph_break.decide(None).strategy == "branchless"
        assert state() == before
    compiled(x)
    assert backend.graphs == 1, "a probe dropped compiled code of the user's"
    assert bitsandbytes.matmul_4bit is ORIGINAL_MATMUL


def test_a_probe_tells_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_where_compiled(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return ORIGINAL_MATMUL(x, *args, **kwargs) * (2 if torch.compiler.is_compiling() else 1)

    monkeypatch.setattr(bitsandbytes, "matmul_4bit", wrong_where_compiled)
    actual = probe_linear(CPU)
    assert actual.error == "compiled, and its result or gradient differs from the eager one"


# --------------------------------------------------------------------------------------------------------------- bad input


def test_another_choice_is_refused(golden: Golden) -> None:
    with golden.raises("train", message="graph_break='fullgraph'"):
        cogumi.patch(rl=False, graph_break="fullgraph")


@pytest.mark.parametrize(
    ("choice", "model", "reason"),
    [
        ("auto", nn.Linear(4, 4), "the model has no 4-bit layers"),
        ("branchless", nn.Linear(4, 4), "the model has no 4-bit layers"),
        ("off", None, "off: left as it is"),
    ],
)
def test_where_nothing_is_wanted_nothing_changes(choice: str, model: Any, reason: str) -> None:
    status = graph_break.apply(choice, model)
    assert (status.applied, status.reason) == (False, reason)
    assert bitsandbytes.matmul_4bit is ORIGINAL_MATMUL


def test_a_disabled_dynamo_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_COMPILE_DISABLE is read at import: tests/test_compiling_environment.py."""
    with monkeypatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        for choice in ("auto", "branchless"):
            status = graph_break.apply(choice)
            assert not status.applied
            assert status.reason == (
                "Dynamo is switched off by TORCHDYNAMO_DISABLE=1: nothing is compiled; unset it to compile"
            )
        assert bitsandbytes.matmul_4bit is ORIGINAL_MATMUL
    with torch._dynamo.config.patch(disable=True):
        assert "switched off by torch._dynamo.config.disable" in graph_break.apply().reason


def test_without_bitsandbytes_there_is_one_line(for_commands: dict[str, str]) -> None:
    """In a process of its own, in which bitsandbytes cannot be imported, and what would import it has not been."""
    code = """
import sys
for name in list(sys.modules):
    if name.startswith(("bitsandbytes", "cogumi.patches")):
        del sys.modules[name]
sys.modules["bitsandbytes"] = None
from cogumi.patches import graph_break
print(graph_break.apply().reason, graph_break.apply("branchless").applied, graph_break.foreign_patches())
print(graph_break.undo().applied)
"""
    command = [*prepared_process.python(for_commands), "-c", code]
    done = subprocess.run(command, env=for_commands, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["bitsandbytes is not installed, so there are no 4-bit layers False []", "False"]


@pytest.mark.parametrize("kind", ["compiles", "breaks", "raises", "disabled"])
def test_a_foreign_linear4bit_is_named_and_the_probes_decide(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(self: Any, x: Tensor) -> Tensor:
        if kind == "raises":
            raise ValueError("only on my machine")
        if kind == "breaks":
            torch._dynamo.graph_break()
        return ORIGINAL_FORWARD(self, x)

    monkeypatch.setattr(
        Linear4bit, "forward", torch.compiler.disable(ORIGINAL_FORWARD) if kind == "disabled" else theirs
    )
    foreign = "torch._dynamo.eval_frame.Linear4bit.forward"
    if kind != "disabled":
        foreign = f"{__name__}.{theirs.__qualname__}"
    status, verdict = graph_break.apply("auto"), graph_break.verdict()
    assert status.applied
    if kind == "compiles":
        assert verdict.strategy == "branchless"
        assert graph_break.foreign_patches() == [f"Linear4bit.forward is {foreign}"]
    else:
        assert verdict.strategy == "break_linear"
        assert "Dynamo cannot" not in status.reason
        assert f"Linear4bit.forward is {foreign};" in verdict.reason
        assert ("only on my machine" in verdict.reason) == (kind == "raises")
    graph_break.undo()
    assert kind == "disabled" or Linear4bit.forward is theirs


def test_a_foreign_class_in_the_place_of_linear4bit_breaks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(Linear4bit):
        pass

    monkeypatch.setattr(bitsandbytes.nn, "Linear4bit", Theirs)
    graph_break.apply("break_linear")
    assert Theirs.forward is not ORIGINAL_FORWARD
    graph_break.undo()
    assert Theirs.forward is ORIGINAL_FORWARD


def test_a_foreign_matmul_is_not_replaced(monkeypatch: pytest.MonkeyPatch, force: Callable[[str], None]) -> None:
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ORIGINAL_MATMUL(*args, **kwargs)

    monkeypatch.setattr(bitsandbytes, "matmul_4bit", theirs)
    force("branchless")
    graph_break.apply("auto", tiny_moe())
    verdict = graph_break.verdict()
    assert verdict.strategy == "break_linear"
    assert f"bitsandbytes.matmul_4bit is {__name__}.{theirs.__qualname__} already" in verdict.reason
    graph_break.undo()
    with pytest.raises(UsageError, match=r"matmul_4bit is .*theirs already; take that away first"):
        graph_break.apply("branchless")
    assert bitsandbytes.matmul_4bit is theirs
    assert not graph_break.status().applied
    assert graph_break.verdict() is None


# ------------------------------------------------------------------------------------------------------- the branchless form


def layer_of(
    quant_type: str, nested: bool, dtype: torch.dtype, bias: bool, trained: bool, width: int = 128
) -> Linear4bit:
    torch.manual_seed(1)
    layer = Linear4bit(64, width, bias=bias, compute_dtype=dtype, compress_statistics=nested, quant_type=quant_type).to(
        CPU
    )
    layer.support_avx512bf16_for_cpu = False
    if bias:
        layer.bias.data = layer.bias.data.to(dtype)
        layer.bias.requires_grad_(trained)
    return layer


def weights_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The gradient that an output is given: another for each of its numbers."""
    return torch.arange(math.prod(shape)).reshape(shape).sin().to(dtype)


def value_and_gradients(layer: Linear4bit, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    expected = [x] + ([layer.bias] if layer.bias is not None and layer.bias.requires_grad else [])
    weights = weights_of(y.shape, y.dtype)
    with torch.no_grad():
        inference = layer(x.detach())
    return [y.detach(), inference, *torch.autograd.grad((y * weights).sum(), expected)]


@pytest.mark.parametrize("bias", ["none", "frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_it_is_upstreams_bit_for_bit(
    quant_type: str, nested: bool, dtype: torch.dtype, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(quant_type, nested, dtype, bias != "none", bias == "trained")
    inputs = [torch.randn(shape).to(dtype) for shape in ((5, 64), (2, 3, 64), (1, 64), (0, 64), (2, 0, 64))]
    upstream = [value_and_gradients(layer, x) for x in inputs]
    ran: list[str] = []
    monkeypatch.setattr(MatMul4Bit, "apply", lambda *_: pytest.fail("upstream's own ran"))
    graph_break.apply("branchless")
    original = Branchless4bit.apply
    monkeypatch.setattr(Branchless4bit, "apply", lambda *args: (ran.append("ours"), original(*args))[1])
    for x, expected in zip(inputs, upstream, strict=True):
        actual = value_and_gradients(layer, x)
        if (
            bias == "trained" and x.dim() == 3
        ):  # upstream rounds each sequence's sum to the bias's dtype, then adds those
            ours, theirs = actual.pop().double(), expected.pop().double()
            exact = weights_of((*x.shape[:-1], 128), dtype).double().sum((0, 1))
            assert (ours - exact).norm() <= (theirs - exact).norm()
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            assert torch.equal(ours, theirs)
    assert len(ran) == 2 * len(inputs)


def test_an_operator_that_fails_for_zero_rows_as_on_cuda_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes 0.50.2 launches its CUDA kernel on an empty grid: `CUDA error: invalid argument` on an H200."""
    asked = []

    class Operator:
        @staticmethod
        def default(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            asked.append(x.shape)
            assert x.numel(), "CUDA error: invalid argument"
            return upstream(x, *args, **kwargs)

    upstream = torch.ops.bitsandbytes.gemm_4bit.default
    monkeypatch.setattr(torch.ops.bitsandbytes, "gemm_4bit", Operator)
    graph_break.apply("branchless")
    found = graph_break.probe_zero_rows(CPU)
    assert found.error == ""
    assert len(asked) == 4  # two experts that have rows, uncompiled and compiled
    layer = layer_of("nf4", True, torch.float32, True, True)
    empty = torch.empty(2, 0, 64, requires_grad=True)
    y = layer(empty)
    assert y.shape == (2, 0, 128)
    x_gradient, bias_gradient = torch.autograd.grad(y.sum(), (empty, layer.bias))
    assert x_gradient.shape == empty.shape
    assert not bias_gradient.any()


def test_what_is_not_training_goes_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of("nf4", True, torch.float32, False, False)
    state, x = layer.weight.quant_state, torch.randn(3, 64)
    expected = ORIGINAL_MATMUL(x, layer.weight, quant_state=state)
    graph_break.apply("branchless")
    monkeypatch.setattr(Branchless4bit, "apply", lambda *_: pytest.fail("the branchless form ran"))
    out = torch.empty(3, 128)
    assert bitsandbytes.matmul_4bit(x, layer.weight, quant_state=state, out=out) is out
    assert torch.equal(out, expected)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        y = torch.randn(3, 128)
        turned = bitsandbytes.matmul_4bit(y, layer.weight, quant_state=state)
    assert "[K, N]" in str(said[0].message)
    torch.testing.assert_close(turned, y @ dequantize_4bit(layer.weight, state))
    with pytest.raises(ValueError, match="quant_state is required"):
        bitsandbytes.matmul_4bit(x, layer.weight, quant_state=None)
    packed = copy.copy(state)
    packed.packing_format_for_cpu = True
    monkeypatch.setattr("bitsandbytes.functional.gemv_4bit", lambda *_, **__: torch.ones(3, 128))
    assert bitsandbytes.matmul_4bit(x, layer.weight, quant_state=packed).eq(1).all()


@pytest.mark.parametrize("first", ["the patch", "the model"])
def test_the_model_may_come_before_or_after(first: str) -> None:
    if first == "the patch":
        graph_break.apply("branchless")
    layer = layer_of("nf4", True, torch.float32, False, False)
    graph_break.apply("branchless")
    compiled = torch.compile(lambda x, rows: layer(x[torch.where(rows)[0]]).sum(), backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 64, requires_grad=True)
    for rows in ([True, False, True, False], [False] * 4):
        chosen = torch.tensor(rows)
        compiled(x, chosen).backward()
        assert torch.equal(compiled(x, chosen), layer(x[chosen]).sum())
