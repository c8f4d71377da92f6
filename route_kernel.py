"""
The depth read of mhar.py as fused Triton kernels, forward and backward: route(sources, q, g, H, eps), one read by itself, and
blocked_router(q, g, H, eps), all reads of a forward. (Sections are those of the MHAR paper.)

What it costs. One read over N sources of R = B T D numbers each (bytes in bf16; the flops are a percent of a model's):

    written with PyTorch (route_ref)                                        this file
    stack, upcast           2 + 4 bytes per number of N R written, read     forward: N R read once, R written
    k = RMSNorm(s) g        4 N R read, 4 N R written                       backward: N R read twice (the second time mostly
    logits = q . k          4 N R read                                      from L2) and R, N R written
    read = sum a s          4 N R read, 4 N R written, read                 beside them N B T H logits in fp32
    and about twice that in backward

The forward is one pass with the running maximum m, sum l and numerator acc of an online softmax, as in flash-attention with the
depth as the key axis; the mean square, which couples the heads, comes from the same loaded row. With w = q g, r_n = rsqrt(mean
s_n^2 + eps) and x_nh = r_n w_h . s_n[h] the logits, a = softmax_n(x), the backward for the incoming gradient do [B, T, D] is

    P_nh  = do_h . s_n[h]              D_h = sum_n a_nh P_nh             dx_nh = a_nh (P_nh - D_h)
    ds_n  = a_n do + r_n dx_n w - s_n (r_n^2 / D) sum_h dx_nh x_nh       dw_h  = sum_{t,n} r_n dx_nh s_n[h]

and d(q), d(g) follow from w = q g. With one source D = P, so dx, dq and dg are exactly zero and ds = do. Sums over tokens are
taken per program and then added up in a fixed order: no atomics, two runs are bitwise equal. All arithmetic is fp32.
"""
import contextlib
import functools

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

INTS = ["BT", "N", "n", "first", "block", "k", "k_end", "top"]    # one compiled kernel whatever their values

@triton.jit(do_not_specialize=INTS)
def read_forward(p_s, p_w, p_out, p_x, p_m, p_l, BT, N, eps, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr,
                 TILE: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr):
    """One program reads whole rows of TILE tokens, as heads by columns, both padded to powers of two: [TILE, HP, DP]."""
    o_t = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)                  # [TILE], 64 bits: N BT D passes 2^31
    o_h, o_c = tl.arange(0, HP), tl.arange(0, DP)
    o_d = o_h[:, None] * DH + o_c[None, :]                                           # [HP, DP]
    m_d = (o_h[:, None] < H) & (o_c[None, :] < DH)
    m_t = o_t < BT
    mask, m_th = m_t[:, None, None] & m_d[None], m_t[:, None] & (o_h[None, :] < H)
    b_w = tl.load(p_w + o_d, mask=m_d, other=0.0)                                    # [HP, DP]
    m = tl.full([TILE, HP], float("-inf"), tl.float32)
    l = tl.zeros([TILE, HP], tl.float32)  # noqa: E741
    acc = tl.zeros([TILE, HP, DP], tl.float32)
    row = o_t                                                                        # of source n: n BT + t
    for _ in range(N):
        b_s = tl.load(p_s + row[:, None, None] * D + o_d[None], mask=mask, other=0.0).to(tl.float32)    # [TILE, HP, DP]
        r = tl.rsqrt(tl.sum(tl.sum(b_s * b_s, 2), 1) / D + eps)                      # [TILE]
        x = tl.sum(b_s * b_w[None], 2) * r[:, None]                                  # [TILE, HP]
        tl.store(p_x + row[:, None] * H + o_h[None, :], x, mask=m_th)
        m_new = tl.maximum(m, x)
        scale, p = tl.exp(m - m_new), tl.exp(x - m_new)
        l, m = l * scale + p, m_new  # noqa: E741
        acc = acc * scale[:, :, None] + p[:, :, None] * b_s
        row += BT
    tl.store(p_m + o_t[:, None] * H + o_h[None, :], m, mask=m_th)                    # m and l, not m + log l: rounding that
    tl.store(p_l + o_t[:, None] * H + o_h[None, :], l, mask=m_th)                    # sum costs digits at large logits
    out = acc / l[:, :, None]
    tl.store(p_out + o_t[:, None, None] * D + o_d[None], out.to(p_out.dtype.element_ty), mask=mask)

