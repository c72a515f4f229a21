"""The aten operators that tritonbench runs, and what an operator that it does not know is run as.

Source: the keys of tritonbench's `operator_loader/aten/config.yaml`; `run.py --op` refuses all others. PyTorch's
composite operators (`linear`, `softmax`) are not among them, the operators that they end in are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from kcap.schemas.backendbench import TraceLine
from kcap.schemas.recording.values import TensorSpec, TorchConstant, Value

LISTED = frozenset(
    """
    _adaptive_avg_pool2d.default _adaptive_avg_pool2d_backward.default _amp_update_scale_.default
    _cudnn_rnn.default _cudnn_rnn_backward.default _cudnn_rnn_flatten_weight.default _embedding_bag.default
    _embedding_bag_backward.default _fft_c2c.default _foreach_add.List _foreach_norm.Scalar
    _foreach_pow.ScalarAndTensor _foreach_sqrt.default _fused_moving_avg_obs_fq_helper.default
    _is_all_true.default _log_softmax.default _log_softmax_backward_data.default _pack_padded_sequence.default
    _safe_softmax.default _scaled_dot_product_efficient_attention.default
    _scaled_dot_product_efficient_attention_backward.default _softmax.default _softmax_backward_data.default
    _sparse_coo_tensor_with_dims_and_tensors.default _thnn_fused_lstm_cell.default
    _thnn_fused_lstm_cell_backward_impl.default _to_copy.default _unsafe_view.default abs.default add.Scalar
    add.Tensor add_.Tensor addcdiv_.default addcmul.default addcmul_.default addmm.default all.default all.dim
    any.default argmax.default as_strided_.default avg_pool2d.default avg_pool2d_backward.default
    bernoulli.default bernoulli_.float binary_cross_entropy.default binary_cross_entropy_backward.default
    binary_cross_entropy_with_logits.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor
    bitwise_xor.Tensor bmm.default cat.default clamp.default clamp_.default clamp_min.default clamp_min_.default
    clone.default col2im.default constant_pad_nd.default convolution.default convolution_backward.default
    copy_.default cos.default cudnn_batch_norm.default cudnn_batch_norm_backward.default cumsum.default
    div.Scalar div.Tensor div.Tensor_mode div_.Scalar div_.Tensor dot.default elu.default elu_backward.default
    embedding.default embedding_dense_backward.default eq.Scalar eq.Tensor erf.default exp.default fill_.Scalar
    fill_.Tensor flip.default floor.default fmod.Scalar gather.default ge.Scalar gelu.default
    gelu_backward.default glu.default glu_backward.default grid_sampler_2d.default
    grid_sampler_2d_backward.default gt.Scalar gt.Tensor hardsigmoid.default hardsigmoid_backward.default
    hardswish.default hardswish_.default hardswish_backward.default hardtanh.default hardtanh_.default
    hardtanh_backward.default im2col.default index.Tensor index_add.default index_add_.default index_put.default
    index_put_.default index_select.default le.Scalar le.Tensor leaky_relu.default leaky_relu_.default
    leaky_relu_backward.default lerp_.Scalar linalg_vector_norm.default log.default log2.default
    logsumexp.default lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar
    masked_scatter.default masked_select.default max.default max.dim max_pool2d_with_indices.default
    max_pool2d_with_indices_backward.default maximum.default mean.default mean.dim minimum.default mm.default
    mse_loss.default mse_loss_backward.default mul.Scalar mul.Tensor mul.out mul_.Scalar mul_.Tensor
    nan_to_num.default native_batch_norm.default native_batch_norm_backward.default native_dropout.default
    native_dropout_backward.default native_group_norm.default native_group_norm_backward.default
    native_layer_norm.default native_layer_norm_backward.default ne.Scalar ne.Tensor neg.default
    new_empty.default new_empty_strided.default new_full.default new_ones.default new_zeros.default
    nll_loss2d_backward.default nll_loss2d_forward.default nll_loss_backward.default nll_loss_forward.default
    nonzero.default normal.Tensor_Tensor normal_.default pixel_shuffle.default pow.Scalar pow.Tensor_Scalar
    pow_.Scalar prod.dim_int random_.default random_.to reciprocal.default reciprocal_.default
    reflection_pad2d.default reflection_pad2d_backward.default relu.default relu_.default remainder.Scalar
    repeat.default repeat_interleave.Tensor roll.default round.default rsqrt.default rsub.Scalar scatter.src
    scatter.value scatter_.src scatter_.value scatter_add.default scatter_add_.default scatter_reduce_.two
    select_backward.default sgn.default sigmoid.default sigmoid_backward.default silu.default silu_.default
    silu_backward.default sin.default slice_backward.default smooth_l1_loss.default
    smooth_l1_loss_backward.default softplus.default softplus_backward.default sort.default split.Tensor
    split_with_sizes.default sqrt.default squeeze_.dims stack.default std.correction sub.Scalar sub.Tensor
    sub_.Tensor sum.default sum.dim_IntList tanh.default tanh_backward.default threshold_backward.default
    topk.default tril.default triu.default unbind.int unfold_backward.default uniform_.default
    unsqueeze_.default upsample_bicubic2d.default upsample_bilinear2d.default
    upsample_bilinear2d_backward.default upsample_nearest2d.default upsample_nearest2d_backward.default
    where.self zero_.default
    """.split()
)


def listed_line(line: TraceLine) -> TraceLine | None:
    """`line` as a call of an operator that tritonbench lists, of the same work; None if there is none."""
    namespace, name = line.operator.split(".", 1)
    if namespace != "aten":
        return None
    if name in LISTED:
        return line
    if name in CONVERTED and (converted := CONVERTED[name](line)) is not None:
        operator, args, kwargs = converted
        return replace(line, operator=f"aten.{operator}", args=args, kwargs=kwargs)
    base, overload = name.rsplit(".", 1)
    if overload == "out" and "out" in line.kwargs:
        kwargs = {key: value for key, value in line.kwargs.items() if key != "out"}
        if without := next((name for name in (f"{base}.default", f"{base}.Tensor") if name in LISTED), None):
            return replace(line, operator=f"aten.{without}", kwargs=kwargs)
    return None


Conversion: TypeAlias = tuple[str, list[Value], dict[str, Value]]
Converter: TypeAlias = Callable[[TraceLine], Conversion | None]


def _named(line: TraceLine, *names: str, **defaults: Value) -> list[Value] | None:
    """The arguments of these names, in order; None if one is missing or there are others."""
    if len(line.args) > len(names) or not set(line.kwargs) <= set(names):
        return None
    given: Mapping[str, Value] = {**defaults, **dict(zip(names, line.args, strict=False)), **line.kwargs}
    return [given[name] for name in names] if given.keys() >= set(names) else None


def _renamed(operator: str, *names: str, kept: int | None = None, **defaults: Value) -> Converter:
    """An operator that takes the same arguments, or the first `kept` of them."""

    def convert(line: TraceLine) -> Conversion | None:
        args = _named(line, *names, **defaults)
        return (operator, args[:kept], {}) if args is not None else None

    return convert


def _linear(line: TraceLine) -> Conversion | None:
    match _named(line, "input", "weight", "bias", bias=None):
        case [TensorSpec() as rows, TensorSpec(shape=(n, k)) as weight, bias]:
            matrix, (row, column) = _matrix(rows), weight.effective_strides
            if matrix is not None:
                product: list[Value] = [matrix, replace(weight, shape=(k, n), strides=(column, row))]
                return ("mm.default", product, {}) if bias is None else ("addmm.default", [bias, *product], {})
    return None


def _matmul(line: TraceLine) -> Conversion | None:
    match _named(line, "self", "other"):
        case [TensorSpec(shape=(_, _)), TensorSpec(shape=(_, _))]:
            return "mm.default", line.args, {}
        case [TensorSpec(shape=(b, _, _)), TensorSpec(shape=(c, _, _))] if b == c:
            return "bmm.default", line.args, {}
    return None


def _matrix(rows: TensorSpec) -> TensorSpec | None:
    """`rows` with all axes but the last as one; None if its strides do not allow that."""
    if len(rows.shape) < 2 or rows.numel == 0:
        return None
    *outer, last = rows.shape
    strides = rows.effective_strides
    for axis, size in enumerate(outer[1:], 1):
        if outer[axis - 1] != 1 and strides[axis - 1] != size * strides[axis]:
            return None
    return replace(rows, shape=(rows.numel // last, last), strides=(strides[-2], strides[-1]))


def _softmax(operator: str) -> Converter:
    def convert(line: TraceLine) -> Conversion | None:
        match _named(line, "self", "dim", "dtype", dtype=None):
            case [TensorSpec() as rows, dim, dtype] if dtype in (None, TorchConstant("dtype", rows.dtype)):
                return operator, [rows, dim, False], {}
        return None

    return convert


def _convolution(line: TraceLine) -> Conversion | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    args = _named(line, *names, bias=None, stride=1, padding=0, dilation=1, groups=1)
    if args is None or not isinstance(args[0], TensorSpec) or not isinstance(args[1], TensorSpec):
        return None
    spatial = len(args[1].shape) - 2
    if len(args[0].shape) != spatial + 2 or isinstance(args[4], str):
        return None
    sizes: list[Value] = [value if isinstance(value, list) else [value] * spatial for value in args[3:6]]
    padding: list[Value] = [0] * spatial
    return "convolution.default", [*args[:3], *sizes, False, padding, args[6]], {}


def _group_norm(line: TraceLine) -> Conversion | None:
    names = ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled")
    match _named(line, *names, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
        case [TensorSpec(shape=(n, c, *_)) as rows, groups, weight, bias, eps, _] if n * c:
            return "native_group_norm.default", [rows, weight, bias, n, c, rows.numel // (n * c), groups, eps], {}
    return None


def _to_copy(line: TraceLine) -> Conversion | None:
    names = ("self", "dtype", "non_blocking", "copy", "memory_format")
    match _named(line, *names, non_blocking=False, copy=False, memory_format=None):
        case [TensorSpec() as rows, TorchConstant() as dtype, *_]:
            return "_to_copy.default", [rows], {"dtype": dtype}
    return None


POOL = ("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
BATCH_NORM = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")
CONVERTED: dict[str, Converter] = {
    "linear.default": _linear,
    "matmul.default": _matmul,
    "softmax.int": _softmax("_softmax.default"),
    "log_softmax.int": _softmax("_log_softmax.default"),
    "conv1d.default": _convolution,
    "conv2d.default": _convolution,
    "conv3d.default": _convolution,
    "group_norm.default": _group_norm,
    "layer_norm.default": _renamed(
        "native_layer_norm.default", *LAYER_NORM, kept=5, weight=None, bias=None, eps=1e-5, cudnn_enable=True
    ),
    "batch_norm.default": _renamed("native_batch_norm.default", *BATCH_NORM, kept=8),
    "adaptive_avg_pool2d.default": _renamed("_adaptive_avg_pool2d.default", "self", "output_size"),
    "max_pool2d.default": _renamed(
        "max_pool2d_with_indices.default", *POOL, stride=[], padding=0, dilation=1, ceil_mode=False
    ),
    "to.dtype": _to_copy,
}
