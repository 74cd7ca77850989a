"""Functions of in_page.js, run in a page in a real browser."""

import html
import json
import re
from pathlib import Path

from support.run import open_in_browser


def in_page(text, page, function, given=None, options=()):
    """Write a page with this text; return what a function of in_page.js returns in it."""
    script = Path(__file__).with_name("in_page.js").read_text()
    script += f"addEventListener('load', () => report({function}, {json.dumps(given)}));"
    page.write_text(text.replace("</head>", f"<script>{script}</script></head>"))
    dom = open_in_browser(f"file://{page}", page.with_name("profile"), *options)
    wrong, result = json.loads(html.unescape(re.search('"report">(.*?)</pre>', dom, re.S)[1]))
    assert wrong == []
    return result
