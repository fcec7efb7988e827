"""Operations on tensors: they check shapes, choose the kernels, and record how to go backward.

Every operation allocates its result in the ``forward`` scope and gradients in ``backward``; arrays that end with the
operation are ``workspace``. Shapes ride in names: B sequences, T tokens, C channels, H heads, V ids; R is all axes but
the last together.
"""

from numstack.ops.activation import gelu, softmax
from numstack.ops.arithmetic import add, leading, scale
from numstack.ops.attention import attention
from numstack.ops.dropout import Dropout, dropout
from numstack.ops.embedding import embedding
from numstack.ops.linear import linear, linear_residual, mlp
from numstack.ops.loss import cross_entropy
from numstack.ops.norm import layernorm

__all__ = [
    "Dropout",
    "add",
    "attention",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "layernorm",
    "leading",
    "linear",
    "linear_residual",
    "mlp",
    "scale",
    "softmax",
]
