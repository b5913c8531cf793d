"""What environment variables do to torch.compile: which ones switch it off, and which well-known ones nobody reads."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One variable that is set. effect: "off" (nothing compiles), "changes" (compiling) or "nothing" (nobody reads it)."""

    name: str
    value: str
    effect: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.meaning}"


# name -> (values with that effect, None for any; effect; meaning). Where each is read: tests/test_compiling_environment.py.
KNOWN: dict[str, tuple[tuple[str, ...] | None, str, str]] = {
    "TORCHDYNAMO_DISABLE": (("1",), "off", "torch compiles nothing in this process; leave it out"),
    "TORCH_COMPILE_DISABLE": (("1",), "off", "Dynamo skips every frame, so nothing is compiled; leave it out"),
    "TORCH_COMPILE": (None, "nothing", "read by nothing in torch, transformers or unsloth; leave it out"),
    "UNSLOTH_DISABLE_DYNAMO": (None, "nothing", "read by nothing, unsloth included; leave it out"),
    "UNSLOTH_COMPILE_DISABLE": (
        None,
        "changes",
        "unsloth compiles none of its own modules; says nothing about what others compile",
    ),
    "TORCHDYNAMO_SUPPRESS_ERRORS": (
        None,
        "changes",
        "what fails to compile runs uncompiled without a word; cogumi says it all the same",
    ),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": (("1",), "changes", "every run compiles anew"),
    "ACCELERATE_DYNAMO_BACKEND": (
        None,
        "changes",
        "accelerate compiles the whole model at once, which captures little of one that is checkpointed",
    ),
}
# What `accelerate launch` sets where it is not to compile.
ASKS_NOTHING = ("ACCELERATE_DYNAMO_BACKEND", "no")


def variables(environ: Mapping[str, str] | None = None) -> list[Variable]:
    """Those of the known variables that are set (by default in this process), in the order of KNOWN."""
    found = os.environ if environ is None else environ
    said = []
    for name, (values, effect, meaning) in KNOWN.items():
        value = found.get(name)
        if value is None or (name, value.lower()) == ASKS_NOTHING:
            continue
        if values is not None and value not in values:
            said.append(Variable(name, value, "nothing", f"only {' or '.join(values)} has an effect; leave it out"))
        else:
            said.append(Variable(name, value, effect, meaning))
    return said
