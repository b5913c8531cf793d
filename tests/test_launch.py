"""`cogumi launch`: the card, the budget and the task of a rented box. Everything but the renting itself.

`make test-skypilot` has SkyPilot: there its own command reads prices from a catalogue of its format, and its own parser the task.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from cogumi.config.schema import load_config
from cogumi.forecast.preflight_report import Line
from cogumi.forecast.run_forecast import forecast_run
from cogumi.runs import skypilot
from cogumi.runs.skypilot import Offer, examine_offers, find_files, match_card
from cogumi.stack.gpus import parse_card

SKY = skypilot.find_sky()
MIRROR = "cogumi.mirror=s3://bucket/mine"
# SkyPilot's catalogue (format v8, prices made up): RunPod's has GiB as MiB, Vast's has 0 where there is no spot price.
HEAD = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Region,SpotPrice,Price,AvailabilityZone,GpuInfo"
RUNPOD = {"RTXA4000": (16, "0.1", "0.25"), "RTX4090": (24, "0.5", "0.69"), "H100-SXM": (80, "", "2.69")}
VAST = {"L40S": (46068, "0.00", "0.60"), "A100": (81920, "0.00", "0.87")}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str]) -> Path:
    """A directory with a configuration and its own data, and an environment without SkyPilot."""
    pl.DataFrame({"text": sources}).write_parquet(tmp_path / "code.parquet")
    config = {
        "model": {"name": "cogumi:small-base"},
        "data": {"source": "code.parquet", "column": "text", "eval_rows": 8, "fim": {"max_length": 128}},
        "train": {"max_steps": 5, "per_device_train_batch_size": 4},
        "cogumi": {"method": "sft"},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(skypilot, "find_sky", lambda: None)
    for name in [name for name in os.environ if skypilot.SECRETS.fullmatch(name)]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.slow("a forecast")
def test_without_skypilot_the_task_is_written(
    project: Path, command_line: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest card at the price that is given; files named by the configuration, secrets by name, and the end."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    monkeypatch.setenv("AWS_CA_BUNDLE", "/a/file/of/this/machine")
    status, output, error = command_line("launch", "my.yaml", MIRROR, "cogumi.price_per_hour=0.5", "--spend", "5")
    assert (status, error.count("Traceback")) == (0, 0), error
    task = yaml.safe_load((project / "launch/my/task.yaml").read_text())
    assert task["resources"] == {
        "infra": None,
        "accelerators": "T4:1",
        "max_hourly_cost": 0.5,
        "disk_size": 100,
        "autostop": {"idle_minutes": 5, "down": True},
    }
    assert (Path(task["workdir"]) / "requirements/install.sh").is_file()
    assert task["file_mounts"] == {
        "~/sky_workdir/code.parquet": str(project / "code.parquet"),
        "~/sky_workdir/launch.yaml": str(project / "launch/my/config.yaml"),
    }
    assert task["secrets"] == {"HF_TOKEN": None}
    assert task["setup"].startswith("timeout 30m sh -c ")
    # $5 at $0.5 an hour are 600 minutes, 40 of which are for set-up and end.
    assert task["run"] == "timeout --kill-after=5m 565m .venv/bin/cogumi train launch.yaml"
    assert "hf_x" not in "".join(path.read_text() for path in (project / "launch/my").iterdir()) + output
    box = load_config(project / "launch/my/config.yaml").cogumi
    assert (box.mirror, box.price_per_hour, box.max_hours) == ("s3://bucket/mine", 0.5, 9.333)
    assert (box.restarts, box.on_hung, str(box.run_dir)) == (3, "stop", "runs/my")
    assert 'pipx install "skypilot[runpod,vast]" && sky launch --cluster cogumi-my --secret HF_TOKEN' in output


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no mirror": ((), "cogumi.mirror: is not set, and a box is lost with its disk"),
    "a directory": (("cogumi.mirror=/mnt/mirror",), "/mnt/mirror is no place that outlasts the box"),
    "no bucket": (("cogumi.mirror=s3://",), "s3:// is no place that outlasts the box"),
    "no repository": (("cogumi.mirror=hf://x",), "hf://x is no place that outlasts the box"),
    "no price": ((MIRROR,), "SkyPilot, which knows the prices, is not installed"),
    "a secret": ((MIRROR, "train.hub_token=abc", "cogumi.price_per_hour=1"), "train.hub_token: holds a secret"),
    "a key": ((MIRROR, "cogumi.mirrors=x"), "cogumi.mirrors"),
    "set-up alone": ((MIRROR, "cogumi.price_per_hour=8"), "for which that pays 40 min of set-up"),
    "another directory": ((MIRROR, "data.source={tmp}/code.parquet"), "/code.parquet, which is not below"),
}


@pytest.mark.parametrize(("words", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(
    words: tuple[str, ...], said: str, project: Path, command_line: Callable[..., tuple[int, str, str]]
) -> None:
    where = [word.replace("{tmp}", str(project)) for word in words]
    status, _, error = command_line("launch", "my.yaml", *where, "--spend", "5")
    assert status == 2
    assert said in error.splitlines()[-1]
    assert not (project / "launch").exists()


@pytest.mark.parametrize(
    ("mirror", "stored", "names"),
    [("hf://me/mine", None, True), ("s3://bucket/mine", "hf_stored", True), ("s3://bucket/mine", None, False)],
)
def test_a_box_that_gets_no_token_for_the_hub_is_told(
    mirror: str, stored: str | None, names: bool, project: Path, command_line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that `hf auth login` stored is used here, where the preflight passes, and is not on the box."""
    fits = (Offer(parse_card("L4"), 0.5, "L4"), Line("time", "5 steps"))
    monkeypatch.setattr(skypilot, "examine_offers", lambda *_: iter([fits]))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: stored)
    words = ("launch", "my.yaml", f"cogumi.mirror={mirror}", "cogumi.price_per_hour=0.5", "--spend", "5")
    status, output, error = command_line(*words)
    assert (status, "HF_TOKEN is not set here" in output) == (0, names), error


