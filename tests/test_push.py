"""`cogumi push`: what arrives on the hub, in one commit; the card that a run makes; and what is refused before anything is sent.

The server is tests/hub_server.py, and the client huggingface_hub itself, in a process of its own: HF_ENDPOINT is read at import.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepared_process
import pytest
import yaml
from finished_runs import HUB_TOKEN, FinishedRun
from golden import Golden
from hub_server import HubServer

from cogumi.core.errors import UsageError
from cogumi.hub import upload

Push = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(finished_sft: FinishedRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_sft.home, tmp_path / "run"))


@pytest.fixture
def push(hub: HubServer, tmp_path: Path) -> Push:
    def call(*words: object, token: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = os.environ | hub.environment(tmp_path / "cache", hub.token if token is None else token)
        return subprocess.run(
            [*prepared_process.client(environment), "push", *map(str, words)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return call


def arrived(hub: HubServer, name: str) -> dict[str, bytes]:
    home = hub.root / "model" / name / hub.refs("model", name)["main"]
    return {path.relative_to(home).as_posix(): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def test_a_run_arrives_whole_with_its_card_in_one_commit(run: Path, hub: HubServer, push: Push, tmp_path: Path) -> None:
    done = push(run, "someone/tuned", "--private", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    files = arrived(hub, "someone/tuned")
    sent = {path.name: path.read_bytes() for path in (run / "merged").iterdir() if path.name != "README.md"}
    assert {name: files[name] for name in sent} == sent
    assert set(files) == {*sent, "README.md", ".gitattributes"}
    assert (report["kind"], report["files"]) == ("merged", len(sent))
    assert "someone/tuned" in hub.private
    assert [path for _, path in hub.requests if "/commit/" in path] == ["/api/models/someone/tuned/commit/main"]
    card = files["README.md"].decode()
    verdict = json.loads((run / "verdict.json").read_text())
    for check in verdict["checks"]:
        assert f"| {upload.cell(check['name'])} | {upload.cell(check['figure'])} |" in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "transformers"
    assert {"cogumi", "sft", "trl", "merged"} <= set(front["tags"])
    assert "base_model" not in front  # a directory of this machine
    assert HUB_TOKEN not in card
    assert str(tmp_path) not in card
    assert str(run.parents[1]) not in card
    assert "learning_rate: 0.01" in card


def test_the_adapter_alone_and_weights_of_an_earlier_upload_leave(run: Path, hub: HubServer, push: Push) -> None:
    hub.publish("someone/tuned", {"model.safetensors": b"old", "notes.md": b"mine"})
    done = push(run, "someone/tuned", "--what", "adapter")
    assert done.returncode == 0, done.stderr
    files = arrived(hub, "someone/tuned")
    assert files["adapter_model.safetensors"] == (run / "adapter" / "adapter_model.safetensors").read_bytes()
    assert "model.safetensors" not in files
    assert files["notes.md"] == b"mine"
    assert "removed weights of an earlier upload: model.safetensors" in done.stdout
    assert yaml.safe_load(files["README.md"].decode().split("---\n")[1])["library_name"] == "peft"


def test_what_is_no_part_of_a_model_stays_here(run: Path, hub: HubServer, push: Push) -> None:
    merged = run / "merged"
    for name in ("optimizer.pt", "training_args.bin", ".env", "run.log"):
        (merged / name).write_text("HF_TOKEN")
    assert push(merged, "someone/tuned").returncode == 0
    assert not {"optimizer.pt", "training_args.bin", ".env", "run.log"} & arrived(hub, "someone/tuned").keys()


def test_the_base_and_its_licence_come_from_the_hub(run: Path, hub: HubServer, push: Push) -> None:
    hub.publish("someone/base", {"config.json": b"{}", "README.md": b"---\nlicense: apache-2.0\n---\n"})
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["name"] = "someone/base"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    done = push(run, "someone/tuned")
    assert done.returncode == 0, done.stderr
    front = yaml.safe_load(arrived(hub, "someone/tuned")["README.md"].decode().split("---\n")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("someone/base", "finetune")
    assert front["license"] == "apache-2.0"


@pytest.mark.parametrize(
    ("case", "words", "says"),
    [
        ("no token", [], "there is no token for the hub"),
        ("wrong token", [], "does not know this token"),
        ("other account", [], "this token may not write to other/tuned"),
        ("public", ["--private"], "someone/tuned is there, and public"),
        ("name", [], "'a/b/c' is no name of a repository"),
    ],
)
def test_what_the_hub_would_refuse_is_one_line(
    case: str, words: list[str], says: str, run: Path, hub: HubServer, push: Push, golden: Golden
) -> None:
    if case == "public":
        hub.publish("someone/tuned", {"notes.md": b"mine"})
    name = {"other account": "other/tuned", "name": "a/b/c"}.get(case, "someone/tuned")
    token = {"no token": "", "wrong token": "hf_" + "x" * 34}.get(case)
    done = push(run, name, *words, token=token)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("cogumi: ")]
    assert says in line
    golden("push", line.replace(hub.url, "HUB"))
    assert not hub.uploaded
    assert not [path for _, path in hub.requests if "/commit/" in path]


def test_a_red_run_is_refused_unless_it_is_wanted(run: Path, hub: HubServer, push: Push, golden: Golden) -> None:
    verdict: dict[str, Any] = json.loads((run / "verdict.json").read_text())
    verdict["checks"][0]["passed"] = False
    (run / "verdict.json").write_text(json.dumps(verdict))
    for source in (run, run / "merged"):  # its directory is the run's, too
        with golden.raises("push", message=f"failed checks: {verdict['checks'][0]['name']}"):
            upload.push_model(source, "someone/tuned")
    assert push(run, "someone/tuned", "--anyway").returncode == 0
    card = arrived(hub, "someone/tuned")["README.md"].decode()
    assert f"in spite of this: failed checks: {verdict['checks'][0]['name']}." in card
    assert "**no**" in card


def test_an_adapter_is_pushed_whatever_became_of_its_merge(run: Path, hub: HubServer, push: Push) -> None:
    verdict: dict[str, Any] = json.loads((run / "verdict.json").read_text())
    failed = {"name": "merged logits", "figure": "1", "requirement": "0", "passed": False, "fix": "merge again"}
    (run / "verdict.json").write_text(json.dumps(verdict | {"checks": [*verdict["checks"], failed]}))
    with pytest.raises(UsageError, match=r"failed checks: merged logits; push the adapter \(--what adapter\)"):
        upload.push_model(run, "someone/tuned")
    assert push(run, "someone/tuned", "--what", "adapter").returncode == 0
    assert "in spite of this" not in arrived(hub, "someone/tuned")["README.md"].decode()
    verdict["checks"][0]["passed"] = False  # of the training
    (run / "verdict.json").write_text(json.dumps(verdict))
    with pytest.raises(UsageError, match="failed checks: "):
        upload.push_model(run, "someone/tuned", "adapter")


def test_a_red_flag_and_a_missing_verdict_are_refused(run: Path) -> None:
    verdict = json.loads((run / "verdict.json").read_text())
    verdict["flags"] = [{"name": "loss", "level": "red", "cause": "it diverged", "evidence": "nan", "knob": ""}]
    (run / "verdict.json").write_text(json.dumps(verdict))
    with pytest.raises(UsageError, match="red flags: loss"):
        upload.push_model(run, "someone/tuned")
    (run / "verdict.json").unlink()
    with pytest.raises(UsageError, match="the run has no verdict"):
        upload.push_model(run, "someone/tuned")


def test_there_has_to_be_a_model(tmp_path: Path, run: Path, golden: Golden) -> None:
    shutil.rmtree(run / "merged")
    with golden.raises("push", message="there is no merged model there"):
        upload.push_model(run, "someone/tuned", "merged")
    with golden.raises("push", message="there is no model there"):
        upload.push_model(tmp_path, "someone/tuned")
    with golden.raises("push", message="there is no model there"):
        upload.push_model(tmp_path / "gone", "someone/tuned")
    with golden.raises("push", key="--what"):
        upload.push_model(run, "someone/tuned", "both")


@pytest.mark.parametrize("readme", ["no front matter\nlicense: mit\n", "---\na: [\n---\n", "---\n- list\n---\n"])
def test_a_readme_without_a_readable_licence_yields_none(readme: str, tmp_path: Path) -> None:
    assert upload.read_licence(str(tmp_path)) == {}
    (tmp_path / "README.md").write_text(readme)
    assert upload.read_licence(str(tmp_path)) == {}


def test_the_licence_of_a_local_base_is_its_cards(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\ntags: [x]\n---\n# Model\n\n---\nlicense: mit\n---\n"
    )
    found = {"license": "other", "license_name": "mine", "license_link": "LICENSE"}
    assert upload.read_licence(str(tmp_path)) == found


def test_a_base_has_its_name_on_the_hub_and_a_directory_has_none(tmp_path: Path) -> None:
    assert upload.hub_id(str(tmp_path / "models--org--the--model" / "snapshots" / ("0" * 40))) == "org/the--model"
    assert upload.hub_id("org/model") == "org/model"
    assert upload.hub_id(str(tmp_path)) is None
    assert upload.hub_id(None) is None


def test_the_card_of_a_merge_in_a_directory(tmp_path: Path) -> None:
    """Of adapter and base of another machine: no path."""
    manifest = {"base": {"name": "/home/me/my-base", "path": "/home/me/my-base", "commit": None}}
    (tmp_path / "cogumi-merge.json").write_text(json.dumps(manifest))
    text = upload.write_card("tuned", tmp_path, "merged", None)
    assert "Trained from my-base, a model that is not on the hub." in text
    assert "/home" not in text
    assert "base_model" not in yaml.safe_load(text.split("---\n")[1])
