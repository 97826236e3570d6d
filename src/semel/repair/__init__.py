"""Repair and retention: what became of abandoned attempts, and room for new records.

outcomes      what a resolver may say           decisions   the events of it
reconciler    finds and resolves, in a thread   aio         the same in a task
settling      a person decides                  audit       who decided what
health        what is stuck, and since when     retention   purging in small batches
"""

from semel.repair.aio import AsyncReconciler
from semel.repair.casework import Report
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
from semel.repair.health import Health, health, health_async
from semel.repair.reconciler import Reconciler
from semel.repair.retention import purge, purge_async
from semel.repair.settling import settle, settle_async

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
