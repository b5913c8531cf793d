"""What is read from the libraries' sources is what the libraries say: a move upstream fails here."""

import dataclasses
import inspect
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import trl
import yaml
from golden import Golden
from pydantic import TypeAdapter, ValidationError
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from cogumi.config.binding import (
    HOMES,
    MORE_NAMES,
    NAMED_IN_HELP,
    QUANTIZATION,
    config_class,
    defaults_in_source,
    hints_imported,
    hints_in_source,
    reporters_in_source,
)
from cogumi.config.schema import load_config, read_config
from cogumi.core.errors import UsageError

CONFIGS = Path(__file__).parents[1] / "configs"
of_trl = pytest.mark.parametrize("name", ["SFTConfig", "DPOConfig", "GRPOConfig"])
of_all = pytest.mark.parametrize("name", ["SFTConfig", "DPOConfig", "GRPOConfig", "LoraConfig"])


@of_all
def test_the_source_has_exactly_the_keys_of_the_signature(name: str) -> None:
    read, real = hints_in_source(name), hints_imported(name)
    assert read.keys() == real.keys()
    for key, hint in read.items():  # the same type, or one that says less, or an enumeration by its values
        output = str(hint)
        assert hint == real[key] or "Any" in output or "Literal" in output, key


@of_trl
def test_the_source_has_the_defaults_of_the_signature(name: str) -> None:
    fields = [field for field in dataclasses.fields(config_class(name)) if field.init]
    real = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    read = defaults_in_source(name)
    assert read == {key: real[key] for key in read}
    assert real.keys() - read.keys() <= {"optim"}  # which depends on the version of torch


def test_a_setting_of_zero_is_no_default() -> None:
    run = load_config("smoke/sft", train__learning_rate=0.0, train__warmup_steps=None)
    assert run.setting("learning_rate") == 0.0
    assert run.setting("weight_decay") == trl.SFTConfig.weight_decay


def test_the_hints_of_a_quantization_are_those_of_the_signature() -> None:
    parameters = inspect.signature(config_class("BitsAndBytesConfig")).parameters.values()
    defaults = {
        parameter.name: parameter.default for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD
    }
    assert QUANTIZATION.keys() == defaults.keys()
    for name, default in defaults.items():
        if default is not None:
            assert TypeAdapter(QUANTIZATION[name]).validate_python(default) == default
            assert QUANTIZATION[name] is type(default) or get_origin(QUANTIZATION[name]) is Literal


@of_all
def test_what_the_source_says_takes_every_default(name: str) -> None:
    read = hints_in_source(name)
    for field in dataclasses.fields(config_class(name)):
        if not field.init or field.default is dataclasses.MISSING:
            continue
        value = field.default.value if isinstance(field.default, Enum) else field.default
        try:
            TypeAdapter(read[field.name]).validate_python(value)
        except ValidationError:
            assert value is None  # which stands for a key that is not given
    assert len(read) > 40


@pytest.mark.parametrize(
    ("key", "known"),
    [
        (key, hint)
        for key, hint in hints_in_source("SFTConfig").items()
        if get_origin(hint) is Literal and key not in NAMED_IN_HELP
    ],
)
def test_a_value_that_the_source_does_not_list_is_refused_by_the_class_as_well(
    key: str, known: Any, tmp_path: Path
) -> None:
    values = {"output_dir": str(tmp_path), "report_to": "none", "bf16": False}
    with pytest.raises(ValueError, match="cosin"):
        config_class("SFTConfig")(**values, **{key: "cosin"})
    assert all(isinstance(argument, str) for argument in get_args(known))


@of_trl
def test_values_that_a_help_names_are_found(name: str) -> None:
    read, real = hints_in_source(name), hints_imported(name)
    for key in NAMED_IN_HELP:
        if key in read and (name, key) not in MORE_NAMES:
            assert "Literal" in str(read[key]), key
            assert real[key] in (str, list[str])  # where TRL says it with a type, that is what counts
    assert {key for key in NAMED_IN_HELP if key in read} >= {"train_sampling_strategy", "loss_type"}


def test_reporters_are_those_of_transformers() -> None:
    assert reporters_in_source() == list(INTEGRATION_TO_CALLBACK)


