"""The preflight as the first stage of a run: what it keeps, what it refuses, and the process it is made in beside a GPU."""

import json
import logging
import math
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import prepared_process
import pytest
import yaml
from builders import run_config
from transformers import AutoConfig, AutoTokenizer, LlamaConfig
from trl import pack_dataset

import cogumi
from cogumi.config.schema import RunConfig, load_config
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import DECISIONS, SETTINGS, read_json, read_section, write_section
from cogumi.core.safetensors_file import make_header
from cogumi.data.packing import with_labels
from cogumi.forecast import data_sample
from cogumi.forecast.memory_forecast import Target, find_target
from cogumi.forecast.run_forecast import forecast_in_worker, forecast_lines, forecast_run
from cogumi.methods.examples import prepare_examples
from cogumi.methods.step_split import split_step
from cogumi.models.base import RunBase, meta_model
from cogumi.models.loading import load_tokenizer, read_base
from cogumi.stack.gpus import parse_card
from cogumi.telemetry.recorder import Telemetry
from cogumi.training import estimate


def config_of(model: Path, data: Path, run_dir: Path, **train: Any) -> dict[str, Any]:
    rows = {"eval_rows": 8, "max_rows": 60, "fim": {"max_length": 160, "middle_chars": [8, 32]}}
    options = {"compile": "off", "preflight": "on"}
    return run_config("sft", model, data, run_dir, data_section=rows, train=train, cogumi=options)


Asked = tuple[RunConfig, RunBase, data_sample.DataSample, Target]
"""What `forecast_lines` takes."""


