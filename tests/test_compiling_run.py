"""`cogumi.compile` of a run: a real Trainer on a tiny 4-bit Llama, what is decided for it and why, and the report.

Where a decision is about times, the times are a test's; one test patches nothing.
"""

import errno
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from accelerate.state import AcceleratorState
from four_bit_models import tiny_llama
from torch import nn
from transformers import Trainer, TrainingArguments

from cogumi.compile import compile_callback, compile_report
from cogumi.compile.compile_callback import Compiling
from cogumi.compile.compiler import CompilerFound
from cogumi.compile.layers import compile_layers, parts_of
from cogumi.compile.measurement import Counts, Trial, counts
from cogumi.core.errors import UsageError
from cogumi.patches import graph_break
from cogumi.patches.graph_break_probes import Probe

STEPS = 10


def trainer_of(model: Any, path: Path, **arguments: Any) -> Trainer:
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(256, (STEPS, 16)).tolist()]
    return Trainer(
        model,
        TrainingArguments(
            **{
                "output_dir": str(path),
                "per_device_train_batch_size": 1,
                "max_steps": STEPS,
                "learning_rate": 0.01,
                "save_strategy": "no",
                "report_to": "none",
                "use_cpu": True,
                "bf16": False,
                "disable_tqdm": True,
                "logging_steps": 1,
                **arguments,
            }
        ),
        train_dataset=rows,  # type: ignore[arg-type]
    )


class Run:
    """A training with the callback; losses: of its steps."""

    def __init__(self, mode: str, path: Path, **arguments: Any) -> None:
        self.path = path / "decisions.json"
        torch.manual_seed(3)
        self.trainer = trainer_of(tiny_llama(layers=2), path, **arguments)
        self.signalled = False
        self.compiling = Compiling(self.trainer, mode, self.path, nullcontext, lambda: self.signalled)
        self.trainer.add_callback(self.compiling)

    def train(self) -> "Run":
        self.compiling.begin()
        self.trainer.train()
        return self

    @property
    def losses(self) -> list[float]:
        return [each["loss"] for each in self.trainer.state.log_history if "loss" in each]

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.path.read_text())["compile"])


@pytest.fixture(autouse=True)
def as_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What one test compiles another one may use."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    graph_break.undo()
    yield
    graph_break.undo()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """eager for inductor, a compiler that was found, and probes that passed: what the decision is about is said by a test."""
    passed = Probe("a 4-bit layer", True, "", 0.1)
    monkeypatch.setattr(compile_callback, "compile_layers", partial(compile_layers, backend="eager"))
    monkeypatch.setattr(compile_callback, "try_compiler", lambda _: CompilerFound("", 0.1))
    monkeypatch.setattr(graph_break, "probe_linear", lambda _: passed)
    monkeypatch.setattr(compile_callback, "WORTH_TRYING", 0.0)
    monkeypatch.setattr(compile_callback, "shortest", lambda _: 1.2)  # steps as long compiled as before


def trial(eager: float, compiled: float, compile: float) -> Callable[..., Trial]:
    return lambda *_: Trial(eager, compiled, compile, Counts(1))


@pytest.mark.usefixtures("quick")
def test_auto_compiles_what_is_repaid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cogumi")
    plain = Run("off", tmp_path / "off").train()
    assert plain.json["decision"] == "off"
    assert plain.json["reason"] == "cogumi.compile=off"
    torch.compiler.reset()
    tried: list[int] = []

    def found(layer: nn.Module, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trial:
        assert type(layer).__name__ == "LlamaDecoderLayer"
        assert args[0].shape == (1, 16, 128)
        tried.append(1)
        return Trial(0.5, 0.25, 2.0, Counts(1))

    monkeypatch.setattr(compile_callback, "try_layer", found)
    run = Run("auto", tmp_path / "auto").train()
    assert tried == [1]
    assert run.losses == plain.losses
    said = run.json
    assert said["decision"] == "layers", said["reason"]
    # 0.25 s a layer and pass, two layers, seven steps
    assert said["reason"] == (
        "a layer takes 250.0 ms instead of 500.0 ms, 4 s in the 7 steps that are left, and compiling took 2 s"
    )
    assert said["strategy"] == "none"
    assert said["probes"] == [{"name": "a 4-bit layer", "passed": True, "error": "", "seconds": 0.1}]
    assert said["counts"]["graphs"] >= 2
    assert said["counts"]["breaks"] == {}
    assert said["counts"]["recompiles"] == 0
    assert said["counts"]["seconds"] > 0
    assert 0 < said["operations_outside"] < said["operations"]
    assert said["seconds_per_step"] > 0
    assert said["seconds_per_step_eager"] > 0
    assert set(said["versions"]) == {"torch", "bitsandbytes"}
    lines = [record.getMessage() for record in caplog.records]
    assert f"compile: layers: {said['reason']}" in lines
    assert any(line.startswith("compile: 2 layers; the next step compiles them") for line in lines)
    share = 1 - said["operations_outside"] / said["operations"]
    assert any(f"operations of a forward pass are compiled ({share:.1%})" in line for line in lines)
    assert any(f"instead of {said['seconds_per_step_eager']:.2f} s" in line for line in lines)


@pytest.mark.usefixtures("quick")
def test_auto_leaves_what_is_not_repaid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_callback, "try_layer", trial(0.5, 0.25, 4.0))
    before = counts().graphs
    said = Run("auto", tmp_path).train().json
    assert said["decision"] == "off"
    assert said["reason"] == (
        "not repaid: a layer takes 250.0 ms instead of 500.0 ms, 4 s in the 7 steps that are left, and compiling took 4 s"
    )
    assert counts().graphs == before


