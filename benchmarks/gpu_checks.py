"""The checks of `python -m benchmarks gpu`: each takes a `Setting` and yields rows. Most are real runs of `cogumi.train`."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import Setting, in_fork, missing_rows, write_model
from benchmarks.harness import Row, missing, row, run_process, values_row

PAPERS_CLIP = {"epsilon": 3e-4, "epsilon_high": 4e-4}
REWARD = (
    "def even(completion_ids, **_):\n    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]\n"
)
ROLLOUT_STEPS = 2  # optimizer steps of one rollout


class Figures(NamedTuple):
    """What a run left: its logged steps, metrics.json, seconds a step, and peak bytes of the card."""

    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    step_seconds: float
    peak_bytes: int


def shapes(setting: Setting, layers: int | None = None) -> Any:
    """A Llama of 1.2 billion weights, or `layers` layers of an 8B; tiny without a card."""
    from benchmarks.models import LLAMA_1B, Shape

    if not setting.on_card:
        return Shape("tiny", 64, 128, 2, 4, 2, 2048, tied=False)
    if layers is None:
        return LLAMA_1B
    return Shape(f"{layers} layers of an 8B Llama", 4096, 14336, layers, 32, 8, 32768, tied=False)


def train(setting: Setting, name: str, model: Path, method: str, settings: dict[str, Any], **cogumi: Any) -> Figures:
    """A short run of `cogumi.train` in this process."""
    from cogumi.runs import train as train_run

    run_dir = setting.scratch / name.replace(" ", "-")
    logged = {"logging_steps": 1, "save_strategy": "no", "lr_scheduler_type": "constant", "report_to": "none"}
    config: dict[str, dict[str, Any]] = {
        "model": {"name": str(model), "attn_implementation": "sdpa"},
        "lora": {"r": 16, "lora_alpha": 32},
        "data": {"source": "cogumi:stdlib", "max_rows": 400, "eval_rows": 0, "fim": {"max_length": 128}},
        "train": {**logged, "learning_rate": 1e-5, **settings},
        "cogumi": {"method": method, "run_dir": str(run_dir), "merge": False, "compile": "off", "preflight": "off"},
    }
    for key, value in cogumi.items():
        section, _, inner = key.rpartition("__")
        config[section or "cogumi"][inner] = value
    if method == "gspo":
        rewards = setting.scratch / "rewards.py"
        rewards.write_text(REWARD)
        config["cogumi"]["rewards"] = [f"{rewards}:even"]
    if setting.on_card:
        torch.cuda.reset_peak_memory_stats()
    result = train_run(config)
    peak = torch.cuda.max_memory_allocated() if setting.on_card else 0
    summary = json.loads((run_dir / "metrics.json").read_text())
    gc.collect()
    if setting.on_card:
        torch.cuda.empty_cache()
    steps = max(1, summary["steps"] - 1)  # throughput leaves out the first step
    logged_steps = [each for each in result.metrics if "loss" in each]  # without TRL's closing row
    return Figures(logged_steps, summary, summary["step_seconds"] / steps, peak)


def environment(setting: Setting) -> Iterator[Row]:
    """Versions, which attention torch prefers, and whether the allocator took its setting."""
    from cogumi.methods.auto_settings import ALLOCATOR, SEGMENTS

    yield row("environment", "torch", "version", torch.__version__, note=f"CUDA {torch.version.cuda}")
    yield row(
        "environment", "cuDNN", "version", torch.backends.cudnn.version() or 0, target="below 92600: attention off"
    )
    yield row("environment", "cuDNN", "attention enabled as torch starts", int(torch.backends.cuda.cudnn_sdp_enabled()))
    if setting.on_card:
        os.environ[ALLOCATOR] = f"{SEGMENTS}:True"
        held = torch.zeros(1, device=setting.device)
        segments = torch.cuda.memory_snapshot()
        yield row("environment", "allocator", "expandable segments", int(segments[0]["is_expandable"]), target=">= 1")
        del held


def probes(setting: Setting) -> Iterator[Row]:
    """The probes of `cogumi doctor`, all in this process, unsloth's first because it has to precede transformers."""
    from cogumi.stack.probes import PACKAGES, PROBES

    for name in sorted(PROBES, key=lambda name: name != "unsloth"):
        absent = [found["note"] for found in missing_rows("gpu_probes", PACKAGES.get(name, name))]
        if absent:
            yield row("gpu_probes", name, "-", None, note=absent[0])
            continue
        try:
            readings = PROBES[name](setting.device)
        except Exception as error:  # noqa: BLE001 - a row, and the next probe
            yield row("gpu_probes", name, "-", None, ok=False, note=f"failed: {type(error).__name__}: {error}"[:300])
        else:
            for metric, value, unit, note in readings:
                yield row("gpu_probes", name, metric, value, unit, note=note)


