"""The text of a shell script without its redirections to and from files, which a confined bash cannot open.

Quotes, expansions, comments, arithmetic, tests and here-documents are recognized, so that only redirections change.
"""

import re

QUOTED = re.compile(r"\\.|'[^']*'|\$'(?:\\.|[^'\\])*'", re.DOTALL)
ESCAPED = re.compile(r"\\.", re.DOTALL)
COMMENT = re.compile(r"#[^\n]*")
DUPLICATE = re.compile(r"(?:\d+|\{\w+\})?[<>]&[ \t]*(?:\d+-?|-)")  # 2>&1, <&-: no file
OUTPUT = re.compile(r"(?:(?:\d+|\{\w+\})?(?:>>|>\||>&|<>|>(?!\())|&>>?)(?:[ \t]|\\\n)*")
INPUT = re.compile(r"(?:\d+|\{\w+\})?<(?![<(])&?(?:[ \t]|\\\n)*")
HERE = re.compile(r"""(?:\d+)?<<(-?)[ \t]*((?:\\.|'[^']*'|"[^"]*"|[^\s;|&<>()'"\\])+)""")
# Before a word that is a command, as opposed to an argument.
COMMAND = re.compile(r"(?:[\n;&|({`]|\b(?:then|do|else|if|while|until)|!)[ \t]*$")
CASE, ESAC = re.compile(r"case(?=\s)"), re.compile(r"esac\b")
TEST, TEST_END = re.compile(r"\[\[(?=\s)"), re.compile(r"\s\]\](?=[\s;&|)]|$)")
# A program with its directory, which a restricted bash does not start.
PROGRAM = re.compile(r"""("?)[^\s="'()<>|&;`]*/(python[\d.]*|torchrun|accelerate|uv)\1(?=[\s;)])""")
CHANGING = re.compile(r"""(?<![=!<>])=(?!=)|\+\+|--|["'\\\n]""")  # in arithmetic that sets a variable, or is quoted
OUTPUTS = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")  # outputs of programs
BETWEEN = " \t\n;&|("  # words
CONTINUED = "\\\n"  # a line


def without_files(script: str, *, sums: bool = False) -> str:
    """Return a script without redirections to or from files and with programs by their names alone; with `sums`, also
    with a call of `__sum` for each number that is computed without a change of a variable.

    A command whose input is a file has none; one whose input is a process substitution gets its output as text, since
    a process substitution is a file too.
    """
    scanner = _Scanner(script, sums)
    scanner.commands()
    return "".join(scanner.copied)


