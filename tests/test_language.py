"""Words that are not the field's do not occur in code, configuration, scripts or documentation."""

import re
from pathlib import Path

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
