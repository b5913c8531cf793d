# %% [markdown]
# # Quickstart: from code to a model you have talked to
# Real code, a small base, fine-tuning, GSPO, a merge that is checked, and a report to keep. No download, no GPU, two minutes on two CPU cores.
# For a real model change the two names: the same cells train it. Each cell needs only the first one and what is in `RUNS`.

# %% tags=["parameters"]
try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")
from cogumi.notebook import completions, figures

SFT, GSPO = "smoke/sft", "smoke/gspo"  # on a GPU: "qwen3-4b-sft", "qwen3-4b-gspo" (`cogumi cp` lists them)
RUNS = "runs/quickstart"

# %% [markdown]
# **Fine-tune.** The run is a process of its own: it outlives this notebook. Run the cell again and it says that the run is there. The panel follows it.
# The first time on a machine the small base is made before, which takes a minute or two. A flag that is not green says what was seen and which key to change.

# %%
sft = cogumi.start(SFT, cogumi__run_dir=f"{RUNS}/sft")
sft.dashboard()

# %%
print(cogumi.attach(f"{RUNS}/sft").wait())

# %% [markdown]
# **Reward it.** GSPO starts from the merged model: completions are scored for edit similarity and for code that parses.

# %%
gspo = cogumi.start(GSPO, model__name=f"{RUNS}/sft/merged", cogumi__run_dir=f"{RUNS}/gspo")
gspo.dashboard()

# %%
print(cogumi.attach(f"{RUNS}/gspo").wait())

# %% [markdown]
# **Look.** Did it learn, and does it write differently from the base? The small base is a toy of two layers: what it writes is hardly code, and often nothing at all.
# Its curves, rewards and checks are real; a real model shows its training in its words.

# %%
figures.curves(f"{RUNS}/gspo")

# %%
figures.rewards(f"{RUNS}/gspo")

# %%
completions.side_by_side({"sft": f"{RUNS}/sft", "gspo": f"{RUNS}/gspo"})

# %% [markdown]
# **Talk to it.** The merged directory is a plain Hugging Face model. This one completes code; 07 has a conversation.

# %%
from transformers import logging, pipeline

logging.set_verbosity_error()
writer = pipeline("text-generation", model=f"{RUNS}/gspo/merged")
print(writer("def add(a, b):\n    return ", max_new_tokens=12)[0]["generated_text"])

# %% [markdown]
# **Keep the report**: one file, readable when the box is gone.

# %%
from IPython.display import FileLink

cogumi.attach(f"{RUNS}/gspo").report()
FileLink(f"{RUNS}/gspo/report.html")
