"""Links from the pages to the words of the glossary."""

import re

from course.lists import ROOT
from docs.pages import link_to

GLOSSARY = "day1/GLOSSARY.md"
# Words of the glossary that whoever has trained a model knows: no page links them.
KNOWN = """accuracy activations batch CPU device epoch GPU gradient learning rate loss optimizer
parameters seed SGD step tensor thread environment core job traceback MNIST median md5 sha256 gzip
states module port checksum process interface signal account constraint partition QOS"""
# What is no prose: made parts, code, links, headings, pictures, HTML, tables.
NO_PROSE = re.compile(
    r"<!-- begin .*?<!-- end -->|^```.*?^```$|`[^`\n]*`|!?\[[^\]\n]*\]\([^)\n]*\)|^#.*?$|<[^>\n]*>"
    r"|^\|.*?$|https?://\S+",
    re.MULTILINE | re.DOTALL,
)


def glossary():
    """Return {word: anchor} of the glossary, without those that everybody knows here.

    A row that explains several words, such as bf16, fp16, fp32, has one anchor.
    """
    rows = re.findall(r'^\| <a id="([\w-]+)"></a>(.+?) \|', (ROOT / GLOSSARY).read_text(), re.M)
    known = set(re.split(r"\s+", KNOWN)) | {"learning rate"}
    words = {word: anchor for anchor, names in rows for word in names.split(", ")}
    return {word: anchor for word, anchor in words.items() if word not in known}


def link_terms(text, page):
    """Return a page's text with a link at the first use of each word of the glossary in its prose.

    A word that is a link already, anywhere in the page, is left as it is.
    """
    for word, anchor in sorted(glossary().items(), key=lambda x: -len(x[0])):
        target = f"{link_to(GLOSSARY, page)}#{anchor}"
        if f"({target})" in text:
            continue
        taken = [x.span() for x in NO_PROSE.finditer(text) if x[0] != f"`{word}`"]
        flags = 0 if word.isupper() or "_" in word else re.IGNORECASE
        pattern = rf"(?<![\w`-])(`{re.escape(word)}`|{re.escape(word)}(?:s|es)?)(?![\w`-])"
        for match in re.finditer(pattern, text, flags):
            if not any(begin <= match.start() < end for begin, end in taken):
                link = f"[{match[1]}]({target})"
                text = text[: match.start()] + link + text[match.end() :]
                break
    return text
