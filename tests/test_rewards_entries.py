"""Rewards with a weight and arguments, as a YAML has them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden import Golden

import cogumi
from cogumi.config.schema import dump_config, load_config
from cogumi.methods import gspo
from cogumi.rewards import rewards_of
from cogumi.rewards.functions import exact_match
from cogumi.rewards.named_rewards import needed_columns, read_entries, refuse_missing_columns, weights_of
from cogumi.training.resume import describe_differences
from tests.builders import run_config

MINE = """
def long_enough(completions: list[str], least: int, scale: float = 1.0, words: list[str] = (), **columns):
    return [scale * (len(text) >= least) for text in completions]

async def judged(completions, question, strict: bool = False, **columns):
    return [float(strict)] * len(completions)
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def test_a_name_alone_is_the_function_itself() -> None:
    assert rewards_of(["exact_match", {"name": "exact_match", "middle": None}][:1]) == [exact_match]
    assert rewards_of([{"name": "exact_match", "weight": 2}]) == [exact_match]


def test_arguments_of_the_users_own_function(mine: str) -> None:
    (reward,) = rewards_of([{"name": f"{mine}:long_enough", "least": 3, "scale": "5e-1"}])
    assert reward.__name__ == "long_enough"
    assert reward(prompts=["p"] * 2, completions=["ab", "abc"], least=[9, 9]) == [0.0, 0.5]  # and not the column
    assert needed_columns(reward) == []
    refuse_missing_columns([reward], ["prompt"])
    (later,) = rewards_of([{"name": f"{mine}:judged", "strict": True, "question": "?"}])
    assert asyncio.run(later(completions=["a", "b"])) == [1.0, 1.0]


def test_an_argument_that_is_not_given_is_missing(mine: str, golden: Golden) -> None:
    (reward,) = rewards_of([f"{mine}:long_enough"])
    assert needed_columns(reward) == ["least"]
    with golden.raises("rewards", key="cogumi.rewards", message="`least`", fix="{name: long_enough, least: ...}"):
        refuse_missing_columns([reward], ["prompt", "answer"])


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "overlong", "bufer": 8}, "buffer"),
        ({"name": "exact_match", "middle": "x"}, "`middle`"),  # a column, and no argument
        ({"name": "exact_match", "completions": []}, "`completions`"),
        ({"name": "overlong", "buffer": "eight"}, "buffer = 'eight'"),
        ({"name": "overlong", "buffer": True}, "buffer = True: not a number"),
        ({"name": "overlong", "buffer": 0}, "greater than or equal to 1"),
        ({"name": "thought_price", "price": -1}, "price = -1"),
        ({"name": "format_match", "pattern": "(a"}, "pattern = '(a'"),
        ({"name": "MINE:long_enough", "least": [3]}, "least = [3]"),
        ({"name": "MINE:long_enough", "least": 3, "lest": 3}, "least"),
        ({"name": "overlong", "weight": "much"}, "weight = 'much'"),
        ({"name": "overlong", "weight": float("inf")}, "finite"),
        ({"name": "overlong", "weight": True}, "not a number"),
        ({"weight": 2.0}, "`name`"),
        ({"name": ["overlong"]}, "`name`"),
    ],
)
def test_a_wrong_entry_is_one_line(mine: str, golden: Golden, entry: dict[str, Any], says: str) -> None:
    entry = {key: value.replace("MINE", mine) if key == "name" and isinstance(value, str) else value
             for key, value in entry.items()}  # fmt: skip
    with golden.raises("rewards", key="cogumi.rewards", message="") as raised:
        rewards_of([entry])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_two_entries_of_one_function_have_names_of_their_own(mine: str, tmp_path: Path, golden: Golden) -> None:
    entries = [{"name": "format_match", "pattern": "a+"}, {"name": "format_match", "pattern": "b+"}, "format_match"]
    first, second, third = rewards_of(entries)
    assert [each.__name__ for each in (first, second, third)] == ["format_match", "format_match_2", "format_match_3"]
    assert [each(completions=["aa", "b"]) for each in (first, second)] == [[1.0, 0.0], [0.0, 1.0]]
    other = tmp_path / "other.py"
    other.write_text("def long_enough(completions, **_):\n    return [7.0 for _ in completions]\n")
    named = rewards_of([{"name": f"{mine}:long_enough", "least": 1}, f"{other}:long_enough"])
    assert [each.__name__ for each in named] == ["long_enough", "long_enough_2"]
    assert named[1](completions=["a"]) == [7.0]
    with golden.raises("rewards", key="cogumi.rewards", message="twice"):
        read_entries(["parses", {"name": "parses", "weight": 2.0}])


