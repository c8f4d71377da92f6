"""
The whole suite: python -m pytest -q. It needs no GPU and no network; what needs an optional package says so when skipped.

Identities and independent references rather than snapshots. Parameters that start at zero are randomised before anything is
compared, and every gradient is compared.
"""
import copy
import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiktoken
import torch

import prepare_data
import train
from mhar import MODES, SCALES, GPT, GPTConfig, convert_to_delta, init_weights, route_ref, route_weights

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)

def tiny(mode, **k):
    fields = dict(vocab_size=97, n_layer=3, n_embd=32, n_head=4, n_kv_head=2, d_ff=64, route_heads=2, block_size=16, delta_blocks=2)
    return GPTConfig(mode=mode, **{**fields, **k})

def randomised(config, std=0.05, seed=0):
    """A model in fp64 whose parameters, zeros and ones included, have moved."""
    torch.manual_seed(seed)
    model = GPT(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(std * torch.randn_like(p))
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
    for b in range(B):
        for t in range(T):
            s = V[:, b, t]
            k = s / np.sqrt((s ** 2).mean(-1, keepdims=True) + eps) * g
            for h in range(H):
                cut = slice(h * d, (h + 1) * d)
                logit = np.array([q[cut] @ k[n, cut] for n in range(N)])
                a = np.exp(logit - logit.max()) / np.exp(logit - logit.max()).sum()
                out[b, t, cut] = sum(a[n] * s[n, cut] for n in range(N))
    return out

@pytest.mark.parametrize("D, H", [(32, 1), (32, 4), (33, 3), (24, 24)])
def test_read_equals_numpy(D, H):
    rng = np.random.default_rng(0)
    V, q, g = rng.normal(size=(5, 2, 3, D)), rng.normal(size=D), 1 + 0.1 * rng.normal(size=D)
    V[..., : D // 4] *= 20                                  # so that normalising each slice, the other reading, would show
    want = numpy_read(V, q, g, H, 1e-6)
    args = [torch.tensor(z) for z in (V, q, g)]
    assert np.abs(route_ref(*args, H).numpy() - want).max() < 1e-12
    assert np.abs(route_ref(list(args[0]), *args[1:], H).numpy() - want).max() < 1e-12
    fp32 = route_ref(*(z.float() for z in args), H)
    assert rel(fp32, torch.tensor(want)) < 1e-6
    low = route_ref(args[0].bfloat16(), args[1].float(), args[2].float(), H)
    exact = route_ref(args[0].bfloat16().double(), args[1].float().double(), args[2].float().double(), H)
    assert low.dtype == torch.bfloat16 and torch.allclose(low.double(), exact, rtol=2 ** -8, atol=1e-6)     # one rounding

def test_read_gradcheck():
    V, q, g = torch.randn(4, 1, 2, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    for H in (1, 2, 3):
        assert torch.autograd.gradcheck(lambda V, q, g, H=H: route_ref(V, q, g, H), [z.requires_grad_() for z in (V, q, g)])

def test_one_source_is_returned_and_gives_exact_zeros():
    s, q, g = (torch.randn(*n, requires_grad=True) for n in ((1, 2, 3, 8), (8,), (8,)))
    out, do = route_ref(s, q, g, 2), torch.randn(2, 3, 8)
    out.backward(do)
    assert torch.equal(out, s[0]) and torch.equal(s.grad[0], do) and not q.grad.any() and not g.grad.any()

def test_heads_are_only_a_reshape():
    """If all slices of every source are equal, one head whose query is q1 in each slice is H heads with q_h = H q1."""
    H, d = 4, 8
    s, q1, g = torch.randn(5, 2, 3, d).double(), torch.randn(d).double(), torch.ones(H * d).double()
    V = s.repeat(1, 1, 1, H)
    one, many = route_ref(V, q1.repeat(H), g, 1), route_ref(V, (H * q1).repeat(H), g, H)
    assert rel(many, one) < 1e-14
    count = [GPT(tiny("mhar", route_heads=h)).num_params() for h in (1, 2, 32)]
    assert count[0] == count[1] == count[2]

def test_uniform_mean_at_zero_query_and_sharp_at_large():
    V = torch.randn(6, 1, 2, 8).double()
    g = torch.ones(8).double()
    assert torch.allclose(route_ref(V, 0 * g, g, 4), V.mean(0))
    q = torch.zeros(8).double()
    q[0] = 1e6                                              # head 0 picks the source with the largest first component of k
    k = V[..., 0] / V.square().mean(-1).sqrt()
    assert torch.equal(route_weights(V, q, g, 4)[..., 0].argmax(0), k.argmax(0))

@pytest.mark.parametrize("bad, word", [(dict(H=3), "3 routing heads do not divide the width 8"), (dict(q=torch.zeros(4)), r"\(8,\)"),
                                       (dict(sources=[]), "at least one source"), (dict(H=0), "0 routing heads")])
def test_read_refuses(bad, word):
    args = dict(sources=torch.randn(2, 1, 1, 8), q=torch.zeros(8), g=torch.ones(8), H=2)
    with pytest.raises(ValueError, match=word):
        route_ref(**{**args, **bad})

def test_read_under_autocast_stays_fp32():
    V, q, g = torch.randn(5, 2, 3, 32), 3 * torch.randn(32), torch.ones(32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(route_ref(V, q, g, 4), route_ref(V.clone(), q, g, 4)) and route_ref(V, q, g, 4).dtype == torch.float32
        inside = route_ref(V, q, g, 4)
    assert torch.equal(inside, route_ref(V, q, g, 4))

# ---------------------------------------------------------------- the five modes
def rolled_out(m, idx):
    """Every mode again, with all sources and sites written out from the paper, apart from mhar.py's streams. fp64."""
    c, r, eps = m.config, m.residual, m.config.norm_eps
    rope = m.rope(torch.arange(idx.size(1)))
    f = [z for b in m.blocks for z in (lambda h, b=b: b.attn(h, rope), lambda h, b=b: b.mlp(h))]
    L, e = c.n_layer, m.embed(idx)

    def read(sources, i):
        return torch.tensor(numpy_read(torch.stack(sources).detach().numpy(), *(z[i].detach().numpy() for z in (r.q, r.g)),
                                       c.route_heads, eps))
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
            finished = [b for b in range(n) if bounds[b + 1] * 2 <= i]
            deltas = [ends[bounds[b + 1]] - ends[bounds[b]] for b in finished]
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
        m = randomised(tiny(mode, n_layer=n_layer, delta_blocks=blocks), std=0.1)
        x, _ = batch(T=6)
        assert rel(m(x)[0], rolled_out(m, x)) < 1e-10

def test_one_head_is_attention_residuals_bit_for_bit():
    a, m = GPT(tiny("attnres")), GPT(tiny("mhar", route_heads=1))
    with torch.no_grad():
        [p.add_(0.1 * torch.randn_like(p)) for p in a.parameters()]
    m.load_state_dict(a.state_dict())
    (x, y), single = batch(), lambda s, q, g, H, eps: _single(s, q, g, eps)
    assert torch.equal(a(x)[0], m(x)[0])
    ga, gm = gradients(a, x, y), gradients(m, x, y)
    assert all(torch.equal(ga[n], gm[n]) for n in ga)
    assert torch.equal(a.hidden(x, route=single), a.hidden(x))          # against a read written for one query

def _single(sources, q, g, eps):
    s = torch.stack(list(sources))
    k = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps) * g
    a = (k * q).sum(-1).softmax(0)
    return (a.unsqueeze(-1) * s).sum(0)

@pytest.mark.parametrize("mode, k", [("attnres", {}), *(("mhar", dict(route_heads=H)) for H in (1, 2, 8, 32))])
def test_zero_query_is_the_baseline(mode, k):
    base, m = GPT(tiny("baseline", norm_eps=1e-12)).double(), GPT(tiny(mode, norm_eps=1e-12, **k)).double()
    m.load_state_dict(base.state_dict(), strict=False)
    x, _ = batch()
    assert rel(m(x)[0], base(x)[0]) < 1e-5
    with torch.no_grad():
        m.residual.q[-1].normal_(std=3.0)                   # the final read is part of it
    assert rel(m(x)[0], base(x)[0]) > 1e-4

@pytest.mark.parametrize("n", [1, 2, 4])
def test_hyper_starts_as_the_baseline(n):
    base, m = GPT(tiny("baseline", norm_eps=1e-12)), GPT(tiny("hyper", norm_eps=1e-12, hc_streams=n))
    m.load_state_dict(base.state_dict(), strict=False)
    x, _ = batch()
    d = (m(x)[0] - base(x)[0]).abs().max()
    assert d == 0 if n == 1 else d < 1e-4

def test_hyper_mixing_matters_and_every_parameter_gets_a_gradient():
    m = randomised(tiny("hyper"))
    x, y = batch()
    g, before = gradients(m, x, y), m(x)[0]
    for name, grad in g.items():
        rows = grad.flatten(1).abs().amax(1) if name.startswith("residual") and grad.dim() > 1 else grad.abs()
        assert (rows > 0).all() or not name.startswith("residual"), name
        assert grad.any(), name
    for i, j in ((0, 1), (3, 2)):
        with torch.no_grad():
            m.residual.static_A[0, i, 1 + j] += 0.1
        assert (m(x)[0] - before).abs().max() > 1e-6

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conversion_to_delta_is_exact_then_learns(dtype, tmp_path):
    base = GPT(tiny("baseline"))
    with torch.no_grad():
        [p.add_(0.1 * torch.randn_like(p)) for p in base.parameters()]
    base = base.to(dtype)
    delta = convert_to_delta(copy.deepcopy(base), route_heads=4, delta_blocks=2)
    with torch.no_grad():
        delta.null_parameters()[0].normal_()                # the gate alone must do it
    x, y = batch()
    assert torch.equal(base(x)[0], delta(x)[0]) and delta.config.mode == "delta"
    torch.save(delta.state_dict(), tmp_path / "d.pt")
    again = GPT(delta.config).to(dtype)
    again.load_state_dict(torch.load(tmp_path / "d.pt", weights_only=True))
    assert torch.equal(base(x)[0], again(x)[0])
    if dtype == torch.float32:                              # from the true start: the gate first, then the rest
        init_weights(again.residual)
        start, opt = copy.deepcopy(again.residual), again.configure_optimizer(1e-2, 0.1)
        for _ in range(5):
            gradients(again, x, y)
            opt.step()
        moved = {n: (p != dict(start.named_parameters())[n]).flatten(1).any(1).all() for n, p in again.residual.named_parameters()}
        assert all(moved.values()), moved
    with pytest.raises(ValueError, match="mhar"):
        convert_to_delta(GPT(tiny("mhar")))

@pytest.mark.parametrize("mode", MODES)
def test_causal(mode):
    m = randomised(tiny(mode))
    x, _ = batch()
    z = x.clone()
    z[:, 9:] = (z[:, 9:] + 1) % 97
    a, b = m(x)[0], m(z)[0]
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.equal(a[:, 9], b[:, 9])

@pytest.mark.parametrize("mode", MODES)
def test_cached_generation_equals_recomputation(mode):
    m = randomised(tiny(mode), std=0.2).float()
    x, _ = batch(T=5)
    kv = [{} for _ in m.blocks]
    cached = torch.cat([m.hidden(x[:, :3], kv), m.hidden(x[:, 3:4], kv), m.hidden(x[:, 4:], kv)], 1)
    assert (cached - m.hidden(x)).abs().max() < 1e-5
    out, again = m.generate(x, 20, temperature=0), x        # past block_size, 16
    for _ in range(20):
        again = torch.cat((again, m(again[:, -16:])[0][:, -1:].argmax(-1)), 1)
    assert torch.equal(out, again)
    one = [m.generate(x, 8, 1.0, 5, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(one[0], one[1]) and not torch.equal(one[0], one[2])

@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_recomputes(mode):
    a, b, n, reads = randomised(tiny(mode)), randomised(tiny(mode, grad_checkpoint=True)), [], []
    b.blocks[1].attn.register_forward_pre_hook(lambda *_: n.append(1))
    x, y = batch()
    ga, gb = gradients(a, x, y), gradients(b, x, y)
    assert len(n) == 2 and all(rel(gb[k], ga[k]) < 1e-12 for k in ga)
    b.hidden(x, route=lambda *z: (reads.append(1), route_ref(*z))[1]).sum().backward()
    sites = {"attnres": 7, "mhar": 7, "delta": 6}.get(mode, 0)
    assert len(reads) == 2 * sites                          # the reads are recomputed too

@pytest.mark.parametrize("mode", MODES)
def test_compute_dtype(mode):
    m, seen = GPT(tiny(mode)), []
    for f in (b.attn for b in m.blocks):
        f.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        m(*batch())[1].backward()
    assert set(seen) == {torch.bfloat16} and {p.grad.dtype for p in m.parameters()} == {torch.float32}
    if mode == "hyper":
        m.residual.maps = lambda X, i, maps=m.residual.maps: [seen.append(z.dtype) or z for z in (X, *maps(X, i))][1:]
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            m(batch()[0])
        assert seen.count(torch.float32) == 18              # X, A, b at each of six sublayers

def test_first_site_has_zeros_not_none():
    m = GPT(tiny("mhar"))
    g = gradients(m, *batch())["residual.q"]
    assert not g[0].any() and all(row.any() for row in g[1:])

def test_sources_are_raw_sublayer_outputs():
    for mode, k in (("baseline", 1), ("mhar", 7)):
        m, h, (x, _) = GPT(tiny(mode)), [], batch()
        for f in (f for b in m.blocks for f in (b.attn, b.mlp)):
            f.register_forward_hook(lambda _, args, out: torch.zeros_like(out))
        m.final_norm.register_forward_pre_hook(lambda _, args, h=h: h.append(args[0]))
        m(x)
        assert (h[0] - m.embed(x) / k).abs().max() < 1e-8

def test_depth_weights():
    m = randomised(tiny("mhar"), std=0.3).float()
    x, _ = batch()
    w = m.depth_weights(x)
    assert [tuple(a.shape) for a in w] == [(n, 2, 16, 2) for n in range(1, 8)] and {a.dtype for a in w} == {torch.float32}
    assert all((a.sum(0) - 1).abs().max() < 1e-5 for a in w) and w[6].std(0).max() > 0.01
    assert [len(a) for a in GPT(tiny("delta", n_layer=4, delta_blocks=2)).depth_weights(x)] == [2, 2, 2, 2, 3, 3, 3, 3]
    for mode in ("baseline", "hyper"):
        with pytest.raises(ValueError, match=mode):
            GPT(tiny(mode)).depth_weights(x)

def test_parameter_counts():
    want = {"100m": (115_554_304, 25_600), "350m": (533_123_072, 100_352), "1b": (1_079_313_280, 186_880)}
    for scale, (count, extra) in want.items():
        with torch.device("meta"):
            n = {m: GPT(GPTConfig(m, 151_936, **SCALES[scale])).num_params() for m in ("baseline", "attnres", "mhar")}
        assert n["baseline"] == count and n["mhar"] == n["attnres"] == count + extra

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

def test_flops():
    for mode, products in (("baseline", 0), ("attnres", 2 * 28), ("mhar", 2 * 28), ("delta", 2 * (2 + 2 + 3 + 3 + 3 + 3)),
                           ("hyper", 6 * (24 + 20 + 4))):
        c = tiny(mode, delta_blocks=2)
        m = GPT(c)
        assert m.estimate_flops() == 6 * m.num_params() + 6 * 3 * 4 * 8 * 16 + 6 * 32 * products == train.flops_per_token(c)

def test_rope_survives_half_precision():
    m = GPT(tiny("baseline", block_size=16384, rope_theta=1e6))
    want = torch.tensor([math.cos(15962 * 1e6 ** (-i / 4)) for i in range(4)], dtype=torch.float64)
    for z in (m, copy.deepcopy(m).bfloat16()):
        assert (z.rope_cos(15962).double() - want).abs().max() < 4e-3
    assert not any("rope" in k for k in m.state_dict())

@pytest.mark.parametrize("k, words", [(dict(route_heads=5), "32.*5"), (dict(n_kv_head=3), "4.*3"), (dict(n_head=5, n_kv_head=5), "32.*5"),
                                      (dict(route_heads=0), "route_heads is 0"), (dict(mode="resnet"), "resnet.*baseline"),
                                      (dict(kernel="fast"), "fast.*eager"), (dict(head_dim=7), "head_dim is 7")])
def test_config_refuses(k, words):
    with pytest.raises(ValueError, match=words):
        tiny(**{"mode": "mhar", **k})

def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="17 .* 16"):
        GPT(tiny("mhar"))(torch.zeros(1, 17, dtype=torch.int64))

@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled GPU code needs a GPU")
@pytest.mark.parametrize("mode", MODES)
def test_compiled_gradients_on_gpu(mode):
    m = GPT(GPTConfig(mode, 512, 256, 3, 8, 4, 512, 512)).cuda()
    x, y = (z.cuda() for z in batch(8, 256, V=512))
    a = gradients(m, x, y)
    m.compile()
    b = gradients(m, x, y)
    assert all(rel(b[n], a[n]) < 1e-4 if a[n].any() else not b[n].any() for n in a)

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
    enc, ids = prepare_data.read_encoding(folder), prepare_data.read_split(folder, split).tolist()
    docs, start = [], 0
    for i, t in enumerate(ids):
        if t == enc.eot_token:
            docs.append(enc.decode_bytes(ids[start:i]))
            start = i + 1
    assert start == len(ids)
    return docs

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

def test_workers_and_start_method_do_not_matter(tmp_path):
    one = prepare(tmp_path, [z * 600 for z in LINES[:400]], name="one")
    code = ("import multiprocessing as mp, sys, runpy; mp.set_start_method('spawn'); sys.argv = ['prepare_data.py', *sys.argv[1:]]; "
            "runpy.run_path('prepare_data.py', run_name='__main__')")
    subprocess.run([sys.executable, "-c", code, "--input", str(tmp_path / "one.jsonl"), "--out", str(tmp_path / "three"), "--encoding", "bytes",
                    "--val_frac", "0.1", "--workers", "3"], cwd=HERE, check=True)
    for f in ("train.bin", "val.bin", "meta.json"):
        assert open(f"{one}/{f}", "rb").read() == open(tmp_path / "three" / f, "rb").read()

@pytest.mark.parametrize("n", [1, 2, 5])
def test_empty_side_is_refused_with_what_works(tmp_path, capsys, n):
    docs = [f"doc-{i}-end" for i in range(n)]
    message = refused(capsys, prepare, tmp_path, docs, val_frac=0.0001)
    assert f"{n} document" in message and os.listdir(tmp_path) == ["d.jsonl"]
    if n == 1:
        assert len(texts(prepare(tmp_path, docs, val_frac=0), "train")) == 1
    else:
        works = re.search(r"works is (\S+)", message).group(1)
        d = prepare(tmp_path, docs, val_frac=works)
        assert len(texts(d, "val")) == 1 and len(texts(d, "train")) == n - 1
        refused(capsys, prepare, tmp_path, docs, name="e", val_frac=f"{float(works) - 2e-6:.7f}")

def test_input_kinds(tmp_path, capsys):
    src = tmp_path / "src"
    src.mkdir()
    (src / "a.md").write_bytes(b"# head\r\n\xe2\x82\xac")
    (src / "b.py").write_bytes(b"\xef\xbb\xbfpass\n")      # a byte-order mark is not text
    (src / "c.bin").write_bytes(b"\0")
    with gzip.open(src / "d.jsonl.gz", "wt") as f:
        f.write('{"text": "zip"}\n\n{"text": "\\ud800!", "other": 1}\n{"text": ""}\n')
    os.symlink(src / "a.md", src / "z.md")                  # the same file once
    want = ["# head\r\n\u20ac", "pass\n", "zip", "\ufffd!"]
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is optional") if "CI" not in os.environ else __import__("pyarrow")
    import pyarrow.parquet as pq
    pq.write_table(pyarrow.table({"text": ["par", "quet"], "n": [1, 2]}), src / "e.parquet")
    d = prepare(tmp_path, src, val_frac=0)
    assert [z.decode() for z in texts(d, "train")] == want + ["par", "quet"]
    meta = prepare_data.read_meta(d)
    assert meta["replaced"] == 1 and meta["blank"] == 2 and "1 files with other endings" in capsys.readouterr().err
    assert "'body'" in refused(capsys, prepare, tmp_path, src / "e.parquet", name="f", text_key="body")

@pytest.mark.parametrize("name, content, words", [
    ("j.jsonl", b'{"text":"a"}\n{"text":"b"\n', ["j.jsonl:2", "delimiter"]), ("j.jsonl", b'{"text":"a"}\n{"body":"b"}\n', ["j.jsonl:2", "body", "--text_key"]),
    ("j.jsonl", b'{"text":7}\n', ["j.jsonl:1", "7"]), ("j.jsonl", b"[1]\n", ["j.jsonl:1"]), ("b.txt", b"bad \xff", ["b.txt", "position 4", "--errors"]),
    ("v.txt", b"", ["no text"]), ("x.zip", b"a", ["x.zip", ".jsonl"]), ("t.jsonl.gz", gzip.compress(b'{"text":"a"}\n' * 9)[:-9], ["t.jsonl.gz"])])
def test_bad_input_is_refused(tmp_path, capsys, name, content, words):
    (tmp_path / name).write_bytes(content)
    message = refused(capsys, prepare, tmp_path, tmp_path / name)
    assert all(w in message for w in words) and os.listdir(tmp_path) == [name]

def test_bad_bytes_can_be_replaced(tmp_path):
    (tmp_path / "b.txt").write_bytes("\ufffd bad \xff\xfe".encode("latin-1", "replace").replace(b"?", b"\xef\xbf\xbd"))
    d = prepare(tmp_path, tmp_path / "b.txt", val_frac=0, errors="replace")
    assert prepare_data.read_meta(d)["replaced"] == 2 and texts(d, "train") == ["\ufffd bad \ufffd\ufffd".encode()]

def test_existing_output_is_kept(tmp_path, capsys):
    d = prepare(tmp_path, LINES[:50])
    before = open(f"{d}/train.bin", "rb").read()
    assert "exists" in refused(capsys, prepare, tmp_path, LINES[50:99]) and open(f"{d}/train.bin", "rb").read() == before

def test_token_width_follows_the_vocabulary():
    for n, dtype in ((257, np.uint16), (65536, np.uint16), (65537, np.uint32), (200_019, np.uint32)):
        assert prepare_data.token_dtype(n) == dtype and np.array([n - 1]).astype(prepare_data.token_dtype(n))[0] == n - 1

def test_encoding_without_network_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "cl100k_base", raising=False)
    message = refused(capsys, prepare, tmp_path, LINES[:9], encoding="cl100k_base")
    assert "cl100k_base.tiktoken" in message and "9b5ad71b2ce5302211f9c61530b329a4922fc6a4" in message and "TIKTOKEN_CACHE_DIR" in message
    assert "o200k_base" in refused(capsys, prepare, tmp_path, LINES[:9], encoding="o300k")
    assert not os.path.exists(tmp_path / "d")

AWKWARD = ["about <|endoftext|> and <|fim_prefix|> marks", "x" * 300 + " " * 300, "na\u00efve \u20ac \u3042\u3042 \U0001f600 cafe\u0301", "12345 1,000.5",
           "they're WE'LL it's\n\n  \t indented\r\n", "  two  spaces ", "\u0e01\u0e34\u0e19 <think>"]

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
    tok.train_from_iterator(corpus, tk.trainers.BpeTrainer(vocab_size=900, special_tokens=[eot], initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet()))
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
    (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"), (lambda t: t.update(normalizer={"type": "NFKC"}), "NFKC"),
    (lambda t: t["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space"), (lambda t: t.update(added_tokens=[]), "endoftext"),
    (lambda t: t["model"].update(type="Unigram"), "Unigram"), (lambda t: t.pop("model"), "model"), (lambda t: t["model"]["merges"].reverse(), "order")])
def test_tokenizer_json_refuses(tmp_path, capsys, change, word):
    byte = [chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]] + [chr(256 + i) for i in range(68)]
    spec = dict(added_tokens=[dict(id=0, content="<|endoftext|>")], normalizer=None, pre_tokenizer=dict(type="ByteLevel", add_prefix_space=False, use_regex=True),
                model=dict(type="BPE", vocab={**{c: i + 1 for i, c in enumerate(byte)}, "ab": 257, "abc": 258}, merges=["a b", "ab c"]))
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    assert prepare_data.get_encoding(str(path)).encode("abcab") == [258, 257]
    change(spec)
    path.write_text(json.dumps(spec))
    assert word in refused(capsys, prepare, tmp_path, LINES[:9], encoding=path)

def real_encodings():
    """Folders of real ranks, where optional packages brought them: llama-index-core (cl100k, o200k) and dashscope (Qwen)."""
    import importlib.util as u
    found = {n: (u.find_spec(n).submodule_search_locations or [None])[0] for n in ("llama_index", "dashscope") if u.find_spec(n)}
    cache = os.path.join(found["llama_index"], "core", "_static", "tiktoken_cache") if "llama_index" in found else None
    return cache, os.path.join(found["dashscope"], "resources", "qwen.tiktoken") if "dashscope" in found else None

@pytest.mark.skipif(real_encodings()[0] is None, reason="llama-index-core, which carries real ranks, is optional")
def test_real_encodings(tmp_path, monkeypatch):
    cache = real_encodings()[0]
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", cache)
    runs = AWKWARD + [c * 100_000 for c in (" ", "a", "^", "\u3042")] + [" " * 1_000_000]      # o200k's pattern panics on the last one
    for name, eot in (("cl100k_base", 100257), ("o200k_base", 199999)):
        d = prepare(tmp_path, runs, name=name, encoding=name, val_frac=0)
        t = prepare_data.read_split(d, "train")
        assert (t == eot).sum() == len(runs) and [z.decode() for z in texts(d, "train")] == runs and t.dtype == np.uint32
    ranks = tmp_path / "ranks.tiktoken"                     # the rank file alone gives the same tokens
    ranks.write_bytes(open(os.path.join(cache, "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"), "rb").read())
    mine, named = prepare_data.get_encoding(str(ranks)), tiktoken.get_encoding("cl100k_base")
    assert all(mine.encode_ordinary(z) == named.encode_ordinary(z) for z in AWKWARD + LINES[:99]) and mine.eot_token == 100257

@pytest.mark.skipif(real_encodings()[1] is None, reason="dashscope, which carries Qwen's ranks, is optional")
def test_qwen_rank_file():
    enc = prepare_data.get_encoding(real_encodings()[1])
    assert enc.eot_token == 151643 and enc.encode_ordinary("12345") == [16, 17, 18, 19, 20]     # one token a digit
    assert all(enc.decode(enc.encode_ordinary(z)) == z for z in AWKWARD)

# ---------------------------------------------------------------- trainer
TINY = ("--n_layer 2 --n_embd 64 --n_head 4 --n_kv_head 2 --d_ff 128 --route_heads 2 --block_size 32 --batch_size 4 --grad_accum 2 "
        "--warmup_iters 2 --device cpu --dtype float32 --no_compile --seed 1 --eval_interval 0").split()

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data"), LINES)

def run(data, out, *flags, mode="mhar"):
    train.main(["--data", data, "--mode", mode, "--out", str(out), *TINY, *map(str, flags)])
    return train.read_log(out)

def torchrun(n, data, out, *flags, mode="mhar"):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", "train.py", "--data", data, "--mode", mode]
    subprocess.run([*command, "--out", str(out), *TINY, *map(str, flags)], cwd=HERE, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
                   stdout=subprocess.DEVNULL)
    return train.read_log(out)

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
    loader = train.Loader(tmp_path / "t.bin", np.uint16, block=10, batch=3, seed=0)
    x, y = (torch.cat(z) for z in zip(*map(loader.microbatch, range(100))))      # three epochs of 100 windows, no batch fits
    assert torch.equal(y, x + 1)
    epochs = [x[i:i + 100, 0].tolist() for i in (0, 100, 200)]
    assert all(sorted(e) == list(range(0, 1000, 10)) for e in epochs) and epochs[0] != epochs[1] != epochs[2]
    again = train.Loader(tmp_path / "t.bin", np.uint16, block=10, batch=6, seed=0)
    assert torch.equal(again.microbatch(49)[0], x[294:])    # a pure function, whatever came before and however it is cut
    other = train.Loader(tmp_path / "t.bin", np.uint16, block=10, batch=6, seed=1)
    assert not torch.equal(other.microbatch(0)[0], x[:6])
    with pytest.raises(ValueError, match="1000.*vocab_size is 500"):
        [train.Loader(tmp_path / "t.bin", np.uint16, 10, 100, 0, vocab_size=500).microbatch(0)]

def test_resume_is_a_continuation(data, tmp_path):
    whole = run(data, tmp_path / "s", "--max_iters", 12, "--eval_interval", 4)
    run(data, tmp_path / "p", "--max_iters", 12, "--stop_at", 5, "--eval_interval", 4)
    with open(tmp_path / "p" / "log.jsonl", "a") as f:      # a run that died after its last checkpoint
        f.write(json.dumps(dict(whole[5], loss=9.9)) + "\n")
    train.main(["--data", data, "--out", str(tmp_path / "p"), "--resume"])       # every setting comes from the checkpoint
    part, (a, b) = train.read_log(tmp_path / "p"), (checkpoint(tmp_path / z) for z in "sp")
    assert losses(part) == losses(whole) and len(whole) == 12
    assert [r.get("val_loss") for r in part] == [r.get("val_loss") for r in whole] and sum("val_loss" in r for r in whole) == 3
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"]) and a["step"] == 12
    assert losses(run(data, tmp_path / "p", "--resume", "--max_iters", 14))[:12] == losses(whole)      # a longer run goes on
    assert not any(k.startswith(("_orig_mod.", "module.")) for k in a["model"])
    GPT(GPTConfig(**a["config"])).load_state_dict(a["model"])

@pytest.mark.parametrize("flags, words", [(["--n_layer", 3], "n_layer 2 -> 3"), (["--seed", 2], "seed 1 -> 2"), (["--grad_accum", 4], "8 -> 16"),
                                          (["--data", "other"], "sha256"), (["--mode", "attnres"], "mode mhar -> attnres"),
                                          (["--max_iters", 1], "at step 2"), (["--decay", "matrices"], "decay all -> matrices")])
def test_resume_refuses_another_run(data, tmp_path, capsys, flags, words):
    run(data, tmp_path / "r", "--max_iters", 2)
    run(data, tmp_path / "r", "--max_iters", 2, "--overwrite")                   # must not be remembered
    if "other" in flags:
        flags = ["--data", prepare(tmp_path, LINES[:3000], name="other")]
    argv = ["--data", data, "--mode", "mhar", "--out", str(tmp_path / "r"), *TINY, "--resume", *map(str, flags)]
    assert words in refused(capsys, train.main, argv)
    assert "--overwrite" in refused(capsys, run, data, tmp_path / "r")           # and nothing is overwritten unasked

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves(data, tmp_path, number):
    argv = [sys.executable, "train.py", "--data", data, "--out", str(tmp_path / "i"), *TINY, "--max_iters", "100000"]
    p = subprocess.Popen(argv, cwd=HERE, stdout=subprocess.DEVNULL)
    while not os.path.exists(tmp_path / "i" / "log.jsonl") or len(train.read_log(tmp_path / "i")) < 3:
        time.sleep(0.1)
    p.send_signal(number)
    assert p.wait(20) == 128 + number
    n = checkpoint(tmp_path / "i")["step"]
    log = run(data, tmp_path / "i", "--resume", "--max_iters", 100000, "--stop_at", n + 2)
    assert [r["iter"] for r in log] == list(range(n + 2)) and os.listdir(tmp_path / "i").count("ckpt.pt.tmp") == 0

def test_damaged_files_are_named(data, tmp_path, capsys):
    d = prepare(tmp_path, LINES[:500], name="short")
    with open(f"{d}/train.bin", "r+b") as f:
        f.truncate(1000)
    assert "train.bin has 1000 bytes" in refused(capsys, run, d, tmp_path / "o")
    d = prepare(tmp_path, LINES[:500], name="meta")
    with open(f"{d}/meta.json", "w") as f:
        f.write("{}")
    assert "meta.json" in refused(capsys, run, d, tmp_path / "o")
    whole = losses(run(data, tmp_path / "r", "--max_iters", 4))
    run(data, tmp_path / "p", "--max_iters", 4, "--stop_at", 2)
    with open(tmp_path / "p" / "log.jsonl", "a") as f:
        f.write('{"iter": 2, "lo')                          # a full disk
    assert losses(run(data, tmp_path / "p", "--resume", "--max_iters", 4)) == whole
    with open(tmp_path / "p" / "ckpt.pt", "r+b") as f:
        f.truncate(10000)
    assert "ckpt.pt is damaged" in refused(capsys, run, data, tmp_path / "p", "--resume", "--max_iters", 6)
    assert losses(run(data, tmp_path / "p", "--overwrite", "--max_iters", 4)) == whole

def test_modes_that_had_not_started_take_the_settings_of_the_others(data, tmp_path):
    run(data, tmp_path / "o" / "baseline", "--max_iters", 3, mode="baseline")
    train.main(["--data", data, "--mode", "baseline,mhar:4", "--out", str(tmp_path / "o"), "--resume"])
    a, b = (json.load(open(tmp_path / "o" / m / "config.json")) for m in ("baseline", "mhar-4"))
    assert {k for k in a["model"] if a["model"][k] != b["model"][k]} == {"mode", "route_heads"}
    assert {k for k in a["args"] if a["args"][k] != b["args"].get(k)} <= {"mode", "out", "name", "route_heads", "resume", "device"}

def test_evaluation_changes_nothing(data, tmp_path):
    a = run(data, tmp_path / "a", "--max_iters", 6)
    b = run(data, tmp_path / "b", "--max_iters", 6, "--eval_interval", 2, "--eval_iters", 3)
    c = run(data, tmp_path / "c", "--max_iters", 6, "--eval_interval", 3, "--eval_iters", 1)
    assert losses(a) == losses(b) == losses(c) and [r["iter"] for r in b if "val_loss" in r] == [1, 3, 5]
    train.main(["--data", data, "--out", str(tmp_path / "b"), "--eval_only"])

def test_evaluation_is_the_mean_over_fixed_windows(data):
    model = GPT(GPTConfig("mhar", 320, 32, 1, 2, 2, 32, 32, route_heads=2))
    loader = train.Loader(f"{data}/val.bin", np.uint16, 32, 4, 0)
    for n in (8, 7, 10**9):                                 # whole batches, a small last one, the whole split
        got = [train.evaluate(model, loader, n, torch.device("cpu"), lambda: torch.autocast("cpu", enabled=False)) for _ in range(2)]
        at = np.linspace(0, loader.windows - 1, min(n, loader.windows)).astype(int)[:, None] * 32 + np.arange(33)
        t = torch.from_numpy(loader.tokens[at].astype(np.int64))
        with torch.no_grad():
            assert got[0] == got[1] == pytest.approx(model(t[:, :-1], t[:, 1:])[1].item(), rel=1e-6) and model.training

def test_accumulation_and_processes_give_the_same_run(data, tmp_path):
    one = run(data, tmp_path / "1", "--max_iters", 20, "--batch_size", 4, "--grad_accum", 2)
    for name, log in (("whole", run(data, tmp_path / "2", "--max_iters", 20, "--batch_size", 8, "--grad_accum", 1)),
                      ("fine", run(data, tmp_path / "3", "--max_iters", 20, "--batch_size", 2, "--grad_accum", 4)),
                      ("two", torchrun(2, data, tmp_path / "4", "--max_iters", 20, "--batch_size", 2, "--grad_accum", 4))):
        assert [r["tokens"] for r in log] == [256 * (i + 1) for i in range(20)]
        assert max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(one, log)) < 1e-6, name
        assert max(abs(a["grad_norm"] - b["grad_norm"]) / a["grad_norm"] for a, b in zip(one, log)) < 1e-4, name
    two = torchrun(2, data, tmp_path / "5", "--max_iters", 8, "--stop_at", 4, "--ckpt_interval", 4)
    two = torchrun(2, data, tmp_path / "5", "--resume")     # resume on two, one microbatch a rank: bit for bit
    assert losses(two) == losses(run(data, tmp_path / "6", "--max_iters", 8))

def test_two_processes_in_every_mode(data, tmp_path):
    for go in (torchrun, lambda n, *z, **k: run(*z, **k)):
        go(2, data, tmp_path / go.__name__, "--max_iters", 3, mode=",".join(MODES))
    for mode in MODES:
        two, one = (train.read_log(tmp_path / z / mode) for z in ("torchrun", "<lambda>"))
        assert losses(two) == losses(one) and len(two) == 3

def test_failed_save_keeps_the_last_checkpoint(data, tmp_path, monkeypatch, capsys):
    real, n = torch.save, []

    def full_disk(obj, f, *a, **k):
        n.append(1)
        if len(n) < 3:
            return real(obj, f, *a, **k)
        f.write(b"half")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full_disk)
    assert "No space left" in refused(capsys, run, data, tmp_path / "z", "--max_iters", 20, "--ckpt_interval", 4)
    assert checkpoint(tmp_path / "z")["step"] == 8 and sorted(os.listdir(tmp_path / "z")) == ["ckpt.pt", "config.json", "log.jsonl"]

