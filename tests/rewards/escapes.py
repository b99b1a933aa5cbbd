"""Attempts to get out of the sandbox, and a script that runs them all: `escapes.py VICTIM FILE [without_landlock]`.

Each attempt sets `gained`, or raises, or is killed. VICTIM is another process of the user, FILE one of its files.
"""

import json
import os
import sys

from hybridrl.rewards.sandbox import run as sandbox
from hybridrl.rewards.sandbox.run import ProgramLimits, run

SECRET = "unguessable-4711"

_PROGRAM = """
import ctypes, mmap, os, sys
VICTIM, CALLER, FILE, SECRET, ME = {victim}, {caller}, {file!r}, "unguessable-" + str(4700 + 11), os.getpid()
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if (result := libc.syscall(number, *arguments)) == -1:
        raise OSError(ctypes.get_errno(), "denied")
    return result
def machine_code(code):
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
code, gained = sys.stdin.read(), None
for name in "fcntl gc glob io resource shutil signal socket subprocess tempfile threading time".split():
    if name + "." in code:
        globals()[name] = __import__(name)
try:
    exec(code)
except (Exception, SystemExit) as error:
    gained = None
print("ESCAPED" if gained is not None and gained is not False else "held")
"""

_SIGNAL_BY_PIPE = """
reader, writer = os.pipe()
{owner}
fcntl.fcntl(reader, 10, 9)
fcntl.fcntl(reader, 4, 0x2000)
os.write(writer, b"x")
gained = True
"""

_READ = {
    "a file": "open(FILE).read()",
    "a file by os.open": "os.read(os.open(FILE, os.O_RDONLY), 99)",
    "a file by open_code": "io.open_code(FILE).read()",
    "a file by shutil": "shutil.copyfile(FILE, '/dev/stdout') and None",
    "a file by a path relative to /proc": "open(f'/proc/{CALLER}/root{FILE}').read()",
    "a file of Python as a module": "sys.path.insert(0, os.path.dirname(FILE)) or __import__('secret_module')",
    "a file of Python by runpy": "__import__('runpy').run_path(FILE)",
    "a library": "ctypes.CDLL('/lib/x86_64-linux-gnu/libresolv.so.2')",
    "the memory of the caller": "open(f'/proc/{CALLER}/mem', 'rb')",
    "the environment of the caller": "open(f'/proc/{CALLER}/environ', 'rb').read()",
    "the maps of the caller": "open(f'/proc/{CALLER}/maps', 'rb').read()",
    "the command line of the caller": "open(f'/proc/{CALLER}/cmdline', 'rb').read()",
    "a descriptor of the caller": "open(f'/proc/{CALLER}/fd/0', 'rb')",
    "the path of a descriptor of the caller": "os.readlink(f'/proc/{CALLER}/fd/0')",
    "where the caller works": "os.readlink(f'/proc/{CALLER}/cwd')",
    "the memory of the parent": "open(f'/proc/{os.getppid()}/mem', 'rb')",
    "the environment of the parent": "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "the environment of its own": "open('/proc/self/environ', 'rb').read()",
    "its own memory as a file": "open('/proc/self/mem', 'rb')",
    "its own maps": "open('/proc/self/maps').read()",
    "its parent by a detour": "open(f'/proc/self/../{os.getppid()}/environ', 'rb').read()",
    "its threads' environment": "open('/proc/thread-self/environ').read()",
    "the users": "open('/etc/passwd').read()",
    "the passwords": "open('/etc/shadow').read()",
    "the kernel's settings": "open('/proc/sys/kernel/hostname').read()",
    "the mounts": "open('/proc/mounts').read()",
    "the connections": "open('/proc/net/tcp').read()",
    "the terminal": "open('/dev/tty')",
    "the kernel's messages": "open('/dev/kmsg')",
    "the machine's memory": "open('/dev/mem', 'rb')",
    "the processes": "os.listdir('/proc')",
    "the root directory": "os.listdir('/')",
    "a directory's entries": "[*os.scandir(os.path.dirname(FILE))]",
    "files by a pattern": "glob.glob('/tmp/*') or None",
    "shared memory": "os.listdir('/dev/shm')",
    "the home directory": "os.listdir(os.path.expanduser('~'))",
    "whether a file exists": "os.path.exists(FILE) or None",
    "a file's size": "os.stat(FILE).st_size",
    "the interpreter's path": "os.readlink('/proc/self/exe')",
    "a descriptor left open": "[os.fstat(fd) for fd in range(3, 1024)]",
    "a descriptor left open, any": "next(iter(fd for fd in range(3, 4096) if not libc.fcntl(fd, 1) == -1))",
    "the variables": "SECRET in str(dict(os.environ)) or None",
    "objects that are left over": "any(SECRET in o for o in gc.get_objects()"
    " if isinstance(o, (list, dict)) and o is not globals()) or None",
    "names of calling frames": "any(SECRET in str(f.f_locals.get(n)) for f in sys._current_frames().values()"
    " for n in ('tests', 'outputs')) or None",
}

