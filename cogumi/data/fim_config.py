"""`data.fim:`, the section of a config that says how code is cut. To read a config takes neither numpy nor polars."""

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
