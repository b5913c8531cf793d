"""How the verdict is measured: real TRL trainers on a small base, trained under the sentinel, and what it said of them.

The runs themselves, each whole or broken in one way, are in benchmarks/verdict_cases.py.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import torch

STEPS = 100
SEED = 0
LORA: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
}
SFT_RATE, RL_RATE, DPO_RATE = 4e-3, 3e-3, 3e-3
LENGTH = 64


@dataclass(frozen=True)
class Case:
    """One run: `build(out)` makes its trainer. `flag`: the one that is to explain it, with a word of its `cause`.

    Without a flag's name any flag explains it that names this cause and `knob`, the key to change: a rate that is too high
    lifts the loss or leaves it at the tokens' frequencies, and chance decides which shows first.
    """

    name: str
    method: str
    build: Callable[[Path], Any]
    flag: str = ""
    cause: str = ""
    knob: str = ""
    own: bool = False
    """Whether it is a whole run on one's own data, which is to raise no flag of any colour."""

    @property
    def broken(self) -> bool:
        return bool(self.cause)

    def explained_by(self, flag: Any) -> bool:
        named = self.flag in ("", flag.name)
        return bool(named and self.cause in flag.cause and self.knob in flag.knob)


@dataclass
class Outcome:
    """What the verdict said: the first red flag of all, the others, and at which step."""

    case: Case
    reds: list[tuple[int, Any]]
    yellow: list[str]
    steps: int
    seconds: float
    losses: list[float] = field(repr=False)
    safe: str = ""
    """The answer to "safe to scale?", and why."""
    was_yellow: dict[str, str] = field(default_factory=dict, repr=False)
    """Each flag that was yellow at any time, as it was first."""

    @property
    def alarms(self) -> list[Any]:
        return told(flag for _, flag in self.reds)

    @property
    def right(self) -> bool:
        """A broken run has its flag, first of all, with its cause; a whole one has none that is red; on one's own data a
        whole one has none that is yellow either."""
        if not self.case.broken:
            return not self.alarms and not (self.case.own and self.was_yellow)
        return bool(self.reds) and self.case.explained_by(self.reds[0][1])


def told(flags: Iterable[Any]) -> list[Any]:
    """The flags that tell of the run. How fast it is depends on what else uses this machine."""
    return [flag for flag in flags if flag.name != "tokens per second"]


