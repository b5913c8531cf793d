"""Changes that an adapter makes to each parameter, by PEFT's own account.

PEFT injects the adapter into the model on the meta device. This gives the rank, scaling and orientation of each layer
by PEFT's own rules. It also gives the keys and shapes that PEFT would save. The merge refuses a file with others.
"""

import copy
import inspect
import logging
import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import nn

from cogumi.core.safetensors_file import Span, leading_rows_equal
from cogumi.merge.adapter_files import BOTH_SIDES, FACTOR, OTHER_BASE, PREFIX, SAVED_AGAIN, Adapter
from cogumi.merge.bases import Base
from cogumi.merge.foreign_adapters import add_layers, text_sides
from cogumi.merge.parameter_map import Change, Changes, Checkpoint, LowRank, Rows, head_classes, trained_class
from cogumi.models.base import meta_model
from cogumi.patches.trl_internals import swaps_features

log = logging.getLogger(__name__)


def adapter_changes(adapter: Adapter, base: Base, checkpoint: Checkpoint, lora: Any = None) -> Changes:
    """Return every change of an adapter; each key is used once or refused. lora: its LoraConfig, if not on the disk yet."""
    from peft import LoraConfig

    model = meta_model(*(trained := trained_class(base, adapter)))  # PEFT changes it, so each adapter gets its own
    spans = {span.name: span for span in adapter.spans}
    changes = Changes(vocabulary=resize_vocabulary(model, spans))
    config = copy.deepcopy(lora) or LoraConfig.from_pretrained(str(adapter.directory))
    config.base_model_name_or_path = None  # PEFT would warn of every base that is not at the recorded place
    layers = add_layers(adapter, base, model, config)
    expected = check_keys(adapter, base, spans, layers)
    if adapter.config.get("task_type") in ("SEQ_CLS", "TOKEN_CLS") and trained[1] not in head_classes(trained[0]):
        fix = "save it again with its head, or, if it was trained on text, set its task_type to CAUSAL_LM"
        raise adapter.refused(f"neither it nor base {base.name} has the head for labels of its task_type", fix)
    collector = LayerChanges(adapter, base, spans, layers.get_base_model())
    # Tokens of a tied layer are another layer's, which is added first.
    modules = collector.model.named_modules()
    for name, module in sorted(modules, key=lambda entry: getattr(entry[1], "tied_adapter", None) is not None):
        collector.add_module(name, module)
    if collector.bypassed:
        text = "%d updates are left out, the first of %s: PEFT's has no effect, as the model never calls the layer"
        log.warning(text, len(collector.bypassed), collector.bypassed[0])
    changes.parameters = collector.changes
    for key in expected - collector.used:  # a bias trained whole (bias="all" or "lora_only")
        if not key.endswith(".bias"):
            raise adapter.refused(f"{key} is of a kind that this merge does not know")
        name = key.removeprefix(PREFIX).replace(".base_layer", "")
        added = changes.parameters.get(name, Change())  # lora_bias's
        changes.parameters[name] = replace(added, whole=spans[key])
    for key in spans.keys() - expected:
        check_saved_embedding(adapter, base, changes, spans[key], checkpoint)
    return changes


def resize_vocabulary(model: Any, spans: dict[str, Span]) -> int | None:
    """Resize the meta model to the vocabulary of an embedding of another size that the adapter brings; return that size."""
    name, embedding = text_sides(model)[0]
    # PEFT saves it under a name of the layer that it wrapped it in.
    keys = (f"{PREFIX}{name}{inner}.weight" for inner in ("", ".base_layer", ".token_adapter.base_layer"))
    size = next((spans[key].shape[0] for key in keys if key in spans), None)
    if embedding is None or size in (None, embedding.weight.shape[0]):
        return None
    model.resize_token_embeddings(size, mean_resizing=False)
    return size


