"""The ELF reader says what readelf says, and one clear ValueError of anything that is not a whole library."""

import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "requirements"))
from elf_reader import cuda_major, needed_libraries

SITE = Path(sysconfig.get_paths()["purelib"])
# Large and small, patched by auditwheel and not, linked by GNU ld and by lld.
PACKAGES = ("torch", "numpy", "pyarrow", "bitsandbytes", "tokenizers", "polars")
LIBRARIES = [library for package in PACKAGES for library in sorted((SITE / package).rglob("*.so*"))[:8]]
A_LIBRARY = next((SITE / "numpy").rglob("*.so"))


def readelf(path: Path) -> tuple[str, ...]:
    said = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    return tuple(re.findall(r"\(NEEDED\).*\[(.*)\]", said))


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not here")
def test_it_says_what_readelf_says() -> None:
    assert len(LIBRARIES) >= 15
    assert {path: needed_libraries(path) for path in LIBRARIES} == {path: readelf(path) for path in LIBRARIES}
    assert any(needed_libraries(path) for path in LIBRARIES)


def test_bytes_and_files_give_the_same() -> None:
    assert needed_libraries(A_LIBRARY.read_bytes()) == needed_libraries(A_LIBRARY) != ()


@pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("readelf") is None, reason="gcc or binutils is not here"
)
@pytest.mark.parametrize(
    "options", [["-shared", "-Wl,--no-as-needed", "-lm"], ["-shared", "-nostdlib"], ["-static"], ["-pie"]]
)
def test_what_gcc_links(options: list[str], tmp_path: Path) -> None:
    source, made = tmp_path / "empty.c", tmp_path / "made"
    source.write_text("int main(void) { return 0; }\n")
    subprocess.run(["gcc", "-fPIC", str(source), "-o", str(made), *options], check=True, capture_output=True)
    assert needed_libraries(made) == readelf(made)


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 63, 64, 100, 500])
def test_a_truncated_library_is_a_value_error(kept: int, tmp_path: Path) -> None:
    whole = A_LIBRARY.read_bytes()
    with pytest.raises(ValueError, match="truncated ELF file: it ends at byte"):
        needed_libraries(whole[:kept])
    (tmp_path / "cut.so").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.so: truncated ELF file"):
        needed_libraries(tmp_path / "cut.so")


def test_every_damaged_byte_of_the_headers_is_read_or_refused() -> None:
    """No byte of the ELF header or the program headers can make it raise anything but ValueError, or hang."""
    whole = A_LIBRARY.read_bytes()
    (count,) = struct.unpack_from("<H", whole, 56)
    for at in range(64 + 56 * count):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        try:
            needed_libraries(bytes(damaged))
        except ValueError as error:
            assert "ELF" in str(error)  # noqa: PT017 - it may as well be read


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PK\x03\x04" + bytes(100), "not an ELF file"),
        (b"\xcf\xfa\xed\xfe" + bytes(100), "not an ELF file"),  # macOS
        (b"\x7fELF\x01\x01" + bytes(100), "not a 64-bit little-endian ELF file"),
        (b"\x7fELF\x02\x02" + bytes(100), "not a 64-bit little-endian ELF file"),
    ],
)
def test_what_is_no_library_of_this_machine(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        needed_libraries(data)


@pytest.mark.parametrize(
    ("soname", "major"),
    [
        ("libcudart.so.13", 13), ("libcudart.so.11.0", 11), ("libcublasLt.so.12", 12), ("libnvrtc.so.13", 13),
        ("libcudart.faf08d9a.so.13", 13), ("libcudart-d0da41ae.so.11.0", 11), ("libnvJitLink.so.12", 12),
        # Their numbers are their own: cuFFT of CUDA 13 is libcufft.so.12.
        ("libcufft.so.12", None), ("libcusparse.so.12", None), ("libcurand.so.10", None), ("libcuda.so.1", None),
        ("libcudnn.so.9", None), ("libc.so.6", None), ("libcudart_static.so.13", None), ("", None),
    ],
)  # fmt: skip
def test_the_cuda_of_a_soname(soname: str, major: int | None) -> None:
    assert cuda_major(soname) == major
