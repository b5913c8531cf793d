"""`cogumi reward`: what the rewards of a config give to completions of a file."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from cogumi.cli.run_commands import AsJson, Config, Overrides
from cogumi.config.source import parse_overrides
from cogumi.core.output import print_report, print_text, show_waiting


def add_to(app: typer.Typer) -> None:
    app.command()(reward)


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
    """Score completions with a config's rewards: how they are spread, the worst and the best. A column that a reward takes
    stands in the line, or is found in the config's data by the prompt. Trains nothing. Exit status 1 if none is scored."""
    from cogumi.config.schema import read_config
    from cogumi.methods.reward_scores import score_file
    from cogumi.rewards.named_rewards import RewardError

    with show_waiting("scoring"):
        try:
            report = score_file(read_config(config, parse_overrides(overrides))[0], completions)
        except RewardError as error:
            print_text(f"cogumi: {error}", to_error=True)
            raise typer.Exit(1) from error
    print_report(report, as_json)
    raise typer.Exit(0 if report.total.not_scored < report.total.completions else 1)
