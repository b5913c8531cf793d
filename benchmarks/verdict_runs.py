"""The runs that the verdict is measured on: real TRL trainers on the small base, each whole or broken in one way.

What breaks a run is done to it from outside, as a user's mistake would: a learning rate, a column in another order, a
collator, a tokenizer, a reward. Each case says which flag is to explain it.
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
    """One run: `build(out)` makes its trainer. `flag`: the one that is to explain it, with a word of its cause."""

    name: str
    method: str
    build: Callable[[Path], Any]
    flag: str = ""
    cause: str = ""
    own: bool = False
    """Whether it is a whole run on one's own data, which is to raise no flag of any colour."""

    @property
    def broken(self) -> bool:
        return bool(self.flag)

    def explained_by(self, flag: Any) -> bool:
        return bool(flag.name == self.flag and self.cause in flag.cause)


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

    from cogumi.training.diagnosis import OF_THE_MACHINE, safe_to_scale
    from cogumi.training.sentinel import Sentinel

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
    from cogumi.data.sample import sample_path

    return pl.read_parquet(sample_path())["source"].to_list()


def middles_of(words: Any, rows: int, seed: int = 0) -> Any:
    """Tokenized fill-in-the-middle examples: input_ids, completion_mask."""
    from cogumi.data.fim import FimConfig, tokenize_for_sft

    fim = FimConfig(max_length=LENGTH, middle_chars=(4, 24), overlong="trim", seed=seed)
    return tokenize_for_sft(pl.DataFrame({"source": sources()[:rows]}), words, fim, name="sample").dataset


@cache
def middles(rows: int = 2048) -> Any:
    return middles_of(tokenizer(), rows)


@cache
def prompts(rows: int = 64) -> Any:
    from cogumi.data.fim import FimConfig, prompts_for_rl

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


def chats(shuffled: bool = False, longest: int = 128) -> Any:
    """Tokenized examples of what a function is to do, and the function; shuffled: another row's."""
    from datasets import Dataset

    from cogumi.data.sample_tasks import chat_path

    words, rows = tokenizer(), pl.read_parquet(chat_path())["messages"].to_list()
    asked = [words(f"# {user['content']}\n")["input_ids"] for user, _ in rows]
    told = [[*words(assistant["content"])["input_ids"], words.eos_token_id] for _, assistant in rows]
    if shuffled:
        random.Random(SEED).shuffle(told)
    whole = [(a, b) for a, b in zip(asked, told, strict=True) if len(a) + len(b) <= longest]
    return Dataset.from_list([{"input_ids": a + b, "completion_mask": [0] * len(a) + [1] * len(b)} for a, b in whole])


def answers(mixed: bool = False, longest: int = 300) -> Any:
    """Pairs of `cogumi:stdlib-chat` as text: the function that was asked for, and the next row's."""
    from datasets import Dataset

    from cogumi.data.sample_tasks import chat_path

    rows, draw, made = pl.read_parquet(chat_path())["messages"].to_list(), random.Random(SEED), []
    for i, (asked, told) in enumerate(rows):
        both = [told["content"], rows[(i + 1) % len(rows)][1]["content"]]
        if sum(map(len, both)) > longest:
            continue
        if mixed and draw.random() < 0.5:
            both.reverse()
        made.append({"prompt": f"# {asked['content']}\n", "chosen": both[0], "rejected": both[1]})
    return Dataset.from_list(made)


# --------------------------------------------------------------------------------------------------------- what breaks them


def rewritten(change: Callable[[int, list[int], list[int]], tuple[list[int], list[int], list[int]]]) -> Any:
    """The examples, each made anew of (row, prompt, completion): change returns (prompt, completion, its mask)."""
    from datasets import Dataset

    made = []
    for i, (prompt, completion) in enumerate(pieces()):
        prompt, completion, mask = change(i, prompt, completion)
        made.append({"input_ids": prompt + completion, "completion_mask": [0] * len(prompt) + mask})
    return Dataset.from_list(made)


@cache
def pieces() -> list[tuple[list[int], list[int]]]:
    split = []
    for row in middles():
        at = row["completion_mask"].index(1)
        split.append((list(row["input_ids"][:at]), list(row["input_ids"][at:])))
    return split


def other_rows_completions() -> Any:
    """The column of completions in another order than that of prompts."""
    order = random.Random(SEED).sample(range(len(pieces())), len(pieces()))
    return rewritten(lambda i, prompt, _: (prompt, pieces()[order[i]][1], [1] * len(pieces()[order[i]][1])))


