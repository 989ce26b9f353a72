"""PyTorch's private symbols, all of them: no other file of the package names one.

Each was checked on PyTorch 2.11 and 2.13. When a new version lacks one, this is the file to change; every function
says what it gives us, and so what is lost without it.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn, overrides
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.jit._script import RecursiveScriptModule
from torch.jit._trace import TopLevelTracedModule, TracedModule
from torch.nn.modules import module as torch_module
from torch.utils import _python_dispatch as python_dispatch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

CHECKED_VERSIONS = "2.11", "2.13"

# PyTorch's attention itself, whatever `F.scaled_dot_product_attention` is patched with.
# Without it: the public name, taken before anything is patched.
SDPA = torch._C._nn.scaled_dot_product_attention

# Modules made by TorchScript, whose code Python does not run. Without them: compare class names.
SCRIPTED_MODULES = RecursiveScriptModule, TopLevelTracedModule, TracedModule

# Where torch.compile keeps the function it compiled, marks one it must not compile, and wraps callables that are no
# functions. Without them: attention inside compiled functions is not found.
COMPILED_FUNCTION = "_torchdynamo_orig_callable"
NOT_COMPILED = "_torchdynamo_disable"
WRAPPER_MODULE = "torch._dynamo.external_utils"

# Name of the submodule within what `torch.compile(module)` returns. Without it: compiled models are refused.
ORIGINAL_MODULE = "_orig_mod"

# Marks a function whose result torch.compile takes as a constant when it traces a call.
CONSTANT_WHEN_TRACED = "_dynamo_marked_constant"

# Tags of operators that no CUDA graph may record. Without it: watched models under reduce-overhead run as written.
UNSAFE_IN_CUDA_GRAPHS = (torch.Tag.cudagraph_unsafe,)

# Where torch.jit.script keeps the Python function it scripted. Without it: attention inside is only named.
SCRIPT_ORIGINAL = "_torchdynamo_inline"

# A mode that sees every operator of ATen. Without it: an audit names layers, and not the operators that ran in them.
DispatchMode = python_dispatch.TorchDispatchMode
HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def hook_tables(module: nn.Module) -> list[Any]:
    """Return the dictionaries of a module's hooks. Without them: a copy of a model keeps the hooks."""
    return [table for name in HOOK_TABLES if (table := vars(module).get(name)) is not None]


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], list[dict[int, Any]]]:
    """The hooks of a module around its forward by number, and all tables that hold these numbers.

    Without it: watched models are compiled in each block.
    """
    hooks = {**module._forward_pre_hooks, **module._forward_hooks}
    flags = module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called
    return hooks, [module._forward_pre_hooks, module._forward_hooks, *flags]


def hook_forwards(hooks: Iterable[tuple[nn.Module, Callable[..., Any], Callable[..., Any]]]) -> Callable[[], None]:
    """Register a hook before and one after the forward of each module; return a function that removes all of them.

    The first takes keywords too, the second is always called. Without it: registering takes ten times as long.
    """
    number, tables = RemovableHandle(OrderedDict()).id, list[dict[int, Any]]()
    for module, before, after in hooks:
        calls: tuple[dict[int, Any], ...] = module._forward_pre_hooks, module._forward_hooks
        flags: tuple[dict[int, Any], ...] = module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called
        for table, value in zip((*calls, *flags), (before, after, True, True), strict=True):
            table[number] = value
            tables.append(table)

    def remove() -> None:
        for table in tables:
            table.pop(number, None)

    return remove


# --- Tracing and transforms -------------------------------------------------------------------------------------------


is_jit_tracing = torch._C._is_tracing  # not wrapped, for every attention asks; without it: `torch.jit.is_tracing`


def in_tracing_mode() -> bool:
    """True under `torch.jit.trace`, and within `FakeTensorMode` or `make_fx`. Without it: traces fail in PyTorch."""
    if is_jit_tracing():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FAKE))


def holds_no_numbers(x: Tensor) -> bool:
    """True for tensors on the device meta, and for fake ones, outside of their mode too. Without it: as above."""
    return x.is_meta or isinstance(x, FakeTensor)


@contextmanager
def untraced_sizes() -> Iterator[None]:
    """Within the block `torch.jit.trace` records nothing, and sizes are ints. Without it: warnings for each size."""
    state = torch._C._get_tracing_state()
    set_state = torch._C._set_tracing_state  # type: ignore[attr-defined]
    set_state(None)
    try:
        yield
    finally:
        set_state(state)


