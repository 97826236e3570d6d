"""Repair and retention: what became of abandoned attempts, and space for new records.

reconcile     finds what is stuck and asks its resolver     resolve       decides on one record
maintenance   health and purging of a whole store           decisions     what is decided, and audit
"""

from semel.repair._sync.maintenance import health, purge
from semel.repair._sync.reconcile import Reconciler
from semel.repair._sync.resolve import settle
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
from semel.repair.maintenance import Health, health_async, purge_async
from semel.repair.reconcile import AsyncReconciler, Report
from semel.repair.resolve import settle_async

__all__ = [
    "AsyncReconciler",
    "AsyncResolver",
    "Audit",
    "AuditFile",
    "Decision",
    "Failed",
    "GaveUp",
    "Health",
    "Overtaken",
    "Reconciler",
    "Report",
    "Resolution",
    "Resolved",
    "Resolver",
    "ResolverFailed",
    "Succeeded",
    "Unknown",
    "Unresolved",
    "health",
    "health_async",
    "log_audit",
    "purge",
    "purge_async",
    "settle",
    "settle_async",
]
