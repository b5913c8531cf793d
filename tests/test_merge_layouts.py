"""Checkpoints whose tensors are not the model's parameters as they are.

Every merge is reloaded through transformers and compared with the live adapter, as in test_merge_kinds.py.
"""

import shutil
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
    check_merge,
    edit_config,
    edit_tensors,
    load,
    save_base,
    train_adapter,
)
from golden import Golden
from multimodal_models import QWEN_TOWER, TOWER
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import Span, matrix_shape
from cogumi.merge import merge_adapter
from cogumi.merge.completeness import find_faults
from cogumi.merge.parameter_map import Place, parameter_places

# Every conversion that transformers registers ends in the right places or in none.


def converters() -> list[tuple[str, int]]:
    """(name that the mapping is registered under, number of the converter in it), for every converter there is."""
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

    mapping = _build_checkpoint_conversion_mapping()
    return [
        (name, number)
        for name, transforms in sorted(mapping.items())
        for number, transform in enumerate(transforms)
        if isinstance(transform, WeightConverter)
    ]


def stub_model(registered: str, shapes: dict[str, tuple[int, ...]]) -> Any:
    """A model on meta with these parameters, which transformers takes for one of its own of that class or type."""

    class Config(transformers.PreTrainedConfig):
        model_type = registered

    stub = type(registered, (PreTrainedModel,), {"__module__": "transformers.stub", "config_class": Config})
    model = stub(Config())
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module: nn.Module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))
    model.all_tied_weights_keys = {}
    return model


def stored_tensors(converter: Any, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Distinct numbers under names that the converter's source patterns match: three of each list."""
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for pattern in converter.source_patterns:
        name = "layers.0." + pattern.replace(r"\.", ".").removeprefix(".").removeprefix("^")
        for number in range(4) if "*" in name else range(1):
            values = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
            start += values.numel()
            tensors[name.replace("*", str(number))] = values
    return tensors


def converted_shapes(registered: str, tensors: dict[str, torch.Tensor], flip: bool) -> dict[str, tuple[int, ...]]:
    """Parameter -> shape, of what the stored tensors become. flip: the first of them is transposed in the model.

    Raises AttributeError, LookupError, RuntimeError or ValueError where tensors of these dimensions cannot be converted.
    """
    transforms = get_model_conversion_mapping(stub_model(registered, {}))
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    for name, tensor in tensors.items():
        first, pattern = rename_source_key(name, renamings, converters)
        converter = next(converter for converter in converters if pattern in converter.source_patterns)
        converter.add_tensor(first, name, str(pattern), lambda tensor=tensor: tensor)  # type: ignore[arg-type]
    shape = next(iter(tensors.values())).shape
    model = stub_model(registered, {first: (*shape[:-2], shape[-1], shape[-2]) if flip else tuple(shape)})
    values = converter.convert(first, model=model, config=model.config)
    return {name: tuple(value.shape) for name, value in values.items()}


def loaded(
    registered: str, tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Parameter -> value, as transformers' own loader makes them."""
    model = stub_model(registered, shapes)
    config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model), dtype=torch.float32)
    info, _ = convert_and_load_state_dict_in_model(model, tensors, config, None)
    assert not info.conversion_errors
    assert not info.mismatched_keys
    collected = {name: tensor for name, tensor in model.state_dict().items() if tensor.device.type != "meta"}
    assert collected.keys() == shapes.keys()
    return collected


