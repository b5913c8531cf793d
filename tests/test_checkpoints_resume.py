"""A resumed run is the uninterrupted one, bit for bit on a CPU, with each kind of trainer; signals, too."""

import logging
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoints_protect import make as plain
from test_checkpoints_protect import run_apart, stop_after
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import cogumi
from cogumi import last_good_checkpoint, protect
from cogumi.models.loading import small_base_path

COMMON: dict[str, Any] = {
    "save_steps": 1, "save_strategy": "steps", "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False,
    "disable_tqdm": True, "gradient_checkpointing": False, "learning_rate": 1e-3,
}  # fmt: skip
Make = Callable[..., Any]


class Steps(TrainerCallback):
    """What is logged, without times."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            names = ("loss", "grad_norm", "learning_rate", "reward", "kl", "completions/mean_length", "rewards/margins")
            self.seen[state.global_step] = {name: logs[name] for name in names if name in logs}


def lora_trainer(
    trainer: str, arguments: str, path: Path, output_dir: Path, rows: dict[str, Any], **options: Any
) -> Any:
    """TRL's trainer of that name with an adapter and dropout; 4 steps an epoch."""
    import peft
    import trl
    from datasets import Dataset

    cogumi.patch()  # without a GPU TRL's own loss needs triton
    torch.manual_seed(1)
    settings = COMMON | {"max_steps": 7, "per_device_train_batch_size": 2} | options
    return getattr(trl, trainer)(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        args=getattr(trl, arguments)(output_dir=str(output_dir), **settings),
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1),
    )


@pytest.fixture
def sft(tiny_model: Path, sources: list[str]) -> Make:
    rows = {"text": [text[:80] for text in sources[:8]]}
    return lambda output_dir, path=tiny_model, **options: lora_trainer(
        "SFTTrainer", "SFTConfig", path, output_dir, rows, max_length=32, **options
    )


@pytest.fixture
def dpo(tiny_model: Path, sources: list[str]) -> Make:
    texts = sources[:8]
    rows = {"prompt": [text[:20] for text in texts], "chosen": [text[20:40] for text in texts]}
    rows["rejected"] = [text[40:60][::-1] for text in texts]
    return lambda output_dir, **options: lora_trainer(
        "DPOTrainer", "DPOConfig", tiny_model, output_dir, rows, **options
    )


@pytest.fixture
def gspo(tiny_model: Path) -> Make:
    def make(output_dir: Path, path: Path = tiny_model, **options: Any) -> Any:
        from tests.gspo_batches import grpo_trainer

        torch.manual_seed(1)
        settings = COMMON | {"max_steps": 14, "loss_type": "gspo", "per_device_train_batch_size": 4}
        # A batch of completions serves 4 steps, and 10 prompts of 2 are 5 of them: an epoch ends inside the run.
        more = {"steps_per_generation": 2, "num_iterations": 2, "optim": "adamw_torch"}
        return grpo_trainer(path, output_dir, lora=True, **settings | more | options)

    return make


