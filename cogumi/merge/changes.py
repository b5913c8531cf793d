"""What an adapter does to each parameter, by PEFT's own account.

PEFT injects the adapter into the model on the meta device. This gives the rank, scaling and orientation of each layer
by PEFT's own rules. It also gives the keys and shapes that PEFT would save. The merge refuses a file with others.
"""

import copy
import re
from dataclasses import replace
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import Span, leading_rows_equal
from cogumi.merge.adapter_files import BOTH_SIDES, OTHER_BASE, PREFIX, WITH_PEFT, Adapter
from cogumi.merge.bases import Base
from cogumi.merge.parameter_map import Change, Changes, Checkpoint, LowRank, Rows, meta_model, trained_class
from cogumi.patches.trl_internals import swaps_features


def adapter_changes(adapter: Adapter, base: Base, checkpoint: Checkpoint, lora: Any = None) -> Changes:
    """Every change that the adapter makes. Each of its keys is used exactly once, or UsageError names it.
    lora: its LoraConfig, where it is not on the disk yet."""
    from peft import LoraConfig, get_peft_model

    model = meta_model(
        *trained_class(base, adapter)
    )  # PEFT changes the model it is given, so each adapter gets its own
    held = {span.name: span for span in adapter.spans}
    changes = Changes(vocabulary=resize_vocabulary(model, held))
    config = copy.deepcopy(lora) or LoraConfig.from_pretrained(str(adapter.path))
    config.init_lora_weights = True  # how A and B began no longer matters
    config.base_model_name_or_path = None  # PEFT would warn of every base that is not at the recorded place
    try:
        layers = get_peft_model(model, config, low_cpu_mem_usage=True)
    except (ValueError, TypeError) as error:  # no target module found; a setting that PEFT does not have
        raise UsageError(f"adapter {adapter.path} does not fit base {base.name}: {error}") from error
    expected = check_keys(adapter, base, held, layers)
    changes.parameters, used = layer_changes(adapter, base, layers.get_base_model(), held)
    for key in expected - used:  # a bias trained whole (bias="all" or "lora_only")
        if not key.endswith(".bias"):
            raise adapter.refused(f"{key} is of a kind that this merge does not know")
        changes.parameters[key.removeprefix(PREFIX).replace(".base_layer", "")] = Change(whole=held[key])
    for key in held.keys() - expected:
        check_saved_embedding(adapter, base, changes, held[key], checkpoint)
    return changes


def resize_vocabulary(model: Any, held: dict[str, Span]) -> int | None:
    """Resize the meta model to the vocabulary of an embedding of another size that the adapter brings; that size."""
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    # PEFT saves it under a name of the layer that it wrapped it in.
    keys = (f"{PREFIX}{name}{inner}.weight" for inner in ("", ".base_layer", ".token_adapter.base_layer"))
    found = next((held[key].shape[0] for key in keys if key in held), None)
    if found in (None, embedding.weight.shape[0]):
        return None
    model.resize_token_embeddings(found, mean_resizing=False)
    return found


def check_keys(adapter: Adapter, base: Base, held: dict[str, Span], layers: Any) -> set[str]:
    """Raise UsageError unless the file holds exactly what PEFT would save for this adapter; the keys that it always saves."""
    from peft import get_peft_model_state_dict

    expected = get_peft_model_state_dict(layers, save_embedding_layers=False)
    allowed = get_peft_model_state_dict(layers, save_embedding_layers=True) | expected  # what it adds at times, too
    for key in sorted(held.keys() - allowed.keys()):
        what = f"{key} belongs to nothing that the adapter's configuration puts on base {base.name}"
        task, advice = adapter.config.get("task_type"), OTHER_BASE
        if task not in (None, "CAUSAL_LM"):
            advice = (
                f"it is a {task} adapter: save the model it was trained on, head included, and pass that as the base"
            )
        elif f"{key.removeprefix(PREFIX).partition('.lora_')[0]}.weight" in base.tensors:
            advice = f"it names layers as an older transformers did: {WITH_PEFT}"
        raise adapter.refused(what, fix=advice)
    for key in sorted(expected.keys() - held.keys()):
        raise adapter.refused(f"it lacks {key}, which its configuration promises for base {base.name}", fix=OTHER_BASE)
    for key, span in held.items():
        needed = tuple(allowed[key].shape)
        if span.shape != needed:
            what = f"{key} has shape {span.shape} where base {base.name} and the adapter's configuration need {needed}"
            rows = resized_rows(layers.get_base_model(), key, span.shape, needed)
            if rows is not None:
                what += f"; it resized the vocabulary to {rows} and does not bring the embedding of that"
            raise adapter.refused(what, fix=OTHER_BASE if rows is None else BOTH_SIDES)
    return set(expected)


def resized_rows(model: Any, key: str, shape: tuple[int, ...], needed: tuple[int, ...]) -> int | None:
    """The size of the vocabulary where a tensor of embedding or head has that of another one, else None."""
    sides = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = [name for name, module in model.named_modules() if any(module is side for side in sides)]
    if not any(key.startswith(f"{PREFIX}{name}.") for name in names) or len(shape) != len(needed):
        return None
    other = [(ours, size) for ours, size in zip(shape, needed, strict=True) if ours != size]
    return other[0][0] if len(other) == 1 and other[0][1] == model.config.get_text_config().vocab_size else None


