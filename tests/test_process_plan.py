"""Preflight for several cards: what each holds and sends, beside hand-computed numbers and two real processes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from ranks import LORA, finish, said, start_ranks
from test_checkpoints_protect import SIZES
from test_memory import config_of, llama
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.forecast.fake_tensors import StagePeak
from cogumi.forecast.memory_forecast import MemoryForecast, find_target
from cogumi.forecast.preflight_report import Line, PreflightReport
from cogumi.forecast.process_plan import choose_way, describe_processes, plan_processes
from cogumi.forecast.run_forecast import forecast_run
from cogumi.forecast.shared_model import SharedModel, computed_in, groups_of, share_model
from cogumi.forecast.training_step import StepShape, planned_trainer, run_step
from cogumi.methods.building import trl_arguments
from cogumi.methods.step_split import split_step
from cogumi.rl.patching import patch
from cogumi.stack.gpus import CARDS, parse_card
from cogumi.training.parallel import read_accelerate

CONFIG = Path(__file__).parents[1] / "configs" / "llama-3.1-8b-sft.yaml"
GIB = 2**30
# Four cards; 800 bytes of weights, of which two groups of 100 are freed after the forward pass and 600 stay.
MODEL = SharedModel(4, 800, 400, passes=800, again=200, staying=600, largest=100, reduced=200, group_reduced=50)
ALONE = (
    StagePeak("load", 1000, {"weights": 1000}),
    StagePeak("forward", 2400, {"weights": 1000, "adapter": 400, "optimizer": 800, "logits": 200}),
    StagePeak(
        "backward", 2900, {"weights": 1000, "adapter": 400, "optimizer": 800, "activations": 300, "gradients": 400}
    ),
    StagePeak("update", 2600, {"weights": 1000, "adapter": 400, "optimizer": 800, "gradients": 400}),
)


def line(report: PreflightReport, stage: str) -> Line:
    return next(line for line in report.lines if line.stage == stage)


def test_the_shares_of_four_cards_computed_by_hand() -> None:
    """200 of the 1,000 bytes of weights are quantized, and stay on each card: 200 + 800 / 4."""
    load, forward, backward, update = MODEL.moments("fsdp2", ALONE, accumulating=False)
    assert load.by_kind == {"weights": 400}
    kept = {"weights": 400, "adapter": 100, "optimizer": 200}
    assert forward.by_kind == {**kept, "gathered weights": 800, "logits": 200}  # 600 that stay and two groups of 100
    assert backward.by_kind == {**kept, "gathered weights": 800, "activations": 300, "gradients": 200}  # 400/4 + 2 x 50
    assert update.by_kind == {**kept, "gradients": 100}
    assert backward.total == 2000


def test_what_is_kept_has_its_dtype_and_the_rest_that_in_which_it_is_gathered() -> None:
    kept = StagePeak("forward", 1800, {"weights": 400, "optimizer": 800, "activations": 600})
    computed = StagePeak("forward", 800, {"weights": 200, "optimizer": 400, "activations": 150, "logits": 50})
    (found,) = computed_in([computed], [kept])
    assert found == StagePeak("forward", 1400, {"weights": 400, "optimizer": 800, "activations": 150, "logits": 50})


def test_gradients_that_are_accumulated_are_whole_on_each_card() -> None:
    *_, backward, update = MODEL.moments("fsdp2", ALONE, accumulating=True)
    assert backward.by_kind["gradients"] == 200 + 2 * 50
    assert update.by_kind["gradients"] == 100


def test_ddp_has_everything_and_its_buckets() -> None:
    load, *others = MODEL.moments("none", ALONE, accumulating=True)
    assert load == ALONE[0]
    for moment, before in zip(others, ALONE[1:], strict=True):
        assert moment.by_kind == {**before.by_kind, "gradient buckets": 400}
        assert moment.total == before.total + 400


def test_what_a_card_sends_computed_by_hand() -> None:
    assert MODEL.sent("none", 3) == 2 * 400 * 3 / 4
    assert MODEL.sent("fsdp2", 3) == (3 * (800 + 200) + 200) * 3 / 4  # gathered each micro-batch, reduced once


def test_the_way_to_take() -> None:
    assert choose_way({"none": 80, "fsdp2": 30}, 100) == "none"
    assert choose_way({"none": 95, "fsdp2": 30}, 100) == "fsdp2"  # it would fit, without room
    assert choose_way({"none": 95, "fsdp2": 110}, 100) == "none"
    assert choose_way({"none": 300, "fsdp2": 110}, 100) == "fsdp2"  # neither fits


@pytest.mark.parametrize(
    ("free", "sharding", "state", "fix"),
    [
        (4000, "none", "green", ""),
        (4000, "fsdp2", "yellow", "set cogumi.sharding: none; each card has room for the whole, and less is sent"),
        (2200, "none", "red", "set cogumi.sharding: fsdp2; each card keeps a share of the model"),
        (2200, "fsdp2", "green", ""),
        (100, "fsdp2", "red", "buy more"),
    ],
)
def test_the_runs_own_way_decides_the_color(free: int, sharding: str, state: str, fix: str) -> None:
    run = load_config(CONFIG, cogumi__processes=4, cogumi__sharding=sharding)
    step = MemoryForecast((), StepShape("sft", 2, 64), free, alone={"none": ALONE, "fsdp2": ALONE}, shared=MODEL).under(
        sharding
    )
    found = describe_processes(run, step, find_target("T4"), "buy more")
    assert (found.state, found.fix) == (state, fix)
    figures = plan_processes(run, step, find_target("T4"))
    assert figures["peaks"] == {"none": 3300, "fsdp2": 2000}
    assert figures["zero3"] == 1200  # of the backward pass without what is gathered
    assert figures["seconds"]["none"] == 600 / 16e9
    assert plan_processes(run, step, find_target(None))["seconds"] == {"none": None, "fsdp2": None}


def test_links_are_those_of_the_usual_box() -> None:
    assert all(16e9 <= card.link < card.bandwidth for card in CARDS)
    found = {name: parse_card(name).link for name in ("H100 SXM", "H200", "B200", "A100 80GB", "H100 PCIe", "RTX 4090")}
    assert list(found.values()) == [450e9, 450e9, 900e9, 300e9, 64e9, 32e9]


def test_all_the_cards_of_another_machine_are_not_known() -> None:
    with pytest.raises(UsageError, match=r"--card names a card of another one; say how many, as in cogumi.processes=8"):
        forecast_run(CONFIG, "h100 sxm", None, {"cogumi__processes": "all"}, apart=False)


# ----------------------------------------------------------------------------------------------------- eight cards planned


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of Llama-3.1-8B, which is enough to plan with (docs/measured.md)."""
    path = tmp_path_factory.mktemp("shapes")
    LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)  # fmt: skip
    return path


