"""The whole main job on text that every machine with Python has.

Two corpora (the standard library's sources as `code`, its documentation as `web`) are mixed 25 to 75, tokenized with a
byte-level BPE trained here, packed into rows of 1025 tokens and batched. Then a run is killed, and a new process goes on from
its checkpoint with exactly the batches that would have come.

    python examples/demo.py
"""

from __future__ import annotations

import ast
import hashlib
import json
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource

HOME = Path(".demo")
TOKENIZER = HOME / "tokenizer.json"
WEIGHTS = {"code": 0.25, "web": 0.75}
KILL_AFTER, COMPARE = 40, 20
END = "<|endoftext|>"


def sources() -> Iterator[tuple[str, str]]:
    """Name and text of every readable module of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 200:
            yield str(path.relative_to(root)), text


def documentation(name: str, text: str) -> Iterator[str]:
    """The docstrings of one module, as prose."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and len(doc) > 80:
                yield f"{name} {getattr(node, 'name', '')}\n{doc}"


def build_corpora() -> None:
    """Write `code` and `web` as JSONL, four shards each."""
    code, web = [], []
    for name, text in sources():
        code.append(text)
        web.extend(documentation(name, text))
    for corpus, documents in (("code", code), ("web", web)):
        folder = HOME / corpus
        folder.mkdir(parents=True, exist_ok=True)
        for shard in range(4):
            lines = [
                json.dumps({"text": text, "id": f"{corpus}-{i}"}) for i, text in enumerate(documents) if i % 4 == shard
            ]
            (folder / f"{shard:02d}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"  {corpus}: {len(documents):,} documents, {sum(map(len, documents)) / 1e6:.1f} M characters")


def train_tokenizer() -> None:
    """A byte-level BPE of 4096 tokens, in seconds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        json.loads(line)["text"] for path in sorted(HOME.glob("*/00.jsonl")) for line in path.open(encoding="utf-8")
    ]
    tokenizer.train_from_iterator((text[:20_000] for text in texts), trainer)
    tokenizer.save(str(TOKENIZER))


def build_pipeline() -> Pipeline:
    """The pipeline of the demo: endless, so that any number of batches can be asked for."""
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path(name, HOME / name) for name in WEIGHTS],
        mixture=MixtureSpec(WEIGHTS),
        seed=42,
        shuffle_within_shard=True,
        exhausted_policy="repeat",
    )
    end = Tokenizer.from_file(str(TOKENIZER)).token_to_id(END)
    return (
        Pipeline(source)
        .tokenize(tokenizer_id=str(TOKENIZER), field="text", special_tokens="eos", eos_token_id=end)
        .shuffle(buffer_size=1024)
        .pack_flat(1025, algorithm="wrap", pad_token_id=end)
        .batch(8)
    )


def digest(batch: object) -> str:
    """Sixteen hex digits of a batch's token ids."""
    ids = batch.to_training(dtype=None)["input_ids"]  # type: ignore[attr-defined]
    return hashlib.blake2b(json.dumps(ids).encode(), digest_size=8).hexdigest()


def child(job: str) -> None:
    """What the processes of the last part do: run on until killed, or go on from the checkpoint."""
    pipeline, state = build_pipeline(), HOME / "checkpoint.bin"
    if job == "resume":
        pipeline.restore(state.read_bytes())
    for i, batch in enumerate(pipeline, 1):
        if job == "resume":
            print(digest(batch), flush=True)
            if i == COMPARE:
                return
        elif i == KILL_AFTER:
            state.write_bytes(pipeline.checkpoint(as_bytes=True))
            print("saved", flush=True)


def run_and_report() -> list[str]:
    """Stream batches for a while, print what came, and return the digests of those after the checkpoint."""
    pipeline = build_pipeline()
    print(pipeline.explain(), "\n")
    begin, seen, padding, following, peek = time.perf_counter(), 0, 0, [], None
    stream = iter(pipeline)
    for i in range(1, 401):
        batch = next(stream)
        inputs = batch.to_training(return_padding_mask=True)
        seen += inputs["input_ids"].shape[0] * inputs["input_ids"].shape[1]
        padding += int(inputs["padding_mask"].sum())
        if KILL_AFTER < i <= KILL_AFTER + COMPARE:
            following.append(digest(batch))
        peek = peek if peek is not None else inputs["input_ids"][0][:60].tolist()
    took = time.perf_counter() - begin
    metrics = pipeline.metrics_snapshot()
    stream.close()
    delivered = {d.name: d.delivered for d in metrics.datasets}
    share = {name: count / sum(delivered.values()) for name, count in delivered.items()}
    print(f"throughput  {seen / took / 1e6:.1f} M tokens/s over {i} batches, first batch included")
    print(
        "mixture     documents: "
        + ", ".join(f"{name} {share[name]:.1%} (asked {WEIGHTS[name]:.0%})" for name in WEIGHTS)
    )
    print(f"padding     {padding / seen:.2%} of the tokens")
    print(f"peek        {Tokenizer.from_file(str(TOKENIZER)).decode(peek)!r}\n")
    return following


def kill_and_resume(expected: list[str]) -> bool:
    """Kill a run without warning, resume in a new process, and compare."""
    command = [sys.executable, __file__]
    with subprocess.Popen([*command, "run"], stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        victim.stdout.readline()
        time.sleep(0.2)
        victim.send_signal(signal.SIGKILL)
    size = (HOME / "checkpoint.bin").stat().st_size
    print(f"killed a run at batch {KILL_AFTER}+ with SIGKILL; its checkpoint is {size:,} bytes")
    resumed = subprocess.run([*command, "resume"], capture_output=True, text=True, check=True).stdout.split()
    print(f"uninterrupted {' '.join(expected[:4])} ...")
    print(f"resumed       {' '.join(resumed[:4])} ...")
    return resumed == expected


def main() -> None:
    """Run the demo."""
    if len(sys.argv) > 1:
        child(sys.argv[1])
        return
    HOME.mkdir(exist_ok=True)
    print("corpora and tokenizer")
    build_corpora()
    train_tokenizer()
    expected = run_and_report()
    if not kill_and_resume(expected):
        sys.exit("the resumed batches differ from the uninterrupted ones")
    print(f"all {COMPARE} batches after the checkpoint are equal")


if __name__ == "__main__":
    main()
