"""The contract every store keeps, as tests: subclass it, give it a store, run pytest.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            return MyStore()        # empty; a Store or an AsyncStore; closed by the contract

The suite waits for short leases and retentions. A store whose clock can be moved gives the
fixture `sleep` too (`return clock.advance`). `set_clock_back` and `make_unreadable` are for tests
that reach past the store's verbs. What a store does not offer is skipped by name.
"""

from __future__ import annotations

from semel.testing.contract.batches import BatchingContract
from semel.testing.contract.claims import ClaimContract, JudgingContract, ReplaceContract
from semel.testing.contract.operators import RepairContract, ScanContract
from semel.testing.contract.ownership import HoldContract, OutcomeContract, OwnershipContract
from semel.testing.contract.records import (
    IdentityContract,
    MarkContract,
    RetentionContract,
    ValueContract,
)
from semel.testing.contract.run_info import RunInfoContract

__all__ = ["StoreContract"]


class StoreContract(
    ClaimContract,
    JudgingContract,
    OwnershipContract,
    HoldContract,
    OutcomeContract,
    RunInfoContract,
    ReplaceContract,
    RetentionContract,
    MarkContract,
    IdentityContract,
    ValueContract,
    BatchingContract,
    ScanContract,
    RepairContract,
):
    """Tests everything that a store promises, in one suite for both kinds."""
