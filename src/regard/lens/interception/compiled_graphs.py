"""Show the attention calls of a graph of torch.compile to the modes that watch it, without a graph break.

What
    `watch_calls` adds one operator of ours beside each call of a fused attention kernel. It takes the tensors of the
    call and the name of its layer. The call itself stays as it is, so the kernel computes what it always computes.
    `replace_calls` puts another operator in place of each call, whose output the modes may change.

How it flows
    PyTorch's compiler hands over each graph before it compiles it (`compiled_models.WatchingCompiler`). Every operator
    takes the result of the one before it, and the last result is one more output of the graph: so none is dropped, and
    their order is that of the calls. When the graph runs, each operator hands its call to the modes of the running
    model (`compiled_models.RUNNING`).

Limits
    A graph that may hold attention of another kind raises `CannotWatch`: one with a softmax, with a product of
    activations that depends on another one, with functions within functions, or with operators of other libraries. So
    does one in which the dims of the heads are not certain.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ... import torch_internals
from ..eager.dim_origins import DimOrigins, join_dims
from ..eager.head_layout import LayerEvidence, choose_layout
from ..eager.matmul import MATMUL_NAMES
from ..eager.op_rules import EXP_NAMES, SOFTMAX_NAMES
from .graph_masks import GraphMask, GraphMasks, HeadCopies, MaskNode
from .sdpa import SDPA
from .torch_multihead import merged_mask, project_inputs

WEIGHT_NAMES = EXP_NAMES | {"exp2", "sigmoid", "relu", "elu", "softplus", "clamp_min", "log_softmax"}
OTHER_ATTENTION = ("softmax", "attention", "attn", "multi_head", "transformer_encoder", "grid_sample")
SDPA_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
KERNELS = frozenset((SDPA, *torch_internals.KERNEL_PARAMETERS))
MULTI_HEAD = F.multi_head_attention_forward
MULTI_HEAD_PARAMETERS = tuple(inspect.signature(MULTI_HEAD).parameters)
OWN_LIBRARIES = ("torch", "_operator", "builtins", "math", "einops")  # modules whose functions attend by no other name


class CannotWatch(Exception):
    """The reason why the attention of a graph cannot be seen while it runs compiled."""


class WatchedCall(NamedTuple):
    """One attention call of a graph: the tensors and numbers that `F.scaled_dot_product_attention` takes."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None  # None for a mask that the graph need not compute
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    mask_number: int | None  # equal for calls of a graph that take the same mask
    copies: int  # adjacent copies of each head of key and value
    layer: str
    out: Tensor | Callable[[], Tensor]  # what the kernel returned, or a function that runs it
    lse: Tensor | None = None  # the log-sum-exp of each row as the kernel returned it


CALL_SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, "
    "bool enable_gqa, int? mask_number, int copies, str layer"
)
Report = Callable[[WatchedCall], Tensor | None]
_REPORTS: list[Report] = []  # the function that gets the calls of all graphs


def report_calls_to(report: Report) -> None:
    """Pass each attention call of graphs to a function, which may return another output."""
    _REPORTS[:] = [report]


def _watch_call(after: Tensor | None, out: Tensor, lse: Tensor | None, *call: Any) -> Tensor:
    _REPORTS[0](WatchedCall._make((*call, out, lse)))
    return torch.empty(1)


def _change_call(*call: Any) -> Tensor:
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, *_ = call

    def run() -> Tensor:
        return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    changed = _REPORTS[0](WatchedCall._make((*call, run, None)))
    out, declared = run() if changed is None else changed, _empty_output(query, key, value)
    return out if out.stride() == declared.stride() else declared.copy_(out)


