"""A script with a viewer in its last line serves until Ctrl-C; a prompt and a failed script do not wait."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest

from regard.views.viewer import script_end

pytestmark = pytest.mark.processes

START = """
import torch
from regard import weights
from regard.lens import Tape
tape = Tape({("a", 0): weights(*torch.randn(2, 1, 1, 4, 8))})
"""


@contextmanager
def run(end, *flags):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, *flags, "-c", START + end],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores Ctrl-C
    ) as script:
        try:
            yield script
        finally:
            script.kill()


def test_a_script_serves_after_its_last_line_until_it_is_interrupted():
    with run("tape.view(open_browser=False)") as script:
        assert script.stdout.readline().startswith("open http://127.0.0.1:")
        said = script.stdout.readline()
        found = re.fullmatch(r"the viewer keeps serving at (\S+); press Ctrl-C to stop it\n", said)
        with urllib.request.urlopen(found[1], timeout=10) as answer:
            assert answer.status == 200
            cookie = answer.headers["set-cookie"].partition(";")[0]
        home = found[1].partition("?")[0]
        asked = urllib.request.Request(f"{home}api/overview?capture=0&layer=0&batch=0", headers={"Cookie": cookie})
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert answer.status == 200
        assert script.stdout.readline().startswith("for another browser: http://127.0.0.1:")
        script.send_signal(signal.SIGINT)
        out, error = script.communicate(timeout=20)
    assert error == ""
    assert (script.returncode, out) == (0, "")


@pytest.mark.parametrize(
    "end",
    [
        "tape.view(open_browser=False).close()",
        "with tape.view(open_browser=False): pass",
        "tape.view(open_browser=False); raise ValueError('broken')",
    ],
)
def test_a_closed_viewer_and_a_failed_script_do_not_wait(end):
    with run(end) as script:
        out, _ = script.communicate(timeout=60)
    assert "keeps serving" not in out


@pytest.mark.parametrize("prompt", ["ps1", "interactive", "IPython"])
def test_a_prompt_does_not_wait(prompt, monkeypatch):
    assert script_end.is_script()
    if prompt == "ps1":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    elif prompt == "interactive":
        monkeypatch.setattr(script_end.sys, "flags", type("Flags", (), {"interactive": 1}))
    else:
        monkeypatch.setitem(sys.modules, "IPython", type("IPython", (), {"get_ipython": staticmethod(object)}))
    assert not script_end.is_script()