def check_keys(adapter: Adapter, base: Base, spans: dict[str, Span], layers: Any) -> set[str]:
    """Raise UsageError unless the file holds exactly what PEFT would save; return the keys that it always saves."""
    from peft import get_peft_model_state_dict

    expected = get_peft_model_state_dict(layers, save_embedding_layers=False)
    expected = {key: tensor for key, tensor in expected.items() if not SAVED_AGAIN.fullmatch(key)}
    # PEFT adds the embedding at times, and whole state dicts, as DeepSpeed gathers them, have all of the base.
    stored = layers.get_base_model().state_dict()
    allowed = {f"{PREFIX}{name}".replace(".default", ""): tensor for name, tensor in stored.items()} | expected
    for key in sorted(spans.keys() - allowed.keys()):
        message = f"{key} belongs to nothing that the adapter's configuration puts on base {base.name}"
        task, fix = adapter.config.get("task_type"), OTHER_BASE
        if task not in (None, "CAUSAL_LM"):
            fix = f"it is a {task} adapter: save the model it was trained on, head included, and pass that as the base"
        raise adapter.refused(message, fix=fix)
    for key in sorted(expected.keys() - spans.keys()):
        fix = OTHER_BASE
        if adapter.config.get("bias") == "lora_only" and key.endswith(".base_layer.bias"):
            fix = "PEFT up to 0.20 trained these biases and did not save them; to merge without them set bias to none"
        raise adapter.refused(f"it lacks {key}, which its configuration promises for base {base.name}", fix=fix)
    for key, span in spans.items():
        needed = tuple(allowed[key].shape)
        if span.shape != needed:
            message = (
                f"{key} has shape {span.shape} where base {base.name} and the adapter's configuration need {needed}"
            )
            factor = FACTOR.fullmatch(key)
            if factor and len(span.shape) == len(needed) == 2:
                sides = ("rank", "in") if factor["side"] == "A" else ("out", "rank")
                sizes = [size for size in zip(sides, span.shape, needed, strict=True) if size[1] != size[2]]
                message += ": " + " and ".join(f"{side} is {a}, not {b}" for side, a, b in sizes)
                if [side for side, _, _ in sizes] == ["rank"]:
                    fix = "set r or rank_pattern in its adapter_config.json to the trained rank"
                    raise adapter.refused(message, fix=fix)
            rows = resized_rows(layers.get_base_model(), key, span.shape, needed)
            if rows is not None:
                message += f"; it resized the vocabulary to {rows} and does not bring the embedding of that"
            raise adapter.refused(message, fix=OTHER_BASE if rows is None else BOTH_SIDES)
    return set(expected)


def resized_rows(model: Any, key: str, shape: tuple[int, ...], needed: tuple[int, ...]) -> int | None:
    """Return the size of the vocabulary where a tensor of embedding or head has that of another one, else None."""
    names = [name for name, _ in text_sides(model) if name]
    if not any(key.startswith(f"{PREFIX}{name}.") for name in names) or len(shape) != len(needed):
        return None
    other = [(ours, size) for ours, size in zip(shape, needed, strict=True) if ours != size]
    return other[0][0] if len(other) == 1 and other[0][1] == model.config.get_text_config().vocab_size else None


