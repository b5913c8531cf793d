# %% [markdown]
# # Check the box before you pay for it
# Is this machine fit to train (`doctor`), and would the run fit it (`preflight`): memory, disk, hours, dollars. Nothing is trained here. Half a minute.

# %% tags=["parameters"]
try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")

CONFIG = "smoke/llama-3.1-8b-sft"  # the real one: "llama-3.1-8b-sft"
CARD = "H100 SXM"

# %% [markdown]
# **The machine**: interpreter, disks, driver, packages, and native imports in processes of their own. What is wrong has its cause and its fix.

# %%
print(cogumi.doctor())

# %% [markdown]
# **The run on this machine.** The step is run on tensors without memory, so the numbers are of this model, this data, this loss.

# %%
cogumi.preflight(CONFIG)

# %% [markdown]
# **The same on a card that you might rent**, with what it costs.

# %%
cogumi.preflight(CONFIG, card=CARD, cogumi__price_per_hour=2.5)

# %% [markdown]
# **Change the config** in a form that knows every key of TRL and peft, with the forecast beside it, and write the YAML.

# %%
cogumi.configure(CONFIG)
