"""The lower bound of a step, as a side of step.py: vLLM's own `generate`, and a torch loop without Ray and FSDP over
the model, loss and micro-batches of a run."""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from child import serve
from PIL import Image
from torch.nn.utils import clip_grad_norm_

from hybridrl.core.batch import Batch
from hybridrl.core.training.loading import fill
from hybridrl.core.training.losses import LossConfig, policy_loss
from hybridrl.core.training.model import HOST, blank_language_model
from hybridrl.core.training.packing import pack_rows
from hybridrl.core.training.planning import MiniBatch
from hybridrl.core.training.vision import Vision
from hybridrl.runtime.environment import worker_environment


class Generation:
    """Plain vLLM with the arguments that a run gives it."""

    def __init__(self, file: str, device: str) -> None:
        from vllm import LLM

        from hybridrl.core.rollout.vllm.engine import vllm_arguments

        arguments = vllm_arguments(device, *torch.load(file, weights_only=False))
        for name in ("weight_transfer_config", "worker_extension_cls", "load_format"):
            arguments.pop(name, None)
        self.model = arguments["model"]
        self.engine = LLM(**arguments)

    def generate(self, file: str) -> dict[str, Any]:
        """Generate responses to the requests in a file; return their tokens and the time."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        requests = json.loads(Path(file).read_text())
        prompts = [TokensPrompt(prompt_token_ids=request["prompt"]) for request in requests]
        for prompt, request in zip(prompts, requests, strict=True):
            if files := request.get("images"):
                prompt["multi_modal_data"] = {"image": [Image.open(file) for file in files]}
        sampling = [
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
        outputs = self.engine.generate(prompts, sampling, use_tqdm=False)
        seconds, cpu = time.perf_counter() - began, _cpu() - cpu
        responses = [list(output.outputs[0].token_ids) for output in outputs]
        self.engine.reset_prefix_cache()
        return {"seconds": seconds, "cpu": cpu, "responses": responses}

    def keep_weights(self) -> int:
        """Keep the model's tensors in this process, with the names of the checkpoint. Returns their size in bytes."""
        from safetensors.torch import load_file

        directory = Path(self.model)
        self.weights = {
            name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
        }
        self.weights = {name: tensor.clone() for name, tensor in self.weights.items()}
        return sum(tensor.nbytes for tensor in self.weights.values())

    def reload(self) -> None:
        """Reload weights by vLLM's own call, and refresh the head, which is stale on CPU if it is the embedding."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        def refresh(model: torch.nn.Module) -> None:
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(self.weights.items())})
        self.engine.apply_model(refresh)
        self.engine.reset_prefix_cache()


class Updates:
    """A model and AdamW in this process; rows, micro-batches and loss are those of a run."""

    def __init__(self, file: str) -> None:
        settings = torch.load(file, weights_only=False)
        self.model = blank_language_model(settings["model"], torch.float32)
        if (vision := settings.get("vision")) is not None:
            self.model.vision = Vision(vision, self.model.model)
        fill(self.model.model, settings["model"].path, HOST)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.01, **settings["optimizer"])
        self.model.train()

    def update(self, file: str) -> dict[str, float]:
        batch, mini_batches, loss, pixels = torch.load(file, weights_only=False)
        if vision := self.model.vision:
            vision.fetch = lambda digests: [pixels[digest] for digest in digests]
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
        for rows in mini_batch.micro_batches:
            part = batch.select(rows)
            inputs = pack_rows(part, padded=False)
            if vision := self.model.vision:
                inputs = vision.inputs(part, inputs)
            outputs = self.model(inputs, loss.temperature, entropies=True)
            micro_batch_loss, _ = policy_loss(outputs, part, mini_batch.totals, loss)
            micro_batch_loss.backward()
            total += float(micro_batch_loss.detach())
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
    sides: dict[str, Any] = {}

    def start_engine(file: str) -> None:
        sides["engine"] = Generation(file, arguments.device)

    def start_updates(file: str) -> None:
        sides["updates"] = Updates(file)

    serve(
        arguments.pipes,
        {
            "start_engine": start_engine,
            "start_updates": start_updates,
            "keep_weights": lambda: sides["engine"].keep_weights(),
            "reload": lambda: sides["engine"].reload(),
            "generate": lambda file: sides["engine"].generate(file),
            "update": lambda file: sides["updates"].update(file),
        },
    )


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    if "cuda" not in sys.argv:  # must be set before vLLM is imported
        os.environ |= worker_environment("cpu", 1)
    sys.exit(main())
