"""Streams of members and frames: all of them, bounded, and loud where they end too early."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import FormatError
from headrace.io.compress import compression_of, decompressed
from headrace.io.store import LocalFile

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda data: gzip.compress(data, 1),
    "zst": lambda data: zstandard.ZstdCompressor(level=1).compress(data),
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
}
KINDS = sorted(PACK)


def _data(path: Path, content: bytes, kind: str) -> bytes:
    path.write_bytes(content)
    return b"".join(decompressed(LocalFile(str(path)), kind))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=4), repeat=st.sampled_from([1, 2000]))
def test_members_are_one_stream(tmp_path: Path, kind: str, parts: list[bytes], repeat: int) -> None:
    content = b"".join(PACK[kind](part * repeat) for part in parts)
    assert _data(tmp_path / "x", content, kind) == b"".join(part * repeat for part in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_is_an_error(tmp_path: Path, kind: str) -> None:
    data = os.urandom(150)
    first, second = PACK[kind](data), PACK[kind](data[::-1])
    for size in range(1, len(first) + len(second)):
        content = (first + second)[:size]
        if size == len(first):
            assert _data(tmp_path / "x", content, kind) == data
        else:
            with pytest.raises(FormatError, match=f"ends at byte {size}"):
                _data(tmp_path / "x", content, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_and_trailing_bytes_are_errors(tmp_path: Path, kind: str) -> None:
    whole = PACK[kind](os.urandom(4000))
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    if kind == "zst":  # a random byte of a frame without checksum may decode; a wrong header may not
        damaged[4:] = b"\xff" * 40
    for content in (bytes(damaged), whole + b"garbage after the end", b"plain text, not compressed at all"):
        with pytest.raises(FormatError, match=r"damaged .* at byte \d+"):
            _data(tmp_path / "x", content, kind)


def test_zstd_checksums_frames_that_mean_nothing_and_long_windows(tmp_path: Path) -> None:
    data = b"line\n" * 5000
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"notes"
    assert _data(tmp_path / "x", skippable + frame + skippable + frame, "zst") == data * 2
    long = zstandard.ZstdCompressionParameters.from_level(1, window_log=28, enable_ldm=True)
    assert _data(tmp_path / "x", zstandard.ZstdCompressor(compression_params=long).compress(data), "zst") == data
    damaged = frame[:-1] + bytes([frame[-1] ^ 1])
    with pytest.raises(FormatError, match="damaged zst"):
        _data(tmp_path / "x", damaged, "zst")


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_bounded_whatever_the_ratio(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(PACK[kind](b"\0" * (16 << 20)))
    sizes = [len(piece) for piece in decompressed(LocalFile(str(path)), kind)]
    assert sum(sizes) == 16 << 20
    assert kind == "zst" or max(sizes) <= 4 << 20


def test_gzip_without_isal_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.io.compress._inflater", lambda: zlib.decompressobj(31))
    data = os.urandom(3_000_000) + b"\0" * 9_000_000
    content = gzip.compress(data[:1000]) + gzip.compress(data[1000:])
    assert _data(tmp_path / "x", content, "gz") == data
    with pytest.raises(FormatError, match="cut off"):
        _data(tmp_path / "x", content[:-1], "gz")


def test_names() -> None:
    kinds = [compression_of(name) for name in ("a.jsonl", "a.jsonl.gz", "a.JSONL.ZST", "a.zstd", "a.bz2", "a.xz", "gz")]
    assert kinds == [None, "gz", "zst", "zst", "bz2", "xz", None]
