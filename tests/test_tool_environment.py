"""The tool environment of notebook 09: tools are called, rewards paid, and what a tool says is outside of the loss.

The notebook's own cells are run, each with nothing but the parameters and what the cells before it left on the disk.
"""

import io
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jupytext
import pytest
import torch

from cogumi.rl.proof import TOLERANCE

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "09_reward_and_tools.py"
SHORT = {"CALL_STEPS": 60, "TOOL_STEPS": 4}


def cells() -> list[str]:
    return [cell.source for cell in jupytext.read(NOTEBOOK).cells if cell.cell_type == "code"]


def run_cell(source: str) -> tuple[dict[str, Any], str]:
    """The names a cell leaves, and what it prints."""
    names: dict[str, Any] = {}
    exec(cells()[0], names)
    names |= SHORT
    with redirect_stdout(io.StringIO()) as said:
        exec(source, names)
    return names, said.getvalue()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, Path]]:
    """The trainer after its training, what the cell printed, and the directory."""
    place = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(str(place))
        environment, teach, train = (
            next(source for source in cells() if mark in source)
            for mark in ('Path("boxes.py")', "calls.jsonl", "environment_factory")
        )
        run_cell(environment)
        run_cell(teach)
        names, said = run_cell(train)
        yield names["trainer"], said, place
    sys.modules.pop("boxes", None)


def test_tools_are_called_and_the_environment_pays(played: tuple[Any, str, Path]) -> None:
    trainer, _, _ = played
    rollouts = [row for row in trainer.state.log_history if "reward" in row]
    assert len(rollouts) == 2
    assert all(row["tools/call_frequency"] > 0.3 for row in rollouts)  # 1.5 when it was written
    assert max(row["reward"] for row in rollouts) > 0
    # What TRL was paid is what each environment says of its own rollout.
    assert list(trainer._logs["rewards"]["Boxes"])[-32:] == [each.get_reward() for each in trainer.environments]
    assert {each.prize for each in trainer.environments} == {4}


def test_what_a_tool_says_is_outside_of_the_loss(played: tuple[Any, str, Path]) -> None:
    trainer, said, _ = played
    last = trainer._buffered_inputs[-1]
    tool = last["tool_mask"] == 0
    heard = [trainer.processing_class.decode(ids[row]) for ids, row in zip(last["completion_ids"], tool, strict=True)]
    answered = [text for text in heard if text]
    assert answered
    for text in answered:
        assert "tool_response_start" in text
        assert "open(box" not in text  # the call is the model's own and is learned
    # cogumi's metric, TRL's mask and the loss count the same tokens; the metric is what was handed to the proof.
    counted = int((last["completion_mask"] * last["tool_mask"]).sum())
    assert counted < int(last["completion_mask"].sum())
    assert [row["policy/num_tokens"] for row in trainer.state.log_history if "policy/num_tokens" in row][-1] == counted
    assert "NOT IN THE LOSS" in said


def test_no_gradient_reaches_what_a_tool_says(played: tuple[Any, str, Path]) -> None:
    trainer, _, _ = played
    batch = dict(trainer._buffered_inputs[-1])
    seen: list[torch.Tensor] = []
    original = trainer._get_per_token_logps_and_entropies

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        result[0].retain_grad()
        seen.append(result[0])
        return result

    trainer.model.train()
    batch["advantages"] = torch.ones_like(batch["advantages"])  # nothing may be 0 for want of an advantage
    batch.pop("old_per_token_logps")  # nor for the clip
    trainer._get_per_token_logps_and_entropies = noted
    try:
        trainer._compute_loss(trainer.model, batch).backward()
    finally:
        del trainer._get_per_token_logps_and_entropies
        trainer.model.zero_grad()
    [logps] = seen
    assert logps.grad is not None
    learned = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert not logps.grad[~learned].any()
    assert logps.grad[learned].all()


def test_the_loss_was_proven_with_the_mask_of_several_turns(played: tuple[Any, str, Path]) -> None:
    _, _, place = played
    record = json.loads((place / "runs/own/tools/loss.json").read_text())
    assert record["loss"] == "gspo"
    assert record["asserted"]
    assert record["unproven"] == []
    assert record["clip_seen_at_step"] == 2
    assert max(record["relative_difference"][name] for name in ("loss", "gradient")) < TOLERANCE


def test_the_last_cell_reads_what_the_training_left(played: tuple[Any, str, Path]) -> None:
    _, said = run_cell(cells()[-1])
    assert said.count("), (") == 1  # two rollouts
    assert "'gradient'" in said
