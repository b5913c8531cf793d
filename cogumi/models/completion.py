"""Completions of raw prompts: for samples beside a run, for a chat, and for comparing models."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from cogumi.core.liveness import beat
from cogumi.patches import replaced


def complete_with_ends(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | list[int]],
    max_new_tokens: int = 64,
    stops: Sequence[str] = (),
    skip_special_tokens: bool = True,
    **generation: Any,
) -> list[tuple[str, bool]]:
    """One completion per prompt (text, or token ids), and whether it came to its end within max_new_tokens.

    An end token or a stop sequence ends it and is left out. `skip_special_tokens=False` keeps the end token. Greedy,
    unless `generation`, further arguments of `generate`, says otherwise.
    """
    beat()
    new = generate_ids(model, tokenizer, prompts, stops, max_new_tokens=max_new_tokens, **generation)
    ends = torch.isin(new, torch.tensor(sorted(end_ids(model, tokenizer)), dtype=new.dtype, device=new.device)).any(-1)
    texts = [
        (text, cut_at_stop(text, stops))
        for text in tokenizer.batch_decode(new, skip_special_tokens=skip_special_tokens)
    ]
    return [(trimmed, end or trimmed != text) for (text, trimmed), end in zip(texts, ends.tolist(), strict=True)]


@torch.no_grad()
def generate_ids(
    model: Any, tokenizer: Any, prompts: Sequence[str | list[int]], stops: Sequence[str] = (), **generation: Any
) -> torch.Tensor:
    """Return the new tokens of each prompt, [prompts, tokens], padded behind their end; greedy by default."""
    was_training = model.training
    model.eval()
    ids = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt for prompt in prompts]
    batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(model.device)
    config = model.config.get_text_config()
    routing: AbstractContextManager[None] = nullcontext()
    if getattr(config, "output_router_logits", False):
        # The router's loss fails in `generate`: its mask is of the whole sequence, its logits of one token (transformers 5.17).
        routing = replaced(config, {"output_router_logits": False})
    with routing:
        written = model.generate(
            **batch,
            pad_token_id=tokenizer.pad_token_id,
            **{"do_sample": False, **generation},
            **({"stop_strings": list(stops), "tokenizer": tokenizer} if stops else {}),
        )
    model.train(was_training)
    return written[:, batch["input_ids"].shape[1] :]


@torch.no_grad()
def mean_log_likelihood(model: Any, prompt_ids: list[int], answer_ids: list[int]) -> float:
    """Return the mean log-probability of an answer's tokens after a prompt, in nats."""
    beat()
    ids = torch.tensor([prompt_ids + answer_ids], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    return float(logits.float().log_softmax(-1).gather(-1, ids[0, len(prompt_ids) :, None]).mean())


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    of_model = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    candidates = [getattr(tokenizer, "eos_token_id", None), *(of_model if isinstance(of_model, list) else [of_model])]
    return {int(token_id) for token_id in candidates if token_id is not None}


def cut_at_stop(completion: Any, stops: Sequence[str]) -> Any:
    """Cut a completion, text or chat messages, at the first stop sequence in its last message."""
    if isinstance(completion, str):
        return completion[: min((at for stop in stops if (at := completion.find(stop)) >= 0), default=len(completion))]
    *before, last = completion
    return [*before, {**last, "content": cut_at_stop(last.get("content") or "", stops)}]
