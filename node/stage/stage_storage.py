"""What a stage stores its activations in: as the run file says, or what the coordinator chose of
`storage.allow`."""

from node.config.schema import RunConfig
from node.pipeline.storage_choice import allowed_storages, chosen_config, name_of
from wire.errors import ProtocolViolationError


class StageStorage:
    """Of one stage at a time."""

    def __init__(self, config: RunConfig) -> None:
        self._whole = config
        self.number: int | None = None
        """Of `allowed_storages`; None as the run file says."""

    @property
    def config(self) -> RunConfig:
        """The run file as the stage has it."""
        if self.number is None:
            return self._whole
        return chosen_config(self._whole, allowed_storages(self._whole)[self.number])

    def choose(self, names: tuple[str, ...], stage: int, stages: int) -> bool:
        """Take what the coordinator chose, one a stage, and say whether it is another than before.

        Raises ProtocolViolationError for what the run file does not allow.
        """
        if len(names) != (stages if self._whole.storage.allow else 0):
            raise ProtocolViolationError(
                f"the coordinator chooses {len(names)} storages for {stages} stages, where this run's file "
                f"has storage.allow = {list(self._whole.storage.allow)}"
            )
        before, self.number = self.number, None
        if names:
            allowed = [name_of(storage) for storage in allowed_storages(self._whole)]
            if names[stage] not in allowed:
                raise ProtocolViolationError(
                    f"the coordinator chooses storage {names[stage]!r}, which this run's file does not allow"
                )
            self.number = allowed.index(names[stage])
        return self.number != before
