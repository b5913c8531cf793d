"""vLLM as TRL 1.15's VLLMGeneration builds it and gives it weights: its dtype, its seed, and what is merged on the way.

TRL hands vLLM no dtype, so that a model trained in float32 is sampled in its checkpoint's bfloat16. vLLM seeds the random
numbers of the whole process with 0, whatever `train.seed` says. TRL merges an adapter into its base in place and subtracts
it again, which rounds twice. On a CPU, vLLM has packed its weights into other tensors than those that TRL writes to.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from cogumi.core.random_state import kept_random_state
from cogumi.patches import PatchStatus, replaced
from cogumi.patches.trl_internals import wrap_method

NAME = "vLLM under TRL"
WRITTEN_FOR = "vLLM 0.26 to 0.32"
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # None: where temporary files are
LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_originals: dict[str, Callable[[Any], Any]] = {}
_options: dict[str, Any] = {}


@contextmanager
def engine_options(**options: Any) -> Iterator[None]:
    """Arguments of `vllm.LLM` for the engines that TRL builds within the block, which come before TRL's."""
    _options.update(options)
    try:
        yield
    finally:
        _options.clear()


def apply() -> PatchStatus:
    """Change three methods of `trl.generation.vllm_generation.VLLMGeneration`, where vLLM is installed."""
    if find_spec("vllm") is not None and not _originals:
        generation = generation_class()
        ours = {"_init_vllm": build_engine, "sync_weights": sync_weights, "_iter_named_params": iterate_parameters}
        for name, replacement in ours.items():
            _originals[name] = getattr(generation, name)
            setattr(generation, name, replacement)
    return status()


def undo() -> PatchStatus:
    for name, original in _originals.items():
        setattr(generation_class(), name, original)
    _originals.clear()
    return status()


def status() -> PatchStatus:
    if find_spec("vllm") is None:
        return PatchStatus(NAME, False, "vLLM is not installed")
    if not _originals:
        return PatchStatus(NAME, False, "TRL builds it with the checkpoint's dtype and the seed 0")
    effect = f"it has the trainer's dtype and seed (trl {version('trl')}, written for {WRITTEN_FOR})"
    return PatchStatus(NAME, True, effect)


def generation_class() -> Any:
    from trl.generation.vllm_generation import VLLMGeneration

    return VLLMGeneration


def build_engine(generation: Any) -> None:
    """TRL's own `_init_vllm` with the trainer's dtype for vLLM, and the process's random numbers left as they were."""
    from trl.generation import vllm_generation

    if generation.mode != "colocate":
        client: Any = vllm_generation.VLLMClient
        if generation.accelerator.device.type == "cpu":
            # TRL's channel for weights is NCCL's, which a CPU has not; `reload_server` writes a file instead.
            client = type("Client", (client,), {"init_communicator": lambda self, device: None})
        with replaced(vllm_generation, {"VLLMClient": client}):
            return _originals["_init_vllm"](generation)

    options = {"dtype": computing_dtype(generation.model, generation.accelerator)} | _options

    def build(**arguments: Any) -> Any:
        return llm(**(arguments | options))

    llm = vllm_generation.LLM
    with kept_random_state(), kept_environment(), replaced(vllm_generation, {"LLM": build}):
        _originals["_init_vllm"](generation)
    if serves_adapter(generation):

        def generate(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs, lora_request=generation.cogumi_adapter)

        wrap_method(generation.llm, "generate", generate)
    return None


def computing_dtype(model: Any, accelerator: Any) -> torch.dtype:
    """Return what the trainer multiplies matrices in: autocast's dtype, else that of the weights."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    return mixed or model.dtype


@contextmanager
def kept_environment() -> Iterator[None]:
    """Restore TRL's environment variables of the launch after the block: another run would read them as its own."""
    before = {name: os.environ[name] for name in LAUNCH if name in os.environ}
    try:
        yield
    finally:
        for name in LAUNCH:
            os.environ.pop(name, None)
        os.environ.update(before)


