"""The command `hybridrl merge`, with verl's arguments."""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.checks.training import this_machine
from hybridrl.runtime.environment import worker_environment

PROGRAM = "hybridrl merge"
ACTOR = "checkpoints/my/run/global_step_100/actor"
EPILOG = f"""for example:
  {PROGRAM} --local_dir {ACTOR} --target_dir my_model
  {PROGRAM} test --local_dir {ACTOR} --test_hf_dir my_model

Exit status: 0; 1 if files are damaged or a check failed; 2 if the command cannot be carried out.
"""
NO_EFFECT = {
    "use_cpu_initialization": "--use_cpu_initialization has no effect: nothing is initialised, tensors are only copied",
    "tie_word_embedding": "--tie-word-embedding has no effect: the model's config.json states what is tied",
}


def main(argv: list[str] | None = None) -> int:
    parser = command_parser()
    arguments = parser.parse_args(argv)
    if arguments.backend == "megatron":
        parser.error("--backend megatron: only FSDP shards are supported; verl's own merger converts Megatron's")
    verify = vars(arguments).get("verify")
    if verify == "vllm" and find_spec("vllm") is None:
        parser.error("--verify vllm: vLLM is not installed; --verify transformers does not need it")
    if verify == "vllm":  # before torch is imported, which reads it
        os.environ |= worker_environment("cuda" if this_machine().gpus else "cpu", 1)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Imports torch and transformers, so only once the command is known to be valid.
    from hybridrl.core.rollout.vllm.settings import ENVIRONMENT
    from hybridrl.model_merger.merge import run
    from hybridrl.model_merger.source import check_in_transformers, check_in_vllm

    for name, message in NO_EFFECT.items():
        if vars(arguments)[name]:
            print(message)
    os.environ |= ENVIRONMENT if verify == "vllm" else {}
    return run(arguments, {"vllm": check_in_vllm, "transformers": check_in_transformers}.get(verify))


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Merge the shards of a saved model into a Hugging Face directory and verify it against them. "
        "Reads checkpoints of hybridrl, and of verl with FSDP (1 and 2).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--backend", choices=["fsdp", "megatron"], default="fsdp", help="what wrote the shards (fsdp)")
    add("--local_dir", type=Path, required=True, metavar="DIR", help="a saved model, .../global_step_N/actor")
    add("--base", metavar="DIR", help="the model that an adapter was trained on, if it has moved since")
    add("--is-value-model", action="store_true", help="a critic; detected by its head too, if it has one")
    add("--trust-remote-code", action="store_true", help="run code that the model's config.json names")
    add("--tie-word-embedding", action="store_true", help="accepted without effect: config.json states it")
    add("--use_cpu_initialization", action="store_true", help="accepted without effect: nothing is initialised")
    operations = parser.add_subparsers(dest="operation", required=True, metavar="{merge,test}")
    options = {"parents": [common], "epilog": EPILOG, "formatter_class": parser.formatter_class}
    merge = operations.add_parser("merge", prog=PROGRAM, help="write a Hugging Face directory and check it", **options)
    add = merge.add_argument
    add("--target_dir", type=Path, default=Path("tmp"), metavar="DIR", help="where to write (tmp)")
    lora = (
        "what to write for a LoRA adapter: base and adapter merged (merged), the adapter in peft's layout (adapter), "
    )
    lora += "or both, the adapter in lora_adapter/ (merged)"
    add("--lora", choices=["merged", "adapter", "both"], default="merged", help=lora)
    dtypes = ["float32", "bfloat16", "float16"]
    add("--dtype", choices=dtypes, help="type of the weights (the one that the run computed in)")
    verify = "check each tensor bit for bit (tensors), and also outputs of the loaded model in transformers or vLLM"
    add("--verify", choices=["tensors", "transformers", "vllm"], default="tensors", help=verify)
    add("--hf_upload_path", metavar="REPO", help="upload to this Hugging Face repository, with the token in HF_TOKEN")
    add("--private", action="store_true", help="create that repository as a private one")
    test = operations.add_parser("test", help="compare the shards with a Hugging Face directory", **options)
    test.add_argument("--test_hf_dir", type=Path, required=True, metavar="DIR", help="the directory to compare with")
    return parser


if __name__ == "__main__":
    sys.exit(main())
