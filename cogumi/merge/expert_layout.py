"""Read the factors of stacked experts as the version that wrote the adapter did, which its shapes confirm.

An update of a stack [experts, first, last] is stored as lora_A [experts * r, in] and lora_B [out, r * experts]. Which axis
is `in` changed between versions of PEFT, and unsloth packed the columns of lora_B in another order until 2026.9.5. The file
does not say which, so that the same bytes mean different updates. Sources: `ParamWrapper` of PEFT 0.17.1 to 0.21.2,
`moe_utils.py` of unsloth_zoo 2026.6.1 to 2026.10.9; tests/expert_truths has an adapter and the trained update of each.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cogumi.core.errors import UsageError

Shape = tuple[int, ...]
# Both orders of lora_B's columns, by unsloth's names: r * experts as PEFT has it, and experts * r.
ORDERS = {"rank_major": False, "grouped_by_expert": True}
# Families whose experts unsloth 2026.2 to 2026.9.5 trained by its own forward, which has the experts' columns grouped.
# fmt: off
UNSLOTH_GROUPED = frozenset([
    "deepseek_v3", "ernie4_5_moe", "ernie4_5_vl_moe", "gemma4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "lfm2_moe", "mixtral",
    "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe",
])
# fmt: on
# Of these, the ones that read lora_A as the outputs until 2026.4, and the ones that came later.
UNSLOTH_REVERSED = frozenset(["gemma4", "qwen3_5_moe", "qwen3_moe", "qwen3_next"])
UNSLOTH_LATER = frozenset(["ernie4_5_moe", "ernie4_5_vl_moe", "lfm2_moe", "mixtral"])
UNSLOTH_OLD = "unsloth up to 2026.9.5, which groups lora_B by expert"
EXPERT_LAYOUTS = ("axis1", "axis2", "axis1-grouped", "axis2-grouped")


@dataclass(frozen=True)
class Stack:
    """A stack of experts that an adapter changes.

    shape: [experts, first, last] of the parameter. factors: the shapes of lora_A and lora_B. stored_in_out: transformers 5
    marks the class as one whose matrices are [in, out] (`is_transposed`). family: transformers' folder of the class.
    """

    parameter: str
    shape: Shape
    factors: tuple[Shape, Shape]
    stored_in_out: bool
    family: str

    def fits(self, axis: int) -> bool:
        a, b = self.factors
        return (a[1], b[0]) == (self.shape[axis], self.shape[3 - axis])

    @property
    def is_square(self) -> bool:
        return self.fits(1) and self.fits(2)

    def fitting(self, axis: int) -> int:
        """Return this axis where it fits, else the other."""
        return axis if self.fits(axis) else 3 - axis


@dataclass(frozen=True)
class Reading:
    """Order of one stack's factors.

    axis: of the parameter [experts, first, last], which lora_A reads. grouped: lora_B's columns are experts * r, not r * experts.
    """

    axis: int
    grouped: bool

    def __str__(self) -> str:
        return f"axis{self.axis}" + ("-grouped" if self.grouped else "")


@dataclass(frozen=True)
class ExpertLayout:
    """Reading of each stack by parameter, with the evidence for it."""

    readings: dict[str, Reading]
    evidence: str

    def __str__(self) -> str:
        names = " and ".join(sorted({str(reading) for reading in self.readings.values()}))
        return f"experts read as {names}: {self.evidence}"


def peft_axis(version: tuple[int, ...], stored_in_out: bool) -> int:
    """Return the axis of [experts, first, last] that lora_A reads for a version of PEFT.

    Up to 0.18 always the first of the two. 0.19.0 swaps them where the class is marked as [in, out], which was the wrong way
    round; 0.19.1 and later swap where it is not marked.
    """
    if version < (0, 19):
        return 1
    return 2 if (version == (0, 19, 0)) == stored_in_out else 1


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the three numbers of a version such as 0.19.1 or 0.19.2.dev0@abc. Raises UsageError for anything else."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        problem = f"{text!r} is no version of PEFT or transformers"
        raise UsageError(problem, fix="set it to that which wrote the adapter")
    return tuple(int(number or 0) for number in match.groups())


def declared_orders(config: Mapping[str, Any]) -> dict[str, str]:
    """Return parameter -> order of lora_B's columns where unsloth recorded it; "" stands for every parameter."""
    mapping = config.get("auto_mapping")
    for source in (config, mapping if isinstance(mapping, dict) else {}):
        detail = source.get("unsloth_fused_expert_lora")
        if isinstance(detail, dict) and isinstance(detail.get("parameters"), dict):
            return {name: str(entry.get("lora_B_layout")) for name, entry in detail["parameters"].items()}
        if source.get("lora_B_layout"):
            return {"": str(source["lora_B_layout"])}
    return {}


