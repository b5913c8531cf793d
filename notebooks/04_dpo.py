# %% [markdown]
# # Preferences: DPO after SFT
# At the end you have a model that learned from pairs of a better and a worse answer, and its answers before and after.
#
# DPO starts from a fine-tuned model. Here SFT imitates demonstrations of which about half are careless, as in the quickstart.
# The pairs then say which answer is better. This takes a minute on two CPU cores.

# %% tags=["parameters"]
try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")
from cogumi.notebook import completions, figures

SFT, DPO = "smoke/chat-sft", "smoke/llama-3.1-8b-dpo"  # the real ones: "llama-3.1-8b-sft", "llama-3.1-8b-dpo"
RUNS = "runs/dpo"

# %% [markdown]
# **Fine-tune first.** DPO needs a model that has a chat template and answers.

# %%
print(cogumi.start(SFT, cogumi__run_dir=f"{RUNS}/sft").wait())

# %% [markdown]
# **Look at a pair.** The chosen answer renames the variable in every place. The rejected one renames only the first place.

# %%
cogumi.preview(DPO, examples=1, model__name=f"{RUNS}/sft/merged")

# %% [markdown]
# **Train.** Before the first update the model is its own reference, so the rewards are 0. This is checked.
# An SFT term beside DPO's keeps the chosen answers likely: without it, the answers of this small base fall apart.

# %%
run = cogumi.start(DPO, model__name=f"{RUNS}/sft/merged", cogumi__run_dir=f"{RUNS}/dpo")
run.dashboard()

# %%
print(cogumi.attach(f"{RUNS}/dpo").wait())

# %%
figures.curves(f"{RUNS}/dpo")

# %% [markdown]
# **Compare.** The same held-out tasks, answered by the base, after SFT and after DPO. No model has seen them.

# %%
models = {"base": "cogumi:small-base", "SFT": f"{RUNS}/sft/merged", "DPO": f"{RUNS}/dpo/merged"}
completions.compare(models, "smoke/chat-gspo")

# %% [markdown]
# **Next**: rewards instead of pairs in the [quickstart](00_quickstart.ipynb) and in [05](05_gspo_fim.ipynb).