# The innermost transform of torch.func (vmap, grad, jvp, ...) that runs, or None. PyTorch's own function, not wrapped:
# every attention asks. Without it: unsupported calls fail late, inside PyTorch.
functorch_transform = torch._C._functorch.peek_interpreter_stack


def transform_levels() -> list[tuple[int, bool]]:
    """The level of each open transform of torch.func, the outermost first, and True for vmap.

    Without these four: attention inside transforms is not recorded.
    """
    vmap = torch._C._functorch.TransformType.Vmap
    return [(each.level(), each.key() == vmap) for each in torch._C._functorch.get_interpreter_stack() or ()]


def unwrap_transform(x: Tensor, level: int) -> tuple[Tensor, int | None] | None:
    """The tensor that a wrapper of this level holds, and the dim that vmap maps; None for other tensors."""
    functorch = torch._C._functorch
    if not functorch.is_functorch_wrapped_tensor(x) or functorch.maybe_get_level(x) != level:
        return None
    return functorch.get_unwrapped(x), functorch.maybe_get_bdim(x) if functorch.is_batchedtensor(x) else None


def innermost_tensor(x: Tensor) -> Tensor:
    """The tensor with the values, within the wrappers of all transforms."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def outside_transforms() -> AbstractContextManager[Any]:
    """Close all transforms of torch.func within the block."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    context: AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return context


def in_dual_level() -> bool:
    """True inside forward-mode AD. Without it: tangents would be lost silently in backends that have none."""
    return forward_ad._current_level >= 0


def is_batched_gradient(x: Tensor) -> bool:
    """True for gradients of `is_grads_batched=True`. Without it: blocks fail with PyTorch's own, less clear error."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


# The number of the running backward pass, -1 if there is none. Without it: the function below.
backward_pass = torch._C._current_graph_task_id


def in_backward() -> bool:
    """True while autograd runs a backward pass, as when a checkpoint recomputes. Without it: calls are seen twice."""
    return torch._C._current_graph_task_id() != -1


def compiles() -> bool:
    """Whether torch.compile'd functions run compiled. Without it: functions that run as written are reported too."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and eval_frame._stance.stance != "force_eager"


def original_module(module: nn.Module) -> nn.Module:
    """The module within what `torch.compile(module)` returned; any other module itself."""
    if ORIGINAL_MODULE not in module._modules or "dynamo_ctx" not in module.__dict__:
        return module
    return module._modules[ORIGINAL_MODULE] or module


def compiled_slot(module: nn.Module) -> tuple[dict[str, Any], str] | None:
    """The attribute with the function that runs a module compiled: its dictionary and name; None if uncompiled."""
    if original_module(module) is not module:
        return module.__dict__, "forward"
    return None if module._compiled_call_impl is None else (module.__dict__, "_compiled_call_impl")


