"""LoRA+ (arXiv:2402.12354): B learns `ratio` times as fast as A, with the optimizer that the run has."""

import logging
from pathlib import Path
from typing import Any

import torch
from peft.optimizers import create_loraplus_optimizer
from transformers.trainer_optimizer import is_optimizer_factory

from cogumi.core.errors import UsageError
from cogumi.core.run_directory import DECISIONS, write_section
from cogumi.patches.trl_internals import wrap_method

log = logging.getLogger("cogumi")
OPTIMIZER = "optimizer"  # of decisions.json: what LoRA+ has built
OWN_GROUPS = {"params", "model", "optimizer_dict"}  # that transformers gives an optimizer beside its settings
RECORDED = ("lr", "weight_decay", "betas", "eps")


def use_loraplus(trainer: Any, ratio: float, run_dir: Path) -> None:
    """Have a trainer, with its adapter on, build its optimizer with PEFT's groups and record it in decisions.json.

    A keeps `train.learning_rate`, as adapters of embeddings do, for which PEFT would take 1e-6. Raises UsageError for an
    optimizer with groups of its own.
    """

    def settings(model: Any) -> tuple[Any, dict[str, Any]]:
        kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
        if is_optimizer_factory(kind) or "lr" not in options or OWN_GROUPS & options.keys():
            problem = f"{trainer.args.optim.value} makes groups of its own, and so does cogumi.loraplus_ratio"
            raise UsageError(problem, key="train.optim", fix="set adamw_torch or adamw_8bit, or drop the ratio")
        return kind, options

    def create(original: Any, model: Any = None) -> Any:
        model = trainer.model if model is None else model
        if trainer.optimizer is not None:
            return original(model)
        kind, options = settings(model)
        rates = {"loraplus_lr_ratio": ratio, "loraplus_lr_embedding": options["lr"]}
        decay = trainer.args.weight_decay
        optimizer = create_loraplus_optimizer(model, kind, **rates, loraplus_weight_decay=decay, **options)
        keep_decay(trainer, model, optimizer)
        if options.get("optim_bits") == 8:
            keep_embeddings_in_32_bits(model)
        trainer.optimizer = optimizer
        if trainer.accelerator.is_main_process:
            record(optimizer, ratio, run_dir)
        return original(model)

    settings(trainer.model)
    wrap_method(trainer, "create_optimizer", create)


def keep_decay(trainer: Any, model: Any, optimizer: Any) -> None:
    """Keep from decay what the trainer does, such as trained norms, of which PEFT knows LayerNorm; drop empty groups."""
    names = set(trainer.get_decay_parameter_names(model))
    decayed = {parameter for name, parameter in model.named_parameters() if name in names}
    for group in list(optimizer.param_groups):
        exempt = [parameter for parameter in group["params"] if parameter not in decayed]
        if exempt and group["weight_decay"]:
            group["params"] = [parameter for parameter in group["params"] if parameter in decayed]
            optimizer.add_param_group({**group, "params": exempt, "weight_decay": 0.0})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def keep_embeddings_in_32_bits(model: Any) -> None:
    """Do what transformers does for bitsandbytes' optimizers, which PEFT knows by other names."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def record(optimizer: Any, ratio: float, run_dir: Path) -> None:
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    groups = [
        {"tensors": len(group["params"])} | {key: group[key] for key in RECORDED if key in group}
        for group in optimizer.param_groups
    ]
    rates = ", ".join(f"{group['lr']:g} for {group['tensors']} tensors" for group in groups)
    log.info("LoRA+: B learns %g times as fast as A; %s: %s", ratio, kind, rates)
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
    section = {"class": kind, "bits": bits, "loraplus_ratio": ratio, "groups": groups}
    write_section(run_dir / DECISIONS, OPTIMIZER, section)
