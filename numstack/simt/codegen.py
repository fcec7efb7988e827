"""From generated source to machine code: numba's own front end and LLVM, told what the generator knows.

The iterations of a loop over lanes are threads, which may run in any order: their loads and stores carry LLVM's
access-group metadata, so that the vectoriser needs neither proof nor run-time checks that arrays do not overlap. Loops
over lanes must stay loops until they have become vectors; constant loops inside them must be unrolled before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import llvmlite.binding as llvm_binding
from llvmlite import ir as llvm
from numba import _dynfunc
from numba.core import cgutils, compiler, cpu, ir, lowering, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.environment import Environment
from numba.core.registry import cpu_target
from numba.core.typed_passes import NativeLowering

from numstack.simt.passes import UNNEEDED, steps_instead, typing_context

#: LLVM prefers vectors of 256 bits on CPUs that have 512, for fear of a lower clock; kernels keep such units busy.
VECTOR_BITS = 512


@dataclass(frozen=True)
class Code:
    """Machine code of one function.

    Attributes
    ----------
    wrapper : str
        The symbol that Python calls.
    environment : str
        The symbol that holds numba's environment.
    object_code : bytes
    """

    wrapper: str
    environment: str
    object_code: bytes


@dataclass
class Hints:
    """What is known about a generated function.

    Attributes
    ----------
    lanes : set of int
        Lines with loops over lanes.
    unrolled : set of int
        Lines with loops to be unrolled completely.
    contiguous_rows : set of str
        Arguments, arrays of layout A, whose last stride is the size of an element.
    """

    lanes: set[int] = field(default_factory=set)
    unrolled: set[int] = field(default_factory=set)
    contiguous_rows: set[str] = field(default_factory=set)


def compile_function(
    function: Callable[..., Any], arg_types: tuple[types.Type, ...], hints: Hints
) -> tuple[Callable[..., Any], Code]:
    """Compile a generated function; what to call, without holding the interpreter's lock, and its code."""
    flags = compiler.Flags()
    flags.error_model = "numpy"
    flags.fastmath = cpu.FastMathOptions({"contract"})
    flags.release_gil = True
    flags.nrt = False
    flags.no_cfunc_wrapper = True
    function.hints = hints  # type: ignore[attr-defined]
    target = cpu_target
    with global_compiler_lock:
        library = _Library(target.target_context.codegen(), function.__qualname__)
        library.enable_object_caching()
        result = compiler.compile_extra(
            typing_context(),
            target.target_context,
            function,
            arg_types,
            types.none,
            flags,
            {},
            library=library,
            pipeline_class=_Compiler,
        )
        object_code = result.library._get_compiled_object()
    code = Code(result.fndesc.llvm_cpython_wrapper_name, result.environment.env_name, object_code)
    return result.entry_point, code


def load_function(name: str, code: Code) -> Callable[..., Any]:
    """What to call for code that was compiled before."""
    codegen = cpu_target.target_context.codegen()
    with global_compiler_lock:
        nothing = llvm_binding.parse_assembly(str(codegen._create_empty_module(name))).as_bitcode()
        library = codegen.unserialize_library((name, "object", (code.object_code, nothing)))
        address = codegen._engine.get_function_address(code.wrapper)
        assert address, f"{code.wrapper} is not in its own code"
        environment = Environment({})
        environment.env_name = code.environment
        function = _dynfunc.make_function(ModuleType("numstack"), name, "", address, environment, (library,))
        codegen.set_env(code.environment, environment)
    return function  # type: ignore[no-any-return]


