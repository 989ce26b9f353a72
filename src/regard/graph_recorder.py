"""CUDA graphs: record the kernels of a function once, and launch all of them at once from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from . import torch_internals

T = TypeVar("T")
WAITING = frozenset(f"aten::{name}" for name in ("_local_scalar_dense", "equal", "nonzero", "_unique2", "unique_dim"))
COPYING = frozenset(f"aten::{name}" for name in ("_to_copy", "copy_"))


class GraphRecorder:
    """Records functions over tensors at fixed addresses. All graphs of a recorder use the same working memory.

    So only one of them may run at a time. `errors="thread_local"` lets other threads allocate during a recording.
    """

    def __init__(self, device: torch.device, *, errors: Literal["global", "thread_local"] = "global") -> None:
        self.device, self.errors = device, errors
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run the function eagerly on the stream of the recorder; raise a RuntimeError if it waits for the device.

        Libraries allocate their memory here. A recording that fails leaves PyTorch's allocator and random numbers in
        the middle of it, so a function that cannot be recorded has to be found before.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), WaitsRefused():
            run()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Return a function that launches the kernels of `run()` again, and the result, which each launch overwrites.

        No kernel runs while it is recorded.
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


class WaitsRefused(torch_internals.DispatchMode):
    """Within the block, in this thread, an operator that makes the host wait for a device raises a RuntimeError.

    >>> with WaitsRefused():
    ...     torch.ones(3).sum().item()
    Traceback (most recent call last):
    RuntimeError: aten::_local_scalar_dense makes the host wait for the device
    """

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out, name = func(*args, **(kwargs or {})), func.name().partition(".")[0]
        given = next((x for x in reversed(args) if isinstance(x, Tensor)), out)
        if name in WAITING or (name in COPYING and given.device.type != out.device.type):
            raise RuntimeError(f"{name} makes the host wait for the device")
        return out
