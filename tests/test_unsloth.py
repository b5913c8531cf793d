"""unsloth in the place of TRL's trainer. `make test-unsloth` runs all of this; without unsloth, what needs none of it.

unsloth cannot be taken out of a process again, so whatever imports it runs in a process of its own: this file again,
as a script.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import cogumi
from cogumi.config.schema import TRL_CONFIGS, CogumiSection, DataSection, ModelSection, RunConfig, load_config
from cogumi.core.errors import UsageError
from cogumi.models import unsloth_models
from cogumi.models.loading import read_base
from cogumi.models.unsloth_models import (
    choose_backend,
    compare_adapter,
    compare_model,
    compare_tokenizer,
    is_wanted,
    read_model_type,
)
from cogumi.patches import unsloth_rl

HERE = Path(__file__)
RECORDED = tomllib.loads((HERE.parent / "unsloth_signatures.toml").read_text())
LOSSES = ("grpo", "luspo", "dapo", "dr_grpo")
DECIDED = {
    "loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0, "epsilon": 3e-4, "epsilon_high": 4e-4,
    "learning_rate": 1e-6, "optim": "adamw_torch_fused", "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
}  # fmt: skip
# unsloth trains in bf16 or fp16 mixed precision where both are off, and scales the gradient; this keeps float32.
NO_AUTOCAST = {"UNSLOTH_MIXED_PRECISION": "bfloat16"}
TRY = "try:\n    {}\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
with_unsloth = pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="`make test-unsloth` installs it")


def in_a_process(*words: str, cwd: Path, **environment: str) -> str:
    """Standard output of `python WORDS...` in `cwd`, where unsloth writes its generated modules."""
    names = {"OMP_NUM_THREADS": "1", "UNSLOTH_ON_CPU": "1", "PYTHONPATH": str(HERE.parents[1])} | environment
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=os.environ | names, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


# ----------------------------------------------------------------------------------- as scripts, in processes of their own


MODULES = ["q_proj", "v_proj", "down_proj"]


def plain_model(model_path: str) -> Any:
    """The tiny model in float32 with an adapter, as transformers and peft make it."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)  # peft draws lora_A
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=MODULES, lora_dropout=0.0))


def fast_model(model_path: str) -> Any:
    """The same as unsloth makes it. Its trainer generates with no other: it calls `model.for_inference()`."""
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_path, max_seq_length=128, load_in_4bit=False, dtype=torch.float32
    )
    return FastLanguageModel.get_peft_model(
        model, r=4, target_modules=MODULES, lora_dropout=0, use_gradient_checkpointing=False
    )


def lora_trainer(model: Any, model_path: str, **settings: Any) -> Any:
    """`trl.GRPOTrainer`, whosever it is, with an adapter that is not zero."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    config = trl.GRPOConfig(
        output_dir="run",
        bf16=False,
        report_to="none",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=9,
        temperature=0.8,
        gradient_checkpointing=False,
        **settings,
    )
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["def f(x):", "import os", "return", "a = [1, 2"] * 2}),
        processing_class=AutoTokenizer.from_pretrained(model_path),
    )


def a_batch(tokenizer: Any) -> dict[str, torch.Tensor]:
    """Prompts padded to the left, completions of lengths 9, 5, 1 and 7 to the right; one token is a tool's."""
    generator = torch.Generator().manual_seed(1)
    prompt, completion = torch.tensor([6, 2, 4, 3]), torch.tensor([9, 5, 1, 7])
    prompt_mask = (torch.arange(6) >= 6 - prompt[:, None]).long()
    completion_mask = (torch.arange(9) < completion[:, None]).long()
    ids = torch.randint(10, 900, (4, 15), generator=generator)
    tool_mask = torch.ones_like(completion_mask)
    tool_mask[3, 2] = 0
    return {
        "prompt_ids": torch.where(prompt_mask.bool(), ids[:, :6], tokenizer.pad_token_id),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.where(completion_mask.bool(), ids[:, 6:], tokenizer.pad_token_id),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([1.3, -0.4, 0.7, -1.1]),
        "num_items_in_batch": completion_mask.sum() * 2,
    }


def in_unsloths_layout(old: torch.Tensor, prompt_mask: torch.Tensor) -> torch.Tensor:
    """(B, T) of TRL's columns in unsloth's: rows moved left by their own padding, as wide as the widest."""
    padding = (prompt_mask == 0).sum(-1)
    moved = old.new_zeros(len(old), int(padding.max()) + old.shape[1])
    for row, pad in enumerate(padding.tolist()):
        start = int(padding.max()) - pad
        moved[row, start : start + old.shape[1]] = old[row]
    return moved


def by_token(values: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor | None:
    """The values that count, row after row: the same in both layouts."""
    return None if values is None else values.detach()[mask.bool()]


def run_losses(whose: str, model_path: str, results: str, old_from: str = "") -> None:
    """Every loss once on the same batch; loss, gradient and the captured log-probabilities, saved to `results`."""
    import cogumi
    from cogumi.rl.loss_check import capture_loss_inputs

    if whose == "unsloth":
        assert unsloth_rl.apply().applied
    else:
        cogumi.patch()
    clip = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.0}
    trainer = lora_trainer(plain_model(model_path), model_path, loss_type="grpo", gradient_accumulation_steps=2, **clip)
    inputs = a_batch(trainer.processing_class)
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    if whose == "trl":
        ids, mask = (torch.cat([inputs[f"prompt_{k}"], inputs[f"completion_{k}"]], 1) for k in ("ids", "mask"))
        with torch.no_grad():
            new = trainer._get_per_token_logps_and_entropies(model, ids, mask, 9)[0]
        shift = torch.tensor([[1e-4], [-2e-4], [9e-4], [-8e-4]])  # two rows within the clip, two outside
        noise = torch.randn(new.shape, generator=torch.Generator().manual_seed(2)) * 0.02
        counted = inputs["completion_mask"] * inputs["tool_mask"]
        noise -= (noise * counted).sum(-1, keepdim=True) / counted.sum(-1, keepdim=True)
        old = new + noise - shift
    else:
        old = in_unsloths_layout(torch.load(old_from)["old"], inputs["prompt_mask"])
    outcome: dict[str, Any] = {"old": old, "unheard_is_equal": {}}
    for loss_type in LOSSES:
        trainer.loss_type = trainer.args.loss_type = loss_type
        this = inputs | {"old_per_token_logps": old}
        unheard = trainer.compute_loss(model, dict(this))
        model.zero_grad()
        unheard.backward()
        without = gradients(model)
        model.zero_grad()
        with capture_loss_inputs(trainer, this) as calls:
            loss = trainer.compute_loss(model, this)
        loss.backward()
        (call,) = calls
        outcome[loss_type] = {
            "loss": loss.detach(),
            "gradient": gradients(model),
            "tokens": {k: by_token(getattr(call, k), call.mask) for k in ("new", "old")},
            "arguments": {k: v for k, v in call.arguments.items() if isinstance(v, int | float | str)},
            "function": call.function.__name__,
        }
        same = all(torch.equal(without[name], gradient) for name, gradient in gradients(model).items())
        outcome["unheard_is_equal"][loss_type] = same and torch.equal(loss, unheard)
    torch.save(outcome, results)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run_training(model_path: str, results: str) -> None:
    """GSPO without a KL term and with one, in unsloth's trainer."""
    from cogumi.patches import gspo_loss

    unsloth_rl.apply()
    gspo_loss.apply()
    torch.save({beta: train_watched(model_path, beta) for beta in (0.0, 0.1)}, results)


