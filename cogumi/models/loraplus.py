"""LoRA+ (arXiv:2402.12354): B learns `ratio` times as fast as A, with whatever optimizer the run has.

A and B are far from alike: B starts at zero and is a factor of the layer's width larger in effect, so that one learning
rate for both is too small for B wherever it suits A. peft sorts the parameters; transformers makes the optimizer.
"""

import logging
from typing import Any

from peft import PeftModel
from peft.optimizers import create_loraplus_optimizer
from transformers.trainer_optimizer import is_optimizer_factory

from cogumi.errors import UsageError

log = logging.getLogger("cogumi")
# What transformers hands over beside the class where an optimizer makes groups, or steps, of its own.
GROUPS_OF_ITS_OWN = ("params", "model", "optimizer_dict")


def use_loraplus(trainer: Any, ratio: float) -> None:
    """Have a trainer make its optimizer with peft's LoRA+ groups. Before it has one; with its adapter on.

    The class and its arguments stay what `args.optim` says (8 bits, paged, betas, `optim_args`); `args.weight_decay` holds
    for A and B. A gets `args.learning_rate`, which is the one that is logged, B and one-dimensional parameters (DoRA's
    magnitudes) `ratio` times as much, adapters on embeddings peft's 1e-6. The schedule scales all of them.

    Raises UsageError where there is no LoRA, for an optimizer that makes its own groups, and for one that is there already.
    """
    if not isinstance(trainer.model, PeftModel):
        raise UsageError("cogumi.loraplus_lr_ratio is for LoRA, and this run trains the whole model", fix="drop it")
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise UsageError(
            "LoRA+ chooses the groups of the optimizer that train.optim names", fix="give the trainer none"
        )
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
        only_groups,  # type: ignore[arg-type]  # it is called, and named, as an optimizer's class is
        lr=lr,
        loraplus_lr_ratio=ratio,
        loraplus_weight_decay=weight_decay,
    )
    return [group for group in groups if group["params"]]  # type: ignore[attr-defined]


def only_groups(groups: list[dict[str, Any]], **_: Any) -> list[dict[str, Any]]:
    """In the place of an optimizer's class, for the groups that it would be given."""
    return groups
