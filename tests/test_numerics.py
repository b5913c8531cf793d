"""The precision of float32 products in any order of runs and merges in one process, and cuDNN's attention by card."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, training_args
from transformers.utils.import_utils import enable_tf32

import cogumi
from cogumi.merge import merge_adapter
from cogumi.merge.arithmetic import ieee_matmul, restore_matmul_precision
from cogumi.rl.patching import patch
from cogumi.stack.gpus import CUDNN_VARIABLE, cudnn_attention_choice, disable_cudnn_attention
from cogumi.training import run as training

backends: Any = torch.backends
FLOAT32 = "ieee", "ieee"


def products() -> tuple[str, str]:
    """The precision that a float32 product takes on a card and on a CPU."""
    return backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision


def readable(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # torch's, where the process mixes the two ways to set the precision
        return "mixed"


def state() -> tuple[Any, ...]:
    legacy = readable(torch.get_float32_matmul_precision), readable(lambda: backends.cuda.matmul.allow_tf32)
    return (backends.fp32_precision, *products(), *legacy)


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    enable_tf32.cache_clear()
    torch.set_float32_matmul_precision("highest")
    for backend in (backends, backends.cuda.matmul, backends.mkldnn.matmul):  # which another test may have set
        backend.fp32_precision = "none"
    with restore_matmul_precision():
        yield
    assert state() == ("none", "none", "none", "highest", False)


def set_product(backend: Any, value: str) -> None:
    backend.matmul.fp32_precision = value


SETTINGS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
    "global": lambda: setattr(backends, "fp32_precision", "tf32"),
    "card": lambda: set_product(backends.cuda, "tf32"),
    "CPU": lambda: set_product(backends.mkldnn, "bf16"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_products_are_in_float32_in_the_block_and_as_they_were_after_it(setting: str) -> None:
    SETTINGS[setting]()
    before = state()
    with restore_matmul_precision():
        assert state() == before
    for change in (lambda: None, lambda: enable_tf32(True)):  # by transformers, which does not take it back
        with ieee_matmul():
            change()
            assert products() == FLOAT32
            assert state()[3:] == ("highest", False)  # by the older functions, which raise where the two ways disagree
        assert state() == before
    backends.fp32_precision = later = "ieee" if setting == "global" else "tf32"
    # It reaches what the user has left open, and nothing else.
    left_open = {"nothing": (0, 1), "allow_tf32": (1,), "global": (0, 1), "card": (1,), "CPU": (0,)}.get(setting, ())
    assert products() == tuple(later if n in left_open else before[1 + n] for n in (0, 1))


@pytest.mark.parametrize(
    "setting",
    ["high", pytest.param("global", marks=pytest.mark.slow("nine runs and merges; the first tier has 'high'"))],
)
def test_gspo_multiplies_in_float32_in_any_order_of_runs_and_merges(
    setting: str,
    sft: dict[str, Any],
    tiny_model: Path,
    finished_sft: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, str]] = []

    class Look(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seen.append(products())

    fit = training.fit

    def watched(run: Any, trainer: Any, *others: Any) -> Any:
        trainer.add_callback(Look())
        return fit(run, trainer, *others)

    monkeypatch.setattr(training, "fit", watched)
    monkeypatch.setattr(
        training_args, "is_torch_tf32_available", lambda: True
    )  # as on a card, which a run's setting needs
    sft["data"] |= {"eval_rows": 0, "max_rows": 4}
    sft["train"] |= {"max_steps": 1, "per_device_train_batch_size": 2}
    sft["cogumi"] |= {"compile": "off", "preflight": "off"}
    gspo = sft["train"] | {"tf32": False, "num_generations": 2, "max_completion_length": 4}

    def run(kind: str, place: str) -> None:
        if kind == "merge":
            merge_adapter(finished_sft.result.adapter, tmp_path / place, base=tiny_model, progress=False)
            return
        ours = sft["cogumi"] | {"run_dir": str(tmp_path / place), "method": kind}
        given = sft | {"train": sft["train"] | {"tf32": True}, "cogumi": ours}
        if kind == "gspo":
            given = sft | {"train": gspo, "cogumi": ours | {"rewards": ["parses"]}}
        cogumi.train(given)

    SETTINGS[setting]()
    before = state()
    # Each order of two and of three of them is a part of this one.
    for n, kind in enumerate(["sft", "merge", "gspo", "sft", "merge", "sft", "gspo", "merge", "sft"]):
        seen.clear()
        run(kind, f"{n}-{kind}")
        steps = {"sft": {("tf32", "tf32")}, "gspo": {FLOAT32}, "merge": set()}  # a merge multiplies in float64
        assert set(seen) == steps[kind], (n, kind)
        assert state() == before, (n, kind)


@pytest.mark.parametrize(
    ("capability", "version", "defect"),
    [
        ((9, 0), 91900, "cuDNN 9.19: NaN gradients under a mask"),
        ((9, 0), 92048, "cuDNN 9.20: NaN gradients under a mask"),
        ((10, 3), 92599, "cuDNN 9.25: corrupt decoding"),
        ((9, 0), 92600, ""),
        ((8, 0), 91900, ""),  # torch prefers others there
        ((12, 0), 91900, ""),
        ((9, 0), None, ""),
        (None, 91900, ""),
    ],
)
def test_cudnns_attention_by_card_and_version(
    capability: tuple[int, int] | None, version: int | None, defect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cudnn_attention_choice(capability, version).startswith(defect)
    assert bool(cudnn_attention_choice(capability, version)) is bool(defect)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    for said in ("1", "0", None):
        monkeypatch.delenv(CUDNN_VARIABLE, raising=False)
        if said is not None:
            monkeypatch.setenv(CUDNN_VARIABLE, said)
        torch.backends.cuda.enable_cudnn_sdp(True)
        try:
            disabled = disable_cudnn_attention(capability)
            assert bool(disabled) is (bool(defect) and said != "0")
            assert torch.backends.cuda.cudnn_sdp_enabled() is not bool(disabled)
            assert os.environ.get(CUDNN_VARIABLE) == ("1" if defect and said is None else said)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)


def test_a_script_that_patches_does_without_cudnns_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUDNN_VARIABLE, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    patch(graph_break="off")
    assert os.environ.get(CUDNN_VARIABLE) == "1"
    torch.backends.cuda.enable_cudnn_sdp(True)
