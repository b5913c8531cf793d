"""Tokenizers with the chat templates of real models, as TRL ships them, over a small vocabulary trained here."""

from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import peft
import polars as pl
import trl
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cogumi.data.encoding import FormatOptions
from cogumi.data.formats import columns_for, tokenize_for
from cogumi.data.rows import Chunk
from cogumi.data.stdlib_sample import sample_path
from cogumi.models.small_base import train_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHATML = ("<|im_start|>", "<|im_end|>")
CONTROLS = {
    "llama3": LLAMA, "llama3_1": LLAMA, "qwen2_5": CHATML, "qwen3": CHATML, "qwen3_instruct_2507": CHATML,
    "gptoss": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
}  # fmt: skip
ENDS = {"gptoss": "<|return|>", "phi3": "<|endoftext|>", "gemma": "<end_of_turn>"}


@cache
def texts() -> list[str]:
    return pl.read_parquet(sample_path())["source"].head(200).to_list()


@cache
def bare_tokenizer() -> str:
    return train_tokenizer(texts()).backend_tokenizer.to_str()


def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer that renders and ends turns as this family's; its ids are its own."""
    controls = CONTROLS[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bare_tokenizer()), eos_token="<|endoftext|>", pad_token="<pad>"
    )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    if name == "qwen3":
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    tokenizer.eos_token = ENDS.get(name, controls[-1])
    if name in ("llama3", "llama3_1", "gemma"):
        tokenizer.bos_token = controls[0]
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def ask(text: str) -> dict[str, Any]:
    return turn("user", text)


def say(text: str, **more: Any) -> dict[str, Any]:
    return turn("assistant", text, **more)


def chunk_of(
    rows: list[dict[str, Any]],
    tokenizer: Any,
    method: Any = "sft",
    format: Any = "chat",
    *,
    at: int = 0,
    **options: Any,
) -> Chunk:
    """The examples of rows from number `at` on, and the rows that are dropped, which are all of them."""
    made = FormatOptions(method, format, **options)
    frame = pl.DataFrame(rows, strict=False)
    chunk = tokenize_for(made, tokenizer)(frame.select(**columns_for(made, frame.columns)), at)
    assert len(frame) == len(chunk.table) - chunk.extra_examples + sum(
        dropped.count for dropped in chunk.dropped.values()
    )
    return chunk


def dropped_rows(chunk: Chunk) -> dict[str, tuple[int, int]]:
    """Of each reason: (how many, the first)."""
    return {reason: (dropped.count, dropped.row) for reason, dropped in chunk.dropped.items()}


def tiny_for(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {"num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **sizes, **ends)  # type: ignore[arg-type]
    )


def trl_prepared(rows: list[dict[str, Any]], tokenizer: Any, output: Path, kind: str = "SFT", **config: Any) -> Dataset:
    """The training data as TRL's own trainer of this kind prepares it."""
    plain = {"output_dir": str(output), "use_cpu": True, "bf16": False, "report_to": "none", "max_length": None}
    args = getattr(trl, f"{kind}Config")(**plain | config)
    options = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    lora = peft.LoraConfig(r=1, target_modules="all-linear")
    return getattr(trl, f"{kind}Trainer")(
        model=tiny_for(tokenizer), args=args, peft_config=lora, **options
    ).train_dataset


def learned_texts(tokenizer: Any, ids: list[int], mask: list[int]) -> list[str]:
    """The runs of learned tokens as text."""
    runs = groupby(zip(ids, mask, strict=True), key=itemgetter(1))
    return [tokenizer.decode([token for token, _ in run]) for learned, run in runs if learned]


def texts_of(chunk: Chunk, tokenizer: Any) -> tuple[list[str], list[list[str]]]:
    """Of each example: its text, and what is learned of it."""
    rows = chunk.table.to_pylist()
    learned = [learned_texts(tokenizer, row["input_ids"], row["completion_mask"]) for row in rows]
    return [tokenizer.decode(row["input_ids"]) for row in rows], learned
