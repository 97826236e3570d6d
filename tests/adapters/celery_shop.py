"""An application of Celery for workers in processes of their own; its settings are in the environment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from semel import Idempotency, Policy
from semel.adapters.celery import task_class
from semel.errors import ConfigError

FOLDER = Path(os.environ["SHOP_FOLDER"])

idem = Idempotency(os.environ["SHOP_STORE"], policy=Policy(lease=1.5))
idem.execute("started", os.getpid, scope="shop")  # so that what workers fork has connections

app = Celery(
    "shop",
    task_cls=task_class(idem),
    broker=os.environ["SHOP_BROKER"],
    backend=os.environ["SHOP_BACKEND"],
)
app.conf.accept_content = ["json", "pickle"]
app.conf.broker_connection_retry_on_startup = True
if "SHOP_VISIBILITY" in os.environ:
    app.conf.broker_transport_options = {
        "visibility_timeout": float(os.environ["SHOP_VISIBILITY"]),
        "unacked_restore_interval": 0.2,  # else once in 100 s
        "unacked_restore_throttle": 1,
    }


def effect(text: str) -> None:
    """Write down what was done, where no process can lose it."""
    with (FOLDER / "effects").open("a") as file:
        file.write(f"{text}\n")


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.01)


@app.task(name="charge", idempotent=True)
def charge(order: int) -> tuple[int, str]:
    effect(f"charge {order}")
    return order, "paid"


@app.task(name="keyed", idempotent={"key": "order-{order}"})
def keyed(order: int) -> str:
    effect(f"keyed {order}")
    return "paid"


@app.task(name="gated", idempotent={"key": "order-{order}"})
def gated(order: int) -> str:
    effect(f"gated {order}")
    wait_for(f"go-{order}")
    return "paid"


@app.task(name="mail", idempotent=True, bind=True)
def mail(self, result: object, to: str) -> str:
    effect(f"mail {to} {result}")
    return self.request.id


@app.task(
    name="flaky",
    bind=True,
    idempotent=True,
    autoretry_for=(OSError,),
    retry_kwargs={"max_retries": 2, "countdown": 0},
)
def flaky(self, order: int) -> str:
    effect(f"flaky {order} {self.request.retries}")
    if self.request.retries < 2:
        raise OSError("no connection")
    return "paid"


@app.task(
    name="declined",
    idempotent={"policy": Policy(failure="final")},
    autoretry_for=(OSError,),
    retry_kwargs={"max_retries": 2, "countdown": 0},
)
def declined(order: int) -> str:
    effect(f"declined {order}")
    raise OSError("declined")


@app.task(name="killed", idempotent=True)
def killed(order: int) -> str:
    effect(f"killed {order}")
    flag = FOLDER / f"killed-{order}"
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "paid"


@app.task(
    name="soft",
    bind=True,
    idempotent=True,
    soft_time_limit=0.5,
    autoretry_for=(SoftTimeLimitExceeded,),
    retry_kwargs={"max_retries": 1, "countdown": 0},
)
def soft(self, order: int) -> str:
    effect(f"soft {order} {self.request.retries}")
    if self.request.retries == 0:
        time.sleep(60)
    return "paid"


@app.task(
    name="hard",
    idempotent={"policy": Policy(max_attempts=2, lease=1)},
    time_limit=0.5,
)
def hard(order: int) -> None:
    effect(f"hard {order}")
    time.sleep(60)


@app.task(name="report")
def report(task_id: str) -> None:
    effect(f"report {task_id}")


@app.task(name="lettered", idempotent={"dead_letters": True})
def lettered(order: int) -> None:
    effect(f"lettered {order}")
    raise OSError("no connection")


@app.task(name="pickled", idempotent={"payload": "order"}, serializer="pickle")
def pickled(order: int, of: object) -> str:
    effect(f"pickled {order} {of!r}")
    return repr(of)


@app.task(name="wrong", idempotent=True, autoretry_for=(Exception,))
def wrong(order: int) -> None:
    raise ConfigError("the tariff is missing")


@app.task(name="early", idempotent=True, acks_late=False)
def early(order: int) -> None: ...


@app.task(name="plain")
def plain(order: int) -> int:
    effect(f"plain {order}")
    return order
