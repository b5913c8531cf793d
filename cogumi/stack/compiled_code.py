"""Directories by card and versions below the user's cache directory, for compiled code above all."""

import os
import platform
import re
from pathlib import Path

import platformdirs

from cogumi.stack.gpus import VARIABLE, ask_driver, list_gpus
from cogumi.stack.lanes import installed_versions

COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
COMPILED |= {"UNSLOTH_COMPILE_LOCATION": "unsloth", "VLLM_CACHE_ROOT": "vllm"}


def place_by_versions(kind: str, card: str, *packages: str) -> Path:
    """The path of what is kept for a card and these packages as they are installed."""
    versions = installed_versions()
    words = " ".join([card, *(f"{name}-{versions[name]}" for name in packages if name in versions)])
    return Path(platformdirs.user_cache_dir("cogumi")) / kind / re.sub(r"[^\w.+-]+", "-", words.lower())


def keep_compiled_code() -> None:
    """Set the variables of COMPILED that the user has not set. Call it before torch, Triton, unsloth and vLLM are imported."""
    gpus = {index: name for index, _, _, name in list_gpus(ask_driver())}
    card = gpus.get(os.environ.get(VARIABLE, ""), next(iter(gpus.values()), platform.machine()))
    place = place_by_versions("compiled", card, "torch", "triton", "unsloth", "vllm")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home: the defaults of the libraries stay
        return
    for variable, name in COMPILED.items() if os.access(place, os.W_OK) else ():
        os.environ.setdefault(variable, str(place / name))
