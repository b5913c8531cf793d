"""Sampler against trainer without vLLM: a copy of the model in its place, whose weights are those of a chosen step."""

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cogumi.config.presets import CORRECTIONS
from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.random_state import kept_random_state
from cogumi.methods import gspo
from cogumi.patches import vllm_engine
from cogumi.rl import sampling
from cogumi.rl.guards import find_problems
from cogumi.rl.sampling import LONGEST, SamplerCheck, correction_metrics, pick_texts, score_by_trainer

TEXTS = [[5, 9, 14, 20, 33, 41, 7, 3], [8, 8, 15, 16, 23, 42], [4, 11, 2, 60, 61, 9, 9, 10, 12]]


@pytest.fixture
def stage(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The check of a trainer whose sampler is `stage.engine`, a model of its own. `stage.train(x)` moves the trainer."""
    trainer = make_trainer()
    trainer.vllm_generation = SimpleNamespace()
    engine = make_trainer().model  # not a deep copy, whose forward would be a closure over the trainer's model
    check = SamplerCheck(trainer)
    noise = torch.Generator().manual_seed(0)
    stage = SimpleNamespace(trainer=trainer, check=check, noise=0.0)

    def score(generation: Any, texts: list[list[int]]) -> list[list[float]]:
        logps = score_by_trainer(engine, texts)
        logps = logps + stage.noise * torch.randn(logps.shape, generator=noise, dtype=logps.dtype)
        return [part.tolist() for part in logps.split([len(text) - 1 for text in texts])]

    def train(size: float) -> None:
        trainer.state.global_step += 1
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter += size * torch.randn(parameter.shape)

    def sync(only: str = "") -> None:
        source = dict(trainer.model.named_parameters())
        with torch.no_grad():
            for name, parameter in engine.named_parameters():
                if only in name:
                    parameter.copy_(source[name])

    def rollout() -> dict[str, float]:
        check.score_texts(TEXTS)
        return check.compare_texts()

    monkeypatch.setattr(sampling, "score", score)
    torch.manual_seed(0)
    sync()
    stage.train, stage.sync, stage.rollout = train, sync, rollout
    return stage


def test_a_sampler_that_follows_has_no_lag(stage: Any) -> None:
    first = stage.rollout()
    assert first == {"difference": pytest.approx(0, abs=1e-6), "moved": 0.0}
    for _ in range(4):
        stage.train(0.05)
        stage.sync()
        actual = stage.rollout()
        assert actual["moved"] > 1e-3
        assert actual["lag"] < 1e-3
        assert actual["difference"] < 1e-6


def test_weights_of_an_earlier_step_are_told_at_once_and_until_they_are_replaced(stage: Any) -> None:
    stage.rollout()
    stage.train(0.05)
    stage.sync()
    assert stage.rollout()["lag"] < 0.01
    for _ in range(2):
        stage.train(0.05)
        assert stage.rollout()["lag"] == 1.0
    stage.train(0.0)
    stage.sync()
    assert stage.rollout()["lag"] < 0.01


def test_a_sampler_without_the_adapter_is_told_in_its_first_rollout(stage: Any) -> None:
    stage.train(0.5)  # a warm start: the engine is the base, and the trainer is not
    assert stage.rollout()["lag"] > 0.9


def test_a_part_of_the_weights_that_stays_old_is_a_share(stage: Any) -> None:
    stage.rollout()
    stage.train(0.05)
    stage.sync(only="layers.0.")
    assert 0.1 < stage.rollout()["lag"] < 1.0


def test_other_arithmetic_is_no_lag(stage: Any) -> None:
    """Noise as of bfloat16, and updates below it, then far above it."""
    stage.noise = 0.02
    stage.rollout()
    for size in (1e-4, 1e-4, 1e-4, 0.5, 0.5, 0.5):
        stage.train(size)
        stage.sync()
        assert stage.rollout().get("lag", 0.0) < 0.05
    assert stage.rollout() == {}  # one comparison a step


def test_a_stale_sampler_under_noise_is_told_once_the_trainer_is_far_enough(stage: Any) -> None:
    stage.noise = 0.005  # the engine never gives the same values twice, as kernels on a GPU may not
    stage.rollout()
    collected = []
    for _ in range(12):
        stage.train(0.2)
        collected.append(stage.rollout().get("lag"))
    assert collected[-1] is not None
    assert collected[-1] > 0.5


def test_a_warm_start_under_autocast_is_not_called_stale_for_its_arithmetic(stage: Any) -> None:
    stage.check.noise = SamplerCheck(
        SimpleNamespace(model=stage.trainer.model, accelerator=SimpleNamespace(mixed_precision="bf16"))
    ).noise
    stage.noise = 0.02
    stage.train(0.5)
    stage.sync()
    assert stage.rollout().get("lag", 0.0) < 0.05


def test_what_the_trainer_scores_is_the_log_softmax_in_float64(
    make_trainer: Callable[..., Any], tiny_model: Path
) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make_trainer()
    exact = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    expected = []
    for text in TEXTS:
        logits = exact(input_ids=torch.tensor([text])).logits[0].detach()
        expected += [float(logits[i].log_softmax(-1)[token]) for i, token in enumerate(text[1:])]
    assert torch.allclose(
        score_by_trainer(trainer.model, TEXTS), torch.tensor(expected, dtype=torch.float64), atol=1e-5
    )


def test_texts_are_different_and_short() -> None:
    picked = pick_texts([[1, 2, 3], [1, 2, 9], [3, 4], list(range(500)), [4, 5, 6], [6, 7, 8], [8, 9, 10]])
    assert picked == [[1, 2], list(range(LONGEST)), [4, 5], [6, 7]]  # shorter than what was sampled, so there is room


@pytest.mark.parametrize(
    ("mode", "low", "high", "weights", "share"),
    [
        ("token_truncate", None, 2.0, [[0.5, 2.0, 1.0]], 1 / 2),
        ("token_mask", 0.5, 5.0, [[0.0, 1.5, 0.0]], 1 / 2),
        ("sequence_mask", None, 3.0, [[0.0], [1.2], [0.9], [2.9]], 1 / 4),
    ],
)
def test_the_share_that_a_correction_changes(
    mode: str, low: float | None, high: float, weights: list[list[float]], share: float
) -> None:
    args = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    batch = {"importance_sampling_ratio": torch.tensor(weights), "completion_mask": torch.tensor([[1, 1, 0]])}
    actual = correction_metrics(args, batch)
    counted = [row[0] for row in weights] if len(weights[0]) == 1 else weights[0][:2]  # the third token is padding
    squares = sum(value**2 for value in counted)
    assert actual["corrected_share"] == share
    assert actual["effective_share"] == pytest.approx(sum(counted) ** 2 / (len(counted) * squares))  # Kish 1965
    assert correction_metrics(args, {}) == {}


# ------------------------------------------------------------------------------------------------- settings of a run


def run_of(**sections: Any) -> RunConfig:
    options = {
        "model": {"name": "m"},
        "data": {"source": "d", "format": "prompt_completion"},
        "cogumi": {"method": "gspo"},
    }
    for name, values in sections.items():
        options[name] = options.get(name, {}) | values
    return RunConfig.model_validate(options)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_is_trls_own_settings(name: str) -> None:
    actual = gspo.arguments(run_of(cogumi={"sampler_correction": name}, train={"use_vllm": True}))
    expected = {
        "tis": (True, "token_truncate", None, 2.0),
        "icepop": (True, "token_mask", 0.5, 5.0),
        "mis": (True, "sequence_mask", None, 3.0),
    }
    prefix = "vllm_importance_sampling_"
    if name == "none":
        assert actual[prefix + "correction"] is False
        return
    assert tuple(actual[prefix + key] for key in ("correction", "mode", "clip_min", "clip_max")) == expected[name]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"cogumi": {"sampler_correction": "tis"}}, "cogumi.sampler_correction.*set train.use_vllm: true"),
        (
            {
                "cogumi": {"sampler_correction": "tis"},
                "train": {"use_vllm": True, "vllm_importance_sampling_clip_max": 4.0},
            },
            "train.vllm_importance_sampling_clip_max both decide",
        ),
        ({"cogumi": {"sampler_weights": "adapter"}}, "cogumi.sampler_weights.*train.use_vllm: true"),
        (
            {"cogumi": {"sampler_weights": "adapter"}, "train": {"use_vllm": True, "vllm_mode": "server"}},
            "vllm_mode: colocate",
        ),
        (
            {"cogumi": {"sampler_weights": "adapter", "tuning": "full"}, "train": {"use_vllm": True}},
            "cogumi.tuning: full",
        ),
        (
            {"cogumi": {"sampler_weights": "adapter"}, "train": {"use_vllm": True}, "lora": {"use_dora": True}},
            "lora.use_dora: True",
        ),
        (
            {"cogumi": {"sampler_weights": "adapter"}, "train": {"use_vllm": True, "vllm_enable_sleep_mode": True}},
            "vllm_enable_sleep_mode",
        ),
    ],
)
def test_settings_of_the_sampler_that_contradict_others_are_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        gspo.arguments(run_of(**sections))


@pytest.mark.parametrize(
    ("lora", "refused"),
    [
        ({"use_dora": True}, "use_dora: True"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: "),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save: "),
        ({"bias": "all"}, "bias: all"),
        # vLLM scales all modules by one alpha and one rank, and starts from the base on disk.
        ({"alpha_pattern": {"down_proj": 64}}, "alpha_pattern: "),
        ({"rank_pattern": {"down_proj": 2}}, "rank_pattern: "),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices: "),
        ({"use_rslora": True, "lora_alpha": 64, "target_modules": ["q_proj"], "exclude_modules": ["k_proj"]}, ""),
    ],
)
def test_an_adapter_that_vllm_would_serve_as_another_is_refused(lora: dict[str, Any], refused: str) -> None:
    run = run_of(cogumi={"sampler_weights": "adapter"}, train={"use_vllm": True}, lora=lora)
    with pytest.raises(UsageError, match=f"with lora.{refused}") if refused else nullcontext():
        gspo.arguments(run)


def test_a_cut_distribution_beside_a_correction_is_refused(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(steps_per_generation=4)

    def messages(old_logps: str = "trainer", **settings: Any) -> list[str]:
        trainer.args.__dict__.update(settings)
        trainer.cogumi_behaviour_logps = old_logps
        return [each.message for each in find_problems(trainer) if each.name == "cut-distribution" and each.refused]

    assert messages(top_p=0.8) == []  # transformers' sampler: the trainer's own log-probabilities are the old ones
    (said,) = messages(use_vllm=True, vllm_importance_sampling_correction=True)
    assert said.startswith("train.top_p 0.8: ")
    assert said.endswith("set train.vllm_importance_sampling_correction: false")
    assert messages(vllm_importance_sampling_correction=False) == []
    (said,) = messages("rollout")
    assert said.endswith("set cogumi.behaviour_logps: trainer")
    assert messages(top_p=1.0, vllm_importance_sampling_correction=True) == []
    (said,) = messages(generation_kwargs={"top_k": 20})
    assert said.startswith("train.generation_kwargs.top_k 20: ")


# -------------------------------------------------------------------------------------------- weights on their way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"modules_to_save": ["embed_tokens"]}])
def test_weights_are_merged_as_trl_merges_and_the_base_stays(
    dtype: torch.dtype, lora: dict[str, Any], make_trainer: Callable[..., Any]
) -> None:
    from trl.generation.vllm_generation import VLLMGeneration

    model = make_trainer(lora=lora).model.to(dtype)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.data += 0.05 * torch.randn(parameter.shape)
    before = {name: value.clone() for name, value in model.named_parameters()}
    generation: Any = object.__new__(VLLMGeneration)
    generation.model = model
    generation._dist = trl_distribution()
    mine = dict(vllm_engine.iterate_parameters(generation))
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), name
    assert not any(getattr(module, "merged_adapters", None) for module in model.modules())

    theirs = {name: value.clone() for name, value in VLLMGeneration._iter_named_params(generation)}
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
    drifted = [name for name, value in model.named_parameters() if not torch.equal(value, before[name])]
    assert drifted  # what TRL's own way does to the base


def trl_distribution() -> Any:
    from accelerate import Accelerator
    from trl.distributed import DistributedBackend

    return DistributedBackend(Accelerator(cpu=True))


def test_the_engines_dtype_is_what_the_trainer_computes_in(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer()
    assert vllm_engine.computing_dtype(trainer.model, trainer.accelerator) == torch.float32
    assert vllm_engine.computing_dtype(trainer.model, SimpleNamespace(mixed_precision="bf16")) == torch.bfloat16
    half = copy.deepcopy(trainer.model).half()
    assert vllm_engine.computing_dtype(half, SimpleNamespace(mixed_precision="no")) == torch.float16


def test_building_an_engine_leaves_the_random_numbers() -> None:
    import random

    import numpy

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    with suppress(KeyError), kept_random_state():
        random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
        draw()
        raise KeyError
    assert draw() == expected