def test_a_class_in_another_place_is_imported(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setitem(HOMES, "SFTConfig", "trl.somewhere.else")
    assert hints_in_source("SFTConfig") == hints_imported("SFTConfig")
    with golden.raises("config", key="train.max_stepss", fix="train.max_steps"):
        load_config("smoke/sft", train__max_stepss=5)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Optional[dict[str, Any]]", dict[str, Any] | None),
        ("Union[int, float]", int | float),
        ("SchedulerType", Literal["linear", "none"]),
        ("SchedulerType | str", Literal["linear", "none"]),
        ("SchedulerType | str | None", Literal["linear", "none"] | None),
        ("Somewhere | None", Any | None),
        ("Somewhere[int]", Any),
        ("'Somewhere' | None", Any),
        ("torch.dtype", Any),
    ],
)
def test_annotations_of_all_kinds_are_read(
    written: str, meant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"library_{tmp_path.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise ImportError('it is not to be imported')\n")
    (tmp_path / name / "kinds.py").write_text("class SchedulerType(str, Enum):\n    A = 'linear'\n    B = 'none'\n")
    (tmp_path / name / "config.py").write_text(
        "from .kinds import SchedulerType\n@dataclass\nclass Config:\n"
        f"    shared: ClassVar[int] = 3\n    key: {written} = None\n    own: int = field(init=False)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(HOMES, "Config", f"{name}.config")
    assert hints_in_source("Config") == {"key": meant}


def test_keys_that_unsloth_adds_to_trls_classes_are_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "unsloth" / "models" / "rl.py"
    place.parent.mkdir(parents=True)
    (tmp_path / "unsloth" / "__init__.py").write_text("raise ImportError('it is not to be imported')\n")
    place.write_text("extra = 'unsloth_num_chunks : Optional[int] = field(default = -1)'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "unsloth_num_chunks" in read_config("smoke/gspo", {"train__unsloth_num_chunks": 4})[0].train
    with pytest.raises(UsageError, match=r"unknown key `train\.unsloth_num_chunk_s`"):
        read_config("smoke/gspo", {"train__unsloth_num_chunk_s": 4})
    with pytest.raises(UsageError, match=r"unknown key `lora\.unsloth_num_chunks`"):
        read_config("smoke/gspo", {"lora__unsloth_num_chunks": 4})


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("train.lr_scheduler_type", "cosin", "did you mean cosine?"),
        ("train.optim", "adamw_torhc", "did you mean adamw_torch?"),
        ("train.hub_strategy", "every_safe", "'every_save'"),
        ("train.save_strategy", "stpes", "'steps'"),
        ("train.report_to", "wandbb", "did you mean wandb?"),
        ("train.report_to", ["tensorboard", "mlfow"], "did you mean mlflow?"),
        ("train.loss_type", "gsop", "did you mean gspo?"),
        ("train.scale_rewards", "grup", "'group'"),
        ("train.importance_sampling_level", "sequnce", "'sequence'"),
        ("train.vllm_mode", "colocat", "'colocate'"),
        ("train.learning_rate", "fast", "valid number"),
        ("lora.task_typ", "CAUSAL_LM", "did you mean lora.task_type?"),
        ("lora.bias", "al", "'all'"),
        ("model.quantization_config", {"load_in_4bitt": True}, "load_in_4bit?"),
        ("model.quantization_config", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, "'nf4' or 'fp4'"),
    ],
)
def test_a_misspelt_key_or_value_is_known_without_the_libraries(key: str, value: Any, fix: str, golden: Golden) -> None:
    with pytest.raises(UsageError) as refused:
        read_config("smoke/gspo", {key.replace(".", "__"): value})
    assert fix in str(refused.value)
    assert refused.value.key.startswith(key)
    golden("config", str(refused.value))


@pytest.mark.parametrize(("key", "name"), [("lora__rank", "lora.r"), ("train__lr", "train.learning_rate")])
def test_a_usual_name_of_a_setting_leads_to_the_library_s(key: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {name}[?]"):
        read_config("smoke/sft", {key: 1})


def test_a_renamed_key_of_transformers_is_read_under_its_old_name() -> None:
    """transformers 5.24 calls gradient_checkpointing activation_checkpointing; a lane with 5.17 takes that name too."""
    run, _ = read_config(
        "smoke/qlora", {"train__gradient_checkpointing": None, "train__activation_checkpointing": True}
    )
    assert run.train["gradient_checkpointing"] is True
    values = {"train__gradient_checkpointing": True, "train__activation_checkpointing": False}
    with pytest.raises(
        UsageError, match=r"train.activation_checkpointing and train.gradient_checkpointing are one setting"
    ):
        read_config("smoke/qlora", values)


def test_members_of_enumerations_are_their_values(tmp_path: Path) -> None:
    from transformers.training_args import OptimizerNames

    values = yaml.safe_load((CONFIGS / "smoke" / "sft.yaml").read_text())
    assert load_config(values, train__optim=OptimizerNames.ADAFACTOR).train["optim"] == "adafactor"
