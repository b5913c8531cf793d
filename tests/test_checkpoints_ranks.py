"""`cogumi.protect` in two processes over gloo: what they write together, and what is left when one of them is killed."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from disk_mounts import Mount
from processes import until
from ranks import finish, losses, pid_of, said, start_ranks
from safetensors.torch import load_file
from test_checkpoints_protect import make

from cogumi import protect
from cogumi.checkpoints.commit import STAGING_NAME
from cogumi.checkpoints.manifest import MANIFEST_NAME
from cogumi.checkpoints.verify import inspect
from cogumi.core.durability import lock_directory
from cogumi.core.errors import UsageError

SEVERAL = pytest.mark.slow("several trainings in two processes, one after the other")
TWO: dict[str, Any] = {"per_device_train_batch_size": 2}  # as many examples a step as one process with 4


def run(count: int, directory: Path, **how: Any) -> list[int]:
    directory.mkdir(exist_ok=True)
    return finish(start_ranks(count, directory, **(TWO if count == 2 else {}) | how), directory)


def checkpoints(directory: Path) -> list[Path]:
    """Those of the run, oldest first, each of which verifies."""
    result = sorted((directory / "run").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    assert [inspect(each).state for each in result] == ["verified"] * len(result)
    return result


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nothing protects."""
    directory = tmp_path_factory.mktemp("plain")
    assert run(2, directory, protected=False) == [0, 0]
    return directory


def test_a_protected_run_is_the_plain_one_and_holds_what_each_process_has(plain: Path, tmp_path: Path) -> None:
    assert run(2, tmp_path) == [0, 0]
    assert losses(tmp_path) == losses(plain)
    older, newest = checkpoints(tmp_path)
    assert (older.name, newest.name) == ("checkpoint-6", "checkpoint-8")
    states = {"rng_state_0.pth", "rng_state_1.pth"}
    assert {path.name for path in newest.glob("rng_state*")} == states
    (newest / "rng_state_1.pth").unlink()
    assert "rng_state_1.pth" in inspect(newest).reason
    assert said(tmp_path, 0).count("is saved and verified") == 4
    assert "saved" not in said(tmp_path, 1)


def test_two_processes_train_what_one_does_on_the_same_examples(tmp_path: Path) -> None:
    for count in (1, 2):
        assert run(count, tmp_path / str(count), dropout=0.0) == [0] * count
    ours, one = losses(tmp_path / "2"), losses(tmp_path / "1")
    assert ours.keys() == one.keys()
    assert max(abs(ours[step] - one[step]) for step in one) < 1e-5
    weights = [load_file(tmp_path / name) for name in ("1/weights-0.safetensors", "2/weights-0.safetensors")]
    assert max(float((weights[1][name] - each).abs().max()) for name, each in weights[0].items()) < 1e-5


