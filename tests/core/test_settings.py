from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest
from msgspec import UNSET

from semel.core.policy import POLICY_FIELDS, Policy, resolve
from semel.core.settings import POLICY_NAMES, load_settings, names_for
from semel.errors import ConfigError


@pytest.fixture
def load(tmp_path):
    def load(files=None, environ=None, **overrides):
        for name, text in (files or {}).items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        return load_settings(environ or {}, tmp_path, **overrides)

    return load


@pytest.fixture
def problems(load):
    def problems(files=None, environ=None, **overrides):
        with pytest.raises(ConfigError) as refused:
            load(files, environ, **overrides)
        first, *lines = str(refused.value).splitlines()
        assert first == "these settings are wrong:"
        return [line.removeprefix("  - ") for line in lines]

    return problems


# --- presets -----------------------------------------------------------------------------


def test_without_any_source_the_default_preset_applies(load):
    settings = load()
    assert settings.url == "sqlite:///semel.db"
    assert settings.prefix == "idem:"
    assert settings.key_pattern is None
    assert settings.policy == Policy()
    assert settings.scopes == {}
    assert (settings.environment, settings.preset) == ("default", "default")
    assert settings.disabled is False


@pytest.mark.parametrize(
    ("environment", "url", "ttl"),
    [
        ("default", "sqlite:///semel.db", 86400.0),
        ("development", "sqlite:///semel-dev.db", 3600.0),
        ("test", "memory://", 300.0),
    ],
)
def test_a_known_environment_picks_its_preset(load, environment, url, ttl):
    settings = load(environ={"SEMEL_ENV": environment})
    assert settings.url == url
    assert resolve(settings.policy).ttl == ttl
    assert settings.preset == settings.environment == environment


def test_production_needs_a_url(problems):
    assert problems(environ={"SEMEL_ENV": "production"}) == [
        "production needs a store: set SEMEL_URL, or url in semel.toml"
    ]


def test_production_refuses_memory(problems):
    assert problems(environ={"SEMEL_ENV": "production", "SEMEL_URL": "memory://"}) == [
        "production must not keep its records in memory: they end with the process"
    ]


def test_production_takes_a_real_store_or_one_that_the_code_brings(load):
    production = {"SEMEL_ENV": "production"}
    assert load(environ={**production, "SEMEL_URL": "redis://localhost"}).url == "redis://localhost"
    assert load(environ=production, url=None).url is None


@pytest.mark.parametrize(
    ("files", "environ", "overrides", "preset"),
    [
        ({"semel.toml": 'preset = "development"'}, {}, {}, "development"),
        (
            {"semel.toml": 'preset = "development"', "semel.staging.toml": ""},
            {"SEMEL_ENV": "staging"},
            {},
            "development",
        ),
        ({"semel.toml": 'preset = "development"'}, {"SEMEL_ENV": "test"}, {}, "test"),
        ({"semel.toml": 'preset = "development"'}, {"SEMEL_ENV": "default"}, {}, "default"),
        (
            {"semel.toml": 'preset = "default"', "semel.ci.toml": 'preset = "test"'},
            {"SEMEL_ENV": "ci"},
            {},
            "test",
        ),
        ({}, {"SEMEL_ENV": "production"}, {"preset": "test"}, "test"),
    ],
)
def test_the_code_then_the_environment_then_a_file_chooses_the_preset(
    load, files, environ, overrides, preset
):
    assert load(files, environ, **overrides).preset == preset


# --- precedence --------------------------------------------------------------------------

SOURCES = [
    ("files", {"semel.toml": 'url = "redis://base"\n[policy]\nttl = 1'}),
    ("files", {"semel.ci.toml": 'url = "redis://ci"\n[policy]\nttl = 2'}),
    ("environ", {"SEMEL_URL": "redis://variable", "SEMEL_TTL": "3"}),
    ("overrides", {"url": "redis://code", "policy": Policy(ttl=4)}),
]


