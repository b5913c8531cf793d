"""Share the prefill of equal prompts in transformers' `generate`, and drop finished completions from its batch.

A prompt runs through the model once, and its copies (`num_generations`) get its key-value cache. A completion that has
ended leaves the batch of the forward pass.

The decoding loop stays transformers'. Cuts, penalties, stop strings and the draw see a batch of the old shape, so as many
random numbers are drawn. Tokens are the same as far as a row's logits do not depend on the rows beside it.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMode

from cogumi.patches import replaced
from cogumi.patches.trl_internals import GENERATE_TURN, STOPPING_CRITERIA, cache_argument, wrap_method
from cogumi.rl.fp32_head import unwrap_peft
from cogumi.rl.loss_check import backend_of

log = logging.getLogger(__name__)
ONE_TOKEN_MODES = (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)  # one sequence per row, a token at a time
# Layers of a cache whose state is keys and values, with a row for each row of the batch.
SELECTABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
RANDOM = ("drop", "jitter")  # parts of the names of settings with which a forward pass draws random numbers


def share_prefill_and_drop_finished(trainer: Any) -> None:
    """Have `generate` compute no prompt twice in the rollouts of this `trl.GRPOTrainer`, and no finished completion.

    Call it once, on a built trainer. Rows that cannot be left out without changing the result stay, and the log says so
    once.
    """
    if trainer.use_vllm or trainer.args.use_transformers_continuous_batching or backend_of(trainer) == "unsloth":
        return  # there another engine decodes
    logged: set[str] = set()

    def generate_turn_without(generate_turn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = unwrap_peft(trainer.accelerator.unwrap_model(trainer.model_wrapped))
        prepare, rows = getattr(model, STOPPING_CRITERIA), RowsInUse(model.forward)
        reason = reason_against(trainer, model)

        def watched_criteria(*args: Any, **kwargs: Any) -> StoppingCriteriaList:
            return EndedRows(prepare(*args, **kwargs), rows)

        # generate reads from the signature which inputs to make.
        forward = functools.wraps(model.forward)(lambda *args, **inputs: rows.compute(*args, **inputs))
        with replaced(model, {} if reason else {"forward": forward, STOPPING_CRITERIA: watched_criteria}):
            result = generate_turn(*args, **kwargs)
        if not reason and rows.cache is None:
            reason = f"{type(model).__name__} has other inputs than rows of tokens, or another cache"
        if reason and reason not in logged:
            logged.add(reason)
            log.info("rollouts: generate is left as it is, because %s", reason)
        return result

    wrap_method(trainer, GENERATE_TURN, generate_turn_without)


def reason_against(trainer: Any, model: Any) -> str:
    """Return why the next rollout has to compute all rows; "" where it has not."""
    config: GenerationConfig = trainer.generation_config
    if trainer.accelerator.num_processes > 1:
        return "several processes have to call the model equally often"
    if config.get_generation_mode() not in ONE_TOKEN_MODES:
        return f"train.generation_kwargs ask for {config.get_generation_mode().value.replace('_', ' ')}"
    if config.cache_implementation is not None:
        return f"train.generation_kwargs.cache_implementation is {config.cache_implementation}"
    adapters = getattr(trainer.accelerator.unwrap_model(trainer.model_wrapped), "peft_config", {}).values()
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters):
        return "lora.alora_invocation_tokens has PEFT count positions for each row"
    if model.config.get_text_config() is not model.config:
        return f"{type(model).__name__} takes more than text"
    layers = DynamicCache(config=model.config).layers
    if other := next((layer for layer in layers if type(layer) not in SELECTABLE_LAYERS), None):
        return f"a {type(other).__name__} of its cache does not give single rows"
    if drawn := randomness(model):
        return f"{drawn} draws random numbers for each row"
    return ""


def randomness(model: Any) -> str:
    """Return what draws random numbers in a forward pass of the model now, or ""."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            return name
    # Some models drop without a module, such as attention weights, or add noise to a router's scores.
    for name, value in model.config.to_dict().items() if model.training else ():
        if any(part in name for part in RANDOM) and "classifier" not in name and isinstance(value, float) and value > 0:
            return f"{name} {value:g}"
    return ""


