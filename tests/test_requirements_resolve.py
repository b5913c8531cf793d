"""What a resolver and the network say of the lanes. Slow: it asks the package index, and skips, saying why, without it."""

import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STABLE = ROOT / "requirements-stable-precompiled.txt"
sys.path.insert(0, str(ROOT / "requirements"))
import package_file  # noqa: E402

UV = shutil.which("uv") or shutil.which(str(Path(sys.executable).with_name("uv")))
pytestmark = [pytest.mark.sweep, pytest.mark.skipif(UV is None, reason="no uv here: sh requirements/install.sh test")]
UNREACHABLE = re.compile(
    r"Failed to fetch|error sending request|client error|dns error|Could not connect", re.IGNORECASE
)


def ask_uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert UV is not None
    done = subprocess.run([UV, *arguments], capture_output=True, text=True, check=False)
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    return done


def resolve(
    tmp_path: Path, *requirements: str, glibc: str = "2.31", python: str = "3.12", dependencies: bool = True
) -> subprocess.CompletedProcess[str]:
    source = tmp_path / "asked.in"
    source.write_text("\n".join(requirements) + "\n")
    platform = f"x86_64-manylinux_{glibc.replace('.', '_')}"
    options: tuple[str, ...] = ("--only-binary", ":all:", "--no-header", "--no-annotate", "--quiet")
    options += () if dependencies else ("--no-deps",)
    return ask_uv("pip", "compile", str(source), "--python-version", python, "--python-platform", platform, *options)


@pytest.mark.parametrize("python", package_file.PYTHONS)
@pytest.mark.parametrize(
    "name", [name for name, lane in package_file.table()[0].items() if "linux" in lane["platforms"]]
)
def test_every_pin_has_a_wheel_for_the_lanes_glibc(name: str, python: str, tmp_path: Path) -> None:
    lane = package_file.table()[0][name]
    text = (ROOT / lane["file"]).read_text()
    expected = [pin.split(" \\")[0] for pin in package_file.requirements_of(text) if " @ " not in pin]
    done = resolve(tmp_path, *expected, glibc=lane["glibc"], python=python, dependencies=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("python", package_file.PYTHONS)
def test_the_stable_file_is_whole_but_for_xformers(python: str, tmp_path: Path) -> None:
    """Resolved with what its packages require: nothing is missing, nothing contradicts, and only xformers is added."""
    pins = [pin for pin in package_file.requirements_of(STABLE.read_text()) if " @ " not in pin]  # uv would fetch a URL
    stable, apart = tmp_path / "stable.txt", tmp_path / "apart.txt"
    stable.write_text("".join(pins))
    apart.write_text('xformers; sys_platform == "never"\n')
    options = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "--only-binary", ":all:"]
    options += ["--override", str(apart), "--no-header", "--no-annotate", "--quiet"]
    done = ask_uv("pip", "compile", str(stable), *options)
    assert done.returncode == 0, done.stderr
    resolved = {line.split(" ;")[0] for line in done.stdout.splitlines() if "==" in line}
    text = stable.read_text()
    pinned = {re.split(r" \\| ;", re.sub(r"\[.*?\]", "", pin))[0].strip() for pin in package_file.requirements_of(text)}
    assert resolved <= pinned
    assert {f"{name}=={version}" for name, version in package_file.pins(text, f"linux {python}").items()} <= resolved


@pytest.mark.timeout(900)
def test_the_pinned_files_are_what_the_sources_resolve_to() -> None:
    command = [sys.executable, str(ROOT / "requirements" / "lock.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if UNREACHABLE.search(done.stderr):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr


def wheel_urls() -> list[str]:
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "requirements" / "lanes.toml"]
    return sorted({url for page in pages for url in re.findall(r"https://[^\s\"'`)>]+\.whl", page.read_text())})


@pytest.mark.parametrize("url", wheel_urls())
def test_a_direct_url_is_there(url: str) -> None:
    host = url.split("/")[2]
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as answer:
            assert answer.status == 200
    except urllib.error.HTTPError as error:
        pytest.fail(f"{host} answers {error.code} {error.reason}")
    except OSError as error:  # URLError, a timeout
        pytest.skip(f"unchecked: {host} cannot be reached from here ({error})")
