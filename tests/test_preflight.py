"""`cogumi preflight`: what it says of real configs, what is red and what makes it green, and what it leaves alone."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from transformers import AutoConfig, AutoTokenizer, GptOssConfig, LlamaConfig

import cogumi
from cogumi.config.schema import RunConfig, load_config
from cogumi.core.errors import UsageError
from cogumi.core.formatting import pip_command
from cogumi.forecast import memory_forecast
from cogumi.forecast.data_sample import describe_data, sample_data
from cogumi.forecast.disk_forecast import forecast_disks
from cogumi.forecast.memory_forecast import (
    MemoryForecast,
    Target,
    autocast_dtype,
    find_target,
    layer_period,
    smaller_rollout,
    weights_dtype,
)
from cogumi.forecast.preflight_report import Line, PreflightReport
from cogumi.forecast.run_forecast import (
    Pace,
    TimeForecast,
    describe_stack,
    describe_time,
    forecast_run,
    forecast_time,
    steps_of,
)
from cogumi.forecast.training_step import StepShape, planned_trainer, run_step
from cogumi.methods.examples import prepare_examples
from cogumi.methods.preparation import load_run_tokenizer
from cogumi.models.base import meta_model
from cogumi.models.loading import load_tokenizer, read_base, use_chat_template
from cogumi.runs.entry import train_run
from cogumi.stack import lanes
from cogumi.stack.gpus import CARDS, find_card, parse_card

CommandLine = Callable[..., tuple[int, str, str]]
COUNTS = ("max_steps", "logging_steps")
SMOKE = Path(__file__).parents[1] / "configs" / "smoke"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A model of 1.6 billion parameters and four layers, of which there are a config.json and a tokenizer."""
    path = tmp_path_factory.mktemp("wide")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(path)
    LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=4,
        vocab_size=90_000, architectures=["LlamaForCausalLM"], dtype="bfloat16", max_position_embeddings=65536,
    ).save_pretrained(path)  # fmt: skip
    return path


@pytest.fixture(scope="module", autouse=True)
def each_step_once() -> Iterator[None]:
    """What a step takes does not depend on the price or on how many steps follow: one of the same run is run once."""
    collected: dict[str, MemoryForecast] = {}
    original = memory_forecast.forecast_step

    def step_on(run: RunConfig, config: Any, work: StepShape, target: Target) -> MemoryForecast:
        asked = run.model_dump()
        for section, names in {"cogumi": ("max_cost", "price_per_hour", "sanity", "run_dir"), "train": COUNTS}.items():
            for name in names:
                asked[section].pop(name, None)
        key = repr((asked, config.to_dict(), work, target))
        if key not in collected:
            collected[key] = original(run, config, work, target)
        return collected[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory_forecast, "forecast_step", step_on)
        yield


def preflight(config: Any, card: str | None = None, train: Any = None, **overrides: Any) -> PreflightReport:
    """As the command line does it, in this process; tests/test_preflight_before.py has it apart."""
    return forecast_run(load_config(config, **overrides), card, train, apart=False)


