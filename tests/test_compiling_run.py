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
from transformers import Trainer, TrainingArguments

from cogumi.compile import compile_callback
from cogumi.compile.compile_callback import CompileCallback
from cogumi.compile.compile_report import CompilerFound, read_counts
from cogumi.compile.layers import compile_layers, parts_of
from cogumi.core.errors import UsageError
from cogumi.patches import graph_break
from cogumi.patches.graph_break import CompileProbe

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
        self.compiling = CompileCallback(self.trainer, mode, self.path, nullcontext, lambda: self.signalled)
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
    passed = CompileProbe("a 4-bit layer", True, "", 0.1)
    monkeypatch.setattr(compile_callback, "compile_layers", partial(compile_layers, backend="eager"))
    monkeypatch.setattr(compile_callback, "try_compiler", lambda _: CompilerFound("", 0.1))
    monkeypatch.setattr(graph_break, "probe_linear", lambda _: passed)
    monkeypatch.setattr(compile_callback, "WORTH_COMPILING", 0.0)
    monkeypatch.setattr(compile_callback, "shortest", lambda _: 1.2)  # steps as long compiled as before


@pytest.mark.usefixtures("quick")
def test_auto_compiles_what_is_repaid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cogumi")
    plain = Run("off", tmp_path / "off").train()
    assert plain.json["decision"] == "off"
    assert plain.json["reason"] == "cogumi.compile=off"
    torch.compiler.reset()
    run = Run("auto", tmp_path / "auto").train()
    assert run.losses == plain.losses
    said = run.json
    assert (said["decision"], said["reason"]) == ("layers", "steps took 1.20 s compiled and 1.20 s as they are")
    assert said["strategy"] == "none"
    assert said["probes"] == [{"name": "a 4-bit layer", "passed": True, "error": "", "seconds": 0.1}]
    assert said["counts"]["graphs"] >= 2
    assert said["counts"]["breaks"] == {}
    assert said["counts"]["recompiles"] == 0
    assert said["counts"]["seconds"] > 0
    assert said["counts"]["operations"] > 50
    assert said["seconds_per_step"] > 0
    assert said["seconds_per_step_eager"] > 0
    assert set(said["versions"]) == {"torch", "bitsandbytes"}
    lines = [record.getMessage() for record in caplog.records]
    assert "compile: layers: to be compared with 1.20 s a step as they are" in lines
    assert f"compile: layers: {said['reason']}" in lines
    assert any(line.startswith("compile: 2 layers; the next step compiles them") for line in lines)
    did = f"{said['counts']['graphs']} graphs of {said['counts']['operations']} operations, 0 breaks, 0 recompiles"
    assert any(line.startswith(f"compile: {did}") for line in lines)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("when", ["before the compiler is tried", "while it is"])
def test_a_training_that_is_to_end_is_not_compiled(when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that is taken back gives half a minute, which compiling would take."""
    run = Run("auto", tmp_path)
    run.signalled = when == "before the compiler is tried"

    def try_compiler(_: torch.device) -> CompilerFound:
        assert not run.signalled
        run.signalled = True
        return CompilerFound("", 0.1)

    monkeypatch.setattr(compile_callback, "try_compiler", try_compiler)
    run.train()
    assert run.signalled
    assert not run.path.exists()  # undecided: the part of the run that follows measures for itself
    assert not run.compiling.on


@pytest.mark.usefixtures("quick")
def test_auto_leaves_a_short_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_callback, "WORTH_COMPILING", 1e6)
    monkeypatch.setattr(compile_callback, "try_compiler", lambda *_: pytest.fail("the compiler was tried"))
    before = read_counts().graphs
    said = Run("auto", tmp_path).train().json
    assert said["decision"] == "off"
    step = said["seconds_per_step_eager"]
    assert said["reason"] == (
        f"{7 * step:.0f} s of training are left (7 steps of {step:.2f} s), and less than 1000000 s do not repay compiling"
    )
    assert read_counts().graphs == before


@pytest.mark.usefixtures("quick")
def test_steps_that_became_longer_are_taken_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = Run("off", tmp_path / "off").train()
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
        "a layer fails": "a layer does not compile: BackendCompilerFailed: backend='broken' raised: RuntimeError: it broke",
        "Dynamo is off": "Dynamo is switched off by TORCHDYNAMO_DISABLE=1; unset it to compile",
        "reentrant": "gradient checkpointing is reentrant, which compiles each layer twice; "
        "leave train.gradient_checkpointing_kwargs out",
    }[why]

    def broken(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("it broke\nsomewhere")

    if why == "a layer fails":
        torch.compiler.reset()
        monkeypatch.setattr(compile_callback, "compile_layers", partial(compile_layers, backend=broken))
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
    if earlier == "off":
        step = iter([0.1, 0.2])
        monkeypatch.setattr(compile_callback, "shortest", lambda _: next(step))
    first = Run("auto", tmp_path).train().json
    assert first["decision"] == earlier
    again = Run("auto", tmp_path).train().json
    assert again["decision"] == earlier
    if earlier == "off":
        assert again["reason"] == f"as in the part of this run before: {first['reason']}"
        assert Run("auto", tmp_path).train().json["reason"] == again["reason"]
        return
    assert again["reason"] == "from the first step, as in the part of this run before"
    assert again["counts"]["breaks"] == {}
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
    run.compiling.counts = read_counts()
    torch.compiler.reset()
    run.train()
    assert run.losses == plain.losses
    said = run.json
    assert (said["decision"], said["reason"]) == ("layers", "from the first step, as cogumi.compile says")
    assert said["counts"]["graphs"] == len(parts_of(run.trainer.model)) - 1
    assert said["counts"]["breaks"] == {}
    assert said["counts"]["recompiles"] == 0
    assert 0 < said["counts"]["seconds"] < 900
    assert said["counts"]["operations"] > 50
    assert said["seconds_per_step_eager"] is None


@pytest.mark.usefixtures("quick")
def test_a_full_disk_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, name: str, content: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(compile_callback, "write_section", full)
    run = Run("auto", tmp_path).train()
    assert len(run.losses) == STEPS
    assert not run.path.exists()
    assert any("decisions.json is not written: No space left on device" in each.getMessage() for each in caplog.records)

    def denied(path: Path, name: str, content: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(compile_callback, "write_section", denied)
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
