"""The model that a run or a merge starts from: transformers' class for it, and the model without weights."""

import copy
import pickle
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from cogumi.core.errors import UsageError
from cogumi.hub.downloads import Download, plan_download
from cogumi.patches import recurrent_kernels


@dataclass(frozen=True)
class RunBase:
    """The model that a run starts from, with its configuration, which is read once.

    name: a directory or hub id. revision: a branch or commit of the hub.
    """

    name: str
    revision: str | None
    config: Any

    @cached_property
    def download(self) -> Download | None:
        """Its files on the hub; None for a directory. Raises UsageError where the hub does not answer."""
        return plan_download(self.name, self.revision)


def auto_class(config: Any) -> Any:
    """Return transformers' class that loads a config's model for text, for training and merge alike.

    AutoModelForCausalLM, or AutoModelForImageTextToText for configs that only that one has. Some classes of the former
    leave the other towers out.
    """
    import transformers

    is_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    is_image = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if is_image and not is_text else transformers.AutoModelForCausalLM


def named_class(config: Any) -> Any:
    """Return the class whose parameters a checkpoint holds, by its config; None where transformers does not have it."""
    import transformers

    return getattr(transformers, (config.architectures or [""])[0], None)


def meta_model(config: Any, kind: Any = None) -> Any:
    """Return a config's unquantized model on the meta device, to be changed freely. kind: by default what a run loads."""
    return copy.deepcopy(build_on_meta(kind or auto_class(config), pickle.dumps(config)))


@lru_cache(maxsize=4)
def build_on_meta(kind: Any, pickled_config: bytes) -> Any:
    """Build the model that `meta_model` copies: a run asks for the same one a dozen times, a merge as often again."""
    config = pickle.loads(pickled_config)  # a copy: building a model writes into it
    try:
        with torch.device("meta"):
            model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    except (ValueError, KeyError) as error:
        # transformers adds the names of all the classes that it knows.
        reason = str(error).partition("\n")[0]
        raise UsageError(f"this transformers builds no {config.model_type!r} model: {reason}") from error
    recurrent_kernels.apply(model)  # the forecast runs its layers on tensors of no GPU
    return model
