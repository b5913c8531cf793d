"""Base models: finding, loading and making them; adapters; completions."""

import logging

# Without a GPU bitsandbytes looks for a faster 4-bit kernel on the hub and warns when the `kernels` package is missing.
# The CPU lane leaves it out on purpose (docs/stack.md); nothing is wrong.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
