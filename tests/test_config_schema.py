"""The JSON schema of a YAML takes what `load_config` takes, and refuses unknown keys and wrong types."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cogumi.config.json_schema import build_schema
from cogumi.config.schema import load_config
from cogumi.config.source import PACKAGE
from cogumi.core.errors import UsageError

CONFIGS = sorted((PACKAGE / "configs").rglob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft7Validator:
    schema = build_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(path: Path, schema: jsonschema.Draft7Validator) -> None:
    assert [error.message for error in schema.iter_errors(yaml.safe_load(path.read_text()))] == []


TAKEN = {
    "train.learning_rate: 5e-7": "YAML 1.1 reads it as text",
    "train.learning_rate: null": "removes the key",
    "train.save_strategy: no": "YAML 1.1 reads it as a bool",
    "train.loss_type: gspo-length": "a loss of cogumi's",
    "train.report_to: [tensorboard]": "a list or a name",
    "cogumi.preflight: off": "YAML 1.1 reads it as a bool",
    "cogumi.processes: all": "a number or a word",
    "lora.target_modules: all-linear": "a name or a list",
    "model.quantization_config: {load_in_4bit: true}": "a section of transformers",
}
REFUSED = {
    "cogumi.max_hour: 3": "cogumi",
    "model.nam: x": "model",
    "data.fim.rate: 1": "data.fim",
    "train.lr: 1": "train",
    "train.output_dir: x": "train",
    "lora.rank: 8": "lora",
    "lora.peft_type: LORA": "lora",
    "model.quantization_config: {load_in_4bits: true}": "model.quantization_config",
    "train.learning_rate: fast": "train.learning_rate",
    "train.max_steps: many": "train.max_steps",
    "train.loss_type: gpso": "train.loss_type",
    "cogumi.method: grpo": "cogumi.method",
    "cogumi.processes: some": "cogumi.processes",
    "cogumi.stop: ['']": "cogumi.stop[0]",
}


def with_line(line: str) -> Any:
    """A GSPO config with one more line, as in `train.lr: 1`."""
    key, _, value = line.partition(": ")
    config = yaml.safe_load((PACKAGE / "configs/smoke/gspo.yaml").read_text())
    *sections, name = key.split(".")
    section = config
    for part in sections:
        section = section.setdefault(part, {})
    section[name] = yaml.safe_load(value)
    return config


@pytest.mark.parametrize("line", TAKEN)
def test_what_a_yaml_may_hold_is_valid(line: str, schema: jsonschema.Draft7Validator) -> None:
    load_config(with_line(line))
    assert [error.message for error in schema.iter_errors(with_line(line))] == []


@pytest.mark.parametrize(("line", "place"), REFUSED.items())
def test_what_a_run_refuses_is_invalid(line: str, place: str, schema: jsonschema.Draft7Validator) -> None:
    with pytest.raises(UsageError):
        load_config(with_line(line))
    assert [error.json_path for error in schema.iter_errors(with_line(line))] == [f"$.{place}"]


def test_data_may_be_missing_with_an_environment_alone(schema: jsonschema.Draft7Validator) -> None:
    config: dict[str, Any] = {"model": {"name": "x"}, "cogumi": {"method": "gspo"}}
    assert not schema.is_valid(config)
    config["cogumi"]["environment"] = "calculator"
    assert schema.is_valid(config)


def test_each_method_has_the_keys_of_its_config_class(schema: jsonschema.Draft7Validator) -> None:
    config = with_line("train.num_generations: 4")
    assert schema.is_valid(config)
    config["cogumi"]["method"] = "sft"
    assert not schema.is_valid(config)


def test_the_command_prints_it(command_line: Any) -> None:
    status, output, errors = command_line("config-schema")
    assert (status, json.loads(output), errors) == (0, build_schema(), "")
