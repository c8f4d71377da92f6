"""
Text to token files: one train.bin, one val.bin (raw token ids) and meta.json, in the folder --out.

    python prepare_data.py                                   # the default corpus: the Python standard library's own sources
    python prepare_data.py --input shards/ a.jsonl.gz --out data/mine --encoding path/to/tokenizer.json

Text, Markdown and source files are one document each; .jsonl and .parquet one document a row. The end-of-text token follows
every document. A document is held out if the hash of its text, as a fraction of the hash range, is below --val_frac: the
same text never lands on both sides. Input streams through: memory holds 8 MB of documents per worker, or the largest document.
The output is byte-identical for any number of workers, and appears only when it is complete.
"""
import argparse
import base64
import concurrent.futures as cf
import glob
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
import unicodedata
import urllib.request
import zlib
from collections import Counter
from itertools import islice

import numpy as np
import tiktoken.load

TEXT = (".txt .md .rst .tex .html .css .js .ts .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .swift .rb .pl .php .cs .scala "
        ".hs .ml .lua .r .jl .sh .sql .toml .yaml .yml").split()
KIND = {".parquet": "row", ".jsonl": "json", ".jsonl.gz": "json", ".jsonl.xz": "json", **dict.fromkeys(TEXT, "text")}

# ---------------------------------------------------------------- tokenisers: each becomes a tiktoken.Encoding
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
# a .tiktoken file has no split pattern, but its number of ranks tells whose it is -> pattern, id of the end of text
RANK_FILES = {50256: (GPT2, 50256), 100256: (CL100K, 100257), 128000: (CL100K, 128001),             # GPT-2, cl100k, Llama-3
              151643: (CL100K.replace(r"\p{N}{1,3}", r"\p{N}"), 151643)}                            # Qwen
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")

def get_encoding(name):
    """The tiktoken.Encoding of `bytes`, a tokenizer.json or .tiktoken file, or a tiktoken name. ValueError if it can't be had."""
    if name == "bytes":
        return tiktoken.Encoding(name, pat_str=r"(?s).", mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    if is_file(name):
        if not os.path.isfile(name):
            raise ValueError(f"tokenizer file {name} does not exist")
        return encoding_from_json(name) if name.endswith(".json") else encoding_from_ranks(name)
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"encoding is {name!r}, expected bytes, a tokenizer.json or .tiktoken file, or a tiktoken name: "
                         + ", ".join(tiktoken.list_encoding_names()))
    tiktoken.load.read_file = download                       # tiktoken's own waits for ever
    return tiktoken.get_encoding(name)

def download(url):
    try:
        with urllib.request.urlopen(url, timeout=20) as f:
            return f.read()
    except OSError as e:
        raise ValueError(f"{url} is not in tiktoken's cache and could not be downloaded ({e}). On a machine with internet save it as "
                         f"{hashlib.sha1(url.encode()).hexdigest()}, put it in a folder here and set TIKTOKEN_CACHE_DIR to that folder; "
                         "or take --encoding bytes, which needs no file") from None

def is_file(name):
    return name.endswith((".json", ".tiktoken"))

