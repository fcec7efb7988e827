"""What both kernels do along k: one thread fills a ring of stages, and warpgroups multiply what is in it.

Each stage has two mbarriers: *full*, on which the bytes of its tiles arrive, and *empty*, on which its readers arrive.
Shared memory begins with all full ones, all empty ones, and barriers for other purposes.
"""

from typing import Any, NamedTuple

from numba import cuda, int32, uint32, uint64

from numstack.device.places import PAIR
from numstack.device.ptx import cluster, mbarrier, sync, wgmma
from numstack.kernels.gemm.wgmma.boxes import make_boxes
from numstack.kernels.gemm.wgmma.config import CONSUMERS, TILE_K, Config
from numstack.kernels.gemm.wgmma.epilogue import Outputs

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
give_registers = sync.make_set_registers("dec", PRODUCER_REGISTERS)
take_registers = sync.make_set_registers("inc", CONSUMER_REGISTERS)


class Form(NamedTuple):
    """What the kernel computes; with a Config, all that is constant in its source."""

    name: str
    a_is_KM: bool
    b_is_NK: bool
    dtype: str  # of a and b: "bf16" or "f16"
    outputs: Outputs


class Ring(NamedTuple):
    """Device functions of a block's shared memory, and of the one thread that fills it.

    Attributes
    ----------
    lay_out
        (base): the ``ring``, which is the addresses of all tiles of a, all of b, the full barriers and the empty ones;
        and addresses of what follows the tiles, and of the other barriers.
    init
        (base): make all barriers.
    fill
        Have a stage filled with tiles of a and b, once it is empty: for the tile of c whose first row, first column and
        matrix are ``corner``. ``block`` is this one's number in its pair; it loads half of the rows of a for both.
    """

    lay_out: Any
    init: Any
    fill: Any