@dataclass
class LayerChanges:
    """Changes of the layers that PEFT put into a model, by parameter, and the keys of the file that they use.

    tokens: by the identity of PEFT's token adapter, which tied layers share.
    """

    adapter: Adapter
    base: Base
    spans: dict[str, Span]
    model: Any
    changes: dict[str, Change] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    tokens: dict[int, Rows] = field(default_factory=dict)
    bypassed: list[str] = field(default_factory=list)

    def add(self, parameter: str, change: Change, *keys: str) -> None:
        if parameter in self.changes:
            raise self.adapter.refused(f"it changes {parameter} in two ways at once")
        self.changes[parameter] = change
        self.used.update(keys)

    def add_module(self, name: str, module: Any) -> None:
        from peft.tuners.lora.layer import Embedding, Linear, LoraLayer, ParamWrapper
        from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

        key, parameter = f"{PREFIX}{name}", name.replace(".base_layer", "")
        if isinstance(module, ParamWrapper):
            self.add_bare_parameter(key, f"{parameter}.{module.parameter_name}", module)
        elif isinstance(module, Linear | Embedding):
            self.add_matrix(key, parameter, module, isinstance(module, Embedding))
        elif isinstance(module, LoraLayer):
            kind = type(module.get_base_layer()).__name__
            raise self.adapter.refused(f"{name} is a {kind}, not a linear layer, an embedding or a stack of experts")
        elif isinstance(module, ModulesToSaveWrapper):
            if any(f"{parameter}.{part}" in self.changes for part in module.modules_to_save["default"].state_dict()):
                problem = f"modules_to_save names {parameter} and a module around it, and PEFT saves the untrained copy"
                raise self.adapter.refused(problem, fix="train it again with one of the two")
            for part in module.modules_to_save["default"].state_dict():
                self.add(f"{parameter}.{part}", Change(whole=self.spans[f"{key}.{part}"]), f"{key}.{part}")
        elif isinstance(module, TrainableTokensWrapper):
            layer = module.token_adapter
            self.refuse_other_forward(parameter, layer.get_base_layer(), has_tokens=True)
            weight: Any = layer.get_base_layer().weight
            if beyond := {*layer.token_indices["default"]} - {*range(len(weight))}:
                problem = f"trainable_token_indices has {min(beyond)}, and {parameter} has {len(weight)} rows"
                raise self.adapter.refused(problem, fix=BOTH_SIDES)
            if layer.tied_adapter is None:
                delta = f"{key}.token_adapter.trainable_tokens_delta"
                self.tokens[id(layer)] = Rows(self.adapter.weights, delta, tuple(layer.token_indices["default"]))
                self.used.add(delta)
            self.add(f"{parameter}.weight", Change(rows=self.tokens[id(layer.tied_adapter or layer)]))

    def add_bare_parameter(self, key: str, parameter: str, layer: Any) -> None:
        """Add the update of target_parameters: of a matrix, or a stack of experts in PEFT's layout.

        PEFT swaps its idea of in and out for experts that are [in, out]; guessing it from shapes would be ambiguous.
        """
        transposed = len(layer.get_param().shape) == 3 and not swaps_features(layer)
        rank, scaling = layer.r["default"], float(layer.scaling["default"])
        key_a, key_b = (f"{key}.lora_{side}.weight" for side in "AB")
        term = LowRank(self.adapter.weights, key_a, key_b, rank, scaling, layer.num_experts, transposed)
        self.add(parameter, Change(terms=(term,)), key_a, key_b)

    def add_matrix(self, key: str, parameter: str, layer: Any, is_embedding: bool) -> None:
        """Add the update of a linear layer or an embedding; PEFT's of one is (B @ A).T on a weight [rows, dim]."""
        self.refuse_other_forward(parameter, layer.get_base_layer())
        weights, rank, scaling = self.adapter.weights, layer.r["default"], float(layer.scaling["default"])
        kind = "lora_embedding_{}" if is_embedding else "lora_{}.weight"
        key_a, key_b = (f"{key}.{kind.format(side)}" for side in "AB")
        parent, _, leaf = key.removeprefix(PREFIX).rpartition(".")
        parent_class: Any = type(self.model.get_submodule(parent))
        if is_bypassed(parent_class, leaf):
            self.bypassed.append(parameter)
            self.used.update(name for name in self.spans if name.startswith(f"{key}.lora_"))
            return
        transposed = is_embedding or bool(layer.fan_in_fan_out)
        term = LowRank(weights, key_a, key_b, rank, scaling, transposed=transposed)
        magnitude = f"{key}.lora_magnitude_vector" if layer.use_dora["default"] else None
        change = Change(terms=(term,), magnitude=(weights, magnitude) if magnitude else None)
        self.add(f"{parameter}.weight", change, key_a, key_b, *([magnitude] if magnitude else []))
        if f"{key}.lora_B.bias" in self.spans:
            if getattr(layer.get_base_layer(), "bias", None) is None:
                name = key.removeprefix(PREFIX)
                message = f"lora_bias trained a bias on {name}, which has none in base {self.base.name}"
                raise self.adapter.refused(message)
            bias = LowRank(weights, None, f"{key}.lora_B.bias", 1, scaling)
            self.add(f"{parameter}.bias", Change(terms=(bias,)), bias.key_b)

    def refuse_other_forward(self, parameter: str, layer: Any, has_tokens: bool = False) -> None:
        """Refuse a layer whose forward is more than a product with its weight and embed_scale: PEFT's update is added behind.

        Such are embeddings with a norm (Inkling) or an offset, and heads with a scale for each token.
        """
        if has_tokens and getattr(layer, "bias", None) is not None:
            raise self.adapter.refused(f"PEFT trains tokens of {parameter} without the bias that it has")
        member_names = {name for name, _ in layer.named_parameters()} | {name for name, _ in layer.named_children()}
        has_rule = isinstance(layer, nn.Embedding) and type(layer).forward is not nn.Embedding.forward
        if member_names - {"weight", "bias"} or (has_rule and not hasattr(layer, "embed_scale")):
            rule = f"{parameter} is a {type(layer).__name__}, which does more than multiply by its weight"
            raise self.adapter.refused(f"{rule}: PEFT's update is added behind that, where no weight is")


