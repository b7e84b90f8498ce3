"""Two corpora of real text from this machine's disk: `code` (Python sources) and `web` (documentation).

Nothing is generated and nothing is downloaded: installed packages and their documentation are read, deduplicated by
content, cut at blank lines into pieces of log-normal length (so that no document dominates), shuffled with a fixed seed
and written as 16 shards in each of JSONL, zstd JSONL and Parquet. A smaller disk gives smaller corpora; the sizes reached
are in `data/NAME/stats.json`. On Debian, packages such as postgresql-doc-15, python3.11-doc, linux-doc-6.1, anarchism,
dict-gcide and llvm-14-doc give more prose.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import os
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from .paths import DATA, ENVS, NUM_SHARDS

TARGET_MB = 170
WEB_ROOTS = ("/usr/share/doc", "/usr/share/anarchism", "/usr/share/dictd", "/usr/share/postgresql", "/usr/share/perl")
CODE_ROOTS = ("/usr/lib/python3", "/usr/lib/google-cloud-sdk", "/usr/share", "/opt", "/usr/local/lib")
WEB_SUFFIXES = (".html", ".htm", ".txt", ".md", ".rst", ".txt.gz", ".html.gz", ".rst.gz", ".pod", ".dict.dz")
WEB_NAMES = ("changelog", "NEWS", "README", "copyright")
GROUP_SHARE = 0.12
"""No folder of documentation gives more than this share of `web`."""
MAX_FILE = 4_000_000

_DROPPED = re.compile(r"(?is)<(script|style|nav|head|svg)\b.*?</\1>|<!--.*?-->")
_BLOCK = re.compile(r"(?i)</?(p|div|tr|li|ul|ol|dl|dt|dd|pre|h[1-6]|table|section|br|blockquote)\b[^>]*>")
_TAG = re.compile(r"<[^>]{0,2000}>")


def decode(blob: bytes) -> str | None:
    """UTF-8, else Latin-1; None for what is not text."""
    try:
        text = blob.decode("utf-8")
    except UnicodeDecodeError:
        text = blob.decode("latin-1")
    return None if "\0" in text else text


def html_to_text(page: str) -> str:
    """The visible text of a page, one blank line between blocks: good enough for text to tokenize."""
    page = _TAG.sub("", _BLOCK.sub("\n", _DROPPED.sub(" ", page)))
    page = re.sub(r"[ \t\xa0]+", " ", html.unescape(page))
    return re.sub(r" ?\n\s*\n+", "\n\n", page).strip()


def read_text(path: str) -> str | None:
    opener = gzip.open if path.endswith((".gz", ".dz")) else open
    try:
        with opener(path, "rb") as file:
            text = decode(file.read(MAX_FILE))
    except (OSError, EOFError):
        return None
    return html_to_text(text) if text and ".htm" in path else text


def pieces(text: str, rng: random.Random, mu: float, sigma: float, limits: tuple[int, int]) -> Iterator[str]:
    """Cut an over-long text at blank lines (else line ends) into pieces of log-normal target length."""
    at = 0
    while at < len(text):
        target = int(min(limits[1], max(limits[0], rng.lognormvariate(mu, sigma))))
        end = text.find("\n\n", at + target)
        if end < 0 or end - at > 4 * target:
            end = text.find("\n", at + target)
        if end < 0 or len(text) - at <= 1.6 * target:
            end = len(text)
        if end - at >= 100:
            yield text[at:end]
        at = end
        while at < len(text) and text[at] == "\n":
            at += 1


def walk(roots: Iterable[str], wanted: tuple[str, ...], names: tuple[str, ...] = ()) -> list[str]:
    """Files under `roots` by suffix or by the start of their name, in an order that does not depend on the disk."""
    found: set[str] = set()
    for root in roots:
        for folder, _, files in os.walk(root):
            for name in files:
                path = os.path.join(folder, name)
                fits = name.endswith(wanted) or (name.startswith(names) if names else False)
                if fits and not os.path.islink(path) and 200 <= os.path.getsize(path) <= 8 * MAX_FILE:
                    found.add(path)
    return sorted(found)


def gather(
    paths: list[str], limit: int, cut: tuple[float, float, tuple[int, int]], share: float
) -> list[tuple[str, str]]:
    """(path, piece) until `limit` bytes; equal texts once; at most `share` of the bytes from one folder group."""
    rng, seen, total = random.Random(1234), set[bytes](), 0
    used: dict[str, int] = {}
    out: list[tuple[str, str]] = []
    rng.shuffle(paths)
    for path in paths:
        group = "/".join(path.split("/")[1:5])
        if used.get(group, 0) > share * limit:
            continue
        text = read_text(path)
        digest = hashlib.blake2b((text or "").encode("utf-8", "replace"), digest_size=16).digest()
        if not text or len(text) < 150 or digest in seen:
            continue
        seen.add(digest)
        found = list(pieces(text, rng, *cut))
        size = sum(len(piece.encode("utf-8", "replace")) for piece in found)
        out += [(path, piece) for piece in found]
        used[group] = used.get(group, 0) + size
        total += size
        if total >= limit:
            break
    return out


def write(name: str, documents: list[tuple[str, str]]) -> None:
    """Shuffle and write 16 shards in each format, with the fields of an ordinary crawl."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    rng = random.Random(5)
    rng.shuffle(documents)
    rows = [
        {
            "text": text,
            "id": f"<urn:{name}:{hashlib.md5(f'{path}#{i}'.encode()).hexdigest()}>",
            "source": Path(path).parts[2],
            "url": "file://" + path,
            "language": "en",
            "language_score": round(rng.uniform(0.65, 0.99), 6),
        }
        for i, (path, text) in enumerate(documents)
    ]
    for fmt in ("jsonl", "zst", "parquet"):
        (DATA / name / fmt).mkdir(parents=True, exist_ok=True)
    for k in range(NUM_SHARDS):
        part = rows[k * len(rows) // NUM_SHARDS : (k + 1) * len(rows) // NUM_SHARDS]
        blob = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in part)
        (DATA / name / "jsonl" / f"{k:05d}.jsonl").write_bytes(blob)
        (DATA / name / "zst" / f"{k:05d}.jsonl.zst").write_bytes(zstandard.ZstdCompressor(level=3).compress(blob))
        where = DATA / name / "parquet" / f"{k:05d}.parquet"
        pq.write_table(pa.Table.from_pylist(part), where, row_group_size=max(128, len(part) // 8), compression="zstd")
    sizes = sorted(len(row["text"].encode()) for row in rows)
    at = {f"p{q}": sizes[int(q / 100 * (len(sizes) - 1))] for q in (5, 50, 95, 99)}
    stats = {
        "documents": len(sizes),
        "bytes": sum(sizes),
        "mean": round(sum(sizes) / len(sizes)),
        **at,
        "max": sizes[-1],
    }
    (DATA / name / "stats.json").write_text(json.dumps(stats))
    print(name, stats, flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=TARGET_MB, help="megabytes of text a corpus")
    parser.add_argument("--code-root", action="append", default=[], help="one more folder of Python sources")
    parser.add_argument("--web-root", action="append", default=[], help="one more folder of documentation")
    args = parser.parse_args(argv)
    limit = int(args.mb * 1e6)
    here = [sysconfig.get_paths()[key] for key in ("stdlib", "purelib")] + [str(ENVS), sys.base_prefix]
    if not (DATA / "code" / "stats.json").exists():
        code = walk([*args.code_root, *here, *CODE_ROOTS], (".py",))
        write("code", gather(code, limit, (8.6, 1.05, (400, 120_000)), share=1.0))
    if not (DATA / "web" / "stats.json").exists():
        web = walk([*args.web_root, *WEB_ROOTS, *here], WEB_SUFFIXES, WEB_NAMES)
        write("web", gather(web, limit, (8.0, 1.1, (250, 200_000)), share=GROUP_SHARE))


if __name__ == "__main__":
    main()
