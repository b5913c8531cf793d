"""unsloth's trainers in the place of TRL's, where a run takes unsloth (`cogumi.backend`).

unsloth has to be imported before trl, transformers and peft. It replaces functions of theirs and of torch, and keeps
none of the originals: it cannot be undone within a process. Afterwards `trl.GRPOTrainer` is `UnslothGRPOTrainer`.

unsloth and unsloth_zoo are called, never copied (their RL code is AGPL-3.0 and LGPL-3.0).
"""

import ast
import importlib
import importlib.util
import itertools
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from cogumi.core.errors import UsageError
from cogumi.core.formatting import install_command, pip_command
from cogumi.patches import PatchStatus

NAME = "unsloth"
WRITTEN_FOR = "unsloth 2026.10.7 and 2026.10.9"
PATCHED_BY_UNSLOTH = ("trl", "transformers", "peft")  # critical_modules in unsloth/_gpu_init.py
ALLOCATOR = "PYTORCH_ALLOC_CONF"  # unsloth_zoo sets it to expandable segments where it is unset
SET_BY_COGUMI = "ALLOCATOR_SET_BY_COGUMI"  # names it where the user has not set it; child processes inherit both
CPU_SWITCH = "UNSLOTH_ON_CPU"  # "1": also without a GPU, which unsloth has supported since 2026.10.8
BackendName = Literal["auto", "unsloth", "trl"]
_requested_backend: BackendName = "auto"  # the last one requested in this process


def apply(backend: BackendName | None = None) -> PatchStatus:
    """Let unsloth patch TRL.

    Args:
        backend: Value of `cogumi.backend`. None: that of the last call in this process, "auto" at first. "auto" takes
            unsloth if it is installed and there is CUDA or UNSLOTH_ON_CPU=1.

    Raises:
        UsageError: unsloth is required but not installed, imported too late or broken; or TRL is required and unsloth is
            in place already.
        RuntimeError: unsloth lacks a function that is needed here.
    """
    global _requested_backend
    _requested_backend = backend or _requested_backend
    if reason := find_obstacle(_requested_backend):
        if is_in_place():
            message = "TRL is to train, and unsloth is in this process already, which cannot take it out again"
            fix = "restart the kernel (cogumi.patch(backend='trl') leaves it out), or set cogumi.backend: unsloth"
            raise UsageError(message, key="cogumi.backend", fix=fix)
        return PatchStatus(NAME, False, reason)
    validate_import_order()
    check_upstream()
    patch_fast_rl = import_unsloth()
    import trl

    if not is_unsloth_trainer(trl.GRPOTrainer):  # importing unsloth has done it already on CUDA
        patch_fast_rl("GRPO")
    return status()


def undo() -> PatchStatus:
    """Raises RuntimeError when unsloth is in place: it cannot be taken out of a process again."""
    if status().applied:
        raise RuntimeError(f"{NAME}: unsloth's changes to TRL, transformers and torch cannot be undone; start anew")
    return status()


def status() -> PatchStatus:
    """Return whether `trl.GRPOTrainer` is unsloth's, and why (not). Imports nothing."""
    if is_in_place():
        versions = f"unsloth {version('unsloth')}, unsloth_zoo {version('unsloth_zoo')}, written for {WRITTEN_FOR}"
        return PatchStatus(NAME, True, f"trl.GRPOTrainer is unsloth's ({versions})")
    reason = "unsloth is not in place: trl.GRPOTrainer is TRL's own"
    if _requested_backend != "unsloth":
        reason = find_obstacle(_requested_backend) or reason
    return PatchStatus(NAME, False, reason)


def find_obstacle(backend: BackendName) -> str | None:
    """Return the reason to use TRL's trainer on this machine; None for unsloth's.

    Raises UsageError if unsloth is asked for and is not installed.
    """
    if backend == "trl":
        return "stock TRL trains, as was chosen"
    if importlib.util.find_spec("unsloth") is None:
        if backend == "unsloth":
            fix = f"run: {install_command('unsloth')}, or set cogumi.backend: trl"
            raise UsageError("unsloth is not installed", key="cogumi.backend", fix=fix)
        return "unsloth is not installed: stock TRL trains"
    is_supported = torch.cuda.is_available() or os.environ.get(CPU_SWITCH) == "1" or is_in_place()
    if backend == "auto" and not is_supported:
        return "no CUDA device: stock TRL trains"
    return None


def is_in_place() -> bool:
    """Return whether unsloth has patched TRL in this process. Imports nothing."""
    trl = sys.modules.get("trl")
    return "unsloth" in sys.modules and trl is not None and is_unsloth_trainer(trl.GRPOTrainer)


def was_left_out() -> bool:
    """Return whether TRL was chosen in this process and is imported, so that unsloth cannot be any more."""
    return _requested_backend == "trl" and "trl" in sys.modules and not is_in_place()


def is_unsloth_trainer(trainer: type) -> bool:
    """Return whether a trainer class is the one unsloth generated, or derives from it."""
    return any(cls.__module__ == "UnslothGRPOTrainer" for cls in trainer.__mro__)


