"""What tests with processes of their own share: waiting for what they do."""

import time
from collections.abc import Callable
from typing import Any


def until(happened: Callable[[], Any], seconds: float = 120) -> Any:
    """What `happened` returns, once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found
