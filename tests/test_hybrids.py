"""Models of 2026: recurrent layers and towers. Kernels that preflight names, packed rows, and a run of each shipped twin."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import all_tensors, logits
from safetensors.torch import load_file
from test_data_packing import HYBRID, config_of, examples, model_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.run_directory import read_json
from cogumi.forecast.memory_forecast import find_target
from cogumi.forecast.run_forecast import describe_kernels
from cogumi.methods import sft
from cogumi.methods.building import trl_arguments
from cogumi.models.loading import read_base
from cogumi.patches import recurrent_kernels
from cogumi.patches.torch_internals import FakeTensorMode
from cogumi.telemetry.throughput import attention_width

SMOKE = Path(__file__).parents[1] / "configs" / "smoke"
TOWERS = ("visual", "vision_tower", "audio_tower", "embed_vision", "embed_audio")


def made_function(reference: Any, imported: bool, kernel: Any = None, name: str = "chunk_gated_delta_rule") -> Any:
    """As transformers' decorator leaves a function; tests/test_data_packing.py has the real ones."""
    variables = {"func_name": name, "package": "fla", "torch_function": reference}
    function = kernel if imported else reference
    return recurrent_kernels._wrap(function, variables | {"is_new_implementation": imported})


def test_a_kernel_gets_no_tensor_that_is_on_no_gpu() -> None:
    """fla imports beside Triton without a GPU, and fails there; so did each forecast."""
    call = made_function(lambda x, scale=1: x * scale, True, lambda *_, **__: pytest.fail("the kernel ran on a CPU"))
    assert call(torch.ones(1, 2, 3), scale=2, cu_seqlens=None, other=1).unique().tolist() == [2]
    assert call.kernel == ("flash-linear-attention", True)


def test_a_kernel_gets_documents_end_to_end_and_a_loop_each_alone() -> None:
    index = torch.tensor([[1, 1, 2, 2], [1, 2, 2, -1]], dtype=torch.int32)
    tokens, seen = torch.arange(8.0).view(2, 4, 1), []

    def run(x: Any, g: Any = None, cu_seqlens: Any = None) -> Any:
        seen.append((x.flatten().tolist(), None if cu_seqlens is None else cu_seqlens.tolist()))
        return x + g, "state"

    for is_kernel in (True, False):
        output, state = recurrent_kernels._run_apart(run, 1, is_kernel, (tokens,), {"g": tokens, "seq_idx": index})
        assert torch.equal(output, 2 * tokens)
        assert state is None
    assert seen[0] == ([0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 5, 7, 8])
    assert seen[1:] == [([0, 1], None), ([2, 3], None), ([4], None), ([5, 6], None), ([7], None)]


def test_a_forecast_for_a_card_counts_the_kernel_and_not_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(query: Any, key: Any, value: Any, g: Any = None, beta: Any = None) -> Any:
        raise RuntimeError("the loop ran")

    call = made_function(loop, imported=False)
    monkeypatch.setattr(recurrent_kernels, "counts_kernels", False)  # a forecast in this process leaves it
    with FakeTensorMode():
        tokens, gates = torch.empty(1, 9, 4, 8, dtype=torch.bfloat16, requires_grad=True), torch.empty(1, 9, 4)
        with pytest.raises(RuntimeError, match="the loop ran"):
            call(tokens, tokens, tokens, g=gates, beta=gates)
        monkeypatch.setattr(recurrent_kernels, "counts_kernels", True)
        output, _ = call(tokens, tokens, tokens, g=gates, beta=gates)
        assert (output.shape, output.dtype) == (tokens.shape, tokens.dtype)
        with pytest.raises(RuntimeError, match="the loop ran"):  # Kimi's gates have another shape
            made_function(loop, imported=False, name="chunk_kda")(tokens, tokens, tokens, g=tokens, beta=gates)
        output.sum().backward()
    assert tokens.grad is not None


def test_the_models_functions_are_wrapped_once() -> None:
    model = model_of("Qwen3_5TextConfig", HYBRID)
    kernels = recurrent_kernels.apply(model)
    assert {name for name, _ in kernels} == {"flash-linear-attention", "causal-conv1d"}
    function = modeling_qwen3_5.torch_chunk_gated_delta_rule
    assert recurrent_kernels.apply(model) == kernels
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is function
    assert recurrent_kernels.apply(model_of("LlamaConfig", {})) == frozenset()


