"""Has a lane worked on a card? Read from the results that `python -m benchmarks gpu` leaves, not from anybody's word."""

import json
import re
from pathlib import Path
from typing import Any

# None of the probes runs it, so that no result can tell that it works.
UNPROBED = ("vllm",)
# Of cogumi.stack.probes and benchmarks.gpu; a probe of a package counts where the lane pins the package.
PROBES = ("torch", "matmul", "triton", "torchvision", "bitsandbytes", "xformers", "unsloth")


def known_good(lane: dict[str, Any], results: Path) -> dict[str, str] | None:
    """The newest result that proves the lane: {"date", "card", "driver", "result"}; None while there is none.

    `lane` is an entry of lanes.json. Proof is a full run on a GPU with the lane's versions and torch's CUDA release, in which
    every probe that the lane can run has run.
    """
    if lane["driver"] is None or any(name in lane["pins"] for name in UNPROBED):
        return None
    proofs = []
    for path in results.glob("*gpu*.json"):
        document = json.loads(path.read_text())
        if document["name"] in ("gpu", "gpu_probes") and document["machine"]["gpu"] and proves(document, lane):
            about = document["machine"]
            proofs.append(
                {"date": document["date"], "card": about["gpu"], "driver": about["driver"], "result": path.name}
            )
    return max(proofs, key=lambda proof: proof["date"], default=None)


def proves(document: dict[str, Any], lane: dict[str, Any]) -> bool:
    pins = lane["pins"] | next(
        iter(lane["pins_apart"].values()), {}
    )  # names, for the most part: versions differ by Python
    rows = [row for row in document["rows"] if row["benchmark"] == "gpu_probes"]
    wanted = {name for name in PROBES if name in pins or name == "matmul"}
    ran = {row["case"] for row in rows if row["value"] is not None}
    return (
        all(
            fits(version, name, lane)
            for name, version in document["versions"].items()
            if version is not None and name in pins
        )
        and all(document["versions"].get(name) for name in ("torch", "trl", "transformers"))
        and wanted <= ran
        and any(built_for(row) == lane["cuda"] for row in rows if row["case"] == "torch")
    )


def fits(version: str, name: str, lane: dict[str, Any]) -> bool:
    """Whether a version is the lane's, on any Python; a local version that the pin does not name is its build's."""
    pinned = {lane["pins"].get(name), *(apart.get(name) for apart in lane["pins_apart"].values())}
    return version in pinned or version.partition("+")[0] in pinned


def built_for(row: dict[str, Any]) -> str | None:
    """ "13.0" of the note "built for CUDA 13.0, cuDNN 91900" in a torch row."""
    found = re.match(r"built for CUDA ([\d.]+),", row["note"])
    return found[1] if found else None
