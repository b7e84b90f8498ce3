"""Fast tokenizers against the reference: exactness, speed, memory, threads. The evidence of docs/decisions/0002.

    python -m benchmarks.tokenizers exact   [--vocabulary NAME ...] [--library NAME ...]
    python -m benchmarks.tokenizers sweep   [--vocabulary NAME ...] [--library NAME ...]
    python -m benchmarks.tokenizers speed   [--vocabulary gpt2]
    python -m benchmarks.tokenizers memory  [--library NAME ...]
    python -m benchmarks.tokenizers chunks

Each case runs in a process of its own with a time limit, so a crash, an abort or a hang is a result like any other. Ids are
compared one by one with `tokenizers`, text that spells special tokens being plain text in all of them. Corpora come from
HEADRACE_BENCH (see benchmarks/corpora.py), and 100 languages from the message files of Django. Prints one JSON line a case.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tokenizer_vocabularies import VOCABULARIES, pip_package, vocabulary

Flat = tuple[np.ndarray, np.ndarray]
Encode = Callable[[list[str]], Flat]

# ---------------------------------------------------------------------------------------------------
# Libraries: each as a function from texts to flat ids and offsets
# ---------------------------------------------------------------------------------------------------


def flat(pair: tuple[bytes, bytes]) -> Flat:
    """Little-endian uint32 ids and uint64 offsets."""
    return np.frombuffer(pair[0], np.uint32), np.frombuffer(pair[1], np.uint64).astype(np.int64)


def rows(lists: list[list[int]]) -> Flat:
    """Lists of ids."""
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(r) for r in lists], out=offsets[1:])
    return np.fromiter((i for r in lists for i in r), np.uint32, int(offsets[-1])), offsets


def plain(content: str) -> str:
    """The same tokenizer.json without its special tokens, so that text that spells them is plain."""
    data = json.loads(content)
    data["truncation"] = data["padding"] = None
    data["added_tokens"] = [t for t in data["added_tokens"] if not t.get("special")]
    return json.dumps(data, ensure_ascii=False)


def reference(content: str) -> Encode:
    """tokenizers."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return lambda texts: rows([e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)])


def gigatoken(content: str) -> Encode:
    """gigatoken, one awkward array a batch."""
    import gigatoken

    backend = gigatoken.Tokenizer.from_json(plain(content)).backend

    def encode(texts: list[str]) -> Flat:
        layout: Any = backend.encode_batch(texts, parallel=False).layout
        return np.asarray(layout.content.data), np.asarray(layout.offsets.data)

    return encode


def gigatoken_each(content: str) -> Encode:
    """gigatoken, one call a document."""
    import gigatoken

    one = gigatoken.Tokenizer.from_json(plain(content)).backend.encode

    def encode(texts: list[str]) -> Flat:
        parts = [one(text) for text in texts]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(p) for p in parts], out=offsets[1:])
        return np.concatenate(parts), offsets

    return encode


def fastokens(content: str) -> Encode:
    """fastokens, loaded as headrace loads it (unused ids filled)."""
    from headrace.ops.tokenizer.fast_fastokens import load

    tokenizer = load(content.encode())
    tokenizer.no_truncation()
    return lambda texts: flat(tokenizer.encode_batch_flat(texts, split_special_tokens=True))


def snaptokens(content: str) -> Encode:
    """snaptokens."""
    import snaptokens

    tokenizer = snaptokens.Tokenizer.from_json_str(plain(content))
    return lambda texts: flat(tokenizer.encode_batch_flat(texts))


def splintr(content: str) -> Encode:
    """splintr-rs; its batch call puts the post-processor's ids in, so that section is taken out."""
    import splintr

    data = json.loads(plain(content))
    data["post_processor"] = None
    tokenizer = splintr.from_json_bytes(json.dumps(data, ensure_ascii=False).encode())
    return lambda texts: flat(tokenizer.encode_batch_flat(texts))


LIBRARIES: dict[str, Callable[[str], Encode]] = {
    "gigatoken": gigatoken,
    "fastokens": fastokens,
    "snaptokens": snaptokens,
    "splintr": splintr,
    "gigatoken-each": gigatoken_each,
    "tokenizers": reference,
}

# ---------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------


def corpus_texts(limit: int, shard: int = 0) -> list[str]:
    """Code, prose and a hundred languages, `limit` characters of each."""
    root = Path(os.environ.get("HEADRACE_BENCH", ".bench")) / "data"
    texts: list[str] = []
    for name in ("code", "web"):
        texts += _up_to(
            limit, (json.loads(line)["text"] for line in (root / name / "jsonl" / f"{shard:05d}.jsonl").open())
        )
    files = sorted((pip_package("Django==5.2.1") / "django" / "conf" / "locale").glob("*/LC_MESSAGES/*.po"))
    random.Random(0).shuffle(files)
    return texts + _up_to(limit, (f.read_text(encoding="utf-8")[2000:12_000] for f in files))


