"""`python -m benchmarks.same_results COMMIT`: does this checkout compute what another commit computes, bit for bit?

Four trainings (SFT, DPO, GSPO, QLoRA) and ten merges on the CPU, once with the package of COMMIT and once with the one here,
by their public names alone. Compared are the values of each logged row that are no times, and the SHA-256 of the
safetensors files of adapters and merged models. Exit status: 0 all equal, 1 a difference, 2 used wrongly.
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

REPOSITORY = Path(__file__).parents[1]
STEPS = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no"}
TRAININGS: dict[str, dict[str, Any]] = {
    "sft": {"config": "smoke/llama-3.1-8b-sft"},
    "dpo": {"config": "smoke/llama-3.1-8b-dpo", "model__name": "sft/merged"},
    "gspo": {"config": "smoke/gspo", "model__name": "cogumi:small-base"},
    "qlora": {"config": "smoke/qlora"},
}
# Keys of a logged row that tell of the machine. All others are results.
OF_THE_MACHINE = ("time", "per_second", "disk/", "perf/")
MERGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama in float32": ("llama", {}, {"dtype": "float32"}),
    "dora": ("llama", {"use_dora": True}, {}),
    "rslora, ranks by pattern": ("llama", {"use_rslora": True, "rank_pattern": {"q_proj": 2}}, {}),
    "embedding of a tied head": ("qwen3-tied", {"target_modules": ["embed_tokens", "q_proj"]}, {}),
    "trained tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 250]}, {}),
    "head and norm whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}, {}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn"]}, {}),
    "experts": ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": "experts"}, {}),
    "two adapters": ("llama", {}, {"weights": (0.75, -0.5)}),
}


def record() -> dict[str, Any]:
    """Everything that is compared, computed in the current directory with the package that can be imported."""
    found: dict[str, Any] = {}
    for name, keywords in TRAININGS.items():
        found |= training(name, **keywords)
        print(f"  {name}", file=sys.stderr, flush=True)
    for name, (family, lora, options) in MERGES.items():
        found[f"merge: {name}"] = merge(family, lora, **options)
        print(f"  merge: {name}", file=sys.stderr, flush=True)
    return found


def training(name: str, config: str, **overrides: Any) -> dict[str, Any]:
    import cogumi

    steps = {f"train__{key}": value for key, value in STEPS.items()}
    result = cogumi.train(config, cogumi__run_dir=name, cogumi__compile="off", **steps, **overrides)
    rows = [json.loads(line) for line in (Path(result.run_dir) / "metrics.jsonl").read_text().splitlines()]
    logged = {
        f"{name}: step {row['step']}: {key}": value
        for row in rows
        for key, value in row.items()
        if key != "step" and not any(each in key for each in OF_THE_MACHINE)
    }
    return logged | {f"{name}: {path}": digest for path, digest in digests(Path(result.run_dir)).items()}


def merge(family: str, lora: dict[str, Any], weights: tuple[float, ...] = (), **options: Any) -> dict[str, str]:
    from builders import FUSED, LINEARS, save_base, train_adapter
    from test_merge_kinds import FAMILIES

    import cogumi

    lora = {"target_modules": LINEARS} | lora
    if "target_parameters" in lora:
        lora["target_parameters"] = FUSED
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        base = save_base(home / "base", FAMILIES[family], max_shard_size="60KB")
        adapters: Any = train_adapter(base, home / "adapter", **lora)
        if weights:
            adapters = [
                (train_adapter(base, home / f"adapter-{seed}", seed=seed, **lora), weight)
                for seed, weight in enumerate(weights)
            ]
        cogumi.merge_adapter(adapters, home / "merged", base=base, progress=False, **options)
        return digests(home / "merged")


def digests(directory: Path) -> dict[str, str]:
    """The SHA-256 of each file of weights below a directory, by its relative path. Models that are bases are left out."""
    files = sorted(path for path in directory.rglob("*.safetensors") if "base" not in path.parts)
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def recorded_with(package: Path, folder: Path) -> dict[str, Any]:
    """What `record` finds in a process of its own whose `cogumi` is the one below `package`."""
    folder.mkdir()
    paths = os.pathsep.join(map(str, (package, REPOSITORY / "tests")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, "--record"], cwd=folder, env=environment, stdout=sys.stderr, check=True)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def main(words: list[str]) -> int:
    if words == ["--record"]:  # of the process above
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
    missing = sorted(before.keys() ^ now.keys())
    different = [name for name in before.keys() & now.keys() if before[name] != now[name]]
    for name in missing:
        print(f"only {'before' if name in before else 'now'}: {name}")
    for name in sorted(different):
        print(f"different: {name}: {before[name]}, now {now[name]}")
    print(
        f"{len(before)} results of {words[0]}, {len(before) - len(different) - len(missing)} of them equal bit for bit"
    )
    return 1 if different or missing else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
