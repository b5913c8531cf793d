"""Load the user's functions and classes by their names in a config: `file.py:name` or `package.module:name`."""

import functools
import importlib
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError, ends_by_signal


def load_object(name: str, key: str, accept: Callable[[Any], bool], kind: str) -> Any:
    """Load the object that `path/to/file.py:name` or `package.module:name` names, executing its module."""
    place, _, attribute = name.rpartition(":")
    if not place:
        raise UsageError(f"{name!r} names no {kind}", key=key, fix=f"write file.py:{kind}")
    try:
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise FileNotFoundError(f"no such file: {place}")
            module = load_file(place, str(Path.cwd()), Path(place).stat().st_mtime_ns)
        else:
            module = importlib.import_module(place)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise UsageError(f"{name}: {error} (looked from {Path.cwd()})", key=key) from None
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
        if ends_by_signal(error):
            raise
        raise UsageError(f"{name}: {place} raises {type(error).__name__}: {error}", key=key) from error
    loaded = getattr(module, attribute, None)
    if not accept(loaded):
        names = [
            known
            for known, value in vars(module).items()
            if accept(value) and getattr(value, "__module__", "") == module.__name__
        ]
        raise UsageError(f"{place} has no {kind} {attribute!r}", key=key, fix=f"it has: {', '.join(names) or 'none'}")
    return loaded


@functools.cache
def load_file(path: str, start: str, written: int) -> Any:
    """Execute a file as a module, once, and again if it was written since.

    start: the directory that the path starts from. written: when, in ns.
    """
    loader = SourceFileLoader(Path(path).stem, path)
    module = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def describe_error(error: BaseException, stage: str) -> str:
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{stage} raised {type(error).__name__}: {error} ({at.filename}:{at.lineno})"
