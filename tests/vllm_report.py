"""vLLM's engine on a CPU, in a process of its own: starts it on a directory and prints what it reports of itself.

`python tests/vllm_report.py DIRECTORY '{"max_model_len": 2048}'`. On a CPU linear layers are repacked once they are loaded,
and the packed copies are no parameters, so the weights are counted before that.
"""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
RESULT = "engine: "


def main(directory: str, settings: dict[str, object]) -> None:
    import vllm.model_executor.model_loader.base_loader as loader
    from vllm import LLM
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    weights, original = 0, loader.process_weights_after_loading

    def count_first(model, *args, **words):  # type: ignore[no-untyped-def]
        nonlocal weights
        weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        return original(model, *args, **words)

    loader.process_weights_after_loading = count_first
    engine = LLM(directory, skip_tokenizer_init=True, max_num_seqs=8, max_num_batched_tokens=4096, enforce_eager=True,
                 **settings).llm_engine  # fmt: skip
    cache, config = engine.model_executor.driver_worker.model_runner.kv_cache_config, engine.vllm_config
    found = {
        "weights": weights,
        "dtype": str(config.model_config.dtype),
        "cache": cache.kv_cache_tensors[0].size,  # groups share one allocation
        "blocks": cache.num_blocks,
        "at_once": get_max_concurrency_for_kv_cache_config(config, cache),
        "block": config.cache_config.block_size,
        "in_flight": config.max_in_flight_tokens,
        "length": config.model_config.max_model_len,
    }
    print(RESULT + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