def ratios(setting: Setting) -> Iterator[Row]:
    yield from ratio_rows(setting, "TRL", "trl")


def ratios_unsloth(setting: Setting) -> Iterator[Row]:
    """As cogumi trains by unsloth, and with unsloth's own old log-probabilities without prefix grouping."""
    absent = list(missing_rows("ratios-unsloth", "unsloth"))
    yield from absent
    if not absent:
        yield from ratio_rows(setting, "unsloth", "unsloth")


def ratio_rows(setting: Setting, name: str, backend: str) -> Iterator[Row]:
    """Ratios of the first and of the second step of a rollout, in bfloat16, with the paper's clip."""
    rows, length = (8, 64) if setting.on_card else (4, 8)
    batches = {
        "num_generations": rows, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 4,
        "steps_per_generation": 4 * ROLLOUT_STEPS, "max_completion_length": length, "max_steps": 3 * ROLLOUT_STEPS,
        "temperature": 1.0, "gradient_checkpointing": False, "loss_type": "gspo", **PAPERS_CLIP,
    }  # fmt: skip
    if not setting.on_card:
        batches |= {"bf16": True, "use_cpu": True}
    model = write_model(setting.scratch / "llama", shapes(setting), setting.device)
    figures = train(setting, f"ratios-{backend}", model, "gspo", batches, backend=backend)
    benchmark = "ratios" if backend == "trl" else "ratios-unsloth"
    for position in range(ROLLOUT_STEPS):
        logged = figures.rows[position::ROLLOUT_STEPS]
        away = max(max(each["policy/max_ratio"] - 1, 1 - each["policy/min_ratio"]) for each in logged)
        outside = [100 * each["policy/clipped_ratio_fraction"] for each in logged]
        case = f"{name}, step {position + 1} of a rollout"
        target = "<= 0" if position == 0 else "expected: rounding alone leaves the clip"
        yield row(benchmark, case, "largest |ratio - 1|", away, target=target)
        yield values_row(benchmark, case, "outside the clip", outside, "%")
    yield row(benchmark, name, "seconds a step", figures.step_seconds, "s")


def sft_speed(setting: Setting) -> Iterator[Row]:
    """8 layers of an 8B, packed to 4,096: as a config asks, with the batch cut up instead of recomputed, and compiled."""
    rows = 8 if setting.on_card else 2
    cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": rows, "gradient_checkpointing": False}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "recomputed": ({"per_device_train_batch_size": rows, "gradient_checkpointing": True}, "off"),
        "one row at once": (cut, "off"),
        "one row at once, compiled": (cut, "layers"),
    }
    if not setting.on_card:
        del cases["one row at once, compiled"]  # minutes of a C++ compiler for a tiny model
    for case, (settings, compiled) in cases.items():
        yield from speed_rows(setting, "sft-speed", case, settings, compile=compiled)


def sft_speed_unsloth(setting: Setting) -> Iterator[Row]:
    absent = list(missing_rows("sft-speed-unsloth", "unsloth"))
    yield from absent
    if not absent:
        rows = 8 if setting.on_card else 2
        settings = {"per_device_train_batch_size": rows, "gradient_checkpointing": True}
        yield from speed_rows(setting, "sft-speed-unsloth", "unsloth", settings, backend="unsloth")


def speed_rows(setting: Setting, benchmark: str, case: str, settings: dict[str, Any], **more: Any) -> Iterator[Row]:
    model = write_model(setting.scratch / "llama-8", shapes(setting, 8), setting.device)
    length = 4096 if setting.on_card else 128
    steps = {"max_steps": 7 if setting.on_card else 3, "packing": True, "max_length": length}
    more |= {"lora__r": 64, "data__fim": {"max_length": length}, "data__max_rows": 2000}
    figures = train(setting, f"{benchmark} {case}", model, "sft", {**steps, **settings}, **more)
    yield row(benchmark, case, "throughput", figures.summary["tokens_per_second"], "token/s")
    yield row(
        benchmark, case, "MFU", figures.summary["mfu"] or 0.0, "of the peak", note="0: no card" * (not setting.on_card)
    )
    yield row(benchmark, case, "peak memory", figures.peak_bytes / 2**30, "GiB")
    yield row(benchmark, case, "last loss", figures.rows[-1]["loss"])


