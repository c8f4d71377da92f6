"""
The whole suite: python -m pytest -q. It needs no GPU and no network; what needs an optional package says so when skipped.
Identities and independent references rather than snapshots; parameters that start at zero are randomised first.
"""
import base64
import copy
import gzip
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import tiktoken
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"                    # before Triton's first import: the kernels run on the CPU

import mhar
import prepare_data
import train
from mhar import MODES, SCALES, GPT, GPTConfig, convert_to_delta, fused_kernels, init_weights, route_kernel, route_ref

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)

def tiny(mode, **k):
    fields = dict(vocab_size=97, n_layer=3, n_embd=32, n_head=4, n_kv_head=2, d_ff=64, route_heads=2, block_size=16, delta_blocks=2)
    return GPTConfig(mode=mode, **{**fields, **k})

def randomised(config, std=0.05, seed=0):
    """A model in fp64 whose parameters, zeros and ones included, have moved."""
    torch.manual_seed(seed)
    model = GPT(config).double()
    for p in model.parameters():
        p.data.add_(std * torch.randn_like(p))
    return model

def batch(B=2, T=16, seed=0, V=97):
    x = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return x[:, :-1], x[:, 1:]

def rel(a, b):
    return ((a.double() - b.double()).norm() / (b.double().norm() + 1e-30)).item()

def gradients(model, x, y):
    model.zero_grad()
    model(x, y)[1].backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}

# ---------------------------------------------------------------- the depth read
def numpy_read(V, q, g, H, eps):
    """The contract once more, in NumPy fp64, token by token and head by head."""
    N, B, T, D = V.shape
    out, d = np.zeros((B, T, D)), D // H
    for b, t, h in np.ndindex(B, T, H):
        s, cut = V[:, b, t], slice(h * d, (h + 1) * d)
        k = s / np.sqrt((s ** 2).mean(-1, keepdims=True) + eps) * g
        logit = k[:, cut] @ q[cut]
        a = np.exp(logit - logit.max())
        out[b, t, cut] = a / a.sum() @ s[:, cut]
    return out

@pytest.mark.parametrize("D, H", [(32, 1), (32, 4), (33, 3), (24, 24)])
def test_read_equals_numpy(D, H):
    rng = np.random.default_rng(0)
    V, q, g = rng.normal(size=(5, 2, 3, D)), rng.normal(size=D), 1 + 0.1 * rng.normal(size=D)
    V[..., : D // 4] *= 20                                  # so that normalising each slice, the other reading, would show
    args = [torch.tensor(z) for z in (V, q, g)]
    for scale in (0, 1e6, 1):                               # the plain mean, one source picked by each head, and in between
        want = V.mean(0) if scale == 0 else numpy_read(V, scale * q, g, H, 1e-6)
        for sources in (args[0], list(args[0])):
            assert np.abs(route_ref(sources, scale * args[1], args[2], H).numpy() - want).max() < 1e-12
    single = [z.float() for z in args]
    fp32 = route_ref(*single, H)
    assert rel(fp32, torch.tensor(want)) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(route_ref(*single, H), fp32) and fp32.dtype == torch.float32
    half = args[0].bfloat16()
    low, exact = route_ref(half, *single[1:], H), route_ref(half.double(), *(z.double() for z in single[1:]), H)
    assert low.dtype == torch.bfloat16 and torch.allclose(low.double(), exact, rtol=2 ** -8, atol=1e-6)     # one rounding

def test_read_gradients_and_heads_as_a_reshape():
    V, q, g = (torch.randn(*n, dtype=torch.float64, requires_grad=True) for n in ((4, 1, 2, 6), (6,), (6,)))
    for H in (1, 2, 3):
        assert torch.autograd.gradcheck(lambda V, q, g, H=H: route_ref(V, q, g, H), (V, q, g))
    W, g = V.repeat(1, 1, 1, 3), torch.ones(18).double()    # equal slices: one head with q in each is three heads with 3 q
    assert rel(route_ref(W, (3 * q).repeat(3), g, 3), route_ref(W, q.repeat(3), g, 1)) < 1e-14
    s, q, g = (torch.randn(*n, requires_grad=True) for n in ((1, 2, 3, 8), (8,), (8,)))
    out, do = route_ref(s, q, g, 2), torch.randn(2, 3, 8)
    out.backward(do)                                        # one source is returned and gives exact zeros
    assert torch.equal(out, s[0]) and torch.equal(s.grad[0], do) and not q.grad.any() and not g.grad.any()

# ---------------------------------------------------------------- the five modes
@torch.no_grad()
def rolled_out(m, idx):
    """Every mode again, with all sources and sites written out from the paper, apart from mhar.py's streams. fp64."""
    c, r, L, eps = m.config, m.residual, m.config.n_layer, m.config.norm_eps
    rope, e = m.rope(torch.arange(idx.size(1))), m.embed(idx)
    f = [z for b in m.blocks for z in (lambda h, b=b: b.attn(h, rope), lambda h, b=b: b.mlp(h))]

    def read(sources, i):
        return torch.tensor(numpy_read(torch.stack(sources).numpy(), r.q[i].numpy(), r.g[i].numpy(), r.H, eps))
    if c.mode == "baseline":
        h = e
        for g in f:
            h = h + g(h)
    elif c.mode in ("attnres", "mhar"):
        s = [e]
        for i, g in enumerate(f):
            s.append(g(read(s, i)))
        h = read(s, 2 * L)
    elif c.mode == "delta":
        n = min(c.delta_blocks, L)
        bounds = [math.floor(b * L / n) for b in range(n + 1)]
        p, ends = e, [e]                                    # p at the end of each finished layer
        for i, g in enumerate(f):
            deltas = [ends[bounds[b + 1]] - ends[bounds[b]] for b in range(n) if bounds[b + 1] * 2 <= i]
            p = p + g(p + r.gate[i] * read([r.null[i].expand_as(e), e, *deltas], i))
            if i % 2:
                ends.append(p)
        h = p
    else:
        X = torch.stack([e] * c.hc_streams, 2)
        for i, g in enumerate(f):
            N = X / (X.square().mean(-1, keepdim=True) + eps).sqrt() * r.norm[i]
            A = r.static_A[i] + r.scale_A[i] * (N @ r.W_A[i]).tanh()
            b = r.static_b[i] + r.scale_b[i] * (N @ r.w_b[i]).tanh().squeeze(-1)
            x = g(torch.einsum("btn,btnd->btd", A[..., 0], X))
            X = torch.einsum("btnm,btnd->btmd", A[..., 1:], X) + b[..., None] * x[:, :, None]
        h = X.sum(2)
    return m.lm_head(m.final_norm(h))

@pytest.mark.parametrize("mode", MODES)
def test_model_equals_roll_out(mode):
    for n_layer, blocks in ((3, 2), (2, 8), (5, 3)):
        m, (x, _) = randomised(tiny(mode, n_layer=n_layer, delta_blocks=blocks), std=0.1), batch(T=6)
        assert rel(m(x)[0], rolled_out(m, x)) < 1e-10

def test_one_head_is_attention_residuals_bit_for_bit():
    def single(sources, q, g, H, eps):                      # a read written for one query
        s = torch.stack(list(sources))
        k = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps) * g
        return ((k * q).sum(-1).softmax(0).unsqueeze(-1) * s).sum(0)
    a, m, (x, y) = randomised(tiny("attnres"), std=0.1).float(), GPT(tiny("mhar", route_heads=1)), batch()
    m.load_state_dict(a.state_dict())
    ga, gm = gradients(a, x, y), gradients(m, x, y)
    assert torch.equal(a(x)[0], m(x)[0]) and all(torch.equal(ga[n], gm[n]) for n in ga)
    assert torch.equal(a.hidden(x, route=single), a.hidden(x))

@pytest.mark.parametrize("mode, k", [("attnres", {}), *(("mhar", dict(route_heads=H)) for H in (1, 2, 8, 32)),
                                     *(("hyper", dict(hc_streams=n)) for n in (1, 2, 4))])
def test_every_mode_starts_as_the_baseline(mode, k):
    base, m = GPT(tiny("baseline", norm_eps=1e-12)).double(), GPT(tiny(mode, norm_eps=1e-12, **k)).double()
    m.load_state_dict(base.state_dict(), strict=False)
    x, y = batch()
    assert rel(m(x)[0], base(x)[0]) < 1e-5 and (k != dict(hc_streams=1) or torch.equal(m(x)[0], base(x)[0]))
    if mode != "hyper":
        q = gradients(m, x, y)["residual.q"]
        assert not q[0].any() and all(row.any() for row in q[1:])               # site 0, with its one source: zeros, not None
        m.residual.q.data[-1].normal_(std=3.0)              # the final read is part of it
        assert rel(m(x)[0], base(x)[0]) > 1e-4

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conversion_to_delta_is_exact_then_learns(dtype, tmp_path):
    base, (x, y) = randomised(tiny("baseline"), std=0.1).to(dtype), batch()
    delta = convert_to_delta(copy.deepcopy(base), route_heads=4, delta_blocks=2)
    delta.null_parameters()[0].data.normal_()               # the gate alone must do it
    torch.save(delta.state_dict(), tmp_path / "d.pt")
    again = GPT(delta.config).to(dtype)
    again.load_state_dict(torch.load(tmp_path / "d.pt", weights_only=True))
    assert torch.equal(base(x)[0], delta(x)[0]) and torch.equal(base(x)[0], again(x)[0]) and delta.config.mode == "delta"
    if dtype == torch.float32:                              # from the true start: the gate first, then the rest
        init_weights(again.residual)
        start, opt = copy.deepcopy(again.residual), again.configure_optimizer(1e-2, 0.1)
        for _ in range(5):
            gradients(again, x, y)
            opt.step()
        moved = {n: (p != dict(start.named_parameters())[n]).flatten(1).any(1).all() for n, p in again.residual.named_parameters()}
        assert all(moved.values()), moved

