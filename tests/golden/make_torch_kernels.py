"""Write torch_kernels.npz: what PyTorch's float64 autograd and optimiser say about numstack's kernels.

Run it with PyTorch installed (a CPU build will do)::

    pip install "torch==2.13.0"
    python -m tests.golden.make_torch_kernels

Each case is a dict of arrays, float32 inputs and float64 results; the file holds them as ``case/array``.
"""

from typing import Any

import numpy as np

from tests.golden.torch_kernels import ADAMW, FILE, IGNORED, LAYERNORM_EPS


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _leaf(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array.astype(np.float64)).requires_grad_()


def _layernorm() -> dict[str, np.ndarray]:
    import torch

    x, weight, bias, dy = _normal(1, 7, 65) * 3 + 1, _normal(2, 65), _normal(3, 65), _normal(4, 7, 65)
    leaves = [_leaf(a) for a in (x, weight, bias)]
    y = torch.nn.functional.layer_norm(leaves[0], (65,), leaves[1], leaves[2], LAYERNORM_EPS)
    y.backward(torch.from_numpy(dy.astype(np.float64)))
    dx, dweight, dbias = (leaf.grad.numpy() for leaf in leaves)
    return {
        "x": x,
        "weight": weight,
        "bias": bias,
        "dy": dy,
        "y": y.detach().numpy(),
        "dx": dx,
        "dweight": dweight,
        "dbias": dbias,
    }


def _softmax() -> dict[str, np.ndarray]:
    import torch

    x, dy = _normal(5, 5, 70) * 4, _normal(6, 5, 70)
    leaf = _leaf(x)
    y = torch.softmax(leaf, dim=1)
    y.backward(torch.from_numpy(dy.astype(np.float64)))
    return {"x": x, "dy": dy, "y": y.detach().numpy(), "dx": leaf.grad.numpy()}


def _cross_entropy() -> dict[str, np.ndarray]:
    import torch

    logits = _normal(7, 9, 70) * 4
    targets = np.array([0, 69, 3, IGNORED, 31, 32, 33, IGNORED, 68], np.int32)
    leaf, indices = _leaf(logits), torch.from_numpy(targets.astype(np.int64))
    loss = torch.nn.functional.cross_entropy(leaf, indices, ignore_index=IGNORED, reduction="none")
    torch.nn.functional.cross_entropy(leaf, indices, ignore_index=IGNORED).backward()
    return {"logits": logits, "targets": targets, "loss": loss.detach().numpy(), "dlogits": leaf.grad.numpy()}


def _attention(causal: bool) -> dict[str, np.ndarray]:
    import torch

    q, k, v, dout = (_normal(8 + i, 2, 2, 37, 12) for i in range(4))
    leaves = [_leaf(a) for a in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    out.backward(torch.from_numpy(dout.astype(np.float64)))
    dq, dk, dv = (leaf.grad.numpy() for leaf in leaves)
    return {"q": q, "k": k, "v": v, "dout": dout, "out": out.detach().numpy(), "dq": dq, "dk": dk, "dv": dv}


def _adamw() -> dict[str, np.ndarray]:
    """Two parameters, only the first with weight decay; one set of gradients a step."""
    import torch

    sizes, n_steps = (300, 7), 100
    n = sum(sizes)
    start, grads = _normal(12, n), _normal(13, n_steps, n) * np.float32(0.1)
    parameters = [_leaf(part) for part in np.split(start, [sizes[0]])]
    groups = [{"params": parameters[:1], "weight_decay": ADAMW["decay"]}, {"params": parameters[1:], "weight_decay": 0}]
    optimizer = torch.optim.AdamW(
        groups, lr=ADAMW["lr"], betas=(ADAMW["beta1"], ADAMW["beta2"]), eps=ADAMW["eps"], foreach=False
    )
    after = []
    for grad in grads:
        for parameter, part in zip(parameters, np.split(grad, [sizes[0]]), strict=True):
            parameter.grad = torch.from_numpy(part.astype(np.float64))
        optimizer.step()
        after.append(np.concatenate([p.detach().numpy() for p in parameters]))
    m, v = (
        np.concatenate([optimizer.state[p][name].numpy() for p in parameters]) for name in ("exp_avg", "exp_avg_sq")
    )
    return {"start": start, "grads": grads, "after_1": after[0], "after_100": after[-1], "m": m, "v": v}


def collect() -> dict[str, dict[str, np.ndarray]]:
    """All cases, from the installed PyTorch."""
    return {
        "layernorm": _layernorm(),
        "softmax": _softmax(),
        "cross_entropy": _cross_entropy(),
        "attention_full": _attention(causal=False),
        "attention_causal": _attention(causal=True),
        "adamw": _adamw(),
    }


def main() -> None:
    arrays = {f"{case}/{name}": array for case, members in collect().items() for name, array in members.items()}
    np.savez_compressed(FILE, **arrays)  # type: ignore[arg-type]  # the stub takes arrays for allow_pickle
    print(f"{FILE}: {len(arrays)} arrays, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
