# %% [markdown]
# # See what would be trained on
# Which tokens are learned, how long examples are, what is left out and why; then your own file. Nothing is trained. Half a minute.

# %% tags=["parameters"]
try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")

CHAT, FIM = "smoke/llama-3.1-8b-sft", "smoke/sft"  # the real ones: "llama-3.1-8b-sft", "qwen2.5-coder-7b-gspo-fim"
RUNS = "runs/data"

# %% [markdown]
# **Conversations.** Every turn of the assistant is learned (underlined), with its end token and without its header. The masks come from the chat template.

# %%
cogumi.preview(CHAT, examples=2)

# %% [markdown]
# **Fill in the middle.** A function is cut at random; the model sees prefix and suffix, and learns the middle.

# %%
cogumi.preview(FIM, examples=2)

# %% [markdown]
# Any key of the config can be tried: suffix first in every example, middles of up to eighty characters.

# %%
cogumi.preview(FIM, examples=1, data__fim__spm_rate=1.0, data__fim__middle_chars=[40, 80])

# %% [markdown]
# **Your own file**: parquet, JSON lines or CSV. Rows that make no example are counted by reason, with the first of each.

# %%
from pathlib import Path

import polars as pl

mine = Path(RUNS, "mine.jsonl")
mine.parent.mkdir(parents=True, exist_ok=True)
asked = ["What is 2 + 3?", "Name a prime above 10.", None, "Spell cat backwards."]
pl.DataFrame({"prompt": asked, "completion": ["5", "11", "?", "tac"]}).write_ndjson(mine)
cogumi.preview(CHAT, data__source=str(mine), data__format="prompt_completion", data__eval_rows=0, data__fraction=1.0)
