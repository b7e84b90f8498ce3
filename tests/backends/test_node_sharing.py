"""`share="node"`: one engine for the ranks of a node gives each what its own engine would, whoever dies when."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent / "programs"))

from node_rank import build, shown

from headrace.errors import ConfigError
from headrace.run.node_place import local_place, next_session, socket_path

HANG = 120
"""Seconds after which something hangs; everything here takes a few on an idle machine."""
PROGRAM = Path(__file__).parent / "programs" / "node_rank.py"


@dataclass
class Said:
    """What a rank printed."""

    batches: list[str]
    errors: list[tuple[str, str]]
    states: list[str]
    returncode: int
    noise: str


class Node:
    """The ranks of a node as processes; group of each by place."""

    def __init__(self, groups: list[int], *, lanes: int, share: bool = True, each: Any = None, **config: Any) -> None:
        self.run_id = uuid.uuid4().hex
        port = free_port() if config.get("torch") else 0
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.ranks: list[subprocess.Popen[str]] = []
        self._files: list[tuple[IO[str], IO[str]]] = []
        for rank, group in enumerate(groups):
            mine = {"take": 30, **config, **((each or {}).get(rank, {}))}
            mine["options"] = {
                "run_id": self.run_id,
                "canonical_replicas": lanes,
                "dp_degree": max(groups) + 1,
                "dp_group_id": group,
                **({"share": "node", "local_rank": rank, "local_world_size": len(groups)} if share else {}),
                **mine.get("options", {}),
            }
            env |= self.environment(rank, len(groups), port) if port else {}
            command = [sys.executable, str(PROGRAM), json.dumps(mine)]
            out, err = (tempfile.TemporaryFile("w+") for _ in "oe")  # noqa: SIM115  closed when read
            self._files.append((out, err))
            self.ranks.append(subprocess.Popen(command, stdout=out, stderr=err, text=True, env=env))

    @staticmethod
    def environment(rank: int, size: int, port: int) -> dict[str, str]:
        """What a launcher tells its ranks."""
        told = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return {name: str(value) for name, value in told.items()}

    def engines(self) -> list[psutil.Process]:
        """The engine's process, once it is there."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if "headrace.run.node" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def first_lines(self) -> None:
        """Wait until every rank has delivered something."""
        for out, _ in self._files:
            assert wait_until(lambda out=out: os.fstat(out.fileno()).st_size)

    def said(self) -> list[Said]:
        """Wait for all, and read."""
        out = []
        for rank, files in zip(self.ranks, self._files, strict=True):
            rank.wait(HANG)
            text, noise = (read_all(file) for file in files)
            words = [line.split(" ", 2) for line in text.splitlines()]
            out.append(
                Said(
                    [w[2] for w in words if w[0] == "batch"],
                    [(w[1], json.loads(w[2])) for w in words if w[0] == "error"],
                    [w[1] for w in words if w[0] == "state"],
                    rank.returncode,
                    noise,
                )
            )
        return out


def read_all(file: IO[str]) -> str:
    """What a process wrote to a file, which is closed."""
    with file:
        file.seek(0)
        return file.read()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def alone(group: int, groups: int, lanes: int, take: int, states: Any = None) -> tuple[list[str], str]:
    """The batches and the checkpoint of one group with an engine of its own."""
    pipeline = build(canonical_replicas=lanes, dp_degree=groups, dp_group_id=group, runner="inline")
    if states:
        pipeline.restore([bytes.fromhex(state) for state in states])
    iterator = iter(pipeline)
    batches = [shown(batch) for batch in islice(iterator, take)]
    state = pipeline.checkpoint(as_bytes=True).hex()
    iterator.close()
    return batches, state


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    with tempfile.TemporaryDirectory(prefix="hr") as folder:  # short: a socket's path has a limit
        monkeypatch.setenv("TMPDIR", folder)
        yield
        assert wait_until(lambda: not engines_anywhere())
        assert not list(Path(folder).glob("headrace-*/*.d"))


def engines_anywhere() -> list[int]:
    """Engine processes that this test's ranks started and that still run, with whatever parent."""
    found = []
    for process in psutil.process_iter(["cmdline", "uids", "environ"]):
        info = process.info
        marked = (info["environ"] or {}).get("PYTEST_CURRENT_TEST", "")
        if marked == os.environ.get("PYTEST_CURRENT_TEST") and "headrace.run.node" in " ".join(info["cmdline"] or ()):
            found.append(process.pid)
    return found