@triton.jit(do_not_specialize=INTS)
def read_backward(p_s, p_w, p_do, p_x, p_m, p_l, p_ds, p_dw, BT, N, eps, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr,
                  TILE: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr):
    """Each program walks over every num_programs-th tile of tokens and keeps its share of dw."""
    o_h, o_c = tl.arange(0, HP), tl.arange(0, DP)
    o_d = o_h[:, None] * DH + o_c[None, :]                                           # [HP, DP]
    m_d = (o_h[:, None] < H) & (o_c[None, :] < DH)
    b_w = tl.load(p_w + o_d, mask=m_d, other=0.0)
    dw = tl.zeros([HP, DP], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(BT, TILE), tl.num_programs(0)):
        o_t = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        m_t = o_t < BT
        mask, m_th = m_t[:, None, None] & m_d[None], m_t[:, None] & (o_h[None, :] < H)
        b_do = tl.load(p_do + o_t[:, None, None] * D + o_d[None], mask=mask, other=0.0).to(tl.float32)  # [TILE, HP, DP]
        m = tl.load(p_m + o_t[:, None] * H + o_h[None, :], mask=m_th, other=0.0)     # [TILE, HP]
        l = tl.load(p_l + o_t[:, None] * H + o_h[None, :], mask=m_th, other=1.0)  # noqa: E741
        delta = tl.zeros([TILE, HP], tl.float32)
        row = o_t
        for _ in range(N):                                                           # D_h = sum_n a_nh P_nh
            b_s = tl.load(p_s + row[:, None, None] * D + o_d[None], mask=mask, other=0.0).to(tl.float32)
            x = tl.load(p_x + row[:, None] * H + o_h[None, :], mask=m_th, other=0.0)
            delta += tl.exp(x - m) / l * tl.sum(b_do * b_s, 2)
            row += BT
        row = o_t
        for _ in range(N):
            b_s = tl.load(p_s + row[:, None, None] * D + o_d[None], mask=mask, other=0.0).to(tl.float32)
            x = tl.load(p_x + row[:, None] * H + o_h[None, :], mask=m_th, other=0.0)
            a = tl.exp(x - m) / l
            dx = a * (tl.sum(b_do * b_s, 2) - delta)                                 # [TILE, HP]
            r = tl.where(m_t, tl.rsqrt(tl.sum(tl.sum(b_s * b_s, 2), 1) / D + eps), 0.0)                 # [TILE]
            c = r * r / D * tl.sum(dx * x, 1)                                        # [TILE], along s itself
            rdx = (dx * r[:, None])[:, :, None]
            ds = a[:, :, None] * b_do + rdx * b_w[None] - c[:, None, None] * b_s
            tl.store(p_ds + row[:, None, None] * D + o_d[None], ds.to(p_ds.dtype.element_ty), mask=mask)
            dw += tl.sum(rdx * b_s, 0)
            row += BT
    tl.store(p_dw + tl.program_id(0).to(tl.int64) * D + o_d, dw, mask=m_d)

