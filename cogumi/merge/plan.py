"""Plan of a merge: every output tensor, decided and checked before the first byte is written."""

import inspect
import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cogumi.core.checkpoint_faults import Fault, incomplete
from cogumi.core.errors import NothingToMerge, UsageError
from cogumi.core.safetensors_file import (
    FLOAT_DTYPES,
    Shard,
    Span,
    element_count,
    leading_rows_equal,
    make_header,
    matrix_shape,
    read_shard,
)
from cogumi.merge.adapter_files import Adapter, read_json, standard_name, weight_files
from cogumi.merge.bases import Base
from cogumi.merge.changes import adapter_changes
from cogumi.merge.completeness import check_base, check_output, describe_missing
from cogumi.merge.output_directory import output_config, set_head, side_files
from cogumi.merge.parameter_map import Change, Changes, Checkpoint, LowRank, Place, module_of, read_checkpoint
from cogumi.merge.quantized import Bnb4bit
from cogumi.models.targets import Coverage, measure_coverage, unmatched_names

OUTPUT_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
MERGEABLE_DTYPES = tuple(OUTPUT_DTYPES.values())
INDEX_NAME = "model.safetensors.index.json"
LAYER_NUMBER = re.compile(r"\.\d+\.")

# Where a tensor's values before the update come from: bytes in a file, or a quantized tensor, decoded.
Source = Span | Bnb4bit


@dataclass(frozen=True)
class Piece:
    """Rows `place.first` to `place.last` of one stored tensor, and what happens to them (None: nothing)."""

    place: Place
    change: Change | None


@dataclass(frozen=True)
class TensorPlan:
    """One output tensor. The pieces follow each other and hold every row of it, seen as a matrix of its last dimension.

    replaced: the source is the adapter's (a module trained whole, a resized embedding), not the base's.
    """

    source: Source
    target: Span
    pieces: tuple[Piece, ...]
    replaced: bool = False

    @property
    def updated(self) -> bool:
        return any(piece.change is not None for piece in self.pieces)

    @property
    def terms(self) -> list[LowRank]:
        return [term for piece in self.pieces if piece.change for term in piece.change.terms]

    @property
    def copied(self) -> bool:
        """Return whether the output has the base's bytes: no update or replacement, no other dtype, not decoded."""
        same = isinstance(self.source, Span) and self.source.dtype == self.target.dtype
        return same and not (self.updated or self.replaced)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the output, seen as a matrix."""
        return (self.target.end - self.target.start) // max(1, matrix_shape(self.target.shape)[0])


@dataclass(frozen=True)
class RowRange:
    """Rows `first` to `last` of one piece of one tensor: what one thread writes and verifies in one go."""

    tensor: TensorPlan
    piece: Piece
    first: int
    last: int

    @property
    def bytes(self) -> int:
        return (self.last - self.first) * self.tensor.row_bytes

    @property
    def start(self) -> int:
        """The first byte in the output shard."""
        return self.tensor.target.start + self.first * self.tensor.row_bytes

    @property
    def copied(self) -> bool:
        """Return whether the output has the source's bytes."""
        source = self.tensor.source
        return self.piece.change is None and isinstance(source, Span) and source.dtype == self.tensor.target.dtype

    @property
    def source_start(self) -> int:
        """The first byte in the source's file; 0 for a quantized tensor, which is read in pieces."""
        source = self.tensor.source
        return source.start + self.first * source_row_bytes(source) if isinstance(source, Span) else 0

    @property
    def source_bytes(self) -> int:
        return (self.last - self.first) * source_row_bytes(self.tensor.source)


def source_row_bytes(source: Source) -> int:
    """Return the bytes of one row of a source, seen as a matrix; 0 for a quantized tensor."""
    return (source.end - source.start) // max(1, matrix_shape(source.shape)[0]) if isinstance(source, Span) else 0


