"""What a form asks of other processes: the signatures of trl and peft, whether values are a run, and the preflight.

Never in the kernel: importing trl takes seconds, during which nothing else would run in it, and where there is a GPU a later
`cogumi.train` has to import unsloth first. One process answers the questions of all forms of a kernel and ends with it; each
preflight has one of its own, which can be ended when its answer is no longer wanted.
"""

import os
import threading
from collections.abc import Mapping
from typing import Any

from cogumi.config.schema import RunConfig, load_config
from cogumi.core.errors import UsageError
from cogumi.core.worker import Worker
from cogumi.forecast.preflight_report import PreflightReport
from cogumi.notebook.form_fields import Field, fields_of

Values = dict[str, Any]

_answering: Worker | None = None
_lock = threading.Lock()


def read_signatures(method: str) -> dict[str, list[Field]]:
    """`fields_of`, from the other process."""
    found: dict[str, list[Field]] = ask_worker("fields", method)
    return found


def check_values(values: Values) -> RunConfig:
    """`load_config`, from the other process. Raises its UsageError."""
    run: RunConfig = ask_worker("check", values)
    return run


def ask_worker(question: str, about: Any) -> Any:
    global _answering
    with _lock:
        worker, _answering = _answering, None  # one that is interrupted half-way is not asked again
        without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # its memory is for the training
        if worker is None or worker.process.poll() is not None:
            worker = Worker("the process that checks configs", without_gpu)
        worker.send(answer, question, about, without_gpu)
        try:
            found = worker.receive()
        except UsageError:
            _answering = worker
            raise
        _answering = worker
        return found


def begin_preflight(values: Values, card: str | None) -> Worker:
    worker = Worker("the preflight", os.environ)
    worker.send(preflight, values, card)
    return worker


def end_of_preflight(worker: Worker) -> PreflightReport:
    """Its report. Raises its UsageError, and RuntimeError for one that broke or was stopped."""
    try:
        report: PreflightReport = worker.receive()
    finally:
        worker.close()
    return report


# ------------------------------------------------------------------------------------------------------ the other side


def answer(question: str, about: Any, environment: Mapping[str, str]) -> Any:
    os.environ.clear()
    os.environ.update(environment)
    return fields_of(about) if question == "fields" else load_config(about)


def preflight(values: Values, card: str | None) -> PreflightReport:
    from cogumi.stack.gpus import use_one_gpu

    use_one_gpu()
    from cogumi.forecast.run_forecast import forecast_in_process, forecast_run

    return forecast_run(values, card, None, {}, forecast_in_process)
