"""The model card of a run: base, licence, verdict, metrics and configuration, from the run directory alone, without secrets."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from cogumi.core.redact import redact_text
from cogumi.core.run_directory import DECISIONS, read_json, read_jsonl, read_section

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SECTIONS = ("model", "lora", "data", "train")  # of config.yaml
# Of metrics.jsonl: what is worth a row where it was logged, at its first and its last step.
YES_NO = {True: "yes", False: "**no**"}
FIGURES = {"eval_loss": "held-out loss", "loss": "training loss", "reward": "mean reward"}


@dataclass(frozen=True)
class Base:
    """What a model was trained from: its hub id, or the last part of another name, which is then no link."""

    name: str
    on_hub: bool
    commit: str | None = None


def describe_base(name: str, commit: str | None = None) -> Base:
    on_hub = HUB_ID.fullmatch(name) is not None and not Path(name).exists()
    return Base(name if on_hub else Path(name).name, on_hub, commit if on_hub else None)


def run_base(run: Path) -> Base:
    commit = read_section(run / DECISIONS, "base")
    return describe_base(run_config(run)["model"]["name"], commit if isinstance(commit, str) else None)


def run_config(run: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))


def write_card(title: str, kind: str, base: Base | None, licence: dict[str, str], run: Path | None, merge: str) -> str:
    """Markdown with YAML front matter. kind: "merged" or "adapter"; licence: keys of the front matter; merge: the merge's own
    facts, as a list, or ""."""
    method = None if run is None else str(run_config(run)["cogumi"]["method"])
    metadata = ModelCardData(
        base_model=base.name if base is not None and base.on_hub else None,
        base_model_relation=None if base is None or not base.on_hub else "adapter" if kind == "adapter" else "finetune",
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=["cogumi", kind, *([] if method is None else ["trl", method])],
        **licence,  # type: ignore[arg-type]
    )
    parts = [f"# {title}"]
    if base is not None:
        commit = (
            f", commit `{base.commit}`" if base.commit else "" if base.on_hub else ", a model that is not on the hub"
        )
        by = "" if method is None else f" by {method.upper()} with [TRL](https://github.com/huggingface/trl) and cogumi"
        parts.append(f"{'A LoRA adapter for' if kind == 'adapter' else 'Trained from'} {base.name}{commit}{by}.")
    if run is not None:
        parts += [describe_verdict(run), describe_metrics(run)]
    if merge:
        parts.append(f"## Merge\n\n{merge}")
    if run is not None:
        parts.append(describe_config(run))
    parts.append("What the model is good for beyond these figures was not measured.")
    text = f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n"
    return redact_text(text)


def describe_verdict(run: Path) -> str:
    verdict = read_json(run / "verdict.json") if (run / "verdict.json").exists() else None
    if verdict is None:
        return "## Verdict\n\nThe run has no verdict: it has not come to its end."
    met = sum(check["passed"] for check in verdict["checks"])
    rows = [
        " | ".join(
            ["", *(cell(check[key]) for key in ("name", "figure", "requirement")), YES_NO[check["passed"]], ""]
        ).strip()
        for check in verdict["checks"]
    ]
    lines = [
        f"{met} of {len(rows)} checks passed.",
        "",
        "| check | figure | required | passed |",
        "|---|---|---|---|",
        *rows,
    ]
    for flag in verdict["flags"]:
        if flag["level"] != "green":
            lines += ["", f"- {flag['name']} was {flag['level']} at the end: {flag['cause']} ({flag['evidence']})"]
    return "\n".join(["## Verdict", "", *lines])


def describe_metrics(run: Path) -> str:
    logged, rows = read_jsonl(run / "metrics.jsonl"), []
    for key, words in FIGURES.items():
        values = [(row["step"], row[key]) for row in logged if isinstance(row.get(key), float)]
        if values:
            (first, start), (last, end) = values[0], values[-1]
            rows.append(f"| {words} | {start:.4g} (step {first}) | {end:.4g} (step {last}) |")
    return "\n".join(["## Metrics", "", "| | first | last |", "|---|---|---|", *rows]) if rows else ""


def describe_config(run: Path) -> str:
    config = {name: without_places(value) for name, value in run_config(run).items() if name in SECTIONS}
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return f"## Configuration\n\n```yaml\n{text}```"


def without_places(value: Any) -> Any:
    """A value of a config with paths of this machine cut to their last part."""
    if isinstance(value, dict):
        return {key: without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_places(each) for each in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def cell(text: object) -> str:
    """Text in a table of Markdown."""
    return str(text).replace("|", "\\|").replace("\n", " ")
