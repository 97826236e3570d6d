from __future__ import annotations

import re

import pytest

from http_rules.given import a_request, as_an_engine
from semel.errors import ConfigError
from semel.http import Route
from semel.http.options import chosen, path_matcher
from semel.http.rules import Rejected, Routing


async def an_async_function(request):
    return "ann"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"header": "no header"}, "header"),
        ({"header": 5}, "header"),
        ({"header": None}, "all of them are None"),
        ({"query": ""}, "query"),
        ({"field": 5}, "field"),
        ({"key": "x"}, "key must be a function"),
        ({"key": an_async_function}, "only tenant may be async"),
        ({"stored": an_async_function}, "only tenant may be async"),
        ({"order": ("header",)}, "order"),
        ({"order": "header"}, "order must be a sequence"),
        ({"methods": ("POST", "GET")}, "GET"),
        ({"methods": "POST"}, "methods must be a sequence"),
        ({"tenant": "ann"}, "tenant"),
        ({"payload": []}, "payload"),
        ({"payload": "amount"}, "payload must be a sequence"),
        ({"payload": [5]}, "payload"),
        ({"format": "xml"}, "format must be one of json, form"),
        ({"format": ["json"]}, "format"),
        ({"secret": "text"}, "secret"),
        ({"secret": b""}, "secret"),
        ({"policy": "payment"}, "policy"),
        ({"scope": "s" * 1000}, "scope"),
        ({"scope": None}, "scope"),
        ({"required": "no"}, "required"),
        ({"strict": 1}, "strict"),
        ({"separate_routes": None}, "separate_routes"),
        ({"wait": -1}, "wait"),
        ({"never_stored": ["no header"]}, "never_stored"),
        ({"replayed_header": ""}, "replayed_header"),
        ({"max_body": -1}, "max_body"),
        ({"max_response": True}, "max_response"),
        ({"retry_after": 0}, "retry_after"),
        ({"problems": {"x": {}}}, "'x'"),
        ({"problems": 5}, "problems must be a mapping"),
        ({"problems": {"concurrent_request": "busy"}}, "problems must be a mapping"),
        ({"reqiured": True}, "no option 'reqiured'"),
    ],
)
def test_a_bad_option_is_named_when_the_integration_is_made(options, named):
    with pytest.raises(ConfigError, match=named):
        chosen(options)


def test_a_tenant_may_be_async():
    assert chosen({"tenant": an_async_function}).tenant is an_async_function


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("/pay", "/pay", True),
        ("/pay", "/pay/1", False),
        ("/pay/*", "/pay/1/2", True),
        ("*/refund", "/pay/1/refund", True),
        ("/a.b", "/axb", False),
        ("/a*b*c", "/abc", True),
        ("/a*b*c", "/a--b--c", True),
        ("/a*b*c", "/a--c--b", False),
        ("/a*b*b", "/ab", False),
        ("/ab*ba", "/aba", False),
        ("/a*", "/a\n/b", True),
        ("/a**b", "/ab", True),
        ("*", "", True),
        (re.compile(r"/\d+"), "/12", True),
        (re.compile(r"/\d+"), "/12x", False),
    ],
)
def test_a_pattern_is_asked_of_the_whole_path(pattern, path, matches):
    assert bool(path_matcher(pattern)(path)) is matches


class Counting(str):
    """A path that counts how far it is searched through."""

    __slots__ = ("searched",)

    def find(self, *args):
        found = super().find(*args)
        self.searched += (found if found >= 0 else args[2]) - args[1]
        return found


@pytest.mark.parametrize("stars", [2, 5, 20])
def test_no_part_of_a_path_is_searched_twice_for_a_pattern_with_many_stars(stars):
    path = Counting("/a/" * 5000)
    path.searched = 0
    assert not path_matcher("/a*" * stars + "b*/")(path)
    assert path.searched <= len(path)


@pytest.mark.parametrize("pattern", ["pay", "", 5, None])
def test_a_pattern_that_could_match_nothing_is_refused(pattern):
    with pytest.raises(ConfigError, match="path pattern"):
        path_matcher(pattern)


def routing(**options):
    return Routing(resolved=as_an_engine, **options)


def test_post_and_patch_are_ours_and_others_on_request():
    plain = routing()
    assert plain.find("POST", "/") is plain.find("PATCH", "/x")
    assert plain.find("PUT", "/") is None
    assert plain.find("GET", "/") is None
    assert routing(methods=("put",)).find("PUT", "/") is not None


def test_paths_are_taken_in_and_left_out():
    some = routing(include=["/api/*"], exclude=["/api/login"])
    assert some.find("POST", "/api/pay") is not None
    assert some.find("POST", "/api/login") is None
    assert some.find("POST", "/other") is None


