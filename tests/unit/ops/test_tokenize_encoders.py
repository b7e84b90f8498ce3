"""Fast encoders: admitted only when equal, watched while they run, replaced when they fail."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block import Block, Origin, Ragged
from headrace.core.op import BadRows
from headrace.errors import ConfigError, InternalError
from headrace.ops.tokenize import Tokenize
from headrace.ops.tokenizer.gate import FAST, EncoderChoice, choose_encoder
from headrace.ops.tokenizer.guard import FAILURES, GuardedEncoder
from headrace.ops.tokenizer.hard import hard_strings
from headrace.ops.tokenizer.load import load_tokenizer
from headrace.ops.tokenizer.seam import Encoder

SMALL = Path(__file__).parents[2] / "golden" / "tokenizers" / "small"
TOKENIZER = load_tokenizer(SMALL)
SAMPLE = ["some text of the corpus", "and some more", "def f():\n    pass\n"]


def built(library: str) -> Encoder:
    return EncoderChoice(TOKENIZER, library, "", library).build()


ENCODERS = {library: built(library) for library in FAST}


def lists(rows: Ragged) -> list[list[int]]:
    return [rows[i].tolist() for i in range(len(rows))]


# ---------------------------------------------------------------------------------------------------
# Equality
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", FAST)
@settings(deadline=None, max_examples=150)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=6))
def test_fast_ids_are_the_reference_s(library: str, texts: list[str]):
    ids = ENCODERS[library].encode(texts)
    assert ids.values.dtype == np.int32
    assert ids.offsets.dtype == np.int64
    assert lists(ids) == lists(TOKENIZER.encode(texts))


@pytest.mark.parametrize("library", FAST)
def test_fast_ids_are_golden_and_hard_strings_agree(library: str):
    cases = json.loads((SMALL / "golden.json").read_text())["cases"]
    assert lists(ENCODERS[library].encode([text for text, _ in cases])) == [want for _, want in cases]
    hard = hard_strings(normalizes=True)
    assert lists(ENCODERS[library].encode(hard)) == lists(TOKENIZER.encode(hard))


@pytest.mark.parametrize("library", FAST)
def test_threads_get_the_ids_that_one_thread_gets(library: str):
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdef \n\u00e9", k=draw.randint(0, 300))) for _ in range(400)]
    want = lists(TOKENIZER.encode(texts))
    choice = EncoderChoice(TOKENIZER, library, "", library)
    got: list[list[list[int]]] = []

    def run() -> None:
        encoder = choice.build()
        got.append([ids for at in range(0, len(texts), 20) for ids in lists(encoder.encode(texts[at : at + 20]))])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [want] * 4


# ---------------------------------------------------------------------------------------------------
# The gate
# ---------------------------------------------------------------------------------------------------


def test_the_gate_admits_an_equal_encoder_and_says_on_what():
    choice = choose_encoder(TOKENIZER, SAMPLE)
    assert choice.library == next(iter(FAST))
    assert "3 texts of this corpus" in choice.reason
    there = pickle.loads(pickle.dumps(choice))
    assert (there.name, there.reason) == (choice.name, choice.reason)
    assert lists(there.build().encode(SAMPLE)) == lists(TOKENIZER.encode(SAMPLE))


def composing(tmp_path: Path) -> Path:
    """The small tokenizer with NFC in front: gigatoken 0.10 composes characters that the reference leaves alone."""
    content = json.loads((SMALL / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"] = {"type": "NFC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def test_the_gate_finds_a_real_difference_and_tries_the_next(tmp_path: Path):
    tokenizer = load_tokenizer(composing(tmp_path))
    rare = "a\u0301\u0898\u0323"
    assert lists(EncoderChoice(tokenizer, "", "", "gigatoken").build().encode([rare])) != lists(
        tokenizer.encode([rare])
    )
    choice = choose_encoder(tokenizer, SAMPLE, libraries=("gigatoken", "fastokens"))
    assert choice.library == "fastokens"
    assert "gigatoken 0.10.0 gives other ids for" in choice.reason
    assert lists(choice.build().encode([rare])) == lists(tokenizer.encode([rare]))


def test_nobody_admitted_means_the_reference_and_the_reasons_are_kept(tmp_path: Path):
    content = json.loads((SMALL / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"] = {"type": "NFKC"}  # neither library knows it
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    choice = choose_encoder(tokenizer, SAMPLE)
    assert not choice.fast
    assert choice.name.startswith("tokenizers ")
    assert all(library in choice.reason for library in FAST)
    with pytest.raises(ConfigError, match="encoder='fast' cannot be used"):
        choose_encoder(tokenizer, SAMPLE, "fast")


def test_without_a_fast_library_the_reference_runs():
    choice = choose_encoder(TOKENIZER, SAMPLE, libraries=("no_such_library",))
    assert not choice.fast
    assert "none of no_such_library is installed" in choice.reason


def test_a_function_as_tokenizer_encodes_by_itself():
    choice = choose_encoder(load_tokenizer(lambda text: [len(text)]), SAMPLE)
    assert not choice.fast
    assert lists(choice.build().encode(["abc"])) == [[3]]


def test_the_gate_s_own_encoder_is_used_first_and_shared_where_it_may_be():
    choice = choose_encoder(TOKENIZER, SAMPLE)
    encoders = [choice.build() for _ in range(2)]
    for encoder in encoders:
        encoder.encode(["x"])
    assert len(choice.spare) == 1  # fastokens is shared, never doubled


def test_a_freshly_trained_byte_level_tokenizer_passes():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    text = Path(random.__file__).read_text(encoding="utf-8")
    made.train_from_iterator([text], trainer)
    choice = choose_encoder(load_tokenizer(made), [text])
    assert choice.library == "fastokens"
    assert load_tokenizer(made).special_ids.eos == 0


# ---------------------------------------------------------------------------------------------------
# While it runs
# ---------------------------------------------------------------------------------------------------


class Panic(BaseException):
    """What a Rust panic looks like from Python: not an Exception."""


class Failing:
    """An encoder that fails on some calls."""

    name = "failing"

    def __init__(self, calls: set[int]) -> None:
        self.calls, self.count = calls, 0

    def encode(self, texts: Sequence[str]) -> Ragged:
        self.count += 1
        if self.count in self.calls:
            raise Panic("index out of bounds")
        return TOKENIZER.encode(texts)


def test_a_panic_reaches_nobody_and_is_logged(caplog: pytest.LogCaptureFixture):
    fast, gone = Failing({2}), []
    encoder = GuardedEncoder(lambda: fast, gone.append, lambda: TOKENIZER.reference)
    want = lists(TOKENIZER.encode(SAMPLE))
    with caplog.at_level("WARNING", "headrace.tokenize"):
        assert [lists(encoder.encode(SAMPLE)) for _ in range(4)] == [want] * 4
    assert encoder.failures == ["Panic: index out of bounds"]
    assert gone == [fast]
    assert fast.count == 4
    assert "Panic" in caplog.text


def test_an_encoder_that_keeps_failing_is_left_for_good():
    fast = Failing(set(range(100)))
    encoder = GuardedEncoder(lambda: fast, lambda _: None, lambda: TOKENIZER.reference)
    for _ in range(10):
        assert lists(encoder.encode(SAMPLE)) == lists(TOKENIZER.encode(SAMPLE))
    assert fast.count == FAILURES
    assert encoder.name == TOKENIZER.reference.name


def test_interrupts_are_not_swallowed():
    class Interrupted(Failing):
        def encode(self, texts: Sequence[str]) -> Ragged:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedEncoder(lambda: Interrupted(set()), lambda _: None, lambda: TOKENIZER.reference).encode(["x"])


def test_an_encoder_whose_cache_grows_is_made_anew():
    made: list[Failing] = []

    def take() -> Failing:
        made.append(Failing(set()))
        return made[-1]

    encoder = GuardedEncoder(take, lambda _: None, lambda: TOKENIZER.reference, renew=100)
    for _ in range(10):
        encoder.encode(["x" * 40])
    assert len(made) == 4


def test_a_wrong_number_of_rows_counts_as_a_failure():
    class Short(Failing):
        def encode(self, texts: Sequence[str]) -> Ragged:
            return TOKENIZER.encode(texts[:-1])

    encoder = GuardedEncoder(lambda: Short(set()), lambda _: None, lambda: TOKENIZER.reference)
    assert len(encoder.encode(SAMPLE)) == len(SAMPLE)
    assert len(encoder.failures) == 1


# ---------------------------------------------------------------------------------------------------
# Spot checks
# ---------------------------------------------------------------------------------------------------


class Wrong:
    """A fast encoder that is wrong on one text."""

    name = "wrong"

    def encode(self, texts: Sequence[str]) -> Ragged:
        return TOKENIZER.encode([t + "!" if t == "rare" else t for t in texts])


def rows(n: int, first: int = 0) -> Origin:
    ids = np.zeros((n, 7), np.int64)
    ids[:, 2] = np.arange(first, first + n)
    return Origin(ids)


def checked_rows(n: int) -> list[int]:
    from headrace.ops.tokenize import _is_spot

    return np.flatnonzero(_is_spot(rows(n).ids)).tolist()


def wrong_op() -> Tokenize:
    choice = EncoderChoice(TOKENIZER, "wrong", "", next(iter(FAST)), [Wrong()])
    return Tokenize(tokenizer_id=SMALL, field="text", choice=choice)


def test_a_difference_found_while_running_stops_the_run_wherever_the_stream_is_cut():
    row = next(row for row in checked_rows(100_000) if row > 64)
    texts = ["fine"] * 64
    texts[10] = "rare"
    for cut in (0, 5, 10):
        block = Block(0, rows(64 - cut, row - 10 + cut), {"text": texts[cut:]})
        with pytest.raises(InternalError, match=rf"row {row}.*encoder='reference'"):
            wrong_op().worker()(block, BadRows())


def test_about_one_document_in_eight_thousand_is_checked():
    n = 1_000_000
    rows_checked = checked_rows(n)
    assert n / 8192 / 1.5 < len(rows_checked) < n / 8192 * 1.5
    assert len({row % 8192 for row in rows_checked}) > 50  # no stride of a file layout meets them all


def test_equal_ids_pass_the_checks():
    op = Tokenize(tokenizer_id=SMALL, field="text").prepare(SAMPLE)
    worker = op.worker()
    for start in range(0, 16384, 1024):
        out = worker(Block(0, rows(1024, start), {"text": ["some text"] * 1024}), BadRows())
        assert len(out) == 1024


FORK = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
from headrace.ops.tokenizer.gate import EncoderChoice
from headrace.ops.tokenizer.load import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
encoder = EncoderChoice(tokenizer, "", "", sys.argv[2] or None).build()
texts = ["some text of the corpus " * 20] * 64
want = encoder.encode(texts).values.tolist()
pid = os.fork()
if pid == 0:
    os._exit(0 if encoder.encode(texts).values.tolist() == want else 3)
for _ in range(400):
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.05)
os.kill(pid, 9)
sys.exit("the forked child hangs")
"""


