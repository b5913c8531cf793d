"""Runs that came to their end, each trained once a session for all workers, for tests that only read what a run leaves.

`finished_sft`, `finished_chat`, `finished_dpo`, `finished_gspo` and `finished_qlora` are shared and compared at the end of a
session with what they were: a test that changes a run copies its directory.
"""

import gc
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import run_config
from filelock import FileLock
from qlora_runs import qlora
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cogumi.core.run_directory import append_jsonl

HUB_TOKEN = "hf_" + "s3cret" * 6  # in the configuration of the SFT run, for tests of what hides it


@dataclass(frozen=True)
class FinishedRun:
    """What `cogumi.train` returned, the SHA-256 of the base's files before it, and the directory in which it was called."""

    result: Any
    base_before: dict[str, str]
    called_in: Path

    @property
    def home(self) -> Path:
        return Path(self.result.run_dir)


@pytest.fixture(scope="module", autouse=True)
def _modules_are_not_collected() -> None:
    """Full collections skip what is there before a module of tests: libraries of over a million objects.

    A training makes two collections itself, which took a third of the time of a tiny one.
    """
    gc.collect()
    gc.freeze()


def hashes(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def shared_by_workers(factory: pytest.TempPathFactory) -> Path:
    """A directory of this session, the same one for every worker of xdist."""
    base = factory.getbasetemp()
    home = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "finished-runs"
    home.mkdir(exist_ok=True)
    return home


@pytest.fixture(scope="session")
def train_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str, Path, dict[str, Any]], FinishedRun]]:
    """(name, base, configuration) -> the run: trained by the worker that asks first, while the others wait for it."""
    made: list[tuple[FinishedRun, dict[str, str]]] = []

    def run(name: str, base: Path, config: dict[str, Any]) -> FinishedRun:
        home = shared_by_workers(tmp_path_factory)
        record = home / f"{name}.pickle"
        with FileLock(f"{record}.lock"):
            if not record.exists():
                record.write_bytes(pickle.dumps(train_in(home / name, base, config)))
        made.append(pickle.loads(record.read_bytes()))
        return made[-1][0]

    yield run
    changed = [str(one.home) for one, left in made if hashes(one.home) != left]
    assert not changed, f"a test changed a run that others read: {', '.join(changed)}"


def train_in(directory: Path, base: Path, config: dict[str, Any]) -> tuple[FinishedRun, dict[str, str]]:
    import cogumi

    called_in = directory / "called-in"
    called_in.mkdir(parents=True)
    before = hashes(base)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(called_in)
        result = cogumi.train(config, cogumi__run_dir=str(directory / "run"))
    return FinishedRun(result, before, called_in), hashes(result.run_dir)


def small(model: Path, code: Path, train: dict[str, Any], **ours: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(model)},
        "lora": {"r": 4},
        "data": {"source": str(code), "eval_rows": 8, "fim": {"max_length": 160, "middle_chars": [8, 32]}},
        "train": {"gradient_checkpointing": False, **train},
        "cogumi": {"compile": "off", **ours},
    }


@pytest.fixture(scope="session")
def finished_sft(train_once: Any, tiny_model: Path, code_parquet: Path) -> FinishedRun:
    """Six steps with a checkpoint, samples and a held-out loss at the third, merged."""
    train = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "hub_token": HUB_TOKEN,
    }
    config = small(tiny_model, code_parquet, train, method="sft", samples_every=3, price_per_hour=7200.0)
    return train_once("sft", tiny_model, config)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def finished_chat(train_once: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Forty steps on questions and answers with a template, in float32: then adapter and merged model compute the same.
    The base's random weights are large enough for an adapter to learn to write words."""
    home = tmp_path_factory.mktemp("chat")
    config = AutoConfig.from_pretrained(tiny_model, initializer_range=0.3, dtype=torch.float32)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(home / "base")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(home / "base")
    for one, other in product("abcdef", "uvwxyz"):
        prompt = [{"role": "user", "content": f"add {one} to {other}"}]
        completion = [{"role": "assistant", "content": f"return {other} + {one}; done"}]
        append_jsonl(home / "rows.jsonl", {"prompt": prompt, "completion": completion})
    values = run_config(
        "sft", home / "base", home / "rows.jsonl", "run", lora={"r": 16},
        data_section={"format": "prompt_completion", "eval_rows": 4},
        train={"max_steps": 40, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "save_strategy": "no",
               "chat_template_path": "cogumi:tulu"},
        cogumi={"merge": True, "compile": "off", "stop": ["; done"]},
    )  # fmt: skip
    return train_once("chat", home / "base", values)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def finished_gspo(train_once: Any, tiny_model: Path, code_parquet: Path) -> FinishedRun:
    """Four steps, two to a rollout of 16 completions, by the defaults of loss and logging, merged."""
    train = {
        "max_steps": 4,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "save_strategy": "no",
    }
    config = small(tiny_model, code_parquet, train, method="gspo", rewards=["edit_similarity", "parses"])
    return train_once("gspo", tiny_model, config)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def finished_dpo(train_once: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Four steps on pairs of which the chosen answer returns something and the rejected one does not, merged."""
    pairs = [{"prompt": f"def f{n}(x):", "chosen": f" return x + {n}", "rejected": " pass"} for n in range(24)]
    source = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    train = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
    }
    config = small(tiny_model, source, train, method="dpo")
    config["data"] = {"source": str(source), "format": "preference", "eval_rows": 4}
    return train_once("dpo", tiny_model, config)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def finished_qlora(train_once: Any, tiny_model: Path, code_parquet: Path) -> FinishedRun:
    """Four steps of SFT on four bits, merged into the full-precision base."""
    return train_once("qlora", tiny_model, qlora(tiny_model, code_parquet))  # type: ignore[no-any-return]
