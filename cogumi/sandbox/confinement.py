"""What the kernel refuses a program: namespaces, seccomp and Landlock by their system calls.

It runs inside the sandbox's own process, so it uses the standard library only. Numbers are those of Linux on x86_64
and aarch64. On other systems `can_filter` is false, and only limits hold.
"""

import ctypes
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Callable, Iterable, Sequence

MACHINE = platform.machine()
X86 = MACHINE == "x86_64"
can_filter = platform.system() == "Linux" and MACHINE in ("x86_64", "aarch64")
libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ANY_NAMESPACE = 0x7E020000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 1, 2, 4, 4096, 16384, 1 << 18, 2
AT_FDCWD, AT_RECURSIVE, SET_INTERFACE_FLAGS = -100, 0x8000, 0x8914
MOUNT_SETATTR, CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 442, 444, 445, 446

# System calls by number, on x86_64 and on aarch64 (None: it has none). Those above 423 are the same everywhere.
# Other processes, the kernel itself, and what outlives a program (access lists of its directory) or no limit counts.
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
# Beside these, where no namespace separates processes and files: signals, and changes to files that Landlock lets pass.
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


def check(result: int, what: str) -> int:
    """The result of a system call. Raises OSError where it is negative."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, value: int) -> None:
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


# --- seccomp ---------------------------------------------------------------------------------------------------------


def seccomp_filter(separated: bool, pid: int = 0) -> bytes:
    """The instructions of a filter (seccomp(2)); `separated`: the program has namespaces of its own.

    Without them it has no sockets, and may signal only `pid`, which is itself.
    """
    audit, column = (0xC000003E, 0) if X86 else (0xC00000B7, 1)
    program: list[Instruction] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if X86:  # the x32 names of the same calls
        program += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, EPERM)]
    for numbers in (REFUSED if separated else {**REFUSED, **REFUSED_UNSEPARATED}).values():
        if (number := numbers[column]) is not None:
            program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, EPERM)]
    program += [(EQUAL, 0, 1, 435), (RETURN, 0, 0, ENOSYS)]  # clone3: its flags are in memory, so libc takes clone
    program += when((56, 220)[column], 0, BITS, [ANY_NAMESPACE], EPERM, ALLOW)
    inet = [socket.AF_UNIX, socket.AF_INET, socket.AF_INET6]
    program += when((41, 198)[column], 0, EQUAL, inet if separated else [], ALLOW, EPERM)
    if not separated:
        program += when((62, 129)[column], 0, EQUAL, [pid, 0], ALLOW, EPERM)  # kill; 0 is its own process group
        program += when((234, 131)[column], 0, EQUAL, [pid], ALLOW, EPERM)  # tgkill
        for both, argument in (((302, 261), 0), ((141, 140), 1), ((203, 122), 0), ((144, 119), 0), ((142, 118), 0),
                                 ((314, 274), 0), ((251, 30), 1), ((280, 88), 1)):  # fmt: skip
            # prlimit64, setpriority, sched_setaffinity, -scheduler, -param, -attr, ioprio_set of others; utimensat of a path
            program += when(both[column], argument, EQUAL, [0], ALLOW, EPERM)
        program += when((72, 25)[column], 1, EQUAL, [8, 10, 15], EPERM, ALLOW)  # fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX
        program += when((16, 29)[column], 1, EQUAL, [0x8901, 0x8902, 0x5412], EPERM, ALLOW)  # FIOSETOWN and TIOCSTI
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *each) for each in program)


def when(number: int, argument: int, test: int, values: Sequence[int], then: int, otherwise: int) -> list[Instruction]:
    """Instructions for one call: `then` where the low half of this argument meets `test` with one of the values."""
    block: list[Instruction] = [(LOAD, 0, 0, 16 + 8 * argument)]
    for value in values:
        block += [(test, 0, 1, value & 0xFFFFFFFF), (RETURN, 0, 0, then)]
    block.append((RETURN, 0, 0, otherwise))
    return [(EQUAL, 0, len(block), number), *block]


def install_seccomp(instructions: bytes) -> None:
    """From here on, and in every child. PR_SET_NO_NEW_PRIVS has to be set."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(program), 0, 0), "seccomp")


# --- Landlock --------------------------------------------------------------------------------------------------------

READ_EXECUTE, FILE_ONLY, DEVICE_FILES = 0b1101, 1 | 2 | 4 | 1 << 14 | 1 << 15, 1 << 6 | 1 << 11
EVERYTHING_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}


