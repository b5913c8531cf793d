"""What a GSPO trainer's sampler does in settings of which each engine has its own code: transformers' generate, or vLLM.

`python tests/sampler_scenarios.py ENGINE BASE FILE ROLE...` builds each role's trainer as a run does, plays, and writes
what was seen to FILE as JSON. A process starts one engine of vLLM and no second one, so it plays one role there.
BASE: a directory from `write_base`.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from exact_logps import TEMPERATURE, Exact, before_in_order

from cogumi.core.errors import UsageError

SMALL_BASE = Path(__file__).parents[1] / "cogumi" / "models" / "small-base"
# In the places of the small base's control tokens, so that its weights stay what they are.
CONTROLS = {2: "<think>", 3: "</think>", 4: "<mark>", 5: "<|im_start|>", 6: "<|im_end|>", 7: "<eot>"}
PAD, THOUGHT_ENDS, MARK, ENDS = (
    1,
    3,
    4,
    (0, 6, 7),
)  # ENDS: of the tokenizer's files, of generation_config.json, of the run's tokenizer
LENGTH, CONTEXT = 24, 256
ENDING = {6: 14.0, 7: 14.0}  # added to logits; transformers takes no bias of token 0
COLD = 0.01  # vLLM samples at no lower temperature above 0
WORDS = ("add", "sub", "mul", "find", "put", "take", "count", "read", "write", "open", "close", "sort")
PROMPTS = [f"def {one}_{other}(a, b):\n" for one, other in pairwise(WORDS)][:8]
ANSWER = " no, again: "


def write_base(directory: Path) -> None:
    """The small base with a tokenizer and a chat template that know thoughts, and with two end tokens."""
    from trl.chat_template_utils import qwen3_chat_template

    shutil.copytree(SMALL_BASE, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    names = {token["content"]: CONTROLS.get(token["id"], token["content"]) for token in tokenizer["added_tokens"]}
    for token in tokenizer["added_tokens"]:
        token["content"] = names[token["content"]]
        token["special"] = token["id"] not in (2, 3)
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = [CONTROLS[number] for number in (4, 5, 6, 7)]
    generation = json.loads((directory / "generation_config.json").read_text()) | {"eos_token_id": list(ENDS[:2])}
    for name, content in (("tokenizer", tokenizer), ("tokenizer_config", settings), ("generation_config", generation)):
        (directory / f"{name}.json").write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(qwen3_chat_template)


def letters(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in texts]


class Again:
    """Answers twice, and pays for letters."""

    def reset(self, **record: Any) -> None:
        self.heard: list[str] = []

    def respond(self, text: str) -> str | None:
        self.heard.append(text)
        return ANSWER if len(self.heard) <= 2 else None

    def get_reward(self) -> float:
        return sum(map(str.isalpha, "".join(self.heard))) / max(1, len("".join(self.heard)))


# --------------------------------------------------------------------------------------------------------- one trainer


def build(engine: str, base: str, seed: int = 1, dtype: str = "float32", train: Any = (), **ours: Any) -> Any:
    """(run, trainer), as `cogumi train` builds them, on conversations of one message."""
    import cogumi

    cogumi.patch(backend="trl")
    from datasets import Dataset
    from transformers import AutoTokenizer

    from cogumi.config.schema import load_config
    from cogumi.methods import gspo
    from cogumi.methods.building import trl_arguments
    from cogumi.models.adapters import lora_config
    from cogumi.models.loading import load_model
    from cogumi.patches.vllm_engine import engine_options

    sampler = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": CONTEXT} if engine == "vllm" else {}
    sampler |= {"vllm_gpu_memory_utilization": 0.1, "vllm_importance_sampling_correction": False} if sampler else {}
    settings = {
        "seed": seed,
        "temperature": TEMPERATURE,
        "max_completion_length": LENGTH,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "max_steps": 1,
        "learning_rate": 1e-4,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
    }
    own = {"method": "gspo", "backend": "trl", "rewards": [f"{__file__}:letters"], "behaviour_logps": "rollout"}
    run = load_config(
        {
            "model": {"name": base, "dtype": dtype},
            "data": {"source": "unread.jsonl", "format": "prompt_completion"},
            "lora": {"r": 4, "lora_dropout": 0.0},
            "train": settings | sampler | dict(train),
            "cogumi": own | {"run_dir": tempfile.mkdtemp(), "merge": False} | ours,
        }
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
    if "environment" in ours:
        from boxes import Boxes  # type: ignore[import-not-found]

        rows = Boxes.rows
    else:
        tokenizer.eos_token = CONTROLS[ENDS[2]]  # as of a tokenizer that was saved with an adapter
    with engine_options(enforce_eager=True):  # compiling takes longer than all that is sampled here
        trainer = gspo.build_trainer(
            run,
            model=load_model(base, dtype, None, None),
            args=trl_arguments(run),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=None,
            processing_class=tokenizer,
            peft_config=lora_config(run.lora, None),
        )
    return run, trainer


@contextmanager
def changed(trainer: Any, bias: dict[int, float] | None = None, **settings: Any) -> Iterator[None]:
    """The trainer as it was, once the block is left; in it with other sampling settings, by TRL's names."""
    engine = trainer.vllm_generation if trainer.use_vllm else trainer.generation_config
    before = [(each, vars(each).copy()) for each in (trainer, trainer.args, engine)]
    trainer.eos_token_ids, trainer.reward_funcs = [*trainer.eos_token_ids], [*trainer.reward_funcs]
    if trainer.use_vllm:
        engine.generation_kwargs = {**engine.generation_kwargs, **({"logit_bias": bias} if bias else {})}
    else:
        trainer.generation_kwargs = dict(trainer.generation_kwargs)
        engine.sequence_bias = [[[token], float(value)] for token, value in bias.items()] if bias else None
    for name, value in settings.items():
        setattr(
            engine, {"max_completion_length": "max_new_tokens"}.get(name, name) if not trainer.use_vllm else name, value
        )
        setattr(trainer, name, value)
    try:
        yield
    finally:
        for each, attributes in before:
            vars(each).clear()
            vars(each).update(attributes)


