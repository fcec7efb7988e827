"""Automatic differentiation: operations leave nodes behind, and ``backward`` walks them from the last to the first.

An operation computes its result, then calls :func:`record` with its inputs and a function that turns the gradient of
the result into gradients of the inputs. What that function needs of the forward pass it holds itself, so that it is
freed as soon as the function has run::

    def gelu(x: Tensor) -> Tensor:
        y = memory.empty(x.shape, x.array.dtype, scope="forward")
        x_array = x.array
        kernels.gelu.forward(x_array, y)

        def backward(node: Node) -> None:
            dx = node.gradient                                 # ours alone: may be overwritten
            kernels.gelu.backward(dx, x_array, dx)
            node.give(0, dx)

        return record("gelu", y, (x,), backward)

A node knows the nodes its inputs came from but not their tensors, so memory that no backward needs is freed while the
forward pass still runs. Gradients are never copied on their way: a kernel writes or adds straight into the gradient of
its input (:meth:`Node.into`), which for a parameter is its piece of the model's one gradient buffer; or an array is
handed on (:meth:`Node.give`). Each gradient has one owner at any time, which is what makes that safe.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from numstack import memory
from numstack.device import Array, Device, current_device
from numstack.errors import NumstackError, ShapeError
from numstack.kernels import elementwise
from numstack.tensor import Tensor


class Tape:
    """What autograd keeps for a device: whether operations are recorded, and numbers for them."""

    def __init__(self, device: Device) -> None:
        self.recording = True
        self.numbers = itertools.count()


class Node:
    """One recorded operation.

    Attributes
    ----------
    name : str
        The operation, for messages.
    number : int
        Operations that ran later have higher numbers.
    gradient : array or None
        Of the operation's result; only while its backward runs is it sure to be complete. The node owns it: the
        backward function may overwrite it or hand it on.
    is_start : bool
        Backward starts here, and the operation knew the gradient of its result in the forward pass.
    """

    __slots__ = ("_backward", "_shape", "_specs", "_targets", "dtype", "gradient", "is_start", "name", "number")

    def __init__(
        self,
        name: str,
        number: int,
        result: Array,
        inputs: Sequence[Tensor | None],
        backward: Callable[[Node], None],
        is_start: bool,
    ) -> None:
        self.name = name
        self.number = number
        self.is_start = is_start
        self.gradient: Any = None
        self.dtype = result.dtype
        self._shape = result.shape
        self._backward: Callable[[Node], None] | None = backward
        self._targets: list[Node | Tensor | None] = []
        self._specs: list[tuple[tuple[int, ...], Any] | None] = []
        for tensor in inputs:
            self._targets.append(_target(tensor))
            self._specs.append(None if tensor is None else (tensor.array.shape, tensor.array.dtype))

    # for backward functions

    def wanted(self, index: int) -> bool:
        """Whether anything needs the gradient of this input."""
        return self._targets[index] is not None

    def into(self, *indices: int) -> tuple[Any, ...]:
        """Arrays for a kernel to put the gradients of these inputs into, and whether it must add to what they hold.

        Parameters
        ----------
        *indices : int
            Inputs whose gradients one kernel writes.

        Returns
        -------
        *arrays : array
            In the inputs' shapes. Where nothing needs the gradient, scratch memory.
        accumulate : bool
            True if the kernel must add to all of them; then those that held nothing are zeroed.
        """
        slots = [self._slot(index) for index in indices]
        accumulate = any(held for _, held in slots)
        if accumulate:
            for array, held in slots:
                if not held:
                    current_device().fill(array, 0.0)
        return (*(array for array, _ in slots), accumulate)

    def add_into(self, index: int) -> Any:
        """The array for a kernel that always adds: zeroed if it held nothing yet."""
        array, held = self._slot(index)
        if not held:
            current_device().fill(array, 0.0)
        return array

    def give(self, index: int, gradient: Array) -> None:
        """Hand over an array as the gradient of an input. The caller must not touch it any more."""
        target = self._targets[index]
        if target is None:
            return
        if isinstance(target, Node) and target.gradient is None:
            target.gradient = gradient.reshape(target._shape)
            return
        if isinstance(target, Tensor) and target.grad is None and gradient.dtype == target.array.dtype:
            target.grad = Tensor(gradient.reshape(target.shape))
            return
        array, held = self._slot(index)
        gradient = gradient.reshape(array.shape)
        if held:
            elementwise.add(array, gradient, array)
        else:
            _put(gradient, array)

    def _slot(self, index: int) -> tuple[Any, bool]:
        """The array of an input's gradient, in the input's shape, and whether it holds something already."""
        target, spec = self._targets[index], self._specs[index]
        assert spec is not None, f"{self.name}: input {index} was not given"
        shape, dtype = spec
        if target is None:
            return memory.empty(shape, dtype, scope="workspace"), False
        if isinstance(target, Node):
            held = target.gradient is not None
            if not held:
                target.gradient = memory.empty(target._shape, target.dtype, scope="backward")
            return target.gradient.reshape(shape), held
        held = target.grad is not None and not target.overwrite_grad
        if target.grad is None:
            target.grad = Tensor(memory.empty(target.shape, target.array.dtype, scope="backward"))
        target.overwrite_grad = False
        return target.grad.array.reshape(shape), held

    # for the walk

    def _run(self) -> list[Node | Tensor | None]:
        """Do this node's backward, then forget everything it held; returns what its inputs came from."""
        assert self._backward is not None and self.gradient is not None, f"{self.name} received no gradient"
        self._backward(self)
        targets = self._targets
        self._backward = self.gradient = None
        self._targets = []
        return targets


