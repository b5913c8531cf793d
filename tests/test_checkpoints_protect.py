"""`cogumi.protect` on real trainers: what is on the disk after saves, kills and full disks, and what a resume does."""

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepared_process
import pytest
import torch
from datasets import Dataset
from disk_mounts import Mount
from page_cache import is_in_memory
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from cogumi import protect
from cogumi.checkpoints.commit import STAGING_NAME
from cogumi.checkpoints.manifest import RUN_NAME
from cogumi.checkpoints.verify import PIN_NAME, inspect
from cogumi.cli.disk_commands import prune
from cogumi.core.disk_space import filesystem_of
from cogumi.core.errors import UsageError
from cogumi.disk.usage import disk_bytes
from cogumi.patches.trl_internals import LOAD_OPTIMIZER

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64,
    "attention_dropout": 0.1,
}  # fmt: skip


class Losses(TrainerCallback):
    """The loss of every step, as it was logged."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.seen[state.global_step] = logs["loss"]


def at_step(event: str, step: int, action: Callable[[], object]) -> TrainerCallback:
    """A callback that calls `action` at an event of the training after so many steps."""

    def act(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            action()

    return type("AtStep", (TrainerCallback,), {event: act})()  # type: ignore[no-any-return]


def stop_after(step: int) -> TrainerCallback:
    """What a crash is to a trainer: an exception in the middle."""

    def crash() -> None:
        raise RuntimeError("the machine is gone")

    return at_step("on_step_end", step, crash)


def make(
    output_dir: Path, *callbacks: TrainerCallback, lora: dict[str, Any] | None = None, data: Any = None, **options: Any
) -> tuple[Any, Losses]:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    if lora:
        model = get_peft_model(model, LoraConfig(**lora))
    rows = [
        {"input_ids": [(i * 7 + j) % 64 for j in range(8)], "labels": [(i + j) % 64 for j in range(8)]}
        for i in range(32)
    ]
    settings: dict[str, Any] = {
        "max_steps": 8, "save_steps": 2, "save_total_limit": 2, "logging_steps": 1, "per_device_train_batch_size": 4,
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(output_dir), **settings | options)
    losses = Losses()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data or Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]),
        callbacks=[losses, *callbacks],
    )
    return trainer, losses


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A plain, uninterrupted run: where its checkpoints are, and its losses."""
    output_dir = tmp_path_factory.mktemp("reference")
    trainer, losses = make(output_dir)
    trainer.train()
    return output_dir, losses.seen


@pytest.fixture
def reference(plain_run: tuple[Path, dict[int, float]]) -> dict[int, float]:
    return plain_run[1]


def names(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir() if path.name != RUN_NAME)


def checkpoints(output_dir: Path) -> list[str]:
    return [name for name in names(output_dir) if name.startswith("checkpoint-")]


def test_a_protected_run_is_the_plain_one(tmp_path: Path, plain_run: tuple[Path, dict[int, float]]) -> None:
    trainer, losses = make(tmp_path)
    assert protect(trainer) is trainer
    trainer.train()
    assert losses.seen == plain_run[1]
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-8"]
    assert all(inspect(tmp_path / name).state == "verified" for name in names(tmp_path))
    ours, theirs = tmp_path / "checkpoint-8", plain_run[0] / "checkpoint-8"
    assert names(ours) == sorted([*names(theirs), "cogumi-manifest.json", "cogumi-run.json"])
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()


def test_resumes_from_the_older_one_when_the_newest_is_damaged(
    tmp_path: Path, reference: dict[int, float], caplog: pytest.LogCaptureFixture
) -> None:
    trainer, _ = make(tmp_path, stop_after(5))
    with pytest.raises(RuntimeError, match="gone"):
        protect(trainer).train()
    flip(tmp_path / "checkpoint-4" / "optimizer.pt")
    again, after = make(tmp_path)
    with caplog.at_level(logging.INFO):
        protect(again).train()
    assert {step: loss for step, loss in reference.items() if step > 2} == after.seen
    assert "checkpoint-4" in caplog.text
    assert "optimizer.pt" in caplog.text
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
    assert any(name.startswith("aside-checkpoint-4-") for name in names(tmp_path))


