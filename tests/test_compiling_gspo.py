"""GSPO on a gpt-oss with 4-bit experts, compiled layer by layer: what used to be run with Dynamo switched off everywhere."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from conftest import letters
from datasets import Dataset
from four_bit_models import gpt_oss_base
from test_compiling import uncompile
from transformers import AutoTokenizer

from cogumi.compile.layers import compile_trainer
from cogumi.patches import graph_break
from cogumi.rl.patching import patch

STEPS = 20


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    graph_break.undo()


def trained(mode: str, tiny_model: Path, sources: list[str], folder: Path) -> tuple[list[float], dict[str, Any]]:
    """The gradient norms of GSPO on a tiny gpt-oss, and the report of what was compiled.

    The losses of steps that follow their rollout at once are 0 whatever the weights; the gradients are not.
    """
    patch(graph_break="off")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = gpt_oss_base(vocabulary=len(tokenizer), experts=4)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.is_loaded_in_4bit = True
    args = trl.GRPOConfig(
        output_dir=str(folder),
        loss_type="gspo",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        report_to="none",
        router_aux_loss_coef=0.0,  # transformers records a router's logits in a ContextVar, at which Dynamo ends a graph
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=letters,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [text[:40] for text in sources[:16]]}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear"),
    )
    compile_trainer(trainer, mode, folder / "decisions.json", lambda write: write())
    trainer.train()
    if mode != "off":
        uncompile(trainer.model)
    norms = [row["grad_norm"] for row in trainer.state.log_history if "loss" in row]
    return norms, json.loads((folder / "decisions.json").read_text())["compile"]


@pytest.mark.sweep  # minutes of the C++ compiler
def test_a_gpt_oss_with_4_bit_experts_trains_compiled(tiny_model: Path, sources: list[str], tmp_path: Path) -> None:
    expected, _ = trained("off", tiny_model, sources, tmp_path / "eager")
    norms, report = trained("layers", tiny_model, sources, tmp_path / "compiled")
    assert len(norms) == STEPS
    assert all(norm > 0 for norm in norms)
    assert norms == pytest.approx(expected, rel=1e-3)
    assert report["mode"] == "layers"
    assert report["strategy"] == "branchless"
    assert report["counts"]["breaks"] == {}
    assert report["counts"]["graphs"] > 0
    assert report["switched_off_by"] == ""
    assert report["counts"]["operations"] > 100
    assert torch._dynamo.config.disable is False
