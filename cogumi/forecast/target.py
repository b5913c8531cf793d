"""The machine that a run is planned for: this one, or a card by its name."""

from dataclasses import dataclass

import torch

from cogumi.methods.auto_settings import Machine
from cogumi.stack.gpus import Card, card_called, card_of

# CUDA's own part of a card, before the first tensor: about 0.5 GiB, kernels being loaded as they are needed.
CONTEXT = 512 * 2**20
PACKAGES = frozenset({"bitsandbytes"})  # of those that decide, what the lane for cards brings (requirements/stable.in)


@dataclass(frozen=True)
class Target:
    """card: None where it is not in the table, or there is no GPU. free: bytes that the run may take. named: not this machine."""

    machine: Machine
    card: Card | None
    free: int
    named: bool = False

    @property
    def on_card(self) -> bool:
        return self.machine.capability is not None

    def __str__(self) -> str:
        return f"{self.machine.name}, {self.free / 2**30:.1f} GiB free"


def target_of(card: str | None) -> Target:
    """This machine, or a card by name with nothing else on it. Raises UsageError for a card that is not known."""
    if card is None:
        machine = Machine.here()
        return Target(machine, card_of(machine.name), machine.free_bytes)
    known = card_called(card)
    free = known.bytes - CONTEXT
    return Target(Machine(known.name, known.capability, free, PACKAGES), known, free, named=True)


def dtype_of(target: Target, wanted: str) -> torch.dtype:
    """What `model.dtype` means there: `auto` is bfloat16 on a card that has it, float32 elsewhere (models/loading.py)."""
    if wanted == "auto":
        return torch.bfloat16 if target.machine.bf16 else torch.float32
    found: torch.dtype = getattr(torch, wanted)
    return found
