"""What a run says of itself while it runs and at its end, and that saying it changes nothing."""

import json
import logging
import os
import pickle
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from finished_runs import FinishedRun
from processes import until
from safetensors.torch import load_file

import cogumi
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_duration, pip_command, python_command
from cogumi.core.redact import REDACTED, RedactedStr, redact_text
from cogumi.core.run_directory import read_json, read_jsonl, write_json
from cogumi.health.flags import SampleCounts, read_samples
from cogumi.models.completion import complete_with_ends
from cogumi.stack.ranks import Ranks
from cogumi.telemetry import heartbeat, recorder, throughput, trackers
from cogumi.telemetry.heartbeat import Heartbeat, compare_rollouts
from cogumi.telemetry.recorder import StepTimer, preserve_rng_and_mode, write_samples
from cogumi.telemetry.throughput import Meter, document_lengths
from cogumi.training import loop

Config = dict[str, Any]
TOKEN = "hf_" + "Qk7" * 12


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads out of a run's directory: tag -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    collected: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((run_dir / "tensorboard").glob("*tfevents*")):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            collected.setdefault(tag, []).extend((scalar.step, scalar.value) for scalar in events.Scalars(tag))
    return collected


def after_step(patch: pytest.MonkeyPatch, act: Callable[[Any, Any, Any], None]) -> None:
    """Have `act(telemetry, args, state)` called at the end of each step."""
    on_step_end = recorder.Telemetry.on_step_end

    def acting(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        on_step_end(self, args, state, control, **more)
        act(self, args, state)

    patch.setattr(recorder.Telemetry, "on_step_end", acting)


# ------------------------------------------------------------------------------------------------------- a whole run


def test_the_screen_names_each_stage_and_leaves_details_to_the_log(
    sft: Config, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("cogumi"), "propagate", False)  # as without a handler of pytest's
    seen: list[str] = []
    monkeypatch.setattr(recorder, "set_status", lambda run_dir, state, **more: seen.append(str(more.get("stage"))))
    run_dir = cogumi.train(sft, train__max_steps=2, cogumi__merge=False).run_dir
    screen, log_text = "".join(capfd.readouterr()), (run_dir / "run.log").read_text()
    assert seen[:6] == ["load", "samples", "train", "data checks", "train", "eval"]
    for activity in ("loading ", "completions of ", "checking the batches", "held-out loss before the first step"):
        assert f"{activity}" in screen
    assert "patched " in log_text
    assert "left alone " in log_text
    for noise in ("patched ", "left alone ", "no MFU", "examples/s", "Loading weights", "clean_up_tokenization"):
        assert noise not in screen


@pytest.mark.parametrize(("load", "slow", "expected"), [(900.0, 5, 1), (0.0, 5, 0), (900.0, None, 0)])
def test_a_step_that_other_processes_starve_is_a_warning(
    sft: Config, monkeypatch: pytest.MonkeyPatch, load: float, slow: int | None, expected: int
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))

    def wait(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(2.0 * (state.global_step + 1 == slow))

    monkeypatch.setattr(recorder.Telemetry, "on_step_begin", wait)
    monkeypatch.setattr(recorder, "MIN_SLOW_SECONDS", 1.8)
    run_dir = cogumi.train(sft, train__max_steps=6, cogumi__merge=False, data__eval_rows=0).run_dir
    warned = [line for line in (run_dir / "run.log").read_text().splitlines() if f"load average {load:.1f} on" in line]
    assert len(warned) == expected
    assert not warned or "step 5 took" in warned[0]


def test_an_sft_run_says_what_it_came_to(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    import peft
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer

    compute_loss = trl.SFTTrainer.compute_loss

    def counting(self: Any, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        if model.training:
            counted.append(int(inputs["attention_mask"].sum()))
        return compute_loss(self, model, inputs, *args, **more)

    monkeypatch.setattr(trl.SFTTrainer, "compute_loss", counting)
    sft["data"]["max_rows"] = 48  # six whole steps
    sft["train"] |= {"eval_strategy": "steps", "eval_steps": 3, "gradient_accumulation_steps": 2, "packing": False}
    result = cogumi.train(sft, cogumi__price_per_hour=7200.0)
    parsed = read_json(result.run_dir / "metrics.json")
    assert len(counted) == 12
    assert parsed["tokens"] == sum(counted) == result.series("num_tokens")[-1]
    assert parsed["tokens"] / parsed["tokens_per_second"] == pytest.approx(parsed["step_seconds"], abs=6e-4)
    assert list(parsed["seconds"]) == ["data", "load", "samples", "train", "data checks", "eval", "disk forecast"]
    assert sum(parsed["seconds"].values()) == pytest.approx(parsed["elapsed_seconds"], abs=0.1)
    assert parsed["step_seconds"] <= parsed["seconds"]["train"]
    assert parsed["cost"] == pytest.approx(2 * parsed["elapsed_seconds"], abs=0.1)
    assert parsed["mfu"] is None
    assert parsed["final"]["loss"] == result.series("loss")[-1]
    assert parsed["final"]["eval_loss"] == result.series("eval_loss")[-1]
    assert parsed["memory"]["peak_rss"] > 1e8
    costs, speeds = result.series("perf/cost"), result.series("perf/tokens_per_second")
    assert costs == sorted(costs)
    assert len(speeds) == len(result.series("loss")) == 6
    log_text = (result.run_dir / "run.log").read_text()
    assert f"step 6/6, loss {result.series('loss')[-1]:.3g}, grad " in log_text
    assert "no MFU: no GPU" in log_text
    read_back = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(sft["model"]["name"], dtype=torch.float32), result.adapter
    )
    samples = [row for row in read_jsonl(result.run_dir / "samples.jsonl") if row["step"] > 0]
    written = complete_with_ends(
        read_back, AutoTokenizer.from_pretrained(result.adapter), [row["prompt"] for row in samples]
    )
    assert all(text.startswith(row["completion"]) for (text, _), row in zip(written, samples, strict=True))
    assert any(row["completion"] for row in samples)


def test_what_is_logged_reaches_tensorboard_in_the_run_directory_and_nowhere_else(finished_sft: FinishedRun) -> None:
    """The held-out loss is measured before the training, which transformers would write into ./runs."""
    result = finished_sft.result
    shown = scalars(result.run_dir)
    assert [value for _, value in shown["train/loss"]] == pytest.approx(result.series("loss"))
    assert [value for _, value in shown["eval/loss"]] == pytest.approx(result.series("eval_loss"))
    assert [step for step, _ in shown["train/perf/tokens_per_second"]] == [1, 2, 3, 4, 5, 6]
    assert not list(finished_sft.called_in.iterdir())
    assert not list((result.run_dir / "checkpoints").rglob("*tfevents*"))


def test_a_gspo_run_says_what_rollouts_and_updates_took(finished_gspo: FinishedRun) -> None:
    result = finished_gspo.result
    parsed = read_json(result.run_dir / "metrics.json")
    assert 0 < parsed["seconds"]["rollout"] < parsed["step_seconds"]
    assert parsed["rollout"]["measured_seconds"] == pytest.approx(parsed["seconds"]["rollout"] / 2, abs=0.01)
    assert parsed["rollout"]["factor"] is None
    said = re.findall(
        r"rollout: [\d.]+ s measured, not forecast: this run will take about .*",
        (result.run_dir / "run.log").read_text(),
    )
    assert len(said) == 1
    assert "ends at about" not in said[0]  # no budget ends it
    assert parsed["final"]["reward"] == result.series("reward")[-1]
    size = read_json(result.run_dir / "decisions.json")["rollout"]
    rollout = read_jsonl(result.run_dir / "rollouts.jsonl")[0]
    assert size["completions"] == len(rollout["reward"])
    text = f"rollout: {size['completions']} completions of {size['prompts']} prompts, used in {size['steps']} optimizer steps"
    assert text in (result.run_dir / "run.log").read_text()
    assert text in str(cogumi.preview(result.run_dir / "config.yaml"))
    assert len(result.series("loss")) == size["steps"] * len(result.series("reward"))
    for shown in rollout["shown"]:
        assert sum(shown["rewards"].values()) == pytest.approx(shown["reward"], abs=1e-5)
        assert shown["graded"] == shown["completion"]
        assert shown["row"] >= 0
    # num_tokens: prompts and completions of the rollouts, each of which was trained on once.
    assert parsed["tokens"] == result.series("num_tokens")[-1]
    shown = scalars(result.run_dir)
    assert len(shown["train/policy/ratio_new_old"]) == 4
    assert len(shown["train/perf/tokens_per_second"]) == 4


# -------------------------------------------------------------------------------------------------------------- samples


def test_what_is_measured_on_the_way_changes_nothing_of_the_training(sft: Config, tmp_path: Path) -> None:
    """With dropout, so that a random state that moved, or a mode that stayed, would show in every weight."""
    sft["lora"]["lora_dropout"] = 0.2
    sft["train"] |= {"max_steps": 20, "per_device_train_batch_size": 8}
    sft["cogumi"]["compile"] = "off"
    measured = cogumi.train(sft, cogumi__run_dir=str(tmp_path / "with"), cogumi__samples_every=8)
    without = cogumi.train(sft, train__eval_strategy="no", cogumi__samples_every=0)
    assert len(measured.series("eval_loss")) == 3  # once on the way
    assert [row["step"] for row in without.metrics if "eval_loss" in row] == [0, 20]
    assert measured.series("loss") == without.series("loss")
    assert len(measured.series("loss")) == 20
    ours, theirs = (load_file(run.adapter / "adapter_model.safetensors") for run in (measured, without))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    rows = read_jsonl(measured.run_dir / "samples.jsonl")
    assert [row["step"] for row in rows] == [0] * 4 + [8] * 4 + [16] * 4 + [20] * 4
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in rows[:4]] * 4
    assert [*rows[:4], *rows[12:]] == read_jsonl(without.run_dir / "samples.jsonl")
    assert read_json(measured.run_dir / "metrics.json")["seconds"]["samples"] > 0


def test_samples_of_steps_made_again_are_replaced(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any, __: Any, state: Any) -> None:
        if state.global_step == 4:
            raise RuntimeError("the card fell off the bus")

    sft["train"] |= {"save_strategy": "steps", "save_steps": 2}
    run_dir = Path(sft["cogumi"]["run_dir"])
    with monkeypatch.context() as patched:
        after_step(patched, fail)
        with pytest.raises(RuntimeError, match="fell off"):
            cogumi.train(sft, cogumi__samples_every=1)
    assert {row["step"] for row in read_jsonl(run_dir / "samples.jsonl")} == {0, 1, 2, 3}
    assert read_json(run_dir / "metrics.json")["steps"] == 4
    cogumi.train(sft, cogumi__samples_every=3)
    sampled = [row["step"] for row in read_jsonl(run_dir / "samples.jsonl")]
    assert sampled == [step for step in (0, 1, 2, 3, 6) for _ in range(4)]


def test_the_reference_of_dpo_is_a_stage(sft: Config, tmp_path: Path) -> None:
    pairs = [{"prompt": f"def f{n}(x):", "chosen": f" return x + {n}", "rejected": " pass"} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = {"source": str(tmp_path / "pairs.jsonl"), "format": "preference", "eval_rows": 4}
    train = {**sft["train"], "max_steps": 2, "precompute_ref_log_probs": True}
    result = cogumi.train({**sft, "data": data, "train": train, "cogumi": {**sft["cogumi"], "method": "dpo"}})
    seconds = read_json(result.run_dir / "metrics.json")["seconds"]
    assert seconds["reference"] > 0
    assert {"load", "train"} <= seconds.keys()


def test_completions_that_hold_nothing_are_counted(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    prompts = Dataset.from_dict({"prompt": ["a", "b"], "prompt_ids": [[5], [6]]})
    write_samples(tmp_path, model, tokenizer, prompts, 1, {})
    assert any(row["completion"] for row in read_jsonl(tmp_path / "samples.jsonl"))
    assert tokenizer.eos_token_id == 0
    torch.nn.init.zeros_(model.lm_head.weight)  # of logits that are all equal the first is taken
    write_samples(tmp_path, model, tokenizer, prompts, 2, {})
    first, second = read_samples(tmp_path)
    assert (first.step, first.empty) == (1, 0)
    assert second == SampleCounts(2, 2, empty=2)
    assert [row["ended"] for row in read_jsonl(tmp_path / "samples.jsonl")] == [False, False, True, True]


def test_random_states_and_modes_are_put_back(tiny_model: Path) -> None:
    import random

    import numpy as np
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model).train()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    with preserve_rng_and_mode(model):
        model.eval()
        torch.rand(7), random.random(), np.random.rand()
    assert {name: module.training for name, module in model.named_modules()} == before
    got = torch.rand(3), random.random(), np.random.rand()
    assert got[0].equal(expected[0])
    assert got[1:] == expected[1:]


# ------------------------------------------------------------------------------------------------------------ heartbeat


def test_the_heart_beats_while_the_training_thread_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.02)
    meter = Meter(price_per_hour=36.0)
    with Heartbeat(tmp_path, meter) as heart:
        heart.progress.step, heart.progress.steps, heart.progress.step_time = 7, 10, 1000.0
        heart.progress.eta_seconds = 200.0
        with meter.stage_inside("eval"):
            until((tmp_path / "heartbeat.json").exists)  # the first beat waits for the disk
            for _ in range(2):
                beat = read_json(tmp_path / "heartbeat.json")
                until(lambda before=beat["time"]: read_json(tmp_path / "heartbeat.json")["time"] > before)
        assert beat["stage"] == "eval"
    beat = read_json(tmp_path / "heartbeat.json")
    assert (beat["stage"], beat["step"], beat["steps"], beat["step_time"]) == ("data", 7, 10, 1000.0)
    assert beat["cost_so_far"] == pytest.approx(beat["elapsed_seconds"] / 100, rel=0.01)
    assert beat["cost_at_end"] == pytest.approx(beat["cost_so_far"] + 2.0, rel=0.01)
    assert beat["disk"]["free"] > 0
    assert 0 < beat["memory"]["used"] < beat["memory"]["total"]
    assert beat["cpu"]["cores"] == os.cpu_count()
    assert not any(thread.name == "cogumi heartbeat" for thread in threading.enumerate())


def test_a_heart_that_fails_says_so_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.01)
    beats: list[float] = []

    def broken(self: Any) -> Any:
        beats.append(0.0)
        raise PermissionError(13, "no longer ours")

    with monkeypatch.context() as patched, Heartbeat(tmp_path, Meter()) as heart:
        patched.setattr(Heartbeat, "now", broken)
        until(lambda: len(beats) >= 3)
        patched.undo()
        before = heart.now()["time"]
    assert caplog.text.count("heartbeat.json is not written: [Errno 13] no longer ours") == 1
    assert read_json(tmp_path / "heartbeat.json")["time"] >= before  # it beats again when it can


