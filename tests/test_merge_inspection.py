"""`cogumi inspect`, raw factors of PiSSA and its like, and adapters that change nothing."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import (
    EXPERTS,
    FUSED,
    LINEARS,
    SIZES,
    all_tensors,
    edit_config,
    edit_tensors,
    load,
    save_base,
    train_adapter,
)
from golden import Golden
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig
from typer.testing import CliRunner

import cogumi
from cogumi.cli.app import app
from cogumi.core.errors import UsageError
from cogumi.merge import merge_adapter
from cogumi.merge.adapter_files import write_base_record
from cogumi.notebook.html_components import render_html

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "gpt2": GPT2Config(vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4),
    "experts": Qwen3MoeConfig(**SIZES, head_dim=16, **EXPERTS),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {name: save_base(root / name, config) for name, config in CONFIGS.items()}


# ------------------------------------------------------------------------------------------------------------ raw factors


def raw_factors(base: Path, path: Path, kind: str, change: float = 0.1, **lora: Any) -> Path:
    """An adapter whose factors PEFT took from the base, moved by this share, saved as if it were plain LoRA."""
    torch.manual_seed(3)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": LINEARS, "init_lora_weights": kind} | lora
    model = get_peft_model(load(base), LoraConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * change * parameter.std())
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(str(path))
    return path


@pytest.mark.parametrize("change", [0.0, 0.5])
@pytest.mark.parametrize(
    ("family", "kind", "lora"),
    [
        ("llama", "pissa", {}),
        ("llama", "pissa_niter_4", {"r": 2, "lora_alpha": 2}),
        ("llama", "olora", {"target_modules": ["k_proj"]}),
        ("llama", "pissa", {"use_dora": True}),
        ("gpt2", "pissa", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        ("experts", "pissa", {"target_modules": ["q_proj", "v_proj"]}),
    ],
)
def test_raw_factors_are_refused(
    family: str, kind: str, lora: dict[str, Any], change: float, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = raw_factors(bases[family], tmp_path / "adapter", kind, change, **lora)
    with pytest.raises(UsageError, match="raw factors of PiSSA or its like") as raised:
        merge_adapter(adapter, tmp_path / "out", base=bases[family], progress=False)
    assert "path_initial_model_for_weight_conversion" in str(raised.value.fix)
    assert not (tmp_path / "out").exists()


def test_factors_of_corda_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    """B A is U U^T W of the singular vectors U of W C, with C from the inputs: on either end of the spectrum."""
    adapter = train_adapter(bases["llama"], tmp_path / "adapter", target_modules=["k_proj", "up_proj"])
    file = adapter / "adapter_model.safetensors"
    factors, weights = load_file(file), all_tensors(bases["llama"])
    for key in [key for key in factors if "lora_A" in key]:
        weight = weights[key.removeprefix("base_model.model.").replace(".lora_A", "")].float()
        inputs = torch.randn(weight.shape[1], 400) * torch.linspace(0.1, 3, weight.shape[1])[:, None]
        left = torch.linalg.svd(weight @ inputs @ inputs.T)[0][:, -4:]
        factors |= {key: (left.T @ weight / 2).contiguous(), key.replace("lora_A", "lora_B"): left.contiguous()}
    save_file(factors, file, {"format": "pt"})
    with pytest.raises(UsageError, match="raw factors"):
        merge_adapter(adapter, tmp_path / "out", base=bases["llama"], progress=False)


def test_a_router_of_few_experts_is_no_part_of_the_weights_by_chance(bases: dict[str, Path], tmp_path: Path) -> None:
    lora: dict[str, Any] = {"target_modules": [], "target_parameters": ["mlp.gate.weight"], "r": 2}
    adapter = train_adapter(bases["experts"], tmp_path / "adapter", **lora)
    file, weights = adapter / "adapter_model.safetensors", all_tensors(bases["experts"])
    factors = load_file(file)
    for key in [key for key in factors if "lora_A" in key]:
        layer = key.split(".")[4]
        left, values, right = torch.linalg.svd(
            weights[f"model.layers.{layer}.mlp.gate.weight"].float(), full_matrices=False
        )
        factors |= {key: right[:2].contiguous(), key.replace("lora_A", "lora_B"): (left * values)[:, :2] / 2}
    save_file({key: tensor.contiguous() for key, tensor in factors.items()}, file, {"format": "pt"})
    merge_adapter(adapter, tmp_path / "out", base=bases["experts"], progress=False)


def test_llama_factory_names_the_converted_adapter(bases: dict[str, Path], tmp_path: Path, golden: Golden) -> None:
    """As its callback saves: the factors as trained, and converted by PEFT against the initial ones."""
    base, run = bases["llama"], tmp_path / "run"
    torch.manual_seed(3)
    model = get_peft_model(load(base), LoraConfig(r=8, target_modules=LINEARS, init_lora_weights="pissa"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def save(name: str, init: Any, **options: Any) -> None:
        model.peft_config["default"].init_lora_weights = init
        model.save_pretrained(str(run / name), **options)

    save("pissa_init", True)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.01)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save("pissa_backup", True)
    save("pissa_converted", "pissa", path_initial_model_for_weight_conversion=str(run / "pissa_init"))
    with golden.raises("merge", message="raw factors", fix=f"merge {run / 'pissa_converted'}"):
        merge_adapter(run / "pissa_backup", tmp_path / "out", base=base, progress=False)
    merge_adapter(run / "pissa_converted", tmp_path / "out", base=base, dtype="float32", progress=False)
    prefix = "base_model.model.model.layers.1.self_attn.k_proj"
    start, end = (
        {side: values[f"{prefix}.lora_{side}.default.weight"].double() for side in "AB"}
        for values in (before, expected)
    )
    name = "model.layers.1.self_attn.k_proj.weight"
    change = all_tensors(tmp_path / "out")[name].double() - all_tensors(base)[name].double()
    assert torch.allclose(change, end["B"] @ end["A"] - start["B"] @ start["A"], atol=1e-6)


def ordinary(base: Path, path: Path, number: int, kind: str) -> Path:
    """An ordinary adapter: random factors, or trained for some steps with a learning rate that is much too high."""
    is_gpt = "gpt2" in base.name
    targets = [["q_proj"], ["k_proj", "down_proj"], LINEARS][number % 3]
    lora: dict[str, Any] = {"r": [1, 2, 8, 32, 64][number % 5], "target_modules": ["c_attn"] if is_gpt else targets}
    lora["fan_in_fan_out"] = is_gpt
    if kind == "random":
        return train_adapter(base, path, seed=number, **lora)
    torch.manual_seed(number)
    init: Any = [True, "gaussian", "orthogonal"][number % 3] if lora["r"] > 1 else True
    model = get_peft_model(load(base), LoraConfig(**lora, init_lora_weights=init))
    rate = [1e-3, 1e-2, 5e-2][number // 3 % 3]
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=rate)
    tokens = torch.randint(256, (4, 32))
    for _ in range(15):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(str(path))
    return path


@pytest.mark.slow("a hundred merges")
@pytest.mark.parametrize("kind", ["random", "trained"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_ordinary_adapters_are_no_raw_factors(family: str, kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    for number in range(25):
        adapter = ordinary(bases[family], tmp_path / f"{number}", number, kind)
        report = cogumi.inspect(adapter, bases[family])
        assert report.refusal is None, number


def test_an_adapter_on_the_residual_of_pissa_merges(bases: dict[str, Path], tmp_path: Path) -> None:
    """The base without its top part is saved beside the factors: there they are an ordinary adapter."""
    model: Any = get_peft_model(
        load(bases["llama"]), LoraConfig(r=8, target_modules=LINEARS, init_lora_weights="pissa")
    )
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(str(tmp_path / "run" / "pissa_init"))
    model.unload().save_pretrained(tmp_path / "run")
    merge_adapter(tmp_path / "run" / "pissa_init", tmp_path / "out", base=tmp_path / "run", progress=False)
    merged, before = all_tensors(tmp_path / "out"), all_tensors(bases["llama"])
    assert max(float((merged[name].double() - before[name].double()).abs().max()) for name in before) < 1e-5


# -------------------------------------------------------------------------------------------------------- nothing changed


def zero_product(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Make factors that are not zero, whose products are: B has columns where A has no rows."""
    (tensor[:2] if "lora_A" in name else tensor[:, 2:]).zero_()
    return tensor


