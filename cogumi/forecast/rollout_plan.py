"""vLLM's engine beside the trainer on one card: what of it is chosen, and whether it starts and fits.

Two moments are planned. In the rollout the engine is awake beside the trainer's weights, adapter and optimizer. In a
training step it holds its share, or asleep only its CUDA graphs. It starts once the trainer's weights are loaded, and
refuses where less than its share is free (vllm 0.31, vllm/v1/worker/utils.py, request_memory).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cogumi.config.schema import RunConfig
from cogumi.core.formatting import format_memory
from cogumi.forecast.memory_forecast import MemoryForecast, Target
from cogumi.forecast.preflight_report import Line
from cogumi.forecast.vllm_forecast import Engine, forecast_engine
from cogumi.methods import gspo
from cogumi.methods.auto_settings import (
    MOMENTS,
    MOMENTS_8BIT,
    Choice,
    Load,
    Machine,
    choose,
    is_open,
    with_values,
)
from cogumi.methods.step_split import is_planned
from cogumi.rl.guards import context_of
from cogumi.rl.memory_plan import GRAPHS, USABLE, VLLM_SHARE, engine_bytes, samples_beside

SHARE, SLEEP, LENGTH = (
    "train.vllm_gpu_memory_utilization",
    "train.vllm_enable_sleep_mode",
    "train.vllm_max_model_length",
)
STEP = 16  # tokens to which the longest sequence is rounded up: a block of the KV cache
ELSEWHERE = (
    "drop train.use_vllm, and transformers samples with the trainer's own weights; or set train.vllm_mode: server"
)


@dataclass(frozen=True)
class Shares:
    """The shares, in hundredths, with which the engine starts and both moments fit: from `least` to `most`."""

    least: int
    most: int

    def __bool__(self) -> bool:
        return self.least <= self.most


@dataclass(frozen=True)
class RolloutPlan:
    """An engine beside a trainer, in bytes. share: of the card. sleeps: in a training step.

    loaded: of the trainer when the engine starts. resident: of the trainer in a rollout, with the optimizer. step: of the
    trainer at its peak in a training step. free: of the card for both.
    """

    engine: Engine
    share: float
    sleeps: bool
    loaded: int
    resident: int
    step: int
    free: int

    @property
    def awake(self) -> int:
        return self.engine.size_of(self.share)

    @property
    def rollout(self) -> int:
        return self.resident + self.awake

    @property
    def cannot_start(self) -> str:
        """Why the engine refuses to start; "" where it starts."""
        engine, asked = self.engine, f"{SHARE}: {self.share:g} of the card is {format_memory(self.awake)}"
        if engine.weights >= self.awake:
            return f"{asked}, and the engine's weights alone need {format_memory(engine.weights)}: it does not start"
        if self.loaded + self.awake > self.free:
            left = format_memory(max(0, self.free - self.loaded))
            return f"{asked}, and the trainer, which is loaded first, leaves {left} free: the engine does not start"
        if engine.needed > self.awake:
            cache = format_memory(max(0, self.awake - engine.fixed))
            one = (
                f"one sequence of {engine.length:,} tokens needs {format_memory(engine.cache.sequence(engine.length))}"
            )
            return f"{asked}, which leaves {cache} for the KV cache, and {one}: the engine does not start"
        return ""

    @property
    def fits(self) -> bool:
        return not self.cannot_start and self.rollout <= self.free

    def shares(self, sleeps: bool) -> Shares:
        """With which the engine starts and fits, with or without sleep."""
        engine, beside = self.engine, self.resident if sleeps else max(self.resident, self.step)
        most = math.floor(100 * (self.free - beside) / engine.card)
        if sleeps and self.step + GRAPHS > self.free:
            most = 0
        return Shares(math.ceil(100 * engine.needed / engine.card), min(most, 100))

    @property
    def fix(self) -> str:
        """The change with which the engine starts and both moments fit, the mildest first."""
        for sleeps in dict.fromkeys((self.sleeps, False, True)):
            if found := self.shares(sleeps):
                best = min(found.most, max(found.least, round(100 * self.engine.share_of(self.engine.useful))))
                mode = f"{SLEEP}: {str(sleeps).lower()} and " if sleeps != self.sleeps else ""
                return f"set {mode}{SHARE}: {best / 100:g}"
        return ELSEWHERE

    def as_dict(self) -> dict[str, Any]:
        engine = self.engine
        sizes = {"weights": engine.weights, "working": engine.working, "graphs": GRAPHS, "engine": self.awake}
        numbers = {"share": self.share, "sleeps": self.sleeps, "at_once": engine.at_once(self.share)}
        numbers |= {"smallest_share": engine.share_of(engine.needed), "useful_share": engine.share_of(engine.useful)}
        certain = engine.weights >= self.awake or self.loaded + self.awake > engine.card
        return sizes | numbers | {"rollout": self.rollout, "free": self.free, "cannot_start": certain}


def describe_rollout(plan: RolloutPlan) -> Line:
    """The line on the rollout, in which the engine is awake."""
    engine, cache = plan.engine, plan.engine.cache
    kept = plan.awake - engine.fixed
    parts = f"weights {format_memory(engine.weights)}, KV cache {format_memory(max(0, kept))}, "
    parts += f"working memory {format_memory(engine.working)}, CUDA graphs {format_memory(GRAPHS)}"
    said = f"{format_memory(plan.rollout)} of {format_memory(plan.free)} in the rollout: the trainer's "
    said += f"{format_memory(plan.resident)} and {plan.share:g} of the card, {format_memory(plan.awake)} ({parts})"
    said += f"; {engine.at_once(plan.share):,} of {engine.rows:,} completions of {engine.length:,} tokens at once, "
    said += f"{cache.token_bytes / 2**10:,.0f} KiB a token; it starts from {engine.share_of(engine.needed):g}, and "
    most = engine.share_of(engine.useful)
    said += f"from {most:g} on all run at once" if most <= 1 else "for all at once the card is too small"
    said += f"; asleep it keeps about {format_memory(GRAPHS)}" if plan.sleeps else "; beside a step it stays awake"
    if why := plan.cannot_start:
        return Line("vllm", why, "red", plan.fix)
    return Line("vllm", said) if plan.fits else Line("vllm", said, "red", plan.fix)


def describe_server(engine: Engine) -> Line:
    """The line on a server's card, taken to be of the same kind."""
    size = f"{format_memory(engine.needed)}, for all {engine.rows:,} completions at once {format_memory(engine.useful)}"
    said = f"a server of its own takes nothing of this card; of a card like it, it needs at least {size}"
    if engine.needed > engine.card:
        return Line("vllm", said, "red", "serve it from a larger card, or from several with --tensor-parallel-size")
    share = min(0.9, max(engine.share_of(engine.needed), engine.share_of(engine.useful)))
    asked = f"--gpu-memory-utilization {share:g} --max-model-len {engine.length}"
    return Line("vllm", f"{said}: vllm serve with {asked}")


