"""A mistake in a config is one line that names the place, the key and the fix."""

from pathlib import Path

import pytest
import yaml
from golden import Golden

from cogumi.config.schema import dump_config, load_config, read_config
from cogumi.config.source import parse_overrides
from cogumi.core.errors import UsageError

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


def refused(path: Path, text: str | None = None, **overrides: object) -> UsageError:
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(path, **overrides)
    assert "\n" not in str(caught.value)
    return caught.value


def refusal(path: Path, text: str | None = None, **overrides: object) -> str:
    return str(refused(path, text, **overrides))


@pytest.mark.parametrize(
    ("overrides", "train"),
    [
        ({}, {}),
        ({"save_strategy": False}, {"save_strategy": "no"}),  # as YAML 1.1 reads a bare `no`
        ({"eval_strategy": "no"}, {"eval_strategy": "no"}),
        ({"max_steps": -1, "save_steps": 0.25}, {"max_steps": -1, "save_steps": 0.25}),
        ({"learning_rate": 0.0, "warmup_steps": 0.1}, {"learning_rate": 0.0, "warmup_steps": 0.1}),
    ],
)
def test_a_good_config_is_bound_to_the_trainers_types(
    config: Path, overrides: dict[str, object], train: dict[str, object]
) -> None:
    run = load_config(config, **{f"train__{key}": value for key, value in overrides.items()})
    assert run.train == {"learning_rate": 5e-7, "max_steps": 3} | train  # YAML 1.1 reads 5e-7 as a string
    assert run.run_dir == Path("runs/run")