def test_a_run_that_hangs_beats_on_and_its_step_does_not(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stuck in a callback after its second step; gone on with, the seconds of that part count."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.02)
    beats: list[dict[str, Any]] = []

    def hang(self: Any, _: Any, state: Any) -> None:
        deadline = time.monotonic() + 60
        while state.global_step == 2 and len({beat["time"] for beat in beats}) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
            beats.extend([beat] if (beat := read_json(self.run_dir / "heartbeat.json"))["step"] == 2 else [])
        if state.global_step == 2:
            raise RuntimeError("hung, and ended")

    with monkeypatch.context() as patched:
        after_step(patched, hang)
        with pytest.raises(RuntimeError, match="hung"):
            cogumi.train(sft)
    assert len({beat["time"] for beat in beats}) == 3
    assert len({beat["step_time"] for beat in beats}) == 1
    ended = read_json(Path(sft["cogumi"]["run_dir"]) / "metrics.json")
    result = cogumi.train(sft)
    after = read_json(result.run_dir / "metrics.json")
    assert after["elapsed_seconds"] > ended["elapsed_seconds"] >= beats[-1]["elapsed_seconds"]
    tokens = result.series("num_tokens")
    assert after["tokens"] == tokens[-1] > tokens[0] > ended["tokens"] > 0  # two steps were made twice
    assert read_json(result.run_dir / "heartbeat.json")["started"] == beats[0]["started"]


# -------------------------------------------------------------------------------------------------------- meter and pace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets seconds pass for the meter and the pace, which are otherwise as they are."""
    now = [1000.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: now[0])

    def passing(seconds: float) -> None:
        now[0] += seconds

    return passing


def test_every_second_belongs_to_the_innermost_stage(clock: Callable[[float], None], tmp_path: Path) -> None:
    meter = Meter(price_per_hour=3.6)
    clock(1)
    meter.enter("train")
    clock(10)
    with meter.stage_inside("eval"):
        clock(5)
        with meter.stage_inside("samples"):
            clock(2)
        clock(1)
    clock(4)
    assert meter.seconds() == {"data": 1, "train": 14, "eval": 6, "samples": 2}
    assert meter.elapsed() == 23
    assert meter.cost(77) == pytest.approx(0.1)
    seconds = {"data": 10.0, "train": 90.0}
    write_json(
        tmp_path / "heartbeat.json",
        {"elapsed_seconds": 100.0, "started": 5.0, "seconds": seconds, "counts": {"tokens": 3.0}},
    )
    meter.resume_from(tmp_path)
    assert meter.elapsed() == 123
    assert meter.seconds() == {"data": 11, "train": 104, "eval": 6, "samples": 2}
    assert (meter.started, meter.counts) == (5.0, {"tokens": 3.0})


def test_the_first_step_and_pauses_do_not_move_the_pace_and_evaluations_do(clock: Callable[[float], None]) -> None:
    meter = Meter()
    timed = StepTimer(meter)
    timed.begin_step()
    clock(60)
    assert timed.end_step() == 60
    assert timed.eta(10) is None  # the first one warms up
    for step in range(1, 40):
        if step == 10:
            clock(40)  # an evaluation
            timed.begin_step()
        clock(2)
        if step == 20:
            with meter.stage_inside("paused"):
                clock(500)
        assert timed.end_step() == 2
    assert timed.eta(100) == pytest.approx(100 * (2 + 40 / 39))


def test_a_rollout_is_counted_once_for_the_steps_that_it_serves(
    clock: Callable[[float], None], make_trainer: Any
) -> None:
    """Each of 100 s for four steps of 2 s: after six of 16 steps, ten updates and two rollouts are left, 220 s."""
    trainer, meter = make_trainer(steps_per_generation=4, gradient_accumulation_steps=1), Meter()
    heart = Heartbeat(Path(trainer.args.output_dir), meter)
    telemetry = recorder.Telemetry(trainer, heart, "gspo")
    telemetry.pace.begin_step()
    assert telemetry.throughput.steps_per_rollout == 4
    for step in range(1, 7):
        if step % 4 == 1:
            telemetry.throughput.time_rollout(lambda _: clock(100), None)
        clock(2)
        assert telemetry.pace.end_step() == 2
    assert telemetry.eta(6, 16) == 220
    assert telemetry.eta(6, 8) == 4
    assert telemetry.throughput.total.step_seconds == 200  # and those of the updates, once the steps are logged
    measured = compare_rollouts(heart.run_dir, telemetry.throughput.total)
    assert measured == {"forecast_seconds": None, "measured_seconds": 100.0, "factor": None}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.4, "4 s"), (89, "89 s"), (95, "2 min"), (3599, "1 h 00 min"), (4320, "1 h 12 min"), (200000, "2 d 7 h")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


