"""The fp32 head in a real GRPOTrainer, tied and untied, with PEFT and without, on a bf16 base (reference 19 of GSPO).

Attention is "eager" and prompts have one length: the bf16 body is then bitwise the same with a cache and without, so
that what sampler and trainer differ by is the head.
"""

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import save_llama
from gspo_batches import grpo_trainer
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from trl.kernels import ChunkedLogProbFunction

import cogumi
from cogumi.core.errors import UsageError
from cogumi.rl.fp32_head import VOCABULARY_TILE, fp32_lm_head, project_in_fp32, unwrap_peft

TEMPERATURE = 0.7
KINDS = [
    pytest.param(tied, peft, id=f"{'tied' if tied else 'untied'}-{'peft' if peft else 'full'}")
    for tied in (True, False)
    for peft in (True, False)
]


@pytest.fixture(scope="module")
def base(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """A bf16 Llama whose logits have a standard deviation near 2, with the tiny model's tokenizer."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.25}

    @functools.cache
    def made(tied: bool) -> Path:
        return save_llama(tmp_path_factory.mktemp("base"), tiny_model, tie_word_embeddings=tied, **sizes)

    return made


@pytest.fixture
def build(base: Callable[[bool], Path], tmp_path: Path) -> Callable[..., Any]:
    def built(tied: bool, peft: bool, lora: dict[str, Any] | None = None, **settings: Any) -> Any:
        torch.manual_seed(0)
        step = {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "temperature": TEMPERATURE,
            "max_steps": 3,
        }
        step |= {"per_device_train_batch_size": 4, "num_generations": 4, "optim": "adamw_torch", "learning_rate": 1e-2}
        return grpo_trainer(
            base(tied),
            tmp_path / "trainer",
            ["def f(x):"] * 16,
            # Varies inside a group, so that there is an advantage to learn from.
            reward=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
            lora={"task_type": "CAUSAL_LM", **(lora or {})} if peft else False,
            model=AutoModelForCausalLM.from_pretrained(base(tied), attn_implementation="eager"),
            **step | {"max_grad_norm": 1.0} | settings,
        )

    return built


def sampled(model: Any) -> tuple[Tensor, Tensor]:
    """(sequences (4, 12 + 8), the sampler's log-probabilities of the last 8 tokens in float64)."""
    torch.manual_seed(1)
    prompts = torch.randint(5, 200, (4, 12))
    model.eval()
    draw = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "max_new_tokens": 8, "min_new_tokens": 8}
    inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    output = model.generate(**inputs, **draw, output_logits=True, return_dict_in_generate=True)
    return output.sequences, chosen(torch.stack(output.logits, dim=1), output.sequences)


def chosen(logits: Tensor, sequences: Tensor) -> Tensor:
    """Log-probabilities (4, 8) at the sampling temperature of the last 8 tokens, in float64."""
    logps = torch.log_softmax(logits.double() / TEMPERATURE, dim=-1)
    return logps.gather(-1, sequences[:, -8:, None]).squeeze(-1)


def trainer_logps(trainer: Any, sequences: Tensor, model: Any = None) -> Tensor:
    """Log-probabilities (4, 8) as the trainer makes them of its own, or of another, model."""
    score, whole = trainer._get_per_token_logps_and_entropies, torch.ones_like(sequences)
    return score(model or trainer.model, sequences, whole, 8, compute_entropy=model is None)[0]


@torch.no_grad()
def scored(trainer: Any, sequences: Tensor, model: Any = None) -> Tensor:
    return trainer_logps(trainer, sequences, model).double()


def oracle(model: Any, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (4, 8) of the hidden states as the bf16 body gives them: (float64 head, bf16 head)."""
    plain = unwrap_peft(model)
    with torch.no_grad():
        hidden = plain.model(sequences).last_hidden_state[:, -9:-1]
    assert hidden.dtype == torch.bfloat16
    weight = plain.lm_head.weight
    exact = chosen(hidden.double() @ weight.double().t(), sequences)
    return exact, chosen(nn.functional.linear(hidden, weight), sequences)


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


@pytest.mark.parametrize(("tied", "peft"), KINDS)
def test_sampler_and_trainer_are_exact_only_with_it(build: Callable[..., Any], tied: bool, peft: bool) -> None:
    trainer = build(tied, peft)
    sequences, sampler = sampled(trainer.model)
    exact, _ = oracle(trainer.model, sequences)
    for logps in (sampler, scored(trainer, sequences)):
        assert largest(logps - exact) > 2e-3, "the bf16 head must show, or this test shows nothing"

    fp32_lm_head(trainer)
    sequences, sampler = sampled(trainer.model)
    exact, rounded = oracle(trainer.model, sequences)
    trained = scored(trainer, sequences)
    assert largest(sampler - trained) < 1e-5
    assert largest(sampler - exact) < 1e-5
    assert largest(trained - exact) < 1e-5
    assert largest(rounded - exact) > 2e-3


@pytest.mark.parametrize(("tied", "peft"), KINDS)
def test_a_model_trains_and_its_weights_stay_what_they_are(
    build: Callable[..., Any], tied: bool, peft: bool, tmp_path: Path
) -> None:
    trainer = build(tied, peft)
    fp32_lm_head(trainer)
    plain = unwrap_peft(trainer.model)
    embedding, head = plain.get_input_embeddings(), plain.get_output_embeddings()
    assert (embedding.weight is head.weight) == tied
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}

    result = trainer.train()

    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    assert all(step["grad_norm"] > 0 for step in steps)
    assert any(step["reward_std"] > 0 for step in steps)
    assert torch.isfinite(torch.tensor(result.training_loss))
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    if peft:
        assert all("lora_" in name for name in changed)
    assert (embedding.weight is head.weight) == tied
    assert embedding.weight.dtype == head.weight.dtype == torch.bfloat16
    assert embedding(torch.tensor([5])).dtype == torch.bfloat16
    assert {name for name, _ in trainer.model.named_parameters()} == set(before)

    sequences, sampler = sampled(trainer.model)
    assert largest(sampler - scored(trainer, sequences)) < 1e-5, "still so after training"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_nothing_of_the_head_is_saved_and_the_adapter_merges(
    build: Callable[..., Any], base: Callable[[bool], Path], tied: bool, tmp_path: Path
) -> None:
    trainer = build(tied, peft=True)
    trainer.model.save_pretrained(tmp_path / "without")
    fp32_lm_head(trainer)
    trainer.model.save_pretrained(tmp_path / "with")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()

    trainer.train()
    trainer.model.save_pretrained(tmp_path / "trained")
    assert {p.name for p in (tmp_path / "trained").iterdir()} == {p.name for p in (tmp_path / "without").iterdir()}
    cogumi.merge_adapter(tmp_path / "trained", tmp_path / "merged", base=str(base(tied)))

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    original = AutoModelForCausalLM.from_pretrained(base(tied))
    assert torch.equal(merged.lm_head.weight, original.lm_head.weight)
    assert merged.lm_head.weight.dtype == torch.bfloat16


def test_gradients_are_those_of_an_fp32_head(build: Callable[..., Any]) -> None:
    """The loss's gradient against dense autograd through hidden.float() @ W.float().T, in the trainer's own forward."""
    trainer = build(tied=True, peft=True)
    fp32_lm_head(trainer)
    sequences, _ = sampled(trainer.model)
    factors = [p for n, p in trainer.model.named_parameters() if "lora_B" in n]

    fused = torch.autograd.grad(trainer_logps(trainer, sequences).sum(), factors)
    plain = unwrap_peft(trainer.model)
    hidden = plain.model(sequences).last_hidden_state[:, -9:-1]
    dense = torch.autograd.grad(chosen(hidden.float() @ plain.lm_head.weight.float().t(), sequences).sum(), factors)
    for one, other in zip(fused, dense, strict=True):
        # Two backward passes of a bf16 body, whose first cotangent is rounded to bf16.
        assert largest(one - other) < 2e-2 * largest(other)


def test_a_reference_model_gets_the_same_head(build: Callable[..., Any]) -> None:
    trainer = build(tied=True, peft=False, beta=0.1)
    fp32_lm_head(trainer)
    assert trainer.ref_model.lm_head.forward.__func__ is project_in_fp32
    sequences, _ = sampled(trainer.model)
    with torch.no_grad():
        hidden = trainer.ref_model.model(sequences).last_hidden_state[:, -9:-1]
    exact = chosen(hidden.double() @ trainer.ref_model.lm_head.weight.double().t(), sequences)
    assert largest(scored(trainer, sequences, trainer.ref_model) - exact) < 1e-5
    trainer.train()


def test_the_head_kernel_gets_fp32_outside_autocast(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's head multiplies in the dtype it gets, or autocast's."""
    trainer = build(tied=True, peft=True)
    sequences, _ = sampled(trainer.model)
    seen: list[tuple[torch.dtype, torch.dtype, bool]] = []
    compute = ChunkedLogProbFunction.apply

    def seeing(hidden: Tensor, weight: Tensor, *rest: Any) -> Any:
        seen.append((hidden.dtype, weight.dtype, torch.is_autocast_enabled("cpu")))
        return compute(hidden, weight, *rest)

    monkeypatch.setattr(ChunkedLogProbFunction, "apply", seeing)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scored(trainer, sequences)
        fp32_lm_head(trainer)
        scored(trainer, sequences)
    assert seen == [(torch.bfloat16, torch.bfloat16, True), (torch.float32, torch.bfloat16, False)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_projection_against_float64_over_several_tiles(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(48, 2 * VOCABULARY_TILE + 5, bias=bias).to(dtype)
    hidden = torch.randn(2, 3, 48).to(dtype)
    exact = nn.functional.linear(hidden.double(), head.weight.double(), head.bias.double() if bias else None)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = project_in_fp32(head, hidden)
        assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert largest(logits - exact) < 1e-5


def test_a_copied_model_uses_its_own_head(build: Callable[..., Any]) -> None:
    """The merge check runs deep copies; a copy that kept the original's weights would be compared with itself."""
    trainer = build(tied=False, peft=False)
    fp32_lm_head(trainer)
    copied = copy.deepcopy(trainer.model.lm_head)
    with torch.no_grad():
        copied.weight.zero_()
        assert largest(copied(torch.ones(1, 64, dtype=torch.bfloat16))) == 0
        assert largest(trainer.model.lm_head(torch.ones(1, 64, dtype=torch.bfloat16))) > 0


def test_trls_own_switch_still_raises_for_peft_on_a_tied_model(build: Callable[..., Any]) -> None:
    """Why this module exists: when TRL no longer does, look again."""
    with pytest.raises(AttributeError, match="embed_tokens"):
        build(tied=True, peft=True, cast_lm_head_to_fp32=True)


def test_a_trained_head_is_refused(build: Callable[..., Any]) -> None:
    trainer = build(tied=False, peft=True, lora={"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    with pytest.raises(UsageError, match="adapter on the head"):
        fp32_lm_head(trainer)
    assert isinstance(trainer.model, PeftModel)


def test_a_head_that_is_not_a_linear_layer_is_refused(build: Callable[..., Any]) -> None:
    class OwnHead(nn.Linear):
        pass

    trainer = build(tied=False, peft=False)
    head = OwnHead(64, trainer.model.lm_head.out_features, bias=False)
    trainer.model.set_output_embeddings(head)
    with pytest.raises(UsageError, match=r"plain Linear head and LlamaForCausalLM has .*OwnHead"):
        fp32_lm_head(trainer)
    assert "forward" not in vars(head)


def engine_with_head(dtype: torch.dtype) -> Any:
    """What TRL keeps of an engine in this process, as far as the head's dtype is read from it."""
    config = SimpleNamespace(head_dtype=dtype)
    return SimpleNamespace(mode="colocate", llm=SimpleNamespace(llm_engine=SimpleNamespace(model_config=config)))


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        (
            engine_with_head(torch.bfloat16),
            r'it is in bfloat16\); write "head_dtype": "float32" into the config.json of ',
        ),
        (SimpleNamespace(mode="server"), 'a server does not tell.*--hf-overrides \'{"head_dtype": "float32"}\''),
        (engine_with_head(torch.float32), None),
    ],
)
def test_a_vllm_that_was_not_told_is_warned_about(
    generation: Any, said: str | None, build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(tied=True, peft=True)
    trainer.use_vllm, trainer.vllm_generation = True, generation
    with caplog.at_level("WARNING", logger="cogumi.rl.fp32_head"):
        fp32_lm_head(trainer)
    assert bool(caplog.records) == (said is not None)
    assert re.search(said or "", caplog.text)