def encoding_from_ranks(path):
    """A file of lines "base64 rank": qwen.tiktoken, cl100k_base.tiktoken, Llama-3's tokenizer.model under that ending."""
    try:
        with open(path, "rb") as f:
            ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, f)}
    except ValueError as e:
        raise ValueError(f"{path} is no rank file of lines 'base64 rank' ({e})") from None
    if len(ranks) not in RANK_FILES:
        raise ValueError(f"{path} has {len(ranks)} ranks, expected one of {list(RANK_FILES)} (GPT-2, cl100k, Llama-3, Qwen); "
                         "for any other tokenizer give its tokenizer.json, which holds the split pattern")
    pattern, eot = RANK_FILES[len(ranks)]
    return tiktoken.Encoding(path, pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": eot})

def encoding_from_json(path):
    """
    A Hugging Face tokenizer.json with byte-level BPE. Each setting that changes the tokens of plain text is honoured or refused
    by name; added tokens are never matched in text.
    """
    with open(path, encoding="utf-8") as f:
        spec = json.load(f)
    try:
        model, pre, norm = spec["model"], spec["pre_tokenizer"], (spec.get("normalizer") or {}).get("type")
        *splits, level = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
        special = {t["content"]: t["id"] for t in spec.get("added_tokens") or []}
        eot = next((special[t] for t in END_OF_TEXT if t in special), None)
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]       # GPT-2 writes these bytes as themselves and
        byte = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*shown}))}   # others from 256
        merged = ["".join(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
        order = [model["vocab"][token] for token in merged]
        ranks = {bytes(byte[c] for c in token): model["vocab"][token] for token in [*byte, *merged]}
        for bad, what in (
                (model["type"] != "BPE", f"model type {model['type']}"), (norm not in (None, "NFC"), f"normalizer {norm}"),
                *((model.get(k), k) for k in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")),
                (level["type"] != "ByteLevel" or level["add_prefix_space"], f"pre-tokenizer {level}"),
                (len(splits) > 1 or level.get("use_regex", True) == bool(splits), f"pre-tokenizer {pre}"),
                *((s["type"] != "Split" or s["behavior"] != "Isolated" or s["invert"] or "Regex" not in s["pattern"], f"step {s}")
                  for s in splits),
                (order != sorted(order), "a vocabulary that is not in the order of its merges"),
                (eot is None, f"a vocabulary without any of {', '.join(END_OF_TEXT)}")):
            if bad:
                raise ValueError(f"{path}: {what} is not supported, expected a byte-level BPE of GPT-2, Llama-3 or Qwen kind")
    except (KeyError, TypeError) as e:
        raise ValueError(f"{path} is no tokenizer.json with byte-level BPE, it lacks {e}") from None
    enc = tiktoken.Encoding(path, pat_str=splits[0]["pattern"]["Regex"] if splits else GPT2, mergeable_ranks=ranks,
                            special_tokens=special | {"<|endoftext|>": eot})
    enc.nfc = norm == "NFC"                                  # the caller's job, so that it comes before the hash
    return enc

def encode(enc, text):
    """Token ids of a text, without loss. What looks like a special token is plain text."""
    if enc.name == "bytes":
        return np.frombuffer(text.encode(), np.uint8)
    try:
        ids = enc.encode_ordinary(text)
    except BaseException as e:                               # the regex panics on very long runs, and not as an Exception
        if type(e).__name__ != "PanicException" or len(text) < 2:
            raise
        half = len(text) // 2                                # a token at the cut may differ
        return encode(enc, text[:half]) + encode(enc, text[half:])
    if enc.decode_bytes(ids) != text.encode():
        raise ValueError(f"tokenizer {enc.name} loses text, its split pattern does not cover {text[:60]!r}")
    return ids

# ---------------------------------------------------------------- documents
def kind(path):
    return next((k for ending, k in KIND.items() if path.lower().endswith(ending)), None)

def find_files(inputs):
    """Files and folders -> files, each once. Of a folder, sorted, whatever has a known ending; a named file must have one."""
    files = {}
    for path in inputs:
        found = [path] if os.path.isfile(path) else sorted(os.path.join(d, f) for d, _, fs in os.walk(path) for f in fs)
        known = [f for f in found if kind(f) and os.path.isfile(f)]
        if not known:
            raise ValueError(f"input {path} is or holds no file that ends in one of {' '.join(KIND)}")
        if len(known) < len(found):
            print(f"{path}: {len(found) - len(known)} files with other endings left out", file=sys.stderr)
        for f in known:
            files.setdefault(os.path.realpath(f), f)
    return list(files.values())

def documents(path, text_key):
    """Yields (kind, where, raw document, fraction of the file behind it)."""
    if kind(path) == "text":
        with open(path, "rb") as f:
            yield "text", path, f.read(), 1
    elif kind(path) == "json":
        unpack = {".gz": gzip.open, ".xz": lzma.open}.get(path[-3:].lower(), lambda f: f)
        with open(path, "rb") as raw, unpack(raw) as lines:
            for n, line in enumerate(lines, 1):
                yield "json", f"{path}:{n}", line, raw.tell() / os.path.getsize(path)
    else:
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as f:
            if text_key not in f.schema_arrow.names:
                raise ValueError(f"no column {text_key!r} (--text_key) among {', '.join(f.schema_arrow.names)}")
            rows = (text for batch in f.iter_batches(batch_size=256, columns=[text_key]) for text in batch.column(0).to_pylist())
            for n, text in enumerate(rows, 1):
                yield "row", f"{path}:{n}", text, n / f.metadata.num_rows

def batches(files, text_key, size=1 << 20):
    """Yields lists of about `size` bytes of documents, and how many input bytes are behind them."""
    batch, full, done = [], 0, 0
    for path in files:
        try:
            for what, where, raw, fraction in documents(path, text_key):
                batch.append((what, where, raw))
                full += 100 + (len(raw) if isinstance(raw, (bytes, str)) else 0)
                if full >= size:
                    yield batch, done + fraction * os.path.getsize(path)
                    batch, full = [], 0
        except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error, ImportError) as e:
            raise ValueError(f"{path}: {e}" + (" (pip install pyarrow)" if isinstance(e, ImportError) else "")) from None
        done += os.path.getsize(path)
    yield batch, done

def parse(what, raw, text_key, errors):
    """Raw document -> its text ("" for a blank line) and the number of characters replaced by U+FFFD. Raises ValueError."""
    text, bad = raw, 0
    if isinstance(raw, bytes):
        text = raw.decode("utf-8-sig", errors)               # without a byte-order mark
        bad = text.count("\ufffd") - raw.count("\ufffd".encode())
    if what == "json" and text.strip():
        row = json.loads(text)
        if not isinstance(row, dict) or text_key not in row:
            raise ValueError(f"no {text_key!r} (--text_key) in the keys {list(row) if isinstance(row, dict) else text[:80]!r}")
        text = row[text_key]
    elif what == "json":
        text = ""
    if not isinstance(text, str):
        raise ValueError(f"{text_key!r} is {text!r}, expected a string")
    text, lone = re.subn("[\ud800-\udfff]", "\ufffd", text)  # JSON can hold half a surrogate pair
    return text, bad + lone

def start_worker(*settings):
    global ENC, SETTINGS
    ENC, SETTINGS = get_encoding(settings[0]), settings[1:]

def work(batch):
    """A batch of raw documents -> token ids [train, val], counts, and the smallest and largest hash of a text in [0, 1)."""
    text_key, errors, val_frac = SETTINGS
    ids, count, hashes = {"train": [], "val": []}, Counter(), [1.0, 0.0]
    for what, where, raw in batch:
        try:
            text, bad = parse(what, raw, text_key, errors)
        except (ValueError, RecursionError) as e:
            hint = "; --errors replace goes on with U+FFFD" if isinstance(e, UnicodeDecodeError) else ""
            raise ValueError(f"{where}: {e}{hint}") from None
        count.update(replaced=bad, blank=not text)
        if text:
            text = unicodedata.normalize("NFC", text) if getattr(ENC, "nfc", False) else text
            data = text.encode()
            u = int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big") / 2**48
            split, hashes = "val" if u < val_frac else "train", [min(u, hashes[0]), max(u, hashes[1])]
            ids[split] += [np.array(encode(ENC, text), token_dtype(ENC.n_vocab)), [ENC.eot_token]]
            count.update({(split, "documents"): 1, (split, "tokens"): len(ids[split][-2]) + 1, (split, "bytes"): len(data)})
    return {k: np.concatenate(v or [[]]).astype(token_dtype(ENC.n_vocab)) for k, v in ids.items()}, count, hashes

# ---------------------------------------------------------------- token files
def token_dtype(n_vocab):
    """uint16 while the largest id, n_vocab - 1, fits in it."""
    return np.dtype(np.uint16 if n_vocab <= 1 << 16 else np.uint32)

def read_meta(folder):
    """meta.json of a prepared folder: vocab_size, dtype, and for train and val the number of tokens and more. Raises ValueError."""
    path = os.path.join(folder, "meta.json")
    try:
        with open(path, encoding="utf-8") as f:
            meta = json.load(f)
        assert {"encoding", "vocab_size", "eot", "dtype", "unigram_entropy", "train", "val"} <= set(meta)
    except (OSError, ValueError, AssertionError, TypeError):
        raise ValueError(f"{path} is missing or not what prepare_data.py writes; it makes such a folder") from None
    return meta

def read_split(folder, split):
    """Token ids of train or val, as a read-only memory map."""
    path, dtype = os.path.join(folder, split + ".bin"), read_meta(folder)["dtype"]
    return np.memmap(path, dtype, "r") if os.path.getsize(path) else np.empty(0, dtype)

def read_encoding(folder):
    """The encoding of a prepared folder, which holds a copy of its tokenizer file."""
    name = read_meta(folder)["encoding"]
    return get_encoding(os.path.join(folder, name) if is_file(name) else name)

def prepare(args, tmp):
    """Fills the folder tmp with train.bin, val.bin and meta.json, and returns meta. Raises ValueError."""
    enc, stdlib = get_encoding(args.encoding), sysconfig.get_paths()["stdlib"]
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages"}             # of the default corpus
    files = find_files(args.input) if args.input else sorted(
        f for f in glob.glob(f"{glob.escape(stdlib)}/**/*.py", recursive=True) if not skip & set(f[len(stdlib):].split(os.sep)))
    total, t0, shown = sum(map(os.path.getsize, files)), time.time(), 0.0
    count, unigrams, hashes, sha = Counter(), np.zeros(enc.n_vocab, np.int64), [1.0, 0.0], {}
    settings, tasks = (args.encoding, args.text_key, args.errors, args.val_frac), batches(files, args.text_key)
    with (cf.ProcessPoolExecutor(args.workers, initializer=start_worker, initargs=settings) as pool,
          open(os.path.join(tmp, "train.bin"), "wb") as train, open(os.path.join(tmp, "val.bin"), "wb") as val):
        out = {"train": train, "val": val}
        sha = {split: hashlib.sha256() for split in out}
        while group := list(islice(tasks, 8 * args.workers)):                           # bounded: a pool's map reads all of its input
            for (ids, n, (low, high)), (_, done) in zip(pool.map(work, [batch for batch, _ in group]), group):
                for split, f in out.items():
                    f.write(ids[split].tobytes())
                    sha[split].update(ids[split].tobytes())
                unigrams += np.bincount(ids["train"], minlength=enc.n_vocab)
                count, hashes = count + n, [min(low, hashes[0]), max(high, hashes[1])]
                if time.time() - shown > (0.5 if sys.stderr.isatty() else 10) or done >= total:
                    shown, rate = time.time(), done / max(1e-9, time.time() - t0)
                    print(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {rate / 1e6:.1f} MB/s, {(total - done) / max(rate, 1):,.0f} s left",
                          end="   \r" if sys.stderr.isatty() and done < total else "\n", file=sys.stderr)
    docs = [count[split, "documents"] for split in out]
    if sum(docs) == 0:
        raise ValueError(f"the input, {len(files)} files, holds no text")
    if args.val_frac and 0 in docs:
        raise ValueError(f"--val_frac {args.val_frac} leaves a side of {sum(docs)} document(s) empty; " + (
            f"the smallest that works is {(int(hashes[0] * 1e6) + 1) / 1e6}" if hashes[0] < hashes[1] else "a single text needs 0"))
    p, name = unigrams[unigrams > 0] / unigrams.sum(), args.encoding
    if is_file(name):
        name = "tokenizer" + os.path.splitext(name)[1]
        shutil.copyfile(args.encoding, os.path.join(tmp, name))
    meta = dict(encoding=name, vocab_size=enc.n_vocab, eot=enc.eot_token, dtype=str(token_dtype(enc.n_vocab)), val_frac=args.val_frac,
                replaced=count["replaced"], blank=count["blank"], unigram_entropy=float(-(p * np.log(p)).sum()),
                **{s: dict(sha256=sha[s].hexdigest(), **{k: count[s, k] for k in ("documents", "tokens", "bytes")}) for s in out})
    with open(os.path.join(tmp, "meta.json"), "w", encoding="utf-8") as f:
        json.dump(meta, f, indent=1)
    return meta

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--input", nargs="+", help="files or folders (default: the standard library's sources)")
    p.add_argument("--out", default="data/stdlib", help="folder to make (default: %(default)s)")
    p.add_argument("--encoding", default="bytes", help="bytes (default), a tiktoken name, or a tokenizer.json / .tiktoken file")
    p.add_argument("--text_key", default="text", help="JSON key or parquet column (default: %(default)s)")
    p.add_argument("--val_frac", type=float, default=0.01, help="share of documents to hold out (default: %(default)s)")
    p.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    p.add_argument("--errors", choices=("strict", "replace"), default="strict", help="on bytes that are not UTF-8 (default: strict)")
    args = p.parse_args(argv)
    out = os.path.abspath(args.out)
    tmp = f"{out}.tmp-{os.getpid()}"
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if not 0 <= args.val_frac < 1 or args.workers < 1:
            raise ValueError(f"--val_frac {args.val_frac} must be in [0, 1) and --workers {args.workers} at least 1")
        if os.path.lexists(out):
            raise ValueError(f"--out {args.out} exists; remove it or name another folder")
        os.makedirs(tmp)
        meta = prepare(args, tmp)
        os.rename(tmp, out)
    except cf.BrokenExecutor:
        sys.exit("prepare_data.py: a worker process died, perhaps out of memory; try fewer --workers")
    except (ValueError, OSError) as e:
        sys.exit(f"prepare_data.py: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    print(f"{args.out}: vocabulary {meta['vocab_size']:,}, " + ", ".join(
        f"{s} {meta[s]['documents']:,} documents, {meta[s]['tokens']:,} tokens" for s in ("train", "val"))
        + f", {meta['replaced']} characters replaced, {meta['blank']} blank documents skipped")

if __name__ == "__main__":
    import prepare_data

    prepare_data.main()                                      # workers find their functions by this name, however we were started
