"""The table of docs/measured.md: what `cogumi preflight` says of released models' shapes in each format.

`python -m tests.big_models` writes it anew. The run is an SFT with LoRA of rank 16 on the linear layers, four examples of
2,048 tokens at once. A model is a config.json of its shapes: nothing is downloaded. The card is the first that fits.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import (
    Gemma3Config,
    GptOssConfig,
    LlamaConfig,
    Mistral3Config,
    MixtralConfig,
    Qwen3MoeConfig,
)

from cogumi.core.errors import UsageError

PAGE = Path(__file__).parents[1] / "docs" / "measured.md"
CARDS = ("A100 40GB", "A100 80GB", "H200")  # of 39.5, 79.1 and 140 GiB free
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}
ON_DISK: dict[str, Any] = {
    "bnb-4bit on the hub": NF4,
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "MXFP4": {"quant_method": "mxfp4"},
}
MODELS: dict[str, Any] = {
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, architectures=["LlamaForCausalLM"],
    ),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32, architectures=["GptOssForCausalLM"]),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        max_position_embeddings=40960, architectures=["Qwen3MoeForCausalLM"],
    ),
    "Mixtral-8x7B": MixtralConfig(architectures=["MixtralForCausalLM"]),
    "Gemma-3-27B": Gemma3Config(
        text_config={
            "vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
            "sliding_window": 1024, "max_position_embeddings": 131072,
        },
        vision_config={"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
                       "image_size": 896, "patch_size": 14, "vision_use_head": False},
        architectures=["Gemma3ForConditionalGeneration"],
    ),
    "Mistral-Small-3.1-24B": Mistral3Config(
        text_config={
            "model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768,
            "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "sliding_window": None, "max_position_embeddings": 131072,
        },
        vision_config={"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                       "num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14},
        architectures=["Mistral3ForConditionalGeneration"],
    ),
}  # fmt: skip
FORMATS = {
    "Llama-3.1-8B": ("16 bits", "load_in_4bit", "bnb-4bit on the hub", "GPTQ", "AWQ"),
    "gpt-oss-20b": ("16 bits", "load_in_4bit", "MXFP4"),
    "Qwen3-30B-A3B": ("load_in_4bit",),
    "Mixtral-8x7B": ("load_in_4bit",),
    "Gemma-3-27B": ("16 bits", "load_in_4bit"),
    "Mistral-Small-3.1-24B": ("16 bits", "load_in_4bit"),
}


ORIGINAL, ITSELF = "into its original", "yes"
# (trains, merges, the test of a small model of the same kind)
PROVEN = {
    "16 bits": ("yes", ITSELF, "test_training.py"),
    "load_in_4bit": ("yes", ITSELF, "test_training_qlora_merge.py"),
    "bnb-4bit on the hub": ("yes", ORIGINAL, "test_merge_originals.py"),
    "GPTQ": ("where transformers does", ORIGINAL, "forecast alone: test_merge_originals.py"),
    "AWQ": ("where transformers does", ORIGINAL, "forecast alone: test_merge_originals.py"),
    "MXFP4": ("dequantized to 16 bits", ORIGINAL, "test_merge_originals.py"),
}
EXPERTS, MULTIMODAL = ("gpt-oss-20b", "Qwen3-30B-A3B", "Mixtral-8x7B"), ("Gemma-3-27B", "Mistral-Small-3.1-24B")


def rows() -> Iterator[str]:
    for model, formats in FORMATS.items():
        for kind in formats:
            yield row(model, kind)


def row(model: str, kind: str) -> str:
    trains, merges, test = PROVEN[kind]
    if model in EXPERTS:
        test = "test_experts_4bit.py" if kind == "load_in_4bit" else "test_configs.py" if kind == "16 bits" else test
    if model in MULTIMODAL:
        test = "test_multimodal.py"
    weights, card = forecast(MODELS[model], kind)
    return f"| {model} | {kind} | {weights} | {card} | {trains} | {merges} | `{test}` |"


def forecast(config: Any, kind: str) -> tuple[str, str]:
    """(weights, the card and the peak), as preflight says them."""
    from cogumi.config.schema import load_config
    from cogumi.forecast.run_forecast import forecast_run

    config.quantization_config, config.dtype = ON_DISK.get(kind), "bfloat16"
    if config.quantization_config is None:
        del config.quantization_config
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        run: dict[str, Any] = {
            "model": {"name": folder},
            "lora": {"r": 16},
            "data": {"source": "cogumi:stdlib", "fim": {"max_length": 2048}},
            "train": {"max_steps": 10, "per_device_train_batch_size": 4, "max_length": 2048},
            "cogumi": {"method": "sft", "run_dir": f"{folder}/run", "merge": False},
        }
        if kind == "load_in_4bit":
            run["model"]["quantization_config"] = {"load_in_4bit": True}
        collected, message = {}, ""
        for card in CARDS:
            report = forecast_run(load_config(run), card, None, apart=False)
            collected = {line.stage: line for line in report.lines}
            peak = report.figures["memory"]["peak"] / 2**30
            weights = report.figures["memory"]["breakdown"]["weights"] / 2**30
            message = f"{card}: {peak:.1f} GiB"
            if collected["memory"].state == "green":
                return f"{weights:.1f} GiB", message
    return f"{weights:.1f} GiB", f"none; {message}"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = re.compile(r"(\| model \| format \|.*\n\|[-|]+\|\n)(\|.*\n)*")
    assert table.search(page), "the page has no table"
    PAGE.write_text(table.sub(lambda found: found[1] + "".join(f"{row}\n" for row in rows()), page), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(str(error))
