"""The process inside the sandbox: it forks each program, watches it, ends everything it left, and answers in JSON.

Only the standard library is available here. The process is the first of its PID namespace or a subreaper, so every
process that a program leaves behind becomes its child. The programs it forks inherit none of its descriptors. Numbers of
system calls are those of Linux on x86_64 and aarch64; on other machines `can_filter` is False, and only rlimits hold.
"""

import atexit
import ctypes
import gc
import importlib
import json
import linecache
import os
import platform
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

HEADER = struct.Struct("!Q")
WATCH_SECONDS = 0.05  # between two checks of what a program holds
MAX_FILES = 1024  # in the scratch directory
SPARE_PROCESSES = 128  # of the same user, started elsewhere meanwhile; not counted against a program
# What programs import most, imported once.
PRELOADED = (
    "ast", "bisect", "collections", "contextlib", "copy", "ctypes", "dataclasses", "datetime", "decimal", "fractions",
    "heapq", "importlib.util", "inspect", "itertools", "logging", "math", "pathlib", "pickle", "queue", "random", "re",
    "shutil", "statistics", "string", "tempfile", "textwrap", "threading", "typing", "unittest", "unittest.mock", "zlib",
)  # fmt: skip


@dataclass
class Place:
    """Where programs run, as `pool.worker_setup` describes it."""

    separated: bool  # in namespaces
    scratch: str
    worker_uid: int | None  # which this process becomes
    program_uid: int | None  # which programs become when they are forked
    readable: list[str]  # paths that programs may read, without namespaces
    library: list[str]  # a copy of the standard library, its extensions, the original; empty if that is readable
    parent: int  # the trainer's process
    pool: str  # the directory of all scratch directories, without namespaces
    ruleset: int | None = None
    directory: int = -1
    resident: int = 0  # pages of this process before a fork, which every process of a program shares


def set_oom_score(score: int) -> None:
    """Under memory pressure the kernel kills the highest score first: a program, then the worker, not the trainer."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))


def main() -> None:
    """Serve the trainer, which has the other end of the socket that is the standard input."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    execute(serve(channel))


def serve(channel: socket.socket) -> str:
    """Answer requests until the trainer is gone. Returns only in the process of a program, with its source."""
    set_oom_score(500)
    place = Place(**receive(channel))
    if place.worker_uid is not None:
        become(place.worker_uid)
    os.chdir(place.scratch)
    place.directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    os.environ.update(HOME=place.scratch, TMPDIR=place.scratch)
    prctl(PR_SET_DUMPABLE, 0)  # nothing reads or traces this process
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if not place.separated:
        place.ruleset = landlock_ruleset(place.readable, place.scratch)
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    place.resident = resident_pages("self")
    wake, wakened = socket.socketpair()
    for end in (wake, wakened):
        end.setblocking(False)
    signal.set_wakeup_fd(wakened.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        send(channel, {"ready": True})
        retire = False
        while not retire and empty(place.directory) and (request := receive(channel)):
            send(channel, {"begun": True})
            write_files(request["files"], place.program_uid)
            reading, writing = os.pipe()
            began = time.monotonic()
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                confine(request["limits"], place, writing)
                return str(request["program"])
            os.close(writing)
            answer = observe(pid, reading, channel, wake, request["limits"], place)
            os.close(reading)
            if answer is not None:
                retire = answer["retire"]
                owner = os.geteuid() if place.program_uid is None else place.program_uid
                files = {} if retire else read_files(request["keep"], owner, request["limits"]["file_bytes"])
                send(channel, answer | {"seconds": time.monotonic() - began, "files": files})
    except ConnectionError:  # the trainer was killed: else it sends an empty request, and removes the pool itself
        deadline = time.monotonic() + 10
        while os.getppid() == place.parent and time.monotonic() < deadline:  # its socket closes before it is dead
            time.sleep(0.01)
        if place.pool and empty(place.directory) and os.getppid() != place.parent:
            subprocess.run(["rm", "-rf", place.pool])
    os._exit(0)


# --- the process of a program ----------------------------------------------------------------------------------------


def confine(limits: dict[str, Any], place: Place, output: int) -> None:
    """Turn this fork into the process of a program. If that fails, it dies before the program begins."""
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0), os.dup2(output, 1), os.dup2(output, 2)
        os.umask(0o077)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        set_rlimits(limits, place)
        if place.program_uid is not None:
            become(place.program_uid)
        prctl(PR_SET_DUMPABLE, 1)  # the worker watches it, and it holds no secret
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        set_oom_score(1000)
        if place.ruleset is not None:
            check(libc.syscall(RESTRICT_SELF, place.ruleset, 0), "landlock")
        os.closerange(3, 4096)
        if can_filter:
            install_seccomp(seccomp_filter(place.separated, os.getpid()))
        if place.library:  # import from the copy, also submodules of packages that are already imported
            copy, extensions, original = place.library
            sys.path[:] = [copy, extensions]
            for module in list(sys.modules.values()):
                if path := getattr(module, "__path__", None):
                    module.__path__ = [entry.replace(original, copy) for entry in path]
        sys.path.insert(0, place.scratch)
        sys.path_importer_cache.clear()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os.kill(os.getpid(), signal.SIGKILL)
        raise


