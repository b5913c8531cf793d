"""Sections below a section, which modules below the schema read: `data.fim` and `cogumi.flags`."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class FimConfig(BaseModel):
    """How rows become fill-in-the-middle examples."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

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


# ----------------------------------------------------------------------------------------------------------- thresholds


class Thresholds(BaseModel):
    """The numbers the flags are held to. Starting values are axolotl's training-stability page where it has one
    (gradient norms, groups without variance, truncation, entropy), and else what the suite of whole and broken runs
    in benchmarks/verdict.py separates."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    grad_norm_low: float = Field(default=0.1, ge=0)
    """sft, dpo: yellow where the median gradient norm (before clipping) is below; red below a hundredth of it."""
    grad_norm_high: float = Field(default=10.0, gt=0)
    """sft, dpo: yellow where the median gradient norm is above; red above ten times it."""
    rl_grad_norm_low: float = Field(default=0.001, ge=0)
    """gspo: as grad_norm_low."""
    rl_grad_norm_high: float = Field(default=1.0, gt=0)
    """gspo: as grad_norm_high. Red above a hundred times it: the norm is before clipping, and losses differ in scale."""
    trend_z: float = Field(default=3.0, gt=0)
    """Standard deviations from which a trend (Mann and Kendall's test) is more than noise."""
    loss_rise: float = Field(default=0.1, gt=0)
    """Red where the loss climbed by more than this share of its start (and five times its noise) and stays up there."""
    loss_fall: float = Field(default=0.03, ge=0)
    """sft: yellow where the loss fell by less than this share of its start in a hundred steps. 10 % is usual."""
    frequency_share: float = Field(default=0.93, gt=0)
    """sft: red where the loss rests above this share of the entropy of the learned tokens' frequencies."""
    knows_text: float = Field(default=0.5, ge=0)
    """sft: below this share of that entropy a model knows the text so well that it would use a prompt that belongs."""
    pair_gain: float = Field(default=0.02, ge=0)
    """sft: the share that completions are to be easier to predict from their own prompt than from another's."""
    noise_yellow: float = Field(default=0.12, gt=0)
    """sft: yellow where the loss scatters by more than this share of itself from step to step."""
    noise_red: float = Field(default=0.2, gt=0)
    """sft: red where it scatters by more than this, and an optimizer step has fewer than `few_examples`."""
    few_examples: int = Field(default=8, ge=0)
    """Examples per optimizer step below which scatter is the batch's fault."""
    masked_rows: float = Field(default=0.1, ge=0, le=1)
    """Red above this share of examples without one learned token; yellow above none."""
    cut_rows: float = Field(default=0.3, ge=0, le=1)
    """sft: red above this share of examples that are cut at train.max_length; yellow above a sixth of it."""
    data_wait_yellow: float = Field(default=0.2, gt=0, le=1)
    """Yellow where more than this share of the time is spent waiting for the next batch."""
    data_wait_red: float = Field(default=0.5, gt=0, le=1)
    """Red likewise."""
    slowdown_yellow: float = Field(default=2.0, gt=1)
    """Yellow where tokens per second fell to one part in this many of the run's own best stretch."""
    slowdown_red: float = Field(default=4.0, gt=1)
    """Red likewise."""
    memory_yellow: float = Field(default=0.92, gt=0, le=1)
    """Yellow above this share of the accelerator's memory (without one: of the machine's)."""
    memory_red: float = Field(default=0.98, gt=0, le=1)
    """Red likewise."""
    skipped_steps: float = Field(default=0.1, ge=0, le=1)
    """Red above this share of optimizer steps that fp16's loss scaling skipped; yellow above a fifth of it."""
    zero_variance: float = Field(default=0.8, gt=0, le=1)
    """gspo: red above this share of groups in which all rewards are the same; yellow above three quarters of it."""
    truncated_yellow: float = Field(default=0.3, gt=0, le=1)
    """gspo: yellow above this share of completions that were cut at their longest."""
    truncated_red: float = Field(default=0.8, gt=0, le=1)
    """gspo: red likewise."""
    entropy_low: float = Field(default=0.05, ge=0)
    """gspo: red where the entropy per token (nats) is below, and below `entropy_kept` of its start."""
    entropy_kept: float = Field(default=0.2, ge=0, le=1)
    """gspo: share of its start that the entropy is to keep; yellow at the double."""
    reward_fall: float = Field(default=0.25, gt=0)
    """gspo: red where the reward fell by more than this share of its start, beyond noise."""
    clipped_yellow: float = Field(default=0.95, gt=0, le=1)
    """gspo: yellow above this share of ratios outside the clip (sequence level: a few tenths are as they should be)."""
    clipped_red: float = Field(default=0.995, gt=0, le=1)
    """gspo: red likewise, averaged over the latest steps."""
    kl_yellow: float = Field(default=0.1, gt=0)
    """gspo: yellow above this KL (nats per token) between the policy and the one that wrote the completions."""
    kl_red: float = Field(default=1.0, gt=0)
    """gspo: red likewise."""
    reference_kl: float = Field(default=10.0, gt=0)
    """gspo with train.beta: red above this KL to the reference; yellow above a tenth of it."""
