"""Memory that runs out at a step: half the micro-batch for the same step, from the last finished one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import as_gspo
from safetensors.torch import load_file

import cogumi
from cogumi.core.run_directory import read_json, read_jsonl
from cogumi.methods import building

Config = dict[str, Any]
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[int]]:
    """A card on which so many rows fit a training step once a step is finished; returns the rows of each forward pass."""
    build = building.build_trainer

    def limit(rows: int, after: int) -> list[int]:
        sizes: list[int] = []

        def built(*arguments: Any, **options: Any) -> Any:
            trainer = build(*arguments, **options)
            step, inside = trainer.training_step, []

            def training_step(*arguments: Any, **options: Any) -> torch.Tensor:
                inside.append(True)
                loss: torch.Tensor = step(*arguments, **options)
                inside.clear()
                return loss

            def look(_: Any, inputs: tuple[torch.Tensor]) -> None:
                if inside and torch.is_grad_enabled():
                    sizes.append(len(inputs[0]))
                    if sizes[-1] > rows and trainer.state.global_step >= after:
                        raise torch.OutOfMemoryError(FULL)

            trainer.training_step = training_step
            trainer.model.get_input_embeddings().register_forward_pre_hook(look)
            return trainer

        monkeypatch.setattr(building, "build_trainer", built)
        return sizes

    return limit


def gspo_by_batch(sft: Config, **train: Any) -> Config:
    """Eight documents a step, all at once; a rollout serves four steps."""
    config = as_gspo(sft, per_device_train_batch_size=8, gradient_accumulation_steps=1, **train)
    del config["cogumi"]["docs_per_step"]
    return config


def as_dpo(sft: Config) -> Config:
    rows = [{"prompt": f"say {n}", "chosen": f" {n} it is", "rejected": f" no {n * 7}"} for n in range(24)]
    path = Path(sft["cogumi"]["run_dir"]).parent / "pairs.jsonl"
    path.write_text("".join(str(row).replace("'", '"') + "\n" for row in rows))
    data = {"source": str(path), "format": "preference", "eval_rows": 4}
    return {**sft, "data": data, "cogumi": sft["cogumi"] | {"method": "dpo"}}


CONFIGS: dict[str, Callable[[Config], Config]] = {
    "sft": dict, "dpo": as_dpo, "gspo": gspo_by_batch, "gspo planned": lambda sft: as_gspo(sft, per_device_train_batch_size=8),
    **{name: partial(gspo_by_batch, loss_type=name, steps_per_generation=4) for name in ("grpo", "dapo")},
}  # fmt: skip


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_half_the_micro_batch_makes_the_same_steps(
    sft: Config, name: str, after: int, card: Callable[[int, int], list[int]], tmp_path: Path
) -> None:
    config = CONFIGS[name](sft)
    whole = cogumi.train(config, cogumi__run_dir=str(tmp_path / "whole"))
    rows = 2 if name == "sft" else 4
    sizes = card(rows, after)
    result = cogumi.train(config)
    assert [(check.name, check.passed) for check in result.verdict.checks] == [
        (check.name, check.passed) for check in whole.verdict.checks
    ]
    log = (result.run_dir / "run.log").read_text()
    assert log.count("memory ran out at a step in micro-batches of ") == 1
    assert ("resuming from" in log) is (after > 0)
    assert max(sizes) == 2 * rows
    assert [row["step"] for row in result.metrics if "loss" in row] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm", "reward"):
        assert result.series(key) == pytest.approx(whole.series(key), rel=2e-4, abs=2e-5), key
    ours, theirs = (load_file(run.adapter / "adapter_model.safetensors") for run in (result, whole) if run.adapter)
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-3, atol=2e-5)


def test_a_smaller_micro_batch_is_kept_by_a_resume(
    sft: Config, card: Callable[[int, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = card(2, 2)
    cogumi.train(sft, cogumi__sanity=4)
    (kept,) = (entry for entry in read_json(Path(sft["cogumi"]["run_dir"]) / "decisions.json")["settings"])
    assert (kept["key"], kept["value"]) == ("train.per_device_train_batch_size", 2)
    sizes.clear()
    result = cogumi.train(sft)
    assert max(sizes) == 2
    assert [row["step"] for row in read_jsonl(result.run_dir / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("rows", "more", "tried"), [(0, {}, [4, 4, 3, 2, 1]), (2, {"dataloader_drop_last": True}, [4, 4, 4])]
)
def test_memory_that_no_micro_batch_fits_is_the_error_of_the_run(
    sft: Config, rows: int, more: dict[str, Any], tried: list[int], card: Callable[[int, int], list[int]]
) -> None:
    """Twice, and never where another micro-batch would be another step. The last finished step is saved."""
    sft["train"] |= more
    sizes = card(rows, 2)
    with pytest.raises(torch.OutOfMemoryError):
        cogumi.train(sft)
    run_dir = Path(sft["cogumi"]["run_dir"])
    assert sizes == tried
    status = read_json(run_dir / "status.json")
    assert status["state"] == "failed"
    assert status["cause"].startswith("cuda-out-of-memory: The step did not fit the card's memory")
    assert (run_dir / "checkpoints" / "checkpoint-2").is_dir()
