"""How far the log-probabilities of a sampler are from the trainer's, and what follows for GSPO. Needs vLLM (`.venv-vllm`).

transformers' generate, vLLM with merged weights and vLLM with the adapter apart sample from the small base with adapters of
20 steps of GSPO, three seeds. Each engine is a process of its own (`benchmarks.sampler_engine`), two at a time.

- What two engines of the same weights differ by, in float32, bfloat16 and float16, with the head in float32 too.
- What the corrections of `cogumi.sampler_correction` do to it, and to samples of weights that are 1, 4 and 16 steps old.
- What merging takes from the base and from the adapter: drift over rollouts, and the effect that rounding loses.
- What the check of the sampler (`cogumi/rl/sampling.py`) would see of engines that have the right weights.
- Seconds of a weight sync and tokens a second, merged beside adapter.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy
from numpy.typing import NDArray

from benchmarks.harness import Row, attempt, interleave, mean_row, missing, prepared_forks, ratio_row, row, values_row
from cogumi.config.presets import CORRECTIONS, PRESETS

Array = NDArray[Any]
NAME = "sampler"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two engines take the same core
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
IMPORTED = ("torch", "transformers", "trl", "peft", "datasets", "vllm", "benchmarks.sampler_engine")
SAMPLERS = ("transformers", "vLLM merged", "vLLM adapter")
DTYPES = ("float32", "bfloat16", "float16")
SIZES = (1e-4, 1e-3, 1e-2, 1e-1)
FIRST = (8, 32)  # of a completion's tokens, beside all of them
SPEED_TOKENS = 64


def run(quick: bool = False) -> Iterator[Row]:
    """`quick`: one seed, bfloat16 alone, no compiled graphs."""
    if find_spec("vllm") is None:
        yield missing(NAME, "-", "vllm; .venv-vllm/bin/python -m benchmarks sampler")
        return
    os.environ |= ENVIRONMENT
    from benchmarks import sampler_engine as engine

    context = prepared_forks(IMPORTED)
    with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as pool:
        steps = 17 if quick else engine.TRAINED
        trained = [pool.submit(engine.train_adapter, seed, steps) for seed in ((1,) if quick else (1, 2, 3))]
        adapters = [each.result() for each in trained]
        effects = [pool.submit(engine.rounded_effects, each[0], SIZES) for each in adapters]
        cases = {
            case: pool.submit(engine.measure_case, *work) for case, work in planned(engine, adapters, quick).items()
        }
        for case, future in cases.items():
            yield from attempt(NAME, case.name, partial(case_rows, case, future))
        yield row(NAME, "float32, fp32 head", "-", None, note="skipped: the head is in float32 without it")
        yield from attempt(NAME, "rounding", partial(effect_rows, effects))
    yield from attempt(NAME, "speed", partial(speed_rows, engine, context, adapters[0][0], quick))


def planned(engine: Any, adapters: list[Any], quick: bool) -> dict[Any, tuple[Any, ...]]:
    """case -> the arguments of `measure_case`: the ages of the weights beside 0, and whether the check is tried."""
    found = {}
    for sampler in SAMPLERS:
        for dtype in DTYPES:
            for fp32_head in (False, True):
                if (dtype == "float32" and fp32_head) or (quick and (dtype != "bfloat16" or fp32_head)):
                    continue
                case, with_vllm = engine.Case(sampler, dtype, fp32_head), sampler != "transformers"
                old = with_vllm and not fp32_head and (dtype == "bfloat16" or case.name == "vLLM merged, float32")
                found[case] = (case, adapters, engine.AGES if old else (), with_vllm and not fp32_head)
    if not quick:
        case = engine.Case("vLLM merged", "bfloat16", compiled=True)
        found[case] = (case, adapters, (), False)
    return found


# --------------------------------------------------------------------------------------------------------- the arithmetic


def mismatch(away: Array, mask: Array) -> dict[str, float]:
    """Figures of one rollout. away: (B, T) log-probability of the trainer minus the sampler's; mask: (B, T) real tokens.

    A sequence's ratio is exp of the mean over its tokens, as GSPO has it (arXiv:2507.18071, equation 7).
    """
    mask, away = mask.astype(bool), numpy.where(mask, away, 0.0)
    tokens, lengths = away[mask], mask.sum(1)
    ratios = numpy.exp(away.sum(1) / lengths)
    clip, token_clip = PRESETS["gspo"], PRESETS["grpo"]
    found = {
        "mean |difference|, nats a token": numpy.abs(tokens).mean(),
        "largest |difference|, nats": numpy.abs(tokens).max(),
        "sequence ratios, lowest": ratios.min(),
        "sequence ratios, highest": ratios.max(),
        "sequence ratios, standard deviation": ratios.std(),
        "token ratios, lowest": numpy.exp(tokens.min()),
        "token ratios, highest": numpy.exp(tokens.max()),
        "token ratios, standard deviation": numpy.exp(tokens).std(),
        "sequences outside GSPO's clip": outside(ratios, clip),
        "tokens outside GRPO's clip": outside(numpy.exp(tokens), token_clip),
        "tokens of a completion": lengths.mean(),
    }
    for count in FIRST:
        enough = lengths >= count
        if enough.sum() > 1:
            beginnings = numpy.exp(away[enough, :count].mean(1))
            found[f"sequence ratios of the first {count} tokens, standard deviation"] = beginnings.std()
    return {name: float(value) for name, value in found.items()}


def outside(ratios: Array, clip: dict[str, Any]) -> float:
    """The share of ratios that a clip acts on, or would with the other sign of the advantage."""
    return float(((ratios < 1 - clip["epsilon"]) | (ratios > 1 + clip["epsilon_high"])).mean())


def correction_weights(away: Array, mask: Array, mode: str, clip_min: float | None, clip_max: float | None) -> Array:
    """(N,) weights of TRL's correction (grpo_trainer.py, 1.15): of the tokens, or of the completions in a sequence mode."""
    level, kind = mode.split("_")
    away = numpy.where(mask, away, 0.0)
    weights = numpy.exp(away.sum(1) if level == "sequence" else away[mask.astype(bool)])
    low, high = clip_min or 0.0, clip_max or math.inf
    if kind == "truncate":
        return numpy.clip(weights, low, high)
    return numpy.where((weights < low) | (weights > high), 0.0, weights)


