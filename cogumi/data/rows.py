"""Rows that make no example: why, how many, and the first of them."""

from typing import Any

from cogumi.data.examples import Dropped

EXCERPT = 80


class BadRow(Exception):
    """Why a row makes no example, in words that follow a number ("3 null"); `excerpt` where it says more than the row."""

    def __init__(self, reason: str, excerpt: str | None = None):
        super().__init__(reason)
        self.reason, self.excerpt = reason, excerpt


def drop(dropped: dict[str, Dropped], reason: str, row: int, value: Any) -> None:
    """Count row number `row`, which holds `value`; rows come in their order."""
    if reason in dropped:
        dropped[reason] += Dropped(1, row, "")
    else:
        dropped[reason] = Dropped(1, row, excerpt_of(value))


def excerpt_of(value: Any) -> str:
    """The start of a value on one line, in at most 80 characters."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text[: 4 * EXCERPT].split())
    return text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"


def decoded(value: Any) -> Any:
    """Bytes as text, everything else as it is. Raises BadRow for null and for bytes that are no UTF-8."""
    if value is None:
        raise BadRow("null")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise BadRow("not UTF-8") from None
    return value
