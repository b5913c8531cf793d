"""What each of several processes is given: its part of a step, accelerate's variables, and what cannot be shared out."""

from typing import Any

import pytest

from cogumi.config.schema import CogumiSection, DataSection, ModelSection, RunConfig
from cogumi.core.errors import UsageError
from cogumi.methods.step_split import describe_split, split_step
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
    found = shared.train["per_device_train_batch_size"], shared.train["gradient_accumulation_steps"]
    assert found == own
    assert found[0] * found[1] * count == batch * accumulated
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
    ("key", "train"),
    [("train.optim", {"optim": "paged_adamw_8bit"}), ("train.use_vllm", {"use_vllm": True})],
)
def test_what_shards_cannot_have_is_refused(key: str, train: dict[str, Any]) -> None:
    shared = a_run(options={"sharding": "fsdp2"}, **train)
    with pytest.raises(UsageError, match=rf"{key}: .*set cogumi\.sharding: none"):
        split_step(shared, 2)
    split_step(a_run(**train), 2)


def test_a_quantized_base_is_not_sharded() -> None:
    shared = a_run(options={"sharding": "fsdp2"})
    shared.model.quantization_config = {"load_in_4bit": True}
    with pytest.raises(UsageError, match=r"model\.quantization_config: .*or set cogumi\.sharding: none"):
        split_step(shared, 2)
