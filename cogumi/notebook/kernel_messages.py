"""A cell that waits lets its kernel answer the page: widgets come back after a reload, and their buttons work.

ipykernel 7 hands the messages of a page to the main thread, which a cell occupies. `sleep_and_answer` takes them while it waits:
those about widgets are answered, and all others are handed on to run after the cell, in the order in which they came.
"""

import inspect
import threading
import time
from contextlib import suppress
from typing import Any

from cogumi.core.notices import current_kernel

ANSWERED = ("kernel_info_request", "comm_info_request", "comm_open", "comm_msg", "comm_close")
answering = threading.Lock()


def sleep_and_answer(seconds: float) -> None:
    """Sleep. In the main thread of an ipykernel 7, answer the page meanwhile. An interrupt ends the sleep."""
    until, here = time.monotonic() + seconds, find_kernel()
    if here is None or not answering.acquire(blocking=False):  # a button's function that waits was called from here
        time.sleep(seconds)
        return
    try:
        take_messages(here, until)
    except KeyboardInterrupt:
        # The socket was not read until it was empty: its event loop would be told of no further message.
        here.io_loop.add_callback(stream_of(here).flush)
        raise
    finally:
        answering.release()


def find_kernel() -> Any | None:
    """The kernel whose main thread this is, if its messages can be taken; None where there is only sleeping."""
    found = current_kernel()
    channel = getattr(found, "shell_channel_thread", None)
    if channel is None or threading.current_thread() is not channel.parent_thread:
        return None
    return found if callable(getattr(stream_of(found), "_recv_callback", None)) else None


def stream_of(kernel: Any) -> Any:
    """Where the main thread receives what the page sends."""
    return kernel.shell_channel_thread.manager.get_shell_channel_to_subshell_pair(None).to_stream


def take_messages(kernel: Any, until: float) -> None:
    """Take what comes until then. The socket is left empty: its event loop is told only of what comes to an empty one."""
    stream = stream_of(kernel)
    while stream.socket.poll(max(0, round(1000 * (until - time.monotonic())))):
        message = stream.socket.recv_multipart(copy=False)
        if message_type(kernel, message) in ANSWERED:
            answer_message(kernel, message)
        else:
            kernel.io_loop.add_callback(stream._recv_callback, message)  # which runs when the cell has ended


def message_type(kernel: Any, message: list[Any]) -> str:
    if len(message) == 1:  # a word of the kernel to itself
        return ""
    _, parts = kernel.session.feed_identities(message, copy=False)
    header: dict[str, Any] = kernel.session.deserialize(parts, content=False, copy=False)["header"]
    return str(header["msg_type"])


def answer_message(kernel: Any, message: list[Any]) -> None:
    """Do what the kernel does with a message between two cells, and say that it is busy with this cell again."""
    identities, parts = kernel.session.feed_identities(message, copy=False)
    request = kernel.session.deserialize(parts, copy=False)
    replies = kernel.shell_channel_thread.manager.get_subshell_to_shell_channel_socket(None)
    done = kernel.shell_handlers[request["header"]["msg_type"]](replies, identities, request)
    if inspect.iscoroutine(done):
        with suppress(StopIteration):  # it awaits nothing: one step is all of it
            done.send(None)
    for state, parent in (("idle", request), ("busy", kernel.get_parent("shell"))):
        kernel.session.send(kernel.iopub_socket, "status", {"execution_state": state}, parent=parent, ident=b"status")
