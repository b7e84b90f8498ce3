"""Lines of a file through steps with zero or more outputs, read by two emitters: python examples/steps_text.py"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.steps import DROP, FileReader, Pipeline, emit, split_seeks


def parse(line: str) -> Any:
    return json.loads(line) if line else DROP


def sentences(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(row["text"].split(". ")):
        yield {"id": row["id"], "sentence": number, "words": len(text.split())}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        rows = ({"id": k, "text": ". ".join(f"sentence {n} of row {k}" for n in range(k % 4 + 1))} for k in range(2000))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

        readers = [FileReader(path, pos, num_lines) for pos, num_lines in split_seeks(path, splits=2)]
        with Pipeline([parse, sentences], num_workers=2) as pipeline:
            emit(readers, pipeline)
            words = sum(out["words"] for out in pipeline)
            print(f"{pipeline.statistics().delivered} sentences, {words} words")
            print(pipeline.explain())


if __name__ == "__main__":
    main()
