"""The process of one agent: reads its episode from standard input, and writes what the agent returned."""

import asyncio
import os
import pickle
import signal
import sys
import traceback

from hybridrl.agents.endpoint.functions import call_agent
from hybridrl.agents.environments.user_code import UserCodeError, contained
from hybridrl.runtime.guard import end_with_parent


def main() -> None:
    end_with_parent(os.getppid(), signal.SIGKILL)
    settings, *arguments = pickle.load(sys.stdin.buffer)
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the agent prints goes to the log
    try:
        with contained(settings.name):
            answer = asyncio.run(call_agent(settings.load(), *arguments)), ""
    except UserCodeError as error:
        traceback.print_exc()
        answer = None, str(error)
    with result:
        pickle.dump(answer, result)


if __name__ == "__main__":
    main()