def config_of(base: Path, tmp_path: Path, **sections: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": {"name": str(base)},
        "lora": {"r": 16, "target_modules": ["q_proj", "down_proj"]},
        "data": {"source": "cogumi:stdlib", "eval_rows": 8, "max_rows": 100, "fim": {"max_length": 512}},
        "train": {"max_steps": 10, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "cogumi": {"method": "sft", "run_dir": str(tmp_path / "run")},
    }
    kept = {name: section for name, section in found.items() if sections.get(name, {}) is not None}
    return {name: {**section, **sections.get(name, {})} for name, section in kept.items()}


def line_of(report: PreflightReport, stage: str) -> Line:
    return next(line for line in report.lines if line.stage == stage)


OTHERS = ["gspo", "qwen3-4b-sft", "llama-3.1-8b-sft", "qwen2.5-coder-7b-gspo-fim"]


@pytest.mark.parametrize(
    "name",
    [
        "sft",
        "llama-3.1-8b-dpo",
        pytest.param("gpt-oss-20b-gspo-fim", marks=pytest.mark.slow("a rollout and a step of experts, fourteen times")),
        *(pytest.param(other, marks=pytest.mark.sweep) for other in OTHERS),
    ],
)
def test_the_small_configs_fit_this_machine(name: str, tmp_path: Path) -> None:
    # Of their own these go on from an SFT run.
    words = {"model__name": "cogumi:small-base"} if name == "gspo" else {}
    if name == "llama-3.1-8b-dpo":
        words["model__name"] = str(with_chat_template(tmp_path / "model"))
    report = preflight(SMOKE / f"{name}.yaml", cogumi__run_dir=str(tmp_path / "run"), **words)
    assert report.fits, str(report)
    stages = [line.stage for line in report.lines if line.stage != "rollout"]
    assert stages[:5] == ["stack", "backend", "data", "memory", "time"]
    assert (report.lines[3].stage == "rollout") is ("gspo" in name)
    assert report.figures["memory"]["peak"] == sum(report.figures["memory"]["breakdown"].values())
    assert not (tmp_path / "run").exists()


def with_chat_template(path: Path) -> Path:
    """The small base as an SFT run on chats leaves it."""
    shutil.copytree(read_base("cogumi:small-base").name, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    use_chat_template(tokenizer, "cogumi:tulu")
    tokenizer.save_pretrained(path)
    return path


def test_a_config_json_alone_is_planned_for(wide: Path, tmp_path: Path) -> None:
    base = tmp_path / "alone"
    base.mkdir()
    shutil.copy(wide / "config.json", base)
    report = preflight(config_of(base, tmp_path, train={"max_length": 512}), "H200")
    data, memory, time = (line_of(report, stage) for stage in ("data", "memory", "time"))
    assert data.state == "unknown"
    assert data.figure == f"not read: {base} has no tokenizer. examples of 512 tokens are assumed"
    assert memory.state == "green"
    assert "4 x 512 tokens" in memory.figure
    assert "train.optim: adamw_torch_fused" in memory.figure
    assert time.figure.startswith("10 steps, about 40,960 tokens: ")
    report = preflight(config_of(base, tmp_path, train={"max_steps": -1, "max_length": 512}), "H200")
    assert line_of(report, "time").figure.startswith("how many steps are in the data is not known")


@pytest.mark.parametrize("of_a_card", [{"tf32": True}, {"bf16": True}, {"fp16": True}], ids=str)
def test_what_only_a_card_computes_in_is_planned_where_none_is_seen(
    of_a_card: dict[str, bool], wide: Path, tmp_path: Path
) -> None:
    """The process that forecasts sees no GPU, and transformers refuses these there; a run on a card sets TF32 by itself."""
    report = preflight(config_of(wide, tmp_path, train={"max_length": 512} | of_a_card), "H200")
    assert line_of(report, "memory").state == "green"
    assert line_of(report, "disk").state == "green"


def test_rows_that_make_no_example_are_named(wide: Path, tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    bad = {"messages": [{"role": "user", "content": "hi"}]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(each) + "\n" for each in [good] * 18 + [bad] * 2))
    data = {"source": str(rows), "format": "chat", "eval_rows": 2, "fim": None}
    config = config_of(wide, tmp_path, data=data, train={"chat_template_path": "cogumi:tulu", "max_length": 64})
    del config["data"]["fim"]
    run = load_config(config)
    report_line = describe_data(sample_data(run, load_run_tokenizer(run, read_base(str(wide)))), run)
    assert report_line.state == "yellow"
    assert "18 of the first 20 make one" in report_line.figure
    assert "left out: 2 " in report_line.figure
    assert report_line.fix == "`cogumi preview` shows the first of each kind"


def test_what_does_not_fit_is_red_and_the_fix_fits(wide: Path, tmp_path: Path) -> None:
    config = config_of(wide, tmp_path, train={"per_device_train_batch_size": 512, "max_length": 1024})
    red = preflight(config, "T4")
    assert line_of(red, "memory").state == "red"
    assert not red.fits
    rows, steps = re.fullmatch(
        r"set train.per_device_train_batch_size: (\d+) and train.gradient_accumulation_steps: (\d+); the same step in .*",
        line_of(red, "memory").fix,
    ).groups()  # type: ignore[union-attr]
    assert int(rows) * int(steps) == 512 * 2
    config["train"] |= {"per_device_train_batch_size": int(rows), "gradient_accumulation_steps": int(steps)}
    report = preflight(config, "T4")
    assert report.fits, str(report)


def test_more_memory_is_needed_for_more(wide: Path, tmp_path: Path) -> None:
    """Each of these moves the peak the way it must."""

    target = find_target("H200")

    def peak(rows: int = 4, padded: bool = True, **sections: Any) -> int:
        run = load_config(config_of(wide, tmp_path, **sections))
        run.train["gradient_checkpointing"] = sections.get("train", {}).get("gradient_checkpointing", True)
        dtype, autocast = weights_dtype(target.machine, "auto"), autocast_dtype(run, target.machine)
        trainer = planned_trainer(run, AutoConfig.from_pretrained(wide), dtype, 2)
        work = StepShape("sft", rows, 512, padded=padded)
        return MemoryForecast(run_step(trainer, work, autocast, on_card=True), work, target.free).peak

    base = peak()
    assert peak(padded=False) < base
    assert peak(train={"gradient_checkpointing": False}) > base
    assert peak(rows=8) > base
    assert peak(lora={"r": 256}) > base
    assert peak(model={"quantization_config": {"load_in_4bit": True}}) < base
    assert peak(cogumi={"tuning": "full"}, lora=None) > 2 * base


def test_the_disk_of_a_run_that_trains_every_weight_holds_every_weight(wide: Path, tmp_path: Path) -> None:
    """1.6 billion weights: a checkpoint has them in float32 with two moments each, and there is no adapter."""
    weights = sum(parameter.numel() for parameter in meta_model(AutoConfig.from_pretrained(wide)).parameters())
    lora = forecast_disks(load_config(config_of(wide, tmp_path)))
    whole = forecast_disks(load_config(config_of(wide, tmp_path, cogumi={"tuning": "full", "merge": False}, lora=None)))
    assert whole.checkpoint == pytest.approx(12 * weights, rel=0.01)
    assert lora.checkpoint < whole.checkpoint / 50
    kinds = [need.what for disk in whole.disks for need in disk.needs]
    assert ("adapter" in kinds, "merged model" in kinds) == (False, True)


def test_what_is_not_known_is_not_called_fitting() -> None:
    known, unknown = Line("data", "1,000 rows"), Line("memory", "the step cannot be run", "unknown")
    assert str(PreflightReport("CPU", (known,), {})).endswith("nothing is red: it fits")
    output = str(PreflightReport("CPU", (known, unknown), {}))
    assert output.endswith("nothing is red: it fits, as far as is known; not known: memory")
    red = PreflightReport("CPU", (known, unknown, Line("disk", "full", "red")), {})
    assert str(red).endswith("1 of 3 lines are red")
    assert not red.fits


@pytest.mark.parametrize(
    ("time", "state", "fix", "said"),
    [
        (
            (1000, 10_000, 3600.0, 10),
            "red",
            "set train.max_steps: 500, or raise cogumi.max_cost",
            "$2.00 at $2 an hour",
        ),
        ((400, 10_000, 1440.0, 10), "green", "", "by 10 steps made here"),
        ((8, 200, 16.0, 8), "green", "", "by 8 steps made here"),
        ((400, 10_000, None), "unknown", "--probe makes ten steps and says", "nor what cogumi.max_cost allows"),
        ((1, 10, 2.0, 1), "green", "", "less than a cent at $2 an hour (by 1 step made here)"),
        ((9, 90, 18.0, 9), "green", "", "training, $0.01 at $2 an hour"),  # one cent is not less than one
        # A check of fewer is refused.
        ((16, 200, 3600.0, 10, 1000), "red", "set cogumi.sanity: 8, or raise cogumi.max_cost", "of 1,000"),
        ((14, 200, 3600.0, 10, 1000), "red", "raise cogumi.max_cost", "of 1,000"),
    ],
)
def test_a_budget_that_ends_the_run_is_red(time: tuple[Any, ...], state: str, fix: str, said: str) -> None:
    run = load_config(SMOKE / "sft.yaml", cogumi__price_per_hour=2.0, cogumi__max_cost=1.0)
    report_line = describe_time(TimeForecast(*time), run, find_target(None))
    assert (report_line.state, report_line.fix) == (state, fix)
    assert said in report_line.figure
    if state == "unknown":  # ten steps made here say nothing of another card
        assert describe_time(TimeForecast(*time), run, find_target("T4")).fix == ""


@pytest.mark.slow("several forecasts; another one is in the first tier")
def test_a_probe_makes_ten_steps_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = preflight(SMOKE / "sft.yaml", train=train_run)
    assert "by 10 steps made here" in line_of(report, "time").figure
    assert report.figures["time"]["measured"] == 10
    assert report.figures["time"]["seconds"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_probe_here_is_not_of_another_card() -> None:
    with pytest.raises(UsageError, match="ten steps made here say nothing of another card"):
        cogumi.preflight(SMOKE / "sft.yaml", card="t4", probe=True)


def test_a_training_takes_as_many_times_its_step_as_it_has_steps_and_the_pass_before_them() -> None:
    run = load_config(SMOKE / "sft.yaml", train__max_steps=100)
    sample, work = sample_data(run, load_tokenizer(read_base(run.model.name))), StepShape("sft", 16, 128)
    how_long = forecast_time(run, work, sample, Pace(2.0, measured=10))
    assert (how_long.steps, how_long.seconds, how_long.measured) == (100, 200.0, 10)
    assert forecast_time(run, work, sample, Pace(2.0, before=7.0)).seconds == 207.0


def test_the_stack_line_is_the_doctors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_stack().state == "green", "the test lane is installed as pinned"
    there = lanes.installed_versions()
    monkeypatch.setattr(lanes, "installed_versions", lambda: {**there, "trl": "0.1"})
    report_line = describe_stack()
    assert report_line.state == "yellow"
    assert "trl 0.1 (pinned " in report_line.figure
    assert report_line.fix.startswith(pip_command("install"))


def test_time_and_money_are_those_of_the_steps_that_a_sanity_check_makes(wide: Path, tmp_path: Path) -> None:
    def planned(**ours: Any) -> PreflightReport:
        priced = {"price_per_hour": 3600.0, **ours}  # a dollar a second
        return preflight(
            config_of(wide, tmp_path, cogumi=priced, train={"max_steps": 1000, "logging_steps": 1}), "H100 SXM"
        )

    whole, checked = planned(), planned(sanity=100)
    seconds = [report.figures["time"]["seconds"] for report in (whole, checked)]
    assert seconds[1] == pytest.approx(seconds[0] / 10)
    assert line_of(whole, "time").figure.startswith("1,000 steps, about ")
    report_line = line_of(checked, "time")
    assert report_line.figure.startswith("100 steps of 1,000, after which cogumi.sanity ends the run, about ")
    assert f"${seconds[1]:,.2f} at $3600 an hour" in report_line.figure
    assert planned(sanity=2000).figures["time"] == whole.figures["time"]  # never more than there are
    red = line_of(planned(sanity=100, max_cost=seconds[1] / 2), "time")
    assert red.state == "red"
    fewer = re.fullmatch(r"set cogumi.sanity: (\d+), or raise cogumi.max_cost", red.fix)
    assert int(fewer[1]) == pytest.approx(50, abs=1)
    few = line_of(planned(sanity=100, max_cost=seconds[1] / 25), "time")
    assert (few.state, few.fix) == ("red", "raise cogumi.max_cost")  # four steps are no check


def test_a_cost_that_is_not_known_is_said_with_the_key_that_sets_its_price(wide: Path, tmp_path: Path) -> None:
    message = "cost: not known (set cogumi.price_per_hour)"
    config = config_of(wide, tmp_path, train={"max_steps": 20})
    assert message in line_of(preflight(config, "H100 SXM"), "time").figure
    priced = config | {"cogumi": config["cogumi"] | {"price_per_hour": 2.0}}
    assert message not in line_of(preflight(priced, "H100 SXM"), "time").figure
    for given, expected in ((config, True), (priced, False)):
        forecast_line = describe_time(TimeForecast(20, 1000, None), load_config(given), find_target(None))
        assert (message in forecast_line.figure) is expected


@pytest.mark.slow("several forecasts; another one is in the first tier")
def test_the_time_of_dpo_has_its_reference_in_it(wide: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"question {n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(tmp_path / "pairs.jsonl"), "format": "preference", "fim": None}

    def time_of(**train: Any) -> dict[str, Any]:
        config = config_of(wide, tmp_path, data=data, train=train, cogumi={"method": "dpo"})
        del config["data"]["fim"]
        report = preflight(config, "H100 SXM")
        assert line_of(report, "memory").state == "green"
        return report.figures["time"]

    assert time_of()["seconds"] == pytest.approx(time_of(precompute_ref_log_probs=True)["seconds"])


def test_the_sample_is_what_the_run_prepares(tmp_path: Path) -> None:
    """Its share of usable rows and its lengths, beside those of all rows as the run itself prepares them."""
    run = load_config(SMOKE / "sft.yaml", cogumi__run_dir=str(tmp_path))
    run.data.max_rows = None
    tokenizer = load_tokenizer(read_base(run.model.name))
    sample, whole = sample_data(run, tokenizer), prepare_examples(run, tokenizer).train
    assert sample.trained == pytest.approx(len(whole.dataset), rel=0.1)
    assert sample.longest <= whole.lengths.quantile(1.0)
    assert sample.mean == pytest.approx(whole.lengths.mean, rel=0.25)


def test_what_makes_no_example_is_not_counted_as_trained(tmp_path: Path) -> None:
    """Every second text is too short to be cut into prefix, middle and suffix, in a tenth of the rows that are held."""
    texts = ["x", "def add(a, b):\n    total = a + b\n    print(total)\n    return total\n" * 3] * 1000
    pl.DataFrame({"source": texts}).write_parquet(tmp_path / "texts.parquet")
    run = load_config(SMOKE / "sft.yaml", data__source=str(tmp_path / "texts.parquet"), data__eval_rows=100)
    run.data.max_rows = None
    sample = sample_data(run, load_tokenizer(read_base(run.model.name)))
    assert (sample.rows, sample.looked_at, sample.examples) == (2000, 1000, 500)
    assert sample.trained == 950


def test_steps_are_those_of_the_epochs() -> None:
    run = load_config(SMOKE / "sft.yaml", train__max_steps=-1, train__num_train_epochs=2)
    tokenizer_free = type("Found", (), {"trained": 1000, "examples_per_row": None})()
    assert steps_of(run, StepShape("sft", 4, 128, micro_batches=8), tokenizer_free) == 63  # 2 x 1000 / 32
    run = load_config(SMOKE / "gspo.yaml", train__max_steps=-1, train__num_train_epochs=1)
    group = run.train["num_generations"]
    assert steps_of(run, StepShape("gspo", 4, 64, 64, micro_batches=2), tokenizer_free) == -(-1000 * group // 8)


def test_cards_are_found_by_what_people_say_and_by_torchs_name() -> None:
    assert parse_card("h100 sxm") is find_card("NVIDIA H100 80GB HBM3")
    assert parse_card("NVIDIA GeForce RTX 4090").name == "RTX 4090"
    assert parse_card("T4").peak is None
    with pytest.raises(UsageError, match=r"may be H100 PCIe or H100 NVL or H100 SXM; say which"):
        parse_card("h100")
    with pytest.raises(UsageError, match=r"card 'hal 9000' is not known; there are B200, "):
        parse_card("hal 9000")
    assert all(parse_card(card.name) is card for card in CARDS)
    assert find_card("NVIDIA RTX 2000") is None
    assert find_target("T4").machine.bf16 is False


def test_a_rollout_that_does_not_fit_is_made_smaller_under_the_key_that_says_its_size() -> None:
    planned = load_config(SMOKE / "gspo.yaml", cogumi__docs_per_step=16)
    work = StepShape("gspo", 4, 64, 64, rollout=64, micro_batches=4)
    assert smaller_rollout(planned, work, 16) == "train.generation_batch_size: 32"
    planned.cogumi.docs_per_step = None
    assert smaller_rollout(planned, work, 16) == "train.steps_per_generation: 8"
    less = smaller_rollout(planned, replace(work, rollout=16), 16)
    assert less == "train.steps_per_generation: 4"  # never less than a step


def test_layers_of_two_kinds_are_taken_in_pairs() -> None:
    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    assert layer_period(GptOssConfig(num_hidden_layers=8, num_local_experts=4, head_dim=16, **small)) == 2
    assert layer_period(LlamaConfig(num_hidden_layers=8, **small)) == 1
    uneven = ["full_attention"] + ["sliding_attention"] * 7
    assert (
        layer_period(GptOssConfig(num_hidden_layers=8, num_local_experts=4, head_dim=16, layer_types=uneven, **small))
        is None
    )


# ------------------------------------------------------------------------------------------------------------ the command


def test_the_command_prints_json_and_its_status_is_whether_it_fits(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config_of(wide, tmp_path)))
    monkeypatch.chdir(tmp_path)
    status, output, error = command_line(
        "preflight", "run.yaml", "--card", "h100 sxm", "--json", "cogumi.price_per_hour=2"
    )
    assert status == 0, error
    parsed = json.loads(output)
    assert parsed["fits"] is True
    assert {each["stage"] for each in parsed["lines"]} >= {"data", "memory", "time", "disk"}
    larger = ("train.per_device_train_batch_size=512", "train.max_length=1024")
    status, output, _ = command_line("preflight", "run.yaml", "--card", "t4", *larger)
    assert status == 1
    assert " RED  memory" in output
    assert "-> set " in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


@pytest.mark.slow("several forecasts; another one is in the first tier")
def test_what_no_change_can_mend_is_said(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    config = config_of(wide, tmp_path, cogumi={"max_cost": 1.0, "price_per_hour": 2.0}, train={"vllm_mode": "colocate"})
    config["cogumi"]["method"], config["cogumi"]["rewards"] = "gspo", ["parses"]
    config["train"] |= {"use_vllm": True, "vllm_gpu_memory_utilization": 0.99, "num_generations": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    status, output, _ = command_line("preflight", "run.yaml", "--card", "t4")
    assert status == 1, output
    assert "vLLM 14.9 GiB" in output  # 0.99 of 15, as vLLM rounds it
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_setting_that_peft_refuses_is_a_mistake(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^lora: `layers_pattern` cannot be used when"):
        preflight(
            config_of(wide, tmp_path, lora={"target_modules": "all-linear", "layers_pattern": "layers"}), "A100 80GB"
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gone.yaml",), "gone.yaml"),
        (("run.yaml", "--card", "hal"), "card 'hal' is not known"),
        (("run.yaml", "train.max_stepz=5"), "max_steps"),
        (("run.yaml", "--card", "t4", "--probe"), "--card and --probe"),
        (("run.yaml", "cogumi.max_cost=5"), "set cogumi.price_per_hour as well"),
        (("strange.yaml",), "model type `martian`"),
        (("run.yaml", "data.source=nothing.parquet"), "nothing.parquet"),
    ],
)
def test_a_mistake_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, wide: Path, monkeypatch: pytest.MonkeyPatch,
    command_line: CommandLine,
) -> None:  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config_of(wide, tmp_path)))
    strange = tmp_path / "martian"
    strange.mkdir()
    (strange / "config.json").write_text('{"model_type": "martian"}')
    (tmp_path / "strange.yaml").write_text(yaml.safe_dump(config_of(strange, tmp_path)))
    monkeypatch.chdir(tmp_path)
    status, _, error = command_line("preflight", *words)
    lines = [each for each in error.splitlines() if each.startswith("cogumi:")]
    assert status == 2
    assert len(lines) == 1
    assert said in lines[0]
