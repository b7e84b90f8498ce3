"""Rows of V schedules from short scripts.

On a V, rank r holds two stages: chunk 0 on the way down (stage r) and chunk 1 on the way up (stage 2N-1-r). A script
is a text of words: `F0` the next forward of chunk 0, `I1` the next input gradient of chunk 1, `B0` the next full backward,
`W1` the oldest weight gradient owed by chunk 1, `W` the oldest owed by any (nothing if none is), `F0+B1` an overlapped pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.parallel.action import Action, Kind, overlap


def perform(script: Iterable[str], stages: tuple[int, int]) -> list[Action]:
    """The row that a script describes, for the rank that holds these two stages."""
    turn: Counter[tuple[str, int]] = Counter()
    owed: list[Action] = []

    def step(word: str) -> Action:
        way = "F" if word[0] == "F" else "B"
        chunk = int(word[1])
        action = Action(stages[chunk], Kind(word[0]), turn[way, chunk])
        turn[way, chunk] += 1
        if action.kind is Kind.I:
            owed.append(Action(action.stage, Kind.W, action.microbatch))
        return action

    row: list[Action] = []
    for word in script:
        if word[0] == "W":
            of_chunk = [a for a in owed if len(word) == 1 or a.stage == stages[int(word[1])]]
            if of_chunk:
                row.append(of_chunk[0])
                owed.remove(of_chunk[0])
        elif "+" in word:
            row.append(overlap(*map(step, word.split("+"))))
        else:
            row.append(step(word))
    return row


def words(*phrases: tuple[int, str]) -> list[str]:
    """Say each phrase so many times: `words((2, "F0"), (1, "F1 I1"))` is F0 F0 F1 I1."""
    return [word for times, phrase in phrases for _ in range(times) for word in phrase.split()]