@pytest.mark.slow("four forecasts")
def test_the_cheapest_card_on_which_memory_and_budget_suffice(project: Path) -> None:
    """Of two offers of a card the cheaper one; an L4 is too small, the A100 too slow for the money, and V100 is never asked."""
    run = load_config("my.yaml", cogumi__mirror="s3://bucket/mine", train__max_steps=100_000)
    run.train |= {
        "per_device_train_batch_size": 4096,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
    }
    a100, h100 = parse_card("A100 80GB PCIe"), parse_card("H100 SXM")
    seconds = forecast_run(run, a100.name, None, apart=False).figures["time"]["seconds"]
    offers = [Offer(a100, 9.0, "A100-80GB"), Offer(a100, 1.5, "A100-80GB"), Offer(parse_card("L4"), 0.4, "L4")]
    offers += [Offer(h100, 2.0, "H100-SXM"), Offer(parse_card("V100 32GB"), 0.1, "V100-32GB")]
    spend = 1.5 * (seconds / 3600 + skypilot.RESERVED_HOURS) - 0.1
    examined = list(examine_offers(run, offers, spend))
    assert [(offer.card.name, offer.price, line.stage, line.state) for offer, line in examined] == [
        ("L4", 0.4, "memory", "red"),
        (a100.name, 1.5, "time", "red"),
        (h100.name, 2.0, "time", "green"),
    ]


def test_files_are_those_that_the_configuration_names(project: Path) -> None:
    (project / "rewards.py").write_text("def best(): ...")
    (project / "train").mkdir()  # the name of a split, which is no directory
    run = load_config("my.yaml", cogumi__mirror="hf://me/mine", data__split="train")
    assert list(find_files(run)) == ["~/sky_workdir/code.parquet"]
    run = load_config(
        "my.yaml",
        cogumi__mirror="hf://me/mine",
        cogumi__method="gspo",
        data__eval_source="*.parquet",
        cogumi__rewards=["rewards.py:best"],
    )
    assert list(find_files(run)) == ["~/sky_workdir/code.parquet", "~/sky_workdir/rewards.py"]