def test_an_evaluation_before_the_training_changes_nothing(tmp_path: Path) -> None:
    """transformers 5.17 would leave the model without DDP, and each process would take its own gradient."""
    for name in ("plain", "evaluated"):
        assert run(2, tmp_path / name, evaluates=name == "evaluated", dropout=0.0) == [0, 0]
    assert losses(tmp_path / "evaluated") == losses(tmp_path / "plain")
    weights = [load_file(tmp_path / f"evaluated/weights-{rank}.safetensors") for rank in (0, 1)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


@pytest.mark.parametrize(("method", "sharded"), [
    pytest.param(method, sharded, marks=() if (method, sharded) in {("sft", False), ("gspo", True)} else pytest.mark.sweep,
                 id=f"{method}-{'FSDP2' if sharded else 'DDP'}")
    for method in ("sft", "dpo", "gspo") for sharded in (False, True)
])  # fmt: skip
def test_each_method_trains_in_two_processes_what_it_does_in_one(
    method: str, sharded: bool, tiny_model: Path, tmp_path: Path
) -> None:
    """The losses, the adapter, and a run of two processes that was stopped: for gspo where a rollout is still in use."""
    how: dict[str, Any] = {"method": method, "model": str(tiny_model)}
    assert run(1, tmp_path / "1", **how) == [0]
    how["sharded"] = sharded
    assert run(2, tmp_path / "2", **how) == [0, 0], said(tmp_path / "2", 0)[-2000:]
    ours, one = losses(tmp_path / "2"), losses(tmp_path / "1")
    assert ours.keys() == one.keys() == set(range(1, 9))
    assert max(abs(ours[step] - one[step]) for step in one) < 1e-5
    adapters = [load_file(tmp_path / name) for name in ("1/weights-0.safetensors", "2/weights-0.safetensors")]
    assert max(float(each.abs().max()) for name, each in adapters[0].items() if "lora_B" in name) > 1e-3
    assert max(float((adapters[1][name] - each).abs().max()) for name, each in adapters[0].items()) < 1e-5
    assert run(2, tmp_path / "stopped", **how, save_steps=3, fails_at=5) == [1, 1]
    assert run(2, tmp_path / "stopped", **how, save_steps=3) == [0, 0]
    assert losses(tmp_path / "stopped") == {step: loss for step, loss in ours.items() if step > 3}
    stopped = load_file(tmp_path / "stopped/weights-0.safetensors")
    assert all(stopped[name].equal(each) for name, each in adapters[1].items())


def test_a_run_that_stopped_ends_as_if_it_had_not(plain: Path, tmp_path: Path) -> None:
    assert run(2, tmp_path, fails_at=5) == [1, 1]
    assert checkpoints(tmp_path)[-1].name == "checkpoint-4"
    assert run(2, tmp_path) == [0, 0]
    assert losses(tmp_path) == {step: loss for step, loss in losses(plain).items() if step > 4}
    ours, theirs = (load_file(each / "weights-1.safetensors") for each in (tmp_path, plain))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on_from_there(before: int, after: int, tmp_path: Path) -> None:
    assert run(before, tmp_path, dropout=0.0, fails_at=5) == [1] * before
    assert run(after, tmp_path, dropout=0.0) == [0] * after
    assert run(1, tmp_path / "one", dropout=0.0) == [0]
    whole, rest = losses(tmp_path / "one"), losses(tmp_path)
    assert rest.keys() == {5, 6, 7, 8}
    assert max(abs(rest[step] - whole[step]) for step in rest) < 1e-5
    assert f"is of {before} processes, and these are {after}" in said(tmp_path, 0)


def test_shards_are_taken_up_by_another_number_of_processes(tiny_model: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"method": "sft", "model": str(tiny_model), "sharded": True, "save_steps": 3}
    assert run(2, tmp_path / "whole", **how) == [0, 0]
    assert run(2, tmp_path, **how, fails_at=5) == [1, 1]
    assert run(4, tmp_path, **how, per_device_train_batch_size=1) == [0] * 4
    rest, whole = losses(tmp_path), losses(tmp_path / "whole")
    assert rest.keys() == {4, 5, 6, 7, 8}
    assert max(abs(rest[step] - whole[step]) for step in rest) < 1e-5
    assert "is of 2 processes, and these are 4" in said(tmp_path, 0)


@pytest.mark.parametrize("receiver", [0, 1])
def test_a_signal_to_one_process_ends_both_with_a_checkpoint(receiver: int, plain: Path, tmp_path: Path) -> None:
    status = 128 + signal.SIGTERM
    assert run(2, tmp_path, signalled_at=(3, receiver, signal.SIGTERM)) == [status, status]
    assert checkpoints(tmp_path)[-1].name == "checkpoint-3"
    assert run(2, tmp_path) == [0, 0]
    assert losses(tmp_path) == {step: loss for step, loss in losses(plain).items() if step > 3}


@pytest.mark.parametrize(("size", "on_full", "trained", "left"), [
    ("150k", "stop", 2, 0), ("150k", "continue", 8, 0), ("700k", "continue", 8, 1),
])  # fmt: skip
@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=SEVERAL)], ids=["DDP", "FSDP2"])
def test_a_full_disk_is_met_by_both(
    size: str, on_full: str, trained: int, left: int, sharded: bool, mount: Mount, tmp_path: Path
) -> None:
    """Where a checkpoint does not fit, both continue without it or both end; what is there makes room for it."""
    mount(options=f"size={size}", name="run")
    assert run(2, tmp_path, on_full=on_full, sharded=sharded) == [0, 0]
    assert max(losses(tmp_path, 0)) == max(losses(tmp_path, 1)) == trained
    assert len(checkpoints(tmp_path)) >= left
    assert not (tmp_path / "run" / STAGING_NAME).exists()
    assert left or "does not fit" in said(tmp_path, 0)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=SEVERAL)], ids=["DDP", "FSDP2"])
