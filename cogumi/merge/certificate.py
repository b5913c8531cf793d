"""Certify that a merged model, and a GGUF file of it, compute what their adapter was trained to.

The parts are those of the merge and the export; here they run in a chain on the same tokens, and the result has the hashes
of what it is about.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cogumi.core.durability import blake3_file
from cogumi.core.errors import MergeError, UsageError
from cogumi.core.formatting import one_line
from cogumi.core.run_directory import write_json
from cogumi.merge.adapter_files import Adapter, find_adapter, read_json, resolve_adapter
from cogumi.merge.bases import resolve_base
from cogumi.merge.export import check_gguf
from cogumi.merge.foreign_adapters import as_installed
from cogumi.merge.logits import (
    PROMPT,
    LogitCheck,
    NotCompared,
    Reference,
    compare_directory,
    loader_of,
    prompt_tokens,
    record_directory,
    rms,
    run_model,
    tokenizer_of,
    trained_tokens,
)
from cogumi.merge.merge_manifest import MANIFEST_NAME, check_merged, hash_adapter
from cogumi.merge.witness import Answer, check_answers, check_witness, read_answers
from cogumi.patches.trl_internals import load_gguf

CERTIFICATE_NAME = "cogumi-certificate.json"
MARKS = {True: "pass", False: "FAIL", None: "not known"}
# Of the adapter's movement that a quantized GGUF file makes at least. Of SmolLM2-135M in 4 bits the right one made 0.97, and
# that of the base alone 0.30.
KEPT_BY_GGUF = 0.5


@dataclass(frozen=True)
class Step:
    """One comparison of the chain. passed: None where it could not be made, and figure says why."""

    name: str
    passed: bool | None
    figure: str

    def __str__(self) -> str:
        return f"{MARKS[self.passed]}  {self.name}: {self.figure}"


@dataclass(frozen=True)
class Certificate:
    """Chain of comparisons from the trained model to what is served.

    subjects: BLAKE3 of each file that it is about, by role and name. prompts: where the tokens come from. file: where it was
    written, or None where a comparison failed.
    """

    steps: tuple[Step, ...]
    subjects: dict[str, dict[str, str]]
    base: str
    prompts: str
    file: Path | None = None

    @property
    def passed(self) -> bool:
        return all(step.passed is not False for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        made = {name: version(name) for name in ("cogumi", "torch", "transformers", "peft")}
        created = datetime.now(UTC).isoformat(timespec="seconds")
        rest = {key: value for key, value in asdict(self).items() if key != "file"}
        return {"format": 1, "created": created, "versions": made, "passed": self.passed, **rest}

    def __str__(self) -> str:
        end = f"written to {self.file}" if self.file else "no certificate was written"
        return "\n".join([*map(str, self.steps), f"on {self.prompts}; {end}"])


def certify(
    adapter: Path, merged: Path, gguf: Path | None = None, prompts: Path | None = None, base: str | None = None
) -> Certificate:
    """Compare an adapter's model with its merge and its GGUF file, and write `cogumi-certificate.json` into the merged directory.

    Args:
        adapter: PEFT's directory, or one around it, such as a run's.
        merged: The merged directory.
        gguf: A GGUF file of it, or an export's directory.
        prompts: JSON lines {"prompt": text or messages, "answer": text}, whose texts are run. By default a built-in text is.
        base: The full-precision base, by default the one that the adapter records.

    Raises:
        UsageError: One of them cannot be read, or they do not fit together.
    """
    answers = [] if prompts is None else read_answers(prompts, key="--prompts")
    if not list(merged.glob("*.safetensors")):
        raise UsageError("there is no merged model there", key="--merged", place=merged, fix="name a merged directory")
    if gguf is not None:
        gguf = find_gguf(gguf)
    manifest = read_json(merged / MANIFEST_NAME) if (merged / MANIFEST_NAME).is_file() else {}
    source = resolve_adapter(find_adapter(adapter))
    full_base = resolve_base(source, base, None, manifest.get("base_mode", "full"))
    part = as_installed(source, full_base, manifest.get("expert_layout"))
    subjects = {
        "adapter": hash_adapter(source.path),
        "merged": {file.name: blake3_file(file) for file in sorted(merged.glob("*.safetensors"))},
    }
    steps = [check_files(merged, manifest, subjects["adapter"])]
    pair, reference = "trained model, merged model", None
    try:
        witness = check_witness(part, full_base, merged)
        missing = "no record of its logits is beside the adapter"
        steps.append(Step(pair, witness.passed, str(witness)) if witness else Step(pair, None, missing))
    except NotCompared as error:
        steps.append(Step(pair, None, str(error)))
    try:
        pair = "adapter on its base, merged model"
        reference, check = compare_pair(part, full_base.path, merged, answers)
        steps.append(Step(pair, check.passed, str(check)))
        if answers:
            pair = "the owner's answers, merged model"
            answer_check = check_answers(answers, [part.directory], full_base.path, merged)
            steps.append(Step(pair, answer_check.passed, str(answer_check)))
    except NotCompared as error:
        steps.append(Step(pair, None, str(error)))
    if gguf is not None:
        subjects["gguf"] = {gguf.name: blake3_file(gguf)}
        steps += check_export(gguf, merged, reference)
    kind = f"{len(answers)} prompts of {prompts.name}" if prompts else "a built-in text"
    certificate = Certificate(tuple(steps), subjects, full_base.name, kind)
    if not certificate.passed:
        (merged / CERTIFICATE_NAME).unlink(missing_ok=True)  # an earlier one, which no longer holds
    else:
        certificate = replace(certificate, file=merged / CERTIFICATE_NAME)
        write_json(merged / CERTIFICATE_NAME, certificate.as_dict())
    return certificate


def compare_pair(adapter: Adapter, base: Path, merged: Path, answers: Sequence[Answer]) -> tuple[Reference, LogitCheck]:
    """Compare a merged directory with base + adapter on the prompts, or else on the built-in text. Raises NotCompared."""
    from transformers import AutoConfig

    loader = loader_of([adapter.directory], merged)
    tokenizer, config = tokenizer_of(merged), AutoConfig.from_pretrained(merged).get_text_config()
    if answers and tokenizer is None:
        raise UsageError("the merged model has no tokenizer to read prompts with", key="--prompts", fix="leave it out")
    text = "".join(answer.text(tokenizer) for answer in answers)
    tokens = prompt_tokens(tokenizer, config, trained_tokens([adapter.directory]), text=text or PROMPT)
    reference = record_directory([(adapter.directory, 1.0)], base, merged, tokens, loader)
    return reference, compare_directory(reference, merged, loader)


def find_gguf(path: Path) -> Path:
    """Return a GGUF file, or the only one of a directory. Raises UsageError."""
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(files) != 1 or not files[0].is_file():
        state = f"holds {'several GGUF files' if files else 'no GGUF file'}" if path.is_dir() else "is not there"
        raise UsageError(f"{path} {state}", key="--gguf", fix="name a file")
    return files[0]


def check_files(merged: Path, manifest: dict[str, Any], digests: dict[str, str]) -> Step:
    """Check a merged directory by its manifest, which has to name the adapter with these digests alone."""
    name, made_of = "adapter's file, merged files", manifest.get("adapters", [])
    if not manifest:
        return Step(name, None, f"there is no {MANIFEST_NAME}: cogumi did not merge it")
    if len(made_of) > 1 or made_of[0]["weight"] != 1:
        return Step(name, False, f"it is a weighted sum of {len(made_of)} adapters")
    if made_of[0]["blake3"] != digests:
        return Step(name, False, f"{merged} was merged from another adapter: {made_of[0]['path']}")
    try:
        report = check_merged(merged, progress=False)
    except MergeError as error:
        return Step(name, False, one_line(error))
    again = report.missing or f"{report.elements:,} computed elements are base + adapter"
    return Step(name, True, f"{report.files} files are what the manifest says; {again}")


def check_export(gguf: Path, merged: Path, reference: Reference | None) -> list[Step]:
    """Compare a GGUF file's tensors with the merged model's, and what they compute in transformers with the recorded logits."""
    names = "merged model, GGUF tensors", "merged model, GGUF logits"
    try:
        steps = [Step(names[0], True, str(check_gguf(gguf, merged, tokenizer_of(merged))))]
    except MergeError as error:
        return [Step(names[0], False, one_line(error))]
    if reference is None:
        return [*steps, Step(names[1], None, "the logits of adapter and base could not be recorded")]
    try:
        model = load_gguf(gguf, torch.float32)
    except ValueError as error:
        return [*steps, Step(names[1], None, f"transformers does not run it: {one_line(error)}")]
    logits = run_model(model, reference.input_ids)
    followed = reference.followed(logits)
    figure = f"it goes {followed:.1%} of the adapter's way, {rms(reference.live, logits):.3g} rms from adapter and base"
    return [*steps, Step(names[1], followed >= KEPT_BY_GGUF, f"{figure}; required: {KEPT_BY_GGUF:.0%}")]