# --------------------------------------------------------------------------------------------------------------- tokens


def test_the_lengths_of_documents_in_each_kind_of_batch() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    ids = torch.zeros(2, 4, dtype=torch.long)
    padded = {"input_ids": ids, "attention_mask": mask}
    assert [int(length) for length in document_lengths(padded)] == [9 + 1, 4]
    packed = {"input_ids": torch.zeros(1, 7), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1]])}
    assert [int(length) for length in document_lengths(packed)] == [9 + 4 + 4, 7]
    beside = {"input_ids": torch.zeros(2, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]])}
    assert [int(length) for length in document_lengths(beside)] == [9 + 4 + 4, 7]
    prompts = {"prompt_ids": ids, "prompt_mask": mask.flip(-1)}
    rollout = {**prompts, "completion_ids": ids[:, :2], "completion_mask": mask[:, :2]}
    assert [int(length) for length in document_lengths(rollout)] == [25 + 4, 7]
    assert [int(length) for length in document_lengths({"input_ids": ids})] == [32, 8]


# -------------------------------------------------------------------------------------------------------------- trackers


def test_a_command_of_pip_is_for_this_python_and_short_where_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(words: str) -> str:
        return subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True).stdout.strip()

    assert run(f"{python_command()} -c 'import sys; print(sys.executable)'") == sys.executable
    python = tmp_path / "my home" / "work" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(tmp_path / "my home" / "work")
    assert pip_command("install x") == ".venv/bin/python -m pip install x"
    assert run(f"{python_command()} -c 'print(1)'") == "1"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert shlex.split(pip_command("install x")) == [str(python), "-m", "pip", "install", "x"]


