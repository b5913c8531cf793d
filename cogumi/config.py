"""One YAML, one run. `model / lora / data / train / cogumi`, checked key by key before anything is loaded or written.

`lora:` is peft's LoraConfig and `train:` is TRL's config for the method (SFTConfig, GRPOConfig): both are bound to the
installed libraries' own signatures, so an unknown key or a wrong type is one line that names file, line and key. Values
come from the file, then from the environment (`COGUMI_TRAIN__MAX_STEPS=5`), then from the call or the command line.
"""

import dataclasses
import difflib
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from cogumi.data.fim import FimConfig
from cogumi.errors import UsageError

SECTIONS = ("model", "lora", "data", "train", "cogumi")
ENVIRONMENT_PREFIX = "COGUMI_"
# Keys of the `cogumi:` section that mean nothing to supervised fine-tuning.
GSPO_ONLY = ("rewards", "docs_per_step", "prompts_per_step", "behaviour_logps", "fp32_lm_head")
SECRETS = ("hub_token", "push_to_hub_token", "api_key", "password", "secret")

# A dtype by name, which is what a written config has; code may pass torch's own object.
PLAIN_NAME = BeforeValidator(lambda dtype: str(dtype).removeprefix("torch."))
# Of BitsAndBytesConfig: the arguments whose default does not say what they are.
QUANTIZATION_TYPES = {
    "llm_int8_skip_modules": list[str],
    "bnb_4bit_compute_dtype": Annotated[Literal["float32", "bfloat16", "float16"], PLAIN_NAME],
    "bnb_4bit_quant_type": Literal["nf4", "fp4"],
    "bnb_4bit_quant_storage": Annotated[
        Literal["uint8", "int8", "float16", "bfloat16", "float32", "float64"], PLAIN_NAME
    ],
}
OF_OTHER_BITS = {"load_in_4bit": ("llm_int8_threshold", "llm_int8_has"), "load_in_8bit": ("bnb_4bit",)}

# Where each value came from, for messages: dotted key -> "file.yaml:12", "environment COGUMI_X", "override".
Origins = dict[str, str]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ModelSection(Section):
    name: str
    """A directory, a hub id, or `cogumi:small-base` (a small model trained here on the standard library's sources)."""
    revision: str | None = None
    """Hub revision; a commit hash makes the run repeatable."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype the base is loaded in. `auto`: bfloat16 on a GPU that has it, float32 elsewhere."""
    quantization_config: dict[str, Any] | None = None
    """transformers' BitsAndBytesConfig. `load_in_4bit: true` alone is QLoRA: nf4, quantized twice, computing in `dtype`."""


class DataSection(Section):
    source: str
    """A parquet or JSONL file, a directory of shards, or `cogumi:stdlib` (the standard library's own functions)."""
    column: str = "source"
    """The column that holds the code."""
    format: Literal["fim"] = "fim"
    fim: FimConfig = FimConfig()
    max_rows: int | None = Field(default=None, gt=0)
    """Train on this many rows, drawn with `fim.seed`; all by default."""
    eval_rows: int = Field(default=0, ge=0)
    """Rows held out of training: evaluated when `train.eval_strategy` asks for it, and the prompts of samples.jsonl."""


class CogumiSection(Section):
    method: Literal["sft", "gspo"]
    run_dir: Path | None = None
    """Where the run is written; `runs/<name of the YAML>` by default."""
    rewards: list[str] = ["edit_similarity"]
    """gspo: what scores a completion (`exact_match`, `edit_similarity`, `parses`); weights are `train.reward_weights`."""
    docs_per_step: int | None = Field(default=None, gt=0)
    """gspo: completions per optimizer step. Batch and accumulation follow from it exactly, or the run is refused."""
    prompts_per_step: int | None = Field(default=None, gt=0)
    """gspo: the same in prompts, each with `train.num_generations` completions."""
    behaviour_logps: Literal["trainer", "rollout"] = "trainer"
    """gspo: whose log-probabilities the ratio is taken against: the trainer's own, computed again, or the sampler's."""
    fp32_lm_head: bool = False
    """gspo: multiply hidden states and LM head in float32, in the trainer and in the sampler."""
    resume: Literal["auto", "never"] = "auto"
    """auto: a run directory that holds this run, unfinished, goes on from its last good checkpoint. never: it is refused."""
    on_full: Literal["continue", "pause", "stop"] = "continue"
    """When a checkpoint does not fit on the disk: train on without it, wait for space, or end the run."""
    on_hung: Literal["continue", "stop"] = "continue"
    """When no step ends for far longer than usual, and the stacks were written to run.log: wait on, or end the run."""
    fallback: Path | None = None
    """A directory on another disk, for checkpoints that do not fit."""
    mirror: str | None = None
    """Where checkpoints are copied to: a directory, an fsspec URL such as s3://bucket/run, or hf://user/repository."""
    compile: Annotated[
        Literal["auto", "off", "layers"], BeforeValidator(lambda value: "off" if value is False else value)
    ] = "auto"  # YAML 1.1 reads a bare `off` as False
    """torch.compile, layer by layer. auto: where a few measured steps show that the rest of the run repays it."""
    merge: bool = True
    """Merge the adapter into the full-precision base at the end, and check the merged model against the live one."""