def tokens_in_another_order() -> Any:
    """Labels that are permuted within each batch, over all its learned places: a collator's index mistake."""
    import trl

    class Collator(trl.trainer.sft_trainer.DataCollatorForLanguageModeling):
        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            batch: dict[str, Any] = super().torch_call(examples)
            learned = batch["labels"] != -100
            values = batch["labels"][learned]
            batch["labels"][learned] = values[torch.randperm(len(values))]
            return batch

    return Collator(pad_token_id=tokenizer().pad_token_id)


def some_masked() -> Any:
    """Every third example with nothing to learn."""
    return rewritten(lambda i, prompt, completion: (prompt, completion, [int(i % 3 > 0)] * len(completion)))


def padding_learned() -> Any:
    """A collator whose labels are a copy of the padded ids."""
    import trl

    class Collator(trl.trainer.sft_trainer.DataCollatorForLanguageModeling):
        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            batch: dict[str, Any] = super().torch_call(examples)
            batch["labels"] = torch.where(batch["attention_mask"] == 0, batch["input_ids"], batch["labels"])
            return batch

    return Collator(pad_token_id=tokenizer().pad_token_id)


def padded_with_the_end() -> Any:
    """transformers' collator with the end token as padding, which masks both wherever they are."""
    from transformers import DataCollatorForLanguageModeling

    words = tokenizer()
    words.pad_token = words.eos_token
    ours = DataCollatorForLanguageModeling(words, mlm=False)

    def collate(examples: list[dict[str, Any]]) -> Any:
        return ours([{"input_ids": each["input_ids"]} for each in examples])

    return words, collate


def sft_padded_with_the_end(out: Path) -> Any:
    words, collate = padded_with_the_end()
    trainer = sft(out, collator=collate)
    trainer.processing_class = words
    return trainer


def slow_collator(seconds: float) -> Any:
    import trl

    class Collator(trl.trainer.sft_trainer.DataCollatorForLanguageModeling):
        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            time.sleep(seconds)
            batch: dict[str, Any] = super().torch_call(examples)
            return batch

    return Collator(pad_token_id=tokenizer().pad_token_id)


def nan_in_the_base(out: Path) -> Any:
    model = base()
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = float("nan")
    return sft(out, model=model)


def nan_at(step: int) -> Callable[[Path], Any]:
    """One adapter weight becomes NaN after a step."""
    from transformers import TrainerCallback

    class Inject(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == step:
                next(p for n, p in model.named_parameters() if "lora_A" in n).data[0, 0] = float("nan")

    def build(out: Path) -> Any:
        trainer = sft(out)
        trainer.add_callback(Inject())
        return trainer

    return build


def frozen(out: Path) -> Any:
    """An optimizer that was made of copies of the weights."""
    trainer = sft(out)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in trainer.model.parameters() if p.requires_grad]
    trainer.optimizer = torch.optim.AdamW(copies, lr=SFT_RATE)
    return trainer


