"""Every command in the README, the pages and the recipes is one that the product accepts: files, options and commands
exist, and the configuration of a run passes as `doctor --config-only` has it, without its data and model. In-process:
a process per command would take minutes."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hybridrl.__main__ import COMMANDS
from hybridrl.compat.migrate import MIGRATE
from hybridrl.compat.translation import VERL
from hybridrl.config.compose import CONF, SHIPPED
from hybridrl.config.load import resolve_config
from hybridrl.config.schema import ActorRolloutRefConfig, PPOConfig, SFTConfig
from hybridrl.config.values import holds, tree
from hybridrl.doctor.__main__ import COMMANDS as OWN_COMMANDS
from hybridrl.doctor.__main__ import FIRST_LEVEL, RUN
from hybridrl.evaluation.config import VERL_NAMES
from hybridrl.launch.__main__ import OPTIONS
from hybridrl.serve import OWN

TOP = Path(__file__).parent.parent
PAGES = [
    TOP / "README.md",
    TOP / "CONTRIBUTING.md",
    *sorted(TOP.glob("docs/*.md")),
    *sorted(TOP.glob("recipes/**/*.md")),
]
NAMES = {module: name for name, module in COMMANDS.items() if module and name != "sweep"}
DOCTOR = OWN_COMMANDS | {"migrate": MIGRATE}
PLACEHOLDERS = ("...", "…", "key=value", "key=a,b", "KEY", "NAME")
# What a run must have and an example may leave out.
SUPPOSED = {
    PPOConfig: {"data.train_files": "rows.jsonl", "actor_rollout_ref.model.path": "some/model"},
    SFTConfig: {"data.train_files": "rows.jsonl", "model.path": "some/model"},
}


def commands(text: str) -> Iterator[str]:
    """The commands of the product in a page: in fenced and indented blocks, and in the sentences between them."""
    fenced = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
    indented = re.compile(r"(?:^    .*\n)+", re.M)
    rest = fenced.sub("", text)
    blocks = [(match[2], match[3]) for match in fenced.finditer(text)]
    blocks += [("sh", block) for block in indented.findall(rest)]
    lines = []
    for language, block in blocks:
        inside = block.replace("\\\n", " ").splitlines()
        prompts = [line for line in inside if line.strip().startswith("$ ")]
        lines += prompts or (inside if language in ("sh", "bash") else [])  # other lines are output
    lines += [" ".join(one.split()) for one in re.findall(r"(?<!`)`([^`]+)`(?!`)", indented.sub("", rest))]
    for line in lines:
        for part in pieces(line.strip().removeprefix("$ ")):
            if part and (part[0] == "hybridrl" or (part[0] in ("python", "bash") and len(part) > 1)):
                yield shlex.join(part)


def pieces(line: str) -> list[list[str]]:
    """The words of each command of a line, without variables before it, optional brackets and placeholders."""
    line = re.sub(r"(?<=\s)\[([^]]*)\]", r"\1", line)
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:  # a sentence with an apostrophe
        return []
    parts: list[list[str]] = [[]]
    for word in words:
        if re.fullmatch(r"[|&;]+", word):
            parts.append([])
        elif not (re.match(r"[A-Z_]+=", word) and not parts[-1]) and word not in PLACEHOLDERS:
            parts[-1].append(re.sub(r"^\S*(?:bin/)(python)$", r"\1", word))
    return parts


def faults(command: str) -> list[str]:
    """What is wrong with a command; nothing if it is not one of the product."""
    program, *words = shlex.split(command)
    if program == "python" and words[0] == "-m":
        module = words[1]
        if not module.startswith("hybridrl"):
            return []
        if module not in NAMES:
            return source_faults(TOP / f"{module.replace('.', '/')}.py", words[2:])
        return command_faults(NAMES[module], words[2:])
    if program == "hybridrl":
        name = words[0] if words else "--help"
        known = name in COMMANDS or name.startswith("-")
        return command_faults(name, words[1:]) if known else [f"there is no command {name}"]
    script = words[0]
    return source_faults(TOP / script, words[1:]) if script.startswith(("scripts/", "recipes/")) else []


def command_faults(name: str, words: list[str]) -> list[str]:
    module = COMMANDS.get(name, "hybridrl.__main__")
    if name == "doctor" or name in FIRST_LEVEL:
        own = name if name in FIRST_LEVEL else words[0] if words else ""
        if own not in DOCTOR and "=" not in own and own and not own.startswith("-"):
            return [f"doctor has no command {own}"]
        if name == "doctor" and own in FIRST_LEVEL:
            return [f"it is hybridrl {own}"]
        arguments = DOCTOR[own].arguments if own in DOCTOR else RUN
        options = " ".join(option for names, _ in arguments for option in names)
        return unknown_options(words, f"{options} --json --help") + unknown_keys(words)
    if name == "launch":
        end = words.index("--") if "--" in words else len(words)
        options = " ".join(f"--{option}" for option in (*OPTIONS, "out", "submit", "scheduler-args"))
        return unknown_options(words[:end], options) + configuration_faults(PPOConfig, words[end + 1 :])
    if name in ("train", "sft", "sweep"):
        return configuration_faults(SFTConfig if name == "sft" else PPOConfig, words)
    shared = text_of("hybridrl/runtime/cli") if name == "eval" else ""
    found = unknown_options(words, text_of(module.replace(".", "/")) + shared)
    if name in ("serve", "chat"):
        known = tree(ActorRolloutRefConfig)
        return found + [f"unknown key {key}" for key in keys_of(words) if key not in OWN and not holds(known, key)]
    return found + unknown_keys(words)


def configuration_faults(schema: type, words: list[str]) -> list[str]:
    """What `doctor --config-only` would report of a run's command on a machine with its files and devices."""
    overrides = [re.sub(r"\$\w+", "2", word).split(",")[0] if is_list(word) else word for word in words if "=" in word]
    overrides = [re.sub(r"\$\w+", "2", word) for word in overrides]
    place, name = CONF, SHIPPED[schema]
    for option, value in pairwise(words):
        place = TOP / value if option in ("-cp", "--config-path") else place
        name = value if option in ("-cn", "--config-name") else name
    if not (place / f"{name}.yaml").is_file():  # the reader's own
        return unknown_keys(words)
    given = {word.partition("=")[0] for word in overrides}
    supposed = [f"{key}={value}" for key, value in SUPPOSED[schema].items() if key not in given and place == CONF]
    findings = resolve_config(schema, supposed + overrides, name, place, offline=True).findings
    options = unknown_options(words, text_of("hybridrl/runtime/cli"))
    return [finding.text for finding in findings.items if finding.severity == "error"] + options


