"""
The README's figures, and the numbers behind them. Needs matplotlib. Without --out they go to the first RUN_DIR. Symbols: mhar.py.

    python assets/figures.py                     # mhar.png: what a depth read is, with made-up weights
    python assets/figures.py curves RUN_DIR...   # curves.png: losses of runs of train.py, and their differences from the first one's
    python assets/figures.py heads RUN_DIR       # heads.png: what the heads of a checkpoint read; numbers, beside random queries
"""
import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

try:
    import matplotlib.pyplot as plt
    from matplotlib.colors import PowerNorm
except ImportError:
    sys.exit("figures.py: matplotlib is missing; pip install matplotlib")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import prepare_data
import train
from mhar import GPT, GPTConfig, rms_norm, route_ref, route_weights, stack

def bar(ax, x, y, shades, texts, label, width, height=0.52):
    """One vector of width D as slices side by side; a darker slice has more weight."""
    for h, (shade, text) in enumerate(zip(shades, texts, strict=True)):
        ax.add_patch(plt.Rectangle((x + h * width, y), width, height, facecolor=str(1 - 0.75 * shade), edgecolor="black", linewidth=0.8))
        ax.text(x + (h + 0.5) * width, y + height / 2, text, ha="center", va="center", fontsize=9, color=str(int(shade > 0.55)))
    ax.text(x - 0.15, y + height / 2, label, ha="right", va="center", fontsize=10)

def schematic(path, H=4):
    rng = np.random.default_rng(3)
    names = ["$s_0$  embedding", "$s_1$  attention 0", "$s_2$  MLP 0", "$s_3$  attention 1", "$s_4$  MLP 1"]
    columns = (("baseline", "$h_4=\\sum_n s_n$", np.full((5, 1), 0.3)),
               ("attnres: one query", "$h_4=\\sum_n a_n s_n$", rng.dirichlet(np.ones(5) * 0.7, 1).T),
               ("mhar: H = 4 queries", "$h_4[h]=\\sum_n a_{nh}\\, s_n[h]$", rng.dirichlet(np.ones(5) * 0.5, H).T))
    fig, ax = plt.subplots(figsize=(9.6, 3.5), dpi=160, subplot_kw=dict(xlim=(-3.4, 17.3), ylim=(-0.8, 5.6)))
    for c, (title, equation, a) in enumerate(columns):
        x, n = c * 5.6, a.shape[1]
        ax.text(x + 2.3, 5.15, title, ha="center", fontsize=11, weight="bold")
        for i, name in enumerate(names):
            bar(ax, x, 4.2 - 0.72 * i, a[i], [f"{z:.2f}" if c else "1" for z in a[i]], name if c == 0 else "", width=4.6 / n)
        ax.annotate("", (x + 2.3, 0.62), (x + 2.3, 1.25), arrowprops=dict(arrowstyle="-|>", color="black"))
        bar(ax, x, 0.05, np.zeros(n), [""] * n, "input of attention 2" if c == 0 else "", width=4.6 / n)
        ax.text(x + 2.3, -0.5, equation, ha="center", fontsize=11)
    ax.annotate("", (15.8, 4.95), (11.2, 4.95), arrowprops=dict(arrowstyle="<->", color="black", linewidth=0.8))
    ax.text(15.9, 4.9, "width D", fontsize=9, va="center")
    ax.axis("off")
    fig.savefig(path, bbox_inches="tight")

def read_run(run):
    """RUN_DIR -> name, checksum of the val split, and by tokens (millions): training loss, held-out loss. Raises ValueError."""
    try:
        config, log = json.loads(Path(run, "config.json").read_text("utf-8")), train.read_log(run)
        loss, held = ({r["tokens"] / 1e6: r[key] + 0.0 for r in log if key in r} for key in ("loss", "val_loss"))
        return config["name"], config["data"]["val"]["sha256"], loss | {log[-1]["tokens"] / 1e6: log[-1]["loss"]}, held
    except (OSError, LookupError, TypeError, ValueError) as e:
        raise ValueError(f"{run} is no folder of a run with a finished step ({type(e).__name__}: {e})") from None

