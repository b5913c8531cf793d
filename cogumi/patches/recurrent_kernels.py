"""Kernels of transformers' recurrent layers: which a model calls, where each runs, and the documents of a packed row.

transformers 5.17 takes a function of flash-linear-attention, causal-conv1d or mamba-ssm if that imports, else a loop in
PyTorch. Without a GPU the former fail, as on the forecast's tensors; the latter reads across documents (5.24 refuses). With
`apply` the loop takes tensors that are on no GPU, and `seq_idx` keeps convolutions and gated delta rules of documents apart.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

TOKEN_AXES = {"causal_conv1d_fn": 2, "chunk_gated_delta_rule": 1, "chunk_kda": 1}
counts_kernels = False  # set by a forecast for a card: fake delta rules keep what kernels do, without the loop


def apply(model: Any) -> frozenset[tuple[str, bool]]:
    """Wrap the functions with kernels that a model's layers call, in the modules that define them.

    Returns (distribution with the kernel, whether transformers imported it) of each.
    """
    kernels, kinds = set(), {type(module) for module in model.modules()}
    members = (method for kind in kinds for _, method in inspect.getmembers(kind, inspect.isfunction))
    for method in set(map(inspect.unwrap, members)):
        for name in method.__code__.co_names:
            function = method.__globals__.get(name)
            variables = _closure(function)
            # By the package kernels it is a module, whose forward the hub's replaces.
            if "kernel_layer_name" in dir(function):
                variables = _closure(_closure(vars(type(function)).get("forward")).get("func")) or variables
            if "torch_function" in variables and not hasattr(function, "kernel"):
                function = method.__globals__[name] = _wrap(function, variables)
            if hasattr(function, "kernel"):
                kernels.add(function.kernel)
    return frozenset(kernels)


def _closure(function: Any) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}


def _wrap(function: Any, variables: dict[str, Any]) -> Any:
    """Wrap a function that `use_kernel_func_from_hub_with_fallback` made, with these variables."""
    package, imported, reference = (variables[key] for key in ("package", "is_new_implementation", "torch_function"))
    axis, parameters = TOKEN_AXES.get(variables["func_name"]), inspect.signature(reference).parameters

    def loop(*args: Any, **kwargs: Any) -> Any:
        is_counted = counts_kernels and variables["func_name"] == "chunk_gated_delta_rule"
        if is_counted and hasattr(args[0], "fake_device") and not kwargs.get("output_final_state"):
            gate = (kwargs["g"] + kwargs["beta"]).to(args[2].dtype).unsqueeze(-1)
            return args[2] * gate + args[0].square().sum() + args[1].square().sum(), None
        return reference(*args, **{key: value for key, value in kwargs.items() if key in parameters})

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_kernel = args[0].device.type not in ("cpu", "meta") and (imported or "forward" in vars(function))
        run = function if is_kernel else loop
        if axis is None or kwargs.get("seq_idx") is None or (is_kernel and axis == 2):  # a convolution takes seq_idx
            return run(*args, **kwargs)
        return _run_apart(run, axis, is_kernel, args, kwargs)

    distribution = "flash-linear-attention" if package == "fla" else package.replace("_", "-")
    call.kernel = distribution, imported  # type: ignore[attr-defined]
    return call


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_apart(run: Any, axis: int, is_kernel: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a loop for each document, or a kernel for all of them end to end. axis: that of the tokens."""
    index: Tensor = kwargs.pop("seq_idx")
    starts = torch.ones_like(index, dtype=torch.bool)
    starts[:, 1:] = index[:, 1:] != index[:, :-1]
    ends = torch.nn.functional.pad(starts.flatten().nonzero().flatten(), (0, 1), value=index.numel())
    kwargs["cu_seqlens"], lengths = (ends, [index.numel()]) if is_kernel else (None, ends.diff().tolist())

    def documents(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 3:
            return [value] * len(lengths)
        return value.movedim(axis, 1).flatten(0, 1)[None].movedim(1, axis).split(lengths, axis)

    rows = zip(*map(documents, [*args, *kwargs.values()]), strict=True)
    outputs = [run(*row[: len(args)], **dict(zip(kwargs, row[len(args) :], strict=True))) for row in rows]
    has_state = isinstance(outputs[0], tuple)
    output = torch.cat([output[0] if has_state else output for output in outputs], axis)
    output = output.movedim(axis, 1)[0].unflatten(0, index.shape).movedim(1, axis)
    return (output, None) if has_state else output
