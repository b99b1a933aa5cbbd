"""Trains and uses a small pretrained model in every way, and writes a table in docs/models.md:

python scripts/benchmark/pretrained.py --model DIR [--only NAME ...] [--out DIR] [--docs FILE]

Each case is what a user does, by its commands, on the questions of recipes/pretrained: a causal language model without
a chat template is enough. The cases run one after another, and memory is the largest sum of the proportional set sizes
of their processes. A case that is complete in --out is not repeated. Exits with status 1 if a case failed: a command
did, engine and trainer differ by more than rounding, or a result is not what it must be. Gemma 3 270M takes an hour on
two cores, and 17 GiB (with a critic).
"""

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from urllib.request import Request, urlopen

import torch
from pretrained_bench import ACTOR, ROLLOUT, Bench, Failed, Result, make_toy
from side_by_side import Arguments
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_start import TOP

from hybridrl.doctor.selftest_resume import Kill, Selftest
from hybridrl.tracking import read_metrics
from hybridrl.tracking.records import read_records, records_of

BEGIN, END = "<!-- pretrained -->", "<!-- /pretrained -->"
# Steps of 64 answers, of which at first 6% are right, without validation.
SMALL = [
    "data.train_batch_size=8",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ROLLOUT}.n=8",
    f"{ROLLOUT}.max_num_seqs=64",
    "data.val_files=null",
    "trainer.total_training_steps=3",
    "trainer.test_freq=-1",
]
KEPT = [f"{ACTOR}.checkpoint.save_contents=[model]"]
# By name: differences from recipes/pretrained/train.yaml.
RUNS = {
    "grpo": ["trainer.total_training_steps=3", "trainer.test_freq=-1", *KEPT],
    "lora": [
        *SMALL,
        "actor_rollout_ref.model.lora_rank=32",
        "actor_rollout_ref.model.lora_alpha=64",
        f"{ACTOR}.optim.lr=1.0e-4",
    ],
    "critic": [*SMALL, "trainer.save_freq=-1", "algorithm.adv_estimator=gae"],
    "colocate_async": [*SMALL, "trainer.v1.trainer_mode=colocate_async", f"{ROLLOUT}.max_num_seqs=32"],
    "bfloat16": [*SMALL, f"{ACTOR}.fsdp_config.dtype=bfloat16", f"{ROLLOUT}.dtype=bfloat16"],
    "agent": [
        *SMALL,
        "reward.custom_reward_function.path=null",
        "data.max_response_length=160",
        f"{ROLLOUT}.multi_turn.max_assistant_response_length=16",
    ],
    "resume": [*SMALL, "trainer.deterministic=true"],
}
# Of the largest log-prob gap of a sampled token in float32, and of the mean of probabilities in bfloat16.
LARGEST_GAP, MEAN_GAP, GRADIENT = 1e-4, 0.01, 1e-5
# A response ends with its line, so what follows it begins with the next question.
TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message.role == "user" %}Question: {{ message.content }}
Answer:{% else %}{{ message.content }}{% endif %}{% endfor %}"""
SERVED = 8  # questions


# -- cases -------------------------------------------------------------------------------------------------------------


def sft(bench: Bench) -> str:
    """SFT of 100 steps of 8 rows, texts"""

    def rows(split: str) -> list[dict]:
        made = bench.recipe_rows(split)
        return [
            {"prompt": row["prompt"], "response": f" {row['reward_model']['ground_truth'].split('/')[0]}\n"}
            for row in made
        ]

    directory, (train, val) = bench.directory("sft"), bench.data("sft", rows)
    steps = 3 if bench.tiny else 100
    bench.hybridrl(
        directory / "log",
        "sft",
        f"data.train_files={train}",
        f"data.val_files={val}",
        f"model.path={bench.model}",
        "data.max_length=128",
        "data.train_batch_size=8",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=20",
        "trainer.ckpt_freq_secs=-1",
        f"trainer.default_local_dir={directory}/run",
    )
    metrics = read_metrics(directory / "run")
    losses = [values["train/loss"] for values in metrics.values() if "train/loss" in values]
    held_out = [values["val/loss"] for values in metrics.values() if "val/loss" in values]
    after = evaluation(bench, "sft", directory / "run" / f"global_step_{steps}")
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}, held out {held_out[-1]:.3f} afterwards; {after}"


def grpo(bench: Bench) -> str:
    """GRPO, float32: three steps of the recipe"""
    return of_run(bench.train("grpo"))


def evaluate(bench: Bench) -> str:
    """`hybridrl eval` of the model and of that after GRPO"""
    return evaluation(bench, "grpo", bench.out / "grpo" / "run")


def lora(bench: Bench) -> str:
    """GRPO with LoRA, rank 32"""
    return of_run(bench.train("lora"))


def critic(bench: Bench) -> str:
    """GAE with a critic"""
    metrics = bench.train("critic")
    losses = [values["critic/vf_loss"] for values in metrics.values() if "critic/vf_loss" in values]
    return f"{of_run(metrics)}; value loss {losses[0]:.3f} to {losses[-1]:.3f}"


def colocate_async(bench: Bench) -> str:
    """`colocate_async`, engines of 32 requests"""
    metrics = bench.train("colocate_async")
    partial = sum(values.get("partial/interrupted", 0.0) for values in metrics.values())
    return f"{of_run(metrics)}; {partial:.0f} responses continued"


def bfloat16(bench: Bench) -> str:
    """GRPO, bfloat16 in training and rollout"""
    metrics = bench.train("bfloat16")
    mean = max(values.get("training/rollout_probs_diff_mean", 0.0) for values in metrics.values())
    if mean >= MEAN_GAP:
        raise Failed(f"the probabilities of engine and trainer differ by {mean:.3g} on average")
    return f"{of_run(metrics, bound=1.0)}; probabilities differ by {mean:.1e} on average at most"


def agent(bench: Bench) -> str:
    """An agent of two turns at the endpoint"""

    def rows(split: str) -> list[dict]:
        texts = [(row, row["prompt"].partition(": ")[2].partition("\n")[0]) for row in bench.recipe_rows(split)]
        return [row | {"prompt": [{"role": "user", "content": text}]} for row, text in texts]

    train, _ = bench.data("agent", rows)
    template = bench.out / "data" / "template.jinja"
    template.write_text(TEMPLATE)
    metrics = bench.train(
        "agent",
        f"data.train_files={train}",
        f"{ROLLOUT}.agent.path={Path(__file__).with_name('pretrained_agent.py')}",
        f"actor_rollout_ref.model.custom_chat_template={template}",
    )
    turns = [values["num_turns/mean"] for values in metrics.values() if "num_turns/mean" in values]
    return f"{of_run(metrics)}; {fmean(turns):.2f} turns on average"


def of_run(metrics: dict[int, dict[str, float]], bound: float = LARGEST_GAP) -> str:
    """Return rewards and gaps of a run's steps. Raises Failed for a gap beyond the bound."""
    steps = [values for values in metrics.values() if "critic/score/mean" in values]
    gaps = [values[name] for values in steps for name in ("training/log_probs_diff_max",) if name in values]
    probe = max(values.get("training/probe_log_prob_diff", 0.0) for values in metrics.values())
    if not gaps or max(*gaps, probe) >= bound:
        raise Failed(f"log-probs of engine and trainer differ by {gaps} in the steps, {probe} in the probe")
    rewards = ", ".join(f"{values['critic/score/mean']:.3f}" for values in steps)
    return f"mean reward {rewards}; log-probs differ by {max(gaps):.1e} at most, by {probe:.1e} in the probe"


