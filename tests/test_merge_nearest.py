"""Every element of a merged sum is the nearest value to W + delta, against rational arithmetic."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import LINEARS, SIZES, save_base, train_adapter
from safetensors import safe_open
from transformers import LlamaConfig

from cogumi.merge import arithmetic, draft, merge_adapter
from cogumi.merge.draft import round_to_odd, sparse_nonzero

MODULE = "model.layers.0.mlp.down_proj"


def make_inputs(directory: Path) -> tuple[Path, Path]:
    base = save_base(directory / "base", LlamaConfig(**SIZES))
    return base, train_adapter(base, directory / "adapter", target_modules=LINEARS)


def exact_rows(base: Path, adapter: Path, rows: range) -> dict[tuple[int, int], Fraction]:
    """W + scaling * B @ A of some rows of one weight, exactly."""
    with safe_open(base / "model.safetensors", "pt") as file:
        weight = file.get_tensor(f"{MODULE}.weight")
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        a, b = (file.get_tensor(f"base_model.model.{MODULE}.lora_{side}.weight") for side in "AB")
    found = {}
    for i in rows:
        for j in range(weight.shape[1]):
            delta = sum(Fraction(b[i, k].item()) * Fraction(a[k, j].item()) for k in range(len(a)))
            found[i, j] = Fraction(weight[i, j].item()) + 2 * delta
    return found


def is_nearest(value: torch.Tensor, exact: Fraction) -> bool:
    below, above = (torch.nextafter(value, torch.tensor(end, dtype=value.dtype)) for end in (-np.inf, np.inf))
    mine = abs(Fraction(value.item()) - exact)
    return all(mine <= abs(Fraction(other.item()) - exact) for other in (below, above))


def merged_weight(out: Path) -> torch.Tensor:
    with safe_open(out / "model.safetensors", "pt") as file:
        return file.get_tensor(f"{MODULE}.weight")


def wrong_products(original: Any) -> Any:
    """What a library does that multiplies float32 in bfloat16."""

    def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(original(left.bfloat16().float(), right.bfloat16().float()))

    return multiply


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_element_is_the_nearest(dtype: str, tmp_path: Path) -> None:
    """Also where W + delta is close to the middle of two values, of which there are some by design."""
    base, adapter = make_inputs(tmp_path)
    report = merge_adapter(adapter, tmp_path / "merged", base=base, dtype=dtype, progress=False)
    assert (report.not_nearest, report.largest_error) == (0, 0)
    weight = merged_weight(tmp_path / "merged")
    for (i, j), exact in exact_rows(base, adapter, range(8)).items():
        assert is_nearest(weight[i, j], exact), (i, j)


def test_some_elements_are_not_decided_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are the same where all of them are computed in float64."""
    base, adapter = make_inputs(tmp_path)
    picked: list[int] = []
    original = draft.exact_sums

    def counted(update: Any, stored: Any, where: torch.Tensor, start: int) -> Any:
        picked.append(len(where))
        return original(update, stored, where, start)

    monkeypatch.setattr(draft, "exact_sums", counted)
    report = merge_adapter(adapter, tmp_path / "few", base=base, progress=False)
    few = sum(picked)
    assert 0 < few < report.elements / 20
    monkeypatch.setattr(draft, "sparse_nonzero", lambda flags: np.arange(len(flags)))
    merge_adapter(adapter, tmp_path / "all", base=base, progress=False)
    assert sum(picked) - few == report.elements
    files = [tmp_path / name / "model.safetensors" for name in ("few", "all")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_products_that_are_not_in_float32_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their row sums are off. Then float64 computes every element, with the same bits."""
    base, adapter = make_inputs(tmp_path)
    right = merge_adapter(adapter, tmp_path / "right", base=base, progress=False)
    monkeypatch.setattr(torch, "mm", wrong_products(torch.mm))
    found = merge_adapter(adapter, tmp_path / "found", base=base, progress=False)
    assert (found.elements, found.not_nearest) == (right.elements, 0)
    files = [tmp_path / name / "model.safetensors" for name in ("right", "found")]
    assert files[0].read_bytes() == files[1].read_bytes()
    monkeypatch.setattr(draft, "probed", lambda *_: True)  # without the row sums it would be another model
    merge_adapter(adapter, tmp_path / "wrong", base=base, progress=False)
    assert (tmp_path / "wrong" / "model.safetensors").read_bytes() != files[0].read_bytes()


def test_one_wrong_product_is_found() -> None:
    """A single element that is off by a hundredth of half a bfloat16 ulp of a weight is not trusted."""
    torch.manual_seed(0)
    update = arithmetic.Update(torch.randn(16, 8).double() * 1e-3, torch.randn(8, 4096).double() * 1e-2)

    class Run:
        first, last = 0, 16

        class piece:
            class place:
                first = 0

    delta = update.single.left @ update.single.right
    assert draft.probed(update, Run, torch.mv(delta, update.probe[0]))  # type: ignore[arg-type]
    delta[3, 77] += 0.02 * 2**-9 / 100
    assert not draft.probed(update, Run, torch.mv(delta, update.probe[0]))  # type: ignore[arg-type]


def test_rounding_to_odd_and_then_to_sixteen_bits_rounds_once() -> None:
    """Values that rounding to float32 first would put on a tie, and then on its wrong side."""
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 2.0**-126 * (1 + 2**-8)], dtype=torch.float64)
    for shift in (2.0**-30, -(2.0**-30), 2.0**-50, 0.0):
        values = ties * (1 + shift)
        rounded = round_to_odd(values).bfloat16()
        for value, got in zip(values, rounded, strict=True):
            assert is_nearest(got, Fraction(value.item()))
    near = torch.tensor([1 + 2**-8 + 2**-30], dtype=torch.float64)
    assert near.float().bfloat16() != round_to_odd(near).bfloat16()  # rounding twice is not the same


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_sparse_nonzero(share: float) -> None:
    flags = np.random.default_rng(0).random(4096) < share
    assert np.array_equal(sparse_nonzero(flags), np.flatnonzero(flags))
