"""A run in several processes: how the model is shared, and what all but the first do.

The first process decides, writes and judges. Each other one makes the same training, with a directory of its own that is
thrown away. At each step it does what the first one decided.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
import yaml

from cogumi.checkpoints.interruption import exit_on_signals
from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import DECISIONS
from cogumi.methods import building
from cogumi.methods.examples import prepare_examples
from cogumi.methods.preparation import load_run_tokenizer
from cogumi.models.base import RunBase
from cogumi.patches.trl_internals import shard_without_gpu
from cogumi.stack.gpus import count_launched
from cogumi.stack.ranks import Ranks, Result, whole_tensor
from cogumi.telemetry.heartbeat import measure_run
from cogumi.telemetry.throughput import Meter
from cogumi.training.loop import fit, judge_fit

log = logging.getLogger("cogumi")
ACCELERATE = Path(__file__).parents[1] / "accelerate"  # the configs that come with the package
ON_CPU = {"ACCELERATE_TORCH_DEVICE": "cpu"}  # else "cpu:0", onto which torch loads no optimizer


def processes_here() -> int:
    return max(1, count_launched(os.environ))


def read_accelerate(name: str) -> dict[str, str]:
    """Accelerate's variables for one of the package's configs, as `accelerate launch --config_file` sets them."""
    config = yaml.safe_load((ACCELERATE / f"{name}.yaml").read_text(encoding="utf-8"))
    variables = {}
    for key, value in (config.get("fsdp_config") or {}).items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        variables[f"FSDP_{key.removeprefix('fsdp_').upper()}"] = text
    return variables | ({"ACCELERATE_USE_FSDP": "true"} if variables else {})


def set_accelerate(run: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that this process needs before transformers reads them.

    Raises UsageError where those of a launcher say otherwise.
    """
    if processes_here() == 1:
        if run.cogumi.sharding != "none":
            problem = f"{run.cogumi.sharding} shares the model among several processes, and there is one GPU"
            raise UsageError(problem, key="cogumi.sharding", fix="drop it")
        return {}
    launched = "fsdp2" if environment.get("ACCELERATE_USE_FSDP") == "true" else "none"
    if launched != run.cogumi.sharding and launched != "none":
        problem = f"the launcher shards by {launched}, and cogumi.sharding is {run.cogumi.sharding}"
        raise UsageError(
            problem, key="cogumi.sharding", fix=f"set it to {launched}, or leave accelerate's config file out"
        )
    on_cpu, shared = not torch.cuda.is_available(), run.cogumi.sharding != "none"
    config = read_accelerate(run.cogumi.sharding) if shared else {}
    if shared and on_cpu:
        shard_without_gpu()
    variables = {name: value for name, value in config.items() if name not in environment}
    # A launcher's config does not change the arithmetic of a run: TRL's arguments set it where the run has bf16.
    return variables | {"ACCELERATE_MIXED_PRECISION": "no"} | (ON_CPU if on_cpu else {})


class Followers:
    """The processes that wait for rank 0: they receive what it has prepared, and at the end the run's result.

    Followers re-raise exceptions of rank 0 while they wait. With one process nothing is sent.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.waiting = ranks, True

    def __enter__(self) -> "Followers":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.waiting:
            self.ranks.refuse(error)

    def start(self, chosen: RunConfig, base: RunBase, run_dir: Path) -> None:
        """Have them load the model and train, as this process does next."""
        self.ranks.answer((chosen, base, run_dir.absolute()))
        self.waiting = False

    def wait(self) -> None:
        """Note that they have trained and wait again."""
        self.waiting = True

    def finish(self, result: Result) -> Result:
        self.ranks.answer(result)
        self.waiting = False
        return result


def gather_trained(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each trained weight of a sharded model by its name, whole. All processes ask for one after the other."""
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            yield name, whole_tensor(weight.detach())


def follow(ranks: Ranks) -> Any:
    """A run as one of the processes but the first. Returns what that one returns; raises what it refuses."""
    with exit_on_signals(), TemporaryDirectory(prefix="cogumi-rank-") as scratch, ExitStack() as after:
        datasets.disable_progress_bars()
        after.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)  # the first process says it
        if not isinstance(heard := ranks.hear(), tuple):  # the run is finished in its mirror
            return heard
        chosen, base, run_dir = heard
        place = Path(scratch)
        if (run_dir / DECISIONS).exists():  # which the first has made, and a resumed run keeps
            shutil.copyfile(run_dir / DECISIONS, place / DECISIONS)
        chosen = chosen.model_copy(deep=True)
        chosen.cogumi.run_dir = place
        chosen.train |= {"output_dir": str(run_dir / "checkpoints"), "report_to": "none"}
        meter = Meter()
        tokenizer = load_run_tokenizer(chosen, base)
        examples = prepare_examples(chosen, tokenizer, base.config)  # prepared by the first
        with measure_run(place, meter) as heart:
            trainer = building.build_trainer(chosen, base, tokenizer, examples, meter, ranks)
            fitted = fit(chosen, trainer, tokenizer, examples, heart, ranks)
            if trainer.is_fsdp_enabled:
                for _ in gather_trained(trainer.model):  # together with the first, which keeps them
                    pass
            judge_fit(chosen, trainer, fitted, ranks)
            del trainer
        return ranks.hear()
