"""The process of one agent: reads its episode from standard input, and writes what the agent returned."""

import asyncio
import os
import pickle
import signal
import sys
import traceback

from hybridrl.agents.endpoint.functions import call_agent
from hybridrl.runtime.guard import end_with_parent


def main() -> None:
    end_with_parent(os.getppid(), signal.SIGKILL)
    settings, *arguments = pickle.load(sys.stdin.buffer)
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the agent prints goes to the log
    try:
        answer = asyncio.run(call_agent(settings.load(), *arguments)), ""
    except Exception as error:  # whatever the user's function raises
        traceback.print_exc()
        answer = None, f"{type(error).__name__}: {error}"
    with result:
        pickle.dump(answer, result)


if __name__ == "__main__":
    main()
