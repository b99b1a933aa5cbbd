"""OpenAI's agents SDK: an agent with a tool, over chat completions and over responses, and one with an output type."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Sum(BaseModel):
    positive: bool


@function_tool
def look(exact: bool) -> str:
    """Look the sum up."""
    return "3"


async def main() -> None:
    client = AsyncOpenAI()
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind("policy", client)
        once = ModelSettings(max_tokens=200, tool_choice="required")
        agent = Agent("adder", tools=[look], model=model, model_settings=once, tool_use_behavior="stop_on_first_tool")
        result = await Runner.run(agent, "What is 1+2?", max_turns=3)
        print(f"{kind.__name__}, tool:", result.final_output)
        shaped = Agent("adder", model=model, model_settings=ModelSettings(max_tokens=200), output_type=Sum)
        print(f"{kind.__name__}, output type:", (await Runner.run(shaped, "Is 1+2 positive?")).final_output)


if __name__ == "__main__":
    asyncio.run(main())