def tiling(D, H):
    """Constants and warps of a launch: about 2048 numbers in a tile, at least one row."""
    HP, DP = triton.next_power_of_2(H), triton.next_power_of_2(D // H)
    return dict(D=D, H=H, DH=D // H, HP=HP, DP=DP, TILE=max(1, 2048 // (HP * DP)), num_warps=min(16, max(4, HP * DP // 512)))

class Route(torch.autograd.Function):
    """w [D] fp32 and the sources, N of [B, T, D] or one [N, B, T, D] -> read [B, T, D]. Lists are stacked, and kept as lists."""

    @staticmethod
    def forward(ctx, w, H, eps, *sources):
        s = stacked(sources)
        (N, B, T, _), k = s.shape, tiling(s.size(-1), H)
        out = torch.empty_like(s[0])
        x, m, l = (torch.empty(n, B, T, H, device=s.device, dtype=torch.float32) for n in (N, 1, 1))  # noqa: E741
        if B * T:
            with on(s.device):
                read_forward[(triton.cdiv(B * T, k["TILE"]),)](s, w, out, x, m, l, B * T, N, eps, **k)
        ctx.save_for_backward(w, x, m, l, *sources)
        ctx.H, ctx.eps = H, eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        w, x, m, l, *sources = ctx.saved_tensors  # noqa: E741
        s, do = stacked(sources), do.contiguous()
        (N, B, T, D), k = s.shape, tiling(s.size(-1), ctx.H)
        ds, programs = torch.empty_like(s), min(triton.cdiv(B * T, k["TILE"]), 1024)
        dw = torch.zeros(programs, D, device=s.device, dtype=torch.float32)
        if B * T:
            with on(s.device):
                read_backward[(programs,)](s, w, do, x, m, l, ds, dw, B * T, N, ctx.eps, **k)
        return dw.sum(0), None, None, *([ds] if sources[0].dim() == 4 else ds.unbind())

def stacked(sources):
    return sources[0].contiguous() if sources[0].dim() == 4 else torch.stack(tuple(sources))

def unsupported(device, dtype):
    """Why the kernels cannot run there, in words, or None if they can."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels take float32, bfloat16 and float16, not {dtype}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"its kernels need a CUDA device, or TRITON_INTERPRET=1, not {device.type}"
    return None

def on(device):
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

@torch.compiler.disable
def route(sources, q, g, H, eps=1e-6):
    """
    The depth read of section 3, as `mhar.route_ref`: sources N of [B, T, D] or one [N, B, T, D], q and g [D] -> [B, T, D] in the
    sources' dtype (fp32, bf16 or fp16; fp32 inside, rounded once). Once differentiable. Needs CUDA, or TRITON_INTERPRET=1.
    Raises ValueError, with the numbers, for shapes, dtypes or devices that do not fit.
    """
    sources = (sources,) if torch.is_tensor(sources) else tuple(sources)
    if not sources or sources[0].dim() == 4 and len(sources[0]) == 0:
        raise ValueError("a depth read needs at least one source, got none")
    one, D = sources[0], sources[0].size(-1)
    if any(s.shape != one.shape or s.dtype != one.dtype for s in sources):
        raise ValueError(f"sources must agree in shape and dtype, got {sorted({(tuple(s.shape), str(s.dtype)) for s in sources})}")
    if q.shape != (D,) or g.shape != (D,):
        raise ValueError(f"q and g must have shape ({D},), the sources' width; got {tuple(q.shape)} and {tuple(g.shape)}")
    if H < 1 or D % H:
        raise ValueError(f"{H} routing heads do not divide the width {D}")
    if len(devices := {t.device for t in (*sources, q, g)}) > 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(map(str, devices))}")
    if reason := unsupported(one.device, one.dtype):
        raise ValueError(f"route cannot run here: {reason}; mhar.route_ref can")
    return Route.apply(q.float() * g.float(), H, eps, *sources)

# ---------------------------------------------------------------- the blocked router of the full-depth modes
# Block b is the K sites bK .. bK+K-1. Its old sources are 0 .. bK, known at its first site; the others arrive inside it.
# Kernels: tt a tile of tokens, h a head, c a chunk of columns of the head's slice, k a site of the block, n a source.
K = 16

@triton.jit
def dot(a, b, F32: tl.constexpr, HALF: tl.constexpr):
    """a b, summed in fp32; the operands in full fp32, or rounded to the sources' half precision."""
    if F32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a.to(HALF), b.to(HALF))

@triton.jit
def scores_of(p_x, block, n, h, BT, H: tl.constexpr, K: tl.constexpr):
    """
    Scores of source n in a block, BT K numbers. Block b keeps [sources 0 .. (b+1)K-1, H] of them, one block behind the other:
    [BT, K] for old sources, which kernels read by the token, and [K, BT] for those that arrive inside the block.
    """
    return p_x + ((n + K * (block * (block + 1) // 2)).to(tl.int64) * H + h) * BT * K

@triton.jit
def strides_of(block, n, BT, K: tl.constexpr):
    """Strides of token and site in these scores."""
    inside = (n > block * K).to(tl.int32)
    return K + inside * (1 - K), 1 + inside * (BT - 1)

@triton.jit(do_not_specialize=INTS)
def append_kernel(p_s, p_v, p_r, BT, eps, D: tl.constexpr, TT: tl.constexpr, DP: tl.constexpr):
    """V[n] = s, R[n] = rsqrt(mean s^2 + eps)."""
    o_t, o_d = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT), tl.arange(0, DP)
    mask = (o_t < BT)[:, None] & (o_d < D)[None, :]
    b_s = tl.load(p_s + o_t[:, None] * D + o_d[None, :], mask=mask, other=0.0)
    tl.store(p_v + o_t[:, None] * D + o_d[None, :], b_s, mask=mask)
    b_f = b_s.to(tl.float32)
    tl.store(p_r + o_t, tl.rsqrt(tl.sum(b_f * b_f, 1) / D + eps), mask=o_t < BT)

@triton.jit(do_not_specialize=INTS)
def score_kernel(p_v, p_r, p_w, p_x, BT, n, first, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr, C: tl.constexpr,
                 K: tl.constexpr, TT: tl.constexpr, F32: tl.constexpr):
    """x[n, h, t, k] = r_n w_k[h] . s_n[h] for the blocks from `first` on; p_v and p_r point at V[n] and R[n]."""
    o_t, o_k = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT), tl.arange(0, K)
    h, block, m_t = tl.program_id(1), first + tl.program_id(2), o_t < BT
    x = tl.zeros([TT, K], tl.float32)
    for c in range(0, DH, C):
        o_c = c + tl.arange(0, C)
        m_c = o_c < DH
        b_v = tl.load(p_v + o_t[:, None] * D + h * DH + o_c[None, :], mask=m_t[:, None] & m_c[None, :], other=0.0)       # [TT, C]
        b_w = tl.load(p_w + (block * K + o_k)[None, :] * D + h * DH + o_c[:, None], mask=m_c[:, None], other=0.0)         # [C, K]
        x += dot(b_v, b_w, F32, p_v.dtype.element_ty)
        if not F32:                                          # the query's low bits matter: a second product for them
            x += dot(b_v, b_w - b_w.to(b_v.dtype).to(tl.float32), F32, p_v.dtype.element_ty)
    x *= tl.load(p_r + o_t, mask=m_t, other=0.0)[:, None]
    p = scores_of(p_x, block, n, h, BT, H, K)
    if n > block * K:                                        # two stores with constant strides are twice as fast as one without
        tl.store(p + o_t[:, None] + o_k[None, :] * BT, x, mask=m_t[:, None])
    else:
        tl.store(p + o_t[:, None] * K + o_k[None, :], x, mask=m_t[:, None])

@triton.jit(do_not_specialize=INTS)
def block_read_kernel(p_v, p_x, p_part, p_m, p_l, BT, block, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr, C: tl.constexpr,
                      K: tl.constexpr, NT: tl.constexpr, F32: tl.constexpr):
    """The K sites' mixes of the old sources, one token and head a program: flash-attention over depth, sites as queries."""
    t, h, o_k = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, K)
    o_c = tl.program_id(2) * C + tl.arange(0, C)
    m, l = tl.full([K], float("-inf"), tl.float32), tl.zeros([K], tl.float32)  # noqa: E741
    acc = tl.zeros([K, C], tl.float32)
    for n0 in range(0, block * K + 1, NT):
        n = n0 + tl.arange(0, NT)
        m_n = n <= block * K
        x = tl.load(scores_of(p_x, block, n, h, BT, H, K)[:, None] + t * K + o_k[None, :], mask=m_n[:, None], other=float("-inf"))
        b_v = tl.load(p_v + (n.to(tl.int64) * BT + t)[:, None] * D + h * DH + o_c[None, :],
                      mask=m_n[:, None] & (o_c < DH)[None, :], other=0.0)                                               # [NT, C]
        m_new = tl.maximum(m, tl.max(x, 0))
        scale, p = tl.exp(m - m_new), tl.exp(x - m_new[None, :])                                                       # [K], [NT, K]
        l, m = l * scale + tl.sum(p, 0), m_new  # noqa: E741
        acc = acc * scale[:, None] + dot(tl.trans(p), b_v, F32, p_v.dtype.element_ty)
    part = (acc / l[:, None]).to(p_part.dtype.element_ty)
    tl.store(p_part + (o_k.to(tl.int64) * BT + t)[:, None] * D + h * DH + o_c[None, :], part, mask=(o_c < DH)[None, :])
    first = o_k + K * tl.program_id(2) < K                   # one of the chunks
    o = (o_k.to(tl.int64) * H + h) * BT + t
    tl.store(p_m + o, m, mask=first)
    tl.store(p_l + o, l, mask=first)

@triton.jit(do_not_specialize=INTS)
def site_read_kernel(p_v, p_x, p_part, p_m0, p_l0, p_out, p_m, p_l, BT, block, k, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr,
                     DP: tl.constexpr, K: tl.constexpr, TT: tl.constexpr):
    """Site k of the block: its share of the block read, then the k sources that arrived since."""
    o_t, o_c, h = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT), tl.arange(0, DP), tl.program_id(1)
    m_t = o_t < BT
    mask, o = m_t[:, None] & (o_c < DH)[None, :], o_t[:, None] * D + h * DH + o_c[None, :]
    m, l = tl.load(p_m0 + h * BT + o_t, mask=m_t, other=0.0), tl.load(p_l0 + h * BT + o_t, mask=m_t, other=1.0)  # noqa: E741
    acc = tl.load(p_part + o, mask=mask, other=0.0).to(tl.float32) * l[:, None]                                        # [TT, DP]
    o_n = o + (block * K + 1).to(tl.int64) * BT * D
    p_xn = scores_of(p_x, block, block * K + 1, h, BT, H, K) + k.to(tl.int64) * BT + o_t
    for _ in range(k):
        x, b_v = tl.load(p_xn, mask=m_t, other=0.0), tl.load(p_v + o_n, mask=mask, other=0.0).to(tl.float32)
        m_new = tl.maximum(m, x)
        scale, p = tl.exp(m - m_new), tl.exp(x - m_new)
        l, m = l * scale + p, m_new  # noqa: E741
        acc = acc * scale[:, None] + p[:, None] * b_v
        o_n += BT.to(tl.int64) * D
        p_xn += BT.to(tl.int64) * H * K
    tl.store(p_out + o, (acc / l[:, None]).to(p_out.dtype.element_ty), mask=mask)
    tl.store(p_m + h * BT + o_t, m, mask=m_t)
    tl.store(p_l + h * BT + o_t, l, mask=m_t)

