"""A command that is forked from a prepared process ends, says and is ended as one that Python starts."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import prepared_process
import psutil
import pytest
from processes import until

TALK = """
import os, sys, tempfile
print(sys.argv[1:], os.getcwd(), os.environ["MINE"], tempfile.gettempdir(), sys.stdin.read())
print("aside", file=sys.stderr)
"""
SLEEP = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(100)"


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "code",
    [
        TALK,
        "import sys; sys.exit(3)",
        "import sys; sys.exit('said last')",
        "import os; os.kill(os.getpid(), 15)",
        "import os; os.kill(os.getpid(), 9)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
        "import atexit; atexit.register(print, 'at the end')",
        "import os; os.close(1); os._exit(7)",
    ],
)
def test_it_says_and_ends_as_python_does(code: str, environment: dict[str, str], tmp_path: Path) -> None:
    environment = {**environment, "MINE": "é", "TMPDIR": str(tmp_path)}
    said = [
        subprocess.run([*words, "-c", code, "a b", ""], cwd=tmp_path, env=environment, input="put in", text=True,
                       capture_output=True, timeout=60)
        for words in ([sys.executable], prepared_process.python(environment))
    ]  # fmt: skip
    assert [(each.returncode, each.stdout, each.stderr) for each in said] == [
        (said[0].returncode, said[0].stdout, said[0].stderr)
    ] * 2


def test_what_is_raised_is_a_traceback_and_status_1(environment: dict[str, str], tmp_path: Path) -> None:
    words = [*prepared_process.python(environment), "-c", "raise ValueError('this')"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ValueError: this\n")


def test_what_is_inherited_has_the_same_number(environment: dict[str, str], tmp_path: Path) -> None:
    out, into = os.pipe()
    program = prepared_process.as_program(tmp_path / "python", environment)
    words = [program, "-c", "import os, sys; os.write(int(sys.argv[1]), b'said')", str(into)]
    subprocess.run(words, env=environment, pass_fds=[into], check=True, timeout=60)
    os.close(into)
    with open(out, "rb") as said:
        assert said.read() == b"said"


def test_on_a_terminal_it_leads_the_session_there(environment: dict[str, str]) -> None:
    master, slave = pty.openpty()
    asks = "import os; assert os.getsid(0) == os.tcgetpgrp(0) == os.getpid(); os.write(1, b'yes'); os.read(0, 1)"
    words = [*prepared_process.python(environment), "-c", asks]
    with subprocess.Popen(words, env=environment, stdin=slave, stdout=slave) as client:
        assert os.read(master, 3) == b"yes"
        os.write(master, b"\x03")
        assert client.wait(timeout=60) == -signal.SIGINT
    os.close(slave)
    os.close(master)


def test_it_is_the_command(environment: dict[str, str], tmp_path: Path) -> None:
    done = prepared_process.run(["trian"], tmp_path, environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such command 'trian'" in done.stderr


@pytest.fixture
def sleeping(environment: dict[str, str], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A client, and the number of the process that sleeps for it."""
    words = [*prepared_process.python(environment), "-c", SLEEP]
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as client:
        pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
        yield client, pid
        client.kill()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -2), (signal.SIGTERM, -15), (signal.SIGHUP, -1)])
def test_a_signal_to_the_client_is_one_to_the_command(
    number: signal.Signals, status: int, sleeping: tuple[subprocess.Popen[bytes], int]
) -> None:
    client, pid = sleeping
    client.send_signal(number)
    assert client.wait(timeout=60) == status
    assert not psutil.pid_exists(pid)


def test_a_command_is_killed_with_its_client(sleeping: tuple[subprocess.Popen[bytes], int]) -> None:
    client, pid = sleeping
    client.kill()
    until(lambda: not psutil.pid_exists(pid))


@pytest.mark.slow("a prepared process of its own")
def test_nothing_is_left_when_the_tests_end_or_are_killed(environment: dict[str, str], tmp_path: Path) -> None:
    """Of a test process that starts a prepared one and a command in it."""
    code = f"""
import os, subprocess, time
from pathlib import Path
from tests import prepared_process
subprocess.Popen([*prepared_process.python(os.environ), "-c", {SLEEP!r}], cwd={str(tmp_path)!r})
while not (Path({str(tmp_path)!r}) / "pid").exists() or not (Path({str(tmp_path)!r}) / "pid").read_text():
    time.sleep(0.02)
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=environment,
        stderr=subprocess.DEVNULL,
    ) as tests:
        assert tests.wait(timeout=120) == -9
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(pid))
    until(lambda: f"@cogumi-tests-{tests.pid}-" not in Path("/proc/net/unix").read_text())