def test_a_fresh_start_takes_no_earlier_run_for_its_own(tmp_path: Path, reference: dict[int, float]) -> None:
    earlier, _ = make(tmp_path, max_steps=12)
    protect(earlier).train()
    trainer, losses = make(tmp_path)
    protect(trainer, resume="never").train()
    assert losses.seen == reference
    actual = names(tmp_path)
    assert checkpoints(tmp_path) == ["checkpoint-6", "checkpoint-8"]
    assert sum(name.startswith("aside-checkpoint-") for name in actual) == 2


def test_a_finished_training_is_taken_up_without_another_step(tmp_path: Path, reference: dict[int, float]) -> None:
    """transformers trains a step too many there."""
    for options in ({}, {"max_steps": -1, "num_train_epochs": 1}):
        output_dir = tmp_path / f"{len(options)}"
        first, _ = make(output_dir, **options)
        protect(first).train()
        again, losses = make(output_dir, **options)
        done = protect(again).train()
        assert (done.global_step, losses.seen) == (8, {})
        assert checkpoints(output_dir) == ["checkpoint-6", "checkpoint-8"]
        weights = first.model.state_dict()
        assert all(torch.equal(weights[name], value) for name, value in again.model.state_dict().items())
    further, losses = make(tmp_path / "0", max_steps=10)
    protect(further).train()
    assert sorted(losses.seen) == [9, 10]


def test_one_trainer_trains_twice(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path)
    protect(trainer).train()
    trainer.train(resume_from_checkpoint=False)
    assert checkpoints(tmp_path) == ["checkpoint-6", "checkpoint-8"]
    assert sum(name.startswith("aside-checkpoint-") for name in names(tmp_path)) == 2


def test_nothing_of_a_checkpoint_stays_in_memory(tmp_path: Path) -> None:
    """So that what is read back comes from the disk, and removing it takes no time."""
    if filesystem_of(tmp_path).kind in ("tmpfs", "ramfs", "overlay"):
        pytest.skip("these have no page cache of their own")
    trainer, _ = make(tmp_path)
    protect(trainer).train()
    files = [tmp_path / "checkpoint-8" / name for name in ("model.safetensors", "optimizer.pt")]
    assert not any(map(is_in_memory, files))
    assert files[0].read_bytes()
    assert is_in_memory(files[0])


def test_told_to_resume_where_nothing_can_be(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path)
    with pytest.raises(UsageError, match="holds no checkpoint that can be resumed from"):
        protect(trainer).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(UsageError, match="cannot be resumed from"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_best_stays_and_is_loaded(tmp_path: Path) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    # The greatest loss, so that an early one is the best.
    trainer, _ = make(tmp_path, **evaluation, metric_for_best_model="loss", greater_is_better=True)
    protect(trainer).train()
    assert STAGING_NAME not in trainer.state.best_model_checkpoint
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path
    assert inspect(best).state == "verified"
    assert best.name in names(tmp_path)
    assert {"checkpoint-6", "checkpoint-8"} <= set(names(tmp_path))
    weights = LlamaForCausalLM.from_pretrained(best).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in trainer.model.state_dict().items())


def test_pinned_and_foreign_directories_stay(tmp_path: Path) -> None:
    # on_save: the checkpoint is where Trainer would have put it
    pin = at_step("on_save", 2, (tmp_path / "checkpoint-2" / PIN_NAME).touch)
    for name in ("checkpoint-keep-this", "checkpoint-1.bak"):
        (tmp_path / name).mkdir(parents=True)
    trainer, _ = make(tmp_path, pin)
    protect(trainer).train()
    left = ("1.bak", "2", "6", "8", "keep-this")
    assert names(tmp_path) == [f"checkpoint-{name}" for name in left]


def test_no_limit_keeps_all_as_transformers_does(tmp_path: Path) -> None:
    for limit, kept in ((None, ["2", "4", "6", "8"]), (3, ["4", "6", "8"]), (1, ["6", "8"])):
        place = tmp_path / str(limit)
        trainer, _ = make(place, save_total_limit=limit)
        protect(trainer).train()
        assert names(place) == [f"checkpoint-{step}" for step in kept]
        assert ("all stay" in str(trainer.cogumi_protection)) == (limit is None)