@pytest.mark.parametrize("mode", MODES)
def test_causal_and_cached_generation_equals_recomputation(mode):
    m, (x, _) = randomised(tiny(mode), std=0.2), batch()
    z = x.clone()
    z[:, 9:] = (z[:, 9:] + 1) % 97
    a, b = m(x)[0], m(z)[0]
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.equal(a[:, 9], b[:, 9])
    m, x, kv = m.float(), x[:, :5], [{} for _ in m.blocks]
    cached = torch.cat([m.hidden(x[:, :2], kv), m.hidden(x[:, 2:3], kv), m.hidden(x[:, 3:], kv)], 1)       # 2, 1 and 2 tokens
    assert rel(m.head(cached)[0], m(x)[0]) < 2e-6
    out, again = m.generate(x, 20, temperature=0), x        # past block_size, 16
    for _ in range(20):
        again = torch.cat((again, m(again[:, -16:])[0][:, -1:].argmax(-1)), 1)
    assert torch.equal(out, again)
    one = [m.generate(x, 8, 1.0, 5, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(one[0], one[1]) and not torch.equal(one[0], one[2])
    for args in ((x, 1, -0.1), (x, 1, float("nan")), (x, 1, 1.0, 0), (x[:, :0], 1)):
        with pytest.raises(ValueError, match="expected from 0, None or from 1, from 1"):
            m.generate(*args)
    with pytest.raises(ValueError, match=r"targets are \(5, 2\), expected one for each token, \(2, 5\)"):
        m(x, x.t())

@pytest.mark.parametrize("mode", MODES)
def test_gradients_reach_everything_and_checkpointing_recomputes(mode):
    a, b, n, reads, (x, y) = randomised(tiny(mode)), randomised(tiny(mode, grad_checkpoint=True)), [], [], batch()
    b.blocks[1].attn.register_forward_pre_hook(lambda *_: n.append(1))
    ga, gb = gradients(a, x, y), gradients(b, x, y)
    assert len(n) == 2 and all(rel(gb[k], ga[k]) < 1e-12 for k in ga)
    b.hidden(x, route=lambda *z: (reads.append(1), route_ref(*z))[1]).sum().backward()
    sites = {"attnres": 7, "mhar": 7, "delta": 6}.get(mode, 0)
    assert len(reads) == 2 * sites                          # the reads are recomputed too
    for name, grad in ga.items():
        learnt = grad[1:] if sites == 7 and name.startswith("residual") else grad       # a read of one source learns nothing
        assert grad.any() and (not name.startswith("residual") or all(site.any() for site in learnt)), name

@pytest.mark.parametrize("mode", MODES)
def test_compute_dtype(mode):
    m, seen, maps = GPT(tiny(mode)), [], []
    for f in (b.attn for b in m.blocks):
        f.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    if mode == "hyper":
        m.residual.maps = lambda X, i, f=m.residual.maps: [maps.append(z.dtype) or z for z in (X, *f(X, i))][1:]
    with torch.autocast("cpu", torch.bfloat16):
        m(*batch())[1].backward()
    assert set(seen) == {torch.bfloat16} and {p.grad.dtype for p in m.parameters()} == {torch.float32}
    assert maps == [torch.float32] * 18 * (mode == "hyper")                     # X, A, b at each of six sublayers

def test_depth_weights():
    m, (x, _) = randomised(tiny("mhar"), std=0.3).float(), batch()
    w = m.depth_weights(x)
    assert [tuple(a.shape) for a in w] == [(n, 2, 16, 2) for n in range(1, 8)] and {a.dtype for a in w} == {torch.float32}
    assert all((a.sum(0) - 1).abs().max() < 1e-5 for a in w) and w[6].std(0).max() > 0.01
    assert [len(a) for a in GPT(tiny("delta", n_layer=4, delta_blocks=2)).depth_weights(x)] == [2, 2, 2, 2, 3, 3, 3, 3]

def test_optimizer_groups():
    for mode in MODES:
        m = GPT(tiny(mode))
        opt = m.configure_optimizer(1e-3, 0.1)
        decay = {id(p): g["weight_decay"] for g in opt.param_groups for p in g["params"]}
        assert len(decay) == sum(len(g["params"]) for g in opt.param_groups) == len(list(m.parameters()))     # tied weight once
        free = {n for n, p in m.named_parameters() if decay[id(p)] == 0}
        assert free == ({n for n, _ in m.named_parameters() if n.startswith("residual")} if mode in ("delta", "hyper") else set())
    usual = GPT(tiny("mhar")).configure_optimizer(1e-3, 0.1, decay="matrices").param_groups
    assert [g["weight_decay"] for g in usual] == [0.1, 0.0] and {p.dim() for p in usual[0]["params"]} == {2}
    assert sum(p.numel() for p in usual[1]["params"]) == 2 * 7 * 32 + 7 * 32 + 6 * 8      # q and g, norms, q and k norms

def test_parameter_counts_and_flops():
    for scale, count, extra in (("100m", 115_554_304, 25_600), ("350m", 533_123_072, 100_352), ("1b", 1_079_313_280, 186_880)):
        with torch.device("meta"):
            n = {m: GPT(GPTConfig(m, 151_936, **SCALES[scale])).num_params() for m in ("baseline", "attnres", "mhar")}
        assert n["baseline"] == count and n["mhar"] == n["attnres"] == count + extra
    for mode, products in (("baseline", 0), ("attnres", 2 * 28), ("mhar", 2 * 28), ("delta", 2 * (2 + 2 + 3 + 3 + 3 + 3)),
                           ("hyper", 6 * (24 + 20 + 4))):
        m = GPT(tiny(mode))
        assert m.estimate_flops() == 6 * m.num_params() + 6 * 3 * 4 * 8 * 16 + 6 * 32 * products == train.flops_per_token(m.config)
    m.config.mode = "newest"                                # a mode of one's own is not counted as free
    with pytest.raises(NotImplementedError, match="'newest'"):
        m.estimate_flops()
    peaks = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA L4": 121e12,
             "NVIDIA A10": 125e12, "NVIDIA A10G": None, "cpu": None, "Made Up 9000": None, "NVIDIA L40S": 362e12}
    assert {k: train.peak_flops(k) for k in peaks} == peaks

def test_rope_survives_half_precision():
    m = GPT(tiny("baseline", block_size=16384, rope_theta=1e6))
    want = torch.tensor([math.cos(15962 * 1e6 ** (-i / 4)) for i in range(4)], dtype=torch.float64)
    for z in (m, copy.deepcopy(m).bfloat16()):
        assert (z.rope_cos(15962).double() - want).abs().max() < 4e-3
    assert not any("rope" in k for k in m.state_dict())

@pytest.mark.parametrize("call, words", [
    (lambda: route_ref(torch.ones(2, 8), *torch.ones(2, 8), 3), "3 routing heads do not divide the width 8"),
    (lambda: route_ref(torch.ones(2, 8), *torch.ones(2, 8), 0), "0 routing heads"), (lambda: tiny("mhar", route_heads=5), "32.*5"),
    (lambda: route_ref(torch.ones(2, 8), torch.ones(4), torch.ones(8), 2), r"\(8,\)"), (lambda: tiny("mhar", n_kv_head=3), "4.*3"),
    (lambda: route_ref([], *torch.ones(2, 8), 2), "at least one source"), (lambda: tiny("mhar", head_dim=7), "head_dim is 7"),
    (lambda: tiny("mhar", n_head=5, n_kv_head=5), "32.*5"), (lambda: tiny("mhar", route_heads=0), "route_heads is 0"),
    (lambda: tiny("resnet"), "resnet.*baseline"), (lambda: tiny("mhar", kernel="fast"), "fast.*eager"),
    (lambda: GPT(tiny("mhar"))(torch.zeros(1, 17, dtype=torch.int64)), "17 .* 16"), (lambda: convert_to_delta(GPT(tiny("mhar"))), "mhar"),
    *((lambda mode=mode: GPT(tiny(mode)).depth_weights(batch()[0]), mode) for mode in ("baseline", "hyper"))])
def test_model_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()

@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled GPU code needs a GPU")
@pytest.mark.parametrize("mode", MODES)
def test_compiled_gradients_on_gpu(mode):
    m = GPT(GPTConfig(mode, 512, 256, 3, 8, 4, 512, 512)).cuda()
    x, y = (z.cuda() for z in batch(8, 256, V=512))
    a = gradients(m, x, y)
    m.compile()
    b = gradients(m, x, y)
    assert all(rel(b[n], a[n]) < 1e-4 if a[n].any() else not b[n].any() for n in a)

# ---------------------------------------------------------------- the fused kernels, interpreted on the CPU where there is no GPU
kernel = pytest.mark.skipif(route_kernel is None, reason="Triton, which has no wheels for this machine, is missing")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

def leaves(N, T, D, dtype=torch.float32, seed=0):
    G = torch.Generator().manual_seed(seed)
    return [(z.to(dtype).to(DEVICE)).requires_grad_() for z in (torch.randn(N, 1, T, D, generator=G), 0.5 * torch.randn(D, generator=G),
                                                                1 + 0.1 * torch.randn(D, generator=G))]

@kernel
@pytest.mark.parametrize("S, D, H", [(S, D, H) for D, H in ((64, 4), (33, 3), (160, 1), (96, 3), (1280, 8)) for S in (1, 2, 7)] + [(25, 64, 4), (73, 64, 1)])
def test_kernel_parity(S, D, H):
    """Every tensor within its limit of fp64, zeros as zeros, two runs equal bit for bit."""
    found, limits = route_kernel.parity((S, 2 if S < 8 else 1, D, H, torch.float32, DEVICE), ("route", "blocked") if S < 8 else ("blocked",))
    assert all(e <= z for way in limits for e, z in zip(found[way], limits[way])), (found, limits)

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_many_runs_are_equal_on_gpu():
    """A race may show in one run of many: tiles that are not full, one head's columns in one to five chunks."""
    for D, H, T in ((640, 8, 1638), (1280, 16, 819), (1280, 8, 1000), (512, 8, 1000), (1280, 4, 500)):
        blocked = lambda q, g, H=H: route_kernel.blocked_router(q, g, H)  # noqa: E731
        args = blocked, *route_kernel.inputs(18, T, D, H, torch.bfloat16, DEVICE)
        first = route_kernel.every_read(*args)
        assert all(torch.equal(a, b) for _ in range(40) for a, b in zip(first, route_kernel.every_read(*args))), (D, H)

BUFFERS = """
import re, torch, triton, route_kernel
from triton.backends.compiler import GPUTarget
for D, H in ((640, 8), (1280, 8), (1280, 1)):
    history = route_kernel.History(torch.empty(1, 4, D, dtype=torch.bfloat16), torch.empty(20, D), H, 1e-6)
    for own in (True, False):
        kernel, fixed = route_kernel.score_kernel, dict(history.score, OWN=own)
        warps, names = fixed.pop("num_warps"), kernel.arg_names
        types = {n: "constexpr" if n in fixed else "*fp32" if n == "p_y" else "*bf16" if n[:2] == "p_" else "i32" for n in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n[:2] == "p_"}
        source = triton.compiler.ASTSource(kernel, types, {(names.index(n),): v for n, v in fixed.items()}, aligned)
        text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps)).asm["ttgir"]
        print(text.count("ttng.warp_group_dot "), *re.findall(r"local_alloc : \\(\\) -> !ttg.memdesc<([0-9]+)x", text))
"""

@kernel
def test_no_tile_is_refilled_under_a_product():
    """Compiled for an H100, score's products run while the tile after next is fetched: three buffers for each operand."""
    got = subprocess.run([sys.executable, "-c", BUFFERS], cwd=HERE, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=True)
    assert got.stdout.splitlines() == ["2 3 3 3"] * 6

@kernel
@pytest.mark.parametrize("S, D, H", [(7, 64, 4), (7, 33, 3)])
def test_kernel_parity_in_bf16(S, D, H):
    found, limits = route_kernel.parity((S, 512 if torch.cuda.is_available() else 2, D, H, torch.bfloat16, DEVICE))
    rounding = 1 if torch.cuda.is_available() else 2.5      # the interpreter truncates to bf16, where a GPU rounds
    assert all(e <= rounding * z for way in limits for e, z in zip(found[way], limits[way])), (found, limits)
    blocked = lambda q, g: route_kernel.blocked_router(q, g, H)          # noqa: E731
    for router in (blocked, route_kernel.site_by_site(route_kernel.route, H)):
        assert {z.dtype for z in route_kernel.every_read(router, *route_kernel.inputs(2, 2, D, H, torch.bfloat16, DEVICE))} == {torch.bfloat16}

@kernel
@pytest.mark.parametrize("n_layer", [2, pytest.param(12, id="12_on_gpu", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="slow in the interpreter"))])
def test_fused_models(n_layer):
    x, y = (z.to(DEVICE) for z in batch(1, 3))
    for mode, k in (("attnres", {}), ("mhar", {}), ("delta", {}), ("mhar", dict(grad_checkpoint=True))):
        eager, fused = (randomised(tiny(mode, n_layer=n_layer, kernel=kernel, **z), std=0.1).float().to(DEVICE)
                        for kernel, z in (("eager", {}), ("fused", k)))
        a, b = gradients(eager, x, y), gradients(fused, x, y)
        assert rel(fused(x)[0], eager(x)[0]) < 1e-5 and all(rel(b[n], a[n]) < 1e-5 for n in a)
        with torch.no_grad():
            assert rel(fused(x)[0], eager(x)[0]) < 1e-5
    l1, l2 = fused(x, y)[1], fused(y, x)[1]                 # two forwards before a backward
    fused.zero_grad()
    (l1 + l2).backward()
    both, one, two = {n: p.grad.clone() for n, p in fused.named_parameters()}, gradients(fused, x, y), gradients(fused, y, x)
    assert all(rel(both[n], one[n] + two[n]) < 1e-5 for n in both)

