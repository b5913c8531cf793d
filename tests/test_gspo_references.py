"""GSPO as TRL executes it against independent references: float64 closed forms, Liger's loss, and the real tiny model.

test_gspo.py has the first closed forms and the clip's four quadrants; this file has the length-weighted loss, the clip's
boundary, masks, invariances, off-policy steps and resuming.
"""

import sys
from collections.abc import Callable
from math import exp, inf, log, nextafter
from pathlib import Path
from typing import Any

import pytest
import torch
from gspo_batches import PROMPTS, batch, completion_logps, grpo_trainer, loss_of
from transformers import TrainerCallback
from trl.kernels import ChunkedLogProbFunction

from cogumi.config.presets import preset

EXACT = {"atol": 1e-14, "rtol": 1e-12}
LENGTHS = [7, 3, 5, 1, 6, 2]
DRIFT = [0.0, 2e-3, -2e-3, 5e-3, -5e-3, 5e-3]
ADVANTAGES = torch.tensor([1.0, -0.5, 0.7, 1.3, -1.1, -0.2], dtype=torch.float64)


@pytest.fixture(scope="module")
def trainer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A trainer that is not trained, by its GRPOConfig values; its accumulation is one micro-batch unless told."""
    made: dict[str, Any] = {}

    def make(**values: Any) -> Any:
        key = repr(sorted(values.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp("references")
            made[key] = grpo_trainer(tiny_model, directory, per_device_train_batch_size=2, **values)
        made[key].current_gradient_accumulation_steps = 1
        return made[key]

    return make


def fast_llm(
    new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of Fast-LLM's GSPO, weighted by length, as its sums over documents are written.

    L = -(1/D) sum_s N_s min(R_s A_s, clip(R_s, 1-low, 1+high) A_s) with R_s = exp(sum_t (new-old) / N_s);
    dL/dnew_t = -(1/D) R_s A_s where the clip leaves the document alone: N_s and 1/N_s cancel.
    """
    loss, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(old)
    for s in range(len(old)):
        tokens = mask[s] > 0
        count = int(tokens.sum())
        ratio = torch.exp((new.detach()[s, tokens] - old[s, tokens]).sum() / count)
        clipped = min(max(ratio.item(), 1 - low), 1 + high)
        loss -= count * min(ratio.item() * advantages[s].item(), clipped * advantages[s].item()) / len(old)
        inside = ratio <= 1 + high if advantages[s] > 0 else ratio >= 1 - low
        gradient[s, tokens] = -ratio * advantages[s] * inside / len(old)
    return loss, gradient


@pytest.mark.parametrize("size", [6, 1, 2, 3])
def test_gspo_length_is_fast_llms_loss(trainer: Callable[..., Any], size: int) -> None:
    """Reference 2, over gradient accumulation: D is the step's documents, however they are cut into micro-batches."""
    new, old, mask = batch(LENGTHS, DRIFT)
    gspo_length = trainer(loss_type="gspo-length")
    gspo_length.current_gradient_accumulation_steps = len(new) // size
    parts = [slice(start, start + size) for start in range(0, len(new), size)]
    value = sum(loss_of(gspo_length, new[p], old[p], mask[p], advantages=ADVANTAGES[p]) for p in parts)
    value.backward()
    expected, gradient = fast_llm(new, old, mask, ADVANTAGES, low=3e-3, high=4e-3)
    torch.testing.assert_close(value, expected, **EXACT)
    torch.testing.assert_close(new.grad, gradient, **EXACT)
    assert sorted((gradient != 0).any(-1).tolist()) == [False] * 2 + [True] * 4  # the clip acted, and not everywhere


