"""DPO on preference pairs by hand: TRL, PEFT and cogumi's patches. configs/smoke/llama-3.1-8b-dpo.yaml is the same as a run.

    python recipes/dpo.py MODEL PAIRS.parquet OUT [key=value of DPOConfig ...]

The data has the columns `prompt`, `chosen` and `rejected`, text or messages. The reference policy is the model without
the adapter. A new adapter changes nothing at the start, so the first step's rewards must be 0 and a sigmoid loss ln 2.
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

name, data, out, *words = sys.argv[1:]
settings = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}

on_gpu = torch.cuda.is_available()
model = AutoModelForCausalLM.from_pretrained(
    name, dtype=torch.bfloat16 if on_gpu else torch.float32, device_map={"": 0} if on_gpu else None
)
lora = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
rows = load_dataset("parquet", data_files=data, split="train")
args = trl.DPOConfig(
    output_dir=f"{out}/checkpoints",
    bf16=on_gpu,
    report_to="none",
    **{"logging_steps": 1, "logging_first_step": True, "save_total_limit": 2, **settings},
)
set_seed(args.seed)
trainer = trl.DPOTrainer(
    model=model,
    args=args,
    train_dataset=rows.select_columns(["prompt", "chosen", "rejected"]),
    processing_class=AutoTokenizer.from_pretrained(name),
    peft_config=lora,
)
cogumi.protect(trainer)
trainer.train()
trainer.save_model(f"{out}/adapter")  # with the tokenizer
print(cogumi.merge_adapter(f"{out}/adapter", f"{out}/merged", base=name))