def test_weights(golden: Golden) -> None:
    entries = ["parses", {"name": "exact_match", "weight": 0.25}, {"name": "overlong", "buffer": 4}]
    assert weights_of(entries, None) == [1.0, 0.25, 1.0]
    assert weights_of(["parses", "exact_match"], None) is None
    assert weights_of(["parses", {"name": "overlong", "buffer": 4}], [1, 2]) == [1, 2]
    with golden.raises("rewards", key="train.reward_weights", message="weight"):
        weights_of(entries, [1.0, 2.0, 3.0])


def config_of(rewards: list[Any], **train: Any) -> dict[str, Any]:
    rows = {"eval_rows": 0, "max_rows": 24, "fim": {"max_length": 96}}
    train = {"max_completion_length": 20, "num_generations": 4, "per_device_train_batch_size": 8, **train}
    config = run_config(
        "gspo", "cogumi:small-base", "cogumi:stdlib", "", data_section=rows, train=train, cogumi={"rewards": rewards}
    )
    del config["cogumi"]["run_dir"]
    return config


def test_a_run_knows_them_by_its_yaml_and_by_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written config has them as they were given, and another argument is another run."""
    rewards = ["parses", {"name": "overlong", "weight": 0.5, "buffer": 8}]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config_of(rewards)))
    run = load_config(file, cogumi__run_dir=str(tmp_path / "run"))
    written = yaml.safe_load(dump_config(run))["cogumi"]["rewards"]
    assert written == rewards
    assert gspo.arguments(run)["reward_weights"] == [1.0, 0.5]
    _, overlong = gspo.read_rewards(run)  # of 20 tokens, by train.max_completion_length
    assert overlong(completion_ids=[[0] * 12, [0] * 16, [0] * 20], completions=[""] * 3) == [0.0, -0.5, -1.0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_config(run))
    assert describe_differences(run) == ""
    monkeypatch.setenv("COGUMI_COGUMI__REWARDS", "[parses, {name: overlong, weight: 0.5, buffer: 9}]")
    other = load_config(file, cogumi__run_dir=str(tmp_path / "run"))
    assert "cogumi.rewards" in describe_differences(other)


def test_a_training_logs_and_weighs_them(tmp_path: Path, mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rewards = [
        {"name": f"{mine}:long_enough", "least": 1, "scale": 0.5, "weight": 2.0},
        {"name": "overlong", "buffer": 10, "weight": 3.0},
        {"name": "overlong", "buffer": 20},
    ]
    train = {"max_steps": 1, "steps_per_generation": 1, "save_strategy": "no"}
    result = cogumi.train(config_of(rewards, **train))
    row = result.metrics[0]
    means = [row[f"rewards/{name}/mean"] for name in ("long_enough", "overlong", "overlong_2")]
    assert all(row[f"rewards/{name}/std"] >= 0 for name in ("long_enough", "overlong", "overlong_2"))
    assert means[1] != means[2]  # two functions, and not the mean of both
    assert row["reward"] == pytest.approx(2.0 * means[0] + 3.0 * means[1] + means[2], abs=1e-5)


def test_an_argument_that_cannot_be_is_refused_before_the_run(tmp_path: Path, golden: Golden) -> None:
    config = config_of([{"name": "overlong", "buffer": 21}])
    with golden.raises("rewards", key="cogumi.rewards", message="buffer 21"):
        cogumi.train(config, cogumi__run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
