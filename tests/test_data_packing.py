"""Packing: models in which packed examples read each other are found, and a packed run learns what an unpacked one does."""

import functools
import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.run_directory import read_json, write_json
from cogumi.data import packing
from cogumi.data.packing import (
    collate_rows_apart,
    count_per_row,
    padding_mask,
    probe_packing,
    rows_per_step,
    with_labels,
)
from cogumi.data.rows import Lengths
from cogumi.methods import sft
from cogumi.methods.auto_settings import choose_packing
from cogumi.methods.building import trl_arguments
from cogumi.models.adapters import lora_config
from cogumi.patches import recurrent_kernels
from cogumi.stack.ranks import Ranks
from cogumi.telemetry.recorder import preserve_rng_and_mode
from tests.builders import run_config

VOCABULARY = 128
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
HYBRID = {
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
ROUTED = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip

KIMI = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "linear_num_heads": 4, "linear_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SSM = {"mamba_d_state": 8, "mamba_n_groups": 1}
NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "layers_block_type": ["mamba", "attention"],
}  # fmt: skip


def documents(seed: int = 0, count: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (30 + 7 * n,), generator=generator).tolist() for n in range(count)]


def model_of(kind: str, more: dict[str, Any], attention: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    config = getattr(transformers, kind)(**SHAPE | more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **({"attn_implementation": attention} if attention else {}))
    with torch.no_grad():  # at the size of its first weights a layer adds less than bfloat16 can tell
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    return model.to(dtype).eval()


@pytest.mark.parametrize(
    ("kind", "more", "attention"),
    [
        ("LlamaConfig", {}, "sdpa"),
        ("LlamaConfig", {}, "eager"),
        ("Qwen3Config", {"head_dim": 8}, "sdpa"),
        ("MixtralConfig", MOE, "sdpa"),
        ("MistralConfig", {"sliding_window": 8}, "sdpa"),
        ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 8}, "eager"),
        ("Qwen3_5TextConfig", HYBRID, None),  # a convolution and a state along the sequence, which get the borders
        ("Qwen3NextConfig", HYBRID | ROUTED, None),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, None),  # a convolution alone
        ("BailingHybridConfig", KIMI, None),  # Kimi's delta rule
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_keeps_packed_documents_apart(
    kind: str, more: dict[str, Any], attention: str, dtype: torch.dtype
) -> None:
    distance, bound = probe_packing(model_of(kind, more, attention, dtype), documents(), pad_token_id=0)
    assert distance <= bound
    assert bound < (0.1 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize(
    ("kind", "more", "attention"),
    [
        ("MambaConfig", {"state_size": 8}, None),  # a state along the sequence, which takes no borders
        # States that add less to a logit than bfloat16 rounds; the second has no experts, though its config could have.
        ("FalconH1Config", SSM | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "head_dim": 8}, None),
        ("NemotronHConfig", NEMOTRON, None),
        ("GptOssConfig", {**MOE, "head_dim": 8, "sliding_window": 8}, "eager"),  # its mask is made without position ids
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_reads_across_is_found(
    kind: str, more: dict[str, Any], attention: str | None, dtype: torch.dtype
) -> None:
    distance, bound = probe_packing(model_of(kind, more, attention, dtype), documents(), pad_token_id=0)
    assert distance > 2 * bound


# Functions of a hybrid's layers that are called without the borders of documents.
LEAKS = {
    "convolution": ["causal_conv1d_fn"],
    "recurrence": ["torch_chunk_gated_delta_rule"],
    "both": ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"],
}
LENGTHS = (1, 2, 3, 5, 17, 64, 65)  # below, at and above a convolution's 4 tokens and a chunk's 64


def hybrid(leak: str | None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> Any:
    model = model_of("Qwen3_5TextConfig", HYBRID, None, dtype)
    recurrent_kernels.apply(model)
    for name in LEAKS.get(leak or "", []):
        function = getattr(modeling_qwen3_5, name)
        leaking = functools.partial(lambda call, *args, seq_idx=None, **more: call(*args, **more), function)
        monkeypatch.setattr(modeling_qwen3_5, name, leaking)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leak", [None, *LEAKS])
def test_each_planted_leak_is_found_in_every_pair_of_lengths(leak: Any, dtype: Any, monkeypatch: Any) -> None:
    model = hybrid(leak, monkeypatch, dtype)
    for pair in itertools.product(LENGTHS, repeat=2):
        text = torch.randint(3, VOCABULARY, (sum(pair),), generator=torch.Generator().manual_seed(sum(pair))).tolist()
        distance, bound = packing._probe_row(model, [text[: pair[0]], text[pair[0] :]], 0)
        assert (distance > bound) == (leak is not None), (pair, distance, bound)
    distance, bound = probe_packing(model, documents(), pad_token_id=0)
    assert (distance > 2 * bound) == (leak is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leak", [None, *LEAKS])
def test_a_leak_that_rounding_would_hide_is_found(leak: Any, dtype: Any, monkeypatch: Any) -> None:
    """Of first weights a state changes logits by less than their last bit in bfloat16."""
    with monkeypatch.context() as patches:
        # `model_of` enlarges weights so that rounding hides nothing.
        patches.setattr(torch.nn.Parameter, "mul_", lambda *_: None)
        model = hybrid(leak, monkeypatch, dtype)
    distance, bound = probe_packing(model, documents(), pad_token_id=0)
    assert (distance > 2 * bound) == (leak is not None)


def test_the_probe_answers_by_the_order_of_lengths_that_differs_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model without experts one draw is enough: documents that happen to hide a leak are not looked for."""
    answers = iter([(0.1, 1.0), (0.9, 1.0), (0.2, 1.0), (0.3, 1.0), (0.1, 1.0), (0.0, 1.0), (2.0, 1.0), (0.0, 1.0)])
    monkeypatch.setattr(packing, "_probe_row", lambda *_: next(answers))
    model = model_of("LlamaConfig", {})
    assert probe_packing(model, documents(), pad_token_id=0) == (0.9, 1.0)
    assert probe_packing(model, documents(), pad_token_id=0) == (2.0, 1.0)


def test_documents_are_numbered_and_padding_is_none_of_them() -> None:
    flat = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    lengths = [[1, 2, 3], [4]]
    rows = [{"input_ids": [7] * sum(length), "seq_lengths": length} for length in lengths]
    beside = packing.row_collator(model_of("Qwen3_5TextConfig", HYBRID), flat)(rows)["seq_idx"]
    assert beside.tolist() == [[1, 2, 2, 3, 3, 3], [1, 1, 1, 1, -1, -1]]
    assert packing.add_document_index(flat, rows)["seq_idx"].tolist() == [[1, 2, 2, 3, 3, 3, 4, 4, 4, 4]]
    assert "seq_idx" not in packing.row_collator(model_of("LlamaConfig", {}), flat)(rows)


def test_rows_beside_each_other_are_those_end_to_end() -> None:
    """What is computed between rows is nothing: TRL's one sequence has the same losses, and costs the square of its length."""
    flat = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    lengths = [[20, 9, 3], [17, 8], [30]]
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, VOCABULARY, (sum(length),), generator=generator).tolist() for length in lengths]
    rows = [{"input_ids": row, "seq_lengths": each} for row, each in zip(ids, lengths, strict=True)]
    one, beside = flat(rows), collate_rows_apart(flat, rows)
    assert one["input_ids"].shape == (1, 87)
    assert beside.keys() == {"input_ids", "labels", "position_ids"}
    assert {value.shape for value in beside.values()} == {(3, 32)}
    assert padding_mask(beside["position_ids"]).sum(-1).tolist() == [0, 7, 2]
    model = model_of("LlamaConfig", {}, "sdpa").double()
    losses = [model(**batch, use_cache=False).loss.item() for batch in (one, beside)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)  # norms are in float32, whose sums may come in another order


class LeakingInSomeRows(LlamaForCausalLM):
    """A mask of ones, as remote code may make, for the rows that `leaks` picks by the lengths of their documents."""

    leaks: Any = staticmethod(lambda lengths: True)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is not None:
            starts = [*(position_ids[0] == 0).nonzero().flatten().tolist(), position_ids.shape[1]]
            lengths = [end - start for start, end in itertools.pairwise(starts)]
            attention_mask = torch.ones_like(input_ids) if len(lengths) > 1 and type(self).leaks(lengths) else None
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)


def leaking_model() -> Any:
    torch.manual_seed(0)
    return LeakingInSomeRows(LlamaConfig(**SHAPE)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "own", [documents(), [[5] * 40 + [n] * 9 for n in range(6, 12)]], ids=["random", "begin alike"]
)
def test_a_mask_of_ones_is_found(own: list[list[int]], dtype: torch.dtype) -> None:
    distance, bound = probe_packing(leaking_model().to(dtype), own, pad_token_id=0)
    assert distance > max(bound, 0.1)


@pytest.mark.parametrize(
    "leaks",
    [
        lambda lengths: len(lengths) > 2,
        lambda lengths: lengths[0] > lengths[1],
        lambda lengths: lengths[0] < lengths[2] < lengths[1],
        lambda lengths: lengths[0] % 16 != 0,
        lambda lengths: len(set(lengths)) > 1,
    ],
)
@pytest.mark.parametrize("size", [2, 20, 90])
def test_a_leak_of_some_lengths_is_found(leaks: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own, model = [[(7 * n + 5 * i * i) % 120 + 3 for i in range(size)] for n in range(4)], leaking_model()
    for of_rows, is_leak in ((leaks, True), (lambda lengths: False, False)):
        monkeypatch.setattr(LeakingInSomeRows, "leaks", staticmethod(of_rows))
        distance, bound = probe_packing(model, own, pad_token_id=0)
        assert (distance > bound) == is_leak


def test_a_router_that_rounding_tips_over_is_no_leak() -> None:
    experts = {"num_hidden_layers": 4, "num_local_experts": 32, "num_experts_per_tok": 4}
    model = model_of("MixtralConfig", experts, "sdpa", torch.bfloat16)
    for seed in range(4):
        distance, bound = probe_packing(model, documents(seed, 40), pad_token_id=0)
        assert distance <= bound


@pytest.mark.parametrize("leaks", [False, True])
def test_rows_end_to_end_are_probed_as_flash_attention_gets_them(leaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "wants_one_sequence", lambda model: True)
    monkeypatch.setattr(LeakingInSomeRows, "leaks", staticmethod(lambda lengths: leaks and len(lengths) > 3))
    distance, bound = probe_packing(leaking_model(), documents(), pad_token_id=0)
    assert (distance > bound) == leaks


def test_the_probe_leaves_modes_and_random_states_and_sees_the_adapter() -> None:
    model = peft.get_peft_model(
        model_of("LlamaConfig", {"attention_dropout": 0.5}),
        peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False),
    )
    model.train()
    model.base_model.model.model.layers[0].eval()
    before, state = [module.training for module in model.modules()], torch.get_rng_state()
    with preserve_rng_and_mode(model):
        distance, bound = probe_packing(model.eval(), documents(), pad_token_id=0)
    assert distance <= bound
    assert [module.training for module in model.modules()] == before
    assert len(set(before)) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def examples(lengths: list[int], whole: bool = False, seed: int = 0) -> Dataset:
    """Random ids with every second half, or all of it, to be learned."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    masks = [[1] * len(row) if whole else [0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2) for row in ids]
    return Dataset.from_dict({"input_ids": ids, "completion_mask": masks})


def examples_of(row: dict[str, Any], column: str = "input_ids") -> list[tuple[int, ...]]:
    """The examples of a packed row."""
    bounds = itertools.pairwise(itertools.accumulate(row["seq_lengths"], initial=0))
    return [tuple(row[column][start:stop]) for start, stop in bounds]


def test_labels_are_those_that_trl_builds() -> None:
    data = examples([3, 1, 40, 7, 7]).select([4, 1, 2, 0])
    pairs = zip(data["input_ids"], data["completion_mask"], strict=True)
    expected = [[token if bit else -100 for token, bit in zip(*pair, strict=True)] for pair in pairs]
    assert with_labels(data)["labels"] == expected
    assert with_labels(data)["input_ids"] == data["input_ids"]


def test_every_example_is_in_one_row_whole() -> None:
    data = with_labels(examples([5 + 11 * n % 60 for n in range(300)]))
    packed = trl.pack_dataset(data, 128)
    assert all(sum(row["seq_lengths"]) == len(row["input_ids"]) <= 128 for row in packed)
    collected = [pair for row in packed for pair in zip(examples_of(row), examples_of(row, "labels"), strict=True)]
    assert sorted(collected) == sorted((tuple(row["input_ids"]), tuple(row["labels"])) for row in data)
    assert sum(map(len, packed["input_ids"])) == sum(map(len, data["input_ids"])) > 0.97 * 128 * len(packed)


@pytest.mark.parametrize(
    ("per_row", "micro_batch", "accumulation", "expected"),
    [
        (5.3, 8, 8, (6, 2)),
        (1.0, 8, 4, (8, 4)),
        (5.3, 2, 8, (1, 3)),  # three rows in micro-batches of at most two
        (40.0, 4, 2, (1, 1)),  # not even one row is as little as was asked for
    ],
)
def test_a_step_holds_about_the_examples_that_were_asked_for(
    per_row: float, micro_batch: int, accumulation: int, expected: tuple[int, int]
) -> None:
    assert rows_per_step(per_row, micro_batch, accumulation) == expected


def config_of(model: Path, run_dir: Path, **train: Any) -> dict[str, Any]:
    settings = {
        "max_length": 200, "gradient_accumulation_steps": 2, "max_steps": 24, "learning_rate": 3e-3, "save_strategy": "no",
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    fim = {"fim": {"max_length": 160, "middle_chars": [8, 32]}}
    return run_config("sft", model, "cogumi:stdlib", run_dir, data_section=fim, train=settings | train)


def trained(tiny_model: Path, run_dir: Path, data: Dataset, **train: Any) -> Any:
    """A real trainer as a run builds it, after its steps, on data in the order given."""
    cogumi.patch()
    run = load_config(config_of(tiny_model, run_dir, **train))
    run_dir.mkdir()
    trainer = sft.build_trainer(
        run,
        model=AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        args=trl_arguments(run),
        train_dataset=data,
        eval_dataset=None,
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
        peft_config=lora_config(run.lora),
    )
    with torch.no_grad():  # A is random; both begin the same
        torch.manual_seed(1)
        for name, parameter in sorted(trainer.model.named_parameters()):
            if "lora_A" in name:
                parameter.normal_(std=0.1)
    trainer.train()
    return trainer


@pytest.mark.parametrize("whole", [False, True])
def test_packed_is_unpacked_on_the_same_examples(tiny_model: Path, tmp_path: Path, whole: bool) -> None:
    """Rows of just four examples, two rows a step, against eight examples in two micro-batches: 12 steps."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(41, 51, (96,), generator=generator).tolist()
    data = examples(lengths, whole)
    packed = trained(tiny_model, tmp_path / "packed", data, packing=True, max_steps=12)
    rows = packed.train_dataset
    assert {len(row["seq_lengths"]) for row in rows} == {4}
    assert (packed.args.per_device_train_batch_size, packed.args.gradient_accumulation_steps) == (2, 1)
    place = {tuple(ids): n for n, ids in enumerate(data["input_ids"])}
    order = [place[ids] for row in rows for ids in examples_of(row)]
    assert sorted(order) == list(range(96))
    apart = trained(tiny_model, tmp_path / "apart", data.select(order), max_steps=12)
    steps = [[row for row in trainer.state.log_history if "loss" in row] for trainer in (packed, apart)]
    losses, norms = ([[row[key] for row in rows] for rows in steps] for key in ("loss", "grad_norm"))
    assert len(losses[0]) == 12
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert losses[0][0] - losses[0][-1] > 0.01
    weights = [dict(trainer.model.named_parameters()) for trainer in (packed, apart)]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[0])