@triton.jit(do_not_specialize=INTS)
def delta_kernel(p_do, p_out, p_keep, p_delta, BT, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr, DP: tl.constexpr, TT: tl.constexpr):
    """Keeps do for the rest of the block, and D_h = do_h . out_h."""
    o_t, o_c, h = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT), tl.arange(0, DP), tl.program_id(1)
    mask, o = (o_t < BT)[:, None] & (o_c < DH)[None, :], o_t[:, None] * D + h * DH + o_c[None, :]
    b_do = tl.load(p_do + o, mask=mask, other=0.0)
    tl.store(p_keep + o, b_do, mask=mask)
    b_out = tl.load(p_out + o, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_delta + h * BT + o_t, tl.sum(b_do.to(tl.float32) * b_out, 1), mask=o_t < BT)

@triton.jit(do_not_specialize=INTS)
def gather_kernel(p_v, p_r, p_x, p_do, p_m, p_l, p_delta, p_acc, p_c, BT, block, k, k_end, D: tl.constexpr, H: tl.constexpr,
                  DH: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, TT: tl.constexpr, FRESH: tl.constexpr):
    """Source bK+k, 0 < k: its gradient as a value from the sites k .. k_end-1 of its own block, and their dx r, stored over x."""
    o_t, o_c, h = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT), tl.arange(0, DP), tl.program_id(1)
    m_t, n = o_t < BT, block * K + k
    mask, o = m_t[:, None] & (o_c < DH)[None, :], o_t[:, None] * D + h * DH + o_c[None, :]
    o_n, o_nh = n.to(tl.int64) * BT * D + o, (n.to(tl.int64) * H + h) * BT + o_t
    b_v = tl.load(p_v + o_n, mask=mask, other=0.0).to(tl.float32)
    r = tl.load(p_r + n.to(tl.int64) * BT + o_t, mask=m_t, other=0.0)
    acc, c = tl.zeros([TT, DP], tl.float32), tl.zeros([TT], tl.float32)
    if not FRESH:
        acc, c = tl.load(p_acc + o_n, mask=mask, other=0.0), tl.load(p_c + o_nh, mask=m_t, other=0.0)
    p_xn, o_j, o_jh = scores_of(p_x, block, n, h, BT, H, K) + k * BT + o_t, k.to(tl.int64) * BT * D + o, (k.to(tl.int64) * H + h) * BT + o_t
    for _ in range(k, k_end):
        b_do = tl.load(p_do + o_j, mask=mask, other=0.0).to(tl.float32)                                                # [TT, DP]
        x = tl.load(p_xn, mask=m_t, other=0.0)
        a = tl.exp(x - tl.load(p_m + o_jh, mask=m_t, other=0.0)) / tl.load(p_l + o_jh, mask=m_t, other=1.0)
        dx = a * (tl.sum(b_do * b_v, 1) - tl.load(p_delta + o_jh, mask=m_t, other=0.0))
        acc += a[:, None] * b_do
        c += dx * x
        tl.store(p_xn, dx * r, mask=m_t)
        p_xn += BT
        o_j += BT.to(tl.int64) * D
        o_jh += BT.to(tl.int64) * H
    tl.store(p_acc + o_n, acc, mask=mask)
    tl.store(p_c + o_nh, c, mask=m_t)