def judged(case: Case, out: Path, on_red: Any = "stop") -> Outcome:
    """Run a case under the sentinel; with "stop" it ends at the first red flag."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from cogumi.health.sentinel import Sentinel
    from cogumi.health.verdict import OF_THE_MACHINE, safe_to_scale

    began, trainer = time.monotonic(), case.build(out)
    for printing in (PrinterCallback, ProgressCallback):
        trainer.pop_callback(printing)
    trainer._save_checkpoint = lambda *_: None  # the suite is about flags
    out.mkdir(parents=True, exist_ok=True)
    sentinel = Sentinel(trainer, out, case.method, on_red=on_red)
    was_yellow: dict[str, str] = {}
    look = sentinel.look

    def remembering(step: int) -> None:
        look(step)
        for flag in sentinel.flags:
            if flag.level == "yellow" and flag.name not in OF_THE_MACHINE:
                was_yellow.setdefault(flag.name, f"step {step}: {flag}")

    sentinel.look = remembering  # type: ignore[method-assign]
    trainer.add_callback(sentinel)
    sentinel.begin()
    trainer.train()
    history = trainer.state.log_history
    return Outcome(
        case,
        list(sentinel.was_red.values()),
        [flag.name for flag in sentinel.flags if flag.level == "yellow"],
        trainer.state.global_step,
        time.monotonic() - began,
        [row["loss"] for row in history if "loss" in row],
        ": ".join(
            safe_to_scale(sentinel.run(), told(sentinel.flags), told(flag for _, flag in sentinel.was_red.values()))
        ),
        was_yellow,
    )


# -------------------------------------------------------------------------------------------------------------- the parts


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bases())


@cache
def sources() -> list[str]:
    from cogumi.data.stdlib_sample import sample_path

    return pl.read_parquet(sample_path())["source"].to_list()


def middles_of(words: Any, rows: int, seed: int = 0) -> Any:
    """Tokenized fill-in-the-middle examples: input_ids, completion_mask."""
    from cogumi.data.fim import FimConfig
    from tests.fim_examples import tokenize_for_sft

    fim = FimConfig(max_length=LENGTH, middle_chars=(4, 24), overlong="trim", seed=seed)
    return tokenize_for_sft(pl.DataFrame({"source": sources()[:rows]}), words, fim, name="sample").dataset


@cache
def middles(rows: int = 2048) -> Any:
    return middles_of(tokenizer(), rows)


@cache
def prompts(rows: int = 64) -> Any:
    from cogumi.data.fim import FimConfig
    from tests.fim_examples import prompts_for_rl

    fim = FimConfig(max_length=LENGTH, middle_chars=(4, 24), overlong="trim")
    return prompts_for_rl(pl.DataFrame({"source": sources()[:rows]}), tokenizer(), fim, name="sample").dataset


@cache
def bases() -> Path:
    """A directory with the tokenizer and two models of 200,000 weights: `base` has read code, `tuned` the task as well.

    Made once for the machine: a minute on two cores. Smaller than the package's own small base, as there are thirty runs.
    """
    import platformdirs

    recipe = hashlib.sha256(inspect.getsource(make_bases).encode()).hexdigest()[:12]
    home = Path(platformdirs.user_cache_dir("cogumi")) / f"verdict-bases-{recipe}"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".verdict-bases-", dir=home.parent))
        make_bases(unfinished)
        unfinished.rename(home)
    return home


def make_bases(out: Path) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    from cogumi.models.small_base import small_base_path, token_blocks

    words: Any = AutoTokenizer.from_pretrained(small_base_path())
    words.save_pretrained(out)
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(architecture(words))
    blocks = token_blocks(sources(), words)[:, :LENGTH]
    train(model, ((batch, batch) for batch in blocks[torch.randperm(len(blocks))[: 16 * 400]].split(16)))
    model.save_pretrained(out / "base")
    rows = middles_of(words, 6400, seed=1)
    train(model, (padded(rows[i : i + 16]) for i in range(0, len(rows), 16)))
    model.save_pretrained(out / "tuned")


def architecture(words: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(words),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )


def train(model: Any, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    for ids, labels in batches:
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def padded(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels of the learned tokens; padding comes after what is learned, so it needs no mask."""
    longest = max(map(len, rows["input_ids"]))
    ids, labels = torch.zeros(len(rows["input_ids"]), longest, dtype=torch.long), None
    labels = torch.full_like(ids, -100)
    for i, (tokens, mask) in enumerate(zip(rows["input_ids"], rows["completion_mask"], strict=True)):
        ids[i, : len(tokens)] = torch.tensor(tokens)
        labels[i, : len(tokens)] = torch.where(torch.tensor(mask).bool(), ids[i, : len(tokens)], -100)
    return ids, labels


def base() -> Any:
    return model_of(bases() / "base")


def lora(**values: Any) -> Any:
    import peft

    return peft.LoraConfig(**(LORA | values))


def common(out: Path, **values: Any) -> dict[str, Any]:
    return {
        "output_dir": str(out / "checkpoints"),
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "report_to": "none",
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    } | values


