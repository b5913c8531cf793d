"""What the machine decides where the config says nothing: asked of machines that are not here, and of this one."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import run_config
from datasets import Dataset
from safetensors.torch import load_file

import cogumi
from cogumi.config.schema import RunConfig, load_config
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json, write_json
from cogumi.data.rows import Lengths
from cogumi.forecast.memory_forecast import planned_work
from cogumi.methods import auto_settings, gspo
from cogumi.methods.auto_settings import Load, Machine, apply_choices, choose, load_of, with_values
from cogumi.methods.examples import longest_example
from cogumi.methods.step_split import batch_of, split_step
from cogumi.models.loading import load_model, load_tokenizer, read_base
from cogumi.patches import unsloth_rl
from cogumi.rl.memory_plan import ModelShape
from cogumi.stack.probes import HUB_FLASH_ATTN, flash_attention
from cogumi.training.estimate import make_choices

GIB = 2**30
H100 = Machine("H100", (9, 0), 79 * GIB, True, "flash_attention_3", "to 0.003")
A100_40 = Machine("A100", (8, 0), 39 * GIB, True, HUB_FLASH_ATTN, "computes what torch does")
T4 = Machine("T4", (7, 5), 15 * GIB)
CPU = Machine("CPU", None, 8 * GIB)
LLAMA_8B = ModelShape(4096, 14336, 32, 128256)


def load(**more: Any) -> Load:
    machine = {"shape": LLAMA_8B, "element": 2, "attention": frozenset({"sdpa", "flash"}), "weights": 16 * GIB}
    return Load(**machine | {"trained": 42_000_000, "micro_batch": 2, "length": 2048} | more)


def run_of(method: str = "sft", model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    sections = {"model": {"name": "x", **(model or {})}, "data": {"source": "x"}, "cogumi": {"method": method}}
    return load_config(sections | {"train": train})


def decided(run: RunConfig, machine: Machine, asked: Load) -> dict[str, Any]:
    return {choice.key: choice.value for choice in choose(run, machine, asked)}


ATTENTION, OPTIM = "model.attn_implementation", "train.optim"
MICRO_BATCH, CHECKPOINTING = "train.per_device_train_batch_size", "train.gradient_checkpointing"
SMALL = load(trained=10_000, weights=10**6, length=160, shape=ModelShape(64, 128, 2, 512), element=4)
NO_8BIT = Machine("H100", (9, 0), 79 * GIB)  # nothing else is installed
SAID = {"gradient_checkpointing": False, "optim": "adafactor", "tf32": False}
# The run, the machine, what is loaded; some of the choices, None for what is left alone.
CHOICES: list[tuple[RunConfig, Machine, Load, dict[str, Any]]] = [
    # 61 GiB are estimated without checkpointing; the margin is 0.7
    (run_of(), H100, load(micro_batch=4), {ATTENTION: "flash_attention_3", CHECKPOINTING: True}),
    (run_of(), H100, load(), {CHECKPOINTING: False, OPTIM: "adamw_torch_fused"}),
    (run_of("gspo"), H100, load(), {"train.tf32": False}),
    # moments take 8 bits where 32 do not fit
    (run_of(), H100, load(trained=8_000_000_000), {OPTIM: "adamw_8bit"}),
    (run_of(), H100, load(trained=50_000_000_000), {OPTIM: "paged_adamw_8bit"}),
    (run_of(), NO_8BIT, load(trained=8_000_000_000), {OPTIM: "adamw_torch_fused"}),
    # a CPU keeps the defaults, and computes nothing twice that fits
    (run_of(), CPU, SMALL, {CHECKPOINTING: False, OPTIM: None, ATTENTION: None}),
    (run_of(), CPU, load(element=4), {CHECKPOINTING: True, OPTIM: None, ATTENTION: None}),
    # what the user says stays
    (run_of(model={"attn_implementation": "eager"}, **SAID), H100, load(), {ATTENTION: None, OPTIM: None, CHECKPOINTING: None}),
    (run_of(gradient_checkpointing_kwargs={"use_reentrant": True}), H100, load(length=8), {CHECKPOINTING: None}),
]  # fmt: skip


@pytest.mark.parametrize(("run", "machine", "asked", "expected"), CHOICES)
def test_what_is_chosen(run: RunConfig, machine: Machine, asked: Load, expected: dict[str, Any]) -> None:
    values = decided(run, machine, asked)
    assert {key: values.get(key) for key in expected} == expected


def test_a_planned_batch_leaves_checkpointing_to_the_planner() -> None:
    run = run_of("gspo")
    run.cogumi.docs_per_step = 32
    assert CHECKPOINTING not in decided(run, H100, load(length=8))


@pytest.mark.parametrize(
    ("machine", "more", "expected", "because"),
    [
        (A100_40, {}, HUB_FLASH_ATTN, "computes what torch does"),
        (Machine("A100", (8, 0), 39 * GIB, why_flash="flash_attention_2: undefined symbol"), {}, "sdpa", "undefined symbol"),
        (T4, {}, "sdpa", "flash attention needs bfloat16 and compute capability 8.0"),
        (A100_40, {"element": 4}, "sdpa", "flash attention needs bfloat16"),
        (A100_40, {"attention": frozenset({"sdpa"})}, "sdpa", "this model's class has no flash attention"),
        (A100_40, {"attention": frozenset()}, "eager", "its class has no sdpa"),
        (A100_40, {"attention": frozenset({"flex"})}, "eager", "flex_attention, which you may set"),
        (H100, {"attention": frozenset({"flash"}), "own_kernels": ("kernels-community/vllm-flash-attn3",)}, "eager",
         "this model takes only kernels-community/vllm-flash-attn3"),
    ],
)  # fmt: skip
def test_attention_is_what_works_on_the_card_and_the_class_has(
    machine: Machine, more: dict[str, Any], expected: str, because: str
) -> None:
    (choice,) = (each for each in choose(run_of(), machine, load(**more)) if each.key == "model.attn_implementation")
    assert choice.value == expected
    assert because in choice.reason


@pytest.mark.parametrize(
    ("train", "machine", "splits", "size", "checkpointing"),
    [
        ({}, H100, (4, 2, 1), 1, False),  # 8 x 4,096 tokens do not fit without it, and 1 x 4,096 do
        ({}, Machine("H200", (9, 0), 137 * GIB), (4, 2, 1), 2, False),  # the largest that does
        ({}, H100, (4, 2), None, True),
        ({}, A100_40, (4, 2, 1), None, True),
        ({}, Machine("CPU", None, 79 * GIB), (4, 2, 1), None, True),
        ({"gradient_checkpointing": True}, H100, (4, 2, 1), None, None),  # what the user sets stays as it is
        ({"gradient_checkpointing": False}, H100, (4, 2, 1), None, None),
    ],
)
def test_a_smaller_micro_batch_comes_before_computing_layers_twice(
    train: dict[str, Any], machine: Machine, splits: tuple[int, ...], size: int | None, checkpointing: bool | None
) -> None:
    run = run_of(per_device_train_batch_size=8, gradient_accumulation_steps=16, **train)
    asked = load(micro_batch=8, length=4096, splits=splits)
    values = decided(run, machine, asked)
    assert (values.get(MICRO_BATCH), values.get(CHECKPOINTING)) == (size, checkpointing)
    assert math.prod(batch_of(with_values(run, choose(run, machine, asked)))) == 128


@pytest.mark.parametrize(
    ("method", "train", "expected"),
    [
        ("sft", {"packing": True}, (4, 2)),  # rows of 1,024 tokens; 2,048 at least
        ("sft", {}, ()),  # unpacked a quarter of each is assumed to be tokens
        ("sft", {"max_length": 4096}, (4, 2)),
        ("dpo", {"max_length": 4096}, (4, 2, 1)),
        ("dpo", {"max_length": 4096, "loss_type": ["sigmoid", "aot"]}, ()),
        ("sft", {"packing": True, "train_sampling_strategy": "group_by_length"}, ()),
        ("sft", {"packing": True, "router_aux_loss_coef": 0.1}, ()),
        ("gspo", {"max_completion_length": 4096}, ()),
    ],
)
def test_the_batch_is_cut_only_where_the_step_stays_the_same(
    method: str, train: dict[str, Any], expected: tuple[int, ...], tiny_model: Path
) -> None:
    run = run_of(method, **train)
    run.data.format = "chat"
    assert load_of(run, read_base(str(tiny_model))).splits == expected


def test_the_forecast_counts_the_step_of_packed_rows_once() -> None:
    run = run_of(packing=True, max_length=1024, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    work = planned_work(run, 1024, examples_per_row=4.0)
    assert (work.rows, work.micro_batches) == (8, 1)  # 32 examples


def test_a_resumed_run_keeps_its_micro_batch_with_other_processes(tiny_model: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "decisions.json", {"settings": [{"key": MICRO_BATCH, "value": 4, "reason": "then"}]})
    for accumulated, size in ((4, 4), (3, 2)):  # 24 examples a step, and 18 where they are shared by others
        run = run_of(per_device_train_batch_size=6, gradient_accumulation_steps=accumulated)
        run.cogumi.run_dir = tmp_path
        assert batch_of(apply_choices(run, read_base(str(tiny_model)))) == (size, 6 * accumulated // size)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_the_chosen_micro_batch_trains_the_same_step(
    method: str, tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, gradient norms and weights of two steps, beside those of the batch that the YAML sets."""
    monkeypatch.setattr(auto_settings, "MIN_TOKENS", 1)  # of a card; these examples are short
    config = step_config(method, tiny_model, code_parquet, tmp_path, max_steps=2, per_device_train_batch_size=4)
    config["train"] |= {"gradient_accumulation_steps": 2} | ({"packing": True} if method == "sft" else {})
    config["cogumi"] |= {"preflight": "off"}
    config["model"]["attn_implementation"] = "sdpa"
    whole = cogumi.train(config, cogumi__run_dir=str(tmp_path / "whole"), train__gradient_checkpointing=True)

    machine = machine_for(load_of(load_config(config), read_base(str(tiny_model))), checkpointing=False)
    monkeypatch.setattr(Machine, "here", classmethod(lambda *_: machine))
    parts = cogumi.train(config, cogumi__run_dir=str(tmp_path / "parts"))
    settings = {setting["key"]: setting["value"] for setting in read_json(parts.run_dir / "decisions.json")["settings"]}
    assert settings == {MICRO_BATCH: 1, CHECKPOINTING: False}
    assert f"chosen: {MICRO_BATCH}: 1 (the step of 4 x 2 examples" in (parts.run_dir / "run.log").read_text()
    for name in ("loss", "grad_norm"):
        assert parts.series(name) == pytest.approx(whole.series(name), rel=2e-5), name
    weights, others = (load_file(result.adapter / "adapter_model.safetensors") for result in (whole, parts))
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-4, atol=2e-6)


