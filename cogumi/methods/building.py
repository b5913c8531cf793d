"""From a configuration to a trainer that is ready: what is refused at once, TRL's arguments, the model, its adapter."""

import json
import logging
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import get_peft_model
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.utils import is_kernels_available

from cogumi.config.binding import config_class
from cogumi.config.presets import PRESETS
from cogumi.config.schema import TRL_CONFIGS, CogumiSection, RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.core.redact import SECRETS, RedactedStr
from cogumi.core.run_directory import DECISIONS, read_json, read_section
from cogumi.hub.downloads import Download, find_commit
from cogumi.merge.adapter_files import WHERE_TRAINED, refuse_unsupported
from cogumi.merge.preflight import Original, expected_base, plan_adapter
from cogumi.methods import dpo, gspo, sft
from cogumi.methods.auto_settings import dtype_of_weights, longest_sequence, settle_clip
from cogumi.methods.examples import Examples
from cogumi.methods.loraplus import use_loraplus
from cogumi.methods.step_split import is_planned
from cogumi.models.adapters import drop_casts, find_towers, keep_float32, load_adapter, load_exact_values, lora_config
from cogumi.models.loading import load_model, load_tokenizer, meta_model, use_chat_template, use_end_token
from cogumi.models.quantization import count_weights
from cogumi.models.unsloth_models import add_fast_adapter, compare_arguments, load_fast_model
from cogumi.patches import unsloth_rl
from cogumi.patches.trl_internals import commit_of, config_defaults
from cogumi.stack.ranks import Ranks
from cogumi.telemetry import trackers
from cogumi.telemetry.status import BUDGET_SPENT
from cogumi.telemetry.throughput import HEARTBEAT, Meter

log = logging.getLogger("cogumi")
SPARE = 1.3  # of a model's bytes, which it takes on a GPU to be asked for logits and completions
METHODS: dict[str, Any] = {"sft": sft, "dpo": dpo, "gspo": gspo}
# What transformers, peft and TRL raise for a setting they refuse, a package that is not installed, or broken weights.
BUILD_REFUSALS = (ValueError, ImportError, OSError, RuntimeError, ArithmeticError, SafetensorError)


def trl_arguments(run: RunConfig) -> Any:
    """TRL's config object for the run. Raises UsageError with TRL's own words where it refuses a combination."""
    use_kernels(run)
    # TRL turns bf16 autocast on wherever fp16 is off; without a GPU that is slow and blurs a GSPO ratio of 1 +- 3e-4.
    on_gpu = torch.cuda.is_available()
    defaults = {
        "output_dir": str(run.run_dir / "checkpoints"),
        "report_to": trackers.default_reporter(),
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
    if (
        unsloth_rl.is_in_place()
    ):  # its classes have other defaults, such as seed 3407, two micro-batches a step and a warm-up
        theirs = config_defaults(config)
        if run.cogumi.method == "sft":
            del theirs["loss_type"]  # unsloth's trainer computes "nll" alone, whose value is that of TRL's default
        elif run.cogumi.method == "gspo":  # whose presets fill in their own
            theirs = {key: value for key, value in theirs.items() if key not in PRESETS.get(options["loss_type"], ())}
        options = theirs | options
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
        "transformers finds no version of the package kernels that it takes (pip install kernels)": not is_kernels_available(),
    }
    if options and (reason := next((text for text, applies in obstacles.items() if applies), "")):
        raise UsageError(reason, key=key, fix="drop it")
    if not options or model is None:
        return
    try:
        model.train().use_kernels = options["use_kernels"]
    except (*BUILD_REFUSALS, httpx.HTTPError) as error:
        raise UsageError(one_line(error), key=key, fix="let the hub be reached, or drop it") from error


def pin_revision(run: RunConfig) -> RunConfig:
    """Pin the model's revision to a commit: the one the run began with, or the hub's current one."""
    known, name = read_section(run.run_dir / DECISIONS, "base"), run.model.name
    commit = known["commit"] if known.get("name") == name else find_commit(name, run.model.revision)
    if commit is not None:
        log.info("model: %s is %s%s", name, commit, ", as when the run began" if known else "")
        run = run.model_copy(deep=True)
        run.model.revision = commit
    return run


def load_run_tokenizer(run: RunConfig, base: str) -> PreTrainedTokenizerBase:
    """Load the base's tokenizer, or the one saved with the adapter that the run starts from.

    `train:` may name another chat template and end token for it.
    """
    adapter = run.model.adapter
    of_adapter = adapter is not None and (adapter / "tokenizer_config.json").exists()
    tokenizer = load_tokenizer(str(adapter)) if of_adapter else load_tokenizer(base, run.model.revision)
    if (template := run.train.get("chat_template_path")) is not None:
        use_chat_template(tokenizer, template)
    if (token := run.train.get("eos_token")) is not None:
        use_end_token(tokenizer, token)
    return tokenizer


def refuse_without_decoder(base_config: Any) -> None:
    """Raise UsageError for a model in which TRL's losses find no decoder apart from its LM head, as in Llama 4's.

    base_config: its config. Their head takes hidden states, and fails at the first step otherwise.
    """
    try:
        model = meta_model(base_config)
    except BUILD_REFUSALS:  # told where the model is built
        return
    if model.base_model.get_output_embeddings() is not None:
        message = (
            f"TRL {version('trl')} finds no decoder without its LM head in {type(model).__name__}, so its losses fail"
        )
        raise UsageError(message, key="model.name", fix="take a model of another family")


