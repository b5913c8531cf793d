"""The reward of held-out prompts before and after a GSPO run. Its rollouts have other prompts each, which hides a change."""

import inspect
import logging
from typing import Any

import numpy as np

from cogumi.config.schema import RunConfig
from cogumi.core.errors import best_effort
from cogumi.core.run_directory import DECISIONS, jsonable_numbers, read_section, write_section
from cogumi.evaluation.comparison import complete, read_held_out, score_written
from cogumi.evaluation.paired import MIN_ROWS, compare_paired
from cogumi.evaluation.reward_scores import read_rewards, read_weights
from cogumi.health.data_checks import count_planned_examples
from cogumi.health.verdict import Check
from cogumi.methods.examples import CHANGED, DATA, Examples
from cogumi.telemetry.recorder import preserve_rng_and_mode

log = logging.getLogger("cogumi")
NAME, SECTION = "held-out reward", "held_out_reward"
PAID_SHARE = 0.05  # of the number of completions that the run trains on, which cost more each
MAX_PROMPTS = 200


def count_prompts(run: RunConfig, trainer: Any, examples: Examples) -> int:
    """Return how many held-out prompts a run can afford; 0 if too few to tell, or if it is compared otherwise.

    A sampler of its own, several processes and environments are left out, as are rewards that await a server.
    """
    options = run.cogumi
    if options.method != "gspo" or examples.held_out is None or options.compare_with or options.environment:
        return 0
    if run.train.get("use_vllm") or trainer.accelerator.num_processes > 1:
        return 0
    count = min(MAX_PROMPTS, len(examples.held_out.dataset), int(PAID_SHARE * count_planned_examples(trainer)))
    is_async = any(map(inspect.iscoroutinefunction, read_rewards(run)))
    return 0 if count < MIN_ROWS or is_async else count


def score_prompts(run: RunConfig, model: Any, tokenizer: Any, examples: Examples, count: int) -> list[float]:
    """Return the weighted reward of a greedy completion of each of the first `count` held-out prompts."""
    prompts, ids, columns = read_held_out(run, examples, tokenizer, count)
    rewards, length = read_rewards(run), run.setting("max_completion_length")
    with preserve_rng_and_mode(model):
        written = complete(model, tokenizer, ids, length, run.cogumi.stop)
        return score_written(run, (rewards, read_weights(run, rewards)), written, prompts, columns)


def record_before(run: RunConfig, trainer: Any, tokenizer: Any, examples: Examples) -> None:
    """Score held-out prompts before the first step, if the run can afford it, and keep that in decisions.json."""
    with best_effort("score held-out prompts"):
        if count := count_prompts(run, trainer, examples):
            before = score_prompts(run, trainer.model, tokenizer, examples, count)
            write_section(run.run_dir / DECISIONS, SECTION, jsonable_numbers({"before": before}))
            log.info("held-out reward of %d prompts before the first step: %.4g", count, np.nanmean(before))


def check_after(run: RunConfig, model: Any, tokenizer: Any, examples: Examples) -> list[Check]:
    """Score the prompts of `record_before` again and compare; no check without them."""
    before = [float(reward) for reward in read_section(run.run_dir / DECISIONS, SECTION).get("before", ())]
    after: list[float] = []
    if before and not read_section(run.run_dir / DECISIONS, DATA).get(CHANGED):
        with best_effort("score held-out prompts"):
            after = score_prompts(run, model, tokenizer, examples, len(before))
    pair = compare_paired(before[: len(after)], after)
    if not pair.rows:
        return []
    means = [np.nanmean(rewards) for rewards in (before, after)]
    figure = f"{means[0]:.4g} before, {means[1]:.4g} after, {pair}, greedy answers to {pair.rows} prompts"
    fix = "train longer, or hold out more rows (data.eval_rows), which tells smaller differences"
    if pair.verdict == "worse":
        fix = "lower train.learning_rate, or take an earlier adapter of checkpoints/adapters"
    is_clear = pair.verdict in ("better", "worse")
    return [Check(NAME, figure, "not worse", pair.verdict != "worse", fix, warning=not is_clear)]
