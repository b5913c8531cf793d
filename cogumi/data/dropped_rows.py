"""Rows that make no example: why, how many, and the first of them."""

import json
from typing import Any

from cogumi.data.example_kinds import Dropped

EXCERPT = 80
SPOKEN = {"role", "content"}


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
    text = " ".join(in_words(value)[: 4 * EXCERPT].split())
    return text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"


def in_words(value: Any) -> str:
    """A value of a row for people: text as it stands, the fields of a row apart, messages by their roles, the rest as JSON."""
    if isinstance(value, str):
        return value or "(empty)"
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, tuple):
        return " | ".join(map(in_words, value))
    if isinstance(value, list) and value and all(isinstance(each, dict) and set(each) == SPOKEN for each in value):
        return " ".join(f"{each['role']}: {in_words(each['content'])}" for each in value)
    return json.dumps(value, ensure_ascii=False, default=str)


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