def refuse_unmergeable(
    run: RunConfig, base: str, base_config: Any, download: Download | None = None, original: Original | None = None
) -> None:
    """Raise UsageError for an adapter that `cogumi.merge` could not merge after it is trained, which is planned here.

    base, base_config: a directory or hub id, and its config. download: of that model, where it is on the hub. original: of
    a base that is quantized on disk.
    """
    if run.cogumi.tuning != "lora" or not run.cogumi.merge:
        return
    lora = lora_config(run.lora, model=meta_model(base_config))
    fix = "set cogumi.merge: false, which trains it without merging"
    try:
        if original is not None:
            of_original = AutoConfig.from_pretrained(original.name, revision=original.revision)
            expected = expected_base(original.name, original.revision, of_original, original.download)
        else:
            expected = expected_base(base, run.model.revision, base_config, download)
    except UsageError as error:
        raise UsageError(error.message, key="model.name", fix=f"{error.fix}; or {fix}") from None
    try:
        refuse_unsupported(Path("lora"), json.loads(json.dumps(lora.to_dict(), default=list)))
        plan_adapter(lora, base_config, expected)
    except UsageError as error:
        if error.fix == WHERE_TRAINED:  # nor would it be of use without a merge
            fix = "drop lora.init_lora_weights"
        raise UsageError(error.message, key=error.key or "lora", fix=fix) from None
    except BUILD_REFUSALS as error:
        raise UsageError(one_line(error), key="lora", fix=fix) from error


def build_trainer(
    run: RunConfig,
    base: str,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    meter: Meter,
    ranks: Ranks | None = None,
) -> Any:
    """Build the trainer of a run with settled choices (`cogumi.methods.auto_settings`); plan a batch that is left open.

    meter: is told of the stage of dpo's reference. ranks: the processes of the training.
    """
    ranks = ranks or Ranks()
    section, is_full = run.model, run.cogumi.tuning == "full"
    dtype = dtype_of_weights(run) if is_full else section.dtype
    if unsloth_rl.is_in_place():
        model: Any = load_fast_model(base, section, dtype, longest_sequence(run), checkpoints_layers(run), is_full)
    else:
        model = load_model(base, section.revision, dtype, section.quantization_config, section.attn_implementation)
    log.info("%s loaded on %s: %s", base, model.device, count_weights(model))
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
    if run.model.adapter is not None:
        compares = run.cogumi.method != "sft" and trainer.beta != 0
        load_exact_values(trainer, run.model.adapter, compares=compares)
    if run.cogumi.loraplus_ratio is not None:
        use_loraplus(trainer, run.cogumi.loraplus_ratio, run.run_dir)
    return trainer


def rebuild_model(run: RunConfig, base: str, trained: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """Rebuild the model of a sharded training, on the GPU if it fits. trained: weights by name, one at a time.

    Raises RuntimeError where a trained weight finds no place.
    """
    section, is_full = run.model, run.cogumi.tuning == "full"
    dtype = dtype_of_weights(run) if is_full else section.dtype
    model: Any = load_model(base, section.revision, dtype, section.quantization_config, section.attn_implementation)
    if not is_full:
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
    size, on_gpu = (
        sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        torch.cuda.is_available(),
    )
    return model.cuda() if on_gpu and size * SPARE < torch.cuda.mem_get_info()[0] else model


def with_adapter(run: RunConfig, model: Any) -> tuple[Any, Any]:
    """(model, peft_config): the model with its adapter on where the trainer cannot put it on, or a config for it to do so."""
    if unsloth_rl.is_in_place():  # its trainers ignore `peft_config`, and would train every weight
        return add_fast_adapter(run, model, checkpoints_layers(run)), None
    if run.model.adapter is not None:
        return load_adapter(model, run.model.adapter, run.model.revision), None
    return model, lora_config(run.lora, commit_of(model.config) or run.model.revision, model)


def checkpoints_layers(run: RunConfig) -> bool:
    """Return whether activations are computed twice: TRL's default, unless the run says otherwise."""
    return run.train.get("gradient_checkpointing") is not False


# ------------------------------------------------------------------------------------------- where a run ends by itself


def budget_reached(options: CogumiSection, seconds: float) -> str | None:
    """Return which limit is reached after so many seconds of a run, in words; None if none is."""
    hours = seconds / 3600
    if options.max_hours is not None and hours >= options.max_hours:
        return f"{hours:.{2 if hours >= 1 else 4}f} h of cogumi.max_hours {options.max_hours:g}"
    cost = hours * (options.price_per_hour or 0)
    if options.max_cost is not None and options.price_per_hour is not None and cost >= options.max_cost:
        return f"${cost:.{2 if cost >= 1 else 4}f} of cogumi.max_cost {options.max_cost:g}"
    return None


def refuse_impossible(options: CogumiSection) -> None:
    """Raise UsageError for a budget in money where nothing says what an hour costs."""
    if options.max_cost is not None and options.price_per_hour is None:
        reason = f"cogumi.max_cost {options.max_cost:g}: no hourly price to count by"
        raise UsageError(reason, fix="set cogumi.price_per_hour as well")


def refuse_spent(run_dir: Path, options: CogumiSection) -> None:
    """Raise UsageError for a run that its budget has ended, started again with no more of it: it would end at once."""
    if read_json(run_dir / "status.json").get("state") == BUDGET_SPENT and (run_dir / HEARTBEAT).exists():
        spent = budget_reached(options, read_json(run_dir / HEARTBEAT).get("elapsed_seconds", 0.0))
        if spent is not None:
            raise UsageError(f"the budget of this run is spent ({spent})", place=run_dir, fix="raise it to resume")
