# %% [markdown]
# # Fine-tune on conversations
# At the end you have a model that follows an instruction, and the same prompts answered before and after.
#
# A LoRA learns every turn of the assistant. Rows are packed if a probe finds that packing changes nothing on this model. It takes a minute on two CPU cores.

# %% tags=["parameters"]
try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")
from cogumi.notebook import completions, figures

CONFIG = "smoke/llama-3.1-8b-sft"  # the real one: "llama-3.1-8b-sft"
RUN = "runs/sft-chat"

# %% [markdown]
# **Fifty steps first.** `cogumi.sanity` trains the first steps of the run. It answers whether the rest is safe to train: yes, no, or not shown.

# %%
print(cogumi.start(CONFIG, cogumi__run_dir=RUN, cogumi__sanity=50).wait())

# %% [markdown]
# **The whole run** continues from there. It is the same call, without the sanity check.

# %%
run = cogumi.start(CONFIG, cogumi__run_dir=RUN)
run.dashboard()

# %%
print(cogumi.attach(RUN).wait())

# %% [markdown]
# **What it decided, and why**:

# %%
print(cogumi.attach(RUN).logs(60))

# %%
figures.curves(RUN)

# %% [markdown]
# **The same prompts before and after.** They are held out: the model has not seen them.

# %%
completions.side_by_side(RUN)

# %% [markdown]
# **Next**: preferences in [04](04_dpo.ipynb), your own file in [02](02_data.ipynb), a conversation in [07](07_merge_and_chat.ipynb).
