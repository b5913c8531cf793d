"""The language-model head in fp32, for the trainer's log-probabilities and for the sampler's.

The logits of a bf16 head are rounded to 8 bits. Two engines that agree on everything else then differ by about 1e-2 per
token, far outside GSPO's clip of 3e-4. MiniMax-M1 (arXiv:2506.13585, section 3.2) and ScaleRL (arXiv:2510.13786)
multiply the head in fp32 on both sides. TRL's own switch, `cast_lm_head_to_fp32`, turns the weights themselves into
fp32, and with tied embeddings the embedding too. It raises AttributeError for PEFT on a tied model.
"""

import importlib
import inspect
import logging
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from cogumi.core.errors import UsageError
from cogumi.patches.vllm_engine import head_dtype
from cogumi.rl.loss_check import backend_of

log = logging.getLogger(__name__)

# Vocabulary rows that are in fp32 at once: 64 MiB at a hidden size of 4096. Measured on one core, 8 x 896 x 152k: 96 ms
# with 4096 rows, as with weights that were cast beforehand (92 ms); 143 ms with 16384, which no cache holds.
VOCABULARY_TILE = 4096


def fp32_lm_head(trainer: Any) -> None:
    """Multiply the head in fp32 wherever this GRPO trainer, TRL's or unsloth's, uses it: in its loss and in `generate`.

    Call it once the trainer is built and before it trains. Weights keep their dtype and modules their class, and no
    hook is added. So what is saved, merged or embedded is what it was. The hidden states are still bf16.

    Raises UsageError for a head that is no plain Linear or has an adapter, and for unsloth imported without
    UNSLOTH_VLLM_FP32_LM_HEAD=1. TRL's own switch is refused with the other settings of a run.
    """
    policy, reference = unwrap_peft(trainer.model), trainer.ref_model
    models = [policy] if reference is None else [policy, unwrap_peft(reference)]
    heads = [require_frozen_head(model) for model in models]
    if backend_of(trainer) == "unsloth":
        require_unsloth_in_fp32()
    else:
        from trl.trainer.utils import add_fused_lm_head

        # TRL's Triton kernel rounds the logits to the dtype of the hidden states, or of autocast; with this argument it
        # casts tile by tile. The new forward hands everything but scoring to the one TRL installed
        # (grpo_trainer.py:1041-1051).
        for model, outputs in zip(models, (("log_probs", "entropy"), ("log_probs",)), strict=False):
            add_fused_lm_head(model, temperature=trainer.temperature, cast_lm_head_to_fp32=True, outputs=outputs)
    for head in heads:
        # On the instance, as TRL does it; a method bound to its module, so that a deep copy is bound to the copy.
        vars(head)["forward"] = MethodType(project_in_fp32, head)
    if not trainer.use_vllm or (dtype := head_dtype(trainer.vllm_generation)) == torch.float32:
        return
    reason = "a server does not tell" if dtype is None else f"it is in {str(dtype).removeprefix('torch.')}"
    overrides = '{"head_dtype": "float32"}'
    fix = f"start `vllm serve` with --hf-overrides '{overrides}'"
    if dtype is not None:
        fix = f'write "head_dtype": "float32" into the config.json of {trainer.model.config.name_or_path}'
    log.warning("cogumi.fp32_lm_head: vLLM's head may not be in fp32 (%s); %s (vLLM 0.26 or newer)", reason, fix)


def project_in_fp32(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return logits (..., V) of `hidden` (..., H) in float32 (float64 for a float64 head), also under autocast."""
    # Cast in each call, a tile at a time: a copy in fp32 would take 2.3 GiB for 152k x 4096, and save no time.
    dtype = torch.promote_types(head.weight.dtype, torch.float32)
    wide = hidden.to(device=head.weight.device, dtype=dtype)
    with torch.autocast(wide.device.type, enabled=False):
        if head.weight.dtype == dtype:
            logits = nn.functional.linear(wide, head.weight)
        else:
            tiles = head.weight.split(VOCABULARY_TILE)
            logits = torch.cat([nn.functional.linear(wide, rows.to(dtype)) for rows in tiles], dim=-1)
        return logits if head.bias is None else logits + head.bias.to(dtype)


def unwrap_peft(model: Any) -> Any:
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model


def require_frozen_head(model: Any) -> nn.Linear:
    """Return the head of a transformers model. Raises UsageError for one that cannot be multiplied in fp32 from here."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    head = model.get_output_embeddings()
    if isinstance(head, BaseTunerLayer | AuxiliaryTrainingWrapper):
        raise UsageError(
            "cogumi.fp32_lm_head: true does not work with an adapter on the head",
            fix="take lm_head out of lora.target_modules and lora.modules_to_save",
        )
    if type(head) is not nn.Linear or not head.weight.dtype.is_floating_point:
        raise UsageError(
            f"cogumi.fp32_lm_head: true needs a plain Linear head and {type(model).__name__} has "
            f"{type(head).__module__}.{type(head).__name__}",
            fix="remove cogumi.fp32_lm_head, or load the head unquantized",
        )
    return head


def require_unsloth_in_fp32() -> None:
    """Raise UsageError unless unsloth's scorers were imported with an fp32 head (unsloth 2026.10.9)."""
    scorers: Any = importlib.import_module("unsloth_zoo.rl_replacements")
    scorer = inspect.signature(scorers.chunked_hidden_states_selective_log_softmax)
    flag = scorer.parameters.get("fp32_lm_head")
    if flag is None or flag.default is not True:
        needed = (
            "UNSLOTH_VLLM_FP32_LM_HEAD=1 in the environment before unsloth is imported (unsloth 2026.10.9 or newer)"
        )
        raise UsageError(f"cogumi.fp32_lm_head: true needs {needed}", fix="set it and start again")
