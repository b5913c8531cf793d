"""The sampler's own log-probabilities as the old ones, in a real GRPOTrainer, against float64 recomputations."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gspo_batches import grpo_trainer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from cogumi.core.errors import UsageError
from cogumi.patches.trl_internals import wrap_method
from cogumi.rl.sampling import SampledLogps, record_logps, use_rollout_logps

LOW, HIGH = 3e-4, 4e-4
# Of different token lengths, so that the rows of a batch are padded on the left.
PROMPTS = ["def f(x):", "import os\nimport sys\n\ndef main(argv, out):", "x", "class A:\n    def __init__(self):"]


@pytest.fixture
def build(tiny_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """A GRPOTrainer on the tiny model in fp32, whose head is scaled so that its logits are not near zero."""

    def built(rollout_func: Any = None, ends_early: bool = True, **settings: Any) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        with torch.no_grad():
            model.lm_head.weight.mul_(12)
            if ends_early:  # EOS is likely in some places, so that completions end before others
                model.lm_head.weight[AutoTokenizer.from_pretrained(tiny_model).eos_token_id].mul_(6)
        loss = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": LOW, "epsilon_high": HIGH}
        step = {"per_device_train_batch_size": 8, "max_completion_length": 12, "temperature": 0.7, "max_steps": 2}
        step |= {"optim": "adamw_torch", "max_grad_norm": 1.0, "learning_rate": 1e-5, "seed": 1}
        return grpo_trainer(
            tiny_model,
            tmp_path / "trainer",
            PROMPTS * 4,
            reward=lambda completion_ids, **_: [float(sum(ids) % 5) for ids in completion_ids],
            model=model,
            rollout_func=rollout_func,
            **loss | step | settings,
        )

    return built


def rollout(trainer: Any) -> dict[str, Any]:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [{"prompt": prompt} for prompt in PROMPTS for _ in range(2)]
    return trainer._generate_and_score_completions(rows)


def recomputed(model: Any, batch: dict[str, Any], temperature: float) -> Tensor:
    """(B, T) log-softmax(logits / T) of the completion tokens, one unpadded sequence at a time, in float64."""
    model = copy.deepcopy(model)
    vars(model).pop("forward", None)  # TRL's, which would run the original's weights
    model = model.double().eval()
    result = torch.zeros(batch["completion_ids"].shape, dtype=torch.float64)
    for i, (prompt, completion) in enumerate(zip(batch["prompt_ids"], batch["completion_ids"], strict=True)):
        prompt = prompt[batch["prompt_mask"][i].bool()]
        completion = completion[batch["completion_mask"][i].bool()]
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        logps = torch.log_softmax(logits / temperature, dim=-1)
        result[i, : len(completion)] = logps.gather(1, completion[:, None]).squeeze(1)
    return result


def new_logps(trainer: Any, batch: dict[str, Any]) -> Tensor:
    ids, mask = (torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask"))
    score, width = trainer._get_per_token_logps_and_entropies, batch["completion_ids"].size(1)
    return score(trainer.model, ids, mask, width, compute_entropy=True)[0]


def sequence_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return torch.exp(((new - old) * mask).sum(-1) / mask.sum(-1))


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def closed_form(new: Tensor, batch: dict[str, Any], old: Tensor) -> Tensor:
    """GSPO's loss, arXiv:2507.18071 equation 5, in float64."""
    ratio = sequence_ratio(new.double(), old.double(), batch["completion_mask"])
    advantages = batch["advantages"].double()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages).mean()


# ------------------------------------------------------------------------------------------- what `generate` drew with


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_recorded_logps_are_the_samplers(build: Callable[..., Any], temperature: float) -> None:
    """Parity with Fast-LLM: TRL divides the logits by the sampling temperature before the new log-probabilities, too."""
    trainer = build(temperature=temperature)
    use_rollout_logps(trainer)
    batch = rollout(trainer)
    mask = batch["completion_mask"].bool()
    lengths = mask.sum(1)
    assert len(set(lengths.tolist())) > 2, "uneven completions, or padding is not tested"
    ended = batch["completion_ids"].gather(1, lengths[:, None] - 1).squeeze(1) == trainer.eos_token_ids[0]
    assert (ended & (lengths < 12)).any()
    assert (~ended & (lengths == 12)).any()
    assert len({int(n) for n in batch["prompt_mask"].sum(1)}) > 2

    old = batch["old_per_token_logps"]
    assert old.shape == batch["completion_ids"].shape
    assert old[~mask].eq(0).all()
    exact = recomputed(trainer.model, batch, temperature)
    assert largest((old - exact)[mask]) < 1e-5
    assert largest((new_logps(trainer, batch) - exact)[mask]) < 1e-5
    assert exact[mask].std() > 0.5, "log-probabilities that hardly vary would hide a token taken from the wrong place"


