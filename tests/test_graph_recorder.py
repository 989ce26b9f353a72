"""What records CUDA graphs; what a graph computes is tested where there is a GPU."""

import pytest
import torch

from regard.graph_recorder import GraphRecorder

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
    with pytest.raises(RuntimeError):
        recorder.record(lambda: x.sum().item())
    assert torch.cuda.current_stream() == before
    assert (x + 1).tolist() == [2.0] * 5
    replay, y = recorder.record(lambda: x + 1)
    replay()
    assert y.tolist() == [2.0] * 5
