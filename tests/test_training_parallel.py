"""What each of several processes is given: its part of a step, accelerate's variables, and what cannot be shared out."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from cogumi.checkpoints.protection import refuse_other_sharding
from cogumi.checkpoints.verify import SHARDED_WEIGHTS
from cogumi.config.schema import CogumiSection, DataSection, ModelSection, RunConfig, read_config
from cogumi.core.errors import RefusedAtSetup, UsageError
from cogumi.core.signatures import exit_status
from cogumi.methods.step_split import describe_split, refuse_unshared, split_step
from cogumi.runs.rank import dump_outcome
from cogumi.stack.gpus import refuse_ranks
from cogumi.training.loop import even_batch
from cogumi.training.parallel import ACCELERATE, read_accelerate


def a_run(**train: Any) -> RunConfig:
    method = train.pop("method", "sft")
    options = train.pop("options", {})
    section = CogumiSection(method=method, **options)
    return RunConfig(model=ModelSection(name="x"), data=DataSection(source="x"), train=train, cogumi=section)


@pytest.mark.parametrize(
    ("count", "batch", "accumulated", "own"),
    [(2, 8, 2, (8, 1)), (2, 8, 1, (4, 1)), (4, 8, 2, (4, 1)), (8, 6, 4, (3, 1)), (3, 4, 3, (4, 1)), (2, 3, 4, (3, 2))],
)
def test_a_step_keeps_its_examples(count: int, batch: int, accumulated: int, own: tuple[int, int]) -> None:
    run = a_run(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated)
    shared = split_step(run, count)
    actual = shared.train["per_device_train_batch_size"], shared.train["gradient_accumulation_steps"]
    assert actual == own
    assert actual[0] * actual[1] * count == batch * accumulated
    assert run.train["per_device_train_batch_size"] == batch  # the config that is kept is the asked one
    assert str(batch * accumulated) in describe_split(run, shared, count)


def test_what_cannot_be_shared_is_refused_with_sizes_that_can() -> None:
    with pytest.raises(UsageError, match=r"16 examples cannot be shared by 3 processes.*15 or 18"):
        split_step(a_run(per_device_train_batch_size=16), 3)
    rollout = split_step(a_run(method="gspo", per_device_train_batch_size=8, steps_per_generation=4), 2)
    assert rollout.train["per_device_train_batch_size"] * rollout.train["steps_per_generation"] * 2 == 32


def test_held_out_rows_are_counted_once() -> None:
    assert even_batch(20, 8, 1) == 8
    assert even_batch(20, 8, 2) == 5
    assert even_batch(64, 8, 8) == 8
    assert even_batch(7, 8, 2) == 8  # accelerate fills up


def test_the_packages_config_is_what_accelerate_makes_of_it() -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(ACCELERATE / "fsdp2.yaml"), "--main_process_port", "0", "train.py"]
    arguments = launch_command_parser().parse_args(words)
    values = load_config_from_file(str(ACCELERATE / "fsdp2.yaml")).fsdp_config
    for name, value in values.items():
        setattr(arguments, name, value)
    arguments.use_fsdp, arguments.num_processes, arguments.num_machines = True, 2, 1
    arguments.mixed_precision, arguments.dynamo_backend = "no", "no"
    theirs = prepare_multi_gpu_env(arguments)
    ours = read_accelerate("fsdp2")
    assert {name: theirs[name] for name in ours} == ours
    assert read_accelerate("ddp") == {}


@pytest.mark.parametrize(
    ("key", "train"), [("train.optim", {"optim": "paged_adamw_8bit"}), ("train.use_vllm", {"use_vllm": True})]
)
def test_what_shards_cannot_have_is_refused(key: str, train: dict[str, Any]) -> None:
    shared = a_run(options={"sharding": "fsdp2"}, **train)
    with pytest.raises(UsageError, match=rf"{key}: .*set cogumi\.sharding: none"):
        split_step(shared, 2)
    split_step(a_run(**train), 2)


@pytest.mark.parametrize("name", ["DEEPSPEED", "PARALLELISM_CONFIG", "MEGATRON_LM"])
def test_what_no_run_trains_by_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"ACCELERATE_USE_{name}: accelerate's config asks for .*; leave it out"):
        refuse_ranks({f"ACCELERATE_USE_{name}": "true"}, 1, "cogumi train x")


@pytest.mark.parametrize("key", ["deepspeed", "fsdp", "fsdp_config", "parallelism_config"])
def test_other_ways_to_share_are_refused_where_they_are_set(key: str) -> None:
    with pytest.raises(
        UsageError, match=rf"train\.{key} (is not for a run|would share).*; (set cogumi\.sharding|drop)"
    ):
        read_config("configs/smoke/chat-sft.yaml", {f"train.{key}": "x"})


def test_unsloth_is_refused_in_several_processes() -> None:
    run = a_run(options={"backend": "unsloth"})
    with pytest.raises(UsageError, match=r"cogumi\.backend: unsloth trains in one process"):
        refuse_unshared(run, 2)


@pytest.mark.parametrize(
    ("options", "key"), [({"docs_per_step": 20}, "docs_per_step"), ({"prompts_per_step": 5}, "num_generations")]
)
def test_a_planned_step_is_shared_evenly_too(options: dict[str, Any], key: str) -> None:
    run = a_run(method="gspo", options=options, num_generations=4)
    with pytest.raises(UsageError, match=rf"20 examples cannot be shared by 8 processes; let .*{key} be 16 or 24"):
        refuse_unshared(run, 8)
    refuse_unshared(run, 4)


def test_a_quantized_base_is_not_sharded() -> None:
    shared = a_run(options={"sharding": "fsdp2"})
    shared.model.quantization_config = {"load_in_4bit": True}
    with pytest.raises(UsageError, match=r"model\.quantization_config: .*or set cogumi\.sharding: none"):
        split_step(shared, 2)


@pytest.mark.parametrize("wrong", ["two", 0, -1, 2.5, True])
def test_processes_are_a_number_or_all(wrong: Any) -> None:
    with pytest.raises(UsageError, match="a whole number above 0, or all"):
        read_config("configs/smoke/chat-sft.yaml", {"cogumi.processes": wrong})


def test_one_process_shares_nothing() -> None:
    with pytest.raises(UsageError, match=r"there is one; set cogumi\.processes as well"):
        read_config("configs/smoke/chat-sft.yaml", {"cogumi.sharding": "fsdp2"})


@pytest.mark.parametrize(("shards", "sharded"), [(True, False), (False, True)])
def test_a_checkpoint_is_not_taken_up_by_another_sharding(shards: bool, sharded: bool, tmp_path: Path) -> None:
    if shards:
        (tmp_path / SHARDED_WEIGHTS).parent.mkdir()
        (tmp_path / SHARDED_WEIGHTS).touch()
    with pytest.raises(UsageError, match="with FSDP2 again" if shards else "without FSDP2 again"):
        refuse_other_sharding(tmp_path, sharded)
    refuse_other_sharding(tmp_path, shards)


def test_what_came_of_a_run_is_handed_over() -> None:
    assert exit_status(RefusedAtSetup("no")) == exit_status(UsageError("no")) == 2
    assert exit_status(SystemExit(143)) == 143
    assert exit_status(ValueError()) == 1
    assert str(pickle.loads(dump_outcome(None, UsageError("no", fix="yes")))[1]) == "no; yes"
    assert pickle.loads(pickle.loads(dump_outcome([1], None))[0]) == [1]
    assert "no result" in str(pickle.loads(dump_outcome(lambda: 0, None))[1])
