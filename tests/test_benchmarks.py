"""The harness says what happened, and every gpu case really runs, on the CPU with tiny models."""

import importlib.metadata
import json
import math
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import commands, gpu, gpu_steps, harness, models
from benchmarks.harness import Budget, Finished, row
from cogumi.patches import fused_head
from cogumi.stack import probes

pytestmark = pytest.mark.slow("of the benchmarks, not of the package")

TINY = {
    "qwen3": models.Shape("tiny-qwen3", 32, 64, 2, 4, 2, 97, True, family="qwen3"),
    "llama": models.Shape("tiny-llama", 32, 64, 2, 4, 2, 97, False),
}
BATCH = gpu_steps.Batch(sequences=2, prompt=5, completion=7)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    # On tiny shapes two threads only wait for each other, for seconds on a busy machine.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def well_formed(rows):
    keys = set(row("benchmark", "case", "metric", 1.0))
    for each in rows:
        assert set(each) == keys
        assert each["value"] is not None or each["note"]
        if isinstance(each["value"], float):
            assert math.isfinite(each["value"])
    json.dumps(rows, allow_nan=False)
    return rows


def named(rows, metric):
    return {each["case"]: each for each in rows if each["metric"] == metric}


def test_interleave_takes_turns_and_leaves_the_warmup_out():
    calls = []
    times = harness.interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=2)
    assert "".join(calls) == "abbaabbaab"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}
    own = iter([3.0, 1.0, 2.0])
    assert harness.interleave({"a": lambda: next(own)}, repeats=2) == {"a": [1.0, 2.0]}


def test_ratio_is_the_median_of_adjacent_pairs():
    # The neighbour slowed the second pair down tenfold: the medians' ratio would be 0.55, each pair's is 0.5.
    assert harness.ratio({"ours": [1, 10, 1.1], "peer": [2, 20, 2.0]}, "ours", "peer") == (0.5, 0.5, 0.55)


@pytest.mark.parametrize(
    ("value", "target", "ok"), [(1, "<= 2", True), (3, "<= 2", False), (3, ">= 2", True), (3, "fast", None)]
)
def test_target_decides_ok(value, target, ok):
    assert row("b", "c", "m", value, target=target)["ok"] is ok


def test_a_process_that_is_late_ends_with_its_children():
    started = time.monotonic()
    child = "import time; time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(subprocess.TimeoutExpired):
        harness.run_process(harness.python(parent), timeout=0.5)
    assert time.monotonic() - started < 10
    assert not [each for each in psutil.Process().children(recursive=True) if child in each.cmdline()]


def test_smoke_reports_the_last_line_of_a_failure_and_no_times(monkeypatch):
    failed = Finished(1, 3.0, "preflight ok\nRuntimeError: no loss ran\n")
    monkeypatch.setattr(commands, "run_process", lambda *_, **__: failed)
    (only,) = well_formed(list(commands.smoke(quick=True)))
    assert (only["ok"], only["note"]) == (False, "RuntimeError: no loss ran")
    monkeypatch.setattr(commands, "run_process", lambda *_, **__: Finished(0, 130.0, "ok", 2**30))
    rows = well_formed(list(commands.smoke()))
    assert [(each["metric"], each["ok"]) for each in harness.failed(rows)] == [("wall time", False)]