class EndedRows(StoppingCriteriaList):
    """The criteria of a call of `generate`, which report to `rows` what has ended."""

    def __init__(self, criteria: StoppingCriteriaList, rows: "RowsInUse") -> None:
        super().__init__(criteria)
        # Without an end token `generate` still draws for a row that a stop string has ended.
        self.rows = rows if any(hasattr(criterion, "eos_token_id") for criterion in criteria) else None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return (B,) bool: which rows end here. `input_ids`: (B, so far)."""
        done: Tensor = super().__call__(input_ids, scores, **kwargs)
        if self.rows is not None:
            self.rows.ended = done
        return done


class RowsInUse:
    """Replace a model's forward pass during one call of `generate`: compute the rows in use, return logits for all.

    B: rows of the batch. R: rows of them that are still computed.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.cache: Any = None  # of the call of `generate`, if its rows can be selected
        self.ended: Tensor | None = None  # (B,) bool: at the last token; those that ended earlier have left
        self.rows: Tensor | None = None  # (R,) indices: those that the cache still has; None while it has all

    def compute(self, *args: Any, **inputs: Any) -> Any:
        """Return the model's output with `logits` (B, 1, V) of the last position: zeros for a row that was dropped."""
        cache = cache_argument(inputs)
        if self.cache is None and can_select_rows(inputs):
            self.cache = cache
            return self.prefill(inputs)
        if cache is not None and cache is self.cache:
            return self.decode(inputs)
        # A processor of scores may call the model too (`guidance_scale`), with a cache of its own.
        return self.forward(*args, **inputs)

    def prefill(self, inputs: dict[str, Any]) -> Any:
        """Compute the prompts, each once where equal ones follow each other."""
        mask = inputs.get("attention_mask")  # transformers leaves it out where no prompt is padded
        prompts = inputs["input_ids"] if mask is None else torch.cat([inputs["input_ids"], mask], dim=1)
        _, copied, copies = torch.unique_consecutive(prompts, dim=0, return_inverse=True, return_counts=True)
        if len(copies) == len(prompts):
            return self.forward(**inputs)
        outputs = self.forward(**select_rows(inputs, copies.cumsum(0) - copies))
        self.cache.batch_select_indices(copied)
        outputs.logits = outputs.logits[:, -1:][copied]
        return outputs

    def decode(self, inputs: dict[str, Any]) -> Any:
        """Compute the next position of the completions that have not ended."""
        if self.ended is not None:
            unfinished = ~self.ended if self.rows is None else ~self.ended[self.rows]
            remaining = unfinished.nonzero().squeeze(1)
            if 0 < len(remaining) < len(unfinished):
                self.cache.batch_select_indices(remaining)
                self.rows = remaining if self.rows is None else self.rows[remaining]
        if self.rows is None:
            return self.forward(**inputs)
        outputs = self.forward(**select_rows(inputs, self.rows))
        logits = outputs.logits[:, -1:]
        every_row = logits.new_zeros(len(inputs["input_ids"]), *logits.shape[1:])
        outputs.logits = every_row.index_copy_(0, self.rows, logits)
        return outputs


def can_select_rows(inputs: dict[str, Any]) -> bool:
    """Return whether a prefill has inputs (B, T), a row for each prompt, no other tensors, and a cache of its own."""
    ids, tensors = inputs.get("input_ids"), [value for value in inputs.values() if isinstance(value, Tensor)]
    return (
        type(cache_argument(inputs)) is DynamicCache
        and isinstance(ids, Tensor)
        and isinstance(inputs.get("attention_mask"), Tensor | None)
        and all(tensor.shape == ids.shape for tensor in tensors)
    )


def select_rows(inputs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in inputs.items()}