def assembled(places: tuple[Place, ...], tensors: dict[str, torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """A parameter put together from its places; NaN where there is none."""
    stack = torch.full(shape if len(shape) == 3 else (1, *matrix_shape(tuple(shape))), torch.nan)
    for place in places:
        stored = tensors[place.tensor]
        rows = stored.reshape(-1, stored.shape[-1] if stored.dim() > 1 else 1)[place.first : place.last]
        rows = rows.T if place.transposed else rows
        stack[place.matrix, place.offset : place.offset + len(rows)] = rows
    return stack.reshape(shape)


# What the merge knows. Everything else (permutations for rotary embeddings, interleaved rows, experts shared out between
# two stacks, a transposed router) must be left without places, so that an adapter on it is refused.
KNOWN = {
    "Chunk(dim=0)",
    "Concatenate(dim=0)",
    "Concatenate(dim=1)",
    "MergeModulelist(dim=0)",
    "MergeModulelist(dim=0) Concatenate(dim=1)",
    "Transpose",
}


# Operations since transformers 5.24 that ask the model for sizes, which the stub here has not. The merge knows none of them.
ASK_THE_MODEL = {
    "Inkling2LoopDequantizeExperts",
    "Inkling2LoopDequantizeExperts Interleave(dim=1)",
    "Inkling2UnpadVocab",
    "PermuteForRope",
    "Split(dim=0)",
}


def operations_of(registered: str, number: int) -> str:
    return " ".join(map(repr, get_checkpoint_conversion_mapping(registered)[number].operations))


def test_every_registered_conversion_is_mapped_right_or_not_at_all() -> None:
    """transformers' own loader, run on distinct numbers, against the places."""
    mapped, unmapped, tried = set(), set(), set()
    for registered, number in converters():
        converter, operations = get_checkpoint_conversion_mapping(registered)[number], operations_of(registered, number)
        for shape, flip in (((24,), False), ((24, 4), False), ((3, 24, 4), False), ((3, 24, 4), True)):
            if flip and "Transpose" not in operations:
                continue
            tensors = stored_tensors(converter, shape)
            try:
                shapes = converted_shapes(registered, tensors, flip)
            except (AttributeError, LookupError, RuntimeError, ValueError):
                continue
            tried.add((registered, number))
            expected = loaded(registered, tensors, shapes)
            spans = {name: Span(Path(), name, "F32", tuple(tensor.shape), 0, 0) for name, tensor in tensors.items()}
            places = parameter_places(stub_model(registered, shapes), spans)
            assert places.keys() <= expected.keys()
            for name, found in places.items():
                assert torch.equal(assembled(found, tensors, expected[name].shape), expected[name]), (registered, name)
            (mapped if places else unmapped).add(operations)
            # Whether the checkpoint is whole is known of each, also of those that no adapter can change.
            stored = {name: (span.shape, span.dtype) for name, span in spans.items()}
            assert not find_faults(stub_model(registered, shapes), stored), (registered, operations)
            last = max(stored)
            del stored[last]
            assert find_faults(stub_model(registered, shapes), stored), (registered, last)
    assert {operations_of(*converter) for converter in set(converters()) - tried} <= ASK_THE_MODEL
    assert mapped == KNOWN
    assert {"Interleave(dim=1)", "Chunk(dim=0) PermuteForRope", "ErnieFuseAndSplitTextVisionExperts"} <= unmapped


# Layouts, through the whole merge.

VISION = QWEN_TOWER | {"patch_size": 14}
TEXT = SIZES | {"head_dim": 16}


def qwen3_vl_moe(width: int) -> Any:
    return transformers.Qwen3VLMoeConfig(
        text_config=TEXT | EXPERTS | {"moe_intermediate_size": width},
        vision_config=VISION | {"deepstack_visual_indexes": [], "num_position_embeddings": 16},
        architectures=["Qwen3VLMoeForConditionalGeneration"],
    )


LAYOUT_BASES: dict[str, Any] = {
    # One stored tensor for the gate, the queries, keys and values; one for the MLP's gate and up.
    "chunked": transformers.HrmTextConfig(
        **{name: value for name, value in SIZES.items() if name != "num_key_value_heads"} | {"num_hidden_layers": 1},
        head_dim=16,
        H_cycles=1,
        L_cycles=1,
        initializer_range=0.1,
    ),
    "experts-transposed": qwen3_vl_moe(48),
    "experts-square": qwen3_vl_moe(32),
    # Experts one by one, a dense MLP whose gate and up are one parameter, and other prefixes.
    "concatenated": transformers.MiniMaxM3VLConfig(
        text_config=TEXT
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "num_hidden_layers": 1}
        | {"bos_token_id": 1, "eos_token_id": 2},
        vision_config=TOWER,
        projector_hidden_size=32,
        architectures=["MiniMaxM3SparseForConditionalGeneration"],
    ),
    "renamed-tied": transformers.Gemma3Config(
        text_config=TEXT | {"sliding_window": 16},
        vision_config=TOWER,
        mm_tokens_per_image=4,
        architectures=["Gemma3ForConditionalGeneration"],
    ),
    "experts-fused": Qwen3MoeConfig(**TEXT, **EXPERTS),
}
LANGUAGE = r".*language_model.*\.(q_proj|v_proj|down_proj)"
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chunked": ("chunked", {"target_modules": LINEARS}),
    "chunked-dora": ("chunked", {"target_modules": LINEARS, "use_dora": True}),
    "chunked-third-of-four": ("chunked", {"target_modules": ["k_proj"]}),
    "experts-transposed": ("experts-transposed", {"target_modules": LANGUAGE, "target_parameters": FUSED}),
    "experts-square": ("experts-square", {"target_modules": LANGUAGE, "target_parameters": FUSED}),
    "experts-fused": ("experts-fused", {"target_modules": ["q_proj"], "target_parameters": FUSED}),
    "concatenated": (
        "concatenated",
        {"target_modules": r".*language_model.*\.(q_proj|gate_up_proj)", "target_parameters": FUSED},
    ),
    "concatenated-whole": (
        "concatenated",
        {"target_modules": ["o_proj"], "modules_to_save": ["shared_experts"]},
    ),
    "experts-whole": ("concatenated", {"target_modules": ["o_proj"], "modules_to_save": ["experts"]}),
    "renamed": ("renamed-tied", {"target_modules": LANGUAGE}),
    "renamed-head-untied": ("renamed-tied", {"target_modules": ["lm_head", "o_proj"]}),
    "renamed-embedding-whole": (
        "renamed-tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "exclude_modules": ".*vision.*"},
    ),
}


