"""URLs that are no place of one dataset are refused by name, before anything is asked of a store."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.io import Dataset
from headrace.io.detect import common_root


@pytest.mark.parametrize("scheme", ["s3", "gs", "memory", "https"])
def test_files_of_several_buckets_are_no_dataset(scheme: str) -> None:
    urls = [f"{scheme}://one/x.jsonl", f"{scheme}://two/y.jsonl"]
    with pytest.raises(ConfigError, match=rf"{scheme}://one and {scheme}://two; make one for each and mix them"):
        Dataset.from_files("b", urls)


def test_files_of_one_bucket_need_no_common_folder() -> None:
    assert common_root(["s3://b/x/1.jsonl", "s3://b/y/2.jsonl"]) == ("s3://b", ["x/1.jsonl", "y/2.jsonl"])
    assert common_root(["s3://b/1.jsonl"]) == ("s3://b", ["1.jsonl"])


@pytest.mark.parametrize(
    "make",
    [
        lambda url: Dataset.from_path("d", url),
        lambda url: Dataset.from_path("d", url, fmt="jsonl"),
        lambda url: Dataset.from_files("d", [url]),
        lambda url: Dataset.from_files("d", ["https://a.example/0.jsonl", url], fmt="jsonl"),
    ],
)
@pytest.mark.parametrize("tail", ["x.jsonl?X-Amz-Signature=secret", "get?file=x.jsonl&sig=secret"])
def test_a_link_with_a_query_is_refused_and_its_signature_kept_quiet(make: Any, tail: str) -> None:
    with pytest.raises(ConfigError, match=r"https://a\.example/\w+(\.jsonl)?\?\.\.\. has a query") as raised:
        make(f"https://a.example/{tail}")
    assert "secret" not in str(raised.value)
