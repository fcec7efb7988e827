"""A PTX instruction as a function that kernels call.

The decorator takes the instruction, the annotations say where its operands live, and the body, if there is one, says
in Python what it computes: that is what runs on a CPU, and what the test compares the GPU with::

    @ptx("ex2.approx.ftz.f32 $result, $x;")
    def exp2(x: float32) -> float32:
        \"\"\"2^x, within 2 ulp.\"\"\"
        return float32(2.0) ** x

``$name`` stands for the register of an operand; several registers are written ``$a, $b``. A function without a body
runs on a GPU only. The body of one that takes arrays, or that a warp executes together, is followed on a CPU as that of
a device function is: simt checks what it reads and writes, and it may use shuffles and ``simt.collective`` functions.
Annotations:

=====================  =====================================================================================
``uint32``, ...        a value; it is converted to this type as by assignment
``Several[T, n]``      of the result: n registers, returned as a tuple
``SharedArray``        address in shared memory (32 bits) of an array, or of an element if ``Index`` follows
``GlobalSource``       generic address (64 bits) of an array that is read, or of an element if ``Index`` follows
``GlobalTarget``       the same of an array that is written
``SourceMap``          address of a tensor map (64 bits) of an array that is read
``TargetMap``          the same of an array that is written
``In[T, n]``           n registers, read from a ``cuda.local.array`` from its start, or from ``Index`` if it follows
``Out[T, n]``          n registers, written to one
``InOut[T, n]``        n registers, read and written: accumulators
``Index``              of the array before it: an element's number, counted in C order
=====================  =====================================================================================

Source: PTX ISA 8.0 and later; LLVM's inline assembly (constraints r, l, f, h; tied operands by number).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core.extending import overload as cpu_overload
from numba.cuda.extending import intrinsic as cuda_intrinsic
from numba.cuda.extending import overload as cuda_overload

from numstack.errors import KernelError
from numstack.simt import Accesses

I32, I64 = ir.IntType(32), ir.IntType(64)
SHARED_SPACE = 3  # the number of shared memory among LLVM's address spaces for NVIDIA GPUs
_REGISTERS = {
    types.uint16: ("h", ir.IntType(16)),
    types.int32: ("r", I32),
    types.uint32: ("r", I32),
    types.int64: ("l", I64),
    types.uint64: ("l", I64),
    types.float32: ("f", ir.FloatType()),
}


if TYPE_CHECKING:  # bodies index arrays, and calculate with indices
    SharedArray = Any
    GlobalSource = Any
    GlobalTarget = Any
    SourceMap = Any
    TargetMap = Any
    Index = Any
else:

    class SharedArray:
        """Annotation: an array in shared memory."""

    class GlobalSource:
        """Annotation: an array in global memory that is read."""

    class GlobalTarget:
        """Annotation: an array in global memory that is written."""

    class SourceMap:
        """Annotation: a tensor map of an array that is read."""

    class TargetMap:
        """Annotation: a tensor map of an array that is written."""

    class Index:
        """Annotation: which element of the array before it."""


@dataclass(frozen=True)
class _Registers:
    """Annotation: elements of a ``cuda.local.array`` that become registers."""

    dtype: types.Type
    count: int
    is_read: bool
    is_written: bool


class _SeveralOf:
    def __getitem__(self, what: tuple[types.Type, int]) -> Any:
        dtype, count = what
        return (dtype,) * count


class _RegistersOf:
    def __init__(self, *, is_read: bool, is_written: bool) -> None:
        self._is_read = is_read
        self._is_written = is_written

    def __getitem__(self, what: tuple[types.Type, int]) -> Any:
        return _Registers(*what, self._is_read, self._is_written)


In: Any = _RegistersOf(is_read=True, is_written=False)
Out: Any = _RegistersOf(is_read=False, is_written=True)
Several: Any = _SeveralOf()
InOut: Any = _RegistersOf(is_read=True, is_written=True)


def ptx(
    text: str, *, touches_memory: bool = False, by_warp: bool = False, is_nothing_on_cpu: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a device function of a PTX instruction.

    Parameters
    ----------
    text : str
        The instruction, or several; labels end in ``${:uid}``.
    touches_memory : bool
        It reads or writes memory, or orders accesses to it: the compiler moves no access across it and never drops it.
        Without, it is a pure function of its operands.
    by_warp : bool
        All lanes of a warp execute it together (``.sync``): the compiler must not move it under a condition.
    is_nothing_on_cpu : bool
        It has no body, and a CPU, where everything happens in order, has nothing to do: a wait for copies.
    """

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        return _make(function, text, touches_memory, by_warp, is_nothing_on_cpu)

    return make


