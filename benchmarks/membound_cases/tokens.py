"""Embeddings, and what goes back into their tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.membound_cases.case import Case, PeerFunction, Sizes, case, ours, random, size
from numstack.kernels import embedding, embedding_groups


def of_embedding(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    tokens = torch.randint(0, s.V, (s.B, s.T), device=place)
    otokens = ours(tokens.to(torch.int32))
    n_rows = int(tokens.unique().numel())
    groups = torch.empty(embedding.groups_size(s.B, s.T, s.V), dtype=torch.int32, device=place)

    def forward(tokens: Any, table: Any, positions: Any) -> Any:
        return torch.nn.functional.embedding(tokens, table) + positions

    for dtype, suffix in ((torch.bfloat16, ""), (torch.float32, ", float32")):
        table, positions = (random(torch, place, n, s.C, dtype=dtype) for n in (s.V, s.T))
        out = torch.empty(s.B, s.T, s.C, dtype=dtype, device=place)
        run = partial(embedding.forward, otokens, ours(table), ours(positions), ours(out))
        inputs = [tokens, table, positions]
        nbytes = size(out, positions) + 4 * tokens.numel() + n_rows * s.C * table.element_size()
        yield case(f"embedding forward{suffix}", nbytes, run, [out], forward, *inputs)
        # What backward will need is made beside it: no bytes of it are counted. PyTorch's backward sorts the tokens.
        training, shape = partial(run, ours(groups)), f"{s.B} x {s.T}"
        peers: list[PeerFunction] = [
            ("eager", lambda *a: (forward(*a), torch.sort(a[0].flatten(), stable=True)), inputs)
        ]
        name = f"embedding forward, tokens grouped{suffix}"
        yield Case(name, shape, nbytes, training, [out], partial(forward, *inputs), peers, poisoned=[out])
    embedding_groups.group(otokens, ours(groups), s.V)
    narrow, wide = (random(torch, place, s.B, s.T, s.C, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    for dout, with_positions in itertools.product((narrow, wide), (False, True)):
        dtable, dpositions = (torch.zeros(n, s.C, device=place) for n in (s.V, s.T))
        odpositions = ours(dpositions) if with_positions else None
        run = partial(embedding.backward, otokens, ours(dout), ours(dtable), odpositions, ours(groups))

        def exact(tokens: Any, dout: Any, with_positions: bool) -> Any:
            gradient = torch.zeros(s.V, s.C, device=place).index_add_(0, tokens.flatten(), dout.flatten(0, 1).float())
            return (gradient, dout.float().sum(0)) if with_positions else (gradient,)

        def dense(tokens: Any, dout: Any, with_positions: bool) -> Any:
            gradient = torch.ops.aten.embedding_dense_backward(dout, tokens, s.V, -1, False)
            return (gradient, dout.sum(0)) if with_positions else (gradient,)

        def adding(tokens: Any, dout: Any, dtable: Any, dpositions: Any, with_positions: bool) -> Any:
            """Atomic additions, in an order of their own."""
            dtable.index_add_(0, tokens.flatten(), dout.flatten(0, 1).float())
            if with_positions:
                dpositions += dout.float().sum(0)

        peers = [
            ("dense", dense, [tokens, dout, with_positions]),
            ("atomic", adding, [tokens, dout, dtable.clone(), dpositions.clone(), with_positions]),
        ]
        nbytes = size(dout) + 4 * tokens.numel() + n_rows * 2 * s.C * 4 + with_positions * 2 * size(dpositions)
        outputs = [dtable, dpositions] if with_positions else [dtable]
        expected = partial(exact, tokens, dout, with_positions)
        which = "tokens and positions" if with_positions else "tokens"
        name = f"embedding backward, {which}" + (", float32" if dout is wide else "")
        shape = f"{s.B} x {s.T} x {s.C}"
        yield Case(name, shape, nbytes, run, outputs, expected, peers, 1e-5)
