"""What a form asks of other processes: the signatures of trl and peft, whether values are a run, and the preflight.

Never in the kernel: importing trl takes seconds, during which nothing else would run in it, and where there is a GPU a later
`cogumi.train` has to import unsloth first. One process answers the questions of all forms of a kernel and ends with it; each
preflight has one of its own, which can be ended when its answer is no longer wanted.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any

from cogumi.config.schema import RunConfig, load_config
from cogumi.core.errors import UsageError
from cogumi.forecast.preflight_report import PreflightReport
from cogumi.notebook.form_fields import Field, fields_of

Values = dict[str, Any]


@dataclass(frozen=True)
class Other:
    """Another process, with a pipe to and from it, and what it and its libraries print."""

    process: subprocess.Popen[bytes]
    to: IO[bytes]
    back: IO[bytes]
    printed: IO[bytes]

    def why(self) -> str:
        """How it ended, once it has: its status and the last line it printed."""
        status = self.process.wait()
        self.printed.seek(0)
        lines = self.printed.read().decode(errors="replace").strip().splitlines()
        return f"ended with status {status}: {lines[-1] if lines else 'it said nothing'}"

    def stop(self) -> None:
        with suppress(ProcessLookupError):  # it had ended
            os.killpg(self.process.pid, signal.SIGKILL)  # a preflight beside a GPU has a process of its own


_answering: Other | None = None
_one_at_a_time = threading.Lock()


def signatures(method: str) -> dict[str, list[Field]]:
    """`fields_of`, from the other process."""
    found: dict[str, list[Field]] = asked("fields", method)
    return found


def checked(values: Values) -> RunConfig:
    """`load_config`, from the other process. Raises its UsageError."""
    run: RunConfig = asked("check", values)
    return run


def asked(question: str, about: Any) -> Any:
    global _answering
    with _one_at_a_time:
        other, _answering = _answering, None  # one that is interrupted half-way is not asked again
        if other is None or other.process.poll() is not None:
            # It looks at no GPU, whose memory is for the training.
            other = started("answer", {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        try:
            pickle.dump((question, about, dict(os.environ)), other.to)
            other.to.flush()
            answer = pickle.load(other.back)
        except (BrokenPipeError, EOFError):
            raise RuntimeError(f"the process that checks configs {other.why()}") from None
        _answering = other
    if isinstance(answer, UsageError):
        raise answer
    return answer


def begin_preflight(values: Values, card: str | None) -> Other:
    other = started("preflight", dict(os.environ))
    with suppress(BrokenPipeError), other.to as to:  # one that broke says so in the end
        pickle.dump((values, card), to)
    return other


def end_of_preflight(other: Other) -> PreflightReport:
    """Its report. Raises its UsageError, and RuntimeError for one that broke or was stopped."""
    with other.back as back:
        said = back.read()
    if other.process.wait():
        raise RuntimeError(f"the preflight {other.why()}")
    answer: PreflightReport | UsageError = pickle.loads(said)
    if isinstance(answer, UsageError):
        raise answer
    return answer


def started(what: str, environment: dict[str, str]) -> Other:
    printed = TemporaryFile()  # noqa: SIM115 - it lives as long as what is returned
    process = subprocess.Popen(
        [sys.executable, "-m", "cogumi.notebook.form_process", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=printed,
        env=environment,
        start_new_session=True,  # what interrupts a cell is not for it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return Other(process, process.stdin, process.stdout, printed)


# ------------------------------------------------------------------------------------------------------ the other side


def answer_questions(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Until nobody asks any more."""
    while True:
        try:
            question, about, environment = pickle.load(questions)
        except EOFError:
            return
        os.environ.clear()
        os.environ.update({**environment, "CUDA_VISIBLE_DEVICES": ""})
        answer: Any
        try:
            answer = fields_of(about) if question == "fields" else load_config(about)
        except UsageError as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


def answer_preflight(questions: IO[bytes], answers: IO[bytes]) -> None:
    from cogumi.stack.gpus import use_one_gpu

    use_one_gpu()
    from cogumi.forecast.preflight_worker import here
    from cogumi.forecast.run_forecast import foresee

    values, card = pickle.load(questions)
    answer: PreflightReport | UsageError
    try:
        answer = foresee(values, card, None, {}, here)
    except UsageError as error:
        answer = error
    pickle.dump(answer, answers)


def main() -> None:
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    with output:
        (answer_questions if sys.argv[1] == "answer" else answer_preflight)(sys.stdin.buffer, output)


if __name__ == "__main__":
    main()
