"""Views of whole swarms as they look when all is well, for tests that then spoil something."""

import hashlib
from dataclasses import dataclass, field

from dipaco.protocol.chain.steps import Head
from dipaco.protocol.config import GridConfig, ModelConfig, RoundsConfig
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.records import Claim, Holding, PeerRecord, ProgressEntry, ProgressRecord
from dipaco.protocol.view import build_view
from support.runs.make_plan import make_plan

TOKENS_A_ROUND = 100


def peer_name(number):
    """Return a peer id; all begin alike, as real ones do."""
    digits = "".join("123456789A"[int(digit)] for digit in f"{number:08d}")
    return "12D3KooW" + "x" * 36 + digits


def record(peer, state="training", reachable="direct", path=None, round_index=0):
    """Return what a peer says of itself."""
    return PeerRecord.model_construct(peer_id=peer, state=state, reachable=reachable, path=path, round=round_index)


def digest_of(module, version, chain=""):
    """Return the digest of a version of a module; every chain has its own."""
    return hashlib.sha256(f"{module}/{version}/{chain}".encode()).hexdigest()


def plan_of(*sizes, private=False, **rounds):
    """Return the plan of a run with so many modules in each level, and private ones."""
    model = ModelConfig(vocabulary_size=64, block_count=4, hidden_size=8, head_count=1, sequence_length=16)
    plan = make_plan(
        grid=GridConfig(modules_per_level=sizes, private_head=private),
        model=model,
        rounds=RoundsConfig(**{"duration_s": 100.0, **rounds}),
    )
    return plan, Grid(plan.model, plan.grid, plan.rounds.level_offsets)


@dataclass
class Records:
    """The records of a swarm; tests change them and look again."""

    plan: RunPlan
    grid: Grid
    now_s: float
    claims: dict[str, Claim] = field(default_factory=dict)
    peers: dict[str, PeerRecord] = field(default_factory=dict)
    holdings: dict[tuple[str, str], Holding] = field(default_factory=dict)
    """By module and peer."""
    progress: dict[int, ProgressEntry] = field(default_factory=dict)

    def view(self):
        """Return what a reader makes of the records."""
        held = {module: [] for module in self.grid.modules()}
        for (module, _), holding in sorted(self.holdings.items()):
            held[module].append(holding)
        return build_view(
            now_s=self.now_s,
            plan=self.plan,
            grid=self.grid,
            claims=self.claims.values(),
            peers=self.peers.values(),
            holdings=held,
            progress=[
                ProgressRecord(peer_id=peer_name(path), entries=(entry,)) for path, entry in self.progress.items()
            ],
        )

    def hold(self, peer, module, last_round, *, chain=""):
        """Let a peer announce the state of a module after the round `last_round`."""
        version = last_round + 1
        name = digest_of(module, version, chain if version else "")
        head = Head(module, name, version, version, last_round, name, 1000)
        self.holdings[module, peer] = Holding(peer, head)

    def trainers(self, module):
        """Return who claims a path through a module, by name."""
        paths = self.grid.paths_of_module(module)
        return sorted(peer for peer, claim in self.claims.items() if claim.path in paths)


def healthy_swarm(plan, grid, *, peers, round_index, in_round=0.5, behind=0):
    """Return the records of a swarm in which all is well, at a moment of a round.

    With fewer peers than paths all move on together after every dwell. `behind`: every so many
    trainers a module has one that has not fetched the newest version yet.
    """
    rounds = plan.rounds
    now_s = plan.start_s + (round_index + in_round) * rounds.duration_s
    records = Records(plan, grid, now_s)
    dwell = rounds.dwell_rounds if peers < grid.path_count else round_index + 1
    turn = round_index // dwell
    for number in range(peers):
        path = (turn * peers + number) % grid.path_count
        name = peer_name(number)
        records.claims[name] = Claim(
            peer_id=name,
            path=path,
            state="training",
            since_s=plan.start_s + turn * dwell * rounds.duration_s,
            round=round_index,
        )
        records.peers[name] = PeerRecord(
            peer_id=name,
            protocol=1,
            software="dipaco/test",
            device="cpu x1",
            state="training",
            path=path,
            tokens_per_s=100.0,
            round=round_index,
            reachable="direct",
            addresses=("/ip4/203.0.113.5/tcp/31337",),
            bytes_up=1,
            bytes_down=2,
        )
    for path in range(grid.path_count):
        _add_progress(records, path, _last_trained(path, peers, grid.path_count, dwell, round_index))
    for module in grid.modules():
        _add_holdings(records, module, behind, in_round)
    return records


def _last_trained(path, peers, paths, dwell, round_index):
    """Return the last whole round in which a path was trained; -1 for none."""
    for trained in range(round_index - 1, -1, -1):
        first = (trained // dwell) * peers
        if (path - first) % paths < peers:
            return trained
    return -1


def _add_progress(records, path, last_round):
    if last_round >= 0:
        records.progress[path] = ProgressEntry(
            path=path,
            last_round=last_round,
            tokens=TOKENS_A_ROUND * (last_round + 1),
            validation_nll=20.0,
            validation_tokens=10,
            train_loss=2.0,
        )


def _add_holdings(records, module, behind, in_round):
    """Let all who train a module hold its newest state, and others until there are copies."""
    grid, rounds = records.grid, records.plan.rounds
    paths = grid.paths_of_module(module)
    last_round = max((records.progress[path].last_round for path in paths if path in records.progress), default=-1)
    offset = 1.0 if rounds.inner_steps else grid.level_offset(grid.level_of(module))
    trainers = records.trainers(module)
    if trainers and in_round > offset and not rounds.inner_steps:
        last_round = max(claim.round for claim in records.claims.values())
    # A peer is late for a moment: a state that is rounds old is with all that need it.
    present = int((records.now_s - records.plan.start_s) / rounds.duration_s)
    is_fresh = behind and last_round >= 0 and present - last_round <= 2
    for index, peer in enumerate(trainers):
        is_late = is_fresh and len(trainers) > 1 and index % behind == 1
        records.hold(peer, module, last_round - bool(is_late))
    others = [peer for peer in records.peers if peer not in trainers]
    for peer in others[: max(0, rounds.copies - len(trainers))]:
        records.hold(peer, module, last_round)
