"""One trainer's saves: staged, committed beside the training, pruned; and the policies for a full disk.

Of several processes the first does all of it. When it asks for that, the others add their random states, their part of a
rollout, and their shards of model and optimizer to what it stages.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from cogumi.checkpoints.commit import STAGING_NAME, commit, is_disk_full, open_staging, remove_staging, set_aside
from cogumi.checkpoints.interruption import Preemption, Watchdog
from cogumi.checkpoints.manifest import MANIFEST_NAME, Identity, read_settings, step_of
from cogumi.checkpoints.mirror import Mirror
from cogumi.checkpoints.snapshots import list_snapshots, take_snapshot, thin_out
from cogumi.checkpoints.verify import CheckpointState, inspect, plan_pruning, remove
from cogumi.core.disk_space import format_bytes
from cogumi.core.errors import best_effort
from cogumi.patches import replaced
from cogumi.patches import trl_internals as internals
from cogumi.patches.torch_internals import first_line
from cogumi.stack.ranks import Ranks

log = logging.getLogger(__name__)

UNLOGGED = "cogumi_unlogged"  # in the state of a checkpoint: what the next logged row will average
RETRY_SECONDS = 15.0
MIRROR_SECONDS = 3600.0


class Saver:
    """Saves one trainer's checkpoints, in the training thread but for the commit of a staged one.

    keep: how many of the newest stay, None for all. on_full: as for `protect`.
    """

    def __init__(
        self,
        trainer: Any,
        keep: int | None,
        on_full: str,
        mirror: Mirror | None,
        watchdog: Watchdog,
        preemption: Preemption,
        ranks: Ranks,
    ) -> None:
        self.trainer, self.original = trainer, getattr(trainer, internals.SAVE_CHECKPOINT)
        self.keep, self.on_full, self.mirror = keep, on_full, mirror
        self.watchdog, self.preemption, self.ranks = watchdog, preemption, ranks
        self.identity = Identity("", {})
        self.find_fault: Callable[[], str] = lambda: ""  # why the model must not be saved now
        self.describe_adapter: Callable[[Path], Any] | None = None  # writes its record; None: no snapshots are taken
        self.pack_run: Callable[[Path], Any] | None = None  # adds what another machine needs to continue the run
        self.lost_best = ""  # the name of the best checkpoint, where it was to be loaded and is gone
        self.refused: Path | None = None
        self.resumed_from: Path | None = None
        self.committed: list[Path] = []
        self.findings: dict[Path, CheckpointState] = {}
        self.write_seconds: list[float] = []  # of each save, for which the training waits
        self.pending: tuple[Path, Path, Future[CheckpointState]] | None = None
        self.committer = ThreadPoolExecutor(1, thread_name_prefix="cogumi-checkpoint")

    @property
    def is_ending(self) -> bool:
        return self.preemption.received is not None

    def begin(self, resumed_from: Path | None, run: str) -> None:
        """Start over for each training of a trainer: the steps of two have the same names."""
        self.resumed_from = resumed_from
        self.identity = Identity(run, read_settings(self.trainer))
        self.committed.clear()
        self.findings.clear()
        self.remove_leftovers()
        if resumed_from is not None and (resumed_from / MANIFEST_NAME).is_file():  # which has just been verified
            self.findings[resumed_from] = CheckpointState(resumed_from, step_of(resumed_from), "verified", "", 0)
            # The process that wrote it may have ended before the upload did.
            if self.mirror is not None and self.mirror.reached != step_of(resumed_from):
                self.mirror.send(resumed_from)

    def remove_leftovers(self) -> None:
        """Remove a save that no thread is at work on. The caller holds the directory's lock."""
        directory = Path(self.trainer.args.output_dir)
        # A disk that is read-only by now must not hide why the training ended.
        with best_effort(f"remove what a save left in {directory}", OSError):
            if self.pending is None:
                remove_staging(directory)

    def save(self, model: Any, trial: Any) -> None:
        """Replace the trainer's `_save_checkpoint`. Raises what that raises, unless the disk is full."""
        if fault := self.find_fault():
            if self.ranks.leads:
                log.error("step %d is not saved: %s", self.trainer.state.global_step, fault)
            return
        if not self.ranks.leads:
            self.follow(model, trial)
            return
        failed = True
        try:
            self.settle()
            output_dir = Path(getattr(self.trainer, internals.OUTPUT_DIRECTORY)(trial))
            final = output_dir / f"checkpoint-{self.trainer.state.global_step}"
            if final not in self.committed and not self.write(model, trial, final):
                self.make_room(final, lambda: self.write(model, trial, final))
            failed = False
        finally:
            ending = self.trainer.control.should_training_stop
            self.ranks.tell((None, failed, self.trainer.state.best_model_checkpoint, ending))

    def follow(self, model: Any, trial: Any) -> None:
        """Save as one of the other processes: add to what the first stages, as often as it tries, until it sends None."""
        while True:
            staged, failed, best, ending = self.ranks.tell()
            if staged is None:
                break
            error = None
            try:
                if self.trainer.is_fsdp_enabled:  # shards are written by all processes in step
                    self.write_into(Path(staged).parent, model, trial)
                else:
                    self.trainer.store_flos()  # which all processes sum up
                    if not self.trainer.args.save_only_model:
                        getattr(self.trainer, internals.SAVE_RNG_STATE)(staged)
                save_rollouts(self.trainer, Path(staged))
            except Exception as raised:  # noqa: BLE001  the first tells whether the disk is full, and raises it where not
                error = RuntimeError(f"process {self.ranks.index}: {type(raised).__name__}: {first_line(raised)}")
            self.ranks.gather(error)
        if failed:
            raise RuntimeError("the first process of this training could not save")
        self.trainer.state.best_model_checkpoint = best
        self.trainer.control.should_training_stop |= ending

    def write_into(self, staging: Path, model: Any, trial: Any) -> None:
        """Call the trainer's own save with another directory. It uploads nothing and removes no older checkpoints."""
        elsewhere = {
            internals.OUTPUT_DIRECTORY: lambda trial=None: str(staging),
            internals.PUSH_CHECKPOINT: lambda folder: None,
        }
        # Shards are written in step. Of whole copies only the first process writes; in the middle it would wait for the others
        # (transformers 5.17, `_save_checkpoint`), and one that failed before would leave them waiting.
        alone = {"barrier": lambda *_, **__: None} if self.ranks.count > 1 and not self.trainer.is_fsdp_enabled else {}
        with replaced(self.trainer, elsewhere), as_checkpoint_error(self.trainer), replaced(torch.distributed, alone):
            self.original(model, trial)

    def write(self, model: Any, trial: Any, final: Path) -> bool:
        """Stage a checkpoint and start its commit; False if the disk is full, and then nothing of it is left."""
        staging, best = final.parent / STAGING_NAME, self.trainer.state.best_model_checkpoint
        began = time.monotonic()
        try:
            if final.exists():
                log.warning("%s was there already, from another run; it is %s now", final, set_aside(final).name)
            staged = open_staging(final.parent) / final.name
            self.ranks.tell((str(staged), False, None, False))
            sums = json.dumps(internals.unlogged(self.trainer), default=float)  # of which some are tensors
            self.trainer.state.stateful_callbacks[UNLOGGED] = json.loads(sums)
            self.write_with_others(lambda: self.write_into(staging, model, trial))
            state = self.trainer.state
            if state.best_model_checkpoint and Path(state.best_model_checkpoint) == staged:
                state.best_model_checkpoint = str(final)  # Trainer has noted the place where it was staged
                path = staged / "trainer_state.json"
                values = json.loads(path.read_text(encoding="utf-8")) | {"best_model_checkpoint": str(final)}
                path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            save_rollouts(self.trainer, staged)
            self.identity.write(staged)
            if self.pack_run is not None:
                self.pack_run(staged)
        except BaseException as error:
            full = isinstance(error, Exception) and is_disk_full(error, final.parent)  # before its room is given back
            self.trainer.state.best_model_checkpoint = best  # Trainer may have noted the place that is now gone
            remove_staging(final.parent)
            if not full:
                raise
            if final != self.refused:  # while training waits for space it is tried again and again
                log.warning("%s does not fit on the disk (%s)", final, first_line(error))
            self.refused = final
            return False
        self.pending = staged, final, self.committer.submit(commit, staged, final)
        if self.is_read_on_save():
            self.settle()
        if self.trainer.args.push_to_hub and final in self.committed:
            getattr(self.trainer, internals.PUSH_CHECKPOINT)(str(final))
        self.write_seconds.append(time.monotonic() - began)
        return True

    def write_with_others(self, write: Callable[[], None]) -> None:
        """Write, and wait until the other processes have. Raises this one's error, or else the first of theirs."""
        try:
            write()
        except BaseException:
            self.ranks.gather(None)
            raise
        for error in self.ranks.gather(None):
            if error is not None:
                raise error

    def is_read_on_save(self) -> bool:
        """Tell whether a callback of the user's, or the hub's upload, reads the checkpoint right after the save."""
        kinds = [type(callback) for callback in self.trainer.callback_handler.callbacks]
        return self.trainer.args.push_to_hub or any(
            kind.on_save is not TrainerCallback.on_save for kind in kinds if not kind.__module__.startswith("cogumi.")
        )

    def poll(self) -> None:
        """Finish a commit that is done; called after each step."""
        if self.pending is not None and self.pending[2].done():
            self.settle()

    def settle(self) -> None:
        """Wait for the commit under way, then prune older checkpoints. Raises OSError when the disk fails."""
        if self.pending is None:
            return
        staged, final, committing = self.pending
        try:
            finding = committing.result()
        except OSError as error:
            self.pending = None
            if not is_disk_full(error, final.parent):
                raise
            log.warning("%s could not be committed (%s)", final, first_line(error))
            self.make_room(final, lambda: self.commit_again(staged, final))
            return
        self.pending = None
        self.record_result(final, finding)

    def commit_again(self, staged: Path, final: Path) -> bool:
        """Commit in this thread what is still staged; False if the disk is still full."""
        try:
            finding = commit(staged, final)
        except OSError as error:
            if not is_disk_full(error, final.parent):
                raise
            return False
        self.record_result(final, finding)
        return True

    def record_result(self, final: Path, finding: CheckpointState) -> None:
        if finding.state != "verified":
            raise OSError(f"{final} was written and reads back differently ({finding.reason}): disk or memory fail")
        self.committed.append(final)
        self.findings[final] = finding
        log.info("%s is saved and verified (%s)", final, format_bytes(finding.bytes))
        if self.mirror is not None:
            self.mirror.best = self.kept_checkpoints()[0]
            self.mirror.send(final)
        if self.describe_adapter is not None and (final / "adapter_config.json").is_file():
            with best_effort(f"keep a snapshot of the adapter of {final.name}"):
                take_snapshot(final, self.describe_adapter)
        if self.keep is not None:
            self.prune(final.parent, self.keep)

    def prune(self, output_dir: Path, keep: int) -> None:
        """Remove older checkpoints, after one that stays was read back."""
        best, pinned = self.kept_checkpoints()
        pinned |= frozenset() if self.mirror is None else self.mirror.pending()
        self.remove(plan_pruning(output_dir, keep, best, pinned, self.inspect_once)[0])

    def remove(self, going: list[Path]) -> bool:
        for path in going:
            log.info("%s makes room (%s)", path, format_bytes(remove(path)))
        return bool(going)

    def inspect_once(self, path: Path) -> CheckpointState:
        """Verify a checkpoint that stays: all of it once, later only names and sizes, which costs the training no time."""
        known = self.findings.get(path)
        if known is not None and known.state != "verified":
            return known
        finding = inspect(path, check_all=known is None)
        if finding.state != "verified":
            log.warning("%s is damaged, and one more stays in its place: %s", path, finding.reason)
        self.findings[path] = finding
        return finding

    def kept_checkpoints(self) -> tuple[Path | None, frozenset[Path]]:
        """Return (the best checkpoint, pinned ones), which stay however old they are."""
        best = self.trainer.state.best_model_checkpoint
        pinned = [] if self.resumed_from is None else [self.resumed_from]
        return Path(best) if best else None, frozenset(pinned)

    def find_best(self) -> None:
        """Look for the best checkpoint beside the one resumed from: where a run was moved, its recorded path is dead.

        Trainer ignores such a path, and takes the last weights for the best.
        """
        if self.resumed_from is None:
            return
        state = json.loads((self.resumed_from / "trainer_state.json").read_text(encoding="utf-8"))
        if recorded := state["best_model_checkpoint"]:
            best = self.resumed_from.parent / Path(recorded).name
            self.lost_best = "" if best.is_dir() or Path(recorded).is_dir() else best.name
            self.trainer.state.best_model_checkpoint = (
                str(best) if best.is_dir() else None if self.lost_best else recorded
            )

    def prune_for_room(self, output_dir: Path) -> bool:
        """Leave the newest that verifies, the best, and the one resumed from; if all stay, remove the oldest alone.

        Returns whether any was removed, which includes those not yet mirrored.
        """
        newest = self.committed[-1] if self.committed else None
        if newest is None or newest.parent != output_dir or inspect(newest).state != "verified":
            return False
        going = plan_pruning(output_dir, 1, *self.kept_checkpoints(), self.inspect_once)[0]
        return self.remove(going[:1] if self.keep is None else going)

    def make_room(self, final: Path, again: Callable[[], bool]) -> None:
        """Remove older checkpoints until a new one fits, or do what `on_full` says. again: tries, and returns success."""
        while thin_out(final.parent, len(list_snapshots(final.parent)) // 2) or self.prune_for_room(final.parent):
            if again():
                return
        place = final.parent.absolute()
        if self.on_full == "pause" and not self.is_ending:
            log.error("training waits: %s does not fit. Free space on the disk of %s", final.name, place)
            with self.watchdog.excused():
                while not (fits := again()) and not self.is_ending:
                    self.wait()
            if fits:
                log.warning("there is space again; training continues")
                return
        remove_staging(final.parent)
        ends = self.on_full == "stop" or self.is_ending
        if ends:
            self.trainer.control.should_training_stop = True
        last = f"the last good one is {self.committed[-1].name}" if self.committed else "there is none yet"
        how = "ends" if ends else "continues"
        log.error("training %s without %s, which does not fit in %s; %s", how, final.name, place, last)

    def wait(self) -> None:
        until = time.monotonic() + RETRY_SECONDS
        while time.monotonic() < until and not self.is_ending:
            time.sleep(min(0.5, RETRY_SECONDS))

    def finish(self) -> None:
        """Finish saves and uploads at the end of training, however it ends."""
        try:
            self.settle()
        finally:
            self.remove_leftovers()
        if self.mirror is not None:
            ending = self.is_ending  # by a signal that has been heard: the next one ends the process
            with self.watchdog.excused():
                self.mirror.finish(MIRROR_SECONDS, lambda: self.is_ending and not ending)


@contextmanager
def as_checkpoint_error(trainer: Any) -> Iterator[None]:
    """Raise the first process's error in place of torch's CheckpointException, which is no Exception."""
    if not trainer.is_fsdp_enabled:
        yield
        return
    from torch.distributed.checkpoint import CheckpointException  # imported here: it takes half a second

    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


# GRPOTrainer trains on one batch of completions for steps_per_generation x num_iterations steps (trl/trainer/grpo_trainer.py,
# `_prepare_inputs`), counted by `_step`; its RepeatSampler draws a new order each epoch from a generator of its own.
# A resumed one counts from 0, generates anew in the middle of a batch, and repeats the first epoch's order.
def state_name(trainer: Any) -> str:
    """Name the file of this process; each has its own, as of its random states."""
    args = trainer.args
    return "cogumi-rollouts.pt" if args.world_size == 1 else f"cogumi-rollouts_{args.process_index}.pt"


def save_rollouts(trainer: Any, directory: Path) -> None:
    """Write TRL's position into a checkpoint, with the rollouts if the next step still uses them."""
    if internals.makes_rollouts(trainer):
        step, rollouts = internals.rollout_position(trainer)
        used_up = step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0
        values = {
            "step": step,
            "rollouts": None if used_up else rollouts,
            "micro_batches": trainer.args.steps_per_generation,
        }
        torch.save(values, directory / state_name(trainer))


def load_rollouts(trainer: Any, directory: Path) -> None:
    """Restore TRL's position, before `trainer.train` begins. Without it, TRL generates anew."""
    path = directory / state_name(trainer)
    if internals.makes_rollouts(trainer) and path.is_file():
        values = torch.load(path, map_location=trainer.args.device, weights_only=True)
        count = trainer.args.steps_per_generation
        parts, rollouts = count // values.get("micro_batches", count), values["rollouts"]
        if rollouts is not None and parts > 1:  # since then the micro-batches were made smaller
            from trl.trainer.utils import split_tensor_dict

            rollouts = [part for batch in rollouts for part in split_tensor_dict(batch, parts)]
        internals.set_rollout_position(trainer, values["step"] * parts, rollouts)


def continue_prompt_order(trainer: Any, directory: Path | None) -> AbstractContextManager[None]:
    """Have new samplers of prompts begin with the epoch in which the checkpoint was written."""
    if directory is None or not internals.makes_rollouts(trainer):
        return nullcontext()
    epochs = int(round(json.loads((directory / "trainer_state.json").read_text(encoding="utf-8"))["epoch"], 6))
    original = getattr(trainer, internals.TRAIN_SAMPLER)

    def continued(*args: Any) -> Any:
        sampler = original(*args)
        for _ in range(epochs if getattr(sampler, "shuffle", False) else 0):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    return replaced(trainer, {internals.TRAIN_SAMPLER: continued})
