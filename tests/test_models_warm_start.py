"""Going on from an adapter: every tensor of the file is in the model, the reference is its copy, and the rest is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
import yaml
from builders import edit_config, train
from datasets import Dataset
from qlora_runs import Config, as_gspo, check, short_sft, train_until_failure, watch_trainers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback

import cogumi
from cogumi import protect
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json
from cogumi.merge.adapter_files import write_base_record
from cogumi.methods import warm_start
from cogumi.models.adapters import keep_float32
from cogumi.training.finish import save_adapter

Alter = Callable[[Path], object]
WEIGHTS = "adapter_model.safetensors"
COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40
LAYER = "base_model.model.model.layers.1.mlp.down_proj"
# Kinds of adapters, as keys of LoraConfig.
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 5]}},
}


def trained_adapter(base: Path, out: Path, **lora: Any) -> Path:
    """An adapter with values that training could have left, saved as a run saves one."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    train(model, out, **{"target_modules": "all-linear"} | lora)
    write_base_record(out, model)
    return out


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_adapter(tiny_model, tmp_path_factory.mktemp("sft") / "adapter")


@pytest.fixture
def sft(tiny_model: Path, code_parquet: Path, tmp_path: Path, adapter: Path) -> Config:
    config = short_sft(tiny_model, code_parquet, tmp_path / "run", rows=15)
    return config | {"model": config["model"] | {"adapter": str(adapter)}}


@pytest.fixture
def gspo(sft: Config) -> Config:
    return as_gspo(sft, max_steps=4)


def pairs(sources: list[str]) -> Dataset:
    rows = [{"prompt": text[:20], "chosen": text[20:40], "rejected": text[40:60][::-1]} for text in sources[:8]]
    return Dataset.from_list(rows)


@pytest.fixture
def dpo(tiny_model: Path, sources: list[str], tmp_path: Path) -> Callable[..., Any]:
    """TRL's own DPOTrainer on a warm start, in the order that a run does it."""

    def make(adapter: Path, loading: dict[str, Any] | None = None, **options: Any) -> Any:
        cogumi.patch()
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, **(loading or {}))
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "dpo"), "max_steps": 5, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
            "logging_steps": 1, "save_strategy": "steps", "save_steps": 2, "report_to": "none", "bf16": False,
            "gradient_checkpointing": False, "dataloader_pin_memory": False,
        }  # fmt: skip
        args = trl.DPOConfig(**settings | options)
        trainer = trl.DPOTrainer(
            model=warm_start.load_adapter(base, adapter, None),
            args=args,
            train_dataset=pairs(sources),
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
        )
        keep_float32(trainer.model)
        warm_start.load_exact_values(trainer, adapter, compares=True)
        return trainer

    return make


def trained(model: Any) -> dict[str, torch.Tensor]:
    """The adapter's tensors by the names of its file, read from the parameters and not through PEFT."""
    marks = ("lora_", "modules_to_save.default", "trainable_tokens_delta")
    collected = {}
    for name, parameter in model.named_parameters():
        if ".default" in name and any(mark in name for mark in marks):
            name = name.replace("_vector.default.weight", "_vector").replace(".modules_to_save.default", "")
            collected[name.replace(".default", "")] = parameter.detach().clone()
    return collected


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(24).view(2, 12)).logits


# ---------------------------------------------------------------------------------------------- what is in the model


@pytest.mark.parametrize("kind", KINDS)
def test_policy_and_reference_are_the_saved_adapter(
    kind: str, dpo: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    """Bit for bit, in its parameters and in what it computes, as plain PEFT loads it; the base is something else."""
    adapter = trained_adapter(tiny_model, tmp_path / "adapter", **KINDS[kind])
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    plain = peft.PeftModel.from_pretrained(base, str(adapter))
    expected = logits(plain)
    with plain.disable_adapter():
        assert not torch.equal(expected, logits(plain))
    trainer = dpo(adapter)
    assert torch.equal(logits(trainer.model), expected)
    saved = load_file(adapter / WEIGHTS)
    live = trained(trainer.model)
    assert live.keys() == {name for name in saved if ".base_layer." not in name}
    assert all(torch.equal(live[name], saved[name]) for name in live)
    with trl.trainer.utils.use_adapter(trainer.model, "ref"):
        assert torch.equal(logits(trainer.model), expected)
    first = trainer.train() and trainer.state.log_history[0]
    assert (first["rewards/chosen"], first["rewards/rejected"], first["rewards/margins"]) == (0, 0, 0)
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)
    with trl.trainer.utils.use_adapter(trainer.model, "ref"):  # it stays what it was
        assert torch.equal(logits(trainer.model), expected)
    assert not torch.equal(logits(trainer.model), expected)
    moved = trained(trainer.model)
    assert max(float((moved[name] - saved[name]).abs().max()) for name in moved) > 1e-3