def check_saved_embedding(adapter: Adapter, base: Base, changes: Changes, span: Span, checkpoint: Checkpoint) -> None:
    """Check an embedding that PEFT saved beside the factors because it was targeted or resized.

    The rows that it shares with the base's must be equal. A resized embedding replaces the base's, and a tied head's that
    has no change of its own. A module trained whole, or a tied head's tokens, may be saved twice, with equal values.
    """
    module, _, leaf = span.name.removeprefix(PREFIX).rpartition(".")
    module = re.sub(r"(\.modules_to_save|\.original_module|\.token_adapter)?(\.base_layer)?$", "", module)
    parameter = f"{module}.{'weight' if leaf == 'trainable_tokens_delta' else leaf}"
    change = changes.parameters.get(parameter, Change())
    if adapter.config.get("bias") == "all" and "bias" in leaf + module and change == Change():
        if parameter in checkpoint.sizes:  # PEFT up to 0.20 trained all with "bias" in the name, and saved buffers, too
            changes.parameters[parameter] = Change(whole=span)
        return
    duplicate = change.whole if span.name.endswith(".modules_to_save.weight") else None
    if span.name.endswith(".trainable_tokens_delta") and change.rows:
        rows_key = change.rows.key
        duplicate = next(other for other in adapter.spans if other.name == rows_key)
    if duplicate is not None:
        if duplicate.shape != span.shape or not leading_rows_equal(span, duplicate):
            problem = f"{span.name} and {duplicate.name} should be the same and differ"
            raise adapter.refused(problem, fix="save it again")
        return
    home = parameter if parameter in checkpoint.places else checkpoint.tied.get(parameter, parameter)
    stored = [checkpoint.spans[place.tensor] for place in checkpoint.places.get(home, ())]
    if len(stored) != 1 or not leading_rows_equal(span, stored[0]):
        message = f"{span.name} is not that of base {base.name} (and is not among modules_to_save)"
        raise adapter.refused(message, fix=OTHER_BASE)
    if span.shape == stored[0].shape or span.name.endswith(".original_module.weight"):
        return
    changes.parameters[parameter] = replace(change, whole=span)
    for head, embedding in checkpoint.tied.items():
        if embedding == parameter:
            changes.parameters.setdefault(head, Change(whole=span))


@cache
def is_bypassed(kind: Any, leaf: str) -> bool:
    """Return whether modules of a class read the weight of a layer and never call it: PEFT's update has no effect there."""
    if leaf == "dt_proj":  # Mamba's: transformers 4 calls it, and where nobody does the trained update is zero
        return False
    source = inspect.getsource(kind)
    is_read = re.search(rf"\bself\.{leaf}\.weight\b(?!\.(dtype|device|shape))", source) is not None
    return is_read and f"self.{leaf}(" not in source
