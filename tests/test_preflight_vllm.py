"""vLLM's engine in the preflight, without vLLM: its size by hand, what is red and what makes it green, what a run chooses."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_preflight import line_of, preflight
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

import cogumi
from cogumi.config.schema import RunConfig, load_config
from cogumi.core.errors import UsageError
from cogumi.data.rows import Lengths
from cogumi.forecast.data_sample import DataSample
from cogumi.forecast.memory_forecast import Target, find_target, planned_work
from cogumi.forecast.run_forecast import choose_for_target
from cogumi.forecast.vllm_forecast import (
    Engine,
    RolloutPlan,
    cache_layout,
    choose_length,
    choose_with_engine,
    describe_rollout,
    engine_dtype,
    engine_weights,
    forecast_engine,
    own_dtype,
    working_memory,
)
from cogumi.methods import auto_settings, gspo, sampler
from cogumi.methods.auto_settings import ALLOCATOR, Choice, Load, Machine, apply_choices, refuse_segments, set_allocator
from cogumi.models.base import meta_model
from cogumi.models.loading import read_base
from cogumi.patches.unsloth_rl import SET_BY_COGUMI
from cogumi.rl import memory_plan
from cogumi.rl.memory_plan import GRAPHS, ModelShape, engine_bytes
from cogumi.training import estimate
from tests.vllm_sizes import FAMILY, MODELS, config_of, qwen

GIB = 2**30
H100 = 81559 * 2**20
CARD = "h100 sxm"
LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
)  # fmt: skip
QWEN3_4B = Qwen3Config(
    vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
)  # fmt: skip
GEMMA3_27B = Gemma3TextConfig(
    hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16,
    head_dim=128, sliding_window=1024,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- its size, by hand


@pytest.mark.parametrize(
    ("config", "element", "a_token"),
    [
        (LLAMA_8B, 2, 131_072),  # 32 layers x keys and values x 8 heads x 128 x 2 bytes
        (LLAMA_8B, 1, 65_536),  # float8
        (QWEN3_4B, 2, 147_456),  # 36 x 2 x 8 x 128 x 2; 2560 / 32 heads are 80, and the config says 128
        (DeepseekV3Config(), 2, 70_272),  # 61 x (512 + 64) x 2: one compressed row for all heads
        (GEMMA3_27B, 2, 573_440),  # 70 x 2 x 16 x 128 x 2: 52 sliding layers are padded to 6 groups of 10
    ],
)
def test_the_cache_of_a_token_by_hand(config: Any, element: int, a_token: int) -> None:
    cache = cache_layout(config, element)
    assert cache.token_bytes == a_token


def test_a_sliding_window_ends_what_a_sequence_holds() -> None:
    cache = cache_layout(GEMMA3_27B, 2)
    assert (cache.block_bytes, cache.windows.count(1024), cache.windows.count(None)) == (1_310_720, 6, 1)
    # 32,768 tokens: 2,048 blocks of all; of a window 1,023 tokens and two batches of 4,096, 576 blocks, and one more.
    assert cache.sequence(32_768) == (2048 + 6 * 577) * 1_310_720
    # Shorter than that, a window holds everything.
    assert cache.sequence(4096) == (256 + 6 * 257) * 1_310_720
    assert cache.at_once(10 * cache.sequence(4096), 4096) == 10


def test_layers_with_another_memory_are_not_known() -> None:
    assert cache_layout(Qwen3NextConfig(), 2) is None


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_8B, 8_030_261_248),
        (QWEN3_4B, 4_022_468_096),
        (Qwen2Config(**FAMILY | MODELS["7B"]), 7_615_616_512),
        (Qwen2Config(**FAMILY | MODELS["14B"]), 14_770_033_664),
        (Qwen2Config(**FAMILY | MODELS["32B"]), 32_763_876_352),
    ],
)
def test_weights_are_those_of_the_released_models(config: Any, parameters: int) -> None:
    """parameters: as the models' pages on the hub count them."""
    assert engine_weights(config, torch.bfloat16, None) == 2 * parameters