_OTHERS = {
    "signal a process by a pipe": _SIGNAL_BY_PIPE.format(owner="fcntl.fcntl(reader, 8, VICTIM)"),
    "signal a group by a pipe": _SIGNAL_BY_PIPE.format(owner="fcntl.fcntl(reader, 8, -os.getpgid(0))"),
    "signal its caller by a pipe": _SIGNAL_BY_PIPE.format(owner="fcntl.fcntl(reader, 8, CALLER)"),
    "signal a thread by a pipe": _SIGNAL_BY_PIPE.format(
        owner="import struct\nfcntl.fcntl(reader, 15, struct.pack('ii', 0, VICTIM))"
    ),
    "signal without naming one": "r, w = os.pipe()\nfcntl.fcntl(r, 4, 0x2000)\ngained = True",
    "signal by ioctl": "r, w = os.pipe()\nfcntl.ioctl(r, 0x8901, VICTIM.to_bytes(4, 'little'))\ngained = True",
    "kill": "os.kill(VICTIM, 9)\ngained = True",
    "kill its caller": "os.kill(CALLER, 9)\ngained = True",
    "kill its group": "os.killpg(0, 9)\ngained = True",
    "kill by a descriptor": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9)\ngained = True",
    "kill by a timer": "call(222, 0, (ctypes.c_byte * 64)(), ctypes.byref(ctypes.c_int()))\ngained = True",
    "survive its parent": "gained = libc.prctl(1, 0, 0, 0, 0) == 0",
    "be dumped": "gained = libc.prctl(4, 1, 0, 0, 0) == 0",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\ngained = True",
    "change the caller's limits": "resource.prlimit(CALLER, resource.RLIMIT_CPU, (1, 1))\ngained = True",
    "read its caller's limits": "gained = resource.prlimit(CALLER, resource.RLIMIT_CPU)",
    "read its caller's memory": "call(310, CALLER, 0, 0, 0, 0, 0)\ngained = True",
    "write its caller's memory": "call(311, CALLER, 0, 0, 0, 0, 0)\ngained = True",
    "trace its caller": "gained = libc.ptrace(16, CALLER, 0, 0) == 0",
    "be traced": "gained = libc.ptrace(0, 0, 0, 0) == 0",
    "take a descriptor of its caller": "gained = call(438, call(434, CALLER, 0), 0, 0)",
    "a process": "gained = os.fork()",
    "a process by vfork": "gained = call(58)",
    "a process by clone": "gained = call(56, 17, 0, 0, 0, 0)",
    "a process by clone3": "gained = call(435, (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17), 88)",
    "a thread with mounts": "gained = call(56, 0x00010F00 | 0x00020000, 0, 0, 0, 0)",
    "a user namespace": "gained = call(272, 0x10000000) == 0",
    "a thread in a namespace": "gained = call(56, 0x10010F00, 0, 0, 0, 0)",
    "a sibling": "gained = call(56, 0x8000 | 17, 0, 0, 0, 0)",
    "another program": "os.execv('/bin/true', ['true'])",
    "another program by descriptor": "os.execve(1, ['true'], {})",
    "a child by subprocess": "gained = subprocess.run(['true']).returncode == 0",
    "a shell": "gained = os.system('true') == 0",
    "a socket": "gained = socket.socket()",
    "a local socket": "gained = socket.socket(socket.AF_UNIX)",
    "a pair of sockets": "gained = socket.socketpair()",
    "a name server": "gained = socket.gethostbyname('localhost')",
    "a raw socket": "gained = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "a netlink socket": "gained = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a file": "gained = open(FILE + '2', 'w')",
    "a file without a name": "gained = tempfile.TemporaryFile()",
    "a file in memory": "gained = os.memfd_create('x')",
    "a device": "gained = os.open('/dev/full', os.O_RDWR)",
    "a pipe with a name": "os.mkfifo(FILE + '2')\ngained = True",
    "a directory": "os.mkdir(FILE + '2')\ngained = True",
    "a link": "os.symlink(FILE, FILE + '2')\ngained = True",
    "a second name": "os.link(FILE, FILE + '2')\ngained = True",
    "delete": "os.unlink(FILE)\ngained = True",
    "cut": "os.truncate(FILE, 0)\ngained = True",
    "rename": "os.rename(FILE, FILE + '2')\ngained = True",
    "rights": "os.chmod(FILE, 0o777)\ngained = True",
    "times": "os.utime(FILE)\ngained = True",
    "attributes": "os.setxattr(FILE, 'user.x', b'')\ngained = True",
    "another directory": "os.chdir(os.path.dirname(FILE))\ngained = True",
    "another root": "os.chroot('/tmp')\ngained = True",
    "another user": "os.setuid(65534)\ngained = True",
    "capabilities": "gained = libc.capset(bytes(8), bytes(24)) == 0",
    "a longer output": "os.write(1, b'x' * (1 << 20))\ngained = os.fstat(1).st_size > 1 << 16",
    "an output that is stretched": "os.ftruncate(1, 1 << 30)\ngained = True",
    "the input stretched": "os.posix_fallocate(0, 0, 1 << 30)\ngained = True",
    "a larger pipe": "r, w = os.pipe()\nfcntl.fcntl(r, 1031, 1 << 20)\ngained = True",
    "a lock": "fcntl.lockf(1, fcntl.LOCK_EX)\ngained = True",
    "a lease": "fcntl.fcntl(0, 1024, 0)\ngained = True",
    "news of a directory": "fcntl.fcntl(0, 1026, 2)\ngained = True",
    "seals": "fcntl.fcntl(1, 1033, 8)\ngained = True",
    "typing into a terminal": "for fd in (0, 1, 2):\n    fcntl.ioctl(fd, 0x5412, b'x')\ngained = True",
    "memory that stays": "gained = libc.mlockall(3) == 0",
    "priority": "os.setpriority(os.PRIO_PROCESS, 0, -20)\ngained = True",
    "real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\ngained = True",
    "another core": "os.sched_setaffinity(0, [0])\ngained = True",
    "shared memory": "gained = libc.shmget(0, 4096, 0o1600) >= 0",
    "a queue of messages": "gained = libc.msgget(0, 0o1600) >= 0",
    "a semaphore": "gained = libc.semget(0, 1, 0o1600) >= 0",
    "a semaphore with a name": "gained = __import__('multiprocessing').Lock()",
    "many threads": "threading.stack_size(1 << 15)\nfor _ in range(500):\n"
    "    threading.Thread(target=time.sleep, args=[9]).start()\ntime.sleep(1)\ngained = True",
    "many descriptors": "gained = [os.pipe() for _ in range(100)]",
    "a number of the other interface": "gained = call(0x40000000 + 2, FILE.encode(), 0)",
    "a number beyond all": "gained = call((1 << 32) + 2, FILE.encode(), 0)",
    "a call of 32 bits": "gained = machine_code(bytes.fromhex('b814000000cd80c3'))() >= 0",
    "writing to its program's parent": "os.write(3, b'\"forged\"\\n')\ngained = True",
    "the filter off": "gained = libc.prctl(22, 0, 0, 0, 0) == 0 or libc.prctl(21, 0, 0, 0, 0) >= 0",
}

ATTEMPTS = {f"read {name}": f"gained = {code}" for name, code in _READ.items()} | _OTHERS


def without_landlock() -> None:
    """Start bare interpreters as if the kernel did not know Landlock."""
    patch = "import hybridrl.rewards.sandbox.confinement as c; c.give_up_files = lambda: None; main{descriptors}"
    sandbox.START = sandbox.START.replace("main{descriptors}", patch)


def main(victim: str, file: str, *options: str) -> None:
    if "without_landlock" in options:
        without_landlock()
    program = _PROGRAM.replace("{victim}", victim).replace("{caller}", str(os.getpid())).replace("{file!r}", repr(file))
    outputs = run(program, list(ATTEMPTS.values()), ProgramLimits(seconds=5.0, total_seconds=200.0))
    print(json.dumps(dict(zip(ATTEMPTS, outputs, strict=True))))


if __name__ == "__main__":
    main(*sys.argv[1:])
