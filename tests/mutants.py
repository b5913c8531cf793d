"""How much the tests protect: change the package in one place, run the tests, and see whether one fails.

`python -m tests.mutants 40 --seed 1` makes that many changes, spread over the folders of the package, one after the other
in a copy of the repository. A change negates a condition, drops a raise, returns None, or moves a bound by one. Test files
that name the changed module run first, then those that name its folder, then all of the first tier, then the second.
Prints a line for each change. `--near` stops after the folder: a minute for a change, where the tiers take half an hour.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FIRST, SECOND = "not slow and not sweep", "slow and not sweep"
BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
LEFT_OUT = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache")


@dataclass(frozen=True)
class Mutant:
    """A change of one line. path: relative to the repository. was, becomes: the source of a statement or expression."""

    path: Path
    line: int
    was: str
    becomes: str
    span: tuple[int, int]

    def apply(self, copy: Path) -> None:
        source = (copy / self.path).read_bytes()
        (copy / self.path).write_bytes(source[: self.span[0]] + self.becomes.encode() + source[self.span[1] :])


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every change of a module. What only type checkers read, and tests of `__name__`, are left as they are."""
    source = (REPOSITORY / path).read_text(encoding="utf-8")
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        changed: tuple[ast.AST, str] | None = None
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not re.search(
            "TYPE_CHECKING|__name__", ast.unparse(node.test)
        ):
            changed = node.test, f"not ({ast.unparse(node.test)})"
        elif isinstance(node, ast.Raise) and node.exc is not None:
            changed = node, "pass"
        elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            changed = node, "return None"
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in BOUNDS:
            moved = ast.Compare(node.left, [BOUNDS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
            changed = node, f"({ast.unparse(moved)})"
        if changed is not None:
            at, becomes = changed
            span = (starts[at.lineno - 1] + at.col_offset, starts[at.end_lineno - 1] + at.end_col_offset)  # type: ignore[attr-defined]
            yield Mutant(path, at.lineno, ast.unparse(at), becomes, span)  # type: ignore[attr-defined]


def chosen(count: int, seed: int) -> list[Mutant]:
    """As many from each folder of the package, in turn; within a folder any line is as likely as another."""
    folders: dict[Path, list[Mutant]] = {}
    for path in sorted((REPOSITORY / "cogumi").rglob("*.py")):
        relative = path.relative_to(REPOSITORY)
        folders.setdefault(relative.parent, []).extend(mutants_of(relative))
    draw = random.Random(seed)
    collected: list[Mutant] = []
    for each in folders.values():
        draw.shuffle(each)
    turns = [folder for folder in folders.values() if folder]
    while len(collected) < count:
        collected += [turn.pop() for turn in turns if turn]
    return collected[:count]


def not_copied(folder: str, names: list[str]) -> set[str]:
    """Of a folder of the repository: runs/ at its top is of users, cogumi/runs/ is a part of the package."""
    return LEFT_OUT(folder, names) | ({"runs"} if Path(folder) == REPOSITORY else set())


def copied(copy: Path) -> None:
    """A copy of the repository, with its .venv as a link: tests find servers and oracles there, and name its python."""
    shutil.copytree(REPOSITORY, copy, ignore=not_copied, symlinks=True)
    if (REPOSITORY / ".venv").exists():
        (copy / ".venv").symlink_to((REPOSITORY / ".venv").resolve())


def caught(mutant: Mutant, copy: Path, near_alone: bool = False) -> str:
    """What ran when a test failed, and that test: the file's own tests, a tier, or nothing."""
    module = ".".join(mutant.path.with_suffix("").parts).removesuffix(".__init__")
    folder = ".".join(mutant.path.parts[:2]).removesuffix(".py")
    files = sorted((copy / "tests").glob("test_*.py"))
    near = [path for path in files if named(module, path)]
    beside = [path for path in files if named(folder, path) and path not in near]
    ways = {
        "its own tests": (FIRST, near),
        "tests of its folder": (FIRST, beside),
        "the first tier": (FIRST, None),
        "the second tier": (SECOND, None),
    }
    for way, (tier, only) in ways.items():
        if only == []:
            continue
        if only is None and near_alone:
            break
        if failed := failing(copy, "-m", tier, *map(str, only or [])):
            return f"{way} ({failed})"
    return "nothing"


def failing(copy: Path, *words: str) -> str:
    """The first test that fails in a copy; "" where none does."""
    python = copy / ".venv" / "bin" / "python"
    command = [python if python.exists() else sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-n", "2", "--dist", "worksteal", *words],
        cwd=copy, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode in (0, 5):  # 5: no test was selected
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest's status {done.returncode}"


def named(module: str, path: Path) -> bool:
    """Whether a file imports a module, `cogumi.merge.plan` say, or names it."""
    text = path.read_text(encoding="utf-8")
    parent, _, name = module.rpartition(".")
    return module in text or re.search(rf"from {re.escape(parent)} import [^\n]*\b{name}\b", text) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--near", action="store_true", help="run no other tests than those that name the module or its folder"
    )
    asked = parser.parse_args()
    tally: dict[str, int] = {}
    for number, mutant in enumerate(chosen(asked.count, asked.seed), 1):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "cogumi"
            copied(copy)
            mutant.apply(copy)
            way = caught(mutant, copy, asked.near)
        kind = way.partition(" (")[0]
        tally[kind] = tally.get(kind, 0) + 1
        print(
            f"{number:3} {mutant.path}:{mutant.line}: {mutant.was[:60]!r} -> {mutant.becomes[:60]!r}: {way}", flush=True
        )
    print(tally)


if __name__ == "__main__":
    main()
