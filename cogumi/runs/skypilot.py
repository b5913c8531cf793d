"""Rent the cheapest card that a run fits on: a SkyPilot task that sets the box up, trains into a mirror and ends itself."""

import glob
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from cogumi.config.schema import RunConfig, dump_config
from cogumi.config.source import PACKAGE
from cogumi.core.errors import RunFailed, UsageError
from cogumi.core.redact import REDACTED
from cogumi.forecast.preflight_report import Line
from cogumi.stack.gpus import CARDS, Card, words_in

# Minutes that are paid for beside the run's own: at most to install, until SkyPilot's autostop, and the end of a spent budget.
SETUP_MINUTES, IDLE_MINUTES, GRACE_MINUTES = 30, 5, 5
RESERVED_HOURS = (SETUP_MINUTES + IDLE_MINUTES + GRACE_MINUTES) / 60
# SkyPilot puts uv on each box. Where its Python cannot be had, the installer looks for another.
SETUP = """~/.local/bin/uv python install --no-bin --install-dir .python 3.12
PYTHON=$(echo .python/cpython-3.12*/bin/python3.12) sh requirements/install.sh"""
SECRETS = re.compile(r"HF_TOKEN|WANDB_API_KEY|AWS_(\w*KEY\w*|SESSION_TOKEN|DEFAULT_REGION|ENDPOINT_URL)")
VARIANTS = words_in("PCIe NVL SXM 16GB 32GB 40GB 80GB")  # which SkyPilot's names of a card leave out
CLOUDS = ("s3", "s3a", "hf", "gs", "gcs", "az", "abfs")  # protocols of mirrors
CUDA_13 = (7, 5)  # the oldest cards that the stable lane runs on
INSTALL_SKYPILOT = 'pipx install "skypilot[runpod,vast]"'  # apart: it wants an older click than the lanes have
UNATTENDED = {"restarts": 3, "on_hung": "stop"}  # where the configuration leaves them open


@dataclass(frozen=True)
class Offer:
    """A machine for rent, in dollars an hour. accelerator, infra: SkyPilot's names. spot: 0 where there is no such price."""

    card: Card
    price: float
    accelerator: str
    infra: str | None = None
    spot: float = 0.0