def store_otherwise(base: Path, name: str) -> None:
    """Store a base's experts as its publisher does and save_pretrained does not."""
    if name == "experts-transposed":
        edit_tensors(base, lambda key, value: value.mT if ".experts." in key else value)
    if name == "experts-fused":
        model = load(base, torch.bfloat16)
        tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def layout_bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layouts")
    bases = {name: save_base(root / name, config) for name, config in LAYOUT_BASES.items()}
    for name, base in bases.items():
        store_otherwise(base, name)
    return bases


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str, layout_bases: dict[str, Path], tmp_path: Path) -> None:
    name, lora = LAYOUTS[layout]
    base = layout_bases[name]
    before = {key: value.shape for key, value in all_tensors(base).items()}
    check_merge(base, train_adapter(base, tmp_path / "adapter", **lora), tmp_path / "out")
    after = {key: value.shape for key, value in all_tensors(tmp_path / "out").items()}
    assert before.items() <= after.items()


def test_the_writer_of_a_square_stack_says_how_it_is_stored(
    layout_bases: dict[str, Path], tmp_path: Path, golden: Golden
) -> None:
    """transformers 4 stored [in, out], and 5 stores [out, in] and turns what has another shape, which no square has."""
    new = layout_bases["experts-square"]
    adapter = train_adapter(new, tmp_path / "adapter", target_modules=LANGUAGE, target_parameters=FUSED)
    old = shutil.copytree(new, tmp_path / "old")
    edit_tensors(Path(old), lambda name, tensor: tensor.mT if ".experts." in name else tensor)
    edit_config(Path(old), transformers_version="4.57.6")
    for base in (new, old):
        merge_adapter(adapter, tmp_path / f"{base.name}-out", base=base, progress=False)
    expected, actual = (all_tensors(tmp_path / f"{base.name}-out") for base in (new, old))
    stacks = {name: tensor.shape for name, tensor in all_tensors(new).items() if tensor.ndim == 3}
    assert any("gate_up_proj" in name and rows == columns for name, (_, rows, columns) in stacks.items())
    for key, value in expected.items():
        assert torch.equal(actual[key], value.mT if ".experts." in key else value), key
    edit_config(Path(old), transformers_version=None)
    with golden.raises("merge", message="gate_up_proj, which is square", fix="transformers_version"):
        merge_adapter(adapter, tmp_path / "refused", base=old, progress=False)
    dense = train_adapter(new, tmp_path / "dense", target_modules=LANGUAGE)
    merge_adapter(dense, tmp_path / "dense-out", base=old, progress=False)