def plan_8b(shapes: Path, tmp_path: Path, **more: Any) -> PreflightReport:
    words = {"model__name": str(shapes), "cogumi__run_dir": str(tmp_path / "run"), "train__max_steps": 100, **more}
    return forecast_run(CONFIG, "h100 sxm", None, words, apart=False)


@pytest.mark.slow("three forecasts of an 8B")
def test_an_8b_on_eight_cards(shapes: Path, tmp_path: Path) -> None:
    same = {"train__gradient_checkpointing": True}  # else a step that is not sharded is cut into smaller micro-batches
    alone = plan_8b(shapes, tmp_path, **same)
    ways = ("none", "fsdp2")
    plans = {way: plan_8b(shapes, tmp_path, cogumi__processes=8, cogumi__sharding=way, **same) for way in ways}
    assert "processes" not in alone.figures
    for way, report in plans.items():
        assert report.fits, str(report)
        found = line(report, "processes")
        assert found.figure.startswith(
            "8 processes share each step, each 8 x 4096 tokens x 2 accumulated; of each one's 78.4 GiB"
        )
        assert found.fix == (
            "" if way == "none" else "set cogumi.sharding: none; each card has room for the whole, and less is sent"
        )
        assert "several processes train by stock TRL" in line(report, "backend").figure
        figures = report.figures
        assert figures["memory"]["peak"] == figures["processes"]["peaks"][way]
        assert figures["time"]["tokens"] == alone.figures["time"]["tokens"]
        assert figures["time"]["seconds"] == pytest.approx(alone.figures["time"]["seconds"] / 8)
        assert figures["processes"]["take"] == "none"
    one, none, shared = (report.figures["memory"]["breakdown"] for report in (alone, *plans.values()))
    adapter = one["adapter"]
    assert none == {**one, "gradient buckets": pytest.approx(adapter, rel=1e-3)}
    assert shared["weights"] == pytest.approx(one["weights"] / 8, rel=1e-3)
    assert shared["adapter"] == pytest.approx(adapter / 8, rel=1e-3)
    assert shared["activations"] == one["activations"]
    head = 128256 * 4096 * 2
    layer = 2 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336)
    assert head > layer  # so the embeddings are the largest group, and the head with the last norm stays
    assert shared["gathered weights"] == pytest.approx(3 * head, rel=0.01)
    sent = plans["none"].figures["processes"]["sent"]
    assert sent["none"] == pytest.approx(2 * 7 / 8 * adapter, rel=1e-3)
    gathered = one["weights"] + adapter / 2  # float32, gathered in bfloat16
    assert sent["fsdp2"] == pytest.approx(7 / 8 * (2 * (2 * gathered - head) + adapter / 2), rel=1e-3)


