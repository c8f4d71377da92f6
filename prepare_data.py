"""
Text to token files: train.bin and val.bin (raw token ids) and meta.json, in the folder --out.

    python prepare_data.py                                   # the default corpus: the Python standard library's own sources
    python prepare_data.py --input shards/ a.jsonl.gz --out data/mine --encoding path/to/tokenizer.json

Text, Markdown and source files are one document each, .jsonl and .parquet one a row; the end-of-text token follows every document.
A document is held out if the hash of its text, as a fraction of the hash range, is below --val_frac: no text lands on both sides.
Memory holds a few MB of documents per worker, or the largest document. The output is the same for any number of workers.
"""
import argparse
import base64
import concurrent.futures as cf
import functools
import gzip
import hashlib
import json
import lzma
import multiprocessing
import os
import re
import reprlib
import shutil
import signal
import sys
import time
import unicodedata
import urllib.request
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import tiktoken.load

TEXT = tuple(".txt .md .rst .tex .html .css .js .ts .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .swift .rb .pl .php .cs .scala "
             ".hs .ml .lua .r .jl .sh .sql .toml .yaml .yml".split())
ENDINGS = (*TEXT, ".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")
META = "encoding vocab_size eot dtype val_frac replaced blank unigram_entropy train val".split()

# ---------------------------------------------------------------- tokenisers: each becomes a tiktoken.Encoding
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# a .tiktoken file has no split pattern, but its number of ranks tells whose it is -> pattern, id of the end of text
RANKS = {256: (r"(?s).", 256), 50256: (GPT2, 50256), 100256: (CL100K, 100257), 128000: (CL100K, 128001),  # bytes, GPT-2, cl100k, Llama-3
         151643: (CL100K.replace(r"\p{N}{1,3}", r"\p{N}"), 151643)}                                       # Qwen
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")
TOKENIZER_FILES = (".json", ".tiktoken")

def get_encoding(name):
    """The tiktoken.Encoding of `bytes`, a tokenizer.json or .tiktoken file, or a tiktoken name. ValueError if it can't be had."""
    if name in tiktoken.list_encoding_names():
        tiktoken.load.read_file = download                   # tiktoken's own waits for ever
        return tiktoken.get_encoding(name)
    if name != "bytes" and not name.endswith(TOKENIZER_FILES):
        raise ValueError(f"encoding {name!r} is not bytes, a path to a tokenizer.json or .tiktoken file, or one of "
                         f"{tiktoken.list_encoding_names()}")
    try:
        if name.endswith(".json"):
            return encoding_from_json(name)
        ranks = {bytes([i]): i for i in range(256)}
        if name != "bytes":
            ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, Path(name).read_bytes().splitlines())}
        if len(ranks) not in RANKS:
            raise ValueError(f"{len(ranks)} ranks, none of {list(RANKS)}, so that its split pattern is not known")
        pattern, eot = RANKS[len(ranks)]
        return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": eot})
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"tokenizer {name}: {'no ' if isinstance(e, KeyError) else ''}{e}; expected a tokenizer.json with byte-level "
                         "BPE of GPT-2, Llama-3 or Qwen kind, or the .tiktoken file of one, lines of 'base64 rank'") from None

def download(url):
    try:
        return urllib.request.urlopen(url, timeout=20).read()
    except OSError as e:
        raise ValueError(f"{url} could not be downloaded ({e}); save it elsewhere as {hashlib.sha1(url.encode()).hexdigest()}, set "
                         "TIKTOKEN_CACHE_DIR to the folder of that file, or take --encoding bytes, which needs none") from None

