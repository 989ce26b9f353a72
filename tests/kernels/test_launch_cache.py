"""A launch that comes again goes to the kernel that was compiled for its like, with the arguments it has now."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch

from regard.kernels import launch_cache as launch


class Compiled:
    """Keeps what it is launched with."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((grid, arguments))


class Kernel:
    """Stands for a compiled function: each launch compiles."""

    arg_names = ("X", "n", "bias", "WIDTH", "CAP")

    def __init__(self):
        self.made = []
        self.warmed = []
        self.may_end = threading.Event()

    def __getitem__(self, grid):
        def run(*given, **named):
            self.made.append(Compiled())
            return self.made[-1]

        return run

    def warmup(self, *given, grid, **named):
        self.may_end.wait(10)
        self.interval = sys.getswitchinterval()
        self.warmed.append((threading.current_thread().name, given))
        if "WRONG" in named:
            raise ValueError("no such constant")


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "CAN_CACHE", True)
    monkeypatch.setattr(launch, "_cache", {})
    monkeypatch.setattr(launch, "_compiling", {})
    monkeypatch.setattr(launch, "ALWAYS_WAITS", False)
    monkeypatch.setattr(launch, "PATIENCE", 0.0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    return Kernel()


def test_a_repeated_launch_uses_the_compiled_kernel(kernel):
    x, y = torch.zeros(8), torch.ones(8)
    launch.launch(kernel, (3,), x, 8, None, CAP=None, WIDTH=16, num_warps=4)
    launch.launch(kernel, (5, 2), y, 8, None, CAP=None, WIDTH=16, num_warps=4)
    [compiled] = kernel.made
    [(grid, (given, *rest))] = compiled.launched
    assert grid == (5, 2, 1)
    assert given is y
    assert rest == [8, None, 16, None]  # constants in the order of the signature


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((torch.zeros(8, dtype=torch.float64), 8, None), {}),
        ((torch.zeros(9)[1:], 8, None), {}),  # off its 16 bytes
        ((torch.zeros(8), 9, None), {}),
        ((torch.zeros(8), 8, torch.zeros(1)), {}),
        ((torch.zeros(8), 8, None), {"WIDTH": 32}),
        ((torch.zeros(8), 8, None), {"CAP": 5.0}),
        ((torch.zeros(8), 8, None), {"num_warps": 8}),
    ],
)
def test_a_launch_with_other_arguments_is_looked_up_by_triton(kernel, given, named):
    usual = {"CAP": None, "WIDTH": 16, "num_warps": 4}
    launch.launch(kernel, (3,), torch.zeros(8), 8, None, **usual)
    launch.launch(kernel, (3,), *given, **(usual | named))
    assert len(kernel.made) == 2


def test_another_device_is_looked_up_by_triton(kernel, monkeypatch):
    for device in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launch.launch(kernel, (3,), torch.zeros(8), 8, None, WIDTH=16, CAP=None)
    assert len(kernel.made) == 2


def test_a_launch_runs_on_the_device_of_its_tensors(kernel, monkeypatch):
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 1)

    entered = []

    @contextmanager
    def entering(device):
        entered.append(device.index)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: device.index)
        yield
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    monkeypatch.setattr(torch.cuda, "device", entering)
    for x in (torch.zeros(8), torch.zeros(8).as_subclass(Elsewhere), torch.zeros(8)):
        launch.launch(kernel, (3,), x, 8, None, WIDTH=16, CAP=None)
    assert entered == [1]
    assert len(kernel.made) == 2


def test_the_cache_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(launch, "MAX_CACHED_LAUNCHES", 4)
    for n in range(11):
        launch.launch(kernel, (3,), torch.zeros(8), n, None, WIDTH=16, CAP=None)
    assert len(kernel.made) == 11
    assert len(launch._cache) <= 4


def test_an_interpreted_kernel_is_launched_as_it_is(kernel, monkeypatch):
    monkeypatch.setattr(launch, "CAN_CACHE", False)
    for _ in range(2):
        launch.launch(kernel, (3,), torch.zeros(8), 8, None, WIDTH=16, CAP=None)
    assert len(kernel.made) == 2


def launch_without_waiting(kernel, *given, **named):
    with launch.without_waiting():
        launch.launch(kernel, (3,), *given, **({"WIDTH": 16, "CAP": None} | named))


def finish(kernel):
    kernel.may_end.set()
    launch._worker().submit(int).result()  # what was submitted before is done


