"""Output directory of a merge: files beside the weights, and its appearance, whole or not at all.

It begins as a locked partial directory beside the output, with every shard allocated in full, and is renamed at the end. The
model's own files are the base's. The tokenizer is the one that training used: the adapter's, where it has one.
"""

import copy
import errno
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from cogumi.core.disk_space import space_of
from cogumi.core.durability import NO_SPACE, lock_directory, sync_path, write_synced
from cogumi.core.errors import DiskFull, UsageError
from cogumi.core.formatting import format_bytes
from cogumi.merge.adapter_files import read_json
from cogumi.merge.parameter_map import Checkpoint, head_classes
from cogumi.merge.tokenizer_files import (
    TEMPLATE_FILES,
    TOKENIZER_FILES,
    VOCABULARY_FILES,
    glob_files,
    same_vocabulary,
    tokenizer_config,
    tokenizer_home,
    tokens_of,
)

log = logging.getLogger(__name__)

WAIT = "wait for it or choose another out"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# custom_generate/ is where transformers looks for a model's own decoding loop.
MODEL_FILES = ("generation_config.json", "*.py", "custom_generate/*")
# Matched anywhere in a lower-case name, as no two publishers agree: LICENSE.txt, LLAMA_LICENSE, Notice, USE_POLICY.md.
LICENCE_WORDS = ("license", "licence", "notice", "use_policy", "copying")


def check_target(target: Path) -> None:
    """Raise UsageError unless `target` is free and its parent directory can be written."""
    if os.path.lexists(target):
        raise UsageError(f"out {target} exists", fix="choose another name or remove it (nothing is overwritten)")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"out {target}: {parent} is not a directory", fix="create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"out {target}: no permission to write in {parent}", fix="choose another out")


def remove_stale(target: Path) -> None:
    """Remove the partial directories of killed merges into `target`.

    A running merge holds a lock on its partial directory, which dies with the process. Raises UsageError when another
    merge into it is running.
    """
    name = re.compile(re.escape(f"{target.name}.partial-") + "[0-9a-f]{8}")
    for partial in sorted(target.absolute().parent.iterdir()):
        if not name.fullmatch(partial.name) or not partial.is_dir() or partial.is_symlink():
            continue
        try:
            with lock_directory(partial) as free:
                if free is None:
                    log.warning("%s is a killed merge's, or a running one's; remove it if none runs", partial)
                elif free:
                    shutil.rmtree(partial)
                    log.info("removed %s, which a killed merge had left", partial)
                else:
                    raise UsageError(f"out {target}: another merge is writing {partial.name}", fix=WAIT)
        except FileNotFoundError:
            continue  # its own merge, or another one that cleans up, was faster
        except PermissionError as error:
            message = f"out {target}: {partial} was left by a merge and cannot be removed ({error.strerror})"
            raise UsageError(message, fix="remove it or choose another out") from error


@contextmanager
def partial_directory(target: Path, shards: Mapping[str, int], small: int) -> Iterator[Path]:
    """Create a locked directory beside `target`, with every shard (name -> bytes) in its full size.

    After the block it becomes `target`. When the block fails, also by KeyboardInterrupt, the directory is removed. Raises
    DiskFull with the bytes that the output needs. small: bytes of its other files.
    """
    remove_stale(target)
    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    needed = small + sum(shards.values())
    try:
        partial.mkdir()
    except OSError as error:
        if error.errno in NO_SPACE:
            raise disk_full(target, needed, error) from error
        raise UsageError(f"cannot write {partial}: {error.strerror}", fix="choose another out") from error
    with lock_directory(partial) as ours:
        if ours is False:  # a merge that has begun at the same moment took it for a killed one's, and removes it
            raise UsageError(f"out {target}: another merge is writing {partial.name}", fix=WAIT)
        try:
            allocate(partial, shards, small)
            yield partial
            commit_output(partial, target)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise disk_full(target, needed, error) from error
            raise


def allocate(partial: Path, shards: Mapping[str, int], small: int) -> None:
    """Create every shard in its full size, with its blocks allocated on the disk, before the merge computes anything.

    `df` shows more than can be written (quotas, reserved blocks, thin volumes). A filesystem that cannot allocate gets
    files of full size without blocks. Raises OSError where an allocation fails.
    """
    reserve = partial / ".reserve"
    for path, size in {reserve: small, **{partial / name: size for name, size in shards.items()}}.items():
        with path.open("xb") as file:
            try:
                if size:
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                file.truncate(size)
    reserve.unlink()


def disk_full(target: Path, needed: int, error: OSError) -> DiskFull:
    """Describe why `needed` bytes could not be allocated. The merge's own files are already removed."""
    place = target.absolute().parent
    free = space_of(place).free
    # Otherwise it is a quota, a limit on the size of one file, or blocks reserved for root.
    short = error.errno == errno.ENOSPC and free < needed
    remedy = f"free {format_bytes(needed - free)}" if short else "raise that limit"
    has = f"{place} has {format_bytes(free)} free ({error.strerror})"
    text = f"out {target} needs {format_bytes(needed)} and {has}; {remedy} or choose another disk; nothing was written"
    return DiskFull(text, place, needed)


def commit_output(partial: Path, target: Path) -> None:
    """Make `partial` durable and rename it, so that `target` appears whole or not at all, also after a power cut.

    Raises UsageError when `target` has appeared meanwhile. After this check the kernel refuses to replace all but an
    empty directory.
    """
    for directory in [path for path in partial.rglob("*") if path.is_dir()] + [partial]:
        sync_path(directory)
    check_target(target)
    partial.rename(target)
    sync_path(target.absolute().parent)


