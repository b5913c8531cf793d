"""The schema of a run: one YAML with `model / lora / data / train / cogumi`, checked before anything is loaded or written.

`lora:` is peft's LoraConfig and `train:` is TRL's config for the method (SFTConfig, DPOConfig, GRPOConfig), both bound to
the installed libraries' signatures. Values come from the file, then from the environment (`COGUMI_TRAIN__MAX_STEPS=5`),
then from the call or the command line.
"""

import os
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from cogumi.config import binding
from cogumi.config.presets import PRESETS, REMOVED
from cogumi.config.source import SECTIONS, Config, Origins, not_a_section, parse_scalar, read_source, set_value
from cogumi.core.errors import TRAINING_PACKAGES, require_extra
from cogumi.core.redact import REDACTED, SECRETS, redact_text

ENVIRONMENT_PREFIX = "COGUMI_"
TRL_CONFIGS = {"sft": "SFTConfig", "dpo": "DPOConfig", "gspo": "GRPOConfig"}
# Keys of the `cogumi:` section for gspo only; the key of `data.fim:` for every format.
GSPO_ONLY = (
    *("rewards", "environment", "tools", "episode_seconds"),
    *("docs_per_step", "prompts_per_step", "behaviour_logps", "fp32_lm_head"),
    *("sampler_weights", "sampler_correction"),
)
FIM_ALWAYS = "seed"
TASK_PACKAGES = ("reasoning_gym", "verifiers")


class Section(BaseModel):
    """A section of the YAML: unknown keys are errors, and keys are documented by their docstrings."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def path_text(place: Any) -> Any:
    return str(Path(str(place))) if place is not None and "://" not in str(place) else place


# Expands ~, as transformers does in its output directory.
IN_HOME = BeforeValidator(lambda place: os.path.expanduser(place) if isinstance(place, str | Path) else place)


class ModelSection(Section):
    """The section `model:`."""

    name: Annotated[str, IN_HOME]
    """A directory, a hub id, or `cogumi:small-base` (the small model of Python code that comes with the package)."""
    revision: str | None = None
    """Hub revision; a commit hash makes the run repeatable."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype the base is loaded in. `auto`: bfloat16 on a GPU that has it, float32 elsewhere."""
    attn_implementation: str | None = None
    """As in transformers: sdpa, eager, flash_attention_2, ...; chosen by the machine and the model when unset."""
    quantization_config: dict[str, Any] | None = None
    """transformers' BitsAndBytesConfig. `load_in_4bit: true` alone is QLoRA: nf4 with double quantization, in `dtype`."""
    adapter: Annotated[str | None, BeforeValidator(path_text), IN_HOME] = None
    """The adapter to start from, whose `lora:` section holds: a directory such as runs/sft/adapter, `user/repo` or
    `user/repo@revision` on the hub, `hf://user/repo/folder`, `s3://bucket/run`, or a mirror, whose newest checkpoint is taken."""
    _fetched: dict[str, str] = PrivateAttr(default_factory=dict)  # `methods/adapter_source.py`

    @property
    def adapter_dir(self) -> Path | None:
        """The directory of `adapter`, once it is here."""
        place = self._fetched.get("directory", self.adapter)
        return None if place is None else Path(place)


Format = Literal["fim", "chat", "prompt_completion", "text", "preference"]


class FimConfig(Section):
    """How rows become fill-in-the-middle examples."""

    model_config = ConfigDict(frozen=True)

    fim_rate: float = Field(default=1.0, ge=0, le=1)
    """Share of rows turned into FIM examples; the others stay left-to-right text, all of it learned."""
    spm_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of FIM examples in suffix-prefix-middle order. Only families trained on both orders use it."""
    middle_chars: tuple[int, int] = (8, 128)
    """Shortest and longest middle in characters; the length is drawn uniformly, then the position."""
    max_length: int = Field(default=512, ge=1)
    """Budget in tokens for a whole example, control and end tokens included."""
    seed: int = Field(default=0, ge=0)
    """With the row's index it decides order, length and position of the cut."""
    overlong: Literal["drop", "trim"] = "drop"
    """Examples over the budget: drop them, or trim the prefix's start and the suffix's end (plain rows are dropped)."""

    @model_validator(mode="after")
    def _check_middle(self) -> "FimConfig":
        low, high = self.middle_chars
        if not 1 <= low <= high:
            raise ValueError(f"middle_chars: [{low}, {high}] must be 1 <= shortest <= longest")
        return self