def train_watched(model_path: str, beta: float) -> dict[str, Any]:
    """Two optimizer steps of two micro-batches each on one rollout of 16, and what the watch over them was given."""
    from cogumi.patches.trl_internals import TOKEN_LOGPS
    from cogumi.rl.loss_check import LossInputs, sequence_log_ratio
    from cogumi.rl.watch import watch

    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2, "logging_steps": 1}
    trainer = lora_trainer(
        fast_model(model_path), model_path, loss_type="gspo", learning_rate=1e-3, beta=beta, **settings
    )
    score, whole_rollouts, seen = getattr(trainer, TOKEN_LOGPS), [], []

    def count_scored(model: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(ids) == 16:
            whole_rollouts.append(len(ids))
        return score(model, ids, *args, **kwargs)

    setattr(trainer, TOKEN_LOGPS, count_scored)
    watching = watch(trainer, f"loss-{beta}.json")
    add = watching.metrics.add

    def record(call: LossInputs, *args: Any) -> None:
        apart = (call.new - call.old_logps()).detach()[call.mask > 0].abs().max().item()
        seen.append({"tokens": apart, "sequences": sequence_log_ratio(call).abs().max().item()} | call.arguments)
        add(call, *args)

    watching.metrics.add = record
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    moved = max(float((p - before[n]).abs().max()) for n, p in trainer.model.named_parameters() if n in before)
    log = [row for row in trainer.state.log_history if "loss" in row]
    return {"seen": seen, "moved": moved, "whole_rollouts": whole_rollouts, "log": log}


def show_config(results: str) -> None:
    """What `loss_type="gspo"` becomes, alone and with values of one's own; what it was asked for by."""
    from cogumi.patches import gspo_loss

    unsloth_rl.apply()
    gspo_loss.apply()
    import trl

    mine = {"beta": 0.1, "learning_rate": 3e-6, "optim": "sgd", "vllm_importance_sampling_correction": False}
    configs = [
        trl.GRPOConfig(output_dir="run", loss_type="gspo"),
        trl.GRPOConfig(output_dir="run", loss_type="gspo", epsilon=1e-3, **mine),
    ]
    values = [{key: vars(config)[key] for key in DECIDED} for config in configs]
    torch.save([v | {"optim": str(v["optim"].value)} for v in values], results)


def run_batch(backend: str, config: str, results: str) -> None:
    """One batch of the run's own trainer, with an adapter of the same values whatever made it: loss, gradients, logits."""
    from cogumi.config.schema import load_config
    from cogumi.runs.entry import import_backend

    run = load_config(json.loads(config), cogumi__backend=backend) if backend == "trl" else None
    if run is None:
        from cogumi.config.schema import read_config

        with import_backend(read_config(json.loads(config), {"cogumi.backend": backend})[0]):
            run = load_config(json.loads(config), cogumi__backend=backend)
    from cogumi.methods import building
    from cogumi.methods.examples import prepare_examples
    from cogumi.methods.preparation import load_run_tokenizer
    from cogumi.models.loading import read_base
    from cogumi.rl.patching import patch
    from cogumi.telemetry.throughput import Meter

    patch(graph_break="off", backend=run.cogumi.backend)
    base = read_base(run.model.name)
    tokenizer = load_run_tokenizer(run, base)
    examples = prepare_examples(run, tokenizer, base.config)
    trainer = building.build_trainer(run, base, tokenizer, examples, Meter(None))
    model = trainer.model.train()
    trained = {name: p for name, p in sorted(model.named_parameters()) if p.requires_grad}
    generator = torch.Generator().manual_seed(0)
    for parameter in trained.values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=(inputs["labels"][:, 1:] != -100).sum())
    loss.backward()
    kinds = [type(module).__name__ for module in model.modules()]
    found = {
        "loss": loss.detach(),
        "gradient": gradients(model),
        "logits": logits,
        "four_bit": kinds.count("Linear4bit"),
    }
    torch.save(found | {"names": list(trained), "unsloth": unsloth_rl.is_in_place()}, results)


def run_defaults(results: str) -> None:
    """The DPO and GSPO arguments of a run, by the config classes that unsloth puts on `trl` on a GPU."""
    cogumi.patch(graph_break="off", backend="unsloth")
    from unsloth.models.rl import PatchFastRL

    PatchFastRL()
    import trl

    from cogumi.config.schema import load_config
    from cogumi.methods.building import trl_arguments

    trl.DPOConfig = sys.modules["UnslothDPOTrainer"].UnslothDPOConfig  # which it does on a GPU alone
    plain = {"dpo": trl.DPOConfig().to_dict()}
    made = {}
    for method in ("dpo", "gspo"):
        run = {"model": {"name": "cogumi:small-base"}, "data": {"source": "x"}, "cogumi": {"method": method}}
        made[method] = trl_arguments(load_config(run)).to_dict()
    Path(results).write_text(json.dumps({"unsloths own": plain, **made}, default=str))


