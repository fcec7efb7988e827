"""What a block's shared memory has while a cluster groups positions, and access to it by words: see
:mod:`numstack.kernels.embedding_groups.cluster`.

``lists`` is the address of a block's shared memory, and a *word* 32 bits of it.
"""

from numba import cuda, int32, uint32

from numstack.device.ptx.assembly import ptx
from numstack.kernels.warp import WARP

CLUSTER = 8  # blocks
OF_CLUSTER = 3  # bits of a token that say whose it is
WARPS = 32  # of a block
THREADS = WARP * WARPS
AT_ONCE = 16  # tokens of a thread that it looks at together
COMPARED = 128  # positions of a row whose ranks are found by comparing them
WINDOW = 2048  # tiles that are planned together
KEYS = 1 << 15  # of a bitmap
OF_BITMAP = KEYS // 32  # words
TEAMS = 4  # of a block, each of which has a bitmap
OF_TEAM = 3  # bits of a warp's number that say which it is of its team
WORDS_A_THREAD = TEAMS * OF_BITMAP // THREADS
# What a block's lists begin with: how many positions it has, and how many are the blocks' before it; the same of tokens
# with more than MANY; how many of these are listed, and have a bitmap; own tokens that were found; of each bitmap,
# where the smallest key belongs, and that key; and sums of warps.
POSITIONS, POSITIONS_BEFORE, FREQUENT, FREQUENT_BEFORE, LISTED, MAPPED, FOUND, FIRSTS = range(8)
SUMS = WARP
# Then rows of tiles that the block's tokens have, and those that all blocks' have, a bit each: of few positions, and of
# many. Or bitmaps, and of each of their words, how many keys are before it.
OWN = SUMS + WARP
ALL = OWN + 2 * WINDOW
LISTS = ALL + 2 * WINDOW
ALL_LANES = 0xFFFFFFFF


@ptx("ld.shared.b32 $result, [$address];", touches_memory=True)
def load_word(address: uint32) -> int32:
    """A word."""


@ptx("st.shared.b32 [$address], $x;", touches_memory=True)
def store_word(address: uint32, x: int32) -> None:
    """The inverse."""


@ptx("red.shared.add.u32 [$address], 1;", touches_memory=True)
def increment(address: uint32) -> None:
    """Add 1."""


@ptx("atom.shared.add.u32 $result, [$address], $x;", touches_memory=True)
def add(address: uint32, x: int32) -> int32:
    """Add x; what it was."""


@ptx("red.shared.or.b32 [$address], $x;", touches_memory=True)
def set_bits(address: uint32, x: int32) -> None:
    """Those of x."""


@ptx(
    "{ .reg .pred p; setp.lt.u32 p, $row, $n_rows; @p st.shared.b32 [$address], $x; "
    "mov.b32 $result, $address; @p add.u32 $result, $result, 4; }",
    touches_memory=True,
)
def append(address: uint32, x: int32, row: uint32, n_rows: uint32) -> uint32:
    """Put x there if there is such a row; where the next belongs."""


@ptx("shf.r.wrap.b32 $result, $x, $x, 3;")
def rotate(x: int32) -> uint32:
    """x / 8, if it is a multiple and not negative; else more than any row's number."""


@ptx("shr.u32 $result, $x, $bits;")
def high(x: int32, bits: int32) -> int32:
    """x without so many low bits."""


@cuda.jit(device=True)
def low(x, bits):
    """So many low bits."""
    return int32(x & int32((int32(1) << bits) - 1))


@cuda.jit(device=True)
def bit(i):
    return int32(int32(1) << i)


@cuda.jit(device=True)
def nth(lists, i):
    """The address of the i-th."""
    return uint32(lists + uint32(4) * uint32(i))


@cuda.jit(device=True)
def prefix_sum(x, lane):
    """The sum of x over lanes up to this one."""
    below = cuda.shfl_up_sync(ALL_LANES, x, 1)
    x = int32(x + below) if lane >= 1 else x
    below = cuda.shfl_up_sync(ALL_LANES, x, 2)
    x = int32(x + below) if lane >= 2 else x
    below = cuda.shfl_up_sync(ALL_LANES, x, 4)
    x = int32(x + below) if lane >= 4 else x
    below = cuda.shfl_up_sync(ALL_LANES, x, 8)
    x = int32(x + below) if lane >= 8 else x
    below = cuda.shfl_up_sync(ALL_LANES, x, 16)
    return int32(x + below) if lane >= 16 else x
