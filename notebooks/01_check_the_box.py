# %% [markdown]
# # Check the machine before you pay for it
# At the end you know whether this machine is fit to train, whether a run fits, and what the run costs on a card that you might rent.
#
# Nothing is trained here. This takes half a minute.

# %% tags=["parameters"]
try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")

CONFIG = "smoke/llama-3.1-8b-sft"  # the real one: "llama-3.1-8b-sft"
CARD = "H100 SXM"

# %% [markdown]
# **The machine**: Python, disks, driver and packages. Each problem comes with its cause and its fix.

# %%
print(cogumi.doctor())

# %% [markdown]
# **The run on this machine**: memory, disk and time. One training step of this model, data and loss is computed on tensors without memory.

# %%
cogumi.preflight(CONFIG)

# %% [markdown]
# **The same on a card that you might rent**, with what it costs.

# %%
cogumi.preflight(CONFIG, card=CARD, cogumi__price_per_hour=2.5)

# %% [markdown]
# **Change the configuration** in a form that checks each value. *write* writes a YAML file.

# %%
cogumi.configure(CONFIG)

# %% [markdown]
# **Next**: look at your data in [02](02_data.ipynb), then train in the [quickstart](00_quickstart.ipynb).
