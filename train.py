"""
Train, compare and evaluate the models of mhar.py. One script, read from top to bottom.

    python train.py                                                     # tiny MHAR on the default corpus: minutes on a CPU
    python train.py --mode baseline,hyper,attnres,mhar,mhar:4           # one after another, same data order, then a paired table
    python train.py --data data/fineweb --scale 100m --out out/100m     # the paper's recipe on one GPU
    torchrun --nproc_per_node=8 train.py --data data/fineweb --scale 1b # the same batches and losses on eight
    python train.py --init_from Llama-3.1-8B --mode baseline,delta ...  # mid-training from a pretrained model, and its control

OUT/log.jsonl has one record per iteration, with val_loss where the model was evaluated after it; OUT/ckpt.pt is the last
checkpoint and OUT/config.json says what was run. Ctrl-C ends the step, saves and leaves; --resume goes on from there exactly.
"""
import argparse
import contextlib
import datetime
import functools
import gc
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import timeit
from dataclasses import MISSING, asdict, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import prepare_data
from mhar import GPT, SCALES, DeltaRouting, GPTConfig, convert_to_delta, fused_kernels, upcast

# what --scale means besides the model: the paper's recipe (section 4), and a short one for a CPU; --init_from has one of its own
PAPER = dict(max_iters=20000, lr=5e-4, warmup_iters=1000, eval_interval=500)
RECIPES = {"tiny": dict(batch_size=8, grad_accum=1, max_iters=600, lr=3e-3, warmup_iters=50, eval_interval=200),
           "100m": dict(batch_size=8, grad_accum=8, **PAPER), "350m": dict(batch_size=4, grad_accum=8, **PAPER),
           "1b": dict(batch_size=2, grad_accum=16, **PAPER),
           "init_from": dict(batch_size=1, grad_accum=256, max_iters=9500, lr=4e-4, warmup_iters=200, eval_interval=500)}