def test_other_labels_in_a_packed_row_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    whole, half = (with_labels(examples([20] * 20, whole)) for whole in (True, False))
    trainer = trained(tiny_model, tmp_path / "a", examples([20] * 20, whole=True), packing=True, max_steps=1)
    sft.refuse_other_labels(trainer, trl.pack_dataset(whole, 200))
    with pytest.raises(
        RuntimeError, match=r"would learn \[190, 190\] tokens .* of which \[100, 100\] are to be learned"
    ):
        sft.refuse_other_labels(trainer, trl.pack_dataset(half, 200))


def test_a_run_packs_and_says_what_a_step_is(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tiny_model, tmp_path / "run", packing=True, max_steps=2, max_length=480)
    config["data"] |= {"source": str(code_parquet), "eval_rows": 4, "max_rows": 60}
    result = cogumi.train(config)
    assert "Flash Attention" not in caplog.text  # TRL's question, which the probe has answered
    record = read_json(result.run_dir / "decisions.json")["packing"]
    assert record["safe"] is True
    assert record["distance"] <= record["bound"]
    assert record["asked_per_step"] == 8
    per_row = record["examples"] / record["rows"]
    assert record["rows_per_step"] == round(8 / per_row)
    assert record["examples_per_step"] == pytest.approx(record["rows_per_step"] * per_row)
    log = (result.run_dir / "run.log").read_text()
    assert f"asked 8 examples a step; {per_row:.1f} examples a row, {record['rows_per_step']} rows a step" in log
    assert f"{100 * record['efficiency']:.1f} % of the slots used" in log


