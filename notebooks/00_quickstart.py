# %% [markdown]
# # Quickstart: teach a small model to rename variables
# At the end you have a model that does what you ask, a table that shows what each stage changed, and a report to keep.
#
# The base is a small model of Python code that comes with the package. You ask it to rename a variable in a few lines of real code.
# SFT imitates demonstrations. About half of them are careless on purpose: they rename only the first place.
# GSPO sees other tasks and no demonstration. It rewards right answers, and so corrects what SFT has copied.
# Nothing is downloaded, and no GPU is needed.
#
# For a real model, change the two names in the next cell. Every other cell needs only that cell and the files in `RUNS`.

# %% tags=["parameters"]
try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")
from cogumi.notebook import completions, figures

SFT, GSPO = "smoke/chat-sft", "smoke/chat-gspo"  # on a GPU: "qwen3-4b-sft", "qwen3-4b-gspo" (`cogumi cp` lists them)
RUNS = "runs/quickstart"

# %% [markdown]
# **Look at the demonstrations.** The model learns the assistant's words, right or careless.

# %%
cogumi.preview(SFT, examples=6)

# %% [markdown]
# **Fine-tune.** The run is a process of its own: it keeps training when you close this notebook. The panel follows it.

# %%
sft = cogumi.start(SFT, cogumi__run_dir=f"{RUNS}/sft")
sft.dashboard()

# %%
print(cogumi.attach(f"{RUNS}/sft").wait())

# %% [markdown]
# **Reward it.** GSPO starts from the merged model. Each task is answered eight times.
# A right answer earns 2, a careless one about 0.9: 1 for being exact, and up to 1 for how close it is.

# %%
gspo = cogumi.start(GSPO, model__name=f"{RUNS}/sft/merged", cogumi__run_dir=f"{RUNS}/gspo")
gspo.dashboard()

# %%
print(cogumi.attach(f"{RUNS}/gspo").wait())

# %% [markdown]
# **Compare.** The same held-out tasks, answered by the base, after SFT and after GSPO. No model has seen them.

# %%
models = {"base": "cogumi:small-base", "SFT": f"{RUNS}/sft/merged", "GSPO": f"{RUNS}/gspo/merged"}
completions.compare(models, GSPO)

# %% [markdown]
# **Rewards.** The distribution of rewards over completions, in the first quarter of the steps and in the last.

# %%
figures.rewards(f"{RUNS}/gspo")

# %% [markdown]
# **Keep the report**: one HTML file that you can open when the machine is gone.

# %%
from IPython.display import FileLink

cogumi.attach(f"{RUNS}/gspo").report()
FileLink(f"{RUNS}/gspo/report.html")

# %% [markdown]
# **Talk to it.** Ask for a renaming of your own. GSPO began from the model after SFT: here `base` is that model.

# %%
cogumi.attach(f"{RUNS}/gspo").chat("Rename value to number:\nvalue = int(value)", temperature=0)

# %% [markdown]
# **Next**: your own conversations in [03](03_sft.ipynb), a reward of your own in [09](09_reward_and_tools.ipynb), merging and chatting in [07](07_merge_and_chat.ipynb).
