"""What a first-order step adds to a forward: what it keeps, the backward's work, and the optimizer's memory and passes.

A backward needs of every operation what its derivative needs, and nothing else. A linear layer, a norm and most activation
functions need their input, a product of two tensors needs both. Softmax and ReLU need their output, and dropout a mask of
one byte. ReLU's output is the next linear's input, and what two operations need is kept once. For a block with GELU,
stored scores and dropout, in half precision, that is ``s·b·h·(34 + 5·a·s/h)`` bytes [1]_. Real code may keep more (norms
written out kernel by kernel do), so these are lower bounds.

.. [1] V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, equation 1.
.. [2] S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 3.1.
"""

from __future__ import annotations

from typing import Literal

from costmodel.formats import FORMATS, DType
from costmodel.models.components import AttentionImpl
from costmodel.models.forward import forward_work
from costmodel.models.model_spec import BACK, EMBED, FRONT, HEAD, ModelSpec
from costmodel.work import Attention, Matmul, Work

Optimizer = Literal["sgd", "momentum", "adam"]

_DROPPING = ("opt", "gpt2", "roberta")
_MASK_BYTES = 1
_STATISTIC_BYTES = 4
_STATE_TENSORS: dict[Optimizer, int] = {"sgd": 0, "momentum": 1, "adam": 2}
_STATE_DTYPE: DType = "float32"


def kept_bytes(
    spec: ModelSpec,
    segment: str,
    *,
    batch: int,
    seq: int,
    dtype: DType = "float32",
    attention: AttentionImpl = "sdpa",
    dropout: bool = True,
) -> int:
    """Return the bytes that a forward of `segment` leaves for its backward, its input among them.

    - `dtype`: of the activations.
    - `attention`: ``eager`` keeps probabilities, fused kernels one statistic per row of them.
    - `dropout`: whether masks are kept, behind attention's probabilities (where they are stored), attention and MLP. Only
      families that drop out by default do.

    >>> from costmodel.models.configs import read_model_spec
    >>> gpt2 = read_model_spec("gpt2")
    >>> s, h, a = 1024, gpt2.hidden_size, gpt2.num_heads
    >>> kept_bytes(gpt2, "block.0", batch=2, seq=s, dtype="float16", attention="eager")
    179306496
    >>> 2 * s * h * 34 + 2 * 5 * a * s * s
    179306496
    """
    rows, width = batch * seq, FORMATS[dtype].element_bytes
    hidden = rows * spec.hidden_size
    dropout = dropout and spec.family in _DROPPING
    mask = hidden * _MASK_BYTES if dropout else 0
    if segment == EMBED:
        return mask if spec.family in ("gpt2", "roberta") else 0  # the token ids are the batch's
    if segment == HEAD:
        # A masked model's head keeps the inputs of a linear, of its activation and of a norm besides.
        norms = 4 if not spec.is_causal else 2 if spec.final_norm else 1
        projected = rows * spec.embed_dim if spec.embed_dim != spec.hidden_size else 0
        # The loss keeps the logarithms of all probabilities, in float32.
        logits = rows * spec.vocab_size * FORMATS["float32"].element_bytes
        return (norms * hidden + projected) * width + logits
    attended = _kept_by_attention(spec, batch, seq, width, attention, dropout=dropout) + mask
    # Inputs of the MLP's norm and of its first linear; what crosses to a block's back is kept there.
    inner = rows * spec.intermediate_size * width
    activation = 0 if spec.activation == "relu" else inner
    if spec.mlp == "gated":
        activation = 3 * inner  # the gate, its activation, and what it is multiplied with
    first = 2 * hidden * width + activation
    second = inner + mask
    if segment.endswith(FRONT):
        return attended + first
    return second if segment.endswith(BACK) else attended + first + second


def _kept_by_attention(
    spec: ModelSpec, batch: int, seq: int, width: int, attention: AttentionImpl, *, dropout: bool
) -> int:
    rows, key_seq = batch * seq, seq + spec.num_prefix_tokens
    queries, keys = spec.num_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    # Inputs of the norm and of the three projections; q, k and v; the input of the projection behind.
    tensors = rows * (2 * spec.hidden_size + 2 * queries) + 2 * batch * key_seq * keys
    scores = batch * spec.num_heads * seq * key_seq
    if attention != "eager":
        return tensors * width + batch * spec.num_heads * seq * _STATISTIC_BYTES
    # With dropout both what goes in (softmax's output) and what comes out (the product's operand).
    copies = 2 if dropout else 1
    return (tensors + copies * scores) * width + (scores * _MASK_BYTES if dropout else 0)