def test_paths_begin_at_home_where_they_say_so(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    keys = [
        "model.name",
        "model.adapter",
        *(f"cogumi.{key}" for key in ("run_dir", "mirror", "merge_base", "compare_with")),
    ]
    run = load_config(config, **{key.replace(".", "__"): "~/a" for key in keys})
    sections = {"model": run.model, "cogumi": run.cogumi}
    values = {key: str(getattr(sections[key.partition(".")[0]], key.partition(".")[2])) for key in keys}
    assert values == dict.fromkeys(keys, "/home/me/a")


def test_null_takes_a_key_away_unless_it_is_one_of_its_values(config: Path) -> None:
    run = load_config(config, train__max_steps=None, lora__target_modules=None)
    assert run.train == {"learning_rate": 5e-7}
    assert run.lora == {"target_modules": None}  # peft's own choice for the architecture


def test_a_merge_key_may_be_overridden(config: Path) -> None:
    config.write_text(GOOD.replace("train:\n", "train:\n  <<: {max_steps: 9, warmup_steps: 2}\n"))
    assert load_config(config).train == {"learning_rate": 5e-7, "max_steps": 3, "warmup_steps": 2}


def test_a_bare_off_is_a_word(config: Path) -> None:
    config.write_text(GOOD + "  compile: off\n")  # which YAML 1.1 reads as False
    assert load_config(config).cogumi.compile == "off"
    assert load_config(config, **parse_overrides(["cogumi.compile=layers"])).cogumi.compile == "layers"
    assert "cogumi.compile = 'on'" in refusal(config, cogumi__compile=True)
    assert "cogumi.compile = 'all': Input should be 'auto', 'off' or 'layers'" in refusal(config, cogumi__compile="all")


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


@pytest.mark.parametrize(
    ("old", "new", "line", "key"),
    [
        ("max_steps: 3", "max_stepz: 3", 7, "train.max_stepz"),
        ("max_steps: 3", "max_steps: many", 7, "train.max_steps"),
        ("  source: cogumi:stdlib", "  sauce: x", 3, "data.source"),
        ("  source: cogumi:stdlib", "  source: x\n  colum: y", 5, "data.colum"),
        ("  source: cogumi:stdlib", "  source: x\n  fim: {fim_rate: 2}", 5, "data.fim.fim_rate"),
        ("  source: cogumi:stdlib", "  source: x\n  mix: [{source: y}]", 4, "data.source"),
        ("  source: cogumi:stdlib", "  mix: [{source: y}]\n  split: z", 5, "data.split"),
        ("  source: cogumi:stdlib", "  mix: [{source: y, wait: 1}]", None, "data.mix.0.wait"),
        ("  source: cogumi:stdlib", "  mix: [{source: y, weight: 0}]", 4, "data.mix.0.weight"),
        ("  source: cogumi:stdlib", "  source: x\n  fraction: 1.5", 5, "data.fraction"),
        ("method: sft", "method: spo", 9, "cogumi.method"),
        ("train:", "trian:", 5, "trian"),
        ("train:", "lora:\n  lora_alpah: 8\ntrain:", 6, "lora.lora_alpah"),
        ("max_steps: 3", "max_steps: 3\n  max_steps: 4", 8, "train.max_steps"),
        ("max_steps: 3", "max_steps: [3", 8, ""),
        ("max_steps: 3", "max_steps: !!python/object:os.system x", 7, ""),
        ("max_steps: 3", "max_steps: \0", None, ""),
        ("max_steps: 3", "[1, 2]: 3", 7, ""),
        ("max_steps: 3", "output_dir: x", 7, "train.output_dir"),
        ("cogumi:\n  method: sft\n", "", None, "cogumi"),
        ("train:\n  learning_rate: 5e-7\n  max_steps: 3", "train: fast", 5, "train"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_file_line_and_key(
    config: Path, old: str, new: str, line: int | None, key: str, golden: Golden
) -> None:
    assert old in GOOD
    error = refused(config, GOOD.replace(old, new))
    assert (error.place, error.key) == (f"{config}:{line}" if line else str(config), key)
    golden("config", str(error))


def test_a_missing_file_names_the_near_one(config: Path) -> None:
    assert refusal(config.with_name("rnu.yaml")).endswith(f"no such config file; did you mean {config}?")
    assert "is a directory" in refusal(config.parent)
    assert refusal(5) == "5 is no config; give a YAML file, a name of `cogumi cp`, or a dict"  # type: ignore[arg-type]
    assert "no such config file" in refusal(config / "x.yaml")
    config.write_bytes(b"model: \xe9\n")
    assert "cannot be read" in refusal(config)


def test_a_config_of_the_package_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    run = load_config("smoke/llama-3.1-8b-sft")
    assert (run.cogumi.method, run.data.format, str(run.run_dir)) == ("sft", "chat", "runs/smoke-llama-sft")
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "sft").write_text("model: {}\n")  # a file of the user's goes before it
    with golden.raises("config", key="data", place="smoke/sft"):
        load_config("smoke/sft")
    with golden.raises("config", place="smoke/llama-3.1-8b-dop", fix="smoke/llama-3.1-8b-dpo"):
        load_config("smoke/llama-3.1-8b-dop")


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("train.per_device_train_batch_size", 0, "must be at least 1"),
        ("train.gradient_accumulation_steps", 0, "must be at least 1"),
        ("train.max_steps", 0, "must be at least 1, or -1 for train.num_train_epochs"),
        ("train.max_steps", -5, "must be at least 1, or -1"),
        ("train.save_steps", 0, "must be at least 1 step, or a share"),  # Trainer: no checkpoint at all
        # Trainer: nothing logged but the first step
        ("train.logging_steps", -5, "must be at least 1 step, or a share"),
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
def test_a_number_that_means_nothing_is_refused(
    config: Path, key: str, value: float, rule: str, golden: Golden
) -> None:
    with golden.raises("config", key=key, place=f"override {key}", message=rule):
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
    config: Path, key: str, wrong: list[float], right: list[float], golden: Golden
) -> None:
    config.write_text(GOOD.replace("method: sft", "method: gspo"))
    for value in wrong:
        with golden.raises("config", key=f"train.{key}", place=f"override train.{key}") as refused:
            read_config(config, {f"train__{key}": value})
        assert "\n" not in str(refused.value)
    for value in right:
        assert read_config(config, {f"train__{key}": value})[0].train[key] == value


def test_environment_wins_over_the_file_and_the_call_over_both(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COGUMI_TRAIN__MAX_STEPS", "5")
    monkeypatch.setenv("COGUMI_DATA__FIM__MIDDLE_CHARS", "[2, 4]")
    run = load_config(config)
    assert run.train["max_steps"] == 5
    assert run.data.fim.middle_chars == (2, 4)
    assert load_config(config, train__max_steps=7).train["max_steps"] == 7


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *((f"COGUMI_{key}", "5", "names no config key") for key in ("TRIAN__MAX_STEPS", "TRAIN_MAX_STEPS", "TRAIN__")),
        ("COGUMI_TRAIN__MAX_STEPS", "soon", "train.max_steps = 'soon'"),
    ],
)
def test_a_wrong_environment_variable_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    assert refusal(config).startswith(f"environment {name}: {says}")


def test_command_line_words_become_overrides(golden: Golden) -> None:
    assert parse_overrides(["train.max_steps=5", "model.name=a=b"]) == {"train__max_steps": 5, "model__name": "a=b"}
    with golden.raises("config", message="train.max_steps", fix="key=value"):
        parse_overrides(["train.max_steps"])


def test_the_written_config_is_loadable_and_keeps_no_secret(config: Path, tmp_path: Path) -> None:
    run = load_config(config, train__hub_token="hf_abcdefgh", train__eos_token="<|end|>")
    written = dump_config(run)
    assert "hf_abcdefgh" not in written
    assert yaml.safe_load(written)["train"]["hub_token"] == "<redacted>"
    (tmp_path / "again.yaml").write_text(written)
    assert load_config(tmp_path / "again.yaml").train["eos_token"] == "<|end|>"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"data__overlong": "truncate"}, ("data.overlong", "for data.format: fim it is data.fim.overlong")),
        ({"data__format": "chat", "data__column": "text"}, ("data.column", "it is for data.format: fim")),
        ({"data__format": "chat", "data__fim__max_length": 64}, ("data.fim.max_length", "it is for data.format")),
        ({"cogumi__docs_per_step": 8}, ("cogumi.docs_per_step", "it is for cogumi.method: gspo")),
        ({"cogumi__thinking": False}, ("cogumi.thinking", "data.format: fim")),  # which no template would see
    ],
)
def test_keys_that_are_not_looked_at_are_refused(
    overrides: dict[str, object], says: tuple[str, str], golden: Golden
) -> None:
    base = {"model": {"name": "x"}, "data": {"source": "x"}, "cogumi": {"method": "sft"}}
    with golden.raises("config", key=says[0], message=says[1]):
        load_config(base, **overrides)
    chat = load_config(base, data__format="chat", data__fim__seed=3, data__overlong="truncate", cogumi__thinking=False)
    assert chat.cogumi.thinking is False
    mix = [{"source": "a", "format": "chat"}, {"source": "b"}]
    load_config(base | {"data": {"mix": mix}}, data__fim__max_length=64, data__overlong="truncate")


def test_a_mix_is_written_as_it_was_given(config: Path, tmp_path: Path) -> None:
    text = GOOD.replace(
        "source: cogumi:stdlib", "mix: [{source: a, weight: 9}, {source: o/b, revision: main, columns: {prompt: q}}]"
    )
    config.write_text(text)
    run = load_config(config)
    assert [(each.source, each.weight) for each in run.data.mix] == [("a", 9.0), ("o/b", 1.0)]
    (tmp_path / "again.yaml").write_text(dump_config(run))
    assert load_config(tmp_path / "again.yaml").data == run.data
