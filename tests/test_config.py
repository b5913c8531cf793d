"""A mistake in a config is one line that names the place, the key and the fix."""

from pathlib import Path

import pytest
import yaml

from cogumi.config import dump_config, load_config, parse_overrides, read_config
from cogumi.errors import UsageError

GOOD = """\
model:
  name: cogumi:small-base
data:
  source: cogumi:stdlib
train:
  learning_rate: 5e-7
  max_steps: 3
cogumi:
  method: sft
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    return path


def refusal(path: Path, text: str | None = None, **overrides: object) -> str:
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(path, **overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_config_is_bound_to_the_trainers_types(config: Path) -> None:
    run = load_config(config)
    assert run.train == {"learning_rate": 5e-7, "max_steps": 3}  # YAML 1.1 reads 5e-7 as a string
    assert run.run_dir == Path("runs/run")


def test_null_takes_a_key_away_unless_it_is_one_of_its_values(config: Path) -> None:
    run = load_config(config, train__max_steps=None, lora__target_modules=None)
    assert run.train == {"learning_rate": 5e-7}
    assert run.lora == {"target_modules": None}  # peft's own choice for the architecture


def test_a_bare_off_is_a_word(config: Path) -> None:
    config.write_text(GOOD + "  compile: off\n")  # which YAML 1.1 reads as False
    assert load_config(config).cogumi.compile == "off"
    assert load_config(config, **parse_overrides(["cogumi.compile=layers"])).cogumi.compile == "layers"
    assert "cogumi.compile = 'on'" in refusal(config, cogumi__compile=True)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("train=5", "override train: train: must be a section (keys and values), is 5"),
        ("data=x.parquet", "override data: data: must be a section (keys and values), is 'x.parquet'"),
        ("data.fim=5", "override data.fim: data.fim: must be a section (keys and values), is 5"),
        ("train.max_steps.more=1", "max_steps: must be a section (keys and values), is 3"),
    ],
)
def test_a_section_that_is_given_a_value_is_one_line(config: Path, word: str, says: str) -> None:
    assert says in refusal(config, **parse_overrides([word]))


@pytest.mark.parametrize("section", ["model", "data", "cogumi", "lora", "train"])
def test_a_section_of_a_file_that_is_a_value_is_not_called_missing(section: str, config: Path) -> None:
    values = yaml.safe_load(config.read_text()) | {section: 5}
    config.write_text(yaml.safe_dump(values))
    assert f"{section}: must be a section (keys and values), is 5" in refusal(config)


def test_every_shipped_config_loads() -> None:
    configs = sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml"))
    assert len(configs) >= 2
    for path in configs:
        load_config(path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("max_steps: 3", "max_stepz: 3", "run.yaml:7: unknown key `train.max_stepz` (SFTConfig, trl 1.15.0); did you mean"),
        ("max_steps: 3", "max_steps: many", "run.yaml:7: train.max_steps = 'many': Input should be a valid integer"),
        ("  source: cogumi:stdlib", "  sauce: x", "run.yaml:3: `data.source` is missing"),
        ("  source: cogumi:stdlib", "  source: x\n  colum: y", "run.yaml:5: unknown key `data.colum`; did you mean data.column?"),
        ("  source: cogumi:stdlib", "  source: x\n  fim: {fim_rate: 2}", "run.yaml:5: data.fim.fim_rate = 2:"),
        ("  source: cogumi:stdlib", "  source: x\n  mix: [{source: y}]", "run.yaml:4: data.source beside data.mix would be"),
        ("  source: cogumi:stdlib", "  mix: [{source: y}]\n  split: z", "run.yaml:5: data.split beside data.mix would be"),
        ("  source: cogumi:stdlib", "  mix: [{source: y, wait: 1}]", "`data.mix.0.wait`; did you mean data.mix.0.weight?"),
        ("  source: cogumi:stdlib", "  mix: [{source: y, weight: 0}]", "data.mix.0.weight = 0: Input should be greater than 0"),
        ("  source: cogumi:stdlib", "  source: x\n  fraction: 1.5", "run.yaml:5: data.fraction = 1.5: Input should be less"),
        ("method: sft", "method: spo", "run.yaml:9: cogumi.method = 'spo': Input should be 'sft', 'dpo' or 'gspo'"),
        ("train:", "trian:", "run.yaml:5: unknown key `trian`; did you mean train?"),
        ("train:", "lora:\n  rank: 8\ntrain:", "run.yaml:6: unknown key `lora.rank` (LoraConfig, peft 0.21.2)"),
        ("max_steps: 3", "max_steps: 3\n  max_steps: 4", "run.yaml:8: `train.max_steps` is set twice (first at"),
        ("max_steps: 3", "max_steps: [3", "run.yaml:8: not valid YAML"),
        ("max_steps: 3", "max_steps: !!python/object:os.system x", "run.yaml:7: not valid YAML"),
        ("max_steps: 3", "max_steps: \0", "run.yaml: not valid YAML"),
        ("max_steps: 3", "[1, 2]: 3", "run.yaml:7: not valid YAML"),
        ("max_steps: 3", "output_dir: x", "run.yaml:7: train.output_dir is the run's own; set cogumi.run_dir"),
        ("cogumi:\n  method: sft\n", "", "run.yaml: section `cogumi:` is missing"),
        ("train:\n  learning_rate: 5e-7\n  max_steps: 3", "train: fast", "run.yaml:5: train: must be a section (keys"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_file_line_and_key(config: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    assert says in refusal(config, GOOD.replace(old, new))


def test_a_missing_file_names_the_near_one(config: Path) -> None:
    assert refusal(config.with_name("rnu.yaml")).endswith(f"no such config file; did you mean {config}?")
    assert "is a directory" in refusal(config.parent)
    assert "cannot be read" in refusal(config / "x.yaml")


def test_a_config_of_the_package_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = load_config("smoke/llama-3.1-8b-sft")
    assert (run.cogumi.method, run.data.format, str(run.run_dir)) == ("sft", "chat", "runs/smoke-llama-sft")
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "sft").write_text("model: {}\n")  # a file of the user's goes before it
    with pytest.raises(UsageError, match="section `data:` is missing"):
        load_config("smoke/sft")
    with pytest.raises(UsageError, match=r"no such config file; did you mean smoke/llama-3.1-8b-dpo\?"):
        load_config("smoke/llama-3.1-8b-dop")


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("train.per_device_train_batch_size", 0, "must be at least 1"),
        ("train.gradient_accumulation_steps", 0, "must be at least 1"),
        ("train.max_steps", 0, "must be at least 1, or -1 for train.num_train_epochs"),
        ("train.max_steps", -5, "must be at least 1, or -1"),
        ("train.save_steps", 0, "must be at least 1 step, or a share"),  # Trainer: no checkpoint at all
        (
            "train.logging_steps",
            -5,
            "must be at least 1 step, or a share",
        ),  # Trainer: nothing logged but the first step
        ("train.save_total_limit", -1, "must be at least 1"),
        ("train.num_train_epochs", 0, "must be more than 0"),
        ("train.learning_rate", -1.0, "must be 0 or more"),
        ("train.learning_rate", float("nan"), "must be 0 or more"),
        ("train.warmup_steps", -5, "must be 0 or more"),
        ("train.adam_beta1", 5.0, "must be at least 0 and below 1"),
        ("lora.r", 0, "must be at least 1"),
        ("lora.lora_dropout", 1.5, "must be at least 0 and below 1"),
    ],
)
def test_a_number_that_means_nothing_is_refused(config: Path, key: str, value: float, rule: str) -> None:
    with pytest.raises(UsageError, match=rf"override {key}: {key} = {value:g}: {rule}"):
        load_config(config, **{key.replace(".", "__"): value})


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [
        ("temperature", [0, -1.0, float("inf"), float("nan")], [0.1, 1.0, 2]),
        ("top_p", [0, 1.5, -0.1], [0.9, 1.0]),
        ("top_k", [-1], [0, 50]),
        ("min_p", [-0.1, 1.1], [0.0, 0.05, 1.0]),
        ("repetition_penalty", [0, -1.0], [1.0, 1.1]),
        ("max_completion_length", [0, -8], [1]),
    ],
)
def test_sampling_that_fails_at_the_first_rollout_is_refused(
    config: Path, key: str, wrong: list[float], right: list[float]
) -> None:
    config.write_text(GOOD.replace("method: sft", "method: gspo"))
    for value in wrong:
        with pytest.raises(UsageError, match=rf"override train\.{key}: train\.{key} = .*: must be ") as refused:
            read_config(config, {f"train__{key}": value})
        assert "\n" not in str(refused.value)
    for value in right:
        assert read_config(config, {f"train__{key}": value})[0].train[key] == value


def test_numbers_that_mean_something_are_taken(config: Path) -> None:
    of_train = {"max_steps": -1, "save_steps": 0.25, "learning_rate": 0.0, "warmup_steps": 0.1}
    assert (
        load_config(config, **{f"train__{key}": value for key, value in of_train.items()}).train.items()
        >= of_train.items()
    )


def test_environment_wins_over_the_file_and_the_call_over_both(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COGUMI_TRAIN__MAX_STEPS", "5")
    monkeypatch.setenv("COGUMI_DATA__FIM__MIDDLE_CHARS", "[2, 4]")
    run = load_config(config)
    assert run.train["max_steps"] == 5
    assert run.data.fim.middle_chars == (2, 4)
    assert load_config(config, train__max_steps=7).train["max_steps"] == 7


@pytest.mark.parametrize("name", ["COGUMI_TRIAN__MAX_STEPS", "COGUMI_TRAIN_MAX_STEPS", "COGUMI_TRAIN__"])
def test_an_environment_variable_that_names_no_key_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "5")
    assert refusal(config).startswith(f"environment {name}: names no config key")


def test_a_wrong_environment_value_names_its_variable(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COGUMI_TRAIN__MAX_STEPS", "soon")
    assert refusal(config).startswith("environment COGUMI_TRAIN__MAX_STEPS: train.max_steps = 'soon'")


def test_command_line_words_become_overrides() -> None:
    assert parse_overrides(["train.max_steps=5", "model.name=a=b"]) == {"train__max_steps": 5, "model__name": "a=b"}
    with pytest.raises(UsageError, match="key=value"):
        parse_overrides(["train.max_steps"])


def test_the_written_config_is_loadable_and_keeps_no_secret(config: Path, tmp_path: Path) -> None:
    run = load_config(config, train__hub_token="hf_abcdefgh", train__eos_token="<|end|>")
    written = dump_config(run)
    assert "hf_abcdefgh" not in written
    assert yaml.safe_load(written)["train"]["hub_token"] == "<redacted>"
    (tmp_path / "again.yaml").write_text(written)
    assert load_config(tmp_path / "again.yaml").train["eos_token"] == "<|end|>"


def test_a_flag_for_thinking_that_no_template_would_see_is_refused() -> None:
    base = {"model": {"name": "x"}, "data": {"source": "x"}, "cogumi": {"method": "sft", "thinking": False}}
    with pytest.raises(UsageError, match=r"cogumi.thinking would be ignored: data.format: fim"):
        load_config(base)
    assert load_config(base, data__format="chat").cogumi.thinking is False


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"data__overlong": "truncate"},
            r"data.overlong would be ignored: for data.format: fim it is data.fim.overlong; drop",
        ),
        (
            {"data__format": "chat", "data__column": "text"},
            r"data.column would be ignored: it is for data.format: fim; drop",
        ),
        (
            {"data__format": "chat", "data__fim__max_length": 64},
            r"data.fim.max_length would be ignored: it is for data.format",
        ),
        (
            {"cogumi__docs_per_step": 8},
            r"cogumi.docs_per_step would be ignored: it is for cogumi.method: gspo; drop it",
        ),
    ],
)
def test_keys_that_are_not_looked_at_are_refused(overrides: dict[str, object], says: str) -> None:
    base = {"model": {"name": "x"}, "data": {"source": "x"}, "cogumi": {"method": "sft"}}
    with pytest.raises(UsageError, match=says):
        load_config(base, **overrides)
    load_config(base, data__format="chat", data__fim__seed=3, data__overlong="truncate")
    mix = [{"source": "a", "format": "chat"}, {"source": "b"}]
    load_config(base | {"data": {"mix": mix}}, data__fim__max_length=64, data__overlong="truncate")


def test_a_bare_no_is_the_word_it_looks_like(config: Path) -> None:
    config.write_text(GOOD + "\n")
    assert load_config(config, train__save_strategy=False).train["save_strategy"] == "no"
    assert load_config(config, train__eval_strategy="no").train["eval_strategy"] == "no"


def test_a_mix_is_written_as_it_was_given(config: Path, tmp_path: Path) -> None:
    text = GOOD.replace(
        "source: cogumi:stdlib", "mix: [{source: a, weight: 9}, {source: o/b, revision: main, columns: {prompt: q}}]"
    )
    config.write_text(text)
    run = load_config(config)
    assert [(each.source, each.weight) for each in run.data.mix] == [("a", 9.0), ("o/b", 1.0)]
    (tmp_path / "again.yaml").write_text(dump_config(run))
    assert load_config(tmp_path / "again.yaml").data == run.data
