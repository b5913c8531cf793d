"""The tables of "How large the engine is": what `cogumi preflight` says of vLLM beside a GSPO run of real shapes.

`python -m tests.vllm_sizes` prints them. A run samples 16 prompts x 8 completions of up to 2,048 tokens and trains on 32
of them a step. Its prompts are 512 tokens long, by the config: nothing is downloaded, and no tokenizer is there.
"""

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from transformers import Qwen2Config

CARDS = ("A100 80GB", "H100 SXM")
FAMILY: dict[str, Any] = {"vocab_size": 152064, "max_position_embeddings": 32768, "architectures": ["Qwen2ForCausalLM"],
                          "dtype": "bfloat16", "tie_word_embeddings": False}  # fmt: skip
# Qwen2.5's config.json of each size.
MODELS: dict[str, Any] = {
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4},
    "14B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8},
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "QLoRA": {"model": {"quantization_config": {"load_in_4bit": True}}},
    "full": {"cogumi": {"tuning": "full"}},
}


def qwen(size: str, folder: str) -> str:
    """A directory with the config.json of a model of these shapes."""
    Qwen2Config(**FAMILY | MODELS[size]).save_pretrained(folder)
    return folder


def config_of(base: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A GSPO run with vLLM; sections: what it says beside that."""
    found: dict[str, dict[str, Any]] = {
        "model": {"name": base},
        "data": {"source": "cogumi:stdlib", "fim": {"max_length": 512}},
        "train": {"max_steps": 10, "use_vllm": True, "num_generations": 8,
                  "max_completion_length": 2048, },
        "cogumi": {"method": "gspo", "docs_per_step": 32, "run_dir": f"{base}/run", "rewards": ["parses"]},
    }  # fmt: skip
    return {name: section | sections.get(name, {}) for name, section in found.items()}


def rows() -> Iterator[str]:
    from cogumi.config.schema import load_config
    from cogumi.forecast.run_forecast import forecast_run

    for size in MODELS:
        for way, sections in WAYS.items():
            for card in CARDS:
                with tempfile.TemporaryDirectory() as folder:
                    run = load_config(config_of(qwen(size, folder), **sections))
                    report = forecast_run(run, card, None, apart=False)
                collected = {line.stage: line for line in report.lines}
                print(f"{size} {way} {card}\n{report}\n", file=sys.stderr)
                memory, engine = report.figures.get("memory"), report.figures.get("vllm")
                if memory is None or engine is None:  # not one document fits
                    why = collected["vllm"].figure if collected["vllm"].state == "red" else "not one document fits"
                    why = why.partition(" (")[0].rpartition("the card is ")[2]
                    yield f"| {' | '.join((size, way, card, *[''] * 6, f'red: {why}'))} |"
                    continue
                mode = "asleep" if engine["sleeps"] else "awake"
                gib = [f"{each / 2**30:.1f}" for each in (engine["weights"], memory["peak"], engine["rollout"])]
                red = [line.stage for line in report.lines if line.state == "red"]
                verdict = f"red: {collected['vllm'].fix or collected['memory'].fix}" if red else "fits"
                chosen = f"{engine['share']:g}, {mode}" if not red else ""
                shares = f"{engine['smallest_share']:g} / {engine['useful_share']:g}"
                cells = (size, way, card, gib[0], shares, chosen, gib[1], gib[2], str(engine["at_once"]), verdict)
                yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    heads = (
        "model, trained, card, engine's weights GiB, smallest / useful share, chosen, step GiB, rollout GiB, at once, "
    )
    print(f"| {heads.replace(', ', ' | ')}|", "|---" * 10 + "|", sep="\n")
    for row in rows():
        print(row, flush=True)
