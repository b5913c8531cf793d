"""The logit check on every kind of adapter: right merges pass, and each kind's own wrong merge does not.

The merges are PEFT's, in float32 and rounded once, so that nothing of cogumi's merge is involved.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import FUSED, INPUT_IDS, LINEARS, check_logits, edit_config, edit_tensors, load
from builders import all_tensors as tensors_of
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cogumi.merge import logits
from cogumi.merge.logits import LogitCheck, NotCompared, check_directory, prompt_tokens, tokenizer_of, trained_tokens

SIZES = builders.SIZES | {"head_dim": 16}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
BASES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3moe": Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False),
    "gptoss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": LINEARS}),
    "rslora": ("llama", {"target_modules": LINEARS, "use_rslora": True}),
    "dora": ("llama", {"target_modules": LINEARS, "use_dora": True}),
    "lora_bias": ("qwen2", {"target_modules": ["q_proj", "k_proj", "v_proj"], "lora_bias": True}),
    "bias_all": ("qwen2", {"target_modules": ["q_proj", "down_proj"], "bias": "all"}),
    "modules_to_save": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    ),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 200]}),
    "tokens_tied": ("tied", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 200]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding_tied": ("tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "head": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "head_tied": ("tied", {"target_modules": ["lm_head", "q_proj"]}),
    "qwen3moe": ("qwen3moe", {"target_modules": ["q_proj"], "target_parameters": FUSED}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": FUSED}),
    "gptoss": ("gptoss", {"target_modules": ["q_proj"], "target_parameters": FUSED}),
}
# The loosest bound is that of bfloat16; what fails there fails in the others.
RUNNING = [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.sweep) for each in (torch.float32, torch.float16))]
# One of each way a tensor can change; the others are those again on another family, or with tied embeddings.
QUICK = {"lora", "dora", "bias_all", "modules_to_save", "tokens_tied", "mixtral"}


def make_base(path: Path, model: Any) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero by default, as no trained model's are
                torch.nn.init.normal_(parameter, std=0.05)
            if name.endswith(("gate.weight", "router.weight")):  # a router that has made up its mind
                torch.nn.init.normal_(parameter, std=0.2)
    model.bfloat16().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("bases")

    def get(name: str) -> Path:
        torch.manual_seed(0)
        return (
            folder / name
            if (folder / name).exists()
            else make_base(folder / name, AutoModelForCausalLM.from_config(BASES[name]))
        )

    return get


def make_adapter(base: Path, path: Path, arguments: dict[str, Any], size: float = 0.05, seed: int = 1) -> Path:
    """A real adapter, saved by PEFT, in which everything that training would change has changed."""
    adapted = get_peft_model(load(base), LoraConfig(**({"r": 8, "lora_alpha": 16} | arguments)))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and not any(part in name for part in ("lora_A", "lora_embedding_B")):
                scale = 0.5 if "lora_magnitude" in name else 1.0  # a norm of the order of 0.2, of rows of 64 elements
                parameter.add_(torch.randn_like(parameter) * size * scale)
    adapted.save_pretrained(str(path))
    return path


def load_live(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    return PeftModel.from_pretrained(load(base, dtype), adapter).eval()


def peft_merge(base: Path, adapter: Path, out: Path, tied: bool = False) -> Path:
    """What a right merge writes: a tied head is untied first, as a delta on one of the two is not one on the other."""
    model = load(base)
    if model.config.tie_word_embeddings and not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    PeftModel.from_pretrained(model, adapter).merge_and_unload().bfloat16().save_pretrained(out)
    return out


def edited(source: Path, out: Path, edit: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Path:
    return edit_tensors(Path(shutil.copytree(source, out)), edit)


def check_one(adapter: Path, merged: Path, base: Path, **options: Any) -> LogitCheck:
    return check_directory([(adapter, 1.0)], merged, base, **options)


@pytest.mark.parametrize("running", RUNNING, ids=str)
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.sweep) for kind in KINDS]
)
def test_right_merges_pass_and_a_scaling_off_by_a_twentieth_does_not(
    kind: str, running: torch.dtype, bases: Callable[[str], Path], tmp_path: Path
) -> None:
    family, arguments = KINDS[kind]
    base = bases(family)
    # An embedding's update that outweighs the embedding would lose its scale in the first norm.
    adapter = make_adapter(base, tmp_path / "adapter", arguments, size=0.005 if "embedding" in kind else 0.05)
    merged = load(peft_merge(base, adapter, tmp_path / "merged", tied=kind == "tokens_tied"), running)
    live, before = load_live(base, adapter, running), load(base)
    check = check_logits(live, merged, INPUT_IDS, torch.bfloat16)
    assert check.passed, check
    assert check.measured < 0.7 * check.bound
    assert check.base_distance > (3 if running == torch.float32 else 2) * check.bound
    originals = dict(before.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            weight = originals[name].float()
            parameter.copy_(weight + 1.05 * (parameter.float() - weight))
    findings = check_logits(live, merged, INPUT_IDS, torch.bfloat16)
    assert not findings.passed, findings
    assert "DIFFER" in str(findings)


def base_biases(base: Path, merged: Path, out: Path) -> Path:
    before = tensors_of(base)
    return edited(merged, out, lambda name, tensor: before[name] if name.endswith("bias") else tensor)


def plain(adapter: Path, **changes: Any) -> Path:
    """The adapter as something that reads only its low-rank factors sees it."""
    edit_config(adapter, **changes)
    return edited(adapter, adapter.with_name("plain"), lambda name, tensor: None if "magnitude" in name else tensor)


def swap_rows(tensor: torch.Tensor, one: int, other: int) -> torch.Tensor:
    swapped = tensor.clone()
    swapped[[one, other]] = tensor[[other, one]]
    return swapped


def base_expert(base: Path, merged: Path, out: Path, names: tuple[str, ...], expert: int | None) -> Path:
    before = tensors_of(base)

    def edit(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.endswith(names):
            return tensor
        if expert is None:
            return before[name]
        forgotten = tensor.clone()
        forgotten[expert] = before[name][expert]
        return forgotten

    return edited(merged, out, edit)


# The classic mistake of each kind: (base, adapter, right merge, out) -> wrong merge.
MISTAKES: dict[str, Callable[[Path, Path, Path, Path], Path]] = {
    "rslora": lambda base, adapter, merged, out: peft_merge(base, plain(adapter, use_rslora=False), out),
    "dora": lambda base, adapter, merged, out: peft_merge(base, plain(adapter, use_dora=False), out),
    "lora_bias": lambda base, adapter, merged, out: base_biases(base, merged, out),
    "bias_all": lambda base, adapter, merged, out: base_biases(base, merged, out),
    "modules_to_save": lambda base, adapter, merged, out: edited(
        merged, out, lambda name, tensor: tensors_of(base)[name] if name == "model.norm.weight" else tensor
    ),
    "tokens": lambda base, adapter, merged, out: edited(
        merged, out, lambda name, tensor: swap_rows(tensor, 5, 200) if "embed_tokens" in name else tensor
    ),
    "tokens_tied": lambda base, adapter, merged, out: edited(
        merged, out, lambda name, tensor: tensors_of(base)[name] if "embed_tokens" in name else tensor
    ),
    "embedding_tied": lambda base, adapter, merged, out: peft_merge(base, adapter, out, tied=True),
    "head_tied": lambda base, adapter, merged, out: peft_merge(base, adapter, out, tied=True),
    "qwen3moe": lambda base, adapter, merged, out: base_expert(
        base, merged, out, ("experts.3.down_proj.weight",), None
    ),
    "mixtral": lambda base, adapter, merged, out: base_expert(base, merged, out, ("experts.3.w2.weight",), None),
    "gptoss": lambda base, adapter, merged, out: base_expert(base, merged, out, ("experts.down_proj",), 3),
}


@pytest.mark.parametrize("running", RUNNING, ids=str)
@pytest.mark.parametrize("kind", MISTAKES)
def test_the_usual_mistake_of_each_kind_fails(
    kind: str, running: torch.dtype, bases: Callable[[str], Path], tmp_path: Path
) -> None:
    family, arguments = KINDS[kind]
    base = bases(family)
    adapter = make_adapter(base, tmp_path / "adapter", arguments)
    live = load_live(base, adapter, running)
    merged = peft_merge(base, adapter, tmp_path / "merged", tied=kind == "tokens_tied")
    wrong = MISTAKES[kind](base, adapter, merged, tmp_path / "wrong")
    check = check_logits(live, load(wrong, running), INPUT_IDS, torch.bfloat16)
    assert not check.passed, check


def test_figures_against_closed_forms(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama")
    adapter = make_adapter(base, tmp_path / "adapter", {"target_modules": LINEARS})
    peft_merge(base, adapter, tmp_path / "merged")
    live, merged = load_live(base, adapter), load(tmp_path / "merged")
    check = check_logits(live, merged, INPUT_IDS, torch.bfloat16)
    with torch.no_grad():
        ours, plain, theirs = (model(INPUT_IDS).logits.double() for model in (live, load(base), merged))
    for other, distance in ((theirs, check.measured), (plain, check.live_distance)):
        assert distance == pytest.approx((ours - other).square().mean().sqrt().item(), rel=1e-6)
    assert check.base_distance == pytest.approx((theirs - plain).square().mean().sqrt().item(), rel=1e-6)
    assert check.bound == pytest.approx(1e-2 * 2**0.5 * ours.var(-1, correction=0).mean().sqrt().item(), rel=1e-6)
    assert check.scale_bound == pytest.approx(0.01 + (check.measured / check.live_distance) ** 2 / 2, rel=1e-6)


def test_adapters_that_do_almost_nothing(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama")
    faint = make_adapter(base, tmp_path / "faint", {"target_modules": LINEARS}, size=1e-6)
    check = check_one(faint, base, base)
    assert check.passed, check  # rounding took all of it, and there is no better merge in bfloat16
    assert check.measured > 0
    assert check.base_distance == 0  # not nearer to the adapter than to the base: a run's verdict fails on this
    assert check.scale_bound is None
    untrained = make_adapter(base, tmp_path / "untrained", {"target_modules": LINEARS}, size=0)
    check = check_one(untrained, base, base)
    assert (check.measured, check.base_distance, check.live_distance) == (0, 0, 0)
    assert check.passed


@pytest.mark.parametrize("running", [torch.float32, torch.bfloat16], ids=str)
def test_flipped_experts_pass(running: torch.dtype, tmp_path: Path) -> None:
    """Rounding tips near-ties between experts; unequal experts then move the logits far more than rounding does."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(BASES["qwen3moe"])
    with torch.no_grad():
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.mlp.gate.weight, std=0.2)
            layer.mlp.experts.down_proj.mul_(30)
    model.bfloat16().save_pretrained(tmp_path / "base")
    adapter = make_adapter(tmp_path / "base", tmp_path / "adapter", KINDS["qwen3moe"][1], size=0.02)
    merged = load(peft_merge(tmp_path / "base", adapter, tmp_path / "merged"), running)
    ids = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0))
    check = check_logits(load_live(tmp_path / "base", adapter, running), merged, ids, torch.bfloat16)
    assert check.passed, check
    assert check.measured > check.bound / 4