# SkyPilot's name, GiB of its catalogue (0.08: RunPod's), and the card.
NAMES = [
    ("RTX4090", 0.02, "RTX 4090"), ("RTXA6000", 0.0, "RTX A6000"), ("RTX6000-Ada", 47.99, "RTX 6000 Ada"),
    ("RTX6000", 24.0, None), ("A100", 40.0, "A100 40GB"), ("A100", 80.0, "A100 80GB PCIe"), ("A100", 0.0, "A100 40GB"),
    ("A100-80GB-SXM", 0.08, "A100 80GB PCIe"), ("H100", 93.6, "H100 NVL"), ("H100-SXM", 0.08, "H100 PCIe"),
    ("H200-SXM", 0.14, "H200 NVL"), ("V100-32GB", 0.0, "V100 32GB"), ("L40S", 44.99, "L40S"), ("L4", 0.0, "L4"),
    ("A10G", 24.0, None), ("MI300X", 192.0, None), ("RTXPRO6000S", 95.6, None), ("RTX4090", 48.0, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gibibytes", "card"), NAMES)
def test_a_name_of_skypilots_is_the_slowest_card_that_it_may_be(name: str, gibibytes: float, card: str | None) -> None:
    found = match_card(name, gibibytes)
    assert (found and found.name) == card


# ------------------------------------------------------------------------------------------------------- SkyPilot itself


@pytest.fixture
def catalogue(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with SkyPilot's catalogue in it. Its API server, which its command starts, is stopped at the end."""
    home = tmp_path_factory.mktemp("home")
    for cloud, rows in {"runpod": RUNPOD, "vast": VAST}.items():
        lines = [HEAD]
        for name, (size, spot, price) in rows.items():
            info = {
                "Gpus": [{"Name": name, "Count": 1, "MemoryInfo": {"SizeInMiB": size}}],
                "TotalGpuMemoryInMiB": size,
            }
            lines.append(f'1x_{name},{name},1.0,8.0,64.0,CA,{spot},{price},CA-1,"{info}"')
        (home / ".sky/catalogs/v8" / cloud).mkdir(parents=True)
        (home / ".sky/catalogs/v8" / cloud / "vms.csv").write_text("\n".join(lines) + "\n")
    common = "\n".join(["AcceleratorName,Clouds", *(f"{name},\"['Vast']\"" for name in RUNPOD | VAST)])
    (home / ".sky/catalogs/v8/common").mkdir()
    (home / ".sky/catalogs/v8/common/accelerators.csv").write_text(common + "\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    for _ in range(3):  # it waits a minute for its server, which two busy cores may need longer for
        if subprocess.run([str(SKY), "api", "start"], capture_output=True, check=False).returncode == 0:
            break
    yield home
    subprocess.run([str(SKY), "api", "stop"], check=True, capture_output=True)


@pytest.mark.slow("SkyPilot's command starts its API server")
@pytest.mark.skipif(SKY is None, reason="`make test-skypilot` installs it")
@pytest.mark.usefixtures("catalogue")
def test_skypilot_names_the_prices_and_takes_the_task(
    project: Path, command_line: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SKY is not None
    monkeypatch.setattr(skypilot, "find_sky", lambda: SKY)
    status, output, error = command_line("launch", "my.yaml", MIRROR, "--spend", "5")
    assert status == 0, error
    assert re.search(r"L40S +0\.60 +8\.3 +fits, 5 steps", output)  # not the RTX A4000, of which cogumi knows no figures
    task = project / "launch/my/task.yaml"
    read = "import sky, sys; print(*sky.Task.from_yaml(sys.argv[1]).resources)"
    python = next(
        path for path in (Path(SKY).resolve().parent / name for name in ("python3", "python")) if path.exists()
    )
    parsed = subprocess.run([str(python), "-c", read, str(task)], capture_output=True, text=True, check=True)
    assert "Vast({'L40S': 1}, disk_size=100, max_cost=$0.6/hr)" in parsed.stdout
    status, _, error = command_line("launch", "my.yaml", MIRROR, "--spend", "5", "--infra", "nowhere")
    assert status == 1
    assert "sky gpus list --infra nowhere: " in error
