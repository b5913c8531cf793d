"""One process for each mode of the graph-break benchmark. It does what it is asked, and nothing between two questions."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import one_line

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "0",
    "TORCHDYNAMO_DISABLE": "0",
}
IMPORTED = (
    "benchmarks.graph_break_work",
    "peft.tuners.lora.bnb",
    "torch._inductor.compile_fx",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.llama.modeling_llama",
)


@dataclass(frozen=True)
class Model:
    """case: "llama", "gpt-oss", "moe" or "straight line"; count: of its layers, or of experts; tokens: of a sequence, or rows."""

    case: str
    hidden: int
    count: int
    tokens: int
    backend: str = "inductor"
    fullgraph: bool = False


class Mode:
    """The process that runs models one way. `choice` is graph_break's; None is the global disable."""

    def __init__(self, name: str, choice: str | None, pipe: Connection, caches: Path) -> None:
        self.name, self.choice, self.pipe, self.caches = name, choice, pipe, caches

    def open(self, model: Model, choice: str | None = None) -> None:
        """Build this model in the place of the one before; `choice` is another than the mode's for once."""
        self.ask("open", model, choice or self.choice, self.caches)

    def ask(self, what: str, *arguments: Any) -> Any:
        """What a method of graph_break_work.Work returns; RuntimeError with what it raised, in the mode's name."""
        self.pipe.send((what, arguments))
        try:
            went_well, answer = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name}: its process has ended") from None
        if not went_well:
            raise RuntimeError(f"{self.name}: {answer}")
        return answer


@contextmanager
def processes(choices: Mapping[str, str | None], caches: Path) -> Iterator[dict[str, Mode]]:
    """One for each name, forks of a process that has imported what they need, which takes longer than most of the rest."""
    context = multiprocessing.get_context("spawn")
    pipes = {name: context.Pipe() for name in choices}
    theirs = {name: (pipe, choices[name]) for name, (_, pipe) in pipes.items()}
    server = context.Process(target=fork_all, args=(list(theirs.values()),))
    server.start()
    for pipe, _ in theirs.values():
        pipe.close()
    try:
        yield {name: Mode(name, choice, pipes[name][0], caches) for name, choice in choices.items()}
    finally:
        for ours, _ in pipes.values():
            ours.close()
        server.join()


def fork_all(modes: list[tuple[Connection, str | None]]) -> None:
    """A process for each mode; returns when all of them have ended."""
    os.environ.update(ENVIRONMENT)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    children = []
    for pipe, choice in modes:
        others = [other for other, _ in modes if other is not pipe]
        children.append(context.Process(target=serve, args=(pipe, others, choice)))
        children[-1].start()
    for pipe, _ in modes:
        pipe.close()
    for child in children:
        child.join()


def serve(pipe: Connection, others: list[Connection], choice: str | None) -> None:
    """Answer until the other end of the pipe is closed."""
    for other in others:  # else the end of one process would not be seen while another lives
        other.close()
    if choice is None:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # which torch reads at each call of torch.compile
    from benchmarks.graph_break_work import Work

    work = None
    while True:
        try:
            what, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = None
            if what == "open":
                work = None  # the one before, whose memory is wanted
                work = Work(*arguments)
            else:
                answer = getattr(work, what)(*arguments)
        except Exception as error:  # noqa: BLE001 - handed to the parent, which raises it
            pipe.send((False, one_line(error)))
        else:
            pipe.send((True, answer))
