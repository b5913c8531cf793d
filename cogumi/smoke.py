"""`python -m cogumi.smoke`: train, merge and compare on this machine in about a minute, with checks of each stage.

SFT learns to rename variables from demonstrations of which about half are careless; GSPO rewards right answers. The stages use
public functions and `configs/smoke/chat-*.yaml`. Exit status 0 only if all checks passed.
"""

import logging
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_memory
from cogumi.core.output import print_json, run_command
from cogumi.core.run_directory import create_run_dir, write_json
from cogumi.stack.gpus import use_one_gpu

log = logging.getLogger("cogumi")
STACK = ("torch", "transformers", "trl", "peft", "datasets", "polars")
GPU_PROBES = ("torch", "matmul", "triton", "bitsandbytes", "flash_attn")
SFT, GSPO = "smoke/chat-sft", "smoke/chat-gspo"
COMPARED_PROMPTS, SHOWN_PROMPTS = 200, 5  # held-out prompts that are scored, and printed
QUICK_STEPS = {"sft": 15, "gspo": 8}
GPU_LIMIT_SECONDS = 180.0
# unsloth's first GSPO step compiles for minutes. A forecast, and a probe of flash attention, is a process that imports torch.
ON_GPU = {"cogumi__backend": "trl", "cogumi__preflight": "off", "model__attn_implementation": "sdpa"}


@dataclass
class Row:
    """A line of the table: what a stage checked, and the figure."""

    stage: str
    checked: str
    figure: str
    passed: bool
    seconds: float = 0.0


@dataclass
class Report:
    """Result of the smoke run: one row for each check, flags, and completions of the three models."""

    run_dir: Path
    quick: bool
    rows: list[Row] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    samples: list[dict[str, str]] = field(default_factory=list)
    exact: dict[str, float] = field(default_factory=dict)
    careless: dict[str, float] = field(default_factory=dict)
    similarity: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    machine: str = ""
    on_gpu: bool = False
    limit: float | None = None
    stage: str = "doctor"
    began: float = field(default_factory=time.monotonic, repr=False)

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    def add(self, stage: str, checked: str, figure: str, passed: bool) -> None:
        self.rows.append(Row(stage, checked, figure, passed))

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"run_dir": str(self.run_dir), "passed": self.passed}
        del values["began"]  # by a clock of this process
        return values | {"python": platform.python_version(), "versions": {name: version(name) for name in STACK}}


def smoke(
    quick: bool = False, model: str | None = None, run_dir: Path | None = None, limit: float | None = None
) -> Report:
    """Run every stage, write `smoke.json` into the run directory, and return the report.

    Args:
        quick: Train fewer steps, and do not require better answers.
        model: A model directory or hub id instead of the small base.
        run_dir: Where to write; `runs/smoke-<time>` by default.
        limit: Seconds after which the remaining stages fail; by default 180 on a GPU and none without one.

    Raises:
        UsageError: The path or the model cannot be used.
    """
    began = time.monotonic()  # includes imports, half a minute on a slow disk
    use_one_gpu()  # before torch is imported
    from cogumi.rl.patching import patch

    patch(backend="trl")  # before transformers is imported
    import torch
    from transformers.utils.logging import disable_progress_bar

    from cogumi.models.loading import SMALL_BASE, load_tokenizer, read_base

    base = model or SMALL_BASE
    load_tokenizer(read_base(base))
    disable_progress_bar()  # not for each load and save of a 4 MB model
    report = Report(run_dir or Path("runs") / f"smoke-{datetime.now():%Y%m%d-%H%M%S}", quick, began=began)
    status = create_run_dir(report.run_dir) / "status.json"
    report.on_gpu = torch.cuda.is_available()
    report.machine = f"no GPU, {torch.get_num_threads()} CPU threads"
    if report.on_gpu:
        report.machine = torch.cuda.get_device_name()
    report.limit = limit or (GPU_LIMIT_SECONDS if report.on_gpu else None)
    write_json(status, {"state": "running"})
    try:
        with time_limit(report):
            models = {"base": base}
            for name, check in STAGES.items():
                if not run_stage(report, name, partial(check, report, models)):
                    break  # the later stages need its result
    except OutOfTime:
        for name in list(STAGES)[list(STAGES).index(report.stage) :]:
            report.add(name, "reached", f"not reached in {report.limit:g} s", False)
    except BaseException as error:
        write_json(status, {"state": "stopped", "reason": f"{type(error).__name__}: {error}"})
        raise
    report.seconds = time.monotonic() - report.began
    write_json(report.run_dir / "smoke.json", report.as_dict())
    write_json(status, {"state": "finished" if report.passed else "finished, checks failed"})
    return report


class OutOfTime(BaseException):
    """The time limit was reached. Not an Exception, so that no stage reports it as its own failure."""


