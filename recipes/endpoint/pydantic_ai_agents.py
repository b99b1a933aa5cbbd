"""pydantic-ai: an agent with a tool, and output types by a tool and by a schema."""

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel


class Sum(BaseModel):
    positive: bool


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def main() -> None:
    model = OpenAIChatModel("policy")
    plain = Agent(model, tools=[add], model_settings={"max_tokens": 20})
    print("tools:", repr(plain.run_sync("What is 1+2?").output))
    for name, output in (("tool", Sum), ("schema", NativeOutput(Sum))):
        agent = Agent(model, output_type=output, model_settings={"max_tokens": 200})
        print(f"output type by {name}:", agent.run_sync("Is 1+2 positive?").output)


if __name__ == "__main__":
    main()