def rollout(setting: Setting) -> Iterator[Row]:
    """Milliseconds a token of `generate`: with and without the adapter, cuDNN's attention on and off."""
    from benchmarks.models import build

    prompts, tokens, rows = (128, 128, 64) if setting.on_card else (8, 8, 4)
    dtype = torch.bfloat16 if setting.on_card else torch.float32
    model = build(shapes(setting, 16), setting.device, dtype).eval()
    model.gradient_checkpointing_disable()
    ids = torch.randint(2, 2000, (rows, prompts), device=setting.device)
    for cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for adapter in (True, False):
            took = [generate_seconds(setting, model, ids, tokens, adapter) for _ in range(2)][-1]
            case = f"{'with' if adapter else 'without'} adapter, cuDNN {'allowed' if cudnn else 'off'}"
            yield row("rollout", case, "time a token", 1e3 * took / tokens, "ms", note=f"{rows} rows, {tokens} tokens")


def generate_seconds(setting: Setting, model: Any, ids: Any, tokens: int, adapter: bool) -> float:
    from contextlib import nullcontext

    with torch.no_grad(), nullcontext() if adapter else model.disable_adapter():
        began = time.perf_counter()
        mask = torch.ones_like(ids)
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            use_cache=True,
            pad_token_id=0,
        )
        if setting.on_card:
            torch.cuda.synchronize()
        return time.perf_counter() - began


