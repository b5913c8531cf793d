"""A training step of a planned trainer, run on fake tensors from the loading of the model to the optimizer's update.

The trainer is TRL's own, made with a model on the meta device, and so are its loss, its gradient checkpointing, its
adapter and its optimizer. What a rollout takes is what the model's forward takes with a cache: once over the prompts, and
once for the last token.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cogumi.forecast.allocation_tracker import Live, Moment
from cogumi.forecast.fake_parameters import as_on_a_card, batches_are, codes_apart, stand_in
from cogumi.patches import head_logps, replaced
from cogumi.patches.torch_internals import FakeTensorMode

TILE = 32768  # columns of logits that TRL's head makes at once (trl/trainer/utils.py, _CHUNKED_LOGPROB_CHUNK_SIZE)
GRADIENTS, OPTIMIZER, CACHE = "gradients", "optimizer", "key-value cache"
LOAD, ROLLOUT, FORWARD, BACKWARD, UPDATE = "load", "rollout", "forward", "backward", "update"


@dataclass(frozen=True)
class Work:
    """What goes through at once. rows: examples (pairs, for dpo, documents for gspo), each `prompt + completion` tokens.

    completion: for gspo; 0 elsewhere. rollout: documents that are sampled at once, 0 where vLLM samples them. packed: rows
    of several documents, laid end to end in one sequence where `one_sequence`. padded: rows differ in length, so that
    attention gets a mask. micro_batches: a step.
    """

    method: str
    rows: int
    prompt: int
    completion: int = 0
    rollout: int = 0
    packed: bool = False
    one_sequence: bool = False
    padded: bool = True
    micro_batches: int = 1

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    @property
    def learned(self) -> float:
        """The share of tokens whose logits are computed: all, of a rollout the completions'."""
        return self.completion / self.length if self.completion else 1.0


def run_step(trainer: Any, work: Work, autocast: torch.dtype | None, on_card: bool) -> tuple[Moment, ...]:
    """The fullest moments of the stages of a step. The trainer's model is made of fake tensors from then on; it may be
    asked again.

    autocast: what matrices are multiplied in, where the trainer would (bf16, fp16). on_card: as a CUDA card computes it.
    """
    model, config = trainer.model, trainer.model.config.get_text_config()
    live = Live((config.vocab_size, TILE), selected=work.learned)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of paged optimizers, which this CPU has not, and the like
        stack.enter_context(as_on_a_card() if on_card else first_tile_alone())
        stack.enter_context(batches_are(work.padded))
        stack.enter_context(codes_apart())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(live)
        with live.during(LOAD):
            stand_in(model, live)
            if getattr(trainer, "ref_model", None) is not None:
                stand_in(trainer.ref_model, live)
        if work.rollout:
            with live.during(ROLLOUT):
                sample(model, work, live)
        optimizer, trained = with_states(trainer, live, accumulating=work.micro_batches > 1)
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps  # as Trainer.train does
        model.train()
        if trainer.args.gradient_checkpointing:
            model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs or {"use_reentrant": False})
        with live.during(FORWARD), multiplied_in(autocast):
            loss = trainer.compute_loss(model, INPUTS[work.method](work))
        with live.during(BACKWARD):
            loss.backward()
        del loss
        with live.during(UPDATE), live.making(OPTIMIZER):
            torch.nn.utils.clip_grad_norm_(trained, trainer.args.max_grad_norm or 1.0)
            optimizer.step()
    return tuple(moment for name, moment in live.moments.items() if name)


@contextmanager
def first_tile_alone() -> Iterator[None]:
    """Cogumi's head makes one tile of logits after another in the same memory: the first is as good as all."""
    with replaced(head_logps, {"_cut": lambda total, width: [slice(0, min(total, width))]}):
        yield


@contextmanager
def multiplied_in(dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        yield


def with_states(trainer: Any, live: Live, accumulating: bool) -> tuple[Any, list[Any]]:
    """The trainer's optimizer with the states that it has after its first step, and the parameters that it trains.

    accumulating: they have gradients already, as every micro-batch of a step but the first finds them.
    """
    trainer.optimizer = None  # that of an earlier step, which had other stand-ins
    optimizer = trainer.create_optimizer()
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with live.making(GRADIENTS):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
    with live.making(OPTIMIZER):
        optimizer.step()
    if not accumulating:
        optimizer.zero_grad()
    live.moments.pop("", None)
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda parameter: live.are(GRADIENTS, parameter.grad))
    return optimizer, trained


# ------------------------------------------------------------------------------------------------------------- what is put in


def whole(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


def of_sft(work: Work) -> dict[str, Any]:
    rows, tokens = (1, work.rows * work.length) if work.one_sequence else (work.rows, work.length)
    given = {"input_ids": whole(rows, tokens), "labels": whole(rows, tokens)}
    return given | ({"position_ids": whole(rows, tokens)} if work.packed else {"attention_mask": whole(rows, tokens)})


def of_dpo(work: Work) -> dict[str, Any]:
    """Chosen and rejected below each other (trl/trainer/dpo_trainer.py, DataCollatorForPreference)."""
    names = ("input_ids", "attention_mask", "completion_mask")
    reference = {f"ref_{side}_logps": torch.zeros(work.rows) for side in ("chosen", "rejected")}  # where precomputed
    return {name: whole(2 * work.rows, work.length) for name in names} | reference


def of_gspo(work: Work) -> dict[str, Any]:
    """A micro-batch of a rollout (trl/trainer/grpo_trainer.py, _generate_and_score_completions)."""
    scored = torch.zeros(work.rows, work.completion)
    return {
        "prompt_ids": whole(work.rows, work.prompt),
        "prompt_mask": whole(work.rows, work.prompt),
        "completion_ids": whole(work.rows, work.completion),
        "completion_mask": whole(work.rows, work.completion),
        "advantages": torch.zeros(work.rows),
        "old_per_token_logps": scored,
        "ref_per_token_logps": torch.zeros_like(scored),
        "num_items_in_batch": torch.tensor(float(work.rows * work.completion)),
    }


INPUTS: dict[str, Callable[[Work], dict[str, Any]]] = {"sft": of_sft, "dpo": of_dpo, "gspo": of_gspo}


def sample(model: Any, work: Work, live: Live) -> None:
    """Transformers' generate at its fullest: the prompts go through, and the last token with everything before it cached."""
    from transformers import DynamicCache

    model.eval()
    with torch.no_grad():
        given = {"attention_mask": whole(work.rollout, work.prompt), "use_cache": True, "logits_to_keep": 1}
        cache = model(whole(work.rollout, work.prompt), **given).past_key_values
        with live.making(CACHE):
            longer = DynamicCache(config=model.config)
            for number, layer in enumerate(cache.layers):
                shape = [*layer.keys.shape]
                shape[2] += work.completion - 1 if shape[2] == work.prompt else 0  # a sliding window stays as it is
                longer.update(*(layer.keys.new_empty(shape) for _ in range(2)), number)
        del cache
        given["attention_mask"] = whole(work.rollout, work.length)
        logits = model(whole(work.rollout, 1), **given, past_key_values=longer).logits[:, -1].float()
        torch.softmax(logits, dim=-1)
