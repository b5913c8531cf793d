"""4-bit layers under Dynamo: real bitsandbytes, real torch.compile (aot_eager, which says exactly what eager says)."""

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes
import prepared_process
import pytest
import torch
import torch._dynamo
from bitsandbytes.nn import Linear4bit
from four_bit_models import straight_line
from golden import Golden
from torch import Tensor, nn

import cogumi
from cogumi.patches import graph_break
from cogumi.patches.graph_break import probe_linear

CPU = torch.device("cpu")
ORIGINAL_MATMUL, ORIGINAL_FORWARD = bitsandbytes.matmul_4bit, Linear4bit.forward


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    graph_break.undo()  # a test of another file may have called cogumi.patch() in this process
    yield
    graph_break.undo()
    torch.compiler.reset()
    assert bitsandbytes.matmul_4bit is ORIGINAL_MATMUL
    assert Linear4bit.forward is ORIGINAL_FORWARD


class Counting:
    """A backend that runs graphs as they are and counts them: how often something was compiled."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def theirs(self: Any, x: Tensor) -> Tensor:
    """Another package's forward of the 4-bit layer, which compiles."""
    return ORIGINAL_FORWARD(self, x)


def breaking(self: Any, x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return ORIGINAL_FORWARD(self, x)


def raising(self: Any, x: Tensor) -> Tensor:
    raise ValueError("only on my machine")


# ------------------------------------------------------------------------------------------------------- what is decided


def test_the_pinned_versions_need_nothing() -> None:
    """When an upstream release changes this, the docs' tables are to be measured again."""
    status = graph_break.apply()
    verdict = graph_break.verdict()
    assert verdict is not None
    assert verdict.strategy == "none"
    (probe,) = verdict.probes
    assert (probe.name, probe.error) == ("a 4-bit layer", "")
    assert probe.seconds > 0
    assert status == graph_break.status()
    assert not status.applied
    assert status.reason == "none: 4-bit layers compile as they are"
    assert graph_break.foreign_patches() == []


@pytest.mark.parametrize(("strategy", "graphs"), [("none", 1), ("break_linear", 3)])
def test_a_strategy_compiles_as_it_says(strategy: str, graphs: int) -> None:
    report = cogumi.patch(rl=False, graph_break=strategy)
    assert report.patches[-1] == graph_break.status()
    assert graph_break.status().applied == (strategy == "break_linear")
    assert "chosen by name, untried" in str(report)
    layers = straight_line(64, layers=2)

    def block(x: Tensor) -> Tensor:
        return layers[1](layers[0](x.sin()).relu()).sigmoid()

    x = torch.randn(6, 64)
    expected = graph_break.value_and_gradient(block, x)
    torch._dynamo.utils.counters.clear()
    actual = graph_break.value_and_gradient(torch.compile(block, backend="aot_eager"), x)
    assert all(map(torch.equal, expected, actual))
    counted = torch._dynamo.utils.counters
    assert (counted["stats"]["unique_graphs"], sum(counted["graph_break"].values())) == (graphs, graphs - 1)


# --------------------------------------------------------------------------------------------------- again, and back again


def test_applying_twice_is_applying_once(golden: Golden) -> None:
    first, backend = graph_break.apply("break_linear"), Counting()
    layers, patched = torch.compile(lambda x: straight(x) + 1, backend=backend), Linear4bit.forward
    straight = straight_line(64)
    layers(torch.zeros(2, 64))
    compiled = backend.graphs
    assert all(graph_break.apply(choice) == first for choice in ("auto", "break_linear", "off"))
    assert Linear4bit.forward is patched
    layers(torch.zeros(2, 64))
    assert backend.graphs == compiled
    with golden.raises("train", message="break_linear"):
        graph_break.apply("none")
    assert Linear4bit.forward is patched


def test_undo_puts_back_what_was_there_and_drops_compiled_code() -> None:
    backend = Counting()
    layers, x = straight_line(64), torch.zeros(2, 64)
    compiled = torch.compile(lambda x: layers(x) + 1, backend=backend)
    compiled(x)
    assert backend.graphs == 1
    graph_break.apply("break_linear")
    compiled(x)
    patched = backend.graphs
    assert patched > 1, "the graph of before went on running"
    status = graph_break.undo()
    assert not status.applied
    assert status.reason.startswith("not applied")
    assert graph_break.verdict() is None
    assert Linear4bit.forward is ORIGINAL_FORWARD
    compiled(x)
    assert backend.graphs == patched + 1, "the patched graph went on running"
    assert graph_break.undo() == status
    compiled(x)
    assert backend.graphs == patched + 1, "undoing nothing drops nothing"


def test_undo_refuses_where_somebody_patched_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    before = graph_break.apply("break_linear")
    with monkeypatch.context() as patch:
        patch.setattr(Linear4bit, "forward", theirs)
        with pytest.raises(
            RuntimeError, match=r"Linear4bit.forward was since replaced by .*theirs; take that away first"
        ):
            graph_break.undo()
        assert Linear4bit.forward is theirs
        assert graph_break.status().reason.startswith(before.reason)  # and says whose patch is there now
        assert graph_break.foreign_patches() == [f"Linear4bit.forward is {__name__}.theirs"]
    graph_break.undo()
    assert Linear4bit.forward is ORIGINAL_FORWARD


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
        assert graph_break.decide(None).strategy == "none"
        assert state() == before
    compiled(x)
    assert backend.graphs == 1, "a probe dropped compiled code of the user's"


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


@pytest.mark.parametrize("choice", ["auto", "break_linear"])
def test_a_model_without_4_bit_layers_is_left_alone(choice: str) -> None:
    status = graph_break.apply(choice, nn.Sequential(nn.Linear(4, 4)))
    assert not status.applied
    assert status.reason == "the model has no 4-bit layers"
    assert bitsandbytes.matmul_4bit is ORIGINAL_MATMUL


def test_off_changes_nothing() -> None:
    status = graph_break.apply("off")
    assert not status.applied
    assert status.reason == "off: left as it is"


def test_a_disabled_dynamo_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_COMPILE_DISABLE is read at import: tests/test_compiling_environment.py."""
    with monkeypatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        for choice in ("auto", "break_linear"):
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
print(graph_break.apply().reason, graph_break.apply("break_linear").applied, graph_break.foreign_patches())
print(graph_break.undo().applied)
"""
    command = [*prepared_process.python(for_commands), "-c", code]
    done = subprocess.run(command, env=for_commands, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["bitsandbytes is not installed, so there are no 4-bit layers False []", "False"]


@pytest.mark.parametrize(
    ("function", "strategy"),
    [(theirs, "none"), (breaking, "break_linear"), (raising, "break_linear"), (None, "break_linear")],
)
def test_a_foreign_linear4bit_is_named(function: Any, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not compile is blamed on whose function it is, not on Dynamo."""
    monkeypatch.setattr(Linear4bit, "forward", function or torch.compiler.disable(ORIGINAL_FORWARD))
    reason = graph_break.apply("auto").reason
    verdict = graph_break.verdict()
    assert verdict is not None
    assert verdict.strategy == strategy
    name = "torch._dynamo.eval_frame.Linear4bit.forward" if function is None else f"{__name__}.{function.__qualname__}"
    assert f"Linear4bit.forward is {name}" in reason
    assert "Dynamo cannot" not in reason
    assert ("only on my machine" in reason) == (function is raising)
    graph_break.undo()
    assert Linear4bit.forward is (function or vars(Linear4bit)["forward"])


def test_a_foreign_class_in_the_place_of_linear4bit_breaks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(Linear4bit):
        pass

    monkeypatch.setattr(bitsandbytes.nn, "Linear4bit", Theirs)
    graph_break.apply("break_linear")
    assert Theirs.forward is not ORIGINAL_FORWARD
    graph_break.undo()
    assert Theirs.forward is ORIGINAL_FORWARD