def step_config(method: str, model: Path, code: Path, tmp_path: Path, **train: Any) -> dict[str, Any]:
    train |= {"logging_steps": 1, "learning_rate": 1e-3, "optim": "adamw_torch", "max_length": 160}
    config = config_of(model, code, tmp_path, **train)
    config["cogumi"]["method"] = method
    if method == "dpo":
        sides = [(f"):\n    return x + {i}\n", ") -> x\n" * (1 + i % 3)) for i in range(24)]
        pairs = [{"prompt": f"def f{i}(x", "chosen": one, "rejected": two} for i, (one, two) in enumerate(sides)]
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        config["data"] = {"source": str(tmp_path / "pairs.jsonl"), "format": "preference", "eval_rows": 0}
    return config


def machine_for(asked: Load, checkpointing: bool) -> Machine:
    """A card for a quarter of the micro-batch and no more."""
    quarter = replace(asked, micro_batch=asked.micro_batch // 4).step(checkpointing)
    return Machine("T4", (7, 5), asked.weights + 8 * asked.trained + int(quarter / auto_settings.MARGIN) + 1000)


def planned(step: int, method: str = "sft", processes: int = 1, **train: Any) -> RunConfig:
    """A run with `cogumi.examples_per_step`, as one of its processes trains it."""
    options = {"method": method, "examples_per_step": step, "processes": processes}
    data = {"source": "x", "format": "preference" if method == "dpo" else "chat"}
    run = load_config({"model": {"name": "x"}, "data": data, "train": train, "cogumi": options})
    return split_step(run, processes)


@pytest.mark.parametrize("machine", [CPU, T4, A100_40, H100, Machine("H200", (9, 0), 139 * GIB)])
@pytest.mark.parametrize("train", [{}, {"gradient_checkpointing": True}, {"gradient_checkpointing": False}], ids=str)
@pytest.mark.parametrize("step", [1, 12, 64])
def test_the_micro_batch_of_a_step_is_the_largest_that_fits(step: int, train: dict[str, Any], machine: Machine) -> None:
    run, usable = planned(step, **train), int(0.7 * max(0, machine.free_bytes - 14 * GIB - 8 * 42_000_000))
    sizes = [size for size in range(1, step + 1) if step % size == 0]
    asked = load(weights=14 * GIB, micro_batch=step, length=2048, splits=tuple(sizes[-2::-1]))
    values = decided(run, machine, asked)
    size = values[MICRO_BATCH]
    assert batch_of(with_values(run, choose(run, machine, asked))) == (size, step // size)

    def largest(checkpointing: bool) -> int:
        return max((n for n in sizes if load(micro_batch=n, length=2048).step(checkpointing) <= usable), default=0)

    twice = train.get("gradient_checkpointing", values.get(CHECKPOINTING))
    assert size == (largest(twice) or 1)
    assert train or twice == (largest(False) == 0)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_examples_per_step_is_the_batch_set_by_hand(
    method: str, tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = step_config(method, tiny_model, code_parquet, tmp_path, max_steps=3, gradient_checkpointing=True)
    by_hand = cogumi.train(
        config, cogumi__run_dir=str(tmp_path / "hand"), train__gradient_accumulation_steps=4
    )  # 2 x 4

    del config["train"]["per_device_train_batch_size"]
    config["cogumi"]["examples_per_step"] = 8
    config["train"] |= {"save_strategy": "steps", "save_steps": 1, "gradient_checkpointing": True}
    asked = load_of(split_step(load_config(config), 1), read_base(str(tiny_model)))
    with monkeypatch.context() as small:
        small.setattr(Machine, "here", classmethod(lambda *_: machine_for(asked, checkpointing=True)))
        cogumi.train(config, cogumi__run_dir=str(tmp_path / "counted"), cogumi__sanity=1)
    counted = cogumi.train(config, cogumi__run_dir=str(tmp_path / "counted"))  # resumed with more memory
    log = (counted.run_dir / "run.log").read_text()
    assert f"chosen: {MICRO_BATCH}: 2 (the step of 8 x 1 examples in micro-batches of 2, with comput" in log
    assert f"chosen: {MICRO_BATCH}: 2 (as when the run began)" in log
    assert "per_device" not in (counted.run_dir / "config.yaml").read_text()
    for name in ("loss", "grad_norm"):
        assert counted.series(name) == by_hand.series(name), name
    (tmp_path / "counted" / "DONE").unlink(missing_ok=True)
    write_json(tmp_path / "counted" / "status.json", {"state": "running"})
    with pytest.raises(UsageError, match="examples_per_step: 8 there, 16 here"):
        cogumi.train(config, cogumi__run_dir=str(tmp_path / "counted"), cogumi__examples_per_step=16)


def test_a_planned_step_is_shared_by_processes() -> None:
    assert batch_of(planned(24, processes=4)) == (6, 1)
    assert batch_of(planned(24, processes=4, per_device_train_batch_size=4)) == (3, 2)
    alone = planned(24, per_device_train_batch_size=4)
    assert batch_of(alone) == (4, 6)
    assert MICRO_BATCH not in decided(alone, CPU, SMALL)
    with pytest.raises(UsageError, match="24 is no whole number of examples for each of 5 processes; set 25"):
        planned(24, processes=5)


@pytest.mark.parametrize(
    ("cogumi_section", "train", "message"),
    [
        ({"method": "gspo"}, {}, "examples_per_step would be ignored: for cogumi.method: gspo it is cogumi.docs_per_step"),
        ({}, {"gradient_accumulation_steps": 2},
         "train.gradient_accumulation_steps and cogumi.examples_per_step decide the same"),
        ({}, {"auto_find_batch_size": True}, "train.auto_find_batch_size and cogumi.examples_per_step decide the same"),
        ({}, {"per_device_train_batch_size": 5}, "16 is no whole number of micro-batches of 5; set 20, or drop"),
        ({}, {"per_device_train_batch_size": 32}, "16 is no whole number of micro-batches of 32; set 32, or drop"),
        ({"processes": 3}, {}, "16 is no whole number of examples for each of 3 processes; set 18"),
        ({"examples_per_step": 9, "processes": 2}, {"per_device_train_batch_size": 2},
         "9 is no whole number of micro-batches of 2 for each of 2 processes; set 12"),
        ({"examples_per_step": 0}, {}, "cogumi.examples_per_step = 0"),
    ],
)  # fmt: skip
def test_a_step_that_is_said_twice_is_refused(cogumi_section: Any, train: Any, message: str) -> None:
    options = {"method": "sft", "examples_per_step": 16} | cogumi_section
    with pytest.raises(UsageError) as caught:
        load_config({"model": {"name": "x"}, "data": {"source": "x"}, "train": train, "cogumi": options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "train", "tokens"),
    [
        ({"format": "fim", "fim": {"max_length": 200}}, {}, 200),
        ({"format": "chat"}, {"max_length": 300}, 300),
        ({"format": "chat"}, {}, 1024),  # TRL's default
    ],
)
def test_an_example_is_as_long_as_its_format_allows(data: dict[str, Any], train: dict[str, Any], tokens: int) -> None:
    config = {"model": {"name": "x"}, "data": {"source": "x", **data}, "train": train, "cogumi": {"method": "sft"}}
    assert longest_example(load_config(config)) == tokens


def config_of(model: Path, data: Path, run_dir: Path, **train: Any) -> dict[str, Any]:
    rows = {"max_rows": 16, "fim": {"max_length": 160, "middle_chars": [8, 32]}}
    steps = {"max_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no", **train}
    config = run_config("sft", model, data, run_dir, data_section=rows, train=steps)
    del config["train"]["gradient_checkpointing"]  # which is to be decided
    return config | {"train": config["train"] | train}


def test_a_run_says_what_was_chosen_and_why(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> None:
    result = cogumi.train(config_of(tiny_model, code_parquet, tmp_path / "run"))
    settings = read_json(result.run_dir / "decisions.json")["settings"]
    (choice,) = (setting for setting in settings if setting["key"] == CHECKPOINTING)
    assert choice["value"] is False
    assert f"chosen: {CHECKPOINTING}: False ({choice['reason']})" in (result.run_dir / "run.log").read_text()
    # what the user said, and no more
    assert "gradient_checkpointing" not in (result.run_dir / "config.yaml").read_text()


@pytest.mark.parametrize("words", [3, 3000])  # the default budget of an example is 1,024 tokens
def test_memory_of_a_rollout_is_counted_by_its_longest_prompt(words: int, tiny_model: Path, tmp_path: Path) -> None:
    train = {"per_device_train_batch_size": 4, "max_completion_length": 16}
    sections = {"model": {"name": str(tiny_model)}, "data": {"source": "x", "format": "chat"}, "train": train}
    run = load_config(sections | {"cogumi": {"method": "gspo", "run_dir": str(tmp_path)}})
    base, prompts = read_base(str(tiny_model)), ["x", " ".join(["x"] * words)]
    tokenizer = load_tokenizer(base)
    data: Any = SimpleNamespace(dataset=Dataset.from_dict({"prompt": prompts}), lengths=Lengths())
    make_choices(run, base, data, tokenizer)
    reasons = {choice["key"]: choice["reason"] for choice in read_json(tmp_path / "decisions.json")["settings"]}
    longest = len(tokenizer(prompts[1])["input_ids"])
    assert reasons[CHECKPOINTING].startswith(f"4 x {longest + 16} tokens")


def test_a_run_that_goes_on_keeps_what_was_chosen(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> None:
    run = load_config(config_of(tiny_model, code_parquet, tmp_path))
    then = [{"key": "train.gradient_checkpointing", "value": True, "reason": "then"}]
    write_json(tmp_path / "decisions.json", {"settings": then})
    assert apply_choices(run, read_base(str(tiny_model))).train["gradient_checkpointing"] is True
    assert "gradient_checkpointing" not in run.train


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_asked_for_is_the_one_that_is_loaded(tiny_model: Path, attention: str) -> None:
    model = load_model(str(tiny_model), attention=attention)
    assert model.config._attn_implementation == attention
    assert model.dtype == torch.float32 or torch.cuda.is_available()


# torch's attention under the name of flash-attn: what a build that works would compute. Its heads come after the tokens.
COMPUTES = """
import torch

__version__ = "2.8.3"

def flash_attn_func(q, k, v, causal):
    heads_first = (each.transpose(1, 2) for each in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)
"""
NO_BACKWARD = COMPUTES.replace("return out", "return (out.detach() + 0 * out)")
LOADS_NOT = "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')"
HUB = "from types import SimpleNamespace\nfrom flash_of_the_hub import flash_attn_func\n" + (
    "def get_kernel(name, revision):\n    assert len(revision) == 40\n"
    "    return SimpleNamespace(flash_attn_func=flash_attn_func)\n"
)


@pytest.mark.parametrize(
    ("flash_attn", "of_the_hub", "chosen", "because"),
    [
        pytest.param(
            COMPUTES, None, "flash_attention_2", "flash-attn 2.8.3 agrees with torch",
            marks=pytest.mark.slow("a process that imports torch; what the hub has is tried in the same way"),
        ),
        (LOADS_NOT, COMPUTES, HUB_FLASH_ATTN, "flash_attention_2: flash-attn 2.8.3: ImportError: "),
        (NO_BACKWARD, None, None, "backward"),
    ],
    ids=["works", "does not load", "wrong gradient"],
)  # fmt: skip
def test_flash_attention_is_tried_and_its_metadata_is_not_asked(
    flash_attn: str, of_the_hub: str | None, chosen: str | None, because: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Each package says in its metadata that it is installed; what counts is a forward and a backward pass of it."""
    (tmp_path / "flash_attn.py").write_text(flash_attn)
    metadata = tmp_path / "flash_attn-2.8.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (metadata / "top_level.txt").write_text("flash_attn\n")
    if of_the_hub is not None:
        (tmp_path / "kernels.py").write_text(HUB)
        (tmp_path / "flash_of_the_hub.py").write_text(of_the_hub)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flash_attention.cache_clear()  # a process looks once
    found, why = flash_attention(device="cpu")
    assert found == chosen
    assert because in why
    kept_rows = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(kept_rows) == (because.startswith("flash-attn"))  # a failed import or gradient may be repaired
    if kept_rows:
        monkeypatch.setattr("cogumi.stack.probes.run_probe", lambda *_: pytest.fail("the answer is on the disk"))
        flash_attention.cache_clear()
        assert flash_attention(device="cpu") == (chosen, f"{why}; as an earlier run found ({kept_rows[0]})")
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.9\n")
        flash_attention.cache_clear()
        with pytest.raises(pytest.fail.Exception):
            flash_attention(device="cpu")
    flash_attention.cache_clear()


def test_attention_is_neither_tried_nor_chosen_where_it_is_given_or_unsloth_trains(monkeypatch: Any) -> None:
    for name, value in {"is_available": True, "get_device_capability": (9, 0), "get_device_name": "H100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("free_memory_bytes", "total_memory_bytes"):
        monkeypatch.setattr(auto_settings, name, lambda: 79 * GIB)
    monkeypatch.setattr(auto_settings, "flash_attention", lambda: ("flash_attention_2", "it was tried"))
    assert Machine.here(run_of()).flash == Machine.here().flash == "flash_attention_2"
    assert Machine.here(run_of(model={"attn_implementation": "sdpa"})).flash is None
    monkeypatch.setattr(unsloth_rl, "is_in_place", lambda: True)
    assert Machine.here(run_of()).flash is None
    assert "model.attn_implementation" not in decided(run_of(), H100, load())


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, "tis"),  # four steps, as in the paper
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 2}, None),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 2}, "tis"),
        ({"generation_batch_size": 64, "per_device_train_batch_size": 8}, "tis"),
        ({"generation_batch_size": 8, "per_device_train_batch_size": 8}, None),
        ({"vllm_importance_sampling_correction": False}, None),
        ({"use_vllm": False}, None),
    ],
)
def test_a_rollout_of_vllm_for_several_steps_is_corrected_by_tis(train: dict[str, Any], expected: str | None) -> None:
    key = "cogumi.sampler_correction"
    run = run_of("gspo", **{"use_vllm": True, **train})
    choices = choose(run, CPU, load(element=4))
    assert {choice.key: choice.value for choice in choices}.get(key) == expected
    if expected is not None:
        assert gspo.arguments(with_values(run, choices))["vllm_importance_sampling_mode"] == "token_truncate"
    run.cogumi.sampler_correction = "mis"
    assert key not in decided(run, CPU, load(element=4))