def test_the_ratio_starts_at_one_and_moves_after_a_step(build: Callable[..., Any]) -> None:
    trainer = build()
    use_rollout_logps(trainer)
    batch = rollout(trainer)
    old, mask = batch["old_per_token_logps"], batch["completion_mask"]

    new = new_logps(trainer, batch)
    assert largest((new - old)[mask.bool()]) < 1e-5
    assert largest(sequence_ratio(new, old, mask) - 1) < 1e-5
    # The oracle's old log-probabilities come from the float64 model, not from what was recorded.
    exact = closed_form(new, batch, recomputed(trainer.model, batch, 0.7))
    assert trainer._compute_loss(trainer.model, batch).item() == pytest.approx(exact.item(), abs=1e-5)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    optimizer.step()
    moved = sequence_ratio(new_logps(trainer, batch), old, mask).detach()
    assert largest(moved - 1) > HIGH
    # The closed form, where the ratio is not 1 and some sequences are clipped.
    assert batch["old_per_token_logps"] is old, "the loss must not replace what the rollout recorded"
    exact = closed_form(new_logps(trainer, batch), batch, old)
    assert trainer._compute_loss(trainer.model, batch).item() == pytest.approx(exact.item(), abs=1e-6)


def test_trains_with_more_than_one_step_per_rollout(build: Callable[..., Any]) -> None:
    """Through TRL's shuffling and splitting of a rollout: the old log-probs stay with their sequences."""
    trainer = build(per_device_train_batch_size=4, steps_per_generation=2, num_iterations=2, max_steps=4)
    use_rollout_logps(trainer)
    ratios: list[float] = []
    compute_loss = trainer._compute_loss

    def and_ratio(model: Any, inputs: dict[str, Any]) -> Tensor:
        ratio = sequence_ratio(
            new_logps(trainer, inputs).detach(), inputs["old_per_token_logps"], inputs["completion_mask"]
        )
        ratios.append(largest(ratio - 1))
        return compute_loss(model, inputs)

    trainer._compute_loss = and_ratio
    trainer.train()
    assert ratios[0] < 1e-5
    # A rollout may earn one reward throughout, and then moves nothing: which one depends on the sample's texts.
    assert max(ratios[1:]) > 1e-5, ratios
    assert max(ratios) < 0.5, ratios
    assert trainer.state.log_history[0]["sampling/unscored_tokens"] == 0


