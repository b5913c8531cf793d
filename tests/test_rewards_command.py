"""`cogumi reward`: a config's rewards on completions of a file."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import prepared_process
import pytest
import yaml
from finished_runs import FinishedRun
from golden import Golden

from cogumi.config.schema import load_config
from cogumi.core.run_directory import read_jsonl
from cogumi.evaluation.reward_scores import call_reward, drop_cut, last_message, read_completions, score_file
from cogumi.rewards.distribution import describe_rewards, share_of_equal_groups, weighted_total
from tests.chat_tokenizers import ask, say

PROMPTS = [{"prompt": f"{n} + {n} = ", "completion": str(2 * n)} for n in range(12)]
NONE = math.nan


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Twelve sums, two rewards."""
    rewards = ["exact_answer", {"name": "answer_similarity", "weight": 0.5}]
    data = {"source": str(write(tmp_path / "rows.jsonl", PROMPTS)), "format": "prompt_completion", "eval_rows": 4}
    values = {
        "model": {"name": "cogumi:small-base"},
        "data": data,
        "train": {"max_completion_length": 16},
        "cogumi": {"method": "gspo", "rewards": rewards, "run_dir": str(tmp_path / "run")},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "run.yaml"


def write(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_distribution_is_that_of_what_was_scored() -> None:
    actual = describe_rewards("r", 1.0, [0.0, 0.0, 1.0, 3.0, NONE])
    assert (actual.completions, actual.not_scored, actual.mean, actual.zeros) == (5, 1, 1.0, 0.5)
    assert (actual.minimum, actual.quartiles, actual.maximum) == (0.0, (0.0, 0.5, 1.5), 3.0)
    assert actual.deviation == pytest.approx(math.sqrt(6 / 4))
    nothing = describe_rewards("r", 1.0, [NONE])
    assert math.isnan(nothing.mean)
    assert "1 (100.0%) not scored" in str(nothing)


def test_the_total_is_trls() -> None:
    """As `nansum` over the weighted rewards, and nothing where no function scored (TRL 1.15, `_calculate_rewards`).

    NaN, which a function returns for what it should have scored, leaves out the whole completion.
    """
    total = weighted_total([[1.0, None, None, math.nan], [2.0, 3.0, None, 1.0]], [0.5, 2.0])
    assert total[:2] == [4.5, 6.0]
    assert all(map(math.isnan, total[2:]))


def test_a_file_may_begin_with_a_mark_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "said.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\n')
    assert [row.completion for row in read_completions(tmp_path / "said.jsonl")] == ["b"]


def test_a_reward_that_returns_no_list_is_refused_and_infinity_is_no_score(golden: Golden) -> None:
    with golden.raises("rewards", key="cogumi.rewards"):
        call_reward(lambda **_: 1.0, {}, 2)
    assert str(call_reward(lambda **_: [math.inf, None], {}, 2)) == "[nan, None]"


def test_groups_of_equal_rewards_are_counted() -> None:
    assert share_of_equal_groups([0, 0, 1, 1, 2, 3, 3], [1.0, 1.0, 0.0, 1.0, 5.0, NONE, 2.0]) == (2, 1)


def test_columns_are_found_by_the_prompt(config: Path, tmp_path: Path, golden: Golden) -> None:
    """In all of the data, also what is held out; in the order of the file, which is another one."""
    rows = [{"prompt": f"{n} + {n} = ", "completions": [str(2 * n), f" {2 * n}\n", "no"]} for n in reversed(range(12))]
    report = score_file(load_config(config), write(tmp_path / "said.jsonl", rows))
    exact, close = report.rewards
    assert (exact.name, exact.weight, close.name, close.weight) == ("exact_answer", 1.0, "answer_similarity", 0.5)
    assert (exact.completions, exact.mean, exact.zeros) == (36, 2 / 3, 1 / 3)
    assert report.total.mean == pytest.approx(exact.mean + 0.5 * close.mean)
    assert report.groups == (12, 0)
    assert report.worst == {"line": 1, "reward": 0.0, "completion": "no"}
    assert (report.best or {})["reward"] == 1.5
    golden("rewards", str(report))


def test_columns_stand_in_the_line_and_torch_stays_away(config: Path, tmp_path: Path) -> None:
    """No data, no model and no libraries; the same completion as text and as messages."""
    said = [say("7")]
    rows = [{"completion": text, "answer": answer} for text, answer in (("7", "7"), (said, "8"), (said, "7"))]
    file = write(tmp_path / "said.jsonl", rows)
    code = "import sys; from cogumi.__main__ import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    words = ["reward", str(config), str(file), "data.source=cogumi:stdlib", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report, _, loaded = done.stdout.rpartition("}")
    assert loaded.strip() == "False"
    parsed = json.loads(report + "}")
    assert [reward["mean"] for reward in parsed["rewards"]] == [pytest.approx(2 / 3), pytest.approx(2 / 3)]
    assert parsed["groups"] == {"several": 0, "equal": 0}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[1]", "not a JSON object"),
        ('{"prompt": "a"}', "no `completion`"),
        ('{"completion": 3}', "text or a list of messages"),
        ('{"completions": "ab"}', "no `completion`"),
        ('{"completion": [{"role": "assistant", "content": 3}]}', "text or a list of messages"),
        ('{"completion": "a"}', "no `answer`"),
        ('{"completion": "a", "prompt": "other"}', "none of the config's data"),
    ],
)
def test_a_bad_line_is_named_by_its_number(config: Path, tmp_path: Path, golden: Golden, line: str, says: str) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text('{"completion": "a", "answer": "b"}\n\n' + line + "\n")
    with golden.raises("rewards", place=f"{file}:3", message=says):
        score_file(load_config(config), file)


