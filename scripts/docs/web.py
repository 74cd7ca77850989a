"""For the web: Markdown in folded blocks is Markdown, as on GitHub. None may be in a list.

Links to a deck lead to its slides, which slides/build.sh has made, not to Marp's source.
"""

import re

from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor


class Folded(Preprocessor):
    def run(self, lines):
        lines = [line.replace("<details>", '<details markdown="1">') for line in lines]
        # No site has files whose names begin with a dot.
        lines = [re.sub(r"\[([^\]]*)\]\(\.\./\.\w\S*?\)", r"\1", line) for line in lines]
        return [re.sub(r"(\]\(\S*(?:day[12]|beyond))\.md\b", r"\1.html", line) for line in lines]


class FoldedExtension(Extension):
    def extendMarkdown(self, md):
        md.preprocessors.register(Folded(md), "folded", 40)  # before code and HTML


def makeExtension(**options):
    return FoldedExtension(**options)
