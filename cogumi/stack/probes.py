"""Probes of the installed stack: each runs real kernels in a process that may crash or hang."""

import importlib.metadata
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from cogumi.core.run_directory import write_atomic
from cogumi.core.worker import call
from cogumi.stack.gpus import place_by_versions

# (metric, value, unit, note)
Reading = tuple[str, float | str | None, str, str]
TIMEOUT = 300.0  # includes downloading a kernel from the hub
# The package of a probe with another name.
PACKAGES = {"matmul": "torch", "hub_flash_attn": "kernels"}
tl: Any = None  # triton.language once imported: @triton.jit looks it up in the kernel's module
# Flash attention 2: v3 has no backward pass for grouped heads (issue 1085, below).
HUB_FLASH_ATTN = "kernels-community/flash-attn2@db6b51744f0cd7061386442c09df890fc6d9f47e"


def run_probe(name: str, device: str) -> list[Reading]:
    """Run one of PROBES on `device` ("cuda", "cuda:1", "cpu") in a fresh process.

    Raises ModuleNotFoundError without its package; RuntimeError, with the last line of its output, if it failed.
    """
    package = PACKAGES.get(name, name)
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{package.replace('_', '-')} is not installed")
    try:
        return list(call(name, PROBES[name], device, environment=os.environ, timeout=TIMEOUT))
    except RuntimeError as error:
        reason = str(error).removeprefix(f"{name} ended with status 1: ")  # the prefix of any exception
    distribution = next(iter(importlib.metadata.packages_distributions().get(package, ())), "")
    installed = f"{distribution} {importlib.metadata.version(distribution)}" if distribution else package
    raise RuntimeError(f"{installed}: {reason[:300]}")


def probe_torch(device: str) -> list[Reading]:
    """Check the build for this device, and one small matrix product."""
    import torch

    build = "a CPU build"
    if torch.version.cuda is not None:
        build = f"built for CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    readings: list[Reading] = [("version", str(torch.__version__), "", f"{build}; computes on {device}")]
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(device)
        built, prefix = torch.cuda.get_arch_list(), f"sm_{major}"
        # A card runs machine code of its own major version and at most its minor version, and compiles PTX.
        minors = [int(arch.removeprefix(prefix).rstrip("af")) for arch in built if arch.startswith(prefix)]
        if min(minors, default=minor + 1) > minor and not any(arch.startswith("compute_") for arch in built):
            raise RuntimeError(f"sm_{major}{minor} is not among the architectures of this build: {' '.join(built)}")
        readings.append(("architectures", " ".join(built), "", f"the card is sm_{major}{minor}"))
        readings.append(("memory", torch.cuda.get_device_properties(device).total_memory / 2**30, "GiB", ""))
    one = torch.arange(64, dtype=torch.float32, device=device).reshape(8, 8)
    if not torch.equal((one @ torch.eye(8, device=device)).cpu(), one.cpu()):
        raise RuntimeError("a product of matrices is wrong on this device")
    return readings


def probe_matmul(device: str) -> list[Reading]:
    import torch
    from torch.utils.benchmark import Timer

    size = 8192 if device.startswith("cuda") else 256
    # Random: on zeros some cards run measurably faster.
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = Timer("left @ right", globals={"left": left, "right": right}).timeit(10).median
    return [("bf16 matmul", 2 * size**3 / seconds / 1e12, "TFLOP/s", f"{size} x {size} x {size}, random")]


def probe_triton(device: str) -> list[Reading]:
    global tl
    import torch
    import triton

    tl = importlib.import_module("triton.language")

    @triton.jit
    def double(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def,name-defined,valid-type]
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < count
        tl.store(target + offsets, tl.load(source + offsets, mask=inside) * 2, mask=inside)

    source = torch.randn(1000, device=device)
    doubled = torch.full_like(source, float("nan"))
    start = time.perf_counter()
    double[(triton.cdiv(source.numel(), 256),)](source, doubled, source.numel(), BLOCK=256)
    torch.testing.assert_close(doubled, source * 2)  # waits for the kernel
    return [("JIT and run", time.perf_counter() - start, "s", f"triton {triton.__version__}")]


