"""Start a run in a process of its own. Loads no torch.

The other side is `cogumi.runs.supervisor`.
"""

import json
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from cogumi.config.source import Config
from cogumi.core.errors import RunFailed, UsageError
from cogumi.core.formatting import last_line
from cogumi.core.notices import show_seconds
from cogumi.core.run_directory import CONSOLE, START, same_process
from cogumi.core.signatures import EXIT_RETRY, known_cause
from cogumi.runs.entry import validate_config
from cogumi.runs.handle import POLL_SECONDS, Run, show_log
from cogumi.stack.gpus import without_chosen_gpu
from cogumi.telemetry.status import format_headline, format_sentence, read_json_or_empty, relative_path

log = logging.getLogger("cogumi")
# For the first step, once the configuration is valid: most refusals of libraries come earlier, and a download may take long.
PATIENCE_SECONDS = 20.0
ENDING_SECONDS = 30.0  # for a supervisor to end after a refusal


@show_seconds("start: the run is being prepared in a process of its own")
def start(config: Config, **overrides: Any) -> Run:
    """Train one configuration in a process that outlives this one, the notebook, the terminal and the connection.

    config, overrides: as for `cogumi.train`. Returns when the first step is done, or some seconds after the configuration was
    found good. A run that is under way is attached to, and one that has finished is left as it is. An unfinished one is
    resumed from its last good checkpoint. An interrupt (Ctrl-C) before it returns stops the run. Raises UsageError for
    what `cogumi.train` refuses, and RunFailed where the run ends otherwise before its first step.
    """
    resolved = validate_config(config, overrides, for_training=True)
    run, job = Run(resolved.run_dir.absolute()), pickle.dumps(resolved)
    reader, writer = os.pipe()
    with show_log(), TemporaryFile() as output, open(reader, "rb", 0) as pipe, ThreadPoolExecutor(1) as pool:
        log.info("checking configuration and data in the training process")
        launching = pool.submit(launch, run.run_dir, job, writer, output)  # no interrupt reaches it
        try:
            launching.result()
            while (message := poll_startup_message(pipe, run.run_dir)) is None:
                time.sleep(POLL_SECONDS)
            if not message:
                output.seek(0)
                text = output.read().decode()
                cause = "; known cause: {cause} Fix: {fix}".format(**known) if (known := known_cause(text)) else ""
                raise RunFailed(f"the process ended before it had a run: {last_line(text)}{cause}")
            if "already" in message:
                log.info("%s", message["already"])
                return run
            await_first_step(run, pipe)
        except KeyboardInterrupt:
            with suppress(ProcessLookupError):  # it has ended just now
                os.killpg(launching.result(), signal.SIGTERM)  # which its supervisor ignores
            log.warning("the start is cancelled: the run saves its last finished step, if there is one, and ends")
            while not select.select([pipe], [], [], POLL_SECONDS)[0] or pipe.read(1024):
                pass  # until all its processes have ended, which closes the pipe
            raise
        log.info("%s", format_headline(run.status()))
    return run


def launch(run_dir: Path, job: bytes, pipe: int, output: Any) -> int:
    """Leave a trainer behind and return its session. The pickled job goes to its standard input, so that no file holds it."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "cogumi.runs.supervisor", str(pipe), str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=(pipe,),
        # A progress bar that goes to a file is a line for each of its refreshes.
        env={"TQDM_DISABLE": "1", **without_chosen_gpu(os.environ), "PYTHONUNBUFFERED": "1"},
    )
    os.close(pipe)
    with launcher:
        launcher.communicate(job)  # one that cannot start at all prints why
    return launcher.pid


def poll_startup_message(pipe: BinaryIO, run_dir: Path) -> dict[str, str] | None:
    """Return the trainer's next message; {} once its processes have ended, None if there is none yet.

    Raises UsageError for a refusal, RunFailed for one that another try may not meet. If the run never started, its directory
    is removed after reading that.
    """
    if not select.select([pipe], [], [], 0)[0]:
        return None
    message: dict[str, str] = json.loads(pipe.readline() or "{}")
    if "refused" in message:
        select.select([pipe], [], [], ENDING_SECONDS)  # its supervisor still writes there
        started = read_json_or_empty(run_dir / START)
        if started.get("refused") == message["refused"] and started["new"]:
            for name in (CONSOLE, START):
                (run_dir / name).unlink(missing_ok=True)
            with suppress(OSError):  # something else is there
                run_dir.rmdir()
        if message.get("status") == str(EXIT_RETRY):
            raise RunFailed(message["refused"], retriable=True)
        raise UsageError(message["refused"])
    return message


def await_first_step(run: Run, pipe: BinaryIO) -> None:
    """Wait until the run has made a step, its processes have ended, or PATIENCE_SECONDS. Raises RunFailed if it failed."""
    began, until = time.time(), time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until and poll_startup_message(pipe, run.run_dir) is None:
        time.sleep(POLL_SECONDS)
        with suppress(UsageError):  # a refusal takes the directory away just before it is told
            beat = run.status().heartbeat
            if beat.get("step", 0) > 0 and beat["time"] > began:
                break
    status, started = run.status(), read_json_or_empty(run.run_dir / START)
    recorded = read_json_or_empty(run.run_dir / "status.json")  # by the process before, if this one wrote none
    failed_early = started.get("exit") in range(1, 128) and not same_process(started, recorded)
    if status.state in ("died", "failed") or failed_early:
        ending = f"{relative_path(status.log)} ends in: {last_line(run.logs(5))}"
        raise RunFailed(f"{format_sentence(status)}; {ending}", bool(status.retriable))
