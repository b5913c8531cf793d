"""The checks of `python -m benchmarks gpu`: each takes a `Setting` and yields rows. Most are real runs of `cogumi.train`."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu import Setting, in_fork, write_model
from benchmarks.harness import Row, attempt, missing, python, row, run_process, values_row

REWARD = (
    "def even(completion_ids, **_):\n    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]\n"
)
ROLLOUT_STEPS = 2  # optimizer steps of one rollout
THETA, HEAD_DIM = 500_000.0, 128  # RoPE of Llama 3.1
TRAIN = "import sys, json, cogumi; cogumi.train(json.loads(sys.argv[1]))"
LOGGED = {"logging_steps": 1, "lr_scheduler_type": "constant", "report_to": "none"}
RECOMPUTED, KEPT = {"gradient_checkpointing": True}, {"gradient_checkpointing": False}
FORECAST_STEPS = {"max_steps": 10, "per_device_train_batch_size": 8}
FORECAST_ROLLOUT = {
    "num_generations": 8, "max_completion_length": 256, "steps_per_generation": 1, "per_device_train_batch_size": 16,
    "max_steps": 3, "logging_steps": 1,
}  # fmt: skip
# TRL's settings, and other keys as `config_of` takes them.
FORECASTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sft, layers kept": (KEPT, {"method": "sft"}),
    "sft, layers recomputed": (RECOMPUTED, {"method": "sft"}),
    "sft, 4-bit": (RECOMPUTED, {"method": "sft", "model__quantization_config": {"load_in_4bit": True}}),
    "gspo, rollout by transformers": (RECOMPUTED | FORECAST_ROLLOUT, {"method": "gspo", "rewards": ["parses"]}),
}


class Figures(NamedTuple):
    """What a run left: its logged steps, metrics.json, seconds a step, and peak bytes of the card."""

    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    step_seconds: float
    peak_bytes: int


def shapes(setting: Setting, layers: int | None = None) -> Any:
    """Return a Llama of 1.2 billion weights, or `layers` layers of an 8B; a tiny one without a card."""
    from benchmarks.models import LLAMA_1B, Shape  # imports transformers, which checks of unsloth must not

    if not setting.on_card:
        return Shape("tiny", 64, 128, 2, 4, 2, 2048, tied=False)
    if layers is None:
        return LLAMA_1B
    return Shape(f"{layers} layers of an 8B Llama", 4096, 14336, layers, 32, 8, 32768, tied=False)


def release() -> None:
    """Collect garbage and give cached memory back to the card, if there is one."""
    gc.collect()
    torch.cuda.empty_cache()


def config_of(setting: Setting, name: str, model: Path, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the configuration of a short run. more: keys as cogumi.train takes them; those of `cogumi` by name alone."""
    config: dict[str, dict[str, Any]] = {
        "model": {"name": str(model)},
        "lora": {"r": 16, "lora_alpha": 32},
        "data": {"source": "cogumi:stdlib", "eval_rows": 0},
        "train": {"learning_rate": 1e-5, "save_strategy": "no", **settings},
        "cogumi": {"run_dir": str(setting.scratch / name), "merge": False, "compile": "off"},
    }
    for key, value in more.items():
        section, _, inner = key.rpartition("__")
        config[section or "cogumi"][inner] = value
    return config


def train(setting: Setting, name: str, model: Path, method: str, settings: dict[str, Any], **more: Any) -> Figures:
    """Make a short run of `cogumi.train` in this process."""
    from cogumi.runs.entry import train as train_run

    data = {"data__max_rows": 400, "data__fim": {"max_length": 128}}
    more = {"model__attn_implementation": "sdpa", "preflight": "off", "method": method, **data, **more}
    if method == "gspo":
        rewards = setting.scratch / "rewards.py"
        rewards.write_text(REWARD)
        more["rewards"] = [f"{rewards}:even"]
    config = config_of(setting, name.replace(" ", "-"), model, LOGGED | settings, **more)
    setting.reset_peak()
    result = train_run(config)
    peak = torch.cuda.max_memory_allocated()  # 0 without a card
    summary = json.loads((Path(config["cogumi"]["run_dir"]) / "metrics.json").read_text())
    release()
    steps = max(1, summary["steps"] - 1)  # throughput leaves out the first step
    logged_steps = [row for row in result.metrics if "loss" in row]  # without TRL's closing row
    return Figures(logged_steps, summary, summary["step_seconds"] / steps, peak)


