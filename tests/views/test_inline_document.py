"""A document as one file: its own scripts and styles inside, and nothing else may run."""

import base64
import hashlib
import json
import re

import pytest

from regard.views.inline_document import inline_document

FILES = {"a.css": "p { color: red }", "b.css": "b { top: 0 }", "a.js": "let a;", "b.js": "let b;"}
DOCUMENT = """<html><head><meta name="policy">
<link rel="stylesheet" href="a.css"><link rel="stylesheet" href="b.css">
<script src="a.js" defer></script>
<script src="b.js" defer></script>
</head><body>&lt;</body></html>"""


def test_files_are_inside_in_order_and_allowed_by_their_digests():
    page = inline_document(DOCUMENT, FILES.__getitem__, {"x": "</script><b>"})
    assert re.findall(r"<style>(.*?)</style>", page) == [FILES["a.css"], FILES["b.css"]]
    assert re.findall(r"<script>(.*?)</script>", page) == [FILES["a.js"], FILES["b.js"]]
    policy = re.search(r'content-security-policy" content="([^"]*)"', page)[1]
    sources = {
        name: {f"'sha256-{base64.b64encode(hashlib.sha256(FILES[file].encode()).digest()).decode()}'" for file in files}
        for name, files in {"script-src": ("a.js", "b.js"), "style-src": ("a.css", "b.css")}.items()
    }
    found = {part.split()[0]: set(part.split()[1:]) for part in policy.split("; ")}
    assert found == {"default-src": {"'none'"}, "img-src": {"data:"}, **sources}
    assert not re.findall(r'(?:src|href)="', page)


def test_data_cannot_end_its_element():
    page = inline_document(DOCUMENT, FILES.__getitem__, {"x": "</script><b>"})
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1]
    assert json.loads(data) == {"x": "</script><b>"}
    assert "<b>" not in page


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        inline_document(DOCUMENT, FILES.__getitem__, float("nan"))
