"""What an interceptor refuses when it is made, or when services are registered on its server."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from adapters.rpc.shop import PAY, SERVICE, WATCH, Shop
from semel import AsyncIdempotency, ConfigError, Idempotency, Policy
from semel.adapters.grpc import (
    AsyncIdempotencyClientInterceptor,
    AsyncIdempotencyInterceptor,
    IdempotencyClientInterceptor,
    IdempotencyInterceptor,
    MethodRule,
)

SERVERS = [IdempotencyInterceptor, AsyncIdempotencyInterceptor]
NOT_FOUND = grpc.StatusCode.NOT_FOUND
CLIENTS = [IdempotencyClientInterceptor, AsyncIdempotencyClientInterceptor]


async def later(_):
    return None


@pytest.mark.parametrize("made", SERVERS)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"metadata": ""}, "metadata"),
        ({"metadata": 7}, "metadata"),
        ({"metadata": "two words"}, "metadata"),
        ({"metadata": "key-bin"}, "metadata"),
        ({"metadata": "grpc-key"}, "metadata"),
        ({"metadata": None}, "both are None"),
        ({"key": "request_id"}, "key"),
        ({"key": later}, "only tenant may be async"),
        ({"tenant": "ann"}, "tenant"),
        ({"payload": 1}, "payload"),
        ({"stored": "all"}, "stored"),
        ({"stored": lambda _: "unkown"}, "not 'unkown', which it returns for CANCELLED"),
        ({"stored": lambda code: code is NOT_FOUND and "yes"}, "not 'yes'"),
        ({"methods": {PAY: MethodRule(stored=lambda _: "no")}}, "not 'no'"),
        ({"secret": "text"}, "secret"),
        ({"policy": {}}, "policy"),
        ({"wait": -1}, "wait"),
        ({"pushback": 0}, "pushback"),
        ({"max_request": -1}, "max_request"),
        ({"max_response": "1 MB"}, "max_response"),
        ({"busy_code": "INTERNAL"}, "busy_code"),
        ({"scope": "two words"}, "scope"),
        ({"nonsense": 1}, "nonsense"),
        ({"methods": [PAY]}, "methods must be a mapping"),
        ({"methods": []}, "methods must be a mapping"),
        ({"methods": {"Pay": MethodRule()}}, "named /package.Service/Method"),
        ({"methods": {PAY: Policy()}}, "must be a MethodRule"),
        ({"methods": {PAY: MethodRule(nonsense=1)}}, "nonsense"),
        ({"methods": {PAY: MethodRule(wait="long")}}, "wait"),
    ],
)
def test_a_bad_option_is_a_config_error_at_once(made, options, told):
    with pytest.raises(ConfigError, match=told):
        made("memory://", **options)


@pytest.mark.parametrize(
    ("made", "engine"),
    [(IdempotencyInterceptor, AsyncIdempotency), (AsyncIdempotencyInterceptor, Idempotency)],
)
def test_an_engine_of_the_other_kind_is_a_config_error(made, engine):
    with pytest.raises(ConfigError, match="or a URL is needed"):
        made(engine("memory://"))


def test_an_async_tenant_needs_asyncio():
    with pytest.raises(ConfigError, match="asyncio"):
        IdempotencyInterceptor("memory://", tenant=later)
    with pytest.raises(ConfigError, match="asyncio"):
        IdempotencyInterceptor("memory://", methods={PAY: MethodRule(tenant=later)})


@pytest.mark.parametrize("made", CLIENTS)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"metadata": "key-bin"}, "metadata"),
        ({"codes": ["UNAVAILABLE"]}, "codes"),
        ({"retries": -1}, "retries"),
        ({"backoff": 0}, "backoff"),
        ({"pushback_max": -1}, "pushback_max"),
        ({"app": "two words"}, "app"),
        ({"header": "Idempotency-Key"}, "header"),
    ],
)
def test_a_bad_option_of_a_client_is_a_config_error_at_once(made, options, told):
    with pytest.raises(ConfigError, match=told):
        made(**options)


# --- before a server starts --------------------------------------------------------------------


class Registry:
    """Stands for a server: services are only registered on it."""

    def __init__(self):
        self.registered, self.generic = {}, []

    def add_registered_method_handlers(self, service, handlers):
        self.registered[service] = handlers

    def add_generic_rpc_handlers(self, handlers):
        self.generic += handlers


@pytest.mark.parametrize("made", SERVERS)
def test_a_stream_whose_key_is_required_is_an_error_before_the_server_starts(made):
    handlers = Shop("threads").handlers()
    generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
    registry = Registry()
    checking = made("memory://", required=True).checking(registry)
    with pytest.raises(ConfigError, match="is a stream"):
        checking.add_registered_method_handlers(SERVICE, handlers)
    with pytest.raises(ConfigError, match="is a stream"):
        checking.add_generic_rpc_handlers((generic,))
    assert (registry.registered, registry.generic) == ({}, [])
    rules = {WATCH: MethodRule(off=True)}
    checking = made("memory://", required=True, methods=rules).checking(registry)
    checking.add_registered_method_handlers(SERVICE, handlers)
    checking.add_generic_rpc_handlers((generic,))
    assert (registry.registered, registry.generic) == ({SERVICE: handlers}, [generic])


def test_a_checked_server_is_a_server_in_every_other_way():
    interceptor = IdempotencyInterceptor("memory://")
    with ThreadPoolExecutor(1) as pool:
        server = interceptor.checking(grpc.server(pool, interceptors=[interceptor]))
        assert server.add_insecure_port("127.0.0.1:0") > 0
        server.start()
        server.stop(None).wait()


def test_endlessly_many_methods_are_not_all_remembered():
    methods = IdempotencyInterceptor("memory://")._methods
    for number in range(1100):
        assert methods.find(f"/test.Any/Method{number}").method == f"/test.Any/Method{number}"
    assert len(methods._known) == 1024


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "semel.adapters.grpc")
    with pytest.raises(ImportError, match=r"pip install 'semel\[grpc\]'"):
        importlib.import_module("semel.adapters.grpc")