@pytest.mark.parametrize("generation_tokens", [24, 60])
def test_dapo_at_sequence_level_is_gspo_length_per_token(trainer: Callable[..., Any], generation_tokens: int) -> None:
    """Reference 3: luspo * B / sum|y|.

    TRL's sum|y| is not the step's: it is an optimizer step's share of the generation batch's tokens. The two differ
    when a generation batch is used for several steps and one of them got the long completions (60 tokens in two steps
    is 30 a step, and this one has 24).
    """
    new, old, mask = batch(LENGTHS, DRIFT)
    clip = {"epsilon": 3e-3, "epsilon_high": 4e-3, "importance_sampling_level": "sequence"}
    steps = 1 if generation_tokens == mask.sum() else 2
    dapo = trainer(loss_type="dapo", steps_per_generation=steps, **clip)
    tokens = torch.tensor(generation_tokens)
    value = loss_of(dapo, new, old, mask, advantages=ADVANTAGES, num_items_in_batch=tokens)
    value.backward()
    luspo, gradient = fast_llm(new, old, mask, ADVANTAGES, low=3e-3, high=4e-3)
    scale = len(new) / (generation_tokens / steps)
    torch.testing.assert_close(value, luspo * scale, **EXACT)
    torch.testing.assert_close(new.grad, gradient * scale, **EXACT)


@pytest.mark.parametrize("advantage", [+1.0, -1.0])
@pytest.mark.parametrize("bound", [1 + 4e-4, 1 - 3e-4], ids=["above", "below"])
def test_on_the_clips_boundary_a_sequence_still_counts(
    trainer: Callable[..., Any], bound: float, advantage: float
) -> None:  # reference 5
    """R exactly 1 + epsilon_high or 1 - epsilon: the gradient is the whole -A R / N for both signs of A.

    torch halves a tie of `min` between its two arguments, and `clamp` passes the gradient at its bounds: half and half
    make one. Fast-LLM has the same: R <= 1 + eh and R >= 1 - el.
    """
    assert exp(log(bound)) == bound
    mask = torch.ones(1, 1, dtype=torch.float64)
    advantages = torch.tensor([advantage], dtype=torch.float64)

    def gradient(ratio: float) -> float:
        new = torch.tensor([[log(ratio)]], dtype=torch.float64, requires_grad=True)
        loss_of(trainer(loss_type="gspo"), new, torch.zeros_like(new), mask, advantages=advantages).backward()
        return new.grad.item()

    assert gradient(bound) == -advantage * bound
    # One number further out it is gone where the clip is one-sided, and stays where it is not.
    outside = nextafter(bound, inf if bound > 1 else -inf)
    clipped = (bound > 1) == (advantage > 0)
    assert gradient(outside) == (0.0 if clipped else -advantage * outside)


@pytest.mark.parametrize("name", ["gspo", "gspo-length"])
def test_tokens_of_a_tool_count_neither_in_the_length_nor_in_the_gradient(
    trainer: Callable[..., Any], name: str
) -> None:  # reference 7
    """The loss with a tool's tokens in the middle is the loss of the same rows with those tokens cut out."""
    new, old, mask = batch(LENGTHS, [each / 10 for each in DRIFT])
    written = mask.bool()
    tool = torch.ones_like(mask)
    tool[0, 2:5] = tool[2, 0] = tool[4, 3:] = 0  # in the middle, at the start, at the end
    tool[5, :2] = 0  # a row that the tool wrote alone
    value = loss_of(trainer(loss_type=name), new, old, mask, advantages=ADVANTAGES, tool_mask=tool)
    value.backward()

    kept = written & tool.bool()
    width = int(kept.sum(-1).max())
    cut_mask = torch.arange(width) < kept.sum(-1, keepdim=True)
    cut_new, cut_old = torch.zeros(2, len(mask), width, dtype=torch.float64)
    cut_new[cut_mask], cut_old[cut_mask] = new.detach()[kept], old[kept]
    cut_new.requires_grad_()
    expected = loss_of(trainer(loss_type=name), cut_new, cut_old, cut_mask.double(), advantages=ADVANTAGES)
    expected.backward()

    torch.testing.assert_close(value, expected, **EXACT)
    torch.testing.assert_close(new.grad[kept], cut_new.grad[cut_mask], **EXACT)
    assert (new.grad[~kept] == 0).all()
    without = loss_of(trainer(loss_type=name), new, old, mask, advantages=ADVANTAGES)
    assert abs(without.item() - value.item()) > 1e-4  # and the tool's tokens would have mattered


