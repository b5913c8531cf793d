"""The trainer that a run will have, TRL's own, with a model of shapes: what `cogumi.memory` runs a step of."""

import copy
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset, are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from cogumi.config.schema import RunConfig
from cogumi.methods.building import trl_arguments
from cogumi.models.adapters import keep_float32, lora_config
from cogumi.models.loading import meta_model, quantization_settings, train_on_what_was_loaded

# Of `train:`, what the machine that plans may refuse and the step is told apart.
OF_THE_MACHINE = ("bf16", "fp16", "tf32", "use_vllm", "report_to", "push_to_hub", "resume_from_checkpoint")
# What makes the data; the rows of a planned step are made of their number and length.
OF_THE_DATA = (
    "packing",
    "padding_free",
    "max_length",
    "chat_template_path",
    "eos_token",
    "eval_strategy",
    "eval_steps",
)


def planned_trainer(
    run: RunConfig, config: Any, dtype: torch.dtype, attention: str | None, layers: int | None = None
) -> Any:
    """TRL's trainer for the run's method, its model on the meta device. Nothing is written or downloaded.

    config: the base's. attention: as in `model.attn_implementation`. layers: how many of the model's are kept, the first.
    Raises what TRL, PEFT and transformers raise for settings that they refuse.
    """
    config = shortened(config, layers)
    # With sdpa where its class has it, which like flash attention never holds the scores.
    model = meta_model(config).to(dtype)
    if attention == "eager":
        model.set_attn_implementation("eager")
    if run.model.quantization_config is not None:
        in_words = str(dtype).removeprefix("torch.")
        model = quantized(model, quantization_settings(run.model.quantization_config, in_words))
    method = run.cogumi.method
    args = copy.copy(trl_arguments(without_the_machine(run)))
    with tempfile.TemporaryDirectory(prefix="cogumi-preflight-") as scratch, quietly():
        args.output_dir, args.eval_strategy = scratch, type(args.eval_strategy)("no")
        precomputed = method == "dpo" and args.precompute_ref_log_probs
        if precomputed:  # a model of shapes has none; what is different is set on the trainer below
            args.precompute_ref_log_probs = False
        given = {"model": model, "args": args, "train_dataset": ROWS[method](), "processing_class": no_tokenizer()}
        if run.cogumi.tuning == "lora":
            given["peft_config"] = lora_config(run.lora)
        elif method == "dpo":
            given["ref_model"] = copy.deepcopy(model)
        if method == "gspo":
            given["reward_funcs"] = no_reward
        trainer = trainer_class(method)(**given)
    if precomputed:
        trainer.precompute_ref_logps, trainer.ref_model = True, None
    keep_float32(trainer.model)
    return trainer


@contextmanager
def quietly() -> Iterator[None]:
    """Without the bars and warnings of two rows being prepared."""
    bars = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if not bars:
            enable_progress_bars()


def trainer_class(method: str) -> Any:
    import trl

    class Planned({"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer, "gspo": trl.GRPOTrainer}[method]):  # type: ignore[misc]
        """Leaves its model on the meta device."""

        def _move_model_to_device(self, model: Any, device: Any) -> None:
            pass

    return Planned


def without_the_machine(run: RunConfig) -> RunConfig:
    run = run.model_copy(deep=True)
    for key in (*OF_THE_MACHINE, *OF_THE_DATA):
        run.train.pop(key, None)
    run.train |= {"report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True}
    return run


def shortened(config: Any, layers: int | None) -> Any:
    """A copy of a config with so many layers, or all."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    return config


def quantized(model: Any, settings: Any) -> Any:
    """The model with bitsandbytes' layers where transformers would put them."""
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(settings)
    with torch.device("meta"):
        quantizer._process_model_before_weight_loading(model, device_map=None)
    model.hf_quantizer, model.is_quantized = quantizer, True
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = settings.load_in_4bit, settings.load_in_8bit
    model.quantization_method = settings.quant_method
    train_on_what_was_loaded(model)
    return model


def no_tokenizer() -> Any:
    """A tokenizer of three words, for a trainer that is never given a text."""
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<pad>": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", eos_token="</s>", pad_token="<pad>")


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def tokens() -> Dataset:
    return Dataset.from_dict({"input_ids": [[0] * 4] * 2, "completion_mask": [[1] * 4] * 2})


def pairs() -> Dataset:
    return Dataset.from_dict({"prompt": ["a"] * 2, "chosen": ["a"] * 2, "rejected": ["a"] * 2})


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": ["a"] * 64})


ROWS = {"sft": tokens, "dpo": pairs, "gspo": prompts}
