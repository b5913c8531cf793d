"""Every element of a merge is the nearest value to W + delta, against rational arithmetic."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import LINEARS, SIZES, save_base, train_adapter
from safetensors import safe_open
from transformers import LlamaConfig

from cogumi.merge import merge_adapter
from cogumi.merge.arithmetic import round_once, round_to_odd

MODULE = "model.layers.0.mlp.down_proj"


def exact_rows(base: Path, adapter: Path, rows: range) -> dict[tuple[int, int], Fraction]:
    """Return W + scaling * B @ A of some rows of one weight, exactly."""
    with safe_open(base / "model.safetensors", "pt") as file:
        weight = file.get_tensor(f"{MODULE}.weight")
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        a, b = (file.get_tensor(f"base_model.model.{MODULE}.lora_{side}.weight") for side in "AB")
    exact = {}
    for i in rows:
        for j in range(weight.shape[1]):
            delta = sum(Fraction(b[i, k].item()) * Fraction(a[k, j].item()) for k in range(len(a)))
            exact[i, j] = Fraction(weight[i, j].item()) + 2 * delta
    return exact


def is_nearest(value: torch.Tensor, exact: Fraction) -> bool:
    below, above = (torch.nextafter(value, torch.tensor(end, dtype=value.dtype)) for end in (-np.inf, np.inf))
    mine = abs(Fraction(value.item()) - exact)
    return all(mine <= abs(Fraction(other.item()) - exact) for other in (below, above))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_element_is_the_nearest(dtype: str, tmp_path: Path) -> None:
    """Also where W + delta is close to the middle of two values, of which there are some by design."""
    base = save_base(tmp_path / "base", LlamaConfig(**SIZES))
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=LINEARS)
    merge_adapter(adapter, tmp_path / "merged", base=base, dtype=dtype, progress=False)
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file:
        weight = file.get_tensor(f"{MODULE}.weight")
    for (i, j), exact in exact_rows(base, adapter, range(8)).items():
        assert is_nearest(weight[i, j], exact), (i, j)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """Values that rounding to float32 first would put on a tie, and then on its wrong side, subnormal ones included."""
    torch.manual_seed(0)
    small = torch.finfo(dtype).tiny
    starts = torch.cat([torch.randn(200), torch.randn(200) * small, torch.tensor([1.0, small / 8, 0.0])]).to(dtype)
    middles = (starts.double() + torch.nextafter(starts, torch.full_like(starts, torch.inf)).double()) / 2
    for shift in (0.0, 2.0**-30, -(2.0**-30), 2.0**-50, -(2.0**-50)):
        values = (middles * (1 + shift))[None]
        rounded = torch.empty(values.shape, dtype=dtype)
        round_once(values, rounded)
        assert torch.equal(rounded, round_to_odd(values).to(dtype))
        for value, result in zip(values[0], rounded[0], strict=True):
            assert is_nearest(result, Fraction(value.item())), value
    near = torch.tensor([[1 + 2.0**-8 + 2.0**-30, 1 + 2.0**-11 + 2.0**-40]], dtype=torch.float64)
    place = [torch.bfloat16, torch.float16].index(dtype)
    assert near.float().to(dtype)[0, place] != round_to_odd(near).to(dtype)[0, place]  # rounding twice is not the same