def set_rlimits(limits: dict[str, Any], place: Place) -> None:
    values = {
        resource.RLIMIT_CPU: limits["cpu_seconds"], resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"], resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: limits["processes"] + count_other_tasks(place), resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }  # fmt: skip
    for limit, value in values.items():
        hard = resource.getrlimit(limit)[1]
        highest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (highest, highest + 1 if limit == resource.RLIMIT_CPU else highest))


def count_other_tasks(place: Place) -> int:
    """Count processes and threads beside the program's own: RLIMIT_NPROC counts all of a user."""
    if place.separated:
        return 2  # this process, and the one outside
    if place.program_uid is not None:
        return 0
    number = SPARE_PROCESSES
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                number += len(os.listdir(f"/proc/{pid}/task"))
    return number


def execute(source: str) -> None:
    """Run a program as `python FILE` does: as __main__, with tracebacks that leave out this file's frames."""
    sys.argv = ["program.py"]
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace.update(__name__="__main__", __builtins__=sys.modules["builtins"])
    linecache.cache["<program>"] = len(source), None, source.splitlines(keepends=True), "<program>"
    code = 0

    @atexit.register  # first, so called last, after threads were joined: Python would spend milliseconds on freeing modules
    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # the program closed or replaced it
                stream.flush()
        os._exit(code & 0xFF)

    try:
        exec(compile(source, "<program>", "exec", dont_inherit=True), namespace)
    except SystemExit as error:
        if error.code is not None:
            code = error.code if isinstance(error.code, int) else 1
            print("" if isinstance(error.code, int) else f"{error.code}\n", end="", file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - whatever the program raises ends it
        code = 1
        at = error.__traceback__
        while at is not None and at.tb_frame.f_code.co_filename != "<program>":
            at = at.tb_next
        traceback.print_exception(type(error), error, at)


# --- watching a program ----------------------------------------------------------------------------------------------


def observe(
    pid: int, reading: int, channel: socket.socket, wake: socket.socket, limits: dict[str, Any], place: Place
) -> dict[str, Any] | None:
    """Return how a program ended and its output, once all its processes are gone; None if the trainer is gone."""
    output = bytearray()
    deadline, next_check = time.monotonic() + limits["seconds"], time.monotonic() + WATCH_SECONDS
    reason, ended = "", False
    sources: list[Any] = [reading, wake, channel]
    while not ended and not reason:
        ready = select.select(sources, [], [], max(0.0, min(deadline, next_check) - time.monotonic()))[0]
        if reading in ready and not read_output(reading, output, limits["output_bytes"]):
            sources.remove(reading)
        if wake in ready:
            wake.recv(4096)
        if channel in ready:  # the trainer sends nothing meanwhile: it is gone
            kill_all(pid, place)
            return None
        # Without reaping it: its PID has to stay reserved for the process group.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if not ended and time.monotonic() >= deadline:
            reason = "timeout"
        elif not ended and time.monotonic() >= next_check:
            reason = "crashed" if exceeds_limits(limits, place) else ""
            next_check = time.monotonic() + WATCH_SECONDS
    status, cpu_seconds, all_gone = kill_all(pid, place)
    os.set_blocking(reading, False)
    with suppress(BlockingIOError):
        while read_output(reading, output, limits["output_bytes"]):
            pass
    code = os.waitstatus_to_exitcode(status)
    if not reason and code < 0:
        out_of_time = -code == signal.SIGXCPU or cpu_seconds >= limits["cpu_seconds"]
        reason = "timeout" if out_of_time else "crashed"
    result = {"status": reason or "finished", "exit_code": None if reason else code, "retire": not all_gone}
    return result | {"output": output.decode(errors="replace")}


def read_output(reading: int, output: bytearray, limit: int) -> int:
    """Return how many bytes were read; those beyond `limit` are dropped."""
    data = os.read(reading, 1 << 16)
    output += data[: max(0, limit - len(output))]
    return len(data)


def kill_all(pid: int, place: Place) -> tuple[int, float, bool]:
    """End a program and everything it started; return its status, its CPU seconds, and whether all are gone."""
    status: int = signal.SIGKILL  # of one that could not be ended
    cpu_seconds, deadline = 0.0, time.monotonic() + 5
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL) if place.separated else os.killpg(pid, signal.SIGKILL)
        for descendant in () if place.separated else descendants():
            with suppress(ProcessLookupError):
                os.kill(descendant, signal.SIGKILL)
        try:
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                if ended[0] == pid:
                    status, cpu_seconds = ended[1], ended[2].ru_utime + ended[2].ru_stime
        except ChildProcessError:
            return status, cpu_seconds, True
        time.sleep(0.0005)
    return status, cpu_seconds, False


