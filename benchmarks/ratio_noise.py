"""How far rounding alone moves GSPO's sequence ratios: by padding, as a run measures it, and by an update of the adapter.

`python -m benchmarks ratio_noise` takes the small base; `python -m benchmarks.ratio_noise DIRECTORY` another model, such as
that of benchmarks/smollm2.py. A causal model with an untrained LoRA (r 16) in float32 writes completions of equal length. They
are scored in bfloat16, then again with five places of padding, and after each weight of the adapter has moved by the
learning rate, which is what Adam's first step does. The same in float32 shows what of it is movement.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import Row, measure_another, row
from cogumi.models.small_base import small_base_path

ROWS, LENGTHS, RATES, PADDING = 8, (64, 256), (1e-6, 1e-5), 5
PROMPT = "Write a short story about a dog that finds an old map in the garden."
LOW, HIGH = 3e-4, 4e-4


def run(quick: bool = False, directory: Path | None = None) -> Iterator[Row]:
    lengths = LENGTHS[:1] if quick else LENGTHS
    model, ids = load(directory or Path(small_base_path()), max(lengths))
    name = (directory or Path("small base")).name
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        trained = {key: weight for key, weight in model.named_parameters() if weight.requires_grad}
        for weight in trained.values():
            weight.data = weight.data.float()
        before = {key: weight.data.clone() for key, weight in trained.items()}
        old = score(model, ids, max(lengths))
        yield from rows(name, dtype, "padding of five", score(model, ids, max(lengths), PADDING) - old, lengths)
        for rate in RATES:
            generator = torch.Generator().manual_seed(1)
            for key, weight in trained.items():
                weight.data = before[key] + rate * torch.randn(weight.shape, generator=generator).sign()
            yield from rows(name, dtype, f"update of rate {rate:g}", score(model, ids, max(lengths)) - old, lengths)
        for key, weight in trained.items():
            weight.data = before[key]


def load(directory: Path, length: int) -> tuple[Any, Tensor]:
    """The model with its adapter, and (ROWS, prompt + length) ids that it sampled."""
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": PROMPT}]
    if tokenizer.chat_template is None:
        prompt = tokenizer(PROMPT)["input_ids"]
    else:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).eval()
    ids = torch.tensor([prompt] * ROWS)
    settings = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": True, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        return model, model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)


@torch.no_grad()
def score(model: Any, ids: Tensor, length: int, padding: int = 0) -> Tensor:
    """(ROWS, length) log-probabilities of the completions, four rows at a time."""
    collected = []
    for part in ids.split(4):
        padded = torch.nn.functional.pad(part, (padding, 0))
        mask = torch.nn.functional.pad(torch.ones_like(part), (padding, 0))
        logits = model(input_ids=padded, attention_mask=mask, logits_to_keep=length + 1).logits[:, :-1]
        chosen = part[:, -length:, None]
        collected.append(torch.log_softmax(logits.float(), -1).gather(-1, chosen)[..., 0].double())
    return torch.cat(collected)


def rows(name: str, dtype: torch.dtype, cause: str, difference: Tensor, lengths: tuple[int, ...]) -> Iterator[Row]:
    for length in lengths:
        mean = difference[:, :length].mean(-1)
        case = f"{name}, {str(dtype).removeprefix('torch.')}, {length} tokens, {cause}"
        yield row("ratio_noise", case, "log-ratio, root mean square", mean.square().mean().sqrt().item())
        outside = ((mean.exp() < 1 - LOW) | (mean.exp() > 1 + HIGH)).double().mean().item()
        yield row("ratio_noise", case, "share outside the paper's clip", outside)


if __name__ == "__main__":
    measure_another("ratio_noise", Path(sys.argv[1]), run(directory=Path(sys.argv[1])))
