"""`cogumi.patch`: which of the patches a process takes, and the watch over each GSPO trainer."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from cogumi.core.errors import UsageError, require_extra
from cogumi.core.formatting import pip_command
from cogumi.patches import PatchStatus, gspo_loss, unsloth_rl, vllm_engine
from cogumi.patches import graph_break as four_bit
from cogumi.patches.trl_internals import losses_need_triton
from cogumi.stack.gpus import disable_cudnn_attention

__all__ = ["PatchReport", "PatchStatus", "patch"]


@dataclass(frozen=True)
class PatchReport:
    """What was patched, what was left alone, and why."""

    patches: tuple[PatchStatus, ...]

    def __str__(self) -> str:
        return "\n".join(f"{'patched' if p.applied else 'left alone'} {p.name}: {p.reason}" for p in self.patches)


def patch(
    rl: bool = True,
    graph_break: str = "auto",
    accept: Iterable[str] | None = None,
    backend: Literal["auto", "unsloth", "trl"] = "auto",
) -> PatchReport:
    """Patch in unsloth's trainer on CUDA, `loss_type="gspo"`, vLLM's engine and 4-bit layers that compile.

    Call it before importing trl, transformers or peft. A second call patches nothing twice. It also has torch prefer other
    attention to that of a cuDNN below 9.26 (`cogumi.stack.gpus`). `rl=False` changes nothing
    of TRL and reports the present state. graph_break: "auto" tries what lets bitsandbytes' 4-bit layers compile, which
    takes some seconds. "off" changes nothing. A strategy of `cogumi.patches.graph_break.STRATEGIES` is applied untried.
    accept: names of findings (`cogumi.rl.guards.NAMES`), such as "own-objective", that this process's GSPO trainers
    let pass. A later call that names some replaces them, and None leaves them. backend: "trl" leaves unsloth out, for
    runs with `cogumi.backend: trl`; "unsloth" takes it without CUDA too. Raises UsageError where unsloth would come too
    late, for another graph_break and for a name that is no finding.
    """
    require_extra("trl", "train")
    disable_cudnn_attention()
    modules = (unsloth_rl, gspo_loss, vllm_engine)  # unsloth first: it puts classes of its own on trl
    of_trl = tuple(
        (module.apply(backend) if module is unsloth_rl else module.apply()) if rl else module.status()
        for module in modules
    )
    if rl:
        gspo_loss.watch_trainers(watch_trainer)
        if losses_need_triton():
            problem = f"TRL {version('trl')} computes its losses in Triton alone, which needs a GPU"
            raise UsageError(problem, fix=pip_command("install 'trl>=1.16'"))
    if accept is not None:
        from cogumi.rl.guards import accept_findings  # imports transformers, and unsloth has to be first

        accept_findings(accept)
    return PatchReport((*of_trl, four_bit.apply(graph_break)))


def watch_trainer(trainer: Any) -> None:
    from cogumi.rl.watch import watch

    watch(trainer)
