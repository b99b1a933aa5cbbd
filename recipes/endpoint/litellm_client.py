"""litellm: a completion, a stream, and a response of a schema."""

import os

import litellm
from pydantic import BaseModel

OPTIONS = {
    "model": "openai/policy",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "messages": [{"role": "user", "content": "Is 1+2 positive?"}],
}


class Sum(BaseModel):
    positive: bool


def main() -> None:
    print("completion:", litellm.completion(**OPTIONS, max_tokens=20).choices[0].finish_reason)
    chunks = list(litellm.completion(**OPTIONS, max_tokens=20, stream=True))
    print("stream:", len(chunks), "chunks")
    shaped = litellm.completion(**OPTIONS, max_tokens=200, response_format=Sum)
    print("schema:", shaped.choices[0].message.content)


if __name__ == "__main__":
    main()
