"""`protect(trainer)`: safe checkpoints and resuming for any transformers or TRL trainer, on the instance."""

import logging
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy, TrainOutput

from cogumi.checkpoints import verify
from cogumi.checkpoints.callbacks import FiniteGuard, Pulse, Watch
from cogumi.checkpoints.commit import set_aside
from cogumi.checkpoints.interruption import Preemption, Watchdog
from cogumi.checkpoints.manifest import RUN_NAME, Identity, differences, read_run_name, read_settings, step_of
from cogumi.checkpoints.mirror import Mirror
from cogumi.checkpoints.saving import Saver, as_checkpoint_error, continue_prompt_order, load_rollouts
from cogumi.checkpoints.snapshots import list_snapshots
from cogumi.core.durability import NO_SPACE, lock_directory, write_error
from cogumi.core.errors import UsageError
from cogumi.core.output import survive_closed_terminal
from cogumi.core.run_directory import write_atomic
from cogumi.disk.callback import log_or_print
from cogumi.patches import trl_internals as internals
from cogumi.patches.torch_internals import first_line
from cogumi.stack.ranks import Ranks

log = logging.getLogger(__name__)

DEFAULT_KEEP = 2  # of a run of `cogumi train`, where its YAML says nothing
DEFAULT = "default"  # PEFT's name for the first adapter, whose files have no directory of their own
POLICIES = ("continue", "pause", "stop")


def protect(
    trainer: Any,
    *,
    keep: int | None = None,
    resume: str = "auto",
    on_full: str = "continue",
    mirror: str | Path | None = None,
    on_hung: str = "continue",
    log_path: str | Path | None = None,
) -> Any:
    """Make a trainer's checkpoints whole or absent, keep the last good ones, and resume from them. Returns the trainer.

    SIGTERM, SIGHUP and SIGINT during `trainer.train()` save the last finished step, then end the process or interrupt the
    cell. A non-finite trained weight is not saved and ends the training, as do three steps in a row with a non-finite loss
    or gradient norm. In a training of several processes (DDP, FSDP2 with sharded checkpoints) each calls this; all of
    them end and resume together, in any number of processes.

    Args:
        trainer: A transformers or TRL trainer.
        keep: How many of the newest checkpoints stay, at least 2; default: args.save_total_limit, where None keeps all.
            The best one, the one resumed from, and those that hold a file named KEEP stay too.
        resume: "auto" lets `trainer.train()` continue from the newest checkpoint that verifies; "never" only if told to.
        on_full: When older checkpoints do not make enough room, "continue" trains on and tries again at the next save,
            "pause" waits for space, "stop" ends the training.
        mirror: A directory, an fsspec URL such as s3://bucket/run, or hf://user/repository. Each checkpoint is copied
            there beside the training, and a resume fetches one that is newer than those here.
        on_hung: Without a sign of life for 20 times the median step, and for minutes, the stacks of all threads go to
            log_path. Then "continue" waits; "stop" ends the training as SIGTERM does, or the process if that fails.
        log_path: Default: run.log in args.output_dir.

    Raises:
        UsageError: The trainer's checkpoints are unknown (FSDP1, DeepSpeed, processes that share no disk), or the mirror
            cannot be written to.
    """
    check_arguments(trainer, keep, resume, on_full, mirror)
    if isinstance(getattr(trainer, "cogumi_protection", None), Protection):
        raise UsageError("this trainer is protected already", fix="build it again for other settings")
    watchdog = getattr(trainer, "cogumi_watchdog", None)  # of the run that the training is a part of
    watchdog = watchdog or Watchdog(log_path or Path(trainer.args.output_dir) / "run.log", on_hung)
    preemption = Preemption()
    ranks = Ranks(trainer.args.process_index, trainer.args.world_size)
    opened: list[Mirror] = []
    if mirror is not None:
        ranks.decide(lambda: opened.append(Mirror(mirror)))
    keep = keep or keep_limit(trainer.args.save_total_limit)
    saver = Saver(trainer, keep, on_full, opened[0] if opened else None, watchdog, preemption, ranks)
    trainer.cogumi_protection = Protection(saver, resume)
    if ranks.leads:
        log_or_print(f"checkpoints: {trainer.cogumi_protection}")
    return trainer


