"""`cogumi.compile: layers`: a transformer compiled layer by layer, in place, beside checkpointing, PEFT and 4-bit weights.

A whole model compiled at once breaks at the checkpointing and at PEFT's hooks, and captures little. Each layer compiled
on its own is one graph, and layers of one kind share it.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.dataclasses import DynamoBackend
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from cogumi.compile.compile_report import describe_process, try_compiler
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_duration
from cogumi.core.run_directory import FORECAST, read_section, write_section
from cogumi.models.adapters import find_towers
from cogumi.models.quantization import expert_states, keep_4bit_unpacked, quantized_layers
from cogumi.patches import graph_break, torch_internals, unsloth_rl
from cogumi.patches.trl_internals import attention_of, cache_argument

log = logging.getLogger("cogumi")
REPORTED_AFTER = 3  # steps
SAVED_SHARE, COMPILE_SECONDS = 0.1, 120  # of a step's time, and once: estimates, not measured on a GPU


def compile_trainer(trainer: Any, mode: str, path: Path, unless_full: Callable[[Callable[[], None]], None]) -> None:
    """Before training: what `cogumi.compile` says, recorded in `path`. Raises UsageError where layers cannot be compiled.

    unless_full: calls what writes the report later, and lets a full disk pass.
    """
    chosen, mode = mode == "auto", choose_mode(trainer, path) if mode == "auto" else mode
    report: dict[str, Any] = {"mode": mode}
    if mode == "layers":
        if reason := find_obstacle(trainer):
            raise UsageError(f"cogumi.compile=layers: {reason}")
        # Where cogumi chose it nobody asked for it, and what does not compile runs as it is.
        torch_internals.DYNAMO.suppress_errors = chosen
        prepare_four_bit(trainer.model)
        graph_break.apply("auto", trainer.model)
        if error := try_compiler(next(trainer.model.parameters()).device):
            raise UsageError(f"nothing can be compiled here: {error}", fix="use cogumi.compile=off")
        report |= describe_process()
        for line in (*report["variables"], f"4-bit layers: {report['strategy_reason']}"):
            log.info("compile: %s", line)
        log.info("compile: %d layers; the first step compiles them", len(compile_layers(trainer.model)))
        trainer.add_callback(CompileReport(report, path, unless_full))
    elif unsloth_rl.is_in_place():  # which compiles its loss and, on a GPU, modules of the model, and hides what fails
        graph_break.apply("auto", trainer.model)
        report |= describe_process()
        log.info("compile: unsloth compiles; 4-bit layers: %s", graph_break.status().reason)
        trainer.add_callback(CompileReport(report, path, unless_full))
    write_section(path, "compile", report)


def choose_mode(trainer: Any, path: Path) -> str:
    """`layers` or `off` for `cogumi.compile: auto`, as `path` records it, else by the preflight's forecast beside `path`."""
    forecast = read_section(path.with_name(FORECAST), "preflight").get("figures", {})
    mode, seconds = str(read_section(path, "compile").get("mode", "")), forecast.get("time", {}).get("seconds")
    if mode or seconds is None:
        return mode or "off"
    attention, config = attention_of(trainer.model.config), trainer.model.config.get_text_config()
    untried = {
        "lengths that differ from step to step (no packing)": not getattr(trainer.args, "packing", False),
        "several processes": trainer.accelerator.num_processes > 1,
        f"{attention} attention": attention != "sdpa",
        "experts": getattr(config, "num_experts_per_tok", None),
    }
    why = find_obstacle(trainer) or next((f"not tried with {name}" for name, applies in untried.items() if applies), "")
    if not why and SAVED_SHARE * seconds <= COMPILE_SECONDS:
        why = f"{SAVED_SHARE:.0%} of {format_duration(seconds)} would be saved, less than the {COMPILE_SECONDS} s it takes"
    why = why or try_compiler(next(trainer.model.parameters()).device)
    mode = "off" if why else "layers"
    log.info("chosen: cogumi.compile: %s (%s)", mode, why or f"for {format_duration(seconds)} of steps")
    return mode


