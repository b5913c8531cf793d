"""`cogumi.configure`: the widgets of the main settings, the check of a run, and the YAML that is written."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import cogumi
from cogumi.config.schema import load_config
from cogumi.config.source import PACKAGE
from cogumi.core.errors import UsageError
from cogumi.notebook.form import MAIN_KEYS, Form

CONFIGS = PACKAGE / "configs"
SFT = CONFIGS / "smoke" / "sft.yaml"


@pytest.fixture
def form(tmp_path: Path) -> Form:
    path = tmp_path / "mine.yaml"
    path.write_text(SFT.read_text())
    return Form(path, tmp_path / "new.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_config_is_written_as_the_same_run(path: Path, tmp_path: Path) -> None:
    form = Form(path, tmp_path / path.name)
    assert form.panel.box.children
    assert load_config(form.write()) == load_config(path)


@pytest.mark.parametrize(
    ("key", "entered", "value"),
    [
        ("cogumi.on_red", "stop", "stop"),
        ("cogumi.merge", False, False),
        ("train.learning_rate", "5e-7", "5e-7"),
        ("train.max_steps", "7", 7),
        ("data.max_rows", "null", None),
        ("model.quantization_config", "{load_in_4bit: true}", {"load_in_4bit": True}),
        ("lora.r", "", None),  # the default
    ],
)
def test_an_entry_is_read_back_from_the_yaml(form: Form, key: str, entered: Any, value: Any) -> None:
    before = yaml.safe_load(SFT.read_text())
    form.panel.entries[key].value = entered
    assert form.problem == ""
    again = Form(form.write())
    section, name = key.split(".")
    assert again.get(key) == value
    assert again.panel.entries[key].value == form.panel.entries[key].value
    others = {**before, section: {**before[section], name: value}}
    assert {n: {k: v for k, v in keys.items() if v is not None} for n, keys in others.items()} == again.values


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.max_steps", "many"),
        ("train.max_step", 5),
        ("data.fim", {"middle_chars": [24, 4]}),
        ("cogumi.price_per_hour", -1),
        ("lora.lora_alpha", True),
    ],
)
def test_an_impossible_value_is_named_and_not_written(form: Form, key: str, value: Any, tmp_path: Path) -> None:
    panel = form.panel
    form.set(key, value)
    assert key.partition(".")[2] in form.problem.replace("middle_chars", "fim")
    assert "problem: " in panel.state.value
    panel.write.click()
    assert "is not written: " in panel.note.value
    with pytest.raises(UsageError, match=r"new\.yaml is not written: "):
        form.write()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_file_is_replaced_only_on_request(form: Form, tmp_path: Path) -> None:
    panel, mine = form.panel, tmp_path / "mine.yaml"
    panel.entries["train.max_steps"].value = "21"
    panel.file.value = str(mine)
    panel.write.click()
    assert "mine.yaml exists" in panel.note.value
    assert mine.read_text() == SFT.read_text()
    panel.replace.value = True
    panel.write.click()
    assert "cogumi.start(" in panel.note.value
    assert load_config(mine).train["max_steps"] == 21
    with pytest.raises(UsageError, match="cannot be written"):
        form.write(tmp_path / "nowhere" / "x.yaml")


def test_a_config_of_the_package_is_written_beside_the_notebook(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert cogumi.configure("smoke/sft").write() == Path("sft.yaml")
    assert load_config("sft.yaml").run_dir == Path("runs/sft")


def test_what_is_no_config_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("model:\n  name: a\ntrian:\n  max_steps: 1\n")
    with pytest.raises(UsageError, match=r"x\.yaml:3: unknown key `trian`; did you mean train"):
        Form(path)
    with pytest.raises(UsageError, match="no such config file"):
        Form(tmp_path / "y.yaml")


def test_the_method_decides_which_settings_are_shown(form: Form) -> None:
    assert {"train.max_length"} == set(form.main_keys()) - set(Form({"cogumi": {"method": "gspo"}}).main_keys())
    form.panel.entries["cogumi.method"].value = "gspo"
    shown = [entry.description for entry in form.panel.rows.children]
    assert shown == form.main_keys()
    assert "train.num_generations" in shown
    assert set(MAIN_KEYS) == {*shown, "train.max_length"}


def test_secrets_are_not_shown_and_are_written(form: Form) -> None:
    form.set("train.hub_token", "hf_" + "x" * 34)
    assert "xxx" not in form.panel.yaml.value + repr(form)
    assert "xxx" in form.write().read_text()


def test_without_a_notebook_it_is_one_line(form: Form) -> None:
    assert repr(form).startswith(f"<form of {form.source}: a config for sft; form.write(")
    assert form._repr_mimebundle_() == {"text/plain": repr(form)}
