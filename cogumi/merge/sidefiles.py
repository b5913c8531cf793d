"""What a merged directory holds beside its weights: tokenizer, templates, licence, remote code."""

from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
MODEL_FILES = ("generation_config.json", "*.py", "LICENSE*", "NOTICE*")


def side_files(adapter: Path, base: Path) -> dict[str, Path]:
    """Name in the output -> file to copy.

    A tokenizer is taken whole from one place, the adapter's if it has one (that is what training used): mixing files
    of two tokenizers gives a third that nobody trained with. Without one, a chat template of the adapter's still wins.
    """
    own = matches(adapter, TOKENIZER_FILES)
    template = matches(adapter, TEMPLATE_FILES)
    if not own:
        template = template or matches(base, TEMPLATE_FILES)
    return {**matches(base, MODEL_FILES), **(own or matches(base, TOKENIZER_FILES)), **template}


def matches(directory: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
    found = sorted(path for pattern in patterns for path in directory.glob(pattern) if path.is_file())
    return {path.relative_to(directory).as_posix(): path for path in found}
