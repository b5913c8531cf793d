"""The monitor: levels, rate and faults on real disks of a few MB, alone and in a real Trainer."""

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import prepared_process
import pytest
from disk_mounts import Mount, fill
from processes import until
from test_checkpoints_protect import at_step
from test_checkpoints_protect import make as make_protected
from transformers import Trainer, TrainerCallback

import cogumi
from cogumi.core.errors import UsageError
from cogumi.disk.monitor import Sample

MB = 1 << 20


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cogumi-disk-monitor"]


# --------------------------------------------------------------------------------------------------------- levels, alone


def test_levels_change_where_the_thresholds_are(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    disk = mount()
    seen: list[Sample] = []
    monitor = cogumi.DiskMonitor(disk, on_change=seen.append)
    expected = {0.0: "green", 0.59: "green", 0.6: "yellow", 0.79: "yellow", 0.8: "red", 1.0: "red", 0.7: "yellow"}
    with caplog.at_level(logging.INFO, "cogumi"):
        for share, level in expected.items():
            fill(disk, share + 0.0005)
            sample = monitor.sample()
            assert (sample.level, monitor.level, monitor.latest) == (level, level, sample)
            assert sample.used_share == pytest.approx(share, abs=0.001)
            assert (sample.total, sample.free) == (8 * MB, 8 * MB - (sample.used or 0))
            assert sample.used == pytest.approx(share * 8 * MB, abs=3 * 4096)
        (disk / "filler").unlink()
        assert monitor.sample().level == "green"
    assert [sample.level for sample in seen] == ["yellow", "red", "yellow", "green"]
    messages = [record.getMessage().split(",")[0] for record in caplog.records]
    assert messages == [
        f"disk {disk} is yellow: 60 % of 8.4 MB used",
        f"disk {disk} is red: 80 % of 8.4 MB used",
        f"disk {disk} is yellow: 70 % of 8.4 MB used",
        f"disk {disk} is green: 0 % of 8.4 MB used",
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3 + ["INFO"]
    assert list(disk.iterdir()) == []
    assert not watching()


def test_thresholds_are_the_callers(mount: Mount) -> None:
    disk = mount()
    fill(disk, 0.3)
    assert cogumi.DiskMonitor(disk, warn=0.2, alarm=0.25).sample().level == "red"
    assert cogumi.DiskMonitor(disk, warn=0.2, alarm=1.0).sample().level == "yellow"
    assert cogumi.DiskMonitor(str(disk), warn=0.5).sample().level == "green"


def test_inodes_fill_a_disk_too(mount: Mount) -> None:
    disk = mount("tmpfs", "size=8m,nr_inodes=100")
    monitor = cogumi.DiskMonitor(disk)
    for number in range(59):
        (disk / str(number)).touch()
    sample = monitor.sample()
    assert sample.level == "yellow"
    assert sample.reason.startswith("60 % of 100 inodes used, 40 free; 0 % of 8.4 MB used")
    for number in range(59, 99):
        (disk / str(number)).touch()
    sample = monitor.sample()
    assert (sample.level, sample.inodes_free, sample.inodes_share) == ("red", 0, 1.0)
    with pytest.raises(OSError, match="No space left"):
        (disk / "one more").touch()


# ----------------------------------------------------------------------------------------------------------- the thread


def test_the_thread_raises_the_flag_and_ends_with_the_block(mount: Mount) -> None:
    disk = mount()
    seen: list[Sample] = []
    with cogumi.DiskMonitor(disk, interval=0.01, on_change=seen.append) as monitor:
        assert len(watching()) == 1
        fill(disk, 0.7)
        until(lambda: monitor.level == "yellow")
        fill(disk, 0.9)
        until(lambda: monitor.level == "red")
    assert not watching()
    assert [sample.level for sample in seen][-1] == "red"
    latest = monitor.latest
    time.sleep(0.05)
    assert monitor.latest is latest
    with monitor:  # and again
        assert len(watching()) == 1
        with pytest.raises(RuntimeError, match="already"):
            monitor.start()
    assert not watching()
    monitor.stop()


def test_the_thread_ends_where_the_block_raises(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), cogumi.DiskMonitor(tmp_path, interval=0.01):
        _ = 1 / 0
    assert not watching()


def test_the_thread_keeps_no_process_alive(tmp_path: Path) -> None:
    # The limits, as this machine's disk may be fuller than the default ones.
    program = "import cogumi; cogumi.DiskMonitor(interval=600, warn=0.99, alarm=0.999).start(); print('end')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_stopping_from_the_callback(mount: Mount) -> None:
    disk = mount()
    monitor = cogumi.DiskMonitor(disk, interval=0.01, on_change=lambda sample: monitor.stop())
    monitor.start()
    fill(disk, 0.9)
    until(lambda: not watching())
    assert monitor.level == "red"


def test_a_mistake_in_the_callback_is_said_once(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    disk = mount()

    def mistaken(sample: Sample) -> None:
        raise KeyError("my mistake")

    monitor = cogumi.DiskMonitor(disk, on_change=mistaken)
    for share, level in ((0.7, "yellow"), (0.9, "red")):
        fill(disk, share)
        assert monitor.sample().level == level
    (message,) = [record for record in caplog.records if "on_change failed" in record.getMessage()]
    assert message.exc_info is not None
    assert "my mistake" in caplog.text


def test_samples_as_lines_of_json_on_the_disk_that_fills(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    disk = mount()
    monitor = cogumi.DiskMonitor(disk, log_path=disk / "disk.jsonl")
    fill(disk, 1.0)
    assert [monitor.sample().level for _ in range(3)] == ["red"] * 3
    assert caplog.text.count("cannot write") == 1
    (disk / "filler").unlink()
    assert monitor.sample().level == "green"
    fill(disk, 0.7)
    sample = monitor.sample()
    rows = [json.loads(line) for line in (disk / "disk.jsonl").read_text().splitlines()]
    assert [row["level"] for row in rows] == ["green", "yellow"]
    assert rows[-1]["free"] == sample.free
    assert rows[0]["time"] == pytest.approx(time.time(), abs=60)
    assert {"path", "reason", "total", "used", "used_share"} < set(rows[0])


# --------------------------------------------------------------------------------------------------------------- faults


def test_a_disk_that_goes_away_is_said_once(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    disk = mount()
    seen: list[str] = []
    monitor = cogumi.DiskMonitor(disk, on_change=lambda sample: seen.append(sample.level))
    monitor.sample()
    subprocess.run(["umount", str(disk)], check=True)
    for _ in range(3):  # what is there now is not mistaken for it
        assert monitor.sample().total != 8 * MB
    assert caplog.text.count("is on another filesystem now than when the watch began") == 1
    disk.rmdir()
    seen.clear()
    for _ in range(3):
        sample = monitor.sample()
        assert (sample.level, sample.free) == ("unknown", None)
        assert sample.reason == "does not answer: No such file or directory"
    assert caplog.text.count("does not answer") == 1
    disk.mkdir()
    assert monitor.sample().level in ("green", "yellow", "red")
    assert seen[0] == "unknown"


def test_a_disk_that_turns_read_only_is_red(mount: Mount) -> None:
    disk = mount()
    monitor = cogumi.DiskMonitor(disk)
    assert monitor.sample().level == "green"
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    sample = monitor.sample()
    assert sample.level == "red"
    assert "read-only" in sample.reason


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"warn": 0.9}, "warn=0.9, alarm=0.8"),
        ({"warn": 60, "alarm": 80}, "warn=60, alarm=80: shares of the disk"),
        ({"warn": 0}, "warn=0"),
        ({"alarm": float("nan")}, "warn=0.6, alarm=nan"),
        ({"interval": 0}, "interval=0"),
        ({"interval": float("inf")}, "interval=inf"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, float], says: str, tmp_path: Path) -> None:
    for make in (lambda: cogumi.DiskMonitor(tmp_path, **settings), lambda: cogumi.DiskMonitorCallback(**settings)):
        with pytest.raises(UsageError, match="^" + says.replace("(", r"\(")) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("gone", "file/below"):
        with pytest.raises(UsageError, match="does not exist"):
            cogumi.DiskMonitor(tmp_path / path)


# -------------------------------------------------------------------------------------------------- in a user's trainer


class Reporter(TrainerCallback):
    """As wandb's: brought in before the user's callbacks, and reads the logs when they are logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append(dict(logs))


def make_trainer(output_dir: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    return make_protected(output_dir, *callbacks, **{"max_steps": 6, "save_strategy": "no"} | settings)[0]  # type: ignore[no-any-return]


def test_the_callback_in_a_trainer(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    disk = mount("tmpfs", "size=100m")
    reporter, seen = Reporter(), []
    watch = cogumi.DiskMonitorCallback(interval=1e-6, on_change=lambda sample: seen.append(sample.level))
    fills = at_step("on_step_begin", 2, lambda: fill(disk, 0.7)), at_step("on_step_begin", 4, lambda: fill(disk, 0.9))
    trainer = make_trainer(disk / "out", reporter, watch, *fills)
    with caplog.at_level(logging.INFO, "cogumi"):
        result = trainer.train()
    assert trainer.state.global_step == 6
    assert seen == ["yellow", "red"]
    steps = [row for row in reporter.rows if "loss" in row]
    assert [row["disk/used_percent"] for row in steps] == pytest.approx([0, 0, 70, 70, 90, 90], abs=0.1)
    assert [row["disk/free_gb"] for row in steps] == pytest.approx(
        [0.105, 0.105, 0.031, 0.031, 0.010, 0.010], abs=0.001
    )
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("cogumi")]
    assert messages[0] == (
        f"disk: watching {disk / 'out'} (tmpfs at {disk}: 0 % used, 105 MB free); yellow from 60 %, red from 80 %, "
        "at most every 1e-06 s, between steps"
    )
    assert [line.split(":")[0] for line in messages[1:]] == [
        f"disk {disk / 'out'} is yellow",
        f"disk {disk / 'out'} is red",
    ]
    # What train() and evaluate() return is the training's, and so is the state that is saved.
    assert not [name for name in [*result.metrics, *trainer.evaluate()] if name.startswith("disk/")]
    assert not [name for row in trainer.state.log_history for name in row if name.startswith("disk/")]


def test_two_in_one_trainer_do_not_hide_each_other(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    small, large = mount("tmpfs", "size=10m"), mount("tmpfs", "size=100m")
    fill(small, 0.7)
    fill(large, 0.9)
    reporter, seen = Reporter(), []
    on_output = cogumi.DiskMonitorCallback(on_change=lambda sample: seen.append(("output", sample.level)))
    on_data = cogumi.DiskMonitorCallback(small, on_change=lambda sample: seen.append(("data", sample.level)))
    again = cogumi.DiskMonitorCallback(large / "out", warn=0.5, alarm=0.95)
    (large / "out").mkdir()
    trainer = make_trainer(large / "out", reporter, on_output, on_data, again, max_steps=2)
    for _ in range(2):  # the order in which they are called is another one the second time
        reporter.rows.clear()
        trainer.train()
        rows = [row for row in reporter.rows if "loss" in row]
        assert len(rows) == 2
        for row in rows:
            percents = {name: value for name, value in row.items() if name.endswith("used_percent")}
            at_small = f"disk/{str(small).strip('/')}/used_percent"
            assert percents == {"disk/used_percent": pytest.approx(90, abs=0.1), at_small: pytest.approx(70, abs=0.1)}
    assert sorted(seen) == [("data", "yellow")] * 2 + [("output", "red")] * 2
    assert f"disk {small} is yellow" in caplog.text
    assert f"disk {large / 'out'} is red" in caplog.text


def test_every_callback_is_called_once_an_event_also_with_the_watch_among_them(tmp_path: Path) -> None:
    calls: list[str] = []

    def named(name: str) -> TrainerCallback:
        class Named(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                calls.append(name)

        return Named()

    watch = cogumi.DiskMonitorCallback()
    trainer = make_trainer(tmp_path, named("first"), named("second"), watch, named("third"), max_steps=1)
    trainer.train()
    assert calls == ["first", "second", "third"]
    assert trainer.callback_handler.callbacks[0] is watch
    trainer.train()
    assert calls == ["first", "second", "third"] * 2


def test_training_goes_on_where_the_disk_does_not_answer(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    disk = mount()

    def take_away() -> None:
        subprocess.run(["umount", str(disk)], check=True)
        disk.rmdir()

    reporter = Reporter()
    watch = cogumi.DiskMonitorCallback(disk, interval=1e-6)
    trainer = make_trainer(disk.parent / "out", reporter, watch, at_step("on_step_begin", 3, take_away))
    trainer.train()
    assert trainer.state.global_step == 6
    assert watch.monitor is not None
    assert watch.monitor.level == "unknown"
    assert caplog.text.count("does not answer") == 1
    name = f"disk/{str(disk).strip('/')}/free_gb"
    assert [name in row for row in reporter.rows if "loss" in row] == [True] * 3 + [False] * 3


def test_an_interval_is_kept_between_looks(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, cogumi.DiskMonitorCallback(interval=600, log_path=tmp_path / "disk.jsonl"))
    trainer.train()
    assert len((tmp_path / "disk.jsonl").read_text().splitlines()) == 1


def test_a_path_that_the_user_mistyped_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, cogumi.DiskMonitorCallback(tmp_path / "gone"))
    with pytest.raises(UsageError, match="does not exist"):
        trainer.train()


SCRIPT = """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import cogumi

rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained(MODEL),
    TrainingArguments("out", max_steps=2, logging_steps=1, report_to="none", use_cpu=True),
    train_dataset=rows,
    callbacks=[cogumi.DiskMonitorCallback()],
)
trainer.train()
"""


def test_a_users_script_without_logging(tiny_model: Path, tmp_path: Path, for_commands: dict[str, str]) -> None:
    words = [*prepared_process.python(for_commands), "-c", SCRIPT.replace("MODEL", repr(str(tiny_model)))]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=for_commands)
    assert done.returncode == 0, done.stderr
    assert f"disk: watching {tmp_path / 'out'} (" in done.stderr
    assert "disk/used_percent" in done.stdout
    assert "disk/free_gb" in done.stdout
