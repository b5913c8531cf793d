"""Packing: models in which packed examples read each other are found, and a packed run learns what an unpacked one does."""

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import cogumi
from cogumi.core.run_directory import read_json
from cogumi.data.packing import collate_rows_apart, padding_mask, probe_packing, rows_per_step, with_labels
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
    "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def documents(seed: int = 0, count: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (30 + 7 * n,), generator=generator).tolist() for n in range(count)]


def model_of(kind: str, more: dict[str, Any], attention: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

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
        ("Qwen3NextConfig", HYBRID, None),  # a state along the sequence
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, None),  # a convolution along it
        ("MambaConfig", {"state_size": 8}, None),
        ("GptOssConfig", {**MOE, "head_dim": 8, "sliding_window": 8}, "eager"),  # its mask is made without position ids
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_reads_across_is_found(
    kind: str, more: dict[str, Any], attention: str | None, dtype: torch.dtype
) -> None:
    distance, bound = probe_packing(model_of(kind, more, attention, dtype), documents(), pad_token_id=0)
    assert distance > 2 * bound


class WithItsOwnMask(LlamaForCausalLM):
    """As remote code may be: a mask of ones where none is given."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return super().forward(input_ids=input_ids, attention_mask=mask, **more)


def test_rows_beside_each_other_are_those_end_to_end() -> None:
    """What is computed between rows is nothing: TRL's one sequence has the same losses, and costs the square of its length."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    flat = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    lengths = [[20, 9, 3], [17, 8], [30]]
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, VOCABULARY, (sum(length),), generator=generator).tolist() for length in lengths]
    rows = [{"input_ids": row, "seq_lengths": each} for row, each in zip(ids, lengths, strict=True)]
    one, beside = flat(rows), collate_rows_apart(flat, rows)
    assert one["input_ids"].shape == (1, 87)
    assert {key: value.shape for key, value in beside.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (3, 32)
    )
    assert padding_mask(beside["position_ids"]).sum(-1).tolist() == [0, 7, 2]
    model = model_of("LlamaConfig", {}, "sdpa").double()
    losses = [model(**batch, use_cache=False).loss.item() for batch in (one, beside)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)  # norms are in float32, whose sums may come in another order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_ones_is_found(dtype: torch.dtype) -> None:
    from transformers import LlamaConfig

    torch.manual_seed(0)
    distance, bound = probe_packing(WithItsOwnMask(LlamaConfig(**SHAPE)).to(dtype), documents(), pad_token_id=0)
    assert distance > max(bound, 0.1)


class LeakingInSomeRows(LlamaForCausalLM):
    """A mask of ones for the rows that `leaks` picks by the lengths of their documents."""

    leaks: Any = None

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is not None:
            starts = [*(position_ids[0] == 0).nonzero().flatten().tolist(), position_ids.shape[1]]
            lengths = [end - start for start, end in itertools.pairwise(starts)]
            attention_mask = torch.ones_like(input_ids) if len(lengths) > 1 and type(self).leaks(lengths) else None
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)


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
    from transformers import LlamaConfig

    torch.manual_seed(0)
    monkeypatch.setattr(LeakingInSomeRows, "leaks", staticmethod(leaks))
    own = [[(7 * n + 5 * i * i) % 120 + 3 for i in range(size)] for n in range(4)]
    model = LeakingInSomeRows(LlamaConfig(**SHAPE)).eval()
    distance, bound = probe_packing(model, own, pad_token_id=0)
    assert distance > bound
    monkeypatch.setattr(LeakingInSomeRows, "leaks", staticmethod(lambda lengths: False))
    distance, bound = probe_packing(model, own, pad_token_id=0)
    assert distance <= bound


def test_a_router_that_rounding_tips_over_is_no_leak() -> None:
    experts = {"num_hidden_layers": 4, "num_local_experts": 32, "num_experts_per_tok": 4}
    model = model_of("MixtralConfig", experts, "sdpa", torch.bfloat16)
    for seed in range(4):
        distance, bound = probe_packing(model, documents(seed, 40), pad_token_id=0)
        assert distance <= bound