@dataclass(frozen=True)
class ShardPlan:
    """One output shard: its name, its header, and its tensors in file order."""

    name: str
    header: bytes
    tensors: tuple[TensorPlan, ...]

    @property
    def bytes(self) -> int:
        return self.tensors[-1].target.end if self.tensors else len(self.header)


@dataclass(frozen=True)
class MergePlan:
    """Everything that a merge writes, planned from headers and configs.

    changes: of the parameters. coverage: their share of the model. missing: parameters that the base and so the output
    lack. unmatched: names in the adapters' configurations, by key, that match no tensor of theirs.
    """

    adapters: tuple[tuple[Adapter, float], ...]
    base: Base
    shards: tuple[ShardPlan, ...]
    index: dict[str, Any] | None
    config: bytes
    side_files: dict[str, Path]
    changes: dict[str, Change]
    coverage: Coverage
    missing: tuple[Fault, ...]
    unmatched: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on what is not changed, and on what a loader of the output would not find."""
        lines = [str(self.coverage)]
        if self.unmatched:
            lines.append(f"without effect, as no tensor of the adapter matches: {'; '.join(self.unmatched)}")
        terms = [change.terms for change in self.changes.values() if change.terms]
        if zero := sum(not any(term.scaling for term in part) for part in terms):
            cause = "lora_alpha or alpha_pattern is 0 for them"
            lines.append(f"{zero} of {len(terms)} updates are multiplied by 0: {cause}")
        if self.missing:
            lines.append(describe_missing(self.missing))
        return tuple(lines)

    @property
    def shard_bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def small_bytes(self) -> int:
        """Upper bound for the other files. Manifest and index take some 600 bytes a tensor; blocks have up to 4 KiB."""
        copied = sum(path.stat().st_size + 4096 for path in self.side_files.values())
        return 64 * 1024 + 600 * len(self.tensors) + copied

    @property
    def summed(self) -> bool:
        """Return whether the output is W + B @ A, W or another tensor, with nothing scaled (DoRA) and no rows replaced."""
        changes = [piece.change for tensor in self.tensors for piece in tensor.pieces if piece.change]
        return not any(change.magnitude or change.rows for change in changes)

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)


def build_plan(adapters: Sequence[tuple[Adapter, float]], base: Base, dtype: str) -> MergePlan:
    """Plan every tensor of base + the weighted sum of the adapters. Raises UsageError naming a key that does not fit."""
    adapter = adapters[0][0]
    checkpoint = read_checkpoint(base, adapter)
    added_parameters, missing = check_base(base, checkpoint, [part for part, _ in adapters])
    # PEFT warns those who train and save, of tied weights for one; the merge checks them itself.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        changes = weighted_sum([adapter_changes(part, base, checkpoint) for part, _ in adapters], adapters)
    if lost := [fault for fault in missing if fault.parameter in changes.parameters]:
        raise incomplete(base.name, checkpoint.architecture, lost)
    check_effect(changes, checkpoint, adapters)
    is_untied, fresh = find_untied(changes, checkpoint, base)
    stored = changes_by_tensor(changes, checkpoint, added_parameters, base, adapter)
    heads = {name: replacement_tensor(stored[name]) for name in sorted(added_parameters - checkpoint.spans.keys())}
    new = {name: span for name, span in heads.items() if span is not None}
    shards = []
    for shard in base.shards:
        # The base's tensors in its order, heads that were tied to one of them, and behind all the adapter's own.
        spans = {span.name: checkpoint.spans[span.name] for span in shard.spans if span.name in checkpoint.spans}
        spans |= {head: spans[embedding] for head, embedding in fresh.items() if embedding in spans}
        spans |= new if shard is base.shards[-1] else {}
        drafts = [plan_tensor(name, span, stored.get(name, []), base, dtype) for name, span in spans.items()]
        shards.append(plan_shard(shard, drafts))
    files = side_files(adapter.path, base.path)
    as_dtype = None if dtype == "keep" else dtype
    is_untied = is_untied and not scales_when_tied(checkpoint.kind)
    config = output_config(base.config, dtype=as_dtype, is_untied=is_untied, vocab_size=changes.vocabulary)
    if added_parameters:
        set_head(config, checkpoint, files)
    text = (base.path / "config.json").read_bytes()  # byte for byte, unless something in it changes
    if config != base.config:
        text = (json.dumps(config, indent=2) + "\n").encode()
    targets = [tensor.target for shard in shards for tensor in shard.tensors]
    if (output_missing := check_output(base, checkpoint, adapter, config, targets)) is not None:
        missing = output_missing
    matrices = [name for name, change in changes.parameters.items() if not change.rows]
    coverage = measure_coverage(checkpoint.sizes, matrices)
    unmatched = dict.fromkeys(name for part, _ in adapters for name in names_without_tensor(part, changes.parameters))
    return MergePlan(
        adapters=tuple(adapters),
        base=base,
        shards=tuple(shards),
        index=output_index(base, shards),
        config=text,
        side_files=files,
        changes=changes.parameters,
        coverage=coverage,
        missing=missing,
        unmatched=tuple(unmatched),
    )


def check_effect(changes: Changes, checkpoint: Checkpoint, adapters: Sequence[tuple[Adapter, float]]) -> None:
    """Raise UsageError where the sum of all updates is zero. Reads factors until one update is found that is not."""
    for name, change in changes.parameters.items():
        stored = [checkpoint.spans[place.tensor] for place in checkpoint.places.get(name, ())]
        new = change.whole
        if new and len(stored) == 1 and stored[0].shape == new.shape and leading_rows_equal(new, stored[0]):
            new = None  # trained whole, and still the base's
        if new or change.rows or change.magnitude or update_norm(change) > 0:
            return
    adapter = adapters[0][0]
    terms = [term for change in changes.parameters.values() for term in change.terms]
    if not terms or any(term.scaling for term in terms):
        if len(adapters) > 1:
            raise adapter.refused("the sum changes nothing: the updates cancel each other", fix="change the weights")
        message = f"adapter {adapter.path}: it changes nothing: all its updates are zero"
        raise NothingToMerge(message, fix="was it saved before training?")
    key = "alpha_pattern" if adapter.config.get("lora_alpha") else "lora_alpha"
    fix = f"set {key} in its adapter_config.json to the value it was trained with"
    if key == "lora_alpha":  # verl's model merger until early 2026, whatever the training had
        fix += " (verl: lora_alpha of the run's configuration, or of lora_train_meta.json beside the checkpoint)"
    raise adapter.refused(f"it changes nothing: {key} is 0, which multiplies every update", fix=fix)


def update_norm(change: Change) -> float:
    """Return the Frobenius norm of a change's low-rank updates, 0 where they cancel out to float64's rounding.

    |BA|^2 is the sum of (B^T B) * (A A^T), of all experts of a stack.
    """
    lefts, rights = [], []
    for term in change.terms:
        with safe_open(term.file, framework="pt") as weights:
            b = weights.get_tensor(term.key_b).double() * term.scaling
            a = torch.ones(1, 1).double() if term.key_a is None else weights.get_tensor(term.key_a).double()
        a = a.view(term.count, -1, a.shape[-1])
        b = b.view(b.shape[0], -1, term.count).permute(2, 0, 1)
        a, b = (b.transpose(1, 2), a.transpose(1, 2)) if term.transposed else (a, b)
        lefts.append(b)
        rights.append(a)
    if not lefts:
        return 0.0
    left, right = torch.cat(lefts, dim=2), torch.cat(rights, dim=1)
    products = (left.transpose(1, 2) @ left) * (right @ right.transpose(1, 2))
    square, size = products.sum().item(), products.abs().sum().item()
    return math.sqrt(square) if square > 1e-12 * size else 0.0


def names_without_tensor(adapter: Adapter, changed: Collection[str]) -> list[str]:
    """Return the names in an adapter's own configuration that match no tensor of its files, by key. changed: parameters."""
    config = read_json(adapter.path / "adapter_config.json") | {"exclude_modules": None}
    if config.get("task_type") in ("SEQ_CLS", "TOKEN_CLS"):  # PEFT adds the names of all heads that it knows
        config["modules_to_save"] = None
    spans = [span for file in weight_files(adapter.path) for span in read_shard(file).spans]
    modules = {module_of(standard_name(span.name)) for span in spans}
    unmatched = unmatched_names(config, modules, changed, {*modules, *changed})
    return [f"{key} {', '.join(names)}" for key, names in unmatched.items()]