def test_a_vocabulary_is_padded_to_rows_of_64() -> None:
    odd = Qwen3Config(vocab_size=1000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                      num_key_value_heads=4, tie_word_embeddings=False)  # fmt: skip
    padded = engine_weights(odd, torch.bfloat16, None)
    odd.vocab_size = 1024
    assert padded == engine_weights(odd, torch.bfloat16, None)


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [
        ("float32", (9, 0), torch.bfloat16),
        ("float32", (7, 5), torch.float16),
        ("bfloat16", (7, 5), torch.float16),
        ("float16", (9, 0), torch.float16),
        (None, None, torch.bfloat16),
    ],
)
def test_auto_is_16_bits(dtype: str | None, capability: Any, expected: torch.dtype) -> None:
    assert own_dtype(LlamaConfig(dtype=dtype), capability) is expected


@pytest.mark.parametrize(
    ("model", "train", "capability", "expected"),
    [
        ("auto", {}, (9, 0), torch.bfloat16),
        ("float32", {}, (9, 0), torch.bfloat16),  # autocast
        ("float32", {"bf16": False}, (9, 0), torch.float32),
        ("auto", {"fp16": True}, (7, 5), torch.float16),
        ("auto", {}, (7, 5), torch.float32),
        ("auto", {"bf16": True}, (7, 5), torch.bfloat16),  # emulated, and vLLM is given it too
        ("bfloat16", {}, None, torch.bfloat16),
        ("auto", {"vllm_mode": "server"}, (7, 5), torch.float16),  # a server has its own
    ],
)
def test_the_engine_computes_in_the_trainers_dtype(
    model: str, train: dict[str, Any], capability: Any, expected: torch.dtype
) -> None:
    run = run_of(use_vllm=True, **train)
    run.model.dtype = model
    machine = Machine("a card", capability, H100, total_bytes=H100)
    assert engine_dtype(run, LlamaConfig(dtype="bfloat16"), machine) is expected


def test_an_adapter_that_is_served_apart_has_room_of_its_own() -> None:
    config = Qwen2Config(**FAMILY | MODELS["7B"])
    merged, apart = (
        forecast_engine(run_of({"sampler_weights": way}, use_vllm=True), config, 1024, find_target(CARD).machine)
        for way in ("merged", "adapter")
    )
    hidden, inner, key, layers = config.hidden_size, config.intermediate_size, config.hidden_size // 28 * 4, 28
    sides = 2 * hidden + 2 * hidden + 2 * (hidden + key) + 3 * (hidden + inner)  # q, o, k, v, and the three of the MLP
    head = hidden + config.vocab_size  # counted with the others: at most so much
    assert apart.weights - merged.weights == 2 * 16 * (layers * sides + head)


def test_working_memory_is_that_of_a_layer_or_of_many_rows_of_logits() -> None:
    config = Qwen2Config(**FAMILY | MODELS["7B"])
    assert working_memory(config, 2, 1) == 4096 * (2 * 3584 + 3 * 18944) * 2
    more = working_memory(config, 2, 1024) - working_memory(config, 2, 1023)
    assert more == 152064 * (2 + 4 * 4)  # a row of logits in 16 bits, and four times in float32


def engine_of(size: str = "14B", length: int = 2560, rows: int = 128, card: int = H100) -> Engine:
    config = Qwen2Config(**FAMILY | MODELS[size])
    cache = cache_layout(config, 2)
    return Engine(
        engine_weights(config, torch.bfloat16, None), working_memory(config, 2, rows), cache, length, rows, card
    )


def test_the_smallest_share_holds_one_sequence_and_the_useful_one_all() -> None:
    engine = engine_of("7B")
    assert engine.needed == engine.weights + engine.working + GRAPHS + 57_344 * (2560 + 16)  # and a block left empty
    assert engine.useful - engine.needed == 127 * 2560 * 57_344
    assert engine.at_once(engine.share_of(engine.needed)) >= 1
    assert engine.at_once(engine.share_of(engine.needed) - 0.01) == 0
    assert engine.at_once(engine.share_of(engine.useful)) == 128
    assert engine.at_once(engine.share_of(engine.useful) - 0.01) < 128