@dataclass(frozen=True)
class _Operand:
    """A parameter, with the one that holds its index, if any."""

    name: str
    position: int
    annotation: Any
    index_position: int | None


def _operands(signature: inspect.Signature) -> list[_Operand]:
    parameters = list(signature.parameters.values())
    operands = []
    for position, parameter in enumerate(parameters):
        if parameter.annotation is Index:
            continue
        followed = position + 1 < len(parameters) and parameters[position + 1].annotation is Index
        operands.append(_Operand(parameter.name, position, parameter.annotation, position + 1 if followed else None))
    return operands


def _is_array(annotation: Any) -> bool:
    return isinstance(annotation, _Registers) or annotation in (SharedArray, GlobalSource, GlobalTarget)


def _value_type(annotation: Any) -> Any:
    if annotation is Index:
        return types.int64
    return types.uint64 if annotation in (SourceMap, TargetMap) else annotation


class _Instruction:
    """The instruction behind a function: how numba types a call of it, and the LLVM code of one."""

    def __init__(self, function: Callable[..., Any], text: str, touches_memory: bool, by_warp: bool) -> None:
        self.signature = inspect.signature(function, eval_str=True)
        self.operands = _operands(self.signature)
        annotation = self.signature.return_annotation
        self.results = () if annotation is None else annotation if isinstance(annotation, tuple) else (annotation,)
        self.text, self.constraints = _assemble(function.__name__, text, self.operands, self.results, touches_memory)
        gives = self.results or any(_is_written(operand.annotation) for operand in self.operands)
        self.has_side_effect = touches_memory or by_warp or not gives
        self.attributes = ("convergent",) if by_warp else ()

    @property
    def returned(self) -> types.Type:
        if not self.results:
            return types.none
        return self.results[0] if len(self.results) == 1 else types.UniTuple(self.results[0], len(self.results))

    @property
    def digest(self) -> str:
        """All that its code depends on."""
        return f"{self.text} [{self.constraints}] {self.has_side_effect} {self.attributes}"

    @property
    def accesses(self) -> Accesses:
        """The arrays in global memory among its parameters."""
        kinds = [parameter.annotation for parameter in self.signature.parameters.values()]
        return Accesses(
            reads=tuple(i for i, kind in enumerate(kinds) if kind in (GlobalSource, SourceMap)),
            writes=tuple(i for i, kind in enumerate(kinds) if kind in (GlobalTarget, TargetMap)),
        )

    def typed(self, *given: Any) -> Any:
        """For numba's ``intrinsic``: the types that arguments of types ``given`` are converted to, and the code."""
        parameters = self.signature.parameters.values()
        wanted = [
            array if _is_array(parameter.annotation) else _value_type(parameter.annotation)
            for array, parameter in zip(given, parameters, strict=True)
        ]
        return self.returned(*wanted), self._code

    def _code(self, context: Any, builder: Any, call: Any, args: Any) -> Any:
        inputs, tied, places = self._registers(context, builder, call, args)
        outputs = [_REGISTERS[result][1] for result in self.results] + [place.type.pointee for place in places]
        output = ir.VoidType() if not outputs else outputs[0] if len(outputs) == 1 else ir.LiteralStructType(outputs)
        kind = ir.FunctionType(output, [value.type for value in tied + inputs])
        assembly = ir.InlineAsm(kind, self.text, self.constraints, side_effect=self.has_side_effect)
        produced = builder.call(assembly, tied + inputs, attrs=self.attributes)
        several = range(len(outputs)) if len(outputs) > 1 else ()
        values = [builder.extract_value(produced, i) for i in several] or [produced] * len(outputs)
        for value, place in zip(values[len(self.results) :], places, strict=True):
            builder.store(value, place)
        if not self.results:
            return context.get_dummy_value()
        if len(self.results) == 1:
            return values[0]
        return context.make_tuple(builder, self.returned, values[: len(self.results)])

    def _registers(self, context: Any, builder: Any, call: Any, args: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Values that go in, values that go in where results come out, and where in arrays the results are stored."""
        inputs: list[Any] = []
        tied: list[Any] = []
        places: list[Any] = []
        for operand in self.operands:
            value, registers = args[operand.position], operand.annotation
            if not _is_array(registers):
                inputs.append(value)
                continue
            first = context.make_array(call.args[operand.position])(context, builder, value).data
            if operand.index_position is not None:
                first = builder.gep(first, [args[operand.index_position]])
            if not isinstance(registers, _Registers):
                inputs.append(_address(builder, first, is_shared=registers is SharedArray))
                continue
            pointers = [builder.gep(first, [ir.Constant(I32, i)]) for i in range(registers.count)]
            if registers.is_read:
                (tied if registers.is_written else inputs).extend(builder.load(pointer) for pointer in pointers)
            if registers.is_written:
                places.extend(pointers)
        return inputs, tied, places


def _make(
    function: Callable[..., Any], text: str, touches_memory: bool, by_warp: bool, is_nothing_on_cpu: bool
) -> Callable[..., Any]:
    instruction = _Instruction(function, text, touches_memory, by_warp)
    names = ", ".join(instruction.signature.parameters)
    # numba looks at signatures, so each function that it meets has the parameters of this one.
    typed = eval(f"lambda typingctx, {names}: typed({names})", {"typed": instruction.typed})
    typed.__name__ = function.__name__
    call = eval(f"lambda {names}: instruction({names})", {"instruction": cuda_intrinsic(typed)})
    public = function if is_nothing_on_cpu or not _is_empty(function) else _refusing(function)
    cuda_overload(public)(eval(f"lambda {names}: call", {"call": call}))
    is_followed = is_nothing_on_cpu or by_warp or any(_is_array(operand.annotation) for operand in instruction.operands)
    if public is function and not is_followed:
        bare = FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
        cpu_overload(public)(eval(f"lambda {names}: bare", {"bare": bare}))
    # Kernels that call it depend on its text, which stands in no function's body.
    public.assembly = instruction.digest  # type: ignore[attr-defined]
    public.accesses = instruction.accesses  # type: ignore[attr-defined]
    return public


def _is_written(annotation: Any) -> bool:
    return isinstance(annotation, _Registers) and annotation.is_written


def _assemble(
    name: str, text: str, operands: list[_Operand], results: tuple[types.Type, ...], touches_memory: bool
) -> tuple[str, str]:
    """The text with numbered registers, and the constraints in LLVM's order: outputs, tied inputs, inputs, clobbers."""
    numbers: dict[str, list[int]] = {"result": list(range(len(results)))}
    outputs = ["=" + _REGISTERS[result][0] for result in results]
    tied: list[str] = []
    for operand in operands:
        if _is_written(operand.annotation):
            mine = list(range(len(outputs), len(outputs) + operand.annotation.count))
            numbers[operand.name] = mine
            outputs += ["=" + _REGISTERS[operand.annotation.dtype][0]] * len(mine)
            tied += [str(number) for number in mine] if operand.annotation.is_read else []
    inputs: list[str] = []
    for operand in operands:
        if not _is_written(operand.annotation):
            letters = _input_constraints(operand.annotation)
            start = len(outputs) + len(tied) + len(inputs)
            numbers[operand.name] = list(range(start, start + len(letters)))
            inputs += letters

    def numbered(match: re.Match[str]) -> str:
        word = match.group(1)
        if word not in numbers:
            raise KernelError(f"ptx: {name} has no operand {word}; it has {', '.join(numbers)}")
        return ", ".join(f"${number}" for number in numbers[word])

    clobbers = ["~{memory}"] if touches_memory else []
    return re.sub(r"\$([a-z_]\w*)", numbered, text), ",".join([*outputs, *tied, *inputs, *clobbers])


def _input_constraints(annotation: Any) -> list[str]:
    if isinstance(annotation, _Registers):
        return [_REGISTERS[annotation.dtype][0]] * annotation.count
    if annotation is SharedArray:
        return ["r"]
    if annotation in (GlobalSource, GlobalTarget):
        return ["l"]
    return [_REGISTERS[_value_type(annotation)][0]]


def _address(builder: Any, pointer: Any, *, is_shared: bool) -> Any:
    """The address as PTX takes it: of shared memory 32 bits, counted from where the block's begins."""
    if not is_shared:
        return builder.ptrtoint(pointer, I64)
    inside = builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, addrspace=SHARED_SPACE))
    return builder.ptrtoint(inside, I32)


def _is_empty(function: Callable[..., Any]) -> bool:
    def empty() -> None:
        """A docstring and nothing else."""

    return function.__code__.co_code == empty.__code__.co_code


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for an instruction that has no meaning on a CPU: simt's checks, which run kernels in Python, call it."""

    @functools.wraps(function)
    def refuse(*args: Any) -> Any:
        raise KernelError(f"ptx: {function.__name__} runs on a GPU only; choose another variant on a CPU")

    refuse.is_gpu_only = True  # type: ignore[attr-defined]  # compilers for a CPU refuse a call of it
    return refuse
