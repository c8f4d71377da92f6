"""
Train, compare and evaluate the models of mhar.py. One script, read from top to bottom.

    python train.py                                                     # tiny MHAR on the default corpus: two minutes on a CPU
    python train.py --mode baseline,hyper,attnres,mhar,mhar:4           # one after another, same data order, then a paired table
    python train.py --data data/fineweb --scale 100m --out out/100m     # the paper's recipe on one GPU
    torchrun --nproc_per_node=8 train.py --data data/fineweb --scale 1b # the same batches and losses on eight

OUT/log.jsonl has one record per iteration, with val_loss where the model was evaluated after it; OUT/ckpt.pt is the last
checkpoint and OUT/config.json says what was run. Ctrl-C ends the step, saves and leaves; --resume goes on from there exactly.
"""
import argparse
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields

import numpy as np
import torch
import torch.distributed as dist

import prepare_data
from mhar import GPT, SCALES, GPTConfig

# what --scale means besides the model: the paper's recipe (section 4), and a short one for a CPU
PAPER = dict(max_iters=20000, lr=5e-4, warmup_iters=1000, eval_interval=500)
RECIPES = {"tiny": dict(batch_size=8, grad_accum=1, max_iters=600, lr=3e-3, warmup_iters=50, eval_interval=200),
           "100m": dict(batch_size=8, grad_accum=8, **PAPER),
           "350m": dict(batch_size=4, grad_accum=8, **PAPER),
           "1b": dict(batch_size=2, grad_accum=16, **PAPER)}

# dense bf16 peak in FLOP/s by device name; the first entry found as a whole word counts
PEAK_FLOPS = {"H200 NVL": 835e12, "H200": 989e12, "GH200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
              "H800": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12,
              "RTX 4090": 165e12}

DEFAULT_DATA = "data/stdlib"
OF_ONE_START = ("resume", "stop_at", "out", "data", "device", "dtype", "compile", "eval_only", "mode")     # not kept in checkpoints

def peak_flops(device_name):
    """Dense bf16 FLOP/s of a device, or None for one that is not in the table."""
    return next((v for k, v in PEAK_FLOPS.items() if re.search(rf"\b{k}\b", device_name)), None)

def flops_per_token(config):
    """FLOPs per token, forward + backward, of a GPTConfig."""
    with torch.device("meta"):
        return GPT(config).estimate_flops()

def get_lr(it, peak, warmup, total, min_ratio=0.1):
    """Linear warm-up over `warmup` updates, then a cosine that reaches min_ratio * peak in update total - 1. `it` starts at 0."""
    if it < warmup:
        return peak * (it + 1) / warmup
    x = min(1.0, (it - warmup + 1) / max(1, total - warmup))
    return peak * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * x)) / 2)

class Loader:
    """
    Windows of `block` tokens and the same one token later. The k-th window of a run, over all steps and ranks, is a pure
    function of (seed, k): each epoch visits every window once, in an order of its own. Windows do not overlap, so no token
    is predicted twice in an epoch; the tail that fills no window goes unused.
    """

    def __init__(self, path, dtype, block, batch, seed, vocab_size=None):
        self.tokens = np.memmap(path, dtype, "r") if os.path.getsize(path) else np.empty(0, dtype)
        self.block, self.batch, self.seed, self.vocab_size = block, batch, seed, vocab_size
        self.windows = max(0, len(self.tokens) - 1) // block
        self.epoch = self.order = None
        self.next = 0

    def window(self, k):
        """The number, within the file, of the k-th window of the run."""
        epoch, position = divmod(k, self.windows)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.windows)
        return self.order[position]

    def take(self, windows):
        """Numbers of windows -> x, y int64 [len(windows), block]."""
        at = np.asarray(windows)[:, None] * self.block + np.arange(self.block + 1)
        xy = torch.from_numpy(self.tokens[at].astype(np.int64))
        if self.vocab_size and xy.max() >= self.vocab_size:
            raise ValueError(f"the data holds token id {xy.max()}, but vocab_size is {self.vocab_size}")
        return xy[:, :-1].contiguous(), xy[:, 1:].contiguous()

    def microbatch(self, i):
        """The i-th microbatch of the run."""
        return self.take([self.window(k) for k in range(i * self.batch, (i + 1) * self.batch)])

    def __next__(self):
        self.next += 1
        return self.microbatch(self.next - 1)