def backward_work(
    spec: ModelSpec,
    segment: str,
    *,
    batch: int,
    seq: int,
    dtype: DType = "float32",
    storage_dtype: DType | None = None,
    attention: AttentionImpl = "sdpa",
    accumulates: bool = False,
) -> Work:
    """Return the work of the backward of `segment`: twice the forward's products, one for inputs and one for weights.

    `accumulates`: whether gradients are added to those of a microbatch before.

    ``Y = X·W`` has ``dX = dY·Wᵀ`` and ``dW = Xᵀ·dY``, each of as many operations. Attention with stored scores is counted
    twice as well; fused kernels compute scores again, which makes five products of two. Element-wise kernels pass over
    twice the bytes: a gradient comes in and another goes out for every tensor.

    .. [1] D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
       2021, arXiv:2104.04473, appendix: a backward takes twice the FLOPs of its forward.
    """
    forward = forward_work(
        spec,
        segment,
        batch=batch,
        seq=seq,
        dtype=dtype,
        storage_dtype=storage_dtype,
        attention=attention,
    )
    products: list[Matmul] = []
    for product in forward.matmuls:
        products.append(Matmul(m=product.m, n=product.k, k=product.n, num=product.num))
        products.append(Matmul(m=product.k, n=product.n, k=product.m, num=product.num))
    attention_ops: list[Attention] = []
    for item in forward.attention:
        attention_ops += [item, item] if item.materialised else [item.model_copy(update={"backward": True})]
    gradient_bytes = (
        sum(group.num_trainable for group in spec.param_groups_of(segment)) * FORMATS[dtype].element_bytes
    )
    return forward.model_copy(
        update={
            "matmuls": tuple(products),
            "attention": tuple(attention_ops),
            "elementwise_bytes": 2 * forward.elementwise_bytes,
            "num_exponentials": 0,
            "num_kernels": 2 * forward.num_kernels,
            "param_pass_bytes": forward.param_pass_bytes + (3 * gradient_bytes if accumulates else 0),
        }
    )


def optimizer_bytes(num_parameters: int, optimizer: Optimizer, dtype: DType = "float32") -> int:
    """Return the bytes that an optimizer keeps beside weights and gradients.

    Adam keeps two float32 moments, and for weights of another format than float32 a float32 copy of them. With weights
    and gradients that is 16 bytes a parameter either way [2]_. Plain SGD keeps nothing.

    >>> [2 * 4 + optimizer_bytes(1, "adam"), 2 * 2 + optimizer_bytes(1, "adam", "float16")]
    [16, 16]
    >>> optimizer_bytes(1, "sgd"), optimizer_bytes(1, "momentum")
    (0, 4)
    """
    has_copy = optimizer == "adam" and FORMATS[dtype].element_bytes < FORMATS[_STATE_DTYPE].element_bytes
    return num_parameters * FORMATS[_STATE_DTYPE].element_bytes * (_STATE_TENSORS[optimizer] + has_copy)


_FOREACH_PASSES = 18
"""Tensors that Adam's update reads and writes where every operation is a pass of its own: moving both means (3, 2 and 3), a root
into a copy (2), its scaling and its epsilon (2 each), the weights (4). From ``torch.optim.adam._multi_tensor_adam``."""


def optimizer_work(
    num_parameters: int,
    optimizer: Optimizer,
    *,
    dtype: DType = "float32",
    num_tensors: int = 1,
    foreach: bool = False,
) -> Work:
    """Return the work of an update: weights, gradients and state read once, weights and state written once.

    With `foreach` Adam does each operation on all tensors before the next.
    """
    width = FORMATS[dtype].element_bytes
    state = 2 * optimizer_bytes(num_parameters, optimizer, dtype)
    if foreach and optimizer == "adam":
        passes = _FOREACH_PASSES * FORMATS[_STATE_DTYPE].element_bytes
        copied = 2 * width if dtype != _STATE_DTYPE else 0
        return Work(dtype=dtype, param_pass_bytes=(passes + copied) * num_parameters, num_kernels=num_tensors)
    return Work(dtype=dtype, param_pass_bytes=3 * width * num_parameters + state, num_kernels=num_tensors)