def test_a_disk_without_room_for_all_keeps_the_newest(size: int, disk: Callable[[int], Path]) -> None:
    point = disk(int(3.5 * size))
    trainer, losses = make(point / "run", save_total_limit=None, save_steps=1)
    protect(trainer).train()
    assert max(losses.seen) == 8
    kept = names(point / "run")  # as many as there is room for, the newest
    assert 2 <= len(kept) < 8
    assert kept == [f"checkpoint-{step}" for step in range(9 - len(kept), 9)]
    assert all(inspect(point / "run" / name).state == "verified" for name in kept)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 1}, "keep=1: .*at least 2"),
        ({"keep": "3"}, "keep='3': .* whole number"),
        ({"keep": 2.5}, "keep=2.5: .* whole number"),
        ({"resume": "maybe"}, "auto, never"),
        ({"on_full": "panic"}, "continue, pause, stop"),
        ({"mirror": ""}, "is where the checkpoints are"),
        ({"mirror": "run"}, "is where the checkpoints are"),
    ],
)
def test_bad_arguments(options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer, _ = make(tmp_path / "run", save_total_limit=3)
    with pytest.raises(UsageError, match=said):
        protect(trainer, **options)
    with pytest.raises(UsageError, match="given str"):
        protect("trainer")
    protect(trainer)
    assert trainer.args.save_total_limit is None
    with pytest.raises(UsageError, match="protected already"):
        protect(trainer)


# ---------------------------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def disk(mount: Mount) -> Callable[[int], Path]:
    """Mounts a tmpfs of some bytes."""
    return lambda size: mount(options=f"size={size}", name="disk")


@pytest.fixture(scope="module")
def size(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What one checkpoint takes on a disk."""
    trainer, _ = make(tmp_path_factory.mktemp("size"), max_steps=2)
    protect(trainer).train()
    return disk_bytes(Path(trainer.args.output_dir) / "checkpoint-2")


@pytest.mark.parametrize("share", [0.5, 1.05, 1.5, 2.2, 2.9, 3.5])
def test_a_full_disk_never_kills_training(
    share: float, size: int, disk: Callable[[int], Path], reference: dict[int, float], caplog: pytest.LogCaptureFixture
) -> None:
    point = disk(int(share * size))
    trainer, losses = make(point / "run")
    protect(trainer).train()
    assert losses.seen == reference
    kept = list((point / "run").glob("checkpoint-*"))
    assert all(inspect(path).state == "verified" for path in kept)
    assert bool(kept) == (share > 1)
    if share > 2.1:  # the older ones make room for the last
        assert "checkpoint-8" in checkpoints(point / "run")
    assert not (point / "run" / STAGING_NAME).exists()
    assert ("does not fit" in caplog.text) == (share < 3)


def test_a_directory_that_takes_nothing(mount: Mount) -> None:
    other = mount(name="other", options="size=1m,ro")
    with pytest.raises(UsageError, match=r"no checkpoint can be written there \(Read-only"):
        protect(make(other)[0]).train()


def test_a_signal_ends_a_pause(size: int, disk: Callable[[int], Path], caplog: pytest.LogCaptureFixture) -> None:
    trainer, losses = make(disk(int(0.5 * size)) / "run")
    protect(trainer, on_full="pause")
    waits = trainer.cogumi_protection.saver.wait

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        waits()

    trainer.cogumi_protection.saver.wait = interrupted
    with pytest.raises(KeyboardInterrupt, match="ended after its last finished step"):
        trainer.train()
    assert max(losses.seen) == 2
    assert "training ends without checkpoint-2" in caplog.text
    assert caplog.text.count("checkpoint-2 does not fit on the disk") == 1


def test_a_mirror_of_another_training(tmp_path: Path) -> None:
    protect(make(tmp_path / "one")[0], mirror=tmp_path / "mirror").train()
    same, losses = make(tmp_path / "two")
    protect(same, mirror=tmp_path / "mirror").train()
    assert losses.seen == {}  # a machine that knew nothing of it: its end is fetched
    other, _ = make(tmp_path / "three", learning_rate=2e-2, lora={"r": 2, "target_modules": "all-linear"})
    with pytest.raises(UsageError, match=r"checkpoint-8 in the mirror .* is of another training \(adapter default: "):
        protect(other, mirror=tmp_path / "mirror").train()
    assert "checkpoint-8" not in names(tmp_path / "three")


@pytest.mark.parametrize("case", ["the machine is lost", "started anew"])
def test_a_mirror_is_continued_from(case: str, tmp_path: Path, reference: dict[int, float]) -> None:
    """Not where this training was started anew: the newest checkpoint in the mirror is of the one before."""
    anew = case == "started anew"
    if anew:
        protect(make(tmp_path / "run")[0], mirror=tmp_path / "mirror").train()
    trainer, _ = make(tmp_path / "run", stop_after(3))
    with pytest.raises(RuntimeError, match="gone"):
        protect(trainer, mirror=tmp_path / "mirror").train(resume_from_checkpoint=False if anew else None)
    if not anew:
        shutil.rmtree(tmp_path / "run")
    again, losses = make(tmp_path / "run")
    protect(again, mirror=tmp_path / "mirror").train()
    assert losses.seen == {step: loss for step, loss in reference.items() if step > 2}


def test_stop(size: int, disk: Callable[[int], Path]) -> None:
    point = disk(int(0.5 * size))
    trainer, losses = make(point / "run")
    protect(trainer, on_full="stop").train()
    assert max(losses.seen) == 2


def test_pause_goes_on_when_there_is_space(
    size: int, disk: Callable[[int], Path], reference: dict[int, float], caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = disk(int(0.5 * size))
    waits: list[int] = []

    def wait() -> None:
        waits.append(1)
        subprocess.run(["mount", "-o", f"remount,size={10 * size}", str(point)], check=True)

    trainer, losses = make(point / "run")
    protect(trainer, on_full="pause")
    monkeypatch.setattr(trainer.cogumi_protection.saver, "wait", wait)
    trainer.train()
    assert len(waits) == 1
    assert losses.seen == reference
    assert "training waits" in caplog.text
    assert inspect(point / "run" / "checkpoint-8").state == "verified"


def test_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = make(tmp_path)
    monkeypatch.setattr(trainer, "_save_rng_state", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        protect(trainer).train()
    assert names(tmp_path) == []


# ------------------------------------------------------------------------------------------------------------ retention


@pytest.mark.parametrize("how", ["cut off", "a byte of an earlier process's"])
def test_a_damaged_checkpoint_is_none_of_those_kept(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def damage() -> None:
        trainer.cogumi_protection.saver.settle()
        os.truncate(tmp_path / "checkpoint-6" / "optimizer.pt", 1000)

    trainer, _ = make(tmp_path, at_step("on_step_begin", 7, damage) if how == "cut off" else stop_after(7))
    protect(trainer)
    if how == "cut off":
        trainer.train()
    else:
        with pytest.raises(RuntimeError, match="gone"):
            trainer.train()
        flip(tmp_path / "checkpoint-4" / "optimizer.pt")
        protect(make(tmp_path)[0]).train()
    damaged = "checkpoint-6" if how == "cut off" else "checkpoint-4"
    good = {name for name in checkpoints(tmp_path) if inspect(tmp_path / name).state == "verified"}
    assert good == ({"checkpoint-4", "checkpoint-8"} if how == "cut off" else {"checkpoint-6", "checkpoint-8"})
    if how == "cut off":
        assert f"{tmp_path / damaged} is damaged, and one more stays in its place: optimizer.pt has" in caplog.text


IMPORTS = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[-2:]
from test_checkpoints_protect import at_step, make
from transformers import TrainerCallback
import cogumi
"""


def run_apart(
    code: str, output_dir: Path, environment: dict[str, str], *words: object
) -> subprocess.CompletedProcess[str]:
    """Run code that trains into output_dir, its first argument, in a process of its own."""
    places = Path(__file__).parent, Path(__file__).parents[1]
    command = [*prepared_process.python(environment), "-c", IMPORTS + code, output_dir, *words, *places]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, cwd=output_dir, env=environment
    )


KILLED_AFTER_ITS_LAST_SAVE = """
class Kill(TrainerCallback):
    def on_train_end(self, args, state, control, **_):
        while not (Path(sys.argv[1]) / "checkpoint-8").exists():  # committed beside the training
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

cogumi.protect(make(Path(sys.argv[1]), Kill())[0]).train()
"""


def test_what_a_kill_after_the_last_save_leaves_is_removed_by_the_next_start(
    tmp_path: Path, for_commands: dict[str, str]
) -> None:
    done = run_apart(KILLED_AFTER_ITS_LAST_SAVE, tmp_path, for_commands)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert names(tmp_path)[:3] == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    (tmp_path / STAGING_NAME / "checkpoint-8").mkdir(parents=True)
    trainer, losses = make(tmp_path)
    protect(trainer, mirror=tmp_path.with_name("mirror")).train()
    assert losses.seen == {}
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-8"]
    mirrored = tmp_path.with_name("mirror") / "checkpoint-8"
    assert inspect(mirrored).state == "verified", "which it may not have come to either"


def test_a_staging_directory_that_leads_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("keep me")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / STAGING_NAME).symlink_to(tmp_path / "precious")

    def again() -> None:
        trainer.cogumi_protection.saver.settle()
        (tmp_path / "run" / STAGING_NAME).symlink_to(tmp_path / "nowhere")

    trainer, _ = make(tmp_path / "run", at_step("on_step_begin", 3, again))
    protect(trainer).train()
    assert names(tmp_path / "run") == ["checkpoint-6", "checkpoint-8"]
    assert all(inspect(tmp_path / "run" / name).state == "verified" for name in names(tmp_path / "run"))
    assert names(tmp_path / "precious") == ["data"]
    assert caplog.text.count(f"{STAGING_NAME} is not a directory") == 2


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "model.safetensors", "trainer_state.json"])
def test_a_file_that_does_not_load_is_one_line(name: str, tmp_path: Path) -> None:
    """As plain Trainer's, whose torch files are not read before the resume."""
    trainer, _ = make(tmp_path, max_steps=2)
    trainer.train()
    path = tmp_path / "checkpoint-2" / name
    if name == "trainer_state.json":
        path.write_text(path.read_text().replace('"global_step"', '"nobody_knows": 1, "global_step"'))
    elif name == "model.safetensors":
        save_file({"lm_head.weight": torch.zeros(3)}, path, {"format": "pt"})
    else:
        torch.save({"not": "what is wanted", "a class": TrainerCallback}, path)
    assert inspect(path.parent).state == "unverified"
    again, losses = make(tmp_path)
    with pytest.raises(UsageError) as refused:
        protect(again).train()
    text = str(refused.value)
    assert "\n" not in text
    assert f"{tmp_path}/checkpoint-2: " in text
    assert "cannot be loaded (" in text
    assert "its weights" in text if name == "model.safetensors" else name in text
    assert losses.seen == {}