@pytest.mark.parametrize("name", ["gspo", "gspo-length"])
def test_the_loss_does_not_depend_on_padding_or_on_the_rows_order(trainer: Callable[..., Any], name: str) -> None:
    """Reference 8, on log-probabilities."""
    new, old, mask = batch(LENGTHS, DRIFT)
    value = loss_of(trainer(loss_type=name), new, old, mask, advantages=ADVANTAGES)
    (gradient,) = torch.autograd.grad(value, new)

    order = torch.randperm(len(new), generator=torch.Generator().manual_seed(1))
    permuted = loss_of(trainer(loss_type=name), new[order], old[order], mask[order], advantages=ADVANTAGES[order])
    torch.testing.assert_close(permuted, value, **EXACT)
    torch.testing.assert_close(torch.autograd.grad(permuted, new)[0], gradient, **EXACT)

    def padded(x: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 9), value=fill)

    wider = loss_of(
        trainer(loss_type=name), padded(new, -50.0), padded(old, 3.0), padded(mask, 0.0), advantages=ADVANTAGES
    )
    torch.testing.assert_close(wider, value, **EXACT)
    torch.testing.assert_close(torch.autograd.grad(wider, new)[0], gradient, **EXACT)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_ligers_loss_agrees(
    trainer: Callable[..., Any], liger: Any, loss_type: str, temperature: float
) -> None:  # reference 13
    """The same hidden states and head through Liger's pure PyTorch loss, and through TRL's head and loss."""
    generator = torch.Generator().manual_seed(3)
    lengths, hidden_size, vocabulary = torch.tensor([9, 4, 1, 6]), 32, 97
    mask = (torch.arange(9) < lengths[:, None]).long()
    ids = torch.randint(vocabulary, mask.shape, generator=generator)
    hidden = torch.randn(*mask.shape, hidden_size, generator=generator)
    head = torch.randn(vocabulary, hidden_size, generator=generator) * 0.3
    advantages = torch.tensor([1.0, -0.6, 0.4, -1.2])
    shift = torch.tensor([0.0, 2e-3, 6e-3, -6e-3])[:, None]  # two of four sequences end up outside the clip
    clip = {"epsilon": 3e-3, "epsilon_high": 4e-3, "importance_sampling_level": "sequence"}
    theirs = trainer(loss_type=loss_type, temperature=temperature, **clip)

    ours = hidden.clone().requires_grad_()
    flat = ours.view(-1, hidden_size), head, None, ids.view(-1), temperature, 32768
    new = ChunkedLogProbFunction.apply(*flat)[0].view(mask.shape)
    old = new.detach() - shift
    extra = {"advantages": advantages, "num_items_in_batch": mask.sum()}
    value = loss_of(theirs, new, old, mask, **extra)
    value.backward()

    settings = {"loss_type": loss_type, "temperature": temperature, "importance_sampling_level": "sequence"}
    settings |= {"epsilon_low": 3e-3, "epsilon_high": 4e-3, "max_completion_length": theirs.max_completion_length}
    oracle = liger(beta=0.0, use_ref_model=False, compiled=False, **settings)
    other = hidden.clone().requires_grad_()
    expected, (*_, clipped) = oracle(other, head, ids, mask, advantages, old_per_token_logps=old)
    expected.backward()

    torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours.grad, other.grad, atol=1e-6, rtol=1e-5)
    assert ours.grad.abs().max() > 1e-3
    assert clipped.item() == pytest.approx((1 + 6) / 20)


@pytest.fixture(scope="module")
def liger() -> Any:
    """Liger's loss, from where `requirements/install.sh test` puts it: it declares Triton, and this loss uses none."""
    oracles = Path(__file__).parents[1] / ".venv" / "oracles"
    assert oracles.is_dir(), "no Liger: run `sh requirements/install.sh test`"
    sys.path.append(str(oracles))
    try:
        from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss
    finally:
        sys.path.remove(str(oracles))
    return LigerFusedLinearGRPOLoss