def _up_to(limit: int, texts: Iterator[str]) -> list[str]:
    taken, total = [], 0
    for text in texts:
        taken.append(text)
        total += len(text)
        if total >= limit:
            break
    return taken


def hard_texts(content: str) -> list[str]:
    """The strings of the library's own gate, longer words than it can afford on every start, and every assigned script."""
    from headrace.ops.tokenizer.hard import hard_strings

    added = [t["content"] for t in json.loads(content)["added_tokens"]]
    draw = random.Random(7)
    every = [chr(p) for p in range(1, 0x20000) if unicodedata.category(chr(p)) not in ("Cn", "Co", "Cs")]
    draw.shuffle(every)
    scripts = ["".join(every[i : i + 97]) for i in range(0, len(every), 194)]
    spaced = [" ".join(every[i : i + 97]) for i in range(97, len(every), 194)]
    return [*hard_strings(added), "x" * 100_000, "ab\u00e9" * 20_000, " " * 50_000, "1" * 50_000, *scripts, *spaced]


# ---------------------------------------------------------------------------------------------------
# Cases, each run in a child process
# ---------------------------------------------------------------------------------------------------


def exact(name: str, *libraries: str) -> Iterator[dict[str, Any]]:
    """How many texts differ from the reference, library by library."""
    content = (vocabulary(name) / "tokenizer.json").read_text(encoding="utf-8")
    right = reference(content)
    groups = {"hard": hard_texts(content), "corpus": [t[:4000] for t in corpus_texts(250_000)]}
    batches = {group: [texts[i : i + 64] for i in range(0, len(texts), 64)] for group, texts in groups.items()}
    wants = {group: [right(batch) for batch in parts] for group, parts in batches.items()}
    for library in libraries:
        result: dict[str, Any] = {"library": library}
        try:
            encode = LIBRARIES[library](content)
        except BaseException as error:  # a Rust panic is a BaseException
            yield result | {"refused": f"{type(error).__name__}: {str(error)[:90]}"}
            continue
        for group, parts in batches.items():
            wrong = [t for texts, want in zip(parts, wants[group], strict=True) for t in _wrong(encode, want, texts)]
            result[group] = [len(wrong), len(groups[group])]
            if wrong:
                result[f"{group}_example"] = min(wrong, key=len)[:40]
        yield result


def sweep(name: str, *libraries: str) -> Iterator[dict[str, Any]]:
    """Every code point of every script in the middle of text: which ones change ids."""
    content = (vocabulary(name) / "tokenizer.json").read_text(encoding="utf-8")
    skip = [
        (0xAC40, 0xD7A4),
        (0x4F00, 0x9F00),
        (0xD800, 0xF8FF),
        (0x17040, 0x18CF0),
    ]  # the inside of large uniform blocks
    points = [p for p in range(1, 0x20000) if not any(a <= p < b for a, b in skip)]
    texts = [f"a{chr(p)} {chr(p)}b {chr(p)}{chr(p)}\u0301{chr(p)}\u0323 1{chr(p)}2" for p in points]
    batches = [texts[i : i + 500] for i in range(0, len(texts), 500)]
    right = reference(content)
    wants = [right(batch) for batch in batches]
    for library in libraries:
        try:
            encode = LIBRARIES[library](content)
        except BaseException as error:  # a Rust panic is a BaseException
            yield {"library": library, "refused": f"{type(error).__name__}: {str(error)[:90]}"}
            continue
        wrong = [t for batch, want in zip(batches, wants, strict=True) for t in _wrong(encode, want, batch)]
        yield {"library": library, "sweep": [len(wrong), len(texts)], "first": [f"{ord(t[1]):x}" for t in wrong[:12]]}


def _wrong(encode: Encode, want: Flat, texts: list[str]) -> list[str]:
    """Texts whose ids differ, or that raise."""
    ids, at = want
    try:
        got, off = encode(texts)
    except BaseException:  # a Rust panic is a BaseException
        if len(texts) == 1:
            return texts
        one = [(ids[at[i] : at[i + 1]], np.array([0, at[i + 1] - at[i]])) for i in range(len(texts))]
        return [w for t, o in zip(texts, one, strict=True) for w in _wrong(encode, o, [t])]
    return [t for i, t in enumerate(texts) if not np.array_equal(ids[at[i] : at[i + 1]], got[off[i] : off[i + 1]])]


