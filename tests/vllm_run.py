"""A GSPO run from YAML through vLLM, in a process of its own, with what the engine said after each weight sync.

`python tests/vllm_run.py '{"config": {...}, "break_after": 3}'`. Two engines cannot follow each other in one process.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
RESULT = "run: "
PROMPTS = [f"def {word}_{number}(a, b):" for word in ("add", "read", "join", "sort") for number in range(16)]


def letters(completions: list[str], **_: Any) -> list[float]:
    return [text.count("e") / max(1, len(text)) for text in completions]


def compare_greedy(generation: Any) -> dict[str, float]:
    """Greedy tokens of the engine against the trainer's own forward pass over them: agreement, and nats apart."""
    import torch
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(generation.model.config.name_or_path)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    outputs = LLM.generate(
        generation.llm, [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True), use_tqdm=False,
        lora_request=getattr(generation, "cogumi_adapter", None),
    )  # fmt: skip
    same, apart = [], []
    for ids, output in zip(prompts, outputs, strict=True):
        chosen = output.outputs[0]
        with torch.no_grad():
            logits = generation.model(input_ids=torch.tensor([[*ids, *chosen.token_ids]])).logits[0, len(ids) - 1 : -1]
        logps = logits.float().log_softmax(-1)
        for place, (token, said) in enumerate(zip(chosen.token_ids, chosen.logprobs, strict=True)):
            same.append(float(logps[place].argmax() == token))
            apart.append(abs(float(logps[place, token]) - said[token].logprob))
    return {"agree": sum(same) / len(same), "apart": sum(apart) / len(apart)}


def main(config: dict[str, Any], break_after: int | None = None, tied_head: bool = True) -> None:
    import cogumi
    from cogumi.core.errors import UsageError
    from cogumi.patches import vllm_engine

    sync, said, frozen = vllm_engine.sync_weights, [], {}

    def sync_and_compare(generation: Any) -> None:
        if break_after is None or len(said) < break_after:
            sync(generation)
        if not frozen:
            base = generation.model.named_parameters()
            frozen.update({name: value.clone() for name, value in base if not value.requires_grad})
        said.append(compare_greedy(generation) if generation.mode == "colocate" else {})
        for name, value in generation.model.named_parameters():
            assert name not in frozen or bool((value == frozen[name]).all()), f"{name} is not what it was"

    vllm_engine.sync_weights = sync_and_compare
    if not tied_head:
        vllm_engine.pack_heads = lambda model: None
    try:
        result = cogumi.train(config)
    except UsageError as error:
        print(RESULT + json.dumps({"refused": str(error)}))
        return
    run_dir = Path(result.run_dir)
    print(RESULT + json.dumps({"said": said, "flags": json.loads((run_dir / "flags.json").read_text())}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