def sft(
    out: Path,
    dataset: Any = None,
    model: Any = None,
    collator: Any = None,
    lora_values: dict[str, Any] | None = None,
    cls: Any = None,
    **values: Any,
) -> Any:
    """An SFTTrainer as configs/smoke/sft.yaml has it."""
    import trl

    import cogumi

    cogumi.patch(graph_break="off")
    args = trl.SFTConfig(
        **common(out)
        | {
            "per_device_train_batch_size": 16,
            "learning_rate": SFT_RATE,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 5,
            "completion_only_loss": True,
            "max_length": None,
        }
        | values
    )
    return (cls or trl.SFTTrainer)(
        model=base() if model is None else model,
        args=args,
        train_dataset=middles() if dataset is None else dataset,
        processing_class=tokenizer(),
        peft_config=lora(**(lora_values or {})),
        data_collator=collator,
    )


def model_of(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def similarity(completions: list[str], middle: list[str], **_: Any) -> list[float]:
    from rapidfuzz.distance import Levenshtein

    return [Levenshtein.normalized_similarity(*pair) for pair in zip(completions, middle, strict=True)]


def gspo(out: Path, reward: Any = similarity, model: Any = None, dataset: Any = None, **values: Any) -> Any:
    """A GRPOTrainer with GSPO's loss, as configs/smoke/gspo.yaml has it, with a smaller batch."""
    import trl

    import cogumi

    cogumi.patch(graph_break="off")
    args = trl.GRPOConfig(
        **common(out)
        | {
            "loss_type": "gspo",
            "num_generations": 8,
            "per_device_train_batch_size": 16,
            "steps_per_generation": 2,
            "max_completion_length": 12,
            "learning_rate": RL_RATE,
            "lr_scheduler_type": "constant",
        }
        | values
    )
    return trl.GRPOTrainer(
        model=model_of(bases() / "tuned") if model is None else model,
        reward_funcs=reward,
        args=args,
        train_dataset=prompts(16) if dataset is None else dataset,
        processing_class=tokenizer(),
        peft_config=lora(),
    )


def pairs(rows: int = 1024, mixed: bool = False) -> Any:
    """Preference pairs: the true middle, and the middle of another row. mixed: in an order drawn row by row."""
    from datasets import Dataset

    found, draw = prompts(rows), random.Random(SEED)
    made = []
    for i, example in enumerate(found):
        both = [example["middle"], found[(i + 1) % len(found)]["middle"]]
        if mixed and draw.random() < 0.5:
            both.reverse()
        made.append({"prompt": example["prompt"], "chosen": both[0], "rejected": both[1]})
    return Dataset.from_list(made)


def dpo(out: Path, dataset: Any = None, model: Any = None, **values: Any) -> Any:
    import trl

    import cogumi

    cogumi.patch(graph_break="off")
    args = trl.DPOConfig(
        **common(out)
        | {
            "per_device_train_batch_size": 8,
            "learning_rate": DPO_RATE,
            "warmup_steps": 5,
            "max_length": None,
        }
        | values
    )
    return trl.DPOTrainer(
        model=model_of(bases() / "tuned") if model is None else model,
        args=args,
        train_dataset=pairs() if dataset is None else dataset,
        processing_class=tokenizer(),
        peft_config=lora(),
    )


def cost(out: Path) -> float:
    """Seconds the sentinel's own code takes a step, in a run of a hundred whose every step is logged."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from cogumi.health.sentinel import Sentinel

    class Timed(Sentinel):
        spent = 0.0

    def timing(name: str) -> Callable[..., None]:
        original = getattr(Sentinel, name)

        def timed(self: Timed, *args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            original(self, *args, **kwargs)
            self.spent += time.perf_counter() - began

        return timed

    for name in ("on_step_begin", "on_optimizer_step", "on_step_end", "on_log"):
        setattr(Timed, name, timing(name))
    out.mkdir(parents=True, exist_ok=True)
    trainer = sft(out)
    for printing in (PrinterCallback, ProgressCallback):
        trainer.pop_callback(printing)
    sentinel = Timed(trainer, out, "sft")
    trainer.add_callback(sentinel)
    sentinel.begin()
    trainer.train()
    return sentinel.spent / STEPS
