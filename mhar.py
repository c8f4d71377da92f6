"""
Multi-Head Attention Residuals (MHAR, arXiv 2607.27230) beside everything the paper compares it with.

The model is a pre-norm decoder in the Qwen3 recipe: RMSNorm, SwiGLU, grouped-query attention with RMSNorm on q and k,
RoPE, no biases, no dropout, embedding and LM head tied. What differs between the five modes is only how the outputs of
earlier sublayers reach the next one. That is the job of the *residual stream*, a function that takes the newest
sublayer output and returns the next sublayer's input:

    h = stream(embed(idx))            # call 0: the embedding is source 0, h is the read of site 0
    for f in sublayers:               # attention, MLP, attention, MLP, ... : 2L of them, each with its own pre-norm
        h = stream(f(h))              # call i+1: the raw output of sublayer i is source i+1, h the read of site i+1
    logits = head(norm(h))            # site 2L is the final read

    baseline   Additive           h is the running sum
    hyper      HyperConnections   h is a learned mix of n parallel streams (arXiv 2409.19606)
    attnres    DepthRouting       h is a softmax mix of all sources, one query over the whole width (arXiv 2603.15031)
    mhar       DepthRouting       the same with H queries, each over its own slice of the width
    delta      DeltaRouting       h is the running sum + gate * a read over block deltas (arXiv 2605.18855)

Symbols: B batch, T tokens, D width, L layers, H routing heads, N sources readable at a site. A site is a place where something
is read: site i before sublayer i, site 2L before the last norm. Sections are the MHAR paper's.
"""
import json
import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

try:
    import route_kernel
except ImportError:                                         # no Triton: only the eager reads
    route_kernel = None

MODES = ("baseline", "hyper", "attnres", "mhar", "delta")
# the paper's three scales, and one that trains on a laptop
SCALES = {
    "tiny": dict(n_layer=4, n_head=4, n_kv_head=2, n_embd=128, d_ff=384, block_size=128),
    "100m": dict(n_layer=12, n_head=8, n_kv_head=4, n_embd=512, d_ff=1536, block_size=2048),
    "350m": dict(n_layer=24, n_head=16, n_kv_head=8, n_embd=1024, d_ff=4096, block_size=1024),
    "1b": dict(n_layer=36, n_head=16, n_kv_head=8, n_embd=1280, d_ff=5120, block_size=1024),
}

@dataclass
class GPTConfig:
    mode: str                       # one of MODES
    vocab_size: int
    block_size: int                 # the longest sequence, T
    n_layer: int                    # L
    n_head: int                     # attention heads; not the routing heads
    n_kv_head: int
    n_embd: int                     # D
    d_ff: int                       # hidden width of the SwiGLU
    head_dim: int | None = None     # of attention; None: n_embd / n_head
    qk_norm: bool = True            # RMSNorm per head on q and k, before the rotation
    route_heads: int = 8            # H, of mhar and delta
    delta_blocks: int = 8           # blocks whose deltas the delta mode reads
    hc_streams: int = 4             # n, parallel streams of hyper-connections
    norm_eps: float = 1e-6
    rope_theta: float = 1e4
    rope_scaling: dict | None = None    # Llama 3's: the four numbers that `rope` reads
    tie_embeddings: bool = True
    kernel: str = "auto"            # depth reads: auto, fused or eager; see fused_kernels
    grad_checkpoint: bool = False   # recompute sublayers and reads in backward instead of storing their insides

    def __post_init__(self):
        """Raises ValueError, with the numbers, for fields that do not fit together."""
        for name, accepted in (("mode", MODES), ("kernel", ("auto", "fused", "eager"))):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {accepted}")
        for name in "vocab_size block_size n_layer n_head n_kv_head n_embd d_ff route_heads delta_blocks hc_streams".split():
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a positive integer")
        for name in ("norm_eps", "rope_theta"):
            if not isinstance(getattr(self, name), (int, float)) or not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a positive number")
        for name, divisor, matters in (("n_head", "n_kv_head", True), ("n_embd", "n_head", self.head_dim is None),
                                       ("n_embd", "route_heads", self.mode in ("mhar", "delta"))):
            if matters and getattr(self, name) % getattr(self, divisor):
                raise ValueError(f"{name} {getattr(self, name)} is not a multiple of {divisor} {getattr(self, divisor)}")
        self.head_dim = self.n_embd // self.n_head if self.head_dim is None else self.head_dim
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, RoPE needs an even number")
        s, names = self.rope_scaling, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if s is not None and not ({*s} == {*names} and all(s[z] > 0 for z in names) and s["low_freq_factor"] < s["high_freq_factor"]):
            raise ValueError(f"rope_scaling is {s}, expected None or Llama 3's {', '.join(names)}: positive, low below high")

