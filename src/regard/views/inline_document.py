"""HTML documents as one offline file: style, scripts and data inside, and a policy that allows no other script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable

STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
SCRIPT = re.compile(r'<script src="([\w.]+)" defer></script>\n?')


def inline_document(document: str, read: Callable[[str], str], data: object) -> str:
    """Return a document with its style sheets and scripts inside, and `data` as JSON in the element `data`.

    `read` returns the text of a file that the document names. The document has `<meta name="policy">` for the policy.
    """
    styles = [read(name) for name in STYLE.findall(document)]
    scripts = [read(name) for name in SCRIPT.findall(document)]
    allowed = {"script-src": scripts, "style-src": styles}
    policy = "; ".join(
        ["default-src 'none'", *(f"{name} {' '.join(map(_digest, texts))}" for name, texts in allowed.items())]
    )
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    inside = "".join(f"<script>{script}</script>" for script in scripts)
    parts = iter(styles)
    document = SCRIPT.sub("", STYLE.sub(lambda found: f"<style>{next(parts)}</style>", document))
    return document.replace(
        '<meta name="policy">', f'<meta http-equiv="content-security-policy" content="{policy}; img-src data:">'
    ).replace("</body>", f'<script type="application/json" id="data">{text}</script>{inside}</body>')


def _digest(text: str) -> str:
    """Return the source of a policy that allows this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
