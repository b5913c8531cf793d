"""The built wheel works outside the clone without optional parts, and pyproject.toml declares what the package imports."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import builders
import pytest
from packaging.requirements import Requirement

import cogumi
from cogumi.config.source import list_templates
from cogumi.core.errors import UsageError, require_extra
from cogumi.core.formatting import install_command

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {"yaml": "pyyaml", "IPython": "ipython", "pydantic_core": "pydantic"}
# Looked for and used if they are there: by the doctor, by transformers, by TRL.
PROBED = {"pynvml", "flash-attn", "kernels", "triton", "wandb"}
OPTIONAL = ["IPython", "bitsandbytes", "gguf", "ipywidgets", "math_verify", "rapidfuzz", "unsloth", "vllm"]


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[;]", requirement)[0] for requirement in requirements}


def imported_distributions(top_level: bool) -> set[str]:
    """Distributions imported by the package: at the top of modules only, or anywhere."""
    names = set()
    for path in (REPOSITORY / "cogumi").rglob("*.py"):
        if "pretraining" in path.parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body if top_level else ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    third_party = names - set(sys.stdlib_module_names) - {"cogumi"}
    return {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in third_party}


def test_every_import_is_declared() -> None:
    required = requirement_names(PROJECT["dependencies"])
    optional = set().union(*map(requirement_names, PROJECT["optional-dependencies"].values()))
    assert imported_distributions(top_level=False) - required - optional == PROBED
    assert required <= imported_distributions(top_level=False)


def test_public_names_are_documented() -> None:
    members = [(name, getattr(cogumi, name)) for name in cogumi.__all__ if callable(getattr(cogumi, name))]
    members += [(f"Run.{name}", value) for name, value in vars(cogumi.Run).items() if not name.startswith("_")]
    assert [name for name, value in members if not inspect.getdoc(value)] == []


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(
        UsageError, match=r'rapidfuzz is not installed; run: .*python\S* -m pip install "cogumi\[rewards\]"'
    ):
        require_extra("rapidfuzz", "rewards")


def test_a_command_that_trains_names_its_extra(monkeypatch: pytest.MonkeyPatch, command_line: Any) -> None:
    for module, words in (("trl", ("preview", "smoke/sft")), ("polars", ("reward", "exact_match", "none.jsonl"))):
        monkeypatch.setitem(sys.modules, module, None)
        for name in [name for name in sys.modules if name.startswith(("cogumi.data.", "cogumi.rewards."))]:
            monkeypatch.delitem(sys.modules, name)
        said = f"cogumi: {module} is not installed; run: {install_command('train')}\n"
        assert command_line(*words) == (2, "", said)
    with pytest.raises(UsageError, match="trl is not installed"):
        cogumi.patch()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("wheel")
    backend = f"import setuptools.build_meta as backend; backend.build_wheel({str(built)!r})"
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "cogumi"):
        (source / name).symlink_to(REPOSITORY / name)
    subprocess.run([sys.executable, "-c", backend], cwd=source, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the unpacked wheel, and a sitecustomize that makes the optional modules unimportable."""
    target = tmp_path_factory.mktemp("target")
    zipfile.ZipFile(wheel).extractall(target)
    (target / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({OPTIONAL}))\n")
    return target


