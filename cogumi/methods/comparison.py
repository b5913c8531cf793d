"""What several models write for the same held-out prompts: base, SFT and GSPO, scored by exact match and edit similarity."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rapidfuzz.distance import Levenshtein

from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.data.chat_templates import read_template
from cogumi.methods.examples import prepare_examples
from cogumi.models.completion import complete_with_ends
from cogumi.models.loading import load_model, load_tokenizer, resolve_model

log = logging.getLogger(__name__)
BATCH = 50  # prompts that are completed at once
ANSWERS = ("answer", "middle")


@dataclass(frozen=True)
class Comparison:
    """prompts: what is asked, without the chat template; answers: what would be right; written: greedy completions by name."""

    prompts: list[str]
    answers: list[str]
    written: dict[str, list[str]]

    def exact(self, name: str) -> float:
        """The share of completions that equal the answer, without surrounding white space."""
        pairs = zip(self.written[name], self.answers, strict=True)
        return sum(text.strip() == answer.strip() for text, answer in pairs) / len(self.answers)

    def similarity(self, name: str) -> float:
        """Mean of 1 - Levenshtein(completion, answer) / max(len), in 0..1, as the rewards of that name have it."""
        pairs = zip(self.written[name], self.answers, strict=True)
        return sum(Levenshtein.normalized_similarity(a.strip(), b.strip()) for a, b in pairs) / len(self.answers)

    def shown(self, count: int) -> range:
        """The rows to show, whatever was answered: evenly spaced, as neighbours are often of one source file."""
        return range(0, len(self.prompts), max(1, len(self.prompts) // count))[:count]


def compare_models(
    models: Mapping[str, str], config: str | os.PathLike[str] | Mapping[str, Any], rows: int = 200, **overrides: Any
) -> Comparison:
    """Complete the first `rows` held-out prompts of a GSPO config with each model, greedily, on this machine.

    models: directories or hub ids by the name they get in the result. The prompts are rendered as for the last of them.
    Raises UsageError where the config holds out no rows, or where these have no column that would be the answer.
    """
    run = load_config(config, **overrides)
    paths = {name: resolve_model(each) for name, each in models.items()}
    tokenizer = load_tokenizer([*paths.values()][-1])
    held_out = prepare_examples(run, tokenizer).held_out
    if held_out is None:
        raise UsageError("no rows are held out", key="data.eval_rows", fix="set it to 100 or more")
    examples = held_out.dataset.select(range(min(rows, len(held_out.dataset))))
    column = next((each for each in ANSWERS if each in examples.column_names), None)
    if column is None:
        what = f"held-out rows have no column {' or '.join(ANSWERS)}"
        raise UsageError(what, key="data.source", fix="compare on data with a known answer")
    rendered, asked = list(examples["prompt"]), list(examples["prompt"])
    if not (plain := isinstance(rendered[0], str)):
        template = read_template(tokenizer, run.cogumi.thinking)
        rendered, asked = [template.prompt(each) for each in rendered], [each[-1]["content"] for each in asked]
    ids = tokenizer(rendered, add_special_tokens=plain)["input_ids"]
    written = {name: complete_all(path, tokenizer, ids, run) for name, path in paths.items()}
    return Comparison(asked, list(examples[column]), written)


def complete_all(path: str, tokenizer: Any, prompts: list[list[int]], run: Any) -> list[str]:
    model, longest = load_model(path), run.train["max_completion_length"]
    log.info("%s completes %s prompts", path, len(prompts))
    parts = [prompts[first : first + BATCH] for first in range(0, len(prompts), BATCH)]
    return [text for part in parts for text, _ in complete_with_ends(model, tokenizer, part, longest, run.cogumi.stop)]