@pytest.mark.parametrize(
    ("count", "url", "ttl"),
    [
        (1, "redis://base", 1.0),
        (2, "redis://ci", 2.0),
        (3, "redis://variable", 3.0),
        (4, "redis://code", 4.0),
    ],
)
def test_each_source_wins_over_the_ones_before_it(load, count, url, ttl):
    given = {"files": {"semel.ci.toml": ""}, "environ": {"SEMEL_ENV": "ci"}, "overrides": {}}
    for kind, content in SOURCES[:count]:
        given[kind].update(content)
    settings = load(given["files"], given["environ"], **given["overrides"])
    assert (settings.url, settings.policy.ttl) == (url, ttl)


def test_sources_are_laid_over_each_other_field_by_field(load):
    settings = load(
        {
            "semel.toml": "[policy]\nttl = 1\n[scopes.orders]\nlease = 10\nttl = 20",
            "semel.ci.toml": '[scopes.orders]\nttl = 30\n[scopes.mail]\npreset = "message"',
        },
        {"SEMEL_ENV": "ci", "SEMEL_LEASE": "5s"},
        policy=Policy(store_timeout=9),
        scopes={"orders": Policy(failure=lambda error: "final"), "jobs": {"preset": "job"}},
    )
    assert settings.policy == Policy(ttl=1, lease=5, store_timeout=9)
    orders = settings.scopes["orders"]
    assert (orders.lease, orders.ttl) == (10.0, 30.0)
    assert callable(orders.failure)
    assert settings.scopes["mail"] == Policy.preset("message")
    assert settings.scopes["jobs"] == Policy.job()


@pytest.mark.parametrize(
    ("count", "source"),
    [
        (0, "preset: url"),
        (1, "semel.toml: url"),
        (2, "semel.ci.toml: url"),
        (3, "SEMEL_URL"),
        (4, "code: url"),
    ],
)
def test_the_settings_tell_where_each_comes_from(load, count, source):
    given = {"files": {"semel.ci.toml": ""}, "environ": {"SEMEL_ENV": "ci"}, "overrides": {}}
    for kind, content in SOURCES[:count]:
        given[kind].update(content)
    settings = load(given["files"], given["environ"], **given["overrides"])
    assert settings.sources == {"url": source}


def test_an_explicit_value_equal_to_the_default_still_wins(load):
    settings = load(
        {"semel.toml": "[policy]\nttl = 60"}, {"SEMEL_TTL": "24h", "SEMEL_DUPLICATE": "replay"}
    )
    assert settings.policy.ttl == 86400.0
    assert settings.policy.duplicate == "replay"
    assert settings.policy.lease is UNSET


def test_a_scope_may_start_from_a_preset_and_say_more(load):
    settings = load({"semel.toml": '[scopes."orders.create"]\nttl = "7d"\npreset = "payment"'})
    policy = settings.scopes["orders.create"]
    assert policy.ttl == 7 * 86400.0
    assert policy.abandoned == "hold"


# --- files -------------------------------------------------------------------------------


def test_the_base_file_may_be_elsewhere_and_its_environment_file_is_beside_it(load, tmp_path):
    elsewhere = tmp_path / "etc"
    elsewhere.mkdir()
    (elsewhere / "shop.toml").write_text('prefix = "shop:"\nurl = "redis://base"')
    (elsewhere / "shop.ci.toml").write_text('url = "redis://ci"')
    settings = load(environ={"SEMEL_CONFIG": "etc/shop.toml", "SEMEL_ENV": "ci"})
    assert (settings.prefix, settings.url) == ("shop:", "redis://ci")


def test_a_config_file_that_was_named_must_exist(problems, tmp_path):
    assert problems(environ={"SEMEL_CONFIG": "gone.toml"}) == [
        f"SEMEL_CONFIG: there is no file {tmp_path / 'gone.toml'}"
    ]


def test_a_file_that_is_not_toml_is_named_with_its_line(problems):
    (line,) = problems({"semel.toml": "url = 1\nttl = = 2"})
    assert line.startswith("semel.toml: is not valid TOML: ")
    assert "line 2" in line


def test_a_file_with_a_byte_order_mark_is_read_as_without(load):
    settings = load({"semel.toml": '\ufeffurl = "sqlite:///a.db"', "semel.dev.toml": "\ufeff"})
    assert settings.url == "sqlite:///a.db"


