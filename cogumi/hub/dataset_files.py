"""Data sets on the Hugging Face hub: which files a split is, at which commit, and the download of them.

`datasets` says which files, from the repository's own description (its README) or their names; huggingface_hub downloads
them, resuming what was broken off, into its own cache. They are then read like local files. What `datasets` said of a commit
never changes, and is kept, so that a pinned data set needs no network once it is there.
"""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from cogumi.core.disk_space import hub_cache, nearest_existing, space_of, spoken
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import write_json
from cogumi.hub.source_files import SUFFIXES, kind_of

log = logging.getLogger("cogumi")

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class OnHub:
    """One split of a data set at one commit, downloaded."""

    name: str
    commit: str
    files: tuple[Path, ...]
    identity: Any
    """Name, commit and files as the repository names them: the commit says what they hold."""


def find_on_hub(name: str, revision: str | None, split: str | None, subset: str | None) -> OnHub:
    """The files of one split of `name` ("train", or the only one, by default) at `revision`, downloaded.

    A revision that is not a commit is resolved to the one it is now, and the log says how to pin it. Raises UsageError when
    the hub has no such data set, revision, subset or split, does not let this token read it, cannot be reached, when its
    files are of another kind, or do not fit on the disk.
    """
    if revision is None or COMMIT.fullmatch(revision) is None:
        with in_one_line(name, revision):
            commit = resolve_commit(name, revision)
        log.info("%s is at commit %s now; to train on the same rows again: data.revision: %s", name, commit, commit)
    else:
        commit = revision
    record = Path(platformdirs.user_cache_dir("cogumi")) / "hub" / f"{_short_hash(name, commit, subset)}.json"
    if record.is_file():
        splits = json.loads(record.read_text(encoding="utf-8"))
    else:
        with in_one_line(name, revision):
            splits = splits_of(name, commit, subset)
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, splits)
    paths = choose_split(name, splits, split)
    with in_one_line(name, revision):
        files = download(name, commit, paths)
    return OnHub(f"{name}@{commit[:7]}", commit, files, [name, commit, paths])


def resolve_commit(name: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    commit = HfApi().dataset_info(name, revision=revision).sha
    assert commit is not None
    return str(commit)


def splits_of(name: str, commit: str, subset: str | None) -> dict[str, list[str]]:
    """Split -> files inside the repository, as `datasets` resolves them."""
    base = f"hf://datasets/{name}@{commit}/"
    return {
        split: [url.removeprefix(base) for url in urls] for split, urls in _data_files(name, subset, commit).items()
    }


def split_of(directory: str, split: str) -> list[Path]:
    """The files of one split of a local directory that is laid out like a data set of the hub."""
    with in_one_line(directory, None):
        splits = _data_files(directory, None, None)
    return [Path(file) for file in choose_split(directory, splits, split)]


def _data_files(name: str, subset: str | None, commit: str | None) -> dict[str, list[str]]:
    from datasets import load_dataset_builder

    found = load_dataset_builder(name, subset, revision=commit).config.data_files or {}
    return {str(split): [str(file) for file in files] for split, files in found.items()}


def choose_split(name: str, splits: Mapping[str, Sequence[str]], split: str | None) -> list[str]:
    if split is None:
        split = next(iter(splits)) if len(splits) == 1 else "train"
    if split not in splits:
        raise UsageError(
            f"{name} has no split {split!r}", key="data.split", fix=f"it has: {', '.join(splits) or 'none'}"
        )
    other = [file for file in splits[split] if kind_of(Path(file)) is None and not file.endswith(".parquet")]
    if other:
        kinds = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise UsageError(
            f"{other[0]} is of a kind that is not read ({kinds} are)", place=name, fix="convert it and give the file"
        )
    return list(splits[split])


def download(name: str, commit: str, paths: Sequence[str]) -> tuple[Path, ...]:
    """The files in huggingface_hub's cache, downloaded where they are not; the disk is looked at first."""
    from huggingface_hub import HfApi, RepoFile, hf_hub_download, try_to_load_from_cache

    there = {path: try_to_load_from_cache(name, path, revision=commit, repo_type="dataset") for path in paths}
    missing = [path for path in paths if not isinstance(there[path], str)]
    if missing:
        entries = HfApi().get_paths_info(name, missing, revision=commit, repo_type="dataset")
        wanted = sum(entry.size for entry in entries if isinstance(entry, RepoFile))
        place = hub_cache()
        free = space_of(nearest_existing(place)).free
        if wanted > free:
            raise UsageError(
                f"{spoken(wanted)} are to be downloaded and {spoken(free)} are free in {place}",
                place=name,
                fix="free some, or set HF_HUB_CACHE to another disk",
            )
        log.info("downloading %s: %d of its files, %s, into %s", name, len(missing), spoken(wanted), place)
        started = time.monotonic()
        for path in missing:
            there[path] = hf_hub_download(name, path, repo_type="dataset", revision=commit)
        log.info("downloaded %s in %.0f s", name, time.monotonic() - started)
    return tuple(Path(str(there[path])) for path in paths)


@contextmanager
def in_one_line(name: str, revision: str | None) -> Iterator[None]:
    """What goes wrong on the way to the hub, as a UsageError that says what to change."""
    import httpx
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub import errors

    try:
        yield
    # ValueError: no such subset; RuntimeError: a data set that is a script.
    except (errors.HfHubHTTPError, httpx.HTTPError, DatasetsError, OSError, ValueError, RuntimeError) as error:
        # `datasets` wraps what the hub said.
        said = [each for each in (error, error.__cause__, error.__context__) if isinstance(each, errors.HfHubHTTPError)]
        match said[0] if said else error:
            case errors.GatedRepoError():
                reason = "it is gated: ask for access on its page there, and log in (hf auth login, or HF_TOKEN)"
            case errors.RepositoryNotFoundError():
                here = f"there is no such file (looked from {Path.cwd()})"
                reason = f"{here}, and no such data set on the hub, or it is private: hf auth login"
            case errors.RevisionNotFoundError():
                reason = f"it has no revision {revision!r} (data.revision)"
            case errors.HfHubHTTPError() | httpx.HTTPError() | OSError() as cause if not isinstance(
                cause, DatasetsError
            ):
                place = os.environ.get("HF_ENDPOINT", "the hub")
                advice = "try again, or download it and give the directory"
                reason = f"{place} could not be read ({_one_line(cause)}); {advice}"
            case DatasetNotFoundError() as other:  # gated, most of the time
                reason = f"{_one_line(other)} (hf auth login, or HF_TOKEN)"
            case other:
                hint = " (data.subset names one)" if isinstance(other, ValueError) else ""
                reason = f"{_one_line(other)}{hint}"
        raise UsageError(reason, place=name) from error


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _short_hash(*parts: str | None) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