def descendants() -> list[int]:
    """List the processes below this one. Orphans among them become its children."""
    pids, parents = [], [os.getpid()]
    while parents:
        children: list[int] = []
        for pid in parents:
            with suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                        children += map(int, file.read().split())
        pids += children
        parents = children
    return pids


def exceeds_limits(limits: dict[str, Any], place: Place) -> bool:
    """Check the processes, memory and files of all processes of a program together."""
    if place.separated:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        disk = os.statvfs(".")
        blocks, files = disk.f_blocks - disk.f_bfree, disk.f_files - disk.f_ffree
        too_full = blocks * disk.f_frsize > limits["scratch_bytes"] or files > MAX_FILES
    else:
        pids = descendants()
        too_full = directory_bytes(place.directory, pids, limits["scratch_bytes"]) > limits["scratch_bytes"]
    private_pages = sum(max(0, resident_pages(str(pid)) - place.resident) for pid in pids)
    memory = (private_pages + place.resident) * resource.getpagesize()
    return too_full or len(pids) > limits["processes"] or (bool(pids) and memory > limits["memory_bytes"])


def resident_pages(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError):  # it has ended
        return 0


# --- seccomp and Landlock ----------------------------------------------------------------------------------------------

MACHINE = platform.machine()
X86 = MACHINE == "x86_64"
can_filter = MACHINE in ("x86_64", "aarch64")
libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446

# System calls by number on (x86_64, aarch64); None where there is none. Refused at every level: access to other processes
# and to the kernel, and resources that no limit counts or that outlive a program (access lists of its directory).
REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "personality": (135, 92), "syslog": (103, 116), "quotactl": (179, 60), "acct": (163, 89), "swapon": (167, 224),
    "reboot": (169, 142), "sethostname": (170, 161), "init_module": (175, 105), "finit_module": (313, 273),
    "kexec_load": (246, 104), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
}  # fmt: skip
# Refused as well without namespaces: signals to others, and changes of file attributes, which Landlock does not cover.
REFUSED_UNSEPARATED = {
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "setsid": (112, 157), "setpgid": (109, 154), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "removexattrat": (466, 466),
}  # fmt: skip
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
LOAD, EQUAL, AT_LEAST, BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
Instruction = tuple[int, int, int, int]


