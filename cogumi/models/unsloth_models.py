"""unsloth's models in the place of transformers': which backend a run takes, loading by FastLanguageModel, its adapter.

unsloth decides some things by itself. What came is compared with what was asked for, and every difference is logged.
This module imports neither transformers nor peft before unsloth: the backend is chosen first.
"""

import functools
import importlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from cogumi.config.presets import OURS
from cogumi.config.schema import ModelSection, RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.patches import unsloth_rl

if TYPE_CHECKING:
    from cogumi.models.base import RunBase

log = logging.getLogger("cogumi")
# The model types that FastLanguageModel has kernels for, and gpt-oss, whose experts it loads in 4 bits.
FAMILIES = ("llama", "mistral", "gemma", "gemma2", "qwen2", "qwen3", "gpt_oss")
COGUMI_BASE = "cogumi:"  # small-base, a Llama, or random-<model type>
# Entries of a LoraConfig that PEFT fills in, and the modules, which are compared one by one.
BY_PEFT = {
    "auto_mapping", "base_model_name_or_path", "peft_version", "inference_mode", "target_modules", "loftq_config",
}  # fmt: skip


class Backend(NamedTuple):
    """name: what trains. reason: why, in words."""

    name: Literal["unsloth", "trl"]
    reason: str


def choose_backend(run: RunConfig) -> Backend:
    """Choose unsloth or TRL for this run on this machine. Imports no unsloth.

    Raises UsageError where `cogumi.backend: unsloth` is asked for and unsloth is not installed.
    """
    requested = run.cogumi.backend
    if requested == "trl":
        return Backend("trl", "cogumi.backend is trl")
    if reason := unsloth_rl.find_obstacle(requested):
        return Backend("trl", reason)
    if requested == "unsloth":
        return Backend("unsloth", "cogumi.backend is unsloth")
    if run.cogumi.processes != 1:
        return Backend("trl", "several processes train by stock TRL")
    kind = read_model_type(run.model.name, run.model.revision)
    if kind not in FAMILIES:
        return Backend("trl", f"unsloth has no kernels for {kind or run.model.name}: stock TRL trains")
    if unsloth_rl.was_left_out():
        return Backend("trl", "stock TRL trained in this process before, and unsloth has to be imported first")
    if run.train.get("use_vllm"):
        return Backend("trl", "vLLM samples, which was never run beside unsloth; cogumi.backend: unsloth takes it")
    if needs_exact_ratios(run) and not unsloth_rl.is_in_place():
        return Backend("trl", "unsloth's ratios are not yet confirmed on a card; cogumi.backend: unsloth takes it")
    return Backend("unsloth", f"unsloth is installed, and has kernels for {kind}")


def needs_exact_ratios(run: RunConfig) -> bool:
    """Return whether the clip of a sequence's ratio, some 1e-4 wide, acts: a rollout serves several steps.

    On an H200 unsloth's ratios were up to 0.018 away from 1 before the first step (docs/measured.md), TRL's were 1.
    """
    train, options = run.train, run.cogumi
    if options.method != "gspo" or train.get("loss_type", "gspo") not in OURS:
        return False
    documents = options.docs_per_step or (options.prompts_per_step or 0) * run.setting("num_generations")
    if documents:
        once = train.get("generation_batch_size") == documents
    else:
        once = train.get("steps_per_generation") == run.setting("gradient_accumulation_steps")
    return not once or run.setting("num_iterations") > 1


def read_model_type(name: str, revision: str | None) -> str:
    """Read `model_type` of a base's config.json, downloaded for a model of the hub; "" if it cannot be read."""
    if name.startswith(COGUMI_BASE):
        return "llama" if name == "cogumi:small-base" else re.sub("[-.]", "_", name.rpartition("random-")[2])
    path = Path(name) / "config.json"
    if not Path(name).is_dir():
        import huggingface_hub

        try:
            path = Path(huggingface_hub.hf_hub_download(name, "config.json", revision=revision))
        except (OSError, ValueError):  # the run's own look at the model says what is wrong
            return ""
    try:
        return str(json.loads(path.read_text(encoding="utf-8")).get("model_type", ""))
    except (OSError, ValueError):
        return ""