@kernel
def test_a_source_read_alone_gives_no_noise():
    """One old source with weight exactly 1: its P is D, so that x, q, g and all else get exactly nothing; Adam would blow up noise."""
    V = torch.randn(17, 1, 4, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    V[5] += 3
    asks = torch.zeros(17, 16, device=DEVICE)
    asks[16], grads = 1e3, []                               # only the last site does
    for router in (lambda q, g: route_kernel.blocked_router(q, g, 2), route_kernel.site_by_site(route_ref, 2)):
        s, q, g = (z.clone().requires_grad_() for z in (V, asks, torch.ones_like(asks)))
        step = router(q, g)
        out = [step(z) for z in s.unbind()][16]
        assert torch.equal(out, V[5])
        out.backward(V[0])
        assert not q.grad.any() and not g.grad.any()
        grads.append(s.grad)
    assert torch.equal(*grads) and torch.equal(grads[0][5], V[0])

@kernel
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's products need blocks of 16")
@pytest.mark.parametrize("D, H, losses, frozen", [(6, 2, (6,), ()), (6, 2, (2, 4), (1,)), (6, 2, (5,), (0, 1, 2, 5)), (6, 2, (1, 6), ("w",)), (700, 1, (3, 6), ())])
def test_blocks_of_two_sites(D, H, losses, frozen, monkeypatch):
    """Seven sites are four blocks: losses at some sites, some sources frozen or the router, a head whose columns two programs share."""
    monkeypatch.setattr(route_kernel, "K", 2)
    sources, dos, rng = *torch.randn(2, 7, 1, 3, D, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    w, got = torch.randn(2, 7, D, generator=rng) / D ** 0.5 * 2, []
    for dtype, router in ((torch.float32, lambda q, g: route_kernel.blocked_router(q, g, H)), (torch.float64, route_kernel.site_by_site(route_ref, H))):
        s = [z.to(dtype).requires_grad_(i not in frozen) for i, z in enumerate(sources)]
        q, g = (z.to(dtype).requires_grad_("w" not in frozen) for z in w)
        step = router(q, g)
        outs = [step(z) for z in s]
        torch.autograd.backward([outs[i] for i in losses], [dos[i].to(dtype) for i in losses])
        got.append([*outs, *(z.grad for z in (*s, q, g) if z.grad is not None and z.grad.any())])
    assert len(got[0]) == len(got[1]) and all(rel(a, b) < 2e-6 for a, b in zip(*got))

@kernel
def test_a_stream_of_ones_own_is_not_fused_away():
    x, _ = batch(1, 3)
    class Newest(mhar.DepthRouting):                        # reads two sources
        def stream(self, route):
            return super().stream(lambda sources, *args: route(sources[-2:], *args))
    eager, fused = (randomised(tiny("mhar", kernel=kernel)).float().to(DEVICE) for kernel in ("eager", "fused"))
    whole = eager(x.to(DEVICE))[0]
    eager.residual.__class__ = fused.residual.__class__ = Newest
    got = eager(x.to(DEVICE))[0]
    assert rel(fused(x.to(DEVICE))[0], got) < 1e-5 and rel(whole, got) > 1e-2

@kernel
def test_fused_backward_from_the_middle_frozen_parts_and_twice(monkeypatch):
    x, y = (z.to(DEVICE) for z in batch(1, 3))
    got = []
    for kernel in ("eager", "fused"):
        m, h = randomised(tiny("mhar", kernel=kernel), std=0.2).float().to(DEVICE), []
        m.blocks[1].mlp.register_forward_pre_hook(lambda _, args, h=h: h.append(args[0]))
        m(x)
        h[0].square().sum().backward()                      # an auxiliary loss on a middle layer
        grads = [p.grad for p in m.parameters() if p.grad is not None]
        m = randomised(tiny("mhar", kernel=kernel), std=0.2).float().to(DEVICE)
        for p in (*m.embed.parameters(), *m.blocks[0].parameters(), m.residual.g):
            p.requires_grad_(False)
        m(x, y)[1].backward()
        got.append([*grads, *(p.grad for p in m.parameters() if p.grad is not None)])
    assert len(got[0]) == len(got[1]) and all(rel(b, a) < 1e-5 for a, b in zip(*got))
    made, real = [], route_kernel.History
    monkeypatch.setattr(route_kernel, "History", lambda *args: made.append(real(*args)) or made[-1])
    for router in (False, True):                            # frozen too: backward ends at a later site
        m.residual.requires_grad_(not router)
        loss = m(x, y)[1]
        assert {k for k, z in vars(made[-1]).items() if torch.is_tensor(z)} == set("v r y w low stat".split())    # what waits for backward
        loss.backward(retain_graph=True)
        assert not any(torch.is_tensor(z) and z.numel() for z in vars(made[-1]).values())   # freed, though the loss keeps the graph
    with pytest.raises(RuntimeError, match="already gone through"):
        loss.backward()

@kernel
def test_route_edges():
    V, q, g = (z.detach() for z in leaves(5, 4, 32))
    V = torch.cat([V, V.flip(0)], 1)                        # [5, 2, 4, 32]
    for v in (V.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([V, V], -1)[..., :32], V[:1].expand(5, -1, -1, -1),
              V.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)):                     # strided input
        assert rel(route_kernel.route(v, q, g, 4), route_ref(v.contiguous(), q, g, 4)) < 1e-6
    for N in (3, 17):                                       # a list, as a tuple of kernel arguments or stacked, one row for all tokens in it
        s = [z.requires_grad_() for z in (q.clone().expand(2, 4, 32).detach(), V[0].transpose(0, 1).contiguous().transpose(0, 1), *V[:1].repeat(15, 1, 1, 1))][:N]
        a, b = (torch.autograd.grad(f(s, q, g, 4), s, V[1]) for f in (route_kernel.route, route_ref))
        assert all(rel(x, y) < 1e-5 for x, y in zip(a, b))
    for empty in (V[:, :0], V[:, :, :0]):
        e = empty.clone().requires_grad_()
        z = q.clone().requires_grad_()
        out = route_kernel.route(e, z, g, 4, np.float32(1e-6))
        out.sum().backward()
        assert out.shape == empty.shape[1:] and e.grad.shape == empty.shape and not z.grad.any()
    for bad in (float("nan"), float("inf")):                # one bad token stays one bad token
        v = V.clone()
        v[2, 1, 3, 5] = bad
        finite = route_kernel.route(v, q, g, 4).isfinite().all(-1)
        assert not finite[1, 3] and finite.sum() == 7
    v, go = V.clone().requires_grad_(), torch.randn(2, 4, 32, device=DEVICE)
    keep = [z.clone() for z in (v, q, g, go)]
    route_kernel.route(v, q, g, 4).backward(go)
    assert all(torch.equal(a, b) for a, b in zip(keep, (v, q, g, go)))
    out = route_kernel.route(v, q, g, 4)
    with torch.no_grad():
        v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()
    for out in (route_kernel.route(v, q, g, 4), route_kernel.blocked_router(q[None], g[None], 4)(v[0])):
        for loss in (out.square().sum(), out.sum()):        # of a sum the incoming gradient is a constant
            with pytest.raises(RuntimeError, match="once differentiable"):
                torch.autograd.grad(loss, v, create_graph=True)
    Q, G = (torch.randn(3, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    x = torch.randn(1, 2, 8, device=DEVICE)
    for H, sources, words in ((3, [], "H = 3"), (2, [x, x[..., :7]], "source 1 of 3 is .1, 2, 7."), (2, [x, x.repeat(1, 2, 1)], "1, 4, 8.*1, 2, 8"),
                              (2, [x, x.bfloat16()], "bfloat16.*float32"), (2, [x] * 4, "has 3 reads.*all were made")):
        with pytest.raises(ValueError, match=words):
            step = route_kernel.blocked_router(Q, G, H)
            [step(z) for z in sources]
    step = route_kernel.blocked_router(Q, G, 2)
    first = step(x)
    for bad in (x.bfloat16(), x[:, :1]):                    # refused, and the router goes on as if it had not been asked
        with pytest.raises(ValueError):
            step(bad)
    with torch.no_grad(), pytest.raises(RuntimeError, match="read 1 runs without gradient"):
        step(x)
    assert torch.equal(first, x) and rel(step(x + 1), route_ref([x, x + 1], Q[1], G[1], 2)) < 1e-6
    with torch.no_grad():
        step = route_kernel.blocked_router(Q, G, 2)
    with pytest.raises(RuntimeError, match="read 0 runs with gradient, the router was made without"):
        step(x)
    for args, words in (((V, q, g, 5), "5 .* 32"), ((V, q[:8], g, 4), "32"), ((V.double(), q, g, 4), "float64"), (([], q, g, 4), "at least one"),
                        (([V, V], q, g, 4), "list of .* got .5, 2, 4, 32"), ((V[0], q, g, 4), "got .2, 4, 32"), ((V, q, g, 4.0), "4.0 .* 32")):
        with pytest.raises(ValueError, match=words):
            route_kernel.route(*args)
    z = torch.randn(16, 16, device=DEVICE)                  # a whole block of queries, transposed
    step, x = route_kernel.blocked_router(z.t(), torch.ones_like(z), 2), torch.randn(16, 1, 1, 16, device=DEVICE)
    assert rel([step(s) for s in x][-1], route_ref(x, z[:, -1], torch.ones_like(z[0]), 2)) < 1e-6
    checkpointed = route_kernel.blocked_router(Q, G, 2)     # each read by itself: recomputed when the backward has begun
    outs = [torch.utils.checkpoint.checkpoint(checkpointed, s[..., :8].requires_grad_(), use_reentrant=False) for s in x[:2]]
    with pytest.raises(RuntimeError, match="backward has begun"):
        sum(o.square().sum() for o in outs).backward()
    step = route_kernel.blocked_router(Q, G, 2)
    step(x[0, ..., :8].clone().requires_grad_()).sum().backward()
    with pytest.raises(RuntimeError, match="backward has begun"):
        step(x[1, ..., :8])
    step = route_kernel.blocked_router(Q, G, 2)             # the last read alone, with a row of q left: the op after it has it made again
    step(x[0, ..., :8].clone().requires_grad_())
    last = torch.utils.checkpoint.checkpoint(lambda z: step(z).sin().exp(), x[1, ..., :8].clone().requires_grad_(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="backward has begun"):
        last.sum().backward()

def test_kernel_choice(monkeypatch):
    cpu, fp32 = torch.device("cpu"), torch.float32
    assert fused_kernels("eager", cpu, fp32) is None and fused_kernels("auto", cpu, fp32) is None
    if route_kernel is not None:
        assert fused_kernels("fused", torch.device(DEVICE), fp32) is route_kernel
        with pytest.raises(ValueError, match="float64.*eager"):
            GPT(tiny("mhar", kernel="fused")).double()(batch()[0])
    monkeypatch.setattr(mhar, "route_kernel", None)
    with pytest.raises(ValueError, match="Triton.*eager"):
        GPT(tiny("mhar", kernel="fused"))(batch()[0])
    with pytest.warns(UserWarning, match="eager, which is slow: Triton cannot be imported"):
        assert fused_kernels("auto", torch.device("cuda"), fp32) is None
    with warnings.catch_warnings():                         # nothing was to be fused
        warnings.simplefilter("error")
        fused_kernels("auto", cpu, fp32), fused_kernels("eager", torch.device("cuda"), fp32)
        GPT(tiny("baseline", kernel="fused"))(batch()[0])

# ---------------------------------------------------------------- pretrained checkpoints
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
HF = dict(vocab_size=60, num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=96, max_position_embeddings=512)
FAMILIES = {"llama-2": ("Llama", dict(rms_norm_eps=1e-5)),
            "llama-3.1": ("Llama", dict(num_key_value_heads=2, rope_parameters=dict(LLAMA3, rope_type="llama3", rope_theta=5e5))),
            "llama-3.2": ("Llama", dict(num_key_value_heads=1, rope_parameters=dict(LLAMA3, rope_type="llama3", rope_theta=500.0, factor=32.0),
                                        head_dim=24, tie_word_embeddings=True)),
            "qwen3": ("Qwen3", dict(num_key_value_heads=2, hidden_size=40, head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
            "qwen3-tied": ("Qwen3", dict(num_key_value_heads=2, head_dim=16, tie_word_embeddings=True))}

@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_pretrained_equals_transformers_both_ways(tmp_path, name, sharded):
    tf = pytest.importorskip("transformers", reason="transformers is optional")
    torch.manual_seed(0)
    family, k = FAMILIES[name]
    hf = getattr(tf, family + "ForCausalLM")(getattr(tf, family + "Config")(**{**HF, **k})).eval()
    with torch.no_grad():
        [p.mul_(6 if p.dim() == 2 else 1 + 0.5 * torch.randn_like(p)) for p in hf.parameters()]       # gains too; attention that looks
    hf.save_pretrained(tmp_path / "a", max_shard_size="60KB" if sharded else "5GB")
    m, x = GPT.from_pretrained(tmp_path / "a", mode="baseline", grad_checkpoint=True), batch(1, 300, V=60)[0]
    assert os.path.exists(tmp_path / "a" / "model.safetensors") != sharded and m.config.grad_checkpoint and m.config.block_size == 512
    assert (m.lm_head.weight is m.embed.weight) == m.config.tie_embeddings == hf.config.tie_word_embeddings
    with torch.no_grad():
        want, got = hf(x).logits, m(x)[0]
        assert want.std() > 0.3 and (got - want).abs().max() < 1e-5 * want.abs().max()
        for field in ("q_norm", "rope_scaling"):            # what is compared is seen
            z = copy.deepcopy(m)
            if field == "q_norm" and family == "Qwen3":
                [b.attn.q_norm.weight.fill_(1.0) for b in z.blocks]
            elif field == "rope_scaling" and m.config.rope_scaling:
                z.config.rope_scaling = None
            else:
                continue
            assert (z(x)[0] - want).abs().max() > 1e-2
    m.save_pretrained(tmp_path / "b", shard_bytes=60_000 if sharded else 5 * 10**9)
    back = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert type(back) is type(hf) and torch.equal(back(x).logits, want) and (len(os.listdir(tmp_path / "b")) > 4) == sharded
    again = GPT.from_pretrained(tmp_path / "b")
    assert again.config == GPT.from_pretrained(tmp_path / "a").config and torch.equal(again(x)[0], got)
    hf.bfloat16().save_pretrained(tmp_path / "c")           # the files' dtype, or the one asked for
    state = hf.state_dict()
    for dtype in (None, torch.float32):
        low = GPT.from_pretrained(tmp_path / "c", dtype=dtype)
        assert all(torch.equal(p, state[mhar.hf_name(n)].to(p.dtype)) and p.dtype == (dtype or torch.bfloat16) and p.requires_grad
                   for n, p in low.named_parameters())
    if k.get("rope_parameters"):                            # as transformers 4 wrote it
        config = json.loads((tmp_path / "c" / "config.json").read_text())
        rope = config.pop("rope_parameters")
        config.update(rope_theta=rope.pop("rope_theta"), rope_scaling=rope if "factor" in rope else None)
        (tmp_path / "c" / "config.json").write_text(json.dumps(config))
        assert GPT.from_pretrained(tmp_path / "c").config == low.config
        config.update(rope_theta=7.0, rope_scaling=None, rope_parameters=k["rope_parameters"])                # the inner one counts
        (tmp_path / "c" / "config.json").write_text(json.dumps(config))
        assert GPT.from_pretrained(tmp_path / "c").config == low.config

def test_llama3_rope_equals_its_definition():
    m, d, got = GPT(tiny("baseline", block_size=4096, rope_theta=500.0, rope_scaling=LLAMA3, head_dim=16)), [], []
    for i in range(8):                                      # as in Meta's apply_scaling
        freq = 500.0 ** (-i / 8)
        wave, longest, shortest = 2 * math.pi / freq, 64 / 1.0, 64 / 4.0
        smooth = (64 / wave - 1.0) / (4.0 - 1.0)
        d.append(freq if wave < shortest else freq / 8 if wave > longest else (1 - smooth) * freq / 8 + smooth * freq)
        got.append((wave > shortest) + (wave > longest))
    want = torch.tensor([math.cos(3001 * f) for f in d], dtype=torch.float64)
    assert {*got} == {0, 1, 2} and all((z.rope_cos(3001).double() - want).abs().max() < 1e-3 for z in (m, copy.deepcopy(m).bfloat16()))

def saved(folder, change=None, tensors=None, **k):
    """A small checkpoint of ours, its config.json and its weights changed; returns the path and the model."""
    torch.manual_seed(0)
    st = pytest.importorskip("safetensors.torch", reason="safetensors is optional")
    model = randomised(tiny("baseline", **k), std=0.1).float()
    model.save_pretrained(folder)
    config, file = json.loads((folder / "config.json").read_text()), folder / "model-00001-of-00001.safetensors"
    if tensors:
        weights = st.load_file(file)
        tensors(weights)
        st.save_file({n: z.contiguous() for n, z in weights.items()}, folder / "model.safetensors")
        [os.remove(z) for z in (file, folder / "model.safetensors.index.json")]
    if change:
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
    return folder, model

def test_heads_tied_and_untied_and_weights_that_do_not_matter(tmp_path):
    x = batch()[0]
    for i, (tie, head) in enumerate(((True, None), (True, "same"), (True, "other"), (False, "other"), (False, None))):
        def tensors(w, head=head, tie=tie):
            w["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4, dtype=torch.int64)      # no weight, and no dtype of one
            w.pop("lm_head.weight", None) if head is None else w.update({"lm_head.weight": w["model.embed_tokens.weight"] + (head == "other")})
        path, model = saved(tmp_path / str(i), tensors=tensors, tie_embeddings=tie)
        if (tie, head) in ((True, "other"), (False, None)):
            with pytest.raises(ValueError, match="differs from the embedding" if tie else "lm_head.weight is missing"):
                GPT.from_pretrained(path)
            continue
        m = GPT.from_pretrained(path)
        if not tie:
            model.lm_head.weight.data.copy_(model.embed.weight + 1)
        assert (m.lm_head.weight is m.embed.weight) is tie and torch.equal(m(x)[0], model(x)[0])

@pytest.mark.parametrize("change, words", [
    *((dict([z]), f"{z[0]} is .*{z[1]}") for z in dict(
        attention_bias=True, mlp_bias=True, hidden_act="gelu", pretraining_tp=2, partial_rotary_factor=0.5, attention_dropout=0.1, use_sliding_window=True, is_causal=False,
        quantization_config={"bits": 4}, model_type="qwen2", sliding_window=64, layer_types=["sliding_attention"] * 3,
        original_max_position_embeddings=4096, head_dim=7).items()),
    *(({z: None}, f"config.json: .*{z}") for z in ("model_type", "rms_norm_eps", "hidden_size", "num_hidden_layers", "max_position_embeddings")),
    *(({key: dict(rope)}, words) for key in ("rope_scaling", "rope_parameters") for rope, words in (
        (dict(rope_type="yarn", factor=4.0), "yarn"), (dict(type="linear", factor=2.0), "linear"), (dict(rope_type="dynamic", factor=2.0), "dynamic"),
        (dict(rope_type="default", type="mrope", mrope_section=[2, 1, 1]), "mrope_section"), (dict(LLAMA3), "rope_type"), (dict(rope_type="llama3"), "llama3"),
        (dict(LLAMA3, rope_type="llama3", low_freq_factor=4.0), "low below high"), (dict(rope_type="llama3", factor=8.0), "original_max_position"),
        (dict(LLAMA3, rope_type="llama3", beta_fast=1), "beta_fast"), (dict(LLAMA3, rope_type="llama3", partial_rotary_factor=0.25), "partial_rotary_factor is 0.25"),
        (dict(full_attention=dict(rope_type="default")), "full_attention"))),
    (dict(intermediate_size=65), r"mlp.gate_proj.weight is \(64, 32\), expected \(65, 32\)"), (dict(num_hidden_layers=2), "layers.2.*no such weight"),
    (dict(num_hidden_layers=4), "layers.3.*missing.* more$"), (dict(model_type="qwen3"), "q_norm.weight is missing"), (dict(vocab_size="97"), "config.json: "),
    (dict(vocab_size=97.0), "vocab_size is 97.0"), (dict(rms_norm_eps=-1), "norm_eps is -1"), (dict(rope_theta="1e4"), "rope_theta is '1e4'"),
    (dict(num_attention_heads=5), "n_head 5 .* 2")])
def test_pretrained_refuses_what_it_does_not_compute(tmp_path, monkeypatch, change, words):
    path, _ = saved(tmp_path / "a", lambda c: c.update(change), qk_norm=False)
    monkeypatch.setattr(torch.utils, "swap_tensors", None)  # before it loads anything
    with pytest.raises(ValueError, match=words) as e:
        GPT.from_pretrained(path)
    assert "\n" not in str(e.value)

def test_other_refusals_and_whole_directories(tmp_path, monkeypatch):
    path, model = saved(tmp_path / "a", tensors=lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    import safetensors.torch as st
    with pytest.raises(ValueError, match=r"q_proj.bias is \(32,\), expected no such weight"):
        GPT.from_pretrained(path)
    half, _ = saved(tmp_path / "half", tensors=lambda w: w.update({n: t.bfloat16() for n, t in w.items() if ".1." in n}))
    assert {p.dtype for p in GPT.from_pretrained(half).parameters()} == {torch.float32}                    # mixed: the wider
    for kind, name in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        odd, _ = saved(tmp_path / name, tensors=lambda w, kind=kind: w.update({n: t.to(kind) for n, t in w.items() if "q_proj" in n}))
        with pytest.raises(ValueError, match=f"{name}.* expected F32, BF16 or F16"):
            GPT.from_pretrained(odd)
    for k, words in ((dict(mode="mhar"), "mode is 'mhar', expected .'baseline'"), (dict(blocksize=9), "blocksize")):
        with pytest.raises(ValueError, match=words):
            GPT.from_pretrained(path, **k)
    model.save_pretrained(tmp_path / "b", shard_bytes=30_000)
    shards = sorted(z for z in os.listdir(tmp_path / "b") if z.startswith("model-"))
    assert len(shards) > 2 and torch.equal(GPT.from_pretrained(tmp_path / "b", block_size=32)(batch(T=32)[0])[0][:, :16], model(batch(T=32)[0][:, :16])[0])
    st.save_file({}, tmp_path / "b" / "model.safetensors")   # left by another save, as transformers leaves it; it would take this one
    with pytest.raises(ValueError, match="index.json: it names other files than model.safetensors, which is there too"):
        GPT.from_pretrained(tmp_path / "b")
    os.remove(tmp_path / "b" / "model.safetensors")
    stale = st.load_file(tmp_path / "b" / shards[1])        # a weight in two files: the index says which
    st.save_file({**stale, "model.embed_tokens.weight": torch.ones(97, 32)}, tmp_path / "b" / shards[1])
    assert torch.equal(GPT.from_pretrained(tmp_path / "b").embed.weight, model.embed.weight)
    with pytest.raises(ValueError, match="dtype is 'bfloat16', expected None or a torch.dtype"):
        GPT.from_pretrained(tmp_path / "b", dtype="bfloat16")
    for damage, kind in ((lambda f: os.truncate(f, 3000), ValueError), (os.remove, FileNotFoundError)):
        damage(tmp_path / "b" / shards[1])
        with pytest.raises(kind, match=shards[1]):
            GPT.from_pretrained(tmp_path / "b")
    for file, text, words in (("model.safetensors.index.json", "{}", "index.json: no 'weight_map'"),
                              ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "b/3: unsupported"), ("config.json", "{", "config.json: Expecting")):
        (tmp_path / "b" / file).write_text(text)
        with pytest.raises(ValueError, match=words):
            GPT.from_pretrained(tmp_path / "b")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        GPT.from_pretrained(tmp_path / "nowhere")
    for config, words in ((tiny("mhar"), "mhar"), (tiny("delta"), "delta"), (tiny("baseline", n_embd=36, head_dim=8, n_head=8, qk_norm=False), "8.*36")):
        with pytest.raises(ValueError, match=words):
            GPT(config).save_pretrained(tmp_path / "c")
    with pytest.raises(ValueError, match="a exists"):
        model.save_pretrained(path)
    real = st.save_file
    monkeypatch.setattr(st, "save_file", lambda z, f, **k: real(z, f, **k) if "00001-of" in str(f) else (_ for _ in ()).throw(OSError("No space left")))
    with pytest.raises(OSError, match="No space"):
        model.save_pretrained(tmp_path / "c", shard_bytes=30_000)
    assert not {"c"} & {*os.listdir(tmp_path)} and len(os.listdir(tmp_path)) == 5
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="safetensors"):
        GPT.from_pretrained(path)

@pytest.mark.parametrize("kernel", ["eager", pytest.param("fused", marks=kernel)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pretrained_converts_exactly_then_everything_learns(tmp_path, dtype, kernel):
    path, _ = saved(tmp_path / "a", qk_norm=False, rope_scaling=dict(LLAMA3, original_max_position_embeddings=8), tie_embeddings=False)
    (x, y), base = (z.to(DEVICE) for z in batch(1, 8)), GPT.from_pretrained(path, dtype=dtype, device=DEVICE, kernel=kernel)
    delta = convert_to_delta(copy.deepcopy(base), route_heads=4, delta_blocks=2)
    torch.save(delta.state_dict(), tmp_path / "d.pt")
    again = GPT(delta.config).to(DEVICE, dtype)
    again.load_state_dict(torch.load(tmp_path / "d.pt", weights_only=True))
    assert all(torch.equal(z(x)[0], base(x)[0]) for z in (delta, again)) and delta.config.kernel == kernel
    if dtype == torch.float32 and kernel == "eager":        # the fused gradients are compared elsewhere
        start, opt = {n: p.detach().clone() for n, p in again.residual.named_parameters()}, again.configure_optimizer(1e-3, 0.1)
        for _ in range(20):
            gradients(again, x, y)
            opt.step()
        still = {n: (p == start[n]).flatten(1).all(1) for n, p in again.residual.named_parameters()}
        assert {*still} == {"q", "g", "null", "gate"} and not any(z.any() for z in still.values()), still

@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_loading_needs_no_second_copy(tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is optional")
    for name, D in (("small", 64), ("a", 1024)):
        with torch.device("meta"):
            model = GPT(GPTConfig("baseline", 2048, 64, 3, 8, 8, D, 4 * D, tie_embeddings=False))
        model.to_empty(device="cpu")
        for p in model.parameters():
            p.data.fill_(0.5)
        model.save_pretrained(tmp_path / name)
    code = ("import re, sys, torch, safetensors.torch, mhar\n"
            "memory = lambda name: int(re.search(name + r':\\s+(\\d+) kB', open('/proc/self/status').read()).group(1)) * 1024\n"
            "mhar.GPT.from_pretrained(sys.argv[1] + '/small')     # so that nothing is imported later\n"
            "now = memory('VmRSS')\n"
            "model = mhar.GPT.from_pretrained(sys.argv[1] + '/a')\n"
            "print(memory('VmHWM') - now)")
    peak = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=HERE, check=True, capture_output=True, text=True).stdout
    assert 0.9 < int(peak) / sum(p.nbytes for p in model.parameters()) < 1.3     # of 220 MB

# ---------------------------------------------------------------- data
def prepare(tmp_path, docs, name="d", encoding="bytes", val_frac=0.1, **k):
    """Documents (strings) -> a prepared folder; docs may also be the path of a file."""
    path = docs
    if isinstance(docs, list):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": d}) + "\n" for d in docs))
    extra = [z for key, v in {"workers": 1, **k}.items() for z in (f"--{key}", str(v))]
    prepare_data.main(["--input", str(path), "--out", str(tmp_path / name), "--encoding", str(encoding), "--val_frac", str(val_frac), *extra])
    return str(tmp_path / name)

def refused(capsys, call, *args, **k):
    """The one sentence with which a command refuses."""
    with pytest.raises(SystemExit) as e:
        call(*args, **k)
    assert isinstance(e.value.code, str) and "\n" not in e.value.code
    return e.value.code

def texts(folder, split):
    """The documents of a split, as bytes, in file order."""
    enc, ids = prepare_data.read_encoding(folder), prepare_data.read_split(folder, split)
    docs = np.split(ids, np.flatnonzero(ids == enc.eot_token) + 1)
    assert len(docs[-1]) == 0
    return [enc.decode_bytes(z[:-1].tolist()) for z in docs[:-1]]

LINES = [f"line {i} the cat sat" for i in range(1, 4001)]

def test_split_is_by_text_and_complete(tmp_path):
    docs = LINES[:1000] + LINES[:500]                       # half of them twice
    d = prepare(tmp_path, docs)
    tr, va, meta = texts(d, "train"), texts(d, "val"), prepare_data.read_meta(d)
    assert sorted(tr + va) == sorted(z.encode() for z in docs) and not set(tr) & set(va) and 50 < len(set(va)) < 150
    for split, z in (("train", tr), ("val", va)):
        assert meta[split]["documents"] == len(z) and meta[split]["bytes"] == sum(map(len, z))
        assert meta[split]["tokens"] == sum(map(len, z)) + len(z) == os.path.getsize(f"{d}/{split}.bin") // 2
    counts = np.bincount(prepare_data.read_split(d, "train"))
    p = counts[counts > 0] / counts.sum()
    assert meta["unigram_entropy"] == pytest.approx(-(p * np.log(p)).sum())
    for n, dtype in ((257, np.uint16), (65536, np.uint16), (65537, np.uint32), (200_019, np.uint32)):
        assert prepare_data.token_dtype(n) == dtype and np.array([n - 1]).astype(prepare_data.token_dtype(n))[0] == n - 1

def test_workers_and_start_method_do_not_matter_and_output_is_kept(tmp_path, capsys):
    one = prepare(tmp_path, [z * 600 for z in LINES[:400]], name="one")
    code = ("import multiprocessing as mp, sys, runpy; mp.set_start_method('spawn'); sys.argv = ['prepare_data.py', *sys.argv[1:]]; "
            "runpy.run_path('prepare_data.py', run_name='__main__')")
    subprocess.run([sys.executable, "-c", code, "--input", str(tmp_path / "one.jsonl"), "--out", str(tmp_path / "three"), "--encoding", "bytes",
                    "--val_frac", "0.1", "--workers", "3"], cwd=HERE, check=True)
    assert "exists" in refused(capsys, prepare, tmp_path, LINES[50:99], name="one")
    for f in ("train.bin", "val.bin", "meta.json"):
        assert open(f"{one}/{f}", "rb").read() == open(tmp_path / "three" / f, "rb").read()

@pytest.mark.parametrize("n", [1, 2, 5])
def test_empty_side_is_refused_with_what_works(tmp_path, capsys, n):
    docs = [f"doc-{i}-end" for i in range(n)]
    message = refused(capsys, prepare, tmp_path, docs, val_frac=0.0001)
    assert f"{n} document" in message and os.listdir(tmp_path) == ["d.jsonl"]
    if n == 1:
        assert len(texts(prepare(tmp_path, docs, val_frac=0), "train")) == 1
        assert prepare_data.read_meta(tmp_path / "d")["blank"] is not False
    else:
        works = re.search(r"works is (\S+)", message).group(1)
        d = prepare(tmp_path, docs, val_frac=works)
        assert len(texts(d, "val")) == 1 and len(texts(d, "train")) == n - 1
        refused(capsys, prepare, tmp_path, docs, name="e", val_frac=f"{float(works) - 2e-6:.7f}")

def test_input_kinds(tmp_path, capsys, monkeypatch):
    (tmp_path / "b.txt").write_bytes(b"\xef\xbf\xbd bad \xff\xfe")
    d = prepare(tmp_path, tmp_path / "b.txt", name="b", val_frac=0, errors="replace")
    assert prepare_data.read_meta(d)["replaced"] == 2 and texts(d, "train") == ["\ufffd bad \ufffd\ufffd".encode()]
    src = tmp_path / "src"
    src.mkdir()
    (src / "a.md").write_bytes(b"# head\r\n\xe2\x82\xac")
    (src / "b.py").write_bytes(b"\xef\xbb\xbfpass\n")      # a byte-order mark is not text
    (src / "c.bin").write_bytes(b"\0")
    with gzip.open(src / "d.jsonl.gz", "wt") as f:
        f.write('{"text": "zip"}\n\n{"text": "\\ud800!", "other": 1}\n{"text": ""}\n')
    os.symlink(src / "a.md", src / "z.md")                  # the same file once
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is optional") if "CI" not in os.environ else __import__("pyarrow")
    import pyarrow.parquet as pq
    pq.write_table(pyarrow.table({"text": ["par", "quet"], "n": [1, 2]}), src / "e.parquet")
    d = prepare(tmp_path, src, val_frac=0)
    assert [z.decode() for z in texts(d, "train")] == ["# head\r\n\u20ac", "pass\n", "zip", "\ufffd!", "par", "quet"]
    meta = prepare_data.read_meta(d)
    assert meta["replaced"] == 1 and meta["blank"] == 2 and "1 files with other endings" in capsys.readouterr().err
    assert "'body'" in refused(capsys, prepare, tmp_path, src / "e.parquet", name="f", text_key="body")
    assert "does not exist" in refused(capsys, prepare, tmp_path, src / "no", name="g")
    (src / "elsewhere").symlink_to(tmp_path)
    assert prepare_data.find_files([src]) and f"linked folders left out, each can be an input of its own: {src}/elsewhere" in capsys.readouterr().err
    (src / "shard.parquet").symlink_to("nowhere")
    assert "shard.parquet is a broken link" in refused(capsys, prepare, tmp_path, src, name="g")
    def locked(path, onerror):
        onerror(PermissionError(13, "Permission denied", f"{path}/locked"))
    monkeypatch.setattr(os, "walk", locked)                 # root may read everything
    assert "Permission denied: '" in refused(capsys, prepare, tmp_path, src, name="g")

@pytest.mark.parametrize("name, content, words", [
    ("j.jsonl", b'{"text":"a"}\n{"text":"b"\n', ["j.jsonl:2", "delimiter"]), ("j.jsonl", b'{"text":7}\n', ["j.jsonl:1", "7"]),
    ("j.jsonl", b'{"text":"a"}\n{"body":"b"}\n', ["j.jsonl:2", "body", "--text_key"]), ("j.jsonl", b"[1]\n", ["j.jsonl:1"]),
    ("b.txt", b"bad \xff", ["b.txt", "position 4", "--errors"]), ("v.txt", b"", ["no text"]), ("x.zip", b"a", ["x.zip", ".jsonl"]),
    ("t.jsonl.gz", gzip.compress(b'{"text":"a"}\n' * 9)[:-9], ["t.jsonl.gz"])])
def test_bad_input_is_refused(tmp_path, capsys, name, content, words):
    (tmp_path / name).write_bytes(content)
    message = refused(capsys, prepare, tmp_path, tmp_path / name)
    assert all(w in message for w in words) and os.listdir(tmp_path) == [name]

def test_encoding_without_network_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "cl100k_base", raising=False)
    message = refused(capsys, prepare, tmp_path, LINES[:9], encoding="cl100k_base")
    assert "cl100k_base.tiktoken" in message and "9b5ad71b2ce5302211f9c61530b329a4922fc6a4" in message and "TIKTOKEN_CACHE_DIR" in message
    assert "o200k_base" in refused(capsys, prepare, tmp_path, LINES[:9], encoding="o300k") and not os.path.exists(tmp_path / "d")

AWKWARD = ["about <|endoftext|> and <|fim_prefix|> marks", "x" * 300 + " " * 300, "na\u00efve \u20ac \u3042\u3042 \U0001f600 cafe\u0301",
           "12345 1,000.5", "they're WE'LL it's\n\n  \t indented\r\n", "  two  spaces ", "\u0e01\u0e34\u0e19 <think>"]

@pytest.mark.parametrize("style", ["gpt2", "llama3", "qwen"])
def test_tokenizer_json_equals_tokenizers(tmp_path, style):
    tk = pytest.importorskip("tokenizers", reason="tokenizers is optional")
    tok = tk.Tokenizer(tk.models.BPE(ignore_merges=style == "llama3"))
    level, split = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style == "gpt2"), tk.pre_tokenizers.Split
    pattern = prepare_data.CL100K if style == "llama3" else prepare_data.CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
    tok.pre_tokenizer = level if style == "gpt2" else tk.pre_tokenizers.Sequence([split(tk.Regex(pattern), "isolated"), level])
    if style == "qwen":
        tok.normalizer = tk.normalizers.NFC()
    eot = "<|end_of_text|>" if style == "llama3" else "<|endoftext|>"
    corpus = [open(m.__file__).read().replace("<|end", "<end") for m in (prepare_data, train)] + AWKWARD
    tok.train_from_iterator(corpus, tk.trainers.BpeTrainer(vocab_size=900, special_tokens=[eot], initial_alphabet=level.alphabet()))
    tok.save(str(tmp_path / "tokenizer.json"))
    plain = [z for z in AWKWARD if "<|end" not in z] + corpus[:2]
    d = prepare(tmp_path, plain + AWKWARD, encoding=tmp_path / "tokenizer.json", val_frac=0)
    os.remove(tmp_path / "tokenizer.json")                  # the folder has its own copy
    want = [i for z in plain for i in [*tok.encode(z, add_special_tokens=False).ids, tok.token_to_id(eot)]]
    ids = prepare_data.read_split(d, "train")
    assert ids[:len(want)].tolist() == want and prepare_data.read_meta(d)["vocab_size"] == tok.get_vocab_size()
    nfc = (lambda z: __import__("unicodedata").normalize("NFC", z)) if style == "qwen" else str
    assert [z.decode() for z in texts(d, "train")] == list(map(nfc, plain + AWKWARD))       # one end mark a document, text intact

@pytest.mark.parametrize("change, word", [
    (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"), (lambda t: t["model"].update(type="Unigram"), "Unigram"),
    (lambda t: t["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space"), (lambda t: t["model"]["merges"].reverse(), "order"),
    (lambda t: t.pop("model"), "model"), (lambda t: t.update(added_tokens=[]), "endoftext"),
    (lambda t: t.update(normalizer={"type": "NFKC"}), "NFKC"), (lambda t: t.update(pre_tokenizer=None), "pre-tokenizer {'type': None} is not supported")])
def test_tokenizer_json_refuses(tmp_path, capsys, change, word):
    byte = [chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]] + [chr(256 + i) for i in range(68)]
    spec = dict(added_tokens=[dict(id=0, content="<|endoftext|>")], normalizer=None,
                pre_tokenizer=dict(type="ByteLevel", add_prefix_space=False, use_regex=True),
                model=dict(type="BPE", vocab={**{c: i + 1 for i, c in enumerate(byte)}, "ab": 257, "abc": 258}, merges=["a b", "ab c"]))
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    assert prepare_data.get_encoding(str(path)).encode("abcab") == [258, 257]
    change(spec)
    path.write_text(json.dumps(spec))
    assert word in refused(capsys, prepare, tmp_path, LINES[:9], encoding=path)

def resource(package, *parts):
    """The path of a file or folder inside an optional package, None without the package."""
    spec = importlib.util.find_spec(package)
    return spec and os.path.join(list(spec.submodule_search_locations)[0], *parts)

RANKS = resource("llama_index", "core", "_static", "tiktoken_cache")            # cl100k and o200k
QWEN = resource("dashscope", "resources", "qwen.tiktoken")

@pytest.mark.skipif(RANKS is None, reason="llama-index-core, which carries real ranks, is optional")
def test_real_encodings(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", RANKS)
    runs = AWKWARD + [c * 100_000 for c in (" ", "a", "^", "\u3042")] + [" " * 1_000_000]      # o200k's pattern panics on the last one
    for name, eot in (("cl100k_base", 100257), ("o200k_base", 199999)):
        d = prepare(tmp_path, runs, name=name, encoding=name, val_frac=0)
        t = prepare_data.read_split(d, "train")
        assert (t == eot).sum() == len(runs) and [z.decode() for z in texts(d, "train")] == runs and t.dtype == np.uint32
    ranks = tmp_path / "ranks.tiktoken"                     # the rank file alone gives the same tokens
    ranks.write_bytes(open(os.path.join(RANKS, "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"), "rb").read())
    mine, named = prepare_data.get_encoding(str(ranks)), tiktoken.get_encoding("cl100k_base")
    assert all(mine.encode_ordinary(z) == named.encode_ordinary(z) for z in AWKWARD + LINES[:99]) and mine.eot_token == 100257
    assert prepare_data.tokenizer_hash(mine) == prepare_data.tokenizer_hash(named)

def test_tokenizers_are_told_apart_by_their_tokens(tmp_path):
    metas = [prepare_data.read_meta(prepare(tmp_path, LINES[:99], name="bytes"))]
    for name, order in (("same", range(256)), ("other", reversed(range(256)))):
        (tmp_path / f"{name}.tiktoken").write_bytes(b"".join(base64.b64encode(bytes([b])) + b" %d\n" % i for i, b in enumerate(order)))
        metas.append(prepare_data.read_meta(prepare(tmp_path, LINES[:99], name=name, encoding=str(tmp_path / f"{name}.tiktoken"))))
    assert [prepare_data.same_tokenizer(metas[0], m) for m in metas] == [True, True, False]
    before = [{**m, "tokenizer": None} for m in metas]      # without the hash: by name and size
    assert [prepare_data.same_tokenizer(m, before[1]) for m in metas] == [False, True, True]

@pytest.mark.skipif(QWEN is None, reason="dashscope, which carries Qwen's ranks, is optional")
def test_qwen_rank_file():
    enc = prepare_data.get_encoding(QWEN)
    assert enc.eot_token == 151643 and enc.encode_ordinary("12345") == [16, 17, 18, 19, 20]     # one token a digit
    assert all(enc.decode(enc.encode_ordinary(z)) == z for z in AWKWARD)

def test_ctrl_c_leaves_a_sentence_and_nothing_else(tmp_path):
    with open(tmp_path / "list.jsonl", "w") as f:
        f.writelines(json.dumps({"text": f"{i} {LINES[i % len(LINES)]} " * 50}) + "\n" for i in range(40000))
    command = [sys.executable, "prepare_data.py", "--input", str(tmp_path / "list.jsonl"), "--out", str(tmp_path / "out"), "--workers", "2"]
    p = subprocess.Popen(command, cwd=HERE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not any(f.stat().st_size for f in tmp_path.glob("out*/train.bin")):     # the workers work
        time.sleep(0.05)
    os.killpg(p.pid, signal.SIGINT)                         # as a terminal does, to the workers too
    lines = [z for z in p.communicate(timeout=60)[1].replace("\r", "\n").splitlines() if " MB/s, " not in z]
    assert p.returncode == 130 and lines == ["prepare_data.py: interrupted, nothing was written"] and not any(tmp_path.glob("out*"))

# ---------------------------------------------------------------- trainer
TINY = ("--n_layer 2 --n_embd 64 --n_head 4 --n_kv_head 2 --d_ff 128 --route_heads 2 --block_size 32 --batch_size 4 --grad_accum 2 "
        "--warmup_iters 2 --device cpu --dtype float32 --no_compile --seed 1 --eval_interval 0").split()

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data"), LINES)

def argv(data, out, *flags, mode="mhar"):
    return ["--data", data, "--mode", mode, "--out", str(out), *TINY, *map(str, flags)]

def short_samples(patch, generate=GPT.generate):
    """The sample at the end of a short run takes a third of its time."""
    patch.setattr(GPT, "generate", lambda model, idx, n, **k: generate(model, idx, 5, **k))

def run(*args, **k):
    """Trains and returns the log. Takes what `argv` takes."""
    with pytest.MonkeyPatch.context() as patch:
        short_samples(patch)
        train.main(argv(*args, **k))
    return train.read_log(args[1])

@pytest.fixture(scope="module")
def two(data, tmp_path_factory):
    """The folder of all that two processes train, one run after the other: their start takes longer than the runs."""
    out = tmp_path_factory.mktemp("two")
    run(data, out / "b", *SHARDED, "--stop_at", 10, mode=SHARDED_MODES)              # one process began it
    calls = [argv(data, out / "all", *SHORT, *flags, mode=",".join(MODES)) for flags in (["--stop_at", 4], ["--resume"])]
    calls += [argv(data, out / "fine", *FINE), argv(data, out / "a", *SHARDED, "--fsdp", "--stop_at", 10, mode=SHARDED_MODES),
              argv(data, out / "b", *SHARDED, "--fsdp", "--resume", mode=SHARDED_MODES),
              argv(data, out / "fine", "--eval_only", "--batch_size", 8, "--grad_accum", 1, "--eval_iters", 1)]       # no multiple of 2
    run(data, out / "node1" / "o", *SHORT, "--stop_at", 2)                           # two machines, one with an older checkpoint
    shutil.copytree(out / "node1", out / "node0")
    run(data, out / "node0" / "o", *SHORT, "--stop_at", 4, "--resume")
    odd = [(argv(data, "p", *SHORT), ["--seed", "7"]), (argv(data, "o", *SHORT, "--resume"), [])]      # and one with another flag
    (out / "two.py").write_text(f"""import os, sys
sys.path.insert(0, {HERE!r})
import train
for flags in {calls!r}:
    train.main(flags)
rank = int(os.environ["RANK"])
os.chdir({str(out)!r} + f"/node{{rank}}")
for flags, other in {odd!r}:
    try:
        train.main(flags + other * rank)
    except SystemExit as e:
        print(e, file=open("said", "a"))
def stepper(*args, real=train.stepper):             # then one of them has no memory before the first step
    if rank:
        raise MemoryError
    return real(*args)
train.stepper = stepper
try:
    train.main({argv(data, "o", *SHORT, "--overwrite")!r})
except (MemoryError, RuntimeError):
    os._exit(0)
os._exit(1)
""")
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(out / "two.py")], check=True,
                   env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return out

def losses(log):
    return [(r["iter"], r["loss"]) for r in log]

def checkpoint(out):
    return torch.load(os.path.join(out, "ckpt.pt"), weights_only=True)

def test_learning_rate():
    lr = [train.get_lr(i, 1.0, 4, 20, 0.1) for i in range(30)]
    assert lr[:4] == [0.25, 0.5, 0.75, 1.0] and max(lr[4:]) < 1 and lr[19] == pytest.approx(0.1) and set(lr[19:]) == {lr[19]}
    assert lr[3:] == sorted(lr[3:], reverse=True) and lr[11] == pytest.approx(0.1 + 0.9 * 0.5)       # halfway down
    for w in (0, 1, 20):
        lr = [train.get_lr(i, 1.0, w, 20, 0.1) for i in range(25)]
        assert lr[0] > 0 and lr.count(1.0) == (w > 0) and max(lr) <= 1.0 and lr[24] == pytest.approx(0.1)

def test_loader_visits_each_window_once_an_epoch(tmp_path):
    np.arange(1001, dtype=np.uint16).tofile(tmp_path / "t.bin")
    loader, again, other = (train.Loader(tmp_path / "t.bin", np.uint16, 10, batch, seed) for batch, seed in ((3, 0), (6, 0), (6, 1)))
    x, y = (torch.cat(z) for z in zip(*map(loader.microbatch, range(100))))      # three epochs of 100 windows, no batch fits
    assert torch.equal(y, x + 1)
    epochs = [x[i:i + 100, 0].tolist() for i in (0, 100, 200)]
    assert all(sorted(e) == list(range(0, 1000, 10)) for e in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert torch.equal(again.microbatch(49)[0], x[294:])    # a pure function, whatever came before and however it is cut
    assert not torch.equal(other.microbatch(0)[0], x[:6])
    x, y = other.take([3])                                  # of one window too, evaluation writes into y
    assert y.fill_(-100) is y and x.tolist() == [list(range(30, 40))]
    with pytest.raises(ValueError, match="1000.*vocab_size is 500"):
        train.Loader(tmp_path / "t.bin", np.uint16, 10, 100, 0, vocab_size=500).microbatch(0)

def test_resume_is_a_continuation_and_evaluation_changes_nothing(data, tmp_path):
    whole = run(data, tmp_path / "s", "--max_iters", 12, "--eval_interval", 4)
    run(data, tmp_path / "p", "--max_iters", 12, "--stop_at", 5, "--eval_interval", 4)
    with open(tmp_path / "p" / "log.jsonl", "a") as f:      # a run that died after its last checkpoint
        f.write(json.dumps(dict(whole[5], loss=9.9)) + "\n")
    train.main(["--data", data, "--out", str(tmp_path / "p"), "--resume"])       # every setting comes from the checkpoint
    part, (a, b) = train.read_log(tmp_path / "p"), (checkpoint(tmp_path / z) for z in "sp")
    assert losses(part) == losses(whole) and len(whole) == 12 and [r["iter"] for r in whole if "val_loss" in r] == [3, 7, 11]
    assert [r.get("val_loss") for r in part] == [r.get("val_loss") for r in whole]
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"]) and a["step"] == 12
    GPT(GPTConfig(**a["config"])).load_state_dict(a["model"])                    # no prefix from a wrapper either
    assert losses(run(data, tmp_path / "p", "--resume", "--max_iters", 14))[:12] == losses(whole)      # a longer run goes on
    train.main(["--data", data, "--out", str(tmp_path / "p"), "--eval_only"])
    for name, flags in (("never", []), ("more", ["--eval_interval", 2, "--eval_iters", 3]), ("less", ["--eval_interval", 3, "--eval_iters", 1])):
        assert losses(run(data, tmp_path / name, "--max_iters", 12, *flags)) == losses(whole)

def test_no_microbatch_is_read_that_is_not_trained_on(data, tmp_path, monkeypatch):
    read, real = [], train.Loader.microbatch
    monkeypatch.setattr(train.Loader, "microbatch", lambda loader, i: read.append(i) or real(loader, i))
    run(data, tmp_path / "o", "--max_iters", 3)
    assert read == [0, 1, 2, 3, 4, 5]

def test_a_late_signal_of_another_rank_ends_all(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "sum_over_ranks", lambda x: x.add_(1) if x.dim() == 0 else x)
    with pytest.raises(SystemExit) as e:
        run(data, tmp_path / "o", "--max_iters", 2)
    assert e.value.code == 128 + signal.SIGTERM and "saved at step 2" in capsys.readouterr().out

def test_resume_refuses_another_run(data, tmp_path, capsys):
    out, other = tmp_path / "r", prepare(tmp_path, LINES[:3000], name="other")
    run(data, out, "--max_iters", 2)
    run(data, out, "--max_iters", 2, "--overwrite")         # must not be remembered
    for flags, words in ((["--n_layer", 3], "n_layer 2 -> 3"), (["--seed", 2], "seed 1 -> 2"), (["--grad_accum", 4], "8 -> 16"),
                         (["--data", other], "sha256"), (["--mode", "attnres"], "mode mhar -> attnres"),
                         (["--ema", 0.9], "ema False -> True"), (["--max_iters", 1], "at step 2"), (["--decay", "matrices"], "decay all -> matrices")):
        assert words in refused(capsys, run, data, out, "--resume", *flags)
        assert "--overwrite" in refused(capsys, run, data, out)                  # and nothing is overwritten unasked
    (out / "ckpt.pt").unlink()                              # nor the log of a run that died before it saved
    log = (out / "log.jsonl").read_text()
    assert "holds a run's log, --overwrite starts anew" in refused(capsys, run, data, out) and (out / "log.jsonl").read_text() == log
    assert len(run(data, out, "--max_iters", 1, "--overwrite")) == 1

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves(data, tmp_path, number):
    out = tmp_path / "i"
    p = subprocess.Popen([sys.executable, "train.py", *argv(data, out, "--max_iters", 100000)], cwd=HERE, stdout=subprocess.DEVNULL)
    while len(train.read_log(out)) < 3:
        time.sleep(0.1)
    p.send_signal(number)
    assert p.wait(20) == 128 + number
    n = checkpoint(out)["step"]
    log = run(data, out, "--resume", "--max_iters", 100000, "--stop_at", n + 2)
    assert [r["iter"] for r in log] == list(range(n + 2)) and os.listdir(out).count("ckpt.pt.tmp") == 0

def test_damaged_files_are_named(data, tmp_path, capsys):
    d, out = prepare(tmp_path, LINES[:500], name="short"), tmp_path / "p"
    os.truncate(f"{d}/train.bin", 1000)
    assert "train.bin has 1000 bytes" in refused(capsys, run, d, out)
    meta = json.loads((tmp_path / "short" / "meta.json").read_text())
    for bad in ({}, {**meta, "dtype": "foo"}, {**meta, "vocab_size": "257"}, {**meta, "train": 5}, {**meta, "unigram_entropy": None},
                {**meta, "encoding": 5}, {**meta, "val": {k: v for k, v in meta["val"].items() if k != "sha256"}}):
        (tmp_path / "short" / "meta.json").write_text(json.dumps(bad))
        assert "meta.json is missing or not what" in refused(capsys, run, d, out)
    whole = losses(run(data, tmp_path / "r", "--max_iters", 4))
    run(data, out, "--max_iters", 4, "--stop_at", 2)
    with open(out / "log.jsonl", "a") as f:
        f.write('{"iter": 2, "lo')                          # a full disk
    assert losses(run(data, out, "--resume", "--max_iters", 4)) == whole
    for line in ("5", "null", '{"foo": 1}', "{"):
        (out / "log.jsonl").write_text('{"iter": 0}\n' + line + "\n")
        assert "log.jsonl:2 is no record" in refused(capsys, run, data, out, "--resume", "--max_iters", 6)
    (out / "log.jsonl").write_text('{"iter": 0}\n')
    run(data, out, "--resume", "--max_iters", 4)
    assert "log.jsonl lacks 3 of the checkpoint's 4 steps" in capsys.readouterr().out
    there = torch.load(out / "ckpt.pt", weights_only=True)
    for key in ("model", "optimizer", "step", "data", "args", "config"):
        torch.save({k: v for k, v in there.items() if k != key}, out / "ckpt.pt")
        assert "ckpt.pt is damaged" in refused(capsys, run, data, out, "--resume", "--max_iters", 6)
    torch.save({**there, "config": {**there["config"], "mode": "newest"}}, out / "ckpt.pt")      # of somebody's changed mhar.py
    assert "mode is 'newest', expected one of" in refused(capsys, run, data, out, "--resume", "--max_iters", 6)
    os.truncate(out / "ckpt.pt", 10000)
    assert "ckpt.pt is damaged" in refused(capsys, run, data, out, "--resume", "--max_iters", 6)
    assert losses(run(data, out, "--overwrite", "--max_iters", 4)) == whole
    message = refused(capsys, run, prepare(tmp_path, ["tiny"], val_frac=0), tmp_path / "o")     # not damaged but too short
    assert "5 tokens" in message and "33" in message
    d = prepare(tmp_path, LINES[:200], name="e", val_frac=0)
    assert "val split has 0 tokens" in refused(capsys, run, d, tmp_path / "o", "--eval_interval", 5)
    assert len(run(d, tmp_path / "o", "--max_iters", 1)) == 1                    # without evaluation it is enough

def test_evaluation_is_the_mean_over_fixed_windows(data):
    model = GPT(GPTConfig("mhar", 320, 32, 1, 2, 2, 32, 32, route_heads=2))
    loader = train.Loader(f"{data}/val.bin", np.uint16, 32, 4, 0)
    for n in (8, 7, 10**9):                                 # whole batches, a small last one, the whole split
        got = [train.evaluate(model, loader, n, torch.device("cpu"), lambda m: torch.autocast("cpu", enabled=False)) for _ in range(2)]
        at = np.linspace(0, loader.windows - 1, min(n, loader.windows)).astype(int)[:, None] * 32 + np.arange(33)
        t = torch.from_numpy(loader.tokens[at].astype(np.int64))
        with torch.no_grad():
            assert got[0] == got[1] == pytest.approx(model(t[:, :-1], t[:, 1:])[1].item(), rel=1e-6) and model.training

SHORT, LONG = (["--max_iters", n + 1, "--stop_at", n] for n in (8, 20))              # no sample at the end
FINE = [*LONG, "--batch_size", 2, "--grad_accum", 4]

def test_accumulation_and_processes_give_the_same_run(data, tmp_path, two):
    """One microbatch a rank: bit for bit what one process does, resumed halfway or not. Else the same sums in another order."""
    run(data, tmp_path / "one", *SHORT, mode=",".join(MODES))
    for mode in MODES:
        one, both = train.read_log(tmp_path / "one" / mode), train.read_log(two / "all" / mode)
        assert losses(both) == losses(one) and len(both) == 8
    one, whole = run(data, tmp_path / "long", *LONG), run(data, tmp_path / "whole", *LONG, "--batch_size", 8, "--grad_accum", 1)
    for log in (whole, run(data, tmp_path / "fine", *FINE), train.read_log(two / "fine")):
        assert [r["tokens"] for r in log] == [256 * (i + 1) for i in range(20)]
        for key, most in (("loss", 1e-6), ("grad_norm", 1e-4)):
            assert max(abs(a[key] - b[key]) / a[key] for a, b in zip(one, log)) < most

def test_processes_have_to_agree(two):
    for node in ("node0", "node1"):
        assert (two / node / "said").read_text().splitlines() == [
            f"train.py: the processes are to do the same, but have {z}" for z in ("seed 1 and 7", "step 4 and 2")]
    assert checkpoint(two / "node0" / "o")["step"] == 4 and not (two / "node0" / "p").exists()
    assert len(train.read_log(two / "node0" / "o")) == 4    # nor did the run that failed on one process cost the old one

def test_signals_are_noted_until_all_processes_know_of_them(data, tmp_path, monkeypatch):
    handlers, real = [], train.sum_over_ranks
    monkeypatch.setattr(train, "sum_over_ranks", lambda x: (real(x), handlers.append(signal.getsignal(signal.SIGTERM)))[0])
    run(data, tmp_path / "o", "--max_iters", 3, "--stop_at", 2)
    assert len({*handlers}) == 1 and handlers[0] not in (signal.SIG_DFL, signal.getsignal(signal.SIGTERM))

def test_failures_keep_the_last_good_checkpoint(data, tmp_path, monkeypatch, capsys):
    n, z, real = tmp_path / "n", tmp_path / "z", torch.save
    message = refused(capsys, run, data, n, "--lr", 1e18, "--grad_clip", 0, "--ckpt_interval", 1, "--max_iters", 60)
    assert re.search(r"iteration \d+: .*(nan|inf|finite)", message)
    assert all(v.isfinite().all() for v in checkpoint(n)["model"].values()) and all(math.isfinite(r["loss"]) for r in train.read_log(n))

    def full_disk(obj, f):
        if obj["step"] < 12:
            return real(obj, f)
        f.write(b"half")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full_disk)
    assert "No space left" in refused(capsys, run, data, z, "--max_iters", 20, "--ckpt_interval", 4)
    assert checkpoint(z)["step"] == 8 and sorted(os.listdir(z)) == ["ckpt.pt", "config.json", "log.jsonl"]

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode, grad_accum", [(mode, 2) for mode in (*MODES, "mhar:1")] + [("mhar", 1)])     # 1: the graph writes the gradients
def test_fused_compiled_and_graphed_training_on_gpu(data, tmp_path, mode, grad_accum):
    flags = ["--max_iters", 8, "--device", "cuda", "--grad_accum", grad_accum, "--eval_interval", 4, "--eval_iters", 1, "--z_loss", 1e-3]
    plain = run(data, tmp_path / "plain", *flags, "--kernel", "eager", "--no_cuda_graph", mode=mode)
    fast = run(data, tmp_path / "fast", *flags, "--compile", mode=mode)         # what a GPU does by default, but in fp32
    for key in ("loss", "grad_norm", "val_loss"):
        assert max(abs(a[key] - b[key]) / a[key] for a, b in zip(plain, fast) if key in a) < 1e-3, key

def test_torchrun_with_one_process(data, tmp_path, monkeypatch):
    """No sums over processes: NCCL has none of the CPU's tensors."""
    alone = run(data, tmp_path / "alone", "--max_iters", 2, "--eval_interval", 1, "--eval_iters", 1)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args: pytest.fail("summed over one process"))
    for k, v in dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="localhost", MASTER_PORT=0).items():
        monkeypatch.setenv(k, str(v))
    try:
        one = run(data, tmp_path / "one", "--max_iters", 2, "--eval_interval", 1, "--eval_iters", 1)
        assert torch.distributed.get_world_size() == 1
    finally:
        torch.distributed.destroy_process_group()
    assert losses(alone) == losses(one) and alone[-1]["val_loss"] == one[-1]["val_loss"]

def test_an_update_clips_and_accumulates():
    """Plain gradient descent shows the gradient: the mean over microbatches, scaled to the largest norm."""
    args = train.argparse.Namespace(compile=False, cuda_graph=False, fused=False, fsdp=False, z_loss=0.0, grad_accum=2, grad_clip=0.0)
    batches, free = [batch(seed=i) for i in range(2)], lambda m: torch.autocast("cpu", enabled=False)
    m = randomised(tiny("mhar"))
    start, grads = copy.deepcopy(m.state_dict()), [gradients(m, *b) for b in batches]
    mean = {n: sum(g[n] for g in grads) / 2 for n in grads[0]}
    size = math.sqrt(sum(g.double().square().sum() for g in mean.values()))
    for clip, scale in ((0.0, 1.0), (2 * size, 1.0), (size / 2, 0.5)):
        args.grad_clip = clip
        m.load_state_dict(start)
        m.zero_grad()
        optimizer = torch.optim.SGD([dict(params=list(m.parameters()), lr_scale=3.0)])
        loss, norm = train.stepper(args, m, optimizer, free, batches[0])[0](batches, 0.01)
        assert norm.item() == pytest.approx(size, rel=1e-6) and loss.item() == pytest.approx(
            np.mean([m_loss(start, b) for b in batches]), rel=1e-6)
        for n, p in m.named_parameters():
            assert rel(start[n] - p, 0.03 * scale * mean[n]) < 1e-5, n

def m_loss(state, b):
    m = randomised(tiny("mhar"))
    m.load_state_dict(state)
    return m(*b)[1].item()

def test_bench(data, tmp_path, capsys):
    run(data, tmp_path / "o", "--bench", "--max_iters", 1, mode="baseline,mhar:4")
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if re.match(r"(baseline|mhar:4) +[0-9]", line)]
    assert [r[0] for r in rows] == ["baseline", "mhar:4"] and rows[0][2] == "1.000" and not os.path.exists(tmp_path / "o")
    speed = [float(r[1].replace(",", "")) for r in rows]
    assert float(rows[1][2]) == pytest.approx(speed[1] / speed[0], abs=1e-3)
    started = []

    def update(batches, lr):
        started.append(time.perf_counter())
        time.sleep(0.01)
    assert train.seconds(update, None, 0, lambda: None, 3) == pytest.approx(0.01, rel=0.3) and len(started) == 18

@pytest.mark.parametrize("flags, words", [
    (["--vocab_size", 50], "50.*257"), (["--mode", "mahr"], "mahr.*baseline"), (["--mode", "attnres:4"], "attnres:4"),
    (["--data", "nowhere"], "nowhere.*prepare_data"), (["--resume"], "no checkpoint"), (["--eval_only"], "no checkpoint"),
    (["--device", "mps" if torch.cuda.is_available() else "cuda"], "(mps|cuda) is not available"), (["--mode", "mhar:5"], "64.*5"),
    (["--block_size", 10**6], "block_size"), (["--batch_size", 0], "batch_size is 0"), (["--table", "nowhere"], "nowhere"),
    (["--lr", "inf"], "lr is inf"), (["--max_iters", -5], "max_iters is -5"), (["--mode", "mhar,mhar"], "twice"), (["--mode", "mhar:08"], "mhar:08"),
    (["--overwrite", "--resume"], "overwrite"), (["--eval_only", "--bench"], "eval_only .or --bench"), (["--cuda_graph"], "cuda_graph.*cpu"), (["--head_dim", -2], "head_dim is -2"), (["--param_dtype", "bfloat16"], "float32 needs")])
def test_flags_are_refused_before_any_work(data, tmp_path, capsys, flags, words):
    assert re.search(words, refused(capsys, run, data, tmp_path / "o", *flags)) and not os.path.exists(tmp_path / "o")

def test_a_process_without_a_gpu_of_its_own_is_refused(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")                   # the third process of a node with two GPUs
    assert "cuda is not available here to process 2; auto takes what there is, one GPU a process" in refused(capsys, train.main, ["--data", data, "--out", str(tmp_path / "o")])

def test_flags_switch_off_and_odd_ones_are_errors(data, capsys):
    assert [train.parser().parse_args(z).compile for z in (["--no_compile", "--no_qk_norm"], ["--compile"])] == [False, True]
    for flag in (["--compile", "False"], ["--compile=false"], ["--compile", "0"], ["--max_iter", "3"], ["--leraning_rate", "1"]):
        with pytest.raises(SystemExit) as e:
            train.main(["--data", data, *flag])
        assert e.value.code == 2 and flag[0].split("=")[0] in capsys.readouterr().err

def test_several_modes_share_their_settings_and_end_with_the_paired_table(data, tmp_path, capsys, monkeypatch):
    short_samples(monkeypatch)
    run(data, tmp_path / "baseline", "--max_iters", 4, "--eval_interval", 1, mode="baseline")
    flags = ["--data", data, "--mode", "baseline,hyper,attnres,mhar:4", "--out", str(tmp_path), "--resume"]
    train.main(flags)                                       # modes that had not started take the settings of the one that had
    out = capsys.readouterr().out
    config, log = ({m: f(tmp_path / m.replace(":", "-")) for m in flags[3].split(",")} for f in (
        lambda d: json.loads((d / "config.json").read_text()), train.read_log))
    a, b = config["baseline"], config["mhar:4"]
    assert {k for k in a["model"] if a["model"][k] != b["model"][k]} == {"mode", "route_heads"}
    assert {k for k in a["args"] if a["args"][k] != b["args"].get(k)} <= {"mode", "out", "name", "route_heads", "resume", "device"}
    rows = {line.split()[0]: line.split() for line in out.splitlines() if re.match(r"(baseline|hyper|attnres|mhar:4) +\d", line)}
    assert list(rows) == list(config) and "vocabulary 257 padded to 320" in out and "--- sample" in out and "not paired" not in out
    tail = {m: np.mean([r["val_loss"] for r in log[m]][2:]) for m in log}        # steps 3 and 4
    for m, row in rows.items():
        assert float(row[1]) == pytest.approx(tail[m], abs=1e-4) and row[5].replace(",", "") == str(config[m]["parameters"])
        assert float(row[2]) == pytest.approx(tail[m] - tail["baseline"], abs=1e-4) and rows["baseline"][2] == "+0.0000"
    train.main(flags)                                       # finished: nothing but the table again
    assert [z for z in capsys.readouterr().out.splitlines() if z.startswith("mhar:4  ")] == [z for z in out.splitlines() if z.startswith("mhar:4  ")]
    assert "subfolders" in refused(capsys, train.main, ["--data", data, "--out", str(tmp_path), "--resume"])     # --mode forgotten
    table = ["--table", *(str(tmp_path / z) for z in ("mhar-4", "baseline"))]
    for group, key, value, what in (("args", "seed", None, "seed"), ("args", "eval_iters", 3, "eval_iters"), ("args", "grad_clip", 0.5, "grad_clip"),
            ("args", "dtype", "bfloat16", "dtype"), ("args", "grad_accum", 7, "batch_size x grad_accum"), ("model", "block_size", 8, "block_size"),
            ("data", "train", {"sha256": "0"}, "data")):    # one difference
        (tmp_path / "baseline" / "config.json").write_text(json.dumps({**a, group: {**a[group], key: value}}))
        train.main(table)
        assert capsys.readouterr().out.splitlines()[-1] == f"not paired: these runs differ in {what}"
    del a["args"]["max_iters"]
    (tmp_path / "baseline" / "config.json").write_text(json.dumps(a))
    assert "baseline is no folder of a run" in refused(capsys, train.main, table)

def test_several_modes_keep_their_own_settings_and_no_old_run(data, tmp_path, capsys, monkeypatch):
    for lr, mode in ((1e-3, "baseline"), (5e-3, "mhar:4")):
        run(data, tmp_path / mode.replace(":", "-"), "--max_iters", 4, "--stop_at", 2, "--lr", lr, mode=mode)
    def both(*flags):
        train.main(["--data", data, "--mode", "baseline,mhar:4", "--out", str(tmp_path), *flags])

    def there():
        return [os.path.exists(tmp_path / z / "ckpt.pt") for z in ("baseline", "mhar-4")]
    short_samples(monkeypatch)
    both("--resume", "--weight_decay", "0.2")
    assert capsys.readouterr().out.splitlines()[-1] == "not paired: these runs differ in lr"
    for lr, folder in ((1e-3, "baseline"), (5e-3, "mhar-4")):
        args = checkpoint(tmp_path / folder)["args"]
        assert args["weight_decay"] == 0.2
        assert [r["lr"] for r in train.read_log(tmp_path / folder)] == [train.get_lr(i, lr, args["warmup_iters"], 4) for i in range(4)]
    assert "ema" in refused(capsys, both, "--overwrite", "--ema", "1") and there() == [True, True]
    with monkeypatch.context() as m:
        m.setattr(os, "access", lambda *args: False)
        assert "baseline cannot be written to" in refused(capsys, both, "--overwrite") and there() == [True, True]
    for name, error, left in (("stepper", MemoryError, [True, True]), ("get_lr", KeyboardInterrupt, [False, False])):
        def fails(*args, error=error):
            raise error
        with monkeypatch.context() as m, pytest.raises(error):
            m.setattr(train, name, fails)                   # before the first step, an old run is whole; then both are gone,
            both("--overwrite")                             # else --resume would pair the first with the old second
        assert there() == left
        assert bool(train.read_log(tmp_path / "baseline")) == left[0]

def test_log_and_bf16(data, tmp_path):
    log = run(data, tmp_path / "b", "--max_iters", 6, "--dtype", "bfloat16", "--grad_checkpoint")
    pure = run(data, tmp_path / "p", "--max_iters", 6, "--dtype", "bfloat16", "--param_dtype", "bfloat16")
    assert {v.dtype for v in checkpoint(tmp_path / "p")["model"].values()} == {torch.bfloat16}
    assert {v.dtype for v in checkpoint(tmp_path / "b")["model"].values()} == {torch.float32}
    assert abs(log[-1]["loss"] - pure[-1]["loss"]) < 0.1 and log[-1]["loss"] < log[0]["loss"] < math.log(320) + 0.1
    assert [set(r) for r in log] == [{"iter", "loss", "lr", "grad_norm", "tokens", "dt", "tokens_per_s", "mfu", "memory_mb"}] * 6
    assert all(r["tokens_per_s"] * r["dt"] == pytest.approx(256) and r["mfu"] is None for r in log)

# ---------------------------------------------------------------- mid-training
@pytest.fixture(scope="module")
def base(data, tmp_path_factory):
    """The folder of a baseline, trained for three steps."""
    out = tmp_path_factory.mktemp("base")
    run(data, out, "--max_iters", 3, mode="baseline")
    return str(out)

def test_rate_and_decay_by_role():
    for tied in (True, False):
        m = GPT(tiny("delta", tie_embeddings=tied))
        names = {id(p): n for n, p in m.named_parameters()}
        groups = m.configure_optimizer(1e-3, 0.1, decay="projections", route_lr=10).param_groups
        found = {names[id(p)]: (g["weight_decay"], g["lr"]) for g in groups for p in g["params"]}
        for n in names.values():
            projection = n.endswith("_proj.weight") or n == "lm_head.weight"    # an LM head of its own; the embedding is none
            assert found.pop(n) == (0.1 * projection, pytest.approx(1e-2 if n.startswith("residual") else 1e-3)), n
        assert not found
    with pytest.raises(ValueError, match="'shape'.*projections"):
        m.configure_optimizer(1e-3, 0.1, decay="shape")

def test_mid_training_starts_as_the_pretrained_model(data, base, tmp_path, capsys, monkeypatch):
    flags = ["--init_from", f"{base}/ckpt.pt", "--max_iters", 3, "--eval_interval", 3, "--eval_iters", 1, "--lr", 1e-3, "--min_lr", 1e-5,
             "--warmup_iters", 1]
    model, loader = GPT(GPTConfig(**checkpoint(base)["config"])), train.Loader(f"{data}/train.bin", np.uint16, 32, 4, 1)
    model.load_state_dict(checkpoint(base)["model"])
    run(data, tmp_path / "m", *flags, mode="baseline,delta")
    both = [train.read_log(tmp_path / "m" / m) for m in ("baseline", "delta")]
    assert re.search(r"delta:2 +\d\.\d+ +[-+]0\.00", capsys.readouterr().out)    # the paired table
    with torch.no_grad():
        first = np.mean([model(*loader.microbatch(i))[1].item() for i in (0, 1)])
    for log in both:
        assert log[0]["loss"] == pytest.approx(first, rel=1e-6) and [r["lr"] for r in log] == pytest.approx([1e-3, 5.05e-4, 1e-5])
    assert both[0][0]["loss"] == both[1][0]["loss"] and both[0][2]["loss"] != both[1][2]["loss"]
    a, b = (checkpoint(tmp_path / "m" / m) for m in ("baseline", "delta"))
    assert {k for k in a["config"] if a["config"][k] != b["config"][k]} == {"mode"} and b["model"]["residual.gate"].any()
    for m in ("one", "ten"):                                # AdamW's first step is the rate itself
        run(data, tmp_path / m, *flags, "--stop_at", 1, "--route_lr", {"one": 1, "ten": 10}[m], mode="delta")
    gates = [checkpoint(tmp_path / m)["model"]["residual.gate"].abs() for m in ("one", "ten")]
    assert rel(gates[1], 10 * gates[0]) < 1e-3 and gates[0].max() == pytest.approx(1e-3, rel=1e-3)
    # saved, resumed and at rate zero it is the control, with the same windows; resuming does not look at the base
    zero = [*flags, "--lr", 0, "--min_lr", 0, "--block_size", 16, "--eval_interval", 0, "--stop_at", 2]
    control = run(data, tmp_path / "z", *zero, mode="baseline")
    run(data, tmp_path / "d", *zero, "--route_heads", 4, "--stop_at", 1, mode="delta")
    os.rename(base, base + ".away")
    try:
        train.main(["--data", data, "--out", str(tmp_path / "d"), "--resume", "--stop_at", "2"])
    finally:
        os.rename(base + ".away", base)
    assert losses(train.read_log(tmp_path / "d")) == losses(control) and checkpoint(tmp_path / "d")["config"]["block_size"] == 16
    # a folder goes to from_pretrained, in the checkpoint's dtype; --eval_only evaluates it as it is, whatever OUT holds
    seen = []
    monkeypatch.setattr(GPT, "from_pretrained", lambda path, device: (seen.append(path), copy.deepcopy(model).bfloat16())[1])
    want = train.evaluate(copy.deepcopy(model).bfloat16().float(), train.Loader(f"{data}/val.bin", np.uint16, 32, 4, 1), 8, torch.device("cpu"),
                          lambda m: torch.autocast("cpu", enabled=False))
    for mode in ("baseline", "delta:4"):
        capsys.readouterr()
        run(data, tmp_path / "m" / "delta", "--init_from", str(tmp_path), "--eval_only", "--eval_iters", 1, mode=mode)
        assert f"{mode}: validation loss {want:.4f} at step 0" in capsys.readouterr().out and set(seen) == {str(tmp_path)}
    assert checkpoint(tmp_path / "m" / "delta")["step"] == 3
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model-00001-of-00002.safetensors").touch()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"my": "own"}')
    for out, words, *flags in (
            ("o", "mhar is another function than baseline", "--mode", "mhar"), ("o", "attnres is another", "--mode", "attnres"), ("o", "hyper is another", "--mode", "hyper"),
            ("o", "n_layer 3.*init_from.*block_size", "--n_layer", 3), ("o", "mhar is another function than delta", "--init_from", tmp_path / "m/delta", "--mode", "mhar"),
            ("o", "route_heads 4.*only block_size", "--init_from", tmp_path / "m/delta", "--mode", "delta:4"),
            ("o", "README.md is damaged or of another", "--init_from", os.path.join(HERE, "README.md")), ("m/delta", "resume.*overwrite"),
            ("m/delta", "init_from .*ckpt.pt -> .*other", "--resume", "--init_from", "other"), (base, "that of --init_from", "--overwrite", "--mode", "baseline"), ("hf", "hf holds a pretrained model", "--overwrite"),
            ("foreign", "another program's config.json", "--overwrite"),
            ("o", "ema 1.0 must be below 1", "--ema", 1), ("o", "min_lr 1.0 not above", "--min_lr", 1), ("o", "goes with --eval_only", "--text", "x"),
            ("o", "init_from is '', expected a name", "--init_from", ""), ("o", "text is ''", "--eval_only", "--text", ""), ("o", "with torchrun", "--fsdp"), ("o", "No such file.*nowhere", "--eval_only", "--text", "nowhere")):
        flags = ["--init_from", f"{base}/ckpt.pt", "--max_iters", 3, *flags]
        assert re.search(words, refused(capsys, run, data, tmp_path / out, *flags, mode="delta")) and not os.path.exists(tmp_path / "o")
    other = prepare(tmp_path, LINES[:500], name="other")      # a second stage, on other data
    meta = prepare_data.read_meta(data)
    for change in ({"tokenizer": "0"}, {"tokenizer": None, "encoding": "tokenizer.json"}):      # as many tokens, but others
        with monkeypatch.context() as m:
            m.setattr(prepare_data, "read_meta", lambda folder, change=change: {**meta, **change})
            assert "has another tokenizer, bytes" in refused(capsys, run, data, tmp_path / "o", "--init_from", tmp_path / "m" / "delta", mode="delta")
    second = run(other, tmp_path / "s", "--init_from", tmp_path / "m" / "delta", "--max_iters", 2, "--eval_interval", 2, "--eval_iters", 1, "--lr", 0, mode="delta")
    capsys.readouterr()
    run(other, tmp_path / "m" / "delta", "--init_from", tmp_path / "m" / "delta", "--eval_only", "--eval_iters", 1, mode="delta")
    assert f"validation loss {second[1]['val_loss']:.4f}" in capsys.readouterr().out
    monkeypatch.undo()                                      # from_pretrained
    meta = prepare_data.read_meta(data)
    for n, default in ((321, None), (256, data)):           # tokens without embedding; a forgotten --data
        monkeypatch.setattr(prepare_data, "read_meta", lambda folder, n=n: {**meta, "vocab_size": n})
        monkeypatch.setattr(train, "DEFAULT_DATA", default)
        assert re.search(f"320 tokens, .* {n}: .*tokenizer", refused(capsys, run, data, tmp_path / "o", "--init_from", base, mode="delta"))

def test_weight_average_and_z_loss(data, tmp_path, monkeypatch):
    saved, real = [], train.write_atomic
    monkeypatch.setattr(train, "write_atomic", lambda path, z: (real(path, z), saved.append(copy.deepcopy(z)) if path.endswith("ckpt.pt") else 0))
    flags = "--max_iters 5 --stop_at 4 --ema 0.9 --z_loss 0.1 --ckpt_interval 1 --eval_interval 4 --eval_iters 1 --grad_clip 0".split()
    log = run(data, tmp_path / "s", *flags)
    torch.manual_seed(1)
    model = GPT(GPTConfig(**saved[0]["config"]))
    average, loader = copy.deepcopy(model).double(), train.Loader(f"{data}/train.bin", np.uint16, 32, 4, 1)
    for z in saved[:4]:
        for k, v in average.named_parameters():
            v.data.mul_(0.9).add_(0.1 * z["model"][k])
            assert rel(z["ema"][k], v) < 1e-6 and z["ema"][k].dtype == torch.float32
    val = train.Loader(f"{data}/val.bin", np.uint16, 32, 4, 1)
    ema = train.evaluate(average.float(), val, 8, torch.device("cpu"), lambda m: torch.autocast("cpu", enabled=False))
    assert log[3]["ema_val_loss"] == pytest.approx(ema, rel=1e-6) and log[3]["val_loss"] != log[3]["ema_val_loss"] and "val_loss" not in log[2]
    run(data, tmp_path / "p", *flags, "--stop_at", 2)
    part = run(data, tmp_path / "p", "--resume", *flags)
    assert losses(part) == losses(log) and part[3]["ema_val_loss"] == log[3]["ema_val_loss"]
    assert all(torch.equal(v, saved[3]["ema"][k]) for k, v in checkpoint(tmp_path / "p")["ema"].items())
    entropy, objective = 0.0, 0.0
    for x, y in map(loader.microbatch, (0, 1)):             # the first step, by hand and in fp64
        logp = model.double()(x)[0].flatten(0, 1)
        z = logp.exp().sum(-1).log()
        entropy = entropy + (z - logp[range(128), y.flatten()]).mean() / 2
        objective = objective + 0.1 * (z * z).mean() / 2
    (entropy + objective).backward()
    norm = math.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    assert log[0]["loss"] == pytest.approx(entropy.item(), rel=1e-6) and log[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)

SHARDED_MODES = "baseline,mhar,delta"
SHARDED = "--max_iters 21 --stop_at 20 --ema 0.9 --z_loss 0.01 --eval_interval 20 --eval_iters 2 --batch_size 3 --grad_checkpoint --n_layer 1".split()

def test_sharded_training_is_the_same_run(data, tmp_path, two):
    """Two processes that share one model, and one that has it whole: the same losses, each resumed from what the other saved."""
    run(data, tmp_path / "one", *SHARDED, mode=SHARDED_MODES)
    for half in "ab":
        shutil.copytree(two / half, tmp_path / half)
    run(data, tmp_path / "a", *SHARDED, "--resume", mode=SHARDED_MODES)
    for mode in SHARDED_MODES.split(","):
        one, a, b = (train.read_log(tmp_path / z / mode) for z in ("one", "a", "b"))
        for log in (a, b):
            assert len(log) == 20 and json.loads((tmp_path / "b" / mode / "config.json").read_text())["processes"] == 2
            for key in ("loss", "grad_norm", "val_loss", "ema_val_loss"):
                assert max(abs(r[key] - s[key]) / s[key] for r, s in zip(log, one) if key in s) < 1e-5, (mode, key)
        for z in (checkpoint(tmp_path / z / mode) for z in "ab"):
            assert list(z["model"]) == list(checkpoint(tmp_path / "one" / mode)["model"])
            assert {type(v) for k in ("model", "ema") for v in z[k].values()} == {torch.Tensor}

# ---------------------------------------------------------------- evaluation of texts and tasks
TEXT = "The cat sat — on the mat.\r\n\tÉté, 2 × 3 = 6.  " * 3 + "\n"

def scored(model, enc, T, text, whole_last=False):
    """Log-probability of each token, one at a time, with what precedes it in its window; whole_last: the last window starts earlier."""
    ids, scores = [enc.eot_token, *text.encode()], []
    with torch.no_grad():
        for i in range(1, len(ids)):
            start = (i - 1) // T * T                        # the first token of the window
            start = min(start, max(0, len(ids) - 1 - T)) if whole_last else start
            scores.append(model.double()(torch.tensor([ids[start:i]]))[0][0, -1].log_softmax(-1)[ids[i]].item())
    return scores

def test_text_perplexity(data, base, tmp_path, capsys):
    (tmp_path / "t.txt").write_bytes(("\ufeff" + TEXT).encode())
    model = GPT(GPTConfig(**checkpoint(base)["config"]))
    model.load_state_dict(checkpoint(base)["model"])
    nats = -sum(scored(model, prepare_data.read_encoding(data), 32, TEXT))
    train.main(["--data", data, "--out", base, "--eval_only", "--text", str(tmp_path / "t.txt")])
    found = re.findall(r"(\S+) a (byte|word|token) \((\d+)\)", capsys.readouterr().out)
    want = dict(byte=len(TEXT.encode()), word=len(TEXT.split()), token=len(TEXT.encode()))
    assert [u for _, u, _ in found] == list(want)
    for ppl, unit, n in found:
        assert int(n) == want[unit] and float(ppl) == pytest.approx(math.exp(nats / want[unit]), rel=1e-5)
    for content, words in ((b"\xff\xfe", "t.txt: .*decode"), (b" \n", "t.txt holds no word")):
        (tmp_path / "t.txt").write_bytes(content)
        assert re.search(words, refused(capsys, train.main, ["--data", data, "--out", base, "--eval_only", "--text", str(tmp_path / "t.txt")]))

def test_readme_harness_model(data, base, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager
    code = {}
    exec(re.search(r"```python\n(import re, torch, lm_eval.*?)```", open(os.path.join(HERE, "README.md")).read(), re.S).group(1), code)
    lm, line = code["Trained"](base, data, "cpu"), "line 7 the"
    model, greedy = copy.deepcopy(lm.model), lm.model.generate(torch.tensor([list(line.encode())]), 16, temperature=0)[0, len(line):].tolist()
    text = bytes(t for t in greedy if t < 256).decode(errors="replace")          # what an untrained model writes, up to its third character
    (tmp_path / "docs.jsonl").write_text(json.dumps(dict(text=TEXT, q=line, choices=[" cat", " dog sat", text[:1]], label=1)) + "\n")
    common = (f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: '{tmp_path}/docs.jsonl'}}, cache_dir: '{tmp_path}/cache'}}\n"
              "test_split: test\nmetadata: {version: 1}\n")
    for name, kind in dict(
            rolling="loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]",
            choice="multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: label\ndoc_to_choice: choices\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]",
            word="loglikelihood\ndoc_to_text: '{{q}}'\ndoc_to_target: ' cat'\ntarget_delimiter: ''\nmetric_list: [{metric: perplexity, aggregation: perplexity}, {metric: acc}]",
            free="generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: ''\ngeneration_kwargs: {max_gen_toks: 16, until: ['\\n\\n']}\nmetric_list: [{metric: exact_match}]",
            ).items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\noutput_type: {kind}\n{common}")
    out = lm_eval.simple_evaluate(lm, tasks=["rolling", "choice", "word", "free"], task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
                                  bootstrap_iters=0)
    results, samples = out["results"], out["samples"]
    nats = -sum(scored(model, lm.enc, 32, TEXT, whole_last=True))
    assert results["rolling"]["byte_perplexity,none"] == pytest.approx(math.exp(nats / len(TEXT.encode())), rel=1e-5)

    def continuation(choice):                               # in one window: the question and the choice are short
        logp, y = model(torch.tensor([list((line + choice).encode())]))[0][0].log_softmax(-1), list(choice.encode())
        return sum(logp[len(line) - 1 + i, t].item() for i, t in enumerate(y))
    want = [continuation(c) for c in (" cat", " dog sat", text[:1])]
    assert [r[0][0] for r in samples["choice"][0]["resps"]] == pytest.approx(want, rel=1e-5)
    assert [r[0][1] for r in samples["choice"][0]["resps"]] == [False, False, True]
    assert results["word"]["perplexity,none"] == pytest.approx(math.exp(-want[0]), rel=1e-5) and results["word"]["acc,none"] == 0
    assert samples["free"][0]["resps"] == [[text.split("\n\n")[0]]]
    assert lm.continued(line, dict(max_gen_toks=16, until=text[3:5])) == text.split(text[3:5])[0]           # one stop may be a plain string
    assert lm.continued(line, dict(max_gen_toks=16, until=["", text[3:5]])) == text.split(text[3:5])[0]     # an empty one stops nothing
    assert lm.continued("xy" * 30 + line, dict(max_gen_toks=22)).startswith(text)                           # what is left of it: 10 tokens

# ---------------------------------------------------------------- figures
@pytest.fixture(scope="session")
def figures():
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the figures, is optional")
    spec = importlib.util.spec_from_file_location("figures", os.path.join(HERE, "assets", "figures.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def drawn(figures, capsys, *args):
    """Runs the figure command -> printed rows {first word: numbers}, the axes of the figure."""
    figures.plt.close("all")
    figures.main([str(a) for a in args])
    out, png = capsys.readouterr().out, str(args[args.index("--out") + 1]).removesuffix(".png") + ".png"
    pixels = figures.plt.imread(png)
    assert out.endswith(f"-> {png}\n") and pixels.shape[1] > 700 and pixels[..., 0].min() < 0.1 < 0.5 < pixels[..., 0].mean()
    return {z.split()[0]: np.array(re.findall(r"-?\d+\.\d+", z), float) for z in out.splitlines() if re.match(r"\w+ +-?\d\.", z)}, figures.plt.gcf().axes

def test_the_comparison_and_its_figures(data, tmp_path, figures, capsys, monkeypatch):
    modes = "baseline,hyper,attnres,mhar:4,mhar,mhar:16,delta".split(",")
    plain = figures.plt.subplots                            # samples and layout, which other tests see, would take longer than all else
    monkeypatch.setattr(figures.plt, "subplots", lambda *a, layout, **k: plain(*a, **k))
    monkeypatch.setattr(train, "finish", lambda *a: None)
    train.main([*"--scale 100m --lr 1e-2 --warmup_iters 5 --max_iters 20 --scale tiny --n_layer 2 --n_embd 64 --d_ff 64 --block_size 32 --batch_size 2 "
                "--grad_accum 1 --eval_interval 5 --eval_iters 2 --device cpu --seed 1".split(), "--data", data, "--mode", ",".join(modes), "--out", str(tmp_path)])
    table = [z.split() for z in capsys.readouterr().out.splitlines()[-len(modes):]]
    assert [z[0] for z in table] == ["baseline", "hyper", "attnres", "mhar:4", "mhar:8", "mhar:16", "delta:8"] and all(z[-2] == "20" for z in table)
    outs = [str(tmp_path / m.replace(":", "-")) for m in modes]
    assert [z[-1] for z in table] == outs
    _, (left, right) = drawn(figures, capsys, "curves", *outs, "--out", tmp_path / "c.png")
    logs = [train.read_log(z) for z in outs]
    for k, log in enumerate(logs):
        val, tokens = ([r[key] for r in log if "val_loss" in r] for key in ("val_loss", "tokens"))
        assert len(val) == 4 and np.allclose(left.lines[2 * k].get_ydata(), [r["loss"] for r in log]) and np.allclose(left.lines[2 * k + 1].get_ydata(), val)
        assert np.allclose(right.lines[2 * k + 1].get_xdata(), np.array(tokens) / 1e6)
        assert np.allclose(right.lines[2 * k + 1].get_ydata(), np.subtract(val, [r["val_loss"] for r in logs[0] if "val_loss" in r]))
    for ax in (left, right):
        ends = sorted((line.get_ydata()[-1], f"{dict(zip('os^Dv*XP', '●■▲◆▼★✖✚'))[line.get_marker()]} {z[0]}") for z, line in zip(table, ax.lines[1::2]))
        assert [z.get_text() for z in sorted(ax.texts, key=lambda z: z.xyann[1])] == [name for _, name in ends]
        assert ax.get_xlabel() == "training tokens (millions)" and "nats per token" in ax.get_ylabel()
        assert min(np.diff(sorted(z.xyann[1] for z in ax.texts))) > 0.04 * np.ptp(ax.get_ylim())         # names do not overlap
        assert len({(z.get_color(), str(z._dash_pattern), z.get_marker()) for z in ax.lines[1::2]}) == len(modes)
    for m, out in zip(modes, outs):
        command = ["heads", out, "--windows", 2, "--out", tmp_path / "h.png"]
        if m in ("baseline", "hyper"):
            assert f"{m}' has no depth weights" in refused(capsys, figures.main, [str(z) for z in command])
            continue
        rows, axes = drawn(figures, capsys, *command)
        H = {"attnres": 4, "mhar:4": 4, "mhar:16": 16}.get(m, 8)
        assert list(rows) == [*map(str, range(H)), *["mean"] * (m == "attnres"), "all"] and len(axes) == H + 2 * (m == "attnres") + 1 and (rows["all"][:2] > 0).all()

def own_numbers(model, windows, queries=None):
    """What `heads` should find, in NumPy fp64 from the sources alone -> KL [S], and for each half and site the mean weights and their centre."""
    r, sources = model.residual, []
    model.hidden(windows, route=lambda s, *a: sources.append(torch.stack(list(s)).detach().numpy()) or route_ref(s, *a))
    S, sites = r.H if r.H > 1 else 4, []
    for s, q, g in zip(sources, (r.q if queries is None else queries).detach().numpy(), r.g.detach().numpy()):
        k = s / np.sqrt((s ** 2).mean(-1, keepdims=True) + r.eps) * g                                    # [N, W, T, D]
        e = np.exp((k * q).reshape(*s.shape[:3], S, -1).sum(-1))                                         # [N, W, T, S]
        m = (e / e.sum(0)).mean(-1) if r.H > 1 else e.prod(-1) / e.prod(-1).sum(0)
        e = e if r.H > 1 else np.concatenate([e, e.prod(-1, keepdims=True) ** 0.25], -1)                 # the mean of the logits
        a = e / e.sum(0)
        sites.append(((a * np.log(a / m[..., None])).sum(0).mean((0, 1)), a, m))
    kl = np.mean([z[0] for z in sites if len(z[1]) > 1], 0)
    halves = [[(a[:, h].mean((1, 2)), m[:, h].mean((1, 2))) for _, a, m in sites] for h in np.array_split(np.arange(len(windows)), 2)]
    return kl, halves

def randomised_run(mode, data, out, change=lambda r: None, **k):
    """A folder with the checkpoint of a model with random parameters, queries of unequal norm -> the model, fp64."""
    m = randomised(tiny(mode, vocab_size=320, **k), std=0.3)
    m.residual.q.data *= torch.linspace(3, 1, m.residual.q.size(1))
    with torch.no_grad():
        change(m)
    os.makedirs(out, exist_ok=True)
    torch.save(dict(model=m.state_dict(), step=7, config=vars(m.config), args=dict(name=mode, data=data), data=prepare_data.read_meta(data)), f"{out}/ckpt.pt")
    return m

@pytest.mark.parametrize("mode", ["attnres", "mhar", "delta"])
def test_heads_equal_numpy(mode, data, tmp_path, figures, capsys):
    m, ids = randomised_run(mode, data, tmp_path), prepare_data.read_split(data, "val").astype(np.int64)
    x = torch.tensor(np.stack([ids[16 * w:][:16] for w in np.linspace(0, (len(ids) - 1) // 16 - 1, 6).astype(int)]))
    kl, halves = own_numbers(m, x)
    rows, axes = drawn(figures, capsys, "heads", tmp_path, "--windows", 7, "--out", tmp_path / "h.png")          # 7: an even number is read
    dev = [np.concatenate([a - c[:, None] for a, c in half]) for half in halves]
    for h, (k, row) in enumerate(zip(kl, rows.values())):
        want = k, np.abs(sum(dev) / 2)[:, h].max(), np.corrcoef(dev[0][:, h], dev[1][:, h])[0, 1]
        assert np.abs(row[::3] - want).max() < 2e-4 and k > 0.01
    S = len(rows) - 1 - (mode == "attnres")
    dev, kl = [d[:, :S] for d in dev], kl[:S]
    want = kl.mean(), np.abs(sum(dev) / 2).max(), np.corrcoef(dev[0].ravel(), dev[1].ravel())[0, 1]
    assert np.abs(rows["all"][::3] - want).max() < 2e-4 and 0.3 < want[2] < 0.999
    weights = [(p[0] + q[0]) / 2 for p, q in zip(*halves)]  # the panels: mean weights, nothing where there is no source yet
    if mode == "attnres":
        weights = [np.c_[(p[1] + q[1]) / 2, w] for p, q, w in zip(*halves, weights)]
    shared = [z.mean((1, 2)).numpy() for z in m.float().depth_weights(x)]
    for ax, h in zip(axes, range(weights[0].shape[1])):
        image = np.ma.filled(ax.images[0].get_array().astype(float), np.nan)
        assert all(np.allclose(line[:len(w)], w[:, h], atol=1e-5) and np.isnan(line[len(w):]).all() for line, w in zip(image, weights))
        if h == 0 or mode != "attnres":
            assert all(np.allclose(w[:, h], z[:, h], atol=1e-5) for w, z in zip(weights, shared))

def test_heads_refuse_a_changed_formula(data, tmp_path, figures, capsys, monkeypatch):
    real = figures.route_weights                            # here, as if it were changed
    monkeypatch.setattr(figures, "route_weights", lambda s, q, *args: real(s, q / 2, *args))
    for mode in ("attnres", "mhar"):
        randomised_run(mode, data, tmp_path)
        assert "another formula than measure" in refused(capsys, figures.main, ["heads", str(tmp_path), "--windows", "2"])

def test_random_queries_are_the_null(data, tmp_path, figures, capsys):
    def table(mode, change):
        randomised_run(mode, data, tmp_path, change, n_layer=2)
        return drawn(figures, capsys, "heads", tmp_path, "--windows", 4, "--out", tmp_path / "h.png")[0]

    def copies(m):                                          # every source, q and g has equal slices, so that the heads are the same
        for p in (m.embed.weight.T, m.residual.q.T, m.residual.g.T, *(w for b in m.blocks for w in (b.attn.o_proj.weight, b.mlp.down_proj.weight))):
            p[16:] = p[:16]
    rows = table("mhar", copies)
    assert all(rows[z][0] < 1e-4 and rows[z][3] < 1e-4 and rows[z][1] > 0.01 and rows[z][4] > 0.01 for z in rows)

    def one_slice(m):                                       # the one query asks in its first slice alone
        m.residual.q[:, 8:] = 0
    rows = table("attnres", one_slice)
    assert rows["0"][0] < 1e-4 and rows["0"][1] < 1e-4 and all(rows[z][0] > 0.01 and rows[z][1] > 0.01 for z in "123")
    assert np.allclose(rows["1"], rows["2"], atol=1e-4)     # both plain averages
    assert not any(table("delta", lambda m: m.residual.q.zero_())["all"])        # what has not learned has no heads
    sharp = randomised_run("attnres", data, tmp_path, lambda m: m.residual.q.mul_(300)).float()                 # weights that underflow
    kl = torch.stack([z[0] for half in figures.measure(sharp, batch(4, V=257)[0], 2) for z in half])
    assert kl.isfinite().all() and kl.max() > 100

    def random(m):                                          # a random model is its own null; head 0 has ten times the norm
        m.residual.q.normal_(generator=torch.Generator().manual_seed(5))
        m.residual.q *= torch.tensor([0.5, 0.05]).repeat_interleave(16)
    m, x = randomised_run("mhar", data, tmp_path, random), batch(4, V=257)[0]
    kl = torch.stack([z[0] for half in figures.measure(m, x, 64) for z in half[1:]]).mean(0).numpy()             # [1 + 64, 2]
    q = m.residual.q.detach().unflatten(-1, (2, 16))
    noise = torch.randn(64, *q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(6))
    null = np.array([own_numbers(m, x, (z / z.norm(dim=-1, keepdim=True) * q.norm(dim=-1, keepdim=True)).flatten(-2))[0] for z in noise])
    assert (np.abs(null.mean(0) - kl[1:].mean(0)) < 4 * null.std(0) / 32 ** 0.5).all() and (np.abs(null.std(0) / kl[1:].std(0) - 1) < 0.5).all()
    assert (np.abs(kl[0] - kl[1:].mean(0)) < 4 * kl[1:].std(0)).all() and (kl[1:].std(0) < kl[1:].mean(0) / 2).all()

def test_figures_refuse_with_one_sentence(data, tmp_path, figures, capsys):
    def refusal(*args):
        return refused(capsys, figures.main, [*map(str, args), "--out", str(tmp_path / "f.png")])
    run(data, tmp_path / "a", "--max_iters", 2, "--stop_at", 1)
    other = prepare(tmp_path, LINES[:300])
    run(other, tmp_path / "b", "--max_iters", 2, "--stop_at", 1)
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    assert "nowhere/ckpt.pt is missing" in refusal("heads", "nowhere") and "nowhere is no folder of a run" in refusal("curves", a, "nowhere")
    assert "different data" in refusal("curves", a, b) and "f.png" not in os.listdir(tmp_path)
    c.mkdir()
    for name, content in (("config.json", (a / "config.json").read_bytes()), ("log.jsonl", b'{"tokens": 1, "loss": null}\n'), ("ckpt.pt", b"PK")):
        (c / name).write_bytes(content)
        assert "c is no folder of a run" in refusal("curves", c)                 # no log, and then no loss in it
    assert "ckpt.pt is missing or no checkpoint" in refusal("heads", c)
    (tmp_path / "short.txt").write_text("too short")
    assert "short.txt" in refusal("heads", a, "--text", tmp_path / "short.txt") and "--windows is 1" in refusal("heads", a, "--windows", 1)
    assert "nofile" in refusal("heads", a, "--text", "nofile") and "nodata/meta.json" in refusal("heads", a, "--data", "nodata")
    meta = json.loads(open(f"{other}/meta.json").read())
    open(f"{other}/meta.json", "w").write(json.dumps(meta | {"tokenizer": "0"}))
    assert "another tokenizer" in refusal("heads", a, "--data", other)
    (tmp_path / "long.txt").write_text("a longer text " * 20)
    rows, axes = drawn(figures, capsys, "heads", a, "--text", tmp_path / "long.txt", "--data", data, "--out", tmp_path / "f.png")
    assert list(rows) == ["0", "1", "all"]
    _, axes = drawn(figures, capsys, "curves", a, "--out", tmp_path / "f")       # one run without an evaluation, of one step
    assert len(axes) == 1 and axes[0].texts[0].get_text() == "● mhar:2"
    for args in (["curves"], ["heads"], ["heads", a, b], ["mhar", a], ["tails", a]):
        with pytest.raises(SystemExit) as e:
            figures.main([*map(str, args)])
        assert e.value.code == 2 and "Traceback" not in capsys.readouterr().err
    hidden = subprocess.run([sys.executable, "-c", "import sys; sys.modules['matplotlib'] = None; import runpy; runpy.run_path('assets/figures.py')"],
                            cwd=HERE, capture_output=True, text=True)
    assert hidden.returncode == 1 and hidden.stderr == "figures.py: matplotlib is missing; pip install matplotlib\n"

# ---------------------------------------------------------------- README
def test_readme_commands_and_changes(tmp_path, monkeypatch, capsys):
    readme = open(os.path.join(HERE, "README.md")).read()
    commands = [shlex.split(line, comments=True) for block in re.findall(r"```sh\n(.*?)```", readme, re.S) for line in block.splitlines()]
    monkeypatch.chdir(tmp_path)
    done = []
    for c in commands:
        if "train.py" in c:
            done.append(train.parser().parse_args(c[c.index("train.py") + 1:]))
        elif "prepare_data.py" in c:
            with monkeypatch.context() as m:
                m.setattr(prepare_data, "prepare", lambda args, tmp: (_ for _ in ()).throw(ValueError("parsed")))
                assert "parsed" in refused(capsys, prepare_data.main, c[c.index("prepare_data.py") + 1:])
    assert len(done) >= 7 and ["python", "-m", "pytest", "-q"] == commands[1][-4:]
    train.main("--max_iters 2 --eval_interval 1 --eval_iters 1".split())         # the main command on a machine without data
    assert "--- sample" in capsys.readouterr().out and os.listdir("data/stdlib")
    exec(re.search(r"```python\n(import prepare_data.*?)```", readme, re.S).group(1), {})      # text from it
    assert capsys.readouterr().out.startswith("def read(")
    source, x = open(os.path.join(HERE, "mhar.py")).read(), batch()[0]
    assert "Train a changed read with `--kernel eager`" in readme                # the kernels would ignore it
    for old, new in ((".sum(-1).softmax(0)", ".sum(-1).div(0.5).softmax(0)"), ("return route(sources, q[i]", "return route(sources[-8:], q[i]"),
                     ("k = rms_norm(s, g, eps)", "k = rms_norm(s.unflatten(-1, (H, -1)), g.view(H, -1), eps).flatten(-2)")):
        assert source.count(old) == 1 and new.replace("0.5", "tau") in readme
        changed = {"__name__": "changed"}
        exec(compile(source.replace(old, new), "changed", "exec"), changed)
        model, plain = (f(tiny("mhar", n_layer=6)) for f in (changed["GPT"], GPT))
        with torch.no_grad():
            [p.normal_(std=0.3) for p in model.parameters()]
        plain.load_state_dict(model.state_dict())
        assert rel(model(x)[0], plain(x)[0]) > 1e-3

@kernel
def test_readme_router():
    code = {}
    exec(re.search(r"```python\n(import torch.*?)```", open(os.path.join(HERE, "README.md")).read(), re.S).group(1), code)
    torch.manual_seed(0)
    stack = code["Stack"]([torch.nn.Sequential(torch.nn.RMSNorm(16), torch.nn.Linear(16, 16)) for _ in range(3)], 16, 4).to(DEVICE)
    with torch.no_grad():
        stack.q.normal_()
    x, sources = torch.randn(1, 3, 16, device=DEVICE), []
    for f in (lambda h: x, *stack.layers):
        sources.append(f(h) if sources else x)              # noqa: F821
        h = route_ref(sources, stack.q[len(sources) - 1], stack.g[len(sources) - 1], 4)
    assert rel(stack(x), h) < 1e-6
    stack(x).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in stack.parameters())

@pytest.mark.parametrize("mode", MODES)
def test_whole_model_compiles_without_a_break(mode):
    m, (x, y) = randomised(tiny(mode, n_layer=1 + (mode == "delta"))), batch()
    a = gradients(m, x, y)
    m.compile(backend="aot_eager", fullgraph=True)
    b = gradients(m, x, y)
    assert all(rel(b[n], a[n]) < 1e-12 for n in a)
