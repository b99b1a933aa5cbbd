"""Hooks of mkdocs for this site (`hooks` of mkdocs.yml): formulas in TeX become MathML, which browsers draw without a
script, and long keys in tables have places at which a line can end."""

import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

# As GitHub reads them: $$...$$ is a formula of its own line, $...$ one within a sentence. Code comes first.
BLOCK, INLINE = r"(?<!\\)\$\$(.+?)\$\$", r"(?<![\\$\w])\$(?=\S)([^$]+?)(?<=\S)\$(?![\w$])"
AFTER_CODE = 185  # of Markdown's priorities: code has 190, backslashes have 180


class Formula(InlineProcessor):
    """Replaces a formula by MathML, which nothing else in Markdown reads."""

    def __init__(self, pattern: str, markdown: Markdown, display: str) -> None:
        super().__init__(pattern, markdown)
        self.display = display

    def handleMatch(self, match: re.Match[str], data: str) -> tuple[str, int, int]:
        return self.md.htmlStash.store(convert(match[1], display=self.display)), match.start(), match.end()


class Formulas(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(Formula(BLOCK, md, "block"), "block formula", AFTER_CODE)
        md.inlinePatterns.register(Formula(INLINE, md, "inline"), "inline formula", AFTER_CODE - 1)


def on_config(config: Any) -> Any:
    """Add the formulas to the Markdown of every page; mkdocs calls it by this name."""
    config.markdown_extensions.append(Formulas())
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Let keys in tables end a line after their dots, slashes, underscores and commas; mkdocs calls it by this name."""

    def breakable(code: re.Match[str]) -> str:
        return f"<code>{re.sub('[./_,=]', lambda separator: separator[0] + '<wbr>', code[1])}</code>"

    return re.sub("<td.*?</td>", lambda cell: re.sub("<code>(.*?)</code>", breakable, cell[0]), html, flags=re.DOTALL)