def test_not_finite_stops_and_keeps_the_last_good_checkpoint(data, tmp_path, capsys):
    message = refused(capsys, run, data, tmp_path / "n", "--lr", 1e18, "--grad_clip", 0, "--ckpt_interval", 1, "--max_iters", 60)
    assert re.search(r"iteration \d+: .*(nan|inf|finite)", message)
    assert all(v.isfinite().all() for v in checkpoint(tmp_path / "n")["model"].values())
    assert all(math.isfinite(r["loss"]) for r in train.read_log(tmp_path / "n"))
    m = GPT(tiny("mhar"))
    m(*batch())[1].backward()
    before = m.embed.weight.detach().clone()
    m.blocks[0].attn.q_proj.weight.grad[0, 0] = float("nan")
    with pytest.raises(FloatingPointError):
        train.clip_and_check(m, 1.0)
    assert torch.equal(before, m.embed.weight)

def test_clipping():
    m = GPT(tiny("mhar"))
    m(*batch())[1].backward()
    norm = math.sqrt(sum(p.grad.double().square().sum() for p in m.parameters()))
    assert train.clip_and_check(m, 0) == pytest.approx(norm) and train.clip_and_check(m, norm / 2) == pytest.approx(norm)
    assert train.clip_and_check(m, 0) == pytest.approx(norm / 2, rel=1e-4)

