"""Throughput of main_eval on short questions, scored and written to its file, against vLLM's own `generate` in turn.

python scripts/benchmark/evaluation.py [--questions 500] [--samples 4] [--rounds 5] [--devices 1]
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from bare import Generation
from child import Child, serve
from side_by_side import Row, arguments, formatted, in_turn, report
from warm_start import TOP, warm_start

from hybridrl.evaluation.config import load_eval_config
from hybridrl.evaluation.model import ModelEvaluation, sample_here
from hybridrl.evaluation.samples import Sample, SampleFile
from hybridrl.evaluation.targets import find_targets
from hybridrl.model_merger import whole_model
from hybridrl.runs.setup import Sessions, open_directory
from hybridrl.runtime.environment import fork_server, worker_environment

REWARD = TOP / "recipes" / "quickstart" / "reward.py"


class Bare(Generation):
    """vLLM alone with the requests of an evaluation."""

    def respond(self, file: str) -> int:
        """Generate responses to the requests in a file; return the number of their tokens."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        requests = json.loads(Path(file).read_text())
        prompts = [TokensPrompt(prompt_token_ids=request.pop("prompt")) for request in requests]
        options = {"logprobs": 0, "flat_logprobs": True, "detokenize": False}
        options["output_kind"] = RequestOutputKind.FINAL_ONLY
        sampling = [SamplingParams(**request, **options) for request in requests]
        outputs = self.engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def main() -> None:
    parser = arguments(__doc__, questions=4, samples=2, rounds=1, devices=1)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", help="a model's directory; default: the quickstart's warm start")
    parser.add_argument("--rows", help="a file of questions")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--devices", type=int, help="default: as a run; vLLM alone has one engine with all cores")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        report(compare(options, Path(place)), options.json)


def compare(options: argparse.Namespace, place: Path) -> list[Row]:
    """Time both sides in turn on the same requests."""
    if not (options.model and options.rows):
        made = dict(override.split("=", 1) for override in warm_start(1, place, options.tiny))
        options.model = options.model or made["actor_rollout_ref.model.path"]
        options.rows = options.rows or made["data.train_files"]
    config = load_eval_config(
        [
            f"eval.files={options.rows}",
            f"eval.models={options.model}",
            f"eval.n={options.samples}",
            "eval.temperature=1.0",
            "eval.max_tokens=64",
            "data.max_prompt_length=32",
            f"data.val_max_samples={options.questions}",
            f"trainer.device={options.device}",
            f"trainer.n_gpus_per_node={options.devices or 'null'}",
            f"reward.custom_reward_function.path={REWARD}",
        ]
    )
    evaluation = ModelEvaluation(config, *find_targets(config.eval.models))
    directory = open_directory(place / "evaluation", "eval.output_dir")
    model = whole_model(evaluation.target.path, place, "eval.models")
    wanted, tokens = evaluation.planned(), {}

    with ExitStack() as stack:
        forks = stack.enter_context(fork_server(config.trainer.device, {}, config.devices_per_machine, engine=True))
        sessions = stack.enter_context(closing(Sessions(forks)))
        runner = stack.enter_context(evaluation.runner(sessions, lambda _: model, directory))
        bare = stack.enter_context(start_bare(evaluation, model, place, options))

        def ours() -> None:
            count = [0]

            def keep(sample: Sample) -> None:
                file.append(sample)
                count[0] += sample.tokens

            with SampleFile(directory / "samples.jsonl", resume=False) as file:
                sample_here(runner, wanted, keep)
            tokens["ours"] = count[0]

        def theirs() -> None:
            tokens["theirs"] = bare.call("respond", file=str(place / "requests.json"))

        seconds = in_turn({"ours": ours, "theirs": theirs}, options.rounds)
    rates = {name: tokens[name] / seconds[name].median for name in tokens}
    ours, bare_vllm = (f"{rates[name]:,.0f} tokens/s, {formatted(seconds[name])}" for name in ("ours", "theirs"))
    devices, size = evaluation.config.trainer.n_gpus_per_node, f"{len(evaluation.questions)} x {options.samples}"
    what = f"main_eval on {devices} device{'s' * (devices > 1)}, {size} responses scored and written, over vLLM alone"
    return [Row(what, ours, bare_vllm, rates["ours"] / rates["theirs"], "at least 0.95")]


def start_bare(evaluation: ModelEvaluation, model: str, place: Path, options: argparse.Namespace) -> Child:
    """Start vLLM alone in a child process, and write the requests of the evaluation for it."""
    section = evaluation.config.actor_rollout_ref
    section.model.path = model
    torch.save((section.model, section.rollout, 1), place / "engine.pt")
    requests: list[dict[str, Any]] = [
        {
            "prompt": one.question.prompt.ids,
            "seed": one.seed,
            "max_tokens": one.sampling.max_tokens,
            "temperature": one.sampling.temperature,
            "stop_token_ids": list(one.sampling.stop_ids),
        }
        for one in evaluation.planned()
    ]
    (place / "requests.json").write_text(json.dumps(requests))
    command = [sys.executable, __file__, "--threads", str(options.threads)]
    child = Child([*command, "--device", evaluation.config.trainer.device], place / "bare.log")
    child.call("start", file=str(place / "engine.pt"))
    return child


def bare_side() -> None:
    """Serve as the child process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device")
    parser.add_argument("--pipes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sides: dict[str, Bare] = {}

    def start(file: str) -> None:
        sides["bare"] = Bare(file, options.device)

    serve(options.pipes, {"start": start, "respond": lambda file: sides["bare"].respond(file)})


if __name__ == "__main__":
    if "--pipes" not in sys.argv:
        main()
    else:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        if "cuda" not in sys.argv:  # must be set before vLLM is imported
            os.environ |= worker_environment("cpu", 1)
        bare_side()
