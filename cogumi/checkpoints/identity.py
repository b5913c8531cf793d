"""Whose a checkpoint is: so that no training goes on from another one's in a place that several can reach."""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogumi.core.durability import write_synced
from cogumi.core.errors import UsageError

# In each checkpoint, and so in its manifest; and in the directory of the checkpoints, where the training itself goes on.
IDENTITY_NAME = "cogumi-run.json"
RUN_NAME = ".cogumi-run"
NAME = re.compile("[0-9a-f]+")  # part of a directory's name in the fallback

# Arguments that do not shape what is learned: where things are, what is shown and kept, how they get there.
NOT_SHAPING = (
    "output_dir", "logging", "log_", "save_", "eval_", "do_", "hub_", "push_", "report_to", "run_name", "project",
    "trackio", "dataloader_", "disable_tqdm", "use_cpu", "local_rank", "resume_", "include_", "ddp_", "debug",
    "load_best", "metric_for", "greater_is", "enable_jit", "vllm_", "torch_compile", "restore_", "prediction_",
    "per_device_eval", "accelerator_config", "deepspeed", "fsdp", "average_tokens", "batch_eval", "overwrite",
    "gradient_checkpointing",  # layers computed twice give what they gave
    "model_init",  # which may hold an access token
)  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """A training: its name, by chance, from its first step on; and what shapes it."""

    run: str
    settings: Mapping[str, Any]

    def write(self, checkpoint: Path) -> None:
        content = {"run": self.run, "settings": dict(self.settings)}
        write_synced(checkpoint / IDENTITY_NAME, (json.dumps(content, indent=1) + "\n").encode())


def new_run() -> str:
    return secrets.token_hex(4)


def settings_of(trainer: Any) -> dict[str, Any]:
    """What shapes a training, as far as a trainer knows: its arguments, its adapters, how many weights and examples."""
    arguments = {
        key: value
        for key, value in trainer.args.to_dict().items()
        if value is not None and not key.startswith(NOT_SHAPING)
    }
    adapters = {
        f"adapter {name}": {key: getattr(config, key, None) for key in ("r", "lora_alpha", "target_modules")}
        for name, config in (getattr(trainer.model, "peft_config", None) or {}).items()
    }
    counts: dict[str, Any] = {"parameters": sum(each.numel() for each in trainer.model.parameters())}
    if hasattr(trainer.train_dataset, "__len__"):
        counts["examples"] = len(trainer.train_dataset)
    found: dict[str, Any] = json.loads(json.dumps(arguments | adapters | counts, default=plain, sort_keys=True))
    return found


def plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def identity_in(text: str) -> Identity:
    """What a checkpoint's file says. Raises ValueError where it is not one."""
    content = json.loads(text)
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("run"), str)
        or not isinstance(content.get("settings"), dict)
    ):
        raise ValueError(f"{IDENTITY_NAME} does not say which run it is of")
    return Identity(content["run"], content["settings"])


def run_of(directory: Path) -> str | None:
    """The name of the training that a directory of checkpoints, or one checkpoint, is of. Raises UsageError for another text."""
    own, of_checkpoint = directory / RUN_NAME, directory / IDENTITY_NAME
    if own.exists():
        name = own.read_text(encoding="utf-8", errors="replace").strip()
        if name and not NAME.fullmatch(name):
            raise UsageError(f"{own} is damaged: {name[:20]!r} is no name of a training", fix="remove that file")
        return name or None
    if not of_checkpoint.exists():
        return None
    try:
        return identity_in(of_checkpoint.read_text(encoding="utf-8")).run
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{of_checkpoint} is damaged ({error})", fix="remove that file to resume from it") from error


def name_run(output_dir: Path, run: str) -> None:
    """Have a directory of checkpoints be of a training from now on."""
    path = output_dir / RUN_NAME
    if not path.exists() or path.read_text(encoding="utf-8").strip() != run:
        path.unlink(missing_ok=True)
        write_synced(path, f"{run}\n".encode())


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Up to three settings in which two trainings differ, in words; "" where they are the same."""
    other = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
    said = ", ".join(f"{key}: {there.get(key)} there, {here.get(key)} here" for key in other[:3])
    return f"{said} and {len(other) - 3} more" if len(other) > 3 else said


def refuse_anothers(found: Identity, here: Mapping[str, Any], place: str) -> None:
    """Raise UsageError where a checkpoint in a mirror is of a training with other settings."""
    other = differences(found.settings, here)
    if other:
        raise UsageError(
            f"{place} is of another training ({other})",
            fix="give this one its own mirror, or set these back to go on with that one",
        )
