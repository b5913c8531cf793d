"""Programs that attack the sandbox, each with what may become of it. `REACHED` in an output means that it got out."""

from dataclasses import dataclass

from cogumi.sandbox import SandboxResult

PRELUDE = """
import ctypes, fcntl, json, os, resource, signal, socket, sys, time
given = json.loads(open("given.json").read())
libc = ctypes.CDLL(None, use_errno=True)
def reached(*what):
    print('REA' + 'CHED', *what)  # not as one word: a traceback shows lines of the source
def attempt(action, *arguments):
    try:
        return action(*arguments)
    except (OSError, ValueError) as error:
        print(type(error).__name__)
"""


@dataclass(frozen=True)
class Attack:
    """status: those that the program may end with, as words; exit_code: of one that finished, None for any."""

    source: str
    status: str = "finished"
    exit_code: int | None = 0
    output: str = ""

    @property
    def seconds(self) -> float:
        """What it is given: few, if it may only end by that."""
        return 0.5 if "timeout" in self.status else 20.0

    @property
    def program(self) -> str:
        return PRELUDE + self.source

    def contained(self, result: SandboxResult) -> bool:
        ended = result.status in self.status.split()
        code = result.exit_code == self.exit_code or self.exit_code is None or result.status != "finished"
        return ended and code and "REACHED" not in result.output and self.output in result.output


def reads(path: str) -> str:
    return f"""
text = attempt(lambda: open({path}, "rb").read())
if text: reached(text)
"""


