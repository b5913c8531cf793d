"""What a trainer's weights say of a rollout in float64: log-probabilities, the most probable tokens, what a cut leaves."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

TEMPERATURE = 0.7  # of the rollouts, where nothing else is said


class Exact:
    """The trainer's model in float64, and what it says of a rollout."""

    def __init__(self, trainer: Any) -> None:
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(trainer.model.config.name_or_path, dtype=torch.float64)
        self.model = get_peft_model(base, trainer.model.peft_config["default"]).double().eval()
        self.model.load_state_dict(trainer.model.state_dict())

    @torch.no_grad()
    def logits(
        self, found: dict[str, Any], bias: dict[int, float] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(logits (T, V), ids (T,)) of each completion's learned tokens."""
        for prompt, ids, learned in zip(found["prompts"], found["ids"], found["learned"], strict=True):
            whole = torch.tensor([prompt + ids])
            logits = self.model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
            for token, value in (bias or {}).items():
                logits[:, token] += value
            kept = torch.tensor(learned).bool()
            yield logits[kept], torch.tensor(ids)[kept]

    def difference(
        self, found: dict[str, Any], bias: dict[int, float] | None = None, temperature: float = TEMPERATURE
    ) -> float:
        """The largest difference of the sampler's log-probabilities from these at a temperature, in nats."""
        away = 0.0
        for (logits, ids), given, learned in zip(
            self.logits(found, bias), found["logps"], found["learned"], strict=True
        ):
            logps = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
            sampled = torch.tensor(given, dtype=torch.float64)[torch.tensor(learned).bool()]
            away = max(away, float((logps - sampled).abs().max()))
        return away

    def missed(self, found: dict[str, Any], gap: float) -> int:
        """Tokens whose logits are more than `gap` below the largest."""
        rows = ((logits.amax(-1) - logits.gather(1, ids[:, None])[:, 0]) for logits, ids in self.logits(found))
        return sum(int((below > gap).sum()) for below in rows)

    @torch.no_grad()
    def outside(self, found: dict[str, Any], cut: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """Tokens outside of what `cut` leaves of the probabilities (V,) at the temperature: a mask (V,)."""
        rows = [(row, token) for logits, ids in self.logits(found) for row, token in zip(logits, ids, strict=True)]
        return sum(not cut((row / TEMPERATURE).softmax(-1))[token] for row, token in rows)


def before_in_order(p: torch.Tensor) -> torch.Tensor:
    """(V,) the probability of all that is more probable than each entry."""
    ordered, order = p.sort(descending=True)
    return torch.zeros_like(p).scatter(0, order, ordered.cumsum(0) - ordered)