def package_of(source: str | None) -> str:
    """Return the package of tasks that a data source names, as in `reasoning_gym:chain_sum`; "" if it names none."""
    package, colon, _ = (source or "").partition(":")
    return package if colon and package in TASK_PACKAGES else ""


class MixEntry(Section):
    """One source of a mixture; what is not given here is as in `data:`."""

    source: str
    revision: str | None = None
    split: str | None = None
    subset: str | None = None
    format: Format | None = None
    columns: dict[str, str] | None = None
    column: str | None = None
    options: dict[str, Any] = {}
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the examples is this over the sum of all weights."""


class DataSection(Section):
    """The section `data:`."""

    source: str | None = None
    """A parquet, JSON-lines, CSV or text file, a directory of shards, a glob, a hub id (`org/name`), or a sample made of the
    standard library: `cogumi:stdlib` (its functions), `cogumi:stdlib-chat`, `-chat-noisy`, `-tasks`, `-pairs` (renamings);
    `reasoning_gym:TASK` or `verifiers:ENVIRONMENT`, whose rewards have these names (docs/rewards.md)."""
    options: dict[str, Any] = {}
    """Arguments of the task: of `reasoning_gym:` size, seed (0 by default) and its own; of `verifiers:` the environment's."""
    mix: list[MixEntry] = []
    """Several sources instead of one, by weight: as many examples as there are until one is used up, none twice."""
    revision: str | None = None
    """Of a hub id; a commit hash makes the run repeatable."""
    split: str | None = None
    """Of a hub id (`train`, or the only one, by default), or of a directory laid out like one."""
    subset: str | None = None
    """Of a hub id: the configuration, where it has several."""
    column: str = "source"
    """The column that holds the code."""
    columns: dict[str, str] = {}
    """{field: column}, where the file calls them otherwise: prompt, completion, chosen, rejected, messages, prefix, ..."""
    format: Format = "fim"
    """What a row is: code, a chat, a prompt and its completion, a document, or a prompt with a better and a worse answer."""
    fim: FimConfig = FimConfig()
    max_rows: int | None = Field(default=None, gt=0)
    """Train on this many rows, drawn with `fim.seed`; all by default."""
    fraction: float = Field(default=1.0, gt=0, le=1)
    """Train on this share of the rows, drawn with `fim.seed`."""
    eval_rows: int | None = Field(default=None, ge=0)
    """Rows held out of training: their loss is measured, and the first are the prompts of samples.jsonl. One row in fifty by
    default, at most 64; 0: none."""
    eval_source: str | None = None
    """A file, or a glob, that is held out instead of rows of the source: all of it, or `eval_rows`. Questions in it are not
    trained on."""
    deduplicate: bool = False
    """Train on the first of equal rows only. They are counted in any case."""
    bad_rows: Literal["drop", "fail"] = "drop"
    """Rows that make no example for what they hold (null, not UTF-8, ...): leave them out and say so, or refuse the run."""
    overlong: Literal["drop", "truncate"] = "drop"
    """Examples longer than `train.max_length`, in every format but fim, which has `fim.overlong`. gspo: prompts that leave
    `train.max_completion_length` no room in the context; `truncate` cuts the beginning of text, and messages are dropped."""


