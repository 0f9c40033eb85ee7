"""Receivers take a message or say why not, in time, and only where they are meant to go: real HTTP and SMTP servers."""

from __future__ import annotations

import importlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gaffer_dagster.domain import notice
from gaffer_dagster.domain.alert import Severity
from gaffer_dagster.domain.notice import Message, plain
from gaffer_dagster.engine import receivers, web
from gaffer_dagster.engine.receivers import Apprise, Receiver, Unusable, Webhook, receivers_from
from gaffer_dagster.errors import BadInputError, NotDeliveredError
from tests.support import jobs
from tests.support.receivers import HttpReceiver, MailReceiver, certificate

X = "GAFFER_RECEIVER_X"
SECRET = "sw0rdf1sh"


@pytest.fixture
def server() -> Iterator[HttpReceiver]:
    with HttpReceiver() as made:
        yield made


def made(url: str, **settings: str) -> Receiver:
    given = {f"{X}_{name}": value for name, value in settings.items()}
    _, receiver = receivers_from({X: url, **given}, jobs.LOG)
    return receiver


def refusal(url: str, message: Message | None = None, **settings: str) -> str:
    with pytest.raises(NotDeliveredError) as refused:
        made(url, **settings).send(message or notice.test_message())
    assert SECRET not in str(refused.value)
    return str(refused.value)