@pytest.mark.parametrize("leaks", [False, True])
def test_rows_end_to_end_are_probed_as_flash_attention_gets_them(leaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    from cogumi.data import packing

    torch.manual_seed(0)
    monkeypatch.setattr(packing, "wants_one_sequence", lambda model: True)
    monkeypatch.setattr(LeakingInSomeRows, "leaks", staticmethod(lambda lengths: leaks and len(lengths) > 3))
    distance, bound = probe_packing(LeakingInSomeRows(LlamaConfig(**SHAPE)).eval(), documents(), pad_token_id=0)
    assert (distance > bound) == leaks


def test_documents_that_begin_alike_do_not_hide_a_leak() -> None:
    from transformers import LlamaConfig

    torch.manual_seed(0)
    alike = [[5] * 40 + [n] * 9 for n in range(6, 12)]
    distance, bound = probe_packing(WithItsOwnMask(LlamaConfig(**SHAPE)), alike, pad_token_id=0)
    assert distance > bound


def test_the_probe_leaves_modes_and_random_states_and_sees_the_adapter() -> None:
    import peft

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


def test_labels_are_those_that_trl_builds() -> None:
    data = examples([3, 1, 40, 7, 7]).select([4, 1, 2, 0])
    expected = [
        [token if learned else -100 for token, learned in zip(row["input_ids"], row["completion_mask"], strict=True)]
        for row in data
    ]
    assert with_labels(data)["labels"] == expected
    assert with_labels(data)["input_ids"] == data["input_ids"]


def test_every_example_is_in_one_row_whole() -> None:
    data = examples([5 + 11 * n % 60 for n in range(300)])
    packed = trl.pack_dataset(with_labels(data), 128)
    collected = []
    for row in packed:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) <= 128
        start = 0
        for length in row["seq_lengths"]:
            collected.append(
                (tuple(row["input_ids"][start : start + length]), tuple(row["labels"][start : start + length]))
            )
            start += length
    labelled = with_labels(data)
    assert sorted(collected) == sorted((tuple(row["input_ids"]), tuple(row["labels"])) for row in labelled)
    tokens = sum(map(len, data["input_ids"]))
    assert sum(map(len, packed["input_ids"])) == tokens > 0.97 * 128 * len(packed)


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
    merge = {"merge": True}
    return run_config("sft", model, "cogumi:stdlib", run_dir, data_section=fim, train=settings | train, cogumi=merge)


def trained(tiny_model: Path, run_dir: Path, data: Dataset, **train: Any) -> Any:
    """A real trainer as a run builds it, after its steps, on data in the order given."""
    from cogumi.config.schema import load_config
    from cogumi.methods import sft
    from cogumi.methods.building import trl_arguments
    from cogumi.models.adapters import lora_config

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
    order = []
    for row in rows:
        start = 0
        for length in row["seq_lengths"]:
            order.append(place[tuple(row["input_ids"][start : start + length])])
            start += length
    assert sorted(order) == list(range(96))
    apart = trained(tiny_model, tmp_path / "apart", data.select(order), max_steps=12)
    losses = [[row["loss"] for row in trainer.state.log_history if "loss" in row] for trainer in (packed, apart)]
    norms = [[row["grad_norm"] for row in trainer.state.log_history if "loss" in row] for trainer in (packed, apart)]
    assert len(losses[0]) == 12
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert losses[0][0] - losses[0][-1] > 0.01
    weights = [dict(trainer.model.named_parameters()) for trainer in (packed, apart)]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[0])


def test_other_labels_in_a_packed_row_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    from cogumi.methods.sft import refuse_other_labels

    whole, half = (with_labels(examples([20] * 20, whole)) for whole in (True, False))
    trainer = trained(tiny_model, tmp_path / "a", examples([20] * 20, whole=True), packing=True, max_steps=1)
    refuse_other_labels(trainer, trl.pack_dataset(whole, 200))
    with pytest.raises(
        RuntimeError, match=r"would learn \[190, 190\] tokens .* of which \[100, 100\] are to be learned"
    ):
        refuse_other_labels(trainer, trl.pack_dataset(half, 200))


def test_a_run_packs_and_says_what_a_step_is(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tiny_model, tmp_path / "run", packing=True, max_steps=2, max_length=480)
    config["data"] |= {"source": str(code_parquet), "eval_rows": 4, "max_rows": 60}
    result = cogumi.train(config, cogumi__merge=False)
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
    apart = cogumi.train(config, cogumi__merge=False, train__packing=False, cogumi__run_dir=str(tmp_path / "apart"))
    assert result.series("eval_loss")[0] == pytest.approx(apart.series("eval_loss")[0], rel=1e-5)


def test_a_run_of_a_model_that_leaks_is_not_packed_and_says_why(
    tiny_model: Path, code_parquet: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    more = {
        "layer_types": ["conv", "full_attention"],
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
    }
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "max_position_embeddings": 512}
    model_of("Lfm2Config", more | ends).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = config_of(tmp_path / "model", tmp_path / "run", packing=True, max_steps=2)
    config["data"] |= {"source": str(code_parquet), "max_rows": 60}
    result = cogumi.train(config, cogumi__merge=False)
    assert read_json(result.run_dir / "decisions.json")["packing"]["safe"] is False
    assert (
        "packing off: this model's packed logits differ from separate ones by 0."
        in (result.run_dir / "run.log").read_text()
    )


def test_a_run_that_goes_on_keeps_what_it_decided(tiny_model: Path, tmp_path: Path, caplog: Any) -> None:
    from cogumi.core.run_directory import write_json

    (tmp_path / "decided").mkdir()
    write_json(tmp_path / "decided" / "decisions.json", {"packing": {"safe": False}})
    from cogumi.config.schema import load_config
    from cogumi.methods import sft
    from cogumi.methods.building import trl_arguments
    from cogumi.stack.ranks import Ranks

    run = load_config(config_of(tiny_model, tmp_path / "decided", packing=True))
    with caplog.at_level(logging.INFO, logger="cogumi"):
        made = sft.pack_datasets(run, Ranks(), None, trl_arguments(run), examples([20] * 8), None, None)
    assert made["args"].packing is False
    assert "packing: off, as when the run began" in caplog.text
