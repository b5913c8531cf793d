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
from pathlib import Path

import builders
import pytest

import cogumi
from cogumi.config.source import list_templates
from cogumi.core.errors import UsageError, require_extra

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
    with pytest.raises(UsageError, match=r'rapidfuzz is not installed; run: pip install "cogumi\[rewards\]"'):
        require_extra("rapidfuzz", "rewards")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the unpacked wheel, and a sitecustomize that makes the optional modules unimportable."""
    built, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("target")
    backend = f"import setuptools.build_meta as backend; backend.build_wheel({str(built)!r})"
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "cogumi"):
        (source / name).symlink_to(REPOSITORY / name)
    subprocess.run([sys.executable, "-c", backend], cwd=source, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
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
    for name in (*data, "stack/lanes.json", "core/signatures.toml"):
        assert (installed / "cogumi" / name).is_file(), name
    for path in list_templates().values():
        assert (installed / path.relative_to(REPOSITORY)).is_file(), path
    assert not (installed / "cogumi/models/small-base/pretraining").exists()


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