def environment(setting: Setting) -> Iterator[Row]:
    """Check versions, which attention torch prefers, and whether the allocator took its setting."""
    from cogumi.methods.auto_settings import ALLOCATOR, SEGMENTS

    figure = partial(row, "environment")
    yield figure("torch", "version", torch.__version__, note=f"CUDA {torch.version.cuda}")
    yield figure("cuDNN", "version", torch.backends.cudnn.version() or 0, target="below 92600: attention off")
    yield figure("cuDNN", "attention enabled as torch starts", int(torch.backends.cuda.cudnn_sdp_enabled()))
    if setting.on_card:
        os.environ[ALLOCATOR] = f"{SEGMENTS}:True"
        held = torch.zeros(1, device=setting.device)
        segments = torch.cuda.memory_snapshot()
        yield figure("allocator", "expandable segments", int(segments[0]["is_expandable"]), target=">= 1")
        del held


def probes(setting: Setting) -> Iterator[Row]:
    """Run the probes of `cogumi doctor` in this process, unsloth's first because it has to precede transformers."""
    from cogumi.stack.probes import PACKAGES, PROBES

    def read(name: str) -> Iterator[Row]:
        for metric, value, unit, note in PROBES[name](setting.device):
            yield row("gpu_probes", name, metric, value, unit, note=note)

    for name in sorted(PROBES, key=lambda name: name != "unsloth"):
        package = PACKAGES.get(name, name)
        if importlib.util.find_spec(package) is None:
            yield missing("gpu_probes", name, package)
        else:
            yield from attempt("gpu_probes", name, partial(read, name))


def numerics(setting: Setting) -> Iterator[Row]:
    """Check RoPE's angles under TF32, and torch's attention with and without cuDNN."""
    yield from rope_angles(setting)
    for enabled in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        name = f"cuDNN {'allowed' if enabled else 'off'}"
        expected = "expected > 0 on Hopper with cuDNN below 9.26" if enabled else "<= 0"
        broken, case = nan_in_masked_backward(setting), f"masked attention backward, {name}"
        yield row("numerics", case, "NaN in the query's gradient", broken, "elements", target=expected)
        yield from attention_times(setting, name)


def rope_angles(setting: Setting) -> Iterator[Row]:
    """Compare angles as transformers computes them (a float32 matrix product) with float64, per float32 precision."""
    frequencies = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    inverse = frequencies.float().to(setting.device)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    for precision in ("ieee", "tf32"):
        matmul.fp32_precision = precision
        for length in (2048, 4096) if setting.on_card else (256,):
            positions = torch.arange(length, dtype=torch.float32, device=setting.device)
            for batch in (1, 8):
                angles = inverse[None, :, None].expand(batch, -1, 1) @ positions[None, None].expand(batch, 1, -1)
                error = (angles - (inverse[:, None] * positions)).abs().max().item()
                target = "<= 0" if precision == "ieee" else "expected 0.34 at 2,048 where cuBLAS takes TF32"
                case = f"RoPE, {batch} x {length}, {precision}"
                yield row("numerics", case, "largest error of an angle", error, "rad", target=target)
    matmul.fp32_precision = before


def nan_in_masked_backward(setting: Setting) -> int:
    """Count NaN of pytorch issue 196678: 704 tokens, a mask, and a row whose logsumexp is below -88.7."""
    shape = (1, 8, 704, HEAD_DIM)
    options: dict[str, Any] = {"device": setting.device, "dtype": torch.bfloat16, "requires_grad": True}
    query, key = torch.full(shape, 3.0, **options), torch.full(shape, -3.0, **options)
    value = torch.randn(shape, **options)
    mask = torch.ones(704, 704, dtype=torch.bool, device=setting.device).tril()[None, None]
    scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
    assert query.grad is not None
    return int(query.grad.isnan().sum().item())


def attention_times(setting: Setting, name: str) -> Iterator[Row]:
    """New lengths cost cuDNN a plan each: first and second call of 12 lengths, and decode steps with a growing cache."""
    heads, lengths = (32, range(900, 1020, 10)) if setting.on_card else (2, range(20, 24))
    steps = 40 if setting.on_card else 4

    def attend(batch: int, queries: int, keys: int, backward: bool) -> None:
        options: dict[str, Any] = {"device": setting.device, "dtype": torch.bfloat16, "requires_grad": backward}
        query = torch.randn(batch, heads, queries, HEAD_DIM, **options)
        key, value = (torch.randn(batch, heads, keys, HEAD_DIM, **options) for _ in range(2))
        mask = torch.ones(queries, keys, dtype=torch.bool, device=setting.device)
        mask = mask.tril(keys - queries).expand(batch if queries == 1 else 1, 1, queries, keys)
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        if backward:
            output.sum().backward()

    def times(calls: list[tuple[int, int, int, bool]]) -> list[float]:
        return [setting.milliseconds(partial(attend, *call)) for call in calls]

    masked = [(4, length, length, True) for length in lengths]
    yield values_row("numerics", f"masked, new length, {name}", "forward and backward", times(masked), "ms")
    yield values_row("numerics", f"masked, known length, {name}", "forward and backward", times(masked), "ms")
    decoded = times([(64 - step, 1, 200 + step, False) for step in range(steps)])
    yield values_row("numerics", f"decode, growing cache, shrinking batch, {name}", "attention", decoded, "ms")