class _Scanner:
    """Copies a script from `at` on; `here` are the here-documents that begin with the next line, `ends` the ends of a
    word.

    What turns out to be no arithmetic is read a second time, as commands. So that each level of nesting does not double
    the time, `nested` keeps what is quoted or expanded within, and `subshells` the parentheses known to be none.
    """

    def __init__(self, text: str, sums: bool) -> None:
        self.text, self.at, self.sums = text, 0, sums
        self.copied: list[str] = []
        self.here: list[re.Match[str]] = []
        self.ends = " \t\n;&|<>()"
        self.nested: dict[tuple[int, bool, str], tuple[int, str, list[re.Match[str]]]] = {}
        self.subshells: set[int] = set()

    def commands(self, end: str = "") -> None:
        """Copy commands up to and including `end`."""
        cases, first = 0, True  # first: at the beginning of a word
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == end and not (cases and end == ")"):
                return self._copy(1)
            before = self.at
            special = first and self._special_word()
            if not (special or self._redirection(first) or self._nested(in_quotes=False)):
                cases += first and CASE.match(self.text, self.at) is not None and self._begins_command()
                cases -= cases > 0 and first and ESAC.match(self.text, self.at) is not None
                self._copy(1)
                if char == "(":
                    self.commands(")")
                elif char == "\n":
                    self._here_documents()
            if not self.text.startswith(CONTINUED, before):
                first = self.text[self.at - 1] in BETWEEN and char != "\\"
        return None

    def _copy(self, count: int) -> None:
        text = self.text[self.at : self.at + count]
        self.copied.append(text)
        self.at += len(text)

    def _begins_command(self) -> bool:
        return COMMAND.search("\n" * (self.at < 40) + self.text[max(0, self.at - 40) : self.at]) is not None

    def _special_word(self) -> bool:
        """Copy a comment, a test, a program or arithmetic, if one of these is next."""
        if comment := COMMENT.match(self.text, self.at):
            self._copy(len(comment[0]))
        elif TEST.match(self.text, self.at):
            self._copy(2)
            while self.at < len(self.text) and not TEST_END.match(self.text, self.at):
                if not self._nested(in_quotes=False):
                    self._copy(1)
            self._copy(3)
        elif program := PROGRAM.match(self.text, self.at):
            self.copied.append(program[2])
            self.at = program.end()
        else:
            return self.text.startswith("((", self.at) and self._arithmetic()
        return True

    def _nested(self, in_quotes: bool) -> bool:
        """Copy a quoted or expanded text, if it is next; in double quotes, single ones have no meaning."""
        key, count, outer = (self.at, in_quotes, self.ends), len(self.copied), self.here
        if key not in self.nested:
            self.here = []  # the lines in an expansion are not those after the line around it
            if not self._read_nested(in_quotes):
                self.here = outer
                return False
            self.nested[key] = self.at, "".join(self.copied[count:]), self.here
        self.at, text, inner = self.nested[key]
        self.copied[count:] = [text]
        self.here = [*outer, *inner]
        return True

    def _read_nested(self, in_quotes: bool) -> bool:
        count = len(self.copied)
        rest = self.text[self.at : self.at + 3]
        if quoted := (ESCAPED if in_quotes else QUOTED).match(self.text, self.at):
            self._copy(len(quoted[0]))
        elif rest == "$((" and self._arithmetic():
            text = "".join(self.copied[count:])[3:-2]
            if self.sums and not CHANGING.search(OUTPUTS.sub("", text)):
                self.copied[count:] = [f'$(__number=1; __sum "{text}")']
        elif rest[:2] == "$(" or (rest[:2] in ("<(", ">(") and not in_quotes):
            self._copy(2)
            self.commands(")")
        elif rest[:1] == "`":
            self._copy(1)
            around, self.ends = self.ends, self.ends.rstrip("`") + "`"
            self.commands("`")
            self.ends = around
        elif rest[:2] == "${":
            self._copy(2)
            self._text("}", in_quotes)
        elif rest[:1] == '"' and not in_quotes:
            self._copy(1)
            self._text('"', in_quotes=True)
        else:
            return False
        return True

    def _text(self, end: str, in_quotes: bool) -> None:
        """Copy text in which only expansions and quotes count, up to and including `end`."""
        while self.at < len(self.text):
            if self.text[self.at] == end:
                return self._copy(1)
            in_parameter = end == "}" and self.text[self.at] == '"'
            if not self._nested(in_quotes and not in_parameter):
                self._copy(1)
        return None

    def _arithmetic(self) -> bool:
        """Copy arithmetic, if what begins like it ends like it; a subshell in a subshell begins like it too."""
        start, count, here = self.at, len(self.copied), self.here
        opened: list[int] = []
        pair = (-1, -1)  # the parentheses closed last
        while self.at < len(self.text) and start not in self.subshells:
            char = self.text[self.at]
            if char in "\"'`\\" or (char == "$" and self.at > start):
                if not self._nested(in_quotes=False):
                    self._copy(1)
                continue
            if char == "(":
                opened.append(self.at)
            elif char == ")":
                inner, pair = pair, (opened.pop(), self.at)
                if inner != (pair[0] + 1, pair[1] - 1):
                    self.subshells.add(pair[0])
                if len(opened) == 1 and not self.text.startswith("))", self.at):
                    break
            self._copy(1)
            if char == ")" and not opened:
                return True
        self.subshells |= {start, *opened}
        self.at, self.here = start, here
        del self.copied[count:]
        return False

    def _redirection(self, first: bool) -> bool:
        """Leave out a redirection, if that is next. The number of a file is one only at the beginning of a word."""
        if self.text[self.at] not in ("<>&{0123456789" if first else "<>&"):
            return False
        if self.text.startswith("<<<", self.at):
            self._copy(3)
        elif here := HERE.match(self.text, self.at):
            self.here.append(here)
            self._copy(len(here[0]))
        elif duplicate := DUPLICATE.match(self.text, self.at):
            self._copy(len(duplicate[0]))
        elif output := OUTPUT.match(self.text, self.at):
            self.at = output.end()
            self._leave_out_word()
        elif read := INPUT.match(self.text, self.at):
            self.at = read.end()
            if self.text.startswith("<(", self.at):
                self.copied.append('<<< "$(')
                self.at += 2
                self.commands(")")
                self.copied.append('"')
            else:
                self._leave_out_word()
                self.copied.append("<&-")
        else:
            return False
        return True

    def _leave_out_word(self) -> None:
        count = len(self.copied)
        if self.text[self.at : self.at + 2] in ("<(", ">("):
            self._nested(in_quotes=False)
        while self.at < len(self.text) and self.text[self.at] not in self.ends:
            if not self._nested(in_quotes=False):
                self._copy(1)
        del self.copied[count:]

    def _here_documents(self) -> None:
        """Copy the here-documents that begin with this line; in one with a quoted delimiter, nothing is expanded."""
        for here in self.here:
            delimiter = re.sub(r"[\\'\"]", "", here[2])
            indent = r"\t*" if here[1] else ""
            end = re.compile(rf"^{indent}{re.escape(delimiter)}$", re.MULTILINE).search(self.text, self.at)
            body = self.text[self.at : end.end() if end else len(self.text)]
            self.at += len(body)
            if delimiter == here[2]:
                inner = _Scanner(body, self.sums)
                while inner.at < len(body):
                    if not inner._nested(in_quotes=True):
                        inner._copy(1)
                body = "".join(inner.copied)
            self.copied.append(body)
        self.here = []
