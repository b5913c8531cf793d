"""Programs that attack the sandbox, at every level of isolation: they are contained, and the trainer is unharmed.

This process is the trainer. A level that this machine lacks is skipped, and fails where CI is set.
"""

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from golden import Golden
from processes import until
from sandbox_attacks import ATTACKS

from cogumi.core.errors import UsageError
from cogumi.sandbox import Limits, Sandbox, SandboxResult, default_sandbox, pool, sandbox_worker

LEVELS = ("bubblewrap", "limits")
LIMITS = Limits(
    seconds=20, cpu_seconds=3, memory_bytes=256 << 20, file_bytes=8 << 20, scratch_bytes=32 << 20, processes=16,
    output_bytes=4096,
)  # fmt: skip
SECRET = "hunter2-hunter2"
USER = 12345
MARK = f"# of {os.getpid()}\n"  # by which this process finds its own workers, beside those of other tests
pool.BEGIN += MARK


def open_sandbox(level: str, workers: int = 2) -> Sandbox:
    try:
        return Sandbox(workers, LIMITS, level)
    except UsageError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"`make bubblewrap` installs it on Debian: {error}")


FURTHER = pytest.mark.slow("the same attacks at a stronger level than the one that holds everywhere")
PARAMETERS = [pytest.param(level, marks=[] if level == "limits" else [FURTHER]) for level in LEVELS]