@pytest.mark.parametrize(
    ("train", "cogumi_", "rows"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, {}, 32),  # four steps of gspo
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "loss_type": "dapo"}, {}, 8),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 6}, {}, 24),
        ({"generation_batch_size": 48}, {}, 48),
        ({}, {"docs_per_step": 32}, 128),
        ({"generation_batch_size": 64}, {"docs_per_step": 32}, 64),
    ],
)
def test_a_rollout_has_as_many_completions_as_trl_gives_vllm(train: Any, cogumi_: Any, rows: int) -> None:
    run = run_of(cogumi=cogumi_, **train)
    assert gspo.rollout_rows(run) == rows
    assert planned_work(run, 64).rollout == rows
    assert planned_work(run_of(cogumi=cogumi_, use_vllm=True, **train), 64).rollout == 0  # vLLM samples them
    if not cogumi_:  # TRL's own count
        args = pytest.importorskip("trl").GRPOConfig(**gspo.arguments(run) | {"output_dir": "unused", "bf16": False})
        assert args.generation_batch_size == rows


# ------------------------------------------------------------------------------------------------------------ the preflight


def plan_of(share: float, sleeps: bool = False, **more: Any) -> RolloutPlan:
    trainer = {"loaded": 28 * GIB, "resident": 29 * GIB, "step": 38 * GIB, "free": 79 * GIB}
    return RolloutPlan(engine_of(), share, sleeps, **trainer | more)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (plan_of(0.1), "the engine's weights alone need 27.5 GiB: it does not start"),
        (plan_of(0.36), "one sequence of 2,560 tokens needs 480 MiB: the engine does not start"),
        (plan_of(0.7), "the trainer, which is loaded first, leaves 51.0 GiB free: the engine does not start"),
        (plan_of(0.7, sleeps=True), "leaves 51.0 GiB free"),
        (plan_of(0.5, resident=40 * GIB), "79.8 GiB of 79.0 GiB in the rollout"),
        (plan_of(0.5, resident=40 * GIB, sleeps=True), "79.8 GiB of 79.0 GiB in the rollout"),
    ],
)
def test_what_cannot_start_or_does_not_fit_is_red_and_its_fix_is_not(plan: RolloutPlan, said: str) -> None:
    line = describe_rollout(plan)
    assert line.state == "red"
    assert said in line.figure
    share = float(line.fix.rpartition("vllm_gpu_memory_utilization: ")[2])
    sleeps = "sleep_mode: true" in line.fix or plan.sleeps
    mended = RolloutPlan(plan.engine, share, sleeps, plan.loaded, plan.resident, plan.step, plan.free)
    assert describe_rollout(mended).state == "green"
    assert mended.step + (GRAPHS if sleeps else mended.awake) <= mended.free


def test_where_no_share_fits_something_else_is_proposed() -> None:
    line = describe_rollout(plan_of(0.4, resident=60 * GIB, loaded=60 * GIB))
    assert line.fix.startswith("drop train.use_vllm")


def test_sleep_helps_where_the_step_is_what_does_not_fit() -> None:
    plan = plan_of(0.1, step=60 * GIB)
    assert not plan.shares(False)
    assert "set train.vllm_enable_sleep_mode: true and " in plan.fix
    assert not plan_of(0.1, step=78 * GIB + 1).shares(True)  # with its CUDA graphs


@pytest.fixture(scope="module")
def fourteen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return config_of(qwen("14B", str(tmp_path_factory.mktemp("fourteen"))))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"vllm_gpu_memory_utilization": 0.1}, "the engine's weights alone need 27.5 GiB"),
        ({"vllm_gpu_memory_utilization": 0.7, "vllm_enable_sleep_mode": True}, "leaves 50.5 GiB free"),
    ],
)
def test_the_false_greens_of_before_are_red(fourteen: dict[str, Any], train: dict[str, Any], said: str) -> None:
    """A tenth of an H100 for 14 billion weights, and an engine that sleeps in the step and not in the rollout."""
    config = fourteen | {"train": fourteen["train"] | train}
    report = preflight(config, CARD)
    assert not report.fits
    actual = line_of(report, "vllm")
    assert (actual.state, said in actual.figure) == ("red", True)
    assert re.match(r"set (train.vllm_enable_sleep_mode: true and )?train.vllm_gpu_memory_utilization: 0\.", actual.fix)