@triton.jit(do_not_specialize=INTS)
def push_kernel(p_v, p_r, p_x, p_do, p_m, p_l, p_delta, p_acc, p_c, BT, block, k_end, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr,
                C: tl.constexpr, K: tl.constexpr, NT: tl.constexpr, F32: tl.constexpr, FRESH: tl.constexpr):
    """The block's old sources: what gather does for one source and its sites, for tiles of NT sources and all K sites."""
    t, h, o_k = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, K)
    m_k, o = o_k < k_end, (o_k.to(tl.int64) * H + h) * BT + t
    m, l = tl.load(p_m + o, mask=m_k, other=0.0), tl.load(p_l + o, mask=m_k, other=1.0)  # noqa: E741
    delta = tl.load(p_delta + o, mask=m_k, other=0.0)
    p_dok = p_do + (o_k.to(tl.int64) * BT + t) * D + h * DH                                                            # [K]
    for n0 in range(0, block * K + 1, NT):
        n = n0 + tl.arange(0, NT)
        m_n, o_n = n <= block * K, n.to(tl.int64) * BT + t
        P = tl.zeros([NT, K], tl.float32)
        for c in range(0, DH, C):
            o_c = c + tl.arange(0, C)
            b_v = tl.load(p_v + o_n[:, None] * D + h * DH + o_c[None, :], mask=m_n[:, None] & (o_c < DH)[None, :], other=0.0)
            b_do = tl.load(p_dok[None, :] + o_c[:, None], mask=m_k[None, :] & (o_c < DH)[:, None], other=0.0)         # [C, K]
            P += dot(b_v, b_do, F32, p_v.dtype.element_ty)
        p_xn = scores_of(p_x, block, n, h, BT, H, K)[:, None] + t * K + o_k[None, :]
        x = tl.load(p_xn, mask=m_n[:, None], other=0.0)
        a = tl.where(m_n[:, None] & m_k[None, :], tl.exp(x - m[None, :]) / l[None, :], 0.0)                            # [NT, K]
        dx = tl.where((block * K + o_k > 0)[None, :], a * (P - delta[None, :]), 0.0)        # site 0 has one source: no gradient
        r = tl.load(p_r + o_n, mask=m_n, other=0.0)
        tl.store(p_xn, dx * r[:, None], mask=m_n[:, None])
        cx = tl.sum(tl.where(m_k[None, :], dx * x, 0.0), 1)
        p_cn = p_c + (n.to(tl.int64) * H + h) * BT + t
        if not FRESH:
            cx += tl.load(p_cn, mask=m_n, other=0.0)
        tl.store(p_cn, cx, mask=m_n)
        for c in range(0, DH, C):
            o_c = c + tl.arange(0, C)
            b_do = tl.load(p_dok[:, None] + o_c[None, :], mask=m_k[:, None] & (o_c < DH)[None, :], other=0.0)         # [K, C]
            acc = dot(a, b_do, F32, p_v.dtype.element_ty)
            p_g, mask = p_acc + o_n[:, None] * D + h * DH + o_c[None, :], m_n[:, None] & (o_c < DH)[None, :]
            if not FRESH:
                acc += tl.load(p_g, mask=mask, other=0.0)
            tl.store(p_g, acc, mask=mask)

