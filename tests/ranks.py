"""Trainings in several processes over gloo, on the CPU. As a module of its own it is one of them: `python -m ranks`."""

import json
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import prepared_process

from cogumi.patches.trl_internals import GENERATE_TURN, SAVE_RNG_STATE

TESTS = Path(__file__).parent


# accelerate's settings of FSDP2 for the tiny Llama, as its launcher gives them.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}  # fmt: skip
# DeepSpeed's. Of a model of this size it would keep every weight whole, but for the last setting.
ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0,
    },
}  # fmt: skip


def start_ranks(count: int, directory: Path, **how: Any) -> list[subprocess.Popen[str]]:
    """A training on each of `count` ranks, with the variables that torchrun gives. how: of `train_rank`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")])
    alone = os.environ | {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    # accelerate calls the device of several processes "cpu:0", onto which torch loads no optimizer.
    alone["ACCELERATE_TORCH_DEVICE"] = "cpu"
    ranks = []
    for rank in range(count):
        launched = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        }  # fmt: skip
        if how.get("sharded"):
            launched |= FSDP2
        if how.get("zero3"):
            launched["DS_ACCELERATOR"] = "cpu"
        environment = alone | ({} if count == 1 else launched | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        words = [*prepared_process.python(environment), "-m", "ranks", str(directory), json.dumps(how)]
        with (directory / f"said-{rank}").open("w") as said:
            ranks.append(subprocess.Popen(words, env=environment, stdout=said, stderr=said, text=True))
    return ranks


def finish(ranks: list[subprocess.Popen[str]], directory: Path, seconds: float = 240) -> list[int]:
    """The exit status of each rank, negative for a signal, once all have ended. What they print is in said-RANK."""
    try:
        return [rank.wait(timeout=seconds) for rank in ranks]
    finally:
        for number, rank in enumerate(ranks):
            if rank.poll() is None:
                os.kill(pid_of(directory, number), 9)


def pid_of(directory: Path, rank: int) -> int:
    return int((directory / f"pid-{rank}").read_text())


def said(directory: Path, rank: int) -> str:
    return (directory / f"said-{rank}").read_text()


def losses(directory: Path, rank: int = 0) -> dict[int, float]:
    """The logged loss of each step, by the newest training in the directory."""
    parsed = json.loads((directory / f"losses-{rank}.json").read_text())
    return {int(step): loss for step, loss in parsed.items()}


# Of the steps of a method's trainer on one process; two have half as many examples each.
LORA = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.0}
SHARED: dict[str, Any] = {
    "max_steps": 8, "logging_steps": 1, "save_steps": 4, "learning_rate": 1e-3, "report_to": "none", "use_cpu": True,
    "bf16": False, "disable_tqdm": True, "per_device_train_batch_size": 4, "gradient_checkpointing": False,
}  # fmt: skip


def trl_trainer(
    method: str, model: Path, output_dir: Path, whole: bool = False, tokens: int = 0, **options: Any
) -> Any:
    """TRL's trainer of a method, with an adapter. Its completions, for gspo, depend on the prompt alone.

    For sft: whole, every weight is trained; tokens, of each row, where all are as long."""
    import cogumi

    cogumi.patch(accept=["wide-clip"])
    import peft
    import polars as pl
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cogumi.data.stdlib_sample import sample_path

    torch.manual_seed(1)
    texts = [text[:90] for text in pl.read_parquet(sample_path())["source"].head(64)]
    rows: dict[str, list[Any]] = {"prompt": [text[:20] for text in texts]}
    settings = SHARED | {"output_dir": str(output_dir)} | options
    given: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        "processing_class": AutoTokenizer.from_pretrained(model),
        "peft_config": peft.LoraConfig(**LORA),
    }
    if method == "sft":
        rows = {"text": [text[: 40 + i % 50] for i, text in enumerate(texts)]}
        if tokens:
            rows = {"input_ids": [[5] * tokens] * len(texts), "completion_mask": [[1] * tokens] * len(texts)}
        given["peft_config"] = None if whole else given["peft_config"]
        return trl.SFTTrainer(args=trl.SFTConfig(**settings), train_dataset=Dataset.from_dict(rows), **given)
    if method == "dpo":
        rows |= {"chosen": [text[20:50] for text in texts], "rejected": [text[50:80][::-1] for text in texts]}
        return trl.DPOTrainer(args=trl.DPOConfig(**settings), train_dataset=Dataset.from_dict(rows), **given)
    # A wide clip, so that the second pass over a rollout has a gradient.
    more = {"num_generations": 2, "max_completion_length": 8, "loss_type": "gspo", "num_iterations": 2, "epsilon": 0.5}
    trainer = trl.GRPOTrainer(
        args=trl.GRPOConfig(**more | settings),
        train_dataset=Dataset.from_dict(rows),
        reward_funcs=lambda completion_ids, **_: [sum(token % 2 for token in ids) for ids in completion_ids],
        **given,
    )
    size = trainer.model.get_input_embeddings().num_embeddings

    def complete(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        seen: Counter[int] = Counter()  # of one prompt the completions differ
        collected = []
        for ids in prompt_ids:
            draw = random.Random(1000 * sum(ids) + seen[sum(ids)])
            seen[sum(ids)] += 1
            collected.append([draw.randrange(3, size) for _ in range(draw.randrange(3, 8))])
        return collected, None

    setattr(trainer, GENERATE_TURN, complete)
    return trainer


def train_rank(
    directory: Path,
    method: str = "",
    model: str = "",
    protected: bool = True,
    sharded: bool = False,
    zero3: bool = False,
    on_full: str = "continue",
    mirror: str | None = None,
    dropout: float = 0.1,
    fails_at: int | None = None,
    cannot_save: int | None = None,
    signalled_at: tuple[int, int, int] | None = None,
    nan_at: tuple[int, int] | None = None,
    evaluates: bool = False,
    resume: str | None = None,
    **options: Any,
) -> None:
    """Train the tiny model of the checkpoints' tests, or `model` by TRL's trainer of `method`; write down losses and weights.

    fails_at: the step after which every rank raises.
    cannot_save: the rank whose random states cannot be written. evaluates: the held-out loss before the training.
    signalled_at: (step, rank, signal) after which that rank has the signal. nan_at: (step, rank) of a loss that is NaN.
    resume: from that checkpoint, with nothing that protects. options: of the arguments.
    """
    import logging

    from safetensors.torch import save_file
    from test_checkpoints_protect import SIZES, Losses, make, stop_after
    from transformers import TrainerCallback

    from cogumi import protect

    logging.basicConfig(level=logging.INFO)
    rank = os.environ.get("RANK", "0")
    (directory / f"pid-{rank}").write_text(str(os.getpid()))

    class Signalled(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert signalled_at is not None
            step, receiver, number = signalled_at
            if (state.global_step, args.process_index) == (step, receiver):
                os.kill(os.getpid(), number)

    SIZES["attention_dropout"] = dropout
    if sharded or zero3:  # which accelerate ignores where it takes a CPU for one; gloo does all that they ask for
        from accelerate import PartialState
        from accelerate.utils import DistributedType

        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]
        options["use_cpu"] = False
    if zero3:
        options["deepspeed"] = ZERO3
    callbacks: list[Any] = [stop_after(fails_at)] if fails_at else []
    callbacks += [Signalled()] if signalled_at else []
    if method:
        trainer, seen = trl_trainer(method, Path(model), directory / "run", **options), Losses()
        for each in (seen, *callbacks):
            trainer.add_callback(each)
    else:
        trainer, seen = make(directory / "run", *callbacks, **options)
    if rank == str(cannot_save):
        setattr(trainer, SAVE_RNG_STATE, lambda *_: 1 / 0)
    if nan_at:
        compute_loss = trainer.compute_loss
        trainer.compute_loss = lambda *given, **named: (
            compute_loss(*given, **named)
            * (float("nan") if nan_at == [trainer.state.global_step + 1, trainer.args.process_index] else 1)
        )
    if protected:
        protect(trainer, on_full=on_full, mirror=mirror)
    if evaluates:
        trainer.evaluate(trainer.train_dataset)
    (directory / f"ready-{rank}").touch()
    try:
        trainer.train(resume_from_checkpoint=resume)
        if sharded and seen.seen:  # and not the end of a training, which is loaded as it is
            kinds = {type(parameter).__name__ for parameter in trainer.model.parameters()}
            assert kinds == {"DTensor"}, kinds
        if zero3:
            assert all(parameter.numel() < parameter.ds_numel for parameter in trainer.model.parameters())
    finally:
        (directory / f"losses-{rank}.json").write_text(json.dumps(seen.seen))
    trained = {name: whole(weight) for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    save_file(trained, directory / f"weights-{rank}.safetensors")


def whole(weight: Any) -> Any:
    """Of a sharded parameter all processes ask for it together."""
    from torch.distributed.tensor import DTensor

    if hasattr(weight, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(weight):
            return weight.detach().clone()
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().contiguous()


if __name__ == "__main__":
    train_rank(Path(sys.argv[1]), **json.loads(sys.argv[2]))