def ratios(setting: Setting, backend: str = "trl") -> Iterator[Row]:
    """Measure ratios of the first and the second step of a rollout, in bfloat16, with the paper's clip."""
    rows, length = (8, 64) if setting.on_card else (4, 8)
    settings = {
        "num_generations": rows, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 4,
        "steps_per_generation": 4 * ROLLOUT_STEPS, "max_completion_length": length, "max_steps": 3 * ROLLOUT_STEPS,
        "temperature": 1.0, "loss_type": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4, **KEPT,
    }  # fmt: skip
    if not setting.on_card:
        settings |= {"bf16": True, "use_cpu": True}
    model = write_model(setting.scratch / "llama", shapes(setting), setting.device)
    figures = train(setting, f"ratios-{backend}", model, "gspo", settings, backend=backend)
    name, benchmark = ("TRL", "ratios") if backend == "trl" else ("unsloth", "ratios-unsloth")
    for position in range(ROLLOUT_STEPS):
        logged = figures.rows[position::ROLLOUT_STEPS]
        away = max(max(each["policy/max_ratio"] - 1, 1 - each["policy/min_ratio"]) for each in logged)
        outside = [100 * each["policy/clipped_ratio_fraction"] for each in logged]
        case = f"{name}, step {position + 1} of a rollout"
        target = "<= 0" if position == 0 else "expected: rounding alone leaves the clip"
        yield row(benchmark, case, "largest |ratio - 1|", away, target=target)
        yield values_row(benchmark, case, "outside the clip", outside, "%")
    yield row(benchmark, name, "seconds a step", figures.step_seconds, "s")


def ratios_unsloth(setting: Setting) -> Iterator[Row]:
    yield from ratios(setting, "unsloth")


def sft_speed(setting: Setting) -> Iterator[Row]:
    """8 layers of an 8B, packed to 4,096: as a config asks, with the batch cut up instead of recomputed, and compiled."""
    rows = 8 if setting.on_card else 2
    cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": rows, **KEPT}
    yield from speed_rows(setting, "recomputed", {"per_device_train_batch_size": rows, **RECOMPUTED})
    yield from speed_rows(setting, "one row at once", cut)
    if setting.on_card:  # on a CPU, minutes of a C++ compiler for a tiny model
        yield from speed_rows(setting, "one row at once, compiled", cut, compile="layers")


def sft_speed_unsloth(setting: Setting) -> Iterator[Row]:
    settings = {"per_device_train_batch_size": 8 if setting.on_card else 2, **RECOMPUTED}
    yield from speed_rows(setting, "unsloth", settings, backend="unsloth")


def speed_rows(setting: Setting, case: str, settings: dict[str, Any], **more: Any) -> Iterator[Row]:
    model = write_model(setting.scratch / "llama-8", shapes(setting, 8), setting.device)
    length = 4096 if setting.on_card else 128
    steps = {"max_steps": 7 if setting.on_card else 3, "packing": True, "max_length": length}
    more |= {"lora__r": 64, "data__fim": {"max_length": length}, "data__max_rows": 2000}
    figures = train(setting, f"sft-speed {case}", model, "sft", steps | settings, **more)
    figure = partial(row, "sft-speed-unsloth" if case == "unsloth" else "sft-speed", case)
    yield figure("throughput", figures.summary["tokens_per_second"], "token/s")
    yield figure("MFU", figures.summary["mfu"] or 0.0, "of the peak", note="" if setting.on_card else "0: no card")
    yield figure("peak memory", figures.peak_bytes / 2**30, "GiB")
    yield figure("last loss", figures.rows[-1]["loss"])


