"""Tiny random checkpoints of multimodal models: a language model, a vision tower and what joins them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # logits of random weights that are not all the same
}
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def qwen3_5(text: dict[str, Any]) -> Any:
    tower = QWEN_TOWER | {"patch_size": 14, "num_position_embeddings": 16}
    return transformers.Qwen3_5Config(
        text_config=text | LINEAR_ATTENTION, vision_config=tower, image_token_id=5, video_token_id=6
    )


def gemma3(text: dict[str, Any]) -> Any:
    return transformers.Gemma3Config(
        text_config=text | {"sliding_window": 16, "query_pre_attn_scalar": 32},
        vision_config=TOWER,
        mm_tokens_per_image=4,
        image_token_index=5,
        boi_token_index=6,
        eoi_token_index=7,
    )


def mistral3(text: dict[str, Any]) -> Any:
    return transformers.Mistral3Config(
        text_config=text | {"model_type": "mistral"},
        vision_config=TOWER | {"model_type": "pixtral", "head_dim": 16},
        image_token_index=5,
        tie_word_embeddings=False,
    )


KINDS = {"qwen3_5": qwen3_5, "gemma3": gemma3, "mistral3": mistral3}


def save_multimodal(kind: str, tokenizer_of: Path, path: Path, tied: bool | None = None) -> Path:
    """A bfloat16 checkpoint of the class for conditional generation, with the names of the released ones and the tokenizer
    of another model. tied: whether the head is the embedding, by default as in the class."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "vocab_size": len(tokenizer),
    }
    config = KINDS[kind](TEXT | ids)
    if tied is not None:
        config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.to(torch.bfloat16).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    if kind == "qwen3_5":  # the released ones have a layer that predicts a second token, which no class loads
        tensors["mtp.fc.weight"] = torch.randn(64, 128).to(torch.bfloat16)
    elif kind == "gemma3":  # the released ones are from before transformers 5, which has no vision_model there
        tensors = {
            name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()
        }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}\n')
    return path
