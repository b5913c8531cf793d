"""From a configuration to a trainer that is ready: which commit of the model, what it is loaded in, its adapter, its batch."""

import logging
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import DECISIONS, read_section
from cogumi.health import full_finetune
from cogumi.hub.model_files import find_commit
from cogumi.merge.provenance import quantization_of
from cogumi.methods import gspo
from cogumi.methods.arguments import METHODS, trl_arguments
from cogumi.methods.examples import Examples
from cogumi.models import warm_start
from cogumi.models.adapters import keep_float32, lora_config, use_loraplus
from cogumi.models.chat_format import use_chat_template, use_end_token
from cogumi.models.loading import load_model, load_tokenizer
from cogumi.patches import unsloth_rl
from cogumi.telemetry.heartbeat import Heartbeat

log = logging.getLogger("cogumi")


def pinned(run: RunConfig) -> RunConfig:
    """The run with its model's revision as a commit: the one it began with, or what the hub says now."""
    known = read_section(run.run_dir / DECISIONS, "base")
    name = run.model.name
    commit = known["commit"] if known.get("name") == name else find_commit(name, run.model.revision)
    if commit is None:
        return run
    log.info("model: %s is %s%s", name, commit, ", as when the run began" if known else "")
    run = run.model_copy(deep=True)
    run.model.revision = commit
    return run


def tokenizer_of(run: RunConfig, base: str) -> PreTrainedTokenizerBase:
    """The base's tokenizer, with the chat template and end token that `train:` names for it; going on from an adapter, the
    one that was saved with it, which has those of the run before."""
    adapter = run.model.adapter
    if adapter is not None and (adapter / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(str(adapter))
    else:
        tokenizer = load_tokenizer(base, run.model.revision)
    if (template := run.train.get("chat_template_path")) is not None:
        use_chat_template(tokenizer, template)
    if (token := run.train.get("eos_token")) is not None:
        use_end_token(tokenizer, token)
    if run.data.format != "fim" and tokenizer.chat_template is None and run.data.format == "chat":
        template = "train.chat_template_path (cogumi:tulu, a .jinja file or another model)"
        raise UsageError(
            f"data.format: chat: the tokenizer of {run.model.name} has no chat template; "
            + (
                f"set {template}, or start from a model that has one"
                if run.cogumi.method == "sft"
                else f"cogumi.method: {run.cogumi.method} sets none, so start from a model that has one, such as the merged "
                f"model of an SFT run with {template}"
            )
        )
    return tokenizer


def build_trainer(
    run: RunConfig, base: str, tokenizer: PreTrainedTokenizerBase, examples: Examples, heart: Heartbeat
) -> Any:
    """The trainer of a run whose choices are made (`cogumi.methods.auto_settings`); a batch that is left open is planned here.

    heart: is told how far dpo's reference is.
    """
    wanted, whole = run.model, run.cogumi.tuning == "full"
    dtype = full_finetune.dtype_of_weights(run) if whole else wanted.dtype
    model: Any = load_model(base, wanted.revision, dtype, wanted.quantization_config, wanted.attn_implementation)
    log.info("%s loaded in %s on %s", base, loaded_as(model), model.device)
    if wanted.quantization_config is not None:
        log.warning("the adapter learns to correct what quantization took as well: it fits these weights, not those of %s. "
                    "The merge goes into the full-precision base all the same, and the verdict says how far apart the two are; "
                    "without model.quantization_config there is nothing to correct", wanted.name)  # fmt: skip
    if run.cogumi.method == "gspo" and gspo.is_planned(run):
        run = gspo.plan(run, model, tokenizer, examples.train.dataset)
    model, lora = (model, None) if whole else with_adapter(run, model)
    trainer = METHODS[run.cogumi.method].build_trainer(
        run,
        model=model,
        args=trl_arguments(run),
        train_dataset=examples.train.dataset,
        eval_dataset=examples.held_out.dataset if examples.held_out else None,
        processing_class=tokenizer,
        peft_config=lora,
        **({"heart": heart} if run.cogumi.method == "dpo" else {}),
    )
    keep_float32(trainer.model)
    if run.model.adapter is not None:
        warm_start.settle(trainer, run.model.adapter, compares=run.cogumi.method != "sft" and trainer.beta != 0)
    if run.cogumi.loraplus_lr_ratio is not None:
        use_loraplus(trainer, run.cogumi.loraplus_lr_ratio)
    return trainer


def with_adapter(run: RunConfig, model: Any) -> tuple[Any, Any]:
    """(model, peft_config): the model with its adapter on where the trainer cannot put it on, or a config for it to do so."""
    unsloths = unsloth_rl.status().applied
    if run.model.adapter is not None:
        prepared = unsloth_rl.prepared(model) if unsloths else model
        return warm_start.load_adapter(prepared, run.model.adapter, run.lora, run.model.revision), None
    lora = lora_config(run.lora, getattr(model.config, "_commit_hash", None) or run.model.revision)
    return (unsloth_rl.with_adapter(model, lora), None) if unsloths else (model, lora)


def loaded_as(model: PreTrainedModel) -> str:
    """What a model is loaded in, in words: its dtype, and how its linear layers are quantized."""
    found, dtype = quantization_of(model.config), str(model.dtype).removeprefix("torch.")
    if found is None:
        return dtype
    return f"{found.type or found.method} {found.bits}-bit{' (twice quantized)' if found.double else ''} and {dtype}"