def probe_bitsandbytes(device: str) -> list[Reading]:
    import bitsandbytes
    import torch

    plain = torch.nn.Linear(256, 256, bias=False)
    layer = bitsandbytes.nn.Linear4bit(256, 256, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.load_state_dict({"weight": plain.weight.data})
    layer = layer.to(device)  # quantizes
    inputs = torch.randn(8, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    outputs = layer(inputs)
    outputs.sum().backward()
    assert inputs.grad is not None
    weight = plain.weight.data.to(device, torch.bfloat16)
    forward = _relative(outputs, inputs.detach() @ weight.T)
    backward = _relative(inputs.grad, torch.ones_like(outputs) @ weight)
    # NF4 rounding of normal weights costs about 0.1; a wrong kernel costs about 1.
    if max(forward, backward) > 0.25:
        raise RuntimeError(f"4-bit differs from full precision by {forward:.3g} forward, {backward:.3g} backward")
    version = f"bitsandbytes {bitsandbytes.__version__}"
    return [("4-bit forward and backward", max(forward, backward), "relative", version)]


def probe_flash_attn(device: str) -> list[Reading]:
    import flash_attn

    return _flash(flash_attn.flash_attn_func, device, f"flash-attn {flash_attn.__version__}")


def probe_hub_flash_attn(device: str) -> list[Reading]:
    """Probe the pinned kernel of the Hugging Face hub, which is downloaded unless cached."""
    from kernels import get_kernel

    repository, _, revision = HUB_FLASH_ATTN.partition("@")
    return _flash(get_kernel(repository, revision=revision).flash_attn_func, device, HUB_FLASH_ATTN)


def _flash(flash_attn_func: Callable[..., Any], device: str, name: str) -> list[Reading]:
    """Compare forward and backward pass with torch's, with a key and value head for four query heads as in Llama.

    A build may fail in that backward pass alone (https://github.com/huggingface/kernels-community/issues/1085).
    """
    import torch

    batch, heads, tokens, width = (4, 32, 2048, 128) if device.startswith("cuda") else (1, 4, 64, 32)
    query, key, value = (
        torch.randn(batch, count, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, heads // 4, heads // 4)
    )
    reference = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    output = flash_attn_func(*(tensor.transpose(1, 2) for tensor in (query, key, value)), causal=True)
    output = (output[0] if isinstance(output, tuple) else output).transpose(1, 2)
    upstream = torch.randn_like(reference)
    gradients = (torch.autograd.grad(tensor, (query, key, value), upstream) for tensor in (output, reference))
    forward = _relative(output, reference)
    backward = max(_relative(*pair) for pair in zip(*gradients, strict=True))
    if not max(forward, backward) <= 0.05:  # bfloat16 kernels differ by less than 0.01, a wrong one by about 1
        raise RuntimeError(f"differs from torch by {forward:.3g} forward, {backward:.3g} backward")
    return [("forward and backward", max(forward, backward), "relative", name)]


def probe_import(name: str, device: str) -> list[Reading]:
    """Import a package whose failures show there: it is built for one release of torch or CUDA."""
    start = time.perf_counter()
    module = importlib.import_module(name)
    return [("import", time.perf_counter() - start, "s", f"{name} {module.__version__}")]


@cache
def flash_attention(device: str = "cuda") -> tuple[str | None, str]:
    """Find a flash attention that computes correctly on this GPU: its name in transformers, and the reason.

    The result is cached on disk unless a probe failed, which may have been a timeout or a download.
    """
    import torch

    card = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    with suppress(OSError):  # the driver's version, if there is one
        card += " ".join(re.findall(r"\d{3}\.[\d.]+", Path("/proc/driver/nvidia/version").read_text())[:1])
    path = place_by_versions("flash-attention", card, "torch", "flash-attn", "kernels") / HUB_FLASH_ATTN[-40:]
    with suppress(OSError, ValueError):
        attention, reason = json.loads(path.read_text())
        return attention, f"{reason}; as an earlier run found ({path})"
    problems, failed = [], False
    for name, attention in (("flash_attn", "flash_attention_2"), ("hub_flash_attn", HUB_FLASH_ATTN)):
        try:
            (_, value, _, version), *_ = run_probe(name, device)
        except (ModuleNotFoundError, RuntimeError) as error:
            problems.append(f"{attention}: {error}")
            failed |= isinstance(error, RuntimeError)
        else:
            reason = "; ".join([f"{version} agrees with torch, forward and backward, to {value:.2g}", *problems])
            if not failed:
                with suppress(OSError):  # a read-only home: the next run probes again
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomic(path, json.dumps([attention, reason]))
            return attention, reason
    return None, "; ".join(problems)


PROBES: dict[str, Callable[[str], list[Reading]]] = {
    "torch": probe_torch, "matmul": probe_matmul, "triton": probe_triton, "bitsandbytes": probe_bitsandbytes,
    "flash_attn": probe_flash_attn, "hub_flash_attn": probe_hub_flash_attn,
    **{name: partial(probe_import, name) for name in ("torchvision", "xformers", "unsloth")},
}  # fmt: skip


def _relative(ours: Any, reference: Any) -> float:
    ours, reference = ours.detach().float(), reference.detach().float()
    return float((ours - reference).norm() / reference.norm())