def rollout(setting: Setting) -> Iterator[Row]:
    """Measure milliseconds a token of `generate`: with and without the adapter, cuDNN's attention on and off."""
    from benchmarks.models import build

    prompts, tokens, rows = (128, 128, 64) if setting.on_card else (8, 8, 4)
    dtype = torch.bfloat16 if setting.on_card else torch.float32
    model = build(shapes(setting, 16), setting.device, dtype).eval()
    model.gradient_checkpointing_disable()
    ids = torch.randint(2, 2000, (rows, prompts), device=setting.device)
    for cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for adapter in (True, False):
            with nullcontext() if adapter else model.disable_adapter():
                time_a_token = token_milliseconds(setting, model, ids, tokens)
            case = f"{'with' if adapter else 'without'} adapter, cuDNN {'allowed' if cudnn else 'off'}"
            yield row("rollout", case, "time a token", time_a_token, "ms", note=f"{rows} rows, {tokens} tokens")


def token_milliseconds(setting: Setting, model: Any, ids: Any, tokens: int) -> float:
    """Return the milliseconds a token of a second call of `generate`."""
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "use_cache": True, "pad_token_id": 0}
    generate = partial(model.generate, input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    with torch.no_grad():
        return [setting.milliseconds(generate) for _ in range(2)][-1] / tokens


def merge_check(setting: Setting) -> Iterator[Row]:
    """Run the stage after the training: live logits, release, merge, and the check of the merged model."""
    from benchmarks.merge_check import merge_and_check
    from benchmarks.models import with_adapter

    shape, base = shapes(setting), write_model(setting.scratch / "llama", shapes(setting), setting.device)
    adapter = with_adapter(shape, base, setting.scratch / "llama-adapter", 16).adapter
    run_dir, held = setting.scratch / "merge-check", [0]
    run_dir.mkdir()

    def released() -> None:
        release()
        held[0] = torch.cuda.memory_allocated()

    parameters, failed = merge_and_check(base, adapter, run_dir, setting.device, released)
    figure = partial(row, "merge-check", shape.name)
    if setting.on_card:
        peak = torch.cuda.max_memory_allocated()
        yield figure("held when the merge begins", held[0] / 2**20, "MiB", target="<= 64")
        yield figure("peak a parameter", peak / parameters, "B", target="<= 3.0")
        yield figure("peak beyond the model", (peak - 2 * parameters) / 2**30, "GiB", target="<= 1.0")
    yield figure("checks passed", int(not failed), target=">= 1", note="; ".join(failed)[:300])


def experts_4bit(setting: Setting) -> Iterator[Row]:
    """Two layers of gpt-oss in 4 bits, with LoRA on the experts: load, forward, backward, decode."""
    from peft import get_peft_model
    from transformers import GptOssConfig, GptOssForCausalLM

    from cogumi.models.adapters import lora_config
    from cogumi.models.loading import load_model
    from cogumi.rl.patching import patch

    sizes: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 32768, "num_local_experts": 32}
    if not setting.on_card:
        sizes |= {
            "vocab_size": 256, "num_local_experts": 4, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 2,
        }  # fmt: skip
    path, figure = setting.scratch / "gpt-oss", partial(row, "experts-4bit")
    with torch.device(setting.device):
        random: Any = GptOssForCausalLM(GptOssConfig(**sizes))
    random.to(torch.bfloat16).save_pretrained(path)
    del random
    gc.collect()
    patch(backend="trl")
    began = time.perf_counter()
    base = load_model(str(path), dtype="bfloat16", quantization={"load_in_4bit": True})
    model = get_peft_model(base, lora_config({"r": 8}))
    yield figure("load", "seconds", time.perf_counter() - began, "s")
    if setting.on_card:
        yield figure("load", "memory", torch.cuda.memory_allocated() / 2**30, "GiB")
    ids = torch.randint(2, 250, (2, 512 if setting.on_card else 16), device=setting.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients) and bool(loss.isfinite())
    yield figure("forward and backward", "finite", int(finite), target=">= 1", note=f"{len(gradients)} tensors")
    model.eval()
    time_a_token = token_milliseconds(setting, model, ids, 32 if setting.on_card else 4)
    target = "expected: 24 layers 15 at best"
    yield figure("decode, 2 layers", "time a token", time_a_token, "ms", target=target)


