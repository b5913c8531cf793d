"""A training step of a run, taken on fake tensors from the loading of the model to the optimizer's update.

The trainer is TRL's own, with a model on the meta device. Its loss, gradient checkpointing, adapter and optimizer are
those of a training. A rollout takes what two forward passes of the model take with a cache: one over the prompts, and
one for the last token.
"""

import copy
import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models
from transformers import DynamicCache, PreTrainedTokenizerFast

from cogumi.config.schema import RunConfig
from cogumi.forecast.fake_tensors import (
    KernelCounter,
    StagePeak,
    StorageCounter,
    emulate_cuda,
    emulate_padding,
    fake_model,
    preserve_bitsandbytes_codes,
)
from cogumi.methods.building import trl_arguments
from cogumi.models.adapters import drop_casts, keep_float32, lora_config
from cogumi.models.loading import meta_model
from cogumi.models.quantization import WeightCount, count_weights, place_quantized_weights
from cogumi.patches import head_logps, replaced
from cogumi.patches.torch_internals import FakeTensorMode
from cogumi.patches.trl_internals import MOVE_MODEL

TILE = 32768  # columns of logits that TRL's head makes at once (trl/trainer/utils.py, _CHUNKED_LOGPROB_CHUNK_SIZE)
GRADIENTS, OPTIMIZER, CACHE = "gradients", "optimizer", "key-value cache"
LOAD, ROLLOUT, FORWARD, BACKWARD, UPDATE = "load", "rollout", "forward", "backward", "update"
# Of `train:`, what transformers refuses where there is no GPU, as in the process that forecasts.
OF_THE_MACHINE = ("bf16", "fp16", "tf32")
# What else the machine that plans may lack, and the step is told apart.
OF_THE_SERVICES = ("use_vllm", "report_to", "push_to_hub", "resume_from_checkpoint", "model_init_kwargs")
# What makes the data; the rows of a planned step are made of their number and length.
OF_THE_DATA = (
    "packing", "padding_free", "max_length", "chat_template_path", "eos_token", "eval_strategy", "eval_steps",
)  # fmt: skip


def planned_trainer(
    run: RunConfig, config: Any, dtype: torch.dtype, attention: str | None, layers: int | None = None
) -> Any:
    """TRL's trainer for the run's method, its model on the meta device. Nothing is written or downloaded.

    config: the base's. attention: as in `model.attn_implementation`. layers: how many of the model's are kept, the first.
    Raises what TRL, PEFT and transformers raise for settings that they refuse.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    # With sdpa where its class has it, which like flash attention never holds the scores.
    model = meta_model(config).to(dtype)
    if attention == "eager":
        model.set_attn_implementation("eager")
    model = place_quantized_weights(model, config, run.model.quantization_config)
    run = without_machine(run)
    for key in (*OF_THE_SERVICES, *OF_THE_DATA):
        run.train.pop(key, None)
    run.cogumi.sampler_weights, run.cogumi.sampler_correction = "merged", None  # of the sampler, as use_vllm is
    run.train |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    method, args = run.cogumi.method, copy.copy(trl_arguments(run))
    disable_progress_bars()  # of two rows that are prepared; this process only forecasts
    with tempfile.TemporaryDirectory(prefix="cogumi-preflight-") as scratch, warnings.catch_warnings(action="ignore"):
        args.output_dir, args.eval_strategy = scratch, type(args.eval_strategy)("no")
        precomputed = method == "dpo" and args.precompute_ref_log_probs
        if precomputed:  # a model of shapes has none; what is different is set on the trainer below
            args.precompute_ref_log_probs = False
        # A tokenizer of three words: the trainer is never given a text.
        words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<pad>": 2}, unk_token="a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", eos_token="</s>", pad_token="<pad>")
        given = {"model": model, "args": args, "train_dataset": sample_rows(method), "processing_class": tokenizer}
        if run.cogumi.tuning == "lora":
            given["peft_config"] = lora_config(run.lora, model=model)
        elif method == "dpo":
            given["ref_model"] = copy.deepcopy(model)
        if method == "gspo":
            given["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
        import trl  # looked up here: unsloth puts its own trainers on the module

        trainers = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer, "gspo": trl.GRPOTrainer}
        trainer = keep_on_meta(trainers[method])(**given)
    if precomputed:
        trainer.precompute_ref_logps, trainer.ref_model = True, None
    keep_float32(trainer.model)
    drop_casts(trainer.model)
    return trainer


def without_machine(run: RunConfig) -> RunConfig:
    """The run as a machine without a GPU takes it. What it computes in is told the forecast apart."""
    run = run.model_copy(deep=True)
    run.train = {key: value for key, value in run.train.items() if key not in OF_THE_MACHINE} | {"bf16": False}
    return run


def keep_on_meta(trainer: Any) -> Any:
    """A class of trainer that leaves its model on the meta device: it forecasts, and cannot train."""
    return type(f"Planned{trainer.__name__}", (trainer,), {MOVE_MODEL: lambda *_: None})


def forecast_weights(config: Any, dtype: torch.dtype, quantization: dict[str, Any] | None) -> WeightCount:
    """What loading a base will hold, before anything of it is here. config: the base's; dtype: of what stays as it is."""
    model = place_quantized_weights(meta_model(copy.deepcopy(config)).to(dtype), config, quantization)
    live = StorageCounter()
    with preserve_bitsandbytes_codes(), FakeTensorMode(allow_non_fake_inputs=True), live:
        fake_model(model, live)
        return count_weights(model)


