"""From a prepared run to its trainer: TRL's arguments, the model, its adapter."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from huggingface_hub.errors import HTTPError
from peft import get_peft_model
from transformers import PreTrainedTokenizerBase
from transformers.utils import is_kernels_available

from cogumi.config.binding import RENAMED_TRAIN_KEYS, config_class
from cogumi.config.presets import PRESETS
from cogumi.config.schema import TRL_CONFIGS, RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line, pip_command
from cogumi.core.redact import SECRETS, RedactedStr
from cogumi.methods import dpo, gspo, sft
from cogumi.methods.auto_settings import dtype_of_weights, longest_sequence, settle_clip
from cogumi.methods.examples import Examples
from cogumi.methods.loraplus import use_loraplus
from cogumi.methods.step_split import is_planned
from cogumi.methods.warm_start import load_adapter, load_exact_values
from cogumi.models.adapters import drop_casts, find_towers, keep_float32, lora_config
from cogumi.models.base import RunBase
from cogumi.models.loading import BUILD_REFUSALS, load_model
from cogumi.models.quantization import count_weights
from cogumi.models.unsloth_models import add_fast_adapter, compare_arguments, load_fast_model, wrap_adapter
from cogumi.patches import unsloth_rl
from cogumi.patches.trl_internals import commit_of, config_defaults
from cogumi.stack.ranks import Ranks
from cogumi.telemetry import trackers
from cogumi.telemetry.throughput import Meter

log = logging.getLogger("cogumi")
SPARE = 1.3  # of a model's bytes, which it takes on a GPU to be asked for logits and completions
METHODS: dict[str, Any] = {"sft": sft, "dpo": dpo, "gspo": gspo}


def trl_arguments(run: RunConfig) -> Any:
    """TRL's config object for the run. Raises UsageError with TRL's own words where it refuses a combination."""
    use_kernels(run)
    # TRL turns bf16 autocast on wherever fp16 is off; without a GPU that is slow and blurs a GSPO ratio of 1 +- 3e-4.
    on_gpu = torch.cuda.is_available()
    defaults = {
        "output_dir": str(run.run_dir / "checkpoints"),
        "report_to": trackers.TENSORBOARD if trackers.is_installed(trackers.TENSORBOARD) else "none",
        "logging_first_step": True,  # so that the shortest run has a loss to judge
        "bf16": on_gpu and torch.cuda.is_bf16_supported(),
        "dataloader_pin_memory": on_gpu,
    }
    batch = run.train.get("per_device_train_batch_size")
    if batch is not None and run.cogumi.method != "gspo":
        defaults["per_device_eval_batch_size"] = batch  # the held-out loss is to fit where a step does
    options = defaults | METHODS[run.cogumi.method].arguments(run)
    options.pop("model_init_kwargs", None)  # TRL would warn that it ignores them: the model is loaded already
    config = config_class(TRL_CONFIGS[run.cogumi.method])
    if unsloth_rl.is_in_place():  # its classes' defaults differ: seed 3407, two micro-batches a step, a warm-up
        theirs = config_defaults(config)
        if run.cogumi.method == "sft":
            del theirs["loss_type"]  # unsloth's trainer computes "nll" alone, whose value is that of TRL's default
        elif run.cogumi.method == "gspo":  # whose presets fill in their own
            theirs = {key: value for key, value in theirs.items() if key not in PRESETS.get(options["loss_type"], ())}
        options = theirs | options
    for new, old in RENAMED_TRAIN_KEYS.items():
        if new in config.__dataclass_fields__:
            options[new] = options.pop(old, config.__dataclass_fields__[old].default)
    options |= {key: RedactedStr(value) for key, value in options.items() if value and key.endswith(SECRETS)}
    try:
        return config(**options)
    except ValueError as error:
        raise UsageError(one_line(error), key="train") from None


def use_kernels(run: RunConfig, model: Any = None) -> None:
    """Check `train.model_init_kwargs`, and have `model` run the hub's kernels as it says. Raises UsageError where it cannot."""
    options, key = run.train.get("model_init_kwargs") or {}, "train.model_init_kwargs"
    obstacles = {
        "only use_kernels is passed on: the model is loaded as `model:` says": set(options) - {"use_kernels"},
        "unsloth has kernels of its own": unsloth_rl.is_in_place(),
        "the hub has kernels for GPUs": not torch.cuda.is_available(),
        f"transformers finds no version of kernels that it takes ({pip_command('install kernels')})": not is_kernels_available(),
    }
    if options and (reason := next((text for text, applies in obstacles.items() if applies), "")):
        raise UsageError(reason, key=key, fix="drop it")
    if not options or model is None:
        return
    try:
        model.train().use_kernels = options["use_kernels"]
    except (*BUILD_REFUSALS, HTTPError) as error:
        raise UsageError(one_line(error), key=key, fix="let the hub be reached, or drop it") from error