def run_as_written(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module, its hooks included, without the function that `module.compile()` made."""
    return module._call_impl(*args, **kwargs)


def compiler_of(module: nn.Module) -> tuple[Any, bool | None] | None:
    """The backend and `dynamic` of a compiled module. Without these four: compiled models run as they are written."""
    context, compiled = module.__dict__.get("dynamo_ctx"), module._compiled_call_impl
    if context is None and compiled is not None:
        context = inspect.getclosurevars(compiled).nonlocals.get("self")
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return None if not callable(backend) else (backend, getattr(context, "_dynamic", None))


def records_cuda_graphs(backend: Any) -> bool:
    """Whether a backend records CUDA graphs, as by mode="reduce-overhead"."""
    known = getattr(backend, "config", None)
    asked = known.get("triton.cudagraphs") if isinstance(known, dict) else None
    return bool(asked) or "cudagraph" in str(getattr(backend, "compiler_name", backend)).lower()


def compiler_errors() -> tuple[type[Exception], ...]:
    """The errors by which torch.compile refuses a model or a backend fails; imports the compiler."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def module_ids(node: fx.Node) -> list[int]:
    """The ids of the modules that make a call in a graph of torch.compile, the innermost last."""
    return [int(key.partition("@")[0]) for key in node.meta.get("nn_module_stack", ()) if key[:1].isdigit()]


def size_hint(size: int | torch.SymInt) -> int:
    """An open size in the call that is traced, without a guard; other sizes as they are."""
    return size if isinstance(size, int) else int(size.node.hint)


def is_fused_operator(function: Any) -> bool | None:
    """True for an operator of a library or one that holds functions, False for one of PyTorch, None for functions."""
    if isinstance(function, torch._ops.HigherOrderOperator):
        return True
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(function).split(".")[0] not in ("aten", "prims")
    return None


def is_always_true(condition: bool | torch.SymBool) -> bool:
    """False if a condition on open lengths may be false; no guard. Without it: such lengths are fixed by an export."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def break_graph(reason: str) -> None:
    """End the graph torch.compile records here, and say why. Without it: the same break with a less clear reason."""
    torch._dynamo.graph_break(msg=reason)


def recompile_limit_error() -> type[Exception]:
    """The error of a function compiled too often; imports the compiler. Without it: catch RuntimeError."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return FailOnRecompileLimitHit


def compile_error() -> type[Exception]:
    """The error of a function that PyTorch cannot compile; imports the compiler. Without it: catch RuntimeError."""
    from torch._dynamo.exc import BackendCompilerFailed

    return BackendCompilerFailed


def recompile_limit(most: int) -> AbstractContextManager[Any]:
    """Let functions compile up to `most` times. Without it: torch.compile raises for batches of many lengths."""
    limit: AbstractContextManager[Any] = torch._dynamo.config.patch(
        recompile_limit=most, accumulated_recompile_limit=most
    )
    return limit


# True under autocast for any device. PyTorch's own function, not wrapped: a capture calls it in every layer.
# Without it: ask `torch.is_autocast_enabled` per device.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled


# --- Attention kernels: only the private functions return the log-sum-exp ---------------------------------------------


def choose_sdp_kernel(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, *args: Any, **kwargs: Any) -> int:
    """The number of the kernel `F.scaled_dot_product_attention` takes. Without it: try them in order."""
    return torch._fused_sdp_choice(q, k, v, added, *args, **kwargs)


def cpu_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, added: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp on the CPU. Without it, as without the three below: the `tiled` backend."""
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=causal, attn_mask=added, scale=scale
    )
    return out, lse


def cpu_flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    added: Tensor | None = None,
    causal: bool = False,
) -> Sequence[Tensor]:
    """The gradients of q, k and v of `cpu_flash_attention`."""
    grads: Sequence[Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=added, scale=scale
    )
    return grads


def flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float) -> Sequence[Any]:
    """Output, log-sum-exp and more, by the flash kernel for GPUs."""
    return torch._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, dropout: float, causal: bool, scale: float
) -> Sequence[Any]:
    """Output, log-sum-exp (rows rounded up) and more, by the memory-efficient kernel for GPUs."""
    return torch._scaled_dot_product_efficient_attention(q, k, v, added, True, dropout, causal, scale=scale)


def cudnn_attention(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, dropout: float, causal: bool, scale: float
) -> Sequence[Any]:
    """Output, log-sum-exp (b h i 1) and more, by cuDNN."""
    return torch._scaled_dot_product_cudnn_attention(q, k, v, added, True, dropout, causal, False, scale=scale)


Pair = tuple[Any, Any]  # of queries and keys, or before and after


# Parameters of the kernels above after query, key and value, by the names of `F.scaled_dot_product_attention`; "" for
# others. Without it: compiled layers of regard run as they are written while they are watched.
KERNEL_PARAMETERS: dict[Any, tuple[str, ...]] = {
    torch._scaled_dot_product_flash_attention_for_cpu: ("dropout_p", "is_causal"),
    torch._scaled_dot_product_flash_attention: ("dropout_p", "is_causal", ""),
    torch._scaled_dot_product_efficient_attention: ("attn_mask", "", "dropout_p", "is_causal"),
    torch._scaled_dot_product_cudnn_attention: ("attn_mask", "", "dropout_p", "is_causal", ""),
}


# Attention operators that return the log-sum-exp second, and the position of the argument that requests it.
# Without these and the class: summaries of compiled models take a second pass over queries and keys.
STATISTIC_FLAGS: dict[Any, int | None] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: None,
    torch.ops.aten._scaled_dot_product_flash_attention.default: None,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 4,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: 4,
}
SDPA_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default


class KernelStatistics(DispatchMode):
    """Keep the log-sum-exp of attention kernels that run within the block, or that a compiler traces there."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Tensor] = []

    @property
    def only(self) -> Tensor | None:
        """The log-sum-exp of the kernel; None if none ran, or several."""
        return self._found[0] if len(self._found) == 1 else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is SDPA_OPERATOR:  # PyTorch has not divided it yet, as in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        if func not in STATISTIC_FLAGS:
            return func(*args, **kwargs)
        if (flag := STATISTIC_FLAGS[func]) is not None:
            args = (*args[:flag], True, *args[flag + 1 :])
        result = func(*args, **kwargs)
        self._found.append(result[1])
        return result


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Pair,
    longest: Pair,
    *,
    dropout: float,
    causal: bool,
    scale: float,
    window: Pair,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of sequences by the flash kernel for GPUs; a causal mask ends at the last key.

    q, k and v are `n h d`, with the starts of the sequences, int32; or `b n h d`, with None. The window is the number
    of keys seen before and after a query's own, None for all. Without it: masks in FlexAttention.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *starts,
        *longest,
        dropout,
        causal,
        False,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return out, lse


def flash_varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Pair,
    longest: Pair,
    *,
    causal: bool,
    scale: float,
) -> Sequence[Tensor]:
    """The gradients of q, k and v of `flash_varlen` without dropout and window; rows without keys have an lse of inf.

    `out` and `lse` may be those of several calls over other cuts of the same rows, which autograd cannot join.
    """
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # the state of the dropout
    grads: Sequence[Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *starts, *longest, 0.0, causal, unused, unused, scale=scale
    )
    return grads


