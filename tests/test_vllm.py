"""A real vLLM on the CPU under TRL's real GRPOTrainer: `make test-vllm` runs all of this; without vLLM nothing of it."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.vllm_run import PROMPTS, RESULT

ROOT = Path(__file__).parents[1]
BASE = ROOT / "cogumi" / "models" / "small-base"
PORT = 8765

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="`make test-vllm` installs it"),
    pytest.mark.timeout(3600),  # a CPU without AVX-512 takes 36 times as long in bfloat16 as in float32
]


def config(tmp_path: Path, name: str = "run", **train: Any) -> dict[str, Any]:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": prompt, "completion": "    return b\n"}) + "\n" for prompt in PROMPTS)
    )
    return {
        "model": {"name": str(BASE), "dtype": "bfloat16"},
        "data": {"source": str(rows), "format": "prompt_completion", "eval_rows": 2},
        "lora": {"r": 8, "target_modules": "all-linear", "lora_dropout": 0.0},
        "cogumi": {
            "method": "gspo", "backend": "trl", "merge": False, "samples_every": 1000, "run_dir": str(tmp_path / name),
            "rewards": [f"{ROOT / 'tests' / 'vllm_run.py'}:letters"],
        },
        "train": {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128, "vllm_gpu_memory_utilization": 0.1,
            "max_completion_length": 16, "num_generations": 8, "per_device_train_batch_size": 16,
            "gradient_accumulation_steps": 1, "steps_per_generation": 1, "max_steps": 20, "learning_rate": 1e-3,
            "save_steps": 5, "bf16": False, **train,
        },
    }  # fmt: skip


def in_a_process(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What `tests/vllm_run.py` found: the engine's greedy tokens after each sync, and the run's last flags."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm_run", json.dumps({"config": config, **options})],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    parsed: dict[str, Any] = json.loads(line.removeprefix(RESULT))
    assert "refused" not in parsed, parsed
    return parsed


def levels(found: dict[str, Any]) -> dict[str, str]:
    return {flag["name"]: flag["level"] for flag in found["flags"]["flags"]}


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    (file,) = [*run_dir.glob("adapter/adapter_model.safetensors"), *run_dir.glob("merged/model.safetensors")]
    return load_file(file)


def assert_engines_agree(found: dict[str, Any], syncs: int, apart: float) -> None:
    """`Must reach` of the engine: after every sync 95 % of the greedy tokens of 64 prompts, and the log-probabilities."""
    assert len(found["said"]) == syncs
    for step, said in enumerate(found["said"]):
        assert said["agree"] >= 0.95, (step, said)
        assert said["apart"] <= apart, (step, said)


WAYS: dict[str, dict[str, Any]] = {
    "merged": {},
    "adapter": {"cogumi": {"sampler_weights": "adapter"}},
    "full": {
        "cogumi": {"tuning": "full"},
        "lora": None,
        "train": {"bf16": True, "use_cpu": True, "learning_rate": 1e-4},
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps_agree_after_every_sync_and_resume_to_the_bit(way: str, tmp_path: Path) -> None:
    """In bfloat16, with the LM head in float32: logits that are rounded to 8 bits are 0.03 nats apart by themselves."""
    asked = config(tmp_path, "whole")
    asked["cogumi"]["fp32_lm_head"] = True
    for section, values in WAYS[way].items():
        asked[section] = asked[section] | values if values else {}
    actual = in_a_process(asked)
    assert_engines_agree(actual, syncs=20, apart=2e-2)
    # Not told in full fine-tuning: at its small rate the log-probabilities move by less than bfloat16's rounding.
    assert levels(actual).get("sampler's weights") == (None if way == "full" else "green")
    assert levels(actual)["sampler and trainer"] == "green"

    asked["cogumi"] |= {"run_dir": str(tmp_path / "parts"), "sanity": 10}
    assert len(in_a_process(asked)["said"]) == 10
    del asked["cogumi"]["sanity"]
    assert_engines_agree(in_a_process(asked), syncs=10, apart=2e-2)
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name, values in whole.items():
        assert torch.equal(values, parts[name]), name


def test_float32_is_sampled_in_float32(tmp_path: Path) -> None:
    asked = config(tmp_path, max_steps=3)
    asked["model"]["dtype"] = "float32"
    assert_engines_agree(in_a_process(asked), syncs=3, apart=1e-5)


def test_an_adapter_has_its_own_scale_in_the_engine(tmp_path: Path) -> None:
    asked = config(tmp_path, max_steps=3)
    asked["model"]["dtype"] = "float32"
    asked["lora"] |= {"use_rslora": True, "lora_alpha": 32}
    asked["cogumi"]["sampler_weights"] = "adapter"
    assert_engines_agree(in_a_process(asked), syncs=3, apart=1e-5)


def test_names_of_vllms_own_sampling_settings_are_known() -> None:
    from cogumi.core.errors import UsageError
    from cogumi.methods.sampler import refuse_unknown_sampling

    def ask(**given: Any) -> None:
        refuse_unknown_sampling(SimpleNamespace(use_vllm=True, generation_kwargs=given))

    ask(seed=3, frequency_penalty=0.1, stop_token_ids=[5], min_tokens=2)
    with pytest.raises(UsageError, match="did you mean frequency_penalty"):
        ask(frequency_penalti=0.1)
    with pytest.raises(UsageError, match=r"set train\.num_generations alone"):
        ask(n=3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_skipped_sync_is_red_within_two_rollouts(dtype: str, tmp_path: Path) -> None:
    asked = config(tmp_path, max_steps=5, learning_rate=1e-4)
    asked["model"]["dtype"] = dtype
    actual = in_a_process(asked, break_after=3)  # the rollouts of steps 4 and 5 are of step 3's weights
    assert levels(actual)["sampler's weights"] == "red"


def test_a_head_that_stays_old_is_seen(tmp_path: Path) -> None:
    """The tied LM head of vLLM's CPU backend is a packed copy, which its own reload forgets."""
    asked = config(tmp_path, max_steps=8)
    asked["model"]["dtype"] = "float32"
    asked["cogumi"]["tuning"], asked["lora"] = "full", {}
    actual = in_a_process(asked, tied_head=False)
    assert actual["said"][-1]["apart"] > 0.01
    assert levels(actual)["sampler's weights"] == "red"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """vLLM's own server on the CPU, in float32."""
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(BASE), "--port", str(PORT)]
    words += ["--dtype", "float32", "--max-model-len", "128", "--gpu-memory-utilization", "0.1", "--enforce-eager"]
    words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--max-num-seqs", "64"]
    words += ["--worker-extension-cls", "cogumi.patches.vllm_engine.ServerWorker"]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + 180
    try:
        while True:
            up = process.poll() is None and time.monotonic() < deadline
            assert up, (tmp_path / "server.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://localhost:{PORT}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield PORT
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_is_given_the_weights_and_agrees(server: int, tmp_path: Path) -> None:
    asked = config(
        tmp_path, max_steps=6, learning_rate=1e-4, vllm_mode="server", vllm_server_port=server, vllm_server_timeout=60
    )
    asked["model"]["dtype"] = "float32"
    actual = in_a_process(asked)
    assert levels(actual)["sampler's weights"] == "green"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lags = [row["sampling/probe/lag"] for row in rows if "sampling/probe/lag" in row]
    assert len(lags) == 5
    assert max(lags) < 0.01
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-5 for row in rows if "reward" in row)


def test_another_run_may_follow_in_the_same_process(tmp_path: Path) -> None:
    """TRL describes a launch to vLLM in environment variables, by which the next run would take itself for a part of one."""
    code = """
import json, sys
import cogumi
first, second = json.loads(sys.argv[1])
cogumi.train(first)
assert cogumi.train(second).metrics
"""
    first, second = config(tmp_path, "first", max_steps=2), config(tmp_path, "second", max_steps=2)
    for name in [key for key in second["train"] if key.startswith(("use_vllm", "vllm"))]:
        del second["train"][name]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    words = [sys.executable, "-c", code, json.dumps([first, second])]
    done = subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