@pytest.mark.parametrize(("kind", "crashes"), [("sft", (2, 5)), ("dpo", (3,)), ("gspo", (4, 6, 13))])
def test_resumed_is_uninterrupted(
    kind: str, crashes: tuple[int, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    make: Make = request.getfixturevalue(kind)
    reference = run(make, tmp_path / "reference", None)
    begins, seen = 1, {}
    for crash in (*crashes, None):
        part = run(make, tmp_path / "crashes", crash)
        assert min(part) == begins
        seen |= part
        begins = crash or 0
    assert seen == reference


class Signal(Steps):
    """Sends this process a signal at the nth forward pass of a trainer's model after a step, or so much later.

    Each token that is decoded is a pass, too.
    """

    def __init__(
        self, trainer: Any, at: int = 0, number: int = signal.SIGTERM, after: int = 0, delay: float = 0.0
    ) -> None:
        super().__init__()
        self.trainer, self.at, self.number, self.after, self.delay = protect(trainer), at, number, after, delay
        self.passes, self.step, self.sent, self.callers = 0, -1, 0.0, set[str]()
        trainer.add_callback(self)
        getattr(trainer.model, "get_base_model", lambda: trainer.model)().register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.passes += self.trainer.state.global_step >= self.after
        if self.passes == self.at:
            self.at = 0
            self.callers = {frame.name for frame in traceback.extract_stack()}
            timer = threading.Timer(self.delay, self.send)
            timer.start()
            if not self.delay:
                timer.join()

    def send(self) -> None:
        self.step, self.sent = self.trainer.state.global_step, time.time()
        os.kill(os.getpid(), self.number)

    def is_obeyed(self) -> None:
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            self.trainer.train()
        assert all(p.grad is None for p in self.trainer.model.parameters())
        assert self.trainer.accelerator.sync_gradients

    def train(self) -> tuple[Any, ...]:
        """Train to the end: the rows so far, the weights and the optimizer's state."""
        self.trainer.train()
        weights = {name: p.detach() for name, p in self.trainer.model.named_parameters() if p.requires_grad}
        return self.seen, weights, self.trainer.optimizer.state_dict()


def assert_equal(outcome: tuple[Any, ...], reference: tuple[Any, ...]) -> None:
    assert outcome[0] == reference[0]
    torch.testing.assert_close(outcome[1:], reference[1:], rtol=0, atol=0)


TWO: dict[str, Any] = {"gradient_accumulation_steps": 2, "save_steps": 100}
# A step of SFT has 2 passes. A rollout of GSPO has 8, a token each, and 2 of scoring. It serves 2 steps of 2 passes.
PLACES: list[tuple[str, dict[str, Any], int, int, int, str]] = [
    ("sft", TWO | {"logging_steps": 3}, 10, signal.SIGTERM, 4, "training_step"),  # its second micro-batch
    ("sft", TWO, 9, signal.SIGINT, 4, "training_step"),  # the first one, whose end a Ctrl-C waits for
    ("sft", TWO, 2, signal.SIGTERM, 0, "training_step"),
    ("gspo", TWO | {"max_steps": 5}, 20, signal.SIGTERM, 2, "generate"),
    ("gspo", TWO | {"max_steps": 5}, 14, signal.SIGHUP, 1, "_compute_loss"),  # its second micro-batch
]


@pytest.mark.parametrize(("kind", "options", "at", "number", "step", "inside"), PLACES)
def test_a_signal_within_a_step_saves_the_one_before(
    kind: str, options: dict[str, Any], at: int, number: int, step: int, inside: str, request: Any, tmp_path: Path
) -> None:
    make: Make = request.getfixturevalue(kind)
    reference = Signal(make(tmp_path / "reference", **options)).train()
    part = Signal(make(tmp_path / "run", **options), at, number)
    part.is_obeyed()
    assert (part.step, inside in part.callers) == (step, True)
    point = last_good_checkpoint(tmp_path / "run")
    assert (point.name if point else "") == (f"checkpoint-{step}" if step else "")
    seen, *tensors = Signal(make(tmp_path / "run", **options)).train()
    assert_equal((part.seen | seen, *tensors), reference)


@pytest.mark.slow("twenty trainings of the small base that a SIGTERM ends")
@pytest.mark.parametrize("kind", ["sft", pytest.param("gspo", marks=pytest.mark.sweep)])
def test_sigterms_within_steps_of_the_small_base(
    kind: str, request: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten in one training, each at another place: half of them before a forward pass, half at any moment of a step."""
    more = {"max_completion_length": 32, "num_iterations": 1} if kind == "gspo" else {}
    options = TWO | more | {"path": small_base_path(), "max_steps": 24}
    make: Make = request.getfixturevalue(kind)
    reference = Signal(make(tmp_path / "reference", **options)).train()
    caplog.set_level(logging.INFO, "cogumi")
    draw, seen, saved, reached, inside = random.Random(0), {}, [], 0, 0
    for turn in range(10):
        delay = draw.uniform(0.0, 0.05) if turn % 2 else 0.0
        at = draw.randint(1, 4 if kind == "sft" else 40)
        part = Signal(make(tmp_path / "run", **options), at, after=reached + 1, delay=delay)
        caplog.clear()
        part.is_obeyed()
        (whole,) = [row for row in caplog.records if "is saved and verified" in row.message]
        reached, saved = part.trainer.state.global_step, [*saved, whole.created - part.sent]
        assert f"checkpoint-{reached} " in whole.message
        inside += reached == part.step
        seen |= part.seen
    print(f"{kind}: {inside} of 10 within a step, seconds from SIGTERM to a checkpoint that reads back:", end=" ")
    print(", ".join(f"{seconds:.2f}" for seconds in saved))
    assert inside >= 8
    assert max(saved) < 2
    last, *tensors = Signal(make(tmp_path / "run", **options)).train()
    assert_equal((seen | last, *tensors), reference)


def test_a_process_that_lives_on_trains_again(sft: Make, tmp_path: Path) -> None:
    reference = Signal(sft(tmp_path / "reference", **TWO)).train()
    part = Signal(sft(tmp_path / "run", **TWO), 9, signal.SIGINT)
    part.is_obeyed()
    assert_equal(part.train(), reference)


def test_a_signal_before_a_resumed_run_has_finished_a_step_writes_nothing(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "save_steps": 100}
    for at in (6, 1):
        Signal(plain(tmp_path, **options)[0], at).is_obeyed()
        assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-2"]


def test_running_statistics_have_the_step_finished(tmp_path: Path) -> None:
    """They change in each forward pass, so that in the middle of a step they are not those of the last one."""
    trainer, _ = plain(tmp_path, gradient_accumulation_steps=2)
    trainer.model.model.norm.add_module("statistics", torch.nn.BatchNorm1d(1))
    part = Signal(trainer, 5)
    part.is_obeyed()
    assert (part.step, trainer.state.global_step) == (2, 3)


def run(make: Make, output_dir: Path, crash: int | None) -> dict[int, dict[str, float]]:
    trainer = protect(make(output_dir))
    steps = Steps()
    trainer.add_callback(steps)
    if crash is not None:
        trainer.add_callback(stop_after(crash))
    with nullcontext() if crash is None else pytest.raises(RuntimeError, match="gone"):
        trainer.train()
    return steps.seen


SIGNALLED = """
def send(number, *more):
    try:
        os.kill(os.getpid(), int(number))
        time.sleep(0.01)
    finally:
        if more:
            send(*more)

def wait_and_send():
    while not (Path(sys.argv[1]) / "checkpoint-2").exists():  # committed beside the training
        time.sleep(0.01)
    send(*sys.argv[2].split(","))

trainer, losses = make(Path(sys.argv[1]), at_step("on_step_begin", 3, wait_and_send))
cogumi.protect(trainer).train()
print("finished", flush=True)
"""


@pytest.mark.parametrize(
    ("numbers", "code", "step"),
    [
        ([signal.SIGTERM], 143, 3),
        ([signal.SIGINT], -signal.SIGINT, 4),  # its step has one micro-batch
        # A shell passes it on, and the kernel sends another when the shell ends.
        ([signal.SIGHUP, signal.SIGHUP], 129, 3),
    ],
)
def test_a_signal_saves_a_finished_step(
    numbers: list[int], code: int, step: int, tmp_path: Path, for_commands: dict[str, str]
) -> None:
    done = run_apart(SIGNALLED, tmp_path, for_commands, ",".join(str(int(number)) for number in numbers))
    assert done.returncode == code, done.stderr
    assert "finished" not in done.stdout
    assert last_good_checkpoint(tmp_path) == tmp_path / f"checkpoint-{step}"
    assert (tmp_path / f"checkpoint-{step}" / "cogumi-manifest.json").is_file()


def test_a_second_signal_ends_at_once(tmp_path: Path, for_commands: dict[str, str]) -> None:
    done = run_apart(SIGNALLED, tmp_path, for_commands, "15,15")
    assert done.returncode == 143
    assert last_good_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
