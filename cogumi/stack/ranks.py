"""The processes of one training, of which the first decides and all act alike."""

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line

Result = TypeVar("Result")
# A wait for the first process is no fault: it may wait for space on a disk, or for a user who paused the training.
PATIENCE = timedelta(days=7)


def whole_tensor(weight: torch.Tensor) -> torch.Tensor:
    """The whole of a weight that FSDP2 shares out, for which all processes ask together; another one as it is."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()


def leave_groups() -> None:
    """Before Python ends: a thread of gloo's that is met by its end aborts the process, at times (status -6, or 134)."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


class Ranks:
    """This process among `count` of a training. index: its rank. One process sends nothing.

    What they tell each other goes over gloo, in a group of its own, so that no GPU is waited for. A peer that is gone is a
    RuntimeError in the others at once. All of them have to make an object of this class, and to call the same methods.
    """

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count
        self.group: Any = distributed.new_group(backend="gloo", timeout=PATIENCE) if count > 1 else None
        if count > 1:
            atexit.register(leave_groups)

    @property
    def leads(self) -> bool:
        return self.index == 0

    def tell(self, value: Any = None) -> Any:
        """What the first process gives, on all of them. value: anything that can be pickled; of the others it is not read."""
        if self.count > 1:
            box = [value]
            distributed.broadcast_object_list(box, src=0, group=self.group)
            (value,) = box
        return value

    def agree(self, answers: list[bool]) -> list[bool]:
        """What the first process answers, on all of them: `tell` in a third of the time, for what each step asks."""
        if self.count > 1:
            box = torch.tensor(answers)
            distributed.broadcast(box, src=0, group=self.group)
            answers = box.tolist()
        return answers

    def decide(self, function: Callable[[], Result]) -> Result:
        """What `function` returns or raises on the first process, on all of them. It is called there alone."""
        if not self.leads:
            return self.hear()  # type: ignore[no-any-return]
        try:
            result = function()
        except BaseException as error:
            self.refuse(error)
            raise
        self.answer(result)
        return result

    def hear(self) -> Any:
        """On the others: what the first one answers. Raises what it refuses."""
        result, refused = self.tell()
        if refused is not None:
            raise refused
        return result

    def answer(self, result: Any) -> None:
        """On the first: what the others hear."""
        self.tell((result, None))

    def refuse(self, error: BaseException) -> None:
        """On the first: what the others, which wait to hear, raise as well."""
        if isinstance(error, UsageError):
            self.tell((None, UsageError.like(error)))
        else:
            said = f"the first of {self.count} processes failed: {type(error).__name__}: {one_line(error)}"
            self.tell((None, RuntimeError(said)))

    def largest(self, number: int) -> int:
        """The largest of what the processes give."""
        if self.count > 1:
            box = torch.tensor([number])
            distributed.all_reduce(box, op=distributed.ReduceOp.MAX, group=self.group)
            number = int(box.item())
        return number

    def gather(self, value: Result) -> list[Result]:
        """What each process gives, in the order of ranks, on all of them."""
        if self.count == 1:
            return [value]
        box: list[Any] = [None] * self.count
        distributed.all_gather_object(box, value, group=self.group)
        return box

    def total(self, numbers: list[float]) -> list[float]:
        """The sums of what the processes give."""
        if self.count > 1:
            box = torch.tensor(numbers, dtype=torch.float64)
            distributed.all_reduce(box, group=self.group)
            numbers = box.tolist()
        return numbers
