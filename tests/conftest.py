"""What every test may count on: one thread a worker, fixed seeds, and uninitialized memory that shows."""

import fcntl
import logging
import os
import re
import subprocess
import sys
import warnings
from itertools import chain, combinations
from pathlib import Path

import pytest
import torch
from _pytest.mark.expression import Expression
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

settings.register_profile(
    "fast", max_examples=50, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "nightly", parent=settings.get_profile("fast"), max_examples=int(os.environ.get("REGARD_EXAMPLES", 10_000))
)
settings.load_profile(os.environ.get("REGARD_HYPOTHESIS", "fast"))


def pytest_ignore_collect(collection_path, config):
    """Do not import a file of which `-m` wants no test, whichever of the marks in its text the test has."""
    if collection_path.suffix != ".py" or collection_path.name == "__init__.py" or not config.option.markexpr:
        return None
    expression = Expression.compile(config.option.markexpr)
    text = collection_path.read_text(encoding="utf8")
    named = set(re.findall(r"\w+", config.option.markexpr)) & set(re.findall(r"\bmark\.(\w+)", text))
    subsets = chain.from_iterable(combinations(sorted(named), n) for n in range(len(named) + 1))
    return None if any(expression.evaluate(lambda name, *, s=subset: name in s) for subset in subsets) else True


@pytest.fixture(scope="session", autouse=True)
def cuda_contexts(request):
    """Use cuBLAS once in this thread and once in autograd's, before the first test on a GPU.

    PyTorch warns if cuBLAS is the first to use CUDA in a thread, and warnings are errors in tests.
    """
    on_gpu = any(item.get_closest_marker("gpu") for item in request.session.items)
    if on_gpu and torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = torch.ones(2, 2, device="cuda", requires_grad=True)
            (x @ x).sum().backward()


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every test.

    Before CUDA is used `torch.manual_seed` formats the call stack three times, to be shown if seeding the GPU fails
    later: half a millisecond for each of 18,000 tests.
    """
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture
def logged():
    """The records of all loggers from here on.

    pytest's own `caplog` is turned off in pyproject.toml: for it each phase of each test visits all loggers there are,
    hundreds with PyTorch and transformers, and attaches two handlers to those that do not propagate.
    """
    records, handler = [], logging.Handler()
    handler.emit = records.append
    known = [x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger) and not x.propagate]
    for logger in (logging.root, *known):
        logger.addHandler(handler)
    yield records
    for logger in (logging.root, *known):
        logger.removeHandler(handler)


@pytest.fixture
def poisoned():
    """`torch.empty` comes back full of NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that short sequences are cut into many, and nothing is too small to be cut."""
    monkeypatch.setattr("regard.ops.backends.sdpa.MAX_TILE_ENTRIES", 0)
    monkeypatch.setattr("regard.ops.blocks.prepared_call.ROWS_PER_BLOCK", 16)
    monkeypatch.setattr("regard.ops.blocks.prepared_call.KEYS_PER_TILE", 8)
    monkeypatch.setattr("regard.ops.blocks.prepared_call.SCORES_PER_BLOCK", 2**10)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The folder of the built site; a warning of mkdocs fails the build. One worker builds, the others wait for it."""
    shared, root = tmp_path_factory.getbasetemp(), Path(__file__).parents[1]
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder of its own within the shared one
        shared = shared.parent
    folder, said = shared / "site", shared / "site.said"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            build = ["-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", str(root / "mkdocs.yml")]
            command = [sys.executable, *build, "--site-dir", str(folder)]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True)
            said.write_text(f"{done.returncode}\n{done.stderr}", encoding="utf8")
    code, _, errors = said.read_text(encoding="utf8").partition("\n")
    assert code == "0", errors
    return folder
