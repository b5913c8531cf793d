"""llama.cpp's converter on a tokenizer that was trained here: the name of its pre-tokenizer, where it is GPT-2's.

The converter knows a pre-tokenizer by a hash over the ids of one text, and refuses vocabularies that it does not know.
A ByteLevel one with its own regular expression is GPT-2's, whatever the vocabulary. All others stay refused.

`python -m cogumi.patches.gguf_pre_tokenizer SCRIPT arguments` runs the converter with the patch.
"""

import importlib
import json
import os
import runpy
import sys
from typing import Any

from cogumi.patches import PatchStatus

NAME = "gguf_pre_tokenizer"
OWNER = "conversion.base"  # a converter that is one file, as it once was, is left as it is
_replaced: Any = None  # the converter's own method


def apply() -> PatchStatus:
    """Let the converter ask here where it does not know a pre-tokenizer; applying twice is applying once."""
    global _replaced
    try:
        base = importlib.import_module(OWNER)
    except ModuleNotFoundError as error:
        return PatchStatus(NAME, False, f"this converter is older than the one it is for ({error})")
    if _replaced is None:
        known = _replaced = base.TextModel.get_vocab_base_pre

        def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
            try:
                return str(known(self, tokenizer))
            except NotImplementedError:
                if not is_gpt2(json.loads(tokenizer.backend_tokenizer.to_str())):
                    raise
                return "gpt-2"

        base.TextModel.get_vocab_base_pre = get_vocab_base_pre
    return status()


def undo() -> PatchStatus:
    """Put the converter's own method back."""
    global _replaced
    if _replaced is not None:
        importlib.import_module(OWNER).TextModel.get_vocab_base_pre = _replaced
        _replaced = None
    return status()


def status() -> PatchStatus:
    """Return whether the converter asks here now."""
    why = "a pre-tokenizer that the converter does not know is GPT-2's if its settings are"
    return PatchStatus(NAME, _replaced is not None, why if _replaced is not None else "not applied")


def is_gpt2(tokenizer: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json cuts text as GPT-2's does, and puts nothing before or after it."""
    cut = tokenizer["pre_tokenizer"] or {}
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    plain = tokenizer["normalizer"] is None and not tokenizer["model"].get("ignore_merges")
    return plain and gpt2.items() <= cut.items()


def main() -> None:
    """Do what `python SCRIPT arguments` does, with the patch."""
    script = sys.argv[1]
    del sys.argv[0]
    here = os.path.dirname(os.path.abspath(script))
    sys.path[:0] = [here, os.path.join(here, "gguf-py")]  # the latter of a checkout
    apply()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
