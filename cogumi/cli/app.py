"""The command line: each command parses, calls one public function, and prints. Exit status 0 good, 1 failed, 2 usage error."""

import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from cogumi import smoke
from cogumi.checkpoints.interruption import exit_on_signals
from cogumi.cli import run_commands
from cogumi.cli.disk_commands import disk_app
from cogumi.cli.run_commands import AsJson, Config, Overrides
from cogumi.config.source import PACKAGE, copy_template, describe_template, list_templates, parse_overrides
from cogumi.core import __version__
from cogumi.core.errors import RunFailed, UsageError
from cogumi.core.output import (
    failures_in_one_line,
    print_json,
    print_report,
    print_table,
    print_text,
    run_command,
    show_waiting,
    survive_closed_terminal,
)
from cogumi.core.run_directory import SAMPLES_FILE
from cogumi.core.signatures import explain_text
from cogumi.runs import entry, skypilot
from cogumi.telemetry.status import format_sentence, relative_path, status_of

if TYPE_CHECKING:
    from cogumi.merge import CheckReport, MergeReport

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("smoke")(smoke.main)
app.add_typer(disk_app, name="disk")
run_commands.add_to(app)


def show_version(requested: bool) -> None:
    if requested:
        print(f"cogumi {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune on one machine: train, merge, check."""


@app.command()
def train(config: Config, overrides: Overrides = None) -> None:
    """Run one configuration: data, training, adapter, checks, merge."""
    run = entry.validate_config(config, parse_overrides(overrides), for_training=True)
    leads = os.environ.get("RANK", "0") == "0"  # torchrun starts this command several times
    if leads and "torch" not in sys.modules:  # in a pipe too: it takes seconds
        print_text("loading torch, transformers and TRL ...", to_error=True)
    with survive_closed_terminal(), failures_in_one_line(RunFailed):
        result = entry.train_run(run)
        if leads:
            print_text(format_sentence(status_of(result.run_dir)))
            if result.passed:
                run_dir = shlex.quote(relative_path(str(result.run_dir)))
                is_compared = run.cogumi.compare_with or not (result.run_dir / SAMPLES_FILE).exists()
                better = "" if is_compared else f", or whether it is better: cogumi compare base {run_dir}"
                print_text(f"next: cogumi chat {run_dir}{better}")
    raise typer.Exit(0 if result.passed else 1)


@app.command()
def preview(
    config: Config,
    overrides: Overrides = None,
    examples: Annotated[int, Option("-n", min=0, help="How many examples to show.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show what a run would train on: examples as the model sees them, lengths, dropped rows."""
    with show_waiting("reading and preparing the data"):
        report = entry.preview(config, examples, **parse_overrides(overrides))
    print_report(report, as_json)


@app.command()
def preflight(
    config: Config,
    overrides: Overrides = None,
    card: Annotated[str | None, Option(help="Plan for this card, as in 'h100 sxm' or t4.")] = None,
    probe: Annotated[bool, Option("--probe", help="Make ten steps here, to know the time. Loads the model.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say before any download whether a run fits the card, the disk and the budget, and what would make it fit."""
    words = parse_overrides(overrides)
    if probe and card is not None:
        raise UsageError("--card and --probe: the probe's ten steps run on this machine", fix="use one of the two")
    run = entry.validate_config(config, words, for_training=probe)
    with show_waiting("forecasting memory, time and disk"), entry.import_backend(run, other_machine=card is not None):
        from cogumi.forecast.run_forecast import forecast_run

        report = forecast_run(run, card, entry.train_run if probe else None, apart=False)
    print_report(report, as_json)
    raise typer.Exit(0 if report.fits else 1)


@app.command()
def launch(
    config: Config,
    spend: Annotated[float, Option(min=0.01, max=1e6, help="Dollars at most, from the box's start to its end.")],
    overrides: Overrides = None,
    infra: Annotated[list[str], Option(help="Where to rent, as SkyPilot names it.")] = ["runpod", "vast"],  # noqa: B006
    yes: Annotated[bool, Option("--yes", help="Rent it without asking.")] = False,
) -> None:
    """Write a SkyPilot task for the cheapest card that the run fits on, which ends itself; with SkyPilot, start it."""
    from huggingface_hub import get_token

    run = entry.validate_config(config, parse_overrides(overrides))
    files = skypilot.find_files(run)
    sky = skypilot.find_sky()
    with show_waiting("asking for prices, forecasting by card"), failures_in_one_line(RunFailed):
        offers = list(skypilot.find_offers(sky, infra, run))
        with entry.import_backend(run, other_machine=True):
            examined = list(skypilot.examine_offers(run, offers, spend))
    rows = [
        (offer.card.name, *(f"{price:.2f}" if price > 0 else "" for price in (offer.price, offer.spot)),
         f"{spend / offer.price:.1f}", f"{'RED' if line.state == 'red' else 'fits'}, {line.figure.partition(' (if')[0]}")
        for offer, line in examined
    ]  # fmt: skip
    print_table(f"cards by price, ${spend:g} to spend", ("card", ">$/h", ">spot $/h", ">hours", "preflight"), rows)
    offer, line = examined[-1]
    if line.state == "red":
        fix = line.fix.replace("cogumi.max_hours", "--spend")
        raise UsageError(f"no card fits; {offer.card.name}: {line.figure}", key=f"--spend {spend:g}", fix=fix)
    command = skypilot.write_task(run, offer, spend, files)
    print_text(f"{command[-1]} is written, with the configuration that it trains beside it")
    if f"{run.cogumi.mirror}".startswith("s3") and "AWS_ACCESS_KEY_ID" not in command:
        print_text(
            f"AWS_ACCESS_KEY_ID is not set here: the box reaches {run.cogumi.mirror} only if it has a role for that"
        )
    if "HF_TOKEN" not in command and (f"{run.cogumi.mirror}".startswith("hf") or get_token()):
        print_text("HF_TOKEN is not set here: the box reaches no gated or private repository, and no mirror on the hub")
    if sky is not None and (yes or (sys.stdin.isatty() and typer.confirm("rent it now?"))):
        raise typer.Exit(subprocess.run([sky, *command[1:]], check=False).returncode)
    install = "" if sky else f"{skypilot.INSTALL_SKYPILOT} && "
    print_text(f"start it: {install}{shlex.join(command)}")


@app.command()
def cp(
    name: Annotated[
        str | None, Argument(help="Config, recipe, notebook or template; without one they are listed.")
    ] = None,
    destination: Annotated[Path | None, Argument(help="A file or a directory; here by default.")] = None,
) -> None:
    """Copy a config, a recipe or a notebook, to be changed and run, or the template of an issues log."""
    if name is None:
        templates = list_templates()
        width = max(map(len, templates))
        print_text("\n".join(f"{name:{width}}  {describe_template(path)}" for name, path in templates.items()))
        return
    copy = copy_template(name, destination)
    print_text(f"{copy}")
    if name.startswith("accelerate/"):
        print_text(f"accelerate launch --config_file {copy} --num_processes N train.py")
    elif runner := {".yaml": "cogumi train", ".py": "python", ".ipynb": "jupyter lab"}.get(copy.suffix):
        print_text(f"{runner} {copy}")


@app.command()
def config_schema() -> None:
    """Print the JSON schema of a run's YAML, for editors and agents, with the keys of the installed TRL and PEFT."""
    from cogumi.config.json_schema import build_schema

    print_json(build_schema())


@app.command()
def agent_docs() -> None:
    """Print what a coding agent has to know to use cogumi."""
    print_text((PACKAGE / "templates" / "agent-docs.md").read_text(encoding="utf-8"), end="")


@app.command()
def merge(
    context: typer.Context,
    adapter: Annotated[Path | None, Argument(help="The directory a run saved its adapter to.")] = None,
    out: Annotated[Path | None, Argument(help="A directory that does not exist yet.")] = None,
    base: Annotated[str | None, Option(help="The full-precision base, where the adapter does not name it.")] = None,
    revision: Annotated[str | None, Option(help="The base's revision on the hub.")] = None,
    base_mode: Annotated[
        Literal["full", "dequant"], Option(help="dequant: into the decoded weights of a quantized base.")
    ] = "full",
    dtype: Annotated[
        Literal["auto", "keep", "bfloat16", "float16", "float32"],
        Option(help="Of what is written. auto: the base's, or float32 where that would round 2 % of the update away."),
    ] = "auto",
    verify: Annotated[
        Literal["elements", "logits"], Option(help="logits: also run both models, one at a time in memory.")
    ] = "elements",
    weight: Annotated[float, Option(help="What the adapter's update is multiplied by.")] = 1.0,
    add: Annotated[
        list[str] | None, Option(help="Another adapter to add, as DIRECTORY=WEIGHT. May be repeated.")
    ] = None,
    expert_layout: Annotated[
        Literal["axis1", "axis2", "axis1-grouped", "axis2-grouped"] | None,
        Option(help="How factors of stacked experts are read, where versions and shapes leave several ways."),
    ] = None,
    witness: Annotated[
        Path | None,
        Option(help="JSON lines of prompt and greedy answer, which the merged model has to give.", metavar="FILE"),
    ] = None,
    workers: Annotated[
        int | None, Option(min=1, help="Threads that compute; by default one, or with DoRA one for each core.")
    ] = None,
    check: Annotated[
        Path | None, Option(help="Check this merged directory again, instead of merging.", metavar="DIR")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Merge an adapter into its full-precision base and check every element written; or check a merged directory."""
    with exit_on_signals(), survive_closed_terminal(), failures_in_one_line():
        if check is not None:
            refuse_merge_options(context, check)
            print_text(f"checking {check} ...", to_error=True)
            with show_waiting("loading the libraries"):
                from cogumi.merge import check_merged

            report: CheckReport | MergeReport = check_merged(check, workers)
        else:
            if adapter is None or out is None:
                message = "merge needs an ADAPTER directory and an OUT directory, or --check DIR"
                raise UsageError(message, fix="see cogumi merge --help")
            adapters = [(adapter, weight), *(parse_weighted_path(word) for word in add or [])]
            print_text(f"merging {adapter} into its base, as {out} ...", to_error=True)
            with show_waiting("loading the libraries"):
                from cogumi.merge import merge_adapter

            report = merge_adapter(adapters, out, base, revision, base_mode, dtype, verify,
                                   expert_layout=expert_layout, witness=witness, workers=workers)  # fmt: skip
        print_json(asdict(report)) if as_json else print_text(report)


def refuse_merge_options(context: typer.Context, check: Path) -> None:
    """Raise UsageError for options that have no effect with --check, even if they have their default values."""
    options = [
        word if word.startswith("-") else word.upper()
        for name, word in ((option.name or "", option.opts[0]) for option in context.command.params)
        if name not in ("check", "workers", "as_json")
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if options:
        raise UsageError("does not write a merge", key=f"--check {check}", fix=f"leave out {', '.join(options)}")


def parse_weighted_path(word: str) -> tuple[Path, float]:
    """Split DIRECTORY=WEIGHT. Raises UsageError for anything else."""
    path, _, number = word.rpartition("=")
    try:
        if path:
            return Path(path), float(number)
    except ValueError:
        pass
    raise UsageError(f"--add {word} is not a directory and a weight", fix="write DIRECTORY=WEIGHT")


@app.command()
def inspect(
    adapter: Annotated[Path, Argument(help="The directory a run saved its adapter to, or PEFT's save_pretrained.")],
    base: Annotated[str | None, Option(help="The base, where it is not the one that the adapter names.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say who wrote an adapter, what it changes, and what is unusual. Exit status 1 if `cogumi merge` refuses it."""
    with show_waiting("reading the adapter and its base"), failures_in_one_line():
        from cogumi.merge.inspection import inspect as inspect_adapter

        report = inspect_adapter(adapter, base)
    print_report(report, as_json)
    raise typer.Exit(1 if report.refusal else 0)


@app.command()
def export(
    source: Annotated[Path, Argument(help="A run with a merged model, or a merged directory.")],
    out: Annotated[Path, Argument(help="A directory that does not exist yet.")],
    quant: Annotated[str, Option(help="q8_0, q4_k_m (takes llama-quantize), f32, f16 or bf16.")] = "q8_0",
    as_json: AsJson = False,
) -> None:
    """Write a merged model as GGUF with an Ollama Modelfile, by llama.cpp's tools, and check the file."""
    with show_waiting("converting, reading back"), failures_in_one_line():
        from cogumi.merge.export import export_model

        report = export_model(source, out, quant)
    print_report(report, as_json)


@app.command()
def certify(
    adapter: Annotated[Path, Argument(help="A run, or its adapter's directory.")],
    merged: Annotated[Path, Option(help="The merged directory.", metavar="DIR")],
    gguf: Annotated[Path | None, Option(help="A GGUF file of it, or an export.", metavar="FILE")] = None,
    prompts: Annotated[
        Path | None, Option(help="JSON lines of prompt and greedy answer, which all have to give.", metavar="FILE")
    ] = None,
    base: Annotated[str | None, Option(help="The full-precision base, where the adapter does not name it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare trained, merged and exported model on the same prompts; the result goes into the model card of a push."""
    with show_waiting("loading, comparing"):
        from cogumi.merge.certificate import certify as compare

        certificate = compare(adapter, merged, gguf, prompts, base)
    print_report(certificate, as_json)
    raise typer.Exit(0 if certificate.passed else 1)


@app.command()
def push(
    source: Annotated[Path, Argument(help="A run, a merged directory or an adapter's directory.")],
    name: Annotated[str, Argument(help="The repository on the hub, as in me/my-model.")],
    what: Annotated[str | None, Option(help="merged or adapter, of a run that has both; merged if it has.")] = None,
    private: Annotated[bool, Option("--private", help="Only you see the repository.")] = False,
    anyway: Annotated[bool, Option("--anyway", help="Also a run whose checks failed or whose flags are red.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a model to the hub in one commit, with a model card from its run. Takes a token (HF_TOKEN, hf auth login)."""
    with show_waiting("uploading"):
        from cogumi.hub.upload import push_model

        pushed = push_model(source, name, what, private, anyway)
    print_json(vars(pushed)) if as_json else print_text(pushed)


@app.command()
def doctor(
    as_json: AsJson = False,
    explain: Annotated[
        str | None,
        Option(metavar="FILE|-", help="Instead: say what a traceback or log means; - reads standard input."),
    ] = None,
) -> None:
    """Check this machine and environment: problems with cause and fix. Exit status 1 if there are any."""
    if explain is not None:
        explanation = explain_text(read_text(explain))
        print_report(explanation, as_json)
        raise typer.Exit(0 if explanation.diagnoses else 1)
    from cogumi.diagnostics.checkup import doctor as examine

    with show_waiting("checking the machine, its packages and what they compute"):
        report = examine()
    print_report(report, as_json)
    raise typer.Exit(0 if report.passed else 1)


def read_text(source: str) -> str:
    """Read a file, or standard input for "-". Raises UsageError if it holds no text."""
    key = f"--explain {source}"
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise UsageError(f"{error.strerror}", key=key, fix="name a file with the traceback, or - to paste it") from None
    text = content.decode("utf-8", errors="replace")
    if not text.strip() or 20 * (text.count("\ufffd") + text.count("\0")) > len(text):
        raise UsageError("it holds no text", key=key, fix="give it the whole traceback or log")
    return text


def main() -> None:
    run_command(app)