@pytest.mark.parametrize("reporter", ["wandb", "trackio"])
def test_a_reporter_that_is_not_installed_is_refused_before_anything_is_loaded(
    sft: Config, reporter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "is_installed", lambda name: name == "tensorboard")
    with pytest.raises(UsageError, match=re.escape(f"is not installed; run: {pip_command(f'install {reporter}')}")):
        cogumi.train(sft, train__report_to=["tensorboard", reporter])
    assert not Path(sft["cogumi"]["run_dir"]).exists()


@pytest.mark.parametrize("train", [{}, {"report_to": "none"}])
def test_without_tensorboard_a_run_has_its_metrics(sft: Config, train: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "is_installed", lambda name: bool(train))
    sft["train"] |= {"max_steps": 1, **train}
    result = cogumi.train(sft)
    assert not (result.run_dir / "tensorboard").exists()
    assert result.series("loss")


# --------------------------------------------------------------------------------------------------------------- secrets


def test_no_file_of_a_run_holds_a_secret(sft: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A token in the configuration, one of another kind in the environment, and both in what goes wrong."""
    other = "abcdef0123456789SESAME"
    monkeypatch.setenv("WANDB_API_KEY", other)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    sft["train"] |= {"hub_token": TOKEN, "save_strategy": "steps", "save_steps": 2}
    seen = []

    def fail(_: Any, args: Any, state: Any) -> None:
        seen.append(args.hub_token)
        if state.global_step == 5:
            logging.getLogger("cogumi").warning("asking https://me:%s@hub with %s", TOKEN, other)
            raise RuntimeError(f"401 for https://me:{TOKEN}@hub, key {other}")

    after_step(monkeypatch, fail)
    with pytest.raises(RuntimeError, match=TOKEN):
        cogumi.train(sft, cogumi__samples_every=2)
    assert set(seen) == {TOKEN}  # whoever uses it has it
    run_dir = Path(sft["cogumi"]["run_dir"])
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "status.json", "run.log", "training_args.bin", "metrics.jsonl", "samples.jsonl"} <= names
    assert any("tfevents" in name for name in names)
    for path in files:
        content = path.read_bytes()
        assert TOKEN.encode() not in content, path
        assert other.encode() not in content, path
    assert REDACTED in read_json(run_dir / "status.json")["reason"]
    arguments = torch.load(run_dir / "checkpoints" / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert arguments.hub_token == REDACTED
    assert arguments.learning_rate == 1e-2


@pytest.mark.parametrize("key", ["model__name", "data__source"])
def test_a_token_in_a_name_that_will_be_written_down_is_refused(sft: Config, key: str) -> None:
    with pytest.raises(UsageError, match="holds an access token; put that into the environment") as caught:
        cogumi.train(sft, **{key: f"https://me:{TOKEN}@huggingface.co/me/model"})
    assert TOKEN not in str(caught.value)
    assert not Path(sft["cogumi"]["run_dir"]).exists()


def test_what_looks_like_a_secret_is_hidden_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "short")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")
    assert redact_text(f"a {TOKEN} b") == f"a {REDACTED} b"
    assert redact_text("s3://AKIA:s3cr3t@bucket/x") == f"s3://{REDACTED}@bucket/x"
    assert redact_text("key wJalrXUtnFEMI/K7MDENG.") == f"key {REDACTED}."
    for plain in ("hf_tiny", "shortbread", "user@host:22", "http://host:8000/a@b", "/work/hf_hub/model", "12:30@noon"):
        assert redact_text(plain) == plain


def test_an_unwritten_secret_is_itself_until_it_is_pickled() -> None:
    import copy

    secret = RedactedStr(TOKEN)
    assert secret == copy.deepcopy([secret])[0] == copy.copy(secret) == TOKEN
    assert pickle.loads(pickle.dumps(secret)) == REDACTED


def test_without_a_word_of_it_a_run_has_samples_and_a_held_out_curve_and_says_when(sft: Config) -> None:
    del sft["data"]["eval_rows"]
    sft["train"] |= {"max_steps": 52, "per_device_train_batch_size": 8, "logging_steps": 10}
    sft["cogumi"]["compile"] = "off"
    result = cogumi.train(sft)
    held_out = read_json(result.run_dir / "decisions.json")["data"]["held_out"]
    assert held_out["rows"] == 8  # one in fifty of 400
    evaluated = [row["step"] for row in result.metrics if "eval_loss" in row]
    every = evaluated[1]
    assert evaluated == [0, *range(every, 52, every), 52]
    assert every >= 11
    assert {row["step"] for row in read_jsonl(result.run_dir / "samples.jsonl")} == {0, 50, 52}
    log = (result.run_dir / "run.log").read_text()
    assert re.search(rf"held-out loss: \d+ rows before the first step, every {every} steps and at the end", log)
    assert "samples: 4 held-out prompts before the first step, every 50 steps and at the end" in log
    assert "up to 62 tokens each" in log  # 5 % of 52 steps of 8 examples, a step counted three times
    spent = read_json(result.run_dir / "metrics.json")["seconds"]
    assert 0 < spent["samples"] < spent["train"]
    assert spent["eval"] > 0


@pytest.mark.parametrize("has_nvml", [True, False])
def test_the_memory_of_a_gpu_is_not_asked_of_the_cuda_runtime(
    has_nvml: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query of the runtime from this thread may invalidate a graph that the main thread captures."""

    def utilization() -> int:
        if not has_nvml:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        return 97

    answers = {"is_available": True, "get_device_name": "H100", "memory_reserved": 5, "device_memory_used": 7}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=9, uuid="x"))
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: pytest.fail("cudaMemGetInfo"))
    used, utilization_percent = (7, 97) if has_nvml else (5, None)
    expected = {"name": "H100", "used": used, "total": 9, "utilization_percent": utilization_percent}
    assert Heartbeat(tmp_path, Meter(None)).gpu() == expected


