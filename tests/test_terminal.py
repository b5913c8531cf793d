"""A terminal that is lost, or a pipe that breaks, while cogumi trains: on a real pseudo-terminal, with real pipes."""

import json
import logging
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import prepared_process
import psutil
import pytest
import yaml
from processes import processes_with, until
from transformers import TrainerCallback

import cogumi
from cogumi import last_good_checkpoint, protect
from cogumi.checkpoints.interruption import Preemption, exit_on_signals
from cogumi.core.output import print_json, show_waiting, survive_closed_terminal
from cogumi.core.run_directory import START, append_jsonl, is_running, read_json, write_json
from cogumi.methods.preview import Preview, Shares
from cogumi.telemetry.recorder import record_run, set_status

CTRL_C = b"\x03"
# Run in a prepared process, which a shell could only start as one of its own: `trap : INT; cogumi WORDS 2>&1 | tee log`.
TEE = """
import os, runpy, signal, subprocess, sys
from pathlib import Path
signal.signal(signal.SIGINT, lambda *_: None)
tee = subprocess.Popen(["tee", "log"], stdin=subprocess.PIPE)
command = os.fork()
if command:
    tee.stdin.close()
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    tee.wait()
    Path("code").write_text(str(code))
else:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (1, 2):
        os.dup2(tee.stdin.fileno(), stream)
    tee.stdin.close()
    runpy.run_module("cogumi", run_name="__main__")
"""
# `trap '' HUP; exec cogumi WORDS`, whose second step waits until the terminal is closed.
DEAF = """
import runpy, signal, time
from pathlib import Path
from transformers import TrainerCallback
def on_step_begin(self, args, state, control, **_):
    while state.global_step == 1 and not Path("closed").exists():
        time.sleep(0.01)
TrainerCallback.on_step_begin = on_step_begin
signal.signal(signal.SIGHUP, signal.SIG_IGN)
runpy.run_module("cogumi", run_name="__main__")
"""