def keep_limit(limit: int | None) -> int | None:
    """Return how many checkpoints stay under a `save_total_limit`; None for all, as in transformers."""
    return max(2, limit) if limit is not None and limit > 0 else None


def check_arguments(trainer: Any, keep: int | None, resume: str, on_full: str, mirror: str | Path | None) -> None:
    if not isinstance(getattr(trainer, "args", None), TrainingArguments):
        raise UsageError(f"protect takes a transformers or TRL trainer, and was given {type(trainer).__name__}")
    if keep is not None and (not isinstance(keep, int) or keep < 2):
        raise UsageError(f"keep={keep!r}: how many checkpoints stay is a whole number, at least 2")
    if mirror == "" or (mirror is not None and Path(mirror).resolve() == Path(trainer.args.output_dir).resolve()):
        raise UsageError(
            f"mirror={str(mirror)!r} is where the checkpoints are", fix="name another place, or leave it out"
        )
    if resume not in ("auto", "never"):
        raise UsageError(f"resume={resume!r} is not one of auto, never", fix="pass a path to trainer.train()")
    if on_full not in POLICIES:
        raise UsageError(f"on_full={on_full!r} is not one of {', '.join(POLICIES)}")
    if other := (trainer.is_deepspeed_enabled and "DeepSpeed") or (trainer.is_fsdp_enabled and unknown_shards(trainer)):
        raise UsageError(f"protect does not know the checkpoints of {other}")
    if trainer.args.world_size > 1 and trainer.args.save_on_each_node:
        raise UsageError(
            "save_on_each_node: protect has one process write, on a disk that all of them see", fix="drop it"
        )


def unknown_shards(trainer: Any) -> str:
    """Name the unsupported kind of FSDP checkpoints; "" for FSDP2's shards."""
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        return "FSDP1: set fsdp_version to 2"
    kind = getattr(plugin.state_dict_type, "name", str(plugin.state_dict_type))
    return "" if kind == "SHARDED_STATE_DICT" else f"FSDP2 with {kind}: set its state dict type to SHARDED_STATE_DICT"


