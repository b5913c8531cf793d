"""`cogumi.compile` of a run: a real Trainer on a tiny 4-bit Llama, what is refused, and the report."""

import errno
import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from accelerate.state import AcceleratorState
from four_bit_models import tiny_llama
from transformers import Trainer, TrainingArguments

from cogumi.compile import layers
from cogumi.compile.layers import compile_layers, compile_trainer, find_obstacle, parts_of
from cogumi.core.errors import UsageError
from cogumi.patches import graph_break
from cogumi.patches.graph_break import CompileProbe

STEPS = 10


class Run:
    """A training; losses: of its steps."""

    def __init__(self, path: Path, **arguments: Any) -> None:
        self.path = path / "decisions.json"
        torch.manual_seed(3)
        model = tiny_llama(layers=2)
        rows: Any = [{"input_ids": ids, "labels": ids} for ids in torch.randint(256, (STEPS, 16)).tolist()]
        settings = {"per_device_train_batch_size": 1, "max_steps": STEPS, "learning_rate": 0.01, "logging_steps": 1}
        settings |= {"use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"}
        args = TrainingArguments(output_dir=str(path), **settings | arguments)
        self.trainer = Trainer(model, args, train_dataset=rows)

    def begin(self, mode: str) -> None:
        compile_trainer(self.trainer, mode, self.path, lambda write: write())

    def train(self, mode: str) -> "Run":
        self.begin(mode)
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
    """eager for inductor, a compiler that was found, and probes that passed."""
    passed = CompileProbe("a 4-bit layer", "", 0.1)
    monkeypatch.setattr(layers, "compile_layers", partial(compile_layers, backend="eager"))
    monkeypatch.setattr(layers, "try_compiler", lambda _: "")
    monkeypatch.setattr(graph_break, "probe_linear", lambda _: passed)


@pytest.mark.usefixtures("quick")
def test_layers_compile_from_the_first_step_and_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cogumi")
    plain = Run(tmp_path / "off").train("off")
    assert plain.json == {"mode": "off"}
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    run = Run(tmp_path / "layers").train("layers")
    assert run.losses == plain.losses
    said = run.json
    assert said["mode"] == "layers"
    assert said["strategy"] == "none"
    assert said["probes"] == ["a 4-bit layer: one graph (0.1 s)"]
    counts = said["counts"]
    assert counts["graphs"] == len(parts_of(run.trainer.model)) - 1  # the layers share one
    assert (counts["breaks"], counts["recompiles"]) == ({}, 0)
    assert counts["seconds"] > 0
    assert counts["operations"] > 10  # a checkpointed layer is one, under transformers 5.24
    lines = [record.getMessage() for record in caplog.records]
    assert "compile: 2 layers; the first step compiles them" in lines
    did = f"{counts['graphs']} graphs of {counts['operations']} operations, 0 breaks, 0 recompiles"
    assert any(line.startswith(f"compile: {did}") for line in lines)


HOURS = {"preflight": {"figures": {"time": {"seconds": 3600.0}}}}


@pytest.mark.parametrize(
    ("forecast", "changed", "mode", "because"),
    [
        (HOURS, {}, "layers", "for 1 h 00 min of steps"),
        ({"preflight": {"figures": {"time": {"seconds": 600.0}}}}, {}, "off", "would be saved, less than the 120 s"),
        ({}, {}, "off", None),  # without a GPU there is no forecast, and nothing to say
        (HOURS, {"packing": False}, "off", "lengths that differ from step to step"),
        (HOURS, {"torch_compile": True}, "off", "compiles the whole model"),
        (HOURS, {"attention": "eager"}, "off", "not tried with eager attention"),
        (HOURS, {"num_experts_per_tok": 2}, "off", "not tried with experts"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_long_runs_compile_by_themselves_where_that_was_tried(
    forecast: dict[str, Any],
    changed: dict[str, Any],
    mode: str,
    because: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "cogumi")
    (tmp_path / "forecast.json").write_text(json.dumps(forecast))
    run = Run(tmp_path, max_steps=1)
    run.trainer.args.packing = changed.get("packing", True)  # type: ignore[attr-defined]
    run.trainer.args.torch_compile = changed.get("torch_compile", False)
    run.trainer.model.set_attn_implementation(changed.get("attention", "sdpa"))
    if "num_experts_per_tok" in changed:
        run.trainer.model.config.num_experts_per_tok = 2
    with torch._dynamo.config.patch(suppress_errors=False):
        run.begin("auto")
        assert torch._dynamo.config.suppress_errors == (mode == "layers")
    assert run.json["mode"] == mode
    chosen = [line for line in caplog.messages if line.startswith("chosen: cogumi.compile")]
    assert not chosen if because is None else because in chosen[0]
    (tmp_path / "forecast.json").write_text(json.dumps(HOURS))  # of the part that resumes
    run.begin("auto")
    assert run.json["mode"] == mode


@pytest.mark.usefixtures("quick")
def test_a_training_shorter_than_the_report_is_reported_too(tmp_path: Path) -> None:
    assert "counts" in Run(tmp_path, max_steps=1).train("layers").json


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("why", ["no compiler", "Dynamo is off", "reentrant", "no layers"])
def test_what_cannot_be_compiled_is_refused(why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = {
        "no compiler": "nothing can be compiled here: no C++ compiler; use cogumi.compile=off",
        "Dynamo is off": "Dynamo is switched off by TORCHDYNAMO_DISABLE=1; unset it to compile",
        "reentrant": "train.gradient_checkpointing_kwargs: use_reentrant compiles each layer twice; leave it out",
        "no layers": "Linear has no layers that transformers checkpoints",
    }[why]
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    run = Run(tmp_path, **reentrant if why == "reentrant" else {})
    if why == "no compiler":
        monkeypatch.setattr(layers, "try_compiler", lambda _: "no C++ compiler")
    if why == "Dynamo is off":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    if why == "no layers":
        run.trainer.model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError) as caught:
        run.begin("layers")
    assert said in str(caught.value)
    assert not run.path.exists()


@pytest.mark.usefixtures("quick")
def test_a_layer_that_does_not_compile_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("it broke\nsomewhere")

    torch.compiler.reset()
    monkeypatch.setattr(layers, "compile_layers", partial(compile_layers, backend=broken))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="it broke"):
        Run(tmp_path).train("layers")


@pytest.mark.parametrize("by", ["train.torch_compile", "ACCELERATE_DYNAMO_BACKEND"])
def test_what_accelerate_compiles_as_a_whole_is_left_to_it(
    by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")  # which TrainingArguments sets too
    AcceleratorState._reset_state(reset_partial_state=True)  # it reads the environment once in a process
    request.addfinalizer(partial(AcceleratorState._reset_state, reset_partial_state=True))
    settings = {"torch_compile": True, "torch_compile_backend": "eager"} if by == "train.torch_compile" else {}
    assert by in find_obstacle(Run(tmp_path, **settings).trainer)


@pytest.mark.usefixtures("quick")
def test_a_full_disk_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = []

    def unless_full(write: Callable[[], None]) -> None:
        with pytest.raises(OSError, match="No space left"):
            write()
        written.append(write)

    def full(path: Path, name: str, content: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    run = Run(tmp_path)
    compile_trainer(run.trainer, "layers", run.path, unless_full)
    monkeypatch.setattr(layers, "write_section", full)
    run.trainer.train()
    assert len(run.losses) == STEPS
    assert len(written) == 1