def test_a_file_that_is_not_utf8_is_named(problems, tmp_path):
    (tmp_path / "semel.toml").write_bytes(b'url = "\xff"')
    (line,) = problems()
    assert line.startswith("semel.toml: is not valid TOML: 'utf-8' codec")


def test_a_file_that_cannot_be_read_is_named(problems, tmp_path):
    (tmp_path / "semel.toml").mkdir()
    (line,) = problems()
    assert line.startswith("semel.toml: cannot be read: ")


def test_the_current_folder_and_environment_are_read_by_default(tmp_path, monkeypatch):
    (tmp_path / "semel.toml").write_text('prefix = "here:"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMEL_URL", "memory://")
    settings = load_settings()
    assert (settings.prefix, settings.url) == ("here:", "memory://")


# --- values ------------------------------------------------------------------------------

TEXTS = {
    "duplicate": ("reject", "reject"),
    "concurrent": ("reject", "reject"),
    "failure": ("final", "final"),
    "abandoned": ("hold", "hold"),
    "mismatch": ("replace", "replace"),
    "store_error": ("open", "open"),
    "ttl": ("7d", 604800.0),
    "failed_ttl": ("10m", 600.0),
    "lease": ("30s", 30.0),
    "wait_timeout": ("2.5", 2.5),
    "wait_interval": ("250ms", 0.25),
    "wait_interval_max": ("1", 1.0),
    "max_attempts": ("3", 3),
    "max_result_bytes": ("0", 0),
    "codec": ("json", "json"),
    "store_timeout": ("24h", 86400.0),
    "message": ("none", "none"),
    "payload_required": ("Yes", True),
}


def test_every_policy_field_that_can_be_text_is_tried_here():
    assert set(TEXTS) == set(POLICY_NAMES)
    assert set(POLICY_FIELDS) - set(POLICY_NAMES) == {"not_done"}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_field_has_a_variable(load, name):
    text, value = TEXTS[name]
    settings = load(environ={f"SEMEL_{name.upper()}": text})
    assert getattr(settings.policy, name) == value


@pytest.mark.parametrize("name", ["wait_timeout", "max_attempts"])
def test_none_is_written_as_a_word(load, name):
    settings = load({"semel.toml": f'[policy]\n{name} = "none"'})
    assert getattr(settings.policy, name) is None
    settings = load({"semel.toml": f"[policy]\n{name} = 2"}, {f"SEMEL_{name.upper()}": "None"})
    assert getattr(settings.policy, name) is None


def test_the_code_may_give_durations_as_timedelta(load):
    assert load(policy={"ttl": timedelta(minutes=1)}).policy.ttl == 60.0


@pytest.mark.parametrize(
    ("text", "disabled"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        ("on", True),
        ("0", False),
        ("False", False),
        ("no", False),
        ("off", False),
    ],
)
def test_disabled_is_said_in_the_usual_words(load, text, disabled):
    assert load({"semel.toml": "disabled = true"}, {"SEMEL_DISABLED": text}).disabled is disabled


def test_an_empty_variable_counts_as_not_set(load):
    assert (
        load({"semel.toml": 'url = "redis://base"'}, {"SEMEL_URL": "", "SEMEL_TTL": ""}).url
        == "redis://base"
    )


@pytest.mark.parametrize("service", ["SEMEL", "SEMEL_CENTRE", "SEMEL_CENTRE_2", "SEMEL_PORT"])
def test_other_variables_and_those_of_kubernetes_are_left_alone(load, service):
    """As Kubernetes sets them for services that are called semel, semel-centre, and so on."""
    load(
        environ={
            "PATH": "/bin",
            f"{service}_PORT": "tcp://10.0.0.1:8600",
            f"{service}_PORT_8600_TCP": "tcp://10.0.0.1:8600",
            f"{service}_PORT_8600_TCP_ADDR": "10.0.0.1",
            f"{service}_PORT_8600_TCP_PORT": "8600",
            f"{service}_PORT_8600_TCP_PROTO": "tcp",
            f"{service}_SERVICE_HOST": "10.0.0.1",
            f"{service}_SERVICE_PORT": "8600",
            f"{service}_SERVICE_PORT_HTTP_METRICS": "8601",
        }
    )


@pytest.mark.parametrize("name", ["SEMEL_PORTS", "SEMEL_SERVICE", "SEMEL_CENTRE_SERVICE_URL"])
def test_what_only_looks_like_kubernetes_is_unknown(problems, name):
    (line,) = problems(environ={name: "x"})
    assert line.startswith(f"{name}: is not known")


def test_the_token_of_a_service_is_no_setting(load, problems):
    assert load(environ={"SEMEL_TOKEN": "secret"}) == load(environ={})
    (line,) = problems(environ={"SEMEL_TOKN": "secret"})
    assert line == "SEMEL_TOKN: is not known; did you mean SEMEL_TOKEN?"


def test_the_name_of_the_process_is_no_setting(load, problems):
    assert load(environ={"SEMEL_NAME": "web-1"}) == load(environ={})
    (line,) = problems(environ={"SEMEL_NAM": "web-1"})
    assert line == "SEMEL_NAM: is not known; did you mean SEMEL_NAME?"


def test_key_pattern_and_prefix_are_carried(load):
    settings = load(
        {"semel.toml": 'key_pattern = "a"'}, {"SEMEL_KEY_PATTERN": "[a-z]+", "SEMEL_PREFIX": "p:"}
    )
    assert (settings.key_pattern, settings.prefix) == ("[a-z]+", "p:")
    assert load(key_pattern=None).key_pattern is None


@pytest.mark.parametrize(
    ("files", "environ", "code", "found"),
    [
        ({}, {}, {}, UNSET),
        ({"semel.toml": "max_waiting = 3"}, {}, {}, 3),
        ({"semel.toml": "max_waiting = 3"}, {"SEMEL_MAX_WAITING": "0"}, {}, 0),
        ({"semel.toml": "max_waiting = 3"}, {"SEMEL_MAX_WAITING": "None"}, {}, None),
        ({"semel.toml": 'max_waiting = "none"'}, {}, {}, None),
        ({"semel.toml": "max_waiting = 3"}, {}, {"max_waiting": None}, None),
    ],
)
def test_max_waiting_is_a_number_or_none_for_no_bound(load, files, environ, code, found):
    assert load(files, environ, **code).max_waiting == found


# --- problems ----------------------------------------------------------------------------


def test_everything_that_is_wrong_is_named_at_once_with_its_source(problems):
    found = problems(
        {
            "semel.toml": (
                'url = 5\nprefx = "x:"\npolicy = 3\n'
                '[scopes."a b"]\nttl = 1\n[scopes.orders]\npreset = "gold"\nlease = "soon"\n'
            ),
            "semel.ci.toml": 'preset = "staging"\nscopes = "all"\n[policy]\nttl = true\ncolour = "red"\n',
        },
        {
            "SEMEL_ENV": "ci",
            "SEMEL_TLL": "60",
            "SEMEL_DISABLED": "perhaps",
            "SEMEL_MAX_ATTEMPTS": "three",
            "SEMEL_KEY_PATTERN": "(",
            "SEMEL_RAINBOW": "1",
            "SEMEL_MAX_WAITING": "-1",
        },
        zebra=1,
        scopes={5: Policy()},
    )
    beginnings = [
        "semel.toml: url: must be a string, not int",
        "semel.toml: prefx: is not known; did you mean prefix?",
        "semel.toml: policy: must be a table, not int",
        "semel.toml: scopes: the scope (3 characters) has whitespace",
        'semel.toml: scopes."orders".preset: no policy preset is called',
        'semel.toml: scopes."orders".lease: must be seconds or a string such as 250ms',
        "semel.ci.toml: preset: must be one of default, development, test, production",
        "semel.ci.toml: scopes: must be a table, not str",
        "semel.ci.toml: policy.ttl: policy field ttl must be a number of seconds",
        "semel.ci.toml: policy.colour: is not known; known are: duplicate, ",
        "SEMEL_TLL: is not known; did you mean SEMEL_TTL?",
        "SEMEL_DISABLED: must be true or false; a variable may say 1, true, yes, on, 0",
        "SEMEL_MAX_ATTEMPTS: policy field max_attempts must be a whole number",
        "SEMEL_KEY_PATTERN: the key pattern is not a regular expression",
        "SEMEL_RAINBOW: is not known; known are: SEMEL_URL, SEMEL_PREFIX, ",
        "SEMEL_MAX_WAITING: must be a whole number of 0 or more, or none for no bound",
        "code: zebra: is not known; known are: url, ",
        "code: scopes: the scope must be a str, not int",
    ]
    for beginning, line in zip(beginnings, found, strict=True):
        assert line.startswith(beginning)


def test_an_unquoted_scope_with_a_dot_is_explained(problems):
    (line,) = problems({"semel.toml": "[scopes.orders.create]\nttl = 1"})
    assert line.startswith('semel.toml: scopes."orders".create: is not known; a scope with a dot')
    assert line.endswith('[scopes."orders.create"]')


@pytest.mark.parametrize("name", ["../etc", "a/b", "a b", ".", 5])
def test_an_environment_name_cannot_lead_out_of_the_folder(problems, name):
    assert problems(environment=name) == ["SEMEL_ENV: a name is made of letters, digits, _ and -"]


@pytest.mark.parametrize("files", [{}, {"semel.toml": "", "semel.production.toml": ""}])
def test_an_environment_that_nobody_knows_is_refused(problems, files):
    (line,) = problems(files, {"SEMEL_ENV": "prodution"})
    assert line == (
        "SEMEL_ENV: 'prodution' is not known: there is no file semel.prodution.toml, "
        "and presets are default, development, test, production"
    )


def test_the_file_of_an_environment_is_looked_for_beside_the_base_file(problems, tmp_path):
    (tmp_path / "semel.ci.toml").touch()
    (tmp_path / "shop.toml").touch()
    (line,) = problems(environ={"SEMEL_ENV": "ci", "SEMEL_CONFIG": "shop.toml"})
    assert "there is no file shop.ci.toml" in line


@pytest.mark.parametrize("text", ["-1", "1.5", "٣", "9" * 5000])
def test_a_variable_that_is_no_sensible_whole_number_is_named(problems, text):
    (line,) = problems(environ={"SEMEL_MAX_ATTEMPTS": text})
    assert line.startswith("SEMEL_MAX_ATTEMPTS: policy field max_attempts must be a whole number")
    assert len(line) < 200


def test_a_url_is_never_repeated_in_an_error(problems):
    found = problems(environ={"SEMEL_URL": "redis://:secret@host", "SEMEL_TTL": "x"})
    assert "secret" not in "".join(found)


def test_importing_the_settings_does_not_import_a_toml_parser():
    code = (
        "import sys, semel.core.settings;print(sorted({'tomllib', 'difflib'} & set(sys.modules)))"
    )
    # A coverage run measures child processes too, and coverage itself imports tomllib.
    environ = {name: text for name, text in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("lease", "-1", "policy field lease must be more than zero seconds; got -1.0"),
        ("ttl", "-5m", "policy field ttl must be more than zero seconds; got -300.0"),
        ("wait_timeout", "-1s", "policy field wait_timeout must be zero or more seconds; got -1.0"),
        ("lease", "0", "policy field lease must be more than zero seconds; got 0"),
        ("lease", "10ms", "policy field lease must be at least 0.05 seconds"),
        ("lease", "--1", "must be seconds or a string such as 250ms"),
    ],
)
def test_a_duration_below_zero_is_told_from_a_text_that_is_none(problems, name, text, why):
    (problem,) = problems(environ={f"SEMEL_{name.upper()}": text})
    assert problem.startswith(f"SEMEL_{name.upper()}: {why}")
    (problem,) = problems({"semel.toml": f'[policy]\n{name} = "{text}"'})
    assert problem.startswith(f"semel.toml: policy.{name}: {why}")


