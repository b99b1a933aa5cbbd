"""langchain-openai and langgraph: a reacting agent with a tool, and structured output."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel


class Sum(BaseModel):
    """Whether a sum is positive."""

    positive: bool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def main() -> None:
    model = ChatOpenAI(model="policy", max_tokens=200)
    agent = create_react_agent(model.bind(max_tokens=20), [add])
    state = agent.invoke({"messages": [("user", "What is 1+2?")]}, {"recursion_limit": 6})
    print("agent:", [message.type for message in state["messages"]])
    for method in ("json_schema", "function_calling"):
        print(f"{method}:", model.with_structured_output(Sum, method=method).invoke("Is 1+2 positive?"))


if __name__ == "__main__":
    main()
