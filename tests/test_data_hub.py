"""Data sets on a hub that answers over HTTP: which files, at which commit, downloaded once, and read like local ones."""

import io
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from golden import Golden

from cogumi.data.source_files import is_hub_id, locate
from cogumi.hub.downloads import choose_split
from tests.hub_server import HubServer, hub_server

# HF_ENDPOINT is read when huggingface_hub is imported: whoever asks runs in a process of its own, which takes several calls.
ASK = textwrap.dedent(
    """
    import json, logging, sys
    from cogumi.data.source_files import locate
    from cogumi.data.sources import batches
    from cogumi.core.errors import UsageError
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("cogumi").addHandler(handler)
    logging.getLogger("cogumi").setLevel("INFO")
    for asked in json.loads(sys.argv[1]):
        lines.clear()
        try:
            name, files, identity = locate(asked.pop("source"), **asked)
        except UsageError as error:
            print(json.dumps({"key": error.key, "message": error.message, "fix": error.fix, "place": error.place}))
            continue
        texts = [text for frame in batches(files, ["text"]) for text in frame["text"]]
        print(json.dumps({"name": name, "identity": identity, "texts": texts, "log": lines}))
    """
)


def parquet(*texts: str) -> bytes:
    buffer = io.BytesIO()
    pl.DataFrame({"text": texts}).write_parquet(buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with hub_server(tmp_path_factory.mktemp("hub")) as server:
        yield server


def ask(hub: HubServer, cache: Path, *asked: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    variables = os.environ | hub.environment(cache) | {"XDG_CACHE_HOME": str(cache / "own")} | environment
    variables["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", ASK, json.dumps(asked)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, cwd=cache.parent)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_splits_commits_and_a_cache_that_needs_no_network(hub, tmp_path):
    names = {"data/train-00000-of-00002.parquet": parquet("a", "b"), "data/train-00001-of-00002.parquet": parquet("c")}
    first = hub.publish("some/data", names | {"data/test-00000-of-00001.parquet": parquet("t")}, kind="dataset")
    second = hub.publish("some/data", {"train.jsonl": b'{"text": "new"}\n'}, kind="dataset")
    hub.sent.clear()
    at_first = {"source": "some/data", "revision": first}
    asked = [{"source": "some/data"}, at_first, at_first | {"split": "test"}, at_first | {"split": "dev"}]
    newest, pinned, test, wrong = ask(hub, tmp_path / "cache", *asked)
    assert newest["texts"] == ["new"]
    assert newest["identity"] == ["some/data", second, ["train.jsonl"]]
    assert any(f"data.revision: {second}" in line for line in newest["log"])
    assert pinned["texts"] == ["a", "b", "c"]
    assert pinned["identity"][1] == first
    assert not any("data.revision" in line for line in pinned["log"])
    assert pinned["name"] == f"some/data@{first[:7]}"
    assert any(f"download: some/data at {first[:7]}: 2 files" in line for line in pinned["log"])
    assert test["texts"] == ["t"]
    assert (wrong["key"], wrong["fix"]) == ("data.split", "it has: train, test")
    # What is pinned and there asks nobody.
    hub.requests.clear()
    (again,) = ask(hub, tmp_path / "cache", at_first)
    assert again["texts"] == ["a", "b", "c"]
    assert hub.requests == []
    (offline,) = ask(hub, tmp_path / "cache", at_first, HF_HUB_OFFLINE="1")
    assert offline["texts"] == ["a", "b", "c"]


def test_subsets_and_the_repositorys_own_description(hub, tmp_path):
    paths = {"easy": "easy/*.jsonl", "hard": "hard.csv"}
    parts = [
        f"- {{config_name: {name}, data_files: [{{split: train, path: '{path}'}}]}}" for name, path in paths.items()
    ]
    readme = "\n".join(["---", "configs:", *parts, "---", ""])
    files = {"easy/1.jsonl": b'{"text": "e1"}\n', "easy/2.jsonl": b'{"text": "e2"}\n', "hard.csv": b"text\nh\n"}
    hub.publish("some/subsets", files | {"README.md": readme.encode()}, kind="dataset")
    wanted = [{"subset": "easy"}, {"subset": "hard", "revision": "main"}, {}, {"subset": "medium"}]
    asked = [{"source": "some/subsets"} | of_subset for of_subset in wanted]
    easy, hard, neither, other = ask(hub, tmp_path / "cache", *asked)
    assert (easy["texts"], hard["texts"]) == (["e1", "e2"], ["h"])
    assert "easy" in neither["message"]
    assert "data.subset" in neither["fix"]
    assert "medium" in other["message"]
    assert "hard" in other["message"]


def test_what_cannot_be_had_is_one_line_each(hub, tmp_path):
    hub.publish("some/gated", {"train.jsonl": b"{}"}, kind="dataset")
    hub.gated.add("some/gated")
    hub.publish("some/pictures", {"train/a.png": b"\x89PNG", "train/b.png": b"\x89PNG"}, kind="dataset")
    hub.publish("some/fine", {"train.jsonl": b'{"text": "x"}\n'}, kind="dataset")
    asked = [{"source": f"some/{name}"} for name in ("missing", "gated", "pictures")]
    asked.append({"source": "some/fine", "revision": "v7"})
    missing, gated, pictures, revision = ask(hub, tmp_path / "cache", *asked)
    assert "'some/missing'" in missing["message"]
    assert missing["fix"] == "did you mean some/fine?"
    assert "no HF_TOKEN is set" in gated["message"]
    assert f"{hub.url}/datasets/some/gated" in gated["fix"]
    assert (pictures["place"], "train/a.png" in pictures["message"]) == ("some/pictures", True)
    assert not any(path.endswith(".png") for path in hub.sent)
    assert "'v7'" in revision["message"]
    assert "data.revision" in revision["fix"]
    assert not any("\n" in text for each in (missing, gated, pictures, revision) for text in each.values())

    (unreachable,) = ask(hub, tmp_path / "other", {"source": "some/fine"}, HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9" in unreachable["message"]
    assert unreachable["fix"] == "give a directory, or connect"


def test_a_local_file_wins_over_a_hub_id(tmp_path, monkeypatch, golden: Golden):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "data").mkdir(parents=True)
    pl.DataFrame({"text": ["local"]}).write_parquet("some/data/rows.parquet")
    assert [file.name for file in locate("some/data")[1]] == ["rows.parquet"]
    for key in ("revision", "subset"):
        with golden.raises("data", message=f"data.{key} would be ignored: some/data", fix="drop it"):
            locate("some/data", **{key: "main"})
    with golden.raises("data", message="data.split", fix="drop it"):
        locate("some/data/rows.parquet", split="train")
    assert is_hub_id("some/data")
    assert not is_hub_id("some/data.jsonl")
    assert not is_hub_id("data")


def test_a_split_of_a_directory_laid_out_like_the_hubs(tmp_path, golden: Golden):
    for split in ("train", "test"):
        pl.DataFrame({"text": [split]}).write_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    assert [file.name for file in locate(str(tmp_path), split="test")[1]] == ["test-00000-of-00001.parquet"]
    assert [file.name for file in locate(str(tmp_path))[1]] == ["train-00000-of-00001.parquet"]
    with golden.raises("data", key="data.split", message="'dev'", fix="train, test"):
        locate(str(tmp_path), split="dev")


def test_the_default_split_is_train_or_the_only_one(golden: Golden):
    assert choose_split("n", {"train": ["a.csv"], "test": ["b.csv"]}, None) == ["a.csv"]
    assert choose_split("n", {"validation": ["a.csv"]}, None) == ["a.csv"]
    with golden.raises("data", key="data.split", message="'train'"):
        choose_split("n", {"one": ["a.csv"], "two": ["b.csv"]}, None)
