"""What happens to items that fail, and to workers that are killed: python examples/steps_errors.py"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

from headrace.steps import Failed, Pipeline


def invert(x: int) -> float:
    return 1 / x


class FragileOnce:
    """Kills its own process at one item, the first time."""

    def __init__(self, mark: Path, at: int) -> None:
        self.mark, self.at = mark, at

    def __call__(self, x: int) -> int:
        if x == self.at and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def main() -> None:
    items = [-1, 0, 1, 2]
    try:
        list(Pipeline([invert], num_workers=2).map(items))
    except ZeroDivisionError as error:
        print("raise: ", error, "|", error.__notes__[0].splitlines()[0])

    pipeline = Pipeline([invert], num_workers=2, on_error="skip")
    print("skip:  ", list(pipeline.map(items)), "skipped", pipeline.statistics().skipped)

    outputs = list(Pipeline([invert], num_workers=2, on_error="return").map(items))
    print("return:", [out.error if isinstance(out, Failed) else out for out in outputs])

    with tempfile.TemporaryDirectory() as folder:
        step = FragileOnce(Path(folder) / "mark", at=50)
        with Pipeline([step], num_workers=2) as pipeline:
            assert list(pipeline.map(range(100))) == list(range(100))
            workers = pipeline.statistics().workers
            print(f"killed: all 100 outputs in order; {workers.deaths} worker died, {workers.retries} item tried again")


if __name__ == "__main__":
    main()
