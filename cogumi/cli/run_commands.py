"""Commands about runs: start, attach, status, logs, report, chat, wait, stop, checkpoint, pause, reward, compare."""

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from cogumi.checkpoints.verify import list_checkpoints
from cogumi.config.source import parse_overrides
from cogumi.core.errors import UsageError
from cogumi.core.output import failures_in_one_line, print_json, print_report, print_text, show_waiting
from cogumi.core.run_directory import PAUSED
from cogumi.core.signatures import EXIT_RETRY
from cogumi.runs import handle, launch
from cogumi.telemetry.status import (
    Status,
    count_flags,
    format_headline,
    format_screen,
    format_sentence,
    hint_of_runs,
    is_run,
    relative_path,
    runs_below,
    runs_in,
    status_of,
)

REFRESH_SECONDS = 2.0
PLACES = ("runs", "notebooks/runs")  # default directories of runs, here and of this clone's notebooks
Config = Annotated[Path, Argument(help="A YAML; see configs/.")]
Overrides = Annotated[list[str] | None, Argument(help="key=value, such as train.max_steps=5")]
AsJson = Annotated[bool, Option("--json", help="Print JSON, for programs.")]
RunDir = Annotated[Path, Argument(help="The directory of a run, as in runs/NAME.")]


def add_to(app: typer.Typer) -> None:
    for command in (start, attach, status, logs, report, chat, wait, stop, checkpoint, pause, unpause, reward, compare):
        app.command()(command)


def start(config: Config, overrides: Overrides = None) -> None:
    """Train one configuration in a process that outlives this terminal. Returns once it trains, or why it does not."""
    words = parse_overrides(overrides)
    with show_waiting("checking, loading, making the first step"), failures_in_one_line():
        run = launch.start(config, **words)
    if not run.status().ended:
        where = shlex.quote(relative_path(str(run.run_dir)))
        print_text(f"follow it: cogumi attach {where}    end it: cogumi stop {where}")


def attach(run_dir: RunDir) -> None:
    """Follow a run's log until it ends; Ctrl-C leaves it running. Exit status 1 if it did not end well."""
    run = handle.attach(run_dir)
    with leaving_on_interrupt(run_dir, "cogumi attach"):
        for text in run.follow():
            print_text(text, end="")
    say_end(run.status())


def status(
    run_dirs: Annotated[
        list[str] | None,
        Argument(
            metavar="[RUN_DIR]...",
            help="Runs, directories of runs, or mirrors (s3://...); by default runs/ and notebooks/runs/.",
        ),
    ] = None,
    as_json: AsJson = False,
    watch: Annotated[bool, Option("--watch", help="Follow one run on the whole screen until it ends.")] = False,
) -> None:
    """Show the state of runs: one screen for one run, a line for each of several. Changes nothing."""
    if run_dirs and all(map(is_mirror, run_dirs)):
        if watch:
            raise UsageError("--watch follows a run on its own machine", fix="drop it")
        show_mirrors(run_dirs, as_json)
        return
    if run_dirs:
        paths = [path for directory in run_dirs for path in runs_in(Path(directory))]
    else:
        paths = [path for place in PLACES for path in runs_below(Path(place))]
    if watch:
        if as_json:
            raise UsageError("--watch and --json: one is for people, the other for programs")
        if len(paths) != 1:
            raise UsageError(f"--watch follows one run, and there are {len(paths)}: name its directory")
        follow_screen(handle.attach(paths[0]), paths[0])
        return
    statuses = [status_of(path) for path in paths]
    if as_json:
        print_json([status.as_dict() for status in statuses])
        return
    if run_dirs and len(run_dirs) == 1 and is_run(Path(run_dirs[0])):
        print_text(format_screen(statuses[0]))
        return
    if not statuses:
        print_text(f"no runs below {' or '.join(PLACES)} in {Path.cwd()}; name a run's directory")
    for status in statuses:
        flags = "" if status.ended else count_flags(status)
        cost = status.heartbeat.get("cost_so_far")
        parts = [format_sentence(status), flags and f"flags: {flags}", "" if cost is None else f"${cost:.2f}"]
        print_text("; ".join(filter(None, parts)))


def is_mirror(place: str) -> bool:
    """Tell a mirror, also a directory with checkpoints beside its run, from a run or a directory of runs."""
    return "://" in place or (is_run(Path(place, "run")) and bool(list_checkpoints(Path(place))))


