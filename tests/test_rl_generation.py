"""Rollouts that compute fewer rows, beside those of transformers' own `generate` from the same seed, in real GRPOTrainers.

The weights are float64. A row's logits may depend on the rows beside it by rounding, and float64 keeps that away from the draw.
"""

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import run_config
from gspo_batches import grpo_trainer
from multimodal_models import gemma3
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Gemma3ForConditionalGeneration,
    LlamaModel,
    LogitsProcessorList,
)

import cogumi
from cogumi.core.run_directory import read_jsonl
from cogumi.methods import gspo
from cogumi.patches.trl_internals import cache_argument, cache_name
from cogumi.rl.generation import reason_against, share_prefill_and_drop_finished
from cogumi.rl.sampling import stop_rollouts_at, use_rollout_logps

# Of different lengths, so that rows are padded on the left; some are equal to the one before, as TRL repeats prompts.
PROMPTS = ["def f(x):", "import os\nimport sys\n\ndef main(argv, out):", "x", "class A:\n    def __init__(self):"]
COPIES, LONGEST = 3, 14
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen2": {},
    "mistral": {"sliding_window": 6},  # shorter than the longest prompt, and than the completions
    "gpt_oss": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], **EXPERTS},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 32},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_neox": {},  # another way to positions and heads
}
UNSUITED: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 0,
    },
}  # fmt: skip
MakeTrainer = Callable[..., Any]


@pytest.fixture
def build(tiny_model: Path, tmp_path: Path) -> MakeTrainer:
    """A GRPOTrainer on a random model of a family in float64, whose completions end at different places."""

    def built(family: str = "llama", lora: bool = False, settings: Any = None, ends: float = 6.5, **more: Any) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        shape = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, **special}
        config = AutoConfig.for_model(family, **TEXT, **shape, **(FAMILIES | UNSUITED)[family], **(settings or {}))
        torch.manual_seed(0)
        # Gemma 2 has no sdpa in transformers 5.24, and eager attention casts float64's mask to an infinite float32.
        dtype = torch.float32 if family == "gemma2" else torch.float64
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if "moe" in family or family == "gpt_oss":
            model.set_experts_implementation("eager")  # the only one in float64
        head = nn.Linear(TEXT["hidden_size"], len(tokenizer), dtype=dtype)
        with torch.no_grad():
            head.weight.normal_(std=1.5 / TEXT["hidden_size"] ** 0.5)  # logits of a standard deviation of about 1.5
            head.bias.zero_()
            head.bias[tokenizer.eos_token_id] = ends  # about one in ten draws, of two thousand tokens
        model.set_output_embeddings(head)
        step = {"per_device_train_batch_size": len(PROMPTS) * COPIES, "num_generations": COPIES}
        return grpo_trainer(
            tiny_model,
            tmp_path / "trainer",
            PROMPTS * COPIES,
            lora={"init_lora_weights": False} if lora else False,
            reward=lambda completions, **_: [0.0] * len(completions),
            model=model,
            **step | {"max_completion_length": LONGEST} | more,
        )

    return built


def rollout(trainer: Any, prompts: list[str] | None = None) -> tuple[Any, Any, list[int], torch.Tensor]:
    """(ids, log-probabilities, rows of each forward pass, state of the generator behind it) of a turn from one seed."""
    prompts = prompts or [prompt for prompt in PROMPTS for _ in range(COPIES)]
    inputs = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    torch.manual_seed(3)
    with counted_rows(model) as rows:
        ids, logps = trainer._generate_single_turn(inputs, None, {}, COPIES)
    return ids, logps, rows, torch.get_rng_state()


@contextmanager
def counted_rows(model: nn.Module) -> Iterator[list[int]]:
    rows: list[int] = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    try:
        yield rows
    finally:
        hook.remove()


def needed_rows(ids: list[list[int]], prompts: int = len(PROMPTS)) -> list[int]:
    """Rows of each forward pass where none is computed in vain: `prompts`, and then the completions that have not ended."""
    return [prompts, *(sum(len(token_ids) > step for token_ids in ids) for step in range(1, max(map(len, ids))))]