# dense bf16 peak in FLOP/s by device name; the first entry found as a whole word counts
PEAK_FLOPS = {"H200 NVL": 835e12, "H200": 989e12, "GH200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
              "H800 PCIe": 756e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12, "A10": 125e12,
              "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12}

DEFAULT_DATA = "data/stdlib"
NOT_KEPT = "resume overwrite eval_only bench table stop_at out device compile cuda_graph fused fsdp text".split()  # not kept in checkpoints

def peak_flops(device_name):
    """Dense bf16 FLOP/s of a device, or None for one that is not in the table."""
    part = re.search(r"MIG|Laptop|4090 D", device_name)      # a slice or a slower namesake
    return next((v for k, v in PEAK_FLOPS.items() if not part and re.search(rf"\b{k}\b", device_name)), None)

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
    Windows of `block` tokens and the same one token later. The k-th of a run, over all steps and ranks, depends on (seed, k) alone:
    every epoch visits each window once, in an order of its own. They do not overlap, and a tail that fills none goes unused.
    """
    def __init__(self, path, dtype, block, batch, seed, vocab_size=None):
        self.tokens = np.memmap(path, dtype, "r") if os.path.getsize(path) else np.empty(0, dtype)
        self.path, self.block, self.batch, self.vocab_size = path, block, batch, vocab_size
        self.windows = max(0, len(self.tokens) - 1) // block
        self.order = functools.lru_cache(1)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(self.windows))   # of one epoch

    def take(self, windows):
        """Numbers of windows -> x, y int64 [len(windows), block]."""
        at = np.asarray(windows)[:, None] * self.block + np.arange(self.block + 1)
        xy = torch.from_numpy(self.tokens[at].astype(np.int64))
        if self.vocab_size and xy.max() >= self.vocab_size:
            raise ValueError(f"{self.path} holds token id {xy.max()}, but its vocab_size is {self.vocab_size}")
        return xy[:, :-1].clone(), xy[:, 1:].clone()        # of one window too, where contiguous() would share memory

    def microbatch(self, i):
        """The i-th microbatch of the run."""
        places = [divmod(k, self.windows) for k in range(i * self.batch, (i + 1) * self.batch)]
        return self.take([self.order(epoch)[position] for epoch, position in places])

# ---------------------------------------------------------------- several processes, started by torchrun
def world():                                                # rank and number of processes
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def sum_over_ranks(x):
    dist.all_reduce(x) if world()[1] > 1 else None
    return x

def full(x):
    """A sharded tensor (--fsdp) put together in main memory; of a state dict all, on rank 0 alone. Every process has to call it."""
    if isinstance(x, dict):
        return {k: y for k, y in ((k, full(v)) for k, v in x.items()) if world()[0] == 0}
    return x.full_tensor().cpu() if hasattr(x, "full_tensor") else x

def cut(x, p):
    """x, a piece of the optimizer state of parameter p, sharded as p is."""
    sharded = hasattr(p, "full_tensor") and x.shape == p.shape              # AdamW's step is not
    return dist.tensor.distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None).clone() if sharded else x

# ---------------------------------------------------------------- files
def write_atomic(path, content):
    """Writes text, or anything else by torch.save, beside the file and renames: a failure leaves the old file."""
    tmp = Path(path + ".tmp")
    try:
        with open(tmp, "w" if isinstance(content, str) else "wb") as f:
            f.write(content) if isinstance(content, str) else torch.save(content, f)
        tmp.replace(path)
    except (OSError, RuntimeError) as e:                    # torch.save reports a full disk by either
        raise OSError(f"{path} could not be written: {e.__context__ or e}") from e
    finally:
        tmp.unlink(missing_ok=True)

def load_checkpoint(out):
    """OUT/ckpt.pt, mapped rather than read, or None if there is none. Holds only tensors and plain values. Raises ValueError."""
    path = out if os.path.isfile(out) else os.path.join(out, "ckpt.pt")
    try:
        c = torch.load(path, map_location="cpu", mmap=True, weights_only=True) if os.path.exists(path) else None
        keys = "model optimizer step data args".split()
        return None if c is None else {**c, **{k: c[k] for k in keys}, "config": asdict(GPTConfig(**c["config"]))}
    except Exception as e:                                  # a damaged file has many ways to fail
        hint = "a pretrained model is given as its folder" if os.path.isfile(out) else "--overwrite starts anew"
        raise ValueError(f"{path} is damaged or of another program ({e if type(e) is ValueError else type(e).__name__}); {hint}") from e

def read_log(out):
    """The records of OUT/log.jsonl; a last line that was cut off is left out."""
    path, records = Path(out, "log.jsonl"), []
    try:
        records.extend(r for r in map(json.loads, path.read_text().split("\n")[:-1] if path.exists() else ()) if r["iter"] >= 0)
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}:{len(records) + 1} is no record of a step ({type(e).__name__}: {e})") from None
    return records

def pretrained(path, device="cpu"):
    """The model in a Hugging Face folder, a ckpt.pt or the folder of one, on cpu or meta; of a ckpt.pt the weight average if it has one."""
    ckpt = load_checkpoint(path)
    with torch.device(device):
        model = GPT(GPTConfig(**ckpt["config"])) if ckpt else GPT.from_pretrained(path, device=device)
    if ckpt and device != "meta":
        model.load_state_dict(ckpt.get("ema", ckpt["model"]))
    return model

def print_table(outs):
    """The paired table from logs. val loss: mean of the evaluations at steps >= 0.75 max_iters; delta: against the first row."""
    print(f"\n{'run':<14}{'val loss':>10}{'delta':>9}{'tokens/s':>11}{'peak MiB':>9}{'parameters':>13}{'steps':>8}  folder")
    runs, free = [], {*NOT_KEPT, *"mode name scale route_heads delta_blocks hc_streams kernel grad_checkpoint".split(),
                      *"batch_size grad_accum ema ckpt_interval val_loss".split()}              # in what paired runs may differ
    for out in outs:
        try:
            config, log = json.loads(Path(out, "config.json").read_text()), read_log(out)
            args = config["args"]
            loss = np.mean([r["val_loss"] for r in log if "val_loss" in r and r["iter"] + 1 >= 0.75 * args["max_iters"]] or [math.nan])
            speed = np.median([r["tokens_per_s"] for r in log[len(log) // 10:]] or [math.nan])      # past compilation
            memory, steps = max([r["memory_mb"] or 0 for r in log] or [0]), log[-1]["iter"] + 1 if log else 0
            runs.append({**args, **config["model"], "data": config["data"]["train"]["sha256"], "val_loss": loss,
                         "batch_size x grad_accum": args["batch_size"] * args["grad_accum"]})
        except (OSError, KeyError, TypeError, ValueError) as e:
            raise ValueError(f"--table: {out} is no folder of a run ({type(e).__name__}: {e})") from e
        print(f"{config['name']:<14}{loss:>10.4f}{loss - runs[0]['val_loss']:>+9.4f}{speed:>11,.0f}"
              f"{f'{memory:,.0f}' if memory else 'n/a':>9}{config['parameters']:>13,}{steps:>8,}  {out}")
    odd = [k for k in dict.fromkeys(k for run in runs for k in run) if k not in free and any(run.get(k) != runs[0].get(k) for run in runs)]
    print("not paired: these runs differ in " + ", ".join(odd)) if odd else None

# ---------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(model, data, sequences, device, autocast):
    """Mean loss in nats a token over so many windows, spread evenly over the data: the same ones at every call."""
    (rank, size), n, total, count = world(), min(sequences, data.windows), 0.0, 0
    windows = np.linspace(0, data.windows - 1, n).astype(np.int64)
    model.eval()
    for i in range(0, n, size * data.batch):                # whole batches for the compiler, as many on every rank for shards
        mine = windows[i + rank * data.batch:][:data.batch]
        x, y = data.take(np.resize(mine, data.batch))
        y[len(mine):] = -100                                # what cross-entropy leaves out
        with autocast(model):
            loss, tokens = model(x.to(device), y.to(device))[1].item(), (y >= 0).sum().item()
        total, count = total + (loss * tokens if tokens else 0.0), count + tokens
    model.train()
    total, count = sum_over_ranks(torch.tensor([total, count], dtype=torch.float64, device=device if size > 1 else "cpu")).tolist()
    if not math.isfinite(total):
        raise FloatingPointError(f"the validation loss is {total / count}")
    return total / count

def text_windows(args, T):
    """
    --text FILE -> its windows, for `evaluate`, and its number of bytes, words (between white space) and tokens. One end-of-text token and
    then the text's are cut into windows of T inputs that do not overlap: each token is predicted once, from its window's up to it.
    """
    text, ids = prepare_data.read_text(args.data, args.text)
    ids, pad = torch.tensor(ids), torch.full((-(len(ids) - 1) % T,), -100)
    x, y = torch.cat((ids[:-1], 0 * pad)).view(-1, T), torch.cat((ids[1:], pad)).view(-1, T)
    return (argparse.Namespace(windows=len(x), batch=args.batch_size, take=lambda at: (x[at], y[at])),
            dict(byte=len(text.encode()), word=len(text.split()), token=len(ids) - 1))

def finish(args, meta, model, device, loss):
    """The last words of a run: what its validation loss means (None: never evaluated), and 200 sampled tokens."""
    if loss is not None:
        bits = loss * meta["val"]["tokens"] / meta["val"]["bytes"] / math.log(2)
        print(f"{args.name}: validation loss {loss:.4f} nats a token, {bits:.3f} bits a byte (unigrams: {meta['unigram_entropy']:.2f})")
    try:
        enc = prepare_data.read_encoding(args.data)
        rng = torch.Generator(device).manual_seed(args.seed)
        ids = model.generate(torch.tensor([[enc.eot_token]], device=device), 200, temperature=0.8, top_k=50, generator=rng)[0, 1:]
        text, terminal = enc.decode([t for t in ids.tolist() if t < enc.n_vocab]), sys.stdout.encoding or "utf-8"
        print(f"--- sample\n{text.encode(terminal, 'replace').decode(terminal)}\n---", flush=True)
    except (ValueError, KeyError) as e:
        print(f"no sample: {e}")

# ---------------------------------------------------------------- training
@contextlib.contextmanager
def signals():
    """The numbers of SIGINT and SIGTERM as they come, for the loop to read at the end of a step. Ctrl-C again, 2 s later, acts at once."""
    got, times = [], []
    def note(number, frame):
        got.append(number)
        times.append(time.time())
        if number == signal.SIGINT and times[-1] > times[0] + 2:
            raise KeyboardInterrupt
    old = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)

def build(args, config, state, device, dtype):
    """The model of a run on its device: with the state if there is one, else from --init_from, else random by --seed."""
    torch.manual_seed(args.seed)
    with torch.device("meta" if state else "cpu"):
        model = pretrained(args.init_from) if args.init_from and not state else GPT(config)
    if model.config.mode != config.mode:
        model = convert_to_delta(model, config.route_heads, config.delta_blocks)
    model.config = config
    if state:                                               # mapped, not copied: eight processes share the file's pages
        model.load_state_dict(state, assign=True)
        model.lm_head.weight = model.embed.weight if config.tie_embeddings else model.lm_head.weight
    if args.fsdp:                                           # moves and cuts one sublayer after another, the rest last
        from torch.distributed.fsdp import fully_shard
        mesh = dist.init_device_mesh(device.type, (world()[1],))
        for module in (*(f for block in model.blocks for f in (block.attn, block.mlp)), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return model.to(device, dtype)

def captured(forward_backward, model, batch, alone):
    """Forward and backward of a microbatch as a CUDA graph: it adds to the gradients or, alone in its step, writes them; and its bytes."""
    x, y, side = *(z.clone() for z in batch), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):                                  # compiles, and makes the gradients that the graph adds to
            forward_backward(x, y)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=alone)
    torch._C._cuda_clearCublasWorkspaces()                  # 32 MiB a thread and stream: the side stream's, and those of a run before
    torch.cuda.empty_cache()                                # the graph has its own memory
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):        # other threads may belong to NCCL
        loss = forward_backward(x, y)
    def replay(*batch):
        x.copy_(batch[0])
        y.copy_(batch[1])
        graph.replay()
        return loss
    return replay, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()

def stepper(args, model, optimizer, autocast, batch):
    """-> step(microbatches, lr), one update -> loss, gradient norm before clipping, not waited for; and the bytes of its CUDA graph."""
    head, around = model.head, args.compile and (args.fused or args.fsdp or model.config.mode == "baseline")
    def objective(h, targets):                              # in training the logits stay inside: handed out, they would get a gradient
        logits, loss = head(h, targets)
        z = model.training and args.z_loss and args.z_loss * upcast(logits).logsumexp(-1).square().mean()
        return loss.detach(), loss + z
    compiled = torch.compile(objective) if around else objective
    model.head = lambda h, targets=None: head(h) if targets is None else compiled(h, targets)
    if around:                                              # a router and shards are no code for the compiler; a baseline is faster so
        for f in (f for block in model.blocks for f in (block.attn, block.mlp)):
            f.forward = torch.compile(f.forward)
        if isinstance(model.residual, DeltaRouting):
            model.residual.graft = torch.compile(model.residual.graft)      # else it keeps an fp32 copy of each read
    elif args.compile:
        model.compile()                                     # in place: no wrapper, so no prefix in the state dict
    def forward_backward(x, y):
        with autocast(model):
            loss, full_loss = model(x, y)
        (full_loss / args.grad_accum * (world()[1] if args.fsdp else 1)).backward()     # fully_shard takes the mean over ranks
        return loss / args.grad_accum
    alone = args.grad_accum == world()[1]                   # one microbatch a step and process
    run, held = captured(forward_backward, model, batch, alone) if args.cuda_graph else (forward_backward, 0)
    def step(microbatches, lr):
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        loss = sum(run(*batch).clone() for batch in microbatches)
        with dist._coalescing_manager() if world()[1] > 1 else contextlib.nullcontext():   # one call: NCCL is slow with small ones
            for p in model.parameters() if not args.fsdp else ():
                sum_over_ranks(p.grad)                      # not the mean: each loss was divided by the global grad_accum
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if args.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.grad_clip, norm)
        optimizer.step()
        if not (args.cuda_graph and alone):                 # such a graph writes them, another adds to the same tensors
            optimizer.zero_grad(set_to_none=not args.cuda_graph)
        return loss, norm
    return step, held

def seconds(update, batches, lr, wait, updates=10):
    """Median time of an update, after a round to warm up, where several run before anything is waited for: what the device can do."""
    return np.median(timeit.repeat(lambda: ([update(batches, lr) for _ in range(updates)], wait()), wait, repeat=6, number=1)[1:]) / updates

def print_bench(rows):                                      # of (name, tokens/s, MFU or nan, MiB or nan)
    print(f"\n{'run':<14}{'tokens/s':>11}{'ratio':>8}{'MFU':>8}{'peak MiB':>9}{'ratio':>8}")
    for name, speed, mfu, memory in rows:
        print(f"{name:<14}{speed:>11,.0f}{speed / rows[0][1]:>8.3f}{mfu:>8.3f}{memory:>9,.0f}{memory / rows[0][3]:>8.3f}")

def train(args, config, meta, ckpt, device, dtype, stale):
    """Trains one model into args.out, on from ckpt if any; --bench: a row of `print_bench`. FloatingPointError; at a signal SystemExit."""
    torch.compiler.reset()
    gc.collect()                                            # the model of the run before is a cycle
    (rank, size), cuda = world(), device.type == "cuda"
    text, units = text_windows(args, config.block_size) if args.text else (None, {})
    model = build(args, config, ckpt and ckpt["model"], device, getattr(torch, args.param_dtype))
    average = build(args, config, ckpt and ckpt["ema"], device, torch.float32) if args.ema else None
    optimizer = model.configure_optimizer(args.lr, args.weight_decay, decay=args.decay, route_lr=args.route_lr)
    models = {"val_loss": model, **({"ema_val_loss": average} if average else {})}
    def autocast(m):                                        # to dtype where the parameters are wider
        return torch.autocast(device.type, dtype, enabled=dtype.itemsize < m.embed.weight.itemsize, cache_enabled=False)
    data = {s: Loader(os.path.join(args.data, s + ".bin"), meta["dtype"], config.block_size, args.batch_size, args.seed,
                      meta["vocab_size"]) for s in ("train", "val")}
    step, per_step = ckpt["step"] if ckpt else 0, args.batch_size * args.grad_accum * config.block_size
    floor = 0.1 if args.min_lr is None else args.min_lr / (args.lr or 1.0)
    eval_sequences = args.eval_iters * args.batch_size * args.grad_accum
    if ckpt:                                                # the optimizer's state, not its groups: weight decay is a flag's
        params = [p for group in optimizer.param_groups for p in group["params"]]
        state = {i: {k: cut(v, params[i]) for k, v in s.items()} for i, s in ckpt["optimizer"]["state"].items()}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    if args.eval_only:
        for m in models.values():
            loss = evaluate(m, text or data["val"], text.windows if text else eval_sequences, device, autocast)
            found = ", ".join(f"{np.exp(np.float64(loss * units['token'] / n)):.6g} a {unit} ({n:,})" for unit, n in units.items())
            print(f"{args.name}: {f'perplexity {found}' if text else f'validation loss {loss:.4f}'} at step {step:,}"
                  + ", of the moving average of the weights" * (m is average)) if rank == 0 else None
        return
    name = torch.cuda.get_device_name(device) if cuda else str(device)
    flops, peak, log_path = model.estimate_flops(), peak_flops(name), os.path.join(args.out, "log.jsonl")
    if rank == 0:
        groups = [f"{sum(p.numel() for p in g['params']):,} with decay {g['weight_decay']}" for g in optimizer.param_groups]
        print(f"\n{args.name}: {model.num_params():,} parameters ({', '.join(groups)}), vocabulary {meta['vocab_size']:,} padded to "
              f"{config.vocab_size:,}\n{size} x {name}{', sharded' * args.fsdp}, {args.param_dtype} parameters, {str(dtype)[6:]} compute, "
              f"compile {'on' if args.compile else 'off'}, CUDA graph {'on' if args.cuda_graph else 'off'}, depth reads "
              f"{'fused' if args.fused else 'eager'}\nsteps {step:,} to {args.max_iters:,} of {per_step:,} tokens, "
              f"{data['train'].windows * config.block_size / per_step:,.1f} an epoch{'' if args.bench else ' -> ' + args.out}", flush=True)
    def load(it):                                           # this rank's microbatches of step `it`; pinned: the copy waits for nothing
        batches = [data["train"].microbatch(it * args.grad_accum + i) for i in range(rank, args.grad_accum, size)]
        return [[z.pin_memory().to(device, non_blocking=True) if cuda else z.to(device) for z in batch] for batch in batches]
    batches = load(step)
    update, held = stepper(args, model, optimizer, autocast, batches[0])
    torch.cuda.reset_peak_memory_stats() if cuda else None
    if args.bench:
        speed = per_step / seconds(update, batches, args.lr, torch.cuda.synchronize if cuda else lambda: None)
        memory = (torch.cuda.max_memory_allocated() + held) / 2**20 if cuda else math.nan
        return args.name, speed, flops * speed / size / (peak or math.nan), memory
    dist.barrier() if size > 1 else None                    # nothing old goes before all processes have come this far
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        kept = [r for r in read_log(args.out) if r["iter"] < step] if step else []
        print(f"{log_path} lacks {step - len(kept):,} of the checkpoint's {step:,} steps", flush=True) if len(kept) < step else None
        write_atomic(log_path, "".join(json.dumps(r) + "\n" for r in kept))
        git = shutil.which("git") and ["git", "-C", os.path.dirname(__file__), *"describe --always --dirty --abbrev=40 --exclude=*".split()]
        write_atomic(os.path.join(args.out, "config.json"), json.dumps(dict(
            name=args.name, parameters=model.num_params(), model=asdict(config), args=vars(args), data=meta, processes=size, device=name,
            torch=torch.__version__, commit=git and subprocess.run(git, capture_output=True, text=True).stdout.strip() or None), indent=1))
        for old in stale:                                   # of all modes, as the first starts: --resume must not find an old run
            Path(old, "ckpt.pt").unlink(missing_ok=True)
    first, last, start, shown, stop = step, min(args.max_iters, args.stop_at or args.max_iters), time.time(), 0.0, 0
    with signals() as got, open(log_path if rank == 0 else os.devnull, "a", buffering=1) as log:
        while step < last and not stop:
            it, t0, lr = step, time.perf_counter(), get_lr(step, args.lr, args.warmup_iters, args.max_iters, floor)
            loss, norm = update(batches, lr)
            batches = load(it + 1) if it + 1 < last else None               # while the device computes
            seen = sum_over_ranks(torch.stack((loss, torch.full_like(loss, got[0] if got else 0))))
            try:
                (loss, stop), grad_norm = seen.tolist(), full(norm).item()              # the one wait for the device
                if not math.isfinite(loss + grad_norm):     # the weights may be spoiled by now, but are never saved
                    raise FloatingPointError(f"the loss is {loss}, the gradient norm {grad_norm}")
                for e, p in zip(average.parameters(), model.parameters()) if average else ():
                    e.data.lerp_(p.data.to(e.dtype), 1 - args.ema)
                step, dt = step + 1, time.perf_counter() - t0
                record = dict(iter=it, loss=loss, lr=lr, grad_norm=grad_norm, tokens=step * per_step, dt=dt,
                              tokens_per_s=per_step / dt, mfu=flops * per_step / dt / size / peak if peak else None,
                              memory_mb=(torch.cuda.max_memory_allocated() + held) / 2**20 if cuda else None)
                if args.eval_interval and (step % args.eval_interval == 0 or step == args.max_iters):
                    record.update({k: evaluate(m, data["val"], eval_sequences, device, autocast) for k, m in models.items()})
                log.write(json.dumps(record, allow_nan=False) + "\n")
                if step == last or stop or args.ckpt_interval and step % args.ckpt_interval == 0:
                    if not all([full(p.isfinite().all()) for p in model.parameters()]):
                        raise FloatingPointError("a parameter is not finite")
                    state = full({k: z.state_dict() for k, z in (("model", model), ("optimizer", optimizer), ("ema", average)) if z})
                    if rank == 0:
                        keep = {k: v for k, v in vars(args).items() if k not in NOT_KEPT}
                        write_atomic(os.path.join(args.out, "ckpt.pt"), dict(state, step=step, data=meta, config=asdict(config), args=keep))
                    del state
            except FloatingPointError as e:
                raise FloatingPointError(f"iteration {it}: {e}") from None
            if rank == 0 and (time.time() - shown > (1 if sys.stdout.isatty() else 10) or step == last or "val_loss" in record):
                shown = time.time()
                val_loss = f"  val loss {record['val_loss']:.4f}" if "val_loss" in record else ""
                mfu = f"{record['mfu']:.1%}" if peak else "n/a"
                print(f"step {step:,}/{last:,}  loss {loss:.4f}{val_loss}  lr {lr:.1e}  grad norm {grad_norm:.2f}  {per_step / dt:,.0f} "
                      f"tokens/s  MFU {mfu}  {(shown - start) / (step - first) * (last - step):,.0f} s left", flush=True)
        if sum_over_ranks(torch.tensor(float(len(got)), device=device)).item():       # any rank's: torchrun ends all as one leaves
            print(f"stopped by a signal, saved at step {step:,}; --resume, without --overwrite, goes on", flush=True) if not rank else None
            sys.exit(128 + (got or [signal.SIGTERM])[0])
    if rank == 0 and first < step == args.max_iters:
        finish(args, meta, model, device, record.get("val_loss"))

# ---------------------------------------------------------------- the command line
def parser():
    def by_scale(table, name):
        return ", ".join(f"{scale} {values[name]}" for scale, values in table.items())
    style = type("Help", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {})
    p = argparse.ArgumentParser(description=__doc__, formatter_class=style, allow_abbrev=False)
    g = p.add_argument_group("what to run")
    g.add_argument("--data", default=DEFAULT_DATA, help="folder made by prepare_data.py; this one is made if missing")
    g.add_argument("--out", default="out", help="folder of the run; with several modes OUT/<mode> each")
    g.add_argument("--mode", default="mhar", help="baseline, hyper, attnres, mhar, delta; mhar:4 sets H; several with commas")
    g.add_argument("--scale", default="tiny", choices=SCALES, help="model fields and recipe to start from, without --init_from")
    g.add_argument("--init_from", help="start from these weights, a baseline's Hugging Face folder or a ckpt.pt, with its model fields")
    g.add_argument("--resume", action="store_true", help="continue from OUT/ckpt.pt, with its settings where no flag is given")
    g.add_argument("--overwrite", action="store_true", help="start anew where OUT holds a run")
    g.add_argument("--eval_only", action="store_true", help="evaluate OUT/ckpt.pt, or the --init_from given, and leave")
    g.add_argument("--text", metavar="FILE", help="with --eval_only: the perplexity of this text file instead of the validation loss")
    g.add_argument("--bench", action="store_true", help="time steps of these modes and leave; nothing is written")
    g.add_argument("--table", nargs="+", metavar="DIR", help="print the paired table of these runs and leave")
    g = p.add_argument_group("model fields", "what they mean: GPTConfig in mhar.py", argument_default=argparse.SUPPRESS)
    for f in fields(GPTConfig):
        text = (by_scale(SCALES, f.name) if f.name in SCALES["tiny"] else "the data's, rounded up to a multiple of 64"
                if f.default is MISSING else f.default)
        if f.type is bool:
            g.add_argument("--" + f.name, action="store_true", help=f"default: {text}")
            g.add_argument("--no_" + f.name, dest=f.name, action="store_false")
        elif f.name not in ("mode", "rope_scaling"):
            g.add_argument("--" + f.name, type=f.type if f.type in (float, str) else int, help=f"default: {text}")
    g = p.add_argument_group("training", argument_default=argparse.SUPPRESS)
    for name, value, text in (
            ("batch_size", int, "sequences per microbatch"), ("grad_accum", int, "microbatches per step, over all processes"),
            ("max_iters", int, "steps of the schedule"), ("stop_at", 0, "stop at this step, schedule unchanged; 0: never"),
            ("lr", float, "peak rate"), ("warmup_iters", int, "steps of linear warm-up"), ("weight_decay", 0.1, "of AdamW"),
            ("grad_clip", 1.0, "largest gradient norm; 0: no clipping"),
            ("route_lr", 1.0, "rate of the residual parameters (queries, gates, ...) over the others'; at 1, H heads start H times slower"),
            ("z_loss", 0.0, "times the mean square of the logits' log-sum-exp joins the objective, not the loss that is logged"),
            ("ema", 0.0, "factor of a moving average of the weights, in fp32, saved and evaluated as ema_val_loss; 0: none"),
            ("seed", 42, "of weights and data order"), ("eval_interval", int, "steps between evaluations; 0: never"),
            ("eval_iters", 20, "size of an evaluation, in steps' batches"), ("ckpt_interval", 1000, "steps between saves; 0: at the end")):
        by_recipe = name in RECIPES["tiny"]                 # the default is the recipe's, and value only its type
        g.add_argument("--" + name, type=value if by_recipe else type(value), default=argparse.SUPPRESS if by_recipe else value,
                       help=f"{text} (default: {by_scale(RECIPES, name)})" if by_recipe else text)
    g.add_argument("--min_lr", type=float, default=None, help="final rate; default: a tenth of the peak")
    g.add_argument("--decay", default="all", choices=("all", "matrices", "projections"), help="what weights decay; see configure_optimizer")
    g = p.add_argument_group("machine")
    g.add_argument("--device", default="auto", help="cpu, cuda or mps; auto: cuda where there is one, else cpu")
    g.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="compute; auto: bfloat16 on cuda")
    g.add_argument("--param_dtype", default="float32", choices=("float32", "bfloat16"), help="parameters and optimizer state")
    g.add_argument("--fsdp", action="store_true", help="shard parameters, gradients and optimizer over the processes of torchrun")
    for name, text in (("compile", "torch.compile"), ("cuda_graph", "replay microbatches as a CUDA graph, without --fsdp")):
        g.add_argument("--" + name, action="store_true", default=None, help=text + "; on by default on cuda alone")
        g.add_argument("--no_" + name, dest=name, action="store_false", default=None)
    return p

def settings(args, spec, out):
    """The flags of one run -> args, GPTConfig, meta and the checkpoint to go on from or None, all checked. Raises ValueError."""
    mode, colon, heads = spec.partition(":")
    if colon and not (mode in ("mhar", "delta") and re.fullmatch("[1-9][0-9]*", heads)):
        raise ValueError(f"--mode {spec}: only mhar and delta take a number of heads, as mhar:4")
    named = {"mode": mode, **({"route_heads": int(heads)} if heads else {})}
    args = argparse.Namespace(**{**RECIPES["init_from" if args.init_from else args.scale], **vars(args), "mode": spec, "out": out})
    meta = prepare_data.read_meta(args.data)
    ckpt = None if args.overwrite else load_checkpoint(out)
    if not (args.overwrite or args.resume or args.eval_only) and (ckpt or read_log(out)):
        raise ValueError(f"{out} holds a run" + (f" at step {ckpt['step']}; --resume continues it" if ckpt else "'s log")
                         + ", --overwrite starts anew")
    if not (args.eval_only or args.bench) and (any(Path(out).glob("*.safetensors*"))
            or not ckpt and any('"args"' not in f.read_text("utf-8", "replace") for f in Path(out).glob("config.json"))     # not of a run
            or args.init_from and not ckpt and os.path.realpath(args.init_from) in map(os.path.realpath, (out, out + "/ckpt.pt"))):
        raise ValueError(f"--out {out} holds a pretrained model, that of --init_from or another program's config.json; take another --out")
    if os.path.exists(out) and not (args.eval_only or args.bench or os.access(out, os.W_OK)):
        raise ValueError(f"--out {out} cannot be written to")
    given = {**SCALES[args.scale], "vocab_size": (padded := -(-meta["vocab_size"] // 64) * 64)}
    if args.init_from:
        source = ckpt or load_checkpoint(args.init_from)    # None: a pretrained model's folder
        given = source["config"] if source else asdict(pretrained(args.init_from, "meta").config)
        if mode != given["mode"] and (given["mode"], mode) != ("baseline", "delta"):
            raise ValueError(f"--mode {mode} is another function than {given['mode']}, --init_from's; give its mode, or a baseline's delta")
        free = ["block_size", "kernel", "grad_checkpoint", *["route_heads", "delta_blocks"] * (given["mode"] == "baseline")]
        if wrong := [f"--{k} {v}" for k, v in {**vars(args), **named}.items() if k in given and k not in ("mode", *free) and v != given[k]]:
            raise ValueError(f"{', '.join(wrong)}: the model of --init_from is another; only {', '.join(free)} can be set")
        if source and not ckpt and not prepare_data.same_tokenizer(source["data"], meta):
            raise ValueError(f"--init_from has another tokenizer, {source['data']['encoding']}, than {args.data}, {meta['encoding']}")
    config = GPTConfig(**{**given, **{f.name: getattr(args, f.name) for f in fields(GPTConfig) if hasattr(args, f.name)}, **named})
    args.name = mode + (f":{config.route_heads}" if mode in ("mhar", "delta") else "")
    for name, value in vars(args).items():
        low = 1 if name in ("batch_size", "grad_accum", "eval_iters") else 0            # GPTConfig has seen to the model's own
        if value == "" or isinstance(value, (int, float)) and not low <= value < 2**63:
            raise ValueError(f"--{name} is {value!r}, expected {f'a number from {low}' if value != '' else 'a name'}")
    if args.grad_accum % world()[1] and not args.eval_only:
        raise ValueError(f"--grad_accum {args.grad_accum} is not a multiple of the {world()[1]} processes")
    if args.ema >= 1 or args.min_lr is not None and args.min_lr > args.lr:
        raise ValueError(f"--ema {args.ema} must be below 1, and --min_lr {args.min_lr} not above --lr {args.lr}")
    if args.param_dtype == "bfloat16" and args.dtype == "float32":
        raise ValueError("--dtype float32 needs --param_dtype float32")
    if config.vocab_size < meta["vocab_size"] or args.init_from and args.data == DEFAULT_DATA and config.vocab_size != padded:
        raise ValueError(f"the model has {config.vocab_size} tokens, {args.data} {meta['vocab_size']}: take --data made with its tokenizer")
    for split, needed in (("train", not args.eval_only), ("val", (args.eval_interval or args.eval_only) and not args.text)):
        tokens, path = meta[split]["tokens"], os.path.join(args.data, split + ".bin")
        if os.path.getsize(path) != tokens * np.dtype(meta["dtype"]).itemsize:
            raise ValueError(f"{path} has {os.path.getsize(path)} bytes, but meta.json says {tokens} tokens of {meta['dtype']}")
        if needed and tokens < config.block_size + 1:
            raise ValueError(f"the {split} split has {tokens} tokens, and one window needs block_size + 1 = {config.block_size + 1}"
                             + ("; --eval_interval 0 trains without evaluation" if split == "val" else ""))
    if ckpt:
        def identity(args, config, data):                   # what a run is; kernel and checkpointing are only how it is computed
            return {**config, "kernel": None, "grad_checkpoint": None, **{k: args[k] for k in ("seed", "param_dtype", "decay", "route_lr")},
                    "init_from": os.path.realpath(args.get("init_from") or ""), "ema": bool(args.get("ema")),
                    **{f"{s}.bin sha256": data[s]["sha256"] for s in ("train", "val")},
                    "batch_size x grad_accum": args["batch_size"] * args["grad_accum"]}
        then, now = identity(ckpt["args"], ckpt["config"], ckpt["data"]), identity(vars(args), asdict(config), meta)
        if changed := [f"{k} {then[k]} -> {now[k]}" for k in now if now[k] != then[k]]:
            raise ValueError(f"the checkpoint in {out} was made with other settings: {', '.join(changed)}")
        if ckpt["step"] > (last := min(args.max_iters, args.stop_at or args.max_iters)):
            raise ValueError(f"{out} is at step {ckpt['step']}, past {last}, where --max_iters {args.max_iters} or --stop_at ends")
    return args, config, meta, ckpt

def main(argv=None):
    p = parser()
    args = p.parse_args(argv)
    try:
        if args.table:
            return print_table(args.table)
        if args.overwrite + args.resume + args.eval_only > 1 or args.eval_only and args.bench:
            raise ValueError("of --resume, --overwrite and --eval_only (or --bench) give one: they continue, start anew and only read")
        if (text := args.text and not args.eval_only) or args.fsdp and (args.cuda_graph or "RANK" not in os.environ):
            raise ValueError("--text goes with --eval_only alone" if text else "--fsdp goes with torchrun and without --cuda_graph")
        args.overwrite |= bool(args.eval_only and args.init_from) or args.bench             # whatever OUT holds
        outs = [os.path.join(args.out, spec.replace(":", "-")) for spec in args.mode.split(",")] if "," in args.mode else [args.out]
        flags = [args] * len(outs)
        if args.resume or args.eval_only and not args.init_from:    # settings: a flag over the checkpoint over the recipe
            ckpts = [load_checkpoint(out) for out in outs]
            if not any(ckpts) or args.eval_only and not all(ckpts):
                raise ValueError(f"there is no checkpoint ckpt.pt in {' or '.join(outs)}"
                                 + "; its subfolders have some: give the --mode that made them" * any(Path(args.out).glob("*/ckpt.pt")))
            for i, ckpt in enumerate(ckpts):                # each its own
                p.set_defaults(**{k: v for k, v in (ckpt or next(filter(None, ckpts)))["args"].items() if k != "mode" or len(outs) < 2})
                flags[i] = p.parse_args(argv)
            args = flags[0]
        if len(set(outs)) < len(outs):
            raise ValueError(f"--mode {args.mode} names a run twice")
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
        local, cuda = int(os.environ.get("LOCAL_RANK", "0")), kind == "cuda"             # local: among the node's processes, from 0
        if kind not in ("cpu", "cuda", "mps") or kind != "cpu" and local >= getattr(torch, kind).device_count():
            raise ValueError(f"--device {kind} is not available here to process {local}; auto takes what there is, one GPU a process")
        if args.cuda_graph and not cuda:
            raise ValueError(f"--cuda_graph needs --device cuda, not {kind}")
        device = torch.device(f"cuda:{local}" if cuda else kind)
        torch.cuda.set_device(device) if cuda else None
        if "RANK" in os.environ and not dist.is_initialized():              # an hour: for a long save
            dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(hours=1), device_id=device if cuda else None)
        rank, size = world()
        if args.data == DEFAULT_DATA and not os.path.exists(args.data) and rank == 0:
            print("preparing the default corpus, the Python standard library's own sources", flush=True)
            prepare_data.main(["--out", args.data, "--val_frac", "0.05"])
        dist.barrier() if size > 1 else None
        runs = [settings(*z) for z in zip(flags, args.mode.split(","), outs)]
        seen = [[{**m, **vars(a), **asdict(c), "mode": args.mode, "step": k and k["step"]} for a, c, m, k in runs]] * size
        dist.all_gather_object(seen, seen[0]) if size > 1 else None         # all accept, and agree, before anything is lost
        if odd := {f"{k} {x[k]} and {y[k]}" for them in seen for x, y in zip(seen[0], them) for k in x if x[k] != y[k]}:
            raise ValueError(f"the processes are to do the same, but have {', '.join(sorted(odd))}")
        dtype = getattr(torch, args.dtype if args.dtype != "auto" else "bfloat16" if cuda else args.param_dtype)
        for args, config, *_ in runs:
            args.compile = cuda if args.compile is None else args.compile
            args.cuda_graph = cuda and not args.fsdp if args.cuda_graph is None else args.cuda_graph
            args.fused = config.mode not in ("baseline", "hyper") and fused_kernels(config.kernel, device, dtype) is not None
        results = [train(*run, device, dtype, outs if args.overwrite and run is runs[0] else ()) for run in runs]
        if rank == 0 and (len(outs) > 1 and not args.eval_only or args.bench):
            print_bench(results) if args.bench else print_table(outs)
    except (ValueError, FloatingPointError, OSError, ImportError) as e:
        sys.exit(f"train.py: {e}")

if __name__ == "__main__":
    main()
    dist.destroy_process_group() if dist.is_initialized() else None