def quick(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(receivers, "_WEBHOOK_LIMIT", timedelta(seconds=seconds))


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Every name leads there."""
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port, **_: [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
            for each in addresses
        ],
    )


# ── what the environment says ────────────────────────────────────────────────────────────────────────────────────────


def test_the_log_is_always_there_and_the_others_are_as_the_environment_has_them() -> None:
    found = receivers_from(
        {
            "GAFFER_RECEIVER_SLACK": "slack://a/b/c",
            "GAFFER_RECEIVER_SLACK_SEVERITY": "error",
            "GAFFER_RECEIVER_ON_CALL": " https://example.org/hook\n",
            "GAFFER_DATABASE_URL": "postgresql://x",
        },
        jobs.LOG,
    )
    assert [(each.name, each.severity, type(each)) for each in found[1:]] == [
        ("on_call", Severity.WARNING, Webhook),
        ("slack", Severity.ERROR, Apprise),
    ]
    assert (found[0].name, found[0].severity) == ("log", Severity.WARNING)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({X: ""}, f"{X} is empty"),
        ({X: SECRET}, f"{X}: no URL"),
        ({X: f"//host/{SECRET}"}, f"{X}: no URL"),
        ({X: f"http://{SECRET}.example.org"}, f"set {X}_PRIVATE=1"),
        ({X: f"https:///{SECRET}"}, f"{X}: cannot be read"),
        ({X: f"https://[::1/{SECRET}"}, f"{X}: cannot be read"),
        ({X: f"https://host:{SECRET}"}, f"{X}: cannot be read"),
        ({X: f"https://host:0/{SECRET}"}, f"{X}: cannot be read"),
        ({X: f"https://host:99999/{SECRET}"}, f"{X}: cannot be read"),
        ({X: f"https://host/{SECRET} x"}, f"{X}: cannot be read"),
        ({X: f"https://host/{SECRET}\r\nHost: x"}, f"{X}: cannot be read"),
        ({X: f"https://höst/{SECRET}"}, f"{X}: cannot be read"),
        ({X: "https://host", f"{X}_SEVERITY": "fatal"}, f"{X}_SEVERITY='fatal'"),
        ({X: "https://host", f"{X}_PRIVATE": "yes"}, f"{X}_PRIVATE='yes'"),
        ({X: "https://host", f"{X}_SEVERITY": f"https://host/{SECRET}"}, f"{X}_SEVERITY=(not shown"),
        ({X: "https://host", f"{X}_PRIVATE": f"https://host/{SECRET}"}, f"{X}_PRIVATE=(not shown"),
        ({f"{X}_SEVERITY": "error"}, f"{X} is empty, or not set"),
        ({"GAFFER_RECEIVER_x": "https://host"}, "A-Z"),
        ({"GAFFER_RECEIVER_": "https://host"}, "A-Z"),
    ],
)
def test_what_cannot_be_meant_fails_by_its_variable_and_never_shows_the_value(
    environment: dict[str, str], said: str
) -> None:
    _, receiver = receivers_from(environment, jobs.LOG)
    assert isinstance(receiver, Unusable)
    with pytest.raises(NotDeliveredError) as refused:
        receiver.send(notice.test_message())
    assert said in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_receiver_of_the_logs_name_is_left_out_loudly(caplog: pytest.LogCaptureFixture) -> None:
    (log,) = receivers_from({"GAFFER_RECEIVER_LOG": f"https://{SECRET}"}, jobs.LOG)
    assert log.name == "log"
    assert "GAFFER_RECEIVER_LOG" in caplog.text
    assert SECRET not in caplog.text


def test_apprise_that_is_not_installed_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'gaffer_dagster[alerts]'" in refusal(f"slack://{SECRET}")


def test_nothing_of_a_receiver_shows_its_address() -> None:
    shown = repr([made(f"https://u:{SECRET}@host/{SECRET}?{SECRET}"), made(f"slack://{SECRET}")])
    assert SECRET not in shown


# ── webhook ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_webhook_gets_json_and_the_key_and_the_login(server: HttpReceiver) -> None:
    message = notice.test_message()
    made(f"http://ada:p%40ss@127.0.0.1:{server.port}/a%20b?c=d#e", PRIVATE="1").send(message)
    assert server.messages == [message.payload]
    assert server.paths == ["/a%20b?c=d"]
    (headers,) = server.headers
    assert headers["Idempotency-Key"] == message.key
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Basic YWRhOnBAc3M="
    assert headers["Host"] == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_2xx_is_taken(server: HttpReceiver, status: int) -> None:
    server.answers = [status]
    made(server.url, PRIVATE="1").send(notice.test_message())


@pytest.mark.parametrize("status", [300, 304, 400, 401, 404, 413, 429, 500, 503])
def test_any_other_status_is_not(server: HttpReceiver, status: int) -> None:
    server.answers = [status]
    assert f"status {status}" in refusal(f"{server.url}/{SECRET}", PRIVATE="1")


def test_a_redirect_is_not_followed(server: HttpReceiver) -> None:
    server.answers = ["redirect"]
    assert "status 302: a redirect, which is not followed" in refusal(server.url, PRIVATE="1")
    assert server.paths == ["/"]


@pytest.mark.parametrize("answer", ["silence", "drip"])
def test_a_server_that_is_silent_or_drips_is_left_in_time(
    server: HttpReceiver, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    quick(monkeypatch, 0.5)
    server.answers = [answer]
    threads = threading.active_count()
    assert refusal(server.url, PRIVATE="1") == "no answer within 0.5 s"
    deadline = time.monotonic() + 20
    # That of the server ends too, since it finds the connection gone (or, silent, has to be closed).
    while threading.active_count() > threads + (answer == "silence"):
        assert time.monotonic() < deadline, "the request goes on"
        time.sleep(0.02)


def test_a_name_server_that_is_silent_is_left_in_time(server: HttpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch, 0.3)
    found, asked = threading.Event(), socket.getaddrinfo

    def slow(*args: Any, **kwargs: Any) -> Any:
        found.wait(20)
        return asked(*args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    assert refusal(server.url, PRIVATE="1") == "no answer within 0.3 s"
    found.set()
    time.sleep(0.2)
    assert server.paths == []  # it is not sent after all


def test_garbage_and_nobody_are_failures(server: HttpReceiver) -> None:
    server.answers = ["garbage"]
    assert "no answer in HTTP" in refusal(server.url, PRIVATE="1")
    assert refusal("http://127.0.0.1:1", PRIVATE="1") == "no connection: ECONNREFUSED"
    assert refusal("https://nowhere.invalid") == "its name cannot be resolved"


def test_no_proxy_of_the_environment_is_asked(server: HttpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    with HttpReceiver() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        made(server.url, PRIVATE="1").send(notice.test_message())
        assert (len(server.paths), proxy.paths) == (1, [])


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "240.0.0.1", "::", "::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff0e::1", "::ffff:127.0.0.1",
    "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:1::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public_are_known(address: str) -> None:
    assert not web.is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2a00:1450:4001::1"]
)
def test_addresses_that_are_public_are_known(address: str) -> None:
    assert web.is_public(address)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "169.254.169.254", "2130706433", "127.1"],
)
def test_a_private_address_is_refused_unless_it_is_allowed(server: HttpReceiver, host: str) -> None:
    assert f"set {X}_PRIVATE=1" in refusal(f"https://{host}:{server.port}/{SECRET}")
    assert server.paths == []


@pytest.mark.parametrize("answers", [["10.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:169.254.169.254"]])
def test_a_name_that_leads_to_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch, answers: list[str]) -> None:
    resolving(monkeypatch, *answers)
    assert f"set {X}_PRIVATE=1" in refusal(f"https://hooks.example.org/{SECRET}")


def test_the_connection_goes_to_the_address_that_was_checked(
    server: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = socket.getaddrinfo

    def rebinding(host: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(host)
        return real("127.0.0.1" if len(asked) == 1 else "192.0.2.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    made(f"http://rebound.example.org:{server.port}", PRIVATE="1").send(notice.test_message())
    assert asked == ["rebound.example.org"]
    assert server.headers[0]["Host"] == f"rebound.example.org:{server.port}"


def test_the_next_address_is_tried_where_one_is_deaf(server: HttpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "127.0.0.9", "127.0.0.1")  # the server listens on the second only
    made(f"http://hooks.example.org:{server.port}", PRIVATE="1").send(notice.test_message())
    assert len(server.paths) == 1


def test_the_certificate_must_be_trusted_and_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = certificate(tmp_path)
    with HttpReceiver(certificate=pem) as server:
        assert "certificate is not valid: self" in refusal(server.url, PRIVATE="1")
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        made(server.url, PRIVATE="1").send(notice.test_message())
        assert len(server.messages) == 1
        said = refusal(server.url.replace("127.0.0.1", "localhost"), PRIVATE="1")
        assert said == "its certificate is not valid: Hostname mismatch"


def test_a_server_without_tls_is_a_failure_of_https(server: HttpReceiver) -> None:
    assert "no TLS is spoken there" in refusal(f"https://127.0.0.1:{server.port}", PRIVATE="1")


# ── Apprise ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def hostile() -> Message:
    """A message as it is written, with what somebody would like to make of it."""
    texts = [
        "<!channel> <!here> @everyone @here <@U123> <http://evil.example|click>",
        "[click](http://evil.example) <https://evil.example> <b>x</b> <img src=x onerror=alert(1)> &lt;b&gt;",
        "a\r\nBcc: all@example.org\r\n\r\nevil.example www.evil.example mailto:x@evil.example",
        "\u202eevil\u200b \u2066x `code` *bold* ||spoiler||",
    ]
    text = "\n".join(["nightly: it is late [gaffer 42]", *(f"Why: {plain(each)}" for each in texts)])
    return Message("key", "[error] nightly: it is late [gaffer 42]", text, Severity.ERROR)


@pytest.mark.parametrize("form", ["text", "html"])
def test_a_mail_goes_out_with_nothing_but_text(form: str) -> None:
    with MailReceiver(SECRET) as server:
        made(f"{server.url(SECRET)}&format={form}").send(hostile())
        (mail,) = server.mails
    assert mail["Subject"] == "[error] nightly: it is late [gaffer 42]"
    assert (mail["To"], mail["Bcc"]) == ("oncall@example.org", None)
    body = mail.get_body((form if form == "html" else "plain",))
    assert body is not None
    said = body.get_content()
    assert "‹b›x‹/b›" in said
    for evil in ("<b>x", "<img src=x", "://evil", "evil.example", "@everyone", "&lt;"):
        assert evil not in said, said


def test_wrong_credentials_are_said_by_their_status() -> None:
    with MailReceiver(SECRET) as server:
        assert refusal(server.url(f"not-{SECRET}")).startswith("Apprise failed with status 535: ")
        assert server.mails == []


def test_apprise_that_fails_leaks_nothing(
    server: HttpReceiver, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(1):
        server.answers = [403]
        said = refusal(f"json://u:{SECRET}@127.0.0.1:{server.port}/{SECRET}")
        assert said.startswith("Apprise failed with status 403: Failed to send JSON POST notification: ")
        mail = f"mailto://u:{SECRET}@127.0.0.1:1?from=a@example.org&to=a@example.org&mode=insecure"
        assert refusal(mail) == 'Apprise failed: Connection error while submitting email to "***"'
        assert refusal(f"nothing://{SECRET}") == f"Apprise cannot read the URL in {X}; mend it"
    assert SECRET not in caplog.text + str(capfd.readouterr())


@pytest.mark.parametrize("is_hidden", [True, False])
def test_what_apprise_warns_of_is_told_without_the_urls_parts(is_hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_hidden:
        monkeypatch.setattr(receivers, "_hide", lambda url, text: text)
    receiver = made(f"mailto://u:p@{SECRET}.localhost:1?from=a@example.org&to=a@example.org&mode=insecure")
    with pytest.raises(NotDeliveredError, match="Apprise failed: Connection error") as refused:
        receiver.send(notice.test_message())
    assert (SECRET in str(refused.value)) is not is_hidden


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("slack://bot@T1JJ3T3L2/A1BRTD4JD/TIiajkdn/#general", "no T1JJ3T3L2, A1BRTD4JD, TIiajkdn or general"),
        ("json://us3r:p%40ss%2Fw0rd@host/", "for us3r: p@ss/w0rd, p%40ss%2Fw0rd, ss/w0rd"),
        ("json://us3r:p@ss:w/rd@host/", "for us3r: p@ss:w/rd"),
        ("json://host/?+X-Token=s3cr%20t&key=a+b+cdef", "headers X-Token, s3cr t, s3cr%20t, a b cdef"),
        ("twilio://AC01:t0ken@+1-555-0199/15550123", "to 15550199, +1-555-0199, 15550123"),
        ("json://us3r:t0ken@host/", "Authorization: Basic dXMzcjp0MGtlbnQwa2VuMDEyMzQ1"),
        ("TGRAM://123456789:AbCdEfGh/chat", "at https://api.telegram.org/bot123456789:abcdefgh/send"),
    ],
)
def test_no_part_of_a_url_is_left_in_what_is_said(url: str, said: str) -> None:
    left = receivers._hide(url, said)
    assert "***" in left
    words = {word for word in re.findall(r"[\w@/%+-]{4,}", left) if re.search(r"\d|@|%", word)}
    assert not words, left
    assert not re.search(r"TIiajkdn|general|abcdefgh|cdef|Token", left)


def test_a_long_complaint_is_cut_and_silence_names_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, told in (("print(':' + 9999 * ' x')", 300), ("", None)):
        monkeypatch.setattr(receivers, "_CHILD", f"{said}\nraise SystemExit(4)")
        error = refusal(f"json://u:{SECRET}@127.0.0.1/")
        if told:
            assert len(error) == len("Apprise failed") + told
        else:
            assert "look at the token and the network" in error
            assert error.endswith(f'apprise -vv -b test "${X}"')


def test_apprise_follows_no_redirect(server: HttpReceiver) -> None:
    server.answers = ["redirect"]
    assert refusal(f"json://127.0.0.1:{server.port}/")[:32] == "Apprise failed with status 302: "
    assert server.paths == ["/"]


def test_apprise_is_ended_in_time(server: HttpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receivers, "_APPRISE_LIMIT", timedelta(seconds=0.5))
    server.answers = ["drip"]
    assert refusal(f"json://127.0.0.1:{server.port}/") == "no answer within 0.5 s"


def test_apprise_is_told_whether_it_is_bad_or_good_news(server: HttpReceiver) -> None:
    url = f"json://127.0.0.1:{server.port}/"
    for severity, recovery in ((Severity.ERROR, False), (Severity.WARNING, False), (Severity.ERROR, True)):
        made(url).send(Message("key", "title", "title\ntext", severity, recovery))
    assert [each["type"] for each in server.messages] == ["failure", "warning", "success"]
    assert {(each["title"], each["message"]) for each in server.messages} == {("title", "text")}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


@pytest.mark.parametrize(
    ("module", "attribute", "url"),
    [
        ("slack", "webhook_url", "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"),
        ("slack", "webhook_url", "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ?blocks=yes"),
        ("discord", "notify_url", "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js"),
        ("discord", "notify_url", "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js?format=markdown"),
    ],
)
def test_no_mention_and_no_link_comes_of_somebodys_text(
    server: HttpReceiver, monkeypatch: pytest.MonkeyPatch, module: str, attribute: str, url: str
) -> None:
    monkeypatch.setattr(logging.getLogger("apprise"), "handlers", [])
    found = importlib.import_module(f"apprise.plugins.{module}")
    monkeypatch.setattr(getattr(found, f"Notify{module.capitalize()}"), attribute, server.url)
    message = hostile()
    server.body = b"ok"  # Slack wants to read that
    assert receivers.notify(url, {"title": message.title, "body": message.text, "notify_type": "failure"}) == 0
    (sent,) = server.messages
    said = " ".join(_texts({name: each for name, each in sent.items() if name not in ("avatar_url", "icon_url")}))
    assert "nightly" in said
    for evil in ("<!", "<@", "@everyone", "@here", "<http", "](", "://evil", "evil.example", "|click", "||"):
        assert evil not in said, said
    assert not sent.get("content", "").startswith("👉")  # Discord's plugin turns mentions that it finds into pings
    assert json.dumps(sent).count("allow_mentions") == 0


def test_a_jobs_name_is_no_markup(server: HttpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = importlib.import_module("apprise.plugins.discord")
    monkeypatch.setattr(logging.getLogger("apprise"), "handlers", [])
    monkeypatch.setattr(plugin.NotifyDiscord, "notify_url", server.url)
    url = "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js?format=markdown"
    assert receivers.notify(url, {"title": "title", "body": "copy_rows_daily is late", "notify_type": "failure"}) == 0
    assert r"copy\_rows\_daily" in " ".join(_texts(server.messages))


def test_a_bad_switch_is_refused_by_its_name() -> None:
    with pytest.raises(BadInputError, match="PING_PRIVATE='no'"):
        web.target("PING", {"PING": "https://host", "PING_PRIVATE": "no"})
