"""Greedy completions of raw prompts: for samples beside a run, and for comparing models."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


@torch.no_grad()
def complete(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[str], max_new_tokens: int = 64) -> list[str]:
    """One greedy completion per prompt, without the end token and what follows it."""
    was_training = model.training
    model.eval()
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    batch.pop("token_type_ids", None)
    written = model.generate(
        **batch, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    model.train(was_training)
    return tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