def sync_weights(generation: Any) -> None:
    """Give the engine the trainer's weights: the adapter alone if it serves one, else TRL's own way, or a CPU's."""
    if serves_adapter(generation):
        return hand_over_adapter(generation)
    if generation.accelerator.device.type != "cpu":
        return _originals["sync_weights"](generation)
    if generation.mode != "colocate":
        return reload_server(generation)
    weights = generation._iter_named_params()
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    generation.llm.apply_model(pack_heads)
    generation.llm.reset_prefix_cache()
    return None


def iterate_parameters(generation: Any) -> Iterator[tuple[str, Tensor]]:
    """TRL's `_iter_named_params`, which leaves a base under an adapter as it was, to the bit.

    TRL merges the adapter into the base in place and subtracts it again. In bfloat16 that rounds twice: after 100 rollouts
    20 % of the small base's weights were others, 1.5e-3 of their norm away (docs/rollouts.md).
    """
    # Not at the top: unsloth has to be imported before PEFT.
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    model, seen = generation.model, set()
    if not isinstance(model, PeftModel) or generation._dist.is_fsdp or generation._dist.is_zero3:
        yield from _originals["_iter_named_params"](generation)
        return
    inside = ""
    for path, module in model.named_modules():
        if inside and path.startswith(inside):
            continue
        adapted = isinstance(module, BaseTunerLayer)
        inside = f"{path}." if adapted else ""
        with merged(module) if adapted else nullcontext(module) as base:
            for leaf, parameter in base.named_parameters(recurse=False):
                name = f"{path}.{leaf}".removeprefix("base_model.model.")
                if "original_module" in name or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                yield generation._fix_param_name_to_vllm(name, ["modules_to_save.default."]), parameter.data


@contextmanager
def merged(layer: Any) -> Iterator[torch.nn.Module]:
    """Yield the module that a LoRA layer wraps with the adapter in its weights; restore its parameters afterwards."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    wrappers: list[Any] = [layer]
    while isinstance(wrappers[-1].base_layer, BaseTunerLayer):  # stacked experts have a wrapper for each parameter
        wrappers.append(wrappers[-1].base_layer)
    inner = wrappers[-1].base_layer
    originals = [(name, weight, weight.data) for name, weight in inner.named_parameters(recurse=False)]
    with torch.no_grad():
        for _, parameter, values in originals:
            parameter.data = values.clone()  # a new tensor, as the engine may keep it until it has the whole layer
        for wrapper in reversed(wrappers):
            wrapper.merge()
    try:
        yield inner
    finally:
        for wrapper in wrappers:
            wrapper.merged_adapters.clear()  # unmerging would subtract the adapter from what was handed out
        for name, parameter, values in originals:
            parameter.data = values
            inner.register_parameter(name, parameter)


def reload_server(generation: Any) -> None:
    """Have a server on this machine read the weights from a file, in memory where there is room."""
    client = generation.vllm_client
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        tensors = {name: value.contiguous() for name, value in generation._iter_named_params()}
        save_file(tensors, Path(directory) / "model.safetensors")
        request = {"method": "reload_from", "args": [directory]}
        client._post(f"{client.base_url}/collective_rpc", json=request)
    client.reset_prefix_cache()


class ServerWorker:
    """For a server on a CPU: `vllm serve --worker-extension-cls cogumi.patches.vllm_engine.ServerWorker`."""

    model_runner: Any

    def reload_from(self, directory: str) -> None:
        self.model_runner.reload_weights(weights_path=directory)
        pack_heads(self.model_runner.get_model())


def adapter_options(rank: int) -> dict[str, Any]:
    """Return the arguments of an engine that serves the trainer's adapter beside its base. rank: the largest."""
    from vllm.config.lora import MaxLoRARanks

    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(n for n in get_args(MaxLoRARanks) if n >= rank)}


