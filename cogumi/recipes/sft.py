"""SFT on conversations by hand: TRL, PEFT and cogumi's patches. configs/smoke/llama-3.1-8b-sft.yaml is the same as a run.

    python recipes/sft.py MODEL CHATS.parquet OUT [key=value of SFTConfig ...]

The data has a column `messages`. A run adds checks before anything is loaded, cached prepared data, and packing that is
proven first. It also adds flags, samples and a verdict, and keeps everything in one directory.
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
args = trl.SFTConfig(
    output_dir=f"{out}/checkpoints",
    assistant_only_loss=True,  # every turn of the assistant, and nothing else
    bf16=on_gpu,  # TRL's default is on: slow on a CPU
    report_to="none",
    **{"logging_steps": 1, "logging_first_step": True, "save_total_limit": 2, **settings},
)
set_seed(args.seed)  # the adapter's A is drawn when the trainer puts it on
trainer = trl.SFTTrainer(
    model=model,
    args=args,
    train_dataset=rows.select_columns("messages"),
    processing_class=AutoTokenizer.from_pretrained(name),
    peft_config=lora,
)
cogumi.protect(trainer)  # checkpoints whole or absent, a disk that fills up, signals
trainer.train()
trainer.save_model(f"{out}/adapter")  # with the tokenizer
print(cogumi.merge_adapter(f"{out}/adapter", f"{out}/merged", base=name))