def test_a_run_that_goes_on_keeps_what_it_decided(tiny_model: Path, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "decided").mkdir()
    write_json(tmp_path / "decided" / "decisions.json", {"packing": {"safe": False}})
    run = load_config(config_of(tiny_model, tmp_path / "decided", packing=True))
    with caplog.at_level(logging.INFO, logger="cogumi"):
        common = {
            "args": trl_arguments(run),
            "train_dataset": examples([20] * 8),
            "model": None,
            "processing_class": None,
        }
        made = sft.pack_datasets(run, Ranks(), **common)
    assert made["args"].packing is False
    assert "packing: off, as when the run began" in caplog.text


# --------------------------------------------------------------------------------------------- where nobody asked for it


@pytest.mark.parametrize("row", [64, 100, 333])
def test_rows_are_counted_as_trl_packs_them(row: int) -> None:
    lengths = torch.randint(2, 64, (700,), generator=torch.Generator().manual_seed(row)).tolist()
    packed = trl.pack_dataset(with_labels(examples(lengths)), row)
    assert count_per_row(Lengths(lengths), row) == 700 / len(packed)
    assert count_per_row(Lengths(lengths * 9), row) == pytest.approx(700 / len(packed), rel=0.02)


def test_the_longest_of_a_micro_batch_is_that_of_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 500, (300,), generator=generator)
    draws = lengths[torch.randint(300, (20_000, 5), generator=generator)].max(-1).values.double().mean().item()
    assert Lengths(lengths.tolist()).longest_of(5) == pytest.approx(draws, rel=0.01)
    assert Lengths([7]).longest_of(5) == 7


