"""Runs that must be one run: however a step's eight documents are cut into micro-batches and however they are padded.

Each variant trains the tiny model with LoRA for 24 optimizer steps, two on every rollout, so that the ratio leaves 1 and
the clip acts on the second. Loss, rewards, gradient norm, every sampled completion and the final adapter must agree.

What makes the comparison meaningful, and possible:
- float64 body, head (tests/dense_head.py) and adapter. Different cuts sum in different orders. In fp32 a ratio within 1e-7
  of the clip's bound falls on either side of it, a whole document's gradient comes or goes, and a different token is sampled
  a few steps later.
- SGD (gspo_batches.grpo_trainer): linear in the gradient, so that rounding is not divided by its own size as in Adam.
- The generation batch is 16 whatever the micro-batch. Rollouts are then drawn for the same 16 prompts at once, from the
  same state of torch's generator, and dealt to optimizer steps by one `randperm(16)` (TRL's `shuffle_sequence_dict`).
  A smaller `steps_per_generation` is another run, not another cut of this one.
- No dropout: it draws once per micro-batch from the generator that the sampler also uses.

TRL 1.15 has no packed forward for GRPO. "One at a time" below is its equal: each document goes through the trainer's own
forward alone, without a single padding token, and is put back in its place.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gspo_batches import PROMPTS, even_tokens, grpo_trainer
from transformers import TrainerCallback

pytestmark = pytest.mark.usefixtures("float64_head")
STEPS = 24
TOLERANCE = 1e-7  # 1e-5 is what is promised; RoPE's angles are fp32, and shifting them by the padding leaves about 1e-9
VARIANTS: dict[str, dict[str, Any]] = {
    "1 x 8": {"size": 1},
    "2 x 4": {"size": 2},
    "4 x 2": {"size": 4},
    "one at a time": {"size": 4, "alone": True},
    "multiple of 8": {"size": 4, "pad_to_multiple_of": 8},
    "multiple of 32": {"size": 2, "pad_to_multiple_of": 32},
}
QUICK = [("gspo", "1 x 8"), ("gspo", "one at a time"), ("gspo", "multiple of 32"), ("gspo-length", "1 x 8")]
SWEEP = [(name, variant) for name in ("gspo", "gspo-length") for variant in VARIANTS if (name, variant) not in QUICK]
CASES = [
    QUICK[0],
    *(pytest.param(*case, marks=pytest.mark.slow("a training beside the reference")) for case in QUICK[1:]),
    *(pytest.param(*case, marks=pytest.mark.sweep) for case in SWEEP),
]


@dataclass
class Trajectory(TrainerCallback):
    """What a run did, step by step."""

    losses: list[float] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    completions: list[list[list[int]]] = field(default_factory=list)
    widths: set[tuple[int, ...]] = field(default_factory=set)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.logs.append(dict(logs))

    def column(self, key: str) -> list[float]:
        return [log[key] for log in self.logs if key in log]


def forward_one_at_a_time(trainer: Any) -> None:
    """Each document of a micro-batch through the trainer's own forward alone, without padding."""
    together = trainer._get_per_token_logps_and_entropies

    def alone(model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, **options: Any) -> Any:
        options.pop("batch_size", None)
        rows = []
        for row, present in zip(ids, mask.bool(), strict=True):
            tokens, count = row[present][None], int(present[-width:].sum())
            rows.append((together(model, tokens, torch.ones_like(tokens), count, **options), width - count))

        def stacked(part: int) -> Any:
            if rows[0][0][part] is None:
                return None
            return torch.cat([torch.nn.functional.pad(result[part], (0, missing)) for result, missing in rows])

        return stacked(0), stacked(1), None

    trainer._get_per_token_logps_and_entropies = alone


