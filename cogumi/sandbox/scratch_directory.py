"""The scratch directory of a program: its files before, how much it takes meanwhile, what is kept, and emptying it.

It runs inside the sandbox's own process, so it uses the standard library only. A program may leave anything there:
links, directories without rights or ten thousand deep, files that are open and have no name.
"""

import os
import stat
from collections.abc import Iterable
from contextlib import suppress

FILES = 1024  # that a program may have there


def write_files(files: dict[str, str], uid: int | None) -> None:
    """Write the files below the working directory; uid: whose they are to be."""
    for name, text in files.items():
        directory = os.path.dirname(name)
        if directory:
            os.makedirs(directory, exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text)
        while uid is not None and name:
            os.chown(name, uid, uid)
            name = os.path.dirname(name)


def read_files(names: list[str], directory: int, owner: int, most: int) -> dict[str, str]:
    """The text of regular files with one name that belong to this owner, through no link, up to `most` bytes of each."""
    texts = {}
    for name in names:
        at = os.dup(directory)
        try:
            for part in name.split("/")[:-1]:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = inner
            file = os.open(name.split("/")[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        except OSError:  # not there, a link, or closed to this process
            continue
        finally:
            os.close(at)
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == owner:
            with os.fdopen(file, "rb") as opened:
                texts[name] = opened.read(most).decode(errors="replace")
        else:
            os.close(file)
    return texts


def empty(directory: int) -> bool:
    """Remove all that is in the working directory, which this descriptor is of; whether that worked.

    It goes down and up again by one name at a time, as a path may be too long. No process is left that could move it.
    """
    with suppress(PermissionError):  # root's, whose rights a program cannot change
        os.fchmod(directory, 0o700)
    left: list[list[str]] = []  # of each directory from the top to this one: the names still to remove
    try:
        names = os.listdir(".")
        while names or left:
            if not names:
                os.chdir("..")
                names = left.pop()
                os.rmdir(names.pop())
            elif stat.S_ISDIR(os.stat(names[-1], follow_symlinks=False).st_mode):
                os.chmod(names[-1], 0o700)
                os.chdir(names[-1])
                left.append(names)
                names = os.listdir(".")
            else:
                os.unlink(names.pop())
    except OSError:
        os.fchdir(directory)
        return False
    return True


def directory_bytes(directory: int, pids: Iterable[int], most: int) -> int:
    """Bytes of the working directory, with the files that are open and have no name; more than `most` for too many."""
    total, count, below = 0, 0, ["."]
    while below:
        try:
            with os.scandir(below.pop()) as entries:
                for entry in entries:
                    count += 1
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.path)
                    if count > FILES or total > most:
                        return most + 1
        except FileNotFoundError:
            continue
        except OSError as error:  # a path that is too long, or a directory that is closed to this process
            if not isinstance(error, PermissionError):
                return most + 1
    unnamed = {}
    device = os.fstat(directory).st_dev
    for pid in pids:
        with suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    found = os.stat(f"/proc/{pid}/fd/{number}")
                    if found.st_nlink == 0 and stat.S_ISREG(found.st_mode) and found.st_dev == device:
                        unnamed[found.st_ino] = found.st_blocks * 512
    return total + sum(unnamed.values())
