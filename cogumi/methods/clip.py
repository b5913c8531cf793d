"""GSPO's clip against rounding: noise of the ratios, measured in the run, and an epsilon that follows from it."""

import logging
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from cogumi.config.schema import RunConfig
from cogumi.core.run_directory import DECISIONS, read_section, write_section
from cogumi.methods.auto_settings import SETTINGS, Choice
from cogumi.patches.trl_internals import TOKEN_LOGPS, logged_metrics, observe_rollouts
from cogumi.rl.guards import LARGEST_SEQUENCE_EPSILON, clips_sequences
from cogumi.rl.loss_check import read_trl_inputs, sequence_log_ratio
from cogumi.rl.watch import PREFIX, watch

log = logging.getLogger("cogumi")
NOISE, ROUNDING = "ratio_noise", f"{PREFIX}clipped_by_rounding"  # of decisions.json, and of the metrics
ROWS, PADDING = 32, 5  # completions of each process that are scored again; places that they move to the right
WIDTH = 4.0  # of the clip, in deviations of the noise (docs/gspo.md)


def settle_clip(run: RunConfig, trainer: Any) -> None:
    """At the first rollout that serves several steps, measure the noise of its ratios and set an epsilon that is left open."""
    config = trainer.model.config.get_text_config()
    if not clips_sequences(trainer.args) or not hasattr(config, "rope_parameters"):  # padding moves absolute positions
        return
    noise: dict[str, Any] = read_section(run.run_dir / DECISIONS, NOISE)  # of a run that is resumed

    def on_rollout(make: Any, inputs: Any) -> Any:
        rollout = make(inputs)
        if trainer.model.training and "old_per_token_logps" in rollout and (noise or trainer.state.global_step == 0):
            noise.update(noise or set_clip(run, trainer, rollout))
            logged_metrics(trainer, "train")[ROUNDING].append(noise["outside"])
        return rollout

    observe_rollouts(trainer, on_rollout)


@torch.no_grad()
def measure_log_ratios(trainer: Any, rollout: dict[str, Any]) -> Tensor:
    """Log-ratios (n,) of rows of a rollout, over all processes, scored again where other positions round differently."""
    step = -(-len(rollout["prompt_ids"]) // ROWS)
    part = {name: value[::step] for name, value in rollout.items() if isinstance(value, Tensor) and value.dim() > 0}
    inputs = (torch.cat([part[f"prompt_{key}"], part[f"completion_{key}"]], 1) for key in ("ids", "mask"))
    ids, attention = (torch.nn.functional.pad(each, (PADDING, 0)) for each in inputs)
    length, size = part["completion_ids"].size(1), trainer.args.per_device_train_batch_size
    new = getattr(trainer, TOKEN_LOGPS)(trainer.model, ids, attention, length, batch_size=size)[0]
    return Tensor.double(trainer.accelerator.gather(sequence_log_ratio(read_trl_inputs(trainer, part, new))))


def set_clip(run: RunConfig, trainer: Any, rollout: dict[str, Any]) -> dict[str, Any]:
    """Log the noise, and set an epsilon that follows from it where the config has none. Both are in decisions.json then."""
    log_ratios, low, high = measure_log_ratios(trainer, rollout), trainer.epsilon_low, trainer.epsilon_high
    ratios, sd = log_ratios.exp(), log_ratios.square().mean().sqrt().item()
    if choices := choose_clip(run, sd, low, high):
        log.info("chosen: %s", choices[0])
        low, high = (choice.value for choice in choices)
        trainer.args.epsilon, trainer.args.epsilon_high = trainer.epsilon_low, trainer.epsilon_high = low, high
        if (proof := watch(trainer).proof) is not None:  # made with the preset's
            proof.expected |= {"epsilon_low": low, "epsilon_high": high}
    tokens = rollout["completion_mask"].sum(1).double().mean().item()
    outside = (ratios.clamp(1 - low, 1 + high) != ratios).double().mean().item()
    noise = {"sd": sd, "tokens": tokens, "epsilon": low, "outside": outside}
    part = f"{outside:.0%} of {len(ratios)} completions of {tokens:.0f} tokens"
    advice = "; leave train.epsilon and epsilon_high out, and they follow the noise" if outside > 0.5 else ""
    said = f"noise of the ratios: sd {sd:.2g}; rounding puts {part} outside the clip of {low:g}/{high:g}{advice}"
    log.log(logging.WARNING if advice else logging.INFO, "%s", said)
    if trainer.accelerator.is_main_process:
        place = run.run_dir / DECISIONS
        write_section(place, SETTINGS, [*read_section(place, SETTINGS), *map(asdict, choices)])
        write_section(place, NOISE, noise)
    return noise


def choose_clip(run: RunConfig, sd: float, low: float, high: float) -> list[Choice]:
    """Widen the preset's clip (low, high) to WIDTH deviations of the noise where the config names no epsilon."""
    factor = min(WIDTH * sd / low, LARGEST_SEQUENCE_EPSILON / high)
    if any(run.train.get(key) is not None for key in ("epsilon", "epsilon_high")) or not factor > 1:
        return []
    values = {"train.epsilon": low * factor, "train.epsilon_high": high * factor}
    reason = f"{WIDTH:g} times the noise of the ratios, sd {sd:.2g}, by which {low:g}/{high:g} would clip at random"
    return [Choice(key, float(f"{value:.2g}"), reason) for key, value in values.items()]
