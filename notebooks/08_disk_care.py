# %% [markdown]
# # Disk space: predict, watch, free
# At the end you know how much space a run will need, what takes the space now, and which checkpoints are complete. You have a monitor for your own scripts.
#
# This takes half a minute.

# %% tags=["parameters"]
from pathlib import Path

try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")
from cogumi.disk import usage as disk

CONFIG = "smoke/sft"  # the real one: "qwen3-4b-sft"
RUN = "runs/disk"

# %% [markdown]
# **Which disk is this, and how full is it?** In a terminal, `cogumi disk status` names the disks of a run and what takes the space.

# %%
here = disk.filesystem_of(Path.cwd())
print(here.mount, disk.format_bytes(here.space.free), "free of", disk.format_bytes(here.space.total))

# %% [markdown]
# **How much will the run need?** Nothing is written yet. In a terminal: `cogumi disk predict CONFIG`.

# %%
print(next(line.figure for line in cogumi.preflight(CONFIG).lines if line.stage == "disk"))

# %% [markdown]
# **A short run** saves every ten steps. The last two checkpoints stay.

# %%
print(cogumi.start(CONFIG, cogumi__run_dir=RUN, train__max_steps=40, train__save_steps=10).wait())

# %%
print(cogumi.last_good_checkpoint(f"{RUN}/checkpoints"))
for use in disk.list_uses(Path(RUN)):
    print(use.what, disk.format_bytes(use.bytes))

# %% [markdown]
# **In your own script**: the monitor watches the disk of a directory. `trainer.add_callback(cogumi.DiskMonitorCallback())` does so for any Hugging Face trainer. `cogumi.protect(trainer)` makes its checkpoints complete or absent.

# %%
with cogumi.DiskMonitor(".", warn=0.7, alarm=0.9) as monitor:
    print(monitor.sample())

# %% [markdown]
# **Next**: `docs/reliability.md` describes what is deleted, what never is, and what happens on a full disk.
