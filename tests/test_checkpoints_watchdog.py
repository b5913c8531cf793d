"""The watchdog on real trainers that really hang, in Python and in a DataLoader's worker, and on some that only wait."""

import fcntl
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from processes import until
from test_checkpoints_protect import make as make_trainer
from torch.utils.data import Dataset
from transformers import TrainerCallback

import cogumi
from cogumi.checkpoints import interruption as module
from cogumi.checkpoints.callbacks import Pulse
from cogumi.checkpoints.interruption import ENOUGH_STEPS, FIRST_TIMES_FLOOR, Watchdog
from cogumi.checkpoints.verify import inspect
from cogumi.core.errors import UsageError

DEADLINE = 120  # what a broken watchdog costs a test, in seconds; nothing waits for it otherwise


class Rows(Dataset):  # type: ignore[type-arg]
    """Fixed rows; before the n-th one of a process, `hang` is called."""

    def __init__(self, hang: Callable[[], object] | None = None, before: int = 0) -> None:
        self.hang, self.before, self.given = hang, before, 0

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        self.given += 1
        if self.hang is not None and self.given == self.before:
            self.hang()
        return {"input_ids": [(index + j) % 64 for j in range(8)], "labels": [j % 64 for j in range(8)]}


class Hang(TrainerCallback):
    """Calls `hang` after the first step at which the watchdog has its median, and ends the training `more` steps later."""

    def __init__(self, watchdog: Watchdog, hang: Callable[[], object], more: int = 0) -> None:
        self.watchdog, self.hang, self.more = watchdog, hang, more
        self.hung_after: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.hung_after is None and self.watchdog.armed:
            self.hung_after = state.global_step
            self.hang()
        if self.hung_after is not None and state.global_step >= self.hung_after + self.more:
            control.should_training_stop = True


def make(output_dir: Path, *callbacks: TrainerCallback, data: Any = None, **options: Any) -> Any:
    settings = {"max_steps": 1000, "save_strategy": "no", "per_device_train_batch_size": 1, "logging_steps": 500}
    return make_trainer(output_dir, *callbacks, data=data or Rows(), **settings | options)[0]


def train(watchdog: Watchdog, output_dir: Path, *callbacks: TrainerCallback, **options: Any) -> Any:
    trainer = make(output_dir, Pulse(watchdog), *callbacks, **options)
    with watchdog.watching():
        trainer.train()
    return trainer


def wait_for(text: str, path: Path, times: int = 1) -> None:
    until(lambda: path.read_text().count(text) >= times)


@pytest.fixture
def run_log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text("what was there before\n")
    return path


# --------------------------------------------------------------------------------------------------------- what is noticed


