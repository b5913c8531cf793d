"""Policy losses by name (`train.loss_type`), each with the source of its numbers.

A preset is a set of TRL's own GRPOConfig values, which the config's own keys override. Values equal to TRL's defaults
are spelled out too, because unsloth's generated config has others, such as a KL term and learning rate 5e-5.
"""

from typing import Any


def _values(loss_type: str, level: str, **values: Any) -> dict[str, Any]:
    spelled_out = {"importance_sampling_level": level, "beta": 0.0, "scale_rewards": "group", "delta": None}
    spelled_out |= {"mask_truncated_completions": False}
    return {"loss_type": loss_type, **spelled_out, **values}


PRESETS: dict[str, dict[str, Any]] = {
    # Mean over sequences of the clipped sequence ratio times the advantage: Zheng et al. 2025, arXiv:2507.18071, equation 5;
    # epsilons of section 5.1.
    "gspo": _values("grpo", "sequence", epsilon=3e-4, epsilon_high=4e-4),
    # gspo, each sequence weighted by its length: Fast-LLM's and LUSPO's sum (arXiv:2602.05261; epsilons of Fast-LLM's recipe).
    "gspo-length": _values("luspo", "sequence", epsilon=3e-3, epsilon_high=4e-3),
    # Token ratios, mean over each sequence, then over sequences; a KL term: Shao et al. 2024, arXiv:2402.03300, equation 3.
    "grpo": _values("grpo", "token", beta=0.04, epsilon=0.2, epsilon_high=0.2),
    # Sums divided by a constant, advantages not divided by the group's deviation: Liu et al. 2025, arXiv:2503.20783.
    "dr_grpo": _values("dr_grpo", "token", scale_rewards="none", epsilon=0.2, epsilon_high=0.2),
    # Averaged over all tokens of the step, a higher upper clip: Yu et al. 2025, arXiv:2503.14476.
    "dapo": _values("dapo", "token", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=True),
    # REINFORCE weighted by the token ratio, capped and detached: MiniMax 2025, arXiv:2506.13585; cap of arXiv:2510.13786.
    "cispo": _values("cispo", "token", epsilon=0.2, epsilon_high=5.0),
}

# Corrections for the difference between vLLM's log-probabilities and the trainer's, by `cogumi.sampler_correction`: a weight
# trainer / sampler on the loss, truncated or masked. Its bounds are `vllm_importance_sampling_clip_min` and `_max`.
CORRECTIONS: dict[str, dict[str, Any]] = {
    # Each token's weight, at most C: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    "tis": {"mode": "token_truncate", "clip_min": None, "clip_max": 2.0},
    # Each token's weight, 0 outside of both bounds: IcePop of Ling Team 2025, arXiv:2510.18855.
    "icepop": {"mode": "token_mask", "clip_min": 0.5, "clip_max": 5.0},
    # The whole completion's weight, 0 above C: Liu et al. 2025, "When speed kills stability", with TRL 1.15's own C.
    "mis": {"mode": "sequence_mask", "clip_min": None, "clip_max": 3.0},
    "none": {"correction": False},
}
CORRECTION = "vllm_importance_sampling_"

# The names TRL does not know. The others mean TRL's own loss in a script and the preset in a run's YAML.
OURS = ("gspo", "gspo-length")
# The one removed name that TRL does not know either; sapo, vespo, bnpo and luspo are TRL's own losses.
REMOVED = {"gspo-token": "gspo, which is the same where advantages do not vary along a completion"}


def preset(name: str) -> dict[str, Any]:
    """Return keyword arguments for `trl.GRPOConfig(**preset("dapo"), ...)`. Raises KeyError for an unknown name."""
    return {**PRESETS[name], **({"loss_type": name} if name in OURS else {})}