@pytest.mark.usefixtures("prepared_workers")
def test_settings_of_the_sampler_are_no_fault_of_the_step() -> None:
    """The planned step is without vLLM, and so is without what is said of it; a contradiction is told all the same."""
    config = {
        "model": {"name": str(Path(cogumi.__file__).parent / "models" / "small-base")},
        "data": {"source": "cogumi:stdlib-tasks", "format": "prompt_completion"},
        "cogumi": {"method": "gspo", "rewards": ["parses"], "merge": False},
        "train": {"use_vllm": True, "max_completion_length": 16},
    }
    options = {"cogumi__sampler_weights": "adapter", "cogumi__sampler_correction": "tis"}
    report = cogumi.preflight(config, card=CARD, **options)
    assert report.fits, str(report)
    with pytest.raises(UsageError, match=r"cogumi\.sampler_weights.*ranks up to 512, not 600"):
        cogumi.preflight(config, card=CARD, lora__r=600, **options)


@pytest.mark.slow("forecasts of six runs of 14 billion weights")
def test_both_moments_are_planned_and_what_is_open_is_chosen(fourteen: dict[str, Any]) -> None:
    report = preflight(fourteen, CARD)
    assert report.fits, str(report)
    memory, engine = report.figures["memory"], report.figures["vllm"]
    assert memory["vllm"] == engine["engine"] == memory["breakdown"]["vLLM"]  # awake beside the step
    assert memory["peak"] <= memory["free"] >= engine["rollout"]
    weights, adapter = (memory["breakdown"][name] for name in ("weights", "adapter"))
    assert engine["rollout"] > weights + adapter + engine["engine"]
    assert "train.vllm_gpu_memory_utilization: 0.41" in line_of(report, "memory").figure
    asleep = preflight(fourteen, CARD, train__vllm_enable_sleep_mode=True)
    assert asleep.fits, str(asleep)
    assert asleep.figures["memory"]["vllm"] == GRAPHS
    assert asleep.figures["vllm"]["rollout"] > 29 * GIB + asleep.figures["vllm"]["weights"]
    assert asleep.figures["vllm"]["at_once"] > engine["at_once"]
    for train in ({"train__vllm_gpu_memory_utilization": 0.1}, {"train__vllm_gpu_memory_utilization": 0.36}):
        changes = line_of(preflight(fourteen, CARD, **train), "vllm").fix.removeprefix("set ").split(" and ")
        settings = dict(change.replace(".", "__", 1).split(": ") for change in changes)
        mended = preflight(fourteen, CARD, **{key: json.loads(value) for key, value in settings.items()})
        assert mended.fits, str(mended)


def test_a_model_whose_two_copies_do_not_fit_is_red(tmp_path: Path) -> None:
    report = preflight(config_of(qwen("32B", str(tmp_path))), CARD)
    assert [line_of(report, stage).state for stage in ("memory", "vllm")] == ["red", "red"]
    assert "the trainer, which is loaded first, leaves" in line_of(report, "vllm").figure
    assert line_of(report, "memory").fix.startswith("drop train.use_vllm")


@pytest.mark.slow("two forecasts; what a run on the same card chooses is in the first tier")
def test_a_server_takes_nothing_of_this_card(fourteen: dict[str, Any]) -> None:
    report = preflight(fourteen, CARD, train__vllm_mode="server")
    assert report.figures["memory"]["vllm"] == 0
    said = line_of(report, "vllm")
    assert said.state == "green"
    assert said.figure.endswith("vllm serve with --gpu-memory-utilization 0.9 --max-model-len 2560")
    assert line_of(preflight(fourteen, "l4", train__vllm_mode="server"), "vllm").state == "red"


@pytest.mark.slow("a forecast of a mixture of experts")
def test_a_cache_that_is_not_known_is_said(tmp_path: Path) -> None:
    small: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    Qwen3NextConfig(**small, vocab_size=1000, num_hidden_layers=4, num_experts=4, moe_intermediate_size=32, head_dim=32,
                    num_experts_per_tok=2, shared_expert_intermediate_size=32).save_pretrained(tmp_path)  # fmt: skip
    report = preflight(config_of(str(tmp_path)), CARD)
    assert line_of(report, "vllm").state == "unknown"
    assert report.figures["memory"]["vllm"] == pytest.approx(0.3 * H100, abs=1)