def test_exit_status_and_what_is_said(config: Path, tmp_path: Path, golden: Golden) -> None:
    def reward(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return prepared_process.run(["reward", str(config), str(tmp_path / name), *words], tmp_path, dict(os.environ))

    write(tmp_path / "said.jsonl", [{"completion": "a", "answer": None}])
    write(tmp_path / "empty.jsonl", [])
    empty = reward("empty.jsonl")
    assert (empty.returncode, empty.stdout) == (2, "")
    golden("rewards", empty.stderr)
    assert reward("missing.jsonl").returncode == 2
    nothing = reward("said.jsonl", "cogumi.rewards=[math_answer]")
    assert nothing.returncode == 1
    assert "1 (100.0%) not scored" in nothing.stdout
    (tmp_path / "mine.py").write_text("def fails(completions, **_):\n    return [1 / 0 for _ in completions]\n")
    failed = reward("said.jsonl", f"cogumi.rewards=['{tmp_path}/mine.py:fails']")
    assert failed.returncode == 1
    golden("rewards", failed.stderr)
    assert reward("said.jsonl", "cogumi.method=sft", "cogumi.rewards=[edit_similarity]").returncode == 2


def test_token_ids_are_of_the_model(config: Path, tmp_path: Path) -> None:
    rewards = [{"name": "overlong", "buffer": 2, "max_completion_length": 4}, {"name": "thought_price", "price": 1.0}]
    run = load_config(config, cogumi__rewards=rewards)
    file = write(tmp_path / "said.jsonl", [{"completion": "a"}, {"completion": "<think>a b c d e f g h"}])
    long, price = score_file(run, file).rewards
    assert (long.minimum, long.maximum) == (-1.0, 0.0)
    assert price.maximum == 0.0
    assert price.minimum <= -8


def test_functions_are_called_as_a_run_calls_them(config: Path, tmp_path: Path) -> None:
    """Messages where the prompt is messages, text up to a stop, an asynchronous one too, None where it does not score."""
    (tmp_path / "mine.py").write_text(
        "async def judged(completions, note, trainer_state, log_metric, **_):\n"
        "    assert trainer_state.global_step == 0\n"
        "    return [len(said[0]['content']) if isinstance(said, list) else None for said in completions]\n"
        "def seen(completions: list[str], prompts: list[str], **_):\n"
        "    return [float(said == 'ab' and prompt in ('p', '')) for said, prompt in zip(completions, prompts)]\n"
    )
    names = [f"{tmp_path}/mine.py:{name}" for name in ("judged", "seen")]
    rows = [
        {"prompt": [ask("p")], "completion": "abSTOPc", "note": 1},
        {"completion": "ab", "note": 2},
        {"completion": "abc", "note": 3},
    ]
    file = write(tmp_path / "said.jsonl", rows)
    judged, seen = score_file(load_config(config, cogumi__rewards=names), file).rewards
    assert (judged.not_scored, judged.mean, seen.mean) == (2, 7.0, pytest.approx(1 / 3))
    judged, seen = score_file(load_config(config, cogumi__rewards=names, cogumi__stop=["STOP"]), file).rewards
    assert (judged.not_scored, judged.mean, seen.mean) == (2, 2.0, pytest.approx(2 / 3))


def test_the_rollouts_of_a_run_are_scored_as_they_were(finished_gspo: FinishedRun, tmp_path: Path) -> None:
    """The four completions that a run keeps of each rollout, with prefix and suffix from its data by the prompt."""
    run_dir = finished_gspo.result.run_dir
    recorded = [each["reward"] for row in read_jsonl(run_dir / "rollouts.jsonl") for each in row["shown"]]
    run = load_config(run_dir / "config.yaml", cogumi__run_dir=str(tmp_path / "run"))
    report = score_file(run, run_dir / "rollouts.jsonl")
    assert report.total.completions == len(recorded)
    assert report.total.mean == pytest.approx(sum(recorded) / len(recorded), abs=1e-6)
    assert (report.worst or {})["reward"] == pytest.approx(min(recorded), abs=1e-6)
    assert len(report.notes) == 1


def test_what_a_run_recorded_in_part_is_left_out(tmp_path: Path) -> None:
    shown = [{"prompt": "user: a", "completion": "x" * 4000, "reward": 1.0}, {"prompt": "user: a", "completion": "y"}]
    rows, notes = drop_cut(list(read_completions(write(tmp_path / "rollouts.jsonl", [{"step": 1, "shown": shown}]))))
    assert [row.completion for row in rows] == ["y"]
    assert "1 completions are left out" in notes[1]
    assert last_message("assistant: 4") == "4"
    assert last_message("assistant: call\ntool: 5\nassistant: it is 5") == "it is 5"
