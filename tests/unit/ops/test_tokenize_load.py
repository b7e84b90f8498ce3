"""Loading tokenizers: files, folders, hub ids, objects; identity by content."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from headrace.errors import ConfigError
from headrace.ops.tokenizer.json_tokenizer import JsonTokenizer, canonical
from headrace.ops.tokenizer.load import load_tokenizer
from headrace.ops.tokenizer.seam import SpecialIds

SMALL = Path(__file__).parents[2] / "golden" / "tokenizers" / "small"
FILE = SMALL / "tokenizer.json"


def variant(tmp_path: Path, change: Callable[[dict[str, Any]], Any], **files: dict[str, Any]) -> Path:
    """The small tokenizer with a change, alone in a folder but for `files`."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=3), encoding="utf-8")
    for name, data in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return tmp_path


def test_golden_ids_hold():
    tokenizer = load_tokenizer(SMALL)
    cases = json.loads((SMALL / "golden.json").read_text())["cases"]
    assert len(cases) > 30
    ids = tokenizer.encode([text for text, _ in cases])
    for row, (text, want) in enumerate(cases):
        assert ids[row].tolist() == want, repr(text)


def test_folder_file_and_object_are_the_same_tokenizer():
    made = [load_tokenizer(given) for given in (SMALL, str(SMALL), FILE, Tokenizer.from_file(str(FILE)))]
    assert {t.fingerprint for t in made} == {made[0].fingerprint}
    assert made[0].special_ids == made[1].special_ids == made[2].special_ids == SpecialIds(0, 1, 2, None)
    assert [t.name for t in made] == ["small", "small", "small", "Tokenizer"]
    assert load_tokenizer(tokenizer_id=SMALL).fingerprint == made[0].fingerprint


def test_fingerprint_is_of_content_not_of_spelling_or_use(tmp_path: Path):
    want = load_tokenizer(SMALL).fingerprint
    respelled = variant(tmp_path, lambda c: c["model"].update(merges=[" ".join(m) for m in c["model"]["merges"]]))
    assert load_tokenizer(respelled).fingerprint == want
    used = Tokenizer.from_file(str(FILE))
    used.enable_padding(length=8)
    used.enable_truncation(4)
    used.encode("some text")
    assert load_tokenizer(used).fingerprint == want


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["model"]["merges"].pop(),
        lambda c: c["model"]["vocab"].update({"new": 5000}),
        lambda c: c.update(normalizer={"type": "NFC"}),
        lambda c: c["added_tokens"][0].update(special=False),
    ],
)
def test_fingerprint_sees_what_changes_ids(tmp_path: Path, change: Callable[[dict[str, Any]], Any]):
    assert load_tokenizer(variant(tmp_path, change)).fingerprint != load_tokenizer(SMALL).fingerprint


def test_how_special_text_is_read_is_part_of_the_identity():
    assert load_tokenizer(SMALL, allow_special=True).fingerprint != load_tokenizer(SMALL).fingerprint


def test_truncation_and_padding_stored_in_the_file_are_ignored(tmp_path: Path):
    stored = {
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
    }
    tokenizer = load_tokenizer(variant(tmp_path, lambda c: c.update(stored)))
    text = "one two three four five six seven"
    assert tokenizer.encode([text, "a"]).lengths.tolist() == load_tokenizer(SMALL).encode([text, "a"]).lengths.tolist()


def test_the_user_s_own_object_is_left_as_it_was():
    own = Tokenizer.from_file(str(FILE))
    own.enable_truncation(2)
    load_tokenizer(own).encode(["one two three four"])
    assert own.truncation is not None
    assert len(own.encode("one two three four").ids) == 2