@pytest.mark.usefixtures("quick")
def test_no_more_is_saved_than_the_layers_share_of_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Something else ran on the machine while the layer was timed as it is: half of it is half of the step, at most."""
    monkeypatch.setattr(compile_callback, "try_layer", trial(5.0, 2.5, 4.3))
    said = Run("auto", tmp_path).train().json
    assert said["decision"] == "off"
    assert "4 s in the 7 steps that are left" in said["reason"]  # of 1.2 s each


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("when", ["before a layer is tried", "while one is"])
def test_a_training_that_is_to_end_is_not_compiled(when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that is taken back gives half a minute, which compiling would take."""
    run = Run("auto", tmp_path)
    run.signalled = when == "before a layer is tried"

    def try_layer(*_: Any) -> Trial:
        assert not run.signalled
        run.signalled = True
        return Trial(0.5, 0.25, 2.0, Counts(1))

    monkeypatch.setattr(compile_callback, "try_layer", try_layer)
    run.train()
    assert run.signalled
    assert not run.path.exists()  # undecided: the part of the run that follows measures for itself
    assert not run.compiling.on


@pytest.mark.usefixtures("quick")
def test_auto_leaves_a_short_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_callback, "WORTH_TRYING", 1e6)
    monkeypatch.setattr(compile_callback, "try_layer", lambda *_: pytest.fail("a layer was tried"))
    monkeypatch.setattr(compile_callback, "try_compiler", lambda *_: pytest.fail("the compiler was tried"))
    said = Run("auto", tmp_path).train().json
    assert said["decision"] == "off"
    step = said["seconds_per_step_eager"]
    assert said["reason"] == (
        f"{7 * step:.0f} s of training are left (7 steps of {step:.2f} s), and less than 1000000 s do not repay compiling"
    )


@pytest.mark.usefixtures("quick")
def test_steps_that_became_longer_are_taken_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = Run("off", tmp_path / "off").train()
    monkeypatch.setattr(compile_callback, "try_layer", trial(0.5, 0.25, 0.0))
    step = iter([0.1, 0.2])
    monkeypatch.setattr(compile_callback, "shortest", lambda _: next(step))
    run = Run("auto", tmp_path / "auto").train()
    said = run.json
    assert (said["decision"], said["reason"]) == ("off", "steps took 0.20 s compiled and 0.10 s as they are")
    assert all(part._compiled_call_impl is None for part in parts_of(run.trainer.model))
    assert run.losses == plain.losses


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("why", ["no compiler", "a layer fails", "Dynamo is off", "reentrant"])
def test_auto_trains_uncompiled_where_it_cannot_compile(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = {
        "no compiler": "nothing can be compiled here: no C++ compiler",
        "a layer fails": "a layer does not compile: RuntimeError: it broke",
        "Dynamo is off": "Dynamo is switched off by TORCHDYNAMO_DISABLE=1; unset it to compile",
        "reentrant": "gradient checkpointing is reentrant, which compiles each layer twice; "
        "leave train.gradient_checkpointing_kwargs out",
    }[why]

    def broken(*_: Any) -> Trial:
        raise RuntimeError("it broke\nsomewhere")

    monkeypatch.setattr(compile_callback, "try_layer", broken)
    if why == "no compiler":
        monkeypatch.setattr(compile_callback, "try_compiler", lambda _: CompilerFound("no C++ compiler", 0.1))
    if why == "Dynamo is off":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    run = Run("auto", tmp_path)
    if why == "reentrant":
        run.trainer.model.get_base_model().gradient_checkpointing_enable({"use_reentrant": True})
    run.train()
    assert len(run.losses) == STEPS
    assert (run.json["decision"], run.json["reason"]) == ("off", said)
    assert any(record.levelno == logging.ERROR for record in caplog.records) == (why == "a layer fails")
    if why == "a layer fails":
        return
    layers = Run("layers", tmp_path / "layers")
    if why == "reentrant":
        layers.trainer.model.get_base_model().gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UsageError, match=re.escape(said)):
        layers.compiling.begin()


