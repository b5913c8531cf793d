"""Checkpoints that are whole or absent, and resuming from the last good one."""

import importlib
from typing import TYPE_CHECKING, Any

from cogumi.checkpoints.retention import last_good_checkpoint

if TYPE_CHECKING:
    from cogumi.checkpoints.protection import protect as protect
    from cogumi.checkpoints.protection import unprotect as unprotect

__all__ = ["last_good_checkpoint", "protect", "unprotect"]


def __getattr__(name: str) -> Any:
    # Finding a checkpoint takes neither torch nor transformers, which protecting a trainer has loaded already.
    if name not in ("protect", "unprotect"):
        raise AttributeError(f"module 'cogumi.checkpoints' has no attribute {name!r}")
    return getattr(importlib.import_module("cogumi.checkpoints.protection"), name)
