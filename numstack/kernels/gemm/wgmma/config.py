"""How a Hopper kernel is cut: what a tuner may choose, and the shared memory that it takes."""

from typing import NamedTuple

TILE_K = 64  # 128 bytes of 16-bit values: the longest swizzle
CONSUMERS = 2
THREADS = 128 * (1 + CONSUMERS)
CHUNK_ROWS = 64  # of a piece of c on its way out
SUMS_BYTES = 1024  # of a chunk's columns, a warpgroup's four warps; there is room for two chunks
NARROW = 64  # columns of c; of a tile that has no more, only these are multiplied
BARRIER_BYTES = 512  # full and empty stages, pieces of c loaded: 8 bytes each
SHARED_MOST = 232_448


class Config(NamedTuple):
    """Choices that change speed, not results (but for the order of sums, with ``spread``).

    Attributes
    ----------
    tile_m, tile_n : int
        Tile of c that a block computes; each of two warpgroups has half of its rows, 64 or 128.
    stages : int
        Tiles of a and b, 64 deep, that are loaded ahead.
    buffers : int
        Pieces of c (64 rows of 128 bytes, or 64) that a warpgroup has room for.
    group : int
        Rows of tiles that are worked through together, column by column, so that what they share stays in the L2 cache.
    spread : bool
        Whether the tiles that do not fill all multiprocessors are cut along k, evenly (stream-K).
    stretch : int
        Steps after which a sum is added to a second one: tensor cores cut off what they add to a large sum. 0: none.
    ping_pong : bool
        Whether each of two warpgroups has tiles of its own, of 128 rows, and stores one while the other multiplies.
    pairs : bool
        With ``ping_pong``: whether two blocks, a cluster, have tiles side by side; each loads half of the rows of a for
        both. Pairs that are near each other (``device.places``) have tiles that share columns of b.
    """

    tile_m: int = 128
    tile_n: int = 256
    stages: int = 4
    buffers: int = 2
    group: int = 16
    spread: bool = False
    stretch: int = 0
    ping_pong: bool = False
    pairs: bool = False

    @property
    def rows(self) -> int:
        """Of a tile that one warpgroup has."""
        return self.tile_m if self.ping_pong else self.tile_m // CONSUMERS

    @property
    def a_bytes(self) -> int:
        return self.tile_m * TILE_K * 2

    def b_bytes(self, b_is_NK: bool) -> int:
        """Of a tile of b: of whole boxes, where it is loaded in boxes."""
        columns = self.b_box_columns
        return (self.tile_n if b_is_NK else -(-self.tile_n // columns) * columns) * TILE_K * 2

    @property
    def b_box_columns(self) -> int:
        """Of the boxes that a tile of b in rows of k is loaded in.

        64, or 32 where that does not divide it: a shorter swizzle, but nothing is loaded that is not used. In
        ``ping_pong`` the longer one is faster all the same (0.89 of cuBLAS after 0.77, 160 columns).
        """
        return 32 if self.tile_n % 64 and not self.ping_pong else 64

    def row_bytes(self, itemsize: int) -> int:
        """Of a piece of c: 128, or 64 where that does not divide the tile's rows."""
        return 64 if self.tile_n * itemsize % 128 else 128

    def head_bytes(self, has_bias: bool, sums_columns: bool) -> int:
        """Shared memory before the tiles: barriers, and for each warpgroup a row of the bias or sums of columns."""
        row = CONSUMERS * self.tile_n * 4 if has_bias else 2 * CONSUMERS * SUMS_BYTES if sums_columns else 0
        return -(-(BARRIER_BYTES + row) // 1024) * 1024

    def shared_bytes(self, itemsize: int, has_bias: bool, sums_columns: bool, b_is_NK: bool) -> int:
        """Dynamic shared memory. It starts at a multiple of 1024 if there is no other, as the swizzle needs."""
        tiles = self.stages * (self.a_bytes + self.b_bytes(b_is_NK))
        pieces = CONSUMERS * self.buffers * CHUNK_ROWS * self.row_bytes(itemsize)
        return self.head_bytes(has_bias, sums_columns) + tiles + pieces
