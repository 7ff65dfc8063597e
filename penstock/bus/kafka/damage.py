"""Batches of messages that the client cannot unpack: damaged, or larger than it unpacks."""

from confluent_kafka import KafkaError

from penstock.bus.kafka.ask import Partition

DAMAGED_BATCH_ERRORS = (KafkaError._BAD_COMPRESSION, KafkaError._BAD_MSG)  # noqa: SLF001 - that is their name
"""Codes of the errors that a consumer gives in place of such a batch."""
MAX_UNPACK_ATTEMPTS = 3
"""After so many attempts a batch is passed over: the first ones may have failed on the way here."""


class DamagedBatches:
    """Counts for each partition how often its current batch could not be unpacked."""

    def __init__(self) -> None:
        self._attempts: dict[Partition, tuple[int, int]] = {}
        """The last such batch of a partition: the offset where it begins, and how often it was tried."""

    def note_attempt(self, partition: Partition, batch: int) -> bool:
        """Note that the batch at the offset `batch` could not be unpacked. Return whether it is to be passed over.

        A batch is unpacked as a whole and fails from whichever of its offsets it is fetched. Where it ends is not
        known, so the caller goes on one offset further at a time.
        """
        known, attempts = self._attempts.get(partition, (batch, 0))
        attempts = attempts + 1 if known == batch else 1
        self._attempts[partition] = batch, attempts
        return attempts >= MAX_UNPACK_ATTEMPTS
