# %% [markdown]
# # Preferences: DPO after SFT
# Pairs of a better and a worse answer, starting from the fine-tuned model. Two minutes on two CPU cores, the SFT stage included.

# %% tags=["parameters"]
try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")
from cogumi.notebook import completions, figures

SFT, DPO = "smoke/llama-3.1-8b-sft", "smoke/llama-3.1-8b-dpo"  # the real ones: "llama-3.1-8b-sft", "llama-3.1-8b-dpo"
RUNS = "runs/dpo"

# %% [markdown]
# **Fine-tune first**: DPO starts from a model that has a chat template and answers.

# %%
print(cogumi.start(SFT, cogumi__run_dir=f"{RUNS}/sft").wait())

# %% [markdown]
# **What the pairs look like**: learned is the better answer, the worse one is what it is to be less likely than.

# %%
cogumi.preview(DPO, examples=1, model__name=f"{RUNS}/sft/merged")

# %% [markdown]
# **DPO.** Before the first update the policy is its own reference, so the rewards are 0 and the loss is log 2: both are checked.

# %%
run = cogumi.start(DPO, model__name=f"{RUNS}/sft/merged", cogumi__run_dir=f"{RUNS}/dpo")
run.dashboard()

# %%
print(cogumi.attach(f"{RUNS}/dpo").wait())

# %%
figures.curves(f"{RUNS}/dpo")

# %%
completions.side_by_side(f"{RUNS}/dpo")
