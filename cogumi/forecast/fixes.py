"""The config that fits: the red lines' changes made one round after another, until nothing more can be changed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cogumi.config.schema import load_config
from cogumi.config.yaml_text import sections, with_values
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import write_atomic
from cogumi.forecast.preflight_report import PreflightReport
from cogumi.forecast.preflight_worker import here
from cogumi.forecast.run_forecast import foresee

ROUNDS = 6


def fixed(
    config: str | os.PathLike[str] | Mapping[str, Any], card: str | None = None, **overrides: Any
) -> tuple[PreflightReport, dict[str, Any]]:
    """(the last report, the dotted keys that were changed). A report that is still red has no change left to make."""
    changes: dict[str, Any] = {}
    report = foresee(config, card, None, overrides, here)
    for _ in range(ROUNDS):
        more = {key: value for key, value in report.changes.items() if changes.get(key) != value}
        if report.fits or not more:
            break
        changes |= more
        words = {key.replace(".", "__"): value for key, value in changes.items()}
        report = foresee(config, card, None, {**overrides, **words}, here)
    return report, changes


def write_fixed(source: Path, out: Path, changes: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """The YAML of `source` with the changes, its comments kept, at `out`. Raises UsageError for a file that is there."""
    if out.exists():
        raise UsageError("there is such a file already", key=f"--fix {out}", fix="name another, or remove it")
    load_config(source, **overrides)  # a mistake in it is said with its line
    text = source.read_text(encoding="utf-8")
    document = sections(text)
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    for key, value in {**given, **changes}.items():
        section = document
        *above, name = key.split(".")
        for each in above:
            section = section.setdefault(each, {})
        section[name] = value
    said = "".join(f"#   {key}: {value}\n" for key, value in changes.items())
    head = f"# {source.name}, changed by cogumi preflight --fix:\n{said}"
    try:
        write_atomic(out, head + with_values(text, document)[0])
    except OSError as error:
        raise UsageError(
            f"cannot be written ({error.strerror})", key=f"--fix {out}", fix="name another place"
        ) from None