class Protection:
    """Puts safe saves, resuming, signals and the watch on a trainer."""

    def __init__(self, saver: Saver, resume: str) -> None:
        self.trainer = trainer = saver.trainer
        self.saver, self.resume = saver, resume
        self.watchdog, self.preemption, self.ranks = saver.watchdog, saver.preemption, saver.ranks
        ours = {
            internals.SAVE_CHECKPOINT: self.saver.save, internals.LOAD_BEST_MODEL: self.load_best_model,
            internals.LOAD_CHECKPOINT: self.load_all_adapters,
            internals.LOAD_OPTIMIZER: self.load_named(internals.LOAD_OPTIMIZER, f"{verify.OPTIMIZER} or {verify.SCHEDULER}"),
            internals.LOAD_RNG_STATE: self.load_named(internals.LOAD_RNG_STATE, "rng_state.pth"), "train": self.train_protected,
        }  # fmt: skip
        self.original = {name: getattr(trainer, name) for name in ours}
        for name, function in ours.items():
            setattr(trainer, name, function)
        trainer.args.save_total_limit = None
        self.finite = FiniteGuard(trainer, saver.ranks)
        saver.find_fault = self.finite.find_fault
        trainer.add_callback(self.finite)
        trainer.add_callback(Watch(saver))
        trainer.add_callback(Pulse(saver.watchdog))

    def __str__(self) -> str:
        if SaveStrategy(self.trainer.args.save_strategy) == SaveStrategy.NO:
            return "save_strategy is no: one is written where a signal ends the training, and no other"
        staying = "all stay" if self.saver.keep is None else f"the newest {self.saver.keep} stay"
        copied = f"; copied to {self.saver.mirror}" if self.saver.mirror else ""
        return f"verified in {self.trainer.args.output_dir}; {staying}; on a full disk: {self.saver.on_full}{copied}"

    def train_protected(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if self.ranks.count > 1 and not self.trainer.is_fsdp_enabled:
            internals.forget_evaluation(self.trainer)
        with ExitStack() as held:
            point, finished = self.ranks.decide(lambda: self.prepare(held, resume_from_checkpoint))
            self.saver.resumed_from = point
            if point is not None and not finished:
                with loading(point, "its rollouts"):
                    load_rollouts(self.trainer, point)
            with (
                survive_closed_terminal(),
                self.preemption.listening(),
                self.watchdog.watching(),
                continue_prompt_order(self.trainer, point),
            ):
                try:
                    if point is not None and finished:
                        done = self.load_finished(point)
                    else:
                        done = self.original["train"](None if point is None else str(point), *args, **kwargs)
                finally:
                    if self.ranks.leads:
                        self.saver.finish()
                if self.ranks.leads and self.saver.keep is not None:  # one too many was left by a killed process
                    self.saver.prune(Path(self.trainer.args.output_dir), self.saver.keep)
                return done

    def prepare(self, held: ExitStack, requested: str | bool | None) -> tuple[Path | None, bool]:
        """Lock and tidy the directory. Returns the checkpoint to resume from, and whether it is the end of the training.

        held: gets the lock. Of several processes the first does this.
        """
        output_dir = Path(self.trainer.args.output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        if error := write_error(output_dir):
            reason = f"no checkpoint can be written there ({error.strerror})"
            raise UsageError(reason, place=output_dir, fix="set another output_dir")
        if held.enter_context(lock_directory(output_dir)) is False:
            fix = "wait for it, or set another output_dir"
            raise UsageError("another training is writing there", place=output_dir, fix=fix)
        point = self.find_resume_checkpoint(requested)
        if point is not None:
            refuse_other_sharding(point, self.trainer.is_fsdp_enabled)
        for path in verify.remove_trash(output_dir):
            log.info("removed %s, left by an interrupted removal", path.name)
        # Later checkpoints are of another run, or damaged, and their steps are yet to come.
        for path in verify.list_checkpoints(output_dir):
            if step_of(path) > (-1 if point is None else step_of(point)):
                aside = set_aside(path).name
                log.warning("%s is from before this start, and %s now; delete it when you do not need it", path, aside)
        for step, path in list_snapshots(output_dir).items():
            if step > (-1 if point is None else step_of(point)):
                set_aside(path)
        self.saver.begin(point, self.resolve_run_name(point))
        # Each process wrote its random states, one alone into rng_state.pth.
        was = 0 if point is None else len(list(point.glob("rng_state*.pth")))
        if was not in (0, self.ranks.count):
            text = "%s is of %d processes, and these are %d: random states are new, so nothing is repeated to the bit"
            log.warning(text, point, was, self.ranks.count)
        return point, point is not None and self.is_finished(point)

    def find_resume_checkpoint(self, requested: str | bool | None) -> Path | None:
        """Return the checkpoint to resume from, also one on the mirror; None to start anew.

        Raises UsageError if `requested` is True or a path, and there is no checkpoint that can be resumed from.
        """
        if requested is False or (requested is None and self.resume == "never"):
            return None
        if isinstance(requested, str | Path):
            finding = verify.inspect(Path(requested))
            if finding.state == "rejected":
                raise UsageError(f"{requested} cannot be resumed from: {finding.reason}")
            return Path(requested)
        output_dir = Path(self.trainer.args.output_dir)
        point = verify.last_good_checkpoint(output_dir)
        if self.saver.mirror is not None:
            newer_than = -1 if point is None else step_of(point)
            point = self.saver.mirror.fetch_newest(output_dir, newer_than, self.is_of_this_run) or point
        if point is None and requested is True:
            raise UsageError(f"{output_dir} holds no checkpoint that can be resumed from")
        if point is not None:
            log_or_print(f"resuming from {point}")
        return point

    def is_of_this_run(self, identity: Identity, place: str) -> bool:
        """Tell whether a checkpoint in a mirror is of this training: by its name, on a new machine by the settings."""
        run = read_run_name(Path(self.trainer.args.output_dir))
        if run is None:
            other = differences(identity.settings, read_settings(self.trainer))
            if other:
                fix = "give this one its own mirror, or set these back to continue that one"
                raise UsageError(f"{place} is of another training ({other})", fix=fix)
        return run in (None, identity.run)

    def resolve_run_name(self, point: Path | None) -> str:
        """Return the name of the training that resumes from `point`, or starts, and note it in the output directory."""
        output_dir = Path(self.trainer.args.output_dir)
        run = (None if point is None else read_run_name(point) or read_run_name(output_dir)) or secrets.token_hex(4)
        try:
            write_atomic(output_dir / RUN_NAME, f"{run}\n")
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            log.warning("%s is full already: not even the name of this training fits", output_dir)
        return run

    def is_finished(self, point: Path) -> bool:
        """Tell whether the training that wrote a checkpoint had no step left, and none was added since."""
        args = self.trainer.args
        with loading(point, "trainer_state.json"):
            state = TrainerState.load_from_json(str(point / "trainer_state.json"))
        if args.max_steps > 0:
            return state.global_step >= args.max_steps
        return state.global_step >= state.max_steps and args.num_train_epochs <= state.num_train_epochs

    def load_finished(self, point: Path) -> TrainOutput:
        """Load the trained model without training: transformers would train one more step (5.17, `_inner_training_loop`)."""
        log_or_print(f"{point} is the end of this training: its weights are loaded, and nothing is left to train")
        getattr(self.trainer, internals.LOAD_CHECKPOINT)(str(point))
        self.trainer.state = state = TrainerState.load_from_json(str(point / "trainer_state.json"))
        self.saver.find_best()
        if self.trainer.args.load_best_model_at_end and state.best_model_checkpoint:
            self.original[internals.LOAD_BEST_MODEL]()
        return TrainOutput(state.global_step, math.nan, {"train_runtime": 0.0, "epoch": state.epoch})

    def load_all_adapters(self, checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Replace `trainer._load_from_checkpoint`, which does not load the trained adapter beside another one.

        PEFT saves "default" in the checkpoint itself. It saves other adapters in directories of their names, such as
        the frozen "ref" of TRL's DPO and GRPO. Where transformers 5.17 finds such a directory, it loads nothing else.
        """
        with loading(checkpoint, "its weights"), as_checkpoint_error(self.trainer):
            self.original[internals.LOAD_CHECKPOINT](checkpoint, *args, **kwargs)
            model = self.trainer.model
            several = isinstance(model, PeftModel) and {DEFAULT} < model.peft_config.keys()
            if several and not self.trainer.is_fsdp_enabled:  # whose shards are of all adapters
                model.load_adapter(checkpoint, DEFAULT, is_trainable=True)

    def load_named(self, method: str, content: str) -> Callable[[str | None], None]:

        def load(checkpoint: str | None) -> None:
            with loading(checkpoint, content), as_checkpoint_error(self.trainer):
                self.original[method](checkpoint)

        return load

    def load_best_model(self) -> None:
        """Replace `trainer._load_best_model`: the best may be the one under way."""
        self.ranks.decide(self.saver.settle)
        self.original[internals.LOAD_BEST_MODEL]()


def refuse_other_sharding(checkpoint: Path, sharded: bool) -> None:
    """Raise UsageError for a checkpoint of FSDP2's shards in a training without them, and the other way round."""
    if (checkpoint / verify.SHARDED_WEIGHTS).exists() != sharded:
        mismatch = (
            "is whole, and this training is sharded" if sharded else "is of FSDP2's shards, and this training has none"
        )
        fix = f"train {'without' if sharded else 'with'} FSDP2 again, or set another output_dir"
        raise UsageError(f"this checkpoint {mismatch}", place=checkpoint, fix=fix)


@contextmanager
def loading(checkpoint: str | Path | None, content: str) -> Iterator[None]:
    """Turn a library's error about a part of a checkpoint into a UsageError that names the part."""
    try:
        yield
    except torch.OutOfMemoryError:  # the card is full, and the checkpoint may be whole
        raise
    except Exception as error:  # whatever torch, transformers or safetensors make of damaged bytes
        fix = "move that directory away to resume from the one before it, or restore the shapes of model and adapter"
        raise UsageError(f"{content} cannot be loaded ({first_line(error)})", place=str(checkpoint), fix=fix) from error
