"""What the filesystems say, what can be had of them, and who uses the space: on real ones, of a few MB."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from disk_mounts import Mount, ext_image, fill

from cogumi.core import disk_space
from cogumi.core.disk_space import filesystem_of, filesystems, format_bytes, space_of, try_allocate
from cogumi.disk import usage
from cogumi.disk.usage import list_uses

MB = 1 << 20


# --------------------------------------------------------------------------------------------------------- filesystems


def test_blocks_that_are_kept_for_root_are_not_free(mount: Mount, tmp_path: Path) -> None:
    disk = mount("ext4", "loop", str(ext_image(tmp_path / "image", "ext4", reserved_percent=30)))
    before, status = space_of(disk), os.statvfs(disk)
    assert before.free == status.f_bavail * status.f_frsize < status.f_bfree * status.f_frsize
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, before.free + 8192)  # root may; a user has nothing left
    assert space_of(disk).free == 0
    assert space_of(disk).used_share == 1.0
    assert os.statvfs(disk).f_bfree > 0


def test_a_filesystem_without_sizes_or_inodes_has_no_shares() -> None:
    space = space_of(Path("/proc"))
    assert (space.inodes, space.inodes_free, space.inodes_share, space.used_share) == (None, None, None, None)


def test_a_mount_is_found_by_its_place(mount: Mount) -> None:
    disk = mount(name="a disk, of mine", source="some\tdevice")
    actual = filesystem_of(disk / "not" / "made" / "yet", "runs")
    assert (actual.used_for, actual.mount, actual.kind, actual.network) == (("runs",), str(disk), "tmpfs", False)
    assert actual.device == "some\tdevice"
    assert actual.space.total == 8 * MB
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "over", str(disk)], check=True)
    try:
        assert filesystem_of(disk).device == "over"
        link = disk.parent / "link"
        link.symlink_to(disk)
        assert filesystem_of(link / "below").mount == str(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_network_filesystems_are_told() -> None:
    network = ["nfs", "nfs4", "cifs", "9p", "ceph", "lustre", "fuse", "fuse.sshfs", "fuse.juicefs"]
    local = ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs", ""]
    assert [kind for kind in network + local if disk_space.NETWORK_KINDS.fullmatch(kind)] == network


def test_every_filesystem_of_a_run_once(mount: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, cache = mount(options="size=8m"), mount(options="size=4m")
    monkeypatch.setenv("HF_HOME", str(cache / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(run))
    collected = {disk.mount: disk for disk in filesystems(run / "checkpoints")}
    assert collected[str(run)].used_for == ("run directory", "temp")
    assert collected[str(cache)].used_for == ("HF cache", "datasets")
    assert next(iter(collected)) == str(run)
    shared = [disk for disk in collected.values() if "shared memory" in disk.used_for]
    assert len(shared) == Path("/dev/shm").is_dir()


def test_caches_are_where_the_libraries_have_them(tmp_path: Path) -> None:
    """Fails when huggingface_hub or datasets move them."""
    program = """
import json, runpy
from importlib.util import find_spec
from pathlib import Path
from huggingface_hub import constants
from cogumi.disk import usage as owners; from cogumi.core import disk_space as usage
datasets = runpy.run_path(Path(find_spec("datasets").origin).with_name("config.py"))
pairs = [(constants.HF_HUB_CACHE, usage.hub_cache()), (datasets["HF_DATASETS_CACHE"], usage.datasets_cache()),
         (constants.HF_XET_CACHE, dict(owners.caches())["HF xet cache"])]
