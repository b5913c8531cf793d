"""The key of prepared data: one hash of everything that shapes it, so that a changed setting never meets a stale cache."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

EDGE_BYTES = 2**20
"""Of a local file's start and end, hashed: who changes a file and sets its time back is found out most of the time."""
LIBRARIES = ("tokenizers", "transformers", "trl", "polars", "pyarrow", "datasets")


def cache_key(parts: Mapping[str, Any]) -> str:
    """24 hex digits for these values and nothing else. Raises TypeError for one that is not JSON: it has no one spelling."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def code_and_libraries() -> dict[str, str]:
    """What prepares the data: the text of this package, and the versions of the libraries that it calls."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return {"cogumi.data": digest.hexdigest()} | {name: version(name) for name in LIBRARIES}


def files_identity(files: Sequence[Path]) -> list[list[Any]]:
    """Of each file: where it really is, its size, when it was written, and a hash of its first and last MiB."""
    return [[str(file.resolve()), *_stat(file), _edges(file)] for file in files]


def _stat(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _edges(file: Path) -> str:
    with file.open("rb") as data:
        digest = hashlib.sha256(data.read(EDGE_BYTES))
        data.seek(max(EDGE_BYTES, file.stat().st_size - EDGE_BYTES))
        digest.update(data.read())
    return digest.hexdigest()


def tokenizer_identity(tokenizer: Any) -> str:
    """A hash of all that decides which ids a text or a conversation becomes."""
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # What the last call asked for.
        backend.pop("padding", None)
        backend.pop("truncation", None)
        model: Any = backend
    else:
        model = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    parts = {
        "model": model,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "special ids": sorted(tokenizer.all_special_ids),
        "chat_template": tokenizer.chat_template,
        "adds": [getattr(tokenizer, f"add_{each}_token", None) for each in ("bos", "eos")],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
