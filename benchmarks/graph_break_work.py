"""The processes of the graph-break benchmark: one for each mode, which opens one model after the other and makes steps.

A process does what it is asked, and nothing between two questions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from benchmarks import graph_break_models as models
from benchmarks.harness import one_line, prepared_forks
from cogumi.compile.layers import compile_layers, decoder_layers, prepare
from cogumi.patches import graph_break

# Of rows and lengths: one after the other, so that what is guarded on does change.
BATCHES = 4
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "0",
}
IMPORTED = (
    "benchmarks.graph_break_work",
    "peft.tuners.lora.bnb",
    "torch._inductor.compile_fx",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.llama.modeling_llama",
)
# At ten times as much plain SGD is unstable, and gradients that agree to 1e-6 at equal weights are 1e-3 apart in 20 steps.
LEARNING_RATE = 0.05


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

    def __init__(self, name: str, choice: str | None, caches: Path) -> None:
        self.name, self.choice, self.caches = name, choice, caches
        self.process = ProcessPoolExecutor(1, prepared_forks(IMPORTED), initializer=begin, initargs=(choice,))

    def open(self, model: Model, choice: str | None = None) -> None:
        """Build this model in the place of the one before; `choice` is another than the mode's for once."""
        self.process.submit(open_model, model, choice or self.choice, self.caches).result()

    def ask(self, what: str, *arguments: Any) -> Any:
        """What a method of Work returns; RuntimeError with what it raised, in the mode's name."""
        went_well, answer = self.process.submit(ask_model, what, arguments).result()
        if not went_well:
            raise RuntimeError(f"{self.name}: {answer}")
        return answer


@contextmanager
def processes(choices: Mapping[str, str | None], caches: Path) -> Iterator[dict[str, Mode]]:
    modes = {name: Mode(name, choice, caches) for name, choice in choices.items()}
    try:
        yield modes
    finally:
        for mode in modes.values():
            mode.process.shutdown()


def begin(choice: str | None) -> None:
    os.environ |= ENVIRONMENT
    if choice is None:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # which torch reads at each call of torch.compile


opened: list[Work] = []  # in the process of a mode


def open_model(*arguments: Any) -> None:
    opened.clear()  # the one before, whose memory is wanted
    opened.append(Work(*arguments))


def ask_model(what: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, getattr(opened[0], what)(*arguments)
    except Exception as error:  # noqa: BLE001 - handed to the parent, which raises it; it may not be picklable
        return False, one_line(error)


@dataclass(frozen=True)
class Prepared:
    """strategy: what was put in place, "" where nothing was; seconds: of the first steps beyond what later ones take."""

    strategy: str
    reason: str
    seconds: float
    graphs: int
    breaks: int
    recompiles: int


class Work:
    """A model that makes steps in one mode."""

    def __init__(self, wanted: Model, choice: str | None, caches: Path) -> None:
        torch.set_num_threads(1)
        self.wanted, self.choice = wanted, choice
        self.model = self.build()
        self.steps_made = 0
        # What the model before had put in place.
        graph_break.undo()
        torch.compiler.reset()
        torch._dynamo.utils.clear_compilation_metrics()
        torch._dynamo.utils.counters.clear()
        if choice is not None:
            graph_break.apply(choice, self.model)
            # Of one strategy they hold the same code: what was chosen finds what was forced before.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / wanted.case / self.strategy)
            prepare(self.model)
            if self.is_transformer:
                compile_layers(self.model, wanted.backend)
            else:
                self.model.compile(backend=wanted.backend, fullgraph=wanted.fullgraph)
        else:  # asked for, and what the global disable is there to make nothing of
            for part in decoder_layers(self.model) or [self.model]:
                part.compile(backend=wanted.backend)

    def build(self) -> Any:
        hidden, count = self.wanted.hidden, self.wanted.count
        if self.wanted.case == "moe":
            return models.moe_layer(hidden, hidden, count)
        make = {"llama": models.llama, "gpt-oss": models.gpt_oss}.get(self.wanted.case, models.straight_line)
        return make(hidden, count)

    @property
    def is_transformer(self) -> bool:
        return self.wanted.case in ("llama", "gpt-oss")

    @property
    def strategy(self) -> str:
        verdict = graph_break.verdict()
        return "" if verdict is None else verdict.strategy

    # ------------------------------------------------------------------------------------------------------- one step

    def batch(self, number: int) -> Tensor:
        if self.is_transformer:
            return models.token_ids(self.model.config.vocab_size, 2, self.wanted.tokens, number)
        return models.hidden_rows(self.wanted.hidden, self.wanted.tokens, number)

    def loss(self, batch: Tensor) -> Tensor:
        if self.is_transformer:
            return self.model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]
        result = self.model(batch)
        return (result[0] if isinstance(result, tuple) else result).square().mean()

    def step(self) -> float:
        """Seconds of a forward and a backward; the gradients are those of this step alone."""
        self.model.zero_grad(set_to_none=True)
        batch = self.batch(self.steps_made % BATCHES)
        self.steps_made += 1
        begun = time.perf_counter()
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - begun

    # ------------------------------------------------------------------------------------------------ what is asked for

    def prepare(self) -> Prepared:
        """Compile by running every batch twice, which is also the warm-up."""
        seconds = [self.step() for _ in range(2 * BATCHES)]
        counted = torch._dynamo.utils.counters
        return Prepared(
            strategy=self.strategy,
            reason=graph_break.status().reason,
            seconds=sum(seconds) - len(seconds) * min(seconds),
            graphs=counted["stats"]["unique_graphs"],
            breaks=sum(counted["graph_break"].values()),
            recompiles=recompiles(),
        )

    def train(self, steps: int) -> tuple[list[float], list[Any], dict[str, int]]:
        """Losses and gradients (all in one row) of SGD steps, and how often an expert got no rows, if uncompiled."""
        trained = [each for each in self.model.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
        losses, gradients = [], []

        def run() -> None:
            for number in range(steps):
                optimizer.zero_grad()
                loss = self.loss(self.batch(number % BATCHES))
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
                gradients.append(torch.cat([gradient(each).flatten() for each in trained]).numpy())
                optimizer.step()

        if self.choice is not None:
            run()
            return losses, gradients, {}
        with models.counted_rows(self.model) as counts:
            run()
        return losses, gradients, dict(counts)


def gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def recompiles() -> int:
    """How often Dynamo compiled a frame again that it had compiled, since it was reset."""
    ids = [str(each.compile_id) for each in torch._dynamo.utils.get_compilation_metrics() if each.co_name is not None]
    return sum(int(each.rpartition("/")[2].partition("_")[0]) > 0 for each in ids)  # those without a name are backward
