"""Keeping secrets out of what is written: tokens, keys and passwords, by what they look like and where they come from."""

import logging
import os
import re
from typing import Any

from cogumi.core.formatting import escape_controls

REDACTED = "<redacted>"
# Keys of a config whose value is a secret.
SECRETS = ("hub_token", "push_to_hub_token", "api_key", "password", "secret")
# A Hugging Face token; a W&B key of the newer kind; and the password in scheme://user:password@host.
LOOKS_SECRET = re.compile(r"\bhf_\w{30,}|\bwandb_v1_\w{30,}|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
# Environment variables that hold one, such as HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, COGUMI_TRAIN__HUB_TOKEN.
HOLDS_SECRET = re.compile(r"(TOKEN|API_KEY|ACCESS_KEY|SECRET|PASSWORD)$")
SHORTEST = 8  # characters: what is shorter occurs in ordinary text, and would be taken out of it


def redact_text(text: str) -> str:
    """Replace secrets in a text, those of the environment included."""
    secrets = {value for name, value in os.environ.items() if HOLDS_SECRET.search(name) and len(value) >= SHORTEST}
    for secret in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        text = text.replace(secret, REDACTED)
    return LOOKS_SECRET.sub(REDACTED, text)


class VisibleFormatter(logging.Formatter):
    """Formats lines of log so that control characters in them are shown, not obeyed."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


class RedactingFormatter(VisibleFormatter):
    """Formats lines of log, tracebacks included, also without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


class RedactedStr(str):
    """A secret that is used as it is and pickled as `<redacted>`: transformers saves its arguments in every checkpoint."""

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (REDACTED,)

    def __copy__(self) -> "RedactedStr":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "RedactedStr":
        return self