SPREAD = Lengths([50] * 3000 + [450] * 400 + [1000] * 100)


def choices_for(lengths: Lengths = SPREAD, method: str = "sft", cogumi: Any = None, **train: Any) -> Any:
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "max_length": 1024}
    data = {"source": "x", "format": "preference" if method == "dpo" else "chat"}
    sections = {"model": {"name": "x"}, "data": data, "cogumi": {"method": method} | (cogumi or {})}
    run = load_config(sections | {"train": settings | train})
    return choose_packing(run, model_of("LlamaConfig", {}).config, lengths, lengths.total())


def test_packing_is_chosen_where_padding_costs_more_than_a_fifth() -> None:
    (choice,) = choices_for()
    assert (choice.key, choice.value) == ("train.packing", True)
    per_row = SPREAD.total() / (SPREAD.tokens / 1000)
    assert f"in rows of 1,000 an example takes {1000 / per_row:.0f} tokens, and 447 with padding" in choice.reason
    assert choice.reason.endswith(" examples, and 64 were asked for")


@pytest.mark.parametrize(
    "more",
    [
        {"lengths": Lengths([200] * 4000)},  # nothing is padded
        {"lengths": Lengths([400, 450, 500] * 1000)},  # a sixth is
        {"lengths": Lengths([700] * 2000 + [900] * 2000)},  # of which no row holds two
        # 9.2 a row, where 8 are a step; an epoch is two steps instead of three
        {"lengths": Lengths([90] * 2000 + [1000] * 40), "gradient_accumulation_steps": 1},
        {"lengths": Lengths([10] * 15 + [100] * 2), "gradient_accumulation_steps": 1},
        {"lengths": Lengths({})},
        {"method": "dpo"},
        {"packing": False},
        {"packing": True},
        {"padding_free": True},
        {"eval_packing": True},
        {"packing_strategy": "wrapped"},
        {"neftune_noise_alpha": 5},
        {"train_sampling_strategy": "group_by_length"},
        {"dataloader_drop_last": True},
        {"router_aux_loss_coef": 0.01},
        {"cogumi": {"backend": "unsloth"}},
        {"cogumi": {"processes": 2, "sharding": "fsdp2"}},
    ],
)
def test_packing_is_not_chosen(more: dict[str, Any]) -> None:
    assert choices_for(**more) == []


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 32])
@pytest.mark.parametrize("accumulation", [1, 3, 16])
def test_chosen_packing_keeps_the_step_within_the_memory(batch: int, accumulation: int) -> None:
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        lengths = Lengths((torch.rand(2000, generator=generator) ** (seed + 1) * 900).int().add(5).tolist())
        train = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        if choices_for(lengths, **train):
            per_row = count_per_row(lengths, lengths.quantile(1.0))
            rows, micro_batches = rows_per_step(per_row, batch, accumulation)
            assert rows <= batch  # of the longest example's length
            assert rows * micro_batches * per_row == pytest.approx(batch * accumulation, rel=0.1)