def run_compiled(results: str) -> None:
    """A 4-bit Llama and a gpt-oss with 4-bit experts, compiled beside unsloth's 4-bit layers, with the patch and without."""
    unsloth_rl.apply("unsloth")
    import four_bit_models

    from cogumi.compile.layers import compile_layers
    from cogumi.patches import graph_break
    from cogumi.patches.torch_internals import compiled_functions, dynamo_counts

    found: dict[str, Any] = {"foreign": graph_break.foreign_patches()}
    shapes = {
        "llama": lambda: four_bit_models.tiny_llama(layers=2),
        "gpt-oss": lambda: four_bit_models.gpt_oss(layers=1, experts=3),
    }
    for name, build in shapes.items():
        eager = four_bit_models.step(build())
        for choice in ("off", "auto"):
            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
            torch._dynamo.utils.clear_compilation_metrics()
            model = build()
            graph_break.apply(choice, model)
            compile_layers(model, backend="aot_eager")
            decided = graph_break.verdict()
            assert decided is not None
            found[f"{name} {choice}"] = {
                "apart": abs(four_bit_models.step(model) - eager),
                "strategy": decided.strategy,
                "breaks": dynamo_counts()["breaks"],
                "failed": compiled_functions()[1],
            }
        graph_break.undo()
    Path(results).write_text(json.dumps(found))


def run_plain_beside(model_path: str) -> None:
    """transformers' model after unsloth has put its methods on transformers' classes, as 2026.10.7 leaves them."""
    unsloth_rl.apply("unsloth")
    import unsloth.models.llama as theirs
    from transformers import AutoModelForCausalLM

    def logits() -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        with torch.no_grad():
            return model(torch.arange(10, 40)[None]).logits

    before = logits()
    snapshot = theirs._snapshot_transformers_modules(theirs.FastLlamaModel)
    assert not unsloth_rl.restore_classes("llama")
    theirs.FastLlamaModel.pre_patch()
    theirs._record_pre_patch_changes(snapshot)
    with pytest.raises((AttributeError, TypeError)):
        logits()
    assert unsloth_rl.restore_classes("llama")
    assert torch.equal(logits(), before)


SCRIPTS = {
    "losses": run_losses, "training": run_training, "config": show_config,
    "batch": run_batch, "compiled": run_compiled, "plain": run_plain_beside, "defaults": run_defaults,
}  # fmt: skip


# -------------------------------------------------------------------------------------------------- with unsloth installed


