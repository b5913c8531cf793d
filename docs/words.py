"""Reading ease of the pages, and the words that are not used: `make lint`.

Each page is one line: Flesch reading ease (textstat; code blocks, tables and headings left out, code within a sentence kept as
it stands), words a sentence, and sentences of more than LONGEST words. A page below EASE fails, and so does a word of WORDS in a file
of COVERED. Add a folder to COVERED when it is clean.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import textstat

ROOT = Path(__file__).parents[1]
EASE = 55  # Flesch: 50 to 60 is "fairly difficult", 60 to 70 plain English
LONGEST = 25
PAGES = ["README.md", "docs/*.md"]
# Whole words or phrases, in any case. What a message has to say instead is in docs/glossary.md.
WORDS = [
    "nobody(?:'s)?",
    "somebody(?:'s)?",
    "anybody(?:'s)?",
    "whoever(?:'s)?",
    "go(?:es|ing)? on",
    "went on",
    "look(?:s|ed|ing)? at",
    "at its fullest",
    "the keys? to turn",
    "mend(?:s|ed|ing)?",
    "what is not",
    "all the same",
    "in silence",
    "for ever",
    "one of its own",
    "is told from",
    "cannot be told",
    "hoped for",
    "a citizen",
    "thereof",
    "lest",
]
COVERED = ["docs/*.md"]
OUTPUT = re.compile(r"^```\n.*?^```$", re.MULTILINE | re.DOTALL)  # a fence without a tag: what a program printed
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(page: str) -> list[str]:
    """The paragraphs and list items of a page, each on one line, without code blocks, tables, headings and addresses."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", FENCE.sub("\n\n", page)):
        if block.strip("\n").startswith(("|", "#", "![", "    ")):
            continue
        text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block))
        if text := " ".join(text.split()).rstrip(".,:;"):
            found.append(text + ".")
    return found


def sentences(page: str) -> list[str]:
    """The sentences of the prose. Code within a sentence is one word of it."""
    text = [re.sub(r"`[^`]*`", lambda code: re.sub(r"\s", "_", code[0]), paragraph) for paragraph in prose(page)]
    return [sentence for paragraph in text for sentence in re.split(r"(?<=[.!?])[)*_\"]*\s+", paragraph)]


def ease(page: str) -> float:
    """Flesch reading ease of a page. A full stop within a number or a name ends no sentence."""
    return textstat.flesch_reading_ease(re.sub(r"(?<=\w)\.(?=\w)", "", "\n".join(prose(page))))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page or a notebook, without printed output; of another Python file the strings and docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md" or path.parent.name == "notebooks":
        blank = OUTPUT.sub(lambda fence: "\n" * fence[0].count("\n"), text)
        yield from enumerate(blank.splitlines(), start=1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, " ".join(node.value.split())


def bad_words(path: Path) -> list[str]:
    pattern = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return [f"{name}:{line}: {found[0]!r} is not used here" for line, text in texts(path) for found in pattern.finditer(text)]


def main() -> int:
    failed = [line for pattern in COVERED for path in sorted(ROOT.glob(pattern)) for line in bad_words(path)]
    for path in [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]:
        page = path.read_text(encoding="utf-8")
        words = [len(sentence.split()) for sentence in sentences(page)]
        long = sum(count > LONGEST for count in words)
        print(f"{path.relative_to(ROOT)!s:22} reading ease {ease(page):5.1f}; {sum(words) / len(words):4.1f} words a sentence, {long} above {LONGEST}")
        if ease(page) < EASE:
            failed.append(f"{path.relative_to(ROOT)}: reading ease {ease(page):.1f}, at least {EASE} is asked")
    print("\n".join(failed), file=sys.stderr, end="\n" if failed else "")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
