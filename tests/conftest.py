"""What the tests share: a tiny real model with a real tokenizer, made once a session, and a cache of its own."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from finished_runs import (  # noqa: F401
    _modules_are_not_collected,
    finished_chat,
    finished_dpo,
    finished_gspo,
    finished_qlora,
    finished_sft,
    train_once,
)

from cogumi.stack.gpus import keep_compiled_code

keep_compiled_code()  # as a run does: the variables are the same before and after the first run of a process

REPOSITORY = Path(__file__).parents[1]
pytest_plugins = ["golden"]
if Path("/dev/nvidia0").exists():
    # Oracles and fixtures are tensors of the CPU, beside a GPU as well. What a card does is measured by benchmarks/gpu.py.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Tiny models are slower on several threads, and sums over a number of them that differs from run to run are not equal bit
# for bit. What is to hold for several threads is tested in processes of their own.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(not mark.args for mark in item.iter_markers("slow")):
            raise pytest.UsageError(f"{item.nodeid}: pytest.mark.slow says why: what takes long?")


@pytest.fixture(scope="session", autouse=True)
def _no_signal_ignored() -> None:
    """Under nohup SIGHUP is ignored, behind `&` of a script SIGINT, and every process started here would inherit that."""
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True)
def _no_optimizer_overrides() -> None:
    """Forget bitsandbytes' embeddings in 32 bits: it knows them by `id`, which a tensor of the next test may have again."""
    if (optimizers := sys.modules.get("bitsandbytes.optim")) is not None:
        optimizers.GlobalOptimManager.get_instance().initialize()


@pytest.fixture(scope="module")
def float64_head() -> Iterator[None]:
    """TRL's losses through logits in the model's dtype: its own head rounds a float64 model's to float32."""
    from dense_head import ChunkedLogProbFunction
    from trl.trainer import utils

    from cogumi.patches import replaced
    from cogumi.patches.trl_internals import HEAD

    with replaced(utils, {HEAD: ChunkedLogProbFunction}):
        yield


@pytest.fixture(scope="session")
def sources() -> list[str]:
    """Source text of a few hundred functions of the standard library."""
    from cogumi.data.stdlib_sample import sample_path

    return pl.read_parquet(sample_path())["source"].head(400).to_list()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, sources: list[str]) -> Path:
    """A directory with a random two-layer Llama in bfloat16 and a byte-level tokenizer with FIM tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from cogumi.models.small_base import train_tokenizer

    path = tmp_path_factory.mktemp("tiny-model")
    tokenizer = train_tokenizer(sources)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def code_parquet(tmp_path_factory: pytest.TempPathFactory, sources: list[str]) -> Path:
    path = tmp_path_factory.mktemp("data") / "code.parquet"
    pl.DataFrame({"source": sources}).write_parquet(path)
    return path


@pytest.fixture
def sft(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> dict[str, Any]:
    """The configuration of a small SFT run: six steps, nothing saved on the way, nothing merged."""
    return {
        "model": {"name": str(tiny_model)},
        "lora": {"r": 4},
        "data": {
            "source": str(code_parquet),
            "eval_rows": 8,
            "max_rows": 15,  # too few for the question whether prompts and answers belong together: a third of a tiny run
            "fim": {"max_length": 160, "middle_chars": [8, 32]},
        },
        "train": {
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "gradient_checkpointing": False,
            "save_strategy": "no",
        },
        "cogumi": {"method": "sft", "run_dir": str(tmp_path / "run"), "merge": False},
    }


@pytest.fixture
def none_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Detached runs compute on one thread, as here, and those still at work at the end of a test are killed."""
    from cogumi.core.run_directory import START, is_running, read_json

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    for path in tmp_path.rglob(START):
        if is_running(read_json(path)) and read_json(path)["pid"] != os.getpid():
            os.kill(read_json(path)["pid"], signal.SIGKILL)


@pytest.fixture
def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: (exit status, standard output, standard error)."""
    from cogumi.cli.app import main

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cogumi", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            main()
        output = capsys.readouterr()
        return int(stopped.value.code or 0), output.out, output.err

    return run


@pytest.fixture
def for_commands(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of this process on one thread: one prepared process (tests/prepared_process.py) serves all such tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return dict(os.environ)


def letters(completions: list[str], **_: Any) -> list[float]:
    """A reward that any model earns some of: the share of letters."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def make_trainer(tiny_model: Path, tmp_path: Path, sources: list[str]) -> Callable[..., Any]:
    """A real GRPOTrainer on the tiny model in float32, with LoRA; keywords go to GRPOConfig, or are those named here."""

    def make(
        loss_type: str = "gspo", lora: dict[str, Any] | None = None, cls: Any = None, rows: int = 16, **config: Any
    ) -> Any:
        import peft
        import trl
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import cogumi

        cogumi.patch()
        args = trl.GRPOConfig(
            **{
                "output_dir": str(tmp_path / "trainer"),
                "loss_type": loss_type,
                "per_device_train_batch_size": 4,
                "steps_per_generation": 2,
                "num_generations": 4,
                "max_completion_length": 8,
                "max_steps": 2,
                "learning_rate": 1e-3,
                "logging_steps": 1,
                "save_strategy": "no",
                "bf16": False,
                "report_to": "none",
                "gradient_checkpointing": False,
            }
            | config
        )
        return (cls or trl.GRPOTrainer)(
            model=AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
            reward_funcs=letters,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [text[:40] for text in sources[:rows]]}),
            eval_dataset=Dataset.from_dict({"prompt": [text[:40] for text in sources[-2:]]}),
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
            peft_config=peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **(lora or {})}),
        )

    return make


@pytest.fixture
def reads_4bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitsandbytes reads 4-bit weights of any width, also on a CPU with AVX512.

    There 0.50.2 misreads rows that end inside a block (`reads_4bit_rows`); as one row it reads them all.
    """
    import copy

    from bitsandbytes import functional

    original = functional.dequantize_4bit

    def as_one_row(packed: torch.Tensor, quant_state: Any = None, *args: Any, **named: Any) -> torch.Tensor:
        if quant_state is None:
            return original(packed, quant_state, *args, **named)
        flat = copy.copy(quant_state)
        flat.shape = torch.Size((1, quant_state.shape.numel()))
        read = original(packed, flat, *args, **named).reshape(quant_state.shape)
        return read.t() if packed.shape[0] == 1 else read  # as it returns what is given transposed

    monkeypatch.setattr(functional, "dequantize_4bit", as_one_row)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Any]:
    """A hub of the test's own (tests/hub_server.py)."""
    from hub_server import hub_server

    with hub_server(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a filesystem. Skips where that takes rights, or parts of the kernel, that are not to be had."""
    from disk_mounts import mounting

    with mounting(tmp_path) as mount_one:
        yield mount_one


@pytest.fixture
def prepared(for_commands: dict[str, str], tmp_path: Path) -> str:
    """For `sys.executable`: what is started is in no session of its own, but needs no seconds of imports."""
    import prepared_process

    return prepared_process.as_program(tmp_path / "python", for_commands)


@pytest.fixture
def prepared_workers(prepared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that this one starts, such as the forecast's, need no seconds of imports."""
    monkeypatch.setattr(sys, "executable", prepared)