def test_a_loss_that_is_not_finite_in_one_process_ends_both(sharded: bool, tmp_path: Path) -> None:
    assert run(2, tmp_path, nan_at=(4, 1), sharded=sharded) == [0, 0]
    assert max(losses(tmp_path, 0)) == max(losses(tmp_path, 1)) == 5
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]
    assert "step 4 is not saved: not finite since step 4: the loss and the gradient norm" in said(tmp_path, 0)
    assert "the training ends after step 5" in said(tmp_path, 0)
    assert "not finite" not in said(tmp_path, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_cannot_save_ends_both(rank: int, tmp_path: Path) -> None:
    assert run(2, tmp_path, cannot_save=rank) == [1, 1]
    assert "ZeroDivisionError: division by zero" in said(tmp_path, 0)
    assert "RuntimeError: the first process of this training could not save" in said(tmp_path, 1)
    assert checkpoints(tmp_path) == []
    assert not (tmp_path / "run" / STAGING_NAME).exists()


def test_shards_that_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    """torch raises what is no Exception. Where there is no manifest, nothing else has looked at their bytes."""
    assert run(2, tmp_path, sharded=True, fails_at=5) == [1, 1]
    (newest, *_) = checkpoints(tmp_path)[::-1]
    (newest / MANIFEST_NAME).unlink()
    shard = newest / "pytorch_model_fsdp_0/__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:100])
    assert run(2, tmp_path, sharded=True) == [1, 1]
    for rank in (0, 1):
        assert f"UsageError: {newest}: its weights cannot be loaded (" in said(tmp_path, rank)


def test_a_mirror_that_the_first_refuses_all_refuse(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run(2, tmp_path, mirror=str(tmp_path / "file")) == [1, 1]
    for rank in (0, 1):
        last = said(tmp_path, rank).strip().splitlines()[-1]
        assert "UsageError: mirror" in last
        assert str(tmp_path / "file") in last


def test_what_the_first_refuses_all_refuse(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with lock_directory(tmp_path / "run"):
        assert run(2, tmp_path) == [1, 1]
    for rank in (0, 1):
        assert f"cogumi.core.errors.UsageError: {tmp_path / 'run'}: another training is writing there" in said(
            tmp_path, rank
        )


@pytest.mark.parametrize(("version", "kind", "told"), [
    (1, "SHARDED_STATE_DICT", "FSDP1: set fsdp_version to 2"),
    (2, "FULL_STATE_DICT", "FSDP2 with FULL_STATE_DICT: set its state dict type to SHARDED_STATE_DICT"),
    (2, "SHARDED_STATE_DICT", ""),
])  # fmt: skip
def test_other_shards_are_refused_with_the_setting(version: int, kind: str, told: str, tmp_path: Path) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    trainer, _ = make(tmp_path)
    trainer.is_fsdp_enabled = True
    trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    try:
        if told:
            with pytest.raises(UsageError, match=f"^protect does not know the checkpoints of {told}$"):
                protect(trainer)
        else:
            protect(trainer)
    finally:
        trainer.accelerator.state.fsdp_plugin = None
    trainer, _ = make(tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(UsageError, match="checkpoints of DeepSpeed"):
        protect(trainer)


def killed(victims: list[int], moment: float, in_a_save: bool, directory: Path, **how: Any) -> bool:
    """Start two processes and kill some of them: `moment` seconds after they knew of each other, or in a save after that.
    Whether there was still one to kill."""
    ready = [directory / "ready-0", directory / "ready-1"]
    for each in ready:
        each.unlink(missing_ok=True)
    ranks = start_ranks(2, directory, **TWO, **how)
    until(lambda: all(each.exists() for each in ready))
    time.sleep(moment)
    while in_a_save and ranks[0].poll() is None and not (directory / "run" / STAGING_NAME).exists():
        time.sleep(0.0005)
    for victim in victims:
        with suppress(ProcessLookupError):
            os.kill(pid_of(directory, victim), signal.SIGKILL)
    statuses = finish(ranks, directory, seconds=60)  # the other notices by itself
    return -signal.SIGKILL in statuses


LONG: dict[str, Any] = {"max_steps": 40, "save_steps": 2}


FORTY = pytest.mark.slow("40 kills, and a resume after each")


@pytest.mark.parametrize(
    ("kills", "sharded"),
    [
        (4, True),
        pytest.param(40, False, marks=(FORTY, pytest.mark.sweep)),
        pytest.param(40, True, marks=(FORTY, pytest.mark.sweep)),
    ],
    ids=["4-FSDP2", "40-DDP", "40-FSDP2"],
)
def test_kills_at_random_moments_lose_nothing(kills: int, sharded: bool, tmp_path: Path) -> None:
    """Of one process or both, in a save or not: each time the run goes on from its newest checkpoint, and ends as if
    nothing had happened."""
    how = LONG | {"sharded": sharded}
    assert run(2, tmp_path / "whole", **how) == [0, 0]
    whole, draw, newest, real, tries = losses(tmp_path / "whole"), random.Random(kills), 0, 0, 0
    while real < kills:
        victims = draw.choice([[0], [1], [0, 1]])
        tries += 1
        assert tries <= 3 * kills
        real += killed(victims, draw.uniform(0, 0.5), real % 2 == 1, tmp_path, **how)
        steps = [int(path.name.partition("-")[2]) for path in checkpoints(tmp_path)]
        assert max(steps, default=0) >= newest, f"kill {real} of {victims} lost checkpoint-{newest}"
        newest = max(steps, default=0)
        if newest == how["max_steps"] and real < kills:  # begun anew, so that there is a training to kill
            (tmp_path / "run").rename(tmp_path / f"ended-{tries}")
            newest = 0
    assert run(2, tmp_path, **how) == [0, 0]
    rest = losses(tmp_path)
    assert rest == {step: loss for step, loss in whole.items() if step in rest}
    ours, theirs = (load_file(each / "weights-0.safetensors") for each in (tmp_path, tmp_path / "whole"))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
