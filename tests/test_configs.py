"""Every YAML that is handed out: bound to the real signatures, launched by the command it opens with, its CPU twin run."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import prepared_process
import pytest
import yaml

import cogumi
from cogumi.config.schema import load_config
from cogumi.config.source import PACKAGE, copy_template, list_templates
from cogumi.core.errors import UsageError
from cogumi.methods.building import trl_arguments

CONFIGS = PACKAGE / "configs"
ALL = sorted(CONFIGS.rglob("*.yaml"))
REAL = [path for path in ALL if path.parent == CONFIGS]
TWINS = [path for path in ALL if path.parent.name == "smoke"]
# A few steps of each, so that the test is short; the twins themselves take a minute.
SHORT = {
    "sft": {"train__max_steps": 3, "data__max_rows": 48, "data__eval_rows": 4},
    # after 3 steps bfloat16 keeps 69 % of the update
    "dpo": {"train__max_steps": 6, "data__max_rows": 48, "data__eval_rows": 4},
    "gspo": {"train__max_steps": 4, "data__eval_rows": 4},
}
PAIRS = (("llama-3.1-8b-sft", "llama-3.1-8b-dpo"), ("chat-sft", "chat-gspo"), ("qwen3-4b-sft", "qwen3-4b-gspo"))
AFTER = {second: first for first, second in (*PAIRS, ("sft", "gspo"))}
# SFT and DPO, which goes on from it; the smoke run trains chat-sft and chat-gspo.
QUICK = {"llama-3.1-8b-sft", "llama-3.1-8b-dpo"}
HYBRIDS = {"qwen3.5-4b-sft", "gemma-4-e4b-sft"}  # tests/test_hybrids.py runs them
TRAINS = pytest.mark.slow("a training of each method, to its merge")


def test_all_of_them_are_seen() -> None:
    assert len(REAL) >= 9
    assert len(TWINS) + len(REAL) == len(ALL)
    repository = Path(__file__).parents[1]
    assert (repository / "configs").resolve() == CONFIGS  # the layout's name is the package's directory
    assert (repository / "recipes").resolve() == PACKAGE / "recipes"


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_it_binds_and_trl_takes_it(path: Path) -> None:
    run = load_config(path)
    args = trl_arguments(run)
    written = yaml.safe_load(path.read_text())["train"]
    spelled = {"chat_template_path", "loss_type", "max_length", "completion_only_loss"}  # cogumi's, or made explicit
    planned = {"steps_per_generation", "gradient_accumulation_steps"} if run.cogumi.docs_per_step else set()
    for key in written.keys() - spelled - planned:
        got = getattr(args, key)
        assert getattr(got, "value", got) == run.train[key], key  # enums by what they are called


@pytest.mark.parametrize("method", ["sft", "dpo", "gspo"])
def test_a_recipe_wants_three_words(method: str, tmp_path: Path) -> None:
    recipe = [*prepared_process.python(os.environ), "-m", f"cogumi.recipes.{method}"]
    two, three = (
        subprocess.run([*recipe, *["./nothing"] * count], cwd=tmp_path, capture_output=True, text=True, check=False)
        for count in (2, 3)
    )
    assert "python recipes/" in two.stderr
    assert two.returncode == 1
    assert "python recipes/" not in three.stderr
    assert "nothing" in three.stderr  # which is no model


@pytest.mark.parametrize(("config", "expected"), [("llama-3.1-8b-sft", 3), ("gspo", 8)])
def test_the_held_out_loss_is_measured_at_the_batch_of_a_step(config: str, expected: int) -> None:
    """gspo has none: TRL's default, 8, stays."""
    run = load_config(CONFIGS / "smoke" / f"{config}.yaml")
    run.train["per_device_train_batch_size"] = 3 if run.cogumi.method == "sft" else 24
    assert trl_arguments(run).per_device_eval_batch_size == expected


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_it_opens_with_its_command_and_says_what_it_is(path: Path) -> None:
    first, second, *_ = path.read_text().splitlines()
    assert first.startswith(("# cogumi start configs/", "# cogumi train configs/"))
    assert f"configs/{path.relative_to(CONFIGS)}" in first
    assert second.startswith("# ")
    if path in REAL:
        head = "".join(line for line in path.read_text().splitlines()[:4] if line.startswith("#"))
        assert "Fits" in head or "so one H100" in head
        assert (CONFIGS / "smoke" / path.name).exists(), "no twin"


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_a_twin_is_the_same_run_made_small(path: Path) -> None:
    real, twin = load_config(path), load_config(CONFIGS / "smoke" / path.name)
    assert (real.cogumi.method, real.data.format) == (twin.cogumi.method, twin.data.format)
    if path.stem != "llama-3.1-8b-dpo":  # the small base needs the term of SFT beside DPO's
        assert real.train.get("loss_type") == twin.train.get("loss_type")
    assert real.train.get("packing") == twin.train.get("packing")
    assert real.train.get("chat_template_path") == twin.train.get("chat_template_path")
    assert bool(real.cogumi.stop) == bool(twin.cogumi.stop)
    assert twin.model.name.startswith(("cogumi:", "runs/smoke-"))
    assert real.run_dir != twin.run_dir


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a twin, after the one it goes on from, and remembers what it left."""
    home, done = tmp_path_factory.mktemp("twins"), {}

    def run(name: str) -> Any:
        if name not in done:
            more: dict[str, Any] = dict(SHORT[load_config(CONFIGS / "smoke" / f"{name}.yaml").cogumi.method])
            if name in AFTER:
                more["model__name"] = str(run(AFTER[name]).merged)
            done[name] = cogumi.train(CONFIGS / "smoke" / f"{name}.yaml", cogumi__run_dir=str(home / name), **more)
        return done[name]

    return run


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=TRAINS if name in QUICK else pytest.mark.sweep)
        for name in (twin.stem for twin in TWINS)
        if name not in HYBRIDS
    ],
)
def test_a_twin_runs(trained: Any, name: str) -> None:
    result = trained(name)
    assert result.passed, str(result.verdict)
    assert result.merged is not None


def test_everything_can_be_handed_out(tmp_path: Path) -> None:
    known = list_templates()
    of_accelerate = {path for name, path in known.items() if name.startswith("accelerate/")}
    assert {path.name for path in of_accelerate} == {"ddp.yaml", "fsdp2.yaml", "zero3.yaml"}
    assert {path for path in known.values() if path.suffix == ".yaml"} - of_accelerate == set(ALL)
    assert {path.name for path in known.values() if path.suffix == ".py"} == {"sft.py", "dpo.py", "gspo.py"}
    for name, source in known.items():
        copy = copy_template(name, tmp_path / name.replace("/", "-"))
        assert copy.read_bytes() == source.read_bytes()


def test_a_config_goes_where_it_is_wanted_and_replaces_nothing(tmp_path: Path) -> None:
    assert copy_template("smoke/sft", tmp_path) == tmp_path / "sft.yaml"
    assert copy_template("configs/qwen3-4b-sft.yaml", tmp_path / "mine.yaml").name == "mine.yaml"  # as in the README
    for name, place, said in (
        ("smoke/sft", tmp_path, "sft.yaml exists; name another file"),
        ("smoke/stf", tmp_path, "no config, recipe, notebook or template is called smoke/stf; did you mean smoke/sft?"),
        ("smoke/sft", tmp_path / "no" / "where.yaml", "there is no directory"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            copy_template(name, place)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Any) -> None:
    monkeypatch.chdir(tmp_path)
    shown = {"": "llama-3.1-8b-dpo", "recipes/sft.py": "python sft.py", "ISSUES_LOG.md": "ISSUES_LOG.md"}
    for name, said in (shown | {"smoke/dpo": ""}).items():
        code, output, _ = command_line("cp", *filter(None, [name]))
        assert (code, said in output) == (0 if said else 2, True)
    assert (tmp_path / "sft.py").exists()
