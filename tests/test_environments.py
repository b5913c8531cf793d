"""Environments and tools by name in a run: what is refused, what is tried first, and a run that is killed in a rollout."""

import asyncio
import json
import math
import shutil
import signal
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import prepared_process
import pytest
import torch
import yaml
from chat_tokenizers import chat_tokenizer
from datasets import Dataset
from golden import Golden
from transformers.utils import get_json_schema

from cogumi.config.schema import load_config
from cogumi.core.run_directory import read_jsonl
from cogumi.data.encoding import FormatOptions
from cogumi.data.formats import tokenize_for
from cogumi.environments.episodes import Episodes
from cogumi.environments.examples import FUNCTIONS, Calculator, CodeCompletion, Repository, evaluate
from cogumi.environments.loading import SHIPPED, load_task, own_rows
from cogumi.evaluation.reward_scores import score_file
from cogumi.forecast.data_sample import prompt_lengths
from cogumi.health.flags import RunHistory
from cogumi.methods.gspo import describe_sandbox, read_rewards, task_of, try_task
from cogumi.methods.preview import split_example
from cogumi.rl.sampling import leave_out_unscored
from cogumi.sandbox import default_sandbox

BOXES = '''
class Boxes:
    rows = [{"prompt": [{"role": "user", "content": "Find the prize."}]}] * 8

    def reset(self, **record):
        self.opened = []

    def open(self, box: int) -> str:
        """Open a box.

        Args:
            box: from 1 to 5
        """
        self.opened.append(box)
        return "empty"

    def get_reward(self):
        return len(self.opened) / 4
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "boxes.py").write_text(BOXES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**of_cogumi: Any) -> Any:
    own = {"method": "gspo", "run_dir": "runs/a", **of_cogumi}
    return load_config({"model": {"name": "none"}, "data": {"source": "none.jsonl"}, "cogumi": own})


WRONG = {
    "no reset": BOXES.replace("def reset", "def restart"),
    "no docstring": BOXES.replace('"""Open a box.', '"""').replace("box: from 1 to 5", ""),
    "no type": BOXES.replace("box: int", "box"),
    "two kinds": BOXES + "\n    def respond(self, text):\n        return None\n",
    "no tool": BOXES.replace("def open", "def _open"),
    "raises": "import nothing_of_this_name\n",
    "syntax": "class Boxes(:\n",
    "any arguments": BOXES.replace("box: int", "*boxes: int"),
    "asynchronous reset": BOXES.replace("def reset", "async def reset"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_environment_that_cannot_be_used(here: Path, name: str, golden: Golden) -> None:
    (here / "boxes.py").write_text(WRONG[name])
    with golden.raises("train", key="cogumi.environment"):
        load_task("boxes.py:Boxes", [])


@pytest.mark.parametrize("name", ["calculater", "boxes.py:Box", "other.py:Boxes", "boxes.py"])
def test_an_environment_that_is_not_there(here: Path, name: str, golden: Golden) -> None:
    with golden.raises("train", key="cogumi.environment"):
        load_task(name, [])


def test_tools_that_cannot_be_used(here: Path, golden: Golden) -> None:
    (here / "tools.py").write_text("def look(place):\n    return place\n")
    for name in ("tools.py:look", "tools.py:see", "tools.py"):
        with golden.raises("train", key="cogumi.tools"):
            load_task(None, [name])


def test_two_tools_of_one_name(here: Path, golden: Golden) -> None:
    source = BOXES[BOXES.index("    def open") : BOXES.index("    def get_reward")]
    (here / "tools.py").write_text(textwrap.dedent(source).replace("self, ", ""))
    with golden.raises("train", key="cogumi.environment"):
        load_task("boxes.py:Boxes", ["tools.py:open"])
    with golden.raises("train", key="cogumi.tools"):
        load_task(None, ["tools.py:open", "tools.py:open"])


def test_rows_that_are_none(here: Path, golden: Golden) -> None:
    for rows in ("[]", "['a']", "[{'prompt': {1, 2}}]"):
        (here / "boxes.py").write_text(BOXES.replace(BOXES.partition("rows = ")[2].partition("\n")[0], rows))
        with golden.raises("train", key="data.source" if rows == "[]" else "cogumi.environment"):
            own_rows(load_task("boxes.py:Boxes", []))


def tried(environment: str, tokenizer: str = "qwen2_5") -> None:
    """As a run tries it before it loads a model."""
    run = config(environment=environment)
    try_task(run, Dataset.from_list(own_rows(task_of(run))), chat_tokenizer(tokenizer))


def test_an_exit_of_the_users_code_is_an_error_with_its_place(here: Path, golden: Golden) -> None:
    (here / "boxes.py").write_text(BOXES.replace("self.opened = []", "raise SystemExit(0)"))
    with golden.raises("train", key="cogumi.environment"):
        tried("boxes.py:Boxes")
    episodes = Episodes(load_task("boxes.py:Boxes", []), None, dict)
    with pytest.raises(RuntimeError, match=r"reset raised SystemExit: 0 \(boxes.py:6\)"):
        episodes.timed_class(episodes.task.environment)().reset()
    with pytest.raises(RuntimeError, match="the tool called exit"):
        episodes.timed(sys.exit, budget=True)(0)
    with pytest.raises(SystemExit):  # what a handler of SIGTERM raises is no error of the user's code
        episodes.timed(sys.exit, budget=True)(128 + signal.SIGTERM)


def test_an_asynchronous_tool_ends_with_the_seconds_of_its_episode(here: Path) -> None:
    episodes = Episodes(load_task("boxes.py:Boxes", []), 0.05, dict)
    episodes.began = time.monotonic()
    with pytest.raises(TimeoutError, match="the seconds of this episode are over"):
        asyncio.run(episodes.timed(asyncio.sleep, budget=True)(30))
    assert 0.04 < episodes.inside < 25


def test_what_reset_changes_is_no_change_of_the_data(here: Path) -> None:
    (here / "boxes.py").write_text(BOXES.replace("self.opened = []", "record['prompt'].clear()"))
    episodes = Episodes(load_task("boxes.py:Boxes", []), None, dict)
    row = {"prompt": [{"role": "user", "content": "a"}]}
    episodes.timed_class(episodes.task.environment)().reset(**row)
    assert row == {"prompt": [{"role": "user", "content": "a"}]}


def test_a_static_method_is_a_tool_with_all_its_arguments(here: Path) -> None:
    method = BOXES[BOXES.index("    def open") : BOXES.index("    def get_reward")]
    static = method.replace("    def open(self, ", "    @staticmethod\n    def peek(").replace(
        "self.opened.append(box)", ""
    )
    (here / "boxes.py").write_text(BOXES.replace(method, method + static))
    task = load_task("boxes.py:Boxes", [])
    assert [schema["function"]["parameters"]["required"] for schema in task.schemas] == [["box"], ["box"]]
    environment = Episodes(task, None, dict).timed_class(task.environment)()
    assert environment.peek(box=1) == "empty"
    assert get_json_schema(environment.peek) == task.schemas[1]


def test_settings_that_contradict_an_environment(here: Path, golden: Golden) -> None:
    no_reward = BOXES.replace("def get_reward", "def _get_reward")
    (here / "unpaid.py").write_text(no_reward)
    for key, given in (
        ("cogumi.rewards", {"environment": "unpaid.py:Boxes"}),
        ("cogumi.episode_seconds", {"episode_seconds": 3}),
        ("cogumi.stop", {"environment": "boxes.py:Boxes", "stop": ["."]}),
    ):
        with golden.raises("train", key=key):
            task_of(config(**given))
    with golden.raises("train", key="cogumi.environment"):
        config(method="sft", rewards=["edit_similarity"], environment="boxes.py:Boxes")


def test_an_environment_is_tried_before_a_model_is_loaded(here: Path, golden: Golden) -> None:
    for old, new in (
        ("self.opened = []", "self.opened = record['prize']"),
        ("self.opened = []", "return 5"),
        ("len(self.opened) / 4", "'much'"),
    ):
        (here / "boxes.py").write_text(BOXES.replace(old, new))
        with golden.raises("train", key="cogumi.environment"):
            tried("boxes.py:Boxes")


def test_a_turn_is_tried_before_a_model_is_loaded(here: Path, golden: Golden) -> None:
    """Its reward is asked after the turn, as in a rollout: what `respond` sets is there."""
    turns = "class Echo:\n    rows = [{'prompt': 'a'}]\n\n    def reset(self, **record):\n        pass\n\n"
    turns += "    def respond(self, text):\n        self.heard = text\n        return ANSWER\n\n"
    turns += "    def get_reward(self):\n        return len(self.heard)\n"
    for answer in ("None", "5", "1 / 0"):
        (here / "echo.py").write_text(turns.replace("ANSWER", answer))
        with nullcontext() if answer == "None" else golden.raises("train", key="cogumi.environment"):
            tried("echo.py:Echo", "phi3")


def test_prompts_and_templates_without_tools(here: Path, golden: Golden) -> None:
    with golden.raises("train", key="cogumi.environment"):
        try_task(config(environment="boxes.py:Boxes"), Dataset.from_list([{"prompt": "x"}]), chat_tokenizer("qwen2_5"))
    with golden.raises("train", key="cogumi.environment"):
        tried("boxes.py:Boxes", "phi3")
    tried("boxes.py:Boxes")


def test_the_schemas_of_tools_count_in_the_length_of_a_prompt() -> None:
    """As the trainer renders it: the shortest limit that a prompt fits into is its length with the tools."""
    tokenizer = chat_tokenizer("qwen2_5")
    schemas = load_task("calculator", []).schemas
    prompt = Calculator.rows(1)[0]["prompt"]
    rows = pl.DataFrame({"prompt": [prompt]})
    for tools in ((), schemas):
        length = len(
            tokenizer.apply_chat_template(prompt, tools=tools or None, add_generation_prompt=True)["input_ids"]
        )
        for limit, kept in ((length, 1), (length - 1, 0)):
            options = FormatOptions(method="gspo", format="prompt_completion", max_length=limit, tools=tools)
            chunk = tokenize_for(options, tokenizer)(rows, 0)
            assert (len(chunk.table), sum(drop.count for drop in chunk.dropped.values())) == (kept, 1 - kept)
    # The forecast and the preview see them, too.
    assert prompt_lengths(config(environment="calculator"), [prompt], tokenizer) == [length]
    [(_, shown)] = split_example({"prompt": prompt}, tokenizer, schemas)
    assert '"calculate"' in shown


def test_an_environment_scores_no_completions_of_a_file(here: Path, golden: Golden) -> None:
    with golden.raises("rewards", key="cogumi.rewards"):
        score_file(config(environment="boxes.py:Boxes"), here / "said.jsonl")


def test_what_the_shipped_ones_are() -> None:
    tasks = {name: load_task(name, []) for name in SHIPPED}
    assert [task.takes_turns for task in tasks.values()] == [False, True, False]
    assert all(task.has_reward and own_rows(task) for task in tasks.values())
    names = [[schema["function"]["name"] for schema in task.schemas] for task in tasks.values()]
    assert names == [["calculate"], [], ["read_file", "replace", "run_tests"]]


@pytest.mark.parametrize(("text", "value"), [("2 + 3 * 4", 14), ("-(7 - 10) * 2", 6), (" 12 ", 12)])
def test_the_calculator_calculates(text: str, value: int) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize("text", ["__import__('os')", "2 ** 9", "1 +", "", "9" * 101, "1 / 2", "(1", "1, 2"])
def test_the_calculator_executes_nothing(text: str) -> None:
    with pytest.raises(ValueError, match=r"whole numbers|no expression"):
        evaluate(text)


def test_the_calculator_pays_for_the_right_call() -> None:
    calculator = Calculator()
    for row in Calculator.rows(8):
        calculator.reset(**row)
        assert calculator.get_reward() == 0
        problem = row["prompt"][0]["content"].removeprefix("What is ").partition("?")[0]
        assert calculator.calculate(problem) == str(row["answer"])
        assert calculator.get_reward() == 1


def test_a_middle_is_tried_again_after_its_tests_have_failed() -> None:
    environment = CodeCompletion()
    for row in CodeCompletion.rows():
        environment.reset(**row)
        right = next(code for code in FUNCTIONS if code.startswith(row["prefix"])).split("|")[1]
        assert environment.respond(right) is None
        assert environment.get_reward() == 1
    environment.reset(**CodeCompletion.rows()[0])
    assert "AssertionError" in str(environment.respond("low"))
    assert "SyntaxError" in str(environment.respond("]"))
    assert environment.get_reward() == 0
    assert environment.respond("max(low, min(x, high))") is None
    assert environment.get_reward() == pytest.approx(1 / 3)
    environment.reset(**CodeCompletion.rows()[0])
    assert environment.respond("__import__('os')._exit(0)") is not None  # an exit is no pass
    assert environment.respond("__import__('os').abort()") is None
    assert math.isnan(environment.get_reward())  # a crash is not scored


def test_a_repository_is_edited_until_its_tests_pass() -> None:
    environment = Repository()
    for row in Repository.rows():
        assert "prices.py, stock.py, tests.py" in environment.reset(**row)
        assert "All tests pass" not in environment.run_tests()
        assert environment.get_reward() == 0
        assert row["wrong"] in environment.read_file(row["file"])
        environment.replace(row["file"], row["wrong"], row["right"])
        assert environment.run_tests() == "All tests pass."
        assert environment.get_reward() == 1
    environment.reset(**Repository.rows()[0])
    environment.replace("prices.py", "def total", "import unittest\nunittest.TestCase.assertEqual = print\ndef total")
    assert "AssertionError" in environment.run_tests()
    with pytest.raises(KeyError):
        environment.replace("tests.py", "30", "31")


def test_a_completion_that_could_not_be_scored_is_in_no_baseline(make_trainer: Any) -> None:
    """NaN of one function takes the whole completion out; None leaves the others, as in TRL."""
    trainer = make_trainer(max_steps=1, logging_steps=1)
    inputs = [math.inf, None, 1.0, 0.0, 0.5, 0.25, 1.0, 0.0]  # what is infinite is no score either

    def tests_pass(completions: Any, **_: Any) -> list[Any]:
        return inputs[: len(completions)]

    def length(completions: Any, **_: Any) -> list[float]:
        return [1.0] * len(completions)

    trainer.reward_funcs, trainer.reward_func_names = [tests_pass, length], ["tests_pass", "length"]
    trainer.reward_processing_classes, trainer.reward_weights = [None, None], torch.ones(2)
    leave_out_unscored(trainer)
    trainer.train()
    row = next(row for row in trainer.state.log_history if "rewards/not_scored" in row)
    assert row["rewards/not_scored"] == 1 / 8
    sums = torch.tensor([1.0, 2.0, 1.0])  # of the first group, without its first completion
    expected = (sums - sums.mean()) / (sums.std() + 1e-4)
    actual = torch.tensor(list(trainer._logs["advantages"])[:4])
    assert actual[0] == 0
    assert torch.allclose(actual[1:], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("metrics", "name", "level"),
    [
        ({"tools/call_frequency": 0.0, "tools/failure_frequency": 0.0}, "tool calls", "red"),
        ({"tools/call_frequency": 1.5, "tools/failure_frequency": 0.3}, "tool calls", "yellow"),
        ({"tools/call_frequency": 1.5, "tools/failure_frequency": 0.1}, "tool calls", "green"),
        ({"episodes/without_end": 0.9, "episodes/cut_by_turns": 0.9}, "episodes end", "red"),
        ({"episodes/without_end": 0.1, "episodes/cut_by_tokens": 0.1}, "episodes end", "green"),
        ({"rewards/not_scored": 0.5}, "scored", "red"),
        ({"rewards/not_scored": 0.1}, "scored", "yellow"),
    ],
)
def test_flags_of_episodes(metrics: dict[str, float], name: str, level: str) -> None:
    from cogumi.health.rules import episodes_end, scored, tool_calls

    rows = [{"step": step, "reward": 0.5, **metrics} for step in range(1, 7)]
    history = RunHistory(setting=None, first=[], latest=rows)  # type: ignore[arg-type]
    [found] = [
        flag for rule in (tool_calls, episodes_end, scored) if (flag := rule(history)) is not None and flag.name == name
    ]
    assert found.level == level


def test_the_sandbox_is_described_where_one_is_used(here: Path) -> None:
    (here / "uses.py").write_text("from cogumi.rewards.unit_tests import run_tests\n" + BOXES)
    for given, used in (
        ({"environment": "repository"}, True),
        ({"environment": "uses.py:Boxes"}, True),
        ({"environment": "boxes.py:Boxes"}, False),
        ({"rewards": ["unit_tests"]}, True),
        ({"rewards": ["exact_match"]}, False),
    ):
        run = config(**given)
        said = describe_sandbox(run, read_rewards(run))
        assert said == (default_sandbox().describe() if used else "")


# ------------------------------------------------------------------------------------------------------------- runs

TURNS = '''
import os, signal
from pathlib import Path