class _Library(JITCodeLibrary):
    """A module that is optimised as a whole, not each function before that as well: a tenth of the time."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout


class _Node(llvm.MDValue):
    """A distinct metadata node, which may refer to itself."""

    def __init__(self, module: Any, operands: tuple[Any, ...] = ()) -> None:
        super().__init__(module, operands, name=str(len(module.metadata)))

    def descr(self, buf: list[str]) -> None:
        start = len(buf)
        super().descr(buf)
        buf[start:] = ["distinct " + "".join(buf[start:])]


class _Lower(lowering.Lower):
    """numba's lowering; it marks loops, and does not wrap negative indices (generated code asks for that itself)."""

    def init(self) -> None:
        super().init()
        self._hints: Hints = self.func_ir.func_id.func.hints
        self._offset = 0
        #: Jumps back to the head of a loop, with the line of that loop.
        self._latches: list[tuple[Any, int]] = []

    def lower_block(self, block: Any) -> None:
        self._offset = next(offset for offset, other in self.blocks.items() if other is block)
        super().lower_block(block)

    def lower_inst(self, inst: Any) -> None:
        super().lower_inst(inst)
        if isinstance(inst, ir.Jump) and inst.target <= self._offset:
            self._latches.append((self.builder.block.terminator, self.blocks[inst.target].loc.line))

    def lower_getitem(self, resty: Any, expr: Any, value: Any, index: Any, signature: Any) -> Any:
        array = self.typeof(value.name)
        pointer = self._element(array, value, index)
        if pointer is None:
            return super().lower_getitem(resty, expr, value, index, signature)
        loaded = self.context.unpack_value(self.builder, array.dtype, pointer)
        return self.context.cast(self.builder, loaded, array.dtype, resty)

    def lower_setitem(self, target: Any, index: Any, value: Any, signature: Any) -> Any:
        array = self.typeof(target.name)
        pointer = self._element(array, target, index)
        if pointer is None:
            return super().lower_setitem(target, index, value, signature)
        stored = self.context.cast(self.builder, self.loadvar(value.name), self.typeof(value.name), array.dtype)
        self.context.pack_value(self.builder, array.dtype, stored, pointer)
        return None

    def _element(self, array: Any, variable: Any, index: Any) -> Any:
        """The address of an element of an array argument; None for any other kind of access."""
        index_type = self.typeof(index.name)
        is_tuple = isinstance(index_type, types.BaseTuple)
        kinds = list(index_type) if is_tuple else [index_type]
        if not isinstance(array, types.Array) or len(kinds) != array.ndim:
            return None
        if not all(isinstance(kind, types.Integer) for kind in kinds):
            return None
        context, builder = self.context, self.builder
        loaded = self.loadvar(index.name)
        values = cgutils.unpack_tuple(builder, loaded, len(kinds)) if is_tuple else [loaded]
        indices = [context.cast(builder, v, kind, types.intp) for v, kind in zip(values, kinds, strict=True)]
        header = context.make_array(array)(context, builder, self.loadvar(variable.name))

        def plus(a: Any, b: Any) -> Any:
            return builder.add(a, b, flags=["nsw"])

        def times(a: Any, b: Any) -> Any:
            return builder.mul(a, b, flags=["nsw"])

        if array.layout == "C":
            sizes = cgutils.unpack_tuple(builder, header.shape, array.ndim)
            offset = indices[0]
            for size, value in zip(sizes[1:], indices[1:], strict=True):
                offset = plus(times(offset, size), value)
            return builder.gep(header.data, [offset], inbounds=True)
        strides = cgutils.unpack_tuple(builder, header.strides, array.ndim)
        if variable.name in self._hints.contiguous_rows:
            strides[-1] = strides[-1].type(context.get_abi_sizeof(context.get_data_type(array.dtype)))
        offset = times(indices[0], strides[0])
        for stride, value in zip(strides[1:], indices[1:], strict=True):
            offset = plus(offset, times(value, stride))
        base = builder.bitcast(header.data, llvm.IntType(8).as_pointer())
        return builder.bitcast(builder.gep(base, [offset], inbounds=True), header.data.type)

    def post_lower(self) -> None:
        super().post_lower()
        # llvmlite knows no attributes with values; they are written out as they stand.
        set.add(self.function.attributes, f'"prefer-vector-width"="{VECTOR_BITS}"')
        module = self.module
        i32 = llvm.IntType(32)
        group = _Node(module)
        parallel = module.add_metadata(["llvm.loop.parallel_accesses", group])
        keep = module.add_metadata(["llvm.loop.unroll.disable"])
        unroll = module.add_metadata(["llvm.loop.unroll.full"])
        # What has become vectors may be unrolled.
        is_vector = module.add_metadata(["llvm.loop.isvectorized", i32(1)])
        then = module.add_metadata(["llvm.loop.vectorize.followup_vectorized", is_vector])
        for latch, line in self._latches:
            if line in self._hints.lanes:
                properties: tuple[Any, ...] = (parallel, keep, then)
            elif line in self._hints.unrolled:
                properties = (unroll,)
            else:
                continue
            node = _Node(module)
            node.operands = (node, *properties)
            latch.set_metadata("llvm.loop", node)
        for block in self.function.blocks:
            for instruction in block.instructions:
                is_access = isinstance(instruction, (llvm.LoadInstr, llvm.StoreInstr))
                if is_access and not _is_variable(instruction.operands[-1]):
                    instruction.set_metadata("llvm.access.group", group)


def _is_variable(pointer: Any) -> bool:
    """Whether this is the place of a Python variable, which becomes a register, and not an array."""
    while isinstance(pointer, (llvm.GEPInstr, llvm.CastInstr)):
        pointer = pointer.operands[0]
        if isinstance(pointer, llvm.AllocaInstr) and isinstance(pointer.type.pointee, llvm.ArrayType):
            return False
    return isinstance(pointer, llvm.AllocaInstr)


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):
    _name = "numstack_lowering"

    @property
    def lowering_class(self) -> type:
        return _Lower


class _Compiler(CompilerBase):
    def define_pipelines(self) -> list[PassManager]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        instead = {**steps_instead("numba.core"), NativeLowering: _Lowering}
        steps = [(step, name) for step, name in manager.passes if step.__name__ not in UNNEEDED]
        manager.passes = [(instead.get(step, step), name) for step, name in steps]
        manager._finalized = False
        manager.finalize()
        return [manager]