# --- secrets -----------------------------------------------------------------------------


def test_a_representation_hides_urls_and_secrets(load):
    settings = load(
        url="redis://anna:PASSWORD@cache/0",
        behind="postgresql://anna:PASSWORD@db/shop",
        fingerprint_secret="PASSWORD of 16 bytes and more",
    )
    for shown in (repr(settings), str(settings), repr(settings.__rich_repr__()), f"{[settings]}"):
        assert "PASSWORD" not in shown
        assert "anna" not in shown
    assert "environment='default'" in repr(settings)
    assert repr(load(url=None)).startswith("Settings(url=None, behind=None, prefix='idem:'")


# --- production --------------------------------------------------------------------------


URL = {"SEMEL_ENV": "production", "SEMEL_URL": "sqlite:///records.db"}


@pytest.mark.parametrize("name", ["semel.toml", "semel.production.toml", "other.toml"])
def test_no_file_switches_protection_off_in_production(problems, name):
    environ = {**URL, "SEMEL_CONFIG": "other.toml"} if name == "other.toml" else URL
    (line,) = problems({name: "disabled = true"}, environ)
    assert line.startswith(f"{name}: disabled: production does not run unprotected")
    assert "SEMEL_DISABLED=true" in line


def test_a_file_switches_protection_off_elsewhere(load):
    assert load({"semel.toml": "disabled = true"}).disabled