@pytest.fixture
def asked(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Asked:
    run = load_config(config_of(tiny_model, code_parquet, tmp_path / "run"))
    base = read_base(str(tiny_model))
    return run, base, data_sample.sample_data(run, load_tokenizer(base)), find_target(None)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A forecast is made in another process, as ever, and in one that need not import torch first."""
    program = tmp_path_factory.mktemp("bin") / "python"
    words = prepared_process.python({**os.environ, "OMP_NUM_THREADS": "1"})
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr("cogumi.core.worker.sys.executable", str(program))


@pytest.mark.usefixtures("forked")
def test_a_run_keeps_what_was_forecast(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert cogumi.train(config_of(tiny_model, code_parquet, run_dir)).passed
    kept = json.loads((run_dir / "forecast.json").read_text())["preflight"]
    assert [line["stage"] for line in kept["lines"]][:3] == ["stack", "memory", "time"]
    assert kept["fits"] is True
    memory = kept["figures"]["memory"]
    assert memory["work"]["prompt"] <= 160
    log = (run_dir / "run.log").read_text()
    assert log.index("preflight: memory: ") < log.index("loaded on cpu")
    came_to = json.loads((run_dir / "metrics.json").read_text())
    assert list(came_to["seconds"])[:3] == ["data", "preflight", "load"]
    assert came_to["memory"]["gpu_peak_forecast"] == memory["tensors"] + memory["workspace"]


@pytest.mark.usefixtures("forked")
def test_the_first_rollouts_correct_what_was_forecast_of_them(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dollar a second. On a card the run would fit into its budget; at the pace of this machine it does not."""
    fast = replace(find_target(None), card=replace(parse_card("H200"), name="no card"))
    monkeypatch.setattr(estimate, "find_target", lambda *_: fast)
    at_step_2: list[float] = []
    on_step_end = Telemetry.on_step_end

    def note_and_spend(self: Telemetry, args: Any, state: Any, control: Any, **more: Any) -> None:
        on_step_end(self, args, state, control, **more)
        if state.global_step == 2:
            at_step_2[:] = self.meter.elapsed(), self.eta(2, 100_000) or 0.0
        elif state.global_step == 4:
            self.meter.began -= 3600

    monkeypatch.setattr(Telemetry, "on_step_end", note_and_spend)
    train = {"max_steps": 100_000, "num_generations": 4, "steps_per_generation": 2, "max_completion_length": 8}
    config = config_of(tiny_model, code_parquet, tmp_path / "run", **train)
    config["cogumi"] |= {"method": "gspo", "rewards": ["parses"], "price_per_hour": 3600.0, "max_cost": 2000.0}
    cogumi.train(config)
    time = read_section(tmp_path / "run" / "forecast.json", "preflight")["figures"]["time"]
    assert 0 < time["seconds"] < 2000
    log_text = (tmp_path / "run" / "run.log").read_text()
    assert "cogumi.max_cost ends it at about step" not in log_text
    match = re.search(
        r"WARNING rollout: (\S+) s measured, (\S+) s forecast \(factor (\S+)\): this run will take about .*, cost "
        r"\$([\d,.]+), ends at about step (\d+) of 100000 \(\$2000.\d\d of cogumi.max_cost 2000\)\n", log_text,
    )  # fmt: skip
    assert match is not None, log_text
    measured, forecast, factor, cost = (float(group.replace(",", "")) for group in match.groups()[:4])
    assert forecast == pytest.approx(time["rollout"], rel=0.01)
    assert factor == pytest.approx(measured / forecast, rel=0.02)
    elapsed, left = at_step_2
    assert cost == pytest.approx(elapsed + left, rel=0.01)
    assert int(match[5]) == pytest.approx(2 + (2000 - elapsed) / left * 99_998, rel=0.01)
    rollout = read_json(tmp_path / "run" / "metrics.json")["rollout"]
    assert rollout["forecast_seconds"] == time["rollout"]
    assert rollout["factor"] == pytest.approx(rollout["measured_seconds"] / time["rollout"])


def test_what_cannot_fit_is_refused_before_it_is_loaded(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, forked: None
) -> None:
    """A width of which one row of logits and activations is far more than this machine has; its weights are a hole."""
    wide = tmp_path / "wide"
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(wide)
    LlamaConfig(
        hidden_size=16384, intermediate_size=65536, num_attention_heads=128, num_hidden_layers=80, vocab_size=500_000,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    ).save_pretrained(wide)  # fmt: skip
    shapes = {
        name: tuple(tensor.shape) for name, tensor in meta_model(AutoConfig.from_pretrained(wide)).state_dict().items()
    }
    header = make_header(
        {"format": "pt"}, [(name, "BF16", shape, 2 * math.prod(shape)) for name, shape in shapes.items()]
    )
    with (wide / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2 * sum(map(math.prod, shapes.values())))
    config = config_of(wide, code_parquet, tmp_path / "run")
    with pytest.raises(
        UsageError, match=r"^memory: \d[\d.,]* GiB of .*; set .*\(or cogumi.preflight: off, which starts"
    ):
        cogumi.train(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wide"]


def test_four_bits_train_after_they_were_forecast(tmp_path: Path, tiny_model: Path, code_parquet: Path) -> None:
    """In one process: what libraries cache while fake tensors are computed with must not be what they train with."""
    config = config_of(tiny_model, code_parquet, tmp_path / "run")
    config["model"]["quantization_config"] = {"load_in_4bit": True}
    config["cogumi"]["preflight"] = "off"
    assert forecast_run(load_config(config), None, None, apart=False).fits
    assert cogumi.train(config).passed


def test_on_a_cpu_a_run_goes_without(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> None:
    config = config_of(tiny_model, code_parquet, tmp_path / "run")
    config["cogumi"]["preflight"] = "auto"
    assert not estimate.wants_preflight(load_config(config))
    config["cogumi"]["preflight"] = True  # what YAML 1.1 makes of a bare `on`
    written = tmp_path / "run.yaml"
    written.write_text(yaml.safe_dump(config))
    assert load_config(written).cogumi.preflight == "on"
    assert load_config(written, cogumi__preflight=False).cogumi.preflight == "off"


def test_another_process_says_the_same(asked: Asked, forked: None) -> None:
    here = forecast_lines(*asked)
    there = forecast_in_worker(*asked)
    assert there[1] == here[1]
    assert [line.stage for line in there[0]] == [line.stage for line in here[0]]
    assert [line.stage for line in there[0]] == ["memory", "time", "disk", "disk"]  # the last one: saves are by time
    assert there[0][0] == here[0][0]


def test_the_first_of_several_processes_forecasts_alone(
    asked: Asked, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that forecasts joins no training: it took the port of the one that it was made for."""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (launched | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}).items():
        monkeypatch.setenv(name, value)
    run, *rest, target = asked
    (processes, memory, *_), figures = forecast_in_worker(split_step(run, 2), *rest, target)
    assert (processes.stage, memory.stage) == ("processes", "memory")
    assert figures["memory"]["free"] == target.free // 2  # the main memory of this machine is that of both


def test_what_another_process_refuses_is_refused_here(asked: Asked, forked: None) -> None:
    asked[0].lora["target_modules"] = ["nowhere"]
    with pytest.raises(UsageError, match=r"Target modules .*nowhere"):
        forecast_in_worker(*asked)


def test_a_forecast_that_breaks_does_not_end_the_run(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    run, base, *_ = asked
    tokenizer = load_tokenizer(base)
    data = prepare_examples(run, tokenizer).train
    with caplog.at_level(logging.WARNING, "cogumi"):
        estimate.run_preflight(run, base, data, tokenizer)
    (message,) = [record.getMessage() for record in caplog.records if "preflight" in record.getMessage()]
    assert message.startswith("preflight: the forecast ended with status 1: ")
    assert message.endswith("; the run continues without it")
    assert not run.run_dir.exists()


@pytest.mark.parametrize("is_chosen", [True, False])
def test_packing_that_the_run_chose_is_forecast_unpacked(
    is_chosen: bool, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leak that turns it off later needs no more than was forecast; packing of the user's own is forecast packed."""
    run, base, *_ = asked
    run.train |= {"packing": True, "max_length": 160, "per_device_train_batch_size": 16}
    chosen = [{"key": "train.packing", "value": True, "reason": ""}] if is_chosen else []
    run.run_dir.mkdir()
    write_section(run.run_dir / DECISIONS, SETTINGS, chosen)
    tokenizer, rows = load_tokenizer(base), list[int]()
    monkeypatch.setattr(estimate, "forecast_in_worker", lambda run, *rest: forecast_lines(run, *rest))
    monkeypatch.setattr(
        "cogumi.forecast.memory_forecast.rows_per_step", lambda per_row, *step: rows.append(per_row) or step
    )
    estimate.run_preflight(run, base, prepare_examples(run, tokenizer).train, tokenizer)
    assert rows
    assert all(per_row == 1 for per_row in rows) is is_chosen


def test_a_forecast_that_takes_too_long_is_ended(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cogumi.forecast.run_forecast.LIMIT", 0.2)
    with pytest.raises(RuntimeError, match=r"the forecast was ended after 0\.\d s without an answer"):
        forecast_in_worker(*asked)


def test_a_run_is_forecast_with_all_of_its_data(asked: Asked) -> None:
    run, tokenizer = asked[0], load_tokenizer(asked[1])
    data = prepare_examples(run, tokenizer).train
    actual = data_sample.measure_data(run, data, tokenizer)
    lengths = [len(row["input_ids"]) for row in data.dataset]
    assert (actual.longest, actual.examples, actual.trained) == (max(lengths), len(lengths), len(lengths))
    assert actual.mean == pytest.approx(sum(lengths) / len(lengths))
    assert actual.examples_per_row is None
    run.train |= {"packing": True, "max_length": 160}
    packed = pack_dataset(with_labels(data.dataset), 160)
    assert data_sample.measure_data(run, data, tokenizer).examples_per_row == len(data.dataset) / len(packed)


def test_prompts_are_measured_as_they_are_sent(asked: Asked, tmp_path: Path) -> None:
    there = load_config(Path(__file__).parents[1] / "configs" / "smoke" / "gspo.yaml", cogumi__run_dir=str(tmp_path))
    run, base, _, target = asked
    run = run.model_copy(update={"cogumi": there.cogumi, "train": there.train})
    tokenizer = load_tokenizer(base)
    data = prepare_examples(run, tokenizer).train
    longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in data.dataset["prompt"])
    assert data_sample.measure_data(run, data, tokenizer).longest == longest
    lines, figures = forecast_lines(run, base, data_sample.measure_data(run, data, tokenizer), target)
    assert [line.stage for line in lines[:2]] == ["rollout", "memory"]
    assert figures["memory"]["work"]["prompt"] == longest
