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


class Thresholds(BaseModel):
    """The limits of flags that a run may move. The others are constants beside their rules, in cogumi/health."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    grad_norm_high: float = Field(default=10.0, gt=0)
    """sft, dpo: yellow where the median gradient norm is above; red above ten times it."""
    rl_grad_norm_high: float = Field(default=1.0, gt=0)
    """gspo: likewise. Red above a hundred times it: the norm is before clipping, and losses differ in scale."""
    zero_variance: float = Field(default=0.8, gt=0, le=1)
    """gspo: red above this share of groups in which all rewards are the same; yellow above three quarters of it."""
    truncated_red: float = Field(default=0.8, gt=0, le=1)
    """gspo: red above this share of completions that were cut at their longest; yellow above 0.3, and 1 raises neither."""
    kl_red: float = Field(default=1.0, gt=0)
    """gspo: red above this KL (nats per token) between the policy and the one that wrote the completions; yellow above a
    tenth of it."""
    memory_red: float = Field(default=0.98, gt=0, le=1)
    """Red above this share of the accelerator's memory (without one: of the machine's); yellow above 0.92."""
