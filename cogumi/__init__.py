"""cogumi: single-node, notebook-first fine-tuning. The public names are imported when they are first used."""

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

from cogumi.core import __version__ as __version__

if TYPE_CHECKING:
    from cogumi.checkpoints.protection import protect as protect
    from cogumi.checkpoints.verify import last_good_checkpoint as last_good_checkpoint
    from cogumi.core.errors import UsageError as UsageError
    from cogumi.diagnostics.checkup import DoctorReport as DoctorReport
    from cogumi.diagnostics.checkup import doctor as doctor
    from cogumi.disk.callback import DiskMonitorCallback as DiskMonitorCallback
    from cogumi.disk.monitor import DiskMonitor as DiskMonitor
    from cogumi.forecast.preflight_report import PreflightReport as PreflightReport
    from cogumi.merge.inspection import AdapterReport as AdapterReport
    from cogumi.merge.inspection import inspect as inspect
    from cogumi.merge.merging import MergeReport as MergeReport
    from cogumi.merge.merging import merge_adapter as merge_adapter
    from cogumi.notebook.form import configure as configure
    from cogumi.rl.patching import PatchReport as PatchReport
    from cogumi.rl.patching import patch as patch
    from cogumi.runs.entry import preflight as preflight
    from cogumi.runs.entry import preview as preview
    from cogumi.runs.entry import train as train
    from cogumi.runs.handle import Run as Run
    from cogumi.runs.handle import attach as attach
    from cogumi.runs.launch import start as start
    from cogumi.telemetry.status import Status as Status
    from cogumi.training import RunResult as RunResult

# Without a GPU bitsandbytes looks for a faster 4-bit kernel on the hub and warns when the `kernels` package is missing.
# The CPU lane leaves it out on purpose (docs/stack.md); nothing is wrong.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_NAMES = {
    "checkpoints.protection": "protect", "checkpoints.verify": "last_good_checkpoint", "core.errors": "UsageError",
    "diagnostics.checkup": "DoctorReport doctor", "disk.callback": "DiskMonitorCallback", "disk.monitor": "DiskMonitor",
    "forecast.preflight_report": "PreflightReport", "merge.inspection": "AdapterReport inspect",
    "merge.merging": "MergeReport merge_adapter", "notebook.form": "configure", "rl.patching": "PatchReport patch",
    "runs.entry": "preflight preview train", "runs.handle": "Run attach", "runs.launch": "start",
    "telemetry.status": "Status", "training": "RunResult",
}  # fmt: skip
_HOME = {name: f"cogumi.{module}" for module, names in _NAMES.items() for name in names.split()}
_REPORTS = {name: _HOME[name] for name in ("AdapterReport", "MergeReport", "PreflightReport")}
_REPORTS["Preview"] = "cogumi.methods.preview"
_WITH_TORCH = {"inspect", "merge_adapter", "patch", "protect"}
__all__ = [*_HOME, "__version__"]


def _html_of(report: Any) -> str:
    from cogumi.notebook.html_components import render_html

    return render_html(report)


def _draw_reports(shell: Any) -> None:
    """Have a notebook show reports as HTML. Their modules are named, not imported."""
    formatter = shell.display_formatter.formatters["text/html"]
    for name, home in _REPORTS.items():
        formatter.for_type_by_name(home, name, _html_of)


def __getattr__(name: str) -> Any:
    # `import cogumi` loads neither torch nor transformers; unsloth has to be imported before them.
    if name not in _HOME:
        raise AttributeError(f"module 'cogumi' has no attribute {name!r}")
    if name in _WITH_TORCH:
        from cogumi.core.notices import show_import

        with show_import():
            return getattr(importlib.import_module(_HOME[name]), name)
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if (_shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()) is not None:
    _draw_reports(_shell)
