"""OpenAI's client: a loop with a tool, its stream helper, and a parsed response."""

import json

from openai import LengthFinishReasonError, OpenAI
from pydantic import BaseModel

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": ADD}}]


class Sum(BaseModel):
    positive: bool


def loop(turns: int = 3) -> None:
    messages = [{"role": "user", "content": "What is 1+2?"}]
    for turn in range(turns):
        choice = "required" if turn == 0 else "auto"
        options = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
        answer = client.chat.completions.create(model="policy", messages=messages, **options).choices[0]
        messages.append(answer.message.model_dump(exclude_none=True))
        if not answer.message.tool_calls:
            break
        for call in answer.message.tool_calls:
            result = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    print("loop:", [message["role"] for message in messages])


def stream() -> None:
    question = [{"role": "user", "content": "What is 1+2?"}]
    with client.chat.completions.stream(model="policy", messages=question, max_tokens=20) as events:
        parts = [event.delta for event in events if event.type == "content.delta"]
        print("stream:", repr("".join(parts)))


def parse() -> None:
    question = [{"role": "user", "content": "Is 1+2 positive?"}]
    try:
        answer = client.chat.completions.parse(model="policy", messages=question, response_format=Sum, max_tokens=200)
        print("parse:", answer.choices[0].message.parsed)
    except LengthFinishReasonError as error:  # the model did not come to an end
        print("parse:", error)


if __name__ == "__main__":
    loop()
    stream()
    parse()