def sample_rows(method: str) -> Dataset:
    """Rows for a trainer to prepare; the step is given others."""
    if method == "sft":
        return Dataset.from_dict({"input_ids": [[0] * 4] * 2, "completion_mask": [[1] * 4] * 2})
    if method == "dpo":
        return Dataset.from_dict({"prompt": ["a"] * 2, "chosen": ["a"] * 2, "rejected": ["a"] * 2})
    return Dataset.from_dict({"prompt": ["a"] * 64})


@dataclass(frozen=True)
class StepShape:
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


def run_step(trainer: Any, work: StepShape, autocast: torch.dtype | None, on_card: bool) -> tuple[StagePeak, ...]:
    """The peaks of the stages of a step. The trainer's model is made of fake tensors from then on; it may be asked again.

    autocast: what matrices are multiplied in, where the trainer would (bf16, fp16). on_card: as a CUDA card computes it.
    """
    model, config = trainer.model, trainer.model.config.get_text_config()
    live = StorageCounter((config.vocab_size, TILE), selected=work.learned)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # of paged optimizers, which this CPU has not
        # Cogumi's head makes one tile of logits after another in the same memory: the first is as good as all.
        one_tile = {"_cut": lambda total, width: [slice(0, min(total, width))]}
        stack.enter_context(emulate_cuda() if on_card else replaced(head_logps, one_tile))
        stack.enter_context(emulate_padding(work.padded))
        stack.enter_context(preserve_bitsandbytes_codes())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(live)
        with live.in_stage(LOAD):
            fake_model(model, live)
            if getattr(trainer, "ref_model", None) is not None:
                fake_model(trainer.ref_model, live)
        if work.rollout:
            with live.in_stage(ROLLOUT):
                sample_rollout(model, work, live)
        optimizer, trained = create_optimizer(trainer, live, accumulating=work.micro_batches > 1)
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps  # as Trainer.train does
        model.train()
        if trainer.args.gradient_checkpointing:
            model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs or {"use_reentrant": False})
        multiplied_in = torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None)
        with live.in_stage(FORWARD), multiplied_in:
            loss = trainer.compute_loss(model, inputs_of(work))
        with live.in_stage(BACKWARD):
            loss.backward()
        del loss
        with live.in_stage(UPDATE), live.counting_as(OPTIMIZER):
            torch.nn.utils.clip_grad_norm_(trained, trainer.args.max_grad_norm or 1.0)
            optimizer.step()
    return tuple(moment for name, moment in live.moments.items() if name)