@pytest.mark.parametrize("by", ["train.torch_compile", "ACCELERATE_DYNAMO_BACKEND"])
def test_what_accelerate_compiles_as_a_whole_is_left_to_it(
    by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")  # which TrainingArguments sets too
    AcceleratorState._reset_state(reset_partial_state=True)  # it reads the environment once in a process
    request.addfinalizer(partial(AcceleratorState._reset_state, reset_partial_state=True))
    settings = {"torch_compile": True, "torch_compile_backend": "eager"} if by == "train.torch_compile" else {}
    run = Run("auto", tmp_path, **settings)
    run.compiling.begin()
    assert run.json["decision"] == "off"
    assert by in run.json["reason"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("earlier", ["layers", "off"])
def test_a_resumed_run_follows_the_decision_of_before(
    earlier: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile = 0.0 if earlier == "layers" else 100.0
    monkeypatch.setattr(compile_callback, "try_layer", trial(0.5, 0.25, compile))
    first = Run("auto", tmp_path).train().json
    assert first["decision"] == earlier
    monkeypatch.setattr(compile_callback, "try_layer", lambda *_: pytest.fail("a layer was tried again"))
    again = Run("auto", tmp_path).train().json
    assert again["decision"] == earlier
    if earlier == "off":
        assert again["reason"] == f"as in the part of this run before: {first['reason']}"
        assert Run("auto", tmp_path).train().json["reason"] == again["reason"]
        return
    assert again["reason"] == "from the first step, as in the part of this run before"
    assert again["operations_outside"] < again["operations"]
    # On another machine, without a compiler, it goes on as it is.
    monkeypatch.setattr(compile_callback, "try_compiler", lambda _: CompilerFound("no C++ compiler", 0.1))
    elsewhere = Run("auto", tmp_path).train()
    assert elsewhere.json["reason"] == "nothing can be compiled here: no C++ compiler"
    assert len(elsewhere.losses) == STEPS


@pytest.mark.usefixtures("quick")
def test_layers_compile_from_the_first_step_and_count_their_own(tmp_path: Path) -> None:
    """Also where something was compiled before, whose time Dynamo forgets when code is dropped, as patching does."""
    plain = Run("off", tmp_path / "off").train()
    for number in range(3):
        torch.compile(lambda x, number=number: x + number, backend="eager")(torch.ones(2))
    torch._dynamo.utils.counters["graph_break"]["of something before"] += 1
    run = Run("layers", tmp_path / "layers")
    torch._dynamo.utils.cumulative_time_spent_ns["entire_frame_compile"] += 10**12
    run.compiling.report = compile_callback.CompileReport.of_process("layers")
    torch.compiler.reset()
    run.train()
    assert run.losses == plain.losses
    said = run.json
    assert (said["decision"], said["reason"]) == ("layers", "from the first step, as cogumi.compile says")
    assert said["counts"]["graphs"] == len(parts_of(run.trainer.model)) - 1
    assert said["counts"]["breaks"] == {}
    assert said["counts"]["recompiles"] == 0
    assert 0 < said["counts"]["seconds"] < 900
    assert said["operations_outside"] < said["operations"]
    assert said["seconds_per_step_eager"] is None


@pytest.mark.usefixtures("quick")
def test_a_full_disk_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, name: str, content: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(compile_report, "write_section", full)
    monkeypatch.setattr(compile_callback, "try_layer", trial(0.5, 0.25, 0.0))
    run = Run("auto", tmp_path).train()
    assert len(run.losses) == STEPS
    assert not run.path.exists()
    assert any("decisions.json is not written: No space left on device" in each.getMessage() for each in caplog.records)

    def denied(path: Path, name: str, content: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(compile_report, "write_section", denied)
    with pytest.raises(PermissionError):
        Run("off", tmp_path).compiling.begin()


@pytest.mark.usefixtures("quick")
def test_a_run_that_goes_on_otherwise_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run("off", tmp_path)
    run.compiling.path.write_text(json.dumps({"compile": {"decision": "off", "reason": "cogumi.compile=off"}}))
    run.compiling.begin()
    assert "results differ in rounding" not in caplog.text
    run.compiling.path.write_text(json.dumps({"compile": {"decision": "layers", "reason": "as cogumi.compile says"}}))
    run.compiling.begin()
    assert "the part of this run before was compiled; from here on results differ in rounding" in caplog.text
