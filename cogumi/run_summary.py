"""A run's status in words: a line, a few sentences, one screen; control characters in it are shown, not obeyed."""

import os
import time
from pathlib import Path
from typing import Any

from cogumi.run_status import BROKEN_OFF, Status, read_if_there, tail_lines
from cogumi.words import duration, flag_sentence, visible

BAR_WIDTH = 40
LOG_LINES = 8
# Of what trainers log, in this order; the rest is in metrics.jsonl.
SHOWN = (
    "loss",
    "eval_loss",
    "reward",
    "reward_std",
    "rewards/margins",
    "rewards/accuracies",
    "grad_norm",
    "learning_rate",
    "entropy",
    "kl",
)


def in_short(status: Status) -> str:
    """One line: where, what, how far."""
    said = [f"{near_here(status.run_dir)}: {state_of(status)}"]
    if status.step is not None and status.steps is not None:
        said.append(f"step {status.step}/{status.steps}")
    if status.eta_seconds is not None and not status.ended:
        said.append(f"{duration(status.eta_seconds)} to go")
    if status.alive and not status.ended:
        said.append(f"process {status.pid}")
    return visible(", ".join(said))


def in_words(status: Status) -> str:
    """The line, with what was checked, why it ended and what it would go on from."""
    judged = [checked(status), f"flags: {flagged(status)}"] if status.ended and flagged(status) else []
    told = [
        each for each in missed(checks(status)) if each["figure"] not in (status.reason or "")
    ]  # which is said below
    said = "; ".join([in_short(status), *filter(None, judged), *map(failure, told)])
    if status.reason:
        said += f"; {' '.join(status.reason.split())}"
    if status.state in BROKEN_OFF:
        said += f"; {how_to_go_on(status)}"
    merged = Path(status.run_dir) / "merged"
    if status.ended and merged.is_dir():
        said += f"; the merged model is {near_here(str(merged))}"
    return visible(said)


def how_to_go_on(status: Status) -> str:
    """Of a run that was broken off: what it has, and what starting it again does."""
    there = f"the newest checkpoint is {status.checkpoint}" if status.checkpoint else "there is no checkpoint yet"
    return f"{there}; started again with the same words it {'goes on' if status.checkpoint else 'begins anew'}"


def on_a_screen(status: Status) -> str:
    """Everything worth a look, as plain text of some twenty lines."""
    lines = [in_short(status)]
    if status.reason:
        lines.append(f"  {' '.join(status.reason.split())}")
    if status.step is not None and status.steps:
        done = min(1.0, status.step / status.steps)
        bar = "#" * round(done * BAR_WIDTH)
        lines.append(f"[{bar:.<{BAR_WIDTH}}] {done:.0%}")
    if status.last_sign is not None and not status.ended:
        lines.append(f"last sign of life {duration(time.time() - status.last_sign)} ago")
    lines += [row for row in (figures(status), machine(status.heartbeat)) if row]
    if status.heartbeat.get("stalled"):
        lines.append(status.heartbeat["stalled"])
    lines += [f"{each['level']}: {each['name']}: {flag_sentence(each)}" for each in flags(status)]
    if status.state in BROKEN_OFF:
        lines.append(how_to_go_on(status))
    elif status.checkpoint:
        lines.append(f"newest checkpoint: {status.checkpoint}")
    lines += [f"FAIL  {failed(each)}" for each in missed(checks(status))]
    log = tail_lines(Path(status.log), size=LOG_LINES * 1000)[-LOG_LINES:]
    return visible("\n".join([*lines, *([f"--- {near_here(status.log)}", *log] if log else [])]))


def state_of(status: Status) -> str:
    if status.alive is None and not status.ended:
        return f"{status.state} on {status.host or 'another machine'} (whether it still is cannot be seen from here)"
    return f"{status.state} ({status.stage})" if status.stage else status.state