def create_optimizer(trainer: Any, live: StorageCounter, accumulating: bool) -> tuple[Any, list[Any]]:
    """The trainer's optimizer with the states that it has after its first step, and the parameters that it trains."""
    trainer.optimizer = None  # that of an earlier step, which had other stand-ins
    optimizer = trainer.create_optimizer()
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with live.counting_as(GRADIENTS):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
    with live.counting_as(OPTIMIZER):
        optimizer.step()
    if not accumulating:
        optimizer.zero_grad()
    live.moments.pop("", None)
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda parameter: live.count(parameter.grad, GRADIENTS))
    return optimizer, trained


def ones_of_shape(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


def inputs_of(work: StepShape) -> dict[str, Any]:
    """A micro-batch as TRL's collators make it."""
    if work.method == "sft":
        rows, tokens = (1, work.rows * work.length) if work.one_sequence else (work.rows, work.length)
        last = "position_ids" if work.packed else "attention_mask"
        return {name: ones_of_shape(rows, tokens) for name in ("input_ids", "labels", last)}
    if work.method == "dpo":  # chosen and rejected below each other; the reference's where it is precomputed
        names = ("input_ids", "attention_mask", "completion_mask")
        reference = {f"ref_{side}_logps": torch.zeros(work.rows) for side in ("chosen", "rejected")}
        return {name: ones_of_shape(2 * work.rows, work.length) for name in names} | reference
    inputs: dict[str, Any] = {"advantages": torch.zeros(work.rows)}
    for part, length in (("prompt", work.prompt), ("completion", work.completion)):
        inputs |= {f"{part}_{kind}": ones_of_shape(work.rows, length) for kind in ("ids", "mask")}
    for name in ("old", "ref"):
        inputs[f"{name}_per_token_logps"] = torch.zeros(work.rows, work.completion)
    return inputs | {"num_items_in_batch": torch.tensor(float(work.rows * work.completion))}


def count_decoding(trainer: Any, work: StepShape) -> tuple[StagePeak, ...]:
    """Kernels and bytes of the first token of a rollout, and of its last. The trainer's model is fake from then on."""
    live, lengths = StorageCounter(), (1, work.completion)
    with emulate_padding(work.padded), preserve_bitsandbytes_codes(), FakeTensorMode(allow_non_fake_inputs=True), live:
        fake_model(trainer.model, live)
        return tuple(sample_rollout(trainer.model, replace(work, completion=length), live) for length in lengths)


def sample_rollout(model: Any, work: StepShape, live: StorageCounter) -> StagePeak:
    """Transformers' generate at its peak: the prompts; and the last token, which is counted, with all before cached."""
    model.eval()
    with torch.no_grad():
        given = {"attention_mask": ones_of_shape(work.rollout, work.prompt), "use_cache": True, "logits_to_keep": 1}
        cache = model(ones_of_shape(work.rollout, work.prompt), **given).past_key_values
        with live.counting_as(CACHE):
            longer = DynamicCache(config=model.config)
            for number, layer in enumerate(cache.layers):
                shape = [*layer.keys.shape]
                shape[2] += work.completion - 1 if shape[2] == work.prompt else 0  # a sliding window stays as it is
                longer.update(*(layer.keys.new_empty(shape) for _ in range(2)), number)
        del cache
        given["attention_mask"] = ones_of_shape(work.rollout, work.length)
        with KernelCounter(unpads=not work.padded) as counter:
            logits = model(ones_of_shape(work.rollout, 1), **given, past_key_values=longer).logits[:, -1].float()
            torch.softmax(logits, dim=-1)
    return StagePeak(ROLLOUT, 0, {"kernels": counter.kernels, "bytes": counter.bytes})