def column_order(config: Mapping[str, Any], stack: Stack) -> tuple[bool, str]:
    """Return whether the columns of lora_B are grouped by expert, and the evidence. Raises UsageError for an unknown order."""
    orders, mapping = declared_orders(config), config.get("auto_mapping")
    order = orders.get(stack.parameter.rpartition(".")[2], orders.get(""))
    if order is not None:
        if order not in ORDERS:
            raise UsageError(f"lora_B_layout {order!r} of {stack.parameter} is not one of {', '.join(ORDERS)}")
        return ORDERS[order], f"lora_B_layout is {order}"
    if orders or not (isinstance(mapping, dict) and mapping.get("unsloth_fixed")):
        return False, ""
    if stack.family in UNSLOTH_GROUPED:
        return True, UNSLOTH_OLD
    return False, "unsloth, which left this family to PEFT"


def unsloth_axis(stack: Stack, version: tuple[int, ...], is_early: bool) -> int:
    """Return the axis that lora_A reads by unsloth's own forward until 2026.9.5: shapes decide, and code where they are square.

    From 2026.5 on it took lora_A for the outputs of a square stack where PEFT had swapped the axes, until 2026.4 by family.
    """
    if stack.stored_in_out:
        return stack.fitting(1)
    late = 1 if version >= (0, 19, 1) else 2
    early = late if stack.family in UNSLOTH_LATER else 1 if stack.family in UNSLOTH_REVERSED else 2
    return stack.fitting(early if is_early else late)


def is_megatron_bridge(config: Mapping[str, Any]) -> bool:
    """Return whether Megatron-Bridge exported an adapter: full names, and only some of the entries that PEFT always writes."""
    names = [] if "layers_to_transform" in config else config.get("target_parameters") or []
    return bool(names) and all(re.search(r"\.layers\.\d+\.", name) for name in names)


