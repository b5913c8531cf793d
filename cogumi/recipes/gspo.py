"""GSPO on prompts with an answer by hand: TRL, PEFT and cogumi's patches. configs/smoke/chat-gspo.yaml is the same as a run.

    python recipes/gspo.py MODEL PROMPTS.parquet OUT [key=value of GRPOConfig ...]

The data has the columns `prompt` and `answer`. `loss_type="gspo"` is cogumi's word for the sequence-level ratio with
the paper's clip. cogumi guards such a trainer before its first rollout, measures it, and proves its loss in the first
steps.
"""

import sys

import yaml

import cogumi

if len(sys.argv) < 4:
    sys.exit(__doc__)

print(cogumi.patch(graph_break="off"))  # before trl

import peft  # noqa: E402
import torch  # noqa: E402
import trl  # noqa: E402
from datasets import load_dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed  # noqa: E402

from cogumi.rewards import rewards_of  # noqa: E402

name, data, out, *words = sys.argv[1:]
settings = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}

on_gpu = torch.cuda.is_available()
model = AutoModelForCausalLM.from_pretrained(
    name, dtype=torch.bfloat16 if on_gpu else torch.float32, device_map={"": 0} if on_gpu else None
)
lora = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
rows = load_dataset("parquet", data_files=data, split="train")
args = trl.GRPOConfig(
    output_dir=f"{out}/checkpoints",
    bf16=on_gpu,
    report_to="none",
    **{"loss_type": "gspo", "logging_steps": 1, "logging_first_step": True, "save_total_limit": 2, **settings},
)
set_seed(args.seed)
trainer = trl.GRPOTrainer(
    model=model,
    args=args,
    reward_funcs=rewards_of(["answer_similarity"]),  # or functions of your own
    train_dataset=rows.select_columns(["prompt", "answer"]),
    processing_class=AutoTokenizer.from_pretrained(name),
    peft_config=lora,
)
cogumi.protect(trainer)
trainer.train()
trainer.save_model(f"{out}/adapter")  # with the tokenizer
print(cogumi.merge_adapter(f"{out}/adapter", f"{out}/merged", base=name))
