"""What is refused, and chosen, before anything is paid: without torch where that is possible, always in one line."""

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import huggingface_hub
import prepared_process
import pytest
import yaml
from finished_runs import FinishedRun
from hub_server import HubServer, hub_server

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.errors import RefusedAtSetup, UsageError
from cogumi.runs import entry
from cogumi.stack import gpus
from cogumi.stack.gpus import COMPILED, choose_gpu, keep_compiled_code, refuse_ranks, refuse_several_gpus
from cogumi.telemetry import trackers

Config = dict[str, Any]
# Printed by `nvidia-smi --query-gpu=index,uuid,memory.free,name --format=csv,noheader,nounits`.
TWO = """\
0, GPU-1f2e3d4c-0000-4111-8222-333344445555, 1210, NVIDIA H100 80GB HBM3
1, GPU-a9b8c7d6-0000-4111-8222-333344445555, 80994, NVIDIA H100 80GB HBM3
"""
FIRST, SECOND = "0", "1"

WITHOUT_TORCH = """
import sys, contextlib, io, cogumi
from cogumi.cli import app as cli
def refused(call, *given, **words):
    try: call(*given, **words)
    except cogumi.UsageError as error: print(error)
for call in (cogumi.train, cogumi.start, cogumi.preview, cogumi.preflight):
    refused(call, "smoke/sft", train__max_stepss=5)
refused(cogumi.preview, "smoke/sft", model__name="./sft/mergd")
for call in (cogumi.train, cogumi.start, cogumi.preview, cogumi.preflight):
    refused(call, "smoke/sft", data__source="gone/rows.parquet")
    refused(call, "smoke/sft", data__source=None)
    refused(call, "smoke/sft", data__source=None, data__mix=[{"source": "cogumi:stdlib"}, {"source": "rows/*.jsonl"}])
for command in ("train", "start", "preview", "preflight"):
    sys.argv = ["cogumi", command, "smoke/sft", "train.optim=adamw_torhc"]
    error = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(error): cli.main()
    print(error.getvalue().strip())
print(sorted({"torch", "transformers", "trl", "peft", "datasets", "polars"} & set(sys.modules)))
"""
# None of these, one after the other in one process, loads what takes seconds.
LOOKS = (
    "import cogumi",
    "run = cogumi.attach('run'); run.dashboard(); run.wait(); run.stop(); assert 'polars' not in sys.modules",
    "from cogumi.notebook import chat, panel; panel.write_report('run')",
    "form = cogumi.configure('smoke/sft'); form.panel.show(); assert not form.problem",
    "import contextlib, pathlib\nfrom cogumi.evaluation.saved_models import read_setup\n"
    "with contextlib.suppress(cogumi.UsageError): read_setup(pathlib.Path('none'))",
)


def test_what_only_looks_imports_no_torch(finished_sft: FinishedRun, tmp_path: Path) -> None:
    shutil.copytree(finished_sft.home, tmp_path / "run")
    heavy = {"torch", "transformers", "trl", "peft", "datasets", "unsloth", "matplotlib"}
    loaded = f"import sys; loaded = {heavy} & sys.modules.keys(); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", f"\n{loaded}\n".join([*LOOKS, ""])], cwd=tmp_path, check=True)


def test_a_misspelt_key_or_value_or_a_missing_source_is_refused_without_importing_torch(tmp_path: Path) -> None:
    (tmp_path / "sft" / "merged").mkdir(parents=True)
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    *lines, imported = done.stdout.splitlines()
    assert [line for line in lines if "did you mean train.max_steps?" in line] == lines[:4], done.stdout + done.stderr
    near = "no model at './sft/mergd': there is no such directory; there is sft/merged; give a directory"
    assert near in lines.pop(4)
    said = (
        "data.source: gone/rows.parquet: no such file",
        "`data.source` is missing",
        "data.mix: rows/*.jsonl: no file matches",
    )
    assert [expected in line for expected, line in zip(said * 4, lines[4:16], strict=True)] == [True] * 12, done.stdout
    assert [line for line in lines if "did you mean adamw_torch?" in line] == lines[16:], done.stdout + done.stderr
    assert len(lines) == 20
    assert imported == "[]"
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]


