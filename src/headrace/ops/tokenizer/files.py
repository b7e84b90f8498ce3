"""Find `tokenizer.json` and the files beside it: a folder, a file, or an id on the Hugging Face hub.

Loading the JSON natively takes 0.1 s; importing a model library to get the same tokenizer takes two seconds and
hundreds of megabytes, so that is never done here.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from headrace.errors import ConfigError

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json", TEMPLATE)


def read_files(tokenizer_id: str | os.PathLike[str]) -> dict[str, bytes]:
    """Contents of tokenizer.json and of those neighbours that exist, by file name. ConfigError if there is none."""
    text = os.fspath(tokenizer_id)
    path = Path(text).expanduser()
    if path.is_file():
        return {TOKENIZER: path.read_bytes(), **_neighbours(path.parent, skip=path.name)}
    if path.is_dir():
        return _read_folder(path)
    if _is_hub_id(text):
        return _read_hub(text)
    if "://" in text:
        raise ConfigError(f"tokenizer_id {text!r} is a URL; copy the tokenizer to a local folder and pass its path")
    raise ConfigError(f"tokenizer_id {text!r}: no such file or folder (looked at {path.absolute()})")


def _read_folder(path: Path) -> dict[str, bytes]:
    file = path / TOKENIZER
    if not file.is_file():
        there = ", ".join(sorted(p.name for p in path.iterdir())[:12]) or "nothing"
        raise ConfigError(
            f"tokenizer folder {path} has no {TOKENIZER} (it holds: {there}). Other formats have to be converted first: "
            f"transformers.AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained(...) writes one."
        )
    return {TOKENIZER: file.read_bytes(), **_neighbours(path, skip=TOKENIZER)}


def _neighbours(folder: Path, skip: str) -> dict[str, bytes]:
    return {n: (folder / n).read_bytes() for n in BESIDE if n != skip and (folder / n).is_file()}


def _is_hub_id(text: str) -> bool:
    """`name` or `owner/name`, of the characters that the hub allows."""
    parts = text.split("/")
    plain = all(p and p[0].isalnum() and all(c.isalnum() or c in "-_." for c in p) for p in parts)
    return plain and len(parts) <= 2 and not text.endswith(".json")


def _read_hub(repo: str) -> dict[str, bytes]:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            f"tokenizer_id {repo!r} is not a local file or folder; to fetch it from the Hugging Face hub, "
            "pip install huggingface_hub, or pass the path of a folder that holds tokenizer.json"
        )
    found = {TOKENIZER: _hub_file(repo, TOKENIZER)}
    for name in (*BESIDE[:2], TEMPLATE):
        try:
            found[name] = _hub_file(repo, name)
        except ConfigError:  # optional neighbours; tokenizer.json alone is a complete tokenizer
            continue
    return {name: Path(path).read_bytes() for name, path in found.items()}


def _hub_file(repo: str, name: str) -> str:
    """Local path of a hub file: from the cache without asking the network, else downloaded."""
    import huggingface_hub

    try:
        return huggingface_hub.hf_hub_download(repo, name, local_files_only=True)
    except (OSError, ValueError):  # not in the cache
        pass
    try:
        _check_reachable()
        return huggingface_hub.hf_hub_download(repo, name, etag_timeout=5)
    except (OSError, ValueError, RuntimeError) as error:  # offline, no such repository, not allowed: all end here
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"tokenizer_id {repo!r} is neither a local path nor in the local hub cache, and {name} could not be "
            f"fetched from the Hugging Face hub ({type(error).__name__}: {reason[:200]}). Pass the path of a folder "
            "that holds tokenizer.json, or check the name and the network."
        ) from error


def _check_reachable() -> None:
    """OSError at once where the hub cannot be reached: its client would try for half a minute."""
    if getproxies():
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    socket.create_connection((hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)), timeout=5).close()
