"""What a run will want of its disks, and whether they have it: said before the first step, and in between.

A run is fullest at one of two moments: while it saves a checkpoint beside those that stay and the reserve for one more
(cogumi.protect), or at its end, when adapter and merged model are written and the reserve is gone.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogumi.checkpoints.commit import step_of
from cogumi.checkpoints.manifest import MANIFEST_NAME
from cogumi.checkpoints.retention import PIN_NAME, checkpoints_in
from cogumi.checkpoints.sizes import (
    checkpoint_bytes,
    last_step_known,
    merged_bytes,
    saves_until_full,
    tokenizer_bytes,
)
from cogumi.core.disk_space import Disk, Need, disks_of, spoken
from cogumi.disk.usage_by_owner import LEFTOVERS, RESERVE, STAGING, kind_of, taken_by
from cogumi.patches.trl_internals import commit_of

SHARD_BYTES = 5_000_000_000
CHECKPOINTS, ADAPTER, MERGED, DOWNLOAD = "checkpoints", "adapter", "merged model", "model download"
NO_SAVES = "save_strategy is no: one checkpoint is written where a signal ends the training, and no other"
# Files and directories: a checkpoint has 12 to 17, an adapter or a model without its shards fewer.
ENTRIES = 20


@dataclass(frozen=True)
class Outlook:
    """What a run wants of its disks, by filesystem: two paths on one share its space.

    checkpoint: bytes of one, at its largest. made_of: its largest parts in words, "" where it was only measured. keep:
    how many stay (None: all). held: how many there are at the fullest, the one being written included; reserve: the
    bytes held for one more. saves: how many are to come, None where that is not known. saves_until_full: until one does
    not fit even without the reserve, None where all do. notes: what is not known, or not counted.
    """

    checkpoint: int
    made_of: str
    keep: int | None
    held: int
    reserve: int
    saves: int | None
    saves_until_full: int | None
    hours_until_full: float | None
    disks: tuple[Disk, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return all(disk.fits for disk in self.disks)

    @property
    def lines(self) -> list[str]:
        """A few lines for a log: what is wanted, what there is, and what helps where it does not fit."""
        first, *others = self.about_saves
        return [first, *map(str, self.disks), *others]

    @property
    def about_saves(self) -> list[str]:
        """The same without what is said of each disk."""
        reserve = f" and a reserve of {spoken(self.reserve)}" if self.reserve else ""
        made_of = f" ({self.made_of})" if self.made_of else ""
        said = [f"one checkpoint is {spoken(self.checkpoint)}{made_of}; at the fullest there are {self.held}{reserve}"]
        if self.saves_until_full is not None:
            hours = "" if self.hours_until_full is None else f", which is in {self.hours_until_full:.1f} hours"
            room = f"{self.saves_until_full} more saves, and not for the one after them"
            said.append(f"there is room for {room if self.saves_until_full else 'not one save'}{hours}")
        short = [disk for disk in self.disks if disk.short]
        said += [f"{disk.filesystem.mount}: what helps: {'; '.join(self.advice(disk))}" for disk in short]
        asked = [disk.allocation for disk in self.disks if disk.allocation is not None]
        said += [answer.message for answer in asked if answer.fits is None]
        return said + list(self.notes)

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def advice(self, disk: Disk) -> list[str]:
        """What to do about a disk that is too small."""
        free = disk.filesystem.space.free
        sizes = {need.what: need for need in disk.needs}
        said = []
        if disk.training > free and CHECKPOINTS in sizes:
            kept = self.held - 1 if self.keep is None else self.keep
            if kept > 2:
                saved = spoken((kept - 2) * self.checkpoint)
                instead = "all" if self.keep is None else kept
                said.append(f"2 checkpoints kept instead of {instead} (save_total_limit) are {saved} less")
            if disk.training - self.reserve <= free:
                said.append("it goes without the reserve, which is taken only where there is room")
            said.append("a directory on another disk for what does not fit, if none is named yet "
                        "(cogumi.fallback, or protect(fallback=...) in a script)")  # fmt: skip
            less = "saves less often" if self.keep is None else ""
            said.append(less or "saving less often does not help: the fullest moment stays the same")
        if disk.end > free and MERGED in sizes:
            said.append(f"cogumi.merge=false leaves {spoken(sizes[MERGED].end)} for `cogumi merge` to write elsewhere")
        if DOWNLOAD in sizes and sizes[DOWNLOAD].training:
            said.append("HF_HOME on another disk")
        return [*said, f"{spoken(disk.short)} more space, or the run on another disk"]


def outlook(
    trainer: Any,
    *,
    keep: int | None,
    adapter_into: Path | None = None,
    merged_into: Path | None = None,
    more: Iterable[Need] = (),
    hours_between_saves: float | None = None,
    notes: Iterable[str] = (),
) -> Outlook:
    """What a protected trainer's run will want of its disks, from now on. Changes nothing.

    keep: as `protect` keeps them (None: all). adapter_into, merged_into: where those will be written, if they will. more:
    what else is to be counted; notes: what else is to be said. Raises what `checkpoint_bytes` raises, and OSError for a
    disk that does not answer.
    """
    args, output_dir = trainer.args, Path(trainer.args.output_dir)
    forecast = checkpoint_bytes(trainer)
    each = forecast.at(max(last_step_known(trainer), forecast.step)).total
    regular = args.save_strategy.value != "no"
    found = Found.below(output_dir)
    # The newest there is resumed from, and stays.
    resumed = bool(found.ours) and trainer.state.global_step == 0
    step = step_of(found.ours[0]) if resumed else trainer.state.global_step
    beside = found.pinned + resumed + (args.metric_for_best_model is not None)
    needs = list(more)
    if adapter_into is not None:
        needs.append(Need(ADAPTER, adapter_into, 0, forecast.weights + forecast.files, ENTRIES))
    if merged_into is not None:
        needs.append(merged_need(base_on_disk(trainer.model), merged_into, trainer.processing_class))
    return composed(
        each=each,
        made_of=f"weights {spoken(forecast.weights)}, optimizer {spoken(forecast.optimizer)}",
        keep=keep,
        staying=None if keep is None else keep + beside,
        reserve=each if regular else 0,
        saves=saves_to_come(trainer, step) if regular else 1,
        found=found,
        needs=needs,
        hours_between_saves=hours_between_saves,
        notes=(*(() if regular else (NO_SAVES,)), *notes),
    )


def composed(
    *,
    each: int,
    made_of: str,
    keep: int | None,
    staying: int | None,
    reserve: int,
    saves: int | None,
    found: "Found",
    needs: list[Need],
    hours_between_saves: float | None,
    notes: tuple[str, ...] = (),
    ask: bool = True,
) -> Outlook:
    """The outlook of a run: `staying` of its checkpoints stay at once (None: all), `saves` are to come (None: not known)."""
    present = len(found.ours)
    at_end = math.inf if staying is None else max(staying, present)  # what is there beyond `keep` has its reason
    total = math.inf if saves is None else present + saves
    if math.isinf(total) and math.isinf(at_end):
        total = present + 1
        notes = (*notes, "every checkpoint stays, and how many are to come is not known: only the next is counted")
    held = int(min(total, at_end + 1)) if saves != 0 else present
    reserve = reserve if saves != 0 else 0
    # With nothing to come nothing is wanted, however unequal those are that are there.
    training = max(0, held * each + reserve - found.bytes) if saves != 0 else 0
    end = max(0, int(min(total, at_end)) * each - found.bytes) if saves != 0 else 0
    entries = max(0, held - present) * ENTRIES
    needs = [Need(CHECKPOINTS, found.directory, training, end, entries), *needs]
    disks = tuple(disks_of(needs, ask))
    space = next(disk.filesystem.space for disk in disks if any(need.what == CHECKPOINTS for need in disk.needs))
    limit = None if staying is None else max(staying, present)
    until = saves_until_full(space.free + found.reserve, each, limit, present) if space.total else None
    if until is not None and saves is not None and until >= saves:
        until = None
    hours = None if until is None or hours_between_saves is None else (until + 1) * hours_between_saves
    return Outlook(each, made_of, keep, held, reserve, saves, until, hours, disks, notes)


@dataclass(frozen=True)
class Found:
    """What is in a directory of checkpoints already.

    ours: those that count toward what is kept. bytes: what they, the reserve and a save under way take on the disk.
    """

    directory: Path
    ours: tuple[Path, ...]
    pinned: int
    bytes: int
    reserve: int

    @classmethod
    def below(cls, directory: Path) -> "Found":
        ours = tuple(path for path in checkpoints_in(directory) if (path / MANIFEST_NAME).is_file())
        return cls.of(directory, ours)

    @classmethod
    def of(cls, directory: Path, ours: tuple[Path, ...]) -> "Found":
        others = list(directory.iterdir()) if directory.is_dir() else []
        reserve, staged = (
            sum(taken_now(path) for path in others if kind_of(path.name, LEFTOVERS) == kind)
            for kind in (RESERVE, STAGING)
        )
        pinned = sum((path / PIN_NAME).exists() for path in ours)
        return cls(directory, ours, pinned, sum(map(taken_now, ours)) + reserve + staged, reserve)


def taken_now(path: Path) -> int:
    """What a file or directory takes on the disk; 0 where a save or a removal has just given it another name."""
    try:
        return taken_by(path)
    except FileNotFoundError:
        return 0


def saves_to_come(trainer: Any, step: int) -> int | None:
    """How many checkpoints the trainer writes after a step; None where that is not known, as before an epoch's length is."""
    args, state = trainer.args, trainer.state
    last, strategy = last_step_known(trainer), args.save_strategy.value
    if strategy == "epoch" and args.max_steps <= 0:
        return max(0, math.ceil(args.num_train_epochs) - math.floor(state.epoch or 0))
    if strategy != "steps" or not last:
        return None
    every = max(1, math.ceil(args.save_steps if args.save_steps >= 1 else args.save_steps * last))
    return math.ceil(last / every) - step // every if step < last else 0


def merged_need(config: Any, path: Path, tokenizer: Any = None) -> Need:
    size = merged_bytes(config) + tokenizer_bytes(tokenizer)
    return Need(MERGED, path, 0, size, ENTRIES + size // SHARD_BYTES)


def base_on_disk(model: Any) -> Any:
    """The config that the base has on disk, whose dtype a merge keeps: a loaded model's says what it was loaded in."""
    from transformers import AutoConfig

    name = model.config.name_or_path
    return AutoConfig.from_pretrained(name, revision=commit_of(model.config)) if name else model.config