def test_a_short_run_measures_as_many_held_out_rows_as_it_can_pay_for_and_says_so(sft: Config) -> None:
    sft["data"]["eval_rows"] = 40
    sft["train"] |= {"max_steps": 25, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 5}
    sft["cogumi"] |= {"compile": "off", "sanity": 5}
    run_dir = cogumi.train(sft).run_dir
    del sft["cogumi"]["sanity"]
    result = cogumi.train(sft)  # resumed, with the same rows
    log = (run_dir / "run.log").read_text()
    assert log.count("held-out losses of 8 of the 28 rows, 5 % of the training's computing") == 2
    assert "held-out loss after the last step, of 8 rows" in log
    assert read_json(run_dir / "decisions.json")["held_out_loss"] == {"measured": 8, "held_out": 28}
    assert result.passed, str(result.verdict)

    every = cogumi.train(sft, train__eval_strategy="no", cogumi__run_dir=str(run_dir.with_name("every")))
    assert "of 28 rows" in (every.run_dir / "run.log").read_text()


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (
            {"save_strategy": "no"},
            "train.save_strategy: no writes no checkpoint before the end of 200000 steps, in about",
        ),
        (
            {"save_strategy": "steps", "save_steps": 300_000},
            "train.save_steps: 300000 writes no checkpoint before the end",
        ),
        ({"save_strategy": "steps", "save_steps": 1000}, ""),
        ({"save_strategy": "epoch"}, ""),
    ],
)
def test_a_long_run_that_saves_nothing_on_the_way_is_warned_of(train: Config, says: str, sft: Config) -> None:
    sft["train"] |= {"max_steps": 200_000, **train}
    sft["cogumi"] |= {"compile": "off", "sanity": 5, "samples_every": 0}
    lines = (cogumi.train(sft).run_dir / "run.log").read_text().splitlines()
    warnings = [line for line in lines if "writes no checkpoint" in line]
    assert len(warnings) == bool(says)
    fix = "; set train.save_strategy: steps and train.save_steps: 20000"
    assert all(says in line and "WARNING" in line and line.endswith(fix) for line in warnings)


