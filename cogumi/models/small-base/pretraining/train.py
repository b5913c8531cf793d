"""Train the small base that ships with the package: `python cogumi/models/small-base/pretraining/train.py WORK OUT`.

WORK holds what is downloaded; OUT becomes the model directory (bfloat16 weights, tokenizer, training.json).
The text is every function of 3 to 60 lines in the packages of packages.txt, docstrings cut to their first line. The
standard library is held out whole: its functions are what the demonstrations train on, so none of them is in the text,
by the hash of its source. Two CPU cores need about an hour.
"""

import argparse
import ast
import hashlib
import json
import math
import random
import subprocess
import sys
import sysconfig
import textwrap
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
END, PAD = "<|endoftext|>", "<pad>"
CONTROL = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS, CONTEXT = 2048, 192, 512, 6, 3, 512
BATCH, STEPS, WARMUP, DECAY, SEED = 8, 7_000, 50, 0.4, 0
ADAMW_RATE, MUON_RATE = 3e-3, 0.02
MOST_LINES, MOST_CHARACTERS, MOST_OF_A_PACKAGE = 60, 2_500, 3_000_000
LEFT_OUT = ("test", "_vendor", "vendored", "migrations", "locale", "gallery", "examples", "_version", "_parser")
EVALUATED = 64  # blocks of the standard library on which the loss is measured

Text = tuple[str, str]  # where a function stands, and its source


def functions(text: str) -> Iterator[str]:
    """The functions and methods of a file that stand alone when dedented, each with its docstring's first line."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.If | ast.Try):
            continue
        for function in node.body:
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = min([function.lineno, *(each.lineno for each in function.decorator_list)]) - 1
            last = function.end_lineno or function.lineno
            source = shorten_docstring(textwrap.dedent("\n".join(lines[first:last]) + "\n"))
            if source and source.count("\n") >= 3 and last - first <= MOST_LINES and len(source) <= MOST_CHARACTERS:
                yield source


def shorten_docstring(source: str) -> str:
    """The function with its docstring cut to one line; "" where that leaves no function worth reading."""
    try:
        (function,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        return ""
    said = ast.get_docstring(function)  # type: ignore[arg-type]
    statement = function.body[0]  # type: ignore[attr-defined]
    if said is None or statement.lineno == statement.end_lineno:
        return source
    if len(function.body) == 1:  # type: ignore[attr-defined]
        return ""
    first = said.strip().split("\n")[0].replace("\\", "").replace('"', "").strip()
    lines = source.split("\n")
    lines[statement.lineno - 1 : statement.end_lineno] = [" " * statement.col_offset + f'"""{first}"""']
    return "\n".join(lines)


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def standard_library() -> list[str]:
    """The standard library's functions, sorted by file: what is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for file in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(file.relative_to(root).parts):
            found += functions(file.read_bytes().decode("utf-8-sig", "replace"))
    return found


def packages(wheels: Path, held_out: set[str]) -> Iterator[Text]:
    """Functions of the wheels, each once, at most MOST_OF_A_PACKAGE characters of a package, drawn by a seed."""
    seen = set(held_out)
    for wheel in sorted(wheels.glob("*.whl")):
        found: list[Text] = []
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if not name.endswith(".py") or any(each in name.lower() for each in LEFT_OUT):
                    continue
                for source in functions(archive.read(name).decode("utf-8-sig", "replace")):
                    if (key := digest(source)) not in seen:
                        seen.add(key)
                        found.append((f"{wheel.name}/{name}", source))
        random.Random(SEED).shuffle(found)
        size = 0
        for path, source in found:
            if size < MOST_OF_A_PACKAGE:
                yield path, source
            size += len(source)


