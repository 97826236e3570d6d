"""`make demo`: a storm of payment requests, two workers killed, and every payment charged once.

Read `worker.py` first: it pays with semel's help, as an application would.

    storm.py      the requests that clients send, with all their duplicates and faults
    worker.py     the process that pays
    network.py    the card network and its ledger: the effects, counted outside semel
    staff.py      the worker processes, seen from outside; kills those that stand still
    clients.py    the clients, who send requests until they are answered
    audit.py      compares what the ledger, the store and the clients say
    place.py      the folder where it all happens
    screen.py     progress bars and a table
"""
