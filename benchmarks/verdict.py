"""Does the verdict tell broken runs from whole ones, and by their cause: the suite of benchmarks/verdict_cases.py.

`python -m benchmarks verdict` trains every case for at most a hundred steps on a CPU: real TRL trainers on a small base,
under the sentinel. A flat or broken run is never "safe to scale". The last rows are what watching costs.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import polars as pl
import torch
import trl
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import cogumi
from benchmarks.harness import OwnTime, Row, quiet, row
from cogumi.data.fim import FimConfig
from cogumi.data.stdlib_sample import sample_path
from cogumi.health.sentinel import Sentinel
from cogumi.health.verdict import COSTS_TIME, safe_to_scale
from cogumi.models.small_base import cached_directory, train_tokenizer
from cogumi.rewards.functions import edit_similarity
from tests.fim_examples import prompts_for_rl, tokenize_for_sft

STEPS = 100
STEP_SECONDS = 0.1  # of the step that the cost is a share of
SEED = 0
LORA: dict[str, Any] = {
    "r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM",
}  # fmt: skip
SFT_RATE, RL_RATE, DPO_RATE = 4e-3, 3e-3, 3e-3
LENGTH = 64
QUICK = ("sft, NaN in the base", "sft, adapter frozen", "gspo, dead reward", "sft", "own chat, large rate")


@dataclass(frozen=True)
class Case:
    """One run: `given` are build's keywords. `flag`: the one that is to explain it, with a word of its `cause`.

    Without a flag's name any flag explains it that names this cause and `knob`, the key to change: a rate that is too high
    lifts the loss or leaves it at the tokens' frequencies, and chance decides which shows first. own: whether it is a whole
    run on one's own data, which is to raise no flag of any colour.
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
    """What the verdict said: the red flags with their steps, first of all the first, and how many steps there were.

    safe: the answer to "safe to scale?", and why. was_yellow: each flag that was yellow at any time, as it was first.
    """

    case: Case
    reds: list[tuple[int, Any]]
    steps: int
    safe: str
    was_yellow: dict[str, str]

    @property
    def alarms(self) -> list[Any]:
        return [flag for _, flag in self.reds]

    @property
    def right(self) -> bool:
        """A broken run has its flag, first of all, with its cause; a whole one has none that is red; on one's own data a
        whole one has none that is yellow either."""
        if not self.case.broken:
            return not self.alarms and not (self.case.own and self.was_yellow)
        return bool(self.reds) and self.case.explained_by(self.reds[0][1])


def run(quick: bool = False) -> Iterator[Row]:
    from benchmarks.verdict_cases import BROKEN, HELD_OUT, OWN, WHOLE

    quiet()
    kinds = {
        "broken runs flagged with their cause": [case for case in (*BROKEN, *HELD_OUT) if case.broken],
        "whole runs without a red flag": [case for case in (*WHOLE, *HELD_OUT) if not case.broken],
        "whole runs on one's own data without a yellow or red flag": [*OWN],
    }
    unsafe = 0
    with tempfile.TemporaryDirectory() as folder:
        for what, every in kinds.items():
            cases = [case for case in every if not quick or case.name in QUICK]
            right = 0
            for case in cases:
                found = judged(case, Path(folder) / case.name, "stop" if case.broken else "warn")
                right += found.right
                unsafe += case.broken and found.safe.startswith("yes")
                yield case_row(case, found)
            yield row("verdict", "all", what, right, f"of {len(cases)}", target=f">= {len(cases)}")
        yield row("verdict", "all", "broken runs that are safe to scale", unsafe, "", target="<= 0")
        per_step = cost(Path(folder) / "cost")
    share = 100 * per_step / STEP_SECONDS
    note = "the rules included, at every fifth step and from step 25 on at every tenth"
    yield row("verdict", "a step of 100 ms", "share of the sentinel", share, "%", target="<= 0.5", note=note)


def case_row(case: Case, found: Outcome) -> Row:
    said = "; ".join(f"step {step}: {flag.name} ({flag.cause})" for step, flag in found.reds) or "no red flag"
    kind, at = "broken" if case.broken else "whole", found.reds[0][0] if found.reds else "never"
    note = f"{said}; was yellow: {', '.join(found.was_yellow) or 'none'}; safe to scale: {found.safe}"
    return row("verdict", f"{kind}: {case.name}", "red at step", at, ok=found.right, note=note)


def judged(case: Case, out: Path, on_red: Any = "stop") -> Outcome:
    """Run a case under the sentinel; with "stop" it ends at the first red flag."""
    trainer = build(case.method, out, **case.given)
    trainer._save_checkpoint = lambda *_: None  # the suite is about flags
    sentinel = Sentinel(trainer, out, case.method, on_red=on_red)
    was_yellow: dict[str, str] = {}
    look = sentinel.look

    def remembering(step: int, write: bool = False) -> None:
        look(step, write)
        for flag in sentinel.flags:
            if flag.level == "yellow" and flag.name not in COSTS_TIME:
                was_yellow.setdefault(flag.name, f"step {step}: {flag}")

    sentinel.look = remembering  # type: ignore[method-assign]
    watch(trainer, sentinel)
    reds = list(sentinel.was_red.values())
    safe = safe_to_scale(sentinel.run(), sentinel.flags, [flag for _, flag in reds])
    return Outcome(case, reds, trainer.state.global_step, ": ".join(safe), was_yellow)


def watch(trainer: Any, sentinel: Any) -> None:
    for printing in (PrinterCallback, ProgressCallback):
        trainer.pop_callback(printing)
    trainer.add_callback(sentinel)
    sentinel.begin()
    trainer.train()


def cost(out: Path) -> float:
    """Seconds the sentinel's own code takes a step, in a run of a hundred whose every step is logged."""
    trainer, timed = build("sft", out), OwnTime()
    sentinel = Sentinel(trainer, out, "sft")
    timed.wrap(sentinel, "on_step_begin", "on_step_end", "on_log")
    watch(trainer, sentinel)
    return timed.wall / STEPS


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
    """A trainer as configs/smoke/*.yaml have it, gspo with a smaller batch. values: of TRL's config; then: done to it."""
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
    found = prompts(rows)
    return preferences(((each["prompt"], each["middle"]) for each in found), [each["middle"] for each in found], mixed)


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
    """A directory with the tokenizer and two models of 200,000 weights: `base` has read code, `tuned` the task as well.

    Made once for the machine: a minute on two cores. Smaller than the package's own small base, as there are thirty runs.
    """
    recipe = hashlib.sha256(inspect.getsource(make_bases).encode()).hexdigest()[:12]
    return cached_directory(f"verdict-bases-{recipe}", make_bases)


def make_bases(out: Path) -> None:
    words = train_tokenizer(sources())
    words.save_pretrained(out)
    model = untrained(words)
    ids = torch.tensor([token for each in words(sources())["input_ids"] for token in (*each, words.eos_token_id)])
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
    """Right-padded ids and labels of the learned tokens; padding comes after what is learned, so it needs no mask."""
    ids = [torch.tensor(tokens) for tokens in rows["input_ids"]]
    masks = [torch.tensor(mask).bool() for mask in rows["completion_mask"]]
    labels = [tokens.where(mask, -100) for tokens, mask in zip(ids, masks, strict=True)]
    return pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)