def _empty_output(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """Return memory for the output of a call, laid out as kernels lay it out: b n h e, seen as b h n e."""
    b, h, n, _ = query.shape
    return query.new_empty(b, n, h, value.shape[-1]).transpose(1, 2)


@cache
def _operators() -> tuple[Any, Any]:
    """The two operators; no CUDA graph may hold them, since it would replay their kernels without calling them.

    The one that watches takes tensors as the graph lays them out, so that the graph copies none for it.
    """
    tags = torch_internals.UNSAFE_IN_CUDA_GRAPHS
    watch = torch.library.custom_op(
        "regard::watch_call",
        _watch_call,
        mutates_args=(),
        schema=f"(Tensor? after, Tensor out, Tensor? lse, {CALL_SCHEMA}) -> Tensor",
        tags=(*tags, torch.Tag.flexible_layout),
    )
    watch.register_fake(lambda *call: torch.empty(1))
    change = torch.library.custom_op(
        "regard::change_call", _change_call, mutates_args=(), schema=f"({CALL_SCHEMA}) -> Tensor", tags=tags
    )
    change.register_fake(_empty_output)
    return torch.ops.regard.watch_call.default, torch.ops.regard.change_call.default


def watch_calls(graph: fx.GraphModule, modules: Mapping[int, str]) -> dict[int, GraphMask] | None:
    """Add an operator beside each attention call, and one output to the graph; None if nothing in it attends.

    `modules` has the names of the modules within the compiled module, by id. Return the masks that have the same
    entries in every run, by number; the graph computes them for its kernels alone.
    """
    calls = _known_calls(graph, (*KERNELS, MULTI_HEAD))
    if not calls:
        return None
    last: fx.Node | None = None
    masks = _masks_of(graph, calls)
    for call in calls:
        add = _Inserter(graph.graph, call)
        arguments = _multi_head_arguments(add, call) if call.target is MULTI_HEAD else _arguments(add, call, masks)
        out, lse = _outputs(add, call)
        layer = _layer_of(call, modules)
        last = add.function(_operators()[0], last, add.method("detach", out), lse, *arguments, layer)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    output.args = ((*output.args[0], last),)
    graph.recompile()
    return _constants(masks)


def replace_calls(graph: fx.GraphModule, modules: Mapping[int, str]) -> dict[int, GraphMask]:
    """Put an operator in place of each attention call; return what `watch_calls` does. Its output has no gradients."""
    calls = _known_calls(graph, KERNELS)
    masks = _masks_of(graph, calls)
    for call in calls:
        add = _Inserter(graph.graph, call)
        arguments = _arguments(add, call, masks, runs=True)
        changed = add.function(_operators()[1], *arguments, _layer_of(call, modules))
        old = [call] if call.target is SDPA else [node for node in call.users if node.args[1:] == (0,)]
        for node in old:
            node.replace_all_uses_with(changed)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return _constants(masks)


def sdpa_and_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output of `F.scaled_dot_product_attention`, and the log-sum-exp of the kernel that it runs."""
    with torch_internals.KernelStatistics() as kernels:
        return SDPA(*args, **kwargs), kernels.only


def multi_head_and_lse(*args: Any, **kwargs: Any) -> tuple[tuple[Tensor, Tensor | None], Tensor | None]:
    """Return what `F.multi_head_attention_forward` returns, and the log-sum-exp of the kernel that it runs."""
    with torch_internals.KernelStatistics() as kernels:
        return MULTI_HEAD(*args, **kwargs), kernels.only


def lse_of_graph(call: WatchedCall, mask: GraphMask | None) -> Tensor | None:
    """Return the log-sum-exp of a call in a graph, `b h i`; None if its kernel did not return a plain one."""
    lse, n = call.lse, call.query.shape[2]
    if lse is None or call.dropout_p or (mask is not None and lse.is_cpu):
        return None
    lse = lse.flatten(2)[..., :n]  # b h i-rounded-up of the efficient kernel, b h i 1 of cuDNN
    return lse if mask is None else torch.where(mask.rows_with_keys, lse, -torch.inf)


def _masks_of(graph: fx.GraphModule, calls: Sequence[fx.Node]) -> dict[fx.Node, MaskNode]:
    """Return the masks of the calls of SDPA and its kernels that have one."""
    known, found = GraphMasks(graph, calls), {}
    for call in calls:
        mask = None if call.target is MULTI_HEAD else _named_arguments(call.target, call.args, call.kwargs)["attn_mask"]
        if isinstance(mask, fx.Node):
            found[call] = known.of(mask)
    return found


def _constants(masks: Mapping[fx.Node, MaskNode]) -> dict[int, GraphMask]:
    return {mask.number: GraphMask(mask.constant) for mask in masks.values() if mask.constant is not None}


def _outputs(add: _Inserter, call: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the output of a call, and the log-sum-exp of its kernel."""
    if call.target not in (SDPA, MULTI_HEAD):
        return add.function(operator.getitem, call, 0), add.function(operator.getitem, call, 1)
    call.target = sdpa_and_lse if call.target is SDPA else multi_head_and_lse
    result, lse = (add.function(operator.getitem, call, n) for n in (0, 1))
    result.meta.update(call.meta)
    call.meta.pop("example_value", None)
    call.replace_all_uses_with(result, delete_user_cb=lambda user: user not in (result, lse))
    return result if call.target is sdpa_and_lse else add.function(operator.getitem, result, 0), lse


def _known_calls(graph: fx.GraphModule, known: Collection[Any]) -> list[fx.Node]:
    """Return the calls of known functions in a graph; raise if it may hold other attention."""
    calls = [node for node in graph.graph.nodes if node.target in known]
    _check_all_known(graph, set(calls))
    if calls:
        _check_heads_second(graph)
    return calls


class _Inserter:
    """Inserts nodes into a graph, each behind the one before it."""

    def __init__(self, graph: fx.Graph, at: fx.Node) -> None:
        self._graph, self._at = graph, at

    def function(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_after(self._at):
            self._at = self._graph.call_function(function, args, kwargs)
        return self._at

    def method(self, name: str, *args: Any) -> fx.Node:
        with self._graph.inserting_after(self._at):
            self._at = self._graph.call_method(name, args)
        return self._at

    def kernel_input(self, x: Any) -> Any:
        """Return a tensor as the kernel takes it, without gradients; numbers as they are."""
        if not isinstance(x, fx.Node):
            return x
        device, is_float = _value(x).device.type, _value(x).dtype == torch.float32
        detached = self.method("detach", x)
        if is_float and torch.is_autocast_enabled(device):
            return self.method("to", detached, torch.get_autocast_dtype(device))
        return detached


def _arguments(add: _Inserter, call: fx.Node, masks: Mapping[fx.Node, MaskNode], *, runs: bool = False) -> list[Any]:
    """Return the arguments of an operator for a call of a kernel, up to the layer; numbers must be known.

    An operator that runs the call gets all of it. One that watches gets tensors that the graph computes anyway: no mask
    that is known before it runs, and values without copies, which the compiler may write for the kernel alone.
    """
    arguments = _named_arguments(call.target, call.args, call.kwargs)
    if any(isinstance(arguments[name], fx.Node) for name in SDPA_PARAMETERS[4:]):
        raise CannotWatch("its numbers are computed")
    arguments["dropout_p"] = float(arguments["dropout_p"])
    mask = masks.get(call)
    keys, values = (HeadCopies.of(arguments[name]) for name in ("key", "value"))
    copies = keys.number if keys.number == values.number else 1
    if not runs:
        if mask is not None and mask.constant is not None:
            arguments["attn_mask"] = None
        if copies > 1:
            arguments["value"] = values.source
    tensors = {name: add.kernel_input(x) for name, x in arguments.items()}
    if not runs and copies > 1 and values.is_expanded:
        tensors["value"] = add.method("select", tensors["value"], 2, 0)
    return [*tensors.values(), None if mask is None else mask.number, copies]


def _multi_head_arguments(add: _Inserter, call: fx.Node) -> list[Any]:
    """Return the same for a call of `F.multi_head_attention_forward`, whose inputs are projected once more."""
    given: dict[str, Any] = {**dict(zip(MULTI_HEAD_PARAMETERS, call.args, strict=False)), **call.kwargs}
    tensors = add.function(_multi_head_tensors, *call.args, **call.kwargs)
    inputs = [add.method("detach", add.function(operator.getitem, tensors, n)) for n in range(3)]
    has_mask = given.get("attn_mask") is not None or given.get("key_padding_mask") is not None
    mask = add.method("detach", add.function(operator.getitem, tensors, 3)) if has_mask else None
    dropout = float(given["dropout_p"]) if given.get("training", True) else 0.0
    return [*inputs, mask, dropout, False, None, False, None, 1]


def _multi_head_tensors(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return queries, keys, values and the mask of a call of `F.multi_head_attention_forward`."""
    bound = inspect.signature(MULTI_HEAD).bind(*args, **kwargs)
    bound.apply_defaults()
    q, k, v = project_inputs(bound.arguments)
    return q, k, v, merged_mask(bound.arguments, k.shape[2])


def _named_arguments(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of a kernel, named and ordered as for SDPA."""
    defaults = dict(zip(SDPA_PARAMETERS[3:], (None, 0.0, False, None, kernel is not SDPA), strict=True))
    names = SDPA_PARAMETERS[:3] + torch_internals.KERNEL_PARAMETERS.get(kernel, SDPA_PARAMETERS[3:])
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: given.get(name, defaults.get(name)) for name in SDPA_PARAMETERS}


def _value(node: Any) -> Tensor:
    """Return the fake tensor that stands for a node."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor):
        raise CannotWatch("its tensors are unknown")
    return value


def _layer_of(call: fx.Node, modules: Mapping[int, str]) -> str:
    """Return the name of the module that makes a call."""
    known = [modules[key] for key in torch_internals.module_ids(call) if key in modules]
    return known[-1] if known else ""


def _check_heads_second(graph: fx.GraphModule) -> None:
    """Raise if the queries, keys and values of a call of SDPA are not b h n d."""
    origins, values = DimOrigins(), dict[fx.Node, Any]()
    for node in graph.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.get)
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            values[node] = args[0][args[1]]
            continue
        values[node] = _stand_in(node.meta.get("example_value"))
        if node.target is SDPA:
            _check_layout(origins, *_named_arguments(SDPA, args, kwargs).values())
        elif node.op in ("call_function", "call_method"):
            function = getattr(Tensor, node.target, None) if node.op == "call_method" else node.target
            if function is getattr:  # x.mT
                function = getattr(getattr(Tensor, args[1], None), "__get__", None)
            origins.follow(function, args, kwargs, values[node])


def _check_layout(origins: DimOrigins, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> None:
    if not (query.ndim == key.ndim == value.ndim == 4):
        raise CannotWatch(f"it calls the kernel with {query.ndim} dims")
    known = [origins.origin_of(x).dims[:-2] for x in (query, key, value) if origins.get(x) is not None]
    lead = query.shape[:2]
    if not known or not lead == key.shape[:2] == value.shape[:2]:
        return
    choice = choose_layout(lead, join_dims(known), LayerEvidence())
    if choice.guess is None and choice.layout != (lead, 1):
        raise CannotWatch("the heads of its queries are not in dim 1")


def _stand_in(value: Any) -> Any:
    """Return a tensor without memory of the shape of a traced one, whose open sizes are those of the first call."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_stand_in, value)) if type(value) in (tuple, list) else tuple(map(_stand_in, value))
    if isinstance(value, torch.SymInt):
        return torch_internals.size_hint(value)
    if not isinstance(value, Tensor):
        return value
    x = torch.empty([torch_internals.size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    return nn.Parameter(x, value.requires_grad) if isinstance(value, nn.Parameter) else x


def _check_all_known(graph: fx.GraphModule, known: set[fx.Node]) -> None:
    """Raise if a graph may hold attention beside the known calls."""
    fixed: set[fx.Node] = set()  # parameters, buffers, and tensors that depend on them alone
    depends: set[fx.Node] = set()  # nodes that depend on a product of activations, or on a function that makes weights
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if node.op == "get_attr" or any(kind in node.name for kind in ("_parameters_", "_buffers_")):
                fixed.add(node)
            continue
        if node.op not in ("call_function", "call_method"):
            continue
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
        name = str(name).lower()
        if node not in known:
            _check_function(node, name)
        inputs = node.all_input_nodes
        if inputs and all(each in fixed for each in inputs):
            fixed.add(node)
            continue
        is_product = name in MATMUL_NAMES and sum(each not in fixed for each in _tensors(node)) > 1
        if is_product and any(each in depends for each in inputs):
            raise CannotWatch("a product of activations depends on another one, or on weights")
        if node not in known and (is_product or name in WEIGHT_NAMES or any(each in depends for each in inputs)):
            depends.add(node)


def _tensors(node: fx.Node) -> Iterator[fx.Node]:
    """Return the inputs of a node that are tensors; one that is given twice counts twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return (each for each in found if isinstance(each.meta.get("example_value"), Tensor))


def _check_function(node: fx.Node, name: str) -> None:
    """Raise if a function may attend, or may hold other functions."""
    if name in SOFTMAX_NAMES or (name != "log_softmax" and any(word in name for word in OTHER_ATTENTION)):
        raise CannotWatch(f"it calls {name}")
    if node.op == "call_method":
        return
    if name.startswith("wrapped_"):  # the compiler's name for a function of NumPy
        raise CannotWatch(f"it calls {name}")
    is_foreign = torch_internals.is_fused_operator(node.target)
    if is_foreign is None:
        is_foreign = str(getattr(node.target, "__module__", None) or "torch").split(".")[0] not in OWN_LIBRARIES
    if is_foreign:
        raise CannotWatch(f"it calls {name}")
