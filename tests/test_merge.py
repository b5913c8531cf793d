"""The merge against PEFT's own in float32; what it writes, what it refuses, and what it finds wrong on the disk."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import builders
import pytest
import torch
from blake3 import blake3
from builders import LINEARS, SIZES, edit_config, edit_tensors, load
from builders import all_tensors as tensors_of
from golden import Golden
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import Span
from cogumi.merge import MergeError, check_merged, merge_adapter, stream
from cogumi.merge.plan import RowRange

LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": LINEARS}


def llama(path: Path, **changes: Any) -> Path:
    config = LlamaConfig(**SIZES | {"tie_word_embeddings": False} | changes)
    return builders.save_base(path, config, max_shard_size="60KB")


@pytest.fixture(scope="module")
def llama_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = llama(tmp_path_factory.mktemp("bases") / "llama")
    for name in ("LICENSE", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (base / name).write_text("{}")
    return base


@pytest.fixture(scope="module")
def qwen_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)
    return builders.save_base(tmp_path_factory.mktemp("bases") / "qwen3", config, max_shard_size="60KB")


def make_adapter(base: Path, path: Path, **lora: Any) -> Path:
    return builders.train_adapter(base, path, **LORA | lora)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.int16), right.view(torch.int16))


def nothing_left(out: Path) -> bool:
    return not list(out.parent.glob(f"{out.name}*"))


PATTERNS = {
    "rank_pattern": {"q_proj": 4, "layers.1.mlp.down_proj": 12},
    "alpha_pattern": {"k_proj": 3, r"layers\.0\.mlp\.up_proj": 40},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-rslora": ("llama", {"use_rslora": True}),
    "llama-patterns": ("llama", PATTERNS),
    "qwen3-gaussian-all-linear": ("qwen", {"target_modules": "all-linear", "init_lora_weights": "gaussian"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_merge_is_pefts_and_reports_its_own_update(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    family, lora = CASES[case]
    base: Path = request.getfixturevalue(f"{family}_base")
    adapter = make_adapter(base, tmp_path / "adapter", **lora)
    out = tmp_path / "merged"
    report = merge_adapter(adapter, out, progress=False)  # the base is the one that the adapter records

    before, after, live = tensors_of(base), tensors_of(out), PeftModel.from_pretrained(load(base), str(adapter))
    deltas = {
        f"{name}.weight": layer.get_delta_weight("default").detach().double()
        for name, layer in live.get_base_model().named_modules()
        if isinstance(layer, LoraLayer)
    }
    assert report.tensors_merged == len(deltas) > 0
    assert report.tensors_copied == len(before) - len(deltas)
    assert before.keys() == after.keys()
    assert report.max_delta == pytest.approx(max(delta.abs().max().item() for delta in deltas.values()), rel=1e-5)
    ratios = [delta.norm() / before[name].double().norm() for name, delta in deltas.items()]
    assert report.max_delta_ratio == pytest.approx(max(ratios).item(), rel=1e-5)
    # PEFT's merge in float32, rounded here: at most a rounding tie apart. Every other tensor is the base's, to the bit.
    theirs = live.merge_and_unload().state_dict()
    for name, weight in before.items():
        assert same_bits(weight, after[name]) == (name not in deltas), name
        apart = (theirs[name].bfloat16().double() - after[name].double()).abs()
        assert (apart <= 2**-7 * after[name].double().abs() + 1e-6).all(), name  # where W and the update cancel
        assert (apart > 0).float().mean() < 0.001, name


def test_output_is_a_complete_directory(llama_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    for name, text in {"tokenizer.json": '{"of": "adapter"}', "chat_template.jinja": "adapter template"}.items():
        (adapter / name).write_text(text)
    (adapter / "tokenizer_config.json").write_text("{}")
    out = tmp_path / "merged"
    report = merge_adapter(adapter, out, base=llama_base, progress=False)

    shards = sorted(path.name for path in llama_base.glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(path.name for path in out.glob("*.safetensors")) == shards
    assert (out / "tokenizer.json").read_text() == '{"of": "adapter"}'
    assert (out / "chat_template.jinja").read_text() == "adapter template"
    for name in ("config.json", "generation_config.json", "LICENSE"):
        assert (out / name).read_bytes() == (llama_base / name).read_bytes()
    builders.check_loads(out)

    manifest = builders.manifest_of(out)
    for shard in shards:
        data = (out / shard).read_bytes()
        assert manifest["shards"][shard] == {"bytes": len(data), "blake3": blake3(data).hexdigest()}
    weights = blake3((adapter / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert manifest["adapters"][0]["blake3"]["adapter_model.safetensors"] == weights
    assert manifest["adapters"][0]["weight"] == 1
    hashes = {
        path.name: blake3(path.read_bytes()).hexdigest()
        for path in [llama_base / "config.json", *llama_base.glob("*.safetensors")]
    }
    assert manifest["base"].items() >= {"name": str(llama_base), "commit": None, "blake3": hashes}.items()
    for name, digest in manifest["files"].items():
        assert blake3((out / name).read_bytes()).hexdigest() == digest
    assert len(manifest["tensors"]) == report.tensors_merged == 14
    for entry in manifest["tensors"].values():
        assert entry["elements"] in (64 * 64, 32 * 64, 64 * 96)
        assert entry["delta_retained"] == pytest.approx(1, abs=0.01)
        assert 0 < entry["delta_over_weight"] <= report.max_delta_ratio
    assert report.delta_retained == pytest.approx(1, abs=0.01)
    assert str(out) in str(report)
    assert f"{report.elements:,} computed elements read back and checked" in str(report)
    assert sum(path.stat().st_size for path in out.glob("*.safetensors")) == report.bytes


@pytest.mark.parametrize(("dtype", "kind"), [("float32", torch.float32), ("float16", torch.float16)])
def test_another_dtype(dtype: str, kind: torch.dtype, llama_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    out = tmp_path / "merged"
    merge_adapter(adapter, out, dtype=dtype, progress=False)
    before, after = tensors_of(llama_base), tensors_of(out)
    assert {tensor.dtype for tensor in after.values()} == {kind}
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"].to(kind))
    builders.check_loads(out)
    difference, effect = builders.distances(llama_base, adapter, out)
    assert difference < 1e-3 < effect


def test_matmul_precision_of_the_process_does_not_matter(llama_base: Path, tmp_path: Path) -> None:
    """On a CPU with bfloat16 instructions "medium" makes float32 products wrong by 1 %; elsewhere it does nothing."""
    adapter = make_adapter(llama_base, tmp_path / "adapter", r=64)
    merge_adapter(adapter, tmp_path / "one", progress=False)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        merge_adapter(adapter, tmp_path / "two", progress=False)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    for shard in (tmp_path / "one").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "two" / shard.name).read_bytes()


def test_one_layer_without_training_still_merges(
    llama_base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = edit_tensors(
        make_adapter(llama_base, tmp_path / "adapter"),
        lambda name, tensor: tensor * ("layers.0.self_attn.q_proj" not in name),
    )
    report = merge_adapter(adapter, tmp_path / "merged", progress=False)
    assert report.tensors_merged == 14
    assert "1 of 14 updates are zero" in caplog.text
    name = "model.layers.0.self_attn.q_proj.weight"
    assert same_bits(tensors_of(tmp_path / "merged")[name], tensors_of(llama_base)[name])


def test_refuses_embeddings_of_another_base(llama_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    modules = ("model.embed_tokens", "lm_head")
    builders.add_tensors(adapter, {f"base_model.model.{name}.weight": torch.zeros(260, 64) for name in modules})
    with pytest.raises(UsageError, match=r"\.weight is not that of base"):
        merge_adapter(adapter, tmp_path / "merged", progress=False)
    norm = {"base_model.model.model.norm.weight": torch.full([64], 2.0)}
    adapter = builders.add_tensors(make_adapter(llama_base, tmp_path / "norm"), norm)
    with pytest.raises(UsageError, match=r"norm\.weight is not that of base"):
        merge_adapter(adapter, tmp_path / "merged", progress=False)


def spoiled(value: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def spoil(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "layers.1.mlp.up_proj.lora_A" in name:
            tensor[3, 5] = value
        return tensor

    return spoil


# An adapter's configuration, a change of it or of its tensors, and a word of the refusal. PEFT stores a head's base weight
# with its factors, and loads it over the base's: it has to be the same one.
HEAD = {"target_modules": ["q_proj", "lm_head"]}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any] | Callable[[str, torch.Tensor], torch.Tensor | None], str]] = {
    # Made for real, the first three need data or scipy; the config's word for them is what the refusal reads.
    **{
        name: ({}, {"init_lora_weights": name}, f"init_lora_weights='{name}'") for name in ("corda", "loftq", "lora_ga")
    },
    "unknown entry": ({}, {"use_fancy_lora": True}, "use_fancy_lora=True"),
    "another rank": ({}, {"r": 4}, "need (4, "),
    "another head": (HEAD, lambda name, t: t * (1.01 if "base_layer" in name else 1), "lm_head.base_layer.weight"),
    "untrained": ({}, lambda name, t: t * ("lora_A" in name), "changes nothing"),
    "half a pair": ({}, lambda name, t: None if "1.mlp.up_proj.lora_B" in name else t, "up_proj.lora_A.weight"),
    **{str(number): ({}, spoiled(number), "1.mlp.up_proj.lora_A") for number in (math.nan, math.inf, -math.inf)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_an_adapter(case: str, llama_base: Path, tmp_path: Path) -> None:
    lora, change, text = REFUSED[case]
    adapter = make_adapter(llama_base, tmp_path / "adapter", **lora)
    if isinstance(change, dict):
        edit_config(adapter, **change)
    else:
        edit_tensors(adapter, change)
    with pytest.raises(UsageError, match=re.escape(text)):
        merge_adapter(adapter, tmp_path / "merged", progress=False)


def test_refuses_a_wrong_base(llama_base: Path, tmp_path: Path, golden: Golden) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    for name, changes, tensor in (
        ("wide", {"hidden_size": 128}, "base_model.model."),
        ("shallow", {"num_hidden_layers": 1}, "layers.1."),
        ("deep", {"num_hidden_layers": 3}, "layers.2."),
    ):
        with golden.raises("merge", message=tensor):
            merge_adapter(adapter, tmp_path / "merged", base=llama(tmp_path / name, **changes), progress=False)
    gpt2 = builders.save_base(tmp_path / "gpt2", GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256))
    with pytest.raises(UsageError, match="does not fit base"):
        merge_adapter(adapter, tmp_path / "merged", base=gpt2, progress=False)


def test_refuses_what_is_not_there(llama_base: Path, tmp_path: Path, golden: Golden) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    out = tmp_path / "merged"
    for source, options, message, fix in (
        (tmp_path / "nowhere", {}, str(tmp_path / "nowhere"), ""),
        (llama_base, {}, "adapter_config.json", ""),
        (adapter, {"base": "nobody/nothing", "base_revision": "abc"}, "", "hf download nobody/nothing --revision abc"),
        (adapter, {"base": "no/such/directory"}, "no/such/directory", ""),
        (adapter, {"base": llama_base, "base_revision": "main"}, str(llama_base), ""),
        (adapter, {"dtype": "bf16"}, "dtype='bf16'", ""),
        (adapter, {"verify": "all"}, "verify='all'", ""),
    ):
        with golden.raises("merge", message=message, fix=fix):
            merge_adapter(source, out, **options, progress=False)
    broken = tmp_path / "broken"
    shutil.copytree(llama_base, broken)
    (broken / "config.json").rename(tmp_path / "config.json")
    with golden.raises("merge", message="has no config.json", fix="base="):
        merge_adapter(adapter, out, base=broken, progress=False)
    (tmp_path / "config.json").rename(broken / "config.json")
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with golden.raises("merge", message=shard.name):
        merge_adapter(adapter, out, base=broken, progress=False)
    shard.unlink()
    with golden.raises("merge", message=f"lacks {shard.name}"):
        merge_adapter(adapter, out, base=broken, progress=False)
    assert nothing_left(out)


def test_a_file_of_another_length_is_caught(
    llama_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    original = stream.verify_header

    def too_much(plan: Any, directory: Path) -> None:
        with (directory / plan.name).open("ab") as file:
            file.write(b"x")
        original(plan, directory)

    monkeypatch.setattr(stream, "verify_header", too_much)
    with pytest.raises(MergeError, match=r"safetensors has \d+ bytes on disk"):
        merge_adapter(adapter, tmp_path / "merged", progress=False)


def corrupt(monkeypatch: pytest.MonkeyPatch, tensor: str, harm: Callable[[BinaryIO, Span], object]) -> None:
    """Change the bytes of a tensor between writing and verifying."""
    original = stream.write_run

    def corrupting(run: RowRange, directory: Path, out: torch.Tensor) -> None:
        original(run, directory, out)
        target = run.tensor.target
        if target.name == tensor:
            with (directory / target.path).open("r+b") as file:
                harm(file, target)

    monkeypatch.setattr(stream, "write_run", corrupting)


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_one_wrong_element_is_caught(
    tensor: str, llama_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flip the lowest mantissa bits of one element, touched or not."""

    def flip(file: BinaryIO, target: Span) -> None:
        file.seek(target.start + 2 * 1234)
        low = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([low ^ 2]))

    adapter = make_adapter(llama_base, tmp_path / "adapter")
    corrupt(monkeypatch, tensor, flip)
    with pytest.raises(MergeError, match=tensor):
        merge_adapter(adapter, tmp_path / "merged", progress=False)
    assert nothing_left(tmp_path / "merged")


