"""`cogumi preflight`: does a run fit the card, the disk and the budget? Exit status 1 where it does not."""

from pathlib import Path
from typing import Annotated

import typer

from cogumi.core.errors import UsageError
from cogumi.core.output import say, show, waiting


def preflight(
    config: Annotated[Path, typer.Argument(help="A YAML; see configs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as train.max_length=4096")] = None,
    card: Annotated[str | None, typer.Option(help="Plan for this card, as in 'h100 sxm' or t4.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Make ten steps here, to know the time. Loads the model.")
    ] = False,
    fix: Annotated[Path | None, typer.Option(help="Write a config that fits there.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say before any download whether a run fits the card, the disk and the budget, and what would make it fit."""
    from cogumi.config.schema import parse_overrides

    words = parse_overrides(overrides or [])
    if fix is not None and probe:
        raise UsageError(
            "--fix and --probe: a config is changed several times, and each would train", fix="use one of the two"
        )
    if card is not None and probe:
        raise UsageError(
            "--card and --probe: ten steps made here say nothing of another card", fix="use one of the two"
        )
    if fix is not None and not fix.parent.is_dir():
        raise UsageError(f"no such directory as {fix.parent}", key=f"--fix {fix}", fix="make it, or name another place")
    if fix is not None and fix.exists():
        raise UsageError("there is such a file already", key=f"--fix {fix}", fix="name another, or remove it")
    from cogumi.runs.entry import import_unsloth_first, probing_with, refuse_mistakes
    from cogumi.stack.gpus import use_one_gpu

    refuse_mistakes(config, words, trains=probe)
    use_one_gpu()
    with waiting("forecasting memory, time and disk"):
        import_unsloth_first()
        from cogumi.forecast.run_forecast import fixed, foresee, here, write_fixed

        if fix is None:
            changes: dict[str, object] = {}
            report = foresee(config, card, probing_with(probe), words, here)
        else:
            report, changes = fixed(config, card, **words)
    show(report, as_json)
    if fix is not None and report.fits:
        write_fixed(config, fix, changes, words)
        said = ", ".join(f"{key}: {value}" for key, value in changes.items()) or "nothing had to be changed"
        say(f"{fix}: {said}", to_error=as_json)
    elif fix is not None:
        say(f"{fix} is not written: no change of the config that is known here makes this fit", to_error=True)
    raise typer.Exit(0 if report.fits else 1)
