"""What a step is at the least, as a side of step.py: vLLM's own `generate`, and a loop of torch without Ray and FSDP
over a run's own model, loss and passes."""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from child import serve
from torch.nn.utils import clip_grad_norm_

from hybridrl import device as devices
from hybridrl.batch import Batch
from hybridrl.training.learner import MiniBatch
from hybridrl.training.losses import LossConfig, policy_loss
from hybridrl.training.model import load_language_model
from hybridrl.training.packing import lay_out


class Generation:
    """vLLM in its plainest form, with the arguments that a run gives it."""

    def __init__(self, file: str, device: str) -> None:
        from vllm import LLM

        from hybridrl.rollout.vllm.engine import engine_arguments

        arguments = engine_arguments(device, *torch.load(file, weights_only=False))
        for name in ("weight_transfer_config", "worker_extension_cls", "load_format"):
            arguments.pop(name, None)
        self.model = arguments["model"]
        self.engine = LLM(**arguments)

    def generate(self, file: str) -> dict[str, Any]:
        """Answers to a file's requests; their tokens are counted and returned."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        requests = json.loads(Path(file).read_text())
        prompts = [TokensPrompt(prompt_token_ids=request["prompt"]) for request in requests]
        drawn = [
            SamplingParams(
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                seed=request["seed"],
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for request in requests
        ]
        began, cpu = time.perf_counter(), _cpu()
        outputs = self.engine.generate(prompts, drawn, use_tqdm=False)
        seconds, cpu = time.perf_counter() - began, _cpu() - cpu
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        self.engine.reset_prefix_cache()
        return {"seconds": seconds, "cpu": cpu, "answers": answers}

    def keep_weights(self) -> int:
        """Hold the model's tensors in this process, as a checkpoint names them. Returns their bytes."""
        from safetensors.torch import load_file

        directory = Path(self.model)
        self.weights = {
            name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
        }
        self.weights = {name: tensor.clone() for name, tensor in self.weights.items()}
        return sum(tensor.nbytes for tensor in self.weights.values())

    def reload(self) -> None:
        """vLLM's own way to take new weights, and the head, which it leaves stale on CPU where it is the embedding."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        def refresh(model: torch.nn.Module) -> None:
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(self.weights.items())})
        self.engine.apply_model(refresh)
        self.engine.reset_prefix_cache()


class Updates:
    """A model and AdamW in this process; rows, passes and loss are those of a run."""

    def __init__(self, file: str) -> None:
        given = torch.load(file, weights_only=False)
        self.model = load_language_model(given["model"], torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.01, **given["optimizer"])
        self.model.train()

    def update(self, file: str) -> dict[str, float]:
        batch, mini_batches, loss = torch.load(file, weights_only=False)
        began, cpu = time.perf_counter(), _cpu()
        norms, losses = zip(*(self._mini_batch(batch, mini_batch, loss) for mini_batch in mini_batches), strict=True)
        return {
            "seconds": time.perf_counter() - began,
            "cpu": _cpu() - cpu,
            "grad_norm": sum(norms) / len(norms),
            "loss": sum(losses) / len(losses),
        }

    def _mini_batch(self, batch: Batch, mini_batch: MiniBatch, loss: LossConfig) -> tuple[float, float]:
        total = 0.0
        for rows in mini_batch.passes:
            part = batch.select(rows)
            found = self.model(lay_out(part, padded=False), loss.temperature, entropies=True)
            share, _ = policy_loss(found, part, mini_batch.totals, loss)
            share.backward()
            total += float(share.detach())
        norm = float(clip_grad_norm_(self.model.parameters(), loss.grad_clip))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, total


def _cpu() -> float:
    from side_by_side import cpu_seconds

    return cpu_seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pipes", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    made: dict[str, Any] = {}

    def start_engine(file: str) -> None:
        made["engine"] = Generation(file, arguments.device)

    def start_updates(file: str) -> None:
        made["updates"] = Updates(file)

    serve(
        arguments.pipes,
        {
            "start_engine": start_engine,
            "start_updates": start_updates,
            "keep_weights": lambda: made["engine"].keep_weights(),
            "reload": lambda: made["engine"].reload(),
            "generate": lambda file: made["engine"].generate(file),
            "update": lambda file: made["updates"].update(file),
        },
    )


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    if "cuda" not in sys.argv:  # must stand before vLLM is imported
        os.environ |= devices.environment("cpu", 1)
    sys.exit(main())
