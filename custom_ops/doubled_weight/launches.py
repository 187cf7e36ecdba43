"""How to launch DoubledWeight's kernel by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch

LAUNCHES = {
    "doubled_weight_kernel": Launch(
        computes="y[c, i, j, f] = the sum of weight[f, 2 - i : 4 - i, 2 - j : 4 - j, c], zeros around the 3 x 3 taps",
        template=("T",),
        arguments=(
            Argument("weight", "const T*", "(filters, 3, 3, channels), contiguous", "filters * 9 * channels"),
            Argument("y", "T*", "(channels, 4, 4, filters), contiguous", "channels * 16 * filters"),
            Argument("filters", "uint32", "of the convolution"),
            Argument("channels", "uint32", "of its input"),
        ),
        block="256",
        grid=("ceil(channels / 32)", "ceil(filters / 32)", "1"),
    )
}
