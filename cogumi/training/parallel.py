"""A run in several processes: each one's part of a step, how the model is shared, and what all but the first do.

The first process decides, writes and judges. Each other one makes the same training, with a directory of its own that is
thrown away. At each step it does what the first one decided.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
import yaml
from transformers import AutoConfig

from cogumi.checkpoints.interruption import exit_on_signals
from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import DECISIONS
from cogumi.methods import building, gspo
from cogumi.methods.examples import prepare_examples
from cogumi.patches.trl_internals import shard_without_gpu
from cogumi.stack.gpus import count_launched
from cogumi.stack.ranks import PATIENCE, Ranks, Result, whole_tensor
from cogumi.telemetry.heartbeat import measure_run
from cogumi.telemetry.throughput import Meter
from cogumi.training.loop import fit

log = logging.getLogger("cogumi")
ACCELERATE = Path(__file__).parents[1] / "accelerate"  # the configs that come with the package
ON_CPU = {"ACCELERATE_TORCH_DEVICE": "cpu"}  # else "cpu:0", onto which torch loads no optimizer


def processes_here() -> int:
    """How many processes this one trains with."""
    return max(1, count_launched(os.environ))


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


def read_accelerate(name: str) -> dict[str, str]:
    """accelerate's variables for one of the package's configs, as `accelerate launch --config_file` sets them."""
    found = yaml.safe_load((ACCELERATE / f"{name}.yaml").read_text(encoding="utf-8"))
    variables = {}
    for key, value in (found.get("fsdp_config") or {}).items():
        said = str(value).lower() if isinstance(value, bool) else str(value)
        variables[f"FSDP_{key.removeprefix('fsdp_').upper()}"] = said
    return variables | ({"ACCELERATE_USE_FSDP": "true"} if variables else {})


def set_accelerate(run: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that this process needs before transformers looks for them.

    Raises UsageError where those of a launcher say otherwise."""
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true" or run.train.get("deepspeed"):
        # Under ZeRO-3 each model that is made is made by all processes together, and here the first looks ahead alone.
        what = "a run does not train by DeepSpeed, whose checkpoints are not verified"
        raise UsageError(what, key="train.deepspeed", fix="share the model out by cogumi.sharding: fsdp2")
    if processes_here() == 1:
        return {}
    given = "fsdp2" if environment.get("ACCELERATE_USE_FSDP") == "true" else "none"
    if given != run.cogumi.sharding and given != "none":
        what = f"the launcher shards by {given}, and cogumi.sharding is {run.cogumi.sharding}"
        raise UsageError(what, key="cogumi.sharding", fix=f"set it to {given}, or leave accelerate's config file out")
    on_cpu, shared = not torch.cuda.is_available(), run.cogumi.sharding != "none"
    wanted = read_accelerate(run.cogumi.sharding) if shared else {}
    if shared and on_cpu:
        shard_without_gpu()
    return {name: value for name, value in wanted.items() if name not in environment} | (ON_CPU if on_cpu else {})


class Others:
    """The processes that wait for the first one: they are told what it has prepared, and at the end what came of the run.
    What it raises while they wait, they raise. With one process nothing is told."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.waiting = ranks, True

    def __enter__(self) -> "Others":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.waiting:
            self.ranks.refuse(error)

    def begin(self, chosen: RunConfig, base: str, run_dir: Path) -> None:
        """They load the model and train, as this process does next."""
        self.ranks.answer((chosen, base, run_dir.absolute()))
        self.waiting = False

    def wait(self) -> None:
        """They have trained."""
        self.waiting = True

    def end(self, result: Result) -> Result:
        self.ranks.answer(result)
        self.waiting = False
        return result


def collect_trained(model: Any) -> dict[str, torch.Tensor]:
    """The whole of each trained weight of a sharded model, in main memory. All processes call it; each has the result."""
    return {
        name: whole_tensor(weight.detach()).cpu().contiguous()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


def follow(ranks: Ranks) -> Any:
    """A run as one of the processes but the first. Returns what that one returns; raises what it refuses."""
    with exit_on_signals(), TemporaryDirectory(prefix="cogumi-rank-") as scratch:
        datasets.disable_progress_bars()
        log.setLevel(logging.CRITICAL)  # the first process says it
        chosen, base, run_dir = ranks.hear()
        place = Path(scratch)
        if (run_dir / DECISIONS).exists():  # which the first has made, and a resumed run keeps
            shutil.copyfile(run_dir / DECISIONS, place / DECISIONS)
        chosen = chosen.model_copy(deep=True)
        chosen.cogumi.run_dir = place
        chosen.train |= {"output_dir": str(run_dir / "checkpoints"), "report_to": "none"}
        meter = Meter()
        tokenizer = building.load_run_tokenizer(chosen, base)
        of_base = AutoConfig.from_pretrained(base, revision=chosen.model.revision)
        examples = prepare_examples(chosen, tokenizer, of_base)  # prepared by the first
        with measure_run(place, meter) as heart:
            trainer = building.build_trainer(chosen, base, tokenizer, examples, meter, ranks)
            fit(chosen, trainer, tokenizer, examples, heart, ranks)
            if trainer.is_fsdp_enabled:
                collect_trained(trainer.model)
            del trainer
        return ranks.hear()
