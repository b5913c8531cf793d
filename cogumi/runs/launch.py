"""Starting a run in a process of its own, and undoing a start that is interrupted.

What happens on the other side is in `cogumi.runs.supervisor`. Like `cogumi.runs.handle` this loads no torch.
"""

import json
import logging
import os
import pickle
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import psutil

from cogumi.core.errors import RunFailed, UsageError
from cogumi.core.formatting import last_line
from cogumi.core.notices import show_seconds
from cogumi.core.run_directory import CONSOLE, START, same_process
from cogumi.core.worker import kill_with_children
from cogumi.runs import refuse_mistakes
from cogumi.runs.handle import POLL_SECONDS, Run, show_log
from cogumi.stack.gpus import without_chosen_gpu
from cogumi.telemetry.status import format_headline, format_sentence, read_json_or_empty, relative_path

log = logging.getLogger("cogumi")
# How long a start waits for the first step, once the configuration is found good: most of what a library refuses shows by
# then, and a long download is not waited for.
PATIENCE_SECONDS = 20.0
ENDING_SECONDS = 30.0  # that the processes of a start may take to end


@show_seconds("start: the run is being prepared in a process of its own")
def start(config: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> Run:
    """Train one configuration in a process that outlives this one, the notebook, the terminal and the connection.

    config, overrides: as for `cogumi.train`. Returns when the first step is done, or some seconds after the configuration was
    found good. A run that is under way is attached to, and one that has finished is left as it is. An unfinished one is
    resumed from its last good checkpoint. An interrupt (Ctrl-C) before it returns cancels the start. Raises UsageError for
    what `cogumi.train` refuses, and RunFailed where the run ends otherwise before its first step.
    """
    run = Run(refuse_mistakes(config, overrides, trains=True).run_dir.absolute())
    what = pickle.dumps((dict(config) if isinstance(config, Mapping) else config, overrides))
    reader, writer = os.pipe()
    with show_log(), TemporaryFile() as output, open(reader, "rb", 0) as words, ThreadPoolExecutor(1) as pool:
        log.info("configuration and data are being checked, in the process that will train")
        launching = pool.submit(launch, run.run_dir, what, writer, output)  # no interrupt reaches it
        try:
            launching.result()
            while (word := read_word(words, run.run_dir)) is None:
                time.sleep(POLL_SECONDS)
            if not word:
                output.seek(0)
                raise RunFailed(f"the process ended before it had a run: {last_line(output.read().decode())}")
            if "already" in word:
                log.info("%s", word["already"])
                return run
            await_first_step(run, words)
        except KeyboardInterrupt:
            done = undo_start(launching.result(), run.run_dir)
            log.warning("the start is cancelled: its processes are ended, and %s", done)
            raise
        log.info("%s", format_headline(run.status()))
    return run


def launch(run_dir: Path, what: bytes, words: int, output: Any) -> int:
    """Leave a trainer behind and return its session. what: pickled, on its standard input, so that no file holds it."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "cogumi.runs.supervisor", str(words), str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=(words,),
        # A progress bar that goes to a file is a line for each of its refreshes.
        env={"TQDM_DISABLE": "1", **without_chosen_gpu(os.environ), "PYTHONUNBUFFERED": "1"},
    )
    os.close(words)
    with launcher:
        launcher.communicate(what)  # one that cannot begin at all says so in its output
    return launcher.pid


def read_word(words: BinaryIO, run_dir: Path) -> dict[str, str] | None:
    """What the trainer has said; {} once its processes have ended, None where it says nothing. Raises what it refuses.

    A refusal is also in the directory. Of a run that never was, the directory is removed once the refusal is read.
    """
    if not select.select([words], [], [], 0)[0]:
        return None
    word: dict[str, str] = json.loads(words.readline() or "{}")
    if "refused" in word:
        select.select([words], [], [], ENDING_SECONDS)  # its supervisor still writes there
        started = read_json_or_empty(run_dir / START)
        if started.get("refused") == word["refused"] and started["new"]:
            for name in (CONSOLE, START):
                (run_dir / name).unlink(missing_ok=True)
            with suppress(OSError):  # something else is there
                run_dir.rmdir()
        raise UsageError(word["refused"])
    return word


def await_first_step(run: Run, words: BinaryIO) -> None:
    """Wait until the run has made a step, its processes have ended, or patience is over. Raises what it ended in."""
    began, until = time.time(), time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until and read_word(words, run.run_dir) is None:
        time.sleep(POLL_SECONDS)
        with suppress(UsageError):  # a refusal takes the directory away just before it is told
            beat = run.status().heartbeat
            if beat.get("step", 0) > 0 and beat["time"] > began:
                break
    status, started = run.status(), read_json_or_empty(run.run_dir / START)
    said = read_json_or_empty(run.run_dir / "status.json")  # of the process before, where this one wrote none
    if status.state in ("died", "failed") or (started.get("exit") in range(1, 128) and not same_process(started, said)):
        raise RunFailed(f"{format_sentence(status)}; {relative_path(status.log)} ends in: {last_line(run.logs(5))}")


def undo_start(session: int, run_dir: Path) -> str:
    """End the processes of a start, and remove a directory that it made. Returns what was done with it, in words."""
    left, started = session_processes(session), read_json_or_empty(run_dir / START)
    # Not another start, at the same time.
    made = started.get("new") and started["pid"] in [each.pid for each in left]
    until = time.monotonic() + ENDING_SECONDS
    while left and time.monotonic() < until:
        for process in left:
            kill_with_children(process.pid)
        psutil.wait_procs(left, POLL_SECONDS)
        left = session_processes(session)
    if not made:
        return "nothing is removed"
    shutil.rmtree(run_dir)
    return f"{relative_path(str(run_dir))} is removed"


def session_processes(session: int) -> list[psutil.Process]:
    """The living processes of a session."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it has ended just now
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
