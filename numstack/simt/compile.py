"""``compile_kernel``: a numba.cuda kernel as a function of a range of blocks, in machine code of this CPU."""

from __future__ import annotations

import ast
import linecache
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numba.core import types
from numba.core.errors import NumbaError

from numstack.errors import KernelError
from numstack.simt import (
    atomics,
    cache,
    float16,  # noqa: F401  # teaches numba's CPU target float16
)
from numstack.simt.codegen import compile_function, load_function
from numstack.simt.digest import source_digest
from numstack.simt.emit import Emitter, NotTheSame
from numstack.simt.flow import Statements
from numstack.simt.geometry import Geometry
from numstack.simt.inline import Program, flatten
from numstack.simt.nodes import Alloc, Barrier, WarpOp, contains, walk
from numstack.simt.plan import Planner
from numstack.simt.recompute import Recomputed
from numstack.simt.source import error_at, plain_function, source_of
from numstack.simt.storage import Replan, Storage
from numstack.simt.strided import interchange_strided_loops
from numstack.simt.tile import dynamic_array, stack_tile
from numstack.simt.twin import variable_types
from numstack.simt.uniform import Uniformity
from numstack.simt.webs import split_variables
from numstack.simt.wrap import wrap_negative_indices

Dim = tuple[int, int, int]
WARP_SIZE = 32


class Assumptions(NamedTuple):
    """What code takes for granted about arguments, because it is faster then; each launch checks it.

    Attributes
    ----------
    not_negative : bool
        Integers that indices are computed from are not negative.
    contiguous_rows : bool
        Elements that differ in the last index alone lie side by side, also in arrays of layout A.
    """

    not_negative: bool
    contiguous_rows: bool


ALL_HOLD = Assumptions(True, True)


class CompiledKernel:
    """A kernel compiled for argument types and a block shape.

    Attributes
    ----------
    source : str
        The generated Python.
    has_global_atomics : bool
        Whether blocks must run in order, on one thread.
    uses_dynamic_shared : bool
    """

    def __init__(
        self,
        run: Callable[..., None],
        entry: cache.Entry,
        strided: tuple[int, ...],
        compile_without: Callable[[Assumptions], CompiledKernel],
    ) -> None:
        self.source = entry.source
        self.has_global_atomics = entry.has_global_atomics
        self.uses_dynamic_shared = entry.uses_dynamic_shared
        self._run = run
        self._not_negative = entry.not_negative
        self._strided = strided
        #: The same kernel for arguments that this code's assumptions do not hold for.
        self._compile_without = compile_without
        self._others: dict[Assumptions, CompiledKernel] = {}
        self._lock = threading.Lock()

    def __call__(self, grid: Dim, first_block: int, last_block: int, shared_bytes: int, *args: Any) -> None:
        """Run blocks ``first_block`` to ``last_block - 1`` of a grid (x fastest); other threads run meanwhile."""
        holds = Assumptions(
            all(args[index] >= 0 for index in self._not_negative),
            all(args[i].strides[-1] == args[i].itemsize or args[i].shape[-1] < 2 for i in self._strided),
        )
        if holds != ALL_HOLD:
            self._other(holds)(grid, first_block, last_block, shared_bytes, *args)
            return
        shared = np.empty(shared_bytes if self.uses_dynamic_shared else 0, np.uint8)
        self._run(*grid, first_block, last_block, shared, *args)

    def _other(self, holds: Assumptions) -> CompiledKernel:
        with self._lock:  # several threads run ranges of one launch
            if holds not in self._others:
                self._others[holds] = self._compile_without(holds)
            return self._others[holds]


def compile_kernel(
    py_func: Callable[..., Any], arg_types: tuple[types.Type, ...], block: Dim, *, warp_size: int = 32
) -> CompiledKernel:
    """Compile a kernel for the CPU.

    Parameters
    ----------
    py_func : function
        A plain numba.cuda kernel.
    arg_types : tuple of numba types
        Arrays of layout C or A, and scalars.
    block : (int, int, int)
        Threads in x, y and z.

    Raises
    ------
    KernelError
        If the kernel uses what is not supported; the message shows the line.
    """
    if warp_size != WARP_SIZE:
        raise KernelError(f"warp_size={warp_size}; numba.cuda has warps of 32")
    return _compile(plain_function(py_func), tuple(arg_types), block, ALL_HOLD)


def _compile(
    function: FunctionType, arg_types: tuple[types.Type, ...], block: Dim, assumed: Assumptions
) -> CompiledKernel:
    digest = source_digest(function)
    path = cache.entry_path(function.__name__, digest, str(arg_types), str(block), str(assumed))
    entry = cache.load(path)
    if entry is not None:
        run = load_function(path.stem, entry.code)
    else:
        writer = _Writer(flatten(source_of(function)), arg_types, block, assumed)
        run, entry = writer.compile(path.stem.replace("-", "_"))
        cache.write_atomically(path, entry.to_bytes())
    strided = tuple(i for i, kind in enumerate(arg_types) if assumed.contiguous_rows and _is_strided(kind))
    return CompiledKernel(run, entry, strided, lambda holds: _compile(function, arg_types, block, holds))