def test_a_route_has_options_of_its_own_and_the_first_that_matches_counts():
    some = routing(
        required=True,
        routes=[
            Route("/coupons/*", required=False, methods=("PUT",)),
            Route("/p*", wait=1),
        ],
    )
    assert not some.find("PUT", "/coupons/1").choices.required
    assert some.find("POST", "/coupons/1") is None
    assert some.find("POST", "/pay").choices.wait == 1
    assert some.find("POST", "/pay").choices.required
    assert some.find("POST", "/other").choices.wait == 0


CONTROL = ["/pay\n", "/\x00pay", "/pay\r\n", "/p\x7fay", "/pay\x85"]


@pytest.mark.parametrize("path", CONTROL)
@pytest.mark.parametrize(
    "options", [{"include": ["/pay"]}, {"exclude": ["/other"]}, {"routes": [Route("/pay")]}]
)
def test_a_path_with_control_characters_is_rejected_where_paths_are_chosen(options, path):
    """Routers whose patterns end with `$` take `/pay` and a new line for `/pay`."""
    some = routing(**options)
    rules = some.find("POST", path)
    assert rules.may_have_key(a_request(path=path))
    with pytest.raises(Rejected, match="invalid_path"):
        rules.identify(a_request(path=path))
    assert some.find("GET", path) is None
    assert some.find("PUT", path) is None


@pytest.mark.parametrize("path", CONTROL)
def test_where_all_paths_are_protected_one_with_control_characters_is_a_path_like_any_other(path):
    plain = routing()
    assert plain.find("POST", path) is plain.find("POST", "/pay")


SPELLINGS = ["/pay/", "//pay", "/pay//", "pay", "///pay///"]


@pytest.mark.parametrize("path", [*SPELLINGS, "/pay"])
@pytest.mark.parametrize("pattern", ["/pay", "/pay/", re.compile("/pay")])
def test_other_slashes_do_not_lead_past_a_pattern(path, pattern):
    assert routing(include=[pattern]).find("POST", path) is not None
    assert routing(routes=[Route(pattern, wait=1)]).find("POST", path).choices.wait == 1
    assert routing(include=[pattern]).find("POST", "/other") is None


@pytest.mark.parametrize("path", SPELLINGS)
def test_other_slashes_do_not_lead_past_protection_by_an_exclusion(path):
    assert routing(exclude=["/pay"]).find("POST", path) is not None


def test_a_route_that_names_a_path_with_its_slashes_goes_before_one_that_does_not():
    some = routing(routes=[Route("/pay", wait=1), Route("/pay/", wait=2), Route("/*//*", wait=3)])
    waits = {
        path: some.find("POST", path).choices.wait for path in ("/pay", "/pay/", "//pay", "/a//b")
    }
    assert waits == {"/pay": 1, "/pay/": 2, "//pay": 1, "/a//b": 3}


@pytest.mark.parametrize("path", ["/v1pay", "/x/v1/pay", "//v1/pay", "/v1//pay", "/x/v1pay/"])
@pytest.mark.parametrize("root", ["/v1", "/v1/"])
def test_a_path_that_begins_where_the_root_ends_does_not_lead_past_a_pattern(path, root):
    """Litestar and gunicorn cut a path there, wherever in it the root stands."""
    if root in path:
        assert routing(include=["/pay"]).find("POST", path, root) is not None
    assert routing(exclude=["/pay"]).find("POST", path, root) is not None


MOUNTED = [("/api/pay", "/api"), ("/api/pay", "/api/"), ("/pay", "/api")]
"""The same request, as servers tell it whose root path is /api."""


@pytest.mark.parametrize(("path", "root"), MOUNTED)
@pytest.mark.parametrize("pattern", ["/pay", "/api/pay", re.compile(r"/(api/)?pay")])
def test_patterns_match_with_and_without_the_root_path(path, root, pattern):
    assert routing(include=[pattern]).find("POST", path, root) is not None
    assert routing(exclude=[pattern]).find("POST", path, root) is None
    some = routing(routes=[Route(pattern, wait=1)])
    assert some.find("POST", path, root).choices.wait == 1
    assert routing(exclude=[pattern]).find("POST", "/apipay", "/api") is not None


MOUNTED_BEHIND_A_ROOT = [
    ("/v1/m/pay", "/v1/m"),
    ("/v1/m/pay", "/v1/m/"),
    ("/v1//m/pay", "/v1//m"),  # a root path of /v1/ and a mount at /m
    ("/v1/m/pay", "/v1//m"),
    ("/m/pay", "/v1/m"),  # a server that leaves its root out of the path
    ("/pay", "/v1/m"),  # and a mount that does so, too
]
"""The same request, as servers tell it whose root path is /v1, to an application mounted at /m."""