def show_mirrors(places: list[str], as_json: bool) -> None:
    """Show runs by their mirrors, from which what tells their state is fetched."""
    from cogumi.telemetry.mirrored_run import fetched_for_reading  # imported here: its libraries take half a second

    shown = []
    for place in places:
        with fetched_for_reading(place) as run_dir:
            status = status_of(run_dir)
            shown.append({**status.as_dict(), "run_dir": place, "log": f"{place}/run/run.log"})
            screen = format_screen(status).replace(relative_path(status.log), f"{place}/run/run.log")
            if not as_json:
                print_text(screen.replace(relative_path(str(run_dir)), place))
    if as_json:
        print_json(shown)


def follow_screen(run: handle.Run, path: Path) -> None:
    from rich.live import Live
    from rich.text import Text

    with leaving_on_interrupt(path, "cogumi status --watch"), Live(auto_refresh=False) as live:
        while True:
            status = run.status()
            live.update(Text(format_screen(status)), refresh=True)
            if status.ended:
                break
            time.sleep(REFRESH_SECONDS)
    say_end(status)


def logs(
    run_dir: RunDir,
    follow: Annotated[bool, Option("-f", "--follow", help="Follow what is written, until the run ends.")] = False,
    last: Annotated[int, Option("-n", "--lines", min=1, help="How many lines, from the end.")] = 50,
) -> None:
    """Print a run's log: decisions with their reasons, warnings, and the traceback if it failed."""
    run = handle.attach(run_dir)
    if not follow:
        print_text(run.logs(last))
        return
    with leaving_on_interrupt(run_dir):
        for text in run.follow(last):
            print_text(text, end="")


def report(
    run_dir: RunDir,
    out: Annotated[Path | None, Option(help="The file to write; report.html in the run's directory.")] = None,
) -> None:
    """Write a run's report: one file with verdict, curves, samples and all, for any browser."""
    run = handle.attach(run_dir)
    with show_waiting("drawing the report"):
        written = run.report(out)
    where = relative_path(str(written))
    print_text(f"{where}: one file, opens without this machine or a network; {format_headline(run.status())}")


