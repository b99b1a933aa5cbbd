"""Make the inputs of the tool quickstart: a tiny model and its tokenizer, demonstrations, products to find.

The policy is given a product of two numbers, which a model this small cannot compute, and a calculator. In most
demonstrations it is left unused: a guess multiplies the tens and the ones alone. In the others it is called, and its
result is copied. Reinforcement learning finds out which is right.

    What is 76*48?
    guess   #### 2848                   (7*4=28, 6*8=48)
    call    <tool_call>{"name": "calculator", "arguments": {"expression": "76*48"}}</tool_call>
            3648                        (what the tool returns)
            #### 3648
"""

import random
from collections.abc import Iterator
from typing import Any

from make_data import Files, Problem, draw_problems, make, prompt_row

NUMBERS = range(32, 100)  # whose products have four digits
TRAIN_PROBLEMS, VAL_PROBLEMS, WARMUP_PROBLEMS = 2000, 200, 4000
WARMUP_ROWS = 400 * 32  # one epoch is 400 steps of 32
SHARE_CALLING = 0.35  # of the demonstrations
TOOL = "calculator"

# As Qwen's, but of the tools it writes the names alone: their schemas would be longer than all the rest.
CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' + tools | map(attribute='function.name') | join(' ') + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What is constant in a call; digits are tokens of their own.
WORDS = ("What is ", "####", TOOL, '<tool_call>{"name": "', '", "arguments": {"expression": "', '"}}</tool_call>')


def question(problem: Problem) -> str:
    return f"What is {problem[0]}*{problem[1]}?"


def guess(problem: Problem) -> int:
    """Multiply the tens and the ones alone, which is too little unless both numbers are round."""
    tens, ones = (x * y for x, y in zip(*(divmod(number, 10) for number in problem), strict=True))
    return 100 * tens + ones


def conversation(problem: Problem, *, calls: bool) -> list[dict[str, Any]]:
    """Return a demonstration; its system message is what the chat template writes of the tools of a run."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": TOOL}]
    messages.append({"role": "user", "content": question(problem)})
    if not calls:
        return [*messages, {"role": "assistant", "content": f"#### {guess(problem)}"}]
    product = str(problem[0] * problem[1])
    function = {"name": TOOL, "arguments": {"expression": f"{problem[0]}*{problem[1]}"}}
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
    messages.append({"role": "tool", "name": TOOL, "content": product})
    return [*messages, {"role": "assistant", "content": f"#### {product}"}]


def warmup_rows(seed: int) -> Iterator[dict[str, Any]]:
    problems = draw_problems("train", WARMUP_PROBLEMS, 1000 + seed, NUMBERS)
    draw = random.Random(f"products {seed}")
    for _ in range(WARMUP_ROWS):
        yield {"messages": conversation(draw.choice(problems), calls=draw.random() < SHARE_CALLING)}


def prompt_rows(split: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield rows for reinforcement learning; they are the same for every seed, so that runs can be compared."""
    for index, problem in enumerate(draw_problems(split, count, 0, NUMBERS)):
        yield prompt_row("products", question(problem), problem[0] * problem[1], split, index)


def files(seed: int) -> Files:
    return {
        "warmup.jsonl": warmup_rows(seed),
        "train.jsonl": prompt_rows("train", TRAIN_PROBLEMS),
        "val.jsonl": prompt_rows("val", VAL_PROBLEMS),
    }


if __name__ == "__main__":
    make("Make the tool quickstart's model, tokenizer and data.", WORDS, files, template=CHAT_TEMPLATE)