def wait_until(condition: Any) -> bool:
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


# -- the same as without -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "lanes"),
    [([0, 1], 4), ([0, 0, 1, 1], 3), ([0, 1, 2], 2)],
    ids=["two groups", "peers, and groups that do not divide the lanes", "more groups than lanes"],
)
def test_ranks_receive_what_engines_of_their_own_would_give(groups: list[int], lanes: int) -> None:
    for rank, said in enumerate(Node(groups, lanes=lanes).said()):
        assert (said.errors, said.returncode, said.noise) == ([], 0, "")
        batches, state = alone(groups[rank], max(groups) + 1, lanes, 30)
        assert said.batches == batches
        assert said.states == [state]


def test_a_shared_run_resumes_on_another_number_of_groups_and_iterates_again() -> None:
    before = Node([0, 1], lanes=4, take=9).said()
    states = [said.states[0] for said in before]
    after = Node([0, 0, 1], lanes=4, take=11, restore=states, runs=2, options={"dp_degree": 4}).said()
    whole = alone(0, 1, 4, 18 + 11 * 4)[0]
    for rank, group in enumerate([0, 0, 1]):
        resumed, again = after[rank].batches[:11], after[rank].batches[11:]
        assert resumed == whole[18:][(group - 18) % 4 :: 4]
        assert again == alone(group, 4, 4, 11)[0]
        assert after[rank].states[0] == alone(group, 4, 4, 11, states)[1]


# -- ranks that leave or die ---------------------------------------------------------------------------


def test_a_rank_that_leaves_or_is_killed_does_not_stop_the_others() -> None:
    node = Node([0, 1, 1, 0], lanes=4, take=60, each={0: {"dies_at": 4}, 1: {"take": 7}, 3: {"take": 0}})
    killed, left, stayed, absent = node.said()
    assert killed.returncode == -9
    assert (absent.batches, absent.errors, absent.noise) == ([], [], "")
    assert len(killed.batches) == 5 and len(left.batches) == 7
    assert stayed.batches == alone(1, 2, 4, 60)[0]
    assert (stayed.errors, stayed.noise, left.errors, left.noise) == ([], "", [], "")


def test_a_killed_engine_is_an_error_on_every_rank_and_checkpoints_stay_exact() -> None:
    node = Node([0, 1], lanes=3, take=100_000, pace=0.005)
    node.first_lines()
    (engine,) = node.engines()
    engine.kill()
    killed = time.monotonic()
    said = node.said()
    assert time.monotonic() - killed < 30
    for rank, one in enumerate(said):
        ((kind, message),) = one.errors
        assert kind == "WorkerDied" and f"local rank {rank}" in message and str(engine.pid) in message
        delivered = len(one.batches)
        assert one.batches == alone(rank, 2, 3, delivered)[0]
        resumed = alone(rank, 2, 3, 5, one.states)[0]
        assert resumed == alone(rank, 2, 3, delivered + 5)[0][delivered:]


def test_killing_everything_leaves_nothing() -> None:
    node = Node([0, 1], lanes=2, take=100_000, pace=0.005)
    node.first_lines()
    (engine,) = node.engines()
    for rank in node.ranks:
        rank.kill()
    node.said()
    assert wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


def kill_at_random(seed: int) -> None:
    """Ranks leave, die or stay at random moments: whoever stays receives its stream, and nothing is left."""
    rng = random.Random(seed)
    groups = rng.choice([[0, 1], [0, 1, 0], [0, 1, 2]])
    each = {
        rank: rng.choice([{}, {"take": rng.randrange(1, 40)}, {"dies_at": rng.randrange(40)}])
        for rank in range(len(groups))
    }
    node = Node(groups, lanes=rng.choice([1, 2, 3]), take=40, each=each, pace=rng.choice([0, 0.002]))
    lanes = int(json.loads(node.ranks[0].args[2])["options"]["canonical_replicas"])  # type: ignore[index]
    for rank, said in enumerate(node.said()):
        expected = alone(groups[rank], max(groups) + 1, lanes, 40)[0]
        count = each[rank].get("take", each[rank].get("dies_at", 39) + 1)
        assert (said.batches, said.errors) == (expected[:count], [])


