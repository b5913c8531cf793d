"""Looking ahead where there is a GPU: in a process that sees none, so that the GPU and the trainer to be are left alone.

The step is executed on the CPU's fake tensors with TRL's own trainer. Beside a GPU that trainer would be unsloth's, whose
kernels take no fake tensors, and the settings that accelerate keeps for a whole process would be those of the forecast.
"""

import os
import pickle
import subprocess
import sys
from typing import Any

import torch

from cogumi.errors import UsageError
from cogumi.preflight.flight import Asked, look_ahead
from cogumi.preflight.lines import Line

Ahead = tuple[list[Line], dict[str, Any]]


def ahead(asked: Asked) -> Ahead:
    return apart(asked) if torch.cuda.is_available() else look_ahead(asked)


def apart(asked: Asked) -> Ahead:
    """`look_ahead` in another process. Raises its UsageError, and RuntimeError with the last line of one that broke."""
    done = subprocess.run(
        [sys.executable, "-m", "cogumi.preflight.apart"],
        input=pickle.dumps(asked),
        capture_output=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(
            f"the forecast ended with status {done.returncode}: {said[-1] if said else 'it said nothing'}"
        )
    answer: Ahead | UsageError = pickle.loads(done.stdout)
    if isinstance(answer, UsageError):
        raise answer
    return answer


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
