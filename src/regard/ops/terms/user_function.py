"""A function that a user wrote for a term, and the tensors it closes over.

A term must know its tensors: autograd gives them gradients, `Weights` notices when one changes, and a blockwise
backward differentiates each block with leaves in their place. `UserFunction` runs the function once on index 0 and
records every tensor that it reads, however it reaches them: a closure, a global, a module. Later it runs the function
with other tensors in their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..torch_state import run_uncompiled


class UserFunction:
    """A function of tensors, and in `tensors` those it closes over. `name` is the term, for messages.

    >>> table = torch.zeros(4, 9)
    >>> UserFunction("Bias.of", lambda b, h, i, j: table[h, (j - i).clamp(-4, 4) + 4], "b, h, i, j").tensors[0].shape
    torch.Size([4, 9])
    """

    def __init__(self, name: str, fn: Callable[..., Tensor], arguments: str) -> None:
        if not callable(fn) or isinstance(fn, type):
            raise TypeError(f"{name} takes a function of ({arguments}), got {type(fn).__name__}")
        self.name = name
        self.fn = fn
        self.arguments = arguments
        self.tensors: tuple[Tensor, ...] = _find_tensors(self)

    def __repr__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def code(self) -> Hashable:
        """A key that two closures of one source share, so that a kernel compiled for one serves the other."""
        return getattr(self.fn, "__code__", self.fn)

    def check_tensors(self) -> None:
        """Raise if the function no longer reads the tensors it read when the term was made."""
        found = _find_tensors(self)
        if {id(x) for x in found} != {id(x) for x in self.tensors}:
            raise ValueError(
                f"{self.name}({self!r}) closes over other tensors than when the term was made; "
                f"call {self.name}(...) again, in the forward of a module rather than in __init__"
            )

    def __call__(self, tensors: Sequence[Tensor], *arguments: Tensor) -> Tensor:
        """Return fn(*arguments), with `tensors` in place of the tensors it closes over."""
        if torch.compiler.is_compiling():
            return self.fn(*arguments)
        replaced = {id(old): new for old, new in zip(self.tensors, tensors, strict=True) if old is not new}
        if not replaced:
            return self._run(*arguments)
        with _ReplaceTensors(replaced):
            return self._run(*arguments).mul(1)

    def _run(self, *arguments: Tensor) -> Tensor:
        found = call_user_function(self.name, self.fn, self.arguments, *arguments)
        if not isinstance(found, Tensor) or found.dtype == torch.bool or found.is_complex():
            kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
            hint = "; for a mask write mask=Rule(fn)" if kind == torch.bool else ""
            raise TypeError(f"{self.name}: the function must return a tensor of numbers, got {kind}{hint}")
        return found


def call_user_function(name: str, fn: Callable[..., Any], arguments: str, *values: Tensor) -> Any:
    """Return `fn(*values)`; explain an error that comes from writing it for numbers, or for other arguments."""
    try:
        return fn(*values)
    except (RuntimeError, TypeError) as error:
        if (hint := _explain_failure(name, fn, arguments, error)) is None:
            raise
        raise TypeError(hint) from error


def _explain_failure(name: str, fn: Callable[..., Any], arguments: str, error: Exception) -> str | None:
    if "Boolean value of Tensor" in str(error) or "data-dependent control flow" in str(error):
        return (
            f"{name}: the function gets tensors, for which and, or, not and if do not work; write &, | and ~ "
            "with each comparison in parentheses, (j <= i) & (i - j < 4), and torch.where instead of if"
        )
    try:
        inspect.signature(fn).bind(*arguments.split(", "))
    except TypeError:
        return (
            f"{name}: the function gets ({arguments}), the batch row, the head and the positions of query and key"
            f"{' after the score' if arguments.startswith('score') else ''}, and takes {inspect.signature(fn)}; "
            f"write lambda {arguments}: ..."
        )
    except ValueError:  # functions not written in Python have no signature
        pass
    return None


@run_uncompiled
def _find_tensors(function: UserFunction) -> tuple[Tensor, ...]:
    """Run a function at index 0 and return the tensors it reads, in the order in which it reads them."""
    cpu = torch.device("cpu")
    recorder, run = _recorder(function, cpu)
    with torch.enable_grad():
        try:
            value = run()
        except RuntimeError:
            device = next((x.device for x in recorder.tensors if x.device != cpu), None)
            if device is None:
                raise
            recorder, run = _recorder(function, device)
            value = run()
        if value.requires_grad:
            with _ReplaceTensors({id(x): x.detach() for x in recorder.tensors}):
                value = run()
        if value.requires_grad:
            raise ValueError(
                f"{function.name}({function!r}) reads a tensor that regard cannot see, through code that is not made "
                "of PyTorch functions, so the tensor would get no gradient; pass it to a PyTorch function, or write a "
                "term of your own with a tensor field, class Mine(Bias)"
            )
    return tuple(recorder.tensors)


def _recorder(function: UserFunction, device: torch.device) -> tuple[_RecordTensors, Callable[[], Tensor]]:
    """Return a recorder and a run of the function at index 0 under it."""
    names = function.arguments.split(", ")
    values = [torch.zeros((), dtype=torch.float if x == "score" else torch.long, device=device) for x in names]
    recorder = _RecordTensors(values)

    def run() -> Tensor:
        with recorder:
            return function._run(*values).mul(1)  # a tensor that the function returns as it is counts as read

    return recorder, run


class _RecordTensors(TorchFunctionMode):
    """Record the tensors that PyTorch functions receive and that no earlier function returned."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._made = {id(x): x for x in known}  # keeps them alive, so that no id is used twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in _tensors_in((args, kwargs)):
            if id(x) not in self._made:
                self._made[id(x)] = x
                self.tensors.append(x)
        found = func(*args, **(kwargs or {}))
        self._made.update((id(x), x) for x in _tensors_in(found))
        return found


class _ReplaceTensors(TorchFunctionMode):
    """Pass other tensors to PyTorch functions in place of some, by id."""

    def __init__(self, replaced: dict[int, Tensor]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _replace((args, kwargs or {}), self._replaced)
        return func(*args, **kwargs)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for x in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(x)


def _replace(value: Any, replaced: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, dict):
        return {key: _replace(x, replaced) for key, x in value.items()}
    return type(value)(_replace(x, replaced) for x in value) if type(value) in (tuple, list) else value
