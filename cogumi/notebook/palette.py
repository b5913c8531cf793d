"""Colours that read on white and on black, each with a dash, a marker and a hatch: no meaning is told by colour alone.

Of Okabe and Ito's eight (https://jfly.uni-koeln.de/color/) the four that have a contrast of 3:1 or more with white and
with #111 alike, as WCAG 2.2 asks of graphics (success criterion 1.4.11), and their orange, darkened until it has. No colour
reads on both at the 4.5:1 of text, so text is never coloured: it is `currentColor`, whatever the page around it takes.
"""

from dataclasses import dataclass
from typing import Any

BLUE, VERMILLION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B77D00"
INK = "#767677"
"""Drawn for text and axes, and replaced by `currentColor` in the SVG. A colour that nothing else has."""


@dataclass(frozen=True)
class Style:
    """How one series is told from the others: in a line by dash and marker too, in an area by its hatch too."""

    colour: str
    dash: Any
    marker: str
    hatch: str


SERIES = (
    Style(BLUE, "-", "o", ""),
    Style(VERMILLION, (0, (5, 2)), "s", "///"),
    Style(GREEN, (0, (5, 2, 1, 2)), "^", ".."),
    Style(PURPLE, (0, (1, 1.5)), "D", "xx"),
    Style(INK, (0, (8, 2)), "v", "\\\\\\"),
    Style(BLUE, (0, (2, 2)), "P", "++"),
    Style(VERMILLION, (0, (8, 2, 1, 2, 1, 2)), "X", "o"),
    Style(GREEN, (0, (3, 1, 1, 1)), "<", "||"),
    Style(PURPLE, (0, (6, 1)), ">", "--"),
)
# Of a flag, a check, a line of the preflight: the edge beside the word that says the same.
LEVELS = {"red": VERMILLION, "yellow": ORANGE, "unknown": PURPLE, "green": GREEN}


def style_of(number: int) -> Style:
    """That of a series by its number; from the tenth on they repeat."""
    return SERIES[number % len(SERIES)]


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours written #rrggbb, from 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """WCAG's relative luminance: sRGB made linear, weighed as the eye does."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
