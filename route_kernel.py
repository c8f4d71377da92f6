"""
The depth read of mhar.py as fused Triton kernels, forward and backward: route(sources, q, g, H, eps), one read by itself, and
blocked_router(q, g, H, eps), all reads of a forward. (Sections are those of the MHAR paper.)

What it costs. One read over N sources of R = B T D numbers each, in bytes of traffic in bf16 (the flops are a percent of a model's):

    written with PyTorch (route_ref)                                        this file
    stack, upcast           2 N R + 4 N R, both written and read            forward: 2 N R read once, 2 R written
    k = RMSNorm(s) g        4 N R read, 4 N R written                       backward: 2 N R read twice (the second time mostly
    logits = q . k          4 N R read                                      from L2) and 2 R, 2 N R written
    read = sum a s          4 N R read, 4 N R written, read                 beside them N B T H logits in fp32
    and about twice that in backward

The forward is one pass with the running maximum m, sum l and numerator acc of an online softmax, as in flash-attention with the
depth as the key axis; the mean square, which couples the heads, comes from the same loaded row. With w = q g, r_n = rsqrt(mean
s_n^2 + eps) and x_nh = r_n w_h . s_n[h] the logits, a = softmax_n(x), the backward for the incoming gradient do [B, T, D] is

    P_nh  = do_h . s_n[h]              D_h = sum_n a_nh P_nh             dx_nh = a_nh (P_nh - D_h)
    ds_n  = a_n do + r_n dx_n w - s_n (r_n^2 / D) sum_h dx_nh x_nh       dw_h  = sum_{t,n} r_n dx_nh s_n[h]

and d(q), d(g) follow from w = q g. With one source D = P, so dx, dq and dg are exactly zero and ds = do. Sums over tokens are
taken per program and then added up in a fixed order: no atomics, two runs are bitwise equal. All of this arithmetic is fp32.

All S reads of a forward, by the blocked router. Site by site, read i takes all its i+1 sources from memory: S^2/2 rows forward, twice
that backward, and a read and write of an fp32 gradient for each. Two facts save most of it:

    queries are parameters   the scores of a source at all later sites are matrix products of many tokens, made once (for the sites of
                             later blocks once more in backward)
    sites come in blocks     K = 16 of them share one read of the sources before their block; likewise in backward K sources
                             share one read of the do of all later sites, and their gradients add up on chip

    forward    score       s_n's products with the w of its block's sites (r_n follows in the site read)
               score       at a block's first site: of the block before, with the w of all later sites
               block read  at a block's first site: the K sites' mixes of the older sources, by online softmax
               site read   that share, plus the sources that arrived inside the block; V[n] = s_n
    backward   score       at a block's last site: its sources' products for later blocks again, which are not kept through the loss
    (sites     pull        there: the gradients of the block's K sources from the sites of later blocks, written once, in fp32
    last to    gather      site k: D_h = do_h . out_h instead of the sum (flash-attention's trick), then the whole gradient of the
    first)                 source that arrived there: from the block's sites k.. and what was pulled
               query       at a block's first site: dw of its own and of all later sites, from its K sources

The S^2/2 row reads of a forward become S^2/2K between blocks and S K/2 inside them; `moved` counts the bytes of both directions.
Rounding in bf16: w is split in two bf16 parts where it scores, and its first part alone serves the gradients of sources; the softmax
weights in products (block read, pull), a block read's share and dx r are rounded; D_h comes from the rounded read.
"""
import contextlib
import functools

import torch
import triton
import triton.language as tl

INTS = ["BT", "N", "n", "flat", "block", "k", "k_end", "top"]    # one compiled kernel whatever their values

@triton.jit
def inverse_root(x):
    """1 / sqrt(x), correctly rounded: the error of tl.rsqrt, times a logit of 50, is 1e-5 of a weight."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))

# The rows of a tile of tokens, head by head, in chunks of CW columns: tuples of [tt, HP, CW], HP the heads padded to a power of two.
# So 160 columns take 5 x 32 lanes and not 256.
@triton.jit
def load_row(p, mask, DH: tl.constexpr, CW: tl.constexpr):
    v = ()
    for c in tl.static_range((DH + CW - 1) // CW):
        inside = mask if DH % CW == 0 else mask & (c * CW + tl.arange(0, CW) < DH)[None, None, :]
        v = v + (tl.load(p + c * CW, mask=inside, other=0.0),)
    return v

@triton.jit
def store_row(p, v, mask, DH: tl.constexpr, CW: tl.constexpr):
    for c in tl.static_range(len(v)):
        inside = mask if DH % CW == 0 else mask & (c * CW + tl.arange(0, CW) < DH)[None, None, :]
        tl.store(p + c * CW, v[c].to(p.dtype.element_ty), mask=inside)

@triton.jit
def inner(u, v):
    """sum_c u_c v_c, [tt, HP]. (The fma: a product fused with the addition of another thread's is not the same in both threads.)"""
    uv = tl.fma(u[0].to(tl.float32), v[0].to(tl.float32), 0.0)
    for c in tl.static_range(1, len(u)):
        uv += u[c].to(tl.float32) * v[c].to(tl.float32)
    return tl.sum(uv, 2)

@triton.jit
def times(u, a):
    """a u, fp32, for a [tt, HP]"""
    au = ()
    for c in tl.static_range(len(u)):
        au = au + (a[:, :, None] * u[c].to(tl.float32),)
    return au

@triton.jit
def add(u, a, v):
    """u + a v, for a [tt, HP]"""
    w = ()
    for c in tl.static_range(len(u)):
        w = w + (u[c] + a[:, :, None] * v[c].to(tl.float32),)
    return w

@triton.jit
def load_source(p_s, flat, n, o_t, o_d, mask, BT, D: tl.constexpr, DH: tl.constexpr, CW: tl.constexpr):
    """The rows of source n: from one tensor of all, or the n-th of a tuple; bit n of flat: it is one row for all tokens."""
    if len(p_s) == 1:
        p = p_s[0] + (n * BT.to(tl.int64) + o_t)[:, None, None] * D                                                    # [TT, 1, 1]
    else:
        p = p_s[0]
        for j in tl.static_range(1, len(p_s)):
            p = tl.where(n == j, p_s[j], p)
        p += (o_t * tl.where((flat >> n) & 1 == 1, 0, D))[:, None, None]
    return load_row(p + o_d, mask, DH, CW)

@triton.jit(do_not_specialize=INTS)
def read_forward(p_s, flat, p_w, p_out, p_x, p_m, BT, N, eps, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr, HP: tl.constexpr,
                 CW: tl.constexpr, TT: tl.constexpr):
    """Whole rows of TT tokens a program. The next source is loaded while one is worked on."""
    o_t, o_h, o_c = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT), tl.arange(0, HP), tl.arange(0, CW)   # 64 bits: BT D passes 2^31
    m_t, m_h, rows = o_t < BT, o_h < H, BT.to(tl.int64)
    m_th, mask = m_t[:, None] & m_h[None, :], m_t[:, None, None] & m_h[None, :, None] & (o_c < DH)[None, None, :]
    o_d, o_th = o_h[None, :, None] * DH + o_c[None, None, :] + tl.zeros([TT, 1, 1], tl.int64), o_t[:, None] * H + o_h[None, :]
    w, b_s = load_row(p_w + o_d, mask, DH, CW), load_source(p_s, flat, 0, o_t, o_d, mask, BT, D, DH, CW)                # [TT, HP, CW]
    m, l = tl.full([TT, HP], float("-inf"), tl.float32), tl.zeros([TT, HP], tl.float32)  # noqa: E741
    acc = times(b_s, l)
    for n in range(N):
        b_next = load_source(p_s, flat, tl.minimum(n + 1, N - 1), o_t, o_d, mask, BT, D, DH, CW)
        r = inverse_root(tl.sum(inner(b_s, b_s), 1) / D + eps)                                                         # [TT]
        x = inner(b_s, w) * r[:, None]                                                                                 # [TT, HP]
        tl.store(p_x + n * rows * H + o_th, x, mask=m_th)
        m_new = tl.maximum(m, x)
        scale, p = tl.exp(m - m_new), tl.exp(x - m_new)
        l, m = l * scale + p, m_new  # noqa: E741
        acc, b_s = add(times(acc, scale), p, b_s), b_next
    tl.store(p_m + o_th, m, mask=m_th)
    store_row(p_out + (o_t * D)[:, None, None] + o_d, times(acc, 1.0 / l), mask, DH, CW)

