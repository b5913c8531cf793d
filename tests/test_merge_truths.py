"""Adapters of old PEFT and transformers merge to what those versions trained: expert_truths/make.py wrote both."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import check_logits, load, train_adapter
from expert_truths.make import config_of
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file

from cogumi.core.errors import UsageError
from cogumi.merge import check_merged, merge_adapter
from cogumi.merge.expert_layout import Reading, Stack, as_reading, expert_factors, read_layout
from cogumi.methods.warm_start import refuse_other_reading

TRUTHS = Path(__file__).parent / "expert_truths"
FILES = sorted(path.name for path in TRUTHS.glob("peft-*"))
UNSLOTH = sorted(path.name for path in TRUTHS.glob("unsloth-*"))
EXPERT = re.compile(r"(?P<root>.*experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w[123])\.weight")


@dataclass(frozen=True)
class Truth:
    """One adapter as its version saved it, and what that version added to each parameter."""

    name: str
    kind: str
    inner: int
    config: dict[str, Any]
    adapter: dict[str, torch.Tensor]
    delta: dict[str, torch.Tensor]

    def save(self, path: Path) -> Path:
        path.mkdir(parents=True)
        save_file(self.adapter, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(self.config))
        return path

    @property
    def is_ambiguous(self) -> bool:
        """Return whether the one stack is square, and transformers 4 and 5 mean different axes by it."""
        version = tuple(map(int, (self.config.get("peft_version") or "0.17").split(".")[:2]))
        return self.name == "gpt_oss-8-8-down" and version >= (0, 19)


def truths(file: str) -> Iterator[Truth]:
    with safe_open(TRUTHS / file, framework="pt") as stored:
        parts: dict[str, dict[str, dict[str, torch.Tensor]]] = defaultdict(lambda: {"adapter": {}, "delta": {}})
        for key in stored.keys():  # noqa: SIM118
            case, part, name = key.split("|")
            parts[case][part][name] = stored.get_tensor(key)
        for case, text in stored.metadata().items():
            about = json.loads(text)
            yield Truth(case, about["model_type"], about["intermediate_size"], about["adapter"], **parts[case])


@cache
def base_of(kind: str, inner: int, root: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    path = root / f"{kind}-{inner}"
    transformers.AutoModelForCausalLM.from_config(config_of(kind, inner)).float().save_pretrained(path)
    return path, transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()


def as_stacks(delta: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an update by the parameters of this transformers, which stacks the experts."""
    found = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    for name, change in delta.items():
        expert = EXPERT.fullmatch(name)
        if expert is None:
            found[name] += change
            continue
        root = expert["root"].replace("block_sparse_moe", "mlp")
        is_down, is_up = expert["part"] in ("down_proj", "w2"), expert["part"] in ("up_proj", "w3")
        stack = found[f"{root}.{'down_proj' if is_down else 'gate_up_proj'}"][int(expert["number"])]
        stack[len(change) if is_up else 0 :][: len(change)] += change
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def largest_error(truth: Truth, root: Path, tmp_path: Path, **options: Any) -> float:
    path, before = base_of(truth.kind, truth.inner, root)
    out = tmp_path / f"{truth.name}-out"
    merge_adapter(truth.save(tmp_path / truth.name), out, base=path, progress=False, **options)
    after = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    expected = as_stacks(truth.delta, before)
    return max(float((after[name] - before[name] - change).abs().max()) for name, change in expected.items())


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[] if "0.18.1-transformers-5" in file else pytest.mark.slow("thirty merges"))
        for file in FILES
    ],
)
def test_a_merge_is_what_its_version_trained(file: str, root: Path, tmp_path: Path) -> None:
    for truth in truths(file):
        if truth.is_ambiguous:
            with pytest.raises(UsageError, match="--expert-layout axis"):
                largest_error(truth, root, tmp_path / "refused")
            options = {"expert_layout": "axis1" if ("peft-0.19.0" in file) != ("transformers-5" in file) else "axis2"}
        else:
            options = {}
        assert largest_error(truth, root, tmp_path, **options) < 2e-5, truth.name