@pytest.mark.parametrize("library", ["", *FAST])
def test_an_encoder_works_in_a_process_forked_after_its_use(library: str):
    command = [sys.executable, "-c", FORK, str(SMALL), library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("encoder", ["reference", "fast"])
@pytest.mark.parametrize("options", [{"special_tokens": "none"}, {}, {"truncation": True, "max_length": 4}])
def test_ids_may_be_written_to_whichever_encoder_made_them(encoder: Any, options: dict[str, Any]):
    op = Tokenize(tokenizer_id=SMALL, field="text", encoder=encoder, **options).prepare(SAMPLE)
    out = op.worker()(Block(0, rows(3), {"text": SAMPLE}), BadRows())
    column = (out.columns or {})["input_ids"]
    assert isinstance(column, Ragged)
    column.values[:] = 0


# ---------------------------------------------------------------------------------------------------
# What an earlier start found
# ---------------------------------------------------------------------------------------------------


class Notebook(dict[str, bytes]):
    """Notes in memory."""

    def put(self, key: str, value: bytes) -> None:
        self[key] = value


def test_an_outcome_is_noted_and_the_next_start_needs_no_reference():
    notes = Notebook()
    first = choose_encoder(load_tokenizer(SMALL), SAMPLE, notes=notes)
    again = choose_encoder(load_tokenizer(SMALL), SAMPLE, notes=notes)
    assert len(notes) == 1 and first.fast
    assert (again.name, again.reason, again.library) == (first.name, first.reason, first.library)
    assert "reference" not in again.tokenizer.__dict__
    assert lists(again.build().encode(SAMPLE)) == lists(TOKENIZER.encode(SAMPLE))
    assert "reference" not in again.tokenizer.__dict__


def test_a_refusal_is_noted_too(monkeypatch: pytest.MonkeyPatch):
    notes = Notebook()
    monkeypatch.setattr("headrace.ops.tokenizer.gate._try", lambda *_: "broken on purpose")
    assert not choose_encoder(TOKENIZER, SAMPLE, notes=notes).fast
    monkeypatch.undo()
    assert "broken on purpose" in choose_encoder(TOKENIZER, SAMPLE, notes=notes).reason
    with pytest.raises(ConfigError, match="broken on purpose"):
        choose_encoder(TOKENIZER, SAMPLE, "fast", notes=notes)


@pytest.mark.parametrize(
    "other",
    [
        lambda notes: choose_encoder(TOKENIZER, [*SAMPLE[:-1], SAMPLE[-1] + "x"], notes=notes),
        lambda notes: choose_encoder(TOKENIZER, ["".join(SAMPLE)], notes=notes),
        lambda notes: choose_encoder(TOKENIZER, SAMPLE, libraries=["gigatoken"], notes=notes),
        lambda notes: choose_encoder(load_tokenizer(SMALL, allow_special=True), SAMPLE, notes=notes),
    ],
    ids=["another text", "other borders", "other libraries", "special tokens read from text"],
)
def test_a_note_is_of_these_very_texts_and_settings(other: Any):
    notes = Notebook()
    choose_encoder(TOKENIZER, SAMPLE, notes=notes)
    other(notes)
    assert len(notes) == 2


@pytest.mark.parametrize("damaged", [b"", b"{", b'{"name": 3}', b"null"])
def test_a_damaged_note_is_found_out_anew(damaged: bytes):
    notes = Notebook()
    choose_encoder(TOKENIZER, SAMPLE, notes=notes)
    (key,) = notes
    whole, notes[key] = notes[key], damaged
    assert choose_encoder(TOKENIZER, SAMPLE, notes=notes).fast
    assert notes[key] == whole
