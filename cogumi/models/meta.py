"""Models of shapes: built from a config on the meta device, without memory."""

import copy
from typing import Any

from cogumi.errors import UsageError


def meta_model(config: Any) -> Any:
    """The unquantized model of a config, of the class it names, on the meta device: names and shapes, no memory."""
    import torch
    import transformers

    config = copy.deepcopy(config)  # building one writes into it
    known = getattr(transformers, (config.architectures or [""])[0], None)
    try:
        with torch.device("meta"):
            return known(config) if known is not None else transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:  # AutoModel has no class for it
        raise UsageError(f"the merged size of a {config.model_type!r} model is not known: {error}") from error
