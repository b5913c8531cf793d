"""What an environment costs beside the sampling of its rollouts, on a model so small that sampling is cheap.

`tools`: a rollout with an environment of tools under cogumi beside the same rollout of TRL's own trainer. The sampler runs,
and its ids are replaced by a call and an answer, so that both play the same episodes. `turns`: the share of a rollout that
is neither sampling nor TRL's scoring. The environments do next to nothing, so what is left is cogumi's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset

import cogumi
from benchmarks.harness import OwnTime, Row, interleave, ratio_row, values_row
from cogumi.environments.dialogue import Dialogue
from cogumi.environments.episodes import Episodes
from cogumi.environments.loading import Task
from cogumi.models.small_base import random_base_path
from cogumi.patches.trl_internals import GENERATE_TURN, MAKE_ROLLOUT, wrap_method

EPISODES, TOKENS, MOST = 16, 24, 200  # of a rollout; that each turn samples; of a transcript
CALL = "<|tool_call_start|>[look(place=4)]<|tool_call_end|>"
LIMIT = 0.05


class Look:
    def reset(self, **record: Any) -> None:
        self.seen: list[int] = []

    def look(self, place: int) -> str:
        """Look somewhere.

        Args:
            place: from 1 to 5
        """
        self.seen.append(place)
        return "nothing"

    def get_reward(self) -> float:
        return float(len(self.seen))


class Again:
    def reset(self, **record: Any) -> None:
        self.heard = 0

    def respond(self, text: str) -> str | None:
        self.heard += 1
        return "again" if self.heard <= 2 else None

    def get_reward(self) -> float:
        return float(self.heard)


def run(quick: bool = False) -> Iterator[Row]:
    cogumi.patch()
    repeats = 3 if quick else 15
    rows = [{"prompt": [{"role": "user", "content": "Find it."}]}] * EPISODES
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = make_trainer(folder, Look(), True), make_trainer(folder, Look(), False)
        times = interleave(
            {"cogumi": lambda: make_rollout(ours, rows), "TRL": lambda: make_rollout(theirs, rows)}, repeats
        )
        case = f"tools: {EPISODES} episodes of two calls, sampler of {TOKENS} tokens a turn"
        target = f"<= {1 + LIMIT:g}"
        yield ratio_row("environments", case, "rollout, cogumi / TRL", times, "cogumi", "TRL", target=target)

        talking, own = make_trainer(folder, Again(), True), OwnTime()
        shares = []
        watch_own_time(talking, own)
        for turn in range(repeats + 1):
            own.wall, before = 0.0, time.perf_counter()
            make_rollout(talking, rows)
            if turn:  # the first one warms up
                shares.append(own.wall / (time.perf_counter() - before))
        case = f"turns: {EPISODES} episodes of three turns, {TOKENS} tokens each"
        yield values_row(
            "environments", case, "driver and environment / rollout", shares, "share", target=f"<= {LIMIT:g}"
        )


def make_trainer(folder: str, environment: Any, with_cogumi: bool) -> Any:
    """A GRPOTrainer of a random model of 140,000 weights, whose sampler runs and whose ids are played back."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = random_base_path("cogumi:random-qwen3")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = (Path(trl.__file__).with_name("chat_templates") / "lfm2_v2.jinja").read_text()
    args = trl.GRPOConfig(
        folder, loss_type="gspo", num_generations=8, per_device_train_batch_size=EPISODES, steps_per_generation=1,
        max_completion_length=MOST, max_tool_calling_iterations=2, bf16=False, report_to="none",
    )  # fmt: skip
    kind: Any = type(environment)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    given = {
        "args": args,
        "train_dataset": Dataset.from_list([{"prompt": "x"}] * EPISODES),
        "processing_class": tokenizer,
    }
    if not hasattr(kind, "respond"):
        episodes = Episodes(Task("Look", kind), None, dict)
        more = episodes.trainer_arguments() if with_cogumi else {"environment_factory": kind}
        trainer = trl.GRPOTrainer(model, **given, **more)
    else:
        episodes = Dialogue(Task("Again", kind), None, dict, lambda text: text, 2048)
        trainer = trl.GRPOTrainer(model, reward_funcs=episodes.own_reward(), **given)
    play_back(trainer, tokenizer)
    if with_cogumi:
        episodes.attach(trainer)
    model.train()
    return trainer


def play_back(trainer: Any, tokenizer: Any) -> None:
    """Let the sampler write TOKENS tokens, and put a call in their place."""
    call = [*tokenizer(CALL, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def turn(generate: Any, *args: Any, **kwargs: Any) -> Any:
        trainer.generation_config.max_new_tokens = TOKENS
        ids, logps = generate(*args, **kwargs)
        return [list(call) for _ in ids], logps

    wrap_method(trainer, GENERATE_TURN, turn)


def make_rollout(trainer: Any, rows: list[dict[str, Any]]) -> None:
    getattr(trainer, MAKE_ROLLOUT)(rows)


def watch_own_time(trainer: Any, own: OwnTime) -> None:
    """Count what the driver of turns does: all of `rollout_func` but the sampler."""
    trainer.rollout_func = own.ours(trainer.rollout_func)
    setattr(trainer, GENERATE_TURN, own.theirs(getattr(trainer, GENERATE_TURN)))
