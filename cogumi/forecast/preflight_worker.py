"""Looking ahead in a process of its own, of which nothing stays behind and which sees no GPU.

Libraries cache tensors, which would be fake ones, and accelerate keeps settings for a whole process; beside a GPU the
trainer would be unsloth's, whose kernels take no fake tensors. What is trained afterwards is to meet none of it.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cogumi.core.errors import UsageError
from cogumi.core.notices import working
from cogumi.forecast.preflight_report import PreflightReport
from cogumi.forecast.run_forecast import Ahead, Asked, foresee, look_ahead

LIMIT = 600.0  # seconds; a model of which every layer is run takes minutes


@working("preflight: data, memory, time and disk of the run are being worked out")
def preflight(
    config: str | os.PathLike[str] | Mapping[str, Any],
    card: str | None = None,
    train: Callable[..., Any] | None = None,
    **overrides: Any,
) -> PreflightReport:
    """`cogumi.preflight`, where torch may be imported (`cogumi.runs.entry`)."""
    return foresee(config, card, train, overrides, apart)


def apart(asked: Asked) -> Ahead:
    """`look_ahead` in another process. Raises its UsageError, and RuntimeError for one that broke or took too long."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cogumi.forecast.preflight_worker"],
            input=pickle.dumps(asked),
            capture_output=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the forecast was ended after {LIMIT:g} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(
            f"the forecast ended with status {done.returncode}: {said[-1] if said else 'it said nothing'}"
        )
    answer: Ahead | UsageError = pickle.loads(done.stdout)
    if isinstance(answer, UsageError):
        raise answer
    return answer


def here(asked: Asked) -> Ahead:
    """`look_ahead` for a process that does nothing else, apart only where it sees a GPU."""
    return apart(asked) if torch.cuda.is_available() else look_ahead(asked)


def main() -> None:
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    try:
        answer: Ahead | UsageError = look_ahead(pickle.load(sys.stdin.buffer))
    except UsageError as error:
        answer = error
    with output:
        pickle.dump(answer, output)


if __name__ == "__main__":
    main()
