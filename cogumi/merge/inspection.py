"""Describe an adapter before it is merged: who wrote it, what it changes, and what is unusual about it."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open

from cogumi.core.errors import UsageError
from cogumi.core.notices import show_seconds
from cogumi.core.safetensors_file import Span, matrix_shape, read_elements
from cogumi.merge.adapter_files import (
    BASE_RECORD_NAME,
    FACTOR,
    PREFIX,
    Adapter,
    converted_adapter,
    find_adapter,
    read_base_record,
    read_json,
    resolve_adapter,
    weights_sample,
)
from cogumi.merge.arithmetic import factors, row_blocks
from cogumi.merge.bases import Base, resolve_base
from cogumi.merge.foreign_adapters import as_installed, scaling_of
from cogumi.merge.merge_manifest import refuse_second_merge
from cogumi.merge.parameter_map import Change, LowRank
from cogumi.merge.plan import MergePlan, Piece, build_plan, update_norm
from cogumi.models.targets import Coverage

LARGE_RATIO = 0.3  # |delta| / |W| of a tensor
SAMPLED_PIECES = 3  # of a parameter for its norm, and of an adapter for raw factors
SAMPLED_ELEMENTS = 1 << 17
# Cosine between B A and the part of W in the space of B or of A, and the range of the ratio of their norms. Ordinary adapters
# stay below 0.15; raw factors of PiSSA, OLoRA and CorDA start at 1 and are at 0.8 after changing by 60 %.
RAW_COSINE, RAW_RATIO = 0.5, (0.2, 5.0)
MIN_DIMENSIONS = 64  # of the space of B A with B or A as they are; a random cosine deviates by one over its root
LAYER = re.compile(r"(?:(\w+)\.)?(?:layers|h|blocks|block)\.(\d+)\.")
TEXT_MODELS = (None, "model", "language_model", "transformer")
CARD_WORDS = ("unsloth", "llama-factory", "axolotl", "verl", "tinker", "trl")  # of writers that a model card names


@dataclass(frozen=True)
class Update:
    """Rank and Frobenius norm of an update, and the norm of its weight, estimated from samples; None without the base."""

    rank: int
    delta: float
    weight: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.delta / self.weight if self.weight else None


@dataclass(frozen=True)
class AdapterReport:
    """Description of an adapter.

    writer, evidence: engine and version of PEFT, and why. base: the recorded one. base_state: whether it is the one here.
    updates: by parameter; without the base by module, and without stacks of experts. coverage: None without the base.
    reading: how factors of stacked experts are read. refusal: why `cogumi merge` refuses the adapter.
    """

    adapter: Path
    writer: str
    evidence: tuple[str, ...]
    base: str | None
    base_state: str
    updates: dict[str, Update]
    coverage: Coverage | None
    reading: str
    unusual: tuple[str, ...]
    refusal: str | None

    @property
    def layers(self) -> dict[str, Update]:
        """Updates by layer: norms of all in it, and the largest rank. What is in no layer has its own name."""
        layers: dict[str, list[Update]] = defaultdict(list)
        for name, update in self.updates.items():
            match = LAYER.search(name)
            tower = "" if match is None or match[1] in TEXT_MODELS else f"{match[1]} "
            layers[f"{tower}{match[2]}" if match else name].append(update)
        merged = {}
        for key in sorted(layers, key=lambda key: (not key.isdigit(), len(key), key)):
            weights = [update.weight for update in layers[key] if update.weight is not None]
            delta = math.hypot(*(update.delta for update in layers[key]))
            merged[key] = Update(max(update.rank for update in layers[key]), delta, math.hypot(*weights) or None)
        return merged

    @property
    def rows(self) -> dict[str, str]:
        """Text by the name of its line; lines without text are left out."""
        ranks = Counter(update.rank for update in self.updates.values())
        modules = Counter(name.removesuffix(".weight").rpartition(".")[2] for name in self.updates)
        layers = [
            f"{key}: {part.delta:.3g}" + (f" ({part.ratio:.2%})" if part.ratio else "")
            for key, part in self.layers.items()
        ]
        merge = "possible" if self.coverage else "nothing in the adapter itself is against it"
        rows = {
            "adapter": str(self.adapter),
            "written by": f"{self.writer} ({'; '.join(self.evidence)})",
            "base": f"{self.base or 'not recorded'}: {self.base_state}",
            "updates": ", ".join(f"{count} of rank {rank}" for rank, count in sorted(ranks.items())),
            "modules": ", ".join(f"{name} ({count})" for name, count in modules.most_common()),
            "share": str(self.coverage or ""),
            "reading": self.reading,
            "|delta|, of |W|" if self.coverage else "|delta|": ", ".join(layers),
            "unusual": "\n".join(self.unusual),
            "merge": f"refused: {self.refusal}" if self.refusal else merge,
        }
        return {name: text for name, text in rows.items() if text}

    def as_dict(self) -> dict[str, Any]:
        layers = {key: asdict(part) | {"ratio": part.ratio} for key, part in self.layers.items()}
        return asdict(self) | {"layers": layers}

    def __str__(self) -> str:
        return "\n".join(
            f"{'' if number else name:16}  {line}"
            for name, text in self.rows.items()
            for number, line in enumerate(text.split("\n"))
        )


@show_seconds("inspect: the adapter is being read")
def inspect(adapter: str | Path, base: str | Path | None = None) -> AdapterReport:
    """Describe an adapter: who wrote it, what it changes and how much, and whether `cogumi merge` would take it.

    Without the base on this machine the report holds what the adapter alone tells. Memory holds one update's factors.

    Args:
        adapter: A directory from PEFT's save_pretrained, or one around it, such as a run's.
        base: A directory, or a hub id in the local cache; by default the one that the adapter records.

    Raises:
        UsageError: There is no readable adapter, or no base of that name.
    """
    path = find_adapter(Path(adapter))
    plan, refusal, state = None, None, "not compared"
    try:
        part = resolve_adapter(path)
    except UsageError as error:
        if not (path / "adapter_config.json").is_file():
            raise
        part, refusal = Adapter(path, read_json(path / "adapter_config.json"), (), path), str(error)
    try:
        model = None if refusal else resolve_base(part, None if base is None else str(base), None, "full")
    except UsageError as error:
        if base is not None:
            raise
        model, state = None, error.message
    if model is not None:
        state = compare_base(part, model)
        try:
            part = as_installed(part, model)
            plan = build_plan([(part, 1.0)], model, "keep")
            refuse_second_merge(plan)
            refuse_raw_factors(plan)
        except UsageError as error:
            refusal = str(error)
    updates = dict(plan_updates(plan) if plan else file_updates(part))
    record = read_base_record(path)
    return AdapterReport(
        adapter=path,
        **identify_writer(part),
        base=record.name if record else part.config.get("base_model_name_or_path"),
        base_state=state,
        updates=updates,
        coverage=plan.coverage if plan else None,
        reading=part.reading,
        unusual=tuple(find_unusual(updates, plan)),
        refusal=refusal,
    )


def identify_writer(adapter: Adapter) -> dict[str, Any]:
    """Return `writer` and `evidence` of a report: engine and version of PEFT, as far as they left traces."""
    path, config = adapter.path, adapter.config
    mapping, version = config.get("auto_mapping"), config.get("peft_version")
    keys = {*config, *(mapping if isinstance(mapping, dict) else ())}
    card = path / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace")[:4000].lower() if card.is_file() else ""
    traces = [
        ("cogumi", BASE_RECORD_NAME, (path / BASE_RECORD_NAME).is_file()),
        *(("unsloth", key, True) for key in sorted(keys) if key.startswith("unsloth") or key == "lora_B_layout"),
        *(("LLaMA-Factory", name, (path / name).is_file()) for name in ("trainer_log.jsonl", "llamaboard_config.yaml")),
        ("verl", "lora_alpha is 0", config.get("lora_alpha") == 0),
        *((word, "README.md", re.search(rf"\b{word}\b", text) is not None) for word in CARD_WORDS),
    ]
    engine, *evidence = next(((engine, trace) for engine, trace, applies in traces if applies), ("",))
    writer = f"PEFT {version}" if version else "PEFT up to 0.17 or another tool"
    evidence.append(f"peft_version is {version}" if version else "no peft_version")
    return {"writer": f"{engine} with {writer}" if engine else writer, "evidence": tuple(evidence)}


def compare_base(adapter: Adapter, base: Base) -> str:
    """Tell whether a base is the one that an adapter records: by a sample of its weights, its commit, or its name."""
    record, config = read_base_record(adapter.path), adapter.config
    name = record.name if record else config.get("base_model_name_or_path")
    commit = record.commit if record else config.get("revision")
    if record and record.weights:
        is_same = weights_sample(str(base.path)) == record.weights
        return f"{base.path} holds {'the' if is_same else 'other than the'} weights that it was trained on"
    if base.proof:
        return f"{base.name} is the full-precision model of {base.trained_on}"
    if name != base.name:
        return f"not known is whether {base.name} is the same model"
    if commit and base.commit:
        return f"here at commit {base.commit}" + ("" if commit == base.commit else f", and {commit} is recorded")
    return "here; the commit or weights that it was trained on are not recorded"


def file_updates(adapter: Adapter) -> Iterator[tuple[str, Update]]:
    """Yield the update of each module from an adapter's file alone, without stacks of experts, whose order is not in it."""
    names, has_stacks = {span.name: span.shape for span in adapter.spans}, adapter.config.get("target_parameters")
    for name, shape in names.items():
        match = FACTOR.fullmatch(name)
        module = match["module"].removeprefix(PREFIX).replace(".base_layer", "") if match else ""
        if match is None or match["side"] == "B" or (has_stacks and module.endswith("experts")):
            continue
        other = f"{name[: match.start('side')]}B{name[match.end('side') :]}"
        term = LowRank(adapter.weights, name, other, shape[0], scaling_of(adapter.config, module))
        yield module, Update(shape[0], update_norm(Change(terms=(term,))))


