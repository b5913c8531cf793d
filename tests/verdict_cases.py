"""The runs that the verdict is measured on: each whole or broken in one way, as verdict_runs.py trains them.

What breaks a run is done to it from outside, as a user's mistake would: a learning rate, a column in another order, a
collator, a tokenizer, a reward. Each case says which flag, or which cause and key, is to explain it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import polars as pl
import torch
import verdict_runs
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, TrainerCallback
from verdict_runs import DPO_RATE, RL_RATE, SEED, SFT_RATE, Case, tokenizer

from cogumi.data.stdlib_sample import sample_path


def examples(rows: list[tuple[list[int], list[int], list[int]]]) -> Any:
    """Tokenized examples of (prompt, completion, the completion's mask)."""
    return Dataset.from_list([{"input_ids": a + b, "completion_mask": [0] * len(a) + mask} for a, b, mask in rows])


def chats_of(conversations: list[tuple[str, str]], longest: int = 128) -> Any:
    words, rows = tokenizer(), []
    for asked, told in conversations:
        prompt, completion = words(f"# {asked}\n")["input_ids"], [*words(told)["input_ids"], words.eos_token_id]
        if len(prompt) + len(completion) <= longest:
            rows.append((prompt, completion, [1] * len(completion)))
    return examples(rows)


@cache
def conversations() -> list[tuple[str, str]]:
    """What a function is to do, and the function."""
    rows = pl.read_parquet(sample_path("cogumi:stdlib-chat"))["messages"].to_list()
    return [(user["content"], assistant["content"]) for user, assistant in rows]


def shuffled_chats() -> Any:
    """With another row's answer."""
    asked, told = map(list, zip(*conversations(), strict=True))
    random.Random(SEED).shuffle(told)
    return chats_of(list(zip(asked, told, strict=True)))


def answers(mixed: bool = False) -> Any:
    """Pairs of `cogumi:stdlib-chat` as text: the function that was asked for, and the next row's."""
    rows = [(f"# {asked}\n", told) for asked, told in conversations()]
    return verdict_runs.preferences(rows, [told for _, told in rows], mixed, longest=300)


@cache
def pieces() -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) of the fill-in-the-middle examples."""
    split = []
    for row in verdict_runs.middles():
        at = row["completion_mask"].index(1)
        split.append((list(row["input_ids"][:at]), list(row["input_ids"][at:])))
    return split


def other_rows_completions() -> Any:
    """The column of completions in another order than that of prompts."""
    order = random.Random(SEED).sample(range(len(pieces())), len(pieces()))
    told = [pieces()[other][1] for other in order]
    return examples([(asked, b, [1] * len(b)) for (asked, _), b in zip(pieces(), told, strict=True)])


def some_masked() -> Any:
    """Every third example with nothing to learn."""
    return examples([(a, b, [int(i % 3 > 0)] * len(b)) for i, (a, b) in enumerate(pieces())])


def changing_batches(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A trainer whose collator's batches are changed."""

    def then(trainer: Any) -> None:
        theirs = trainer.data_collator

        def changed(rows: list[dict[str, Any]]) -> dict[str, Any]:
            batch: dict[str, Any] = theirs(rows)
            change(batch)
            return batch

        trainer.data_collator = changed

    return {"then": then}


def permute_labels(batch: dict[str, Any]) -> None:
    """Within each batch, over all its learned places: a collator's index mistake."""
    learned = batch["labels"] != -100
    values = batch["labels"][learned]
    batch["labels"][learned] = values[torch.randperm(len(values))]


def learn_padding(batch: dict[str, Any]) -> None:
    """A collator whose labels are a copy of the padded ids."""
    batch["labels"] = torch.where(batch["attention_mask"] == 0, batch["input_ids"], batch["labels"])


def pad_with_the_end(trainer: Any) -> None:
    """transformers' collator with the end token as padding, which masks both wherever they are."""
    words = tokenizer()
    words.pad_token = words.eos_token
    theirs = DataCollatorForLanguageModeling(words, mlm=False)
    trainer.processing_class = words
    trainer.data_collator = lambda rows: theirs([{"input_ids": row["input_ids"]} for row in rows])


def nan_in_the_base() -> Any:
    model = verdict_runs.base()
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = float("nan")
    return model