@pytest.mark.parametrize(("path", "root"), MOUNTED_BEHIND_A_ROOT)
@pytest.mark.parametrize("pattern", ["/pay", "/m/pay", "/v1/m/pay"])
def test_patterns_match_below_each_of_several_mounts(path, root, pattern):
    assert routing(include=[pattern]).find("POST", path, root) is not None
    assert routing(exclude=[pattern]).find("POST", path, root) is None
    some = routing(routes=[Route(pattern, wait=1)])
    assert some.find("POST", path, root).choices.wait == 1


@pytest.mark.parametrize("pattern", ["/v1/pay", "/ay", "/m", "/v1/m/m/pay", "/v1/m"])
def test_no_pattern_matches_a_path_that_no_layer_sees(pattern):
    some = routing(include=[pattern])
    assert some.find("POST", "/v1/m/pay", "/v1/m") is None
    assert some.find("POST", "/pay", "/v1/m") is None


def test_a_root_path_of_any_length_is_looked_through_only_so_far():
    root = "/a" * 10_000
    for pattern in ("/pay", f"{root}/pay", f"{root[2:]}/pay"):
        assert routing(include=[pattern]).find("POST", f"{root}/pay", root) is not None
    assert routing(include=["/a/pay"]).find("POST", f"{root}/pay", root) is None


def test_the_root_itself_is_a_slash():
    some = routing(include=["/"])
    assert some.find("POST", "/api", "/api") is not None
    assert some.find("POST", "/api/", "/api") is not None
    assert some.find("POST", "/apis", "/api") is None


def test_a_request_is_remembered_with_its_root_path():
    some = routing(include=["/pay"])
    for _ in range(2):
        assert some.find("POST", "/api/pay", "/api") is not None
        assert some.find("POST", "/api/pay") is None


def test_a_pattern_of_include_that_matches_no_request_by_the_hundredth_is_logged_once(caplog):
    some = routing(include=["/pay", re.compile("/api/.*"), "/never", re.compile("/no.e")])
    some.find("POST", "/v1/pay", "/v1")
    for number in range(98):
        some.find("POST", "/api/pay" if number % 2 else "/health")
    assert not caplog.text
    for _ in range(200):
        some.find("POST", "/health")
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition(" matched none of the first 100 requests")[0] for line in told] == [
        "include: the pattern '/never'",
        "include: the pattern '/no.e'",
    ]


def test_rare_routes_and_rare_exclusions_are_not_logged(caplog):
    some = routing(exclude=["/admin/*"], routes=[Route("/coupons", wait=1)])
    for _ in range(300):
        some.find("POST", "/pay")
    assert not caplog.text


def test_only_requests_with_a_protected_method_count_as_the_first_hundred(caplog):
    some = routing(include=["/pay"], routes=[Route("/orders", methods=["PUT"])])
    for _ in range(300):
        some.find("GET", "/health")
    assert some._known  # they are remembered all the same
    for method in ("post", "PUT", "PATCH"):
        for _ in range(33):
            some.find(method, "/health")
    assert not caplog.text
    some.find("POST", "/health")
    assert "the pattern '/pay' matched none" in caplog.text


def test_a_root_of_any_length_is_not_remembered():
    many = routing()
    for number in range(10):
        assert many.find("POST", "/pay", f"/{number}" + "x" * 10_000) is not None
    assert not many._known


def test_patterns_that_have_all_matched_are_watched_no_more(caplog):
    some = routing(include=["/pay"])
    for _ in range(300):
        assert some.find("POST", "/pay") is not None
    assert not caplog.text
    assert some._known


def test_endlessly_many_paths_are_not_all_remembered():
    many = routing()
    for number in range(3000):
        assert many.find("POST", f"/{number}") is not None
    assert len(many._known) <= 1024


def test_a_path_of_any_length_is_not_remembered():
    many = routing()
    for number in range(10):
        assert many.find("POST", f"/{number}" + "x" * 10_000) is not None
        assert many.find("X" * 10_000, f"/{number}") is None
    assert not many._known


@pytest.mark.parametrize(
    "options",
    [
        {"include": "/x"},
        {"exclude": "/x"},
        {"routes": ["/x"]},
    ],
)
def test_bad_routing_is_named_when_the_integration_is_made(options):
    with pytest.raises(ConfigError):
        routing(**options)


def test_a_route_with_an_option_that_does_not_exist_is_refused_when_it_is_made():
    with pytest.raises(ConfigError, match="no option 'colour'"):
        Route("/x", colour="red")


def test_a_mistyped_path_option_is_told_the_right_name():
    with pytest.raises(ConfigError, match=r"no option 'includ'; known: .*include, exclude, routes"):
        routing(includ=["/x"])