def plan_updates(plan: MergePlan) -> Iterator[tuple[str, Update]]:
    """Yield the update of each parameter with the norm of its weight, estimated from a block of some of its pieces."""
    stored: dict[str, list[tuple[Span, Piece]]] = defaultdict(list)
    for tensor, piece, term in low_rank_pieces(plan):
        stored[term.key_b].append((tensor, piece))
    for name, change in plan.changes.items():
        if not change.terms:
            continue
        pieces = stored[change.terms[0].key_b]
        squares, sampled = 0.0, 0
        for source, piece in spread(pieces):
            columns, height = matrix_shape(source.shape)[1], piece.place.last - piece.place.first
            rows = min(height, max(1, SAMPLED_ELEMENTS // columns))
            start = (piece.place.first + (height - rows) // 2) * columns
            squares += read_elements(source, start, rows * columns).double().square().sum().item()
            sampled += rows
        total = sum(piece.place.last - piece.place.first for _, piece in pieces)
        weight = math.sqrt(squares * total / sampled) if sampled else None
        yield name, Update(max(term.rank for term in change.terms), update_norm(change), weight)


def low_rank_pieces(plan: MergePlan) -> Iterator[tuple[Span, Piece, LowRank]]:
    for tensor in plan.tensors:
        for piece in tensor.pieces if isinstance(tensor.source, Span) else ():
            for term in piece.change.terms if piece.change else ():
                yield tensor.source, piece, term  # type: ignore[misc]  # a Span, by the line before the last


def spread(items: list[Any]) -> list[Any]:
    """Return a few items, spread from the first on."""
    return items[:: max(1, len(items) // SAMPLED_PIECES)][:SAMPLED_PIECES]


def find_unusual(updates: Mapping[str, Update], plan: MergePlan | None) -> Iterator[str]:
    yield from plan.notes[1:] if plan else ()
    ratios = {name: update.ratio for name, update in updates.items() if (update.ratio or 0) > LARGE_RATIO}
    if ratios:
        largest = max(ratios, key=lambda name: ratios[name] or 0)
        limit = f"{len(ratios)} of {len(updates)} updates are above {LARGE_RATIO:.0%} of their weight"
        yield f"{limit}, {largest} is {ratios[largest]:.0%}"
    if zero := [name for name, update in updates.items() if update.delta == 0]:
        yield f"{len(zero)} of {len(updates)} updates are zero, the first is {zero[0]}"
    for name, share in plan.coverage.untouched if plan else ():
        if "experts" in name:
            yield f"the experts are not changed: {name} has {share:.0%} of the parameters"


def refuse_raw_factors(plan: MergePlan) -> None:
    """Raise UsageError for an adapter whose factors hold a part of the base's weights, which merging would add twice.

    PiSSA, OLoRA and CorDA start from such factors, and train on the base without that part. Factors of LoftQ and LoRA-GA
    hold no part of W itself, and cannot be told in this way.
    """
    for adapter, _ in plan.adapters:
        converted, cosines = converted_adapter(adapter.path), raw_cosines(plan, adapter.weights)
        if cosines and median(cosines.values()) > RAW_COSINE:
            name, cosine = next(iter(cosines.items()))
            reason = f"B A is a part of the base's weights (cosine {cosine:.2f} in {name})"
        elif converted:
            reason = f"{adapter.path.name} is where LLaMA-Factory saves those"
        else:
            continue
        fix = "convert it with save_pretrained(..., path_initial_model_for_weight_conversion=<the initial adapter>)"
        problem = f"it holds raw factors of PiSSA or its like, which a merge would add to the base twice: {reason}"
        raise adapter.refused(problem, fix=converted or fix)


def raw_cosines(plan: MergePlan, weights: Path) -> dict[str, float]:
    """Return stored tensor -> cosine of an adapter's update with the part of W in its space, of a few small tensors.

    0 where the sizes of the two differ too much. Tensors whose update is zero are left out.
    """
    terms = [entry for entry in low_rank_pieces(plan) if entry[2].file == weights]
    terms = [entry for entry in terms if entry[2].key_a and entry[2].count == 1]
    # In few dimensions (a router of four experts) vectors that have nothing to do with each other are alike.
    terms = [entry for entry in terms if entry[2].rank * min(matrix_shape(entry[0].shape)) >= MIN_DIMENSIONS]
    smallest = min((source.end - source.start for source, _, _ in terms), default=0)
    cosines = {}
    with safe_open(weights, framework="pt") as file:
        for source, piece, term in spread([entry for entry in terms if entry[0].end - entry[0].start <= 4 * smallest]):
            left, right = factors(term, piece.place, file)
            columns, spaces = right.shape[1], (torch.linalg.qr(left)[0], torch.linalg.qr(right.T)[0])
            inner, across, down = 0.0, 0.0, torch.zeros(spaces[0].shape[1], columns, dtype=torch.float64)
            for first, last in row_blocks(0, len(left), columns):
                start, count = (piece.place.first + first) * columns, (last - first) * columns
                weight = read_elements(source, start, count).view(-1, columns).double()
                inner += ((left[first:last].T @ weight) * right).sum().item()
                down += spaces[0][first:last].T @ weight
                across += (weight @ spaces[1]).square().sum().item()
            delta, norms = update_norm(Change(terms=(term,))), (down.norm().item(), math.sqrt(across))
            in_range = [norm for norm in norms if norm and RAW_RATIO[0] < delta / norm < RAW_RATIO[1]]
            if delta:
                cosines[source.name] = max((inner / (delta * norm) for norm in in_range), default=0.0)
    return cosines
