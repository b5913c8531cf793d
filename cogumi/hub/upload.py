"""A run's model to the Hugging Face hub: one commit with its card, or nothing."""

import logging
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub as hf
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.repocard import metadata_load

from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_bytes, one_line
from cogumi.core.run_directory import read_json
from cogumi.hub.downloads import status_of
from cogumi.hub.model_card import Base, describe_base, run_base, write_card

log = logging.getLogger("cogumi")

CARD = "README.md"
# A directory of a model may hold other things, such as an optimizer's state: only these are uploaded.
# fmt: off
UPLOADED = (
    "*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "*.gguf", "Modelfile",
    "LICEN[CS]E*", "NOTICE*", "USE_POLICY*",
)
# fmt: on
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
LICENCE_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Pushed:
    """What was uploaded: the files but the card, and their bytes; url: of the commit. removed: weights of an earlier upload."""

    name: str
    kind: str
    files: int
    bytes: int
    url: str
    removed: tuple[str, ...]
    licence: str | None

    def as_dict(self) -> dict[str, Any]:
        return vars(self)

    def __str__(self) -> str:
        said = f"{self.name}: {self.kind}, {self.files} files, {format_bytes(self.bytes)}, and {CARD}\n{self.url}"
        if self.removed:
            said += f"\nremoved weights of an earlier upload: {', '.join(self.removed)}"
        if self.licence is None:
            said += f"\nthe base's licence is not known here: add `license:` to {CARD} on the hub"
        return said


def push_model(source: Path, name: str, what: str | None = None, private: bool = False, anyway: bool = False) -> Pushed:
    """Upload the merged model or the adapter of a run, or a directory, to the repository `name`, which is made if need be.

    what: "merged" or "adapter"; by default merged, where there is one. anyway: also a run that failed a check, has a red flag
    or no verdict.

    Raises UsageError, with nothing uploaded, for such a run, where there is no such model, no token, no permission, or the hub
    does not answer.
    """
    run, directory, kind = find_model(source, what)
    if run is not None and not anyway and (wrong := why_not(run)):
        raise UsageError(wrong, place=run, fix="train again, or push it --anyway: the card says so")
    if hf.get_token() is None:
        raise UsageError(
            "there is no token for the hub", fix="hf auth login, or set HF_TOKEN to a token that may write"
        )
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and is_uploaded(path, directory)]
    base = run_base(run) if run is not None else recorded_base(directory)
    card, licence = describe(name.rpartition("/")[2], directory, kind, base, run)
    api = hf.HfApi()
    adds = [hf.CommitOperationAdd(path.relative_to(directory).as_posix(), str(path)) for path in paths]
    names = {each.path_in_repo for each in adds}
    try:
        repository = api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.repo_info(name).private:
            raise UsageError(f"{name} is there, and public", key="--private", fix="choose another name")
        stale = [
            path
            for path in api.list_repo_files(name)
            if path not in names and any(fnmatch(path, pattern) for pattern in WEIGHTS)
        ]
        done = api.create_commit(
            name,
            [
                *adds,
                hf.CommitOperationAdd(CARD, card.encode()),
                *(hf.CommitOperationDelete(path) for path in stale),
            ],
            commit_message=f"Upload {kind} model with cogumi",
        )
    except (HFValidationError, OSError, httpx.HTTPError) as error:
        raise describe_refusal(name, error) from error
    size = sum(path.stat().st_size for path in paths)
    log.info("push: %s to %s", directory, repository)
    return Pushed(name, kind, len(paths), size, str(done.commit_url), tuple(stale), licence)


