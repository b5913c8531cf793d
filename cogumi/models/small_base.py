"""Small models that are made here: random ones of a family, and the base that smoke runs start from.

The base is a byte-level BPE of 1,024 tokens (with StarCoder's FIM tokens) and a Llama of 1.8 million parameters, trained
left to right on the sample shard: it writes code-shaped text and knows nothing of fill-in-the-middle. The random ones
write noise: a run shows that everything works with this architecture. Seeded; made once, in the user's cache directory.
"""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import polars as pl
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import chat_template_utils

from cogumi.data.stdlib_sample import sample_path

log = logging.getLogger(__name__)

END, PAD = "<|endoftext|>", "<pad>"
FIM = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
VOCABULARY, HIDDEN, LAYERS, CONTEXT = 1024, 256, 2, 512
# Measured on two cores for half a minute each: many small batches on a shallow model learn most (3.8 nats/token against
# 4.3 for 4 layers of 192 with 4x the batch).
STEPS, BATCH, LENGTH, LEARNING_RATE, SEED = 1000, 4, 128, 3e-3, 0
LOG_EVERY = 200


def small_base_path() -> Path:
    """The directory of the small base (bfloat16 weights, tokenizer), trained on first use (under a minute on two cores)."""

    def make(out: Path) -> None:
        log.info("the small base is made, once on a machine: a minute or two on two CPU cores")
        train_small_base(pl.read_parquet(sample_path())["source"].to_list(), out)

    return cached_directory("small-base", make)


def random_base_path(name: str) -> Path:
    """The directory of `cogumi:random-<kind>` (bfloat16 weights, tokenizer, chat template), made on first use."""
    kind = name.removeprefix(PREFIX)
    return cached_directory(f"random-{kind}", lambda out: make_random_base(kind, out))


def cached_directory(name: str, make: Callable[[Path], object]) -> Path:
    """A directory in the user's cache, whole or absent; made by `make` where it is not there."""
    # The recipe is this file: a change of it gives a new model, not a stale one.
    recipe = Path(__file__).read_text(encoding="utf-8") + sample_path().name
    home = Path(platformdirs.user_cache_dir("cogumi")) / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home.parent))
        try:
            make(unfinished)
            unfinished.chmod(0o755)
            if not home.exists():  # another first use may have been faster
                os.replace(unfinished, home)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return home


def train_small_base(sources: list[str], out: Path, steps: int = STEPS) -> float:
    """Train tokenizer and model on `sources`, save both to `out`, and return the mean loss of the last 20 steps (nats/token)."""
    tokenizer = train_tokenizer(sources)
    blocks = token_blocks(sources, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=HIDDEN,
                intermediate_size=HIDDEN * 8 // 3,
                num_hidden_layers=LAYERS,
                num_attention_heads=HIDDEN // 64,
                num_key_value_heads=HIDDEN // 64,
                max_position_embeddings=CONTEXT,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
        order = torch.randperm(len(blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    losses = []
    for step in (bar := tqdm(range(steps), desc="small base", unit="step", mininterval=0.5)):
        batch = blocks[order[torch.arange(step * BATCH, (step + 1) * BATCH) % len(order)]]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.2f}", refresh=False)
        if (step + 1) % LOG_EVERY == 0:
            log.info("small base: step %d of %d, loss %.2f", step + 1, steps, losses[-1])
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    return float(np.mean(losses[-20:]))


def train_tokenizer(sources: list[str], control: Sequence[str] = FIM, end: str = END) -> PreTrainedTokenizerFast:
    """A byte-level BPE with these control tokens; `end`, one of them or END, ends a sequence."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD, *control],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sources, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=end,
        pad_token=PAD,
        additional_special_tokens=[*control],
        model_max_length=CONTEXT,
    )


def token_blocks(sources: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """All sources in a seeded order, each closed by the end token, cut into blocks: int64 (blocks, LENGTH)."""
    encoded = tokenizer(sources, verbose=False)["input_ids"]  # sources longer than the context are cut below
    np.random.default_rng(SEED).shuffle(encoded)
    flat = np.concatenate([[*ids, tokenizer.eos_token_id] for ids in encoded])
    return torch.from_numpy(flat[: len(flat) // LENGTH * LENGTH].reshape(-1, LENGTH))


# ---------------------------------------------------------------------------------------------------------- random base


PREFIX = "cogumi:random-"
QWEN_FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
QWEN_CHAT = ["<|im_start|>", "<|im_end|>"]
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>"]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # logits of random weights that are not all the same
}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "max_position_embeddings": 131072,  # what its rotary scaling is for; no table is as long
}
# Per name: transformers' model type, what its config needs beside the sizes, control tokens, the one that ends a sequence as
# in the released models (Qwen2.5-Coder base, Qwen3, gpt-oss), and TRL's copy of the chat template.
KINDS: dict[str, tuple[str, dict[str, Any], list[str], str, str]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, [*QWEN_FIM, *QWEN_CHAT], END, "qwen2_5_chat_template"),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, QWEN_CHAT, "<|im_end|>", "qwen3_chat_template"),
    "gpt-oss": ("gpt_oss", EXPERTS, HARMONY, "<|return|>", "gptoss_chat_template"),
}


def make_random_base(kind: str, out: Path) -> None:
    model_type, more, tokens, end, template = KINDS[kind]
    # The small base's tokenizer, with these control tokens in the place of its own for fill in the middle.
    tokenizer = train_tokenizer(pl.read_parquet(sample_path())["source"].head(2000).to_list(), tokens, end)
    tokenizer.chat_template = getattr(chat_template_utils, template)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **SIZES | more, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
