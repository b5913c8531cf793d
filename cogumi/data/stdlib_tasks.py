"""The sample's functions as tasks: a description and the function it describes, as chat, and as pairs to prefer between.

For the smoke configs of chat and preference tuning, from nothing that has to be downloaded (`cogumi.data.stdlib_sample`).
"""

import ast
import io
from collections.abc import Callable
from pathlib import Path

import platformdirs
import polars as pl

from cogumi.core.run_directory import write_atomic
from cogumi.data.stdlib_sample import sample_path

FORMAT_VERSION = 3
"""Part of the cached files' names: raise it when what is made of a function changes."""
LONGEST = 400  # characters of a function: a small model's context holds task and answer
CHAT, PAIRS = "cogumi:stdlib-chat", "cogumi:stdlib-pairs"


def chat_path() -> Path:
    """One row a described function: `messages` (user and assistant); `prompt` (the first of them) and `answer` (text)."""
    return cached("chat", chats_of)


def pairs_path() -> Path:
    """One row a described function, as messages: `prompt`, `chosen` (the function), `rejected` (its lines backwards)."""
    return cached("pairs", pairs_of)


def cached(kind: str, make: Callable[[pl.DataFrame], pl.DataFrame]) -> Path:
    sample = sample_path()
    path = Path(platformdirs.user_cache_dir("cogumi")) / f"{sample.stem}-{kind}-v{FORMAT_VERSION}.parquet"
    if not path.exists():
        buffer = io.BytesIO()
        make(described(pl.read_parquet(sample))).write_parquet(buffer)
        write_atomic(path, buffer.getvalue())
    return path


def described(functions: pl.DataFrame) -> pl.DataFrame:
    """`task` and `code` of the functions whose docstring says in its first line what they do; the docstring leaves."""
    found = [task for source in functions["source"].to_list() if (task := as_task(source)) is not None]
    return pl.DataFrame(found, schema={"task": pl.String, "code": pl.String}, orient="row").unique(
        "code", keep="first", maintain_order=True
    )


def as_task(source: str) -> tuple[str, str] | None:
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    docstring = ast.get_docstring(function)
    if not docstring or len(function.body) == 1:
        return None
    del function.body[0]
    code = ast.unparse(function)
    return (docstring.strip().splitlines()[0], code) if len(code) <= LONGEST else None


def chats_of(tasks: pl.DataFrame) -> pl.DataFrame:
    user, assistant = message("user", pl.col("task")), message("assistant", pl.col("code"))
    return tasks.select(
        messages=pl.concat_list(user, assistant),
        prompt=pl.concat_list(user),
        answer="code",
    )


def pairs_of(tasks: pl.DataFrame) -> pl.DataFrame:
    backwards = pl.col("code").str.split("\n").list.reverse().list.join("\n")
    return tasks.select(
        prompt=pl.concat_list(message("user", pl.col("task"))),
        chosen=pl.concat_list(message("assistant", pl.col("code"))),
        rejected=pl.concat_list(message("assistant", backwards)),
    )


def message(role: str, content: pl.Expr) -> pl.Expr:
    return pl.struct(pl.lit(role).alias("role"), content.alias("content"))