# ---------------------------------------------------------------- several processes, started by torchrun
def world():
    """Rank and number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def sum_over_ranks(x):
    if dist.is_initialized():
        dist.all_reduce(x)
    return x

def sum_gradients(model):
    """One all-reduce a step, after accumulation: the losses are already divided by the global number of microbatches."""
    if dist.is_initialized():
        grads = [p.grad for p in model.parameters()]
        flat = sum_over_ranks(torch.cat([g.flatten() for g in grads]))
        for g, summed in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(summed.view_as(g))

def clip_and_check(model, max_norm):
    """Clips the gradient to max_norm (0: not at all) and returns its norm before. FloatingPointError if that is not finite."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient norm is {norm.item()}")
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm.item()

# ---------------------------------------------------------------- files
def write_atomic(path, content):
    """Writes text, or anything else by torch.save, beside the file and renames: a failure leaves the old file."""
    tmp = path + ".tmp"
    try:
        if isinstance(content, str):
            with open(tmp, "w") as f:
                f.write(content)
        else:
            torch.save(content, tmp)
        os.replace(tmp, path)
    except BaseException:
        if os.path.exists(tmp):
            os.remove(tmp)
        raise

def load_checkpoint(out):
    """OUT/ckpt.pt, mapped rather than read, or None. Plain tensors and numbers only."""
    path = os.path.join(out, "ckpt.pt")
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True) if os.path.exists(path) else None

def read_log(out):
    path = os.path.join(out, "log.jsonl")
    if not os.path.exists(path):
        return []
    with open(path) as f:
        return [json.loads(line) for line in f]

def git_commit():
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None