@pytest.fixture(scope="module")
def losses(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What TRL's and unsloth's `compute_loss` made of the same batch, in float32."""
    at = tmp_path_factory.mktemp("losses")
    in_a_process(str(HERE), "losses", "trl", str(tiny_model), "trl.pt", cwd=at, UNSLOTH_ON_CPU="0")
    in_a_process(str(HERE), "losses", "unsloth", str(tiny_model), "unsloth.pt", "trl.pt", cwd=at, **NO_AUTOCAST)
    return torch.load(at / "trl.pt"), torch.load(at / "unsloth.pt")


@with_unsloth
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradient_equal_stock_trls(
    losses: tuple[dict[str, Any], dict[str, Any]], loss_type: str
) -> None:  # reference 14
    ours, theirs = (loss[loss_type] for loss in losses)
    assert theirs["function"] == "UnslothEfficientGRPO"
    torch.testing.assert_close(theirs["loss"], ours["loss"], atol=1e-6, rtol=0)
    assert set(theirs["gradient"]) == set(ours["gradient"])
    assert max(float(gradient.abs().max()) for gradient in ours["gradient"].values()) > 1e-2
    for name, gradient in ours["gradient"].items():
        torch.testing.assert_close(theirs["gradient"][name], gradient, atol=1e-6, rtol=0)


@with_unsloth
@pytest.mark.parametrize("loss_type", LOSSES)
def test_captured_logprobs_equal_what_trl_logs(losses: tuple[dict[str, Any], dict[str, Any]], loss_type: str) -> None:
    ours, theirs = (loss[loss_type] for loss in losses)
    for name in ("new", "old"):
        assert len(ours["tokens"][name]) == 9 + 5 + 1 + 6
        torch.testing.assert_close(theirs["tokens"][name], ours["tokens"][name], atol=2e-6, rtol=0)
    said = {k: v for k, v in theirs["arguments"].items() if k in ours["arguments"]}
    assert said.items() >= {"loss_type": loss_type, "importance_sampling_level": "sequence", "beta": 0.0}.items()
    assert said == {k: ours["arguments"][k] for k in said}


@with_unsloth
def test_capturing_logprobs_changes_no_bit(losses: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert losses[1]["unheard_is_equal"] == dict.fromkeys(LOSSES, True)


@with_unsloth
@pytest.mark.parametrize("precision", [NO_AUTOCAST, {}], ids=["float32", "autocast"])
def test_ratios_are_exactly_one_until_the_first_update(
    precision: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    in_a_process(str(HERE), "training", str(tiny_model), "run.pt", cwd=tmp_path, **precision)
    expected = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4}
    for beta, run in torch.load(tmp_path / "run.pt", weights_only=False).items():
        assert len(run["seen"]) == 4
        assert all(call.items() >= expected.items() for call in run["seen"])
        assert [call["tokens"] for call in run["seen"][:2]] == [0, 0]
        assert all(call["sequences"] > 1e-5 for call in run["seen"][2:])
        assert run["moved"] > 0
        # unsloth scores the rollout only where there is a KL term: the policy, and then the reference.
        assert run["whole_rollouts"] == ([] if beta == 0 else [16, 16])
        checked = json.loads((tmp_path / f"loss-{beta}.json").read_text())
        assert (checked["backend"], checked["asserted"]) == ("unsloth", True)
        first, second = run["log"]
        assert (first["policy/max_ratio"], first["policy/min_ratio"]) == (1, 1)
        assert second["policy/max_ratio"] != 1
        assert (
            first["clip_ratio/region_mean"] == 0
        )  # which the scoring, whose old log-probabilities are 0, is not to log


def sft_config(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run of eight steps on the small base, with a checkpoint at each second one."""
    config: dict[str, Any] = {
        "model": {"name": "cogumi:small-base", "dtype": "float32"},
        "lora": {"r": 4},
        "data": {
            "source": "cogumi:stdlib", "max_rows": 120, "eval_rows": 4,
            "fim": {"max_length": 128, "middle_chars": [8, 32]},
        },
        "train": {
            "max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1,
            "save_steps": 2, "gradient_checkpointing": False,
        },
        "cogumi": {"method": "sft", "backend": "unsloth", "run_dir": str(folder / "run"), "samples_every": 0},
    }  # fmt: skip
    return {name: values | sections.get(name, {}) for name, values in config.items()}


FOUR_BIT = {"model": {"quantization_config": {"load_in_4bit": True}}}


@with_unsloth
@pytest.mark.parametrize("sections", [{}, FOUR_BIT], ids=["float32", "4-bit"])
def test_one_batch_of_a_run_is_that_of_the_trl_backend(sections: dict[str, Any], tmp_path: Path) -> None:
    config = json.dumps(sft_config(tmp_path, **sections))
    for backend in ("trl", "unsloth"):
        in_a_process(
            str(HERE), "batch", backend, config, f"{backend}.pt", cwd=tmp_path, UNSLOTH_ON_CPU="0", **NO_AUTOCAST
        )
    ours, theirs = (torch.load(tmp_path / f"{backend}.pt") for backend in ("trl", "unsloth"))
    assert (ours["unsloth"], theirs["unsloth"]) == (False, True)
    assert ours["four_bit"] == theirs["four_bit"]
    assert (ours["four_bit"] > 0) == (sections == FOUR_BIT)
    assert ours["names"] == theirs["names"]
    assert max(float(gradient.abs().max()) for gradient in ours["gradient"].values()) > 1e-3
    torch.testing.assert_close(theirs["logits"], ours["logits"], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(theirs["loss"], ours["loss"], atol=1e-5, rtol=1e-5)
    assert theirs["gradient"].keys() == ours["gradient"].keys()
    for name, gradient in ours["gradient"].items():
        torch.testing.assert_close(theirs["gradient"][name], gradient, atol=1e-5, rtol=1e-4)


TRAIN = """
import json, sys, cogumi
for config in map(json.loads, sys.argv[1:]):
    result = cogumi.train(config)
    assert result.passed or config["cogumi"].get("sanity"), str(result.verdict)  # too few steps to tell
"""


@with_unsloth
@pytest.mark.parametrize("sections", [{}, FOUR_BIT], ids=["float32", "4-bit"])
def test_a_run_resumes_merges_and_is_started_from(sections: dict[str, Any], tmp_path: Path) -> None:
    """In 4 steps and 4 more it trains the adapter of 8; the merged model's logits are the live one's; another starts there."""
    from safetensors.torch import load_file

    whole = sft_config(tmp_path, **sections)
    checked = sft_config(tmp_path, **sections)
    checked["cogumi"]["sanity"] = 4
    at_once = sft_config(tmp_path / "at-once", **sections)
    in_a_process("-c", TRAIN, json.dumps(checked), cwd=tmp_path, UNSLOTH_ON_CPU="0", **NO_AUTOCAST)
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "sanity checked"
    warm = sft_config(tmp_path / "warm", **sections)
    warm["model"]["adapter"] = str(tmp_path / "run/adapter")
    inputs = [json.dumps(each) for each in (whole, at_once, warm)]
    in_a_process("-c", TRAIN, *inputs, cwd=tmp_path, UNSLOTH_ON_CPU="0", **NO_AUTOCAST)
    resumed, other = (
        load_file(each / "run/adapter/adapter_model.safetensors") for each in (tmp_path, tmp_path / "at-once")
    )
    assert resumed.keys() == other.keys()
    assert all(torch.equal(resumed[name], other[name]) for name in other)
    verdict = json.loads((tmp_path / "run/verdict.json").read_text())
    beside = "(it was trained on nf4)" if sections else "from the live adapter's"
    (logits,) = (check for check in verdict["checks"] if check["name"] == "merged logits")
    assert logits["passed"]
    assert beside in logits["figure"]
    log_text = (tmp_path / "run/run.log").read_text()
    assert "backend: unsloth (cogumi.backend is unsloth)" in log_text
    assert "unsloth: " not in log_text.replace("patched unsloth: ", ""), "nothing was changed"
    started = (tmp_path / "warm/run/run.log").read_text()
    assert f"{len(resumed)} tensors of {tmp_path / 'run/adapter'}" in started
    assert "are in the model bit for bit" in started


@with_unsloth
def test_what_unsloth_changes_is_said(tmp_path: Path) -> None:
    config = sft_config(
        tmp_path,
        model={"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}},
        lora={"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
        train={"packing": True, "max_steps": 1, "save_strategy": "no"},
        cogumi={"merge": False},
    )
    in_a_process("-c", TRAIN, json.dumps(config), cwd=tmp_path, UNSLOTH_ON_CPU="0", **NO_AUTOCAST)
    log_text = (tmp_path / "run/run.log").read_text()
    for line in (
        "model.quantization_config.bnb_4bit_quant_type is nf4, and fp4 was asked for",
        "lora.modules_to_save is ['embed_tokens'], and None was asked for",
        "the adapter is on 12 modules, and 13 were asked for; model.embed_tokens is one that differs",
        "train.packing is False, and True was asked for",
    ):
        assert f"unsloth: {line}" in log_text
    compiling = json.loads((tmp_path / "run/decisions.json").read_text())["compile"]
    assert compiling["strategy"] == "none"
    assert compiling["probes"][0].startswith("a 4-bit layer: one graph")
    assert any("unsloth_zoo" in each for each in compiling["foreign"])
    assert compiling["compiled"].keys() == {"masking_utils.create_causal_mask"}  # of transformers, which unsloth wraps
    assert compiling["failed"] == {}


# What unsloth's classes set whatever they are given; the last needs no GPU here.
SET_BY_UNSLOTH = {"gradient_checkpointing_kwargs", "use_cpu", "dataset_num_proc"}


@with_unsloth
def test_a_run_has_trls_defaults_and_not_those_of_unsloths_classes(tmp_path: Path) -> None:
    in_a_process(str(HERE), "defaults", "found.json", cwd=tmp_path, UNSLOTH_ON_CPU="0")
    from cogumi.methods.building import trl_arguments
    from cogumi.patches import gspo_loss

    gspo_loss.apply()
    parsed = json.loads((tmp_path / "found.json").read_text())
    theirs = parsed.pop("unsloths own")["dpo"]
    assert (theirs["seed"], theirs["gradient_accumulation_steps"], theirs["warmup_steps"]) == (3407, 2, 0.1)
    for method, made in parsed.items():
        run = {"model": {"name": "cogumi:small-base"}, "data": {"source": "x"}, "cogumi": {"method": method}}
        of_trl = json.loads(json.dumps(trl_arguments(load_config(run)).to_dict(), default=str))
        apart = {key for key in of_trl if of_trl[key] != made[key]}
        assert apart <= SET_BY_UNSLOTH, {key: (of_trl[key], made[key]) for key in apart}


@with_unsloth
def test_4_bit_layers_compile_beside_unsloths_with_the_patch(tmp_path: Path) -> None:
    tests = f"{HERE.parents[1]}{os.pathsep}{HERE.parent}"
    in_a_process(str(HERE), "compiled", "found.json", cwd=tmp_path, PYTHONPATH=tests)
    parsed = json.loads((tmp_path / "found.json").read_text())
    assert any(each.startswith("Linear4bit.forward is unsloth_zoo") for each in parsed["foreign"])
    as_it_is, patched = {"strategy": "", "failed": {}}, {"strategy": "branchless", "failed": {}}
    wanted = {
        "llama off": as_it_is, "llama auto": as_it_is | {"strategy": "none"},
        "gpt-oss off": {"strategy": ""}, "gpt-oss auto": patched,
    }  # fmt: skip
    for name, expected in wanted.items():
        assert parsed[name]["apart"] == 0
        assert parsed[name]["breaks"] == {}
        assert parsed[name].items() >= expected.items()
    (why,) = parsed["gpt-oss off"]["failed"].values()  # the experts run uncompiled, and no counter of Dynamo says so
    assert "graph break" in why


@with_unsloth
def test_a_plain_model_runs_beside_unsloths(tiny_model: Path, tmp_path: Path) -> None:
    in_a_process(str(HERE), "plain", str(tiny_model), cwd=tmp_path)


@with_unsloth
def test_trl_is_refused_once_unsloth_is_in_place(tmp_path: Path) -> None:
    output = in_a_process(
        "-c",
        "import cogumi\ncogumi.patch(backend='unsloth')\n" + TRY.format("cogumi.patch(backend='trl')"),
        cwd=tmp_path,
    )
    assert "UsageError cogumi.backend: TRL is to train" in output
    assert "unsloth is in this process already" in output
    assert "restart the kernel" in output


RUN = "import cogumi\nassert cogumi.patch().patches[0].applied, cogumi.patch()\n" + TRAIN


@with_unsloth
def test_a_whole_run_goes_through_unsloth(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> None:
    """`cogumi.patch()` and `cogumi.train`: GSPO with an adapter, judged and merged, on unsloth's trainer. One that is
    stopped within its second rollout and resumed ends with the same adapter."""
    from safetensors.torch import load_file

    config = {
        "model": {"name": str(tiny_model), "dtype": "float32"},
        "lora": {"r": 4},
        "data": {"source": str(code_parquet), "eval_rows": 4, "fim": {"max_length": 128, "middle_chars": [8, 32]}},
        "train": {
            "max_steps": 4, "num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 2,
            "max_completion_length": 8, "learning_rate": 1e-3, "gradient_checkpointing": False, "save_strategy": "no",
        },
        "cogumi": {"method": "gspo", "run_dir": str(tmp_path / "run")},
    }  # fmt: skip
    resumed = config | {"cogumi": {"method": "gspo", "run_dir": str(tmp_path / "resumed")}}
    stopped = resumed | {"cogumi": resumed["cogumi"] | {"sanity": 3}}
    output = in_a_process("-c", RUN, *map(json.dumps, (config, stopped, resumed)), cwd=tmp_path, **NO_AUTOCAST)
    whole, other = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("run", "resumed"))
    assert all(torch.equal(other[name], whole[name]) for name in whole)
    ran = json.loads((tmp_path / "run" / "loss.json").read_text())
    assert (ran["backend"], ran["loss"], ran["asserted"]) == ("unsloth", "gspo", True)
    assert ran["function"] == "UnslothGRPOTrainer.UnslothEfficientGRPO"
    assert (ran["arguments"]["beta"], ran["arguments"]["epsilon_low"]) == (0.0, 3e-4)
    decided = json.loads((tmp_path / "run" / "decisions.json").read_text())
    assert decided["backend"] == {"name": "unsloth", "reason": "unsloth is installed, and has kernels for llama"}
    assert "UnslothGRPOTrainer.accumulate_chunk" in decided["compile"]["compiled"]
    assert decided["compile"]["failed"] == {}
    assert "Unsloth (CPU): LlamaForCausalLM" in output  # which FastLanguageModel prints
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/ratio_new_old" in row]
    assert [row["policy/staleness"] for row in steps] == [0, 8, 0, 8]
    assert [row["policy/max_ratio"] == row["policy/min_ratio"] == 1 for row in steps] == [True, False, True, False]


@with_unsloth
def test_gspo_is_not_given_unsloths_defaults(tmp_path: Path) -> None:
    in_a_process(str(HERE), "config", "config.pt", cwd=tmp_path)
    plain, mine = torch.load(tmp_path / "config.pt")
    assert plain == DECIDED
    assert mine == DECIDED | {
        "beta": 0.1, "learning_rate": 3e-6, "optim": "sgd", "vllm_importance_sampling_correction": False,
        "epsilon": 1e-3, "epsilon_high": 1e-3,
    }  # fmt: skip


@with_unsloth
@pytest.mark.parametrize(
    ("users", "said"),
    [(None, "unsloth or an earlier run sets"), ("expandable_segments:True", "PYTORCH_ALLOC_CONF sets")],
)
def test_the_allocators_variable_that_unsloth_sets_is_not_blamed_on_the_user(
    users: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", unsloth_rl.SET_BY_COGUMI):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "sleep.py").write_text(
        "from cogumi.patches import unsloth_rl\nunsloth_rl.apply()\n"
        "from cogumi.config.schema import load_config\nfrom cogumi.methods.auto_settings import refuse_segments\n"
        "train = {'use_vllm': True, 'vllm_enable_sleep_mode': True}\n"
        "run = load_config({'model': {'name': 'x'}, 'data': {'source': 'x'}, 'train': train, 'cogumi': {'method': 'gspo'}})\n"
        + TRY.format("refuse_segments(run)")
    )
    environment = {} if users is None else {"PYTORCH_ALLOC_CONF": users}
    assert f"{said} expandable_segments:True" in in_a_process("sleep.py", cwd=tmp_path, **environment)


@with_unsloth
def test_in_time_it_is_applied_once_and_for_good(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        "from cogumi.patches import unsloth_rl\n"
        "print(unsloth_rl.status().applied, unsloth_rl.apply().applied)\n"
        "import trl; trainer = trl.GRPOTrainer\n"
        "print(unsloth_rl.apply().applied, trl.GRPOTrainer is trainer, trainer.__name__)\n"
        + TRY.format("unsloth_rl.undo()")
    )
    output = in_a_process("early.py", cwd=tmp_path)
    assert "False True\n" in output
    assert "True True UnslothGRPOTrainer\n" in output
    assert "RuntimeError unsloth: unsloth's changes to TRL, transformers and torch cannot be undone" in output


@with_unsloth
def test_the_recorded_signatures_are_the_installed_ones() -> None:
    from importlib.metadata import version

    unsloth_rl.check_upstream()
    for file, functions in RECORDED[version("unsloth")].items():
        package, _, inside = file.partition("/")
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        actual = unsloth_rl.parameters_by_function((Path(spec.submodule_search_locations[0]) / inside).read_text())
        assert {name: actual[name] for name in functions} == {
            n: recorded(version("unsloth"), file, n) for n in functions
        }


# ------------------------------------------------------------------------------------------------------ with or without it


def recorded(release: str, file: str, name: str) -> list[str]:
    return [each for each in RECORDED[release][file][name]["parameters"].split() if not each.startswith("*")]


def test_without_a_gpu_or_unsloth_trl_trains_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(unsloth_rl.CPU_SWITCH, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    why = "no CUDA device" if importlib.util.find_spec("unsloth") else "unsloth is not installed"
    for status in (unsloth_rl.apply("auto"), unsloth_rl.status(), unsloth_rl.undo()):
        assert (status.applied, status.reason) == (False, f"{why}: stock TRL trains")
    assert "unsloth" not in sys.modules


@pytest.mark.parametrize("release", RECORDED)
def test_both_releases_have_what_is_relied_upon(release: str) -> None:
    assert {*unsloth_rl.UPSTREAM, *unsloth_rl.NAMED} == {*RECORDED[release]}
    for file in RECORDED[release]:
        collected = {name: recorded(release, file, name) for name in RECORDED[release][file]}
        assert unsloth_rl.differences(collected, file) == []


@pytest.mark.parametrize(
    ("file", "name", "now", "said"),
    [
        (unsloth_rl.LOSS_FILE, "grpo_accumulated_loss", "trainer input_ids", "takes (trainer, input_ids)"),
        (unsloth_rl.LOSS_FILE, "grpo_compute_loss", None, "grpo_compute_loss is missing"),
        (unsloth_rl.LOADER_FILE, "FastLanguageModel.from_pretrained", "model_name", "takes (model_name)"),
        (unsloth_rl.LLAMA_FILE, "FastLlamaModel.get_peft_model", None, "FastLlamaModel.get_peft_model is missing"),
    ],
)
def test_a_changed_upstream_is_named(file: str, name: str, now: str | None, said: str) -> None:
    collected = {name: recorded("2026.10.7", file, name) for name in RECORDED["2026.10.7"][file]}
    if now is None:
        del collected[name]
    else:
        collected[name] = now.split()
    (problem,) = unsloth_rl.differences(collected, file)
    assert said in problem


# ----------------------------------------------------------------------------------------------------- which backend it is


@pytest.fixture
def installed_with_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package of unsloth's name, which nothing here imports, and torch says that there is a GPU."""
    (tmp_path / "unsloth").mkdir()
    (tmp_path / "unsloth/__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(unsloth_rl, "_requested_backend", "auto")  # a test before may have trained here by TRL


def run_of(name: str, backend: str = "auto") -> RunConfig:
    return RunConfig(
        model=ModelSection(name=name), data=DataSection(), cogumi=CogumiSection(method="sft", backend=backend)
    )  # type: ignore[arg-type]


@pytest.mark.usefixtures("installed_with_cuda")
def test_auto_takes_unsloth_for_the_families_it_has_kernels_for(tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "phi"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "phi3"}')
    assert choose_backend(run_of(str(tiny_model))) == ("unsloth", "unsloth is installed, and has kernels for llama")
    assert choose_backend(run_of("cogumi:small-base")).reason.endswith("for llama")
    assert choose_backend(run_of("cogumi:random-gpt-oss")).reason.endswith("for gpt_oss")
    assert choose_backend(run_of(str(other))) == ("trl", "unsloth has no kernels for phi3: stock TRL trains")
    assert choose_backend(run_of(str(other), "unsloth")) == ("unsloth", "cogumi.backend is unsloth")
    assert choose_backend(run_of(str(tiny_model), "trl")) == ("trl", "cogumi.backend is trl")


@pytest.mark.usefixtures("installed_with_cuda")
def test_a_clip_that_acts_takes_trl_whose_ratios_are_exact_and_so_does_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(options: dict[str, Any] | None = None, **train: Any) -> str:
        section = CogumiSection(method="gspo", **options or {})
        model = ModelSection(name="cogumi:small-base")
        return choose_backend(RunConfig(model=model, data=DataSection(), train=train, cogumi=section)).name

    assert chosen() == "trl"  # four steps of each rollout, where nothing else is said
    assert chosen(loss_type="gspo-length", steps_per_generation=2) == "trl"
    assert chosen(steps_per_generation=1, num_iterations=2) == "trl"
    assert chosen(steps_per_generation=2, gradient_accumulation_steps=2) == "unsloth"  # the ratio is 1
    assert chosen(steps_per_generation=1) == "unsloth"
    assert chosen(loss_type="dapo") == "unsloth"  # whose clip is 0.2 wide
    assert chosen({"docs_per_step": 64}, generation_batch_size=128) == "trl"
    assert chosen({"prompts_per_step": 8}, generation_batch_size=64) == "unsloth"
    assert chosen({"backend": "unsloth"}) == "unsloth"
    assert chosen(steps_per_generation=1, use_vllm=True) == "trl"
    assert chosen({"backend": "unsloth"}, use_vllm=True) == "unsloth"

    monkeypatch.setattr(unsloth_rl, "_requested_backend", "trl")  # an earlier run of this process
    monkeypatch.setitem(sys.modules, "trl", sys)
    assert chosen(steps_per_generation=1) == "trl"


@pytest.mark.parametrize(
    ("raised", "told"), [(torch.OutOfMemoryError("full"), torch.OutOfMemoryError), (ValueError("not this"), UsageError)]
)
def test_a_full_card_is_told_as_itself_and_a_refusal_with_the_other_backend(
    raised: Exception, told: type[Exception], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        @staticmethod
        def from_pretrained(**_: Any) -> Any:
            raise raised

    monkeypatch.setattr(unsloth_models, "loader", lambda: Refusing)
    with pytest.raises(told, match=r"full|unsloth does not load"):
        unsloth_models.load_fast_model(
            read_base(str(tiny_model)), ModelSection(name=str(tiny_model)), "float32", 64, False
        )


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_class_with_other_defaults_is_given_trls(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """unsloth 2026.10 gives its SFT class seed 3407, half the examples twice and a warm-up, on a GPU alone."""
    import trl

    from cogumi.methods.building import trl_arguments

    train: dict[str, Any] = {"seed": 7} | ({"loss_type": ["sigmoid", "sft"]} if method == "dpo" else {})
    run = {"model": {"name": "x"}, "data": {"source": "x"}, "train": train, "cogumi": {"method": method}}
    plain = trl_arguments(load_config(run)).to_dict()
    name = TRL_CONFIGS[load_config(run).cogumi.method]
    original: Any = getattr(trl, name)

    keys: set[str] = set()

    def other(self: Any, **given: Any) -> None:
        keys.update(given)
        original.__init__(self, **{"seed": 3407, "gradient_accumulation_steps": 2, "warmup_steps": 0.1} | given)

    monkeypatch.setattr(trl, name, type(f"Unsloth{name}", (original,), {"__init__": other, "__module__": "unsloths"}))
    assert trl_arguments(load_config(run)).warmup_steps == 0.1
    monkeypatch.setattr(unsloth_rl, "is_in_place", lambda: True)
    assert trl_arguments(load_config(run)).to_dict() == plain
    assert ("loss_type" in keys) == (method == "dpo")  # unsloth's SFT has a loss of its own
    assert plain["seed"] == 7


@pytest.mark.parametrize("error", ["ImportError", "NotImplementedError", "ValueError", "AttributeError"])
def test_what_unsloth_raises_when_it_is_imported_is_told_with_the_fix(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2026.10.7 beside the package `kernels` raises a ValueError on a GPU, and 2026.10.9 does not."""
    monkeypatch.setitem(sys.modules, "unsloth", None)
    monkeypatch.delitem(sys.modules, "unsloth")
    (tmp_path / "unsloth").mkdir()
    asked = "import os\nassert os.environ['UNSLOTH_DISABLE_STATISTICS'] == '1', 'it would ask the hub for counters'\n"
    (tmp_path / "unsloth/__init__.py").write_text(f"{asked}raise {error}('the function is\\n not decorated')")
    monkeypatch.delenv("UNSLOTH_DISABLE_STATISTICS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(unsloth_rl, "version", lambda _: "2026.10.7")
    message = rf"unsloth 2026.10.7 is installed and does not import here \({error}: the function is not decorated\)"
    with pytest.raises(UsageError, match=message):
        unsloth_rl.import_unsloth()


def test_the_families_are_those_of_the_models_here() -> None:
    from cogumi.models import small_base

    for kind, (model_type, *_) in small_base.KINDS.items():
        assert read_model_type(small_base.PREFIX + kind, None) == model_type
    base_config = json.loads((small_base.small_base_path() / "config.json").read_text())
    assert read_model_type("cogumi:small-base", None) == base_config["model_type"]


@pytest.mark.usefixtures("installed_with_cuda")
def test_a_base_that_cannot_be_read_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert choose_backend(run_of("nobody/nothing-of-this-name")).name == "trl"


without_unsloth = pytest.mark.skipif(
    importlib.util.find_spec("unsloth") is not None, reason="unsloth is installed here"
)


@without_unsloth
def test_unsloth_that_is_not_installed_is_refused_with_the_fix(sft: dict[str, Any]) -> None:
    sft["cogumi"]["backend"] = "unsloth"
    with pytest.raises(UsageError) as refused:
        cogumi.train(sft)
    assert str(refused.value).startswith("cogumi.backend: unsloth is not installed")
    assert 'pip install "cogumi[unsloth]"' in refused.value.fix
    assert "cogumi.backend: trl" in refused.value.fix
    assert not Path(sft["cogumi"]["run_dir"]).exists()


@without_unsloth
@pytest.mark.usefixtures("prepared_workers")
def test_a_preflight_says_what_will_train_here_and_on_another_card(sft: dict[str, Any]) -> None:
    def line(**more: Any) -> str:
        (found,) = (line for line in cogumi.preflight(sft, **more).lines if line.stage == "backend")
        assert found.state == "green"
        return found.figure

    assert line() == "trl: unsloth is not installed: stock TRL trains"
    assert line(card="h100 sxm") == "unsloth if it is installed there, else trl"
    assert line(card="h100 sxm", cogumi__backend="unsloth") == "unsloth: cogumi.backend"
    with pytest.raises(UsageError, match="unsloth is not installed"):
        line(cogumi__backend="unsloth")


@without_unsloth
def test_a_run_keeps_what_trained_it(sft: dict[str, Any]) -> None:
    sft["train"]["max_steps"] = 1
    result = cogumi.train(sft, cogumi__backend="trl")
    kept = json.loads((result.run_dir / "decisions.json").read_text())["backend"]
    assert kept == {"name": "trl", "reason": "cogumi.backend is trl"}
    assert "backend: trl (cogumi.backend is trl)" in (result.run_dir / "run.log").read_text()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"lora_dropout": 0.1}, ["lora.lora_dropout is 0.1, and 0.0 was asked for"]),
        ({"target_modules": ["q_proj"]}, ["the adapter is on 2 modules, and 4 were asked for"]),
        ({"modules_to_save": ["lm_head"]}, ["lora.modules_to_save is ['lm_head'], and None was asked for"]),
    ],
    ids=["nothing", "dropout", "modules", "saved whole"],
)
def test_an_adapter_is_compared_with_what_was_asked_for(
    tiny_model: Path, changed: dict[str, Any], said: list[str]
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    from cogumi.models.adapters import lora_config

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = lora_config({"r": 4, "target_modules": ["q_proj", "v_proj"]})
    modules = {name for name, module in base.named_modules() if is_wanted(name, module, expected, base)}
    before = [name for name, _ in base.named_parameters()]
    model = peft.get_peft_model(base, lora_config({"r": 4, "target_modules": ["q_proj", "v_proj"], **changed}))
    results = list(compare_adapter(model, expected, modules, before))
    assert [each.partition(";")[0] for each in results] == said


def test_a_base_is_compared_with_what_was_asked_for(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = read_base(str(tiny_model))
    expected = ModelSection(name=str(tiny_model), attn_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    assert list(compare_model(model, base, torch.float32, expected)) == []
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.resize_token_embeddings(base.config.vocab_size + 8)
    model.extra = torch.nn.Linear(2, 2, bias=False)
    assert list(compare_model(model, base, torch.float32, expected)) == [
        "dtype is bfloat16, and float32 was asked for",
        "model.attn_implementation is sdpa, and eager was asked for",
        f"rows of embeddings is {base.config.vocab_size + 8}, and {base.config.vocab_size} was asked for",
        "1 parameters have other names than transformers gives them, such as extra.weight",
    ]


def test_a_tokenizer_is_compared_with_the_bases(tiny_model: Path) -> None:
    from cogumi.models.loading import load_tokenizer

    ours, theirs = load_tokenizer(str(tiny_model)), load_tokenizer(str(tiny_model))
    assert list(compare_tokenizer(theirs, ours)) == []
    theirs.add_special_tokens({"pad_token": "<|PAD|>"})
    theirs.chat_template = "{{ messages }}"
    assert list(compare_tokenizer(theirs, ours)) == [
        "its tokenizer has another pad_token; the run keeps the base's",
        "its tokenizer has another chat_template; the run keeps the base's",
        f"its tokenizer has {len(ours) + 1} tokens; the run keeps the base's, with {len(ours)}",
    ]


def test_signatures_are_read_from_source() -> None:
    source = "def f(a, /, b, *c, d=1, **e):\n    return 1, 2\nclass G:\n    @staticmethod\n    def forward(ctx, x=None): return x"
    source += "\n    def h(self): pass"
    assert unsloth_rl.parameters_by_function(source) == {
        "f": ["a", "b", "d"],
        "G.forward": ["ctx", "x"],
        "G.h": ["self"],
    }


IMPORTS = {
    "directly": ("import math\nimport trl\n", "trl was imported before unsloth (trl at {here}:2)"),
    "by another package": (
        "import math\n\nimport peft\n",
        "transformers and peft were imported before unsloth (peft at {here}:3)",
    ),
    "inside a function": ("def f():\n    import trl\nf()\n", "trl was imported before unsloth (trl at {here}:2)"),
    "by no statement of the script": ("__import__('trl')\n", "trl was imported before unsloth, and"),
}


@pytest.mark.slow("each imports torch; the fast tier has one import after what is in order, and one in a cell")
@pytest.mark.parametrize("how", IMPORTS)
def test_the_offending_import_is_named(how: str, tmp_path: Path) -> None:
    source, said = IMPORTS[how]
    check = "from cogumi.patches import unsloth_rl\n" + TRY.format("unsloth_rl.validate_import_order()")
    script = tmp_path / "script.py"
    script.write_text(source + check)
    assert in_a_process(str(script), cwd=tmp_path).startswith("UsageError " + said.format(here=script))


def test_the_offending_cell_is_named(tmp_path: Path) -> None:
    check = "from cogumi.patches import unsloth_rl\n" + TRY.format("unsloth_rl.validate_import_order()")
    (tmp_path / "notebook.py").write_text(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"for cell in ('x = 1', '%time y = 2\\nfrom trl import __version__', {check!r}):\n"
        "    shell.run_cell(cell, store_history=True)\n"
    )
    output = in_a_process("notebook.py", cwd=tmp_path)
    assert "(trl at cell In[2], line 2)" in output


def test_in_order_nothing_is_refused_and_then_the_offending_import_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import cogumi, torch\nfrom cogumi.patches import unsloth_rl, gspo_loss\nimport cogumi.config.schema\n"
        "unsloth_rl.validate_import_order(); print('fine')\n"
        "import trl\n" + TRY.format("unsloth_rl.validate_import_order()")
    )
    output = in_a_process(str(script), cwd=tmp_path)
    assert output.startswith(f"fine\nUsageError trl was imported before unsloth (trl at {script}:5)")


# -------------------------------------------------------------------------------------------------------------- the seam


@pytest.mark.parametrize("release", RECORDED)
def test_recorders_bind_to_the_recorded_signatures(release: str) -> None:
    """The call unsloth makes, with the parameters of each release in their order."""
    from cogumi.rl.loss_check import LossInputs, wrap_efficient_loss

    _, *parameters = recorded(release, unsloth_rl.LOSS_FILE, "UnslothEfficientGRPO.forward")
    names: dict[str, Any] = {}
    exec(
        f"def forward(ctx, {', '.join(parameters)}): return 'loss', 0, 0, None, torch.ones(0), 1",
        {"torch": torch},
        names,
    )

    class UnslothEfficientGRPO:
        forward = staticmethod(names["forward"])

        @classmethod
        def apply(cls, *args: Any) -> Any:
            return cls.forward(None, *args)

    given = {name: torch.full((2, 3), float(place)) for place, name in enumerate(parameters)}
    settings = {"loss_type": "grpo", "epsilon_low": 3e-4, "get_gamma_weights": print}
    given |= {"beta": 0.0, "extra_kwargs": settings, "_old_logps": None, "_advantages": torch.ones(2)}
    calls: list[LossInputs] = []
    assert wrap_efficient_loss(UnslothEfficientGRPO, calls).apply(*given.values())[0] == "loss"
    (call,) = calls
    assert (call.new is given["_new_logps"], call.mask is given["_mask"], call.old, call.ref) == (
        True,
        True,
        None,
        None,
    )
    assert call.advantages is given["_advantages"]
    assert call.arguments == {"beta": 0.0, "loss_type": "grpo", "epsilon_low": 3e-4}


COMMANDS = {
    "preflight": "preflight smoke/sft",
    "disk predict": f"disk predict {HERE.parents[1] / 'cogumi/configs/smoke/sft.yaml'}",
    "preview": "preview smoke/sft",
    "train": "train smoke/sft",
}
IMPORTS_TORCH = pytest.mark.slow("imports torch in a process of its own; preflight does in the first tier")


@pytest.mark.parametrize(
    "command",
    ["preflight", *(pytest.param(command, marks=IMPORTS_TORCH) for command in COMMANDS if command != "preflight")],
)
def test_a_command_imports_nothing_that_unsloth_has_to_come_before(command: str, tmp_path: Path) -> None:
    """With a package of that name the order is looked at, also where unsloth itself is not installed."""
    (tmp_path / "unsloth").mkdir()
    (tmp_path / "unsloth/__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{tmp_path}", unsloth_rl.CPU_SWITCH: "1"}
    words = [sys.executable, "-m", "cogumi", *COMMANDS[command].split()]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert "before unsloth" not in done.stderr
    if command == "disk predict":  # shapes alone: it asks for no unsloth
        assert done.returncode == 0, done.stderr
    else:  # the order is right, and what is asked for next is not there
        assert "unsloth/models/rl.py" in done.stderr


if __name__ == "__main__":
    SCRIPTS[sys.argv[1]](*sys.argv[2:])
