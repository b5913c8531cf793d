"""What inductor compiles for a CPU, which takes a C++ compiler half a minute: few tests, and nothing stands in for anything."""

from pathlib import Path

import pytest
import torch
from four_bit_models import tiny_llama
from test_compiling import trained, uncompile
from test_compiling_run import STEPS, Run

from cogumi.compile.layers import compile_layers, parts_of
from cogumi.patches import graph_break

pytestmark = pytest.mark.slow("compiles with a C++ compiler")


@pytest.fixture(autouse=True)
def kept_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    graph_break.undo()  # of an earlier test


def test_a_run_trains_compiled(tmp_path: Path) -> None:
    """Nothing is patched."""
    run = Run(tmp_path).train("layers")
    said = run.json
    assert len(run.losses) == STEPS
    assert said["strategy"] == "none"
    assert "no 4-bit experts" in said["strategy_reason"]
    assert said["counts"]["graphs"] >= 2
    assert all(part._compiled_call_impl is not None for part in parts_of(run.trainer.model))


@pytest.mark.sweep
def test_losses_and_gradients_are_eagers_to_five_digits() -> None:
    written = trained(tiny_llama(layers=1), 3)
    model = tiny_llama(layers=1)
    compile_layers(model)
    for (a, g), (b, h) in zip(trained(model, 3), written, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
        for name in g:
            torch.testing.assert_close(g[name], h[name], rtol=1e-5, atol=1e-5)
    uncompile(model)