def test_infinity_in_one_block_and_a_wrong_element_in_another(
    llama_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """Every element of the one is looked at, a few of the other."""

    def spoil_ends(file: BinaryIO, target: Span) -> None:
        file.seek(target.start)
        file.write(b"\x00\x41")  # 8
        file.seek(target.end - 2)
        file.write(b"\x80\x7f")  # infinity

    monkeypatch.setattr("cogumi.merge.arithmetic.BLOCK_ELEMENTS", 1024)
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    corrupt(monkeypatch, "model.layers.0.self_attn.q_proj.weight", spoil_ends)
    with golden.raises("merge", MergeError, message="element (0, 0) is 8"):
        merge_adapter(adapter, tmp_path / "merged", progress=False)


# Tensor and element, its value, the base's dtype and the output's. Infinity is the nearest bfloat16 to the largest float32
# numbers, and still not what was trained; 1e5 fits bfloat16, not float16.
OVERFLOWS = [
    ("model.norm.weight", (3,), torch.finfo(torch.float32).max, torch.float32, "bfloat16"),
    ("model.layers.0.self_attn.q_proj.weight", (0, 0), 1e5, torch.bfloat16, "float16"),
]


@pytest.mark.parametrize(("tensor", "element", "value", "stored", "dtype"), OVERFLOWS, ids=["bfloat16", "float16"])
def test_an_overflow_is_caught(
    tensor: str,
    element: tuple[int, ...],
    value: float,
    stored: torch.dtype,
    dtype: str,
    tmp_path: Path,
    golden: Golden,
) -> None:
    def spoil(name: str, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.to(stored)
        if name == tensor:
            weight[element] = value
        return weight

    base = edit_tensors(llama(tmp_path / "base"), spoil)
    adapter = make_adapter(base, tmp_path / "adapter")
    with golden.raises("merge", MergeError, message=f"{tensor}: element {(*element, 0)[:2]} becomes"):
        merge_adapter(adapter, tmp_path / "merged", dtype=dtype, progress=False)
    assert nothing_left(tmp_path / "merged")


# ------------------------------------------------------------------------------------------------ updates that rounding takes


def small_adapter(base: Path, path: Path, size: float) -> Path:
    """An adapter whose update is this many times that of `make_adapter`."""
    return edit_tensors(make_adapter(base, path), lambda name, tensor: tensor * size if "lora_B" in name else tensor)


def kept_by_hand(base: Path, adapter: Path) -> float:
    """<round(W + BA) - W, BA> / <BA, BA> over all elements, in float64."""
    before, exact = tensors_of(base), builders.closed_form(base, adapter)
    deltas = {name: exact[name].double() - before[name].double() for name in exact}
    # bfloat16 has eight significant bits; torch's own conversion of float64 rounds twice.
    spacing = {name: torch.ldexp(torch.ones(()).double(), torch.frexp(exact[name]).exponent - 8) for name in exact}
    rounded = {name: torch.round(exact[name] / spacing[name]) * spacing[name] for name in exact}
    moved = {name: rounded[name] - before[name].double() for name in exact}
    along = sum((moved[name] * deltas[name]).sum().item() for name in exact)
    return along / sum(delta.square().sum().item() for delta in deltas.values())


@pytest.mark.parametrize(("size", "written"), [(1.0, "keep"), (0.002, "float32"), (0.0005, "float32")])
def test_auto_writes_float32_where_bfloat16_loses_the_update(
    llama_base: Path, tmp_path: Path, size: float, written: str
) -> None:
    adapter = small_adapter(llama_base, tmp_path / "adapter", size)
    kept = kept_by_hand(llama_base, adapter)
    assert (kept > 0.98) is (written == "keep")
    report = merge_adapter(adapter, tmp_path / "auto", base=llama_base, dtype="auto", progress=False)
    manifest, config = builders.manifest_of(report.out), json.loads((report.out / "config.json").read_text())
    assert (report.dtype, manifest["dtype"]) == (written, written)
    assert config["dtype"] == ("bfloat16" if written == "keep" else "float32")
    note = f"bfloat16 would keep {kept:.0%} of the update, which is small"
    assert (note in str(report)) is (written == "float32")
    assert builders.manifest_of(report.out)["delta_retained"] == pytest.approx(
        kept if written == "keep" else 1, abs=1e-3
    )
    assert check_merged(report.out, progress=False).elements == report.elements
    assert [path.name for path in tmp_path.glob("auto*")] == ["auto"]

    lossy = merge_adapter(adapter, tmp_path / "base", base=llama_base, dtype="keep", progress=False)
    assert lossy.delta_retained == pytest.approx(kept, abs=1e-6)
    assert ("merge with --dtype float32 to keep all of it" in str(lossy)) is (written == "float32")


def test_a_disk_without_room_for_float32_keeps_the_dtype_of_the_base(
    llama_base: Path, tmp_path: Path, mount: Callable[..., Path]
) -> None:
    adapter = small_adapter(llama_base, tmp_path / "adapter", 0.0005)
    stored = sum(path.stat().st_size for path in llama_base.glob("*.safetensors"))
    disk = mount("tmpfs", f"size={int(stored * 1.7)}")
    report = merge_adapter(adapter, disk / "out", base=llama_base, dtype="auto", progress=False)
    assert report.dtype == "keep"
    assert "merge with --dtype float32" in str(report)
    assert report.delta_retained is not None
    assert report.delta_retained < 0.98
