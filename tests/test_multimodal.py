"""Text training of multimodal checkpoints: which class is loaded, what all-linear adapts, and the merge into the whole.

The oracle is PEFT's own merge_and_unload of the adapter in float32, and the stored bytes for all that no text reaches.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import all_tensors, check_close, logits, rms, run_config, train
from hub_server import HubServer
from multimodal_models import KINDS, save_multimodal
from peft import PeftModel, get_peft_model
from qlora_runs import logged_weights
from safetensors.torch import load_file
from test_models_download import train_apart
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import cogumi
from cogumi.compile.layers import decoder_layers, parts_of
from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json
from cogumi.forecast.disk_forecast import merged_bytes
from cogumi.forecast.training_step import planned_trainer
from cogumi.merge import merge_adapter
from cogumi.methods import building
from cogumi.models.adapters import find_towers, lora_config
from cogumi.models.base import meta_model
from cogumi.models.loading import load_model
from cogumi.telemetry.throughput import flops_of

Config = dict[str, Any]
TOWERS = {
    "qwen3_5": [],  # its text class has none
    "gemma3": ["model.vision_tower"],
    "mistral3": ["model.vision_tower", "model.multi_modal_projector"],
}
OUTSIDE = ("vision_tower", "visual", "multi_modal_projector", "mtp")
CLASSES = {  # under which each checkpoint can be loaded
    "qwen3_5": (AutoModelForCausalLM, AutoModelForImageTextToText),
    "gemma3": (AutoModelForCausalLM, AutoModelForImageTextToText),
    "mistral3": (AutoModelForImageTextToText,),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(kind: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_multimodal(kind, tiny_model, tmp_path_factory.mktemp(kind) / "base")


def config_of(base: Path, code: Path, run_dir: Path) -> Config:
    rows = {"max_rows": 15, "fim": {"max_length": 160, "middle_chars": [8, 32]}}
    train = {"max_steps": 3, "learning_rate": 1e-2, "save_strategy": "no"}
    options = {"merge": True, "compile": "off", "samples_every": 0}
    return run_config("sft", base, code, run_dir, data_section=rows, train=train, cogumi=options)


@pytest.fixture(scope="module")
def sft(base: Path, code_parquet: Path) -> Any:
    """A finished run on the base: SFT, and the merge."""
    return cogumi.train(config_of(base, code_parquet, base.parent / "sft"))


def live(base: Path, adapter: Path, kind: str) -> Any:
    model = CLASSES[kind][0].from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(adapter))


def test_the_merge_is_right_and_all_that_no_text_reaches_is_as_it_was(sft: Any, base: Path, kind: str) -> None:
    assert sft.passed, str(sft.verdict)
    before, after = all_tensors(base), all_tensors(sft.merged)
    assert before.keys() == after.keys()
    outside = [name for name in before if any(part in name for part in OUTSIDE)]
    assert len(outside) > 10
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in outside)
    expected = live(base, sft.adapter, kind).double().merge_and_unload().state_dict()
    merged = CLASSES[kind][0].from_pretrained(sft.merged, dtype=torch.float32).state_dict()
    assert merged.keys() == expected.keys()
    changed = 0
    for name, value in CLASSES[kind][0].from_pretrained(base, dtype=torch.float32).state_dict().items():
        # One rounding to bfloat16. PEFT's sum in float32 is inexact where base and update cancel.
        torch.testing.assert_close(merged[name].double(), expected[name], rtol=2**-8, atol=0)
        changed += not torch.equal(merged[name], value)
    assert changed == len(load_file(sft.adapter / "adapter_model.safetensors")) // 2  # an A and a B each


def test_logits_are_the_live_adapters_under_every_class(
    sft: Any, base: Path, kind: str, tmp_path: Path, command_line: Callable[..., tuple[int, str, str]]
) -> None:
    status, _, output = command_line("merge", sft.adapter, tmp_path / "out", "--dtype", "float32", "--verify", "logits")
    assert status == 0, output
    expected = logits(live(base, sft.adapter, kind))
    plain = logits(CLASSES[kind][0].from_pretrained(base, dtype=torch.float32))
    for auto in CLASSES[kind]:
        model, info = auto.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"]
        check_close(rms(logits(model) - expected), rms(expected - plain))
    both = [check for check in sft.verdict.checks if check.name == "merged logits with the towers"]
    assert len(both) == (kind == "qwen3_5")  # where the run loads another class than the one with the towers
    assert all("Qwen3_5ForConditionalGeneration" in check.figure for check in both)


def test_what_goes_beside_the_weights(sft: Any, base: Path) -> None:
    assert (sft.merged / "preprocessor_config.json").read_bytes() == (base / "preprocessor_config.json").read_bytes()
    assert (sft.merged / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert AutoTokenizer.from_pretrained(sft.merged).get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()


def test_all_linear_leaves_the_towers_out_and_says_so(sft: Any, base: Path, kind: str) -> None:
    keys = load_file(sft.adapter / "adapter_model.safetensors")
    assert not [key for key in keys if any(part in key for part in OUTSIDE)]
    modules = {key.partition(".lora_")[0].removeprefix("base_model.model.") for key in keys}
    model = load_model(str(base))
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert modules == {name for name in linear if not any(part in name for part in (*OUTSIDE, "lm_head"))}
    log = (sft.run_dir / "run.log").read_text()
    assert find_towers(model) == TOWERS[kind]
    if TOWERS[kind]:
        assert f"lora.target_modules: all-linear leaves out {', '.join(TOWERS[kind])}, which no text reaches" in log
    else:
        assert f"{base} is loaded as Qwen3_5ForCausalLM, the language model alone; a merge keeps the rest" in log


@pytest.mark.parametrize("given", ["down_proj", ["down_proj"], r"model\..*\.down_proj"])
def test_modules_that_the_user_excludes_stay_excluded(given: Any, tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(save_multimodal("gemma3", tiny_model, tmp_path / "base"))
    expected = lora_config({"exclude_modules": given}, model=model)
    adapted = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    names = [name for name, _ in get_peft_model(adapted, expected).named_parameters() if "lora_A" in name]
    assert names
    assert not [name for name in names if "vision_tower" in name]
    excluded = given != "down_proj"  # as a text it is a pattern for a whole name, as PEFT has it
    assert any("down_proj" in name for name in names) != excluded


def test_the_forecast_builds_the_model_and_the_adapter_that_the_run_trains(
    sft: Any, base: Path, code_parquet: Path
) -> None:
    loaded, planned = load_model(str(base)), meta_model(AutoConfig.from_pretrained(base))
    assert type(loaded) is type(planned)
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (loaded, planned)]
    assert shapes[0] == shapes[1]
    run = load_config(config_of(base, code_parquet, base.parent / "planned"))
    trainer = planned_trainer(run, AutoConfig.from_pretrained(base), torch.float32)
    trained = {name.replace(".default", "") for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained == set(load_file(sft.adapter / "adapter_model.safetensors"))
    tensors = all_tensors(base).items()  # but for the part that no class has
    stored = sum(tensor.nbytes for name, tensor in tensors if not name.startswith("mtp"))
    assert merged_bytes(AutoConfig.from_pretrained(base)) == pytest.approx(stored, rel=0.03)  # and a header


@pytest.mark.slow("a forecast in a process of its own for each kind of checkpoint")
@pytest.mark.usefixtures("prepared_workers")
def test_preflight_forecasts_all_but_the_pace(base: Path, code_parquet: Path) -> None:
    config = config_of(base, code_parquet, base.parent / "planned")
    config["train"]["save_strategy"] = "steps"
    lines = {line.stage: line for line in cogumi.preflight(config).lines}
    assert [stage for stage, line in lines.items() if line.state in ("red", "unknown")] == ["time"]
    assert " activations" in lines["memory"].figure


def test_flops_are_those_of_the_language_model(tiny_model: Path, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(save_multimodal("gemma3", tiny_model, tmp_path / "base"))
    projection = whole.model.multi_modal_projector.mm_input_projection_weight.numel()
    text = transformers.Gemma3ForCausalLM(whole.config.get_text_config())
    assert flops_of(whole).weights == flops_of(text).weights + projection  # which is no linear layer


def test_the_layers_that_are_compiled_are_those_of_the_language_model(sft: Any, base: Path, kind: str) -> None:
    for model in (load_model(str(base)), live(base, sft.adapter, kind)):
        layers = decoder_layers(model)
        assert layers == list(model.get_decoder().layers)
        assert [part for part in parts_of(model) if part not in layers] == [
            child for name, child in model.get_decoder().named_children() if name not in ("layers", "embed_tokens")
        ]


def test_an_adapter_of_the_class_with_the_towers_is_merged(base: Path, kind: str, tmp_path: Path) -> None:
    """As others train it: its names are those of the checkpoint, and it is on the towers as well."""
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    adapter = train(model, tmp_path / "adapter", target_modules="all-linear")
    assert any(part in key for key in load_file(adapter / "adapter_model.safetensors") for part in OUTSIDE)
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", verify="logits", progress=False)
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    expected = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().state_dict()
    # torch's MultiheadAttention reads this weight without PEFT's update, which merge_and_unload adds all the same.
    pooling = "model.vision_tower.head.attention.out_proj.weight"
    expected |= {name: value for name, value in plain.items() if name == pooling}
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-7)


def test_a_tied_head_that_is_adapted_alone_gets_a_tensor_that_both_classes_load(
    tiny_model: Path, tmp_path: Path
) -> None:
    """As the smaller Qwen3.5 are tied. The adapter is of the class without the tower."""
    base = save_multimodal("qwen3_5", tiny_model, tmp_path / "base", tied=True)
    assert "lm_head.weight" not in all_tensors(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapter = train(model, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", progress=False)
    assert "lm_head.weight" in all_tensors(tmp_path / "out")
    expected, plain = (logits(each) for each in (live(base, adapter, "qwen3_5"), load_model(str(base))))
    for auto in CLASSES["qwen3_5"]:
        merged = auto.from_pretrained(tmp_path / "out", dtype=torch.float32)
        check_close(rms(logits(merged) - expected), rms(expected - plain))


@pytest.mark.slow("bitsandbytes on a CPU takes seconds a step")
def test_a_base_in_four_bits_trains_and_merges(base: Path, kind: str, code_parquet: Path, tmp_path: Path) -> None:
    """down_proj has 96 columns, which bitsandbytes misreads on some CPUs; the tower stays as it is."""
    config = config_of(base, code_parquet, tmp_path / "run")
    skipped = ["lm_head", "down_proj", "model.vision_tower", "model.visual", "model.multi_modal_projector"]
    config["model"]["quantization_config"] = {"load_in_4bit": True, "llm_int8_skip_modules": skipped}
    result = cogumi.train(config)
    assert result.passed, str(result.verdict)
    assert "in nf4 4-bit" in logged_weights(result.run_dir)


def gspo_of(base: Path, code: Path, run_dir: Path) -> Config:
    config = config_of(base, code, run_dir)
    config["train"] |= {"max_steps": 2, "num_generations": 4, "max_completion_length": 8, "learning_rate": 1e-3}
    config["cogumi"] |= {"method": "gspo", "rewards": ["edit_similarity"]}
    return config


@pytest.mark.slow("two GSPO runs for each kind of checkpoint")
def test_gspo_from_the_merged_model_and_from_the_adapter(sft: Any, base: Path, code_parquet: Path) -> None:
    merged = cogumi.train(gspo_of(sft.merged, code_parquet, base.parent / "gspo-merged"))
    warm = gspo_of(base, code_parquet, base.parent / "gspo-adapter")
    warm["model"]["adapter"] = str(sft.adapter)
    warm.pop("lora")
    warmed = cogumi.train(warm)
    before = all_tensors(base)
    for result in (merged, warmed):
        assert result.passed, str(result.verdict)
        after = all_tensors(result.merged)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before if any(p in name for p in OUTSIDE))
    config = read_json(warmed.adapter / "adapter_config.json")
    assert config["exclude_modules"] == read_json(sft.adapter / "adapter_config.json")["exclude_modules"]
    log = (warmed.run_dir / "run.log").read_text()
    assert "are in the model bit for bit" in log


@pytest.mark.slow("a run that trains every weight for each kind of checkpoint")
def test_full_tuning_leaves_the_towers_out_too(base: Path, kind: str, code_parquet: Path) -> None:
    config = config_of(base, code_parquet, base.parent / "full")
    config.pop("lora")
    config["cogumi"]["tuning"] = "full"
    result = cogumi.train(config)
    assert result.passed, str(result.verdict)
    before, after = all_tensors(base), all_tensors(result.merged)
    if kind == "qwen3_5":  # saved as what was trained, the language model alone
        assert not [name for name in after if any(part in name for part in OUTSIDE)]
    else:
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before if any(p in name for p in OUTSIDE))


def unmergeable(base: Path, code: Path, run_dir: Path) -> Config:
    """An adapter that PEFT trains and no merge takes: one on a convolution of the tower as well."""
    config = config_of(base, code, run_dir)
    config["lora"]["target_modules"] = ["q_proj", "patch_conv"]
    return config


def test_a_run_that_could_not_be_merged_is_refused_before_the_model_is_loaded(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_multimodal("mistral3", tiny_model, tmp_path / "base")
    config = unmergeable(base, code_parquet, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(building, "load_model", lambda *_: pytest.fail("the model was loaded"))
        for call in (cogumi.train, cogumi.preflight):
            with pytest.raises(UsageError) as refused:
                call(config)
            assert str(refused.value) == (
                "lora: adapter lora: model.vision_tower.patch_conv is a Conv2d, not a linear layer, an embedding or a "
                "stack of experts; set cogumi.merge: false, which trains it without merging"
            )
            assert not (tmp_path / "run").exists()
    result = cogumi.train(config, cogumi__merge=False)
    assert result.merged is None
    assert any("patch_conv" in key for key in load_file(result.adapter / "adapter_model.safetensors"))


def test_weights_that_no_merge_reads_are_refused_with_both_ways_out(
    tiny_model: Path, code_parquet: Path, tmp_path: Path
) -> None:
    base = save_multimodal("mistral3", tiny_model, tmp_path / "base")
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(UsageError) as refused:
        cogumi.train(config_of(base, code_parquet, tmp_path / "run"))
    output = str(refused.value)
    assert output.startswith(
        f"model.name: base {base} has no model.safetensors and no index of shards in {base}; download"
    )
    assert output.endswith("nothing else is merged; or set cogumi.merge: false, which trains it without merging")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow("a run in a process of its own")
def test_nothing_of_the_weights_but_their_headers_is_fetched_to_refuse_it(
    hub: HubServer, tiny_model: Path, code_parquet: Path, tmp_path: Path
) -> None:
    hub.publish("someone/model", save_multimodal("mistral3", tiny_model, tmp_path / "base"))
    config = unmergeable(Path("someone/model"), code_parquet, tmp_path / "run")
    output = train_apart(config, hub.environment(tmp_path / "cache"))
    assert "REFUSED lora: adapter lora: model.vision_tower.patch_conv is a Conv2d" in output
    sent = {path: count for path, count in hub.sent.items() if path.endswith(".safetensors")}
    assert list(sent.values()) == [100_001]  # what huggingface_hub asks for, of 750 kB
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert not (tmp_path / "run").exists()