# ---------------------------------------------------------------------------------------------------------- what is chosen


def choose_with_engine(
    run: RunConfig, machine: Machine, load: Load, config: Any, longest: Callable[[], int]
) -> list[Choice]:
    """What the run leaves open of vLLM, then what it leaves open otherwise, for the memory that the engine leaves.

    config: the base's. longest: gives the tokens of the longest prompt.
    """
    if run.cogumi.method != "gspo" or not samples_beside(run.train):
        return choose(run, machine, load)
    choices = [choice for choice in [choose_length(run, config, longest())] if is_open(run, choice.key)]
    run = with_values(run, choices)
    if machine.total_bytes:
        length = int(run.train["vllm_max_model_length"])
        engine = forecast_engine(run, config, length, machine.capability, machine.total_bytes)
        if engine is not None:
            choices += choose_share(run, machine, load, engine)
        run = with_values(run, choices)
        left = machine.free_bytes - engine_bytes(run.train, machine.total_bytes)
        machine, load = replace(machine, free_bytes=max(0, left)), load_beside(run, load, length)
    return choices + choose(run, machine, load)


def choose_length(run: RunConfig, config: Any, longest: int) -> Choice:
    """The longest sequence: vLLM's own is the model's whole context, of which one sequence has to fit."""
    completion, context = int(gspo.setting(run, "max_completion_length")), context_of(config)
    wanted = math.ceil((longest + completion) / STEP) * STEP
    why = f"the longest prompt has {longest:,} tokens and a completion up to {completion:,}"
    if context is not None:
        wanted, why = min(wanted, context), f"{why}; vLLM would plan for {context:,}"
    return Choice(LENGTH, wanted, why)