# ---------------------------------------------------------------------------------------------------
# Special ids
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"tokenizer_config": {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}}}, (0, 1)),
        ({"special_tokens_map": {"eos_token": "<|eos|>"}}, (None, 1)),
        ({"config": {"bos_token_id": 7, "eos_token_id": 8}}, (7, 8)),
        ({"config": {"eos_token_id": [8, 9]}}, (None, None)),
        ({"config": {"bos_token_id": 7}, "tokenizer_config": {"bos_token": None}}, (None, None)),
        ({"tokenizer_config": {"eos_token": "not in the vocabulary"}}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_special_ids_come_from_the_files_beside(tmp_path: Path, files: dict[str, Any], want: tuple[Any, Any]):
    ids = load_tokenizer(variant(tmp_path, lambda c: None, **files)).special_ids
    assert (ids.bos, ids.eos) == want


def test_a_lone_file_with_one_well_known_name_is_understood(tmp_path: Path):
    def rename(content: dict[str, Any]) -> None:
        content["added_tokens"][1]["content"] = "<|endoftext|>"

    assert load_tokenizer(variant(tmp_path, rename)).special_ids == SpecialIds(None, 1, 2, None)


# ---------------------------------------------------------------------------------------------------
# Objects and functions
# ---------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer object as users write them."""

    eos_token_id = 3

    def encode(self, text: str) -> list[int]:
        """Lengths of words."""
        return [len(word) for word in text.split()]


class Fast:
    """The shape of a fast tokenizer of transformers."""

    def __init__(self) -> None:
        self.backend_tokenizer = Tokenizer.from_file(str(FILE))
        self.bos_token_id, self.eos_token_id, self.pad_token_id, self.unk_token_id = 0, 1, None, None
        self.name_or_path = "someone/model"


def test_functions_and_objects_encode_by_themselves():
    for given in (Words(), Words().encode, lambda text: np.array([len(w) for w in text.split()])):
        ids = load_tokenizer(given).encode(["a bb", "", "ccc"])
        assert ids.values.dtype == np.int32
        assert [ids[r].tolist() for r in range(3)] == [[1, 2], [], [3]]
    assert load_tokenizer(Words()).special_ids.eos == 3


def test_a_fast_transformers_tokenizer_is_taken_apart():
    tokenizer = load_tokenizer(Fast())
    assert isinstance(tokenizer, JsonTokenizer)
    assert tokenizer.fingerprint == load_tokenizer(SMALL).fingerprint
    assert tokenizer.special_ids == SpecialIds(0, 1, None, None)
    assert tokenizer.name == "someone/model"


@pytest.mark.parametrize("result", ["text", [[1, 2]], [1.5], {"ids": [1]}])
def test_a_function_that_returns_no_ids_is_told_so(result: Any):
    with pytest.raises((ConfigError, KeyError)):
        load_tokenizer(lambda text: result).encode(["x"])


@pytest.mark.parametrize(
    ("given", "part"), [((None, None), "needs one of"), ((5, None), "int"), ((len, "x"), "needs one of")]
)
def test_what_is_no_tokenizer_is_refused(given: tuple[Any, Any], part: str):
    with pytest.raises(ConfigError, match=part):
        load_tokenizer(*given)


# ---------------------------------------------------------------------------------------------------
# Files that are not there, or are something else
# ---------------------------------------------------------------------------------------------------


def test_missing_files_are_said(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json \(it holds: tokenizer\.model\)"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_tokenizer(tmp_path / "elsewhere" / "tokenizer.json")
    with pytest.raises(ConfigError, match="is a URL"):
        load_tokenizer("s3://bucket/tokenizer")


@pytest.mark.parametrize(
    ("data", "part"),
    [(b"{", "not JSON"), (b"[1]", "not an object"), (b"{}", "no 'model'"), (b'{"model": {}}', "refuses")],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, data: bytes, part: str):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ConfigError, match=part):
        load_tokenizer(tmp_path).encode(["x"])


def test_hub_id_without_network_fails_at_once_and_says_so(tmp_path: Path):
    code = (
        "import time; from headrace.ops.tokenizer import load_tokenizer\n"
        "start = time.monotonic()\n"
        "try: load_tokenizer('nobody/no-such-tokenizer')\n"
        "except ValueError as e: print(type(e).__name__, e); assert time.monotonic() - start < 15\n"
    )
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "ConfigError" in done.stdout
    assert "nobody/no-such-tokenizer" in done.stdout


def test_loading_imports_no_model_library():
    code = (
        "import sys; from headrace.ops.tokenizer import load_tokenizer\n"
        f"load_tokenizer({str(SMALL)!r}).encode(['a'])\n"
        "print([m for m in ('transformers', 'torch', 'huggingface_hub', 'pyarrow', 'fastokens', 'awkward') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_tokenizer_pickles_without_what_it_has_built():
    tokenizer = load_tokenizer(SMALL)
    want = tokenizer.encode(["hello"])[0].tolist()
    there = pickle.loads(pickle.dumps(tokenizer))
    assert there.fingerprint == tokenizer.fingerprint
    assert there.encode(["hello"])[0].tolist() == want
    assert len(pickle.dumps(tokenizer)) < 2 * len(FILE.read_bytes())


def test_canonical_form_is_a_fixed_point():
    once = canonical(FILE.read_bytes())
    assert canonical(once) == once
