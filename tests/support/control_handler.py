"""A coordinator's handler of control calls that admits every node and expects no call."""

from collections.abc import Sequence

from node.coordinator.sessions import ControlSession
from node.coordinator.snapshot_handler import ServedLayer, UploadPermit
from node.model.labels import BatchPart
from node.state.manifest import LayerSource, UnitEntry
from node.state.snapshot import NewFile
from wire.identity.enrolment import Refusal
from wire.messages import HeldLayer, NodeMessage, PlacedStage


class NobodyAsks:
    """Implements `node.coordinator.control_service.Handler`."""

    async def refusal_for(self, node_id: str) -> Refusal | None:
        return None

    def opened(self, session: ControlSession) -> None:
        raise AssertionError("nobody asks")

    def heard(self, session: ControlSession, message: NodeMessage) -> None:
        raise AssertionError("nobody asks")

    def closed(self, session: ControlSession) -> None:
        raise AssertionError("nobody asks")

    def refused(self, node_id: str, why: str) -> None:
        raise AssertionError("nobody asks")

    async def renew(self, node_id: str, csr_der: bytes) -> bytes | Refusal:
        raise AssertionError("nobody asks")

    async def batch(
        self,
        node_id: str,
        step: int,
        *,
        part: BatchPart,
        held_out: bool = False,
        groups: Sequence[int] = (),
        steps: int = 1,
    ) -> bytes:
        raise AssertionError("nobody asks")

    def layer_holders(
        self, node_id: str, step: int, unit: str, bad: Sequence[str]
    ) -> tuple[UnitEntry, list[PlacedStage], str] | None:
        return None

    def hold_layers(
        self, node_id: str, layers: Sequence[HeldLayer], missing: Sequence[tuple[int, str]]
    ) -> list[tuple[int, str]]:
        return [(layer.step, layer.unit) for layer in layers]

    async def layer(self, step: int, unit: str) -> ServedLayer:
        raise AssertionError("nobody asks")

    def upload_permit(
        self, node_id: str, step: int, unit: str, *, weights_alone: bool = False
    ) -> UploadPermit:
        raise AssertionError("nobody asks")

    async def layer_refused(self, permit: UploadPermit, why: str) -> None:
        raise AssertionError("nobody asks")

    async def weights_ahead(self, permit: UploadPermit) -> LayerSource:
        raise AssertionError("nobody asks")

    async def arriving(self, permit: UploadPermit, size: int) -> NewFile:
        raise AssertionError("nobody asks")

    async def store_layer(self, permit: UploadPermit, file: NewFile | None) -> None:
        raise AssertionError("nobody asks")