def side_files(adapter: Path, base: Path) -> dict[str, Path]:
    """Return name in the output -> file whose content is copied (in the hub's cache the files are links).

    All tokenizer files come from one place, the adapter if it has a vocabulary, else the base. A mix of two tokenizers
    would be a third one. Where both vocabularies are equal, the base's other vocabulary files come too, such as the
    tokenizer.model that llama.cpp's converter needs. So does the base's chat template if the adapter has none.
    """
    home = tokenizer_home(adapter)
    licences = [path.name for path in base.iterdir() if any(word in path.name.lower() for word in LICENCE_WORDS)]
    files = glob_files(base, (*MODEL_FILES, *licences))
    files |= glob_files(home, PROCESSOR_FILES) or glob_files(base, PROCESSOR_FILES)
    template = glob_files(home, TEMPLATE_FILES)
    if not glob_files(home, VOCABULARY_FILES):
        files |= glob_files(base, TOKENIZER_FILES) | (template or glob_files(base, TEMPLATE_FILES))
    else:
        tokenizer_files = glob_files(home, TOKENIZER_FILES)
        if same_vocabulary(home, base):
            tokenizer_files = glob_files(base, VOCABULARY_FILES) | tokenizer_files
            if not template and not tokenizer_config(home).get("chat_template"):
                template = glob_files(base, TEMPLATE_FILES)
        files |= tokenizer_files | template
        if tokenizer_config(home).get("auto_map"):  # the tokenizer's own classes, saved with it
            files = glob_files(home, ("*.py",)) | files
    return dict(sorted(files.items()))


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return whether there is a vocabulary among these files of a model."""
    return any(fnmatch(name, pattern) for name in names for pattern in VOCABULARY_FILES)


def output_config(
    config: dict[str, Any], *, dtype: str | None, is_untied: bool, vocab_size: int | None
) -> dict[str, Any]:
    """Return the merged model's config.json: a deep copy of the base's without its quantization.

    dtype: written wherever the base records one (transformers 4 said torch_dtype), nested configs included. The last two
    are set at the top and in text_config, never in a vision or audio config.
    """
    merged = changed_config(config, dtype)
    language = language_sections(merged)
    if is_untied:
        for section in language:
            section["tie_word_embeddings"] = False
    if vocab_size is not None:
        recorded = [section for section in language if "vocab_size" in section]
        for section in recorded or language[-1:]:  # recorded nowhere, it was the class's default, and no longer is
            section["vocab_size"] = vocab_size
    return merged


def language_sections(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the top of a config, and its text_config where it has one."""
    return [config, config["text_config"]] if isinstance(config.get("text_config"), dict) else [config]


def changed_config(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return a deep copy without quantization, with every recorded dtype set, nested configs included."""
    merged: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("quantization_config", "compression_config", "_pre_quantization_dtype"):
            continue
        merged[key] = changed_config(value, dtype) if isinstance(value, dict) else copy.deepcopy(value)
        if dtype is not None and key in ("dtype", "torch_dtype"):
            merged[key] = dtype
    return merged


def set_head(config: dict[str, Any], checkpoint: Checkpoint, files: dict[str, Path]) -> None:
    """Write the class of a head that the adapter brings and the base lacks into the output's config.

    A classifier or reward model also gets its labels and the token that its batches are padded with. files: the output's
    tokenizer.
    """
    config["architectures"] = [checkpoint.architecture]
    if checkpoint.kind not in head_classes(checkpoint.config):
        return
    labels = checkpoint.config.id2label
    config["id2label"] = {str(number): label for number, label in labels.items()}
    config["label2id"] = {label: number for number, label in labels.items()}
    token = token_id(files, "pad_token")
    if token is not None:
        for section in language_sections(config):
            section["pad_token_id"] = token
    elif checkpoint.config.get_text_config().pad_token_id is None:
        message = "the merged %s has no pad_token_id, so it takes one sequence at a time: set it in config.json"
        log.warning(message, checkpoint.architecture)


def add_end_token(directory: Path) -> None:
    """Let the merged model stop also at its tokenizer's end token, with which training ended each answer."""
    token = token_id(glob_files(directory, ("tokenizer.json", "tokenizer_config.json")), "eos_token")
    path = directory / "generation_config.json"
    if not path.is_file():  # transformers reads them from there then
        path = directory / "config.json"
    settings = read_json(path)
    stops = settings.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [stops]
    if token is not None and stops != [None] and token not in stops:
        path.unlink()
        write_synced(path, (json.dumps(settings | {"eos_token_id": [token, *stops]}, indent=2) + "\n").encode())


def token_id(files: dict[str, Path], name: str) -> int | None:
    """Return the id of the tokenizer's `pad_token` or `eos_token`; None where there is none, or no tokenizer.json."""
    if not {"tokenizer.json", "tokenizer_config.json"} <= files.keys():
        return None
    token = read_json(files["tokenizer_config.json"]).get(name)
    text = token.get("content") if isinstance(token, dict) else token
    vocabulary, _, added = tokens_of(read_json(files["tokenizer.json"]))
    if text in added:
        return added[text]
    if isinstance(vocabulary, dict):
        return vocabulary.get(text)
    return next((number for number, (piece, _) in enumerate(vocabulary or []) if piece == text), None)