def effective_share(weights: Array) -> float:
    """(sum of w)^2 / (N x sum of w^2): 1 for equal weights, 1/N for one that counts alone."""
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())) if weights.any() else 0.0


def corrected(away: Array, mask: Array, name: str) -> tuple[float, float, float]:
    """The share of weights that a correction's bounds change; the effective sample size with it, and with no bounds."""
    settings = CORRECTIONS[name]
    weights = correction_weights(away, mask, **settings)
    free = correction_weights(away, mask, settings["mode"], None, None)
    return float((weights != free).mean()), effective_share(weights), effective_share(free)


# ----------------------------------------------------------------------------------------------------------- the rows


def case_rows(case: Any, future: Future[Any]) -> Iterator[Row]:
    found = future.result()
    rollouts = found["rollouts"]
    for seed in rollouts[0]:
        if "tis" in seed:
            check_against_trl(seed)
    measured = [mismatch(each["away"], each["mask"]) for each in rollouts[0]]
    for metric in measured[0]:
        yield mean_row(NAME, case.name, metric, [each[metric] for each in measured if metric in each])
    yield mean_row(NAME, case.name, "greedy tokens that are the trainer's too", found["greedy"])
    if "head" in found:
        note = f"vLLM {found['version']}, adapter in {', '.join(sorted(found['adapter']))}"
        yield row(NAME, case.name, "the engine's head", found["head"], note=note)
    yield row(NAME, case.name, "CPU of the process", found["seconds"], "s")
    if len(rollouts) > 1:
        for age, seeds in rollouts.items():
            yield from age_rows(f"{case.name}, {age} steps old", age, seeds)
    yield from probe_rows(case.name, found["probes"])
    for who, counts in found.get("drift", {}).items():
        for count, figures in counts.items():
            where = f"base under {who}'s merge, {case.dtype}, {count} rollouts"
            target = "<= 0" if who == "cogumi" else ""
            yield row(NAME, where, "weights that changed", figures["changed"], "share", target=target)
            yield row(NAME, where, "change of the weights / their norm", figures["relative"])
            yield row(NAME, where, "the base's log-probabilities moved by", figures["moved"], "nats a token")


