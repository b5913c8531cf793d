"""Where the rows of `data:` are: a local file, the sample of this Python, or a data set on the hub, and what identifies them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogumi.data.cache_key import files_identity
from cogumi.data.files import find_files, is_hub_id
from cogumi.data.hub import find_on_hub, split_of
from cogumi.data.sample import sample_path
from cogumi.data.sample_tasks import CHAT, PAIRS, chat_path, pairs_path
from cogumi.errors import UsageError

STDLIB = "cogumi:stdlib"
SAMPLES = {STDLIB: sample_path, CHAT: chat_path, PAIRS: pairs_path}


@dataclass(frozen=True)
class Located:
    """The files of one source, all on this machine."""

    name: str
    files: tuple[Path, ...]
    identity: Any
    """JSON that is another one where the rows may be others: the commit on the hub, or of each file what `files_identity`
    says."""


def locate(source: str, *, revision: str | None = None, split: str | None = None, subset: str | None = None) -> Located:
    """The files that `source` stands for, downloaded where they are on the hub.

    A local file or directory wins over a hub id of the same spelling. split: of a hub data set ("train" by default), or of
    a directory laid out like one. Raises UsageError as `find_files` and `find_on_hub` do.
    """
    if source in SAMPLES:
        files = [SAMPLES[source]()]
        return Located(source, tuple(files), files_identity(files))
    if source.startswith("cogumi:"):
        raise UsageError(f"{source} is not known", key="data.source", fix=f"there is {', '.join(SAMPLES)}")
    if not Path(source).exists() and is_hub_id(source):
        found = find_on_hub(source, revision, split, subset)
        return Located(found.name, found.files, found.identity)
    for key, value in (("revision", revision), ("subset", subset)):
        if value is not None:
            raise UsageError(f"data.{key} would be ignored: {source} is a local file, not a hub id", fix="drop it")
    if split is not None and not Path(source).is_dir():
        raise UsageError(f"data.split would be ignored: {source} is not a directory nor a hub id", fix="drop it")
    files = find_files(source) if split is None else split_of(source, split)
    return Located(source, tuple(files), files_identity(files))