def serves_adapter(generation: Any) -> bool:
    """Return whether the engine multiplies base and adapter apart, as the trainer does, instead of their sum."""
    return generation.mode == "colocate" and generation.llm.llm_engine.vllm_config.lora_config is not None


def hand_over_adapter(generation: Any) -> None:
    """Give the engine the adapter as it is now, in the place of the last one; its files are in memory where there is room."""
    from vllm.lora.request import LoRARequest

    engine, before = generation.llm.llm_engine, getattr(generation, "cogumi_adapter", None)
    number = 1 if before is None else before.lora_int_id + 1
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        generation.model.save_pretrained(directory, save_embedding_layers=False)
        if before is not None:
            engine.remove_lora(before.lora_int_id)
        generation.cogumi_adapter = LoRARequest(f"policy-{number}", number, directory)
        engine.add_lora(generation.cogumi_adapter)
    generation.llm.reset_prefix_cache()


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def pack_heads(model: torch.nn.Module) -> None:
    """Pack every LM head again: one that is tied to the embedding is not reloaded, and would stay the old one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


# ------------------------------------------------------------------------------------------- what an engine says of itself


def head_dtype(generation: Any) -> torch.dtype | None:
    """Return what the engine multiplies its LM head in; None for a server, which does not tell."""
    if generation.mode != "colocate":
        return None
    return generation.llm.llm_engine.model_config.head_dtype


def observe_generation(generation: Any, observer: Callable[[list[list[int]]], None]) -> None:
    """From now on `observer` is given the first completion of each prompt, behind its prompt, while the engine is awake.

    TRL lets an engine in this process sleep, without its weights, as soon as it has its completions.
    """

    def generate_here(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = generate(*args, **kwargs)
        observer([[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs])
        return outputs

    def generate_there(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        completions = output["completion_ids"][:: kwargs.get("n", 1)]
        observer([[*prompt, *ids] for prompt, ids in zip(output["prompt_ids"], completions, strict=True)])
        return output

    if generation.mode == "colocate":
        wrap_method(generation.llm, "generate", generate_here)
    elif generation.accelerator.is_main_process:
        wrap_method(generation.vllm_client, "generate", generate_there)


def score(generation: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the engine's log-probability of every token but the first of each sequence, in nats, at temperature 1."""
    if generation.mode != "colocate":
        scored = generation.vllm_client.get_sequence_logprobs([*sequences], [1] * len(sequences), top_logprobs=1)
        return [[place[0] for place in logprob] for logprob in scored["actual_logprobs"]]
    from vllm import LLM, SamplingParams

    if serves_adapter(generation) and on_cpu():
        return score_prefixes(generation, sequences)
    prompts = [{"prompt_token_ids": list(sequence)} for sequence in sequences]
    # Greedy, so that what follows is sampled from the same random numbers as without.
    settings = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    adapter = getattr(generation, "cogumi_adapter", None)
    outputs = LLM.generate(generation.llm, prompts, settings, use_tqdm=False, lora_request=adapter)
    return [
        [
            place[token].logprob
            for token, place in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        for output in outputs
    ]


def score_prefixes(generation: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """`score`, a request for each token: on a CPU, vLLM's LoRA kernels cannot give log-probabilities of a prompt."""
    from vllm import LLM, SamplingParams

    places = [(sequence[:end], sequence[end]) for sequence in sequences for end in range(1, len(sequence))]
    prompts = [{"prompt_token_ids": list(before)} for before, _ in places]
    settings = [SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=[token]) for _, token in places]
    outputs = LLM.generate(generation.llm, prompts, settings, use_tqdm=False, lora_request=generation.cogumi_adapter)
    logps = iter([out.outputs[0].logprobs[0][token].logprob for out, (_, token) in zip(outputs, places, strict=True)])
    return [[next(logps) for _ in sequence[1:]] for sequence in sequences]
