"""A run's model to the Hugging Face hub: one commit with its card, or nothing.

The card is made of the run directory: base, licence, verdict, configuration. It holds no secrets and no paths of this
machine.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub as hf
import yaml
from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import filter_repo_objects

from cogumi.core.durability import blake3_file
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_bytes, one_line
from cogumi.core.redact import redact_text
from cogumi.core.run_directory import DECISIONS, describe_failure, read_json, read_section
from cogumi.hub.downloads import status_of

CARD = "README.md"
# A directory of a model may hold other things, such as an optimizer's state: only these are uploaded.
UPLOADED = [f"*.{end}" for end in ("safetensors", "json", "jinja", "txt", "model", "tiktoken", "py", "gguf")]
UPLOADED += ["Modelfile", "cogumi-witness.logits", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*"]
HIDDEN = [".*", "*/.*"]
WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
LICENCE_KEYS = ("license", "license_name", "license_link")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/[0-9a-f]{40}$")
SECTIONS = ("model", "lora", "data", "train")  # of config.yaml


@dataclass(frozen=True)
class Pushed:
    """What was uploaded: the files but the card, and their bytes; url: of the commit. removed: weights of an earlier upload."""

    name: str
    kind: str
    files: int
    bytes: int
    url: str
    removed: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.name}: {self.kind}, {self.files} files, {format_bytes(self.bytes)}, and {CARD}\n{self.url}"
        if self.removed:
            text += f"\nremoved weights of an earlier upload: {', '.join(self.removed)}"
        return text


def push_model(source: Path, name: str, what: str | None = None, private: bool = False, anyway: bool = False) -> Pushed:
    """Upload the merged model or the adapter of a run, or a directory, to the repository `name`, which is made if need be.

    what: "merged" or "adapter"; by default merged, where there is one. anyway: also a run that failed a check, has a red flag
    or no verdict. Raises UsageError, with nothing uploaded, for such a run, without such a model, or if the hub refuses.
    """
    run, directory, kind = find_model(source, what)
    if run is not None and not anyway and (wrong := why_not(run, kind)):
        fix = "train again, or push it --anyway: the card says so"
        if kind == "merged" and not why_not(run, "adapter"):
            fix = "push the adapter (--what adapter), or mend the merge (cogumi status has the command)"
        raise UsageError(wrong, place=run, fix=fix)
    if hf.get_token() is None:
        fix = "hf auth login, or set HF_TOKEN to a token that may write"
        raise UsageError("there is no token for the hub", fix=fix)
    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    names = list(filter_repo_objects(files, allow_patterns=UPLOADED, ignore_patterns=HIDDEN))
    adds = [hf.CommitOperationAdd(file, str(files[file])) for file in names]
    card = write_card(name.rpartition("/")[2], directory, kind, run)
    api = hf.HfApi()
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.repo_info(name).private:
            raise UsageError(f"{name} is there, and public", key="--private", fix="choose another name")
        others = sorted(set(api.list_repo_files(name)) - set(names))
        stale = list(filter_repo_objects(others, allow_patterns=WEIGHTS))
        adds.append(hf.CommitOperationAdd(CARD, card.encode()))
        deletes = [hf.CommitOperationDelete(path) for path in stale]
        done = api.create_commit(name, [*adds, *deletes], commit_message=f"Upload {kind} model with cogumi")
    except (HFValidationError, OSError, HTTPError) as error:
        raise describe_refusal(name, error) from error
    size = sum(files[file].stat().st_size for file in names)
    return Pushed(name, kind, len(names), size, str(done.commit_url), tuple(stale))


def find_model(source: Path, what: str | None) -> tuple[Path | None, Path, str]:
    """(its run or None, the directory to upload, "merged" or "adapter"). Raises UsageError where there is none."""
    if what not in (None, "merged", "adapter"):
        raise UsageError(f"{what!r} is not one of merged, adapter", key="--what")
    for directory in (source / "merged", source / "adapter", source):
        kind = "adapter" if (directory / "adapter_config.json").exists() else "merged"
        if what in (None, kind) and (list(directory.glob("*.safetensors")) or list(directory.glob("*.gguf"))):
            above = directory.absolute().parent
            is_run = directory.name in ("merged", "adapter") and (above / "status.json").exists()
            return above if is_run else None, directory, kind
    noun = {None: "model", "merged": "merged model"}.get(what, what)
    fix = "name a run that has one, a merged directory or an adapter's"
    raise UsageError(f"there is no {noun} there", place=source, fix=fix)


def why_not(run: Path, kind: str) -> str:
    """Why a run's "merged" or "adapter" is not for others: "" where gate and checks passed and no flag is red."""
    if not (run / "verdict.json").exists():
        return "the run has no verdict"
    red = [flag["name"] for flag in read_json(run / "verdict.json")["flags"] if flag["level"] == "red"]
    failure = describe_failure(run, of_merge=kind == "merged")
    return "; ".join(filter(None, (failure, f"red flags: {', '.join(red)}" if red else "")))