@pytest.mark.parametrize("name", ["code", "code.toml", "SEMEL_app.toml"])
def test_a_file_is_a_file_whatever_its_name(problems, name):
    (line,) = problems({name: "disabled = true"}, {**URL, "SEMEL_CONFIG": name})
    assert line.startswith(f"{name}: disabled: production does not run unprotected")


def test_the_operator_and_the_code_switch_protection_off_in_production(load):
    assert load({}, {**URL, "SEMEL_DISABLED": "true"}).disabled
    assert load({}, URL, disabled=True).disabled
    assert not load({"semel.toml": "disabled = true"}, {**URL, "SEMEL_DISABLED": "false"}).disabled


# --- patterns and bounds -------------------------------------------------------------------


def test_the_closest_name_comes_first():
    names = ["*", "orders.*", "orders.pay", "orders.pay.*", "bills.*", "orders"]
    assert names_for("orders.pay", names) == ("orders.pay", "orders.*", "*")
    assert names_for("orders.pay.card", names) == ("orders.pay.*", "orders.*", "*")
    assert names_for("orders", names) == ("orders", "*")
    assert names_for("mail", ["bills.*"]) == ()
    # In the name of a scope that is called so, and in the middle, a * is a character.
    assert names_for("*", names) == ("*",)
    assert names_for("a.b.c", ["a.*.c"]) == ()


