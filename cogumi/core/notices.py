"""What a notebook sees while a function works: a line that says what it does, and widgets that answer."""

import inspect
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

at_work = threading.Lock()  # a function that calls another one has said enough


@contextmanager
def show_seconds(what: str) -> Iterator[None]:
    """Show `what` in the cell's output at once, and how long it took when the block, or decorated function, has ended."""
    if not is_notebook() or not at_work.acquire(blocking=False):
        yield
        return
    from IPython.display import display

    began, line = time.monotonic(), display({"text/plain": f"{what} ..."}, raw=True, display_id=True)
    try:
        yield
    finally:
        line.update({"text/plain": f"{what}: {time.monotonic() - began:.0f} s"}, raw=True)
        at_work.release()


def show_stage(wanted: bool, what: str) -> None:
    """In a terminal, say on standard error what begins now. A notebook has its line of `show_seconds`."""
    if wanted and sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)


@contextmanager
def show_import() -> Iterator[None]:
    """The line for a block that imports torch and transformers, unless they are there already."""
    with nullcontext() if "torch" in sys.modules else show_seconds("torch and transformers are being imported"):
        yield


def is_notebook() -> bool:
    """Whether this is a notebook, and not a terminal: then IPython has a kernel."""
    return current_kernel() is not None


def current_kernel() -> Any | None:
    """The kernel that this process is, if it is one."""
    python = sys.modules.get("IPython")
    return getattr(python.get_ipython(), "kernel", None) if python is not None else None


# --------------------------------------------------------------------------------------------- a cell that waits answers
# ipykernel 7 hands the messages of a page to the main thread, which a cell occupies. `sleep_and_answer` takes them while it
# waits: those about widgets are answered, and all others are handed on to run after the cell, in the order in which they came.

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