@pytest.mark.parametrize(
    ("tuning", "bytes_of_a_weight"), [("lora", 2), ("full", 4 + 4)]
)  # the gradient is counted, too
def test_every_weight_is_trained_in_float32_on_a_named_card(
    tiny_model: Path, tuning: str, bytes_of_a_weight: int
) -> None:
    run = run_of({"tuning": tuning})
    config = AutoConfig.from_pretrained(tiny_model)
    sample = DataSample(1, 1, 0, {}, Lengths([64]), 1, 1, None)
    _, load, _ = choose_for_target(run, read_base(str(tiny_model)), sample, find_target(CARD))
    adapter = 8 * load.trained if tuning == "lora" else 0
    assert load.weights == bytes_of_a_weight * meta_model(config).num_parameters() + adapter


# ---------------------------------------------------------------------------------------------------------- what is chosen


def run_of(cogumi: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    section = {"method": "gspo", "rewards": ["parses"], **(cogumi or {})}
    return load_config({"model": {"name": "x"}, "data": {"source": "x"}, "train": train, "cogumi": section})


def chosen(
    cogumi: dict[str, Any] | None = None, free: int = 79 * GIB, micro_batch: int = 4, **train: Any
) -> dict[str, Any]:
    """What a 14B with LoRA of rank 16 chooses on an H100. Its step takes about 8.4 GiB with 4 documents."""
    config = Qwen2Config(**FAMILY | MODELS["14B"])
    run = run_of(cogumi, use_vllm=True, max_completion_length=2048, per_device_train_batch_size=micro_batch, **train)
    machine = Machine("H100", (9, 0), free, True, total_bytes=H100)
    shape = ModelShape.of(config)
    load = Load(shape, 28 * GIB, 69_000_000, 2, micro_batch, 1024, frozenset({"sdpa"}))
    return {each.key: each.value for each in choose_with_engine(run, machine, load, config, lambda: 512)}


SHARE, SLEEP, LENGTH = (
    f"train.vllm_{name}" for name in ("gpu_memory_utilization", "enable_sleep_mode", "max_model_length")
)


def test_the_engine_sleeps_only_where_both_do_not_fit_awake() -> None:
    awake, asleep = chosen(micro_batch=2), chosen(micro_batch=8)
    assert (awake[SLEEP], asleep[SLEEP], awake[LENGTH]) == (False, True, 2560)
    assert 0.37 <= awake[SHARE] < asleep[SHARE]
    assert chosen(micro_batch=8, vllm_enable_sleep_mode=False)[SHARE] == 0.37  # the smallest: preflight will be red
    # Asleep the engine would lose the base, and the adapter alone is no model.
    assert not chosen({"sampler_weights": "adapter"}, micro_batch=8)[SLEEP]
    assert not chosen(free=50 * GIB)[SLEEP]  # where it fits neither way, sleep is no help


def test_what_the_user_says_of_vllm_stays() -> None:
    actual = chosen(vllm_gpu_memory_utilization=0.45, vllm_max_model_length=4096, micro_batch=8)
    assert (SHARE in actual, LENGTH in actual, actual[SLEEP]) == (False, False, True)
    assert SLEEP not in chosen(vllm_gpu_memory_utilization=0.45, vllm_enable_sleep_mode=True)
    assert chosen(vllm_gpu_memory_utilization=0.1)[SLEEP] is False  # asleep it would not start either


def test_other_settings_are_for_the_memory_that_the_engine_leaves() -> None:
    beside = {"micro_batch": 2, "vllm_enable_sleep_mode": False}
    assert chosen(**beside, vllm_gpu_memory_utilization=0.55)["train.optim"] != "adamw_torch_fused"
    assert chosen(**beside, vllm_gpu_memory_utilization=0.38)["train.optim"] == "adamw_torch_fused"
    key = "train.gradient_checkpointing"
    alone = {"micro_batch": 1, "free": 130 * GIB}
    assert chosen(**alone, vllm_enable_sleep_mode=True, vllm_gpu_memory_utilization=0.4)[key] is False
    assert chosen(**alone, vllm_enable_sleep_mode=False, vllm_gpu_memory_utilization=0.7)[key] is True


def test_the_longest_sequence_is_the_longest_prompt_and_a_completion() -> None:
    config = Qwen2Config(**FAMILY | MODELS["7B"])
    assert choose_length(run_of(max_completion_length=200), config, 505).value == 720  # 705, in blocks of 16
    config.max_position_embeddings = 600
    assert choose_length(run_of(max_completion_length=200), config, 400).value == 600


def test_nothing_is_chosen_of_vllm_where_it_is_not_asked_for() -> None:
    machine, config = Machine("H100", (9, 0), 79 * GIB, True, total_bytes=H100), Qwen2Config(**FAMILY | MODELS["7B"])
    load = Load(ModelShape.of(config), 15 * GIB, 40_000_000, 2, 4, 1024, frozenset({"sdpa"}))
    for run in (run_of(), run_of(use_vllm=True, vllm_mode="server")):
        keys = {each.key for each in choose_with_engine(run, machine, load, config, lambda: pytest.fail("was asked"))}
        assert not keys & {SHARE, SLEEP, LENGTH}


def test_a_resumed_run_keeps_the_share(tiny_model: Path, tmp_path: Path) -> None:
    run = run_of(use_vllm=True)
    run.model.name, run.cogumi.run_dir = str(tiny_model), tmp_path
    begun = apply_choices(run, read_base(str(tiny_model)), lambda *_: [Choice(SHARE, 0.41, "it was free then")])
    again = apply_choices(run, read_base(str(tiny_model)), lambda *_: pytest.fail("it was decided when the run began"))
    assert begun.train["vllm_gpu_memory_utilization"] == again.train["vllm_gpu_memory_utilization"] == 0.41
    own = run.model_copy(deep=True)
    own.train["vllm_gpu_memory_utilization"] = 0.5
    assert apply_choices(own, read_base(str(tiny_model))).train["vllm_gpu_memory_utilization"] == 0.5


# ------------------------------------------------------------------------------------------------- beside the training step


def test_an_engine_beside_the_step_takes_its_share_and_asleep_its_graphs() -> None:
    train: dict[str, Any] = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.4}
    assert engine_bytes({}, H100) == engine_bytes(train | {"vllm_mode": "server"}, H100) == 0
    assert engine_bytes(train, H100) == pytest.approx(0.4 * H100, abs=1)
    assert engine_bytes({"use_vllm": True}, H100) == pytest.approx(0.3 * H100, abs=1)  # TRL's
    asleep = train | {"vllm_enable_sleep_mode": True}
    assert engine_bytes(asleep, H100) == GRAPHS


