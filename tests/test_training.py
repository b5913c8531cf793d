"""`cogumi.train` with real TRL trainers on a tiny model: what a run leaves behind, and that mistakes leave nothing."""

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import polars as pl
import pytest
import torch
import transformers
import yaml
from finished_runs import FinishedRun, hashes
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

import cogumi
from cogumi.config import schema
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json, read_jsonl
from cogumi.health import verdict
from cogumi.models.adapters import check_targets, lora_config
from cogumi.models.base import RunBase, build_on_meta

Config = dict[str, Any]


@pytest.fixture
def sft(sft: Config) -> Config:
    sft["cogumi"]["merge"] = True
    return sft


@pytest.fixture
def gspo(sft: Config, tmp_path: Path) -> Config:
    return {
        **sft,
        "train": {
            "loss_type": "gspo",
            "max_steps": 4,
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "steps_per_generation": 2,
            "max_completion_length": 8,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "gradient_checkpointing": False,
            "save_strategy": "no",
        },
        "cogumi": {"method": "gspo", "run_dir": str(tmp_path / "gspo"), "rewards": ["edit_similarity", "parses"]},
    }


def test_sft_leaves_a_whole_run_directory(finished_sft: FinishedRun) -> None:
    result = finished_sft.result
    assert result.passed, str(result.verdict)
    home = result.run_dir
    assert read_json(home / "status.json")["state"] == "finished"
    assert read_json(home / "heartbeat.json")["step"] == 6
    assert read_json(home / "verdict.json")["passed"] is True
    assert (home / "DONE").exists()
    assert "backend: trl" in (home / "run.log").read_text()
    assert yaml.safe_load((home / "config.yaml").read_text())["train"]["max_steps"] == 6
    losses = result.series("loss")
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    samples = read_jsonl(home / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 4 + [3] * 4 + [6] * 4
    assert all({"prompt", "middle", "completion"} <= set(sample) for sample in samples)
    assert not [p.name for p in home.iterdir() if p.name.startswith(".")]  # nothing half-written is left


def test_only_the_adapter_is_trained_and_the_base_directory_is_untouched(finished_sft: FinishedRun) -> None:
    from safetensors.torch import load_file

    result, trained_from = finished_sft.result, Path(finished_sft.result.base)
    assert hashes(trained_from) == finished_sft.base_before
    saved = load_file(result.adapter / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert result.merged is not None
    base, merged = load_file(trained_from / "model.safetensors"), load_file(result.merged / "model.safetensors")
    changed = {name for name in base if not base[name].equal(merged[name])}
    assert changed
    assert all("_proj" in name for name in changed)


def test_examples_longer_than_the_model_was_made_for_are_told(sft: Config) -> None:
    from cogumi.config.schema import load_config
    from cogumi.methods.examples import describe_overlong, prepare_examples
    from cogumi.models.loading import load_tokenizer

    del sft["data"]["max_rows"]
    sft["data"]["fim"]["max_length"] = 900
    longer = cogumi.train(sft, train__max_steps=1, cogumi__merge=False, train__per_device_train_batch_size=1)
    log_text = (longer.run_dir / "run.log").read_text()
    assert "the model was made for 512 (max_position_embeddings)" in log_text
    assert "data.fim.max_length=512 takes no longer ones" in log_text
    asked = load_config(sft, data__fim__max_length=512)
    examples = prepare_examples(asked, load_tokenizer(asked.model.name))
    assert not describe_overlong(asked, examples, AutoConfig.from_pretrained(asked.model.name))


@pytest.mark.usefixtures("prepared_workers")
def test_a_prompt_that_leaves_its_completion_no_room_is_dropped_and_counted(gspo: Config, tmp_path: Path) -> None:
    rows = [{"prompt": f"def f{n}(x):\n    return ", "completion": "x"} for n in range(8)]
    rows[2]["prompt"] = "# one line\n" * 300  # the model was made for 512 tokens
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(tmp_path / "prompts.jsonl"), "format": "prompt_completion"}
    config = {**gspo, "data": data, "cogumi": {**gspo["cogumi"], "rewards": ["answer_similarity"], "merge": False}}
    result = cogumi.train(config, train__max_steps=1)
    account = json.loads((result.run_dir / "decisions.json").read_text())["data"]["train"]
    assert (account["rows"], account["examples"]) == (8, 7)
    assert account["dropped"] == {"longer than 504 tokens": 1}
    assert "longer than 504 tokens, the first is row 3" in (result.run_dir / "run.log").read_text()
    preflight = str(cogumi.preflight(config))
    assert "left out: 1 longer than 504 tokens" in preflight
    assert "lower train.max_completion_length to keep them whole" in preflight
    with pytest.raises(UsageError, match=r"train.max_completion_length 512"):
        cogumi.train(config, cogumi__run_dir=str(tmp_path / "other"), train__max_completion_length=512)
    assert not (tmp_path / "other").exists()

    cut = cogumi.train(config, cogumi__run_dir=str(tmp_path / "cut"), train__max_steps=1, data__overlong="truncate")
    account = json.loads((cut.run_dir / "decisions.json").read_text())["data"]["train"]
    assert (account["examples"], account["truncated"], account["dropped"]) == (8, 1, {})
    log = (cut.run_dir / "run.log").read_text()
    assert log.index("truncated 1") < log.index("loaded on")


@pytest.mark.usefixtures("prepared_workers")
def test_answers_of_several_kinds_are_given_as_they_are(gspo: Config, tmp_path: Path) -> None:
    source, answers = tmp_path / "answers.jsonl", [4, 4.0, "four", [4], None, {"x": 4}]
    source.write_text("".join(json.dumps({"prompt": f"{n}", "answer": each}) + "\n" for n, each in enumerate(answers)))
    data = {"source": str(source), "format": "prompt_completion", "columns": {"answer": "answer"}, "eval_rows": 2}
    reward = tmp_path / "kinds.py"  # those that ship refuse lists and objects
    reward.write_text("def known(answer, **columns):\n    return [float(each is not None) for each in answer]\n")
    config = {**gspo, "data": data, "cogumi": {**gspo["cogumi"], "rewards": [f"{reward}:known"], "merge": False}}
    shown = "".join(
        text for pieces in cogumi.preview(config, examples=9, data__eval_rows=0).examples for _, text in pieces
    )
    assert all(f"answer: {each}" in shown for each in ("4", "four", "[4]", "null"))
    assert "record" not in shown
    assert "6 of the first 6 make one" in str(cogumi.preflight(config))
    result = cogumi.train(config, train__max_steps=1)
    samples = read_jsonl(result.run_dir / "samples.jsonl")
    assert all(sample["answer"] == answers[int(sample["prompt"])] and "record" not in sample for sample in samples)


def test_what_a_model_was_made_for_counts_the_scaling_of_its_positions() -> None:
    from transformers import BloomConfig, Gemma3TextConfig, Qwen2Config

    from cogumi.methods.examples import context_of

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert context_of(Qwen2Config(max_position_embeddings=32768)) == 32768
    assert context_of(Qwen2Config(max_position_embeddings=32768, rope_scaling=yarn)) == 131072
    assert context_of(Gemma3TextConfig(max_position_embeddings=8192)) == 8192  # rope by kind of layer
    assert context_of(BloomConfig()) is None


@pytest.mark.parametrize("method", ["sft", "gspo"])
def test_the_adapter_says_what_it_was_trained_on(method: str, request: pytest.FixtureRequest) -> None:
    from cogumi.merge.adapter_files import BaseRecord, read_base_record, weights_sample

    result = request.getfixturevalue(f"finished_{method}").result
    dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"
    assert read_base_record(result.adapter) == BaseRecord(
        result.base, None, None, None, dtype, weights_sample(result.base), transformers.__version__
    )


def test_the_sft_loss_is_the_mean_cross_entropy_of_the_middles(sft: Config, tiny_model: Path) -> None:
    """All rows in one batch: the first logged loss against dense logits, without TRL and without the fused head."""
    from transformers import AutoModelForCausalLM

    from cogumi.config.schema import load_config
    from cogumi.methods.examples import prepare_examples
    from cogumi.models.loading import load_tokenizer

    config = {**sft, "data": {**sft["data"], "max_rows": 12}}
    first = cogumi.train(config, train__max_steps=1, train__per_device_train_batch_size=12).series("loss")[0]

    run = load_config(config)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    losses = []
    for row in prepare_examples(run, load_tokenizer(str(tiny_model))).train.dataset:
        ids, learned = torch.tensor(row["input_ids"]), torch.tensor(row["completion_mask"]).bool()
        logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        losses.append(-logps[learned[1:]])
    assert 4 <= len(losses) <= 12
    assert first == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_gspo_trains_on_the_clipped_sequence_ratio(finished_gspo: FinishedRun) -> None:
    result = finished_gspo.result
    assert result.passed, str(result.verdict)
    assert len(result.series("reward")) == 2  # four steps, two per rollout
    means = result.series("policy/ratio_new_old")
    assert means[0] == pytest.approx(1, abs=1e-5)  # on-policy: the rollout's own log-probabilities
    assert any(abs(mean - 1) > 1e-4 for mean in means[1::2])  # after one update they differ
    assert max(result.series("policy/clipped_ratio_fraction")) > 0


def test_dpo_prefers_what_was_chosen(finished_dpo: FinishedRun) -> None:
    """Before the first update policy and reference are one model: the loss is log 2 and the rewards are zero."""
    result = finished_dpo.result
    assert result.passed, str(result.verdict)
    assert result.series("loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    assert result.series("rewards/margins")[0] == pytest.approx(0, abs=1e-5)
    assert result.series("rewards/margins")[-1] > 0.1
    assert result.series("eval_loss")[-1] < math.log(2)


def test_a_gspo_run_says_which_loss_ran_and_logs_every_step(finished_gspo: FinishedRun) -> None:
    """Its configuration names neither: gspo, and every step, are the defaults."""
    result = finished_gspo.result
    record = read_json(result.run_dir / "loss.json")
    assert (record["loss"], record["backend"], record["asserted"]) == ("gspo", "trl", True)
    assert record["arguments"]["epsilon_low"] == 3e-4
    assert (
        0 < read_json(result.run_dir / "decisions.json")["ratio_noise"]["sd"] < 1e-5
    )  # float32: the paper's clip stays
    (check,) = (check for check in result.verdict.checks if check.name == "loss that ran")
    assert check.passed
    assert "gspo by GRPOTrainer._compute_loss (trl)" in check.figure
    assert f"clip seen at step {record['clip_seen_at_step']}" in check.figure
    assert len(result.series("policy/effective_sample_size")) == 4
    assert result.series("policy/staleness") == [0, 8, 0, 8]


@pytest.mark.parametrize("loss_type", ["gspo-length", "dapo"])
def test_a_preset_is_named_by_its_loss_and_any_key_wins_over_it(gspo: Config, loss_type: str) -> None:
    gspo["train"] |= {"loss_type": loss_type, "epsilon_high": 5e-3, "mask_truncated_completions": False}
    result = cogumi.train(gspo, cogumi__merge=False, train__max_steps=2)
    ran = read_json(result.run_dir / "loss.json")
    low = {"gspo-length": 3e-3, "dapo": 0.2}[loss_type]
    assert ran["loss"] == loss_type
    assert (ran["arguments"]["epsilon_low"], ran["arguments"]["epsilon_high"]) == (low, 5e-3)
    assert yaml.safe_load((result.run_dir / "config.yaml").read_text())["train"]["loss_type"] == loss_type


# Keys that describe the batch (null takes away those of the file), the staleness and documents of each step, and the log.
BATCHES = {
    "a rollout lasts four steps": ({"train__steps_per_generation": None}, [0, 8, 16, 24], 8, ""),
    "documents": (
        {
            "train__steps_per_generation": None, "train__per_device_train_batch_size": None, "cogumi__docs_per_step": 12,
            "train__generation_batch_size": 24, "train__max_steps": 3,
        },
        [0, 12, 0], 12, "12 documents per step = micro-batches of 12 x 1",
    ),
    "prompts": (
        {
            "train__steps_per_generation": None, "train__per_device_train_batch_size": 2, "cogumi__prompts_per_step": 2,
            "train__max_steps": 2,
        },
        [0, 8], 8, "8 documents per step = micro-batches of 2 x 4",
    ),
    "few prompts": (
        {"data__max_rows": 6, "train__max_steps": 2, "train__per_device_train_batch_size": 32}, [0, 32], 32, "repeated",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "staleness", "documents", "said"), BATCHES.values(), ids=BATCHES)
def test_the_batch_of_a_step(
    overrides: dict[str, Any], staleness: list[int], documents: int, said: str, gspo: Config
) -> None:
    result = cogumi.train(gspo, cogumi__merge=False, **overrides)
    assert result.series("policy/staleness") == staleness
    assert result.series("policy/num_segments") == [documents] * len(staleness)
    assert said in (result.run_dir / "run.log").read_text()


def test_the_samplers_own_log_probabilities_and_an_fp32_head(gspo: Config) -> None:
    result = cogumi.train(
        gspo, cogumi__behaviour_logps="rollout", cogumi__fp32_lm_head=True, train__steps_per_generation=1,
        cogumi__merge=False,
    )  # fmt: skip
    assert result.passed, str(result.verdict)
    ratios = result.series("policy/ratio_new_old")
    assert ratios == pytest.approx([1] * 4, abs=1e-5)  # one step a rollout, and the same numerics on both sides
    assert any(ratio != 1 for ratio in ratios)  # computed twice, not taken from the same tensor
    assert "ratio is exactly 1" not in (result.run_dir / "run.log").read_text()


def test_a_run_in_which_no_reward_was_scored_fails(gspo: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from cogumi.rewards import named_rewards

    def undecided(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    monkeypatch.setitem(named_rewards.BUILTIN_REWARDS, "parses", undecided)
    result = cogumi.train(gspo, cogumi__rewards=["parses"], cogumi__merge=False)
    failed = {check.name: str(check) for check in result.verdict.checks if not check.passed}
    assert "0 of 2 batches scored" in failed["rewards"]
    assert "change cogumi.rewards" in failed["rewards"]
    assert not (result.run_dir / "DONE").exists()


def test_a_constant_reward_is_no_reason_for_another_learning_rate(
    gspo: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cogumi.rewards import named_rewards

    def constant(completions: list[str], **_: Any) -> list[float]:
        return [0.5] * len(completions)

    monkeypatch.setitem(named_rewards.BUILTIN_REWARDS, "parses", constant)
    result = cogumi.train(gspo, cogumi__rewards=["parses"], cogumi__merge=False)
    (check,) = (check for check in result.verdict.checks if check.name == "adapter")
    assert not check.passed
    assert "cogumi.rewards" in check.fix
    assert "learning_rate" not in check.fix


def test_a_training_of_cut_completions_is_saved_before_it_is_judged(
    gspo: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """dapo leaves cut completions out of the loss, and here all are cut; two checks and a rule raise besides."""

    def broken(*_: Any) -> None:
        assert (tmp_path / "gspo" / "adapter" / "adapter_model.safetensors").exists()
        raise ValueError("no\nanswer")

    def broken_rule(_: Any) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("cogumi.training.loop.judge_moved", broken)
    monkeypatch.setattr("cogumi.training.run.write_samples", lambda *given: given[4] and broken())
    monkeypatch.setitem(verdict.RULES, "gspo", (*verdict.RULES["gspo"], broken_rule))
    gspo["train"] |= {"loss_type": "dapo", "max_completion_length": 1}
    result = cogumi.train(gspo)
    failed = {check.name: str(check) for check in result.verdict.checks if not check.passed}
    assert "no completion counted in a loss" in failed["ratio and clip fraction"]
    assert "train.mask_truncated_completions: false" in failed["ratio and clip fraction"]
    assert "it raised ValueError: no answer" in failed["weights"]
    assert "it raised ValueError: no answer" in failed["samples"]
    assert "it raised ZeroDivisionError: division by zero" in failed["broken_rule"]
    assert read_json(result.run_dir / "status.json")["state"] == "finished, checks failed"
    assert (result.run_dir / "verdict.json").exists()


def test_a_finished_run_directory_is_not_written_over(finished_sft: FinishedRun, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(finished_sft.home, tmp_path / "run"))
    before = {p: p.stat().st_mtime_ns for p in run_dir.rglob("*")}
    with pytest.raises(UsageError, match=r"already holds a run \(finished\)"):
        cogumi.train(finished_sft.home / "config.yaml", cogumi__run_dir=str(run_dir))
    assert {p: p.stat().st_mtime_ns for p in run_dir.rglob("*")} == before


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"data__source": "missing.parquet"}, "missing.parquet"),
        ({"data__column": "text"}, "text"),
        ({"model__name": "no/such/model"}, "no model at 'no/such/model'"),
        ({"data__eval_rows": 100000}, "none is left to train on"),
        ({"train__max_length": 32}, "train.max_length 32 would cut examples"),
        ({"data__fim__max_length": 5}, "longer than 5 tokens"),
        (
            {"lora__target_modules": ["nothing"]},
            "lora.target_modules: nothing: no module of LlamaForCausalLM matches; its linear modules are q_proj",
        ),
        ({"lora__init_lora_weights": "pissa"}, "set cogumi.merge: false, which trains it without merging"),
        ({"lora__layer_replication": [[0, 2]]}, "set cogumi.merge: false, which trains it without merging"),
        ({"lora__init_lora_weights": "ortogonal"}, "lora.init_lora_weights = 'ortogonal'"),
        ({"train__adam_epsilon": -1.0}, "refused before the first step: Invalid epsilon value: -1.0"),
        ({"train__resume_from_checkpoint": "x"}, "train.resume_from_checkpoint is the run's own"),
        (
            {"train__model_init_kwargs": {"device_map": "auto"}},
            "train.model_init_kwargs: only use_kernels is passed on",
        ),
        ({"train__model_init_kwargs": {"use_kernels": True}}, "train.model_init_kwargs: the hub has kernels for GPUs"),
        ({"train__completion_only_loss": False}, "the middle is learned"),
    ],
)
def test_a_mistake_writes_nothing(sft: Config, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        cogumi.train(sft, **overrides)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path(sft["cogumi"]["run_dir"]).exists()


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (
            ["q_prj", "nowhere"],
            "matches; did you mean q_proj? its linear modules are q_proj, k_proj, v_proj, o_proj, gate_proj",
        ),
        ("nowhere", "matches; its linear modules are q_proj"),
        (r".*\.attention\.q_proj", "matches; "),
    ],
)
def test_target_modules_that_match_nothing_are_refused_before_the_data_is_prepared(
    sft: Config, wanted: Any, says: str
) -> None:
    config = sft | {"data": sft["data"] | {"column": "nothing"}}  # which would be refused in its turn
    lora = sft["lora"] | {"target_modules": wanted}
    for call in (cogumi.train, cogumi.preflight):
        with pytest.raises(UsageError, match=r"^lora\.target_modules: .*no module of LlamaForCausalLM") as caught:
            call(config | {"lora": lora})
        assert says in str(caught.value)
        assert "lm_head" not in str(caught.value)


@pytest.mark.parametrize(
    ("lora", "message", "fix"),
    [
        ({"target_modules": ["q_proj", "k_projj"]}, "lora.target_modules: k_projj: no module", "did you mean k_proj"),
        ({"modules_to_save": ["lm_hed"]}, "lora.modules_to_save: lm_hed: no module", "did you mean lm_head"),
        ({"exclude_modules": ["layers.7.mlp"]}, "lora.exclude_modules: layers.7.mlp", ""),
        (
            {"layers_to_transform": [0, 2], "target_modules": ["q_proj"]},
            "lora.layers_to_transform: 2: no layer",
            "0 to 1",
        ),
        (
            {"rank_pattern": {"q_prj": 8}},
            "lora.rank_pattern: q_prj: no module under the adapter",
            "did you mean q_proj",
        ),
        (
            {"alpha_pattern": {"v_proj": 8}, "target_modules": ["q_proj"]},
            "lora.alpha_pattern: v_proj",
            "add its module",
        ),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "lora.target_parameters: mlp.experts.down_proj", "are none"),
    ],
)
def test_a_name_that_matches_nothing_is_refused_beside_others(
    sft: Config, lora: dict[str, Any], message: str, fix: str
) -> None:
    for call in (cogumi.train, cogumi.preflight):
        with pytest.raises(UsageError) as caught:
            call(sft | {"lora": sft["lora"] | lora})
        assert str(caught.value).startswith(message)
        assert fix in str(caught.value)
    assert not Path(sft["cogumi"]["run_dir"]).exists()