class Terminal:
    """A command on a terminal of its own, whose session it leads."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self.master, slave = pty.openpty()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
        self.process = subprocess.Popen(
            command, cwd=directory, env=environment, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self.shown = b""
        self.reader = Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        with suppress(OSError):  # EIO: the other end is closed
            while chunk := os.read(self.master, 1 << 16):
                self.shown += chunk

    def ended(self) -> int | None:
        status = self.process.poll()
        return None if status is None else status + 1000  # `until` waits for what is true


@contextmanager
def terminal(command: Sequence[str], directory: Path) -> Iterator[Terminal]:
    result = Terminal(command, directory)
    try:
        yield result
    finally:
        with suppress(ProcessLookupError):
            os.killpg(result.process.pid, signal.SIGKILL)
        result.process.kill()
        result.process.wait()


def by_a_shell(command: str) -> list[str]:
    """The words for it: of `cogumi`, a process that Python itself starts."""
    return ["setsid", "--ctty", "bash", "-c", f'cogumi() {{ {sys.executable} -m cogumi "$@"; }}; {command}']


@pytest.fixture
def home(sft: dict[str, Any], tmp_path: Path) -> Path:
    sft["train"]["save_steps"] = 100_000
    sft["cogumi"] |= {"run_dir": "run", "compile": "off"}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(sft))
    return tmp_path


def stepped(run_dir: Path) -> Callable[[], bool]:
    beat = run_dir / "heartbeat.json"
    return lambda: beat.exists() and json.loads(beat.read_text())["step"] > 0


def test_ctrl_c_that_ends_tee_as_well_saves_and_says_so(home: Path, for_commands: dict[str, str]) -> None:
    words = [*prepared_process.python(for_commands), "-c", TEE, "train", "tiny.yaml", "train.max_steps=100000"]
    with terminal(words, home) as shown:
        until(stepped(home / "run"))
        os.write(shown.master, CTRL_C)
        until((home / "code").exists)
        code = until((home / "code").read_text)
    status = json.loads((home / "run/status.json").read_text())
    assert status["state"] == "stopped", status
    assert "Ctrl-C" in status["reason"]
    assert last_good_checkpoint(home / "run/checkpoints") is not None
    assert code == "130"
    log = (home / "run/run.log").read_text()
    assert log.count("is switched off (Broken pipe)") <= 2
    assert "stopped: asked to by Ctrl-C" in log


def test_a_terminal_that_is_closed_saves_and_says_so(home: Path, for_commands: dict[str, str]) -> None:
    words = [*prepared_process.client(for_commands), "train", "tiny.yaml", "train.max_steps=100000"]
    with terminal(words, home) as shown:
        until(stepped(home / "run"))
        os.close(shown.master)
        assert until(shown.ended) == 1000 + 128 + signal.SIGHUP
    status = json.loads((home / "run/status.json").read_text())
    assert status["state"] == "stopped", status
    assert "SIGHUP" in status["reason"]
    assert last_good_checkpoint(home / "run/checkpoints") is not None


def test_under_nohup_a_closed_terminal_ends_nothing(home: Path, for_commands: dict[str, str]) -> None:
    # Its output stays on the terminal: that of nohup itself would go to a file.
    words = [*prepared_process.python(for_commands), "-c", DEAF, "train", "tiny.yaml", "train.max_steps=4"]
    with terminal(words, home) as shown:
        until(stepped(home / "run"))
        os.close(shown.master)
        (home / "closed").touch()
        assert until(shown.ended) == 1000
    status = json.loads((home / "run/status.json").read_text())
    assert status["state"] == "finished", status
    assert "(Input/output error), and the work continues" in (home / "run/run.log").read_text()


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_screen_that_breaks_ends_no_training_of_protect(
    kind: str, make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    class Break(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                os.close(far)

    trainer = protect(make_trainer(max_steps=4, save_strategy="steps", save_steps=4))
    trainer.callback_handler.callbacks.insert(0, Break())
    far, near = os.pipe() if kind == "pipe" else pty.openpty()
    with open(near, "w", buffering=1) as out, open(os.dup(near), "w", buffering=1) as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        trainer.train()
        assert "write" not in vars(out)
        print("and what follows can be said")
    monkeypatch.undo()
    assert trainer.state.global_step == 4
    assert last_good_checkpoint(tmp_path / "trainer") is not None
    told = {record.message.split()[0] for record in caplog.records if "switched off" in record.message}
    assert told == {"sys.stdout", "sys.stderr"}


def test_what_is_in_the_buffer_of_a_broken_stream_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = os.pipe()
    with open(near, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with survive_closed_terminal(), survive_closed_terminal():
            print("kept in the buffer")
            os.close(far)
        assert not {"write", "flush"} & vars(out).keys()


def test_a_signal_whose_exit_a_library_swallowed_ends_the_training_before_its_first_step() -> None:
    """The pickling of dill, by which datasets names what it caches, goes on after any exception."""
    with exit_on_signals():
        with suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended, Preemption().listening():
            pytest.fail("it trains")
    assert ended.value.code == 128 + signal.SIGTERM
    with Preemption().listening():
        pass  # the next run of this process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_outside_the_training_is_written_into_the_status(number: int, tmp_path: Path) -> None:
    def download() -> None:
        with exit_on_signals(), record_run(tmp_path):
            set_status(tmp_path, "running", stage="download")
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as ended:
        download()
    assert ended.value.code == 128 + number
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "stopped"
    assert signal.Signals(number).name in status["reason"]
    assert "stage: download" in status["reason"]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_ctrl_c_during_a_start_cancels_it(home: Path, none_left_behind: None) -> None:
    words = "trap : INT; cogumi start tiny.yaml train.max_steps=100000; echo $? > code"
    with terminal(by_a_shell(words), home) as shown:
        until((home / "run" / START).exists)
        trainer = until(lambda: read_json(home / "run" / START))
        os.write(shown.master, CTRL_C)
        until((home / "code").exists)
        code = until((home / "code").read_text)
    assert code == "130\n"
    assert not is_running(trainer)
    assert b"the start is cancelled" in shown.shown


def test_an_interrupted_start_ends_its_processes_and_keeps_the_run(
    sft: dict[str, Any],
    tmp_path: Path,
    none_left_behind: None,
    for_commands: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_dir = tmp_path / "run"
    sft["cogumi"]["compile"] = "off"

    monkeypatch.setenv("MARK", str(run_dir))

    def interrupted(when: Callable[[], Any]) -> str:
        """A start that is interrupted then, as a cell is; what it says."""
        caplog.clear()
        main = threading.main_thread().ident

        def interrupt() -> None:
            until(when)
            signal.pthread_kill(main, signal.SIGINT)

        Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            cogumi.start(sft, train__max_steps=100_000)
        assert not started()
        return caplog.text

    def started() -> list[psutil.Process]:
        """The launcher, the supervisor and the trainer: none is missed, for the trainer stays."""
        return processes_with("MARK", run_dir)

    assert "the start is cancelled" in interrupted(started)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", prepared_process.as_program(tmp_path / "python", for_commands))
        stopped = cogumi.start(sft, train__max_steps=100_000).stop()
    assert stopped.state == "stopped"
    before = (run_dir / "status.json").read_bytes()
    assert "the start is cancelled" in interrupted(lambda: (run_dir / "status.json").read_bytes() != before)
    left = cogumi.attach(run_dir).status()
    assert (left.state, left.alive) == ("stopped", False)  # and it can be resumed


# ------------------------------------------------------------------------------------------------ what others wrote

EVIL = "\x1b[31mred\x1b]0;title\x07 [bold]loud[/bold] \x9b2J \u202edesrever\u2066 \rback\tafter"
SHOWN = r"\x1b[31mred\x1b]0;title\x07 [bold]loud[/bold] \x9b2J \u202edesrever\u2066"
BIDI = "\u202a-\u202e\u2066-\u2069"


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A directory with a finished run in which everything that others may write holds control characters and markup."""
    run_dir = tmp_path / "runs" / "evil\x1b[31m"
    run_dir.mkdir(parents=True)
    write_json(run_dir / "status.json", {"state": "failed", "time": 1.0, "reason": f"ValueError: {EVIL}"})
    write_json(run_dir / "flags.json", {"flags": [{"name": "n", "level": "red", "evidence": EVIL, "knob": EVIL}]})
    append_jsonl(run_dir / "metrics.jsonl", {"step": 1, "time": 1.0, "loss": 1.0, f"rewards/{EVIL}/mean": 1.0})
    row = {"step": 1, "prompt": EVIL, "completion": EVIL, "reward": 1.0}
    append_jsonl(run_dir / "samples.jsonl", row)
    (run_dir / "run.log").write_text(f"{EVIL}\n", encoding="utf-8")
    (tmp_path / "traceback.txt").write_text(f"ValueError: {EVIL.replace(chr(13), '')}\n", encoding="utf-8")
    return run_dir