def encoding_from_json(path):
    """Honours or refuses each setting that changes the tokens of plain text. Added tokens are never matched in text."""
    spec = json.loads(Path(path).read_text("utf-8"))
    model, pre, norm = spec["model"], spec["pre_tokenizer"] or {"type": None}, (spec.get("normalizer") or {}).get("type")
    *splits, level = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    special = {t["content"]: t["id"] for t in spec.get("added_tokens") or []}
    eot = next((special[t] for t in END_OF_TEXT if t in special), None)
    merged = ["".join(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    for what, supported in {
            f"model type {model['type']}": model["type"] == "BPE", f"normalizer {norm}": norm in (None, "NFC"),
            **{k: not model.get(k) for k in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")},
            f"pre-tokenizer {pre}":
                level["type"] == "ByteLevel" and not level["add_prefix_space"] and level.get("use_regex", True) != bool(splits)
                and all(s["type"] == "Split" and s["behavior"] == "Isolated" and not s["invert"] for s in splits) and len(splits) < 2,
            "a vocabulary that is not in the order of its merges": merged == sorted(merged, key=model["vocab"].__getitem__),
            f"a vocabulary without any of {', '.join(END_OF_TEXT)}": eot is not None}.items():
        if not supported:
            raise ValueError(f"{what} is not supported")
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]       # GPT-2 writes these bytes as themselves, the others from 256
    byte = dict(zip(map(chr, [*shown, *range(256, 324)]), [*shown, *sorted({*range(256)} - {*shown})]))
    ranks = {bytes(byte[c] for c in token): model["vocab"][token] for token in [*byte, *merged]}
    pattern = splits[0]["pattern"]["Regex"] if splits else GPT2
    enc = tiktoken.Encoding(path, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special | {"<|endoftext|>": eot})
    enc.nfc = norm == "NFC"                                  # the caller's job, so that it comes before the hash
    return enc

def normalised(enc, text):
    """The text as the tokenizer wants it, before `encode`."""
    return unicodedata.normalize("NFC", text) if getattr(enc, "nfc", False) else text

def encode(enc, text):
    """Token ids of a text, without loss. What looks like a special token is plain text."""
    if enc.name == "bytes":
        return np.frombuffer(text.encode(), np.uint8)
    try:
        ids = enc.encode_ordinary(text)
    except BaseException as e:                               # the regex panics on very long runs, and not as an Exception
        if type(e).__name__ != "PanicException" or len(text) < 2:
            raise
        return encode(enc, text[:len(text) // 2]) + encode(enc, text[len(text) // 2:])  # a token at the cut may differ
    if enc.decode_bytes(ids) != text.encode():
        raise ValueError(f"tokenizer {enc.name} loses text, its split pattern does not cover {text[:60]!r}")
    return ids

# ---------------------------------------------------------------- documents
def find_files(inputs):
    """Files and folders -> files, each once. Of a folder, sorted, whatever has a known ending; a named file must have one."""
    files = []
    def fails(error):                                        # os.walk would go on without the folder
        raise error
    for path in inputs:
        if not os.path.exists(path):
            raise ValueError(f"input {path} does not exist")
        walked = [] if os.path.isfile(path) else list(os.walk(path, onerror=fails))
        found = sorted(os.path.join(d, f) for d, _, fs in walked for f in fs) or [path]
        known = [f for f in found if f.lower().endswith(ENDINGS)]
        if odd := [f for f in known if not os.path.isfile(f)]:
            raise ValueError(f"input {odd[0]} is a broken link, no file or out of reach")
        if links := [z for d, dirs, _ in walked for z in (os.path.join(d, n) for n in dirs) if os.path.islink(z)]:
            print(f"{path}: linked folders left out, each can be an input of its own: {' '.join(links)}", file=sys.stderr)
        if not known:
            raise ValueError(f"input {path} is or holds no file that ends in one of {' '.join(ENDINGS)}")
        if len(known) < len(found):
            print(f"{path}: {len(found) - len(known)} files with other endings left out", file=sys.stderr)
        files += known
    return list({os.path.realpath(f): f for f in files}.values())

def rows(path, text_key, errors):
    """Yields (row, number of characters replaced by U+FFFD, fraction of the file behind it); the text is row[text_key]."""
    if path.lower().endswith(".parquet"):
        import pyarrow.parquet as pq
        with pq.ParquetFile(path) as f:
            columns = [text_key] if text_key in f.schema_arrow.names else None           # None: all, for the refusal to show
            found = (row for batch in f.iter_batches(batch_size=256, columns=columns) for row in batch.to_pylist())
            yield from ((row, 0, n / f.metadata.num_rows) for n, row in enumerate(found, 1))
    else:
        unpack, whole = {".gz": gzip.open, ".xz": lzma.open}.get(path[-3:].lower(), lambda f: f), path.lower().endswith(TEXT)
        with open(path, "rb") as file, unpack(file) as f:
            for raw in [f.read()] if whole else f:
                text = raw.decode("utf-8-sig", errors)       # without a byte-order mark
                row = {text_key: text} if whole else json.loads(text) if text.strip() else {text_key: ""}
                yield row, text.count("\ufffd") - raw.count("\ufffd".encode()), file.tell() / max(1, os.path.getsize(path))

def batches(files, args, count):
    """Yields lists of texts and how many input bytes are behind them. Counts what is replaced and blank."""
    batch, full, done = [], 0, 0
    for path in files:
        n = 0                                                # documents of this file that were fine
        try:
            for row, bad, fraction in rows(path, args.text_key, args.errors):
                if not isinstance(row, dict) or not isinstance(row.get(args.text_key), str):
                    raise ValueError(f"expected a string under the key {args.text_key!r} (--text_key), found {reprlib.repr(row)}")
                text, lone = re.subn("[\ud800-\udfff]", "\ufffd", row[args.text_key])    # JSON can hold half a surrogate pair
                count.update(replaced=bad + lone, blank=int(not text))
                batch += [text] if text else []
                n, full = n + 1, full + sys.getsizeof(text)
                if full >= args.workers << 22:
                    yield batch, done + fraction * os.path.getsize(path)
                    batch, full = [], 0
        except (OSError, EOFError, ValueError, ImportError, RecursionError, lzma.LZMAError, zlib.error) as e:
            where = path if path.lower().endswith(TEXT) else f"{path}:{n + 1}"
            hint = {UnicodeDecodeError: "; --errors replace goes on with U+FFFD" * (not path.lower().endswith(".parquet")),
                    ModuleNotFoundError: " (pip install pyarrow)", json.JSONDecodeError: "; expected a JSON object"}
            raise ValueError(f"{where}: {e}{hint.get(type(e), '')}") from None
        done += os.path.getsize(path)
    yield batch, done

worker_encoding = functools.cache(get_encoding)              # a worker reads it once

def work(encoding, text):
    """A text -> its hash in [0, 1), its size in bytes, its token ids with the end of text."""
    enc = worker_encoding(encoding)
    text = normalised(enc, text)
    data, ids = text.encode(), np.append(encode(enc, text), enc.eot_token).astype(token_dtype(enc.n_vocab))
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big") / 2**48, len(data), ids

# ---------------------------------------------------------------- token files
def token_dtype(n_vocab):
    return np.dtype(np.uint16 if n_vocab <= 1 << 16 else np.uint32)                     # the largest id is n_vocab - 1

def read_meta(folder):
    """meta.json of a prepared folder: vocab_size, dtype, and for train and val the number of tokens and more. Raises ValueError."""
    path = Path(folder, "meta.json")
    try:
        meta = json.loads(path.read_text("utf-8"))
        numbers = [meta[k] for k in ("vocab_size", "eot", "unigram_entropy")]
        numbers += [meta[s][k] for s in ("train", "val") for k in ("tokens", "bytes")]
        words = [meta["encoding"], meta["train"]["sha256"], meta["val"]["sha256"]]
        if meta["dtype"] not in ("uint16", "uint32") or {type(z) for z in words} != {str} or {type(n) for n in numbers} - {int, float}:
            raise ValueError
        return {**{k: meta[k] for k in META}, "tokenizer": meta.get("tokenizer")}       # folders of before have none
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is missing or not what prepare_data.py writes; make the folder with "
                         "python prepare_data.py --input YOUR_TEXTS --out FOLDER") from None

def tokenizer_hash(enc):
    """sha256 of the ids and bytes of all tokens but the special ones, and of the end of text."""
    special, sha = {enc.encode_single_token(t) for t in enc.special_tokens_set}, hashlib.sha256(b"%d" % enc.eot_token)
    for i in sorted({*range(enc.n_vocab)} - special):
        try:
            token = enc.decode_single_token_bytes(i)
        except KeyError:                                     # an id that no token has
            continue
        sha.update(b" %d %d " % (i, len(token)) + token)
    return sha.hexdigest()

def same_tokenizer(a, b):
    """Whether two folders' metas have one tokenizer; where one was made before it kept the hash, by name and size."""
    hashed = a.get("tokenizer") and b.get("tokenizer")
    return all(a[k] == b[k] for k in (["tokenizer"] if hashed else ["encoding", "vocab_size", "eot"]))

def read_split(folder, split):
    """Token ids of train or val, as a read-only memory map."""
    path, dtype = os.path.join(folder, split + ".bin"), read_meta(folder)["dtype"]
    return np.memmap(path, dtype, "r") if os.path.getsize(path) else np.empty(0, dtype)

def read_encoding(folder):
    """The encoding of a prepared folder, which holds a copy of its tokenizer file."""
    name = read_meta(folder)["encoding"]
    return get_encoding(os.path.join(folder, name) if name.endswith(TOKENIZER_FILES) else name)

def read_text(folder, path):
    """A UTF-8 text file -> its text, and its token ids in a prepared folder's vocabulary after one end-of-text token. Raises ValueError."""
    enc = read_encoding(folder)
    try:
        text = normalised(enc, Path(path).read_bytes().decode("utf-8-sig"))
        ids = [enc.eot_token, *map(int, encode(enc, text))]
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
    if not text.split():
        raise ValueError(f"{path} holds no word")
    return text, ids

def own_signals():
    """A worker leaves Ctrl-C to its parent, and SIGTERM ends it: else a pool that lost a worker could not end the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

def prepare(args, tmp):
    """Fills the folder tmp with train.bin, val.bin and meta.json, and returns meta. Raises ValueError."""
    enc, stdlib = get_encoding(args.encoding), Path(os.__file__).parent
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages"}             # of the default corpus
    files = find_files(args.input or sorted(str(f) for f in stdlib.rglob("*.py") if not skip & {*f.relative_to(stdlib).parts}))
    total, start, count, low, high = sum(map(os.path.getsize, files)), time.time(), Counter(), 1.0, 0.0
    sha = {"train": hashlib.sha256(), "val": hashlib.sha256()}
    unigrams = {split: np.zeros(enc.n_vocab, np.int64) for split in sha}
    with (cf.ProcessPoolExecutor(args.workers, initializer=own_signals) as pool,
          open(tmp / "train.bin", "wb") as train, open(tmp / "val.bin", "wb") as val):
        for texts, done in batches(files, args, count):      # a batch at a time: a pool's map reads all of its input
            for u, size, ids in pool.map(functools.partial(work, args.encoding), texts, chunksize=1 + len(texts) // (8 * args.workers)):
                split, low, high = "val" if u < args.val_frac else "train", min(u, low), max(u, high)
                (val if split == "val" else train).write(ids)
                sha[split].update(ids)
                np.add.at(unigrams[split], ids, 1)
                count[split] += size
            rate = done / max(1e-9, time.time() - start)
            print(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {rate / 1e6:.1f} MB/s, {(total - done) / max(rate, 1):,.0f} s left",
                  end="   \r" if done < total else "\n", file=sys.stderr)
    docs = [int(n[enc.eot_token]) for n in unigrams.values()]                           # each ends with it
    if sum(docs) == 0:
        raise ValueError(f"the input, {len(files)} files, holds no text")
    if args.val_frac and 0 in docs:
        works = f"the smallest that works is {(int(low * 1e6) + 1) / 1e6}" if low < high else "a single text needs 0"
        raise ValueError(f"--val_frac {args.val_frac} leaves a side of {sum(docs)} document(s) empty; {works}")
    p, name = unigrams["train"][unigrams["train"] > 0] / unigrams["train"].sum(), args.encoding
    if name.endswith(TOKENIZER_FILES):
        name = "tokenizer" + Path(name).suffix
        shutil.copyfile(args.encoding, tmp / name)
    sides = [dict(sha256=sha[s].hexdigest(), documents=n, tokens=int(unigrams[s].sum()), bytes=count[s]) for s, n in zip(sha, docs)]
    meta = dict(zip(META, (name, enc.n_vocab, enc.eot_token, str(token_dtype(enc.n_vocab)), args.val_frac, count["replaced"],
                           count["blank"], float(-(p * np.log(p)).sum()), *sides)))
    meta["tokenizer"] = tokenizer_hash(enc)
    (tmp / "meta.json").write_text(json.dumps(meta, indent=1))
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
    pid = os.getpid()
    tmp = Path(f"{os.path.abspath(args.out)}.tmp-{pid}")

    def leave(number, frame):                                # not by an exception: the pool's threads can hang on one
        if os.getpid() == pid:                               # else a worker that has just been forked
            for child in multiprocessing.active_children():
                child.kill()
            print("prepare_data.py: interrupted" + ", nothing was written" * tmp.exists(), file=sys.stderr, flush=True)
            shutil.rmtree(tmp, ignore_errors=True)
        os._exit(128 + number)
    before = {n: signal.signal(n, leave) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        if not 0 <= args.val_frac < 1:
            raise ValueError(f"--val_frac is {args.val_frac}, expected a number in [0, 1)")
        if args.workers < 1:
            raise ValueError(f"--workers is {args.workers}, expected at least 1")
        if not args.out or os.path.lexists(args.out):
            raise ValueError(f"--out {args.out!r} exists or is no name; remove it or name another folder")
        tmp.mkdir(parents=True)
        meta = prepare(args, tmp)
        tmp.rename(args.out)
    except (ValueError, OSError, cf.BrokenExecutor) as e:
        sys.exit(f"prepare_data.py: {e}" + (" Out of memory? Try fewer --workers" if isinstance(e, cf.BrokenExecutor) else ""))
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
        shutil.rmtree(tmp, ignore_errors=True)
    sides = ", ".join(f"{s} {meta[s]['documents']:,} documents, {meta[s]['tokens']:,} tokens" for s in ("train", "val"))
    print(f"{args.out}: vocabulary {meta['vocab_size']:,}, {sides}, {meta['replaced']} characters replaced, {meta['blank']} blank texts")

if __name__ == "__main__":
    import prepare_data
    prepare_data.main()                                      # workers find their functions by this name, however we were started