class Gradients(TrainerCallback):
    """The model's gradients as each optimizer step found them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.steps.append({k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None})


@pytest.mark.usefixtures("float64_head")
@pytest.mark.parametrize(("name", "temperature"), [("gspo", 1.0), ("gspo", 0.7), ("gspo-length", 1.0)])
def test_the_second_step_on_one_rollout_is_off_policy(
    tiny_model: Path, tmp_path: Path, name: str, temperature: float
) -> None:
    """Reference 16: its loss and gradient are a hand-written step's on the log-probabilities stored at the rollout."""
    by_hand: list[tuple[float, dict[str, torch.Tensor], torch.Tensor]] = []
    rollouts: list[torch.Tensor] = []
    losses: list[float] = []
    values = preset(name)

    class ByHand(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.global_step == 1:
                by_hand.append(self.step(model, trainer._buffered_inputs[2:]))

        def step(self, model: Any, halves: list[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
            documents = {key: torch.cat([h[key] for h in halves]) for key in halves[0] if halves[0][key].ndim}
            new = completion_logps(model, documents, temperature)
            mask, advantages = documents["completion_mask"], documents["advantages"].double()
            counts = mask.sum(-1)
            drift = new - documents["old_per_token_logps"]
            ratio = torch.exp((drift * mask).sum(-1) / counts)
            bounded = ratio.clamp(1 - values["epsilon"], 1 + values["epsilon_high"])
            objective = torch.minimum(ratio * advantages, bounded * advantages)
            if name == "gspo-length":
                objective = objective * counts
            loss = -objective.mean()
            names, parameters = zip(*((k, p) for k, p in model.named_parameters() if p.requires_grad), strict=True)
            return loss.item(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)), ratio.detach()

    trainer = grpo_trainer(
        tiny_model,
        tmp_path,
        dtype=torch.float64,
        loss_type=name,
        temperature=temperature,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        learning_rate=10 * values["epsilon"],  # moves R about as far as the clip is wide
        max_steps=2,
    )
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.add_callback(ByHand())
    training_step = trainer.training_step

    def remember(model: Any, inputs: Any, count: Any) -> torch.Tensor:
        if not rollouts:
            loss = training_step(model, inputs, count)
            rollouts.append(completion_logps(model, trainer._buffered_inputs[3], temperature).detach())
        else:
            loss = training_step(model, inputs, count)
        losses.append(loss.item())
        return loss

    trainer.training_step = remember
    trainer.train()

    ((loss, expected, ratio),) = by_hand
    low, high = values["epsilon"], values["epsilon_high"]
    assert ((ratio < 1 - low) | (ratio > 1 + high)).any()  # the clip has something to do
    assert ((ratio > 1 - low) & (ratio < 1 + high)).any()
    stored = trainer._buffered_inputs[3]["old_per_token_logps"]
    mask = trainer._buffered_inputs[3]["completion_mask"].bool()
    torch.testing.assert_close(stored[mask], rollouts[0][mask], atol=1e-12, rtol=0)  # the policy that sampled
    assert sum(losses[2:]) == pytest.approx(loss, abs=1e-12)
    actual = gradients.steps[1]
    for key in expected:
        torch.testing.assert_close(actual[key], expected[key], atol=1e-12, rtol=1e-9)


# ----------------------------------------------------------------------------------------------------- TRL's KL correction


def expected_kl_gradient(trainer: Any, logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The gradient of TRL's KL term at `logits` (N, V), in expectation over all V^N sequences of the policy itself."""
    length, vocabulary = logits.shape
    sequences = torch.cartesian_prod(*[torch.arange(vocabulary)] * length)
    log_p, log_q = logits.log_softmax(-1), reference.log_softmax(-1)
    drawn = sequences[:, :, None]
    new = log_p.expand(len(sequences), -1, -1).gather(2, drawn).squeeze(2)
    ref = log_q.expand(len(sequences), -1, -1).gather(2, drawn).squeeze(2)
    asked = new.detach().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (asked, torch.zeros_like(asked), None)
    ones = torch.ones_like(sequences)
    inputs = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), ones)
    inputs |= {"advantages": torch.zeros(len(sequences)), "ref_per_token_logps": ref.detach()}
    trainer.compute_loss(trainer.model, inputs | {"old_per_token_logps": asked.detach()}).backward()
    chance = new.detach().sum(-1, keepdim=True).exp()
    (gradient,) = torch.autograd.grad((new * asked.grad * chance * len(sequences)).sum(), logits)
    return gradient


def test_what_trls_kl_correction_is_worth(tiny_model: Path, tmp_path: Path) -> None:
    """Exactly the reverse KL with a token's ratio; with a sequence's, 1/N of the way there from the forward KL."""
    generator = torch.Generator().manual_seed(0)
    length, vocabulary, beta = 4, 3, 0.5
    logits = torch.randn(length, vocabulary, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = logits.detach() + 0.5 * torch.randn(length, vocabulary, generator=generator, dtype=torch.float64)
    log_p, log_q = logits.log_softmax(-1), reference.log_softmax(-1)
    reverse, forward = (
        torch.autograd.grad(beta * kl / length, logits, retain_graph=True)[0]
        for kl in ((log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum())
    )
    assert (reverse - forward).abs().max() > 0.05 * reverse.abs().max()  # far enough apart to tell

    def gradient(loss_type: str, corrected: bool) -> torch.Tensor:
        trainer = grpo_trainer(
            tiny_model, tmp_path, loss_type=loss_type, beta=beta, use_bias_correction_kl=corrected, lora=True
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        return expected_kl_gradient(trainer, logits, reference)

    exactly = {"atol": 1e-14, "rtol": 1e-10}
    torch.testing.assert_close(gradient("gspo", False), forward, **exactly)
    torch.testing.assert_close(gradient("gspo", True), forward + (reverse - forward) / length, **exactly)
    torch.testing.assert_close(gradient("grpo", True), reverse, **exactly)


class Resumable:
    """Eight optimizer steps, a rollout of two prompts every two of them, and what the reward function was asked."""

    def __init__(self, tiny_model: Path, directory: Path, save_steps: int, **values: Any):
        self.seen: list[tuple[str, ...]] = []
        self.completions: list[list[str]] = []

        def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
            self.seen.append(tuple(prompts))
            self.completions.append(list(completions))
            return [float(len(c)) for c in completions]

        self.directory = directory
        self.trainer = grpo_trainer(
            tiny_model,
            directory,
            reward=reward,
            loss_type="grpo",  # TRL's words: cogumi refuses a misaligned save_steps for its own names
            importance_sampling_level="sequence",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            steps_per_generation=2,
            learning_rate=0.1,
            save_strategy="steps",
            save_steps=save_steps,
            **{"max_steps": 8, **values},
        )

    def run(self, step: int | None = None) -> "Resumable":
        self.trainer.train(resume_from_checkpoint=str(self.directory / f"checkpoint-{step}") if step else None)
        return self


def test_an_aligned_resume_continues_with_the_next_rollout(tiny_model: Path, tmp_path: Path) -> None:  # reference 18
    whole = Resumable(tiny_model, tmp_path, save_steps=4).run()
    assert len(whole.seen) == 4
    assert len(set(whole.seen)) == 4
    resumed = Resumable(tiny_model, tmp_path, save_steps=4).run(4)
    assert resumed.seen == whole.seen[2:]
    assert resumed.completions == whole.completions[2:]


def test_a_misaligned_resume_does_not(tiny_model: Path, tmp_path: Path) -> None:  # reference 18
    """Saved between two steps of one rollout: it is paid for again, at the wrong step, as are all that follow."""
    whole = Resumable(tiny_model, tmp_path, save_steps=3).run()
    resumed = Resumable(tiny_model, tmp_path, save_steps=3).run(3)
    assert resumed.seen[0] == whole.seen[1]
    assert resumed.seen != whole.seen[2:]


def test_after_an_epoch_even_an_aligned_resume_repeats_the_first_epochs_order(tiny_model: Path, tmp_path: Path) -> None:
    """A limit of TRL 1.15: its sampler draws each epoch's order from one generator, which a resume starts afresh."""
    few = PROMPTS[:6]  # three rollouts, six steps
    whole = Resumable(tiny_model, tmp_path, save_steps=6, prompts=few, max_steps=12).run()
    resumed = Resumable(tiny_model, tmp_path, save_steps=6, prompts=few, max_steps=12).run(6)
    assert whole.seen[:3] != whole.seen[3:]
    assert resumed.seen == whole.seen[:3]
