"""`model.adapter` in another place: a bucket of moto's S3 server, a mirrored directory, a repository of tests/hub_server.py."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from builders import train
from golden import Golden
from hub_server import HubServer
from qlora_runs import Config, short_sft
from test_checkpoints_mirror import Bucket, bucket, deliver, hub, server  # noqa: F401  fixtures
from transformers import AutoModelForCausalLM

import cogumi
from cogumi.checkpoints.manifest import Identity, write_manifest
from cogumi.checkpoints.mirror import Mirror
from cogumi.config.schema import RunConfig, load_config
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import DECISIONS, read_section
from cogumi.core.signatures import exit_status
from cogumi.merge.adapter_files import write_base_record
from cogumi.methods import adapter_source
from cogumi.methods.preparation import check_settings, prepare_base

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sft") / "adapter"
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    train(model, out, target_modules="all-linear")
    write_base_record(out, model)
    return out


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(adapter_source.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    return tmp_path / "cache" / "cogumi" / "adapters"


@pytest.fixture
def sft(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Config:
    return short_sft(tiny_model, code_parquet, tmp_path / "run", rows=15)


def checkpoint(adapter: Path, home: Path, step: int) -> Path:
    """A checkpoint of that adapter; its tokenizer's config tells the step."""
    path = Path(shutil.copytree(adapter, home / f"checkpoint-{step}"))
    (path / "optimizer.pt").write_bytes(b"moments" * 1000)
    (path / "tokenizer_note.json").write_text(str(step))
    Identity("ab12", {}).write(path)
    write_manifest(path, step)
    return path


def fetched(run: RunConfig) -> Path:
    """Where `check_settings` and `prepare_base` find the adapter."""
    check_settings(run)
    run, _ = prepare_base(run)
    assert run.model.adapter_dir is not None
    return run.model.adapter_dir


def step_of(directory: Path) -> str:
    assert not (directory / "optimizer.pt").exists()
    return (directory / "tokenizer_note.json").read_text()


def test_a_run_starts_from_a_mirror_in_a_bucket_and_resumes_from_the_same_adapter(
    bucket: Bucket,  # noqa: F811
    adapter: Path,
    sft: Config,
    cache: Path,
    tmp_path: Path,
) -> None:
    mirror = Mirror(bucket.url)
    deliver(mirror, checkpoint(adapter, tmp_path, 2), checkpoint(adapter, tmp_path, 4))
    sft["model"]["adapter"] = bucket.url
    result = cogumi.train(sft, cogumi__sanity=1)
    pinned = read_section(result.run_dir / DECISIONS, "adapter")
    assert (pinned["source"], pinned["folder"]) == (bucket.url, "checkpoint-4")
    assert step_of(cache / pinned["sha256"]) == "4"
    log = (result.run_dir / "run.log").read_text()
    assert f"folder checkpoint-4, sha256 {pinned['sha256']}" in log
    assert "are in the model bit for bit" in log
    assert f"adapter: {bucket.url}" in (result.run_dir / "config.yaml").read_text()

    deliver(mirror, checkpoint(adapter, tmp_path, 6))
    assert step_of(fetched(load_config(sft))) == "4"
    shutil.rmtree(cache)
    assert step_of(fetched(load_config(sft))) == "4"
    assert step_of(fetched(load_config(sft, cogumi__run_dir=str(tmp_path / "other")))) == "6"
    bucket.proxy.stop()
    resumed = cogumi.train(sft)  # from the cache
    assert read_section(resumed.run_dir / DECISIONS, "adapter") == pinned


def test_a_resumed_run_refuses_another_adapter(
    adapter: Path, sft: Config, cache: Path, tmp_path: Path, golden: Golden
) -> None:
    mirror = tmp_path / "mirror"
    deliver(Mirror(mirror), checkpoint(adapter, tmp_path, 2))
    sft["model"]["adapter"] = str(mirror)
    cogumi.train(sft, cogumi__sanity=1)
    shutil.rmtree(cache)
    shutil.rmtree(mirror / "checkpoint-2")
    checkpoint(adapter, mirror, 4)
    with pytest.raises(UsageError) as gone:
        cogumi.train(sft)
    (mirror / "checkpoint-4").rename(mirror / "checkpoint-2")
    with pytest.raises(UsageError) as other:
        cogumi.train(sft)
    for error in (gone, other):
        assert error.value.key == "model.adapter"
        golden("adapter", str(error.value))


