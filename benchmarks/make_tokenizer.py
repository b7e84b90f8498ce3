"""GPT-2's byte-level BPE as a Hugging Face `tokenizer.json`, from a package that ships its ranks.

No model hub is asked: the sdist of `openai-whisper` carries `gpt2.tiktoken` (bytes and rank of each token). Merges are
recovered from the ranks: the pair that made a token is the pair of lower-ranked parts the encoder would join last.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tarfile

from .paths import CACHE, EOS, TIKTOKEN_RANKS, TOKENIZER_DIR, TOKENIZER_JSON

RANKS_PACKAGE = "openai-whisper==20250625"
RANKS_MEMBER = "whisper/assets/gpt2.tiktoken"
EOS_TOKEN = "<|endoftext|>"


def fetch_ranks() -> None:
    """Download the source distribution that ships the ranks, with the ordinary client, and take the one file out."""
    where = CACHE / "sdist"
    where.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(where)]
    subprocess.run([*pip, RANKS_PACKAGE], check=True)
    with tarfile.open(next(where.glob("openai_whisper-*.tar.gz"))) as archive:
        name = next(n for n in archive.getnames() if n.endswith(RANKS_MEMBER))
        member = archive.extractfile(name)
        assert member is not None
        TIKTOKEN_RANKS.write_bytes(member.read())


def read_ranks() -> dict[bytes, int]:
    """Token bytes to rank, which is the token id."""
    lines = TIKTOKEN_RANKS.read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def printable_bytes() -> dict[int, str]:
    """The byte-to-character table of byte-level BPE: printable bytes stand for themselves, others move above 255."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(moved)}


def last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts whose merge made `token`: run the merges of lower rank until two parts are left."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, EOS) for a, b in zip(parts, parts[1:], strict=False)]
        at = min(range(len(pairs)), key=pairs.__getitem__)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def write_tokenizer() -> None:
    """Write `tokenizer.json` and the two small files that let model libraries load the folder offline."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    ranks, table = read_ranks(), printable_bytes()

    def spell(token: bytes) -> str:
        return "".join(table[byte] for byte in token)

    ordered = sorted(ranks, key=ranks.__getitem__)
    merges = [(spell(a), spell(b)) for a, b in (last_pair(t, ranks) for t in ordered if len(t) > 1)]
    vocab = {spell(token): ranks[token] for token in ordered} | {EOS_TOKEN: EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(EOS_TOKEN, special=True, normalized=False)])
    tokenizer.save(str(TOKENIZER_JSON))
    special = {"bos_token": EOS_TOKEN, "eos_token": EOS_TOKEN, "unk_token": EOS_TOKEN}
    config = {"tokenizer_class": "GPT2TokenizerFast", "model_max_length": 10**9, "add_prefix_space": False, **special}
    (TOKENIZER_DIR / "tokenizer_config.json").write_text(json.dumps(config))
    (TOKENIZER_DIR / "config.json").write_text(json.dumps({"model_type": "gpt2"}))


def main() -> None:
    TOKENIZER_DIR.mkdir(parents=True, exist_ok=True)
    if not TIKTOKEN_RANKS.exists():
        fetch_ranks()
    if not TOKENIZER_JSON.exists():
        write_tokenizer()


if __name__ == "__main__":
    main()