print(json.dumps([[str(one), str(two)] for one, two in pairs]))
"""
    names = {"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_XET_CACHE", "XDG_CACHE_HOME"}
    plain = {name: value for name, value in os.environ.items() if name not in names} | {"HOME": str(tmp_path)}
    for more in ({}, {"HF_HOME": "~/hf"}, {"XDG_CACHE_HOME": str(tmp_path / "x"), "HF_HUB_CACHE": "$HOME/hub"}):
        done = subprocess.run(
            [sys.executable, "-c", program], env=plain | more, capture_output=True, text=True, check=True
        )
        for theirs, ours in json.loads(done.stdout):
            assert theirs == ours


STATUS = "import cogumi.cli.app as app; sys.argv = ['cogumi', 'disk', 'status', '/dev/shm', '--json']; app.main()"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "import cogumi; cogumi.DiskMonitor(warn=0.99, alarm=0.999).sample()",
            "torch transformers datasets huggingface_hub numpy rich",
        ),
        ("import cogumi; cogumi.last_good_checkpoint", "torch transformers"),
        ("import cogumi.checkpoints.verify", "torch transformers numpy safetensors"),
        (STATUS, "torch transformers"),
    ],
    ids=["monitor", "last_good_checkpoint", "verify", "status"],
)
def test_looking_at_disks_loads_nothing_heavy(code: str, heavy: str) -> None:
    program = f"import sys, atexit; atexit.register(lambda: print(sys.modules.keys() & {set(heavy.split())}, file=sys.stderr))"
    done = subprocess.run([sys.executable, "-c", f"{program}; {code}"], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


def test_bytes_in_words() -> None:
    expected = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 99_949: "99.9 kB", 99_950: "100 kB", 13_490_000_000: "13.5 GB"}
    expected |= {int(252e9): "252 GB", int(12_345e12): "12345 TB"}
    assert {count: format_bytes(count) for count in expected} == expected


# ------------------------------------------------------------------------------------------------------ what can be had


def test_what_fits_can_be_had_before_it_is_given_back(mount: Mount) -> None:
    disk = mount("tmpfs", "size=8m,nr_inodes=20")
    for size in (1, 4096, 7 * MB, 8 * MB):
        assert try_allocate(disk, size) == 0
        assert list(disk.iterdir()) == []
    assert space_of(disk).used == 0
    fill(disk, 0.75)
    assert try_allocate(disk, 3 * MB) == errno.ENOSPC
    assert [path.name for path in disk.iterdir()] == ["filler"]
    assert space_of(disk).free == 2 * MB
    assert try_allocate(disk, 2 * MB) == 0
    for number in range(18):
        (disk / str(number)).touch()
    assert try_allocate(disk, 4096) == errno.ENOSPC, "no inode is left"


def test_a_limit_on_the_size_of_a_file_is_told(tmp_path: Path) -> None:
    program = f"""
import errno, resource; from pathlib import Path; from cogumi.core.disk_space import try_allocate
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
print(try_allocate(Path({str(tmp_path)!r}), 1 << 20), try_allocate(Path({str(tmp_path)!r}), 1 << 21) == errno.EFBIG)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 True"
    assert list(tmp_path.iterdir()) == []


def test_a_filesystem_that_cannot_allocate_is_not_written_to(mount: Mount) -> None:
    disk = mount("ramfs", "")
    assert try_allocate(disk, 1 << 50) == errno.EOPNOTSUPP
    assert list(disk.iterdir()) == []


def test_a_quota_does_not_fit_whatever_the_numbers_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one answer that is made up here: a quota takes a kernel and a filesystem with one."""

    def over_quota(file: int, size: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(disk_space, "fallocate", over_quota)
    assert try_allocate(tmp_path, 4096) == errno.EDQUOT
    monkeypatch.setattr(disk_space, "IN_MEMORY", "")
    (disk,) = disk_space.group_needs([disk_space.Need("adapter", tmp_path, 4096, 4096)])
    assert disk.refusal == "it has less than it says: Disk quota exceeded"
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_made_is_an_error(mount: Mount, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        try_allocate(tmp_path / "gone", 1)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        try_allocate(tmp_path / "file", 1)
    with pytest.raises(OSError, match="Read-only"):
        try_allocate(mount(options="size=1m,ro"), 1)


# ------------------------------------------------------------------------------------------------- who uses the space


@pytest.fixture
def caches_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every cache below one directory, none of them there yet."""
    root = tmp_path / "caches"
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_XET_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_HOME", "XDG_CACHE_HOME", "WANDB_DIR"):
        monkeypatch.setenv(name, str(root / name))
    return root


