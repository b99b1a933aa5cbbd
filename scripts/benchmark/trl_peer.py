"""TRL's GRPOTrainer as a side of step.py, in a separate environment; runs a step on request.

python -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.19.0 accelerate datasets torchvision
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)


class Imposed(LogitsProcessor):
    """Ends each row after its number of tokens, not before."""

    def __init__(self, lengths: list[int], eos: int, prompt: int) -> None:
        self.lengths, self.eos, self.prompt = torch.tensor(lengths), eos, prompt

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        ends = self.lengths == input_ids.shape[1] - self.prompt + 1
        kept = scores[:, self.eos].masked_fill(~ends, -torch.inf)
        scores = scores.masked_fill(ends[:, None], -torch.inf)
        scores[:, self.eos] = torch.where(ends, 0.0, kept)
        return scores


class Peer(TrainerCallback):
    """Makes the trainer run a step per request from the pipe."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.responses = arguments, None
        request_end, reply_end = map(int, arguments.pipes.split(","))
        self.requests, self.replies = os.fdopen(request_end), os.fdopen(reply_end, "w")
        self.updates = json.loads(arguments.setting.read_text())["updates"]
        self.generating, self.tokens = 0.0, 0

    def on_step_begin(self, arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step % self.updates:
            return
        line = self.requests.readline()
        if not line:
            os._exit(0)
        self.responses = json.loads(line)[1].get("responses")
        self.began, self.generating, self.tokens = time.perf_counter(), 0.0, 0

    def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "grad_norm" in logs and state.global_step % self.updates == 0:
            reply = {"seconds": time.perf_counter() - self.began, "gen": self.generating, "tokens": self.tokens}
            reply |= {"grad_norm": logs["grad_norm"], "loss": logs["loss"]}
            print(json.dumps(reply), file=self.replies, flush=True)


def trainer(arguments: argparse.Namespace, peer: Peer) -> Any:
    from datasets import Dataset  # only --help works without these two
    from trl import GRPOConfig, GRPOTrainer

    setting = json.loads(arguments.setting.read_text())
    rows = [json.loads(line) for line in Path(setting["rows"]).read_text(encoding="utf-8").splitlines()]
    sees = "images" in rows[0]
    data = Dataset.from_list([(_with_picture if sees else dict)(row) | row["reward_model"] for row in rows])
    data = data.select_columns(["prompt", *rows[0]["reward_model"], *(["image"] if sees else [])])
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    reader = (AutoProcessor if sees else AutoTokenizer).from_pretrained(setting["model"], padding_side="left")
    tokenizer = reader.tokenizer if sees else reader
    responses = setting["responses"]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        learning_rate=setting["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        per_device_train_batch_size=arguments.micro,
        gradient_accumulation_steps=len(responses["lengths"]) // setting["updates"] // arguments.micro,
        steps_per_generation=len(responses["lengths"]) // arguments.micro,
        num_generations=responses["samples"],
        max_completion_length=responses["longest"],
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        shuffle_dataset=False,
        max_steps=10_000,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        optim="adamw_torch_fused",
    )
    grpo = GRPOTrainer(
        model=kind.from_pretrained(setting["model"], dtype=torch.float32),
        reward_funcs=lambda completion_ids, **_: [float(len(ids) % 7) for ids in completion_ids],
        args=config,
        train_dataset=data,
        processing_class=reader,
        callbacks=[peer],
    )
    _impose(grpo, peer, responses["lengths"], tokenizer.eos_token_id)
    return grpo


def _with_picture(row: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt as parts, with the picture itself."""
    from PIL import Image

    ((file,), (message,)) = row["images"], row["prompt"]
    parts = [{"type": "image"}, {"type": "text", "text": message["content"].removeprefix("<image>")}]
    return {"prompt": [message | {"content": parts}], "image": Image.open(file)}


def _impose(grpo: Any, peer: Peer, lengths: list[int], eos: int) -> None:
    """Generate responses of the imposed lengths, or use those of the request, to compare gradients."""
    turn, generate = grpo._generate_single_turn, grpo.model.generate

    def imposed(**inputs: Any) -> Any:
        processors = LogitsProcessorList([Imposed(lengths, eos, inputs["input_ids"].shape[1])])
        return generate(**inputs, logits_processor=processors)

    def timed(*inputs: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = (peer.responses, None) if peer.responses else turn(*inputs, **options)
        peer.generating += time.perf_counter() - began
        peer.tokens += sum(map(len, result[0]))
        return result

    grpo.model.generate, grpo._generate_single_turn = imposed, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("setting", type=Path, help="JSON file of step.py")
    parser.add_argument("--micro", type=int, default=16, help="rows per micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pipes", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer(arguments, Peer(arguments)).train()


if __name__ == "__main__":
    main()