def weighted_sum(parts: list[Changes], adapters: Sequence[tuple[Adapter, float]]) -> Changes:
    """Add up low-rank updates with their weights. Raises UsageError for values that are no differences (DoRA, whole, rows)."""
    if len(parts) == 1 and adapters[0][1] == 1:
        return parts[0]
    total = Changes()
    for changes, (adapter, weight) in zip(parts, adapters, strict=True):
        fix = "merge it alone, with weight 1"
        if changes.vocabulary is not None:
            raise adapter.refused("it resized the vocabulary, so it cannot be weighted", fix=fix)
        for name, change in changes.parameters.items():
            if change.whole or change.magnitude or change.rows:
                message = f"it sets {name} (DoRA, a module trained whole, or trained tokens), so it cannot be weighted"
                raise adapter.refused(message, fix=fix)
            terms = tuple(replace(term, scaling=term.scaling * weight) for term in change.terms)
            total.parameters[name] = Change(terms=total.parameters.get(name, Change()).terms + terms)
    return total


def find_untied(changes: Changes, checkpoint: Checkpoint, base: Base) -> tuple[bool, dict[str, str]]:
    """Return whether a head no longer equals its embedding, and {new stored tensor: the stored tensor it starts from}.

    A head that is tied to the embedding has no tensor of its own, as a rule. When an adapter changes the two
    differently, the merged model needs both, and tie_word_embeddings=false. The same changes on both sides leave them
    tied, and a head that is still stored gets the embedding's, bit for bit.
    """
    fresh: dict[str, str] = {}
    is_untied = False
    for head, embedding in checkpoint.tied.items():
        if head not in changes.parameters and embedding not in changes.parameters:
            continue
        homes = checkpoint.places.get(embedding, ())
        if len(homes) != 1:
            tied = f"{embedding} and {head} are tied in base {base.name}"
            raise UsageError(f"{tied}, in a layout that this merge does not know, and the adapter changes one")
        head_places = checkpoint.places.get(head)
        # transformers ties two stored tensors only where they are equal, whatever the config says.
        stored_head = checkpoint.spans[head_places[0].tensor] if head_places else None
        if stored_head and not leading_rows_equal(stored_head, checkpoint.spans[homes[0].tensor]):
            if base.config.get("tie_word_embeddings") is False and not changes.parameters.get(head, Change()).rows:
                continue  # T5's class calls them tied, whatever the file says
            message = f"base {base.name} stores a {head} that differs from the {embedding} it should be tied to"
            raise UsageError(message, fix="set tie_word_embeddings to false in its config.json")
        if same_change(changes.parameters.get(head), changes.parameters.get(embedding)):
            del changes.parameters[head]
            if head_places:
                changes.parameters[head] = changes.parameters[embedding]
            continue
        is_untied |= not LAYER_NUMBER.search(head)  # tie_word_embeddings does not tell of layers that are tied
        if not head_places:
            fresh[head] = homes[0].tensor
    # It tells of all others: of the biases of BERT's head, and the embeddings of BART's halves, too.
    for head, embedding in checkpoint.tied.items() if is_untied else ():
        homes = checkpoint.places.get(embedding, ())
        if len(homes) == 1 and not (head in fresh or head in checkpoint.places or LAYER_NUMBER.search(head)):
            fresh[head] = homes[0].tensor
            if embedding in changes.parameters:
                changes.parameters[head] = changes.parameters[embedding]
    return is_untied, fresh


