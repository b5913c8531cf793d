"""Figures as a person reads them in a line of log."""


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `1 h 05 min`, `2 d 3 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def count(number: float) -> str:
    """`950`, `12.3k`, `4.56M`."""
    if number < 1000:
        return f"{number:.0f}"
    return f"{number / 1000:.1f}k" if number < 999_950 else f"{number / 1e6:.2f}M"


def gib(count: float) -> str:
    """Bytes as "1.5 GiB", below a GiB as "12 MiB", below ten MiB as "1.2 MiB"."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 10 * 2**20 else f"{count / 2**20:.1f} MiB"
