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
from transformers import AutoConfig

from cogumi.checkpoints.interruption import exit_on_signals
from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import DECISIONS
from cogumi.methods import building
from cogumi.methods.examples import prepare_examples
from cogumi.patches.trl_internals import shard_without_gpu
from cogumi.stack.gpus import count_launched
from cogumi.stack.ranks import Ranks, Result, whole_tensor
from cogumi.telemetry.heartbeat import measure_run
from cogumi.telemetry.throughput import Meter
from cogumi.training.loop import fit

log = logging.getLogger("cogumi")
ACCELERATE = Path(__file__).parents[1] / "accelerate"  # the configs that come with the package
ON_CPU = {"ACCELERATE_TORCH_DEVICE": "cpu"}  # else "cpu:0", onto which torch loads no optimizer


def processes_here() -> int:
    """How many processes this one trains with."""
    return max(1, count_launched(os.environ))


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
    if processes_here() == 1:
        if run.cogumi.sharding != "none":
            what = f"{run.cogumi.sharding} shares the model among several processes, and there is one GPU"
            raise UsageError(what, key="cogumi.sharding", fix="drop it")
        return {}
    given = "fsdp2" if environment.get("ACCELERATE_USE_FSDP") == "true" else "none"
    if given != run.cogumi.sharding and given != "none":
        what = f"the launcher shards by {given}, and cogumi.sharding is {run.cogumi.sharding}"
        raise UsageError(what, key="cogumi.sharding", fix=f"set it to {given}, or leave accelerate's config file out")
    on_cpu, shared = not torch.cuda.is_available(), run.cogumi.sharding != "none"
    wanted = read_accelerate(run.cogumi.sharding) if shared else {}
    if shared and on_cpu:
        shard_without_gpu()
    found = {name: value for name, value in wanted.items() if name not in environment}
    # A launcher's config does not change the arithmetic of a run: TRL's arguments set it where the run has bf16.
    return found | {"ACCELERATE_MIXED_PRECISION": "no"} | (ON_CPU if on_cpu else {})


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
                for _ in gather_trained(trainer.model):  # together with the first, which keeps them
                    pass
            del trainer
        return ranks.hear()