def test_a_card_that_is_full_while_a_checkpoint_is_loaded_is_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    """As on a GPU, whose memory the optimizer's state may not fit beside another process."""
    trainer, _ = make(tmp_path, max_steps=2)
    protect(trainer).train()

    def no_room(checkpoint: str) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    again, losses = make(tmp_path)
    vars(again)[LOAD_OPTIMIZER] = no_room
    with pytest.raises(torch.OutOfMemoryError):
        protect(again).train()
    assert losses.seen == {}


def test_a_damaged_name_of_a_training_is_one_line(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path, max_steps=2)
    trainer.train()
    for path, text in ((tmp_path / RUN_NAME, b"../../\xff"), (tmp_path / "checkpoint-2" / "cogumi-run.json", b"[]")):
        path.write_bytes(text)
        with pytest.raises(UsageError, match=rf"^{path} is damaged.*; remove that file[^\n]*$"):
            protect(make(tmp_path)[0]).train()


def test_an_output_directory_that_is_a_link(tmp_path: Path) -> None:
    """As to a larger disk."""
    (tmp_path / "larger").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "larger")
    protect(make(tmp_path / "run")[0]).train()
    assert checkpoints(tmp_path / "larger") == ["checkpoint-6", "checkpoint-8"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_two_trainings_in_one_directory(tmp_path: Path) -> None:
    def second() -> None:
        with pytest.raises(UsageError, match="another training is writing there"):
            protect(make(tmp_path)[0]).train()
        with pytest.raises(UsageError, match="a training is writing there"):
            prune(tmp_path, keep=2)

    trainer, _ = make(tmp_path, at_step("on_save", 4, second))
    protect(trainer).train()
    assert checkpoints(tmp_path) == ["checkpoint-6", "checkpoint-8"]
