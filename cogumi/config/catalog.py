"""`cogumi cp`: the configs, recipes and templates that come with the package, as files of the user's own."""

import difflib
import shutil
from pathlib import Path

from cogumi.core.errors import UsageError

PACKAGE = Path(__file__).parents[1]
FOLDERS = {"configs": "*.yaml", "recipes": "*.py", "templates": "*.md"}


def there_are() -> dict[str, Path]:
    """Everything that can be handed out, by name: configs without their ending, recipes and templates with it."""
    found = {}
    for folder, pattern in FOLDERS.items():
        for path in sorted((PACKAGE / folder).rglob(pattern)):
            relative = path.relative_to(PACKAGE / folder)
            if relative.name != "__init__.py":
                names = {"configs": relative.with_suffix(""), "recipes": Path(folder) / relative, "templates": relative}
                found[str(names[folder])] = path
    return found


def says(path: Path) -> str:
    """What a file is, in its own words: a config's second comment line, the first line of the others."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[1].removeprefix("# ") if path.suffix == ".yaml" else lines[0].strip('"# ')


def hand_out(name: str, destination: Path | None = None) -> Path:
    """Copy what has this name (a path from the README does as well) and return the copy.

    destination: a file that does not exist yet, or a directory; the current one by default. Raises UsageError for a name
    that stands for nothing, and rather than replace a file.
    """
    known = there_are()
    plain = name.removeprefix("configs/").removesuffix(".yaml")
    if plain not in known:
        near = difflib.get_close_matches(plain, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise UsageError(f"no config, recipe or template is called {name}", fix=hint)
    source = known[plain]
    copy = Path(destination or ".")
    copy = copy / source.name if copy.is_dir() else copy
    if not copy.parent.is_dir():
        raise UsageError(f"there is no directory {copy.parent}", place=copy, fix="make it, or name another place")
    if copy.exists():
        raise UsageError(f"{copy} exists", fix=f"name another file: cogumi cp {name} FILE")
    try:
        shutil.copyfile(source, copy)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", place=copy, fix="name a place that can") from None
    return copy