# --- Function modes and hooks -----------------------------------------------------------------------------------------


def is_function_mode_enabled() -> bool:
    """True if a TorchFunctionMode is active in this thread. Without it: look at the stack below."""
    return torch._C._is_torch_function_mode_enabled()


def without_function_modes() -> AbstractContextManager[Any]:
    """Call no function mode within the block. Without it: each attribute that is read of a tensor costs a call."""
    block: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return block


def function_mode_stack() -> list[Any]:
    """The function modes of this thread, outermost first. Without these three: no mode can leave a stack early."""
    return overrides._get_current_function_mode_stack()


# The length of that stack. Without it: the stack is listed for each layer.
function_mode_depth = torch._C._len_torch_function_stack


def push_function_mode(mode: Any) -> None:
    """Enter a mode without its context manager."""
    overrides._push_mode(mode)


def pop_function_mode() -> Any:
    """Leave the innermost mode and return it."""
    return overrides._pop_mode()


def operator_switch(kernels: Mapping[Any, Callable[..., Any]]) -> Callable[[bool], object] | None:
    """Register a function to run in place of each operator, in threads that have switched it on; return the switch.

    The dispatcher has a key that no tensor of PyTorch bears, and goes by it first. Other operators pass it by, at no
    cost. None without it, and before PyTorch 2.11, where it was not tried: a function mode then sees each function.
    """
    name = "TESTING_ONLY_GenericMode"
    if torch.__version__ < "2.11":
        return None
    try:
        key = torch._C._dispatch_key_parse(name)
        switch = torch._C._dispatch_tls_set_dispatch_key_included
        others, chosen = torch.library.Library("_", "IMPL", name), torch.library.Library("aten", "IMPL", name)
        others.fallback(torch.library.fallthrough_kernel)
        for operator, kernel in kernels.items():
            chosen.impl(operator, kernel)
    except (AttributeError, RuntimeError):
        return None
    _LIBRARIES.extend((others, chosen))
    return partial(switch, key)


_LIBRARIES: list[torch.library.Library] = []  # registrations end with their library


def global_module_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """Forward hooks and pre-hooks of every module: PyTorch's own dicts. Without it: such hooks miss fast decoding."""
    return torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks


def tree_leaves(value: Any) -> list[Any]:
    """The values within nested lists, dicts and registered classes. Without it: outputs of modules are not compared."""
    leaves: list[Any] = pytree.tree_leaves(value)
    return leaves


def tree_map(fn: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `fn` of each leaf in its place. Without it: outputs of models cannot be cut into batch rows."""
    return pytree.tree_map(fn, value)


def next_hook_id() -> int:
    """A number that grows with each hook added anywhere. Without it: look for hooks at each decoding step."""
    return RemovableHandle.next_id


def is_only_tensor_of_memory(x: Tensor) -> bool:
    """True if no other tensor has the memory of x. Without it (False): a beam search on a CPU takes new memory."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 2  # x, and the storage named here


# --- Products and multi-tensor operations -----------------------------------------------------------------------------


def clear_cublas_workspaces() -> None:
    """Free the memory in which cuBLAS works. Without it: a CUDA graph may use memory that was freed."""
    torch._C._cuda_clearCublasWorkspaces()


def pack_linear_weight(weight: Tensor, rows: int) -> Tensor:
    """A weight in oneDNN's layout for products with that many rows. Without it and the next: `F.linear`, slower."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b with a packed weight."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def multiply_all_(tensors: Sequence[Tensor], by: Tensor | float) -> None:
    """Multiply many tensors in place in few kernel launches. Without it: a loop, slower."""
    torch._foreach_mul_(list(tensors), by)