def run_outside(installed: Path, directory: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    return result.stdout


def test_the_wheel_holds_the_package_and_its_data(installed: Path) -> None:
    names = {path.relative_to(installed).parts[0] for path in installed.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"cogumi", "sitecustomize.py"}
    data = ["configs/smoke/sft.yaml", "py.typed", "models/small-base/model.safetensors"]
    data += ["stack/lanes.json", "core/signatures.toml", "notebooks/00_quickstart.ipynb", "templates/agent-docs.md"]
    for name in data:
        assert (installed / "cogumi" / name).is_file(), name
    for path in list_templates().values():
        assert (installed / path.relative_to(REPOSITORY)).is_file(), path
    assert not (installed / "cogumi/models/small-base/pretraining").exists()
    assert {path.suffix for path in (installed / "cogumi/notebooks").iterdir()} == {".ipynb"}


def test_merge_without_optional_parts(installed: Path, tmp_path: Path) -> None:
    base = builders.save_base(tmp_path / "base", builders.transformers.LlamaConfig(**builders.SIZES))
    builders.train_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    run_outside(installed, tmp_path, "-m", "cogumi", "merge", "adapter", "merged", "--base", "base")
    assert (tmp_path / "merged/model.safetensors").is_file()


def test_disk_monitor_without_optional_parts(installed: Path, tmp_path: Path) -> None:
    program = "import cogumi; print(cogumi.__file__, cogumi.DiskMonitor('.').sample().used)"
    assert str(installed) in run_outside(installed, tmp_path, "-c", program)


@pytest.mark.slow("the doctor tries every library in a process of its own")
def test_doctor_without_optional_parts(installed: Path, tmp_path: Path) -> None:
    report = json.loads(run_outside(installed, tmp_path, "-m", "cogumi", "doctor", "--json"))
    assert all(finding["state"] != "fatal" for finding in report["findings"])


def with_dependencies(requirements: list[str], extras: tuple[str, ...] = ("",)) -> Iterator[Distribution]:
    """Yield the installed distributions that these requirements come to, theirs included."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            found = distribution(requirement.name)
            yield found
            yield from with_dependencies(found.requires or [], ("", *requirement.extras))


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment outside the clone: the wheel, installed by pip, and links to what it declares; no extra."""
    directory = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    for found in with_dependencies(PROJECT["dependencies"]):
        for name in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / name).exists():
                (packages / name).symlink_to(found.locate_file(name))
    pip = [sys.executable, "-m", "pip", "--python", directory / "bin/python", "install", "--quiet", "--no-index", wheel]
    subprocess.run(pip, check=True, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    return directory / "bin" / "cogumi"


def run_alone(program: Path, directory: Path, *words: str, status: int = 0) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([program, *words], cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout if status == 0 else done.stderr


@pytest.mark.slow("an environment of its own, in which each command imports torch and PEFT")
def test_the_wheel_alone_examines_watches_and_merges(alone: Path, tmp_path: Path) -> None:
    base = builders.save_base(tmp_path / "base", builders.transformers.LlamaConfig(**builders.SIZES))
    builders.train_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    findings = {
        found["what"]: found for found in json.loads(run_alone(alone, tmp_path, "doctor", "--json"))["findings"]
    }
    assert findings["training"]["state"] == "note"
    assert findings["training"]["figure"].startswith("not installed: datasets, polars, pyarrow, trl")
    assert findings["training"]["fix"].endswith('install "cogumi[train]"')
    assert not [name for name, found in findings.items() if found["state"] in ("warning", "fatal")]
    assert json.loads(run_alone(alone, tmp_path, "disk", "status", "--json"))["filesystems"]
    run_alone(alone, tmp_path, "merge", "adapter", "merged", "--base", "base", "--verify", "logits")
    assert "compared with base + adapter again" in run_alone(alone, tmp_path, "merge", "--check", "merged")
    schema = json.loads(run_alone(alone, tmp_path, "config-schema"))
    assert schema["properties"]["lora"]["properties"]["r"] == {"type": ["integer", "null"], "default": 8}
    assert "allOf" not in schema  # the keys of TRL, which is not there
    assert "cogumi merge ADAPTER OUT" in run_alone(alone, tmp_path, "agent-docs")
    for name in ("notebooks/00_quickstart.ipynb", "recipes/sft.py", "smoke/sft"):
        run_alone(alone, tmp_path, "cp", name)
    fix = 'python -m pip install "cogumi[train]"\n'
    for words in (("train", "sft.yaml"), ("start", "sft.yaml"), ("smoke",), ("export", "merged", "out")):
        assert run_alone(alone, tmp_path, *words, status=2).endswith(fix)
    assert not (tmp_path / "runs").exists()
    finding = "from cogumi.stack.lanes import INSTALL; print(INSTALL)"
    assert "in a clone" in run_alone(alone.with_name("python"), tmp_path, "-c", finding)
    program = """if True:
        import cogumi, torch
        from transformers import Trainer, TrainingArguments
        arguments = TrainingArguments("out", report_to=[], use_cpu=True)
        trainer = Trainer(torch.nn.Linear(1, 1), arguments, callbacks=[cogumi.DiskMonitorCallback()])
        cogumi.protect(trainer)
        print(cogumi.DiskMonitor(".").sample().used)
    """
    assert int(run_alone(alone.with_name("python"), tmp_path, "-c", program)) > 0


@pytest.mark.slow("an environment of its own")
def test_a_part_of_the_training_packages_is_a_warning(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "trl-1.15.0.dist-info").mkdir()
    (tmp_path / "trl-1.15.0.dist-info/METADATA").write_text("Name: trl\nVersion: 1.15.0\n")
    program = "import sys; sys.path.append('.'); from cogumi.stack.lanes import check_lane; print(check_lane())"
    said = run_alone(alone.with_name("python"), tmp_path, "-c", program)
    assert "state='warning', figure='not installed: datasets, polars, pyarrow'" in said