def test_the_planned_batch_leaves_the_engine_its_share(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    prompts = Dataset.from_dict({"prompt": ["x = 1"]})

    def micro_batch(free: int, **train: Any) -> int:
        monkeypatch.setattr(memory_plan, "free_memory_bytes", lambda: free)
        monkeypatch.setattr(memory_plan, "total_memory_bytes", lambda: 200 * 2**20)
        run = run_of({"docs_per_step": 32}, **train)
        run.cogumi.run_dir = tmp_path / f"{free}-{len(train)}"
        run.run_dir.mkdir()
        return int(gspo.plan(run, model, tokenizer, prompts)["per_device_train_batch_size"])

    half = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5}
    whole = micro_batch(180 * 2**20)
    assert micro_batch(180 * 2**20, **half) == micro_batch(80 * 2**20) < whole
    assert micro_batch(180 * 2**20, **half, vllm_mode="server") == whole


@pytest.mark.slow("a forecast in a process of its own")
@pytest.mark.usefixtures("prepared_workers")
def test_a_run_whose_engine_cannot_start_is_refused_before_its_download(
    sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = 16 * 2**20
    card = Target(Machine("small", (9, 0), small, total_bytes=small), None, small)
    monkeypatch.setattr(estimate, "find_target", lambda *_: card)
    monkeypatch.setattr(sampler, "find_spec", lambda _: object())  # vLLM would be imported for the engine alone
    config = sft | {"cogumi": sft["cogumi"] | {"method": "gspo", "rewards": ["parses"], "preflight": "on"}}
    config["train"] = {"max_steps": 1, "max_completion_length": 64, "per_device_train_batch_size": 8}
    config["train"] |= {"use_vllm": True, "vllm_gpu_memory_utilization": 0.01}
    with pytest.raises(UsageError, match="the engine's weights alone need") as refused:
        cogumi.train(config)
    assert "cogumi.preflight: off, which starts it anyway" in str(refused.value)
    assert not Path(config["cogumi"]["run_dir"]).exists()


PACKED = {"quant_method": "bitsandbytes", "load_in_4bit": True}
PACKED |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.mark.parametrize(
    ("weights", "quantization", "on_disk", "said"),
    [
        ("merged", {"load_in_4bit": True}, {}, "model.quantization_config is set"),
        ("adapter", {"load_in_8bit": True}, {}, "model.quantization_config is set"),
        ("merged", None, {"quantization_config": PACKED}, "base is quantized"),
    ],
    ids=["4 bits", "8 bits", "on disk"],
)
@pytest.mark.parametrize("command", [cogumi.train, cogumi.preflight])
def test_vllm_is_refused_where_it_would_be_given_quantized_weights(
    command: Any, weights: str, quantization: Any, on_disk: Any, said: str,
    sft: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sampler, "find_spec", lambda _: object())  # vLLM, which is not started
    base = shutil.copytree(sft["model"]["name"], tmp_path / "base")
    config_file = base / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | on_disk))
    config = sft | {"model": {"name": str(base), "quantization_config": quantization}}
    config["cogumi"] = sft["cogumi"] | {"method": "gspo", "rewards": ["parses"], "sampler_weights": weights}
    config["train"] = {"max_steps": 1, "use_vllm": True}
    with pytest.raises(UsageError, match=f"^train.use_vllm: .*{said}.*, and vLLM cannot be given quantized weights"):
        command(config)


