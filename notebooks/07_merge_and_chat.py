# %% [markdown]
# # Merge, check, chat, export
# At the end you have a merged model of which every element was checked, and you have talked to it.
#
# An adapter is added to its full-precision base. Every element is read back and compared in float64. This takes two minutes on two CPU cores.

# %% tags=["parameters"]
from pathlib import Path

try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")

CONFIG = "smoke/llama-3.1-8b-sft"  # the real one: "llama-3.1-8b-sft"
RUN, OUT = "runs/to-merge", "runs/merged-again"

# %% [markdown]
# **Train an adapter.** A run merges it by itself (`cogumi.merge: true` is the default). Here the merge is a separate step.

# %%
print(cogumi.start(CONFIG, cogumi__run_dir=RUN, cogumi__merge=False).wait())

# %% [markdown]
# **Merge it.** The report shows how much each layer changed.

# %%
report = cogumi.merge_adapter(f"{RUN}/adapter", OUT) if not Path(OUT).exists() else None
report

# %% [markdown]
# **Check it again later**: did a byte change, and are base and adapter the ones that were merged? `cogumi merge --check` does the same.

# %%
from cogumi.merge import check_merged

print(check_merged(Path(OUT)))

# %% [markdown]
# **Chat.** Base and merged model answer side by side, with the run's own chat template.

# %%
cogumi.attach(RUN).chat("Rename value to number:\nvalue = int(value)")

# %% [markdown]
# **Export.** The directory is safetensors, as transformers, vLLM and TGI load it. `cogumi export runs/merged-again my-model` writes GGUF with an Ollama Modelfile, by llama.cpp's tools.
