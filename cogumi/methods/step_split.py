"""The part that each of several processes has in a step, which training and preflight cut alike."""

import torch

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.methods import gspo
from cogumi.stack.ranks import PATIENCE


def split_step(run: RunConfig, count: int) -> RunConfig:
    """The run as each of `count` processes trains it: an optimizer step has as many examples as with one process.

    Raises UsageError where a step cannot be shared out evenly, and for what several processes cannot do.
    """
    if count == 1:
        return run
    if run.cogumi.sharding != "none":
        refuse_unsharded(run)
    run = run.model_copy(deep=True)
    run.cogumi.processes = count
    train = run.train
    # A pause, or a full disk that the first process waits for, is no fault of the others.
    train.setdefault("ddp_timeout", int(PATIENCE.total_seconds()))
    if not torch.cuda.is_available() and run.cogumi.sharding == "none":
        train.setdefault("use_cpu", True)  # else transformers takes each process for the only one
    if run.cogumi.method == "gspo" and gspo.is_planned(run):
        return run  # the planner knows of the processes
    batch, accumulated = (
        gspo.setting(run, key) for key in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    own, rest = divmod(batch * accumulated, count)
    if rest:
        what = f"a step of {batch * accumulated} examples cannot be shared by {count} processes"
        near = " or ".join(str(each) for each in (own * count, (own + 1) * count) if each)
        fix = f"let train.per_device_train_batch_size x gradient_accumulation_steps be {near}"
        raise UsageError(what, key="cogumi.processes", fix=fix)
    at_once = max(size for size in range(1, batch + 1) if own % size == 0)
    train |= {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": own // at_once}
    if (steps := train.get("steps_per_generation")) is not None:
        rollout = batch * steps
        if rollout % (at_once * count):
            what = f"a rollout of {rollout} completions cannot be shared by {count} processes"
            raise UsageError(what, key="train.steps_per_generation", fix=f"raise it to a multiple of {accumulated}")
        train["steps_per_generation"] = rollout // (at_once * count)
    return run


def refuse_unsharded(run: RunConfig) -> None:
    """Raise UsageError for what FSDP2 does not share out, or what was never tried with it."""
    whole = "cogumi.sharding: none, where each GPU has the whole model"
    if run.model.quantization_config is not None:
        what = f"a quantized base is not shared out by {run.cogumi.sharding}"
        raise UsageError(what, key="model.quantization_config", fix=f"drop it, or set {whole}")
    optimizer = str(run.train.get("optim") or "")
    if "8bit" in optimizer or "paged" in optimizer:
        what = f"{optimizer} is for whole tensors, and {run.cogumi.sharding} gives each process shards"
        raise UsageError(what, key="train.optim", fix=f"set adamw_torch_fused, or set {whole}")
    if run.train.get("use_vllm"):
        raise UsageError("vLLM as the sampler of shards was never tried", key="train.use_vllm", fix=f"set {whole}")


def describe_split(run: RunConfig, own: RunConfig, count: int) -> str:
    if run.cogumi.method == "gspo" and gspo.is_planned(run):
        return f"{count} processes share each step"
    sizes = [
        tuple(gspo.setting(each, key) for key in ("per_device_train_batch_size", "gradient_accumulation_steps"))
        for each in (run, own)
    ]
    (before, accumulated), (batch, own_accumulated) = sizes
    step = before * accumulated
    return f"{count} processes share each step of {step} examples: {count} x {batch} x {own_accumulated} accumulated"