def scales_when_tied(kind: Any) -> bool:
    """Return whether a class scales the input of its head only if tie_word_embeddings is set (T5 and its kin).

    It has to stay set then. transformers 5 ties no head that is stored with other values than its embedding.
    """
    source = inspect.getsource(kind.forward)
    return "config.scale_decoder_outputs" in source or "config.tie_word_embeddings" in source


def same_change(one: Change | None, other: Change | None) -> bool:
    """Return whether two changes of equally shaped weights do the same, bit for bit."""
    if one == other or one is None or other is None:
        return one == other
    if one.rows != other.rows or one.magnitude or other.magnitude or len(one.terms) != len(other.terms):
        return False
    is_same_whole = one.whole is other.whole
    if one.whole and other.whole:
        is_same_whole = one.whole.shape == other.whole.shape and leading_rows_equal(one.whole, other.whole)
    return is_same_whole and all(same_term(*terms) for terms in zip(one.terms, other.terms, strict=True))


def same_term(one: LowRank, other: LowRank) -> bool:
    """Return whether two updates have the same factors: PEFT ties an embedding's to its head's by transposing them."""
    if one.scaling != other.scaling or one.key_a is None or other.key_a is None:
        return False
    with safe_open(one.file, framework="pt") as left, safe_open(other.file, framework="pt") as right:
        a, b = left.get_tensor(one.key_a), left.get_tensor(one.key_b)
        c, d = right.get_tensor(other.key_a), right.get_tensor(other.key_b)
    if one.transposed != other.transposed:
        c, d = d.T, c.T
    return torch.equal(a, c) and torch.equal(b, d)