@contextmanager
def time_limit(report: Report) -> Iterator[None]:
    """Raise OutOfTime in the main thread after the report's limit."""

    def stop(*_: Any) -> None:
        raise OutOfTime(f"limit of {report.limit:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    if report.limit is not None:
        signal.setitimer(signal.ITIMER_REAL, max(0.1, report.limit - (time.monotonic() - report.began)))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_stage(report: Report, name: str, check: Callable[[], None]) -> bool:
    """Run and time a stage; an error is logged, becomes a failed row, and returns False. Mistakes of the user are raised."""
    print(f"── {name} ({time.monotonic() - report.began:.0f} s so far)", file=sys.stderr, flush=True)
    first, started, report.stage = len(report.rows), time.monotonic(), name
    try:
        check()
    except UsageError:
        raise
    except Exception as error:
        log.exception("stage %s", name)
        report.add(name, "ran to the end", f"{type(error).__name__}: {error}", False)
        return False
    finally:
        if len(report.rows) > first:
            report.rows[first].seconds = time.monotonic() - started
    return True


def check_environment(report: Report, _: dict[str, str]) -> None:
    """Run the doctor: fatal findings fail, and on a GPU installed packages that do not work there."""
    from cogumi.diagnostics.checkup import doctor

    examined = doctor()
    problems = [finding for finding in examined.findings if finding.state in ("fatal", "warning")]
    lines = [f"{finding.state}: {finding.what}: {finding.figure}" for finding in problems]
    figure = "; ".join([examined.summary(), *lines])
    report.add("doctor", "nothing is fatal", figure, all(finding.state != "fatal" for finding in problems))
    if report.on_gpu:
        broken = [f"{finding.what}: {finding.figure}" for finding in problems if finding.what in GPU_PROBES]
        figure = "; ".join(broken) or ", ".join(GPU_PROBES)
        report.add("doctor", "what is installed works on the GPU", figure, not broken)


def check_fits(report: Report, models: dict[str, str]) -> None:
    from cogumi.config.schema import load_config
    from cogumi.forecast.run_forecast import forecast_run

    run = load_config(SFT, **overrides_of(report, "sft", models["base"]))
    forecast = forecast_run(run, None, None)
    figures = [f"{line.stage}: {line.figure}" for line in forecast.lines if line.state == "red"]
    if memory := forecast.figures.get("memory"):
        figures.insert(0, f"{format_memory(memory['peak'])} of {format_memory(memory['free'])} at its peak")
    report.add("preflight", "the SFT run fits", "; ".join(figures) or "memory not known", forecast.fits)


def check_stack(report: Report, _: dict[str, str]) -> None:
    import trl

    from cogumi.rl.patching import patch

    patch()
    config = trl.GRPOConfig(output_dir="unused", loss_type="gspo", bf16=False)
    loss = f"{config.loss_type}, {config.importance_sampling_level}, {config.epsilon:g}/{config.epsilon_high:g}"
    report.add("stack", "GRPOConfig(loss_type='gspo')", loss, loss == "grpo, sequence, 0.0003/0.0004")


def overrides_of(report: Report, method: str, model: str) -> dict[str, Any]:
    from cogumi.models.loading import load_tokenizer, read_base

    overrides: dict[str, Any] = {"model__name": model, "cogumi__run_dir": report.run_dir / method}
    if report.on_gpu:
        overrides |= ON_GPU
    if report.quick:
        overrides["train__max_steps"] = QUICK_STEPS[method]
    if method == "sft" and load_tokenizer(read_base(model)).chat_template is None:  # a base of the user's own
        overrides["train__chat_template_path"] = "cogumi:tulu"
    return overrides


def train_method(report: Report, method: str, model: str) -> Any:
    """Train by sft or gspo on a model, and add its checks to the report. Raises RuntimeError without a merged model."""
    from cogumi.runs.entry import train

    result = train({"sft": SFT, "gspo": GSPO}[method], **overrides_of(report, method, model))
    for check in result.verdict.checks:
        report.add(method, check.name, f"{check.figure} (required: {check.requirement})", check.passed)
    report.flags += [f"{method}: {flag}" for flag in result.verdict.flags if flag.level != "green"]
    if result.merged is None:
        raise RuntimeError(f"{method} left no merged model")
    return result


def check_sft(report: Report, models: dict[str, str]) -> None:
    """Train SFT, and check that the held-out loss falls by a tenth."""
    result = train_method(report, "sft", models["base"])
    before, *_, after = result.series("eval_loss")
    figure = f"{before:.3f} -> {after:.3f} ({after / before - 1:+.0%})"
    report.add("sft", "held-out loss falls by >= 10 %", figure, after <= 0.9 * before)
    models["SFT"] = str(result.merged)


def check_gspo(report: Report, models: dict[str, str]) -> None:
    """Train GSPO, and check that the reward rises from the first quarter of the rollouts to the last."""
    result = train_method(report, "gspo", models["SFT"])
    rewards = result.series("reward")
    quarter = max(1, len(rewards) // 4)
    first, last = (sum(part) / quarter for part in (rewards[:quarter], rewards[-quarter:]))
    figure = f"{first:.3f} -> {last:.3f}, mean of {quarter} rollouts each"
    if report.quick:  # too few rollouts for the rise to be more than luck
        report.add("gspo", "rewards are not all alike", figure, max(result.series("reward_std")) > 0)
    else:
        report.add("gspo", "reward, last quarter above first", figure, last > first)
    models["GSPO"] = str(result.merged)


def compare(report: Report, models: dict[str, str]) -> None:
    """Compare greedy completions of held-out prompts: after each stage more must be exactly right."""
    from cogumi.config.schema import load_config
    from cogumi.data.stdlib_sample import careless_answer
    from cogumi.evaluation.comparison import compare_models
    from cogumi.rewards.functions import exact_answer

    run = load_config(GSPO, model__name=models["SFT"])
    comparison = compare_models(models, run, COMPARED_PROMPTS, ["exact_answer", "answer_similarity"])
    careless = [careless_answer(prompt) for prompt in comparison.prompts]
    report.exact = {name: comparison.mean("exact_answer", name) for name in models}
    report.careless = {name: fmean(exact_answer(comparison.written[name], careless)) for name in models}
    report.similarity = {name: comparison.mean("answer_similarity", name) for name in models}
    assert comparison.answers is not None
    for before, after in pairwise(models):
        pair = comparison.paired("exact_answer", before, after)
        figure = f"{report.exact[before]:.1%} -> {report.exact[after]:.1%} of {pair.rows} held-out prompts"
        figure += f" (95 % interval {pair.low:+.1%} to {pair.high:+.1%})"
        passed = report.quick or pair.mean > 0  # too few steps of the quick run to judge
        report.add("compare", f"more exactly right after {after}", figure, passed)
    for i in comparison.shown(SHOWN_PROMPTS):
        texts = {name: comparison.written[name][i] for name in models}
        report.samples.append({"asked": comparison.prompts[i], **texts, "right": comparison.answers[i]})


STAGES: dict[str, Callable[[Report, dict[str, str]], None]] = {
    "doctor": check_environment, "stack": check_stack, "preflight": check_fits, "sft": check_sft, "gspo": check_gspo,
    "compare": compare,
}  # fmt: skip


def show(report: Report, console: Console) -> None:
    console.print(f"{report.machine}; " + ", ".join(f"{name} {version(name)}" for name in STACK))
    table = Table("stage", "checked", "figure", "", "seconds")
    for row in report.rows:
        mark = "[green]pass[/]" if row.passed else "[red]FAIL[/]"
        table.add_row(row.stage, row.checked, escape(row.figure), mark, f"{row.seconds:.1f}" if row.seconds else "")
    console.print(table)
    if report.samples:
        console.print(table_of_samples(report))
    for flag in report.flags:
        console.print(flag, markup=False)
    passed = sum(row.passed for row in report.rows)
    red = sum(": red: " in flag for flag in report.flags)
    flags = f", with RED flags: {red}" if red else ""
    summary = f"{passed} of {len(report.rows)} checks passed in {report.seconds:.0f} s{flags}"
    console.print(f"{summary}; details in {report.run_dir}/smoke.json")
    if report.samples:
        console.print(
            f"next: cogumi chat {report.run_dir}/gspo, or the quickstart in a notebook (make lab)", soft_wrap=True
        )


def table_of_samples(report: Report) -> Table:
    title = (
        f"what SFT and GSPO changed: every {COMPARED_PROMPTS // SHOWN_PROMPTS}th held-out prompt, greedy completions"
    )
    table = Table(*report.samples[0], title=title, show_lines=True)
    for sample in report.samples:
        right = sample["right"].strip()
        marked = {name for name in report.exact if sample[name].strip() == right}
        table.add_row(
            *(f"[green]{escape(text)} ✓[/]" if name in marked else escape(text) for name, text in sample.items())
        )
    table.add_row(f"exactly right, of {COMPARED_PROMPTS}", *(f"{share:.1%}" for share in report.exact.values()), "")
    table.add_row("only the first place renamed", *(f"{share:.1%}" for share in report.careless.values()), "")
    table.add_row("mean edit similarity", *(f"{mean:.3f}" for mean in report.similarity.values()), "")
    return table


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Shorter trainings, under 45 s with a cached base.")] = False,
    model: Annotated[str | None, typer.Option(help="A model directory or hub id instead of the small base.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where to write; runs/smoke-<time> by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")] = False,
    limit: Annotated[float | None, typer.Option(min=1.0, help="Seconds; by default 180 on a GPU, else none.")] = None,
) -> None:
    """Train, merge and check a small model on this machine."""
    report = smoke(quick, model, run_dir, limit)
    if as_json:
        print_json(report.as_dict())
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 140))
    raise typer.Exit(0 if report.passed else 1)


if __name__ == "__main__":
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(main)
    run_command(command)