def figures(status: Status) -> str:
    """The last values, with the step of each that is older than the newest: beside it, it would read as of now."""
    steps = {key: status.latest_steps[key] for key in SHOWN if key in status.latest}
    newest = max(steps.values(), default=0)
    return "  ".join(
        f"{key} {number(status.latest[key])}{'' if step == newest else f' (step {step})'}"
        for key, step in steps.items()
    )


def machine(heartbeat: dict[str, Any]) -> str:
    """What a heartbeat says beside the step, as far as it does: speed, money, GPU, memory, disk."""
    gpu, memory, disk = (heartbeat.get(key) or {} for key in ("gpu", "memory", "disk"))
    said = {
        "{:,.0f} tokens/s": heartbeat.get("tokens_per_second"),
        "MFU {:.0%}": heartbeat.get("mfu"),
        "${:.2f} so far": heartbeat.get("cost_so_far"),
        "${:.2f} at the end": heartbeat.get("cost_at_end"),
        "GPU {:.0f} %": gpu.get("utilization_percent"),
        "GPU memory {:.0%}": gpu and gpu["used"] / gpu["total"],
        "memory {:.0%}": memory and memory["used"] / memory["total"],
        "{:.0f} GB of disk free": disk and disk["free"] / 1e9,
    }
    return "  ".join(words.format(value) for words, value in said.items() if isinstance(value, int | float))


def cost(status: Status) -> str:
    """What it cost so far, "" where no price was given."""
    so_far = status.heartbeat.get("cost_so_far")
    return "" if so_far is None else f"${so_far:.2f}"


def flags(status: Status) -> list[dict[str, Any]]:
    """What the verdict has raised so far, but for what is green."""
    found = read_if_there(Path(status.run_dir) / "flags.json").get("flags", [])
    return [each for each in found if each.get("level") != "green"]


def reds(status: Status) -> list[str]:
    """The names of the flags that are red now."""
    return [str(each["name"]) for each in flags(status) if each["level"] == "red"]


def flagged(status: Status) -> str:
    """The flags in a few words: `12 green`, or `RED loss trend, 1 yellow, 10 green`; "" where nothing was judged yet."""
    levels: dict[str, list[str]] = {}
    for each in read_if_there(Path(status.run_dir) / "flags.json").get("flags", []):
        levels.setdefault(each["level"], []).append(each["name"])
    red = [f"RED {' and '.join(levels['red'])}"] if "red" in levels else []
    return ", ".join([*red, *(f"{len(levels[level])} {level}" for level in ("yellow", "green") if level in levels)])


def checks(status: Status) -> list[dict[str, Any]]:
    """What was checked of an ended run."""
    return list(read_if_there(Path(status.run_dir) / "verdict.json").get("checks", [])) if status.ended else []


def missed(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in found if not each["passed"]]


def failure(check: dict[str, Any]) -> str:
    """A check that was missed in one clause: its name and its fix; its figure, of a run whose verdict names no fix."""
    return f"FAIL {check['name']}: {check.get('fix') or check['figure']}"


def failed(check: dict[str, Any]) -> str:
    """A check that was missed: its name, the figure, the fix."""
    fix = check.get("fix")
    return f"{check['name']}: {check['figure']}" + (f"; {fix}" if fix else "")


def checked(status: Status) -> str:
    """`9 of 9 checks passed`, or "" before there is a verdict. While a flag is red, nothing is said to have passed."""
    return counted(found, reds(status)) if (found := checks(status)) else ""


def counted(found: list[dict[str, Any]], red: list[str]) -> str:
    """How many of the checks of a verdict passed, beside the names of the red flags."""
    met = f"{sum(each['passed'] for each in found)} of {len(found)} checks"
    return f"{met} are met, but {' and '.join(red)} {'is' if len(red) == 1 else 'are'} RED" if red else f"{met} passed"


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def near_here(path: str) -> str:
    """A path below the working directory as one would type it."""
    short = os.path.relpath(path)
    return path if short.startswith("..") else short
