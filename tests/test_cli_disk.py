"""`cogumi disk` as a user meets it: tables at 80 columns, JSON, exit status, and what is and is not removed."""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import prepared_process
import pytest
import yaml
from disk_mounts import Mount, fill
from golden import Golden
from hub_server import HubServer
from test_checkpoints_protect import flip, make
from transformers import LlamaForCausalLM

from cogumi.checkpoints import verify
from cogumi.checkpoints.manifest import write_manifest
from cogumi.checkpoints.verify import bytes_of
from cogumi.core.disk_space import space_of
from cogumi.core.durability import lock_directory
from cogumi.disk import usage
from cogumi.forecast.disk_forecast import DOWNLOAD

Run = Callable[..., tuple[int, str, str]]
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # where the small base is, once it is made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real trainer's checkpoint-1 to checkpoint-5, each with a manifest; checkpoint-2 is the best."""
    place = tmp_path_factory.mktemp("trained") / "run" / "checkpoints"
    make(place, max_steps=5, save_steps=1, save_total_limit=None)[0].train()
    for step in range(1, 6):
        directory = place / f"checkpoint-{step}"
        state = directory / "trainer_state.json"
        content = json.loads(state.read_text()) | {"best_model_checkpoint": "elsewhere/checkpoint-2"}
        state.write_text(json.dumps(content))
        write_manifest(directory, step)
    return place


@pytest.fixture
def checkpoints(trained: Path, tmp_path: Path) -> Path:
    """The same, to be damaged and removed; below a run's directory."""
    return Path(shutil.copytree(trained, tmp_path / "run" / "checkpoints"))