def print_table(outs):
    """The paired table from logs. val loss: mean of the evaluations at steps >= 0.75 max_iters; delta: against the first row."""
    print(f"\n{'run':<14}{'val loss':>10}{'delta':>9}{'tokens/s':>11}{'peak MB':>9}{'parameters':>13}{'steps':>8}")
    base = None
    for out in outs:
        try:
            with open(os.path.join(out, "config.json")) as f:
                config = json.load(f)
        except FileNotFoundError as e:
            raise ValueError(f"--table: {out} is no run, it has no config.json") from e
        log, steps = read_log(out), config["args"]["max_iters"]
        tail = [r["val_loss"] for r in log if "val_loss" in r and r["iter"] + 1 >= 0.75 * steps]
        loss = sum(tail) / len(tail) if tail else math.nan
        base = loss if base is None else base
        speed = np.median([r["tokens_per_s"] for r in log[len(log) // 10:]] or [math.nan])      # past compilation
        memory = max([r["memory_mb"] or 0 for r in log] or [0])
        print(f"{config['name']:<14}{loss:>10.4f}{loss - base:>+9.4f}{speed:>11,.0f}{f'{memory:,.0f}' if memory else 'n/a':>9}"
              f"{config['parameters']:>13,}{len(log):>8,}")

# ---------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(model, data, eval_iters, device, autocast):
    """Mean loss in nats a token, over eval_iters microbatches of windows spread evenly over the held-out split: always the same."""
    rank, size = world()
    batch = min(data.batch, data.windows)
    n = min(eval_iters, data.windows // batch)
    windows = np.linspace(0, data.windows - 1, n * batch).astype(np.int64).reshape(n, batch)
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    for w in windows[rank::size]:
        x, y = data.take(w)
        with autocast():
            total += model(x.to(device), y.to(device))[1]
    model.train()
    loss = sum_over_ranks(total).item() / n
    if not math.isfinite(loss):
        raise FloatingPointError(f"the validation loss is {loss}")
    return loss

def finish(args, meta, model, device):
    """The last words of a run: what the loss means, and 200 sampled tokens."""
    loss = [r["val_loss"] for r in read_log(args.out) if "val_loss" in r][-1:]
    if loss:
        bits = loss[0] * meta["val"]["tokens"] / meta["val"]["bytes"] / math.log(2)
        print(f"{args.name}: validation loss {loss[0]:.4f} nats a token, {bits:.3f} bits a byte; predicting each token by its frequency "
              f"alone gives {meta['unigram_entropy']:.2f} nats")
    try:
        enc = prepare_data.read_encoding(args.data)
    except ValueError as e:
        print(f"no sample: {e}")
        return
    rng = torch.Generator(device).manual_seed(args.seed)
    ids = model.generate(torch.tensor([[enc.eot_token]], device=device), 200, temperature=0.8, top_k=50, generator=rng)[0, 1:]
    print("--- sample\n" + enc.decode([t for t in ids.tolist() if t < enc.n_vocab]) + "\n---", flush=True)

# ---------------------------------------------------------------- training
class Interrupt:
    """SIGINT and SIGTERM leave a note, which the loop reads at the end of the step. The second one acts at once."""

    def __enter__(self):
        self.signal = 0
        self.old = {s: signal.signal(s, self.note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, number, frame):
        self.signal = number
        self.__exit__()

    def __exit__(self, *exc):
        for s, handler in self.old.items():
            signal.signal(s, handler)

def train(args, config, meta, device, dtype):
    """Trains one model into args.out. Returns the signal that ended it early, or 0. Raises FloatingPointError."""
    (rank, size), cuda = world(), device.type == "cuda"
    torch.manual_seed(args.seed)
    model = GPT(config).to(device, getattr(torch, args.param_dtype))
    optimizer = model.configure_optimizer(args.lr, args.weight_decay, decay=args.decay)
    autocast = functools.partial(torch.autocast, device.type, dtype, enabled=dtype.itemsize < model.embed.weight.itemsize)
    data = {s: Loader(os.path.join(args.data, s + ".bin"), meta["dtype"], config.block_size, args.batch_size, args.seed,
                      config.vocab_size) for s in ("train", "val")}
    step, per_step = 0, args.batch_size * args.grad_accum * config.block_size
    ckpt = load_checkpoint(args.out) if args.resume or args.eval_only else None
    if ckpt:
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        step = ckpt["step"]
    if args.eval_only:
        print(f"{args.name}: validation loss {evaluate(model, data['val'], args.eval_iters, device, autocast):.4f} at step {step:,}")
        return 0

    name = torch.cuda.get_device_name(device) if cuda else str(device)
    flops, peak = model.estimate_flops(), peak_flops(name)
    log_path, ckpt_path = os.path.join(args.out, "log.jsonl"), os.path.join(args.out, "ckpt.pt")
    if rank == 0:
        groups = [f"{sum(p.numel() for p in g['params']):,} with decay {g['weight_decay']}" for g in optimizer.param_groups]
        print(f"\n{args.name}: {model.num_params():,} parameters ({', '.join(groups)}), vocabulary {meta['vocab_size']:,} padded to "
              f"{config.vocab_size:,}\n{size} x {name}, {args.param_dtype} parameters, {str(dtype)[6:]} compute, compile "
              f"{'on' if args.compile else 'off'}\nsteps {step:,} to {args.max_iters:,} of {per_step:,} tokens, "
              f"{data['train'].windows * config.block_size / per_step:,.1f} an epoch -> {args.out}", flush=True)
        os.makedirs(args.out, exist_ok=True)
        kept = [json.dumps(r) + "\n" for r in read_log(args.out) if r["iter"] < step]       # back to the checkpoint's step
        write_atomic(log_path, "".join(kept))
        write_atomic(os.path.join(args.out, "config.json"), json.dumps(dict(
            name=args.name, parameters=model.num_params(), model=asdict(config), args=vars(args), data=meta, processes=size,
            device=name, torch=torch.__version__, commit=git_commit()), indent=1))
    if args.compile:
        model.compile()                                     # in place: no wrapper, so no prefix in the state dict

    def save():
        if not all(p.isfinite().all() for p in model.parameters()):
            raise FloatingPointError("a parameter is not finite")
        if rank == 0:
            write_atomic(ckpt_path, dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, data=meta,
                                         config=asdict(config), args={k: v for k, v in vars(args).items() if k not in OF_ONE_START}))

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    first, last, start, shown = step, min(args.max_iters, args.stop_at or args.max_iters), time.time(), 0.0
    with Interrupt() as interrupt, open(log_path if rank == 0 else os.devnull, "a") as log:
        while step < last:
            t0, lr = time.perf_counter(), get_lr(step, args.lr, args.warmup_iters, args.max_iters)
            for group in optimizer.param_groups:
                group["lr"] = lr
            seen = torch.zeros(2, dtype=torch.float64, device=device)               # loss, signals; to be summed over ranks
            for micro in range(rank, args.grad_accum, size):
                x, y = data["train"].microbatch(step * args.grad_accum + micro)
                with autocast():
                    loss = model(x.to(device), y.to(device))[1] / args.grad_accum
                loss.backward()
                seen[0] += loss.detach()
            seen[1] = interrupt.signal
            sum_gradients(model)
            loss, stop = sum_over_ranks(seen).tolist()
            if not math.isfinite(loss):
                raise FloatingPointError(f"iteration {step}: the loss is {loss}")
            try:
                grad_norm = clip_and_check(model, args.grad_clip)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step, dt = step + 1, time.perf_counter() - t0
                record = dict(iter=step - 1, loss=loss, lr=lr, grad_norm=grad_norm, tokens=step * per_step, dt=dt,
                              tokens_per_s=per_step / dt, mfu=flops * per_step / dt / size / peak if peak else None,
                              memory_mb=torch.cuda.max_memory_allocated() / 2**20 if cuda else None)
                if args.eval_interval and (step % args.eval_interval == 0 or step == args.max_iters):
                    record["val_loss"] = evaluate(model, data["val"], args.eval_iters, device, autocast)
                log.write(json.dumps(record) + "\n")
                log.flush()
                if step == last or stop or args.ckpt_interval and step % args.ckpt_interval == 0:
                    save()
            except FloatingPointError as e:
                raise FloatingPointError(f"iteration {step}: {e}") from None
            if rank == 0 and (time.time() - shown > (1 if sys.stdout.isatty() else 10) or step == last or "val_loss" in record):
                shown = time.time()
                print(f"step {step:,}/{last:,}  loss {loss:.4f}"
                      + (f"  val loss {record['val_loss']:.4f}" if "val_loss" in record else "")
                      + f"  lr {lr:.1e}  grad norm {grad_norm:.2f}  {per_step / dt:,.0f} tokens/s  MFU "
                      + (f"{record['mfu']:.1%}" if peak else "n/a")
                      + f"  {(shown - start) / (step - first) * (last - step):,.0f} s left", flush=True)
            if stop:
                return interrupt.signal or signal.SIGTERM   # another rank's
    if rank == 0 and first < step == args.max_iters:
        finish(args, meta, model, device)
    return 0

# ---------------------------------------------------------------- the command line
def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    g = p.add_argument_group("what to run")
    g.add_argument("--data", default=DEFAULT_DATA, help="folder made by prepare_data.py; the default one is made if missing")
    g.add_argument("--out", default="out", help="folder of the run (default: %(default)s); OUT/<mode> each for several modes")
    g.add_argument("--mode", default="mhar", help="baseline, hyper, attnres, mhar, delta; mhar:4 sets H; several with commas")
    g.add_argument("--scale", default="tiny", choices=SCALES, help="model fields and recipe to start from (default: %(default)s)")
    g.add_argument("--resume", action="store_true", help="continue from OUT/ckpt.pt, with its settings where no flag is given")
    g.add_argument("--overwrite", action="store_true", help="start anew where OUT holds a checkpoint")
    g.add_argument("--eval_only", action="store_true", help="evaluate OUT/ckpt.pt and leave")
    g.add_argument("--table", nargs="+", metavar="DIR", help="print the paired table of these runs and leave")
    g = p.add_argument_group("model fields (default: those of --scale)")
    for f in fields(GPTConfig):
        if f.type is bool:
            g.add_argument("--" + f.name, action="store_true", default=None)
            g.add_argument("--no_" + f.name, dest=f.name, action="store_false")
        elif f.name not in ("mode", "rope_scaling"):
            g.add_argument("--" + f.name, type=f.type if f.type in (int, float, str) else int)
    g = p.add_argument_group("training (default where none is given: the recipe of --scale)")
    for name, type, default, text in (
            ("batch_size", int, None, "sequences per microbatch"), ("grad_accum", int, None, "microbatches per step, over all processes"),
            ("max_iters", int, None, "steps of the schedule"), ("stop_at", int, 0, "stop at this step, schedule unchanged (0: never)"),
            ("lr", float, None, "peak rate"), ("warmup_iters", int, None, "steps of linear warm-up"),
            ("weight_decay", float, 0.1, "of AdamW"), ("grad_clip", float, 1.0, "largest gradient norm (0: no clipping)"),
            ("seed", int, 42, "of weights and data order"),
            ("eval_interval", int, None, "steps between evaluations (0: never)"), ("eval_iters", int, 20, "microbatches per evaluation"),
            ("ckpt_interval", int, 1000, "steps between checkpoints (0: only at the end)")):
        g.add_argument("--" + name, type=type, default=default, help=text + ("" if default is None else f" (default: {default})"))
    g.add_argument("--decay", default="all", choices=("all", "matrices"), help="what weight decay applies to (default: all, the paper's)")
    g = p.add_argument_group("machine")
    g.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: cuda where there is one, else cpu)")
    g.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="compute (default: bfloat16 on cuda)")
    g.add_argument("--param_dtype", default="float32", choices=("float32", "bfloat16"), help="parameters and optimizer state")
    g.add_argument("--compile", action="store_true", default=None, help="torch.compile (default: on cuda)")
    g.add_argument("--no_compile", dest="compile", action="store_false")
    return p

def settings(argv, spec, several):
    """Flags of one mode -> args, GPTConfig. Flag over checkpoint (--resume) over recipe. Raises ValueError."""
    p = parser()
    args = p.parse_args(argv)
    if several:
        args.out = os.path.join(args.out, spec.replace(":", "-"))
    ckpt = load_checkpoint(args.out)
    if ckpt and not (args.resume or args.eval_only or args.overwrite):
        raise ValueError(f"{args.out} holds a checkpoint at step {ckpt['step']}; --resume continues it, --overwrite starts anew")
    if not ckpt and (args.eval_only or args.resume and not several):
        raise ValueError(f"there is no checkpoint {os.path.join(args.out, 'ckpt.pt')}")
    if ckpt and not args.overwrite:
        out = args.out
        p.set_defaults(**ckpt["args"])
        args = p.parse_args(argv)
        args.out = out
    mode, _, heads = spec.partition(":")
    if heads and (mode not in ("mhar", "delta") or not heads.isdigit()):
        raise ValueError(f"--mode {spec}: only mhar and delta take a number of heads, as mhar:4")
    if heads:
        args.route_heads = int(heads)
    for name, value in RECIPES[args.scale].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("batch_size", "grad_accum", "eval_iters"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, expected at least 1")
    meta = prepare_data.read_meta(args.data)
    given = {f.name: getattr(args, f.name, None) for f in fields(GPTConfig)}
    given = {**SCALES[args.scale], **{k: v for k, v in given.items() if v is not None}, "mode": mode}
    given.setdefault("vocab_size", -(-meta["vocab_size"] // 64) * 64)
    config = GPTConfig(**given)
    args.name = mode + (f":{config.route_heads}" if mode in ("mhar", "delta") else "")
    if config.vocab_size < meta["vocab_size"]:
        raise ValueError(f"--vocab_size {config.vocab_size} is less than the data's {meta['vocab_size']}")
    for split, needed in (("train", not args.eval_only), ("val", args.eval_interval or args.eval_only)):
        if needed and meta[split]["tokens"] < config.block_size + 1:
            raise ValueError(f"the {split} split has {meta[split]['tokens']} tokens, and one window needs block_size + 1 = "
                             f"{config.block_size + 1}" + ("; --eval_interval 0 trains without evaluation" if split == "val" else ""))
    if ckpt and not args.overwrite:
        now = {**asdict(config), "seed": args.seed, "batch_size x grad_accum": args.batch_size * args.grad_accum,
               **{f"{s}.bin sha256": meta[s]["sha256"] for s in ("train", "val")}}
        then = {**ckpt["config"], "seed": ckpt["args"]["seed"],
                "batch_size x grad_accum": ckpt["args"]["batch_size"] * ckpt["args"]["grad_accum"],
                **{f"{s}.bin sha256": ckpt["data"][s]["sha256"] for s in ("train", "val")}}
        free = ("kernel", "grad_checkpoint")                # how it is computed, not what
        changed = [f"{k} {then[k]} -> {now[k]}" for k in now if now[k] != then[k] and k not in free]
        if changed:
            raise ValueError(f"the checkpoint in {args.out} was made with other settings: {', '.join(changed)}")
    return args, config, meta

def main(argv=None):
    args = parser().parse_args(argv)
    try:
        if args.table:
            return print_table(args.table)
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
        if kind not in ("cpu", "cuda", "mps") or not (kind == "cpu" or getattr(torch, kind).is_available()):
            raise ValueError(f"--device {kind} is not available here; auto takes what there is")
        if "RANK" in os.environ and not dist.is_initialized():
            dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        rank, size = world()
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        if args.data == DEFAULT_DATA and not os.path.exists(args.data) and rank == 0:
            print("preparing the default corpus, the Python standard library's own sources", flush=True)
            prepare_data.main(["--out", args.data, "--val_frac", "0.05"])
        if size > 1:
            dist.barrier()
        if not os.path.exists(os.path.join(args.data, "meta.json")):
            raise ValueError(f"--data {args.data} has no meta.json; prepare_data.py makes such a folder")
        specs = args.mode.split(",")
        runs = [settings(argv, spec, len(specs) > 1) for spec in specs]
        for args, _, _ in runs:
            if args.grad_accum % size:
                raise ValueError(f"--grad_accum {args.grad_accum} is not a multiple of the {size} processes")
        for args, config, meta in runs:
            args.compile = kind == "cuda" if args.compile is None else args.compile
            dtype = args.dtype if args.dtype != "auto" else "bfloat16" if kind == "cuda" else args.param_dtype
            torch.compiler.reset()
            stop = train(args, config, meta, device, getattr(torch, dtype))
            if stop:
                sys.exit(128 + stop)
        if len(runs) > 1 and rank == 0:
            print_table([args.out for args, _, _ in runs])
    except (ValueError, FloatingPointError, OSError) as e:
        sys.exit(f"train.py: {e}")

if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
