"""Starting a run in a process of its own, and undoing a start that is interrupted.

What happens on the other side is in `cogumi.runs.supervisor`. Like `cogumi.runs.handle` this loads no torch.
"""

import json
import logging
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil

from cogumi.core.errors import RunFailed, UsageError
from cogumi.core.formatting import last_line
from cogumi.core.notices import show_seconds, sleep_and_answer
from cogumi.core.run_directory import START, is_empty, same_process
from cogumi.core.worker import kill_with_children
from cogumi.runs import refuse_mistakes
from cogumi.runs.handle import ENDING_SECONDS, POLL_SECONDS, Run, show_log, wait_for_end
from cogumi.stack.gpus import without_chosen_gpu
from cogumi.telemetry.status import format_headline, format_sentence, read_json_or_empty, relative_path

log = logging.getLogger("cogumi")
# How long a start waits for the first step, once the configuration is found good: most of what a library refuses shows by
# then, and a long download is not waited for.
PATIENCE_SECONDS = 20.0


@show_seconds("start: the run is being prepared in a process of its own")
def start(config: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> Run:
    """Train one configuration in a process that outlives this one, the notebook, the terminal and the connection.

    config, overrides: as for `cogumi.train`; COGUMI_* of the environment hold as well. Returns when the first step is done,
    or some seconds after the configuration was found good. A run that is under way already is attached to, and one that
    has finished is left as it is; both are said. An unfinished one is resumed from its last good checkpoint. An interrupt
    (Ctrl-C) before it returns cancels the start: its processes are ended, and a directory that it made is removed.
    Raises UsageError for what `cogumi.train` refuses, and RunFailed where the run ends otherwise before its first step.
    """
    refuse_mistakes(config, overrides, trains=True)  # at once; what libraries and data say, on the other side
    begun, (ours, theirs) = StartAttempt(), socket.socketpair()
    with show_log(), TemporaryFile() as output, ours, theirs:
        log.info("configuration and data are being checked, in the process that will train")
        try:
            what = dict(config) if isinstance(config, Mapping) else config, overrides
            with ThreadPoolExecutor(1) as pool:  # which no interrupt reaches: it comes when the session is known
                pool.submit(launch, theirs, what, output, begun).result()
            theirs.close()
            while (word := receive_word(ours, begun)) is None or "begins" in word:
                if word is None:
                    sleep_and_answer(POLL_SECONDS)
            if not word:
                output.seek(0)
                raise RunFailed(f"the process ended before it had a run: {last_line(output.read().decode())}")
            raise_refusal(word, ours)
            run = Run(Path(word["run_dir"]))
            if "already" in word:
                log.info("%s", word["already"])
                return run
            await_first_step(run, ours)
        except KeyboardInterrupt:
            log.warning("the start is cancelled: its processes are ended, and %s", begun.undo())
            raise
        log.info("%s", format_headline(run.status()))
    return run


@dataclass
class StartAttempt:
    """What a start has begun, so that it can be undone: a session of processes, and a directory that was not there."""

    session: int | None = None
    made: Path | None = None

    def undo(self) -> str:
        """End the processes, and remove the directory. Returns what was done with it, in words."""
        left = session_processes(self.session)
        started = {} if self.made is None else read_json_or_empty(self.made / START)
        is_its_own = any(each.pid == started.get("pid") for each in left)  # not of another start, at the same time
        until = time.monotonic() + ENDING_SECONDS
        while left and time.monotonic() < until:
            for process in left:
                kill_with_children(process.pid)
            psutil.wait_procs(left, POLL_SECONDS)
            left = session_processes(self.session)
        if self.made is None or not is_its_own:
            return "nothing is removed"
        shutil.rmtree(self.made)
        return f"{relative_path(str(self.made))} is removed"


def session_processes(session: int | None) -> list[psutil.Process]:
    """The living processes of a session."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it has ended just now
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def launch(theirs: socket.socket, what: Any, output: Any, begun: StartAttempt) -> None:
    """Leave a trainer behind, in a session of its own. what: pickled, on its standard input, so that no file holds it."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "cogumi.runs.supervisor", str(theirs.fileno())],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=(theirs.fileno(),),
        # A progress bar that goes to a file is a line for each of its refreshes.
        env={"TQDM_DISABLE": "1", **without_chosen_gpu(os.environ), "PYTHONUNBUFFERED": "1"},
    )
    begun.session = launcher.pid
    with launcher:
        launcher.communicate(pickle.dumps(what))  # one that cannot begin at all says so in its output


def receive_word(ours: socket.socket, begun: StartAttempt) -> dict[str, str] | None:
    """What the trainer has said; {} where it has ended, None where it says nothing."""
    if not select.select([ours], [], [], 0)[0]:
        return None
    line = ours.recv(65536)
    word: dict[str, str] = json.loads(line or "{}")
    if "begins" in word and is_empty(Path(word["begins"])):  # before the trainer writes there
        begun.made = Path(word["begins"])
    with suppress(BrokenPipeError):  # it has been ended since it spoke
        ours.sendall(b"1")  # heard
    return word


def raise_refusal(word: dict[str, str], ours: socket.socket) -> None:
    """Raise what the trainer refuses, once it has hung up: until then it may be taking its directory away."""
    if "refused" in word:
        select.select([ours], [], [], ENDING_SECONDS)
        raise UsageError(word["refused"])


def await_first_step(run: Run, ours: socket.socket) -> None:
    """Wait until the run has made a step, has ended, or patience is over. Raises what it ended in."""
    began, until = time.time(), time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        sleep_and_answer(POLL_SECONDS)
        word = receive_word(ours, StartAttempt())
        if word == {}:  # its process is ending
            wait_for_end(run.status(), ENDING_SECONDS)
            break
        if word:
            raise_refusal(word, ours)
        with suppress(UsageError):  # a refusal takes the directory away just before it is told
            status = run.status()
            stepped = status.heartbeat.get("step", 0) > 0 and status.heartbeat["time"] > began
            if status.ended or stepped:
                break
    status, started = run.status(), read_json_or_empty(run.run_dir / START)
    said = read_json_or_empty(run.run_dir / "status.json")  # of the process before, where this one wrote none
    if status.state in ("died", "failed") or (started.get("exit") in range(1, 128) and not same_process(started, said)):
        raise RunFailed(f"{format_sentence(status)}; {relative_path(status.log)} ends in: {last_line(run.logs(5))}")
