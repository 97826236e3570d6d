"""The contract every store keeps, as tests: subclass it, give it a store, run pytest.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            return MyStore()        # empty; a Store or an AsyncStore; closed by the contract

The suite waits for short leases and retentions. A store whose clock can be moved gives the
fixture `sleep` too (`return clock.advance`). Capabilities it does not offer are skipped by name.
"""

from __future__ import annotations

from semel.testing.contract.batching import BatchingContract
from semel.testing.contract.claims import ClaimContract
from semel.testing.contract.holding import HoldContract
from semel.testing.contract.identities import IdentityContract
from semel.testing.contract.judging import JudgingContract
from semel.testing.contract.marks import MarkContract
from semel.testing.contract.outcomes import OutcomeContract
from semel.testing.contract.ownership import OwnershipContract
from semel.testing.contract.repairing import RepairContract
from semel.testing.contract.replacing import ReplaceContract
from semel.testing.contract.retention import RetentionContract
from semel.testing.contract.scanning import ScanContract
from semel.testing.contract.values import ValueContract

__all__ = ["StoreContract"]


class StoreContract(
    ClaimContract,
    JudgingContract,
    OwnershipContract,
    HoldContract,
    OutcomeContract,
    ReplaceContract,
    RetentionContract,
    MarkContract,
    IdentityContract,
    ValueContract,
    BatchingContract,
    ScanContract,
    RepairContract,
):
    """Everything a store promises, in one suite for both kinds."""
