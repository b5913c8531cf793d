"""The metrics of a policy step against a plain loop over documents and tokens (reference 17)."""

import math
from types import SimpleNamespace

import pytest
import torch

from cogumi.rl.loss_check import LossInputs
from cogumi.rl.watch import PolicyMetrics

LOW, HIGH = 3e-4, 4e-4


def some_call(level: str, rows: int = 6, width: int = 7, seed: int = 0) -> LossInputs:
    """Uneven lengths, an empty row, tool tokens in the middle, and rubbish where nothing counts."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator)
    new = old + 1e-3 * torch.randn(rows, width, generator=generator)
    mask = (torch.arange(width) < torch.tensor([7, 3, 0, 5, 1, 6])[:, None]).long()
    mask[3, 1] = mask[5, 4] = 0
    mask = mask[:rows]
    new[mask == 0], old[mask == 0] = -50.0, -20.0
    return LossInputs(
        new=new.requires_grad_(),
        old=old,
        ref=None,
        mask=mask,
        advantages=torch.randn(rows, generator=generator),
        function=some_call,
        arguments={"importance_sampling_level": level, "epsilon_low": LOW, "epsilon_high": HIGH},
    )


def plain_loop(calls: list[LossInputs]) -> dict[str, float]:
    """The same in Python floats, document by document."""
    documents: list[dict[str, float]] = []
    ratios: list[float] = []
    tokens = 0
    for call in calls:
        for row in range(len(call.mask)):
            places = [t for t in range(call.mask.shape[1]) if call.mask[row, t] > 0]
            if not places:
                continue
            tokens += len(places)
            new, old = ([x[row, t].item() for t in places] for x in (call.new, call.old))  # type: ignore[index]
            logs = [n - o for n, o in zip(new, old, strict=True)]
            if call.arguments["importance_sampling_level"] == "sequence":
                logs = [sum(logs) / len(logs)]
            own = [math.exp(x) for x in logs]
            ratios += own
            documents.append(
                {
                    "new_logprobs": sum(new) / len(new),
                    "old_logprobs": sum(old) / len(old),
                    "ratio_new_old": sum(own) / len(own),
                    "kl_new_old": sum(r - x - 1 for r, x in zip(own, logs, strict=True)) / len(own),
                    "clipped_ratio_fraction": sum(r < 1 - LOW or r > 1 + HIGH for r in own) / len(own),
                }
            )
    means = {name: sum(d[name] for d in documents) / len(documents) for name in documents[0]}
    return means | {
        "effective_sample_size": sum(ratios) ** 2 / len(ratios) / sum(r * r for r in ratios),
        "max_ratio": max(ratios),
        "min_ratio": min(ratios),
        "num_tokens": tokens,
        "num_segments": len(documents),
    }


class OneProcess:
    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def measured(calls: list[LossInputs], staleness: list[float] | None = None) -> dict[str, float]:
    metrics = PolicyMetrics()
    for call, late in zip(calls, staleness or [0.0] * len(calls), strict=True):
        metrics.add(call, late)
    return {name.removeprefix("policy/"): value for name, value in metrics.take(OneProcess()).items()}


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_a_step_of_two_micro_batches_equals_the_plain_loop(level: str) -> None:
    calls = [some_call(level), some_call(level, seed=1)]
    actual, expected = measured(calls), plain_loop(calls)
    assert actual.pop("staleness") == 0
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        # The log-probabilities are float32; R - log R - 1 of a ratio near 1 loses half of its digits.
        tolerance = 1e-3 if name == "kl_new_old" else 1e-6
        assert actual[name] == pytest.approx(value, rel=tolerance), name


def test_a_step_does_not_depend_on_how_it_is_cut_up() -> None:
    whole = some_call("sequence")
    parts = [
        LossInputs(
            *(x if x is None else x[rows] for x in (whole.new, whole.old, whole.ref, whole.mask, whole.advantages)),  # type: ignore[arg-type]
            function=whole.function,
            arguments=whole.arguments,
        )
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    together, apart = measured([whole]), measured(parts)
    for name, value in together.items():
        assert apart[name] == pytest.approx(value, rel=1e-12), name


def test_staleness_is_the_mean_over_documents() -> None:
    actual = measured([some_call("sequence"), some_call("sequence", rows=2)], staleness=[0.0, 21.0])
    assert actual["staleness"] == pytest.approx(21.0 * 2 / 7)  # of five documents and of two


def test_nothing_but_masked_rows_is_zero_and_not_an_error() -> None:
    call = some_call("sequence")
    call.mask = torch.zeros_like(call.mask)
    actual = measured([call])
    assert actual["num_segments"] == actual["num_tokens"] == actual["ratio_new_old"] == 0
    assert math.isnan(actual["effective_sample_size"])
    assert "max_ratio" not in actual


def test_processes_are_added_up() -> None:
    class TwoProcesses:
        def gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat([tensor, tensor])

    metrics = PolicyMetrics()
    metrics.add(some_call("sequence"), 0.0)
    both = metrics.take(TwoProcesses())
    assert both["policy/num_segments"] == 10
    assert both["policy/ratio_new_old"] == pytest.approx(measured([some_call("sequence")])["ratio_new_old"])
    assert metrics.take(SimpleNamespace()) == {}  # taken: the next step starts anew