def resume(bench: Bench) -> str:
    """`kill -9` of the driver in the second of three steps, and the same command again"""
    directory = bench.directory("resume")
    words = [word for word in bench.recipe("resume") if not word.startswith("trainer.default_local_dir")]
    test = Selftest(words, critic=False, steps=3, directory=directory)
    test.run_unbroken()
    found = test.run_killed(directory / "killed", [Kill(1, "in the step", test.step_seconds / 2, "the driver")])
    if found:
        raise Failed("; ".join(found))
    return "; ".join([*test.kills, "metrics, samples, weights and moments as without it, bit for bit"])


def merge(bench: Bench) -> str:
    """`hybridrl merge` of that checkpoint; the merged model in transformers and served"""
    directory, saved = bench.directory("merge"), bench.out / "grpo" / "run" / "global_step_3" / "actor"
    merged = directory / "merged"
    words = ["merge", "--local_dir", saved, "--target_dir", merged, "--verify", "transformers"]
    bench.hybridrl(directory / "log", *words)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    prompts = [row["prompt"] for row in bench.recipe_rows("val")][: 2 if bench.tiny else SERVED]
    expected = [greedy(model, tokenizer, prompt) for prompt in prompts]
    del model
    served = serve(bench, directory, merged, prompts)
    trained = [*read_records(records_of(bench.out / "grpo" / "run", "samples")[3])]
    texts = {record.prompt: record.response for record in trained}
    gap, equal = 0.0, 0
    for prompt, (text, log_probs), (there, others) in zip(prompts, expected, served, strict=True):
        validated = next((response for given, response in texts.items() if given.endswith(prompt)), None)
        equal += text.rstrip("\n") == there == (validated or "").rstrip("\n")  # the server leaves what stops it out
        gap = max(gap, *(abs(one - other) for one, other in zip(log_probs, others, strict=False)))
    if equal < len(prompts) or gap >= LARGEST_GAP:
        raise Failed(f"{equal} of {len(prompts)} greedy texts are equal, log-probs differ by {gap:.2e}")
    return (
        f"tensors and log-probs equal bit for bit in transformers; {equal} of {len(prompts)} greedy responses of "
        f"transformers, the server and the run's validation equal, log-probs within {gap:.1e}"
    )