def test_verify_logits_loads_the_adapter_as_it_was_trained(root: Path, tmp_path: Path) -> None:
    """PEFT of today would read the factors otherwise, or not find the experts at all."""
    wanted = {"qwen3_moe-8-8-stacked", "mixtral-8-12-modules"}
    for truth in truths("peft-0.18.1-transformers-5.17.0.safetensors"), truths(FILES[0]):
        for case in (case for case in truth if case.name in wanted):
            assert largest_error(case, root, tmp_path, verify="logits") < 2e-5


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_verify_logits_runs_experts_that_torch_cannot_group(kind: str, dtype: str, root: Path, tmp_path: Path) -> None:
    """Rows of 12 bfloat16 are no multiple of 16 bytes, and float64 has no grouped product."""
    base, _ = base_of(kind, 12, root)
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=stacks)
    out = tmp_path / "out"
    report = merge_adapter(adapter, out, base=base, dtype=dtype, verify="logits", progress=False)
    assert report.logits is not None
    if dtype == "keep":
        live, merged = PeftModel.from_pretrained(load(base).double(), str(adapter)).double(), load(out).double()
        assert check_logits(live, merged, torch.arange(16)[None]).passed
        assert merged.config._experts_implementation == load(out).config._experts_implementation


@pytest.mark.parametrize("other", [Reading(1, False), Reading(2, False), Reading(1, True), Reading(2, True)])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
def test_another_order_is_the_same_update(axis: int, grouped: bool, other: Reading) -> None:
    def update(a: torch.Tensor, b: torch.Tensor, reading: Reading) -> torch.Tensor:
        left, right = expert_factors(a, b, 3, reading)
        return (right @ left).transpose(1, 2) if reading.axis == 1 else right @ left

    a, b = torch.randn(6, 5), torch.randn(7, 6)
    reading = Reading(axis, grouped)
    assert torch.equal(update(*as_reading(a, b, 3, reading, other), other), update(a, b, reading))


def unsloth_stack(family: str = "qwen3_moe") -> Stack:
    return Stack("model.layers.0.mlp.experts.gate_up_proj", (4, 16, 8), ((8, 8), (16, 8)), False, family)


@pytest.mark.parametrize(
    ("config", "family", "reading"),
    [
        ({"auto_mapping": {"unsloth_fixed": True}}, "qwen3_moe", "axis2-grouped"),
        ({"auto_mapping": {"unsloth_fixed": True}}, "olmoe", "axis2"),
        ({"lora_B_layout": "rank_major", "auto_mapping": {"unsloth_fixed": True}}, "qwen3_moe", "axis2"),
        ({"auto_mapping": {"unsloth_fixed": True, "lora_B_layout": "rank_major"}}, "qwen3_moe", "axis2"),
        ({"lora_B_layout": "grouped_by_expert"}, "olmoe", "axis2-grouped"),
        (
            {"unsloth_fused_expert_lora": {"parameters": {"gate_up_proj": {"lora_B_layout": "grouped_by_expert"}}}},
            "qwen3_moe",
            "axis2-grouped",
        ),
        (
            {
                "auto_mapping": {"unsloth_fixed": True},
                "unsloth_fused_expert_lora": {"parameters": {"down_proj": {"lora_B_layout": "rank_major"}}},
            },
            "qwen3_moe",
            "axis2",
        ),
        ({}, "qwen3_moe", "axis2"),
    ],
)
def test_unsloths_markers_say_the_order_of_columns(config: dict[str, Any], family: str, reading: str) -> None:
    stack = unsloth_stack(family)
    layout = read_layout({"peft_version": "0.21.2", **config}, [stack])
    assert str(layout.readings[stack.parameter]) == reading


def test_a_layout_that_fits_nothing_names_the_version() -> None:
    stack = Stack("experts.gate_up_proj", (4, 16, 8), ((8, 9), (16, 8)), False, "qwen3_moe")
    with pytest.raises(UsageError, match=r"experts.gate_up_proj.*PEFT 0.18.1"):
        read_layout({"peft_version": "0.18.1"}, [stack])
    with pytest.raises(UsageError, match="axis1 does not fit"):
        read_layout({}, [unsloth_stack()], chosen="axis1")


def test_the_recorded_transformers_decides_a_square_stack() -> None:
    stack = Stack("experts.down_proj", (4, 8, 8), ((8, 8), (8, 8)), True, "gpt_oss")
    for recorded, axis in (("4.57.6", 2), ("5.17.0", 1)):
        layout = read_layout({"peft_version": "0.21.2"}, [stack], transformers=recorded)
        assert layout.readings["experts.down_proj"].axis == axis


@pytest.mark.parametrize("file", UNSLOTH)
def test_a_merge_is_what_unsloth_trained(file: str, root: Path, tmp_path: Path) -> None:
    """make.py took each update from unsloth's own forward. Which axis it read of a square stack depends on its version."""
    for truth in truths(file):
        is_square = "8-8" in truth.name or "8-4-stacked" in truth.name
        options = {}
        if is_square and "2026.10" not in file and "peft-0.18" in file and truth.kind == "qwen3_moe":
            with pytest.raises(UsageError, match=r"axis1-grouped .* or axis2-grouped"):
                largest_error(truth, root, tmp_path / "refused")
            options = {"expert_layout": "axis2-grouped"}
        assert largest_error(truth, root, tmp_path, **options) < 2e-5, truth.name


