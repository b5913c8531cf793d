"""`cogumi status --watch`: the panel in a terminal, drawn by rich every two seconds until the run has ended."""

import time
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cogumi.core.disk_space import spoken
from cogumi.core.formatting import flag_sentence, visible
from cogumi.notebook.curves import LAST, Curve
from cogumi.notebook.run_snapshot import Look, Looker, broke
from cogumi.notebook.svg import short
from cogumi.telemetry.status import figures, in_short, machine, number

REFRESH_SECONDS = 2.0
BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = 48
MOST_CHARACTERS = 160
MARKS = {"red": "bold red", "yellow": "yellow", "green": "green"}


def watch(run_dir: Path, console: Console | None = None) -> None:
    """Follow a run until it ends. Ctrl-C ends the looking, not the run. Without a terminal each look is printed once."""
    looker = Looker(run_dir)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            look = looker.look()
            live.update(screen(look), refresh=True)
            if look.behind:
                continue
            if look.status.ended:
                return
            time.sleep(REFRESH_SECONDS)


def screen(look: Look) -> RenderableType:
    """One look as a screen: state, flags, curves, checkpoints, disk, samples: what a low terminal does not show comes last."""
    status = look.status
    parts: list[RenderableType] = []
    if status.step is not None and status.steps:
        bar = Table.grid()  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=status.steps, completed=min(status.step, status.steps), width=COLUMNS * 2))
        parts.append(bar)
    parts += [plain(each) for each in (figures(status), machine(status.heartbeat)) if each]
    if status.reason:
        parts.append(plain(" ".join(status.reason.split())))
    parts += [*flags(look), curves(look)]
    for each in look.checkpoints:
        parts.append(plain(f"{each.path.name}: {each.state}, {spoken(each.bytes)}"))
    if said := broke(look.was_red, [each.path for each in look.checkpoints]):
        parts.append(plain(said))
    parts += [plain(f"disk: {each}") for each in look.disk]
    if look.samples:
        parts.append(samples(look))
    return Panel(Group(*parts), title=plain(in_short(status)), title_align="left")


def curves(look: Look) -> Table:
    table = Table.grid(padding=(0, 2))
    finite = [curve for _, drawn in look.plots for curve in drawn.values() if len(curve.low)]
    reached = max((curve.bins[LAST][-1] for curve in finite), default=0)
    for plot, drawn in look.plots:
        for key, curve in drawn.items():
            name = plot.title if len(drawn) == 1 else key
            if len(curve.low):
                between = f"{short(float(curve.low.min()))} to {short(float(curve.high.max()))}"
                value, step = short(float(curve.mean[-1])), int(curve.bins[LAST][-1])
                at_last = f"now {value}" if step == reached else f"{value} (step {step})"
                table.add_row(plain(name), sparkline(curve), at_last, between)
            if curve.broken:
                table.add_row(plain(name), f"NOT FINITE at step {curve.broken[0]}", f"{len(curve.broken)} times")
    return table


def plain(text: str, style: str = "") -> Text:
    """Text that others wrote, as it is: neither rich's markup in it nor a terminal's control characters are obeyed."""
    return Text(visible(text), style)


def sparkline(curve: Curve) -> str:
    """The means in one line of blocks, as many as there is room for."""
    means = np.array([part.mean() for part in np.array_split(curve.mean, min(COLUMNS, len(curve.mean)))])
    low, high = means.min(), means.max()
    levels = (means - low) / (high - low) if high > low else np.full_like(means, 0.5)
    return "".join(BLOCKS[round(level * (len(BLOCKS) - 1))] for level in levels)


def flags(look: Look) -> list[Text]:
    said = [
        plain(f"{flag['level'].upper()} {flag['name']}: {flag_sentence(flag)}", MARKS[flag["level"]])
        for flag in look.troubles
    ]
    if look.flags:
        said.append(
            plain(f"{len(look.flags) - len(look.troubles)} of {len(look.flags)} flags are green", MARKS["green"])
        )
    return said


def samples(look: Look) -> Table:
    rewarded = "reward" in look.samples[0]
    table = Table(title=f"newest samples, step {look.sampled_at}", title_justify="left", show_lines=True)
    for name in ("prompt (its end)", "completion", *(["reward"] if rewarded else [])):
        table.add_column(name)
    for each in look.samples:
        row = [plain(str(each["prompt"])[-MOST_CHARACTERS:]), plain(str(each["completion"])[:MOST_CHARACTERS])]
        table.add_row(*row, *([number(each["reward"])] if rewarded else []))
    return table
