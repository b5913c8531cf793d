"""Division of a step among processes, shared by training and preflight.

What cannot be shared out is refused before torch is imported, which takes seconds.
"""

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError


def split_step(run: RunConfig, count: int) -> RunConfig:
    """Divide the run among `count` processes: an optimizer step has as many examples as with one process.

    A step of `cogumi.examples_per_step` is one micro-batch until `auto_settings.micro_batch` cuts it to the memory. Raises
    UsageError where a step cannot be shared out evenly, and for what several processes cannot do.
    """
    if count == 1 and run.cogumi.examples_per_step is None:
        return run
    run = run.model_copy(deep=True)
    train = run.train
    if count > 1:
        refuse_unshared(run, count)
        import torch

        from cogumi.stack.ranks import PATIENCE

        run.cogumi.processes = count
        # A pause, or a full disk that the first process waits for, is no fault of the others.
        train.setdefault("ddp_timeout", int(PATIENCE.total_seconds()))
        if not torch.cuda.is_available() and run.cogumi.sharding == "none":
            train.setdefault("use_cpu", True)  # else transformers takes each process for the only one
    if is_planned(run):
        return run  # the planner knows of the processes
    batch, accumulated = batch_of(run)
    if train.get("per_device_train_batch_size") is not None:
        run.cogumi.examples_per_step = None
    examples = batch * accumulated // count
    at_once = max(size for size in range(1, batch + 1) if examples % size == 0)
    train |= {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": examples // at_once}
    if (steps := train.get("steps_per_generation")) is not None:
        rollout = batch * steps
        if rollout % (at_once * count):
            message = f"a rollout of {rollout} completions cannot be shared by {count} processes"
            raise UsageError(message, key="train.steps_per_generation", fix=f"raise it to a multiple of {accumulated}")
        train["steps_per_generation"] = rollout // (at_once * count)
    return run


def is_planned(run: RunConfig) -> bool:
    """Return whether the run says how large an optimizer step is, and leaves the batch to GSPO's planner."""
    return run.cogumi.docs_per_step is not None or run.cogumi.prompts_per_step is not None


def batch_of(run: RunConfig) -> tuple[int, int]:
    """Examples at a time, and how many times a step: of one process, if it were the only one."""
    step = run.cogumi.examples_per_step
    if step is not None and run.train.get("gradient_accumulation_steps") is None:
        batch = run.train.get("per_device_train_batch_size") or step
        return batch, step // batch
    return run.setting("per_device_train_batch_size"), run.setting("gradient_accumulation_steps")


def refuse_unshared(run: RunConfig, count: int) -> None:
    """Raise UsageError for what `count` processes cannot do together, and for a step that they cannot share out evenly."""
    if run.cogumi.backend == "unsloth":
        fix = "set cogumi.backend: trl, or cogumi.processes: 1"
        raise UsageError("unsloth trains in one process", key="cogumi.backend", fix=fix)
    if run.cogumi.sharding != "none":
        unsharded = "cogumi.sharding: none, where each GPU has the whole model"
        optimizer = str(run.train.get("optim") or "")
        if run.model.quantization_config is not None:
            message = f"a quantized base is not shared out by {run.cogumi.sharding}"
            raise UsageError(message, key="model.quantization_config", fix=f"drop it, or set {unsharded}")
        if "8bit" in optimizer or "paged" in optimizer:
            message = f"{optimizer} is for whole tensors, and {run.cogumi.sharding} gives each process shards"
            raise UsageError(message, key="train.optim", fix=f"set adamw_torch_fused, or set {unsharded}")
        if run.train.get("use_vllm"):
            message = "vLLM as the sampler of shards was never tried"
            raise UsageError(message, key="train.use_vllm", fix=f"set {unsharded}")
    batch, accumulated = batch_of(run)
    step, keys = batch * accumulated, "train.per_device_train_batch_size x gradient_accumulation_steps"
    if run.cogumi.examples_per_step is not None:
        keys = "cogumi.examples_per_step"
    elif run.cogumi.docs_per_step is not None:
        step, keys = run.cogumi.docs_per_step, "cogumi.docs_per_step"
    elif run.cogumi.prompts_per_step is not None:
        group = run.setting("num_generations")
        step, keys = run.cogumi.prompts_per_step * group, "cogumi.prompts_per_step x train.num_generations"
    share, rest = divmod(step, count)
    if rest:
        message = f"a step of {step} examples cannot be shared by {count} processes"
        near = " or ".join(str(size) for size in (share * count, (share + 1) * count) if size)
        raise UsageError(message, key="cogumi.processes", fix=f"let {keys} be {near}")


def describe_split(run: RunConfig, rank_run: RunConfig, count: int) -> str:
    if is_planned(run):
        return f"{count} processes share each step"
    (before, accumulated), (batch, own_accumulated) = batch_of(run), batch_of(rank_run)
    step = before * accumulated
    return f"{count} processes share each step of {step} examples: {count} x {batch} x {own_accumulated} accumulated"