@pytest.mark.slow("two forecasts of every weight of an 8B")
def test_every_weight_of_an_8b_fits_eight_cards_by_fsdp2_alone(shapes: Path, tmp_path: Path) -> None:
    """32 GB of weights in float32, as much again of gradients, and 64 GB of moments: 16 GB on each of eight cards."""
    full = {"cogumi__processes": 8, "cogumi__tuning": "full", "cogumi__merge": False}
    full |= {"lora__r": None, "lora__lora_alpha": None, "train__optim": "adamw_torch_fused"}
    red = plan_8b(shapes, tmp_path, **full)
    assert not red.fits
    assert line(red, "memory").fix == line(red, "processes").fix
    assert line(red, "memory").fix == "set cogumi.sharding: fsdp2; each card keeps a share of the model"
    green = plan_8b(shapes, tmp_path, **full, cogumi__sharding="fsdp2")
    assert line(green, "memory").state == "green", str(green)
    assert line(green, "processes").figure.endswith("cogumi.sharding: fsdp2 is the one to take")


def test_the_step_that_is_planned_is_the_step_that_is_trained() -> None:
    run = load_config(CONFIG, cogumi__processes=8)
    own = split_step(run, 8)
    assert own.train["per_device_train_batch_size"] * own.train["gradient_accumulation_steps"] * 8 == 128


