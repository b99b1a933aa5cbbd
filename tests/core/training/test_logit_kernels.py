"""The CUDA kernels: run by Triton's interpreter and compared with full logits, and compiled for various GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from hybridrl.config.catalog import Divergence
from hybridrl.core.training.heads import LogitRule
from tests.core.training.head_cases import MASKED, VOCABULARY, case, check, chunks_of, loss_gradient

triton = pytest.importorskip("triton")
TOP = Path(__file__).parents[3]
CAPPED = LogitRule(0.3, 2.0)
KINDS = [Divergence("reverse_kl"), Divergence("forward_kl"), Divergence("jsd", 0.3)]
ENTROPIES = {"entropies": True, "entropy_gradient": True}
ALL = ENTROPIES | {"sum_pi_squared": True, "against": True}


def check_interpreted() -> None:
    """Run in a separate process: Triton decides at import whether kernels are interpreted."""
    from hybridrl.core.training import heads, logit_kernels, token_outputs

    logit_kernels.BLOCK = 4  # of the cases' 13 logits: several blocks, the last one not full
    made = []

    class Counted(logit_kernels.LogitKernels):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    token_outputs.LogitTables = Counted
    with pytest.MonkeyPatch.context() as patch:
        chunks_of(4, patch)
        patch.setattr(logit_kernels, "UNREACHED", heads.UNREACHED)
        for seed, early in enumerate([None, loss_gradient]):
            check(case(seed, loss_gradient=early))
            check(case(seed, loss_gradient=early, temperature=0.6, **ENTROPIES))
            check(case(seed, loss_gradient=early, **ALL))
            check(case(seed, loss_gradient=early, rule=CAPPED, bias=True, temperature=0.6, **ALL))
            for rows in (VOCABULARY - 6, VOCABULARY + 4):
                check(case(seed, loss_gradient=early, temperature=0.6, other_rows=rows, **ALL))
            check(case(seed, loss_gradient=early, masked=MASKED, **ALL))
            check(case(seed, loss_gradient=early, masked=MASKED, other_rows=VOCABULARY - 2, temperature=0.6, **ALL))
            for kind in KINDS:
                masked = () if kind.kind == "forward_kl" else MASKED  # it would be infinite
                check(case(seed, loss_gradient=early, divergence=kind, temperature=0.6))
                check(case(seed, loss_gradient=early, divergence=kind, rule=CAPPED, masked=masked, **ALL))
                for rows in (VOCABULARY - 6, VOCABULARY + 4):
                    check(case(seed, loss_gradient=early, divergence=kind, teacher_rows=rows, temperature=0.6, **ALL))
    assert made, "the kernels were not called"


@pytest.mark.skipif(Version(triton.__version__) < Version("3.9"), reason="older interpreters do not take NumPy 2.4")
def test_outputs_and_gradients_match_full_logits():
    code = "from tests.core.training.test_logit_kernels import check_interpreted as check; check()"
    command, variables = [sys.executable, "-c", code], os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, cwd=TOP, env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


OF_LOGITS = r"tensor<\d+x!tt\.ptr<bf16>>"
FIRST, SECOND = (f"{name} {name}_normalisers {name}_shares {name}_levels by_{name}" for name in ("first", "second"))


@pytest.mark.parametrize("capability", [80, 90, 100], ids=["A100", "H100", "B200"])
@pytest.mark.parametrize(
    ("kernel", "given", "loads", "stores"),
    [
        ("_outputs", "log_probs", 1, 0),
        ("_outputs", "log_probs entropies squares", 1, 0),
        ("_divergence reverse_kl", "", 3, 0),  # the policy's once more if the other model has fewer tokens
        ("_divergence forward_kl", "", 3, 0),
        ("_divergence jsd", "", 3, 0),
        ("_gradient", "by_log_probs", 1, 1),
        ("_gradient", "by_log_probs entropies by_entropies", 1, 1),
        ("_gradient reverse_kl", f"by_log_probs entropies by_entropies {FIRST}", 2, 1),
        ("_gradient jsd", f"by_log_probs entropies by_entropies {FIRST} {SECOND}", 3, 1),
    ],
)
def test_a_kernel_reads_each_logit_once_and_needs_no_memory_but_registers(kernel, given, loads, stores, capability):
    compiled = compile_for(capability, kernel, {f"{name}_at" for name in given.split()})
    actual = [len(re.findall(rf"tt\.{what}.*{OF_LOGITS}", compiled.asm["ttir"])) for what in ("load", "store")]
    assert actual == [loads, stores]
    assert ".local" not in compiled.asm["ptx"]  # registers spilled to memory
    assert compiled.asm["cubin"]


def compile_for(capability: int, kernel: str, given: set[str]):
    """Compile a kernel, with its kind of divergence, for a GPU, with bfloat16 logits and these addresses."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hybridrl.core.training import logit_kernels

    kernel, _, kind = kernel.partition(" ")
    function, types = vars(logit_kernels)[kernel], {}
    for name in function.arg_names:
        types[name] = "*fp32" if name.endswith("_at") else "fp32"
    types |= dict.fromkeys(["vocabulary", "common", "first_rows", "second_rows"], "i32") | {"targets_at": "*i64"}
    types |= dict.fromkeys(["logits_at", "others_at", "first_at", "second_at"], "*bf16")
    always = {"logits_at", "targets_at", "normalisers_at"}
    addresses = {name for name in types if name.endswith("_at")}
    absent = set() if kernel == "_divergence" else addresses - given - always
    absent |= {name for name in types if name.endswith("cap")}
    of_kind = dict.fromkeys(["KIND", "FIRST_KIND", "SECOND_KIND"], logit_kernels.KINDS.get(kind))
    constants = {"BLOCK": logit_kernels.BLOCK} | of_kind | dict.fromkeys(absent)
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=places)
    options = {"num_warps": logit_kernels.WARPS}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