def test_names_of_experts_are_those_that_peft_finds() -> None:
    """PEFT targets stacks by the names that single experts had, if all of a stack are named."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "num_experts": 2, "vocab_size": 64}
    config = Qwen3MoeConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    base = RunBase("base", None, config)
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    by_name = check_targets({"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}, base)
    assert by_name == check_targets({"target_modules": ["q_proj"], "target_parameters": stacks}, base)
    assert "experts" not in by_name
    assert "layers.mlp.experts (" in check_targets({"target_modules": ["q_proj"]}, base)
    with pytest.raises(UsageError, match="without also targeting up_proj"):
        check_targets({"target_modules": ["q_proj", "gate_proj"]}, base)
    with pytest.raises(UsageError, match=r"did you mean mlp\.experts\.down_proj"):
        check_targets(
            {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_projj"]},
            base,
        )


@pytest.mark.parametrize("wanted", [["v_proj"], "all-linear", r".*\.self_attn\.q_proj", ["lm_head"]])
def test_target_modules_that_peft_finds_are_not_refused(tiny_model: Path, wanted: Any) -> None:
    share = check_targets(
        {"r": 4, "target_modules": wanted}, RunBase("base", None, AutoConfig.from_pretrained(tiny_model))
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    total, names = model.num_parameters(), {"q_proj": ["q_proj"], "all-linear": ["layers"]}
    parts = names.get(str(wanted).rpartition(".")[2], wanted)
    size = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and any(part in name for part in parts))
    assert share.startswith(f"{size / total:.1%} of the parameters")
    assert peft.get_peft_model(model, lora_config({"r": 4, "target_modules": wanted})) is not None


def test_an_adapter_with_names_of_other_models_is_trained_further(sft: Config) -> None:
    """Its tensors say what it is on; the list in its configuration may be wider."""
    first = cogumi.train(sft, lora__target_modules=["q_proj"])
    file = first.adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["q_proj", "c_attn"]}))
    run_dir = f"{sft['cogumi']['run_dir']}-next"
    result = cogumi.train(sft | {"lora": {}}, model__adapter=str(first.adapter), cogumi__run_dir=run_dir)
    assert result.passed
    log = (result.run_dir / "run.log").read_text()
    assert "% of the parameters are under the adapter; not " in log


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"cogumi__rewards": ["edit_similarty"]}, "edit_similarity"),
        ({"cogumi__rewards": []}, "cogumi.rewards: it is empty"),
        ({"train__epsilon": -1.0}, "train.epsilon is -1.0"),
        ({"train__reward_weights": [1.0]}, "train.reward_weights has 1 and cogumi.rewards 2"),
        (
            {"train__per_device_train_batch_size": 3},
            "no whole groups of train.num_generations 4; set train.per_device_train_batch_size: 2 or 4",
        ),
        ({"train__importance_sampling_level": "token"}, "contradicts train.loss_type: gspo"),
        ({"lora__lora_dropout": 0.05}, "lora.lora_dropout is 0.05"),
        ({"train__epsilon": 0.2}, "train.epsilon 0.2 and train.epsilon_high 0.2: a token loss's clip"),
        ({"train__num_generations": 1}, "train.num_generations is 1"),
        ({"train__max_completion_length": 500}, "of gspo: lower train.max_completion_length"),
        ({"train__cast_lm_head_to_fp32": True}, "set cogumi.fp32_lm_head: true instead"),
        ({"cogumi__docs_per_step": 16}, "train.steps_per_generation and cogumi.docs_per_step"),
        (
            {"cogumi__docs_per_step": 16, "train__steps_per_generation": None, "train__num_generations": 0},
            "train.num_generations is 0",
        ),
        (
            {"cogumi__docs_per_step": 16, "train__steps_per_generation": None, "train__generation_batch_size": 8},
            "train.generation_batch_size 8 is no whole number of optimizer steps of 16 documents; set 16",
        ),
        ({"train__beta": -1.0}, "train.beta is -1.0: a negative KL term"),
        ({"train__use_liger_kernel": True}, "refused before the first step"),
    ],
)
def test_a_gspo_mistake_writes_nothing(gspo: Config, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        cogumi.train(gspo, **overrides)
    assert says in str(caught.value)
    assert not Path(gspo["cogumi"]["run_dir"]).exists()


def test_a_reward_of_another_shape_is_refused_before_the_model_is_loaded(
    gspo: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cogumi.methods import building

    monkeypatch.setattr(building, "build_trainer", lambda *_: pytest.fail("a model was loaded"))
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, **_):\n    return [1 / len(c[-1]['content']) for c in completions]\n")
    with pytest.raises(UsageError) as caught:
        cogumi.train(gspo, cogumi__rewards=[f"{file}:short"])
    output = str(caught.value)
    assert "\n" not in output
    assert all(
        word in output for word in ("cogumi.rewards: reward short raised TypeError", "mine.py:2", "list[list[dict]]")
    )
    assert not Path(gspo["cogumi"]["run_dir"]).exists()
    with pytest.raises(UsageError, match="final_number takes `answer`"):  # and a column that is missing
        cogumi.train(gspo, cogumi__rewards=["final_number"])


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is what takes no files, from root either")
def test_a_run_directory_that_takes_no_files_is_refused_before_the_data_is_read(sft: Config, tmp_path: Path) -> None:
    pl.DataFrame({"source": []}, schema={"source": pl.String}).write_parquet(tmp_path / "empty.parquet")
    with pytest.raises(UsageError, match="cannot write the run directory"):
        cogumi.train(sft, cogumi__run_dir="/proc/cogumi/run", data__source=str(tmp_path / "empty.parquet"))


def shard(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    for number, name in enumerate(tensors):
        save_file({name: tensors[name]}, model / f"part-{number}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: f"part-{number}.safetensors" for number, name in enumerate(tensors)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").unlink()


def lose_a_shard(model: Path) -> None:
    shard(model)
    (model / "part-1.safetensors").unlink()


def save_as_bin(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "holds no weights: none of model.safetensors": lambda model: (model / "model.safetensors").unlink(),
    "holds no tokenizer: none of tokenizer.json": lambda model: (model / "tokenizer.json").unlink(),
    "part-1.safetensors is missing, which model.safetensors.index.json names": lose_a_shard,
    "has no model.safetensors and no index of shards": save_as_bin,  # which trains, and does not merge
    "model.safetensors is empty": lambda model: (model / "model.safetensors").write_bytes(b""),
    "is not a whole safetensors file": lambda model: (model / "model.safetensors").write_bytes(
        b"version https://git-lfs"
    ),
}


@pytest.mark.parametrize("says", DAMAGE)
def test_files_that_a_model_lacks_are_told_in_one_line_before_the_data_is_read(
    says: str, sft: Config, tiny_model: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    DAMAGE[says](broken)
    pl.DataFrame({"source": []}, schema={"source": pl.String}).write_parquet(tmp_path / "empty.parquet")
    for command in (cogumi.train, cogumi.preflight):
        with pytest.raises(UsageError) as caught:
            command(sft, model__name=str(broken), data__source=str(tmp_path / "empty.parquet"))
        assert says in str(caught.value)
        assert str(broken) in str(caught.value)
        assert caught.value.fix
        assert "\n" not in str(caught.value)
        assert not Path(sft["cogumi"]["run_dir"]).exists()


def test_a_model_in_shards_or_in_torchs_own_format_trains(sft: Config, tiny_model: Path, tmp_path: Path) -> None:
    for number, change in enumerate((shard, save_as_bin)):
        model = shutil.copytree(tiny_model, tmp_path / f"model-{number}")
        change(model)
        run_dir = str(tmp_path / f"run-{number}")
        assert cogumi.train(sft, model__name=str(model), cogumi__merge=False, cogumi__run_dir=run_dir).passed


def test_a_merge_that_is_refused_after_training_is_a_failed_check(sft: Config) -> None:
    """Nothing is learned at learning rate 0: the merge refuses, and verdict and adapter are still there."""
    result = cogumi.train(sft, train__learning_rate=0.0)
    failed = {check.name: check.figure for check in result.verdict.checks if not check.passed}
    assert set(failed) == {"adapter", "merge"}
    fixes = {check.name: check.fix for check in result.verdict.checks}
    assert fixes["merge"] == "see the failed check of the adapter: train again in another cogumi.run_dir"
    assert "changes nothing" in failed["merge"]
    assert result.merged is None
    assert result.adapter.is_dir()
    assert read_json(result.run_dir / "verdict.json")["passed"] is False
    assert read_json(result.run_dir / "status.json")["state"] == "finished, checks failed"
    assert not (result.run_dir / "DONE").exists()


def test_a_run_shorter_than_the_logging_interval_is_still_judged(sft: Config) -> None:
    result = cogumi.train(sft, train__max_steps=1, train__logging_steps=100, cogumi__merge=False)
    assert result.passed, str(result.verdict)


@pytest.mark.parametrize("error", [RuntimeError, ConnectionError, ZeroDivisionError])
def test_a_run_that_fails_says_so_in_its_directory(
    gspo: Config, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first rollout already: a reward is the user's code, not a setting that was refused."""
    from cogumi.rewards import named_rewards

    def broken(**kwargs: Any) -> list[float]:
        raise error("the grader is down")

    monkeypatch.setitem(named_rewards.BUILTIN_REWARDS, "parses", broken)
    with pytest.raises(error, match="the grader is down"):
        cogumi.train(gspo)
    status = json.loads(Path(gspo["cogumi"]["run_dir"], "status.json").read_text())
    assert status["state"] == "failed"
    assert "the grader is down" in status["reason"]
    assert not Path(gspo["cogumi"]["run_dir"], "DONE").exists()


def test_a_run_reads_its_configuration_and_its_base_once(
    sft: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks, choices, forecast and trainer share one reading of each until the training begins."""
    path, readings = tmp_path / "sft.yaml", Counter[str]()
    path.write_text(yaml.safe_dump(sft))
    read_source, read_config = schema.read_source, AutoConfig.from_pretrained

    def counted_source(config: Any) -> Any:
        readings["configuration"] += 1
        return read_source(config)

    def counted_config(name: Any, *arguments: Any, **options: Any) -> Any:
        readings["base"] += 1
        return read_config(name, *arguments, **options)

    monkeypatch.setattr(schema, "read_source", counted_source)
    monkeypatch.setattr(AutoConfig, "from_pretrained", counted_config)
    monkeypatch.setattr("cogumi.training.run.fit", lambda *_: 1 / 0)
    build_on_meta.cache_clear()
    with pytest.raises(ZeroDivisionError):
        cogumi.train(path)
    assert readings == {"configuration": 1, "base": 1}
    assert build_on_meta.cache_info().misses <= 2  # the class that is trained, and the one that the checkpoint names