def test_what_the_plan_names_is_taken_by_trl_and_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of eight processes, beside the real signatures: no eight GPUs have run them."""
    own = split_step(
        load_config(CONFIG, cogumi__processes=8, cogumi__sharding="fsdp2", cogumi__run_dir=str(tmp_path)), 8
    )
    args = trl_arguments(own)
    assert isinstance(args, trl.SFTConfig)
    asked = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    asked["ddp_timeout"] = 7 * 24 * 3600
    assert {key: getattr(args, key) for key in asked} == asked
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        monkeypatch.delenv(name)
    for name, value in read_accelerate("fsdp2").items():
        monkeypatch.setenv(name, value)
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.cpu_ram_efficient_loading) == (2, True, True)
    assert "SHARDED_STATE_DICT" in str(plugin.state_dict_type)
    assert getattr(plugin.cpu_offload, "offload_params", False) is False
    plugin.set_mixed_precision("bf16")
    policy: Any = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)  # what the plan counts with
    plugin.set_auto_wrap_policy(LlamaForCausalLM(LlamaConfig(**SIZES)))
    assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]


# ------------------------------------------------------------------------------------------------- two processes over gloo


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(**LORA))


def held(tmp_path: Path, **how: Any) -> list[dict[str, Any]]:
    assert finish(start_ranks(2, tmp_path, protected=False, counted=True, **{"max_steps": 1} | how), tmp_path) == [
        0,
        0,
    ], said(tmp_path, 0)
    return [json.loads((tmp_path / f"held-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow("a training in two processes")
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_two_processes_under_fsdp2_hold_half_each(tuning: str, tiny_model: Path, tmp_path: Path) -> None:
    """Beside what the plan shares out, and how it groups it, of the same model."""
    if tuning == "lora":
        found = held(tmp_path, sharded=True, method="sft", model=str(tiny_model))
        model = adapted(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
    else:
        found = held(tmp_path, sharded=True)
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    plan = share_model([model], 2, None)
    row = model.config.hidden_size * 4  # of a vocabulary of odd size one process has a row more
    for kind, size in {
        "frozen": plan.weights if tuning == "lora" else 0,
        "trained": plan.trained,
        "optimizer": 2 * plan.trained,
    }.items():
        assert sum(each[kind] for each in found) == size
        assert all(abs(each[kind] - plan.share(size)) <= 2 * row for each in found), kind
    passing, kept = groups_of(model)
    sizes = sorted([(sum(each.nbytes for each in group), False) for group in passing], key=lambda group: group[0])
    real = [tuple(group) for group in found[0]["groups"]]
    assert [group for group in real if not group[1]] == sizes
    assert sum(size for size, stays in real if stays) == sum(each.nbytes for each in kept) == plan.staying
    assert max(size for size, stays in real if not stays) == plan.largest


@pytest.mark.slow("a training in two processes")
def test_two_processes_under_ddp_hold_everything_and_buckets(tiny_model: Path, tmp_path: Path) -> None:
    found = held(tmp_path, method="sft", model=str(tiny_model))
    plan = share_model([adapted(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))], 2, None)
    for each in found:
        assert (each["frozen"], each["trained"], each["optimizer"]) == (plan.weights, plan.trained, 2 * plan.trained)
        assert (each["buckets"], each["as_view"]) == (plan.trained, False)


@pytest.mark.slow("a forecast, and a training in two processes under PyTorch's profiler")
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_the_peak_of_a_process_under_fsdp2_is_what_is_allocated(tuning: str, tiny_model: Path, tmp_path: Path) -> None:
    """Six layers, recomputed, two micro-batches a step. On a CPU torch gathers as on a card, one group after the other."""
    patch(graph_break="off")
    base, shape = tmp_path / "base", llama(6)
    LlamaForCausalLM(shape).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
    step = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    step |= {"optim": "adamw_torch"}
    run = config_of("sft", cogumi__tuning=tuning, **{f"train__{key}": value for key, value in step.items()})
    if tuning == "lora":
        run.lora = dict(LORA)
    trainer = planned_trainer(run, shape, torch.float32, "sdpa")
    plan = share_model([trainer.model], 2, None)
    alone = run_step(trainer, StepShape("sft", 4, 128, padded=False, micro_batches=2), None, on_card=False)
    planned = max(moment.total for moment in plan.moments("fsdp2", alone, accumulating=True))
    step |= {"max_steps": 2, "method": "sft", "model": str(base), "whole": tuning == "full", "tokens": 128}
    (found, _) = held(tmp_path, sharded=True, measured=True, **step)
    real = found["frozen"] + found["trained"] + found["optimizer"] + found["step"]
    assert 0.97 < planned / real < 1.1
