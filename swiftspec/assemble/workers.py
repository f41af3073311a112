"""A worker: one loaded model, and a session on it for each orchestrator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from swiftspec.assemble.models import Models, drafter_on, verifier_on
from swiftspec.assemble.options import Options, Side
from swiftspec.config import EngineConfig
from swiftspec.distributed.grpc.convert import Identity, is_fed
from swiftspec.distributed.grpc.drafting import Drafting
from swiftspec.distributed.grpc.feeding import Feeding
from swiftspec.distributed.grpc.service import About, DraftService, Service, TargetService
from swiftspec.distributed.grpc.sessions import Sessions
from swiftspec.distributed.grpc.verifying import Verifying
from swiftspec.distributed.standing import Bounds
from swiftspec.errors import UserError
from swiftspec.model.files import read_config
from swiftspec.model.fingerprint import fingerprint
from swiftspec.runtime.ahead_drafter import AheadDrafter
from swiftspec.runtime.pause import Pause


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


def make_service(
    side: Side, model: Path, name: str, tokenizer: bytes, files: tuple[Path, ...], room: Room,
    **options: Unpack[Options],
) -> Service:  # fmt: skip
    """Loads the model and makes its service. `tokenizer`: the hash of its id-to-token map; `files`: what a client needs
    to speak of tokens. Raises UserError where the model cannot be loaded, or its caches do not fit."""
    options |= {"only": side, "sessions": room.sessions}
    shapes = [replace(room.shape, proposal=proposal) for proposal in ("coupled", "sample")]
    models = Models.check(model, model if side == "draft" else None, room.shape, None, options)
    largest = max(shapes, key=lambda shape: models.slots(side, shape))
    loaded = models.loaded(side, largest, None, options.get("progress"))
    about = About(
        Identity(bytes.fromhex(fingerprint(model)), tokenizer), name, models.vocab_size, models.max_model_len,
        read_config(model).eos_token_ids, str(loaded.model.dtype).removeprefix("torch."),
    )  # fmt: skip

    def bounds(shape: EngineConfig) -> Bounds:
        room.check(shape, side)
        return Bounds(models.vocab_size, models.max_model_len, shape.verify_batch)

    def drafting(shape: EngineConfig) -> Drafting | Feeding:
        keeps, pause = bounds(shape), Pause()
        drafter = drafter_on(*loaded.runner(models.slots(side, shape), pause), shape)
        if is_fed(shape):
            assert isinstance(drafter, AheadDrafter)
            return Feeding(drafter, shape, keeps, pause)
        return Drafting(drafter, shape, keeps, pause)

    def verifying(shape: EngineConfig) -> Verifying:
        keeps, pause = bounds(shape), Pause()
        return Verifying(verifier_on(*loaded.runner(models.slots(side, shape), pause), shape), shape, keeps, pause)

    if side == "draft":
        return DraftService(about, Sessions(drafting, room.sessions, room.idle))
    return TargetService(about, Sessions(verifying, room.sessions, room.idle), files)
