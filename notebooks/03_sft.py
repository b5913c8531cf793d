# %% [markdown]
# # Fine-tune on conversations
# A LoRA on the base, every turn of the assistant learned, packed if a probe finds that packing is exact on this model. A minute on two CPU cores.

# %% tags=["parameters"]
try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")
from cogumi.notebook import completions, figures

CONFIG = "smoke/llama-3.1-8b-sft"  # the real one: "llama-3.1-8b-sft"
RUN = "runs/sft-chat"

# %% [markdown]
# **Fifty steps first**: `cogumi.sanity` trains so many steps of the run, and answers whether it is safe to scale: yes, no, or not shown.

# %%
print(cogumi.start(CONFIG, cogumi__run_dir=RUN, cogumi__sanity=50).wait())

# %% [markdown]
# **The whole run** continues from there: the same call, without the sanity check.

# %%
run = cogumi.start(CONFIG, cogumi__run_dir=RUN)
run.dashboard()

# %%
print(cogumi.attach(RUN).wait())

# %% [markdown]
# What it decided, and why:

# %%
print(cogumi.attach(RUN).logs(60))

# %%
figures.curves(RUN)

# %% [markdown]
# The same prompts before and after:

# %%
completions.side_by_side(RUN)
