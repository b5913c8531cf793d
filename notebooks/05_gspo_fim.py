# %% [markdown]
# # GSPO on code: reward what fits the hole
# Sequence-level ratios, the paper's epsilon, and a proof that this loss is the one that ran. A minute and a half on two CPU cores.

# %% tags=["parameters"]
import json
from pathlib import Path

try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")
from cogumi.notebook import completions, figures

CONFIG, BASE = "smoke/gspo", "cogumi:small-base"  # the real ones: "qwen2.5-coder-7b-gspo-fim", "Qwen/Qwen2.5-Coder-7B"
RUN = "runs/gspo-fim"

# %% [markdown]
# **What a rollout is asked**: prefix and suffix; the middle is what rewards compare with.

# %%
cogumi.preview(CONFIG, examples=2, model__name=BASE)

# %%
run = cogumi.start(CONFIG, model__name=BASE, cogumi__run_dir=RUN)
run.dashboard()

# %%
print(cogumi.attach(RUN).wait())

# %% [markdown]
# **Which loss ran**: value and gradient of the first steps against the formula in float64, until the clip was seen to act.

# %%
print(json.dumps(json.loads(Path(RUN, "loss.json").read_text())["relative_difference"], indent=2))

# %% [markdown]
# **Rewards**, and whether the model learned or only wrote more alike: look at entropy and at the spread within groups.

# %%
figures.rewards(RUN)

# %%
figures.curves(RUN)

# %%
completions.side_by_side(RUN)