@triton.jit(do_not_specialize=INTS)
def read_backward(p_s, flat, p_w, p_do, p_x, p_m, p_ds, p_dw, BT, N, eps, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr,
                  HP: tl.constexpr, CW: tl.constexpr, TT: tl.constexpr):
    """Each program walks over every num_programs-th tile of tokens and keeps its share of dw."""
    o_h, o_c, rows = tl.arange(0, HP), tl.arange(0, CW), BT.to(tl.int64)
    m_d = (o_h < H)[None, :, None] & (o_c < DH)[None, None, :]
    o_d = o_h[None, :, None] * DH + o_c[None, None, :] + tl.zeros([TT, 1, 1], tl.int64)                                # [TT, HP, CW]
    w = load_row(p_w + o_d, m_d, DH, CW)
    dw = times(w, tl.zeros([TT, HP], tl.float32))
    for tile in range(tl.program_id(0), tl.cdiv(BT, TT), tl.num_programs(0)):
        o_t = (tile * TT + tl.arange(0, TT)).to(tl.int64)
        m_t = o_t < BT
        mask, m_th, o_th = m_t[:, None, None] & m_d, m_t[:, None] & (o_h < H)[None, :], o_t[:, None] * H + o_h[None, :]
        b_do = load_row(p_do + (o_t * D)[:, None, None] + o_d, mask, DH, CW)
        b_s = load_source(p_s, flat, 0, o_t, o_d, mask, BT, D, DH, CW)
        m = tl.load(p_m + o_th, mask=m_th, other=0.0)                                                                  # [TT, HP]
        l, delta = tl.zeros([TT, HP], tl.float32), tl.zeros([TT, HP], tl.float32)  # noqa: E741
        for n in range(N):                                   # D_h = sum_n a_nh P_nh
            b_next = load_source(p_s, flat, tl.minimum(n + 1, N - 1), o_t, o_d, mask, BT, D, DH, CW)
            p = tl.exp(tl.load(p_x + n * rows * H + o_th, mask=m_th, other=0.0) - m)
            l += p  # noqa: E741                             (again, from the same p as below: at large logits the last digits matter)
            delta += p * inner(b_do, b_s)
            b_s = b_next
        delta /= l
        for i in range(N):                                   # last to first: the last are still at hand
            n = N - 1 - i
            b_next = load_source(p_s, flat, tl.maximum(n - 1, 0), o_t, o_d, mask, BT, D, DH, CW)
            x = tl.load(p_x + n * rows * H + o_th, mask=m_th, other=0.0)
            a = tl.exp(x - m) / l
            dx = a * (inner(b_do, b_s) - delta)                                                                        # [TT, HP]
            r = tl.where(m_t, inverse_root(tl.sum(inner(b_s, b_s), 1) / D + eps), 0.0)[:, None]                        # [TT, 1]
            c = r * r / D * tl.sum(tl.fma(dx, x, 0.0), 1)[:, None]                                                     # along s itself
            dx *= r
            ds = add(add(times(b_do, a), dx, w), tl.broadcast_to(-c, TT, HP), b_s)
            store_row(p_ds + ((n * rows + o_t) * D)[:, None, None] + o_d, ds, mask, DH, CW)
            dw = add(dw, dx, b_s)
            b_s = b_next
    p_dw += tl.program_id(0).to(tl.int64) * D + o_h[:, None] * DH + o_c[None, :]
    for c in tl.static_range(len(dw)):
        tl.store(p_dw + c * CW, tl.sum(dw[c], 0), mask=(o_h < H)[:, None] & (c * CW + o_c < DH)[None, :])