def is_list(word: str) -> bool:
    """Whether it is a key with several values of a sweep."""
    return "," in word and not re.search(r"[\[{]", word)


def source_faults(file: Path, words: list[str]) -> list[str]:
    if not file.is_file():
        return [f"there is no file {file.relative_to(TOP)}"]
    text = file.read_text(encoding="utf-8")
    near = re.findall(r"^(?:from|import) (\w+)", text, re.M)
    text += "".join(text_of(str(file.parent / name)) for name in near)
    return unknown_options(words, text) + unknown_keys(words)


def text_of(path: str) -> str:
    """The text of a module or of all modules of a package."""
    files = [TOP / f"{path}.py", *sorted((TOP / path).glob("*.py"))]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def unknown_options(words: list[str], text: str) -> list[str]:
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [f"unknown option {option}" for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", text)]


def keys_of(words: list[str]) -> list[str]:
    return [word.partition("=")[0].lstrip("+~") for word in words if re.match(r"[+~]*[a-z][\w.]*=", word)]


def unknown_keys(words: list[str]) -> list[str]:
    known = [tree(PPOConfig), tree(SFTConfig)]
    keys = [key for key in keys_of(words) if key not in VERL_NAMES and not key.startswith("own.")]
    return [f"unknown key {key}" for key in keys if not any(holds(keys, VERL.current_name(key)) for keys in known)]


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(TOP).as_posix())
def test_every_command_of_a_page_is_accepted(page: Path) -> None:
    every = {command: faults(command) for command in commands(page.read_text(encoding="utf-8"))}
    assert {command: found for command, found in every.items() if found} == {}


def test_commands_are_found_in_blocks_and_sentences() -> None:
    text = (
        "```sh\nX=1 hybridrl train data.train_files=a.jsonl \\\n  trainer.seed=[1] ... && bash scripts/no.sh | jq\n```"
        "\nThen `.venv/bin/python scripts/benchmark/no.py\n[--rounds 3]` and:\n\n    $ hybridrl show DIR\n"
    )
    assert [*commands(text)] == [
        "hybridrl train data.train_files=a.jsonl 'trainer.seed=[1]'",
        "bash scripts/no.sh",
        "hybridrl show DIR",
        "python scripts/benchmark/no.py --rounds 3",
    ]


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("hybridrl trian data.train_files=a.jsonl", "there is no command trian"),
        ("hybridrl doctor whyy outputs/run", "doctor has no command whyy"),
        ("hybridrl doctor why outputs/run", "it is hybridrl why"),
        ("hybridrl why outputs/run --jsn", "unknown option --jsn"),
        ("hybridrl train algorithm.adv_estimater=grpo", "algorithm.adv_estimater"),
        ("hybridrl train algorithm.adv_estimator=grop", "algorithm.adv_estimator=grop"),
        ("hybridrl train trainer.save_freq=often", "trainer.save_freq=often"),
        ("hybridrl sft optim.lr=fast", "optim.lr=fast"),
        ("hybridrl launch slurm --node 2 -- trainer.seed=0", "unknown option --node"),
        ("hybridrl launch slurm --nodes 2 -- trainer.sed=0", "trainer.sed"),
        ("hybridrl train --confg-path recipes/quickstart", "unknown option --confg-path"),
        ("hybridrl train --config-path recipes/quickstart --config-name train trainer.sed=0", "trainer.sed"),
        ("hybridrl sweep actor_rollout_ref.actor.optim.rl=1,2", "actor_rollout_ref.actor.optim.rl"),
        ("hybridrl show outputs/run --max-rewards 0", "unknown option --max-rewards"),
        ("hybridrl serve model.pth=x", "unknown key model.pth"),
        ("hybridrl chat outputs/run rollout.max_len=9", "unknown key rollout.max_len"),
        ("hybridrl chat outputs/run --promt hello", "unknown option --promt"),
        ("python scripts/benchmark/stepp.py", "there is no file scripts/benchmark/stepp.py"),
        ("python scripts/benchmark/step.py --runds 3", "unknown option --runds"),
        ("python scripts/benchmark/step.py actor_rollout_ref.actor.ppo_max_tokens=1", "unknown key"),
        ("bash scripts/quickstart.sh --agnt", "unknown option --agnt"),
        ("bash scripts/quickstart.sh trainer.sed=0", "unknown key trainer.sed"),
    ],
)
def test_a_command_that_is_wrong_is_found(command: str, fault: str) -> None:
    (found,) = faults(command)
    assert fault in found