@pytest.mark.parametrize("by_time", [True, False])
def test_saves_by_time_are_saves(by_time: bool, sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's default of 500 steps, beyond this run, is not what saves it."""
    monkeypatch.setattr(loop, "UNSAVED_SECONDS", 0.0)
    saves = {"save_strategy": None, "save_steps": None} if by_time else {"save_strategy": "steps", "save_steps": 500}
    sft["train"] |= {"max_steps": 300, **saves}
    sft["cogumi"] |= {"compile": "off", "sanity": 5, "samples_every": 0}
    log = (cogumi.train(sft).run_dir / "run.log").read_text()
    assert ("writes no checkpoint" in log) != by_time


def test_the_held_out_rows_of_a_short_run_are_spread_over_all(tmp_path: Path) -> None:
    args = SimpleNamespace(max_steps=20, per_device_train_batch_size=4, gradient_accumulation_steps=2, world_size=1)
    trainer = SimpleNamespace(args=args, eval_dataset=Dataset.from_dict({"row": range(100)}))
    loop.limit_held_out(tmp_path, trainer, Ranks())
    rows = trainer.eval_dataset["row"]
    assert (len(rows), rows[0], rows[-1]) == (12, 0, 99)  # twice 12 are 5 % of three passes over 160 examples
    assert read_json(tmp_path / "decisions.json")["held_out_loss"] == {"measured": 12, "held_out": 100}