def sample(trainer: Any, prompts: list[Any], bias: dict[int, float] | None = None, **settings: Any) -> dict[str, Any]:
    """A rollout of these prompts, ready for the loss: ids and their prompts, what is learned of them, lengths as logged."""
    with changed(trainer, bias, **settings):
        return rollout(trainer, prompts)


def rollout(trainer: Any, prompts: list[Any]) -> dict[str, Any]:
    trainer.model.train()
    trainer._metrics["train"].clear()
    batch = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in prompts])
    result = read(batch)
    names = ("clipped_ratio", "mean_terminated_length", "max_terminated_length")
    logged = trainer._metrics["train"]
    return result | {"logged": {name: logged[f"completions/{name}"][-1] for name in names}, "all": dict(logged)}


def read(batch: dict[str, Any]) -> dict[str, Any]:
    """The rows of a rollout as lists, without padding. learned: 0 of a token outside of the loss."""
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    found: dict[str, Any] = {"prompts": [], "ids": [], "learned": [], "logps": []}
    for at, ids in enumerate(batch["completion_ids"]):
        found["prompts"].append(batch["prompt_ids"][at][batch["prompt_mask"][at].bool()].tolist())
        end = int((ids != PAD).sum())  # a completion that TRL masks is wanted too
        found["ids"].append(ids[:end].tolist())
        found["learned"].append(mask[at][:end].tolist())
        found["logps"].append(batch["sampling_per_token_logps"][at][:end].tolist())
    return found


def set_adapter(trainer: Any) -> None:
    """The same adapter whatever was trained before."""
    numbers = torch.Generator().manual_seed(0)
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=numbers) * 0.03
    trainer._last_loaded_step = -1  # TRL hands weights to the engine once a step


# --------------------------------------------------------------------------------------------------------------- roles