NOTHING: dict[str, tuple[Callable[[Path], Path], str]] = {
    "alpha": (lambda path: edit_config(path, lora_alpha=0), "lora_alpha is 0"),
    "alpha with rsLoRA": (lambda path: edit_config(path, lora_alpha=0, use_rslora=True), "lora_alpha is 0"),
    "alpha pattern": (lambda path: edit_config(path, alpha_pattern={".*_proj": 0}), "alpha_pattern is 0"),
    "products": (lambda path: edit_tensors(path, zero_product), "all its updates are zero"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_an_adapter_that_changes_nothing_is_refused_in_the_plan(
    case: str, bases: dict[str, Path], tmp_path: Path, golden: Golden
) -> None:
    change, message = NOTHING[case]
    adapter = change(train_adapter(bases["llama"], tmp_path / "adapter", target_modules=["q_proj", "v_proj"]))
    with golden.raises("merge", message=f"it changes nothing: {message}"):
        merge_adapter(adapter, tmp_path / "out", base=bases["llama"], progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert message in str(cogumi.inspect(adapter, bases["llama"]).refusal)


def test_a_module_saved_whole_as_it_was_changes_nothing(bases: dict[str, Path], tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    get_peft_model(load(bases["llama"]), lora).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(UsageError, match="it changes nothing"):
        merge_adapter(tmp_path / "adapter", tmp_path / "out", base=bases["llama"], progress=False)


def test_updates_that_cancel_each_other_are_refused_in_the_plan(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = train_adapter(bases["experts"], tmp_path / "one", target_modules=["q_proj"], target_parameters=FUSED)
    copy = shutil.copytree(adapter, tmp_path / "two")
    for one, two in ((0.5, 0.5), (0.1, 0.2), (0.3, 0.7), (1 / 3, 1.1), (0.7, 0.1)):  # whose sums are not exact
        parts = [(adapter, one), (copy, two), (adapter, -(one + two))]
        with pytest.raises(UsageError, match="the updates cancel each other"):
            merge_adapter(parts, tmp_path / "out", bases["experts"], progress=False)
    merge_adapter([(adapter, 1.0), (copy, -0.999)], tmp_path / "out", bases["experts"], progress=False)


def test_updates_that_are_partly_multiplied_by_zero_are_named(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = train_adapter(bases["llama"], tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    edit_config(adapter, alpha_pattern={"v_proj": 0})
    report = merge_adapter(adapter, tmp_path / "out", base=bases["llama"], progress=False)
    assert "2 of 4 updates are multiplied by 0: lora_alpha or alpha_pattern" in str(report)


# ------------------------------------------------------------------------------------------------------- shares and names


def test_a_merge_says_what_is_under_the_adapter(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = train_adapter(bases["experts"], tmp_path / "adapter", target_modules=["q_proj", "k_proj"])
    edit_config(adapter, target_modules=["q_proj", "k_proj", "v_projj", "w1"], rank_pattern={"o_proj": 4})
    report = merge_adapter(adapter, tmp_path / "out", base=bases["experts"], progress=False)
    sizes = {name: parameter.numel() for name, parameter in load(bases["experts"]).named_parameters()}
    total = sum(sizes.values())
    share = sum(size for name, size in sizes.items() if "q_proj" in name or "k_proj" in name) / total
    experts = sum(size for name, size in sizes.items() if ".experts." in name) / total
    line = f"{share:.1%} of the parameters are under the adapter; not layers.mlp.experts ({experts:.0%})"
    assert report.notes[0].startswith(line)
    assert "q_proj" not in report.notes[0]
    assert report.notes[1].endswith("target_modules v_projj, w1; rank_pattern o_proj")
    unusual = cogumi.inspect(adapter, bases["experts"]).unusual
    assert unusual[0] == report.notes[1]
    assert "the experts are not changed" in unusual[-1]


# --------------------------------------------------------------------------------------------------------------- inspect


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", {"target_modules": LINEARS, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}}),
        ("llama", {"target_modules": ["q_proj"], "use_rslora": True, "r": 16}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        ("experts", {"target_modules": ["q_proj"], "target_parameters": FUSED}),
    ],
)
def test_norms_are_those_of_the_merge(
    family: str, lora: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = train_adapter(bases[family], tmp_path / "adapter", **lora)
    report = cogumi.inspect(adapter, bases[family])
    merge_adapter(adapter, tmp_path / "out", base=bases[family], dtype="float32", progress=False)
    kind = transformers.AutoModelForCausalLM
    before, after = (
        kind.from_pretrained(path, dtype=torch.float64).state_dict() for path in (bases[family], tmp_path / "out")
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert report.updates.keys() == changed
    for name in changed:
        assert report.updates[name].delta == pytest.approx((after[name] - before[name]).norm().item(), rel=1e-4)
        assert report.updates[name].weight == pytest.approx(before[name].norm().item(), rel=0.1)
    first = [name for name in changed if ".0." in name]
    expected = math.sqrt(sum((after[name] - before[name]).square().sum().item() for name in first))
    assert report.layers["0"].delta == pytest.approx(expected, rel=1e-4)
    alone = cogumi.inspect(edit_config(adapter, base_model_name_or_path="someone/elsewhere"))
    assert alone.coverage is None
    assert alone.refusal is None
    assert all(
        report.updates[f"{name}.weight"].delta == pytest.approx(update.delta) for name, update in alone.updates.items()
    )


WRITERS: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "peft": ({}, {}, "PEFT 0."),
    "old peft": ({"peft_version": None}, {}, "PEFT up to 0.17 or another tool"),
    "unsloth": ({"auto_mapping": {"unsloth_fixed": True}}, {}, "unsloth with PEFT"),
    "verl": ({"lora_alpha": 0}, {}, "verl with PEFT"),
    "llama-factory": ({}, {"trainer_log.jsonl": "{}"}, "LLaMA-Factory with PEFT"),
    "axolotl": ({}, {"README.md": "---\ntags:\n- axolotl\n---"}, "axolotl with PEFT"),
}


@pytest.mark.parametrize("case", WRITERS)
def test_the_writer_is_named_with_evidence(case: str, bases: dict[str, Path], tmp_path: Path) -> None:
    entries, files, writer = WRITERS[case]
    adapter = edit_config(train_adapter(bases["llama"], tmp_path / "adapter", target_modules=["q_proj"]), **entries)
    (adapter / "README.md").unlink(missing_ok=True)
    for name, text in files.items():
        (adapter / name).write_text(text)
    report = cogumi.inspect(adapter, bases["llama"])
    assert report.writer.startswith(writer)
    assert report.evidence


def test_the_base_is_compared_with_the_recorded_one(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = train_adapter(bases["llama"], tmp_path / "adapter", target_modules=["q_proj"])
    write_base_record(adapter, load(bases["llama"]))
    assert cogumi.inspect(adapter).base_state.endswith("holds the weights that it was trained on")
    other = shutil.copytree(bases["llama"], tmp_path / "other")
    edit_tensors(Path(other), lambda name, tensor: tensor + 1)
    report = cogumi.inspect(adapter, other)
    assert "holds other than the weights" in report.base_state
    assert report.writer.startswith("cogumi with PEFT")
    with pytest.raises(UsageError, match="neither"):
        cogumi.inspect(adapter, tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"adapter_config\.json"):
        cogumi.inspect(bases["llama"])


def test_the_command(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = train_adapter(bases["llama"], tmp_path / "adapter", target_modules=["q_proj"])
    text = CliRunner().invoke(app, ["inspect", str(adapter)])
    assert text.exit_code == 0
    assert "merge             possible" in text.stdout
    read = json.loads(
        CliRunner().invoke(app, ["inspect", str(adapter), "--base", str(bases["llama"]), "--json"]).stdout
    )
    assert read["refusal"] is None
    assert read["layers"]["1"]["ratio"] == pytest.approx(read["layers"]["1"]["delta"] / read["layers"]["1"]["weight"])
    assert "q_proj (2)" in render_html(cogumi.inspect(adapter))
    edit_config(adapter, use_qalora=True)
    refused = CliRunner().invoke(app, ["inspect", str(adapter)])
    assert refused.exit_code == 1
    assert "use_qalora" in refused.stdout