def gradient(bench: Bench) -> str:
    """Gradient of 8 answers against transformers in float64"""
    directory = bench.directory("gradient")
    errors = {}
    for dtype in ("float32", "bfloat16"):
        more = ["data.max_prompt_length=128"] * bench.tiny
        words = [__file__.replace("pretrained.py", "gradient.py"), "--model", bench.model, *more]
        words += [f"data.train_files={bench.out}/data/train.jsonl", f"data.val_files={bench.out}/data/val.jsonl"]
        bench.recipe_rows("train")
        text = bench.run(directory / f"{dtype}.log", *words, f"{ACTOR}.fsdp_config.dtype={dtype}")
        errors[dtype] = json.loads(text.splitlines()[-1])["relative_error"]
    if errors["float32"] > GRADIENT:
        raise Failed(f"relative error {errors['float32']:.2e} in float32")
    return "relative error {float32:.1e} in float32, {bfloat16:.1e} in bfloat16".format(**errors)


# By name, in the order in which they run: what they need is before them.
CASES = [sft, grpo, evaluate, merge, lora, critic, colocate_async, bfloat16, agent, resume, gradient]
NAMES = [case.__name__ for case in CASES]
NEEDS = {"evaluate": "grpo", "merge": "grpo"}


# -- their parts -------------------------------------------------------------------------------------------------------


def evaluation(bench: Bench, name: str, model: Path) -> str:
    """Evaluate a model and that which it was trained from on the held-out questions; return both with intervals."""
    before = bench.out / "eval-before"
    words = ["eval", *bench.recipe(name), "eval.n=8", "eval.temperature=1", "eval.greedy=true"]
    if not (before / "results.json").is_file():
        shutil.rmtree(before, ignore_errors=True)
        bench.hybridrl(bench.out / "eval-before.log", *words, f"eval.models={bench.model}", f"eval.output_dir={before}")
    after = bench.out / name / "eval"
    compared = [f"eval.models={model}", f"eval.output_dir={after}", f"eval.compare={before / bench.model.name}"]
    bench.hybridrl(bench.out / name / "eval.log", *words, *compared)
    return f"held-out questions right: {accuracy(before)}, afterwards {accuracy(after)}"