@pytest.fixture(scope="module", params=PARAMETERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with open_sandbox(request.param) as opened:
        opened.run_all(["pass"] * 4)  # both workers have begun
        assert opened.reaches == []
        yield opened


def workers_alive() -> int:
    """Processes that began as the workers of these tests do, and their forks, wherever they are now."""
    return sum(
        MARK in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
        for process in psutil.process_iter(["cmdline", "status"])
    )


class Outside:
    """What a program must not reach: files, an environment, sockets. Whether it did is asked afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o777)
        for name, mode in (("private", 0o600), ("public", 0o666)):
            (folder / name).write_text(SECRET)
            (folder / name).chmod(mode)
        self.stream, self.datagram = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        self.abstract = socket.socket(socket.AF_UNIX)
        self.stream.bind(("127.0.0.1", 0))
        self.stream.listen()
        self.datagram.bind(self.stream.getsockname())
        self.abstract.bind(f"\0cogumi-test-{os.getpid()}")
        self.abstract.listen()
        for each in (self.stream, self.datagram):
            each.setblocking(False)

    def given(self) -> dict[str, Any]:
        return {
            "port": self.stream.getsockname()[1], "abstract": f"\0cogumi-test-{os.getpid()}", "parent": os.getpid(),
            "private": str(self.folder / "private"), "public": str(self.folder / "public"),
            "directory": str(self.folder), "home": os.path.expanduser("~"), "secret": SECRET, "user": os.getuid(),
        }  # fmt: skip

    def untouched(self) -> list[str]:
        """What is no longer as it was."""
        changed = [path.name for path in self.folder.iterdir() if path.name not in ("private", "public")]
        for name, mode in (("private", 0o600), ("public", 0o666)):
            found = self.folder / name
            if not found.exists() or found.read_text() != SECRET or found.stat().st_mode & 0o777 != mode:
                changed.append(name)
            elif found.stat().st_mtime == 0:
                changed.append(f"the time of {name}")
        for name, receive in (("a connection", self.stream.accept), ("a datagram", lambda: self.datagram.recv(9))):
            try:
                receive()
                changed.append(name)
            except BlockingIOError:
                pass
        return changed + [
            f"/dev/shm or /: {n}" for n in ("/dev/shm", "/") if os.path.exists(f"{n}/written-by-an-attack")
        ]


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    monkeypatch.setenv("COGUMI_TEST_SECRET", SECRET)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # where others may enter, which pytest's own forbids
        there = Outside(Path(folder))
        yield there
        for each in (there.stream, there.datagram, there.abstract):
            each.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_contained(sandbox: Sandbox, outside: Outside, name: str):
    attack, before = ATTACKS[name], workers_alive()
    files = {"given.json": json.dumps(outside.given())}
    beside: list[SandboxResult] = []
    thread = threading.Thread(target=lambda: beside.append(sandbox.run("print(6 * 7)")))
    thread.start()
    attacked = sandbox.run(attack.program, files, limits=replace(LIMITS, seconds=attack.seconds))
    thread.join()
    assert attack.contained(attacked), attacked
    assert [(each.status, each.output) for each in beside] == [("finished", "42\n")]
    assert outside.untouched() == []
    after = sandbox.run_all(["import os; print(os.listdir('.')); open('f', 'w').write('x'); open('f').read()"] * 4)
    assert {(each.status, each.output) for each in after} == {("finished", "[]\n")}  # nothing is left of it
    assert workers_alive() == before


def test_a_program_prints_raises_and_leaves_files(sandbox: Sandbox):
    program = """
    import sys
    import helper
    print(helper.double(21), file=sys.stderr)
    open("data/out.txt", "a").write("more")
    raise SystemExit("no")
    """
    files = {"helper.py": "def double(x): return 2 * x\n", "data/out.txt": "some, "}
    result = sandbox.run(textwrap.dedent(program), files, keep=["data/out.txt", "missing"])
    assert (result.status, result.exit_code, result.output) == ("finished", 1, "42\nno\n")
    assert result.files == {"data/out.txt": "some, more"}
    raised = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert raised.exit_code == 1
    assert raised.output.startswith('Traceback (most recent call last):\n  File "<program>", line 3, in <module>\n')
    assert raised.output.endswith("ZeroDivisionError: division by zero\n")


def test_modules_that_were_not_imported_before_are_there(sandbox: Sandbox):
    if os.getuid() == 0:
        assert sandbox.run("import os; print(os.getuid() > 0)").output == "True\n"
    assert sandbox.run("import sqlite3, asyncio, email.message, xml.dom\n'ä'.encode('idna')").exit_code == 0


def test_processes_and_threads_of_a_program_work(sandbox: Sandbox):
    program = """
    import subprocess, sys, threading, os
    print(subprocess.run(["echo", "hi"], capture_output=True, text=True).stdout.strip())
    done = []
    threads = [threading.Thread(target=done.append, args=(n,)) for n in range(3)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    print(sorted(done), flush=True)
    if os.fork() == 0:
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    assert sandbox.run(textwrap.dedent(program)).output == "hi\n[0, 1, 2]\n3\n"


def test_a_kept_file_is_never_read_through_a_link(sandbox: Sandbox, outside: Outside):
    private = outside.given()["private"]
    program = f"""
    import os
    os.symlink("/etc/passwd", "link")
    os.symlink({private!r}, "secret")
    os.symlink({str(outside.folder)!r}, "folder")
    os.mkdir("directory")
    os.mkfifo("pipe")
    open("real", "w").write("x")
    os.link("real", "second")
    open("whole", "w").write("y")
    """
    names = ["link", "secret", "folder/private", "directory", "pipe", "real", "whole", "whole/part"]
    assert sandbox.run(textwrap.dedent(program), keep=names).files == {"whole": "y"}


@pytest.mark.slow("every attack at every level once more")
def test_an_ordinary_user_is_as_safe(outside: Outside):
    """The same attacks where the trainer is no root, so that a program without namespaces has the trainer's own user."""
    levels = [each for each in LEVELS if each != "bubblewrap" or pool.find_bubblewrap()]
    failed = as_user(lambda: {level: attacks_that_succeed(level, outside) for level in levels})
    assert failed == {level: [] for level in levels}
    assert outside.untouched() == []


def attacks_that_succeed(level: str, outside: Outside) -> list[str]:
    private = Path(tempfile.mkstemp()[1])  # which only this user may read
    private.write_text(SECRET)
    files = {"given.json": json.dumps(outside.given() | {"private": str(private)})}
    with Sandbox(2, LIMITS, level) as sandbox:
        if level == "limits":
            assert sandbox.reaches == []
        with ThreadPoolExecutor(2) as threads:
            results = {
                name: threads.submit(sandbox.run, each.program, files, limits=replace(LIMITS, seconds=each.seconds))
                for name, each in ATTACKS.items()
            }
        unharmed = sandbox.run("print(42)").output == "42\n"
    failed = [
        f"{name}: {done.result()}" for name, done in results.items() if not ATTACKS[name].contained(done.result())
    ]
    return failed + ([] if unharmed else ["the sandbox"])


SYSTEM_PYTHON = "/usr/bin/python3.11"


def as_user(work: Callable[[], Any]) -> Any:
    """What a function returns in a fork of this process that an ordinary user runs, if this one is root's."""
    python = python_of_every_user() if os.geteuid() == 0 else ""  # here, as a skip in the fork would be an answer
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        answer: Any = "it raised"
        try:
            if python:
                pool.interpreter = lambda: python
                pool.readable_paths = list
            if os.geteuid() == 0:
                sandbox_worker.become(USER)
                sandbox_worker.prctl(sandbox_worker.PR_SET_DUMPABLE, 1)
            answer = work()
        except BaseException as error:  # noqa: BLE001 - it is told
            answer = repr(error)
        finally:
            os.write(writing, json.dumps(answer).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return json.loads(answer)


def python_of_every_user() -> str:
    """A Python that every user may read, where this one lies in root's home; "" where this one will do."""
    library = Path(sysconfig.get_path("stdlib"))
    if all(parent.stat().st_mode & 1 for parent in library.parents):
        return ""
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"no Python here that an ordinary user may read: {library} is root's, and no {SYSTEM_PYTHON}")
    return SYSTEM_PYTHON


def test_where_namespaces_are_refused_limits_hold():
    """As in a container of RunPod or Vast: the kernel's answer decides, found by trying."""

    def described() -> list[str]:
        sandbox_worker.prctl(sandbox_worker.PR_SET_NO_NEW_PRIVS, 1)
        sandbox_worker.install_seccomp(sandbox_worker.seccomp_filter(separated=True))
        with Sandbox(1, LIMITS) as sandbox:
            return [sandbox.isolation, sandbox.run("print(1)").output, sandbox.describe()]

    level, output, described_as = as_user(described)
    assert (level, output) == ("limits", "1\n")
    assert described_as.startswith("sandbox: limits (no namespaces")


def test_what_the_trial_reaches_is_told(monkeypatch: pytest.MonkeyPatch, golden: Golden):
    """A kernel without seccomp and Landlock, such as gVisor's: what limits alone leave open is in the line of the start."""
    monkeypatch.setattr(pool, "BEGIN", pool.BEGIN.replace("worker.main()", "worker.can_filter = False; worker.main()"))
    with Sandbox(1, LIMITS, "limits") as sandbox:
        assert "the network" in sandbox.reaches
        assert "leaving its process group" in sandbox.reaches
        before = workers_alive()
        assert sandbox.run(ATTACKS["a daemon"].program, {"given.json": "{}"}).status == "finished"
        assert sandbox.run("print(1)").output == "1\n"
        assert workers_alive() == before  # without seccomp, daemons are found as children
        if os.getuid() == 0:
            golden("rewards", sandbox.describe())


def test_a_level_that_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch, golden: Golden):
    monkeypatch.setattr(pool, "find_bubblewrap", str)
    with golden.raises("rewards", key="isolation", message="bubblewrap"):
        Sandbox(1, LIMITS, "bubblewrap")


def test_a_worker_that_is_lost_costs_one_result(sandbox: Sandbox):
    results: list[SandboxResult] = []
    thread = threading.Thread(target=lambda: results.append(sandbox.run("import time; time.sleep(60)")))
    thread.start()
    working = until(lambda: [each for each in started(sandbox) if each not in idle(sandbox)], 5)
    time.sleep(0.2)
    os.killpg(working[0], signal.SIGKILL)
    thread.join()
    assert [result.status for result in results] == ["crashed"]
    assert [each.output for each in sandbox.run_all(["print(1)"] * 4)] == ["1\n"] * 4


def test_a_worker_that_dies_while_it_waits_costs_nothing(sandbox: Sandbox):
    sandbox.run_all(["pass"] * 4)
    for each in idle(sandbox):
        os.killpg(each, signal.SIGKILL)
    assert [each.output for each in sandbox.run_all(["print(1)"] * 4)] == ["1\n"] * 4


def started(sandbox: Sandbox) -> list[int]:
    """The workers of this process by PID."""
    return [child.pid for child in psutil.Process().children() if MARK in " ".join(child.cmdline())]


def idle(sandbox: Sandbox) -> list[int]:
    return [worker.process.pid for worker in sandbox._workers.values()]


def test_programs_side_by_side_do_not_meet(sandbox: Sandbox):
    """Each has its own result, files and scratch directory; some of them are lost on the way."""
    program = "import os; print(open('n').read(), os.listdir('.')); open('n', 'a').write('!')"
    ends = ("", "\nos._exit(3)", "\nos.kill(os.getpid(), 9)", "\nos.fork() or os.setsid()", "\nos.abort()")
    programs = [program + ends[n % len(ends)] for n in range(100)]
    results = sandbox.run_all(programs, [{"n": str(n)} for n in range(100)], keep=["n"])
    assert [result.files["n"] for result in results] == [f"{n}!" for n in range(100)]
    assert all(each.output in ("", f"{n} ['n']\n") for n, each in enumerate(results) if n % len(ends) in (1, 2, 4))
    assert {each.status for each in results[2::5] + results[4::5]} == {"crashed"}


def test_processor_time_is_limited(sandbox: Sandbox):
    result = sandbox.run("while True: pass", limits=replace(LIMITS, cpu_seconds=1))
    assert result.status == "timeout"
    assert result.seconds < 15


def test_an_interrupt_ends_the_program_and_not_the_sandbox(sandbox: Sandbox):
    sandbox.run_all(["pass"] * 4)
    before = workers_alive()
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        sandbox.run("import time; time.sleep(60)")
    assert [each.output for each in sandbox.run_all(["print(1)"] * 4)] == ["1\n"] * 4
    until(lambda: workers_alive() <= before, 10)


@pytest.mark.parametrize("level", PARAMETERS)
def test_a_killed_trainer_leaves_nothing(level: str):
    open_sandbox(level, 1).close()
    before = workers_alive()
    pools = tempfile.TemporaryDirectory()
    Path(pools.name).chmod(0o711)
    program = "import os, time\nif os.fork() == 0: os.fork()\nprint(1, flush=True); time.sleep(60)"
    script = f"""
    from cogumi.sandbox import Sandbox, pool
    pool.BEGIN = {pool.BEGIN!r}
    sandbox = Sandbox(2, isolation={level!r})
    print("ready", flush=True)
    sandbox.run_all([{program!r}] * 2)
    """
    environment = os.environ | {"TMPDIR": pools.name}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"ready\n"
    until(lambda: workers_alive() > before + 4)
    trainer.kill()
    trainer.communicate()
    until(lambda: workers_alive() <= before, 10)
    until(lambda: not list(Path(pools.name).glob("cogumi-sandbox-*")), 10)
    pools.cleanup()


def test_closing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o711)
    before = workers_alive()
    with Sandbox(2, LIMITS) as sandbox:
        sandbox.run_all(["pass"] * 2)
        assert workers_alive() > before
    assert workers_alive() == before
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.run("pass")