def on_or_off(value: Any) -> Any:
    """YAML 1.1 reads a bare `on` or `off` as a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def number_or_all(value: Any) -> Any:
    if value != "all" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("a whole number above 0, or all")
    return value


class Thresholds(Section):
    """The limits of flags that a run may move. The others are constants beside their rules, in cogumi/health."""

    model_config = ConfigDict(frozen=True)

    grad_norm_high: float = Field(default=10.0, gt=0)
    """sft, dpo: yellow where the median gradient norm is above; red above ten times it."""
    rl_grad_norm_high: float = Field(default=2.0, gt=0)
    """gspo: likewise. Red above fifty times it: the norm is before clipping, and losses differ in scale."""
    zero_variance: float = Field(default=0.8, gt=0, le=1)
    """gspo: red above this share of groups in which all rewards are the same; yellow above three quarters of it."""
    truncated_red: float = Field(default=0.8, gt=0, le=1)
    """gspo: red above this share of completions that were cut at their longest; yellow above 0.3, and 1 raises neither."""
    kl_red: float = Field(default=1.0, gt=0)
    """gspo: red above this KL (nats per token) between the policy and the one that wrote the completions; yellow above a
    tenth of it."""


class CogumiSection(Section):
    """The section `cogumi:`."""

    method: Literal["sft", "dpo", "gspo"]
    tuning: Literal["lora", "full"] = "lora"
    """lora: an adapter on the full-precision base (QLoRA: `model.quantization_config`). full: every weight, where it fits."""
    loraplus_ratio: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """LoRA+: B learns so many times as fast as A, whose rate is `train.learning_rate`. 16 is usual."""
    backend: Literal["auto", "unsloth", "trl"] = "auto"
    """Whose model and trainer: unsloth's, or transformers' and TRL's. auto: unsloth where it is installed, with a GPU, for the
    families that it has kernels for."""
    processes: Annotated[int | Literal["all"], BeforeValidator(number_or_all)] = 1
    """How many GPUs of this machine train, each with a process; all: those that are there. A step keeps its examples."""
    sharding: Literal["none", "fsdp2"] = "none"
    """With several processes. none: each has the whole model (DDP). fsdp2: each has a share of it (FSDP2)."""

    run_dir: Annotated[Path | None, IN_HOME] = None
    """Where the run is written; `runs/<name of the YAML>` by default."""
    rewards: list[str | dict[str, Any]] = ["edit_similarity"]
    """gspo: what scores a completion: names, or `{name: overlong, weight: 0.5, buffer: 64}` with arguments of the function.
    docs/rewards.md lists them; your own is `file.py:function`."""
    environment: str | None = None
    """gspo: what the policy acts in, `file.py:Class` or `calculator`, `code_completion` or `repository`, which
    come with the package. Its own reward is added to `rewards`, which then may be empty and is by default."""
    tools: list[str] = []
    """gspo: functions that the policy may call, each as `file.py:function`. With an environment they are added to its own."""
    episode_seconds: float | None = Field(default=None, gt=0)
    """gspo: seconds from the beginning of a rollout after which no environment answers. Turns are limited by
    `train.max_tool_calling_iterations`, and the tokens of a transcript by `train.max_completion_length`."""
    docs_per_step: int | None = Field(default=None, gt=0)
    """gspo: completions per optimizer step. Batch and accumulation follow from it exactly, or the run is refused."""
    prompts_per_step: int | None = Field(default=None, gt=0)
    """gspo: the same in prompts, each with `train.num_generations` completions."""
    examples_per_step: int | None = Field(default=None, gt=0)
    """sft, dpo: examples (dpo: pairs) per step of all processes. Micro-batch and accumulation follow from the memory."""
    behaviour_logps: Literal["trainer", "rollout"] = "trainer"
    """gspo: whose log-probabilities the ratio is taken against: the trainer's own, computed again, or the sampler's."""
    sampler_weights: Literal["merged", "adapter"] = "merged"
    """gspo with vLLM and LoRA: what is given to the sampler: base and adapter merged, rounded to its dtype, or the adapter
    alone, which is exact and samples more slowly (docs/rollouts.md)."""
    sampler_correction: Literal["tis", "icepop", "mis", "none"] | None = None
    """gspo with vLLM: what is done about the difference between its log-probabilities and the trainer's (docs/rollouts.md);
    null is tis where a rollout serves several steps, else TRL's own, mis."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts at which a completion ends, besides the end of sequence: in rollouts and in samples."""
    fp32_lm_head: bool = False
    """gspo: multiply hidden states and LM head in float32, in the trainer and in the sampler."""
    thinking: bool | None = None
    """Render, sample and grade with the model's thinking, or without; null: as the chat template and the data have it."""
    resume: Literal["auto", "never"] = "auto"
    """auto: a run directory that holds this run, unfinished, resumes from its last good checkpoint. never: it is refused."""
    on_full: Literal["continue", "pause", "stop"] = "continue"
    """When a checkpoint does not fit on the disk: train on without it, wait for space, or end the run. At the end of a run the
    adapter and the merged model wait for space, too, with pause."""
    on_hung: Literal["continue", "stop"] = "continue"
    """When nothing goes on for far longer than usual, in a step or a stage without steps, and the stacks were written to
    run.log: wait on, or end the run, which can be resumed."""
    restarts: int = Field(default=0, ge=0)
    """Number of times that the run starts again by itself, from its last good checkpoint, after SIGKILL (as for a lack of
    memory) or an error that another try may not meet. It then trains in a child process."""
    sanity: int | None = Field(default=None, gt=0)
    """Train this many steps of the run, answer "safe to scale: yes, no or not shown", and stop with a checkpoint to resume."""
    on_red: Literal["warn", "pause", "stop"] = "warn"
    """When a flag turns red: say so, wait with a checkpoint until PAUSED is removed, or end the run with a checkpoint."""
    flags: Thresholds = Thresholds()
    """From where on some flags are yellow or red; the other limits are fixed."""
    mirror: Annotated[str | None, IN_HOME] = None
    """Where the run and its checkpoints are copied to: a directory, an fsspec URL such as s3://bucket/run, or
    hf://user/repository. A machine without the run continues it from there."""
    price_per_hour: float | None = Field(default=None, gt=0)
    """What an hour of this machine costs, in dollars: the run then says what it has cost and what it will."""
    max_hours: float | None = Field(default=None, gt=0)
    """The run ends with a checkpoint after so many hours, earlier parts included, in whatever stage it is. With more it
    resumes from there."""
    max_cost: float | None = Field(default=None, gt=0)
    """The same in dollars of `price_per_hour`."""
    samples_every: int | None = Field(default=None, ge=0)
    """Complete the prompts of samples.jsonl every N steps, plus before and after training; 0: before and after only. By default
    at each tenth of a long run, as long as it takes at most 2 % of the time."""
    preflight: Annotated[Literal["auto", "on", "off"], BeforeValidator(on_or_off)] = "auto"
    """Forecast the memory first, and refuse a run that cannot fit. auto: where there is a GPU."""
    compile: Annotated[Literal["auto", "off", "layers"], BeforeValidator(on_or_off)] = "auto"
    """layers: torch.compile, layer by layer, from the first step. auto: on a GPU, in long runs where that was tried."""
    merge: bool = True
    """Merge the adapter into the full-precision base at the end, and check the merged model against the live one."""
    merge_base: Annotated[str | None, IN_HOME] = None
    """The full-precision model to merge into, a directory or hub id, where `model.name` is quantized on disk. By default
    it is found by the name of the quantized one."""
    merge_dtype: Literal["auto", "base", "float32"] = "auto"
    """Dtype of the merged model. auto: the base's; float32 where that loses over 2 % of the update or `model.dtype` is it."""
    forgetting: bool = False
    """At the end let the base and the result answer sixty instructions that come with the package, and report what broke."""
    compare_with: Annotated[str | None, IN_HOME] = None
    """Compare the result with another model on at most 200 held-out rows: `base` (`model.name`), a path or a hub id. Worse on
    what the method trains for (likelihood, preference margin, rewards) fails a check."""
    gate: Literal["better", "not_worse"] | None = None
    """What that comparison has to show for `cogumi push` and for a run that starts from this one."""
    from_failed: bool = False
    """Start from a part of a run whose checks failed or whose gate is not met (`model.name`, `model.adapter`)."""
    base_mode: Literal["full", "dequant"] = "full"
    """dequant: merge into the base's own 4-bit weights, read as floats, and not into the model they were quantized from."""

    @property
    def process_count(self) -> int:
        """`processes` as a number; 1 for `all`, which is resolved before a step is split."""
        return self.processes if isinstance(self.processes, int) else 1


