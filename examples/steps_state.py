"""State for each key, set-up in each worker, and a pool of its own for a step: python examples/steps_state.py"""

from __future__ import annotations

from collections import defaultdict

from headrace.steps import Pipeline


class RunningMean:
    """The mean of each sensor's readings so far: needs all readings of a sensor, in order."""

    def setup(self) -> None:
        self.sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def __call__(self, reading: tuple[str, float]) -> tuple[str, float]:
        sensor, value = reading
        sums = self.sums[sensor]
        sums[0] += value
        sums[1] += 1
        return sensor, sums[0] / sums[1]


def parse(text: str) -> tuple[str, float]:
    sensor, value = text.split("=")
    return sensor, float(value)


def label(reading: tuple[str, float]) -> str:
    return f"{reading[0]}: {reading[1]:.1f}"


def main() -> None:
    lines = [f"sensor{k % 5}={k}" for k in range(200)]
    by_sensor = Pipeline([parse, RunningMean(), label], num_workers=3, assign=lambda text: text.split("=")[0])
    outputs = list(by_sensor.map(lines))
    print(outputs[-5:])

    staged = Pipeline([parse, label], mode="staged", num_workers=[1, 2])
    print(list(staged.map(lines))[:3])
    print(staged.explain())


if __name__ == "__main__":
    main()