def tiling(D, H, numbers):
    """Constants of a launch on whole rows: about so many numbers a warp, in chunks of 128. (All tiles here as measured on an H200.)"""
    HP, P2 = triton.next_power_of_2(H), triton.next_power_of_2(D // H)
    CW = max(16, P2 // 16, min(P2, 128 * triton.next_power_of_2(triton.cdiv(D, numbers)) // HP))
    CW = max(CW, P2 // 2) if triton.knobs.runtime.interpret else CW     # the interpreter's time goes by operations
    row = HP * CW * triton.cdiv(D // H, CW)                  # numbers, padding included
    return dict(D=D, H=H, DH=D // H, HP=HP, CW=CW, TT=max(1, numbers // triton.next_power_of_2(row)),
                num_warps=min(16, triton.next_power_of_2(triton.cdiv(row, numbers))))

def together(sources):
    """-> what `load_source` reads: up to 16 tensors as a tuple, more in one; and which of them, as bits, are one row [D] expanded."""
    if sources[0].dim() == 4:
        return (sources[0].contiguous(),), 0
    if not 1 < len(sources) <= 16:
        return (torch.stack(sources),), 0
    flat = [s.stride() == (0, 0, 1) for s in sources]
    sources = [s if f else s.contiguous() for s, f in zip(sources, flat)]
    unused = triton.next_power_of_2(len(sources)) - len(sources)     # of few lengths, as each compiles anew
    return (*sources, *sources[:1] * unused), sum(f << n for n, f in enumerate(flat))

def once(backward):
    """Refuses create_graph=True. PyTorch's once_differentiable does not where the incoming gradient is a constant, as that of a sum."""
    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError("the fused reads are once differentiable, and this backward was asked for a graph of its own "
                               "(create_graph=True); kernel='eager', or mhar.route_ref, has one")
        return backward(ctx, *grads)
    return checked

class Route(torch.autograd.Function):
    """w [D] fp32 and the sources, N of [B, T, D] or one [N, B, T, D] -> read [B, T, D]."""

    @staticmethod
    def forward(ctx, w, H, eps, *sources):
        one, D = sources[0], sources[0].size(-1)
        N, BT, k = one.size(0) if one.dim() == 4 else len(sources), one.shape[-3:-1].numel(), dict(tiling(D, H, 1024), maxnreg=128)
        out = one.new_empty(one.shape[-3:])
        x, m = (torch.empty(n, BT, H, device=one.device, dtype=torch.float32) for n in (N, 1))
        if BT:
            with on(one.device):
                read_forward[(triton.cdiv(BT, k["TT"]),)](*together(sources), w, out, x, m, BT, N, eps, **k)
        ctx.save_for_backward(w, x, m, *sources)
        ctx.H, ctx.eps = H, eps
        return out

    @staticmethod
    @once
    def backward(ctx, do):
        w, x, m, *sources = ctx.saved_tensors
        (N, BT, _), k = x.shape, tiling(len(w), ctx.H, 512)
        ds, programs = do.new_empty(N, *do.shape), min(triton.cdiv(BT, k["TT"]), 2048)
        dw = torch.zeros(programs, len(w), device=do.device, dtype=torch.float32)
        if BT:
            with on(do.device):
                read_backward[(programs,)](*together(sources), w, do.contiguous(), x, m, ds, dw, BT, N, ctx.eps, **k)
        return dw.sum(0), None, None, *([ds] if sources[0].dim() == 4 else ds.unbind())

def unsupported(device, dtype):
    """Why the kernels cannot run there, in words, or None if they can."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels take float32, bfloat16 and float16, not {dtype}"
    if device.type == "cuda" and torch.version.hip:
        return "its kernels are tuned for, and only run on, NVIDIA's GPUs"
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
    if len(sources) == 0:
        raise ValueError("a depth read needs at least one source, got none")
    rank, sources = (4, (sources,)) if torch.is_tensor(sources) else (3, tuple(sources))
    if sources[0].dim() != rank:
        raise ValueError(f"sources must be one [N, B, T, D] or a list of [B, T, D], got {tuple(sources[0].shape)}")
    one, D = sources[0], sources[0].size(-1)
    if any(s.shape != one.shape or s.dtype != one.dtype for s in sources):
        raise ValueError(f"sources must agree in shape and dtype, got {sorted({(tuple(s.shape), str(s.dtype)) for s in sources})}")
    if q.shape != (D,) or g.shape != (D,):
        raise ValueError(f"q and g must have shape ({D},), the sources' width; got {tuple(q.shape)} and {tuple(g.shape)}")
    if not isinstance(H, int) or H < 1 or D < 1 or D % H:
        raise ValueError(f"{H} routing heads do not divide the width {D}")
    if len(devices := {t.device for t in (*sources, q, g)}) > 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(map(str, devices))}")
    if reason := unsupported(one.device, one.dtype):
        raise ValueError(f"route cannot run here: {reason}; mhar.route_ref can")
    return Route.apply(q.float() * g.float(), H, float(eps), *sources)

# ---------------------------------------------------------------- the blocked router of the full-depth modes
# Block b is the K sites bK .. bK+K-1. Its old sources, 0 .. bK-1, are b full tiles of K; the others arrive inside it.
# Kernels: tt a tile of tokens, h a head, c a chunk of columns of the head's slice, k a site of the block, n a source. Programs of
# neighbouring heads run together: they read neighbouring memory.
K = 16

@triton.jit
def dot(a, b, F32: tl.constexpr, HALF: tl.constexpr):
    """a b, summed in fp32; the operands in full fp32, or rounded to the sources' half precision."""
    if F32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a.to(HALF), b.to(HALF))

# Scores before the norm, w_h . s_n[h], as their readers want them, one block behind the other: of the block's own sources
# Y [site, source up to it, BT, H]; of its old sources Z [source, H, BT, K]. In backward dx r of one block's sources, as Z: at its own
# sites (j = 0), then at those of the j-th block after it.
@triton.jit
def own(p_y, block, site, n, BT, H: tl.constexpr, K: tl.constexpr):
    return p_y + (block * (K * (K + 1) // 2) + site * (site + 1) // 2 + n).to(tl.int64) * BT * H

@triton.jit
def old(p_z, block, BT, H: tl.constexpr, K: tl.constexpr):
    return p_z + (K * (block * (block - 1) // 2)).to(tl.int64) * H * BT * K

@triton.jit
def entry(n, h, t, o_k, BT, H: tl.constexpr, K: tl.constexpr):
    """Where the scores of source n stand in Z, for sources or tokens by sites; in dx r n is K j + the source's place in its block."""
    return ((n.to(tl.int64) * H + h) * BT + t)[:, None] * K + o_k[None, :]

@triton.jit(do_not_specialize=INTS)
def score_kernel(p_s, p_y, p_w, p_low, BT, n, top, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr, C: tl.constexpr,
                 K: tl.constexpr, TT: tl.constexpr, F32: tl.constexpr, OWN: tl.constexpr):
    """OWN: Y, the scores of source n = s for its own block. Else Z, those of sources n .. n+K-1 of s = V for later blocks."""
    o_t, o_k, h = (tl.program_id(0) // H).to(tl.int64) * TT + tl.arange(0, TT), tl.arange(0, K), tl.program_id(0) % H
    m_t, y = o_t < BT, tl.zeros([TT, K], tl.float32)
    if OWN:
        block, row = n // K, o_t
    else:
        n += tl.program_id(1)
        block, row = n // K + 1 + tl.program_id(2), n * BT.to(tl.int64) + o_t
    for c in range(0, DH, C):
        o_c = c + tl.arange(0, C)
        m_c = o_c < DH
        o, mask = row[:, None] * D + h * DH + o_c[None, :], m_t[:, None] & m_c[None, :]
        b_s = tl.load(p_s + o, mask=mask, other=0.0)                                                                   # [TT, C]
        o_w = (block * K + o_k)[None, :] * D + h * DH + o_c[:, None]                                                   # [C, K]
        b_w = tl.load(p_w + o_w, mask=m_c[:, None], other=0.0)
        if F32:                                              # a sum of sums: added, the compiler would make it one long chain
            y -= dot(b_s, -b_w, F32, p_s.dtype.element_ty)
        else:                                                # the low bits of w matter: a second product for them
            y += dot(b_s, b_w, F32, p_s.dtype.element_ty)
            y += dot(b_s, tl.load(p_low + o_w, mask=m_c[:, None], other=0.0), F32, p_s.dtype.element_ty)
    if OWN:
        m_k = (o_k >= n % K) & (block * K + o_k <= top)
        p_yk = own(p_y, block, o_k, n % K, BT, H, K)[None, :] + o_t[:, None] * H + h
        tl.store(p_yk, y, mask=m_t[:, None] & m_k[None, :])
    else:
        tl.store(old(p_y, block, BT, H, K) + entry(n, h, o_t, o_k, BT, H, K), y, mask=m_t[:, None])

@triton.jit(do_not_specialize=INTS)
def block_read_kernel(p_v, p_r, p_z, p_part, p_m, p_l, BT, block, k_end, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr,
                      C: tl.constexpr, K: tl.constexpr, F32: tl.constexpr):
    """The K sites' mixes of the old sources, one token and head a program: flash-attention over depth, sites as queries."""
    t, h, o_k = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, tl.arange(0, K)
    o_c = tl.program_id(1) * C + tl.arange(0, C)
    m, l = tl.full([K], float("-inf"), tl.float32), tl.zeros([K], tl.float32)  # noqa: E741
    acc = tl.zeros([K, C], tl.float32)
    for tile in range(block):
        n = tile * K + o_k                                                                                             # [K] sources
        o_n = n.to(tl.int64) * BT + t
        x = tl.load(old(p_z, block, BT, H, K) + entry(n, h, t, o_k, BT, H, K)) * tl.load(p_r + o_n)[:, None]           # [sources, sites]
        b_v = tl.load(p_v + o_n[:, None] * D + h * DH + o_c[None, :], mask=(o_c < DH)[None, :], other=0.0)             # [K, C]
        m_new = tl.maximum(m, tl.max(x, 0))
        scale, p = tl.exp(m - m_new), tl.exp(x - m_new[None, :])                                                       # [K], [K, K]
        l, m = l * scale + tl.sum(p, 0), m_new  # noqa: E741
        acc = acc * scale[:, None] + dot(tl.trans(p), b_v, F32, p_v.dtype.element_ty)
    part, m_k = (acc / l[:, None]).to(p_part.dtype.element_ty), o_k < k_end
    tl.store(p_part + (o_k.to(tl.int64) * BT + t)[:, None] * D + h * DH + o_c[None, :], part, mask=m_k[:, None] & (o_c < DH)[None, :])
    first = o_k + K * tl.program_id(1) < k_end               # one of the chunks
    o = (o_k.to(tl.int64) * BT + t) * H + h
    tl.store(p_m + o, m, mask=first)
    tl.store(p_l + o, l, mask=first)

@triton.jit(do_not_specialize=INTS)
def site_read_kernel(p_s, p_v, p_r, p_y, p_part, p_m0, p_l0, p_out, p_stat, BT, block, k, eps, D: tl.constexpr, H: tl.constexpr,
                     DH: tl.constexpr, HP: tl.constexpr, CW: tl.constexpr, K: tl.constexpr, TT: tl.constexpr):
    """Site k of the block: its newest source, whose R comes first, its share of the block read, then the k sources between."""
    o_t, o_h, o_c = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT), tl.arange(0, HP), tl.arange(0, CW)
    m_t, m_h, rows, first = o_t < BT, o_h < H, BT.to(tl.int64), block * K
    m_th, mask = m_t[:, None] & m_h[None, :], m_t[:, None, None] & m_h[None, :, None] & (o_c < DH)[None, None, :]
    o, o_th = o_t[:, None, None] * D + o_h[None, :, None] * DH + o_c[None, None, :], o_t[:, None] * H + o_h[None, :]
    b_s = load_row(p_s + o, mask, DH, CW)                                                                              # [TT, HP, CW]
    r = inverse_root(tl.sum(inner(b_s, b_s), 1) / D + eps)                                                             # [TT]
    tl.store(p_r + (first + k) * rows + o_t, r, mask=m_t)
    # not where s is scored: to a tile both stored and multiplied Triton (3.6, 3.9) gives a buffer less than its pipeline uses, a race
    store_row(p_v + (first + k) * rows * D + o, b_s, mask, DH, CW)
    p_yn = own(p_y, block, k, 0, BT, H, K) + o_th
    m = tl.load(p_yn + k * rows * H, mask=m_th, other=0.0) * r[:, None]                                                # [TT, HP]
    l = tl.full([TT, HP], 1.0, tl.float32)  # noqa: E741
    acc = times(b_s, l)
    if block > 0:
        m0, l0 = tl.load(p_m0 + o_th, mask=m_th, other=0.0), tl.load(p_l0 + o_th, mask=m_th, other=1.0)
        m_new = tl.maximum(m, m0)
        scale, p = tl.exp(m - m_new), tl.exp(m0 - m_new) * l0
        l, m = scale + p, m_new  # noqa: E741
        acc = add(times(acc, scale), p, load_row(p_part + o, mask, DH, CW))
    p_vn, p_rn = p_v + first * rows * D + o, p_r + first * rows + o_t
    for _ in range(k):
        x = tl.load(p_yn, mask=m_th, other=0.0) * tl.load(p_rn, mask=m_t, other=0.0)[:, None]
        m_new = tl.maximum(m, x)
        scale, p = tl.exp(m - m_new), tl.exp(x - m_new)
        l, m = l * scale + p, m_new  # noqa: E741
        acc = add(times(acc, scale), p, load_row(p_vn, mask, DH, CW))
        p_vn += rows * D
        p_yn += rows * H
        p_rn += rows
    store_row(p_out + o, times(acc, 1.0 / l), mask, DH, CW)
    p_statk = p_stat + o_t[:, None] * 3 * H + o_h[None, :]
    tl.store(p_statk, m, mask=m_th)
    tl.store(p_statk + H, 1.0 / l, mask=m_th)

@triton.jit(do_not_specialize=INTS)
def gather_kernel(p_grad, p_out, p_v, p_r, p_y, p_dx, p_w, p_do, p_stat, p_acc, p_c, p_ds, BT, block, k, k_end, D: tl.constexpr,
                  H: tl.constexpr, DH: tl.constexpr, HP: tl.constexpr, CW: tl.constexpr, K: tl.constexpr, TT: tl.constexpr,
                  PULLED: tl.constexpr):
    """
    Site k of the block gets its gradient: keeps it and D_h = do_h . out_h. That completes the gradient of source bK+k, from the sites
    k .. k_end-1 of its own block, and what was pulled from later blocks. The dx r are what dw needs.
    """
    o_t, o_h, o_c = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT), tl.arange(0, HP), tl.arange(0, CW)
    m_t, m_h, rows, n = o_t < BT, o_h < H, BT.to(tl.int64), block * K + k
    m_th, mask = m_t[:, None] & m_h[None, :], m_t[:, None, None] & m_h[None, :, None] & (o_c < DH)[None, None, :]
    o, o_th = o_t[:, None, None] * D + o_h[None, :, None] * DH + o_c[None, None, :], o_t[:, None] * H + o_h[None, :]
    b_v, b_do = load_row(p_v + n * rows * D + o, mask, DH, CW), load_row(p_grad + o, mask, DH, CW)                     # [TT, HP, CW]
    store_row(p_do + n * rows * D + o, b_do, mask, DH, CW)
    delta = inner(b_do, load_row(p_out + o, mask, DH, CW))                                                             # [TT, HP]
    p_statj = p_stat + n * rows * 3 * H + o_t[:, None] * 3 * H + o_h[None, :]
    tl.store(p_statj + 2 * H, delta, mask=m_th)
    r = tl.load(p_r + n * rows + o_t, mask=m_t, other=0.0)[:, None]
    zero, o_k = tl.zeros([TT, HP], tl.float32), tl.arange(0, K)
    ds, c, rdx = times(b_v, zero), zero, tl.zeros([TT, HP, K], tl.float32)
    p_doj, p_wj, p_yj = p_do + n * rows * D + o, p_w + n * D + o - (o_t * D)[:, None, None], own(p_y, block, k, k, BT, H, K) + o_th
    for j in range(k, k_end):
        m, inv = tl.load(p_statj, mask=m_th, other=0.0), tl.load(p_statj + H, mask=m_th, other=0.0)
        p_statj += rows * 3 * H
        p_doj += rows * D
        delta_next, b_next = tl.load(p_statj + 2 * H, mask=m_th, other=0.0), load_row(p_doj, mask, DH, CW)  # of site j+1, in advance
        x = tl.load(p_yj, mask=m_th, other=0.0) * r
        a = tl.exp(x - m) * inv
        dx = a * (inner(b_do, b_v) - delta)
        dx = tl.where(block * K + j > 0, dx, 0.0)            # site 0 has one source: no gradient, not even a rounding error
        c += dx * x
        dx *= r
        rdx = tl.where((o_k == j)[None, None, :], dx[:, :, None], rdx)
        ds = add(add(ds, a, b_do), dx, load_row(p_wj, mask, DH, CW))
        b_do, delta = b_next, delta_next
        p_yj += (j + 1) * rows * H
        p_wj += D
    p_dxn = p_dx + ((k.to(tl.int64) * H + o_h)[None, :] * rows + o_t[:, None])[:, :, None] * K + o_k[None, None, :]
    tl.store(p_dxn, rdx.to(p_dx.dtype.element_ty), mask=m_th[:, :, None])
    if PULLED:
        p_accn = p_acc - block * K * rows * D + n * rows * D + o                    # row k, by an address that is there already: 8 %
        ds = add(load_row(p_accn, mask, DH, CW), zero + 1.0, ds)
        c += tl.load(p_c + k * rows * H + o_th, mask=m_th, other=0.0)
    store_row(p_ds + o, add(ds, zero - tl.sum(c, 1)[:, None] * r * r / D, b_v), mask, DH, CW)

@triton.jit(do_not_specialize=INTS)
def pull_kernel(p_v, p_r, p_z, p_dx, p_w, p_do, p_stat, p_acc, p_c, BT, block, top, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr,
                C: tl.constexpr, CHUNKS: tl.constexpr, SHARES: tl.constexpr, K: tl.constexpr, F32: tl.constexpr):
    """The block's K sources, from all sites of later blocks, K at a time: what gather does for one source and the sites of its block."""
    # neighbours have a share of the head's columns each, and the first of them keeps dx and c
    share, h, t = tl.program_id(0) % SHARES, tl.program_id(0) // SHARES % H, (tl.program_id(0) // SHARES // H).to(tl.int64)
    first, o_c, o_k = share * CHUNKS * C, tl.arange(0, C), tl.arange(0, K)
    n, once = block * K + o_k, o_k + K * share < K
    o_n = n.to(tl.int64) * BT + t
    r, cx, acc = tl.load(p_r + o_n)[:, None], tl.zeros([K], tl.float32), ()
    for _ in tl.static_range(CHUNKS):
        acc = acc + (tl.zeros([K, C], tl.float32),)
    for j in range(1, top // K - block + 1):                # blocks after this one
        i = (block + j) * K + o_k                                                                                  # [K] sites
        m_k, o_i = i <= top, i.to(tl.int64) * BT + t
        p_stati, p_doi = p_stat + o_i * 3 * H + h, p_do + o_i * D + h * DH
        m, inv = tl.load(p_stati, mask=m_k, other=0.0)[None, :], tl.load(p_stati + H, mask=m_k, other=0.0)[None, :]
        P, delta, dos = tl.zeros([K, K], tl.float32), tl.load(p_stati + 2 * H, mask=m_k, other=0.0)[None, :], ()       # P [sources, sites]
        for c in tl.static_range(CHUNKS):
            o = first + c * C + o_c[None, :]
            dos = dos + (tl.load(p_doi[:, None] + o, mask=m_k[:, None] & (o < DH), other=0.0),)                        # [K, C]
            if SHARES == 1:
                b_v = tl.load(p_v + o_n[:, None] * D + h * DH + o, mask=o < DH, other=0.0)
                P += dot(b_v, tl.trans(dos[c]), F32, p_v.dtype.element_ty)
        if SHARES > 1:                                       # P takes all columns of the head
            for c in range(0, DH, C):
                o = c + o_c[None, :]
                b_v = tl.load(p_v + o_n[:, None] * D + h * DH + o, mask=o < DH, other=0.0)
                b_do = tl.load(p_doi[:, None] + o, mask=m_k[:, None] & (o < DH), other=0.0)
                P += dot(b_v, tl.trans(b_do), F32, p_v.dtype.element_ty)
        x = tl.load(old(p_z, block + j, BT, H, K) + entry(n, h, t, o_k, BT, H, K)) * r
        a = tl.where(m_k[None, :], tl.exp(x - m) * inv, 0.0)
        dx = tl.where(m_k[None, :] & (a != 1.0), a * (P - delta), 0.0)       # read alone: P = D, but rounded otherwise
        cx += tl.sum(tl.where(m_k[None, :], dx * x, 0.0), 1)
        dx *= r
        p_dxi = p_dx + entry(j * K + o_k, h, t, o_k, BT, H, K)
        tl.store(p_dxi, dx.to(p_dx.dtype.element_ty), mask=once[:, None])
        pulled = ()
        for c in tl.static_range(CHUNKS):
            o = first + c * C + o_c[None, :]
            b_w = tl.load(p_w + i[:, None] * D + h * DH + o, mask=o < DH, other=0.0)
            pulled = pulled + (acc[c] + dot(a, dos[c], F32, p_v.dtype.element_ty) + dot(dx, b_w, F32, p_v.dtype.element_ty),)
        acc = pulled
    o_n = o_k.to(tl.int64) * BT + t
    tl.store(p_c + o_n * H + h, cx, mask=once)
    for c in tl.static_range(CHUNKS):
        o = first + c * C + o_c[None, :]
        tl.store(p_acc + o_n[:, None] * D + h * DH + o, acc[c], mask=o < DH)

@triton.jit(do_not_specialize=INTS)
def query_kernel(p_v, p_dx, p_dw, BT, block, top, D: tl.constexpr, H: tl.constexpr, DH: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                 TT: tl.constexpr, F32: tl.constexpr):
    """dw_i[h] = sum_{n, t} (dx r) s_n[h] over the block's sources, for its own sites or those of a later block; a partial sum a program."""
    blocks = top // K - block + 1                            # this one, j = 0, and those after it
    j, part, parts = tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    o_k, h, rows = tl.arange(0, K), tl.program_id(1), BT.to(tl.int64)
    o_c = tl.program_id(2) * C + tl.arange(0, C)
    acc = tl.zeros([K, C], tl.float32)
    for tile in range(part, tl.cdiv(BT, TT), parts):
        o_t = tile * TT + tl.arange(0, TT).to(tl.int64)
        m_t = o_t < BT
        mask, p_vn = m_t[:, None] & (o_c < DH)[None, :], p_v + (block * K * rows + o_t)[:, None] * D + h * DH + o_c[None, :]
        p_dxn = p_dx + (j.to(tl.int64) * K * H + h) * rows * K + o_k[:, None] + o_t[None, :] * K
        for _ in range(tl.minimum(K, top + 1 - block * K)):
            b_x = tl.load(p_dxn, mask=m_t[None, :], other=0.0)                                                         # [K, TT]
            acc += dot(b_x, tl.load(p_vn, mask=mask, other=0.0), F32, p_v.dtype.element_ty)
            p_dxn += rows * H * K
            p_vn += rows * D
    o = ((part * blocks + j) * K + o_k)[:, None] * D + h * DH + o_c[None, :]
    tl.store(p_dw + o, acc, mask=(o_c < DH)[None, :])

class History:
    """The state of one forward: sources V, their R, scores Y and Z, softmax statistics; and later that of its backward."""

    def __init__(self, s, w, H, eps):
        (S, D), BT, new = w.shape, s[..., 0].numel(), functools.partial(torch.empty, device=s.device, dtype=torch.float32)
        self.S, self.D, self.H, self.BT, self.eps, self.shape, blocks = S, D, H, BT, eps, s.shape[:-1], -(-S // K)
        F32 = s.dtype == torch.float32 or triton.knobs.runtime.interpret     # (the interpreter's bf16 products are unreliable)
        w = torch.nn.functional.pad(w.detach(), (0, 0, 0, blocks * K - S)).contiguous()
        self.w = w if F32 else w.to(s.dtype)
        self.low = w if F32 else (w - self.w).to(s.dtype)
        last = S - K * (blocks - 1)                          # sites of the last block
        self.v, self.r, self.z = new(S, BT, D, dtype=s.dtype), new(S, BT), None
        self.y = new((blocks - 1) * K * (K + 1) // 2 + last * (last + 1) // 2, BT, H)
        self.stat = new(S + 1, BT, 3, H)                     # of a site: m, max of its scores; 1 / sum of exp(x - m); in backward D_h
        self.part, self.m0, self.l0 = new(K, BT, D, dtype=s.dtype), new(K, BT, H), new(K, BT, H)
        self.begun, self.top = False, None                   # backward; the last site whose gradient arrived
        DH, self.dtype = D // H, s.dtype
        rows, base, P2 = dict(tiling(D, H, 1024), K=K), dict(D=D, H=H, DH=DH, K=K), triton.next_power_of_2(DH)
        self.site_read = dict(rows, TT=max(1, rows["TT"] // 2))
        self.gather = dict(rows, maxnreg=168 if rows["TT"] > 1 else 128)
        C = min(128, max(16, P2))
        self.score = dict(base, C=min(C, 128 if DH >= 512 and not F32 else 64), TT=64, F32=F32, num_warps=4)
        self.query = dict(base, C=min(C, 64), TT=64 if F32 or D % 8 else 128, F32=F32, num_warps=2)       # by registers
        self.block_read = dict(base, C=C, F32=F32, num_warps=1)
        C = min(C, 32 if 0 < DH % 64 <= 32 else 64 if 0 < DH % 128 <= 64 else 128)         # 160 = 5 x 32
        chunks = triton.cdiv(DH, C)
        chunks = triton.cdiv(chunks, triton.cdiv(chunks * C, 640))          # more columns are more than a program's registers hold
        shares = triton.cdiv(DH, chunks * C)
        self.pull = dict(base, C=C, CHUNKS=chunks, SHARES=shares, F32=F32, num_stages=1 if F32 else 3 if shares > 1 else 2,
                         num_warps=min(8 if F32 else 4, max(1, triton.next_power_of_2(chunks * C) // (32 if F32 else 128))))

    def score_later(self, block, top):
        """Z, of the block's sources, for the sites of later blocks up to site top. Made anew in backward: not kept through the loss."""
        if self.z is None:
            self.z = torch.empty(K * (top // K) * (top // K + 1) // 2, self.H, self.BT, K, device=self.v.device, dtype=torch.float32)
        grid = (triton.cdiv(self.BT, self.score["TT"]) * self.H, K, top // K - block)
        score_kernel[grid](self.v, self.z, self.w, self.low, self.BT, block * K, top, OWN=False, **self.score)

    def read(self, s, i):
        """Appends source i and returns the read of site i, [BT, D]."""
        BT, H, block, k, top, out = self.BT, self.H, i // K, i % K, self.S - 1, torch.empty_like(s)
        tiles = triton.cdiv(BT, self.score["TT"]) * H
        score_kernel[tiles,](s, self.y, self.w, self.low, BT, i, top, OWN=True, **self.score)
        if k == 0 and block:
            self.score_later(block - 1, top)
            grid = (BT * H, triton.cdiv(self.D // H, self.block_read["C"]))
            block_read_kernel[grid](self.v, self.r, self.z, self.part, self.m0, self.l0, BT, block, min(K, self.S - i), **self.block_read)
        grid = (triton.cdiv(BT, self.site_read["TT"]),)
        site_read_kernel[grid](s, self.v, self.r, self.y, self.part[k], self.m0[k], self.l0[k], out, self.stat[i], BT, block, k, self.eps,
                               **self.site_read)
        if i == top:
            self.part = self.m0 = self.l0 = self.z = None    # freed before the loss needs the most memory
        return out

    def read_backward(self, do, out, i, done):
        """The gradient of site i's read -> that of source i, whole; dw [S, D] grows with each block's first site. done: none is left."""
        BT, D, H, block, k = self.BT, self.D, self.H, i // K, i % K
        new = functools.partial(torch.empty, device=self.v.device, dtype=torch.float32)
        if self.top is None:
            self.top = i
            self.acc, self.c = (new(K if block else 0, BT, n) for n in (D, H))
            self.do = new(i + 2, BT, D, dtype=self.dtype)    # gather reads one ahead
            self.dx, self.dw = new((block + 1) * K, H, BT, K, dtype=self.w.dtype), torch.zeros_like(self.w, dtype=torch.float32)
        last, blocks, ds = min(self.top - block * K, K - 1), self.top // K - block + 1, torch.empty_like(out)  # blocks: this one and later
        state = (self.dx, self.w, self.do, self.stat, self.acc, self.c)
        if k == last and blocks > 1:
            self.score_later(block, self.top)
            pull_kernel[BT * H * self.pull["SHARES"],](self.v, self.r, self.z, *state, BT, block, self.top, **self.pull)
        grid = (triton.cdiv(BT, self.gather["TT"]),)
        gather_kernel[grid](do, out, self.v, self.r, self.y, *state, ds, BT, block, k, last + 1, PULLED=blocks > 1, **self.gather)
        if k == 0:
            chunks, tiles = triton.cdiv(D // H, self.query["C"]), triton.cdiv(BT, self.query["TT"])
            parts = new(min(tiles, max(1, 384 // (H * chunks * blocks))), blocks * K, D)
            query_kernel[len(parts) * blocks, H, chunks](self.v, self.dx, parts, BT, block, self.top, **self.query)
            self.dw[block * K:(block + blocks) * K] += parts.sum(0)
        dw = self.dw[:self.S] if i == 0 else None
        if done:                                             # though the loss may keep the graph
            vars(self).update(dict.fromkeys("v r y z w low stat part m0 l0 do acc c dx dw".split()))
        return ds, dw

class BlockedRead(torch.autograd.Function):
    """
    Site i. Autograd sees source i, w at site 0, which backward visits last, and a token that chains the sites, so that it visits them
    last to first; all else is in the History.
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
    @once
    def backward(ctx, do, token):
        history = ctx.history
        history.begun = True                                 # no read after this, also when the pass is over
        out, = ctx.saved_tensors
        if (history.top is None) != (token is None) or history.top is not None and ctx.i >= history.top:
            raise RuntimeError("a backward has already gone through this forward's fused reads; a second one needs "
                               "kernel='eager', or mhar.route_ref")
        with on(out.device):
            do = torch.zeros_like(out) if do is None else do.contiguous()
            chained = ctx.needs_input_grad[1]                # to an earlier site, whose backward follows
            ds, dw = history.read_backward(do, out, ctx.i, not chained)
        return ds, out.new_empty(0) if chained else None, dw, None, None

@torch.compiler.disable
def backward_pass():
    """Which backward pass is running in this thread, -1 for none: checkpointing makes reads again in one."""
    return torch._C._current_graph_task_id()

def blocked_router(q, g, H, eps=1e-6):
    """
    The reads of a whole forward, for attnres and mhar: q, g [sites, D] -> step, where the i-th call step(s_i [B, T, D]) returns
    the read of site i over sources 0 .. i. Same values as `route`, each source scored once and K sites to one read of the old ones.
    One backward per forward, and neither a read nor a source may be changed in place. Raises ValueError, with the numbers, for
    shapes, dtypes (under autocast: cast the first source) or devices that do not fit.
    """
    if q.dim() != 2 or q.shape != g.shape or not isinstance(H, int) or H < 1 or q.size(1) < 1 or q.size(1) % H:
        raise ValueError(f"q and g must be [sites, D] with D a multiple of H = {H}; got {tuple(q.shape)} and {tuple(g.shape)}")
    if q.device != g.device:
        raise ValueError(f"q and g must be on one device, got {q.device} and {g.device}")
    w, history, token, i = q.float() * g.float(), None, None, 0
    tracked, made_in = torch.is_grad_enabled(), backward_pass()

    @torch.compiler.disable
    def step(s):
        nonlocal history, token, i
        if history and history.begun or backward_pass() != made_in:         # over, or under way: checkpointing makes a read again
            raise RuntimeError("this forward's backward has begun: no reads now, nor one again (checkpoint whole forwards, or use `route`)")
        if reason := unsupported(s.device, s.dtype):
            raise ValueError(f"the router cannot run here: {reason}; mhar.route_ref can")
        want = (*(history.shape if history else s.shape[:-1]), q.size(1)), q.device, history.dtype if history else s.dtype
        if i == len(q):
            raise ValueError(f"this router has {i} reads, one for each row of q, and all were made; a forward starts with a new router")
        if (s.shape, s.device, s.dtype) != want:
            raise ValueError(f"source {i} of {len(q)} is {tuple(s.shape)}, {s.device}, {s.dtype}; expected {want}")
        if torch.is_grad_enabled() != tracked:
            raise RuntimeError(f"read {i} runs with{'out' * tracked} gradient, the router was made with{'out' * (not tracked)}")
        history = history or History(s, w, H, float(eps))
        out, token = BlockedRead.apply(s, token, None if i else w, history, i)
        i += 1
        return out
    return step

# ---------------------------------------------------------------- python route_kernel.py: first parity, then what it costs
def run_reads(router, sources, q, g, dos):
    """All reads of a forward and their backward, by router(q, g) -> step. Returns the outputs, and the leaves with their gradients."""
    sources, q, g = [s.detach().requires_grad_() for s in sources], q.detach().requires_grad_(), g.detach().requires_grad_()
    step = router(q, g)
    outs = [step(s) for s in sources]
    torch.autograd.backward(outs, dos)
    return outs, sources, q, g

def every_read(*args):
    """-> outputs [S, B, T, D], gradients of the sources, of q and of g"""
    outs, sources, q, g = run_reads(*args)
    return torch.stack(outs).detach(), torch.stack([s.grad for s in sources]), q.grad, g.grad

def site_by_site(read, H):
    """A router that calls read(sources, q_i, g_i, H) at each site, as mhar.route_ref."""
    def router(q, g):
        sources = []

        def step(s):
            sources.append(s)
            return read(sources, q[len(sources) - 1], g[len(sources) - 1], H)
        return step
    return router

def half_products(sources, q, g, H, eps=1e-6):
    """The read as half-precision models write it: norm and products in the sources' dtype, softmax in fp32."""
    s = torch.stack(tuple(sources))
    k = torch.nn.functional.rms_norm(s, s.shape[-1:], g, eps).unflatten(-1, (H, -1))
    a = torch.einsum("nbthd,hd->nbth", k, q.view(H, -1)).float().softmax(0).to(s.dtype)
    return torch.einsum("nbth,nbthd->bthd", a, s.unflatten(-1, (H, -1))).flatten(-2)

def inputs(S, T, D, H, dtype, device, seed=0):
    """Random sources and gradients, S of [1, T, D]; q [S, D] for logits of standard deviation 2, and g."""
    rng = torch.Generator(device).manual_seed(seed)
    sources, dos, q, g = (torch.randn(*z, generator=rng, device=device) for z in ((S, 1, T, D), (S, 1, T, D), (S, D), (S, D)))
    return sources.to(dtype).unbind(), (q * 2 * (H / D) ** 0.5).to(dtype), (1 + 0.1 * g).to(dtype), dos.to(dtype).unbind()

def relative(x, y):
    """|x - y| / |y|; where y is exactly zero so must x be."""
    return ((x.double() - y).norm() / y.norm()).item() if y.any() else float("inf") if x.any() else 0.0

def parity(case, checked=("route", "blocked")):
    """
    (S, T, D, H, dtype, device) -> errors against route_ref in fp64 and their limits, one [output, sources, q, g] a way of reading. Limits:
    fp32 1e-6 and 5e-6 or twice route_ref's own error; else 1.5 times that of half_products, for route's output of route_ref's.
    """
    from mhar import route_ref
    S, T, D, H, dtype, device = case
    few = device == "cuda" and dtype != torch.float32       # the errors of few numbers scatter: of several draws together, then
    draws = [inputs(*case, seed) for seed in range(max(1, 1024 // (S * D)) if few else 1)]
    wide = [[[t.double() for t in z] if isinstance(z, tuple) else z.double() for z in draw] for draw in draws]

    def read_all(router, draws=draws):
        return [torch.cat(z) for z in zip(*(every_read(router, *draw) for draw in draws))]
    truth, errors = read_all(site_by_site(route_ref, H), wide), {}
    ways = dict(eager=site_by_site(route_ref, H), half=site_by_site(half_products, H), route=site_by_site(route, H),
                blocked=lambda q, g: blocked_router(q, g, H))
    for way, router in ((w, ways[w]) for w in ("eager", *checked, *["half"] * (dtype != torch.float32))):
        got = read_all(router)
        errors[way] = [relative(x, y) for x, y in zip(got, truth)]
        again = read_all(router) if way in checked and (device == "cuda" or S * D < 200) else got     # slow on a CPU
        if not all(map(torch.equal, got, again)):
            errors[way][0] = float("inf")                   # two runs differ
    if dtype == torch.float32:
        limits = {w: [max(z, 2 * e) for z, e in zip((1e-6, 5e-6, 5e-6, 5e-6), errors["eager"])] for w in checked}
    else:
        limits = {w: [1.5 * e for e in (errors["eager" if w == "route" else "half"][0], *errors["half"][1:])] for w in checked}
    return errors, limits

def check(cases, workers):
    """Prints parity case by case, only the failures and the worst if there are many. Returns the number of failures."""
    import concurrent.futures
    import multiprocessing
    failed, worst = 0, {}
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:       # compiling takes cores
        for i, (case, (errors, limits)) in enumerate(zip(cases, pool.map(parity, cases))):
            S, T, D, H, dtype, _ = case
            bad = [way for way in limits if not all(e <= z for e, z in zip(errors[way], limits[way]))]
            failed += bool(bad)
            for way in errors:
                worst[dtype, way] = [max(z) for z in zip(errors[way], worst.get((dtype, way), errors[way]))]
            if bad or len(cases) < 30:
                print(f"S {S:2} T {T} D {D:5} H {H:2} {str(dtype)[6:]:8} {'FAILED ' + ', '.join(bad) if bad else 'ok':8}", *(
                    f"{way} {' '.join(f'{e:.1e}' for e in errors[way])}" for way in errors), flush=True)
            elif i % 50 == 49:
                print(f"{i + 1}/{len(cases)} cases", flush=True)
    print(f"\n{len(cases)} cases, {failed} failed. Largest relative errors against fp64: output, sources, q, g")
    for (dtype, way), e in worst.items():
        print(f"{str(dtype)[6:]:9} {way:8} {' '.join(f'{z:.1e}' for z in e)}")
    return failed

def moved(S, BT, D, H):
    """Bytes that the blocked router must move for bf16 sources, each counted once a kernel, as the header's table."""
    row, rows, y, z, top = 2 * BT * D, 0, 0, 0, (S - 1) // K
    for i in range(S):
        b, k = i // K, i % K
        later = min(S - 1 - b * K, K - 1) - k
        rows += 1 + 2 * (b < top) + (k + 3 + (b > 0)) + (later + 5 + 2 * (b < top))      # score; site read; gather, fp32 sums
        y, z = y + k + 1, z + K * (top - b)
        if k == 0:                                          # block read; pull, which writes fp32 sums; query
            rows += (b * K + min(K, S - i)) * (b > 0) + (3 * K + S - (b + 1) * K) * (b < top) + min(K, S - i)
    return rows * row + BT * H * (12 * y + 16 * z + 4 * (S * K + z))  # fp32: Y written once, Z twice, both read twice; dx in bf16

def milliseconds(f, captured=True, repeats=10):
    """Median time of f on the GPU, replayed as a CUDA graph or called, and the memory it adds at its peak, in bytes."""
    f()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    f()
    peak, run, times = torch.cuda.max_memory_allocated() - held, f, []
    if captured:
        torch.cuda.empty_cache()                             # a graph has memory of its own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            f()
        run = graph.replay
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2], peak

def breakdown(f):
    """-> f's GPU time kernel by kernel, in ms, in words, the longest first"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        f()
        torch.cuda.synchronize()
    times = {}
    for e in profile.key_averages():
        name = e.key.removesuffix("_kernel").replace("_", " ") if e.key.endswith("_kernel") else "others"
        times[name] = times.get(name, 0) + e.self_device_time_total / 1e3
    return ", ".join(f"{name} {ms:.2f}" for name, ms in sorted(times.items(), key=lambda z: -z[1]))

SIZES = {"100m": (25, 16384, 512), "350m": (49, 4096, 1024), "1b": (73, 2048, 1280)}     # sources, tokens of a microbatch, D

def cost(scales, only):
    """Prints GPU time of all reads of a microbatch, forward and backward, at the paper's sizes, beside the machine's two ceilings."""
    from importlib.metadata import version
    from mhar import route_ref
    x, m = torch.empty(2, 2**32, dtype=torch.uint8, device="cuda"), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    copy = 2**33 / milliseconds(lambda: x[0].copy_(x[1]), captured=False)[0] / 1e9
    matmul = 2 * 8192**3 / milliseconds(lambda: m @ m)[0] / 1e9
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}; copy {copy:.2f} TB/s, bf16 matmul "
          f"{matmul:.0f} TFLOP/s\n{'scale':6}{'H':>3}  {'reads':34}{'ms':>8}{'peak GiB':>9}{'GB moved':>10}{'TB/s':>7}", flush=True)
    for scale in scales:
        S, T, D = SIZES[scale]
        for H in (8, 1, 4, 16):
            ways = {"ours, blocked": lambda q, g: blocked_router(q, g, H), "ours, site by site": site_by_site(route, H)}      # noqa: B023
            if H == 8:
                compiled = torch.compile(lambda s, *args: route_ref(s, *args), dynamic=True)
                ways["PyTorch, compiled reads"] = site_by_site(lambda s, *args: compiled(torch.stack(s), *args), H)         # noqa: B023
                ways["PyTorch, eager"] = site_by_site(route_ref, H)
            if H == 1:
                with contextlib.suppress(ImportError):
                    from fla.ops.attnres import fused_attnres
                    ways[f"fla-core {version('fla-core')}"] = site_by_site(lambda s, q, g, H: fused_attnres(q, s, g), H)
                with contextlib.suppress(ImportError):
                    from liger_kernel.ops.attn_res import LigerAttnResFunction
                    ways[f"liger-kernel {version('liger-kernel')}"] = site_by_site(
                        lambda s, q, g, H: LigerAttnResFunction.apply(torch.stack(s), q, g, 1e-6), H)
            for way, router in ways.items():
                if only and way not in only or way == "ours, site by site" and H not in (1, 8):
                    continue
                reads = functools.partial(run_reads, router, *inputs(S, T, D, H, torch.bfloat16, "cuda"))
                try:
                    try:
                        ms, peak = milliseconds(reads)
                    except RuntimeError:                    # it cannot be captured
                        (ms, peak), way = milliseconds(reads, captured=False), way + ", launched"
                    gb = moved(S, T, D, H) / 1e9
                    bytes_ = f"{gb:10.1f}{gb / ms:7.2f}" if way == "ours, blocked" else ""
                    print(f"{scale:6}{H:3}  {way:34}{ms:8.2f}{peak / 2**30:9.2f}{bytes_}", flush=True)
                    if way == "ours, blocked" and H in (8, 16):
                        print(f"{'':11}of it {breakdown(reads)}", flush=True)
                except Exception as e:                      # one package's failure is a row of its own
                    print(f"{scale:6}{H:3}  {way:34}  {type(e).__name__}: {str(e)[:80]}", flush=True)
                torch.cuda.empty_cache()

def main():
    """Parity, on a CPU in Triton's interpreter and smaller; then, on a GPU, the cost."""
    import argparse
    import os
    import sys
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--scale", nargs="+", choices=SIZES, help="the cost at these scales, no parity")
    parser.add_argument("--blocked", action="store_true", help="the cost of the blocked router, no parity")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtypes, workers = "cuda" if cuda else "cpu", (torch.float32, torch.bfloat16), min(16, os.cpu_count())
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"                # for the processes that the pool starts
        cases = [(S, 2, D, H, torch.float32, device) for D, H in ((64, 4), (33, 3), (160, 1)) for S in (1, 2, 18)]  # its bf16 rounds down
    else:
        cases = [(S, max(64, min(2048, 2**20 // (H * DH))) if S < 8 else 3, H * DH, H, dt, device) for dt in dtypes     # few terms: noisy
                 for H in (1, 2, 4, 8, 16) for DH in (16, 64, 80, 160, 320, 1280) for S in (1, 2, 7, 25, 73)]
        cases += [(S, 131, 640, 8, dt, device) for dt in dtypes for S in (16, 17, 32, 33)]
        cases += [(18, 64, D, H, dt, device) for dt in dtypes for D, H in ((1056, 1), (1056, 2), (2880, 4), (1536, 16))]
        cases += [(S, 64, D, H, dt, device) for dt in dtypes for S, _, D in SIZES.values() for H in (1, 4, 8, 16)]       # the paper's
        cases.sort(key=lambda c: (c[2], c[3]))
    if not cuda and (args.scale or args.blocked):
        parser.error("the cost needs a CUDA device")
    failed = 0 if args.scale or args.blocked else check(cases, workers)
    if cuda:
        cost(args.scale or SIZES, {"ours, blocked"} if args.blocked else None)
    sys.exit(f"{failed} cases are over their limits" if failed else 0)

if __name__ == "__main__":
    main()