def changes_by_tensor(
    changes: Changes, checkpoint: Checkpoint, added_parameters: frozenset[str], base: Base, adapter: Adapter
) -> dict[str, list[Piece]]:
    """Return stored tensor -> its changed pieces; a new head is under its own name. added_parameters: those the base lacks."""
    stored: dict[str, list[Piece]] = defaultdict(list)
    for parameter, change in changes.parameters.items():
        places = checkpoint.places.get(parameter, ())
        if not places and parameter in checkpoint.tied:
            home = checkpoint.places[checkpoint.tied[parameter]][0]
            places = (replace(home, tensor=parameter),)
        if parameter in added_parameters and change.whole:
            places = (Place(parameter, 0, matrix_shape(checkpoint.spans.get(parameter, change.whole).shape)[0]),)
        if not places:
            shape = checkpoint.spans[parameter].shape if parameter in checkpoint.spans else ()
            if len(shape) == 3 and shape[1] == shape[2] and not checkpoint.config.transformers_version:
                message = f"it changes {parameter}, which is square: [in, out] if transformers 4 wrote the base, else [out, in]"
                raise adapter.refused(message, fix="set transformers_version in the base's config.json")
            layout = "lacks or stores in a layout that is not known here"
            raise adapter.refused(f"it changes {parameter}, which base {base.name} {layout}")
        if (change.rows or change.magnitude) and (len(places) > 1 or places[0].transposed):
            kind = "DoRA" if change.magnitude else "trained tokens"
            raise adapter.refused(f"{kind} on {parameter}, which is stored in parts")
        for place in places:
            span = checkpoint.spans.get(place.tensor)  # None: a head that gets a tensor of its own
            if change.whole is not None and span is not None:
                is_filled = (place.first, place.last) == (0, matrix_shape(span.shape)[0])
                if place.transposed or not (is_filled or span.shape == change.whole.shape):
                    message = f"{parameter} is trained whole, and stored in {place.tensor} transposed or with others"
                    raise adapter.refused(message)
            part = change if len(places) == 1 or span is None else slice_replacement(change, place, span)
            stored[place.tensor].append(Piece(place, part))
    return stored


def replacement_tensor(changed: list[Piece]) -> Span | None:
    """Return the adapter's tensor that takes the place of the base's, None where there is none."""
    return next((piece.change.whole for piece in changed if piece.change and piece.change.whole), None)


