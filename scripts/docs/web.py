"""For the web: Markdown in folded blocks is Markdown, as on GitHub. None may be in a list."""

from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor


class Folded(Preprocessor):
    def run(self, lines):
        return [line.replace("<details>", '<details markdown="1">') for line in lines]


class FoldedExtension(Extension):
    def extendMarkdown(self, md):
        md.preprocessors.register(Folded(md), "folded", 40)  # before code and HTML


def makeExtension(**options):
    return FoldedExtension(**options)
