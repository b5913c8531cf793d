"""The line on several cards: what each holds under either way to share the model, which to take, and what a step sends.

Everything is computed. No run on several cards has been compared with it.
"""

from typing import Any

from cogumi.config.schema import RunConfig
from cogumi.core.formatting import format_bytes, format_memory
from cogumi.forecast.memory_forecast import MemoryForecast, Target
from cogumi.forecast.preflight_report import Line
from cogumi.rl.memory_plan import USABLE

WAYS = {"none": "none (DDP)", "fsdp2": "fsdp2"}


def plan_processes(run: RunConfig, memory: MemoryForecast, target: Target) -> dict[str, Any]:
    """The figures. run: as each process trains it. peaks: bytes of each card. sent: bytes that each sends in a step.
    seconds: of sending at the link of the card, None for a card that is not known. take: the value of cogumi.sharding.

    zero3 is the arithmetic of ZeRO's stage 3 (arXiv:1910.02054): a share of weights, adapter, gradients and optimizer,
    whole activations, and nothing gathered. It was not run.
    """
    shared, work = memory.shared, memory.work
    assert shared is not None
    peaks = {way: memory.under(way).peak for way in WAYS}
    sent = {way: shared.sent(way, work.micro_batches) for way in WAYS}
    seconds = {way: size / target.card.link if target.card else None for way, size in sent.items()}
    figures = {"count": shared.count, "sharding": run.cogumi.sharding, "take": choose_way(peaks, memory.free)}
    return figures | {"peaks": peaks, "zero3": memory.zero3, "sent": sent, "seconds": seconds, "shared": vars(shared)}


def choose_way(peaks: dict[str, int], free: int) -> str:
    """DDP where it fits with room, for it sends least; else FSDP2 where that fits; else what is smaller."""
    if peaks["none"] <= USABLE * free:
        return "none"
    if peaks["fsdp2"] <= free:
        return "fsdp2"
    return min(peaks, key=lambda way: peaks[way])


def describe_processes(run: RunConfig, memory: MemoryForecast, target: Target, fix: str) -> Line:
    """Red where the run's own way does not fit, yellow where the other is to be taken. fix: where neither fits."""
    plan, work = plan_processes(run, memory, target), memory.work
    own, best, peaks = plan["sharding"], plan["take"], plan["peaks"]
    said = f"{plan['count']} processes share each step, each {work.rows} x {work.length} tokens"
    said += f" x {work.micro_batches} accumulated; " if work.micro_batches > 1 else "; "
    said += "of each one's " + format_memory(memory.free)
    takes = (
        f" {name} takes {format_memory(peaks[way])} and sends {describe_sent(plan, way)}" for way, name in WAYS.items()
    )
    said += ",".join(takes) + " a step, computed and not in the time"
    if peaks[own] > memory.free:
        return Line("processes", said, "red", describe_way(best) if peaks[best] <= memory.free else fix)
    if best != own:
        return Line("processes", said, "yellow", describe_way(best))
    return Line("processes", f"{said}; cogumi.sharding: {own} is the one to take")


def describe_sent(plan: dict[str, Any], way: str) -> str:
    seconds, said = plan["seconds"][way], format_bytes(plan["sent"][way])
    if seconds is None:
        return said
    return (
        f"{said} ({seconds:.1f} s)" if seconds >= 1 else f"{said} ({1000 * seconds:.{0 if seconds >= 0.01 else 2}f} ms)"
    )


def describe_way(way: str) -> str:
    reasons = {
        "none": "each card has room for the whole, and less is sent",
        "fsdp2": "each card keeps a share of the model",
    }
    return f"set cogumi.sharding: {way}; {reasons[way]}"
