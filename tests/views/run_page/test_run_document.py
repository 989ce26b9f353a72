"""The document of a run page, and the data in it."""

import base64
import hashlib
import json
import re

from regard.views.run_page.run_document import MAX_POINTS, RunState, run_page, to_json


def state(**changed):
    curves = {"training/loss": ([10, 20, 30], [2.0, float("inf"), 1.0]), "evaluation/loss": ([30], [1.5])}
    return RunState(**{"name": "deen", "curves": curves, "best": 30, "steps": 40} | changed)


def test_data_holds_every_point_and_null_for_what_is_not_finite():
    found = to_json(state(settings={"model": {"dim": 16, "load": None}}))
    [panel] = found["panels"]
    assert panel["lines"] == [
        {"label": "training", "steps": [10, 20, 30], "values": [2.0, None, 1.0], "each": 1},
        {"label": "evaluation", "steps": [30], "values": [1.5], "each": 1},
    ]
    assert found["settings"] == {"model": {"dim": "16"}}


def test_long_lines_are_means_of_rows_and_say_so():
    n = 2 * MAX_POINTS + 1
    found = to_json(state(curves={"training/loss": (range(1, n + 1), [float(x) for x in range(n)])}))
    line = found["panels"][0]["lines"][0]
    assert line["each"] == 3
    assert len(line["steps"]) == len(line["values"]) == -(-n // 3)
    assert (line["steps"][0], line["values"][0]) == (3, 1.0)
    assert (line["steps"][-1], line["values"][-1]) == (n, n - 1.5)


def test_offline_page_runs_its_own_script_only_and_escapes_names():
    page = run_page(state(name="</script><b>", settings={"<i>": {"a": "</script>"}})).text
    assert "</script><b>" not in page
    assert "<b>" not in page
    policy = re.search(r'content-security-policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    blocks = re.findall(r"<script>(.*?)</script>|<style>(.*?)</style>", page, re.DOTALL)
    assert len(blocks) == 2
    for texts in blocks:
        digest = base64.b64encode(hashlib.sha256("".join(texts).encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(data) == to_json(state(name="</script><b>", settings={"<i>": {"a": "</script>"}}))
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