def test_check_leaves_models_alone_and_repeats(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama")
    adapter = make_adapter(base, tmp_path / "adapter", {"target_modules": LINEARS})
    live, merged = load_live(base, adapter).train(), load(peft_merge(base, adapter, tmp_path / "merged"))
    states = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in (live, merged)]
    check = check_logits(live, merged, INPUT_IDS, torch.bfloat16)
    assert check.passed, check
    assert check == check_logits(live, merged, INPUT_IDS, torch.bfloat16)
    assert live.training
    for model, state in zip((live, merged), states, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert all(tensor.dtype == state[name].dtype for name, tensor in model.state_dict().items())
    original = load(base)
    weight = "model.layers.1.self_attn.v_proj.weight"
    merged.get_parameter(weight).data.copy_(original.get_parameter(weight).data)  # one update forgotten
    assert not check_logits(live, merged, INPUT_IDS, torch.bfloat16).passed
    other = AutoModelForCausalLM.from_config(BASES["mixtral"])
    assert not check_logits(live, other, INPUT_IDS).passed


def test_modules_in_float32_between_16_bit_ones(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama")
    adapter = make_adapter(base, tmp_path / "adapter", KINDS["modules_to_save"][1])
    live = load_live(base, adapter, torch.bfloat16)
    live.get_base_model().lm_head.float()
    merged = load(peft_merge(base, adapter, tmp_path / "merged"), torch.bfloat16)
    assert check_logits(live, merged, INPUT_IDS).passed


def test_trls_patched_forward_is_not_run_and_stays(bases: Callable[[str], Path], tmp_path: Path) -> None:
    """TRL's trainers leave a `forward` on the live model's instance that gives no logits."""
    from trl.trainer.utils import add_fused_lm_head

    base = bases("llama")
    adapter = make_adapter(base, tmp_path / "adapter", {"target_modules": LINEARS})
    live, merged = load_live(base, adapter), load(peft_merge(base, adapter, tmp_path / "merged"), torch.bfloat16)
    plain = check_logits(live, merged, INPUT_IDS)
    add_fused_lm_head(live.get_base_model())
    patched = vars(live.get_base_model())["forward"]
    assert check_logits(live, merged, INPUT_IDS) == plain
    assert vars(live.get_base_model())["forward"] is patched


def test_the_scale_may_lack_what_storing_took_and_no_more(bases: Callable[[str], Path], tmp_path: Path) -> None:
    """Of an update so small that a thirtieth of it is within the rounding of stored weights."""
    base = bases("llama")
    adapter = make_adapter(base, tmp_path / "adapter", {"target_modules": LINEARS, "lora_alpha": 6})
    merged = peft_merge(base, adapter, tmp_path / "whole")
    before = tensors_of(base)
    edited(merged, tmp_path / "merged", lambda name, tensor: before[name].lerp(tensor, 0.97))
    assert not check_one(adapter, tmp_path / "merged", base).passed
    assert not check_one(adapter, tmp_path / "merged", base, retained=1.0).passed
    assert check_one(adapter, tmp_path / "merged", base, retained=0.97).passed


def test_a_directory_is_compared_in_float32_where_memory_has_room(
    bases: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update 3 % too large is within the rounding of operations in bfloat16, in which two equal merges differ as much."""
    base = bases("llama")
    adapter = make_adapter(base, tmp_path / "adapter", {"target_modules": LINEARS, "lora_alpha": 6})
    merged = peft_merge(base, adapter, tmp_path / "merged")
    before = tensors_of(base)
    edited(merged, tmp_path / "wrong", lambda name, tensor: before[name].lerp(tensor, 1.03))
    exact = check_one(adapter, merged, base)
    assert exact.passed
    assert exact.measured < exact.bound / 2
    assert not check_one(adapter, tmp_path / "wrong", base).passed
    numbers = logits.measure_directory(merged)[0] + 3 * 2 * logits.PROMPT_TOKENS * load(merged).config.vocab_size
    monkeypatch.setattr(
        logits, "free_memory", lambda device: logits.WORKING_BYTES + 3 * numbers
    )  # of two bytes, not of four
    rounded = check_one(adapter, merged, base)
    assert rounded.passed
    assert rounded.measured > 2 * exact.measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_directories_in_another_dtype(dtype: torch.dtype, bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama")
    adapter = make_adapter(base, tmp_path / "adapter", {"target_modules": LINEARS})
    PeftModel.from_pretrained(load(base), adapter).merge_and_unload().to(dtype).save_pretrained(tmp_path / "merged")
    check = check_one(adapter, tmp_path / "merged", base)
    assert check.passed, check
    assert check.base_distance > 100 * check.bound


def test_several_adapters_with_weights(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama")
    one = make_adapter(base, tmp_path / "one", {"target_modules": LINEARS})
    two = make_adapter(base, tmp_path / "two", {"target_modules": LINEARS, "r": 4, "use_rslora": True}, seed=2)
    layers = {
        (share, f"{name}.weight"): module
        for share, path in ((0.7, one), (-0.4, two))
        for name, module in load_live(base, path).get_base_model().named_modules()
        if isinstance(module, LoraLayer)
    }

    def total(name: str, tensor: torch.Tensor) -> torch.Tensor:
        weight = tensor.double()
        for (share, target), layer in layers.items():
            if target == name:
                weight = weight + share * layer.get_delta_weight("default").detach().double()
        return weight.bfloat16()

    merged = edited(base, tmp_path / "merged", total)
    check = check_directory([(one, 0.7), (two, -0.4)], merged, base)
    assert check.passed, check
    wrong = check_directory([(one, 0.7), (two, 0.4)], merged, base)
    assert not wrong.passed, wrong


def test_vocabulary_that_the_adapter_grew(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama")
    model = load(base)
    model.resize_token_embeddings(260, mean_resizing=False)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    adapted.merge_and_unload().bfloat16().save_pretrained(tmp_path / "merged")
    ids = torch.cat([INPUT_IDS, torch.tensor([[256, 257], [258, 259]])], dim=1)
    check = check_one(tmp_path / "adapter", tmp_path / "merged", base, input_ids=ids)
    assert check.passed, check
    wrong = edited(tmp_path / "merged", tmp_path / "wrong", lambda n, t: swap_rows(t, 256, 259) if "embed" in n else t)
    assert not check_one(tmp_path / "adapter", wrong, base, input_ids=ids).passed


def test_prompt(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama")
    adapter = make_adapter(
        base, tmp_path / "adapter", {"target_modules": ["q_proj"], "trainable_token_indices": [200, 5, 9]}
    )
    config = load(base).config
    random = prompt_tokens(None, config, trained_tokens([adapter]))
    assert random.shape == (2, 128)
    assert random[0, :2].tolist() == [5, 200]
    assert random[1, 0].item() == 9
    assert torch.equal(random, prompt_tokens(None, config, [5, 9, 200]))
    shutil.copytree(base, tmp_path / "merged")
    letters = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path / "merged")
    text = "".join(map(chr, prompt_tokens(tokenizer_of(tmp_path / "merged"), config, []).flatten().tolist()))
    assert text.startswith('"""Compare the logits of a merged')


def test_too_little_memory_is_said_before_loading(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama")
    adapter = make_adapter(base, tmp_path / "adapter", {"target_modules": ["q_proj"]})
    # A tensor of 2 TB, in a file of holes: as much memory in its own dtype.
    huge = shutil.copytree(base, tmp_path / "huge")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [10**6, 10**6], "data_offsets": [0, 2 * 10**12]}}).encode()
    with (huge / "model-2.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * 10**12)
    with pytest.raises(NotCompared, match=r"^1863\.\d GiB needed, \d+\.\d GiB free on cpu"):
        check_one(adapter, huge, base)
