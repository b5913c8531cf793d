"""Rules for preference pairs (DPO): is the chosen answer told from the rejected one, and at what price."""

import math
import statistics

from cogumi.training.belonging import students_t
from cogumi.training.flags import Answers, Flag, Level, Rule, Run
from cogumi.training.flags_sft import BELONGS, TELLS, TOGETHER, TREND_STEPS, learned_tokens, loss_trend, padding
from cogumi.training.trend import trend

ENOUGH_ROWS = 10
COIN = 2.0  # standard deviations within which an accuracy is a coin's
ABOVE = 3.0  # Student's t from which a loss is above log 2: it is asked at every fifth step
BOTH = 0.3  # correlation from which both answers of a pair are about their prompt


def preferences(run: Run) -> Flag | None:
    """Accuracy on pairs not trained on yet, in the second half of the steps: better than a coin?

    The loss of a model that has not moved is log 2 (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). A coin's accuracy is
    of pairs that are mixed up, of a rate too low, or of a model that cannot tell them yet, and the loss is near log 2 in
    all three. Red where something shows which: by their words, one answer of a pair is its prompt's and as often the
    rejected one; or the loss is above log 2 beyond chance, so that what was learned of some pairs is wrong for others.
    """
    steps = run.series("rewards/accuracies")[0]
    if len(steps) < ENOUGH_ROWS or steps[-1] < TREND_STEPS:
        return None
    half = [row for row in run.rows if int(row["step"]) > steps[-1] // 2]
    right = statistics.fmean(run.series("rewards/accuracies", half)[1])
    losses = run.series("loss", half)[1]
    loss, answers = statistics.fmean(losses), None if run.batches is None else run.batches.answers
    pairs = run.setting.examples_per_step * (steps[-1] - steps[-1] // 2)
    z = (right - 0.5) / (0.5 / math.sqrt(pairs))
    evidence = (
        f"{right:.1%} of some {pairs} pairs right in steps {steps[-1] // 2 + 1} to {steps[-1]} (z = {z:.1f}), "
        f"loss {loss:.3f}"
    )
    level: Level = "green" if z > COIN else "yellow"
    cause, knob = (
        "the answers are not told apart yet",
        "train.learning_rate, higher",
    )
    if z <= COIN:
        # Other losses than the sigmoid start elsewhere.
        above = students_t([each - math.log(2) for each in losses]) if run.setting.loss == "sigmoid" else 0.0
        if above > ABOVE and loss > math.log(2) * (1 + run.thresholds.loss_rise):
            level, cause = "red", "the learning rate is too high, so margins swing either way"
            knob = "train.learning_rate, to a tenth"
        elif (answers is not None and are_mixed_up(answers)) or (above > ABOVE and not tell_apart(answers)):
            level, cause = "red", "chosen and rejected are mixed up, or differ by nothing that can be learned"
            knob = "data.columns"
        if answers is not None:
            evidence += f"; {answers.pairs} chosen answers share more words with their prompts with t = {answers.t:.1f}"
    threshold = f"more than a coin (z > {COIN:g}), red with a loss above log 2 or words that say why"
    return Flag("preferences", level, evidence, threshold, cause, knob)


def tell_apart(answers: Answers | None) -> bool:
    return answers is not None and answers.t >= BELONGS


def are_mixed_up(answers: Answers) -> bool:
    """Whether one answer of each pair belongs to its prompt, and is as often the rejected one as the chosen."""
    return abs(answers.t) < TELLS and answers.t_either >= TOGETHER and answers.together < BOTH


def chosen_likelihood(run: Run) -> Flag | None:
    """Whether the chosen answers become less likely, with the rejected ones (Razin et al. 2024, arXiv:2410.08847)."""
    steps, values = run.series("logps/chosen")
    if len(values) < ENOUGH_ROWS:
        return None
    found = trend(steps, values)
    change, start = found.change(steps), statistics.median(values[:3])
    falls = found.z < -run.thresholds.trend_z and change < -0.2 * abs(start)
    return Flag(
        "chosen likelihood",
        "yellow" if falls else "green",
        f"log-probability {start:.4g} at first, changed by {change:.3g} to step {steps[-1]} (z = {found.z:.1f})",
        "not down by a fifth",
        "both answers become unlikely, and only the margin grows",
        "train.beta, higher",
    )


DPO: tuple[Rule, ...] = (learned_tokens, padding, loss_trend, preferences, chosen_likelihood)
