"""`cogumi merge --check DIR`: what it says of a good directory and of every way in which one can have gone bad."""

import json
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from builders import EXPERTS, SIZES, save_base, train_adapter
from golden import Golden
from page_cache import is_in_memory
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from cogumi.core.durability import blake3_file, bytes_in_memory, drop_from_memory, sync_path
from cogumi.merge import CheckReport, MergeError, check_merged, merge_adapter
from cogumi.merge.merge_manifest import read_back

LLAMA = LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=False)
MIXTURE = Qwen3MoeConfig(**SIZES, head_dim=16, **EXPERTS)
Run = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Merged:
    """A merged directory and what it was made of, all in one folder of the test's own."""

    out: Path
    base: Path
    adapter: Path
    elements: int


def make_base(path: Path, config: PreTrainedConfig) -> Path:
    save_base(path, config, max_shard_size="60KB")
    (path / "tokenizer.json").write_text('{"of": "base"}\n')
    return path


def make_adapter(base: Path, path: Path, **lora: Any) -> Path:
    return train_adapter(base, path, **{"target_modules": ["q_proj", "down_proj"]} | lora)


@pytest.fixture
def merged(tmp_path: Path) -> Merged:
    base = make_base(tmp_path / "base", LLAMA)
    adapter = make_adapter(base, tmp_path / "adapter")
    report = merge_adapter(adapter, tmp_path / "merged", progress=False)
    return Merged(tmp_path / "merged", base, adapter, report.elements)


@pytest.fixture
def cli(command_line: Run) -> Run:
    """The command line in this process: exit status, standard output, standard error after its first line."""

    def run(*words: object) -> tuple[int, str, str]:
        status, out, err = command_line(*words)
        return status, out, re.sub(r"^checking \S+ \.\.\.\n", "", err)

    return run


