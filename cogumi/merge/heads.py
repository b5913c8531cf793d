"""A head that an adapter brings and its base lacks: of a classifier or reward model that was trained on a language model.

The merged model is one of another class than the base. Its config.json has to say so, and how many labels there are.
"""

import logging
from pathlib import Path
from typing import Any

from cogumi.merge.adapter_files import read_json
from cogumi.merge.output_directory import tokens_of
from cogumi.merge.parameter_map import Checkpoint, head_classes

log = logging.getLogger(__name__)


def set_head(config: dict[str, Any], checkpoint: Checkpoint, files: dict[str, Path]) -> None:
    """Write the class of a head that the adapter brings into the output's config. A classifier or reward model also gets
    its labels and the token that its batches are padded with. files: the output's tokenizer."""
    config["architectures"] = [checkpoint.architecture]
    if checkpoint.kind not in head_classes(checkpoint.config):
        return
    labels = checkpoint.config.id2label
    config["id2label"] = {str(number): label for number, label in labels.items()}
    config["label2id"] = {label: number for number, label in labels.items()}
    token = padding_token(files)
    for place in [config, config["text_config"]] if isinstance(config.get("text_config"), dict) else [config]:
        if token is not None:
            place["pad_token_id"] = token
    if checkpoint.config.get_text_config().pad_token_id is None and token is None:
        what = "the merged %s has no pad_token_id, so it takes one sequence at a time: set it in config.json"
        log.warning(what, checkpoint.architecture)


def padding_token(files: dict[str, Path]) -> int | None:
    """The id of the token that the output's tokenizer pads with; None where there is no such token or no tokenizer.json.
    files: name in the output -> file."""
    if not {"tokenizer.json", "tokenizer_config.json"} <= files.keys():
        return None
    token = read_json(files["tokenizer_config.json"]).get("pad_token")
    text = token.get("content") if isinstance(token, dict) else token
    vocabulary, _, added = tokens_of(read_json(files["tokenizer.json"]))
    if text in added:
        return added[text]
    if isinstance(vocabulary, dict):
        return vocabulary.get(text)
    return next((number for number, (piece, _) in enumerate(vocabulary or []) if piece == text), None)
