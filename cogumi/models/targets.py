"""Names in a LoRA configuration that match nothing, and the share of a model's parameters that an adapter changes."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MIN_PART_SHARE = 0.05  # of the parameters, for a part without an update to be named
MAX_PARTS = 4


@dataclass(frozen=True)
class Coverage:
    """Share of a model's parameters in tensors with an update, and the large parts without one: (name, share)."""

    share: float
    untouched: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} ({share:.0%})" for name, share in self.untouched)
        return f"{self.share:.1%} of the parameters are under the adapter" + (f"; not {parts}" if parts else "")


def measure_coverage(sizes: Mapping[str, int], changed: Collection[str]) -> Coverage:
    """Measure which share of a model an adapter changes. sizes: elements by parameter. changed: parameters."""
    total = max(1, sum(sizes.values()))
    parts: Counter[str] = Counter()
    for name in sizes:
        if name in changed:
            continue
        module = re.sub(r"(\.experts)\..*|\.[^.]*$", r"\1", name)
        parts[re.sub(r"^model\.|\.\d+(?=\.|$)", "", module)] += sizes[name]
    large = [(name, size / total) for name, size in parts.most_common(MAX_PARTS) if size >= MIN_PART_SHARE * total]
    return Coverage(sum(sizes.get(name, 0) for name in set(changed)) / total, tuple(large))


def unmatched_names(
    config: Mapping[str, Any], modules: Collection[str], parameters: Collection[str], adapted: Collection[str]
) -> dict[str, list[str]]:
    """Return key -> the names in a LoRA configuration that match nothing, by PEFT's rules.

    modules, parameters: those that may be targeted. adapted: modules and parameters that get factors.
    """

    def matches(pattern: str, names: Iterable[str]) -> bool:
        try:
            return any(re.fullmatch(pattern, name) for name in names)
        except re.error:
            return False

    def names_of(key: str) -> list[Any]:
        value = config.get(key)
        return [value] if isinstance(value, str | int) else sorted(value or [])

    places = {"target_parameters": parameters, "exclude_modules": {*modules, *parameters}}
    unmatched = {}
    for key in ("target_modules", "target_parameters", "exclude_modules"):
        known = places.get(key, modules)
        if isinstance(config.get(key), str):  # one pattern for whole names
            unmatched[key] = [name for name in names_of(key) if name != "all-linear" and not matches(name, known)]
        else:
            ends = tuple(f".{name}" for name in known)
            unmatched[key] = [name for name in names_of(key) if not any(end.endswith(f".{name}") for end in ends)]
    saved = names_of("modules_to_save")  # whole modules, with all in them
    unmatched["modules_to_save"] = [name for name in saved if not any(f"{name}." in f"{part}." for part in modules)]
    for key in ("rank_pattern", "alpha_pattern"):
        unmatched[key] = [name for name in names_of(key) if not matches(rf"(.*\.)?({name})", adapted)]
    parent = "|".join(names_of("layers_pattern")) or "[^.]*"
    layers = [str(layer) for layer in names_of("layers_to_transform")]
    unmatched["layers_to_transform"] = [n for n in layers if not matches(rf"(.*\.)?({parent})\.{n}\..*", adapted)]
    return {key: names for key, names in unmatched.items() if names}
