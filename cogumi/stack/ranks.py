"""Messages between the processes of one training: the first one decides and all act alike."""

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line

Result = TypeVar("Result")
# The first process may wait for space on a disk, or for a user who paused the training.
PATIENCE = timedelta(days=7)


def whole_tensor(weight: torch.Tensor) -> torch.Tensor:
    """Gather a weight that FSDP2 shards, on all processes together; return any other weight as it is."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()


def leave_groups() -> None:
    """Destroy the process group before Python ends: one of gloo's threads may abort the process otherwise."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


class Ranks:
    """This process (rank `index`) among the `count` of a training. One process sends nothing.

    Messages go over gloo in a group of their own, so that no GPU is waited for. If a process is gone, the others raise
    RuntimeError at once. All processes have to make an object of this class and call the same methods.
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
        """Return the first process's value (anything picklable) on all processes; the value of the others is ignored."""
        if self.count > 1:
            box = [value]
            distributed.broadcast_object_list(box, src=0, group=self.group)
            (value,) = box
        return value

    def agree(self, answers: list[bool]) -> list[bool]:
        """Return the first process's answers on all: `tell` in a third of the time, for use in each step."""
        if self.count > 1:
            box = torch.tensor(answers)
            distributed.broadcast(box, src=0, group=self.group)
            answers = box.tolist()
        return answers

    def decide(self, function: Callable[[], Result]) -> Result:
        """Call `function` on the first process alone; return or raise its outcome on all."""
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
        """Wait, on the other processes, for `answer` or `refuse` of the first one. Raises the error of `refuse`."""
        result, error = self.tell()
        if error is not None:
            raise error
        return result

    def answer(self, result: Any) -> None:
        self.tell((result, None))

    def refuse(self, error: BaseException) -> None:
        if isinstance(error, UsageError):
            self.tell((None, UsageError.like(error)))
        else:
            message = f"the first of {self.count} processes failed: {type(error).__name__}: {one_line(error)}"
            self.tell((None, RuntimeError(message)))

    def largest(self, number: int) -> int:
        if self.count > 1:
            box = torch.tensor([number])
            distributed.all_reduce(box, op=distributed.ReduceOp.MAX, group=self.group)
            number = int(box.item())
        return number

    def gather(self, value: Result) -> list[Result]:
        """Return the values of all processes, in the order of ranks."""
        if self.count == 1:
            return [value]
        box: list[Any] = [None] * self.count
        distributed.all_gather_object(box, value, group=self.group)
        return box

    def total(self, numbers: list[float]) -> list[float]:
        if self.count > 1:
            box = torch.tensor(numbers, dtype=torch.float64)
            distributed.all_reduce(box, group=self.group)
            numbers = box.tolist()
        return numbers