def test_tokens_cut_before_the_draw_do_not_enter_the_record(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(top_k=5, top_p=0.9, min_p=0.01)
    with caplog.at_level(logging.WARNING, logger="cogumi.rl.sampling"):
        use_rollout_logps(trainer)
    assert "top_p 0.9, top_k 5, min_p 0.01" in caplog.text
    batch = rollout(trainer)
    mask = batch["completion_mask"].bool()
    exact = recomputed(trainer.model, batch, 0.7)
    assert largest((batch["old_per_token_logps"] - exact)[mask]) < 1e-5


def test_generation_kwargs_that_change_the_temperature_are_recorded(build: Callable[..., Any]) -> None:
    """TRL scores at its own temperature whatever the sampler used; the record is the sampler's."""
    trainer = build(generation_kwargs={"temperature": 1.3})
    use_rollout_logps(trainer)
    batch = rollout(trainer)
    mask = batch["completion_mask"].bool()
    assert largest((batch["old_per_token_logps"] - recomputed(trainer.model, batch, 1.3))[mask]) < 1e-5
    assert largest((new_logps(trainer, batch) - recomputed(trainer.model, batch, 0.7))[mask]) < 1e-5


def test_generate_is_left_as_it_was(build: Callable[..., Any]) -> None:
    trainer = build()
    use_rollout_logps(trainer)
    rollout(trainer)
    assert "generate" not in vars(trainer.model)
    prompts = torch.ones(2, 3, dtype=torch.long)
    sampled = SampledLogps(1.0)
    with record_logps(trainer.model, sampled):
        trainer.model.generate(input_ids=prompts, attention_mask=prompts, max_new_tokens=2, do_sample=True)
    assert "generate" not in vars(trainer.model)
    assert [step.shape for step in sampled.steps] == [(2,), (2,)]
    assert sampled.waiting is None, "the (B, V) scores are let go"


# --------------------------------------------------------------------------------------------------------- rollout_func


def scripted(logprobs: Callable[[int, int], Any]) -> Callable[..., dict[str, Any]]:
    """A rollout_func with completions of 3, 4, 5, ... tokens and `logprobs(row, token)`."""

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        completions = [[20 + 3 * row + token for token in range(3 + row)] for row in range(len(prompts))]
        return {
            "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completions,
            "logprobs": [[logprobs(row, token) for token in range(len(ids))] for row, ids in enumerate(completions)],
        }

    return rollout_func


def count_scoring(trainer: Any) -> list[None]:
    """A list that grows with each forward pass in which the trainer scores."""
    calls: list[None] = []

    def counted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    wrap_method(trainer, "_get_per_token_logps_and_entropies", counted)
    return calls


def test_a_rollout_functions_logprobs_are_the_old_ones(build: Callable[..., Any]) -> None:
    trainer = build(rollout_func=scripted(lambda row, token: -5.0 - 0.5 * row - 0.01 * token))
    calls = count_scoring(trainer)
    use_rollout_logps(trainer)
    batch = rollout(trainer)
    assert len(calls) == 0
    for row in range(8):
        expected = [-5.0 - 0.5 * row - 0.01 * token for token in range(3 + row)]
        assert batch["old_per_token_logps"][row, : 3 + row].tolist() == pytest.approx(expected)
    loss = trainer._compute_loss(trainer.model, batch)
    exact = closed_form(new_logps(trainer, batch), batch, batch["old_per_token_logps"])
    assert loss.item() == pytest.approx(exact.item(), abs=1e-5)


@pytest.mark.parametrize("unknown", [float("nan"), None, float("-inf")])
def test_unscored_tokens_get_the_trainers_logp_and_are_counted(build: Callable[..., Any], unknown: Any) -> None:
    trainer = build(rollout_func=scripted(lambda row, token: unknown if token == row else -4.0))
    calls = count_scoring(trainer)
    use_rollout_logps(trainer)
    batch = rollout(trainer)
    assert len(calls) == 1
    old, new = batch["old_per_token_logps"], new_logps(trainer, batch).detach()
    unscored = torch.zeros_like(batch["completion_mask"]).bool()
    for row in range(8):
        unscored[row, row] = True  # token `row` of row's 3 + row tokens
    assert torch.equal(old[unscored], new[unscored])
    assert old[batch["completion_mask"].bool() & ~unscored].eq(-4.0).all()
    assert trainer._metrics["train"]["sampling/unscored_tokens"] == [8]
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert loss.item() == pytest.approx(closed_form(new, batch, old).item(), abs=1e-5)


def test_an_unscored_tool_token_is_not_counted(build: Callable[..., Any]) -> None:
    plain = scripted(lambda row, token: float("nan") if token == 1 else -4.0)

    def with_tools(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = plain(prompts, trainer)
        masks = [[0 if token == 1 else 1 for token in range(len(ids))] for ids in output["completion_ids"]]
        return {**output, "env_mask": masks}

    trainer = build(rollout_func=with_tools)
    use_rollout_logps(trainer)
    batch = rollout(trainer)
    assert trainer._metrics["train"]["sampling/unscored_tokens"] == [0]
    assert torch.isfinite(trainer._compute_loss(trainer.model, batch))


def test_a_rollout_function_without_logprobs_is_refused(build: Callable[..., Any]) -> None:
    silent = scripted(lambda row, token: 0.0)
    trainer = build(rollout_func=lambda prompts, trainer: {**silent(prompts, trainer), "logprobs": None})
    use_rollout_logps(trainer)
    with pytest.raises(UsageError, match='rollout_func return them under "logprobs"'):
        rollout(trainer)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_samplers_that_report_nothing_are_refused(build: Callable[..., Any]) -> None:
    with pytest.raises(
        UsageError, match=r"behaviour_logps: rollout needs .*generation_kwargs\.num_beams .*remove num_beams"
    ):
        use_rollout_logps(build(generation_kwargs={"num_beams": 2}))
    trainer = build()
    trainer.args.use_transformers_continuous_batching = True
    with pytest.raises(UsageError, match=r"remove train\.use_transformers_continuous_batching"):
        use_rollout_logps(trainer)


def test_leaving_the_temperature_out_moves_the_ratio_off_one(build: Callable[..., Any]) -> None:
    """What Fast-LLM saw as a ratio that starts near 1.08: far outside a clip of 4e-4, so every sequence is clipped."""
    trainer = build(ends_early=False)
    use_rollout_logps(trainer)
    batch = rollout(trainer)
    old, mask = batch["old_per_token_logps"], batch["completion_mask"]
    with_temperature = sequence_ratio(new_logps(trainer, batch).detach(), old, mask)
    without = sequence_ratio(recomputed(trainer.model, batch, 1.0), old, mask)
    print(f"ratio with the temperature {with_temperature.mean():.6f}, without {without.mean():.4f}")
    assert largest(with_temperature - 1) < 1e-5
    assert (without - 1).abs().min() > 0.02
