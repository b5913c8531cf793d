# %% [markdown]
# # Watch it, stop it, take it up again
# The run directory is the interface: kill the kernel, close the laptop, attach from another notebook. A minute on two CPU cores.

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
# **Now restart the kernel** (or close everything), run the first cell, and continue here: the run has trained meanwhile. `cogumi status --watch` shows the same in a terminal.

# %%
run = cogumi.attach(RUN)
print(run)
print("logged so far:", run.metrics()[-1:])

# %% [markdown]
# **A checkpoint now, and a pause**: the panel's buttons do this. A pause keeps the machine and its memory; a stop gives them back.

# %%
run = cogumi.attach(RUN)
run.pause()
while run.status().state == "running":
    time.sleep(0.2)
print(run)
run.unpause()

# %% [markdown]
# **Stop**: the step is finished, a checkpoint is written, read back and verified, and the process ends.

# %%
print(cogumi.attach(RUN).stop().checkpoint)
print("whole:", cogumi.last_good_checkpoint(f"{RUN}/checkpoints"))

# %% [markdown]
# **The same call continues the run**, bit for bit as if it had not stopped.

# %%
again = cogumi.start(CONFIG, cogumi__run_dir=RUN, train__max_steps=STEPS, cogumi__price_per_hour=2.5)
print(again.wait())

# %%
cogumi.attach(RUN).dashboard()
