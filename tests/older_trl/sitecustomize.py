"""For `make test-stable`: the head of TRL 1.15, a Triton kernel that needs a GPU, by dense logits in every process.

It is on PYTHONPATH there, so that processes which tests start have it as well.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from dense_head import ChunkedLogProbFunction

kernels: Any = ModuleType("trl.kernels")
kernels.ChunkedLogProbFunction = ChunkedLogProbFunction
kernels.selective_log_softmax_and_entropy = None  # TRL computes these values in torch then
sys.modules["trl.kernels"] = kernels