class Echo:
    """Answers once. Where a file says so, the process is killed at that rollout's first answer."""

    rows = [{"prompt": text} for text in ("def f(x):", "import os", "class A:", "x = [1, 2")] * 2

    def reset(self, **record):
        self.heard = []

    def respond(self, text):
        self.heard.append(text)
        rollouts = Path(os.environ["ROLLOUTS"])
        if len(self.heard) == 1:
            rollouts.write_text(rollouts.read_text() + "." if rollouts.exists() else ".")
            if os.environ.get("KILL_AT") == str(rollouts.stat().st_size):
                os.kill(os.getpid(), signal.SIGKILL)
            return " again: "

    def get_reward(self):
        return sum(map(str.isalpha, "".join(self.heard))) / 20
'''


def test_a_run_killed_inside_a_rollout_ends_with_equal_weights(
    tiny_model: Path, here: Path, for_commands: dict[str, str]
) -> None:
    """Killed in its third rollout, while the environment answers, and started again by the same command."""
    from safetensors.torch import load_file

    (here / "echo.py").write_text(TURNS)
    model = shutil.copytree(tiny_model, here / "model")
    ends = [*range(0, 512, 16), json.loads((model / "config.json").read_text())["eos_token_id"]]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))  # so that turns end
    train = {
        "max_steps": 6, "num_generations": 4, "per_device_train_batch_size": 4, "steps_per_generation": 2,
        "max_completion_length": 32, "learning_rate": 1e-3, "gradient_checkpointing": False, "save_steps": 3,
    }  # fmt: skip
    weights = []
    for name, kill_at in (("whole", None), ("killed", 20)):
        own = {"method": "gspo", "environment": "echo.py:Echo", "run_dir": f"runs/{name}", "merge": False}
        options = {"model": {"name": "model"}, "lora": {"r": 4}, "data": {"eval_rows": 0}, "train": train}
        Path(f"{name}.yaml").write_text(yaml.safe_dump(options | {"cogumi": own}))
        environment = for_commands | {"ROLLOUTS": str(here / f"{name}.rollouts")}
        if kill_at:
            cut = prepared_process.run(["train", f"{name}.yaml"], here, environment | {"KILL_AT": str(kill_at)})
            assert cut.returncode == -signal.SIGKILL, cut.stderr
        done = prepared_process.run(["train", f"{name}.yaml"], here, environment)
        assert done.returncode == 0, done.stdout + done.stderr
        weights.append(load_file(here / f"runs/{name}/adapter/adapter_model.safetensors"))
        rows = read_jsonl(here / f"runs/{name}/metrics.jsonl")
        assert [row["step"] for row in rows if "reward" in row] == [1, 3, 5]
        assert all(row["episodes/masked_share"] > 0 for row in rows if "reward" in row)
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    shown = json.loads((here / "runs/whole/rollouts.jsonl").read_text().splitlines()[0])["shown"]
    assert any(" again: " in each["completion"] for each in shown)
