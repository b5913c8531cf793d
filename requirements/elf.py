"""Which CUDA each wheel of the GPU lanes is linked to, read over the network without downloading the wheels. `make elf`.

Of each wheel the zip directory is fetched by HTTP range requests, then every shared library up to MEMBER_BYTES, and of that
the sonames it needs. Writes requirements/elf.json: of every lane its pins, and those of its wheels that there is something to
say of; of every wheel {library: CUDA sonames} and what was too large to read. For Python 3.12. The first time about 400 MB
of traffic; a wheel that elf.json knows is not read again.
"""

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elf_reader import cuda_major, needed_libraries
from lock import uv
from package_file import ROOT, pins, requirements_of, table

RESULT = Path(__file__).parent / "elf.json"
MEMBER_BYTES = 64 * 2**20  # compressed. Larger ones are libtorch_cpu, libtorch_cuda, flash attention's: named, not read
TAIL_BYTES = 2**16  # holds the directory of most wheels
NOTHING: dict[str, Any] = {"needs": {}, "unread": []}


class RemoteFile(io.RawIOBase):
    """A file behind a URL, for zipfile: each read is a range request but for the tail, which comes with the size."""

    def __init__(self, url: str) -> None:
        self.url, self.at = url, 0
        tail, where = self.fetch(f"-{TAIL_BYTES}")
        self.size = int(where.rpartition("/")[2])
        self.tail = tail

    def fetch(self, bytes_range: str) -> tuple[bytes, str]:
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={bytes_range}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url}: the server sends whole files only")
            return answer.read(), answer.headers["Content-Range"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        size = max(0, min(size if size >= 0 else self.size, self.size - self.at))
        before = self.at - (self.size - len(self.tail))
        if before >= 0:
            found = self.tail[before : before + size]
        else:
            found = self.fetch(f"{self.at}-{self.at + size - 1}")[0] if size else b""
        self.at += len(found)
        return found


def libraries(url: str) -> dict[str, Any]:
    """{"needs": {library: CUDA sonames}, "unread": [library]} of a wheel."""
    needs, unread = {}, []
    with zipfile.ZipFile(RemoteFile(url)) as wheel:  # type: ignore[arg-type]
        inside = {Path(name).name for name in wheel.namelist()}
        for member in wheel.infolist():
            if not re.search(r"\.so(\.\d+)*$", member.filename):
                continue
            if member.compress_size > MEMBER_BYTES:
                unread.append(member.filename)
                continue
            cuda = [name for name in needed_libraries(wheel.read(member)) if cuda_major(name) and name not in inside]
            if cuda:
                needs[member.filename] = cuda
    return {"needs": needs, "unread": unread}


def wheels_of(text: str, glibc: str) -> dict[str, str]:
    """URL by name of the wheels that a pinned file admits on Linux with Python 3.12; not of the index: the URL is the name."""
    indexed = "".join(pin for pin in requirements_of(text) if " @ " not in pin)
    with tempfile.TemporaryDirectory() as scratch:
        source, output = Path(scratch) / "pins.txt", Path(scratch) / "pylock.toml"
        source.write_text(indexed)
        command = [uv(), "pip", "compile", str(source), "--no-deps", "--only-binary", ":all:", "--quiet"]
        command += ["--python-version", "3.12", "--python-platform", f"x86_64-manylinux_{glibc.replace('.', '_')}"]
        command += ["--format", "pylock.toml", "--output-file", str(output)]
        subprocess.run(command, check=True, capture_output=True)
        packages = tomllib.loads(output.read_text())["packages"]
    wheels = [wheel for package in packages for wheel in package["wheels"] if wheel["hashes"]["sha256"] in text]
    elsewhere = [url for url in re.findall(r" @ (\S+)", text) if "-cp311-" not in url]
    return {wheel["url"].rpartition("/")[2]: wheel["url"] for wheel in wheels} | {url: url for url in elsewhere}


def read_wheel(name: str, url: str) -> dict[str, Any]:
    """`libraries(url)`; of a wheel that is not the index's, the reason instead where its host cannot be reached."""
    try:
        return libraries(url)
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        if name != url:
            raise
        return {"unfetched": str(error.reason)}


def has_libraries(name: str) -> bool:
    """NVIDIA's own packages are what the others need; they say their CUDA in their version."""
    return not name.endswith("-none-any.whl") and not re.match(r"nvidia_(?!cutlass|cudnn_frontend)", name)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {"wheels": {}, "without": []}
    wheels: dict[str, Any] = {name: wheel for name, wheel in before["wheels"].items() if "unfetched" not in wheel}
    wheels |= dict.fromkeys(before["without"], NOTHING)
    lanes, used = {}, set()
    for lane, entry in table()[0].items():
        path = ROOT / entry["file"]
        if not entry.get("cuda") or not path.exists():
            continue
        urls = {name: url for name, url in wheels_of(path.read_text(), entry["glibc"]).items() if has_libraries(name)}
        for name, url in urls.items():
            if name not in wheels:
                wheels[name] = read_wheel(name, url)
                print(name, wheels[name], file=sys.stderr)
        used |= urls.keys()
        told = sorted(name for name in urls if wheels[name] != NOTHING)
        lanes[lane] = {"pins": pins(path.read_text(), "linux 3.12"), "wheels": told}
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "lanes": lanes,
        "wheels": {name: wheels[name] for name in sorted(used) if wheels[name] != NOTHING},
        "without": [name for name in sorted(used) if wheels[name] == NOTHING],
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
