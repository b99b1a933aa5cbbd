"""Generated requests of every form, sent by the command that also fuzzes a real run and a real server."""

import asyncio
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[3] / "scripts" / "benchmark" / "fuzz_endpoint.py"


@pytest.mark.slow
async def test_generated_requests_are_answered_without_a_failure(endpoint):
    async with endpoint(lambda prompt: '<tool_call>{"name": "look", "arguments": {}}</tool_call>') as served:
        command = (sys.executable, FUZZ, served.address, "--count", "100")
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, status = (await process.communicate())[0].decode(), process.returncode
    assert status == 0 and output.count("100 requests") == 4, output
