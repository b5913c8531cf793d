# %% [markdown]
# # Watch, stop and resume a run
# At the end you have left a run, found it again, paused it, stopped it, and continued it from its checkpoint.
#
# The run trains in a process of its own. You can restart the kernel, close the laptop, or attach from another notebook. This
# takes a minute on two CPU cores.

# %% tags=["parameters"]
import time

try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")

CONFIG, STEPS = "smoke/sft", 160  # the real one: "qwen3-4b-sft"
RUN = "runs/watched"

# %%
run = cogumi.start(CONFIG, cogumi__run_dir=RUN, train__max_steps=STEPS, cogumi__price_per_hour=2.5)
run.dashboard()

# %% [markdown]
# **Now restart the kernel**, or close everything. Run the first cell, and continue here: the run has trained meanwhile.
# In a terminal, `cogumi status --watch runs/watched` follows it, without curves and samples.

# %%
run = cogumi.attach(RUN)
print(run)
print("logged so far:", run.metrics()[-1:])

# %% [markdown]
# **Pause.** The panel has buttons for this, and for a checkpoint. A pause keeps the memory allocated; a stop frees it.

# %%
run = cogumi.attach(RUN)
run.pause()
while run.status().state == "running":
    time.sleep(0.2)
print(run)
run.unpause()

# %% [markdown]
# **Stop.** The last finished step is saved, read back and compared, and the process ends.

# %%
print(cogumi.attach(RUN).stop().checkpoint)
print("whole:", cogumi.last_good_checkpoint(f"{RUN}/checkpoints"))

# %% [markdown]
# **The same call continues the run**, bit for bit as if it had never stopped.

# %%
again = cogumi.start(CONFIG, cogumi__run_dir=RUN, train__max_steps=STEPS, cogumi__price_per_hour=2.5)
print(again.wait())

# %%
cogumi.attach(RUN).dashboard()

# %% [markdown]
# **Next**: what a run writes to the disk in [08](08_disk_care.ipynb), and what to do after a crash in `docs/reliability.md`.