def write(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def du(path: Path) -> int:
    """What `du` says, which counts as this does."""
    done = subprocess.run(["du", "-s", "--block-size=1", str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def test_who_uses_the_space(caches_at: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs"
    blob = write(caches_at / "HF_HOME/hub/models--a--b/blobs/abc", 300_000)
    (caches_at / "HF_HOME/hub/models--a--b/snapshots").mkdir()
    (caches_at / "HF_HOME/hub/models--a--b/snapshots/model.safetensors").symlink_to(blob)
    os.link(blob, caches_at / "HF_HOME/hub/same")
    write(caches_at / "HF_HOME/datasets/x.arrow", 50_000)
    write(caches_at / "HF_HOME/xet/chunk", 40_000)
    write(caches_at / "WANDB_DIR/wandb/run-1/files/x", 7_000)
    write(caches_at / "XDG_CACHE_HOME/cogumi/prepared/key/train.arrow", 60_000)
    write(run / "a/checkpoints/checkpoint-5/model.safetensors", 100_000)
    write(run / "a/checkpoints/checkpoint-10/sub/model.safetensors", 100_000)
    write(run / "a/checkpoints/checkpoint-10/wandb/x", 10)  # of the checkpoint: the outermost name counts
    write(run / "a/checkpoints/checkpoint-keep-this/x", 20_000)
    write(run / "a/checkpoints/.cogumi-saving/checkpoint-15/x", 30_000)
    write(run / "a/checkpoints/.cogumi-trash-checkpoint-1-ab12/x", 31_000)
    write(run / "a/checkpoints/aside-checkpoint-3-ab12/x", 33_000)
    write(run / "a/merged.partial-0123abcd/x", 34_000)
    write(run / "wandb/y", 8_000)
    with (run / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    (run / "link").symlink_to(caches_at)
    collected = {(use.what, use.path): use for use in list_uses(run)}
    sums = {key: use.bytes for key, use in collected.items()}
    here, checkpoints = str(run), run / "a/checkpoints"
    assert sums == {
        ("HF hub cache", str(caches_at / "HF_HOME/hub")): du(caches_at / "HF_HOME/hub"),
        ("HF datasets cache", str(caches_at / "HF_HOME/datasets")): du(caches_at / "HF_HOME/datasets"),
        ("HF xet cache", str(caches_at / "HF_HOME/xet")): du(caches_at / "HF_HOME/xet"),
        ("cogumi cache", str(caches_at / "XDG_CACHE_HOME/cogumi")): du(caches_at / "XDG_CACHE_HOME/cogumi"),
        ("wandb", str(caches_at / "WANDB_DIR/wandb")): du(caches_at / "WANDB_DIR/wandb"),
        ("checkpoints", here): du(checkpoints / "checkpoint-5") + du(checkpoints / "checkpoint-10"),
        (usage.STAGING, here): du(checkpoints / ".cogumi-saving"),
        (usage.TRASH, here): du(checkpoints / ".cogumi-trash-checkpoint-1-ab12"),
        (usage.ASIDE, here): du(checkpoints / "aside-checkpoint-3-ab12"),
        (usage.MERGE, here): du(run / "a/merged.partial-0123abcd"),
        ("wandb", here): du(run / "wandb"),
        ("everything else", here): sums["everything else", here],
    }
    assert sum(size for (_, path), size in sums.items() if path == here) == du(run)
    assert [use.bytes for use in list_uses(run)] == sorted(sums.values(), reverse=True)


def test_caches_inside_the_directory_are_counted_once(caches_at: Path) -> None:
    write(caches_at / "HF_HOME/hub/blob", 100_000)
    write(caches_at / "mine", 10_000)
    collected = {use.what: use.bytes for use in list_uses(caches_at)}
    assert set(collected) == {"HF hub cache", "everything else"}
    assert sum(collected.values()) == du(caches_at)


def test_another_disk_below_is_not_counted(mount: Mount, caches_at: Path, tmp_path: Path) -> None:
    disk = mount()
    fill(disk, 0.5)
    assert sum(use.bytes for use in list_uses(tmp_path)) < 4 * MB


def test_names_are_those_that_checkpoints_and_merges_give() -> None:
    from cogumi.checkpoints.commit import ASIDE_PREFIX, STAGING_NAME
    from cogumi.checkpoints.verify import TRASH_PREFIX

    kinds = {
        STAGING_NAME: usage.STAGING, f"{TRASH_PREFIX}checkpoint-5-ab12": usage.TRASH,
        f"{ASIDE_PREFIX}checkpoint-5-ab12": usage.ASIDE, "checkpoint-5": "checkpoints",
        "merged.partial-0123abcd": usage.MERGE,
    }  # fmt: skip
    for name, kind in kinds.items():
        assert usage.kind_of(name, usage.KNOWN_NAMES) == kind
    for name in ("checkpoint-5.bak", "checkpoint-keep-this", ".cogumi-saving-mine", "x.partial-012", ".cogumi-trash"):
        assert usage.kind_of(name, usage.KNOWN_NAMES) is None
