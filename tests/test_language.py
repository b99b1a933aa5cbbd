"""Words that are not the field's do not occur in code, configuration, scripts or documentation; and sentences whose
noun is left out while its relative clause stays, or that are too long to be read once, become fewer."""

import ast
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).parent.parent
PLACES = ("hybridrl/**/*", "conf/**/*", "docs/*", "recipes/**/*", "scripts/**/*", "*.md")
SUFFIXES = {".py", ".yaml", ".md", ".sh"}

# word -> the better one
BANNED = {
    r"told|tells?|telling": "log, report, say",
    r"anew": "again, from scratch",
    r"mend(s|ed|ing)?": "fix",
    r"heed(s|ed|ing)?": "respect, read",
    r"ways? out": "fix, hint",
    r"go(es|ing)? on|went on": "continue, resume",
    r"beside": "next to, in addition to",
    r"as \w+ (has|have) it": "as in",
    r"of one's own|one's own": "custom",
    r"says? of (it|them)sel(f|ves)": "contains, reports",
    r"at (one's|your|its) word": "as requested",
    r"(is|are|was|were) asked for": "is requested",
    r"laid down|lays? down": "fixed, imposed",
    r"for ever": "indefinitely",
    r"none but": "only",
    r"hand-?overs?|hand(s|ed|ing)? over": "weight sync, sync",
    r"saved steps?": "checkpoint",
    r"refus(e|es|ed|al|als|ing)": "reject",
    r"data sets?": "dataset",
    r"front doors?": "command, entry point",
    r"learnt": "learned, trained on",
    r"(tokens|rows?|seconds?|responses?|samples?|prompts?) an? (device|token|step|prompt|rank|second)": "per",
}
# Text from elsewhere: the files that quote it, and the words quoted.
QUOTED: dict[str, set[str]] = {
    # names in the doctor's JSON output, which programs read
    "docs/doctor.md": {"refused"},
    "hybridrl/doctor/__init__.py": {"refused"},
    "hybridrl/doctor/full.py": {"refused"},
    "hybridrl/doctor/reward.py": {"refused"},
}


def test_the_banned_words_do_not_occur() -> None:
    pattern = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
    found = []
    for path in sorted({path for place in PLACES for path in TOP.glob(place) if path.suffix in SUFFIXES}):
        name = path.relative_to(TOP).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            words = {match[0].lower() for match in pattern.finditer(line.replace("_", " "))}
            found += [f"{name}:{number}: {word}" for word in words - QUOTED.get(name, set())]
    assert not found, f"{len(found)} words: " + "\n".join(found)


# -- sentences of the package's code -----------------------------------------------------------------------------------
#
# Each pattern is a way to leave out a noun, or to say in syntax of another language what English says in a plain word.

RELATIVE = re.compile(r"\b(that|which|who|whose|where|what)\b", re.IGNORECASE)
CONTENTLESS = {"one", "some", "found", "given", "wanted", "known", "made", "held", "kept", "more"}
KINDS = {
    "clause": "a docstring begins with What, Which, Where, Why, How or When: name the thing",
    "fragment": "a comment begins with of, that, which or whose: begin with the noun",
    "negation": '"is no X": "is not a X"',
    "number": '"so many": N, or the name of the number',
    "causative": '"Have X scored": "Score X"',
    "long": "three relative words in a sentence, two in fewer than 22 words, or more than 32 words: split it",
    "name": f"a name without content ({', '.join(sorted(CONTENTLESS))}): the name of the thing",
}
# How many there are, by package. A change may lower a number, and none may be raised.
MOST = {
    # clause, fragment, negation, number, causative, long, name
    ".": (0, 0, 0, 0, 0, 0, 0),
    "agents": (1, 12, 0, 1, 1, 20, 4),
    "checkpoint": (0, 0, 0, 0, 0, 0, 0),
    "compat": (0, 3, 0, 0, 0, 3, 11),
    "config": (0, 0, 0, 0, 0, 0, 0),
    "core": (0, 0, 0, 0, 0, 0, 0),
    "data": (0, 0, 0, 0, 0, 0, 14),
    "doctor": (0, 0, 0, 0, 0, 0, 0),
    "environments": (0, 0, 0, 0, 0, 0, 3),
    "evaluation": (0, 0, 0, 0, 0, 0, 0),
    "health": (0, 0, 0, 0, 0, 0, 0),
    "launch": (0, 0, 0, 0, 0, 0, 0),
    "model_merger": (0, 0, 0, 0, 0, 0, 0),
    "report": (0, 0, 0, 0, 0, 0, 0),
    "rewards": (0, 0, 0, 0, 0, 0, 0),
    "runs": (0, 0, 0, 0, 0, 0, 5),
    "runtime": (0, 0, 0, 0, 0, 0, 0),
    "tracking": (0, 0, 0, 0, 0, 0, 0),
}