def load_fast_model(
    base: "RunBase", section: ModelSection, dtype: str, length: int, checkpointing: bool, full: bool = False
) -> Any:
    """Load the base by unsloth. length: the longest sequence of the run, in tokens. full: every weight is trained.

    Raises UsageError where unsloth refuses the base or quantizes it wrongly.
    """
    from transformers import BitsAndBytesConfig

    from cogumi.models.loading import load_tokenizer, resolve_dtype
    from cogumi.models.quantization import (
        QLORA,
        keep_4bit_unpacked,
        quantization_settings,
        refuse_misread,
        refuse_quantized_already,
        refuse_wrong_layers,
    )

    name, base_config = base.name, base.config
    options: dict[str, Any] = {}
    settings: BitsAndBytesConfig | None = None
    if section.quantization_config is not None:
        refuse_quantized_already(name, base_config)
        settings = quantization_settings(section.quantization_config, resolve_dtype(dtype))
        options = {"load_in_4bit": settings.load_in_4bit, "load_in_8bit": settings.load_in_8bit}
        # Else unsloth's own 4-bit loading, which is the same and takes experts too.
        if {**QLORA, **section.quantization_config} != {"load_in_4bit": True, **QLORA}:
            options["quantization_config"] = settings
    if section.attn_implementation is not None:
        options["attn_implementation"] = section.attn_implementation
    longest = min(length, getattr(base_config.get_text_config(), "max_position_embeddings", None) or length)
    try:
        model, tokenizer = loader().from_pretrained(
            model_name=name,
            max_seq_length=longest,  # a longer one would have unsloth stretch the positions
            dtype=resolve_dtype(dtype),
            revision=section.revision,
            full_finetuning=full,
            device_map={"": 0} if torch.cuda.is_available() else None,
            use_gradient_checkpointing="unsloth" if checkpointing else False,
            use_exact_model_name=True,  # else unsloth may take a quantized copy of its own
            **{"load_in_4bit": False, "load_in_8bit": False, **options},
        )
    except torch.OutOfMemoryError:  # a RuntimeError, too, and no refusal: it is told as itself
        raise
    except (ValueError, RuntimeError, NotImplementedError, ImportError, TypeError) as error:
        message = f"unsloth does not load {name} ({type(error).__name__}: {one_line(error)[:300]})"
        raise UsageError(message, key="cogumi.backend", fix="set cogumi.backend: trl") from error
    if settings is not None:
        refuse_wrong_layers(model)
        refuse_misread(model)
        keep_4bit_unpacked(model)
    for difference in (
        *compare_model(model, base, resolve_dtype(dtype), section, settings),
        *compare_tokenizer(tokenizer, load_tokenizer(base)),
    ):
        log.warning("unsloth: %s", difference)
    return model


def wrap_adapter(adapted: Any, checkpointing: bool) -> Any:
    """Give a model that PEFT put an adapter on what unsloth's own gives: kernels, checkpointing, mode switches."""
    fast = loader()
    if hasattr(fast, "patch_peft_model"):
        return fast.patch_peft_model(adapted, use_gradient_checkpointing="unsloth" if checkpointing else False)
    for name in ("for_training", "for_inference"):  # without a GPU there are no kernels to put in place
        setattr(adapted, name, functools.partial(getattr(fast, name), adapted))
    adapted.enable_input_require_grads()
    return adapted


def add_fast_adapter(run: RunConfig, model: Any, checkpointing: bool) -> Any:
    """Add the run's LoRA to the model as unsloth trains it."""
    from cogumi.models.adapters import DEFAULTS, lora_config
    from cogumi.patches.trl_internals import commit_of

    how: Any = "unsloth" if checkpointing else False
    before = [name for name, _ in model.named_parameters()]
    revision = commit_of(model.config) or run.model.revision
    options = {**DEFAULTS, **run.lora}
    expected = lora_config(run.lora, revision)
    modules = {name for name, module in model.named_modules() if is_wanted(name, module, expected, model)}
    seed = run.train.get("seed")
    model = loader().get_peft_model(
        model, **options, revision=revision, use_gradient_checkpointing=how, random_state=42 if seed is None else seed
    )
    if not hasattr(model, "peft_config"):
        raise RuntimeError(f"unsloth {type(model).__name__} has no adapter after get_peft_model")
    for difference in compare_adapter(model, expected, modules, before):
        log.warning("unsloth: %s", difference)
    return model


def loader() -> Any:
    """Unsloth's FastLanguageModel, which is another class without a GPU."""
    return importlib.import_module("unsloth").FastLanguageModel


# ------------------------------------------------------------------------------------------- what was asked for, what came


