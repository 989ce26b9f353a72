"""CUDA graphs: record the kernels of a function once, and launch all of them at once from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from . import torch_internals

T = TypeVar("T")


class GraphRecorder:
    """Records functions over tensors at fixed addresses. All graphs of a recorder use the same working memory.

    So only one of them may run at a time. `errors="thread_local"` lets other threads allocate during a recording.
    """

    def __init__(self, device: torch.device, *, errors: Literal["global", "thread_local"] = "global") -> None:
        self.device, self.errors = device, errors
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run the function eagerly on the stream of the recorder, so that libraries allocate their memory there."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            run()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Return a function that launches the kernels of `run()` again, and the result, which each launch overwrites.

        No kernel runs while it is recorded. A function that reads tensor values on the host raises a RuntimeError.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        # A workspace that cuBLAS already has may be freed while the graph lives; a new one is memory of the graph.
        torch_internals.clear_cublas_workspaces()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode=self.errors):
                result = run()
        except BaseException:
            torch.cuda.set_stream(stream)  # a recording that fails would leave its own stream in place
            raise
        finally:
            torch_internals.clear_cublas_workspaces()  # nothing else may work in the memory of the graph
        return graph.replay, result
