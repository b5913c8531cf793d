"""Changes to other people's code, one file each: `apply()`, `undo()`, `status()`, and a test that fails when upstream moves."""

from dataclasses import dataclass

from cogumi.patches import fused_head as fused_head
from cogumi.patches import gspo as gspo
from cogumi.patches.status import PatchStatus

__all__ = ["PatchReport", "PatchStatus", "patch"]


@dataclass(frozen=True)
class PatchReport:
    """What was patched, what was left alone, and why."""

    patches: tuple[PatchStatus, ...]

    def __str__(self) -> str:
        return "\n".join(f"{'patched' if p.applied else 'left alone'} {p.name}: {p.reason}" for p in self.patches)


def patch(rl: bool = True) -> PatchReport:
    """Make TRL accept `loss_type="gspo"`, and train where there is no GPU. Safe to call more than once.

    `rl=False` changes nothing and reports the present state.
    """
    modules = (gspo, fused_head)
    return PatchReport(tuple(module.apply() if rl else module.status() for module in modules))