def upcast(x):
    """fp32 for half-precision tensors, fp64 stays: norms, depth softmaxes, delta's gates and stream maps never run in bf16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

def rms_norm(x, gain, eps):
    """RMSNorm over the last axis, in fp32. (Written out: compiled by torch 2.11, F.rms_norm gave g a wrong gradient in reads.)"""
    x = upcast(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.to(x.dtype)

# ---------------------------------------------------------------- the depth read
def stack(sources):
    if len(sources) == 0:
        raise ValueError("a depth read needs at least one source, got none")
    return sources if torch.is_tensor(sources) else torch.stack(list(sources))

def route_weights(sources, q, g, H, eps=1e-6):
    """
    The depth attention of one site (section 3), H independent softmaxes over the N sources, no 1/sqrt(d), no bias:
        k_n = RMSNorm_g(s_n)  over the full width D,     a_nh = softmax_n( q_h . k_n[h] ),     q_h = q[hD/H : (h+1)D/H]
    (The paper's listing normalises each slice; its equation and its code the full row, as here.)
    sources: list of N [B, T, D], or one [N, B, T, D].  q, g: [D].  Returns a [N, B, T, H], fp32 (fp64 for fp64 sources).
    Raises ValueError if there is no source, if q or g is not [D], or if H does not divide D.
    """
    s = upcast(stack(sources))                                                            # [N, B, T, D]
    D = s.size(-1)
    if q.shape != (D,) or g.shape != (D,):
        raise ValueError(f"q and g must have shape ({D},), the sources' width; got {tuple(q.shape)} and {tuple(g.shape)}")
    if H < 1 or D % H:
        raise ValueError(f"{H} routing heads do not divide the width {D}")
    k = rms_norm(s, g, eps)                                                               # [N, B, T, D]
    return (k * q.to(s.dtype)).unflatten(-1, (H, D // H)).sum(-1).softmax(0)              # [N, B, T, H]

def route_ref(sources, q, g, H, eps=1e-6):
    """
    The depth read (section 3): read[h] = sum_n a_nh s_n[h]. Values are the raw sources; H = 1 is Attention Residuals.
    Takes what `route_weights` takes. Returns [B, T, D] in the sources' dtype: all in fp32 inside, rounded once at the end.
    This function is the contract of the fused kernels, which do not call it: to train a change of it, take kernel="eager".
    With one source it returns that source, and dq = dg = 0 exactly.
    """
    s = stack(sources)                                                                    # [N, B, T, D]
    a = route_weights(s, q, g, H, eps)                                                    # [N, B, T, H]
    read = (a.unsqueeze(-1) * upcast(s).unflatten(-1, (H, -1))).sum(0)                    # [B, T, H, D/H]
    return read.flatten(-2).to(s.dtype)

def fused_kernels(kernel, device, dtype):
    """
    The one place where the router is chosen: route_kernel for fused reads, None for route_ref. `auto` is fused on a CUDA device that can,
    else eager, which it warns of; `fused` raises ValueError where it cannot run (it takes a CUDA device, or TRITON_INTERPRET=1).
    """
    missing = "Triton cannot be imported" if route_kernel is None else route_kernel.unsupported(device, dtype)
    if kernel == "fused" and missing:
        raise ValueError(f"kernel is 'fused', but {missing}; auto or eager runs here")
    if kernel == "auto" and missing and device.type == "cuda" and not torch.compiler.is_compiling():
        warnings.warn(f"the depth reads are eager, which is slow: {missing}", stacklevel=2)            # shown once
    return None if missing or kernel == "eager" or kernel == "auto" and device.type != "cuda" else route_kernel

# ---------------------------------------------------------------- the residual streams
# each module holds the parameters of its mode; `stream()` starts the state of one forward

class Additive(nn.Module):
    """baseline: h_{i+1} = h_i + f_i(norm(h_i))."""
    def __init__(self, c):
        super().__init__()

    def stream(self, route):
        h = 0
        def step(x):                                        # x [B, T, D], the newest sublayer output
            nonlocal h
            h = h + x
            return h
        return step

class DepthRouting(nn.Module):
    """attnres (H = 1) and mhar: h_i = the read of site i, over sources 0..i. No running sum. (Fused, a router of kernels stands in.)"""
    def __init__(self, c):
        super().__init__()
        self.H, self.eps = 1 if c.mode == "attnres" else c.route_heads, c.norm_eps         # all that tells the two apart
        sites = 2 * c.n_layer + 1                           # the final read included
        self.q, self.g = (nn.Parameter(torch.empty(sites, c.n_embd)) for _ in range(2))

    def stream(self, route):
        sources, q, g = [], self.q.unbind(), self.g.unbind()
        def step(s):                                        # s [B, T, D]: source i, and the read of site i comes back
            i = len(sources)
            sources.append(s)
            return route(sources, q[i], g[i], self.H, self.eps)
        return step

class DeltaRouting(nn.Module):
    """
    delta: h_i = p_i + gate_i * read_i, with p the intact running sum, so that a trained baseline can be converted.

    Sources of a site: its null vector, the embedding, and p_end - p_start of every finished block of layers; block b holds
    layers floor(b L/n) .. floor((b+1) L/n) - 1, and no site reads the last. No final read. Gate zero makes it the baseline exactly.
    """
    def __init__(self, c):
        super().__init__()
        self.H, self.eps, self.n_site = c.route_heads, c.norm_eps, 2 * c.n_layer
        n = min(c.delta_blocks, c.n_layer)
        self.starts = {2 * (b * c.n_layer // n) for b in range(n)}          # sites at which a block starts
        self.q, self.g, self.null = (nn.Parameter(torch.empty(self.n_site, c.n_embd)) for _ in range(3))
        self.gate = nn.Parameter(torch.empty(self.n_site, 1))

    def graft(self, p, read, gate):                         # by itself, since train.py compiles it
        return (upcast(p) + gate * upcast(read)).to(p.dtype)

    def stream(self, route):
        i, p, p_start, sources = -1, 0, 0, []
        q, g, null, gate = self.q.unbind(), self.g.unbind(), self.null.unbind(), self.gate.unbind()
        def step(x):                                        # x [B, T, D]
            nonlocal i, p, p_start
            i, p = i + 1, p + x
            if i == self.n_site:
                return p
            if i in self.starts:                            # the delta of the block before; at site 0 the embedding
                sources.append(p - p_start)
                p_start = p
            read = route([null[i].to(p.dtype).expand_as(p), *sources], q[i], g[i], self.H, self.eps)
            return self.graft(p, read, gate[i])
        return step

class HyperConnections(nn.Module):
    """
    hyper: n parallel streams X [n, D] per token (arXiv 2409.19606, static and dynamic). At sublayer i, with N = RMSNorm(X):
        A = static_A + scale_A tanh(N W_A)   [n, 1+n]   column 0 reads, the others mix       h_i = A[:, 0]^T X
        b = static_b + scale_b tanh(N w_b)   [n]        writes                               X  <- A[:, 1:]^T X + b f_i(h_i)
    The embedding is repeated n times at the start, the streams are summed at the end. It starts as the baseline, up to a
    scale that the next norm removes: the read is one-hot (stream i mod n), the mix the identity, the write all ones.
    """
    def __init__(self, c):
        super().__init__()
        self.n, self.eps, self.n_site = c.hc_streams, c.norm_eps, 2 * c.n_layer
        S, n, D = self.n_site, self.n, c.n_embd
        self.static_A, self.static_b = nn.Parameter(torch.empty(S, n, 1 + n)), nn.Parameter(torch.empty(S, n))
        self.W_A, self.w_b = nn.Parameter(torch.empty(S, D, 1 + n)), nn.Parameter(torch.empty(S, D, 1))
        self.scale_A, self.scale_b = nn.Parameter(torch.empty(S)), nn.Parameter(torch.empty(S))
        self.norm = nn.Parameter(torch.empty(S, D))         # gains

    def maps(self, X, i):
        """X [B, T, n, D] fp32 -> A [B, T, n, 1+n], b [B, T, n, 1], for sublayer i."""
        N = rms_norm(X, self.norm[i], self.eps)
        A = self.static_A[i] + self.scale_A[i] * torch.tanh(N @ self.W_A[i].to(X.dtype))
        b = self.static_b[i, :, None] + self.scale_b[i] * torch.tanh(N @ self.w_b[i].to(X.dtype))
        return A, b

    def stream(self, route):
        i, X, b = -1, None, None                            # X [B, T, n, D] in the compute dtype
        def step(x):                                        # x [B, T, D]: the write of f_{i-1}, then mix and read for f_i
            nonlocal i, X, b
            i += 1
            with torch.autocast(x.device.type, enabled=False):              # the maps stay fp32
                u = upcast(x).unsqueeze(2)                                  # [B, T, 1, D]
                X32 = u.expand(-1, -1, self.n, -1) if i == 0 else upcast(X) + b * u
                if i == self.n_site:
                    return X32.sum(2).to(x.dtype)
                A, b = self.maps(X32, i)
                mix = sum(A[:, :, m, :, None] * X32[:, :, m, None] for m in range(self.n))    # A^T X: a sum fuses
                mix = mix.to(x.dtype)                                       # [B, T, 1+n, D]
            X = mix[:, :, 1:]
            return mix[:, :, 0]
        return step

# ---------------------------------------------------------------- the sublayers
class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(dim)), eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps).to(x.dtype)

def rotate(x, cos, sin):
    """RoPE in the half-split layout. x [B, T, heads, d]; cos, sin fp32 [T, 1, d/2]. Rounded once, at the end."""
    a, b = upcast(x).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

class Attention(nn.Module):
    """Causal grouped-query attention, its pre-norm included: x [B, T, D] -> [B, T, D]."""
    def __init__(self, c):
        super().__init__()
        self.head_dim = d = c.head_dim
        self.norm = RMSNorm(c.n_embd, c.norm_eps)
        self.q_proj = nn.Linear(c.n_embd, c.n_head * d, bias=False)
        self.k_proj = nn.Linear(c.n_embd, c.n_kv_head * d, bias=False)
        self.v_proj = nn.Linear(c.n_embd, c.n_kv_head * d, bias=False)
        self.o_proj = nn.Linear(c.n_head * d, c.n_embd, bias=False)
        self.q_norm = RMSNorm(d, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x, rope, kv=None):
        x = self.norm(x)
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)  # [B, T, heads, d]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)    # [B, heads, T, d]
        if kv is not None:                                  # generation: this layer's cache, a dict that keeps all k, v
            if kv:
                k, v = torch.cat((kv["k"], k), 2), torch.cat((kv["v"], v), 2)
            kv.update(k=k, v=v)
        new, every = q.size(2), k.size(2)
        mask = None if new in (1, every) else torch.ones(new, every, dtype=torch.bool, device=x.device).tril(every - new)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=1 < new == every, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))

class MLP(nn.Module):
    """SwiGLU, its pre-norm included: x [B, T, D] -> [B, T, D]."""
    def __init__(self, c):
        super().__init__()
        self.norm = RMSNorm(c.n_embd, c.norm_eps)
        self.gate_proj = nn.Linear(c.n_embd, c.d_ff, bias=False)
        self.up_proj = nn.Linear(c.n_embd, c.d_ff, bias=False)
        self.down_proj = nn.Linear(c.d_ff, c.n_embd, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

class Block(nn.Module):
    """The two sublayers of a layer. It has no forward: the residual stream runs between them."""
    def __init__(self, c):
        super().__init__()
        self.attn, self.mlp = Attention(c), MLP(c)

# ---------------------------------------------------------------- Hugging Face's format
HF_FIELDS = dict(vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers", n_embd="hidden_size",
                 n_head="num_attention_heads", n_kv_head="num_key_value_heads", head_dim="head_dim", d_ff="intermediate_size",
                 norm_eps="rms_norm_eps", rope_theta="rope_theta", tie_embeddings="tie_word_embeddings")

def hf_name(name):                                          # of a baseline's parameter -> in a Llama's or Qwen3's files
    for ours, theirs in (("embed.", "model.embed_tokens."), ("blocks.", "model.layers."), (".attn.norm.", ".input_layernorm."),
                         (".mlp.norm.", ".post_attention_layernorm."), (".attn.", ".self_attn."), ("final_norm.", "model.norm.")):
        name = name.replace(ours, theirs)
    return name

def config_from_hf(hf, fields):
    """config.json of a Llama or Qwen3 (a dict, no nulls), fields that override it -> GPTConfig. KeyError; ValueError for what we lack."""
    qwen, rope = hf["model_type"] == "qwen3", hf.get("rope_scaling") or hf.get("rope_parameters") or {}       # transformers 4, 5
    scale = {k: v for k, v in rope.items() if k not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")}
    only = dict(model_type=["llama", "qwen3"], hidden_act=["silu"], attention_bias=[False], mlp_bias=[False], attention_dropout=[0],
                pretraining_tp=[1], partial_rotary_factor=[1], quantization_config=[None], use_sliding_window=[False], mode=["baseline"],
                layer_types=[["full_attention"] * hf.get("num_hidden_layers", 0)], sliding_window=[qwen and hf.get("sliding_window")],
                is_causal=[True], rope_interleaved=[False],
                original_max_position_embeddings=[scale.get("original_max_position_embeddings")])
    if odd := [f"{k} is {v!r}, expected {only[k]}" for z in (hf, rope, fields) for k, v in z.items() if v not in only.get(k, [v])]:
        raise ValueError("; ".join(odd))
    if {rope.get("rope_type"), rope.get("type")} - {None, "default"} != ({"llama3"} if scale else set()):
        raise ValueError(f"rope_scaling or rope_parameters is {rope}, expected rope_type 'default', or 'llama3' and its numbers")
    hf = dict(num_key_value_heads=hf.get("num_attention_heads"), head_dim=None, rope_theta=1e4, tie_word_embeddings=False) | hf | rope
    return GPTConfig(**dict(mode="baseline", qk_norm=qwen, rope_scaling=scale or None) | {k: hf[z] for k, z in HF_FIELDS.items()} | fields)

# ---------------------------------------------------------------- the model
@torch.no_grad()
def init_weights(module):
    """
    All initialisation (section 4). It draws nothing for the residual streams, so equal seeds give equal sublayers in every mode.
        parameter                               start value
        embedding, every projection             N(0, 0.02)      (the LM head is the embedding when tied)
        gains of all norms, g of the reads      1
        q, null, gate of the reads              0               each depth softmax starts as a plain average
        hyper: static_A, static_b               read one-hot (i mod n), mix identity; write ones
        hyper: W_A, w_b; scale_A, scale_b       0; 0.01
    """
    for m in module.modules():
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
        elif isinstance(m, RMSNorm):
            m.weight.fill_(1.0)
        elif isinstance(m, (DepthRouting, DeltaRouting, HyperConnections)):
            start = dict(g=1.0, norm=1.0, static_b=1.0, scale_A=0.01, scale_b=0.01)        # everything else 0
            for name, p in m.named_parameters():
                p.fill_(start.get(name, 0.0))
        if isinstance(m, HyperConnections):
            m.static_A[:, :, 1:].copy_(torch.eye(m.n))
            for i in range(m.n_site):
                m.static_A[i, i % m.n, 0] = 1.0

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.residual = {"baseline": Additive, "hyper": HyperConnections, "attnres": DepthRouting,
                         "mhar": DepthRouting, "delta": DeltaRouting}[c.mode](c)
        self.final_norm = RMSNorm(c.n_embd, c.norm_eps)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        init_weights(self)

    def rope(self, pos):
        """pos [T] -> cos, sin, fp32 [T, 1, head_dim/2]. Computed on the fly: a buffer would follow `.to(bfloat16)`."""
        d, s = self.config.head_dim, self.config.rope_scaling
        freq = 1 / self.config.rope_theta ** (torch.arange(0, d, 2, device=pos.device, dtype=torch.float32) / d)
        if s:                                               # Llama 3: waves too long for the original context turn slower
            turns = s["original_max_position_embeddings"] / (2 * torch.pi / freq)
            fast = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
            freq = (1 - fast) * freq / s["factor"] + fast * freq
        angle = (pos.float()[:, None] * freq)[:, None]
        return angle.cos(), angle.sin()

    def rope_cos(self, pos):
        """The rotary cosines of position `pos`, fp32 [head_dim/2]."""
        return self.rope(torch.tensor([pos], device=self.embed.weight.device))[0].flatten()

    def hidden(self, idx, kv=None, route=None):
        """
        idx int64 [B, T] -> the final read, [B, T, D] in the compute dtype: autocast's where it is on, else the parameters'.
        kv: one dict per layer, the key/value cache of generation; then idx continues the cached tokens. (The depth history
        needs no cache: reads mix sources of one token only, and each new token brings its own.)
        route: how to read, instead of what `kernel` says. Everything that reads over depth goes through it.
        """
        c, pos0, device = self.config, kv[0]["k"].size(2) if kv and kv[0] else 0, idx.device.type
        if hasattr(self.embed.weight, "full_tensor"):       # a call of the model itself puts it together
            raise ValueError("a model sharded by fully_shard only runs as model(idx); load its checkpoint into one that is not")
        if pos0 + idx.size(1) > c.block_size:
            raise ValueError(f"{pos0 + idx.size(1)} tokens are more than block_size {c.block_size}")
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.embed.weight.dtype
        kernels = None if route or c.mode in ("baseline", "hyper") else fused_kernels(c.kernel, idx.device, dtype)
        recompute = c.grad_checkpoint and torch.is_grad_enabled()
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False) if recompute else (lambda f, *args: f(*args))
        rope = self.rope(torch.arange(pos0, pos0 + idx.size(1), device=idx.device))
        if kernels and type(self.residual) is DepthRouting and not recompute:    # a subclass may read otherwise; a checkpoint reads again
            stream = kernels.blocked_router(self.residual.q, self.residual.g, self.residual.H, c.norm_eps)
        else:
            read = route or (kernels.route if kernels else route_ref)
            stream = self.residual.stream(lambda sources, *args: run(read, tuple(sources), *args))
        h = stream(self.embed(idx).to(dtype))
        for layer, block in enumerate(self.blocks):
            h = stream(run(block.attn, h, rope, kv and kv[layer]))
            h = stream(run(block.mlp, h))
        return h

    def head(self, h, targets=None):
        """h [B, T, D], targets int64 [B, T] -> logits [B, T, vocab_size], mean cross-entropy in nats (None without targets)."""
        if targets is not None and targets.shape != h.shape[:2]:
            raise ValueError(f"targets are {tuple(targets.shape)}, expected one for each token, {tuple(h.shape[:2])}")
        logits = self.lm_head(self.final_norm(h))
        return logits, None if targets is None else F.cross_entropy(upcast(logits).flatten(0, 1), targets.flatten())

    def forward(self, idx, targets=None):
        """idx, targets int64 [B, T] -> logits, loss: see `head`."""
        return self.head(self.hidden(idx), targets)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """
        Continues idx int64 [B, T] by max_new_tokens sampled tokens, with a key/value cache; temperature 0 is greedy.
        Past block_size the context is the last block_size tokens and the cache is rebuilt at each step (positions shift).
        """
        if not 0 <= temperature < float("inf") or top_k is not None and top_k < 1 or idx.size(1) < 1:
            raise ValueError(f"temperature {temperature}, top_k {top_k} and {idx.size(1)} tokens: expected from 0, None or from 1, from 1")
        kv = None
        for _ in range(max_new_tokens):
            if kv is None or idx.size(1) > self.config.block_size:
                kv, new = [{} for _ in self.blocks], idx[:, -self.config.block_size:]
            else:
                new = idx[:, -1:]
            logits = upcast(self.head(self.hidden(new, kv)[:, -1])[0])      # [B, vocab_size]
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, float("-inf"))
            token = (logits.argmax(-1, keepdim=True) if temperature == 0 else
                     torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
            idx = torch.cat((idx, token), 1)
        return idx

    @torch.no_grad()
    def depth_weights(self, idx):
        """What each head reads: a list over sites of fp32 [N, B, T, H], summing to 1 over N; delta's null comes first. idx [B, T]."""
        if self.config.mode in ("baseline", "hyper"):
            raise ValueError(f"mode {self.config.mode!r} has no depth weights; attnres, mhar and delta have")
        weights = []
        def route(*args):
            weights.append(route_weights(*args).float())
            return route_ref(*args)
        self.hidden(idx, route=route)
        return weights

    @classmethod
    def from_pretrained(cls, path, dtype=None, device="cpu", **overrides):
        """
        A baseline from a Hugging Face directory (safetensors) of a Llama (1 to 3) or a Qwen3 dense model. dtype None: the files', or fp32;
        overrides: GPTConfig fields, such as block_size. Host memory peaks at the model and its largest tensor. FileNotFoundError names
        a file; ValueError a field this model lacks, a weight missing, unused or of another shape (before it loads any), an untied head.
        """
        from safetensors import SafetensorError, safe_open
        if not isinstance(dtype, torch.dtype | None):
            raise ValueError(f"dtype is {dtype!r}, expected None or a torch.dtype, such as torch.bfloat16")
        path, name, whole, found, kinds = Path(path), "config.json", "model.safetensors", {}, set()
        try:
            hf = json.loads((path / name).read_text("utf-8"), object_pairs_hook=lambda z: {k: v for k, v in z if v is not None})
            config, name = config_from_hf(hf, overrides), "model.safetensors.index.json"
            index = json.loads((path / name).read_text("utf-8"))["weight_map"] if (path / name).exists() else {}
            if index and whole not in index.values() and (path / whole).exists():
                raise ValueError(f"it names other files than {whole}, which is there too; remove the older")
            for name in sorted({*index.values()}) or [whole]:
                with safe_open(path / name, "pt") as f:
                    names = [n for n in f.keys() if not n.endswith("rotary_emb.inv_freq")]       # `rope` computes these
                    found |= {n: (path / name, tuple(f.get_slice(n).get_shape())) for n in names if index.get(n, name) == name}
                    kinds |= {f.get_slice(n).get_dtype() for n in names}
            if not kinds <= {"F32", "BF16", "F16"}:
                raise ValueError(f"weights are {', '.join(sorted(kinds))}, expected F32, BF16 or F16")
        except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as e:
            raise ValueError(f"{path}/{name}: {'no ' if isinstance(e, KeyError) else ''}{e}") from None
        with torch.device("meta"):
            model = cls(config)
        got = {n: shape for n, (_, shape) in found.items()}
        want = {hf_name(n): p for n, p in model.named_parameters(remove_duplicate="lm_head.weight" not in got)}
        if wrong := [f"{n} is {got.get(n, 'missing')}, expected {tuple(want[n].shape) if n in want else 'no such weight'}"
                     for n in want | got if n not in want or want[n].shape != got.get(n)]:
            raise ValueError(f"{path}: {'; '.join(wrong[:4])}{f'; {len(wrong) - 4} more' if wrong[4:] else ''}")
        dtype = torch.float32 if dtype is None and len(kinds) > 1 else dtype
        for n, p in want.items():                           # a file opened once for all would hold in memory what was read of it
            new = nn.Parameter(safe_open(found[n][0], "pt").get_tensor(n).to(device=device, dtype=dtype, copy=True))
            if not p.is_meta and not torch.equal(p, new):
                raise ValueError(f"{path}: tie_word_embeddings is true, but lm_head.weight differs from the embedding")
            torch.utils.swap_tensors(p, new)                # in place: what is tied stays tied
        return model

    def save_pretrained(self, path, shard_bytes=5 * 10**9):
        """
        Writes a baseline as a new Hugging Face directory, whole or not at all: a Qwen3 if it has qk_norm, else a Llama; past shard_bytes
        a new file begins. ValueError for another mode, an existing path, a Llama transformers refuses (n_embd no multiple of n_head).
        """
        from safetensors.torch import save_file
        c, path, family, shards, size = self.config, Path(path).absolute(), "Qwen3" if self.config.qk_norm else "Llama", {}, 0
        if c.mode != "baseline" or path.exists():
            raise ValueError(f"{path} exists" if c.mode == "baseline" else f"mode {c.mode!r} has no Hugging Face form, only a baseline has")
        if family == "Llama" and c.n_embd % c.n_head:
            raise ValueError(f"n_head {c.n_head} must divide n_embd {c.n_embd} in a Llama, which is what a model without qk_norm is")
        hf = dict(architectures=[family + "ForCausalLM"], model_type=family.lower(), bos_token_id=None, eos_token_id=None,
                  torch_dtype=str(self.embed.weight.dtype)[6:], rope_scaling=c.rope_scaling and {"rope_type": "llama3", **c.rope_scaling},
                  **{theirs: getattr(c, ours) for ours, theirs in HF_FIELDS.items()})
        for n, p in self.named_parameters():                # a tied head is not among them
            shards.setdefault(size // shard_bytes, {})[hf_name(n)] = p.detach()
            size += p.nbytes
        files = {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": z for i, z in enumerate(shards.values())}
        index = dict(metadata=dict(total_size=size), weight_map={n: file for file, z in files.items() for n in z})
        with tempfile.TemporaryDirectory(dir=path.parent) as tmp:
            (new := Path(tmp, "model")).mkdir()
            for file, z in files.items():
                save_file({n: t.cpu().contiguous() for n, t in z.items()}, new / file, metadata={"format": "pt"})
            for file, content in (("config.json", hf), ("model.safetensors.index.json", index)):
                (new / file).write_text(json.dumps(content, indent=2))
            new.rename(path)

    def num_params(self):
        """All parameters; a tied matrix counts once."""
        return sum(p.numel() for p in self.parameters())

    def query_parameters(self):
        """[q], the queries of the depth reads, a row per site; empty in baseline and hyper."""
        return [p for n, p in self.residual.named_parameters() if n == "q"]

    def null_parameters(self):
        """[null], the null vectors [2L, D] of delta mode; empty in the others."""
        return [p for n, p in self.residual.named_parameters() if n == "null"]

    def configure_optimizer(self, lr, weight_decay, betas=(0.9, 0.95), eps=1e-8, decay="all", route_lr=1.0):
        """
        AdamW in groups, with weight decay and without; a group's rate is lr times its lr_scale. By role, never by shape:
        decay="all"         the paper's from scratch: everything decays, except the residual parameters of delta and hyper
        decay="matrices"    the usual split: only embedding and projections decay
        decay="projections" the paper's in mid-training: nor does the embedding; the LM head decays unless it is the embedding
        route_lr            the lr_scale of the residual parameters, in every mode
        """
        linear = {id(m.weight) for m in self.modules() if isinstance(m, nn.Linear)} - {id(self.embed.weight)}
        residual = {id(p) for p in self.residual.parameters()}
        exempt = residual if self.config.mode in ("delta", "hyper") else set()
        decays = {"all": lambda i: i not in exempt, "matrices": lambda i: i in linear or i == id(self.embed.weight),
                  "projections": lambda i: i in linear}
        if decay not in decays:
            raise ValueError(f"decay is {decay!r}, expected one of {', '.join(decays)}")
        groups = {}
        for p in self.parameters():
            groups.setdefault((decays[decay](id(p)), route_lr if id(p) in residual else 1.0), []).append(p)
        groups = [dict(params=ps, weight_decay=weight_decay * d, lr=lr * k, lr_scale=k) for (d, k), ps in groups.items()]
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=self.embed.weight.is_cuda)

    def estimate_flops(self):
        """
        FLOPs per token, forward + backward, at T = block_size: 6 (2 forward, 4 backward) for each parameter, each product of
        attention (causal half) and each product of routing (the score and the mix of each source in each read).
        """
        c, sites, n = self.config, 2 * self.config.n_layer, self.config.hc_streams
        products = 0                                        # of D numbers, per token; a source in a read takes two
        if c.mode in ("attnres", "mhar"):
            products = 2 * sum(i + 1 for i in range(sites + 1))
        elif c.mode == "delta":
            products = 2 * sum(1 + sum(s <= i for s in self.residual.starts) for i in range(sites))
        elif c.mode == "hyper":
            products = sites * (n * (n + 2) + n * (n + 1) + n)     # maps, mix, write
        elif c.mode != "baseline":
            raise NotImplementedError(f"the FLOPs of mode {c.mode!r}, for its MFU")
        return 6 * (self.num_params() + c.n_layer * c.n_head * c.head_dim * c.block_size + products * c.n_embd)

def convert_to_delta(model, route_heads=8, delta_blocks=8):
    """
    Grafts delta routing onto a baseline, in place, and returns it: same logits, bit for bit, until the gates move. Raises
    ValueError for any other mode, and if route_heads does not divide the width.
    """
    if model.config.mode != "baseline":
        raise ValueError(f"only a baseline converts to delta, this model is {model.config.mode!r}")
    config = replace(model.config, mode="delta", route_heads=route_heads, delta_blocks=delta_blocks)
    residual = DeltaRouting(config).to(model.embed.weight)
    init_weights(residual)
    model.config, model.residual = config, residual
    return model