def landlock_ruleset(readable: Iterable[str], devices: Iterable[str], writable: str) -> int | None:
    """A descriptor of a ruleset: these paths and nothing else; None where the kernel has no Landlock."""
    abi = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1) if can_filter else -1
    if abi < 1:
        return None
    everything = EVERYTHING_BY_ABI.get(abi, (1 << 16) - 1)
    # Files; TCP (from 4); signals and abstract sockets out of the domain (from 6).
    attributes = struct.pack("QQQ", everything, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    size = ctypes.c_size_t(len(attributes))
    ruleset = check(libc.syscall(CREATE_RULESET, ctypes.c_char_p(attributes), size, 0), "landlock")
    for path, access in (*((each, READ_EXECUTE) for each in readable), *((each, 6) for each in devices),
                         (writable, everything & ~DEVICE_FILES)):  # fmt: skip
        if os.path.exists(path):
            below = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", access if os.path.isdir(path) else access & FILE_ONLY & everything, below)
            check(libc.syscall(ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0), f"landlock {path}")
            os.close(below)
    return ruleset


def restrict_to(ruleset: int) -> None:
    check(libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock")


# --- namespaces ------------------------------------------------------------------------------------------------------

AS_HOST = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")  # links into /usr on today's systems
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SCRATCH = "/scratch"


def enter_namespaces(readable: Sequence[str], scratch_bytes: int, watch: Callable[[int], None]) -> None:
    """Return in a new process, the first of its own PID namespace, which sees `readable`, devices and an empty scratch.

    The calling process stays outside: it calls `watch` with the PID, and ends. Raises OSError where the kernel refuses.
    """
    uid, gid, root = os.geteuid(), os.getegid(), os.geteuid() == 0
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    check(libc.unshare(flags if root else flags | CLONE_NEWUSER), "unshare")
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if child := os.fork():
        watch(child)
        os._exit(0)
    build_root(readable, scratch_bytes)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # up: a program may serve itself
        fcntl.ioctl(any_socket, SET_INTERFACE_FLAGS, struct.pack("16sH14x", b"lo", 1))


def build_root(readable: Sequence[str], scratch_bytes: int) -> None:
    """Change the root of this mount namespace to one in memory, with these paths in it, all but the scratch read-only."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    sources = ("/usr", *AS_HOST, *readable)
    place = next(
        each for each in ("/mnt", "/srv", "/media", "/tmp") if os.path.isdir(each) and above_none(each, sources)
    )
    mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in dict.fromkeys(sources):
        target = place + path
        if path in AS_HOST and os.path.islink(path):
            os.symlink(os.readlink(path), target)
        elif os.path.exists(path) and not os.path.exists(target):
            make_mount_point(path, target)
            mount(path, target, None, MS_BIND | MS_REC)
            set_attributes(target, MS_RDONLY | MS_NOSUID | MS_NODEV)
    for device in DEVICES:
        make_mount_point(device, place + device)
        mount(device, place + device, None, MS_BIND)
    os.symlink(SCRATCH, f"{place}/dev/shm")  # where libc has the semaphores of multiprocessing
    os.makedirs(f"{place}/proc")
    os.makedirs(place + SCRATCH)
    mount("tmpfs", place + SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, f"size={scratch_bytes},nr_inodes=8k,mode=1777")
    # Refused where a container covers parts of /proc; then no process of the sandbox is listed, its own neither.
    libc.mount(b"proc", f"{place}/proc".encode(), b"proc", ctypes.c_ulong(MS_NOSUID | MS_NODEV), None)
    os.makedirs(f"{place}/old")
    os.chdir(place)
    check(libc.syscall(155 if X86 else 41, b".", b"old"), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")
    set_attributes("/", MS_RDONLY | MS_NOSUID | MS_NODEV, recursive=False)


def above_none(place: str, paths: Sequence[str]) -> bool:
    return not any(f"{path}/".startswith(f"{place}/") for path in paths)


def make_mount_point(path: str, target: str) -> None:
    os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), mode=0o755, exist_ok=True)
    if not os.path.isdir(path):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind, data)]
    check(libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def set_attributes(target: str, attributes: int, recursive: bool = True) -> None:
    wanted = ctypes.c_char_p(struct.pack("QQQQ", attributes, 0, 0, 0))
    flags = AT_RECURSIVE if recursive else 0
    check(libc.syscall(MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, wanted, 32), f"mount_setattr {target}")


def drop_capabilities() -> None:
    """Give up all that root may do beside owning files: for programs of a root that may not become another user."""
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; refused without CAP_SETPCAP, and for those there are not
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    check(libc.syscall(126 if X86 else 91, ctypes.c_char_p(header), ctypes.c_char_p(none)), "capset")


def become(uid: int) -> None:
    """Give up root for good. Raises OSError where a container's root may not."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
