# %% [markdown]
# # See what would be trained on
# At the end you know which tokens a model would learn from your file, how long the examples are, and which rows are left out and why.
#
# Nothing is trained here. This takes half a minute.

# %% tags=["parameters"]
try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")

CHAT, FIM = "smoke/llama-3.1-8b-sft", "smoke/sft"  # the real ones: "llama-3.1-8b-sft", "qwen2.5-coder-7b-gspo-fim"
RUNS = "runs/data"

# %% [markdown]
# **Conversations.** Every turn of the assistant is learned (underlined), with its end token and without its header. The chat template decides where a turn begins.

# %%
cogumi.preview(CHAT, examples=2)

# %% [markdown]
# **Fill in the middle.** A piece is cut out of a function. The model sees the text before and after it, and learns the piece.

# %%
cogumi.preview(FIM, examples=2)

# %% [markdown]
# Try any key of the configuration. Here every example has its suffix first, and the pieces are 40 to 80 characters long.

# %%
cogumi.preview(FIM, examples=1, data__fim__spm_rate=1.0, data__fim__middle_chars=[40, 80])

# %% [markdown]
# **Your own file**: parquet, JSON lines or CSV. Rows that cannot be used are counted by reason, and the first of each kind is shown.

# %%
from pathlib import Path

import polars as pl

mine = Path(RUNS, "mine.jsonl")
mine.parent.mkdir(parents=True, exist_ok=True)
asked = ["What is 2 + 3?", "Name a prime above 10.", None, "Spell cat backwards."]
pl.DataFrame({"prompt": asked, "completion": ["5", "11", "?", "tac"]}).write_ndjson(mine)
cogumi.preview(CHAT, data__source=str(mine), data__format="prompt_completion", data__eval_rows=0, data__fraction=1.0)

# %% [markdown]
# **Next**: put your file into `data.source` and train on it, as in [03](03_sft.ipynb).
