import gc
import weakref

import numpy as np
import pytest

from numstack import memory, ops
from numstack.autograd import backward, no_grad, record
from numstack.errors import NumstackError, ShapeError
from numstack.tensor import tensor
from tests.support import assert_close


def leaf(*values):
    return tensor(np.array(values), requires_grad=True)


def live(*scopes):
    """Bytes of live memory in these scopes, or all."""
    gc.collect()  # kernels that are stepped through under NUMSTACK_CHECK=1 leave cycles behind
    by_scope = memory.statistics().by_scope
    return sum(by_scope[scope].live for scope in scopes or by_scope if scope in by_scope)


def test_chain_and_fan_out():
    x = leaf(1.0, 2.0)
    y = ops.scale(x, 3.0)
    backward(ops.add(ops.scale(y, 2.0), y), gradient=tensor(np.array([1.0, 10.0])))
    assert_close(x.grad.numpy(), [9.0, 90.0])
    assert y.grad is None


def test_leaf_gradients_add_up_over_backwards():
    x = leaf(1.0, 2.0)
    for _ in range(3):
        backward(ops.scale(x, 2.0))
    assert_close(x.grad.numpy(), [6.0, 6.0])
    x.overwrite_grad = True
    backward(ops.scale(x, 5.0))
    assert_close(x.grad.numpy(), [5.0, 5.0])


def test_reshape_passes_gradients_to_nodes_and_leaves():
    x = tensor(np.arange(6.0), requires_grad=True)
    y = ops.scale(x.reshape(2, 3), 2.0).reshape(3, 2)
    backward(ops.add(y, x.reshape(3, 2)), gradient=tensor(np.arange(6.0).reshape(3, 2)))
    assert x.grad.shape == (6,)
    assert_close(x.grad.numpy(), 3 * np.arange(6.0))


def test_gradients_never_share_memory():
    # Each of two users of an add's gradient changes it in place.
    a, b = leaf(1.0), leaf(1.0)
    backward(ops.add(ops.scale(a, 2.0), ops.scale(b, 3.0)))
    assert a.grad.item() == 2.0 and b.grad.item() == 3.0


def test_no_grad():
    x = leaf(1.0)
    with no_grad():
        y = ops.scale(x, 2.0)
        with no_grad():
            pass
        z = ops.scale(y, 2.0)
    assert not y.requires_grad and not z.requires_grad and z.source is None
    assert ops.scale(x, 2.0).requires_grad
    with pytest.raises(ValueError, match="through"), no_grad():
        raise ValueError("through")
    assert ops.scale(x, 2.0).requires_grad


def test_nothing_is_recorded_without_need():
    assert ops.scale(tensor([1.0]), 2.0).source is None


def test_final_leaves_are_reported_once_in_order():
    first, second, tied = leaf(1.0), leaf(1.0), leaf(1.0)
    x = ops.add(ops.scale(tied, 2.0), first)
    x = ops.add(x, second)
    reported = []
    backward(ops.add(x, tied), on_final=lambda parameter: reported.append((parameter, parameter.grad.item())))
    assert [(id(parameter), gradient) for parameter, gradient in reported] == [
        (id(second), 1.0),
        (id(first), 1.0),
        (id(tied), 3.0),
    ]


@pytest.fixture
def unit():
    """What an array of 1000 float32 takes."""
    before = live("forward")
    _array = memory.empty((1000,), np.float32, scope="forward")
    return live("forward") - before


def test_what_is_saved_dies_while_backward_walks(unit):
    seen = []

    def probe(x):
        def at(node):
            seen.append(live("forward"))
            node.give(0, node.gradient)

        return record("probe", x.array, (x,), at)

    before = live("forward")
    x = tensor(np.zeros(1000), requires_grad=True, scope="persistent")
    out = ops.gelu(ops.gelu(probe(ops.gelu(ops.gelu(x)))))
    assert live("forward") - before == 4 * unit
    backward(out)
    assert [n - before for n in seen] == [2 * unit]  # what the two gelus after it kept is gone already
    assert live("forward") - before == unit  # the result, which is still in our hands


def test_memory_comes_back(unit):
    before = live("forward", "backward", "workspace")
    x = tensor(np.ones(1000), requires_grad=True, scope="persistent")
    loss = ops.gelu(ops.gelu(x))
    kept = live("forward", "backward", "workspace") - before
    assert kept == 2 * unit  # two results; x itself is persistent
    backward(loss)
    assert live("forward", "workspace") - before == unit  # the loss; the result between is gone
    del loss
    assert live("forward", "backward", "workspace") - before == unit  # the gradient of x
    x.grad = None
    assert live("forward", "backward", "workspace") == before


def test_a_graph_never_used_dies_with_its_result():
    before = live()
    x = leaf(1.0)
    y = ops.gelu(ops.gelu(x))
    node = weakref.ref(y)
    del x, y
    assert node() is None
    assert live() == before


def test_backward_twice():
    x = leaf(1.0)
    shared = ops.gelu(x)
    first, second = ops.scale(shared, 2.0), ops.scale(shared, 3.0)
    backward(first)
    with pytest.raises(NumstackError, match="what gelu kept was freed by an earlier backward; run the forward pass"):
        backward(second)
    with pytest.raises(NumstackError, match="what scale kept was freed"):
        backward(first)


def test_output_without_gradient():
    for output in (tensor([1.0]), leaf(1.0)):
        with pytest.raises(NumstackError, match="depends on no tensor that requires a gradient"):
            backward(output)


def test_gradient_of_another_shape():
    with pytest.raises(ShapeError, match=r"gradient has shape \(2,\) but the output has \(1,\)"):
        backward(ops.scale(leaf(1.0), 2.0), gradient=tensor([1.0, 2.0]))


def test_where_a_kernel_puts_gradients():
    """``into`` and ``add_into``: what was there is kept, what was not is zeroed, what nobody wants is scratch."""
    held, empty, unwanted, added = leaf(1.0), leaf(1.0), tensor([1.0]), leaf(1.0)
    backward(ops.scale(held, 5.0))
    seen = []

    def at(node):
        first, second, accumulate = node.into(0, 1)
        scratch, _ = node.into(2)
        seen.append([accumulate, node.wanted(2), scratch.shape])
        seen.append([float(memory.to_host(array)[0]) for array in (first, second, node.add_into(3))])

    backward(record("kernel", tensor([0.0]).array, (held, empty, unwanted, added), at))
    assert seen == [[True, False, (1,)], [5.0, 0.0, 0.0]]
    assert unwanted.grad is None
