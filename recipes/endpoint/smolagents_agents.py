"""smolagents: ToolCallingAgent and CodeAgent."""

import os

from smolagents import AgentError, CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


def main() -> None:
    model = OpenAIModel(
        model_id="policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        max_tokens=60,
    )
    for kind in (ToolCallingAgent, CodeAgent):
        agent = kind(tools=[add], model=model, max_steps=1, verbosity_level=0)
        try:
            print(f"{kind.__name__}:", repr(agent.run("What is 1+2?")))
        except AgentError as error:
            print(f"{kind.__name__}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
