"""The outlook of a run that is under way or over, from its directory alone: what it has written, and how often."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from cogumi.checkpoints.disk_forecast import ADAPTER, ENTRIES, Found, Outlook, composed, merged_need
from cogumi.checkpoints.manifest import MANIFEST_NAME, step_of
from cogumi.checkpoints.retention import checkpoints_in
from cogumi.core.disk_space import Need
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json
from cogumi.disk import taken_by

# What of a checkpoint is not in an adapter, or a model, that is saved at the end.
TO_RESUME = (
    "optimizer.*",
    "scheduler.*",
    "scaler.*",
    "rng_state*",
    "trainer_state.json",
    "training_args.bin",
    "cogumi-*",
)
# As cogumi.protect keeps them where nothing is said.
DEFAULT_KEEP = 2


def is_run(directory: Path) -> bool:
    """Whether a directory is one that a run, or a trainer, writes to."""
    return (directory / "config.yaml").is_file() or bool(checkpoints_in(checkpoints_of(directory)))


def checkpoints_of(directory: Path) -> Path:
    """`directory`, or the checkpoints/ in it where it has none itself, as in a run's directory."""
    below = directory / "checkpoints"
    return below if below.is_dir() and not checkpoints_in(directory) else directory


def outlook_of_run(directory: Path) -> Outlook:
    """What a run will want of its disks from now on. Needs a checkpoint of it; changes nothing.

    directory: a run's, or that of a trainer's checkpoints. Raises UsageError where there is no checkpoint, or one that
    cannot be read.
    """
    place = checkpoints_of(directory)
    there = checkpoints_in(place)
    if not there:
        raise UsageError(
            f"{directory} holds no checkpoint yet", fix="give the run's config, as in `cogumi disk predict CONFIG`"
        )
    config = read_config(directory)
    train = config.get("train") or {}
    state = state_of(there)
    ours = tuple(path for path in there if (path / MANIFEST_NAME).is_file())
    limit, over = train.get("save_total_limit"), is_over(directory)
    found = Found.of(place, ours or tuple(there))
    each = taken_by(there[0])
    best = state.get("best_model_checkpoint") is not None
    keep = max(2, limit or DEFAULT_KEEP) if ours else limit
    if not config and len(ours) - found.pinned - best > DEFAULT_KEEP:
        keep = None  # a script's, which keeps more: what it was told stands nowhere
    every = steps_between_saves(there, train)
    left = saves_left(state, every, step_of(there[0]))
    needs, notes = ([], ()) if over or not config else results_to_come(directory, config, there[0])
    return composed(
        each=each,
        made_of=f"{there[0].name} as it is on the disk",
        keep=keep,
        staying=None if keep is None else keep + found.pinned + best,
        reserve=each if ours else 0,
        saves=0 if over else left,
        found=found,
        needs=needs,
        notes=notes,
        ask=False,  # asking takes the space for a moment, and the run may want it just then
    )


def read_config(directory: Path) -> dict[str, Any]:
    """config.yaml as it was resolved when the run began; {} for a trainer's directory, which has none."""
    path = directory / "config.yaml"
    if not path.is_file():
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"not valid YAML: {' '.join(str(error).split())}", place=path) from None
    if not isinstance(values, dict):
        raise UsageError("a config is a mapping of sections", place=path, fix="is this a run's directory?")
    return values if {"model", "cogumi"} <= values.keys() else {}  # a file of that name may be somebody else's


def state_of(there: list[Path]) -> dict[str, Any]:
    """The newest trainer_state.json that can be read."""
    for path in there:
        try:
            values = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            continue  # damaged, as `cogumi disk verify` says; an older one knows as well
        if isinstance(values, dict):
            return values
    return {}


def is_over(directory: Path) -> bool:
    """Whether the run has written everything that it writes."""
    status = directory / "status.json"
    begun = status.is_file() and status.stat().st_size > 0
    return begun and str(read_json(status).get("state", "")).startswith("finished")


def steps_between_saves(there: list[Path], train: dict[str, Any]) -> int:
    """From the config where it says it in steps; else from the two newest checkpoints."""
    said = train.get("save_steps")
    if said is not None and said >= 1 and train.get("save_strategy", "steps") == "steps":
        return int(said)
    steps = [step_of(path) for path in there]
    return max(1, steps[0] - steps[1] if len(steps) > 1 else steps[0])


def saves_left(state: dict[str, Any], every: int, newest: int) -> int | None:
    last = state.get("max_steps") or 0
    return math.ceil(max(0, last - newest) / every) if last > 0 else None


def results_to_come(directory: Path, config: dict[str, Any], newest: Path) -> tuple[list[Need], tuple[str, ...]]:
    """The adapter and the merged model that a run of cogumi has yet to write, and what of them is not known."""
    beside = sum(taken_by(path) for pattern in TO_RESUME for path in newest.glob(pattern))
    needs = []
    if not (directory / "adapter").exists():
        needs.append(Need(ADAPTER, directory / "adapter", 0, taken_by(newest) - beside, ENTRIES))
    if (config.get("cogumi") or {}).get("merge", True) and not (directory / "merged").exists():
        from transformers import AutoConfig

        from cogumi.models.loading import resolve_model

        name, revision = config["model"]["name"], config["model"].get("revision")
        try:
            base = AutoConfig.from_pretrained(resolve_model(name, revision), revision=revision)
            needs.append(merged_need(base, directory / "merged"))
        except (UsageError, OSError) as error:
            return needs, (f"the merged model is not counted: {error}",)
    return needs, ()
