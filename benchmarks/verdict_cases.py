"""The runs that the verdict is measured on: each whole or broken in one way, as benchmarks/verdict_runs.py trains them.

What breaks a run is done to it from outside, as a user's mistake would: a learning rate, a column in another order, a
collator, a tokenizer, a reward. Each case says which flag, or which cause and key, is to explain it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import torch

from benchmarks.verdict_runs import (
    DPO_RATE,
    RL_RATE,
    SEED,
    SFT_RATE,
    Case,
    architecture,
    base,
    dpo,
    gspo,
    middles,
    pairs,
    sft,
    tokenizer,
)


def chats(shuffled: bool = False, longest: int = 128) -> Any:
    """Tokenized examples of what a function is to do, and the function; shuffled: another row's."""
    from datasets import Dataset

    from cogumi.data.stdlib_sample import chat_path

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

    from cogumi.data.stdlib_sample import chat_path

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
        cause="rate is too high",
        knob="train.learning_rate",
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
        out, learning_rate=10 * SFT_RATE, seed=7), cause="rate is too high", knob="train.learning_rate"),
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
    from cogumi.data.fim import FimConfig
    from tests.fim_examples import tokenize_for_sft

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
    from cogumi.data.fim import FimConfig
    from tests.fim_examples import prompts_for_rl

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