@pytest.mark.parametrize("seed", range(3))
def test_random_departures(seed: int) -> None:
    kill_at_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 60))
def test_many_random_departures(seed: int) -> None:
    kill_at_random(seed)


# -- the end of finite data ------------------------------------------------------------------------------

FINITE = {"exhausted_policy": "stop"}


@pytest.mark.parametrize("share", [True, False], ids=["shared", "an engine each"])
@pytest.mark.parametrize("rule", ["drop", "pad"])
def test_groups_in_processes_of_their_own_end_at_the_same_step(rule: str, share: bool, tmp_path: Path) -> None:
    """The chain packs, so only running it tells how long a lane is. Over a folder; or with sharing, over the node's own."""
    board = {} if share else {"aggregate_dir": str(tmp_path)}
    said = Node([0, 1, 2], lanes=3, share=share, take=10_000, source=FINITE, options={"uneven": rule, **board}).said()
    assert [(one.errors, one.noise, one.returncode) for one in said] == [([], "", 0)] * 3
    (steps,) = {len(one.batches) for one in said}
    lanes: list[list[str]] = [[], [], []]
    for batch in build(source=FINITE, canonical_replicas=3, runner="inline"):
        lanes[batch.lane_ids[0]].append(shown(batch))
    lengths = [len(lane) for lane in lanes]
    assert min(lengths) < max(lengths)
    assert steps == (min(lengths) if rule == "drop" else max(lengths))
    for one, lane in zip(said, lanes, strict=True):
        assert one.batches == (lane[:steps] + ["masked"] * (steps - len(lane)))
    assert len({json.dumps(sorted(one.states)) for one in said}) == 3


def test_the_store_of_torch_distributed_is_found_where_it_is_initialised() -> None:
    one, other = Node([0, 1], lanes=2, share=False, take=10_000, source=FINITE, torch=True).said()
    assert (one.errors, other.errors, one.returncode, other.returncode) == ([], [], 0, 0)
    assert len(one.batches) == len(other.batches) > 50


# -- errors --------------------------------------------------------------------------------------------


def test_an_operators_error_is_raised_on_every_rank_with_its_traceback() -> None:
    for said in Node([0, 1], lanes=2, breaks=True).said():
        ((kind, message),) = said.errors
        assert kind == "OperatorError" and "broken on purpose" in message and "in breaks" in message


def test_ranks_that_differ_are_told_where() -> None:
    for said in Node([0, 1], lanes=2, each={1: {"seed": 6}}).said():
        ((kind, message),) = said.errors
        assert kind == "ConfigError" and "local ranks 0 and 1: recipe: curriculum.seed: 5 -> 6" in message


def test_ranks_that_do_not_come_are_named() -> None:
    options = {"local_world_size": 4, "aggregate_timeout_s": 2.0}
    for said in Node([0, 1], lanes=2, options=options).said():
        ((kind, message),) = said.errors
        assert kind == "ConfigError" and "local ranks 2, 3 of 4 did not come within 2 s" in message


def test_places_come_from_options_or_else_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    options = build(share="node")._options
    with pytest.raises(ConfigError, match=r"needs local_rank: .* such as torchrun"):
        local_place(options)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (local_place(options).rank, local_place(options).size, local_place(options).leads) == (1, 2, False)
    assert local_place(options.updated(local_rank=0)).leads
    with pytest.raises(ConfigError, match="local_rank=2 with local_world_size=2"):
        local_place(options.updated(local_rank=2))
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(ConfigError, match="LOCAL_RANK='first', which is not a rank"):
        local_place(options)


def test_sessions_have_names_of_their_own_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = uuid.uuid4().hex
    names = [next_session(run), next_session(run), next_session(uuid.uuid4().hex)]
    assert len(set(names)) == 3
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert socket_path(names[0]).parent.stat().st_mode & 0o777 == 0o700
    socket_path(names[0]).parent.chmod(0o755)
    with pytest.raises(ConfigError, match="only this user can enter"):
        socket_path(names[0])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 90)))
    (tmp_path / ("x" * 90)).mkdir()
    with pytest.raises(ConfigError, match="too long"):
        socket_path(names[0])


def test_loader_workers_do_not_share() -> None:
    with pytest.raises(ConfigError, match="num_workers=0"):
        build(share="node", local_rank=0, local_world_size=1).part(0, 2)
