"""Repair and retention: what became of abandoned attempts, and space for new records.

reconcile     finds what is stuck and asks its resolver     resolve       decides on one record
maintenance   health and purging of a whole store           audit         the audit trail; forget
decisions     what is decided, and where it is logged       results       written, and shown
"""

from semel.repair._sync.audit import AuditTrail, forget
from semel.repair._sync.maintenance import forget_finished, health, purge
from semel.repair._sync.reconcile import Reconciler
from semel.repair._sync.resolve import settle
from semel.repair.audit import AsyncAuditTrail, AuditEntry, forget_async
from semel.repair.decisions import (
    AsyncResolver,
    Audit,
    AuditFile,
    Decision,
    Failed,
    GaveUp,
    Overtaken,
    Resolution,
    Resolved,
    Resolver,
    ResolverFailed,
    Succeeded,
    Unknown,
    Unresolved,
    log_audit,
)
from semel.repair.maintenance import Health, forget_finished_async, health_async, purge_async
from semel.repair.reconcile import AsyncReconciler, Report
from semel.repair.resolve import settle_async
from semel.repair.results import (
    GrpcAnswer,
    HttpAnswer,
    NotKept,
    PlainValue,
    ReadableResult,
    StoredFailure,
    Unreadable,
    read_result,
)

__all__ = [
    "AsyncAuditTrail",
    "AsyncReconciler",
    "AsyncResolver",
    "Audit",
    "AuditEntry",
    "AuditFile",
    "AuditTrail",
    "Decision",
    "Failed",
    "GaveUp",
    "GrpcAnswer",
    "Health",
    "HttpAnswer",
    "NotKept",
    "Overtaken",
    "PlainValue",
    "ReadableResult",
    "Reconciler",
    "Report",
    "Resolution",
    "Resolved",
    "Resolver",
    "ResolverFailed",
    "StoredFailure",
    "Succeeded",
    "Unknown",
    "Unreadable",
    "Unresolved",
    "forget",
    "forget_async",
    "forget_finished",
    "forget_finished_async",
    "health",
    "health_async",
    "log_audit",
    "purge",
    "purge_async",
    "read_result",
    "settle",
    "settle_async",
]