def import_unsloth() -> Any:
    """`PatchFastRL`. unsloth checks the machine while it is imported, and raises whatever suits it."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # else loading a model downloads counters
    if ALLOCATOR not in os.environ:
        os.environ[SET_BY_COGUMI] = ALLOCATOR
    try:
        importlib.import_module("unsloth")
        return importlib.import_module("unsloth.models.rl").PatchFastRL
    except (ImportError, NotImplementedError, RuntimeError, OSError, ValueError, TypeError, AttributeError) as error:
        installed = version("unsloth")
        reason = " ".join(str(error).split())
        raise UsageError(
            f"unsloth {installed} is installed and does not import here ({type(error).__name__}: {reason})",
            fix=f"repair it, or `{pip_command('uninstall unsloth')}` to train with stock TRL, and restart the kernel",
        ) from error


def restore_classes(model_type: str) -> bool:
    """Give transformers' classes of this family their own methods back; whether unsloth had put others there.

    unsloth 2026.10.7 replaces them for every model of the process, and one that it did not load cannot run with those.
    """
    modeling: Any = sys.modules.get(f"transformers.models.{model_type}.modeling_{model_type}")
    if not hasattr(modeling, "_unsloth_pre_patch_originals"):
        return False
    importlib.import_module("unsloth.models.llama").restore_transformers_family([model_type])
    return True


def validate_import_order() -> None:
    """Raise UsageError if a module that unsloth patches was imported before unsloth, and say where."""
    # A module moves to the end of sys.modules when its import is complete; unsloth's first parts are, before the rest.
    before_unsloth = itertools.takewhile(lambda name: name.partition(".")[0] != "unsloth", list(sys.modules))
    early = [name for name in before_unsloth if name in PATCHED_BY_UNSLOTH]
    if early:
        where = next(filter(None, map(locate_import, early)), "")
        was = "was" if len(early) == 1 else "were"
        raise UsageError(
            f"{' and '.join(early)} {was} imported before unsloth{where}, and unsloth has to come first: call "
            "cogumi.patch() in the first cell, before importing trl, transformers or peft, and restart the kernel"
        )


def locate_import(name: str) -> str:
    """Find the line of a notebook cell, or of the script, that imports a package; "" if another module did."""
    main = sys.modules["__main__"]
    texts = {f"cell In[{number}], line ": cell for number, cell in enumerate(vars(main).get("In", []))}
    file = Path(getattr(main, "__file__", None) or "")
    if file.is_file():
        texts[f"{file}:"] = file.read_text(encoding="utf-8", errors="replace")
    for place, text in texts.items():
        if match := re.search(rf"^[ \t]*(?:import|from) {name}\b", text, re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            return f" ({name} at {place}{line})"
    return ""


LOSS_FILE, PATCH_FILE = "unsloth_zoo/rl_replacements.py", "unsloth/models/rl.py"
LOADER_FILE, LLAMA_FILE = "unsloth/models/loader.py", "unsloth/models/llama.py"
# What cogumi.rl.loss_check binds to, per file; the same in both versions this was written for. Upstream may append.
UPSTREAM = {
    PATCH_FILE: {"PatchFastRL": "algorithm"},
    LOSS_FILE: {
        "UnslothEfficientGRPO.forward": "ctx _new_logps _old_logps _ref_logps _sampling_per_token_logps lm_head "
        "_input_ids _mask _advantages beta scaler n_chunks extra_kwargs",
        "grpo_compute_loss": "ref new old sampling_per_token_logps input_ids mask beta advantages",
        "grpo_accumulated_loss": "trainer input_ids attention_mask logits_to_keep completion_mask advantages "
        "old_logps ref_logps n_chunks tool_mask",
    },
    LLAMA_FILE: {
        "FastLlamaModel.patch_peft_model": "model use_gradient_checkpointing",
        "restore_transformers_family": "model_types",
    },
}
# What cogumi.models.unsloth_models passes by name.
NAMED = {
    LOADER_FILE: {
        "FastLanguageModel.from_pretrained": "model_name max_seq_length dtype load_in_4bit load_in_8bit full_finetuning "
        "device_map use_gradient_checkpointing revision use_exact_model_name"
    },
    LLAMA_FILE: {
        "FastLlamaModel.get_peft_model": "model r lora_alpha lora_dropout target_modules use_gradient_checkpointing random_state"
    },
}


def check_upstream() -> None:
    """Raise RuntimeError unless unsloth's sources have the functions this was written for: importing would patch."""
    for file in (*UPSTREAM, LOADER_FILE):
        package, _, inside = file.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError(f"{NAME}: unsloth {version('unsloth')} is installed without {package}")
        source = (Path(spec.submodule_search_locations[0]) / inside).read_text(encoding="utf-8")
        if problems := differences(parameters_by_function(source), file):
            installed = f"{package} {version(package)}"
            raise RuntimeError(f"{NAME}: {installed} is not {WRITTEN_FOR}: {file}: {'; '.join(problems)}")


def differences(installed: dict[str, list[str]], file: str) -> list[str]:
    """List functions of UPSTREAM (by name and position) and NAMED (by name) whose parameters differ from those found."""
    wrong = [
        name
        for name, parameters in UPSTREAM.get(file, {}).items()
        if installed.get(name, [])[: len(parameters.split())] != parameters.split()
    ]
    wrong += [
        name
        for name, parameters in NAMED.get(file, {}).items()
        if not {*parameters.split()} <= {*installed.get(name, [])}
    ]
    return [
        f"{name} takes ({', '.join(installed[name])})" if name in installed else f"{name} is missing" for name in wrong
    ]


def parameters_by_function(source: str) -> dict[str, list[str]]:
    """Read the parameters of top-level functions and of `Class.method`, without `*` and `**`."""
    body = ast.parse(source).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    for owner in (node for node in body if isinstance(node, ast.ClassDef)):
        methods = (node for node in owner.body if isinstance(node, ast.FunctionDef))
        functions |= {f"{owner.name}.{node.name}": node for node in methods}
    taken = {name: function.args for name, function in functions.items()}
    return {name: [a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)] for name, of in taken.items()}