@pytest.mark.parametrize(("case", "is_grouped"), [("qwen3_moe-8-12-stacked", True), ("olmoe-8-12-stacked", False)])
def test_unsloths_old_order_merges_to_the_same_update(case: str, is_grouped: bool, root: Path, tmp_path: Path) -> None:
    """Column j of expert e stands at e * r + j, by hand here; other families were trained by PEFT's own forward."""
    truth = next(truth for truth in truths(FILES[-1]) if truth.name == case)
    adapter = dict(truth.adapter)
    for name, tensor in truth.adapter.items():
        if is_grouped and "experts" in name and "lora_B" in name:
            columns = [j * 4 + e for e in range(4) for j in range(2)]
            adapter[name] = tensor[:, columns].contiguous()
    unsloth = truth.config | {"auto_mapping": {"unsloth_fixed": True}}
    assert largest_error(replace(truth, adapter=adapter, config=unsloth), root, tmp_path) < 2e-5
    manifest = json.loads((tmp_path / f"{case}-out" / "cogumi-merge.json").read_text())
    assert ("grouped" in manifest["adapters"][0]["reading"]) == is_grouped
    assert check_merged(tmp_path / f"{case}-out").elements


def test_linear_layers_of_unsloths_gpt_oss_go_into_its_stack(root: Path, tmp_path: Path) -> None:
    """The layer of expert e is the transpose of matrix e; the update is computed by hand."""
    _, before = base_of("gpt_oss", 8, root)
    generator = torch.Generator().manual_seed(0)
    name, experts = "model.layers.0.mlp.experts.gate_up_proj", (0, 3)
    factors, delta = {}, {name: torch.zeros_like(before[name])}
    for e in experts:
        a, b = torch.randn(2, 8, generator=generator), torch.randn(16, 2, generator=generator)
        factors |= {f"base_model.model.{name}s.{e}.lora_A.weight": a, f"base_model.model.{name}s.{e}.lora_B.weight": b}
        delta[name][e] = ((b.double() @ a.double()) * 2).T
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["gate_up_projs.0"],
    }
    assert before[name].shape == (4, 8, 16)
    truth = Truth("split", "gpt_oss", 8, config, factors, delta)
    assert largest_error(truth, root, tmp_path) < 2e-6


def test_two_adapters_in_one_file_are_refused(root: Path, tmp_path: Path) -> None:
    truth = next(truths(FILES[-1]))
    names = {name: name.replace(".weight", ".default.weight") for name in truth.adapter}
    other = {name.replace(".weight", ".reference.weight"): tensor.clone() for name, tensor in truth.adapter.items()}
    both = {names[name]: tensor for name, tensor in truth.adapter.items()} | other
    with pytest.raises(UsageError, match="several tensors"):
        largest_error(replace(truth, adapter=both), root, tmp_path)


def test_a_layout_for_an_adapter_without_stacks_is_refused(root: Path, tmp_path: Path) -> None:
    truth = next(truths(FILES[-1]))
    dense = {name: tensor for name, tensor in truth.adapter.items() if "experts" not in name}
    config = truth.config | {"target_parameters": None}
    with pytest.raises(UsageError, match="no adapter changes stacked experts"):
        largest_error(replace(truth, adapter=dense, config=config), root, tmp_path, expert_layout="axis1")


@pytest.mark.parametrize(
    ("file", "case", "reason"),
    [
        ("peft-0.18.1-transformers-5.17.0.safetensors", "qwen3_moe-8-8-stacked", "another order of factors .*axis1"),
        ("peft-0.21.2-transformers-5.17.0.safetensors", "gpt_oss-8-8-down", "is square"),
    ],
)
def test_a_run_does_not_start_from_factors_that_peft_reads_otherwise(
    file: str, case: str, reason: str, root: Path, tmp_path: Path
) -> None:
    truth = next(truth for truth in truths(file) if truth.name == case)
    config = transformers.AutoConfig.from_pretrained(base_of(truth.kind, truth.inner, root)[0])
    with pytest.raises(UsageError, match=reason) as caught:
        refuse_other_reading(config, truth.save(tmp_path / case), None)
    assert "cogumi merge" in str(caught.value)


def test_a_run_starts_from_factors_that_peft_reads_as_they_were_trained(root: Path, tmp_path: Path) -> None:
    truth = next(truth for truth in truths(FILES[-1]) if truth.name == "qwen3_moe-8-8-stacked")
    config = transformers.AutoConfig.from_pretrained(base_of(truth.kind, truth.inner, root)[0])
    refuse_other_reading(config, truth.save(tmp_path / "adapter"), None)