ANSWERS = [
    b"[]", b"{", b"[" * 100_000, b'{"status": "won"}', b"\x80\x04.", b'{"status": "finished"}',
    b'{"status": "finished", "exit_code": "0", "output": "", "seconds": 0.1, "files": {}}', None,
]  # fmt: skip


def test_what_is_no_answer_is_a_crash():
    """A worker is not believed either: what it sends is a bounded JSON object of these types, or the program crashed."""
    with Sandbox(1, LIMITS, "limits") as sandbox:
        for answer in ANSWERS:
            ours, theirs = socket.socketpair()
            (worker,) = sandbox._workers.values()
            worker.hang_up()
            worker.channel.close()
            worker.channel = ours
            for each in (b'{"begun": true}', answer):
                size = len(each) if each is not None else 1 << 60
                theirs.sendall(sandbox_worker.HEADER.pack(size) + (each or b""))
            assert sandbox.run("pass").status == "crashed"
            theirs.close()
            assert sandbox.run("print(1)").output == "1\n"


def test_a_file_outside_of_the_scratch_directory_is_refused():
    with Sandbox(1, LIMITS) as sandbox:
        for name in ("/etc/passwd", "../x", "a/../../x", "", "a//b", "a\0b", "."):
            with pytest.raises(ValueError, match="scratch"):
                sandbox.run("pass", keep=[name])
            with pytest.raises(ValueError, match="scratch"):
                sandbox.run("pass", {name: ""})


def test_one_sandbox_for_a_process():
    assert default_sandbox() is default_sandbox()
    assert default_sandbox().describe().startswith("sandbox: ")


def test_it_imports_nothing_of_the_package_but_errors():
    """So that it can become a distribution of its own."""
    for path in Path(pool.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = [name for name in names if name.startswith("cogumi")]
            assert all(name == "cogumi.core.errors" or name.startswith("cogumi.sandbox") for name in ours), path