@pytest.mark.parametrize("flags, words", [
    (["--vocab_size", 50], "50.*257"), (["--device", "cuda"], "cuda"), (["--mode", "mahr"], "mahr.*baseline"), (["--mode", "attnres:4"], "attnres:4"),
    (["--mode", "mhar:5"], "64.*5"), (["--data", "nowhere"], "nowhere.*prepare_data"), (["--resume"], "no checkpoint"), (["--eval_only"], "no checkpoint"),
    (["--block_size", 10**6], "block_size"), (["--batch_size", 0], "batch_size is 0"), (["--table", "nowhere"], "nowhere"),
    (["--lr", "inf"], "lr is inf"), (["--max_iters", -5], "max_iters is -5"), (["--mode", "mhar,mhar"], "twice"), (["--mode", "mhar:08"], "mhar:08"),
    (["--overwrite", "--resume"], "overwrite"), (["--head_dim", -2], "head_dim is -2"), (["--param_dtype", "bfloat16"], "float32 needs")])
def test_flags_are_refused_before_any_work(data, tmp_path, capsys, flags, words):
    if flags[0] == "--device" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    argv = ["--data", data, "--mode", "mhar", "--out", str(tmp_path / "o"), *TINY, *map(str, flags)]
    assert re.search(words, refused(capsys, train.main, argv)) and not os.path.exists(tmp_path / "o")

