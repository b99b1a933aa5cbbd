"""The cost of log-probs relative to the matrix products of the head, and their memory, on CPU in float32:

python scripts/benchmark/log_probs.py [--tokens N] [--rounds N] [--json FILE]

Heads of width 1,024 with a vocabulary of 32,000, and of width 640 with one of 262,144 and a quarter of the tokens; one
thread. A head's three products (logits, the gradients of hidden states and of the weight) are timed in turn with the
log-probs' forward and backward pass; values are ratios of the medians. Each peak is measured in a separate process.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from side_by_side import Row, arguments, formatted, in_turn, report

from hybridrl.core.training.heads import Head
from hybridrl.core.training.token_outputs import OutputSpec, TokenOutputs, token_outputs

HEAD, LARGE, LONG = (1024, 32_000), (640, 262_144), (8192, 896, 151_936)  # width, vocabulary; the tokens before them


class Case:
    """The input of a head, its weight, and a loss that is a weighted sum of log-probs."""

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, width, requires_grad=True)
        self.weight = torch.empty(vocabulary, width).normal_(std=0.03).requires_grad_()
        self.targets = torch.randint(vocabulary, (tokens,))
        self.loss_weights = torch.randn(tokens)

    def log_probs(self, spec: OutputSpec) -> TokenOutputs:
        return token_outputs(self.hidden, Head(self.weight), self.targets, spec)

    def any_loss(self) -> None:
        self._backward(OutputSpec())

    def sum_over_tokens(self) -> None:
        self._backward(OutputSpec(loss_gradient=lambda _, span: TokenOutputs(self.loss_weights[span])))

    def entropies_alone(self) -> None:
        with torch.no_grad():
            self.log_probs(OutputSpec(entropies=True))

    def _backward(self, spec: OutputSpec) -> None:
        self.hidden.grad = self.weight.grad = None
        (self.log_probs(spec).log_probs * self.loss_weights).sum().backward()

    def products(self) -> Callable[[], None]:
        """Return a function that computes the three products into allocated memory."""
        hidden, weight = self.hidden.detach(), self.weight.detach()
        logits = torch.zeros(len(hidden), len(weight))
        by_hidden, by_weight = torch.zeros_like(hidden), torch.zeros_like(weight)

        def work() -> None:
            torch.mm(hidden, weight.t(), out=logits)
            torch.mm(logits, weight, out=by_hidden)
            torch.mm(logits.t(), hidden, out=by_weight)

        return work


def times(tokens: int, head: Sequence[int], rounds: int) -> list[Row]:
    case = Case(tokens, *head)
    sides = {"products": case.products(), "any": case.any_loss, "sum": case.sum_over_tokens}
    seconds = in_turn(sides, rounds)
    rows = []
    for side, what, target in (
        ("any", f"log-probs and gradients, any loss, {head[1]:,} rows", "at most 1.6 (aim 1.45)"),
        ("sum", f"log-probs and gradients, a sum over tokens, {head[1]:,} rows", "at most 1.2 (aim 1.1)"),
    ):
        cost = seconds[side].median / seconds["products"].median
        rows.append(
            Row(what, formatted(seconds[side]), f"three matrix products {formatted(seconds['products'])}", cost, target)
        )
    return rows


def peaks(tokens: int, head: Sequence[int], long: Sequence[int]) -> list[Row]:
    full, full_alone = 4 * tokens * head[-1], 4 * long[0] * long[-1]
    learning, alone = peak_of("sum", tokens, *head), peak_of("alone", *long)
    return [
        Row(
            "peak of that, gradients included",
            f"{learning / 2**20:.0f} MiB",
            f"full logits {full / 2**20:.0f} MiB",
            learning / full,
            "at most 0.5 (aim 0.4)",
        ),
        Row(
            f"peak of log-probs and entropies alone, {long[0]:,} tokens x {long[-1]:,}",
            f"{alone / 2**30:.2f} GiB",
            f"full logits {full_alone / 2**30:.2f} GiB",
            alone / 2**30,
            "at most 1 GiB (aim 0.5)",
        ),
    ]


def peak_of(kind: str, *shape: int) -> int:
    """Return the peak in bytes, in addition to inputs and weight, in a separate process."""
    command = [sys.executable, __file__, "--peak", kind, *map(str, shape)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_peak(kind: str, *shape: int) -> None:
    # Libraries allocate memory on first use.
    Case(2, 8, 16).sum_over_tokens()
    case = Case(*shape)
    before = resident("VmRSS")
    {"sum": case.sum_over_tokens, "alone": case.entropies_alone}[kind]()
    print(resident("VmHWM") - before)


def resident(field: str) -> int:
    """Return bytes of this process: now (VmRSS) or the peak so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = arguments(__doc__, tokens=64, head=[32, 256], large=[16, 512], long=[64, 32, 256], rounds=1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--head", type=int, nargs=2, default=HEAD, metavar=("WIDTH", "VOCABULARY"))
    parser.add_argument("--large", type=int, nargs=2, default=LARGE, metavar=("WIDTH", "VOCABULARY"))
    parser.add_argument("--long", type=int, nargs=3, default=LONG, metavar=("TOKENS", "WIDTH", "VOCABULARY"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", nargs=4, help="measure one process's peak: sum or alone, tokens, width, vocabulary")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        kind, *shape = options.peak
        return measure_peak(kind, *map(int, shape))
    rows = times(options.tokens, options.head, options.rounds)
    rows += times(options.tokens // 4, options.large, options.rounds)
    report(rows + peaks(options.tokens, options.head, options.long), options.json)


if __name__ == "__main__":
    main()