def curves(runs, path):
    """Draws the losses, and held-out loss minus the first run's after as many tokens: returned by run, {tokens (millions): difference}."""
    names, sums, losses, helds = zip(*map(read_run, runs))
    names = [n if names.count(n) == 1 else f"{n} ({run})" for n, run in zip(names, runs)]
    if len(set(sums)) > 1:
        raise ValueError("these runs were evaluated on different data, so that their losses do not compare")
    differences = [{t: held[t] - helds[0][t] for t in held if t in helds[0]} for held in helds]
    w = max(1, min(map(len, losses)) // 20)                 # records; a mean over w of them stands at the middle one
    smooth = [dict(zip(list(z)[w // 2:], np.convolve(list(z.values()), np.ones(w) / w, "valid"))) for z in losses]
    panels = [(f"marks: held out; thin: training, mean of {w} logged steps", "loss", smooth, helds),
              (f"held out, minus that of {names[0]}", "difference of loss", [{}] * len(runs), differences)][:1 + any(differences[1:])]
    fig, axes = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 4), dpi=160, squeeze=False, layout="constrained")
    for ax, (title, quantity, *both) in zip(axes[0], panels):
        shown, ends, place = [], [], -np.inf
        for k, (name, thin, thick) in enumerate(zip(names, *both)):
            look = dict(color=("black", "0.5")[k % 2], linestyle=("-", "--", "-.", ":", (0, (8, 2)), (0, (1, 3)))[k // 2 % 6])
            ax.plot(list(thin), list(thin.values()), linewidth=0.6, **look)
            ax.plot(list(thick), list(thick.values()), linewidth=1.3, marker="os^Dv*XP"[k % 8], markersize=4, **look)
            points = [*thin.items(), *thick.items()]
            shown += [y for t, y in points if t >= max(points)[0] / 5]                              # the first fifth may leave the axes
            ends += [(y, t, f"{'●■▲◆▼★✖✚'[k % 8]} {name}") for t, y in points[-1:]]
        low, height = min(shown), 1.1 * np.ptp(shown) + 1e-3
        ax.set_title(title, fontsize=10)
        ax.set(xlabel="training tokens (millions)", ylabel=f"{quantity} (nats per token)", ylim=(low - height / 20, low + height))
        for y, t, name in sorted(ends):                     # names stand right of the last points, in their order but apart
            place = max(y, place + height / 15)
            ax.annotate(name, (t, y), (1.05, place), textcoords=ax.get_yaxis_transform(), va="center", fontsize=9,
                        arrowprops=dict(arrowstyle="-", linewidth=0.5, shrinkB=4, relpos=(0, 0.5)), annotation_clip=False)
    fig.savefig(path, bbox_inches="tight")
    return differences

def load(run, data, text, count):
    """RUN_DIR/ckpt.pt -> model in fp32, windows int64 [W, T] from all over data's val split or a text, a title. Raises ValueError."""
    path = Path(run, "ckpt.pt")
    try:
        ckpt = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        model, name, then, data = GPT(GPTConfig(**ckpt["config"])), ckpt["args"]["name"], ckpt["data"], data or ckpt["args"]["data"]
        model.load_state_dict(ckpt["model"])
    except Exception as e:                                  # a damaged file has many ways to fail
        raise ValueError(f"{path} is missing or no checkpoint of train.py ({type(e).__name__})") from None
    model.depth_weights(torch.zeros(1, 1, dtype=torch.long))            # ValueError: a mode that has none
    if not prepare_data.same_tokenizer(prepare_data.read_meta(data), then):
        raise ValueError(f"{data} has another tokenizer than the data of {path}")
    loader = train.Loader(Path(data, "val.bin"), then["dtype"], model.config.block_size, 1, 0, then["vocab_size"])
    if text:
        loader.tokens = np.array(prepare_data.encode(prepare_data.read_encoding(data), Path(text).read_text("utf-8", "replace")))
    there, of = (len(loader.tokens) - 1) // loader.block, f"windows of {loader.block:,} tokens of {text or loader.path}"
    if min(count, there) < 2:
        raise ValueError(f"two {of} and the token after them are the least; it has {len(loader.tokens):,}, and --windows is {count}")
    windows = loader.take(np.linspace(0, there - 1, min(count, there) // 2 * 2).astype(int))[0]
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), windows, f"{name} at step {ckpt['step']:,}, {len(windows)} {of}"

@torch.no_grad()
def measure(model, windows, draws):
    """
    What the reads weigh on windows int64 [W, T], W even, taken one by one. Slices h of the width are the H heads; of one head, 4 slices,
    and a fifth with the mean of their logits: so far from the read, which has the sum, is each of them if all agree.
        logit_nh = q_h . k_n[h]   (k_n as in mhar.route_weights)                 a_nh = softmax_n(logit_nh)
        m_n = mean_h a_nh; of one head softmax_n(sum_h logit_nh), its read       KL_h = sum_n a_nh log(a_nh / m_n), nats
    R further draws have a random vector of q_h's norm in the place of each q_h, at the same sources. Returns, for each half of the
    windows, a list over sites (N sources) of means over tokens: KL [1+R, S], a [1+R, N, S], m [1+R, N, 1]; the model's own come first.
    """
    r, seen = model.residual, []
    q = r.q.unflatten(-1, (r.H if r.H > 1 else int(np.gcd(4, r.q.size(1))), -1))                    # [sites, S, D/S]
    noise = torch.randn(draws, *q.shape, generator=torch.Generator().manual_seed(0)).to(q)
    q = torch.cat((q[None], noise * (q.norm(dim=-1) / noise.norm(dim=-1)).unsqueeze(-1)))           # [1+R, sites, S, D/S]

    def route(sources, *args):
        k = rms_norm((s := stack(sources))[:, 0], args[1], r.eps).unflatten(-1, q.shape[2:])        # [N, T, S, D/S]
        logit = torch.einsum("ntsd,rsd->rnts", k, q[:, len(seen[-1])])
        log_a = logit.log_softmax(1)                                                                # [1+R, N, T, S]
        log_m = log_a.logsumexp(-1, True) - np.log(q.size(2)) if r.H > 1 else logit.sum(-1, True).log_softmax(1)
        if not torch.allclose((log_a if r.H > 1 else log_m)[0].exp(), route_weights(s, *args)[:, 0], atol=1e-3):
            raise ValueError("mhar.route_weights has another formula than measure in assets/figures.py; change that, too")
        log_a = log_a if r.H > 1 else torch.cat((log_a, logit.mean(-1, True).log_softmax(1)), -1)
        seen[-1].append([(log_a.exp() * (log_a - log_m)).sum(1).mean(1), log_a.exp().mean(2), log_m.exp().mean(2)])
        return route_ref(s, *args)
    for window in windows.to(q.device):
        seen.append([])
        model.hidden(window[None], route=route)
    return [[[sum(z) / len(z) for z in zip(*site)] for site in zip(*half)] for half in (seen[:len(seen) // 2], seen[len(seen) // 2:])]

def heads(run, data, text, count, path, draws=8):
    """Prints what `measure` finds in the checkpoint of run, draws the mean weights, a panel per head, and returns the printed rows."""
    model, windows, title = load(run, data, text, count)
    halves, one, delta = measure(model, windows, draws), model.residual.H == 1, model.config.mode == "delta"
    what, centre = ("slice", "what the one query reads") if one else ("head", "the mean of the heads")
    a, m = ([(x[k][0] + y[k][0]).cpu() / 2 for x, y in zip(*halves)] for k in (1, 2))               # per site [N, S], [N, 1]
    kl = torch.stack([z[0] for half in halves for z in half if len(z[1][0]) > 1]).mean(0)           # [1+R, S]
    dev = [torch.cat([z[1] - z[2] for z in half], 1) for half in halves]                            # [1+R, sum of N, S], mean 0
    largest, S = (dev[0] + dev[1]).abs().amax(1) / 2, kl.size(1) - one                              # [1+R, S], as kl and same
    same, same_all = (torch.cosine_similarity(*z, 1, 1e-4) for z in (dev, [d[..., :S].flatten(1) for d in dev]))   # below 1e-4: rounding
    rows = {str(h) if h < S else "mean": (kl[:, h], largest[:, h], same[:, h]) for h in range(kl.size(1))}
    rows["all"] = kl[:, :S].mean(1), largest[:, :S].amax(1), same_all
    print(f"""{run}: {title}
KL: of the depth weights of a {what} from {centre}, nats, mean over tokens and the sites that have a choice
deviation: largest |weight - {centre}| over sites and sources, both averaged over tokens first
halves: correlation of all these deviations between the first and the last half of the windows
random: random queries of the same norm per {what} and site at the same sources, mean (standard deviation) of {draws} draws
{what:<6}{"".join(f"{z:>10}{'random':>17}" for z in ("KL", "deviation", "halves"))}""")
    for row, values in rows.items():                        # mean: of the slices' logits
        print(f"{row:<6}" + "".join(f"{v[0]:>10.4f}{v[1:].mean():>8.4f} ({v[1:].std():.4f})" for v in values))
    panels = [("the one query", m)] * one + [(f"{what} {h}, KL {kl[0, k]:.3f}", [z[:, [k]] for z in a]) for k, h in enumerate([*rows][:-1])]
    n, across = np.array([len(z) for z in a]), max(c for c in range(1, 6) if len(panels) % c == 0)  # n: sources at each site
    fig, axes = plt.subplots(len(panels) // across, across, sharex=True, sharey=True, squeeze=False, layout="constrained", dpi=160,
                             figsize=(9.6, 1.2 + 2.3 * (len(panels) // across)))
    for ax, (title, weights) in zip(axes.flat, panels):
        image = ax.imshow(pad_sequence(weights, True, np.nan)[..., 0].numpy(), cmap="Greys", norm=PowerNorm(0.5, 0, 1), aspect="auto")
        ax.step(np.r_[n, n[-1:]] - 0.5, np.arange(len(n) + 1) - 0.5, color="black", linewidth=0.6)  # no source stands right of it
        ax.set_title(title, fontsize=9)
        ax.locator_params(integer=True)
    fig.colorbar(image, ax=axes, label="depth weight, mean over tokens", ticks=(0, 0.01, 0.05, 0.1, 0.25, 0.5, 1))
    fig.supxlabel(f"source n: 0 {'null, 1 embedding, then block deltas' if delta else 'embedding, then attention, MLP, ...'}", size=10)
    fig.supylabel(f"site i: what sublayer i reads{'' if delta else '; last, the LM head'}", size=10)
    fig.savefig(path)
    return rows

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("figure", nargs="?", default="mhar", choices=("mhar", "curves", "heads"))
    p.add_argument("runs", nargs="*", metavar="RUN_DIR", help="folders of train.py: one or more for curves, one for heads")
    p.add_argument("--out", metavar="PNG", type=lambda s: s if Path(s).suffix else s + ".png", help="default: FIGURE.png in RUN_DIR")
    p.add_argument("--data", help="heads: folder whose val split is read (default: that of the run)")
    p.add_argument("--text", metavar="FILE", help="heads: text to read instead of a val split")
    p.add_argument("--windows", type=int, default=32, help="heads: how many windows of block_size tokens to read (default: 32)")
    args = p.parse_intermixed_args(argv)
    if len(args.runs) not in dict(mhar=[0], heads=[1]).get(args.figure, range(1, 1000)):
        p.error(f"{args.figure} with {len(args.runs)} RUN_DIR; curves takes one or more, heads one, mhar none")
    path = args.out or Path(args.runs[0] if args.runs else Path(__file__).parent, args.figure + ".png")
    try:
        heads(*args.runs, args.data, args.text, args.windows, path) if args.figure == "heads" else (
            curves(args.runs, path) if args.runs else schematic(path))
    except (ValueError, OSError) as e:
        sys.exit(f"figures.py: {e}")
    print(f"-> {path}")

if __name__ == "__main__":
    main()