def test_on_four_bits_nothing_is_rounded(dpo: Callable[..., Any], adapter: Path) -> None:
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    trainer = dpo(adapter, {"quantization_config": four_bits}, max_steps=2)
    saved, live = load_file(adapter / WEIGHTS), trained(trainer.model)
    assert {tensor.dtype for tensor in live.values()} == {torch.float32}
    assert all(torch.equal(live[name], saved[name]) for name in saved)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())
    trainer.train()
    assert trainer.state.log_history[0]["rewards/margins"] == 0


def test_grpos_reference_is_the_adapter_too(gspo: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a KL term there is none; with one it is 0 at the first step, and the merge is of the trained adapter."""
    trainers = watch_trainers(monkeypatch)
    result = cogumi.train(gspo, train__beta=0.1)
    assert result.passed, str(result.verdict)
    kl = result.series("kl")
    assert kl[0] == 0
    assert kl[1] > 0
    assert set(trainers[0].model.peft_config) == {"default", "ref"}
    log_text = (result.run_dir / "run.log").read_text()
    assert "28 tensors of" in log_text
    assert "bit for bit; the reference policy is a frozen copy of it" in log_text
    assert {path.name for path in result.adapter.iterdir() if path.is_dir()} == set()  # no ref/ in it
    changed = load_file(result.adapter / WEIGHTS)
    before = load_file(Path(gspo["model"]["adapter"]) / WEIGHTS)
    apart = max((changed[name] - before[name]).abs().max().item() for name in before)
    assert f"{apart:.2e}" in check(result, "adapter").figure

    none = cogumi.train(gspo, cogumi__run_dir=f"{result.run_dir}-none", cogumi__merge=False)
    assert none.passed, str(none.verdict)
    assert set(trainers[1].model.peft_config) == {"default"}


def test_sft_goes_on_and_the_next_run_from_there(sft: Config, tiny_model: Path, tmp_path: Path) -> None:
    """The chain: an adapter, SFT on it, SFT on that; rank and alpha come from the file, the first loss is the adapter's."""
    first = cogumi.train(sft, cogumi__merge=False, train__max_steps=1)
    written = yaml.safe_load((first.run_dir / "config.yaml").read_text())
    assert (written["lora"]["r"], written["lora"]["lora_alpha"]) == (4, 8)
    again = cogumi.train(
        sft, model__adapter=str(first.adapter), cogumi__run_dir=str(tmp_path / "again"), train__max_steps=2
    )
    assert again.passed, str(again.verdict)
    elsewhere = {"cogumi__run_dir": str(tmp_path / "fresh"), "cogumi__merge": False}
    fresh = cogumi.train(sft, model__adapter=None, lora__r=4, **elsewhere, train__max_steps=1)
    assert first.series("loss")[0] != fresh.series("loss")[0]
    config = read_json(again.adapter / "adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(tiny_model))


def test_a_run_that_learned_nothing_is_seen(sft: Config) -> None:
    result = cogumi.train(sft, train__learning_rate=0.0, train__max_steps=1, cogumi__merge=False)
    assert not check(result, "adapter").passed
    assert "0.00e+00" in check(result, "adapter").figure


# ------------------------------------------------------------------------------------------------------ going on


class Crash(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("the machine is gone")


def test_dpo_resumed_is_uninterrupted(dpo: Callable[..., Any], adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    """With TRL's second adapter in the checkpoint, of which transformers alone loads nothing but that."""
    whole = dpo(adapter, output_dir=str(tmp_path / "whole"))
    protect(whole).train()
    crashing = dpo(adapter)
    crashing.add_callback(Crash(3))
    with pytest.raises(RuntimeError, match="the machine is gone"):
        protect(crashing).train()
    again = dpo(adapter)
    protect(again).train()
    assert [row["step"] for row in again.state.log_history if "loss" in row] == [1, 2, 3, 4, 5]
    ours, theirs = trained(again.model), trained(whole.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    first, other = ([row["loss"] for row in each.state.log_history if "loss" in row] for each in (again, whole))
    assert first == other

    out = save_adapter(again.model, AutoTokenizer.from_pretrained(tiny_model), tmp_path, None)
    assert not any(path.is_dir() for path in out.iterdir())
    saved = load_file(out / WEIGHTS)
    assert all(torch.equal(saved[name], theirs[name]) for name in theirs)


def test_a_gspo_run_goes_on(gspo: Config, tmp_path: Path) -> None:
    gspo["train"] |= {"beta": 0.1, "save_strategy": "steps", "save_steps": 2}
    whole = cogumi.train(gspo, cogumi__run_dir=str(tmp_path / "whole"), cogumi__merge=False)
    train_until_failure(gspo, 3, cogumi__merge=False)
    result = cogumi.train(gspo, cogumi__merge=False)
    assert result.passed, str(result.verdict)
    assert "resuming from" in (result.run_dir / "run.log").read_text()
    ours, theirs = load_file(result.adapter / WEIGHTS), load_file(whole.adapter / WEIGHTS)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert result.series("kl") == whole.series("kl")


# ----------------------------------------------------------------------------------------------------- what is refused


def with_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Alter:
    def alter(adapter: Path) -> None:
        tensors = load_file(adapter / WEIGHTS)
        change(tensors)
        save_file(tensors, adapter / WEIGHTS)

    return alter


def with_record(**entries: Any) -> Alter:
    def alter(adapter: Path) -> None:
        record = adapter / "cogumi-base.json"
        record.write_text(json.dumps(read_json(record) | entries))

    return alter


def drop_module(tensors: dict[str, torch.Tensor]) -> None:
    for side in "AB":
        del tensors[f"{LAYER}.lora_{side}.weight"]


def add_module(tensors: dict[str, torch.Tensor]) -> None:
    for side in "AB":
        tensors[f"{LAYER.replace('.1.', '.7.')}.lora_{side}.weight"] = tensors[f"{LAYER}.lora_{side}.weight"].clone()


def recorded_by_peft(name: str | None) -> Alter:
    def alter(adapter: Path) -> None:
        (adapter / "cogumi-base.json").unlink()
        edit_config(adapter, base_model_name_or_path=name)

    return alter


def with_config(**entries: Any) -> Alter:
    return lambda adapter: edit_config(adapter, **entries)


REFUSED: dict[str, tuple[Alter, str]] = {
    "a module is missing": (with_weights(drop_module), "2 tensors are in the file or in the model (default) alone"),
    "a module too many": (with_weights(add_module), "2 tensors are in the file or in the model (default) alone"),
    "half a pair": (with_weights(lambda t: t.pop(f"{LAYER}.lora_B.weight")), "the other half of its update is gone"),
    "another shape": (with_weights(lambda t: t.update({f"{LAYER}.lora_B.weight": torch.ones(32, 4)})), "does not fit"),
    "NaN": (with_weights(lambda t: t[f"{LAYER}.lora_A.weight"].fill_(torch.nan)), "holds NaN"),
    "untrained": (with_weights(lambda t: [t[name].zero_() for name in t if "lora_B" in name]), "changes nothing"),
    "other weights": (with_record(weights="0" * 64), "was trained on other weights than"),
    "another name": (
        with_record(name="someone/other", weights=None),
        "was trained on someone/other, and model.name is",
    ),
    "another name, by PEFT": (recorded_by_peft("a/b"), "set model.name: a/b"),
    "no record": (recorded_by_peft(None), "does not record its base"),
    "not LoRA": (with_config(peft_type="IA3"), "it is a IA3 adapter"),
    "PiSSA": (with_config(init_lora_weights="pissa"), "init_lora_weights='pissa'"),
    "biases": (with_config(bias="all"), "the base's own biases"),
    "a newer PEFT": (with_config(use_magic=True), "sets use_magic"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
    "no config": (lambda path: (path / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no directory": (lambda path: shutil.rmtree(path), "is not a directory"),
    "another vocabulary": (
        with_weights(lambda t: t.update({"base_model.model.model.embed_tokens.weight": torch.ones(1030, 64)})),
        "brings a model.embed_tokens.weight [1030, 64]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_start_from_something_else_is_refused(case: str, sft: Config, adapter: Path, tmp_path: Path) -> None:
    copy = tmp_path / "altered"
    shutil.copytree(adapter, copy)
    alter, says = REFUSED[case]
    alter(copy)
    with pytest.raises(UsageError) as caught:
        cogumi.train(sft, model__adapter=str(copy))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path(sft["cogumi"]["run_dir"]).exists()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"lora__r": 8}, "lora.r"),
        ({"lora__lora_alpha": 4}, "lora.lora_alpha"),
        ({"lora__target_modules": ["q_proj"]}, "lora.target_modules"),
        ({"lora__target_modules": "all-linear"}, "lora.target_modules"),
        ({"lora__use_dora": True}, "lora.use_dora"),
        ({"lora__r": 2}, "lora.r"),
    ],
)
def test_another_lora_section_is_refused(sft: Config, overrides: dict[str, Any], key: str) -> None:
    with pytest.raises(UsageError) as caught:
        cogumi.train(sft, **overrides)
    assert (caught.value.key, f"drop {key}" in caught.value.fix) == (key, True)
    assert not Path(sft["cogumi"]["run_dir"]).exists()


def test_a_lora_section_that_agrees_is_taken(adapter: Path) -> None:
    own = warm_start.lora_of(adapter, {})
    options = {"r": 4, "lora_alpha": 8, "target_modules": sorted(own["target_modules"], reverse=True)}
    assert warm_start.lora_of(adapter, options) == own
    assert own["r"], own["lora_dropout"] == (4, 0.0)


def test_a_run_directory_is_told_from_its_adapter(sft: Config, adapter: Path) -> None:
    with pytest.raises(UsageError, match=f"did you mean {adapter}?"):
        cogumi.train(sft, model__adapter=str(adapter.parent))


def test_the_same_weights_elsewhere_are_the_same_base(
    sft: Config, tiny_model: Path, tmp_path: Path, adapter: Path
) -> None:
    """A directory has no commit: a sample of its weights says which it is, wherever it is, and that it was changed."""
    moved = tmp_path / "moved"
    shutil.copytree(tiny_model, moved)
    result = cogumi.train(sft, model__name=str(moved), cogumi__merge=False, train__max_steps=1)
    assert "are those that it was trained on" in (result.run_dir / "run.log").read_text()
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="was trained on other weights than"):
        cogumi.train(sft, model__name=str(moved), cogumi__run_dir=str(tmp_path / "other"))


def test_a_commit_is_compared(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    """Names and commits of the hub's cache, without the hub: what AutoConfig leaves in a config."""
    config = AutoModelForCausalLM.from_pretrained(tiny_model).config
    config._name_or_path, config._commit_hash = "someone/tiny", COMMIT
    copy = tmp_path / "altered"
    shutil.copytree(adapter, copy)
    with_record(name="someone/tiny", commit=COMMIT, weights=None)(copy)
    assert f"at commit {COMMIT}" in warm_start.check_recorded_base(copy, config, None)
    config._commit_hash = OTHER_COMMIT
    with pytest.raises(UsageError, match=f"set model.revision: {COMMIT}"):
        warm_start.check_recorded_base(copy, config, None)
    config._commit_hash = None
    assert "not known is whether" in warm_start.check_recorded_base(copy, config, "main")
    # Without cogumi's record PEFT's config says it, where its revision is a commit.
    recorded_by_peft("someone/tiny")(copy)
    edit_config(copy, revision=COMMIT)
    config._commit_hash = OTHER_COMMIT
    with pytest.raises(UsageError, match=f"set model.revision: {COMMIT}"):
        warm_start.check_recorded_base(copy, config, None)
    edit_config(copy, revision="main")
    assert "(revision main then, None now)" in warm_start.check_recorded_base(copy, config, None)
