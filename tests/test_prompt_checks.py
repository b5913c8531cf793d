"""What a run says of its settings and data before anything is loaded: what could teach nothing, or something else."""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from golden import Golden

import cogumi
from cogumi.config.schema import RunConfig, load_config
from cogumi.core.errors import UsageError
from cogumi.methods import building
from cogumi.methods.examples import describe_empty_thoughts, prepare_examples
from cogumi.methods.sampler import check_answers, check_prompts, refuse_settings
from tests.builders import run_config
from tests.chat_tokenizers import ask, chat_tokenizer, say, tiny_for

Config = dict[str, Any]


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Config:
    rows = [{"prompt": f"{n} + 1 =", "completion": str(n + 1)} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sections = {
        "data_section": {"format": "prompt_completion", "eval_rows": 0},
        "train": {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8, "max_steps": 1},
        "cogumi": {"rewards": ["exact_answer"]},
    }
    return run_config("gspo", tiny_model, tmp_path / "rows.jsonl", tmp_path / "run", **sections)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generation_kwargs", {"temperature": 0}),
        ("generation_kwargs", {"do_sample": False}),
        ("generation_kwargs", {"temperature": 0.5}),
        ("top_k", 1),
        ("min_p", 1.0),
        ("reward_weights", [1.0, 2.0]),
        ("reward_weights", [0.0]),
        ("epsilon", 0.5),
    ],
)
def test_a_setting_that_teaches_nothing_is_refused_before_anything_is_loaded(
    config: Config, tiny_model: Path, tmp_path: Path, golden: Golden, key: str, value: Any
) -> None:
    """Not even the tokenizer is read: the model's directory has none, and no weights."""
    (tmp_path / "bare").mkdir()
    shutil.copy(tiny_model / "config.json", tmp_path / "bare")
    with golden.raises("train", message=f"train.{key}"):
        cogumi.train(config, model__name=str(tmp_path / "bare"), **{f"train__{key}": value})
    assert not (tmp_path / "run").exists()


def test_settings_that_sample_are_taken(config: Config) -> None:
    settings = {"top_k": 2, "min_p": 0.5, "temperature": 0.1, "reward_weights": [0.5], "generation_kwargs": {}}
    for key, value in settings.items():
        assert_said(load_config(config, **{f"train__{key}": value}), "")


def test_an_empty_stop_text_is_refused(config: Config, golden: Golden) -> None:
    with golden.raises("train", key="cogumi.stop.1", message="at least 1 character"):
        load_config(config, cogumi__stop=["\n", ""])