class RunConfig(Section):
    model: ModelSection
    lora: dict[str, Any] = {}
    data: DataSection
    train: dict[str, Any] = {}
    cogumi: CogumiSection

    @property
    def run_dir(self) -> Path:
        assert self.cogumi.run_dir is not None  # load_config fills it in
        return self.cogumi.run_dir


def load_config(config: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> RunConfig:
    """The checked configuration of one run.

    `config` is a path or a mapping; `overrides` are dotted names with `__` for the dot (`train__max_steps=5`).
    Raises UsageError with one line that names the key, where it was set, and the nearest valid name.
    """
    values, origins, label = read_source(config)
    for name, text in sorted(os.environ.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            set_value(values, origins, key, parse_scalar(text), f"environment {name}")
    for name, value in overrides.items():
        key = name.replace("__", ".")
        set_value(values, origins, key, value, f"override {key}")

    reject_unknown(values, SECTIONS, "", origins, label)
    for required in ("model", "data", "cogumi"):
        if not isinstance(values.get(required), dict):
            raise UsageError(
                f"{origins.get(required, label)}: section `{required}:` is missing; it is a mapping of keys"
            )
    for optional in ("lora", "train"):
        values[optional] = bind_mapping(values.get(optional), optional, origins, label)

    run = validate_sections(values, origins, label)
    for key in GSPO_ONLY if run.cogumi.method != "gspo" else ():
        if getattr(run.cogumi, key) != CogumiSection.model_fields[key].default:
            place = origins.get(f"cogumi.{key}", label)
            raise UsageError(f"{place}: cogumi.{key} would be ignored: it is for cogumi.method: gspo; drop it")
    run.train = bind_signature(run.train, "train", trl_config_class(run.cogumi.method), "trl", origins, label)
    run.lora = bind_signature(run.lora, "lora", lora_config_class(), "peft", origins, label)
    if run.model.quantization_config is not None:
        run.model.quantization_config = bind_quantization(run.model.quantization_config, origins, label)
    if "output_dir" in run.train:
        raise UsageError(
            f"{origins.get('train.output_dir', label)}: train.output_dir is the run's own; set cogumi.run_dir"
        )
    if run.cogumi.run_dir is None:
        run.cogumi.run_dir = Path("runs") / (Path(label).stem if isinstance(config, (str, os.PathLike)) else "run")
    return run


def parse_overrides(words: Iterable[str]) -> dict[str, Any]:
    """Command-line words `train.max_steps=5` as the keyword overrides of `load_config`."""
    overrides = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageError(f"`{word}` is not an override; write key=value, such as train.max_steps=5")
        overrides[key.replace(".", "__")] = parse_scalar(text)
    return overrides


def dump_config(run: RunConfig) -> str:
    """The resolved configuration as YAML, secrets replaced by `<redacted>`."""
    return yaml.safe_dump(redact(run.model_dump(mode="json")), sort_keys=False, allow_unicode=True)


def redact(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [redact(v) for v in value]
    secret = key.lower().endswith(SECRETS) or (isinstance(value, str) and re.fullmatch(r"hf_\w{30,}", value))
    return "<redacted>" if secret and value else value


def trl_config_class(method: str) -> type:
    # Imported here: trl brings torch and transformers, and a missing file should not wait for them.
    import trl

    return {"sft": trl.SFTConfig, "gspo": trl.GRPOConfig}[method]


def lora_config_class() -> type:
    import peft

    return peft.LoraConfig


def read_source(config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], Origins, str]:
    if isinstance(config, Mapping):
        return copy_mapping(config), {}, "config"
    path = Path(config)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such config file{suggest_yaml(path)}") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a directory; name a YAML file in it{suggest_yaml(path / 'x.yaml')}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    try:
        node, values = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = " ".join((error.problem or error.context or "").split())
        raise UsageError(f"{path}:{line}: not valid YAML: {problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{path}:1: a config is a mapping with the sections {', '.join(SECTIONS)}")
    origins: Origins = {}
    record_lines(node, "", str(path), origins)
    return values, origins, str(path)


def record_lines(node: yaml.MappingNode, prefix: str, path: str, origins: Origins) -> None:
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        place = f"{path}:{key.start_mark.line + 1}"
        if dotted in origins:
            raise UsageError(f"{place}: `{dotted}` is set twice (first at {origins[dotted]})")
        origins[dotted] = place
        if isinstance(value, yaml.MappingNode):
            record_lines(value, f"{dotted}.", path, origins)


def suggest_yaml(path: Path) -> str:
    names = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1) or sorted(names)[:3]
    return (
        f"; did you mean {path.parent / near[0]}?"
        if len(near) == 1
        else f"; there is {', '.join(near)}"
        if near
        else ""
    )


def parse_scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # `name: [a` from a shell is a string; the type check has the last word


def copy_mapping(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {k: copy_mapping(v) if isinstance(v, Mapping) else v for k, v in mapping.items()}


def set_value(values: dict[str, Any], origins: Origins, key: str, value: Any, origin: str) -> None:
    section, *rest = key.split(".")
    if section not in SECTIONS or not rest or not all(rest):
        example = (origin.split()[0] == "environment" and "COGUMI_TRAIN__MAX_STEPS") or "train.max_steps"
        near = difflib.get_close_matches(section, SECTIONS, n=1) or ["train"]
        raise UsageError(f"{origin}: names no config key; sections are {', '.join(SECTIONS)}, as in {example}"
                         + (f" (did you mean {near[0]}?)" if section not in SECTIONS else ""))  # fmt: skip
    here = values
    for part in (section, *rest[:-1]):
        inner = here.setdefault(part, {})
        if inner is None:
            inner = here[part] = {}
        if not isinstance(inner, dict):
            raise UsageError(f"{origin}: `{part}` is set to {inner!r}, not to a mapping")
        here = inner
    here[rest[-1]] = value
    origins[key] = origin


def bind_mapping(value: Any, section: str, origins: Origins, label: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{origins.get(section, label)}: `{section}:` must be a mapping of keys, not {value!r}")
    return value


def reject_unknown(
    values: Iterable[str], known: Iterable[str], prefix: str, origins: Origins, label: str, where: str = ""
) -> None:
    known = list(known)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"valid: {', '.join(known[:12])}"
            raise UsageError(f"{origins.get(f'{prefix}{key}', label)}: unknown key `{prefix}{key}`{where}; {hint}")


def bind_signature(
    values: dict[str, Any], section: str, signature: type, library: str, origins: Origins, label: str
) -> dict[str, Any]:
    """The section's values, coerced to the types of a library's config dataclass."""
    hints = get_type_hints(signature)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(signature) if f.init}
    return bind_values(values, section, fields, f"{signature.__name__}, {library} {version(library)}", origins, label)


def bind_quantization(values: dict[str, Any], origins: Origins, label: str) -> dict[str, Any]:
    """`model.quantization_config:`, coerced to what the arguments of BitsAndBytesConfig are."""
    from transformers import BitsAndBytesConfig

    section = "model.quantization_config"
    arguments = inspect.signature(BitsAndBytesConfig).parameters.values()
    # It has no annotations: a default says its type, and what is None by default says it here, or is not checked.
    hints = {
        each.name: QUANTIZATION_TYPES.get(each.name, Any if each.default is None else type(each.default))
        for each in arguments
        if each.kind is not each.VAR_KEYWORD
    }
    bound = bind_values(
        values, section, hints, f"BitsAndBytesConfig, transformers {version('transformers')}", origins, label
    )
    chosen = [key for key in ("load_in_4bit", "load_in_8bit") if bound.get(key)]
    if len(chosen) != 1:
        what = "are both true; drop one" if chosen else "are both false; set one, or drop the section"
        raise UsageError(f"{origins.get(section, label)}: {section}: load_in_4bit and load_in_8bit {what}")
    for key in bound:
        if key.startswith(OF_OTHER_BITS[chosen[0]]):
            place = origins.get(f"{section}.{key}", label)
            raise UsageError(f"{place}: {section}.{key} would be ignored with {chosen[0]}: true; drop it")
    return bound


def bind_values(
    values: dict[str, Any], section: str, hints: Mapping[str, Any], owner: str, origins: Origins, label: str
) -> dict[str, Any]:
    reject_unknown(values, hints, f"{section}.", origins, label, f" ({owner})")
    bound = {}
    for key, value in values.items():
        try:
            if isinstance(value, bool) and hints[key] in (int, float):  # pydantic would read `yes` as 1
                raise UsageError(f"{origins.get(f'{section}.{key}', label)}: {section}.{key} = {value}: not a number")
            # Lax mode: YAML 1.1 reads `5e-7` as a string, which is a float to everybody else.
            bound[key] = TypeAdapter(hints[key], config=None).validate_python(value)
        except ValidationError as error:
            if value is None:  # not a value of this key: `train.beta=null` takes what the file says away
                continue
            wanted = (
                getattr(hints[key], "__name__", str(hints[key])) if isinstance(hints[key], type) else str(hints[key])
            )
            said = error.errors()[0]["msg"]
            if get_origin(hints[key]) is not Annotated:  # what those allow is in the message
                said += f" ({wanted})"
            place = origins.get(f"{section}.{key}", label)
            raise UsageError(f"{place}: {section}.{key} = {value!r}: {said}") from None
    return bound


def validate_sections(values: dict[str, Any], origins: Origins, label: str) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        path = [str(part) for part in problem["loc"]]
        dotted = ".".join(path)
        place = next((origins[k] for n in range(len(path), 0, -1) if (k := ".".join(path[:n])) in origins), label)
        if problem["type"] == "extra_forbidden":
            section: Any = RunConfig
            for part in path[:-1]:
                section = section.model_fields[part].annotation
            reject_unknown([path[-1]], section.model_fields, ".".join(path[:-1]) + ".", origins, label)
        if problem["type"] == "missing":
            raise UsageError(f"{place}: `{dotted}` is missing") from None
        raise UsageError(f"{place}: {dotted} = {problem['input']!r}: {problem['msg']}") from None