def open_config(model: Path, run_dir: Path, **train: Any) -> dict[str, Any]:
    """A run of 192 texts of 20 to 190 tokens, most of them short; rows of 200 tokens hold about four."""
    data = run_dir.parent / "texts.jsonl"
    if not data.exists():
        answers = (f"): return x + {n}\n" * (10 if n % 8 == 0 else 1) for n in range(192))
        texts = [{"prompt": f"def f{n}(x", "completion": answer} for n, answer in enumerate(answers)]
        data.write_text("\n".join(map(json.dumps, texts)))
    settings = {"max_length": 200, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 4}
    settings |= {"learning_rate": 3e-3, "save_strategy": "no", "seed": 7}
    section = {"format": "prompt_completion", "eval_rows": 16}
    return run_config("sft", model, data, run_dir, data_section=section, train=settings | train)


def assert_equal_weights(one: Any, other: Any) -> None:
    weights, others = (load_file(result.adapter / "adapter_model.safetensors") for result in (one, other))
    assert all(torch.equal(others[name], weights[name]) for name in weights)


def settings_of(run_dir: Path) -> dict[str, Any]:
    return {setting["key"]: setting["value"] for setting in read_json(run_dir / "decisions.json")["settings"]}


@pytest.mark.usefixtures("prepared_workers")
def test_a_run_that_says_nothing_is_packed_where_that_saves(tiny_model: Path, tmp_path: Path) -> None:
    result = cogumi.train(open_config(tiny_model, tmp_path / "run"), cogumi__preflight="on")
    assert settings_of(result.run_dir)["train.packing"] is True
    record, log = read_json(result.run_dir / "decisions.json")["packing"], (result.run_dir / "run.log").read_text()
    assert record["safe"] is True
    assert record["asked_per_step"] == 32
    assert record["examples_per_step"] == pytest.approx(32, rel=0.1)
    (row,) = re.findall(r"chosen: train.packing: True .in rows of (\d+) an example takes ", log)
    assert f"rows of {row} tokens" in log
    assert "packing" not in (result.run_dir / "config.yaml").read_text()
    work = read_json(result.run_dir / "forecast.json")["preflight"]["figures"]["memory"]["work"]
    assert (work["packed"], work["rows"]) == (False, 8)  # no less than what a leak would leave
    apart = cogumi.train(open_config(tiny_model, tmp_path / "apart", packing=False))
    assert result.series("eval_loss")[0] == pytest.approx(apart.series("eval_loss")[0], rel=1e-6)
    assert len(result.series("eval_loss")) == len(apart.series("eval_loss"))
    assert "packing" not in read_json(apart.run_dir / "decisions.json")


