"""Small models that need no download: the base that ships with the package, and random ones of a family.

The base is a Llama of 3 million parameters that was trained on the functions of some 80 packages
(small-base/pretraining/). It writes code-shaped text, and knows neither tasks nor fill-in-the-middle. The random ones
write noise. A run on one shows that everything works with its architecture. They are seeded, and made once, in the
user's cache directory.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import polars as pl
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
from trl import chat_template_utils

from cogumi.data.stdlib_sample import sample_path

END, PAD = "<|endoftext|>", "<pad>"
FIM = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
VOCABULARY, CONTEXT = 1024, 512


def small_base_path() -> Path:
    """Return the packaged directory of the small base (bfloat16 weights, tokenizer, model card)."""
    return Path(__file__).with_name("small-base")


def random_base_path(name: str) -> Path:
    """Return the directory of `cogumi:random-<kind>` (bfloat16 weights, tokenizer, template), made on first use."""
    kind = name.removeprefix(PREFIX)
    return cached_directory(f"random-{kind}", lambda out: make_random_base(kind, out))


def cached_directory(name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory of the user's cache, which is complete or absent; `make` fills a missing one."""
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


def train_tokenizer(sources: list[str], control: Sequence[str] = FIM, end: str = END) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with these control tokens; `end`, one of them or END, ends a sequence."""
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


# ---------------------------------------------------------------------------------------------------------- random base


PREFIX = "cogumi:random-"
QWEN_FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
QWEN_CHAT = ["<|im_start|>", "<|im_end|>"]
GEMMA_CHAT = ["<|turn>", "<turn|>"]
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>"]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # logits of random weights that are not all the same
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64,
    "max_position_embeddings": 131072,  # what its rotary scaling is for; no table is as long
}  # fmt: skip
# Towers are beside the language model. The sizes keep the rounding of a merge as small as in Llama's layers.
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"], "initializer_range": 0.05,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "towers": {"vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}},
}  # fmt: skip
TOWER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64, "head_dim": 8,
    "global_head_dim": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
    "initializer_range": 0.2, "towers": {
        "vision_config": TOWER | {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16},
        "audio_config": TOWER | {"output_proj_dims": 32},
    },
}  # fmt: skip
# Per name: transformers' model type, what its config needs beside the sizes, control tokens, the one that ends a sequence as
# in the released models (Qwen2.5-Coder base, Qwen3, gpt-oss), and TRL's copy of the chat template.
KINDS: dict[str, tuple[str, dict[str, Any], list[str], str, str]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, [*QWEN_FIM, *QWEN_CHAT], END, "qwen2_5_chat_template"),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, QWEN_CHAT, "<|im_end|>", "qwen3_chat_template"),
    "qwen3.5": ("qwen3_5", HYBRID, QWEN_CHAT, "<|im_end|>", "qwen3_5_think_chat_template"),
    "gemma4": ("gemma4", GEMMA, GEMMA_CHAT, "<turn|>", "gemma4_v5_chat_template"),
    "gpt-oss": ("gpt_oss", EXPERTS, HARMONY, "<|return|>", "gptoss_chat_template"),
}


def make_random_base(kind: str, out: Path) -> None:
    model_type, more, tokens, end, template = KINDS[kind]
    tokenizer = train_tokenizer(pl.read_parquet(sample_path())["source"].head(2000).to_list(), tokens, end)
    tokenizer.chat_template = getattr(chat_template_utils, template)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {"vocab_size": len(tokenizer), **SIZES, **more, **ids}
    towers = text.pop("towers", None)
    auto = AutoModelForImageTextToText if towers else AutoModelForCausalLM
    config = AutoConfig.for_model(model_type, **({"text_config": text, **towers} if towers else text))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config)
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