# ------------------------------------------------------------------------------------------------------------- launchers


@pytest.mark.parametrize("launcher", ["torch.distributed.run", "accelerate.commands.launch"])
def test_every_rank_of_a_launcher_is_refused(
    launcher: str, sft: Config, tmp_path: Path, for_commands: dict[str, str]
) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(sft))
    count = "--standalone --nproc-per-node 2"
    if "accelerate" in launcher:
        count = "--multi_gpu --num_processes 2 --main_process_port 0"
    words = f"-m {launcher} {count} -m cogumi train tiny.yaml train.max_steps=5".split()
    command = [*prepared_process.python(for_commands), *words]
    done = subprocess.run(command, cwd=tmp_path, env=for_commands, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("cogumi: ")]
    assert said, done.stderr  # of each rank, unless the launcher ended the second when the first had
    for line in said:
        assert "WORLD_SIZE" in line
        assert line.endswith("run: cogumi train tiny.yaml train.max_steps=5")
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("environment", "fine"),
    [
        ({}, True),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "-1"}, True),
        ({"WORLD_SIZE": "1"}, True),
        ({"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"}, False),
        ({"WORLD_SIZE": "2"}, False),
        ({"LOCAL_RANK": "0"}, False),
    ],
)
def test_one_process_is_a_run_and_a_rank_is_not(environment: dict[str, str], fine: bool) -> None:
    with nullcontext() if fine else pytest.raises(UsageError, match="run: cogumi train x"):
        refuse_ranks(environment, 1, "cogumi train x")


def test_a_launcher_and_the_config_say_the_same_number(two_gpus: None) -> None:
    rank = {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"}
    refuse_ranks(rank, 8, "cogumi train x")
    refuse_ranks(rank, "all", "cogumi train x")
    with pytest.raises(UsageError, match=r"process 3 of 8 .*cogumi.processes is 2; set cogumi.processes to 8, or run"):
        refuse_ranks(rank, 2, "cogumi train x")
    with pytest.raises(UsageError, match="of several"):
        refuse_ranks({"LOCAL_RANK": "0"}, "all", "cogumi train x")
    assert gpus.count_processes("all", rank) == 8
    assert gpus.count_processes("all", {}) == 2  # the GPUs that are there
    assert gpus.count_processes("all", {"CUDA_VISIBLE_DEVICES": "3"}) == 1
    assert gpus.count_processes("all", {"CUDA_VISIBLE_DEVICES": ""}) == 1
    assert gpus.count_processes(4, {}) == 4
    gpus.refuse_missing_gpus(2, {})
    gpus.refuse_missing_gpus(4, {"CUDA_VISIBLE_DEVICES": ""})  # on a CPU as many as are asked for
    with pytest.raises(UsageError, match=r"cogumi\.processes: 4 processes, and 2 GPUs; set it to 2, or to all"):
        gpus.refuse_missing_gpus(4, {})


def test_train_and_start_of_a_script_are_refused_in_a_rank(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["mine.py", "fast"])
    for call in (cogumi.train, cogumi.start):
        with pytest.raises(UsageError, match=r"run: python mine\.py fast"):
            call(sft)
    assert entry.format_command(["/usr/bin/cogumi", "train", "a b.yaml"]) == "cogumi train 'a b.yaml'"


# ------------------------------------------------------------------------------------------------------------------ GPUs


@pytest.mark.parametrize(
    ("listed", "value"),
    [
        (TWO, SECOND),
        (TWO.splitlines()[0], None),
        ("", None),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", None),
        (TWO.replace("80994", "[N/A]"), FIRST),
        (TWO.replace("1210", "80994"), FIRST),
        (TWO.replace("GPU-a9b8", "MIG-a9b8"), "MIG-a9b8c7d6-0000-4111-8222-333344445555"),  # which has no index
    ],
)
def test_the_gpu_with_the_most_free_memory_is_chosen(listed: str, value: str | None) -> None:
    chosen = choose_gpu(listed)
    assert (chosen[0] if chosen else None) == value
    if value == SECOND:
        assert chosen is not None
        assert "GPU 1 (NVIDIA H100 80GB HBM3)" in chosen[1]
        assert "79.1 GiB, of 2" in chosen[1]


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The driver's tool is a stand-in, here where there is no GPU."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{TWO}END\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken away after it
        monkeypatch.delenv(name)
    gpus.use_one_gpu.cache_clear()
    yield
    gpus.use_one_gpu.cache_clear()


@pytest.mark.usefixtures("two_gpus")
def test_a_process_in_which_cuda_has_started_keeps_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "cuda_has_started", lambda: True)
    assert gpus.use_one_gpu() is None
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setattr(gpus, "cuda_has_started", lambda: False)
    gpus.use_one_gpu.cache_clear()
    assert gpus.use_one_gpu() == choose_gpu(TWO)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == SECOND
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # nvidia-smi's order
    assert "CUDA_VISIBLE_DEVICES" not in gpus.without_chosen_gpu(
        os.environ
    )  # a start of this kernel chooses for itself
    gpus.use_one_gpu.cache_clear()
    assert gpus.without_chosen_gpu(os.environ)["CUDA_VISIBLE_DEVICES"] == SECOND
    for set_by_the_user in ("1,0", "0", ""):
        gpus.use_one_gpu.cache_clear()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", set_by_the_user)
        assert gpus.use_one_gpu() is None
        assert os.environ["CUDA_VISIBLE_DEVICES"] == set_by_the_user
        assert gpus.without_chosen_gpu(os.environ)["CUDA_VISIBLE_DEVICES"] == set_by_the_user