def choose_share(run: RunConfig, machine: Machine, load: Load, engine: Engine) -> list[Choice]:
    """The share and whether the engine sleeps: it does where it and a step do not fit beside each other, and else not."""
    plan = estimate_plan(run, machine, load, engine)
    given, hundredths = not is_open(run, SHARE), round(100 * plan.share)
    rooms = {sleeps: plan.shares(sleeps) for sleeps in (False, True)}
    holds = {each: room.least <= hundredths <= room.most if given else bool(room) for each, room in rooms.items()}
    # Asleep an engine loses the base, of which an adapter that is handed over alone brings nothing back.
    may_sleep = is_open(run, SLEEP) and run.cogumi.sampler_weights == "merged"
    sleeps = holds[True] and not holds[False] if may_sleep else plan.sleeps
    room = rooms[sleeps]
    best = max(room.least, min(round(100 * engine.share_of(engine.useful)), room.most))
    if is_planned(run) and not sleeps and room:
        # The planner cuts the micro-batch to what is left: it gets at least half of what the KV cache could have.
        best = max(room.least, min(best, (room.least + room.most) // 2))
    share = plan.share if given else min(best, 95) / 100
    held = f"{engine.at_once(share):,} of {engine.rows:,} completions of {engine.length:,} tokens at once"
    parts = f"weights {format_memory(engine.weights)}, and KV cache for {held}"
    step, whole = (format_memory(size) for size in (plan.step, engine.size_of(share)))
    beside = f"a step is estimated at {step}, the engine takes {whole}, and {format_memory(plan.free)} are free"
    found = [Choice(SHARE, share, f"{parts}; it starts from {engine.share_of(engine.needed):g}")]
    found.append(Choice(SLEEP, sleeps, beside))
    return [choice for choice in found if is_open(run, choice.key)]


def load_beside(run: RunConfig, load: Load, length: int) -> Load:
    """What a step asks at least: one document where the planner cuts the micro-batch. length: of the longest sequence."""
    cut = is_planned(run) and not run.train.get("per_device_train_batch_size")
    return replace(load, length=length, micro_batch=1 if cut else load.micro_batch)


def estimate_plan(run: RunConfig, machine: Machine, load: Load, engine: Engine) -> RolloutPlan:
    """The plan by the estimates of `auto_settings`, before a step has been forecast."""
    moments = MOMENTS_8BIT if "8bit" in str(run.train.get("optim") or "") else MOMENTS
    # Of every weight the gradient is counted too, and between two steps there is none.
    loaded = load.weights // 2 if run.cogumi.tuning == "full" else load.weights
    held = moments * load.trained
    load = load_beside(run, load, engine.length)
    step = load.weights + held + load.step(checkpointing=run.train.get("gradient_checkpointing") is not False)
    free = int(USABLE * machine.free_bytes)
    return RolloutPlan(engine, *share_of(run), loaded, loaded + held, step, free)


def forecast_rollout(
    run: RunConfig, config: Any, memory: MemoryForecast, target: Target, longest: int
) -> RolloutPlan | None:
    """The plan of a run whose step was forecast; None where the engine is not beside it, or its cache is not known."""
    if not samples_beside(run.train) or not target.on_card:
        return None
    engine = forecast_engine(
        run, config, longest_sequence(run, config, longest), target.machine.capability, target.total
    )
    if engine is None:
        return None
    loaded, resident = (size + memory.workspace for size in (memory.loaded, memory.resident))
    return RolloutPlan(engine, *share_of(run), loaded, resident, memory.peak - memory.vllm, target.free)


def estimate_rollout(run: RunConfig, config: Any, load: Load, target: Target, longest: int) -> RolloutPlan | None:
    """The plan of a run whose step cannot be forecast, by estimates; None as above."""
    if not samples_beside(run.train) or not target.on_card:
        return None
    length = longest_sequence(run, config, longest)
    engine = forecast_engine(run, config, length, target.machine.capability, target.total)
    return None if engine is None else estimate_plan(run, target.machine, load, engine)


def describe_sampler(run: RunConfig, config: Any, plan: RolloutPlan | None, target: Target, longest: int) -> list[Line]:
    """The line on vLLM, none where it does not sample."""
    if run.cogumi.method != "gspo" or not run.train.get("use_vllm"):
        return []
    if plan is not None:
        return [describe_rollout(plan)]
    if not target.on_card:
        space = "its KV cache is as large as VLLM_CPU_KVCACHE_SPACE says, in GiB"
        return [Line("vllm", f"on a CPU nothing of a card is shared: {space}", "unknown")]
    length = longest_sequence(run, config, longest)
    engine = forecast_engine(run, config, length, target.machine.capability, target.total)
    if engine is None:
        said = f"how large the KV cache of {config.model_type} is, is not known here: the share is taken as configured"
        return [Line("vllm", said, "unknown", f"vLLM says at its start what {SHARE} leaves for it")]
    return [describe_server(engine)]


def longest_sequence(run: RunConfig, config: Any, longest: int) -> int:
    """`train.vllm_max_model_length`, or without it vLLM's own, the model's context; of a server what would be chosen."""
    given = run.train.get("vllm_max_model_length")
    if given is None and samples_beside(run.train):
        given = context_of(config)
    return int(given or choose_length(run, config, longest).value)


def share_of(run: RunConfig) -> tuple[float, bool]:
    """(the share, whether the engine sleeps) of a config, or TRL's."""
    share = run.train.get("vllm_gpu_memory_utilization")
    return float(VLLM_SHARE if share is None else share), bool(run.train.get("vllm_enable_sleep_mode"))