def test_a_damaged_checkpoint_is_passed_over_and_an_adapter_folder_wins(
    adapter: Path, sft: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = tmp_path / "mirror"
    deliver(Mirror(mirror), checkpoint(adapter, tmp_path, 2), checkpoint(adapter, tmp_path, 4))
    weights = bytearray((mirror / "checkpoint-4" / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (mirror / "checkpoint-4" / WEIGHTS).write_bytes(weights)
    run = load_config(sft, model__adapter=str(mirror))
    assert step_of(fetched(run)) == "2"
    assert "checkpoint-4 of" in caplog.text
    (mirror / "checkpoint-6").mkdir()  # its upload did not end
    shutil.copyfile(mirror / "checkpoint-4" / "adapter_config.json", mirror / "checkpoint-6" / "adapter_config.json")
    shutil.copytree(adapter, mirror / "adapter")
    assert fetched(load_config(sft, model__adapter=str(mirror))).name == fetched(run).name  # nor did this one's
    write_manifest(mirror / "adapter", 6)
    assert fetched(load_config(sft, model__adapter=str(mirror))).name != fetched(run).name
    assert (fetched(load_config(sft, model__adapter=str(mirror))) / "cogumi-base.json").exists()
    shutil.rmtree(mirror / "adapter")
    for path in mirror.glob("*/" + WEIGHTS):
        path.write_bytes(bytes(weights))
    with pytest.raises(UsageError, match="has only damaged adapters"):
        fetched(load_config(sft, model__adapter=str(mirror)))


def test_the_mirror_of_a_run_that_failed_is_refused(sft: Config, cache: Path, tmp_path: Path) -> None:
    """With the real run: its adapter, its verdict and a check that failed are in the mirror."""
    mirror, other = str(tmp_path / "mirror"), str(tmp_path / "other")
    first = cogumi.train(sft, cogumi__mirror=mirror, train__learning_rate=1e6, train__max_steps=1)
    assert not first.passed
    shutil.rmtree(first.run_dir)
    again = load_config(sft, model__adapter=mirror, cogumi__run_dir=other)
    with pytest.raises(UsageError, match=r"mirror: model\.adapter: failed checks: .*cogumi\.from_failed: true here"):
        fetched(again)
    assert not Path(other).exists()
    assert fetched(load_config(sft, model__adapter=mirror, cogumi__run_dir=other, cogumi__from_failed=True)).is_dir()


@pytest.mark.parametrize("source", ["someone/lora", "hf://someone/lora", "hf://someone/lora/stage/one", "@", "hf@"])
def test_an_adapter_of_the_hub_is_pinned_to_its_commit(
    hub: HubServer,  # noqa: F811
    adapter: Path,
    sft: Config,
    tmp_path: Path,
    source: str,
) -> None:
    files = {f"{folder}{path.name}": path.read_bytes() for path in adapter.iterdir() for folder in ("", "stage/one/")}
    first = hub.publish("someone/lora", files)
    second = hub.publish("someone/lora", files | {"tokenizer_note.json": b"new"})
    pinned = source.endswith("@")
    if pinned:
        source = f"{'hf://' if source.startswith('hf') else ''}someone/lora@{first}"
    run = load_config(sft, model__adapter=source)
    assert fetched(run).is_dir()
    assert run.model._fetched["commit"] == (first if pinned else second)
    assert (fetched(run) / "tokenizer_note.json").exists() == (not pinned and "stage" not in source)


@pytest.fixture
def places(hub: HubServer, bucket: Bucket, tmp_path: Path) -> Iterator[dict[str, str]]:  # noqa: F811
    hub.publish("someone/model", {"config.json": b"{}", "model.safetensors": b"x"})
    (tmp_path / "empty" / "checkpoint-1").mkdir(parents=True)
    return {
        "unknown": "someone/modle",
        "revision": "someone/model@v2",
        "model": "someone/model",
        "invalid": "some--one/mo..del",
        "bucket": "s3://no-such-bucket/run",
        "empty": bucket.url,
        "mirror": str(tmp_path / "empty"),
        "login": "s3://key:secret@bucket/run",
        "scheme": "gopher://somewhere/run",
    }


def test_what_is_no_adapter_is_one_line(
    places: dict[str, str],
    hub: HubServer,  # noqa: F811
    bucket: Bucket,  # noqa: F811
    sft: Config,
    tmp_path: Path,
    golden: Golden,
) -> None:
    lines = []
    for source in places.values():
        with pytest.raises(UsageError) as refused:
            cogumi.train(sft, model__adapter=source)
        assert exit_status(refused.value) == 2, refused.value
        assert (refused.value.key, "\n" in str(refused.value)) == ("model.adapter", False)
        line = re.sub(r"Request ID: \w+", "Request ID: <id>", str(refused.value))
        lines.append(line.replace(hub.url, "<hub>").replace(bucket.name, "<bucket>"))
    assert not Path(sft["cogumi"]["run_dir"]).exists()
    for line in lines:
        golden("adapter", line)


def test_a_network_that_fails_is_worth_another_try(
    hub: HubServer,  # noqa: F811
    bucket: Bucket,  # noqa: F811
    adapter: Path,
    sft: Config,
    tmp_path: Path,
) -> None:
    hub.publish("someone/lora", adapter)
    deliver(Mirror(bucket.url), checkpoint(adapter, tmp_path, 2))
    hub.faults = lambda method, path, headers: 503
    bucket.proxy.stop()
    for source in ("someone/lora", bucket.url):
        with pytest.raises(UsageError) as refused:
            fetched(load_config(sft, model__adapter=source))
        assert exit_status(refused.value) == 75, refused.value
        assert refused.value.key == "model.adapter"
