"""Report of compilation in this process, for a run's decisions.json and log."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from cogumi.patches import graph_break, torch_internals

# name -> (the one value with an effect, "" for any; meaning). Where each is read: tests/test_compiling_environment.py.
KNOWN = {
    "TORCHDYNAMO_DISABLE": ("1", "torch compiles nothing in this process; leave it out"),
    "TORCH_COMPILE_DISABLE": ("1", "Dynamo skips every frame, so nothing is compiled; leave it out"),
    "TORCH_COMPILE": ("", "read by nothing in torch, transformers or unsloth; leave it out"),
    "UNSLOTH_DISABLE_DYNAMO": ("", "read by nothing, unsloth included; leave it out"),
    "UNSLOTH_COMPILE_DISABLE": ("", "unsloth compiles none of its own modules; others still compile"),
    "TORCHDYNAMO_SUPPRESS_ERRORS": ("", "what fails to compile runs uncompiled, with a warning at most"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": ("1", "every run compiles anew"),
    "ACCELERATE_DYNAMO_BACKEND": ("", "accelerate compiles the whole model, which captures little of it"),
}


def list_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """List the known variables that are set, each with its effect."""
    lines = []
    for name, (only, meaning) in KNOWN.items():
        value = environ.get(name, "no")
        if value.lower() != "no":  # which `accelerate launch` sets where nothing is to be compiled
            effect = meaning if only in ("", value) else f"only {only} has an effect; leave it out"
            lines.append(f"{name}={value}: {effect}")
    return lines


def describe_process() -> dict[str, Any]:
    """Describe what affects compilation in this process: 4-bit layers, foreign patches, and variables."""
    verdict = graph_break.verdict() or graph_break.ProbeVerdict("", graph_break.status().reason)
    return {
        "strategy": verdict.strategy,
        "strategy_reason": verdict.reason,
        "probes": [str(probe) for probe in verdict.probes],
        "foreign": graph_break.foreign_patches(),
        "variables": list_variables(),
        "switched_off_by": torch_internals.dynamo_switched_off_by(),
    }


def try_compiler(device: torch.device) -> str:
    """Compile and run two lines by inductor, forward and backward. Returns the reason of a failure, else ""."""
    if by := torch_internals.dynamo_switched_off_by():
        return f"nothing is compiled, because of {by}"

    def smallest(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    with torch.random.fork_rng(), torch_internals.dynamo_left_as_found(), torch.enable_grad():
        x = torch.ones(64, device=device, requires_grad=True)
        try:
            y = torch.compile(torch_internals.with_code_of_its_own(smallest))(x)
            torch.autograd.grad(y, x)
        except Exception as error:  # noqa: BLE001  what a missing compiler raises differs by machine; it is reported
            no_compiler = device.type == "cpu" and "InvalidCxxCompiler" in f"{type(error).__name__} {error}"
            hint = "; install g++, or name a C++ compiler in CXX" if no_compiler else ""
            return torch_internals.first_line(error) + hint
    return ""