def test_what_a_reward_takes_must_be_there_in_some_row(
    config: Config, tmp_path: Path, golden: Golden, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{n}", "completion": None}) + "\n" for n in range(16)))
    with golden.raises("train", key="cogumi.rewards", message="null in 16 of 16 rows", fix="data.columns"):
        cogumi.train(config)
    assert not (tmp_path / "run").exists()

    def takes(completions: Any, answer: Any, level: Any = None, **columns: Any) -> list[float]:
        return [0.0 for _ in completions]

    nulls = [None, None]
    check_prompts(
        [takes], Dataset.from_dict({"prompt": ["a", "b"], "answer": ["x", None], "level": nulls, "other": nulls})
    )
    assert [record.getMessage() for record in caplog.records if "null" in record.getMessage()] == [
        "cogumi.rewards: takes takes `answer`, which is null in 1 of 2 rows"
    ]


def test_gold_answers_are_tried_before_a_run(caplog: pytest.LogCaptureFixture) -> None:
    def check(*answers: Any, reward: str = "final_number") -> None:
        check_answers([reward], Dataset.from_dict({"answer": answers}))

    check("so #### 5", None, "1,200")
    assert not caplog.text
    check("5", "3,5", None)
    assert (
        "final_number: 1 of 2 answers end with no number that stands alone ('3,5'): no completion is right there"
        in (caplog.text)
    )
    check("3,5", reward="exact_answer")
    with pytest.raises(UsageError, match="2 of 2 answers end with no number"):
        check("A", "2^3")
    with pytest.raises(UsageError, match="`answer` is a list of 2"):
        check(["5", "6"], reward="exact_answer")


def test_prompts_that_do_not_differ_are_told(caplog: pytest.LogCaptureFixture) -> None:
    check_prompts([], Dataset.from_dict({"prompt": ["a"] * 3}))
    assert "the 3 prompts do not differ" in caplog.text
    caplog.clear()
    check_prompts([], Dataset.from_dict({"prompt": ["a", "b"]}))
    assert not caplog.text


THOUGHTLESS = ["5.", "<think></think>5.", "<think>\n \n</think>\n\n5."]
THOUGHT = "<think>\ntwo and three\n</think>\n\n5."


@pytest.mark.parametrize("learn", [{}, {"completion_only_loss": True}])
def test_examples_that_teach_to_answer_without_a_thought_are_counted(tmp_path: Path, learn: Config) -> None:
    """Of those that a run with thinking trains on; an earlier turn does not count, and one too long is no example."""
    tokenizer = chat_tokenizer("qwen3")
    answers = [*map(say, [*THOUGHTLESS, THOUGHT, THOUGHT, "word " * 400]), say("5.", reasoning_content="hm")]
    talks = [{"messages": [ask("2 + 3?"), answer]} for answer in answers]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    home = tmp_path / "model"
    tiny_for(tokenizer).save_pretrained(home)
    tokenizer.save_pretrained(home)
    sections = {"train": {"max_steps": 1, "max_length": 128, **learn}, "cogumi": {"thinking": True}}
    data = {"format": "chat", "eval_rows": 0}
    config = run_config("sft", home, tmp_path / "talks.jsonl", tmp_path / "run", data_section=data, **sections)
    run = load_config(config)
    examples = prepare_examples(run, tokenizer)
    assert (examples.train.rows_without_reasoning, len(examples.train.dataset)) == (3, 6)
    assert "in 3 of 6 examples" in describe_empty_thoughts(run, examples)
    for thinking in (None, False):
        other = load_config(config, cogumi__thinking=thinking)
        assert not describe_empty_thoughts(other, prepare_examples(other, tokenizer))
    if learn:
        log = (cogumi.train(config).run_dir / "run.log").read_text()
        assert log.index("in 3 of 6 examples") < log.index("loaded on")


def test_no_run_is_left_where_the_reward_is_refused(config: Config, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes `middle`"):
        cogumi.train(config, cogumi__rewards=["exact_match"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("installed", "cogumi", "train", "words"),
    [
        (False, {}, {}, r"train\.use_vllm.*not installed.*lane stable\+vllm"),
        (True, {}, {"top_p": 0.8}, r"train\.top_p 0\.8: .*vllm_importance_sampling_correction: false"),
        (True, {"behaviour_logps": "rollout"}, {}, r"cogumi\.behaviour_logps.*sampler_correction: none"),
        (True, {}, {"vllm_structured_outputs_regex": "[a-z]+"}, r"train\.vllm_structured_outputs_regex"),
        (True, {}, {"generation_kwargs": {"logit_bias": {"5": 50}}}, r"train\.generation_kwargs\.logit_bias"),
        (True, {}, {"vllm_enable_sleep_mode": True}, r"train\.vllm_enable_sleep_mode.*GPU"),
        (True, {"sampler_correction": "none"}, {"top_p": 0.8}, ""),
        (True, {"sampler_correction": "none", "behaviour_logps": "rollout"}, {}, ""),
    ],
)
def test_what_vllm_cannot_do_is_said_before_it_is_started(
    installed: bool, cogumi: dict[str, Any], train: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cogumi.methods.sampler.find_spec", lambda name: object() if installed else None)
    params = SimpleNamespace(SamplingParams=SimpleNamespace(__struct_fields__=("top_p", "logit_bias")))
    monkeypatch.setitem(sys.modules, "vllm", params)
    sections = {"model": {"name": "m"}, "data": {"source": "d", "format": "prompt_completion"}}
    options = {"method": "gspo", **cogumi}
    run = load_config(sections | {"cogumi": options, "train": {"use_vllm": True, "use_cpu": True, **train}})
    assert_said(run, words)


def assert_said(run: RunConfig, words: str) -> None:
    """The settings are refused with these words, or with "" not at all."""
    args = building.trl_arguments(run)
    with pytest.raises(UsageError, match=words) if words else nullcontext():
        refuse_settings(run, args)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"foo": 5}, r"train\.generation_kwargs\.foo: transformers' GenerationConfig has no such setting"),
        ({"temprature": 5}, "did you mean temperature"),
        ({"stop_strings": ["\n"]}, r"set cogumi\.stop"),
        ({"max_new_tokens": 5}, r"set train\.max_completion_length alone"),
        ({"num_return_sequences": 2}, r"set train\.num_generations alone"),
        ({"no_repeat_ngram_size": 3, "cache_implementation": "static"}, ""),
    ],
)
def test_settings_that_the_sampler_does_not_know_are_refused(
    settings: dict[str, Any], words: str, config: Config
) -> None:
    assert_said(load_config(config, train__generation_kwargs=settings), words)
