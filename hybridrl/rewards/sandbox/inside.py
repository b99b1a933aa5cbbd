"""Runs one program on several inputs, each in a process of its own that has given up what it does not need.

Started by `run.py` in a bare interpreter. It reads a job and writes, for each run, a JSON line: the output, or null
where the run failed. It has no expected output, so a program finds none in its memory.
"""

import json
import operator
import os
import sys
from typing import Any

from hybridrl.rewards.sandbox.confinement import hide
from hybridrl.rewards.sandbox.library import Library
from hybridrl.rewards.sandbox.processes import end_with_parent, execute, finish, start


def main(library: int) -> None:
    job = prepare(library)
    for given in job["inputs"]:
        if job["kind"] == "stdin":
            run = start(job, lambda: execute(job), given)
        else:
            run = start(job, lambda given=given: _call(job, given))
        print(json.dumps(finish(run, job["wall_seconds"])), flush=True)


def prepare(library: int) -> dict[str, Any]:
    """Make this a process from which programs may be started, and read the job."""
    end_with_parent(os.getppid())
    hide()
    Library(library).install()
    return json.load(sys.stdin)


def _call(job: dict[str, Any], given: Any) -> None:
    """Print the job's mark, which is in no output by chance, and what the program's function returns."""
    space, name = execute(job), job["function"]
    function = space[name] if name in space else operator.attrgetter(name)(space["Solution"]())
    print(f"\n{job['mark']}{json.dumps(function(*given))}")