# ------------------------------------------------------------------------------------------------------ expandable segments


@pytest.mark.parametrize(
    ("variable", "value", "refused"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:true", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", False),
    ],
)
def test_expandable_segments_and_sleep_exclude_each_other(
    variable: str, value: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    asleep = run_of(use_vllm=True, vllm_enable_sleep_mode=True)
    refuse_segments(asleep)
    monkeypatch.setenv(variable, value)
    for run in (run_of(use_vllm=True), run_of(vllm_enable_sleep_mode=True)):
        refuse_segments(run)
    if not refused:
        refuse_segments(asleep)
        return
    with pytest.raises(
        UsageError, match=f"^train.vllm_enable_sleep_mode: {variable} sets expandable_segments:True, which"
    ):
        refuse_segments(asleep)


def test_segments_that_another_process_set_are_neither_kept_nor_blamed_on_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asleep = run_of(use_vllm=True, vllm_enable_sleep_mode=True)
    for name, value in (("PYTORCH_ALLOC_CONF", "expandable_segments:True"), (SET_BY_COGUMI, "PYTORCH_ALLOC_CONF")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(ALLOCATOR, raising=False)
    with pytest.raises(UsageError, match=r"unsloth or an earlier run sets .* start a new process with cogumi.backend"):
        refuse_segments(asleep)
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    set_allocator(asleep)
    refuse_segments(asleep)


def test_sleep_and_segments_are_refused_before_the_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOCATOR, "expandable_segments:True")
    config = config_of("gone")
    config["train"]["vllm_enable_sleep_mode"] = True
    with pytest.raises(UsageError, match="sets expandable_segments:True, which the memory pool of vLLM's sleep mode"):
        preflight(config)


def test_sleep_that_was_chosen_excludes_them_too(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOCATOR, "expandable_segments:True")
    run = run_of(use_vllm=True)
    run.model.name, run.cogumi.run_dir = str(tiny_model), tmp_path
    with pytest.raises(UsageError, match="take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"):
        apply_choices(run, read_base(str(tiny_model)), lambda *_: [Choice(SLEEP, True, "both do not fit awake")])


@pytest.mark.parametrize(
    ("train", "sets"),
    [
        ({}, True),
        ({"use_vllm": True}, False),  # whether it sleeps is not decided yet
        ({"use_vllm": True, "vllm_enable_sleep_mode": True}, False),
        ({"use_vllm": True, "vllm_enable_sleep_mode": False}, True),
        ({"use_vllm": True, "vllm_mode": "server"}, True),
    ],
)
def test_segments_are_set_where_no_engine_may_sleep(train: Any, sets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", ALLOCATOR, SET_BY_COGUMI):
        monkeypatch.setenv(name, "")  # what it was before, after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(auto_settings.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(auto_settings.torch.cuda, "is_initialized", lambda: False)
    assert bool(set_allocator(run_of(**train))) == sets
    assert (os.environ.get(ALLOCATOR) == "expandable_segments:True") == sets


def test_a_named_card_is_the_whole_card() -> None:
    assert find_target(CARD).total == H100
    assert find_target(None).total == (torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0)
