"""Samples without a download: functions of the running Python's standard library, as code, chat and pairs.

Their licence (PSF-2.0) allows this use. A row is one function or method. Test suites, vendored and generated files,
functions inside functions, copies, and very short or long functions are left out.

The tasks are to rename a variable in a few lines of these functions, which has one right answer. The noisy sample answers
about half of them carelessly, which a reward or pairs can correct. The functions of `cogumi:stdlib-tasks` are in neither
the noisy sample nor the pairs, to compare all methods on them.
"""

import ast
import io
import itertools
import platform
import random
import re
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import polars as pl

from cogumi.core.errors import UsageError
from cogumi.core.run_directory import write_atomic

FORMAT_VERSION, TASKS_VERSION = 1, 9
"""Parts of the cached files' names: raise one when the filter or the columns change, or what is made of a function."""
MIN_LINES, MAX_LINES = 3, 40
MIN_TASK, MAX_TASK = 15, 40  # characters of the lines of a task, so that half a minute of training is enough
MIN_NAME, COMMON_NAME = 3, 20  # a new name's letters, and functions in which it is a variable
IN_TASKS = pl.col("draw") >= 4  # of the six numbers that a function draws
SKIPPED_FOLDERS = frozenset([
    "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "ensurepip",
    "__pycache__", "__phello__", "pydoc_data",
])  # fmt: skip


def sample_path(name: str = "cogumi:stdlib") -> Path:
    """Return the cached file of one of `SAMPLES` for the running Python; the first use writes it in seconds."""
    stem = f"stdlib-functions-py{platform.python_version()}-v{FORMAT_VERSION}"
    functions = Path(platformdirs.user_cache_dir("cogumi")) / f"{stem}.parquet"
    if not functions.exists():
        write_sample(functions)
    if name == "cogumi:stdlib":
        return functions
    kind = name.removeprefix("cogumi:stdlib-")
    tasks, path = (functions.with_name(f"{stem}-{part}-v{TASKS_VERSION}.parquet") for part in ("renamings", kind))
    if not path.exists():
        if not tasks.exists():
            write_frame(tasks, renamings(pl.read_parquet(functions)["source"].to_list()))
        predicate, columns = SAMPLES[name]
        write_frame(path, pl.read_parquet(tasks).filter(predicate).select(**columns))
    return path


def write_sample(path: Path) -> Path:
    """Write the standard library's functions to one parquet file and return its path."""
    return write_frame(path, collect_functions(Path(sysconfig.get_paths()["stdlib"])), compression="zstd")


def collect_functions(library: Path) -> pl.DataFrame:
    """Collect the functions below `library`, sorted by file and position. Raises UsageError without source files.

    `source` is dedented and parses on its own; the same Python gives the same rows.
    """
    rows: dict[str, tuple[str, str, str, str]] = {}  # by source
    for file in sorted(library.rglob("*.py")):
        relative = file.relative_to(library)
        if not SKIPPED_FOLDERS.isdisjoint(relative.parts):
            continue
        try:
            text = file.read_text("utf-8-sig")
            with warnings.catch_warnings(action="ignore"):  # of the library's own invalid escapes
                tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        lines = text.split("\n")  # str.splitlines would also split at form feeds, where ast counts no line
        for name, function in _functions(tree, ""):
            first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)]) - 1
            last = function.end_lineno or function.lineno
            source = textwrap.dedent("\n".join(lines[first:last]) + "\n")
            # A string at column 0 prevents dedenting: no indent is common to all lines.
            if MIN_LINES <= last - first <= MAX_LINES and not source[0].isspace():
                rows.setdefault(source, (relative.as_posix(), name, source, "PSF-2.0"))
    if not rows:
        message = "this Python ships no library source to make a sample of"
        raise UsageError(message, place=library, fix="give your own parquet file")
    return pl.DataFrame(list(rows.values()), schema=["path", "name", "source", "licence"], orient="row")