def interruption(setting: Setting) -> Iterator[Row]:
    """Make six steps of GSPO straight, and the same with a SIGTERM inside a rollout and a resume."""
    from safetensors.torch import load_file

    model = write_model(setting.scratch / "llama", shapes(setting), setting.device)
    rows, length, steps = (8, 256, 6) if setting.on_card else (4, 24, 40)
    settings = {
        "num_generations": rows, "per_device_train_batch_size": rows, "steps_per_generation": 1, "max_steps": steps,
        "max_completion_length": length, "loss_type": "gspo", "save_strategy": "steps", "save_steps": 100,
        "learning_rate": 1e-4, **KEPT,
    }  # fmt: skip

    def run(name: str, interrupted: bool) -> None:
        if interrupted:
            threading.Thread(target=send_sigterm, args=(setting.scratch / name,), daemon=True).start()
        try:
            train(setting, name, model, "gspo", settings, backend="trl")
        except (SystemExit, KeyboardInterrupt):
            if not interrupted:
                raise

    figure = partial(row, "interruption")
    for case, name in {"straight": "straight", "interrupted": "interrupted", "resumed": "interrupted"}.items():
        failure = in_fork(partial(run, name, case == "interrupted"), 60)
        if failure is not None and case != "interrupted":
            yield figure(case, "-", None, ok=False, note=f"failed: {failure}")
            return
    signalled = setting.scratch / "interrupted" / "sigterm.json"
    if not signalled.exists():
        yield figure("interrupted", "-", None, ok=False, note="failed: the run ended before a signal was sent")
        return
    seconds = json.loads(signalled.read_text())["seconds"]
    yield figure("SIGTERM in a rollout", "until the checkpoint is whole", seconds, "s", target="<= 2")
    ours, theirs = (
        load_file(setting.scratch / name / "adapter" / "adapter_model.safetensors")
        for name in ("straight", "interrupted")
    )
    apart = max((ours[key].float() - theirs[key].float()).abs().max().item() for key in ours)
    yield figure("resumed against straight", "largest difference of the adapter", apart, target="<= 0")


def send_sigterm(run_dir: Path) -> None:
    """After three steps, send this process SIGTERM and time its checkpoint."""
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
    failed = "; ".join(
        f"{check['stage']}: {check['checked']}: {check['figure']}" for check in checks if not check["passed"]
    )
    figure = partial(row, "smoke", "the whole run")
    yield figure("exit status", ran.returncode, target="<= 0" if setting.on_card else "", note=failed[:300])
    yield figure("wall time", ran.seconds, "s", target="<= 180" if setting.on_card else "")


def forecasts(setting: Setting) -> Iterator[Row]:
    """Compare the preflight's forecast with the peak of real runs, each in its own process, and give their speed."""
    model = write_model(setting.scratch / "llama", shapes(setting), setting.device)
    for case in list(FORECASTS)[: None if setting.on_card else 1]:
        yield from attempt("gpu_forecast", case, partial(forecast_rows, setting, case, model))


def forecast_rows(setting: Setting, case: str, model: Path) -> Iterator[Row]:
    from cogumi.core.run_directory import read_jsonl

    settings, more = FORECASTS[case]
    more = {"data__max_rows": 500, "data__fim": {"max_length": 512}, "preflight": "on", **more}
    name = case.replace(" ", "-").replace(",", "")
    config = config_of(setting, name, model, {"logging_steps": 5} | FORECAST_STEPS | settings, **more)
    run_dir = setting.scratch / name
    run_process(python(TRAIN, json.dumps(config)))
    metrics = json.loads((run_dir / "metrics.json").read_text())
    memory = metrics["memory"]
    forecast, peak = memory["gpu_peak_forecast"], memory.get("gpu_peak_allocated")
    if peak is None:
        note = "no GPU: nothing to compare with"
        yield row("gpu_forecast", case, "forecast of the peak", forecast / 2**30, "GiB", note=note)
        return
    sizes = {"forecast": forecast, "peak": peak, "reserved": memory["gpu_peak_reserved"]}
    note = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sizes.items())
    away = 100 * abs(forecast / peak - 1)
    yield row("gpu_forecast", case, "forecast away from the peak", away, "%", target="<= 5", note=note)
    last = [each for each in read_jsonl(run_dir / "metrics.jsonl") if each.get("perf/tokens_per_second")][-1]
    figure = partial(row, "gpu_forecast", f"{case}, without the first steps")
    yield figure("throughput", last["perf/tokens_per_second"], "token/s")
    yield figure("MFU", last.get("perf/mfu"), "of the peak", note=metrics.get("no_mfu", ""))


def gspo_step(setting: Setting) -> Iterator[Row]:
    from benchmarks import gspo_step

    if setting.on_card:
        yield from gspo_step.run(quick=True, device=setting.device)
    else:
        yield from gspo_step.step_rows(shapes(setting), gspo_step.Batch(4, 8, 8), "cpu", torch.float32, repeats=2)