def test_a_run_on_a_machine_with_two_gpus_sees_one_and_says_which(
    sft: Config, tmp_path: Path, two_gpus: None, for_commands: dict[str, str]
) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(sft))
    words = ("train", "tiny.yaml", "train.max_steps=2", "cogumi.compile=off")
    done = prepared_process.run(words, tmp_path, for_commands)
    assert done.returncode == 0, done.stderr
    assert "steps: 2 (required: 2)" in done.stderr
    assert "pass  adapter: largest change" in done.stderr
    assert re.match(r"run: finished, step 2/2; \d+ of \d+ checks passed; flags: .*green", done.stdout), done.stdout
    log_text = (Path(sft["cogumi"]["run_dir"]) / "run.log").read_text()
    assert f"chosen: CUDA_VISIBLE_DEVICES: {SECOND} " in log_text.replace(" = ", ": ")
    assert "GPU 1 (NVIDIA H100 80GB HBM3) has the most free memory" in log_text


@pytest.mark.usefixtures("two_gpus")
def test_compiled_code_is_kept_by_card_and_versions_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in COMPILED:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # nothing can be made below it
    keep_compiled_code()
    assert not COMPILED.keys() & os.environ.keys()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SECOND)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    keep_compiled_code()
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    place = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert place.parent.parent == tmp_path / "cogumi" / "compiled"
    assert place.parent.name.startswith(f"nvidia-h100-80gb-hbm3-torch-{version('torch')}")
    assert {os.environ[name] for name in ("UNSLOTH_COMPILE_LOCATION", "VLLM_CACHE_ROOT")} == {
        str(place.parent / name) for name in ("unsloth", "vllm")
    }
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    with entry.import_backend(
        load_config({"model": {"name": "x"}, "data": {"source": "x"}, "cogumi": {"method": "sft", "backend": "trl"}})
    ):
        assert os.environ["VLLM_CACHE_ROOT"] == str(place.parent / "vllm")


def test_several_gpus_that_torch_sees_already_are_refused() -> None:
    refuse_several_gpus(0)
    refuse_several_gpus(1)
    with pytest.raises(UsageError, match=r"torch sees 4 GPUs.*CUDA_VISIBLE_DEVICES"):
        refuse_several_gpus(4)


# -------------------------------------------------------------------------------------------------------------- accounts