def find_sky() -> str | None:
    """Return SkyPilot's command, of this environment or on PATH."""
    return shutil.which("sky", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def match_card(name: str, gibibytes: float = 0.0) -> Card | None:
    """Return the slowest card that SkyPilot's name may be ("RTX4090", "A100-80GB-SXM"), None for one not in the table."""
    words = words_in(name.replace("RTX", "RTX ").removesuffix("-SXM"))
    named = [card for card in CARDS if words <= words_in(card.name) <= words | VARIANTS]
    if gibibytes >= 1:  # RunPod's catalogue has gibibytes where mebibytes belong
        named = [card for card in named if abs(card.memory / 1024 - gibibytes) < gibibytes / 10]
    return min(named, key=lambda card: (card.memory, card.peak or 0, card.bandwidth), default=None)


def find_offers(sky: str | None, infras: Sequence[str], run: RunConfig) -> Iterator[Offer]:
    """Yield SkyPilot's offers, or without it every card at `price_per_hour`. Raises RunFailed without SkyPilot's catalogue."""
    if sky is None:
        if (price := run.cogumi.price_per_hour) is None:
            fix = (
                f"install it apart ({INSTALL_SKYPILOT}), or set cogumi.price_per_hour to the most that an hour may cost"
            )
            raise UsageError("SkyPilot, which knows the prices, is not installed", fix=fix)
        short = re.compile(r" PCIe| [14][06]GB|(?<=RTX) ")
        yield from (Offer(card, price, short.sub("", card.name).replace(" ", "-")) for card in CARDS)
    for infra in infras if sky else ():
        command = [str(sky), "gpus", "list", "--infra", infra, "--output", "json"]
        listing = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            accelerators = json.loads(listing.stdout[listing.stdout.index("{") :])
        except ValueError:
            message = " ".join((listing.stderr or listing.stdout).split())
            raise RunFailed(f"sky gpus list --infra {infra}: {message[-400:]}") from None
        for row in (row for rows in accelerators.values() for row in rows):
            card = match_card(row["accelerator_name"], row["device_memory"] or 0.0)
            if card is not None and row["accelerator_count"] == run.cogumi.process_count and row["price"] > 0:
                yield Offer(card, row["price"], row["accelerator_name"], infra, row["spot_price"] or 0.0)


def with_budget(run: RunConfig, offer: Offer, spend: float) -> RunConfig:
    """Return the run as the box trains it. What is left of the money after set-up and end is its `max_hours`."""
    hours = math.floor(1000 * (spend / offer.price - RESERVED_HOURS)) / 1000
    options = {key: value for key, value in UNATTENDED.items() if key not in run.cogumi.model_fields_set}
    options |= {"price_per_hour": offer.price, "max_hours": min(hours, run.cogumi.max_hours or hours)}
    return run.model_copy(update={"cogumi": run.cogumi.model_copy(update=options)})


def examine_offers(run: RunConfig, offers: Sequence[Offer], spend: float) -> Iterator[tuple[Offer, Line]]:
    """Yield offers by price, each card once, with the line that is red, up to the first that the preflight finds to fit."""
    from cogumi.forecast.run_forecast import forecast_run

    known = [offer for offer in offers if offer.card.capability >= CUDA_13 and spend > RESERVED_HOURS * offer.price]
    cheapest = {offer.card: offer for offer in sorted(known, key=lambda offer: offer.price, reverse=True)}
    if not cheapest:
        least = f"no known card is offered for which that pays {60 * RESERVED_HOURS:.0f} min of set-up and end"
        catalogue = not offers or offers[0].infra
        other = "name another --infra" if catalogue else "lower cogumi.price_per_hour, if you find one"
        raise UsageError(least, key=f"--spend {spend:g}", fix=f"spend more, or {other}")
    for offer in sorted(cheapest.values(), key=lambda offer: (offer.price, offer.card.memory)):
        lines = forecast_run(with_budget(run, offer, spend), offer.card.name, None, apart=False).lines
        red = [line for line in lines if line.state == "red" and line.stage != "disk"]  # of this machine's disks
        yield offer, red[0] if red else [line for line in lines if line.stage in ("memory", "time")][-1]
        if not red:
            return


def find_files(run: RunConfig) -> dict[str, str]:
    """Return what to copy, {place on the box: place here}. Raises UsageError for what a box could not have or keep."""
    mirror, text, files = run.cogumi.mirror or "", dump_config(run), {}
    protocol, _, path = mirror.partition("?")[0].partition("://")
    if protocol not in CLOUDS or not path.strip("/") or (protocol == "hf" and "/" not in path.strip("/")):
        problem = (
            f"{mirror} is no place that outlasts the box" if mirror else "is not set, and a box is lost with its disk"
        )
        raise UsageError(problem, key="cogumi.mirror", fix="set s3://BUCKET/RUN or hf://USER/REPO")
    if not Path(PACKAGE.parent, "requirements/install.sh").is_file():
        raise UsageError("a box installs the clone that cogumi runs from, and this is none", fix="run it from a clone")
    if REDACTED in text:
        entries = (
            (f"{section}.{key}", value) for section, part in yaml.safe_load(text).items() for key, value in part.items()
        )
        secret = next(key for key, value in entries if REDACTED in str(value))
        fix = "put it into the environment, from which HF_TOKEN and WANDB_API_KEY are passed on"
        raise UsageError("holds a secret, which would be written into a file", key=secret, fix=fix)
    for value in (token.value for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)):
        if value in (run.data.source, run.model.name) or (set("/.") & set(value) and value != str(run.run_dir)):
            place = re.sub(r"(\.py):\w+$", r"\1", value)  # file.py:function
            for local_path in map(Path, [place] if os.path.exists(place) else glob.glob(place)):
                if local_path.is_absolute() or ".." in local_path.parts:
                    fix = "move it below this directory and give the relative path, or name it on the hub"
                    raise UsageError(f"the box would not have {local_path}, which is not below {Path.cwd()}", fix=fix)
                files[f"~/sky_workdir/{local_path}"] = str(local_path.absolute())
    return files


def write_task(run: RunConfig, offer: Offer, spend: float, files: dict[str, str]) -> list[str]:
    """Write a box's configuration and its task into launch/NAME; return the command that starts it, the task's file last."""
    run, name = with_budget(run, offer, spend), re.sub(r"\W+", "-", run.run_dir.name.lower()).strip("-_") or "run"
    config, task = Path("launch", name, "config.yaml").absolute(), Path("launch", name, "task.yaml")
    secrets = [name for name in sorted(os.environ) if SECRETS.fullmatch(name) and os.environ[name]]
    minutes = math.ceil(60 * (run.cogumi.max_hours or 0)) + GRACE_MINUTES
    content = {
        "name": f"cogumi-{name}",
        "resources": {"infra": offer.infra, "accelerators": f"{offer.accelerator}:{run.cogumi.process_count}",
                      "max_hourly_cost": offer.price, "disk_size": 100,
                      "autostop": {"idle_minutes": IDLE_MINUTES, "down": True}},
        "workdir": str(PACKAGE.parent),
        "file_mounts": files | {"~/sky_workdir/launch.yaml": str(config)},
        "secrets": dict.fromkeys(secrets),
        "setup": f"timeout {SETUP_MINUTES}m sh -c {shlex.quote(SETUP)}",
        "run": f"timeout --kill-after={GRACE_MINUTES}m {minutes}m .venv/bin/cogumi train launch.yaml",
    }  # fmt: skip
    task.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(dump_config(run), encoding="utf-8")
    task.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    flags = [word for variable in secrets for word in ("--secret", variable)]
    return ["sky", "launch", "--cluster", f"cogumi-{name}", *flags, "--detach-run", "--yes", str(task)]
