"""One sampler beside its trainer, in a process of its own: TRL's GRPOTrainer on the small base, with or without vLLM's engine.

The functions are what `benchmarks.sampler` has its processes do. Two engines cannot follow each other in one process. What
they return is plain numbers and NumPy arrays: log-probabilities in nats, (B, T) for B completions of up to T tokens.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import trl
from datasets import Dataset
from numpy.typing import NDArray
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

import cogumi
from cogumi.models.small_base import small_base_path
from cogumi.patches import replaced, vllm_engine
from cogumi.patches.trl_internals import MAKE_ROLLOUT
from cogumi.patches.vllm_engine import adapter_options, engine_options, generation_class, head_dtype, score
from cogumi.rl.fp32_head import fp32_lm_head
from cogumi.rl.sampling import compute_trainer_logps, mean_absolute, score_by_base, score_by_trainer, use_rollout_logps

Array = NDArray[Any]
Adapter = dict[str, Array]  # the trained parameters by name, in float32

RANK, ALPHA = 8, 16
PROMPTS = [
    f"def {verb}_{noun}({argument}):\n"
    for verb, noun, argument in zip(
        ("add", "get", "read", "find", "make", "set", "write", "check", "parse", "sort", "count", "load"),
        ("items", "name", "file", "index", "list", "value", "lines", "type", "text", "keys", "words", "data"),
        ("a, b", "self", "path", "x, n", "size", "self, value", "f, rows", "obj", "s", "d", "text", "path, mode"),
        strict=True,
    )
]
GROUP = 8  # completions of a prompt
TOKENS = 64  # of a completion, at most
TRAINED, RATE = 20, 5e-4  # steps of the adapter, and its constant learning rate
AGES = (1, 4, 16)  # by how many steps the weights of a sampler are too old
TEXTS, TEXT = 4, 48  # texts that both score, and the tokens of each
SMALL = (0.1, 0.001)  # parts of a training step


@dataclass(frozen=True)
class Case:
    sampler: str  # "transformers", "vLLM merged" or "vLLM adapter"
    dtype: str
    fp32_head: bool = False
    compiled: bool = False  # as in a run; making the graphs takes half a minute, so that most cases are without

    @property
    def name(self) -> str:
        return f"{self.sampler}, {self.dtype}{', fp32 head' if self.fp32_head else ''}{', compiled' if self.compiled else ''}"


def reward(completions: list[str], **columns: Any) -> list[float | None]:
    return [each.count("e") / max(1, len(each)) for each in completions]


def make_trainer(case: Case, folder: str, prompts: int, **more: Any) -> Any:
    """A GRPOTrainer whose rollout is `prompts` x GROUP completions. more: of GRPOConfig."""
    cogumi.patch()
    with_vllm = case.sampler != "transformers"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}  # TRL takes 29500 where two start at once
    engine: dict[str, Any] = {"enforce_eager": not case.compiled}
    if case.fp32_head:
        engine["hf_overrides"] = {"head_dtype": "float32"}
    if case.sampler == "vLLM adapter":
        engine |= adapter_options(RANK)
    settings: dict[str, Any] = {
        "loss_type": "gspo", "num_generations": GROUP, "per_device_train_batch_size": prompts * GROUP,
        "steps_per_generation": 1, "max_completion_length": TOKENS, "bf16": False, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    if with_vllm:
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1}
        settings |= {"vllm_max_model_length": 2 * TOKENS, "vllm_importance_sampling_mode": "token_truncate"}
        settings |= {"vllm_importance_sampling_clip_max": 2.0}
    path = small_base_path()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, case.dtype))
    with engine_options(**engine):
        trainer: Any = trl.GRPOTrainer(
            model,
            reward_funcs=reward,
            args=trl.GRPOConfig(folder, **settings | more),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * 64}),
            processing_class=AutoTokenizer.from_pretrained(path),
            peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0),
        )
    if case.fp32_head:
        fp32_lm_head(trainer)
    if not with_vllm and not more:
        use_rollout_logps(trainer)
    trainer.model.train()
    return trainer


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def trained_parameters(model: Any) -> Adapter:
    return {name: each.detach().float().numpy().copy() for name, each in model.named_parameters() if each.requires_grad}


def set_adapter(model: Any, adapter: Adapter) -> None:
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name in adapter:
                each.copy_(torch.from_numpy(adapter[name]))


def between(old: Adapter, new: Adapter, part: float) -> Adapter:
    """The adapter at `old` + part x (`new` - `old`)."""
    return {name: values + part * (new[name] - values) for name, values in old.items()}


# ---------------------------------------------------------------------------------------------------- what a process does


def train_adapter(seed: int, steps: int) -> dict[int, Adapter]:
    """An adapter of so many steps of GSPO in float32, and as it was AGES steps before. Keys: how long ago."""
    kept: dict[int, Adapter] = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if steps - state.global_step in (0, *AGES):
                kept[steps - state.global_step] = trained_parameters(given["model"])

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "max_steps": steps,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "max_completion_length": 48,
            "seed": seed,
        }
        trainer = make_trainer(Case("transformers", "float32"), folder, 4, **settings)
        trainer.add_callback(Keep())
        trainer.train()
    return kept


def measure_case(case: Case, adapters: list[dict[int, Adapter]], ages: tuple[int, ...], probes: bool) -> dict[str, Any]:
    """Log-probabilities of rollouts by sampler and trainer, one for each adapter and age; greedy agreement; the probe."""
    set_seed(0)
    found: dict[str, Any] = {"rollouts": {age: [] for age in (0, *ages)}, "greedy": [], "probes": []}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, folder, len(PROMPTS))
        if case.sampler != "transformers":
            import vllm  # its package has another name on a CPU, so that its version is not among the libraries

            found["version"] = vllm.__version__
            found["head"] = str(head_dtype(trainer.vllm_generation)).removeprefix("torch.")
        found["adapter"] = {
            str(each.dtype).removeprefix("torch.") for each in trainer.model.parameters() if each.requires_grad
        }
        for adapter in adapters:
            set_adapter(trainer.model, adapter[0])
            for age in (0, *ages):
                found["rollouts"][age].append(make_rollout(trainer, adapter[0], adapter[age]))
            found["greedy"].append(greedy_agreement(trainer, adapter[0]))
            if probes:
                found["probes"].append(probe(trainer, adapter))
        if case.sampler == "vLLM merged" and case.dtype != "float32" and not (case.fp32_head or case.compiled):
            found["drift"] = {who: base_drift(trainer, adapters[0], who == "TRL") for who in ("TRL", "cogumi")}
    return found | {"seconds": time.process_time()}


def make_rollout(trainer: Any, new: Adapter, old: Adapter) -> dict[str, Array]:
    """A rollout that is sampled with the adapter `old` and scored with `new`: (B, T) arrays."""
    set_adapter(trainer.model, old)
    no_other_sync: Any = nullcontext()
    if trainer.use_vllm:
        trainer.vllm_generation.sync_weights()
        set_adapter(trainer.model, new)
        no_other_sync = replaced(trainer.vllm_generation, {"sync_weights": lambda: None})
    with no_other_sync:
        batch = getattr(trainer, MAKE_ROLLOUT)([{"prompt": each} for each in PROMPTS for _ in range(GROUP)])
    sampled = batch["sampling_per_token_logps"]
    if not trainer.use_vllm:
        batch.pop("old_per_token_logps")
    away = compute_trainer_logps(trainer, batch, "train").double() - sampled.double()
    mask = batch["completion_mask"].bool()
    result = {"away": away.numpy(), "mask": mask.numpy()}
    if (weights := batch.get("importance_sampling_ratio")) is not None:
        result["tis"] = weights.numpy()
    return result


@torch.no_grad()
def greedy_agreement(trainer: Any, adapter: Adapter) -> float:
    """The share of a greedy completion's tokens that are the trainer's most probable ones too."""
    tokenizer = trainer.processing_class
    prompts = tokenizer(PROMPTS)["input_ids"]
    if trainer.use_vllm:
        set_adapter(trainer.model, adapter)
        generation = trainer.vllm_generation
        generation.sync_weights()
        warm, generation.temperature = generation.temperature, 0.0
        _, completions, _, _ = generation.generate(prompts, None, 1)
        generation.temperature = warm
    else:
        padded = tokenizer(PROMPTS, padding=True, padding_side="left", return_tensors="pt")
        width = padded["input_ids"].shape[1]
        ends = [tokenizer.eos_token_id]
        rows = trainer.model.generate(**padded, do_sample=False, max_new_tokens=TOKENS, eos_token_id=ends)[:, width:]
        completions = [each[: each.index(ends[0]) + 1] if ends[0] in each else each for each in rows.tolist()]
    same = []
    for prompt, ids in zip(prompts, completions, strict=True):
        logits = trainer.model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits
        same.append(logits[0, len(prompt) - 1 : -1].argmax(-1) == torch.tensor(list(ids)))
    return float(torch.cat(same).double().mean())


def probe(trainer: Any, adapter: dict[int, Adapter]) -> dict[str, Any]:
    """What the check of the sampler sees of an engine that has the right weights, for moves of the adapter of many sizes."""
    generation = trainer.vllm_generation
    lines = [
        trainer.processing_class(each + "    return self.get(name, None)\n\n" * 6)["input_ids"][:TEXT]
        for each in PROMPTS
    ]
    texts = lines[:TEXTS]

    def both(state: Adapter) -> tuple[torch.Tensor, torch.Tensor]:
        set_adapter(trainer.model, state)
        generation.sync_weights()
        sampler = [value for each in score(generation, texts) for value in each]
        return torch.tensor(sampler, dtype=torch.float64), score_by_trainer(trainer.model, texts)

    now = both(adapter[0])
    found: dict[str, Any] = {"difference": mean_absolute(now[0] - now[1]), "moves": {}}
    states = {f"{age}": adapter[age] for age in AGES}
    states |= {f"{part:g}": between(adapter[0], adapter[1], part) for part in SMALL}
    for name, state in states.items():
        then = both(state)
        sampler, trained = now[0] - then[0], now[1] - then[1]
        found["moves"][name] = {
            "moved": mean_absolute(trained),
            "lacking": mean_absolute(sampler - trained) / max(mean_absolute(trained), 1e-12),
            "changed": float((sampler != 0).double().mean()),
        }
    set_adapter(trainer.model, adapter[0])
    return found


def base_drift(trainer: Any, adapter: dict[int, Adapter], of_trl: bool) -> dict[int, dict[str, float]]:
    """How far the frozen base is from itself after so many rollouts, where each step changes the adapter as the last did."""
    model, random = trainer.model, torch.Generator().manual_seed(0)
    texts = [trainer.processing_class(each + "    return None\n")["input_ids"] for each in PROMPTS]
    set_adapter(model, adapter[0])
    frozen = {name: each.detach().clone() for name, each in model.named_parameters() if ".base_layer." in name}
    logps = score_by_base(model, texts)
    assert logps is not None
    steps = {name: float((each - adapter[1][name]).std()) for name, each in adapter[0].items()}
    # The walk over the parameters that a weight sync makes, without an engine that takes them.
    walk = vllm_engine.METHODS[-1]
    found = {}
    vllm_engine.undo() if of_trl else vllm_engine.apply()
    for count in range(1, 101):
        for name, each in model.named_parameters():
            if name in steps:
                each.data += steps[name] * torch.randn(each.shape, generator=random)
        for _ in getattr(generation_class(), walk)(trainer.vllm_generation):
            pass
        if count in (1, 10, 100):
            now = dict(model.named_parameters())
            changes = [now[name].double() - each.double() for name, each in frozen.items()]
            after = score_by_base(model, texts)
            assert after is not None
            found[count] = {
                "changed": sum(int((each != 0).sum()) for each in changes) / sum(each.numel() for each in changes),
                "relative": norm(changes) / norm(frozen.values()),
                "moved": mean_absolute(after - logps),
            }
    vllm_engine.apply()
    with torch.no_grad():
        for name, each in frozen.items():
            dict(model.named_parameters())[name].copy_(each)
    return found


def norm(tensors: Any) -> float:
    return float(sum(each.double().square().sum() for each in tensors) ** 0.5)


def rounded_effects(adapter: Adapter, sizes: tuple[float, ...]) -> dict[str, Any]:
    """What rounded weights lack of an adapter's effect, in float32 arithmetic, for |dW|/|W| of `sizes`.

    Merged weights are rounded as one sum; apart, A and B are rounded, and base and product are not.
    """
    path = small_base_path()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [tokenizer(each + "    return self.get(name, None)\n")["input_ids"] for each in PROMPTS]
    base, logps = (
        {name: each.detach().clone() for name, each in model.named_parameters()},
        score_by_trainer(model, texts),
    )
    pairs = {}
    for name, values in adapter.items():
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A.default", "")
            pairs[weight] = torch.from_numpy(adapter[name.replace(".lora_A.", ".lora_B.")]), torch.from_numpy(values)
    scale = ALPHA / RANK
    own = norm([scale * b @ a for b, a in pairs.values()]) / norm(base[name] for name in pairs)

    def effect(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            for name, each in model.named_parameters():
                each.copy_(weights.get(name, base[name]))
        return score_by_trainer(model, texts) - logps

    found: dict[str, Any] = {"own": own, "sizes": {}}
    for size in sizes:
        by = scale * size / own
        exact = effect({name: base[name] + by * (b @ a) for name, (b, a) in pairs.items()})
        of_size: dict[str, Any] = {"moved": mean_absolute(exact)}
        for dtype in ("bfloat16", "float16"):
            kind = getattr(torch, dtype)

            def rounded(values: torch.Tensor, kind: torch.dtype = kind) -> torch.Tensor:
                return values.to(kind).float()

            ways = {
                "merged": {name: rounded(base[name] + by * (b @ a)) for name, (b, a) in pairs.items()},
                "apart": {
                    name: base[name] + scale * (rounded(by / scale * b) @ rounded(a)) for name, (b, a) in pairs.items()
                },
            }
            for way, weights in ways.items():
                moved = effect(weights)
                of_size[f"{way}, {dtype}"] = {
                    "lacking": mean_absolute(moved - exact) / mean_absolute(exact),
                    "slope": float(exact @ moved / (exact @ exact)),
                }
        found["sizes"][size] = of_size
    return found


def serve_speed(case: Case, adapter: Adapter, tokens: int, connection: Connection) -> None:
    """Answer "sync" with the seconds of a weight sync, and "rollout" with those of GROUP completions of each prompt."""
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, folder, len(PROMPTS))
        set_adapter(trainer.model, adapter)
        generation = trainer.vllm_generation
        generation.generation_kwargs = {"ignore_eos": True, "max_tokens": tokens}
        prompts = [each for each in trainer.processing_class(PROMPTS)["input_ids"] for _ in range(GROUP)]
        connection.send("ready")
        while (asked := connection.recv()) is not None:
            start = time.perf_counter()
            if asked == "sync":
                generation.sync_weights()
            else:
                generation.generate(prompts, None, GROUP)
            connection.send(time.perf_counter() - start)