def _put(source: Array, target: Array) -> None:
    """Copy, into another format if need be."""
    if source.dtype == target.dtype:
        current_device().copy(target, source)
    else:
        elementwise.cast(source, target)


def _target(tensor: Tensor | None) -> Node | Tensor | None:
    """What the gradient of an input belongs to: a node, a leaf, or nothing."""
    if tensor is None or not tensor.requires_grad:
        return None
    return tensor if tensor.source is None else tensor.source  # type: ignore[return-value]


def is_recorded(*inputs: Tensor | None) -> bool:
    """Whether an operation on these inputs leaves a node behind."""
    if not current_device().state(Tape).recording:
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in inputs)


def record(
    name: str,
    result: Array,
    inputs: Sequence[Tensor | None],
    backward: Callable[[Node], None],
    *,
    is_start: bool = False,
) -> Tensor:
    """The tensor of an operation's result, with a node behind it if any input needs a gradient.

    Parameters
    ----------
    name : str
        The operation.
    result : array
        What it computed.
    inputs : sequence of Tensor or None
        In forward order of use: gradients are reported final from the last to the first.
    backward : callable
        ``backward(node)`` computes the gradients of the inputs from ``node.gradient``. It must hold arrays, not
        tensors, and may overwrite what it holds: it runs once.
    is_start : bool
        Backward is to start here from a gradient that the operation was given, so that ``node.gradient`` is not set.
    """
    if is_recorded(*inputs):
        number = next(current_device().state(Tape).numbers)
        node = Node(name, number, result, inputs, backward, is_start)
        return Tensor(result, requires_grad=True, source=node)
    return Tensor(result)


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Inside the ``with`` block nothing is recorded: results need no gradient and keep nothing alive."""
    tape = current_device().state(Tape)
    before, tape.recording = tape.recording, False
    try:
        yield
    finally:
        tape.recording = before


def backward(
    output: Tensor, gradient: float | Tensor | None = None, on_final: Callable[[Any], None] | None = None
) -> None:
    """Add d(output)/d(leaf) to the ``grad`` of every leaf that ``output`` depends on.

    What the forward pass kept is freed on the way, so it can be done once for each forward pass.

    Parameters
    ----------
    output : Tensor
        Usually a loss of one element.
    gradient : float or Tensor, optional
        Of whatever comes after ``output``, in its shape; a number stands for all elements, by default 1. Gradient
        accumulation over n equal micro-batches passes ``1 / n``. Not for an output that was computed together with its
        gradient (``ops.cross_entropy`` with ``gradient=``).
    on_final : callable, optional
        ``on_final(leaf)`` is called once nothing will add to ``leaf.grad`` any more in this backward, in the order in
        which that happens: a leaf used twice, like a tied weight, is reported after its earlier use.

    Raises
    ------
    NumstackError
        If ``output`` depends on nothing that requires a gradient, its graph has been used already, or a gradient was
        given to the forward pass and is given or needed here too.
    ShapeError
        If ``gradient`` has another shape.
    """
    root = output.source
    if not isinstance(root, Node):
        raise NumstackError(
            "backward: the output depends on no tensor that requires a gradient; "
            "compute it outside no_grad() from parameters or tensors made with requires_grad=True"
        )
    if isinstance(gradient, Tensor) and gradient.shape != output.shape:
        raise ShapeError(f"backward: gradient has shape {gradient.shape} but the output has {output.shape}")
    nodes, uses = _reachable(root)
    _check_start(root, nodes, gradient)
    root.gradient = memory.empty(root._shape, root.dtype, scope="backward")
    if root.is_start:
        pass
    elif isinstance(gradient, Tensor):
        _put(gradient.array.reshape(root._shape), root.gradient)
    else:
        elementwise.fill(root.gradient, 1.0 if gradient is None else gradient)
    for node in nodes:
        for target in reversed(node._run()):
            if isinstance(target, Tensor):
                uses[target] -= 1
                if uses[target] == 0 and on_final is not None:
                    on_final(target)


def _check_start(root: Node, nodes: Sequence[Node], gradient: float | Tensor | None) -> None:
    """Raise if a node that knows its gradient already is given one."""
    if root.is_start and gradient is not None:
        raise NumstackError(
            f"backward: {root.name} was given its gradient in the forward pass; leave gradient out here"
        )
    for node in nodes:
        if node.is_start and node is not root:
            raise NumstackError(
                f"backward: {node.name} was given its gradient in the forward pass, so backward must start from its "
                "result, not from what was computed from it; leave gradient out there"
            )


def _reachable(root: Node) -> tuple[list[Node], dict[Tensor, int]]:
    """The nodes behind ``root``, latest first, and how often they use each leaf."""
    nodes, uses = {root}, dict[Tensor, int]()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node._backward is None:
            raise NumstackError(
                f"backward: what {node.name} kept was freed by an earlier backward; run the forward pass again"
            )
        for target in node._targets:
            if isinstance(target, Tensor):
                uses[target] = uses.get(target, 0) + 1
            elif target is not None and target not in nodes:
                nodes.add(target)
                waiting.append(target)
    return sorted(nodes, key=lambda node: node.number, reverse=True), uses