def train_tokenizer(sources: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose tokens never join a space with a word, nor two digits.

    So a name is the same tokens wherever it stands, which a small model needs to copy it. The saved tokenizer has GPT-2's
    own pre-tokenizer, which every engine knows: with these merges it gives the same tokens (checked in `encode`).
    """
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(gpt2), "isolated"),
        pre_tokenizers.Split(Regex(r"^ (?=[\p{L}\p{N}])|\p{N}"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, PAD, *CONTROL], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(random.Random(SEED).sample(sources, min(len(sources), 40_000)), trainer)
    some = sources[:2000]
    strict = [each.ids for each in bpe.encode_batch(some)]
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if strict != [each.ids for each in bpe.encode_batch(some)]:
        raise RuntimeError("GPT-2's pre-tokenizer gives other tokens than the one the merges were learned with")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=CONTROL,
        model_max_length=CONTEXT,
        chat_template=(HERE / "chat_template.jinja").read_text(encoding="utf-8"),
    )


def encode(tokenizer: PreTrainedTokenizerFast, sources: list[str]) -> torch.Tensor:
    """All sources in a seeded order, each closed by the end token, cut into blocks: int64 (blocks, CONTEXT)."""
    random.Random(SEED).shuffle(sources)
    ids = tokenizer(sources, verbose=False)["input_ids"]
    flat = np.concatenate([[*each, tokenizer.eos_token_id] for each in ids])
    return torch.from_numpy(flat[: len(flat) // CONTEXT * CONTEXT].reshape(-1, CONTEXT))


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def train(model: LlamaForCausalLM, blocks: torch.Tensor, held_out: torch.Tensor, steps: int) -> list[dict[str, Any]]:
    """Muon for the layers' matrices, AdamW for the rest, bfloat16 autocast; the rate is flat, then falls to 0 linearly.

    Muon reached a held-out loss of 2.78 nats/token after 2M tokens where AdamW reached 3.42.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, ADAMW_RATE, (0.9, 0.95), weight_decay=0.0, fused=True),
        torch.optim.Muon(matrices, MUON_RATE, weight_decay=0.01),
    ]

    def share(step: int) -> float:
        return min(1.0, (step + 1) / WARMUP, (steps - step) / (DECAY * steps))

    schedules = [torch.optim.lr_scheduler.LambdaLR(each, share) for each in optimizers]
    compiled = torch.compile(model)
    order = torch.cat([torch.randperm(len(blocks)) for _ in range(math.ceil(steps * BATCH / len(blocks)))])
    started, curve, losses = time.monotonic(), [], []
    for step in range(steps):
        batch = blocks[order[step * BATCH : (step + 1) * BATCH]]
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 500 == 0 or step + 1 == steps:
            curve.append({
                "step": step + 1,
                "tokens": (step + 1) * BATCH * CONTEXT,
                "loss": float(np.mean(losses[-100:])),
                "held_out": evaluate(model, held_out),
                "minutes": (time.monotonic() - started) / 60,
            })  # fmt: skip
            print(json.dumps(curve[-1]), flush=True)
    return curve


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, blocks: torch.Tensor) -> float:
    """Mean loss in float32 on these blocks, nats/token."""
    return float(np.mean([model(input_ids=each, labels=each).loss.item() for each in blocks.split(8)]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the small base that ships with the package.")
    parser.add_argument("work", type=Path, help="directory for downloads")
    parser.add_argument("out", type=Path, help="directory of the model")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # the packages' invalid escapes
    wheels = given.work / "wheels"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(wheels),
    ]
    subprocess.run([*pip, "--requirement", str(HERE / "packages.txt")], check=True)
    library = standard_library()
    texts = list(packages(wheels, {digest(each) for each in library}))
    sources = [source for _, source in texts]
    tokenizer = train_tokenizer(sources)
    blocks, held_out = encode(tokenizer, sources), encode(tokenizer, library)[:EVALUATED]
    print(f"{len(sources):,} functions, {blocks.numel():,} tokens; held out: {len(library):,} functions", flush=True)
    model = make_model(tokenizer)
    curve = train(model, blocks, held_out, given.steps)
    model.bfloat16().save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    figures = {
        "functions": len(sources),
        "tokens": blocks.numel(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": given.steps,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "characters_per_token": sum(map(len, sources)) / blocks.numel(),
        "curve": curve,
    }
    (given.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
