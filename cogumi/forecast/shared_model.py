"""What each of several cards holds of a model under DDP and under FSDP2, and what a step sends between them.

Both follow from the step of one process, and from how torch 2.13 and accelerate 1.15 share a model out.

* none (DDP): each card has everything. The reducer's buckets are as large as the trained gradients, because accelerate
  leaves `gradient_as_bucket_view` off (torch/nn/parallel/distributed.py; accelerate/utils/dataclasses.py).
* fsdp2: a card keeps its share of weights, adapter and optimizer. The weights are gathered in groups
  (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model): each layer, the input embeddings, the LM head, and the rest. A
  group is gathered for its forward pass, freed, and gathered again for its backward pass. The head and the rest stay
  from one to the other, and so do embeddings that are the head's as well. Two groups are there at once. In the forward
  pass torch keeps the buffer of an all-gather until the next one. In the backward pass it gathers the next group
  beforehand (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, wait_for_unshard, _backward_prefetch).
  Gradients are summed in the last micro-batch of a step. Until then a card has the whole of them
  (accelerate/accelerator.py, no_sync). 4-bit and 8-bit weights are not shared out.

Shares are computed as equal. torch pads a first dimension that the number of cards does not divide.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cogumi.forecast.fake_tensors import ADAPTER, WEIGHTS, StagePeak
from cogumi.forecast.training_step import BACKWARD, FORWARD, GRADIENTS, LOAD, OPTIMIZER, ROLLOUT, UPDATE
from cogumi.patches.trl_internals import layer_classes

BUCKETS, GATHERED = "gradient buckets", "gathered weights"
KEPT = (WEIGHTS, ADAPTER, OPTIMIZER, GRADIENTS)


@dataclass(frozen=True)
class SharedModel:
    """A model that `count` cards train, in bytes.

    weights: what FSDP2 shares out of the weights. trained: the gradients, in the dtype of what is trained. passes: all
    groups, as they are gathered for a forward pass. again: those that are gathered for the backward pass too. staying:
    those that stay between the two. largest: of the groups that do not stay. reduced: the gradients as they are sent.
    group_reduced: of the group with most of them.
    """

    count: int
    weights: int
    trained: int
    passes: int
    again: int
    staying: int
    largest: int
    reduced: int
    group_reduced: int

    def moments(self, sharding: str, alone: Iterable[StagePeak], accumulating: bool) -> tuple[StagePeak, ...]:
        """The peaks of one card. alone: those of a process that shares nothing. accumulating: over several micro-batches."""
        found = []
        for moment in alone:
            kinds = dict(moment.by_kind)
            if sharding == "none":
                kinds[BUCKETS] = 0 if moment.stage == LOAD else self.trained
            else:
                kinds = self.shares(moment.stage, kinds, accumulating)
            kinds = {kind: size for kind, size in kinds.items() if size}
            found.append(StagePeak(moment.stage, sum(kinds.values()), kinds))
        return tuple(found)

    def shares(self, stage: str, kinds: dict[str, int], accumulating: bool) -> dict[str, int]:
        """What a stage holds of each kind under FSDP2."""
        whole = max(0, kinds.get(WEIGHTS, 0) - self.weights)  # quantized weights, buffers
        kinds[WEIGHTS] = whole + self.share(kinds.get(WEIGHTS, 0) - whole)
        kinds |= {kind: self.share(kinds.get(kind, 0)) for kind in (ADAPTER, OPTIMIZER)}
        if stage in (ROLLOUT, FORWARD, BACKWARD):
            kinds[GATHERED] = self.staying + 2 * self.largest
        accumulated = self.reduced if accumulating else 0
        if stage == FORWARD and kinds.get(GRADIENTS):
            kinds[GRADIENTS] = accumulated
        elif stage == BACKWARD:  # a group's gradients, and the copy of them that is sent
            kinds[GRADIENTS] = max(accumulated, self.share(self.trained)) + 2 * self.group_reduced
        elif stage == UPDATE:
            kinds[GRADIENTS] = self.share(kinds.get(GRADIENTS, 0))
        return kinds

    def share(self, size: int) -> int:
        return -(-size // self.count)

    def sent(self, sharding: str, micro_batches: int) -> float:
        """Bytes that each card sends in a step of so many micro-batches, and as many that it receives, by rings.

        An all-reduce of S bytes sends 2 S (N - 1) / N, an all-gather or a reduce-scatter half of that (arXiv:1802.05799).
        """
        others = (self.count - 1) / self.count
        if sharding == "none":
            return 2 * others * self.trained
        return others * (micro_batches * (self.passes + self.again) + self.reduced)


def share_model(models: Iterable[Any], count: int, gathered_in: torch.dtype | None) -> SharedModel:
    """How `count` cards share models: the one that is trained, and dpo's reference after it.

    gathered_in: the dtype of mixed precision, in which weights are gathered and gradients sent; None for their own.
    """

    def gathered(parameters: Iterable[Any]) -> int:
        return sum(each.numel() * (gathered_in or each.dtype).itemsize for each in parameters)

    def trained(parameters: Iterable[Any]) -> list[Any]:
        return [each for each in parameters if each.requires_grad]

    weights = passes = again = staying = largest = 0
    learned, of_groups = [], [0]
    for number, model in enumerate(models):
        passing, kept = groups_of(model)
        groups = [*passing, kept]
        everything = [each for group in groups for each in group]
        learned += trained(everything)
        adapted = number == 0 and len(learned) < len(everything)
        weights += sum(each.nbytes for each in everything if not (adapted and each.requires_grad))
        of_groups += [gathered(trained(group)) for group in groups]
        passes += gathered(everything)
        again += sum(map(gathered, passing)) if number == 0 else 0  # a reference has no backward pass
        staying += gathered(kept)
        largest = max(largest, *map(gathered, passing), 0)
    sizes = sum(each.nbytes for each in learned), passes, again, staying, largest, gathered(learned), max(of_groups)
    return SharedModel(count, weights, *sizes)


def groups_of(model: Any) -> tuple[list[list[Any]], list[Any]]:
    """(parameters of each group that is freed after its forward pass, those that stay until their backward pass)."""
    names, embeddings, head = layer_classes(model), model.get_input_embeddings(), model.get_output_embeddings()
    modules = [module for module in model.modules() if type(module).__name__ in names]
    if head is None or embeddings.weight is not head.weight:
        modules.append(embeddings)
    taken: set[int] = set()

    def take(module: Any) -> list[Any]:
        found = [each for each in module.parameters() if is_shared(each) and id(each) not in taken]
        taken.update(map(id, found))
        return found

    return [take(module) for module in modules], take(model)


def computed_in(gathered: Iterable[StagePeak], kept: Iterable[StagePeak]) -> tuple[StagePeak, ...]:
    """Peaks with weights, gradients and optimizer as they are kept, and the rest as the gathered weights compute it."""
    found = []
    for computed, moment in zip(gathered, kept, strict=True):
        both = [{kind: n for kind, n in each.by_kind.items() if (kind in KEPT) is stays}
                for each, stays in ((moment, True), (computed, False))]  # fmt: skip
        kinds = both[0] | both[1]
        found.append(StagePeak(moment.stage, sum(kinds.values()), kinds))
    return tuple(found)


def is_shared(parameter: Any) -> bool:
    """Whether FSDP2 shares it out: weights that bitsandbytes quantizes stay whole on each card."""
    quantized = hasattr(parameter, "quant_type") or hasattr(parameter, "SCB")
    return bool(parameter.dtype.is_floating_point) and not quantized
