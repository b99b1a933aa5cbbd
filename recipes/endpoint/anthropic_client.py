"""Anthropic's client: a message with a tool, its result, and a stream."""

import os

from anthropic import Anthropic

base_url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
client = Anthropic(base_url=base_url, api_key=os.environ["OPENAI_API_KEY"])
LOOK = {"type": "object", "properties": {"exact": {"type": "boolean"}}, "required": ["exact"]}
TOOLS = [{"name": "look", "description": "Look a number up.", "input_schema": LOOK}]


def main() -> None:
    options = {"model": "policy", "max_tokens": 200, "tools": TOOLS}
    messages = [{"role": "user", "content": "What is 1+2?"}]
    answer = client.messages.create(messages=messages, tool_choice={"type": "any"}, **options)
    messages.append({"role": "assistant", "content": answer.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
        for block in answer.content
        if block.type == "tool_use"
    ]
    if results:
        messages.append({"role": "user", "content": results})
        answer = client.messages.create(messages=messages, **options | {"max_tokens": 20})
    print("message:", answer.stop_reason, len(messages), "messages")
    with client.messages.stream(messages=messages[:1], model="policy", max_tokens=20) as events:
        print("stream:", repr("".join(events.text_stream)))


if __name__ == "__main__":
    main()