def _functions(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Iterate over (qualified name, node) of the functions below `node` in source order, without nested functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield scope + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{scope}{child.name}.")
        elif isinstance(child, ast.stmt | ast.ExceptHandler):  # if TYPE_CHECKING: / try: ... except ImportError:
            yield from _functions(child, scope)


def write_frame(path: Path, frame: pl.DataFrame, **options: Any) -> Path:
    """Write a parquet file atomically."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())
    return path


# --------------------------------------------------------------------------------------------------------------- tasks


def _message(role: str, content: str | pl.Expr) -> pl.Expr:
    return pl.concat_list(pl.struct(role=pl.lit(role), content=content))


def _conversation(answer: str | pl.Expr) -> dict[str, Any]:
    user, assistant = _message("user", "task"), _message("assistant", answer)
    return {"messages": pl.concat_list(user, assistant), "prompt": user, "answer": answer}


NOISY = pl.when(pl.col("draw") % 2 == 0).then("careless").otherwise("renamed")
PAIRS = {
    "prompt": _message("user", "task"),
    "chosen": _message("assistant", "renamed"),
    "rejected": _message("assistant", "careless"),
}
SAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "cogumi:stdlib": (True, {}),
    "cogumi:stdlib-chat": (True, _conversation("renamed")),
    "cogumi:stdlib-chat-noisy": (~IN_TASKS, _conversation(NOISY)),
    "cogumi:stdlib-tasks": (IN_TASKS, _conversation("renamed")),
    "cogumi:stdlib-pairs": (~IN_TASKS, PAIRS),
}
"""{name: (filter of the `renamings`, columns made of them)}; the first is the functions themselves."""


def renamings(sources: list[str]) -> pl.DataFrame:
    """Make one task per function, if possible: rename a variable in a few of its lines.

    `task` is "Rename total to count:" and the lines, `renamed` the resulting lines, `careless` the lines with only the
    first place renamed, `draw` 0 to 5 by the function. The new name is a variable's name elsewhere in `sources`.
    """
    trees = [ast.parse(source).body[0] for source in sources]
    uses = Counter(name for tree in trees for name in _variables(tree))
    names = sorted(name for name, count in uses.items() if count >= COMMON_NAME and len(name) >= MIN_NAME)
    rows: dict[str, tuple[str, str, str, int]] = {}  # by lines
    for source, tree in zip(sources, trees, strict=True):
        draw = random.Random(source)
        candidates = sorted(set(_renamable_lines(source, tree)))
        if not candidates:
            continue
        lines, name = draw.choice(candidates)
        old, new = re.compile(rf"\b{name}\b"), draw.choice(names)
        while re.search(rf"\b{new}\b", lines):
            new = draw.choice(names)
        task = f"Rename {name} to {new}:\n{lines}"
        rows.setdefault(lines, (task, old.sub(new, lines), careless_answer(task), draw.randrange(6)))
    schema = {"task": pl.String, "renamed": pl.String, "careless": pl.String, "draw": pl.Int64}
    return pl.DataFrame(list(rows.values()), schema=schema, orient="row")


def careless_answer(task: str) -> str:
    """Return the lines of a task with only the first place renamed."""
    request, lines = task.split("\n", 1)
    _, old, _, new = request.removesuffix(":").split(" ")
    return re.sub(rf"\b{old}\b", new, lines, count=1)


def _variables(tree: ast.AST) -> set[str]:
    """Return the arguments and assigned names in a function."""
    nodes = list(ast.walk(tree))
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return (assigned | {node.arg for node in nodes if isinstance(node, ast.arg)}) - {"self", "cls"}


def _renamable_lines(source: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Iterate over (one to three statements, dedented; a variable used in them at least twice, and only as a name)."""
    variables, lines = _variables(tree), source.split("\n")
    blocks = [block for node in ast.walk(tree) for block in (getattr(node, "body", []), getattr(node, "orelse", []))]
    for block in blocks:
        for first, count in itertools.product(range(len(block) if isinstance(block, list) else 0), (1, 2, 3)):
            part = block[first : first + count]
            code = textwrap.dedent("\n".join(lines[part[0].lineno - 1 : part[-1].end_lineno]))
            if len(part) < count or not MIN_TASK <= len(code) <= MAX_TASK:
                continue
            try:
                inside = ast.parse(code)
            except SyntaxError:  # an elif, or two statements on one line
                continue
            names = Counter(node.id for node in ast.walk(inside) if isinstance(node, ast.Name))
            for name in variables & names.keys():
                if names[name] >= 2 and len(name) >= 2 and len(re.findall(rf"\b{name}\b", code)) == names[name]:
                    yield code, name
