"""Parameters of a model that its checkpoint does not give, which transformers fills with random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from cogumi.core.errors import UsageError


@dataclass(frozen=True)
class Fault:
    """A parameter that would not be loaded.

    stored: its shape or dtype in the checkpoint, "" where it is missing. needed: the shape or dtype that the model has.
    tensor: a stored tensor whose absence explains it, else None.
    """

    parameter: str
    stored: str
    needed: str
    tensor: str | None = None

    @property
    def is_missing(self) -> bool:
        return not self.stored or self.tensor is not None

    def __str__(self) -> str:
        if self.tensor is not None:
            return f"{self.tensor} is missing, a part of {self.parameter} {self.needed}"
        if self.stored:
            return f"{self.parameter} is {self.stored} where {self.needed} is needed"
        return f"{self.parameter} {self.needed} is missing, which transformers fills with random numbers"


def incomplete(name: str, architecture: str, faults: Sequence[Fault], key: str = "") -> UsageError:
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    message = f"base {name} is not a whole {architecture}: {faults[0]}{more}"
    return UsageError(message, key=key, fix="download it again, or correct its config.json")
