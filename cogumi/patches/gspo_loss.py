"""`loss_type="gspo"` in TRL's own words, before TRL or unsloth sees it, and the name kept wherever it is shown or saved.

TRL 1.15 takes the string, pays for the first rollout and fails at the first loss. GSPO (Zheng et al. 2025,
arXiv:2507.18071) is its `grpo` loss with a sequence-level ratio, R = exp(mean_t(new - old)). `cogumi.config.presets` has
the values. A trainer built from such a config is watched (`cogumi.rl.watch`).
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from cogumi.config.presets import OURS, PRESETS, REMOVED
from cogumi.core.errors import UsageError
from cogumi.patches import PatchStatus, method_around
from cogumi.patches.trl_internals import config_defaults

NAME = "gspo"
WRITTEN_FOR = "trl 1.15 and 1.16"
# What else decides the objective or the update and has another default in unsloth's generated config, or is changed by
# unsloth where it is left out: always passed, with TRL's default.
SPELLED_OUT = (
    "learning_rate", "optim", "weight_decay", "warmup_steps", "gradient_accumulation_steps", "seed",
    "per_device_train_batch_size", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max",
)  # fmt: skip
_watches: list[Callable[[Any], None]] = []
_originals: dict[type, dict[str, Any]] = {}  # class -> the attributes `apply` replaced, as found in its own namespace
_ABSENT = object()


def gspo_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """GRPOConfig arguments, a loss type of ours spelled out. Raises UsageError for a key that contradicts it."""
    name = arguments.get("loss_type")
    if name in REMOVED:
        raise UsageError(f"loss_type={name!r} is not known any more", fix=f"write {REMOVED[name]}")
    if name not in OURS:
        return dict(arguments)
    preset_level = PRESETS[name]["importance_sampling_level"]
    if (level := arguments.get("importance_sampling_level", preset_level)) != preset_level:
        message = f"importance_sampling_level={level!r} contradicts loss_type={name!r}, whose ratio is per sequence"
        raise UsageError(message, fix="drop one")
    # As in TRL, a lone epsilon bounds both sides.
    both = {"epsilon_high": arguments["epsilon"]} if arguments.get("epsilon") is not None else {}
    # Elsewhere None is a value: max_grad_norm=None does not clip the gradient, a correction's clip_max=None has no bound.
    explicit = {key: value for key, value in arguments.items() if value is not None or key not in PRESETS[name]}
    return fill_defaults(name, both | explicit)


def fill_defaults(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return GRPOConfig keyword arguments of a loss under `arguments`, with everything that unsloth has other defaults for."""
    preset = loss_values(name)
    values = {**trl_defaults(SPELLED_OUT), **preset, **arguments, "loss_type": preset["loss_type"]}
    if values.get("generation_batch_size") is None and values.get("steps_per_generation") is None:
        values["steps_per_generation"] = values["gradient_accumulation_steps"]  # TRL's default, said aloud
    return values


def loss_values(name: str) -> dict[str, Any]:
    """Return the values of a preset; for a loss of TRL's own without a preset TRL's defaults of the same keys."""
    if name in PRESETS:
        return PRESETS[name]
    return trl_defaults(tuple(key for key in PRESETS["grpo"] if key != "loss_type")) | {"loss_type": name}


def trl_defaults(names: tuple[str, ...]) -> dict[str, Any]:
    defaults = config_defaults(grpo_config())
    return {name: defaults[name] for name in names}