def merge_check(setting: Setting) -> Iterator[Row]:
    """The stage after the training on the device: live logits, release, merge, and the check of the merged model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from benchmarks.models import with_adapter
    from cogumi.config.schema import load_config
    from cogumi.training import stages

    shape, base = shapes(setting), write_model(setting.scratch / "llama", shapes(setting), setting.device)
    adapter = with_adapter(shape, base, setting.scratch / "llama-adapter", "all-linear", 16).adapter
    run_dir = setting.scratch / "merge-check"
    run_dir.mkdir()
    options = {"method": "sft", "run_dir": str(run_dir)}
    model = {"name": str(base), "dtype": "bfloat16"}
    run = load_config({"model": model, "data": {"source": str(base)}, "cogumi": options})
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16", device_map={"": setting.device})
    live: Any = PeftModel.from_pretrained(loaded, adapter)
    parameters = sum(weight.numel() for name, weight in live.named_parameters() if "lora_" not in name)
    tokens = torch.randint(2, shape.vocabulary, (8, 64), generator=torch.Generator().manual_seed(0))
    recorded = stages.record_live(run, live, adapter, tokens, None)
    del live, loaded
    gc.collect()
    if setting.on_card:
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated() / 2**20
        yield row("merge-check", shape.name, "held when the merge begins", held, "MiB", target="<= 64")
    _, checks = stages.try_merge(run, adapter, str(base), recorded, None)
    if setting.on_card:
        peak = torch.cuda.max_memory_allocated()
        yield row("merge-check", shape.name, "peak a parameter", peak / parameters, "B", target="<= 3.0")
        yield row(
            "merge-check", shape.name, "peak beyond the model", (peak - 2 * parameters) / 2**30, "GiB", target="<= 1.0"
        )
    failed = [str(check) for check in checks if not check.passed or "not compared" in check.figure]
    yield row("merge-check", shape.name, "checks passed", int(not failed), target=">= 1", note="; ".join(failed)[:300])


def experts(setting: Setting) -> Iterator[Row]:
    """Two layers of gpt-oss in 4 bits, with LoRA on the experts: load, forward, backward, decode."""
    if not list(missing_rows("", "bitsandbytes")):
        yield from expert_rows(setting)
    else:
        yield missing("experts-4bit", "-", "bitsandbytes")


def expert_rows(setting: Setting) -> Iterator[Row]:
    from transformers import GptOssConfig, GptOssForCausalLM

    from cogumi.models.adapters import lora_config
    from cogumi.models.loading import load_model
    from cogumi.rl.patching import patch

    sizes: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 32768, "num_local_experts": 32}
    if not setting.on_card:
        sizes = {
            "num_hidden_layers": 2, "vocab_size": 256, "num_local_experts": 4, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 2,
        }  # fmt: skip
    path = setting.scratch / "gpt-oss"
    if not path.exists():
        with torch.device(setting.device):
            random: Any = GptOssForCausalLM(GptOssConfig(**sizes))
        random.to(torch.bfloat16).save_pretrained(path)
        del random
        gc.collect()
    patch(backend="trl")
    began = time.perf_counter()
    from peft import get_peft_model

    base = load_model(str(path), dtype="bfloat16", quantization={"load_in_4bit": True})
    model = get_peft_model(base, lora_config({"r": 8}))
    yield row("experts-4bit", "load", "seconds", time.perf_counter() - began, "s")
    if setting.on_card:
        yield row("experts-4bit", "load", "memory", torch.cuda.memory_allocated() / 2**30, "GiB")
    ids = torch.randint(2, 250, (2, 512 if setting.on_card else 16), device=setting.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients) and bool(loss.isfinite())
    yield row(
        "experts-4bit", "forward and backward", "finite", int(finite), target=">= 1", note=f"{len(gradients)} tensors"
    )
    tokens = 32 if setting.on_card else 4
    model.eval()
    took = [generate_seconds(setting, model, ids, tokens, True) for _ in range(2)][-1]
    layers = sizes["num_hidden_layers"]
    yield row(
        "experts-4bit",
        f"decode, {layers} layers",
        "time a token",
        1e3 * took / tokens,
        "ms",
        target="expected: 24 layers 15 at best",
    )


def interruption(setting: Setting) -> Iterator[Row]:
    """Six steps of GSPO straight, and the same with a SIGTERM inside a rollout and a resume."""
    model = write_model(setting.scratch / "llama", shapes(setting), setting.device)
    rows, length, steps = (8, 256, 6) if setting.on_card else (4, 24, 40)
    settings = {
        "num_generations": rows, "per_device_train_batch_size": rows, "steps_per_generation": 1, "max_steps": steps,
        "max_completion_length": length, "gradient_checkpointing": False, "loss_type": "gspo", "save_strategy": "steps",
        "save_steps": 100, "learning_rate": 1e-4,
    }  # fmt: skip

    def run(name: str) -> None:
        train(setting, name, model, "gspo", settings, backend="trl")

    def interrupted() -> None:
        sender = threading.Thread(target=send_sigterm, args=(setting.scratch / "interrupted",), daemon=True)
        sender.start()
        try:
            run("interrupted")
        except (SystemExit, KeyboardInterrupt):
            return

    for name, work in (
        ("straight", lambda: run("straight")),
        ("interrupted", interrupted),
        ("resumed", lambda: run("interrupted")),
    ):
        failure = in_fork(work, 60)
        if failure is not None and name != "interrupted":
            yield row("interruption", name, "-", None, ok=False, note=f"failed: {failure}")
            return
    signalled = setting.scratch / "interrupted" / "sigterm.json"
    if not signalled.exists():
        yield row(
            "interruption", "interrupted", "-", None, ok=False, note="failed: the run ended before a signal was sent"
        )
        return
    sent = json.loads(signalled.read_text())
    yield row(
        "interruption", "SIGTERM in a rollout", "until the checkpoint is whole", sent["seconds"], "s", target="<= 2"
    )
    from safetensors.torch import load_file

    ours, theirs = (
        load_file(setting.scratch / name / "adapter" / "adapter_model.safetensors")
        for name in ("straight", "interrupted")
    )
    apart = max((ours[key].float() - theirs[key].float()).abs().max().item() for key in ours)
    yield row("interruption", "resumed against straight", "largest difference of the adapter", apart, target="<= 0")


def send_sigterm(run_dir: Path) -> None:
    """Once three steps are done, send this process SIGTERM a little into the next, and time its checkpoint."""
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        time.sleep(0.02)
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    while not list((run_dir / "checkpoints").glob("checkpoint-*/cogumi-manifest.json")):
        time.sleep(0.01)
    (run_dir / "sigterm.json").write_text(json.dumps({"seconds": time.monotonic() - began}))


def smoke(setting: Setting) -> Iterator[Row]:
    """`python -m cogumi.smoke` as a newcomer runs it; --quick without a card."""
    words = [sys.executable, "-m", "cogumi.smoke", "--json", "--run-dir", str(setting.scratch / "smoke")]
    ran = run_process([*words, *([] if setting.on_card else ["--quick", "--limit", "20"])], timeout=195, check=False)
    path = setting.scratch / "smoke" / "smoke.json"
    checks = json.loads(path.read_text())["rows"] if path.exists() else []
    failed = [f"{each['stage']}: {each['checked']}: {each['figure']}" for each in checks if not each["passed"]]
    yield row(
        "smoke",
        "the whole run",
        "exit status",
        ran.returncode,
        target="<= 0" * setting.on_card,
        note="; ".join(failed)[:300],
    )
    yield row("smoke", "the whole run", "wall time", ran.seconds, "s", target="<= 180" if setting.on_card else "")