def compare_model(
    model: Any, base: "RunBase", dtype: torch.dtype, section: ModelSection, settings: Any = None
) -> Iterator[str]:
    """Yield differences of the loaded base from the request. settings: of its quantization, None without."""
    from cogumi.models.base import meta_model
    from cogumi.models.quantization import QLORA
    from cogumi.patches.trl_internals import attention_of, commit_of

    commit, base_config = commit_of(model.config), base.config
    if commit and section.revision and len(section.revision) == len(commit) and commit != section.revision:
        message = f"unsloth loaded commit {commit} of {section.name}, and not {section.revision}"
        raise UsageError(message, key="cogumi.backend", fix="set cogumi.backend: trl")
    attention = section.attn_implementation
    pairs = {
        "dtype": (dtype, model.dtype),
        "model.attn_implementation": (attention, attention and attention_of(model.config)),
        "positions": tuple(
            getattr(c.get_text_config(), "max_position_embeddings", None) for c in (base_config, model.config)
        ),
        "rows of embeddings": (base_config.get_text_config().vocab_size, model.get_input_embeddings().weight.shape[0]),
    }
    if settings is not None:
        loaded_config = model.config.quantization_config
        got: Mapping[str, Any] = loaded_config if isinstance(loaded_config, dict) else loaded_config.to_dict()
        keys = {*QLORA, "bnb_4bit_compute_dtype", *(section.quantization_config or ())}
        of_config = settings.to_dict()
        pairs |= {f"model.quantization_config.{key}": (of_config.get(key), got.get(key)) for key in sorted(keys)}
    for key, (ours, theirs) in pairs.items():
        if plain(ours) != plain(theirs):
            yield f"{key} is {plain(theirs)}, and {plain(ours)} was asked for"
    names = {name for name, _ in meta_model(base.config).named_parameters()}
    if other := sorted(names ^ {name for name, _ in model.named_parameters()}):
        yield f"{len(other)} parameters have other names than transformers gives them, such as {other[0]}"


def compare_tokenizer(theirs: Any, ours: Any) -> Iterator[str]:
    """Yield changes of the tokenizer by unsloth. The run keeps its own, with which the data were made."""
    for key in ("pad_token", "eos_token", "bos_token", "chat_template"):
        if getattr(theirs, key, None) != getattr(ours, key, None):
            yield f"its tokenizer has another {key}; the run keeps the base's"
    if len(theirs) != len(ours):
        yield f"its tokenizer has {len(theirs)} tokens; the run keeps the base's, with {len(ours)}"


def compare_arguments(requested: Mapping[str, Any], args: Any) -> Iterator[str]:
    """Yield differences of the trainer's arguments from `train:`; unsloth changes some on construction."""
    for key, value in requested.items():
        actual = getattr(args, key, value)
        if isinstance(value, bool | int | float | str) and actual != value and plain(actual) != plain(value):
            yield f"train.{key} is {plain(actual)}, and {plain(value)} was asked for"


def compare_adapter(model: Any, expected: Any, modules: set[str], before: list[str]) -> Iterator[str]:
    """Yield differences of the adapter from `lora:`. modules: those requested. before: the base's parameters."""
    from peft.tuners.lora import LoraLayer

    actual, requested = model.peft_config["default"].to_dict(), expected.to_dict()
    for key in sorted((requested.keys() & actual.keys()) - BY_PEFT):
        if plain(actual[key] or None) != plain(requested[key] or None):
            yield f"lora.{key} is {plain(actual[key])}, and {plain(requested[key])} was asked for"
    base = model.get_base_model()
    adapted = {name for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    if other := sorted(adapted ^ modules):
        yield f"the adapter is on {len(adapted)} modules, and {len(modules)} were asked for; {other[0]} is one that differs"
    trained = {name: p.dtype for name, p in base.named_parameters() if p.requires_grad}
    if outside := [name for name in trained if "lora_" not in name and "modules_to_save" not in name]:
        yield f"{len(outside)} parameters outside the adapter are trained, such as {outside[0]}"
    if other_dtypes := {plain(dtype) for dtype in trained.values()} - {"float32"}:
        yield f"the adapter is in {', '.join(sorted(other_dtypes))}, and PEFT makes it in float32"
    left = {name.replace(".base_layer", "").replace(".original_module", "") for name, _ in base.named_parameters()}
    if lost := [name for name in before if name not in left]:
        yield f"{len(lost)} parameters of the base have other names with the adapter, such as {lost[0]}"


def is_wanted(name: str, module: Any, config: Any, model: Any) -> bool:
    """Return whether PEFT would put an adapter of this LoraConfig on the module of a base without one."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if config.target_modules == "all-linear":
        return isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
    return bool(name and check_target_module_exists(config, name))


def plain(value: Any) -> Any:
    """Normalize a value for comparison: an enum's value, a dtype without its package, a sequence as a sorted list."""
    if isinstance(value, set | tuple | list):
        return sorted(map(str, value))
    return str(getattr(value, "value", value)).removeprefix("torch.")
