"""Pages in a notebook that share one script: the first output holds it, and the others hold their data alone.

An output is HTML with a small script that fills the page's template, which is the same for all pages, and shows it in
a sandboxed frame. The template comes with the first output. It comes again whenever the cell of that output runs again,
because the notebook then throws the earlier output away. The small scripts also run in HTML made by nbconvert.
"""

from __future__ import annotations

import hashlib
import html
import json
import secrets

from .viewer.notebook import cell_id, in_colab, in_kernel

DATA_MARK, TITLE_MARK = "REGARD-PAGE-DATA", "REGARD-PAGE-TITLE"  # places of the template
RIGHTS = "allow-scripts allow-downloads"
FRAME_STYLE = "width:100%;height:720px;border:0"
PATIENCE_SECONDS = 60  # a notebook may draw outputs out of order
_cell_of_template: dict[str, str | None] = {}  # digest of a template, and the cell that holds it

SHOW = """(function show(tries) {
  const place = document.getElementById(ID), template = (window.regardPages || {})[DIGEST];
  if (!place) return;
  if (!template) {
    if (tries < LIMIT) setTimeout(show, 500, tries + 1);
    else place.querySelector("p").hidden = false;
    return;
  }
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", RIGHTS);
  frame.style.cssText = STYLE;
  frame.srcdoc = template.replace(DATA_MARK, () => DATA).replace(TITLE_MARK, () => TITLE);
  place.replaceChildren(frame);
})(0);"""
LOST = (
    "The script of this page was in another output of the notebook, which is gone. "
    "Restart the kernel and run this cell again."
)


def shared_frame(template: str, data: str, title: str, before: str) -> str | None:
    """Return the output with a page, None where outputs cannot share: outside of a kernel, and in Colab.

    `before` is HTML that stands in place of the frame until that is made.
    """
    if not in_kernel() or in_colab():
        return None
    digest, name = hashlib.sha256(template.encode()).hexdigest()[:16], f"regard-{secrets.token_hex(8)}"
    cell = cell_id()
    scripts = []
    if digest not in _cell_of_template or (cell is not None and _cell_of_template[digest] == cell):
        _cell_of_template[digest] = cell
        scripts.append(f"(window.regardPages = window.regardPages || {{}})[{_js(digest)}] = {_js(template)};")
    values: dict[str, str | int] = {
        "ID": name,
        "DIGEST": digest,
        "LIMIT": 2 * PATIENCE_SECONDS,
        "RIGHTS": RIGHTS,
        "STYLE": FRAME_STYLE,
        "DATA_MARK": DATA_MARK,
        "TITLE_MARK": TITLE_MARK,
        "DATA": data,
        "TITLE": html.escape(title),
    }
    names = ", ".join(values)
    scripts.append(f"(function({names}) {{\n{SHOW}\n}})({', '.join(map(_js, values.values()))});")
    lost = f"<p hidden>{html.escape(LOST)}</p>"
    return f'<div id="{name}">{before}{lost}</div>' + "".join(f"<script>{script}</script>" for script in scripts)


def _js(value: str | int) -> str:
    """Return a value as JavaScript in which no character can end the script."""
    return json.dumps(value).replace("<", "\\u003c")
