"""Giving a tokenizer a chat template, or another end token: base models come without the one that is wanted."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cogumi.core.errors import UsageError

HERE = {"cogumi:tulu": Path(__file__).parents[1] / "data" / "tulu.jinja"}


def use_chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Set the template of `train.chat_template_path`: a .jinja file, another model's (directory or hub id), or `cogumi:tulu`.

    Raises UsageError where there is none, or where it writes control tokens that this vocabulary has not: they would be read
    as a handful of ordinary tokens, and adding them means new rows of embeddings, which an adapter does not train.
    """
    path = HERE.get(name, Path(name))
    tokens: list[str] = []
    if path.is_file():
        template = path.read_text(encoding="utf-8")
    elif name.startswith("cogumi:"):
        raise UsageError(f"{name} is not known", key="train.chat_template_path", fix=f"there is {', '.join(HERE)}")
    else:
        template, tokens = template_of(name)
    missing = [token for token in tokens if token in template and token not in tokenizer.get_vocab()]
    if missing:
        raise UsageError(
            f"the template of {name} writes {', '.join(missing)}, which {tokenizer.name_or_path} has no tokens for",
            key="train.chat_template_path",
            fix="take one without control tokens, such as cogumi:tulu, or that model itself",
        )
    tokenizer.chat_template = template


def template_of(name: str) -> tuple[str, list[str]]:
    """(chat template, control tokens) of another model's tokenizer."""
    try:
        other: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(
            f"{name} is no .jinja file, and no model with a tokenizer: {first}", key="train.chat_template_path"
        ) from None
    if not isinstance(other.chat_template, str):
        raise UsageError(f"the tokenizer of {name} has no chat template", key="train.chat_template_path")
    return other.chat_template, list(other.get_added_vocab())


def use_end_token(tokenizer: PreTrainedTokenizerBase, token: str) -> None:
    """Let `train.eos_token` end a turn. Raises UsageError where the vocabulary has no such token."""
    if token not in tokenizer.get_vocab():
        raise UsageError(
            f"{token!r} is not in the vocabulary of {tokenizer.name_or_path}",
            key="train.eos_token",
            fix="name one that is",
        )
    tokenizer.eos_token = token