def make_ring(form: Form, config: Config) -> Ring:
    """Those of a form of product."""
    a_is_KM, b_is_NK, outputs = form.a_is_KM, form.b_is_NK, form.outputs
    stages, pairs = config.stages, config.pairs
    a_bytes, b_bytes = config.a_bytes, config.b_bytes(b_is_NK)
    head_bytes = config.head_bytes(outputs.has_bias, outputs.sums_columns)
    arrivals = (PAIR if pairs else 1) if config.ping_pong else CONSUMERS
    n_others = CONSUMERS * (config.buffers + config.ping_pong)
    load, load_for_pair, *_ = make_boxes(outputs.is_batch)
    box_columns = config.b_box_columns
    n_boxes_a, n_boxes_b = config.tile_m // 64, -(-config.tile_n // box_columns)
    a_box_bytes, b_box_bytes = TILE_K * 64 * 2, TILE_K * box_columns * 2

    @cuda.jit(device=True)
    def lay_out(base):
        tiles_of_a = uint32(base + uint32(head_bytes))
        tiles_of_b = uint32(tiles_of_a + uint32(stages * a_bytes))
        beyond = uint32(tiles_of_b + uint32(stages * b_bytes))
        empty = uint32(base + uint32(8 * stages))
        return (tiles_of_a, tiles_of_b, base, empty), beyond, uint32(empty + uint32(8 * stages))

    @cuda.jit(device=True)
    def init(base):
        empty = uint32(base + uint32(8 * stages))
        others = uint32(empty + uint32(8 * stages))
        for stage in range(stages):
            mbarrier.init(base + uint32(8 * stage), uint32(1))
            mbarrier.init(empty + uint32(8 * stage), uint32(arrivals))
        for other in range(n_others):
            mbarrier.init(others + uint32(8 * other), uint32(1))
        mbarrier.fence_init()

    @cuda.jit(device=True)
    def load_a(a, target, barrier, row, depth, matrix, block):
        if pairs:
            half = uint32(target + uint32(block) * uint32(a_bytes // PAIR))
            if a_is_KM:
                load_for_pair(a, half, barrier, int32(row + block * 64), depth, matrix)
            else:
                load_for_pair(a, half, barrier, depth, int32(row + block * 64), matrix)
        elif a_is_KM:
            for box in range(n_boxes_a):
                load(a, uint32(target + uint32(box * a_box_bytes)), barrier, int32(row + box * 64), depth, matrix)
        else:
            load(a, target, barrier, depth, row, matrix)

    @cuda.jit(device=True)
    def load_b(b, target, barrier, column, depth, matrix):
        if b_is_NK:
            load(b, target, barrier, depth, column, matrix)
        else:
            for box in range(n_boxes_b):
                at = uint32(target + uint32(box * b_box_bytes))
                load(b, at, barrier, int32(column + box * box_columns), depth, matrix)

    @cuda.jit(device=True)
    def fill(a, b, ring, stage, phase, corner, k, block):
        tiles_of_a, tiles_of_b, full, empty = ring
        row, column, matrix = corner
        barrier = uint32(full + uint32(8) * stage)
        mbarrier.wait(empty + uint32(8) * stage, phase ^ uint32(1))
        mbarrier.arrive_and_expect(barrier, uint32(a_bytes + b_bytes))
        depth = int32(k * TILE_K)
        load_a(a, uint32(tiles_of_a + stage * uint32(a_bytes)), barrier, row, depth, matrix, block)
        load_b(b, uint32(tiles_of_b + stage * uint32(b_bytes)), barrier, column, depth, matrix)

    return Ring(lay_out, init, fill)


def make_add_up(form: Form, config: Config, advance: Any, columns: int) -> Any:
    """A device function that multiplies tiles of a and ``columns`` of b as they arrive, and sums them.

    The sums of a warpgroup's first 64 rows go to ``acc``, those of 64 more to ``below``. Accumulators of other columns
    keep what they had: it is not stored. ``advance`` goes from a stage and its phase to the next. In ping-pong,
    ``their_turn`` is the barrier on which the other warpgroup waits to multiply; otherwise nothing uses it.
    """
    a_is_KM, b_is_NK, stretch = form.a_is_KM, form.b_is_NK, config.stretch
    ping_pong, pairs = config.ping_pong, config.pairs
    blocks, is_tall = PAIR if pairs else 1, config.rows == 128
    a_bytes, b_bytes = config.a_bytes, config.b_bytes(b_is_NK)
    a_descriptor = wgmma.make_mn_major(TILE_K) if a_is_KM else wgmma.k_major
    b_descriptor = wgmma.k_major if b_is_NK else wgmma.make_mn_major(TILE_K, config.b_box_columns)
    a_step = 128 if a_is_KM else 2
    b_step = 2 if b_is_NK else 2 * config.b_box_columns
    a_below = 64 * 128 // 16
    multiply = wgmma.make_multiply(columns or 8, form.dtype, a_is_KM, not b_is_NK)
    wait_previous, wait_last = wgmma.make_wait(1), wgmma.make_wait(0, config.tile_n // 2)

    @cuda.jit(device=True)
    def give_back(barrier, block):
        """Let the producer, of a block of the pair, fill a stage again."""
        if pairs:
            cluster.arrive(barrier, uint32(block))
        else:
            mbarrier.arrive(barrier)

    @cuda.jit(device=True)
    def add_up(acc, below, ring, first_stage, first_phase, steps, their_turn, mine):
        tiles_of_a, tiles_of_b, full, empty = ring
        stage = first_stage
        phase = first_phase
        previous = stage
        for k in range(steps):
            mbarrier.wait(full + uint32(8) * stage, phase)
            if columns > 0:
                from_a = a_descriptor(uint32(tiles_of_a + stage * uint32(a_bytes)))
                from_b = b_descriptor(uint32(tiles_of_b + stage * uint32(b_bytes)))
                wgmma.fence()
                keep = int32(1) if stretch > 0 else int32(k != 0)
                for sixteen in range(4):
                    left_16 = from_a + uint64(a_step * sixteen)
                    right_16 = from_b + uint64(b_step * sixteen)
                    multiply(acc, left_16, right_16, keep)
                    if is_tall:
                        multiply(below, left_16 + uint64(a_below), right_16, keep)
                    keep = int32(1)
                wgmma.commit()
                wait_previous()
            if k != 0 and mine < blocks:
                give_back(empty + uint32(8) * previous, mine)
            previous = stage
            stage, phase = advance(stage, phase)
        if ping_pong and mine == 0:
            mbarrier.arrive(their_turn)
        wait_last(acc)
        if is_tall:
            wait_last(below)
        if mine < blocks:
            give_back(empty + uint32(8) * previous, mine)
        return stage, phase

    return add_up
