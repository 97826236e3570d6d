"""What a client of a protected gRPC service sees: keys, codes, trailers, replays."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import StringValue

from adapters.rpc.shop import ORDER, PAY, RAW, REFUND, WATCH, Server, Shop, finished
from engines.facade import World, wait_until
from semel import Policy
from semel.adapters.grpc import MethodRule
from semel.adapters.grpc.storing import failed
from semel.core.encryption import EncryptedCodec
from semel.core.records import Encoded, Identity, State
from semel.core.stored_answers import STATUS_CODES, unpack_message
from semel.testing import Refuse

OK = grpc.StatusCode.OK
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def test_a_duplicate_gets_the_stored_bytes_and_the_marker(lasting_shops):
    server, shop, _ = lasting_shops.serve()
    first = server.client.pay("ok", "k1")
    again = server.client.pay("ok", "k1")
    assert first.value == "run 1"
    assert not first.replayed
    assert again.data == first.data
    assert again.replayed
    assert server.client.pay("ok", "k2").value == "run 2"
    assert shop.runs == ["ok", "ok"]


def test_two_servers_on_one_store_know_of_each_other(lasting_shops):
    one, shop_one, _ = lasting_shops.serve()
    two, shop_two, _ = lasting_shops.serve()
    first = one.client.pay("ok", "k")
    assert two.client.pay("ok", "k") == first._replace(trailers={"idempotent-replayed": "true"})
    held = one.client.start(PAY, "hold", "held")
    shop_one.wait_held()
    busy = two.client.pay("hold", "held")
    assert (busy.code, busy.status) == (UNAVAILABLE, "concurrent-request")
    shop_one.release()
    assert finished(held).value == "run 2"
    assert two.client.pay("hold", "held").value == "run 2"
    assert shop_two.runs == []


# --- the key ---------------------------------------------------------------------------------


def test_a_call_without_a_key_passes_through(serve):
    server, shop, engine = serve()
    assert [server.client.pay("ok").value for _ in range(2)] == ["run 1", "run 2"]
    assert engine.commands() == 0
    assert len(shop.runs) == 2


def test_a_missing_key_is_refused_when_it_is_required(serve):
    server, shop, _ = serve(required=True)
    refused = server.client.pay("ok")
    assert (refused.code, refused.status) == (INVALID, "key-missing")
    assert refused.instance is None, "it is about no record"
    assert refused.initial == {}
    assert refused.pushback is None
    assert shop.runs == []


@pytest.mark.parametrize("key", ["", '""', "x" * 256, "two words", "one,two", '"open', r'"\x"'])
def test_a_malformed_key_is_refused_and_never_repeated(serve, key):
    server, shop, engine = serve()
    refused = server.client.pay("ok", key)
    assert (refused.code, refused.status) == (INVALID, "invalid-key")
    assert "words" not in refused.details
    assert engine.commands() == 0
    assert shop.runs == []


def test_a_key_of_a_megabyte_is_refused_by_the_transport(serve):
    server, shop, _ = serve()
    assert server.client.pay("ok", "x" * 1_000_000).code is not OK
    assert shop.runs == []


def test_a_repeated_key_is_refused(serve):
    server, shop, _ = serve()
    refused = server.client.pay("ok", "k", "k")
    assert (refused.code, refused.status) == (INVALID, "invalid-key")
    assert shop.runs == []


def test_a_quoted_key_is_the_same_key(serve):
    server, _, _ = serve()
    server.client.pay("ok", "k")
    assert server.client.pay("ok", '"k"').replayed


def test_the_metadatum_can_have_another_name(serve):
    server, _, _ = serve(metadata="X-Idem-Key")
    own = (("x-idem-key", "k"),)
    server.client.pay("ok", metadata=own)
    assert server.client.pay("ok", metadata=own).replayed
    assert server.client.pay("ok", "k").value == "run 2"


def test_a_key_can_come_from_the_request(serve):
    server, shop, _ = serve(metadata=None, key=lambda request: request.value.partition(" ")[2])
    assert server.client.pay("ok id-1").value == "run 1"
    assert server.client.pay("ok id-1").replayed
    assert server.client.pay("ok").value == "run 2"  # a request_id that was not set is empty
    assert server.client.pay("abort INTERNAL").code is grpc.StatusCode.INTERNAL
    refused = server.client.pay("ok \N{SNOWMAN}")
    assert (refused.code, refused.status) == (INVALID, "invalid-key")
    assert len(shop.runs) == 3


def test_a_function_of_the_request_may_find_no_key(serve):
    server, _, _ = serve(key=lambda _: None)
    unprotected = server.client.pay("abort INTERNAL no key")
    assert (unprotected.code, unprotected.details) == (grpc.StatusCode.INTERNAL, "no key")
    assert server.client.pay("raise oh").code is grpc.StatusCode.UNKNOWN
    assert server.client.pay("ok").value == "run 3"
    assert server.client.pay("ok", "k").value == "run 4"  # metadata goes first
    assert server.client.pay("ok", "k").replayed


def test_the_engine_s_pattern_of_keys_holds(serve):
    server, shop, _ = serve(engine={"key_pattern": "order-[0-9]+"})
    assert server.client.pay("ok", "order-1").value == "run 1"
    assert server.client.pay("ok", "other").code is INVALID
    assert len(shop.runs) == 1


# --- other payloads, other methods -------------------------------------------------------------


def test_another_payload_is_refused_while_the_first_runs_and_after(serve):
    server, shop, _ = serve()
    held = server.client.start(PAY, "hold", "k")
    shop.wait_held()
    during = server.client.pay("ok", "k")
    shop.release()
    assert finished(held).value == "run 1"
    after = server.client.pay("ok", "k")
    for refused in (during, after):
        assert (refused.code, refused.status) == (PRECONDITION, "payload-mismatch")
        assert refused.instance == f"urn:semel:key:{Identity('grpc', 'k').key_digest}"
    assert shop.runs == ["hold"]
    assert server.client.pay("hold", "k").replayed


def test_the_same_key_on_another_method_is_another_payload(serve):
    server, _, _ = serve()
    server.client.pay("ok", "k")
    assert server.client.call(REFUND, "ok", "k").code is PRECONDITION


def test_methods_can_have_keys_of_their_own(serve):
    server, _, _ = serve(separate_methods=True)
    server.client.pay("ok", "k")
    assert server.client.call(REFUND, "ok", "k").value == "run 2"
    assert server.client.call(REFUND, "ok", "k").replayed


def test_the_order_of_a_map_s_entries_does_not_count(serve):
    server, shop, _ = serve()
    one, other = Struct(), Struct()
    names = [f"name-{number}" for number in range(20)]
    one.update(dict.fromkeys(names, 1.0))
    other.update(dict.fromkeys(reversed(names), 1.0))
    first = server.client.call(ORDER, one, "k")
    again = server.client.call(ORDER, other, "k")
    assert again.replayed
    assert again.data == first.data
    assert shop.runs == ["order"]


def test_a_chosen_payload_is_all_that_is_compared(serve):
    server, _, _ = serve(payload=lambda request: len(request.value), secret=b"pepper")
    server.client.pay("ok a", "k")
    assert server.client.pay("ok b", "k").replayed
    assert server.client.pay("ok abc", "k").code is PRECONDITION


# --- running elsewhere ---------------------------------------------------------------------------


def test_a_running_call_is_unavailable_with_a_pushback(serve):
    server, shop, _ = serve()
    held = server.client.start(PAY, "hold", "k")
    shop.wait_held()
    busy = server.client.pay("hold", "k")
    assert (busy.code, busy.status, busy.pushback) == (UNAVAILABLE, "concurrent-request", "1000")
    assert busy.initial == {}
    shop.release()
    assert finished(held).value == "run 1"


def test_a_running_call_can_be_aborted_instead(serve):
    server, shop, _ = serve(busy_code="ABORTED", pushback=0.25)
    held = server.client.start(PAY, "hold", "k")
    shop.wait_held()
    busy = server.client.pay("hold", "k")
    assert (busy.code, busy.pushback) == (grpc.StatusCode.ABORTED, "250")
    shop.release()
    assert finished(held).value == "run 1"


def test_a_duplicate_can_wait_for_the_result(serve):
    server, shop, engine = serve(wait=60)
    held = server.client.start(PAY, "hold", "k")
    shop.wait_held()
    waiting = server.client.start(PAY, "hold", "k")
    wait_until(engine.sharers)
    shop.release()
    assert finished(held).value == "run 1"
    assert finished(waiting).replayed
    assert len(shop.runs) == 1


def test_a_duplicate_that_waited_in_vain_is_told_to_come_back(serve):
    server, shop, _ = serve(wait=0.05)
    held = server.client.start(PAY, "hold", "k")
    shop.wait_held()
    late = server.client.pay("hold", "k")
    assert (late.code, late.status, late.pushback) == (UNAVAILABLE, "wait-timeout", "1000")
    shop.release()
    assert finished(held).value == "run 1"


def test_guard_mode_rejects_duplicates_with_its_message(serve):
    policy = Policy(duplicate="reject", message="it is paid already")
    server, _, _ = serve(policy=policy)
    server.client.pay("ok", "k")
    rejected = server.client.pay("ok", "k")
    assert (rejected.code, rejected.details) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "it is paid already",
    )


# --- what is stored ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "code", "details"),
    [
        ("abort NOT_FOUND no such order", "NOT_FOUND", "no such order"),
        ("abort INTERNAL broken", "INTERNAL", "broken"),
        ("status NOT_FOUND", "NOT_FOUND", "by status"),
        ("swallow NOT_FOUND gone", "NOT_FOUND", "gone"),
        ("set_code NOT_FOUND", "NOT_FOUND", "set, not aborted"),
        ("set_nonsense", "UNKNOWN", ""),
    ],
)
def test_a_code_other_than_ok_is_delivered_and_not_stored(serve, order, code, details):
    server, shop, _ = serve()
    for _ in range(2):
        failed = server.client.pay(order, "k")
        assert (failed.code.name, failed.details) == (code, details)
        assert not failed.replayed
    assert shop.runs == [order, order]


def test_an_abort_with_ok_is_no_success(serve):
    server, shop, _ = serve(stored=None)  # None: as if it were left out
    for _ in range(2):
        assert server.client.pay("abort OK fine", "k").code is grpc.StatusCode.UNKNOWN
    assert len(shop.runs) == 2


@pytest.mark.parametrize("order", ["raise oh", "set_code_and_raise NOT_FOUND"])
def test_a_handler_that_raises_leaves_its_key_free(serve, order):
    server, _, _ = serve()
    assert server.client.pay(order, "k").code is not OK
    assert server.client.pay("ok", "k").value == "run 2"


def test_codes_are_stored_with_their_details_on_request(serve):
    server, shop, _ = serve(stored=lambda code: code is grpc.StatusCode.NOT_FOUND)
    for order in ("abort NOT_FOUND no such order", "set_code NOT_FOUND"):
        first, again = (server.client.pay(order, order.split()[0]) for _ in range(2))
        assert again.code is first.code is grpc.StatusCode.NOT_FOUND
        assert again.details == first.details
        assert again.replayed
        assert not first.replayed
    assert len(shop.runs) == 2
    assert server.client.pay("ok", "k").value == "run 3"
    assert server.client.pay("abort INTERNAL", "k2").code is grpc.StatusCode.INTERNAL
    assert server.client.pay("ok", "k2").value == "run 5"


@pytest.mark.parametrize("number", [0, 5, 99])
def test_a_code_that_is_a_number_is_replayed_as_it_was_sent(serve, number):
    """The server on threads sends any number as UNKNOWN, the one on asyncio as the code it is."""
    server, shop, _ = serve(stored=lambda _: True)
    first, again = (server.client.pay(f"set_number {number}", "k") for _ in range(2))
    assert (again.code, again.data, again.details) == (first.code, first.data, first.details)
    assert again.replayed
    assert len(shop.runs) == 1


@pytest.mark.parametrize(
    ("details", "kept"),
    [("caf\udcff", "caf?"), (b"caf\xff", "caf\ufffd"), (None, ""), ("ok", "ok")],
)
def test_details_that_are_no_text_never_leave_a_key_without_an_end(details, kept):
    trailers = [("grpc-status-details-bin", "no bytes")]
    stored = unpack_message(failed(grpc.StatusCode.NOT_FOUND, details, trailers, lambda code: True))
    assert (stored.details, stored.status_details) == (kept, None)


def test_the_codes_are_known_by_their_numbers_without_grpc():
    assert {code.value[0]: code.name for code in grpc.StatusCode} == dict(enumerate(STATUS_CODES))


def test_the_richer_status_of_a_stored_error_is_replayed_and_no_other_trailer(serve):
    server, _, _ = serve(stored=lambda _: True)
    first, again = (server.client.pay("abort_with_trailers NOT_FOUND", "k") for _ in range(2))
    assert first.trailers == {"x-own": "1", "grpc-status-details-bin": b"\x08\x05"}
    assert again.trailers == {
        "idempotent-replayed": "true",
        "grpc-status-details-bin": b"\x08\x05",
    }


@pytest.mark.parametrize("code", ["PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE"])
def test_what_tells_of_the_caller_or_the_moment_is_never_stored(serve, code):
    server, shop, _ = serve(stored=lambda _: True)
    for _ in range(2):
        assert not server.client.pay(f"abort {code}", "k").replayed
    assert len(shop.runs) == 2


def test_a_code_can_mean_that_nobody_knows(serve):
    server, shop, _ = serve(stored=lambda _: "unknown", policy=Policy(abandoned="hold"))
    assert server.client.pay("abort INTERNAL", "k").code is grpc.StatusCode.INTERNAL
    held = server.client.pay("abort INTERNAL", "k")
    assert (held.code, held.status) == (grpc.StatusCode.ABORTED, "outcome-unknown")
    assert held.pushback == "-1"  # clients must not try that again
    assert len(shop.runs) == 1


def test_a_wrong_word_of_a_function_that_changes_its_mind_stores_nothing(serve, caplog):
    words = [False]
    server, shop, _ = serve(stored=lambda _: words[0])
    words[0] = "unkown"
    for _ in range(2):
        assert server.client.pay("abort NOT_FOUND", "k").code is grpc.StatusCode.NOT_FOUND
    assert len(shop.runs) == 2
    assert "stored must return True, False or 'unknown', not 'unkown'" in caplog.text


def test_a_function_of_the_code_that_raises_stores_nothing(serve, caplog):
    server, shop, _ = serve(stored=lambda _: 1 / 0)
    for _ in range(2):
        assert server.client.pay("abort NOT_FOUND", "k").code is grpc.StatusCode.NOT_FOUND
    assert len(shop.runs) == 2
    assert "stored= raised for code" in caplog.text


@pytest.mark.parametrize(
    ("order", "status"),
    [
        ("abort INVALID_ARGUMENT bad", None),  # refused: nothing was done
        ("abort INTERNAL broken", "outcome-unknown"),
        ("raise oh", "outcome-unknown"),
    ],
)
def test_under_hold_only_a_refusal_frees_the_key(serve, order, status):
    server, _, _ = serve(policy=Policy(abandoned="hold"))
    server.client.pay(order, "k")
    assert server.client.pay(order, "k").status == status


def test_a_failure_for_good_is_answered_for_good(serve):
    server, shop, _ = serve(policy=Policy(failure="final"))
    server.client.pay("raise oh", "k")
    again = server.client.pay("raise oh", "k")
    assert (again.code, again.status) == (PRECONDITION, "previous-failure")
    assert "oh" not in again.details
    assert len(shop.runs) == 1


def test_a_response_too_large_to_be_kept_is_delivered_once_and_never_run_again(serve):
    server, shop, _ = serve(max_response=100)
    assert len(server.client.pay("big 1000", "k").value) == 1000
    again = server.client.pay("big 1000", "k")
    assert (again.code, again.status) == (PRECONDITION, "result-omitted")
    assert again.instance == f"urn:semel:key:{Identity('grpc', 'k').key_digest}"
    assert len(shop.runs) == 1
    assert server.client.pay("big 50", "small").value == "x" * 50
    assert server.client.pay("big 50", "small").replayed


def test_a_request_too_large_is_refused_before_the_claim(serve):
    server, shop, engine = serve(max_request=100)
    refused = server.client.pay("ok " + "x" * 100, "k")
    assert (refused.code, refused.status) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "body-too-large",
    )
    assert engine.commands() == 0
    assert shop.runs == []
    assert server.client.pay("ok", "k").value == "run 1"


def test_a_value_that_is_no_protobuf_message_passes_through_and_says_so(serve):
    server, _, _ = serve()
    one, two = (server.client.call(RAW, b"bytes", "k") for _ in range(2))
    assert (one.data, two.data) == (b"1:bytes", b"2:bytes")
    assert one.status == two.status == "not-stored"


def test_a_response_that_cannot_be_serialized_never_runs_again(serve, caplog):
    server, shop, _ = serve()
    assert server.client.pay("unserializable", "k").code is not OK
    again = server.client.pay("unserializable", "k")
    assert (again.code, again.status) == (PRECONDITION, "result-omitted")
    assert len(shop.runs) == 1
    assert "cannot be serialized" in caplog.text


def test_a_marker_that_a_handler_or_a_client_sends_means_nothing(serve):
    server, _, _ = serve()
    spoofed = (("idempotent-replayed", "true"),)
    first = server.client.pay("trailers", "k", metadata=spoofed)
    assert first.trailers == {"x-own": "1"}
    assert server.client.pay("trailers", "k").trailers == {"idempotent-replayed": "true"}


def test_no_metadata_is_stored(serve):
    server, _, engine = serve()
    secret = (("authorization", "Bearer sesame"), ("x-own", "sesame"))
    assert server.client.pay("trailers", "k", metadata=secret).trailers == {"x-own": "1"}
    record = engine.peek("k", scope="grpc")
    assert b"with trailers" in record.outcome.data
    assert b"sesame" not in record.outcome.data
    assert b"x-own" not in record.outcome.data


def test_initial_metadata_and_callbacks_of_a_handler_work_as_without_protection(serve):
    server, shop, _ = serve()
    assert server.client.pay("initial", "k1").initial == {"x-early": "1"}
    assert server.client.pay("callback", "k2").value == "later"
    wait_until(lambda: shop.seen == ["called back"])


def test_a_handler_derives_keys_from_its_attempt(serve):
    server, _, engine = serve()
    derived = server.client.pay("derive charge", "k").value
    assert derived.startswith("charge-")
    engine.forget("k", scope="grpc")
    assert server.client.pay("derive charge", "k").value == derived


# --- the store -------------------------------------------------------------------------------------


def test_a_store_that_is_down_before_the_claim_runs_nothing(serve, caplog):
    server, shop, engine = serve()
    engine.store.inject("claim", Refuse())
    refused = server.client.pay("ok", "k")
    assert (refused.code, refused.status, refused.pushback) == (UNAVAILABLE, "store-error", "1000")
    assert shop.runs == []
    assert "a call with a key was not processed: " in caplog.text
    assert "Traceback" not in caplog.text
    assert server.client.pay("ok", "k").value == "run 1"


def test_a_store_that_is_down_lets_calls_through_only_on_request(serve):
    server, _, engine = serve(policy=Policy(store_error="open"))
    engine.store.inject("claim", Refuse())
    assert server.client.pay("ok", "k").value == "run 1"


def test_a_store_that_is_down_at_the_save_does_not_keep_the_answer_back(serve):
    server, _, engine = serve()
    engine.store.inject("complete", Refuse())
    assert server.client.pay("ok", "k").value == "run 1"
    assert engine.store.fired("complete") == 1
    assert server.client.pay("ok", "k").replayed


GARBAGE = {
    "pickle": Encoded("grpc/1", b"\x80\x04\x95\x0b\x00\x00\x00"),
    "nothing": Encoded("grpc/1", b""),
    "another format": Encoded("grpc/1", b"\x95\x63\x00\xa0\xc4\x00\xc0"),
    "no such code": Encoded("grpc/1", b"\x95\x01\x63\xa0\xc4\x00\xc0"),
    "another codec's value": Encoded("json", b'"a text"'),
    "an unknown codec": Encoded("pickle/5", b"\x80\x04."),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_in_the_store_is_a_typed_error_and_runs_nothing(serve, garbage):
    server, shop, engine = serve()
    engine.ask_store("put", Identity("grpc", "k"), garbage, 60.0, owner=b"somebody" + bytes(4))
    refused = server.client.pay("ok", "k")
    assert (refused.status, refused.code) == ("result-unavailable", PRECONDITION)
    assert refused.instance == f"urn:semel:key:{Identity('grpc', 'k').key_digest}"
    assert shop.runs == []


def test_with_encryption_the_body_is_not_in_the_store(serve, kind):
    codec = EncryptedCodec(keys={"1": b"k" * 32}, primary="1")
    server, _, engine = serve(engine={"policy": Policy(codec=codec)})
    first = server.client.pay("big 64", "k")
    record = engine.peek("k", scope="grpc")
    assert b"xxxxxxxx" not in record.outcome.data
    assert server.client.pay("big 64", "k").data == first.data


def test_another_attempt_s_answer_counts_when_the_lease_was_lost(serve):
    server, shop, engine = serve()
    held = server.client.start(PAY, "hold", "k")
    shop.wait_held()
    engine.forget("k", scope="grpc")
    shop.release()
    lost = finished(held)
    assert (lost.code, lost.status, lost.pushback) == (
        grpc.StatusCode.ABORTED,
        "lease-lost",
        "1000",
    )


def test_a_stored_error_is_delivered_even_if_it_came_too_late_to_be_stored(serve):
    server, shop, engine = serve(stored=lambda _: True)
    held = server.client.start(PAY, "hold abort NOT_FOUND gone", "k")
    shop.wait_held()
    engine.forget("k", scope="grpc")
    shop.release()
    assert finished(held).code is grpc.StatusCode.NOT_FOUND
    assert engine.peek("k", scope="grpc") is None


# --- whose key ---------------------------------------------------------------------------------------


def tenant_of(view):
    assert view.method == PAY
    assert view.context.peer().startswith("ipv4:127.0.0.1")
    return view.metadata.get("x-tenant")


async def tenant_later(view):
    return tenant_of(view)


@pytest.fixture
def tenant(kind):
    """On asyncio the function may be async, or not."""
    return tenant_later if kind == "asyncio" else tenant_of


def test_tenants_never_get_each_other_s_answers(serve, tenant):
    server, _, _ = serve(tenant=tenant)

    def pay(name, key):
        return server.client.pay("ok", key, metadata=(("x-tenant", name),))

    assert pay("ann", "k").value == "run 1"
    assert pay("bob", "k").value == "run 2"
    assert pay("ann", "k").replayed
    assert pay("a/b", "c").value == "run 3"
    assert pay("a", "b/c").value == "run 4"  # a delimiter brings nobody together


def test_a_caller_without_an_identity_is_refused(serve, tenant):
    server, shop, _ = serve(tenant=tenant)
    for metadata in ((), (("x-tenant", ""),)):
        refused = server.client.pay("ok", "k", metadata=metadata)
        assert (refused.code, refused.status) == (
            grpc.StatusCode.UNAUTHENTICATED,
            "identity-missing",
        )
    assert shop.runs == []


def test_a_tenant_that_is_no_text_is_the_application_s_mistake(serve, caplog):
    server, shop, _ = serve(tenant=lambda _: 7)
    assert server.client.pay("ok", "k").code is grpc.StatusCode.INTERNAL
    assert shop.runs == []
    assert "tenant must return a string" in caplog.text


def denying(allowed):
    """An interceptor of either kind that answers everybody else with PERMISSION_DENIED."""

    def wanted(details):
        return dict(details.invocation_metadata).get("x-user") in allowed

    def deny(_, context):
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")

    async def deny_later(_, context):
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")

    class Denying(grpc.ServerInterceptor):
        def intercept_service(self, continuation, details):
            return continuation(details) if wanted(details) else refusal(deny)

    class AsyncDenying(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            return await continuation(details) if wanted(details) else refusal(deny_later)

    return Denying(), AsyncDenying()


def refusal(behaviour):
    return grpc.unary_unary_rpc_method_handler(behaviour)


def test_authorization_that_comes_before_holds_for_replays(serve, kind):
    allowed = {"ann"}
    threads, tasks = denying(allowed)
    server, _, engine = serve(before=[threads if kind == "threads" else tasks])
    ann = (("x-user", "ann"),)
    assert server.client.pay("ok", "k").code is grpc.StatusCode.PERMISSION_DENIED
    assert engine.commands() == 0  # a refused call leaves nothing behind
    assert server.client.pay("ok", "k", metadata=ann).value == "run 1"
    assert server.client.pay("ok", "k", metadata=ann).replayed
    allowed.clear()
    assert server.client.pay("ok", "k", metadata=ann).code is grpc.StatusCode.PERMISSION_DENIED


# --- methods ---------------------------------------------------------------------------------------------


def test_methods_can_have_rules_of_their_own(serve):
    rules = {
        PAY: MethodRule(required=True),
        REFUND: MethodRule(off=True),
        "/test.Shop/*": MethodRule(policy=Policy(duplicate="reject")),
    }
    server, _, _ = serve(methods=rules)
    assert server.client.pay("ok").code is INVALID
    assert server.client.call(REFUND, "ok", "k").value == "run 1"
    assert server.client.call(REFUND, "ok", "k").value == "run 2"
    assert server.client.call(ORDER, Struct(), "k").code is OK
    assert server.client.call(ORDER, Struct(), "k").code is grpc.StatusCode.ALREADY_EXISTS


def test_a_method_that_does_not_exist_is_unimplemented(serve):
    server, _, _ = serve(required=True)
    assert server.client.call("/test.Shop/None", "ok", "k").code is (grpc.StatusCode.UNIMPLEMENTED)


def watch(server, *keys):
    stream = server.client.channel.unary_stream(WATCH)
    lines = tuple(("idempotency-key", key) for key in keys)
    events = stream(StringValue(value="ok").SerializeToString(), metadata=lines, timeout=60)
    return [StringValue.FromString(event).value for event in events]


def test_streams_pass_through(serve):
    server, _, engine = serve()
    assert watch(server, "k") == ["event 1"]
    assert watch(server, "k") == ["event 2"]
    assert engine.commands() == 0


def test_a_stream_whose_key_is_required_is_an_error_and_can_be_let_pass(serve, caplog):
    server, shop, _ = serve(required=True)
    with pytest.raises(grpc.RpcError) as caught:
        watch(server, "k")
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert "is a stream" in caplog.text
    assert shop.runs == []
    passing, _, _ = serve(required=True, methods={WATCH: MethodRule(off=True)})
    assert watch(passing) == ["event 1"]


def test_a_finished_record_is_an_ordinary_one(serve):
    server, _, engine = serve(scope="payments")
    server.client.pay("ok", "k")
    assert engine.peek("k", scope="payments").state is State.SUCCEEDED


def test_a_handler_s_own_threads_are_used():
    own = ThreadPoolExecutor(1, "own")

    class WithThreads(Shop):
        def _made(self, behaviour):
            handler = super()._made(behaviour)
            handler.experimental_thread_pool = own
            return handler

        async def _ok(self, rest, context):
            self.seen.append(threading.current_thread().name)
            return await super()._ok(rest, context)

    shop = WithThreads("threads")
    with (
        World("threads", "memory://") as world,
        own,
        Server(world, shop, world.engine().engine) as server,
    ):
        assert server.client.pay("ok", "k").value == "run 1"
    assert shop.seen == ["own_0"]