class CompileReport(TrainerCallback):
    """Report once, after some steps, what Dynamo did in this process."""

    def __init__(self, report: dict[str, Any], path: Path, unless_full: Callable[[Callable[[], None]], None]) -> None:
        self.report, self.path, self.unless_full, self.steps = report, path, unless_full, 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1
        if self.steps == REPORTED_AFTER:
            self.write()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.steps < REPORTED_AFTER:
            self.write()

    def write(self) -> None:
        counts = self.report["counts"] = torch_internals.dynamo_counts()
        did = f"{counts['graphs']} graphs of {counts['operations']} operations, {sum(counts['breaks'].values())} breaks"
        log.info("compile: %s, %d recompiles, %.1f s compiling", did, counts["recompiles"], counts["seconds"])
        self.report["compiled"], self.report["failed"] = torch_internals.compiled_functions()
        for name, error in self.report["failed"].items():
            log.warning("compile: %s runs uncompiled: %s", name, error)
        self.unless_full(lambda: write_section(self.path, "compile", self.report))


def find_obstacle(trainer: Any) -> str:
    """Return why the layers of a trainer's model are not to be compiled, in words; "" where they can be tried."""
    args, model = trainer.args, trainer.model
    if args.torch_compile or trainer.accelerator.state.dynamo_plugin.backend is not DynamoBackend.NO:
        return "train.torch_compile or ACCELERATE_DYNAMO_BACKEND compiles the whole model, which captures less; leave it out"
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        return "train.gradient_checkpointing_kwargs: use_reentrant compiles each layer twice; leave it out"
    if unsloth_rl.is_in_place():
        return "unsloth's own layers run here, and it compiles parts of them itself"
    if getattr(model, "use_kernels", False):
        return "the hub's kernels (train.model_init_kwargs: use_kernels) end a graph in each layer"
    if by := torch_internals.dynamo_switched_off_by():
        return f"Dynamo is switched off by {by}; unset it to compile"
    if not decoder_layers(model):
        return f"{type(model).__name__} has no layers that transformers checkpoints, so there is nothing to compile one by one"
    return ""


def compile_layers(model: nn.Module, backend: str = "inductor") -> list[nn.Module]:
    """Have the model's layers, and what stands beside them, run compiled, except while a text is generated. Returns them.

    Nothing is compiled yet. `find_obstacle` is asked before.
    """
    layers = decoder_layers(model)
    for part in parts_of(model):
        torch_internals.set_call(part, compile_for_training(part, backend, with_gradient_only=part not in layers))
    for module in left_out(model):
        torch_internals.set_call(module, torch.compiler.disable(torch_internals.plain_call(module)))
    return layers


def compile_for_training(part: nn.Module, backend: str, with_gradient_only: bool = False) -> Callable[..., Any]:
    """Wrap the call of a part: training runs compiled, generation (a cache, and other lengths each time) does not.

    with_gradient_only: the part is not given the cache by which generation is told.
    """
    plain = torch_internals.plain_call(part)
    compiled = torch.compile(plain, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        generating = cache_argument(kwargs) is not None or (with_gradient_only and not torch.is_grad_enabled())
        return (plain if generating else compiled)(*args, **kwargs)

    return call


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """List the layers of a model that are checkpointed one by one, in all stacks that a text reaches."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    towers = [model.get_submodule(name) for name in find_towers(model)] if layers else []
    inside = {id(below) for layer in layers for below in layer.modules() if below is not layer}
    inside |= {id(below) for tower in towers for below in tower.modules()}
    return [layer for layer in layers if id(layer) not in inside]


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers, and what their decoder calls once in a forward pass: the rotary embedding, the last norm."""
    layers = decoder_layers(model)
    # The decoder, which calls them, is the innermost module that holds their list.
    holders = [
        module for module in model.modules() if any(layers[0] in list(child.children()) for child in module.children())
    ]
    beside = [part for part in holders[-1].children() if not isinstance(part, nn.ModuleList | nn.Embedding)]
    return [*layers, *beside]


def left_out(model: nn.Module) -> list[nn.Module]:
    """List the outermost modules that stay out of the graphs.

    In PEFT's wrappers (`target_parameters`) Dynamo ends a graph several times. It does not trace the parametrization of
    stacked experts in 4 bits.
    """
    experts = {name.rpartition(".")[0] for name in expert_states(model)}
    modules = [module for name, module in model.named_modules() if isinstance(module, ParamWrapper) or name in experts]
    inner = {id(below) for module in modules for below in module.modules() if below is not module}
    return [module for module in modules if id(module) not in inner]


def prepare_four_bit(model: Any) -> None:
    """Change what makes 4-bit layers break a graph or train on nothing."""
    for layer in quantized_layers(model).values():
        if layer.bias is not None:  # bitsandbytes would do so in its forward, and end the graph there
            layer.bias.data = layer.bias.data.to(getattr(layer, "compute_dtype", None) or layer.bias.dtype)
    # After a forward without gradients bitsandbytes would repack them for AVX512, and training would get no gradient.
    keep_4bit_unpacked(model)