class NanAt30(TrainerCallback):
    """One adapter weight becomes NaN after a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 30:
            next(p for n, p in model.named_parameters() if "lora_A" in n).data[0, 0] = float("nan")


def freeze(trainer: Any) -> None:
    """An optimizer that was made of copies of the weights."""
    copies = [torch.nn.Parameter(p.detach().clone()) for p in trainer.model.parameters() if p.requires_grad]
    trainer.optimizer = torch.optim.AdamW(copies, lr=SFT_RATE)


def nothing(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def the_same(completions: list[str], **_: Any) -> list[float]:
    return [0.7] * len(completions)


def brevity(completions: list[str], **_: Any) -> list[float]:
    """The shorter the better: ending at once, whatever is asked, earns all of it."""
    return [1 / (1 + len(text)) for text in completions]


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


PERMUTED = changing_batches(permute_labels)
STALLED = changing_batches(lambda _: time.sleep(0.5))
TOO_HIGH: dict[str, Any] = {"cause": "rate is too high", "knob": "train.learning_rate"}
# fmt: off
BROKEN = (
    Case("sft, learning rate x 100", "sft", {"learning_rate": 100 * SFT_RATE}, "loss trend", "rate is too high"),
    Case("sft, learning rate x 10", "sft", {"learning_rate": 10 * SFT_RATE}, **TOO_HIGH),
    Case("sft, completions of other rows", "sft", {"dataset": other_rows_completions}, "prompt and completion", "shuffled"),
    Case("sft, labels in another order", "sft", PERMUTED, "token frequencies", "another order"),
    Case("sft, a third of the rows masked", "sft", {"dataset": some_masked}, "learned tokens", "masked"),
    Case("sft, NaN in the base", "sft", {"model": nan_in_the_base}, "finite numbers", "base model"),
    Case("sft, NaN after step 30", "sft", {"then": lambda made: made.add_callback(NanAt30())}, "finite numbers", "overflowed"),
    Case("sft, adapter frozen", "sft", {"then": freeze}, "adapter moves", "frozen"),
    Case("sft, adapter times 0", "sft", {"lora": {"lora_alpha": 0}}, "adapter moves", "multiplied by 0"),
    Case("sft, padding learned", "sft", changing_batches(learn_padding), "padding", "labels padding"),
    Case("sft, padded with the end token", "sft", {"then": pad_with_the_end}, "padding", "end tokens are masked"),
    Case("sft, one example a step", "sft", {"per_device_train_batch_size": 1}, "loss noise", "too small"),
    Case("sft, stalled loader", "sft", STALLED, "waiting for data", "loader"),
    Case("sft, warm-up longer than the run", "sft", {"warmup_steps": 500}, "learning-rate schedule", "never reaches"),
    Case("gspo, dead reward", "gspo", {"reward": nothing}, "reward varies", "dead"),
    Case("gspo, constant reward", "gspo", {"reward": the_same}, "reward varies", "constant"),
    Case("gspo, entropy collapse", "gspo", {"reward": brevity, "learning_rate": 1e-2}, "entropy", "collapses"),
    Case("gspo, truncation", "gspo", {"max_completion_length": 2}, "completions end", "cut"),
    Case("gspo, learning rate x 100", "gspo", {"learning_rate": 100 * RL_RATE}, "KL to the sampler", "rate is too high"),
    Case("dpo, pairs mixed up", "dpo", {"dataset": lambda: verdict_runs.pairs(mixed=True)}, "preferences", "mixed up"),
    Case("dpo, learning rate x 100", "dpo", {"learning_rate": 100 * DPO_RATE}, **TOO_HIGH),
)
WHOLE = (
    Case("sft", "sft"),
    Case("sft, accumulated, every fifth step logged", "sft", {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "logging_steps": 5, "logging_first_step": True}),
    Case("sft, packed", "sft", {"packing": True, "max_length": 128, "per_device_train_batch_size": 8}),
    Case("sft, a fifth of the rate", "sft", {"learning_rate": SFT_RATE / 5}),
    Case("sft, constant rate, batch of 8", "sft", {"lr_scheduler_type": "constant", "per_device_train_batch_size": 8}),
    Case("sft, a base that was never trained", "sft", {"model": verdict_runs.untrained}),
    Case("gspo", "gspo"),
    Case("gspo, another reward", "gspo", {"reward": letters, "learning_rate": 1e-3}),
    Case("grpo, token level", "gspo", {"loss_type": "grpo", "learning_rate": 1e-3}),
    Case("gspo, four steps a rollout", "gspo", {"steps_per_generation": 4, "seed": 1}),
    Case("dpo", "dpo"),
    Case("dpo, a third of the rate", "dpo", {"learning_rate": DPO_RATE / 3}),
    Case("dpo, a base that cannot tell them yet", "dpo", {"model": verdict_runs.base, "learning_rate": 1e-3}),
)
# Runs that a yellow flag explains, and the step by which it does.
YELLOW = (
    (Case("sft, a rate far too low", "sft", {"learning_rate": 1e-7, "max_steps": 20}, "update size", "rate is too small"), 4),
    (Case("gspo, a rate far too low", "gspo", {"learning_rate": 1e-7, "max_steps": 20}, "update size", "rate is too small"), 4),
    (Case("gspo, ratios outside the clip", "gspo", {"learning_rate": 10 * RL_RATE, "steps_per_generation": 4, "max_steps": 8},
          "clip fraction", "by more than the clip"), 4),
    (Case("gspo, gradients scaled down", "gspo", {"max_grad_norm": 1e-3, "max_steps": 12},
          "gradient clipping", "max_grad_norm"), 6),
    (Case("gspo, completions that learn to end", "gspo",
          {"reward": brevity, "learning_rate": RL_RATE / 3, "max_completion_length": 3, "max_steps": 40},
          "completions end", "fewer than at first"), 31),
)
# Other data and seeds than those the rules were made with.
HELD_OUT = (
    Case("held out: sft, another seed", "sft", {"seed": 7}),
    Case("held out: sft, a rate too low", "sft", {"learning_rate": SFT_RATE / 1000}),
    Case("held out: sft, chat", "sft", {"dataset": lambda: chats_of(conversations())}),
    Case("held out: gspo, another seed", "gspo", {"seed": 3}),
    Case("held out: dpo, chat", "dpo", {"dataset": answers}),
    Case("held out: sft, learning rate x 10, another seed", "sft", {"learning_rate": 10 * SFT_RATE, "seed": 7}, **TOO_HIGH),
    Case("held out: sft, chat with answers of other rows", "sft", {"dataset": shuffled_chats},
         "prompt and completion", "shuffled"),
    Case("held out: sft, chat with labels in another order", "sft", {"dataset": lambda: chats_of(conversations()), **PERMUTED},
         "token frequencies", "another order"),
    Case("held out: gspo, entropy collapse, another seed", "gspo", {"reward": brevity, "learning_rate": 1e-2, "seed": 3},
         "entropy", "collapses"),
    Case("held out: dpo, chat with pairs mixed up", "dpo", {"dataset": lambda: answers(mixed=True)},
         "preferences", "mixed up"),
)
# fmt: on


@cache
def questions(rows: int = 600) -> list[tuple[str, str]]:
    """Questions about shops, and one sentence that answers each."""
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
    return chats_of(questions())


def own_code(rows: int = 600) -> list[str]:
    """Source files: small functions of a kind."""
    draw = random.Random(SEED)
    nouns = ["width", "price", "count", "total", "weight", "depth"]
    verbs = ["scale", "check", "update", "format", "load"]
    collected = []
    for i in range(rows):
        noun, verb, other = draw.choice(nouns), draw.choice(verbs), draw.choice(nouns)
        collected.append(f"def {verb}_{noun}_{i}({noun}, {other}_limit):\n    result = {noun} * {i % 7}\n"
                     f"    if result > {other}_limit:\n        return {other}_limit\n    return result\n")  # fmt: skip
    return collected


def own_middles() -> Any:
    return verdict_runs.middles_of(own_code(), tokenizer(), longest=96)


def own_pairs() -> Any:
    """The answer, and one that is rude."""
    rude = ["No idea, ask somebody else.", "Look it up yourself.", "I do not care about that."]
    rows = enumerate(questions())
    return Dataset.from_list(
        [{"prompt": f"# {a}\n", "chosen": b, "rejected": rude[i % len(rude)]} for i, (a, b) in rows]
    )


def own_prompts() -> Any:
    return verdict_runs.prompts_of(own_code(16), 96, (4, 16))


def own(name: str, method: str, dataset: Callable[[], Any], **values: Any) -> Case:
    return Case(f"own {name}", method, {"dataset": dataset, **values}, own=True)


OWN = (
    own("chat, small rate", "sft", own_chats, learning_rate=SFT_RATE / 4),
    own("chat, large rate", "sft", own_chats, learning_rate=SFT_RATE * 2),
    own("chat, batch of 4", "sft", own_chats, per_device_train_batch_size=4),
    own("chat, packed", "sft", own_chats, packing=True, max_length=128, per_device_train_batch_size=4),
    own("code, small rate", "sft", own_middles, learning_rate=SFT_RATE / 4),
    own("code, large rate", "sft", own_middles, learning_rate=SFT_RATE * 2),
    own("pairs, small rate", "dpo", own_pairs, learning_rate=DPO_RATE / 6),
    own("pairs, large rate", "dpo", own_pairs, learning_rate=DPO_RATE * 2),
    own("rewards, small rate", "gspo", own_prompts, max_completion_length=32, learning_rate=RL_RATE / 6),
    own("rewards, large rate", "gspo", own_prompts, max_completion_length=32, learning_rate=RL_RATE),
)
