"""Several processes: the settings that each trains with, and a preflight that says it is for one of them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate.utils import FullyShardedDataParallelPlugin
from builders import tiny_llama
from test_preflight import SMOKE, preflight

from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.methods.building import trl_arguments
from cogumi.methods.step_split import split_step
from cogumi.training.parallel import read_accelerate

CONFIG = Path(__file__).parents[1] / "configs" / "llama-3.1-8b-sft.yaml"


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_preflight_of_several_processes_is_of_one(sharding: str, tmp_path: Path) -> None:
    settings = {"cogumi__processes": 2, "cogumi__sharding": sharding, "cogumi__run_dir": str(tmp_path / "run")}
    report = preflight(SMOKE / "sft.yaml", "h100 sxm", **settings)
    lines = {line.stage: line for line in report.lines}
    assert lines["processes"].state == "unknown"
    assert "several processes are not forecast: the figures are for one of 2" in lines["processes"].figure
    # A process under FSDP2 holds a share of the model: what one alone would hold refuses nothing.
    assert lines["memory"].state == ("green" if sharding == "none" else "unknown")
    assert ("memory" in report.figures) == (sharding == "none")
    assert report.fits


def test_all_the_cards_of_another_machine_are_not_known() -> None:
    with pytest.raises(UsageError, match=r"--card names a card of another one; say how many, as in cogumi.processes=8"):
        preflight(CONFIG, "h100 sxm", cogumi__processes="all")


def test_eight_processes_share_the_step_of_the_config() -> None:
    run = load_config(CONFIG, cogumi__processes=8)
    own = split_step(run, 8)
    assert own.train["per_device_train_batch_size"] * own.train["gradient_accumulation_steps"] * 8 == 128


def test_settings_of_eight_processes_are_taken_by_trl_and_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of eight processes, beside the real signatures: no eight GPUs have run them."""
    own = split_step(
        load_config(CONFIG, cogumi__processes=8, cogumi__sharding="fsdp2", cogumi__run_dir=str(tmp_path)), 8
    )
    args = trl_arguments(own)
    assert isinstance(args, trl.SFTConfig)
    requests = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    requests["ddp_timeout"] = 7 * 24 * 3600
    assert {key: getattr(args, key) for key in requests} == requests
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        monkeypatch.delenv(name)
    for name, value in read_accelerate("fsdp2").items():
        monkeypatch.setenv(name, value)
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.cpu_ram_efficient_loading) == (2, True, True)
    assert "SHARDED_STATE_DICT" in str(plugin.state_dict_type)
    assert getattr(plugin.cpu_offload, "offload_params", False) is False
    plugin.set_mixed_precision("bf16")
    policy: Any = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)
    plugin.set_auto_wrap_policy(tiny_llama())
    assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
