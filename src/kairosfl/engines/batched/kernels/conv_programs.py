"""Convolutions of stacked clients as implicit matrix products: patches are gathered on the fly,
never stored.

In memory, images are `[m, b, H, W, C]`, outputs `[m, b, OH, OW, O]`, and the weights in a client's
row `[O, KH, KW, C]`. A *tap* is one position (i, j) of the KH × KW kernel. The three products are

    forward            rows: output pixels    columns: outputs          sum over: taps × inputs
    gradient of x      rows: input pixels     columns: inputs           sum over: taps × outputs
    gradient of w      rows: outputs          columns: taps × inputs    sum over: output pixels, in parts

Operands are loaded into the matrix units 16 bytes at a time where the compiler can prove that they
are contiguous and aligned: a block of channels lies within one tap, starts at a multiple of the
block size, and the axis that is summed over is the last one in memory. For the gradient of x the
weights are transposed first. For the gradient of w no operand can be, so tf32 uses tiles of two
warps, whose matrix instructions read either order.
"""

# mypy: ignore-errors
# ruff: noqa: E741, SIM102  # a nested `if` on a constant is decided when the kernel is compiled

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward(
    x_rows,
    w_rows,
    b_rows,
    y_rows,
    row,
    side,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y = conv(x, w) + bias, or relu(y) if RELU; one program per tile of BM output pixels × BN
    outputs of a client.

    x_rows  [m, b, H, W, C]       images, float32 or bfloat16
    w_rows  [m, O, KH, KW, C]     weights, stride `row` between clients, dtype of x
    b_rows  [m, O]                float32, stride `side` between clients; read only if BIAS
    y_rows  [m, b, OH, OW, O]     output, dtype of x
    pixels  b·OH·OW, the output pixels of one client
    S*, P*  stride and padding; DOT: precision of tl.dot
    grid    (pixel tiles × output tiles, m), output tiles innermost
    """
    client = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (O + BN - 1) // BN
    number = tl.program_id(0)
    p = (number // tiles) * BM + tl.arange(0, BM)
    o = (number % tiles) * BN + tl.arange(0, BN)
    # Output pixel p is (image, row, column); (top, left) is the input pixel under its first tap,
    # maybe in the padding.
    image = p // (OH * OW)
    top = (p // OW) % OH * SH - PH
    left = p % OW * SW - PW
    known = p < pixels
    x_rows += client * (pixels // (OH * OW)) * (H * W * C)
    w_rows += client * row
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    if C % BK == 0:
        # Each step covers BK channels of one tap, so that addresses are contiguous in c.
        PARTS: tl.constexpr = C // BK
        for step in range(KH * KW * PARTS):
            tap = step // PARTS
            c = step % PARTS * BK + tl.arange(0, BK)
            h = top + tap // KW
            wide = left + tap % KW
            good = known & (h >= 0) & (h < H) & (wide >= 0) & (wide < W)
            spot = ((image * H + h) * W + wide) * C
            x = tl.load(x_rows + spot[:, None] + c[None, :], good[:, None], 0.0)
            w = tl.load(
                w_rows + (o * (KH * KW) + tap)[:, None] * C + c[None, :], (o < O)[:, None], 0.0
            )
            acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision=DOT)
    else:
        # Few channels: k runs over taps × channels, and a step may span several taps.
        K: tl.constexpr = KH * KW * C
        for begin in range(0, K, BK):
            k = begin + tl.arange(0, BK)
            tap = k // C
            h = top[:, None] + (tap // KW)[None, :]
            wide = left[:, None] + (tap % KW)[None, :]
            good = known[:, None] & (k < K)[None, :] & (h >= 0) & (h < H) & (wide >= 0) & (wide < W)
            x = tl.load(
                x_rows + ((image[:, None] * H + h) * W + wide) * C + (k % C)[None, :], good, 0.0
            )
            w = tl.load(
                w_rows + o[:, None] * K + k[None, :], (o < O)[:, None] & (k < K)[None, :], 0.0
            )
            acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision=DOT)
    if BIAS:
        acc += tl.load(b_rows + client * side + o, o < O, 0.0)[None, :]
    if RELU:
        acc = tl.where(acc < 0, 0.0, acc)  # NaN stays NaN, as it would not with tl.maximum
    y_rows += client * pixels * O
    tl.store(
        y_rows + p[:, None] * O + o[None, :],
        acc.to(y_rows.dtype.element_ty),
        known[:, None] & (o < O)[None, :],
    )


@triton.jit
def inward(
    dy_rows,
    w_rows,
    x_rows,
    dx_rows,
    images,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    MASK: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """dx, the gradient of the images; one program per tile of BM input pixels × BN inputs of a
    client.

    dy_rows  [m, images, OH, OW, O]    gradient of the output
    w_rows   [m, KH, KW, C, O]         weights as transposed by `_turn`, contiguous, dtype of dy
    x_rows   [m, images, H, W, C]      the images, what a ReLU returned: dx is zero where they are; read only if MASK
    dx_rows  [m, images, H, W, C]      output, dtype of dy
    images   b, the images of one client
    grid     (pixel tiles × input tiles, m, SH·SW), input tiles innermost
    """
    # Input pixels in the same residue class (line mod SH, column mod SW) are reached by the same
    # taps. Each class has programs of its own (axis 2 of the grid), which number its pixels by p
    # and visit these taps alone.
    client = tl.program_id(1).to(tl.int64)
    across = tl.program_id(2) % SW
    down = tl.program_id(2) // SW
    LINES: tl.constexpr = (H + SH - 1) // SH
    COLUMNS: tl.constexpr = (W + SW - 1) // SW
    tiles: tl.constexpr = (C + BN - 1) // BN
    number = tl.program_id(0)
    p = (number // tiles) * BM + tl.arange(0, BM)
    c = (number % tiles) * BN + tl.arange(0, BN)
    image = p // (LINES * COLUMNS)
    line = (p // COLUMNS) % LINES * SH + down
    column = p % COLUMNS * SW + across
    known = (image < images) & (line < H) & (column < W)
    # Output line h and tap i meet input line h·SH + i − PH. For this class the taps are first_h,
    # first_h + SH, …, `high` of them, and the i-th of these meets output line low − i; likewise for
    # columns.
    first_h = (down + PH) % SH
    first_w = (across + PW) % SW
    low = (line + PH - first_h) // SH
    right = (column + PW - first_w) // SW
    high = (KH - first_h + SH - 1) // SH
    broad = (KW - first_w + SW - 1) // SW
    dy_rows += client * images * (OH * OW * O)
    w_rows += client * (KH * KW * C * O)
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    PARTS: tl.constexpr = (O + BK - 1) // BK
    for step in range(high * broad * PARTS):
        o = step % PARTS * BK + tl.arange(0, BK)
        i = step // PARTS // tl.maximum(broad, 1)
        j = step // PARTS % tl.maximum(broad, 1)
        tap = (first_h + i * SH) * KW + first_w + j * SW
        h = low - i
        wide = right - j
        good = known & (h >= 0) & (h < OH) & (wide >= 0) & (wide < OW)
        spot = ((image * OH + h) * OW + wide) * O
        dy = tl.load(dy_rows + spot[:, None] + o[None, :], good[:, None] & (o < O)[None, :], 0.0)
        w = tl.load(
            w_rows + (tap * C + c)[:, None] * O + o[None, :],
            (c < C)[:, None] & (o < O)[None, :],
            0.0,
        )
        acc = tl.dot(dy, tl.trans(w), acc, input_precision=DOT)
    base = client * images * (H * W * C)
    spot = (((image * H + line) * W + column) * C)[:, None] + c[None, :]
    inside = known[:, None] & (c < C)[None, :]
    if MASK:
        acc = tl.where(tl.load(x_rows + base + spot, inside, 0.0) <= 0, 0.0, acc)
    tl.store(dx_rows + base + spot, acc.to(dx_rows.dtype.element_ty), inside)


@triton.jit
def turn(
    w_rows, t_rows, row, C: tl.constexpr, O: tl.constexpr, TAPS: tl.constexpr, B: tl.constexpr
):
    """Transpose the weights of every tap: w_rows [m, O, TAPS, C], stride `row` between clients, to
    t_rows [m, TAPS, C, O], contiguous. Grid: (tiles of B outputs × tiles of B inputs, m, TAPS)."""
    client = tl.program_id(1).to(tl.int64)
    tap = tl.program_id(2)
    tiles: tl.constexpr = (C + B - 1) // B
    o = tl.program_id(0) // tiles * B + tl.arange(0, B)
    c = tl.program_id(0) % tiles * B + tl.arange(0, B)
    inside = (o < O)[:, None] & (c < C)[None, :]
    w = tl.load(w_rows + client * row + (o * TAPS + tap)[:, None] * C + c[None, :], inside, 0.0)
    spots = t_rows + client * (TAPS * C * O) + (tap * C + c)[:, None] * O + o[None, :]
    tl.store(spots, tl.trans(w).to(t_rows.dtype.element_ty), tl.trans(inside))


@triton.jit
def weights(
    x_rows,
    dy_rows,
    dw_rows,
    db_rows,
    row,
    side,
    part,
    pixels,
    share,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    BIAS: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Parts of dw and db, the gradients of weights and bias; one program per tile of BM outputs ×
    BN (taps × inputs).

    x_rows   [m, b, H, W, C]                     images
    dy_rows  [m, b, OH, OW, O]                   gradient of the output, dtype of x
    dw_rows  [parts, m, O, KH·KW·C]              float32, stride `part` between parts and `row` between clients
    db_rows  [parts, m, O]                       likewise, but `side` between clients; written only if BIAS
    pixels   b·OH·OW; each part sums `share` of them (a multiple of BK), and the caller adds the parts
    grid     (output tiles × column tiles, m, parts), column tiles innermost
    """
    client = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    K: tl.constexpr = KH * KW * C
    tiles: tl.constexpr = (K + BN - 1) // BN
    number = tl.program_id(0)
    o = (number // tiles) * BM + tl.arange(0, BM)
    k = (number % tiles) * BN + tl.arange(0, BN)
    x_rows += client * (pixels // (OH * OW)) * (H * W * C)
    dy_rows += client * pixels * O
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    for begin in range(piece * share, min(piece * share + share, pixels), BK):
        p = begin + tl.arange(0, BK)
        known = p < pixels
        image = p // (OH * OW)
        if C % BN == 0:
            # All columns of this tile belong to one tap.
            tap = number % tiles // (C // BN)
            c = number % (C // BN) * BN + tl.arange(0, BN)
            h = (p // OW) % OH * SH + (tap // KW - PH)
            wide = p % OW * SW + (tap % KW - PW)
            good = known & (h >= 0) & (h < H) & (wide >= 0) & (wide < W)
            spot = ((image * H + h) * W + wide) * C
            x = tl.load(x_rows + spot[:, None] + c[None, :], good[:, None], 0.0)
        else:
            tap = k // C
            h = ((p // OW) % OH * SH)[:, None] + (tap // KW - PH)[None, :]
            wide = (p % OW * SW)[:, None] + (tap % KW - PW)[None, :]
            good = known[:, None] & (k < K)[None, :] & (h >= 0) & (h < H) & (wide >= 0) & (wide < W)
            x = tl.load(
                x_rows + ((image[:, None] * H + h) * W + wide) * C + (k % C)[None, :], good, 0.0
            )
        dy = tl.load(dy_rows + o[:, None] + p[None, :] * O, (o < O)[:, None] & known[None, :], 0.0)
        acc = tl.dot(dy, x, acc, input_precision=DOT)
        if BIAS:
            if number % tiles == 0:  # the programs of the first columns have read all of dy
                total += tl.sum(dy.to(tl.float32), 1)
    dw_rows += client * row + piece.to(tl.int64) * part
    tl.store(dw_rows + o[:, None] * K + k[None, :], acc, (o < O)[:, None] & (k < K)[None, :])
    if BIAS:
        if number % tiles == 0:
            tl.store(db_rows + client * side + piece.to(tl.int64) * part + o, total, o < O)