def check(result: int, name: str) -> int:
    """Return the result of a system call, or raise OSError if it is negative."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, value: int) -> None:
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def seccomp_filter(separated: bool, pid: int = 0) -> bytes:
    """Return a filter (seccomp(2)). Unless `separated` by namespaces, it refuses sockets, and signals except to `pid`."""
    audit, column = (0xC000003E, 0) if X86 else (0xC00000B7, 1)
    program: list[Instruction] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if X86:  # the x32 names of the same calls
        program += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, EPERM)]
    for numbers in (REFUSED if separated else {**REFUSED, **REFUSED_UNSEPARATED}).values():
        if (number := numbers[column]) is not None:
            program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, EPERM)]
    # clone3: its flags are in memory, so libc has to fall back to clone.
    program += [(EQUAL, 0, 1, 435), (RETURN, 0, 0, ENOSYS)]
    program += when((56, 220)[column], 0, BITS, [0x7E020000], EPERM, ALLOW)  # any new namespace
    families = [socket.AF_UNIX, socket.AF_INET, socket.AF_INET6] if separated else []
    program += when((41, 198)[column], 0, EQUAL, families, ALLOW, EPERM)
    if not separated:
        program += when((62, 129)[column], 0, EQUAL, [pid, 0], ALLOW, EPERM)  # kill; 0 is its own process group
        program += when((234, 131)[column], 0, EQUAL, [pid], ALLOW, EPERM)  # tgkill
        # Only on itself: prlimit64, setpriority, sched_setaffinity, -scheduler, -param, -attr, ioprio_set, and utimensat
        # without a path.
        for numbers, argument in (((302, 261), 0), ((141, 140), 1), ((203, 122), 0), ((144, 119), 0), ((142, 118), 0),
                                  ((314, 274), 0), ((251, 30), 1), ((280, 88), 1)):  # fmt: skip
            program += when(numbers[column], argument, EQUAL, [0], ALLOW, EPERM)
        program += when((72, 25)[column], 1, EQUAL, [8, 10, 15], EPERM, ALLOW)  # fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX
        program += when((16, 29)[column], 1, EQUAL, [0x8901, 0x8902, 0x5412], EPERM, ALLOW)  # FIOSETOWN and TIOCSTI
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def when(number: int, argument: int, test: int, values: Sequence[int], then: int, otherwise: int) -> list[Instruction]:
    """Return instructions for one call: `then` if the low half of the argument meets `test` for any of the values."""
    block: list[Instruction] = [(LOAD, 0, 0, 16 + 8 * argument)]
    for value in values:
        block += [(test, 0, 1, value & 0xFFFFFFFF), (RETURN, 0, 0, then)]
    block.append((RETURN, 0, 0, otherwise))
    return [(EQUAL, 0, len(block), number), *block]


def install_seccomp(instructions: bytes) -> None:
    """Filter this process and every child from now on; PR_SET_NO_NEW_PRIVS has to be set."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(program), 0, 0), "seccomp")


