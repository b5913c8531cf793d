"""What a merged directory holds beside its weights: tokenizer, templates, licence, remote code, and its config.json.

The model's own files are the base's. The tokenizer is the one that training used: the adapter's, where it has one.
"""

import copy
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.merge.adapter_files import read_json

# Each of these is a vocabulary by itself, or half of one (vocab.json with merges.txt). Without one there is no tokenizer.
# fmt: off
VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "*.tiktoken", "tiktoken.model",
    "tekken.json", "vocab.json", "vocab.txt", "merges.txt",
)
# fmt: on
TOKENIZER_FILES = (*VOCABULARY_FILES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# custom_generate/ is where transformers looks for a model's own decoding loop.
MODEL_FILES = ("generation_config.json", "*.py", "custom_generate/*")
# Matched anywhere in a lower-case name, as no two publishers agree: LICENSE.txt, LLAMA_LICENSE, Notice, USE_POLICY.md.
LICENCE_WORDS = ("license", "licence", "notice", "use_policy", "copying")


def side_files(adapter: Path, base: Path) -> dict[str, Path]:
    """Name in the output -> file to copy. Contents are to be copied: in the hub's cache the files are links.

    All tokenizer files come from one place, the adapter if it has a vocabulary, else the base. A mix of two tokenizers
    would be a third one. Where both vocabularies are equal, the base's other vocabulary files come too, such as the
    tokenizer.model that llama.cpp's converter needs. So does the base's chat template if the adapter has none.

    generation_config, licences and remote code are the base's. Raises UsageError for a link in either directory that
    leads nowhere, as in an interrupted download.
    """
    home = tokenizer_home(adapter)
    licences = [path.name for path in base.iterdir() if any(word in path.name.lower() for word in LICENCE_WORDS)]
    found = glob_files(base, (*MODEL_FILES, *licences))
    found |= glob_files(home, PROCESSOR_FILES) or glob_files(base, PROCESSOR_FILES)
    template = glob_files(home, TEMPLATE_FILES)
    if not glob_files(home, VOCABULARY_FILES):
        found |= glob_files(base, TOKENIZER_FILES) | (template or glob_files(base, TEMPLATE_FILES))
    else:
        own = glob_files(home, TOKENIZER_FILES)
        if same_vocabulary(home, base):
            own = glob_files(base, VOCABULARY_FILES) | own
            if not template and not tokenizer_config(home).get("chat_template"):
                template = glob_files(base, TEMPLATE_FILES)
        found |= own | template
        if tokenizer_config(home).get("auto_map"):  # the tokenizer's own classes, saved with it
            found = glob_files(home, ("*.py",)) | found
    return dict(sorted(found.items()))


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether there is a vocabulary among these files of a model."""
    return any(fnmatch(name, pattern) for name in names for pattern in VOCABULARY_FILES)


def tokenizer_home(adapter: Path) -> Path:
    """Where the tokenizer that trained this adapter is: with it, or in the trainer's directory around a checkpoint.
    Around any other adapter there may be another model's."""
    run = adapter.resolve().parent
    is_checkpoint = adapter.resolve().name.startswith("checkpoint-") or (run / "training_args.bin").is_file()
    if is_checkpoint and not glob_files(adapter, VOCABULARY_FILES) and glob_files(run, VOCABULARY_FILES):
        return run
    return adapter


def same_vocabulary(one: Path, other: Path) -> bool:
    """Whether two tokenizer.json hold the same tokens under the same ids, with the same merges."""
    files = one / "tokenizer.json", other / "tokenizer.json"
    if not all(file.is_file() for file in files):
        return False
    ours, theirs = (tokens_of(read_json(file)) for file in files)
    return bool(ours[0]) and ours == theirs


def tokens_of(content: dict[str, Any]) -> tuple[Any, list[Any], dict[str, int]]:
    """(vocabulary, merges, added tokens) of a tokenizer.json."""
    model = content.get("model") or {}
    # Older files write a merge as "a b", newer ones as ["a", "b"]: no token of the older ones holds a space.
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []]
    return model.get("vocab"), merges, {token["content"]: token["id"] for token in content.get("added_tokens") or []}


def tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def glob_files(directory: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
    """Path within the directory -> file, sorted. Raises UsageError for a link that leads nowhere."""
    # A pattern is a name, too: glob does not report a link that leads nowhere under its plain name.
    found = sorted({path for pattern in patterns for path in (directory / pattern, *directory.glob(pattern))})
    for path in found:
        if path.is_symlink() and not path.exists():
            raise UsageError(f"{path} is a link to a file that is not there", fix=f"download {directory} again")
    return {path.relative_to(directory).as_posix(): path for path in found if path.is_file()}


def output_config(config: dict[str, Any], *, dtype: str | None, untied: bool, vocab_size: int | None) -> dict[str, Any]:
    """The merged model's config.json: a deep copy of the base's without its quantization.

    dtype: written wherever the base records one (transformers 4 said torch_dtype), nested configs included. untied: the
    head got a weight of its own. vocab_size: of a resized vocabulary. The last two are the language model's: they are set
    at the top and in text_config, never in a vision or audio config. None and False leave things as they are.
    """
    merged = changed_config(config, dtype)
    language = [merged, merged["text_config"]] if isinstance(merged.get("text_config"), dict) else [merged]
    if untied:
        for place in language:
            place["tie_word_embeddings"] = False
    if vocab_size is not None:
        recorded = [place for place in language if "vocab_size" in place]
        for place in recorded or language[-1:]:  # recorded nowhere, it was the class's default, and no longer is
            place["vocab_size"] = vocab_size
    return merged


def changed_config(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """A deep copy without quantization, with every recorded dtype set, nested configs included."""
    merged: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("quantization_config", "compression_config", "_pre_quantization_dtype"):
            continue
        merged[key] = changed_config(value, dtype) if isinstance(value, dict) else copy.deepcopy(value)
        if dtype is not None and key in ("dtype", "torch_dtype"):
            merged[key] = dtype
    return merged
