"""The command `python -m hybridrl.model_merger`, with verl's arguments."""

import argparse
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

PROGRAM = "python -m hybridrl.model_merger"
ACTOR = "checkpoints/my/run/global_step_100/actor"
EPILOG = f"""for example:
  {PROGRAM} merge --backend fsdp --local_dir {ACTOR} --target_dir my_model
  {PROGRAM} test --backend fsdp --local_dir {ACTOR} --test_hf_dir my_model

Exit status: 0; 1 where files are damaged or a check failed; 2 where the command cannot be carried out.
"""
NO_EFFECT = {
    "use_cpu_initialization": "--use_cpu_initialization has no effect: nothing is initialised, tensors are only copied",
    "tie_word_embedding": "--tie-word-embedding has no effect: the model's config.json says what is tied",
}


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.backend == "megatron":
        parser.error("--backend megatron: only FSDP's shards are read here; verl's own merger converts Megatron's")
    if vars(arguments).get("verify") == "vllm" and find_spec("vllm") is None:
        parser.error("--verify vllm: vLLM is not installed; --verify transformers needs none")
    # torch and transformers: only once the command stands
    from hybridrl.model_merger.command import run

    for name, words in NO_EFFECT.items():
        if vars(arguments)[name]:
            print(words)
    return run(arguments, _further_check(vars(arguments).get("verify")))


def _further_check(name: str | None) -> Callable[..., str] | None:
    """The check that follows that of the tensors, if one is asked for."""
    if name == "transformers":
        from hybridrl.model_merger.transformers_check import check_in_transformers

        return check_in_transformers
    if name == "vllm":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # an engine of a few tokens, in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from hybridrl.model_merger.vllm_check import check_in_vllm

        return check_in_vllm
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Put the shards of a saved model together as a Hugging Face directory, and prove it equal to them. "
        "Reads hybridrl's saved steps, and those of verl with FSDP (1 and 2).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    operations = parser.add_subparsers(dest="operation", required=True, metavar="{merge,test}")
    options = {"parents": [_common()], "epilog": EPILOG, "formatter_class": parser.formatter_class}
    _add_merge(operations.add_parser("merge", help="write a Hugging Face directory and check it", **options))
    test = operations.add_parser("test", help="hold the shards against a Hugging Face directory", **options)
    test.add_argument("--test_hf_dir", type=Path, required=True, metavar="DIR", help="the directory to compare with")
    return parser


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--backend", choices=["fsdp", "megatron"], default="fsdp", help="what wrote the shards (fsdp)")
    add("--local_dir", type=Path, required=True, metavar="DIR", help="a saved model, .../global_step_N/actor")
    add("--base", metavar="DIR", help="the model that an adapter was trained on, where it has moved since")
    add("--is-value-model", action="store_true", help="a critic: told by its head too, if it has one")
    add("--trust-remote-code", action="store_true", help="run code that the model's config.json names")
    add("--tie-word-embedding", action="store_true", help="accepted, without effect: config.json says it")
    add("--use_cpu_initialization", action="store_true", help="accepted, without effect: nothing is initialised")
    return common


def _add_merge(merge: argparse.ArgumentParser) -> None:
    add = merge.add_argument
    add("--target_dir", type=Path, default=Path("tmp"), metavar="DIR", help="where to write (tmp)")
    add(
        "--lora",
        choices=["merged", "adapter", "both"],
        default="merged",
        help="what to write of a LoRA adapter: the model that it makes of its base (merged), itself as peft does "
        "(adapter), or both, the adapter in lora_adapter/ (merged)",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="type of the weights (that in which the run computed)",
    )
    add(
        "--verify",
        choices=["tensors", "transformers", "vllm"],
        default="tensors",
        help="beside each tensor bit for bit (tensors), answers of the loaded model in transformers or vLLM",
    )
    add("--hf_upload_path", metavar="REPO", help="upload to this Hugging Face repository, with the token in HF_TOKEN")
    add("--private", action="store_true", help="make that repository a private one")


if __name__ == "__main__":
    sys.exit(main())