@pytest.mark.usefixtures("prepared_workers")
def test_a_forecast_packs_what_the_run_will(tiny_model: Path, tmp_path: Path) -> None:
    report = cogumi.preflight(open_config(tiny_model, tmp_path / "run"))
    (figure,) = (line.figure for line in report.lines if line.stage == "memory")
    assert "train.packing: True, which the run chooses" in figure


@pytest.mark.parametrize(
    ("format", "outcome", "why"),
    [
        ("prompt_completion", (0.5, 1e-5), "this model's logits differ by 0.5 with the examples packed beside"),
        ("fim", (float("nan"), 1.0), "this model's logits differ by nan with the examples packed beside"),
        (
            "prompt_completion",
            TypeError("no argument position_ids"),
            "this model does not take packed rows: no argument",
        ),
    ],
)
def test_a_leak_leaves_the_run_that_is_not_packed(
    format: str, outcome: Any, why: str, tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def config(name: str, **train: Any) -> dict[str, Any]:
        made = open_config(tiny_model, tmp_path / name, **train)
        if format == "fim":
            fim = {"max_length": 200, "middle_chars": [8, 32]}
            made["data"] = {"source": str(code_parquet), "eval_rows": 4, "fim": fim}
            del made["train"]["max_length"]
        return made

    def probe(*_: Any) -> tuple[float, float]:
        torch.rand(3)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    monkeypatch.setattr("cogumi.data.packing.probe_packing", probe)
    leaking = cogumi.train(config("leaking"))
    apart = cogumi.train(config("apart", packing=False))
    assert settings_of(leaking.run_dir).pop("train.packing") is True
    assert read_json(leaking.run_dir / "decisions.json")["packing"]["safe"] is False
    assert f"packing off: {why}" in (leaking.run_dir / "run.log").read_text()
    for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert leaking.series(key) == apart.series(key), key
    assert_equal_weights(leaking, apart)


def test_a_resumed_run_keeps_its_packing(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_config(tiny_model, tmp_path / "run", save_strategy="steps", save_steps=2)
    whole = cogumi.train(config, cogumi__run_dir=str(tmp_path / "whole"))
    cogumi.train(config, cogumi__sanity=2)
    monkeypatch.setattr("cogumi.methods.auto_settings.SAVED_TOKENS", 1.0)  # would not be chosen today
    resumed = cogumi.train(config)
    assert "chosen: train.packing: True (as when the run began)" in (resumed.run_dir / "run.log").read_text()
    assert_equal_weights(whole, resumed)


def test_a_run_that_began_unpacked_resumes_unpacked(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = open_config(tiny_model, tmp_path / "run", save_strategy="steps", save_steps=2)
    with monkeypatch.context() as before:
        before.setattr("cogumi.methods.auto_settings.SAVED_TOKENS", 1.0)
        cogumi.train(config, cogumi__sanity=2)
    resumed = cogumi.train(config)
    assert "train.packing" not in settings_of(resumed.run_dir)
    assert "packing" not in read_json(resumed.run_dir / "decisions.json")
