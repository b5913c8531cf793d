"""Tokenizer files of an adapter or a model, which transformers 4 and 5 both load.

transformers 5 writes class names and keys that 4 refuses, and leaves out some that 4 needs. A tokenizer that training did not
change is therefore its base's, byte for byte, and of a changed one the base's settings are written with the changes.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cogumi.core.durability import write_synced
from cogumi.core.errors import UsageError, best_effort
from cogumi.merge.adapter_files import read_json

# Each of these is a vocabulary by itself, or half of one (vocab.json with merges.txt). Without one there is no tokenizer.
# fmt: off
VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "*.tiktoken", "tiktoken.model",
    "tekken.json", "vocab.json", "vocab.txt", "merges.txt",
)
# fmt: on
TOKENIZER_FILES = (*VOCABULARY_FILES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEMPLATE_ENDS = (".jinja", "chat_template.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
# Settings of the process that loaded a tokenizer, and of training: engines pad and truncate by their own, and vLLM would take
# the length of training's sequences for the model's.
TRANSIENT_SETTINGS = (
    "backend", "is_local", "local_files_only", "max_length", "model_max_length", "pad_to_multiple_of",
    "pad_token_type_id", "padding_side", "stride", "truncation_side", "truncation_strategy",
)  # fmt: skip

UNPADDED = {"truncation": None, "padding": None}  # a tokenizer.json has those of the last call
Files = dict[str, bytes]  # by name


def tokenizer_home(adapter: Path) -> Path:
    """Return the directory of the adapter's tokenizer: its own, or the trainer's around a checkpoint, never another one."""
    run = adapter.resolve().parent
    is_checkpoint = adapter.resolve().name.startswith("checkpoint-") or (run / "training_args.bin").is_file()
    if is_checkpoint and not glob_files(adapter, VOCABULARY_FILES) and glob_files(run, VOCABULARY_FILES):
        return run
    return adapter


def same_vocabulary(one: Path, other: Path) -> bool:
    """Return whether two tokenizer.json hold the same tokens under the same ids, with the same merges."""
    files = one / "tokenizer.json", other / "tokenizer.json"
    if not all(file.is_file() for file in files):
        return False
    ours, theirs = (tokens_of(read_json(file)) for file in files)
    return bool(ours[0]) and ours == theirs


def tokens_of(content: dict[str, Any]) -> tuple[Any, list[Any], dict[str, int]]:
    """Return (vocabulary, merges, added tokens) of a tokenizer.json."""
    model = content.get("model") or {}
    # Older files write a merge as "a b", newer ones as ["a", "b"]: no token of the older ones holds a space.
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []]
    return model.get("vocab"), merges, {token["content"]: token["id"] for token in content.get("added_tokens") or []}


def tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def glob_files(directory: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
    """Return path within the directory -> file, sorted. Raises UsageError for a link that leads nowhere."""
    # A pattern is a name, too: glob does not report a link that leads nowhere under its plain name.
    paths = sorted({path for pattern in patterns for path in (directory / pattern, *directory.glob(pattern))})
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise UsageError(f"{path} is a link to a file that is not there", fix=f"download {directory} again")
    return {path.relative_to(directory).as_posix(): path for path in paths if path.is_file()}


def settle_tokenizer(directory: Path, base: Path) -> None:
    """Replace the tokenizer in a directory by the base's files, byte for byte, if transformers loads both as the same.

    A changed one gets names that transformers 4 and 5 know, and the base's settings that 5 loses. No changes are
    TRANSIENT_SETTINGS, a missing template, and the end token for padding where the base has none, except in a classifier.
    """
    stored, theirs = (
        {name: path.read_bytes() for name, path in glob_files(place, TOKENIZER_FILES + TEMPLATE_FILES).items()}
        for place in (directory, base)
    )
    if stored == theirs or not glob_files(directory, VOCABULARY_FILES):
        return
    files = None
    if glob_files(base, VOCABULARY_FILES):
        with best_effort(f"compare the tokenizers of {directory} and {base}"):
            is_classifier = any("Classification" in path.read_text() for path in directory.glob("config.json"))
            files = settled_files(stored, theirs, base, is_classifier)
    files = files or stored | portable_settings(tokenizer_config(directory))
    for name in stored:
        (directory / name).unlink()
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        write_synced(directory / name, content)


def settled_files(stored: Files, theirs: Files, base: Path, is_classifier: bool) -> Files | None:
    """Return the files of settle_tokenizer; None for a changed tokenizer that transformers loads as another class."""
    (ours,) = as_loaded(stored, base, times=1)
    (known,) = as_loaded(theirs, base, times=1)
    if changed_keys(ours, known):  # transformers loses some settings when it saves, such as add_bos_token
        known = min(known, as_loaded(theirs, base, times=2)[1], key=lambda state: len(changed_keys(ours, state)))
    changed = changed_keys(ours, known)
    if "pad_token" not in known and ours.get("pad_token") in (ours.get("eos_token"), known.get("eos_token")):
        changed -= set() if is_classifier else {"pad_token"}
    if "tokenizer.json" not in changed:
        changed = {key for key in changed if key in ours or not key.endswith(TEMPLATE_ENDS)}
        stored = stored | {name: content for name, content in theirs.items() if name == "tokenizer.json"}
    elif "tokenizer.json" in stored and json.loads(stored["tokenizer.json"]) | UNPADDED != json.loads(
        stored["tokenizer.json"]
    ):
        stored = stored | {"tokenizer.json": json.dumps(json.loads(stored["tokenizer.json"]) | UNPADDED).encode()}
    if not changed:
        return theirs
    if ours["tokenizer_class"] != known["tokenizer_class"]:
        return None
    outdated = (changed | {"added_tokens_decoder"}) - {"extra_special_tokens"}  # tokenizer.json has the added tokens
    if "tokenizer.json" in changed or "chat_template.jinja" in ours:
        outdated.add("chat_template")
    settings = {key: value for key, value in tokenizer_config(base).items() if key not in outdated}
    settings |= {key: ours[key] for key in outdated & ours.keys() if "." not in key}
    more_tokens = ours.get("extra_special_tokens", []) if "extra_special_tokens" in changed else []
    templates = {key: content for key, content in ours.items() if key.endswith(TEMPLATE_ENDS)}
    return stored | templates | portable_settings(settings, more_tokens)


def as_loaded(files: Files, base: Path, times: int) -> list[dict[str, Any]]:
    """Return what transformers saves of a tokenizer beside the base's config, after loading that again, and so on.

    Keys are those of tokenizer_config.json, and the names of other files. Without TRANSIENT_SETTINGS.
    """
    from transformers import AutoTokenizer

    states = []
    with TemporaryDirectory() as scratch:
        place = Path(scratch)
        for name, content in files.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(content)
        for number in range(times):
            shutil.copyfile(base / "config.json", place / "config.json")  # it decides on the class
            tokenizer: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
            place /= str(number)
            tokenizer.save_pretrained(place)
            saved = glob_files(place, TOKENIZER_FILES + TEMPLATE_FILES)
            state = {name: path.read_bytes() for name, path in saved.items()} | tokenizer_config(place)
            state |= {name: content for name, content in files.items() if name == "chat_template.json"}
            if "tokenizer.json" in state:
                state["tokenizer.json"] = read_json(place / "tokenizer.json") | UNPADDED
            ignored = (*TRANSIENT_SETTINGS, "tokenizer_config.json")
            states.append({key: value for key, value in state.items() if key not in ignored and value is not None})
    return states


def changed_keys(ours: dict[str, Any], theirs: dict[str, Any]) -> set[str]:
    return {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}


def portable_settings(settings: dict[str, Any], more_tokens: Sequence[str] = ()) -> Files:
    """Return a tokenizer_config.json with names of transformers 4, which 5 reads too. more_tokens: special ones to add."""
    settings = {key: value for key, value in settings.items() if key not in ("backend", "is_local", "local_files_only")}
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    named = settings.pop("extra_special_tokens", None) or {}  # by name in 4, a list in 5
    listed = [*(settings.pop("additional_special_tokens", None) or []), *(named if isinstance(named, list) else ())]
    if listed := listed + [token for token in more_tokens if token not in listed]:
        settings["additional_special_tokens"] = listed
    named = {} if isinstance(named, list) else named
    if named := named | (settings.pop("model_specific_special_tokens", None) or {}):
        settings["extra_special_tokens"] = named
    return {"tokenizer_config.json": (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()}