# Keys of `train:` that a run refuses: {key: (reason, fix)}.
SHARDING_CONFLICT = "would share the model out beside cogumi.sharding", "set cogumi.sharding: fsdp2"
REFUSED_TRAIN_KEYS = {
    "output_dir": ("is the run's own", "set cogumi.run_dir"),
    "resume_from_checkpoint": ("is the run's own: the last good checkpoint in its directory", "set cogumi.run_dir"),
    # Under ZeRO-3 all processes make each model together, and in a run the first one looks ahead alone.
    "deepspeed": ("is not for a run: checkpoints of DeepSpeed are not verified", "set cogumi.sharding: fsdp2"),
    "fsdp": SHARDING_CONFLICT,
    "fsdp_config": SHARDING_CONFLICT,
    # Where several processes see one example, what each counts is not to be summed.
    "parallelism_config": ("is not for a run: processes share examples, and never a part of one", "drop it"),
}


class RunConfig(Section):
    """The configuration of a run."""

    model: ModelSection
    lora: dict[str, Any] = {}
    data: DataSection
    train: dict[str, Any] = {}
    cogumi: CogumiSection

    @property
    def run_dir(self) -> Path:
        assert self.cogumi.run_dir is not None  # load_config fills it in
        return self.cogumi.run_dir

    @property
    def merge_dtype(self) -> str:
        """The dtype as `merge_adapter` takes it."""
        if self.cogumi.merge_dtype == "base":
            return "keep"
        return "float32" if self.model.dtype == "float32" else self.cogumi.merge_dtype

    @property
    def saves_by_time(self) -> bool:
        """Tell whether `train:` leaves open when checkpoints are saved."""
        decides = ("save_steps", "save_strategy", "load_best_model_at_end")
        return not any(self.train.get(key) for key in decides)

    def setting(self, key: str) -> Any:
        """Return a key of `train:`, or TRL's default of it."""
        value = self.train.get(key)
        return binding.defaults_in_source(TRL_CONFIGS[self.cogumi.method])[key] if value is None else value