def read_layout(
    config: Mapping[str, Any], stacks: list[Stack], chosen: str | None = None, transformers: str | None = None
) -> ExpertLayout:
    """Find the one reading of an adapter's expert stacks that its version and all of its shapes allow.

    Transformers 4 marks no class as [in, out], so an adapter may have been trained with the mark or without it; which of the
    two shows in the shapes of stacks that are not square, and holds for all of one adapter. chosen: one of EXPERT_LAYOUTS,
    where several readings are left. transformers: the version that trained the adapter, where it is recorded. Raises
    UsageError where no reading fits, or several do and none was chosen.
    """
    orders = {stack.parameter: column_order(config, stack) for stack in stacks}
    squares = [stack.parameter for stack in stacks if stack.is_square]
    if chosen is not None:
        axis, grouped = int(chosen[4]), chosen.endswith("-grouped")
        unfit = next((stack for stack in stacks if not stack.fits(axis)), None)
        if unfit and not (squares and unfit.fits(3 - axis)):  # the choice is for the square ones
            raise UsageError(no_fit(unfit), key="--expert-layout", fix=f"{chosen} does not fit; leave it out")
        readings = {stack.parameter: Reading(stack.fitting(axis), grouped) for stack in stacks}
        return ExpertLayout(readings, f"--expert-layout {chosen}")
    text = config.get("peft_version")  # written from 0.18 on
    version, writer = version_numbers(str(text or "0.17")), f"PEFT {text}" if text else "PEFT up to 0.17"
    majors = (5, 4) if transformers is None else (version_numbers(transformers)[0],)
    axes = {
        f"transformers {major}": [peft_axis(version, stack.stored_in_out and major > 4) for stack in stacks]
        for major in majors
    }
    if any(reason == UNSLOTH_OLD for _, reason in orders.values()):
        eras = {"unsloth until 2026.4": True, "unsloth 2026.5 to 2026.9.5": False}
        axes = {era: [unsloth_axis(stack, version, early) for stack in stacks] for era, early in eras.items()}
    if is_megatron_bridge(config):  # its lora_A has the outputs
        writer, orders = "Megatron-Bridge", dict.fromkeys(orders, (True, ""))
        outputs = [2 if stack.stored_in_out or stack.family == "llama4" else 1 for stack in stacks]
        axes = {writer: [stack.fitting(axis) for stack, axis in zip(stacks, outputs, strict=True)]}
    candidates: dict[str, dict[str, Reading]] = {}
    for engine, numbers in axes.items():
        pairs = zip(stacks, numbers, strict=True)
        readings = {stack.parameter: Reading(axis, orders[stack.parameter][0]) for stack, axis in pairs}
        if readings not in candidates.values() and all(stack.fits(readings[stack.parameter].axis) for stack in stacks):
            candidates[engine] = readings
    if not candidates:
        unfit = next((stack for stack in stacks if not stack.fits(stack.fitting(1))), stacks[0])
        fix = "is this the base the adapter was trained on?"
        raise UsageError(f"{no_fit(unfit)}, as {writer} reads them", fix=fix)
    if len(candidates) > 1:
        message = f"{squares[0]} is square, so {writer} under {' or '.join(axes)} may have written its factors"
        choices = [f"{readings[squares[0]]} ({engine})" for engine, readings in candidates.items()]
        raise UsageError(message, fix=f"pass --expert-layout {' or '.join(choices)}")
    evidence = "; ".join(dict.fromkeys([f"written by {writer}", *(reason for _, reason in orders.values() if reason)]))
    return ExpertLayout(next(iter(candidates.values())), evidence)


def no_fit(stack: Stack) -> str:
    a, b = stack.factors
    first, last = stack.shape[1:]
    if a[0] != b[1]:
        reason = f"their ranks differ, {a[0]} and {b[1]}"
    elif {a[1], b[0]} == {first, last}:
        reason = "in and out are the other way round"
    else:
        reason = f"in and out are {a[1]} and {b[0]}, not {first} and {last} or {last} and {first}"
    return f"lora_A {list(a)} and lora_B {list(b)} do not fit {stack.parameter} {list(stack.shape)}: {reason}"


def expert_factors(
    a: torch.Tensor, b: torch.Tensor, experts: int, reading: Reading
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the factors by expert: A [experts, r, in], B [experts, out, r]."""
    rank = a.shape[0] // experts
    b = b.view(-1, experts, rank).transpose(1, 2) if reading.grouped else b.view(-1, rank, experts)
    return a.view(experts, rank, -1), b.permute(2, 0, 1)


def as_reading(
    a: torch.Tensor, b: torch.Tensor, experts: int, reading: Reading, other: Reading
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewrite factors so that another reading gives the same update: a permutation, without arithmetic."""
    left, right = expert_factors(a, b, experts, reading)
    if reading.axis != other.axis:  # (B @ A).T is A.T @ B.T
        left, right = right.transpose(1, 2), left.transpose(1, 2)
    rank = left.shape[1]
    columns = right.permute(1, 0, 2) if other.grouped else right.permute(1, 2, 0)
    return left.reshape(experts * rank, -1).contiguous(), columns.reshape(-1, experts * rank).contiguous()