def flip(path: Path, position: int) -> None:
    """Change one bit of the byte at `position`, from the end where it is negative."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def shard(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[1]


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "cogumi-merge.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_good_directory(merged: Merged, cli: Run) -> None:
    status, out, err = cli("merge", "--check", merged.out)
    sealed = [path for path in merged.out.iterdir() if path.name not in ("cogumi-merge.json", "README.md")]
    files = len(sealed)
    assert (status, err) == (0, "")
    assert out.startswith(f"{merged.out}: {files} files (")
    assert f"{merged.elements:,} computed elements compared with base + adapter again" in out

    status, out, _ = cli("merge", "--check", merged.out, "--json")
    size = sum(path.stat().st_size for path in sealed)
    assert status == 0
    said = json.loads(out)
    assert isinstance(said.pop("from_memory"), int | None)
    assert said == {
        "directory": str(merged.out),
        "files": files,
        "bytes": size,
        "beside": [],
        "elements": merged.elements,
        "missing": None,
    }


KINDS: dict[str, tuple[PreTrainedConfig, dict[str, Any], dict[str, Any]]] = {
    "dora": (LLAMA, {"use_dora": True}, {}),
    "float16": (LLAMA, {}, {"dtype": "float16"}),
    "experts": (MIXTURE, {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}, {}),
    "head": (LLAMA, {"target_modules": ["lm_head"]}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds(kind: str, tmp_path: Path) -> None:
    config, lora, options = KINDS[kind]
    base = make_base(tmp_path / "base", config)
    adapter = make_adapter(base, tmp_path / "adapter", **lora)
    report = merge_adapter(adapter, tmp_path / "merged", progress=False, **options)
    findings = check_merged(tmp_path / "merged", workers=2, progress=False)
    assert findings.missing is None
    assert findings.elements
    assert findings.elements == report.elements


def test_two_weighted_adapters(merged: Merged, tmp_path: Path) -> None:
    """The weights are part of what is checked."""
    other = make_adapter(merged.base, tmp_path / "other", seed=5, r=2)
    out = tmp_path / "both"
    merge_adapter([(merged.adapter, 0.5), (other, -2.0)], out, progress=False)
    assert check_merged(out, progress=False).elements == merged.elements
    edit_manifest(out, lambda manifest: manifest["adapters"][1].update(weight=-2.01))
    with pytest.raises(MergeError, match=r"model\.layers\.\d\.\S+: element .* where W"):
        check_merged(out, progress=False)


@pytest.mark.parametrize(("lora", "is_compared"), [({}, True), ({"use_dora": True}, False)])
def test_a_directory_of_the_version_before(lora: dict[str, Any], is_compared: bool, tmp_path: Path) -> None:
    """Format 3 computed DoRA in float32: its files are checked, its elements are not computed again."""
    base = make_base(tmp_path / "base", LLAMA)
    merge_adapter(make_adapter(base, tmp_path / "adapter", **lora), tmp_path / "merged", progress=False)
    edit_manifest(tmp_path / "merged", lambda manifest: manifest.update(format=3))
    report = check_merged(tmp_path / "merged", progress=False)
    assert (report.missing is None, bool(report.elements)) == (is_compared, is_compared)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard": (lambda out: flip(shard(out), -100), "{shard} has changed since the merge"),
    "shard's header": (lambda out: flip(shard(out), 12), "{shard} has changed since the merge"),
    "shard cut off": (lambda out: shard(out).write_bytes(shard(out).read_bytes()[:-1]), "{shard} has changed since"),
    "tokenizer": (lambda out: flip(out / "tokenizer.json", 4), r"{out}/tokenizer\.json has changed since"),
    "config": (lambda out: flip(out / "config.json", -5), r"{out}/config\.json has changed since"),
    "index": (lambda out: flip(out / "model.safetensors.index.json", 9), r"index\.json has changed since"),
    "missing shard": (lambda out: shard(out).unlink(), "{shard} is gone; the directory is not whole"),
    "missing tokenizer": (lambda out: (out / "tokenizer.json").unlink(), r"tokenizer\.json is gone"),
    "extra shard": (
        lambda out: shutil.copy(shard(out), out / "model-00009-of-00009.safetensors"),
        r"{out}: not written by the merge, and a loader may read it: model-00009-of-00009\.safetensors; move it ",
    ),
    "manifest cut off": (
        lambda out: (out / "cogumi-merge.json").write_text((out / "cogumi-merge.json").read_text()[:-40]),
        r"{out}/cogumi-merge\.json is damaged ",
    ),
    "manifest not text": (
        lambda out: (out / "cogumi-merge.json").write_bytes(b"\xff\xfe\x00"),
        r"{out}/cogumi-merge\.json is damaged ",
    ),
    "manifest without shards": (lambda out: edit_manifest(out, lambda m: m.pop("shards")), r"is damaged .*'shards'"),
    "manifest without base": (lambda out: edit_manifest(out, lambda m: m.update(base=None)), r"is damaged \(TypeError"),
    "manifest of adapters without path": (
        lambda out: edit_manifest(out, lambda m: m["adapters"][0].pop("path")),
        r"is damaged .*'path'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_status_1_and_one_line(damage: str, merged: Merged, cli: Run) -> None:
    harm, says = DAMAGES[damage]
    pattern = says.format(shard=shard(merged.out), out=merged.out)
    harm(merged.out)
    with pytest.raises(MergeError, match=pattern) as caught:
        check_merged(merged.out, progress=False)
    assert "\n" not in str(caught.value)
    assert cli("merge", "--check", merged.out, "--json") == (1, "", f"cogumi: {caught.value}\n")


def test_a_change_that_the_manifest_agrees_with_is_found_too(merged: Merged, cli: Run) -> None:
    """One element off and every hash renewed: base + adapter still say otherwise."""

    def renew(path: Path) -> None:
        digest = {"blake3": blake3(path.read_bytes()).hexdigest()}
        edit_manifest(merged.out, lambda manifest: manifest["shards"][path.name].update(digest))

    for path in sorted(merged.out.glob("*.safetensors")):
        flip(path, -1)  # a sign or exponent bit of the shard's last element
        renew(path)
        status, _, err = cli("merge", "--check", merged.out)
        assert status == 1, path
        assert "where W + delta is" in err or "should be the base's bytes" in err
        assert err.count("\n") == 1
        flip(path, -1)
        renew(path)
    assert cli("merge", "--check", merged.out)[0] == 0


CHANGES: dict[str, tuple[Callable[[Merged], object], str]] = {
    "base moved": (lambda m: m.base.rename(m.base.with_name("elsewhere")), r"{base}/config\.json is gone"),
    "adapter moved": (lambda m: m.adapter.rename(m.base.with_name("x")), r"{adapter}/adapter_config\.json is gone"),
    "base's shard": (lambda m: flip(shard(m.base), -1), r"{base}/model-\S+ has changed since the merge"),
    "adapter trained on": (
        lambda m: flip(m.adapter / "adapter_model.safetensors", -2),
        r"{adapter}/adapter_model\.safetensors has changed since the merge",
    ),
    "adapter's scaling": (
        lambda m: (m.adapter / "adapter_config.json").write_text("{}"),
        r"{adapter}/adapter_config\.json has changed since the merge",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_inputs_that_are_not_what_they_were(change: str, merged: Merged, cli: Run) -> None:
    """The directory is still what was merged; that it is base + adapter cannot be said, and that is what is said."""
    alter, says = CHANGES[change]
    alter(merged)
    report = check_merged(merged.out, progress=False)
    assert report.elements is None
    assert report.missing is not None
    status, out, err = cli("merge", "--check", merged.out)
    assert (status, err) == (0, "")
    assert f"not compared with base + adapter again: {report.missing}" in out
    as_json = json.loads(cli("merge", "--check", merged.out, "--json")[1])
    assert as_json["elements"] is None
    assert as_json["missing"] == report.missing
    assert re.fullmatch(says.format(base=merged.base, adapter=merged.adapter), report.missing)


def test_the_directory_may_move(merged: Merged, tmp_path: Path) -> None:
    moved = merged.out.rename(tmp_path / "renamed")
    assert check_merged(moved, progress=False).elements == merged.elements


def test_what_is_no_merged_directory_is_status_2(merged: Merged, tmp_path: Path, cli: Run, golden: Golden) -> None:
    for path in (merged.base, tmp_path / "nowhere", merged.out / "config.json"):
        problem = f"cogumi: {path} holds no cogumi-merge.json, so it is not a directory that cogumi merged\n"
        assert cli("merge", "--check", path) == (2, "", problem)
    edit_manifest(merged.out, lambda manifest: manifest.update(format=5))
    with golden.raises("merge", message="cogumi-merge.json", fix="merge again"):
        check_merged(merged.out, progress=False)


# --------------------------------------------------------------------------------------------------- what is beside the files

# Each would be loaded in place of the merged model, or on top of it.
LOADED = (
    "pytorch_model.bin",
    "adapter_config.json",
    "adapter_model.safetensors",
    "special_tokens_map.json",
    "tokenizer.model",
    "merges.txt",
    "chat_template.jinja",
    "modeling_llama.py",
    "license.safetensors",
    "README.md/model.safetensors",
    "original/consolidated.00.pth",
    "onnx/.cache/model.onnx",
    "__pycache__/modeling_llama.cpython-312.pyc",
    "custom_generate/generate.py",
)
UNREAD = (
    "README.md",
    "docs/Notes.MD",
    "LICENSE",
    "notice.txt",
    ".gitattributes",
    ".DS_Store",
    ".cache/huggingface/download/config.json.metadata",
    ".cache/model.safetensors",
    ".git/HEAD",
    ".ipynb_checkpoints/config-checkpoint.json",
)


def put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def test_every_file_that_a_loader_may_read_is_the_merge_s(
    merged: Merged, tmp_path: Path, cli: Run, golden: Golden
) -> None:
    put(tmp_path / "elsewhere" / "config.json")
    for name in LOADED:
        put(merged.out / name)
        with pytest.raises(MergeError, match=f"a loader may read it: {re.escape(name)}; move it elsewhere"):
            check_merged(merged.out, progress=False)
        (merged.out / name).unlink()
        if "/" in name:
            shutil.rmtree(merged.out / name.partition("/")[0])
    for name, leads in {"tokenizer": "../elsewhere", "vocab.json": "nowhere", "self": "."}.items():
        (merged.out / name).symlink_to(leads)
        with pytest.raises(MergeError, match=f"a loader may read it: {name}; move it elsewhere"):
            check_merged(merged.out, progress=False)
        (merged.out / name).unlink()
    assert cli("merge", "--check", merged.out)[0] == 0
    for name in LOADED[:7]:
        put(merged.out / name)
    status, out, err = cli("merge", "--check", merged.out)
    assert (status, out) == (1, "")
    golden("merge", err)


def test_files_that_no_loader_reads_are_said(merged: Merged, cli: Run, golden: Golden) -> None:
    for name in UNREAD:
        put(merged.out / name)
    beside = [".DS_Store", ".cache", ".git", ".gitattributes", ".ipynb_checkpoints", "LICENSE", "README.md"]
    beside += ["docs/Notes.MD", "notice.txt"]
    assert check_merged(merged.out, progress=False).beside == beside
    status, out, err = cli("merge", "--check", merged.out)
    assert (status, err) == (0, "")
    golden("merge", out[out.index("; not written") :])


def test_a_directory_that_cannot_be_listed_is_no_whole_one(merged: Merged) -> None:
    """A loader that knows the name of a file in it can open that."""
    (merged.out / "original").mkdir(mode=0o311)
    code = "import sys; from pathlib import Path; from cogumi.merge.merge_manifest import list_files\n"
    code += "import os; os.chmod('.', 0o755); os.setuid(65534) if os.geteuid() == 0 else None\n"
    code += "try: print(list(list_files(Path('.'))))\nexcept PermissionError as error: print(error.filename)"
    done = subprocess.run([sys.executable, "-c", code], cwd=merged.out, capture_output=True, text=True, check=True)
    assert done.stdout == "original\n"


# ------------------------------------------------------------------------------------------------------ options beside --check


def test_words_of_a_merge_are_refused_beside_check(merged: Merged, cli: Run, golden: Golden) -> None:
    """Also those that say what is so anyway: nothing was asked of them."""
    words: list[tuple[object, ...]] = [
        (merged.adapter,),
        (merged.adapter, merged.out),
        ("--base", merged.base),
        ("--revision", "main"),
        ("--base-mode", "full"),
        ("--dtype", "keep"),
        ("--verify", "elements"),
        ("--weight", "1"),
        ("--add", f"{merged.adapter}=1"),
    ]
    for given in [*words, sum(words[1:], ())]:
        status, out, err = cli("merge", *given, "--check", merged.out)
        assert (status, out, err.count("\n")) == (2, "", 1)
        for each in given:
            assert not str(each).startswith("--") or f" {each}" in err
        golden("merge", err)
    assert cli("merge", "--check", merged.out, "--workers", "1", "--json")[0] == 0


# -------------------------------------------------------------------------------------------------------- memory and the disk


def test_the_report_says_what_was_not_read_from_the_disk(golden: Golden) -> None:
    for from_memory in (0, 4096, None):
        golden("merge", str(CheckReport(Path("merged"), 3, 1_234_567, from_memory, [], 1_000, None)))


def droppable(path: Path) -> None:
    """Skip where the kernel drops nothing from memory, or does not say."""
    sync_path(path)
    drop_from_memory(path)
    if is_in_memory(path):
        pytest.skip("this filesystem keeps its files in memory")


def test_files_are_read_from_the_disk_unless_a_process_maps_them(merged: Merged) -> None:
    droppable(shard(merged.out))
    size, data = shard(merged.out).stat().st_size, bytes(96 << 20)
    digest = blake3(data).hexdigest()
    edit_manifest(merged.out, lambda manifest: manifest["files"].update({"large.bin": digest}))
    (merged.out / "large.bin").write_bytes(data)  # as after a download: not on the disk yet
    assert check_merged(merged.out, progress=False).from_memory == 0
    with shard(merged.out).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert sum(view[:: mmap.PAGESIZE]) >= 0  # as a server that has loaded it
        report = check_merged(merged.out, progress=False)
    assert report.from_memory == size
    assert f"but {size:,} of {report.bytes:,} bytes were read from memory, not from the disk" in str(report)


def test_a_filesystem_in_memory_has_no_disk(merged: Merged, mount: Callable[..., Path]) -> None:
    report = check_merged(Path(shutil.copytree(merged.out, mount() / "merged")), progress=False)
    assert report.from_memory == report.bytes


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux's mincore")
def test_of_another_s_file_it_is_not_known(tmp_path: Path) -> None:
    """Linux calls every page of it cached."""
    passwords = {Path("/etc/passwd"): blake3_file(Path("/etc/passwd"))}
    read_back(passwords, 1, False, "hashing")  # imports what it needs
    pid = os.fork()
    if pid == 0:
        if os.geteuid() == 0:
            os.setuid(65534)
        os._exit(read_back(passwords, 1, False, "hashing") != (None, None))
    assert os.waitpid(pid, 0)[1] == 0
    (tmp_path / "empty").touch()
    assert bytes_in_memory(tmp_path / "empty") == 0
