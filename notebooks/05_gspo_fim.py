# %% [markdown]
# # GSPO on code: fill in the middle
# At the end you have the rewards of a GSPO run on code with holes, and a proof of which loss trained it.
#
# A piece is cut out of a function. The model sees the text before and after it, and writes the piece. This takes two minutes on two CPU cores.
#
# **The small base is too weak for this task**: its completions hardly improve. For readable completions use a real code model, or see the [quickstart](00_quickstart.ipynb).

# %% tags=["parameters"]
import json
from pathlib import Path

try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")
from cogumi.notebook import completions, figures

SFT, GSPO = "smoke/sft", "smoke/gspo"  # a real one needs no SFT: "qwen2.5-coder-7b-gspo-fim" on "Qwen/Qwen2.5-Coder-7B"
RUNS = "runs/fim"

# %% [markdown]
# **Teach the format first.** The small base does not know fill-in-the-middle. Qwen2.5-Coder does: skip this cell for it.

# %%
print(cogumi.start(SFT, cogumi__run_dir=f"{RUNS}/sft").wait())

# %% [markdown]
# **Look at a prompt.** The rewards compare the completion with the middle that was cut out.

# %%
cogumi.preview(GSPO, examples=2, model__name=f"{RUNS}/sft/merged")

# %%
run = cogumi.start(GSPO, model__name=f"{RUNS}/sft/merged", cogumi__run_dir=f"{RUNS}/gspo")
run.dashboard()

# %%
print(cogumi.attach(f"{RUNS}/gspo").wait())

# %% [markdown]
# **Which loss ran**: loss and gradient of the first steps against the formula in float64, until the clip has been seen to act.

# %%
print(json.dumps(json.loads(Path(RUNS, "gspo", "loss.json").read_text())["relative_difference"], indent=2))

# %% [markdown]
# **The rewards.** Look at the entropy and at the spread within groups, too: they tell learning from repeating.

# %%
figures.rewards(f"{RUNS}/gspo")

# %%
figures.curves(f"{RUNS}/gspo")

# %% [markdown]
# **The same holes**, filled before SFT, after SFT and after GSPO:

# %%
completions.side_by_side({"sft": f"{RUNS}/sft", "gspo": f"{RUNS}/gspo"})

# %% [markdown]
# **Next**: a reward of your own in [09](09_reward_and_tools.ipynb).
