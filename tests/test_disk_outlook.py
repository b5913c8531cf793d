"""What a run will want of its disks, against numbers added up by hand, real filesystems, and what real runs then take."""

import json
import logging
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_mounts import Mount
from peft import LoraConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import cogumi
from cogumi.checkpoints.manifest import MANIFEST_NAME, write_manifest
from cogumi.checkpoints.verify import list_checkpoints
from cogumi.core.disk_space import Need, group_needs
from cogumi.disk.usage import disk_bytes
from cogumi.forecast.disk_forecast import (
    CHECKPOINTS,
    DiskForecast,
    checkpoint_bytes,
    checkpoints_need,
    forecast_trainer,
    merged_bytes,
    saving_trainer,
)
from cogumi.models.adapters import keep_float32

SIZE = 1_000_000
SHAPE = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip


def planned_run(
    directory: Path, keep: int = 2, staying: int = 2, saves: int | None = 10, needs: Any = ()
) -> DiskForecast:
    """The forecast of a run with checkpoints of a megabyte, two of them kept, ten to come."""
    need, held = checkpoints_need(directory, committed(directory), SIZE, staying, saves)
    return DiskForecast(SIZE, keep, held, saves, tuple(group_needs([need, *needs])))


def committed(directory: Path) -> list[Path]:
    return [path for path in list_checkpoints(directory) if (path / MANIFEST_NAME).is_file()]


def bytes_there(directory: Path) -> int:
    return sum(map(disk_bytes, committed(directory)))


def checkpoint(directory: Path, step: int, size: int = SIZE, manifest: bool = True, **state: Any) -> Path:
    """A directory like a checkpoint's, of a size that is known."""
    path = directory / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "adapter_model.safetensors").write_bytes(os.urandom(size // 4))
    (path / "optimizer.pt").write_bytes(os.urandom(size - size // 4))
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, **state}))
    if manifest:
        write_manifest(path, step)
    return path


@pytest.fixture
def disk(mount: Mount) -> Any:
    """Mounts tmpfs of so many megabytes."""
    return lambda megabytes: mount(options=f"size={megabytes * 1_000_000 // 4096 * 4}k")


# ------------------------------------------------------------------------------------------------------ added up by hand


@pytest.mark.parametrize(
    ("changes", "held", "training", "end"),
    [
        ({}, 3, 3, 2),  # two that stay, and one being written
        ({"keep": 3, "staying": 3}, 4, 4, 3),
        ({"staying": 3}, 4, 4, 3),  # the best beside the two newest
        ({"saves": None}, 3, 3, 2),
        ({"saves": 2}, 2, 2, 2),
        ({"saves": 1}, 1, 1, 1),
        ({"saves": 0}, 0, 0, 0),
    ],
)
def test_what_the_checkpoints_take(changes: dict[str, Any], held: int, training: int, end: int, tmp_path: Path) -> None:
    actual = planned_run(tmp_path, **changes)
    (one,) = actual.disks
    assert (actual.held, one.training, one.end) == (held, training * SIZE, end * SIZE)
    assert one.wanted == max(training, end) * SIZE
    assert actual.fits


def test_what_is_there_already_is_not_wanted_again(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 3, manifest=False)  # somebody else's: it stays, and counts for nobody
    taken = 2 * SIZE + 2 * 3 * 4096 + 2 * 4096  # with the blocks at the ends of their files
    there = bytes_there(tmp_path)
    assert there == pytest.approx(taken, abs=6 * 4096)
    assert committed(tmp_path) == [second, first]
    actual = planned_run(tmp_path)
    assert actual.held == 3
    assert actual.disks[0].training == 3 * SIZE - there
    assert actual.disks[0].end == 0
    (tmp_path / ".cogumi-saving").mkdir()
    (tmp_path / ".cogumi-saving" / "half").write_bytes(bytes(SIZE // 2))
    assert planned_run(tmp_path).disks[0].training == pytest.approx(2.5 * SIZE - there, abs=4 * 4096)


def test_two_paths_on_one_disk_share_its_space(disk: Any, tmp_path: Path) -> None:
    one, other = disk(10), disk(10)
    results = [Need("adapter", one / "adapter", 0, SIZE), Need("merged model", one / "a/b/merged", 0, 7 * SIZE)]
    actual = planned_run(one / "checkpoints", needs=results)
    assert [each.wanted for each in actual.disks] == [10 * SIZE]  # at the end
    apart = [results[0], Need("merged model", other / "merged", 0, 7 * SIZE)]
    actual = planned_run(one / "checkpoints", needs=apart)
    assert [(each.filesystem.mount, each.wanted) for each in actual.disks] == [
        (str(one), 3 * SIZE),
        (str(other), 7 * SIZE),
    ]
    (tmp_path / "link").symlink_to(other)
    assert len(planned_run(one, needs=[Need("adapter", tmp_path / "link" / "adapter", 0, 1)]).disks) == 2


def test_a_disk_that_is_too_small_and_what_helps(disk: Any) -> None:
    small = disk(5)
    actual = planned_run(small, keep=4, staying=4, needs=[Need("merged model", small / "merged", 0, 7 * SIZE)])
    free = os.statvfs(small).f_bavail * 4096
    assert not actual.fits
    assert actual.disks[0].short == 11 * SIZE - free
    message = "\n".join(actual.lines)
    assert "wants 11.0 MB more at the end (checkpoints 4.0 MB, merged model 7.0 MB)" in message
    assert "does not fit: 6.0 MB are missing" in message
    assert "save_total_limit: 2 takes 2.0 MB less" in message
    assert "cogumi.merge=false takes 7.0 MB less" in message
    assert len(actual.lines) == 3
    assert planned_run(disk(6)).fits


def test_the_disk_is_asked_where_its_numbers_may_not_be_true(tmp_path: Path, disk: Any) -> None:
    """Here they are; a file larger than this process may write is no more than many smaller ones."""
    assert planned_run(tmp_path).disks[0].denied == ""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * SIZE, limits[1]))
    try:
        assert planned_run(tmp_path).fits
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob(".cogumi*"))