def find_model(source: Path, what: str | None) -> tuple[Path | None, Path, str]:
    """(its run or None, the directory to upload, "merged" or "adapter"). Raises UsageError where there is none."""
    if what not in (None, "merged", "adapter"):
        raise UsageError(f"{what!r} is not one of merged, adapter", key="--what")
    if not source.is_dir():
        raise UsageError("no such directory", place=source, fix="name a run, a merged directory or an adapter's")
    if (source / "status.json").exists():
        kinds = (what,) if what else ("merged", "adapter")
        for kind in kinds:
            if list((source / kind).glob("*.safetensors")):
                return source, source / kind, kind
        raise UsageError(
            f"this run has no {' and no '.join(kinds)}", place=source, fix="finish it, or merge its adapter"
        )
    kind = "adapter" if (source / "adapter_config.json").exists() else "merged"
    if not [*source.glob("*.safetensors"), *source.glob("*.gguf")] or what not in (None, kind):
        raise UsageError(f"there is no {what or 'model'} in it", place=source, fix="name a run, or a model's directory")
    above = source.absolute().parent
    run = above if source.name in ("merged", "adapter") and (above / "status.json").exists() else None
    return run, source, kind


def why_not(run: Path) -> str:
    """Why a run's model is not for others: "" where every check passed and no flag is red."""
    if not (run / "verdict.json").exists():
        return "the run has no verdict"
    verdict = read_json(run / "verdict.json")
    wrong = [check["name"] for check in verdict["checks"] if not check["passed"]]
    red = [flag["name"] for flag in verdict["flags"] if flag["level"] == "red"]
    said = [f"{'a check' if len(wrong) == 1 else 'checks'} failed ({', '.join(wrong)})"] if wrong else []
    return "; ".join([*said, *([f"red: {', '.join(red)}"] if red else [])])


def is_uploaded(path: Path, directory: Path) -> bool:
    parts = path.relative_to(directory).parts
    return not any(part.startswith(".") for part in parts) and any(fnmatch(parts[-1], pattern) for pattern in UPLOADED)


def recorded_base(directory: Path) -> Base | None:
    """The base that an adapter or a merged directory names, None where it names none."""
    adapter, manifest = directory / "adapter_config.json", directory / "cogumi-merge.json"
    if adapter.exists():
        name = read_json(adapter).get("base_model_name_or_path")
        return describe_base(name) if name else None
    return describe_base(read_json(manifest)["base"]["name"]) if manifest.exists() else None


def describe(title: str, directory: Path, kind: str, base: Base | None, run: Path | None) -> tuple[str, str | None]:
    """(the card, the licence or None). A merged directory's own card has the facts of the merge."""
    text = (directory / CARD).read_text(encoding="utf-8") if (directory / CARD).exists() and kind == "merged" else ""
    data = (metadata_load(directory / CARD) or {}) if text else {}
    if "license" not in data and base is not None and base.on_hub:
        data |= hub_licence(base.name)
    licence = {key: data[key] for key in LICENCE_KEYS if isinstance(data.get(key), str)}
    facts = (
        "\n".join(line for line in text.splitlines() if line.startswith("- "))
        if "merged" in data.get("tags", [])
        else ""
    )
    return write_card(title, kind, base, licence, run, facts), licence.get("license")


def hub_licence(base: str) -> dict[str, Any]:
    """What the base's own card on the hub says; {} where the hub does not tell."""
    try:
        return dict(metadata_load(hf.hf_hub_download(base, CARD)) or {})
    except (OSError, httpx.HTTPError, ValueError):
        return {}


def describe_refusal(name: str, error: Exception) -> UsageError:
    """What the hub's answer means for a push, in one line."""
    endpoint, status = hf.constants.ENDPOINT, status_of(error)
    if isinstance(error, HFValidationError):
        return UsageError(f"{name!r} is no name of a repository", fix="write OWNER/NAME, as in me/my-model")
    if status == 401:
        return UsageError(f"{endpoint} does not know this token", fix="hf auth login, or set HF_TOKEN to a valid one")
    if status == 403 or isinstance(error, RepositoryNotFoundError):
        return UsageError(
            f"this token may not write to {name}", fix="use a token with write access, of an account that owns the name"
        )
    if status is not None:
        return UsageError(f"{endpoint} answers {status}: {one_line(error)[:200]}", fix="try again later")
    return UsageError(f"the upload to {endpoint} broke off: {one_line(error)[:200]}", fix="connect, and push again")