def test_refuses_a_module_trained_whole_that_is_stored_with_others(
    layout_bases: dict[str, Path], tmp_path: Path, golden: Golden
) -> None:
    adapter = train_adapter(
        layout_bases["chunked"], tmp_path / "adapter", target_modules=["o_proj"], modules_to_save=["q_proj"]
    )
    with golden.raises("merge", message="gqkv_proj"):
        merge_adapter(adapter, tmp_path / "out", base=layout_bases["chunked"], progress=False)


@pytest.mark.parametrize("root", ["language_model.model.", "model."])
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"modules_to_save": ["embed_tokens", "input_layernorm"]},
        {"trainable_token_indices": [3, 250]},
        {"target_modules": ["embed_tokens"]},
    ],
)
def test_an_adapter_with_the_names_of_an_older_transformers_merges_alike(
    lora: dict[str, Any], root: str, layout_bases: dict[str, Path], tmp_path: Path
) -> None:
    """Modules are named as the checkpoint still names them, or as a class for text alone does."""
    base = layout_bases["renamed-tied"]
    adapter = train_adapter(base, tmp_path / "adapter", **{"target_modules": LANGUAGE} | lora)
    merge_adapter(adapter, tmp_path / "expected", base=base, progress=False)
    factors = load_file(adapter / "adapter_model.safetensors")
    names = ("base_model.model.model.language_model.", f"base_model.model.{root}")
    older = {key.replace(*names): value for key, value in factors.items()}
    assert older.keys() != factors.keys()
    save_file(older, adapter / "adapter_model.safetensors")
    merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    for path in (tmp_path / "expected").glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_norm_of_a_text_class_is_no_norm_of_a_tower(layout_bases: dict[str, Path], tmp_path: Path) -> None:
    """PEFT saves every module whose name ends with one of modules_to_save, which are more in the multimodal class."""
    base, lora = layout_bases["renamed-tied"], {"target_modules": LANGUAGE, "modules_to_save": ["language_model.norm"]}
    adapter = train_adapter(base, tmp_path / "adapter", **lora)
    merge_adapter(adapter, tmp_path / "expected", base=base, progress=False)
    factors = load_file(adapter / "adapter_model.safetensors")
    renamed = {key.replace("model.language_model.", "model."): factors[key] for key in factors}
    save_file(renamed, adapter / "adapter_model.safetensors")
    edit_config(adapter, modules_to_save=["norm"])
    merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    for path in (tmp_path / "expected").glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_refuses_a_layer_under_the_names_of_two_versions(layout_bases: dict[str, Path], tmp_path: Path) -> None:
    base = layout_bases["renamed-tied"]
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=LANGUAGE)
    factors = load_file(adapter / "adapter_model.safetensors")
    names = ("base_model.model.model.language_model.", "base_model.model.language_model.model.")
    save_file(
        factors | {key.replace(*names): 2 * factors[key] for key in factors}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(UsageError, match=r"it holds model\.language_model\..* twice, under"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
