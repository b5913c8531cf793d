# %% [markdown]
# # Merge, verify, chat, export
# An adapter goes into its full-precision base; every element is read back and held to one rounding in float64. Two minutes on two CPU cores.

# %% tags=["parameters"]
from pathlib import Path

try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")

CONFIG = "smoke/llama-3.1-8b-sft"  # the real one: "llama-3.1-8b-sft"
RUN, OUT = "runs/to-merge", "runs/merged-again"

# %% [markdown]
# **An adapter.** The run could merge it itself (`cogumi.merge: true` is the default); here that is a step of its own.

# %%
print(cogumi.start(CONFIG, cogumi__run_dir=RUN, cogumi__merge=False).wait())

# %% [markdown]
# **Merge it.** The report shows how much each layer changed.

# %%
report = cogumi.merge_adapter(f"{RUN}/adapter", OUT) if not Path(OUT).exists() else None
report

# %% [markdown]
# **Look again later**: has a byte changed, are base and adapter those that were merged? (`cogumi merge --check` does the same.)

# %%
from cogumi.merge import check_merged

print(check_merged(Path(OUT)))

# %% [markdown]
# **Chat.** A model of a few million parameters has little to say, and says it in the right format; a real one is asked in the same way.

# %%
from transformers import logging, pipeline

logging.set_verbosity_error()
chat = pipeline("text-generation", model=OUT)
asked = [{"role": "user", "content": "Return the number of items in the container."}]
print(chat(asked, max_new_tokens=60)[0]["generated_text"][-1]["content"])

# %% [markdown]
# **Export.** The directory is safetensors, as transformers, vLLM and TGI load it. GGUF takes llama.cpp's converter; without it you are told how.

# %%
from cogumi.merge.gguf import export_gguf, gguf_path, install_hint

print(export_gguf(Path(OUT)) or install_hint(Path(OUT), gguf_path(Path(OUT))))