def check_against_trl(rollout: dict[str, Array]) -> None:
    """Raise RuntimeError where the weights that TRL computed for this rollout are not ours."""
    mask, ours = rollout["mask"], correction_weights(rollout["away"], rollout["mask"], **CORRECTIONS["tis"])
    if (furthest := float(numpy.abs(rollout["tis"][mask] - ours).max())) > 1e-4:
        raise RuntimeError(f"TRL's weights of the correction are up to {furthest:.1e} away from those computed here")


def age_rows(where: str, age: int, seeds: list[dict[str, Array]]) -> Iterator[Row]:
    if age:
        measured = [mismatch(each["away"], each["mask"]) for each in seeds]
        for metric in ("mean |difference|, nats a token", "sequence ratios, standard deviation",
                       "sequences outside GSPO's clip", "tokens outside GRPO's clip"):  # fmt: skip
            yield mean_row(NAME, where, metric, [each[metric] for each in measured])
    for name, settings in CORRECTIONS.items():
        if "mode" not in settings:
            continue
        of = "completions" if settings["mode"].startswith("sequence") else "tokens"
        shares, kept, free = zip(*(corrected(each["away"], each["mask"], name) for each in seeds), strict=True)
        yield mean_row(NAME, where, f"{name}: {of} masked or truncated", shares, unit="share")
        yield mean_row(NAME, where, f"{name}: effective sample size", kept, unit=f"of {of}")
        yield mean_row(NAME, where, f"{name} without bounds: effective sample size", free, unit=f"of {of}")


def probe_rows(where: str, probes: list[dict[str, Any]]) -> Iterator[Row]:
    """What the check sees of an engine with the right weights. A move is named by the training steps that it is long."""
    if not probes:
        return
    yield mean_row(NAME, where, "check: difference, nats a token", [each["difference"] for each in probes])
    for move in probes[0]["moves"]:
        figures = [each["moves"][move] for each in probes]
        for name in ("moved", "lacking", "changed"):
            metric = {"moved": "moved, nats a token", "lacking": "share lacking", "changed": "values that changed"}[
                name
            ]
            yield mean_row(NAME, where, f"check, a move of {move} steps: {metric}", [each[name] for each in figures])


def effect_rows(effects: list[Future[Any]]) -> Iterator[Row]:
    found = [each.result() for each in effects]
    yield mean_row(NAME, "adapter", "|dW| / |W| after training", [each["own"] for each in found])
    for size in SIZES:
        of_size = [each["sizes"][size] for each in found]
        where = f"adapter of |dW| / |W| = {size:g}"
        yield mean_row(NAME, where, "moves log-probabilities by, nats a token", [each["moved"] for each in of_size])
        for way in (name for name in of_size[0] if name != "moved"):
            yield mean_row(NAME, where, f"{way}: share lacking", [each[way]["lacking"] for each in of_size])
            yield mean_row(NAME, where, f"{way}: slope", [each[way]["slope"] for each in of_size])


def speed_rows(engine: Any, context: Any, adapter: Any, quick: bool) -> Iterator[Row]:
    """Two engines that wait for each other: a sync and a rollout of one, then of the other."""
    links: dict[str, Any] = {}
    workers = []
    for sampler in SAMPLERS[1:]:
        links[sampler], theirs = context.Pipe()
        case = engine.Case(sampler, "bfloat16", compiled=not quick)
        worker = context.Process(target=engine.serve_speed, args=(case, adapter, SPEED_TOKENS, theirs), daemon=True)
        worker.start()
        theirs.close()  # so that an engine that failed ends what is read from it
        workers.append(worker)
    for link in links.values():
        link.recv()

    def ask(link: Any, what: str) -> float:
        link.send(what)
        return float(link.recv())

    merged, apart = SAMPLERS[1:]
    count = len(engine.PROMPTS) * engine.GROUP * SPEED_TOKENS
    figure: dict[str, tuple[str, str, Callable[[float], float]]] = {
        "sync": ("weight sync", "s", float),
        "rollout": ("rollout", "tokens/s", lambda seconds: count / seconds),
    }
    for what, (metric, unit, convert) in figure.items():
        times = interleave({name: partial(ask, link, what) for name, link in links.items()}, 2 if quick else 6)
        for name, seconds in times.items():
            yield values_row(NAME, f"speed, {name}, bfloat16", metric, [convert(each) for each in seconds], unit)
        yield ratio_row(NAME, "speed, bfloat16", f"time of a {metric}, adapter / merged", times, apart, merged)
    for link in links.values():
        link.send(None)
    for worker in workers:
        worker.join(30)
