"""What kind of work operators do, by name."""

GROUPED = ("grouped_mm", "grouped_mm_fallback", "_grouped_mm")
"""Rows by group times each group's matrix, as torch and transformers call it."""
MATMULS = {
    "linear",
    "addmm",
    "addbmm",
    "baddbmm",
    "mm",
    "bmm",
    "matmul",
    "einsum",
    "tensordot",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    *GROUPED,
    "scaled_dot_product_attention",
    "dropout_attention",
}
FREE = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "t", "mT", "numpy_T", "adjoint",
        "movedim", "swapaxes", "swapdims", "_unsafe_view", "view_as", "reshape_as", "expand", "expand_as", "broadcast_to", "detach",
        "alias", "split", "chunk", "split_with_sizes", "unbind", "select", "slice", "narrow", "contiguous"}  # fmt: skip