def layer_changes(
    adapter: Adapter, base: Base, model: Any, held: dict[str, Span]
) -> tuple[dict[str, Change], set[str]]:
    """(change by parameter, keys used), from the layers that PEFT put into the model."""
    from peft.tuners.lora.layer import Embedding, Linear, LoraLayer, ParamWrapper
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    changes: dict[str, Change] = {}
    used: set[str] = set()
    tokens: dict[int, Rows] = {}  # by the identity of PEFT's token adapter, which tied layers share
    own = set(model.state_dict())

    def add(parameter: str, change: Change, *keys: str) -> None:
        if parameter in changes:
            raise adapter.refused(f"it changes {parameter} in two ways at once")
        changes[parameter] = change
        used.update(keys)

    for name, module in model.named_modules():
        key, parameter = f"{PREFIX}{name}", name.replace(".base_layer", "")
        if isinstance(module, ParamWrapper):
            term = expert_term(adapter, key, module)
            add(f"{parameter}.{module.parameter_name}", Change(terms=(term,)), term.key_b, str(term.key_a))
        elif isinstance(module, Linear | Embedding):
            embedding = isinstance(module, Embedding)  # PEFT's update of one is (B @ A).T on a weight [rows, dim]
            kind = "lora_embedding_{}" if embedding else "lora_{}.weight"
            key_a, key_b = (f"{key}.{kind.format(side)}" for side in "AB")
            rank, scaling = module.r["default"], float(module.scaling["default"])
            transposed = embedding or bool(module.fan_in_fan_out)
            term = LowRank(adapter.weights, key_a, key_b, rank, scaling, transposed=transposed)
            magnitude = f"{key}.lora_magnitude_vector" if module.use_dora["default"] else None
            change = Change(terms=(term,), magnitude=(adapter.weights, magnitude) if magnitude else None)
            add(f"{parameter}.weight", change, term.key_b, str(term.key_a), *([magnitude] if magnitude else []))
            if f"{key}.lora_B.bias" in held:
                if f"{name}.base_layer.bias" not in own:
                    what = f"lora_bias trained a bias on {name}, which has none in base {base.name}"
                    raise adapter.refused(what)
                bias = LowRank(adapter.weights, None, f"{key}.lora_B.bias", 1, module.scaling["default"])
                add(f"{parameter}.bias", Change(terms=(bias,)), bias.key_b)
        elif isinstance(module, LoraLayer):
            kind = type(module.get_base_layer()).__name__
            raise adapter.refused(f"{name} is a {kind}, not a linear layer, an embedding or a stack of experts")
        elif isinstance(module, ModulesToSaveWrapper):
            for part in module.modules_to_save["default"].state_dict():
                add(f"{parameter}.{part}", Change(whole=held[f"{key}.{part}"]), f"{key}.{part}")
        elif isinstance(module, TrainableTokensWrapper):
            layer = module.token_adapter
            if layer.tied_adapter is None:
                delta = f"{key}.token_adapter.trainable_tokens_delta"
                tokens[id(layer)] = Rows(adapter.weights, delta, tuple(layer.token_indices["default"]))
                used.add(delta)
            add(f"{parameter}.weight", Change(rows=tokens[id(layer.tied_adapter or layer)]))
    return changes, used


def expert_term(adapter: Adapter, key: str, layer: Any) -> LowRank:
    """The update of a bare parameter (target_parameters): a matrix, or a stack of experts in PEFT's layout. PEFT swaps
    its idea of in and out for experts that are [in, out]; guessing it from shapes would be ambiguous."""
    transposed = len(layer.get_param().shape) == 3 and not swaps_features(layer)
    rank, scaling = layer.r["default"], float(layer.scaling["default"])
    key_a, key_b = (f"{key}.lora_{side}.weight" for side in "AB")
    return LowRank(adapter.weights, key_a, key_b, rank, scaling, layer.num_experts, transposed)


def check_saved_embedding(adapter: Adapter, base: Base, changes: Changes, span: Span, checkpoint: Checkpoint) -> None:
    """Check an embedding that PEFT saved beside the factors because it was targeted or resized.

    The rows that it shares with the base's must be equal. A resized embedding replaces the base's, and a tied head's that
    has no change of its own. A module trained whole, or a tied head's tokens, may be saved twice, with equal values.
    """
    key = re.sub(r"(\.modules_to_save|\.original_module|\.token_adapter)?(\.base_layer)?\.[^.]+$", ".weight", span.name)
    parameter = key.removeprefix(PREFIX)
    change = changes.parameters.get(parameter, Change())
    held = {other.name: other for other in adapter.spans}
    again = change.whole if span.name.endswith(".modules_to_save.weight") else None
    if span.name.endswith(".trainable_tokens_delta") and change.rows:
        again = held[change.rows.key]
    if again is not None:
        if again.shape != span.shape or not leading_rows_equal(span, again):
            what = f"{span.name} and {again.name} should be the same and differ"
            raise adapter.refused(what, fix="save it again")
        return
    home = parameter if parameter in checkpoint.places else checkpoint.tied.get(parameter, parameter)
    stored = [checkpoint.spans[place.tensor] for place in checkpoint.places.get(home, ())]
    if len(stored) != 1 or not leading_rows_equal(span, stored[0]):
        what = f"{span.name} is not the embedding of base {base.name} (and is not among modules_to_save)"
        raise adapter.refused(what, fix=OTHER_BASE)
    if span.shape == stored[0].shape or span.name.endswith(".original_module.weight"):
        return
    changes.parameters[parameter] = replace(change, whole=span)
    for head, embedding in checkpoint.tied.items():
        if embedding == parameter:
            changes.parameters.setdefault(head, Change(whole=span))
