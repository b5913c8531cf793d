"""Models of real architectures with random weights, small enough for a CPU: what the smoke twins of large models train.

They write noise. What a run on one shows is that everything works with this architecture: loading, adapters on its layers
(experts too), its chat template and control tokens, its losses, the merge.
"""

import hashlib
import inspect
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import platformdirs
import polars as pl
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl import chat_template_utils

from cogumi.data.sample import sample_path
from cogumi.models.small_base import END, train_tokenizer

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


def random_base_path(name: str) -> Path:
    """The directory of `cogumi:random-<kind>` (bfloat16 weights, tokenizer, chat template), made on first use."""
    kind = name.removeprefix(PREFIX)
    recipe = inspect.getsource(inspect.getmodule(random_base_path)) + sample_path().name  # type: ignore[arg-type]
    key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    home = Path(platformdirs.user_cache_dir("cogumi")) / f"random-{kind}-{key}"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".random-", dir=home.parent))
        try:
            make_random_base(kind, unfinished)
            unfinished.chmod(0o755)
            if not home.exists():  # another first use may have been faster
                os.replace(unfinished, home)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return home


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
