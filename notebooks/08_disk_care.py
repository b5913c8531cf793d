# %% [markdown]
# # Disks: the night is lost when they fill
# What a run will want, who takes the space, which checkpoints are whole, and a monitor for scripts of your own. Half a minute.

# %% tags=["parameters"]
import cogumi
from cogumi import disk

CONFIG = "smoke/sft"  # the real one: "qwen3-4b-sft"
RUN = "runs/disk"

# %% [markdown]
# **Which disks are there, and how full?**

# %%
for each in disk.filesystems():
    print(each.mount, disk.spoken(each.space.free), "free of", disk.spoken(each.space.total))

# %% [markdown]
# **What would the run want**, before anything is written? (`cogumi disk predict CONFIG` in a terminal.)

# %%
print(next(line.figure for line in cogumi.preflight(CONFIG).lines if line.stage == "disk"))

# %% [markdown]
# **A short run**, which saves every ten steps; the last two checkpoints stay.

# %%
print(cogumi.start(CONFIG, cogumi__run_dir=RUN, train__max_steps=40, train__save_steps=10).wait())

# %%
print(cogumi.last_good_checkpoint(f"{RUN}/checkpoints"))
for use in disk.uses(RUN):
    print(use)

# %% [markdown]
# **In a script of your own** a callback watches the disk of any trainer, `cogumi.protect(trainer)` makes its checkpoints whole or absent, and the monitor alone watches a directory.

# %%
with cogumi.DiskMonitor(".", warn=0.7, alarm=0.9) as monitor:
    print(monitor.sample())
