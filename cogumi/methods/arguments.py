"""The configuration of a run as TRL's own: its method's settings over what a run needs, refused where TRL would ignore them."""

from typing import Any

import torch
from safetensors import SafetensorError

from cogumi.config.binding import config_class
from cogumi.config.schema import TRL_CONFIGS, RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.core.redact import SECRETS, Unwritten
from cogumi.methods import dpo, gspo, sft
from cogumi.telemetry import trackers

METHODS: dict[str, Any] = {"sft": sft, "dpo": dpo, "gspo": gspo}
# What transformers, peft and TRL raise for a setting they refuse, a package that is not installed, or broken weights.
BUILD_REFUSALS = (ValueError, ImportError, OSError, RuntimeError, ArithmeticError, SafetensorError)
NOT_PASSED_ON = {
    "resume_from_checkpoint": "a run goes on from the last good checkpoint in its own directory",
    "model_init_kwargs": "the model is loaded as `model:` says",
}


def trl_arguments(run: RunConfig) -> Any:
    """TRL's config object for the run. Raises UsageError with TRL's own words where it refuses a combination."""
    for key, reason in NOT_PASSED_ON.items():
        if run.train.get(key) is not None:
            raise UsageError(f"train.{key} would be ignored: {reason}")
    # TRL turns bf16 autocast on wherever fp16 is off; without a GPU that is slow and blurs a GSPO ratio of 1 +- 3e-4.
    on_gpu = torch.cuda.is_available()
    bf16 = on_gpu and torch.cuda.is_bf16_supported()
    defaults = {
        "output_dir": str(run.run_dir / "checkpoints"),
        "report_to": trackers.default_reporter(),
        "logging_first_step": True,  # so that the shortest run has a loss to judge
        "bf16": bf16,
        "dataloader_pin_memory": on_gpu,
    }
    batch = run.train.get("per_device_train_batch_size")
    if batch is not None and run.cogumi.method != "gspo":
        defaults["per_device_eval_batch_size"] = batch  # the held-out loss is to fit where a step does
    given = {**defaults, **METHODS[run.cogumi.method].arguments(run)}
    secrets = {key: Unwritten(value) for key, value in given.items() if value and key.endswith(SECRETS)}
    try:
        return config_class(TRL_CONFIGS[run.cogumi.method])(**{**given, **secrets})
    except ValueError as error:
        raise UsageError(one_line(error), key="train") from None
