# %% [markdown]
# # Fine-tune on conversations
# A LoRA on the base, every turn of the assistant learned, packed if a probe finds that packing is exact on this model. A minute on two CPU cores.

# %% tags=["parameters"]
import cogumi
from cogumi.notebook import completions, figures

CONFIG = "smoke/llama-3.1-8b-sft"  # the real one: "llama-3.1-8b-sft"
RUN = "runs/sft-chat"

# %% [markdown]
# **Fifty steps first**: `cogumi.sanity` trains so many steps of the run, and answers whether it is safe to go on.

# %%
print(cogumi.start(CONFIG, cogumi__run_dir=RUN, cogumi__sanity=50).wait())

# %% [markdown]
# **The whole run** goes on from there: same words, without the sanity check.

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
