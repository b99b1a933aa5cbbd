"""The process whose stacks scripts/benchmark/stacks.py requests: `stacks_actor.py LOG THREADS LONGEST WORK`

Its threads import modules again and again. Now and then one of them keeps the GIL, and adds up to LONGEST numbers. The
main thread waits, or computes without giving the GIL back.
"""

import argparse
import contextlib
import importlib
import random
import sys
import threading
import time

from hybridrl.runtime.guard import begin_actor

MODULES = (
    *("json.decoder", "csv", "fractions", "difflib", "html.parser"),
    *("tarfile", "email.parser", "http.cookies", "ast", "pdb"),
)


def imports(longest: int) -> None:
    while True:
        for name in MODULES:
            for module in [module for module in [*sys.modules] if module.startswith(name.split(".")[0])]:
                sys.modules.pop(module, None)
            sum(range(random.randrange(longest)) if random.random() < 0.1 else ())
            # Another thread may have removed a module meanwhile.
            with contextlib.suppress(ImportError, KeyError, AttributeError):
                importlib.import_module(name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log")
    parser.add_argument("threads", type=int, help="threads that import")
    parser.add_argument("longest", type=int, help="numbers that one of them adds at most, now and then")
    parser.add_argument("work", choices=["waits", "computes"], help="of the main thread")
    options = parser.parse_args()
    begin_actor(options.log)
    for _ in range(options.threads):
        threading.Thread(target=imports, args=[options.longest], daemon=True).start()
    print("ready", flush=True)
    if options.work == "computes":
        sum(range(10**12))
    time.sleep(9999)