@pytest.mark.parametrize(
    "words",
    [
        ["status"], ["status", "RUN"], ["status", "RUN", "--watch"], ["logs", "RUN"], ["attach", "RUN"],
        ["doctor", "--explain", "traceback.txt"], ["start", f"{EVIL}.yaml"],
    ],
)  # fmt: skip
def test_escapes_in_what_others_wrote_are_shown_and_not_obeyed(evil: Path, words: list[str], tmp_path: Path) -> None:
    command = shlex.join(["cogumi", *(str(evil.relative_to(tmp_path)) if w == "RUN" else w for w in words)])
    with terminal(by_a_shell(f"stty columns 200; {command}; touch done"), tmp_path) as shown:
        until((tmp_path / "done").exists)
    drawn = re.sub(r"\x1b\[\??[0-9;]*[mhlKAG]", "", shown.shown.decode())  # of rich: colours, the cursor
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f" + BIDI + "]", drawn), drawn
    assert (r"\x9b2J" if "doctor" in words else r"\x1b[31m") in drawn, drawn  # which takes colours out
    assert "[bold]" in drawn or words == ["status"], drawn


def test_a_preview_on_a_terminal_obeys_nothing_in_the_data() -> None:
    shares = Shares(EVIL, 1, 1, {EVIL: 1}, 0, 0, 1, 1)
    actual = Preview(shares, None, (EVIL,), (), ((("learned", EVIL), ("context", EVIL + "\\")),))
    assert "\x1b[31m" not in str(actual)
    assert not re.search("[\x07\x9b\r]|\x1b\\]", str(actual))
    assert str(actual).count(SHOWN) == 5


