"""From generated source to machine code: numba's own front end and LLVM, told what the generator knows.

The generator knows that the iterations of a lane loop are threads, which may run in any order: so its loads and stores
carry LLVM's access-group metadata, which lets the vectoriser do without proof or run-time checks that arrays do not
overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir as llvm
from numba.core import cgutils, compiler, cpu, ir, lowering, types
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.registry import cpu_target
from numba.core.typed_passes import NativeLowering

VECTOR_BITS = 512


class _Node(llvm.MDValue):
    """A metadata node that may be distinct and may refer to itself."""

    def __init__(self, module: Any, operands: list[Any], distinct: bool = True) -> None:
        super().__init__(module, operands, name=str(len(module.metadata)))
        self.distinct = distinct

    def descr(self, buf: list[str]) -> None:
        super().descr(buf)
        if self.distinct:
            buf[-2:] = ["distinct " + "".join(buf[-2:])]


class LaneLower(lowering.Lower):
    """numba's lowering, which marks lane loops as vectorisable and small constant loops as to be unrolled."""

    def init(self) -> None:
        super().init()
        function = self.func_ir.func_id.func
        self._lane_lines = function.lane_lines
        self._vector_lines = function.vector_lines
        self._unroll_lines = function.unroll_lines
        self._latches: list[tuple[Any, int]] = []

    def lower_inst(self, inst: Any) -> None:
        super().lower_inst(inst)
        if isinstance(inst, ir.Jump):
            header = self.blocks[inst.target]
            line = header.loc.line
            if inst.target <= self._offset and line in self._lane_lines | self._unroll_lines:
                self._latches.append((self.builder.block.terminator, line))

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
        index_type = self.typeof(index.name)
        parts = list(index_type) if isinstance(index_type, types.BaseTuple) else [index_type]
        if (
            not isinstance(array, types.Array)
            or len(parts) != array.ndim
            or not all(isinstance(p, types.Integer) for p in parts)
        ):
            return None
        context, builder = self.context, self.builder
        loaded = self.loadvar(index.name)
        indices = (
            cgutils.unpack_tuple(builder, loaded, len(parts)) if isinstance(index_type, types.BaseTuple) else [loaded]
        )
        indices = [context.cast(builder, i, kind, types.intp) for i, kind in zip(indices, parts)]
        header = context.make_array(array)(context, builder, self.loadvar(variable.name))
        shapes = cgutils.unpack_tuple(builder, header.shape, array.ndim)
        strides = cgutils.unpack_tuple(builder, header.strides, array.ndim)
        if array.layout == "C":
            offset = None
            for size, i in zip(shapes, indices):
                offset = (
                    i if offset is None else builder.add(builder.mul(offset, size, flags=["nsw"]), i, flags=["nsw"])
                )
            return builder.gep(header.data, [offset], inbounds=True)
        offset = None
        for stride, i in zip(strides, indices):
            step = builder.mul(stride, i, flags=["nsw"])
            offset = step if offset is None else builder.add(offset, step, flags=["nsw"])
        base = builder.bitcast(header.data, llvm.IntType(8).as_pointer())
        return builder.bitcast(builder.gep(base, [offset], inbounds=True), header.data.type)

    def lower_block(self, block: Any) -> None:
        self._offset = next(offset for offset, other in self.blocks.items() if other is block)
        super().lower_block(block)

    def post_lower(self) -> None:
        super().post_lower()
        module = self.module
        set.add(self.function.attributes, f'"prefer-vector-width"="{VECTOR_BITS}"')
        group = _Node(module, [])
        text = lambda *operands: module.add_metadata(list(operands))
        i1, i32 = llvm.IntType(1), llvm.IntType(32)
        parallel = text("llvm.loop.parallel_accesses", group)
        vectorize = text("llvm.loop.vectorize.enable", i1(1))
        unroll = text("llvm.loop.unroll.full")
        import os
        mode=os.environ.get("UNR","fu")
        disable = text("llvm.loop.unroll.disable")
        # The copy in vectors may be unrolled again.
        vectors = text("llvm.loop.vectorize.followup_vectorized", text("llvm.loop.isvectorized", i32(1)))
        for latch, line in self._latches:
            node = _Node(module, [])
            if line in self._lane_lines:
                node.operands = (node, parallel, *([vectorize] if line in self._vector_lines else []), *([disable] if mode in ("dis","fu") else []), *([vectors] if mode=="fu" else []))
            else:
                node.operands = (node, unroll)
            latch.set_metadata("llvm.loop", node)
        for block in self.function.blocks:
            for instruction in block.instructions:
                if isinstance(instruction, (llvm.LoadInstr, llvm.StoreInstr)):
                    pointer = instruction.operands[-1]
                    if not _is_slot(pointer):
                        instruction.set_metadata("llvm.access.group", group)


def _is_slot(pointer: Any) -> bool:
    """Whether this is a variable of numba's own, which becomes a register."""
    while isinstance(pointer, (llvm.GEPInstr, llvm.CastInstr)):
        pointer = pointer.operands[0]
        if isinstance(pointer, llvm.AllocaInstr) and isinstance(pointer.type.pointee, llvm.ArrayType):
            return False
    return isinstance(pointer, llvm.AllocaInstr)


@register_pass(mutates_CFG=True, analysis_only=False)
class LaneLowering(NativeLowering):
    _name = "numstack_lane_lowering"

    @property
    def lowering_class(self) -> type:
        return LaneLower


class LaneCompiler(CompilerBase):
    def define_pipelines(self) -> list[PassManager]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [(LaneLowering if p is NativeLowering else p, name) for p, name in manager.passes]
        manager._finalized = False
        manager.finalize()
        return [manager]


def compile_function(function: Callable[..., Any], arg_types: tuple[types.Type, ...]) -> Any:
    flags = compiler.Flags()
    flags.error_model = "numpy"
    flags.fastmath = cpu.FastMathOptions({"contract"})
    flags.release_gil = True
    flags.nrt = False
    flags.no_cfunc_wrapper = True
    with global_compiler_lock:
        return compiler.compile_extra(
            cpu_target.typing_context,
            cpu_target.target_context,
            function,
            arg_types,
            types.none,
            flags,
            {},
            pipeline_class=LaneCompiler,
        )
