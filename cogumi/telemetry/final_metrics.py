"""metrics.json: what a run came to, whether it went to its end or not."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cogumi.core.disk_space import spoken
from cogumi.core.errors import RefusedAtSetup
from cogumi.core.run_directory import FORECAST, read_jsonl, read_section, write_json
from cogumi.telemetry.heartbeat import Heartbeat
from cogumi.telemetry.stage_timer import Meter
from cogumi.telemetry.throughput import ROLLOUT, Throughput, gpu_peaks, peak_rss

log = logging.getLogger("cogumi")
FILE = "metrics.json"
FINAL = ("loss", "eval_loss", "reward")


@contextmanager
def measured(run_dir: Path, meter: Meter) -> Iterator[Heartbeat]:
    """While in the block the run's heart beats; at its end, however it comes, metrics.json says what the run came to."""
    meter.take_up(run_dir)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    heart = Heartbeat(run_dir, meter)
    refused = False
    try:
        with heart:
            yield heart
        if heart.throughput is not None:
            heart.throughput.read()
    except RefusedAtSetup:
        refused = True  # nothing was measured, and the directory goes unless there was something in it
        raise
    finally:
        if not refused:
            write_summary(heart)


def write_summary(heart: Heartbeat) -> None:
    """Asks nothing of the GPU: a run that lost it has a summary as well."""
    found = summary(heart)
    memory = found["memory"]
    if {"gpu_peak_allocated", "gpu_peak_forecast"} <= memory.keys():
        peak, forecast = memory["gpu_peak_allocated"], memory["gpu_peak_forecast"]
        log.info(
            "GPU memory: %s at its fullest, %s forecast (%+.1f %%)",
            spoken(peak),
            spoken(forecast),
            100 * (forecast / peak - 1),
        )
    try:
        write_json(heart.run_dir / FILE, found)
    except OSError as error:  # what went wrong first is what the run ends with
        log.error("%s could not be written: %s", heart.run_dir / FILE, error.strerror)


def summary(heart: Heartbeat) -> dict[str, Any]:
    """Seconds, tokens, cost: of all parts of the run. Rates: of its steps. Memory: of this process.

    `mfu` and `hfu` are of the steps without their rollouts; docs of the formula: cogumi/telemetry/throughput.py.
    `gpu_peak_forecast` is what the preflight said that `gpu_peak_allocated` would be.
    """
    meter, progress, throughput = heart.meter, heart.progress, heart.throughput
    found: dict[str, Any] = {
        "steps": progress.step,
        "max_steps": progress.steps,
        "elapsed_seconds": round(meter.elapsed(), 3),
        "seconds": {stage: round(seconds, 3) for stage, seconds in meter.seconds().items()},
        "price_per_hour": meter.price_per_hour,
        "cost": meter.cost(),
    }
    if throughput is not None:
        found |= rates(throughput)
    rows = read_jsonl(heart.run_dir / "metrics.jsonl")
    found["final"] = {
        key: next((row[key] for row in reversed(rows) if row.get(key) is not None), None) for key in FINAL
    }
    found["memory"] = {"peak_rss": peak_rss(), **{f"gpu_{key}": value for key, value in gpu_peaks().items()}}
    forecast = read_section(heart.run_dir / FORECAST, "preflight").get("figures", {}).get("memory")
    if forecast is not None:
        found["memory"] |= {"gpu_peak_forecast": forecast["tensors"] + forecast["workspace"]}
    return found


def rates(throughput: Throughput) -> dict[str, Any]:
    done = throughput.total
    found: dict[str, Any] = {
        "tokens": int(done.tokens),
        "tokens_with_padding": int(done.padded_tokens),
        "tokens_per_second": throughput.tokens_per_second(done),
        "step_seconds": round(done.step_seconds, 3),
    }
    if throughput.work is not None and done.tokens:
        context = done.squared / done.tokens
        found |= {
            "mean_context": round(context, 1),
            "flop_per_token": throughput.work.model(context),
            "weights_per_token": throughput.work.weights,
            "trained_weights_per_token": throughput.work.trained,
        }
    found |= {"peak_flops": throughput.peak, "mfu": throughput.mfu(done), "hfu": throughput.hfu(done)}
    if throughput.no_mfu:
        found["no_mfu"] = throughput.no_mfu
    if done.rollout_seconds:
        found |= {
            ROLLOUT + "_seconds": round(done.rollout_seconds, 3),
            "update_seconds": round(done.step_seconds - done.rollout_seconds, 3),
            "completions": int(done.completions),
            "completions_per_second": done.completions / done.rollout_seconds,
        }
    return found