@triton.jit(do_not_specialize=INTS)
def finalize_kernel(p_v, p_r, p_x, p_w, p_acc, p_c, p_ds, BT, n, top, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr, C: tl.constexpr,
                    HP: tl.constexpr, K: tl.constexpr, TT: tl.constexpr, F32: tl.constexpr):
    """ds_n = value gradient + sum_sites (dx r) w - s r^2 / D sum (dx x), over the sites n .. top."""
    o_t, o_k, h = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT), tl.arange(0, K), tl.program_id(1)
    o_c, o_h, m_t = tl.program_id(2) * C + tl.arange(0, C), tl.arange(0, HP), o_t < BT
    dk = tl.zeros([TT, C], tl.float32)
    for block in range(n // K, top // K + 1):
        site = block * K + o_k
        s_t, s_k = strides_of(block, n, BT, K)
        b_x = tl.load(scores_of(p_x, block, n, h, BT, H, K) + o_t[:, None] * s_t + o_k[None, :] * s_k,
                      mask=m_t[:, None] & ((site >= n) & (site <= top))[None, :], other=0.0)                           # [TT, K]
        b_w = tl.load(p_w + site[:, None] * D + h * DH + o_c[None, :], mask=(o_c < DH)[None, :], other=0.0)            # [K, C]
        dk += dot(b_x, b_w, F32, p_v.dtype.element_ty)
    row = n.to(tl.int64) * BT + o_t
    o_ch = (n.to(tl.int64) * H + o_h)[None, :] * BT + o_t[:, None]
    c = tl.sum(tl.load(p_c + o_ch, mask=m_t[:, None] & (o_h < H)[None, :], other=0.0), 1)
    r = tl.load(p_r + row, mask=m_t, other=0.0)
    mask, o = m_t[:, None] & (o_c < DH)[None, :], h * DH + o_c[None, :]
    b_v = tl.load(p_v + row[:, None] * D + o, mask=mask, other=0.0).to(tl.float32)
    ds = tl.load(p_acc + row[:, None] * D + o, mask=mask, other=0.0) + dk - (c * r * r / D)[:, None] * b_v
    tl.store(p_ds + o_t[:, None] * D + o, ds.to(p_ds.dtype.element_ty), mask=mask)

@triton.jit(do_not_specialize=INTS)
def query_kernel(p_v, p_x, p_dw, BT, block, top, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                 TT: tl.constexpr, F32: tl.constexpr):
    """dw_k[h] = sum_{n, t} (dx r) s_n[h] for the sites of a block, one partial sum per program."""
    o_k, h = tl.arange(0, K), tl.program_id(1)
    o_c, site = tl.program_id(2) * C + tl.arange(0, C), block * K + tl.arange(0, K)
    acc = tl.zeros([K, C], tl.float32)
    for n in range(0, tl.minimum(block * K + K - 1, top) + 1):
        p_n = p_v + (n + tl.zeros([1], tl.int64)) * BT * D + h * DH
        s_t, s_k = strides_of(block, n, BT, K)
        for tile in range(tl.program_id(0), tl.cdiv(BT, TT), tl.num_programs(0)):
            o_t = (tile * TT + tl.arange(0, TT)).to(tl.int64)
            b_x = tl.load(scores_of(p_x, block, n, h, BT, H, K) + o_t[:, None] * s_t + o_k[None, :] * s_k,
                          mask=(o_t < BT)[:, None] & ((site >= n) & (site <= top))[None, :], other=0.0)                # [TT, K]
            b_v = tl.load(p_n + o_t[:, None] * D + o_c[None, :], mask=(o_t < BT)[:, None] & (o_c < DH)[None, :], other=0.0)
            acc += dot(tl.trans(b_x), b_v, F32, p_v.dtype.element_ty)
    o = (tl.program_id(0) * K + o_k)[:, None] * D + h * DH + o_c[None, :]
    tl.store(p_dw + o, acc, mask=(o_c < DH)[None, :])

class History:
    """The state of one forward: sources V, their R, scores X, softmax statistics M and L; and later that of its backward."""

    def __init__(self, s, w, H, eps):
        (S, D), BT, new = w.shape, s[..., 0].numel(), functools.partial(torch.empty, device=s.device, dtype=torch.float32)
        self.S, self.D, self.H, self.BT, self.eps, self.shape, blocks = S, D, H, BT, eps, s.shape[:-1], -(-S // K)
        self.w = torch.nn.functional.pad(w.detach(), (0, 0, 0, blocks * K - S))
        self.v, self.r, self.x = new(S, BT, D, dtype=s.dtype), new(S, BT), new(K * K * blocks * (blocks + 1) // 2 * H * BT)
        self.m, self.l = new(blocks * K, H, BT), new(blocks * K, H, BT)
        self.part, self.m0, self.l0 = new(K, BT, D, dtype=s.dtype), new(K, H, BT), new(K, H, BT)
        self.top = None                                      # the last site whose gradient arrived, once backward has begun
        DH, self.dtype = D // H, s.dtype
        F32 = s.dtype == torch.float32 or triton.knobs.runtime.interpret     # (the interpreter's bf16 products are unreliable)
        DP, base = triton.next_power_of_2(DH), dict(D=D, H=H, DH=DH)
        C = 32 if DH % 64 == 32 else min(128, max(16, DP))   # columns at a time: 160 = 5 x 32 wastes no lane
        self.rows = dict(base, DP=DP, TT=max(1, 1024 // DP), num_warps=min(16, max(4, DP // 256)))      # whole slices of a head
        self.dots = dict(base, C=min(64, DP) if DH > 16 else 16, K=K, F32=F32, num_warps=4)
        self.tokens = dict(self.dots, C=C, NT=16, num_warps=1 if C < 128 else 2)                        # one token a program

    def read(self, s, i):
        """Appends source i and returns the read of site i, [BT, D]."""
        BT, D, H, block, k, out = self.BT, self.D, self.H, i // K, i % K, torch.empty_like(s)
        tile, DP = self.rows["TT"], triton.next_power_of_2(D)
        TT = max(1, 4096 // DP)
        append_kernel[(triton.cdiv(BT, TT),)](s, self.v[i], self.r[i], BT, self.eps, D=D, TT=TT, DP=DP,
                                              num_warps=min(16, max(4, DP // 512)))
        grid = (triton.cdiv(BT, 64), H, self.m.size(0) // K - block)
        score_kernel[grid](self.v[i], self.r[i], self.w, self.x, BT, i, block, TT=64, **self.dots)
        if k == 0:
            grid = (BT, H, triton.cdiv(D // H, self.tokens["C"]))
            block_read_kernel[grid](self.v, self.x, self.part, self.m0, self.l0, BT, block, **self.tokens)
        grid = (triton.cdiv(BT, tile), H)
        site_read_kernel[grid](self.v, self.x, self.part[k], self.m0[k], self.l0[k], out, self.m[i], self.l[i], BT, block, k, K=K,
                               **self.rows)
        return out

    def read_backward(self, do, out, i):
        """The gradient of site i's read -> the whole gradient of source i, and dw [K, D] of the block at its first site."""
        BT, D, H, block, k = self.BT, self.D, self.H, i // K, i % K
        new = functools.partial(torch.empty, device=self.v.device, dtype=torch.float32)
        if self.top is None:
            self.top = i
            self.acc, self.c = new(self.S, BT, D), new(self.S, H, BT)
            self.do, self.delta = new(K, BT, D, dtype=self.dtype), new(K, H, BT)
        k_end, fresh = min(self.top - block * K, K - 1) + 1, block == self.top // K
        m, l, grid = self.m[block * K:], self.l[block * K:], (triton.cdiv(BT, self.rows["TT"]), H)  # noqa: E741
        state = (self.v, self.r, self.x, self.do, m, l, self.delta, self.acc, self.c, BT, block)
        delta_kernel[grid](do, out, self.do[k], self.delta[k], BT, **self.rows)
        if k > 0:
            gather_kernel[grid](*state, k, k_end, K=K, FRESH=fresh, **self.rows)
        else:
            push_kernel[(BT, H)](*state, k_end, FRESH=fresh, **self.tokens)
        ds, dw = torch.empty_like(out), None
        grid = (triton.cdiv(BT, 64), H, triton.cdiv(D // H, self.dots["C"]))
        finalize_kernel[grid](self.v, self.r, self.x, self.w, self.acc, self.c, ds, BT, i, self.top, HP=triton.next_power_of_2(H), TT=64,
                              **self.dots)
        if k == 0:
            dw = new(min(grid[0], max(1, 512 // (H * grid[2]))), K, D)
            query_kernel[(len(dw), *grid[1:])](self.v, self.x, dw, BT, block, self.top, TT=64, **self.dots)
            dw = dw.sum(0)[:min(K, self.S - block * K)]
        return ds, dw

class BlockedRead(torch.autograd.Function):
    """
    Site i. Autograd sees source i, the block's w at its first site, and a token that chains the sites, so that backward visits
    them last to first; all else is in the History.
    """

    @staticmethod
    def forward(ctx, s, token, w, history, i):
        ctx.history, ctx.i = history, i
        ctx.set_materialize_grads(False)
        with on(s.device):
            out = history.read(s.contiguous(), i)
        ctx.save_for_backward(out)
        return out, s.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, token):
        (out,), history = ctx.saved_tensors, ctx.history
        if (history.top is None) != (token is None) or history.top is not None and ctx.i >= history.top:
            raise RuntimeError("a backward has already gone through this forward's fused reads; a second one needs kernel='eager'")
        with on(out.device):
            do = torch.zeros_like(out) if do is None else do.contiguous()
            ds, dw = history.read_backward(do, out, ctx.i)
        return ds, out.new_empty(0) if ctx.i else None, dw, None, None

def blocked_router(q, g, H, eps=1e-6):
    """
    The reads of a whole forward, for attnres and mhar: q, g [sites, D] -> step, where the i-th call step(s_i [B, T, D]) returns
    the read of site i over sources 0 .. i. Same values as `route`, each source scored once and K sites to one read of the old ones.
    One backward per forward. Raises ValueError, with the numbers, for shapes, dtypes or devices that do not fit.
    """
    if q.dim() != 2 or q.shape != g.shape or H < 1 or q.size(1) % H:
        raise ValueError(f"q and g must be [sites, D] with D a multiple of H = {H}; got {tuple(q.shape)} and {tuple(g.shape)}")
    w, history, token, i = q.float() * g.float(), None, None, -1

    @torch.compiler.disable
    def step(s):
        nonlocal history, token, i
        i += 1
        if reason := unsupported(s.device, s.dtype):
            raise ValueError(f"the router cannot run here: {reason}; mhar.route_ref can")
        if i >= len(q) or s.size(-1) != q.size(1) or s.device != q.device or history and s.shape[:-1] != history.shape:
            raise ValueError(f"source {i} is {tuple(s.shape)} on {s.device}, expected at most {len(q)} of equal shape [B, T, {q.size(1)}] "
                             f"on {q.device}")
        history = history or History(s, w, H, eps)
        history.tracked = torch.is_grad_enabled() if i % K == 0 else history.tracked
        if torch.is_grad_enabled() and not history.tracked:
            raise RuntimeError(f"read {i - i % K} ran under no_grad, so that q and g would lose gradient; use requires_grad_(False)")
        out, token = BlockedRead.apply(s, token, w[i:i + K] if i % K == 0 else None, history, i)
        return out
    return step
