"""TRL's losses without a GPU: torch's arithmetic since TRL 1.16, Triton alone before."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gspo_batches import grpo_trainer
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer import utils

import cogumi
from cogumi.checkpoints.manifest import read_settings
from cogumi.core.errors import UsageError
from cogumi.patches.trl_internals import HEAD, HEAD_USES_TRITON


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_grpo_trains_on_a_cpu(entropy_coef: float, tiny_model: Path, tmp_path: Path) -> None:
    """One optimizer step of TRL's own trainer, whose per-token log-probabilities are then the model's."""
    step = {"per_device_train_batch_size": 4, "max_completion_length": 6, "max_steps": 1, "learning_rate": 1e-2}
    trainer = grpo_trainer(tiny_model, tmp_path, entropy_coef=entropy_coef, **step)
    model = trainer.model
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before)
    logged = trainer.state.log_history[0]
    assert math.isfinite(logged["loss"])
    assert 0 < logged["entropy"] <= math.log(len(before)) + 1e-3

    ids = torch.randint(1, 97, (2, 8), generator=torch.Generator().manual_seed(1))
    log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        model, ids, torch.ones_like(ids), 5, compute_entropy=True
    )
    every = model(ids).logits[:, :-1].log_softmax(-1)
    expected = every.gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(log_probs, expected[:, -5:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, -(every.exp() * every).sum(-1)[:, -5:], rtol=1e-5, atol=1e-5)


def test_layers_computed_twice_are_the_same_training(tiny_model: Path, tmp_path: Path) -> None:
    """A resumed run may change it, whatever transformers calls it: gradient or activation checkpointing."""
    once, twice = (
        read_settings(grpo_trainer(tiny_model, tmp_path / str(twice), gradient_checkpointing=twice))
        for twice in (False, True)
    )
    assert once == twice
    assert once["learning_rate"] > 0


def test_a_compiled_model_trains_through_the_head() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids, labels=ids).loss
    utils.add_fused_lm_head(model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    loss = compiled(input_ids=ids, labels=ids, fused_lm_head=True).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("without_triton", [True, False])
def test_an_older_trl_is_refused_where_its_losses_cannot_run(
    without_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(utils, HEAD_USES_TRITON, raising=False)
    kernel = type("ChunkedLogProbFunction", (), {"__module__": "trl.kernels.chunked_logprob"})
    monkeypatch.setattr(utils, HEAD, None if without_triton else kernel)
    with pytest.raises(UsageError, match="computes its losses in Triton alone") as raised:
        cogumi.patch(graph_break="off")
    assert raised.value.fix is not None
    assert "trl>=1.16" in raised.value.fix
    cogumi.patch(rl=False, graph_break="off")