def load_config(config: Config, **overrides: Any) -> RunConfig:
    """Return the checked configuration of one run, from a path, a template's name or a mapping.

    `overrides` are dotted names with `__` for the dot (`train__max_steps=5`). Raises UsageError with the key, where it was
    set, and the nearest valid name.
    """
    return read_config(config, overrides)[0]


def read_config(config: Config, overrides: Mapping[str, Any]) -> tuple[RunConfig, Origins]:
    """Check a configuration as far as possible without importing trl and peft; return it with the origins of its values."""
    for module in TRAINING_PACKAGES:
        require_extra(module, "train")
    values, origins = read_source(config)
    for name, text in sorted(os.environ.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            set_value(values, origins, key, parse_scalar(text), f"environment {name}")
    for name, value in overrides.items():
        key = name.replace("__", ".")
        set_value(values, origins, key, value, f"override {key}")

    binding.reject_unknown(values, SECTIONS, "", origins)
    fill_for_environment(values)
    for required in ("model", "data", "cogumi"):
        if values.get(required) is None:
            raise origins.error(f"section `{required}:` is missing", required, "it is a mapping of keys")
        binding.bind_mapping(values[required], required, origins)
    for optional in ("lora", "train"):
        values[optional] = binding.bind_mapping(values.get(optional), optional, origins)
    for new, old in binding.RENAMED_TRAIN_KEYS.items():
        if new in values["train"]:
            if values["train"].get(old) is not None:
                raise origins.error(
                    f"train.{new} and train.{old} are one setting", f"train.{new}", "drop one of the two"
                )
            values["train"][old] = values["train"].pop(new)
            origins[f"train.{old}"] = origins.get(f"train.{new}", origins.label)

    data, mix = values["data"], values["data"].get("mix")
    if data.get("source") is None and not mix and not values["cogumi"].get("environment"):
        raise origins.error("`data.source` is missing (or data.mix, a list of sources)", "data.source", at="data")
    for key in ("source", "revision", "split", "subset", "options") if mix else ():
        if data.get(key) not in (None, {}):
            ignored = f"data.{key} beside data.mix would be ignored"
            raise origins.error(ignored, f"data.{key}", "give it in an entry of the mix")
    run = validate_sections(values, origins)
    if run.data.eval_source is not None and run.data.eval_rows == 0:
        ignored = "data.eval_source beside data.eval_rows: 0 would be ignored"
        raise origins.error(ignored, "data.eval_source", "drop one of the two")
    entries: list[DataSection | MixEntry] = [run.data, *run.data.mix]
    if any(entry.options and not package_of(entry.source) for entry in entries):
        raise origins.error(
            "data.options is for reasoning_gym: and verifiers:, not for this source", "data.options", "drop it"
        )
    refuse_ignored(run, origins)
    if run.cogumi.gate is not None and run.cogumi.compare_with is None:
        message = "cogumi.gate without cogumi.compare_with has nothing to go by"
        raise origins.error(message, "cogumi.gate", "set cogumi.compare_with: base as well")
    if run.cogumi.sharding != "none" and run.cogumi.processes == 1:
        message = f"cogumi.sharding: {run.cogumi.sharding} shares the model among several processes, and there is one"
        raise origins.error(message, "cogumi.sharding", "set cogumi.processes as well, or drop it")
    for name, (why, fix) in REFUSED_TRAIN_KEYS.items():
        if name in run.train:
            raise origins.error(f"train.{name} {why}", f"train.{name}", fix)
    named = {"model.name": run.model.name, "model.adapter": run.model.adapter, "data.source": run.data.source}
    for key, value in named.items():
        if value is not None and redact_text(value) != value:  # an adapter's record of its base could not leave it out
            raise origins.error(f"{key} holds an access token", key, "put that into the environment (HF_TOKEN)")
    if run.cogumi.run_dir is None:
        run.cogumi.run_dir = Path("runs", "run" if isinstance(config, Mapping) else Path(origins.label).stem)
    bind_sections(run, origins)
    refuse_other_step(run, origins)
    refuse_unknown_names(run, origins)
    return run, origins


def bind_sections(run: RunConfig, origins: Origins) -> None:
    """Bind `train:`, `lora:` and the quantization to the libraries' classes."""
    run.train = binding.bind_values(run.train, "train", TRL_CONFIGS[run.cogumi.method], origins)
    run.lora = binding.bind_values(run.lora, "lora", "LoraConfig", origins)
    binding.refuse_out_of_range("train", run.train, origins)
    binding.refuse_out_of_range("lora", run.lora, origins)
    for key, reason in binding.FIXED_LORA_KEYS.items():
        if key in run.lora:
            raise origins.error(f"lora.{key} is not the run's to set: {reason}", f"lora.{key}", "drop it")
    init = str(run.lora.get("init_lora_weights", "")).lower()
    if init in binding.PREPARED_INITS:
        needs = f"{init} needs a pass over the data before training, which a run does not make"
        raise origins.error(needs, "lora.init_lora_weights", "drop it")
    if run.model.quantization_config is not None:
        section = "model.quantization_config"
        bound = binding.bind_values(run.model.quantization_config, section, "BitsAndBytesConfig", origins)
        run.model.quantization_config = bound
        chosen = [key for key in ("load_in_4bit", "load_in_8bit") if bound.get(key)]
        if len(chosen) != 1:
            problem = "are both true; drop one" if chosen else "are both false; set one, or drop the section"
            raise origins.error(f"{section}: load_in_4bit and load_in_8bit {problem}", section)
        for key in bound:
            if key.startswith(binding.KEYS_OF_OTHER_BITS[chosen[0]]):
                ignored = f"{section}.{key} would be ignored with {chosen[0]}: true"
                raise origins.error(ignored, f"{section}.{key}", "drop it")


def dump_config(run: RunConfig) -> str:
    """Return the resolved configuration as YAML, with secrets replaced by `<redacted>`."""
    return yaml.safe_dump(redact(run.model_dump(mode="json")), sort_keys=False, allow_unicode=True)


def redact(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [redact(v) for v in value]
    if value and key.lower().endswith(SECRETS):
        return REDACTED
    return redact_text(value) if isinstance(value, str) else value


def refuse_ignored(run: RunConfig, origins: Origins) -> None:
    """Raise UsageError for keys that this method or data format ignores."""
    formats = {entry.format or run.data.format for entry in run.data.mix} or {run.data.format}
    ignored = (
        {"data.overlong": "messages are not cut; a prompt that is too long is left out"} if formats == {"chat"} else {}
    )
    if run.cogumi.method != "gspo":
        ignored = {f"cogumi.{key}": "it is for cogumi.method: gspo" for key in GSPO_ONLY}
    else:
        ignored["cogumi.examples_per_step"] = "for cogumi.method: gspo it is cogumi.docs_per_step"
    if formats == {"fim"}:
        ignored["cogumi.thinking"] = "data.format: fim has no chat template in it"
        ignored["data.overlong"] = "for data.format: fim it is data.fim.overlong"
    if formats == {"text"}:
        ignored["cogumi.thinking"] = "data.format: text has no chat template in it"
        ignored["data.overlong"] = "a document that is too long is cut into pieces, all of which are learned"
    if "fim" not in formats:
        keys = [f"data.fim.{key}" for key in FimConfig.model_fields if key != FIM_ALWAYS]
        ignored |= dict.fromkeys(["data.column", *keys], "it is for data.format: fim")
    for key, why in ignored.items():
        *way, name = key.split(".")
        section = reduce(getattr, way, run)
        if getattr(section, name) != type(section).model_fields[name].default:
            raise origins.error(f"{key} would be ignored: {why}", key, "drop it")


def refuse_other_step(run: RunConfig, origins: Origins) -> None:
    """Raise UsageError for keys of `train:` that decide the same as `cogumi.examples_per_step`, or do not divide it."""
    step, batch = run.cogumi.examples_per_step, run.train.get("per_device_train_batch_size")
    for key in ("gradient_accumulation_steps", "auto_find_batch_size") if step else ():
        if run.train.get(key):
            message = f"train.{key} and cogumi.examples_per_step decide the same"
            raise origins.error(message, f"train.{key}", "drop one of the two")
    count, size = run.cogumi.process_count, batch or 1
    if step and (step % size or step % count):
        per_process = f" for each of {count} processes" if count > 1 else ""
        unit = f"micro-batches of {batch}" if batch else "examples"
        message = f"cogumi.examples_per_step {step} is no whole number of {unit}{per_process}"
        drop = ", or drop train.per_device_train_batch_size" if step % count == 0 else ""
        fix = f"set {step + size * count - step % (size * count)}{drop}"
        raise origins.error(message, "cogumi.examples_per_step", fix)


def refuse_unknown_names(run: RunConfig, origins: Origins) -> None:
    """Raise UsageError for an unknown loss of GSPO's family, or an unknown tracker."""
    losses = [run.train.get("loss_type", "gspo")] if run.cogumi.method == "gspo" else []
    report_to = run.train.get("report_to") or []
    reporters = [report_to] if isinstance(report_to, str) else report_to
    for key, named, known in (
        ("train.loss_type", losses, list(dict.fromkeys([*PRESETS, *binding.losses_in_source()])) if losses else []),
        ("train.report_to", reporters, [*binding.reporters_in_source(), "all", "none"]),
    ):
        for name in named:
            if name not in known:
                near = binding.nearest(name, known)
                hint = f"did you mean {near}?" if near else f"one of {', '.join(known)}"
                if name in REMOVED:
                    hint = f"write {REMOVED[name]}"
                raise origins.error(f"{name!r} is not known", key, hint)


def fill_for_environment(values: dict[str, Any]) -> None:
    """Fill in defaults of a run with an environment, tools or tasks of a package: prompts, and their own reward and rows."""
    options, data = values.get("cogumi"), values.get("data")
    if isinstance(options, dict) and isinstance(data, dict) and (name := package_of(str(data.get("source")))):
        data.setdefault("format", "prompt_completion")
        if options.get("method") == "gspo":
            options.setdefault("rewards", [name])
    if not isinstance(options, dict) or not (options.get("environment") or options.get("tools")):
        return
    if options.get("environment"):
        if options.get("method") == "gspo":
            options.setdefault("rewards", [])
        data = values["data"] = {} if data is None else data
    if isinstance(data, dict):
        data.setdefault("format", "prompt_completion")


def validate_sections(values: dict[str, Any], origins: Origins) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        path = [str(part) for part in problem["loc"]]
        dotted = ".".join(path)
        # The place of the key, or of the nearest section above it.
        above = (".".join(path[:length]) for length in range(len(path), 0, -1))
        at = next((key for key in above if key in origins), "")
        if problem["type"] == "extra_forbidden":
            section: Any = RunConfig
            for part in path[:-1]:
                section = get_args(section)[0] if part.isdigit() else section.model_fields[part].annotation
            binding.reject_unknown([path[-1]], section.model_fields, ".".join(path[:-1]) + ".", origins)
        message = f"{dotted} = {problem['input']!r}: {problem['msg']}"
        if problem["type"] == "missing":
            message = f"`{dotted}` is missing"
        elif problem["type"] in ("model_type", "dict_type"):
            message = not_a_section(dotted, problem["input"])
        raise origins.error(message, dotted, at=at) from None