def begin(engine: str, base: str, seed: int, **ours: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(run, trainer, what was seen) of one step with the sampler's own log-probabilities; then a fixed adapter is on."""
    from cogumi.patches.trl_internals import observe_rollouts

    run, trainer = build(engine, base, seed, thinking=True, **ours)
    batches: list[dict[str, Any]] = []

    def note(make: Callable[..., Any], inputs: Any) -> Any:
        batches.append(make(inputs))
        return batches[-1]

    with changed(trainer):
        observe_rollouts(trainer, note)
        exact = Exact(trainer)  # LoRA begins at 0
        trainer.train()
        row = next(row for row in trainer.state.log_history if "policy/max_ratio" in row)
    first = read(batches[0])
    ratio = max(row["policy/max_ratio"] - 1, 1 - row["policy/min_ratio"])
    seen = first | {"difference": exact.difference(first), "ratio": ratio, "unscored": row["sampling/unscored_tokens"]}
    seen["off_temperature"] = exact.difference(first, temperature=1.0)
    set_adapter(trainer)
    return run, trainer, seen


def play_ends(engine: str, base: str) -> dict[str, Any]:
    """Where completions end: end tokens, stop texts, lengths; and greedy ones."""
    from cogumi.rl.sampling import stop_rollouts_at, strip_stops

    _, trainer, first = begin(engine, base, 1)
    exact, found = Exact(trainer), {"first": first}
    for name, settings, gap in (("greedy", {"top_k": 1}, 1e-4), ("cold", {"temperature": COLD}, 20 * COLD)):
        found[name] = sample(trainer, PROMPTS, **settings)
        found[name]["missed"] = exact.missed(found[name], gap)
    found["short"] = sample(trainer, PROMPTS, max_completion_length=5)
    found["ends"] = sample(trainer, PROMPTS * 4, bias=ENDING)
    found["ends"]["difference"] = exact.difference(found["ends"], ENDING)
    with changed(trainer):
        near = [(list(range(at, 250)) * 2)[: CONTEXT - LENGTH] for at in range(10, 26)]
        found["near"] = trainer._generate_single_turn(near, None, {}, 1)[0]
    cases = {
        "text": (["e", "\n\n"], {}, False),
        "token": ([CONTROLS[MARK]], {MARK: 13.0}, False),
        "both": (["e", CONTROLS[MARK]], {MARK: 15.5}, False),
        "token in a text": ([" " + CONTROLS[MARK], "e" + CONTROLS[MARK]], {MARK: 15.5}, False),
        "masked": ([CONTROLS[MARK]], {MARK: 13.0}, True),
    }
    for name, (stops, bias, masks) in cases.items():
        rewarded: list[str] = []

        def note(completions: list[str], rewarded: list[str] = rewarded, **_: Any) -> list[float]:
            rewarded += completions
            return [float(len(text)) for text in completions]

        with changed(trainer, bias):
            trainer.reward_funcs = [strip_stops(note, stops)]
            trainer.args.mask_truncated_completions = trainer.mask_truncated_completions = masks
            stop_rollouts_at(trainer, stops)
            rolled = rollout(trainer, PROMPTS * 2)
        written = [[token for token in ids if token not in ENDS] for ids in rolled["ids"]]
        texts = trainer.processing_class.batch_decode(written)
        before = trainer.processing_class.batch_decode([ids[:-1] for ids in rolled["ids"]])
        found[f"stop: {name}"] = rolled | {"stops": stops, "texts": texts, "before": before, "rewarded": rewarded}
    with changed(trainer):
        trainer.args.mask_truncated_completions = True
        found["refused"] = refusal(lambda: stop_rollouts_at(trainer, ["e"]))
    return found


def refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except UsageError as error:
        return str(error)
    return ""


def play_turns(engine: str, base: str) -> dict[str, Any]:
    """Dialogues with an environment that answers in text; the second process with the first seed."""
    from cogumi.environments.dialogue import Dialogue
    from cogumi.environments.loading import Task
    from cogumi.rl.guards import rollout_context

    _, trainer, first = begin(engine, base, 1)
    exact, found, bias = Exact(trainer), {"first": first}, ENDING
    context = rollout_context(trainer.model.config, trainer.args)[0] if trainer.use_vllm else CONTEXT
    cases: dict[str, tuple[list[str], int | None, dict[str, Any]]] = {
        "greedy": (PROMPTS, None, {"top_k": 1}),
        "free": (PROMPTS, None, {}),
        "turns": (PROMPTS, 1, {}),
        "tokens": (PROMPTS, None, {"max_completion_length": 16}),
        "context": (["\n".join(PROMPTS) * 2 + prompt for prompt in PROMPTS], None, {}),
    }
    for name, (prompts, turns, settings) in cases.items():
        with changed(trainer, bias, **{"max_completion_length": 72, **settings}):
            trainer.args.max_tool_calling_iterations = turns
            dialogue = Dialogue(Task("Again", Again), None, dict, lambda text: text, context)
            trainer.reward_funcs, trainer.reward_func_names = [dialogue.own_reward()], ["Again"]
            dialogue.attach(trainer)
            rolled = rollout(trainer, prompts)
            rolled["heard"] = [environment.heard for environment in dialogue.environments]
            rolled["cut"] = [episode.cut for episode in dialogue.episodes]
        rolled["difference"] = exact.difference(rolled, bias)
        found[name] = rolled
    found["said"] = trainer.processing_class(ANSWER)["input_ids"]
    return found


def play_cuts(engine: str, base: str) -> dict[str, Any]:
    """Another seed; what top-p and its like leave to sample from, and what is refused of them; thoughts."""
    from cogumi.methods import gspo
    from cogumi.rl.guards import guard_trainer

    run, trainer, first = begin(engine, base, 2)
    exact, found = Exact(trainer), {"first": first}
    cuts: dict[str, tuple[float, Callable[[torch.Tensor], torch.Tensor]]] = {
        "top_p": (0.6, lambda p: before_in_order(p) < 0.6 + 1e-6),
        "top_k": (5, lambda p: p >= p.sort(descending=True).values[4] * (1 - 1e-5)),
        "min_p": (0.2, lambda p: p >= 0.2 * p.max() * (1 - 1e-5)),
    }
    everything = sample(trainer, PROMPTS)
    for name, (value, cut) in cuts.items():
        rolled = sample(trainer, PROMPTS, **{name: value})
        found[name] = {"outside": exact.outside(rolled, cut), "outside_without": exact.outside(everything, cut)}
        said = {}
        for case in (True, False, "rollout"):  # whether TRL corrects, and with the sampler's own as the old ones
            with changed(trainer):
                setattr(trainer.args, name, value)
                trainer.args.vllm_importance_sampling_correction = case is True
                trainer.cogumi_behaviour_logps = "rollout" if case == "rollout" else "trainer"
                said[str(case)] = refusal(lambda: guard_trainer(trainer))
        found[name]["refused"] = said
    chats = [row["prompt"] for row in trainer.train_dataset]
    for flag in (True, False):
        rewarded: list[str] = []

        def note(completions: list[Any], rewarded: list[str] = rewarded, **_: Any) -> list[float]:
            rewarded += [completion[-1]["content"] for completion in completions]
            return [float(len(completion)) for completion in completions]

        with changed(trainer, {THOUGHT_ENDS: 12.5}):
            trainer.args.chat_template_kwargs = None
            gspo.apply_thinking(flag, trainer.args, trainer.processing_class)
            trainer.chat_template_kwargs = trainer.args.chat_template_kwargs
            thinking = run.model_copy(update={"cogumi": run.cogumi.model_copy(update={"thinking": flag})})
            trainer.reward_funcs = gspo.graded_as_seen(thinking, [note], trainer.processing_class)
            rolled = rollout(trainer, chats * 2)
        texts = trainer.processing_class.batch_decode(rolled["ids"], skip_special_tokens=True)
        found[f"thinking: {flag}"] = rolled | {"rewarded": rewarded, "texts": texts}
    return found


def play_head(engine: str, base: str, wide: bool) -> dict[str, Any]:
    """In bfloat16: how far the sampler's log-probabilities are from the trainer's, with and without a head in float32."""
    from cogumi.patches.vllm_engine import head_dtype
    from cogumi.rl.sampling import compute_trainer_logps

    _, trainer = build(engine, base, dtype="bfloat16", thinking=True, fp32_lm_head=wide)
    set_adapter(trainer)
    trainer.model.train()
    away = []
    for _ in range(3):
        batch = trainer._generate_and_score_completions([{"prompt": each} for each in PROMPTS * 2])
        batch["old_per_token_logps"] = None  # which are the sampler's
        trained = compute_trainer_logps(trainer, batch, "train")
        away.append((trained - batch["sampling_per_token_logps"])[batch["completion_mask"].bool()].abs())
    dtype = head_dtype(trainer.vllm_generation) if trainer.use_vllm else None
    logged = trainer._metrics["train"].get("sampling/sampling_logp_difference/mean", [])
    return {"mean": float(torch.cat(away).mean()), "logged": logged, "dtype": str(dtype)}


def play_tools(engine: str, caller: str) -> dict[str, Any]:
    """Episodes with a tool, in the directory of `boxes.py` and the model that was taught the call."""
    sys.path.insert(0, str(Path.cwd()))
    train = {
        "temperature": 1.0,
        "max_completion_length": 176,
        "max_tool_calling_iterations": 1,
        "vllm_max_model_length": 512,
    }
    if engine == "transformers":
        del train["vllm_max_model_length"]
    _, trainer = build(engine, caller, train=train, rewards=[], environment="boxes.py:Boxes")
    exact, collected = Exact(trainer), {}
    rows = list(trainer.train_dataset)
    for name, settings in {"greedy": {"top_k": 1}, "free": {}, "tokens": {"max_completion_length": 40}}.items():
        with changed(trainer, **settings):
            trainer.model.train()
            trainer._metrics["train"].clear()
            rolled = read(trainer._generate_and_score_completions(rows))
            logged = {key: values[-1] for key, values in trainer._metrics["train"].items()}
            rewards = list(trainer._logs["rewards"]["Boxes"])[-len(rows) :]
            opened = [environment.opened for environment in trainer.environments]
        rolled |= {"logged": logged, "rewards": rewards, "opened": opened}
        outside = [
            [token for token, one in zip(*each, strict=True) if not one]
            for each in zip(rolled["ids"], rolled["learned"], strict=True)
        ]
        rolled["heard"] = trainer.processing_class.batch_decode(outside)
        rolled["difference"] = exact.difference(rolled, temperature=1.0)
        collected[name] = rolled
    return collected


ROLES: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "ends": play_ends,
    "turns": play_turns,
    "cuts": play_cuts,
    "head": lambda engine, base: play_head(engine, base, False),
    "wide head": lambda engine, base: play_head(engine, base, True),
    "tools": play_tools,
}


def main(engine: str, base: str, file: str, *roles: str) -> None:
    collected = {role: ROLES[role](engine, base) for role in roles}
    Path(file).write_text(json.dumps(collected))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