def test_preflight_names_the_kernels_of_a_card_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run, config = load_config(SMOKE / "qwen3.5-4b-sft.yaml"), read_base("cogumi:random-qwen3.5").config
    named, here = find_target("h100 sxm"), replace(find_target("h100 sxm"), named=False)
    (line,) = describe_kernels(run, config, here)
    assert line.state == "yellow"
    assert line.figure.startswith(
        "recurrent layers call causal-conv1d, flash-linear-attention, not installed; without, "
    )
    assert "1.7 to 5.7 times" in line.figure
    assert "-m pip install causal-conv1d flash-linear-attention, or set train.model_init_kwargs" in line.fix
    (line,) = describe_kernels(run, config, named)
    assert (line.state, "if installed there" in line.figure) == ("green", True)
    hub = run.model_copy(update={"train": run.train | {"model_init_kwargs": {"use_kernels": True}}})
    assert describe_kernels(hub, config, here)[0].figure == "of recurrent layers: the hub's"
    found = frozenset({("causal-conv1d", False), ("flash-linear-attention", True)})
    monkeypatch.setattr(recurrent_kernels, "apply", lambda _: found)
    (line,) = describe_kernels(run, config, here)
    assert (line.state, "flash" in line.figure, "times" in line.figure) == ("yellow", False, False)
    assert line.figure.endswith("loops run, how much slower is not known")
    monkeypatch.undo()
    assert describe_kernels(run, config, find_target(None, run)) == []  # a CPU has the loops alone
    assert describe_kernels(run, read_base("cogumi:random-gemma4").config, here) == []


def test_attention_of_layers_with_heads_of_two_sizes_is_counted() -> None:
    config = read_base("cogumi:random-gemma4").config.get_text_config()
    assert attention_width(config) == 2 * 2 * 8 + 2 * 2 * 16
    assert attention_width(SimpleNamespace(num_hidden_layers=3, num_attention_heads=2, hidden_size=16)) == 3 * 16


@pytest.mark.slow("24 real steps of a trainer, packed and not")
def test_a_packed_hybrid_learns_what_an_unpacked_one_does(tmp_path: Path) -> None:
    """Rows of just four examples, two rows a step, against eight examples: convolution and state begin with each."""
    base, results = read_base("cogumi:random-qwen3.5").name, []
    data = examples(torch.randint(41, 51, (96,), generator=torch.Generator().manual_seed(3)).tolist())
    cogumi.patch()
    for packing in (True, False):
        run = load_config(config_of(Path(base), tmp_path / str(packing), packing=packing, max_steps=12))
        run.run_dir.mkdir()
        trainer = sft.build_trainer(
            run,
            model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            args=trl_arguments(run),
            train_dataset=data,
            eval_dataset=None,
            processing_class=AutoTokenizer.from_pretrained(base),
        )
        if packing:
            assert read_json(run.run_dir / "decisions.json")["packing"]["safe"] is True
            assert trainer.args.per_device_train_batch_size == 2
            place = {tuple(ids): n for n, ids in enumerate(data["input_ids"])}
            ends = [[0, *torch.tensor(row["seq_lengths"]).cumsum(0).tolist()] for row in trainer.train_dataset]
            rows = zip(trainer.train_dataset, ends, strict=True)
            order = [place[tuple(row["input_ids"][a:b])] for row, end in rows for a, b in itertools.pairwise(end)]
        trainer.train()
        results.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        data = data.select(order)
    assert len(results[0]) == 12
    assert results[0] == pytest.approx(results[1], abs=2e-5)
    assert results[0][0] - results[0][-1] > 0.01


@pytest.mark.slow("a run of each shipped configuration's twin, and its merge")
@pytest.mark.parametrize("name", ["qwen3.5-4b-sft", "gemma-4-e4b-sft"])
def test_a_twin_keeps_its_towers_and_loads_as_it_was_released(name: str, tmp_path: Path) -> None:
    result = cogumi.train(SMOKE / f"{name}.yaml", cogumi__run_dir=str(tmp_path / "run"))
    assert result.passed, str(result.verdict)
    assert read_json(result.run_dir / "decisions.json")["packing"]["safe"] is True
    base = Path(read_base(load_config(SMOKE / f"{name}.yaml").model.name).name)
    before, after = all_tensors(base), all_tensors(result.merged)
    assert before.keys() == after.keys()
    towers = [key for key in before if any(part in key for part in TOWERS)]
    assert len(towers) > 20
    assert all(torch.equal(before[key], after[key]) for key in towers)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed
    assert all(key.startswith("model.language_model.") for key in changed)  # as the wrapper names them
    adapter = load_file(result.adapter / "adapter_model.safetensors")
    prefix = "language_model." if "gemma" in name else "layers."  # Qwen3.5 trains as its text class
    assert all(key.startswith(f"base_model.model.model.{prefix}") for key in adapter)
    wrapper = AutoModelForImageTextToText.from_pretrained(result.merged, dtype=torch.float32)
    assert type(wrapper).__name__ == AutoConfig.from_pretrained(base).architectures[0]
    assert torch.isfinite(logits(wrapper)).all()
