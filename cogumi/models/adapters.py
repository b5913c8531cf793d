"""The LoRA that a run trains, its learning rates, and what it did."""

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.trainer_optimizer import is_optimizer_factory

from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.merge.adapter_files import quantization_of

# Rank 16 on every linear layer with alpha = 2r; dropout 0, because GSPO's ratio must be 1 before the first update.
DEFAULTS: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
WEIGHTS = "adapter_model.safetensors"
TRAINED = "default"  # PEFT's name for the adapter that is trained
# What transformers hands over beside the class where an optimizer makes groups, or steps, of its own.
GROUPS_OF_ITS_OWN = ("params", "model", "optimizer_dict")

log = logging.getLogger("cogumi")


def lora_config(lora: dict[str, Any], revision: str | None = None) -> LoraConfig:
    """The LoraConfig of a run: `lora:` over the defaults. `revision` is the base's, recorded for the merge."""
    try:
        return LoraConfig(**{**DEFAULTS, "task_type": "CAUSAL_LM", "revision": revision, **lora})
    except (ValueError, TypeError) as error:
        raise UsageError(one_line(error), key="lora") from error


def refuse_unmatched(lora: dict[str, Any], of_base: Any) -> None:
    """Raise UsageError where `lora.target_modules` match no module of the base, before anything is loaded or prepared.

    of_base: its config. A base that cannot be built of it alone is left for PEFT to refuse.
    """
    wanted = lora.get("target_modules")
    if wanted is None or wanted == "all-linear" or lora.get("target_parameters"):
        return
    config = lora_config(lora)
    try:
        with torch.device("meta"):  # of the class that a run loads; building it writes into the config
            base = AutoModelForCausalLM.from_config(copy.deepcopy(of_base))
    except (ValueError, ImportError, RuntimeError):
        return
    if any(check_target_module_exists(config, name) for name, _ in base.named_modules()):
        return
    head = base.get_output_embeddings()
    linear = dict.fromkeys(
        name.rpartition(".")[2]
        for name, each in base.named_modules()
        if isinstance(each, torch.nn.Linear | Conv1D) and each is not head
    )
    words = [wanted] if isinstance(wanted, str) else sorted(wanted)
    raise UsageError(
        f"{', '.join(words)}: no module of {type(base).__name__} matches",
        key="lora.target_modules",
        fix=f"its linear modules are {', '.join(linear)} (all-linear takes them all)",
    )


def keep_float32(model: Any) -> None:
    """Give the adapter on a quantized base the float32 back that PEFT made it in. Before there is an optimizer. TRL
    1.15 casts it to bfloat16, where an update below 2^-9 of a weight is lost. What is trained whole (modules_to_save)
    gets the base's dtype."""
    if quantization_of(model.config) is None:
        return
    base = model.get_base_model().dtype
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32 if "lora_" in name else base)


def differing_tensors(model: Any, adapter: Path) -> list[str]:
    """The tensors in which the model's adapter and the one that was saved from it are not the same, bit for bit."""
    live, saved = get_peft_model_state_dict(model), load_file(adapter / WEIGHTS)
    same = {name for name in live.keys() & saved.keys() if torch.equal(live[name].cpu(), saved[name])}
    return sorted((live.keys() | saved.keys()) - same)


def use_loraplus(trainer: Any, ratio: float) -> None:
    """Have a trainer make its optimizer with peft's LoRA+ groups. Before it has one; with its adapter on.

    A gets `args.learning_rate`, B and one-dimensional parameters (DoRA's magnitudes) `ratio` times as much, adapters
    on embeddings peft's 1e-6; the schedule scales all of them. Raises UsageError where there is no LoRA, for an
    optimizer that makes its own groups, and for one that is there already.
    """
    if not isinstance(trainer.model, PeftModel):
        raise UsageError("cogumi.loraplus_lr_ratio is for LoRA, and this run trains the whole model", fix="drop it")
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise UsageError("LoRA+ chooses the optimizer's groups", key="train.optim", fix="give the trainer no optimizer")
    plain = trainer.get_optimizer_cls_and_kwargs

    # Asked again for each optimizer: a forecast makes one too, and transformers takes "params" out of what it is given.
    def with_groups(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        cls, kwargs = plain(args, model)
        if is_optimizer_factory(cls) or "lr" not in kwargs or any(key in kwargs for key in GROUPS_OF_ITS_OWN):
            raise UsageError(
                f"train.optim {args.optim.value} makes parameter groups of its own",
                key="cogumi.loraplus_lr_ratio",
                fix="set another one, such as adamw_torch or adamw_8bit, or drop the ratio",
            )
        return cls, {**kwargs, "params": loraplus_groups(model, kwargs["lr"], ratio, args.weight_decay)}

    cls, kwargs = with_groups(trainer.args, trainer.model)
    trainer.get_optimizer_cls_and_kwargs = with_groups
    rates = ", ".join(f"{group['lr']:g} for {len(group['params'])} tensors" for group in kwargs["params"])
    log.info("LoRA+: B learns %g times as fast as A (arXiv:2402.12354); %s: %s", ratio, cls.__name__, rates)


def loraplus_groups(model: Any, lr: float, ratio: float, weight_decay: float) -> list[dict[str, Any]]:
    """peft's groups of an adapter's parameters, each with its `lr` and `weight_decay`; A first, none empty."""
    groups = create_loraplus_optimizer(
        model,
        lambda groups, **_: groups,  # type: ignore[arg-type]  # it is called as an optimizer's class is
        lr=lr,
        loraplus_lr_ratio=ratio,
        loraplus_weight_decay=weight_decay,
    )
    return [group for group in groups if group["params"]]  # type: ignore[attr-defined]