def test_another_thread_compiles_for_a_caller_that_does_not_wait(kernel):
    large = torch.zeros(10_000)
    for _ in range(2):
        with pytest.raises(launch.StillCompiling):
            launch_without_waiting(kernel, large, 8, None)
    finish(kernel)
    [(thread, (given, *rest))] = kernel.warmed
    assert thread.startswith("regard-compile")
    assert (given.numel(), given.dtype, rest) == (17, torch.float32, [8, None])
    launch_without_waiting(kernel, large, 8, None)
    assert len(kernel.made) == 1
    assert not launch._compiling
    assert kernel.interval == pytest.approx(launch.SWITCH_SECONDS)  # the caller rarely waits for this thread's Python
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_a_caller_waits_unless_it_says_otherwise(kernel, monkeypatch):
    launch.launch(kernel, (3,), torch.zeros(8), 8, None, WIDTH=16, CAP=None)
    monkeypatch.setattr(launch, "ALWAYS_WAITS", True)
    launch_without_waiting(kernel, torch.zeros(8), 9, None)
    monkeypatch.setattr(launch, "ALWAYS_WAITS", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launch_without_waiting(kernel, torch.zeros(8), 10, None)
    assert (len(kernel.made), kernel.warmed) == (3, [])


def test_a_block_that_only_compiles_launches_nothing(kernel):
    with pytest.raises(launch.StillCompiling), launch.compiling_only():
        launch_without_waiting(kernel, torch.zeros(8), 8, None)
    with launch.without_waiting():
        assert not launch.waits_for_kernels()
    assert launch.waits_for_kernels()
    finish(kernel)
    for _ in range(2):
        with launch.without_waiting(), launch.compiling_only():
            launch.launch(kernel, (3,), torch.zeros(8), 8, None, WIDTH=16, CAP=None)
        assert not any(one.launched for one in kernel.made)
        launch.launch(kernel, (3,), torch.zeros(8), 8, None, WIDTH=16, CAP=None)
        [compiled] = kernel.made
        compiled.launched.clear()


def test_a_kernel_that_is_loaded_at_once_is_launched_at_once(kernel, monkeypatch):
    monkeypatch.setattr(launch, "PATIENCE", 10.0)
    kernel.may_end.set()
    launch_without_waiting(kernel, torch.zeros(8), 8, None)
    assert (len(kernel.warmed), len(kernel.made)) == (1, 1)


def test_lengths_that_wait_for_one_kernel_do_not_wait_for_each_other(kernel, monkeypatch):
    for n in (8, 9):
        with pytest.raises(launch.StillCompiling):
            launch_without_waiting(kernel, torch.zeros(8), n, None)
        monkeypatch.setattr(launch, "PATIENCE", 100.0)  # the second is known to be behind the first
    finish(kernel)
    launch_without_waiting(kernel, torch.zeros(8), 10, None)
    assert [given[1] for _, given in kernel.warmed] == [8, 9, 10]
    assert not launch._compiling


def test_what_a_compilation_raises_is_raised_at_the_next_launch(kernel):
    with pytest.raises(launch.StillCompiling):
        launch_without_waiting(kernel, torch.zeros(8), 8, None, WRONG=1)
    finish(kernel)
    with pytest.raises(ValueError, match="no such constant"):
        launch_without_waiting(kernel, torch.zeros(8), 8, None, WRONG=1)


def test_a_stand_in_is_aligned_as_the_tensor_and_has_its_tiles():
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert launch._stand_in(x).data_ptr() % 16 == 0
    assert launch._stand_in(x.flatten()[1:]).data_ptr() % 16
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    found = launch._stand_in(TensorDescriptor.from_tensor(x, [64, 64], layout))
    assert (found.base.numel(), found.base.dtype, found.block_shape, found.layout) == (17, x.dtype, [64, 64], layout)
    assert [launch._stand_in(one) for one in (3, 0.5, None)] == [3, 0.5, None]


@pytest.mark.compiled
def test_a_cached_launch_passes_the_arguments_that_triton_passes():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.fake_launches"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "19 remembered: _exponentials_kernel, _scores_kernel, _gradient_sums_kernel, _gradient_sums_kernel, "
        "_softmax_kernel, _merge_kernel, _merge_kernel, _summary_kernel, _weighted_product_kernel, "
        f"_divergence_kernel, {6 * '_gradient_kernel, '}"
        "_clear_kernel, hopper_summary_kernel, _clear_kernel, hopper_summary_kernel\n"
    )