def find_base(directory: Path) -> tuple[str | None, str | None]:
    """(name or directory, commit) of the base of a model without its run, each None where nothing records it."""
    if (directory / "cogumi-merge.json").exists():
        base = read_json(directory / "cogumi-merge.json")["base"]
        return hub_id(base["path"]) or base["name"], base["commit"]
    if (directory / "adapter_config.json").exists():
        return read_json(directory / "adapter_config.json").get("base_model_name_or_path"), None
    return None, None


def hub_id(base: str | None) -> str | None:
    """The name on the hub of a base, which may be a directory of the hub's cache; None for another directory."""
    if base is None:
        return None
    if cached := HUB_SNAPSHOT.search(base):
        return cached[1].replace("--", "/", 1)
    return base if HUB_ID.fullmatch(base) and not Path(base).exists() else None


def read_licence(base: str | None) -> dict[str, str]:
    """license, license_name and license_link of the base's own card, as far as there is one that says them."""
    if base is None:
        return {}
    on_hub = hub_id(base)
    try:
        data = metadata_load(hf.hf_hub_download(on_hub, CARD) if on_hub else Path(base) / CARD) or {}
    except (OSError, HTTPError, ValueError, yaml.YAMLError):
        return {}
    return {key: data[key] for key in LICENCE_KEYS if isinstance(data.get(key), str)}


def write_card(title: str, directory: Path, kind: str, run: Path | None) -> str:
    """Markdown with YAML front matter (https://huggingface.co/docs/hub/model-cards)."""
    if run is None:
        config, method, (base, commit) = {}, None, find_base(directory)
    else:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        method, base = str(config["cogumi"]["method"]), config["model"]["name"]
        commit = read_section(run / DECISIONS, "base").get("commit")
    on_hub = hub_id(base)
    # Of a merged model `finetune`: on the hub, `merge` means several models made into one.
    relation = "adapter" if kind == "adapter" else "finetune"
    metadata = hf.ModelCardData(
        base_model=on_hub,
        base_model_relation=relation if on_hub else None,
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=["cogumi", kind, *([] if method is None else ["trl", method])],
        **read_licence(base),  # type: ignore[arg-type]
    )
    parts = [f"# {title}"]
    if base is not None:
        at = f", commit `{commit}`" if on_hub and commit else "" if on_hub else ", a model that is not on the hub"
        by = "" if method is None else f" by {method.upper()} with [TRL](https://github.com/huggingface/trl) and cogumi"
        made = "A LoRA adapter for" if kind == "adapter" else "Trained from"
        parts.append(f"{made} {on_hub or Path(base).name}{at}{by}.")
    if run is not None:
        shown = {name: without_places(value) for name, value in config.items() if name in SECTIONS}
        text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
        parts += [describe_verdict(run, kind), *describe_certificate(directory)]
        parts.append(f"## Configuration\n\n```yaml\n{text}```")
    parts.append("What the model is good for beyond these figures was not measured.")
    return redact_text(f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def describe_verdict(run: Path, kind: str) -> str:
    """The checks of a run as a table, below what speaks against its model."""
    lines = ["## Verdict", ""]
    if wrong := why_not(run, kind):
        lines += [f"**Uploaded in spite of this: {wrong}.**", ""]
    if (run / "verdict.json").exists():
        lines += ["| check | figure | required | passed |", "|---|---|---|---|"]
        for check in read_json(run / "verdict.json")["checks"]:
            cells = [cell(check[key]) for key in ("name", "figure", "requirement")]
            lines.append(f"| {' | '.join(cells)} | {'yes' if check['passed'] else '**no**'} |")
    return "\n".join(lines).rstrip()


def describe_certificate(directory: Path) -> list[str]:
    """The comparisons of a certificate that is about the weights in this directory, as a table."""
    path = directory / "cogumi-certificate.json"
    certificate = read_json(path) if path.exists() else None
    if certificate is None or certificate["subjects"]["merged"] != {
        file.name: blake3_file(file) for file in sorted(directory.glob("*.safetensors"))
    }:
        return []
    marks = {True: "yes", False: "**no**", None: "not known"}
    lines = ["## Certificate", "", "| from, to | figure | passed |", "|---|---|---|"]
    lines += [f"| {cell(s['name'])} | {cell(s['figure'])} | {marks[s['passed']]} |" for s in certificate["steps"]]
    return ["\n".join(lines)]


def without_places(value: Any) -> Any:
    """A value of a config with paths of this machine cut to their last part."""
    if isinstance(value, dict):
        return {key: without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_places(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def describe_refusal(name: str, error: Exception) -> UsageError:
    """What the hub's answer means for a push, in one line."""
    endpoint, status = hf.constants.ENDPOINT, status_of(error)
    if isinstance(error, HFValidationError):
        return UsageError(f"{name!r} is no name of a repository", fix="write OWNER/NAME, as in me/my-model")
    if status == 401:
        return UsageError(f"{endpoint} does not know this token", fix="hf auth login, or set HF_TOKEN to a valid one")
    if status == 403 or isinstance(error, RepositoryNotFoundError):
        fix = "use a token with write access, of an account that owns the name"
        return UsageError(f"this token may not write to {name}", fix=fix)
    outcome = "broke off" if status is None else f"was answered with {status}"
    return UsageError(f"the upload to {endpoint} {outcome}: {one_line(error)[:200]}", fix="push again")
