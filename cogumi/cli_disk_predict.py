"""`cogumi disk predict`: what a run will want of its disks, from its config before it starts, or from its directory."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cogumi.errors import UsageError

if TYPE_CHECKING:
    from cogumi.config import RunConfig
    from cogumi.disk.needs import Need
    from cogumi.disk.outlook import Outlook


def predict(
    target: Annotated[Path, typer.Argument(metavar="CONFIG|DIR", help="A run's YAML, or its directory.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as train.save_steps=50")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """What a run will want of its disks. Exit status 1 where it does not fit. Loads and downloads no weights."""
    from cogumi.cli_disk import disk_failures_in_one_line, print_json

    with disk_failures_in_one_line():
        found = of_directory(target, overrides or []) if target.is_dir() else of_config(target, overrides or [])
    if as_json:
        print_json(as_dict(found))
    else:
        show(found)
    raise typer.Exit(0 if found.fits else 1)


def of_directory(directory: Path, words: list[str]) -> "Outlook":
    """Of a run that is under way or over; by its config as long as it has written no checkpoint."""
    from cogumi.checkpoints.resume import checkpoints_in
    from cogumi.disk.running import checkpoints_of, is_run, outlook_of_run

    if not is_run(directory):
        raise UsageError(f"{directory} is not a run's directory: it holds no config.yaml and no checkpoint-STEP")
    if words:
        raise UsageError(f"{words[0]}: a run's directory has its config; overrides go with a YAML")
    if checkpoints_in(checkpoints_of(directory)):
        return outlook_of_run(directory)
    return of_config(directory / "config.yaml", [f"cogumi.run_dir={json.dumps(str(directory))}"])


def of_config(path: Path, words: list[str]) -> "Outlook":
    """Of a run that is to start. Raises UsageError for a mistake in the config, with the file and the line."""
    from cogumi.config import load_config, parse_overrides

    run = load_config(path, **parse_overrides(words))
    from cogumi.checkpoints.protection import DEFAULT_KEEP
    from cogumi.disk.outlook import outlook

    trainer, notes = planned(run)
    download, unknown = download_of(run)
    return outlook(
        trainer,
        keep=max(2, trainer.args.save_total_limit or DEFAULT_KEEP),
        adapter_into=run.run_dir / "adapter",
        merged_into=run.run_dir / "merged" if run.cogumi.merge else None,
        more=download,
        notes=(*notes, *unknown),
    )


def planned(run: "RunConfig") -> tuple[Any, list[str]]:
    """The trainer that the run will have, without weights, and what is not known of it."""
    from transformers import AutoConfig

    from cogumi.disk.planned import planned_trainer
    from cogumi.models.adapters import keep_float32, lora_config
    from cogumi.models.load import load_tokenizer, loaded_in, refuse_quantized_already, resolve_model
    from cogumi.patches import patch
    from cogumi.training.run import BUILD_REFUSALS, one_line, trl_arguments

    patch()  # without it TRL takes no gspo
    args = trl_arguments(run)
    base = resolve_model(run.model.name, run.model.revision)
    config = AutoConfig.from_pretrained(base, revision=run.model.revision)
    if run.model.quantization_config is not None:  # which changes nothing of what is written
        refuse_quantized_already(base, config)
    tokenizer, notes = None, []
    try:
        tokenizer = load_tokenizer(base, run.model.revision)
    except UsageError:  # a run would not start without one; the rest is worth knowing
        notes.append(f"{run.model.name} has no tokenizer that can be loaded, and none is counted")
    try:
        trainer = planned_trainer(config, loaded_in(run.model.dtype), args, lora_config(run.lora), tokenizer)
        keep_float32(trainer.model)
        return trainer, notes
    except UsageError:
        raise
    except BUILD_REFUSALS as error:
        raise UsageError(f"model, lora or train: {one_line(error)}") from error


def download_of(run: "RunConfig") -> tuple[list["Need"], list[str]]:
    """What the weights will take in the hub's cache, 0 where they are here, and a line where it is not known."""
    from cogumi.disk.needs import Need
    from cogumi.disk.outlook import DOWNLOAD, ENTRIES
    from cogumi.disk.usage import hub_cache
    from cogumi.models.load import SMALL_BASE

    name, revision = run.model.name, run.model.revision
    if name == SMALL_BASE or Path(name).is_dir() or in_cache(name, revision):
        return [Need(DOWNLOAD, hub_cache(), 0, 0, 0)], []
    size = download_bytes(name, revision)
    if size is None:
        return [], [f"what the download of {name} takes in {hub_cache()} is not known: the hub cannot be asked"]
    return [Need(DOWNLOAD, hub_cache(), size, size, ENTRIES)], []


def in_cache(name: str, revision: str | None) -> bool:
    """Whether a model's weights are in the hub's cache, all of them."""
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(name, "model.safetensors.index.json", revision=revision)
    files = {"model.safetensors"}
    if isinstance(index, str):
        files = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    return all(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)


def download_bytes(name: str, revision: str | None) -> int | None:
    """Bytes of the weights that are not in the cache yet, as the hub says; None where it cannot be asked."""
    import httpx
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        files = HfApi().model_info(name, revision=revision, timeout=10, files_metadata=True).siblings or []
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx.HTTPError):
        return None
    for kind in (".safetensors", ".bin"):  # transformers takes the second where there is none of the first
        weights = [file for file in files if file.rfilename.endswith(kind) and "/" not in file.rfilename]
        if weights:
            missing = [w for w in weights if try_to_load_from_cache(name, w.rfilename, revision=revision) is None]
            return sum(file.size or 0 for file in missing)
    return None


def as_dict(found: "Outlook") -> dict[str, Any]:
    """An outlook with what is computed from its fields."""
    disks = [
        {"wanted": disk.wanted, "short": disk.short, "fits": disk.fits, "refusal": disk.refusal, **asdict(disk)}
        for disk in found.disks
    ]
    return {"fits": found.fits, **asdict(found), "disks": disks, "lines": found.lines}


def show(found: "Outlook") -> None:
    from rich.console import Console

    from cogumi.cli_disk import print_table
    from cogumi.disk import spoken

    rows = []
    for disk in found.disks:
        mount, free = disk.filesystem.mount, spoken(disk.filesystem.space.free)
        rows.append((disk.parts, mount, spoken(disk.wanted), free, disk.refusal or "fits"))
    print_table("what is wanted of the disks", ["for", "mounted at", ">wanted", ">free", ""], rows)
    console = Console(markup=False, highlight=False, emoji=False)
    for line in found.about_saves:
        console.print(line)