ATTACKS = {
    "fork bomb": Attack("while True: os.fork()", "finished timeout crashed", None),
    "fork bomb that ignores what it can": Attack(
        """
for number in range(1, 32):
    attempt(signal.signal, number, signal.SIG_IGN)
while True:
    try: os.fork()
    except OSError: pass
""",
        "timeout crashed",
    ),
    "threads": Attack(
        "import threading\nfor _ in range(500): threading.Thread(target=time.sleep, args=(60,)).start()",
        "timeout crashed",
    ),
    "memory bomb": Attack("held = []\nwhile True: held.append(bytearray(1 << 24))", "finished", 1, "MemoryError"),
    "memory of many processes": Attack(
        "for _ in range(6):\n    if os.fork() == 0: break\nheld = b'x' * (90 << 20)\ntime.sleep(60)", "crashed"
    ),
    "memory that no process has mapped": Attack(
        "for _ in range(30): reached(os.write(os.memfd_create('x'), bytes(1 << 24)))", "finished", 1
    ),
    "shared memory": Attack("libc.shmget(1234, 1 << 28, 0o1777) >= 0 and reached()"),
    "endless loop": Attack("while True: pass", "timeout"),
    "endless loop that ignores the signal": Attack(
        "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout"
    ),
    "endless sleep": Attack("time.sleep(1000)", "timeout"),
    "output flood": Attack("while True: os.write(1, b'x' * 65536)", "timeout", output="x" * 4096),
    "one large file": Attack("with open('f', 'wb') as f: f.write(bytes(64 << 20)); reached()", "finished", 1),
    "disk fill": Attack(
        """
for number in range(100_000):
    with open(str(number), "wb") as f: f.write(bytes(1 << 20))
""",
        "finished crashed",
        1,
    ),
    "disk fill without names": Attack(
        """
held = []
for number in range(60):
    held.append(open(str(number), "wb")); os.unlink(str(number)); held[-1].write(bytes(1 << 20))
    time.sleep(0.01)
reached()
""",
        "finished crashed",
        1,
    ),
    "many files": Attack("for n in range(1_000_000): open(str(n), 'w').close()", "finished crashed", 1),
    "many open files": Attack("held = [open('given.json') for _ in range(1000)]; reached()", "finished", 1),
    "deep directories": Attack("for _ in range(100): os.mkdir('a' * 99); os.chdir('a' * 99)", "finished crashed", None),
    "directories without rights": Attack("os.makedirs('a/b/c', 0o700); open('a/b/c/f', 'w'); os.umask(0o777); os.mkdir('d')"),
    "its own directory without rights": Attack("os.fchmod(os.open('.', os.O_RDONLY), 0)", "finished", None),
    "an access list of its own directory": Attack(  # user::---, mask::---, other::---, for files to come
        """
acl = bytes.fromhex("02000000" + "01000000ffffffff" + "04000000ffffffff" + "10000000ffffffff" + "20000000ffffffff")
attempt(os.setxattr, ".", "system.posix_acl_default", acl)
attempt(os.setxattr, os.open(".", os.O_RDONLY), "system.posix_acl_default", acl)
"""
    ),
    "its own directory gone": Attack("attempt(os.rename, os.getcwd(), os.getcwd() + 'x'); attempt(os.rmdir, os.getcwd())"),
    "a reaper of its own": Attack(
        "libc.prctl(36, 1, 0, 0, 0)\nif os.fork() == 0 and os.fork() == 0 and os.fork() == 0: time.sleep(1000)"
    ),
    "a child beside it": Attack("libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0 and time.sleep(1000)"),
    "descriptors in flight": Attack(
        """
held = []
for number in range(40):
    pair = socket.socketpair(); held.append(pair[1])
    with open(str(number), "wb") as f:
        os.unlink(str(number)); f.write(bytes(1 << 20)); f.flush()
        attempt(socket.send_fds, pair[0], [b"x"], [f.fileno()])
    pair[0].close()
time.sleep(0.2)
""",
        "finished crashed",
        None,
    ),
    "signals to the worker": Attack(
        "end = time.time() + 0.3\nwhile time.time() < end:\n"
        "    try: os.kill(os.getppid(), signal.SIGCHLD)\n"
        "    except OSError: pass"
    ),
    "home": Attack(  # Python itself may lie in there
        """
for name in attempt(os.listdir, given["home"]) or ():
    if not sys.base_prefix.startswith(f"{given['home']}/{name}"): reached(name)
"""
    ),
    "root's home": Attack("attempt(os.listdir, '/root/.ssh') and reached()"),
    "a private file": Attack(reads("given['private']")),
    "a public file": Attack(reads("given['public']")),
    "the password file": Attack(reads("'/etc/passwd'")),
    "a file by its descriptor": Attack("for n in range(3, 100): attempt(os.fstat, n) and reached()"),
    "the environment": Attack("given['secret'] in repr(os.environ) and reached()"),
    "environments in /proc": Attack(
        """
for pid in [name for name in attempt(os.listdir, "/proc") or () if name.isdigit()] + [str(given["parent"])]:
    text = attempt(lambda: open(f"/proc/{pid}/environ").read()) or ""
    if given["secret"] in text: reached(pid)
"""
    ),
    "memory in /proc": Attack("attempt(open, f'/proc/{os.getppid()}/mem', 'r+b') and reached()"),
    "descriptors in /proc": Attack(
        "print([n for n in attempt(os.listdir, f'/proc/{os.getppid()}/fd') or () if reached()])"
    ),
    "the root of others in /proc": Attack(
        "attempt(os.listdir, f'/proc/{given[\"parent\"]}/root/root') and reached()"
    ),
    "/proc/sys": Attack(
        """
for name in ("kernel/core_pattern", "vm/drop_caches", "kernel/hostname"):
    with open(os.devnull, "w"): attempt(lambda: open(f"/proc/sys/{name}", "w").write("1")) and reached()
"""
    ),
    "/sys": Attack("attempt(os.listdir, '/sys/kernel') and reached()"),
    "network": Attack(
        """
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        attempt(lambda: socket.socket(family, kind).connect((address, given["port"])))
        attempt(lambda: socket.socket(family, kind).sendto(b"x", (address, given["port"])))
"""
    ),
    "raw, netlink and vsock sockets": Attack(
        "for n in (16, 17, 38, 40): attempt(socket.socket, n, socket.SOCK_RAW) and reached(n)"
    ),
    "an abstract socket": Attack(
        "attempt(lambda: socket.socket(socket.AF_UNIX).connect(given['abstract']) or reached())"
    ),
    "killing the parent": Attack("attempt(os.kill, os.getppid(), 9)\nattempt(os.kill, given['parent'], 9)"),
    "stopping the parent": Attack("for n in (19, 15, 2, 10): attempt(os.kill, os.getppid(), n)"),
    "killing everything": Attack("attempt(os.kill, -1, 9)"),
    "killing by descriptor": Attack(
        "attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(os.getppid()), signal.SIGKILL))"
    ),
    "a signal through a pipe": Attack(
        """
reading, writing = os.pipe()
for pid in (os.getppid(), given["parent"]):
    attempt(fcntl.fcntl, reading, fcntl.F_SETOWN, pid)
    attempt(fcntl.fcntl, reading, 10, signal.SIGKILL)
    attempt(fcntl.fcntl, reading, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writing, b"x")
"""
    ),
    "limits of the parent": Attack(
        """
for pid in {os.getppid(), given["parent"]} - {1}:
    attempt(resource.prlimit, pid, resource.RLIMIT_CPU, (1, 1))
attempt(os.setpriority, os.PRIO_PROCESS, os.getppid(), 19)
"""
    ),
    "tracing the parent": Attack("libc.ptrace(16, os.getppid(), 0, 0) == 0 and reached()"),
    "namespaces of its own": Attack("libc.unshare(0x10000000) == 0 and reached()"),
    "a mount": Attack("libc.mount(b'none', b'.', b'tmpfs', 0, 0) == 0 and reached()"),
    "becoming root": Attack("attempt(os.setuid, 0)\nif os.getuid() == 0 and given['user'] != 0: reached()"),
    "rights of others' files": Attack(
        """
for path in (given["public"], given["directory"]):
    attempt(os.chmod, path, 0); attempt(os.utime, path, (0, 0)); attempt(os.setxattr, path, b"user.x", b"x")
attempt(os.truncate, given["public"], 0); attempt(os.unlink, given["public"])
"""
    ),
    "writing elsewhere": Attack(
        "for place in (given['directory'], '/dev/shm', '/'):\n"
        "    attempt(lambda: open(place + '/written-by-an-attack', 'w'))\n"
    ),
    "a link in the scratch directory": Attack(
        "os.symlink(given['directory'], 'l'); attempt(open, 'l/written-by-an-attack', 'w')"
    ),
    "a hard link": Attack("attempt(os.link, given['private'], 'kept') or attempt(open, 'kept') and reached()"),
    "a daemon": Attack(
        """
if os.fork() == 0:
    attempt(os.setsid)
    if os.fork() == 0:
        for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
        os.closerange(0, 64)
        time.sleep(1000)
    os._exit(0)
os.wait()
"""
    ),
    "a daemon with the output open": Attack("if os.fork() == 0: time.sleep(1000)"),
    "a pickle": Attack("import pickle; sys.stdout.flush(); os.write(1, pickle.dumps(os.system) + b'\\0' * 99)"),
    "a result on every descriptor": Attack(
        """
answer = json.dumps({"status": "finished", "exit_code": 0, "output": "REA" + "CHED", "seconds": 0.0, "files": {}}).encode()
for number in range(3, 200): attempt(os.write, number, len(answer).to_bytes(8, "big") + answer)
os._exit(9)
""",
        exit_code=9,
    ),
    "leaving at once": Attack("os._exit(7)", exit_code=7),
    "a segmentation fault": Attack("ctypes.string_at(0)", "crashed"),
    "its own kill": Attack("os.kill(os.getpid(), 9)", "crashed"),
    "recursion": Attack("def f(): f()\nf()", exit_code=1, output="RecursionError"),
    "recursion of the stack": Attack(
        "sys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())", "crashed finished", 1
    ),
    "source that does not parse": Attack("(" * 10_000, exit_code=1),
    "source that is no text": Attack("x = '\ud800'\0", exit_code=1),
}  # fmt: skip
