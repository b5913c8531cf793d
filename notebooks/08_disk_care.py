# %% [markdown]
# # Disks: the night is lost when they fill
# What a run will want, who takes the space, which checkpoints are whole, and a monitor for scripts of your own. Half a minute.

# %% tags=["parameters"]
from pathlib import Path

try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")
from cogumi import disk

CONFIG = "smoke/sft"  # the real one: "qwen3-4b-sft"
RUN = "runs/disk"

# %% [markdown]
# **Which disk is this, and how full?** (`cogumi disk` in a terminal names them all, and who takes the space.)

# %%
here = disk.filesystem_of(Path.cwd())
print(here.mount, disk.format_bytes(here.space.free), "free of", disk.format_bytes(here.space.total))

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
for use in disk.list_uses(Path(RUN)):
    print(use.what, disk.format_bytes(use.bytes))

# %% [markdown]
# **In a script of your own** a callback watches the disk of any trainer, `cogumi.protect(trainer)` makes its checkpoints whole or absent, and the monitor alone watches a directory.

# %%
with cogumi.DiskMonitor(".", warn=0.7, alarm=0.9) as monitor:
    print(monitor.sample())
