"""
The README's figures: python assets/figures.py (needs matplotlib). So far one, mhar.png: what a depth read is, with made-up weights.
"""
import os

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))

def bar(ax, x, y, shades, texts, label=None, width=1.15, height=0.52):
    """One vector of width D as slices side by side; a darker slice has more weight."""
    for h, (shade, text) in enumerate(zip(shades, texts, strict=True)):
        ax.add_patch(plt.Rectangle((x + h * width, y), width, height, facecolor=str(1 - 0.75 * shade), edgecolor="black", linewidth=0.8))
        color = "white" if shade > 0.55 else "black"
        ax.text(x + (h + 0.5) * width, y + height / 2, text, ha="center", va="center", fontsize=9, color=color)
    if label:
        ax.text(x - 0.15, y + height / 2, label, ha="right", va="center", fontsize=10)

def schematic(path, H=4):
    rng = np.random.default_rng(3)
    names = ["$s_0$  embedding", "$s_1$  attention 0", "$s_2$  MLP 0", "$s_3$  attention 1", "$s_4$  MLP 1"]
    columns = (("baseline", "$h_4=\\sum_n s_n$", np.full((5, 1), 0.3), lambda a: "1"),
               ("attnres: one query", "$h_4=\\sum_n a_n s_n$", rng.dirichlet(np.ones(5) * 0.7, 1).T, lambda a: f"{a:.2f}"),
               ("mhar: H = 4 queries", "$h_4[h]=\\sum_n a_{nh}\\, s_n[h]$", rng.dirichlet(np.ones(5) * 0.5, H).T, lambda a: f"{a:.2f}"))
    fig, ax = plt.subplots(figsize=(9.6, 3.5), dpi=160)
    for c, (title, equation, a, text) in enumerate(columns):
        x, n = c * 5.6, a.shape[1]
        ax.text(x + 2.3, 5.15, title, ha="center", fontsize=11, weight="bold")
        for i, name in enumerate(names):
            bar(ax, x, 4.2 - 0.72 * i, a[i], [text(z) for z in a[i]], name if c == 0 else None, width=4.6 / n)
        ax.annotate("", (x + 2.3, 0.62), (x + 2.3, 1.25), arrowprops=dict(arrowstyle="-|>", color="black"))
        bar(ax, x, 0.05, np.zeros(n), [""] * n, "input of attention 2" if c == 0 else None, width=4.6 / n)
        ax.text(x + 2.3, -0.5, equation, ha="center", fontsize=11)
    ax.annotate("", (15.8, 4.95), (11.2, 4.95), arrowprops=dict(arrowstyle="<->", color="black", linewidth=0.8))
    ax.text(15.9, 4.9, "width D", fontsize=9, va="center")
    ax.set_xlim(-3.4, 17.3)
    ax.set_ylim(-0.8, 5.6)
    ax.axis("off")
    fig.savefig(path, bbox_inches="tight")

if __name__ == "__main__":
    schematic(os.path.join(HERE, "mhar.png"))