@pytest.mark.parametrize("kind", ["tells no size", "read-only"])
def test_a_disk_that_cannot_be_counted_on(kind: str, mount: Mount) -> None:
    """Some network volumes tell no size either."""
    if kind == "tells no size":
        actual = planned_run(mount("ramfs"), saves=None)
        assert (actual.disks[0].filesystem.space.total, actual.fits) == (0, True)
    else:
        actual = planned_run(mount(options="size=50m,ro"))
        assert "does not fit: it is read-only" in str(actual.disks[0])


# --------------------------------------------------------------------------------------------------------- live trainers


def trainer_on(place: Path, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    values = {"max_steps": 8, "save_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(output_dir=str(place), **(values | changes))
    return Trainer(LlamaForCausalLM(LlamaConfig(**SHAPE)), args, train_dataset=rows)


@pytest.mark.parametrize("enough", [True, False])
def test_a_disk_of_the_size_that_is_wanted_is_just_enough(
    enough: bool, disk: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = forecast_trainer(trainer_on(tmp_path / "elsewhere"), keep=2).disks[0].wanted
    assert expected > 30_000_000
    # The blocks at the ends of the files come on top; less than half a checkpoint is missing otherwise.
    small = disk((expected + 1_000_000 if enough else expected - 2_000_000) // 1_000_000)
    trainer = cogumi.protect(trainer_on(small / "checkpoints"), keep=2)
    ahead = forecast_trainer(trainer, keep=2)
    assert ahead.fits == enough
    assert ahead.saves == 4
    with caplog.at_level(logging.WARNING):
        trainer.train()
    complaints = [row.message for row in caplog.records if "does not fit" in row.message]
    assert bool(complaints) != enough
    over = forecast_trainer(trainer, keep=2)
    assert (over.saves, over.disks[0].wanted, over.held) == (0, 0, 2)
    assert over.fits


def test_a_training_that_goes_on_keeps_what_it_came_from(tmp_path: Path) -> None:
    cogumi.protect(trainer_on(tmp_path, max_steps=4), keep=2).train()
    actual = forecast_trainer(cogumi.protect(trainer_on(tmp_path, max_steps=12)), keep=2)
    assert (actual.saves, actual.held) == (4, 4)  # after step 4: the one at 4, two that stay, the one being written
    there = bytes_there(tmp_path)
    assert actual.disks[0].training == 4 * actual.checkpoint - there


@pytest.mark.parametrize(
    ("changes", "saves", "held"),
    [
        ({"save_strategy": "no"}, 1, 1),
        ({"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 5}, 5, 3),
        ({"save_strategy": "epoch"}, None, 3),
        ({"save_steps": 0.25, "max_steps": 10}, 4, 3),  # a share of the steps, three here
        ({"save_steps": 3, "max_steps": 10}, 4, 3),
        ({"max_steps": -1}, None, 3),
        ({"metric_for_best_model": "loss"}, 4, 4),
    ],
)
def test_how_many_saves_are_to_come(changes: dict[str, Any], saves: int | None, held: int, tmp_path: Path) -> None:
    actual = forecast_trainer(trainer_on(tmp_path, **changes), keep=2)
    assert (actual.saves, actual.held) == (saves, held)
    assert ("save_strategy is no" in actual.lines[-1]) == (changes.get("save_strategy") == "no")


def test_the_merged_model_has_the_dtype_that_the_base_has_on_disk(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)  # as on a CPU
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=2, report_to="none", use_cpu=True)
    actual = forecast_trainer(
        Trainer(model, args), keep=2, merged_into=tmp_path / "merged", adapter_into=tmp_path / "adapter"
    )
    sizes = {need.what: need.end for need in actual.disks[0].needs}
    on_disk = (tiny_model / "model.safetensors").stat().st_size
    assert sizes["merged model"] == pytest.approx(on_disk, rel=1e-3)
    assert sizes["adapter"] == pytest.approx(2 * on_disk, rel=0.05)  # what is trained, in float32


# -------------------------------------------------------------------------------------------------- without any weights


BF16 = torch.bfloat16
PLANS: dict[str, dict[str, Any]] = {
    "lora": {"dtype": BF16},
    "rslora 8 bit": {"lora": {"rank_pattern": {"q_proj": 64}}, "optim": "adamw_8bit"},
    "pissa": {"lora": {"init_lora_weights": "pissa"}},
    "dora": {"lora": {"use_dora": True}, "dtype": BF16},
    "modules_to_save": {"lora": {"modules_to_save": ["lm_head"]}, "dtype": BF16},
    "four bit": {"four_bit": True, "dtype": BF16, "optim": "paged_adamw_8bit"},
    "full": {"lora": None},
    "full bf16 8 bit": {"lora": None, "dtype": BF16, "optim": "adamw_8bit"},
}


@pytest.mark.parametrize("name", PLANS)
def test_a_trainer_without_weights_forecasts_the_same(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """As TRL's trainer with the model: of a base that is quantized, too, whose merge is into the whole one."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    case = {"lora": {}, "dtype": torch.float32, "optim": "adamw_torch", "four_bit": False} | PLANS[name]
    args = SFTConfig(output_dir=str(tmp_path / "out"), max_steps=4, save_steps=2, report_to="none", optim=case["optim"],
                     use_cpu=True, bf16=False, gradient_checkpointing=False)  # fmt: skip

    def adapter() -> LoraConfig | None:
        settings = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        return None if case["lora"] is None else LoraConfig(**(settings | case["lora"]))

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    quantization = BitsAndBytesConfig(load_in_4bit=True) if case["four_bit"] else None
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=case["dtype"], quantization_config=quantization)
    config = AutoConfig.from_pretrained(tiny_model)
    whole = merged_bytes(config)
    if case["four_bit"]:
        config.quantization_config = model.config.quantization_config
        assert merged_bytes(config) == whole
    rows = Dataset.from_dict({"text": ["def add(a, b):"] * 4})
    real = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, peft_config=adapter())
    keep_float32(real.model)  # as a run does
    without = saving_trainer(config, case["dtype"], args, adapter(), tokenizer)
    assert all(parameter.device.type == "meta" for parameter in without.model.parameters())
    expected, forecast = checkpoint_bytes(real), checkpoint_bytes(without)
    assert forecast.weights == expected.weights
    assert forecast.total == pytest.approx(expected.total, rel=2e-3)


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE, tie_word_embeddings=True)
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=2, report_to="none", use_cpu=True)
    real = checkpoint_bytes(Trainer(LlamaForCausalLM(config), args))
    assert checkpoint_bytes(saving_trainer(config, torch.float32, args)).weights == real.weights
    untied = saving_trainer(LlamaConfig(**SHAPE), torch.float32, args)
    assert checkpoint_bytes(untied).weights > real.weights + 4 * 256 * 128


def test_eight_billion_parameters_take_no_memory(tmp_path: Path) -> None:
    layers, hidden, inner, heads, vocabulary, rank = 32, 4096, 14336, 1024, 128256, 16
    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8, dtype="bfloat16",
    ).save_pretrained(tmp_path / "base")  # fmt: skip
    config = AutoConfig.from_pretrained(tmp_path / "base")
    # q, o; k, v; gate, up, down
    linear = 2 * [(hidden, hidden)] + 2 * [(hidden, heads)] + 3 * [(hidden, inner)]
    adapter = layers * sum(rank * (rows + columns) for rows, columns in linear)
    base = layers * (sum(rows * columns for rows, columns in linear) + 2 * hidden) + hidden + 2 * vocabulary * hidden
    args = TrainingArguments(output_dir=str(tmp_path / "run" / "checkpoints"), max_steps=9000, report_to="none")
    lora = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer = saving_trainer(config, BF16, args, lora)
    actual = forecast_trainer(trainer, keep=2, merged_into=tmp_path / "run" / "merged")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert not (tmp_path / "run").exists()
    assert grown < 500_000_000
    assert actual.checkpoint == pytest.approx(3 * 4 * adapter, rel=2e-3)  # weights and AdamW's two moments in float32
    sizes = {need.what: need for need in actual.disks[0].needs}
    assert sizes["merged model"].end == pytest.approx(2 * base, rel=1e-4)
    assert sizes[CHECKPOINTS].training == 3 * actual.checkpoint
    assert actual.saves == 18
    whole = checkpoint_bytes(saving_trainer(config, BF16, args))
    assert whole.total == pytest.approx(3 * 2 * base, rel=1e-3)
