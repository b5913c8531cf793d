"""The merge benchmark measures what it says: real merges of a tiny base, and damage that its checks must see."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks import harness, merge, models
from benchmarks.harness import Finished, run_process
from benchmarks.models import Inputs
from cogumi.merge import merge_adapter

pytestmark = pytest.mark.slow("of the benchmarks, not of the package")

ON_LINUX = sys.platform == "linux"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    return models.write_inputs(merge.TINY, folder, shard_bytes=100_000, rank=4)


@pytest.fixture(scope="module")
def merged(inputs: Inputs) -> Path:
    out = inputs.base.parent / "merged"
    merge_adapter(inputs.adapter, out, base=str(inputs.base), progress=False)
    return out


@pytest.fixture
def out(merged: Path, tmp_path: Path) -> Path:
    """A merged directory to damage."""
    shutil.copytree(merged, tmp_path / "out")
    return tmp_path / "out"


# --------------------------------------------------------------------------------------------------------------- inputs


def test_the_base_is_a_sharded_model_that_transformers_loads(inputs: Inputs) -> None:
    files = sorted(inputs.base.glob("*.safetensors"))
    assert len(files) > 1
    assert inputs.base_bytes == sum(path.stat().st_size for path in files)
    loaded: Any = AutoModelForCausalLM.from_pretrained(inputs.base, dtype="auto", output_loading_info=True)
    model, loading = loaded
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    index = json.loads((inputs.base / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * weight.numel() for weight in model.parameters())
    assert all(weight.any() for weight in model.parameters())


def test_the_adapter_is_peft_s_and_every_linear_layer_has_one(inputs: Inputs) -> None:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(inputs.base, dtype=torch.float32)
    tokens = torch.arange(12).reshape(1, 12)
    before = base(tokens).logits
    live = PeftModel.from_pretrained(base, str(inputs.adapter))
    assert (live(tokens).logits - before).abs().max() > 1e-4
    weights = load_file(inputs.adapter / "adapter_model.safetensors")
    assert len(weights) == 2 * 7 * merge.TINY.layers
    assert all(weight.any() and weight.dtype == torch.float32 for weight in weights.values())


# ------------------------------------------------------------------------------------------------------------ processes


@pytest.mark.skipif(not ON_LINUX, reason="reads /proc")
def test_anonymous_memory_is_counted_and_file_pages_and_children_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (40 << 20))
    hold = "import time; data = bytearray(b'x') * (64 << 20); time.sleep(0.3)"
    mapped = (
        f"import mmap, time; f = open({str(tmp_path / 'file')!r}); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); "
        "sum(m[::4096]); time.sleep(0.3)"
    )
    parent = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {hold!r} + '; time.sleep(1.5)'])"
    peaks = {
        name: run_process([sys.executable, "-c", code])
        for name, code in {"hold": hold, "mapped": mapped, "parent": parent}.items()
    }
    anonymous = {name: each.anonymous / 2**20 for name, each in peaks.items()}
    assert 64 < anonymous["hold"] < 64 + 20
    assert anonymous["mapped"] < 20
    assert peaks["mapped"].resident / 2**20 > 40
    assert anonymous["parent"] > 64


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"exit status 3: the reason"):
        run_process([sys.executable, "-c", "import sys; print('the reason', file=sys.stderr); sys.exit(3)"])


# ---------------------------------------------------------------------------------------------------------------- rows


def finished(seconds: float, mebibytes: int, output: str = "") -> Finished:
    return Finished(0, seconds, output, mebibytes << 20, mebibytes << 20)


def test_ratios_are_of_adjacent_runs_and_held_to_their_targets() -> None:
    runs = {
        "cogumi": [finished(s, 1) for s in (12.0, 30.0, 16.0)],
        "cp -r": [finished(s, 1) for s in (10.0, 15.0, 10.0)],
        "parts": [finished(99.0, 1)],
        "imports of cogumi merge": [finished(s, 1) for s in (1.5, 2.5, 2.25)],
        "PEFT": [finished(s, 1) for s in (60.0, 90.0)],
    }
    rows = {row["metric"]: row for row in merge.seconds_and_ratios("case", runs, 1.5)}
    against_cp = rows["cogumi / cp -r"]
    assert (against_cp["value"], against_cp["spread"], against_cp["ok"]) == (1.6, [1.2, 2.0], False)
    imports = rows["time, imports of cogumi merge"]
    assert (imports["value"], imports["ok"]) == (2.25, False)
    peft = rows["PEFT / cogumi"]
    assert (peft["value"], peft["spread"], peft["ok"]) == (4.0, [3.0, 5.0], True)
    unjudged = [row for row in merge.seconds_and_ratios("case", runs, None) if row["target"]]
    assert unjudged == []


def test_parts_are_processor_time_over_the_bytes_of_the_base(inputs: Inputs) -> None:
    size = inputs.base_bytes / 1e9
    collected = [
        {"imports": 1.0, "writing": 2 * size, "two hashes": size, "all": 1 + (3 + more) * size} for more in (1, 2, 0)
    ]
    rows = {row["metric"]: row for row in merge.part_rows("case", collected, inputs, judged=True)}
    assert rows["processor time, writing"]["value"] == pytest.approx(2)
    assert rows["processor time, the rest"]["spread"] == pytest.approx([0, 2], abs=1e-6)
    whole = rows["processor time, all but the imports"]
    assert (whole["value"], whole["ok"]) == (pytest.approx(4), False)
    assert rows["processor time, imports"]["value"] == 1


def test_memory_is_the_worst_merge_over_import_torch(inputs: Inputs) -> None:
    runs = {
        "cogumi": [finished(1, 300, "0.5"), finished(1, 451, "0.5")],
        "cp -r": [Finished(0, 0.001, "")],
        "import torch": [finished(1, 300), finished(1, 301)],
    }
    rows = {row["metric"]: row for row in merge.memory_rows("case", inputs, runs)}
    over = rows["peak anonymous memory, cogumi - import torch"]
    assert (over["value"], over["target"], over["ok"]) == (151, "<= 150", False)
    runs["import torch"] = [Finished(0, 1, "")]
    (row,) = merge.memory_rows("case", inputs, runs)
    assert row["note"].startswith("missing")


def test_a_sampled_element_that_is_off_is_counted(inputs: Inputs, out: Path) -> None:
    assert merge.sampled_violations(inputs, out)[0] == 0
    name = "model.layers.1.mlp.down_proj.weight"
    path = merge.tensor_files(out)[name]
    tensors = load_file(path)
    # Every element by one ulp: at least half an ulp further off than it was allowed to be, or exactly on its edge.
    tensors[name] = (tensors[name].view(torch.int16) + 2).view(torch.bfloat16)
    save_file(tensors, path, {"format": "pt"})
    beyond, looked = merge.sampled_violations(inputs, out)
    assert beyond == 8 * merge.TINY.intermediate
    assert looked == 8 * merge.TINY.layers * (6 * merge.TINY.hidden + merge.TINY.intermediate)


# --------------------------------------------------------------------------------------------------------- the command


@pytest.mark.sweep  # seven processes that import torch, transformers and PEFT
def test_a_quick_run_has_every_part_and_no_failure() -> None:
    rows = list(merge.run(quick=True))
    assert all(tuple(row) == harness.COLUMNS and row["benchmark"] == "merge" for row in rows)
    assert harness.failed(rows) == []
    metrics = {row["metric"] for row in rows}
    assert {"cogumi / cp -r", "PEFT / cogumi", "sampled elements off"} <= metrics
    if ON_LINUX:
        assert "peak anonymous memory, cogumi - import torch" in metrics


def test_too_little_disk_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr(merge, "QUICK", replace(merge.QUICK, disk_bytes=10**18))
    (row,) = merge.run(quick=True)
    assert row["note"].startswith("skipped: needs 1000000000 GB in TMPDIR, ")