# A stand-in with the calls that are made of wandb 0.31, and its words; the package itself was tried by hand.
WANDB = """
import os
class errors:
    class Error(Exception): pass
class AuthenticationError(errors.Error): pass
run = None
def init(**_):
    raise errors.Error("returned error 403: permission denied")
class setup:
    class settings: mode = os.environ.get("WANDB_MODE", "online")
def login(verify=True, prompt=True):
    key = os.environ.get("WANDB_API_KEY")
    if key and len(key) < 40:
        raise AuthenticationError(f"WANDB_API_KEY invalid: API key must have 40+ characters, has {len(key)}.")
    return bool(key)
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    place = tmp_path / "site" / "wandb" / "sdk" / "lib"
    place.mkdir(parents=True)
    (place / "config_util.py").write_text("class ConfigError(Exception): pass\n")
    (tmp_path / "site" / "wandb" / "__init__.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    forget_wandb()
    yield
    forget_wandb()  # TRL asks whether there is one each time it saves


def forget_wandb() -> None:
    for name in [module for module in sys.modules if module.partition(".")[0] == "wandb"]:
        del sys.modules[name]


@pytest.mark.usefixtures("wandb")
@pytest.mark.parametrize(
    ("key", "says", "kind"),
    [
        ("", "there is no API key", UsageError),
        ("short", "API key must have 40", UsageError),
        ("k" * 40, "returned error 403", RefusedAtSetup),  # a run that cannot be made: known before the first step
    ],
)
def test_wandb_that_cannot_be_used_is_refused(
    sft: Config, key: str, says: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(kind, match=rf"train.report_to: wandb: .*{says}.*WANDB_MODE=offline") as refused:
        cogumi.train(sft, train__report_to=["wandb"])
    assert "\n" not in str(refused.value)
    assert not Path(sft["cogumi"]["run_dir"]).exists()


@pytest.mark.usefixtures("wandb")
@pytest.mark.parametrize("variables", [{"WANDB_MODE": "offline"}, {"WANDB_API_KEY": "k" * 40}])
def test_wandb_with_a_key_or_without_a_network_is_fine(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trackers.refuse_unreachable({"report_to": "wandb"})


def test_the_directory_that_wandb_leaves_is_not_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not trackers.is_installed("trackio")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with hub_server(tmp_path / "hub") as server:
        # transformers keeps one HfApi, with the endpoint of its first use: another test's, or this one's for the tests after it.
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server


UPLOAD = {"push_to_hub": True, "hub_model_id": "someone/model"}


def test_an_upload_that_cannot_be_is_refused_before_there_is_a_run(
    hub: HubServer, sft: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trackers.refuse_unreachable(UPLOAD)
    trackers.refuse_unreachable({"push_to_hub": False})
    sft["train"] |= UPLOAD

    def refused(**words: Any) -> str:
        with pytest.raises(UsageError, match=r"train\.push_to_hub") as caught:
            cogumi.train(sft, **words)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "train.hub_model_id" in refused(train__hub_model_id=None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "there is no token" in refused()
    assert not Path(sft["cogumi"]["run_dir"]).exists()


def test_an_upload_that_the_hub_refuses_leaves_no_run(hub: HubServer, sft: Config) -> None:
    with pytest.raises(RefusedAtSetup, match="401"):
        cogumi.train(sft | {"train": sft["train"] | UPLOAD}, train__hub_token="hf_another")
    assert not Path(sft["cogumi"]["run_dir"]).exists()


AT_IMPORT = """
import os, sys
class AtTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, AtTorch())
import cogumi
cogumi.preview("smoke/sft")
"""


@pytest.mark.parametrize(
    ("variables", "count"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["open", "set", "policy set"],
)
def test_idle_threads_of_a_run_sleep_unless_the_user_decides(variables: dict[str, str], count: str) -> None:
    """What OpenMP reads when torch is imported, which is the last thing that the process does."""
    others = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", AT_IMPORT]
    assert subprocess.check_output(command, env=others | variables, text=True).split() == [count]
