"""Greedy completions of raw prompts: for samples beside a run, and for comparing models."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


@torch.no_grad()
def complete(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | list[int]],
    max_new_tokens: int = 64,
    stops: Sequence[str] = (),
) -> list[str]:
    """One greedy completion per prompt (text, or token ids), without the end token or stop sequence and what follows it."""
    was_training = model.training
    model.eval()
    ids = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt for prompt in prompts]
    batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(model.device)
    written = model.generate(
        **batch,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        **({"stop_strings": list(stops), "tokenizer": tokenizer} if stops else {}),
    )
    model.train(was_training)
    texts = tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [cut(text, stops) for text in texts]


def cut(completion: Any, stops: Sequence[str]) -> Any:
    """A completion, text or chat messages, up to the first stop sequence in its last message."""
    if isinstance(completion, str):
        return completion[: min((at for stop in stops if (at := completion.find(stop)) >= 0), default=len(completion))]
    *before, last = completion
    return [*before, {**last, "content": cut(last.get("content") or "", stops)}]
