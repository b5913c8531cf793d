# %% [markdown]
# # Check the box before you pay for it
# At the end you know whether this machine is fit to train, whether a run fits it, and what that run costs on a card that you might rent.
#
# Nothing is trained here, so there is no text to compare. This takes half a minute.

# %% tags=["parameters"]
try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")

CONFIG = "smoke/llama-3.1-8b-sft"  # the real one: "llama-3.1-8b-sft"
CARD = "H100 SXM"

# %% [markdown]
# **The machine**: Python, disks, driver and packages. What is wrong comes with its cause and its fix.

# %%
print(cogumi.doctor())

# %% [markdown]
# **The run on this machine**: memory, disk and time. One step is computed on tensors that take no memory, with this model, this data and this loss.

# %%
cogumi.preflight(CONFIG)

# %% [markdown]
# **The same on a card that you might rent**, with what it costs.

# %%
cogumi.preflight(CONFIG, card=CARD, cogumi__price_per_hour=2.5)

# %% [markdown]
# **Change the config** in a form that knows every key of TRL and PEFT. The YAML stands beside it. *preflight* makes the forecast; *write* writes the YAML.

# %%
cogumi.configure(CONFIG)

# %% [markdown]
# **Next**: look at your data in [02](02_data.ipynb), then train in the [quickstart](00_quickstart.ipynb).
