"""Health of a GPU. pynvml is a fake written by hand after nvidia-ml-py 13.615.71: no card has confirmed what is read here."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from processes import until

from cogumi.core.run_directory import read_json
from cogumi.health.flags import RunHistory, RunSettings
from cogumi.health.rules import gpu
from cogumi.stack.gpu_health import GpuHealth, read_gpu_health, wait_for_gpus, wait_for_memory
from cogumi.telemetry.heartbeat import Heartbeat
from cogumi.telemetry.recorder import record_run
from cogumi.telemetry.status import status_of
from cogumi.telemetry.throughput import Meter

CARD = {
    "Temperature": 91, "PowerUsage": 650_000, "EnforcedPowerLimit": 700_000, "ClockInfo": 1410,
    "CurrentClocksEventReasons": 0x4 | 0x20, "TotalEccErrors": 3,
}  # fmt: skip


@pytest.fixture
def processes() -> Iterator[list[tuple[int, int | None]]]:
    """This process, one that it started, and a stranger's: PID and bytes."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield [(os.getpid(), 10 << 30), (child.pid, 5 << 30), (1, 3 << 30)]
    child.kill()
    child.wait()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, processes: list[tuple[int, int | None]]) -> dict[str, Any]:
    """What the fake answers, by the function's name; a missing one is NVMLError, as on a card that does not support it."""
    fake, answers = ModuleType("pynvml"), dict(CARD)
    names = "SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown"
    bits = {f"nvmlClocksEventReason{name}": 4 << n for n, name in enumerate(names)}
    constants = {
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": 1,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
    }
    fake.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]
    taken = {"Temperature": (0,), "ClockInfo": (1,), "TotalEccErrors": (1, 0)}

    def answer(name: str, handle: str, *arguments: int) -> Any:
        assert (handle, arguments) == ("handle", taken.get(name, ()))
        if name not in answers:
            raise fake.NVMLError("Not Supported")
        return answers[name]

    def handle_of(uuid: str) -> str:
        if uuid != "GPU-this":
            raise fake.NVMLError("Not Found")
        return "handle"

    answers["ComputeRunningProcesses"] = [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes]
    functions = {f"nvmlDeviceGet{name}": lambda *words, name=name: answer(name, *words) for name in answers}
    vars(fake).update(functions | bits | constants, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=handle_of)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return answers


def test_a_look_at_a_card_says_what_the_driver_tells(card: dict[str, Any]) -> None:
    look = read_gpu_health("this")
    assert look is not None
    assert (look.temperature, look.power, look.power_limit, look.clock) == (91, 650_000, 700_000, 1410)
    assert (look.slowdowns, look.ecc_errors, look.others) == (("SwThermalSlowdown",), 3, 3 << 30)
    assert len(look.processes) == 3
    card["ComputeRunningProcesses"] = card["ComputeRunningProcesses"][1:]  # numbers of another name space
    assert (look := read_gpu_health("this")) is not None
    assert look.others is None
    card.clear()
    assert (look := read_gpu_health("this")) is not None
    assert look == GpuHealth(None, None, None, None, (), None, {}, None)
    assert read_gpu_health("another") is None


def test_without_nvml_there_is_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpu_health("this") is None


def flag(rows: list[dict[str, float]]) -> Any:
    steps = [{"step": n, "loss": 1.0, **row} for n, row in enumerate(rows, 1)]
    return gpu(RunHistory(RunSettings("sft", 1e-4, 100, 8), steps, []))


def test_heartbeat_rows_and_flag_tell_of_the_card(
    card: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=80 << 30, uuid="this")
    for name, answer in {"is_available": True, "get_device_name": "H100", "get_device_properties": properties,
                         "device_memory_used": 7, "utilization": 97, "is_initialized": True}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    heart = Heartbeat(tmp_path, Meter(None))
    assert heart.gpu()["clock"] == 1410  # type: ignore[index]
    row = heart.gpu_row()
    figures = {"temperature": 91, "slowed": 1.0, "ecc_errors": 3, "others_gb": (3 << 30) / 1e9}
    assert row == {f"perf/gpu_{key}": value for key, value in figures.items()}
    assert heart.gpu_row() == {}
    judged = flag([row] * 3)  # type: ignore[list-item]
    for trouble in ("held its clocks down 100% of", "3 uncorrected ECC errors", "other processes hold 3.2 GB"):
        assert trouble in judged.cause
    assert judged.level == "yellow"
    quiet = {"perf/gpu_slowed": 0.1, "perf/gpu_others_gb": 0.6, "perf/gpu_ecc_errors": 0.0}
    assert flag([quiet] * 3).level == "green"
    assert flag([{}]) is None

    with pytest.raises(ValueError, match="boom"), record_run(tmp_path):
        raise ValueError("boom")
    assert read_json(tmp_path / "status.json")["gpu_memory"][str(os.getpid())] == 10 << 30
    assert "GPU memory then: 10.0 GiB by process" in str(replace(status_of(tmp_path), cause=None))


class FakeNvml:
    """Two GPUs whose processes are (PID, bytes), after nvidia-ml-py 13.615.71. before: their processes at the first look."""

    def __init__(self, *gpus: list[tuple[int, int | None]], before: Any = None) -> None:
        self.gpus, self.looks = gpus, [before] if before else []

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}abc"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        listed = (self.looks.pop() if self.looks else self.gpus)[handle]
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in listed]


@pytest.fixture
def zombie() -> Iterator[int]:
    """A process that was killed and not yet reaped."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child.kill()
    until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    yield child.pid
    child.wait()


def test_the_memory_of_a_dead_run_is_waited_for(zombie: int) -> None:
    nvml = FakeNvml([], before=[[(zombie, 60 << 30)]])
    assert wait_for_memory(nvml, None, patience=60.0, pause=0.01) == ""
    assert not nvml.looks


@pytest.mark.parametrize("visible", [None, "1", "GPU-1abc", "0, 1"])
def test_who_holds_memory_after_the_wait_is_named(zombie: int, visible: str | None) -> None:
    nvml = FakeNvml([(os.getpid(), 9 << 30)], [(zombie, 60 << 30), (2**22 + 1, 2 << 30), (7, 10**8), (8, None)])
    began = time.monotonic()
    line = wait_for_memory(nvml, visible, patience=0.3, pause=0.01)
    assert time.monotonic() - began >= 0.3
    assert line == (
        f"other processes hold GPU memory: 60.0 GiB by an unseen process ({zombie}), 2.0 GiB by an unseen process ({2**22 + 1})"
    )


@pytest.mark.parametrize(("visible", "named"), [(None, True), ("0", False), ("GPU-1abc", True), ("MIG-x", False)])
def test_a_living_process_is_named_at_once(
    processes: list[tuple[int, int | None]], visible: str | None, named: bool
) -> None:
    began = time.monotonic()
    line = wait_for_memory(FakeNvml([], processes[:2]), visible, patience=600.0)
    assert time.monotonic() - began < 60
    assert bool(line) == named
    assert not named or ("5.0 GiB by python" in line and f"({processes[1][0]})" in line), line


def test_without_a_driver_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait_for_gpus() == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert wait_for_gpus() == ""