def both(trainer: Any, prompts: list[str] | None = None) -> tuple[Any, Any]:
    """A rollout as transformers makes it, and one with fewer rows, by the same trainer."""
    trainer.model.train()
    before = rollout(trainer, prompts)
    share_prefill_and_drop_finished(trainer)
    return before, rollout(trainer, prompts)


def assert_same(before: Any, after: Any) -> None:
    assert after[0] == before[0]
    assert torch.equal(after[3], before[3])  # as many random numbers were drawn


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_is_the_same_and_computes_no_row_in_vain(build: MakeTrainer, family: str, lora: bool) -> None:
    before, after = both(build(family, lora))
    assert_same(before, after)
    batch = len(PROMPTS) * COPIES
    assert before[2] == [batch] * len(before[2])
    assert after[2] == needed_rows(after[0])
    lengths = {len(each) for each in after[0]}
    assert min(lengths) < 6  # some ended early
    assert len(lengths) > 2


def test_completions_that_all_end_stop_the_batch(build: MakeTrainer) -> None:
    trainer = build(ends=8.0, max_completion_length=200)
    before, after = both(trainer)
    assert_same(before, after)
    assert max(map(len, after[0])) < 200
    assert after[2] == needed_rows(after[0])


def test_prompts_without_copies_and_a_single_one(build: MakeTrainer) -> None:
    trainer = build()
    for prompts in ([*PROMPTS, PROMPTS[0]], PROMPTS[:1]):  # equal ones that do not follow each other are two prompts
        before, after = both(trainer, prompts)
        assert_same(before, after)
        assert after[2] == needed_rows(after[0], len(prompts))


def test_copies_of_one_prompt_have_no_padding_and_no_mask(build: MakeTrainer) -> None:
    before, after = both(build(), PROMPTS[:1] * COPIES)
    assert_same(before, after)
    assert after[2] == needed_rows(after[0], 1)