def build_trainer(
    run: RunConfig,
    base: RunBase,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    meter: Meter,
    ranks: Ranks | None = None,
) -> Any:
    """Build the trainer of a run with settled choices (`cogumi.methods.auto_settings`); plan a batch that is left open.

    meter: is told of the stage of dpo's reference. ranks: the processes of the training.
    """
    ranks = ranks or Ranks()
    section, is_full, dtype = run.model, run.cogumi.tuning == "full", dtype_of_weights(run)
    if unsloth_rl.is_in_place():
        model: Any = load_fast_model(base, section, dtype, longest_sequence(run), checkpoints_layers(run), is_full)
    else:
        model = load_model(base, dtype, section.quantization_config, section.attn_implementation)
    log.info("%s loaded on %s: %s", base.name, model.device, count_weights(model))
    use_kernels(run, model)
    if section.quantization_config is not None:
        log.warning("the adapter learns to correct what quantization took as well: it fits these weights, not those of %s. The "
                    "merge is into the full-precision base, and the verdict gives their distance", section.name)  # fmt: skip
    if run.cogumi.method == "gspo" and is_planned(run):
        unplanned, prompts = run, examples.train.dataset
        run = gspo.with_batch(run, ranks.decide(lambda: gspo.plan(unplanned, model, tokenizer, prompts)))
    towers = find_towers(model)
    if towers and (is_full or run.lora.get("target_modules", "all-linear") == "all-linear"):
        setting = "cogumi.tuning: full" if is_full else "lora.target_modules: all-linear"
        log.info("%s leaves out %s, which no text reaches", setting, ", ".join(towers))
    for name in towers if is_full else ():
        model.get_submodule(name).requires_grad_(False)
    model, lora = (model, None) if is_full else with_adapter(run, model)
    args = trl_arguments(run)
    if unsloth_rl.is_in_place():
        for difference in compare_arguments(run.train, args):
            log.warning("unsloth: %s", difference)
    more: dict[str, dict[str, Any]] = {"dpo": {"meter": meter}, "sft": {"ranks": ranks}, "gspo": {}}
    trainer = METHODS[run.cogumi.method].build_trainer(
        run,
        model=model,
        args=args,
        train_dataset=examples.train.dataset,
        eval_dataset=examples.held_out.dataset if examples.held_out else None,
        processing_class=tokenizer,
        peft_config=lora,
        **more[run.cogumi.method],
    )
    if run.cogumi.method == "gspo" and not unsloth_rl.is_in_place():
        settle_clip(run, trainer)
    keep_float32(trainer.model)
    if args.bf16 and not unsloth_rl.is_in_place() and (count := drop_casts(trainer.model)):
        log.info("chosen: no input casts by PEFT (autocast casts those of %d LoRA layers to the same values)", count)
    if run.model.adapter_dir is not None:
        compares = run.cogumi.method != "sft" and trainer.beta != 0
        load_exact_values(trainer, run.model.adapter_dir, compares=compares)
    if run.cogumi.loraplus_ratio is not None:
        use_loraplus(trainer, run.cogumi.loraplus_ratio, run.run_dir)
    return trainer


def rebuild_model(run: RunConfig, base: RunBase, trained: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """Rebuild the model of a sharded training, on the GPU if it fits. trained: weights by name, one at a time.

    Raises RuntimeError where a trained weight finds no place.
    """
    section = run.model
    model: Any = load_model(base, dtype_of_weights(run), section.quantization_config, section.attn_implementation)
    if run.cogumi.tuning == "lora":
        model, lora = with_adapter(run, model)
        model = model if lora is None else get_peft_model(model, lora)
        keep_float32(model)
    places = dict(model.named_parameters())
    homeless = []
    for name, value in trained:  # to the last one, which all processes gather together
        if name in places:
            places[name].data = value.to(places[name].device).contiguous()
        else:
            homeless.append(name)
    if homeless:
        raise RuntimeError(f"{len(homeless)} trained weights find no place in the model, such as {homeless[0]}")
    size = sum(parameter.nbytes for parameter in model.parameters())
    fits_on_gpu = torch.cuda.is_available() and size * SPARE < torch.cuda.mem_get_info()[0]
    return model.cuda() if fits_on_gpu else model


def with_adapter(run: RunConfig, model: Any) -> tuple[Any, Any]:
    """(model, peft_config): the model with its adapter on where the trainer cannot put it on, or a config for it to do so."""
    if unsloth_rl.is_in_place():  # its trainers ignore `peft_config`, and would train every weight
        if run.model.adapter_dir is not None:
            adapted = load_adapter(model, run.model.adapter_dir, run.model.revision)
            return wrap_adapter(adapted, checkpoints_layers(run)), None
        return add_fast_adapter(run, model, checkpoints_layers(run)), None
    if run.model.adapter_dir is not None:
        return load_adapter(model, run.model.adapter_dir, run.model.revision), None
    return model, lora_config(run.lora, commit_of(model.config) or run.model.revision, model)


def checkpoints_layers(run: RunConfig) -> bool:
    """Return whether activations are computed twice: TRL's default, unless the run says otherwise."""
    return run.train.get("gradient_checkpointing") is not False
