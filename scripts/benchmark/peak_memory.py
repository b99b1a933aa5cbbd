"""Peak memory of a command and its children: `python scripts/benchmark/peak_memory.py bash scripts/quickstart.sh`

The proportional set size counts memory that processes share once.
"""

import subprocess
import sys
import threading
from argparse import REMAINDER
from pathlib import Path

import psutil
from side_by_side import Arguments


def tree_bytes(pid: int) -> int:
    """Return the proportional set size of a process and its descendants."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(process_bytes(process.pid) for process in processes)


def process_bytes(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has just ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0)


def main() -> int:
    parser = Arguments(__doc__, seconds=0.1)
    parser.add_argument("--seconds", type=float, default=2.0, help="between samples")
    parser.add_argument("command", nargs=REMAINDER)
    options = parser.parse_args()
    process, peak, ended = subprocess.Popen(options.command), 0, threading.Event()
    threading.Thread(target=lambda: (process.wait(), ended.set()), daemon=True).start()
    while not ended.wait(options.seconds):
        peak = max(peak, tree_bytes(process.pid))
    print(f"peak memory {peak / 2**30:.2f} GiB")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