def test_equal_ids_behind_different_padding_are_different_prompts(build: MakeTrainer) -> None:
    """Padding is told by the mask: a prompt may begin with the padding token."""
    trainer = build()
    pad = trainer.processing_class.pad_token
    before, after = both(trainer, [pad + PROMPTS[0], PROMPTS[0]])
    assert_same(before, after)
    assert after[2] == needed_rows(after[0], 2)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"generation_kwargs": {"do_sample": False}},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7, "temperature": 1.3},
    "min-p": {"min_p": 0.1},
    "repetition penalty": {"repetition_penalty": 1.4},
    "at least": {"generation_kwargs": {"min_new_tokens": 5}},
    "prefill in chunks": {"generation_kwargs": {"prefill_chunk_size": 4}},
    "no repeated pairs": {"generation_kwargs": {"no_repeat_ngram_size": 2}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_draw_keep_their_meaning(build: MakeTrainer, name: str) -> None:
    before, after = both(build(**copy.deepcopy(SETTINGS[name])))
    assert_same(before, after)
    assert sum(after[2]) < sum(before[2])


def test_a_processor_that_calls_the_model_itself_is_left_alone(build: MakeTrainer) -> None:
    before, after = both(build(generation_kwargs={"guidance_scale": 1.5}))
    assert_same(before, after)


def test_a_processor_may_fill_a_cache_of_its_own(build: MakeTrainer) -> None:
    """What it computes is not taken for the batch of `generate`."""
    trainer = build()
    generate, computed = trainer.model.generate, []

    def look_again(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(ids)
        cache = {cache_name(trainer.model): DynamicCache(config=trainer.model.config)}
        result = trainer.model(input_ids=ids, attention_mask=mask, **cache)
        computed.append(result.logits)
        return scores

    trainer.model.generate = lambda **kwargs: generate(logits_processor=LogitsProcessorList([look_again]), **kwargs)
    before, after = both(trainer)
    assert_same(before, after)
    assert after[2][::2] == needed_rows(after[0])
    assert {len(each) for each in computed} == set(after[2][1::2]) == {len(PROMPTS) * COPIES}


def test_without_an_end_token_rows_that_met_a_stop_string_run_on(build: MakeTrainer) -> None:
    trainer = build(ends=1.0)
    stop_rollouts_at(trainer, ["e"])
    trainer.generation_config.eos_token_id = trainer.model.generation_config.eos_token_id = None
    before, after = both(trainer)
    assert_same(before, after)
    assert after[2] == [len(PROMPTS), *before[2][1:]]


@pytest.mark.parametrize("stops", [["e", "\n"], ["e", "<|fim_prefix|>"]], ids=["strings", "a string and a token"])
def test_completions_leave_at_stop_texts(build: MakeTrainer, stops: list[str]) -> None:
    trainer = build(ends=1.0)
    stop_rollouts_at(trainer, stops)
    before, after = both(trainer)
    assert_same(before, after)
    assert after[2] == needed_rows(after[0])
    decode = trainer.processing_class.decode
    assert sum("e" in decode(ids) for ids in after[0]) > 2


@pytest.mark.parametrize("stops", [[], ["e"]], ids=["no stops", "stops"])
def test_the_samplers_log_probabilities_are_the_same(build: MakeTrainer, stops: list[str]) -> None:
    trainer = build(ends=4.0, temperature=0.7)
    if stops:
        stop_rollouts_at(trainer, stops)
    use_rollout_logps(trainer)
    before, after = both(trainer)
    assert_same(before, after)
    assert after[2] == needed_rows(after[0])
    assert list(map(len, after[1])) == list(map(len, after[0]))
    for one, other in zip(before[1], after[1], strict=True):
        torch.testing.assert_close(
            torch.tensor(other), torch.tensor(one), rtol=0, atol=1e-5
        )  # they are kept in float32


def test_an_evaluation_is_shorter_too(build: MakeTrainer) -> None:
    trainer = build("qwen3", lora=True)
    trainer.model.eval()
    before = rollout(trainer)
    share_prefill_and_drop_finished(trainer)
    after = rollout(trainer)
    assert_same(before, after)
    assert after[2] == needed_rows(after[0])


def test_generate_is_as_it_was_outside_of_a_rollout(build: MakeTrainer) -> None:
    trainer = build()
    own = dict(vars(trainer.model))
    share_prefill_and_drop_finished(trainer)
    rollout(trainer)
    assert vars(trainer.model).keys() == own.keys()
    assert trainer.model.forward == own["forward"]  # TRL's, for its fused head


# -------------------------------------------------------------------------------------------- left as transformers does it

LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"generation_kwargs": {"num_beams": 2}}, "beam sample"),
    "static cache": ({"generation_kwargs": {"cache_implementation": "static"}}, "cache_implementation is static"),
    "attention dropout": ({"settings": {"attention_dropout": 0.1}}, "attention_dropout 0.1 draws random numbers"),
    "linear attention": ({"family": "qwen3_next"}, "LinearAttentionLayer of its cache does not give single rows"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_left_out_is_computed(build: MakeTrainer, name: str, caplog: pytest.LogCaptureFixture) -> None:
    given, reason = LEFT[name]
    trainer = build(**copy.deepcopy(given))
    with caplog.at_level(logging.INFO, logger="cogumi.rl.generation"):
        before, after = both(trainer)
        again = rollout(trainer)
    assert_same(before, after)
    assert after[2] == before[2]
    assert again[0] == before[0]
    said = [record.message for record in caplog.records if record.name == "cogumi.rl.generation"]
    assert len(said) == 1  # of two rollouts
    assert said[0].startswith("rollouts: generate is left as it is, because")
    assert reason in said[0]


def test_lora_dropout_is_drawn_for_each_row(build: MakeTrainer) -> None:
    trainer = build(lora=True)
    for name, module in trainer.model.named_modules():
        if name.endswith("lora_dropout"):
            module["default"] = nn.Dropout(0.1)
    before, after = both(trainer)
    assert_same(before, after)
    assert after[2] == before[2]
    trainer.model.eval()  # where it is off
    assert sum(rollout(trainer)[2]) < sum(before[2])


def test_settings_that_drop_count_in_training_alone(build: MakeTrainer) -> None:
    trainer = build(settings={"attention_dropout": 0.1})
    assert reason_against(trainer, trainer.model.train()) == "attention_dropout 0.1 draws random numbers for each row"
    assert reason_against(trainer, trainer.model.eval()) == ""


def test_several_processes_compute_the_same_number_of_steps(
    build: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build()
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", property(lambda _: 2))
    assert "several processes" in reason_against(trainer, trainer.model)


def test_continuous_batching_decodes_by_itself(build: MakeTrainer) -> None:
    trainer = build(use_transformers_continuous_batching=True)
    share_prefill_and_drop_finished(trainer)
    assert "_generate_single_turn" not in vars(trainer)


def test_a_model_of_more_than_text_is_left_alone(build: MakeTrainer) -> None:
    model = Gemma3ForConditionalGeneration(gemma3({**TEXT, "vocab_size": 300}))
    assert reason_against(build(), model) == "Gemma3ForConditionalGeneration takes more than text"


def test_inputs_of_another_shape_are_left_alone(build: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer = build()
    before = rollout(trainer)
    prepare = trainer.model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def prepare_more(*args: Any, **kwargs: Any) -> Any:
        return prepare(*args, **kwargs) | {"seq_idx": torch.tensor(0)}

    trainer.model.prepare_inputs_for_generation = prepare_more
    share_prefill_and_drop_finished(trainer)
    with caplog.at_level(logging.INFO, logger="cogumi.rl.generation"):
        after = rollout(trainer)
    assert_same(before, after)
    assert after[2] == before[2]
    assert "LlamaForCausalLM has other inputs than rows of tokens" in caplog.text


def test_an_adapter_that_counts_positions_of_each_row_is_left_alone(build: MakeTrainer) -> None:
    trainer = build(lora=True)
    model = trainer.model.get_base_model()
    assert reason_against(trainer, model) == ""
    trainer.model.peft_config["default"].alora_invocation_tokens = [5]
    assert "alora_invocation_tokens" in reason_against(trainer, model)


# ----------------------------------------------------------------------------------------------------------- a whole run


def test_a_run_has_the_rollouts_of_plain_generate(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run from a config, with a stop string and the sampler's log-probabilities, and the same without the module."""
    computed: list[int] = []
    forward = LlamaModel.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if cache_argument(kwargs) is not None:
            computed.append(len(kwargs["input_ids"]))
        return forward(self, *args, **kwargs)

    def train(name: str) -> tuple[list[Any], list[Any], int]:
        computed.clear()
        options = {"rewards": ["edit_similarity"], "stop": ["e"], "behaviour_logps": "rollout"}
        steps = {"max_steps": 4, "num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 2}
        steps |= {"max_completion_length": 12, "learning_rate": 1e-3, "save_strategy": "no"}
        rows = {"eval_rows": 0, "max_rows": 15, "fim": {"max_length": 160, "middle_chars": [8, 32]}}
        sections = {"data_section": rows, "train": steps, "cogumi": options}
        config = run_config("gspo", tiny_model, code_parquet, tmp_path / name, **sections)
        config["model"]["dtype"] = "float32"
        result = cogumi.train(config)
        return read_jsonl(tmp_path / name / "rollouts.jsonl"), result.series("loss"), sum(computed)

    monkeypatch.setattr(LlamaModel, "forward", counting)
    rollouts, losses, rows = train("ours")
    monkeypatch.setattr(gspo, "share_prefill_and_drop_finished", lambda trainer: None)
    plain, plain_losses, plain_rows = train("plain")
    assert rollouts == plain
    assert len(plain) == 2
    assert losses == pytest.approx(plain_losses, abs=1e-5)
    assert rows < 0.7 * plain_rows