def accuracy(directory: Path) -> str:
    """Return the accuracy of greedy and of sampled responses, with the intervals of questions like these."""
    file = next(directory.rglob("results.json"))
    (dataset,) = json.loads(file.read_text())["datasets"].values()
    cells = [dataset[name] for name in ("greedy_acc", "avg")]
    texts = ["{:.3f} ({:.3f} to {:.3f})".format(cell["value"], *cell["alike"]) for cell in cells if cell["alike"]]
    return " greedy, ".join(texts) + " sampled"


def greedy(model: torch.nn.Module, tokenizer, prompt: str) -> tuple[str, list[float]]:
    """Return the most likely response up to the end of its line, and the log-probs of its tokens."""
    ids, log_probs = tokenizer(prompt).input_ids, []
    begin = len(ids)
    with torch.no_grad():
        for _ in range(16):
            row = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(row.argmax()))
            log_probs.append(float(row.max()))
            if ids[-1] == tokenizer.eos_token_id or "\n" in tokenizer.decode(ids[-1]):
                break
    return tokenizer.decode(ids[begin:], skip_special_tokens=True), log_probs


def serve(bench: Bench, directory: Path, model: Path, prompts: list[str]) -> list[tuple[str, list[float]]]:
    """Serve a model, and return its greedy responses and their log-probs."""
    log = directory / "serve.log"
    words = [sys.executable, "-m", "hybridrl", "serve", f"model.path={model}", "port=0", "rollout.max_num_seqs=8"]
    words.append("rollout.max_model_len=256")
    with log.open("w") as output:
        process = subprocess.Popen(words, cwd=TOP, stdout=output, stderr=output)
    try:
        while not (found := re.search(r"http://[\w.:]+", log.read_text())):
            if process.poll() is not None:
                raise Failed(f"{log}: {log.read_text()[-300:]}")
            time.sleep(0.5)
        body = {"model": "policy", "max_tokens": 16, "temperature": 0, "logprobs": 1, "stop": ["\n"]}
        return [complete(f"{found[0]}/v1/completions", body | {"prompt": prompt}) for prompt in prompts]
    finally:
        process.terminate()
        process.wait(60)


def complete(url: str, body: dict) -> tuple[str, list[float]]:
    request = Request(url.replace("/v1/v1", "/v1"), json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=300) as response:
        choice = json.loads(response.read())["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


# -- results -----------------------------------------------------------------------------------------------------------


def table(results: list[Result]) -> str:
    lines = ["| what | minutes | GiB | result |", "|---|--:|--:|---|"]
    for one in results:
        ending = f"fails: {one.failed}" if one.failed else one.figures
        lines.append(f"| {one.what} | {one.minutes:.1f} | {one.gib:.1f} | {ending} |")
    return "\n".join(lines)


def main() -> int:
    parser = Arguments(__doc__, only=["merge", "agent", "gradient"])
    parser.add_argument("--model", type=Path, help="the directory of a pretrained model; --tiny makes one")
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    parser.add_argument("--out", type=Path, default=TOP / "outputs" / "every", help="directory of the cases")
    parser.add_argument("--docs", type=Path, help=f"write the table between {BEGIN} and {END} of this file")
    options = parser.parse_args()
    out: Path = options.out.absolute()
    (out / "data").mkdir(parents=True, exist_ok=True)
    if options.model is None and not options.tiny:
        parser.error("--model is needed")
    bench = Bench(make_toy(out / "toy") if options.tiny else options.model.absolute(), out, RUNS, tiny=options.tiny)
    wanted = {*options.only, *(NEEDS[name] for name in options.only if name in NEEDS)}
    for name in NAMES:
        file = out / f"{name}.json"
        if name not in wanted or file.is_file():
            continue
        case = CASES[NAMES.index(name)]
        result = bench.measured(case, Result(name, (case.__doc__ or "").strip()))
        print(f"{name}: {result}", flush=True)
        if not result.failed:
            file.write_text(json.dumps(asdict(result), indent=1))
    results = [Result(**json.loads(file.read_text())) for name in NAMES if (file := out / f"{name}.json").is_file()]
    print(table(results))
    if options.docs:
        before, _, rest = options.docs.read_text().partition(BEGIN)
        options.docs.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}")
    return int(len(results) < len(options.only))


if __name__ == "__main__":
    sys.exit(main())
