"""Train the cases of verdict_cases.py under the sentinel: real TRL trainers on a small base, at most a hundred steps."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import polars as pl
import torch
import trl
from datasets import Dataset
from fim_examples import prompts_for_rl, tokenize_for_sft
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import cogumi
from cogumi.data.fim import FimConfig
from cogumi.data.stdlib_sample import sample_path
from cogumi.health.sentinel import Sentinel
from cogumi.health.verdict import COSTS_TIME, safe_to_scale
from cogumi.models.small_base import cached_directory, train_tokenizer
from cogumi.rewards.functions import edit_similarity

STEPS = 100
SEED = 0
LORA: dict[str, Any] = {
    "r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM",
}  # fmt: skip
SFT_RATE, RL_RATE, DPO_RATE = 4e-3, 3e-3, 3e-3
LENGTH = 64


@dataclass(frozen=True)
class Case:
    """One run and what the sentinel must say of it.

    Attributes:
        given: Keyword arguments of `build`.
        flag: The flag that must explain a broken run. "": any flag that names `cause` and `knob`, because a rate that is too
            high lifts the loss or leaves it at the tokens' frequencies, and chance decides which shows first.
        cause: A word of the flag's cause; "" for a healthy run.
        knob: The key to change that the flag must name.
        own: A healthy run on other data than the rules were made with: it must raise no flag of any colour.
    """

    name: str
    method: str
    given: Mapping[str, Any] = field(default_factory=dict)
    flag: str = ""
    cause: str = ""
    knob: str = ""
    own: bool = False

    @property
    def broken(self) -> bool:
        return bool(self.cause)

    def explained_by(self, flag: Any) -> bool:
        named = self.flag in ("", flag.name)
        return bool(named and self.cause in flag.cause and self.knob in flag.knob)


@dataclass
class Outcome:
    """Red flags in order with their steps, the steps made, the answer to "safe to scale?", and flags that were yellow.

    was_yellow: the first of each name. yellows: all of them, with their steps.
    """

    case: Case
    reds: list[tuple[int, Any]]
    steps: int
    safe: str
    was_yellow: dict[str, str]
    yellows: list[tuple[int, Any]] = field(default_factory=list)

    @property
    def alarms(self) -> list[Any]:
        return [flag for _, flag in self.reds]

    @property
    def right(self) -> bool:
        """Return True for a broken run explained by its first red flag, or a healthy one without red (own: yellow) flags."""
        if not self.case.broken:
            return not self.alarms and not (self.case.own and self.was_yellow.keys() - COSTS_TIME)
        return bool(self.reds) and self.case.explained_by(self.reds[0][1])


def judged(case: Case, out: Path, on_red: Any = "stop") -> Outcome:
    """Run a case under the sentinel; on_red="stop" ends it at the first red flag."""
    trainer = build(case.method, out, **case.given)
    trainer._save_checkpoint = lambda *_: None  # the suite is about flags
    sentinel = Sentinel(trainer, out, case.method, on_red=on_red)
    was_yellow: dict[str, str] = {}
    yellows: list[tuple[int, Any]] = []
    look = sentinel.look

    def remembering(step: int, write: bool = False) -> None:
        look(step, write)
        for flag in sentinel.flags:
            if flag.level == "yellow":
                yellows.append((step, flag))
                was_yellow.setdefault(flag.name, f"step {step}: {flag}")

    sentinel.look = remembering  # type: ignore[method-assign]
    for printing in (PrinterCallback, ProgressCallback):
        trainer.pop_callback(printing)
    trainer.add_callback(sentinel)
    sentinel.begin()
    trainer.train()
    reds = list(sentinel.was_red.values())
    safe = safe_to_scale(sentinel.run(), sentinel.flags, [flag for _, flag in reds])
    return Outcome(case, reds, trainer.state.global_step, ": ".join(safe), was_yellow, yellows)


def build(
    method: str,
    out: Path,
    dataset: Callable[[], Any] | None = None,
    model: Callable[[], Any] | None = None,
    reward: Any = None,
    lora: Mapping[str, Any] | None = None,
    then: Callable[[Any], None] | None = None,
    **values: Any,
) -> Any:
    """Build a trainer like configs/smoke/*.yaml. values: of TRL's config; then: called with the trainer."""
    cogumi.patch(graph_break="off")
    kinds: dict[str, tuple[str, Callable[[], Any], Callable[[], Any], dict[str, Any]]] = {
        "sft": ("SFT", base, middles, {
            "per_device_train_batch_size": 16, "learning_rate": SFT_RATE, "lr_scheduler_type": "cosine", "warmup_steps": 5,
            "completion_only_loss": True, "max_length": None,
        }),
        "gspo": ("GRPO", tuned, lambda: prompts(16), {
            "loss_type": "gspo", "num_generations": 8, "per_device_train_batch_size": 16, "steps_per_generation": 2,
            "max_completion_length": 12, "learning_rate": RL_RATE, "lr_scheduler_type": "constant",
        }),
        "dpo": ("DPO", tuned, pairs, {
            "per_device_train_batch_size": 8, "learning_rate": DPO_RATE, "warmup_steps": 5, "max_length": None,
        }),
    }  # fmt: skip
    kind, own_model, own_data, own_values = kinds[method]
    common = {
        "output_dir": str(out / "checkpoints"), "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "bf16": False,
        "report_to": "none", "gradient_checkpointing": False, "dataloader_pin_memory": False, "disable_tqdm": True,
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    more = {"reward_funcs": reward or edit_similarity} if method == "gspo" else {}
    trainer = getattr(trl, f"{kind}Trainer")(
        model=(model or own_model)(),
        args=getattr(trl, f"{kind}Config")(**common | own_values | values),
        train_dataset=(dataset or own_data)(),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(**LORA | dict(lora or {})),
        **more,
    )
    if then is not None:
        then(trainer)
    return trainer


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(bases())


@cache
def sources() -> list[str]:
    return pl.read_parquet(sample_path())["source"].to_list()


def middles_of(texts: list[str], words: Any, longest: int = LENGTH, seed: int = 0) -> Any:
    """Tokenized fill-in-the-middle examples: input_ids, completion_mask."""
    fim = FimConfig(max_length=longest, middle_chars=(4, 24), overlong="trim", seed=seed)
    return tokenize_for_sft(pl.DataFrame({"source": texts}), words, fim).dataset


@cache
def middles(rows: int = 2048) -> Any:
    return middles_of(sources()[:rows], tokenizer())


def prompts_of(texts: list[str], longest: int, middle_chars: tuple[int, int]) -> Any:
    fim = FimConfig(max_length=longest, middle_chars=middle_chars, overlong="trim")
    return prompts_for_rl(pl.DataFrame({"source": texts}), tokenizer(), fim).dataset


@cache
def prompts(rows: int = 64) -> Any:
    return prompts_of(sources()[:rows], LENGTH, (4, 24))


def pairs(rows: int = 1024, mixed: bool = False) -> Any:
    """Preference pairs: the true middle, and the middle of another row. mixed: in an order drawn row by row."""
    result = prompts(rows)
    return preferences(
        ((each["prompt"], each["middle"]) for each in result), [each["middle"] for each in result], mixed
    )


def preferences(
    asked: Iterable[tuple[str, str]], answers: list[str], mixed: bool, longest: float = float("inf")
) -> Any:
    """Of (prompt, answer) the answer and the next row's."""
    draw, made = random.Random(SEED), []
    for i, (prompt, answer) in enumerate(asked):
        both = [answer, answers[(i + 1) % len(answers)]]
        if sum(map(len, both)) > longest:
            continue
        if mixed and draw.random() < 0.5:
            both.reverse()
        made.append({"prompt": prompt, "chosen": both[0], "rejected": both[1]})
    return Dataset.from_list(made)


def base(name: str = "base") -> Any:
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_pretrained(bases() / name, dtype=torch.float32)


tuned = partial(base, "tuned")


@cache
def bases() -> Path:
    """Return a cached directory with a tokenizer and two models of 200,000 weights: `base` (code) and `tuned` (the task too).

    Made once for each machine in a minute on two cores; smaller than the package's small base, because there are thirty runs.
    """
    recipe = hashlib.sha256(inspect.getsource(make_bases).encode()).hexdigest()[:12]
    return cached_directory(f"verdict-bases-{recipe}", make_bases)


def make_bases(out: Path) -> None:
    words = train_tokenizer(sources())
    words.save_pretrained(out)
    model = untrained(words)
    ids = torch.tensor(
        [token for token_ids in words(sources())["input_ids"] for token in (*token_ids, words.eos_token_id)]
    )
    blocks = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    train(model, ((batch, batch) for batch in blocks[torch.randperm(len(blocks))[: 16 * 400]].split(16)))
    model.save_pretrained(out / "base")
    rows = middles_of(sources()[:6400], words, seed=1)
    train(model, (padded(rows[i : i + 16]) for i in range(0, len(rows), 16)))
    model.save_pretrained(out / "tuned")


def untrained(words: Any = None) -> Any:
    """A Llama with weights that were never trained."""
    words = words or tokenizer()
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(model: Any, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    for ids, labels in batches:
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def padded(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded ids and labels; padding follows the learned tokens, so it needs no attention mask."""
    ids = [torch.tensor(tokens) for tokens in rows["input_ids"]]
    masks = [torch.tensor(mask).bool() for mask in rows["completion_mask"]]
    labels = [tokens.where(mask, -100) for tokens, mask in zip(ids, masks, strict=True)]
    return pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)