def test_short_splits_are_refused(tmp_path, capsys):
    d = prepare(tmp_path, ["tiny"], val_frac=0)
    assert "5 tokens" in (m := refused(capsys, run, d, tmp_path / "o")) and "33" in m
    d = prepare(tmp_path, LINES[:200], name="e", val_frac=0)
    assert "val split has 0 tokens" in refused(capsys, run, d, tmp_path / "o", "--eval_interval", 5)
    assert len(run(d, tmp_path / "o", "--max_iters", 1)) == 1                    # without evaluation it is enough

@pytest.mark.parametrize("flag", [["--compile", "False"], ["--compile=false"], ["--compile", "0"], ["--max_iter", "3"], ["--leraning_rate", "1"]])
def test_odd_flags_are_errors(data, capsys, flag):
    with pytest.raises(SystemExit) as e:
        train.main(["--data", data, *flag])
    assert e.value.code == 2 and flag[0].split("=")[0] in capsys.readouterr().err

def test_flags_switch_off():
    assert train.parser().parse_args(["--no_compile", "--no_qk_norm"]).compile is False
    assert train.parser().parse_args(["--compile"]).compile is True

def test_peak_flops():
    names = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A10": 125e12,
             "NVIDIA A10G": None, "cpu": None, "Made Up 9000": None, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12}
    assert {k: train.peak_flops(k) for k in names} == names

