"""`cogumi.configure`: real widgets over the real signatures, and the YAML that comes of them."""

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pytest
import yaml

import cogumi
from cogumi.config.schema import load_config
from cogumi.config.source import PACKAGE
from cogumi.config.yaml_text import equal_values
from cogumi.core.errors import UsageError
from cogumi.forecast.preflight_report import Line, PreflightReport
from cogumi.notebook import form as forms
from cogumi.notebook.form import Form

CONFIGS = PACKAGE / "configs"
ALL = sorted(CONFIGS.rglob("*.yaml"))
SFT = CONFIGS / "smoke" / "sft.yaml"


def until(true: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait for what a timer or a thread does."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A config of the user's own."""
    path = tmp_path / "mine.yaml"
    path.write_text(SFT.read_text())
    return path


@pytest.fixture
def form(mine: Path, tmp_path: Path) -> Form:
    return Form(mine, tmp_path / "new.yaml")


def leaves(values: dict[str, Any], groups: tuple[str, ...], above: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        key = f"{above}{name}"
        found += leaves(value, groups, f"{key}.") if key in groups and isinstance(value, dict) else [key]
    return found


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_config_opens_with_all_its_keys_and_is_written_as_it_was(path: Path, tmp_path: Path) -> None:
    form = Form(path, tmp_path / path.name)
    sections = ("model", "lora", "data", "train", "cogumi")
    written = yaml.safe_load(path.read_text())
    groups = (*sections, "data.fim", "cogumi.flags")
    assert list(form.panel.entries) == [
        key for section in sections for key in leaves({section: written.get(section, {})}, groups)
    ]
    assert form.problem == ""
    assert form.config == load_config(path)
    assert form.write().read_text() == path.read_text()
    assert load_config(tmp_path / path.name) == load_config(path)


# Entered in a widget, and what the YAML then says of it: one of every kind of field, and of every section.
ENTERED = [
    ("cogumi.on_full", "stop", "stop", widgets.Dropdown),
    ("cogumi.thinking", "null", None, widgets.Dropdown),
    ("cogumi.preflight", "off", "off", widgets.Dropdown),
    ("train.lr_scheduler_type", "constant_with_warmup", "constant_with_warmup", widgets.Dropdown),
    ("train.save_strategy", "no", "no", widgets.Dropdown),
    ("train.bf16", "false", False, widgets.Dropdown),
    ("lora.init_lora_weights", "pissa", "pissa", widgets.Dropdown),
    ("lora.init_lora_weights", "false", False, widgets.Dropdown),
    ("lora.use_dora", True, True, widgets.Checkbox),
    ("data.deduplicate", True, True, widgets.Checkbox),
    ("train.learning_rate", "5e-7", "5e-7", widgets.Text),
    ("train.weight_decay", "0.1", 0.1, widgets.Text),
    ("data.fim.seed", "7", 7, widgets.Text),
    ("cogumi.flags.grad_norm_high", "20", 20, widgets.Text),
    ("data.max_rows", "null", None, widgets.Text),
    ("model.revision", "'0123'", "0123", widgets.Text),
    ("model.adapter", "'runs/a: b/adapter'", "runs/a: b/adapter", widgets.Text),
    ("model.quantization_config", "{load_in_4bit: true}", {"load_in_4bit": True}, widgets.Text),
    ("cogumi.mirror", "null", None, widgets.Text),
    ("data.fim.middle_chars", "[2, 30]", [2, 30], widgets.Text),
    ("data.columns", "{prompt: 'a, b'}", {"prompt": "a, b"}, widgets.Text),
    ("lora.target_modules", "all-linear", "all-linear", widgets.Text),
    ("lora.target_modules", "[q_proj, v_proj]", ["q_proj", "v_proj"], widgets.Text),
    ("cogumi.stop", '["\\n\\n", "#"]', ["\n\n", "#"], widgets.Text),
    ("train.report_to", "none", "none", widgets.Text),
    ("train.hub_token", "a-token", "a-token", widgets.Password),
]


@pytest.mark.parametrize(("key", "entered", "value", "kind"), ENTERED, ids=lambda each: str(each)[:24])
def test_what_is_entered_comes_back_from_the_yaml(
    form: Form, mine: Path, key: str, entered: Any, value: Any, kind: type
) -> None:
    if key not in form.panel.entries:
        form.add(key)
    entry = form.panel.entries[key]
    assert type(entry) is kind
    assert entry.description == key.partition(".")[2]
    entry.value = entered
    assert form.problem == ""
    path = form.write()
    again = Form(path)
    assert equal_values(again.get(key), value)
    assert again.panel.entries[key].value == entry.value
    others = {section: dict(keys) for section, keys in again.values.items()}
    if key.count(".") == 1:
        section, name = key.split(".")
        others[section].pop(name)
        before = {section: dict(keys) for section, keys in yaml.safe_load(mine.read_text()).items()}
        before[section].pop(name, None)
        assert others == before
    assert load_config(path).cogumi.method == "sft"


def test_an_impossible_value_is_told_with_its_key_and_not_written(form: Form, tmp_path: Path) -> None:
    panel = form.panel
    panel.entries["train.max_steps"].value = "many"
    assert form.problem.startswith("train.max_steps = 'many': Input should be a valid integer")
    assert form.config is None
    until(lambda: "train.max_steps" in panel.wrong["train.max_steps"].value)  # after a while, by itself
    assert "problem: train.max_steps" in panel.state.value
    assert panel.tabs.titles == ("model", "lora", "data", "train (problem)", "cogumi")
    panel.write.click()
    assert "is not written: train.max_steps" in panel.said.value
    with pytest.raises(UsageError, match=r"new\.yaml is not written: train\.max_steps = 'many'"):
        form.write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]
    panel.entries["train.max_steps"].value = "20"
    until(lambda: panel.state.value.startswith("<div class='cogumi-said' role='status'>ok: "))
    assert panel.wrong["train.max_steps"].value == ""
    assert panel.tabs.titles == ("model", "lora", "data", "train", "cogumi")
    panel.write.click()
    assert load_config(tmp_path / "new.yaml").train["max_steps"] == 20


@pytest.mark.parametrize(
    ("key", "entered", "told"),
    [
        ("data.fim.middle_chars", "[4, 24", "data.fim.middle_chars = '[4, 24'"),
        ("data.fim.middle_chars", "[24, 4]", "middle_chars: [24, 4] must be 1 <= shortest <= longest"),
        ("cogumi.price_per_hour", "-1", "cogumi.price_per_hour = -1: Input should be greater than 0"),
        ("train.packing", "perhaps", "train.packing = 'perhaps'"),
        ("lora.lora_alpha", "yes", "lora.lora_alpha = True: not a number"),
        ("model.name", "", "model.name"),
    ],
)
def test_what_a_run_would_refuse_is_told(form: Form, key: str, entered: str, told: str) -> None:
    if key not in form.panel.entries:
        form.add(key)
    if key == "train.packing":
        form.set(key, entered)  # no widget takes it
    else:
        form.panel.entries[key].value = entered
    if key == "model.name":
        form.remove(key)
    assert told in form.problem


def test_comments_stay(form: Form, mine: Path) -> None:
    form.panel.entries["train.max_steps"].value = "20"
    form.panel.entries["data.eval_rows"].value = "8"
    before, after = mine.read_text().splitlines(), form.write().read_text().splitlines()
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert [new.split("#")[0].split() for _, new in changed] == [["eval_rows:", "8"], ["max_steps:", "20"]]
    assert changed[0][0].index("#") == changed[0][1].index("#")  # in their column
    assert changed[0][0].partition("#")[2] == changed[0][1].partition("#")[2]


def test_nothing_is_overwritten_without_a_second_click(mine: Path) -> None:
    form = Form(mine)
    panel, before = form.panel, mine.read_text()
    assert panel.file.value == str(mine)
    panel.entries["train.max_steps"].value = "21"
    assert panel.replace.layout.display == "none"
    panel.write.click()
    assert mine.read_text() == before
    assert panel.replace.layout.display == ""
    assert panel.replace.description == "replace mine.yaml"
    assert "mine.yaml exists" in panel.said.value
    panel.file.value = str(mine.with_name("other.yaml"))  # the offer was for another file
    assert panel.replace.layout.display == "none"
    panel.file.value = str(mine)
    with pytest.raises(UsageError, match="exists; name another file"):
        form.write()
    panel.write.click()
    panel.replace.click()
    assert load_config(mine).train["max_steps"] == 21
    assert f"cogumi start {mine}" in panel.said.value
    assert "cogumi.start(" in panel.said.value
    assert [path.name for path in mine.parent.iterdir()] == ["mine.yaml"]


def test_a_place_that_cannot_be_written_is_told(form: Form, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        form.write(tmp_path / "nowhere" / "x.yaml")
    with pytest.raises(UsageError, match="exists; name another file"):
        form.write(tmp_path)
    form.panel.file.value = ""
    form.panel.write.click()
    assert "exists; name another file" in form.panel.said.value


def test_what_comes_with_the_package_is_written_beside_the_notebook(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    form = cogumi.configure("smoke/sft")
    assert form.source == "smoke/sft"
    assert form.write() == Path("sft.yaml")
    assert (tmp_path / "sft.yaml").read_text() == SFT.read_text()


def test_an_unknown_key_is_told_and_can_be_taken_out(mine: Path) -> None:
    mine.write_text(mine.read_text().replace("  max_steps:", "  max_step: 5\n  max_steps:"))
    form = Form(mine, mine.with_name("new.yaml"))
    assert form.problem.startswith("unknown key `train.max_step` (SFTConfig, trl ")
    assert "did you mean train.max_steps?" in form.problem
    assert form.panel.entries["train.max_step"].value == "5"
    until(lambda: "unknown key" in form.panel.wrong["train.max_step"].value)
    form.panel.removers["train.max_step"].click()
    assert form.problem == ""
    assert form.write().read_text() == SFT.read_text()


def test_it_opens_where_there_is_something_to_be_done(mine: Path) -> None:
    mine.write_text(mine.read_text().replace("max_steps", "max_stepz"))
    form = cogumi.configure(mine)
    assert form.panel.tabs.titles[form.panel.tabs.selected_index] == "train (problem)"


def test_a_file_that_is_no_config_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("model:\n  name: a\ntrian:\n  max_steps: 1\n")
    with pytest.raises(UsageError, match=r"x\.yaml:3: unknown key `trian`; did you mean train"):
        Form(path)
    path.write_text("model: [a\n")
    with pytest.raises(UsageError, match=r"x\.yaml:2: not valid YAML"):
        Form(path)
    with pytest.raises(UsageError, match="no such config file"):
        Form(tmp_path / "y.yaml")
    with pytest.raises(UsageError, match="train: must be a section"):
        Form({"model": {"name": "a"}, "train": 3})


def test_keys_are_added_and_removed(form: Form) -> None:
    panel, box = form.panel, form.panel.adders["train"]
    assert len(box.options) > 100  # the real signature
    assert "max_steps" not in box.options
    assert "output_dir" not in box.options
    assert "task_type" not in panel.adders["lora"].options
    assert {"fim.seed", "fim.overlong", "mix"} <= set(panel.adders["data"].options)
    box.value = "packing"
    assert form.get("train.packing") is False
    assert box.value == ""
    assert "packing" not in box.options
    assert list(panel.entries)[-1] == "train.packing"
    assert "packing: false\n" in form.yaml
    assert "packing: false\n" in panel.yaml.value
    assert box.ensure_option  # the page refuses what is none of the options
    for name in ("pack", "packing"):
        box.value = name
        assert "train.pack" not in panel.entries
    panel.removers["train.packing"].click()
    assert "train.packing" not in panel.entries
    assert "packing" in box.options
    assert form.yaml == SFT.read_text()
    for key in ("data.fim.max_length", "data.fim.middle_chars", "data.fim.spm_rate", "lora.r", "lora.lora_alpha"):
        panel.removers[key].click()
    assert "fim" not in form.values["data"]
    assert yaml.safe_load(form.yaml)["lora"] is None
    assert load_config(form.write()).lora == {}
    with pytest.raises(UsageError, match=r"train\.beta is not set in this config"):
        form.remove("train.beta")


def test_every_key_that_can_be_added_is_what_a_run_takes() -> None:
    """Its default, as a YAML holds it, is bound again: nothing is offered that is refused as soon as it is there."""
    for method in ("sft", "dpo", "gspo"):
        form = Form(
            {"model": {"name": "cogumi:small-base"}, "data": {"source": "cogumi:stdlib"}, "cogumi": {"method": method}}
        )
        for section in ("lora", "train"):
            for key in form.can_be_added(section):
                form.add(f"{section}.{key}")
        assert form.problem == ""
        assert len(form.values["train"]) > 100
        assert equal_values(yaml.safe_load(form.yaml), form.values)


@pytest.mark.sweep
def test_a_check_that_broke_off_is_made_again(form: Form) -> None:
    assert forms._worker is not None
    forms._worker.process.kill()
    forms._worker.process.wait()
    form.set("train.max_steps", 5)
    assert form.problem == ""


def test_the_method_decides_the_keys_of_train(form: Form) -> None:
    assert "num_generations" not in form.panel.adders["train"].options
    form.panel.entries["cogumi.method"].value = "gspo"
    assert "num_generations" in form.panel.adders["train"].options
    assert "GRPOConfig" in form.panel.heads["train"].value
    assert form.problem == ""
    form.add("train.num_generations")
    form.panel.entries["cogumi.method"].value = "dpo"
    assert "unknown key `train.num_generations` (DPOConfig" in form.problem


def test_what_a_script_sets_is_shown(form: Form) -> None:
    entries = form.panel.entries
    form.set("train.max_steps", 77)
    form.set("train.gradient_checkpointing", True)
    form.set("cogumi.run_dir", Path("runs/x"))
    assert form.config is not None
    assert form.config.train["max_steps"] == 77
    form.set("train.lr_scheduler_type", "sawtooth")
    assert entries["train.max_steps"].value == "77"
    assert entries["train.gradient_checkpointing"].value is True
    assert entries["cogumi.run_dir"].value == "runs/x"
    assert entries["train.lr_scheduler_type"].value == "sawtooth"
    assert "train.lr_scheduler_type = 'sawtooth'" in form.problem
    with pytest.raises(UsageError, match="names no config key"):
        form.set("max_steps", 3)


def test_every_field_says_what_it_is_for(form: Form) -> None:
    without = [f"{section}.{field.key}" for section, fields in form.fields.items() for field in fields if not field.doc]
    # In cogumi.config.schema these explain themselves, or are explained by what they hold.
    assert without == ["cogumi.method"]


def test_secrets_are_not_shown_and_are_written(form: Form) -> None:
    form.set("train.hub_token", "hf_" + "x" * 34)
    assert "xxx" not in form.panel.yaml.value
    assert "hub_token: &lt;redacted&gt;" in form.panel.yaml.value
    assert "xxx" not in repr(form)
    assert "xxx" in form.write().read_text()


def test_the_environment_goes_over_it_and_that_is_said(form: Form, monkeypatch: Any) -> None:
    assert form.config is not None
    assert form.config.train["max_steps"] == 100
    monkeypatch.setenv("COGUMI_TRAIN__MAX_STEPS", "3")
    assert form.config.train["max_steps"] == 3
    form.panel.check()
    assert "COGUMI_TRAIN__MAX_STEPS" in form.panel.state.value


@pytest.mark.slow("a preflight, which has tests of its own")
def test_the_preflight_of_what_stands_in_the_form(tiny_model: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(SFT.read_text())
    config["model"]["name"] = str(tiny_model)
    config["cogumi"]["run_dir"] = str(tmp_path / "run")
    form = Form(config, tmp_path / "new.yaml")
    panel = form.panel
    assert panel.card.options[:2] == ("this machine", "B200")
    panel.card.value = "H200"
    panel.look.click()
    assert "Planned for: H200" in panel.ahead.value
    assert "nothing is red" in panel.ahead.value
    assert "memory" in panel.ahead.value
    panel.entries["train.max_steps"].value = "3"
    assert "changed since" in panel.ahead.value
    panel.entries["train.max_steps"].value = "no number"
    panel.look.click()
    assert "no preflight: train.max_steps" in panel.ahead.value
    assert not (tmp_path / "run").exists()


def test_without_a_notebook_it_is_one_line(mine: Path) -> None:
    form = cogumi.configure(mine)
    assert repr(form).startswith(f"<form of {mine}, 18 keys: a config for sft; form.write(")
    assert form._repr_mimebundle_() == {"text/plain": repr(form)}


def test_the_kernel_stays_light(form: Form) -> None:
    """trl would keep the kernel busy for seconds, and unsloth has to come before it where there is a GPU."""
    answers = form.fields, form.config, PreflightReport("T4", (Line("memory", "fits"),), {})
    program = (
        "import pickle, sys, cogumi; cogumi.configure; import cogumi.notebook.form_panel;"
        "pickle.load(sys.stdin.buffer);"  # what the other process says
        "print([m for m in ('torch', 'transformers', 'trl', 'peft') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(answers), capture_output=True, check=True)
    assert done.stdout == b"[]\n"
