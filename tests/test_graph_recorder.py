"""What records CUDA graphs; what a graph computes is tested where there is a GPU."""

import pytest
import torch

from regard import torch_internals
from regard.graph_recorder import GraphRecorder, WaitsRefused


def test_an_operator_that_waits_for_the_device_is_refused():
    x = torch.ones(5)
    for waits in (lambda: x.sum().item(), lambda: bool(x.any()), lambda: torch.equal(x, x), x.nonzero):
        with pytest.raises(RuntimeError, match=r"aten::\w+ makes the host wait for the device"), WaitsRefused():
            waits()
    with pytest.raises(RuntimeError, match="aten::_to_copy makes the host wait for the device"), WaitsRefused():
        x.to("meta")
    with WaitsRefused():
        assert (x.double() + 1).clone().copy_(x).shape == (5,)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@cuda
def test_a_recorded_function_reads_and_writes_the_same_addresses():
    recorder, x = GraphRecorder(torch.device("cuda")), torch.ones(5, device="cuda")
    recorder.warm_up(lambda: x @ x)
    replay, y = recorder.record(lambda: x * 2 + 1)
    x.fill_(3)
    replay()
    assert y.tolist() == [7.0] * 5


@pytest.mark.gpu
@cuda
def test_a_function_that_waits_for_the_device_raises_and_leaves_the_stream_as_it_was():
    recorder, x = GraphRecorder(torch.device("cuda")), torch.ones(5, device="cuda")
    before = torch.cuda.current_stream()
    for waits in (lambda: x.sum().item(), lambda: x.tolist(), lambda: x + torch.ones(5).cuda()):
        with pytest.raises(RuntimeError, match="makes the host wait for the device"):
            recorder.warm_up(waits)
    assert torch.cuda.current_stream() == before
    assert torch.randn(3, device="cuda").isfinite().all()
    assert (x + 1).tolist() == [2.0] * 5
    replay, y = recorder.record(lambda: x + 1)
    replay()
    assert y.tolist() == [2.0] * 5


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_outlives_the_workspaces_of_products(dtype):
    recorder = GraphRecorder(torch.device("cuda"))
    x, weight = torch.randn(64, 512, device="cuda", dtype=dtype), torch.randn(32_000, 512, device="cuda", dtype=dtype)
    up = torch.randn(512, 2048, device="cuda", dtype=dtype)

    def run():
        return (x @ up @ up.T) @ weight.T

    recorder.warm_up(run)
    replay, y = recorder.record(run)
    expected = run()
    torch_internals.clear_cublas_workspaces()
    torch.cuda.empty_cache()
    junk = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(64)]
    for _ in range(3):
        replay()
        torch.cuda.synchronize()
    torch.testing.assert_close(y, expected)
    assert len(junk) == 64