def speed(name: str, library: str, threads: int) -> dict[str, Any]:
    """Tokens per second, cold and warm, and CPU time a token; batches of 64 documents, one encoder a thread."""
    content = (vocabulary(name) / "tokenizer.json").read_text(encoding="utf-8")
    texts = corpus_texts(1_000_000 if library == "tokenizers" else 8_000_000, shard=1)
    random.Random(1).shuffle(texts)
    batches = [texts[i : i + 64] for i in range(0, len(texts), 64)]
    start = time.perf_counter()
    encoders = [LIBRARIES[library](content) for _ in range(threads)]
    encoders[0](["a"])
    result: dict[str, Any] = {"load_s": round((time.perf_counter() - start) / threads, 3)}
    for phase in ("cold", "warm"):
        counts = [0] * threads

        def run(index: int, counts: list[int] = counts) -> None:
            counts[index] = sum(len(encoders[index](b)[0]) for b in batches[index::threads])

        cpu, wall = time.process_time(), time.perf_counter()
        workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        tokens = sum(counts)
        result |= {
            f"{phase}_mtok_s": round(tokens / wall / 1e6, 1),
            f"{phase}_cpu_ns_tok": round(cpu / tokens * 1e9, 1),
        }
    return result | {"rss_mb": rss_mb()}


def memory(name: str, library: str) -> dict[str, Any]:
    """Resident memory while encoding words that never come again."""
    content = (vocabulary(name) / "tokenizer.json").read_text(encoding="utf-8")
    encode = LIBRARIES[library](content)
    draw = random.Random(0)
    seen, points = 0, []
    encode(["warm"])
    base = rss_mb()
    for step in range(101):
        if step % 10 == 0:
            points.append([seen // 1_000_000, rss_mb() - base])
        texts = [draw.randbytes(4000).hex(" ", draw.randint(2, 8)) for _ in range(500)]
        seen += sum(map(len, texts))
        for i in range(0, len(texts), 64):
            encode(texts[i : i + 64])
    return {"mb_text_and_mb_rss": points}


def chunks(name: str, library: str) -> dict[str, Any]:
    """Two threads sharing one encoder give the ids that one thread gives."""
    content = (vocabulary(name) / "tokenizer.json").read_text(encoding="utf-8")
    texts = corpus_texts(1_000_000, shard=2)
    encode = LIBRARIES[library](content)
    batches = [texts[i : i + 16] for i in range(0, len(texts), 16)]
    want = [encode(b)[0].tolist() for b in batches]
    wrong: list[int] = []

    def run() -> None:
        wrong.extend(i for i, b in enumerate(batches) if encode(b)[0].tolist() != want[i])

    workers = [threading.Thread(target=run) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    return {"wrong_batches": len(wrong), "hung": sum(w.is_alive() for w in workers)}


def rss_mb() -> int:
    """Resident memory of this process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) // 1024 if found else 0


CASES: dict[str, Callable[..., dict[str, Any] | Iterator[dict[str, Any]]]] = {
    "exact": exact, "sweep": sweep, "speed": speed, "memory": memory, "chunks": chunks,
}  # fmt: skip


def run_case(limit_s: int, case: str, *arguments: str) -> list[dict[str, Any]]:
    """One case in a child process; a crash or a hang is its last result."""
    command = [sys.executable, "-m", "benchmarks.tokenizers", "--child", case, *arguments]
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        out, err = child.communicate(timeout=limit_s)
        end = [{"crashed": child.returncode, "stderr": err[-300:]}] if child.returncode else []
    except subprocess.TimeoutExpired:
        child.kill()
        out, end = child.communicate()[0], [{"hung": f"over {limit_s} s"}]
    return [json.loads(line) for line in out.splitlines()] + end


def run_all(limit_s: int, case: str, name: str, libraries: list[str]) -> list[dict[str, Any]]:
    """All libraries on one vocabulary; after a crash, the rest in another process."""
    results = run_case(limit_s, case, name, *libraries)
    if results and "library" not in results[-1]:
        results[-1]["library"] = libraries[len(results) - 1]
        rest = libraries[len(results) :]
        return results + (run_all(limit_s, case, name, rest) if rest else [])
    return results


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--vocabulary", nargs="*")
    parser.add_argument("--library", nargs="*", default=["gigatoken", "fastokens", "snaptokens", "splintr"])
    parser.add_argument("--limit", type=int, default=600, help="seconds a case may take")
    options = parser.parse_args()
    together = options.case in ("exact", "sweep")
    for name in options.vocabulary or (list(VOCABULARIES) if together else ["gpt2"]):
        if together:
            for result in run_all(options.limit, options.case, name, options.library):
                print(json.dumps({"vocabulary": name, **result}, ensure_ascii=False), flush=True)
            continue
        for library in options.library:
            for extra in [["1"], ["2"]] if options.case == "speed" else [[]]:
                result = run_case(options.limit, options.case, name, library, *extra)[-1]
                line = {
                    "vocabulary": name,
                    "library": library,
                    **({"threads": int(extra[0])} if extra else {}),
                    **result,
                }
                print(json.dumps(line, ensure_ascii=False), flush=True)


def child(case: str, arguments: list[str]) -> None:
    """Inside the child process: one JSON line a result."""
    result = CASES[case](*(int(a) if a.isdigit() else a for a in arguments))
    for line in [result] if isinstance(result, dict) else result:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        main()