def test_a_hang_in_python_is_written_with_its_stacks(
    run_log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def waits_for_an_event() -> None:
        wait_for(" the training hangs: ", run_log)

    watchdog = Watchdog(run_log, "continue", floor=0.5)
    hang = Hang(watchdog, waits_for_an_event)
    train(watchdog, tmp_path, hang)
    text = run_log.read_text()
    assert text.startswith("what was there before\n")
    assert re.search(rf"no sign of life after step {hang.hung_after} for more than [\d.]+ s; its stacks:\n", text)
    assert "in waits_for_an_event" in text
    assert "in _inner_training_loop" in text
    (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR and r.name == module.__name__]
    assert f"after step {hang.hung_after}" in message
    assert str(run_log) in message


def test_a_hang_in_a_worker_is_written_where_the_training_waits_for_it(run_log: Path, tmp_path: Path) -> None:
    watchdog = Watchdog(run_log, "continue", floor=0.5)
    data = Rows(lambda: wait_for("the training hangs", run_log), before=20)
    train(watchdog, tmp_path, data=data, dataloader_num_workers=1, max_steps=25)
    assert "torch/utils/data/dataloader.py" in run_log.read_text()


def test_it_is_said_once_a_silence(run_log: Path, caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watchdog(run_log, "continue", floor=0.2)
    with watchdog.watching():
        begin(watchdog)
        limit = watchdog.limit
        wait_for("the training hangs", run_log)
        time.sleep(2 * limit)
        watchdog.alive()
        until(lambda: "continues" in caplog.text)
        assert run_log.read_text().count("the training hangs") == 1
        assert watchdog.limit > 3 * 2 * limit  # what went on by itself after that long is no hang the next time
        wait_for("the training hangs", run_log, 2)


def begin(watchdog: Watchdog) -> None:
    """As many steps as it takes for a median, without a trainer."""
    step, began = 0, time.monotonic()
    while not watchdog.armed:
        assert time.monotonic() - began < DEADLINE
        watchdog.note_step(step := step + 1)
        time.sleep(0.001)


def test_before_the_first_steps_a_silence_is_said_and_nothing_is_stopped(run_log: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        watchdog = Watchdog(run_log, "stop", floor=0.1)
        with watchdog.watching():
            assert watchdog.limit == pytest.approx(0.1 * FIRST_TIMES_FLOOR)
            wait_for("the training hangs", run_log)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "before the first step was done" in run_log.read_text()
    assert received == []


def test_stacks_go_to_standard_error_when_the_disk_is_full(capfd: pytest.CaptureFixture[str]) -> None:
    watchdog = Watchdog("/dev/full", "continue", floor=0.1)

    def stands_still() -> str:
        began, text = time.monotonic(), ""
        while "in stands_still" not in text and time.monotonic() - began < DEADLINE:
            time.sleep(0.01)
            text += capfd.readouterr().err
        return text

    with watchdog.watching():
        text = stands_still()
    assert "the training hangs" in text
    assert "in stands_still" in text


# ------------------------------------------------------------------------------------------------------ what is no hang


def test_a_long_evaluation_is_none(run_log: Path, tmp_path: Path) -> None:
    class Slow(TrainerCallback):
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            time.sleep(0.3)

    watchdog = Watchdog(run_log, "continue", floor=1.5)
    evaluation = {"eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 1}
    train(watchdog, tmp_path, Slow(), max_steps=5, **evaluation)
    assert run_log.read_text() == "what was there before\n"


def test_an_excused_wait_is_none_and_what_follows_is_watched(run_log: Path) -> None:
    watchdog = Watchdog(run_log, "continue", floor=0.3)
    with watchdog.watching():
        begin(watchdog)
        limit = watchdog.limit
        with watchdog.excused(), watchdog.excused():
            time.sleep(3 * limit)
        watchdog.note_step(1)
        assert run_log.read_text() == "what was there before\n"
        wait_for("the training hangs", run_log)
        assert watchdog.longest < 3 * limit  # the wait is no measure either


def test_steps_that_take_long_raise_the_limit(run_log: Path) -> None:
    """As GRPO: every fourth step generates."""
    watchdog = Watchdog(run_log, "continue", floor=0.1)
    watchdog.steps.extend([0.5] * ENOUGH_STEPS + [50.0])
    assert watchdog.limit == 10.0
    watchdog.longest = 6.0
    assert watchdog.limit == 18.0


# ----------------------------------------------------------------------------------------- processes that are to end, or not


Case = tuple[Any, Connection, Path]  # a process, what it says, its directory


@pytest.fixture(scope="module", autouse=True)
def server() -> Any:
    """Begins to import, beside the first tests, what the processes that it will fork need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cogumi.checkpoints", "transformers.models.llama.modeling_llama", "peft", "trl"])
    forkserver.ensure_running()
    return context


@pytest.fixture(scope="module")
def cases(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    """Processes that are to end by themselves, at the same time."""
    started = {}
    for function in hangs_for_good, wakes_at_a_signal, hangs_and_cannot_say:
        directory = tmp_path_factory.mktemp(function.__name__)
        if function is hangs_and_cannot_say:
            clog(directory / "run.log")
        started[function.__name__] = (*start(server, function, directory), directory)
    yield started
    for process, _, _ in started.values():
        put_away(process)


def start(server: Any, function: Callable[[Connection, Path], None], directory: Path) -> tuple[Any, Connection]:
    ours, theirs = server.Pipe()
    process = server.Process(target=function, args=(theirs, directory))
    process.start()
    theirs.close()
    return process, ours


def put_away(process: Any) -> None:
    if process.exitcode is None:
        process.kill()
    process.join()


def protected(connection: Connection, directory: Path, hang: Callable[[], object], more: int = 0) -> None:
    """Train under `protect`, with a watch that stops after half a second."""
    trainer = make(directory / "run", save_strategy="steps", save_steps=2, max_steps=10_000)
    watchdog = cogumi.protect(trainer).cogumi_protection.watchdog
    watchdog.log_path, watchdog.policy, watchdog.floor = directory / "run.log", "stop", 0.5
    callback = Hang(watchdog, hang, more)
    trainer.add_callback(callback)
    try:
        trainer.train()
    finally:
        connection.send(callback.hung_after)


def hangs_for_good(connection: Connection, directory: Path) -> None:
    reading, _ = os.pipe()

    def never_comes_back() -> None:
        connection.send("hangs")
        os.read(reading, 1)

    logging.basicConfig(filename=directory / "logged", level=logging.INFO)
    protected(connection, directory, never_comes_back)


def test_what_nothing_wakes_ends_with_143_and_whole_checkpoints(cases: dict[str, Case]) -> None:
    process, connection, directory = cases["hangs_for_good"]
    assert connection.recv() == "hangs"
    process.join(DEADLINE)
    assert process.exitcode == 143
    stacks, logged = (directory / "run.log").read_text(), (directory / "logged").read_text()
    assert "in never_comes_back" in stacks
    assert logged.count("ends it at once, without saving") == 1
    assert logged.index("it is asked to end") < logged.index("exit status 143")
    point = cogumi.last_good_checkpoint(directory / "run")
    assert point is not None
    assert inspect(point).state == "verified"


def wakes_at_a_signal(connection: Connection, directory: Path) -> None:
    protected(connection, directory, signal.pause, more=1000)


def test_what_a_signal_wakes_is_saved_and_ends_with_143(cases: dict[str, Case]) -> None:
    process, connection, directory = cases["wakes_at_a_signal"]
    reached = directory / "run" / f"checkpoint-{connection.recv()}"  # the step that was finished when it hung
    process.join(DEADLINE)
    assert process.exitcode == 143
    assert inspect(reached).state == "verified"
    assert cogumi.last_good_checkpoint(directory / "run") == reached


def hangs_and_cannot_say(connection: Connection, directory: Path) -> None:
    module.WRITING_SECONDS = 0.1
    signal.signal(signal.SIGTERM, lambda number, frame: connection.send("asked"))
    logging.getLogger().addHandler(logging.FileHandler(directory / "run.log"))
    watchdog = Watchdog(directory / "run.log", "stop", floor=0.3)
    with watchdog.watching():
        begin(watchdog)
        connection.send("hangs")
        threading.Event().wait()


def clog(path: Path) -> None:
    """Make a file that can be opened, and keeps whoever writes to it."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    assert os.write(pipe, b"x" * size) == size


def test_a_log_that_hangs_itself_does_not_keep_the_process(cases: dict[str, Case]) -> None:
    # As a network volume that no longer answers, and on which both the checkpoints and the log are.
    process, connection, _ = cases["hangs_and_cannot_say"]
    assert [connection.recv(), connection.recv()] == ["hangs", "asked"]
    process.join(DEADLINE)
    assert process.exitcode == 143


def waits_while_stopped(connection: Connection, directory: Path) -> None:
    def asks() -> None:
        connection.send(watchdog.limit)
        assert connection.recv() == "go on"

    logging.basicConfig(filename=directory / "logged", level=logging.INFO)
    watchdog = Watchdog(directory / "run.log", "stop", floor=2.0)
    train(watchdog, directory, Hang(watchdog, asks, more=3))
    connection.send(watchdog.longest)


def test_a_process_that_is_stopped_and_continued_does_not_hang(server: Any, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("what was there before\n")
    process, connection = start(server, waits_while_stopped, tmp_path)
    limit = connection.recv()
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2 * limit)  # the fault itself, not a wait for something
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)  # for the watch to look, which it does each tenth of a second
    logged = tmp_path / "logged"
    connection.send("go on")
    longest = connection.recv()
    process.join(DEADLINE)
    assert process.exitcode == 0
    assert longest < 2 * limit
    assert "the training hangs" not in logged.read_text() + (tmp_path / "run.log").read_text()


# ------------------------------------------------------------------------------------------------------- what it leaves behind


def watchers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_is_gone_afterwards(fails: bool, run_log: Path, tmp_path: Path) -> None:
    def looks() -> None:
        assert watchers() == ["cogumi-watchdog"]
        if fails:
            raise RuntimeError("the machine is gone")

    watchdog = Watchdog(run_log, "continue", floor=5.0)
    with pytest.raises(RuntimeError, match="gone") if fails else nullcontext():
        train(watchdog, tmp_path, Hang(watchdog, looks))
    assert watchers() == []
    assert run_log.read_text() == "what was there before\n"


def test_a_policy_that_is_none_is_refused(run_log: Path) -> None:
    assert Pulse.on_save is TrainerCallback.on_save, "or each save would wait for the disk"
    with pytest.raises(UsageError, match="'pause'"):
        Watchdog(run_log, "pause")