def chat(
    directory: Annotated[
        Path, Argument(metavar="DIR", help="A run, as in runs/NAME, an adapter's directory, or a model's.")
    ],
    only: Annotated[
        list[str] | None,
        Option(help="base, adapter or merged; may be repeated. By default the base and what was trained."),
    ] = None,
    prompt: Annotated[
        str | None, Option(metavar="TEXT", help="Answer this once, for scripts. \\n in it is a line break.")
    ] = None,
    temperature: Annotated[float, Option(min=0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[
        int | None, Option(min=1, help="The longest answer; by default the run's own, 256 without one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Talk to a base and to what was trained from it: each message is answered by both."""
    if as_json and prompt is None:
        raise UsageError("--json prints the answers to one prompt", fix="add --prompt TEXT")
    if prompt is not None and not prompt.strip():
        raise UsageError("there is nothing in it", key="--prompt")
    prompt = prompt and prompt.replace("\\n", "\n")
    from cogumi.evaluation.saved_models import read_setup
    from cogumi.notebook import chat as chats

    with show_waiting("loading the libraries"):
        opened = chats.open_chat(read_setup(directory, only or (), temperature, max_new_tokens))
    if prompt is None:
        chats.converse(opened)
        return
    chats.print_head(opened, to_error=True)
    with show_waiting("loading the models"):
        opened.load()
    if as_json:
        answers = {column: asdict(answer) for column, answer in chats.answer_once(opened, prompt).answers.items()}
        mode = "text" if opened.template is None else "chat"
        print_json({"directory": str(directory), "mode": mode, "prompt": prompt, "answers": answers})
    else:
        chats.print_answers(opened, prompt, labelled=len(opened.setup.columns) > 1)


def wait(run_dir: RunDir) -> None:
    """Wait until a run has ended. Exit status 0 if it came to its end and every check passed, 75: try again, else 1."""
    run = handle.attach(run_dir)
    with leaving_on_interrupt(run_dir, exit_status=1):
        final = run.wait()
    say_end(final)


def stop(
    run_dir: RunDir,
    kill_after: Annotated[
        float | None, Option(min=0, metavar="SECONDS", help="End it without saving if it takes longer.")
    ] = None,
) -> None:
    """Make a run save its last finished step and end. A second time, it ends at once, without saving."""
    run = handle.attach(run_dir)
    word = "it was asked to stop, and will"
    with leaving_on_interrupt(run_dir, exit_status=1, word=word), show_waiting("the run saves and ends"):
        run.stop(kill_after)


def checkpoint(run_dir: RunDir) -> None:
    """Make a run save a checkpoint after its step, and train on."""
    handle.attach(run_dir).checkpoint()
    print_text(f"{run_dir}: asked for a checkpoint; `cogumi status {shlex.quote(str(run_dir))}` says when it is there")


def pause(run_dir: RunDir) -> None:
    """Make a run save a checkpoint after its step and wait; it keeps its memory and its GPU."""
    handle.attach(run_dir).pause()
    place = shlex.quote(str(run_dir))
    ends = f"`cogumi unpause {place}` ends the pause, `cogumi stop {place}` the run"
    print_text(f"{run_dir}: asked to save and wait; {ends}")


def unpause(run_dir: RunDir) -> None:
    """End the pause of a run, which trains on."""
    handle.attach(run_dir).unpause()
    print_text(f"{run_dir}: no longer paused")


def say_end(status: Status) -> None:
    """Say how a run ended; exit status 1 if not well, 75 if another try may succeed."""
    print_text(format_sentence(status))
    if not status.passed:
        was_killed = status.state == "died" and status.retriable is None  # without a supervisor that knows how
        raise typer.Exit(EXIT_RETRY if status.retriable or was_killed else 1)


@contextmanager
def leaving_on_interrupt(run_dir: Path, back: str = "", exit_status: int = 0, word: str = "") -> Iterator[None]:
    """Let Ctrl-C end the command, not the run. back: the command to return. word: message about the run."""
    try:
        yield
    except KeyboardInterrupt:
        paused, place = (run_dir / PAUSED).exists(), shlex.quote(str(run_dir))
        word = word or (f"the run waits until `cogumi unpause {place}`" if paused else "the run continues")
        print_text(f"\ncogumi: {word}" + (f"; come back with `{back} {place}`" if back else ""), to_error=True)
        raise typer.Exit(exit_status) from None


def reward(
    config: Config,
    completions: Annotated[
        Path,
        Argument(
            help='JSON lines: {"prompt": ..., "completion": ...} or `completions`; or the rollouts.jsonl of a run.'
        ),
    ],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Score completions with a config's rewards: how they are spread, the worst and the best.

    A column that a reward takes stands in the line, or is found in the config's data by the prompt. Trains nothing.
    Exit status 1 if none is scored.
    """
    from cogumi.config.schema import read_config
    from cogumi.evaluation.reward_scores import score_file
    from cogumi.rewards.named_rewards import RewardError

    with show_waiting("scoring"), failures_in_one_line(RewardError):
        report = score_file(read_config(config, parse_overrides(overrides))[0], completions)
    print_report(report, as_json)
    raise typer.Exit(0 if report.total.not_scored < report.total.completions else 1)


def compare(
    models: Annotated[
        list[str], Argument(metavar="MODEL...", help="base, or a run, adapter, model or checkpoint; two or more.")
    ],
    config: Annotated[
        Path | None, Option(help="Whose held-out prompts; by default those of the last run named.")
    ] = None,
    rows: Annotated[int, Option(min=1, help="How many held-out prompts, at most.")] = 200,
    score: Annotated[
        list[str] | None,
        Option(help="rewards, a reward's name, file.py:function or command:PROGRAM; may be repeated."),
    ] = None,
    panel: Annotated[bool, Option("--panel", help="Ask the package's sixty instructions: what broke?")] = False,
    as_json: AsJson = False,
) -> None:
    """Complete held-out prompts with several models, and say which is better, with an interval of the difference."""
    from cogumi.config.schema import load_config
    from cogumi.rewards.named_rewards import RewardError
    from cogumi.stack.gpus import use_one_gpu

    if len(models) < 2:
        raise UsageError(f"{models[0]} is compared with nothing", fix="name a second model, such as base")
    names = [model if model not in models[:at] else f"{model} ({at + 1})" for at, model in enumerate(models)]
    if panel:
        if config is not None or score:
            raise UsageError("it has its own prompts and scores", key="--panel", fix="drop --config and --score")
        use_one_gpu()
        with show_waiting("loading the libraries, completing and scoring"):
            from cogumi.evaluation.forgetting import compare_panel

            print_report(compare_panel(dict(zip(names, models, strict=True))), as_json)
        return
    run_dirs = [model for model in models if is_run(Path(model))]
    if config is None and not run_dirs:
        message = f"none of {', '.join(models)} is a run, whose configuration would say which prompts are held out"
        message += hint_of_runs(Path(models[-1]))
        raise UsageError(message, key="--config", fix="name a YAML")
    run = load_config(config or Path(run_dirs[-1], "config.yaml"))
    use_one_gpu()  # before torch is imported
    with show_waiting("loading the libraries, completing and scoring"), failures_in_one_line(RewardError):
        from cogumi.evaluation.comparison import compare_models

        comparison = compare_models(dict(zip(names, models, strict=True)), run, rows, score or ())
    print_report(comparison, as_json)