@pytest.fixture
def run(command_line: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    for name in ("HF_HOME", "XDG_CACHE_HOME", "WANDB_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "caches" / name))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    return partial(command_line, "disk")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a minute later."""
    monkeypatch.setattr(usage, "SETTLED_SECONDS", -1.0)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def printed(run: Run, *words: object, status: int = 0) -> str:
    """What a command prints that ends with this status, and says nothing beside it."""
    code, output, error = run(*words)
    assert (code, error) == (status, "")
    return output


def whole(text: str) -> str:
    """A table's text with its line breaks and columns taken out."""
    return " ".join(text.split())


# --------------------------------------------------------------------------------------------------------------- status


def test_status_says_what_is_full_with_who_uses_it(checkpoints: Path, tmp_path: Path, run: Run) -> None:
    staged = checkpoints / ".cogumi-saving" / "checkpoint-6"
    staged.mkdir(parents=True)
    (staged / "model.safetensors").write_bytes(bytes(100_000))
    (tmp_path / "run/merged.partial-0123abcd").mkdir()
    (tmp_path / "caches/HF_HOME/hub").mkdir(parents=True)
    (tmp_path / "caches/HF_HOME/hub/blob").write_bytes(bytes(2_000_000))
    status, output, error = run("status", tmp_path / "run")
    rows = json.loads(run("status", tmp_path / "run", "--json")[1])
    assert (status, error) == (0, "")
    assert max(map(len, output.splitlines())) <= 80
    assert "filesystems" in output
    assert "who uses the space" in output
    assert re.search(r"run directory.* \d+ % ", output)
    inodes_are_known = space_of(tmp_path).inodes_share is not None
    assert bool(re.search(r"run directory.* \d+ % .* \d+ % *$", output, re.MULTILINE)) is inodes_are_known
    assert re.search(r"HF hub cache .* 2\.0 MB", output)
    assert re.search(r"checkpoints +here +[\d.]+ [kM]B ", output)
    assert re.search(r"unfinished save +checkpoints/\.cogumi-saving +1\d\d kB ", output)
    assert re.search(r"changed \d+ s ago", whole(output))
    assert {use["what"] for use in rows["uses"]} >= {"checkpoints", "HF hub cache", "unfinished save"}
    leftovers = {row["path"]: row["what"] for row in rows["leftovers"]}
    assert leftovers == {
        str(tmp_path / "run/merged.partial-0123abcd"): "unfinished merge",
        str(checkpoints / ".cogumi-saving"): "unfinished save",
    }
    assert rows["filesystems"][0]["space"]["total"] > 0


def test_status_of_a_full_disk(mount: Mount, run: Run) -> None:
    disk = mount()
    fill(disk, 1.0)
    output = printed(run, "status", disk)
    assert re.search(r"run directory +\S+.* 100 % +0 B ", output), output


# --------------------------------------------------------------------------------------------------------------- verify


def test_verify_names_what_is_wrong(checkpoints: Path, run: Run) -> None:
    output = printed(run, "verify", checkpoints)
    assert output.count(" verified ") == 5
    assert run("verify", checkpoints.parent)[1] == output  # a run's directory
    flip(checkpoints / "checkpoint-5" / "optimizer.pt")
    (checkpoints / "checkpoint-4" / "cogumi-manifest.json").unlink()
    output = printed(run, "verify", checkpoints, status=1)
    assert max(map(len, output.splitlines())) <= 80
    assert re.search(r"checkpoint-5 +rejected", output)
    assert re.search(r"checkpoint-4 +unverified", output)
    assert "optimizer.pt" in output
    output = printed(run, "verify", checkpoints, "--json", status=1)
    states = {Path(row["path"]).name: row["state"] for row in json.loads(output)}
    assert states == {f"checkpoint-{n}": "verified" for n in (1, 2, 3)} | {
        "checkpoint-4": "unverified",
        "checkpoint-5": "rejected",
    }


def test_verify_of_one_checkpoint(checkpoints: Path, run: Run) -> None:
    flip(checkpoints / "checkpoint-5" / "optimizer.pt")
    status, output, error = run("verify", checkpoints / "checkpoint-4", "--json")
    assert (status, error, [row["state"] for row in json.loads(output)]) == (0, "", ["verified"])
    assert run("verify", checkpoints / "checkpoint-5")[0] == 1


def test_a_checkpoint_that_goes_while_it_is_read_is_left_out(
    checkpoints: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = verify.sha256_file

    def gone_first(path: Path) -> str:
        if path.parent.name == "checkpoint-4" and path.exists():
            path.parent.rename(checkpoints / ".cogumi-trash-checkpoint-4-ab12")
        return original(path)

    monkeypatch.setattr(verify, "sha256_file", gone_first)
    output = printed(run, "verify", checkpoints, "--json")
    assert [Path(row["path"]).name[-1] for row in json.loads(output)] == ["5", "3", "2", "1"]


def test_what_plain_trainer_is_writing_is_not_called_damaged(
    checkpoints: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cogumi-manifest.json", "trainer_state.json"):  # which it writes last
        (checkpoints / "checkpoint-5" / name).unlink()
    output = printed(run, "verify", checkpoints)
    assert re.search(r"checkpoint-5 unverified \S+ [kM]B it changed \d+ s ago and may still be written", whole(output))
    assert run("resume-point", checkpoints)[1] == f"{checkpoints / 'checkpoint-4'}\n"
    monkeypatch.setattr(usage, "SETTLED_SECONDS", -1.0)
    assert run("verify", checkpoints)[0] == 1


def test_resume_point_prints_a_path_alone(checkpoints: Path, run: Run) -> None:
    assert run("resume-point", checkpoints) == (0, f"{checkpoints / 'checkpoint-5'}\n", "")
    flip(checkpoints / "checkpoint-5" / "model.safetensors")
    (checkpoints / "checkpoint-4" / "cogumi-manifest.json").unlink()
    status, output, error = run("resume-point", checkpoints.parent)
    assert (status, output) == (0, f"{checkpoints / 'checkpoint-4'}\n")
    first, second = error.splitlines()
    assert first.startswith("checkpoint-5 is rejected: model.safetensors")
    assert second.startswith("checkpoint-4 is unverified: ")
    parsed = json.loads(run("resume-point", checkpoints, "--json")[1])
    assert parsed["resume_point"] == str(checkpoints / "checkpoint-4")
    assert [row["state"] for row in parsed["looked_at"]] == ["rejected", "unverified"]


def test_resume_point_where_there_is_none(checkpoints: Path, tmp_path: Path, run: Run) -> None:
    for number in range(1, 6):
        (checkpoints / f"checkpoint-{number}" / "trainer_state.json").unlink()
    status, output, error = run("resume-point", checkpoints)
    assert (status, output) == (1, "")
    assert len(error.splitlines()) == 7
    assert error.splitlines()[-2] == f"cogumi: {checkpoints}: nothing to resume from: none of 5 checkpoints is good"
    assert json.loads(run("resume-point", checkpoints, "--json")[1])["resume_point"] is None
    (tmp_path / "empty").mkdir()
    status, output, error = run("resume-point", tmp_path / "empty")
    assert (status, output) == (1, "")
    assert "there are no checkpoints" in error.splitlines()[0]
    assert "mirror" in error.splitlines()[1]


# --------------------------------------------------------------------------------------------------------------- prune


def test_prune_keeps_the_newest_the_best_and_the_pinned(checkpoints: Path, run: Run, golden: Golden) -> None:
    before = names(checkpoints)
    status, output, error = run("prune", checkpoints, "--keep", 2, "--dry-run")
    assert (status, error, names(checkpoints)) == (0, "", before)
    assert re.findall(r"^(\w+).* checkpoint-(\d)", output, re.MULTILINE) == [
        ("stays", "2"),
        ("stays", "4"),
        ("stays", "5"),
        ("would", "1"),
        ("would", "3"),
    ]
    golden("disk", output)
    (checkpoints / "checkpoint-1" / "KEEP").touch()
    status, output, error = run("prune", checkpoints.parent, "--keep", 2, "--json")
    parsed = json.loads(output)
    assert (status, [Path(row["path"]).name for row in parsed["removed"]]) == (0, ["checkpoint-3"])
    assert parsed["kept"][:2] == ["checkpoint-1: pinned", "checkpoint-2: the best"]
    assert names(checkpoints) == ["checkpoint-1", "checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert run("prune", checkpoints, "--keep", 2)[1].splitlines()[-1] == "nothing to remove"


def test_prune_does_not_count_what_is_damaged(checkpoints: Path, run: Run) -> None:
    flip(checkpoints / "checkpoint-5" / "optimizer.pt")
    (checkpoints / "checkpoint-3" / "cogumi-manifest.json").unlink()  # not ours to remove
    status, output, _ = run("prune", checkpoints, "--keep", 2)
    assert status == 0
    assert "checkpoint-5: is rejected and does not count: optimizer.pt" in output
    assert output.count("checkpoint-5") == 1
    assert "checkpoint-3: not written by cogumi" in output
    assert "gone      checkpoint-1: " in output
    assert "came back" in output.splitlines()[-1]
    assert names(checkpoints) == ["checkpoint-2", "checkpoint-3", "checkpoint-4", "checkpoint-5"]
    flip(checkpoints / "checkpoint-4" / "optimizer.pt")
    assert run("prune", checkpoints, "--keep", 2)[1].splitlines()[-1] == "nothing to remove"


# --------------------------------------------------------------------------------------------------------------- clean


def test_clean_takes_what_was_left_and_nothing_else(checkpoints: Path, run: Run, settled: None) -> None:
    for name in ("checkpoint-9.partial", "aside-checkpoint-3-ab12", ".cogumi-saving.mine", "merged.partial-0123abcd"):
        (checkpoints / name).mkdir()
    (checkpoints / ".cogumi-trash-file").touch()
    (checkpoints / ".cogumi-trash-link").symlink_to(checkpoints / "checkpoint-5")
    before = names(checkpoints)
    for name in (".cogumi-saving/checkpoint-6", ".cogumi-trash-checkpoint-0-ab12"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "model.safetensors").write_bytes(bytes(100_000))
    left = names(checkpoints)
    status, output, error = run("clean", checkpoints, "--dry-run")
    assert (status, error, names(checkpoints)) == (0, "", left)
    assert output.count("would go: ") == 2
    status, output, error = run("clean", checkpoints.parent)
    assert (status, error, names(checkpoints)) == (0, "", before)
    assert output.count("removed: ") == 2
    assert run("clean", checkpoints) == (0, f"{checkpoints}: nothing to clean\n", "")
    assert json.loads(run("clean", checkpoints, "--json")[1]) == {"dry_run": False, "removed": [], "kept": []}


def test_clean_leaves_what_is_in_use(checkpoints: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = checkpoints / ".cogumi-saving" / "checkpoint-6"
    staged.mkdir(parents=True)
    (staged / "x").touch()
    output = printed(run, "clean", checkpoints)
    assert re.search(r"kept: .*\.cogumi-saving \(unfinished save, \d+\.\d kB\): changed \d+ s ago", output)
    monkeypatch.setattr(usage, "SETTLED_SECONDS", -1.0)
    for locked in (checkpoints, staged.parent):
        with lock_directory(locked):
            assert "a training or a merge has it locked" in run("clean", checkpoints)[1]
    assert (staged / "x").exists()
    assert "removed" in run("clean", checkpoints)[1]


def test_clean_leaves_a_save_that_only_its_rename_was_missing(checkpoints: Path, run: Run, settled: None) -> None:
    staged = checkpoints / ".cogumi-saving" / "checkpoint-5"
    staged.parent.mkdir()
    (checkpoints / "checkpoint-5").rename(staged)
    output = run("clean", checkpoints)[1]
    assert output.startswith("kept: ")
    assert "checkpoint-5 in it is whole and verified; move it to" in output
    assert json.loads(run("clean", checkpoints, "--json")[1])["kept"][0]["reason"]
    flip(staged / "optimizer.pt")
    assert run("clean", checkpoints)[1].startswith("removed: ")


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_each_mistake_is_one_line_and_status_2(tmp_path: Path, run: Run, golden: Golden) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "checkpoint-keep-this").mkdir()
    commands: list[tuple[Any, ...]] = [("verify",), ("resume-point",), ("prune", "--keep", 2), ("clean",), ("status",)]
    places = [(command, tmp_path / place) for command in commands for place in ("gone", "file")]
    places += [(command, tmp_path / "empty") for command in (commands[0], commands[2])]
    mistakes = {(*command, place): str(place) for command, place in places}
    mistakes["prune", tmp_path / "empty", "--keep", 1] = "--keep 1"
    before = sorted(tmp_path.rglob("*"))
    for words, names_it in mistakes.items():
        error = refused(run, words, names_it)
        assert run(*words, "--json") == (2, "", error)
        golden("disk", f"{words[0]}: {error}")
    assert sorted(tmp_path.rglob("*")) == before


def refused(run: Run, words: tuple[Any, ...], names_it: str) -> str:
    status, output, error = run(*words)
    assert (status, output) == (2, ""), (words, error)
    assert error.startswith("cogumi: "), error
    assert error.count("\n") == 1, error
    assert names_it in error, error
    return error


# -------------------------------------------------------------------------------------------------------------- predict


@pytest.fixture(params=["sft", "gspo"])
def config(request: pytest.FixtureRequest, tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Path:
    """The YAML of a short run that saves twice."""
    train: dict[str, Any] = {
        "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1,
        "gradient_checkpointing": False, "learning_rate": 1e-2,
    }  # fmt: skip
    if request.param == "gspo":
        train |= {"loss_type": "gspo", "num_generations": 4, "steps_per_generation": 2, "max_completion_length": 8}
    values = {
        "model": {"name": str(tiny_model)},
        "data": {"source": str(code_parquet), "max_rows": 40, "fim": {"max_length": 160, "middle_chars": [8, 32]}},
        "train": train,
        "cogumi": {"method": request.param, "run_dir": str(tmp_path / "out" / "run")},
    }
    path = tmp_path / f"{request.param}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_predict_says_what_the_run_then_writes(
    config: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    import cogumi

    output = printed(run, "predict", config, "--json")
    assert not (tmp_path / "out").exists()
    ahead = json.loads(output)
    home = cogumi.train(config).run_dir
    capsys.readouterr()
    newest = home / "checkpoints" / "checkpoint-4"
    assert ahead["checkpoint"] == pytest.approx(bytes_of(newest), rel=0.05)
    (disk,) = ahead["disks"]
    expected = {need["what"]: need["end"] for need in disk["needs"]}
    assert expected["adapter"] == pytest.approx(bytes_of(home / "adapter"), rel=0.05)
    assert expected["merged model"] == pytest.approx(bytes_of(home / "merged"), rel=0.05)
    assert (ahead["saves"], ahead["held"], ahead["fits"], ahead["notes"]) == (2, 2, True, [])
    assert disk["wanted"] == 2 * ahead["checkpoint"] + expected["adapter"] + expected["merged model"]
    output = printed(run, "predict", home)
    assert max(map(len, output.splitlines())) <= 80
    assert "one checkpoint is" in output
    over = json.loads(run("predict", home, "--json")[1])
    assert (over["saves"], over["disks"][0]["wanted"]) == (0, 0)


@pytest.mark.parametrize("config", ["sft"], indirect=True)
def test_predict_where_it_does_not_fit(config: Path, mount: Mount, run: Run) -> None:
    small = mount(options="size=900k")
    output = printed(run, "predict", config, f"cogumi.run_dir={small}/run", "train.save_total_limit=3", status=1)
    assert max(map(len, output.splitlines())) <= 80
    assert "what helps: " in whole(output)
    assert "save_total_limit: 2 takes " in whole(output)
    assert "cogumi.merge=false takes " in whole(output)
    parsed = json.loads(run("predict", config, f"cogumi.run_dir={small}/run", "--json")[1])
    assert parsed["fits"] is False
    assert parsed["disks"][0]["refusal"].endswith("B are missing")
    assert parsed["disks"][0]["short"] > 0
    (small / "run").mkdir()
    (small / "run" / "config.yaml").write_text(config.read_text())  # it has begun, and not saved yet
    output = printed(run, "predict", small / "run", status=1)
    assert "what helps: " in whole(output)


def test_predict_takes_the_small_base_and_the_configs_that_come_with_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE)
    smoke = Path(__file__).parents[1] / "configs" / "smoke" / "sft.yaml"
    parsed = json.loads(run("predict", smoke, f"cogumi.run_dir={tmp_path}/run", "--json")[1])
    assert parsed["fits"] is True
    assert parsed["saves"] == 2
    assert parsed["checkpoint"] > 1_000_000


@pytest.mark.parametrize("config", ["sft"], indirect=True)
def test_predict_says_what_it_cannot_know(
    config: Path, tiny_model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub's model whose config is in the cache, and whose weights are not, without a network."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "hub" / "models--some--body"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    shutil.copy(tiny_model / "config.json", snapshot)
    output = printed(run, "predict", config, "model.name=some/body")
    output = " ".join(output.split())  # which a terminal breaks into lines
    assert "what the download of some/body takes in" in output
    assert "is not known" in output
    assert "some/body has no tokenizer that can be loaded" in output
    for path in tiny_model.iterdir():
        shutil.copy(path, snapshot)
    parsed = json.loads(run("predict", config, "model.name=some/body", "--json")[1])
    assert parsed["notes"] == []
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model.safetensors").rename(snapshot / "model-1.safetensors")
    assert "is not known" in " ".join(run("predict", config, "model.name=some/body")[1].split())


@pytest.mark.parametrize("config", ["sft"], indirect=True)
def test_the_download_is_what_the_hub_says_and_the_cache_lacks(
    config: Path, tiny_model: Path, hub: HubServer, tmp_path: Path
) -> None:
    """Of a hub that answers, asked by a process of its own; no weights are downloaded for it."""
    LlamaForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path / "model", max_shard_size="300KB")
    for path in tiny_model.glob("*token*"):
        shutil.copy(path, tmp_path / "model")
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 1
    hub.publish("some/body", tmp_path / "model")
    environment = os.environ | hub.environment(tmp_path / "cache")

    def predict() -> int:
        words = ["disk", "predict", str(config), "model.name=some/body", "--json"]
        done = prepared_process.run(words, tmp_path, environment)
        assert done.returncode == 0, done.stderr
        parsed = json.loads(done.stdout)
        assert parsed["notes"] == []
        return sum(need["end"] for disk in parsed["disks"] for need in disk["needs"] if need["what"] == DOWNLOAD)

    expected = predict()
    (snapshot,) = (tmp_path / "cache" / "hub").glob("models--some--body/snapshots/*")
    lacking = [path for path in (tmp_path / "model").iterdir() if not (snapshot / path.name).exists()]
    assert set(shards) <= set(lacking)
    assert expected == sum(path.stat().st_size for path in lacking)
    shutil.copy(shards[0], snapshot)
    assert predict() == expected - shards[0].stat().st_size


@pytest.mark.parametrize("config", ["sft"], indirect=True)
def test_a_mistake_in_what_is_to_be_predicted(config: Path, tmp_path: Path, run: Run, golden: Golden) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("nothing: here\n")
    (tmp_path / "typo.yaml").write_text(config.read_text().replace("save_steps", "save_step"))
    mistakes: list[tuple[tuple[Any, ...], str]] = [
        ((tmp_path / "typo.yaml",), "train.save_step`"), ((tmp_path / "gone.yaml",), str(tmp_path / "gone.yaml")),
        ((config, "train.max_stepz=5"), "train.max_stepz`"), ((config, "lora.target_modules=[nowhere]"), "nowhere"),
        ((config, f"model.name={tmp_path / 'empty'}"), "model.name"),
        ((tmp_path / "empty",), str(tmp_path / "empty")), ((tmp_path / "run",), "nothing"),
        ((tmp_path / "run", "train.max_steps=5"), "train.max_steps=5"),
    ]  # fmt: skip
    for words, names_it in mistakes:
        error = refused(run, ("predict", *words), names_it)
        if names_it != "nowhere":  # which PEFT words
            golden("disk", f"predict: {error}")
