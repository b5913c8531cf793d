"""The bottom of the ladder on a torch whose Dynamo cannot take a 4-bit layer: `make test-torch27` installs one and runs this.

It needs torch, bitsandbytes and pytest alone, and no conftest.py.
"""

import pytest
import torch

pytest.importorskip("bitsandbytes")
if not torch.__version__.startswith("2.7."):
    pytest.skip(
        f"torch {torch.__version__} takes 4-bit layers; make test-torch27 has one that does not",
        allow_module_level=True,
    )

from bitsandbytes.nn import Linear4bit

from cogumi.patches import graph_break
from cogumi.patches.graph_break import WIDTH, probe_linear, value_and_gradient


def test_a_probe_really_fails_and_the_layer_is_broken_around() -> None:
    probe = probe_linear(torch.device("cpu"))
    assert "Unsupported" in probe.error
    status = graph_break.apply()
    assert status.applied
    assert status.reason.startswith("break_linear on Linear4bit.forward: Dynamo cannot take a 4-bit layer")
    settings = {"compute_dtype": torch.float32, "quant_type": "nf4"}
    first, second = (Linear4bit(WIDTH, WIDTH, **settings).to("cpu").requires_grad_(False) for _ in range(2))

    def block(x: torch.Tensor) -> torch.Tensor:
        return second(first(x).relu()).sigmoid()

    x = torch.randn(5, WIDTH)
    expected = value_and_gradient(block, x)
    torch._dynamo.utils.counters.clear()
    actual = value_and_gradient(torch.compile(block, backend="aot_eager"), x)
    assert all(map(torch.equal, expected, actual))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # relu and sigmoid
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 2
    assert not graph_break.undo().applied
    assert probe_linear(torch.device("cpu")).error