def slice_replacement(change: Change, place: Place, span: Span) -> Change:
    """Cut a whole parameter that is stored in parts down to the bytes of the part in `span`."""
    replacement = change.whole
    if replacement is None or replacement.shape == span.shape:
        return change
    rows, columns = matrix_shape(span.shape)
    width = columns * FLOAT_DTYPES[replacement.dtype].itemsize
    start = replacement.start + (place.matrix * replacement.shape[-2] + place.offset) * width
    return replace(change, whole=replace(replacement, shape=span.shape, start=start, end=start + rows * width))


def plan_shard(shard: Shard, drafts: list[TensorPlan]) -> ShardPlan:
    """Place tensors in an output shard. Where no name, dtype or shape changes, the header is the base's own."""
    entries = [(draft.target.name, draft.target.dtype, draft.target.shape, draft.target.end) for draft in drafts]
    is_same = [entry[:3] for entry in entries] == [(span.name, span.dtype, span.shape) for span in shard.spans]
    header = shard.header if is_same else make_header(shard.metadata, entries)
    tensors, position = [], len(header)
    for draft in drafts:
        target = replace(draft.target, path=Path(shard.path.name), start=position, end=position + draft.target.end)
        tensors.append(replace(draft, target=target))
        position = target.end
    return ShardPlan(shard.path.name, header, tuple(tensors))


def plan_tensor(name: str, span: Span, changed: list[Piece], base: Base, dtype: str) -> TensorPlan:
    """Plan one output tensor. Until it is placed, `end` is its length in bytes. span: the tensor that it starts from."""
    replacement = replacement_tensor(changed)
    source: Source = base.quantized.get(span.name, span) if replacement is None else replacement
    rows = matrix_shape(source.shape)[0]
    out = OUTPUT_DTYPES[dtype] if dtype != "keep" and span.dtype in MERGEABLE_DTYPES else span.dtype
    updates = []
    for piece in changed:
        if piece.change is not None and (update := replace(piece.change, whole=None)) != Change():
            # Rows that a whole tensor adds belong to the same piece.
            place = piece.place if replacement is None else replace(piece.place, last=rows)
            updates.append(Piece(place, update))
    read_as = source.dtype if isinstance(source, Span) else span.dtype
    if (updates or read_as != out) and not (read_as in MERGEABLE_DTYPES and out in MERGEABLE_DTYPES):
        raise UsageError(f"base {base.name}: {name} is stored as {read_as}", fix=f"only {MERGEABLE_DTYPES} merge")
    if out in FLOAT_DTYPES:
        length = element_count(source.shape) * FLOAT_DTYPES[out].itemsize
    else:
        assert isinstance(source, Span), "decoded tensors are of a float dtype"
        length = source.end - source.start
    pieces, row = [], 0
    for piece in sorted(updates, key=lambda piece: piece.place.first):
        if piece.place.first > row:
            pieces.append(Piece(Place(name, row, piece.place.first), None))
        pieces.append(piece)
        row = piece.place.last
    if row < rows or not pieces:
        pieces.append(Piece(Place(name, row, rows), None))
    target = Span(Path(), name, out, source.shape, 0, length)
    return TensorPlan(source, target, tuple(pieces), replaced=replacement is not None)


def output_index(base: Base, shards: list[ShardPlan]) -> dict[str, Any] | None:
    """Return the index of shards, with the real total of tensor bytes, or None for a base in a single file."""
    if (base.path / "model.safetensors").is_file():
        return None
    metadata = read_json(base.path / INDEX_NAME).get("metadata") or {}
    targets = {tensor.target.name: (tensor.target, shard.name) for shard in shards for tensor in shard.tensors}
    metadata["total_size"] = sum(target.end - target.start for target, _ in targets.values())
    return {"metadata": metadata, "weight_map": {name: targets[name][1] for name in sorted(targets)}}