def drop_trl_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Without TRL's own defaults among the keys a preset decides, where all of those keys are passed.

    Then an argument parser or a generated subclass passes them, which the user did not set. One or two keys are the user's own.
    """
    if arguments.get("loss_type") not in OURS:
        return dict(arguments)
    upstream = trl_defaults(tuple(PRESETS[arguments["loss_type"]].keys() - {"loss_type"}))
    if not upstream.keys() <= arguments.keys():
        return dict(arguments)
    return {key: value for key, value in arguments.items() if key not in upstream or value != upstream[key]}


def apply() -> PatchStatus:
    """Make `trl.GRPOConfig(loss_type="gspo")` mean GSPO; once more after unsloth has put its classes on `trl`."""
    import trl

    wrappers: dict[Any, dict[str, Callable[..., Any]]] = {
        trl.GRPOConfig: {
            "__init__": _init,
            "__post_init__": _post_init,
            **dict.fromkeys(("to_dict", "__repr__", "__str__"), _show),
        },
        trl.GRPOTrainer: {"__init__": _init_trainer},
    }
    for patched in wrappers.keys() - _originals.keys():
        _originals[patched] = {name: vars(patched).get(name, _ABSENT) for name in wrappers[patched]}
        for name, around in wrappers[patched].items():
            setattr(patched, name, method_around(getattr(patched, name), around))
    return status()


def watch_trainers(watch: Callable[[Any], None]) -> None:
    """Call `watch` with each trainer of one of our losses, as soon as it is built."""
    if watch not in _watches:
        _watches.append(watch)


def undo() -> PatchStatus:
    """Put TRL's own methods back."""
    for patched, attributes in _originals.items():
        for name, original in attributes.items():
            if original is _ABSENT:
                delattr(patched, name)
            else:
                setattr(patched, name, original)
    _originals.clear()
    return status()


def status() -> PatchStatus:
    applied = grpo_config() in _originals
    low, high = (PRESETS["gspo"][key] for key in ("epsilon", "epsilon_high"))
    effect = "is left to TRL, which fails at the first loss"
    if applied:
        effect = f"becomes grpo + sequence-level ratio, beta 0, epsilon {low:g}/{high:g}"
    return PatchStatus(NAME, applied, f"loss_type='gspo' {effect} (trl {version('trl')}, written for {WRITTEN_FOR})")


def loss_name(config: Any) -> str:
    """Return the name a config was given ("gspo"), or TRL's `loss_type` if it was another or was changed since."""
    name = getattr(config, "cogumi_loss_name", None)
    if name is None:
        return str(config.loss_type)
    values = PRESETS[name]
    is_preset = all(getattr(config, key) == values[key] for key in ("loss_type", "importance_sampling_level"))
    return name if is_preset else str(config.loss_type)


def grpo_config() -> Any:
    import trl

    return trl.GRPOConfig


def _init(config: Any, original: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
    original(config, *args, **gspo_arguments(drop_trl_defaults(kwargs)))
    if kwargs.get("loss_type") in OURS:
        config.cogumi_loss_name = kwargs["loss_type"]


def _post_init(config: Any, original: Callable[[Any], None]) -> None:
    """For subclasses of the config whose own generated `__init__` sets the fields and calls nothing but this."""
    if (name := config.loss_type) in OURS:
        explicit = drop_trl_defaults({field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
        loss_arguments = {key: explicit[key] for key in ("loss_type", *PRESETS[name]) if key in explicit}
        for key, value in gspo_arguments(loss_arguments).items():
            if key in PRESETS[name]:
                setattr(config, key, value)
        config.cogumi_loss_name = name
    original(config)


def _show(config: Any, original: Callable[[Any], Any]) -> Any:
    """A method that shows or saves a config sees a copy whose `loss_type` is the name it was given."""
    if loss_name(config) == config.loss_type:
        return original(config)
    twin = copy.copy(config)
    twin.loss_type = loss_name(config)
    return original(twin)


def _init_trainer(trainer: Any, original: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
    for config in (*args, *kwargs.values()):
        loss_type = str(getattr(config, "loss_type", "")).lower()
        if isinstance(config, grpo_config()) and loss_type in OURS:  # TRL would fail after the first rollout
            message = f"loss_type is {config.loss_type!r}, set after the config was built"
            raise UsageError(message, fix=f"pass it to it: GRPOConfig(loss_type={loss_type!r}, ...)")
    original(trainer, *args, **kwargs)
    if loss_name(trainer.args) in OURS:
        for watch in _watches:
            watch(trainer)
