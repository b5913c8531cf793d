"""The base of a run and its tokenizer, and every refusal that needs neither data nor weights.

Preview, preflight and training use these functions in the same order: `check_settings`, `prepare_base`,
`check_base`, `find_merge_base`, `check_merge`, `load_run_tokenizer`.
"""

import json
import logging
from importlib.metadata import version
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.core.run_directory import DECISIONS, describe_failure, read_section
from cogumi.hub.downloads import find_commit
from cogumi.merge.adapter_files import WHERE_TRAINED, refuse_unsupported
from cogumi.merge.preflight import Original, check_loadable, expected_base, find_original, plan_adapter
from cogumi.methods import auto_settings
from cogumi.methods.adapter_source import TRAIN_AGAIN, find_adapter
from cogumi.methods.sampler import refuse_quantized
from cogumi.methods.warm_start import check_recorded_base, lora_of
from cogumi.models.adapters import check_targets, lora_config
from cogumi.models.base import RunBase, meta_model
from cogumi.models.loading import BUILD_REFUSALS, load_tokenizer, read_base, use_chat_template, use_end_token
from cogumi.models.quantization import refuse_quantized_already, refuse_untrainable
from cogumi.telemetry.status import run_above

log = logging.getLogger("cogumi")


def check_settings(run: RunConfig, on_this_machine: bool = True) -> None:
    """Refuse settings that exclude each other, and complete `lora:` from the adapter that the run starts from.

    on_this_machine: whether it trains here, with this environment.
    """
    options = run.cogumi
    if options.max_cost is not None and options.price_per_hour is None:
        reason = f"cogumi.max_cost {options.max_cost:g}: no hourly price to count by"
        raise UsageError(reason, fix="set cogumi.price_per_hour as well")
    if options.tuning == "full":
        auto_settings.refuse_adapter_settings(run)
    for key, before in runs_before(run).items() if not options.from_failed else ():
        if failure := describe_failure(before, of_merge=key == "model.name"):
            raise UsageError(failure, place=before, key=key, fix=TRAIN_AGAIN)
    if on_this_machine:
        auto_settings.refuse_segments(run)
    find_adapter(run)
    if run.model.adapter_dir is not None:
        run.lora = lora_of(run.model.adapter_dir, run.lora)


def runs_before(run: RunConfig) -> dict[str, Path]:
    """Return the runs that this one starts from a part of, by the key that names it."""
    places = {"model.name": run.model.name, "model.adapter": run.model.adapter}
    runs = {key: run_above(Path(place)) for key, place in places.items() if place is not None}
    return {key: before for key, before in runs.items() if before is not None}


def describe_unjudged(run: RunConfig) -> str:
    """Say which run this one starts from has no verdict; "" if each has."""
    paths = [str(path) for path in runs_before(run).values() if not (path / "verdict.json").exists()]
    return f"started from a run that has no verdict, unfinished or killed: {', '.join(paths)}" if paths else ""


def prepare_base(run: RunConfig) -> tuple[RunConfig, RunBase]:
    """Find the base and read its configuration; return them with the run pinned to a commit of the hub.

    The commit is the one that the run began with, or the hub's current one, whatever happens to the branch afterwards.
    """
    find_adapter(run)
    known, name = read_section(run.run_dir / DECISIONS, "base"), run.model.name
    commit = known["commit"] if known.get("name") == name else find_commit(name, run.model.revision)
    if commit is not None:
        log.info("model: %s is %s%s", name, commit, ", as when the run began" if known else "")
        run = run.model_copy(deep=True)
        run.model.revision = commit
    return run, read_base(name, run.model.revision)


def find_merge_base(run: RunConfig, base: RunBase) -> Original | None:
    """Return the full-precision model that the merge of a quantized base needs; None where the base itself will do.

    Raises UsageError where there is none, or where a base that is quantized on disk cannot be trained here.
    """
    options = run.cogumi
    refuse_untrainable(base.name, base.config, options.tuning)
    if not options.merge or options.tuning == "full":
        return None
    return find_original(base.name, base.config, options.merge_base, options.base_mode)


def check_base(run: RunConfig, base: RunBase) -> str:
    """Refuse a base that this run could not train or load whole, by its configuration and its files' headers.

    Returns the share of the parameters under the adapter, in words; "" if it is not known.
    """
    coverage = ""
    if run.cogumi.tuning == "lora":
        coverage = check_targets(run.lora, base, is_own=run.model.adapter is None)
    refuse_without_decoder(base)
    if run.model.adapter_dir is not None:
        check_recorded_base(run.model.adapter_dir, base.config, base.revision)
    refuse_quantized(run, base.config)
    if run.model.quantization_config is not None:
        refuse_untrainable(base.name, base.config, run.cogumi.tuning)  # which dropping the key would lead to
        refuse_quantized_already(base.name, base.config)
    check_loadable(base)
    return coverage


def refuse_without_decoder(base: RunBase) -> None:
    """Raise UsageError for a model in which TRL's losses find no decoder apart from its LM head, as in Llama 4's.

    Their head takes hidden states, and fails at the first step otherwise.
    """
    try:
        model = meta_model(base.config)
    except BUILD_REFUSALS:  # told where the model is built
        return
    if model.base_model.get_output_embeddings() is not None:
        problem = f"finds no decoder without its LM head in {type(model).__name__}, so its losses fail"
        fix = "take a model of another family"
        raise UsageError(f"TRL {version('trl')} {problem}", key="model.name", fix=fix)


def check_merge(run: RunConfig, base: RunBase, original: Original | None) -> None:
    """Refuse an adapter that could not be merged after it is trained: its merge is planned on shapes.

    original: `find_merge_base`.
    """
    if run.cogumi.tuning == "full" or not run.cogumi.merge:
        return
    lora = lora_config(run.lora, model=meta_model(base.config))
    fix = "set cogumi.merge: false, which trains it without merging"
    try:
        if original is not None:
            config = AutoConfig.from_pretrained(original.name, revision=original.revision)
            expected = expected_base(original.name, original.revision, config, original.download)
        else:
            expected = expected_base(base.name, base.revision, base.config, base.download)
    except UsageError as error:
        raise UsageError(error.message, key="model.name", fix=f"{error.fix}; or {fix}") from None
    try:
        refuse_unsupported(Path("lora"), json.loads(json.dumps(lora.to_dict(), default=list)))
        plan_adapter(lora, base, expected)
    except UsageError as error:
        if error.fix == WHERE_TRAINED:  # nor would it be of use without a merge
            fix = "drop lora.init_lora_weights"
        raise UsageError(error.message, key=error.key or "lora", fix=fix) from None
    except BUILD_REFUSALS as error:
        raise UsageError(one_line(error), key="lora", fix=fix) from error


def load_run_tokenizer(run: RunConfig, base: RunBase) -> PreTrainedTokenizerBase:
    """Load the base's tokenizer, or the one saved with the adapter that the run starts from.

    `train:` may name another chat template and end token for it.
    """
    adapter = run.model.adapter_dir
    of_adapter = adapter is not None and (adapter / "tokenizer_config.json").exists()
    tokenizer = load_tokenizer(str(adapter) if of_adapter else base)
    if (template := run.train.get("chat_template_path")) is not None:
        use_chat_template(tokenizer, template)
    if (token := run.train.get("eos_token")) is not None:
        use_end_token(tokenizer, token)
    return tokenizer
