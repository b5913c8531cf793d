"""Every guard, both ways, on real trainers: what TRL does without it, and that it speaks then and only then."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cogumi.core.errors import UsageError
from cogumi.health.verdict import judge_gspo
from cogumi.rl import guards
from cogumi.rl.guards import NAMES, OWN_OBJECTIVE, find_problems, guard_trainer
from cogumi.rl.memory_plan import check_groups

# A rollout of four optimizer steps: nothing to say about.
GOOD = {"steps_per_generation": 4}


def messages(trainer: Any, refused: bool | None = None) -> list[str]:
    result = find_problems(trainer)
    assert all("\n" not in finding.message for finding in result)
    return [finding.message for finding in result if refused in (None, finding.refused)]


def refusal(trainer: Any) -> str:
    (message,) = messages(trainer, True)
    return message


def test_a_good_run_is_left_alone(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages(make_trainer(**GOOD)) == []
    assert messages(make_trainer("gspo-length", **GOOD)) == []
    monkeypatch.setattr(guards, "backend_of", lambda _: "unsloth")
    assert guard_trainer(make_trainer(**GOOD, loss_type="dapo")) == []


def test_refusals_are_in_one_message_which_says_how_to_accept_each(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(lora={"lora_dropout": 0.05}, epsilon=0.2, epsilon_high=0.28, steps_per_generation=1)
    with pytest.raises(UsageError) as refused:
        guard_trainer(trainer)
    first, second = str(refused.value).splitlines()
    sections = "(train. is trl.GRPOConfig, lora. is peft.LoraConfig); to train so on purpose: cogumi.patch"
    assert "lora_dropout" in first
    assert first.endswith(f"{sections}(accept=['dropout'])")
    assert "train.epsilon 0.2 and train.epsilon_high 0.28" in second
    assert second.endswith(f"{sections}(accept=['wide-clip'])")
    monkeypatch.setattr(guards, "_accepted", frozenset({"dropout"}))
    with pytest.raises(UsageError, match=r"cogumi\.patch\(accept=\['dropout', 'wide-clip'\]\)"):  # and what was, stays
        guard_trainer(trainer)
    monkeypatch.setattr(guards, "_accepted", frozenset({"dropout", "wide-clip"}))
    *accepted, warning = guard_trainer(trainer)
    assert [line.partition(":")[0] for line in accepted] == ["accepted (dropout)", "accepted (wide-clip)"]
    assert "exactly 1" in warning
    trainer.cogumi_run = True  # which accepts nothing
    with pytest.raises(UsageError, match=r"train\.epsilon 0\.2") as refused:
        guard_trainer(trainer)
    assert "GRPOConfig" not in str(refused.value)
    assert "accept" not in str(refused.value)


def test_every_finding_has_a_name_that_can_be_accepted() -> None:
    source = Path(guards.__file__).read_text()
    named = set(re.findall(r'Finding\(\s*"([\w-]+)"', source))
    assert named == set(NAMES) - {OWN_OBJECTIVE}


# ------------------------------------------------------------------------------------------------------------ dropout


def clipped(trainer: Any) -> list[float]:
    """The share of each step's sequences whose ratio is outside 3e-4/4e-4."""
    compute = trainer._get_per_token_logps_and_entropies
    shares = []

    def note(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        if kwargs.get("compute_entropy"):  # the loss, not the rollout's old log-probabilities
            inputs = trainer._buffered_inputs[trainer._step % trainer.args.steps_per_generation]
            mask, old = inputs["completion_mask"], inputs["old_per_token_logps"]
            ratio = torch.exp(((result[0].detach() - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1))
            shares.append(((ratio < 1 - 3e-4) | (ratio > 1 + 4e-4)).float().mean().item())
        return result

    trainer._get_per_token_logps_and_entropies = note
    trainer.train()
    return shares


def test_what_dropout_does_to_the_ratio(make_trainer: Callable[..., Any]) -> None:
    """The first step of a rollout is taken with the weights that wrote it, so nothing but dropout is in its ratios."""
    config = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    config |= {"steps_per_generation": 4, "per_device_train_batch_size": 32, "rows": 32}

    def shares(p: float, steps: int, init: bool, **more: Any) -> list[float]:
        torch.manual_seed(0)
        lora = {"lora_dropout": p, "init_lora_weights": init}
        return clipped(make_trainer(lora=lora, max_steps=steps, **config, **more))

    (with_dropout,), (without,) = shares(0.05, 1, False), shares(0.0, 1, False)
    (switched_off,) = shares(0.05, 1, False, disable_dropout=True)
    print(f"clipped at step 1: {with_dropout:.0%} with lora_dropout 0.05, {without:.0%} without")
    assert with_dropout > 0.5
    assert without == switched_off == 0

    fresh = shares(0.05, 5, True)  # B = 0, so that the first rollout drops nothing
    print(f"a fresh adapter: {fresh[0]:.0%} at the start of the first rollout, {fresh[4]:.0%} of the second")
    assert fresh[0] == 0
    assert fresh[4] > 0.1  # 0.4 to 0.6, depending on the sample's texts
    assert shares(0.0, 5, True)[4] == 0


def test_dropout_is_refused_where_a_sequence_ratio_is_clipped(make_trainer: Callable[..., Any]) -> None:
    lora = {"lora_dropout": 0.05}
    message = refusal(make_trainer(**GOOD, lora=lora))
    assert "lora.lora_dropout is 0.05" in message
    assert "lora.lora_dropout: 0" in message
    assert "and 13 more" in message  # 2 layers x 7 linear layers
    (warning,) = messages(make_trainer("dapo", **GOOD, lora=lora), False)
    assert "see different masks" in warning
    assert messages(make_trainer("vespo", **GOOD, lora=lora), True) == []
    assert messages(make_trainer(**GOOD, lora=lora, disable_dropout=True)) == []


def test_dropout_that_is_not_loras_is_found_too(make_trainer: Callable[..., Any]) -> None:
    """Llama's attention_dropout is a number and a functional call: TRL's disable_dropout leaves it on."""
    trainer = make_trainer(**GOOD, disable_dropout=True)
    layers = trainer.model.base_model.model.model.layers
    layers[0].self_attn.attention_dropout = 0.1
    message = refusal(trainer)
    assert "layers.0.self_attn.attention_dropout)" in message
    assert "config.json" in message
    layers[0].self_attn.attention_dropout = 0.0
    layers[1].mlp.act_fn = torch.nn.Sequential(layers[1].mlp.act_fn, torch.nn.Dropout(0.2))
    assert "Set train.disable_dropout: true" in refusal(trainer)


# ---------------------------------------------------------------------------------------------------------- pad == eos


def run_with_pad(make_trainer: Callable[..., Any], pad_is_eos: bool) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    trainer = make_trainer(**GOOD, max_steps=4, max_completion_length=12)
    tokenizer, model = trainer.processing_class, trainer.model
    # Every third token ends a completion, so that rows are padded.
    trainer.eos_token_ids = sorted({tokenizer.eos_token_id, *range(0, model.config.vocab_size, 3)})
    trainer.generation_config.eos_token_id = trainer.eos_token_ids
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    else:
        # A pad token the model never writes, so that both runs sample the same.
        assert tokenizer.pad_token_id != tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    trainer.generation_config.pad_token_id = tokenizer.pad_token_id
    trainer.train()
    return trainer, [p.detach().clone() for p in model.parameters() if p.requires_grad]


def test_under_trl_it_does_not_matter_whether_pad_is_eos(make_trainer: Callable[..., Any]) -> None:
    apart, together = run_with_pad(make_trainer, False), run_with_pad(make_trainer, True)
    logs = [[row for row in run[0].state.log_history if "loss" in row] for run in (apart, together)]
    assert min(row["completions/min_length"] for row in logs[0] if "reward" in row) < 12  # padded rows were there
    assert any(row["grad_norm"] > 0 for row in logs[0])
    for key in ("loss", "grad_norm", "policy/num_tokens", "policy/new_logprobs"):
        assert [row[key] for row in logs[0]] == [row[key] for row in logs[1]], key
    assert all(torch.equal(a, b) for a, b in zip(apart[1], together[1], strict=True))
    assert messages(together[0]) == []


def test_under_unsloth_pad_as_eos_is_refused(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "backend_of", lambda _: "unsloth")
    trainer = make_trainer(**GOOD)
    assert messages(trainer) == []
    tokenizer = trainer.processing_class
    trainer.eos_token_ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    (warning,) = messages(trainer, False)
    assert "one of the model's EOS tokens" in warning
    tokenizer.pad_token = tokenizer.eos_token
    assert f"(id {tokenizer.eos_token_id}): unsloth masks" in refusal(trainer)


# ------------------------------------------------------------------------------------------------------ loss settings


@pytest.mark.parametrize("loss", ["grpo", "luspo"])
def test_a_token_losss_epsilon_is_refused_at_sequence_level(loss: str, make_trainer: Callable[..., Any]) -> None:
    level = {"importance_sampling_level": "sequence"}
    assert "train.epsilon 0.2" in refusal(make_trainer(loss, **GOOD, **level))  # TRL's default
    message = refusal(make_trainer(loss, **GOOD, **level, epsilon=3e-4, epsilon_high=0.051))
    assert message.startswith("train.epsilon_high 0.051")
    assert messages(make_trainer(loss, **GOOD, **level, epsilon=0.05)) == []
    assert messages(make_trainer("grpo", **GOOD, epsilon=0.2)) == []
    assert messages(make_trainer("sapo", **GOOD, **level)) == []  # no clip


@pytest.mark.parametrize("loss", ["bnpo", "dr_grpo", "dapo", "cispo"])
def test_a_sequence_ratio_in_a_loss_summed_over_tokens_is_refused(loss: str, make_trainer: Callable[..., Any]) -> None:
    message = refusal(make_trainer(loss, **GOOD, importance_sampling_level="sequence", epsilon=3e-4))
    assert f"train.loss_type {loss} sums over tokens" in message
    assert messages(make_trainer(loss, **GOOD), True) == []


def test_luspo_at_token_level_is_refused(make_trainer: Callable[..., Any]) -> None:
    assert "train.loss_type: gspo-length" in refusal(make_trainer("luspo", **GOOD))


def test_trls_kl_correction_is_said_where_it_does_not_reach(make_trainer: Callable[..., Any]) -> None:
    (warning,) = messages(make_trainer(**GOOD, beta=0.04), False)
    assert "train.beta 0.04" in warning
    assert "set train.use_bias_correction_kl: false" in warning
    assert messages(make_trainer(**GOOD, beta=0.04, use_bias_correction_kl=False)) == []
    assert not [
        message for message in messages(make_trainer("grpo", **GOOD, beta=0.04)) if "use_bias_correction_kl" in message
    ]


@pytest.mark.parametrize(
    ("accumulation", "steps", "iterations"),
    [(1, 1, 1), (2, 2, 1), (4, 2, 1), (4, 2, 2), (2, 2, 2), (2, 3, 1), (1, 4, 1)],
)
def test_a_ratio_that_is_always_one_is_said(
    accumulation: int, steps: int, iterations: int, make_trainer: Callable[..., Any]
) -> None:
    """The guard speaks exactly where TRL hands the loss no old log-probabilities."""
    config = {"gradient_accumulation_steps": accumulation, "steps_per_generation": steps, "num_iterations": iterations}
    trainer = make_trainer(**config, max_steps=1)
    actual = messages(trainer, False)
    trainer.train()
    always_one = "old_per_token_logps" not in trainer._buffered_inputs[0]
    assert [f"train.steps_per_generation: {4 * accumulation}" in message for message in actual] == [True] * always_one
    trainer.cogumi_behaviour_logps = "rollout"
    assert messages(trainer) == []
    assert not [m for m in messages(make_trainer("dapo", **config)) if "exactly 1" in m]


# ------------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_generations": 1}, "at least 2"),
        ({"num_generations": 6}, "per_device_train_batch_size 8 x 1 .* = 8 completions.*: 6 or 12$"),
        ({"num_generations": 8, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}, ": 2 or 4$"),
        ({"num_generations": 8, "per_device_train_batch_size": 3, "steps_per_generation": 2}, "set .*: 4$"),
        (
            {"num_generations": 4, "generation_batch_size": 12},
            "generation_batch_size 12, .*set .*: 8 or 16$",
        ),
        (
            {"num_generations": 16, "generation_batch_size": 24},
            "generation_batch_size 24, .*set .*: 16 or 32$",
        ),
        ({"num_generations": 8}, None),
        ({"num_generations": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, None),
        ({"num_generations": 8, "generation_batch_size": 32}, None),
    ],
)
def test_groups_are_refused_where_trl_refuses_them(arguments: dict[str, int], message: str | None) -> None:
    import trl

    def build() -> None:
        trl.GRPOConfig(output_dir="unused", bf16=False, report_to="none", **arguments)

    if message is None:
        check_groups(arguments)
        build()
        return
    with pytest.raises(UsageError, match=message):
        check_groups(arguments)
    with pytest.raises(ValueError, match=r"must be divisible by|at least 2 generations"):
        build()


# ------------------------------------------------------------------------------------------------------------ prompts


def test_prompts_longer_than_the_context_are_refused(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(**GOOD, max_completion_length=64)
    assert trainer.model.config.max_position_embeddings == 512
    dataset = trainer.train_dataset.map(lambda row, n: {"prompt": "x" * (300 if n < 3 else 4)}, with_indices=True)
    trainer.train_dataset = dataset
    longest = len(trainer.processing_class("x" * 300)["input_ids"])
    trainer.args.max_completion_length = 512 - longest
    assert messages(trainer) == []  # exactly full
    trainer.args.max_completion_length = 512 - longest + 1
    message = refusal(trainer)
    assert message.startswith(f"3 of 16 prompts are too long: the longest has {longest} tokens")
    assert f"train.max_completion_length: {512 - longest}" in message
    trainer.args.use_vllm, trainer.args.vllm_max_model_length = True, 4096
    assert messages(trainer) == []
    trainer.args.vllm_max_model_length = longest
    assert f"train.vllm_max_model_length is {longest}; shorten them" in refusal(trainer)


def chat_with(trainer: Any, reward: Callable[..., Any]) -> Any:
    """A trainer that is built with one reward on conversations; the template writes what was said and nothing else."""
    from datasets import Dataset

    rows = [[{"role": "user", "content": text}] for text in trainer.train_dataset["prompt"]]
    trainer.processing_class.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return type(trainer)(
        model=trainer.model, reward_funcs=reward, args=trainer.args, train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=trainer.processing_class,
    )  # fmt: skip


def test_a_reward_on_chat_data_gets_what_it_is_annotated_with(make_trainer: Callable[..., Any]) -> None:
    seen: list[str] = []

    def brief(completions: list[str], **_: Any) -> list[float]:
        seen.extend(completions)
        return [1 / (1 + len(text)) for text in completions]

    trainer = chat_with(make_trainer(**GOOD, max_steps=1), brief)
    trainer.train()
    assert len(seen) == 4 + 16  # the trial's group, and a rollout
    assert all(isinstance(each, str) for each in seen)
    assert 0 < trainer.state.log_history[0]["reward"] <= 1


def test_a_reward_that_takes_strings_of_chat_data_is_refused_before_the_first_rollout(
    make_trainer: Callable[..., Any],
) -> None:
    def brief(completions, **_):  # type: ignore[no-untyped-def]
        return [1 / (1 + len(text.strip())) for text in completions]

    trainer = chat_with(make_trainer(**GOOD, max_steps=1), brief)
    trainer._generate = lambda *_: pytest.fail("a rollout was made")
    with pytest.raises(UsageError) as refused:
        trainer.train()
    output = str(refused.value)
    assert "\n" not in output
    assert all(
        word in output for word in ("reward brief", "AttributeError", "`completions: list[str]`", "accept=['reward']")
    )


def test_a_scaled_rope_counts_with_its_scale(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(**GOOD)
    config = trainer.model.config
    assert guards.context_of(trainer.model.config) == 512
    config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert guards.context_of(trainer.model.config) == 2048
    config.rope_parameters = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 128}
    assert guards.context_of(trainer.model.config) == 512


@pytest.mark.parametrize(
    ("loss", "config", "refused", "said"),
    [
        ("gspo", {"epsilon": -3e-4}, True, "train.epsilon is -0.0003; the clip needs a positive number"),
        ("gspo", {"beta": -0.1}, True, "train.beta is -0.1: a negative KL term"),
        ("gspo", {"delta": 1.0}, True, "train.delta 1 caps every ratio at or below 1"),
        ("gspo", {"delta": 1.1}, True, None),
        ("dapo", {"epsilon": 3e-4, "epsilon_high": 4e-4}, False, "are a sequence loss's"),
        ("cispo", {"epsilon_high": 4e-4}, False, "is cispo's cap of the ratio itself"),
        ("cispo", {"epsilon_high": 5.0}, None, None),
        ("dapo", {"epsilon_high": 0.28}, None, None),
    ],
)
def test_numbers_that_undo_the_loss_are_refused_and_a_sequence_losss_epsilon_on_token_ratios_is_said(
    loss: str, config: dict[str, float], refused: bool | None, said: str | None, make_trainer: Callable[..., Any]
) -> None:
    actual = messages(make_trainer(loss, **GOOD, **config), refused)
    assert actual == [] if said is None else said in actual[0]


def test_two_temperatures_are_refused(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer("gspo", **GOOD, temperature=0.7, generation_kwargs={"temperature": 1.0})
    assert "TRL scores at train.temperature 0.7" in refusal(trainer)
    same = make_trainer("gspo", **GOOD, temperature=0.7, generation_kwargs={"temperature": 0.7})
    assert guard_trainer(same) == []


def test_fewer_prompts_than_one_rollout_are_refused(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(**GOOD, rows=3)
    assert len(trainer.get_train_dataloader()) == 0
    message = refusal(trainer)
    assert message.startswith("3 prompts, and one rollout takes 4 (train.generation_batch_size 16 / ")
    assert "at most 12 completions" in message
    assert messages(make_trainer(**GOOD, rows=4)) == []


# ----------------------------------------------------------------------------------------------------- during the run


def test_a_run_in_which_nothing_was_scored_is_a_failure(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    def rows_of(trainer: Any) -> list[dict[str, Any]]:
        trainer.train()
        return [row for row in trainer.state.log_history if "loss" in row]

    unscored = make_trainer(max_steps=4)
    unscored.reward_funcs = [lambda completions, **_: [None] * len(completions)]
    rows = rows_of(unscored)
    assert [row["reward"] for row in rows if "reward" in row] == [None, None]
    assert judge_gspo(rows, tmp_path)[0].figure == "0 of 2 batches scored"
    assert judge_gspo([*rows, {"reward": 0.0}], tmp_path)[0].passed
    assert not judge_gspo([{"reward": float("nan")}], tmp_path)[0].passed
    assert not judge_gspo([], tmp_path)[0].passed
    assert judge_gspo(rows_of(make_trainer(max_steps=2)), tmp_path)[0].passed