def nothing(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def the_same(completions: list[str], **_: Any) -> list[float]:
    return [0.7] * len(completions)


def brevity(completions: list[str], **_: Any) -> list[float]:
    """The shorter the better: ending at once, whatever is asked, earns all of it."""
    return [1 / (1 + len(text)) for text in completions]


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def random_base() -> Any:
    """Weights that were never trained."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(SEED)
    return LlamaForCausalLM(architecture(tokenizer()))


BROKEN = (
    Case(
        "sft, learning rate x 100",
        "sft",
        lambda out: sft(out, learning_rate=100 * SFT_RATE),
        "loss trend",
        "rate is too high",
    ),
    Case(
        "sft, learning rate x 10",
        "sft",
        lambda out: sft(out, learning_rate=10 * SFT_RATE),
        "token frequencies",
        "rate is too high",
    ),
    Case(
        "sft, completions of other rows",
        "sft",
        lambda out: sft(out, other_rows_completions()),
        "prompt and completion",
        "shuffled",
    ),
    Case(
        "sft, labels in another order",
        "sft",
        lambda out: sft(out, collator=tokens_in_another_order()),
        "token frequencies",
        "another order",
    ),
    Case("sft, a third of the rows masked", "sft", lambda out: sft(out, some_masked()), "learned tokens", "masked"),
    Case("sft, NaN in the base", "sft", nan_in_the_base, "finite numbers", "base model"),
    Case("sft, NaN after step 30", "sft", nan_at(30), "finite numbers", "overflowed"),
    Case("sft, adapter frozen", "sft", frozen, "adapter moves", "frozen"),
    Case(
        "sft, adapter times 0",
        "sft",
        lambda out: sft(out, lora_values={"lora_alpha": 0}),
        "adapter moves",
        "multiplied by 0",
    ),
    Case("sft, padding learned", "sft", lambda out: sft(out, collator=padding_learned()), "padding", "labels padding"),
    Case("sft, padded with the end token", "sft", sft_padded_with_the_end, "padding", "end tokens are masked"),
    Case(
        "sft, one example a step", "sft", lambda out: sft(out, per_device_train_batch_size=1), "loss noise", "too small"
    ),
    Case("sft, stalled loader", "sft", lambda out: sft(out, collator=slow_collator(0.5)), "waiting for data", "loader"),
    Case(
        "sft, warm-up longer than the run",
        "sft",
        lambda out: sft(out, warmup_steps=500),
        "learning-rate schedule",
        "never reaches",
    ),
    Case("gspo, dead reward", "gspo", lambda out: gspo(out, nothing), "reward varies", "dead"),
    Case("gspo, constant reward", "gspo", lambda out: gspo(out, the_same), "reward varies", "constant"),
    Case("gspo, entropy collapse", "gspo", lambda out: gspo(out, brevity, learning_rate=1e-2), "entropy", "collapses"),
    Case("gspo, truncation", "gspo", lambda out: gspo(out, max_completion_length=2), "completions end", "cut"),
    Case(
        "gspo, learning rate x 100",
        "gspo",
        lambda out: gspo(out, learning_rate=100 * RL_RATE),
        "KL to the sampler",
        "rate is too high",
    ),
    Case("dpo, pairs mixed up", "dpo", lambda out: dpo(out, pairs(mixed=True)), "preferences", "mixed up"),
    Case(
        "dpo, learning rate x 100",
        "dpo",
        lambda out: dpo(out, learning_rate=100 * DPO_RATE),
        "loss trend",
        "rate is too high",
    ),
)
WHOLE = (
    Case("sft", "sft", sft),
    Case("sft, accumulated, every fifth step logged", "sft", lambda out: sft(
        out, per_device_train_batch_size=4, gradient_accumulation_steps=4, logging_steps=5, logging_first_step=True)),
    Case("sft, packed", "sft", lambda out: sft(out, packing=True, max_length=128, per_device_train_batch_size=8)),
    Case("sft, a fifth of the rate", "sft", lambda out: sft(out, learning_rate=SFT_RATE / 5)),
    Case("sft, constant rate, batch of 8", "sft", lambda out: sft(
        out, lr_scheduler_type="constant", per_device_train_batch_size=8)),
    Case("sft, a base that was never trained", "sft", lambda out: sft(out, model=random_base())),
    Case("gspo", "gspo", gspo),
    Case("gspo, another reward", "gspo", lambda out: gspo(out, letters, learning_rate=1e-3)),
    Case("grpo, token level", "gspo", lambda out: gspo(out, loss_type="grpo", learning_rate=1e-3)),
    Case("gspo, four steps a rollout", "gspo", lambda out: gspo(out, steps_per_generation=4, seed=1)),
    Case("dpo", "dpo", dpo),
    Case("dpo, a third of the rate", "dpo", lambda out: dpo(out, learning_rate=DPO_RATE / 3)),
    Case("dpo, a base that cannot tell them yet", "dpo", lambda out: dpo(out, model=base(), learning_rate=1e-3)),
)  # fmt: skip
# Other data and seeds than those the rules were looked at with.
HELD_OUT = (
    Case("held out: sft, another seed", "sft", lambda out: sft(out, seed=7)),
    Case("held out: sft, a rate too low", "sft", lambda out: sft(out, learning_rate=SFT_RATE / 1000)),
    Case("held out: sft, chat", "sft", lambda out: sft(out, chats())),
    Case("held out: gspo, another seed", "gspo", lambda out: gspo(out, seed=3)),
    Case("held out: dpo, chat", "dpo", lambda out: dpo(out, answers())),
    Case("held out: sft, learning rate x 10, another seed", "sft", lambda out: sft(
        out, learning_rate=10 * SFT_RATE, seed=7), "token frequencies", "rate is too high"),
    Case("held out: sft, chat with answers of other rows", "sft", lambda out: sft(
        out, chats(shuffled=True)), "prompt and completion", "shuffled"),
    Case("held out: sft, chat with labels in another order", "sft", lambda out: sft(
        out, chats(), collator=tokens_in_another_order()), "token frequencies", "another order"),
    Case("held out: gspo, entropy collapse, another seed", "gspo", lambda out: gspo(
        out, brevity, learning_rate=1e-2, seed=3), "entropy", "collapses"),
    Case("held out: dpo, chat with pairs mixed up", "dpo", lambda out: dpo(
        out, answers(mixed=True)), "preferences", "mixed up"),
)  # fmt: skip


def questions(rows: int = 600) -> list[tuple[str, str]]:
    """Somebody's own chat data: questions about shops, and one sentence that answers each."""
    draw = random.Random(SEED)
    names = ["north", "south", "old", "new", "green", "river", "market", "station"]
    goods = ["tea", "bread", "books", "lamps", "shoes", "paper", "glass", "wool", "maps", "clocks"]
    hours = ["eight", "nine", "ten", "eleven"]
    made = []
    for _ in range(rows):
        name, good, hour = draw.choice(names), draw.choice(goods), draw.choice(hours)
        made.append((f"When can I buy {good} in the {name} shop?", f"The {name} shop sells {good} from {hour} on."))
    return made


def own_chats() -> Any:
    from datasets import Dataset

    words, made = tokenizer(), []
    for question, answer in questions():
        asked, told = (words(text)["input_ids"] for text in (f"# {question}\n", answer))
        told = [*told, words.eos_token_id]
        made.append({"input_ids": asked + told, "completion_mask": [0] * len(asked) + [1] * len(told)})
    return Dataset.from_list(made)


def own_code(rows: int = 600) -> list[str]:
    """Somebody's own source files: small functions of a kind."""
    draw = random.Random(SEED)
    nouns, verbs = (
        ["width", "price", "count", "total", "weight", "depth"],
        ["scale", "check", "update", "format", "load"],
    )
    found = []
    for i in range(rows):
        noun, verb, other = draw.choice(nouns), draw.choice(verbs), draw.choice(nouns)
        found.append(f"def {verb}_{noun}_{i}({noun}, {other}_limit):\n    result = {noun} * {i % 7}\n"
                     f"    if result > {other}_limit:\n        return {other}_limit\n    return result\n")  # fmt: skip
    return found


def own_middles() -> Any:
    from cogumi.data.fim import FimConfig, tokenize_for_sft

    fim = FimConfig(max_length=96, middle_chars=(4, 24), overlong="trim")
    return tokenize_for_sft(pl.DataFrame({"source": own_code()}), tokenizer(), fim, name="own").dataset


def own_pairs() -> Any:
    """The answer, and one that is rude."""
    from datasets import Dataset

    rude = ["No idea, ask somebody else.", "Look it up yourself.", "I do not care about that."]
    return Dataset.from_list([
        {"prompt": f"# {question}\n", "chosen": answer, "rejected": rude[i % len(rude)]}
        for i, (question, answer) in enumerate(questions())
    ])  # fmt: skip


def own_prompts() -> Any:
    from cogumi.data.fim import FimConfig, prompts_for_rl

    fim = FimConfig(max_length=96, middle_chars=(4, 16), overlong="trim")
    return prompts_for_rl(pl.DataFrame({"source": own_code(16)}), tokenizer(), fim, name="own").dataset


def own_gspo(out: Path, **values: Any) -> Any:
    return gspo(out, dataset=own_prompts(), max_completion_length=32, **values)


OWN = (
    Case("own chat, small rate", "sft", lambda out: sft(out, own_chats(), learning_rate=SFT_RATE / 4), own=True),
    Case("own chat, large rate", "sft", lambda out: sft(out, own_chats(), learning_rate=SFT_RATE * 2), own=True),
    Case("own chat, batch of 4", "sft", lambda out: sft(out, own_chats(), per_device_train_batch_size=4), own=True),
    Case("own chat, packed", "sft", lambda out: sft(
        out, own_chats(), packing=True, max_length=128, per_device_train_batch_size=4), own=True),
    Case("own code, small rate", "sft", lambda out: sft(out, own_middles(), learning_rate=SFT_RATE / 4), own=True),
    Case("own code, large rate", "sft", lambda out: sft(out, own_middles(), learning_rate=SFT_RATE * 2), own=True),
    Case("own pairs, small rate", "dpo", lambda out: dpo(out, own_pairs(), learning_rate=DPO_RATE / 6), own=True),
    Case("own pairs, large rate", "dpo", lambda out: dpo(out, own_pairs(), learning_rate=DPO_RATE * 2), own=True),
    Case("own rewards, small rate", "gspo", lambda out: own_gspo(out, learning_rate=RL_RATE / 6), own=True),
    Case("own rewards, large rate", "gspo", lambda out: own_gspo(out, learning_rate=RL_RATE), own=True),
)  # fmt: skip


def cost(out: Path) -> float:
    """Seconds the sentinel's own code takes a step, in a run of a hundred whose every step is logged."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from cogumi.training.sentinel import Sentinel

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