def test_unknown_name_and_missing_card_end_with_one_line_and_status_2(capsys):
    assert command.main(["nope"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("unknown benchmark 'nope': one of cpu, importing, ")
    if not torch.cuda.is_available():
        assert command.main(["gpu"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("no CUDA device: ")


def test_a_failing_entry_keeps_its_rows_and_the_others(monkeypatch, tmp_path, capsys):
    def entry(name, quick):
        yield row(name, "case", "time", 1.0, "s", target="<= 2")
        if name == "fim_data":
            raise KeyError("gone")

    monkeypatch.setattr(command, "entry", entry)
    path = tmp_path / "deep" / "out.json"
    assert command.main(["cpu", "--quick", "--json", str(path)]) == 1
    saved = json.loads(path.read_text())
    rows = well_formed(saved["rows"])
    assert {each["benchmark"] for each in rows} == set(command.CPU)
    assert [each["note"] for each in harness.failed(rows)] == ["failed: KeyError: 'gone'"]
    assert "KeyError: 'gone'" in capsys.readouterr().out
    assert saved["machine"]["cores"] >= 1
    assert saved["versions"]["torch"] == importlib.metadata.version("torch")
    assert set(saved["git"]) == {"commit", "dirty"}
    assert command.main(["importing", "--json", str(path)]) == 0


@pytest.mark.parametrize(("words", "status"), [([], 1), (["--quick"], 0)])
def test_a_missed_target_is_a_failure_of_a_whole_run_alone(words, status, monkeypatch, tmp_path):
    missed = row("importing", "case", "time", 3.0, "s", target="<= 2")
    monkeypatch.setattr(command, "entry", lambda name, quick: [missed])
    assert command.main(["importing", *words, "--json", str(tmp_path / "out.json")]) == status


def test_importing_entry_and_dated_file_name(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    assert command.main(["importing", "--quick"]) == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith(f"{harness.date.today().isoformat()}-importing-quick-")
    assert {each["metric"] for each in json.loads(path.read_text())["rows"]} == {"time", "heavy modules loaded"}


def test_a_number_that_is_not_one_is_a_failure_and_not_saved(tmp_path):
    lost = row("b", "c", "m", math.nan, spread=(0.0, math.nan), target="<= 1")
    assert (lost["value"], lost["spread"], lost["ok"], lost["note"]) == (None, None, False, "failed: nan")
    with pytest.raises(ValueError, match="Out of range float"):
        harness.save({"rows": [{"value": math.nan}]}, tmp_path / "out.json")


def test_step_flops_of_published_models():
    batch = gpu_steps.Batch(1, 0, 2048)
    # 8.03e9 parameters, of which 0.53e9 are the input embedding; about 33 GFLOP a token at T = 2048.
    llama = models.LLAMA_3_1_8B
    assert llama.body_weights + 2 * llama.head_weights == pytest.approx(8.03e9, rel=1e-3)
    assert gpu_steps.step_flops(llama, batch, 2048) / 2048 == pytest.approx(33.2e9, rel=5e-3)
    qwen = models.QWEN3_0_6B
    assert qwen.body_weights + qwen.head_weights == pytest.approx(0.596e9, rel=1e-2)


@pytest.mark.parametrize("family", TINY)
def test_shape_counts_the_weights_of_the_model_it_builds(family):
    shape = TINY[family]
    model = models.build(shape, "cpu", torch.bfloat16).get_base_model()
    layers = [weight for name, weight in model.named_parameters() if "layers" in name and weight.ndim == 2]
    assert sum(weight.numel() for weight in layers if not weight.requires_grad) == shape.body_weights
    assert model.get_output_embeddings().weight.numel() == shape.head_weights
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is shape.tied
    assert {weight.dtype for weight in layers if not weight.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_case(dtype):
    rows = well_formed(list(gpu.head_case("cpu", dtype, (70, 16, 97), repeats=2)))
    notes = [each["note"] for each in rows if each["case"].endswith(": trl")]
    assert notes == [f"missing: {gpu.why_no_trl_kernel('cpu')}"]
    bound = 1e-5 if dtype == torch.float32 else 0.1
    for metric in ("max |log-prob - fp32| of 64 tokens", "gradient against fp32 of 64 tokens"):
        errors = named(rows, metric)
        assert len(errors) == 2  # cogumi and dense
        assert all(each["value"] < bound for each in errors.values())
    assert "ratio" in {each["unit"] for each in rows}


@pytest.mark.parametrize("family", TINY)
def test_training_steps_with_trl(family):
    rows = well_formed(list(gpu_steps.shape_cases(TINY[family], BATCH, "cpu", torch.float32, 2, None)))
    assert harness.failed(rows) == []
    losses = named(rows, "loss")
    assert [case.split()[0] for case in losses] == ["SFT", "GSPO"]
    # TRL's own kernel needs a GPU, and the rows say so; so do peak memory and MFU.
    assert sum(each["case"].endswith(": trl") and each["value"] is None for each in rows) == 2
    assert all(each["value"] is None for each in [*named(rows, "MFU").values(), *named(rows, "peak memory").values()])
    assert next(iter(losses.values()))["value"] == pytest.approx(math.log(97), rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="TRL's kernel would run")
def test_a_peer_that_breaks_does_not_cost_our_own_numbers(monkeypatch):
    fused_head.undo()  # of an earlier test
    monkeypatch.setattr(gpu_steps, "why_no_trl_kernel", lambda device: None)
    rows = well_formed(list(gpu_steps.shape_cases(TINY["qwen3"], BATCH, "cpu", torch.float32, 2, None)))
    assert [each["case"].endswith(gpu_steps.TRL) for each in harness.failed(rows)] == [True, True]
    assert all(case.endswith("cogumi head, forced") for case in named(rows, "step"))
    assert len(named(rows, "step")) == 2


@pytest.mark.parametrize(
    "case",
    [each if each == "sft, 4-bit" else pytest.param(each, marks=pytest.mark.sweep) for each in gpu.CASES],
)
def test_a_forecast_is_made_in_a_run_of_its_own(case: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 2048}  # fmt: skip
    model = gpu.random_model(tmp_path / "model", shape)
    (found,) = well_formed(list(gpu.compared(case, model, tmp_path / "run")))
    assert found["note"] == "no GPU: nothing to compare with"
    assert found["value"] > 0


def test_the_gspo_case_is_the_papers_loss():
    """Equation 5 of arXiv 2507.18071 on ratios inside the clip range, above it, inside it and below it."""
    model = models.build(TINY["qwen3"], "cpu", torch.float32)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(97, (4, 5), generator=generator)
    completion = torch.randint(97, (4, 7), generator=generator)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "advantages": torch.tensor([1.0, 1.0, -1.0, -2.0]),
    }
    with torch.no_grad():
        logits = model(torch.cat([prompt, completion], dim=1)).logits[:, 4:-1]
    new = logits.log_softmax(-1).gather(-1, completion[..., None])[..., 0]
    inputs["old_per_token_logps"] = new - torch.tensor([[1e-4], [1e-3], [2e-4], [-1e-3]])
    with gpu_steps.head_patch():
        found = gpu_steps.grpo_trainer(model, "cpu", torch.float32, BATCH)._compute_loss(model, inputs)
    assert found.item() == pytest.approx(-(1 + 1e-4 + 1 + 4e-4 - (1 + 2e-4) - 2 * (1 - 3e-4)) / 4, abs=1e-6)


def test_probes_run_in_their_own_process_and_say_what_failed(monkeypatch):
    (said,) = well_formed(gpu.probe("torch", "cpu"))
    assert said["value"] == torch.__version__
    (broken,) = well_formed(gpu.probe("torch", "cuda:99"))
    assert broken["ok"] is False
    assert broken["note"].startswith(f"failed: torch {importlib.metadata.version('torch')}: ")
    monkeypatch.setattr(probes.importlib.util, "find_spec", lambda name: None)
    (absent,) = well_formed(gpu.probe("flash_attn", "cpu"))
    assert (absent["ok"], absent["note"]) == (None, "missing: flash-attn")


def test_sdpa_probe_names_the_backends_that_run_and_those_that_decline():
    said = {metric: value for metric, value, _, _ in probes.probe_sdpa("cpu")}
    assert said["MATH"] > 0
    assert said["CUDNN_ATTENTION"] is None


def test_bitsandbytes_probe_is_a_forward_and_a_backward():
    pytest.importorskip("bitsandbytes")
    ((metric, error, _, _),) = probes.probe_bitsandbytes("cpu")
    assert metric == "4-bit forward and backward"
    assert 0.01 < error < 0.25


def test_no_case_starts_when_the_time_is_over():
    start = time.monotonic()
    rows = well_formed(list(gpu.run(device="cpu", budget=Budget(0.0))))
    assert time.monotonic() - start < 1
    assert {each["benchmark"] for each in rows} == {"gpu_probes", "gpu_head", "gpu_steps", "gpu_forecast", "gspo_step"}
    assert {each["note"] for each in rows} == {"skipped: out of time"}


def test_out_of_memory_is_a_row_and_any_other_error_a_failure(monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "cogumi_head", full)
    rows = well_formed(list(gpu.head_case("cpu", torch.float32, (8, 4, 11), repeats=1)))
    assert [each["note"] for each in rows if each["case"].endswith(": cogumi")] == ["out of memory on this card"]
    assert any(each["case"].endswith(": dense") and each["metric"] == "forward and backward" for each in rows)

    monkeypatch.setattr(gpu_steps, "build", full)
    (only,) = gpu_steps.shape_cases(TINY["qwen3"], BATCH, "cpu", torch.float32, 1, None)
    assert only["ok"] is None

    def broken(*_):
        raise RuntimeError("not about memory")

    monkeypatch.setattr(gpu_steps, "build", broken)
    (only,) = gpu_steps.shape_cases(TINY["qwen3"], BATCH, "cpu", torch.float32, 1, None)
    assert (only["ok"], only["note"]) == (False, "failed: RuntimeError: not about memory")