class Text(NamedTuple):
    line: int
    text: str
    docstring: bool


class Fault(NamedTuple):
    kind: str
    place: str
    text: str


def texts(source: str, tree: ast.Module) -> Iterator[Text]:
    """Yield docstrings, and comments, of which those on neighbouring lines are one."""
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield Text(getattr(node, "lineno", 1), text, True)
    comments, above = list[tuple[int, list[str]]](), (-1, 0)
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            text, alone = token.string.lstrip("#").strip(), token.line.lstrip().startswith("#")
            if alone and above == (token.start[0] - 1, token.start[1]):
                comments[-1][1].append(text)
            else:
                comments.append((token.start[0], [text]))
            above = token.start if alone else (-1, 0)
    yield from (Text(line, " ".join(parts), False) for line, parts in comments)


def faults_of_text(text: Text) -> Iterator[tuple[str, str]]:
    """Yield the kinds of fault in a docstring or comment, each with the sentence."""
    if text.docstring and re.match(r"(What|Which|Where|Why|How|When)\b", text.text):
        yield "clause", text.text
    if not text.docstring and re.match(r"(of|that|which|whose)\b", text.text, re.IGNORECASE):
        yield "fragment", text.text
    for sentence in re.split(r"[.:;]\s", " ".join(text.text.split()) + " "):
        words, relative = len(sentence.split()), len(RELATIVE.findall(sentence))
        if relative >= 3 or (relative == 2 and words < 22) or words > 32:
            yield "long", sentence
        if re.match(r"Have\b", sentence):
            yield "causative", sentence
        yield from (("number", sentence) for _ in re.findall(r"\bso (?:many|much)\b", sentence))


def faults_of(path: Path) -> list[Fault]:
    source = path.read_text(encoding="utf-8")
    tree, name = ast.parse(source), path.relative_to(TOP).as_posix()
    faults = [
        Fault(kind, f"{name}:{text.line}", sentence)
        for text in texts(source, tree)
        for kind, sentence in faults_of_text(text)
    ]
    for number, line in enumerate(source.splitlines(), start=1):  # of messages too
        if re.search(r"\b(is|are) no \w", line) and not re.search(r"there (is|are) no", line, re.IGNORECASE):
            faults.append(Fault("negation", f"{name}:{number}", line.strip()))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg in CONTENTLESS:
            faults.append(Fault("name", f"{name}:{node.lineno}", node.arg))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in CONTENTLESS:
            faults.append(Fault("name", f"{name}:{node.lineno}", node.id))
    return faults


def test_sentences_that_leave_out_their_noun_or_are_too_long_become_fewer() -> None:
    counts: dict[str, Counter[str]] = {package: Counter() for package in MOST}
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    long = []
    for fault in (fault for path in sorted(TOP.glob("hybridrl/**/*.py")) for fault in faults_of(path)):
        _, package, *below = fault.place.split("/")
        package = package if below else "."
        counts[package][fault.kind] += 1
        places[package, fault.kind].append(f"{fault.place}: {fault.text}")
        long += [fault] if fault.kind == "long" else []
    long.sort(key=lambda fault: -len(fault.text.split()))
    print("the ten longest sentences:", *(f"{fault.place}: {fault.text}" for fault in long[:10]), sep="\n")
    now = {package: tuple(of_package[kind] for kind in KINDS) for package, of_package in counts.items()}
    risen = [
        "\n  ".join([f"{package}: {number} instead of {most}: {KINDS[kind]}", *places[package, kind]])
        for package, numbers in now.items()
        for kind, number, most in zip(KINDS, numbers, MOST[package], strict=True)
        if number > most
    ]
    assert not risen, "\n".join(risen)
    assert now == MOST, "there are fewer: write the new numbers into MOST"