def test_several_modes_end_with_the_paired_table(data, tmp_path, capsys):
    flags = ["--data", data, "--mode", "baseline,hyper,attnres,mhar:4", "--out", str(tmp_path / "o"), *TINY, "--max_iters", "4", "--eval_interval", "1"]
    train.main(flags)
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if re.match(r"(baseline|hyper|attnres|mhar:4) +\d", line)}
    assert list(rows) == ["baseline", "hyper", "attnres", "mhar:4"] and "vocabulary 257 padded to 320" in out and "--- sample" in out
    tail = {m: [r["val_loss"] for r in train.read_log(tmp_path / "o" / m)][2:] for m in ("baseline", "mhar-4")}        # steps 3 and 4
    assert float(rows["baseline"][1]) == pytest.approx(np.mean(tail["baseline"]), abs=1e-4) and rows["baseline"][2] == "+0.0000"
    assert float(rows["mhar:4"][2]) == pytest.approx(np.mean(tail["mhar-4"]) - np.mean(tail["baseline"]), abs=1e-4)
    assert [rows[m][5].replace(",", "") for m in rows] == [str(json.load(open(tmp_path / "o" / d / "config.json"))["parameters"])
                                                          for d in ("baseline", "hyper", "attnres", "mhar-4")]
    train.main([*flags, "--resume"])                        # finished: nothing but the table again
    assert [z for z in capsys.readouterr().out.splitlines() if z.startswith("mhar:4  ")] == [z for z in out.splitlines() if z.startswith("mhar:4  ")]

def test_log_and_bf16(data, tmp_path):
    log = run(data, tmp_path / "b", "--max_iters", 6, "--dtype", "bfloat16", "--grad_checkpoint")
    pure = run(data, tmp_path / "p", "--max_iters", 6, "--dtype", "bfloat16", "--param_dtype", "bfloat16")
    assert {v.dtype for v in checkpoint(tmp_path / "p")["model"].values()} == {torch.bfloat16}
    assert {v.dtype for v in checkpoint(tmp_path / "b")["model"].values()} == {torch.float32}
    assert abs(log[-1]["loss"] - pure[-1]["loss"]) < 0.1 and log[-1]["loss"] < log[0]["loss"] < math.log(320) + 0.1
    assert [set(r) for r in log] == [{"iter", "loss", "lr", "grad_norm", "tokens", "dt", "tokens_per_s", "mfu", "memory_mb"}] * 6
    assert all(r["tokens_per_s"] * r["dt"] == pytest.approx(256) and r["mfu"] is None for r in log)
