"""A worker: one loaded model, and a session on it for each orchestrator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from swiftspec.builder.load_options import Options, Side
from swiftspec.builder.model_pair import Models, drafter_on, verifier_on
from swiftspec.config import EngineConfig
from swiftspec.distributed.collectives.join import AnyGroup
from swiftspec.distributed.group.follower_dispatch import Follower
from swiftspec.distributed.group.leader import LeadingDrafter, LeadingVerifier
from swiftspec.distributed.group.request_state import Bounds
from swiftspec.distributed.launch.config_check import telling
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.rank_startup import agree_on, kinds_of
from swiftspec.distributed.rpc.draft_session import Drafting
from swiftspec.distributed.rpc.protobuf_codec import Identity, is_fed
from swiftspec.distributed.rpc.service import About, DraftService, Service, TargetService
from swiftspec.distributed.rpc.sessions import Sessions
from swiftspec.distributed.rpc.tree_stream_session import Feeding
from swiftspec.distributed.rpc.verify_session import Verifying
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.distributed.worker_group import Crew, SessionTeam, WorkerRank
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.fingerprint import fingerprint
from swiftspec.runtime.ahead_drafter import AheadDrafter
from swiftspec.runtime.cancellation import Pause
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.verifier import LocalVerifier


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker has room for: sessions at once, their seconds of rest, and the largest shape of their rounds."""

    sessions: int
    idle: float
    shape: EngineConfig

    def check(self, shape: EngineConfig, side: Side) -> None:
        """Raises UserError on a shape that is too large."""
        for name in ("verify_batch",) if side == "target" else ("verify_batch", "draft_leaves", "most_steps"):
            asked, most = getattr(shape, name), getattr(self.shape, name)
            if asked > most:
                flag = "draft_steps" if name == "most_steps" else name
                raise UserError(
                    f"this worker has room for {flag} {most}, not {asked}: start it with --{flag.replace('_', '-')}"
                    f" {asked}"
                )


class WorkerModel:
    """The model of a worker, or this rank's share of it, and the roles on it.

    `rank`: of the group, where there are several. Raises UserError where the model cannot be loaded, its caches do not
    fit, or the ranks were not started alike.
    """

    def __init__(self, side: Side, model: Path, room: Room, world: World | None, options: Options) -> None:
        options = {**options, "only": side, "sessions": room.sessions}
        self.side: Side = side
        self.room, self.path = room, model
        with telling(world):
            models = Models.check(model, model if side == "draft" else None, room.shape, world, options)
        self.rank: WorkerRank | None = None
        self._progress = options.get("progress")
        if world is None:
            self._load(models, None)
        else:
            settings = {"worker": side, "max_sessions": room.sessions}
            self.rank = WorkerRank(world, room.shape, models, settings, self._load_share)

    def _load(self, models: Models, group: AnyGroup | None) -> None:
        shapes = [replace(self.room.shape, proposal=proposal) for proposal in ("coupled", "sample")]
        largest = max(shapes, key=lambda shape: models.slots(self.side, shape))
        self.models, self.loaded = models, models.loaded(self.side, largest, group, self._progress)

    def _load_share(self, models: Models, group: AnyGroup) -> set[str]:
        """Returns the kinds of steps that sessions could have here, as one on a small cache has them."""
        self._load(models, group)
        shape = self.room.shape
        small = replace(self.loaded, context=1, kept_tokens=0).runner(models.slots(self.side, shape), Pause())
        return kinds_of(verifier_on(*small, shape) if self.side == "target" else drafter_on(*small, shape))

    def bounds(self, shape: EngineConfig) -> Bounds:
        """What a session of that shape keeps to. Raises UserError on one that is too large."""
        self.room.check(shape, self.side)
        return Bounds(self.models.vocab_size, self.models.max_model_len, shape.verify_batch)

    def verifier(self, shape: EngineConfig, pause: Pause) -> LocalVerifier:
        verifier = verifier_on(*self.loaded.runner(self.models.slots(self.side, shape), pause), shape)
        if self.rank is not None:
            agree_on(verifier, self.rank.kinds)
        return verifier

    def drafter(self, shape: EngineConfig, pause: Pause) -> LocalDrafter:
        drafter = drafter_on(*self.loaded.runner(self.models.slots(self.side, shape), pause), shape)
        if self.rank is not None:
            agree_on(drafter, self.rank.kinds)
        return drafter

    def follow(self) -> None:
        """The life of any rank but 0."""
        assert self.rank is not None
        self.rank.follow(self._follower)

    def _follower(self, shape: EngineConfig, pause: Pause) -> Follower:
        if self.side == "target":
            return Follower(self.verifier(shape, pause), None, None, self.bounds(shape))
        return Follower(None, self.drafter(shape, pause), None, self.bounds(shape))


def service_of(model: WorkerModel, name: str, tokenizer: bytes, files: tuple[Path, ...]) -> Service[Any]:
    """The service of a worker's rank 0, or of the only one. `tokenizer`: the hash of its id-to-token map; `files`: what
    a client needs to speak of tokens."""
    models, room = model.models, model.room
    about = About(
        Identity(bytes.fromhex(fingerprint(model.path)), tokenizer), name, models.vocab_size, models.max_model_len,
        read_config(model.path).eos_token_ids, str(model.loaded.model.dtype).removeprefix("torch."),
    )  # fmt: skip
    crew = Crew(()) if model.rank is None else model.rank.crew
    teams: dict[Any, SessionTeam] = {}  # by what a session does

    def led(shape: EngineConfig) -> tuple[Bounds, Pause, SessionTeam]:
        bounds, pause, team = model.bounds(shape), Pause(), crew.team(shape)
        pause.tell = partial(team.tell, Call.GO_ON)
        return bounds, pause, team

    def drafting(shape: EngineConfig) -> Drafting | Feeding:
        bounds, pause, team = led(shape)
        drafter = model.drafter(shape, pause)
        leading = LeadingDrafter(drafter, team)
        if is_fed(shape):
            assert isinstance(drafter, AheadDrafter)
            work: Drafting | Feeding = Feeding(drafter, leading, shape, bounds, pause)
        else:
            work = Drafting(leading, shape, bounds, pause)
        teams[work] = team
        return work

    def verifying(shape: EngineConfig) -> Verifying:
        bounds, pause, team = led(shape)
        work = Verifying(LeadingVerifier(model.verifier(shape, pause), team), shape, bounds, pause)
        teams[work] = team
        return work

    def ended(work: Any) -> None:
        crew.end(teams.pop(work))

    if model.side == "draft":
        return DraftService(about, Sessions(drafting, room.sessions, room.idle, ended=ended))
    return TargetService(about, Sessions(verifying, room.sessions, room.idle, ended=ended), files)