READ_EXECUTE, FILE_ONLY, DEVICE_FILES = 0b1101, 1 | 2 | 4 | 1 << 14 | 1 << 15, 1 << 6 | 1 << 11
ALL_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def landlock_ruleset(readable: Iterable[str], writable: str) -> int | None:
    """Return the descriptor of a ruleset that allows only these paths and devices; None if the kernel has no Landlock."""
    abi = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1) if can_filter else -1
    if abi < 1:
        return None
    all_rights = ALL_RIGHTS_BY_ABI.get(abi, (1 << 16) - 1)
    # Files; TCP (from ABI 4); signals and abstract sockets that leave the domain (from 6).
    attributes = struct.pack("QQQ", all_rights, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    size = ctypes.c_size_t(len(attributes))
    ruleset = check(libc.syscall(CREATE_RULESET, ctypes.c_char_p(attributes), size, 0), "landlock")
    rights = dict.fromkeys(readable, READ_EXECUTE) | dict.fromkeys(DEVICES, 6) | {writable: all_rights & ~DEVICE_FILES}
    for path, access in rights.items():
        if os.path.exists(path):
            below = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", access if os.path.isdir(path) else access & FILE_ONLY & all_rights, below)
            check(libc.syscall(ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0), f"landlock {path}")
            os.close(below)
    return ruleset


def become(uid: int) -> None:
    """Give up root for good. Raises OSError in a container whose root may not."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


# --- the scratch directory -------------------------------------------------------------------------------------------
# A program may leave anything there: links, directories without rights or ten thousand deep, open files without a name.


def write_files(files: dict[str, str], uid: int | None) -> None:
    """Write files below the working directory, owned by `uid` if given."""
    for name, text in files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text)
    if uid is not None:
        for folder, folders, names in os.walk("."):
            for name in (*folders, *names):
                os.chown(os.path.join(folder, name), uid, uid)


def read_files(names: list[str], owner: int, limit: int) -> dict[str, str]:
    """Read up to `limit` bytes of each regular file of this owner with a single name, through no symbolic link."""
    texts = {}  # no process of the program is left that could change a file between its check and the read
    for name in names:
        with suppress(OSError):  # missing, or closed to this process
            status, path = os.lstat(name), os.path.join(os.getcwd(), name)
            is_single = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and os.path.realpath(name) == path
            if is_single and status.st_uid == owner:
                with open(name, "rb") as file:
                    texts[name] = file.read(limit).decode(errors="replace")
    return texts


def empty(directory: int) -> bool:
    """Remove everything in the working directory, whose descriptor is given; return whether that worked."""
    with suppress(PermissionError):  # root's, whose rights a program cannot change
        os.fchmod(directory, 0o700)
    try:
        for name in os.listdir("."):
            os.unlink(name)
    except OSError:  # a directory; these programs take paths of any depth, which Python's functions do not
        subprocess.run(["chmod", "-R", "u+rwX", "."], stderr=subprocess.DEVNULL)
        subprocess.run(["find", ".", "-mindepth", "1", "-delete"], stderr=subprocess.DEVNULL)
    return not os.listdir(directory)


def directory_bytes(directory: int, pids: Iterable[int], limit: int) -> int:
    """Return the bytes below the working directory and in open files without a name; above `limit` for too many files."""
    total, count, pending = 0, 0, ["."]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    count += 1
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    if count > MAX_FILES or total > limit:
                        return limit + 1
        except (FileNotFoundError, PermissionError):
            continue
        except OSError:  # a path that is too long
            return limit + 1
    unnamed = {}
    device = os.fstat(directory).st_dev
    for pid in pids:
        with suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    file = os.stat(f"/proc/{pid}/fd/{number}")
                    if file.st_nlink == 0 and stat.S_ISREG(file.st_mode) and file.st_dev == device:
                        unnamed[file.st_ino] = file.st_blocks * 512
    return total + sum(unnamed.values())


# --- the channel: JSON messages behind their length, in both directions -----------------------------------------------


def send(channel: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    channel.sendall(HEADER.pack(len(data)) + data)


def receive(channel: socket.socket, limit: int = 1 << 62, seconds: float | None = None) -> Any:
    """Return a message. Raises ConnectionError at the end, OSError, and ValueError if it is too long or no JSON."""
    deadline = None if seconds is None else time.monotonic() + seconds
    size = HEADER.unpack(read_exactly(channel, HEADER.size, deadline))[0]
    if size > limit:
        raise ValueError(f"a message of {size} bytes, of at most {limit}")
    return json.loads(read_exactly(channel, size, deadline))


def read_exactly(channel: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        channel.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the other end is closed")
        data += part
    return bytes(data)