def _is_strided(kind: types.Type) -> bool:
    return isinstance(kind, types.Array) and kind.layout != "C"


class _Writer:
    def __init__(
        self, program: Program, arg_types: tuple[types.Type, ...], block: Dim, assumptions: Assumptions
    ) -> None:
        self.program = program
        self.arg_types = arg_types
        self.assumptions = assumptions
        if len(arg_types) != len(program.parameters):
            raise KernelError(
                f"{program.source.name} takes {len(program.parameters)} arguments but {len(arg_types)} types were given"
            )
        self.geometry = Geometry(block, WARP_SIZE, contains(program.body, WarpOp))
        self.taken = program.taken
        self.masks: set[str] = set()
        self.namespace = dict(program.namespace)

    def new_name(self, wish: str) -> str:
        name, number = wish, 1
        while name in self.taken or name in self.namespace:
            number += 1
            name = f"{wish}_{number}"
        self.taken.add(name)
        return name

    # Passes.

    def analyse(self) -> Emitter:
        program = self.program
        split_variables(program, self.new_name)
        mark_tail(program.body)
        kinds = dict(zip(program.parameters, self.arg_types, strict=True))
        per_thread: set[str] = set()
        chunk_variables: set[str] = set()
        uniformity = Uniformity(program, kinds, self.geometry, per_thread)
        recomputed = Recomputed(program, uniformity, set(), kinds)
        if interchange_strided_loops(program, uniformity, recomputed.has_first_lane, self.new_name):
            uniformity = Uniformity(program, kinds, self.geometry, per_thread)
        self.assumed = wrap_negative_indices(program, uniformity, kinds, assume=self.assumptions.not_negative)
        self.namespace.update(program.namespace)
        uniformity = None  # type: ignore[assignment]
        while True:
            taken = set(self.taken)
            try:
                uniformity = uniformity or Uniformity(program, kinds, self.geometry, per_thread)
                recomputed = Recomputed(program, uniformity, chunk_variables, kinds)
                planner = Planner(program, uniformity, recomputed, self.new_name, chunk_variables)
                if self.geometry.is_one_chunk and contains(program.body, Barrier):
                    self.barriers_to_warp_operations(program.body)
                    uniformity = None  # type: ignore[assignment]
                    continue
                storage = Storage(planner, recomputed, uniformity, self.geometry, self.namespace, self.new_name)
                emitter = Emitter(storage, self.geometry, uniformity)
                self.write(emitter, planner)
                return emitter
            except Replan as found:
                if found.per_thread <= per_thread and found.chunk_variables <= chunk_variables:
                    raise AssertionError(f"no plan: {found.per_thread} {found.chunk_variables}") from found
                per_thread |= found.per_thread
                chunk_variables |= found.chunk_variables
            except NotTheSame as found:
                if found.name in per_thread:
                    raise error_at(
                        program.source.tree,
                        f"{found.name} differs between threads where one value is needed",
                        "simplify",
                    ) from None
                per_thread.add(found.name)
            self.taken = taken
            uniformity = None  # type: ignore[assignment]

    def barriers_to_warp_operations(self, statements: Statements) -> None:
        """In a block of a single chunk, a barrier only separates loops over lanes."""
        for index, statement in enumerate(statements):
            if isinstance(statement, Barrier):
                operation = WarpOp(statement.value, None)
                operation.target = statement.target
                operation.kind = statement.kind if statement.target else "syncwarp"
                ast.copy_location(operation, statement)
                operation.file = getattr(statement, "file", "")  # type: ignore[attr-defined]
                statements[index] = operation
            for name in ("body", "orelse"):
                self.barriers_to_warp_operations(getattr(statement, name, None) or [])

    # Text.

    def write(self, emitter: Emitter, planner: Planner) -> None:
        """Write the function, around its plan."""
        emitter.depth = 2
        emitter.nodes(planner.plan, emitter.in_block)
        body, places = emitter.lines, emitter.places
        emitter.lines, emitter.places, emitter.depth = [], {}, 0
        parameters = [
            "grid_x",
            "grid_y",
            "grid_z",
            "first_block",
            "last_block",
            "shared_memory",
            *self.program.parameters,
        ]
        self.name = self.new_name(self.program.source.name)
        emitter.indented(f"def {self.name}({', '.join(parameters)}):")
        self.allocate(emitter, planner)
        emitter.indented("for block in range(first_block, last_block):")
        for axis, text in (
            ("x", "block % grid_x"),
            ("y", "block // grid_x % grid_y"),
            ("z", "block // (grid_x * grid_y)"),
        ):
            if f"block_{axis}" in emitter.uses:
                emitter.line(f"block_{axis} = {text}")
        offset = len(emitter.lines)
        emitter.lines += body
        emitter.places = {number + offset: place for number, place in places.items()}
        for lines in (emitter.hints.lanes, emitter.hints.unrolled):
            moved = {number + offset for number in lines}
            lines.clear()
            lines |= moved

    def allocate(self, emitter: Emitter, planner: Planner) -> None:
        storage = emitter.storage
        scalars = storage.tiles.keys() - storage.local_arrays.keys()
        kinds = variable_types(self.program_with_new(planner), self.arg_types) if scalars else {}
        n_threads = -(-self.geometry.n_threads // 32) * 32
        sizes = {"threads": n_threads, "lanes": self.geometry.tile_lanes}
        for alloc in planner.allocations:
            dtype = emitter.in_block(alloc.dtype)
            if alloc.space == "shared":
                if alloc.shape == (0,):
                    emitter.line(
                        f"{alloc.target} = {storage.bind('dynamic_array', dynamic_array)}(shared_memory, {dtype})",
                        alloc,
                    )
                    continue
                shape: tuple[int, ...] = alloc.shape
            else:
                shape = (*alloc.shape, sizes[storage.tiles.get(alloc.target, "lanes")])
            emitter.line(f"{alloc.target} = {storage.bind('stack_tile', stack_tile)}({shape}, {dtype})", alloc)
        for name in sorted(scalars):
            kind = types.boolean if name in self.masks else kinds.get(name, types.undefined)
            if not isinstance(kind, (types.Number, types.Boolean)):
                raise error_at(
                    self.place_of(name),
                    f"{name} is a {kind} that must be kept for each thread across a barrier, shuffle or loop",
                    "keep numbers only, and index the array where it is used",
                )
            size = sizes[storage.tiles[name]]
            emitter.line(f'{name}_{storage.tiles[name]} = {storage.bind("stack_tile", stack_tile)}({size}, "{kind}")')

    def program_with_new(self, planner: Planner) -> Program:
        """The program, with the variables that planning added to it."""
        added = [s for s in planner.added if isinstance(s, ast.Assign)]
        self.masks = {s.targets[0].id for s in added if getattr(s, "is_mask", False)}  # type: ignore[attr-defined]
        copies = [s for s in added if not getattr(s, "is_mask", False)]
        program = Program(self.program.source, self.program.parameters, [*self.program.body, *copies], self.namespace)
        program.taken = self.program.taken
        return program

    def place_of(self, name: str) -> ast.AST:
        for node in walk(self.program.body):
            if isinstance(node, ast.Name) and node.id == name:
                return node
        return self.program.source.tree

    # Machine code.

    def compile(self, symbol: str) -> tuple[Callable[..., None], cache.Entry]:
        """What to call, and what to keep in the cache; ``symbol`` names the code in this process."""
        emitter = self.analyse()
        text = "\n".join(emitter.lines) + "\n"
        filename = f"<numstack {symbol}>"
        environment = dict(emitter.storage.namespace)
        exec(compile(text, filename, "exec"), environment)
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        function = environment[self.name]
        function.__name__ = function.__qualname__ = symbol
        signature = (*(types.intp,) * 5, types.Array(types.uint8, 1, "C"), *self.arg_types)
        if self.assumptions.contiguous_rows:
            strided = zip(self.program.parameters, self.arg_types, strict=True)
            emitter.hints.contiguous_rows |= {name for name, kind in strided if _is_strided(kind)}
        try:
            run, code = compile_function(function, signature, emitter.hints)
        except NumbaError as error:
            raise self.explained(error, emitter) from error
        dynamic = any(a.space == "shared" and a.shape == (0,) for a in emitter.storage.planner.allocations)
        assumed = tuple(i for i, parameter in enumerate(self.program.parameters) if parameter in self.assumed)
        return run, cache.Entry(text, self.has_global_atomics(), dynamic, assumed, code)

    def has_global_atomics(self) -> bool:
        shared = {node.target for node in walk(self.program.body) if isinstance(node, Alloc)}
        for node in walk(self.program.body):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in atomics.NAMES:
                array = node.args[0]
                if not (isinstance(array, ast.Name) and array.id in shared):
                    return True
        return False

    def explained(self, error: NumbaError, emitter: Emitter) -> KernelError:
        line = getattr(getattr(error, "loc", None), "line", None)
        place = emitter.places.get(line or 0, self.program.source.tree)
        reason = " ".join(str(getattr(error, "msg", error)).split())
        return error_at(
            place, f"numba cannot compile this: {reason[:2000]}", "change the types or the call on this line"
        )


def mark_tail(statements: Statements) -> None:
    """Mark a condition that ends the kernel: threads for which it is false have nothing more to do.

    What such a condition guards is as uniform as if it stood outside; but no barrier may be in there.
    """
    while statements and isinstance(statements[-1], ast.Pass):
        statements = statements[:-1]
    if not statements or not isinstance(statements[-1], ast.If):
        return
    last = statements[-1]
    if hasattr(last, "exits"):
        mark_tail(last.orelse if last.exits == "body" else last.body)
    elif not any(not isinstance(s, ast.Pass) for s in last.orelse):
        last.exits, last.is_tail = "orelse", True  # type: ignore[attr-defined]
        mark_tail(last.body)
