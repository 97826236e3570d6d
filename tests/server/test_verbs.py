def test_one_attempt_from_start_to_finish(service):
    running = service()
    run = running.post("start", scope="orders", key="k-1", payload={"a": 1})
    assert (run.status, run.data["status"], run.data["attempt"]) == (200, "run", 1)
    owner = run.data["owner"]
    assert running.post("renew", scope="orders", key="k-1", owner=owner).data["status"] == "renewed"
    assert running.post("finish", scope="orders", key="k-1", owner=owner, result=[1]).data == {
        "status": "stored"
    }
    done = running.post("start", scope="orders", key="k-1", payload={"a": 1})
    assert done.data == {"status": "done", "attempt": 1, "result": [1]}
    assert running.stop() == 0
