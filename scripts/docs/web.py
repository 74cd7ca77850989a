"""For the web: have Python-Markdown read folded blocks as GitHub does.

There, Markdown inside <details> is Markdown, even if the block belongs to a numbered question.
"""

import re

from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

QUESTION = re.compile(r"^(\d+)\. ([^\n]*\n\n)   (<details>.*?\n)   (</details>)$", re.M | re.S)


class Folded(Preprocessor):
    """Take folded answers out of their list, and mark all folded blocks as Markdown."""

    def run(self, lines):
        text = QUESTION.sub(self.question, "\n".join(lines))
        return text.replace("<details>", '<details markdown="1">').split("\n")

    def question(self, match):
        number, words, answer, end = match.groups()
        return f"**{number}.** {words}" + re.sub("^   ", "", answer + end, flags=re.M)


class FoldedExtension(Extension):
    def extendMarkdown(self, md):
        md.preprocessors.register(Folded(md), "folded", 40)  # before code and HTML


def makeExtension(**options):
    return FoldedExtension(**options)
