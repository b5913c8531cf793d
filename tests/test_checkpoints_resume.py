"""A resumed run is the uninterrupted one, bit for bit on a CPU, with each kind of trainer; signals, too."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepared_process
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import cogumi
from cogumi import last_good_checkpoint, protect

COMMON: dict[str, Any] = {
    "save_steps": 1,
    "save_strategy": "steps",
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "learning_rate": 1e-3,
}
Make = Callable[..., Any]


class Steps(TrainerCallback):
    """What is logged, without times; and a crash after a step."""

    def __init__(self, crash: int | None) -> None:
        self.seen: dict[int, dict[str, float]] = {}
        self.crash = crash

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            names = ("loss", "grad_norm", "learning_rate", "reward", "kl", "completions/mean_length", "rewards/margins")
            self.seen[state.global_step] = {name: logs[name] for name in names if name in logs}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.crash:
            raise RuntimeError("the machine is gone")


@pytest.fixture
def sft(tiny_model: Path, sources: list[str]) -> Make:
    def make(output_dir: Path, **options: Any) -> Any:
        import peft
        import trl
        from datasets import Dataset

        cogumi.patch()  # without a GPU TRL's own loss needs triton
        torch.manual_seed(1)
        args = trl.SFTConfig(
            output_dir=str(output_dir),
            max_length=32,
            per_device_train_batch_size=2,
            **COMMON | {"max_steps": 7} | options,
        )
        return trl.SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
            args=args,
            train_dataset=Dataset.from_dict({"text": [text[:80] for text in sources[:8]]}),  # 4 steps an epoch
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
            peft_config=peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1),
        )

    return make


@pytest.fixture
def dpo(tiny_model: Path, sources: list[str]) -> Make:
    def make(output_dir: Path, **options: Any) -> Any:
        import peft
        import trl
        from datasets import Dataset

        cogumi.patch()  # without a GPU TRL's own loss needs triton
        torch.manual_seed(1)
        rows = {
            "prompt": [text[:20] for text in sources[:8]],
            "chosen": [text[20:40] for text in sources[:8]],
            "rejected": [text[40:60][::-1] for text in sources[:8]],
        }
        args = trl.DPOConfig(
            output_dir=str(output_dir), per_device_train_batch_size=2, **COMMON | {"max_steps": 7} | options
        )
        return trl.DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
            args=args,
            train_dataset=Dataset.from_dict(rows),
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
            peft_config=peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1),
        )

    return make


@pytest.fixture
def gspo(tiny_model: Path) -> Make:
    def make(output_dir: Path, **options: Any) -> Any:
        from tests.gspo_batches import grpo_trainer

        torch.manual_seed(1)
        settings = COMMON | {"max_steps": 14, "loss_type": "gspo", "per_device_train_batch_size": 4}
        # A batch of completions serves 4 steps, and 10 prompts of 2 are 5 of them: an epoch ends inside the run.
        more = {"steps_per_generation": 2, "num_iterations": 2, "optim": "adamw_torch"}
        return grpo_trainer(tiny_model, output_dir, lora=True, **settings | more | options)

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


def run(make: Make, output_dir: Path, crash: int | None) -> dict[int, dict[str, float]]:
    trainer = protect(make(output_dir))
    steps = Steps(crash)
    trainer.add_callback(steps)
    if crash is None:
        trainer.train()
    else:
        with pytest.raises(RuntimeError, match="gone"):
            trainer.train()
    return steps.seen


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_checkpoints_protect import make
from transformers import TrainerCallback
import cogumi

class Send(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 3:
            while not (Path(sys.argv[1]) / "checkpoint-2").exists():  # committed beside the training
                time.sleep(0.01)
            for number in sys.argv[2].split(","):
                os.kill(os.getpid(), int(number))
                time.sleep(0.01)

trainer, losses = make(Path(sys.argv[1]), Send())
cogumi.protect(trainer).train()
print("finished", flush=True)
"""


def interrupted(output_dir: Path, environment: dict[str, str], *numbers: int) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).parent
    numbered = ",".join(str(int(each)) for each in numbers)
    words = [*prepared_process.python(environment), "-c", SCRIPT, output_dir, numbered, tests, tests.parent]
    return subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=300, cwd=output_dir, env=environment
    )


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGTERM], 143),
        ([signal.SIGINT], -signal.SIGINT),
        # A shell passes it on, and the kernel sends another when the shell ends.
        ([signal.SIGHUP, signal.SIGHUP], 129),
    ],
)
def test_a_signal_finishes_the_step_and_saves(
    numbers: list[int], code: int, tmp_path: Path, for_commands: dict[str, str]
) -> None:
    done = interrupted(tmp_path, for_commands, *numbers)
    assert done.returncode == code, done.stderr
    assert "finished" not in done.stdout
    point = last_good_checkpoint(tmp_path)
    assert point is not None
    assert point.name == "checkpoint-4"
    assert (point / "cogumi-manifest.json").is_file()


def test_a_second_signal_ends_at_once(tmp_path: Path, for_commands: dict[str, str]) -> None:
    done = interrupted(tmp_path, for_commands, signal.SIGTERM, signal.SIGTERM)
    assert done.returncode == 143
    point = last_good_checkpoint(tmp_path)
    assert point is not None
    assert point.name == "checkpoint-2"