def trajectory(
    model_path: Path, directory: Path, name: str, steps: int, size: int, alone: bool = False, **values: Any
) -> Trajectory:
    """Train with `size` documents in a micro-batch, 8 in a step and 16 in a rollout."""
    seen = Trajectory()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.completions.append(completion_ids)
        return even_tokens(completion_ids)

    trainer = grpo_trainer(
        model_path,
        directory,
        prompts=PROMPTS * 2,
        dtype=torch.float64,
        lora=True,
        reward=reward,
        loss_type=name,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=8 // size,
        steps_per_generation=16 // size,
        learning_rate=0.1,
        max_steps=steps,
        **values,
    )
    if alone:
        forward_one_at_a_time(trainer)
    trainer.add_callback(seen)
    training_step = trainer.training_step

    def remember(model: Any, inputs: Any, count: Any) -> torch.Tensor:
        loss = training_step(model, inputs, count)
        seen.losses.append(loss.item())
        seen.widths |= {tuple(each[part].shape[1] for part in ("prompt_ids", "completion_ids"))
                        for each in trainer._buffered_inputs}  # fmt: skip
        return loss

    trainer.training_step = remember
    trainer.train()
    seen.losses = torch.tensor(seen.losses, dtype=torch.float64).view(steps, -1).sum(-1).tolist()
    seen.weights = {k: p.detach().clone() for k, p in trainer.model.named_parameters() if p.requires_grad}
    return seen


def differences(one: Trajectory, other: Trajectory) -> dict[str, float]:
    """Largest absolute difference of two runs' losses, logged figures and final adapters.

    TRL's `entropy` is not among them: it averages the micro-batches' token means, so it depends on the cut where
    completions differ in length.
    """
    pairs = {key: (one.column(key), other.column(key)) for key in ("reward", "reward_std", "grad_norm")}
    pairs["loss"] = one.losses, other.losses
    collected = {key: max(abs(a - b) for a, b in zip(*pair, strict=True)) for key, pair in pairs.items()}
    assert one.weights.keys() == other.weights.keys()
    return collected | {"adapter": max((one.weights[k] - other.weights[k]).abs().max().item() for k in one.weights)}


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All eight documents of a step at once, by loss name."""
    made: dict[str, Trajectory] = {}

    def make(name: str) -> Trajectory:
        if name not in made:
            made[name] = trajectory(tiny_model, tmp_path_factory.mktemp("whole"), name, STEPS, size=8)
        return made[name]

    return make


@pytest.mark.parametrize("name", ["gspo", "gspo-length"])
def test_the_reference_run_trains_samples_and_clips(reference: Any, name: str) -> None:
    """Without this the variants could agree on a run in which nothing happens."""
    run = reference(name)
    assert len(run.losses) == STEPS
    assert len(run.completions) == 1 + STEPS // 2  # the reward is tried once before the first rollout
    clipped = run.column("clip_ratio/region_mean")
    assert clipped[::2] == [0.0] * (STEPS // 2)  # the first step on a rollout: R is 1
    assert sum(0 < share < 1 for share in clipped[1::2]) >= STEPS // 4  # the second: some documents, not all
    assert all(weight.dtype == torch.float64 for weight in run.weights.values())
    assert max(weight.abs().max().item() for key, weight in run.weights.items() if "lora_B" in key) > 1e-3
    assert len({len(ids) for rollout in run.completions for ids in rollout}) > 3  # uneven lengths
    assert min(run.column("grad_norm")) > 1e-3


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_cut_or_a_padding_is_the_same_run(
    tiny_model: Path, tmp_path: Path, reference: Any, name: str, variant: str
) -> None:
    run = trajectory(tiny_model, tmp_path, name, STEPS, **VARIANTS[variant])
    expected = reference(name)
    assert run.completions == expected.completions
    actual = differences(run, expected)
    assert max(actual.values()) <= TOLERANCE, actual
    assert run.column("clip_ratio/region_mean") == pytest.approx(expected.column("clip_ratio/region_mean"))
    if "multiple" in variant:
        multiple = VARIANTS[variant]["pad_to_multiple_of"]
        assert all(width % multiple == 0 for widths in run.widths for width in widths)
        assert run.widths != expected.widths


def test_a_loss_that_depends_on_the_cut_is_another_run(tiny_model: Path, tmp_path: Path) -> None:
    """The comparison can fail: `bnpo` divides by the micro-batch's tokens, and drifts apart within two rollouts."""
    whole, cut = (
        trajectory(tiny_model, tmp_path, "bnpo", 4, size, importance_sampling_level="sequence") for size in (8, 2)
    )
    assert differences(whole, cut)["adapter"] > 1e-5
