"""`python -m benchmarks.same_results COMMIT`: check that this checkout computes the same as another commit, bit for bit.

Runs four trainings (SFT, DPO, GSPO, QLoRA) and ten merges on the CPU, with the package of COMMIT and with this one, by their
public names. Compares all logged values that are not times, and the SHA-256 of the weights of adapters and merged models.
Exit status: 0 all equal, 1 a difference, 2 wrong usage.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import cogumi

REPOSITORY = Path(__file__).parents[1]
STEPS = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no"}
TRAININGS: dict[str, dict[str, Any]] = {
    "sft": {"config": "smoke/llama-3.1-8b-sft"},
    "dpo": {"config": "smoke/llama-3.1-8b-dpo", "model__name": "sft/merged"},
    "gspo": {"config": "smoke/gspo", "model__name": "cogumi:small-base"},
    "qlora": {"config": "smoke/qlora", "train__packing": False},
}
# Parts of the names of logged values that differ between runs.
MACHINE_KEYS = ("time", "per_second", "disk/", "perf/")
LLAMA: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
QWEN3 = LLAMA | {"head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA | {"tie_word_embeddings": False}),
    "qwen3-tied": ("qwen3", QWEN3 | {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"vocab_size": 256, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "qwen3-moe": ("qwen3_moe", QWEN3 | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MERGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama in float32": ("llama", {}, {"dtype": "float32"}),
    "dora": ("llama", {"use_dora": True}, {}),
    "rslora, ranks by pattern": ("llama", {"use_rslora": True, "rank_pattern": {"q_proj": 2}}, {}),
    "embedding of a tied head": ("qwen3-tied", {"target_modules": ["embed_tokens", "q_proj"]}, {}),
    "trained tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 250]}, {}),
    "head and norm whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}, {}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn"]}, {}),
    "experts": ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": FUSED}, {}),
    "two adapters": ("llama", {}, {"weights": (0.75, -0.5)}),
}


def record() -> dict[str, Any]:
    """Compute everything that is compared, in the current directory with the package that can be imported."""
    collected: dict[str, Any] = {}
    for name, keywords in TRAININGS.items():
        collected |= training(name, **keywords)
        print(f"  {name}", file=sys.stderr, flush=True)
    for name, (family, lora, options) in MERGES.items():
        collected[f"merge: {name}"] = merge(family, lora, **options)
        print(f"  merge: {name}", file=sys.stderr, flush=True)
    return collected


def training(name: str, config: str, **overrides: Any) -> dict[str, Any]:
    steps = {f"train__{key}": value for key, value in STEPS.items()}
    result = cogumi.train(config, cogumi__run_dir=name, cogumi__compile="off", **steps, **overrides)
    rows = [json.loads(line) for line in (Path(result.run_dir) / "metrics.jsonl").read_text().splitlines()]
    logged = {
        f"{name}: step {row['step']}: {key}": value
        for row in rows
        for key, value in row.items()
        if key != "step" and not any(each in key for each in MACHINE_KEYS)
    }
    return logged | {f"{name}: {path}": digest for path, digest in digests(Path(result.run_dir)).items()}


def merge(family: str, lora: dict[str, Any], weights: tuple[float, ...] = (), **options: Any) -> dict[str, str]:
    lora = {"target_modules": LINEARS} | lora
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        base = save_base(home / "base", family)
        adapters: Any = save_adapter(base, home / "adapter", 1, lora)
        if weights:
            adapters = [
                (save_adapter(base, home / f"adapter-{seed}", seed, lora), weight)
                for seed, weight in enumerate(weights)
            ]
        cogumi.merge_adapter(adapters, home / "merged", base=base, progress=False, **options)
        return digests(home / "merged")


def save_base(path: Path, family: str) -> Path:
    """Save a random model of a family in bfloat16, in several shards."""
    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    model.to(torch.bfloat16).save_pretrained(path, max_shard_size="60KB")
    return path


def save_adapter(base: Path, path: Path, seed: int, lora: dict[str, Any]) -> Path:
    """Save an adapter made by PEFT, every trainable value moved as training might."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | lora
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.05 if "lora_" in name else 0.5))
    model.save_pretrained(str(path))
    return path


def digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of weights below a directory, by relative path, without the bases."""
    files = sorted(path for path in directory.rglob("*.safetensors") if "base" not in path.parts)
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def recorded_with(package: Path, folder: Path) -> dict[str, Any]:
    """Run `record` in a process that imports the `cogumi` below `package`."""
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, "--record"], cwd=folder, env=environment, stdout=sys.stderr, check=True)
    parsed: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return parsed


def main(words: list[str]) -> int:
    if words == ["--record"]:  # from recorded_with
        Path("results.json").write_text(json.dumps(record()))
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        added = subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", other, words[0]], cwd=REPOSITORY, check=False
        )
        if added.returncode:
            return 2
        try:
            before, now = recorded_with(other, Path(folder) / "a"), recorded_with(REPOSITORY, Path(folder) / "b")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=REPOSITORY, check=True)
    different = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    for name in different:
        print(f"different: {name}: {before.get(name)}, now {now.get(name)}")
    equal = len(before.keys() - set(different))
    print(f"{len(before)} results of {words[0]}, {equal} of them equal bit for bit")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