def test_escapes_in_a_line_of_log_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record_run(tmp_path):
        logging.getLogger("cogumi").info("completion: %s", EVIL)
    assert SHOWN in (tmp_path / "run.log").read_text()


def test_beside_a_progress_bar_each_line_of_log_is_printed_once(tmp_path: Path, for_commands: dict[str, str]) -> None:
    """As a training does it, in a process whose root logger has no handler."""
    code = """
import logging
from pathlib import Path
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from cogumi.telemetry.recorder import record_run, terminal_loggers
with record_run(Path()), logging_redirect_tqdm(terminal_loggers()), tqdm(total=2):
    logging.getLogger("cogumi").info("a line of log")
"""
    words = [*prepared_process.python(for_commands), "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("a line of log") == 1


def test_an_uncaught_exception_is_shown_with_its_escapes_visible(tmp_path: Path) -> None:
    code = f"""
import typer
from cogumi.cli.app import run_command
app = typer.Typer(pretty_exceptions_enable=False)
@app.command()
def fail() -> None:
    try:
        raise KeyError({EVIL!r})
    except KeyError as error:
        error.add_note({EVIL!r})
        raise RuntimeError({EVIL!r}) from error
run_command(app)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, cwd=tmp_path)
    said = done.stderr.decode()
    assert done.returncode == 1
    assert f"RuntimeError: {SHOWN}" in said
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f" + BIDI + "]", said), said


def test_a_character_that_standard_output_lacks_is_escaped() -> None:
    code = "import typer; from cogumi.core.output import print_text, run_command; app = typer.Typer(); "
    code += "app.command()(lambda: print_text('ü')); run_command(app)"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "\\xfc\n"), done.stderr


def test_json_stays_json_and_holds_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"é": EVIL, "path": "caf\udce9"})
    written = capsys.readouterr().out
    assert json.loads(written) == {"é": EVIL, "path": "caf\udce9"}
    assert "é" in written
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f" + BIDI + "]", written)


# ------------------------------------------------------------------------------------------------ what takes its time


OTHERS = ["doctor", "preflight tiny.yaml", "preview tiny.yaml"]
IMPORTS = pytest.mark.slow("imports torch; `train` is in the first tier")


@pytest.mark.parametrize(
    "words", ["start tiny.yaml", "train tiny.yaml", *(pytest.param(words, marks=IMPORTS) for words in OTHERS)]
)
def test_no_command_imports_in_silence(words: str, home: Path, none_left_behind: None) -> None:
    says_what_it_does(by_a_shell(f"cogumi {words}"), home)


@pytest.mark.parametrize("words", OTHERS)
def test_no_command_works_in_silence(words: str, home: Path, for_commands: dict[str, str]) -> None:
    says_what_it_does([*prepared_process.client(for_commands), *words.split()], home)


def says_what_it_does(words: list[str], directory: Path) -> None:
    with terminal(words, directory) as shown:
        until(lambda: re.search(rb"\w \.\.\.\r\n", shown.shown))
        os.write(shown.master, CTRL_C)
        until(shown.ended)


def test_elsewhere_than_on_a_terminal_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with show_waiting("counting"):
        print("said")
    assert capsys.readouterr() == ("said\n", "")
