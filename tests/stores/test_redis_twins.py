"""The sync and the async Redis store are twins: without async and await, one reads like the other."""

from __future__ import annotations

import ast
import inspect

import pytest

from semel.stores.base import AsyncBatching, AsyncScannable, Batching, Scannable
from semel.stores.redis import AsyncRedisStore, RedisStore, aio, store
from semel.stores.redis.aio_cluster import AsyncClusterTransport
from semel.stores.redis.cluster import ClusterTransport
from semel.stores.redis.tasks import AsyncServerTransport
from semel.stores.redis.threads import ServerTransport

RENAMED = {
    "AsyncEar": "Ear",
    "AsyncRedisLine": "RedisLine",
    "AsyncRedisStore": "RedisStore",
    "AsyncRedisWakeups": "RedisWakeups",
    "AsyncTransport": "Transport",
    "AsyncWatch": "Watch",
    "adopt_async": "adopt",
}


class Plain(ast.NodeTransformer):
    def visit_AsyncFunctionDef(self, node):
        return self.visit(ast.FunctionDef(**vars(node)))

    def visit_Await(self, node):
        return self.visit(node.value)

    def visit_Name(self, node):
        return ast.Name(RENAMED.get(node.id, node.id), node.ctx)

    def visit_Subscript(self, node):
        if ast.unparse(node.value) == "Awaitable":  # a plain function that gives what to await
            return self.visit(node.slice)
        return self.generic_visit(node)

    def visit_Constant(self, node):
        text = node.value
        return ast.Constant(
            text.replace("AsyncRedisStore", "RedisStore") if isinstance(text, str) else text
        )


def methods(module, name: str) -> str:
    tree = ast.parse(inspect.getsource(module))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return "\n\n".join(ast.unparse(Plain().visit(node)) for node in found.body[1:])


def test_the_two_stores_have_the_same_methods_with_the_same_text():
    assert methods(aio, "AsyncRedisStore") == methods(store, "RedisStore")


@pytest.mark.parametrize(
    ("plain", "asynchronous"),
    [(ServerTransport, AsyncServerTransport), (ClusterTransport, AsyncClusterTransport)],
)
def test_the_transports_have_the_same_public_methods(plain, asynchronous):
    def public(kind):
        return {
            name
            for name, _ in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert public(plain) == public(asynchronous)


def test_both_stores_offer_batches_and_listings():
    plain, asynchronous = RedisStore.__new__(RedisStore), AsyncRedisStore.__new__(AsyncRedisStore)
    assert isinstance(plain, Batching)
    assert isinstance(plain, Scannable)
    assert isinstance(asynchronous, AsyncBatching)
    assert isinstance(asynchronous, AsyncScannable)