def test_bounds_are_read_and_merged(load):
    settings = load(
        {
            "semel.toml": '[scopes."orders.*"]\nlease = 30\nbounds = {lease = [5, "10m"]}\n'
            "[scopes.mail]\nbounds = {}",
            "semel.ci.toml": '[scopes."orders.*"]\nbounds = {lease = [1, 60]}',
        },
        {"SEMEL_ENV": "ci"},
    )
    assert settings.bounds == {"orders.*": {"lease": (1.0, 60.0)}, "mail": {}}
    assert settings.scopes["orders.*"] == Policy(lease=30)
    assert load({"semel.toml": "[scopes.mail]\nttl = 1"}).bounds == {}


@pytest.mark.parametrize(
    ("bounds", "problem"),
    [
        ("{lease = [600, 5]}", "600 is more than 5"),
        ("{lease = 5}", "such as [5, 600]"),
        ("{lease = [5]}", "such as [5, 600]"),
        ('{lease = ["soon", 5]}', "30s"),
        ("{lease = [0, 5]}", "more than zero"),
        ("{leese = [1, 5]}", "did you mean lease?"),
        ("[1, 5]", "must be a table"),
    ],
)
def test_wrong_bounds_are_named(problems, bounds, problem):
    (line,) = problems({"semel.toml": f"[scopes.mail]\nbounds = {bounds}"})
    assert line.startswith('semel.toml: scopes."mail".bounds')
    assert problem in line
