"""Redirections to files are left out of a script, and nothing else of it changes."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.doctor.launches import commands_of
from hybridrl.doctor.shell_text import without_files

# What a shell reads as more than a letter, in random order.
PIECES = st.sampled_from(
    [*">|;&#()<`\"'\\$ {}[]*!=\n\t", "a", "1", "2>", ">>", "&>", "<<E", "$(", "${", "<(", "((", "case x in", "[[ ", "é"]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)
DOUBLE = re.compile(r'([\\"$`])')


def in_double_quotes(text: str) -> str:
    return '"' + DOUBLE.sub(r"\\\1", text) + '"'


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_no_quoted_text_changes(text: str) -> None:
    words = f"run a={shlex.quote(text)} b={in_double_quotes(text)}"
    for script in (words, f'{words} "$(run {words})"', f"A=({words})\n{words}"):
        assert without_files(script) == script
        assert without_files(f"{script} > out.log 2>&1 | tee x") == f"{script}  2>&1 | tee x"


@given(st.lists(TEXTS, min_size=1, max_size=30))
@settings(max_examples=4, deadline=None)
def test_bash_reads_each_quoted_text_as_it_is(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    script: Path = tmp_path_factory.mktemp("text") / "run.sh"
    values = [*map(shlex.quote, texts), *map(in_double_quotes, texts)]
    script.write_text(f'V=({" ".join(values)})\nrun {" ".join(values)} >> out.log &\nrun "${{V[@]}}" &> out.log\n')
    assert commands_of(script)[:2] == ([["run", *texts, *texts]] * 2, "")


@given(st.lists(PIECES, max_size=40).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_to_its_end(text: str) -> None:
    assert len(without_files(f"{text} x")) <= len(text) + 2 + 5 * text.count("<")


@pytest.mark.parametrize(
    ("script", "left"),
    [
        ("a > b", "a "),
        ("a>b c", "a c"),
        ("a >| b; c >> d", "a ; c "),
        ('a &>> "a b.log" c', "a  c"),
        ("a > \\\n  b c", "a  c"),
        ("a \\\n2>b c", "a \\\n c"),
        ("a 12> b x2> c", "a  x2"),
        ("exec {fd}> lock", "exec "),
        ("a >& log 2>&1 >&2 2>&-", "a  2>&1 >&2 2>&-"),
        ('a "$(b 2>/dev/null)" `c > d` "`e > f`"', 'a "$(b )" `c ` "`e `"'),
        ('a <<< "x > y" > f', 'a <<< "x > y" '),
        ("a > >(tee log > b) 2> >(c >&2) d", "a   d"),
        ("a >(tee log > x)", "a >(tee log )"),
        ("mapfile -t A < <(printf x > y)", 'mapfile -t A <<< "$(printf x )"'),
        ("while read x; do :; done < file", "while read x; do :; done <&-"),
        ("(( a > b )) && c > d", "(( a > b )) && c "),
        ("x=$((a > b ? $(c 2>/dev/null) : 1))", "x=$((a > b ? $(c ) : 1))"),
        ("((a); b > c)", "((a); b )"),
        ("$((a > b); $((c > d)) > e)", "$((a ); $((c > d)) )"),
        ("$(( (a > b) + (c) )) > d", "$(( (a > b) + (c) )) "),
        ("(((a > b)); c > d) > e", "(((a > b)); c ) "),
        ("((a; ((b > c)); ((d > e) )) > f", "((a; ((b > c)); ((d ) )) "),
        ("cat <<E > f $(a\nb > c\n)\nd > e\nE\nf > g", "cat <<E  $(a\nb \n)\nd > e\nE\nf "),
        ("$((cat <<E > f; a)\nb > c\nE\n) > d", "$((cat <<E ; a)\nb > c\nE\n) "),
        ("$(($(cat <<E) > f) ) > d\nb > c\nE\ne > f", "$(($(cat <<E) ) ) \nb > c\nE\ne "),
        ('[[ a > b && "c" ]] > f', '[[ a > b && "c" ]] '),
        ("a > b; [[ c > d", "a ; [[ c > d"),
        ("a # it's > x\nb > c", "a # it's > x\nb "),
        ("$(case x in a) b > c;; (d) e;; esac) > f", "$(case x in a) b ;; (d) e;; esac) "),
        ('${x:-"a > b"} "${x:-a > b}" > c', '${x:-"a > b"} "${x:-a > b}" '),
        ("a $'it\\'s > b' > c", "a $'it\\'s > b' "),
        ("cat > f <<EOF\nit's $(a > b) > c\nEOF\nd > e", "cat  <<EOF\nit's $(a ) > c\nEOF\nd "),
        ("cat <<'E' > x\n$(a > b\nE\nf > g", "cat <<'E' \n$(a > b\nE\nf "),
        ("cat <<-E\n\t'\n\tE\nf > g", "cat <<-E\n\t'\n\tE\nf "),
        ("/usr/bin/python3 -m x y=/usr/bin/python3", "python3 -m x y=/usr/bin/python3"),
        ('"$V/bin/python" -m "a /b/python c"', 'python -m "a /b/python c"'),
    ],
)
def test_only_redirections_are_left_out(script: str, left: str) -> None:
    assert without_files(script) == left


@pytest.mark.parametrize(
    ("levels", "opening", "closing"),
    [
        (14, "$((a > b; ", " ) )"),
        (14, '$((a "', '" > b) )'),
        (14, "((a `", "` > b) )"),
        (200, "((a > b; ", " ) )"),
        (300, "(", ")"),
    ],
)
@pytest.mark.parametrize("closed", [True, False])
def test_what_begins_like_arithmetic_is_read_about_twice(levels: int, opening: str, closing: str, closed: bool) -> None:
    script = opening * levels + "a" + closing * levels * closed
    calls: list[str] = []
    tracing = sys.gettrace()
    sys.settrace(lambda frame, *_: calls.append(frame.f_code.co_name))
    try:
        without_files(script)
    finally:
        sys.settrace(tracing)
    assert len(calls) < 20 * len(script)
